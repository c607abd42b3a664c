//! What a file becomes, and what is said of one that is wrong: every problem, its place and its help.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::env::VarError;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::graph_text::edges;
use super::load::load_with;
use super::smoke::Scale;
use super::*;
use crate::artifact::Output;
use crate::context::StageContext;
use crate::error::StageError;
use crate::executor::ExecutorKind;
use crate::parameter::{ArtifactKind, Input, LocalPath, Mapping, OneOf};
use crate::stage::{InputFacts, Registry, Stage, StageKind};

mod conditions;
mod machine;
mod overrides;
mod references;
mod size;
mod sweeps;
mod variables;
mod whole_files;

/// The stages that one waits for without reading them.
fn needs<'p>(plan: &'p Plan, stage: &str) -> Vec<&'p str> {
    plan.stage(stage).unwrap().needs.iter().map(|position| plan.stages[*position].id.as_str()).collect()
}

macro_rules! artifacts {
    ($($name:ident: $($kind:literal)|+;)*) => {$(
        struct $name;

        impl ArtifactKind for $name {
            const KINDS: &'static [&'static str] = &[$($kind),+];
        }
    )*};
}

artifacts! {
    Rows: "rows";
    Tokens: "tokens" | "packs";
    Tokenizer: "tokenizer";
    Model: "model";
    Adapter: "adapter";
    Metrics: "metrics";
}

macro_rules! stage {
    ($kind:ident = $name:literal makes [$($output:literal: $made:literal),*] $(check $check:expr)?) => {
        impl StageKind for $kind {
            const NAME: &'static str = $name;
            const VERSION: u32 = 1;
            const ABOUT: &'static str = concat!("A ", $name, ".");
        }

        impl Stage for $kind {
            fn outputs(&self) -> Vec<Output> {
                vec![$(Output::new($output, $made)),*]
            }

            $(fn check(&self, _: &InputFacts, span: Span) -> Vec<Problem> {
                ($check)(self, span)
            })?

            fn run(&self, _: &mut StageContext) -> Result<(), StageError> {
                Ok(())
            }
        }
    };
}

#[derive(Parameters)]
struct Download {
    #[semantic]
    repo: Option<String>,
    #[semantic]
    path: Option<LocalPath>,
    #[semantic(default)]
    exclude: Vec<String>,
}

stage!(Download = "download" makes ["model": "model", "tokenizer": "tokenizer"] check
|params: &Download, span| match (&params.repo, &params.path) {
    (Some(_), Some(path)) => vec![Problem::error("both", path.span, "`repo` and `path`", "one of them")],
    (None, None) => vec![Problem::warning("neither", span, "nothing to fetch", "no `repo`")],
    _ => Vec::new(),
});

#[derive(Parameters)]
struct Dataset {
    #[semantic]
    source: String,
    #[semantic(default)]
    column_map: Mapping<String>,
}

stage!(Dataset = "dataset" makes ["rows": "rows"]);

#[derive(Parameters)]
struct Tokenize {
    #[semantic]
    dataset: Input<Rows>,
    #[semantic]
    tokenizer: Input<Tokenizer>,
    #[semantic(range = 1..)]
    max_seq_len: usize,
}

stage!(Tokenize = "tokenize" makes ["tokens": "tokens"]);

/// The method.
#[derive(Parameters)]
enum Method {
    Lora,
    Full,
}

#[derive(Parameters)]
struct LoraParams {
    #[semantic(range = 1.., default = 8)]
    rank: u32,
    #[semantic(default = 16.0)]
    alpha: f64,
}

#[derive(Parameters)]
struct Train {
    #[semantic]
    model: Input<Model>,
    #[semantic]
    data: Input<Tokens>,
    #[semantic(default = Method::Lora)]
    method: Method,
    #[semantic]
    lora: Option<LoraParams>,
    #[semantic(above = 0.0, default = 3e-4)]
    learning_rate: f64,
    #[resumable(default = 1)]
    epochs: u32,
    #[cosmetic(default = 1)]
    log_every: u32,
}

stage!(Train = "train" makes ["adapter": "adapter", "metrics": "metrics"]);

#[derive(Parameters)]
struct Merge {
    #[semantic]
    model: Input<Model>,
    #[semantic]
    adapter: Input<Adapter>,
}

stage!(Merge = "merge" makes ["model": "model"]);

#[derive(Parameters)]
struct Split {
    #[semantic]
    rows: Input<Rows>,
}

stage!(Split = "split" makes ["left": "rows", "right": "rows"]);

#[derive(Parameters)]
struct Pair {
    #[semantic]
    a: Input<Rows>,
    #[semantic]
    b: Input<Rows>,
}

stage!(Pair = "pair" makes []);

#[derive(Parameters)]
struct Generate {
    #[semantic]
    model: Input<Model>,
    #[semantic]
    prompts: OneOf<Vec<String>, Input<Rows>>,
}

stage!(Generate = "generate" makes ["samples": "samples"]);

#[derive(Parameters)]
struct WeightedRows {
    #[semantic]
    rows: Input<Rows>,
    #[semantic]
    weight: Option<f64>,
}

#[derive(Parameters)]
struct Mix {
    #[semantic]
    datasets: Option<Vec<WeightedRows>>,
    #[semantic]
    all: Option<Vec<Input<Rows>>>,
    #[semantic]
    names: Option<Vec<String>>,
}

stage!(Mix = "mix" makes ["rows": "rows"]);

#[derive(Parameters)]
struct Table {
    #[semantic]
    metrics: Input<Metrics>,
}

stage!(Table = "table" makes ["metrics": "metrics"]);

fn registry() -> Registry {
    Registry::new()
        .with::<Download>()
        .with::<Dataset>()
        .with::<Tokenize>()
        .with::<Train>()
        .with::<Merge>()
        .with::<Split>()
        .with::<Generate>()
        .with::<Pair>()
        .with::<Mix>()
        .with::<Table>()
}

fn load_over(text: &str, overrides: &[&str]) -> Result<Plan, Rejected> {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    let env = |name: &str| match name {
        "HOME_ROWS" => Ok("rows.jsonl".to_owned()),
        "NOT_UTF8" => Err(VarError::NotUnicode(OsString::from_vec(vec![0xff]))),
        _ => Err(VarError::NotPresent),
    };
    load_with(Path::new("file.yaml"), text, &overrides, &registry(), Scale::Full, &env)
}

fn plan(text: &str) -> Plan {
    plan_over(text, &[])
}

fn plan_over(text: &str, overrides: &[&str]) -> Plan {
    load_over(text, overrides).unwrap_or_else(|rejected| panic!("{:#?}", lines(&rejected)))
}

/// `code line:column message (help)` of every problem.
fn lines(rejected: &Rejected) -> Vec<String> {
    let place = |span| {
        let (line, column) = rejected.sources.line_column(span);
        let name = &rejected.sources.get(span.source).unwrap().name;
        if name == "file.yaml" { format!("{line}:{column}") } else { format!("{name}:{column}") }
    };
    let text = |problem: &Problem| {
        let related: String = problem.related.iter().map(|(span, _)| format!(" & {}", place(*span))).collect();
        let help = problem.help.as_ref().map(|help| format!(" ({help})")).unwrap_or_default();
        format!("{} {}{related} {}{help}", problem.code, place(problem.span), problem.message)
    };
    rejected.problems.iter().map(text).collect()
}

fn wrong(text: &str) -> Vec<String> {
    wrong_over(text, &[])
}

fn wrong_over(text: &str, overrides: &[&str]) -> Vec<String> {
    lines(&load_over(text, overrides).expect_err("a file with mistakes"))
}

fn ids(plan: &Plan) -> Vec<&str> {
    plan.stages.iter().map(|stage| stage.id.as_str()).collect()
}

const REFERENCE: &str = r#"version: 1
name: xsum
vars: { rank: 4, data: { folder: ./data, names: [a, b] } }
stages:
  merged: { uses: merge, with: { model: base, adapter: adapter } }
  base:
    uses: download
    with: { repo: meta-llama/Llama-3.1-8B-Instruct, exclude: ["original/*"] }
  adapter:
    uses: train
    with:
      model: base.model
      data: tokens
      lora: { rank: "${vars.rank}" }
      learning_rate: 3e-4
    resources: { device: npu, count: 8, memory: 40GiB }
    retries: 1
    timeout: 12h
  articles:
    uses: dataset
    with:
      source: "${vars.data.folder}/${env.HOME_ROWS}$${x}"
      column_map: { dialogue: document, output: summary }
  tokens:
    uses: tokenize
    with: { dataset: articles, tokenizer: base, max_seq_len: 2048 }
  samples: { uses: generate, with: { model: merged, prompts: ["hi"] }, needs: [tokens] }
publish: { merged: ./out/model, adapter.metrics: ./out/metrics }
"#;

/// A file with two rows stages, a split and a tokenizer; `{}` is where a test writes its stages.
fn file(stages: &str) -> String {
    let common = "  base: { uses: download, with: { repo: a/b } }\n  rows: { uses: dataset, with: { source: x } }\n";
    format!("version: 1\nstages:\n{common}{stages}\n")
}
