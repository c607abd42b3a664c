//! Checks every backward against differences of its forward, on every kernel set.

use std::sync::Arc;

use model::batch::Documents;
use model::blocks::Blocks;
use model::candle::Candle;
use model::cpu::Cpu;
use model::init::{Fill, fresh_tensor};
use model::loss::{CrossEntropy, Distillation, Divergence, TokenLoss};
use model::ops::{
    Activation, AttentionGradients, AttentionOperands, AttentionShape, Compute, LogitGradient, LossRows, NormWeight,
    Ops, RmsNorm, Rotation, Write,
};
use model::parameter::Trainability;
use model::peft::AdapterConfig;
use model::rope::{Rope, RopeScaling};
use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, TrainedTensor, Trainer};
use test_harness::test;

use crate::support;

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(2, Compute::F32).unwrap())
}

fn candle() -> Arc<Candle> {
    Arc::new(Candle::on_processor())
}

fn values(name: &str, count: usize) -> Vec<f32> {
    fresh_tensor(7, name, count, Fill::Normal(1.0))
}

/// Compares a gradient along a direction with the difference of the loss along it, extrapolated from two steps.
fn check(name: &str, gradient: &[f32], x: &[f32], step: f32, mut loss: impl FnMut(&[f32]) -> f64) {
    let direction = values(name, x.len());
    let moved = |step: f32| x.iter().zip(&direction).map(|(x, d)| x + step * d).collect::<Vec<f32>>();
    let mut difference = |step: f32| (loss(&moved(step)) - loss(&moved(-step))) / (2.0 * f64::from(step));
    let difference = (4.0 * difference(step / 2.0) - difference(step)) / 3.0;
    let along: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
    let size = gradient.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt();
    assert!(size > 0.0, "{name}: no gradient");
    assert!(
        (along - difference).abs() < 1e-2 * size + 1e-4,
        "{name}: {along} along, {difference} by difference, size {size}"
    );
}

/// The weighted sum of a tensor: a loss whose gradient is the weights.
fn weighted(values: &[f32], weights: &[f32]) -> f64 {
    values.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
}

#[test]
fn cpu_norm_rope_activation_and_loss() {
    rows(&*cpu());
}

#[test]
fn candle_norm_rope_activation_and_loss() {
    rows(&*candle());
}

fn rows<B: Ops>(ops: &B) {
    for weight_kind in [NormWeight::Plain, NormWeight::PlusOne] {
        for (columns, width) in [(21, 21), (21, 7)] {
            norm(ops, RmsNorm { eps: 1e-2, weight: weight_kind }, columns, width);
        }
    }
    for activation in [Activation::Silu, Activation::GeluTanh] {
        gated(ops, activation);
    }
    for soft_cap in [None, Some(2.0)] {
        token_losses(ops, soft_cap);
    }
    scaled_rows(ops);
    rope(ops);
}

fn norm<B: Ops>(ops: &B, norm: RmsNorm, columns: usize, width: usize) {
    let rows = 5;
    let (x, w, dy) = (values("x", rows * columns), values("w", width), values("dy", rows * columns));
    let forward = |x: &[f32], w: &[f32]| {
        let (x, w) = (ops.tensor(rows, columns, x).unwrap(), ops.tensor(1, width, w).unwrap());
        let (mut y, mut inverse_rms) = (B::Tensor::default(), B::Tensor::default());
        ops.norm(&x, &w, norm, &mut y, &mut inverse_rms).unwrap();
        (x, w, ops.read(&y).unwrap(), inverse_rms)
    };
    let (tx, tw, _, inverse_rms) = forward(&x, &w);
    let tdy = ops.tensor(rows, columns, &dy).unwrap();
    let (mut dx, mut dw) = (ops.tensor(rows, columns, &x).unwrap(), ops.zeros(1, width).unwrap());
    ops.norm_backward(&tx, &tw, norm, &inverse_rms, &tdy, Write::Add, &mut dx, Some(&mut dw)).unwrap();
    // What was there has to be there still.
    let dx: Vec<f32> = ops.read(&dx).unwrap().iter().zip(&x).map(|(sum, x)| sum - x).collect();
    check("norm x", &dx, &x, 1e-2, |x| weighted(&forward(x, &w).2, &dy));
    check("norm w", &ops.read(&dw).unwrap(), &w, 1e-2, |w| weighted(&forward(&x, w).2, &dy));
}

fn gated<B: Ops>(ops: &B, activation: Activation) {
    let (rows, columns) = (3, 19);
    let [gate, up, dy] = ["gate", "up", "dy"].map(|name| values(name, rows * columns));
    let tensor = |values: &[f32]| ops.tensor(rows, columns, values).unwrap();
    let forward = |gate: &[f32], up: &[f32]| {
        let mut y = B::Tensor::default();
        ops.gated(activation, &tensor(gate), &tensor(up), &mut y).unwrap();
        weighted(&ops.read(&y).unwrap(), &dy)
    };
    let (mut dgate, mut dup) = (B::Tensor::default(), B::Tensor::default());
    ops.gated_backward(activation, &tensor(&gate), &tensor(&up), &tensor(&dy), &mut dgate, &mut dup).unwrap();
    check("gate", &ops.read(&dgate).unwrap(), &gate, 1e-2, |gate| forward(gate, &up));
    check("up", &ops.read(&dup).unwrap(), &up, 1e-2, |up| forward(&gate, up));
}

/// Every loss of targets, with a weight per row, against finite differences.
fn token_losses<B: Ops>(ops: &B, soft_cap: Option<f32>) {
    let (rows, columns) = (4, 35);
    let (logits, targets) = (values("logits", rows * columns), [3, 34, 0, 17]);
    let teacher = ops.tensor(rows, columns, &values("teacher", rows * columns)).unwrap();
    let weights = [1.0, 0.5, 2.0, 0.25];
    let distillation = |divergence| Distillation { temperature: 1.5, alpha: 0.75, divergence };
    let losses: [&dyn TokenLoss; 5] = [
        &CrossEntropy { label_smoothing: 0.0 },
        &CrossEntropy { label_smoothing: 0.2 },
        &distillation(Divergence::ForwardKl),
        &distillation(Divergence::ReverseKl),
        &distillation(Divergence::JensenShannon),
    ];
    for loss in losses {
        let of = LossRows { targets: &targets, weights: Some(&weights), loss, teacher: Some(&teacher), soft_cap };
        let run = |logits: &[f32], gradient| {
            let mut tensor = ops.tensor(rows, columns, logits).unwrap();
            let mut scores = Vec::new();
            ops.token_loss(&mut tensor, &of, gradient, &mut scores).unwrap();
            let weighted = scores.iter().zip(weights).map(|(score, weight)| f64::from(weight) * f64::from(score.loss));
            (weighted.sum::<f64>(), ops.read(&tensor).unwrap())
        };
        let (_, gradient) = run(&logits, LogitGradient::InPlace { scale: 1.0 });
        check(&format!("logits of {loss:?}"), &gradient, &logits, 1e-2, |logits| run(logits, LogitGradient::Skip).0);
    }
}

fn scaled_rows<B: Ops>(ops: &B) {
    let mut x = ops.tensor(3, 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
    ops.scale_rows(&mut x, &[2.0, 0.0, -1.0]).unwrap();
    assert_eq!(ops.read(&x).unwrap(), [2.0, 4.0, 0.0, 0.0, -5.0, -6.0]);
}

fn rope<B: Ops>(ops: &B) {
    let rope = Rope { theta: 100.0, scaling: RopeScaling::Default, rotary_dims: 6, head_dim: 8 };
    let tables = rope.tables(ops, 10).unwrap();
    let positions = [0, 1, 9, 0, 4];
    let x = values("x", 5 * 24);
    let mut tensor = ops.tensor(5, 24, &x).unwrap();
    ops.rope(&mut tensor, &tables, &positions, Rotation::Forward).unwrap();
    let turned = ops.read(&tensor).unwrap();
    // Elements beyond the turning ones stay; lengths are kept.
    assert_eq!((turned[6], turned[31]), (x[6], x[31]));
    assert!((weighted(&turned, &turned) - weighted(&x, &x)).abs() < 1e-4);
    assert_ne!(turned[24], x[24]);
    ops.rope(&mut tensor, &tables, &positions, Rotation::Backward).unwrap();
    assert!(ops.read(&tensor).unwrap().iter().zip(&x).all(|(back, x)| (back - x).abs() < 1e-5));
}

#[test]
fn cpu_attention() {
    attention(&*cpu());
}

#[test]
fn candle_attention() {
    attention(&*candle());
}

fn attention<B: Ops>(ops: &B) {
    // One document longer than a block of queries.
    let documents = Documents::new(&[3, 70, 1, 5]);
    let rows = documents.rows();
    for (window, soft_cap) in [(None, None), (Some(4), None), (None, Some(1.5)), (Some(66), Some(1.5))] {
        let shape = AttentionShape {
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 5,
            scale: 0.4,
            window,
            soft_cap,
        };
        let [q, dy] = ["q", "dy"].map(|name| values(name, rows * 20));
        let [k, v] = ["k", "v"].map(|name| values(name, rows * 10));
        let forward = |[q, k, v]: [&[f32]; 3]| {
            let [q, k, v] = [(q, 20), (k, 10), (v, 10)].map(|(x, columns)| ops.tensor(rows, columns, x).unwrap());
            let (mut y, mut logsumexp) = (B::Tensor::default(), B::Tensor::default());
            ops.attention(&q, &k, &v, &documents, &shape, &mut y, &mut logsumexp).unwrap();
            [q, k, v, y, logsumexp]
        };
        let loss = |operands: [&[f32]; 3]| weighted(&ops.read(&forward(operands)[3]).unwrap(), &dy);
        let [tq, tk, tv, ty, logsumexp] = forward([&q, &k, &v]);
        let saved = AttentionOperands { q: &tq, k: &tk, v: &tv, y: &ty, logsumexp: &logsumexp };
        let [mut dq, mut dk, mut dv] = <[B::Tensor; 3]>::default();
        let gradients = AttentionGradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        let tdy = ops.tensor(rows, 20, &dy).unwrap();
        ops.attention_backward(saved, &tdy, &documents, &shape, gradients).unwrap();
        let name = |of: &str| format!("{of}, window {window:?}, cap {soft_cap:?}");
        check(&name("q"), &ops.read(&dq).unwrap(), &q, 1e-3, |q| loss([q, &k, &v]));
        check(&name("k"), &ops.read(&dk).unwrap(), &k, 1e-3, |k| loss([&q, k, &v]));
        check(&name("v"), &ops.read(&dv).unwrap(), &v, 1e-3, |v| loss([&q, &k, v]));
    }
}

#[test]
fn cpu_every_weight_bias_norm_and_embedding() {
    weights(&cpu());
}

#[test]
fn candle_every_weight_bias_norm_and_embedding() {
    weights(&candle());
}

fn weights<B: Blocks>(ops: &Arc<B>) {
    for (shape, _) in support::SHAPES {
        every_parameter(
            shape,
            Trainer::new(support::decoder(ops, shape, Trainability::Trainable), options(Trained::Weights)).unwrap(),
        );
    }
}

#[test]
fn cpu_every_adapter() {
    adapters(&cpu());
}

#[test]
fn candle_every_adapter() {
    adapters(&candle());
}

/// Each projection alone, so that the lowest trained block is each of them in turn, and all together.
fn adapters<B: Blocks>(ops: &Arc<B>) {
    for (shape, _) in support::SHAPES {
        let mut modules: Vec<String> = support::decoder(ops, shape, Trainability::Frozen)
            .projections()
            .iter()
            .map(|p| p.module().to_owned())
            .collect();
        modules.sort();
        modules.dedup();
        let alone = modules.iter().map(|module| vec![module.clone()]);
        for targets in alone.chain([modules.clone()]) {
            let mut decoder = support::decoder(ops, shape, Trainability::Frozen);
            let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(3, 5.0, targets.clone()), 4).unwrap();
            for (name, module) in &mut adapter.modules {
                module.lora_b = fresh_tensor(5, name, module.lora_b.len(), Fill::Normal(0.3));
            }
            decoder.attach(&adapter).unwrap();
            every_parameter(&format!("{shape} {targets:?}"), Trainer::new(decoder, options(Trained::Adapter)).unwrap());
        }
    }
}

fn options(trained: Trained) -> TrainOptions {
    TrainOptions::new(trained, Optimizer::AdamW(AdamW::default()))
}

/// Moves each trained tensor along a direction and compares the loss with its gradient.
fn every_parameter<B: Blocks>(shape: &str, mut trainer: Trainer<B>) {
    let batch = support::documents(3, &[7, 1, 12, 4]);
    let report = trainer.accumulate(&batch).unwrap();
    assert!(report.target_tokens > 8);
    let gradients = trainer.gradients().unwrap();
    let state = trainer.state().unwrap();
    for (index, (name, gradient)) in gradients.iter().enumerate() {
        assert_eq!(*name, state[index].name);
        let mut loss = |value: &[f32]| {
            let mut moved = state.clone();
            moved[index] = TrainedTensor { value: value.to_vec(), ..moved[index].clone() };
            trainer.restore(0, moved).unwrap();
            let scores = trainer.decoder_mut().score(&batch).unwrap();
            scores.iter().map(|score| f64::from(score.nll)).sum::<f64>() / scores.len() as f64
        };
        check(&format!("{shape}: {name}"), gradient, &state[index].value, 2e-3, &mut loss);
    }
}
