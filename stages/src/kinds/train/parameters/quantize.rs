//! `quantize:`: the format that frozen weights are in while an adapter is trained on them.

use engine::artifact::Facts;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::Parameters;
use model::weights::{Nf4, QuantizedBase};
use serde_json::json;

use crate::compute::adapter::QUANTIZE;

/// How frozen weights are quantised while they are read.
#[derive(Parameters, Debug, Clone, PartialEq, Eq)]
pub struct QuantizeParams {
    /// The format.
    #[semantic]
    pub base: BaseFormat,
    /// Whether the largest magnitudes of blocks are quantised, too: 4.13 bits a weight in the place of 4.5.
    #[semantic(default = true)]
    pub double_quantization: bool,
    /// Weights of a block, which share a scale: a power of two.
    #[semantic(default = 64, range = 32..=4096)]
    pub block_size: usize,
    /// Linear layers that are left as they are: their names, or parts of their paths (`o_proj`, `layers.0`).
    #[semantic(default = vec!["lm_head".to_owned()])]
    pub skip_modules: Vec<String>,
}

/// A format of frozen weights.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaseFormat {
    /// 4-bit quantiles of a normal distribution (Dettmers et al., arXiv:2305.14314), to the bits of bitsandbytes.
    Nf4,
}

impl QuantizeParams {
    /// As the decoder takes it.
    pub(in crate::kinds::train) fn base(&self) -> QuantizedBase {
        let BaseFormat::Nf4 = self.base;
        let nf4 = Nf4 { block_size: self.block_size, double_quantization: self.double_quantization };
        QuantizedBase { nf4, skip_modules: self.skip_modules.clone() }
    }

    /// What is recorded of an adapter that was trained on such a base.
    pub(in crate::kinds::train) fn facts(&self) -> Facts {
        let BaseFormat::Nf4 = self.base;
        let format = json!({
            "base": "nf4",
            "double_quantization": self.double_quantization,
            "block_size": self.block_size,
            "skip_modules": self.skip_modules,
        });
        Facts::from_iter([(QUANTIZE.to_owned(), format)])
    }

    /// What is wrong with it.
    pub(super) fn problem(&self, span: Span) -> Option<Problem> {
        let message = format!("`quantize.block_size` is {}, and it has to be a power of two", self.block_size);
        let problem = Problem::error("bad-value", span, message, "not a power of two").at("quantize.block_size");
        (!self.block_size.is_power_of_two()).then(|| problem.with_help("64 is what bitsandbytes takes by default"))
    }
}
