//! `loss:`: what training minimises. Each loss takes its own options and no other's.

use std::sync::Arc;

use engine::parameter::{Input, Parameters};
use model::batch::TargetScope;
use model::loss::{self, CrossEntropy, DocumentObjective, Gathering, PairLoss, Preference, Sft, TokenLoss};

use crate::data::artifact::{Model, Shape};

/// What training minimises, over the target tokens of a step, or over its pairs of responses.
#[derive(Parameters, Debug)]
#[parameters(default)]
pub enum Loss {
    /// The negative log-likelihood of the targets.
    #[semantic(default)]
    CrossEntropy {
        /// Share of the target distribution that is spread evenly over the vocabulary, as in
        /// `torch.nn.functional.cross_entropy`.
        #[semantic(default = 0.0, range = 0.0..1.0)]
        label_smoothing: f64,
    },
    /// The distributions of a teacher with the same vocabulary, in addition to the targets.
    Distillation {
        /// The teacher model.
        #[semantic]
        teacher: Input<Model>,
        /// Divides the logits of both models in the divergence, which is multiplied by its square.
        #[semantic(default = 1.0, above = 0.0)]
        temperature: f64,
        /// Weight of the divergence; the rest is the cross-entropy of the targets.
        #[semantic(default = 0.5, range = 0.0..=1.0)]
        alpha: f64,
        /// The divergence of the two distributions.
        #[semantic(default = Divergence::ForwardKl)]
        divergence: Divergence,
    },
    /// Direct preference optimization (Rafailov et al., arXiv:2305.18290): `-log sigmoid(beta · (a - b))` of the
    /// log-ratios `a` and `b` of the chosen and the rejected response to the reference.
    Dpo {
        /// Strength of the regularisation towards the reference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Probability that the order of a pair is wrong: cDPO, `-(1 - ε) log sigmoid(x) - ε log sigmoid(-x)`. TRL
        /// since 1.0 ignores it here.
        #[semantic(default = 0.0, range = 0.0..0.5)]
        label_smoothing: f64,
        /// Whether log-ratios are divided by the number of the response's tokens: `sigmoid_norm` in TRL.
        #[semantic(default = false)]
        length_normalized: bool,
        /// The divergence from the reference that the rewards belong to (Wang et al., arXiv:2309.16240).
        #[semantic(default = DpoDivergence::ReverseKl)]
        divergence: DpoDivergence,
        /// The α of `divergence: alpha`: towards 0 it is the reverse KL divergence, towards 1 the forward one.
        #[semantic(default = 0.5, above = 0.0, range = ..1.0)]
        alpha: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Unbiased DPO for labels that are wrong with a known probability (Chowdhury et al., arXiv:2403.00409):
    /// `(-(1 - ε) log sigmoid(x) + ε log sigmoid(-x)) / (1 - 2ε)`.
    Robust {
        /// Strength of the regularisation towards the reference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Probability that the order of a pair is wrong, `ε`.
        #[semantic(default = 0.0, range = 0.0..0.5)]
        label_smoothing: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Identity preference optimization (Azar et al., arXiv:2310.12036): `(a - b - 1 / (2 beta))²`.
    Ipo {
        /// `τ` in the paper: the target of the margin is `1 / (2 beta)`.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Whether log-ratios are divided by the number of the response's tokens, as the authors recommend; `false` is
        /// the formula of the paper.
        #[semantic(default = true)]
        length_normalized: bool,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// The hinge loss of RSO (Liu et al., arXiv:2309.06657): `max(0, 1 - beta · (a - b))`.
    Hinge {
        /// The inverse of the target margin; `gamma` of torchtune's `RSOLoss`.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Odds ratio preference optimization (Hong et al., arXiv:2403.07691), without a reference: the likelihood of the
    /// chosen responses, and `-beta · log sigmoid(log odds(chosen) - log odds(rejected))` of mean log-probabilities.
    Orpo {
        /// `λ` in the paper.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// The tokens of the likelihood.
        #[semantic(default = Likelihood::Response)]
        nll: Likelihood,
    },
    /// Simple preference optimization (Meng et al., arXiv:2405.14734), without a reference:
    /// `-log sigmoid(beta · (c - r) - gamma)` of mean log-probabilities.
    Simpo {
        /// Scales the difference.
        #[semantic(default = 2.0, above = 0.0)]
        beta: f64,
        /// The target margin, not multiplied by `beta`.
        #[semantic(default = 1.0, range = 0.0..)]
        gamma: f64,
        /// Probability that the order of a pair is wrong.
        #[semantic(default = 0.0, range = 0.0..0.5)]
        label_smoothing: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Contrastive preference optimization (Xu et al., arXiv:2401.08417), without a reference:
    /// `-log sigmoid(beta · (c - r))` of summed log-probabilities, and the likelihood of the chosen responses.
    Cpo {
        /// Scales the difference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Probability that the order of a pair is wrong.
        #[semantic(default = 0.0, range = 0.0..0.5)]
        label_smoothing: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 1.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306), for single responses that are desirable or
    /// not: `w · (1 - sigmoid(±beta · (a - z)))`, where `z` estimates the divergence from the reference over the step.
    Kto {
        /// Strength of the regularisation towards the reference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// `w` of desirable responses.
        #[semantic(default = 1.0, above = 0.0)]
        desirable_weight: f64,
        /// `w` of undesirable responses.
        #[semantic(default = 1.0, above = 0.0)]
        undesirable_weight: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Anchored preference optimization (D'Oosterlinck et al., arXiv:2408.06266) if chosen responses are better than
    /// the model's own: `1 - sigmoid(beta · a) + sigmoid(beta · b)`.
    ApoZero {
        /// Strength of the regularisation towards the reference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// The same if chosen responses are worse than the model's own: `sigmoid(beta · a) + 1 - sigmoid(beta · (a - b))`.
    ApoDown {
        /// Strength of the regularisation towards the reference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Noise contrastive alignment (Chen et al., arXiv:2402.05369): `-log sigmoid(r) - ½ log sigmoid(-r) - ½ log
    /// sigmoid(-s)` of the rewards `r = beta · a` and `s = beta · b`.
    Nca {
        /// Strength of the regularisation towards the reference.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
    /// Self-play preference optimization with hard labels (Wu et al., arXiv:2405.00675):
    /// `(a - ½ / beta)² + (b + ½ / beta)²`.
    Sppo {
        /// `1 / η` in the paper.
        #[semantic(default = 0.1, above = 0.0)]
        beta: f64,
        /// Weight of an added negative log-likelihood of the chosen responses, a mean over their tokens: RPO (Pang et
        /// al., arXiv:2404.19733).
        #[semantic(default = 0.0, range = 0.0..)]
        sft_weight: f64,
    },
}

/// The divergence of DPO's policy from its reference.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum DpoDivergence {
    /// KL(policy ‖ reference): standard DPO.
    ReverseKl,
    /// KL(reference ‖ policy).
    ForwardKl,
    /// The mean of the divergences of both from their mean.
    JensenShannon,
    /// The α-divergence.
    Alpha,
}

/// Which tokens of a chosen document are likely to become.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Likelihood {
    /// Those of the response, as in the paper.
    Response,
    /// Also those of the prompt, as in TRL.
    Full,
}

/// How the distributions of a teacher and a student are compared.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divergence {
    /// KL(teacher ‖ student): the student covers all modes of the teacher.
    ForwardKl,
    /// KL(student ‖ teacher): the student concentrates on the main modes of the teacher.
    ReverseKl,
    /// The mean of the divergences of both from their mean.
    JensenShannon,
}

/// What rows a loss is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// Prompts, conversations and texts.
    Ordinary,
    /// Pairs of responses.
    Pairs,
    /// Responses that are desirable or not.
    Judged,
}

impl For {
    /// Whether rows of this shape are such.
    pub(crate) fn takes(self, shape: Shape) -> bool {
        match self {
            Self::Ordinary => !shape.is_preference(),
            Self::Pairs => shape == Shape::Pairs,
            Self::Judged => shape == Shape::Judged,
        }
    }

    /// What it is called in messages.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Ordinary => "prompts, conversations or text",
            Self::Pairs => "pairs of a chosen and a rejected response",
            Self::Judged => "responses with a label",
        }
    }
}

impl Loss {
    /// The loss of targets, as the trainer takes it; of preferences it is not used.
    pub(crate) fn token_loss(&self) -> Arc<dyn TokenLoss> {
        match *self {
            Self::CrossEntropy { label_smoothing } => {
                Arc::new(CrossEntropy { label_smoothing: label_smoothing as f32 })
            }
            _ => match self.distillation() {
                Some((_, distillation)) => Arc::new(distillation),
                None => Arc::new(CrossEntropy::default()),
            },
        }
    }

    /// The teacher, and how it is learned from, where there is one.
    pub(crate) fn distillation(&self) -> Option<(&Input<Model>, loss::Distillation)> {
        let Self::Distillation { teacher, temperature, alpha, divergence } = self else { return None };
        let divergence = match divergence {
            Divergence::ForwardKl => loss::Divergence::ForwardKl,
            Divergence::ReverseKl => loss::Divergence::ReverseKl,
            Divergence::JensenShannon => loss::Divergence::JensenShannon,
        };
        Some((teacher, loss::Distillation { temperature: *temperature as f32, alpha: *alpha as f32, divergence }))
    }

    /// The objective of documents, for losses of preferences.
    pub(crate) fn objective(&self) -> Option<Arc<dyn DocumentObjective>> {
        let sft = |weight: f64| (weight > 0.0).then_some(Sft { weight, scope: TargetScope::Response });
        let (loss, sft): (Arc<dyn PairLoss>, Option<Sft>) = match *self {
            Self::CrossEntropy { .. } | Self::Distillation { .. } => return None,
            Self::Kto { beta, desirable_weight, undesirable_weight, sft_weight } => {
                let (estimate, sft) = (Gathering::Step, sft(sft_weight));
                return Some(Arc::new(loss::Kto { beta, desirable_weight, undesirable_weight, estimate, sft }));
            }
            Self::Dpo { beta, label_smoothing, length_normalized, divergence, alpha, sft_weight } => {
                let divergence = match divergence {
                    DpoDivergence::ReverseKl => loss::DpoDivergence::ReverseKl,
                    DpoDivergence::ForwardKl => loss::DpoDivergence::ForwardKl,
                    DpoDivergence::JensenShannon => loss::DpoDivergence::JensenShannon,
                    DpoDivergence::Alpha => loss::DpoDivergence::Alpha(alpha),
                };
                (Arc::new(loss::Dpo { beta, label_smoothing, length_normalized, divergence }), sft(sft_weight))
            }
            Self::Robust { beta, label_smoothing, sft_weight } => {
                (Arc::new(loss::Robust { beta, label_smoothing }), sft(sft_weight))
            }
            Self::Ipo { beta, length_normalized, sft_weight } => {
                (Arc::new(loss::Ipo { beta, length_normalized }), sft(sft_weight))
            }
            Self::Hinge { beta, sft_weight } => (Arc::new(loss::Hinge { beta }), sft(sft_weight)),
            Self::Orpo { beta, nll } => {
                let scope = match nll {
                    Likelihood::Response => TargetScope::Response,
                    Likelihood::Full => TargetScope::Document,
                };
                (Arc::new(loss::Orpo { beta }), Some(Sft { weight: 1.0, scope }))
            }
            Self::Simpo { beta, gamma, label_smoothing, sft_weight } => {
                (Arc::new(loss::SimPo { beta, gamma, label_smoothing }), sft(sft_weight))
            }
            Self::Cpo { beta, label_smoothing, sft_weight } => {
                (Arc::new(loss::Cpo { beta, label_smoothing }), sft(sft_weight))
            }
            Self::ApoZero { beta, sft_weight } => (Arc::new(loss::ApoZero { beta }), sft(sft_weight)),
            Self::ApoDown { beta, sft_weight } => (Arc::new(loss::ApoDown { beta }), sft(sft_weight)),
            Self::Nca { beta, sft_weight } => (Arc::new(loss::Nca { beta }), sft(sft_weight)),
            Self::Sppo { beta, sft_weight } => (Arc::new(loss::Sppo { beta }), sft(sft_weight)),
        };
        Some(Arc::new(Preference { loss, sft }))
    }

    /// What rows it is for.
    pub(crate) fn rows(&self) -> For {
        match self {
            Self::CrossEntropy { .. } | Self::Distillation { .. } => For::Ordinary,
            Self::Kto { .. } => For::Judged,
            _ => For::Pairs,
        }
    }

    /// Its name in a file.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::Distillation { .. } => "distillation",
            Self::Dpo { .. } => "dpo",
            Self::Robust { .. } => "robust",
            Self::Ipo { .. } => "ipo",
            Self::Hinge { .. } => "hinge",
            Self::Orpo { .. } => "orpo",
            Self::Simpo { .. } => "simpo",
            Self::Cpo { .. } => "cpo",
            Self::Kto { .. } => "kto",
            Self::ApoZero { .. } => "apo_zero",
            Self::ApoDown { .. } => "apo_down",
            Self::Nca { .. } => "nca",
            Self::Sppo { .. } => "sppo",
        }
    }

    /// The model that is learned from, where there is one.
    pub(crate) fn teacher(&self) -> Option<&Input<Model>> {
        self.distillation().map(|(teacher, _)| teacher)
    }
}
