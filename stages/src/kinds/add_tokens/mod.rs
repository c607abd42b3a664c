//! `uses: add_tokens`: a model and its tokenizer with further tokens, whose rows in the embedding and the head are the
//! mean of the others.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use engine::artifact::{Facts, Output};
use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads};
use model::checkpoint::{DEFAULT_MAX_SHARD_BYTES, Flush};
use model::config::Architecture;
use model::merge::Progress;
use model::resize::{ResizeError, ResizeOptions};

use crate::compute::aware;
use crate::compute::checkpoint::{self, ADDED_TOKENS, CHAT_TEMPLATE, CONFIG, QUANTIZATION, SAVED_TEMPLATE};
use crate::data::artifact::{Model, OutputKind, Tokenizer};
use crate::data::prompt::PROMPT;
use crate::data::tokenizer::{AddTokensError, NewToken, add_tokens};
use crate::forecast::PROCESS_BYTES;

/// What a pipeline file may say under `with:` for `uses: add_tokens`.
#[derive(Parameters, Debug)]
pub struct AddTokens {
    /// The model, with its tokenizer.
    #[semantic]
    pub model: Input<Model>,
    /// Strings that become one token each, wherever they occur.
    #[semantic(default)]
    pub added_tokens: Vec<String>,
    /// Strings that become special tokens, such as end-of-turn tokens: chat templates produce them, the same string in
    /// the data does not, and decoded text omits them.
    #[semantic(default)]
    pub added_special_tokens: Vec<String>,
}

impl AddTokens {
    /// In the order of their ids.
    fn tokens(&self) -> Vec<NewToken> {
        let of = |texts: &[String], special| {
            texts.iter().map(move |text| NewToken { content: text.clone(), special }).collect::<Vec<_>>()
        };
        [of(&self.added_tokens, false), of(&self.added_special_tokens, true)].concat()
    }
}

impl StageKind for AddTokens {
    const NAME: &'static str = "add_tokens";
    const VERSION: u32 = 3; // 3: as `merge` 3.
    const ABOUT: &'static str = "Adds tokens to a model and its tokenizer.";
    const ALSO_CALLED: &'static [&'static str] = &["resize_token_embeddings", "added_tokens", "new_tokens"];
}

impl Stage for AddTokens {
    fn outputs(&self) -> Vec<Output> {
        vec![Model::output("model"), Tokenizer::output("tokenizer")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let bad = |field: &str, message: String, label: &str| {
            Problem::error("bad-value", span, message, label).at(field.to_owned())
        };
        let mut problems = Vec::new();
        let tokens = self.tokens();
        if tokens.is_empty() {
            let message = "`added_tokens` and `added_special_tokens` are both empty".to_owned();
            problems.push(bad("added_tokens", message, "nothing is added"));
        }
        let mut seen = BTreeSet::new();
        for NewToken { content, special } in &tokens {
            let field = if *special { "added_special_tokens" } else { "added_tokens" };
            if content.trim().is_empty() {
                problems.push(bad(field, format!("`{field}` has a token without text"), "white space"));
            } else if !seen.insert(content) {
                problems.push(bad(field, format!("`{content}` is added twice"), "named before"));
            }
        }
        let config = self.model.reference.facts_in(inputs).and_then(|facts| facts.get(CONFIG));
        if let Some(method) = config.and_then(|config| config.get(QUANTIZATION)?.get("quant_method")) {
            let message = format!("the model's weights are stored quantised (`{}`)", method.as_str().unwrap_or("?"));
            let problem = bad("model", message, "quantised already");
            problems.push(problem.with_help("add the tokens to the model before it was quantised"));
        } else if let Some(Ok(Architecture::Transformers(_))) =
            config.map(|config| Architecture::from_json(&config.to_string()))
        {
            let message = "`add_tokens` is for models that are computed natively".to_owned();
            problems.push(bad("model", message, "of another family"));
        }
        problems
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast { peak_memory_bytes: Some(PROCESS_BYTES), ..Forecast::default() };
        let base = &self.model.reference;
        // How large the vocabulary becomes is known when the tokenizer is read.
        let kept = checkpoint::config_facts().filter(|name| !["vocab_size", CONFIG].contains(name));
        forecast.pass("model", ahead, base, kept.chain([PROMPT, SAVED_TEMPLATE]));
        forecast.pass("tokenizer", ahead, base, [CHAT_TEMPLATE]);
        forecast
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let base = context.open(&self.model)?;
        if checkpoint::config(&base.folder)?.contains_key(QUANTIZATION) {
            return Err(StageError::new(Cause::BadParameters, "the model's weights are stored quantised")
                .with_help("add the tokens to the model before it was quantised"));
        }
        if aware::is_aware(&base.folder) {
            let message = "the model was trained for 4-bit weights (QAT), whose scales are of the rows that it has";
            return Err(StageError::new(Cause::BadParameters, message)
                .with_help("add the tokens to the model before quantisation-aware training"));
        }
        let tokens = self.tokens();
        let mut draft = context.create("model")?;
        checkpoint::carry_along(&base.folder, &draft.folder)?;
        let before = add_tokens(&draft.folder, &tokens).map_err(unusable)?;
        let mut observe = |Progress { done, total }| {
            context.progress("bytes", done, Some(total), Some("adding rows".to_owned()));
            if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let options = ResizeOptions { max_shard_bytes: DEFAULT_MAX_SHARD_BYTES, flush: Flush::Later };
        let sizes = [before as usize, tokens.len()];
        let vocab_size = model::resize::add_tokens(&base.folder, &draft.folder, sizes, options, &mut observe);
        let vocab_size = vocab_size.map_err(failure)?;
        draft.begin_flush()?;
        let ids: Vec<u32> = (before..).take(tokens.len()).collect();

        let tokenizer_draft = context.create("tokenizer")?;
        checkpoint::copy_tokenizer(&draft.folder, &tokenizer_draft.folder)?;
        let mut facts: Facts = checkpoint::facts(&mut draft)?;
        facts.insert(ADDED_TOKENS.to_owned(), ids.clone().into());
        let of_base = |name: &str| Some((name.to_owned(), base.description.facts.get(name)?.clone()));
        facts.extend([PROMPT, SAVED_TEMPLATE].into_iter().filter_map(of_base));
        let mut tokenizer_facts = Facts::new();
        tokenizer_facts.insert("vocab_size".to_owned(), (before as usize + tokens.len()).into());
        if let Some(template) = facts.get(CHAT_TEMPLATE) {
            tokenizer_facts.insert(CHAT_TEMPLATE.to_owned(), template.clone());
        }
        let named = ids.iter().zip(&tokens).map(|(id, token)| format!("`{}` {id}", token.content));
        let named: Vec<String> = named.collect();
        context.report(format!("{}; the embedding has {vocab_size} rows", named.join(", ")));
        context.seal(tokenizer_draft, tokenizer_facts, None)?;
        context.seal(draft, facts, None)
    }
}

fn unusable(error: AddTokensError) -> StageError {
    let cause = match &error {
        AddTokensError::Write { .. } => Cause::Machine,
        AddTokensError::There { .. } => Cause::BadParameters,
        AddTokensError::Tokenizer(_) | AddTokensError::NotOne { .. } => Cause::BadData,
    };
    StageError::new(cause, "the tokens cannot be added").with_source(error)
}

fn failure(error: ResizeError) -> StageError {
    let cause = match &error {
        ResizeError::Write(_) => Cause::Machine,
        ResizeError::Stopped => Cause::Cancelled,
        _ => Cause::BadData,
    };
    StageError::new(cause, "the model gets no rows for the tokens").with_source(error)
}
