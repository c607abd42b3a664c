//! Generation on the golden models: with and without a cache, alone and in company, the ids are the same.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::generation::{Completion, Flow, GenerateError, Generator, Listener, Options, Request, Stop};
use model::ops::Compute;
use model::parameter::Trainability;
use model::sampling::{Place, Sampler, Sampling};
use safetensors::SafeTensors;
use test_harness::test;

const GREEDY: Options = Options {
    max_new_tokens: 12,
    min_new_tokens: 0,
    stop_token_ids: Vec::new(),
    sampling: Sampling::GREEDY,
    batch_size: 8,
};

const DRAWN: Sampling = Sampling {
    temperature: 0.9,
    top_k: Some(40),
    top_p: Some(0.95),
    min_p: Some(0.01),
    repetition_penalty: Some(1.1),
    seed: 3,
};

fn golden() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden"))
}

fn families() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(golden()).unwrap().map(|entry| entry.unwrap().path());
    let mut families: Vec<PathBuf> = entries.filter(|folder| folder.join("expected.safetensors").exists()).collect();
    families.sort();
    assert!(families.len() >= 8, "golden families are missing");
    families
}

/// Token ids of the golden cases, row by row.
fn rows(family: &Path, name: &str) -> Vec<Vec<u32>> {
    let bytes = std::fs::read(family.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor(name).unwrap();
    let ids: Vec<u32> =
        view.data().chunks_exact(8).map(|id| i64::from_le_bytes(id.try_into().unwrap()) as u32).collect();
    ids.chunks(view.shape()[1]).map(<[u32]>::to_vec).collect()
}

fn load(family: &Path) -> Decoder<Cpu> {
    let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    Decoder::load(ops, family, Trainability::Frozen).unwrap()
}

/// Eleven prompts of 1 to 34 tokens.
fn prompts(family: &Path) -> Vec<Vec<u32>> {
    let rows = rows(family, "input_ids");
    (0..11).map(|number| rows[number % 2][..1 + (number * 7) % 34].to_vec()).collect()
}

fn complete(decoder: &Decoder<Cpu>, prompts: &[Vec<u32>], options: &Options) -> Vec<Completion> {
    let requests: Vec<Request<'_>> = prompts.iter().zip(0..).map(|(prompt, row)| Request { prompt, row }).collect();
    Generator::new(decoder, options.clone()).unwrap().complete(&requests, &mut ()).unwrap()
}

/// The same without a cache: the whole sequence is computed for each token.
fn without_cache(decoder: &mut Decoder<Cpu>, prompt: &[u32], row: u64, options: &Options) -> Vec<u32> {
    let mut sampler = Sampler::new(options.sampling).unwrap();
    let mut ids = prompt.to_vec();
    let vocab_size = decoder.config().vocab_size;
    while ids.len() < prompt.len() + options.max_new_tokens {
        let logits = decoder.logits(&Batch::text(ids.clone())).unwrap();
        let place = Place { seen: &ids, banned: &[], row, position: ids.len() as u64 };
        ids.push(sampler.next_token(&logits[logits.len() - vocab_size..], &place).unwrap());
    }
    ids.split_off(prompt.len())
}

#[test]
fn ids_are_the_same_alone_in_company_and_without_a_cache() {
    for family in families() {
        let mut decoder = load(&family);
        let prompts = prompts(&family);
        for sampling in [Sampling::GREEDY, DRAWN] {
            let options = Options { sampling, ..GREEDY };
            let together = complete(&decoder, &prompts, &options);
            let alone = complete(&decoder, &prompts, &Options { batch_size: 1, ..options.clone() });
            assert_eq!(together, alone, "{}", family.display());
            let three = complete(&decoder, &prompts, &Options { batch_size: 3, ..options.clone() });
            assert_eq!(together, three, "{}", family.display());
            for (row, prompt) in prompts.iter().enumerate().step_by(4) {
                let expected = without_cache(&mut decoder, prompt, row as u64, &options);
                assert_eq!(together[row].ids, expected, "{} prompt {row}", family.display());
            }
        }
    }
}

#[test]
fn greedy_ids_are_those_of_the_reference() {
    for family in families() {
        let decoder = load(&family);
        let (prompt, ids) = (rows(&family, "greedy_prompt").remove(0), rows(&family, "greedy_ids").remove(0));
        let mut prompts = prompts(&family);
        prompts.push(prompt.clone());
        let options = Options { max_new_tokens: ids.len() - prompt.len(), ..GREEDY };
        let found = complete(&decoder, &prompts, &options).pop().unwrap();
        assert_eq!((found.ids.as_slice(), found.stop), (&ids[prompt.len()..], Stop::Length), "{}", family.display());
    }
}

#[test]
fn a_long_prompt_is_read_in_pieces() {
    let family = golden().join("llama31");
    let mut decoder = load(&family);
    let positions = decoder.config().max_position_embeddings;
    assert!(positions >= 512);
    // A pass takes 1024 tokens: three prompts of 400 do not fit into one, and of two one is computed alone.
    let long: Vec<Vec<u32>> = (0..3).map(|number| (0..400).map(|at| (at * (number + 7)) % 320).collect()).collect();
    let options = Options { max_new_tokens: 4, ..GREEDY };
    let found = complete(&decoder, &long, &options);
    for (row, prompt) in long.iter().enumerate() {
        assert_eq!(found[row].ids, without_cache(&mut decoder, prompt, row as u64, &options));
    }
}

/// Stops a request after so many tokens.
struct After(usize, Vec<usize>);

impl Listener for After {
    fn token(&mut self, request: usize, _: u32) -> Result<Flow, Box<dyn std::error::Error + Send + Sync>> {
        self.1[request] += 1;
        Ok(if self.1[request] >= self.0 + request { Flow::Stop } else { Flow::Continue })
    }
}

#[test]
fn an_answer_ends_where_it_is_told_to() {
    let family = golden().join("llama31");
    let decoder = load(&family);
    let prompts = prompts(&family);
    let free = complete(&decoder, &prompts, &GREEDY);
    let stop_token = free[5].ids[3];
    let stopping = Options { stop_token_ids: vec![stop_token], ..GREEDY };
    for (free, stopped) in free.iter().zip(complete(&decoder, &prompts, &stopping)) {
        let end = free.ids.iter().position(|id| *id == stop_token);
        let expected = end.map_or(free.ids.as_slice(), |end| &free.ids[..end]);
        assert_eq!(stopped.ids, expected);
        assert_eq!(stopped.stop, if end.is_some() { Stop::EndOfText } else { Stop::Length });
    }
    // A stop token may not come among the first ones; then the most likely of the others takes its place.
    let at_least = Options { min_new_tokens: 12, ..stopping };
    let kept = complete(&decoder, &prompts, &at_least);
    assert!(kept.iter().all(|answer| answer.ids.len() == 12 && !answer.ids.contains(&stop_token)));

    let requests: Vec<Request<'_>> = prompts.iter().map(|prompt| Request { prompt, row: 0 }).collect();
    let mut listener = After(1, vec![0; prompts.len()]);
    let told = Generator::new(&decoder, GREEDY).unwrap().complete(&requests, &mut listener).unwrap();
    for (request, (told, free)) in told.iter().zip(&free).enumerate() {
        assert_eq!((told.ids.as_slice(), told.stop), (&free.ids[..request + 1], Stop::Listener));
    }
}

#[test]
fn prompts_that_do_not_fit_are_refused_and_effort_is_counted() {
    let decoder = load(&golden().join("qwen2"));
    let positions = decoder.config().max_position_embeddings;
    let mut generator = Generator::new(&decoder, GREEDY).unwrap();
    for bad in [vec![], vec![1; positions]] {
        let requests = [Request { prompt: &[1, 2], row: 0 }, Request { prompt: &bad, row: 1 }];
        let error = generator.complete(&requests, &mut ()).unwrap_err();
        assert!(matches!(error, GenerateError::Prompt { request: 1, .. }), "{error}");
    }
    assert_eq!(generator.stats().prompt_tokens, 0);
    let requests = [Request { prompt: &[1, 2], row: 0 }, Request { prompt: &[3, 4, 5], row: 1 }];
    generator.complete(&requests, &mut ()).unwrap();
    let stats = generator.stats();
    assert_eq!((stats.prompt_tokens, stats.decode_steps, stats.decode_tokens), (5, 11, 22));
    let room_for_one = [Request { prompt: &vec![7; positions - 1], row: 0 }];
    assert_eq!(generator.complete(&room_for_one, &mut ()).unwrap()[0].ids.len(), 1);
}

/// By hand from `config.json`: 2 layers of hidden size 64, intermediate 144, 4 query and 2 key heads of 16; vocabulary
/// 320.
#[test]
fn a_step_reads_every_matrix_once() {
    let layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 144;
    for family in ["llama31", "qwen2"] {
        assert_eq!(load(&golden().join(family)).weight_bytes_per_step(), 4 * (2 * layer + 320 * 64), "{family}");
    }
}
