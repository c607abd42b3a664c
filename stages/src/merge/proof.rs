//! The proof of a merge: the logits of base and adapter against those of the merged model.
//!
//! The bound follows from the rounding of the merged weights to their stored type, the only thing that may differ.

use std::path::Path;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use model::batch::Batch;
use model::checkpoint::Checkpoint;
use model::cpu::Cpu;
use model::decoder::Decoder;
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

/// How far the logits of the two lie apart.
pub(super) struct Proof {
    rows: usize,
    positions: usize,
    max_abs_difference: f32,
    max_abs_logit: f32,
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
            "max_abs_logit_difference": self.max_abs_difference,
            "max_abs_logit": self.max_abs_logit,
            "top_1_agreement": self.same_top as f64 / self.positions as f64,
            "bound": self.bound(),
            "dtype": format!("{:?}", self.dtype),
        })
    }

    /// Fails if the merged model computes something else.
    pub(super) fn hold(&self) -> Result<(), StageError> {
        // Written so that a difference that is not a number fails.
        if self.max_abs_difference <= self.bound() {
            return Ok(());
        }
        let message = format!(
            "the merged model does not compute what base and adapter do: logits differ by {:.3e}, the bound is {:.3e}",
            self.max_abs_difference,
            self.bound()
        );
        Err(StageError::new(Cause::Numeric, message).with_help("was the adapter trained on this very model?"))
    }

    fn bound(&self) -> f32 {
        self.tolerance * self.max_abs_logit
    }
}

/// The rows to compare on: those given, else random ones, the same for each model of this vocabulary.
pub(super) fn rows(params: &MergeParams, base: &Path, context: &mut StageContext) -> Result<Vec<Vec<u32>>, StageError> {
    if let Some(data) = &params.data {
        let mut reader = TokensReader::open(&context.open(data)?)?;
        let most = reader.len().min(params.proof_rows as u64);
        let row = |index| -> Result<Vec<u32>, StageError> {
            let row = reader.row(index)?;
            let first = row.document_lengths.first().map_or(0, |length| *length as usize);
            Ok(row.input_ids[..first.min(TOKENS_PER_ROW)].to_vec())
        };
        return (0..most).map(row).collect();
    }
    let vocab_size = checkpoint::config(base)?.get("vocab_size").and_then(Value::as_u64).unwrap_or(1);
    let row = |row| {
        let mut stream = Stream::new(0, Address::new(Purpose::Sampling).row(row));
        (0..TOKENS_PER_ROW.min(32)).map(|_| stream.below(vocab_size) as u32).collect()
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
    let mut adapted = load(base)?;
    adapted.attach(adapter).or_fail(Cause::BadData, || "the adapter does not fit the model".to_owned())?;
    let adapted = logits(&mut adapted, rows)?;
    let merged = logits(&mut load(merged)?, rows)?;

    let mut proof = Proof {
        rows: rows.len(),
        positions: 0,
        max_abs_difference: 0.0,
        max_abs_logit: 0.0,
        same_top: 0,
        tolerance: tolerance(dtype),
        dtype,
    };
    for (adapted, merged) in adapted.iter().zip(&merged) {
        proof.positions += 1;
        proof.same_top += usize::from(top(adapted) == top(merged));
        for (one, other) in adapted.iter().zip(merged) {
            let difference = (one - other).abs();
            // `max` would pass over a NaN.
            if !(difference <= proof.max_abs_difference) {
                proof.max_abs_difference = difference;
            }
            proof.max_abs_logit = proof.max_abs_logit.max(one.abs());
        }
    }
    Ok(proof)
}

/// The logits of every position of the rows.
fn logits(decoder: &mut Decoder<Cpu>, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>, StageError> {
    let vocab_size = decoder.config().vocab_size;
    let mut all = Vec::new();
    for row in rows.iter().filter(|row| !row.is_empty()) {
        let values = decoder
            .logits(&Batch::text(row.clone()))
            .or_fail(Cause::BadData, || "cannot run the rows to compare on".to_owned())?;
        all.extend(values.chunks_exact(vocab_size).map(<[f32]>::to_vec));
    }
    Ok(all)
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
