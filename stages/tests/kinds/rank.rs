//! The stage kind `rank`: a model's own answers become what is learned.

use std::fs;

use engine::context::Artifact;
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{Message, Row, RowsFacts, RowsReader, RowsWriter, Said};
use stages::data::prompt::Template;
use stages::kinds::generate::Generate;
use stages::kinds::rank::Rank;
use stages::kinds::tokenize::Tokenize;
use test_harness::test;

use crate::tiny::{self, PAIRS, TEMPLATE, Tiny};

/// Answers drawn from the tiny model to its own rows, three to each.
fn drawn(tiny: &Tiny, prompts: &str) -> Artifact {
    let parameters = json!({
        "model": "base", "prompts": prompts, "samples_per_prompt": 3, "temperature": 1.5, "max_new_tokens": 6,
    });
    tiny.bench().run::<Generate>(parameters).unwrap().remove("samples").unwrap()
}

/// The bench with what another one made.
fn with(bench: TestBench, name: &str, made: &Artifact) -> TestBench {
    let folder = tempfile::tempdir().unwrap();
    for file in fs::read_dir(&made.folder).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    bench.input(name, &made.description.kind, folder.path(), made.description.facts.clone()).unwrap()
}

/// The bench with these answers, and with numbers for them.
fn with_scores(bench: TestBench, samples: &Artifact, scores: &str) -> TestBench {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("scores.jsonl"), scores).unwrap();
    let bench = with(bench, "samples.samples", samples);
    bench.input("scores.scores", "files", folder.path(), serde_json::Map::new()).unwrap()
}

fn rank(bench: &TestBench, mut more: Value) -> Result<Artifact, engine::error::StageError> {
    let mut parameters = json!({
        "prompts": "rows", "samples": "samples", "score": {"name": "given", "scores": "scores"}, "on_cut_off": "keep",
    });
    parameters.as_object_mut().unwrap().append(more.as_object_mut().unwrap());
    Ok(bench.run::<Rank>(parameters)?.remove("rows").unwrap())
}

fn rows(artifact: &Artifact) -> Vec<Row> {
    RowsReader::open(artifact).unwrap().iter().collect::<Result<_, _>>().unwrap()
}

/// 0, 1, 2 for the answers to each prompt, so that the last is the best.
fn rising() -> String {
    (0..PAIRS.len() * 3).map(|sample| format!("{}\n", sample % 3)).collect()
}

#[test]
fn several_answers_are_drawn_apart_and_the_first_is_that_of_one() {
    let tiny = Tiny::new();
    let path = drawn(&tiny, "rows").folder.join("samples.parquet");
    let several = tiny::texts(&path, "completion");
    let one = json!({"model": "base", "prompts": "rows", "temperature": 1.5, "max_new_tokens": 6});
    let one = tiny.bench().run::<Generate>(one).unwrap().remove("samples").unwrap();
    let one = tiny::texts(&one.folder.join("samples.parquet"), "completion");
    assert_eq!(several.len(), 3 * one.len());
    assert_eq!(several.iter().step_by(3).collect::<Vec<_>>(), one.iter().collect::<Vec<_>>());
    assert!(several.chunks(3).any(|answers| answers[0] != answers[1] && answers[1] != answers[2]), "{several:?}");
    let numbers: Vec<Option<u64>> = (0..several.len() as u64).map(|sample| Some(sample % 3)).collect();
    assert_eq!(tiny::counts(&path, "sample"), numbers);
}

#[test]
fn pairs_hold_the_prompt_as_it_was_asked_and_are_read_as_preferences() {
    let tiny = Tiny::new();
    let samples = drawn(&tiny, "rows");
    let completions = tiny::texts(&samples.folder.join("samples.parquet"), "completion");
    let bench = with_scores(tiny.bench(), &samples, &rising());
    let made = rank(&bench, json!({})).unwrap();
    let expected = PAIRS.iter().zip(completions.chunks(3)).filter(|(_, answers)| answers[0] != answers[2]);
    let expected: Vec<[String; 3]> = expected
        .map(|((question, _), answers)| {
            [TEMPLATE.replace("{question}", question), answers[2].clone(), answers[0].clone()]
        })
        .collect();
    let found: Vec<[String; 3]> = rows(&made)
        .into_iter()
        .map(|row| {
            let Row::Judged(judged) = row else { panic!("{row:?} is no pair") };
            let text = |said: Option<Said>| said.unwrap().texts().concat();
            [text(Some(judged.prompt)), text(judged.chosen), text(judged.rejected)]
        })
        .collect();
    assert_eq!(found, expected);
    assert!(found.len() > 1, "the test needs answers that differ");
    let bench = with(tiny.bench(), "pairs.rows", &made);
    let tokens = bench.run::<Tokenize>(json!({"dataset": "pairs", "tokenizer": "base"})).unwrap();
    assert_eq!(tokens["tokens"].description.facts["shape"], "pairs");
}

#[test]
fn the_best_answer_takes_the_place_of_the_rows_own() {
    let tiny = Tiny::new();
    let samples = drawn(&tiny, "rows");
    let completions = tiny::texts(&samples.folder.join("samples.parquet"), "completion");
    // The second prompt's answers have no score, and the third's are all too bad.
    let scores: String = (0..PAIRS.len() * 3)
        .map(|sample| match sample / 3 {
            1 => "null\n".to_owned(),
            2 => "{\"score\": -1}\n".to_owned(),
            _ => format!("{}\n", (sample + 1) % 3),
        })
        .collect();
    let bench = with_scores(tiny.bench(), &samples, &scores);
    let made = rank(&bench, json!({"make": "best", "min_score": 0})).unwrap();
    let answers: Vec<String> = rows(&made)
        .into_iter()
        .map(|row| match row {
            Row::Columns(mut columns) => columns.remove("answer").unwrap(),
            other => panic!("{other:?} has no columns"),
        })
        .collect();
    let expected = completions.chunks(3).enumerate().filter(|(prompt, _)| ![1, 2].contains(prompt));
    assert_eq!(answers, expected.map(|(_, answers)| answers[1].clone()).collect::<Vec<_>>());
    let facts = RowsFacts::from_facts(&made.description.facts).unwrap();
    assert_eq!(facts.template, Some(Template::custom(TEMPLATE).unwrap()));
    assert_eq!(facts.dropped, 2);
}

#[test]
fn conversations_are_answered_behind_their_last_question() {
    let tiny = Tiny::new();
    let folder = tempfile::tempdir().unwrap();
    let mut writer = RowsWriter::create(folder.path(), RowsFacts::messages());
    let turns = [("user", "Who are you?"), ("assistant", "a model."), ("user", "Why?"), ("assistant", "I am small.")];
    let turns: Vec<Message> = turns.iter().map(|(role, text)| Message::new(role, text)).collect();
    writer.write(Row::Messages(turns.clone())).unwrap();
    let (facts, _) = writer.finish(0).unwrap();
    let bench = || tiny.bench().input("chats.rows", "rows", folder.path(), facts.clone()).unwrap();
    let ask = json!({
        "model": "base", "prompts": "chats", "samples_per_prompt": 2, "temperature": 1.5, "max_new_tokens": 6,
        "chat_template": "chatml",
    });
    let samples = bench().run::<Generate>(ask).unwrap().remove("samples").unwrap();
    let completions = tiny::texts(&samples.folder.join("samples.parquet"), "completion");
    let bench = with_scores(bench(), &samples, "0\n1\n");
    let made = rank(&bench, json!({"prompts": "chats"})).unwrap();
    let made = rows(&made);
    let [Row::Judged(judged)] = made.as_slice() else { panic!("no pair") };
    assert_eq!(judged.prompt, Said::Turns(turns[..3].to_vec()));
    assert_eq!(judged.chosen, Some(Said::Turns(vec![Message::new("assistant", &completions[1])])));
    let made = rank(&bench, json!({"prompts": "chats", "make": "best"})).unwrap();
    let made = rows(&made);
    let [Row::Messages(messages)] = made.as_slice() else { panic!("no conversation") };
    assert_eq!(messages[..3], turns[..3]);
    assert_eq!(messages[3], Message::new("assistant", &completions[1]));
}

#[test]
fn answers_are_compared_with_the_response_of_their_row() {
    let tiny = Tiny::new();
    let samples = drawn(&tiny, "rows");
    let bench = with_scores(tiny.bench(), &samples, "");
    let nothing_learned = |on_cut_off: &str| {
        let message = rank(&bench, json!({"score": "exact_match", "on_cut_off": on_cut_off})).unwrap_err().to_string();
        assert!(message.contains("there is nothing to train on"), "{message}");
        message
    };
    // What a tiny model draws equals no response, and comes to no end.
    assert!(nothing_learned("keep").contains("5 prompts without two answers whose scores differ enough"));
    assert!(nothing_learned("drop").contains("15 completions cut off"));
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let tiny = Tiny::new();
    let samples = drawn(&tiny, "rows");
    let fails = |bench: &TestBench, more: Value, expected: &str| {
        let message = rank(bench, more).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    let bench = with_scores(tiny.bench(), &samples, "1\n2\n");
    fails(&bench, json!({}), "has 2 scores, and there are more samples");
    let bench = with_scores(tiny.bench(), &samples, &(rising() + "1\n"));
    fails(&bench, json!({}), "has more scores than there are samples");
    let bench = with_scores(tiny.bench(), &samples, "good\n");
    fails(&bench, json!({}), "line 1 of");
    let bench = with_scores(tiny.bench(), &samples, &"1\n".repeat(PAIRS.len() * 3));
    fails(&bench, json!({}), "there is nothing to train on");
    let texts = json!({
        "model": "base", "prompts": ["Who?"], "samples_per_prompt": 3, "temperature": 1.0, "max_new_tokens": 6,
    });
    let of_texts = tiny.bench().run::<Generate>(texts).unwrap().remove("samples").unwrap();
    let bench = with_scores(tiny.bench(), &of_texts, &rising());
    fails(&bench, json!({}), "completions of other prompts");
}
