//! Tiny models of every shape that a family can give, with weights from a seed.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part of this")]

use std::sync::Arc;

use model::batch::Batch;
use model::blocks::Blocks;
use model::candle::Candle;
use model::config::Config;
use model::cpu::{Cpu, CpuError, InstructionSet};
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::ops::Compute;
use model::optimizer::StateValues;
use model::parameter::Trainability;
use model::trainer::TrainedTensor;
use test_harness::{Requirement, Unmet};

/// Sizes that no vector width divides.
const SIZES: &str = r#""vocab_size": 37, "hidden_size": 20, "intermediate_size": 29, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64"#;

/// One configuration for each way in which families differ, by name.
pub(crate) const SHAPES: [(&str, &str); 6] = [
    ("llama", r#""model_type": "llama", "tie_word_embeddings": true"#),
    ("llama, untied, biases", r#""model_type": "llama", "attention_bias": true, "mlp_bias": true"#),
    ("mistral", r#""model_type": "mistral", "sliding_window": 3"#),
    ("qwen3", r#""model_type": "qwen3", "tie_word_embeddings": true"#),
    (
        "gemma2",
        r#""model_type": "gemma2", "sliding_window": 3, "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0"#,
    ),
    ("phi3", r#""model_type": "phi3", "partial_rotary_factor": 0.67"#),
];

/// A decoder of one of the [`SHAPES`].
pub(crate) fn decoder<B: Blocks>(ops: &Arc<B>, shape_name: &str, keep: Trainability) -> Decoder<B> {
    let (_, own) = SHAPES.iter().find(|(name, _)| *name == shape_name).unwrap();
    let config = Config::from_json(&format!("{{{SIZES}, {own}}}")).unwrap();
    Decoder::build(Arc::clone(ops), config, keep, |name, shape| {
        let mut values = fresh_tensor(1, name, shape.iter().product(), Fill::Normal(0.3));
        if name.ends_with("norm.weight") && shape_name != "gemma2" {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(values)
    })
    .unwrap()
}

/// The CPU's kernels with an instruction set. Fails where this machine lacks it.
pub(crate) fn cpu_with(threads: usize, compute: Compute, set: InstructionSet) -> Result<Cpu, Unmet> {
    Cpu::with_instructions(threads, compute, set).map_err(|error| match error {
        CpuError::Threads { .. } => panic!("{error}"),
        lacking => Requirement::Instructions.unmet(lacking),
    })
}

/// The first CUDA device. Fails where there is none.
#[cfg(feature = "cuda")]
pub(crate) fn on_cuda() -> Result<Candle, Unmet> {
    Candle::on_cuda(0, Compute::F32).map_err(|error| Requirement::Cuda.unmet(format!("{error}; {}", error.help())))
}

/// The first CUDA device. Fails where there is none.
#[cfg(not(feature = "cuda"))]
pub(crate) fn on_cuda() -> Result<Candle, Unmet> {
    Err(Requirement::Cuda.unmet("built without `--features cuda`"))
}

/// Documents of these lengths, some of their labels ignored.
pub(crate) fn documents(seed: u32, lengths: &[usize]) -> Batch {
    let mut batch = Batch::default();
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    for (row, &length) in lengths.iter().enumerate() {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 16
        };
        let ids: Vec<u32> = (0..length).map(|_| next() % 37).collect();
        let labels: Vec<i32> = ids.iter().map(|&id| if next() % 4 == 0 { -100 } else { id as i32 }).collect();
        batch.push_row(row as u64, &ids, &labels, &[length]);
    }
    batch
}

/// The bits of all that is trained, with the optimizer's state.
pub(crate) fn bits(state: &[TrainedTensor]) -> Vec<u32> {
    let of_state = |tensor: &TrainedTensor| tensor.state.values().flat_map(StateValues::to_bytes).collect::<Vec<u8>>();
    let of_value = |tensor: &TrainedTensor| tensor.value.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    state
        .iter()
        .flat_map(|tensor| of_value(tensor).into_iter().chain(of_state(tensor).into_iter().map(u32::from)))
        .collect()
}
