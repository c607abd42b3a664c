//! What becomes of each tensor of the base, decided and checked before anything is written.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::delta::Share;
use super::{MergeError, MergeOptions, WeightedAdapter};
use crate::checkpoint::{Checkpoint, CheckpointError, Dtype, TensorSpec};
use crate::peft::{AdapterModule, SavedTensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Where the tensors of the merged checkpoint come from.
pub(super) struct Plan<'a> {
    /// By name in the merged checkpoint.
    pub(super) targets: BTreeMap<String, Target<'a>>,
    /// The output head was the embedding and becomes a weight of its own.
    pub(super) unties_head: bool,
}

/// Where one tensor of the merged checkpoint comes from.
pub(super) struct Target<'a> {
    /// Its name in the base.
    pub(super) source: String,
    /// Its type in the merged checkpoint.
    pub(super) dtype: Dtype,
    /// Its shape.
    pub(super) shape: Vec<usize>,
    /// What the adapters do to it.
    pub(super) change: TensorChange<'a>,
}

/// What the adapters do to a tensor.
pub(super) enum TensorChange<'a> {
    /// Nothing.
    None,
    /// Their deltas are added.
    Shares(Vec<Share<'a>>),
    /// One of them trained it as a whole: these are its values.
    Saved(&'a [f32]),
    /// One of them trained some of its rows.
    Rows(RowValues<'a>),
}

/// Rows of a tensor that were trained by themselves.
#[derive(Clone, Copy)]
pub(super) struct RowValues<'a> {
    /// Their numbers.
    tokens: &'a [u32],
    /// Their values, row after row.
    values: &'a [f32],
}

impl RowValues<'_> {
    /// Puts them into rows of the tensor, of which `first` is the first.
    pub(super) fn put_into(&self, rows: &mut [f32], first: usize, columns: usize) {
        let count = rows.len() / columns;
        for (token, values) in self.tokens.iter().zip(self.values.chunks_exact(columns)) {
            let row = (*token as usize).wrapping_sub(first);
            if row < count {
                rows[row * columns..][..columns].copy_from_slice(values);
            }
        }
    }
}

impl Target<'_> {
    /// Elements per step of the first dimension.
    pub(super) fn row_elements(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

impl<'a> Plan<'a> {
    /// Finds each adapted weight in the base and checks that the adapters fit it.
    pub(super) fn new(
        checkpoint: &Checkpoint,
        config: &Map<String, Value>,
        adapters: &[WeightedAdapter<'a>],
        options: MergeOptions<'_>,
    ) -> Result<Self, MergeError> {
        check_base_names(adapters, options.base_model)?;
        let head_is_tied = is_tied(checkpoint, config);
        let mut changes = Changes { checkpoint, head_is_tied, by_target: BTreeMap::new() };
        adapters.iter().try_for_each(|weighted| changes.add(*weighted))?;
        let mut changes = changes.by_target;
        // An embedding that is trained as a whole leaves the head as it was.
        let is_apart = |name| changes.get(name).is_some_and(|change| !matches!(change, TensorChange::Rows(_)));
        let unties_head = head_is_tied && (is_apart(HEAD) || is_apart(EMBEDDING));

        let mut names: Vec<&str> = checkpoint.names().collect();
        if unties_head && !checkpoint.contains(HEAD) {
            names.push(HEAD);
        }
        let target = |name: &str| {
            let source = if unties_head && name == HEAD { EMBEDDING } else { name };
            let info = checkpoint.info(source)?;
            let dtype = if is_float(info.dtype) { options.dtype.unwrap_or(info.dtype) } else { info.dtype };
            let change = changes.remove(name).unwrap_or(TensorChange::None);
            Ok((name.to_owned(), Target { source: source.to_owned(), dtype, shape: info.shape.clone(), change }))
        };
        let targets = names.into_iter().map(target).collect::<Result<_, CheckpointError>>()?;
        Ok(Self { targets, unties_head })
    }

    /// The tensors to be written.
    pub(super) fn specs(&self) -> Vec<TensorSpec> {
        let spec = |(name, target): (&String, &Target<'_>)| TensorSpec::new(name, target.dtype, &target.shape);
        self.targets.iter().map(spec).collect()
    }
}

/// The changes gathered so far, by the name of the merged tensor.
struct Changes<'a, 'b> {
    checkpoint: &'b Checkpoint,
    head_is_tied: bool,
    by_target: BTreeMap<String, TensorChange<'a>>,
}

impl<'a> Changes<'a, '_> {
    fn add(&mut self, WeightedAdapter { adapter, weight }: WeightedAdapter<'a>) -> Result<(), MergeError> {
        for (name, module) in &adapter.modules {
            let target = format!("{name}.weight");
            self.check_fit(&target, &[module.out_features, module.in_features])?;
            check_finite(name, module)?;
            let scaling = (adapter.config.scaling_of(name) * weight) as f32;
            let shares = match self.by_target.entry(target).or_insert(TensorChange::Shares(Vec::new())) {
                TensorChange::Shares(shares) => shares,
                TensorChange::Rows(_) => return Err(MergeError::RowsCombined { module: name.clone() }),
                TensorChange::Saved(_) | TensorChange::None => {
                    return Err(MergeError::SavedCombined { module: name.clone() });
                }
            };
            shares.push(Share { module, scaling });
            let has_dora = shares.iter().any(|share| share.module.magnitude.is_some());
            if has_dora && (shares.len() > 1 || weight != 1.0) {
                return Err(MergeError::DoraCombined { module: name.clone() });
            }
        }
        for (target, SavedTensor { shape, values }) in &adapter.saved_tensors {
            self.check_fit(target, shape)?;
            all_finite(module_of(target), values.iter())?;
            let before = self.by_target.insert(target.clone(), TensorChange::Saved(values));
            if before.is_some() || weight != 1.0 {
                return Err(MergeError::SavedCombined { module: module_of(target).to_owned() });
            }
        }
        for (table, SavedTensor { shape, values }) in &adapter.token_rows {
            let Some(tokens) = adapter.config.token_indices(table) else { continue };
            let target = format!("{table}.weight");
            if self.head_is_tied && target == HEAD {
                return Err(MergeError::TiedRows);
            }
            // A tied model may have its head stored, too.
            let stored_head = (self.head_is_tied && self.checkpoint.contains(HEAD)).then(|| HEAD.to_owned());
            let rows = self.checkpoint.shape(&target)?.first().copied().unwrap_or_default();
            self.check_fit(&target, &[rows, shape[1]])?;
            all_finite(table, values.iter())?;
            if let Some(&id) = tokens.iter().find(|id| **id as usize >= rows) {
                return Err(MergeError::NoRow { module: table.clone(), id, rows });
            }
            for target in std::iter::once(target).chain(stored_head) {
                let before = self.by_target.insert(target, TensorChange::Rows(RowValues { tokens, values }));
                if before.is_some() || weight != 1.0 {
                    return Err(MergeError::RowsCombined { module: table.clone() });
                }
            }
        }
        Ok(())
    }

    /// Fails unless the base has a tensor of this shape, of floats.
    fn check_fit(&self, target: &str, shape: &[usize]) -> Result<(), MergeError> {
        let module = module_of(target).to_owned();
        let source = if self.head_is_tied && target == HEAD { EMBEDDING } else { target };
        let info = match self.checkpoint.info(source) {
            Ok(info) => info,
            Err(CheckpointError::MissingTensor { nearest, .. }) => {
                let nearest = nearest.iter().find_map(|nearest| nearest.strip_suffix(".weight")).unwrap_or_default();
                return Err(MergeError::UnknownModule { module, nearest: nearest.to_owned() });
            }
            Err(other) => return Err(other.into()),
        };
        if !is_float(info.dtype) {
            return Err(MergeError::NotAFloat { module, dtype: info.dtype });
        }
        if info.shape != shape {
            return Err(MergeError::WrongShape { module, base: info.shape.clone(), adapter: shape.to_vec() });
        }
        Ok(())
    }
}

/// The module that a tensor's name belongs to.
fn module_of(tensor: &str) -> &str {
    tensor.strip_suffix(".weight").unwrap_or(tensor)
}

/// NaN in an adapter is refused before anything is written, as the adapter's own fault and not the base's.
fn check_finite(name: &str, module: &AdapterModule) -> Result<(), MergeError> {
    let values = [&module.lora_a, &module.lora_b].into_iter().chain(&module.magnitude).flatten();
    all_finite(name, values)
}

fn all_finite<'v>(name: &str, mut values: impl Iterator<Item = &'v f32>) -> Result<(), MergeError> {
    match values.all(|value| value.is_finite()) {
        true => Ok(()),
        false => Err(MergeError::AdapterNotFinite { module: name.to_owned() }),
    }
}

fn check_base_names(adapters: &[WeightedAdapter<'_>], base_model: Option<&str>) -> Result<(), MergeError> {
    if adapters.is_empty() {
        return Err(MergeError::NoAdapter);
    }
    // A path says where a model lay, not which one it is.
    let is_hub_name = |name: &&str| name.matches('/').count() == 1 && !name.starts_with(['/', '.', '~']);
    let Some(found) = base_model.filter(is_hub_name) else { return Ok(()) };
    let trained_on = adapters.iter().filter_map(|weighted| weighted.adapter.config.base_model.as_deref());
    match trained_on.filter(is_hub_name).find(|expected| !expected.eq_ignore_ascii_case(found)) {
        Some(expected) => Err(MergeError::OtherBase { expected: expected.to_owned(), found: found.to_owned() }),
        None => Ok(()),
    }
}

/// A head is tied if the configuration says so, or, where it is silent (gemma), if there is no weight for it.
fn is_tied(checkpoint: &Checkpoint, config: &Map<String, Value>) -> bool {
    match config.get("tie_word_embeddings").and_then(Value::as_bool) {
        Some(tied) => tied,
        None => !checkpoint.contains(HEAD),
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}
