//! Continuations of contexts: scored as whole documents are, and to the bit whatever is scored beside them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::{Batch, IGNORE_INDEX};
use model::blocks::Blocks;
use model::candle::Candle;
use model::config::Config;
use model::cpu::{Cpu, InstructionSet};
use model::decoder::Decoder;
use model::ops::{Compute, TokenScore};
use model::parameter::Trainability;
use model::scoring::{Context, Scorer};
use model::session::{Append, LogitsAfter, Session};
use model::weights::{Activations, BlockFormat, Quantization};
use test_harness::{Unmet, test};

use crate::support::{self, SHAPES, cpu_with};

fn golden(family: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")).join(family)
}

/// Tokens that no two places have alike.
fn tokens(seed: usize, length: usize, vocabulary: usize) -> Vec<u32> {
    (0..length).map(|at| ((at * (seed * 2 + 7) + seed * 31 + at * at) % (vocabulary - 1) + 1) as u32).collect()
}

/// Questions behind the same beginning, each with what may follow.
type Questions = Vec<(Vec<u32>, Vec<Vec<u32>>)>;

fn asked(beginning: usize, vocabulary: usize) -> Questions {
    let beginning = tokens(1, beginning, vocabulary);
    let question = |number: usize, length: usize, continuations: &[usize]| {
        let context = [beginning.clone(), tokens(number + 2, length, vocabulary)].concat();
        let of = |(at, length): (usize, &usize)| tokens(number * 9 + at + 3, *length, vocabulary);
        (context, continuations.iter().enumerate().map(of).collect())
    };
    vec![
        question(0, 5, &[1, 1, 1, 1]),
        question(1, 12, &[3, 1, 7]),
        question(2, 1, &[2]),
        question(3, 9, &[4, 4]),
        question(4, 3, &[6]),
    ]
}

fn contexts(asked: &Questions) -> Vec<Context<'_>> {
    let of =
        |(ids, continuations): &'_ (Vec<u32>, Vec<Vec<u32>>)| -> (usize, usize) { (ids.len(), continuations.len()) };
    assert!(asked.iter().all(|one| of(one).0 > 0));
    asked
        .iter()
        .map(|(ids, continuations)| Context { ids, continuations: continuations.iter().map(Vec::as_slice).collect() })
        .collect()
}

fn score<B: Blocks>(decoder: &Decoder<B>, asked: &Questions) -> Vec<Vec<Vec<TokenScore>>> {
    Scorer::default().score(decoder, &contexts(asked)).unwrap()
}

/// Each continuation in a document of its own.
fn as_documents<B: Blocks>(decoder: &mut Decoder<B>, asked: &Questions) -> Vec<Vec<Vec<f32>>> {
    let mut of = |context: &Vec<u32>, continuation: &Vec<u32>| {
        let mut labels = vec![IGNORE_INDEX; context.len()];
        labels.extend(continuation.iter().map(|id| *id as i32));
        let batch = Batch::document([context.as_slice(), continuation].concat(), labels);
        decoder.score(&batch).unwrap().into_iter().map(|score| score.nll).collect()
    };
    asked.iter().map(|(context, all)| all.iter().map(|continuation| of(context, continuation)).collect()).collect()
}

fn assert_near(found: &[Vec<Vec<TokenScore>>], expected: &[Vec<Vec<f32>>], bound: f32, what: &str) {
    let found = found.iter().flatten().flatten().map(|score| score.nll);
    let expected: Vec<f32> = expected.iter().flatten().flatten().copied().collect();
    assert_eq!(found.clone().count(), expected.len(), "{what}");
    for (found, expected) in found.zip(expected) {
        assert!((found - expected).abs() < bound, "{what}: {found} {expected}");
    }
}

#[test]
fn continuations_score_what_whole_documents_score() {
    let cpu = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    let candle = Arc::new(Candle::on_processor());
    // Behind 40 tokens what is shared has a pass of its own, behind 3 it has not.
    for beginning in [3, 40] {
        let asked = asked(beginning, 37);
        for (shape, _) in SHAPES {
            let mut decoder = support::decoder(&cpu, shape, Trainability::Frozen);
            let expected = as_documents(&mut decoder, &asked);
            assert_near(&score(&decoder, &asked), &expected, 2e-5, shape);
            assert_near(
                &score(&support::decoder(&candle, shape, Trainability::Frozen), &asked),
                &expected,
                2e-4,
                shape,
            );
        }
    }
}

#[test]
fn frequencies_that_change_with_the_length_are_those_of_the_whole_text() {
    let rope = r#""rope_scaling": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2], "long_factor": [2.0, 3.0, 4.0]}"#;
    let json = format!(
        r#"{{"model_type": "phi3", "vocab_size": 37, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, {rope}}}"#
    );
    let config = Config::from_json(&json).unwrap();
    let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    let fill = model::init::Fill::Normal(0.3);
    let mut decoder = Decoder::build(ops, config, Trainability::Frozen, |name, shape| {
        Ok(model::init::fresh_tensor(1, name, shape.iter().product(), fill))
    })
    .unwrap();
    // Within the short length, over its border, and beyond it.
    for beginning in [2, 11, 40] {
        let asked = asked(beginning, 37);
        assert_near(&score(&decoder, &asked), &as_documents(&mut decoder, &asked), 2e-5, "longrope");
    }
}

#[test(each = InstructionSet::ALL)]
fn company_and_what_is_shared_change_no_bit(set: InstructionSet) -> Result<(), Unmet> {
    for (compute, format) in [(Compute::F32, None), (Compute::Bf16, None), (Compute::F32, Some(BlockFormat::Int8))] {
        let ops = cpu_with(2, compute, set)?;
        let ops = Arc::new(match format {
            Some(format) => ops.quantizing(Quantization { format, activations: Activations::Int8 }),
            None => ops,
        });
        for family in ["llama31", "gemma2", "mistral", "qwen3"] {
            let decoder = Decoder::load(Arc::clone(&ops), &golden(family), Trainability::Frozen).unwrap();
            let asked = asked(150, 300);
            let together = score(&decoder, &asked);
            for (at, one) in asked.iter().enumerate() {
                // Alone nothing is shared.
                let alone = score(&decoder, &vec![one.clone()]);
                assert!(alone[0] == together[at], "{family} {compute:?} {format:?}: context {at} alone");
                for (number, continuation) in one.1.iter().enumerate() {
                    let single = score(&decoder, &vec![(one.0.clone(), vec![continuation.clone()])]);
                    assert!(single[0][0] == together[at][number], "{family} {compute:?} {format:?}: {at}, {number}");
                }
            }
            // What was kept of other contexts serves, whole, in part or not at all.
            let mut scorer = Scorer::default();
            for first in [1, 3, 0] {
                let some: Questions = asked[first..].to_vec();
                let found = scorer.score(&decoder, &contexts(&some)).unwrap();
                assert!(found == together[first..], "{family} {compute:?}: from {first} on");
                let longer: Questions =
                    some.iter().map(|(ids, all)| (ids[..ids.len().min(100)].to_vec(), all.clone())).collect();
                assert!(scorer.score(&decoder, &contexts(&longer)).unwrap() == score(&decoder, &longer));
            }
            // Others are much shorter, and begin with other tokens, all or the last of them.
            let others = |same: usize| -> Questions {
                let beginning = [tokens(1, same, 300), tokens(9, 40 - same, 300)].concat();
                (0..3).map(|at| ([beginning.clone(), tokens(at + 20, 5, 300)].concat(), vec![vec![7]])).collect()
            };
            for same in [0, 20] {
                let others = others(same);
                scorer.score(&decoder, &contexts(&asked)).unwrap();
                assert!(scorer.score(&decoder, &contexts(&others)).unwrap() == score(&decoder, &others));
            }
        }
    }
    Ok(())
}

#[test(each = InstructionSet::ALL)]
fn a_sequence_is_the_same_bits_however_it_is_cut(set: InstructionSet) -> Result<(), Unmet> {
    for compute in [Compute::F32, Compute::Bf16] {
        let ops = Arc::new(cpu_with(2, compute, set)?);
        for family in ["llama31", "gemma2"] {
            let decoder = Decoder::load(Arc::clone(&ops), &golden(family), Trainability::Frozen).unwrap();
            let ids = tokens(1, 155, 300);
            let logits = |cut: usize| {
                let mut session = Session::new(&decoder, 1, 200).unwrap();
                session
                    .append(
                        &decoder,
                        &[Append { sequence: 0, tokens: &ids[..cut], logits: LogitsAfter::None, adapter: 0 }],
                    )
                    .unwrap();
                session.append(&decoder, &[Append::new(0, &ids[cut..])]).unwrap()
            };
            let expected = logits(64);
            // Pieces of many rows each: products of few have another order of sums.
            for cut in (17..138).step_by(3) {
                assert!(logits(cut) == expected, "{family} {compute:?}: cut at {cut}");
            }
        }
    }
    Ok(())
}
