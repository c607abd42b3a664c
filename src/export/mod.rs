//! `pipeline export`: what leaves this program for others: an output as a folder, a whole pipeline as a job of a
//! cluster.
//!
//! A file each: [`copy`] for outputs; [`argo`] and [`kubernetes`] for manifests, over what both need: [`arguments`]
//! (the command line), [`cluster`] (the plan), [`files`] (what pods read), [`pod`] (what a pod asks for and is given),
//! [`names`] and [`yaml`].

mod argo;
mod arguments;
mod cluster;
mod copy;
mod files;
mod kubernetes;
mod names;
mod pod;
mod yaml;

use clap::{Args, Subcommand};

use crate::Global;
use crate::render::Failure;

/// Copy a stage's output into a folder, or write a pipeline as a job of a cluster.
///
/// `pipeline export FILE STAGE FOLDER` copies an output out of the store into a new or empty folder. The copy is
/// checked, writable and independent of the store; `publish:` in the file does the same after every run.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ExportArgs {
    #[command(subcommand)]
    target: Option<Target>,
    #[command(flatten)]
    copy: Option<copy::CopyArgs>,
}

#[derive(Subcommand)]
enum Target {
    /// Write an Argo workflow: a task for each stage, in the order of the graph, with the shared cache between them.
    Argo(arguments::ClusterArgs),
    /// Write a Kubernetes Job that runs the whole file in one pod.
    Kubernetes(arguments::ClusterArgs),
}

/// Copies or writes.
pub(crate) fn run(args: &ExportArgs, global: &Global) -> Result<(), Failure> {
    match (&args.target, &args.copy) {
        (Some(Target::Argo(args)), _) => argo::run(args, global),
        (Some(Target::Kubernetes(args)), _) => kubernetes::run(args, global),
        (None, Some(args)) => copy::run(args, global),
        (None, None) => Err(Failure::wrong("nothing is named to export")
            .with_help("`pipeline export FILE STAGE FOLDER`, or `pipeline export argo FILE`")),
    }
}
