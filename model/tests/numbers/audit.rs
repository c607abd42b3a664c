//! The audits of a training run, each against a kernel set that is broken on purpose.

use std::sync::Arc;

use model::parameter::Trainability;
use model::peft::AdapterConfig;
use model::trainer::{AdamW, LossScaling, Optimizer, Sgd, StepReport, TrainError, TrainOptions, Trained, Trainer};
use test_harness::test;

use crate::faulty::{Fault, Faulty};
use crate::support;

/// Heads of the tiny models make 24 columns of queries from 20 of the residual stream; their MLP is 29 wide.
const QUERIES: usize = 24;
const HIDDEN: usize = 20;
const INNER: usize = 29;
const RANK: usize = 3;

/// A trainer of an adapter on `q_proj` and `down_proj`, on a kernel set with a fault.
fn trainer(fault: Fault, loss_scaling: Option<LossScaling>) -> Trainer<Faulty> {
    // With weight decay, which moves a tensor that no gradient reaches.
    let adamw = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    trainer_by(adamw, fault, loss_scaling)
}

/// The same by an optimizer.
fn trainer_by(optimizer: Optimizer, fault: Fault, loss_scaling: Option<LossScaling>) -> Trainer<Faulty> {
    let mut decoder = support::decoder(&Arc::new(Faulty::new(fault)), "llama", Trainability::Frozen);
    let targets = vec!["q_proj".to_owned(), "down_proj".to_owned()];
    let adapter = decoder.fresh_adapter(&AdapterConfig::new(RANK, 4.0, targets), 9).unwrap();
    decoder.attach(&adapter).unwrap();
    Trainer::new(decoder, TrainOptions { loss_scaling, ..TrainOptions::new(Trained::Adapter, optimizer) }).unwrap()
}

/// Steps until an error.
fn train(trainer: &mut Trainer<Faulty>, steps: u32) -> Result<Vec<StepReport>, TrainError> {
    let step = |step| {
        trainer.accumulate(&support::documents(step, &[9, 4]))?;
        trainer.step(1e-2)
    };
    (0..steps).map(step).collect()
}

#[test]
fn a_kernel_set_without_a_fault_passes() {
    let mut trainer = trainer(Fault::None, None);
    assert_eq!(train(&mut trainer, 5).unwrap().len(), 5);
    trainer.check_frozen().unwrap();
}

#[test]
fn a_frozen_matrix_that_is_written_is_found_after_the_first_step() {
    // Of both layers' `o_proj` the upper one's backward is needed; the first one in the order of the layers is named.
    let error = train(&mut trainer(Fault::WritesWeight(HIDDEN, QUERIES), None), 1).unwrap_err();
    assert!(
        matches!(&error, TrainError::FrozenMoved { tensor, step: 1 } if tensor == "model.layers.0.self_attn.o_proj.weight"),
        "{error}"
    );
    // The embedding is the head's matrix.
    let error = train(&mut trainer(Fault::WritesWeight(37, HIDDEN), None), 1).unwrap_err();
    assert!(matches!(&error, TrainError::FrozenMoved { step: 1, .. }), "{error}");
}

#[test]
fn a_frozen_norm_that_is_written_is_found_after_the_first_step() {
    let error = train(&mut trainer(Fault::WritesNorm, None), 1).unwrap_err();
    assert!(
        matches!(&error, TrainError::FrozenMoved { tensor, step: 1 } if tensor.ends_with("norm.weight")),
        "{error}"
    );
}

#[test]
fn a_gradient_that_is_lost_is_found_though_weight_decay_moves_its_tensor() {
    // The gradient of A of `down_proj`; B's is there, so that losses fall all the same.
    let error = train(&mut trainer(Fault::LosesGradient(RANK, INNER), None), 5).unwrap_err();
    assert!(
        matches!(&error, TrainError::NotMoved { tensor, steps: 3 } if tensor.contains("0.mlp.down_proj.lora_A")),
        "{error}"
    );
    // That of B of `q_proj`, which then stays zero.
    let error = train(&mut trainer(Fault::LosesGradient(QUERIES, RANK), None), 5).unwrap_err();
    assert!(
        matches!(&error, TrainError::NotMoved { tensor, steps: 3 } if tensor.contains("0.self_attn.q_proj.lora_")),
        "{error}"
    );
}

/// Without a tied head the row of a token has a gradient only in steps that read it.
#[test]
fn the_row_of_a_token_that_no_step_has_read_is_no_lost_gradient() {
    let ops = Arc::new(Faulty::new(Fault::None));
    let mut decoder = support::decoder(&ops, "llama, untied, biases", Trainability::Frozen);
    let mut config = AdapterConfig::new(RANK, 4.0, vec!["q_proj".to_owned()]);
    let unread =
        (0..37).find(|id| (0..5).all(|step| !support::documents(step, &[9, 4]).input_ids.contains(id))).unwrap();
    config.trainable_token_indices.insert("embed_tokens".to_owned(), vec![unread]);
    let adapter = decoder.fresh_adapter(&config, 9).unwrap();
    decoder.attach(&adapter).unwrap();
    let adamw = Optimizer::AdamW(AdamW::default());
    let mut trainer = Trainer::new(decoder, TrainOptions::new(Trained::Adapter, adamw)).unwrap();
    assert_eq!(train(&mut trainer, 5).unwrap().len(), 5);
}

#[test]
fn an_update_of_sgd_that_rounds_away_is_no_lost_gradient() {
    let sgd = Optimizer::Sgd(Sgd { momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 });
    let train = |fault| {
        let mut trainer = trainer_by(sgd, fault, None);
        let first = values(&trainer, "lora_A");
        let step = |step| {
            trainer.accumulate(&support::documents(step, &[9, 4]))?;
            trainer.step(1e-5)
        };
        let reports: Result<Vec<StepReport>, TrainError> = (0..5).map(step).collect();
        reports.map(|_| (first == values(&trainer, "lora_A"), values(&trainer, "lora_B")))
    };
    // B is hardly more than zero, so A's gradient is too small to change a bit of it.
    let (a_stays, b) = train(Fault::None).unwrap();
    assert!(a_stays && b.iter().any(|value| *value != 0.0));
    let error = train(Fault::LosesGradient(RANK, INNER)).unwrap_err();
    assert!(matches!(&error, TrainError::NotMoved { tensor, .. } if tensor.contains("down_proj.lora_A")), "{error}");
}

/// The values of all trained tensors of a kind.
fn values(trainer: &Trainer<Faulty>, kind: &str) -> Vec<f32> {
    let tensors = trainer.state().unwrap().into_iter().filter(|tensor| tensor.name.contains(kind));
    tensors.flat_map(|tensor| tensor.value).collect()
}

#[test]
fn an_infinite_gradient_is_found_in_the_first_step_and_named() {
    let fault = Fault::InfiniteGradient(HIDDEN, RANK);
    let error = train(&mut trainer(fault, None), 1).unwrap_err();
    assert!(
        matches!(&error, TrainError::GradientNotFinite { step: 1, tensor, largest_gradient: None }
            if tensor == "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"),
        "{error}"
    );
    // With loss scaling it is an overflow at first, and the same error once a smaller factor has not helped.
    let scaling = LossScaling { init_scale: 4.0, ..LossScaling::default() };
    let error = train(&mut trainer(fault, Some(scaling)), 20).unwrap_err();
    assert!(
        matches!(&error, TrainError::OverflowPersists { step: 1, tensor, skipped: 10, loss_scale: 1.0 }
            if tensor.contains("down_proj.lora_B")),
        "{error}"
    );
}
