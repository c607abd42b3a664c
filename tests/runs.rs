//! `pipeline runs`: comparing, checking, tracing and keeping what past runs did.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use support::Project;

/// A project with two short trainings that differ in the learning rate.
fn two_trainings() -> Project {
    let project = Project::with_pipeline("train.yaml");
    for rate in ["3e-3", "1e-3"] {
        let rate = format!("adapter.optimizer.learning_rate={rate}");
        project.run(&["run", "train.yaml", "adapter.epochs=2", &rate, "--until", "scores"]).ends_with(0);
    }
    project
}

#[test]
fn compare_shows_what_differs_marks_the_best_and_draws_the_losses() {
    let project = two_trainings();
    let table = project.run(&["runs", "compare", "latest~1", "latest"]).ends_with(0);
    let header = table.stdout.lines().next().unwrap();
    assert!(header.contains("learning_rate") && header.contains("last_loss"), "{table}");
    // What is the same in both is left out.
    assert!(!header.contains("rank") && !header.contains("epochs"), "{table}");
    let json = project.run(&["runs", "compare", "adapter", "--sort", "last_loss", "--format", "json"]);
    let json = json.ends_with(0).json();
    assert_eq!(json["parameters"], serde_json::json!(["optimizer.learning_rate"]));
    let losses: Vec<f64> = (0..2).map(|at| json["candidates"][at]["metrics"]["last_loss"].as_f64().unwrap()).collect();
    assert!(losses[0] < losses[1], "{json:#}");
    let is_best = |at: usize| json["candidates"][at]["best"].as_array().unwrap().contains(&"last_loss".into());
    assert!(is_best(0) && !is_best(1), "{json:#}");

    project.run(&["runs", "compare", "adapter", "--format", "csv"]).ends_with(0).says("optimizer.learning_rate,");
    project.run(&["runs", "compare", "adapter", "--format", "markdown", "--plot", "p.html"]).ends_with(0).says("**");
    let page = std::fs::read_to_string(project.path("p.html")).unwrap();
    assert_eq!(page.matches("<polyline").count(), 2, "{page}");
    assert!(
        !page.contains("http") || page.matches("http").count() == page.matches("http://www.w3.org/2000/svg").count()
    );

    project.run(&["runs", "compare", "adapter", "--plot", "p.png"]).ends_with(2).warns(".svg");
    project.run(&["runs", "compare", "adapter", "--sort", "lost_loss"]).ends_with(2).warns("did you mean `last_loss`?");
    project.run(&["runs", "compare", "adaptor"]).ends_with(2).warns("did you mean `adapter`?");
    project.run(&["runs", "compare", "latest"]).ends_with(2).warns("nothing to compare it with");
}

#[test]
fn diff_names_the_field_and_ends_with_1_where_anything_differs() {
    let project = two_trainings();
    let different = project.run(&["runs", "diff"]).ends_with(1);
    assert!(different.stdout.contains("optimizer.learning_rate  0.003 → 0.001"), "{different}");
    assert!(different.stdout.contains("equal: questions, text, fresh, tokens"), "{different}");
    let json = project.run(&["runs", "diff", "latest", "latest", "--format", "json"]).ends_with(0).json();
    assert_eq!((&json["equal"], json["stages"].as_array().unwrap().len()), (&true.into(), 0));
    project.run(&["runs", "diff", "latest", "latest~7"]).ends_with(2).warns("no run `latest~7`");
}
