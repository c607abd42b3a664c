//! The packer and the stage, against torchtune's packs and the laws of packing.

use std::path::{Path, PathBuf};

use engine::error::Cause;
use engine::test_bench::TestBench;
use serde_json::{Value, json};

use super::*;
use crate::data::artifact::{IGNORE_INDEX, Role};

fn golden_json(path: &str) -> Value {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data"));
    serde_json::from_slice(&std::fs::read(folder.join(path)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn labels(value: &Value) -> Vec<i32> {
    value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect()
}

fn document(length: usize) -> TokenRow {
    TokenRow::document(vec![7; length], vec![7; length])
}

/// Packs documents of some lengths.
fn pack(packer: NextFit, documents: impl IntoIterator<Item = TokenRow>) -> Result<Vec<TokenRow>, TooLong> {
    let mut packer = packer;
    let mut packs = Vec::new();
    for document in documents {
        packer.push(&document)?;
        packs.extend(std::iter::from_fn(|| packer.next_full()));
    }
    packs.extend(packer.finish());
    Ok(packs)
}

#[test]
fn packs_equal_torchtunes() {
    let sft = golden_json("sft.json");
    for case in golden_json("packs.json").as_array().unwrap() {
        let rows = if case["rows"].is_array() { &case["rows"] } else { &sft[0]["rows"] };
        let documents =
            rows.as_array().unwrap().iter().map(|row| TokenRow::document(ids(&row["tokens"]), labels(&row["labels"])));
        let max_seq_len = case["max_seq_len"].as_u64().unwrap() as usize;
        let splits = case["split_across_pack"].as_bool().unwrap();
        let packs = pack(NextFit::new(max_seq_len, splits, 0), documents).unwrap();
        let expected = case["packs"].as_array().unwrap();
        assert_eq!(packs.len(), expected.len());
        for (pack, expected) in packs.iter().zip(expected) {
            assert_eq!(pack.input_ids, ids(&expected["tokens"]));
            assert_eq!(pack.labels, labels(&expected["labels"]));
            let mut lengths = pack.document_lengths.clone();
            // torchtune counts padding as one more document.
            lengths.extend(Some(max_seq_len - pack.real_tokens()).filter(|padding| *padding > 0));
            let expected: Vec<usize> = ids(&expected["seq_lens"]).into_iter().map(|length| length as usize).collect();
            assert_eq!(lengths, expected);
        }
    }
}

#[test]
fn a_row_that_is_exactly_full_holds_no_part_of_the_next_document() {
    let lengths = |splits, documents: &[usize]| -> Vec<Vec<usize>> {
        let packs = pack(NextFit::new(8, splits, 0), documents.iter().map(|length| document(*length))).unwrap();
        packs.into_iter().map(|pack| pack.document_lengths).collect()
    };
    assert_eq!(lengths(false, &[3, 4, 2, 6, 1]), [vec![3, 4], vec![2, 6], vec![1]]);
    assert_eq!(lengths(true, &[3, 4, 2, 6, 1]), [vec![3, 4, 1], vec![1, 6, 1]]);
    assert_eq!(lengths(true, &[8, 20]), [vec![8], vec![8], vec![8], vec![4]]);
    assert_eq!(lengths(false, &[8, 8]), [vec![8], vec![8]]);
}

/// Lengths without a pattern, the same every time.
fn lengths(count: usize, longest: usize) -> impl Iterator<Item = usize> {
    let mut state = 88_172_645_463_325_252_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        1 + (state % longest as u64) as usize
    })
    .take(count)
}

#[test]
fn packing_loses_no_token_and_keeps_their_order() {
    for (splits, longest) in [(false, 50), (true, 50), (true, 300)] {
        let mut next = 0;
        let documents: Vec<TokenRow> = lengths(500, longest)
            .map(|length| {
                let tokens: Vec<u32> = (next..next + length as u32).collect();
                next += length as u32;
                let labels = tokens.iter().map(|token| *token as i32).collect();
                TokenRow::document(tokens, labels)
            })
            .collect();
        let packs = pack(NextFit::new(50, splits, 9), documents).unwrap();
        assert!(packs.iter().all(|pack| pack.input_ids.len() == 50 && pack.labels.len() == 50));
        let tokens: Vec<u32> = packs.iter().flat_map(|pack| pack.input_ids[..pack.real_tokens()].to_vec()).collect();
        assert_eq!(tokens, (0..next).collect::<Vec<_>>());
        for pack in &packs {
            assert!(pack.input_ids[pack.real_tokens()..].iter().all(|token| *token == 9));
            assert!(pack.labels[pack.real_tokens()..].iter().all(|label| *label == IGNORE_INDEX));
        }
    }
}

#[test]
fn a_document_longer_than_a_row_is_refused_where_it_is_not_cut() {
    let error = pack(NextFit::new(8, false, 0), [document(9)]).unwrap_err();
    assert_eq!(error, TooLong { tokens: 9, max_seq_len: 8 });
}

fn facts(shape: Shape) -> TokensFacts {
    TokensFacts {
        vocab_size: 100,
        eos_token_id: Some(1),
        pad_token_id: Some(3),
        truncated: 2,
        ..TokensFacts::none(shape)
    }
}

fn tokens(folder: &Path, shape: Shape, lengths: &[usize]) -> TestBench {
    let source = folder.join("tokens");
    std::fs::create_dir(&source).unwrap();
    let mut writer = TokensWriter::tokens(&source, facts(shape));
    lengths.iter().for_each(|length| writer.write(document(*length)).unwrap());
    let (facts, _) = writer.finish(|_| ()).unwrap();
    TestBench::new(folder).input("tokens.tokens", "tokens", &source, facts.to_facts()).unwrap()
}

#[test]
fn the_stage_packs_plain_text_across_rows_and_says_what_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let bench = tokens(folder.path(), Shape::Text, &[3, 20, 2]);
    let outputs = bench.run::<Pack>(json!({"tokens": "tokens", "max_seq_len": 8})).unwrap();
    let mut packs = TokensReader::open(&outputs["packs"]).unwrap();
    let lengths: Vec<_> = packs.iter().map(|pack| pack.unwrap().document_lengths).collect();
    assert_eq!(lengths, [vec![3, 5], vec![8], vec![7, 1], vec![1]]);
    assert_eq!(packs.row(3).unwrap().input_ids[1..], [3; 7], "the tokenizer's padding");
    let facts = packs.facts();
    assert_eq!((facts.rows, facts.tokens, facts.padding, facts.longest_row), (4, 25, 7, 8));
    assert_eq!(facts.longest_document, 8, "a document is cut at the end of a row");
    assert_eq!(facts.truncated, 2, "counts of the tokens stay");
    assert_eq!(facts.target_tokens, 25 - facts.documents, "nothing predicts the first token of a piece");
}

#[test]
fn the_stage_refuses_a_prompt_that_does_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    let bench = tokens(folder.path(), Shape::Prompt, &[3, 20]);
    let error = bench.run::<Pack>(json!({"tokens": "tokens", "max_seq_len": 8})).unwrap_err();
    assert_eq!(error.cause, Cause::BadData);
    assert!(error.message.contains("row 2"), "{error}");
    let with = json!({"tokens": "tokens", "max_seq_len": 8, "split_across_pack": true});
    assert!(bench.run::<Pack>(with).is_ok());
}

#[test]
fn a_document_of_millions_of_tokens_is_cut_in_one_pass() {
    let length = 3_000_001;
    let packs = pack(NextFit::new(16, true, 0), [document(length)]).unwrap();
    assert_eq!(packs.len(), length.div_ceil(16));
    assert_eq!(packs.iter().map(TokenRow::real_tokens).sum::<usize>(), length);
}

#[test]
fn weights_groups_and_roles_go_where_their_documents_go() {
    let documents = || {
        (0..9u32).map(|number| {
            let length = 2 + number as usize % 4;
            let ids: Vec<u32> = (10 * number..).take(length).collect();
            TokenRow {
                weights: ids.iter().map(|id| *id as f32 / 8.0).collect(),
                groups: vec![u64::from(number)],
                roles: vec![if number % 2 == 0 { Role::Chosen } else { Role::Rejected }],
                ..TokenRow::text(ids)
            }
        })
    };
    let mut best = BestFit::new(8, false, 0);
    documents().for_each(|document| best.push(&document).unwrap());
    let best: Vec<TokenRow> = best.finish().collect();
    for packs in [
        pack(NextFit::new(8, false, 0), documents()).unwrap(),
        pack(NextFit::new(8, true, 0), documents()).unwrap(),
        best,
    ] {
        let mut found = 0;
        for pack in &packs {
            assert_eq!((pack.weights.len(), pack.groups.len()), (8, pack.document_lengths.len()));
            let mut start = 0;
            for (document, length) in pack.document_lengths.iter().enumerate() {
                for token in start..start + length {
                    let id = pack.input_ids[token];
                    assert_eq!((pack.weights[token], pack.group(document)), (id as f32 / 8.0, u64::from(id / 10)));
                    assert_eq!(pack.role(document) == Role::Chosen, id / 10 % 2 == 0);
                    found += 1;
                }
                start += length;
            }
            assert!(pack.weights[start..].iter().all(|weight| *weight == 0.0));
        }
        assert_eq!(found, documents().map(|document| document.real_tokens()).sum::<usize>());
    }
}

#[test]
fn one_row_is_one_pack_and_no_rows_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let outputs = tokens(folder.path(), Shape::Prompt, &[5]).run::<Pack>(json!({"tokens": "tokens", "max_seq_len": 8}));
    let facts = TokensFacts::from_facts(&outputs.unwrap()["packs"].description.facts).unwrap();
    assert_eq!((facts.rows, facts.documents, facts.tokens, facts.padding), (1, 1, 5, 3));
    assert_eq!((facts.target_tokens, facts.longest_row, facts.longest_document), (4, 8, 5));
    let folder = tempfile::tempdir().unwrap();
    let none = tokens(folder.path(), Shape::Prompt, &[]).run::<Pack>(json!({"tokens": "tokens", "max_seq_len": 8}));
    assert_eq!(none.unwrap_err().message, "the packs contain no token to train on");
}

#[test]
fn best_fit_loses_no_token_and_pads_less() {
    let documents = || -> Vec<TokenRow> {
        lengths(500, 50)
            .enumerate()
            .map(|(number, length)| TokenRow::document(vec![number as u32; length], vec![number as i32; length]))
            .collect()
    };
    let packed = || {
        let mut packer = BestFit::new(64, false, 9);
        documents().iter().for_each(|document| packer.push(document).unwrap());
        packer.finish().collect::<Vec<_>>()
    };
    let best = packed();
    assert!(best.iter().all(|pack| pack.input_ids.len() == 64 && pack.labels.len() == 64));
    let mut found = vec![0; 500];
    let mut first = Vec::new();
    for pack in &best {
        let mut start = 0;
        let numbers: Vec<u32> = pack
            .document_lengths
            .iter()
            .map(|length| {
                let end = start + length;
                let ids = &pack.input_ids[start..end];
                assert!(ids.iter().all(|id| *id == ids[0]), "a document stays in one piece");
                assert!(pack.labels[start..end].iter().all(|label| *label as u32 == ids[0]));
                start = end;
                found[ids[0] as usize] += length;
                ids[0]
            })
            .collect();
        assert!(numbers.is_sorted(), "documents stand in the order of the data");
        first.push(numbers[0]);
        assert!(pack.labels[start..].iter().all(|label| *label == IGNORE_INDEX));
    }
    assert!(first.is_sorted(), "and rows in that of their first documents");
    assert_eq!(found, documents().iter().map(|document| document.input_ids.len()).collect::<Vec<_>>());
    let next = pack(NextFit::new(64, false, 9), documents()).unwrap();
    let tokens: usize = lengths(500, 50).sum();
    assert!(best.len() < next.len() && best.len() <= tokens.div_ceil(64) + 2, "{} of {}", best.len(), next.len());
    assert_eq!(packed(), best);
}

#[test]
fn the_stage_packs_by_best_fit_and_cuts_only_what_is_too_long() {
    let folder = tempfile::tempdir().unwrap();
    let bench = tokens(folder.path(), Shape::Text, &[3, 20, 2, 5]);
    let with = json!({"tokens": "tokens", "max_seq_len": 8, "strategy": "best_fit"});
    let outputs = bench.run::<Pack>(with.clone()).unwrap();
    let mut packs = TokensReader::open(&outputs["packs"]).unwrap();
    let lengths: Vec<_> = packs.iter().map(|pack| pack.unwrap().document_lengths).collect();
    assert_eq!(lengths, [vec![3, 5], vec![8], vec![8], vec![4, 2]]);
    let folder = tempfile::tempdir().unwrap();
    let error = tokens(folder.path(), Shape::Prompt, &[3, 20]).run::<Pack>(with).unwrap_err();
    assert!(error.message.contains("row 2"), "{error}");
}

fn pair(group: u64, chosen: usize, rejected: usize) -> TokenRow {
    let mut row = TokenRow::default();
    for (role, length) in [(Role::Chosen, chosen), (Role::Rejected, rejected)] {
        row.extend(&TokenRow { groups: vec![group], roles: vec![role], ..document(length) });
    }
    row
}

#[test]
fn a_pair_lies_whole_in_one_pack() {
    let pairs = [pair(0, 3, 2), pair(1, 2, 2), pair(2, 4, 4), pair(3, 1, 2), pair(4, 2, 1)];
    let in_order = pack(NextFit::new(8, false, 0), pairs.clone()).unwrap();
    let groups: Vec<&[u64]> = in_order.iter().map(|pack| pack.groups.as_slice()).collect();
    assert_eq!(groups, [&[0, 0][..], &[1, 1], &[2, 2], &[3, 3, 4, 4]]);
    let mut packer = BestFit::new(8, false, 0);
    pairs.iter().for_each(|pair| packer.push(pair).unwrap());
    let fullest: Vec<TokenRow> = packer.finish().collect();
    assert_eq!(fullest.len(), 3, "less padding, and still whole pairs");
    for pack in in_order.iter().chain(&fullest) {
        assert_eq!(pack.input_ids.len(), 8);
        for (groups, roles) in pack.groups.chunks(2).zip(pack.roles.chunks(2)) {
            assert_eq!((groups[0], roles), (groups[1], &[Role::Chosen, Role::Rejected][..]));
        }
    }
    let long = TooLong { tokens: 9, max_seq_len: 8 };
    assert_eq!(NextFit::new(8, false, 0).push(&pair(7, 5, 4)), Err(long.clone()));
    assert_eq!(BestFit::new(8, false, 0).push(&pair(7, 5, 4)), Err(long));
}
