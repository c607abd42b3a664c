//! What both kinds of manifests need: the plan, the shared cache, and everything that would keep a pod from working.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use cache::Digest;
use devices::DeviceKind;
use engine::executor::ExecutorKind;
use engine::file::interpolate::is_secret;
use engine::plan::{DeviceCount, Plan, PlannedStage, Resources};
use engine::remote::RemoteSettings;
use serde_json::{Value, json};

use super::arguments::{ClusterArgs, POD};
use super::files::{self, Files};
use super::names::{label, marked};
use super::yaml;
use crate::progress::Verbosity;
use crate::render::{self, Exit, Failure, Message};
use crate::{Global, terminal, words};

/// Letters of a digest in a name: enough that two versions of a file do not meet.
const MARK: usize = 8;

/// The longest name of a workflow or job: its pods' names are made of it.
const LONGEST_NAME: usize = 52;

/// A pipeline that is ready to be written for a cluster.
pub(super) struct Job<'a> {
    /// The command line.
    pub args: &'a ClusterArgs,
    /// The pipeline.
    pub plan: Plan,
    /// The shared cache.
    pub remote: Option<RemoteSettings>,
    /// What the pods read.
    pub files: Files,
}

/// How a cluster's pods hand on results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Through {
    /// Through the shared cache alone.
    SharedCache,
    /// There is one pod, whose home may keep them.
    HomeOrSharedCache,
}

impl<'a> Job<'a> {
    /// Reads the pipeline, and finds all that would keep its pods from working.
    pub(super) fn load(args: &'a ClusterArgs, through: Through, global: &Global) -> Result<Self, Failure> {
        let plan = engine::plan::load(&args.file, &args.overrides, &stages::registry())?;
        render::warnings(&plan.sources, &plan.warnings, global.verbosity());
        render::left_out(&plan, global.verbosity());
        let remote = args.remote.settings(Some(&plan))?;
        let mut problems: Vec<Message> = args.without_remote(remote.as_ref(), through).into_iter().collect();
        problems.extend(args.variables.iter().filter(|variable| is_secret(&variable.name)).map(|variable| {
            let text = format!("`--env {}=…` would write a secret into the manifest", variable.name);
            Message::chain(&[text], Some(format!("put it into the Secret `{}`", args.secret)))
        }));
        let found = plan.stages.iter().filter_map(|stage| not_on_a_pod(&plan, stage));
        problems.extend(found);
        let files = match &args.folder {
            Some(folder) => Files::of_the_image(folder, &args.file),
            None => files::collect(&plan, args, &global.home_to_look(&args.file), &mut problems)?,
        };
        if global.verbosity() > Verbosity::Quiet && plan.stages.iter().any(|stage| !stage.resources.slots.is_empty()) {
            terminal::tell_line("warning: `slots` apply within one pod, not between the pods of a workflow");
        }
        problems.iter().for_each(render::message);
        Failure::after(if problems.is_empty() { Exit::Done } else { Exit::Wrong }, Ok(()))?;
        Ok(Self { args, plan, remote, files })
    }

    /// What `pipeline` is given in a pod, without the stage.
    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["run".to_owned(), self.files.pipeline.clone()];
        arguments.extend(self.args.overrides.iter().cloned());
        if !self.plan.publish.is_empty() {
            // A folder of a pod goes with it; whoever runs the file afterwards gets what it publishes.
            arguments.push("publish=".to_owned());
        }
        arguments.extend(["--home".to_owned(), format!("{POD}/home"), "--locked".to_owned()]);
        let stages = 0..self.plan.stages.len();
        if stages.into_iter().any(|stage| self.plan.executor_of(stage, None).0 != ExecutorKind::Local) {
            // The pod is where the stage is to run, whoever runs it elsewhere.
            arguments.extend(["--executor".to_owned(), "local".to_owned()]);
        }
        if let Some(remote) = &self.remote {
            arguments.push("--hand-over".to_owned());
            // What the file says of it (an endpoint, a region) it says in the pod, too; but a folder may be relative.
            if self.plan.remote.as_ref() != Some(remote) || remote.place.folder().is_some() {
                arguments.extend(["--remote".to_owned(), remote.place.to_string()]);
            }
        }
        arguments.iter().map(|argument| escaped(argument)).collect()
    }

    /// Environment variables of a pod for stages: those that the file refers to, those given, and secrets by reference.
    pub(super) fn environment<'p>(&self, stages: impl IntoIterator<Item = &'p PlannedStage>) -> Vec<Value> {
        let mut variables: BTreeMap<&str, &str> = BTreeMap::new();
        let mut secrets: BTreeMap<String, bool> = BTreeMap::new();
        for (name, value) in &self.plan.variables {
            match value {
                _ if is_secret(name) => drop(secrets.insert(name.clone(), false)),
                Some(value) => drop(variables.insert(name, value)),
                None => {}
            }
        }
        variables.extend(self.args.variables.iter().map(|given| (given.name.as_str(), given.value.as_str())));
        for secret in stages.into_iter().flat_map(|stage| stage.bound.secrets()) {
            *secrets.entry(secret.variable).or_default() |= secret.is_required();
        }
        for key in self.remote.iter().flat_map(|remote| remote.place.keys()) {
            secrets.entry((*key).to_owned()).or_default();
        }
        let plain = variables.iter().map(|(name, value)| json!({ "name": name, "value": escaped(value) }));
        let by_reference = secrets.iter().map(|(name, required)| {
            let mut reference = json!({ "name": self.args.secret, "key": name });
            if !required {
                reference["optional"] = true.into();
            }
            json!({ "name": name, "valueFrom": { "secretKeyRef": reference } })
        });
        plain.chain(by_reference).collect()
    }

    /// The name of what is written: another pipeline, or another version of it, has another one.
    pub(super) fn name(&self, content: &Value) -> String {
        let of_pipeline = match label(&self.plan.name) {
            name if name.is_empty() => "pipeline".to_owned(),
            name => name,
        };
        let digest = Digest::of(content.to_string().as_bytes()).to_string();
        marked(&of_pipeline, &digest[..MARK], LONGEST_NAME)
    }

    /// The ConfigMap that brings what pods read, and its name. Nobody changes it: other files have another one.
    pub(super) fn config_map(&self, content: &Value) -> (String, Value) {
        let name = self.name(content);
        let mut document =
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": self.metadata(&name), "immutable": true });
        content.as_object().into_iter().flatten().for_each(|(key, value)| document[key] = value.clone());
        (name, document)
    }

    /// What every object that is written says of itself.
    pub(super) fn metadata(&self, name: &str) -> Value {
        let mut metadata = json!({ "name": name });
        if let Some(namespace) = &self.args.namespace {
            metadata["namespace"] = namespace.clone().into();
        }
        let mut instance = label(&self.plan.name);
        instance.truncate(63);
        metadata["labels"] = json!({
            "app.kubernetes.io/name": "pipeline",
            "app.kubernetes.io/instance": instance.trim_end_matches('-'),
        });
        metadata
    }

    /// The manifests must not be written over what they are made of.
    fn refuse_own(&self, output: &Path) -> Result<(), Failure> {
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        let Some(output_file) = real(output) else { return Ok(()) };
        let read = self.plan.sources.all().map(|source| PathBuf::from(&source.name)).chain([self.args.file.clone()]);
        if read.filter_map(|path| real(&path)).any(|path| path == output_file) {
            let message = format!("`{}` is the pipeline file itself, or one that it includes", words::path(output));
            return Err(Failure::wrong(message).with_help("`--output` names another file"));
        }
        Ok(())
    }

    /// Writes the documents where the command line says, after a comment that says how to use them.
    pub(super) fn write(&self, kind: &str, documents: &[Value], global: &Global) -> Result<(), Failure> {
        let target = match &self.args.output {
            Some(path) => path.display().to_string(),
            None => "-".to_owned(),
        };
        let secrets = secrets_in(documents);
        let mut text = format!("# {} as {kind}, written by `pipeline export`.\n", self.plan.name);
        text += &format!("# Start it: kubectl apply --server-side -f {target}\n");
        if !secrets.is_empty() {
            text += &format!("# The Secret `{}` contains: {}\n", self.args.secret, secrets.join(", "));
        }
        text += &yaml::documents(documents);
        match &self.args.output {
            None => write!(std::io::stdout().lock(), "{text}")?,
            Some(path) => {
                self.refuse_own(path)?;
                std::fs::write(path, text).map_err(|error| {
                    Failure::machine(error).with_help(format!("`{}` cannot be written", path.display()))
                })?;
                if global.verbosity() > Verbosity::Quiet {
                    let stages = words::plural(self.plan.stages.len(), "stage");
                    terminal::tell_line(format_args!("{kind} with {stages} written to {}", path.display()));
                }
            }
        }
        Ok(())
    }
}

impl ClusterArgs {
    /// The message where pods could not hand on results.
    fn without_remote(&self, remote: Option<&RemoteSettings>, through: Through) -> Option<Message> {
        let file = words::path(&self.file);
        match (remote, through) {
            (None, Through::HomeOrSharedCache) if self.home_claim.is_some() => None,
            (None, _) => {
                let what = match through {
                    Through::SharedCache => "through which the tasks of a workflow hand on their results",
                    Through::HomeOrSharedCache => "and what a pod makes goes with it",
                };
                let mut help =
                    "write `remote: s3://bucket/prefix` at the top of the file, or give `--remote URL`".to_owned();
                if through == Through::HomeOrSharedCache {
                    help += ", or keep the pod's home with `--home-claim CLAIM`";
                }
                Some(Message::chain(&[format!("{file} names no shared cache, {what} ({file}:1:1)")], Some(help)))
            }
            (Some(remote), _) => {
                let folder = remote.place.folder()?;
                if self.is_mounted(folder) {
                    return None;
                }
                let text = format!("the shared cache `{}` is a folder of this machine", folder.display());
                let help = format!(
                    "use a bucket, or mount its volume at the same path: `--volume CLAIM={}`",
                    folder.display()
                );
                Some(Message::chain(&[text], Some(help)))
            }
        }
    }
}

/// What a stage asks for that no pod can be given.
fn not_on_a_pod(plan: &Plan, stage: &PlannedStage) -> Option<Message> {
    let Resources { device, count, nodes, .. } = stage.resources;
    let on_processor = device.is_none_or(|device| device == DeviceKind::Cpu);
    let of_no_cluster = device.filter(|device| device.facts().kubernetes_resource.is_none());
    let (what, help) = if let Some(device) = of_no_cluster {
        (format!("{}, which no cluster has", device.facts().one), "resources.device=cuda")
    } else if count == DeviceCount::All && !on_processor {
        ("`count: all`, and a pod has the devices that it requests by number".to_owned(), "resources.count=8")
    } else if nodes > 1 {
        ("several nodes, and its pod is on one: `executor: slurm` has several".to_owned(), "resources.nodes=1")
    } else {
        return None;
    };
    let text = format!("stage `{}` requests {what}{}", stage.id, crate::run::place(plan, &stage.id));
    Some(Message::chain(&[text], Some(format!("add `{}.{help}`, say, to the command", stage.declared))))
}

/// The keys of the Secret that documents refer to.
fn secrets_in(documents: &[Value]) -> Vec<String> {
    fn look(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(entries) => {
                if let Some(key) = entries.get("secretKeyRef").and_then(|reference| reference["key"].as_str()) {
                    found.push(key.to_owned());
                }
                entries.values().for_each(|value| look(value, found));
            }
            Value::Array(items) => items.iter().for_each(|item| look(item, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    documents.iter().for_each(|document| look(document, &mut found));
    found.sort();
    found.dedup();
    found
}

/// Kubernetes replaces `$(NAME)` in arguments and variables, and `$$` by `$`.
fn escaped(text: &str) -> String {
    if text.contains("$(") || text.contains("$$") { text.replace('$', "$$") } else { text.to_owned() }
}
