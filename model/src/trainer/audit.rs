//! The audit of a training run: gradients must have moved all that is trained, and nothing may have moved what is
//! frozen.
//!
//! A tensor that stays where it was is the mark of a graph cut somewhere, which no loss curve shows; a frozen weight
//! that moves makes an adapter that fits no base model but the one in memory.

use crate::blocks::Blocks;
use crate::decoder::Decoder;
use crate::fingerprint;
use crate::ops::KernelError;
use crate::parameter::Parameter;
use crate::peft::parse_token_rows_name;
use crate::trainer::{Optimizer, StepReport, TrainError};

/// Steps with a learning rate that counts after which every tensor must have moved.
const STEPS: u64 = 3;
/// A lower learning rate, as at the start of a long warm-up, may round away in each step, and rightly moves nothing.
const LEAST_RATE: f64 = 1e-6;

/// Where everything was at first, and what gradients did since.
pub(super) struct Audit {
    /// Of the trained tensors, until they have been looked at.
    trained: Option<Vec<TrainedAudit>>,
    /// Fingerprints of what is frozen.
    frozen: Vec<u64>,
    /// Whether a learning rate that counts moves whatever a gradient reaches.
    rate_moves: bool,
    /// Steps with a learning rate that counts.
    steps: u64,
    /// Whether the frozen tensors have been looked at after a step.
    looked_at_frozen: bool,
}

/// What is known of a trained tensor.
struct TrainedAudit {
    /// Its values at first.
    fingerprint: u64,
    /// Whether a gradient other than zero has reached it: weight decay moves a tensor without any.
    reached: bool,
}

impl Audit {
    /// An update in proportion to the gradient may well round away where that is small, as in a fresh adapter's A,
    /// whose B is hardly more than zero; [`Optimizer::rate_moves`] tells whether the optimizer's is.
    pub(super) fn new<B: Blocks>(decoder: &Decoder<B>, optimizer: &Optimizer) -> Result<Self, KernelError> {
        let rate_moves = optimizer.rate_moves();
        let mut audit = Self { trained: None, frozen: Vec::new(), rate_moves, steps: 0, looked_at_frozen: false };
        for (_, fingerprint) in frozen(decoder) {
            audit.frozen.push(fingerprint?);
        }
        audit.restart(decoder)?;
        Ok(audit)
    }

    /// Starts over for what is trained, whose values have been exchanged.
    pub(super) fn restart<B: Blocks>(&mut self, decoder: &Decoder<B>) -> Result<(), KernelError> {
        let fingerprints = fingerprints(decoder)?.into_iter();
        self.trained = Some(fingerprints.map(|fingerprint| TrainedAudit { fingerprint, reached: false }).collect());
        self.steps = 0;
        Ok(())
    }

    /// Notes that the gradient of a trained tensor, by its number, is not zero.
    pub(super) fn reached(&mut self, index: usize) {
        if let Some(trained) = &mut self.trained {
            trained[index].reached = true;
        }
    }

    /// Looks at what is frozen after the first step, and at what is trained once enough steps are done. One whose loss
    /// is zero is none of them: a hinge that is satisfied has no gradient.
    pub(super) fn after_step<B: Blocks>(
        &mut self,
        decoder: &Decoder<B>,
        report: &StepReport,
    ) -> Result<(), TrainError> {
        let &StepReport { step, loss, learning_rate, .. } = report;
        if !self.looked_at_frozen {
            self.check_frozen(decoder, step)?;
            self.looked_at_frozen = true;
        }
        if learning_rate >= LEAST_RATE && loss != 0.0 {
            self.steps += 1;
        }
        if self.steps < STEPS {
            return Ok(());
        }
        let Some(before) = self.trained.take() else { return Ok(()) };
        let now = fingerprints(decoder)?;
        let moved: Vec<bool> = before.iter().zip(now).map(|(before, now)| before.fingerprint != now).collect();
        let all_must = self.rate_moves || !moved.contains(&true);
        let parameters = decoder.parameters().into_iter().filter(|parameter| parameter.is_trained());
        for (parameter, (before, moved)) in parameters.zip(before.iter().zip(moved)) {
            // Rows of tokens have a gradient only where these tokens are read.
            if !before.reached && parse_token_rows_name(&parameter.name).is_some() {
                continue;
            }
            if !before.reached || (all_must && !moved) {
                return Err(TrainError::NotMoved { tensor: parameter.name.clone(), steps: self.steps });
            }
        }
        Ok(())
    }

    /// Fingerprints of what is frozen, as it was at first.
    pub(super) fn frozen_fingerprints(&self) -> &[u64] {
        &self.frozen
    }

    /// Compares what is frozen with what it was at first.
    pub(super) fn check_frozen<B: Blocks>(&self, decoder: &Decoder<B>, step: u64) -> Result<(), TrainError> {
        for ((name, now), before) in frozen(decoder).zip(&self.frozen) {
            if now? != *before {
                return Err(TrainError::FrozenMoved { tensor: name.to_owned(), step });
            }
        }
        Ok(())
    }
}

/// A fingerprint of each trained tensor.
pub(super) fn fingerprints<B: Blocks>(decoder: &Decoder<B>) -> Result<Vec<u64>, KernelError> {
    let trained = decoder.parameters().into_iter().filter(|parameter| parameter.is_trained());
    trained.map(|parameter| Ok(fingerprint::of_f32(&decoder.ops().read(&parameter.value)?))).collect()
}

/// Name and fingerprint of each frozen tensor: norms and biases as they are kept, matrices in the form that products
/// read. Those of the base model, too, in whose place an adapter's copies are trained.
fn frozen<B: Blocks>(decoder: &Decoder<B>) -> impl Iterator<Item = (&str, Result<u64, KernelError>)> {
    let ops = decoder.ops();
    let parameters = decoder.parameters().into_iter().flat_map(Parameter::frozen).map(|parameter| {
        let values = ops.read(&parameter.value);
        (parameter.name.as_str(), values.map(|values| fingerprint::of_f32(&values)))
    });
    let weights = decoder.matrices().into_iter().flat_map(move |matrix| {
        matrix.frozen_weights().map(move |weight| (matrix.name.as_str(), ops.fingerprint(weight)))
    });
    parameters.chain(weights)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::config::Config;
    use crate::cpu::Cpu;
    use crate::ops::Compute;
    use crate::parameter::Trainability;
    use crate::peft::AdapterConfig;

    /// Names of what is frozen while an adapter on `q_proj` is trained with copies of these modules.
    fn frozen_beside(tied: bool, modules_to_save: &[&str]) -> Vec<String> {
        let config = format!(
            r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1,
                "num_attention_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": {tied}}}"#
        );
        let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
        let config = Config::from_json(&config).unwrap();
        let values = |_: &str, shape: &[usize]| Ok(vec![0.5; shape.iter().product()]);
        let mut decoder = Decoder::build(Arc::clone(&ops), config, Trainability::Frozen, values).unwrap();
        let settings = AdapterConfig {
            modules_to_save: modules_to_save.iter().map(|module| (*module).to_owned()).collect(),
            ..AdapterConfig::new(2, 4.0, vec!["q_proj".to_owned()])
        };
        let adapter = decoder.fresh_adapter(&settings, 1).unwrap();
        decoder.attach(&adapter).unwrap();
        for parameter in decoder.parameters_mut() {
            if crate::peft::is_adapter_tensor_name(&parameter.name) {
                parameter.train(&ops, &[]).unwrap();
            }
        }
        let mut names: Vec<String> = frozen(&decoder).map(|(name, _)| name.to_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_an_adapter_has_copies_of_stays_frozen_and_is_looked_at() {
        for (tied, modules) in [
            (false, &["lm_head"][..]),
            (false, &["embed_tokens", "lm_head", "input_layernorm", "down_proj"]),
            (true, &["embed_tokens"]),
            (true, &["lm_head"]),
            (true, &["embed_tokens", "lm_head", "norm"]),
        ] {
            assert_eq!(frozen_beside(tied, modules), frozen_beside(tied, &[]), "tied: {tied}, {modules:?}");
        }
        assert_eq!(frozen_beside(false, &[]).len(), 3 + 7 + 2, "norms, projections, embedding and head");
        assert_eq!(frozen_beside(true, &[]).len(), 3 + 7 + 1);
    }
}
