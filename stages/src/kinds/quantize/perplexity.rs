//! The perplexity of rows by a model as it is stored, that in 8 bits of bitsandbytes included: weights alone are
//! quantised here, and activations are not.

use std::path::Path;
use std::sync::Arc;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::parameter::Input;
use model::batch::{Batch, TargetScope};
use model::checkpoint::{Checkpoint, CheckpointError, Dtype};
use model::config::Config;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::ops::Compute;
use model::parameter::Trainability;

use crate::compute::checkpoint::{self, QUANTIZATION};
use crate::compute::kernels;
use crate::data::artifact::{TokensOrPacks, TokensReader};

/// That of all targets of the rows, computed in f32.
pub(super) fn of(model: &Path, data: &Input<TokensOrPacks>, context: &mut StageContext) -> Result<f64, StageError> {
    let kernels = Arc::new(kernels::cpu_on(context.threads(), Compute::F32, context)?);
    let mut decoder = load(kernels, model)?;
    let data = context.open(data)?;
    let mut rows = TokensReader::open(&data)?;
    let (total, mut log_prob, mut targets) = (rows.len(), 0.0f64, 0u64);
    for row in 0..total {
        context.stop_if_cancelled()?;
        let mut batch = Batch::default();
        batch.push(row, &rows.row(row)?);
        if batch.tokens() > 0 {
            let scores = decoder.score_documents(&batch, TargetScope::Response);
            let scores = scores.or_fail(Cause::BadData, || format!("cannot score row {}", row + 1))?;
            for (_, score) in scores {
                log_prob += score.response_log_prob;
                targets += score.response_targets as u64;
            }
        }
        context.progress("rows", row + 1, Some(total), Some("perplexity".to_owned()));
    }
    let perplexity = (-log_prob / targets.max(1) as f64).exp();
    match perplexity.is_finite() {
        true => Ok(perplexity),
        false => Err(StageError::new(Cause::Numeric, format!("the perplexity of the rows is {perplexity}"))),
    }
}

fn load(kernels: Arc<Cpu>, folder: &Path) -> Result<Decoder<Cpu>, StageError> {
    let config = checkpoint::config(folder)?;
    let is_int8 = config.get(QUANTIZATION).is_some_and(|settings| settings["load_in_8bit"] == true);
    let loaded = match is_int8 {
        false => Decoder::load(kernels, folder, Trainability::Frozen),
        true => {
            let mut config = config;
            config.remove(QUANTIZATION);
            let config = Config::from_json(&serde_json::Value::Object(config).to_string());
            let config = config.or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
            let files = Checkpoint::open(folder).or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
            Decoder::build(kernels, config, Trainability::Frozen, |name, shape| int8(&files, name, shape))
        }
    };
    loaded.or_fail(Cause::BadData, || "cannot load the model".to_owned())
}

/// The values of a tensor, which may be in 8 bits.
fn int8(files: &Checkpoint, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
    if files.dtype(name)? != Dtype::I8 {
        return files.tensor_f32_of_shape(name, shape);
    }
    files.expect_shape(name, shape)?;
    let scales = files.tensor_f32(&format!("{}.SCB", name.trim_end_matches(".weight")))?;
    let rows = files.bytes(name)?.chunks_exact(shape[1]).zip(&scales);
    let values = rows.flat_map(|(row, scale)| row.iter().map(move |x| f32::from(x.cast_signed()) * scale / 127.0));
    Ok(values.collect())
}
