//! Merges an adapter into its base, and proves it: base and adapter together must compute what the merged model does.

mod proof;

use std::fs;

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::parameter::{Input, Parameters};
use engine::stage::{Stage, Threads};
use model::checkpoint::DEFAULT_MAX_SHARD_BYTES;
use model::merge::{MergeError, MergeOptions, WeightedAdapter, merge};
use serde_json::json;

use crate::artifact::{Adapter, Model, OutputKind, TokensOrPacks};
use crate::{adapter, checkpoint};

/// What a pipeline file may say under `with:` for `uses: merge`.
#[derive(Parameters, Debug)]
pub struct MergeParams {
    /// The model that the adapter was trained on.
    #[semantic]
    pub model: Input<Model>,
    /// The adapter.
    #[semantic]
    pub adapter: Input<Adapter>,
    /// Rows to compare the two on; without them, a few rows of random tokens.
    #[semantic]
    pub data: Option<Input<TokensOrPacks>>,
    /// Rows that are compared.
    #[semantic(default = 4, range = 1..)]
    pub proof_rows: usize,
}

/// The stage kind.
pub struct Merge;

impl Stage for Merge {
    const NAME: &'static str = "merge";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Merges an adapter into its base model and proves the result.";
    type Params = MergeParams;

    fn outputs(_: &MergeParams) -> Vec<Output> {
        vec![Model::output("model")]
    }

    fn threads(_: &MergeParams) -> Threads {
        Threads::Many
    }

    fn run(params: &MergeParams, context: &mut StageContext) -> Result<(), StageError> {
        let model = context.open(&params.model)?;
        let adapter = adapter::open(&context.open(&params.adapter)?, &model)?;
        let base = model.folder;

        let draft = context.create("model")?;
        let weighted = [WeightedAdapter { adapter: &adapter, weight: 1.0 }];
        let options = MergeOptions { max_shard_bytes: DEFAULT_MAX_SHARD_BYTES, dtype: None, base_model: None };
        let report = merge(&base, &weighted, &draft.folder, options).map_err(failure)?;
        checkpoint::carry_along(&base, &draft.folder)?;

        let rows = proof::rows(params, &base, context)?;
        let proof = proof::compare(&base, &adapter, &draft.folder, &rows, context)?;
        let largest = report.merged.iter().max_by(|one, other| one.max_abs_delta.total_cmp(&other.max_abs_delta));
        let report = json!({
            "merged_tensors": report.merged.len(),
            "copied_tensors": report.copied,
            "untied_head": report.untied_head,
            "largest_change": largest.map(|tensor| json!({
                "tensor": tensor.name,
                "max_abs_delta": tensor.max_abs_delta,
                "max_abs_base": tensor.max_abs_base,
            })),
            "proof": proof.report(),
        });
        fs::write(draft.folder.join("merge_report.json"), format!("{report:#}\n"))
            .or_fail(Cause::Machine, || "cannot write `merge_report.json`".to_owned())?;
        proof.hold()?;
        let facts = checkpoint::facts(&draft.folder)?;
        context.seal(draft, facts, None)
    }
}

fn failure(error: MergeError) -> StageError {
    let cause = match &error {
        MergeError::Read(_) | MergeError::Write(_) => Cause::Machine,
        _ => Cause::BadData,
    };
    StageError::new(cause, "cannot merge the adapter into the model").with_source(error)
}
