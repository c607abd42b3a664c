//! Copies outside the store.

use std::fs;

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use engine::artifact::Description;
use engine::file::problem::Severity;
use engine::plan::Selection;
use engine::publish::{Moment, OnChanged, check_targets, description, published_as};
use engine::run::{Conclusion, RunError, RunEvent};
use test_harness::test;

use crate::project::{Project, Ran};

const PUBLISHED: &str = "
stages:
  a: { uses: constant, with: { value: 4 } }
publish: { a: ./out/number }
";

fn written(ran: &Ran) -> Option<bool> {
    ran.events.iter().find_map(|event| match event {
        RunEvent::Published { written, .. } => Some(*written),
        _ => None,
    })
}

#[test]
fn a_published_folder_follows_its_result() {
    let project = Project::new(PUBLISHED);
    assert_eq!(written(&project.run().succeeded()), Some(true));
    let file = project.path("out/number/number.txt");
    assert_eq!(fs::read_to_string(&file).unwrap(), "4");
    assert_eq!(written(&project.run().succeeded()), Some(false));
    // A copy with other times (a checkout, a restored backup) is still the same folder.
    fs::File::options().write(true).open(&file).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(false));
    project.write(&PUBLISHED.replace("value: 4", "value: 5"));
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert_eq!(fs::read_to_string(&file).unwrap(), "5");
    let left: Vec<_> = fs::read_dir(project.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["number"]);
    // What a process leaves that is killed before it has removed the old folder.
    fs::create_dir(project.path("out/.number.pipeline-new")).unwrap();
    fs::write(project.path("out/.number.pipeline-new/number.txt"), "4").unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(false));
    assert!(!project.path("out/.number.pipeline-new").exists());
    // The copy is the user's: writable, and no link into the store.
    fs::write(&file, "6").unwrap();
    assert_eq!(project.store().verify(&|_| {}).unwrap().faults, []);
}

#[test]
fn a_folder_that_somebody_changed_is_left_alone() {
    let mut project = Project::new(PUBLISHED);
    project.run().succeeded();
    let notes = project.path("out/number/notes.txt");
    fs::write(&notes, "mine").unwrap();
    // Before anything runs, and not only when the stage is done.
    project.write(&PUBLISHED.replace("value: 4", "value: 5"));
    let [(code, message)] = &refused(&project)[..] else { panic!("{:?}", refused(&project)) };
    assert_eq!(code, "target-taken");
    assert!(message.ends_with("was changed since it was published: `notes.txt` was added"), "{message}");
    assert_eq!(fs::read_to_string(&notes).unwrap(), "mine");
    project.options.on_changed_target = OnChanged::Overwrite;
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert!(!notes.exists());
}

/// Why a run does not begin: the codes and messages of the problems.
fn refused(project: &Project) -> Vec<(String, String)> {
    match project.try_run() {
        Err(RunError::Targets(problems)) => {
            problems.into_iter().map(|problem| (problem.code.to_owned(), problem.message)).collect()
        }
        Err(error) => panic!("{error}"),
        Ok(ran) => panic!("{:#?}", ran.events),
    }
}

#[test]
fn a_foreign_folder_is_found_before_anything_runs() {
    let mut project = Project::new(PUBLISHED);
    fs::create_dir_all(project.path("out/number")).unwrap();
    // An empty folder is nobody's.
    project.run().succeeded();
    fs::remove_file(project.path("out/number/.pipeline-published.json")).unwrap();
    let foreign = || {
        let [(code, message)] = &refused(&project)[..] else { panic!("{:?}", refused(&project)) };
        assert_eq!(code, "target-taken");
        assert!(message.ends_with("was not written by this program"), "{message}");
    };
    foreign();
    assert!(project.path("out/number/number.txt").exists());
    fs::remove_dir_all(project.path("out/number")).unwrap();
    fs::write(project.path("out/number"), "mine").unwrap();
    foreign();
    let ahead = check_targets(&project.plan(), &project.home(), Moment::Ahead);
    assert_eq!(ahead.iter().map(|problem| problem.code).collect::<Vec<_>>(), ["target-taken"]);
    project.options.on_changed_target = OnChanged::Overwrite;
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert_eq!(fs::read_to_string(project.path("out/number/number.txt")).unwrap(), "4");
}

/// Other bytes, with the length and the times that the file had.
fn flip(file: &Path) {
    let modified = fs::metadata(file).unwrap().modified().unwrap();
    fs::write(file, "9").unwrap();
    fs::File::options().write(true).open(file).unwrap().set_modified(modified).unwrap();
}

#[test]
fn a_bit_that_flipped_is_seen_whatever_the_times_say() {
    let mut project = Project::new(PUBLISHED);
    project.run().succeeded();
    let target = project.path("out/number");
    let file = target.join("number.txt");
    // Known by its attributes, as in a run that comes later.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    assert_eq!(written(&project.run().succeeded()), Some(false));
    assert_eq!(published_as(&target).unwrap().unwrap().changed, None);
    flip(&file);
    assert_eq!(refused(&project)[0].0, "target-taken");
    let how = published_as(&target).unwrap().unwrap().changed;
    assert_eq!(how.as_deref(), Some("`number.txt` has another content"));
    project.options.on_changed_target = OnChanged::Overwrite;
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert_eq!(fs::read_to_string(&file).unwrap(), "4");
    assert_eq!(published_as(&target).unwrap().unwrap().changed, None);
}

#[test]
fn what_a_killed_process_left_is_put_back_or_removed() {
    let mut project = Project::new(PUBLISHED);
    project.run().succeeded();
    let (target, new) = (project.path("out/number"), project.path("out/.number.pipeline-new"));
    let old = project.path("out/.number.pipeline-old");
    let alone = |project: &Project| {
        let left = fs::read_dir(project.path("out")).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["number"]);
    };
    // Killed between the two renames of a file system that cannot exchange names.
    fs::rename(&target, &old).unwrap();
    fs::create_dir(&new).unwrap();
    fs::write(new.join("number.txt"), "half").unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(false));
    alone(&project);
    // Behind them, before the old folder was removed; what it holds by then is not looked at.
    fs::create_dir(&old).unwrap();
    fs::write(old.join("number.txt"), "old").unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(false));
    alone(&project);
    // The old one was somebody's: it is back, and refused.
    fs::write(target.join("notes.txt"), "mine").unwrap();
    fs::rename(&target, &old).unwrap();
    assert_eq!(refused(&project)[0].0, "target-taken");
    assert_eq!(fs::read_to_string(target.join("notes.txt")).unwrap(), "mine");
    // What replaces it fails: it stays as it is.
    project.options.on_changed_target = OnChanged::Overwrite;
    let object = project.store().list().unwrap().results[0].outputs[0].tree;
    let object = project.store().tree(&object).unwrap().files()[0].digest;
    fs::write(project.path("aside"), "").unwrap();
    fs::rename(project.store().place(&object).path(), project.path("aside")).unwrap();
    fs::create_dir(project.store().place(&object).path()).unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(true), "the result was made again first");
    alone(&project);
}

#[test]
fn a_target_that_takes_along_what_is_read_or_kept_is_refused() {
    let mut project = Project::new("");
    project.options.on_changed_target = OnChanged::Overwrite;
    let root = project.folder.path().to_owned();
    fs::create_dir_all(project.path("data/deep")).unwrap();
    fs::write(project.path("data/a.txt"), "1").unwrap();
    fs::write(project.path("data/deep/b.txt"), "2").unwrap();
    fs::write(project.path("pipeline.lock"), "").unwrap();
    symlink(".", project.path("again")).unwrap();
    symlink("data", project.path("alias")).unwrap();
    symlink(&root, root.with_extension("elsewhere")).unwrap();
    let home = project.home().root().to_owned();
    let targets = [
        (root.display().to_string(), "holds"),
        (root.with_extension("elsewhere").display().to_string(), "holds"),
        ("./data/..".to_owned(), "cannot be published to"),
        ("./absent/../../x/..".to_owned(), "cannot be published to"),
        ("./again".to_owned(), "holds"),
        (root.parent().unwrap().display().to_string(), "holds"),
        ("./pipeline.yaml".to_owned(), "is the pipeline file"),
        ("./again/pipeline.yaml".to_owned(), "is the pipeline file"),
        ("./.pipeline".to_owned(), "is the home"),
        (home.join("out").display().to_string(), "is in the home"),
        ("./again/.pipeline/store".to_owned(), "is in the home"),
        ("./pipeline.lock".to_owned(), "is `pipeline.lock`"),
        ("./data".to_owned(), "is `./data`, which stage `n` reads"),
        ("./alias".to_owned(), "is `./data`, which stage `n` reads"),
        ("./alias/out".to_owned(), "is in `./data`, which stage `n` reads"),
        ("./data/deep/out".to_owned(), "is in `./data`, which stage `n` reads"),
    ];
    for (target, expected) in &targets {
        let stages =
            "  a: { uses: constant, with: { value: 4 } }\n  n: { uses: read_number, with: { source: ./data } }\n";
        project.write(&format!("stages:\n{stages}publish: {{ a: \"{target}\" }}\n"));
        let messages = match engine::plan::load(&project.file(), &[], &crate::kinds::registry()) {
            Err(rejected) => rejected.problems.iter().map(|problem| problem.message.clone()).collect(),
            Ok(plan) => {
                let ahead = check_targets(&plan, &project.home(), Moment::Ahead);
                assert!(ahead.iter().all(|problem| problem.code == "unsafe-target"), "{target}: {ahead:?}");
                let at_run = refused(&project).into_iter().map(|(_, message)| message).collect::<Vec<_>>();
                assert_eq!(at_run, ahead.iter().map(|problem| problem.message.clone()).collect::<Vec<_>>());
                at_run
            }
        };
        assert!(messages.len() == 1 && messages[0].contains(expected), "{target}: {messages:?}");
    }
    // What a stage reads that is not to run this time, or never, since its `when:` is false.
    for (not_now, until) in [("", vec!["a".to_owned()]), ("when: \"a == b\", ", vec![])] {
        let read = format!("{{ uses: read_number, {not_now}with: {{ source: ./data }} }}");
        let stages = format!("  a: {{ uses: constant, with: {{ value: 4 }} }}\n  n: {read}\n");
        project.write(&format!("stages:\n{stages}publish: {{ a: ./data }}\n"));
        project.selection.until = until;
        assert!(refused(&project)[0].1.contains("which stage `n` reads"), "{not_now}");
    }
    project.selection = engine::plan::Selection::default();
    // One folder under two names.
    let stages = "  a: { uses: constant, with: { value: 4 } }\n  b: { uses: constant, with: { value: 5 } }\n";
    project.write(&format!("stages:\n{stages}publish: {{ a: ./out/x, b: ./again/out/x }}\n"));
    assert!(refused(&project)[0].1.contains("which is published to as well"));
    fs::remove_file(root.with_extension("elsewhere")).unwrap();
    assert_eq!(fs::read_to_string(project.path("data/deep/b.txt")).unwrap(), "2");
}

#[test]
fn a_target_in_a_folder_that_was_published_is_refused() {
    let mut project = Project::new(PUBLISHED);
    project.run().succeeded();
    symlink("out", project.path("again")).unwrap();
    // The file does not say any more that this folder is published to, as if another one did.
    for target in ["./out/number/own", "./out/number/deep/own", "./again/number/own"] {
        project.write(&PUBLISHED.replace("./out/number", target));
        for on_changed in [OnChanged::Refuse, OnChanged::Overwrite] {
            project.options.on_changed_target = on_changed;
            let [(code, message)] = &refused(&project)[..] else { panic!("{:?}", refused(&project)) };
            assert_eq!(code, "unsafe-target");
            let is_named = message.starts_with(&format!("`{target}` is in `"));
            assert!(is_named && message.ends_with("/out/number`, a folder that was published"), "{message}");
        }
        let ahead = check_targets(&project.plan(), &project.home(), Moment::Ahead);
        assert_eq!(ahead.iter().map(|problem| problem.code).collect::<Vec<_>>(), ["unsafe-target"]);
    }
    project.write(PUBLISHED);
    assert_eq!(written(&project.run().succeeded()), Some(false), "it is as it was");
    project.write(&PUBLISHED.replace("./out/number", "./out/number-2"));
    assert_eq!(written(&project.run().succeeded()), Some(true));
    // A folder that holds the pipeline file, too, is no copy any more.
    fs::copy(project.path("out/number/.pipeline-published.json"), project.path(".pipeline-published.json")).unwrap();
    project.write(&PUBLISHED.replace("./out/number", "./out/own"));
    assert_eq!(written(&project.run().succeeded()), Some(true));
}

/// Makes sure that a run is refused since nothing can be made in a folder.
#[track_caller]
fn is_unwritable(project: &Project, target: &str, folder: &Path) {
    project.write(&PUBLISHED.replace("./out/number", target));
    let [(code, message)] = &refused(project)[..] else { panic!("{:?}", refused(project)) };
    assert_eq!(code, "target-unwritable");
    let expected = format!("`{target}` cannot be written: no folder can be created in `{}`: ", folder.display());
    assert!(message.starts_with(&expected), "{message}");
}

#[test]
fn a_target_that_cannot_be_written_is_found_before_anything_runs() {
    let mut project = Project::new("");
    let file = project.path("file");
    fs::write(&file, "mine").unwrap();
    symlink("absent", project.path("nowhere")).unwrap();
    // Nobody can write there, root neither.
    for on_changed in [OnChanged::Refuse, OnChanged::Overwrite] {
        project.options.on_changed_target = on_changed;
        is_unwritable(&project, "./file/number", &file);
        is_unwritable(&project, "./file/deep/number", &file);
        is_unwritable(&project, "./nowhere/number", &project.path("nowhere"));
        if Path::new("/proc/self").exists() {
            is_unwritable(&project, "/proc/out/number", Path::new("/proc"));
        }
    }
    project.write(&PUBLISHED.replace("./out/number", "./file/number"));
    let ahead = check_targets(&project.plan(), &project.home(), Moment::Ahead);
    let ahead: Vec<_> = ahead.iter().map(|problem| (problem.code, problem.severity)).collect();
    assert_eq!(ahead, [("target-unwritable", Severity::Warning)]);
    // Nothing is made by looking, also not for another target that could be.
    let stages = "  a: { uses: constant, with: { value: 4 } }\n  b: { uses: constant, with: { value: 5 } }\n";
    project.write(&format!("stages:\n{stages}publish: {{ a: ./out/number, b: ./file/number }}\n"));
    assert_eq!(refused(&project).len(), 1);
    let mut left: Vec<_> = fs::read_dir(project.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, [".pipeline", "file", "nowhere", "pipeline.yaml"]);
    assert_eq!(fs::read_dir(project.home().runs()).unwrap().count(), 0);
}

/// A folder that nobody but root may write to, until this is dropped.
struct Locked(PathBuf);

impl Locked {
    fn new(folder: PathBuf) -> Self {
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o555)).unwrap();
        Self(folder)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // What fails here may not hide why a test failed.
        let _ = fs::set_permissions(&self.0, fs::Permissions::from_mode(0o755));
    }
}

#[test]
fn a_folder_without_permission_is_found_before_anything_runs_unless_what_it_holds_may_be_current() {
    let project = Project::new(&PUBLISHED.replace("./out/number", "./kept/number"));
    project.run().succeeded();
    let _locked = Locked::new(project.path("kept"));
    // Root may write all the same.
    let tried = project.path("kept/tried");
    let is_locked = fs::create_dir(&tried).and_then(|()| fs::remove_dir(&tried)).is_err();
    // A copy that is current needs no permission.
    let ran = project.run().succeeded();
    assert_eq!(written(&ran), Some(false));
    let is_warned = ran.events.iter().any(|event| match event {
        RunEvent::Checked { warnings } => warnings.iter().any(|warning| warning.code == "target-unwritable"),
        _ => false,
    });
    assert_eq!(is_warned, is_locked);
    if is_locked {
        is_unwritable(&project, "./kept/other", &project.path("kept"));
    }
}

#[test]
fn a_link_is_replaced_and_not_what_it_leads_to() {
    let mut project = Project::new(PUBLISHED);
    fs::create_dir_all(project.path("elsewhere")).unwrap();
    fs::write(project.path("elsewhere/mine"), "precious").unwrap();
    fs::create_dir(project.path("out")).unwrap();
    symlink("../elsewhere", project.path("out/number")).unwrap();
    assert_eq!(refused(&project)[0].0, "target-taken");
    project.options.on_changed_target = OnChanged::Overwrite;
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert!(!project.path("out/number").is_symlink() && project.path("out/number/number.txt").is_file());
    assert_eq!(fs::read_to_string(project.path("elsewhere/mine")).unwrap(), "precious");
}

#[test]
fn a_published_folder_says_what_it_is_wherever_it_goes() {
    let project = Project::new(PUBLISHED);
    let ran = project.run().succeeded();
    let output = &ran.outcome.stages[0].outputs["number"];
    let moved = project.path("moved");
    fs::rename(project.path("out/number"), &moved).unwrap();
    assert_eq!(description(&moved), Some(Description::new("number", output.identity, output.facts.clone())));
    assert_eq!(published_as(&moved).unwrap().unwrap().changed, None);
    let mut names: Vec<_> = fs::read_dir(&moved).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, [".pipeline-published.json", "number.txt"]);
    // The record holds nothing of the machine or the moment.
    let record = |folder: &str| fs::read(project.path(folder).join(".pipeline-published.json")).unwrap();
    let first = record("moved");
    project.run().succeeded();
    assert_ne!(fs::metadata(&moved).unwrap().ino(), fs::metadata(project.path("out/number")).unwrap().ino());
    assert_eq!(record("out/number"), first);
    assert_eq!(description(project.folder.path()), None);
}

#[test]
fn a_file_with_the_name_of_the_record_is_refused_by_name() {
    let project = Project::new(
        "
stages:
  a: { uses: files, with: { names: [artifact.json, .pipeline-published.json, x] } }
  b: { uses: files, with: { names: [artifact.json, below/.pipeline-published.json, x] } }
publish: { a: ./out/a, b: ./out/b }
",
    );
    for _ in 0..2 {
        let ran = project.run();
        assert_eq!(ran.outcome.conclusion, Conclusion::Failed);
        let told = ran.events.iter().find_map(|event| match event {
            RunEvent::PublishFailed { stage, failure, .. } if stage == "a" => Some(failure.messages[0].clone()),
            _ => None,
        });
        assert!(told.as_ref().is_some_and(|told| told.contains("`.pipeline-published.json`")), "{told:?}");
        assert!(!project.path("out/a").exists());
        // Any other name is a file like any other.
        for name in ["artifact.json", "below/.pipeline-published.json", "x"] {
            assert_eq!(fs::read_to_string(project.path("out/b").join(name)).unwrap(), name);
        }
        assert_eq!(published_as(&project.path("out/b")).unwrap().unwrap().changed, None);
    }
}

/// Two numbers, of which `b` is published if `gates` hold.
fn gated(gates: &str) -> String {
    format!(
        "
stages:
  a: {{ uses: constant, with: {{ value: 4 }} }}
  b: {{ uses: constant, with: {{ value: 6 }} }}
gates: {gates}
publish: {{ b: ./out/number }}
"
    )
}

/// What was said of each gate: whether it holds, and why.
fn judged(ran: &Ran) -> Vec<(bool, String)> {
    let of = |event: &RunEvent| match event {
        RunEvent::GateJudged { holds, because, .. } => Some((*holds, because.clone())),
        _ => None,
    };
    ran.events.iter().filter_map(of).collect()
}

#[test]
fn what_passes_its_gates_is_published_and_nothing_else() {
    let project = Project::new(&gated("{ b.number: { above: 5.5, below: 10 } }"));
    let ran = project.run().succeeded();
    assert_eq!(judged(&ran), [(true, "6 is above 5.5".to_owned()), (true, "6 is below 10".to_owned())]);
    assert_eq!(written(&ran), Some(true));

    // The gate waits for the stage that it compares with, whichever ends last; a result from the store is judged, too.
    project.write(&gated("{ b.number: { below: a.number } }").replace("./out/number", "./out/other"));
    let ran = project.run();
    assert_eq!(judged(&ran), [(false, "6 is not below 4, `a.number`".to_owned())]);
    assert_eq!(ran.outcome.conclusion, Conclusion::Failed);
    assert_eq!((ran.outcome.counts.cached, ran.outcome.counts.failed), (2, 0));
    assert!(!project.path("out/other").exists());

    project.write(&gated("{ b.number: { above: a.number, margin: 1.5 } }").replace("./out/number", "./out/other"));
    assert_eq!(written(&project.run().succeeded()), Some(true));
}

#[test]
fn a_gate_that_names_no_figure_of_its_stage_stays_shut() {
    let project = Project::new(&gated("{ a.size: { above: 1 } }"));
    let ran = project.run();
    assert_eq!(judged(&ran), [(false, "`a` has no figure `size`; it has: number".to_owned())]);
    assert_eq!(written(&ran), None);
    assert_eq!(ran.outcome.conclusion, Conclusion::Failed);
}

#[test]
fn nothing_is_published_by_a_run_that_leaves_out_what_a_gate_asks_for() {
    let project = Project::new(&gated("{ a.number: { above: 1 } }"));
    let plan = project.plan().select(&Selection { until: vec!["b".to_owned()], ..Selection::default() }).unwrap();
    assert_eq!(plan.withheld.len(), 1);
    assert!(plan.publish.is_empty() && plan.gates.is_empty());
    let whole = project.plan().select(&Selection::default()).unwrap();
    assert_eq!((whole.withheld.len(), whole.publish.len(), whole.gates.len()), (0, 1, 1));
}
