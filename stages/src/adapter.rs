//! An Adapter artefact, and the model it belongs to.

use engine::context::Artifact;
use engine::error::{Cause, OrFail, StageError};
use model::peft::Adapter;

use crate::checkpoint::WEIGHTS;

/// Reads an adapter that is to be used with a model.
///
/// Another model of the same shape would take it without a word and compute nonsense; so an adapter that was trained here
/// must have been trained on these very weights. One from elsewhere does not say, and is taken at its word.
///
/// # Errors
/// Fails if the adapter cannot be read or was trained on other weights.
pub fn open(adapter: &Artifact, model: &Artifact) -> Result<Adapter, StageError> {
    let trained_on = adapter.description.facts.get(WEIGHTS);
    let weights = model.description.facts.get(WEIGHTS);
    if let (Some(trained_on), Some(weights)) = (trained_on, weights)
        && trained_on != weights
    {
        return Err(StageError::bad_data("the adapter was trained on another model than the one it is used with")
            .with_help("give this stage the `model` that the adapter's `train` stage has"));
    }
    let adapter = Adapter::load(&adapter.folder).or_fail(Cause::BadData, || "cannot read the adapter".to_owned())?;
    match not_finite(&adapter) {
        Some(module) => {
            Err(StageError::bad_data(format!("the adapter holds a value that is not finite in `{module}`"))
                .with_help("its training diverged: lower the learning rate and train again"))
        }
        None => Ok(adapter),
    }
}

/// The first module with a value that is not finite, which would make every answer and every loss NaN.
fn not_finite(adapter: &Adapter) -> Option<&str> {
    let is_bad = |values: &[f32]| values.iter().any(|value| !value.is_finite());
    let modules = adapter.modules.iter().filter(|(_, module)| {
        let magnitude = module.magnitude.as_deref().unwrap_or_default();
        is_bad(&module.lora_a) || is_bad(&module.lora_b) || is_bad(magnitude)
    });
    let saved = adapter.saved_tensors.iter().filter(|(_, tensor)| is_bad(&tensor.values));
    modules.map(|(name, _)| name).chain(saved.map(|(name, _)| name)).next().map(String::as_str)
}
