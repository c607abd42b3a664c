//! Changes on the command line.

use super::*;
use crate::home::Home;

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
    assert_eq!(plan.stage("adapter").unwrap().resources.count, DeviceCount::Exactly(4));
    assert_eq!((plan.name.as_str(), plan.publish[1].path.to_str()), ("other", Some("./m")));
}

#[test]
fn the_command_of_a_plan_has_its_overrides_and_its_home() {
    let overrides = ["adapter.epochs=3", "samples.prompts=[\"Who?\"]"];
    let command = |plan: &Plan, home: Option<&str>| {
        plan.command_until("adapter[epochs=3]", &Home::at(Path::new("file.yaml"), home.map(Path::new)))
    };
    assert_eq!(command(&plan(REFERENCE), None), "pipeline run file.yaml --until 'adapter[epochs=3]'");
    let full = "pipeline run file.yaml adapter.epochs=3 'samples.prompts=[\"Who?\"]'";
    let plan = plan_over(REFERENCE, &overrides);
    assert_eq!(command(&plan, None), format!("{full} --until 'adapter[epochs=3]'"));
    assert_eq!(command(&plan, Some("/my home")), format!("{full} --home '/my home' --until 'adapter[epochs=3]'"));
    let overrides = overrides.map(str::to_owned);
    let env = |_: &str| Ok::<_, VarError>("rows.jsonl".to_owned());
    let smoke = load_with(Path::new("file.yaml"), REFERENCE, &overrides, &registry(), Scale::Smoke, &env);
    let smoke = smoke.unwrap_or_else(|rejected| panic!("{:#?}", lines(&rejected)));
    assert_eq!(command(&smoke, None), format!("{full} --smoke --until 'adapter[epochs=3]'"));
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
                "adapter",
                "adapter..x=3",
                "samples.prompts.7=x",
                "adapter.learning_rate.x=1",
                "tokens.max_seq_len=",
                "vars.rnk=4",
            ],
        ),
        [
            "wrong-type 14:21 & command line:11 `lora.rank`: expected an integer, found a string",
            "unknown-key command line:9 unknown key `learning_rat` (did you mean `learning_rate`?)",
            "unknown-stage command line:1 the override sets `adaptr`, which is no stage (did you mean `adapter`?)",
            "wrong-type command line:16 `epochs`: expected an integer, found a string",
            "syntax command line:27 not YAML: mismatched bracket '[' closed by '}' (close the bracket)",
            "wrong-type command line:16 `method`: expected one of `lora`, `full`, found a list",
            "duplicate-key command line:27 & command line:21 `a` is set twice (remove one of the two)",
            "bad-override command line:1 an override sets a value",
            "bad-override command line:1 an override sets a value (`pipeline run FILE --until adapter` runs a stage and what \
             it needs)",
            "bad-override command line:1 the path has an empty name",
            "bad-index command line:17 `7` is no item of a list of 1",
            "wrong-type command line:23 & 15:22 `x` cannot be set: what holds it is a number (set the whole value \
             in its place, as a mapping)",
            "missing-key command line:20 `max_seq_len` has no value",
            "unknown-variable command line:6 the file declares no variable `rnk` (did you mean `rank`?)",
        ]
    );
}

/// The children of `adapter`, and its parameters in the last of them, or what is wrong.
fn children(overrides: &[&str]) -> Result<(Vec<String>, String), Vec<String>> {
    let plan = load_over(REFERENCE, overrides).map_err(|rejected| {
        let all = lines(&rejected);
        all.into_iter()
            .filter(|line| !line.starts_with("no-effect") && !line.starts_with("unused-"))
            .collect::<Vec<_>>()
    })?;
    let children: Vec<String> = plan.ids_of("adapter").into_iter().map(str::to_owned).collect();
    let last = plan.stage(&children[children.len() - 1]).unwrap().parameters.to_string();
    Ok((children, last))
}

#[test]
fn several_values_for_one_are_an_axis() {
    let ids = |overrides: &[&str]| children(&[overrides, &["publish="]].concat()).unwrap().0;
    assert_eq!(
        ids(&["adapter.lora.rank=4,8, 16"]),
        ["adapter[lora.rank=4]", "adapter[lora.rank=8]", "adapter[lora.rank=16]"]
    );
    assert_eq!(ids(&["adapter.with.method=lora,full"]), ["adapter[method=lora]", "adapter[method=full]"]);
    assert_eq!(ids(&["adapter.learning_rate=1e-4,2e-4", "adapter.epochs=1,2"]).len(), 4, "two overrides are two axes");
    // An axis by its name takes any values.
    assert_eq!(ids(&["adapter.matrix.lora.rank=4"]), ["adapter[lora.rank=4]"]);
    assert_eq!(
        ids(&["adapter.matrix.lora.rank=[4, 8]", "adapter.matrix.exclude=[{lora.rank: 4}]"]),
        ["adapter[lora.rank=8]"]
    );
    assert_eq!(ids(&["adapter.matrix={epochs: [1, 2], lora.alpha: [1]}"]).len(), 2);
    // What is swept already is swept over what the command line says, and one value is one child.
    assert_eq!(ids(&["adapter.lora.rank=4,8", "adapter.lora.rank=16"]), ["adapter[lora.rank=16]"]);
    assert_eq!(ids(&["adapter.lora.rank=4,8", "adapter.lora.rank=[2, 3]"]).len(), 2);
    assert_eq!(ids(&["adapter.lora.rank=4,8", "adapter.matrix.lora.rank="]), ["adapter"]);
    assert_eq!(ids(&["adapter.lora.rank=4,8", "adapter.matrix="]), ["adapter"]);
    // Text and lists are what they are.
    let plan = plan_over(
        REFERENCE,
        &["articles.source=a,b", "articles.column_map.x=y,z", "samples.prompts.0=Oh, well", "base.repo='a,b'"],
    );
    assert_eq!(plan.stage("articles").unwrap().parameters["source"], "a,b");
    assert_eq!(plan.stage("samples").unwrap().parameters["prompts"][0], "Oh, well");
    assert_eq!(plan.stages.len(), 6);
}

#[test]
fn a_wrong_axis_is_shown_in_the_override() {
    // The file asks for a device, which is warned of.
    let on_cpu = "adapter.resources.device=cpu";
    let of = |overrides: &[&str]| children(&[overrides, &["publish=", on_cpu]].concat()).unwrap_err();
    assert_eq!(
        of(&["adapter.lora.rank=4,many,0"]),
        [
            "wrong-type command line:21 `lora.rank`: expected an integer, found a string",
            "out-of-range command line:26 `lora.rank` must be at least 1",
        ]
    );
    assert_eq!(
        of(&["adapter.lora.rank=4,,8"]),
        ["wrong-type command line:19 `lora.rank`: expected an integer, found a string"]
    );
    assert_eq!(
        of(&["adapter.lora.rank=4,8,4"]),
        ["bad-matrix command line:23 & command line:19 axis `lora.rank` has the value `4` twice"]
    );
    assert_eq!(
        of(&["adapter.matrix.lora.rnk=4,8"]),
        ["unknown-key command line:16 unknown key `rnk` (did you mean `rank`?)"]
    );
    assert_eq!(
        of(&["adapter[lora.rank=4].epochs=2"]),
        [
            "bad-override command line:1 an override reaches all children of `adapter`, not one of them (give one combination other values with `adapter.matrix.include=[{...}]`, or take one away with `adapter.matrix.exclude=[{...}]`)"
        ]
    );
    // A folder that is published for each child says which, with no word of the file's.
    assert_eq!(children(&["adapter.lora.rank=4,8", on_cpu]).unwrap().0.len(), 2);
}

#[test]
fn quotes_that_a_shell_leaves_are_shown() {
    let text = "version: 1\nstages:\n  rows: { uses: dataset, with: { source: x } }\n";
    assert_eq!(
        wrong_over(text, &["rows.source=3"]),
        ["wrong-type command line:13 `source`: expected a string, found an integer (put it in quotes that the shell \
             leaves: 'rows.source=\"3\"')"]
    );
}
