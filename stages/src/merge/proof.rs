//! The proof of a merge: base and adapter against the merged model, layer by layer and at the logits.
//!
//! The bound follows from the rounding of the merged weights to their stored type, the only thing that may differ.

use std::path::Path;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use model::batch::Batch;
use model::checkpoint::Checkpoint;
use model::cpu::Cpu;
use model::decoder::{Decoder, RunError};
use model::parameter::Keep;
use model::peft::Adapter;
use model::random::{Address, Purpose, Stream};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::MergeParams;
use crate::artifact::TokensReader;
use crate::{checkpoint, kernels};

/// Tokens of a row that are compared at most.
const TOKENS_PER_ROW: usize = 128;
/// Tokens of a row that is drawn where no rows are given.
const TOKENS_PER_DRAWN_ROW: usize = 32;

/// How far two sets of numbers lie apart.
#[derive(Debug, Clone, Copy, Default)]
struct Distance {
    max_abs_difference: f32,
    max_abs: f32,
}

impl Distance {
    fn of(one: &[f32], other: &[f32]) -> Self {
        let mut distance = Self::default();
        for (one, other) in one.iter().zip(other) {
            distance.include(Self { max_abs_difference: (one - other).abs(), max_abs: one.abs() });
        }
        distance
    }

    fn include(&mut self, other: Self) {
        // `max` passes over a NaN on either side, which must not go unseen.
        let (one, two) = (self.max_abs_difference, other.max_abs_difference);
        self.max_abs_difference = if one.is_nan() || two.is_nan() { f32::NAN } else { one.max(two) };
        self.max_abs = self.max_abs.max(other.max_abs);
    }

    fn report(self) -> Value {
        json!({ "max_abs_difference": self.max_abs_difference, "max_abs": self.max_abs })
    }
}

/// How far the two models lie apart.
pub(super) struct Proof {
    rows: usize,
    positions: usize,
    /// The residual stream after each layer.
    layers: Vec<Distance>,
    logits: Distance,
    same_top: usize,
    tolerance: f32,
    dtype: Dtype,
}

impl Proof {
    /// The figures, for `merge_report.json`.
    pub(super) fn report(&self) -> Value {
        json!({
            "rows": self.rows,
            "positions": self.positions,
            "max_abs_logit_difference": self.logits.max_abs_difference,
            "max_abs_logit": self.logits.max_abs,
            "top_1_agreement": self.same_top as f64 / self.positions as f64,
            "bound": self.bound(),
            "dtype": format!("{:?}", self.dtype),
            "layers": self.layers.iter().map(|layer| layer.report()).collect::<Vec<_>>(),
        })
    }

    /// Fails if the merged model computes something else.
    pub(super) fn hold(&self) -> Result<(), StageError> {
        let (found, bound) = (self.logits.max_abs_difference, self.bound());
        // Written so that a difference that is not a number fails.
        if found <= bound {
            return Ok(());
        }
        let first = self.layers.iter().position(|layer| {
            let bound = self.tolerance * layer.max_abs;
            layer.max_abs_difference.is_nan() || layer.max_abs_difference > bound
        });
        let place = first.map_or(String::new(), |layer| format!(", from layer {layer} on"));
        let message = format!(
            "the merged model does not compute what base and adapter do: logits differ by {found:.3e}{place}, the bound is {bound:.3e}"
        );
        Err(StageError::new(Cause::Numeric, message).with_help("was the adapter trained on this very model?"))
    }

    fn bound(&self) -> f32 {
        self.tolerance * self.logits.max_abs
    }
}

/// The rows to compare on: those given, else random ones, the same for each model of this vocabulary.
pub(super) fn rows(params: &MergeParams, base: &Path, context: &mut StageContext) -> Result<Vec<Vec<u32>>, StageError> {
    let config = checkpoint::config(base)?;
    let size = |name: &str| config.get(name).and_then(Value::as_u64);
    let positions = size("max_position_embeddings").and_then(|positions| usize::try_from(positions).ok());
    let most_tokens = |wanted: usize| positions.map_or(wanted, |positions| wanted.min(positions));
    if let Some(data) = &params.data {
        let mut reader = TokensReader::open(&context.open(data)?)?;
        let most = reader.len().min(params.proof_rows as u64);
        let row = |index| -> Result<Vec<u32>, StageError> {
            let row = reader.row(index)?;
            let first = row.document_lengths.first().map_or(0, |length| *length as usize);
            Ok(row.input_ids[..first.min(most_tokens(TOKENS_PER_ROW))].to_vec())
        };
        return (0..most).map(row).collect();
    }
    let vocab_size = size("vocab_size").unwrap_or(1);
    let row = |row| {
        let mut stream = Stream::new(0, Address::new(Purpose::Sampling).row(row));
        (0..most_tokens(TOKENS_PER_DRAWN_ROW)).map(|_| stream.below(vocab_size) as u32).collect()
    };
    Ok((0..params.proof_rows as u64).map(row).collect())
}

/// Runs the rows through both.
pub(super) fn compare(
    base: &Path,
    adapter: &Adapter,
    merged: &Path,
    rows: &[Vec<u32>],
    context: &StageContext,
) -> Result<Proof, StageError> {
    let ops = kernels::cpu(context.threads())?;
    let load = |folder: &Path| -> Result<Decoder<Cpu>, StageError> {
        Decoder::load(ops.clone(), folder, Keep::Frozen).or_fail(Cause::BadData, || "cannot load the model".to_owned())
    };
    let dtype = stored_dtype(base)?;
    let rows: Vec<Batch> = rows.iter().filter(|row| !row.is_empty()).map(|row| Batch::text(row.clone())).collect();
    // One model at a time: what they compute is small beside them.
    let adapted = {
        let mut model = load(base)?;
        model.attach(adapter).or_fail(Cause::BadData, || "the adapter does not fit the model".to_owned())?;
        outputs(&mut model, &rows)?
    };
    let mut merged = load(merged)?;
    let vocab_size = merged.config().vocab_size;
    let merged = outputs(&mut merged, &rows)?;

    let mut proof = Proof {
        rows: rows.len(),
        positions: 0,
        layers: Vec::new(),
        logits: Distance::default(),
        same_top: 0,
        tolerance: tolerance(dtype),
        dtype,
    };
    for (one, other) in adapted.iter().zip(&merged) {
        proof.include(one, other, vocab_size);
    }
    // Without a position every bound holds, and nothing is proved.
    if proof.positions == 0 {
        return Err(StageError::bad_data("the rows to compare the merged model on hold no token")
            .with_help("give `data` rows with tokens, or leave it out for rows of random tokens"));
    }
    Ok(proof)
}

/// What a model computes from a row.
struct Outputs {
    /// The residual stream after each layer.
    layers: Vec<Vec<f32>>,
    /// `[tokens, vocab_size]`.
    logits: Vec<f32>,
}

fn outputs(model: &mut Decoder<Cpu>, rows: &[Batch]) -> Result<Vec<Outputs>, StageError> {
    let mut run = |row: &Batch| -> Result<Outputs, RunError> {
        Ok(Outputs { layers: model.layer_outputs(row)?, logits: model.logits(row)? })
    };
    let outputs: Result<Vec<Outputs>, RunError> = rows.iter().map(&mut run).collect();
    outputs.or_fail(Cause::BadData, || "cannot run the rows to compare on".to_owned())
}

impl Proof {
    /// Takes in what the two models computed from a row.
    fn include(&mut self, one: &Outputs, other: &Outputs, vocab_size: usize) {
        self.layers.resize(one.layers.len(), Distance::default());
        for (sum, (one, other)) in self.layers.iter_mut().zip(one.layers.iter().zip(&other.layers)) {
            sum.include(Distance::of(one, other));
        }
        self.logits.include(Distance::of(&one.logits, &other.logits));
        for (one, other) in one.logits.chunks_exact(vocab_size).zip(other.logits.chunks_exact(vocab_size)) {
            self.positions += 1;
            self.same_top += usize::from(top(one) == top(other));
        }
    }
}

fn top(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|one, other| logits[*one].total_cmp(&logits[*other]))
}

/// The coarsest type among the weights, which decides how far rounding can lead.
fn stored_dtype(folder: &Path) -> Result<Dtype, StageError> {
    let checkpoint = Checkpoint::open(folder).or_fail(Cause::BadData, || "cannot read the model".to_owned())?;
    let dtypes: Vec<Dtype> = checkpoint.tensors().map(|(_, info)| info.dtype).collect();
    Ok([Dtype::BF16, Dtype::F16].into_iter().find(|dtype| dtypes.contains(dtype)).unwrap_or(Dtype::F32))
}

/// Share of the greatest logit by which logits may differ: what one rounding of the weights to this type, carried through
/// the layers, stays well below.
fn tolerance(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::BF16 => 5e-2,
        Dtype::F16 => 1e-2,
        _ => 1e-3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_that_is_no_number_stays_seen() {
        for values in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [1.0, 2.0, f32::NAN]] {
            let distance = Distance::of(&values, &[1.0; 3]);
            assert!(distance.max_abs_difference.is_nan(), "{values:?}");
            let mut sum = distance;
            sum.include(Distance::of(&[1.0], &[1.0]));
            assert!(sum.max_abs_difference.is_nan(), "a later row hides it");
            let proof = Proof {
                rows: 1,
                positions: 1,
                layers: Vec::new(),
                logits: sum,
                same_top: 1,
                tolerance: 1.0,
                dtype: Dtype::F32,
            };
            assert!(proof.hold().is_err());
        }
    }
}
