//! A Model artefact as a folder in the Hub's form: its facts, and the files that go along with its weights.

use std::fs;
use std::io::Read;
use std::path::Path;

use cache::{Digest, Hasher};
use engine::artifact::Facts;
use engine::context::{Draft, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::forecast::{Ahead, Forecast};
use engine::local_files::MOST_READ;
use engine::parameter::Reference;
use engine::protocol::FileGrant;
use model::checkpoint::{Checkpoint, CheckpointError, is_lfs_pointer};
use model::config::{Architecture, sizes_by_other_names};
use model::gguf::{GgufError, GgufFile};
use serde_json::{Map, Value};

use crate::data::artifact::{CHAT_TEMPLATE_FILE, CHAT_TEMPLATES_FOLDER, TOKENIZER_FILES, is_tokenizer_file};
use crate::data::prompt::{PROMPT, PromptParams};
use crate::data::tokenizer::has_chat_template;

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

/// What a model folder's `config.json` describes.
///
/// # Errors
/// As [`config`], and if it describes no causal model.
pub fn architecture(folder: &Path) -> Result<Architecture, StageError> {
    let text = Value::Object(config(folder)?).to_string();
    Architecture::from_json(&text).or_fail(Cause::BadData, || "the model cannot be loaded".to_owned())
}

/// The fact of a model that is its `config.json`.
pub const CONFIG: &str = "config";

/// The entry of a `config.json` that says that weights are stored quantised.
pub const QUANTIZATION: &str = "quantization_config";

/// The fact of a model from the Hub that is its name there.
pub const REPO: &str = "repo";

/// The fact of a model from the Hub that is its commit.
pub const REVISION: &str = "revision";

/// The fact of a model from a folder: the folder, as the pipeline file names it. As with the two above, an equal model
/// that is taken from elsewhere keeps the name that it has had first.
pub const FOLDER: &str = "folder";

/// The fact of a model, and of an adapter trained on it, that says which weights they are: a digest of the files of
/// weights.
pub const WEIGHTS: &str = "weights";

/// The fact of a tokenizer, and of a model with one, that says whether it has a chat template.
pub const CHAT_TEMPLATE: &str = "chat_template";

/// The fact of a model that has the chat template it was trained with among its files, in place of its base's.
pub const SAVED_TEMPLATE: &str = "saved_chat_template";

/// The fact of a model to which tokens were added: their ids. An adapter on it trains their rows.
pub const ADDED_TOKENS: &str = "added_tokens";

/// What later stages may want to know of a model in a draft, whose weights are all written: its architecture, its
/// sizes, its number type, and which weights it has.
///
/// # Errors
/// As [`config`], and if a weights file cannot be read.
pub fn facts(draft: &mut Draft) -> Result<Facts, StageError> {
    let mut facts = facts_of_config(config(&draft.folder)?);
    facts.insert(WEIGHTS.to_owned(), weights(draft)?.to_string().into());
    if let Some(has_template) = has_chat_template(&draft.folder) {
        facts.insert(CHAT_TEMPLATE.to_owned(), has_template.into());
    }
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
    let sizes = sizes_by_other_names(&config).into_iter().filter(|(name, _)| FACTS.contains(name));
    facts.extend(sizes.map(|(name, size)| (name.to_owned(), size.into())));
    if let Some(dtype) = config.get("torch_dtype").or_else(|| config.get("dtype")) {
        facts.insert("dtype".to_owned(), dtype.clone());
    }
    facts.insert(CONFIG.to_owned(), Value::Object(config));
    facts
}

/// The names of [`facts_of_config`] and of what its tokenizer has, which a model keeps that is made from another.
pub fn config_facts() -> impl Iterator<Item = &'static str> {
    FACTS.iter().copied().chain(["architecture", "dtype", CONFIG, CHAT_TEMPLATE])
}

/// Makes sure that a file of a checkpoint is one, as far as its first bytes and its length tell: no git-LFS pointer,
/// and of weights a whole safetensors file. A header that is longer than is read ahead is left to those who read the
/// weights. `name` is what messages call it.
///
/// # Errors
/// Fails with what it is instead.
pub fn check_file(path: &Path, name: &str) -> Result<(), StageError> {
    let unreadable = || format!("cannot read `{name}`");
    let length = fs::metadata(path).or_fail(Cause::Machine, unreadable)?.len();
    let is_gguf = name.ends_with(".gguf");
    let is_weights = name.ends_with(".safetensors") || is_gguf;
    if !is_weights && length > LONGEST_POINTER {
        return Ok(());
    }
    let mut first = Vec::new();
    let file = fs::File::open(path).or_fail(Cause::Machine, unreadable)?;
    file.take(BYTES_OF_A_POINTER).read_to_end(&mut first).or_fail(Cause::Machine, unreadable)?;
    if is_lfs_pointer(&first) {
        let message = format!("`{name}` is a git-LFS pointer, and the file itself was not fetched");
        return Err(StageError::bad_data(message).with_help("`git lfs pull` in its folder fetches it"));
    }
    if !is_weights {
        return Ok(());
    }
    if is_gguf {
        let unsound = |error: GgufError| {
            StageError::bad_data(format!("`{name}` is no GGUF file that can be read: {error}")).with_help(
                "fetch or copy it again; supported tensor types: F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0 \
                    and Q4_K to Q6_K",
            )
        };
        return GgufFile::open(path).map(drop).map_err(unsound);
    }
    let header = first.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    if header > MOST_READ && header < length {
        return Ok(());
    }
    let message = match Checkpoint::open_file(path) {
        Ok(_) => return Ok(()),
        Err(CheckpointError::WrongLength { expected, found, .. }) => {
            let what = if found < expected { "cut off" } else { "too long" };
            format!("`{name}` is {what}: it has {found} bytes, and its header declares {expected}")
        }
        Err(CheckpointError::BadHeader { source, .. }) => format!("`{name}` is not a safetensors file: {source}"),
        Err(other) => return Err(StageError::bad_data(unreadable()).with_source(other)),
    };
    Err(StageError::bad_data(message).with_help("fetch or copy it again"))
}

/// As much of a file as shows that it is a pointer, and the most that one has.
const BYTES_OF_A_POINTER: u64 = 64;
const LONGEST_POINTER: u64 = 1024;

/// A digest of the names and contents of a model's files of weights: equal for a copy without its tokenizer.
fn weights(draft: &mut Draft) -> Result<Digest, StageError> {
    let folder = draft.folder.clone();
    let unreadable = || format!("cannot read `{}`", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).or_fail(Cause::Machine, unreadable)? {
        let path = entry.or_fail(Cause::Machine, unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors" || extension == "gguf") {
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
    copy_tokenizer(from, to)?;
    copy_those_there(CARRIED_FILES, from, to)
}

/// Copies the files of a tokenizer from one folder to another, as far as they are there.
///
/// # Errors
/// Fails if the disk refuses.
pub fn copy_tokenizer(from: &Path, to: &Path) -> Result<(), StageError> {
    copy_those_there(TOKENIZER_FILES, from, to)?;
    let others = from.join(CHAT_TEMPLATES_FOLDER);
    if !others.is_dir() {
        return Ok(());
    }
    let unreadable = || format!("cannot read `{}`", others.display());
    for entry in fs::read_dir(&others).or_fail(Cause::Machine, unreadable)? {
        let entry = entry.or_fail(Cause::Machine, unreadable)?;
        let name = format!("{CHAT_TEMPLATES_FOLDER}/{}", entry.file_name().to_string_lossy());
        if is_tokenizer_file(&name) && entry.path().is_file() {
            let folder = to.join(CHAT_TEMPLATES_FOLDER);
            let unwritable = || format!("cannot create folder `{}`", folder.display());
            fs::create_dir_all(&folder).or_fail(Cause::Machine, unwritable)?;
            copy(&entry.path(), &to.join(name))?;
        }
    }
    Ok(())
}

fn copy_those_there(names: &[&str], from: &Path, to: &Path) -> Result<(), StageError> {
    let mut there = names.iter().filter(|name| from.join(name).exists());
    there.try_for_each(|name| copy(&from.join(name), &to.join(name)))
}

/// Gives a model or an adapter the chat template that it was trained with where `prompt`, the fact of that name, has
/// one that is not the base's own: whoever loads the folder then asks as was trained. Whether there is one; it is in
/// the file that transformers looks at first, and no other template is left, not even one for tools.
///
/// # Errors
/// Fails if the disk refuses.
pub fn save_chat_template(folder: &Path, prompt: Option<&Value>) -> Result<bool, StageError> {
    let prompt = prompt.and_then(|prompt| serde_json::from_value::<PromptParams>(prompt.clone()).ok());
    let Some(template) = prompt.and_then(|prompt| prompt.chat_template) else { return Ok(false) };
    let write = |path: &Path, text: &str| {
        fs::write(path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
    };
    write(&folder.join(CHAT_TEMPLATE_FILE), template.text())?;
    let others = folder.join(CHAT_TEMPLATES_FOLDER);
    if others.exists() {
        fs::remove_dir_all(&others).or_fail(Cause::Machine, || format!("cannot remove `{}`", others.display()))?;
    }
    let path = folder.join("tokenizer_config.json");
    let config = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice::<Map<String, Value>>(&bytes).ok());
    if let Some(mut config) = config
        && config.shift_remove("chat_template").is_some()
    {
        write(&path, &format!("{:#}\n", Value::Object(config)))?;
    }
    Ok(true)
}

/// Says of a model that will be made that it has the chat template of `from`, its data or its adapter, where that has
/// one ([`save_chat_template`]).
pub fn forecast_template(output: &str, ahead: &Ahead<'_>, from: &Reference, forecast: &mut Forecast) {
    let Some((prompt, grade)) = ahead.fact(from, PROMPT) else { return };
    if prompt.get("chat_template").is_some_and(Value::is_string) {
        [CHAT_TEMPLATE, SAVED_TEMPLATE].iter().for_each(|name| forecast.put(output, name, true, grade));
    }
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

/// Copies a source file, which is checked to be what was planned with.
///
/// # Errors
/// Fails with [`Cause::ChangedWhileRunning`] where it is another one, or gone, and if the disk refuses.
pub fn copy_source(file: &FileGrant, to: &Path, context: &StageContext) -> Result<(), StageError> {
    copy(&file.path, to).map_err(|error| match file.path.exists() {
        true => error,
        false => context.verify(file).err().unwrap_or(error),
    })?;
    let copied = FileGrant { path: to.to_owned(), ..file.clone() };
    context.verify(&copied).map_err(|mut error| {
        error.message = format!("`{}` changed while it was copied", file.path.display());
        error
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_what_its_name_says_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let told = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            check_file(&path, name).err().map(|error| error.message)
        };
        let header = br#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let whole = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat();
        assert_eq!(told("model.safetensors", &whole), None);
        let declared = whole.len();
        for cut in [declared - 1, declared - 8, 20, 3] {
            let said = told("model.safetensors", &whole[..cut]).unwrap();
            assert!(said.starts_with(&format!("`model.safetensors` is cut off: it has {cut} bytes")), "{said}");
        }
        assert!(told("model.safetensors", &[&whole[..], b"x"].concat()).unwrap().contains("is too long"));
        assert!(told("model.safetensors", b"<!DOCTYPE html><html>").unwrap().contains("is not a safetensors file"));
        let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n", "a".repeat(64));
        for name in ["model.safetensors", "tokenizer.json"] {
            assert!(told(name, pointer.as_bytes()).unwrap().contains("is a git-LFS pointer"));
        }
        assert_eq!(told("tokenizer.json", b"{}"), None);
    }

    #[test]
    fn a_tokenizer_brings_its_other_templates_until_one_replaces_them_all() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(from.path().join(CHAT_TEMPLATES_FOLDER)).unwrap();
        let [tool_use, notes] = ["tool_use.jinja", "notes.txt"].map(|name| format!("{CHAT_TEMPLATES_FOLDER}/{name}"));
        let carried = ["tokenizer.json", CHAT_TEMPLATE_FILE, "generation_config.json", tool_use.as_str()];
        for name in carried.into_iter().chain([notes.as_str()]) {
            fs::write(from.path().join(name), name).unwrap();
        }
        carry_along(from.path(), to.path()).unwrap();
        let is_there = |name: &str| to.path().join(name).exists();
        assert!(carried.iter().all(|name| is_there(name)) && !is_there(&notes));
        let prompt = serde_json::json!({ "chat_template": "chatml" });
        assert!(save_chat_template(to.path(), Some(&prompt)).unwrap());
        assert!(is_there(CHAT_TEMPLATE_FILE) && !is_there(CHAT_TEMPLATES_FOLDER));
    }
}
