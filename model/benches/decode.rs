//! Times greedy decoding over a key-value cache, on a llama with random weights in memory and tied embeddings.
//!
//! ```text
//! cargo bench -p model --bench decode -- --hidden 576 --layers 30 --heads 9 --kv-heads 3 --intermediate 1536 \
//!     --vocab 49152 --prompt 64 --new 128 --batch 1 --weights bf16 --threads 2 --repetitions 5
//! ```
//!
//! `--weights q4_k`, `q5_k` and `q6_k` are blocks as GGUF files store them, multiplied as `quantize: int8` does, with
//! the embedding in `q6_k`, as llama.cpp's mixtures have it; they want `--hidden` and `--intermediate` to be multiples
//! of 256. With `--activations computed` they, and `int8` and `int4`, are widened for products of f32 instead, as those
//! of a GGUF file are without `quantize`; so are `q5_0` and the other blocks of 32.
//!
//! Prints one line of JSON. The prompts are read in the prefill, which also gives the first token of each answer;
//! decoding adds `--new` more to each of `--batch` answers, which grow together. Rates are medians over the
//! repetitions, their spread the lowest and the highest. The read bandwidth is measured in the same run, by the same
//! number of threads. `--profile yes` has the kernels recorded, the prefill's and those of an untimed first round too,
//! and a table of them on standard error.

#[path = "support/machine.rs"]
mod machine;
#[path = "support/table.rs"]
mod table;

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::checkpoint::{BlockRows, CheckpointError, Dtype, RowBytes, Rows};
use model::config::Config;
use model::cpu::{Cpu, InstructionSet};
use model::decoder::{Decoder, RowsOf};
use model::generation::{Flow, Generator, Listener, Options, Request};
use model::init::{Fill, NewModel, fresh_tensor};
use model::ops::{Compute, Ops};
use model::parameter::Trainability;
use model::random::{Address, Purpose, Stream};
use model::sampling::Sampling;
use model::weights::{Activations, BlockFormat, Quantization, TensorType, WeightFormat};
use profile::Profile;

use machine::{cpu_time, peak_rss_mib};

const SEED: u64 = 0;

/// What is timed.
struct Arguments {
    model: NewModel,
    prompt: usize,
    new: usize,
    batch: usize,
    weights: Weights,
    activations: Activations,
    threads: usize,
    repetitions: usize,
    profile: Profile,
}

/// How weights are stored.
#[derive(Clone, Copy, PartialEq)]
enum Weights {
    /// Made so from values.
    Format(WeightFormat),
    /// In blocks of a file.
    Stored(TensorType),
}

impl Weights {
    fn known() -> impl Iterator<Item = Self> {
        let formats = [WeightFormat::F32, WeightFormat::Bf16].into_iter();
        let formats = formats.chain(BlockFormat::ALL.map(WeightFormat::Blocks)).map(Self::Format);
        let stored = [TensorType::Q4K, TensorType::Q5K, TensorType::Q6K, TensorType::Q5_0, TensorType::Q5_1];
        formats.chain(stored.map(Self::Stored))
    }

    fn name(self) -> String {
        match self {
            Self::Format(format) => format.name().to_owned(),
            Self::Stored(tensor_type) => tensor_type.name().to_lowercase(),
        }
    }
}

/// Blocks of random values in memory, over and over.
struct Blocks {
    tensor_type: TensorType,
    bytes: Vec<u8>,
}

/// Rows of such blocks, of so many values.
struct BlocksOfRows<'a> {
    blocks: &'a Blocks,
    columns: usize,
}

/// Wall and processor time of one phase.
#[derive(Clone, Copy, Default)]
struct Spent {
    wall: Duration,
    cpu: Duration,
}

/// Notes when the last of the first tokens is there: the prefill ends and decoding begins.
struct Stopwatch {
    first_tokens: usize,
    began: (Instant, Duration),
    prefill: Spent,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    let decoder = decoder(&arguments)?;
    let prompts = arguments.prompts();
    time(&arguments, &decoder, &prompts)?;
    let mut phases = Vec::new();
    let mut bandwidths = Vec::new();
    for _ in 0..arguments.repetitions {
        bandwidths.push(decoder.ops().read_bandwidth() / 1e9);
        phases.push(time(&arguments, &decoder, &prompts)?);
    }
    arguments.profile.finish().iter().for_each(|recording| table::print(&recording.summary()));
    print(&arguments, &decoder, &phases, &mut bandwidths);
    Ok(())
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut arguments = Self {
            model: NewModel {
                vocab_size: 49_152,
                hidden_size: 576,
                intermediate_size: 1536,
                num_hidden_layers: 30,
                num_attention_heads: 9,
                num_key_value_heads: 3,
                max_position_embeddings: 8192,
                tie_word_embeddings: true,
                ..NewModel::default()
            },
            prompt: 64,
            new: 128,
            batch: 1,
            weights: Weights::Format(WeightFormat::Bf16),
            activations: Activations::Int8,
            threads: 1,
            repetitions: 5,
            profile: Profile::OFF,
        };
        while let Some(word) = words.next() {
            // cargo adds this one.
            if word == "--bench" {
                continue;
            }
            let value = words.next().ok_or_else(|| format!("`{word}` has no value"))?;
            arguments.set(&word, &value).map_err(|problem| format!("`{word} {value}`: {problem}"))?;
        }
        arguments.model.check()?;
        Ok(arguments)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), Box<dyn Error>> {
        let number = || value.parse::<usize>();
        match name {
            "--hidden" => self.model.hidden_size = number()?,
            "--layers" => self.model.num_hidden_layers = number()?,
            "--heads" => self.model.num_attention_heads = number()?,
            "--kv-heads" => self.model.num_key_value_heads = number()?,
            "--intermediate" => self.model.intermediate_size = number()?,
            "--vocab" => self.model.vocab_size = number()?,
            "--prompt" => self.prompt = number()?.max(1),
            "--new" => self.new = number()?.max(1),
            "--batch" => self.batch = number()?.max(1),
            "--threads" => self.threads = number()?.max(1),
            "--repetitions" => self.repetitions = number()?.max(1),
            "--profile" => self.profile = table::profile(value)?,
            "--activations" => {
                self.activations = match value {
                    "int8" => Activations::Int8,
                    "computed" => Activations::Computed,
                    _ => return Err("activations are int8 or computed".into()),
                }
            }
            "--weights" => {
                let names = || Weights::known().map(Weights::name).collect::<Vec<_>>().join(", ");
                let found = Weights::known().find(|weights| weights.name() == value);
                self.weights = found.ok_or_else(|| format!("weights are {}", names()))?;
            }
            _ => return Err("there is no such argument".into()),
        }
        Ok(())
    }

    /// Prompts of random tokens.
    fn prompts(&self) -> Vec<Vec<u32>> {
        let mut stream = Stream::new(SEED, Address::new(Purpose::RowOrder).step(u64::MAX));
        let mut token = || stream.below(self.model.vocab_size as u64) as u32;
        (0..self.batch).map(|_| (0..self.prompt).map(|_| token()).collect()).collect()
    }
}

impl Listener for Stopwatch {
    fn token(&mut self, _: usize, _: u32) -> Result<Flow, Box<dyn Error + Send + Sync>> {
        if self.first_tokens > 0 {
            self.first_tokens -= 1;
            if self.first_tokens == 0 {
                self.prefill = Spent { wall: self.began.0.elapsed(), cpu: cpu_time().saturating_sub(self.began.1) };
            }
        }
        Ok(Flow::Continue)
    }
}

fn decoder(arguments: &Arguments) -> Result<Decoder<Cpu>, Box<dyn Error>> {
    let config = Config::from_json(&serde_json::Value::Object(arguments.model.config(Dtype::F32)?).to_string())?;
    let deviation = arguments.model.initializer_range;
    let (compute, quantize) = match arguments.weights {
        Weights::Format(WeightFormat::F32) => (Compute::F32, None),
        Weights::Format(WeightFormat::Bf16) => (Compute::Bf16, None),
        Weights::Format(WeightFormat::F16) => return Err("weights that are made here are not stored as f16".into()),
        Weights::Format(WeightFormat::Blocks(format)) => (Compute::F32, Some(format)),
        Weights::Stored(_) => (Compute::F32, (arguments.activations == Activations::Int8).then_some(BlockFormat::Int8)),
    };
    let mut ops = Cpu::with_instructions(arguments.threads, compute, InstructionSet::chosen(compute, None))?
        .recorded_by(arguments.profile.clone());
    if let Some(format) = quantize {
        ops = ops.quantizing(Quantization { format, activations: arguments.activations });
    }
    let ops = Arc::new(ops);
    let values = |name: &str, shape: &[usize]| {
        let fill = if shape.len() == 1 { Fill::One } else { Fill::Normal(deviation) };
        Ok(fresh_tensor(SEED, name, shape.iter().product(), fill))
    };
    let Weights::Stored(tensor_type) = arguments.weights else {
        return Ok(Decoder::build(ops, config, Trainability::Frozen, values)?);
    };
    let blocks_of = |tensor_type| Blocks::new(tensor_type, deviation);
    let (matrices, table) = (blocks_of(tensor_type), blocks_of(TensorType::Q6K));
    let rows: RowsOf<'_> = Box::new(|name, [_, columns]| {
        let blocks = if name.contains("embed_tokens") { &table } else { &matrices };
        Ok(Some(Box::new(BlocksOfRows { blocks, columns })))
    });
    Ok(Decoder::build_of_rows(ops, config, values, rows)?)
}

impl Blocks {
    fn new(tensor_type: TensorType, deviation: f64) -> Self {
        /// Enough that none of it stays in a cache because it comes again.
        const VALUES: usize = 1 << 20;
        let values = fresh_tensor(SEED, "blocks", VALUES, Fill::Normal(deviation));
        let mut bytes = vec![0; tensor_type.bytes(VALUES)];
        tensor_type.encode(&values, &mut bytes);
        Self { tensor_type, bytes }
    }
}

impl Rows for BlocksOfRows<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        let tensor_type = self.blocks.tensor_type;
        let mut bytes = vec![0; tensor_type.bytes(values.len())];
        self.read_bytes(first, &mut bytes)?;
        tensor_type.decode(&bytes, values);
        Ok(())
    }

    fn as_blocks(&self) -> Option<BlockRows<'_>> {
        Some(BlockRows { tensor_type: self.blocks.tensor_type, bytes: self })
    }
}

impl RowBytes for BlocksOfRows<'_> {
    fn read_bytes(&self, first: usize, bytes: &mut [u8]) -> Result<(), CheckpointError> {
        let all = &self.blocks.bytes;
        let begin = first * self.blocks.tensor_type.bytes(self.columns) % all.len();
        bytes.iter_mut().zip(all[begin..].iter().chain(all.iter().cycle())).for_each(|(byte, from)| *byte = *from);
        Ok(())
    }
}

/// Completes the prompts once; returns what the prefill and the decoding took.
fn time(arguments: &Arguments, decoder: &Decoder<Cpu>, prompts: &[Vec<u32>]) -> Result<[Spent; 2], Box<dyn Error>> {
    let options = Options {
        max_new_tokens: arguments.new + 1,
        min_new_tokens: 0,
        stop_token_ids: Vec::new(),
        sampling: Sampling::GREEDY,
        batch_size: arguments.batch,
    };
    let requests: Vec<Request<'_>> = prompts.iter().zip(0..).map(|(prompt, row)| Request { prompt, row }).collect();
    let mut generator = Generator::new(decoder, options)?;
    let began = (Instant::now(), cpu_time());
    let mut stopwatch = Stopwatch { first_tokens: arguments.batch, began, prefill: Spent::default() };
    generator.complete(&requests, &mut stopwatch)?;
    let (wall, cpu) = (began.0.elapsed(), cpu_time().saturating_sub(began.1));
    let prefill = stopwatch.prefill;
    Ok([prefill, Spent { wall: wall.saturating_sub(prefill.wall), cpu: cpu.saturating_sub(prefill.cpu) }])
}

fn print(arguments: &Arguments, decoder: &Decoder<Cpu>, phases: &[[Spent; 2]], bandwidths: &mut [f64]) {
    let NewModel { hidden_size, num_hidden_layers, intermediate_size, vocab_size, .. } = arguments.model;
    let bytes_per_step = decoder.weight_bytes_per_step();
    let bandwidth = spread(bandwidths);
    let tokens = [arguments.prompt, arguments.new].map(|tokens| (tokens * arguments.batch) as f64);
    let rates = |phase: usize, time: fn(&Spent) -> Duration| {
        let mut rates: Vec<f64> =
            phases.iter().map(|spent| tokens[phase] / time(&spent[phase]).as_secs_f64().max(1e-9)).collect();
        spread(&mut rates)
    };
    let decode = rates(1, |spent| spent.wall);
    let read = decode[1] / arguments.batch as f64 * bytes_per_step as f64 / 1e9;
    let line = serde_json::json!({
        "kernel_set": decoder.ops().describe(),
        "shape": {
            "hidden": hidden_size,
            "layers": num_hidden_layers,
            "heads": arguments.model.num_attention_heads,
            "kv_heads": arguments.model.num_key_value_heads,
            "intermediate": intermediate_size,
            "vocab": vocab_size,
        },
        "prompt": arguments.prompt,
        "new": arguments.new,
        "batch": arguments.batch,
        "weights": arguments.weights.name(),
        "threads": arguments.threads,
        "repetitions": arguments.repetitions,
        "prefill_tokens_per_s": rates(0, |spent| spent.wall),
        "prefill_tokens_per_cpu_s": rates(0, |spent| spent.cpu)[1],
        "decode_tokens_per_s": decode,
        "decode_tokens_per_cpu_s": rates(1, |spent| spent.cpu)[1],
        "weight_bytes_per_step": bytes_per_step,
        "weights_gb_per_s": read,
        "read_bandwidth_gb_per_s": bandwidth,
        "share_of_bandwidth": read / bandwidth[1],
        "peak_rss_mib": peak_rss_mib(),
    });
    println!("{line}");
}

/// The lowest, the middle and the highest.
fn spread(values: &mut [f64]) -> [f64; 3] {
    values.sort_unstable_by(f64::total_cmp);
    [values[0], values[values.len() / 2], values[values.len() - 1]].map(|value| (value * 100.0).round() / 100.0)
}
