//! Writes the logits of a checkpoint, perhaps with an adapter: what other programs compare themselves with.
//!
//! ```text
//! cargo run --release -p model --example logits -- \
//!     --model FOLDER [--adapter FOLDER] --ids ids.json --out logits.safetensors
//! ```
//!
//! `--model` is a checkpoint in the Hub's form, `--adapter` a PEFT folder. `ids.json` is a list of documents, each a
//! list of token ids; they are run packed, one after the other. The result has one f32 tensor per document, `logits.0`
//! and so on, `[tokens, vocab_size]`. `--kernels candle` computes with the other kernel set.

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::Adapter;

struct Arguments {
    model: PathBuf,
    adapter: Option<PathBuf>,
    ids: PathBuf,
    out: PathBuf,
    kernels: Kernels,
}

#[derive(Clone, Copy)]
enum Kernels {
    Cpu,
    Candle,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse(std::env::args().skip(1))?;
    match arguments.kernels {
        Kernels::Cpu => run(Cpu::new(std::thread::available_parallelism()?.get(), Compute::F32)?, &arguments),
        Kernels::Candle => run(Candle::on_processor(), &arguments),
    }
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let [mut model, mut adapter, mut ids, mut out] = [None, None, None, None];
        let mut kernels = Kernels::Cpu;
        while let Some(flag) = words.next() {
            let value = words.next().ok_or_else(|| format!("no value after `{flag}`"))?;
            match (flag.as_str(), value.as_str()) {
                ("--model", _) => model = Some(PathBuf::from(value)),
                ("--adapter", _) => adapter = Some(PathBuf::from(value)),
                ("--ids", _) => ids = Some(PathBuf::from(value)),
                ("--out", _) => out = Some(PathBuf::from(value)),
                ("--kernels", "cpu") => kernels = Kernels::Cpu,
                ("--kernels", "candle") => kernels = Kernels::Candle,
                _ => return Err(format!("`{flag} {value}` is not known; see the top of this example's source").into()),
            }
        }
        Ok(Self {
            model: model.ok_or("`--model` is needed")?,
            adapter,
            ids: ids.ok_or("`--ids` is needed")?,
            out: out.ok_or("`--out` is needed")?,
            kernels,
        })
    }
}

fn run<B: Blocks>(ops: B, arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let mut decoder = Decoder::load(Arc::new(ops), &arguments.model, Trainability::Frozen)?;
    if let Some(folder) = &arguments.adapter {
        decoder.attach(&Adapter::load(folder)?)?;
    }
    let documents: Vec<Vec<u32>> = serde_json::from_str(&std::fs::read_to_string(&arguments.ids)?)?;
    let lengths = documents.iter().map(Vec::len).collect();
    let logits = decoder.logits(&Batch { document_lengths: lengths, ..Batch::text(documents.concat()) })?;

    let vocab_size = decoder.config().vocab_size;
    let name = |index: usize| format!("logits.{index}");
    let specs = documents.iter().enumerate();
    let specs = specs.map(|(index, ids)| TensorSpec::new(name(index), Dtype::F32, &[ids.len(), vocab_size])).collect();
    let mut writer = CheckpointWriter::create_file(&arguments.out, specs)?;
    let mut rest = logits.as_slice();
    for (index, ids) in documents.iter().enumerate() {
        let (document, others) = rest.split_at(ids.len() * vocab_size);
        writer.write_f32(&name(index), document)?;
        rest = others;
    }
    writer.finish()?;
    Ok(())
}
