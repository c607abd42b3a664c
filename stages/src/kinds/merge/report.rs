//! `merge_report.json`: what a merge did, and the figures of its proof.

use engine::context::StageContext;
use model::merge::{AgainstTraining, Deviation, MergeInto, MergeReport, MergedTensor, Proof};
use serde_json::{Value, json};

use super::Merge;

pub(super) fn of(params: &Merge, written: &MergeReport, proof: &Proof) -> Value {
    let largest = written.merged.iter().max_by(|one, other| one.max_abs_delta.total_cmp(&other.max_abs_delta));
    let roughest = roughest(written);
    json!({
        "weights": params.weighted().iter().map(|(_, weight)| *weight).collect::<Vec<_>>(),
        "merged_tensors": written.merged.len(),
        "replaced_tensors": written.replaced,
        "copied_tensors": written.copied,
        "untied_head": written.untied_head,
        "largest_change": largest.map(|tensor| json!({
            "tensor": tensor.name,
            "max_abs_delta": tensor.max_abs_delta,
            "max_abs_base": tensor.max_abs_base,
        })),
        "largest_rounding": roughest.map(|tensor| json!({
            "tensor": tensor.name,
            "rounding_over_delta": tensor.rounding_over_delta,
        })),
        "proof": proof,
    })
}

/// The lines for the end of a run.
pub(super) fn text(written: &MergeReport, proof: &Proof) -> String {
    let of = &proof.merged;
    let against = proof.against_training.as_ref().map(against_training).unwrap_or_default();
    let head = if written.untied_head { "; the head is now a separate weight" } else { "" };
    format!(
        "{} weights merged, {} replaced, {} copied{head}\n\
         base with adapter against merged, {} tokens of {} rows: logits differ by {:.1e} of {:.1} at most (bound {:.1e}), \
         {:.1} % agree on the most likely token{against}",
        written.merged.len(),
        written.replaced.len(),
        written.copied,
        proof.positions,
        proof.rows,
        of.max_abs_logit_difference,
        of.max_abs_logit,
        of.bound,
        100.0 * of.top_1_agreement,
    )
}

/// How far each of the two merges is from what was trained.
fn against_training(of: &AgainstTraining) -> String {
    let line = |(into, Deviation { max_abs_logit_difference, max_abs_logit, top_1_agreement }): (
        MergeInto,
        Deviation,
    )| {
        let (name, written) = match into {
            MergeInto::Original => ("the original weights", into == of.into),
            MergeInto::Dequantized => ("the dequantised weights", into == of.into),
        };
        let written = if written { "" } else { " (not written)" };
        format!(
            "\nagainst what was trained, merged into {name}{written}: logits differ by {max_abs_logit_difference:.1e} of \
             {max_abs_logit:.1} at most, {:.1} % agree",
            100.0 * top_1_agreement
        )
    };
    [(MergeInto::Dequantized, of.dequantized.clone()), (MergeInto::Original, of.original.clone())].map(line).concat()
}

/// Says where the stored type is too coarse for what the adapters change.
pub(super) fn warn_of_rounding(written: &MergeReport, context: &mut StageContext) {
    let lost = written.merged.iter().filter(|tensor| tensor.rounding_over_delta > 1.0).count();
    if let Some(tensor) = roughest(written).filter(|_| lost > 0) {
        context.warn(format!(
            "in {lost} of {} merged weights rounding changes more than the adapter does (in `{}` {:.1} times as much); \
             `dtype: f32` keeps the change exactly, and so does the adapter without a merge",
            written.merged.len(),
            tensor.name,
            tensor.rounding_over_delta,
        ));
    }
}

fn roughest(written: &MergeReport) -> Option<&MergedTensor> {
    written.merged.iter().max_by(|one, other| one.rounding_over_delta.total_cmp(&other.rounding_over_delta))
}
