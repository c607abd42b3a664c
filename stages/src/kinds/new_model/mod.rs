//! Makes a model from nothing: a llama-shaped decoder with random weights, and a tokenizer trained on rows of text.

mod bpe;

use engine::artifact::{Facts, Output};
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind};
use model::config::Config;
use model::init::NewModel as Shape;

use crate::compute::checkpoint;
use crate::data::artifact::{Message, Model, OutputKind, Row, Rows, RowsReader, Said, Tokenizer};

/// Text that the tokenizer is trained on at most, in bytes: more changes few merges and costs memory.
const MOST_TEXT_BYTES: usize = 64 << 20;

/// The most ids of a model that can be read. A vocabulary is a maximum, and more are not refused: the text may have
/// pairs for fewer.
const MOST_IDS: usize = 1 << 24;

/// What a pipeline file may say under `with:` for `uses: new_model`. The names of the shape are those of a published
/// `config.json`.
#[derive(Parameters, Debug)]
pub struct NewModel {
    /// Rows whose text the tokenizer is trained on: the first 64 MiB.
    #[semantic]
    pub text: Input<Rows>,
    /// Maximum vocabulary size of the tokenizer; the model's is that of the trained tokenizer.
    #[semantic(range = 260..)]
    pub vocab_size: usize,
    /// Width of the residual stream.
    #[semantic(range = 1..)]
    pub hidden_size: usize,
    /// Width of the MLP.
    #[semantic(range = 1..)]
    pub intermediate_size: usize,
    /// Decoder layers.
    #[semantic(range = 1..)]
    pub num_hidden_layers: usize,
    /// Query heads.
    #[semantic(range = 1..)]
    pub num_attention_heads: usize,
    /// Key and value heads; default: as many as query heads.
    #[semantic(range = 1..)]
    pub num_key_value_heads: Option<usize>,
    /// Width of a head; default: `hidden_size / num_attention_heads`.
    #[semantic(range = 1..)]
    pub head_dim: Option<usize>,
    /// Maximum number of positions.
    #[semantic(default = 2048, range = 1..)]
    pub max_position_embeddings: usize,
    /// Base of the rotary embedding.
    #[semantic(default = 10_000.0, range = 1.0..)]
    pub rope_theta: f64,
    /// The epsilon of the norms.
    #[semantic(default = 1e-5, range = 0.0..)]
    pub rms_norm_eps: f64,
    /// Whether the LM head shares the weights of the token embedding.
    #[semantic(default = true)]
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    #[semantic(default = 0.02, range = 0.0..)]
    pub initializer_range: f64,
    /// Random seed of the weights.
    #[semantic(default = 0)]
    pub seed: u64,
}

impl NewModel {
    /// The most ids that the tokenizer may have.
    fn most_ids(&self) -> usize {
        self.vocab_size.min(MOST_IDS)
    }

    /// Checks that a model of this shape can be made, and read by the stages that get it.
    fn check_shape(&self) -> Result<(), String> {
        let shape = self.shape(self.most_ids());
        shape.check().map_err(|error| error.to_string())?;
        let config = shape.config(safetensors::Dtype::F32).map_err(|error| error.to_string())?;
        let read = Config::from_json(&serde_json::Value::Object(config).to_string());
        read.map(drop).map_err(|error| error.to_string())
    }

    fn shape(&self, vocab_size: usize) -> Shape {
        Shape {
            vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim,
            max_position_embeddings: self.max_position_embeddings,
            rope_theta: self.rope_theta,
            rms_norm_eps: self.rms_norm_eps,
            tie_word_embeddings: self.tie_word_embeddings,
            initializer_range: self.initializer_range,
            bos_token_id: None,
            eos_token_id: None,
            pad_token_id: None,
        }
    }
}

impl StageKind for NewModel {
    const NAME: &'static str = "new_model";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Makes a decoder with random weights and trains a tokenizer for it.";
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = {
        const HEADS: &str = "did you mean `num_attention_heads`?";
        &[("num_heads", HEADS), ("n_heads", HEADS), ("n_head", HEADS)]
    };
}

impl Stage for NewModel {
    fn outputs(&self) -> Vec<Output> {
        vec![Model::output("model"), Tokenizer::output("tokenizer")]
    }

    fn check(&self, _: &InputFacts, span: Span) -> Vec<Problem> {
        match self.check_shape() {
            Ok(()) => Vec::new(),
            Err(message) => vec![Problem::error("bad-shape", span, message, "this shape cannot be built")],
        }
    }

    fn forecast(&self, _: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast::default();
        let Ok(config) = self.shape(self.most_ids()).config(safetensors::Dtype::F32) else { return forecast };
        if let Ok(shape) = Config::from_json(&serde_json::Value::Object(config.clone()).to_string()) {
            let weights = shape.matrix_weights();
            forecast.figure("parameters", weights, format!("{weights}, if the text has pairs for every id"));
            forecast.disk_bytes = Some(weights * 4);
        }
        forecast.facts("model", checkpoint::facts_of_config(config));
        forecast.fact("tokenizer", "vocab_size", self.most_ids());
        ["model", "tokenizer"].into_iter().for_each(|output| forecast.fact(output, checkpoint::CHAT_TEMPLATE, false));
        forecast
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let texts = read_texts(self, context)?;
        let tokenizer_draft = context.create("tokenizer")?;
        let tokenizer = bpe::train(&texts, self.most_ids(), self.max_position_embeddings, &tokenizer_draft.folder)
            .or_fail(Cause::Internal, || "cannot train the tokenizer".to_owned())?;
        if tokenizer.vocab_size < self.vocab_size {
            context.warn(format!(
                "the text has pairs for {} of the {} requested ids; the model gets {}",
                tokenizer.vocab_size, self.vocab_size, tokenizer.vocab_size
            ));
        }

        let shape = Shape {
            bos_token_id: Some(tokenizer.bos_token_id),
            eos_token_id: Some(tokenizer.eos_token_id),
            pad_token_id: Some(tokenizer.pad_token_id),
            ..self.shape(tokenizer.vocab_size)
        };
        let mut model_draft = context.create("model")?;
        shape
            .write(&model_draft.folder, self.seed, safetensors::Dtype::F32)
            .or_fail(Cause::Machine, || "cannot write the model".to_owned())?;
        checkpoint::carry_along(&tokenizer_draft.folder, &model_draft.folder)?;

        let mut facts = Facts::new();
        facts.insert("vocab_size".to_owned(), tokenizer.vocab_size.into());
        facts.insert(checkpoint::CHAT_TEMPLATE.to_owned(), false.into());
        context.seal(tokenizer_draft, facts, None)?;
        let facts = checkpoint::facts(&mut model_draft)?;
        context.seal(model_draft, facts, None)
    }
}

/// The text of the rows, up to a limit.
fn read_texts(params: &NewModel, context: &mut StageContext) -> Result<Vec<String>, StageError> {
    let mut rows = RowsReader::open(&context.open(&params.text)?)?;
    let mut texts = Vec::new();
    let mut bytes = 0;
    for row in rows.iter() {
        let added = match row? {
            Row::Text(text) => vec![text],
            Row::Columns(columns) => columns.into_values().collect(),
            Row::Messages(messages) => messages.iter().flat_map(Message::texts).map(str::to_owned).collect(),
            Row::Judged(judged) => judged.parts().flat_map(Said::texts).map(str::to_owned).collect(),
        };
        bytes += added.iter().map(String::len).sum::<usize>();
        texts.extend(added);
        if bytes > MOST_TEXT_BYTES {
            context.warn(format!("the tokenizer is trained on the first {} rows, 64 MiB of text", texts.len()));
            break;
        }
    }
    if bytes == 0 {
        return Err(StageError::bad_data("the rows contain no text to train a tokenizer on"));
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use engine::file::tree::Node;
    use engine::parameter::{Parameter, Reader};
    use serde_json::json;

    use super::*;

    fn refused(field: &str, value: u64) -> Option<String> {
        let mut with = json!({
            "text": "rows", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 4, "head_dim": 8,
        });
        with[field] = value.into();
        let model = NewModel::read(&Node::from_json(&with), &mut Reader::default()).unwrap();
        let problems = model.check(&InputFacts::default(), Span::default());
        assert!(problems.iter().all(|problem| problem.code == "bad-shape"));
        problems.into_iter().next().map(|problem| problem.message)
    }

    #[test]
    fn a_shape_that_no_stage_could_read_is_refused() {
        assert_eq!(refused("num_hidden_layers", 4096), None);
        for layers in [4097, 100_000_000] {
            let message = refused("num_hidden_layers", layers).unwrap();
            assert!(message.contains(&format!("`num_hidden_layers` of the configuration is {layers}")), "{message}");
            assert!(message.contains("no model has more than 4096"), "{message}");
        }
        for (field, value) in [
            ("hidden_size", 1 << 20),
            ("intermediate_size", 1 << 30),
            ("head_dim", 1 << 20),
            ("max_position_embeddings", 1 << 40),
        ] {
            let message = refused(field, value).unwrap();
            assert!(message.contains(&format!("`{field}`")), "{message}");
        }
        assert!(refused("num_key_value_heads", 3).unwrap().contains("does not divide"));
    }

    #[test]
    fn a_vocabulary_is_a_maximum() {
        assert_eq!(refused("vocab_size", 9_999_999_999), None);
        let json = |vocab_size: usize| {
            let shape = Shape { vocab_size, ..Shape::default() };
            serde_json::Value::Object(shape.config(safetensors::Dtype::F32).unwrap()).to_string()
        };
        assert!(Config::from_json(&json(MOST_IDS)).is_ok());
        assert!(Config::from_json(&json(MOST_IDS + 1)).is_err());
    }
}
