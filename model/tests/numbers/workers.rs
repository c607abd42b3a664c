//! Several workers learn what one does: they differ in the order of sums and in nothing else.

use std::sync::Arc;

use model::blocks::Blocks;
use model::candle::Candle;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::ops::{Compute, Ops};
use model::optimizer::MomentDtype;
use model::parameter::Trainability;
use model::peft::AdapterConfig;
use model::trainer::{
    AdamW, Collective, Optimizer, Sgd, StepReport, TrainError, TrainOptions, Trained, TrainedTensor, Trainer,
};
use test_harness::test;

use crate::in_process::{workers, workers_with_devices};
use crate::support;

const ADAMW: Optimizer =
    Optimizer::AdamW(AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.1, state_dtype: MomentDtype::F32 });
const SGD: Optimizer = Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.0, nesterov: false, weight_decay: 0.0 });

fn decoder(what: Trained, seed: u64) -> Decoder<Cpu> {
    decoder_on(Cpu::new(1, Compute::F32).unwrap(), what, seed)
}

fn decoder_on<B: Blocks>(ops: B, what: Trained, seed: u64) -> Decoder<B> {
    let ops = Arc::new(ops);
    let keep = if what == Trained::Adapter { Trainability::Frozen } else { Trainability::Trainable };
    let mut decoder = support::decoder(&ops, "llama", keep);
    if what == Trained::Adapter {
        let config = AdapterConfig::new(2, 4.0, ["q_proj", "v_proj", "down_proj"].map(str::to_owned).to_vec());
        let mut adapter = decoder.fresh_adapter(&config, seed).unwrap();
        for (name, module) in &mut adapter.modules {
            module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.1));
        }
        decoder.attach(&adapter).unwrap();
    }
    decoder
}

/// Five steps of `rows` rows each, which go around among the workers.
fn train(
    options: TrainOptions,
    rows: u32,
    rank: usize,
    collective: Box<dyn Collective>,
) -> (Vec<StepReport>, Vec<TrainedTensor>) {
    train_on(Cpu::new(1, Compute::F32).unwrap(), options, rows, rank, collective)
}

fn train_on<B: Blocks>(
    ops: B,
    options: TrainOptions,
    rows: u32,
    rank: usize,
    collective: Box<dyn Collective>,
) -> (Vec<StepReport>, Vec<TrainedTensor>) {
    let size = collective.size();
    let mut trainer = Trainer::new(decoder_on(ops, options.trained, 9), options).unwrap().together(collective);
    let reports = (0..5).map(|step| {
        for row in (0..rows).skip(rank).step_by(size) {
            trainer.accumulate(&support::documents(step * rows + row, &[19 + row as usize, 11])).unwrap();
        }
        trainer.step(1e-3).unwrap()
    });
    let reports = reports.collect();
    trainer.check_frozen().unwrap();
    (reports, trainer.state().unwrap())
}

#[test]
fn one_two_and_four_workers_learn_the_same() {
    for (trained, optimizer, max_grad_norm, rows) in [
        (Trained::Adapter, ADAMW, Some(0.5), 8),
        (Trained::Adapter, SGD, None, 8),
        (Trained::Weights, ADAMW, Some(0.5), 8),
        // Fewer than workers.
        (Trained::Adapter, ADAMW, None, 3),
    ] {
        let options = TrainOptions { max_grad_norm, ..TrainOptions::new(trained, optimizer) };
        let alone = workers(1, |rank, collective| train(options, rows, rank, collective)).remove(0);
        for size in [2, 4] {
            let found = workers(size, |rank, collective| train(options, rows, rank, collective));
            for (reports, state) in &found {
                assert_eq!((reports, state), (&found[0].0, &found[0].1), "workers of {size} differ");
            }
            let (reports, state) = &found[0];
            for (found, expected) in reports.iter().zip(&alone.0) {
                assert_eq!(found.target_tokens, expected.target_tokens);
                assert!((found.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{found:?} {expected:?}");
            }
            for (found, expected) in state.iter().zip(&alone.1) {
                let largest = expected.value.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                let furthest = found.value.iter().zip(&expected.value).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(furthest <= 1e-5 * largest, "{size}: {}: {furthest} of {largest}", found.name);
            }
        }
    }
}

#[test]
fn sums_on_devices_are_those_in_host_memory() {
    for (trained, rows) in [(Trained::Adapter, 8), (Trained::Weights, 8), (Trained::Adapter, 2)] {
        let options = TrainOptions { max_grad_norm: Some(0.5), ..TrainOptions::new(trained, ADAMW) };
        let in_memory =
            workers(3, |rank, collective| train_on(Candle::on_processor(), options, rows, rank, collective));
        let on_devices = workers_with_devices(3, |rank, collective, device| {
            let ops = Candle::on_processor().adding_up_by(device);
            assert!(ops.describe().ends_with("f32, gradients added up by threads"), "{}", ops.describe());
            train_on(ops, options, rows, rank, collective)
        });
        assert!(on_devices == in_memory, "{trained:?}, {rows} rows");
    }
}

#[test]
fn a_worker_that_holds_something_else_is_named_before_the_first_update() {
    let options = TrainOptions::new(Trained::Adapter, ADAMW);
    let errors = workers(3, |rank, collective| {
        let seed = if rank == 2 { 10 } else { 9 };
        let mut trainer = Trainer::new(decoder(Trained::Adapter, seed), options).unwrap().together(collective);
        trainer.accumulate(&support::documents(rank as u32, &[7])).unwrap();
        trainer.step(1e-3).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, TrainError::WorkersDiffer { rank: 2, step: 1 }), "{error}");
    }
}

#[test]
fn a_step_without_a_target_is_one_for_every_worker() {
    let options = TrainOptions::new(Trained::Adapter, ADAMW);
    let errors = workers(2, |_, collective| {
        let mut trainer = Trainer::new(decoder(Trained::Adapter, 9), options).unwrap().together(collective);
        trainer.step(1e-3).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, TrainError::NoTargets { step: 1 })));
}
