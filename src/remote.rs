//! Which shared cache a command uses: the command line, the environment, the pipeline file, in this order.

use std::path::Path;

use cache::remote::{BadPlace, RemoteError, RemotePlace};
use clap::Args;
use engine::plan::Plan;
use engine::remote::RemoteSettings;

use crate::full_disk;
use crate::render::{Failure, Message};

/// The variable that names the shared cache.
const VARIABLE: &str = "PIPELINE_REMOTE";

/// What options of the shared cache are listed under.
pub(crate) const SHARED_CACHE: &str = "Shared cache";

/// The choice of a shared cache.
#[derive(Args)]
#[command(next_help_heading = SHARED_CACHE)]
pub(crate) struct RemoteArgs {
    /// Shared cache: `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///…` or a folder [default: `$PIPELINE_REMOTE`, else the file's `remote:`].
    #[arg(long, value_name = "URL", conflicts_with = "no_remote")]
    remote: Option<String>,
    /// Do not use the shared cache.
    #[arg(long)]
    no_remote: bool,
}

impl RemoteArgs {
    /// As `--remote URL` on the command line, or nothing there.
    pub(crate) fn named(url: Option<&str>) -> Self {
        Self { remote: url.map(str::to_owned), no_remote: false }
    }

    /// The shared cache of a plan, if there is one.
    pub(crate) fn settings(&self, plan: Option<&Plan>) -> Result<Option<RemoteSettings>, Failure> {
        if self.no_remote {
            return Ok(None);
        }
        let of_file = plan.and_then(|plan| plan.remote.clone());
        let variable = || std::env::var(VARIABLE).ok().filter(|value| !value.trim().is_empty());
        let Some(named) = self.remote.clone().or_else(variable) else { return Ok(of_file) };
        let push = of_file.is_some_and(|settings| settings.push);
        let place = RemotePlace::parse(&named, Path::new(".")).map_err(Failure::from)?;
        Ok(Some(RemoteSettings { place, push }))
    }

    /// As [`RemoteArgs::settings`], where there is nothing to do without one.
    pub(crate) fn required(&self, plan: Option<&Plan>) -> Result<RemoteSettings, Failure> {
        self.settings(plan)?.ok_or_else(|| {
            let help = format!("give `--remote URL`, set {VARIABLE}, or write `remote:` into the pipeline file");
            Failure::wrong("no shared cache is named".to_owned()).with_help(help)
        })
    }
}

impl From<BadPlace> for Failure {
    fn from(error: BadPlace) -> Self {
        Failure::wrong(error.to_string()).with_help(error.help())
    }
}

impl From<RemoteError> for Failure {
    fn from(error: RemoteError) -> Self {
        let exit = engine::error::Failure::from(&error).cause.into();
        let help = error.help().map(str::to_owned).or_else(|| full_disk::help(&error));
        Failure::Told { exit, message: Message::of(&error) }.with_help_if(help)
    }
}
