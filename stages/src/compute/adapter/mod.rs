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
use model::checkpoint::{Checkpoint, CheckpointError, encode_float};
use model::peft::targets::vocabulary_hint;
use model::peft::{Adapter, AdapterConfig, CARD_FILE, CONFIG_FILE, PREFIX, WEIGHTS_FILE, saved_tensor_name};

use crate::compute::checkpoint::WEIGHTS;

/// What PEFT puts into the name of a tensor of the base.
const COPY: &str = ".base_layer.";
/// What it puts there if rows of the tensor are trained.
const OF_TOKENS: &str = ".token_adapter.";

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
    load_onto(&adapter.folder, &model.folder)
}

/// Reads an adapter without the embedding and the head that PEFT saved with it (`save_embedding_layers`) where these
/// are the model's own. Others take the place of the model's, as in PEFT.
fn load_onto(folder: &Path, model: &Path) -> Result<Adapter, StageError> {
    let unreadable = || "cannot compare the adapter's embedding with the model's".to_owned();
    let mut adapter = load(folder)?;
    let written = AdapterConfig::read(&folder.join(CONFIG_FILE)).or_fail(Cause::BadData, unreadable)?;
    let tables: Vec<String> =
        adapter.saved_tensors.keys().filter(|tensor| !written.is_saved(tensor)).cloned().collect();
    if tables.is_empty() {
        return Ok(adapter);
    }
    let own = Checkpoint::open_file(&folder.join(WEIGHTS_FILE)).or_fail(Cause::BadData, unreadable)?;
    let base = Checkpoint::open(model).or_fail(Cause::BadData, unreadable)?;
    for table in tables {
        if is_copy(&own, &saved_tensor_name(&table), &base, &place(&base, &table))
            .or_fail(Cause::BadData, unreadable)?
        {
            adapter.saved_tensors.remove(&table);
            adapter.config.modules_to_save.retain(|module| format!("{module}.weight") != table);
        }
    }
    Ok(adapter)
}

/// Whether a tensor of an adapter is the one of the base, in the type that it is stored in.
fn is_copy(own: &Checkpoint, name: &str, base: &Checkpoint, place: &str) -> Result<bool, CheckpointError> {
    let info = own.info(name)?;
    if !base.contains(place) || base.shape(place)? != info.shape {
        return Ok(false);
    }
    let mut expected = vec![0; info.size_bytes()];
    Ok(encode_float(info.dtype, &base.tensor_f32(place)?, &mut expected) && own.bytes(name)? == expected)
}

/// Where a tensor of the base is: a tied head has none of its own.
fn place(base: &Checkpoint, tensor: &str) -> String {
    if base.contains(tensor) { tensor.to_owned() } else { EMBEDDING.to_owned() }
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
        let name = copy.strip_prefix(PREFIX).unwrap_or(&copy).replacen(COPY, ".", 1).replacen(OF_TOKENS, ".", 1);
        let name = place(&base, &name);
        let [ours, theirs] = [(&base, &name), (&own, &copy)].map(|(file, name)| file.tensor_f32(name));
        let (ours, theirs) = (ours.or_fail(Cause::BadData, unreadable)?, theirs.or_fail(Cause::BadData, unreadable)?);
        let is_same = |(ours, theirs): (&f32, &f32)| (ours - theirs).abs() <= ROUNDED * ours.abs() + f32::EPSILON;
        if ours.len() != theirs.len() || !ours.iter().zip(&theirs).all(is_same) {
            let [of_adapter, of_model] = [own.shape(&copy), base.shape(&name)].map(Result::unwrap_or_default);
            let hint = vocabulary_hint(&name, of_adapter, of_model);
            let message = format!("the adapter has its own `{name}` of the base, and the model has another one{hint}");
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

    const HEAD: &str = "lm_head.weight";

    /// A tensor of a file: name, shape, type, values.
    type Stored<'a> = (&'a str, [usize; 2], Dtype, &'a [f32]);

    fn write(file: &Path, name: &str, values: &[f32]) {
        write_shaped(file, &[(name, [2, values.len() / 2], Dtype::F32, values)]);
    }

    fn write_shaped(file: &Path, tensors: &[Stored<'_>]) {
        let specs = tensors.iter().map(|(name, shape, dtype, _)| TensorSpec::new(*name, *dtype, shape)).collect();
        let mut writer = CheckpointWriter::create_file(file, specs).unwrap();
        for (name, _, _, values) in tensors {
            writer.write_f32(name, values).unwrap();
        }
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

    #[test]
    fn a_copy_of_rows_that_are_trained_is_the_models_and_a_larger_one_tells_the_vocabulary() {
        let folder = tempfile::tempdir().unwrap();
        let (adapter, model) = (folder.path().join("adapter"), folder.path().join("model"));
        for folder in [&adapter, &model] {
            std::fs::create_dir(folder).unwrap();
        }
        let copy = "base_model.model.lm_head.token_adapter.base_layer.weight";
        write(&model.join("model.safetensors"), "lm_head.weight", &[1.0, -2.0, 0.0, 4.0]);
        write(&adapter.join(WEIGHTS_FILE), copy, &[1.0, -2.0, 0.0, 4.0]);
        assert!(check_copies(&adapter, &model).is_ok());
        write_shaped(&adapter.join(WEIGHTS_FILE), &[(copy, [3, 2], Dtype::F32, &[1.0; 6][..])]);
        let message = check_copies(&adapter, &model).unwrap_err().message;
        assert!(message.contains("of 3 tokens and the model has 2") && message.contains("`add_tokens`"), "{message}");
    }

    #[test]
    fn an_embedding_that_peft_saved_is_left_out_where_it_is_the_models() {
        let folder = tempfile::tempdir().unwrap();
        let (adapter, model) = (folder.path().join("adapter"), folder.path().join("model"));
        for folder in [&adapter, &model] {
            std::fs::create_dir(folder).unwrap();
        }
        let [own, other]: [[f32; 4]; 2] = [[1.001, -2.002, 0.0, 4.003], [1.0, -2.0, 0.5, 4.0]];
        let config = AdapterConfig::new(1, 1.0, vec!["q_proj".to_owned()]);
        // Tied, and with a head of its own.
        for tensors in [&[EMBEDDING][..], &[EMBEDDING, HEAD]] {
            let tensors: Vec<Stored<'_>> = tensors.iter().map(|name| (*name, [2, 2], Dtype::F32, &own[..])).collect();
            write_shaped(&model.join("model.safetensors"), &tensors);
            for dtype in [Dtype::F32, Dtype::BF16] {
                for (head, is_kept) in [(own, false), (other, true)] {
                    let [embedding_name, head_name] = [EMBEDDING, HEAD].map(saved_tensor_name);
                    let tensors = [
                        (embedding_name.as_str(), [2, 2], dtype, &own[..]),
                        (head_name.as_str(), [2, 2], dtype, &head[..]),
                    ];
                    write_shaped(&adapter.join(WEIGHTS_FILE), &tensors);
                    std::fs::write(adapter.join(CONFIG_FILE), config.to_json()).unwrap();
                    let loaded = load_onto(&adapter, &model).unwrap();
                    assert_eq!(loaded.saved_tensors.len(), usize::from(is_kept));
                    assert_eq!(loaded.saved_tensors.contains_key(HEAD), is_kept);
                    assert_eq!(loaded.config.modules_to_save.len(), usize::from(is_kept));
                }
            }
        }
        // What the settings name was trained, and stays even where it is as it was.
        let modules_to_save = vec!["lm_head".to_owned(), "embed_tokens".to_owned()];
        let saving = AdapterConfig { modules_to_save, ..config };
        std::fs::write(adapter.join(CONFIG_FILE), saving.to_json()).unwrap();
        assert_eq!(load_onto(&adapter, &model).unwrap().saved_tensors.len(), 2);
    }
}
