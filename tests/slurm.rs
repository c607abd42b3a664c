//! Runs on a real Slurm: whole ones, ones whose engine dies, and everything that a cluster does to jobs. Without Slurm
//! they are ignored, and say so.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/slurm.rs"]
mod slurm;
mod support;

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use slurm::{Cluster, Shape};
use support::{Project, Ran};
use test_harness::{Unmet, test};

test_harness::main!();

/// Ask the queue every second: tests are in more of a hurry than sites are.
const POLL: &str = "executor.slurm.poll=1s";

const LONG: Duration = Duration::from_secs(90);

/// A project whose runs submit to a cluster.
struct Submits<'a> {
    project: &'a Project,
    cluster: &'a Cluster,
}

impl Submits<'_> {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.project.command(arguments);
        command.env("SLURM_CONF", self.cluster.configuration());
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments), arguments)
    }

    fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// A run to its end on the cluster.
    fn submit(&self, file: &str, more: &[&str]) -> Ran {
        self.run(&[&["run", file, "--executor", "slurm", POLL][..], more].concat())
    }

    fn start_submitting(&self, file: &str, more: &[&str]) -> Child {
        self.start(&[&["run", file, "--executor", "slurm", POLL][..], more].concat())
    }
}

/// A pipeline of one stage that runs lines of shell.
fn shell(lines: &str, keys: &str) -> Project {
    let project = Project::new();
    let lines = lines.replace('\n', "\n        ");
    project.write(
        "one.yaml",
        &format!(
            "version: 1\nstages:\n  one:\n    uses: command\n    with:\n      run: |\n        {lines}\n      \
             outputs: {{ made: files }}\n{keys}"
        ),
    );
    project
}

fn with_cluster(shape: Shape, project: Project, test: impl FnOnce(&mut Cluster, &Project)) -> Result<(), Unmet> {
    test(&mut Cluster::start(shape)?, &project);
    Ok(())
}

fn stderr_of(child: Child) -> (Option<i32>, String) {
    let ended = child.wait_with_output().unwrap();
    (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
}

/// The identity of each output of the last run, as the store records it.
fn results(project: &Project) -> Vec<String> {
    let mut found: Vec<String> = fs::read_dir(project.path(".pipeline/store/results"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            let record: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let outputs = record["outputs"].as_object().unwrap();
            let identities: Vec<&str> = outputs.values().map(|output| output["identity"].as_str().unwrap()).collect();
            format!("{} {}", path.file_name().unwrap().display(), identities.join(" "))
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_whole_run_gives_what_it_gives_here_and_is_cached_like_it() -> Result<(), Unmet> {
    with_cluster(Shape::default(), Project::with_pipeline("train.yaml"), |cluster, project| {
        let on = Submits { project, cluster };
        on.submit("train.yaml", &[]).ends_with(0).warns("Slurm job");
        assert_eq!(cluster.jobs().len(), 8, "{:?}", cluster.jobs());
        assert!(project.path("out/model/model.safetensors").exists());
        assert_eq!(fs::read_dir(project.path(".pipeline/jobs")).unwrap().count(), 0, "a record of a job was left");
        on.submit("train.yaml", &["--format", "json"]).ends_with(0).made(0);
        on.run(&["run", "train.yaml", "--format", "json"]).ends_with(0).made(0);
        let shown = on.run(&["runs", "show", "@2", "--format", "json"]);
        let peak = shown.stdout.matches("\"peak_memory_bytes\": 0").count();
        assert_eq!(peak, 0, "{shown}");
        let here = Project::with_pipeline("train.yaml");
        here.run(&["run", "train.yaml"]).ends_with(0);
        assert_eq!(results(project), results(&here));
    })
}

#[test]
fn a_job_outlives_its_engine_and_the_next_run_takes_it_over() -> Result<(), Unmet> {
    let lines = "for i in $(seq 40); do echo line $i; sleep 0.2; done\necho all > \"${outputs.made}/it\"";
    with_cluster(Shape::default(), shell(lines, ""), |cluster, project| {
        let on = Submits { project, cluster };
        let mut engine = on.start_submitting("one.yaml", &[]);
        let id = cluster.wait_for_job("-one", "RUNNING");
        engine.kill().unwrap();
        engine.wait().unwrap();
        let second = on.submit("one.yaml", &[]).ends_with(0);
        assert!(second.stderr.contains(&format!("Slurm job {id} of an earlier run continues")), "{second}");
        assert_eq!(cluster.jobs_of("-one").len(), 1, "{:?}", cluster.jobs());
        let log = on.run(&["logs", "one"]).ends_with(0);
        assert!(log.stdout.contains("line 1\n") && log.stdout.contains("line 40\n"), "the log is not whole: {log}");
        on.submit("one.yaml", &["--format", "json"]).ends_with(0).made(0);
    })
}

#[test]
fn a_job_that_ends_while_nobody_looks_leaves_its_result() -> Result<(), Unmet> {
    with_cluster(Shape::default(), shell("sleep 3\necho all > \"${outputs.made}/it\"", ""), |cluster, project| {
        let on = Submits { project, cluster };
        let mut engine = on.start_submitting("one.yaml", &[]);
        cluster.wait_for_job("-one", "RUNNING");
        engine.kill().unwrap();
        engine.wait().unwrap();
        cluster.wait_for_job("-one", "COMPLETED");
        // Not even a cluster is needed any more.
        project.run(&["run", "one.yaml", "--format", "json"]).ends_with(0).made(0);
        assert_eq!(cluster.jobs_of("-one").len(), 1);
    })
}

#[test]
fn two_engines_submit_one_job() -> Result<(), Unmet> {
    with_cluster(Shape::default(), shell("sleep 4\necho all > \"${outputs.made}/it\"", ""), |cluster, project| {
        let on = Submits { project, cluster };
        let first = on.start_submitting("one.yaml", &[]);
        cluster.wait_for_job("-one", "RUNNING");
        on.submit("one.yaml", &[]).ends_with(0).warns("another run is making this result");
        // Long enough for the queue, asked every second, to have said where.
        let (code, said) = stderr_of(first);
        assert!(code == Some(0) && said.contains("runs on n"), "{said}");
        assert_eq!(cluster.jobs_of("-one").len(), 1);
    })
}

#[test]
fn an_interrupt_lets_the_job_save_and_a_second_one_ends_it() -> Result<(), Unmet> {
    with_cluster(Shape::default(), Project::with_pipeline("train.yaml"), |cluster, project| {
        let on = Submits { project, cluster };
        let engine = on.start_submitting("train.yaml", &["adapter.epochs=4000", "adapter.save_every=100000"]);
        cluster.wait_for_job("-adapter", "RUNNING");
        std::thread::sleep(Duration::from_secs(2));
        kill(Pid::from_raw(engine.id() as i32), Signal::SIGINT).unwrap();
        let (code, said) = stderr_of(engine);
        assert_eq!(code, Some(130), "{said}");
        let partial = project.path(".pipeline/store/partial");
        let saved = fs::read_dir(partial).unwrap().any(|key| fs::read_dir(key.unwrap().path()).unwrap().count() > 0);
        assert!(saved, "nothing was saved\n{said}");
        cluster.wait_for("the job to end", LONG, || {
            cluster.jobs_of("-adapter").iter().all(|(_, state)| state != "RUNNING")
        });
    })?;
    with_cluster(Shape::default(), shell("trap '' TERM\nwhile :; do sleep 1; done", ""), |cluster, project| {
        let on = Submits { project, cluster };
        let engine = on.start_submitting("one.yaml", &["--grace", "60s"]);
        cluster.wait_for_job("-one", "RUNNING");
        kill(Pid::from_raw(engine.id() as i32), Signal::SIGINT).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        kill(Pid::from_raw(engine.id() as i32), Signal::SIGINT).unwrap();
        assert_eq!(stderr_of(engine).0, Some(130));
        cluster
            .wait_for("the job to end", LONG, || cluster.jobs_of("-one").iter().all(|(_, state)| state != "RUNNING"));
    })
}

#[test]
fn a_job_that_somebody_cancels_says_so() -> Result<(), Unmet> {
    with_cluster(Shape::default(), shell("sleep 600", ""), |cluster, project| {
        let on = Submits { project, cluster };
        let engine = on.start_submitting("one.yaml", &[]);
        let id = cluster.wait_for_job("-one", "RUNNING");
        std::thread::sleep(Duration::from_secs(1));
        cluster.ask("scancel", &[&id]);
        let (code, said) = stderr_of(engine);
        assert!(said.contains(&format!("job {id} was cancelled from outside")), "{code:?} {said}");
        assert_eq!(code, Some(130), "{said}");
    })
}

#[test]
fn a_job_at_the_end_of_its_time_says_so_and_is_tried_again_where_that_is_asked() -> Result<(), Unmet> {
    let keys = "    retries: { max: 1, delay: 1s, on: [timeout] }\n";
    let lines = "if [ -e \"$PIPELINE_WORKING/half\" ]; then echo all > \"${outputs.made}/it\"; exit 0; fi\n\
        touch \"$PIPELINE_WORKING/half\"\nsleep 600";
    with_cluster(Shape::default(), shell(lines, keys), |cluster, project| {
        let on = Submits { project, cluster };
        let ran = on.submit("one.yaml", &["executor.slurm.time=1m"]).ends_with(0);
        assert!(ran.stderr.contains("was at the end of its time limit of 1 min"), "{ran}");
        assert_eq!(cluster.jobs_of("-one-2").len(), 1, "{:?}", cluster.jobs());
    })
}

#[test]
fn a_stages_own_timeout_counts_from_when_it_runs() -> Result<(), Unmet> {
    with_cluster(Shape::default(), shell("sleep 600", "    timeout: 2s\n"), |cluster, project| {
        let on = Submits { project, cluster };
        on.submit("one.yaml", &["--grace", "2s"]).ends_with(1).warns("it took longer than its timeout of 2s");
    })
}

#[test]
fn a_controller_that_is_down_ends_no_run() -> Result<(), Unmet> {
    with_cluster(Shape::default(), shell("sleep 6\necho all > \"${outputs.made}/it\"", ""), |cluster, project| {
        let on = Submits { project, cluster };
        let engine = on.start_submitting("one.yaml", &[]);
        cluster.wait_for_job("-one", "RUNNING");
        // What happened within seconds before a crash of the controller may not be on its disk yet.
        std::thread::sleep(Duration::from_secs(6));
        cluster.stop_controller();
        let (code, said) = stderr_of(engine);
        assert_eq!(code, Some(0), "the job's own word is enough: {said}");
        project.edit("one.yaml", "sleep 6", "sleep 1");
        let on = Submits { project, cluster };
        let engine = on.start_submitting("one.yaml", &[]);
        // Long enough for `sbatch` to give up once; how long that is, is its own affair.
        std::thread::sleep(Duration::from_secs(10));
        cluster.start_controller();
        let (code, said) = stderr_of(engine);
        assert_eq!(code, Some(0), "{said}");
    })
}

#[test]
fn a_job_on_a_node_that_is_lost_goes_on_elsewhere() -> Result<(), Unmet> {
    let shape = Shape { lost_after: 6, ..Shape::default() };
    let lines = "if [ -e \"$PIPELINE_WORKING/half\" ]; then echo all > \"${outputs.made}/it\"; exit 0; fi\n\
        touch \"$PIPELINE_WORKING/half\"\nsleep 600";
    with_cluster(shape, shell(lines, ""), |cluster, project| {
        let on = Submits { project, cluster };
        let engine = on.start_submitting("one.yaml", &[]);
        let id = cluster.wait_for_job("-one", "RUNNING");
        cluster.wait_for("the stage to begin", LONG, || {
            let partial = fs::read_dir(project.path(".pipeline/store/partial"));
            partial.is_ok_and(|mut keys| keys.any(|key| key.unwrap().path().join("half").exists()))
        });
        let node = cluster.ask("squeue", &["--noheader", "--jobs", &id, "--format=%N"]);
        cluster.lose_node(if node.trim() == "n1" { 0 } else { 1 });
        let (code, said) = stderr_of(engine);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("was put back into the queue"), "{said}");
        assert_eq!(cluster.jobs_of("-one").len(), 1, "it is the same job");
    })
}

#[test]
fn what_could_never_run_is_said_at_once() -> Result<(), Unmet> {
    with_cluster(Shape::default(), shell("true", ""), |cluster, project| {
        let on = Submits { project, cluster };
        on.submit("one.yaml", &["executor.slurm.nodes=3"]).ends_with(3).warns("it requests more nodes");
        assert!(cluster.jobs().iter().all(|(_, _, state)| state != "PENDING"), "{:?}", cluster.jobs());
        on.submit("one.yaml", &["executor.slurm.partition=mian"]).ends_with(2).warns("this cluster has main");
        on.submit("one.yaml", &["executor.slurm.gres=gpu:9"])
            .ends_with(2)
            .warns("Requested node configuration is not available");
    })
}

#[test]
fn each_job_has_its_own_devices() -> Result<(), Unmet> {
    let project = Project::new();
    let stage = |name: &str| {
        format!(
            "  {name}:\n    uses: command\n    with:\n      run: 'echo \"$CUDA_VISIBLE_DEVICES $SLURM_JOB_ID $PIPELINE_THREADS\" > \
             \"${{outputs.made}}/it\"; sleep 4'\n      env: {{ NAME: {name} }}\n      outputs: {{ made: files }}\n    \
             executor: {{ slurm: {{ gres: 'gpu:fake:1', cpus_per_task: 2, nodes: 1, options: [--nodelist=n1] }} }}\n"
        )
    };
    let npu = "  three:\n    uses: command\n    with: { run: 'echo \"$ASCEND_RT_VISIBLE_DEVICES\" > \"${outputs.made}/it\"', outputs: { made: files } }\n    \
               resources: { device: npu, count: 2 }\n    executor: { slurm: { gres: 'gpu:fake' } }\n";
    let publish = "publish: { one: ./out/one, two: ./out/two, three: ./out/three }\n";
    project.write("two.yaml", &format!("version: 1\nstages:\n{}{}{npu}{publish}", stage("one"), stage("two")));
    with_cluster(Shape::default(), project, |cluster, project| {
        let on = Submits { project, cluster };
        on.run(&["run", "two.yaml", POLL]).ends_with(0);
        let of = |name: &str| fs::read_to_string(project.path(&format!("out/{name}/it"))).unwrap();
        let words: Vec<Vec<String>> =
            ["one", "two"].map(|name| of(name).split_whitespace().map(str::to_owned).collect()).to_vec();
        let mut devices = [words[0][0].as_str(), words[1][0].as_str()];
        devices.sort_unstable();
        assert_eq!(devices, ["0", "1"], "{words:?}");
        assert_ne!(words[0][1], words[1][1]);
        assert_eq!(of("three").trim(), "0,1", "Ascend's runtime is told what Slurm tells CUDA");
        assert_eq!((words[0][2].as_str(), words[1][2].as_str()), ("2", "2"));
    })
}

#[test]
fn a_stage_may_stay_here() -> Result<(), Unmet> {
    let project = Project::with_pipeline("data.yaml");
    project.edit("data.yaml", "  text:\n    uses: dataset\n", "  text:\n    executor: local\n    uses: dataset\n");
    with_cluster(Shape::default(), project, |cluster, project| {
        let on = Submits { project, cluster };
        on.submit("data.yaml", &["--until", "fresh"]).ends_with(0);
        assert_eq!((cluster.jobs_of("-text").len(), cluster.jobs_of("-fresh").len()), (0, 1), "{:?}", cluster.jobs());
    })
}

#[test]
fn without_slurm_it_says_what_is_missing() {
    let project = Project::with_pipeline("data.yaml");
    let mut command = project.command(&["run", "data.yaml", "--executor", "slurm"]);
    command.env("PATH", "/nowhere");
    Ran::of(command, &[]).ends_with(3).warns("`sbatch` is not on the PATH");
}
