//! What a store withstands: stages done again beside it, whatever stands in the place of its files, any umask, any name
//! of a user's file.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use test_harness::{Unmet, test};

use crate::support::{Project, Ran, install, needs_root};

/// Two stages that read folders with an equal file, and one other each.
const SHARING: &str = r#"
version: 1
name: sharing
stages:
  one: { uses: command, with: { run: 'cd "$OUTPUT_o"; echo equal >a; echo one >b; echo last >c', outputs: { o: files } } }
  two: { uses: command, with: { run: 'cd "$OUTPUT_o"; echo equal >a; echo two >b; echo last >c', outputs: { o: files } } }
  left: { uses: command, with: { run: 'cat "$INPUT_i"/* >"$OUTPUT_o/all"', inputs: { i: one }, outputs: { o: files } } }
  right: { uses: command, with: { run: 'cat "$INPUT_i"/* >"$OUTPUT_o/all"', inputs: { i: two }, outputs: { o: files } } }
publish: { left: ./out/left }
"#;

/// The id of a user without rights.
const NOBODY: u32 = 65534;

fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(below(&path));
        }
        found.push(path);
    }
    found
}

/// Stages that read equal files are done again, and the store is as it was.
fn verify_sharing(project: &Project, run: impl Fn(&[&str]) -> Ran) {
    run(&["run", "sharing.yaml"]).ends_with(0);
    run(&["runs", "verify", "latest", "--format", "json"]).ends_with(0).found_equal(4);
    run(&["runs", "verify", "latest", "left", "right", "--format", "json"]).ends_with(0).found_equal(2);
    run(&["cache", "verify"]).ends_with(0);
    assert_eq!(fs::read_to_string(project.path("out/left/all")).unwrap(), "equal\none\nlast\n");
}

#[test]
fn stages_that_share_an_input_are_done_again_without_a_write_into_the_store() {
    let project = Project::new();
    project.write("sharing.yaml", SHARING);
    verify_sharing(&project, |arguments| project.run(arguments));
}

/// Root may write to read-only files, others may not: what is wrong shows in other ways.
#[test]
fn and_so_they_are_by_a_user_without_rights() -> Result<(), Unmet> {
    needs_root()?;
    let project = Project::new();
    project.write("sharing.yaml", SHARING);
    let program = project.path("program");
    install(env!("CARGO_BIN_EXE_pipeline"), &program);
    for path in below(&project.path("")).iter().chain([&project.path("")]) {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    verify_sharing(&project, |arguments| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(project.path("")).env_remove("PIPELINE_HOME");
        command.env("HOME", project.path("")).uid(NOBODY).gid(NOBODY);
        Ran::of(command, arguments)
    });
    Ok(())
}

#[test]
fn nobody_else_reads_or_writes_more_than_the_umask_lets_them() {
    for (umask, denied) in [("077", 0o077), ("027", 0o027), ("022", 0o022), ("000", 0o002)] {
        let project = Project::new();
        project.write("sharing.yaml", SHARING);
        let script = format!("umask {umask}; exec \"$0\" run sharing.yaml");
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_pipeline")]).current_dir(project.path(""));
        command.env_remove("PIPELINE_HOME");
        Ran::of(command, &["run", umask]).ends_with(0);
        let home = project.path(".pipeline");
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
        for path in below(&home) {
            assert_eq!(mode(&path) & denied, 0, "{}: {:o} with {umask}", path.display(), mode(&path));
        }
        for object in below(&home.join("store/objects")).iter().filter(|path| path.is_file()) {
            assert_eq!(mode(object), 0o444 & !denied | 0o400, "{} with {umask}", object.display());
        }
    }
}

/// The files and shards of the store that a run of the project depends on.
fn entries(project: &Project) -> Vec<PathBuf> {
    let store = project.path(".pipeline/store");
    let mut entries = below(&store.join("results"));
    for folder in ["objects", "trees"] {
        entries.extend(below(&store.join(folder)));
    }
    entries.sort();
    entries
}

#[test]
fn a_run_heals_whatever_stands_in_the_place_of_a_file_or_a_folder_of_the_store() {
    let make: [fn(&Path); 3] = [
        |place| fs::create_dir(place).unwrap(),
        |place| std::os::unix::fs::symlink("nowhere", place).unwrap(),
        |place| mkfifo(place, Mode::S_IRWXU).unwrap(),
    ];
    let project = Project::new();
    project.write("sharing.yaml", SHARING);
    project.run(&["run", "sharing.yaml"]).ends_with(0);
    let count = entries(&project).len();
    for (round, place) in (0..count).step_by(3).enumerate() {
        let place = entries(&project)[place % entries(&project).len()].clone();
        if place.is_dir() {
            fs::remove_dir_all(&place).unwrap();
        } else {
            fs::remove_file(&place).unwrap();
        }
        make[round % make.len()](&place);
        let told = place.display().to_string();
        // Who only looks is not stopped by it, and a run that takes it away rebuilds it.
        project.run(&["cache", "ls"]).ends_with(0);
        if round % 2 == 0 {
            project.run(&["cache", "verify", "--repair"]).ends_with(0);
            project.run(&["cache", "gc"]).ends_with(0);
        }
        project.run(&["cache", "rm", "right"]);
        let ran = project.run(&["run", "sharing.yaml"]);
        assert_eq!(ran.code, Some(0), "{told}: {ran}");
        let _ = fs::remove_dir_all(project.path("exported"));
        project.run(&["export", "sharing.yaml", "left", "exported"]).ends_with(0);
        assert_eq!(fs::read_to_string(project.path("exported/all")).unwrap(), "equal\none\nlast\n", "{told}");
    }
    project.run(&["run", "sharing.yaml", "--format", "json"]).ends_with(0).made(0);
    project.run(&["cache", "verify", "--repair"]).ends_with(0);
    project.run(&["run", "sharing.yaml"]).ends_with(0);
    project.run(&["cache", "verify"]).ends_with(0);
}

#[test]
fn a_store_without_its_objects_is_collected_repaired_and_filled_again() {
    for command in [&["cache", "gc"][..], &["cache", "verify", "--repair"], &["cache", "gc", "--max-size", "1KiB"]] {
        let project = Project::new();
        project.write("sharing.yaml", SHARING);
        project.run(&["run", "sharing.yaml"]).ends_with(0);
        fs::remove_dir_all(project.path(".pipeline/store/objects")).unwrap();
        project.run(command).ends_with(0);
        project.run(&["run", "sharing.yaml"]).ends_with(0);
        project.run(&["cache", "verify"]).ends_with(0);
    }
}

/// A home that this user may not write to, with an index of runs that is no good.
#[test]
fn a_read_only_home_with_a_damaged_index_is_looked_at() -> Result<(), Unmet> {
    needs_root()?;
    let project = Project::new();
    project.write("sharing.yaml", SHARING);
    project.run(&["run", "sharing.yaml"]).ends_with(0);
    project.run(&["runs", "ls"]).ends_with(0).says("succeeded");
    let program = project.path("program");
    install(env!("CARGO_BIN_EXE_pipeline"), &program);
    fs::set_permissions(project.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let index = project.path(".pipeline/runs.sqlite");
    let sound = fs::read(&index).unwrap();
    let flipped: Vec<u8> = sound.iter().enumerate().map(|(at, byte)| if at > 4096 { !byte } else { *byte }).collect();
    for damaged in [&flipped[..], &sound[..5000], b"no database at all, and long enough to be looked at as one", b""] {
        fs::write(&index, damaged).unwrap();
        for arguments in [&["runs", "ls"][..], &["runs", "show", "latest"]] {
            let mut command = Command::new(&program);
            command.args(arguments).current_dir(project.path("")).env_remove("PIPELINE_HOME").uid(NOBODY).gid(NOBODY);
            Ran::of(command, arguments).ends_with(0).says("sharing");
        }
    }
    // Whoever may write rebuilds it.
    project.run(&["runs", "ls"]).ends_with(0).says("succeeded");
    fs::remove_file(&index).unwrap();
    mkfifo(&index, Mode::S_IRWXU).unwrap();
    project.run(&["runs", "ls"]).ends_with(0).says("succeeded");
    Ok(())
}

#[test]
fn nothing_waits_for_a_pipe_in_the_place_of_a_record() {
    let project = Project::new();
    project.write("sharing.yaml", SHARING);
    project.run(&["run", "sharing.yaml"]).ends_with(0);
    let home = project.path(".pipeline");
    let run = fs::read_dir(home.join("runs")).unwrap().next().unwrap().unwrap().path();
    let published = project.path("out/left/.pipeline-published.json");
    let records = ["run.json", "events.jsonl", "left/job.json", "left/result.json"].map(|name| run.join(name));
    let others = ["files.json", "published.json", "CACHEDIR.TAG"].map(|name| home.join(name));
    for place in records.iter().chain(&others).chain([&published]) {
        let aside = project.path("aside");
        let there = fs::rename(place, &aside).is_ok();
        mkfifo(place, Mode::S_IRWXU).unwrap();
        let _ = fs::remove_file(home.join("runs.sqlite"));
        project.run(&["runs", "ls"]).ends_with(0);
        project.run(&["runs", "show", "latest"]);
        project.run(&["runs", "provenance", "out/left"]);
        project.run(&["run", "sharing.yaml"]).ends_with(if *place == published { 2 } else { 0 });
        fs::remove_file(place).unwrap();
        if there {
            fs::rename(&aside, place).unwrap();
        }
    }
    mkfifo(&project.path("pipeline.lock"), Mode::S_IRWXU).unwrap();
    project.run(&["run", "sharing.yaml"]).ends_with(3).warns("named pipe");
}

/// Files with the names that the program itself has used are a user's files like any other.
#[test]
fn no_name_of_a_users_file_is_taken_from_it() {
    let project = Project::new();
    project.write(
        "names.yaml",
        r#"
version: 1
name: names
stages:
  made:
    uses: command
    with:
      run: |
        cd "$OUTPUT_o"
        echo mine >artifact.json
        mkdir below
        echo mine too >below/.pipeline-published.json
      outputs: { o: files }
  read:
    uses: command
    with:
      run: |
        cat "$INPUT_i/artifact.json" "$INPUT_i/below/.pipeline-published.json" >"$OUTPUT_o/both"
        ls -A "$INPUT_i" >"$OUTPUT_o/names"
        grep -q '"kind": "files"' "${inputs.i}.artifact.json"
      inputs: { i: made }
      outputs: { o: files }
publish: { made: ./out/made, read: ./out/read }
"#,
    );
    for made in [2, 0] {
        project.run(&["run", "names.yaml", "--format", "json"]).ends_with(0).made(made);
        let read = |path: &str| fs::read_to_string(project.path(path)).unwrap();
        assert_eq!(
            (read("out/made/artifact.json").as_str(), read("out/read/both").as_str()),
            ("mine\n", "mine\nmine too\n")
        );
        assert_eq!(read("out/read/names"), "artifact.json\nbelow\n");
        assert_eq!(read("out/made/below/.pipeline-published.json"), "mine too\n");
    }
    project.run(&["runs", "provenance", "out/made"]).ends_with(0).says("is what was published");
    project.run(&["export", "names.yaml", "made", "exported"]).ends_with(0);
    assert_eq!(fs::read_to_string(project.path("exported/artifact.json")).unwrap(), "mine\n");
    project.run(&["runs", "verify", "latest~1", "--format", "json"]).ends_with(0).found_equal(2);

    // Taken back as it was: with the user's files, and without the record.
    let taken = "version: 1\nname: taken\nstages:\n  made: { uses: download, with: { path: ./out/made, as: files } }\n";
    project.write("taken.yaml", taken);
    let identity = |file: &str| {
        let ran = project.run(&["run", file, "--until", "made", "--format", "json"]).ends_with(0).json();
        ran["stages"][0]["outputs"].as_object().unwrap().values().next().unwrap()["identity"].clone()
    };
    assert_eq!(identity("taken.yaml"), identity("names.yaml"));
}

/// The project folder, the home and the sources of a run, by whatever name.
#[test]
fn a_result_of_another_kind_is_not_published_over() {
    let project = Project::new();
    let stage = |kind: &str, file: &str| {
        let run = format!("echo '{{{{\"x\": 1}}}}' >$OUTPUT_o/{file}").replace("{{", "{").replace("}}", "}");
        format!("{{ uses: command, with: {{ run: {}, outputs: {{ o: {kind} }} }} }}", serde_json::Value::from(run))
    };
    for (name, kind, file) in [("a.yaml", "files", "x"), ("b.yaml", "metrics", "metrics.json")] {
        project
            .write(name, &format!("version: 1\nstages:\n  s: {}\npublish: {{ s: ./out/model }}\n", stage(kind, file)));
    }
    project.run(&["--home", "one", "run", "a.yaml"]).ends_with(0);
    project.run(&["--home", "two", "run", "b.yaml"]).ends_with(2).warns("holds a published files");
    project.run(&["--home", "two", "validate", "b.yaml"]).ends_with(0).warns("is taken");
    assert!(project.path("out/model/x").exists());
    project.run(&["--home", "two", "run", "b.yaml", "--overwrite"]).ends_with(0);
    assert!(project.path("out/model/metrics.json").exists());
}

#[test]
fn homes_that_publish_to_one_folder_at_once_do_it_in_turn() {
    let project = Project::new();
    let run = "for i in $(seq 200); do echo $i >$OUTPUT_o/$i; done";
    let stage = format!("{{ uses: command, with: {{ run: '{run}', outputs: {{ o: files }} }} }}");
    project.write("p.yaml", &format!("version: 1\nstages:\n  s: {stage}\npublish: {{ s: ./out/model }}\n"));
    let homes = ["one", "two", "three", "four"];
    let runs: Vec<_> =
        homes.map(|home| project.command(&["--home", home, "run", "p.yaml", "-q"]).spawn().unwrap()).into();
    for mut run in runs {
        assert!(run.wait().unwrap().success());
    }
    let left: Vec<_> =
        std::fs::read_dir(project.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["model"]);
    project.run(&["--home", "one", "run", "p.yaml"]).ends_with(0).warns("nothing to do");
}

#[test]
fn nothing_that_a_run_needs_is_published_over() {
    let project = Project::new();
    project.write("sharing.yaml", SHARING);
    fs::create_dir(project.path("data")).unwrap();
    project.write("data/precious", "precious");
    let stage = "  reads: { uses: download, with: { path: ./data, as: files } }\npublish:";
    project.edit("sharing.yaml", "publish:", stage);
    let absolute = project.path("").display().to_string();
    let home = project.path("elsewhere").display().to_string();
    for target in [absolute.as_str(), "./.pipeline", "./data", "./data/../data/new", &home] {
        let changed = format!("publish.left={target}");
        let run = ["run", "sharing.yaml", &changed, "--overwrite"];
        let ran = match target == home {
            true => project.run(&[&run[..], &["--home", "elsewhere"]].concat()),
            false => project.run(&run),
        };
        ran.ends_with(2).reports("unsafe-target");
    }
    project.edit("sharing.yaml", "./out/left", &absolute);
    project.run(&["validate", "sharing.yaml"]).ends_with(2).reports("unsafe-target");
    project.run(&["plan", "sharing.yaml"]).ends_with(2).reports("unsafe-target");
    assert_eq!(fs::read_to_string(project.path("data/precious")).unwrap(), "precious");
}
