//! What every engine does that requests are pushed to: the native one, and the torch worker where its Python is
//! (`PIPELINE_PYTHON` names it, and `PYTHONPATH` the package, if it is not installed there).

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::generation::{Progress, QueuedRequest, Stop};
use model::sampling::{Adjustments, Sampling, TokenLogprobs};
use profile::Profile;
use test_harness::Requirement;

use super::requests::{Batching, EngineSettings, InferenceEngine, open};
use crate::compute::adapter;
use crate::compute::backend::Backend;
use crate::compute::kernels::Dtype;
use crate::compute::precision::Precision;
use crate::compute::quantize::WeightFormat;
use crate::compute::torch::can_start;

const LOGPROB_BOUND: f32 = 1e-4;
const POSITIONS: usize = 48;
const SEQUENCES: usize = 3;

fn golden(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/llama31")).join(path)
}

fn engine(backend: Backend) -> Box<dyn InferenceEngine> {
    let settings = EngineSettings {
        backend,
        device: None,
        precision: Precision::new(Dtype::F32, WeightFormat::AsStored),
        threads: 1,
        sequences: SEQUENCES,
        positions: Some(POSITIONS),
        prefix_bytes: 0,
        holder: "a test",
        log: |_| (),
        profile: Profile::OFF,
    };
    let adapters = ["lora/dora/adapter", "lora/attention/adapter"].map(|path| adapter::load(&golden(path)).unwrap());
    open(&golden(""), &adapters, &settings).unwrap().engine
}

fn request(prompt: &[u32], adapter: usize) -> QueuedRequest {
    QueuedRequest {
        prompt: prompt.to_vec(),
        row: 0,
        adapter,
        max_new_tokens: 10,
        min_new_tokens: 0,
        stop_token_ids: Vec::new(),
        sampling: Sampling::GREEDY,
        adjustments: Adjustments::default(),
        constraint: None,
        logprobs: Some(2),
        prompt_logprobs: None,
    }
}

/// What came of a request.
#[derive(Debug, Default)]
struct Answer {
    of_prompt: Vec<TokenLogprobs>,
    tokens: Vec<(u32, TokenLogprobs)>,
    ended: Option<Stop>,
}

impl Answer {
    fn take(&mut self, progress: Progress) {
        assert_eq!(self.ended, None, "it has left");
        self.of_prompt.extend(progress.prompt_logprobs);
        let token = progress.token.map(|token| (token.id, token.logprobs.expect("they are wanted")));
        self.tokens.extend(token);
        self.ended = progress.ended.transpose().unwrap();
    }

    fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|(id, _)| *id).collect()
    }

    #[track_caller]
    fn is_like(&self, other: &Self) {
        assert_eq!((self.ids(), self.ended), (other.ids(), other.ended));
        let all = |it: &Self| -> Vec<TokenLogprobs> {
            it.of_prompt.iter().chain(it.tokens.iter().map(|(_, logprobs)| logprobs)).cloned().collect()
        };
        let (ours, theirs) = (all(self), all(other));
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(&theirs) {
            let tops = ours.top.iter().zip(&theirs.top).map(|((_, one), (_, two))| (*one, *two));
            for (one, two) in tops.chain([(ours.logprob, theirs.logprob)]) {
                assert!((one - two).abs() <= LOGPROB_BOUND * two.abs().max(1.0), "{ours:?} {theirs:?}");
            }
        }
    }
}

/// Pushes requests, and steps until all have left.
fn answers(engine: &mut dyn InferenceEngine, requests: &[QueuedRequest]) -> Vec<Answer> {
    let ids: Vec<_> = requests.iter().map(|request| engine.push(request.clone()).unwrap()).collect();
    let mut answers: BTreeMap<_, Answer> = ids.iter().map(|id| (*id, Answer::default())).collect();
    while answers.values().any(|answer| answer.ended.is_none()) {
        for progress in engine.step().unwrap() {
            answers.get_mut(&progress.id).unwrap().take(progress);
        }
    }
    assert_eq!(engine.load().in_progress + engine.load().waiting, 0);
    answers.into_values().collect()
}

/// Requests with all that one can ask for: more than there are places, of all adapters.
fn requests() -> Vec<QueuedRequest> {
    let drawn = |seed| Sampling { temperature: 0.9, top_p: Some(0.95), seed, ..Sampling::GREEDY };
    let long: Vec<u32> = (0..44).map(|at| at * 7 % 300 + 3).collect();
    vec![
        request(&[5, 9, 2, 7], 0),
        QueuedRequest { sampling: drawn(1), ..request(&[5, 9, 2, 7], 1) },
        QueuedRequest { sampling: drawn(2), row: 3, max_new_tokens: 3, ..request(&[8, 11], 2) },
        QueuedRequest { prompt_logprobs: Some(3), ..request(&[5, 9, 2, 7, 30, 31], 1) },
        // Its positions end before its tokens do.
        request(&long, 0),
        QueuedRequest { prompt_logprobs: Some(1), max_new_tokens: 0, ..request(&long, 2) },
        request(&[3], 2),
        QueuedRequest {
            adjustments: Adjustments { logit_bias: vec![(9, -5.0)], presence_penalty: 1.0, frequency_penalty: 0.5 },
            ..request(&[5, 9, 2, 7], 0)
        },
    ]
}

fn refusals(engine: &mut dyn InferenceEngine) -> Vec<String> {
    let refused = [
        request(&[], 0),
        request(&[4; POSITIONS + 1], 0),
        request(&[4, 100_000], 0),
        QueuedRequest { sampling: Sampling { top_p: Some(2.0), ..Sampling::GREEDY }, ..request(&[4], 0) },
    ];
    refused.map(|request| format!("{:?}", engine.push(request).unwrap_err())).into()
}

/// A request that is cancelled is heard of no more, wherever it is, and the others go on as without it.
fn cancellation(engine: &mut dyn InferenceEngine, expected: &Answer) {
    let ids = [(); SEQUENCES + 2].map(|()| engine.push(request(&[5, 9, 2, 7], 0)).unwrap());
    let mut kept = Answer::default();
    let mut step = |engine: &mut dyn InferenceEngine, gone: &[_]| {
        for progress in engine.step().unwrap() {
            assert!(!gone.contains(&progress.id), "it was cancelled");
            if progress.id == ids[1] {
                kept.take(progress);
            }
        }
    };
    step(engine, &[]);
    assert_eq!((engine.load().in_progress, engine.load().waiting), (SEQUENCES, 2));
    engine.cancel(ids[0]);
    engine.cancel(ids[SEQUENCES]);
    assert_eq!((engine.load().in_progress, engine.load().waiting), (SEQUENCES - 1, 1));
    while engine.load().in_progress + engine.load().waiting > 0 {
        step(engine, &[ids[0], ids[SEQUENCES]]);
    }
    kept.is_like(expected);
    let alone = engine.push(request(&[5, 9], 0)).unwrap();
    engine.step().unwrap();
    engine.cancel(alone);
    assert_eq!(engine.step().unwrap(), []);
    assert_eq!(engine.load().in_progress, 0);
}

/// Adapters come and go; one that does not fit is refused, and changes nothing.
fn adapters(engine: &mut dyn InferenceEngine, expected: &[Answer]) {
    let asked = requests();
    engine.remove_adapter(1);
    let mut strange = adapter::load(&golden("lora/attention/adapter")).unwrap();
    let module = strange.modules.keys().next().unwrap().clone();
    let moved = strange.modules.remove(&module).unwrap();
    strange.modules.insert(module.replace("layers.", "no_layers."), moved);
    assert!(engine.add_adapter(&strange).is_err());
    answers(engine, &asked[..1])[0].is_like(&expected[0]);
    let number = engine.add_adapter(&adapter::load(&golden("lora/dora/adapter")).unwrap()).unwrap();
    assert!(number > 2, "{number} was used before");
    let again = QueuedRequest { adapter: number, ..asked[1].clone() };
    answers(engine, &[asked[6].clone(), again]).iter().zip([&expected[6], &expected[1]]).for_each(|(ours, theirs)| {
        ours.is_like(theirs);
    });
}

#[test]
fn engines_answer_refuse_and_forget_alike() {
    let mut native = engine(Backend::Native);
    assert_eq!(native.batching(), Batching::Continuous);
    let expected = answers(&mut *native, &requests());
    let stop = expected[0].ids()[4];
    let stopped = QueuedRequest { stop_token_ids: vec![stop], ..request(&[5, 9, 2, 7], 0) };
    let later = QueuedRequest { min_new_tokens: 10, ..stopped.clone() };
    let stops = answers(&mut *native, &[stopped.clone(), later.clone()]);
    assert_eq!((stops[0].ended, stops[1].ended), (Some(Stop::EndOfText), Some(Stop::Length)));
    let refused = refusals(&mut *native);
    cancellation(&mut *native, &expected[0]);
    adapters(&mut *native, &expected);
    if !can_start() {
        Requirement::Torch.may_be_lacking("no Python with the torch worker (PIPELINE_PYTHON, PYTHONPATH)");
        return;
    }
    let mut torch = engine(Backend::Torch);
    assert_eq!(torch.batching(), Batching::Static);
    assert_eq!(torch.vocab_size(), native.vocab_size());
    assert_eq!(torch.max_position_embeddings(), native.max_position_embeddings());
    let found = answers(&mut *torch, &requests());
    found.iter().zip(&expected).for_each(|(ours, theirs)| ours.is_like(theirs));
    let found = answers(&mut *torch, &[stopped, later]);
    found.iter().zip(&stops).for_each(|(ours, theirs)| ours.is_like(theirs));
    assert_eq!(refusals(&mut *torch), refused);
    cancellation(&mut *torch, &expected[0]);
    adapters(&mut *torch, &expected);
}
