//! A Model artefact as a folder in the Hub's form: its facts, and the files that go along with its weights.

use std::fs;
use std::path::Path;

use cache::{Digest, Hasher};
use engine::artifact::Facts;
use engine::context::Draft;
use engine::error::{Cause, OrFail, StageError};
use serde_json::Value;

use crate::artifact::TOKENIZER_FILES;

/// Files that a model derived from another takes over from it, besides the tokenizer's.
const CARRIED_FILES: &[&str] = &["generation_config.json"];

/// Fields of `config.json` that are facts of the artefact.
const FACTS: &[&str] = &[
    "model_type",
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
];

/// The content of a model folder's `config.json`.
///
/// # Errors
/// Fails if the file is missing or is no JSON object.
pub fn config(folder: &Path) -> Result<serde_json::Map<String, Value>, StageError> {
    let path = folder.join("config.json");
    let text = fs::read(&path).or_fail(Cause::BadData, || "the model has no `config.json`".to_owned())?;
    serde_json::from_slice(&text)
        .or_fail(Cause::BadData, || "the model's `config.json` is not a JSON object".to_owned())
}

/// The fact of a model that is its `config.json`.
pub const CONFIG: &str = "config";

/// The fact of a model from the Hub that is its name there.
pub const REPO: &str = "repo";

/// The fact of a model, and of an adapter trained on it, that says which weights they are: a digest of the safetensors files.
pub const WEIGHTS: &str = "weights";

/// What later stages may want to know of a model in a draft, whose weights are all written: its architecture, its sizes, its number type, and which weights it has.
///
/// # Errors
/// As [`config`], and if a weights file cannot be read.
pub fn facts(draft: &mut Draft) -> Result<Facts, StageError> {
    let mut facts = facts_of_config(config(&draft.folder)?);
    facts.insert(WEIGHTS.to_owned(), weights(draft)?.to_string().into());
    Ok(facts)
}

/// The facts that follow from a `config.json` alone.
pub fn facts_of_config(config: serde_json::Map<String, Value>) -> Facts {
    let mut facts = Facts::new();
    if let Some(architecture) = config.get("architectures").and_then(|names| names.get(0)) {
        facts.insert("architecture".to_owned(), architecture.clone());
    }
    for name in FACTS {
        if let Some(value) = config.get(*name) {
            facts.insert((*name).to_owned(), value.clone());
        }
    }
    if let Some(dtype) = config.get("torch_dtype").or_else(|| config.get("dtype")) {
        facts.insert("dtype".to_owned(), dtype.clone());
    }
    facts.insert(CONFIG.to_owned(), Value::Object(config));
    facts
}

/// The names of [`facts_of_config`], which a model keeps that is made from another.
pub fn config_facts() -> impl Iterator<Item = &'static str> {
    FACTS.iter().copied().chain(["architecture", "dtype", CONFIG])
}

/// A digest of the names and contents of a model's safetensors files: equal for a copy without its tokenizer.
fn weights(draft: &mut Draft) -> Result<Digest, StageError> {
    let folder = draft.folder.clone();
    let unreadable = || format!("cannot read `{}`", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).or_fail(Cause::Machine, unreadable)? {
        let path = entry.or_fail(Cause::Machine, unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    let mut hasher = Hasher::new();
    for path in files {
        let digest = draft.digest(&path)?;
        hasher.value(path.file_name().unwrap_or_default().as_encoded_bytes()).value(digest.as_bytes());
    }
    Ok(hasher.finish())
}

/// Copies what goes along with the weights (tokenizer, generation settings) from one model folder to another, as far as
/// it is there.
///
/// # Errors
/// Fails if the disk refuses.
pub fn carry_along(from: &Path, to: &Path) -> Result<(), StageError> {
    for name in TOKENIZER_FILES.iter().chain(CARRIED_FILES) {
        if from.join(name).exists() {
            copy(&from.join(name), &to.join(name))?;
        }
    }
    Ok(())
}

/// Copies one file's content, not its permissions: what comes from the store is read-only.
///
/// # Errors
/// Fails if the disk refuses.
pub fn copy(from: &Path, to: &Path) -> Result<(), StageError> {
    let mut source = fs::File::open(from).or_fail(Cause::Machine, || format!("cannot read `{}`", from.display()))?;
    let mut target = fs::File::create(to).or_fail(Cause::Machine, || format!("cannot write `{}`", to.display()))?;
    std::io::copy(&mut source, &mut target).or_fail(Cause::Machine, || format!("cannot write `{}`", to.display()))?;
    Ok(())
}
