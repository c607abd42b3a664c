//! What a file becomes, and what is said of one that is wrong: every problem, its place and its help.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::time::{Duration, Instant};

use super::load::load_with;
use super::smoke::Scale;
use super::*;
use crate::artifact::Output;
use crate::context::StageContext;
use crate::error::StageError;
use crate::parameter::{ArtifactKind, Input, LocalPath, Mapping, OneOf};
use crate::stage::{InputFacts, Registry, Stage};

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
}

macro_rules! stage {
    ($kind:ident($params:ident) = $name:literal makes [$($output:literal: $made:literal),*] $(check $check:expr)?) => {
        struct $kind;

        impl Stage for $kind {
            const NAME: &'static str = $name;
            const VERSION: u32 = 1;
            const ABOUT: &'static str = concat!("A ", $name, ".");
            type Params = $params;

            fn outputs(_: &$params) -> Vec<Output> {
                vec![$(Output::new($output, $made)),*]
            }

            $(fn check(params: &$params, _: &InputFacts, span: Span) -> Vec<Problem> {
                ($check)(params, span)
            })?

            fn run(_: &$params, _: &mut StageContext) -> Result<(), StageError> {
                Ok(())
            }
        }
    };
}

#[derive(Parameters)]
struct DownloadParams {
    #[semantic]
    repo: Option<String>,
    #[semantic]
    path: Option<LocalPath>,
    #[semantic(default)]
    exclude: Vec<String>,
}

stage!(Download(DownloadParams) = "download" makes ["model": "model", "tokenizer": "tokenizer"] check
|params: &DownloadParams, span| match (&params.repo, &params.path) {
    (Some(_), Some(path)) => vec![Problem::error("both", path.span, "`repo` and `path`", "one of them")],
    (None, None) => vec![Problem::warning("neither", span, "nothing to fetch", "no `repo`")],
    _ => Vec::new(),
});

#[derive(Parameters)]
struct DatasetParams {
    #[semantic]
    source: String,
    #[semantic(default)]
    column_map: Mapping<String>,
}

stage!(Dataset(DatasetParams) = "dataset" makes ["rows": "rows"]);

#[derive(Parameters)]
struct TokenizeParams {
    #[semantic]
    dataset: Input<Rows>,
    #[semantic]
    tokenizer: Input<Tokenizer>,
    #[semantic(range = 1..)]
    max_seq_len: usize,
}

stage!(Tokenize(TokenizeParams) = "tokenize" makes ["tokens": "tokens"]);

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
struct TrainParams {
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
}

stage!(Train(TrainParams) = "train" makes ["adapter": "adapter", "metrics": "metrics"]);

#[derive(Parameters)]
struct MergeParams {
    #[semantic]
    model: Input<Model>,
    #[semantic]
    adapter: Input<Adapter>,
}

stage!(Merge(MergeParams) = "merge" makes ["model": "model"]);

#[derive(Parameters)]
struct SplitParams {
    #[semantic]
    rows: Input<Rows>,
}

stage!(Split(SplitParams) = "split" makes ["left": "rows", "right": "rows"]);

#[derive(Parameters)]
struct PairParams {
    #[semantic]
    a: Input<Rows>,
    #[semantic]
    b: Input<Rows>,
}

stage!(Pair(PairParams) = "pair" makes []);

#[derive(Parameters)]
struct GenerateParams {
    #[semantic]
    model: Input<Model>,
    #[semantic]
    prompts: OneOf<Vec<String>, Input<Rows>>,
}

stage!(Generate(GenerateParams) = "generate" makes ["samples": "samples"]);

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
}

fn load_over(text: &str, overrides: &[&str]) -> Result<Plan, Rejected> {
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    let env = |name: &str| (name == "HOME_ROWS").then(|| "rows.jsonl".to_owned());
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

#[test]
fn a_file_becomes_a_plan() {
    let plan = plan(REFERENCE);
    assert_eq!((plan.name.as_str(), plan.file.as_path()), ("xsum", Path::new("file.yaml")));
    assert_eq!(ids(&plan), ["base", "articles", "tokens", "adapter", "merged", "samples"]);
    let adapter = plan.stage("adapter").unwrap();
    assert_eq!(
        (adapter.kind, adapter.retries.max, adapter.timeout),
        ("train", 1, Some(Duration::from_secs(12 * 3600)))
    );
    let resources =
        Resources { device: DeviceRequest::Npu, count: Some(8), memory: Some(40 << 30), ..Resources::default() };
    assert_eq!(adapter.resources, resources);
    // What is read and not acted upon is said.
    let warnings: Vec<&str> = plan.warnings.iter().map(|warning| warning.code).collect();
    assert_eq!(warnings, ["no-effect"]);
    let inputs: Vec<_> = adapter.inputs.iter().map(|i| format!("{}.{}: {}", i.stage, i.output, i.kind)).collect();
    assert_eq!(inputs, ["base.model: model", "tokens.tokens: tokens"]);
    assert_eq!(
        adapter.parameters.to_string(),
        r#"{"model":"base.model","data":"tokens","lora":{"rank":4},"learning_rate":0.0003}"#
    );
    assert_eq!(plan.stage("articles").unwrap().parameters["source"], "./data/rows.jsonl${x}");
    assert_eq!(plan.stage("samples").unwrap().needs, ["tokens"]);
    let published: Vec<_> =
        plan.publish.iter().map(|p| format!("{}.{} {}", p.stage, p.output, p.path.display())).collect();
    assert_eq!(published, ["merged.model ./out/model", "adapter.metrics ./out/metrics"]);
}

const SLOTS: &str = "version: 1
slots: { license: 2 }
stages:
  a: { uses: dataset, with: { source: a.jsonl }, resources: { slots: { license: 2 } }, retries: { max: 3, on: [network] } }
";

#[test]
fn slots_are_declared_and_enough() {
    let plan = plan(SLOTS);
    assert_eq!((plan.slots["license"], plan.stages[0].resources.slots["license"]), (2, 2));
    let more = SLOTS.replace("license: 2 } }", "license: 3, licence: 1 } }");
    assert_eq!(
        wrong(&more),
        [
            "never-fits 4:72 stage `a` takes 3 of `license`, and there are 2: it could never run (lower it, or raise \
             `slots.license` (for one run: `--slots license=3`))",
            "unknown-slot 4:84 stage `a` takes slots of `licence`, which the file does not declare (did you mean `license`?)",
        ]
    );
    // What `--slots license=3` and `--slots licence=1` become.
    let raised = plan_over(&more, &["slots.license=3", "slots.licence=1"]);
    assert_eq!((raised.slots["license"], raised.slots["licence"]), (3, 1));
    assert_eq!(
        wrong(&SLOTS.replace("license: 2 } }", "license: 0 } }"))[0],
        "out-of-range 4:81 `resources.slots.license` must be at least 1"
    );
}

#[test]
fn retries_are_a_number_or_say_when() {
    let retries = plan(SLOTS).stages[0].retries.clone();
    assert_eq!((retries.max, retries.on.as_slice()), (3, &[crate::error::Cause::Network][..]));
    assert_eq!(retries.delay_after(2), Duration::from_secs(4));
    let with = |text: &str| SLOTS.replace("{ max: 3, on: [network] }", text);
    let plain = plan(&with("4")).stages[0].retries.clone();
    assert_eq!(plain, Retries { max: 4, ..Retries::default() });
    let long = plan(&with("{ delay: 10m }")).stages[0].retries.clone();
    assert_eq!((long.max, long.max_delay), (2, Duration::from_secs(600)));
    assert_eq!(plan(&with("{ on: [] }")).stages[0].retries.on, []);
    assert_eq!(
        wrong(&with("{ delay: 10m, max_delay: 5m }")),
        ["out-of-range 4:122 `retries.max_delay` must be at least as long as `delay`"]
    );
    let never = wrong(&with("{ on: [bad_data] }"));
    assert!(never[0].starts_with("unknown-value 4:104 `retries.on[0]`: unknown value `bad_data`"), "{never:?}");
    assert!(wrong(&with("[3]"))[0].contains("expected a whole number, or a mapping"));
}

#[test]
fn a_plan_knows_where_each_field_stands() {
    let plan = plan(REFERENCE);
    let adapter = plan.stage("adapter").unwrap();
    let at = |path: &str| {
        let (_, span) = adapter.field_spans.iter().find(|(field, _)| field == path).unwrap();
        plan.sources.line_column(*span)
    };
    assert_eq!((at("learning_rate"), at("lora.rank"), at("lora")), ((15, 22), (14, 21), (14, 13)));
    let base = plan.stage("base").unwrap();
    assert_eq!(base.field_spans[2].0, "exclude[0]");
    assert_eq!(plan.sources.line_column(adapter.span), (12, 7));
}

#[test]
fn a_part_of_a_plan_is_what_its_stages_need() {
    let part = |ids: &[&str]| {
        let ids: Vec<String> = ids.iter().map(|&id| id.to_owned()).collect();
        let part = plan(REFERENCE).until(&ids);
        for node in part.graph.node_indices() {
            let stage = &part.stages[part.graph[node]];
            let before = part.graph.neighbors_directed(node, petgraph::Direction::Incoming);
            let mut before: Vec<&str> = before.map(|node| part.stages[part.graph[node]].id.as_str()).collect();
            let needs = stage.inputs.iter().map(|input| input.stage.as_str());
            let mut expected: Vec<&str> = needs.chain(stage.needs.iter().map(String::as_str)).collect();
            before.sort_unstable();
            expected.sort_unstable();
            assert_eq!(before, expected, "{}", stage.id);
        }
        let stages: Vec<String> = part.stages.iter().map(|stage| stage.id.clone()).collect();
        (stages, part.publish.len())
    };
    assert_eq!(part(&["tokens"]).0, ["base", "articles", "tokens"]);
    assert_eq!(part(&["articles", "base"]).0, ["base", "articles"]);
    let all = plan(REFERENCE);
    let everything = part(&["samples"]);
    assert_eq!((everything.0.len(), everything.1), (all.stages.len(), all.publish.len()));
    assert_eq!(part(&["articles"]).1, 0, "nothing of it is published");
}

#[test]
fn the_graph_has_an_edge_for_each_reason_to_wait() {
    let plan = plan(REFERENCE);
    let mut edges: Vec<String> = plan
        .graph
        .edge_indices()
        .map(|edge| {
            let (from, to) = plan.graph.edge_endpoints(edge).unwrap();
            let id = |node: petgraph::graph::NodeIndex| plan.stages[plan.graph[node]].id.as_str();
            format!("{} -> {} {:?}", id(from), id(to), plan.graph[edge])
        })
        .collect();
    edges.sort();
    assert_eq!(
        edges,
        [
            "adapter -> merged Output(\"adapter\")",
            "articles -> tokens Output(\"rows\")",
            "base -> adapter Output(\"model\")",
            "base -> merged Output(\"model\")",
            "base -> tokens Output(\"tokenizer\")",
            "merged -> samples Output(\"model\")",
            "tokens -> adapter Output(\"tokens\")",
            "tokens -> samples Needs",
        ]
    );
    let mermaid = graph_text(&plan, GraphFormat::Mermaid);
    assert!(mermaid.starts_with("flowchart TD\n    s0[\"base<br/><i>download</i>\"]\n"), "{mermaid}");
    assert!(mermaid.contains("    s0 -- tokenizer --> s2\n") && mermaid.contains("    s2 -.-> s5\n"), "{mermaid}");
    let dot = graph_text(&plan, GraphFormat::Dot);
    assert!(dot.contains("    s3 -> s4 [label=\"adapter\"];\n") && dot.ends_with("}\n"), "{dot}");
}

#[test]
fn all_problems_of_a_file_are_reported_at_once_in_order() {
    let text = r#"version: 2
nmae: x
vars: { rank: 4 }
stages:
  base: { uses: downlod }
  articles: { uses: dataset, with: { sorce: x } }
  tokens:
    uses: tokenize
    with: { dataset: articles, tokenizer: tokns, max_seq_len: 0, max_len: 3 }
    retires: 3
  adapter:
    uses: train
    with: { model: base, data: articles, method: lroa, lora: { rank: "${vars.rnak}" }, learning_rate: "high" }
    resources: { device: gpu, count: 0 }
    timeout: 12
    needs: [merged, tokens2]
  a.b: { uses: dataset, with: { source: x } }
  merged: { uses: merge, with: { model: base, adapter: adapter } }
  empty:
publish: { mergd: ./out, articles: . }
"#;
    assert_eq!(
        wrong(text),
        [
            "unknown-version 1:10 this program reads files of version 1",
            "unknown-key 2:1 unknown key `nmae` (did you mean `name`?)",
            "unknown-kind 5:17 unknown stage kind `downlod` (did you mean `download`?)",
            "missing-key 6:36 `source` is missing",
            "unknown-key 6:38 unknown key `sorce` (did you mean `source`?)",
            "unknown-stage 9:43 stage `tokens` reads `tokns`, which no stage produces (declared stages: `base`, `articles`, `adapter`, `a.b`, `merged`, `empty`)",
            "out-of-range 9:63 `max_seq_len` must be at least 1",
            "unknown-key 9:66 unknown key `max_len` (did you mean `max_seq_len`?)",
            "unknown-key 10:5 unknown key `retires` (did you mean `retries`?)",
            "unknown-value 13:50 `method`: unknown value `lroa` (did you mean `lora`?)",
            "unknown-variable 13:71 no variable `rnak` (did you mean `vars.rank`?)",
            "wrong-type 13:103 `learning_rate`: expected a number, found a string",
            "unknown-value 14:26 `resources.device`: unknown value `gpu` (known values: `auto`, `cpu`, `cuda`, `npu`, `rocm`, `metal`)",
            "out-of-range 14:38 `resources.count` must be at least 1",
            "wrong-type 15:14 `timeout`: expected a length of time such as `90s`, `5m` or `12h`, found a whole number (add the unit, such as `12s`)",
            "cycle 16:13 & 18:56 stages wait for each other: adapter → merged → adapter",
            "unknown-stage 16:21 stage `adapter` needs `tokens2`, which is no stage (did you mean `tokens`?)",
            "bad-stage-id 17:3 `a.b` cannot be the id of a stage (an id has letters, digits, `_` and `-`, 100 at most)",
            "missing-key 19:3 `uses` is missing",
            "unknown-stage 20:12 `publish` names `mergd`, which no stage produces (did you mean `merged`?)",
            "bad-value 20:36 `.` cannot be published to: the folder is replaced as a whole",
        ]
    );
}

/// A file with two rows stages, a split and a tokenizer; `{}` is where a test writes its stages.
fn file(stages: &str) -> String {
    let common = "  base: { uses: download, with: { repo: a/b } }\n  rows: { uses: dataset, with: { source: x } }\n";
    format!("version: 1\nstages:\n{common}{stages}\n")
}

#[test]
fn a_reference_must_fit_the_field_that_holds_it() {
    assert_eq!(
        wrong(&file("  t: { uses: tokenize, with: { dataset: base, tokenizer: rows, max_seq_len: 1 } }")),
        [
            "wrong-kind 5:41 `dataset` takes rows, and stage `base` makes model and tokenizer (made by `rows`)",
            "wrong-kind 5:58 `tokenizer` takes tokenizer, and stage `rows` makes rows (made by `base`)",
        ]
    );
    assert_eq!(
        wrong(&file("  t: { uses: tokenize, with: { dataset: rows.row, tokenizer: base.model, max_seq_len: 1 } }")),
        [
            "unknown-output 5:41 stage `rows` has no output `row` (did you mean `rows`?)",
            "wrong-kind 5:62 `tokenizer` takes tokenizer, and `base.model` is model (made by `base`)",
        ]
    );
    assert_eq!(
        wrong(&file("  s: { uses: split, with: { rows: rows } }\n  t: { uses: split, with: { rows: s } }")),
        ["ambiguous-output 6:35 `s` has more than one output that fits here (write `s.left` or `s.right`)"]
    );
    let plan = plan(&file("  s: { uses: split, with: { rows: rows } }\n  t: { uses: split, with: { rows: s.right } }"));
    assert_eq!(plan.stage("t").unwrap().inputs[0].output, "right");
    assert_eq!(
        wrong(&file("  g: { uses: generate, with: { model: rows, prompts: hello there } }")),
        [
            "wrong-kind 5:39 `model` takes model, and stage `rows` makes rows (made by `base`)",
            "unknown-stage 5:54 stage `g` reads `hello there`, which no stage produces (declared stages: `base`, `rows`)",
        ]
    );
}

#[test]
fn a_cycle_is_shown_in_full_and_once() {
    let stages = "  a: { uses: split, with: { rows: c.left } }\n  b: { uses: split, with: { rows: a.left } }\n  \
                  c: { uses: split, with: { rows: b.left } }\n  d: { uses: split, with: { rows: a.left } }";
    assert_eq!(wrong(&file(stages)), ["cycle 5:35 & 7:35 & 6:35 stages wait for each other: a → c → b → a"]);
    assert_eq!(wrong(&file("  a: { uses: split, with: { rows: a.left } }")), ["cycle 5:35 stage `a` reads itself"]);
    assert_eq!(
        wrong(&file("  a: { uses: split, with: { rows: rows }, needs: [a] }")),
        ["cycle 5:51 stage `a` needs itself"]
    );
    let two = "  a: { uses: split, with: { rows: b.left } }\n  b: { uses: split, with: { rows: a.left } }\n  \
               c: { uses: dataset, with: { source: x }, needs: [d] }\n  d: { uses: dataset, with: { source: x }, needs: [c] }";
    assert_eq!(
        wrong(&file(two)),
        [
            "cycle 5:35 & 6:35 stages wait for each other: a → b → a",
            "cycle 7:52 & 8:52 stages wait for each other: c → d → c",
        ]
    );
}

#[test]
fn a_stage_that_cannot_be_read_is_no_unknown_stage() {
    let stages = "  t: { uses: tokenize, with: { dataset: rows, tokenizer: base } }\n  \
                  m: { uses: train, with: { model: base, data: t } }\n  u: { uses: split, with: { rows: t.nonsense } }\n  \
                  v: { uses: splitt, with: { rows: nobody } }\n  w: { uses: split, with: { rows: v } }";
    assert_eq!(
        wrong(&file(stages)),
        [
            "missing-key 5:30 `max_seq_len` is missing",
            "unknown-kind 8:14 unknown stage kind `splitt` (did you mean `split`?)",
        ]
    );
}

#[test]
fn references_of_a_stage_with_mistakes_are_checked_all_the_same() {
    assert_eq!(
        wrong(&file("  t: { uses: tokenize, with: { dataset: rwos, tokenizer: base, max_seq_len: x } }")),
        [
            "unknown-stage 5:41 stage `t` reads `rwos`, which no stage produces (did you mean `rows`?)",
            "wrong-type 5:77 `max_seq_len`: expected a whole number, found a string",
        ]
    );
}

#[test]
fn publish_names_outputs_and_folders_of_their_own() {
    let with = |publish: &str| wrong(&format!("{}publish: {{ {publish} }}", file("")));
    assert_eq!(
        with("base: ./out"),
        [
            "ambiguous-output 6:12 `base` has more than one output that fits here (write `base.model` or `base.tokenizer`)"
        ]
    );
    assert_eq!(
        with("base.model: ./out, rows: out/./x/.."),
        ["duplicate-path 6:37 & 6:24 two targets are published to `out/./x/..`"]
    );
    assert_eq!(
        with("base.model: out, rows: out/rows"),
        ["duplicate-path 6:35 & 6:24 `out/rows` and `out` lie in each other"]
    );
    assert_eq!(
        with("base.modle: out"),
        ["unknown-output 6:12 stage `base` has no output `modle` (did you mean `model`?)"]
    );
    assert_eq!(with("rows: .."), ["bad-value 6:18 `..` cannot be published to: the folder is replaced as a whole"]);
    assert_eq!(with("rows: 3"), ["wrong-type 6:18 expected a string, found a whole number (put it in quotes)"]);
}

#[test]
fn what_a_kind_checks_is_reported_with_the_rest() {
    assert_eq!(
        wrong("version: 1\nstages:\n  base: { uses: download, with: { repo: a/b, path: ./x, excluded: [] } }\n"),
        ["both 3:52 `repo` and `path`", "unknown-key 3:57 unknown key `excluded` (did you mean `exclude`?)"]
    );
    let plan = plan("version: 1\nstages:\n  base: { uses: download }\n");
    assert_eq!((plan.warnings.len(), plan.warnings[0].code), (1, "neither"));
    assert_eq!(plan.sources.line_column(plan.warnings[0].span), (3, 3));
    assert_eq!(plan.name, "file");
}

#[test]
fn variables_keep_their_type_and_say_where_they_were_given() {
    let text = |vars: &str, value: &str| {
        format!("version: 1\nvars: {vars}\nstages:\n  rows: {{ uses: dataset, with: {{ source: {value} }} }}\n")
    };
    let source = |vars: &str, value: &str| plan(&text(vars, value)).stages[0].parameters["source"].to_string();
    assert_eq!(
        source("{ a: x, b: '${vars.a}y', c: 3, d: 0.0001 }", "'${vars.b}-${vars.c}-${vars.d}'"),
        r#""xy-3-0.0001""#
    );
    assert_eq!(source("{ a: { b: deep } }", "'${ vars.a.b }'"), r#""deep""#);
    assert_eq!(
        wrong(&text("{ a: 3 }", "'${vars.a}'")),
        ["wrong-type 4:42 & 2:12 `source`: expected a string, found a whole number (put it in quotes)"]
    );
    assert_eq!(
        wrong(&text("{ a: '${vars.b}', b: [1] }", "'${vars.a}${vars.b}'")),
        [
            "unknown-variable 2:13 no variable `b` (declare it under `vars:`, above where it is used)",
            "wrong-type 4:52 `vars.b` is a list and cannot stand inside a text",
        ]
    );
    assert_eq!(
        wrong(&text("{}", "'é ${env.HF_TOKEN} ${env.NOPE} ${foo} ${open'")),
        [
            "secret-in-file 4:45 `HF_TOKEN` is a secret, and a secret never enters a pipeline (leave it out: what needs a token (the Hub: HF_TOKEN) reads it from the environment itself)",
            "unknown-variable 4:61 environment variable `NOPE` is not set",
            "bad-reference 4:73 `${foo}` is no reference (write `$${` for a text that holds `${`)",
            "bad-reference 4:80 `${` is not closed",
        ]
    );
}

#[test]
fn variables_that_double_each_other_end_early() {
    for doubled in ["'${vars.V}${vars.V}'", "['${vars.V}', '${vars.V}']"] {
        let vars: String =
            (1..60).map(|level| format!(", v{level}: {}", doubled.replace('V', &format!("v{}", level - 1)))).collect();
        let uses = "${vars.v59}";
        let text = format!(
            "version: 1\nvars: {{ v0: xxxxxxxxxx{vars} }}\nstages:\n  rows: {{ uses: dataset, with: {{ source: '{uses}' }} }}\n"
        );
        let found = wrong(&text);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("too-large 2:") && found[0].contains("more than 16 MiB"), "{found:?}");
    }
}

#[test]
fn a_variable_that_nothing_uses_is_a_warning() {
    let plan =
        plan("version: 1\nvars: { a: 1, b: x }\nstages:\n  r: { uses: dataset, with: { source: '${vars.b}' } }\n");
    assert_eq!((plan.warnings.len(), plan.warnings[0].code), (1, "unused-variable"));
    assert_eq!(plan.sources.line_column(plan.warnings[0].span), (2, 9));
}

#[test]
fn overrides_are_checked_like_the_file() {
    let plan = plan_over(
        REFERENCE,
        &[
            "vars.rank=16",
            "adapter.learning_rate=1e-4",
            "adapter.resources.count=4",
            "adapter.with.epochs=3",
            "articles.source=a=b: *.jsonl",
            "articles.column_map={x: y, z: [1]}",
            "articles.column_map.z=w",
            "samples.prompts.0=hello # there: ",
            "samples.prompts.1=\"'q'\"",
            "base.exclude=[]",
            "name=other",
            "publish.adapter.metrics=./m",
        ],
    );
    let parameters = |id: &str| plan.stage(id).unwrap().parameters.to_string();
    assert_eq!(
        parameters("adapter"),
        r#"{"model":"base.model","data":"tokens","lora":{"rank":16},"learning_rate":0.0001,"epochs":3}"#
    );
    assert_eq!(parameters("articles"), r#"{"source":"a=b: *.jsonl","column_map":{"x":"y","z":"w"}}"#);
    assert_eq!(parameters("samples"), r#"{"model":"merged","prompts":["hello # there: ","'q'"]}"#);
    assert_eq!(parameters("base"), r#"{"repo":"meta-llama/Llama-3.1-8B-Instruct","exclude":[]}"#);
    assert_eq!(plan.stage("adapter").unwrap().resources.count, Some(4));
    assert_eq!((plan.name.as_str(), plan.publish[1].path.to_str()), ("other", Some("./m")));
}

#[test]
fn a_wrong_override_is_shown_in_its_own_text() {
    assert_eq!(
        wrong_over(
            REFERENCE,
            &[
                "adapter.learning_rat=1e-4",
                "adaptr.epochs=3",
                "adapter.epochs=many",
                "vars.rank=eight",
                "adapter.lora={rank: 2, é: [1, 2}",
                "adapter.method=[1, {a: 1, a: 2}]",
                "nothing",
                "adapter..x=3",
                "samples.prompts.7=x",
                "adapter.learning_rate.x=1",
                "tokens.max_seq_len=",
                "vars.rnk=4",
            ],
        ),
        [
            "wrong-type 14:21 & command line:11 `lora.rank`: expected a whole number, found a string",
            "no-effect 16:38 `resources.count` has no effect yet: a stage gets one device",
            "unknown-key command line:9 unknown key `learning_rat` (did you mean `learning_rate`?)",
            "unknown-stage command line:1 the override sets `adaptr`, which is no stage (did you mean `adapter`?)",
            "wrong-type command line:16 `epochs`: expected a whole number, found a string",
            "syntax command line:27 not YAML: mismatched bracket '[' closed by '}' (close the bracket)",
            "wrong-type command line:16 `method`: expected one of `lora`, `full`, found a list",
            "duplicate-key command line:27 & command line:21 `a` is set twice (remove one of the two)",
            "bad-override command line:1 an override sets a value",
            "bad-override command line:1 the path has an empty name",
            "bad-index command line:17 `7` is no item of a list of 1",
            "wrong-type command line:23 & 15:22 `x` cannot be set: what holds it is a number",
            "missing-key command line:20 `max_seq_len` has no value",
            "unknown-variable command line:6 the file declares no variable `rnk` (did you mean `rank`?)",
        ]
    );
}

#[test]
fn what_is_not_a_pipeline_is_said_alone() {
    assert_eq!(
        wrong(""),
        ["empty-file 1:1 the file is empty (a pipeline file begins with `version: 1` and declares `stages:`)"]
    );
    assert_eq!(wrong("# only a comment\n")[0].split(' ').next(), Some("empty-file"));
    assert_eq!(
        wrong("<html>\n"),
        ["not-a-mapping 1:1 the file holds a string (a pipeline file begins with `version: 1` and declares `stages:`)"]
    );
    assert_eq!(wrong("- a\n- b\n")[0].split(" (").next(), Some("not-a-mapping 1:1 the file holds a list"));
    assert_eq!(wrong("version: 1\nstages:\n\tbase: x\n"), ["syntax 3:1 a tab in the indentation (indent with spaces)"]);
    assert_eq!(wrong("{}"), ["missing-key 1:1 `version` is missing", "missing-key 1:1 `stages` is missing"]);
    assert_eq!(wrong("version: 1\nstages: {}\n"), ["no-stages 2:9 the pipeline has no stages"]);
    assert_eq!(
        wrong("version: '1'\nstages: [a]\nversion: 1\n"),
        [
            "wrong-type 1:10 `version`: expected a whole number, found a string (write it without quotes)",
            "wrong-type 2:9 `stages`: expected a mapping, found a list",
            "duplicate-key 3:1 & 1:1 `version` is set twice (remove one of the two)",
        ]
    );
}

#[test]
fn a_file_that_cannot_be_read_is_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str| lines_of_file(&folder.path().join(name));
    assert_eq!(of("nope.yaml"), "file-missing 1:1");
    assert_eq!(of(""), "file-unreadable 1:1");
    std::fs::write(folder.path().join("latin1.yaml"), b"version: 1\nname: \xe9t\xe9\n").unwrap();
    assert_eq!(of("latin1.yaml"), "not-utf8 2:7");
    std::fs::write(folder.path().join("large.yaml"), vec![b' '; (1 << 20) + 1]).unwrap();
    assert_eq!(of("large.yaml"), "too-large 1:1");
    std::fs::write(
        folder.path().join("good.yaml"),
        "version: 1\nstages:\n  r: { uses: dataset, with: { source: x } }\n",
    )
    .unwrap();
    assert_eq!(load(&folder.path().join("good.yaml"), &[], &registry()).unwrap().name, "good");
}

fn lines_of_file(path: &Path) -> String {
    let rejected = load(path, &[], &registry()).unwrap_err();
    assert_eq!(rejected.problems.len(), 1);
    let (line, column) = rejected.sources.line_column(rejected.problems[0].span);
    format!("{} {line}:{column}", rejected.problems[0].code)
}

#[test]
fn a_thousand_stages_are_planned_in_no_time() {
    let mut text = "version: 1\nstages:\n".to_owned();
    for index in (0..1000).rev() {
        let rows = if index == 0 { "rows".to_owned() } else { format!("s{}.left", index - 1) };
        text.push_str(&format!(
            "  s{index}:\n    uses: split\n    with:\n      rows: {rows}\n    resources: {{ count: 1 }}\n"
        ));
    }
    text.push_str("  rows: { uses: dataset, with: { source: x } }\n");
    let registry = registry();
    // The fastest of several: what a busy machine adds is not the planner's.
    let times = (0..5).map(|_| {
        let started = Instant::now();
        let plan = load_text(Path::new("file.yaml"), &text, &[], &registry).unwrap();
        let took = started.elapsed();
        assert_eq!((plan.stages.len(), plan.stages[1000].id.as_str()), (1001, "s999"));
        took
    });
    let took = times.min().unwrap();
    assert!(took < Duration::from_millis(if cfg!(debug_assertions) { 5000 } else { 250 }), "took {took:?}");
}

#[test]
fn a_long_chain_needs_no_deep_stack() {
    let mut text = "version: 1\nstages:\n  s0: { uses: dataset, with: { source: x } }\n".to_owned();
    for index in 1..10_000 {
        text.push_str(&format!("  s{index}: {{ uses: dataset, with: {{ source: x }}, needs: [s{}] }}\n", index - 1));
    }
    assert_eq!(plan(&text).stages.len(), 10_000);
    let closed = text.replacen("{ source: x } }", "{ source: x }, needs: [s9999] }", 1);
    let found = wrong(&closed);
    assert!(found.len() == 1 && found[0].contains("s0 → s9999 → s9998"), "{}", &found[0][..200]);
}

#[test]
fn two_fields_that_hold_one_output_are_one_edge() {
    let plan = plan(&file("  m: { uses: pair, with: { a: rows, b: rows } }"));
    assert_eq!((plan.graph.edge_count(), plan.stage("m").unwrap().inputs.len()), (1, 2));
}

#[test]
fn a_key_does_not_depend_on_the_name_of_the_stage_or_the_order_of_its_fields() {
    let key = |text: &str| {
        let plan = plan(text);
        let mut document = cache::KeyDocument::default();
        plan.stages[0].bound.write_key(&mut crate::parameter::KeyWriter::new(&mut document, &|_, _| None));
        document.result_key()
    };
    let one = key("version: 1\nstages: { a: { uses: download, with: { repo: x, exclude: [y] } } }");
    assert_eq!(one, key("version: 1\nname: n\nstages: { b: { uses: download, with: { exclude: [y], repo: x } } }"));
    assert_ne!(one, key("version: 1\nstages: { a: { uses: download, with: { repo: x, exclude: [z] } } }"));
}
