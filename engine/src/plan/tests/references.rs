//! References between stages: what fits, what does not, cycles, publishing.

use super::*;

#[test]
fn a_reference_must_fit_the_field_that_holds_it() {
    assert_eq!(
        wrong(&file("  t: { uses: tokenize, with: { dataset: base, tokenizer: rows, max_seq_len: 1 } }")),
        [
            "wrong-kind 5:41 `dataset` reads rows, and stage `base` makes model and tokenizer (made by `rows`)",
            "wrong-kind 5:58 `tokenizer` reads tokenizer, and stage `rows` makes rows (made by `base`)",
        ]
    );
    assert_eq!(
        wrong(&file("  t: { uses: tokenize, with: { dataset: rows.row, tokenizer: base.model, max_seq_len: 1 } }")),
        [
            "unknown-output 5:41 stage `rows` has no output `row` (did you mean `rows`?)",
            "wrong-kind 5:62 `tokenizer` reads tokenizer, and `base.model` is model (made by `base`)",
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
            "wrong-kind 5:39 `model` reads model, and stage `rows` makes rows (made by `base`)",
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
            "wrong-type 5:77 `max_seq_len`: expected an integer, found a string",
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
    assert_eq!(with("base.model: out, rows: out/rows"), ["duplicate-path 6:35 & 6:24 `out/rows` and `out` overlap"]);
    assert_eq!(
        with("base.modle: out"),
        ["unknown-output 6:12 stage `base` has no output `modle` (did you mean `model`?)"]
    );
    assert_eq!(with("rows: .."), ["bad-value 6:18 `..` cannot be published to: the folder is replaced as a whole"]);
    assert!(with("rows: ~/out")[0].starts_with("bad-value 6:18 `~/out`: `~` is not expanded (write `/"));
    assert_eq!(with("rows: 3"), ["wrong-type 6:18 expected a string, found an integer (put it in quotes)"]);
}

#[test]
fn two_fields_that_hold_one_output_are_one_edge() {
    let plan = plan(&file("  m: { uses: pair, with: { a: rows, b: rows } }"));
    assert_eq!((edges(&plan).len(), plan.stage("m").unwrap().inputs.len()), (1, 2));
}

#[test]
fn a_gate_names_figures_of_stages_and_a_bound() {
    let gates = |gates: &str| format!("{}\ngates: {gates}\n", file("  s: { uses: split, with: { rows: rows } }"));
    assert_eq!(
        wrong(&gates("{ s: { above: 1 }, t.x: { above: 1 }, s.a: {}, s.b: { above: s }, s.c: { over: 1 } }")),
        [
            "bad-value 7:10 `s` is no figure of a stage",
            "unknown-stage 7:27 `gates` names `t`, which no stage produces (declared stages: `base`, `rows`, `s`)",
            "missing-key 7:46 the gate `s.a` has no bound",
            "bad-value 7:69 `s` is no figure of a stage",
            "missing-key 7:74 the gate `s.c` has no bound",
            "unknown-key 7:81 unknown key `over` (known keys: `above`, `below`, `margin`)",
        ]
    );
    assert_eq!(
        wrong(&gates(
            "{ s.a: { above: 1, margin: 2 }, s.b: { above: rows.x, margin: -1 }, s.c: { below: rows.x, margin: much } }"
        )),
        [
            "bad-value 7:35 a margin is added to another stage's figure, and this gate names none",
            "bad-value 7:70 a margin is not negative",
            "bad-value 7:106 `margin`: `much` is none",
        ]
    );
    let plan = plan(&gates("{ 's.a,none': { above: rows.x.y, below: 2, margin: standard_error } }"));
    let gates: Vec<String> = plan.gates.iter().map(ToString::to_string).collect();
    assert_eq!(gates, ["s.a,none above rows.x.y by more than the standard error", "s.a,none below 2"]);
}
