//! What `pipeline validate` costs on a file of a thousand stages, and which share of it the parser has; and on files
//! with tens of thousands of variables, or of mistakes.
//!
//!     cargo bench --bench validate
//!
//! The file is made anew in a temporary folder: 250 times dataset, tokenize, pack and train, beside one model, over one
//! file of rows. Times are CPU time, user and system together, the median of 15; the peak is the system's own figure
//! for the process.

#![allow(clippy::unwrap_used, reason = "a bench may unwrap")]

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use engine::file::parse::parse;
use engine::file::source::Sources;
use nix::sys::resource::{Usage, UsageWho, getrusage};

const CHAINS: usize = 250;
const TIMES: usize = 15;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("thousand.yaml");
    fs::write(folder.path().join("rows.jsonl"), "{\"input\": \"a\", \"output\": \"b\"}\n".repeat(100)).unwrap();
    let text = thousand_stages();
    fs::write(&file, &text).unwrap();
    println!("{} stages, {} bytes, {} lines", CHAINS * 4 + 1, text.len(), text.lines().count());

    let registry = stages::registry();
    let program = median(UsageWho::RUSAGE_CHILDREN, || run(&["validate"], &file));
    let empty = median(UsageWho::RUSAGE_CHILDREN, || run(&[], Path::new("--version")));
    let parsing = median(UsageWho::RUSAGE_SELF, || {
        let mut sources = Sources::default();
        let source = sources.add("thousand.yaml", text.as_str());
        drop(parse(source, &text, &mut Vec::new()).unwrap());
    });
    let loading = median(UsageWho::RUSAGE_SELF, || drop(engine::plan::load(&file, &[], &registry).unwrap()));
    let plan = engine::plan::load(&file, &[], &registry).unwrap();
    let surveying =
        median(UsageWho::RUSAGE_SELF, || assert!(engine::checks::check(&plan, None, None).into_problems().is_empty()));

    let peak = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss();
    println!("pipeline validate     {:6.1} ms, peak {:.1} MiB", ms(program), peak as f64 / 1024.0);
    println!("pipeline --version    {:6.1} ms", ms(empty));
    println!("parsing               {:6.1} ms, {:.0} % of it", ms(parsing), 100.0 * ms(parsing) / ms(program));
    println!("loading, parsing too  {:6.1} ms", ms(loading));
    println!("checking              {:6.1} ms", ms(surveying));
    for (name, text) in [("60,000 variables", many_variables()), ("30,000 unknown kinds", many_unknown_kinds())] {
        let refused = median(UsageWho::RUSAGE_SELF, || {
            drop(engine::plan::load_text(&file, &text, &[], &registry).err().unwrap());
        });
        println!("{name:20}  {:6.1} ms, {} bytes", ms(refused), text.len());
    }
}

/// What a check must not take time with the square of: see `tests/large_files.rs`.
fn many_variables() -> String {
    let vars: String = (0..60_000).map(|at| format!("  v{at}: 1\n")).collect();
    format!("version: 1\nvars:\n{vars}stages: {{ s: {{ uses: unknown }} }}\n")
}

fn many_unknown_kinds() -> String {
    let stages: String = (0..30_000).map(|at| format!("  s{at}: {{ uses: k{at} }}\n")).collect();
    format!("version: 1\nstages:\n{stages}")
}

fn thousand_stages() -> String {
    let mut text = "version: 1\nname: thousand\nvars: { rank: 8, length: 512 }\nstages:\n  base:\n    uses: download\n    with: { repo: meta-llama/Llama-3.1-8B-Instruct, exclude: [\"original/*\"] }\n"
        .to_owned();
    for chain in 0..CHAINS {
        write!(
            text,
            "  rows_{chain}:
    uses: dataset
    with:
      source: ./rows.jsonl
      split: train[:{split}]
      column_map: {{ question: input, output: output }}
      template: question_answer
  tokens_{chain}:
    uses: tokenize
    with: {{ dataset: rows_{chain}, tokenizer: base, max_seq_len: \"${{vars.length}}\", train_on_input: false }}
  packs_{chain}:
    uses: pack
    with: {{ tokens: tokens_{chain}, max_seq_len: \"${{vars.length}}\" }}
  adapter_{chain}:
    uses: train
    with:
      model: base
      data: packs_{chain}
      method: lora
      lora: {{ rank: \"${{vars.rank}}\", alpha: 16, target_modules: [q_proj, v_proj] }}
      optimizer: {{ name: adamw, learning_rate: 3e-4, weight_decay: 0.01 }}
      scheduler: {{ name: cosine, warmup_steps: 0 }}
      micro_batch_size: 2
      gradient_accumulation_steps: 32
      epochs: 1
    retries: 1
    timeout: 12h
",
            split = chain + 1
        )
        .unwrap();
    }
    text
}

fn run(arguments: &[&str], file: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipeline"));
    let status = command.args(arguments).arg(file).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    assert!(status.success(), "{arguments:?}");
}

/// The middle of the CPU times of what is done again and again.
fn median(who: UsageWho, mut once: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..TIMES)
        .map(|_| {
            let before = cpu(&getrusage(who).unwrap());
            once();
            cpu(&getrusage(who).unwrap()) - before
        })
        .collect();
    times.sort();
    times[TIMES / 2]
}

fn cpu(usage: &Usage) -> Duration {
    let seconds = |time: nix::sys::time::TimeVal| {
        Duration::from_secs(time.tv_sec().unsigned_abs()) + Duration::from_micros(time.tv_usec().unsigned_abs())
    };
    seconds(usage.user_time()) + seconds(usage.system_time())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
