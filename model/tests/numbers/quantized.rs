//! Adapters trained on a frozen base whose weights are quantised: forward and backward are those of the base
//! dequantised.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::checkpoint::{Checkpoint, ValueRows};
use model::cpu::{Cpu, InstructionSet, Tensor};
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::ops::{Compute, Ops, WeightRole, WeightSource};
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, Trainer};
use model::weights::{Activations, BlockFormat, Quantization};
use test_harness::{Unmet, test};

use crate::support::{self, cpu_with};

/// Families: with biases, with norms of heads, with fused projections, with soft-caps, tied and untied.
const FAMILIES: [&str; 5] = ["llama31", "qwen2", "qwen3", "phi3", "gemma2"];

fn golden(family: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")).join(family)
}

fn cpu(compute: Compute, set: InstructionSet, format: Option<BlockFormat>) -> Result<Arc<Cpu>, Unmet> {
    let cpu = cpu_with(2, compute, set)?;
    Ok(Arc::new(match format {
        Some(format) => cpu.quantizing(Quantization { format, activations: Activations::Computed }),
        None => cpu,
    }))
}

/// A base whose weights are quantised, and that of its dequantised weights, each with the same adapter.
fn bases(family: &str, compute: Compute, set: InstructionSet, format: BlockFormat) -> Result<[Decoder<Cpu>; 2], Unmet> {
    let folder = golden(family);
    let ops = cpu(compute, set, Some(format))?;
    let quantised = Decoder::load(Arc::clone(&ops), &folder, Trainability::Frozen).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let values = |name: &str, shape: &[usize]| {
        let values = checkpoint.tensor_f32_of_shape(name, shape)?;
        let &[rows, columns] = shape else { return Ok(values) };
        let is_table = name.contains("embed_tokens") || name.contains("lm_head");
        let role = if is_table { WeightRole::Table } else { WeightRole::Matrix };
        let stored = ValueRows::new(&values, columns);
        let weight = ops.prepare(WeightSource::Rows(&stored), [rows, columns], role).unwrap();
        let mut dequantised = Tensor::default();
        ops.embed(&weight, &(0..rows as u32).collect::<Vec<_>>(), 1.0, &mut dequantised).unwrap();
        assert_ne!(dequantised.values(), values, "{name}");
        Ok(dequantised.values().to_vec())
    };
    let config = quantised.config().clone();
    let dequantised = Decoder::build(cpu(compute, set, None)?, config, Trainability::Frozen, values).unwrap();
    let adapter = adapter(&quantised);
    Ok([quantised, dequantised].map(|mut decoder| {
        decoder.attach(&adapter).unwrap();
        decoder
    }))
}

/// An adapter on every projection, with an effect.
fn adapter(decoder: &Decoder<Cpu>) -> Adapter {
    let targets = match decoder.config().layer_modules().len() {
        4 => ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"].map(str::to_owned).to_vec(),
        _ => ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].map(str::to_owned).to_vec(),
    };
    let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(4, 8.0, targets), 3).unwrap();
    for (seed, module) in adapter.modules.values_mut().enumerate() {
        let values = module.lora_b.iter_mut().enumerate();
        values.for_each(|(index, value)| *value = 0.05 * ((index + 7 * seed) as f32).sin());
    }
    adapter
}

fn trainer(decoder: Decoder<Cpu>) -> Trainer<Cpu> {
    let options = TrainOptions::new(Trained::Adapter, Optimizer::AdamW(AdamW::default()));
    Trainer::new(decoder, options).unwrap()
}

/// The loss and the gradients of all that is trained.
fn gradients(decoder: Decoder<Cpu>, batch: &Batch) -> (f64, Vec<(String, Vec<f32>)>) {
    let mut trainer = trainer(decoder);
    let loss = trainer.accumulate(batch).unwrap().loss_sum;
    let decoder = trainer.decoder();
    let gradient = |parameter: &model::parameter::Parameter<Cpu>| {
        let training = parameter.training.as_ref()?;
        Some((parameter.name.clone(), decoder.ops().read(&training.gradient).unwrap()))
    };
    (loss, decoder.parameters().into_iter().filter_map(gradient).collect())
}

fn batch() -> Batch {
    support::documents(5, &[40, 9, 3])
}

#[test(each = InstructionSet::ALL)]
fn gradients_are_those_of_the_dequantised_base(set: InstructionSet) -> Result<(), Unmet> {
    for family in FAMILIES {
        for format in BlockFormat::ALL {
            let [quantised, dequantised] = bases(family, Compute::F32, set, format)?;
            let (found, expected) = (gradients(quantised, &batch()), gradients(dequantised, &batch()));
            let case = format!("{family} {}", format.name());
            assert!(expected.1.len() > 8 && expected.1.iter().all(|(_, values)| values.iter().any(|x| *x != 0.0)));
            assert_eq!(found.0.to_bits(), expected.0.to_bits(), "loss of {case}");
            assert_eq!(found.1, expected.1, "{case}");
        }
    }
    Ok(())
}

/// Nearly so: a base that is stored in bf16 has embeddings that are rounded to it, too.
#[test(each = InstructionSet::ALL)]
fn gradients_in_bf16_are_near_those_of_the_dequantised_base(set: InstructionSet) -> Result<(), Unmet> {
    for family in FAMILIES {
        let [quantised, dequantised] = bases(family, Compute::Bf16, set, BlockFormat::Int8)?;
        let (found, expected) = (gradients(quantised, &batch()).1, gradients(dequantised, &batch()).1);
        let values = |gradients: Vec<(String, Vec<f32>)>| gradients.into_iter().flat_map(|(_, values)| values);
        let pairs: Vec<_> = values(found).zip(values(expected)).map(|(a, b)| (f64::from(a), f64::from(b))).collect();
        let norm = |of: fn(&(f64, f64)) -> f64| pairs.iter().map(|pair| of(pair).powi(2)).sum::<f64>().sqrt();
        let distance = norm(|(a, b)| a - b) / norm(|(_, b)| *b);
        assert!(distance < 0.03, "{family}: {distance}");
    }
    Ok(())
}

/// Along a direction through all that is trained, the gradient is the difference of the loss.
#[test]
fn gradients_are_differences_of_the_loss() {
    for family in FAMILIES {
        for format in BlockFormat::ALL {
            let [quantised, _] = bases(family, Compute::F32, InstructionSet::detect(), format).unwrap();
            let mut trainer = trainer(quantised);
            let ops = Arc::clone(trainer.decoder().ops());
            trainer.accumulate(&batch()).unwrap();
            let direction = |name: &str, count| fresh_tensor(7, name, count, Fill::Normal(1.0));
            let (mut along, mut trained) = (0.0, Vec::new());
            for parameter in trainer.decoder().parameters() {
                let Some(training) = &parameter.training else { continue };
                let (values, gradient) = (ops.read(&parameter.value).unwrap(), ops.read(&training.gradient).unwrap());
                let direction = direction(&parameter.name, values.len());
                along += gradient.iter().zip(&direction).map(|(g, d)| f64::from(g * d)).sum::<f64>();
                trained.push((parameter.name.clone(), values));
            }
            let mut loss = |step: f32| {
                for parameter in trainer.decoder_mut().parameters_mut() {
                    let Some((name, values)) = trained.iter().find(|(name, _)| *name == parameter.name) else {
                        continue;
                    };
                    let direction = direction(name, values.len());
                    let moved: Vec<f32> = values.iter().zip(direction).map(|(x, d)| x + step * d).collect();
                    ops.write(&mut parameter.value, &moved).unwrap();
                }
                let scores = trainer.decoder_mut().score(&batch()).unwrap();
                scores.iter().map(|target| f64::from(target.nll)).sum::<f64>()
            };
            let mut difference = |step: f32| (loss(step) - loss(-step)) / (2.0 * f64::from(step));
            let difference = (4.0 * difference(5e-4) - difference(1e-3)) / 3.0;
            let case = format!("{family} {}: {along} along, {difference} by difference", format.name());
            println!("{case}");
            assert!(along.abs() > 0.1 && (along - difference).abs() < 0.02 * along.abs() + 0.05, "{case}");
        }
    }
}

#[test]
fn a_lora_on_a_quantised_base_learns_and_leaves_the_base_as_it_is() {
    for format in BlockFormat::ALL {
        for compute in [Compute::F32, Compute::Bf16] {
            let [quantised, _] = bases("llama31", compute, InstructionSet::detect(), format).unwrap();
            let mut trainer = trainer(quantised);
            let mut losses = Vec::new();
            for _ in 0..30 {
                trainer.accumulate(&batch()).unwrap();
                // The trainer's own audit compares the bits of all that is frozen.
                losses.push(trainer.step(1e-2).unwrap().loss);
            }
            let (first, last) = (losses[0], losses[losses.len() - 1]);
            assert!(last < 0.5 * first, "{} {}: from {first} to {last}", format.name(), compute.name());
        }
    }
}
