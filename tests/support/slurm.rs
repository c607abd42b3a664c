//! A throw-away Slurm cluster on this machine: emulated nodes with emulated GPUs, in a folder of its own, on ports of
//! its own.
//!
//! Needs the daemons and no more, neither systemd nor munge nor root: `apt-get install -y --no-install-recommends
//! slurmctld slurmd slurm-client`. Everyone on this machine could submit to it (`auth/none`), so it listens on the
//! loopback alone and goes with the test.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part of this; tests may unwrap")]

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use test_harness::{Requirement, Unmet};

/// What a cluster has.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub nodes: usize,
    /// CPUs of each node, whatever the machine has.
    pub cpus: usize,
    pub memory_mb: usize,
    /// GPUs of each node: links to `/dev/null`, which jobs are given shares of.
    pub gpus: usize,
    /// NPUs of each node: a number alone.
    pub npus: usize,
    /// Seconds until a node that is silent counts as lost.
    pub lost_after: u32,
    /// Seconds for which a job that is over is remembered.
    pub remembers: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self { nodes: 2, cpus: 4, memory_mb: 4096, gpus: 2, npus: 0, lost_after: 60, remembers: 300 }
    }
}

/// A running cluster. Dropping it ends its jobs and its daemons.
pub(crate) struct Cluster {
    folder: tempfile::TempDir,
    shape: Shape,
    controller: Option<Child>,
    nodes: Vec<Option<Child>>,
}

/// What brings Slurm.
pub(crate) const INSTALL: &str = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client";

/// How long the nodes may take to come up on a busy machine.
const BOOT: Duration = Duration::from_secs(60);

impl Cluster {
    /// Fails where Slurm is not installed.
    pub(crate) fn start(shape: Shape) -> Result<Self, Unmet> {
        let missing = ["slurmctld", "slurmd", "sbatch", "squeue"].into_iter().find(|program| find(program).is_none());
        if let Some(program) = missing {
            return Err(Requirement::Slurm.unmet(format!("`{program}` is missing: {INSTALL}")));
        }
        let folder = tempfile::tempdir().unwrap();
        let ports = free_ports(shape.nodes + 1);
        configure(folder.path(), &shape, &ports);
        let nodes = (0..shape.nodes).map(|_| None).collect();
        let mut cluster = Self { folder, shape, controller: None, nodes };
        cluster.start_controller();
        (0..cluster.shape.nodes).for_each(|node| cluster.start_node(node));
        cluster.wait_for("the nodes to come up", BOOT, || cluster.idle_nodes() == cluster.shape.nodes);
        Ok(cluster)
    }

    /// The file that says to Slurm's commands which cluster is meant.
    pub(crate) fn configuration(&self) -> PathBuf {
        self.folder.path().join("slurm.conf")
    }

    /// One of Slurm's commands, to its end; what it printed.
    pub(crate) fn ask(&self, program: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(find(program).unwrap());
        let output = command.args(arguments).env("SLURM_CONF", self.configuration()).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The jobs that the controller knows: number, name, state.
    pub(crate) fn jobs(&self) -> Vec<(String, String, String)> {
        let said = self.ask("squeue", &["--noheader", "--states=all", "--format=%i|%j|%T"]);
        let jobs = said.lines().filter_map(|line| {
            let mut fields = line.split('|').map(str::to_owned);
            Some((fields.next()?, fields.next()?, fields.next()?))
        });
        jobs.collect()
    }

    /// The jobs whose name ends in these words.
    pub(crate) fn jobs_of(&self, stage: &str) -> Vec<(String, String)> {
        let jobs = self.jobs().into_iter().filter(|(_, name, _)| name.ends_with(stage));
        jobs.map(|(id, _, state)| (id, state)).collect()
    }

    /// Waits until a job of a stage is in a state; its number.
    #[track_caller]
    pub(crate) fn wait_for_job(&self, stage: &str, state: &str) -> String {
        let found = || self.jobs_of(stage).into_iter().find(|(_, now)| now == state).map(|(id, _)| id);
        self.wait_for(&format!("a job of `{stage}` to be {state}"), Duration::from_secs(60), || found().is_some());
        found().unwrap_or_default()
    }

    /// Ends the controller, as a crash of its machine does.
    pub(crate) fn stop_controller(&mut self) {
        if let Some(mut controller) = self.controller.take() {
            let _ = controller.kill();
            let _ = controller.wait();
        }
    }

    /// Starts the controller with what the one before it had saved.
    pub(crate) fn start_controller(&mut self) {
        self.controller = Some(self.daemon("slurmctld", &[]));
    }

    /// Ends a node with everything that runs on it, as a power cut does. Nothing may run elsewhere: what supervises a
    /// job does not say on which node it does.
    pub(crate) fn lose_node(&mut self, node: usize) {
        if let Some(mut daemon) = self.nodes[node].take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        // Those that supervise go first: they would tell the controller what became of the job.
        let (supervisors, others): (Vec<_>, Vec<_>) =
            self.processes().into_iter().partition(|process| process.is_supervisor);
        supervisors.iter().chain(&others).for_each(|process| kill(process.id));
    }

    fn start_node(&mut self, node: usize) {
        self.nodes[node] = Some(self.daemon("slurmd", &["-N", &name(node)]));
    }

    fn daemon(&self, program: &str, arguments: &[&str]) -> Child {
        let log = fs::File::options().create(true).append(true).open(self.folder.path().join("daemons.log")).unwrap();
        Command::new(find(program).unwrap())
            .args(["-D", "-f"])
            .arg(self.configuration())
            .args(arguments)
            .env("SLURM_CONF", self.configuration())
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap()
    }

    fn idle_nodes(&self) -> usize {
        self.ask("sinfo", &["--noheader", "--Node", "--format=%t"]).lines().filter(|state| *state == "idle").count()
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, what: &str, at_most: Duration, mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < at_most, "waited in vain for {what}\n{}", self.told());
            sleep(Duration::from_millis(100));
        }
    }

    /// What a person would look at.
    fn told(&self) -> String {
        let jobs = self.ask("squeue", &["--states=all", "--format=%i %j %T %r %N"]);
        let log = fs::read_to_string(self.folder.path().join("slurmctld.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        format!("{}{jobs}{}", self.ask("sinfo", &["-N", "-l"]), lines[lines.len().saturating_sub(20)..].join("\n"))
    }

    /// The processes of this cluster's jobs, and what supervises them.
    fn processes(&self) -> Vec<Process> {
        let ours = format!("SLURM_CONF={}", self.configuration().display());
        let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let path = entry.ok()?.path();
            let id = path.file_name()?.to_str()?.parse().ok()?;
            let environment = fs::read(path.join("environ")).ok()?;
            let environment: Vec<String> =
                environment.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
            if !environment.contains(&ours) {
                return None;
            }
            let value = |name: &str| environment.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            let command = fs::read_to_string(path.join("cmdline")).unwrap_or_default().replace('\0', " ");
            let is_supervisor = command.starts_with("slurmstepd");
            // A supervisor has the environment of its daemon, and an engine that submits is in no job.
            let is_of_a_job = value("SLURM_JOB_ID").is_some();
            (is_supervisor || is_of_a_job).then_some(Process { id, is_supervisor })
        });
        processes.collect()
    }
}

struct Process {
    id: i32,
    is_supervisor: bool,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.controller.is_some() {
            self.ask("scancel", &["--full", "--signal=KILL", "--state=RUNNING"]);
            self.ask("scancel", &["--state=PENDING"]);
        }
        for daemon in self.nodes.iter_mut().chain([&mut self.controller]).flatten() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for process in self.processes() {
            kill(process.id);
        }
    }
}

fn name(node: usize) -> String {
    format!("n{}", node + 1)
}

fn kill(process: i32) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(process), nix::sys::signal::Signal::SIGKILL);
}

/// Where a program is: the daemons lie where an ordinary user's PATH does not lead.
fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(["/usr/sbin", "/usr/local/sbin"]).map(PathBuf::from);
    folders.map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Ports that nobody has at this moment.
fn free_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<TcpListener> = (0..count).map(|_| TcpListener::bind(("127.0.0.1", 0)).unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

fn configure(folder: &Path, shape: &Shape, ports: &[u16]) {
    let Shape { nodes, cpus, memory_mb, gpus, npus, lost_after, remembers } = shape;
    let here = folder.display();
    let output = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let (user, host) = (output("id", "-un"), output("hostname", "-s"));
    for name in ["state", "dev", "spool"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    let mut gres = Vec::new();
    let mut gres_conf = String::new();
    if *gpus > 0 {
        for gpu in 0..*gpus {
            std::os::unix::fs::symlink("/dev/null", folder.join(format!("dev/gpu{gpu}"))).unwrap();
        }
        gres_conf += &format!("NodeName=n[1-{nodes}] Name=gpu Type=fake File={here}/dev/gpu[0-{}]\n", gpus - 1);
        gres.push(format!("gpu:fake:{gpus}"));
    }
    if *npus > 0 {
        gres_conf += &format!("NodeName=n[1-{nodes}] Name=npu Count={npus}\n");
        gres.push(format!("npu:{npus}"));
    }
    fs::write(folder.join("gres.conf"), gres_conf).unwrap();
    fs::write(folder.join("cgroup.conf"), "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n").unwrap();
    let gres = if gres.is_empty() { String::new() } else { format!("Gres={}", gres.join(",")) };
    let node = |node: usize| {
        format!(
            "NodeName=n{} NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs={cpus} Boards=1 SocketsPerBoard=1 \
             CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory={memory_mb} {gres} State=UNKNOWN\n",
            node + 1,
            ports[node + 1]
        )
    };
    let node_lines: String = (0..*nodes).map(node).collect();
    let text = format!(
        "ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/%n.log
CommunicationParameters=NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=10000
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge={remembers}
KillWait=2
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={lost_after}
MessageTimeout=10
PropagateResourceLimits=NONE
GresTypes=gpu,npu
DefMemPerCPU={}
{node_lines}PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
",
        ports[0],
        memory_mb / cpus / 2,
    );
    fs::write(folder.join("slurm.conf"), text).unwrap();
}
