//! `pipeline.lock`: written once, heeded, upgraded on demand; `--locked` and `--offline`.

use std::fs;

use test_harness::test;

use crate::hub::{COMMIT, FaultyHub};
use crate::support::{Project, Ran};

const PIN: &str = "hub-model:owner/name@main";

/// A commit that the Hub is not at.
const OLD: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";

/// A project that takes two files from a Hub.
struct Pinned<'a> {
    project: Project,
    hub: &'a FaultyHub,
}

impl<'a> Pinned<'a> {
    fn new(hub: &'a FaultyHub) -> Self {
        let project = Project::new();
        project.write(
            "hub.yaml",
            "version: 1\nstages:\n  base: { uses: download, with: { repo: owner/name, as: files } }\n",
        );
        Self { project, hub }
    }

    fn pipeline(&self, arguments: &[&str]) -> Ran {
        let mut command = self.project.command(arguments);
        for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "PIPELINE_REMOTE"] {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.hub.endpoint).env("HF_HOME", self.project.path("hf"));
        command.env("HF_HUB_CACHE", self.project.path("hub-cache"));
        Ran::of(command, arguments)
    }

    fn lock(&self) -> String {
        fs::read_to_string(self.project.path("pipeline.lock")).unwrap()
    }
}

fn serve() -> FaultyHub {
    FaultyHub::serve(&[("config.json", b"{}"), ("model.safetensors", b"weights")])
}

#[test]
fn what_is_pinned_is_written_down_with_its_files_and_asked_for_once() {
    let hub = serve();
    let at = Pinned::new(&hub);
    at.pipeline(&["lock", "hub.yaml", "--check"]).ends_with(1).says(&format!("{PIN}: not pinned"));
    assert!(!at.project.path("pipeline.lock").exists());
    assert_eq!(hub.requests().len(), 0, "a check without an upgrade asks nobody");
    let said = format!("{PIN}: (not pinned) → 0123456789ab (2 files)");
    at.pipeline(&["lock", "hub.yaml"]).ends_with(0).says(&said);
    let lock = at.lock();
    let lines: Vec<&str> = lock.lines().skip(1).collect();
    assert_eq!(
        lines[..5],
        ["version: 2", "pins:", &format!("  \"{PIN}\":"), &format!("    commit: \"{COMMIT}\""), "    files:",]
    );
    assert!(lines[5].starts_with("      \"config.json\": \"git:") && lines[5].ends_with(" 2\""), "{lock}");
    assert!(lines[6].starts_with("      \"model.safetensors\": \"sha256:") && lines[6].ends_with(" 7\""), "{lock}");
    let requests = hub.requests().len();
    at.pipeline(&["lock", "hub.yaml"]).ends_with(0).warns("up to date");
    at.pipeline(&["lock", "hub.yaml", "--check"]).ends_with(0);
    assert_eq!(hub.requests().len(), requests);
    at.pipeline(&["run", "hub.yaml", "--locked"]).ends_with(0);
    assert_eq!(at.lock(), lock);
}

#[test]
fn an_upgrade_shows_what_was_and_what_is() {
    let hub = serve();
    let at = Pinned::new(&hub);
    at.pipeline(&["lock", "hub.yaml"]).ends_with(0);
    at.pipeline(&["lock", "hub.yaml", "--upgrade"]).ends_with(0).warns("up to date");
    let sound = at.lock();
    at.project.write("pipeline.lock", &sound.replace(COMMIT, OLD));
    at.pipeline(&["lock", "hub.yaml"]).ends_with(0).warns("up to date");
    let outdated = at.lock();
    let said = format!("{PIN}: aaaaaaaaaaaa (2 files) → 0123456789ab (2 files)");
    at.pipeline(&["lock", "hub.yaml", "--check", "--upgrade"]).ends_with(1).says(&said);
    assert_eq!(at.lock(), outdated);
    at.pipeline(&["lock", "hub.yaml", "--upgrade", "other/name"]).ends_with(2).warns("nothing that is read from a hub");
    assert_eq!(at.lock(), outdated);
    at.pipeline(&["lock", "hub.yaml", "--upgrade", "owner/name@main"]).ends_with(0).says(&said);
    assert_eq!(at.lock(), sound);
}

#[test]
fn locked_names_what_is_missing_and_changes_nothing() {
    let hub = serve();
    let at = Pinned::new(&hub);
    let refused = at.pipeline(&["run", "hub.yaml", "--locked"]).ends_with(2).warns(PIN).warns("stage `base`");
    assert!(refused.stderr.contains("pipeline lock FILE"), "{refused}");
    at.pipeline(&["run", "hub.yaml", "--locked", "--offline"]).ends_with(2).warns(PIN);
    at.pipeline(&["run", "hub.yaml", "--offline"]).ends_with(2).warns(PIN);
    assert_eq!(hub.requests().len(), 0);
    assert!(!at.project.path("pipeline.lock").exists());
}

#[test]
fn a_lock_that_makes_no_sense_is_refused_with_a_way_out() {
    let hub = serve();
    let at = Pinned::new(&hub);
    let conflict = "version: 2\npins:\n<<<<<<< HEAD\n  \"a\":\n    commit: \"1\"\n=======\n>>>>>>> other\n";
    let run = |text: &str| {
        at.project.write("pipeline.lock", text);
        at.pipeline(&["run", "hub.yaml"]).ends_with(2)
    };
    run(conflict).warns("merge conflict (line 3)").warns("remove the marks");
    run("version: 3\npins: {}\n").warns("has version 3").warns("newer version of this program");
    run("pins: 1\n").warns("is not a lock file");
    // What is written down is asked for as it stands: a branch would pass as pinned, and a path lead elsewhere.
    for commit in ["main", "../../etc", "zzz"] {
        at.project.write("pipeline.lock", &format!("version: 2\npins:\n  \"{PIN}\":\n    commit: \"{commit}\"\n"));
        at.pipeline(&["run", "hub.yaml", "--locked"]).ends_with(2).warns("is no commit").warns("pipeline lock FILE");
    }
    assert_eq!(hub.requests().len(), 0);
    // The form before this one is read, and rewritten only when something is added.
    run_old_form(&at);
}

fn run_old_form(at: &Pinned<'_>) {
    let old = format!("{{\n  \"version\": 1,\n  \"pins\": {{\n    \"{PIN}\": \"{COMMIT}\"\n  }}\n}}\n");
    at.project.write("pipeline.lock", &old);
    at.pipeline(&["run", "hub.yaml", "--locked"]).ends_with(0);
    assert_eq!(at.lock(), old);
    at.pipeline(&["lock", "hub.yaml", "--upgrade"]).ends_with(0).says("0123456789ab → 0123456789ab (2 files)");
}

#[test]
fn content_that_is_not_what_was_written_down_is_refused() {
    let hub = serve();
    let at = Pinned::new(&hub);
    at.pipeline(&["lock", "hub.yaml"]).ends_with(0);
    let sound = at.lock();
    let (_, checksum) = sound.split_once("sha256:").unwrap();
    let checksum = &checksum[..64];
    at.project.write("pipeline.lock", &sound.replace(checksum, &"0".repeat(64)));
    at.pipeline(&["run", "hub.yaml"]).ends_with(3).warns("model.safetensors").warns(&"0".repeat(64));
}

#[test]
fn offline_goes_out_to_no_hub_and_takes_what_the_machine_has() {
    let hub = serve();
    let at = Pinned::new(&hub);
    at.pipeline(&["lock", "hub.yaml"]).ends_with(0);
    let requests = hub.requests().len();
    let ran = at.pipeline(&["run", "hub.yaml", "--offline", "--locked"]).ends_with(3);
    // Whichever file is missed first: a line of its length may be broken within the name.
    let said: String = ran.stderr.split_whitespace().collect();
    assert!(said.contains("thismachinelacks`") && said.contains("of`owner/name`"), "{ran}");
    assert_eq!(hub.requests().len(), requests);
    // What another tool has fetched is as good, since the checksums are written down.
    let snapshot = at.project.path(&format!("hub-cache/models--owner--name/snapshots/{COMMIT}"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    fs::write(snapshot.join("model.safetensors"), "weights").unwrap();
    at.pipeline(&["run", "hub.yaml", "--offline", "--locked"]).ends_with(0);
    assert_eq!(hub.requests().len(), requests);
}

#[test]
fn a_pinned_stage_reaches_another_machine_by_the_remote_alone() {
    let hub = serve();
    let (first, second) = (Pinned::new(&hub), Pinned::new(&hub));
    let shared = tempfile::tempdir().unwrap();
    let remote = shared.path().to_str().unwrap();
    let tree = |ran: &Ran| ran.json()["stages"][0]["outputs"]["files"]["tree"].clone();
    let run = ["run", "hub.yaml", "--format", "json", "--remote", remote];
    let made = first.pipeline(&[&run[..], &["--push"]].concat()).ends_with(0);
    fs::copy(first.project.path("pipeline.lock"), second.project.path("pipeline.lock")).unwrap();
    let requests = hub.requests().len();
    let fetched = second.pipeline(&[&run[..], &["--locked", "--offline"]].concat()).ends_with(0).warns("fetched ");
    assert_eq!(hub.requests().len(), requests);
    assert!(tree(&made).is_string());
    assert_eq!(tree(&made), tree(&fetched));
}
