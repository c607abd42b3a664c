//! The laws of training: how a step is split, packed, threaded or interrupted does not change what is learned.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use model::batch::Batch;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::ops::{Compute, Ops};
use model::parameter::Keep;
use model::peft::{Adapter, AdapterConfig};
use model::trainer::{AdamW, RestoreError, StepReport, TrainError, TrainOptions, Trained, TrainedTensor, Trainer};

const ADAPTER: TrainOptions = TrainOptions {
    trained: Trained::Adapter,
    optimizer: AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.1 },
    max_grad_norm: Some(0.5),
};

fn ops(threads: usize) -> Arc<Cpu> {
    Arc::new(Cpu::new(threads, Compute::F32).unwrap())
}

/// A decoder with an adapter that already does something.
fn adapted(ops: &Arc<Cpu>, targets: &[&str]) -> Decoder<Cpu> {
    let mut decoder = support::decoder(ops, "llama", Keep::Frozen);
    let targets = targets.iter().map(|target| (*target).to_owned()).collect();
    let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(2, 4.0, targets), 9).unwrap();
    for (name, module) in &mut adapter.modules {
        module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.1));
    }
    decoder.attach(&adapter).unwrap();
    decoder
}

fn trainer(ops: &Arc<Cpu>) -> Trainer<Cpu> {
    Trainer::new(adapted(ops, &["q_proj", "v_proj", "down_proj"]), ADAPTER).unwrap()
}

/// Eight rows of one or two documents.
fn rows(step: u32) -> Vec<Batch> {
    (0..8).map(|row| support::documents(step * 8 + row, &[5 + row as usize, 2 * (row as usize % 3)])).collect()
}

/// Trains some steps of eight rows, `micro_batch_size` of them at a time.
fn train(trainer: &mut Trainer<Cpu>, steps: std::ops::Range<u32>, micro_batch_size: usize) -> Vec<StepReport> {
    let step = |step| {
        for micro in rows(step).chunks(micro_batch_size) {
            let mut batch = Batch::default();
            for (index, row) in micro.iter().enumerate() {
                batch.push_row(index as u64, &row.input_ids, &row.labels, &row.document_lengths);
            }
            trainer.accumulate(&batch).unwrap();
        }
        trainer.step(1e-2).unwrap()
    };
    steps.map(step).collect()
}

#[test]
fn the_split_of_a_step_into_micro_batches_changes_nothing() {
    let ops = ops(2);
    let mut whole = trainer(&ops);
    let expected = train(&mut whole, 0..5, 8);
    let expected_state = whole.state().unwrap();
    for micro_batch_size in [1, 2, 4] {
        let mut split = trainer(&ops);
        for (found, expected) in train(&mut split, 0..5, micro_batch_size).iter().zip(&expected) {
            assert_eq!(found.target_tokens, expected.target_tokens);
            assert!((found.loss - expected.loss).abs() <= 1e-6 * expected.loss, "{found:?} {expected:?}");
        }
        for (found, expected) in split.state().unwrap().iter().zip(&expected_state) {
            let largest = expected.value.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let furthest = found.value.iter().zip(&expected.value).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(furthest <= 1e-5 * largest, "{}: {furthest} of {largest}", found.name);
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let states = [1, 2, 5].map(|threads| {
        let mut trainer = trainer(&ops(threads));
        train(&mut trainer, 0..3, 4);
        trainer.state().unwrap()
    });
    assert!(bits(&states[0]) == bits(&states[1]) && bits(&states[0]) == bits(&states[2]));
}

fn bits(state: &[TrainedTensor]) -> Vec<u32> {
    let all = state.iter().flat_map(|tensor| [&tensor.value, &tensor.exp_avg, &tensor.exp_avg_sq]);
    all.flatten().map(|value| value.to_bits()).collect()
}

#[test]
fn a_resumed_run_is_the_uninterrupted_one_to_the_bit() {
    let ops = ops(2);
    let mut uninterrupted = trainer(&ops);
    train(&mut uninterrupted, 0..6, 4);
    let mut first = trainer(&ops);
    train(&mut first, 0..2, 4);
    // Some of the third step is lost with the process.
    first.accumulate(&rows(2)[0]).unwrap();
    let (steps, state) = (first.steps(), first.state().unwrap());
    drop(first);
    let mut second = trainer(&ops);
    second.restore(steps, state).unwrap();
    train(&mut second, 2..6, 4);
    assert_eq!(second.steps(), 6);
    assert!(bits(&second.state().unwrap()) == bits(&uninterrupted.state().unwrap()));
}

#[test]
fn a_state_of_another_run_is_refused() {
    let mut trainer = trainer(&ops(1));
    let state = trainer.state().unwrap();
    let missing = trainer.restore(1, state[1..].to_vec()).unwrap_err();
    assert!(matches!(missing, RestoreError::Missing(name) if name == state[0].name));
    let mut more = state.clone();
    more.push(TrainedTensor { name: "another".to_owned(), ..state[0].clone() });
    assert!(matches!(trainer.restore(1, more).unwrap_err(), RestoreError::Unexpected(name) if name == "another"));
    let mut misshapen = state;
    misshapen[0].shape.reverse();
    assert!(matches!(trainer.restore(1, misshapen).unwrap_err(), RestoreError::Shape { .. }));
}

#[test]
fn a_pack_has_the_loss_and_gradient_of_its_documents_one_by_one() {
    let ops = ops(2);
    let pack = support::documents(1, &[9, 4, 1, 13]);
    let mut together = trainer(&ops);
    let report = together.accumulate(&pack).unwrap();
    let mut alone = trainer(&ops);
    let (mut first, mut loss_sum, mut target_tokens) = (0, 0.0, 0);
    for &length in &pack.document_lengths {
        let tokens = first..first + length;
        let report =
            alone.accumulate(&Batch::document(pack.input_ids[tokens.clone()].to_vec(), pack.labels[tokens].to_vec()));
        let report = report.unwrap();
        (first, loss_sum, target_tokens) =
            (first + length, loss_sum + report.loss_sum, target_tokens + report.target_tokens);
    }
    assert_eq!(report.target_tokens, target_tokens);
    assert!((report.loss_sum - loss_sum).abs() < 1e-5);
    for ((name, packed), (_, single)) in together.gradients().unwrap().iter().zip(&alone.gradients().unwrap()) {
        assert!(packed.iter().zip(single).all(|(a, b)| (a - b).abs() < 1e-6), "{name}");
    }
}

#[test]
fn scores_are_the_losses_that_training_sees() {
    let mut trainer = trainer(&ops(2));
    let batch = support::documents(2, &[6, 8]);
    let report = trainer.accumulate(&batch).unwrap();
    let scores = trainer.decoder_mut().score(&batch).unwrap();
    assert_eq!(scores.len(), report.target_tokens);
    assert!((scores.iter().map(|score| f64::from(score.nll)).sum::<f64>() - report.loss_sum).abs() < 1e-6);
    // Each score names the token it is of.
    let expected: Vec<usize> = batch.targets().rows.iter().map(|row| *row as usize + 1).collect();
    assert_eq!(scores.iter().map(|score| score.token).collect::<Vec<_>>(), expected);
}

#[test]
fn full_training_learns_a_text_by_heart() {
    let ops = ops(2);
    let options = TrainOptions { trained: Trained::Weights, max_grad_norm: Some(1.0), ..ADAPTER };
    for (shape, _) in support::SHAPES {
        let mut trainer = Trainer::new(support::decoder(&ops, shape, Keep::Trainable), options).unwrap();
        let text = Batch::text(support::documents(5, &[16]).input_ids);
        let mut losses = Vec::new();
        for _ in 0..60 {
            trainer.accumulate(&text).unwrap();
            losses.push(trainer.step(1e-2).unwrap().loss);
        }
        assert!(losses[59] < 0.3 * losses[0], "{shape}: {losses:?}");
        assert!(
            trainer.decoder_mut().score(&text).unwrap().iter().filter(|score| score.correct).count() > 11,
            "{shape}"
        );
    }
}

#[test]
fn a_step_without_targets_is_an_error() {
    let mut trainer = trainer(&ops(1));
    let batch = Batch::document(vec![1, 2, 3], vec![1, -100, -100]);
    assert_eq!(trainer.accumulate(&batch).unwrap().target_tokens, 0);
    assert!(matches!(trainer.step(1e-3).unwrap_err(), TrainError::NoTargets { step: 1 }));
}

#[test]
fn what_is_not_finite_is_named() {
    let mut trainer = trainer(&ops(1));
    let mut state = trainer.state().unwrap();
    state[0].value[0] = f32::NAN;
    trainer.restore(4, state).unwrap();
    let error = trainer.accumulate(&support::documents(1, &[5])).unwrap_err();
    assert!(matches!(error, TrainError::LossNotFinite { step: 5, .. }), "{error}");
}

#[test]
fn an_adapter_that_no_gradient_reaches_is_found() {
    // The first of two tokens attends to itself alone, whatever its query: only here has q_proj no gradient.
    let mut options = ADAPTER;
    options.optimizer.weight_decay = 0.0;
    let mut trainer = Trainer::new(adapted(&ops(1), &["q_proj"]), options).unwrap();
    let batch = Batch::text(vec![3, 4]);
    for _ in 0..2 {
        trainer.accumulate(&batch).unwrap();
        trainer.step(1e-2).unwrap();
    }
    trainer.accumulate(&batch).unwrap();
    let error = trainer.step(1e-2).unwrap_err();
    assert!(matches!(&error, TrainError::NotMoved { tensor, steps: 3 } if tensor.contains("q_proj")), "{error}");
}

#[test]
fn beside_an_adapter_nothing_is_trained_kept_or_changed() {
    let ops = ops(2);
    let mut trainer = trainer(&ops);
    let text = support::documents(3, &[9]);
    let frozen = |trainer: &Trainer<Cpu>| -> Vec<u32> {
        let norms = trainer.decoder().parameters().into_iter().filter(|parameter| !parameter.is_trained());
        norms.flat_map(|norm| ops.read(&norm.value).unwrap()).map(f32::to_bits).collect()
    };
    let norms = frozen(&trainer);
    train(&mut trainer, 0..4, 4);
    assert_eq!(frozen(&trainer), norms);
    // A frozen matrix has no values of its own that could be trained, and no gradient.
    assert!(trainer.decoder().projections().iter().all(|projection| projection.matrix.trained.is_none()));
    assert!(trainer.state().unwrap().iter().all(|tensor| tensor.name.contains(".lora_")));
    // Without its adapter the trained model is the one it was.
    let nothing = Adapter { config: AdapterConfig::new(2, 4.0, Vec::new()), modules: Default::default() };
    trainer.decoder_mut().attach(&nothing).unwrap();
    let mut untouched = support::decoder(&ops, "llama", Keep::Frozen);
    assert_eq!(trainer.decoder_mut().logits(&text).unwrap(), untouched.logits(&text).unwrap());
}

#[test]
fn a_learning_rate_that_rounds_away_is_no_cut_graph() {
    let mut trainer = trainer(&ops(1));
    for step in 0..6 {
        trainer.accumulate(&rows(step)[0]).unwrap();
        trainer.step(1e-12).unwrap();
    }
}

#[test]
fn there_must_be_something_to_train() {
    let ops = ops(1);
    let frozen = || support::decoder(&ops, "llama", Keep::Frozen);
    assert!(matches!(Trainer::new(frozen(), ADAPTER), Err(TrainError::NothingToTrain(_))));
    let weights = TrainOptions { trained: Trained::Weights, ..ADAPTER };
    assert!(matches!(Trainer::new(frozen(), weights), Err(TrainError::NothingToTrain(_))));
}
