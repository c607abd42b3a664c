//! What a rerun says of its cause, and what content makes run again: the file, the field and the row that somebody
//! changed.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, StringArray};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use test_harness::test;

use crate::support::Project;

const FILE: &str = "explain.yaml";

/// A project with a checkpoint in `model`, and another tokenizer in `tokenizer.json`.
fn project() -> Project {
    let project = Project::with_pipeline("data.yaml");
    for (output, folder) in [("fresh.model", "model"), ("fresh.tokenizer", "tokenizer")] {
        project.run(&["run", "data.yaml", "--until", "fresh", "fresh.vocab_size=300"]).ends_with(0);
        project.run(&["export", "data.yaml", output, folder, "fresh.vocab_size=300"]).ends_with(0);
    }
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(project.path("tokenizer").join(file), project.path("model").join(file)).unwrap();
    }
    let pipelines = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pipelines");
    fs::copy(pipelines.join(FILE), project.path(FILE)).unwrap();
    project
}

/// The stages that a run ran.
#[track_caller]
fn ran(project: &Project, arguments: &[&str]) -> BTreeSet<String> {
    let all: Vec<&str> = [arguments, &["--format", "json"]].concat();
    let result = project.run(&all).ends_with(0).json();
    let stages = result["stages"].as_array().unwrap().iter().filter(|stage| stage["state"] == "done");
    stages.map(|stage| stage["stage"].as_str().unwrap().to_owned()).collect()
}

/// The first line of a plan that is not about something cached, without the columns between stage and cause.
#[track_caller]
fn first_cause(project: &Project) -> String {
    let plan = project.run(&["plan", FILE]);
    let line = plan.stdout.lines().skip(1).take_while(|line| !line.is_empty()).find(|line| !line.contains("  cached"));
    let line = line.unwrap_or_else(|| panic!("nothing would run: {plan}"));
    let words = ["will run", "continues from step"].iter().find_map(|word| Some((line.find(word)?, word.len())));
    let (at, length) = words.unwrap_or_else(|| panic!("no cause in {line}"));
    let stage = line.split_whitespace().next().unwrap();
    format!("{stage}: {}", line[at + length..].trim())
}

/// Single edits of the file, what the first line then says, and nothing else.
const EDITS: [(&str, &str, &str); 35] = [
    ("learning_rate: 3e-3", "learning_rate: 1e-4", "adapter: optimizer.learning_rate 0.003 → 1e-4"),
    ("weight_decay: 0.01", "weight_decay: 0.1", "adapter: optimizer.weight_decay 0.01 → 0.1"),
    ("rank: 4", "rank: 2", "adapter: lora.rank 4 → 2"),
    ("alpha: 8", "alpha: 16", "adapter: lora.alpha 8 → 16"),
    ("[q_proj, v_proj]", "[q_proj, k_proj]", "adapter: lora.target_modules[1] v_proj → k_proj"),
    ("warmup_steps: 4", "warmup_steps: 2", "adapter: scheduler.warmup_steps 4 → 2"),
    ("name: cosine", "name: linear", "adapter: scheduler.name cosine → linear"),
    ("epochs: 2", "epochs: 3", "adapter: epochs 2 → 3"),
    ("micro_batch_size: 2", "micro_batch_size: 1", "adapter: micro_batch_size 2 → 1"),
    ("accumulation_steps: 3", "accumulation_steps: 2", "adapter: gradient_accumulation_steps 3 → 2"),
    ("seed: 7", "seed: 8", "adapter: seed 7 → 8"),
    ("      seed: 7\n", "", "adapter: seed 7 → 0"),
    ("shuffle: true", "shuffle: false", "adapter: shuffle true → false"),
    ("leftover: step", "leftover: drop", "adapter: leftover step → drop"),
    ("clip_grad_norm: 1.0", "clip_grad_norm: 0.5", "adapter: clip_grad_norm 1.0 → 0.5"),
    ("      dtype: f32\n", "      dtype: bf16\n", "adapter: dtype f32 → bf16"),
    ("shuffle: true", "shuffle: true\n      max_steps_per_epoch: 1", "adapter: max_steps_per_epoch none → 1"),
    ("data: packs", "data: tokens", "adapter: data packs → tokens"),
    ("train[:20]", "train[:10]", "questions: split train[:20] → train[:10]"),
    ("length > 1", "length > 2", "questions: filter question|length > 1 → question|length > 2"),
    ("\"Q: {question}", "\"Question: {question}", "questions: template Q: {question}"),
    ("on_empty: keep", "on_empty: drop", "questions: on_empty keep → drop"),
    ("limit: 30", "limit: 29", "questions: limit 30 → 29"),
    ("max_seq_len: 96", "max_seq_len: 80", "tokens: max_seq_len 96 → 80"),
    ("train_on: assistant", "train_on: all", "tokens: train_on assistant → all"),
    ("add_bos: false", "add_bos: true", "tokens: add_bos false → true"),
    ("max_seq_len: 128", "max_seq_len: 112", "packs: max_seq_len 128 → 112"),
    ("strategy: next_fit", "strategy: best_fit", "packs: strategy next_fit → best_fit"),
    ("proof_rows: 2", "proof_rows: 3", "merged: proof_rows 2 → 3"),
    ("dtype: f32, proof", "dtype: bf16, proof", "merged: dtype f32 → bf16"),
    ("[perplexity]", "[token_accuracy]", "scores: metrics[0] perplexity → token_accuracy"),
    ("limit: 5", "limit: 6", "scores: limit 5 → 6"),
    ("use_stemmer: true", "use_stemmer: false", "scores: use_stemmer true → false"),
    ("is the fox?", "is the hen?", "samples: prompts[0] Where is the fox? → Where is the hen?"),
    ("max_new_tokens: 8", "max_new_tokens: 9", "samples: max_new_tokens 8 → 9"),
];

/// Changes of files: the file, what becomes of its text, and what the first line then says.
type FileEdit = (&'static str, fn(Vec<u8>) -> Vec<u8>, &'static str);

const FILE_EDITS: [FileEdit; 5] = [
    ("questions.jsonl", |text| [text, b" ".to_vec()].concat(), "questions: source file changed: questions.jsonl"),
    ("model/tokenizer.json", |text| [text, b" ".to_vec()].concat(), "base: source file changed: tokenizer.json"),
    ("model/config.json", |text| [text, b" ".to_vec()].concat(), "base: source file changed: config.json"),
    ("model/model.safetensors", other_weights, "base: source file changed: model.safetensors"),
    (
        "model/chat_template.jinja",
        |_| b"{{ messages }}".to_vec(),
        "base: source file changed: chat_template.jinja added",
    ),
];

/// Forty changes, one at a time: the first line names the one true cause, and the place in the file where it stands.
#[test]
fn the_first_line_names_the_one_true_cause() {
    let project = project();
    project.run(&["run", FILE]).ends_with(0);
    let text = fs::read_to_string(project.path(FILE)).unwrap();
    let mut wrong = Vec::new();
    for (from, to, expected) in EDITS {
        assert_eq!(text.matches(from).count(), 1, "`{from}`");
        project.write(FILE, &text.replace(from, to));
        let cause = first_cause(&project);
        let place =
            cause.rsplit_once(&format!("({FILE}:")).and_then(|(_, place)| place.split(':').next()?.parse().ok());
        let line = place.and_then(|line: usize| {
            fs::read_to_string(project.path(FILE)).ok()?.lines().nth(line - 1).map(str::to_owned)
        });
        // A field that was taken out is said to be missing where the fields around it stand.
        let stands_there = line.is_some_and(|line| to.is_empty() || to.lines().any(|to| line.contains(to.trim())));
        if !cause.starts_with(expected) || !stands_there {
            wrong.push(format!("{from} → {to}: {cause}"));
        }
    }
    project.write(FILE, &text);
    for (file, edit, expected) in FILE_EDITS {
        let before = fs::read(project.path(file)).ok();
        fs::write(project.path(file), edit(before.clone().unwrap_or_default())).unwrap();
        let cause = first_cause(&project);
        if !cause.starts_with(expected) || !cause.contains(&format!("({FILE}:")) {
            wrong.push(format!("{file}: {cause}"));
        }
        match before {
            Some(before) => fs::write(project.path(file), before).unwrap(),
            None => fs::remove_file(project.path(file)).unwrap(),
        }
    }
    assert_eq!(wrong, [""; 0], "{} of {} are wrong", wrong.len(), EDITS.len() + FILE_EDITS.len());
    project.run(&["plan", FILE]).ends_with(0).says("nothing to do");
}

/// The same weights but for one bit of one value.
fn other_weights(mut bytes: Vec<u8>) -> Vec<u8> {
    let last = bytes.len() - 4;
    bytes[last] ^= 1;
    bytes
}

/// Five bugs that a cache of prepared data had elsewhere (axolotl issues 1265, 885, 33, 341 and 3303), and the weights.
#[test]
fn content_reruns_what_it_decides_and_nothing_else() {
    let project = project();
    project.run(&["run", FILE]).ends_with(0);
    let run = |names: &[&str]| {
        let ran = ran(&project, &["run", FILE]);
        let expected: BTreeSet<String> = names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(ran, expected);
    };
    let behind_the_model = ["adapter", "merged", "samples", "scores"];
    // 885: the tokenizer's settings. The tokens come out equal, and what reads them alone does not run.
    let settings = fs::read_to_string(project.path("model/tokenizer_config.json")).unwrap();
    project.write("model/tokenizer_config.json", &format!("{settings}\n"));
    run(&[&["base", "tokens"][..], &behind_the_model].concat());
    // 33: a chat template that was not there.
    project.write("model/chat_template.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}");
    run(&[&["base", "tokens"][..], &behind_the_model].concat());
    // 1265: the tokenizer of another model.
    project.run(&["run", "data.yaml", "--until", "fresh", "fresh.vocab_size=290"]).ends_with(0);
    project.run(&["export", "data.yaml", "fresh.tokenizer", "other", "fresh.vocab_size=290"]).ends_with(0);
    fs::copy(project.path("other/tokenizer.json"), project.path("model/tokenizer.json")).unwrap();
    project.run(&["plan", FILE]).ends_with(0).says("source file changed: tokenizer.json");
    run(&[&["base", "packs", "tokens"][..], &behind_the_model].concat());
    // 341: other data files.
    let rows = fs::read_to_string(project.path("questions.jsonl")).unwrap();
    project.write("other.jsonl", &rows.replacen("Where", "Say where", 1));
    project.edit(FILE, "./questions.jsonl", "./other.jsonl");
    project.run(&["plan", FILE]).ends_with(0).says("source ./questions.jsonl → ./other.jsonl (explain.yaml:11:15)");
    let rerun = project.run(&["run", FILE]).ends_with(0);
    rerun
        .warns("tokens: running: input questions changed (1 of 20 rows)")
        .warns("packs: running: input tokens changed (1 of 20 rows)");
    // 3303: where the result is put.
    let text = fs::read_to_string(project.path(FILE)).unwrap();
    project.write(FILE, &format!("{text}publish: {{ merged: ./out/model }}\n"));
    run(&[]);
    project.edit(FILE, "./out/model", "./out/elsewhere");
    run(&[]);
    // Weights decide nothing about tokens.
    let weights = fs::read(project.path("model/model.safetensors")).unwrap();
    fs::write(project.path("model/model.safetensors"), other_weights(weights)).unwrap();
    run(&[&["base"][..], &behind_the_model].concat());
}

/// Writes the questions as Parquet.
fn write_parquet(project: &Project, file: &str, rows: &[(String, String)], codec: Compression, group: usize) {
    let column = |values: Vec<&str>| Arc::new(StringArray::from(values)) as ArrayRef;
    let questions = column(rows.iter().map(|(question, _)| question.as_str()).collect());
    let answers = column(rows.iter().map(|(_, answer)| answer.as_str()).collect());
    let batch = RecordBatch::try_from_iter([("question", questions), ("answer", answers)]).unwrap();
    let properties =
        WriterProperties::builder().set_compression(codec).set_max_row_group_row_count(Some(group)).build();
    fs::create_dir_all(project.path(file).parent().unwrap()).unwrap();
    let mut writer =
        ArrowWriter::try_new(fs::File::create(project.path(file)).unwrap(), batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

/// Rows are what they say: another codec, other row groups, several files, another order of keys rerun nothing behind
/// them.
#[test]
fn a_source_that_says_the_same_in_another_form_reruns_nothing_behind_it() {
    let project = Project::with_pipeline("data.yaml");
    let text = fs::read_to_string(project.path("questions.jsonl")).unwrap();
    let rows: Vec<(String, String)> = text
        .lines()
        .map(|line| {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            (row["question"].as_str().unwrap().to_owned(), row["answer"].as_str().unwrap().to_owned())
        })
        .collect();
    let run = || ran(&project, &["run", "data.yaml"]).into_iter().collect::<Vec<_>>();
    let source = |from: &str, to: &str| project.edit("data.yaml", &format!("source: {from}"), &format!("source: {to}"));
    assert_eq!(run().len(), 7);

    let other_text: String = rows
        .iter()
        .map(|(question, answer)| {
            format!("{{ \"answer\" :{}, \"question\":{} }}\n\n", quoted(answer), quoted(question))
        })
        .collect();
    project.write("questions.jsonl", &other_text);
    assert_eq!(run(), ["questions"], "other white space and another order of keys");

    let zstd = Compression::ZSTD(ZstdLevel::default());
    write_parquet(&project, "rows.parquet", &rows, Compression::UNCOMPRESSED, 1000);
    source("./questions.jsonl", "./rows.parquet");
    assert_eq!(run(), ["questions"], "JSON lines or Parquet");
    write_parquet(&project, "rows.parquet", &rows, zstd, 1000);
    assert_eq!(run(), ["questions"], "another codec");
    write_parquet(&project, "rows.parquet", &rows, Compression::SNAPPY, 5);
    assert_eq!(run(), ["questions"], "another codec and small row groups");
    write_parquet(&project, "parts/a.parquet", &rows[..7], zstd, 3);
    write_parquet(&project, "parts/b.parquet", &rows[7..], Compression::UNCOMPRESSED, 100);
    source("./rows.parquet", "./parts/*.parquet");
    assert_eq!(run(), ["questions"], "two files");

    let mut changed = rows;
    changed[9].1.push('!');
    write_parquet(&project, "parts/b.parquet", &changed[7..], Compression::UNCOMPRESSED, 100);
    project.run(&["plan", "data.yaml"]).ends_with(0).says("source file changed: b.parquet (data.yaml:");
    let rerun = project.run(&["run", "data.yaml"]).ends_with(0);
    rerun.warns("question_tokens: running: input questions changed (1 of 24 rows)");
    assert_eq!(run(), [""; 0]);
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// How long a stage takes is known from how long it took; what never ran has no estimate.
#[test]
fn an_estimate_has_a_basis_or_is_left_out() {
    let project = Project::with_pipeline("data.yaml");
    let plan = |arguments: &[&str]| {
        project.run(&[&["plan", "data.yaml", "--format", "json"], arguments].concat()).ends_with(0).json()
    };
    assert!(plan(&[])["estimate"].is_null());
    project.run(&["plan", "data.yaml"]).ends_with(0);
    project.run(&["run", "data.yaml"]).ends_with(0);
    let estimates = plan(&["question_tokens.max_seq_len=90"]);
    let stage = |name: &str| {
        let stages = estimates["stages"].as_array().unwrap();
        stages.iter().find(|stage| stage["stage"] == name).unwrap()["estimate"].clone()
    };
    assert!(stage("text_tokens").is_null(), "what is cached takes no time");
    let tokens = stage("question_tokens");
    assert_eq!(tokens["basis"], serde_json::json!({ "basis": "same_work", "runs": 1 }));
    assert!(tokens["seconds"].as_f64().unwrap() > 0.0 && tokens["cpu_seconds"].as_f64().unwrap() > 0.0);
    let total = &estimates["estimate"];
    assert!(total["critical_path_seconds"].as_f64() >= tokens["seconds"].as_f64());
    assert_eq!(total["without"], serde_json::json!([]));
    // Ten rows of twenty-four take less, in proportion.
    let split = ["questions.limit=10"];
    project.run(&[&["run", "data.yaml", "--until", "questions"], &split[..]].concat()).ends_with(0);
    project
        .run(&[&["plan", "data.yaml"], &split[..]].concat())
        .ends_with(0)
        .says("0.42 times the rows of an earlier run");
}
