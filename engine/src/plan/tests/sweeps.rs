//! Sweeps: what a matrix makes of its stage and of those that read it, and what is said of a wrong one.

use super::*;

/// A pretraining-free file in which `adapter` is to be swept; `{}` are its keys beside `uses` and `with`.
fn swept(keys: &str) -> String {
    file(&format!(
        "  t: {{ uses: tokenize, with: {{ dataset: rows, tokenizer: base, max_seq_len: 64 }} }}\n  \
         adapter:\n    uses: train\n    with: {{ model: base, data: t, lora: {{ rank: 8 }} }}\n{keys}\n  \
         merged: {{ uses: merge, with: {{ model: base, adapter: adapter }} }}\n  \
         asked: {{ uses: generate, with: {{ model: merged, prompts: [hi] }} }}"
    ))
}

fn inputs(plan: &Plan, id: &str) -> Vec<String> {
    let stage = plan.stage(id).unwrap_or_else(|| panic!("{:?}", ids(plan)));
    stage.inputs.iter().map(|input| format!("{}.{}", input.stage, input.output)).collect()
}

/// The key of a stage, with the ids of what it reads in the place of their identities, but for values of axes in them.
fn key(plan: &Plan, id: &str) -> cache::Digest {
    let identity = |input: &ResolvedInput| Some(cache::Digest::of(input.stage.split('[').next().unwrap().as_bytes()));
    crate::keys::stage_key(plan.stage(id).unwrap(), &crate::keys::StageOutside::default(), identity)
        .document
        .result_key()
}

#[test]
fn a_matrix_makes_a_child_of_each_value_and_dependents_follow() {
    let plan = plan(&swept("    matrix: { lora.rank: [4, 8] }"));
    assert_eq!(
        ids(&plan),
        [
            "base",
            "rows",
            "t",
            "adapter[lora.rank=4]",
            "adapter[lora.rank=8]",
            "merged[lora.rank=4]",
            "merged[lora.rank=8]",
            "asked[lora.rank=4]",
            "asked[lora.rank=8]",
        ]
    );
    let child = plan.stage("adapter[lora.rank=4]").unwrap();
    assert_eq!(
        (child.declared.as_str(), child.axes.as_slice()),
        ("adapter", &[("lora.rank".to_owned(), 4.into())][..])
    );
    assert_eq!(child.parameters.to_string(), r#"{"model":"base","data":"t","lora":{"rank":4}}"#);
    assert_eq!(inputs(&plan, "merged[lora.rank=8]"), ["base.model", "adapter[lora.rank=8].adapter"]);
    let merged = plan.stage("merged[lora.rank=8]").unwrap();
    assert_eq!(merged.parameters.to_string(), r#"{"model":"base","adapter":"adapter[lora.rank=8]"}"#);
    assert_eq!(merged.axes, [("lora.rank".to_owned(), 8.into())]);
    assert!(merged.measured.is_empty());
    // The place of the value is that in the axis.
    let (_, span) = child.field_spans.iter().find(|(field, _)| field == "lora.rank").unwrap();
    assert_eq!(plan.sources.line_column(*span), (9, 27));
    assert_eq!(plan.ids_of("adapter"), ["adapter[lora.rank=4]", "adapter[lora.rank=8]"]);
    assert_eq!(plan.ids_of("asked[lora.rank=8]"), ["asked[lora.rank=8]"]);
    assert_eq!(plan.ids_of("asked[lora.rank=8.0]"), ["asked[lora.rank=8]"]);
    assert!(plan.ids_of("asked[lora.rank=9]").is_empty() && plan.ids_of("nobody").is_empty());
    assert_eq!(plan.names().len(), 6 + 6);
}

#[test]
fn a_child_has_the_key_of_the_stage_written_by_hand() {
    let sweep = plan(&swept("    matrix: { lora.rank: [4, 8], learning_rate: [1e-3] }"));
    let by_hand = plan(&swept("").replace("rank: 8 }", "rank: 4 }, learning_rate: 0.001"));
    assert_eq!(key(&sweep, "adapter[lora.rank=4,learning_rate=0.001]"), key(&by_hand, "adapter"));
    assert_eq!(key(&sweep, "merged[lora.rank=4,learning_rate=0.001]"), key(&by_hand, "merged"));
    assert_ne!(key(&sweep, "adapter[lora.rank=8,learning_rate=0.001]"), key(&by_hand, "adapter"));
    // Another value leaves the other children as they are.
    let longer = plan(&swept("    matrix: { lora.rank: [2, 4, 16], learning_rate: [1e-3] }"));
    assert_eq!(
        key(&sweep, "adapter[lora.rank=4,learning_rate=0.001]"),
        key(&longer, "adapter[lora.rank=4,learning_rate=0.001]")
    );
}

#[test]
fn axes_multiply_and_combinations_come_and_go() {
    let of = |matrix: &str| {
        let plan = plan(&swept(&format!("    matrix: {matrix}")));
        let ids: Vec<String> = plan.ids_of("adapter").into_iter().map(str::to_owned).collect();
        let short = |id: String| id.replace("adapter", "").replace("lora.rank=", "").replace("learning_rate=", "");
        ids.into_iter().map(short).collect::<Vec<_>>()
    };
    assert_eq!(of("{ lora.rank: [4, 8], learning_rate: [0.1, 0.2] }"), ["[4,0.1]", "[4,0.2]", "[8,0.1]", "[8,0.2]"]);
    assert_eq!(
        of("{ lora.rank: [4, 8], learning_rate: [0.1, 0.2], exclude: [{ lora.rank: 8, learning_rate: 0.1 }] }"),
        ["[4,0.1]", "[4,0.2]", "[8,0.2]"]
    );
    assert_eq!(
        of("{ lora.rank: [4, 8], learning_rate: [0.1, 0.2], exclude: [{ lora.rank: 8 }] }"),
        ["[4,0.1]", "[4,0.2]"]
    );
    assert_eq!(
        of("{ lora.rank: [4], learning_rate: [0.1], include: [{ learning_rate: 0.3, lora.rank: 64 }] }"),
        ["[4,0.1]", "[64,0.3]"]
    );
    assert_eq!(
        of("{ include: [{ lora.rank: 4, learning_rate: 0.1 }, { lora.rank: 8, learning_rate: 0.2 }] }"),
        ["[4,0.1]", "[8,0.2]"]
    );
    // A key without a value counts as left out.
    assert_eq!(of("{ lora.rank: [4, 8], learning_rate: }"), ["[4]", "[8]"]);
    assert_eq!(of("{ with.lora.rank: [4] }"), ["[with.4]"]);
}

#[test]
fn values_may_be_texts_lists_and_nothing() {
    let plan = plan(
        "version: 1\nstages:\n  d:\n    uses: dataset\n    matrix:\n      source: [./a.jsonl, '8', \"x,y\"]\n      \
         column_map: [{ a: b }, null]\n  s: { uses: split, with: { rows: d } }\n  \
         one: { uses: split, with: { rows: 'd[source=./a.jsonl,column_map={a:b}]' } }\n",
    );
    assert_eq!(
        plan.ids_of("d"),
        [
            "d[source=./a.jsonl,column_map={a:b}]",
            "d[source=./a.jsonl,column_map=null]",
            "d[source=\"8\",column_map={a:b}]",
            "d[source=\"8\",column_map=null]",
            "d[source=x,y,column_map={a:b}]",
            "d[source=x,y,column_map=null]",
        ]
    );
    assert_eq!(
        plan.stage("d[source=x,y,column_map=null]").unwrap().parameters.to_string(),
        r#"{"source":"x,y","column_map":null}"#
    );
    assert_eq!(inputs(&plan, "s[source=x,y,column_map=null]"), ["d[source=x,y,column_map=null].rows"]);
    assert_eq!(inputs(&plan, "one"), ["d[source=./a.jsonl,column_map={a:b}].rows"]);
    assert_eq!(plan.ids_of("d[column_map=null]").len(), 3);
    let long = "z".repeat(200);
    let ids_of = |text: &str| {
        let plan = self::plan(&format!(
            "version: 1\nstages:\n  d: {{ uses: dataset, matrix: {{ source: [{text}a, {text}b] }} }}\n"
        ));
        ids(&plan).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let ids = ids_of(&long);
    assert!(ids[0] != ids[1] && ids.iter().all(|id| id.len() < 80), "{ids:?}");
}

#[test]
fn a_shared_axis_is_joined_and_others_are_crossed() {
    let plan = plan(&file(
        "  a: { uses: split, with: { rows: x } }\n  x: { uses: dataset, matrix: { source: [p, q] } }\n  \
         y: { uses: dataset, with: { source: z }, matrix: { column_map: [{ a: b }, { c: d }] } }\n  \
         both: { uses: pair, with: { a: a.left, b: x } }\n  all: { uses: pair, with: { a: a.right, b: y } }\n  \
         fixed: { uses: pair, with: { a: 'x[source=q]', b: a.left } }\n  later: { uses: split, with: { rows: rows }, needs: [a] }\n  \
         with: { uses: pair, with: { a: x, b: rows }, needs: [a, y] }",
    ));
    assert_eq!(plan.ids_of("both"), ["both[source=p]", "both[source=q]"]);
    assert_eq!(inputs(&plan, "both[source=q]"), ["a[source=q].left", "x[source=q].rows"]);
    assert_eq!(plan.ids_of("all").len(), 4);
    assert_eq!(inputs(&plan, "all[source=q,column_map={c:d}]"), ["a[source=q].right", "y[column_map={c:d}].rows"]);
    // A child that is named is followed no further.
    assert_eq!(plan.ids_of("fixed"), ["fixed[source=p]", "fixed[source=q]"]);
    assert_eq!(inputs(&plan, "fixed[source=p]"), ["x[source=q].rows", "a[source=p].left"]);
    // `needs:` waits for the children that agree, and makes none.
    assert_eq!(needs(&plan, "later"), ["a[source=p]", "a[source=q]"]);
    assert_eq!(needs(&plan, "with[source=p]"), ["a[source=p]", "y[column_map={a:b}]", "y[column_map={c:d}]"]);
}

#[test]
fn an_axis_of_one_name_is_one_axis() {
    let two = |first: &str, second: &str| {
        file(&format!(
            "  a: {{ uses: dataset, matrix: {{ source: [{first}] }} }}\n  b: {{ uses: dataset, matrix: {{ source: [{second}] }} }}\n  \
             c: {{ uses: pair, with: {{ a: a, b: b }} }}"
        ))
    };
    assert_eq!(plan(&two("p, q", "q, p")).ids_of("c"), ["c[source=p]", "c[source=q]"]);
    assert_eq!(
        wrong(&two("p, q", "q, r")),
        ["axis-mismatch 7:37 & 5:33 & 6:33 stage `c` meets the axis `source` twice, with different values: \"p\", \
             \"q\" and \"q\", \"r\" (give both the same values, or one of them another name: `matrix: { x: [...] }` and `source: \"${matrix.x}\"` under `with:`)"]
    );
    let named = two("p, q", "x")
        .replace("matrix: { source: [x] }", "with: { source: '${matrix.other}' }, matrix: { other: [q, r] }");
    assert_eq!(plan(&named).ids_of("c").len(), 4);
    // An axis of its own joins that of what it reads.
    let own = swept("    matrix: { learning_rate: [0.1, 0.2] }").replace(
        "  merged:",
        "  second: { uses: train, with: { model: base, data: t, epochs: 2 }, needs: [adapter], matrix: { learning_rate: [0.1] } }\n  merged:",
    );
    assert_eq!(needs(&plan(&own), "second[learning_rate=0.1]"), ["adapter[learning_rate=0.1]"]);
}

#[test]
fn an_axis_may_be_what_a_stage_reads() {
    let plan = plan(&file(
        "  other: { uses: dataset, with: { source: y } }\n  \
         s: { uses: split, matrix: { rows: [rows, other] } }\n  t: { uses: split, with: { rows: s.left } }",
    ));
    assert_eq!(plan.ids_of("t"), ["t[rows=rows]", "t[rows=other]"]);
    assert_eq!(inputs(&plan, "s[rows=other]"), ["other.rows"]);
    assert_eq!(
        wrong(&file(
            "  x: { uses: dataset, matrix: { source: [p, q] } }\n  s: { uses: split, matrix: { rows: [rows, x] } }"
        )),
        [
            "axis-mismatch 6:3 the children of stage `s` do not have the same axes: some have `rows`, others `source`, `rows` (let all the stages that it can read be swept over the same axes, or name one child: `stage[axis=value]`)"
        ]
    );
}

#[test]
fn a_name_of_an_axis_stands_for_its_value() {
    let text = swept("    matrix: { size: [4, 8] }")
        .replace("rank: 8 }", "rank: '${matrix.size}', alpha: '${ matrix.size }' }")
        .replace("prompts: [hi]", "prompts: ['of ${matrix.size} $${x}']");
    let plan = plan(&format!("{text}\npublish: {{ merged: './out/${{matrix.size}}', 'asked[size=8]': ./best }}\n"));
    assert_eq!(
        plan.stage("adapter[size=8]").unwrap().parameters.to_string(),
        r#"{"model":"base","data":"t","lora":{"rank":8,"alpha":8}}"#
    );
    assert_eq!(plan.stage("asked[size=4]").unwrap().parameters["prompts"].to_string(), r#"["of 4 ${x}"]"#);
    let published: Vec<String> = plan.publish.iter().map(|p| format!("{} {}", p.stage, p.path.display())).collect();
    assert_eq!(published, ["merged[size=4] ./out/4", "merged[size=8] ./out/8", "asked[size=8] ./best"]);
    assert_eq!(
        wrong(&text.replace("[4, 8]", "[4, many]")),
        [
            "wrong-type 9:25 `lora.rank`: expected an integer, found a string",
            "wrong-type 9:25 `lora.alpha`: expected a number, found a string"
        ]
    );
    assert_eq!(
        wrong(&text.replace("${matrix.size}'", "${matrix.sizes}'").replace("hi", "${matrix.x}")),
        ["unknown-variable 8:49 `${matrix.sizes}`: stage `adapter` is not swept over `sizes` (did you mean `size`?)",]
    );
    assert_eq!(
        wrong(&file("  s: { uses: dataset, with: { source: '${matrix.x}' }, needs: ['${matrix.x}'] }")),
        [
            "unknown-variable 5:39 `${matrix.x}`: stage `s` is not swept over `x` (it has no `matrix:`, nor has what it reads)",
            "bad-reference 5:65 `${matrix.x}` has no meaning here: an axis has a value in each child of a stage",
        ]
    );
}

#[test]
fn collect_is_the_list_of_all_children() {
    let text = |list: &str| {
        file(&format!(
            "  x: {{ uses: dataset, matrix: {{ source: [p, q] }} }}\n  y: {{ uses: split, with: {{ rows: x }} }}\n  \
             mix: {{ uses: mix, with: {{ {list} }} }}"
        ))
    };
    let mixed = |list: &str| plan(&text(list)).stage("mix").unwrap().parameters.to_string();
    assert_eq!(
        mixed("datasets: { collect: x, weight: 2 }"),
        r#"{"datasets":[{"rows":"x[source=p]","weight":2},{"rows":"x[source=q]","weight":2}]}"#
    );
    assert_eq!(
        mixed("datasets: [{ rows: rows }, { collect: y.left }]"),
        r#"{"datasets":[{"rows":"rows"},{"rows":"y[source=p].left"},{"rows":"y[source=q].left"}]}"#
    );
    assert_eq!(mixed("all: { collect: 'x[source=q]' }"), r#"{"all":["x[source=q]"]}"#);
    assert_eq!(mixed("all: [rows, { collect: rows }]"), r#"{"all":["rows","rows"]}"#);
    let plan = plan(&text("all: { collect: x }"));
    assert_eq!(inputs(&plan, "mix"), ["x[source=p].rows", "x[source=q].rows"]);
    assert_eq!(
        wrong(&text(
            "all: { collect: z, weight: 3 }, datasets: { collect: x, rows: rows, wieght: 1 }, names: { collect: x }"
        )),
        [
            "unknown-stage 7:45 stage `mix` reads `z`, which no stage produces (declared stages: `base`, `rows`, `x`, `y`)",
            "unknown-key 7:48 unknown key `weight` (known keys: `collect`)",
            "unknown-key 7:85 unknown key `rows` (`mix` has no such key; `split` has one)",
            "unknown-key 7:97 unknown key `wieght` (did you mean `weight`?)",
            "wrong-type 7:117 `names`: expected a list, found a mapping",
        ]
    );
}

#[test]
fn an_axis_that_changes_no_result_makes_measurements() {
    for axis in ["resources.threads: [1, 2]", "log_every: [1, 10]"] {
        let text = swept(&format!("    matrix: {{ {axis} }}"));
        let (merged, asked) = (text.find("  merged").unwrap(), text.len());
        let alone = format!("{}{}", &text[..merged], &text[asked..]);
        let with_scores = format!("{alone}  scores: {{ uses: table, with: {{ metrics: adapter }} }}\n");
        let plan = plan(&with_scores);
        let children = plan.ids_of("adapter");
        let keys: Vec<_> = children.iter().map(|id| key(&plan, id)).collect();
        assert!(keys[0] != keys[1], "{axis}: each is measured");
        assert_eq!(plan.stage(children[0]).unwrap().measured, [axis.split(':').next().unwrap()]);
        // What is read of them is not measured again.
        let scores: Vec<_> = plan.ids_of("scores").iter().map(|id| key(&plan, id)).collect();
        assert!(scores.len() == 2 && scores[0] == scores[1]);
        let name = axis.split(':').next().unwrap();
        assert_eq!(
            wrong(&text),
            [format!(
                "measurement 10:56 `merged` reads adapter `adapter` of `adapter`, whose children only measure: `{name}` changes no result (read its metrics, or declare a stage like `adapter` without this axis to continue from; `merged.when=false` leaves this one out)"
            )]
        );
    }
    let left_out = plan_over(&swept("    matrix: { resources.threads: [1, 2] }"), &["merged.when=false"]);
    assert_eq!((left_out.stages.len(), left_out.left_out.len()), (5, 2));
    let threads = plan(swept("    matrix: { resources.threads: [1, 2] }").split("  merged").next().unwrap());
    assert_eq!(threads.stages[4].resources.threads, Some(2));
}

#[test]
fn what_is_wrong_with_a_value_is_said_there_and_what_is_wrong_with_all_once() {
    assert_eq!(
        wrong(&swept("    matrix: { lora.rank: [4, many, 0], learning_rate: [0.1, -1] }\n    retires: 3")),
        [
            "wrong-type 9:30 `lora.rank`: expected an integer, found a string",
            "out-of-range 9:36 `lora.rank` must be at least 1",
            "out-of-range 9:61 `learning_rate` must be above 0",
            "unknown-key 10:5 unknown key `retires` (did you mean `retries`?)",
        ]
    );
    // What only some values bring about names one of them.
    assert_eq!(
        wrong(
            "version: 1\nstages:\n  d:\n    uses: download\n    with: { path: ./x }\n    matrix: { repo: [null, a/b], exclude: [] }\n"
        ),
        ["both 5:19 & 6:28 `repo` and `path`"]
    );
    assert_eq!(
        wrong(&swept("    matrix: { lora.rnk: [4, 8], model: [base, bsae] }")),
        [
            "unknown-key 9:15 unknown key `rnk` (did you mean `rank`?)",
            "unknown-stage 9:47 stage `adapter` reads `bsae`, which no stage produces (did you mean `base`?)",
        ]
    );
    assert_eq!(
        wrong(&swept("    matrix: { lora.rank.x: [4], max_seq_len: [1] }")),
        [
            "wrong-type 9:15 & 8:49 `x` cannot be set: what holds it is an integer (set the whole value in \
             its place, as a mapping)",
            "unknown-key 9:33 unknown key `max_seq_len` (`train` has no such key; `tokenize` has one)",
        ]
    );
}

#[test]
fn a_wrong_matrix_is_explained() {
    let of = |matrix: &str| wrong(&swept(&format!("    matrix: {matrix}")));
    assert_eq!(
        of("[4]"),
        ["wrong-type 9:13 `matrix`: expected a mapping, found a list (write `matrix: { lora.rank: [4, 8] }`)"]
    );
    assert_eq!(
        of("{ lora: { rank: [4] } }"),
        ["wrong-type 9:21 axis `lora`: expected a list of values, found a mapping (write `lora.rank: [...]`)"]
    );
    assert_eq!(
        of("{ lora.rank: 4 }"),
        ["wrong-type 9:26 axis `lora.rank`: expected a list of values, found an integer (write `lora.rank: [4]`)"]
    );
    assert_eq!(of("{ lora.rank: [] }"), ["bad-matrix 9:26 axis `lora.rank` has no values"]);
    assert_eq!(
        of("{}"),
        ["bad-matrix 9:13 the matrix has no combination (leave `matrix:` out for a stage that runs once)"]
    );
    assert_eq!(of("{ lora.rank: [4, 8, 4.0] }"), ["bad-matrix 9:33 & 9:27 axis `lora.rank` has the value `4.0` twice"]);
    assert_eq!(
        of("{ lora..rank: [4] }"),
        ["bad-matrix 9:15 `lora..rank` cannot be an axis (an axis is the path of a parameter, such as `lora.rank`)"]
    );
    assert_eq!(
        of("{ lora.rank: [4, 8], exclude: [{ rank: 4 }], include: [{ epochs: 3 }, 7] }"),
        [
            "unknown-key 9:46 unknown key `rank` (did you mean `lora.rank`?)",
            "unknown-key 9:70 unknown key `epochs` (known keys: `lora.rank`)",
            "wrong-type 9:83 `include`: expected a mapping of axes, found an integer",
        ]
    );
    assert_eq!(
        of("{ lora.rank: [4, 8], exclude: [{ lora.rank: 4 }, { lora.rank: 8 }] }"),
        ["bad-matrix 9:13 the matrix has no combination (leave `matrix:` out for a stage that runs once)"]
    );
    assert_eq!(
        of("{ lora.rank: [4, 8], learning_rate: [0.1], include: [{ lora.rank: 16 }] }"),
        ["bad-matrix 9:66 & 9:34 a combination that is included needs a value for `learning_rate`"]
    );
    let warned =
        plan(&swept("    matrix: { lora.rank: [4], exclude: [{ lora.rank: 5 }], include: [{ lora.rank: 4 }] }"));
    let warnings: Vec<&str> = warned.warnings.iter().map(|warning| warning.message.as_str()).collect();
    assert_eq!(warnings, ["this excludes no combination", "this combination exists already"]);
    assert_eq!(
        wrong(
            &swept("    matrix: { lora.rank: [4, 8] }")
                .replace("adapter: adapter }", "adapter: 'adapter[lora.rank=5]' }")
        ),
        [
            "unknown-stage 10:56 stage `merged` reads `adapter[lora.rank=5]`, which no stage produces (did you mean `adapter[lora.rank=4]`?)"
        ]
    );
}

#[test]
fn a_cycle_through_a_sweep_is_said_as_the_file_has_it() {
    let text = file(
        "  a: { uses: pair, with: { a: rows, b: c.left } }\n  b: { uses: split, matrix: { rows: [rows, c.left] } }\n  \
         c: { uses: split, with: { rows: b.left } }",
    );
    let text = text.replace("[rows, c.left]", "[c.left, rows]");
    assert_eq!(wrong(&text), ["cycle 6:38 & 7:35 stages wait for each other: b → c → b"]);
}

#[test]
fn large_integers_that_a_float_does_not_tell_apart_are_two_values() {
    let twice = |values: &str| {
        let found = wrong(&swept(&format!("    matrix: {{ lora.rank: [{values}] }}")));
        found.iter().any(|problem| problem.starts_with("bad-matrix "))
    };
    assert!(!twice("9007199254740993, 9007199254740992"));
    assert!(twice("9007199254740993, 9007199254740993") && twice("-2, -2.0"));
}

#[test]
fn children_are_published_to_folders_of_their_own() {
    let with =
        |publish: &str| wrong(&format!("{}\npublish: {{ {publish} }}\n", swept("    matrix: { lora.rank: [4, 8] }")));
    let published = |matrix: &str, path: &str| -> Vec<String> {
        let text = format!("{}\npublish: {{ merged: '{path}' }}\n", swept(matrix));
        plan(&text).publish.iter().map(|entry| entry.path.display().to_string()).collect()
    };
    let ranks = "    matrix: { lora.rank: [4, 8] }";
    assert_eq!(published(ranks, "./out/"), ["./out-lora.rank=4", "./out-lora.rank=8"]);
    assert_eq!(
        published("    matrix: { lora.rank: [4], epochs: [1, 2] }", "./out"),
        ["./out-epochs=1", "./out-epochs=2"]
    );
    assert_eq!(published("    matrix: { lora.rank: [4] }", "./out"), ["./out"]);
    let two = swept("    matrix: { lora.rank: [4, 8], epochs: [1, 2] }");
    assert_eq!(
        wrong(&format!("{two}\npublish: {{ merged: './out/${{matrix.lora.rank}}' }}\n")),
        [
            "duplicate-path 13:20 two targets are published to `./out/4` (the children of a sweep need a folder each: `./out/4/${matrix.epochs}`)"
        ]
    );
    assert_eq!(
        with("merged: './out/${matrix.rank}'"),
        [
            "unknown-variable 13:20 `${matrix.rank}`: stage `merged` is not swept over `rank` (did you mean `lora.rank`?)"
        ]
    );
    assert_eq!(
        with("merged: './out/${matrix.lora.rank}', asked: './out/8/${matrix.lora.rank}'"),
        ["duplicate-path 13:56 & 13:20 `./out/8/4` and `./out/8` overlap"]
    );
    assert_eq!(
        with("'merged[lora.rank=5]': ./out"),
        [
            "unknown-stage 13:12 `publish` names `merged[lora.rank=5]`, which no stage produces (did you mean `merged[lora.rank=4]`?)"
        ]
    );
    // A value is one name of a path, whatever it holds.
    let rows = "version: 1\nstages:\n  d: { uses: dataset, matrix: { source: [../a/b, ..] } }\npublish: { d: './out/${matrix.source}' }\n";
    let paths: Vec<String> = plan(rows).publish.iter().map(|entry| entry.path.display().to_string()).collect();
    assert_eq!(paths, ["./out/_._a_b", "./out/_."]);
}

#[test]
fn too_many_children_are_refused_in_time() {
    let numbers = |count: usize| (0..count).map(|n| (n + 1).to_string()).collect::<Vec<_>>().join(", ");
    let of = |count: usize| {
        swept(&format!("    matrix: {{ lora.rank: [{0}], epochs: [{0}], log_every: [{0}] }}", numbers(count)))
    };
    assert_eq!(
        wrong(&of(1000)),
        [
            "too-many-stages 9:13 the matrix makes 1000000000 children of this stage, and the maximum is 2000 (shorten an axis, or list the combinations that matter under `include:`)"
        ]
    );
    let crossed = file(&format!(
        "  x: {{ uses: dataset, matrix: {{ source: [{0}] }} }}\n  y: {{ uses: dataset, with: {{ source: s }}, matrix: {{ column_map.a: [{0}] }} }}\n  \
         both: {{ uses: pair, with: {{ a: x, b: y }} }}",
        (0..100).map(|n| format!("s{n}")).collect::<Vec<_>>().join(", ")
    ));
    let found = wrong(&crossed);
    assert!(found.len() == 1 && found[0].starts_with("too-many-stages 7:3 the matrix makes 2"), "{found:?}");
}

#[test]
fn a_thousand_children_are_planned_in_no_time() {
    let numbers = (1..=10).map(|n| n.to_string()).collect::<Vec<_>>().join(", ");
    let text =
        swept(&format!("    matrix: {{ lora.rank: [{numbers}], epochs: [{numbers}], learning_rate: [{numbers}] }}"));
    let registry = registry();
    let times = (0..3).map(|_| {
        let started = Instant::now();
        let plan = load_text(Path::new("file.yaml"), &text, &[], &registry).unwrap();
        let took = started.elapsed();
        assert_eq!(plan.stages.len(), 3 + 3 * 1000);
        took
    });
    let took = times.min().unwrap();
    assert!(took < Duration::from_millis(if cfg!(debug_assertions) { 20_000 } else { 1000 }), "took {took:?}");
}

#[test]
fn the_drawing_groups_children() {
    let plan = plan(&swept("    matrix: { lora.rank: [4, 8] }"));
    let mermaid = graph_text(&plan, GraphFormat::Mermaid);
    assert!(
        mermaid.contains("    subgraph g3 [\"adapter<br/><i>train</i>\"]\n        s3[\"lora.rank=4\"]\n"),
        "{mermaid}"
    );
    let dot = graph_text(&plan, GraphFormat::Dot);
    assert!(
        dot.contains(
            "    subgraph cluster_3 {\n        label=\"adapter\\ntrain\";\n        s3 [label=\"lora.rank=4\"];\n"
        ),
        "{dot}"
    );
}

#[test]
fn a_mistake_in_a_matrix_is_said_alone() {
    let text = swept("    matrix: { size: [4, 4] }").replace("{ rank: 8 }", "{ rank: '${matrix.size}' }");
    let text = text.replace("prompts: [hi]", "prompts: ['of ${matrix.size}']");
    assert_eq!(wrong(&text).len(), 1, "{:#?}", wrong(&text));
    assert!(wrong(&text)[0].starts_with("bad-matrix"));
}
