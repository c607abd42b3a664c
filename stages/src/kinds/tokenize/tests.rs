//! The stage, against the golden cases and its own rules.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use engine::forecast::Ahead;
use engine::test_bench::TestBench;
use serde_json::{Value, json};

use super::*;
use crate::data::artifact::{Message, Row, RowsWriter, TokenRow, TokensReader};
use crate::data::prompt::Template;

fn golden(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data")).join(path)
}

fn golden_json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(path)).unwrap()).unwrap()
}

/// Tokenizes rows on a bench.
fn tokenize(
    tokenizer: &str,
    facts: RowsFacts,
    rows: impl IntoIterator<Item = Row>,
    mut with: Value,
) -> Result<(TokensFacts, Vec<TokenRow>), StageError> {
    let folder = tempfile::tempdir().unwrap();
    let (source, facts) = written(folder.path(), facts, &rows.into_iter().collect::<Vec<_>>());
    with["dataset"] = "articles".into();
    with["tokenizer"] = "base".into();
    let outputs = TestBench::new(folder.path())
        .input("articles.rows", "rows", &source, facts)?
        .input("base.tokenizer", "tokenizer", &golden("tokenizers").join(tokenizer), Default::default())?
        .threads(2)
        .run::<Tokenize>(with)?;
    let mut reader = TokensReader::open(&outputs["tokens"]).unwrap();
    let rows = reader.iter().collect::<Result<_, _>>().unwrap();
    Ok((reader.facts().clone(), rows))
}

/// The folder and the facts of a table of rows.
fn written(folder: &Path, facts: RowsFacts, rows: &[Row]) -> (PathBuf, Facts) {
    let source = folder.join("rows");
    std::fs::create_dir(&source).unwrap();
    let mut writer = RowsWriter::create(&source, facts);
    rows.iter().for_each(|row| writer.write(row.clone()).unwrap());
    (source, writer.finish(0).unwrap().0)
}

/// A row that becomes these tokens again, and how many of them it can be held to. Prompt and response were encoded
/// apart, so each is what its own tokens decode to. A row that was cut off goes on with other words, of which the first
/// may join the last token kept.
fn sft_row(tokenizer: &Tokenizer, expected: &Value) -> (Row, usize) {
    let (tokens, labels) = (ids(&expected["tokens"]), ints(&expected["labels"]));
    let cut = tokens.len() == 512;
    let prompt_tokens = labels.iter().take_while(|label| **label == -100).count();
    let prompt = tokenizer.decode(&tokens[..prompt_tokens]).unwrap();
    let mut output = tokenizer.decode(&tokens[prompt_tokens..]).unwrap();
    let body = prompt.strip_prefix("Summarize this dialogue:\n").unwrap();
    let mut dialogue = body.strip_suffix("\n---\nSummary:\n").unwrap_or(body).to_owned();
    let end = if dialogue == body { &mut dialogue } else { &mut output };
    if cut {
        end.push_str(&" and so on".repeat(20));
    }
    (row(&dialogue, &output), if cut { 500 } else { tokens.len() })
}

fn ints(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    ints(value).into_iter().map(|id| id as u32).collect()
}

fn summarize() -> RowsFacts {
    RowsFacts::prompt(Template::named("summarize").unwrap(), "output", ["dialogue".to_owned(), "output".to_owned()])
}

fn row(dialogue: &str, output: &str) -> Row {
    Row::Columns([("dialogue", dialogue), ("output", output)].map(|(k, v)| (k.to_owned(), v.to_owned())).into())
}

#[test]
fn conversations_become_the_reference_tokens_and_labels() {
    for case in golden_json("chat.json").as_array().unwrap() {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let (facts, rows) =
            tokenize("bytelevel", RowsFacts::messages(), [Row::Messages(messages)], json!({"max_seq_len": 512}))
                .unwrap();
        assert_eq!(rows[0].input_ids, ids(&case["tokens"]));
        assert_eq!(rows[0].labels, ints(&case["labels"]));
        assert_eq!(facts.without_eos, 0, "a turn has an end");
    }
}

#[test]
fn the_question_of_a_conversation_is_the_reference_prompt() {
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let renderer = PromptRenderer::new(&PromptParams::default(), &RowsFacts::messages(), &tokenizer).unwrap();
    for case in golden_json("chat.json").as_array().unwrap() {
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let answer = messages.last().unwrap().content.as_str().unwrap().to_owned();
        let question = renderer.question(&Row::Messages(messages), &tokenizer).unwrap();
        assert_eq!(question.prompt.to_text(&tokenizer).unwrap(), case["prompt_text"].as_str().unwrap());
        assert_eq!(question.reference, Some(answer));
    }
}

/// The files of a folder, by name.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()))
        .collect()
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let rows: Vec<Row> =
        (0..2500).map(|number| row(&"rain fell ".repeat(number % 90), &format!("Summary {number}."))).collect();
    let made = [1, 2, 5].map(|threads| {
        // A store of its own, or the second would take over what the first has made.
        let folder = tempfile::tempdir().unwrap();
        let (source, facts) = written(folder.path(), summarize(), &rows);
        let bench = TestBench::new(folder.path())
            .input("articles.rows", "rows", &source, facts)
            .unwrap()
            .input("base.tokenizer", "tokenizer", &golden("tokenizers/bytelevel"), Default::default())
            .unwrap()
            .threads(threads);
        let with = json!({"dataset": "articles", "tokenizer": "base", "max_seq_len": 128});
        let tokens = bench.run::<Tokenize>(with).unwrap().remove("tokens").unwrap();
        let bench = TestBench::new(folder.path()).input_of("tokens.tokens", &tokens.folder).unwrap().threads(threads);
        let packs = ["next_fit", "best_fit"].map(|strategy| {
            let with = json!({"tokens": "tokens", "max_seq_len": 256, "strategy": strategy});
            let packs = bench.run::<crate::kinds::pack::Pack>(with).unwrap().remove("packs").unwrap();
            (packs.description, files(&packs.folder))
        });
        ((tokens.description, files(&tokens.folder)), packs)
    });
    assert_eq!(made[0].0.1.len(), 2, "a list of parts, and a part");
    assert!(made[0] == made[1] && made[0] == made[2]);
}

/// Tokenizes rows into a store and gives all that was made, and how many rows were taken over.
fn tokenized(store: &Path, rows: &[Row], with: &Value) -> (BTreeMap<String, Vec<u8>>, u64) {
    let folder = tempfile::tempdir().unwrap();
    let (source, facts) = written(folder.path(), summarize(), rows);
    let bench = TestBench::new(store)
        .input("articles.rows", "rows", &source, facts)
        .unwrap()
        .input("base.tokenizer", "tokenizer", &golden("tokenizers/bytelevel"), Default::default())
        .unwrap();
    let mut with = with.clone();
    with["dataset"] = "articles".into();
    with["tokenizer"] = "base".into();
    let (outputs, how) = bench.run_recorded::<Tokenize>(with).unwrap();
    (files(&outputs["tokens"].folder), how["rows_taken_over"].as_u64().unwrap())
}

/// What is done to rows, and its name.
type Edit<'a> = (&'a str, &'a dyn Fn(&mut Vec<Row>));

#[test]
fn rows_that_are_added_changed_or_gone_cost_what_they_alone_cost() {
    let with = json!({"max_seq_len": 48, "on_too_long": "truncate"});
    // Some are cut, some are left out: rows of tokens do not stand where their rows stood.
    let text = |number: usize| row(&"rain fell ".repeat(number % 23), &format!("Summary {number}."));
    let rows: Vec<Row> = (0..1500).map(text).collect();
    let store = tempfile::tempdir().unwrap();
    assert_eq!(tokenized(store.path(), &rows, &with).1, 0);
    assert_eq!(tokenized(store.path(), &rows, &with).1, 1500);

    let edits: [Edit<'_>; 5] = [
        ("appended", &|rows| rows.extend((9000..9015).map(text))),
        ("put in front", &|rows| rows.insert(0, text(9100))),
        ("changed", &|rows| rows[700] = text(9200)),
        ("gone", &|rows| drop(rows.drain(300..303))),
        ("twice", &|rows| rows.extend(rows.clone())),
    ];
    for (what, edit) in edits {
        let mut edited = rows.clone();
        edit(&mut edited);
        let (made, taken_over) = tokenized(store.path(), &edited, &with);
        let (anew, none) = tokenized(tempfile::tempdir().unwrap().path(), &edited, &with);
        assert!(made == anew, "{what}: differs from what is made anew");
        assert_eq!(none, 0);
        let encoded = edited.len() as u64 - taken_over;
        assert!(encoded <= 2 * 512, "{what}: {encoded} of {} rows were encoded", edited.len());
    }
    let other = json!({"max_seq_len": 47, "on_too_long": "truncate"});
    assert_eq!(tokenized(store.path(), &rows, &other).1, 0, "other parameters make other tokens");
}

#[test]
fn how_prompts_were_made_is_stored_with_the_tokens() {
    let with = json!({"add_bos": false, "system_prompt": "Be kind.", "train_on": "all"});
    let (facts, rows) = tokenize("bytelevel", summarize(), [row("Hi.", "Greeting.")], with).unwrap();
    let prompt =
        PromptParams { add_bos: Some(false), system_prompt: Some("Be kind.".to_owned()), ..Default::default() };
    assert_eq!((facts.prompt, facts.train_on), (Some(prompt), Some(TrainOn::All)));
    assert_eq!(rows[0].labels, rows[0].input_ids.iter().map(|id| *id as i32).collect::<Vec<_>>());

    let both = json!({"train_on": "last", "train_on_input": true});
    let error = tokenize("bytelevel", summarize(), [row("Hi.", "Greeting.")], both).unwrap_err();
    assert_eq!(error.cause, Cause::BadParameters);
}

#[test]
fn special_tokens_in_columns_are_plain_text_and_counted() {
    let rows = || [row("Who wrote <|eot_id|>?", "I did.<|end_of_text|>"), row("Hi.", "Greeting.")];
    let (facts, tokens) = tokenize("bytelevel", summarize(), rows(), json!({})).unwrap();
    assert_eq!(facts.sanitized, 1);
    let ends = |row: &TokenRow| row.input_ids.iter().filter(|id| [1, 4].contains(*id)).count();
    assert_eq!(ends(&tokens[0]), 1, "the end of the row alone");
    let (facts, tokens) =
        tokenize("bytelevel", summarize(), rows(), json!({"sanitize_control_tokens": false})).unwrap();
    assert_eq!((facts.sanitized, ends(&tokens[0])), (0, 3));

    // Plain text is often written with its special tokens, and is read as it stands.
    let text = || [Row::Text("<|begin_of_text|>Hi.<|eot_id|>".to_owned())];
    let (facts, tokens) = tokenize("bytelevel", RowsFacts::text(), text(), json!({"add_bos": false})).unwrap();
    assert_eq!((facts.sanitized, tokens[0].input_ids[0], ends(&tokens[0])), (0, 0, 2));
}

#[test]
fn special_tokens_in_roles_are_plain_text_and_counted() {
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt \
                    %}<assistant>{% endif %}";
    let row = |role: &str| {
        Row::Messages(vec![Message::new("user", "a"), Message::new(role, "x"), Message::new("assistant", "b")])
    };
    let rows = [row("narrator<|eot_id|>"), row("narrator")];
    let (facts, rows) = tokenize("bytelevel", RowsFacts::messages(), rows, json!({"chat_template": template})).unwrap();
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let ends = |row: &TokenRow| {
        row.input_ids.iter().filter(|id| tokenizer.decode_with_special(&[**id]).unwrap() == "<|eot_id|>").count()
    };
    assert_eq!((facts.sanitized, ends(&rows[0]), ends(&rows[1])), (1, 3, 3));
}

#[test]
fn a_prompt_that_fills_the_row_is_left_out_or_kept_as_torchtune_does() {
    let rows = || [row(&"word ".repeat(100), "short"), row("Hi.", "Greeting.")];
    let (facts, tokens) = tokenize("bytelevel", summarize(), rows(), json!({"max_seq_len": 48})).unwrap();
    assert_eq!((facts.rows, facts.dropped, facts.fully_masked, facts.truncated), (1, 1, 1, 1));
    assert_eq!(tokens[0].input_ids[0], 0, "BOS first");
    assert_eq!(*tokens[0].input_ids.last().unwrap(), 1, "EOS last");

    let keep = json!({"max_seq_len": 48, "on_no_target": "keep"});
    let (facts, tokens) = tokenize("bytelevel", summarize(), rows(), keep).unwrap();
    assert_eq!((facts.rows, facts.dropped, facts.fully_masked), (2, 0, 1));
    assert_eq!(tokens[0].labels.iter().filter(|label| **label != -100).collect::<Vec<_>>(), [&1]);

    let error = tokenize("bytelevel", summarize(), rows(), json!({"max_seq_len": 48, "on_no_target": "error"}));
    assert!(error.unwrap_err().message.contains("row 1"));
}

#[test]
fn a_long_row_is_left_out_or_refused_where_that_is_asked_for() {
    let rows = || [row("Hi.", &"word ".repeat(100)), row("Hi.", "Greeting.")];
    let with = |policy: &str| json!({"max_seq_len": 48, "on_too_long": policy});
    let (facts, _) = tokenize("bytelevel", summarize(), rows(), with("drop")).unwrap();
    assert_eq!((facts.rows, facts.dropped, facts.truncated), (1, 1, 0));
    let error = tokenize("bytelevel", summarize(), rows(), with("error")).unwrap_err();
    assert!(error.message.contains("row 1"), "{error}");
    let error = tokenize("bytelevel", summarize(), rows(), with("split")).unwrap_err();
    assert_eq!(error.cause, Cause::BadParameters);
}

#[test]
fn plain_text_is_learned_whole_and_split_without_a_loss() {
    let text = "Rain fell on the hills all night. ".repeat(20);
    let whole = tokenize("metaspace", RowsFacts::text(), [Row::Text(text.clone())], json!({})).unwrap().1;
    assert_eq!(whole.len(), 1);
    let ids = &whole[0].input_ids;
    assert_eq!((ids[0], *ids.last().unwrap()), (1, 2), "BOS first, EOS last");
    assert_eq!(whole[0].labels, ids.iter().map(|id| *id as i32).collect::<Vec<_>>());

    let (facts, split) =
        tokenize("metaspace", RowsFacts::text(), [Row::Text(text)], json!({"max_seq_len": 32})).unwrap();
    assert!(split.len() > 1 && split.iter().all(|row| row.input_ids.len() <= 32));
    assert_eq!(split.iter().flat_map(|row| row.input_ids.clone()).collect::<Vec<_>>(), *ids);
    assert_eq!((facts.truncated, facts.dropped, facts.without_eos), (0, 0, 0));
    assert_eq!((facts.longest_row, facts.longest_document, facts.largest_id), (32, 32, ids.iter().copied().max()));

    // The end alone in a last piece would be predicted from nothing: it is left out, and counted.
    let limit = json!({"max_seq_len": ids.len() - 1});
    let text = "Rain fell on the hills all night. ".repeat(20);
    let (facts, split) = tokenize("metaspace", RowsFacts::text(), [Row::Text(text)], limit).unwrap();
    assert_eq!((split.len(), facts.rows, facts.without_eos), (1, 1, 1));
}

#[test]
fn a_run_that_would_learn_nothing_fails() {
    let error = tokenize("bytelevel", RowsFacts::text(), [], json!({})).unwrap_err();
    assert!(error.message.contains("no rows"), "{error}");
    let rows = [row(&"word ".repeat(100), "short")];
    let error = tokenize("bytelevel", summarize(), rows, json!({"max_seq_len": 16})).unwrap_err();
    assert!(error.help.unwrap().contains("max_seq_len"), "{}", error.message);
}

#[test]
fn an_end_that_the_tokenizer_lacks_cannot_be_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(golden("tokenizers/bytelevel/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
    let base = folder.path().to_str().unwrap().to_owned();
    let rows = || [Row::Text("Rain fell.".to_owned())];
    let error = tokenize(&base, RowsFacts::text(), rows(), json!({"add_eos": true})).unwrap_err();
    assert_eq!(error.cause, Cause::BadParameters);
    let (facts, _) = tokenize(&base, RowsFacts::text(), rows(), json!({})).unwrap();
    assert_eq!(facts.without_eos, 1);
}

#[test]
fn conversations_need_a_chat_template() {
    let rows = [Row::Messages(vec![Message::new("user", "Hi."), Message::new("assistant", "Hello.")])];
    let error = tokenize("metaspace", RowsFacts::messages(), rows, json!({})).unwrap_err();
    let cause = std::error::Error::source(&error).and_then(std::error::Error::source).unwrap().to_string();
    assert!(cause.contains("conversations need a chat template"), "{cause}");
}

#[test]
fn prompts_become_the_reference_tokens_and_labels() {
    let cases = golden_json("sft.json");
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let of_tokenizer = || cases.as_array().unwrap().iter().filter(|case| case["tokenizer"] == "bytelevel");
    let sources = sources(&tokenizer, &cases, "bytelevel");
    for case in of_tokenizer() {
        let with = json!({"max_seq_len": 512, "train_on_input": case["train_on_input"], "on_no_target": "keep"});
        let rows = sources.iter().map(|(row, _)| row.clone());
        let (facts, made) = tokenize("bytelevel", summarize(), rows, with).unwrap();
        assert_eq!(facts.rows, 24);
        for ((made, expected), (_, held_to)) in made.iter().zip(case["rows"].as_array().unwrap()).zip(&sources) {
            let (tokens, labels) = (ids(&expected["tokens"]), ints(&expected["labels"]));
            assert_eq!(made.input_ids[..*held_to], tokens[..*held_to], "row {}", expected["index"]);
            assert_eq!(made.labels[..*held_to], labels[..*held_to], "row {}", expected["index"]);
            assert_eq!(made.input_ids.len(), tokens.len());
            assert_eq!((made.input_ids.last(), made.labels.last()), (tokens.last(), labels.last()));
        }
    }
}

/// The rows that the reference cases of a tokenizer were made of.
fn sources(tokenizer: &Tokenizer, cases: &Value, name: &str) -> Vec<(Row, usize)> {
    let masked = |case: &&Value| case["tokenizer"] == name && case["train_on_input"] == false;
    let masked = cases.as_array().unwrap().iter().find(masked).unwrap();
    masked["rows"].as_array().unwrap().iter().map(|expected| sft_row(tokenizer, expected)).collect()
}

/// The reference cases encode prompt and response apart, which puts a space before the response that nobody wrote.
#[test]
fn a_prompt_and_its_response_are_encoded_as_the_text_they_are() {
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/metaspace")).unwrap();
    let oracle = tokenizers::Tokenizer::from_file(golden("tokenizers/metaspace/tokenizer.json")).unwrap();
    let encode = |text: &str| oracle.encode(text, false).unwrap().get_ids().to_vec();
    let rows: Vec<Row> =
        sources(&tokenizer, &golden_json("sft.json"), "metaspace").into_iter().map(|it| it.0).collect();
    let (_, made) = tokenize("metaspace", summarize(), rows.iter().cloned(), json!({})).unwrap();
    assert_eq!(made.len(), 24);
    let template = Template::named("summarize").unwrap();
    for (row, made) in rows.iter().zip(&made) {
        let Row::Columns(columns) = row else { panic!("{row:?}") };
        let (prompt, response) = (template.render(columns), &columns["output"]);
        let expected = [&[1], encode(&format!("{prompt}{response}")).as_slice(), &[2]].concat();
        assert_eq!(made.input_ids, expected);
        let masked = 1 + encode(&prompt).len();
        assert!(made.labels[..masked].iter().all(|label| *label == -100));
        assert!(made.labels[masked..].iter().zip(&expected[masked..]).all(|(label, id)| *label == *id as i32));
        let apart = [&[1], encode(&prompt).as_slice(), &encode(response), &[2]].concat();
        assert!(expected != apart || response.is_empty());
    }
}

#[test]
fn rows_of_tokens_are_foretold_only_where_none_is_split() {
    let foretold = |rows: Value, mut with: Value| {
        with["dataset"] = "articles".into();
        with["tokenizer"] = "base".into();
        let node = engine::file::tree::Node::from_json(&with);
        let params =
            <Tokenize as engine::parameter::Parameter>::read(&node, &mut engine::parameter::Reader::default()).unwrap();
        let facts: Facts = serde_json::from_value(rows).unwrap();
        let inputs = InputFacts::from_iter([("articles.rows".to_owned(), facts)]);
        let forecast = params.forecast(&Ahead::of_results(&inputs, Span::default()));
        forecast.outputs["tokens"].expected.get("rows").and_then(Value::as_u64)
    };
    let short = || json!({"max_seq_len": 16});
    assert_eq!(foretold(json!({"rows": 7, "shape": "prompt"}), short()), Some(7));
    assert_eq!(foretold(json!({"rows": 7, "shape": "text"}), short()), None);
    assert_eq!(foretold(json!({"rows": 7}), short()), None);
    let whole = json!({"max_seq_len": 16, "on_too_long": "truncate"});
    assert_eq!(foretold(json!({"rows": 7, "shape": "text"}), whole), Some(7));
}

/// Tokenizes texts with a tokenizer, and gives the rows and what encoded them.
fn tokenized_texts(tokenizer: &Path, texts: &[String]) -> (Vec<TokenRow>, Value) {
    let folder = tempfile::tempdir().unwrap();
    let rows: Vec<Row> = texts.iter().map(|text| Row::Text(text.clone())).collect();
    let (source, facts) = written(folder.path(), RowsFacts::text(), &rows);
    let bench = TestBench::new(folder.path())
        .input("articles.rows", "rows", &source, facts)
        .unwrap()
        .input("base.tokenizer", "tokenizer", tokenizer, Default::default())
        .unwrap()
        .threads(2);
    let with = json!({"dataset": "articles", "tokenizer": "base"});
    let (outputs, how) = bench.run_recorded::<Tokenize>(with).unwrap();
    let mut reader = TokensReader::open(&outputs["tokens"]).unwrap();
    (reader.iter().collect::<Result<_, _>>().unwrap(), how["encoder"].clone())
}

#[test]
fn rows_of_any_length_keep_their_order_where_much_is_encoded() {
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let ids = |text: &str| tokenizer.encode(text).unwrap();
    // Twenty megabytes in one row, among empty and short ones.
    let repeats = 2 << 20;
    let mut texts: Vec<String> = (0..3000).map(|number| format!("{number} {}", "rain ".repeat(number % 7))).collect();
    texts[1500] = format!("rain{}", " fell rain".repeat(repeats));
    texts[1501] = String::new();
    let (rows, encoder) = tokenized_texts(&golden("tokenizers/bytelevel"), &texts);
    assert_eq!(encoder, "tokenizers 1.0");
    let framed = |ids: Vec<u32>| {
        let ends = [tokenizer.bos_token_id(), tokenizer.eos_token_id()].map(Option::unwrap);
        [&ends[..1], &ids, &ends[1..]].concat()
    };
    assert_eq!(rows.len(), texts.len());
    for (number, (row, text)) in rows.iter().zip(&texts).enumerate() {
        let expected = match number {
            1500 => [ids("rain"), [ids(" fell"), ids(" rain")].concat().repeat(repeats)].concat(),
            _ => ids(text),
        };
        assert!(row.input_ids == framed(expected), "row {number}");
    }
}

#[test]
fn what_the_fast_encoder_cannot_do_the_other_does() {
    let folder = tempfile::tempdir().unwrap();
    let json = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"?": 0, "rain": 1, "fell": 2}, "unk_token": "?"},
    });
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let texts: Vec<String> = (1..6).map(|number| "rain fell down ".repeat(60_000 + number)).collect();
    let (rows, encoder) = tokenized_texts(folder.path(), &texts);
    assert_eq!(encoder, "tokenizers 0.23");
    let expected = (1..6).map(|number| [1, 2, 0].repeat(60_000 + number));
    assert!(rows.iter().map(|row| row.input_ids.clone()).eq(expected));
}

#[test]
fn chunks_of_long_rows_have_few_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let long = |number: usize| Row::Text(format!("{number} {}", "x".repeat(3 << 20)));
    let (source, facts) = written(folder.path(), RowsFacts::text(), &(0..5).map(long).collect::<Vec<_>>());
    let mut reader = RowsReader::open_with(&source, "rows", &facts).unwrap();
    let facts = reader.facts().clone();
    let mut chunks = Chunks::new(&mut reader, &facts);
    let lengths: Vec<usize> = std::iter::from_fn(|| chunks.read().unwrap().map(|chunk| chunk.rows.len())).collect();
    assert_eq!(lengths, [2, 2, 1]);
}

#[test]
fn reasoning_is_learned_by_choice() {
    let template = "{% for message in messages %}<{{ message.role }}>{% if message.reasoning_content %}[{{ \
                    message.reasoning_content }}]{% endif %}{{ message.content }}.{% endfor %}\
                    {% if add_generation_prompt %}<assistant>{% endif %}";
    let mut answer = Message::new("assistant", "Three");
    answer.other.insert("reasoning_content".to_owned(), json!("one and two"));
    let row = Row::Messages(vec![Message::new("user", "Add"), answer]);
    let run = |with: Value| {
        let mut with = with;
        with["chat_template"] = template.into();
        let (_, rows) = tokenize("bytelevel", RowsFacts::messages(), [row.clone()], with).unwrap();
        rows.into_iter().next().unwrap()
    };
    let (with, without) = (run(json!({})), run(json!({"train_on_reasoning": false})));
    let learned = |row: &TokenRow| row.labels.iter().filter(|label| **label != -100).count();
    let masked = learned(&with) - learned(&without);
    assert!(masked >= 3 && learned(&without) >= 3, "{masked} of {}", learned(&with));
    // Behind the reasoning the turn is learned again: its answer and its end.
    let from = without.labels.iter().position(|label| *label != -100).unwrap();
    let silent = without.labels[from..].iter().position(|label| *label == -100).unwrap();
    assert!(without.labels[from + silent..].iter().rev().take(2).all(|label| *label != -100), "{:?}", without.labels);
}

#[test]
fn reasoning_is_where_the_template_writes_it() {
    let header = "{% for message in messages %}<{{ message.role }}>";
    let end = "{{ message.content }}.{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let writes = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}";
    let run = |template: &str, reasoning: &str, content: &str| {
        let mut answer = Message::new("assistant", content);
        answer.other.insert("reasoning_content".to_owned(), reasoning.into());
        let row = Row::Messages(vec![Message::new("user", "Add"), answer]);
        let with = json!({"train_on_reasoning": false, "chat_template": template});
        let (_, rows) = tokenize("bytelevel", RowsFacts::messages(), [row], with).unwrap();
        let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
        let learned: Vec<u32> =
            rows[0].labels.iter().filter(|label| **label != -100).map(|label| *label as u32).collect();
        tokenizer.decode(&learned).unwrap()
    };
    // The words of the reasoning stand in its tag, and in the answer.
    assert_eq!(run(&format!("{header}{writes}{end}"), "hi", "hi k"), "<think></think>hi k.");
    // A template that does not write it.
    assert_eq!(run(&format!("{header}{end}"), "Paris", "Paris is it"), "Paris is it.");
}

#[test]
fn reasoning_is_masked_where_a_template_takes_it_out_of_earlier_turns() {
    let template = std::fs::read_to_string(golden("chat_templates/qwen3.jinja")).unwrap();
    let reasons = |content: &str, reasoning: &str| {
        let mut message = Message::new("assistant", content);
        message.other.insert("reasoning_content".to_owned(), reasoning.into());
        message
    };
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let learned = |first: Message, train_on: &str| {
        let row = Row::Messages(vec![Message::new("user", "a"), first, Message::new("user", "c"), reasons("d", "r2")]);
        let with = json!({"train_on_reasoning": false, "chat_template": template, "train_on": train_on});
        let (_, rows) = tokenize("bytelevel", RowsFacts::messages(), [row], with).unwrap();
        let learned = rows[0].labels.iter().filter(|label| **label != -100).map(|label| *label as u32);
        tokenizer.decode_with_special(&learned.collect::<Vec<_>>()).unwrap()
    };
    let last = "<think>\n\n</think>\n\nd<|im_end|>\n";
    for first in [Message::new("assistant", "b"), reasons("b", "r1")] {
        assert_eq!(learned(first.clone(), "assistant"), format!("b<|im_end|>\n{last}"));
        assert_eq!(learned(first.clone(), "last"), last);
        assert!(!learned(first, "all").contains("r2"));
    }
}

#[test]
fn what_is_cut_ends_as_add_eos_says() {
    let row = || Row::Text("one two three four five six seven".to_owned());
    let last = |with: Value| {
        let mut with = with;
        with["on_too_long"] = "truncate".into();
        let (_, rows) = tokenize("bytelevel", RowsFacts::text(), [row()], with).unwrap();
        *rows[0].input_ids.last().unwrap()
    };
    let eos = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap().eos_token_id().unwrap();
    assert_eq!(last(json!({"max_seq_len": 4})), eos);
    assert_ne!(last(json!({"max_seq_len": 4, "add_eos": false})), eos);
}

#[test]
fn a_turn_counts_as_much_as_its_weight_says() {
    let said = |role: &str, content: &str, weight: Value| {
        let mut message = Message::new(role, content);
        message.other.insert("weight".to_owned(), weight);
        message
    };
    let conversation = [
        Message::new("user", "Who are you?"),
        said("assistant", "A model.", json!(0.5)),
        Message::new("user", "And then?"),
        said("assistant", "Nothing.", json!(0)),
        Message::new("user", "Say more."),
        Message::new("assistant", "A small model."),
    ];
    let run = |with: Value| tokenize("bytelevel", RowsFacts::messages(), [Row::Messages(conversation.to_vec())], with);
    let (plain_facts, plain) = run(json!({})).unwrap();
    let (facts, rows) = run(json!({"weight": "weight"})).unwrap();
    assert!(plain_facts.columns.is_empty() && plain[0].weights.is_empty());
    assert_eq!(facts.columns, [OptionalColumn::Weight]);
    // With `train_on: assistant` a weight of zero takes a turn out in any case.
    assert_eq!((&rows[0].input_ids, &rows[0].labels), (&plain[0].input_ids, &plain[0].labels));
    let learned: Vec<f32> = (0..rows[0].labels.len())
        .filter(|token| rows[0].labels[*token] != -100)
        .map(|token| rows[0].weights[token])
        .collect();
    let half = learned.iter().take_while(|weight| **weight == 0.5).count();
    assert!(half > 3 && learned[half..].iter().all(|weight| *weight == 1.0), "{learned:?}");
    assert_eq!(facts.target_tokens, plain_facts.target_tokens);
    // The whole conversation is learned but for the turn of weight zero.
    let (all, rows) = run(json!({"weight": "weight", "train_on": "all"})).unwrap();
    assert!(all.target_tokens > facts.target_tokens);
    let silent = rows[0].weights.iter().zip(&rows[0].labels).filter(|(weight, _)| **weight == 0.0);
    let labels: Vec<i32> = silent.map(|(_, label)| *label).collect();
    assert!(labels.len() > 3 && labels.iter().all(|label| *label == -100), "{labels:?}");
    for wrong in [json!("much"), json!(-1), json!(1e-42)] {
        let messages = vec![Message::new("user", "Hi."), said("assistant", "Hello.", wrong)];
        let error =
            tokenize("bytelevel", RowsFacts::messages(), [Row::Messages(messages)], json!({"weight": "weight"}));
        let error = error.unwrap_err();
        let cause = std::error::Error::source(error.source.as_deref().unwrap())
            .map_or_else(|| error.source.as_ref().unwrap().to_string(), ToString::to_string);
        assert!(error.message.contains("row 1") && cause.contains("weight"), "{error:?}");
    }
}

#[test]
fn a_column_of_prompts_may_be_their_weight() {
    let facts = || {
        let columns = ["dialogue", "output", "importance"].map(str::to_owned);
        RowsFacts::prompt(Template::named("summarize").unwrap(), "output", columns)
    };
    let weighted = |weight: &str| {
        let Row::Columns(mut columns) = row("Someone says something.", "Words.") else { unreachable!() };
        columns.insert("importance".to_owned(), weight.to_owned());
        Row::Columns(columns)
    };
    let rows = || ["0.25", "", "3", "0"].map(weighted);
    let (facts_of, found) = tokenize("bytelevel", facts(), rows(), json!({"weight": "importance"})).unwrap();
    let weights: Vec<f32> = found.iter().map(|row| row.weights[row.weights.len() - 1]).collect();
    assert_eq!((weights.as_slice(), facts_of.dropped), (&[0.25, 1.0, 3.0][..], 1), "nothing is learned of the last");
    let (_, cut) =
        tokenize("bytelevel", facts(), rows(), json!({"weight": "importance", "max_seq_len": 9, "train_on": "all"}))
            .unwrap();
    assert!(cut.iter().all(|row| (row.weights.len(), row.input_ids.len()) == (9, 9)));
    // Gradients times such a weight are nothing, and divided by it no numbers.
    for tiny in ["1e-42", "1e-60"] {
        let error = tokenize("bytelevel", facts(), [weighted(tiny)], json!({"weight": "importance"})).unwrap_err();
        assert!(error.help.as_ref().unwrap().starts_with("multiply all weights"), "{tiny}: {error:?}");
    }
    assert!(tokenize("bytelevel", facts(), [weighted("1.2e-38")], json!({"weight": "importance"})).is_ok());
    let error = tokenize("bytelevel", facts(), rows(), json!({"weight": "importanse"})).unwrap_err();
    assert!(error.message.contains("no column `importanse` with weights: they have `dialogue`"), "{error:?}");
    let text = || [Row::Text("Words.".to_owned())];
    let error = tokenize("bytelevel", RowsFacts::text(), text(), json!({"weight": "importance"})).unwrap_err();
    assert!(error.message.contains("the rows are plain text"), "{error:?}");
}
