//! Times attention, forward and backward, over documents of several lengths.
//!
//! ```text
//! cargo bench -p model --bench attention -- --heads 9 --kv-heads 3 --head-dim 64 --threads 1 --repetitions 9
//! ```
//!
//! Prints a line of JSON for each length: processor seconds of one forward and one backward (the median of the
//! repetitions and the least), what they compute of what a query sees (two products of a query with a key in the
//! forward, five in the backward) per processor second, and the most anonymous memory of the process beside what
//! operands and results take of it.

#[path = "support/machine.rs"]
mod machine;

use std::error::Error;
use std::time::Duration;

use model::batch::Documents;
use model::cpu::{Cpu, InstructionSet};
use model::ops::{AttentionGradients, AttentionOperands, AttentionShape, Compute, Ops};
use model::random::{Address, Purpose, Stream};

use machine::{MemorySampler, cpu_time};

/// Tokens, and tokens per document: packed rows, and one document.
const LENGTHS: [(usize, usize); 6] = [(512, 512), (2048, 512), (8192, 512), (2048, 2048), (4096, 4096), (8192, 8192)];

/// A sample is so many operations of a product at least: the system counts processor time in steps of milliseconds.
const ENOUGH: f64 = 1e10;

/// What is timed.
struct Arguments {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    compute: Compute,
    threads: usize,
    repetitions: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    for (tokens, document) in LENGTHS {
        println!("{}", measure(&arguments, tokens, document)?);
    }
    Ok(())
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut arguments = Self {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            window: None,
            compute: Compute::F32,
            threads: 1,
            repetitions: 9,
        };
        while let Some(word) = words.next() {
            // cargo adds this one.
            if word == "--bench" {
                continue;
            }
            let value = words.next().ok_or_else(|| format!("`{word}` has no value"))?;
            let number = || value.parse::<usize>().map_err(|problem| format!("`{word} {value}`: {problem}"));
            match word.as_str() {
                "--heads" => arguments.heads = number()?,
                "--kv-heads" => arguments.kv_heads = number()?,
                "--head-dim" => arguments.head_dim = number()?,
                "--window" => arguments.window = Some(number()?),
                "--threads" => arguments.threads = number()?.max(1),
                "--repetitions" => arguments.repetitions = number()?.max(1),
                "--dtype" if value == "f32" => arguments.compute = Compute::F32,
                "--dtype" if value == "bf16" => arguments.compute = Compute::Bf16,
                _ => return Err(format!("there is no `{word} {value}`").into()),
            }
        }
        Ok(arguments)
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape {
            num_attention_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: self.window,
            soft_cap: None,
        }
    }

    /// Pairs of a query and a key it sees, in a document, over all heads.
    fn pairs(&self, document: usize) -> usize {
        let window = self.window.unwrap_or(document);
        self.heads * (0..document).map(|position| window.min(position + 1)).sum::<usize>()
    }
}

/// One line: so many tokens, in documents of one length.
fn measure(arguments: &Arguments, tokens: usize, document: usize) -> Result<serde_json::Value, Box<dyn Error>> {
    let set = InstructionSet::chosen(arguments.compute, None);
    let (cpu, shape) = (Cpu::with_instructions(arguments.threads, arguments.compute, set)?, arguments.shape());
    let [query, key] = [arguments.heads, arguments.kv_heads].map(|heads| heads * arguments.head_dim);
    let tensor = |name: &str, width: usize| {
        let stream = Stream::new(0, Address::named(Purpose::ModelInit, name));
        let values: Vec<f32> = (0..(tokens * width) as u64).map(|index| stream.uniform_at(index, 1.0)).collect();
        cpu.tensor(tokens, width, &values)
    };
    let [q, k, v, dy] = [tensor("q", query)?, tensor("k", key)?, tensor("v", key)?, tensor("dy", query)?];
    let [mut y, mut logsumexp, mut dq, mut dk, mut dv] = <[model::cpu::Tensor; 5]>::default();
    let documents = Documents::new(&vec![document; tokens / document]);
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    let memory = MemorySampler::start();
    let product = (2 * arguments.head_dim * arguments.pairs(document) * (tokens / document)) as f64;
    let calls = (ENOUGH / product).ceil() as u32;
    for _ in 0..arguments.repetitions {
        let start = cpu_time();
        for _ in 0..calls {
            cpu.attention(&q, &k, &v, &documents, &shape, &mut y, &mut logsumexp)?;
        }
        let middle = cpu_time();
        for _ in 0..calls {
            let operands = AttentionOperands { q: &q, k: &k, v: &v, y: &y, logsumexp: &logsumexp };
            let gradients = AttentionGradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
            cpu.attention_backward(operands, &dy, &documents, &shape, gradients)?;
        }
        forward.push(middle.saturating_sub(start) / calls);
        backward.push(cpu_time().saturating_sub(middle) / calls);
    }
    // q, k, v, dy and y, dq, dk, dv.
    let values = tokens * (4 * (query + key) + arguments.heads);
    Ok(serde_json::json!({
        "kernel_set": cpu.describe(),
        "heads": [arguments.heads, arguments.kv_heads],
        "head_dim": arguments.head_dim,
        "tokens": tokens,
        "document": document,
        "forward": summary(&mut forward, 2.0 * product),
        "backward": summary(&mut backward, 5.0 * product),
        "operands_and_results_mib": (4 * values) as f64 / f64::from(1 << 20),
        "peak_mib": memory.peak_mib(),
    }))
}

/// Median and least seconds, and the rate at the median.
fn summary(times: &mut [Duration], operations: f64) -> serde_json::Value {
    times.sort_unstable();
    let median = times[times.len() / 2].as_secs_f64();
    serde_json::json!({
        "cpu_seconds": median,
        "least": times[0].as_secs_f64(),
        "gflop_per_cpu_second": (operations / median / 1e9).round(),
    })
}
