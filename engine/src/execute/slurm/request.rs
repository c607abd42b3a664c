//! What a job asks the cluster for: a stage's resources and the settings of the file, as options of `sbatch`; and its
//! batch script.

use std::path::Path;
use std::time::Duration;

use devices::DeviceKind;

use super::visible;
use crate::execute::keeper::KEEPER_ARGUMENT;
use crate::execute::submission::ClusterJob;

/// What the job itself prints: what its batch script could not do.
pub(super) const OUTPUT_FILE: &str = "output";

/// How long before its time limit a job is told to save what it has, at most.
const NOTICE: Duration = Duration::from_secs(120);

/// The program's own beginning and end, beside what a stage may take.
const AROUND: Duration = Duration::from_secs(60);

/// The options of a job whose submission is in a folder.
pub(super) fn arguments(job: &ClusterJob, folder: &Path) -> Vec<String> {
    let settings = &job.settings;
    let mut arguments = vec![
        format!("--job-name={}", job.name),
        format!("--output={}", pattern(&folder.join(OUTPUT_FILE))),
        "--open-mode=append".to_owned(),
        format!("--chdir={}", job.working_folder.display()),
        // A stage continues from what it saved, so another node may have it after one was lost.
        "--requeue".to_owned(),
        "--kill-on-invalid-dep=yes".to_owned(),
        format!("--nodes={}", job.nodes),
        "--ntasks-per-node=1".to_owned(),
    ];
    let mut ask = |option: &str, value: Option<String>| {
        arguments.extend(value.map(|value| format!("--{option}={value}")));
    };
    ask("partition", settings.partition.clone());
    ask("account", settings.account.clone());
    ask("qos", settings.qos.clone());
    ask("constraint", settings.constraint.clone());
    ask("cpus-per-task", job.threads.map(|threads| threads.to_string()));
    ask("mem", job.memory.map(|bytes| format!("{}M", bytes.div_ceil(1 << 20))));
    ask("gres", gres(settings.gres.as_deref(), job.devices));
    let limit = time_limit(job);
    ask("time", limit.map(|limit| limit.as_secs().div_ceil(60).to_string()));
    ask("signal", limit.map(|limit| format!("B:TERM@{}", notice(limit).as_secs())));
    // `-w n1` is two words, `--comment=a b` is one.
    arguments.extend(settings.options.iter().flat_map(|option| match option.split_once(' ') {
        Some((name, value)) if !name.contains('=') => vec![name.to_owned(), value.trim_start().to_owned()],
        _ => vec![option.clone()],
    }));
    arguments
}

/// The longest that a job may take: what the file says of the cluster, else what the stage may take and what is around
/// that.
fn time_limit(job: &ClusterJob) -> Option<Duration> {
    let of_stage = job.timeout.map(|timeout| timeout + job.grace + AROUND);
    job.settings.time.map(|time| time.0).or(of_stage)
}

/// How long before its limit a job is told to save what it has.
fn notice(limit: Duration) -> Duration {
    NOTICE.min(limit / 10).max(Duration::from_secs(1))
}

/// Whether a job that was told to stop after so many seconds was told so since its time was nearly over. Slurm may say
/// so up to a minute earlier than it was asked to.
pub(super) fn was_nearly_over(run_seconds: u64, limit_seconds: u64) -> bool {
    run_seconds + notice(Duration::from_secs(limit_seconds)).as_secs() + 60 >= limit_seconds
}

/// The devices to ask for on each node. Words with a number at their end are asked for as they stand, also by a stage
/// that does not say what it computes on; without one they name the devices of a stage that wants some.
fn gres(words: Option<&str>, wanted: Option<(DeviceKind, u32)>) -> Option<String> {
    if let Some(words) = words.filter(|words| is_complete(words)) {
        return Some(words.to_owned());
    }
    let (kind, count) = wanted?;
    let name = words.or(kind.facts().gres).unwrap_or(GPU);
    Some(format!("{name}:{count}"))
}

/// What most clusters call devices, whose ever they are.
const GPU: &str = "gpu";

/// Whether a `gres` says how many: `gpu:h200:2`, `gpu:2`, `gpu:1,license:1`.
fn is_complete(gres: &str) -> bool {
    gres.contains(',') || gres.rsplit(':').next().is_some_and(|last| last.parse::<u32>().is_ok())
}

/// The devices that complete words ask for on each node, of the kinds that a stage computes on.
pub(crate) fn gres_devices(words: &str, served: &[DeviceKind]) -> Option<(DeviceKind, u32)> {
    let (name, count) = words.split(',').next().filter(|first| is_complete(first))?.rsplit_once(':')?;
    let owner = DeviceKind::ALL.into_iter().find(|kind| kind.vendor().owns_gres(name));
    let is_meant = |kind: &DeviceKind| owner.map_or(kind.facts().gres == Some(GPU), |owner| owner == *kind);
    let kind = served.iter().copied().find(is_meant)?;
    Some((kind, count.parse().ok()?))
}

/// The batch script: Slurm copies it, so it may say no more than where the rest lies.
pub(super) fn script(program: &Path, folder: &Path, job: &ClusterJob) -> String {
    let (program, folder, name) = (quoted(program), quoted(folder), &job.name);
    let visible = visible_to_set(job).map(visible::in_script).unwrap_or_default();
    format!(
        "#!/bin/sh\n\
         # {name}, submitted by `pipeline`.\n\
         program={program}\n\
         if [ ! -x \"$program\" ]; then\n\
         \x20   echo \"node $(hostname) has no $program: it must lie where the nodes of the cluster find it, under this name\" >&2\n\
         \x20   exit 127\n\
         fi\n\
         {visible}\
         # In place of the shell, so that a signal to the script reaches it.\n\
         exec \"$program\" {KEEPER_ARGUMENT} {folder}\n"
    )
}

/// The variable of visible devices that a job's script has to set.
fn visible_to_set(job: &ClusterJob) -> Option<&'static str> {
    let kinds: Vec<DeviceKind> = visible::untold().map(|(kind, _)| kind).collect();
    let complete = job.settings.gres.as_deref().and_then(|gres| gres_devices(gres, &kinds));
    let (wanted, _) = job.devices.or(complete)?;
    visible::untold().find(|(kind, _)| *kind == wanted).map(|(_, variable)| variable)
}

/// A path as a word of the shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// A path in which Slurm finds nothing to replace.
fn pattern(path: &Path) -> String {
    path.display().to_string().replace('%', "%%")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::SlurmSettings;
    use crate::parameter::{ByteSize, Period};

    fn job(settings: SlurmSettings) -> ClusterJob {
        let key = cache::Digest::of(b"key");
        ClusterJob { settings, ..ClusterJob::new("pipeline-1-adapter", key, key) }
    }

    fn said(job: &ClusterJob) -> String {
        arguments(job, Path::new("/home/runs/1/adapter/slurm-1")).join(" ")
    }

    #[test]
    fn resources_become_options() {
        let whole = ClusterJob {
            threads: Some(8),
            memory: Some((40 << 30) + 1),
            devices: Some((DeviceKind::Cuda, 4)),
            nodes: 2,
            timeout: Some(Duration::from_secs(3600)),
            grace: Duration::from_secs(10),
            ..job(SlurmSettings { partition: Some("gpu".into()), gres: Some("gpu:h200".into()), ..Default::default() })
        };
        let said = said(&whole);
        for option in [
            "--partition=gpu",
            "--cpus-per-task=8",
            "--mem=40961M",
            "--gres=gpu:h200:4",
            "--nodes=2 --ntasks-per-node=1",
            "--time=62",
            "--signal=B:TERM@120",
        ] {
            assert!(said.contains(option), "{option}: {said}");
        }
        assert!(!said.contains("--account"));
    }

    #[test]
    fn devices_are_asked_for_by_who_wants_them() {
        assert_eq!(gres(None, None), None);
        assert_eq!(gres(Some("gpu:h200"), None), None, "the file says what the devices are called");
        assert_eq!(gres(None, Some((DeviceKind::Npu, 8))).as_deref(), Some("npu:8"));
        assert_eq!(gres(Some("gpu:ascend910b"), Some((DeviceKind::Npu, 2))).as_deref(), Some("gpu:ascend910b:2"));
        assert_eq!(gres(Some("gpu:1"), None).as_deref(), Some("gpu:1"));
    }

    #[test]
    fn the_files_own_limit_goes_before_the_timeout() {
        let settings = SlurmSettings {
            time: Some(Period(Duration::from_secs(90))),
            mem: Some(ByteSize(1)),
            options: vec!["--exclusive".into(), "-w n1".into(), "--comment=a b".into()],
            ..Default::default()
        };
        let job = ClusterJob { timeout: Some(Duration::from_secs(9000)), ..job(settings) };
        let said = said(&job);
        assert!(said.contains("--time=2 --signal=B:TERM@9"), "{said}");
        assert!(said.ends_with("--exclusive -w n1 --comment=a b"), "{said}");
        assert!(was_nearly_over(3450, 3600) && !was_nearly_over(3300, 3600));
    }

    #[test]
    fn a_path_is_one_word_of_the_script() {
        let plain = job(SlurmSettings::default());
        let script = |job: &ClusterJob| script(Path::new("/opt/it's/pipeline"), Path::new("/home/a b/slurm-1"), job);
        let npu = script(&ClusterJob { devices: Some((DeviceKind::Npu, 8)), ..plain.clone() });
        let script = script(&plain);
        assert!(npu.contains("export ASCEND_RT_VISIBLE_DEVICES=") && !script.contains("ASCEND"), "{npu}");
        assert!(script.contains(r"program='/opt/it'\''s/pipeline'"), "{script}");
        assert!(script.ends_with("exec \"$program\" __job '/home/a b/slurm-1'\n"), "{script}");
        assert_eq!(pattern(Path::new("/a%j")), "/a%%j");
    }
}
