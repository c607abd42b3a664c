//! Writes a model of random bf16 weights in the shape of Llama-3.2-1B (2.5 GB), a tokenizer of one word that goes with
//! it, and a PEFT adapter of rank 16 on all of its projections: something to measure a merge on.
//!
//! `cargo run --release -p model --example random_checkpoint -- FOLDER` makes `FOLDER/base` and `FOLDER/adapter`; a
//! second argument gives another number of layers than 16.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use model::checkpoint::{Checkpoint, Dtype};
use model::init::{Fill, NewModel, fresh_tensor};
use model::peft::{Adapter, AdapterConfig, AdapterModule};

const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
"pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
"model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}}"#;

const RANK: usize = 16;
const TARGETS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("which folder?")?);
    let num_hidden_layers = arguments.next().map_or(Ok(16), |layers| layers.parse())?;
    let (base, adapter) = (folder.join("base"), folder.join("adapter"));
    fs::create_dir_all(&base)?;
    fs::create_dir_all(&adapter)?;
    let model = NewModel {
        vocab_size: 128_256,
        hidden_size: 2048,
        intermediate_size: 8192,
        num_hidden_layers,
        num_attention_heads: 32,
        num_key_value_heads: 8,
        tie_word_embeddings: true,
        rope_theta: 500_000.0,
        rms_norm_eps: 1e-5,
        ..NewModel::default()
    };
    model.write(&base, 1, Dtype::BF16)?;
    fs::write(base.join("tokenizer.json"), TOKENIZER)?;
    fs::write(base.join("tokenizer_config.json"), r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#)?;

    let checkpoint = Checkpoint::open(&base)?;
    let adapted = checkpoint.tensors().filter_map(|(name, info)| {
        let module = name.strip_suffix(".weight")?;
        TARGETS.iter().any(|target| module.ends_with(target)).then_some((module, &info.shape))
    });
    let modules = adapted.map(|(module, shape)| {
        let values = |part: &str, count| fresh_tensor(2, &format!("{module}.{part}"), count, Fill::Normal(0.01));
        let (out_features, in_features) = (shape[0], shape[1]);
        let (lora_a, lora_b) = (values("a", RANK * in_features), values("b", out_features * RANK));
        (module.to_owned(), AdapterModule { rank: RANK, in_features, out_features, lora_a, lora_b, magnitude: None })
    });
    let modules = modules.collect();
    let config = AdapterConfig::new(RANK, 32.0, TARGETS.map(str::to_owned).to_vec());
    Adapter { config, modules, saved_tensors: Default::default(), token_rows: Default::default() }.save(&adapter)?;
    Ok(())
}
