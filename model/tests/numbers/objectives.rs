//! Losses of whole documents: their gradients are those of the loss, however a step is split and shared.

use std::sync::Arc;

use model::batch::{Batch, Role, TargetScope};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::loss::{DocumentLoss, DocumentObjective, DocumentScore, Gathering, ObjectiveError, StepTotals};
use model::ops::Compute;
use model::optimizer::MomentDtype;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::trainer::{AdamW, DocumentBatch, Optimizer, TrainError, TrainOptions, Trained, Trainer};
use test_harness::test;

use crate::in_process::workers;
use crate::support;

const OPTIMIZER: Optimizer =
    Optimizer::AdamW(AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, state_dtype: MomentDtype::F32 });

/// Pairs of a chosen and a rejected document beside a reference, of which the chosen one's likelihood counts, too.
#[derive(Debug)]
struct Pairs {
    scope: TargetScope,
}

const BETA: f64 = 0.4;
const SHARE: f64 = 0.3;

impl DocumentObjective for Pairs {
    fn gathering(&self) -> Gathering {
        Gathering::Groups
    }

    fn scope(&self) -> TargetScope {
        self.scope
    }

    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        let mut losses = vec![DocumentLoss::default(); documents.len()];
        for (index, chosen) in documents.iter().enumerate().filter(|(_, document)| document.role == Role::Chosen) {
            let is_other = |other: &DocumentScore| other.group == chosen.group && other.role == Role::Rejected;
            let other = documents.iter().position(is_other).ok_or_else(|| ObjectiveError {
                group: chosen.group,
                problem: "it has no rejected document".to_owned(),
            })?;
            let gain = |document: &DocumentScore| document.response_log_prob - document.reference_log_prob.unwrap();
            let margin = BETA * (gain(chosen) - gain(&documents[other]));
            let (pairs, targets) = (totals.groups as f64, totals.targets as f64);
            let slope = BETA / (1.0 + margin.exp()) / pairs;
            losses[index].loss = (-margin).exp().ln_1p() / pairs - SHARE * chosen.log_prob / targets;
            losses[index].response_weight = slope;
            losses[index].document_weight = SHARE / targets;
            losses[other].response_weight = -slope;
        }
        Ok(losses)
    }
}

/// The log of the summed exponentials of the documents' mean losses: the worst of the step counts most.
#[derive(Debug)]
struct Worst;

impl DocumentObjective for Worst {
    fn gathering(&self) -> Gathering {
        Gathering::Step
    }

    fn losses(&self, documents: &[DocumentScore], totals: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        assert_eq!(documents.len() as u64, totals.documents);
        let mean = |document: &DocumentScore| -document.log_prob / document.targets as f64;
        let total: f64 = documents.iter().map(|document| mean(document).exp()).sum();
        let loss = total.ln() / documents.len() as f64;
        let of = |document: &DocumentScore| DocumentLoss {
            loss,
            response_weight: mean(document).exp() / total / document.targets as f64,
            document_weight: 0.0,
        };
        Ok(documents.iter().map(of).collect())
    }
}

/// Each document's summed loss times a number that its group gives.
#[derive(Debug)]
struct Given(Gathering);

impl Given {
    fn weight(group: u64) -> f64 {
        0.5 + group as f64 * 0.25
    }
}

impl DocumentObjective for Given {
    fn gathering(&self) -> Gathering {
        self.0
    }

    fn losses(&self, documents: &[DocumentScore], _: &StepTotals) -> Result<Vec<DocumentLoss>, ObjectiveError> {
        let of = |document: &DocumentScore| {
            let response_weight = Self::weight(document.group);
            DocumentLoss { loss: -response_weight * document.log_prob, response_weight, document_weight: 0.0 }
        };
        Ok(documents.iter().map(of).collect())
    }
}

fn ops() -> Arc<Cpu> {
    Arc::new(Cpu::new(1, Compute::F32).unwrap())
}

fn adapter(decoder: &Decoder<Cpu>, targets: &[&str]) -> Adapter {
    let targets = targets.iter().map(|target| (*target).to_owned()).collect();
    let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(2, 4.0, targets), 9).unwrap();
    for (name, module) in &mut adapter.modules {
        module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.1));
    }
    adapter
}

fn trainer_of(adapter: &Adapter, mut decoder: Decoder<Cpu>) -> Trainer<Cpu> {
    decoder.attach(adapter).unwrap();
    Trainer::new(decoder, TrainOptions::new(Trained::Adapter, OPTIMIZER)).unwrap()
}

/// Four pairs, with references.
fn pairs(step: u32) -> Vec<DocumentBatch> {
    let of = |pair: u32| {
        let documents = support::documents(8 * step + pair, &[5 + pair as usize, 9 - pair as usize]);
        let roles = vec![Role::Chosen, Role::Rejected];
        let groups = vec![u64::from(pair), u64::from(pair)];
        let batch = Batch { rows: vec![u64::from(pair); 2], groups, roles, ..documents };
        DocumentBatch { batch, reference_log_probs: vec![-12.0 - f64::from(pair), -14.0] }
    };
    (0..4).map(of).collect()
}

/// The same documents in micro-batches of so many pairs.
fn split(pairs: &[DocumentBatch], pairs_at_once: usize) -> Vec<DocumentBatch> {
    let join = |pairs: &[DocumentBatch]| {
        let mut joined = DocumentBatch::default();
        for pair in pairs {
            joined.batch.push(pair.batch.rows[0], &pair.batch);
            joined.reference_log_probs.extend(&pair.reference_log_probs);
        }
        joined
    };
    pairs.chunks(pairs_at_once).map(join).collect()
}

fn objectives() -> [Box<dyn DocumentObjective>; 3] {
    [
        Box::new(Pairs { scope: TargetScope::Response }),
        Box::new(Pairs { scope: TargetScope::Document }),
        Box::new(Worst),
    ]
}

#[test]
fn gradients_are_the_differences_of_the_loss() {
    // With an adapter on the head it is trained, and runs twice.
    for targets in [&["q_proj", "v_proj", "down_proj"][..], &["v_proj", "lm_head"]] {
        for objective in objectives() {
            let ops = ops();
            let decoder = || support::decoder(&ops, "llama", Trainability::Frozen);
            let adapter = adapter(&decoder(), targets);
            let loss_at = |step: f32| {
                let mut moved = adapter.clone();
                for (name, module) in &mut moved.modules {
                    let direction = fresh_tensor(4, name, module.lora_b.len(), Fill::Normal(1.0));
                    module.lora_b.iter_mut().zip(direction).for_each(|(value, along)| *value += step * along);
                }
                let mut trainer = trainer_of(&moved, decoder());
                let loss = trainer.accumulate_documents(&split(&pairs(0), 2), &*objective).unwrap().loss;
                (loss, trainer.gradients().unwrap())
            };
            let difference = |step: f32| (loss_at(step).0 - loss_at(-step).0) / (2.0 * f64::from(step));
            let difference = (4.0 * difference(5e-3) - difference(1e-2)) / 3.0;
            let (mut along, mut size) = (0.0, 0.0);
            for (name, gradient) in loss_at(0.0).1 {
                let Some(module) = name.strip_suffix(".lora_B.weight") else { continue };
                let module = module.strip_prefix("base_model.model.").unwrap_or(module);
                let direction = fresh_tensor(4, module, gradient.len(), Fill::Normal(1.0));
                along += gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum::<f64>();
                size += gradient.iter().map(|g| f64::from(g * g)).sum::<f64>();
            }
            let size = size.sqrt();
            assert!(size > 1e-3, "{objective:?}: no gradient");
            assert!((along - difference).abs() < 1e-2 * size, "{objective:?} {targets:?}: {along} {difference} {size}");
        }
    }
}

#[test]
fn known_weights_are_those_of_targets() {
    for (keep, trained) in [(Trainability::Frozen, Trained::Adapter), (Trainability::Trainable, Trained::Weights)] {
        let ops = ops();
        let trainer = || {
            let mut decoder = support::decoder(&ops, "llama", keep);
            if trained == Trained::Adapter {
                let adapter = adapter(&decoder, &["q_proj", "v_proj", "down_proj"]);
                decoder.attach(&adapter).unwrap();
            }
            Trainer::new(decoder, TrainOptions::new(trained, OPTIMIZER)).unwrap()
        };
        let batches = split(&pairs(0), 2);
        let mut direct = trainer();
        let mut total = 0.0;
        for DocumentBatch { batch, .. } in &batches {
            let mut batch = batch.clone();
            for (document, &length) in batch.document_lengths.iter().enumerate() {
                let weight = Given::weight(batch.groups[document]) as f32;
                batch.weights.extend(std::iter::repeat_n(weight, length));
            }
            total += direct.accumulate(&batch).unwrap().weight;
        }
        let expected = direct.gradients().unwrap();
        for gathering in [Gathering::Groups, Gathering::Step] {
            let mut found = trainer();
            found.accumulate_documents(&batches, &Given(gathering)).unwrap();
            for ((name, found), (_, expected)) in found.gradients().unwrap().iter().zip(&expected) {
                let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                let off = |(found, expected): (&f32, &f32)| (found / total as f32 - expected).abs();
                let furthest = found.iter().zip(expected).map(off).fold(0.0, f32::max);
                assert!(furthest <= 1e-5 * largest, "{gathering:?} {trained:?} {name}: {furthest} of {largest}");
            }
        }
    }
}

fn train(
    trainer: &mut Trainer<Cpu>,
    objective: &dyn DocumentObjective,
    own: impl Fn(u32) -> Vec<DocumentBatch>,
) -> Vec<f64> {
    let step = |step| {
        trainer.accumulate_documents(&own(step), objective).unwrap();
        let report = trainer.step(1e-2).unwrap();
        assert_eq!(report.target_tokens, pairs(step).iter().map(|pair| pair.batch.target_tokens()).sum::<usize>());
        report.loss
    };
    (0..3).map(step).collect()
}

#[test]
fn the_split_into_micro_batches_and_among_workers_changes_nothing() {
    let trainer = || {
        let decoder = support::decoder(&ops(), "llama", Trainability::Frozen);
        trainer_of(&adapter(&decoder, &["q_proj", "v_proj", "down_proj"]), decoder)
    };
    for objective in objectives() {
        let mut whole = trainer();
        let expected = train(&mut whole, &*objective, |step| split(&pairs(step), 4));
        let expected_state = whole.state().unwrap();
        let close = |found: &[f64], trainer: &Trainer<Cpu>, what: &str| {
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() < 1e-6 * expected.abs(), "{objective:?} {what}: {found} {expected}");
            }
            for (found, expected) in trainer.state().unwrap().iter().zip(&expected_state) {
                let largest = expected.value.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                let off = found.value.iter().zip(&expected.value).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off <= 1e-5 * largest, "{objective:?} {what} {}: {off} of {largest}", found.name);
            }
        };
        for pairs_at_once in [1, 2, 3] {
            let mut found = trainer();
            let losses = train(&mut found, &*objective, |step| split(&pairs(step), pairs_at_once));
            close(&losses, &found, &format!("{pairs_at_once} pairs at once"));
        }
        // The third of three workers has no pair.
        for size in [2, 3] {
            let found = workers(size, |rank, collective| {
                let mut found = trainer().together(collective);
                let own = |step| pairs(step).chunks(2).nth(rank).map(|own| split(own, 1)).unwrap_or_default();
                (train(&mut found, &*objective, own), found)
            });
            found.iter().for_each(|(losses, trainer)| close(losses, trainer, &format!("{size} workers")));
        }
    }
}

#[test]
fn documents_that_do_not_fit_the_objective_are_named() {
    let decoder = support::decoder(&ops(), "llama", Trainability::Frozen);
    let mut trainer = trainer_of(&adapter(&decoder, &["v_proj"]), decoder);
    let mut alone = pairs(0).remove(3);
    alone.batch.roles = vec![Role::Chosen; 2];
    let error = trainer.accumulate_documents(&[alone], &Pairs { scope: TargetScope::Response }).unwrap_err();
    let TrainError::Objective { step: 1, source } = error else { panic!("{error}") };
    assert_eq!(source.to_string(), "group 3: it has no rejected document");
}
