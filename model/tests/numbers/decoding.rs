//! Decoding in every type of weights: how near to f32 it stays, and that nothing but the prompt decides an answer.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::config::Config;
use model::cpu::{Cpu, InstructionSet};
use model::decoder::Decoder;
use model::generation::{Generator, Options, Request};
use model::ops::{Compute, Ops};
use model::parameter::Trainability;
use model::peft::AdapterConfig;
use model::sampling::Sampling;
use model::session::{Append, Session};
use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, Trainer};
use model::weights::{Activations, BlockFormat, Quantization};
use test_harness::{Unmet, test};

use crate::support::{self, cpu_with};

/// A dtype to compute in, and how weights are quantised.
type Precision = (Compute, Option<BlockFormat>);

const PRECISIONS: [Precision; 5] = [
    (Compute::F32, None),
    (Compute::Bf16, None),
    (Compute::F32, Some(BlockFormat::Int8)),
    (Compute::F32, Some(BlockFormat::Int4)),
    (Compute::Bf16, Some(BlockFormat::Int8)),
];
/// The root of the mean squared distance of logits from those in f32 is within this share of the logits' own, in 8 and
/// in 4 bits. Blocks of 8 bits are off by 0.5 % of normally distributed values, of 4 bits by 8 %; the rest is what two
/// layers make of that, with random weights, whose logits nothing keeps apart.
const LOGITS: [(BlockFormat, f64); 2] = [(BlockFormat::Int8, 0.06), (BlockFormat::Int4, 0.5)];

fn golden(family: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")).join(family)
}

fn quantizing(cpu: Cpu, format: Option<BlockFormat>) -> Arc<Cpu> {
    let quantization = format.map(|format| Quantization { format, activations: Activations::Int8 });
    Arc::new(match quantization {
        Some(quantization) => cpu.quantizing(quantization),
        None => cpu,
    })
}

fn load(family: &Path, threads: usize, (compute, format): Precision) -> Decoder<Cpu> {
    Decoder::load(quantizing(Cpu::new(threads, compute).unwrap(), format), family, Trainability::Frozen).unwrap()
}

fn logits(family: &Path, precision: Precision) -> Vec<f32> {
    load(family, 2, precision).logits(&support::documents(1, &[30, 2])).unwrap()
}

#[test]
fn quantised_logits_of_every_family_stay_near_those_in_f32() {
    let mut families = 0;
    for family in std::fs::read_dir(golden("")).unwrap().map(|entry| entry.unwrap().path()) {
        if !family.join("model.safetensors").exists() || Config::read(&family).is_err() {
            continue;
        }
        families += 1;
        let expected = logits(&family, (Compute::F32, None));
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let size = norm(&mut expected.iter().copied());
        for (format, most) in LOGITS {
            let found = logits(&family, (Compute::F32, Some(format)));
            let distance = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / size;
            println!("{} {}: {distance:.4}", family.display(), format.name());
            assert!(distance > 0.0 && distance < most, "{} {}: {distance}", family.display(), format.name());
        }
    }
    assert!(families >= 8);
}

/// The logits after a prompt, and after each of a few tokens more, of the sequences named among those of some prompts.
fn answers(decoder: &Decoder<Cpu>, prompts: &[&[u32]]) -> Vec<Vec<Vec<f32>>> {
    let mut session = Session::new(decoder, prompts.len(), 64).unwrap();
    let mut append = |tokens: &dyn Fn(usize) -> Vec<u32>| {
        let tokens: Vec<Vec<u32>> = (0..prompts.len()).map(tokens).collect();
        let new: Vec<_> = tokens.iter().enumerate().map(|(sequence, tokens)| Append::new(sequence, tokens)).collect();
        session.append(decoder, &new).unwrap()
    };
    let mut steps = vec![append(&|sequence| prompts[sequence].to_vec())];
    for step in 1..4 {
        steps.push(append(&|sequence| vec![prompts[sequence][0] + step]));
    }
    (0..prompts.len()).map(|sequence| steps.iter().map(|logits| logits[sequence].clone()).collect()).collect()
}

#[test]
fn company_and_threads_change_no_bit() {
    let tokens: Vec<u32> = (0..60).map(|token| token * 7 % 300 + 1).collect();
    let prompts: Vec<&[u32]> =
        [1, 20, 5, 3, 50, 16, 17, 1, 33, 2].into_iter().map(|length| &tokens[..length]).collect();
    for precision in PRECISIONS {
        let decoder = load(&golden("llama31"), 2, precision);
        let together = answers(&decoder, &prompts);
        for threads in [1, 3] {
            let other = load(&golden("llama31"), threads, precision);
            assert!(answers(&other, &prompts) == together, "{precision:?}: {threads} threads");
        }
        for (prompt, expected) in prompts.iter().zip(&together) {
            let alone = answers(&decoder, &[prompt]).remove(0);
            assert!(alone == *expected, "{precision:?}: a prompt of {} tokens alone", prompt.len());
        }
    }
}

#[test(each = InstructionSet::ALL)]
fn every_set_answers_alike_in_blocks(set: InstructionSet) -> Result<(), Unmet> {
    let tokens = [5, 9, 2, 77, 31];
    for format in BlockFormat::ALL {
        let answers = |cpu: Cpu| {
            let ops = quantizing(cpu, Some(format));
            answers(&Decoder::load(ops, &golden("qwen3"), Trainability::Frozen).unwrap(), &[&tokens]).remove(0).concat()
        };
        let expected = answers(cpu_with(1, Compute::F32, InstructionSet::Portable)?);
        for (found, expected) in answers(cpu_with(1, Compute::F32, set)?).iter().zip(expected) {
            // All but the large products may round otherwise, and what is rounded to blocks after it may then be a
            // step off.
            assert!((found - expected).abs() < 0.05, "{}: {found} {expected}", format.name());
        }
    }
    Ok(())
}

#[test]
fn a_text_learned_by_heart_is_answered_alike_in_every_type() {
    let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    let options = TrainOptions {
        max_grad_norm: Some(1.0),
        ..TrainOptions::new(Trained::Weights, Optimizer::AdamW(AdamW::default()))
    };
    let mut trainer = Trainer::new(support::decoder(&ops, "llama", Trainability::Trainable), options).unwrap();
    let text = Batch::text(support::documents(5, &[16]).input_ids);
    for _ in 0..100 {
        trainer.accumulate(&text).unwrap();
        trainer.step(1e-2).unwrap();
    }
    let values: HashMap<String, Vec<f32>> = trainer
        .decoder()
        .parameters()
        .into_iter()
        .map(|parameter| (parameter.name.clone(), ops.read(&parameter.value).unwrap()))
        .collect();
    let config = trainer.decoder().config();
    for (compute, format) in PRECISIONS {
        let ops = quantizing(Cpu::new(2, compute).unwrap(), format);
        let decoder =
            Decoder::build(ops, config.clone(), Trainability::Frozen, |name, _| Ok(values[name].clone())).unwrap();
        let options = Options {
            max_new_tokens: 13,
            min_new_tokens: 0,
            stop_token_ids: Vec::new(),
            sampling: Sampling::GREEDY,
            batch_size: 1,
        };
        let requests = [Request { prompt: &text.input_ids[..3], row: 0 }];
        let answer = Generator::new(&decoder, options).unwrap().complete(&requests, &mut ()).unwrap().remove(0);
        assert_eq!(answer.ids, text.input_ids[3..], "{compute:?} {format:?}");
    }
}

#[test]
fn an_adapter_acts_on_quantised_weights() {
    for format in BlockFormat::ALL {
        let mut decoder = load(&golden("llama31"), 2, (Compute::F32, Some(format)));
        let before = decoder.logits(&support::documents(1, &[30])).unwrap();
        let targets = ["q_proj", "down_proj"].map(str::to_owned).to_vec();
        let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(4, 8.0, targets), 3).unwrap();
        adapter.modules.values_mut().for_each(|module| module.lora_b.fill(0.05));
        decoder.attach(&adapter).unwrap();
        assert_ne!(decoder.logits(&support::documents(1, &[30])).unwrap(), before);
    }
}
