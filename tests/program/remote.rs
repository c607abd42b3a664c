//! The shared cache: a second machine, what is fetched and what is not, damage, kill -9, and a server that is not
//! there.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use test_harness::{Unmet, test};

use crate::s3::{ACCOUNT, S3};
use crate::support::{Project, Ran, install, needs_root};

/// Where the tests share.
const REMOTE: &str = "s3://bucket/team";

/// The id of a user without rights.
const NOBODY: u32 = 65534;

/// A machine of its own: a project with the pipeline of these tests, and no home yet.
struct Machine<'a> {
    project: Project,
    server: &'a S3,
}

impl<'a> Machine<'a> {
    fn new(server: &'a S3) -> Self {
        Self { project: Project::with_pipeline("data.yaml"), server }
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = self.project.command(arguments);
        command.envs(ACCOUNT).env("AWS_ENDPOINT_URL", self.server.endpoint());
        for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "PIPELINE_REMOTE"] {
            command.env_remove(name);
        }
        command
    }

    fn pipeline(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments), arguments)
    }

    /// Runs the pipeline, shared.
    fn run(&self, arguments: &[&str]) -> Ran {
        let all = [&["run", "data.yaml", "--remote", REMOTE, "--format", "json"], arguments].concat();
        self.pipeline(&all)
    }

    fn start(&self, arguments: &[&str]) -> Child {
        let all = [&["run", "data.yaml", "--remote", REMOTE], arguments].concat();
        self.command(&all).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    fn has_record_of_every_stage(&self) -> bool {
        self.server.names().iter().filter(|name| name.starts_with("team/results/")).count() == 7
    }

    fn objects_here(&self) -> usize {
        let objects = self.project.path(".pipeline/store/objects");
        fs::read_dir(objects).unwrap().map(|shard| fs::read_dir(shard.unwrap().path()).unwrap().count()).sum()
    }
}

/// The digests of the outputs, and the stages that a process was started for.
fn outcome(ran: &Ran) -> (BTreeMap<String, serde_json::Value>, Vec<String>) {
    let result = ran.json();
    let stages = result["stages"].as_array().unwrap();
    let name = |stage: &serde_json::Value| stage["stage"].as_str().unwrap().to_owned();
    let digests = stages.iter().map(|stage| (name(stage), stage["outputs"].clone())).collect();
    let mut made: Vec<_> = stages.iter().filter(|stage| stage["state"] == "done").map(name).collect();
    made.sort();
    (digests, made)
}

#[test]
fn a_second_machine_has_the_same_outputs_from_the_remote_alone() {
    let server = S3::start();
    let first = Machine::new(&server);
    let ran = first.run(&["--push"]).ends_with(0).warns("sent ");
    let (digests, made) = outcome(&ran);
    assert_eq!(made.len(), 7);
    assert!(first.has_record_of_every_stage());

    let second = Machine::new(&server);
    second.pipeline(&["plan", "data.yaml"]).ends_with(0).says("7 of 7 stages will run");
    let ran =
        second.run(&["--offline", "--locked"]).ends_with(0).warns("fetched ").warns("nothing here has to read it");
    assert_eq!(outcome(&ran), (digests.clone(), Vec::new()));
    second.pipeline(&["cache", "verify"]).ends_with(0);
    assert!(second.objects_here() < first.objects_here(), "what nothing reads was fetched");

    // Once it is known what lies there, nobody is asked again, and the remote may be gone.
    let requests = server.requests();
    assert_eq!(outcome(&second.run(&[]).ends_with(0)), (digests.clone(), Vec::new()));
    assert_eq!(server.requests(), requests);
    let alone = second.pipeline(&["run", "data.yaml", "--no-remote", "--format", "json"]).ends_with(0);
    assert_eq!(outcome(&alone), (digests, Vec::new()));
}

#[test]
fn what_a_stage_that_runs_reads_is_fetched_and_nothing_else() {
    let server = S3::start();
    Machine::new(&server).run(&["--push"]).ends_with(0);
    let second = Machine::new(&server);
    let until = ["--until", "text_packs", "text_packs.max_seq_len=32"];
    let ran = second.run(&until).ends_with(0).warns("text_tokens: fetched ");
    assert_eq!(outcome(&ran).1, ["text_packs"]);
    assert!(!ran.stderr.contains("fresh: fetched"), "{ran}");
}

#[test]
fn what_is_damaged_there_is_refused_named_and_made_here() {
    let server = S3::start();
    let (digests, _) = outcome(&Machine::new(&server).run(&["--push"]).ends_with(0));
    let mut poisoned = 0;
    for name in server.names().iter().filter(|name| name.contains("/objects/")) {
        let mut bytes = fs::read(server.file(name)).unwrap();
        if bytes.starts_with(b"PAR1") {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            fs::write(server.file(name), bytes).unwrap();
            poisoned += 1;
        }
    }
    assert!(poisoned > 0);
    let second = Machine::new(&server);
    let ran =
        second.run(&["--push"]).ends_with(0).warns("does not have the digest in its name; the stage runs instead");
    let (again, made) = outcome(&ran);
    assert_eq!(again, digests);
    assert!(made.contains(&"text_packs".to_owned()), "{made:?}");
    second.pipeline(&["cache", "verify"]).ends_with(0);
}

#[test]
fn a_damaged_record_there_fails_a_pull_of_what_reads_it_alone() {
    let server = S3::start();
    let ran = Machine::new(&server).run(&["--push"]).ends_with(0).json();
    let fresh = ran["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == "fresh").unwrap();
    let record = server.file(&format!("team/results/{}.json", fresh["key"].as_str().unwrap()));
    let mut bytes = fs::read(&record).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(record, bytes).unwrap();
    let second = Machine::new(&server);
    let pull = |stage: &str| second.pipeline(&["cache", "pull", "data.yaml", stage, "--remote", REMOTE]);
    pull("text").ends_with(0);
    let refused = pull("text_packs").ends_with(1).to_string();
    assert!(refused.contains("fresh"), "{refused}");
}

#[test]
fn a_remote_that_is_not_there_costs_one_warning() {
    let server = S3::start();
    let machine = Machine::new(&server);
    let mut command = machine.command(&["run", "data.yaml", "--remote", REMOTE, "--push"]);
    command.env("AWS_ENDPOINT_URL", "http://127.0.0.1:9");
    let ran = Ran::of(command, &["run"]).ends_with(0).warns("done: 7 ran");
    assert_eq!(ran.stderr.matches("cannot be reached").count(), 1, "{ran}");
    // What could not be sent is sent by the next run that can.
    machine.run(&["--push"]).ends_with(0).warns("sent ");
    assert!(machine.has_record_of_every_stage());
}

#[test]
fn keys_are_refused_in_addresses_and_shown_nowhere() {
    let server = S3::start();
    let machine = Machine::new(&server);
    let ran = machine.pipeline(&["run", "data.yaml", "--remote", "s3://AKID:hunter2@bucket/x"]).ends_with(2);
    assert!(ran.stderr.contains("AWS_SECRET_ACCESS_KEY") && !ran.stderr.contains("hunter2"), "{ran}");
    machine.project.edit("data.yaml", "version: 1", "version: 1\nremote: { url: \"s3://bucket/x?sig=hunter2\" }");
    machine.pipeline(&["validate", "data.yaml"]).ends_with(2).reports("bad-remote");
    machine.project.edit("data.yaml", "s3://bucket/x?sig=hunter2", "s3://bucket/x");
    machine.pipeline(&["run", "data.yaml", "--push", "-v"]).ends_with(0);
    let mut waiting = vec![machine.project.path(".pipeline")];
    while let Some(path) = waiting.pop() {
        if path.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if let Ok(text) = fs::read_to_string(&path) {
            assert!(!text.contains("SECRET"), "{}", path.display());
        }
    }
}

#[test]
fn a_push_and_a_pull_killed_in_the_middle_are_taken_up() {
    let server = S3::start();
    let first = Machine::new(&server);
    first.run(&[]).ends_with(0);
    server.be_slow(40);
    fs::remove_dir_all(first.project.path(".pipeline/store/results")).unwrap();
    for round in 0..3 {
        let writes = server.writes();
        let mut pushing = first.start(&["--push"]);
        until(|| server.writes() > writes + round);
        pushing.kill().unwrap();
        pushing.wait().unwrap();
        nothing_dangles(&server);
    }
    server.be_slow(0);
    let (digests, _) = outcome(&first.run(&["--push"]).ends_with(0));
    assert!(first.has_record_of_every_stage());

    let second = Machine::new(&server);
    server.be_slow(40);
    for round in 0..4 {
        let requests = server.requests();
        let mut pulling = second.start(&[]);
        until(|| server.requests() > requests + 3 * round || pulling.try_wait().unwrap().is_some());
        pulling.kill().unwrap();
        pulling.wait().unwrap();
        if second.project.path(".pipeline/store").exists() {
            second.pipeline(&["cache", "verify"]).ends_with(0);
        }
    }
    server.be_slow(0);
    assert_eq!(outcome(&second.run(&[]).ends_with(0)), (digests, Vec::new()));
}

/// Every record in the remote names trees that are there, and those objects that are there.
fn nothing_dangles(server: &S3) {
    let names = server.names();
    let has = |folder: &str, digest: &str| names.contains(&format!("team/{folder}/{}/{}", &digest[..2], &digest[2..]));
    let json =
        |name: &str| -> serde_json::Value { serde_json::from_slice(&fs::read(server.file(name)).unwrap()).unwrap() };
    for record in names.iter().filter(|name| name.starts_with("team/results/")) {
        for (_, output) in json(record)["outputs"].as_object().unwrap() {
            let tree = output["tree"].as_str().unwrap();
            assert!(has("trees", tree), "{record}");
            for file in json(&format!("team/trees/{}/{}", &tree[..2], &tree[2..]))["files"].as_array().unwrap() {
                assert!(has("objects", file["digest"].as_str().unwrap()), "{record}");
            }
        }
    }
}

#[test]
fn two_machines_push_at_once() {
    let server = S3::start();
    let machines = [Machine::new(&server), Machine::new(&server)];
    let mut running = machines.each_ref().map(|machine| machine.start(&["--push"]));
    for child in &mut running {
        assert!(child.wait().unwrap().success());
    }
    nothing_dangles(&server);
    assert!(machines[0].has_record_of_every_stage());
    let third = Machine::new(&server);
    assert_eq!(outcome(&third.run(&[]).ends_with(0)).1, [""; 0]);
    third.pipeline(&["cache", "verify"]).ends_with(0);
}

#[test]
fn a_folder_is_a_remote_too() {
    let server = S3::start();
    let (first, second) = (Machine::new(&server), Machine::new(&server));
    let shared = tempfile::tempdir().unwrap();
    let remote = format!("file://{}", shared.path().display());
    let run = |machine: &Machine<'_>, more: &[&str]| {
        let all = [&["run", "data.yaml", "--remote", &remote, "--format", "json"], more].concat();
        outcome(&machine.pipeline(&all).ends_with(0))
    };
    let (digests, _) = run(&first, &["--push"]);
    assert_eq!(run(&second, &[]), (digests, Vec::new()));
    assert_eq!(server.requests(), 0);
}

#[track_caller]
fn until(mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(60), "it does not come to this");
        sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_damaged_record_in_the_remote_is_named() {
    let project = Project::new();
    fs::create_dir(project.path("shared")).unwrap();
    let with = "with: { run: 'echo \"{\\\"acc\\\": 0.5}\" >\"$OUTPUT_o/metrics.json\"', outputs: { o: metrics } }";
    project.write("p.yaml", &format!("version: 1\nname: p\nstages:\n  a:\n    uses: command\n    {with}\n"));
    project.run(&["run", "p.yaml", "--remote", "./shared", "--push"]).ends_with(0);
    let records = || fs::read_dir(project.path("shared/results")).unwrap().map(|entry| entry.unwrap().path());
    let flip = || {
        let record = records().next().unwrap();
        let text = fs::read_to_string(&record).unwrap();
        assert!(text.contains("0.5"), "{text}");
        fs::write(&record, text.replace("0.5", "0.7")).unwrap();
    };
    flip();
    let elsewhere = |arguments: &[&str]| {
        let home = project.path("home2");
        project.run(&[arguments, &["--remote", "./shared", "--home", home.to_str().unwrap()]].concat())
    };
    elsewhere(&["cache", "pull", "p.yaml"]).ends_with(1).says("a: failed").warns("it is damaged");
    elsewhere(&["run", "p.yaml", "--format", "json"]).ends_with(0).made(1).warns("it is damaged");
    // Who has the result puts it right.
    project.run(&["cache", "push", "p.yaml", "--verify", "--remote", "./shared"]).ends_with(0).says("a: repaired");
    fs::remove_dir_all(project.path("home2")).unwrap();
    elsewhere(&["cache", "pull", "p.yaml"]).ends_with(0).says("a: fetched");
}

/// The folder is another user's, who lets read it, but for a file or as a whole.
#[test]
fn a_file_that_may_not_be_read_fails_one_result_and_a_folder_that_may_not_be_entered_all() -> Result<(), Unmet> {
    needs_root()?;
    let project = Project::with_pipeline("data.yaml");
    fs::create_dir(project.path("shared")).unwrap();
    let made = project.run(&["run", "data.yaml", "--remote", "./shared", "--push", "--format", "json"]).ends_with(0);
    fs::remove_dir_all(project.path(".pipeline")).unwrap();
    let may = |mode: u32, path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let readable = Command::new("chmod").args(["-R", "a+rX"]).arg(project.path("shared")).status().unwrap();
    assert!(readable.success());
    let program = project.path("program");
    install(env!("CARGO_BIN_EXE_pipeline"), &program);
    chown(project.path(""), Some(NOBODY), Some(NOBODY)).unwrap();
    let as_another = |arguments: &[&str]| {
        let all = [arguments, &["data.yaml", "--remote", "./shared", "--format", "json"]].concat();
        let mut command = Command::new(&program);
        command.args(&all).current_dir(project.path("")).env_remove("PIPELINE_HOME");
        command.env("HOME", project.path("")).uid(NOBODY).gid(NOBODY);
        Ran::of(command, &all)
    };

    // The packs, in one result that is neither the first nor the last.
    const HIDDEN: &str = "text_packs";
    let stages = made.json()["stages"].clone();
    let stage = stages.as_array().unwrap().iter().find(|stage| stage["stage"] == HIDDEN).unwrap();
    let json = |path: String| -> serde_json::Value {
        serde_json::from_slice(&fs::read(project.path(&path)).unwrap()).unwrap()
    };
    let record = json(format!("shared/results/{}.json", stage["key"].as_str().unwrap()));
    let tree = record["outputs"].as_object().unwrap().values().next().unwrap()["tree"].as_str().unwrap().to_owned();
    let tree = json(format!("shared/trees/{}/{}", &tree[..2], &tree[2..]));
    let largest = tree["files"].as_array().unwrap().iter().max_by_key(|file| file["size"].as_u64()).unwrap();
    let digest = largest["digest"].as_str().unwrap();
    let hidden = project.path(&format!("shared/objects/{}/{}", &digest[..2], &digest[2..]));
    may(0o600, &hidden);
    let pulled = as_another(&["cache", "pull"]).ends_with(1);
    for result in pulled.json()["results"].as_array().unwrap() {
        let error = result["error"].as_str().unwrap_or_default();
        let (what, may_be_read) = (result["what"].as_str().unwrap(), result["name"] != HIDDEN);
        assert_eq!(what, if may_be_read { "fetched" } else { "failed" }, "{pulled}");
        assert_eq!(error.contains(" cannot be read: Permission denied"), !may_be_read, "{pulled}");
        assert!(!error.contains("written"), "{pulled}");
    }
    assert_eq!(pulled.json()["results"].as_array().unwrap().len(), 7, "{pulled}");
    // A run makes that one itself, and fetches the others all the same.
    fs::remove_dir_all(project.path(".pipeline")).unwrap();
    as_another(&["run"]).ends_with(0).made(1).warns("the stage runs instead");

    may(0o644, &hidden);
    may(0o700, &project.path("shared"));
    let refused = as_another(&["cache", "pull"]).ends_with(3);
    let told = refused.stderr.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(told.contains(" cannot be read: Permission denied"), "{refused}");
    assert!(!told.contains("does not exist") && !told.contains("make the bucket"), "{refused}");
    may(0o755, &project.path("shared"));
    as_another(&["cache", "pull"]).ends_with(0);
    Ok(())
}
