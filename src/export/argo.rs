//! `pipeline export argo`: an Argo workflow with a task for each stage.
//!
//! A task runs its stage alone and hands it over through the shared cache, so that a stage whose result is there
//! costs a few seconds. The children of a sweep share a template, which is given the stage's id.

use std::collections::BTreeSet;

use engine::plan::PlannedStage;
use serde_json::{Value, json};

use super::arguments::ClusterArgs;
use super::cluster::{Job, Through};
use super::names::Names;
use super::pod::{self, Asks};
use crate::Global;
use crate::render::Failure;

/// The template with the graph.
const GRAPH: &str = "graph";

/// The longest name of a task or a template.
const LONGEST_NAME: usize = 63;

/// What Argo puts the stage's id in place of.
const STAGE: &str = "{{inputs.parameters.stage}}";

/// What Argo puts the task's name in place of: where its home is on a claim.
const TASK: &str = "{{inputs.parameters.task}}";

/// Writes the workflow.
pub(super) fn run(args: &ClusterArgs, global: &Global) -> Result<(), Failure> {
    let job = Job::load(args, Through::SharedCache, global)?;
    replaced_by_argo(&job)?;
    job.write("an Argo workflow", &documents(&job), global)
}

/// Argo replaces `{{…}}` wherever it stands, and has no way to write it.
fn replaced_by_argo(job: &Job<'_>) -> Result<(), Failure> {
    let ids = job.plan.stages.iter().map(|stage| stage.id.as_str());
    let variables = job.plan.variables.values().flatten().map(String::as_str);
    let given = job.args.variables.iter().map(|variable| variable.value.as_str());
    let arguments = job.arguments();
    let texts = arguments.iter().map(String::as_str).chain(ids).chain(variables).chain(given);
    match texts.into_iter().find(|text| text.contains("{{")) {
        None => Ok(()),
        Some(text) => {
            Err(Failure::wrong(format!("`{text}` contains `{{{{`, which Argo reads as one of its references"))
                .with_help("write it into the pipeline file, where Argo does not look"))
        }
    }
}

fn documents(job: &Job<'_>) -> Vec<Value> {
    let files = job.files.config_map();
    let config_map = files.as_ref().map(|(content, _)| job.config_map(content));
    let named = config_map.as_ref().zip(files.as_ref()).map(|((name, _), (_, items))| (name.as_str(), items.clone()));
    let asks = job.plan.stages.iter().map(Asks::of);
    let shares_memory = asks.into_iter().any(|asks| pod::shares_memory(&asks));
    let mut spec = json!({ "entrypoint": GRAPH });
    if let Some(account) = &job.args.service_account {
        spec["serviceAccountName"] = account.clone().into();
    }
    spec["volumes"] = pod::volumes(job, named, shares_memory).into();
    spec["templates"] = templates(job).into();
    let workflow = json!({
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": job.metadata(&job.name(&spec)),
        "spec": spec,
    });
    config_map.map(|(_, document)| document).into_iter().chain([workflow]).collect()
}

/// The graph, and a template for each kind of pod.
fn templates(job: &Job<'_>) -> Vec<Value> {
    let mut names = Names::new(LONGEST_NAME, &[GRAPH]);
    let tasks: Vec<String> = job.plan.stages.iter().map(|stage| names.label(&stage.id)).collect();
    let mut names = Names::new(LONGEST_NAME, &[GRAPH]);
    // With the name that it got.
    let mut made: Vec<(String, Value, String)> = Vec::new();
    let mut graph = Vec::new();
    for (at, stage) in job.plan.stages.iter().enumerate() {
        let template = template(job, stage);
        let known = made.iter().find(|(declared, known, _)| *declared == stage.declared && *known == template);
        let name = match known {
            Some((_, _, name)) => name.clone(),
            None => {
                let first = !made.iter().any(|(declared, _, _)| *declared == stage.declared);
                let name = names.label(if first { &stage.declared } else { &stage.id });
                made.push((stage.declared.clone(), template, name.clone()));
                name
            }
        };
        let mut parameters = vec![json!({ "name": "stage", "value": stage.id })];
        if job.args.home_claim.is_some() {
            parameters.push(json!({ "name": "task", "value": tasks[at] }));
        }
        let mut task = json!({ "name": tasks[at], "template": name, "arguments": { "parameters": parameters } });
        let before: BTreeSet<usize> = job.plan.stages[at].upstream().collect();
        if !before.is_empty() {
            task["dependencies"] = before.iter().map(|&stage| tasks[stage].clone()).collect();
        }
        graph.push(task);
    }
    let graph = json!({ "name": GRAPH, "dag": { "tasks": graph } });
    let named = made.into_iter().map(|(_, mut template, name)| {
        template["name"] = name.into();
        template
    });
    std::iter::once(graph).chain(named).collect()
}

/// The template of a stage, without a name of its own.
fn template(job: &Job<'_>, stage: &PlannedStage) -> Value {
    let asks = Asks::of(stage);
    let mut parameters = vec![json!({ "name": "stage" })];
    let mut home = String::new();
    if job.args.home_claim.is_some() {
        parameters.push(json!({ "name": "task" }));
        home = format!("{}/{TASK}", super::names::label(&job.plan.name));
    }
    let mut template = json!({ "name": "", "inputs": { "parameters": parameters } });
    asks.placement(job.args).into_iter().for_each(|(field, value)| template[field.as_str()] = value);
    if let Some(seconds) = pod::deadline_seconds(stage) {
        template["activeDeadlineSeconds"] = seconds.into();
    }
    if stage.retries.max > 0 {
        template["retryStrategy"] = retry_strategy(stage);
    }
    let arguments: Vec<String> = job.arguments().into_iter().chain(["--only".to_owned(), STAGE.to_owned()]).collect();
    template["container"] = pod::container(job, &asks, &arguments, &job.environment([stage]), &home);
    template
}

/// What the run in the pod cannot try again: a pod that was lost, evicted or killed. What it did try again, and what is
/// no use to try, ends with 1 and 2.
fn retry_strategy(stage: &PlannedStage) -> Value {
    json!({
        "limit": stage.retries.max.to_string(),
        "retryPolicy": "Always",
        "expression": "asInt(lastRetry.exitCode) != 1 && asInt(lastRetry.exitCode) != 2",
        "backoff": { "duration": format!("{}s", stage.retries.delay.as_secs().max(1)), "factor": "2" },
    })
}
