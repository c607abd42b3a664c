//! Losses of targets against torch's, on every kernel set, and what weights and a teacher do to training.

use std::sync::Arc;

use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::cpu::{Cpu, InstructionSet};
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::loss::{CrossEntropy, Distillation, Divergence, TokenLoss};
use model::ops::{Compute, LogitGradient, LossRows, Ops};
use model::optimizer::MomentDtype;
use model::parameter::Trainability;
use model::peft::AdapterConfig;
use model::trainer::{AdamW, Optimizer, TrainError, TrainOptions, Trained, Trainer};
use serde_json::Value;
use test_harness::{Unmet, test};

use crate::support::{self, cpu_with};

/// From `tests/reference/make_golden_losses.py`.
const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/losses.json"));

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

fn loss_of(case: &Value) -> Box<dyn TokenLoss> {
    let number = |name: &str| case[name].as_f64().unwrap() as f32;
    if case["loss"] == "cross_entropy" {
        return Box::new(CrossEntropy { label_smoothing: number("label_smoothing") });
    }
    let divergence = match case["divergence"].as_str().unwrap() {
        "forward_kl" => Divergence::ForwardKl,
        "reverse_kl" => Divergence::ReverseKl,
        "jensen_shannon" => Divergence::JensenShannon,
        other => panic!("{other}"),
    };
    Box::new(Distillation { temperature: number("temperature"), alpha: number("alpha"), divergence })
}

fn are_torchs<B: Ops>(ops: &B) {
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let (rows, vocabulary) =
        (golden["rows"].as_u64().unwrap() as usize, golden["vocabulary"].as_u64().unwrap() as usize);
    let targets: Vec<u32> = numbers(&golden["targets"]).iter().map(|target| *target as u32).collect();
    let weights = numbers(&golden["weights"]);
    let total_weight: f32 = weights.iter().sum();
    let teacher = ops.tensor(rows, vocabulary, &numbers(&golden["teacher"])).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 24);
    for case in cases {
        let what = format!("{} {} {}", case["loss"], case["divergence"], case["soft_cap"]);
        let loss = loss_of(case);
        let soft_cap = case["soft_cap"].as_f64().map(|cap| cap as f32);
        let teacher = loss.needs_teacher().then_some(&teacher);
        let of = LossRows { targets: &targets, weights: Some(&weights), loss: &*loss, teacher, soft_cap };
        let mut logits = ops.tensor(rows, vocabulary, &numbers(&golden["logits"])).unwrap();
        let mut scores = Vec::new();
        ops.token_loss(&mut logits, &of, LogitGradient::InPlace { scale: 1.0 / total_weight }, &mut scores).unwrap();
        let mut total = 0.0;
        for ((score, expected), weight) in scores.iter().zip(numbers(&case["losses"])).zip(&weights) {
            assert!((score.loss - expected).abs() <= 3e-6 * (1.0 + expected), "{what}: {score:?} {expected}");
            total += f64::from(weight * score.loss);
        }
        let expected = case["total"].as_f64().unwrap();
        assert!((total / f64::from(total_weight) - expected).abs() <= 3e-6 * (1.0 + expected), "{what}: {total}");
        for (found, expected) in ops.read(&logits).unwrap().iter().zip(numbers(&case["gradient"])) {
            assert!((found - expected).abs() <= 2e-6, "{what}: gradient {found}, {expected}");
        }
    }
}

#[test(each = InstructionSet::ALL)]
fn losses_and_gradients_are_torchs(set: InstructionSet) -> Result<(), Unmet> {
    are_torchs(&cpu_with(2, Compute::F32, set)?);
    Ok(())
}

#[test]
fn losses_and_gradients_of_candle_are_torchs() {
    are_torchs(&Candle::on_processor());
}

const OPTIONS: TrainOptions = TrainOptions::new(
    Trained::Adapter,
    Optimizer::AdamW(AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, state_dtype: MomentDtype::F32 }),
);

fn adapted<B: Blocks>(ops: &Arc<B>, shape: &str) -> Decoder<B> {
    let mut decoder = support::decoder(ops, shape, Trainability::Frozen);
    let targets = ["q_proj", "v_proj", "down_proj"].map(str::to_owned).to_vec();
    let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(2, 4.0, targets), 9).unwrap();
    for (name, module) in &mut adapter.modules {
        module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.1));
    }
    decoder.attach(&adapter).unwrap();
    decoder
}

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(2, Compute::F32).unwrap())
}

#[test]
fn weights_of_one_are_no_weights_and_of_zero_no_targets() {
    let ops = cpu();
    let plain = support::documents(3, &[9, 5, 7]);
    let gradients = |batch: &Batch| {
        let mut trainer = Trainer::new(adapted(&ops, "llama"), OPTIONS).unwrap();
        let micro = trainer.accumulate(batch).unwrap();
        (micro.loss_sum / micro.weight, trainer.gradients().unwrap())
    };
    let expected = gradients(&plain);
    assert!(gradients(&Batch { weights: vec![1.0; plain.tokens()], ..plain.clone() }) == expected);
    // All alike weights change neither the mean nor its gradient; powers of two not even a bit.
    assert!(gradients(&Batch { weights: vec![0.25; plain.tokens()], ..plain.clone() }) == expected);
    let weights = (0..plain.tokens()).map(|token| if token % 3 == 0 { 0.0 } else { 1.0 }).collect();
    let mut ignored = plain.clone();
    ignored.labels.iter_mut().step_by(3).for_each(|label| *label = -100);
    let (found, expected) = (gradients(&Batch { weights, ..plain }), gradients(&ignored));
    assert!((found.0 - expected.0).abs() < 1e-6, "{} {}", found.0, expected.0);
    for ((name, found), (_, expected)) in found.1.iter().zip(&expected.1) {
        let furthest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(furthest < 1e-6, "{name}: {furthest}");
    }
}

#[test]
fn the_weights_of_a_step_are_divided_by_once() {
    let ops = cpu();
    let rows = |step: u32| -> Vec<Batch> {
        let weighted = |row: u32| {
            let batch = support::documents(40 * step + row, &[4 + row as usize]);
            let weights = (0..batch.tokens()).map(|token| 0.25 * (token as u32 % 5 + row) as f32).collect();
            Batch { weights, ..batch }
        };
        (0..6).map(weighted).collect()
    };
    let train = |micro_batch_size: usize| {
        let mut trainer = Trainer::new(adapted(&ops, "llama"), OPTIONS).unwrap();
        let step = |step| {
            for micro in rows(step).chunks(micro_batch_size) {
                let mut batch = Batch::default();
                micro.iter().enumerate().for_each(|(index, row)| batch.push(index as u64, row));
                trainer.accumulate(&batch).unwrap();
            }
            trainer.step(1e-2).unwrap()
        };
        (0..3).map(step).collect::<Vec<_>>()
    };
    let whole = train(6);
    for split in [train(1), train(4)] {
        for (found, expected) in split.iter().zip(&whole) {
            assert!((found.loss - expected.loss).abs() < 1e-6 * expected.loss, "{found:?} {expected:?}");
            assert!((found.grad_norm - expected.grad_norm).abs() < 1e-5 * expected.grad_norm, "{found:?}");
        }
    }
    let mut trainer = Trainer::new(adapted(&ops, "llama"), OPTIONS).unwrap();
    let weightless = support::documents(1, &[6]);
    trainer.accumulate(&Batch { weights: vec![0.0; 6], ..weightless }).unwrap();
    assert!(matches!(trainer.step(1e-2), Err(TrainError::NoTargets { step: 1 })));
}

fn distillation(divergence: Divergence) -> Distillation {
    Distillation { temperature: 2.0, alpha: 0.5, divergence }
}

/// The loss of the whole logits of teacher and student, without chunks.
fn expected_loss<B: Blocks>(
    student: &mut Decoder<B>,
    teacher: &mut Decoder<B>,
    loss: Distillation,
    batch: &Batch,
) -> f64 {
    let (own, taught) = (student.logits(batch).unwrap(), teacher.logits(batch).unwrap());
    let vocabulary = student.config().vocab_size;
    let targets = batch.targets();
    let row_of = |all: &[f32], row: u32| all[row as usize * vocabulary..][..vocabulary].to_vec();
    let losses = targets.rows.iter().zip(&targets.ids).map(|(&row, &target)| {
        let (mut logits, teacher) = (row_of(&own, row), row_of(&taught, row));
        let set = InstructionSet::Portable;
        let of = model::loss::LossRow {
            set,
            logits: &mut logits,
            teacher: Some(&teacher),
            target: target as usize,
            gradient_scale: None,
        };
        f64::from(loss.row(of).loss)
    });
    losses.sum::<f64>() / targets.len() as f64
}

#[test]
fn a_student_learns_what_its_teacher_knows() {
    distils(&cpu());
    distils(&Arc::new(Candle::on_processor()));
}

fn distils<B: Blocks>(ops: &Arc<B>) {
    for shape in ["llama", "gemma2"] {
        for divergence in [Divergence::ForwardKl, Divergence::ReverseKl, Divergence::JensenShannon] {
            let loss = distillation(divergence);
            let (mut student, mut teacher) = (adapted(ops, shape), support::decoder(ops, shape, Trainability::Frozen));
            let batch = support::documents(7, &[9, 6, 11]);
            let expected = expected_loss(&mut student, &mut teacher, loss, &batch);
            let trainer = Trainer::new(student, OPTIONS).unwrap();
            let mut trainer = trainer.with_loss(Arc::new(loss), Some(teacher)).unwrap();
            let mut losses = Vec::new();
            for _ in 0..12 {
                trainer.accumulate(&batch).unwrap();
                losses.push(trainer.step(3e-3).unwrap().loss);
            }
            assert!((losses[0] - expected).abs() < 1e-5 * expected, "{shape} {divergence:?}: {losses:?} {expected}");
            assert!(losses[11] < losses[0], "{shape} {divergence:?}: {losses:?}");
        }
    }
}

#[test]
fn a_teacher_is_needed_and_has_the_same_vocabulary() {
    let ops = cpu();
    let loss = Arc::new(distillation(Divergence::ForwardKl));
    let trainer = || Trainer::new(adapted(&ops, "llama"), OPTIONS).unwrap();
    assert!(matches!(trainer().with_loss(loss.clone(), None).err(), Some(TrainError::NoTeacher)));
    let config = support::decoder(&ops, "llama", Trainability::Frozen).config().clone();
    let other = model::config::Config { vocab_size: config.vocab_size + 1, ..config };
    let other = Decoder::build(Arc::clone(&ops), other, Trainability::Frozen, |name, shape| {
        Ok(fresh_tensor(1, name, shape.iter().product(), Fill::Normal(0.3)))
    })
    .unwrap();
    let error = trainer().with_loss(loss, Some(other)).err().unwrap();
    assert!(matches!(error, TrainError::TeacherVocabulary { student: 37, teacher: 38 }), "{error}");
}
