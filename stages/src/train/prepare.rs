//! The model of a run, loaded and ready to be trained.

use std::sync::Arc;

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::blocks::Blocks;
use model::decoder::Decoder;
use model::parameter::Keep;
use model::peft::AdapterConfig;
use model::trainer::{TrainOptions, Trained, Trainer};

use super::failure;
use super::parameters::{Method, TrainParams};
use crate::adapter;

/// The trainer of a run, and the settings of its adapter where one is trained.
pub(super) fn trainer<B: Blocks>(
    params: &TrainParams,
    ops: Arc<B>,
    base: &Artifact,
    context: &mut StageContext,
) -> Result<(Trainer<B>, Option<AdapterConfig>), StageError> {
    let keep = match params.trained() {
        Trained::Adapter => Keep::Frozen,
        Trained::Weights => Keep::Trainable,
    };
    let decoder = Decoder::load(ops, &base.folder, keep);
    let mut decoder = decoder.or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
    let settings = match (params.method, &params.adapter) {
        (Method::Full, _) => None,
        (Method::Lora, None) => Some(fresh(params, &mut decoder, context)?),
        (Method::Lora, Some(input)) => {
            let existing = context.open(input)?;
            Some(warm(params, &mut decoder, base, &existing)?)
        }
    };
    let options = TrainOptions {
        max_grad_norm: params.clip_grad_norm,
        loss_scaling: params.loss_scale.as_ref().map(|scale| scale.value.options()),
        recompute: params.recompute(),
        seed: params.seed,
        ..TrainOptions::new(params.trained(), params.optimizer.optimizer)
    };
    let trainer = Trainer::new(decoder, options).map_err(|error| failure::of_rows(error, &[]))?;
    Ok((trainer, settings))
}

/// Attaches an adapter that changes nothing yet.
fn fresh<B: Blocks>(
    params: &TrainParams,
    decoder: &mut Decoder<B>,
    context: &mut StageContext,
) -> Result<AdapterConfig, StageError> {
    let settings = params.lora.value.settings(decoder.config());
    let (settings, notes) = settings.or_fail(Cause::BadParameters, || "cannot make the adapter".to_owned())?;
    notes.into_iter().for_each(|note| context.warn(note));
    let fresh = decoder.fresh_adapter(&settings, params.seed);
    let fresh = fresh.or_fail(Cause::BadParameters, || "cannot make the adapter".to_owned())?;
    decoder.attach(&fresh).or_fail(Cause::BadParameters, || "cannot attach the adapter".to_owned())?;
    Ok(settings)
}

/// Attaches an adapter that was trained before; what the file says of it must hold.
fn warm<B: Blocks>(
    params: &TrainParams,
    decoder: &mut Decoder<B>,
    base: &Artifact,
    existing: &Artifact,
) -> Result<AdapterConfig, StageError> {
    let mut existing = adapter::open(existing, base)?;
    let contradiction = params.lora.contradiction(&existing.config, decoder.config());
    let unusable = || "cannot go on from the adapter".to_owned();
    if let Some((key, file, adapters)) = contradiction.or_fail(Cause::BadParameters, unusable)? {
        let message = format!("`lora.{key}` is {file}, and the adapter to go on from has {adapters}");
        return Err(StageError::new(Cause::BadParameters, message)
            .with_help("leave it out: the settings of an existing adapter are its own, but for `dropout`"));
    }
    if params.lora.key("dropout").is_some() {
        existing.config.dropout = params.lora.value.dropout;
    }
    decoder.attach(&existing).or_fail(Cause::BadData, || "cannot attach the adapter".to_owned())?;
    Ok(existing.config)
}
