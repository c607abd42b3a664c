//! The laws of adapters: what dropout draws, what an adapter leaves alone, and that every kind of it trains exactly.

use std::path::Path;
use std::sync::Arc;

use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::checkpoint::Checkpoint;
use model::cpu::Cpu;
use model::decoder::{AttachError, Decoder};
use model::init::{Fill, fresh_tensor};
use model::ops::{Compute, Ops};
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig, Modules, TargetModules};
use model::trainer::{AdamW, Optimizer, Recompute, TrainOptions, Trained, TrainedTensor, Trainer};
use test_harness::test;

use crate::support::{self, bits};

fn cpu(threads: usize) -> Arc<Cpu> {
    Arc::new(Cpu::new(threads, Compute::F32).unwrap())
}

/// Every kind of adapter that there is, each with dropout.
fn kinds() -> [(&'static str, AdapterConfig); 3] {
    let plain = AdapterConfig { dropout: 0.3, ..AdapterConfig::new(3, 5.0, Vec::new()) };
    let all = TargetModules::Pattern("all-linear".to_owned());
    let plain = AdapterConfig { target_modules: all, ..plain };
    let saved = ["lm_head", "embed_tokens", "norm"].map(str::to_owned).to_vec();
    [
        ("lora", plain.clone()),
        ("dora", AdapterConfig { use_dora: true, ..plain.clone() }),
        ("modules_to_save", AdapterConfig { modules_to_save: saved, ..plain }),
    ]
}

/// An adapter that already does something.
fn moved<B: Blocks>(decoder: &Decoder<B>, config: &AdapterConfig) -> Adapter {
    let mut adapter = decoder.fresh_adapter(config, 9).unwrap();
    for (name, module) in &mut adapter.modules {
        module.lora_b = fresh_tensor(6, name, module.lora_b.len(), Fill::Normal(0.2));
    }
    for (name, saved) in &mut adapter.saved_tensors {
        let change = fresh_tensor(7, name, saved.values.len(), Fill::Normal(0.1));
        saved.values.iter_mut().zip(change).for_each(|(value, change)| *value += change);
    }
    adapter
}

fn options(recompute: Recompute) -> TrainOptions {
    let optimizer = Optimizer::AdamW(AdamW { weight_decay: 0.1, ..AdamW::default() });
    TrainOptions { max_grad_norm: Some(0.5), recompute, seed: 21, ..TrainOptions::new(Trained::Adapter, optimizer) }
}

fn trainer<B: Blocks>(ops: &Arc<B>, shape: &str, config: &AdapterConfig, recompute: Recompute) -> Trainer<B> {
    let mut decoder = support::decoder(ops, shape, Trainability::Frozen);
    let adapter = moved(&decoder, config);
    decoder.attach(&adapter).unwrap();
    Trainer::new(decoder, options(recompute)).unwrap()
}

/// Trains two steps of six rows, of one or two documents each, `micro_batch_size` of them at a time.
fn train<B: Blocks>(trainer: &mut Trainer<B>, micro_batch_size: usize) -> Vec<TrainedTensor> {
    for step in trainer.steps() as u32..trainer.steps() as u32 + 2 {
        let rows: Vec<Batch> =
            (0..6).map(|row| support::documents(step * 6 + row, &[4 + row as usize, 3 * (row as usize % 2)])).collect();
        for (micro, rows) in rows.chunks(micro_batch_size).enumerate() {
            let mut batch = Batch::default();
            for (index, row) in rows.iter().enumerate() {
                let number = (micro * micro_batch_size + index) as u64;
                batch.push_row(number, &row.input_ids, &row.labels, &row.document_lengths);
            }
            trainer.accumulate(&batch).unwrap();
        }
        trainer.step(1e-2).unwrap();
    }
    trainer.state().unwrap()
}

#[test]
fn dropout_does_not_depend_on_the_split_of_a_step() {
    for (kind, config) in kinds() {
        let expected = train(&mut trainer(&cpu(2), "llama", &config, Recompute::None), 6);
        for micro_batch_size in [1, 4] {
            let found = train(&mut trainer(&cpu(2), "llama", &config, Recompute::None), micro_batch_size);
            for (found, expected) in found.iter().zip(&expected) {
                let largest = expected.value.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                let furthest = found.value.iter().zip(&expected.value).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(furthest <= 1e-5 * largest, "{kind}: {} by {furthest} of {largest}", found.name);
            }
        }
    }
}

#[test]
fn neither_threads_nor_recomputed_layers_nor_a_resume_change_a_bit() {
    for (kind, config) in kinds() {
        let ops = cpu(1);
        let mut uninterrupted = trainer(&ops, "qwen3", &config, Recompute::None);
        let middle = train(&mut uninterrupted, 3);
        let end = bits(&train(&mut uninterrupted, 3));
        let mut other = trainer(&cpu(3), "qwen3", &config, Recompute::Layers);
        assert!(bits(&train(&mut other, 3)) == bits(&middle), "{kind}");
        let mut resumed = trainer(&ops, "qwen3", &config, Recompute::None);
        resumed.restore(2, middle).unwrap();
        assert!(bits(&train(&mut resumed, 3)) == end, "{kind}");
    }
}

/// Adapters, magnitudes and copies stay f32 where the products are bf16: a step is that of f32 but for the rounding of
/// operands.
#[test]
fn every_kind_trains_in_bf16() {
    let half = Arc::new(Cpu::new(2, Compute::Bf16).unwrap());
    for (kind, config) in kinds() {
        let batch = support::documents(3, &[9, 5, 13]);
        let loss = |ops: &Arc<Cpu>| {
            let mut trainer = trainer(ops, "gemma2", &config, Recompute::None);
            train(&mut trainer, 3);
            trainer.accumulate(&batch).unwrap().loss_sum
        };
        let (found, expected) = (loss(&half), loss(&cpu(2)));
        assert_ne!(found, expected, "{kind}: something was rounded");
        assert!((found - expected).abs() < 0.02 * expected, "{kind}: {found}, {expected} in f32");
    }
}

#[test]
fn dropout_acts_in_training_alone() {
    for (kind, config) in kinds() {
        let mut with = trainer(&cpu(2), "llama", &config, Recompute::None);
        let without = AdapterConfig { dropout: 0.0, ..config };
        let mut without = trainer(&cpu(2), "llama", &without, Recompute::None);
        let batch = support::documents(3, &[9, 5]);
        assert_eq!(with.decoder_mut().logits(&batch).unwrap(), without.decoder_mut().logits(&batch).unwrap(), "{kind}");
        assert_eq!(with.decoder_mut().score(&batch).unwrap(), without.decoder_mut().score(&batch).unwrap(), "{kind}");
        let losses = [&mut with, &mut without].map(|trainer| trainer.accumulate(&batch).unwrap().loss_sum);
        assert_ne!(losses[0], losses[1], "{kind}");
    }
}

#[test]
fn gradients_under_dropout_are_those_of_the_loss() {
    gradients(&cpu(2));
    gradients(&Arc::new(Candle::on_processor()));
}

/// Moves each trained tensor along a direction and compares the loss of a training pass with its gradient. The norm
/// that DoRA takes for a constant moves with A and B, so that of DoRA only the magnitudes obey; the golden cases have
/// the rest.
fn gradients<B: Blocks>(ops: &Arc<B>) {
    for (kind, config) in kinds() {
        for shape in ["gemma2", "phi3"] {
            let mut trainer = trainer(ops, shape, &config, Recompute::None);
            let batch = support::documents(3, &[7, 1, 12, 4]);
            trainer.accumulate(&batch).unwrap();
            let (gradients, state) = (trainer.gradients().unwrap(), trainer.state().unwrap());
            for (index, (name, gradient)) in gradients.iter().enumerate() {
                if kind == "dora" && !name.ends_with("magnitude_vector") {
                    continue;
                }
                let direction = fresh_tensor(8, name, gradient.len(), Fill::Normal(1.0));
                let mut loss = |step: f32| {
                    let mut state = state.clone();
                    state[index].value.iter_mut().zip(&direction).for_each(|(value, along)| *value += step * along);
                    trainer.restore(0, state).unwrap();
                    let report = trainer.accumulate(&batch).unwrap();
                    report.loss_sum / report.target_tokens as f64
                };
                let mut difference = |step: f32| (loss(step) - loss(-step)) / (2.0 * f64::from(step));
                let difference = (4.0 * difference(1e-3) - difference(2e-3)) / 3.0;
                let along: f64 = gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum();
                let size = gradient.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt();
                assert!(size > 0.0, "{kind} {shape} {name}: no gradient");
                assert!(
                    (along - difference).abs() < 1e-2 * size + 1e-4,
                    "{kind} {shape} {name}: {along} along, {difference} by difference, size {size}"
                );
            }
        }
    }
}

#[test]
fn an_adapter_that_is_taken_off_leaves_no_trace() {
    let ops = cpu(2);
    let batch = support::documents(4, &[6, 11]);
    for (shape, _) in support::SHAPES {
        let base = support::decoder(&ops, shape, Trainability::Frozen).logits(&batch).unwrap();
        for (kind, config) in kinds() {
            let mut decoder = support::decoder(&ops, shape, Trainability::Frozen);
            let (fresh, moved) = (decoder.fresh_adapter(&config, 9).unwrap(), moved(&decoder, &config));
            decoder.attach(&fresh).unwrap();
            for (found, expected) in decoder.logits(&batch).unwrap().iter().zip(&base) {
                assert!((found - expected).abs() < 1e-5, "{shape} {kind}: a fresh adapter changes nothing");
            }
            decoder.attach(&moved).unwrap();
            let adapted = decoder.logits(&batch).unwrap();
            assert_ne!(adapted, base);
            // A fresh adapter is made of the base, whatever is attached.
            assert_eq!(decoder.fresh_adapter(&config, 9).unwrap(), fresh, "{shape} {kind}");
            assert_eq!(decoder.adapter(&moved.config).unwrap(), moved, "{shape} {kind}");
            decoder.detach();
            assert_eq!(decoder.logits(&batch).unwrap(), base, "{shape} {kind}");
            decoder.attach(&moved).unwrap();
            assert_eq!(decoder.logits(&batch).unwrap(), adapted, "{shape} {kind}");
        }
    }
}

#[test]
fn an_adapter_comes_back_from_its_folder() {
    let ops = cpu(1);
    for (kind, config) in kinds() {
        let adapter = moved(&support::decoder(&ops, "gemma2", Trainability::Frozen), &config);
        let folder = tempfile::tempdir().unwrap();
        adapter.save(folder.path()).unwrap();
        assert_eq!(Adapter::load(folder.path()).unwrap(), adapter, "{kind}");
    }
}

/// An output whose weights are all zero, as of an id that no text had, has no direction: PEFT divides 0 by 0 there.
#[test]
fn dora_on_a_row_of_zeros_stays_finite() {
    let ops = cpu(1);
    let mut decoder = support::decoder(&ops, "llama", Trainability::Frozen);
    let targets = vec!["up_proj".to_owned()];
    let dora = AdapterConfig { use_dora: true, ..AdapterConfig::new(2, 4.0, targets.clone()) };
    let whole = AdapterConfig { modules_to_save: targets, ..AdapterConfig::new(2, 4.0, Vec::new()) };
    let (mut adapter, mut base) = (decoder.fresh_adapter(&dora, 3).unwrap(), decoder.fresh_adapter(&whole, 3).unwrap());
    base.saved_tensors.values_mut().for_each(|saved| saved.values[..20].fill(0.0));
    for module in adapter.modules.values_mut() {
        module.magnitude.as_mut().unwrap()[0] = 0.0;
    }
    adapter.saved_tensors = base.saved_tensors;
    decoder.attach(&adapter).unwrap();
    let mut trainer = Trainer::new(decoder, options(Recompute::None)).unwrap();
    assert!(train(&mut trainer, 2).iter().all(|tensor| tensor.value.iter().all(|value| value.is_finite())));
}

#[test]
fn without_its_adapter_a_model_is_its_base_and_has_it_again_afterwards() {
    let (ops, batch) = (cpu(1), support::documents(5, &[8, 5]));
    for shape in ["llama", "llama, untied, biases"] {
        let expected = support::decoder(&ops, shape, Trainability::Frozen).score(&batch).unwrap();
        for (kind, config) in kinds() {
            let mut decoder = support::decoder(&ops, shape, Trainability::Frozen);
            let adapter = moved(&decoder, &config);
            decoder.attach(&adapter).unwrap();
            let before = decoder.score(&batch).unwrap();
            assert_ne!(before, expected, "{shape} {kind}");
            assert_eq!(decoder.without_adapter(|base| base.score(&batch)).unwrap(), expected, "{shape} {kind}");
            assert_eq!(decoder.score(&batch).unwrap(), before, "{shape} {kind}");
        }
    }
}

#[test]
fn a_copy_of_one_of_a_tied_pair_leaves_the_other() {
    let ops = cpu(1);
    let batch = support::documents(5, &[8]);
    let base = support::decoder(&ops, "llama", Trainability::Frozen).layer_outputs(&batch).unwrap();
    for (saved, moves_layers) in [("lm_head", false), ("embed_tokens", true)] {
        let mut decoder = support::decoder(&ops, "llama", Trainability::Frozen);
        let modules_to_save = vec![saved.to_owned()];
        let config = AdapterConfig { modules_to_save, ..AdapterConfig::new(2, 4.0, Vec::new()) };
        let adapter = moved(&decoder, &config);
        decoder.attach(&adapter).unwrap();
        assert_eq!(decoder.layer_outputs(&batch).unwrap() != base, moves_layers, "{saved}");
        let logits = decoder.logits(&batch).unwrap();
        decoder.detach();
        assert_ne!(decoder.logits(&batch).unwrap(), logits, "{saved}");
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let ops = cpu(1);
    let mut decoder = support::decoder(&ops, "llama", Trainability::Frozen);
    let config = AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned()]);
    let saved = AdapterConfig { modules_to_save: vec!["model.norm".to_owned()], ..config.clone() };
    let mut adapter = decoder.fresh_adapter(&saved, 1).unwrap();
    adapter.saved_tensors.values_mut().for_each(|saved| saved.shape = vec![21]);
    let error = decoder.attach(&adapter).unwrap_err();
    assert!(matches!(&error, AttachError::SavedShape { tensor, .. } if tensor == "model.norm.weight"), "{error}");
    let whole = AdapterConfig { dropout: 1.0, ..config.clone() };
    assert!(matches!(decoder.fresh_adapter(&whole, 1), Err(AttachError::Dropout(_))));
    let unknown = AdapterConfig { modules_to_save: vec!["score".to_owned()], ..config };
    let error = decoder.fresh_adapter(&unknown, 1).unwrap_err();
    assert!(matches!(error, AttachError::Targets(_)), "{error}");
    assert_eq!(decoder.ops().name(), "cpu");
}

#[test]
fn first_values_are_the_same_without_a_decoder() {
    let ops = cpu(1);
    for family in ["llama32", "phi3", "gemma2"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(family);
        let (decoder, files) = (
            Decoder::load(Arc::clone(&ops), &folder, Trainability::Frozen).unwrap(),
            Checkpoint::open(&folder).unwrap(),
        );
        for (kind, settings) in kinds() {
            let expected = decoder.fresh_adapter(&settings, 7).unwrap();
            let mut found = Adapter::fresh(&Modules::from(decoder.config()), &files, &settings, 7).unwrap();
            for (name, module) in &mut found.modules {
                // Norms are summed in another order.
                let expected = expected.modules[name].magnitude.clone();
                let pairs = module.magnitude.iter().flatten().zip(expected.iter().flatten());
                assert!(
                    pairs.into_iter().all(|(one, two)| (one - two).abs() <= 1e-6 * two),
                    "{family}, {kind}: {name}"
                );
                module.magnitude = expected;
            }
            assert!(found == expected, "{family}, {kind}");
        }
    }
}
