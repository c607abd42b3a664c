//! An Adapter artefact, and the model it belongs to.

pub mod record;

use std::path::Path;

use cache::Digest;
use engine::artifact::Facts;
use engine::context::{Artifact, Draft};
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Json, Reference};
use model::checkpoint::Checkpoint;
use model::peft::{Adapter, AdapterConfig, CARD_FILE, CONFIG_FILE, PREFIX, WEIGHTS_FILE};

use crate::compute::checkpoint::WEIGHTS;

/// What PEFT puts into the name of a tensor of the base.
const COPY: &str = ".base_layer.";

/// The embedding, which is the head of a tied model.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// Reads an adapter that is to be used with a model.
///
/// Another model of the same shape would take it without a word and compute nonsense; so an adapter that was trained
/// here must have been trained on these very weights. One from elsewhere does not say, and is taken at its word.
///
/// # Errors
/// Fails if the adapter cannot be read or was trained on other weights.
pub fn open(adapter: &Artifact, model: &Artifact) -> Result<Adapter, StageError> {
    if is_of_others(Some(&adapter.description.facts), Some(&model.description.facts)) {
        return Err(of_another_model().with_help("give this stage the `model` that the adapter's `train` stage has"));
    }
    check_copies(&adapter.folder, &model.folder)?;
    load(&adapter.folder)
}

/// How far a weight that PEFT stored with an adapter may be from the model's, relatively: it may have been rounded to
/// 16 bits.
const ROUNDED: f32 = 0.01;

/// Makes sure that the weights of the base that PEFT stores with an adapter on an embedding or a head, and puts back
/// when it loads it, are the model's own.
///
/// # Errors
/// Fails where they differ, so that the adapter is of another model; and where one of the two cannot be read.
fn check_copies(adapter: &Path, model: &Path) -> Result<(), StageError> {
    let unreadable = || "cannot compare the adapter's copy of the base with the model".to_owned();
    let Ok(own) = Checkpoint::open_file(&adapter.join(WEIGHTS_FILE)) else { return Ok(()) };
    let copies: Vec<String> =
        own.tensors().map(|(name, _)| name.to_owned()).filter(|name| name.contains(COPY)).collect();
    if copies.is_empty() {
        return Ok(());
    }
    let base = Checkpoint::open(model).or_fail(Cause::BadData, unreadable)?;
    for copy in copies {
        let name = copy.strip_prefix(PREFIX).unwrap_or(&copy).replacen(COPY, ".", 1);
        // A tied head has no tensor of its own.
        let name = if base.info(&name).is_ok() { name } else { EMBEDDING.to_owned() };
        let [ours, theirs] = [(&base, &name), (&own, &copy)].map(|(file, name)| file.tensor_f32(name));
        let (ours, theirs) = (ours.or_fail(Cause::BadData, unreadable)?, theirs.or_fail(Cause::BadData, unreadable)?);
        let is_same = |(ours, theirs): (&f32, &f32)| (ours - theirs).abs() <= ROUNDED * ours.abs() + f32::EPSILON;
        if ours.len() != theirs.len() || !ours.iter().zip(&theirs).all(is_same) {
            let message = format!("the adapter has its own `{name}` of the base, and the model has another one");
            return Err(StageError::bad_data(message).with_help(
                "give the model that it was trained on; if that one was changed before, save it whole and give it here",
            ));
        }
    }
    Ok(())
}

/// That an adapter is used with a model that it was not trained on.
pub fn of_another_model() -> StageError {
    StageError::bad_data("the adapter was trained on another model than the one it is used with")
}

/// Reads an adapter, whatever it was trained on.
///
/// # Errors
/// Fails if it cannot be read or holds a value that is not finite.
pub fn load(folder: &Path) -> Result<Adapter, StageError> {
    let adapter = Adapter::load(folder).or_fail(Cause::BadData, || "cannot read the adapter".to_owned())?;
    match not_finite(&adapter) {
        Some(module) => Err(StageError::bad_data(format!("the adapter has a value that is not finite in `{module}`"))
            .with_help("its training diverged: lower the learning rate and train again")),
        None => Ok(adapter),
    }
}

/// Whether an adapter with these facts was trained on other weights than those of a model; one that does not say was
/// not.
pub fn is_of_others(adapter: Option<&Facts>, model: Option<&Facts>) -> bool {
    adapter.zip(model).and_then(|(adapter, model)| are_same_weights(adapter, model)) == Some(false)
}

/// Whether an adapter with these facts is known to have been trained on the weights of a model.
pub fn is_of(adapter: &Facts, model: &Facts) -> bool {
    are_same_weights(adapter, model) == Some(true)
}

/// `None` where one does not say.
fn are_same_weights(one: &Facts, other: &Facts) -> Option<bool> {
    Some(one.get(WEIGHTS)? == other.get(WEIGHTS)?)
}

/// The identity of the adapter in a draft: it covers neither the name of the base, which a copy of the base has another
/// of, nor the model card. It covers the format of the base where that was quantised: what is computed with the adapter
/// depends on it.
///
/// # Errors
/// Fails if a file cannot be read.
pub fn identity(config: AdapterConfig, quantize: Option<&Json>, draft: &mut Draft) -> Result<Digest, StageError> {
    let mut config = config.without_base_name().to_json();
    config.extend(quantize.map(Json::to_string));
    draft.digest(&draft.folder.join(WEIGHTS_FILE))?;
    Ok(draft.tree()?.without(CARD_FILE).with_content(CONFIG_FILE, config.as_bytes()).identity())
}

/// The problem that it is used with this model.
pub fn problem(adapter: &Reference, model: &Reference, span: Span) -> Problem {
    let message = format!("the adapter `{}` was trained on another model than `{}`", adapter.stage, model.stage);
    Problem::error("wrong-input", span, message, "they meet in this stage")
        .with_help("give this stage the `model` that the adapter's `train` stage has")
}

/// The first module with a value that is not finite, which would make every answer and every loss NaN.
fn not_finite(adapter: &Adapter) -> Option<&str> {
    let is_bad = |values: &[f32]| values.iter().any(|value| !value.is_finite());
    let modules = adapter.modules.iter().filter(|(_, module)| {
        let magnitude = module.magnitude.as_deref().unwrap_or_default();
        is_bad(&module.lora_a) || is_bad(&module.lora_b) || is_bad(magnitude)
    });
    let saved = adapter.saved_tensors.iter().chain(&adapter.token_rows).filter(|(_, tensor)| is_bad(&tensor.values));
    modules.map(|(name, _)| name).chain(saved.map(|(name, _)| name)).next().map(String::as_str)
}

#[cfg(test)]
mod tests {
    use model::checkpoint::{CheckpointWriter, Dtype, TensorSpec};

    use super::*;

    fn write(file: &Path, name: &str, values: &[f32]) {
        let spec = TensorSpec { name: name.to_owned(), dtype: Dtype::F32, shape: vec![2, values.len() / 2] };
        let mut writer = CheckpointWriter::create_file(file, vec![spec]).unwrap();
        writer.write_f32(name, values).unwrap();
        writer.finish().unwrap();
    }

    #[test]
    fn a_weight_of_the_base_that_lies_with_an_adapter_is_the_models() {
        let folder = tempfile::tempdir().unwrap();
        let (adapter, model) = (folder.path().join("adapter"), folder.path().join("model"));
        for folder in [&adapter, &model] {
            std::fs::create_dir(folder).unwrap();
        }
        let copy = "base_model.model.lm_head.base_layer.weight";
        for name in ["lm_head.weight", EMBEDDING] {
            write(&model.join("model.safetensors"), name, &[1.0, -2.0, 0.0, 4.0]);
            // As it is, and rounded to 16 bits.
            for sound in [[1.0, -2.0, 0.0, 4.0], [1.001, -2.002, 0.0, 4.003]] {
                write(&adapter.join(WEIGHTS_FILE), copy, &sound);
                assert!(check_copies(&adapter, &model).is_ok(), "{name}: {sound:?}");
            }
            write(&adapter.join(WEIGHTS_FILE), copy, &[1.0, -2.0, 0.5, 4.0]);
            let error = check_copies(&adapter, &model).unwrap_err();
            assert!(error.message.contains(name), "{}", error.message);
        }
    }
}
