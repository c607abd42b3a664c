//! What a run reads, opened and checked against each other before anything is computed.

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::config::Architecture;

use super::fit;
use super::order::{Division, WITHOUT_A_STEP};
use super::parameters::{Train, TrainQuantize};
use super::summary::surprises;
use crate::compute::checkpoint;
use crate::compute::quantize::{WeightFormat, warn_of_other_base};
use crate::data::artifact::TokensReader;

/// The inputs of a run.
pub(super) struct Inputs {
    /// The model that is trained, or that an adapter is trained on.
    pub model: Artifact,
    /// Who computes it, and what its configuration says.
    pub architecture: Architecture,
    /// The rows to train on.
    pub rows: TokensReader,
    /// The rows to validate with.
    pub validation: Option<TokensReader>,
    pub division: Division,
    pub total_steps: u64,
}

impl Inputs {
    /// Opens them; warns of what a user would otherwise find out from a loss curve.
    ///
    /// # Errors
    /// Fails where they cannot be read, do not fit each other, or make no step.
    pub(super) fn open(params: &Train, context: &mut StageContext) -> Result<Self, StageError> {
        let model = context.open(&params.model)?;
        let rows = TokensReader::open(&context.open(&params.data)?)?;
        let of_other_kind =
            |rows: &TokensReader| fit::other_rows(&params.loss, &rows.facts().to_facts()).map_or(Ok(()), Err);
        of_other_kind(&rows)?;
        let (division, total_steps) = extent(params, &rows, context)?;
        let validation = params
            .validation
            .as_ref()
            .map(|input| TokensReader::open(&context.open(input)?).map_err(StageError::from))
            .transpose()?;
        validation.as_ref().map_or(Ok(()), of_other_kind)?;
        let architecture = checkpoint::architecture(&model.folder)?;
        for tokens in std::iter::once(&rows).chain(&validation) {
            fit::check_on(&architecture, tokens.facts())?;
        }
        warn_of_formats(params, &model, &architecture, context)?;
        Ok(Self { model, architecture, rows, validation, division, total_steps })
    }

    /// The tables of rows.
    pub(super) fn tables(&self) -> impl Iterator<Item = &TokensReader> {
        std::iter::once(&self.rows).chain(&self.validation)
    }
}

/// Warns of what `quantize` leaves out in vain, and of an adapter that was trained on its base in another format.
fn warn_of_formats(
    params: &Train,
    model: &Artifact,
    architecture: &Architecture,
    context: &mut StageContext,
) -> Result<(), StageError> {
    if let Some(quantize) = params.quantize.as_ref().and_then(TrainQuantize::base) {
        quantize.warn_of_idle_names(architecture, &model.folder, context)?;
    }
    if let Some(adapter) = &params.adapter {
        let trained_on = WeightFormat::of_adapter(&context.open(adapter)?.description.facts)?;
        warn_of_other_base(&trained_on, &WeightFormat::from(params.quantize.as_ref()), context);
    }
    Ok(())
}

/// How the rows are divided into steps, and how many there are.
fn extent(params: &Train, rows: &TokensReader, context: &mut StageContext) -> Result<(Division, u64), StageError> {
    let count = usize::try_from(rows.len()).or_fail(Cause::BadData, || "too many rows".to_owned())?;
    let (division, total_steps) = (params.division(count), params.total_steps(count));
    if total_steps == 0 {
        let message = format!("{} rows make no optimizer step of {} rows", division.rows, division.rows_per_step);
        return Err(StageError::bad_data(message).with_help(WITHOUT_A_STEP));
    }
    surprises(params, &division, total_steps).into_iter().for_each(|surprise| context.warn(surprise));
    Ok((division, total_steps))
}
