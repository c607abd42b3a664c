//! A model is asked in the tokens it was taught by: `generate` and `evaluate` read what `tokenize` put before the
//! response.

use engine::test_bench::TestBench;
use model::generation::{Generator, Options, Request};
use model::sampling::Sampling;
use serde_json::{Value, json};
use stages::data::artifact::{IGNORE_INDEX, Message, Row, RowsFacts, RowsWriter, TokenRow, TokensReader};
use stages::data::prompt::Template;
use stages::kinds::evaluate::Evaluate;
use stages::kinds::generate::Generate;
use stages::kinds::tokenize::Tokenize;
use test_harness::test;

use crate::tiny::{self, PAIRS, TEMPLATE, Tiny};

const MAX_NEW_TOKENS: usize = 6;

/// Between its turns stand no special tokens, so that other pieces would be other tokens.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}\
                             {% if add_generation_prompt %}assistant: {% endif %}";

/// Rows of one shape, asked and taught under the same parameters.
struct Case<'a> {
    tiny: &'a Tiny,
    bench: TestBench,
    prompt: Value,
    _rows: tempfile::TempDir,
}

impl<'a> Case<'a> {
    fn new(tiny: &'a Tiny, facts: RowsFacts, rows: Vec<Row>, prompt: Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = RowsWriter::create(folder.path(), facts);
        rows.into_iter().for_each(|row| writer.write(row).unwrap());
        let (facts, _) = writer.finish(0).unwrap();
        let bench = tiny.bench().input("data.rows", "rows", folder.path(), facts).unwrap();
        Self { tiny, bench, prompt, _rows: folder }
    }

    fn with(&self, mut parameters: Value) -> Value {
        parameters.as_object_mut().unwrap().extend(self.prompt.as_object().unwrap().clone());
        parameters
    }

    fn taught(&self, train_on: &str) -> Vec<TokenRow> {
        let parameters = json!({"dataset": "data", "tokenizer": "base", "on_no_target": "keep", "train_on": train_on});
        let outputs = self.bench.run::<Tokenize>(self.with(parameters)).unwrap();
        TokensReader::open(&outputs["tokens"]).unwrap().iter().collect::<Result<_, _>>().unwrap()
    }

    /// What the model answers to exactly these tokens.
    fn answers_to(&self, prompts: &[Vec<u32>]) -> Vec<String> {
        let (decoder, tokenizer) = (self.tiny.decoder(), self.tiny.open_tokenizer());
        let options = Options {
            max_new_tokens: MAX_NEW_TOKENS,
            min_new_tokens: 0,
            stop_token_ids: tokenizer.stop_token_ids(),
            sampling: Sampling::GREEDY,
            batch_size: 1,
        };
        let requests: Vec<Request<'_>> =
            prompts.iter().enumerate().map(|(row, prompt)| Request { prompt, row: row as u64 }).collect();
        let completions = Generator::new(&decoder, options).unwrap().complete(&requests, &mut ()).unwrap();
        completions.iter().map(|completion| tokenizer.decode(&completion.ids).unwrap()).collect()
    }

    /// `generate` reads these prompts, and so does `evaluate` where there are references.
    fn is_asked_by(&self, prompts: &[Vec<u32>], has_references: bool) {
        let expected = self.answers_to(prompts);
        let parameters = json!({"model": "base", "prompts": "data", "max_new_tokens": MAX_NEW_TOKENS});
        let samples = &self.bench.run::<Generate>(self.with(parameters)).unwrap()["samples"];
        let path = samples.folder.join("samples.parquet");
        let lengths: Vec<Option<u64>> = prompts.iter().map(|prompt| Some(prompt.len() as u64)).collect();
        assert_eq!(tiny::counts(&path, "prompt_tokens"), lengths, "{}", self.prompt);
        assert_eq!(tiny::texts(&path, "completion"), expected, "{}", self.prompt);
        if has_references {
            let parameters = json!({
                "model": "base", "data": "data", "metrics": ["exact_match"], "max_new_tokens": MAX_NEW_TOKENS,
            });
            let metrics = &self.bench.run::<Evaluate>(self.with(parameters)).unwrap()["metrics"];
            let predictions = tiny::texts(&metrics.folder.join("examples.parquet"), "prediction");
            assert_eq!(predictions, expected.iter().map(|text| text.trim()).collect::<Vec<_>>(), "{}", self.prompt);
        }
    }
}

/// The tokens before the last stretch that is learned.
fn before_the_response(row: &TokenRow) -> Vec<u32> {
    let end = row.labels.iter().rposition(|label| *label != IGNORE_INDEX).unwrap();
    let begin = row.labels[..end].iter().rposition(|label| *label == IGNORE_INDEX).unwrap() + 1;
    row.input_ids[..begin].to_vec()
}

#[test]
fn columns_are_asked_as_they_are_taught() {
    let tiny = Tiny::new();
    let eos = tiny.open_tokenizer().special_tokens()["eos_token"].clone();
    let mut lengths = Vec::new();
    for prompt in
        [json!({}), json!({"add_bos": true}), json!({"add_bos": false}), json!({"sanitize_control_tokens": false})]
    {
        let columns = ["question", "answer"].map(str::to_owned);
        let facts = RowsFacts::prompt(Template::custom(TEMPLATE).unwrap(), "answer", columns);
        let rows = PAIRS.iter().filter(|(_, answer)| !answer.is_empty()).map(|(question, answer)| {
            let columns = [("question", format!("{question}{eos}")), ("answer", (*answer).to_owned())];
            Row::Columns(columns.map(|(name, text)| (name.to_owned(), text)).into())
        });
        let case = Case::new(&tiny, facts, rows.collect(), prompt);
        let prompts: Vec<Vec<u32>> = case.taught("assistant").iter().map(before_the_response).collect();
        case.is_asked_by(&prompts, true);
        lengths.push(prompts[0].len());
    }
    // Else the parameters change nothing, and the test says nothing about them.
    assert_eq!(lengths[1], lengths[2] + 1);
    assert!(lengths[3] < lengths[0], "{lengths:?}");
}

#[test]
fn conversations_are_asked_as_they_are_taught() {
    let tiny = Tiny::new();
    let eos = tiny.open_tokenizer().special_tokens()["eos_token"].clone();
    let turns = |user: &str, assistant: &str| [Message::new("user", user), Message::new("assistant", assistant)];
    let rows = || {
        let single = turns(&eos, "I am small.");
        let several = [turns("Who are you?", "a model."), turns("Who else?", "Five rows.")].concat();
        let mut instructed = turns("Why?", "I am small.").to_vec();
        instructed.insert(0, Message::new("system", "Be kind."));
        instructed.push(Message::new("user", "No?"));
        [single.to_vec(), several, instructed].map(Row::Messages).to_vec()
    };
    for (system_prompt, add_bos) in [(None, None), (Some("Be brief."), None), (None, Some(true))] {
        let prompt = json!({"chat_template": CHAT_TEMPLATE, "system_prompt": system_prompt, "add_bos": add_bos});
        let case = Case::new(&tiny, RowsFacts::messages(), rows(), prompt);
        let prompts: Vec<Vec<u32>> = case.taught("assistant").iter().map(before_the_response).collect();
        let tokenizer = tiny.open_tokenizer();
        let in_one_piece = tokenizer.encode(&tokenizer.decode_with_special(&prompts[1]).unwrap()).unwrap();
        assert_ne!(in_one_piece, prompts[1], "the test needs borders that decide tokens");
        case.is_asked_by(&prompts, true);
        let of_last: Vec<Vec<u32>> = case.taught("last").iter().map(before_the_response).collect();
        assert_eq!(of_last, prompts, "what is learned decides no token");
    }
}

#[test]
fn texts_are_asked_as_they_are_taught() {
    let tiny = Tiny::new();
    for add_bos in [None, Some(true), Some(false)] {
        let prompt = json!({"add_bos": add_bos, "add_eos": false});
        let rows = PAIRS.iter().map(|(question, _)| Row::Text((*question).to_owned())).collect();
        let case = Case::new(&tiny, RowsFacts::text(), rows, prompt);
        let prompts: Vec<Vec<u32>> = case.taught("assistant").into_iter().map(|row| row.input_ids).collect();
        case.is_asked_by(&prompts, false);
    }
}
