//! The factor on the loss: grows while gradients stay finite, backs off when they overflow.

use serde::{Deserialize, Serialize};

use super::LossScaling;

/// Overflows in a row at the smallest factor after which no smaller one can be hoped for.
const HOPELESS: u64 = 8;

/// The factor on the loss and how it came to be where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    options: LossScaling,
    state: LossScalerState,
}

/// What of a [`LossScaler`] a resume needs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScalerState {
    /// The factor in use. In f32, as torch keeps it.
    pub scale: f32,
    /// Steps without an overflow since it last changed.
    pub growth_tracker: u64,
    /// Steps skipped in a row until now.
    pub skipped: u64,
    /// How many of those were at the smallest factor.
    pub skipped_at_min: u64,
}

impl LossScaler {
    /// A scaler before its first step.
    pub fn new(options: LossScaling) -> Self {
        let state =
            LossScalerState { scale: options.init_scale as f32, growth_tracker: 0, skipped: 0, skipped_at_min: 0 };
        Self { options, state }
    }

    /// The factor in use.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }

    /// Its state, to be saved.
    pub fn state(&self) -> LossScalerState {
        self.state
    }

    /// Takes up a saved state.
    pub fn restore(&mut self, state: LossScalerState) {
        self.state = state;
    }

    /// After a step whose gradients were all finite.
    pub(super) fn after_step(&mut self) {
        (self.state.skipped, self.state.skipped_at_min) = (0, 0);
        self.state.growth_tracker += 1;
        if self.state.growth_tracker < self.options.growth_interval {
            return;
        }
        self.state.growth_tracker = 0;
        let grown = (f64::from(self.state.scale) * self.options.growth_factor) as f32;
        if grown.is_finite() {
            self.state.scale = grown;
        }
    }

    /// After gradients that overflowed, which are not used.
    pub(super) fn after_overflow(&mut self) {
        let lowest = self.options.min_scale as f32;
        self.state.skipped += 1;
        if self.state.scale <= lowest {
            self.state.skipped_at_min += 1;
        }
        self.state.growth_tracker = 0;
        let smaller = (f64::from(self.state.scale) * self.options.backoff_factor) as f32;
        self.state.scale = smaller.max(lowest.min(self.state.scale));
    }

    /// Whether so many steps were skipped at the smallest factor that the factor is not what is at fault.
    pub(super) fn is_hopeless(&self) -> bool {
        self.state.skipped_at_min >= HOPELESS
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/optimizers.json"));

    #[test]
    fn the_factor_follows_torchs_grad_scaler() {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        let cases = golden["grad_scaler"].as_array().unwrap();
        assert!(cases.len() >= 3);
        for case in cases {
            let setting = |name: &str| case["settings"][name].as_f64().unwrap();
            let mut scaler = LossScaler::new(LossScaling {
                init_scale: setting("init_scale"),
                growth_factor: setting("growth_factor"),
                backoff_factor: setting("backoff_factor"),
                growth_interval: setting("growth_interval") as u64,
                min_scale: 1.0,
            });
            for (step, overflow) in case["overflows"].as_array().unwrap().iter().enumerate() {
                match overflow.as_bool().unwrap() {
                    true => scaler.after_overflow(),
                    false => scaler.after_step(),
                }
                assert_eq!(case["skipped"][step], *overflow);
                assert_eq!(case["scale"][step], f64::from(scaler.scale()), "step {step} of {case}");
                assert_eq!(case["growth_tracker"][step], scaler.state().growth_tracker, "step {step} of {case}");
            }
        }
    }

    #[test]
    fn the_factor_stays_above_its_least_and_gives_up_there() {
        let mut scaler = LossScaler::new(LossScaling { init_scale: 8.0, min_scale: 2.0, ..LossScaling::default() });
        let mut overflows = 0;
        while !scaler.is_hopeless() {
            scaler.after_overflow();
            overflows += 1;
            assert!(scaler.scale() >= 2.0);
        }
        // 8 → 4 → 2, and eight more at 2.
        assert_eq!((overflows, scaler.state().skipped), (2 + HOPELESS, 10));
        // One good step, and there is hope again.
        scaler.after_step();
        assert!(!scaler.is_hopeless());
    }

    #[test]
    fn a_state_survives_its_json_form_to_the_bit() {
        let mut scaler = LossScaler::new(LossScaling { init_scale: 0.1, min_scale: 0.0, ..LossScaling::default() });
        scaler.after_overflow();
        scaler.after_step();
        let text = serde_json::to_string(&scaler.state()).unwrap();
        assert_eq!(serde_json::from_str::<LossScalerState>(&text).unwrap(), scaler.state());
    }
}
