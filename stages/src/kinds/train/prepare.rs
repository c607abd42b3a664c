//! The model of a run, loaded and ready to be trained.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::blocks::Blocks;
use model::checkpoint::Checkpoint;
use model::config::Architecture;
use model::decoder::Decoder;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig, CONFIG_FILE, Modules};
use model::trainer::{TrainOptions, Trained, Trainer};

use super::parameters::{LEAVE_IT_OUT, Method, Train, contradicts};
use super::{failure, fit};
use crate::compute::adapter;
use crate::compute::checkpoint::{self, QUANTIZATION};
use crate::compute::quantize::TrainQuantize;

/// The trainer of a run, and the settings of its adapter where one is trained.
pub(super) fn trainer<B: Blocks>(
    params: &Train,
    ops: Arc<B>,
    base: &Artifact,
    context: &mut StageContext,
) -> Result<(Trainer<B>, Option<AdapterConfig>), StageError> {
    let keep = match params.trained() {
        Trained::Adapter => Trainability::Frozen,
        Trained::Weights => Trainability::Trainable,
    };
    if keep == Trainability::Trainable && checkpoint::config(&base.folder)?.contains_key(QUANTIZATION) {
        let message = "the model's weights are stored quantised, and `method: full` trains every weight";
        return Err(StageError::new(Cause::BadParameters, message)
            .with_help("set `method: lora`, or start from the model before it was quantised"));
    }
    let decoder = match (&params.quantize, keep) {
        (Some(TrainQuantize::Base(quantize)), _) => Decoder::load_quantized(ops, &base.folder, &quantize.base()),
        (Some(TrainQuantize::Aware(aware)), Trainability::Frozen) => {
            Decoder::load_fake_quantized(ops, &base.folder, &aware.layers())
        }
        (Some(TrainQuantize::Aware(_)) | None, _) => Decoder::load(ops, &base.folder, keep),
    };
    let mut decoder = decoder.or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
    let settings = match (params.method, &params.adapter) {
        (Method::Full, _) => None,
        (Method::Lora, None) => Some(fresh(params, &mut decoder, base, context)?),
        (Method::Lora, Some(input)) => Some(warm(params, &mut decoder, base, &context.open(input)?, context)?),
    };
    let options = TrainOptions {
        max_grad_norm: params.clip_grad_norm,
        loss_scaling: params.loss_scale.map(|scale| scale.options()),
        recompute: params.recompute(),
        seed: params.seed,
        embedding_noise: params.embedding_noise(),
        lora_learning_rate_ratio: params.lora.value.learning_rate_ratio,
        ..TrainOptions::new(params.trained(), params.optimizer.optimizer())
    };
    let ops = Arc::clone(decoder.ops());
    let trainer = Trainer::new(decoder, options).map_err(|error| failure::of_rows(error, &[]))?;
    let trainer = match params.quantize.as_ref().and_then(TrainQuantize::aware) {
        Some(aware) => trainer
            .with_fake_quantization(aware.layers(), aware.after_steps)
            .map_err(|error| failure::of_rows(error, &[]))?,
        None => trainer,
    };
    let teacher = match params.loss.teacher() {
        Some(input) => Some(teacher(ops, base, &context.open(input)?)?),
        None => None,
    };
    let trainer = trainer.with_loss(params.loss.token_loss(), teacher);
    Ok((trainer.map_err(|error| failure::of_rows(error, &[]))?, settings))
}

/// The model that is learned from, frozen. Its tokens must be those of the student.
fn teacher<B: Blocks>(ops: Arc<B>, student: &Artifact, teacher: &Artifact) -> Result<Decoder<B>, StageError> {
    fit::same_tokens(student, teacher)?;
    Decoder::load(ops, &teacher.folder, Trainability::Frozen)
        .or_fail(Cause::BadData, || "cannot load the teacher".to_owned())
}

/// Attaches an adapter that changes nothing yet.
fn fresh<B: Blocks>(
    params: &Train,
    decoder: &mut Decoder<B>,
    base: &Artifact,
    context: &mut StageContext,
) -> Result<AdapterConfig, StageError> {
    let settings = settings(params, &Modules::from(decoder.config()), base, context)?;
    let fresh = decoder.fresh_adapter(&settings, params.seed);
    let fresh = fresh.or_fail(Cause::BadParameters, cannot_make)?;
    decoder.attach(&fresh).or_fail(Cause::BadParameters, || "cannot attach the adapter".to_owned())?;
    Ok(settings)
}

/// Attaches an adapter that was trained before.
fn warm<B: Blocks>(
    params: &Train,
    decoder: &mut Decoder<B>,
    base: &Artifact,
    existing: &Artifact,
    context: &mut StageContext,
) -> Result<AdapterConfig, StageError> {
    let existing = trained_before(params, &Modules::from(decoder.config()), base, existing, context)?;
    decoder.attach(&existing).or_fail(Cause::BadData, || "cannot attach the adapter".to_owned())?;
    Ok(existing.config)
}

/// Writes the values that an adapter is trained from into a folder, without loading the model, for a worker that reads
/// them there.
pub(super) fn first_values(
    params: &Train,
    architecture: &Architecture,
    base: &Artifact,
    folder: &Path,
    context: &mut StageContext,
) -> Result<AdapterConfig, StageError> {
    let files = Checkpoint::open(&base.folder).or_fail(Cause::BadData, || "cannot read the model".to_owned())?;
    // DoRA's magnitudes begin as those of the weights that the adapter is on.
    let files = match params.quantize.as_ref().and_then(TrainQuantize::base) {
        Some(quantize) => files.quantizing(quantize.base()),
        None => files,
    };
    let model = &match architecture {
        Architecture::Native(config) => Modules::from(&**config),
        Architecture::Transformers(outline) => Modules::of_checkpoint(&files, outline),
    };
    let (adapter, settings) = match &params.adapter {
        None => {
            let settings = settings(params, model, base, context)?;
            if let (Architecture::Transformers(outline), Some(_)) = (architecture, &params.quantize)
                && settings.use_dora
            {
                let message = format!("DoRA on a quantised base is not supported for `{}`", outline.model_type);
                let help = "leave `lora.use_dora` out, or `quantize`";
                return Err(StageError::new(Cause::BadParameters, message).with_help(help));
            }
            let adapter = Adapter::fresh(model, &files, &settings, params.seed);
            let adapter = adapter.or_fail(Cause::BadParameters, cannot_make)?;
            (adapter, settings)
        }
        Some(input) => {
            let adapter = trained_before(params, model, base, &context.open(input)?, context)?;
            let settings = adapter.config.clone();
            (adapter, settings)
        }
    };
    let failed = || "cannot write the adapter's first values".to_owned();
    fs::create_dir_all(folder).or_fail(Cause::Machine, failed)?;
    adapter.save(folder).or_fail(Cause::Machine, failed)?;
    Ok(settings)
}

/// The settings of a fresh adapter.
fn settings(
    params: &Train,
    model: &Modules,
    base: &Artifact,
    context: &mut StageContext,
) -> Result<AdapterConfig, StageError> {
    let settings = params.lora.value.settings_on(model, &base.description.facts);
    let (settings, notes) = settings.or_fail(Cause::BadParameters, cannot_make)?;
    notes.into_iter().for_each(|note| context.warn(note));
    Ok(settings)
}

/// An adapter that was trained before; what the file says of it must hold.
fn trained_before(
    params: &Train,
    model: &Modules,
    base: &Artifact,
    existing: &Artifact,
    context: &mut StageContext,
) -> Result<Adapter, StageError> {
    let folder = &existing.folder;
    let mut existing = adapter::open(existing, base)?;
    let contradiction = params.lora.contradiction(&existing.config, model);
    let unusable = || "cannot start from the adapter".to_owned();
    if let Some((key, file, adapters)) = contradiction.or_fail(Cause::BadParameters, unusable)? {
        let message = contradicts(&key, &file, &adapters);
        return Err(StageError::new(Cause::BadParameters, message).with_help(LEAVE_IT_OUT));
    }
    if params.lora.has("dropout") {
        existing.config.dropout = params.lora.value.dropout;
    }
    let written = AdapterConfig::read(&folder.join(CONFIG_FILE)).or_fail(Cause::BadData, unusable)?;
    if let Some(warning) = beside_settings(&existing, &written) {
        context.warn(warning);
    }
    Ok(existing)
}

/// What is trained although an adapter's settings, as written, do not say so: what PEFT saved with it
/// (`save_embedding_layers`) and is not the model's.
fn beside_settings(existing: &Adapter, written: &AdapterConfig) -> Option<String> {
    let names = existing.saved_tensors.keys().filter(|tensor| !written.is_saved(tensor));
    let names: Vec<String> = names.map(|tensor| format!("`{tensor}`")).collect();
    let message = "of the adapter differ from the model's and are trained as a whole, as `modules_to_save`; PEFT would \
                   keep them frozen";
    (!names.is_empty()).then(|| format!("{} {message}", names.join(", ")))
}

fn cannot_make() -> String {
    "cannot make the adapter".to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use model::peft::SavedTensor;

    use super::*;

    #[test]
    fn tables_that_the_settings_do_not_name_are_reported() {
        let mut written = AdapterConfig::new(1, 1.0, vec!["q_proj".to_owned()]);
        written.modules_to_save = vec!["lm_head".to_owned()];
        let mut config = written.clone();
        config.modules_to_save.push("model.embed_tokens".to_owned());
        let tensor = SavedTensor { shape: vec![1, 1], values: vec![0.5] };
        let tables = ["lm_head.weight", "model.embed_tokens.weight"].map(|name| (name.to_owned(), tensor.clone()));
        let saved_tensors = BTreeMap::from(tables);
        let mut adapter = Adapter { config, modules: BTreeMap::new(), saved_tensors, token_rows: BTreeMap::new() };
        let warning = beside_settings(&adapter, &written).unwrap();
        assert!(warning.starts_with("`model.embed_tokens.weight` of the adapter differ from"), "{warning}");
        adapter.saved_tensors.remove("model.embed_tokens.weight");
        assert_eq!(beside_settings(&adapter, &written), None);
    }
}
