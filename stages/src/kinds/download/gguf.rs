//! A GGUF file as a model: what lies beside the weights of a checkpoint is derived from the file's own metadata.

use std::fs;
use std::path::Path;

use engine::artifact::Facts;
use engine::error::{Cause, OrFail, StageError};
use model::config::Architecture;
use model::gguf::{FILE, GgufError, GgufFile, PRE_TOKENIZERS, TokenizerJson};
use serde_json::{Map, Value};

use super::CONFIG;
use crate::compute::checkpoint::{self, CHAT_TEMPLATE};
use crate::data::tokenizer::template_in_config;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The GGUF file among these that a model is made of; `None` where there are safetensors weights, or the file lies in a
/// folder with all that is derived from it, as one that was made here and published.
pub(super) fn source<'a>(names: &[&'a str]) -> Option<&'a str> {
    let is_complete = [CONFIG, TOKENIZER, FILE].iter().all(|name| names.contains(name));
    if is_complete || names.iter().any(|name| name.ends_with(".safetensors")) {
        return None;
    }
    names.iter().copied().find(|name| name.ends_with(".gguf"))
}

/// What a file is read as.
struct Derived {
    config: Map<String, Value>,
    tokenizer: TokenizerJson,
}

impl Derived {
    fn of(path: &Path, pre_tokenizer: Option<&str>) -> Result<Self, StageError> {
        let read = || -> Result<Self, GgufError> {
            let file = GgufFile::open(path)?;
            let config = model::gguf::config(&file)?;
            model::gguf::check_tensors(&file)?;
            Ok(Self { config, tokenizer: model::gguf::tokenizer(&file, pre_tokenizer)? })
        };
        let derived = read().map_err(failure)?;
        let text = Value::Object(derived.config.clone()).to_string();
        Architecture::from_json(&text).map_err(|error| {
            StageError::bad_data(format!("the GGUF file describes a model that cannot be used here: {error}"))
        })?;
        Ok(derived)
    }

    fn has_chat_template(&self) -> bool {
        self.tokenizer.settings.as_object().and_then(template_in_config).is_some()
    }
}

/// Puts the file under the name that a model has it by, and beside it what is derived from it.
pub(super) fn complete(folder: &Path, name: &str, pre_tokenizer: Option<&str>) -> Result<(), StageError> {
    let derived = Derived::of(&folder.join(name), pre_tokenizer)?;
    let (from, to) = (folder.join(name), folder.join(FILE));
    if from != to {
        fs::rename(&from, &to).or_fail(Cause::Machine, || format!("cannot write `{}`", to.display()))?;
        // The folder that it was in, if it was the only file there.
        let _ = from.parent().filter(|parent| *parent != folder).map(fs::remove_dir);
    }
    for (name, content) in [
        (CONFIG, &Value::Object(derived.config)),
        (TOKENIZER, &derived.tokenizer.tokenizer),
        (TOKENIZER_CONFIG, &derived.tokenizer.settings),
    ] {
        let path = folder.join(name);
        let text = if name == TOKENIZER { content.to_string() } else { format!("{content:#}\n") };
        fs::write(&path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))?;
    }
    Ok(())
}

/// The facts of the model and of the tokenizer that a file becomes.
pub(super) fn facts(path: &Path, pre_tokenizer: Option<&str>) -> Result<[Facts; 2], StageError> {
    let derived = Derived::of(path, pre_tokenizer)?;
    let has_template = derived.has_chat_template();
    let ids = derived.tokenizer.tokenizer["model"]["vocab"].as_object().map_or(0, Map::len);
    let mut model = checkpoint::facts_of_config(derived.config);
    model.insert(CHAT_TEMPLATE.to_owned(), has_template.into());
    let mut tokenizer = Facts::new();
    tokenizer.insert("vocab_size".to_owned(), ids.into());
    tokenizer.insert(CHAT_TEMPLATE.to_owned(), has_template.into());
    Ok([model, tokenizer])
}

/// Whether a name of a way to split text is known.
pub(super) fn is_pre_tokenizer(name: &str) -> bool {
    PRE_TOKENIZERS.contains(&name)
}

fn failure(error: GgufError) -> StageError {
    let help = match &error {
        GgufError::UnknownSplit(_) => {
            Some(format!("if it splits as one of these do, say so with `pre_tokenizer`: {}", PRE_TOKENIZERS.join(", ")))
        }
        GgufError::Damaged(_) => Some("fetch or copy it again".to_owned()),
        _ => None,
    };
    let why = match &error {
        GgufError::Unusable(why) => why.clone(),
        other => other.to_string(),
    };
    let message = format!("the GGUF file cannot be used as a model: {why}");
    let error = match std::error::Error::source(&error) {
        // What it says has been said.
        None => StageError::bad_data(message),
        Some(_) => StageError::bad_data(message).with_source(error),
    };
    match help {
        Some(help) => error.with_help(help),
        None => error,
    }
}
