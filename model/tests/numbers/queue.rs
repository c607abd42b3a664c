//! Requests that join and leave a queue while others are in progress: each is answered the same bits as alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::cpu::Cpu;
use model::decoder::{Adapters, Carried, Decoder};
use model::generation::{
    GenerateError, Generator, Limits, Options, Prefill, Progress, Queue, QueuedRequest, Request, RequestId, Stop,
};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig};
use model::sampling::{Adjustments, Sampling, TokenLogprobs};
use model::session::SessionError;
use model::weights::{Activations, BlockFormat, Quantization};
use test_harness::test;

const LIMITS: Limits = Limits {
    sequences: 16,
    positions: 512,
    cached_tokens: 4096,
    prefix_tokens: 0,
    prefill: Prefill::Interleaved { tokens: 32 },
};

const DRAWN: Sampling = Sampling {
    temperature: 0.9,
    top_k: Some(40),
    top_p: Some(0.95),
    min_p: Some(0.01),
    repetition_penalty: Some(1.1),
    seed: 3,
};

fn golden(family: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden")).join(family)
}

fn load(family: &str, compute: Compute, format: Option<BlockFormat>) -> Decoder<Cpu> {
    let ops = Cpu::new(2, compute).unwrap();
    let ops = match format {
        Some(format) => ops.quantizing(Quantization { format, activations: Activations::Int8 }),
        None => ops,
    };
    Decoder::load(Arc::new(ops), &golden(family), Trainability::Frozen).unwrap()
}

/// Prompts of 1 to 400 tokens, some of which end a little behind a border of pieces.
fn request(number: usize) -> QueuedRequest {
    let length = [1, 33, 150, 16, 17, 64, 400, 5, 49, 97, 3, 200][number % 12];
    QueuedRequest {
        prompt: (0..length).map(|at| ((at * (number + 7)) % 319 + 1) as u32).collect(),
        row: number as u64,
        adapter: 0,
        max_new_tokens: 4 + number % 5,
        min_new_tokens: 0,
        stop_token_ids: Vec::new(),
        sampling: if number.is_multiple_of(2) { DRAWN } else { Sampling::GREEDY },
        adjustments: Adjustments::default(),
        constraint: None,
        logprobs: Some(2),
        prompt_logprobs: None,
    }
}

/// What a request was answered.
#[derive(Debug, Clone, Default, PartialEq)]
struct Answer {
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    of_prompt: Vec<TokenLogprobs>,
    stop: Option<Stop>,
}

/// A model with adapters and requests for them.
struct Served {
    decoder: Decoder<Cpu>,
    adapters: Adapters<Cpu>,
    queue: Queue<Cpu>,
    answers: BTreeMap<RequestId, Answer>,
}

impl Served {
    fn new(decoder: Decoder<Cpu>, limits: Limits) -> Self {
        let queue = Queue::new(&decoder, limits).unwrap();
        Self { decoder, adapters: Adapters::default(), queue, answers: BTreeMap::new() }
    }

    fn push(&mut self, request: QueuedRequest) -> RequestId {
        let id = self.queue.push(request).unwrap();
        self.answers.insert(id, Answer::default());
        id
    }

    fn step(&mut self) {
        for carried in self.queue.admit(&self.decoder) {
            self.adapters.select(&mut self.decoder, carried);
            for Progress { id, prompt_logprobs, token, stop_token, ended } in
                self.queue.step(&self.decoder, carried).unwrap()
            {
                let answer = self.answers.get_mut(&id).unwrap();
                assert_eq!(answer.stop, None);
                answer.of_prompt.extend(prompt_logprobs);
                if let Some(token) = token {
                    answer.ids.push(token.id);
                    answer.logprobs.extend(token.logprobs);
                }
                assert_eq!(stop_token.is_some(), matches!(ended, Some(Ok(Stop::EndOfText))));
                answer.stop = ended.transpose().unwrap();
            }
        }
    }

    fn finish(&mut self) {
        while !self.queue.is_empty() {
            self.step();
        }
    }

    fn alone(&mut self, request: QueuedRequest) -> Answer {
        let id = self.push(request);
        self.finish();
        self.answers.remove(&id).unwrap()
    }
}

#[test]
fn a_request_is_answered_alike_alone_among_15_and_among_40() {
    let int8 = Some(BlockFormat::Int8);
    for (compute, format) in [(Compute::F32, None), (Compute::Bf16, None), (Compute::F32, int8)] {
        let mut served = Served::new(load("llama31", compute, format), LIMITS);
        let requests: Vec<QueuedRequest> = (0..40).map(request).collect();
        let alone: Vec<Answer> = requests.iter().map(|request| served.alone(request.clone())).collect();
        for company in [15, 40] {
            let mut ids = Vec::new();
            for request in &requests[..company] {
                ids.push(served.push(request.clone()));
                // They join at different steps of those before them.
                if ids.len() % 3 == 0 {
                    served.step();
                }
            }
            served.finish();
            for (id, expected) in ids.iter().zip(&alone) {
                assert_eq!(served.answers.remove(id).as_ref(), Some(expected), "{compute:?} {format:?} {id:?}");
            }
        }
    }
}

#[test]
fn answers_are_those_of_a_generator() {
    for compute in [Compute::F32, Compute::Bf16] {
        let decoder = load("llama31", compute, None);
        let requests: Vec<QueuedRequest> = (0..12).map(request).collect();
        let generated: Vec<Vec<u32>> = requests
            .iter()
            .map(|request| {
                let options = Options {
                    max_new_tokens: request.max_new_tokens,
                    min_new_tokens: 0,
                    stop_token_ids: Vec::new(),
                    sampling: request.sampling,
                    batch_size: 1,
                };
                let requests = [Request { prompt: &request.prompt, row: request.row }];
                Generator::new(&decoder, options).unwrap().complete(&requests, &mut ()).unwrap().remove(0).ids
            })
            .collect();
        let mut served = Served::new(decoder, LIMITS);
        for (request, expected) in requests.into_iter().zip(generated) {
            assert_eq!(served.alone(request).ids, expected, "{compute:?}");
        }
    }
}

#[test]
fn log_probabilities_of_a_prompt_are_those_that_would_have_been_chosen_by() {
    let mut served = Served::new(load("qwen2", Compute::F32, None), LIMITS);
    let whole = QueuedRequest { prompt_logprobs: Some(3), ..request(1) };
    let plain = served.alone(QueuedRequest { prompt_logprobs: None, ..whole.clone() });
    let found = served.alone(whole.clone());
    // To want them changes nothing else.
    assert_eq!(Answer { of_prompt: Vec::new(), ..found.clone() }, plain);
    assert_eq!(found.of_prompt.len(), whole.prompt.len() - 1);
    for length in [1, 2, 20, 32] {
        let part = QueuedRequest {
            prompt: whole.prompt[..length].to_vec(),
            max_new_tokens: 1,
            sampling: Sampling::GREEDY,
            logprobs: Some(3),
            ..whole.clone()
        };
        let first = served.alone(part);
        let expected = &found.of_prompt[length - 1].top;
        for ((token, logprob), (other, expected)) in first.logprobs[0].top.iter().zip(expected) {
            assert!(token == other && (logprob - expected).abs() < 1e-4, "{length}: {logprob} {expected}");
        }
    }
    let nothing = served.alone(QueuedRequest { max_new_tokens: 0, ..whole });
    assert_eq!((nothing.ids.len(), nothing.stop, nothing.of_prompt), (0, Some(Stop::Length), found.of_prompt));
}

#[test]
fn a_cancelled_request_leaves_its_place_to_the_next() {
    let limits = Limits { sequences: 2, ..LIMITS };
    let mut served = Served::new(load("llama31", Compute::F32, None), limits);
    let expected = served.alone(request(3));
    let long = |number| QueuedRequest { max_new_tokens: 300, ..request(number) };
    let ids = [served.push(long(0)), served.push(long(1)), served.push(request(2)), served.push(request(3))];
    served.step();
    let load = served.queue.load();
    assert_eq!((load.in_progress, load.waiting), (2, 2));
    assert!(load.cached_tokens > 0);
    served.queue.cancel(&served.decoder, ids[0]);
    served.queue.cancel(&served.decoder, ids[2]);
    served.step();
    assert_eq!(served.queue.load().in_progress, 2);
    served.queue.cancel(&served.decoder, ids[1]);
    served.queue.cancel(&served.decoder, ids[1]);
    served.finish();
    assert_eq!(served.answers[&ids[3]], expected);
    assert_eq!(served.answers[&ids[2]], Answer::default());
    assert_eq!(served.queue.load(), Default::default());
}

#[test]
fn requests_wait_for_room_in_the_cache_and_for_nothing_else() {
    let limits = Limits { cached_tokens: 300, ..LIMITS };
    let mut served = Served::new(load("llama31", Compute::F32, None), limits);
    // 400 tokens have room alone, and the others together.
    for number in [6, 0, 1, 3] {
        served.push(request(number));
    }
    served.queue.admit(&served.decoder);
    assert_eq!(served.queue.load().in_progress, 1);
    while served.queue.load().in_progress == 1 {
        served.step();
    }
    served.queue.admit(&served.decoder);
    assert_eq!(served.queue.load().in_progress, 3);
    served.finish();
    assert!(served.answers.values().all(|answer| answer.stop == Some(Stop::Length)));
}

#[test]
fn what_cannot_be_answered_is_refused_and_harms_nobody() {
    let mut served = Served::new(load("llama31", Compute::F32, None), LIMITS);
    let with = |prompt| QueuedRequest { prompt, ..request(0) };
    for prompt in [vec![], vec![1; 513]] {
        assert!(matches!(served.queue.push(with(prompt)), Err(GenerateError::Prompt { .. })));
    }
    let beyond = served.queue.push(with(vec![1, 320]));
    assert!(matches!(beyond, Err(GenerateError::Session(SessionError::Vocabulary { id: 320, vocab_size: 320 }))));
    let sampling = Sampling { temperature: -1.0, ..DRAWN };
    assert!(matches!(served.queue.push(QueuedRequest { sampling, ..request(0) }), Err(GenerateError::Sampling(_))));
    // No token is left to it, which ends it alone.
    let nothing =
        Adjustments { logit_bias: (0..320).map(|id| (id, f32::NEG_INFINITY)).collect(), ..Default::default() };
    let (refused, other) = (QueuedRequest { adjustments: nothing, ..request(1) }, request(2));
    let expected = served.alone(other.clone());
    let id = served.queue.push(refused).unwrap();
    let other = served.push(other);
    let mut failed = false;
    while !served.queue.is_empty() {
        served.queue.admit(&served.decoder);
        for progress in served.queue.step(&served.decoder, Carried::Nothing).unwrap() {
            failed |= progress.id == id && progress.ended.as_ref().is_some_and(Result::is_err);
            if progress.id == other {
                served.answers.get_mut(&other).unwrap().ids.extend(progress.token.map(|token| token.id));
            }
        }
    }
    assert!(failed);
    assert_eq!(served.answers[&other].ids, expected.ids);
}

#[test]
fn a_beginning_that_was_computed_for_another_changes_no_answer() {
    let limits = Limits { positions: 2048, ..LIMITS };
    let shared: Vec<u32> = (0..1200).map(|at| (at * 13 % 319 + 1) as u32).collect();
    // Around borders of blocks, and of passes: 1030 and 1040 end in a piece of few rows.
    let requests: Vec<QueuedRequest> = [64, 81, 80, 200, 1024, 1030, 1040, 1041, 1100, 1152]
        .into_iter()
        .map(|length| {
            let mut prompt = shared[..length - 1].to_vec();
            prompt.push(length as u32 % 319);
            QueuedRequest { prompt, ..request(length) }
        })
        .collect();
    let int8 = Some(BlockFormat::Int8);
    for (compute, format) in [(Compute::F32, None), (Compute::Bf16, None), (Compute::F32, int8)] {
        let mut plain = Served::new(load("llama31", compute, format), limits);
        let expected: Vec<Answer> = requests.iter().map(|request| plain.alone(request.clone())).collect();
        assert_eq!(plain.queue.load().reused_tokens, 0);
        for prefix_tokens in [1 << 14, 256] {
            let limits = Limits { prefix_tokens, ..limits };
            let mut served = Served::new(load("llama31", compute, format), limits);
            // Together, where some find what others have just left, and again alone, shorter and longer ones first.
            let ids: Vec<RequestId> = requests.iter().map(|request| served.push(request.clone())).collect();
            served.finish();
            for (id, expected) in ids.iter().zip(&expected) {
                assert_eq!(served.answers.remove(id).as_ref(), Some(expected), "{compute:?} {format:?} {id:?}");
            }
            let before = served.queue.load().reused_tokens;
            for (request, expected) in requests.iter().zip(&expected).rev() {
                assert_eq!(&served.alone(request.clone()), expected, "{compute:?} {format:?}");
            }
            let load = served.queue.load();
            assert!(load.reused_tokens > before && load.prefix_tokens <= prefix_tokens, "{load:?}");
        }
    }
}

#[test]
fn a_beginning_is_taken_as_far_as_whole_blocks_of_many_rows_go() {
    let limits = Limits { positions: 2048, prefix_tokens: 4096, ..LIMITS };
    let mut served = Served::new(load("llama31", Compute::F32, None), limits);
    let with =
        |length: usize| QueuedRequest { prompt: (1..=length).map(|at| (at % 319) as u32).collect(), ..request(0) };
    served.alone(with(1200));
    let mut reused = 0;
    for (length, expected) in [(64, 0), (80, 0), (81, 64), (145, 128), (1030, 1024), (1041, 1024), (1200, 1152)] {
        served.alone(with(length));
        let now = served.queue.load().reused_tokens;
        assert_eq!(now - reused, expected, "{length}");
        reused = now;
    }
    // Another adapter's are others, and log-probabilities of a prompt want all of it computed.
    served.alone(QueuedRequest { prompt_logprobs: Some(1), ..with(145) });
    let of_other = QueuedRequest { adapter: 1, ..with(145) };
    served.push(of_other);
    while !served.queue.is_empty() {
        let due = served.queue.admit(&served.decoder);
        due.iter().for_each(|carried| drop(served.queue.step(&served.decoder, *carried).unwrap()));
    }
    assert_eq!(served.queue.load().reused_tokens, reused);
}

/// Adapters that reside beside each other, on one projection each or on all, and two that are carried: one with
/// magnitudes and one on the head.
fn adapters(decoder: &Decoder<Cpu>) -> Vec<Adapter> {
    let all = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
    let plain = |rank, modules: &[&str]| {
        AdapterConfig::new(rank, 16.0, modules.iter().map(|module| (*module).to_owned()).collect())
    };
    let configs = [
        plain(4, &["q_proj"]),
        plain(8, &["down_proj"]),
        plain(3, &all),
        plain(16, &all),
        AdapterConfig { use_dora: true, ..plain(4, &["v_proj"]) },
        plain(4, &["lm_head"]),
    ];
    let with_values = |(number, config): (usize, &AdapterConfig)| {
        let mut adapter = decoder.fresh_adapter(config, number as u64).unwrap();
        for module in adapter.modules.values_mut() {
            // Fresh adapters change nothing.
            let value = |at: usize| ((at % (11 + number)) as f32 - 5.0) * 0.05;
            module.lora_b.iter_mut().enumerate().for_each(|(at, b)| *b = value(at));
        }
        adapter
    };
    configs.iter().enumerate().map(with_values).collect()
}

#[test]
fn requests_of_several_adapters_are_answered_by_their_own_and_as_alone() {
    let int8 = Some(BlockFormat::Int8);
    for (compute, format) in [(Compute::F32, None), (Compute::Bf16, None), (Compute::F32, int8)] {
        let family = "llama31";
        let adapters = adapters(&load(family, Compute::F32, None));
        let adapter_of = |number: usize| number % (adapters.len() + 1);
        const REQUESTS: usize = 28;
        // Each as the only one that its decoder has ever carried.
        let mut expected = Vec::new();
        for number in 0..REQUESTS {
            let mut decoder = load(family, compute, format);
            if let Some(adapter) = adapter_of(number).checked_sub(1) {
                decoder.attach(&adapters[adapter]).unwrap();
            }
            expected.push(Served::new(decoder, LIMITS).alone(request(number)));
        }
        let mut served = Served::new(load(family, compute, format), LIMITS);
        for (number, adapter) in adapters.iter().enumerate() {
            assert_eq!(served.adapters.add(&mut served.decoder, adapter).unwrap(), number + 1);
        }
        let carried: Vec<Carried> = (0..=adapters.len()).map(|number| served.decoder.carried_for(number)).collect();
        assert_eq!(carried[..5], [Carried::Nothing; 5]);
        assert_eq!(carried[5..], [Carried::Adapter(5), Carried::Adapter(6)]);
        let with_adapter = |number: usize| QueuedRequest { adapter: adapter_of(number), ..request(number) };
        for (number, expected) in expected.iter().enumerate() {
            assert_eq!(served.alone(with_adapter(number)), *expected, "alone: {compute:?} {format:?} {number}");
        }
        for company in [15, REQUESTS] {
            let ids: Vec<RequestId> = (0..company)
                .map(|number| {
                    let id = served.push(with_adapter(number));
                    if number % 4 == 0 {
                        served.step();
                    }
                    id
                })
                .collect();
            served.finish();
            for (number, id) in ids.iter().enumerate() {
                assert_eq!(served.answers[id], expected[number], "{compute:?} {format:?} {number} of {company}");
            }
        }
        for (number, expected) in expected.iter().enumerate().skip(1).take(adapters.len()) {
            let base = served.alone(request(number));
            assert_ne!(base.logprobs, expected.logprobs, "adapter {number} changes nothing");
        }
        // Who has gone away is in nobody's way.
        served.adapters.remove(&mut served.decoder, 3);
        assert_eq!(served.decoder.carried_for(3), Carried::Adapter(3));
        assert_eq!(served.alone(with_adapter(4)), expected[4]);
    }
}
