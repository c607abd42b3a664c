//! What training leaves: a PEFT folder or a checkpoint, and the figures of every step.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use engine::artifact::Facts;
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::parameter::Json;
use model::checkpoint::{Checkpoint, CheckpointWriter, DEFAULT_MAX_SHARD_BYTES, Flush, TensorSpec};
use model::peft::{Adapter, AdapterConfig, CARD_FILE, model_card};

use crate::compute::aware::{self, AwareParams, Scales};
use crate::compute::checkpoint::SAVED_TEMPLATE;
use crate::compute::quantize::QUANTIZE;
use crate::compute::{adapter, checkpoint};
use crate::data::artifact::TokensReader;
use crate::data::generation_config;
use crate::data::prompt::PROMPT;

/// Writes the adapter in PEFT's form, with the values in these files; it belongs to the very weights it was trained on.
pub(super) fn adapter(
    mut config: AdapterConfig,
    values: &[PathBuf],
    facts: &Facts,
    base: &Artifact,
    rows: &TokensReader,
    quantize: Option<Json>,
    context: &mut StageContext,
) -> Result<(), StageError> {
    if let Some((name, revision)) = base_name(&base.description.facts) {
        config.name_base(name, revision);
    }
    let mut draft = context.create("adapter")?;
    let written = (|| -> Result<(), Failed> {
        fs::write(draft.folder.join(CARD_FILE), model_card(&config))?;
        let mut tensors = Vec::new();
        for file in values {
            let file = Checkpoint::open_file(file)?;
            for (name, info) in file.tensors() {
                tensors.push((name.to_owned(), info.shape.clone(), file.tensor_f32(name)?));
            }
        }
        Adapter::from_tensors(config.clone(), tensors)?.save(&draft.folder)?;
        Ok(())
    })();
    written.or_fail(Cause::Machine, || "cannot write the adapter".to_owned())?;
    let prompt = prompt_facts(rows);
    checkpoint::save_chat_template(&draft.folder, prompt.get(PROMPT))?;
    let trained_on = base.description.facts.get(checkpoint::WEIGHTS).cloned();
    let trained_on = trained_on.map(|weights| (checkpoint::WEIGHTS.to_owned(), weights));
    let facts = facts.clone().into_iter().chain(trained_on).chain(prompt);
    let facts = facts.chain(quantize.clone().map(|fact| (QUANTIZE.to_owned(), fact))).collect();
    let identity = adapter::identity(config, quantize.as_ref(), &mut draft)?;
    context.seal(draft, facts, Some(identity))
}

/// What others find a model by, as PEFT writes it down: its name on a hub and its commit, or its folder. A model that a
/// stage made has neither.
fn base_name(facts: &Facts) -> Option<(String, Option<String>)> {
    let text = |name: &str| facts.get(name).and_then(|value| value.as_str()).map(str::to_owned);
    let repo = text(checkpoint::REPO).map(|repo| match repo.split_once(':') {
        Some((_, name)) => name.to_owned(),
        None => repo,
    });
    match repo {
        Some(repo) => Some((repo, text(checkpoint::REVISION))),
        None => Some((text(checkpoint::FOLDER)?, None)),
    }
}

/// How the prompts of the rows were made, so that inference with the trained model makes them in the same way.
pub(super) fn prompt_facts(rows: &TokensReader) -> Facts {
    rows.facts().to_facts().into_iter().filter(|(name, _)| name == PROMPT).collect()
}

/// Whatever went wrong while weights were read or written.
type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Writes the weights in these files in the dtypes of the base, with its other files; `prompt_facts` are facts of the
/// data. One tensor is in memory at a time. Weights that were trained for few bits are written as they were computed
/// with, and their scales beside them.
pub(super) fn model(
    values: &[PathBuf],
    base: &Path,
    prompt_facts: Facts,
    aware: Option<&AwareParams>,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let mut draft = context.create("model")?;
    let mut scales = Scales::new();
    let layers = aware.map(AwareParams::layers);
    let written = (|| -> Result<(), Failed> {
        let files: Vec<Checkpoint> = values.iter().map(|file| Checkpoint::open_file(file)).collect::<Result<_, _>>()?;
        let trained: BTreeMap<&str, &Checkpoint> =
            files.iter().flat_map(|file| file.names().map(move |name| (name, file))).collect();
        let original = Checkpoint::open(base)?;
        if let Some(name) = trained.keys().find(|name| !original.contains(name)) {
            return Err(format!("the model's files have no tensor `{name}`, which was trained").into());
        }
        // A file may hold the head of a tied model once more: a copy that the training left behind would contradict it.
        let kept = || original.tensors().filter(|(name, _)| *name != "lm_head.weight" || trained.contains_key(name));
        let specs = kept().map(|(name, info)| TensorSpec::new(name, info.dtype, &info.shape)).collect();
        let mut writer = CheckpointWriter::create(&draft.folder, specs, DEFAULT_MAX_SHARD_BYTES)?;
        for (name, info) in kept() {
            match trained.get(name) {
                Some(file) => {
                    let mut values = file.tensor_f32_of_shape(name, &info.shape)?;
                    if let Some(layers) = layers.as_ref().filter(|layers| layers.covers(name) && info.shape.len() == 2)
                    {
                        let grids: Vec<f32> = layers.of_weights().grids(&values).map(|grid| grid.scale).collect();
                        scales.push((name.to_owned(), [info.shape[0], grids.len() / info.shape[0]], grids));
                        layers.of_weights().forward(&mut values);
                    }
                    writer.write_f32(name, &values)?;
                }
                None => {
                    let take = |(): &mut (), first: usize, piece: &mut [u8]| -> Result<(), Failed> {
                        Ok(original.read_bytes(name, first, piece)?)
                    };
                    writer.write_pieces(name, 1, take)?;
                }
            }
        }
        // The store flushes what it takes in.
        writer.finish_with(Flush::Later)?;
        Ok(())
    })();
    written.or_fail(Cause::Machine, || "cannot write the model".to_owned())?;
    checkpoint::copy(&base.join("config.json"), &draft.folder.join("config.json"))?;
    checkpoint::carry_along(base, &draft.folder)?;
    let is_saved = checkpoint::save_chat_template(&draft.folder, prompt_facts.get(PROMPT))?;
    generation_config::end_at_turns(&draft.folder, |warning| context.warn(warning))?;
    if aware.is_some() {
        aware::write_scales(&scales, &draft)?;
    }
    let mut facts = checkpoint::facts(&mut draft)?;
    facts.extend(prompt_facts);
    facts.extend(is_saved.then(|| (SAVED_TEMPLATE.to_owned(), true.into())));
    if let Some(aware) = aware {
        facts.insert(QUANTIZE.to_owned(), aware.fact());
    }
    context.seal(draft, facts, None)
}

/// Writes the figures: one line per step, and a summary. They hold no times and no rates.
pub(super) fn metrics(lines: &str, facts: Facts, context: &mut StageContext) -> Result<(), StageError> {
    let draft = context.create("metrics")?;
    let summary = format!("{:#}\n", serde_json::Value::Object(facts.clone()));
    for (name, text) in [("metrics.jsonl", lines), ("metrics.json", summary.as_str())] {
        fs::write(draft.folder.join(name), text).or_fail(Cause::Machine, || format!("cannot write `{name}`"))?;
    }
    context.seal(draft, facts, None)
}
