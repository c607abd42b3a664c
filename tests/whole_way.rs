//! The whole way from text to an answer, as a user goes it: every stage kind but `download`, and what is published.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use support::Project;

#[test]
fn the_whole_way_from_text_to_an_answer() {
    let project = Project::with_pipeline("train.yaml");
    let ran = project.run(&["run", "train.yaml"]).ends_with(0).warns("done: 8 ran in");
    let ran = ran.says("[scores]").says("perplexity").says("Where is it that the fox sees the hen?");
    assert!(ran.stdout.find("[scores]") < ran.stdout.find("[samples]"), "reports stand in the plan's order: {ran}");
    assert!(project.path("out/model/model.safetensors").is_file());
    project.run(&["show", "train.yaml", "adapter.metrics"]).ends_with(0).says("learning_rate").says("\n 120 ");
    project.run(&["show", "train.yaml", "merged"]).ends_with(0).says("merged_tensors");
    project.run(&["show", "train.yaml", "samples"]).ends_with(0).says("Where is it");
    // A published folder that was changed by hand is left alone, and says so.
    project.write("out/model/config.json", "{}");
    project.run(&["run", "train.yaml"]).ends_with(1).warns("out/model");
    project.run(&["run", "train.yaml", "--overwrite"]).ends_with(0);
    assert_ne!(std::fs::read_to_string(project.path("out/model/config.json")).unwrap(), "{}");
}
