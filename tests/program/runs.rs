//! `pipeline runs`: comparing, checking, tracing and keeping what past runs did.

use std::collections::BTreeSet;

use test_harness::test;

use crate::support::Project;

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
fn compare_shows_the_numbers_of_a_program_and_no_defaults_of_a_child_that_failed() {
    let project = Project::new();
    let run = r#"test $N != 3; echo "{\"score\": $N, \"loss\": $N}" >$OUTPUT_m/metrics.json"#;
    let stage = format!(
        "{{ uses: command, matrix: {{ env.N: ['1', '2', '3'] }}, with: {{ run: {}, outputs: {{ m: metrics }} }} }}",
        serde_json::Value::from(run)
    );
    project.write("p.yaml", &format!("version: 1\nstages:\n  s: {stage}\n"));
    project.run(&["run", "p.yaml", "--keep-going"]).ends_with(1);
    let table = project.run(&["runs", "compare", "s", "--sort", "score"]).ends_with(0).stdout;
    let title = table.lines().next().unwrap_or_default();
    assert!(title.contains("score") && title.contains("loss"), "{table}");
    assert!(!title.contains("version") && !title.contains("pass_env") && !title.contains("run"), "{table}");
}

#[test]
fn compare_says_of_a_stage_without_a_result_how_it_ended() {
    let project = Project::new();
    let stage = |more: &str| {
        format!(
            "{{ uses: command, {more}with: {{ run: 'test \"$N\" = none', env: {{ N: '0' }}, outputs: {{ o: files }} }} }}"
        )
    };
    let stages =
        [("tr", stage("")), ("swept", stage("matrix: { env.N: ['1', '2'] }, ")), ("behind", stage("needs: [tr], "))];
    let stages: String = stages.iter().map(|(id, stage)| format!("  {id}: {stage}\n")).collect();
    project.write("p.yaml", &format!("version: 1\nname: p\nstages:\n{stages}"));
    project.run(&["run", "p.yaml", "--keep-going"]).ends_with(1);
    // The newest run is of another pipeline, which has no such stage.
    project.write(
        "other.yaml",
        "version: 1\nstages:\n  made: { uses: command, with: { run: 'echo 1 >\"$OUTPUT_o/a\"', outputs: { o: files } } }\n",
    );
    project.run(&["run", "other.yaml"]).ends_with(0);
    let run = project.run(&["runs", "ls", "--pipeline", "p", "--format", "json"]).ends_with(0).json();
    let first = run[0]["run"].as_str().unwrap().to_owned();
    let run = first[.."20260301-090507".len()].to_owned();
    let told = |arguments: &[&str]| {
        let told = project.run(arguments).ends_with(2).to_string();
        let told = told.replace("-\n  │ ", "-").replace('│', " ");
        told.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for (name, how) in [
        ("tr", "it failed in run"),
        ("behind", "it was skipped in run"),
        ("swept", "none of its 2 children (2 failed) has one in run"),
    ] {
        for more in [&["--pipeline", "p"][..], &[]] {
            let told = told(&[&["runs", "compare", name], more].concat());
            assert!(told.contains(&format!("`{name}` has no result in any run")), "{told}");
            assert!(told.contains(&format!("{how} {run}")) && told.contains("`pipeline runs show "), "{told}");
            assert!(!told.contains("there is no stage") && !told.contains("did you mean"), "{told}");
            assert_eq!(told.contains("`pipeline logs "), name != "behind", "{told}");
        }
    }
    // In a newer run it is not even reached.
    let needy = format!("  broken: {}\n  tr: {{ uses: command, needs: [broken], ", stage(""));
    project.edit("p.yaml", "  tr: { uses: command, ", &needy);
    project.run(&["run", "p.yaml", "--keep-going"]).ends_with(1);
    let newest = told(&["runs", "compare", "tr"]);
    assert!(newest.contains("it was skipped in run") && newest.contains("the newest that has it"), "{newest}");
    let named = told(&["runs", "compare", "tr", "--run", &first]);
    assert!(named.contains("`tr` has no result in any run of `p`: it failed in run"), "{named}");
    assert!(!named.contains("the newest"), "{named}");
    project.run(&["runs", "compare", "trr", "--pipeline", "p"]).ends_with(2).warns("there is no stage `trr`");
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
fn a_run_as_json_follows_its_schema() {
    let project = two_trainings();
    let schema = project.run(&["schema", "--run"]).ends_with(0).json();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let pipeline = "version: 1
stages:
  made: { uses: command, matrix: { env.X: [a, b] }, with: { run: 'echo $X > $OUTPUT_out/x', outputs: { out: files } } }
  broken: { uses: command, with: { run: 'exit 3', outputs: { out: files } } }
  behind: { uses: command, needs: [broken], with: { run: 'true', outputs: { out: files } } }
";
    std::fs::write(project.path("broken.yaml"), pipeline).unwrap();
    project.run(&["run", "broken.yaml", "--keep-going"]).ends_with(1);
    for run in ["latest~1", "latest"] {
        let view = project.run(&["runs", "show", run, "--format", "json"]).ends_with(0).json();
        let wrong: Vec<String> =
            validator.iter_errors(&view).map(|error| format!("{}: {error}", error.instance_path())).collect();
        assert!(wrong.is_empty(), "{}\n{view:#}", wrong.join("\n"));
        // Nothing is said that the schema does not know.
        let known = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(known(&view), known(&schema["properties"]));
        let stage = &schema["$defs"]["StageView"]["properties"];
        assert!(view["stages"].as_array().unwrap().iter().all(|told| known(told) == known(stage)));
    }
    let mut other = project.run(&["runs", "show", "--format", "json"]).json();
    assert_eq!(other["failures"][0]["stage"], "broken");
    other["run"]["state"] = "fine".into();
    assert!(!validator.is_valid(&other));
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

#[test]
fn verify_does_stages_again_and_names_what_was_changed() {
    let project = Project::with_pipeline("train.yaml");
    project.run(&["run", "train.yaml", "adapter.epochs=2"]).ends_with(0);
    let before = project.run(&["cache", "ls"]).ends_with(0).stdout;
    project.run(&["runs", "verify", "--format", "json"]).ends_with(0).found_equal(8);
    // The store is as it was: nothing was added, taken or left behind.
    assert_eq!(project.run(&["cache", "ls"]).ends_with(0).stdout, before);
    let staging = project.path(".pipeline/store/staging");
    assert_eq!(std::fs::read_dir(staging).unwrap().count(), 0);
    // A stage that the run took from the store is checked against the run that made it.
    project.run(&["run", "train.yaml", "adapter.epochs=2"]).ends_with(0);
    project.run(&["runs", "verify", "latest"]).ends_with(2).warns("executed no stage");
    project.run(&["runs", "verify", "latest", "adapter"]).ends_with(0).says("made by run");

    let run = project.run(&["runs", "show", "latest~1", "--format", "json"]).json();
    let folder = std::path::PathBuf::from(run["folder"].as_str().unwrap());
    let replace = |file: &str, from: &str, to: &str| {
        let path = folder.join(file);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        text
    };
    let told = replace("adapter/job.json", "0.003", "0.004");
    project
        .run(&["runs", "verify", "latest~1", "adapter"])
        .ends_with(1)
        .says("`optimizer.learning_rate` 0.004, and its key has 0.003");
    std::fs::write(folder.join("adapter/job.json"), told).unwrap();

    // An object of an input and of an output: named, and neither removed nor believed.
    let object = object_of(&project, "tokens", "part-00000.parquet");
    let sound = std::fs::read(&object).unwrap();
    let mut broken = sound.clone();
    broken[sound.len() / 2] ^= 1;
    overwrite(&object, &broken);
    project.run(&["runs", "verify", "latest~1", "adapter", "tokens"]).ends_with(1).says("is damaged in the store");
    assert_eq!(std::fs::read(&object).unwrap(), broken);
    overwrite(&object, &sound);

    // A source file that has changed since says nothing about the record.
    project.edit("questions.jsonl", "owl follows the cow", "owl follows the hen");
    project.run(&["runs", "verify", "latest~1", "questions"]).ends_with(0).says("is no longer what it was");
}

/// The stored file of an output of the newest run that made it.
fn object_of(project: &Project, stage: &str, file: &str) -> std::path::PathBuf {
    let shown = project.run(&["runs", "show", "latest~1", stage, "--format", "json"]).ends_with(0).json();
    let tree = shown["outputs"][stage]["tree"].as_str().unwrap().to_owned();
    let store = project.path(".pipeline/store");
    let list = std::fs::read_to_string(store.join("trees").join(&tree[..2]).join(&tree[2..])).unwrap();
    let list: serde_json::Value = serde_json::from_str(&list).unwrap();
    let found = list["files"].as_array().unwrap().iter().find(|entry| entry["path"] == file);
    let digest = found.unwrap()["digest"].as_str().unwrap().to_owned();
    store.join("objects").join(&digest[..2]).join(&digest[2..])
}

fn overwrite(path: &std::path::Path, bytes: &[u8]) {
    std::fs::remove_file(path).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn provenance_leads_from_a_stage_a_published_file_and_a_digest_to_the_sources() {
    let project = Project::with_pipeline("train.yaml");
    project.run(&["run", "train.yaml", "adapter.epochs=2", "--until", "merged"]).ends_with(0);
    let told = project.run(&["runs", "provenance", "merged"]).ends_with(0);
    for part in ["questions.jsonl, ", "text.jsonl, ", "optimizer.learning_rate 0.003", "kernel_set", "as above"] {
        assert!(told.stdout.contains(part), "{part}: {told}");
    }
    let json = |target: &str| project.run(&["runs", "provenance", target, "--format", "json"]).ends_with(0).json();
    let by_stage = json("merged.model");
    assert!(reads(&by_stage, &project.path("questions.jsonl")), "{by_stage:#}");
    let key = by_stage["key"].as_str().unwrap();
    for target in ["out/model", "out/model/config.json", key, &key[..12]] {
        assert_eq!(json(target)["key"], key, "{target}");
    }
    // Without any record of a run, the store alone still knows the way.
    project.run(&["runs", "rm", "latest"]).ends_with(0);
    let alone = project.run(&["runs", "provenance", "out/model", "--format", "json"]).ends_with(0).json();
    assert_eq!(alone["results"].as_array().unwrap().len(), by_stage["results"].as_array().unwrap().len());

    project.edit("out/model/config.json", "\"vocab_size\"", "\"vocab_sise\"");
    project.run(&["runs", "provenance", "out/model"]).ends_with(0).says("`config.json` has another content");
    project.run(&["runs", "provenance", "train.yaml"]).ends_with(2).warns("no result in this home");
}

/// Whether a provenance ends at a file, with its digest.
fn reads(provenance: &serde_json::Value, path: &std::path::Path) -> bool {
    let path = path.canonicalize().unwrap();
    let is_it = |file: &serde_json::Value| {
        let known = file["path"].as_str().and_then(|known| std::path::Path::new(known).canonicalize().ok());
        known.as_ref() == Some(&path) && file["digest"].as_str().is_some_and(|digest| digest.len() == 64)
    };
    provenance["files"].as_array().unwrap().iter().any(is_it)
}

#[test]
fn runs_are_removed_but_for_the_newest_and_what_they_made_stays() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml"]).ends_with(0);
    for _ in 0..3 {
        project.run(&["run", "data.yaml"]).ends_with(0);
    }
    project.run(&["runs", "rm"]).ends_with(2).warns("--older-than");
    project.run(&["runs", "rm", "--older-than", "1d"]).ends_with(0).warns("0 runs removed");
    project.run(&["runs", "rm", "--keep", "2", "--dry-run"]).ends_with(0).warns("2 runs would be removed");
    project.run(&["runs", "rm", "--keep", "2"]).ends_with(0).warns("2 runs removed");
    let left = project.run(&["runs", "ls", "--format", "json"]).ends_with(0).json();
    assert_eq!(left.as_array().unwrap().len(), 2);
    assert_eq!(std::fs::read_dir(project.path(".pipeline/runs")).unwrap().count(), 2);
    project.run(&["runs", "rm", "latest~1", "latest"]).ends_with(0);
    project.run(&["runs", "ls", "--format", "json"]).ends_with(0).lists_nothing();
    project.run(&["run", "data.yaml", "--format", "json"]).ends_with(0).made(0);
}

#[test]
fn an_archive_has_the_whole_record_under_its_digests() {
    let project = two_trainings();
    project.run(&["runs", "export", "latest", "run.zip"]).ends_with(2).warns(".tar.gz");
    // The second run took four stages from the store: their records are in its archive all the same.
    project.run(&["runs", "export", "latest", "run.tar.gz"]).ends_with(0);
    let unpacked =
        std::process::Command::new("tar").args(["-xzf", "run.tar.gz"]).current_dir(project.path(".")).status();
    assert!(unpacked.unwrap().success());
    let run = project.run(&["runs", "show", "latest", "--format", "json"]).json();
    let top = project.path(&format!("run-{}", run["run"]["run"].as_str().unwrap()));
    let list: serde_json::Value = serde_json::from_slice(&std::fs::read(top.join("archive.json")).unwrap()).unwrap();
    let files = list["files"].as_object().unwrap();
    for (path, entry) in files {
        let size = std::fs::metadata(top.join(path)).unwrap().len();
        assert_eq!(entry["size"].as_u64(), Some(size), "{path}");
    }
    for path in ["run.json", "events.jsonl", "tokens/result.json", "adapter/log", "adapter/metrics/metrics.jsonl"] {
        assert!(files.contains_key(path), "{path}: {list:#}");
    }
}

#[test]
fn a_log_is_followed_until_its_stage_ends() {
    let project = Project::with_pipeline("train.yaml");
    let mut run = project.start(&["run", "train.yaml"]);
    let live = || project.run(&["runs", "ls", "--status", "running"]).stdout.contains("running");
    let started = std::time::Instant::now();
    while !live() {
        assert!(started.elapsed().as_secs() < 60, "no run began");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    // It waits for the stage's turn, and a run that goes on is never removed.
    project.run(&["runs", "rm", "latest"]).ends_with(2).warns("is active and is kept");
    let followed = project.run(&["logs", "-f", "adapter"]).ends_with(0).says("|Loss: ");
    assert!(run.wait().unwrap().success());
    assert_eq!(project.run(&["logs", "adapter"]).ends_with(0).stdout, followed.stdout);
    let last = project.run(&["logs", "adapter", "--tail", "1"]).ends_with(0);
    assert!(followed.stdout.ends_with(&last.stdout) && last.stdout.lines().count() == 1, "{last}");
}

#[test]
fn the_last_figures_of_preferences_are_compared_and_stages_of_one_run_alone_are_not() {
    let project = Project::with_pipeline("preference.yaml");
    let rows = |of: fn(usize) -> serde_json::Value| (0..12).map(|at| format!("{}\n", of(at))).collect::<String>();
    let pair = |at: usize| serde_json::json!({ "prompt": format!("{at}? "), "chosen": "yes, it is", "rejected": "no" });
    project.write("text.jsonl", &rows(|at| serde_json::json!({ "text": format!("yes, it is or no {at}?") })));
    project.write("pairs.jsonl", &rows(pair));
    project.write("held_out.jsonl", &rows(pair));
    project.write("judged.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": true}\n");
    for beta in ["0.1", "0.2"] {
        let beta = format!("adapter.loss.beta={beta}");
        project.run(&["run", "preference.yaml", "--until", "adapter", "adapter.max_steps=4", &beta]).ends_with(0);
    }
    let json = project.run(&["runs", "compare", "adapter", "--format", "json"]).ends_with(0).json();
    assert_eq!(json["parameters"], serde_json::json!(["loss.beta"]), "{json:#}");
    for name in ["rewards/margins", "rewards/accuracies", "validation_rewards/margins"] {
        for at in [0, 1] {
            assert!(json["candidates"][at]["metrics"][name].is_number(), "{name}: {json:#}");
        }
    }
    let best = json["candidates"].as_array().unwrap().iter().filter_map(|one| one["best"].as_array());
    assert!(best.flatten().any(|name| name == "rewards/margins"), "{json:#}");

    project.write(
        "other.yaml",
        "version: 1\nstages:\n  text: { uses: dataset, with: { source: ./text.jsonl, limit: 3 } }\n",
    );
    project.run(&["run", "other.yaml"]).ends_with(0);
    let json = project.run(&["runs", "compare", "latest~1", "latest", "--format", "json"]).ends_with(0).json();
    assert_eq!(json["parameters"], serde_json::json!(["text.limit"]), "{json:#}");
    let refused = project.run(&["runs", "compare", "adapter", "--pipeline", "preferences"]).ends_with(2);
    refused.warns("no run of a pipeline `preferences`").warns("did you mean `preference`?");
}
