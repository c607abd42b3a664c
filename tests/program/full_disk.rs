//! Disks that cannot be written to: full ones, and read-only ones.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use engine::error::{Cause, Failure};
use engine::history::{Host, Recorded, RunFolder, RunPlan, RunState, Words};
use engine::run::{Conclusion, Counts, RunEvent};
use test_harness::{Requirement, Unmet, test};

use crate::support::{Project, Ran, program};

/// A small file system of its own, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Mounts one with a small pipeline on it. Fails where the user may not.
    fn mount(size: &str) -> Result<Self, Unmet> {
        let folder = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder.path()).output();
        match mount {
            Ok(output) if output.status.success() => {}
            refused => {
                return Err(Requirement::Mount.unmet(format!("{refused:?}")));
            }
        }
        let disk = Self(folder);
        let project = Project::with_pipeline("data.yaml");
        for file in ["data.yaml", "text.jsonl", "questions.jsonl"] {
            fs::copy(project.path(file), disk.path(file)).unwrap();
        }
        Ok(disk)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = program(self.0.path());
        command.args(arguments);
        Ran::of(command, arguments)
    }

    /// Fills it but for some bytes.
    fn fill_but(&self, left: u64) {
        let free = nix::sys::statvfs::statvfs(self.0.path()).unwrap();
        let free = free.blocks_available() * free.fragment_size();
        fs::write(self.path("filler"), vec![0; usize::try_from(free.saturating_sub(left)).unwrap()]).unwrap();
    }

    fn remount(&self, how: &str) {
        let options = format!("remount,{how}");
        assert!(Command::new("mount").args(["-o", &options]).arg(self.0.path()).status().unwrap().success());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

/// The names in the store that stand for something whole.
fn names(home: &Path) -> usize {
    ["objects", "trees", "results"]
        .iter()
        .filter_map(|folder| fs::read_dir(home.join("store").join(folder)).ok())
        .flatten()
        .count()
}

#[test]
fn a_full_disk_is_named_with_what_to_do_and_the_next_run_goes_on() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("2m")?;
    let mut failed = 0;
    let mut most = 0;
    // With each step another write is the first that fails: of the home, of the run's folder, of rows, of a record, of
    // a model.
    for left in (0..16).map(|step| step * 24 * 1024) {
        disk.fill_but(left);
        let ran = disk.run(&["run", "data.yaml"]);
        if ran.code != Some(0) {
            failed += 1;
            let ran = ran.ends_with(3).warns("pipeline cache gc").warns(" free");
            assert!(ran.stderr.to_lowercase().contains("no space left"), "{left} bytes left: {ran}");
        }
        if disk.path(".pipeline/store").is_dir() {
            // These work on a full disk, and nothing half-written has a name.
            disk.run(&["cache", "verify"]).ends_with(0);
            disk.run(&["cache", "ls"]).ends_with(0);
            disk.run(&["cache", "gc"]).ends_with(0);
        }
        most = most.max(names(&disk.path(".pipeline")));
        fs::remove_file(disk.path("filler")).unwrap();
        disk.run(&["run", "data.yaml"]).ends_with(0);
        disk.run(&["cache", "verify"]).ends_with(0);
        fs::remove_dir_all(disk.path(".pipeline")).unwrap();
    }
    println!("{failed} of 16 runs met a full disk");
    assert!(failed > 3 && most > 0, "{failed} {most}");
    Ok(())
}

#[test]
fn the_end_of_a_run_is_recorded_where_a_longer_line_has_no_room() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("1m")?;
    let plan = RunPlan {
        run: "run".into(),
        pipeline: "p".into(),
        file: "p.yaml".into(),
        started: String::new(),
        program: "0".into(),
        folder: PathBuf::new(),
        host: Host::default(),
        track: Vec::new(),
        stages: Vec::new(),
    };
    let mut run = RunFolder::create(&disk.path("run"), &plan).unwrap();
    run.append(&RunEvent::Pinning { pins: Vec::new() }).unwrap();
    disk.fill_but(0);
    let messages = vec!["no room ".repeat(16 * 1024)];
    let failure = Failure { cause: Cause::DiskFull, messages, help: None, object: None };
    let (stage, log, retry_in_seconds, retry_with) = ("rows".to_owned(), PathBuf::new(), None, None);
    run.append(&RunEvent::StageFailed { stage, failure, log, seconds: 1.0, retry_in_seconds, retry_with }).unwrap_err();
    let (conclusion, counts) = (Conclusion::Failed, Counts::default());
    run.append(&RunEvent::RunFinished { conclusion, counts, seconds: 1.0 }).unwrap();
    drop(run);
    let recorded = Recorded::read(&disk.path("run"), Words::Read).unwrap().summary;
    assert_eq!((recorded.state, recorded.damaged_lines), (RunState::Failed, 0));
    Ok(())
}

/// What was said, on one line.
fn said(ran: &Ran) -> String {
    ran.stderr.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn garbage_collection_is_not_advised_where_another_disk_is_full() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("1m")?;
    disk.fill_but(8 * 1024);
    let project = Project::with_pipeline("data.yaml");
    let publish = format!("publish: {{ fresh.model: {} }}\nstages:", disk.path("out").display());
    project.edit("data.yaml", "stages:", &publish);
    let target = disk.path("exported").to_string_lossy().into_owned();
    for arguments in [&["run", "data.yaml", "--until", "fresh"][..], &["export", "data.yaml", "fresh.model", &target]] {
        let ran = project.run(arguments).ends_with(3);
        let said = said(&ran);
        assert!(said.contains("make room on the disk at `") && !said.contains("cache gc"), "{ran}");
        assert_eq!(said.matches(" KiB free").count(), 1, "{ran}");
    }
    // Nor where standard output goes there.
    fs::write(disk.path("rest"), vec![0; 1 << 20]).unwrap_err();
    let mut command = project.command(&["runs", "ls"]);
    command.stdout(fs::File::create(disk.path("list")).unwrap());
    let ran = Ran::of(command, &["runs", "ls"]).ends_with(3);
    let said = said(&ran);
    assert!(said.contains("standard output could not be written: its disk is full"), "{ran}");
    assert!(!said.contains("cache gc"), "{ran}");
    Ok(())
}

#[test]
fn standard_output_that_takes_nothing_is_named() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml", "--until", "text"]).ends_with(0);
    for arguments in [&["runs", "ls"][..], &["cache", "ls", "--format", "json"]] {
        let mut command = project.command(arguments);
        command.stdout(fs::File::options().write(true).open("/dev/full").unwrap());
        let ran = Ran::of(command, arguments).ends_with(3);
        let said = said(&ran);
        assert!(said.contains("standard output could not be written: its disk is full"), "{ran}");
        assert!(!said.contains("cache gc") && !said.contains("KiB free"), "{ran}");
    }
}

#[test]
fn a_read_only_home_can_be_looked_at() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("4m")?;
    disk.run(&["run", "data.yaml"]).ends_with(0);
    disk.remount("ro");
    let looks: [(&[&str], &str); 8] = [
        (&["plan", "data.yaml"], "nothing to do"),
        (&["show", "data.yaml", "text_packs"], "trained"),
        (&["runs", "ls"], "succeeded"),
        (&["runs", "show", "latest"], "text_packs"),
        (&["cache", "ls"], "7 results"),
        (&["cache", "du"], "data/text_packs"),
        (&["cache", "verify"], "everything is intact"),
        (&["cache", "gc", "--dry-run"], "would remove 0 results"),
    ];
    for (arguments, expected) in looks {
        disk.run(arguments).ends_with(0).says(expected);
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let target = elsewhere.path().join("packs").to_string_lossy().into_owned();
    disk.run(&["export", "data.yaml", "text_packs", &target]).ends_with(0);
    // To do a stage again takes a folder and a lock in the store.
    disk.run(&["runs", "verify", "latest", "text"]).ends_with(3).warns("ead-only file system");
    disk.run(&["cache", "gc"]).ends_with(3).warns("ead-only file system");
    disk.run(&["run", "data.yaml"]).ends_with(3).warns("ead-only file system");
    disk.remount("rw");
    disk.run(&["run", "data.yaml", "--format", "json"]).ends_with(0).made(0);
    Ok(())
}
