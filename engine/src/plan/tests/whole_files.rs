//! Whole files: what becomes of a right one, and what is said of a wrong one.

use super::*;

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
    let resources = Resources {
        device: Some(DeviceKind::Npu),
        count: DeviceCount::Exactly(8),
        memory: Some(40 << 30),
        ..Resources::default()
    };
    assert_eq!(adapter.resources, resources);
    // What is read and not acted upon is said.
    let warnings: Vec<&str> = plan.warnings.iter().map(|warning| warning.code).collect();
    assert_eq!(warnings, ["no-device", "no-effect", "unused-stage"]);
    let inputs: Vec<_> = adapter.inputs.iter().map(|i| format!("{}.{}: {}", i.stage, i.output, i.kind)).collect();
    assert_eq!(inputs, ["base.model: model", "tokens.tokens: tokens"]);
    assert_eq!(
        adapter.parameters.to_string(),
        r#"{"model":"base.model","data":"tokens","lora":{"rank":4},"learning_rate":0.0003}"#
    );
    assert_eq!(plan.stage("articles").unwrap().parameters["source"], "./data/rows.jsonl${x}");
    assert_eq!(needs(&plan, "samples"), ["tokens"]);
    let published: Vec<_> =
        plan.publish.iter().map(|p| format!("{}.{} {}", p.stage, p.output, p.path.display())).collect();
    assert_eq!(published, ["merged.model ./out/model", "adapter.metrics ./out/metrics"]);
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
        let part = plan(REFERENCE).select(&Selection { until: ids, ..Selection::default() }).unwrap();
        for input in part.stages.iter().flat_map(|stage| &stage.inputs) {
            assert_eq!(part.stages[input.position].id, input.stage);
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
fn a_selection_says_what_is_made_and_what_is_only_taken() {
    let ids = |ids: &[&str]| ids.iter().map(|&id| id.to_owned()).collect::<Vec<_>>();
    let select = |selection: Selection| {
        let part = plan(REFERENCE).select(&selection)?;
        let word = |wanted| match wanted {
            Wanted::Result => "",
            Wanted::Again => "!",
            Wanted::Given => "?",
        };
        let stages: Vec<String> =
            part.stages.iter().map(|stage| format!("{}{}", stage.id, word(stage.wanted))).collect();
        Ok((stages.join(" "), part.publish.len()))
    };
    let chosen = |until: &[&str], from: &[&str], only: &[&str], force| {
        select(Selection { until: ids(until), from: ids(from), only: ids(only), force })
    };
    let ok = |stages: &str, published| Ok((stages.to_owned(), published));
    let none = Force::Nothing;
    assert_eq!(chosen(&[], &[], &[], none.clone()), ok("base articles tokens adapter merged samples", 2));
    assert_eq!(chosen(&[], &["adapter"], &[], none.clone()), ok("base? articles? tokens? adapter merged samples", 2));
    assert_eq!(chosen(&["adapter"], &["tokens"], &[], none.clone()), ok("base? articles? tokens adapter", 1));
    assert_eq!(chosen(&[], &[], &["merged", "tokens"], none.clone()), ok("base? articles? tokens adapter? merged", 1));
    assert_eq!(chosen(&["tokens"], &[], &[], Force::Everything), ok("base! articles! tokens!", 0));
    let force = |name: &str| Force::Stages(ids(&[name]));
    assert_eq!(chosen(&["tokens"], &[], &[], force("tokens")), ok("base articles tokens!", 0));
    let left_out = SelectionError::ForcedLeftOut("merged".to_owned());
    assert_eq!(chosen(&["tokens"], &[], &[], force("merged")), Err(left_out));
    assert_eq!(chosen(&[], &["token"], &[], none.clone()), Err(SelectionError::Unknown("token".to_owned())));
    assert_eq!(chosen(&["base"], &["adapter"], &[], none), Err(SelectionError::Nothing));
}

#[test]
fn the_graph_has_an_edge_for_each_reason_to_wait() {
    let plan = plan(REFERENCE);
    let id = |position: usize| plan.stages[position].id.as_str();
    let told = |(from, to, output): (usize, usize, Option<&str>)| format!("{} -> {} {output:?}", id(from), id(to));
    let mut edges: Vec<String> = edges(&plan).into_iter().map(told).collect();
    edges.sort();
    assert_eq!(
        edges,
        [
            "adapter -> merged Some(\"adapter\")",
            "articles -> tokens Some(\"rows\")",
            "base -> adapter Some(\"model\")",
            "base -> merged Some(\"model\")",
            "base -> tokens Some(\"tokenizer\")",
            "merged -> samples Some(\"model\")",
            "tokens -> adapter Some(\"tokens\")",
            "tokens -> samples None",
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
            "unknown-value 14:26 `resources.device`: unknown value `gpu` (did you mean `cuda`, `rocm` or `metal`?)",
            "out-of-range 14:38 `resources.count` must be at least 1",
            "wrong-type 15:14 `timeout`: expected a length of time such as `90s`, `5m` or `12h`, found an integer (add the unit, such as `12s`)",
            "cycle 16:13 & 18:56 stages wait for each other: adapter → merged → adapter",
            "unknown-stage 16:21 stage `adapter` needs `tokens2`, which is no stage (did you mean `tokens`?)",
            "bad-stage-id 17:3 `a.b` cannot be the id of a stage (an id has letters, digits, `_` and `-`, 100 at most)",
            "missing-key 19:3 `uses` is missing",
            "unknown-stage 20:12 `publish` names `mergd`, which no stage produces (did you mean `merged`?)",
            "bad-value 20:36 `.` cannot be published to: the folder is replaced as a whole",
        ]
    );
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
fn what_is_not_a_pipeline_is_said_alone() {
    assert_eq!(
        wrong(""),
        ["empty-file 1:1 the file is empty (a pipeline file begins with `version: 1` and declares `stages:`)"]
    );
    assert_eq!(wrong("# only a comment\n")[0].split(' ').next(), Some("empty-file"));
    assert_eq!(
        wrong("<html>\n"),
        [
            "not-a-mapping 1:1 the file contains a string (a pipeline file begins with `version: 1` and declares `stages:`)"
        ]
    );
    assert_eq!(wrong("- a\n- b\n")[0].split(" (").next(), Some("not-a-mapping 1:1 the file contains a list"));
    assert_eq!(wrong("version: 1\nstages:\n\tbase: x\n"), ["syntax 3:1 a tab in the indentation (indent with spaces)"]);
    assert_eq!(wrong("{}"), ["missing-key 1:1 `version` is missing", "missing-key 1:1 `stages` is missing"]);
    assert_eq!(wrong("version: 1\nstages: {}\n"), ["no-stages 2:9 the pipeline has no stages"]);
    assert_eq!(
        wrong("version: '1'\nstages: [a]\nversion: 1\n"),
        [
            "wrong-type 1:10 `version`: expected an integer, found a string (write it without quotes)",
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
fn a_key_does_not_depend_on_the_name_of_the_stage_or_the_order_of_its_fields() {
    let key = |text: &str| {
        let plan = plan(text);
        let mut document = cache::KeyDocument::default();
        plan.stages[0].bound.write_whole_key(&mut crate::parameter::KeyWriter::new(&mut document, &|_, _| None));
        document.result_key()
    };
    let one = key("version: 1\nstages: { a: { uses: download, with: { repo: x, exclude: [y] } } }");
    assert_eq!(one, key("version: 1\nname: n\nstages: { b: { uses: download, with: { exclude: [y], repo: x } } }"));
    assert_ne!(one, key("version: 1\nstages: { a: { uses: download, with: { repo: x, exclude: [z] } } }"));
}
