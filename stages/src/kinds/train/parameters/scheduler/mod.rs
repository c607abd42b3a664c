//! `scheduler:`: the learning rate over the run. Each schedule takes its own options and no other's.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::Parameters;
use model::schedule::{Decay, Horizon, Schedule};

/// The learning-rate schedule: a warm-up from zero, and what follows it. Names and formulas are those of transformers
/// (`optimization.py`) and of `torch.optim.lr_scheduler`.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(default)]
pub enum SchedulerParams {
    /// Constant after the warm-up.
    Constant {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
    },
    /// A line down to zero at the last step.
    Linear {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
    },
    /// Half a cosine down to zero at the last step.
    #[semantic(default)]
    Cosine {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
        /// Number of cosine waves in the run; with 0.5 it falls once.
        #[semantic(default = 0.5, above = 0.0)]
        num_cycles: f64,
    },
    /// Half a cosine down to a minimum.
    CosineWithMinLr {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
        /// Number of cosine waves in the run; with 0.5 it falls once.
        #[semantic(default = 0.5, above = 0.0)]
        num_cycles: f64,
        /// The minimum.
        #[semantic(flatten)]
        min_lr: MinLr,
    },
    /// Half cosines, each from the full learning rate to zero.
    CosineWithRestarts {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
        /// Number of falls.
        #[semantic(default = 1.0, above = 0.0)]
        num_cycles: f64,
    },
    /// A power of the remaining share of the run.
    Polynomial {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
        /// The exponent; 1 is a line.
        #[semantic(default = 1.0, above = 0.0)]
        power: f64,
        /// The learning rate at the end.
        #[semantic(default = 1e-7, range = 0.0..)]
        lr_end: f64,
    },
    /// Falls with the square root of the step, for runs without a fixed end.
    InverseSqrt {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
        /// Steps after which it has fallen to 1/√2; default: the steps of the warm-up, or 10000 without one.
        #[semantic(range = 1..)]
        timescale: Option<u64>,
    },
    /// Constant, and at the end half a cosine down to a minimum, at which the warm-up also begins.
    WarmupStableDecay {
        /// How long the learning rate rises.
        #[semantic(flatten)]
        warmup: Warmup,
        /// Number of steps of the final decay; usual: a tenth to a fifth of all steps.
        #[semantic]
        num_decay_steps: u64,
        /// The minimum as a share of the full learning rate.
        #[semantic(default = 0.0, range = 0.0..=1.0)]
        min_lr_ratio: f64,
    },
    /// Up and down along half cosines, without a separate warm-up (Smith and Topin, arXiv:1708.07120).
    OneCycle {
        /// Share of the run in which the learning rate rises.
        #[semantic(default = 0.3, above = 0.0, range = ..1.0)]
        pct_start: f64,
        /// The peak learning rate divided by the first.
        #[semantic(default = 25.0, range = 1.0..)]
        div_factor: f64,
        /// The first learning rate divided by the last.
        #[semantic(default = 1e4, range = 1.0..)]
        final_div_factor: f64,
    },
}

/// How long the learning rate rises from zero.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(one_of, default)]
pub enum Warmup {
    /// Steps over which the learning rate rises from zero.
    #[semantic(rename = "warmup_steps", default = 0)]
    Steps(u64),
    /// The same as a share of all steps, rounded up.
    #[semantic(rename = "warmup_ratio", range = 0.0..=1.0)]
    Ratio(f64),
}

/// The minimum of the learning rate.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(one_of)]
pub enum MinLr {
    /// The learning rate at the end.
    #[semantic(rename = "min_lr", range = 0.0..)]
    Rate(f64),
    /// The same as a share of the full learning rate.
    #[semantic(rename = "min_lr_rate", range = 0.0..=1.0)]
    Share(f64),
}

/// transformers' default of the timescale where there is no warm-up.
const TIMESCALE_WITHOUT_WARMUP: u64 = 10_000;

impl SchedulerParams {
    /// The schedule of a run of so many steps with this learning rate at its highest.
    pub fn schedule(&self, learning_rate: f64, total_steps: u64) -> Schedule {
        let warmup_steps = self.warmup_steps(total_steps);
        let decay = match *self {
            Self::Constant { .. } => Decay::Constant,
            Self::Linear { .. } => Decay::Linear,
            Self::Cosine { num_cycles, .. } => Decay::Cosine { cycles: num_cycles },
            Self::CosineWithMinLr { num_cycles, min_lr, .. } => {
                let min_lr_rate = match min_lr {
                    MinLr::Rate(rate) => rate / learning_rate,
                    MinLr::Share(share) => share,
                };
                Decay::CosineWithMinLr { cycles: num_cycles, min_lr_rate }
            }
            Self::CosineWithRestarts { num_cycles, .. } => Decay::CosineWithRestarts { cycles: num_cycles },
            Self::Polynomial { power, lr_end, .. } => Decay::Polynomial { power, end_factor: lr_end / learning_rate },
            Self::InverseSqrt { timescale, .. } => {
                let of_warmup = if warmup_steps > 0 { warmup_steps } else { TIMESCALE_WITHOUT_WARMUP };
                Decay::InverseSqrt { timescale: timescale.unwrap_or(of_warmup) as f64 }
            }
            Self::WarmupStableDecay { num_decay_steps, min_lr_ratio, .. } => {
                Decay::WarmupStableDecay { decay_steps: num_decay_steps, min_lr_rate: min_lr_ratio }
            }
            Self::OneCycle { pct_start, div_factor, final_div_factor } => {
                Decay::OneCycle { pct_start, div_factor, final_div_factor }
            }
        };
        Schedule { warmup_steps, decay }
    }

    /// The warm-up; none where the schedule has a rise of its own.
    pub(in crate::kinds::train) fn warmup(&self) -> Warmup {
        match *self {
            Self::Constant { warmup }
            | Self::Linear { warmup }
            | Self::Cosine { warmup, .. }
            | Self::CosineWithMinLr { warmup, .. }
            | Self::CosineWithRestarts { warmup, .. }
            | Self::Polynomial { warmup, .. }
            | Self::InverseSqrt { warmup, .. }
            | Self::WarmupStableDecay { warmup, .. } => warmup,
            Self::OneCycle { .. } => Warmup::Steps(0),
        }
    }

    /// Steps of the warm-up in a run of so many; a share is rounded up, as in transformers.
    pub fn warmup_steps(&self, total_steps: u64) -> u64 {
        match self.warmup() {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) => (total_steps as f64 * ratio).ceil() as u64,
        }
    }

    /// Whether a run that goes on for more steps than planned keeps the values that it has had.
    pub fn horizon(&self) -> Horizon {
        match self.warmup() {
            Warmup::Ratio(ratio) if ratio > 0.0 => Horizon::Total,
            Warmup::Ratio(_) | Warmup::Steps(_) => self.schedule(1.0, 1).horizon(),
        }
    }

    /// What is wrong with it beside this learning rate.
    pub(super) fn problem(&self, learning_rate: f64, span: Span) -> Option<Problem> {
        let (option, lowest) = match *self {
            Self::CosineWithMinLr { min_lr: MinLr::Rate(rate), .. } => ("min_lr", rate),
            Self::Polynomial { lr_end, .. } => ("lr_end", lr_end),
            _ => return None,
        };
        (lowest >= learning_rate).then(|| {
            let message =
                format!("`scheduler.{option}` = {lowest:e} is not below `optimizer.learning_rate` = {learning_rate:e}");
            Problem::error("out-of-range", span, message, "the rate would not fall").at(format!("scheduler.{option}"))
        })
    }
}

#[cfg(test)]
mod tests;
