//! Computing in bf16: how near to f32 it stays, and that its results depend on nothing that they should not.

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::config::Config;
use model::cpu::{Cpu, InstructionSet};
use model::decoder::Decoder;
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::AdapterConfig;
use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, Trainer};
use test_harness::{Unmet, test};

use crate::support::{self, bits, cpu_with};

/// Logits in bf16 are within this share of the largest one of those in f32. Rounding an operand moves it by at most 2⁻⁹
/// of itself; the rest is what two layers make of that.
const LOGITS: f32 = 0.04;
/// No loss in a run of training is further than this from that of the run in f32, in nats.
const LOSS: f64 = 1e-2;

fn cpu(threads: usize, compute: Compute) -> Arc<Cpu> {
    Arc::new(Cpu::new(threads, compute).unwrap())
}

#[test(each = InstructionSet::ALL)]
fn logits_of_every_family_stay_near_those_in_f32(set: InstructionSet) -> Result<(), Unmet> {
    stay_near_those_in_f32(&Arc::new(cpu_with(2, Compute::Bf16, set)?));
    Ok(())
}

#[test]
fn logits_of_candle_stay_near_those_in_f32() {
    stay_near_those_in_f32(&Arc::new(Candle::new(candle_core::Device::Cpu, Compute::Bf16)));
}

fn stay_near_those_in_f32<B: Blocks>(ops: &Arc<B>) {
    let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden"));
    let mut families = 0;
    for family in std::fs::read_dir(golden).unwrap().map(|entry| entry.unwrap().path()) {
        if !family.join("model.safetensors").exists() || Config::read(&family).is_err() {
            continue;
        }
        families += 1;
        let expected = logits(&cpu(2, Compute::F32), &family);
        let largest = expected.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
        let found = logits(ops, &family);
        let furthest = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let share = furthest / largest;
        assert!(share > 0.0 && share <= LOGITS, "{}: {share:.1e} of the largest logit", family.display());
    }
    assert!(families >= 8);
}

fn logits<B: Blocks>(ops: &Arc<B>, family: &Path) -> Vec<f32> {
    let mut decoder = Decoder::load(Arc::clone(ops), family, Trainability::Frozen).unwrap();
    decoder.logits(&support::documents(1, &[30, 2])).unwrap()
}

/// A trainer of an adapter on the first golden family.
fn trainer<B: Blocks>(ops: &Arc<B>) -> Trainer<B> {
    let family = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama2"));
    let mut decoder = Decoder::load(Arc::clone(ops), family, Trainability::Frozen).unwrap();
    let targets = ["q_proj", "v_proj", "up_proj"].map(str::to_owned).to_vec();
    let adapter = decoder.fresh_adapter(&AdapterConfig::new(4, 8.0, targets), 3).unwrap();
    decoder.attach(&adapter).unwrap();
    let adamw = Optimizer::AdamW(AdamW::default());
    let options = TrainOptions { max_grad_norm: Some(1.0), ..TrainOptions::new(Trained::Adapter, adamw) };
    Trainer::new(decoder, options).unwrap()
}

/// The losses of some steps over a few batches that come again and again.
fn train<B: Blocks>(trainer: &mut Trainer<B>, steps: std::ops::Range<u32>) -> Vec<f64> {
    let step = |step: u32| {
        trainer.accumulate(&support::documents(step % 4, &[20, 9, 3])).unwrap();
        trainer.accumulate(&support::documents(step % 4 + 10, &[14])).unwrap();
        trainer.step(1e-3).unwrap().loss
    };
    steps.map(step).collect()
}

#[test]
fn an_adapter_learns_as_it_does_in_f32() {
    let expected = train(&mut trainer(&cpu(2, Compute::F32)), 0..50);
    assert!(expected[49] < 0.9 * expected[0], "{expected:?}");
    let check = |what: &str, found: Vec<f64>| {
        let furthest = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{what}: losses from {:.3} to {:.3}, {furthest:.1e} apart", expected[0], expected[49]);
        assert!(furthest > 0.0 && furthest <= LOSS, "{what}: {furthest}");
    };
    check("cpu", train(&mut trainer(&cpu(2, Compute::Bf16)), 0..50));
    let candle = Arc::new(Candle::new(candle_core::Device::Cpu, Compute::Bf16));
    check("candle", train(&mut trainer(&candle), 0..50));
}

#[test(each = InstructionSet::ALL)]
fn a_resumed_run_is_the_uninterrupted_one_to_the_bit(set: InstructionSet) -> Result<(), Unmet> {
    let ops = Arc::new(cpu_with(2, Compute::Bf16, set)?);
    let mut uninterrupted = trainer(&ops);
    train(&mut uninterrupted, 0..4);
    let mut first = trainer(&ops);
    train(&mut first, 0..2);
    let mut second = trainer(&ops);
    second.restore(first.steps(), first.state().unwrap()).unwrap();
    train(&mut second, 2..4);
    assert!(bits(&second.state().unwrap()) == bits(&uninterrupted.state().unwrap()));
    Ok(())
}

#[test(each = InstructionSet::ALL)]
fn the_number_of_threads_changes_no_bit(set: InstructionSet) -> Result<(), Unmet> {
    for compute in [Compute::F32, Compute::Bf16] {
        let mut states = Vec::new();
        for threads in [1, 2, 3, 5] {
            let mut trainer = trainer(&Arc::new(cpu_with(threads, compute, set)?));
            train(&mut trainer, 0..3);
            states.push(bits(&trainer.state().unwrap()));
        }
        assert!(states.windows(2).all(|pair| pair[0] == pair[1]), "{compute:?}");
    }
    Ok(())
}

/// What a step adds may be less than bf16 can tell apart: it must add up all the same.
#[test]
fn trained_weights_keep_their_f32_and_are_computed_in_bf16() {
    let ops = cpu(2, Compute::Bf16);
    let options = TrainOptions::new(Trained::Weights, Optimizer::AdamW(AdamW::default()));
    let mut trainer = Trainer::new(support::decoder(&ops, "llama", Trainability::Trainable), options).unwrap();
    let text = Batch::text(support::documents(5, &[16]).input_ids);
    let start = trainer.state().unwrap();
    let mut losses = Vec::new();
    for _ in 0..100 {
        trainer.accumulate(&text).unwrap();
        losses.push(trainer.step(1e-4).unwrap().loss);
    }
    assert!(losses[99] < losses[0] - 0.01, "{losses:?}");
    for (before, after) in start.iter().zip(trainer.state().unwrap()) {
        let halves = after.value.iter().filter(|value| bf16::from_f32(**value).to_f32() != **value).count();
        assert!(after.value != before.value && halves > 0, "{}", after.name);
    }
    // The model computes with the trained values, rounded: a fresh one that is given them says the same.
    let trained = trainer.state().unwrap();
    let config = trainer.decoder().config().clone();
    let mut fresh = Decoder::build(Arc::clone(&ops), config, Trainability::Frozen, |name, _| {
        Ok(trained.iter().find(|tensor| tensor.name == name).unwrap().value.clone())
    })
    .unwrap();
    assert_eq!(trainer.decoder_mut().logits(&text).unwrap(), fresh.logits(&text).unwrap());
}
