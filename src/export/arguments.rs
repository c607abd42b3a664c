//! The command line of both exports.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use devices::DeviceKind;

use crate::remote::RemoteArgs;

/// The folder of all that a pod is given.
pub(super) const POD: &str = "/pipeline";

/// What is exported, and how the cluster is to run it.
#[derive(Args)]
pub(super) struct ClusterArgs {
    /// The pipeline file.
    pub file: PathBuf,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`: the pods run it with them.
    #[arg(value_name = "OVERRIDE")]
    pub overrides: Vec<String>,
    /// Where to write it [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The image that the pods run: it has `pipeline` on its PATH, and what `backend: torch` or a `command` stage
    /// needs.
    #[arg(long)]
    pub image: String,
    /// The namespace to run in [default: that of whoever applies it].
    #[arg(long)]
    pub namespace: Option<String>,
    /// The service account of the pods.
    #[arg(long, value_name = "NAME")]
    pub service_account: Option<String>,
    /// A label that a node must have, for all pods or for those with a device; may be given several times.
    #[arg(long = "node-selector", value_name = "[DEVICE:]LABEL=VALUE")]
    pub node_selectors: Vec<NodeSelector>,
    /// The cluster's name of a device, such as `npu=huawei.com/Ascend310P`; may be given several times.
    #[arg(long = "device-resource", value_name = "DEVICE=RESOURCE")]
    pub device_resources: Vec<DeviceResource>,
    /// The Secret with tokens and keys, each under the name of its environment variable.
    #[arg(long, value_name = "NAME", default_value = "pipeline")]
    pub secret: String,
    /// An environment variable of the pods that is not secret, such as `HF_ENDPOINT=https://…`; may be given several
    /// times.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    pub variables: Vec<Variable>,
    /// A persistent volume claim to mount, for a shared cache or sources that are stored there; may be given several
    /// times.
    #[arg(long = "volume", value_name = "CLAIM=FOLDER")]
    pub volumes: Vec<Volume>,
    /// A persistent volume claim for the pods' homes: a training run whose pod is lost continues from its saved steps.
    #[arg(long, value_name = "CLAIM")]
    pub home_claim: Option<String>,
    /// The path of the pipeline file's folder in the image or on a volume. Without it a ConfigMap contains the file
    /// and its sources.
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// `cuda:accelerator=h100`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeSelector {
    /// The pods that it is for; all, where it names none.
    pub device: Option<DeviceKind>,
    /// The label of a node.
    pub label: String,
    pub value: String,
}

/// `npu=huawei.com/Ascend310P`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceResource {
    /// The device of a pipeline file.
    pub device: DeviceKind,
    /// The cluster's name for it.
    pub resource: String,
}

/// `NAME=VALUE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Variable {
    /// The variable.
    pub name: String,
    pub value: String,
}

/// `claim=/mnt/cache`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Volume {
    /// The persistent volume claim.
    pub claim: String,
    /// Where pods see it.
    pub folder: PathBuf,
}

impl ClusterArgs {
    /// Whether pods see a path of this machine under the same name.
    pub(super) fn is_mounted(&self, path: &Path) -> bool {
        self.volumes.iter().any(|volume| path.starts_with(&volume.folder))
    }
}

/// Splits `NAME=VALUE`.
fn pair<'t>(text: &'t str, form: &str) -> Result<(&'t str, &'t str), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim(), value)),
        _ => Err(format!("expected {form}")),
    }
}

/// A device that a cluster can have.
fn device(name: &str) -> Result<DeviceKind, String> {
    let of_clusters = |kind: &DeviceKind| kind.facts().kubernetes_resource.is_some();
    DeviceKind::of_name(name).filter(of_clusters).ok_or_else(|| {
        let known: Vec<&str> = DeviceKind::ALL.into_iter().filter(of_clusters).map(DeviceKind::name).collect();
        let (last, others) = known.split_last().expect("every cluster has CPUs");
        format!("`{name}` is no device: {} or {last}", others.join(", "))
    })
}

impl FromStr for NodeSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = pair(text, "LABEL=VALUE or DEVICE:LABEL=VALUE")?;
        let (of, label) = match name.split_once(':') {
            Some((name, label)) => (Some(device(name)?), label),
            None => (None, name),
        };
        Ok(Self { device: of, label: label.to_owned(), value: value.to_owned() })
    }
}

impl FromStr for DeviceResource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, resource) = pair(text, "DEVICE=RESOURCE, such as npu=huawei.com/Ascend310P")?;
        match device(name)? {
            DeviceKind::Cpu => Err("`cpu` is a resource that every cluster has under that name".to_owned()),
            device => Ok(Self { device, resource: resource.to_owned() }),
        }
    }
}

impl FromStr for Variable {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = pair(text, "NAME=VALUE")?;
        Ok(Self { name: name.to_owned(), value: value.to_owned() })
    }
}

impl FromStr for Volume {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (claim, folder) = pair(text, "CLAIM=FOLDER, such as results=/mnt/results")?;
        match Path::new(folder) {
            folder if folder.is_absolute() => Ok(Self { claim: claim.to_owned(), folder: folder.to_owned() }),
            _ => Err(format!("`{folder}` is not an absolute path")),
        }
    }
}

impl fmt::Display for Volume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.claim, self.folder.display())
    }
}
