//! Which files of a repository or folder are taken, and whether they are a checkpoint that can be used.

use std::fs;
use std::path::Path;

use engine::error::{Cause, OrFail, StageError};
use model::peft::{PICKLED, PICKLED_FILE};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::Form;
use super::pattern::Pattern;

/// Copies of the weights that nothing here reads.
const OTHER_WEIGHTS: &[&str] =
    &["original/*", "*.pth", "*.bin", "*.pt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"];

/// What an adapter is made of. Its tokenizer and the states of its training, which often lie beside it, are not read.
const ADAPTER_FILES: &[&str] = &[model::peft::CONFIG_FILE, model::peft::WEIGHTS_FILE];

/// The index of a checkpoint in several files.
const INDEX: &str = "model.safetensors.index.json";

/// The wish for files, by patterns.
pub(super) struct Selection {
    include: Option<Vec<Pattern>>,
    exclude: Option<Vec<Pattern>>,
    form: Form,
}

impl Selection {
    pub(super) fn new(include: Option<&[String]>, exclude: Option<&[String]>, form: Form) -> Self {
        let patterns = |texts: &[String]| -> Vec<Pattern> { texts.iter().map(|text| Pattern::new(text)).collect() };
        Self { include: include.map(patterns), exclude: exclude.map(patterns), form }
    }

    /// The names that are wanted. For a checkpoint: also whether it has all that a model needs; `place` says whose
    /// files these are.
    pub(super) fn choose<'a>(&self, names: &[&'a str], place: &str) -> Result<Vec<&'a str>, StageError> {
        let left_out: Vec<Pattern> = if self.leaves_other_weights_out(names) {
            OTHER_WEIGHTS.iter().map(|text| Pattern::new(text)).collect()
        } else {
            Vec::new()
        };
        let wanted = |name: &&&str| {
            self.include.as_ref().is_none_or(|patterns| matches(patterns, name))
                && !self.exclude.as_ref().is_some_and(|patterns| matches(patterns, name))
                && !matches(&left_out, name)
                && (self.form != Form::Adapter || self.include.is_some() || ADAPTER_FILES.contains(name))
        };
        let chosen: Vec<&str> = names.iter().filter(wanted).copied().collect();
        if chosen.is_empty() && self.form != Form::Adapter {
            return Err(StageError::new(Cause::BadParameters, format!("no file of {place} is selected"))
                .with_help(format!("it has {}; see `include` and `exclude`", list(names))));
        }
        match self.form {
            Form::Model => check_checkpoint(&chosen, names, place)?,
            Form::Adapter => check_adapter(&chosen, names, place)?,
            Form::Files => {}
        }
        Ok(chosen)
    }

    /// A user who names patterns gets what they say.
    fn leaves_other_weights_out(&self, names: &[&str]) -> bool {
        self.form == Form::Model && self.include.is_none() && names.iter().any(|name| name.ends_with(".safetensors"))
    }
}

fn matches(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

/// Finds what is missing before gigabytes are moved.
fn check_checkpoint(chosen: &[&str], all: &[&str], place: &str) -> Result<(), StageError> {
    let missing = |what: &str, present: &dyn Fn(&str) -> bool, otherwise: &str| {
        let message = format!("{place} gives no {what}, so it cannot be used as a model");
        let help = if all.iter().any(|name| present(name)) {
            "it exists, and `include` or `exclude` leaves it out".to_owned()
        } else if all.contains(&ADAPTER_FILES[0]) {
            format!("it is an adapter, as its `{}` says: set `as: adapter`", ADAPTER_FILES[0])
        } else {
            format!("{otherwise}; it has {}. With `as: files` anything can be taken", list(all))
        };
        Err(StageError::new(Cause::BadData, message).with_help(help))
    };
    let is_weights = |name: &str| name.ends_with(".safetensors") && !name.contains('/');
    if !chosen.iter().any(|name| is_weights(name)) {
        let files: Vec<&str> = chosen.iter().copied().filter(|name| name.ends_with(".gguf")).collect();
        match files.as_slice() {
            [] => {}
            // All else is in it.
            [_] => return Ok(()),
            files => {
                let message = format!("{place} gives {} GGUF files, each of which is a model", files.len());
                let help = format!("choose one with `include`: {}", list(files));
                return Err(StageError::new(Cause::BadData, message).with_help(help));
            }
        }
    }
    if !chosen.contains(&"config.json") {
        return missing("`config.json`", &|name| name == "config.json", "a checkpoint in the Hub's format is needed");
    }
    if !chosen.iter().any(|name| is_weights(name)) {
        let otherwise = if all.iter().any(|name| [".bin", ".pth", ".pt"].iter().any(|end| name.ends_with(end))) {
            "its weights are pickled (.bin, .pth), which can run code when they are read: convert them to safetensors"
        } else {
            "safetensors weights are needed"
        };
        return missing("`*.safetensors`", &is_weights, otherwise);
    }
    if !chosen.contains(&"tokenizer.json") {
        let otherwise = if all.contains(&"tokenizer.model") {
            "`tokenizer.model` alone is not enough: save the tokenizer again with transformers, as a fast tokenizer"
        } else {
            "a tokenizer in one file is needed"
        };
        return missing("`tokenizer.json`", &|name| name == "tokenizer.json", otherwise);
    }
    Ok(())
}

fn check_adapter(chosen: &[&str], all: &[&str], place: &str) -> Result<(), StageError> {
    let Some(missing) = ADAPTER_FILES.iter().find(|name| !chosen.contains(name)) else { return Ok(()) };
    let help = if all.contains(missing) {
        "it exists, and `include` or `exclude` leaves it out".to_owned()
    } else if all.contains(&PICKLED_FILE) {
        PICKLED.to_owned()
    } else {
        format!("an adapter in PEFT's format is needed; it has {}", list(all))
    };
    let message = format!("{place} gives no `{missing}`, so it cannot be used as an adapter");
    Err(StageError::new(Cause::BadData, message).with_help(help))
}

#[derive(Deserialize)]
struct Index {
    weight_map: Map<String, Value>,
}

/// Makes sure that every file of weights that the index names is there.
pub(super) fn check_shards(folder: &Path) -> Result<(), StageError> {
    let path = folder.join(INDEX);
    if !path.exists() {
        return Ok(());
    }
    let text = fs::read(&path).or_fail(Cause::Machine, || format!("cannot read `{}`", path.display()))?;
    let index: Index =
        serde_json::from_slice(&text).or_fail(Cause::BadData, || format!("`{INDEX}` is not an index of weights"))?;
    let mut shards: Vec<&str> = index.weight_map.values().filter_map(Value::as_str).collect();
    shards.sort_unstable();
    shards.dedup();
    match shards.into_iter().find(|shard| !folder.join(shard).is_file()) {
        Some(shard) => Err(StageError::bad_data(format!(
            "the checkpoint is incomplete: `{INDEX}` names `{shard}`, which is missing"
        ))),
        None => Ok(()),
    }
}

/// The first few names, for a message.
fn list(names: &[&str]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = names.iter().take(SHOWN).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 if names.is_empty() => "no files".to_owned(),
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA: &[&str] = &[
        "LICENSE",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
        "original/consolidated.00.pth",
        "original/params.json",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer_config.json",
    ];

    fn choose<'a>(
        include: Option<&[&str]>,
        exclude: Option<&[&str]>,
        form: Form,
        names: &[&'a str],
    ) -> Result<Vec<&'a str>, StageError> {
        let owned = |patterns: &[&str]| patterns.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let (include, exclude) = (include.map(owned), exclude.map(owned));
        Selection::new(include.as_deref(), exclude.as_deref(), form).choose(names, "`owner/name`")
    }

    #[test]
    fn other_forms_of_the_weights_are_left_out() {
        let chosen = choose(None, None, Form::Model, LLAMA).unwrap();
        assert_eq!(
            chosen,
            [
                "LICENSE",
                "config.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                INDEX,
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        assert_eq!(choose(None, None, Form::Files, LLAMA).unwrap(), LLAMA);
    }

    #[test]
    fn patterns_cross_folders() {
        let chosen = choose(None, Some(&["original/*", "*.bin"]), Form::Files, LLAMA).unwrap();
        assert!(!chosen.iter().any(|name| name.starts_with("original/") || name.ends_with(".bin")));
        let chosen = choose(Some(&["*.pth"]), None, Form::Files, LLAMA).unwrap();
        assert_eq!(chosen, ["original/consolidated.00.pth"]);
    }

    #[test]
    fn a_folder_is_all_that_is_in_it() {
        let chosen = choose(None, Some(&["original/"]), Form::Files, LLAMA).unwrap();
        assert!(chosen.len() == LLAMA.len() - 2 && !chosen.iter().any(|name| name.starts_with("original/")));
        let chosen = choose(Some(&["original/"]), None, Form::Files, LLAMA).unwrap();
        assert_eq!(chosen, ["original/consolidated.00.pth", "original/params.json"]);
    }

    #[test]
    fn of_an_adapter_its_two_files_are_taken() {
        let names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "optimizer.pt"];
        assert_eq!(choose(None, None, Form::Adapter, &names).unwrap(), names[1..3]);
        let told = |exclude: Option<&[&str]>, names: &[&str]| {
            let error = choose(None, exclude, Form::Adapter, names).unwrap_err();
            format!("{}: {}", error.message, error.help.unwrap())
        };
        let said = told(None, &["adapter_config.json", "adapter_model.bin"]);
        assert!(said.contains("no `adapter_model.safetensors`") && said.contains("save it again with PEFT"), "{said}");
        let said = told(None, LLAMA);
        assert!(said.contains("no `adapter_config.json`") && said.contains("PEFT's format is needed"), "{said}");
        let said = told(Some(&["*.safetensors"]), &names);
        assert!(said.contains("leaves it out"), "{said}");
    }

    #[test]
    fn what_a_model_lacks_is_said_before_anything_moves() {
        let told = |include: Option<&[&str]>, names: &[&str]| {
            let error = choose(include, None, Form::Model, names).unwrap_err();
            format!("{}: {}", error.message, error.help.unwrap())
        };
        let said = told(None, &["config.json", "pytorch_model.bin", "tokenizer.json"]);
        assert!(said.contains("no `*.safetensors`") && said.contains("convert them to safetensors"), "{said}");
        let said = told(None, &["config.json", "model.safetensors", "tokenizer.model"]);
        assert!(said.contains("no `tokenizer.json`") && said.contains("`tokenizer.model` alone"), "{said}");
        let said = told(Some(&["*.safetensors"]), LLAMA);
        assert!(said.contains("no `config.json`") && said.contains("leaves it out"), "{said}");
        let said = told(None, &["README.md", "adapter_config.json", "adapter_model.safetensors"]);
        assert!(said.contains("no `config.json`") && said.ends_with("says: set `as: adapter`"), "{said}");
        let said = told(Some(&["*.xyz"]), LLAMA);
        assert!(said.contains("no file of `owner/name` is selected"), "{said}");
    }

    #[test]
    fn a_gguf_file_is_a_model_and_several_are_a_choice() {
        let names = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf"];
        assert_eq!(choose(Some(&["*Q8_0.gguf"]), None, Form::Model, &names).unwrap(), ["m-Q8_0.gguf"]);
        let error = choose(None, None, Form::Model, &names).unwrap_err();
        assert!(error.message.contains("gives 2 GGUF files"), "{}", error.message);
        assert!(error.help.unwrap().contains("`include`: `m-Q4_K_M.gguf`, `m-Q8_0.gguf`"));
    }

    #[test]
    fn a_missing_shard_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(check_shards(folder.path()).is_ok());
        fs::write(folder.path().join(INDEX), r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#)
            .unwrap();
        fs::write(folder.path().join("one.safetensors"), "").unwrap();
        let error = check_shards(folder.path()).unwrap_err();
        assert!(error.message.contains("`two.safetensors`"), "{}", error.message);
    }
}
