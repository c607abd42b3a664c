//! Processed logits against transformers', draws against the softmax.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::*;

const PLAIN: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

fn place(row: u64, position: u64) -> Place<'static> {
    Place { seen: &[], banned: &[], row, position }
}

fn counts(sampling: Sampling, logits: &[f32], draws: u64) -> Vec<u64> {
    let mut sampler = Sampler::new(sampling).unwrap();
    let mut counts = vec![0; logits.len()];
    for row in 0..draws {
        counts[sampler.next_token(logits, &place(row, 7)).unwrap() as usize] += 1;
    }
    counts
}

#[derive(Deserialize)]
struct Golden {
    /// By name; `null` is −∞.
    logits: BTreeMap<String, Vec<Option<f32>>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    logits: String,
    seen: Vec<u32>,
    #[serde(default)]
    banned: Vec<u32>,
    temperature: f64,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    /// `null` where a token is out.
    processed: Vec<Option<f32>>,
}

#[test]
fn logits_are_processed_as_in_transformers() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/sampling.json");
    let golden: Golden = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(golden.cases.len() >= 60, "the golden file is shortened");
    for (number, case) in golden.cases.iter().enumerate() {
        let Case { temperature, top_k, top_p, min_p, repetition_penalty, .. } = *case;
        let mut sampler =
            Sampler::new(Sampling { temperature, top_k, top_p, min_p, repetition_penalty, seed: 0 }).unwrap();
        let logits: Vec<f32> =
            golden.logits[&case.logits].iter().map(|logit| logit.unwrap_or(f32::NEG_INFINITY)).collect();
        let mut found = sampler.process(&logits, &case.seen, &case.banned).unwrap().to_vec();
        let mut processed: Vec<f32> = case.processed.iter().map(|logit| logit.unwrap_or(f32::NEG_INFINITY)).collect();
        if matches!(case.logits.as_str(), "tied" | "equal") {
            // Which of several equals top-p takes away is left open by the reference, whose sort is not stable; how
            // many, is not.
            found.sort_by(f32::total_cmp);
            processed.sort_by(f32::total_cmp);
        }
        assert_eq!(found.len(), processed.len());
        for (token, (found, expected)) in found.iter().zip(&processed).enumerate() {
            let settings = format!(
                "case {number}, token {token}: {temperature} {top_k:?} {top_p:?} {min_p:?} {repetition_penalty:?}"
            );
            let close = found == expected || (found - expected).abs() <= 1e-6 * expected.abs();
            assert!(close, "{settings}: {found}, not {expected}");
        }
    }
}

#[test]
fn temperature_zero_is_the_greatest_logit() {
    let mut sampler = Sampler::new(Sampling::GREEDY).unwrap();
    let logits = [0.1, 3.0, 3.0 - 1e-6, f32::NEG_INFINITY, 3.0];
    for row in 0..20 {
        assert_eq!(sampler.next_token(&logits, &place(row, 0)).unwrap(), 1);
    }
}

#[test]
fn draws_follow_the_softmax() {
    let logits = [1.0_f32.ln(), 2.0_f32.ln(), 5.0_f32.ln(), f32::NEG_INFINITY];
    let plain = counts(PLAIN, &logits, 40_000);
    for (count, expected) in plain.iter().zip([5_000, 10_000, 25_000, 0]) {
        assert!(count.abs_diff(expected) < 400, "{plain:?}");
    }
    // Temperature ½ squares the odds: 1 : 4 : 25.
    let sharp = counts(Sampling { temperature: 0.5, ..PLAIN }, &logits, 30_000);
    for (count, expected) in sharp.iter().zip([1_000, 4_000, 25_000, 0]) {
        assert!(count.abs_diff(expected) < 400, "{sharp:?}");
    }
}

#[test]
fn only_what_is_kept_is_drawn() {
    let logits = [0.0, 2.0, 1.0, 1.0, -1.0];
    let kept = |sampling| counts(sampling, &logits, 2_000).iter().map(|count| *count > 0).collect::<Vec<_>>();
    assert_eq!(kept(Sampling { top_k: Some(2), ..PLAIN }), [false, true, true, true, false]);
    assert_eq!(kept(Sampling { top_k: Some(1), ..PLAIN }), [false, true, false, false, false]);
    // Probabilities, rounded: 0.071, 0.525, 0.193, 0.193, 0.026; 0.6 is crossed by one of the two equals.
    assert_eq!(kept(Sampling { top_p: Some(0.6), ..PLAIN }), [false, true, true, false, false]);
    assert_eq!(kept(Sampling { top_p: Some(0.01), ..PLAIN }), [false, true, false, false, false]);
    assert_eq!(kept(Sampling { top_p: Some(1.0), ..PLAIN }), [true; 5]);
    // 0.368 of the greatest: the two equals are just that, the first is 0.135 of it.
    assert_eq!(kept(Sampling { min_p: Some(0.3), ..PLAIN }), [false, true, true, true, false]);
    assert_eq!(kept(Sampling { min_p: Some(0.1), ..PLAIN }), [true, true, true, true, false]);
}

#[test]
fn a_repeated_token_is_penalized_once() {
    let mut sampler = Sampler::new(Sampling { repetition_penalty: Some(2.0), ..Sampling::GREEDY }).unwrap();
    let mut next = |logits: &[f32], seen: &[u32]| sampler.next_token(logits, &Place { seen, ..place(0, 0) }).unwrap();
    assert_eq!(next(&[4.0, 3.0, -1.0], &[0, 0, 0]), 1);
    assert_eq!(next(&[4.0, 1.5, -1.0], &[0, 0, 0]), 0, "4 / 2, not 4 / 8");
    assert_eq!(next(&[-1.0, -1.5], &[0]), 1);
}

#[test]
fn a_draw_depends_on_its_address_alone() {
    let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut sampler = Sampler::new(Sampling { seed: 5, ..PLAIN }).unwrap();
    let draw = |sampler: &mut Sampler, row, position| sampler.next_token(&logits, &place(row, position)).unwrap();
    let forwards: Vec<u32> = (0..50).map(|row| draw(&mut sampler, row, 3)).collect();
    let backwards: Vec<u32> = (0..50).rev().map(|row| draw(&mut sampler, row, 3)).collect();
    assert!(forwards.iter().eq(backwards.iter().rev()));
    let elsewhere: Vec<u32> = (0..50).map(|row| draw(&mut sampler, row, 4)).collect();
    assert_ne!(forwards, elsewhere);
}

#[test]
fn nonsense_is_refused() {
    let mut sampler = Sampler::new(PLAIN).unwrap();
    let error = sampler.next_token(&[0.0, f32::NAN], &place(0, 0)).unwrap_err();
    assert!(matches!(error, SamplingError::NotFinite { token: 1, .. }));
    assert_eq!(sampler.next_token(&[], &place(0, 0)), Err(SamplingError::Empty));
    let all_banned = Place { banned: &[0, 1], ..place(0, 0) };
    assert_eq!(sampler.next_token(&[1.0, 2.0], &all_banned), Err(SamplingError::Empty));
    for bad in [
        Sampling { temperature: -1.0, ..PLAIN },
        Sampling { temperature: f64::NAN, ..PLAIN },
        Sampling { top_k: Some(0), ..PLAIN },
        Sampling { top_p: Some(0.0), ..PLAIN },
        Sampling { top_p: Some(1.5), ..PLAIN },
        Sampling { min_p: Some(-0.1), ..PLAIN },
        Sampling { min_p: Some(1.1), ..PLAIN },
        Sampling { repetition_penalty: Some(0.0), ..PLAIN },
    ] {
        assert!(Sampler::new(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn extreme_settings_leave_numbers() {
    let logits = [1.0, -2.0, 3.0, 3.0, f32::NEG_INFINITY];
    for temperature in [1e-300, 1e-44, 1e-38] {
        let drawn = counts(Sampling { temperature, top_p: Some(0.9), min_p: Some(0.1), ..PLAIN }, &logits, 64);
        assert!(drawn[2] > 0 && drawn[3] > 0 && drawn[2] + drawn[3] == 64, "{temperature}: {drawn:?}");
    }
    for penalty in [1e-300, 1e300] {
        let sampling = Sampling { repetition_penalty: Some(penalty), ..PLAIN };
        let mut sampler = Sampler::new(sampling).unwrap();
        let seen = Place { seen: &[0, 1, 4], ..place(0, 0) };
        let processed = sampler.process(&logits, seen.seen, seen.banned).unwrap().to_vec();
        assert!(processed[..4].iter().all(|logit| logit.is_finite()), "{penalty}: {processed:?}");
        assert_eq!(processed[4], f32::NEG_INFINITY);
        let chosen = sampler.next_token(&logits, &seen).unwrap();
        assert_eq!(chosen == 0, penalty < 1.0, "{penalty}: {chosen}");
    }
}
