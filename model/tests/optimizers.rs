//! Compares the optimizers of every kernel set with torch's, step by step.

#![allow(clippy::unwrap_used, reason = "tests")]

use model::candle::Candle;
use model::cpu::{Cpu, InstructionSet};
use model::ops::{AdamWStep, Compute, Ops, SgdStep};
use serde::Deserialize;

const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/optimizers.json"));

/// What `tests/reference/make_golden_optimizers.py` writes.
#[derive(Deserialize)]
struct Golden {
    optimizers: Optimizers,
}

#[derive(Deserialize)]
struct Optimizers {
    start: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    learning_rates: Vec<f64>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    settings: Settings,
    values: Vec<Vec<f32>>,
    exp_avg: Vec<Vec<f32>>,
    exp_avg_sq: Vec<Vec<f32>>,
}

/// AdamW's or SGD's.
#[derive(Deserialize)]
struct Settings {
    betas: Option<(f64, f64)>,
    #[serde(default)]
    eps: f64,
    weight_decay: f64,
    #[serde(default)]
    momentum: f64,
    #[serde(default)]
    dampening: f64,
    #[serde(default)]
    nesterov: bool,
}

#[test]
fn every_kernel_set_steps_as_torch_does() {
    for set in InstructionSet::ALL {
        match Cpu::with_instructions(1, Compute::F32, set) {
            Ok(ops) => steps_as_torch_does(&ops),
            Err(_) => eprintln!("skipped: this machine has no {} instructions", set.name()),
        }
    }
    steps_as_torch_does(&Candle::on_processor());
}

fn steps_as_torch_does<B: Ops>(ops: &B) {
    let Golden { optimizers } = serde_json::from_str(GOLDEN).unwrap();
    let size = optimizers.start.len();
    assert!(optimizers.cases.len() >= 7 && optimizers.gradients.len() == 10);
    for case in &optimizers.cases {
        let has_second = case.settings.betas.is_some();
        let has_first = has_second || case.settings.momentum != 0.0;
        let moment = |kept: bool| if kept { ops.zeros(1, size).unwrap() } else { B::Tensor::default() };
        let mut value = ops.tensor(1, size, &optimizers.start).unwrap();
        let (mut first, mut second) = (moment(has_first), moment(has_second));
        for (index, (gradient, &learning_rate)) in
            optimizers.gradients.iter().zip(&optimizers.learning_rates).enumerate()
        {
            // Half of it, with a factor of two: the factor has to act before everything else.
            let half: Vec<f32> = gradient.iter().map(|value| value / 2.0).collect();
            let gradient = ops.tensor(1, size, &half).unwrap();
            let (step, gradient_scale) = (index as u64 + 1, 2.0);
            let Settings { betas, eps, weight_decay, momentum, dampening, nesterov } = case.settings;
            match betas {
                Some(betas) => {
                    let adamw = AdamWStep { learning_rate, betas, eps, weight_decay, step, gradient_scale };
                    ops.adamw(&adamw, &mut value, &gradient, &mut first, &mut second).unwrap();
                }
                None => {
                    let sgd =
                        SgdStep { learning_rate, momentum, dampening, nesterov, weight_decay, step, gradient_scale };
                    ops.sgd(&sgd, &mut value, &gradient, &mut first).unwrap();
                }
            }
            for (what, tensor, expected) in [
                ("value", &value, &case.values[index]),
                ("exp_avg", &first, &case.exp_avg[index]),
                ("exp_avg_sq", &second, &case.exp_avg_sq[index]),
            ] {
                let found = ops.read(tensor).unwrap();
                let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                let close = found.len() == expected.len()
                    && found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-6 * largest);
                let place = format!("{}: {} in step {step}, {what}", ops.describe(), case.name);
                assert!(close, "{place}: {found:?} where {expected:?} is expected");
            }
        }
    }
}
