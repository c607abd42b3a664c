//! The stage, on files of every form and on rows that cannot be used.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, DictionaryArray, LargeStringArray, ListBuilder, RecordBatch, StringArray, StringBuilder,
};
use arrow::datatypes::Int32Type;
use engine::context::Artifact;
use engine::error::Cause;
use engine::file::tree::Node;
use engine::parameter::{Parameter, Reader};
use engine::test_bench::TestBench;
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::file::properties::WriterProperties;
use serde_json::{Value, json};

use super::*;
use crate::data::artifact::{MEDIUM, Row, RowsReader, Said, TOOLS};

mod numbers;
mod order;
mod saved;

fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Runs the stage on files; its outputs by name.
fn run_all(folder: &Path, files: &[PathBuf], mut with: Value) -> Result<BTreeMap<String, Artifact>, StageError> {
    with["source"] = "./source".into();
    let bench = files.iter().try_fold(TestBench::new(folder), |bench, file| bench.file("source", file))?;
    bench.run::<Dataset>(with)
}

fn run(folder: &Path, files: &[PathBuf], with: Value) -> Result<Artifact, StageError> {
    Ok(run_all(folder, files, with)?.remove("rows").unwrap())
}

fn rows(artifact: &Artifact) -> Vec<Row> {
    RowsReader::open(artifact).unwrap().iter().collect::<Result<_, _>>().unwrap()
}

fn column(artifact: &Artifact, name: &str) -> Vec<String> {
    let value = |row| match row {
        Row::Columns(mut columns) => columns.remove(name).unwrap(),
        Row::Text(text) => text,
        Row::Messages(_) | Row::Judged(_) => panic!("no columns"),
    };
    rows(artifact).into_iter().map(value).collect()
}

fn summarize() -> Value {
    json!({"template": "summarize", "column_map": {"dialogue": "document", "output": "summary"}})
}

const DOCUMENTS: [(&str, &str); 3] = [("one, \"two\"\nthree", "1"), ("größe 你好", "s"), ("", "empty")];

fn batch() -> RecordBatch {
    let documents: ArrayRef = Arc::new(LargeStringArray::from_iter_values(DOCUMENTS.map(|row| row.0)));
    let summaries: DictionaryArray<Int32Type> = DOCUMENTS.iter().map(|row| row.1).collect();
    let summaries: ArrayRef = Arc::new(summaries);
    RecordBatch::try_from_iter([("document", documents), ("summary", summaries)]).unwrap()
}

/// The same rows in every form.
fn in_every_form(folder: &Path) -> Vec<PathBuf> {
    let objects: Vec<Value> = DOCUMENTS
        .iter()
        .map(|(document, summary)| json!({"id": 7, "document": document, "summary": summary}))
        .collect();
    let lines: String = objects.iter().map(|object| format!("{object}\n")).collect();
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let table = |delimiter: &str| -> String {
        let row = |cells: [String; 2]| cells.join(delimiter) + "\n";
        std::iter::once(row(["document".into(), "summary".into()]))
            .chain(DOCUMENTS.iter().map(|cells| row([quoted(cells.0), quoted(cells.1)])))
            .collect()
    };
    let batch = batch();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let mut arrow = arrow::ipc::writer::FileWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    arrow.write(&batch).unwrap();
    let mut stream = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    stream.write(&batch).unwrap();
    vec![
        write(folder, "a.jsonl", &lines),
        write(folder, "b.json", serde_json::to_vec_pretty(&objects).unwrap()),
        write(folder, "c.csv", table(",")),
        write(folder, "d.tsv", table("\t")),
        write(folder, "e.parquet", parquet.into_inner().unwrap()),
        write(folder, "f.arrow", arrow.into_inner().unwrap()),
        write(folder, "g.arrow", stream.into_inner().unwrap()),
    ]
}

#[test]
fn the_form_of_a_file_is_no_part_of_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let files = in_every_form(folder.path());
    let made: Vec<Artifact> =
        files.iter().map(|file| run(folder.path(), std::slice::from_ref(file), summarize()).unwrap()).collect();
    for (artifact, file) in made.iter().zip(&files) {
        assert_eq!(column(artifact, "dialogue"), DOCUMENTS.map(|row| row.0), "{}", file.display());
        assert_eq!(column(artifact, "output"), DOCUMENTS.map(|row| row.1), "{}", file.display());
        assert_eq!(artifact.description.identity, made[0].description.identity, "{}", file.display());
    }
    let facts = RowsFacts::from_facts(&made[0].description.facts).unwrap();
    assert_eq!((facts.rows, facts.shape, facts.columns), (3, Shape::Prompt, vec!["dialogue".into(), "output".into()]));
    assert_eq!(facts.template.unwrap().name, "summarize");

    let other = json!({"template": "Say: {dialogue}", "column_map": {"dialogue": "document", "output": "summary"}});
    let other = run(folder.path(), &files[..1], other).unwrap();
    assert_ne!(other.description.identity, made[0].description.identity, "a reader goes by the template");
}

#[test]
fn a_split_takes_rows_over_the_borders_of_files() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |from: usize, to: usize| (from..to).map(|n| format!("{{\"text\":\"{n}\"}}\n")).collect::<String>();
    let files = [write(folder.path(), "a.jsonl", lines(0, 5)), write(folder.path(), "b.jsonl", lines(5, 12))];
    let taken = |split: &str| run(folder.path(), &files, json!({"split": split})).map(|made| column(&made, "text"));
    assert_eq!(taken("train[3:7]").unwrap(), ["3", "4", "5", "6"]);
    assert_eq!(taken("train[-2:]+train[:1]").unwrap(), ["10", "11", "0"]);
    assert_eq!(taken("train[25%:50%]").unwrap(), ["3", "4", "5"]);
    assert_eq!(taken("train[:2000]").unwrap().len(), 12, "bounds beyond the rows are clamped");
    let error = taken("train[3:3]").unwrap_err();
    assert!(error.message.contains("selects no rows"), "{}", error.message);
}

#[test]
fn rows_are_in_parts_and_any_of_them_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..20_000).map(|n| format!("{{\"text\":\"{n}\"}}\n")).collect();
    let made = run(folder.path(), &[write(folder.path(), "a.jsonl", lines)], json!({})).unwrap();
    assert!(made.folder.join("part-00002.parquet").exists() && !made.folder.join("part-00003.parquet").exists());
    let mut reader = RowsReader::open(&made).unwrap();
    assert_eq!(reader.len(), 20_000);
    for index in [19_999, 0, 8191, 8192, 63, 64, 16_383] {
        assert_eq!(reader.row(index).unwrap(), Row::Text(index.to_string()));
    }
    assert!(reader.row(20_000).is_err());
}

#[test]
fn both_spellings_of_column_map_mean_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let file = [write(folder.path(), "a.jsonl", r#"{"document":"d","summary":"s"}"#)];
    let newer = json!({"template": "summarize", "column_map": {"input": "document", "output": "summary"}});
    let (older, newer) = (run(folder.path(), &file, summarize()).unwrap(), run(folder.path(), &file, newer).unwrap());
    assert_eq!(older.description.identity, newer.description.identity);
}

#[test]
fn a_column_may_be_the_weight_of_its_row() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"document\":\"d\",\"summary\":\"s\",\"score\":0.5}\n{\"document\":\"d\",\"summary\":\"s\",\"score\":null}\n\
                 {\"document\":\"d\",\"summary\":\"s\",\"score\":\"2\"}\n";
    let file = [write(folder.path(), "a.jsonl", lines)];
    let with = |column: &str| json!({"template": "summarize", "column_map": {"dialogue": "document", "output": "summary", "weight": column}});
    let made = run(folder.path(), &file, with("score")).unwrap();
    assert_eq!(column(&made, "weight"), ["0.5", "", "2"]);
    let error = run(folder.path(), &file, with("scores")).unwrap_err();
    assert!(error.message.contains("has no column `scores`, which `weight` is to come from"), "{}", error.message);
}

#[test]
fn alpaca_rows_need_no_input() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"instruction\":\"a\",\"input\":null,\"output\":\"x\"}\n{\"instruction\":\"b\",\"output\":\"y\"}\n";
    let file = [write(folder.path(), "a.jsonl", lines)];
    let made = run(folder.path(), &file, json!({"template": "alpaca"})).unwrap();
    assert_eq!(column(&made, "input"), ["", ""]);
    let error = run(folder.path(), &file, json!({})).unwrap_err();
    assert!(error.help.unwrap().contains("alpaca"), "{}", error.message);
}

#[test]
fn conversations_of_both_spellings_become_messages() {
    let folder = tempfile::tempdir().unwrap();
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]});
    let sharegpt = json!({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]});
    let made = |name: &str, row: &Value| {
        let file = write(folder.path(), name, row.to_string());
        run(folder.path(), &[file], json!({})).unwrap()
    };
    let (one, two) = (made("a.jsonl", &messages), made("b.jsonl", &sharegpt));
    assert_eq!(one.description.identity, two.description.identity);
    let Row::Messages(turns) = &rows(&one)[0] else { panic!("no conversation") };
    assert_eq!(turns[1], crate::data::artifact::Message::new("assistant", "Hello"));
}

#[test]
fn what_a_turn_says_beside_its_content_stays() {
    let folder = tempfile::tempdir().unwrap();
    let row = json!({"messages": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"name": "weather"}], "content": null},
    ]});
    let file = write(folder.path(), "a.json", row.to_string());
    let made = run(folder.path(), &[file], json!({})).unwrap();
    let Row::Messages(turns) = &rows(&made)[0] else { panic!("no conversation") };
    assert_eq!(turns[1].other["tool_calls"], json!([{"name": "weather"}]));
}

#[test]
fn a_turn_that_calls_a_function_is_the_assistants() {
    let folder = tempfile::tempdir().unwrap();
    let row = |said: &str| {
        let turns = [("human", "Weather?"), ("function_call", said), ("observation", "dry"), ("gpt", "It is dry.")];
        let turns = turns.map(|(from, value)| json!({"from": from, "value": value}));
        json!({"conversations": turns}).to_string() + "\n"
    };
    let made = |said: &str| run(folder.path(), &[write(folder.path(), "a.jsonl", row(said))], json!({}));
    let call = json!({"name": "weather", "arguments": {"day": 1}});
    for said in [call.to_string(), json!([call]).to_string()] {
        let Row::Messages(turns) = &rows(&made(&said).unwrap())[0] else { panic!("no conversation") };
        let roles: Vec<&str> = turns.iter().map(|turn| turn.role.as_str()).collect();
        assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
        assert_eq!(turns[1].other["tool_calls"], json!([{"type": "function", "function": call}]));
    }
    for (said, problem) in [("weather()", "no JSON"), ("[1]", "not an object with `name`")] {
        let error = made(said).unwrap_err();
        assert!(error.message.contains("turn 2") && error.message.contains(problem), "{}", error.message);
    }
}

#[test]
fn prompts_and_completions_need_no_word() {
    let folder = tempfile::tempdir().unwrap();
    let line = "{\"prompt\": \"Who?\", \"completion\": \" Me.\"}\n";
    let made = run(folder.path(), &[write(folder.path(), "a.jsonl", line)], json!({})).unwrap();
    assert_eq!((column(&made, "input"), column(&made, "output")), (vec!["Who?".to_owned()], vec![" Me.".to_owned()]));
}

#[test]
fn prompts_and_completions_of_turns_are_conversations() {
    let folder = tempfile::tempdir().unwrap();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let prompt = json!([turn("user", "Who?"), turn("assistant", "Me."), turn("user", "Where?")]);
    let tools = json!([{"name": "clock"}]);
    let row = json!({"prompt": prompt, "completion": [turn("assistant", "Here.")], "functions": tools});
    let file = [write(folder.path(), "rows.jsonl", format!("{row}\n"))];
    let made = run(folder.path(), &file, json!({"column_map": {"tools": "functions"}})).unwrap();
    let [Row::Messages(turns)] = &rows(&made)[..] else { panic!("no conversation") };
    let trained: Vec<_> = turns.iter().map(|turn| (turn.role.as_str(), turn.other.get("weight").cloned())).collect();
    let untrained = Some(json!(0));
    assert_eq!(trained, [("user", None), ("assistant", untrained), ("user", None), ("assistant", None)]);
    assert_eq!(turns[0].other[TOOLS], tools);

    // An expression makes text of them.
    let text = json!({"map": {"prompt": "{{ prompt[0].content }}", "completion": "{{ completion[0].content }}"}});
    assert_eq!(column(&run(folder.path(), &file, text).unwrap(), "output"), ["Here."]);

    let fails = |prompt: Value, completion: Value| {
        let first = json!({"prompt": null, "completion": null});
        let row = json!({"prompt": prompt, "completion": completion});
        let file = [write(folder.path(), "wrong.jsonl", format!("{first}\n{row}\n"))];
        let error = run(folder.path(), &file, json!({"on_bad_row": "drop"})).unwrap_err();
        let file = [write(folder.path(), "wrong.jsonl", format!("{row}\n"))];
        assert!(error.help.is_some());
        run(folder.path(), &file, json!({})).unwrap_err().message
    };
    let mixed = fails(prompt.clone(), json!("Here."));
    assert!(mixed.contains("`prompt` has a list of turns, and column `completion` a string: both"), "{mixed}");
    let mixed = fails(json!("Where?"), json!([turn("assistant", "Here.")]));
    assert!(mixed.contains("`prompt` has a string, and column `completion` a list of turns: both"), "{mixed}");
    // Beside strings they are as unusable as they were.
    let both = format!("{row}\n{{\"prompt\": \"Who?\", \"completion\": \"Me.\"}}\n");
    let file = [write(folder.path(), "both.jsonl", both)];
    assert_eq!(column(&run(folder.path(), &file, json!({"on_bad_row": "drop"})).unwrap(), "output"), ["Me."]);
    let order = fails(prompt, json!([turn("user", "Here.")]));
    assert!(order.contains("turn 4 (`user`): the user speaks twice"), "{order}");
}

#[test]
fn a_table_says_by_its_schema_what_holds_lists() {
    let folder = tempfile::tempdir().unwrap();
    let mut lists = ListBuilder::new(StringBuilder::new());
    lists.append_value([Some("a")]);
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["b"]));
    let batch = RecordBatch::try_from_iter([("prompt", Arc::new(lists.finish()) as ArrayRef), ("completion", texts)]);
    let batch = batch.unwrap();
    let path = folder.path().join("rows.parquet");
    let mut writer = ArrowWriter::try_new(std::fs::File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let file = SourceFile::new(path, "rows.parquet".to_owned()).unwrap();
    assert!(file.holds_lists(&["prompt", "completion"], &Reading::default()).unwrap());
    assert!(!file.holds_lists(&["completion"], &Reading::default()).unwrap());
}

#[test]
fn pairs_whose_prompts_differ_are_no_pairs() {
    let folder = tempfile::tempdir().unwrap();
    let side =
        |asked: &str, said: &str| json!([{"role": "user", "content": asked}, {"role": "assistant", "content": said}]);
    let line = json!({"chosen": side("a", "b"), "rejected": side("c", "d")}).to_string() + "\n";
    let error = run(folder.path(), &[write(folder.path(), "a.jsonl", line)], json!({})).unwrap_err();
    assert!(error.message.contains("do not answer the same: turn 1"), "{}", error.message);
}

#[test]
fn a_document_is_the_whole_file() {
    let folder = tempfile::tempdir().unwrap();
    let made = |text: &str, by: &str| {
        let file = write(folder.path(), "a.txt", text);
        column(&run(folder.path(), &[file], json!({"sample_by": by})).unwrap(), "text")
    };
    assert_eq!(made("  \n\n lead\n\ntrail \n", "document"), ["  \n\n lead\n\ntrail \n"]);
    assert_eq!(made("a\r\nb\rc\n\r\n", "document"), ["a\nb\nc\n\n"]);
    assert_eq!(made("\n lead \n b\n\ntrail \n\n", "paragraph"), [" lead \n b", "trail "]);
}

#[test]
fn the_tools_of_a_conversation_go_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let turns = [json!({"role": "user", "content": "Weather?"}), json!({"role": "assistant", "content": "Dry."})];
    let tool = json!({"type": "function", "function": {"name": "weather"}});
    let row = |functions: Value| json!({"messages": turns, "functions": functions}).to_string() + "\n";
    let made = |lines: &[Value], with: Value| {
        let text: String = lines.iter().map(|functions| row(functions.clone())).collect();
        run(folder.path(), &[write(folder.path(), "a.jsonl", text)], with)
    };
    let mapped = json!({"column_map": {"tools": "functions"}});
    let all = made(&[json!([tool]), json!([tool]).to_string().into(), json!(null)], mapped.clone()).unwrap();
    let tools: Vec<Option<Value>> = rows(&all)
        .iter()
        .map(|row| {
            let Row::Messages(turns) = row else { panic!("no conversation") };
            assert!(turns[1].other.is_empty());
            turns[0].other.get(TOOLS).cloned()
        })
        .collect();
    assert_eq!(tools, [Some(json!([tool])), Some(json!([tool])), None]);
    let error = made(&[json!("[{]")], mapped).unwrap_err();
    assert!(error.message.contains("column `functions` has a string that is not JSON"), "{}", error.message);
    let error = made(&[json!([tool])], json!({"column_map": {"tools": "tool"}})).unwrap_err();
    assert!(error.message.contains("has no column `tool`"), "{}", error.message);
    // Nobody asked for them.
    let plain = made(&[json!([tool])], json!({})).unwrap();
    let Row::Messages(turns) = &rows(&plain)[0] else { panic!("no conversation") };
    assert!(turns[0].other.is_empty());
}

#[test]
fn the_tools_of_a_preference_stand_with_its_first_message() {
    let folder = tempfile::tempdir().unwrap();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let (asked, dry, wet) = (turn("user", "Weather?"), turn("assistant", "Dry."), turn("assistant", "Wet."));
    let tool = json!({"type": "function", "function": {"name": "weather"}});
    let made = |row: Value| {
        let with = json!({"column_map": {"tools": "functions"}});
        run(folder.path(), &[write(folder.path(), "a.jsonl", row.to_string())], with)
    };
    let of = |row: Value| {
        let Row::Judged(row) = rows(&made(row).unwrap()).remove(0) else { panic!("no preference") };
        let first = |said: &Said| match said {
            Said::Turns(turns) => turns.first().and_then(|turn| turn.other.get(TOOLS).cloned()),
            Said::Text(text) => panic!("{text}"),
        };
        row.parts().map(first).collect::<Vec<_>>()
    };
    let (with, none) = (Some(json!([tool])), None);
    let pair = json!({"prompt": [asked], "chosen": [dry], "rejected": [wet], "functions": [tool]});
    assert_eq!(of(pair), [with.clone(), none.clone(), none.clone()]);
    let implicit = json!({"chosen": [asked, dry], "rejected": [asked, wet], "functions": json!([tool]).to_string()});
    assert_eq!(of(implicit), [with.clone(), none.clone(), none.clone()]);
    let judged = json!({"messages": [asked, dry], "kto_tag": true, "functions": [tool]});
    assert_eq!(of(judged), [with.clone(), none.clone()]);
    // Two conversations that have nothing in common.
    let told = |how: &str| turn("system", how);
    let apart =
        json!({"chosen": [told("Short."), asked, dry], "rejected": [told("Long."), asked, wet], "functions": [tool]});
    assert_eq!(of(apart), [none.clone(), with.clone(), with]);
    let without = json!({"prompt": [asked], "chosen": [dry], "rejected": [wet], "functions": null});
    assert_eq!(of(without), [none.clone(), none.clone(), none]);
    let text = json!({"prompt": "Weather?", "chosen": "Dry.", "rejected": "Wet.", "functions": [tool]});
    let message = made(text).unwrap_err().message;
    assert!(message.contains("column `functions` has tools, which are for conversations"), "{message}");
}

/// The texts of a column as any reader of Parquet finds them.
fn stored_texts(artifact: &Artifact, name: &str) -> Vec<String> {
    let file = std::fs::File::open(artifact.folder.join("part-00000.parquet")).unwrap();
    let mut batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batch = batches.next().unwrap().unwrap();
    let texts = batch.column_by_name(name).unwrap().as_string::<i32>();
    texts.iter().map(|text| text.unwrap().to_owned()).collect()
}

#[test]
fn what_the_stage_has_written_is_read_as_the_same_rows() {
    let turns = |role: &str, content: &str| json!([{"role": role, "content": content}]);
    let lines = |rows: &[Value]| rows.iter().map(|row| format!("{row}\n")).collect::<String>();
    let pairs = [
        json!({"prompt": "Who?\n", "chosen": "\"Me.\"", "rejected": "[]"}),
        json!({"prompt": turns("user", "Who?"), "chosen": turns("assistant", "Me."), "rejected": turns("assistant", "[]")}),
    ];
    let judged = [json!({"prompt": "Who?", "completion": " Me.", "label": false})];
    let conversation = [json!({"messages": [turns("user", "Who?")[0], turns("assistant", "Me.")[0]]})];
    for rows_of in [pairs.as_slice(), &judged, &conversation] {
        let [folder, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let written = run(folder.path(), &[write(folder.path(), "a.jsonl", lines(rows_of))], json!({})).unwrap();
        // A folder is read without the list of its parts.
        let files = ["part-00000.parquet", "parts.json"].map(|name| written.folder.join(name));
        let read = run(other.path(), &files, json!({})).unwrap();
        assert_eq!(rows(&read), rows(&written));
        if rows_of == pairs {
            assert_eq!(stored_texts(&written, "prompt"), ["Who?\n", r#"[{"role":"user","content":"Who?"}]"#]);
            assert_eq!(stored_texts(&written, "chosen")[0], "\"Me.\"");
            assert_eq!(stored_texts(&written, "rejected")[0], "\"[]\"", "it would be taken for turns");
        }
    }
}

#[test]
fn preferences_of_an_earlier_version_are_read_without_their_quotes() {
    let folder = tempfile::tempdir().unwrap();
    let text = |cell: &str| Arc::new(StringArray::from(vec![cell])) as ArrayRef;
    let columns = [("chosen", text("\" Me.\"")), ("prompt", text("\"Who?\\n\"")), ("rejected", text("\" You.\""))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let prompt = |author: &str| {
        let properties = WriterProperties::builder().set_created_by(author.to_owned()).build();
        let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), Some(properties)).unwrap();
        parquet.write(&batch).unwrap();
        let file = write(folder.path(), "a.parquet", parquet.into_inner().unwrap());
        let made = run(folder.path(), &[file], json!({})).unwrap();
        let Row::Judged(row) = rows(&made).remove(0) else { panic!("no preference") };
        row.prompt
    };
    assert_eq!(prompt("pipeline"), Said::Text("Who?\n".to_owned()));
    assert_eq!(prompt("somebody"), Said::Text("\"Who?\\n\"".to_owned()));
}

#[test]
fn a_list_of_parts_without_them_is_a_file_as_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let files =
        [write(folder.path(), "a.json", r#"{"text":"a"}"#), write(folder.path(), "parts.json", r#"{"text":"b"}"#)];
    assert_eq!(column(&run(folder.path(), &files, json!({})).unwrap(), "text"), ["a", "b"]);
}

#[test]
fn an_unknown_column_is_named_with_the_known_ones() {
    let folder = tempfile::tempdir().unwrap();
    let file = [write(folder.path(), "a.jsonl", r#"{"document":"d","summary":"s","id":1}"#)];
    let with = json!({"template": "summarize", "column_map": {"dialogue": "documnet", "output": "summary"}});
    let error = run(folder.path(), &file, with).unwrap_err();
    assert!(
        error.message.contains("`documnet`") && error.message.contains("did you mean `document`"),
        "{}",
        error.message
    );
    assert!(error.help.unwrap().contains("`document`, `summary`, `id`"));
}

#[test]
fn a_bad_row_is_named_or_left_out_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let bad = [
        (r#"{"document":"d","summary":null}"#, "column `summary` is null", "null"),
        (r#"{"document":"d"}"#, "column `summary` is missing", "missing"),
        (r#"{"document":7,"summary":"s"}"#, "column `document` has a number", "not_text"),
        (r#"{"document":"d","#, "not JSON", "malformed"),
        ("[]", "a list", "malformed"),
    ];
    for (line, problem, reason) in bad {
        let lines =
            format!("{{\"document\":\"d\",\"summary\":\"s\"}}\n{line}\n{{\"document\":\"e\",\"summary\":\"t\"}}\n");
        let file = [write(folder.path(), "a.jsonl", lines)];
        let error = run(folder.path(), &file, summarize()).unwrap_err();
        assert!(error.message.contains("a.jsonl`, line 2") && error.message.contains(problem), "{}", error.message);
        let mut with = summarize();
        with["on_bad_row"] = "drop".into();
        let made = run(folder.path(), &file, with).unwrap();
        assert_eq!(column(&made, "dialogue"), ["d", "e"]);
        assert_eq!(
            (&made.description.facts["dropped"], &made.description.facts["dropped_by"][reason]),
            (&1.into(), &1.into())
        );
    }
}

#[test]
fn a_column_of_numbers_in_a_table_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let mut list = ListBuilder::new(StringBuilder::new());
    list.append_value([Some("x")]);
    let columns: [(&str, ArrayRef); 2] =
        [("document", Arc::new(StringArray::from(vec!["d"]))), ("summary", Arc::new(list.finish()))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let file = write(folder.path(), "a.parquet", parquet.into_inner().unwrap());
    let error = run(folder.path(), &[file], summarize()).unwrap_err();
    assert!(error.message.contains("row 1: column `summary` has a list"), "{}", error.message);
}

#[test]
fn a_changed_file_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.jsonl", r#"{"text":"one"}"#);
    let bench = TestBench::new(folder.path()).file("source", &path).unwrap();
    write(folder.path(), "a.jsonl", r#"{"text":"two"}"#);
    let error = bench.run::<Dataset>(json!({"source": "./a.jsonl"})).unwrap_err();
    assert_eq!(error.cause, Cause::ChangedWhileRunning);
}

/// Whether a part of an output lies anywhere below a folder.
fn has_part(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.file_name() == "part-00000.parquet" || has_part(&entry.path()))
}

/// Reads a long file that is rewritten once its first part is there.
fn read_while_it_changes(lines: &str) -> Result<(), engine::error::StageError> {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "a.jsonl", lines);
    let bench = TestBench::new(folder.path()).file("source", &path).unwrap();
    let ended = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_part(folder.path()) && !ended.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::yield_now();
            }
            write(folder.path(), "a.jsonl", lines.replace("line 1\"", "line X\""));
        });
        let result = bench.run::<Dataset>(json!({"source": "./a.jsonl"}));
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        result.map(drop)
    })
}

#[test]
fn a_file_that_changes_while_it_is_read_is_noticed() {
    let lines: String = (0..200_000).map(|n| format!("{{\"text\":\"line {n}\"}}\n")).collect();
    // On a busy machine the change may come after the end, which is no concern of that run; then it is tried again.
    let error = (0..20).find_map(|_| read_while_it_changes(&lines).err()).expect("no change came in time");
    assert_eq!(error.cause, Cause::ChangedWhileRunning, "{error:?}");
}

#[test]
fn a_first_row_that_is_none_is_left_out_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"document\":\"d\",\n{\"document\":\"d\",\"summary\":\"s\"}\n";
    let table = "document,summary\nonly one\nd,s\n\"x\",y,z\n";
    for (name, text, dropped) in [("a.jsonl", lines, 1), ("a.csv", table, 2)] {
        let file = [write(folder.path(), name, text)];
        let error = run(folder.path(), &file, summarize()).unwrap_err();
        assert!(error.message.contains(&format!("{name}`, line ")), "{}", error.message);
        let mut with = summarize();
        with["on_bad_row"] = "drop".into();
        let made = run(folder.path(), &file, with).unwrap();
        assert_eq!(
            (column(&made, "dialogue"), &made.description.facts["dropped"]),
            (vec!["d".to_owned()], &dropped.into())
        );
    }
}

#[test]
fn rows_that_say_nothing_are_counted_and_go_by_their_own_policy() {
    let folder = tempfile::tempdir().unwrap();
    let lines = "{\"document\":\"d\",\"summary\":\"s\"}\n{\"document\":\" \",\"summary\":\"s\"}\n{\"document\":\"e\",\"summary\":\"\"}\n";
    let file = [write(folder.path(), "a.jsonl", lines)];
    let with = |policy: &str| {
        let mut with = summarize();
        with["on_empty"] = policy.into();
        with
    };
    let kept = run(folder.path(), &file, summarize()).unwrap();
    assert_eq!((column(&kept, "output").len(), &kept.description.facts["empty"]), (3, &2.into()));
    let dropped = run(folder.path(), &file, with("drop")).unwrap();
    assert_eq!(
        (column(&dropped, "output"), &dropped.description.facts["dropped_by"]["empty"]),
        (vec!["s".to_owned()], &2.into())
    );
    let error = run(folder.path(), &file, with("error")).unwrap_err();
    assert!(error.message.contains("line 2: column `document` is empty"), "{}", error.message);
    assert!(error.help.unwrap().contains("on_empty: drop"));
}

#[test]
fn a_row_that_is_too_long_is_unusable() {
    let folder = tempfile::tempdir().unwrap();
    let long = "x".repeat(10 << 20);
    let file = [write(folder.path(), "a.jsonl", format!("{{\"text\":\"a\"}}\n{{\"text\":\"{long}\"}}\n"))];
    let error = run(folder.path(), &file, json!({})).unwrap_err();
    assert!(error.message.contains("line 2: it has 10485760 bytes of text"), "{}", error.message);
    let made = run(folder.path(), &file, json!({"on_bad_row": "drop"})).unwrap();
    assert_eq!(
        (column(&made, "text"), &made.description.facts["dropped_by"]["too_long"]),
        (vec!["a".to_owned()], &1.into())
    );
    let made = run(folder.path(), &file, json!({"max_row_size": "10MiB"})).unwrap();
    assert_eq!(column(&made, "text")[1].len(), 10 << 20);
    let whole = [write(folder.path(), "a.txt", &long)];
    let made = run(folder.path(), &whole, json!({"sample_by": "document"})).unwrap();
    assert_eq!(column(&made, "text")[0].len(), 10 << 20, "a whole file may be long");
}

#[test]
fn a_conversation_in_disorder_is_unusable() {
    let folder = tempfile::tempdir().unwrap();
    let turns = |roles: &[&str]| roles.iter().map(|role| json!({"from": role, "value": "x"})).collect::<Value>();
    let lines =
        [turns(&["human", "gpt"]), turns(&["gpt", "human"])].map(|turns| json!({"conversations": turns}).to_string());
    let file = [write(folder.path(), "a.jsonl", lines.join("\n"))];
    let error = run(folder.path(), &file, json!({})).unwrap_err();
    let problem = "line 2: column `conversations` turn 1 (`assistant`): the assistant speaks first";
    assert!(error.message.contains(problem), "{}", error.message);
    assert!(error.help.unwrap().contains("turn_order: any"));
    assert_eq!(rows(&run(folder.path(), &file, json!({"turn_order": "any"})).unwrap()).len(), 2);
    assert_eq!(rows(&run(folder.path(), &file, json!({"on_bad_row": "drop"})).unwrap()).len(), 1);
    for key in ["messages", "conversations"] {
        let file = [write(folder.path(), "b.jsonl", json!({"chat": turns(&["human", "gpt"])}).to_string())];
        let with = json!({"column_map": {key: "chat"}});
        assert_eq!(rows(&run(folder.path(), &file, with).unwrap()).len(), 1, "{key}");
    }
}

#[test]
fn several_sources_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let lines = write(folder.path(), "z.jsonl", "{\"text\":\"one\"}\n{\"text\":\"two\"}\n");
    let table = write(folder.path(), "a.csv", "text\nthree\n");
    let bench = TestBench::new(folder.path()).file("source[0]", &lines).unwrap().file("source[1]", &table).unwrap();
    let made = bench.run::<Dataset>(json!({"source": ["./z.jsonl", "./a.csv"], "split": "train[1:]"})).unwrap();
    assert_eq!(column(&made["rows"], "text"), ["two", "three"]);
}

#[test]
fn rows_are_filtered_changed_and_cut_in_this_order() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String = (0..20)
        .map(|n| json!({"title": format!("T{n}"), "body": format!("B{n}"), "n": n}).to_string() + "\n")
        .collect();
    let file = [write(folder.path(), "a.jsonl", lines)];
    let with = json!({
        "split": "train[2:]", "filter": "n % 3 == 0", "map": {"text": "{{ title }}: {{ body }}", "tag": "x"}, "limit": 2,
    });
    let made = run(folder.path(), &file, with).unwrap();
    assert_eq!(column(&made, "text"), ["T3: B3", "T6: B6"]);
    let of_columns = json!({"filter": "n < 4", "map": {"number": "{{ n }}"}, "template": "Say {number}", "column_map": {"output": "title"}});
    let made = run(folder.path(), &file, of_columns).unwrap();
    assert_eq!(
        (column(&made, "number"), &made.description.facts["filtered"]),
        (["0", "1", "2", "3"].map(str::to_owned).into(), &16.into())
    );

    let error = run(folder.path(), &file, json!({"filter": "nn > 4", "map": {"text": "x"}})).unwrap_err();
    assert!(error.message.contains("a.jsonl`, line 1: `filter` uses column `nn`"), "{}", error.message);
    assert!(error.message.contains("did you mean `n`?"), "{}", error.message);
    let python = run(folder.path(), &file, json!({"filter": "len(title) > 4", "map": {"text": "x"}})).unwrap_err();
    assert!(python.message.contains("a filter here: `column|length`"), "{}", python.message);
    let none = run(folder.path(), &file, json!({"filter": "n > 99", "map": {"text": "x"}})).unwrap_err();
    assert!(none.help.unwrap().contains("`filter` leaves out all 20"));
    let few = json!({"filter": "n > 18", "map": {"text": "{{ n.x.y }}"}, "on_bad_row": "drop"});
    let help = run(folder.path(), &file, few).unwrap_err().help.unwrap();
    assert!(help.contains("`filter` leaves out 19 of them, and the others are unusable"), "{help}");
}

#[test]
fn white_space_beside_an_expression_is_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = [write(folder.path(), "a.jsonl", "{\"a\":\"x\"}\n")];
    for (text, expected) in [("{{ a }}\n", "x"), (" {{ a }}", " x"), ("{{ a }}\n\n", "x\n\n"), ("{{ a }} ", "x ")] {
        let made = run(folder.path(), &file, json!({"map": {"text": text}})).unwrap();
        assert_eq!(column(&made, "text"), [expected], "{text:?}");
    }
}

#[test]
fn the_text_of_a_row_is_in_the_order_of_its_template() {
    let folder = tempfile::tempdir().unwrap();
    let file = [write(folder.path(), "a.jsonl", "{\"question\":\"Who?\",\"answer\":\"Ann.\"}\n")];
    let with = json!({"template": "question_answer", "column_map": {"output": "answer"}});
    let made = run(folder.path(), &file, with).unwrap();
    let facts = RowsFacts::from_facts(&made.description.facts).unwrap();
    assert_eq!(rows(&made)[0].text(&facts), "Who?\nAnn.");
}

#[test]
fn a_damaged_table_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(["one"]));
    let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    let mut parquet = ArrowWriter::try_new(Vec::new(), batch.schema(), None).unwrap();
    parquet.write(&batch).unwrap();
    let whole = parquet.into_inner().unwrap();
    let mut damaged = 0;
    for (at, other) in (0..whole.len()).flat_map(|at| [(at, 0), (at, !whole[at])]) {
        let mut bytes = whole.clone();
        bytes[at] = other;
        let file = [write(folder.path(), "a.parquet", &bytes)];
        let told = run(folder.path(), &file, json!({"on_bad_row": "drop"})).err();
        let cause = told.as_ref().and_then(std::error::Error::source).map(ToString::to_string);
        damaged += usize::from(cause.as_deref() == Some("it is damaged"));
    }
    assert!(damaged > 0);
}

#[test]
fn splits_are_known_by_the_names_of_files() {
    let splits = |names: &[&str]| {
        let file = |name: &&str| SourceFile::new(PathBuf::from(name), (*name).to_owned()).unwrap();
        splits_by_name(&names.iter().map(file).collect::<Vec<_>>()).into_iter().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(splits(&["hub/data/test-00000-of-00001.jsonl", "hub/data/train-00000-of-00001.jsonl"]), "test train");
    assert_eq!(splits(&["a/dev/0.jsonl", "a/train/0.jsonl", "a/other.jsonl"]), "train validation");
    assert_eq!(splits(&["part-0.jsonl", "tests.jsonl", "trained.jsonl"]), "");
}

#[test]
fn one_row_is_a_dataset_and_none_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let made = run(folder.path(), &[write(folder.path(), "a.csv", "text\none\n")], json!({"shuffle": true})).unwrap();
    assert_eq!(column(&made, "text"), ["one"]);
    let error = run(folder.path(), &[write(folder.path(), "b.csv", "text\n")], json!({})).unwrap_err();
    assert!(error.message.contains("selects no rows of `./source`"), "{}", error.message);
    let lines = [write(folder.path(), "c.jsonl", "{\"text\":7}\n")];
    let error = run(folder.path(), &lines, json!({"on_bad_row": "drop"})).unwrap_err();
    assert!(error.help.unwrap().contains("all of them are unusable, such as "), "{}", error.message);
}

/// The problems of parameters that need no run to be found.
fn problems(with: Value) -> Vec<String> {
    let mut reader = Reader::default();
    let params = Dataset::read(&Node::from_json(&with), &mut reader);
    let checked = params.map_or_else(Vec::new, |params| Dataset::check(&params, &InputFacts::new(), Span::default()));
    reader.problems.into_iter().chain(checked).map(|problem| problem.message).collect()
}

#[test]
fn mistakes_are_found_without_running() {
    let xsum = json!({
        "source": "EdinburghNLP/xsum", "split": "train[:2000]",
        "column_map": {"dialogue": "document", "output": "summary"}, "template": "summarize",
    });
    assert_eq!(problems(xsum), [""; 0]);
    assert_eq!(problems(json!({"source": "./a.jsonl", "split": "test"})).len(), 1);
    assert_eq!(problems(json!({"source": "./a.jsonl", "split": "train[", "template": "sumarize"})).len(), 2);
    assert_eq!(
        problems(json!({"source": "./a.jsonl", "column_map": {"dialog": "a"}, "template": "summarize"})).len(),
        1
    );
    assert_eq!(problems(json!({"source": "no such thing", "template": "{a"})).len(), 2);
    let turned =
        problems(json!({"source": "./a.jsonl", "column_map": {"document": "dialogue"}, "template": "summarize"}));
    assert_eq!(turned.len(), 1);
    for (with, count) in [
        (json!({}), 1),
        (json!({"source": "./a.jsonl", "datasets": [{"rows": "a"}]}), 1),
        (json!({"source": "./a.jsonl", "mix": "interleave"}), 1),
        (json!({"datasets": []}), 1),
        (json!({"datasets": [{"rows": "a", "weight": 1}]}), 1),
        (json!({"datasets": [{"rows": "a", "weight": 1}, {"rows": "b"}], "mix": "interleave"}), 1),
        (json!({"datasets": [{"rows": "a"}], "template": "summarize", "map": {"x": "y"}}), 2),
        (json!({"datasets": [{"rows": "a", "weight": 0}], "mix": "interleave"}), 1),
        (json!({"datasets": [{"rows": "a", "weight": 1}, {"rows": "b", "weight": 1e-300}], "mix": "interleave"}), 1),
        (json!({"source": "./a.jsonl", "train_test_split": {"test_size": 1.5}}), 1),
        (json!({"source": "./a.jsonl", "train_test_split": {}}), 1),
        (json!({"source": "./a.jsonl", "filter": "a ==", "limit": 0}), 2),
        (json!({"source": ["./a.jsonl.gz", "b/*.csv"], "revision": "main"}), 1),
    ] {
        assert_eq!(problems(with.clone()).len(), count, "{with}: {:?}", problems(with.clone()));
    }
}

#[test]
fn a_dataset_on_the_hub_is_pinned_and_its_path_is_in_no_key() {
    let read = |with: Value| Dataset::read(&Node::from_json(&with), &mut Reader::default()).unwrap();
    let outside = Dataset::outside(&read(json!({"source": "EdinburghNLP/xsum"})));
    let [Outside::Pin(request)] = outside.as_slice() else { panic!("no pin: {outside:?}") };
    assert_eq!((request.kind.as_str(), request.revision.as_str()), ("hub-dataset", "main"));
    let outside = Dataset::outside(&read(json!({"source": "./a.jsonl"})));
    assert!(matches!(outside.as_slice(), [Outside::Files { role, .. }] if role == "source"));
}

#[test]
fn a_column_that_is_there_twice_is_not_chosen_from() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "a.csv", "input,output,output,,\nq,a,b,,\n");
    let error = run(folder.path(), std::slice::from_ref(&file), json!({})).unwrap_err();
    let beneath = error.source.unwrap().to_string();
    assert_eq!(beneath, "it has several columns `output`");
    // What nobody asks for may stand there as often as it likes.
    let file = write(folder.path(), "a.csv", "input,output,x,x,,\nq,a,1,2,,\n");
    assert_eq!(column(&run(folder.path(), &[file], json!({})).unwrap(), "output"), ["a"]);
}

#[test]
fn a_column_that_is_there_twice_is_not_found_in_the_whole_row_either() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), "a.csv", "text,x,x,,\nq,1,2,,\n");
    let error = run(folder.path(), &[file], json!({"map": {"text": "{{ row.x }}"}})).unwrap_err();
    assert_eq!(error.source.unwrap().to_string(), "it has several columns `x`");
}

#[test]
fn empty_files_among_others_are_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let files = [
        write(folder.path(), "a.jsonl", ""),
        write(folder.path(), "b.jsonl", "no JSON\n"),
        write(folder.path(), "c.jsonl", "{\"text\":\"here\"}\n"),
    ];
    let made = run(folder.path(), &files, json!({"on_bad_row": "drop"})).unwrap();
    assert_eq!(column(&made, "text"), ["here"]);
    let error = run(folder.path(), &files[..2], json!({"on_bad_row": "drop"})).unwrap_err();
    assert!(error.message.contains("b.jsonl`, line 1: it is not JSON"), "{}", error.message);
}

#[test]
fn of_very_many_columns_a_message_names_some() {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..20_000).map(|index| format!("c{index}")).collect();
    let file = write(folder.path(), "a.csv", format!("{}\n{}\n", names.join(","), names.join(",")));
    let error = run(folder.path(), &[file], json!({})).unwrap_err();
    assert!(error.message.len() < 500 && error.message.contains("and 19976 more"), "{}", error.message);
    let file = write(folder.path(), "b.csv", "text;n\na;1\n");
    let error = run(folder.path(), &[file], json!({})).unwrap_err();
    assert!(error.help.unwrap().contains("separator"));
}

#[test]
fn a_text_is_not_compared_with_a_number() {
    let folder = tempfile::tempdir().unwrap();
    let table = [write(folder.path(), "a.csv", "text,n\na,1\nb,9\n")];
    for (filter, what) in [("n > 5", "text with a number"), ("5 > n", "a number with text")] {
        let error = run(folder.path(), &table, json!({"filter": filter})).unwrap_err();
        assert!(error.message.contains(&format!("`{filter}` compares {what}; `|int`")), "{}", error.message);
    }
    assert_eq!(column(&run(folder.path(), &table, json!({"filter": "n|int > 5"})).unwrap(), "text"), ["b"]);
    let lines = [write(folder.path(), "a.jsonl", "{\"text\":\"a\",\"n\":1}\n{\"text\":\"b\",\"n\":9}\n")];
    assert_eq!(column(&run(folder.path(), &lines, json!({"filter": "n > 5"})).unwrap(), "text"), ["b"]);
}

#[test]
fn a_split_that_is_too_short_to_round_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let file = [write(folder.path(), "a.txt", "one\ntwo\n")];
    let error = run(folder.path(), &file, json!({"split": "train[:50%](pct1_dropremainder)"})).unwrap_err();
    assert!(error.help.unwrap().contains("rounded to the nearest row"));
}

#[test]
fn an_empty_file_is_called_empty() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.jsonl", "a.json", "a.csv"] {
        let file = write(folder.path(), name, "\n");
        let error = run(folder.path(), &[file], json!({ "template": "question_answer" })).unwrap_err();
        assert!(error.message.contains("is empty"), "{name}: {}", error.message);
    }
}
