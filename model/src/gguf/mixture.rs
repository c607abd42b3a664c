//! Which type each tensor of a file gets, as llama.cpp's quantiser chooses.

use super::TensorType;
use crate::config::{Config, HeadWeight};

/// What a file is quantised to as a whole; most of its weights, not all, are of that type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileType {
    /// 32-bit floats.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits.
    Q8_0,
    /// 4 bits.
    Q4_0,
    /// 5 bits.
    Q5_0,
    /// 4 bits with quantised scales, 6 bits for the most sensitive tensors.
    Q4KM,
    /// 5 bits with quantised scales, 6 bits for the most sensitive tensors.
    Q5KM,
    /// 6 bits.
    Q6K,
}

impl FileType {
    /// `general.file_type`.
    pub fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 7,
            Self::Q5_0 => 8,
            Self::Q4KM => 15,
            Self::Q5KM => 17,
            Self::Q6K => 18,
            Self::Bf16 => 32,
        }
    }

    /// Whether llama.cpp has it from its quantiser alone, its converter having no such type.
    pub(super) fn is_of_the_quantiser(self) -> bool {
        matches!(self, Self::Q4_0 | Self::Q5_0 | Self::Q4KM | Self::Q5KM | Self::Q6K)
    }

    /// The type of a tensor by its name in the file; `shape` is as in a checkpoint, the rows' length last.
    pub fn tensor(self, name: &str, shape: &[usize], config: &Config) -> TensorType {
        let [_, columns] = shape else { return TensorType::F32 };
        let chosen = match self {
            Self::F32 => return TensorType::F32,
            Self::F16 => return TensorType::F16,
            Self::Bf16 => return TensorType::Bf16,
            Self::Q8_0 => TensorType::Q8_0,
            Self::Q4_0 => self.or_head(name, config, TensorType::Q4_0),
            Self::Q5_0 => self.or_head(name, config, TensorType::Q5_0),
            Self::Q6K => TensorType::Q6K,
            Self::Q4KM => self.or_head(name, config, mixed(name, config, TensorType::Q4K, TensorType::Q5K)),
            Self::Q5KM => self.or_head(name, config, mixed(name, config, TensorType::Q5K, TensorType::Q6K)),
        };
        fitting(chosen, *columns)
    }

    /// The head, which may be the embedding, has 6 bits.
    fn or_head(self, name: &str, config: &Config, otherwise: TensorType) -> TensorType {
        let head = match config.head {
            HeadWeight::Own => "output.weight",
            HeadWeight::Tied => "token_embd.weight",
        };
        if name == head { TensorType::Q6K } else { otherwise }
    }
}

/// `usual`, but for the tensors that matter more. `fused` is the type of q, k and v in one.
fn mixed(name: &str, config: &Config, usual: TensorType, fused: TensorType) -> TensorType {
    let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else { return usual };
    let layer = layer.parse().unwrap_or(0);
    let layers = config.num_hidden_layers;
    match part {
        "attn_qkv.weight" => fused,
        "attn_v.weight" | "ffn_down.weight" if has_more_bits(layer, layers) => TensorType::Q6K,
        // In the models of 70 B, 8 heads share what these weights give.
        "attn_v.weight" if layers == 80 && config.num_attention_heads != config.num_key_value_heads => TensorType::Q5K,
        _ => usual,
    }
}

/// The first and last eighth of the layers, and every third between.
fn has_more_bits(layer: usize, layers: usize) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// The type, or what is put in its place where rows are not whole blocks of it.
fn fitting(chosen: TensorType, columns: usize) -> TensorType {
    if columns.is_multiple_of(chosen.block_values()) {
        return chosen;
    }
    let smaller = match chosen {
        TensorType::Q4K => TensorType::Q5_0,
        TensorType::Q5K => TensorType::Q5_1,
        TensorType::Q6K => TensorType::Q8_0,
        other => other,
    };
    if columns.is_multiple_of(smaller.block_values()) { smaller } else { TensorType::F16 }
}
