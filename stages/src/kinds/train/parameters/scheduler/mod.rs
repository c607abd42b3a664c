//! `scheduler:`: the learning rate over the run. Each shape takes its own options and no other's.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::{Class, Json, KeyWriter, Parameter, Parameters, Reader};
use model::schedule::{Decay, Horizon, Schedule};

use super::given::only_options_of;

/// What a file may say, whatever the shape.
#[derive(Parameters)]
struct Written {
    /// Its shape after the warm-up.
    #[semantic(default = SchedulerName::Cosine)]
    name: SchedulerName,
    /// Steps over which the learning rate rises from zero; 0 if left out. Every shape but `one_cycle` has it.
    #[semantic]
    warmup_steps: Option<u64>,
    /// The same as a share of all steps, rounded up.
    #[semantic(range = 0.0..=1.0)]
    warmup_ratio: Option<f64>,
    /// `cosine`, `cosine_with_min_lr`: waves in the run, 0.5 if left out. `cosine_with_restarts`: how often it falls
    /// from the full rate to zero, 1 if left out.
    #[semantic(above = 0.0)]
    num_cycles: Option<f64>,
    /// `cosine_with_min_lr`: the rate at the end.
    #[semantic(range = 0.0..)]
    min_lr: Option<f64>,
    /// `cosine_with_min_lr`: the rate at the end as a share of the full one.
    #[semantic(range = 0.0..=1.0)]
    min_lr_rate: Option<f64>,
    /// `warmup_stable_decay`: the rate at both ends as a share of the full one; 0 if left out.
    #[semantic(range = 0.0..=1.0)]
    min_lr_ratio: Option<f64>,
    /// `warmup_stable_decay`: steps of the fall at the end.
    #[semantic]
    num_decay_steps: Option<u64>,
    /// `polynomial`: the exponent; 1, a line, if left out.
    #[semantic(above = 0.0)]
    power: Option<f64>,
    /// `polynomial`: the rate at the end; 1e-7 if left out.
    #[semantic(range = 0.0..)]
    lr_end: Option<f64>,
    /// `inverse_sqrt`: steps after which the rate has fallen to 1/√2; the warm-up's steps, or 10000, if left out.
    #[semantic(range = 1..)]
    timescale: Option<u64>,
    /// `one_cycle`: share of the run in which the rate rises; 0.3 if left out.
    #[semantic(above = 0.0, range = ..1.0)]
    pct_start: Option<f64>,
    /// `one_cycle`: the full rate over the first; 25 if left out.
    #[semantic(range = 1.0..)]
    div_factor: Option<f64>,
    /// `one_cycle`: the first rate over the last; 1e4 if left out.
    #[semantic(range = 1.0..)]
    final_div_factor: Option<f64>,
}

/// The shape of a schedule after its warm-up.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerName {
    /// Level.
    Constant,
    /// A line down to zero at the last step.
    Linear,
    /// Half a cosine down to zero at the last step.
    Cosine,
    /// Half a cosine down to a lowest rate.
    CosineWithMinLr,
    /// A half cosine again and again, each time from the full rate.
    CosineWithRestarts,
    /// A power of what is left of the run.
    Polynomial,
    /// Falls as the root of the step rises, for runs without a set end.
    InverseSqrt,
    /// Level, and at the end along half a cosine to a lowest rate.
    WarmupStableDecay,
    /// Up and down along half cosines, without a warm-up beside (Smith and Topin, arXiv:1708.07120).
    OneCycle,
}

/// How long the learning rate rises from zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// So many steps.
    Steps(u64),
    /// This share of all steps, rounded up.
    Ratio(f64),
}

/// The lowest learning rate of a schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MinLr {
    Rate(f64),
    /// As a share of the full rate.
    Share(f64),
}

/// What follows the warm-up, with the options of each shape and their defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shape {
    /// Level.
    Constant,
    /// A line down to zero.
    Linear,
    Cosine {
        /// Waves in the run.
        num_cycles: f64,
    },
    /// A cosine down to a lowest rate.
    CosineWithMinLr {
        /// Waves in the run.
        num_cycles: f64,
        /// The lowest rate.
        min_lr: MinLr,
    },
    /// Half cosines.
    CosineWithRestarts { num_cycles: f64 },
    /// A power of what is left.
    Polynomial {
        /// The exponent.
        power: f64,
        /// The rate at the end.
        lr_end: f64,
    },
    /// The inverse of the step's root.
    InverseSqrt {
        /// Steps after which the rate has fallen to 1/√2; from the warm-up if left out.
        timescale: Option<u64>,
    },
    /// Level, then a half cosine.
    WarmupStableDecay {
        /// Steps of the fall.
        num_decay_steps: u64,
        /// The lowest rate as a share of the full one.
        min_lr_ratio: f64,
    },
    /// Up and down.
    OneCycle {
        /// Share of the run in which the rate rises.
        pct_start: f64,
        /// The full rate over the first.
        div_factor: f64,
        /// The first rate over the last.
        final_div_factor: f64,
    },
}

/// The learning rate over the run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulerParams {
    /// Steps in which it rises.
    pub warmup: Warmup,
    /// What follows.
    pub shape: Shape,
    /// Where it stands in the file.
    pub span: Span,
}

impl Default for SchedulerParams {
    fn default() -> Self {
        Self { warmup: Warmup::Steps(0), shape: Shape::Cosine { num_cycles: 0.5 }, span: Span::default() }
    }
}

/// transformers' default of the timescale where there is no warm-up.
const TIMESCALE_WITHOUT_WARMUP: u64 = 10_000;

impl SchedulerParams {
    /// The schedule of a run of so many steps with this learning rate at its highest.
    pub fn schedule(&self, learning_rate: f64, total_steps: u64) -> Schedule {
        let warmup_steps = self.warmup_steps(total_steps);
        let decay = match self.shape {
            Shape::Constant => Decay::Constant,
            Shape::Linear => Decay::Linear,
            Shape::Cosine { num_cycles } => Decay::Cosine { cycles: num_cycles },
            Shape::CosineWithMinLr { num_cycles, min_lr } => {
                let min_lr_rate = match min_lr {
                    MinLr::Rate(rate) => rate / learning_rate,
                    MinLr::Share(share) => share,
                };
                Decay::CosineWithMinLr { cycles: num_cycles, min_lr_rate }
            }
            Shape::CosineWithRestarts { num_cycles } => Decay::CosineWithRestarts { cycles: num_cycles },
            Shape::Polynomial { power, lr_end } => Decay::Polynomial { power, end_factor: lr_end / learning_rate },
            Shape::InverseSqrt { timescale } => {
                let of_warmup = if warmup_steps > 0 { warmup_steps } else { TIMESCALE_WITHOUT_WARMUP };
                Decay::InverseSqrt { timescale: timescale.unwrap_or(of_warmup) as f64 }
            }
            Shape::WarmupStableDecay { num_decay_steps, min_lr_ratio } => {
                Decay::WarmupStableDecay { decay_steps: num_decay_steps, min_lr_rate: min_lr_ratio }
            }
            Shape::OneCycle { pct_start, div_factor, final_div_factor } => {
                Decay::OneCycle { pct_start, div_factor, final_div_factor }
            }
        };
        Schedule { warmup_steps, decay }
    }

    /// Steps of the warm-up in a run of so many; a share is rounded up, as in transformers.
    pub fn warmup_steps(&self, total_steps: u64) -> u64 {
        match self.warmup {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) => (total_steps as f64 * ratio).ceil() as u64,
        }
    }

    /// Whether a run that goes on for more steps than planned keeps the values that it has had.
    pub fn horizon(&self) -> Horizon {
        match self.warmup {
            Warmup::Ratio(ratio) if ratio > 0.0 => Horizon::Total,
            Warmup::Ratio(_) | Warmup::Steps(_) => self.schedule(1.0, 1).horizon(),
        }
    }

    /// What is wrong with it beside this learning rate.
    pub(super) fn problem(&self, learning_rate: f64) -> Option<Problem> {
        let (option, lowest) = match self.shape {
            Shape::CosineWithMinLr { min_lr: MinLr::Rate(rate), .. } => ("min_lr", rate),
            Shape::Polynomial { lr_end, .. } => ("lr_end", lr_end),
            _ => return None,
        };
        (lowest >= learning_rate).then(|| {
            let message =
                format!("`scheduler.{option}` = {lowest:e} is not below `optimizer.learning_rate` = {learning_rate:e}");
            Problem::error("out-of-range", self.span, message, "the rate would not fall")
        })
    }
}

impl Parameter for SchedulerParams {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let written = Written::read(node, reader)?;
        let (name, options) = written.name.options();
        only_options_of("schedule", name, options, node, reader);
        let warmup = match (written.warmup_steps, written.warmup_ratio) {
            (Some(_), Some(_)) => {
                let span = node.get("warmup_ratio").map_or(node.span, |node| node.span);
                let message = "`warmup_steps` and `warmup_ratio` both say how long the warm-up is";
                reader.problems.push(Problem::error("bad-value", span, message, "give one of them"));
                Warmup::Steps(0)
            }
            (None, Some(ratio)) => Warmup::Ratio(ratio),
            (steps, None) => Warmup::Steps(steps.unwrap_or(0)),
        };
        // What is wrong here keeps nothing else in the stage from being checked.
        Some(Self { warmup, shape: written.shape(node, reader), span: node.span })
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.shape.name().write_field("name", key);
        match self.warmup {
            _ if matches!(self.shape, Shape::OneCycle { .. }) => {}
            Warmup::Steps(steps) => steps.write_field("warmup_steps", key),
            Warmup::Ratio(ratio) => ratio.write_field("warmup_ratio", key),
        }
        match &self.shape {
            Shape::Constant | Shape::Linear => {}
            Shape::Cosine { num_cycles } | Shape::CosineWithRestarts { num_cycles } => {
                num_cycles.write_field("num_cycles", key);
            }
            Shape::CosineWithMinLr { num_cycles, min_lr } => {
                num_cycles.write_field("num_cycles", key);
                match min_lr {
                    MinLr::Rate(rate) => rate.write_field("min_lr", key),
                    MinLr::Share(share) => share.write_field("min_lr_rate", key),
                }
            }
            Shape::Polynomial { power, lr_end } => {
                power.write_field("power", key);
                lr_end.write_field("lr_end", key);
            }
            Shape::InverseSqrt { timescale } => timescale.write_field("timescale", key),
            Shape::WarmupStableDecay { num_decay_steps, min_lr_ratio } => {
                num_decay_steps.write_field("num_decay_steps", key);
                min_lr_ratio.write_field("min_lr_ratio", key);
            }
            Shape::OneCycle { pct_start, div_factor, final_div_factor } => {
                pct_start.write_field("pct_start", key);
                div_factor.write_field("div_factor", key);
                final_div_factor.write_field("final_div_factor", key);
            }
        }
    }

    fn schema() -> Json {
        Written::schema()
    }
}

/// Writes a value as a semantic field.
trait WriteField: Parameter {
    fn write_field(&self, name: &str, key: &mut KeyWriter<'_>) {
        key.field(name, Class::Semantic, |key| self.write_key(key));
    }
}

impl<T: Parameter> WriteField for T {}

impl Shape {
    fn name(&self) -> SchedulerName {
        match self {
            Self::Constant => SchedulerName::Constant,
            Self::Linear => SchedulerName::Linear,
            Self::Cosine { .. } => SchedulerName::Cosine,
            Self::CosineWithMinLr { .. } => SchedulerName::CosineWithMinLr,
            Self::CosineWithRestarts { .. } => SchedulerName::CosineWithRestarts,
            Self::Polynomial { .. } => SchedulerName::Polynomial,
            Self::InverseSqrt { .. } => SchedulerName::InverseSqrt,
            Self::WarmupStableDecay { .. } => SchedulerName::WarmupStableDecay,
            Self::OneCycle { .. } => SchedulerName::OneCycle,
        }
    }
}

impl SchedulerName {
    /// Its name in the file and its options.
    fn options(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Constant => ("constant", &["warmup_steps", "warmup_ratio"]),
            Self::Linear => ("linear", &["warmup_steps", "warmup_ratio"]),
            Self::Cosine => ("cosine", &["warmup_steps", "warmup_ratio", "num_cycles"]),
            Self::CosineWithMinLr => {
                ("cosine_with_min_lr", &["warmup_steps", "warmup_ratio", "num_cycles", "min_lr", "min_lr_rate"])
            }
            Self::CosineWithRestarts => ("cosine_with_restarts", &["warmup_steps", "warmup_ratio", "num_cycles"]),
            Self::Polynomial => ("polynomial", &["warmup_steps", "warmup_ratio", "power", "lr_end"]),
            Self::InverseSqrt => ("inverse_sqrt", &["warmup_steps", "warmup_ratio", "timescale"]),
            Self::WarmupStableDecay => {
                ("warmup_stable_decay", &["warmup_steps", "warmup_ratio", "num_decay_steps", "min_lr_ratio"])
            }
            Self::OneCycle => ("one_cycle", &["pct_start", "div_factor", "final_div_factor"]),
        }
    }
}

impl Written {
    /// The shape with its options, the defaults of transformers and torch filled in.
    fn shape(&self, node: &Node, reader: &mut Reader) -> Shape {
        let cycles = |default: f64| self.num_cycles.unwrap_or(default);
        match self.name {
            SchedulerName::Constant => Shape::Constant,
            SchedulerName::Linear => Shape::Linear,
            SchedulerName::Cosine => Shape::Cosine { num_cycles: cycles(0.5) },
            SchedulerName::CosineWithMinLr => {
                let min_lr = match (self.min_lr, self.min_lr_rate) {
                    (Some(rate), None) => MinLr::Rate(rate),
                    (None, Some(share)) => MinLr::Share(share),
                    (None, None) | (Some(_), Some(_)) => {
                        let message = "`cosine_with_min_lr` takes either `min_lr` or `min_lr_rate`";
                        reader.problems.push(
                            Problem::error("missing-key", node.span, message, "how low is it to fall?")
                                .with_help("such as `min_lr_rate: 0.1`: a tenth of the full learning rate"),
                        );
                        MinLr::Share(0.0)
                    }
                };
                Shape::CosineWithMinLr { num_cycles: cycles(0.5), min_lr }
            }
            SchedulerName::CosineWithRestarts => Shape::CosineWithRestarts { num_cycles: cycles(1.0) },
            SchedulerName::Polynomial => {
                Shape::Polynomial { power: self.power.unwrap_or(1.0), lr_end: self.lr_end.unwrap_or(1e-7) }
            }
            SchedulerName::InverseSqrt => Shape::InverseSqrt { timescale: self.timescale },
            SchedulerName::WarmupStableDecay => {
                if self.num_decay_steps.is_none() {
                    let message = "`warmup_stable_decay` needs `num_decay_steps`";
                    reader.problems.push(
                        Problem::error("missing-key", node.span, message, "when is it to fall?")
                            .with_help("a tenth to a fifth of all steps is usual"),
                    );
                }
                let num_decay_steps = self.num_decay_steps.unwrap_or(0);
                Shape::WarmupStableDecay { num_decay_steps, min_lr_ratio: self.min_lr_ratio.unwrap_or(0.0) }
            }
            SchedulerName::OneCycle => Shape::OneCycle {
                pct_start: self.pct_start.unwrap_or(0.3),
                div_factor: self.div_factor.unwrap_or(25.0),
                final_div_factor: self.final_div_factor.unwrap_or(1e4),
            },
        }
    }
}

#[cfg(test)]
mod tests;
