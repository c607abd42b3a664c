//! `optimizer:`: how a gradient becomes an update. Each optimizer takes its own options and no other's.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::Parameters;
use model::optimizer::{self, AdamW, AdamW8bit, Lion, Muon, Optimizer, Sgd};

/// The optimizer and its learning rate.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(default)]
pub struct OptimizerParams {
    /// The peak learning rate of the run; `scheduler` scales it at each step.
    #[semantic(default = 3e-4, above = 0.0)]
    pub learning_rate: f64,
    /// Which it is, with its options.
    #[semantic(flatten)]
    pub rule: UpdateRule,
}

/// The optimizer, which updates every trainable tensor.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(default)]
pub enum UpdateRule {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), as `torch.optim.AdamW`.
    #[semantic(default)]
    Adamw(AdamwParams),
    /// Gradient descent with momentum, as `torch.optim.SGD`.
    Sgd {
        /// Decay rate of the momentum buffer; with 0 there is no buffer.
        #[semantic(default = 0.0, range = 0.0..1.0)]
        momentum: f64,
        /// The gradient is multiplied by one minus this before it is added to the momentum buffer.
        #[semantic(default = 0.0, range = 0.0..1.0)]
        dampening: f64,
        /// Nesterov momentum, which looks one step ahead. Needs `momentum`, and no `dampening`.
        #[semantic(default = false)]
        nesterov: bool,
        /// Coupled weight decay: it is added to the gradient.
        #[semantic(default = 0.0, range = 0.0..)]
        weight_decay: f64,
    },
    /// Lion: the sign of an interpolated momentum (Chen et al., arXiv:2302.06675).
    Lion {
        /// Weight of the momentum in the update, and its decay rate.
        #[semantic(default = [0.9, 0.99], range = 0.0..1.0)]
        betas: [f64; 2],
        /// Decoupled weight decay.
        #[semantic(default = 0.0, range = 0.0..)]
        weight_decay: f64,
    },
    /// Muon: momentum, orthogonalised, for the matrices of the layers (Jordan), as `torch.optim.Muon`. AdamW updates
    /// everything else, including embedding and LM head.
    Muon {
        /// Decay rate of the momentum buffer.
        #[semantic(default = 0.95, range = 0.0..1.0)]
        momentum: f64,
        /// Nesterov momentum, which looks one step ahead.
        #[semantic(default = true)]
        nesterov: bool,
        /// Decoupled weight decay of the matrices.
        #[semantic(default = 0.1, range = 0.0..)]
        weight_decay: f64,
        /// How the learning rate depends on the shape of a matrix.
        #[semantic(default = AdjustLr::Original)]
        adjust_lr: AdjustLr,
        /// AdamW's options, for everything else.
        #[semantic(default)]
        adamw: AdamwParams,
    },
    /// AdamW with moments of 8 bits in blocks of 256 (Dettmers et al., arXiv:2110.02861), of tensors of 4096 elements
    /// or more; native backend only.
    #[semantic(rename = "adamw_8bit")]
    Adamw8bit {
        /// Decay rates of the two moments.
        #[semantic(default = [0.9, 0.999], range = 0.0..1.0)]
        betas: [f64; 2],
        /// Added to the root of the second moment; without it a gradient of zero would divide zero by zero.
        #[semantic(default = 1e-8, above = 0.0)]
        eps: f64,
        /// Decoupled weight decay.
        #[semantic(default = 0.01, range = 0.0..)]
        weight_decay: f64,
        /// How the moments of the token embedding are kept, where it is trained.
        // Not `omit_default`: results from before there was a choice are of `int8`.
        #[semantic(default = EmbeddingState::F32)]
        embedding_state: EmbeddingState,
    },
}

/// How the moments of the token embedding are kept.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbeddingState {
    /// In f32, as `Trainer` of transformers has them beside 8-bit ones.
    F32,
    /// In 8 bits, as those of other tensors: less memory, but rows of rare tokens can move far in one step.
    Int8,
}

/// The options of AdamW.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(default)]
pub struct AdamwParams {
    /// Decay rates of the two moments.
    #[semantic(default = [0.9, 0.999], range = 0.0..1.0)]
    pub betas: [f64; 2],
    /// Added to the root of the second moment; without it a gradient of zero would divide zero by zero.
    #[semantic(default = 1e-8, above = 0.0)]
    pub eps: f64,
    /// Decoupled weight decay.
    #[semantic(default = 0.01, range = 0.0..)]
    pub weight_decay: f64,
    /// The dtype in which the moments are stored; `bf16` halves their memory.
    #[semantic(default = MomentDtype::F32, omit_default)]
    pub state_dtype: MomentDtype,
}

/// The dtype of moments.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum MomentDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16, rounded to the nearest.
    Bf16,
}

/// The factor of Muon on the learning rate of a matrix, by torch's names.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdjustLr {
    /// `sqrt(max(1, rows / columns))`.
    Original,
    /// `0.2 · sqrt(max(rows, columns))`, with which AdamW's learning rates fit.
    MatchRmsAdamw,
}

impl AdamwParams {
    fn rule(self) -> AdamW {
        let Self { betas: [first, second], eps, weight_decay, state_dtype } = self;
        let state_dtype = match state_dtype {
            MomentDtype::F32 => optimizer::MomentDtype::F32,
            MomentDtype::Bf16 => optimizer::MomentDtype::Bf16,
        };
        AdamW { betas: (first, second), eps, weight_decay, state_dtype }
    }
}

impl EmbeddingState {
    fn rule(self) -> optimizer::EmbeddingState {
        match self {
            Self::F32 => optimizer::EmbeddingState::F32,
            Self::Int8 => optimizer::EmbeddingState::Int8,
        }
    }
}

impl AdjustLr {
    fn rule(self) -> optimizer::AdjustLr {
        match self {
            Self::Original => optimizer::AdjustLr::Original,
            Self::MatchRmsAdamw => optimizer::AdjustLr::MatchRmsAdamw,
        }
    }
}

impl OptimizerParams {
    /// As the trainer takes it.
    pub(in crate::kinds::train) fn optimizer(&self) -> Optimizer {
        match self.rule {
            UpdateRule::Adamw(adamw) => Optimizer::AdamW(adamw.rule()),
            UpdateRule::Sgd { momentum, dampening, nesterov, weight_decay } => {
                Optimizer::Sgd(Sgd { momentum, dampening, nesterov, weight_decay })
            }
            UpdateRule::Lion { betas: [first, second], weight_decay } => {
                Optimizer::Lion(Lion { betas: (first, second), weight_decay })
            }
            UpdateRule::Adamw8bit { betas: [first, second], eps, weight_decay, embedding_state } => {
                let embedding_state = embedding_state.rule();
                Optimizer::AdamW8bit(AdamW8bit { betas: (first, second), eps, weight_decay, embedding_state })
            }
            UpdateRule::Muon { momentum, nesterov, weight_decay, adjust_lr, adamw } => {
                let (adjust_lr, adamw) = (adjust_lr.rule(), adamw.rule());
                Optimizer::Muon(Muon { momentum, nesterov, weight_decay, adjust_lr, adamw })
            }
        }
    }

    /// What of it the torch backend does not have.
    pub(super) fn native_only(&self) -> Option<&'static str> {
        match self.rule {
            UpdateRule::Adamw(AdamwParams { state_dtype: MomentDtype::Bf16, .. }) => {
                Some("`optimizer.state_dtype: bf16`")
            }
            UpdateRule::Muon { adamw: AdamwParams { state_dtype: MomentDtype::Bf16, .. }, .. } => {
                Some("`optimizer.adamw.state_dtype: bf16`")
            }
            UpdateRule::Adamw8bit { .. } => Some("`optimizer.name: adamw_8bit`"),
            _ => None,
        }
    }

    /// What is wrong with the options taken together.
    pub(super) fn problem(&self, span: Span) -> Option<Problem> {
        let eps = match self.rule {
            UpdateRule::Adamw(adamw) => Some(("optimizer.eps", adamw.eps)),
            UpdateRule::Adamw8bit { eps, .. } => Some(("optimizer.eps", eps)),
            UpdateRule::Muon { adamw, .. } => Some(("optimizer.adamw.eps", adamw.eps)),
            UpdateRule::Sgd { .. } | UpdateRule::Lion { .. } => None,
        };
        if let Some((key, eps)) = eps.filter(|(_, eps)| *eps < f64::from(f32::MIN_POSITIVE)) {
            let message =
                format!("`{key}` is {eps:e}, below {:e}, the smallest normal number of f32", f32::MIN_POSITIVE);
            let problem = Problem::error("out-of-range", span, message, "a gradient of zero would divide zero by zero");
            return Some(problem.at(key).with_help("1e-8 is usual"));
        }
        match self.rule {
            UpdateRule::Sgd { nesterov: true, momentum, dampening, .. } if momentum == 0.0 || dampening != 0.0 => {
                let message = "`nesterov` needs a `momentum`, and no `dampening`";
                Some(Problem::error("bad-value", span, message, "such as `momentum: 0.9`").at("optimizer.nesterov"))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::file::tree::Node;
    use engine::parameter::{Json, Parameter, Reader};
    use serde_json::json;

    use super::*;

    fn read(json: Json) -> Result<OptimizerParams, Vec<String>> {
        let mut reader = Reader::default();
        let read = OptimizerParams::read(&Node::from_json(&json), &mut reader);
        reader.problems.extend(read.as_ref().and_then(|read| read.problem(Span::default())));
        read.filter(|_| reader.problems.is_empty())
            .ok_or_else(|| reader.problems.into_iter().map(|problem| problem.message).collect())
    }

    #[test]
    fn an_eps_that_f32_does_not_hold_is_refused() {
        for optimizer in [
            json!({"eps": 1e-50}),
            json!({"name": "adamw_8bit", "eps": 1e-50}),
            json!({"name": "muon", "adamw": {"eps": 1e-50}}),
        ] {
            let messages = read(optimizer).unwrap_err();
            assert!(messages[0].contains("eps` is 1e-50, below 1.1754944e-38"), "{messages:?}");
        }
        assert!(read(json!({"eps": 1e-30})).is_ok());
    }

    #[test]
    fn defaults_are_those_of_torch() {
        assert_eq!(read(json!({})).unwrap().optimizer(), Optimizer::AdamW(AdamW::default()));
        assert_eq!(read(json!("sgd")).unwrap().optimizer(), Optimizer::Sgd(Sgd::default()));
        assert_eq!(read(json!("muon")).unwrap().optimizer(), Optimizer::Muon(Muon::default()));
        assert_eq!(read(json!("adamw_8bit")).unwrap().optimizer(), Optimizer::AdamW8bit(AdamW8bit::default()));
        assert_eq!(read(json!("lion")).unwrap().optimizer(), Optimizer::Lion(Lion::default()));
        let sgd = read(json!({"name": "sgd", "momentum": 0.9, "nesterov": true})).unwrap();
        let expected = Sgd { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: 0.0 };
        assert_eq!(sgd.optimizer(), Optimizer::Sgd(expected));
    }

    #[test]
    fn what_an_optimizer_cannot_take_is_said() {
        for (wrong, says) in [
            (json!({"momentum": 0.9}), "`adamw` has no option `momentum`"),
            (json!({"name": "sgd", "betas": [0.9, 0.99]}), "`sgd` has no option `betas`"),
            (json!({"name": "sgd", "nesterov": true}), "`nesterov` needs a `momentum`, and no `dampening`"),
            (json!({"betas": [0.9]}), "`betas` must be a list of 2, and it has 1"),
        ] {
            assert_eq!(read(wrong.clone()).unwrap_err(), [says], "{wrong}");
        }
    }
}
