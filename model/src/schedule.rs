//! Learning-rate schedules: the factor on the base learning rate at each optimizer step.
//!
//! Every schedule is a function of the step and the total, with nothing to carry, so resuming needs the step alone.
//! The formulas are those of transformers (`optimization.py`) and torch (`lr_scheduler.py`), so that a run can be
//! compared with theirs.

use std::f64::consts::PI;

/// How the learning rate goes on after its warm-up.
///
/// Below, `s` is the step counted from 0, `W` the warm-up steps, `T` the total, and `p = (s − W) / max(1, T − W)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// Stays at 1. Source: `get_constant_schedule_with_warmup`.
    Constant,
    /// `max(0, 1 − p)`. Source: `get_linear_schedule_with_warmup`.
    Linear,
    /// `max(0, ½(1 + cos(2π·cycles·p)))`. Source: `get_cosine_schedule_with_warmup`.
    Cosine {
        /// Waves in the run; one half, the usual value, falls once from 1 to 0.
        cycles: f64,
    },
    /// `max(0, r + (1 − r)·½(1 + cos(2π·cycles·p)))`. Source: `get_cosine_with_min_lr_schedule_with_warmup`.
    CosineWithMinLr {
        /// Waves in the run; one half, the usual value, falls once from 1 to the minimum.
        cycles: f64,
        /// The least factor, `r`.
        min_lr_rate: f64,
    },
    /// `½(1 + cos(π·(cycles·p mod 1)))`, 0 from the end on. Source:
    /// `get_cosine_with_hard_restarts_schedule_with_warmup`.
    CosineWithRestarts {
        /// How often the rate falls from 1 to 0.
        cycles: f64,
    },
    /// `(1 − e)(1 − p)^power + e`, `e` from the end on. Source: `get_polynomial_decay_schedule_with_warmup`.
    Polynomial {
        /// The exponent; 1 is linear.
        power: f64,
        /// The factor at the end, `e` (there `lr_end / lr_init`).
        end_factor: f64,
    },
    /// `sqrt(t / (s − W + t))`, with `t = timescale`. Source: `get_inverse_sqrt_schedule`.
    InverseSqrt {
        /// Steps after which the rate has fallen to `1/√2`; transformers takes `W`, or 10000 without a warm-up.
        timescale: f64,
    },
    /// Stays at 1 and falls along half a cosine to a minimum over the last steps; the warm-up, too, begins at the
    /// minimum. Source: `get_wsd_schedule`, its default forms.
    WarmupStableDecay {
        /// Steps of the fall, at the end of the run.
        decay_steps: u64,
        /// The factor at the end.
        min_lr_rate: f64,
    },
    /// Smith's one cycle, which has a warm-up of its own: along half cosines from `1/div_factor` to 1 at step
    /// `pct_start·T − 1`, then to `1/(div_factor·final_div_factor)` at step `T − 1`. Source:
    /// `torch.optim.lr_scheduler.OneCycleLR`.
    ///
    /// torch also moves Adam's first beta unless told `cycle_momentum=False`; we do not.
    OneCycle {
        /// Share of the run in which the rate rises.
        pct_start: f64,
        /// The greatest rate over the first.
        div_factor: f64,
        /// The first rate over the last.
        final_div_factor: f64,
    },
}

/// Whether a schedule's values depend on the length of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Horizon {
    /// The total does not enter: a longer run continues a shorter one.
    Open,
    /// The total enters: another total is another schedule from the first step.
    Total,
}

/// A learning-rate schedule: a linear warm-up from 0, then a [`Decay`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Steps of the warm-up, `W`: step `s < W` has the factor `s / W`.
    /// `OneCycle` does not use it.
    pub warmup_steps: u64,
    /// What follows.
    pub decay: Decay,
}

impl Schedule {
    /// The factor on the base learning rate at `step` (from 0) of a run of `total` steps.
    pub fn factor(&self, step: u64, total: u64) -> f64 {
        if let Decay::OneCycle { pct_start, div_factor, final_div_factor } = self.decay {
            return one_cycle(step as f64, total as f64, pct_start, div_factor, final_div_factor);
        }
        let warmup = self.warmup_steps;
        if step < warmup {
            let risen = step as f64 / warmup as f64;
            return match self.decay {
                Decay::WarmupStableDecay { min_lr_rate, .. } => risen * (1.0 - min_lr_rate) + min_lr_rate,
                _ => risen,
            };
        }
        let after = (step - warmup) as f64;
        let progress = after / total.saturating_sub(warmup).max(1) as f64;
        match self.decay {
            Decay::Constant => 1.0,
            // Not `1 − p`: this is the order of operations of the reference.
            Decay::Linear => total.saturating_sub(step) as f64 / total.saturating_sub(warmup).max(1) as f64,
            Decay::Cosine { cycles } => wave(cycles, progress).max(0.0),
            Decay::CosineWithMinLr { cycles, min_lr_rate } => {
                (wave(cycles, progress) * (1.0 - min_lr_rate) + min_lr_rate).max(0.0)
            }
            Decay::CosineWithRestarts { .. } if progress >= 1.0 => 0.0,
            Decay::CosineWithRestarts { cycles } => (0.5 * (1.0 + (PI * (cycles * progress).fract()).cos())).max(0.0),
            Decay::Polynomial { end_factor, .. } if step > total => end_factor,
            Decay::Polynomial { power, end_factor } => {
                (1.0 - end_factor) * (1.0 - progress).max(0.0).powf(power) + end_factor
            }
            Decay::InverseSqrt { timescale } => 1.0 / ((after + timescale) / timescale).sqrt(),
            Decay::WarmupStableDecay { decay_steps, min_lr_rate } => {
                let decayed = (step + decay_steps).saturating_sub(total).min(decay_steps);
                let progress = decayed as f64 / decay_steps.max(1) as f64;
                wave(0.5, progress) * (1.0 - min_lr_rate) + min_lr_rate
            }
            Decay::OneCycle { .. } => unreachable!("handled above"),
        }
    }

    /// Whether a run that goes on for more steps than planned keeps the values it has had.
    pub fn horizon(&self) -> Horizon {
        match self.decay {
            Decay::Constant | Decay::InverseSqrt { .. } => Horizon::Open,
            Decay::Linear
            | Decay::Cosine { .. }
            | Decay::CosineWithMinLr { .. }
            | Decay::CosineWithRestarts { .. }
            | Decay::Polynomial { .. }
            | Decay::WarmupStableDecay { .. }
            | Decay::OneCycle { .. } => Horizon::Total,
        }
    }

    /// The greatest factor that a run of `total` steps meets: below 1 where the warm-up is longer than the run.
    pub fn peak(&self, total: u64) -> f64 {
        (0..total).map(|step| self.factor(step, total)).fold(0.0, f64::max)
    }
}

fn wave(cycles: f64, progress: f64) -> f64 {
    0.5 * (1.0 + (PI * cycles * 2.0 * progress).cos())
}

fn one_cycle(step: f64, total: f64, pct_start: f64, div_factor: f64, final_div_factor: f64) -> f64 {
    let first = 1.0 / div_factor;
    let last = first / final_div_factor;
    let (peak, end) = (pct_start * total - 1.0, total - 1.0);
    let anneal = |from: f64, to: f64, share: f64| to + (from - to) / 2.0 * (1.0 + (PI * share).cos());
    // A rise of one step is at its top at once; torch divides by zero there.
    if step <= peak && peak > 0.0 {
        return anneal(first, 1.0, step / peak);
    }
    anneal(1.0, last, ((step - peak) / (end - peak)).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/schedules.json"));
    const GOLDEN_MORE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/schedules_more.json"));

    fn assert_golden(golden: &str, name: &str, schedule: Schedule, total: u64) {
        let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
        let expected: Vec<f64> = serde_json::from_value(golden[name].clone()).unwrap();
        assert!(expected.len() >= 20);
        for (step, expected) in expected.into_iter().enumerate() {
            let factor = schedule.factor(step as u64, total);
            assert!((factor - expected).abs() < 1e-12, "{name} at {step}: {factor} where {expected} is expected");
        }
    }

    fn with_warmup(warmup_steps: u64, decay: Decay) -> Schedule {
        Schedule { warmup_steps, decay }
    }

    #[test]
    fn schedules_equal_those_of_transformers_and_torch() {
        assert_golden(GOLDEN, "constant_with_warmup(warmup=5)", with_warmup(5, Decay::Constant), 20);
        assert_golden(GOLDEN, "linear_with_warmup(warmup=5)", with_warmup(5, Decay::Linear), 20);
        let cosine = Decay::Cosine { cycles: 0.5 };
        assert_golden(GOLDEN, "cosine_with_warmup(warmup=5,cycles=0.5)", with_warmup(5, cosine), 20);
        assert_golden(GOLDEN, "cosine_with_warmup(warmup=0,cycles=0.5)", with_warmup(0, cosine), 20);
        let with_min = Decay::CosineWithMinLr { cycles: 0.5, min_lr_rate: 0.1 };
        assert_golden(GOLDEN, "cosine_with_min_lr(warmup=5,min_lr_rate=0.1)", with_warmup(5, with_min), 20);
        let one_cycle = Decay::OneCycle { pct_start: 0.3, div_factor: 25.0, final_div_factor: 1e4 };
        let name = "one_cycle(max_lr=1,pct_start=0.3,div_factor=25,final_div_factor=1e4,cos)";
        assert_golden(GOLDEN, name, with_warmup(0, one_cycle), 21);
    }

    #[test]
    fn the_rarer_schedules_equal_those_of_transformers_to_beyond_the_end() {
        for (name, decay) in [
            ("cosine_with_hard_restarts(warmup=5,cycles=2)", Decay::CosineWithRestarts { cycles: 2.0 }),
            ("polynomial(warmup=5,power=2,lr_end=0.1)", Decay::Polynomial { power: 2.0, end_factor: 0.1 }),
            ("inverse_sqrt(warmup=5)", Decay::InverseSqrt { timescale: 5.0 }),
            ("wsd(warmup=5,decay=8,min_lr_ratio=0.1)", Decay::WarmupStableDecay { decay_steps: 8, min_lr_rate: 0.1 }),
            ("linear(warmup=5)", Decay::Linear),
            ("cosine(warmup=5)", Decay::Cosine { cycles: 0.5 }),
        ] {
            assert_golden(GOLDEN_MORE, name, with_warmup(5, decay), 20);
        }
    }

    /// Points of torchtune's cosine with warm-up.
    #[test]
    fn a_long_cosine_has_its_known_points() {
        let cosine = with_warmup(100, Decay::Cosine { cycles: 0.5 });
        for (step, expected) in
            [(0, 0.0), (1, 0.01), (50, 0.5), (100, 1.0), (325, 0.853553), (550, 0.5), (775, 0.146447)]
        {
            assert!((cosine.factor(step, 1000) - expected).abs() < 1e-6, "step {step}");
        }
    }

    #[test]
    fn a_rise_of_one_step_begins_at_the_top() {
        let one_cycle = with_warmup(0, Decay::OneCycle { pct_start: 0.25, div_factor: 25.0, final_div_factor: 1e4 });
        assert_eq!(one_cycle.factor(0, 4), 1.0);
        assert!((1..4).all(|step| one_cycle.factor(step, 4) < 1.0));
    }

    #[test]
    fn a_warm_up_longer_than_the_run_never_reaches_the_rate() {
        let schedule = with_warmup(100, Decay::Cosine { cycles: 0.5 });
        assert!((schedule.peak(30) - 0.29).abs() < 1e-12);
        assert!((schedule.peak(1000) - 1.0).abs() < 1e-12);
        assert_eq!(with_warmup(100, Decay::Linear).factor(5, 0), 0.05);
    }
}
