//! Times the matrix products of the `cpu` kernel set beside the limits of the machine, measured in the same run.
//!
//! ```text
//! cargo bench -p model --bench gemm -- --threads 1 --dtype f32,bf16 --shapes 512x576x576,1024x2048x8192
//! ```
//!
//! With `--quantize int8` or `int4` weights are quantised, and widened on their way into a panel.
//!
//! A shape is `tokens x in x out`. Of each: the product with a weight `[out, in]` in either direction, and in f32 the
//! gradient of the weight, added. Prints one line of JSON for each shape and type: billions of operations in a second
//! of processor time, the mean of the calls of a while, and their share of the peak. Those in bf16 include
//! the rounding of what the weight is multiplied with.

#[path = "support/machine.rs"]
mod machine;

use std::error::Error;
use std::time::{Duration, Instant};

use model::checkpoint::ValueRows;
use model::cpu::{Cpu, InstructionSet, Tensor};
use model::ops::{Compute, Form, Ops, WeightRole, WeightSource, Write};
use model::weights::{Activations, BlockFormat, Quantization};

use machine::cpu_time;

/// What is timed.
struct Arguments {
    threads: usize,
    types: Vec<Compute>,
    quantize: Option<BlockFormat>,
    shapes: Vec<Shape>,
    calls: Duration,
}

#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    inputs: usize,
    outputs: usize,
}

/// The limits of the machine.
#[derive(Clone, Copy)]
struct Peaks {
    /// Operations a second of one thread.
    flops: f64,
    /// Bytes a second that all threads read together.
    read_bytes: f64,
}

/// Those of the layers of a small and a middling model, a head, and adapters of rank 8.
const SHAPES: &str = "512x576x576,1024x576x1536,1024x1536x576,1024x2048x2048,1024x2048x8192,1024x8192x2048,512x576x49152,\
                      128x576x49152,32x576x576,1x576x49152,1024x576x8,1024x8x576";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    for &compute in &arguments.types {
        let set = InstructionSet::chosen(compute, None);
        let mut cpu = Cpu::with_instructions(arguments.threads, compute, set)?;
        if let Some(format) = arguments.quantize {
            cpu = cpu.quantizing(Quantization { format, activations: Activations::Computed });
        }
        let limits = cpu.limits();
        let flops = if compute == Compute::F32 { limits.f32_flops } else { limits.bf16_flops };
        // Those of one thread, as its processor time is what is counted.
        let peaks = Peaks { flops: flops / limits.threads as f64, read_bytes: limits.read_bytes };
        for &shape in &arguments.shapes {
            time(&cpu, compute, peaks, shape, &arguments)?;
        }
    }
    Ok(())
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let types = vec![Compute::F32, Compute::Bf16];
        let (shapes_of, calls) = (shapes(SHAPES)?, Duration::from_millis(400));
        let mut arguments = Self { threads: 1, types, quantize: None, shapes: shapes_of, calls };
        while let Some(word) = words.next() {
            // cargo adds this one.
            if word == "--bench" {
                continue;
            }
            let value = words.next().ok_or_else(|| format!("`{word}` has no value"))?;
            match word.as_str() {
                "--threads" => arguments.threads = value.parse::<usize>()?.max(1),
                "--milliseconds" => arguments.calls = Duration::from_millis(value.parse()?),
                "--shapes" => arguments.shapes = shapes(&value)?,
                "--quantize" => {
                    let found = BlockFormat::ALL.into_iter().find(|format| format.name() == value);
                    arguments.quantize = Some(found.ok_or("weights are quantised to int8 or int4")?);
                }
                "--dtype" => arguments.types = value.split(',').map(compute).collect::<Result<_, _>>()?,
                _ => return Err(format!("there is no argument `{word}`").into()),
            }
        }
        Ok(arguments)
    }
}

fn compute(name: &str) -> Result<Compute, Box<dyn Error>> {
    match name {
        "f32" => Ok(Compute::F32),
        "bf16" => Ok(Compute::Bf16),
        _ => Err("a dtype is f32 or bf16".into()),
    }
}

fn shapes(text: &str) -> Result<Vec<Shape>, Box<dyn Error>> {
    let shape = |text: &str| {
        let extents: Vec<usize> = text.split('x').map(str::parse).collect::<Result<_, _>>()?;
        let [tokens, inputs, outputs] = extents[..] else { return Err(format!("`{text}` is no shape").into()) };
        Ok(Shape { tokens, inputs, outputs })
    };
    text.split(',').map(shape).collect()
}

fn time(cpu: &Cpu, compute: Compute, peaks: Peaks, shape: Shape, arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let Shape { tokens, inputs, outputs } = shape;
    let value = |index: usize| ((index * 37) % 101) as f32 / 101.0 - 0.5;
    let values = |count: usize| (0..count).map(value).collect::<Vec<_>>();
    let rows = values(outputs * inputs);
    let rows = WeightSource::Rows(&ValueRows::new(&rows, inputs));
    let weight = cpu.prepare(rows, [outputs, inputs], WeightRole::Matrix)?;
    let x = cpu.tensor(tokens, inputs, &values(tokens * inputs))?;
    let dy = cpu.tensor(tokens, outputs, &values(tokens * outputs))?;
    let (mut y, mut dx) = (Tensor::default(), Tensor::default());
    let mut gradient = cpu.zeros(outputs, inputs)?;

    let flops = 2.0 * (tokens * inputs * outputs) as f64;
    let figures = |seconds: f64| {
        let gflops = flops / seconds / 1e9;
        let weight_gb = cpu.weight_bytes(&weight) as f64 / seconds / 1e9;
        serde_json::json!({
            "gflops": rounded(gflops),
            "share_of_peak": rounded(1e9 * gflops / peaks.flops),
            "weight_gb": rounded(weight_gb),
        })
    };
    let mut line = serde_json::json!({
        "shape": format!("{tokens}x{inputs}x{outputs}"),
        "kernel_set": cpu.describe(),
        "peak_gflops": rounded(peaks.flops / 1e9),
        "peak_read_gb": rounded(peaks.read_bytes / 1e9),
    });
    let mean = |run: &mut dyn FnMut() -> model::ops::Result| mean(arguments.calls, run);
    line["forward"] = figures(mean(&mut || cpu.linear(&x, &weight, None, Write::Replace, &mut y))?);
    line["backward"] = figures(mean(&mut || cpu.linear_backward(&dy, &weight, Write::Replace, &mut dx))?);
    if compute == Compute::F32 {
        line["weight_gradient"] = figures(mean(&mut || cpu.matmul(Form::Tn, 1.0, &dy, &x, Write::Add, &mut gradient))?);
    }
    println!("{line}");
    Ok(())
}

/// The processor time of a call, in seconds: the mean of many, for the system may count it no finer than in ticks of
/// some milliseconds.
fn mean(duration: Duration, run: &mut dyn FnMut() -> model::ops::Result) -> Result<f64, Box<dyn Error>> {
    run()?;
    let (began, before) = (Instant::now(), cpu_time());
    let mut calls = 0;
    while began.elapsed() < duration {
        run()?;
        calls += 1;
    }
    Ok(cpu_time().saturating_sub(before).as_secs_f64() / f64::from(calls))
}

/// Three digits are enough.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}
