//! Which stages a command means: the same flags for `run` and `plan`.

use clap::Args;
use engine::plan::{Force, Plan, Selection};

use crate::locate;
use crate::render::Failure;

/// What options that say which stages run, and on what, are listed under.
pub(crate) const STAGES: &str = "Stages";

/// What selects stages, and what there is for them.
#[derive(Args)]
#[command(next_help_heading = STAGES)]
pub(crate) struct SelectionArgs {
    /// Only this stage and what it needs; may be given several times.
    #[arg(long, value_name = "STAGE")]
    until: Vec<String>,
    /// Only this stage and what depends on it; results of other stages that they read must exist. May be given several
    /// times.
    #[arg(long, value_name = "STAGE")]
    from: Vec<String>,
    /// Only this stage; the results that it reads must exist. May be given several times.
    #[arg(long, value_name = "STAGE", conflicts_with_all = ["until", "from"])]
    only: Vec<String>,
    /// Run this stage again although it has a result, from the beginning, and compare the two; without a STAGE, all
    /// that are selected.
    #[arg(long, value_name = "STAGE", num_args = 0..=1, default_missing_value = "")]
    force: Vec<String>,
    /// The number of a slot that stages use; overrides the file.
    #[arg(long, value_name = "NAME=COUNT")]
    slots: Vec<String>,
}

impl SelectionArgs {
    /// These stages and what they need.
    pub(crate) fn until(stages: Vec<String>) -> Self {
        Self { until: stages, from: Vec::new(), only: Vec::new(), force: Vec::new(), slots: Vec::new() }
    }

    /// The overrides of the command line with the slots among them.
    pub(crate) fn overrides(&self, overrides: &[String]) -> Vec<String> {
        let slots = self.slots.iter().map(|slot| format!("slots.{slot}"));
        overrides.iter().cloned().chain(slots).collect()
    }

    /// The part of a plan that is meant.
    pub(crate) fn of(&self, plan: Plan) -> Result<Plan, Failure> {
        let force = match self.force.as_slice() {
            [] => Force::Nothing,
            names if names.iter().any(String::is_empty) => Force::Everything,
            names => Force::Stages(locate::stages(&plan, names)?),
        };
        let selection = Selection {
            until: locate::stages(&plan, &self.until)?,
            from: locate::stages(&plan, &self.from)?,
            only: locate::stages(&plan, &self.only)?,
            force,
        };
        plan.select(&selection).map_err(|error| Failure::wrong(error.to_string()))
    }
}
