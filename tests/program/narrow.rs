//! At a terminal nothing is wider than that; in a pipe all is complete.

use test_harness::test;
use unicode_width::UnicodeWidthStr;

use crate::support::Project;
use crate::support::fake_tools::FakeTools;
use crate::support::terminal::Session;

const FIRST: &str = "the_first_of_its_stages_with_a_name_that_takes_room";

/// The pipelines of the project: the results of the first three are the same.
const PIPELINES: [(&str, &str); 4] = [
    ("a_pipeline_with_a_name_that_takes_room_a", "one"),
    ("a_pipeline_with_a_name_that_takes_room_b", "one"),
    ("a_pipeline_with_a_name_that_takes_room_c", "one"),
    ("a_pipeline_with_a_name_that_takes_room_d", "two"),
];

/// A project in which each of the pipelines ran, with a configuration of another tool.
fn project() -> Project {
    let project = Project::new();
    for (name, word) in PIPELINES {
        let script = format!("echo {word} and more words than a line of a narrow terminal has room for");
        project.write(
            "p.yaml",
            &format!(
                "version: 1\nname: {name}\nstages:\n  {FIRST}:\n    uses: command\n    with: {{ run: '{script} \
                 >\"$OUTPUT_o/a\"', outputs: {{ o: files }} }}\n  second:\n    uses: command\n    with: {{ run: \
                 'cat \"$INPUT_i/a\" >\"$OUTPUT_o/b\"', inputs: {{ i: {FIRST} }}, outputs: {{ o: files }} }}\n"
            ),
        );
        project.run(&["run", "p.yaml"]).ends_with(0);
    }
    project.write("alpaca.jsonl", "{\"instruction\": \"a\", \"input\": \"b\", \"output\": \"c\"}\n");
    project.write(
        "axolotl.yaml",
        "base_model: a/b\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlearning_rate: 1e-4\n\
         lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]\n\
         datasets: [{ path: alpaca.jsonl, type: alpaca }]\nsample_packing: true\nval_set_size: 0.1\n",
    );
    project
}

/// What a command shows at a terminal of so many columns, of which no line may be wider.
#[track_caller]
fn fits(project: &Project, tools: Option<&FakeTools>, arguments: &[&str], columns: usize) -> String {
    let mut command = project.command(arguments);
    if let Some(tools) = tools {
        tools.give_to(&mut command);
    }
    let variables = [("COLUMNS", columns.to_string()), ("NO_COLOR", "1".to_owned())];
    let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
    let (code, shown) = Session::start(&command, &variables).end();
    let wide: Vec<&str> = shown.lines().filter(|line| line.width() > columns).collect();
    let ran = matches!(code, Some(0 | 1)) && !shown.is_empty();
    assert!(ran && wide.is_empty(), "{arguments:?} at {columns} columns: {code:?}, {wide:#?} of\n{shown}");
    shown
}

#[test]
fn no_line_is_wider_than_the_terminal() {
    let project = project();
    for columns in [60, 80] {
        for arguments in [
            &["cache", "du"][..],
            &["cache", "gc", "--older-than", "0s", "--dry-run"],
            &["cache", "rm", FIRST, "--dry-run"],
            &["runs", "ls"],
            &["runs", "show"],
            &["runs", "show", "latest", FIRST],
            &["runs", "diff"],
            &["runs", "provenance", "second"],
            &["explain"],
            &["ls"],
            &["ls", "lora"],
            &["import", "axolotl.yaml", "-o", "imported.yaml", "--overwrite"],
        ] {
            fits(&project, None, arguments, columns);
        }
        let listed = fits(&project, None, &["cache", "ls"], columns);
        assert!(listed.contains("+2 more") && listed.contains("…"), "{listed}");
    }
    let listed = project.run(&["cache", "ls"]).ends_with(0);
    for (name, _) in PIPELINES {
        assert!(listed.stdout.contains(&format!("{name}/{FIRST}")), "{listed}");
    }
    let runs = project.run(&["runs", "ls"]).ends_with(0).says("took");
    assert!(PIPELINES.iter().all(|(name, _)| runs.stdout.contains(name)), "{runs}");
}

#[test]
fn devices_fit_the_terminal() {
    let (project, tools) = (Project::new(), FakeTools::new());
    // What starts the program at its terminal.
    tools.script("setsid", "exec /usr/bin/setsid \"$@\"");
    for columns in [60, 80] {
        fits(&project, Some(&tools), &["devices"], columns);
        fits(&project, Some(&tools), &["devices", "doctor"], columns);
    }
    tools.npu_smi("910b3x8.info.txt", "910b3x8.topo.txt");
    let shown = fits(&project, Some(&tools), &["devices"], 80);
    assert!(shown.contains("npu:7   Ascend 910B3") && shown.contains("64.0 GiB"), "{shown}");
}
