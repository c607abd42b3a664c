//! Devices and the runs that share them, on a machine of four emulated GPUs: `nvidia-smi` is a script of these tests,
//! and the stages are commands that say which devices they had.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use test_harness::{Requirement, Unmet, test};

use crate::support::{Project, Ran, install_script};

const GPUS: u32 = 4;

/// A machine: what its tool says, and where its leases lie.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    /// Four GPUs of 80 GiB, joined two and two.
    fn new() -> Result<Self, Unmet> {
        no_driver()?;
        let machine = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(machine.path("bin")).unwrap();
        machine.tells(&[80_000; GPUS as usize]);
        Ok(machine)
    }

    fn path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    /// Makes its tool tell of so much free memory, in MiB, of each GPU.
    fn tells(&self, free: &[u32]) {
        let mut gpus = String::new();
        for (index, free) in free.iter().enumerate() {
            let used = 80_000 - free;
            writeln!(
                gpus,
                "{index}, GPU-{index}, Test, 00000000:{index}0:00.0, 80000, {used}, {free}, 70.00, 30, 580.0"
            )
            .unwrap();
        }
        let cell = |a: usize, b: usize| match (a == b, a / 2 == b / 2) {
            (true, _) => " X ",
            (false, true) => "NV18",
            (false, false) => "SYS",
        };
        let names: Vec<String> = (0..free.len()).map(|index| format!("GPU{index}")).collect();
        let mut matrix = format!("\t{}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n", names.join("\t"));
        for (a, name) in names.iter().enumerate() {
            let cells: Vec<&str> = (0..free.len()).map(|b| cell(a, b)).collect();
            writeln!(matrix, "{name}\t{}\tN/A\tN/A\t\tN/A", cells.join("\t")).unwrap();
        }
        let script = format!(
            "#!/bin/sh\ncase \"$1\" in\n--query-gpu*) cat <<'END'\n{gpus}END\n;;\ntopo) cat <<'END'\n{matrix}END\n;;\nesac\n"
        );
        // Put in place whole: a run may be asking.
        let (tool, new) = (self.path("bin/nvidia-smi"), self.path("new"));
        install_script(&script, &new);
        fs::rename(new, tool).unwrap();
    }

    /// A command on this machine.
    fn on(&self, mut command: Command) -> Command {
        let path = std::env::var("PATH").unwrap();
        let lists = [self.path("bin").display().to_string(), path];
        for name in ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"] {
            command.env_remove(name);
        }
        command.env("PATH", lists.join(":")).env("COLUMNS", "400").env("PIPELINE_LEASES", self.path("leases"));
        command
    }

    fn run(&self, project: &Project, arguments: &[&str]) -> Ran {
        Ran::of(self.on(project.command(arguments)), arguments)
    }

    fn start(&self, project: &Project, arguments: &[&str]) -> Child {
        use std::os::unix::process::CommandExt;
        use std::process::Stdio;
        let mut command = self.on(project.command(arguments));
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// Fails where a real driver would answer before the script does.
fn no_driver() -> Result<(), Unmet> {
    let folders =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib"];
    match folders.iter().find(|folder| Path::new(folder).join("libnvidia-ml.so.1").exists()) {
        Some(folder) => Err(Requirement::EmulatedGpus.unmet(format!("NVIDIA's library in {folder} would be asked"))),
        None => Ok(()),
    }
}

/// Lines that take each device that was given by making a folder of its number, which fails where somebody else has it.
fn use_devices(seconds: &str) -> String {
    format!(
        "[ \"$CUDA_DEVICE_ORDER\" = PCI_BUS_ID ]
echo \"$CUDA_VISIBLE_DEVICES\" >> \"$USED.log\"
devices=$(echo \"$CUDA_VISIBLE_DEVICES\" | tr , ' ')
for device in $devices; do mkdir \"$USED/$device\" || {{ echo \"device $device is in use\" >> \"$USED.log\"; exit 9; }}; done
sleep {seconds}
for device in $devices; do rmdir \"$USED/$device\"; done"
    )
}

/// A stage for each of these counts.
fn file(counts: &[&str], used: &Path, seconds: &str) -> String {
    let mut file = "version: 1\nname: devices\nstages:\n".to_owned();
    let script = use_devices(seconds).replace('\n', "\n        ");
    for (number, count) in counts.iter().enumerate() {
        write!(
            file,
            "  job{number}:\n    uses: command\n    with:\n      run: |\n        {script}\n      env: {{ USED: {}, JOB: \"{number}\" }}\n    resources: {{ device: cuda, count: {count} }}\n",
            used.display()
        )
        .unwrap();
    }
    file
}

fn project(machine: &Machine, counts: &[&str], seconds: &str) -> Project {
    let used = machine.path("used");
    fs::create_dir_all(&used).unwrap();
    let project = Project::new();
    project.write("file.yaml", &file(counts, &used, seconds));
    project
}

fn used(machine: &Machine) -> Vec<String> {
    fs::read_to_string(machine.path("used.log")).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn four_runs_of_eight_jobs_share_four_devices() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    let counts = ["1", "2", "1", "2", "2", "1", "1", "2"];
    let projects: Vec<Project> = (0..4).map(|_| project(&machine, &counts, "0.05")).collect();
    let runs: Vec<Child> =
        projects.iter().map(|project| machine.start(project, &["run", "file.yaml", "--threads", "8"])).collect();
    for run in runs {
        let ended = run.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    let used = used(&machine);
    assert_eq!(used.len(), 4 * counts.len(), "{used:?}");
    let known = ["0", "1", "2", "3", "0,1", "0,2", "0,3", "1,2", "1,3", "2,3"];
    assert!(used.iter().all(|devices| known.contains(&devices.as_str())), "{used:?}");
    assert_eq!(fs::read_dir(machine.path("used")).unwrap().count(), 0);
    Ok(())
}

#[test]
fn two_devices_with_the_fastest_link_are_taken() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    // The first is full of somebody else's data, and the link between the last two is fast.
    machine.tells(&[1000, 80_000, 80_000, 80_000]);
    let project = project(&machine, &["2"], "0");
    machine.run(&project, &["run", "file.yaml"]).ends_with(0);
    assert_eq!(used(&machine), ["2,3"]);
    Ok(())
}

#[test]
fn a_run_that_is_killed_holds_no_device() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    let holder = project(&machine, &["all"], "600");
    let mut held = machine.start(&holder, &["run", "file.yaml"]);
    wait_for(|| machine.path("used/3").is_dir());
    // What the one that is killed leaves is not in the way of the others.
    let waiting = Project::new();
    fs::create_dir(machine.path("later")).unwrap();
    waiting.write("file.yaml", &file(&["1"], &machine.path("later"), "0"));
    let waits = machine.start(&waiting, &["run", "file.yaml"]);
    thread::sleep(Duration::from_millis(500));
    held.kill().unwrap();
    held.wait().unwrap();
    // Its stage dies with it, and had no time to tidy up.
    wait_for(|| holder.processes().is_empty());
    let ended = waits.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("waiting for 1 device (cuda): 0 are free, `job0` of run "), "{said}");
    assert!(ended.status.success(), "{said}");
    let after = Project::new();
    after.write("file.yaml", &file(&["all"], &machine.path("later"), "0"));
    machine.run(&after, &["run", "file.yaml"]).ends_with(0);
    let used = fs::read_to_string(machine.path("later.log")).unwrap();
    assert_eq!(used.lines().last(), Some("0,1,2,3"));
    Ok(())
}

#[test]
fn what_this_machine_can_never_give_is_refused_at_once() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    let project = project(&machine, &["4"], "0");
    let run = |setting: &str| machine.run(&project, &["run", "file.yaml", setting]).ends_with(3);
    run("job0.resources.count=5").warns("stage `job0` requests 5 devices (cuda), and this machine has 4");
    run("job0.resources.device=npu").warns("stage `job0` requests an NPU (Ascend), and this machine has none");
    run("job0.resources.memory=79GiB")
        .warns("requests 4 devices (cuda) with 79.0 GiB of memory, and this machine has 0");
    run("job0.resources.nodes=2").warns("stage `job0` requests 2 nodes, and this machine is one");
    let mut limited = machine.on(project.command(&["run", "file.yaml"]));
    limited.env("CUDA_VISIBLE_DEVICES", "1,2");
    Ran::of(limited, &["run"]).ends_with(3).warns("`CUDA_VISIBLE_DEVICES` leaves 2 of 4 to this run");
    assert!(
        !project.path(".pipeline/runs").exists() || fs::read_dir(project.path(".pipeline/runs")).unwrap().count() == 0
    );
    assert!(!machine.path("used.log").exists());
    // On the CPU it runs, and once it has its result it has it on every machine.
    project.write("cpu.yaml", "version: 1\nname: devices\nstages:\n  job: { uses: command, with: { run: [\"true\"] }, resources: { device: cuda } }\n");
    machine.run(&project, &["run", "cpu.yaml", "job.resources.device=cpu"]).ends_with(0);
    fs::remove_file(machine.path("bin/nvidia-smi")).unwrap();
    machine.run(&project, &["run", "cpu.yaml"]).ends_with(0);
    Ok(())
}

#[test]
fn a_device_that_others_fill_is_waited_for() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    machine.tells(&[1000; GPUS as usize]);
    let project = project(&machine, &["1"], "0");
    let run = machine.start(&project, &["run", "file.yaml", "job0.resources.memory=40GiB"]);
    thread::sleep(Duration::from_secs(1));
    assert!(!machine.path("used.log").exists());
    machine.tells(&[1000, 1000, 79_000, 1000]);
    let ended = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{said}");
    assert!(said.contains("waiting for 1 device (cuda) with 40.0 GiB of free memory: 0 have it"), "{said}");
    assert_eq!(used(&machine), ["2"]);
    Ok(())
}

#[test]
fn a_sweep_over_devices_is_a_measurement() -> Result<(), Unmet> {
    let machine = Machine::new()?;
    let project = project(&machine, &["1"], "0.1");
    let sweep = ["run", "file.yaml", "job0.resources.count=1,2,4"];
    machine.run(&project, &sweep).ends_with(0);
    let mut counts: Vec<usize> = used(&machine).iter().map(|devices| devices.split(',').count()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2, 4]);
    machine.run(&project, &sweep).ends_with(0).warns("nothing to do");
    let plot = ["runs", "compare", "job0", "--plot", "scaling.svg", "--format", "json"];
    let compared = project.run(&plot).ends_with(0).json();
    assert_eq!(compared["candidates"][0]["metrics"]["speed_up"], 1.0, "{compared:#}");
    assert!(compared["candidates"][2]["metrics"]["efficiency"].as_f64().unwrap() < 1.0, "{compared:#}");
    assert!(fs::read_to_string(project.path("scaling.svg")).unwrap().contains("speed-up"));
    Ok(())
}

fn wait_for(done: impl Fn() -> bool) {
    let since = Instant::now();
    while !done() {
        assert!(since.elapsed() < Duration::from_secs(60), "nothing has come of it in a minute");
        thread::sleep(Duration::from_millis(20));
    }
}
