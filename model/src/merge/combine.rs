//! Several weighted adapters as one that computes their sum exactly.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::WeightedAdapter;
use crate::peft::{Adapter, AdapterConfig, AdapterModule};

/// The sum of weighted adapters as a single adapter, to be attached to a decoder.
///
/// In each module the low ranks lie side by side, as in PEFT's `combination_type="cat"`: `A = [A₁; A₂; …]` and
/// `B = [w₁s₁B₁ | w₂s₂B₂ | …]` with `s` the adapters' scalings, and scaling 1, so that `B·A = Σ w·s·B·A`. The adapters
/// fit together as [`super::Merge::new`] has checked.
pub(super) fn combined<'a>(adapters: &[WeightedAdapter<'a>]) -> Cow<'a, Adapter> {
    if let [WeightedAdapter { adapter, weight: 1.0 }] = *adapters {
        return Cow::Borrowed(adapter);
    }
    let mut modules: BTreeMap<&str, Vec<(&AdapterModule, f32)>> = BTreeMap::new();
    for WeightedAdapter { adapter, weight } in adapters {
        for (name, module) in &adapter.modules {
            let scaling = (adapter.config.scaling_of(name) * weight) as f32;
            modules.entry(name).or_default().push((module, scaling));
        }
    }
    let mut config = AdapterConfig::new(1, 1.0, Vec::new());
    config.use_dora = adapters.iter().any(|weighted| weighted.adapter.config.use_dora);
    let mut joined = BTreeMap::new();
    for (name, parts) in modules {
        let module = join(&parts);
        // A scaling of 1: it is part of B.
        config.rank_pattern.insert(name.to_owned(), module.rank);
        config.alpha_pattern.insert(name.to_owned(), module.rank as f64);
        joined.insert(name.to_owned(), module);
    }
    Cow::Owned(Adapter { config, modules: joined, saved_tensors: Default::default(), token_rows: Default::default() })
}

fn join(parts: &[(&AdapterModule, f32)]) -> AdapterModule {
    let (first, _) = parts[0];
    let AdapterModule { in_features, out_features, .. } = *first;
    let rank = parts.iter().map(|(module, _)| module.rank).sum();
    let lora_a = parts.iter().flat_map(|(module, _)| &module.lora_a).copied().collect();
    let mut lora_b = Vec::with_capacity(out_features * rank);
    for row in 0..out_features {
        for (module, scaling) in parts {
            lora_b.extend(module.lora_b[row * module.rank..][..module.rank].iter().map(|value| scaling * value));
        }
    }
    // A DoRA module stands alone.
    AdapterModule { rank, in_features, out_features, lora_a, lora_b, magnitude: first.magnitude.clone() }
}
