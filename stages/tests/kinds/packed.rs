//! A packed row scores as its documents one by one, through the stage and on real layer types.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use engine::test_bench::TestBench;
use model::batch::Batch;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::ops::Compute;
use model::parameter::Trainability;
use serde_json::json;
use stages::data::artifact::{IGNORE_INDEX, Shape, TokenRow, TokensFacts, TokensReader, TokensWriter};
use stages::kinds::pack::Pack;
use test_harness::test;

/// Documents of some lengths, of which each begins with a token of its own; every third token is not learned.
fn documents() -> Vec<TokenRow> {
    let mut state = 7_u32;
    let mut draw = |most: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % most
    };
    (0..24)
        .map(|number| {
            let length = 2 + draw(60);
            let ids: Vec<u32> = (0..length).map(|at| if at == 0 { number } else { draw(320) }).collect();
            let labels = ids.iter().map(|id| if id % 3 == 0 { IGNORE_INDEX } else { *id as i32 }).collect();
            TokenRow::document(ids, labels)
        })
        .collect()
}

/// The negative log-likelihoods of each document of a row, by its tokens.
fn scores(decoder: &mut Decoder<Cpu>, row: &TokenRow, found: &mut BTreeMap<Vec<u32>, Vec<f32>>) {
    let lengths = row.document_lengths.clone();
    let real = row.real_tokens();
    let batch = Batch {
        input_ids: row.input_ids[..real].to_vec(),
        labels: row.labels[..real].to_vec(),
        document_lengths: lengths.clone(),
        ..Batch::default()
    };
    let scored = decoder.score(&batch).unwrap();
    let mut start = 0;
    for length in lengths {
        let within = scored.iter().filter(|target| (start..start + length).contains(&target.token));
        let nll: Vec<f32> = within.map(|target| target.nll).collect();
        found.insert(row.input_ids[start..start + length].to_vec(), nll);
        start += length;
    }
}

#[test]
fn a_packed_row_scores_as_its_documents_one_by_one() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("tokens");
    std::fs::create_dir(&source).unwrap();
    let facts = TokensFacts { vocab_size: 320, ..TokensFacts::none(Shape::Prompt) };
    let mut writer = TokensWriter::tokens(&source, facts);
    documents().into_iter().for_each(|document| writer.write(document).unwrap());
    let (facts, _) = writer.finish(|_| ()).unwrap();
    let bench = TestBench::new(folder.path()).input("tokens.tokens", "tokens", &source, facts.to_facts()).unwrap();
    // mistral and gemma2 have a window of 16 tokens, gemma2 in every other layer.
    for family in ["llama31", "mistral", "gemma2"] {
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")).join(family);
        let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
        let mut decoder = Decoder::load(ops, &model, Trainability::Frozen).unwrap();
        for (strategy, splits) in [("next_fit", false), ("best_fit", false), ("next_fit", true)] {
            let with =
                json!({"tokens": "tokens", "max_seq_len": 96, "strategy": strategy, "split_across_pack": splits});
            let outputs = bench.run::<Pack>(with).unwrap();
            let (mut packed, mut alone) = (BTreeMap::new(), BTreeMap::new());
            let mut packs = TokensReader::open(&outputs["packs"]).unwrap();
            assert!(packs.len() < 18, "documents share rows");
            for pack in packs.iter() {
                let pack = pack.unwrap();
                scores(&mut decoder, &pack, &mut packed);
                let mut start = 0;
                for length in &pack.document_lengths {
                    let range = start..start + length;
                    start = range.end;
                    let one = TokenRow::document(pack.input_ids[range.clone()].to_vec(), pack.labels[range].to_vec());
                    scores(&mut decoder, &one, &mut alone);
                }
            }
            if !splits {
                assert_eq!(alone.keys().cloned().collect::<Vec<_>>(), {
                    let mut ids: Vec<_> = documents().into_iter().map(|document| document.input_ids).collect();
                    ids.sort();
                    ids
                });
            }
            assert_eq!(packed.keys().collect::<Vec<_>>(), alone.keys().collect::<Vec<_>>());
            for (document, expected) in &alone {
                let found = &packed[document];
                assert_eq!(found.len(), expected.len());
                for (found, expected) in found.iter().zip(expected) {
                    let difference = (found - expected).abs();
                    assert!(difference <= 1e-5 * expected.abs().max(1.0), "{family}, {strategy}: {difference}");
                }
            }
        }
    }
}
