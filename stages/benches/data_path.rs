//! Rows a second of `dataset`, `tokenize` and `pack`: the stages themselves, store and checksums among them.
//!
//! `cargo bench -p stages --bench data_path -- --rows FILE --tokenizer FOLDER [--column-map JSON] [--max-seq-len 2048]
//! [--threads 2]` prints one JSON line. Without a tokenizer only `dataset` is measured, and its peak of memory with it;
//! `--with JSON` adds parameters, such as `{"shuffle": true}`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;

use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{TokensFacts, TokensReader};
use stages::kinds::{dataset::Dataset, pack::Pack, tokenize::Tokenize};

fn main() -> Result<(), Box<dyn Error>> {
    let options = options(std::env::args().skip(1))?;
    let option = |name: &str, default: &str| options.get(name).cloned().unwrap_or_else(|| default.to_owned());
    let rows = PathBuf::from(options.get("rows").ok_or("--rows FILE is missing")?);
    let column_map: Value =
        serde_json::from_str(&option("column-map", r#"{"dialogue":"document","output":"summary"}"#))?;
    let more: Value = serde_json::from_str(&option("with", "{}"))?;
    let Some(tokenizer) = options.get("tokenizer").map(PathBuf::from) else {
        println!("{}", measure_rows(&rows, &column_map, &more)?);
        return Ok(());
    };
    let max_seq_len: usize = option("max-seq-len", "2048").parse()?;
    let threads: usize = option("threads", "2").parse()?;
    println!("{}", measure(&rows, &tokenizer, &column_map, max_seq_len, threads)?);
    Ok(())
}

/// `--name value` pairs; the flags that cargo adds have no value and are left out.
fn options(arguments: impl Iterator<Item = String>) -> Result<BTreeMap<String, String>, String> {
    let mut options = BTreeMap::new();
    let mut arguments = arguments.filter(|argument| argument != "--bench");
    while let Some(name) = arguments.next() {
        let name = name.strip_prefix("--").ok_or(format!("`{name}` is no option"))?.to_owned();
        let value = arguments.next().ok_or(format!("--{name} has no value"))?;
        options.insert(name, value);
    }
    Ok(options)
}

/// The stage's parameters for a file of articles.
fn with(column_map: &Value, more: &Value) -> Value {
    let mut with = json!({"source": "./rows", "template": "summarize", "column_map": column_map});
    let more = more.as_object().cloned().unwrap_or_default();
    with.as_object_mut().expect("it is an object").extend(more);
    with
}

fn measure_rows(rows: &Path, column_map: &Value, more: &Value) -> Result<Value, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let bench = TestBench::new(folder.path()).file("source", rows)?;
    let before = peak_memory_mib();
    let (made, seconds) = timed(|| bench.run::<Dataset>(with(column_map, more)))?;
    let count: f64 = made.values().filter_map(|rows| rows.description.facts["rows"].as_f64()).sum();
    Ok(json!({
        "rows": count,
        "seconds": seconds,
        "dataset_rows_per_s": (count / seconds).round(),
        "source_mib_per_s": (std::fs::metadata(rows)?.len() as f64 / f64::from(1 << 20) / seconds).round(),
        "peak_memory_mib": peak_memory_mib(),
        "peak_memory_before_mib": before,
    }))
}

/// The most memory that this process has held, where the system says it.
fn peak_memory_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib >> 10)
}

fn measure(
    rows: &Path,
    tokenizer: &Path,
    column_map: &Value,
    max_seq_len: usize,
    threads: usize,
) -> Result<Value, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let root = folder.path();
    let bench = TestBench::new(root).file("source", rows)?;
    let (articles, dataset_seconds) = timed(|| bench.run::<Dataset>(with(column_map, &json!({}))))?;

    let bench = TestBench::new(root)
        .input_of("articles.rows", &articles["rows"].folder)?
        .input("base.tokenizer", "tokenizer", tokenizer, serde_json::Map::new())?
        .threads(threads);
    let with = json!({"dataset": "articles", "tokenizer": "base", "max_seq_len": max_seq_len});
    let (tokens, tokenize_seconds) = timed(|| bench.run::<Tokenize>(with))?;

    let bench = TestBench::new(root).input_of("tokens.tokens", &tokens["tokens"].folder)?;
    let with = json!({"tokens": "tokens", "max_seq_len": max_seq_len});
    let (packs, pack_seconds) = timed(|| bench.run::<Pack>(with))?;
    let with = json!({"tokens": "tokens", "max_seq_len": max_seq_len, "strategy": "best_fit"});
    let (best_packs, best_fit_seconds) = timed(|| bench.run::<Pack>(with))?;

    let facts = TokensReader::open(&packs["packs"])?.facts().clone();
    let best = TokensReader::open(&best_packs["packs"])?.facts().clone();
    let count = TokensReader::open(&tokens["tokens"])?.len() as f64;
    let per_second = |seconds: f64| (count / seconds).round();
    Ok(json!({
        "rows": count,
        "tokens": facts.tokens,
        "packs": facts.rows,
        "padding_share": padding_share(&facts),
        "best_fit_packs": best.rows,
        "best_fit_padding_share": padding_share(&best),
        "threads": threads,
        "dataset_rows_per_s": per_second(dataset_seconds),
        "tokenize_rows_per_s": per_second(tokenize_seconds),
        "pack_rows_per_s": per_second(pack_seconds),
        "best_fit_rows_per_s": per_second(best_fit_seconds),
        "tokenize_and_pack_rows_per_s": per_second(tokenize_seconds + pack_seconds),
    }))
}

fn padding_share(facts: &TokensFacts) -> f64 {
    facts.padding as f64 / (facts.tokens + facts.padding) as f64
}

fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<(T, f64), E> {
    let start = Instant::now();
    Ok((work()?, start.elapsed().as_secs_f64()))
}
