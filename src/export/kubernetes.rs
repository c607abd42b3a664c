//! `pipeline export kubernetes`: a Job that runs the whole file in one pod.
//!
//! Kubernetes itself starts no pod after another has ended, so a graph of Jobs would be pods that hold their devices
//! while they wait. One pod has the engine's own scheduler; who wants a pod for each stage has Argo.

use engine::plan::PlannedStage;
use serde_json::{Map, Value, json};

use super::arguments::ClusterArgs;
use super::cluster::{Job, Through};
use super::names::label;
use super::pod::{self, Asks};
use crate::Global;
use crate::render::Failure;

/// Writes the Job.
pub(super) fn run(args: &ClusterArgs, global: &Global) -> Result<(), Failure> {
    let job = Job::load(args, Through::HomeOrSharedCache, global)?;
    let asks = whole(&job.plan.stages)?;
    job.write("a Kubernetes Job", &documents(&job, &asks), global)
}

/// What is enough for every stage.
fn whole(stages: &[PlannedStage]) -> Result<Asks, Failure> {
    let asks = stages.iter().map(Asks::of).try_fold(Asks::default(), Asks::or);
    asks.map_err(|(one, other)| {
        let (one, other) = (one.facts().several, other.facts().several);
        Failure::wrong(format!("some stages request {one}, others {other}: no pod has both"))
            .with_help("`pipeline export argo` runs each stage in a separate pod")
    })
}

fn documents(job: &Job<'_>, asks: &Asks) -> Vec<Value> {
    let files = job.files.config_map();
    let config_map = files.as_ref().map(|(content, _)| job.config_map(content));
    let named = config_map.as_ref().zip(files.as_ref()).map(|((name, _), (_, items))| (name.as_str(), items.clone()));
    let mut pod: Map<String, Value> = asks.placement(job.args);
    pod.insert("restartPolicy".to_owned(), "Never".into());
    if let Some(account) = &job.args.service_account {
        pod.insert("serviceAccountName".to_owned(), account.clone().into());
    }
    let environment = job.environment(&job.plan.stages);
    let container = pod::container(job, asks, &job.arguments(), &environment, &label(&job.plan.name));
    pod.insert("containers".to_owned(), json!([container]));
    pod.insert("volumes".to_owned(), pod::volumes(job, named, pod::shares_memory(asks)).into());
    let retries = job.plan.stages.iter().map(|stage| stage.retries.max).max().unwrap_or(0);
    let spec = json!({
        "backoffLimit": retries,
        // A pod that was moved away counts as no try. What the run in it tried again already, and what is no use to
        // try, ends with 1 and 2.
        "podFailurePolicy": { "rules": [
            { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] },
            { "action": "FailJob", "onExitCodes": { "containerName": "main", "operator": "In", "values": [1, 2] } },
        ] },
        "template": { "spec": pod },
    });
    let document = json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": job.metadata(&job.name(&spec)),
        "spec": spec,
    });
    config_map.map(|(_, document)| document).into_iter().chain([document]).collect()
}
