//! Times training steps (forward, backward, clipping, AdamW) on a llama with random weights in memory and tied
//! embeddings.
//!
//! ```text
//! cargo bench -p model --bench lora_step -- --hidden 576 --layers 30 --heads 9 --kv-heads 3 --intermediate 1536 \
//!     --vocab 49152 --seq 512 --batch 1 --rank 8 --targets q_proj,v_proj --trained adapter --dtype f32 --threads 2 \
//!     --recompute none
//! ```
//!
//! `--targets all-linear` puts the adapter onto every projection but the head, `--trained weights` trains all weights
//! and no adapter; `--optimizer adamw_8bit` or `adamw_bf16` keeps their moments in fewer bits. `--stored bf16` writes
//! the weights to a checkpoint first and reads them from it, as a stage does; `--quantize nf4` beside it quantises the
//! linear layers while they are read. `--profile yes` has the kernels recorded, and a table of them on standard error
//! and in the JSON.
//!
//! Prints one line of JSON: medians over the steps after the warm-up, the loss of every step, the peak of anonymous
//! memory from the first step on, sampled, and the arithmetic of a step. All steps see the same batch, in which every
//! token but the first of a row is a target, so the losses fall.

#![allow(unsafe_code, reason = "vector instructions")]

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::Device;
use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::checkpoint::Dtype;
use model::config::Config;
use model::cpu::{Cpu, InstructionSet};
use model::decoder::Decoder;
use model::init::{Fill, NewModel, fresh_tensor};
use model::memory::Module;
use model::ops::{Compute, MatmulPrecision};
use model::optimizer::{AdamW, AdamW8bit, EmbeddingState, MomentDtype, Optimizer};
use model::parameter::Trainability;
use model::peft::targets::{ALL_LINEAR, all_linear};
use model::peft::{AdapterConfig, Modules};
use model::random::{Address, Purpose, Stream};
use model::trainer::{Recompute, TrainOptions, Trained, Trainer};
use model::weights::{BaseFormat, Nf4, QuantizedBase};
use profile::Profile;

#[path = "support/machine.rs"]
mod machine;
#[path = "support/table.rs"]
mod table;

use machine::{MemorySampler, cpu_time};

const SEED: u64 = 0;
const MAX_GRAD_NORM: f64 = 1.0;
const LEARNING_RATE: f64 = 1e-3;

/// What is timed.
struct Arguments {
    model: NewModel,
    seq: usize,
    batch: usize,
    rank: usize,
    /// Modules of the adapter, by name, or `all-linear`.
    targets: String,
    trained: Trained,
    compute: Compute,
    precision: MatmulPrecision,
    recompute: Recompute,
    optimizer: Optimizer,
    threads: usize,
    steps: usize,
    warmup: usize,
    kernels: Kernels,
    /// The type of the checkpoint that the weights are read from; none where they are made in memory.
    stored: Option<Dtype>,
    /// How frozen linear layers are quantised while they are read.
    quantize: Option<QuantizedBase>,
    profile: Profile,
}

#[derive(Clone, Copy)]
enum Kernels {
    Cpu,
    Candle,
}

/// What the steps took.
struct Measured {
    wall: Vec<Duration>,
    cpu: Vec<Duration>,
    losses: Vec<f64>,
    kernel_set: String,
    /// Multiplications and additions of a step.
    flop: f64,
    peak_anonymous_mib: f64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    let measured = match arguments.kernels {
        Kernels::Cpu => {
            // Products of 16 bits are in tiles, which f32 else has no use for.
            let chosen_for = match arguments.precision {
                MatmulPrecision::Highest => arguments.compute,
                MatmulPrecision::High => Compute::Bf16,
            };
            let set = InstructionSet::chosen(chosen_for, None);
            let kernels = Cpu::with_instructions(arguments.threads, arguments.compute, set)?
                .with_matmul_precision(arguments.precision)
                .recorded_by(arguments.profile.clone());
            run(kernels, &arguments)?
        }
        Kernels::Candle => {
            // SAFETY: no other thread has been started that could read the environment.
            unsafe { std::env::set_var("RAYON_NUM_THREADS", arguments.threads.to_string()) };
            run(Candle::new(Device::Cpu, arguments.compute).recorded_by(arguments.profile.clone()), &arguments)?
        }
    };
    print(&arguments, measured);
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
            seq: 512,
            batch: 1,
            rank: 8,
            targets: "q_proj,v_proj".to_owned(),
            trained: Trained::Adapter,
            compute: Compute::F32,
            precision: MatmulPrecision::default(),
            recompute: Recompute::None,
            optimizer: AdamW::default().into(),
            threads: 1,
            steps: 5,
            warmup: 2,
            kernels: Kernels::Cpu,
            stored: None,
            quantize: None,
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
        arguments.model.max_position_embeddings = arguments.model.max_position_embeddings.max(arguments.seq);
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
            "--seq" => self.seq = number()?,
            "--batch" => self.batch = number()?,
            "--rank" => self.rank = number()?,
            "--threads" => self.threads = number()?.max(1),
            "--steps" => self.steps = number()?.max(1),
            "--warmup" => self.warmup = number()?,
            "--targets" => self.targets = value.to_owned(),
            "--trained" => {
                self.trained = match value {
                    "adapter" => Trained::Adapter,
                    "weights" => Trained::Weights,
                    _ => return Err("what is trained is adapter or weights".into()),
                }
            }
            "--dtype" => {
                self.compute = match value {
                    "f32" => Compute::F32,
                    "bf16" => Compute::Bf16,
                    _ => return Err("a dtype is f32 or bf16".into()),
                }
            }
            "--matmul-precision" => {
                self.precision = match value {
                    "highest" => MatmulPrecision::Highest,
                    "high" => MatmulPrecision::High,
                    _ => return Err("a precision is highest or high".into()),
                }
            }
            "--recompute" => {
                self.recompute = match value {
                    "none" => Recompute::None,
                    "layers" => Recompute::Layers,
                    _ => return Err("what is computed again is none or layers".into()),
                }
            }
            "--optimizer" => {
                self.optimizer = match value {
                    "adamw" => AdamW::default().into(),
                    "adamw_8bit" => AdamW8bit::default().into(),
                    "adamw_8bit_all" => {
                        AdamW8bit { embedding_state: EmbeddingState::Int8, ..Default::default() }.into()
                    }
                    "adamw_bf16" => AdamW { state_dtype: MomentDtype::Bf16, ..AdamW::default() }.into(),
                    _ => return Err("an optimizer is adamw, adamw_8bit, adamw_8bit_all or adamw_bf16".into()),
                }
            }
            "--stored" => {
                self.stored = match value {
                    "f32" => Some(Dtype::F32),
                    "bf16" => Some(Dtype::BF16),
                    _ => return Err("weights are stored as f32 or bf16".into()),
                }
            }
            "--quantize" => {
                let skip_modules = vec!["lm_head".to_owned()];
                self.quantize = match value {
                    "nf4" => {
                        Some(QuantizedBase { format: BaseFormat::FourBits(Nf4::default()), skip_modules, layers: None })
                    }
                    "q8_0" => Some(QuantizedBase { format: BaseFormat::Q8_0, skip_modules, layers: None }),
                    _ => return Err("a base is quantised to nf4 or q8_0".into()),
                }
            }
            "--profile" => self.profile = table::profile(value)?,
            "--kernels" => {
                self.kernels = match value {
                    "cpu" => Kernels::Cpu,
                    "candle" => Kernels::Candle,
                    _ => return Err("a kernel set is cpu or candle".into()),
                }
            }
            _ => return Err("there is no such argument".into()),
        }
        Ok(())
    }

    /// Multiplications and additions that a step cannot do without: the products with weights and those of attention,
    /// forward and backward. An adapter's own are a hundredth of them and left out, as is what is computed a second
    /// time.
    fn flop(&self, config: &Config) -> f64 {
        let tokens = (self.seq * self.batch) as f64;
        // `x · W`, `dy · W`, and `dyᵀ · x` where W is trained.
        let products = if self.trained == Trained::Weights { 3.0 } else { 2.0 };
        let weights = config.num_hidden_layers as f64
            * config.layer_modules().iter().map(Module::weights).sum::<u64>() as f64
            + (config.vocab_size * config.hidden_size) as f64;
        // Scores and their sum over values, of half of all pairs of tokens; backward two products for each of them.
        let queries = (config.num_attention_heads * config.head_dim * config.num_hidden_layers) as f64;
        2.0 * products * weights * tokens + 3.0 * 2.0 * queries * tokens * self.seq as f64
    }

    /// Rows of random tokens; every token but the first of a row is a target.
    fn batch(&self) -> Batch {
        let mut stream = Stream::new(SEED, Address::new(Purpose::RowOrder).step(u64::MAX));
        let tokens = (0..self.seq * self.batch).map(|_| stream.below(self.model.vocab_size as u64) as u32);
        let mut batch = Batch::text(tokens.collect());
        batch.document_lengths = vec![self.seq; self.batch];
        batch
    }
}

fn run<B: Blocks>(ops: B, arguments: &Arguments) -> Result<Measured, Box<dyn Error>> {
    let kernel_set = ops.describe();
    let config = Config::from_json(&serde_json::Value::Object(arguments.model.config(Dtype::F32)?).to_string())?;
    let deviation = arguments.model.initializer_range;
    let flop = arguments.flop(&config);
    let keep = if arguments.trained == Trained::Weights { Trainability::Trainable } else { Trainability::Frozen };
    let targets = match arguments.targets.as_str() {
        ALL_LINEAR => all_linear(&Modules::from(&config)),
        names => names.split(',').map(str::to_owned).collect(),
    };
    let mut decoder = match arguments.stored {
        Some(dtype) => {
            let folder = tempfile::tempdir()?;
            arguments.model.write(folder.path(), SEED, dtype)?;
            match &arguments.quantize {
                Some(quantize) => Decoder::load_quantized(Arc::new(ops), folder.path(), quantize)?,
                None => Decoder::load(Arc::new(ops), folder.path(), keep)?,
            }
        }
        None => Decoder::build(Arc::new(ops), config, keep, |name, shape| {
            let fill = if shape.len() == 1 { Fill::One } else { Fill::Normal(deviation) };
            Ok(fresh_tensor(SEED, name, shape.iter().product(), fill))
        })?,
    };
    if arguments.trained == Trained::Adapter {
        let adapter = decoder.fresh_adapter(&AdapterConfig::new(arguments.rank, 16.0, targets), SEED)?;
        decoder.attach(&adapter)?;
    }
    let options = TrainOptions {
        max_grad_norm: Some(MAX_GRAD_NORM),
        recompute: arguments.recompute,
        ..TrainOptions::new(arguments.trained, arguments.optimizer)
    };
    let mut trainer = Trainer::new(decoder, options)?;

    let batch = arguments.batch();
    let memory = MemorySampler::start();
    let mut measured =
        Measured { wall: Vec::new(), cpu: Vec::new(), losses: Vec::new(), kernel_set, flop, peak_anonymous_mib: 0.0 };
    for number in 0..arguments.warmup + arguments.steps {
        let (wall, cpu) = (Instant::now(), cpu_time());
        trainer.accumulate(&batch)?;
        let loss = trainer.step(LEARNING_RATE)?.loss;
        if number >= arguments.warmup {
            measured.wall.push(wall.elapsed());
            measured.cpu.push(cpu_time().saturating_sub(cpu));
        }
        measured.losses.push(loss);
    }
    measured.peak_anonymous_mib = memory.peak_mib();
    Ok(measured)
}

fn print(arguments: &Arguments, mut measured: Measured) {
    let (wall, cpu) = (median(&mut measured.wall), median(&mut measured.cpu));
    let summary = arguments.profile.finish().map(|recording| recording.summary());
    summary.iter().for_each(table::print);
    let NewModel { hidden_size, num_hidden_layers, intermediate_size, vocab_size, .. } = arguments.model;
    let line = serde_json::json!({
        "kernel_set": measured.kernel_set,
        "shape": {
            "hidden": hidden_size,
            "layers": num_hidden_layers,
            "heads": arguments.model.num_attention_heads,
            "kv_heads": arguments.model.num_key_value_heads,
            "intermediate": intermediate_size,
            "vocab": vocab_size,
            "seq": arguments.seq,
            "batch": arguments.batch,
            "rank": arguments.rank,
        },
        "recompute": arguments.recompute == Recompute::Layers,
        "threads": arguments.threads,
        "steps": arguments.steps,
        "targets": arguments.targets,
        "trained": if arguments.trained == Trained::Adapter { "adapter" } else { "weights" },
        "tokens_per_s": (arguments.seq * arguments.batch) as f64 / wall,
        "seconds_per_step": wall,
        "cpu_seconds_per_step": cpu,
        "gflop_per_step": measured.flop / 1e9,
        "gflop_per_cpu_second": measured.flop / 1e9 / cpu,
        "peak_anonymous_mib": measured.peak_anonymous_mib,
        "losses": measured.losses,
        "profile": summary,
    });
    println!("{line}");
}

/// The middle value, in seconds.
fn median(durations: &mut [Duration]) -> f64 {
    durations.sort_unstable();
    durations[durations.len() / 2].as_secs_f64()
}
