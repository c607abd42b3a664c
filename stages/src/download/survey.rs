//! What a checkpoint in a folder is, known from the names of its files and from its configuration alone.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use engine::artifact::Facts;
use engine::file::problem::Problem;
use engine::survey::{LocalFile, LocalFiles, MOST_READ, Survey};
use model::config::Config;
use model::peft::AdapterConfig;
use serde_json::Value;

use super::selection::Selection;
use super::{ADAPTER_CONFIG, CONFIG, DownloadParams, Form, Origin, record, role};
use crate::checkpoint;

/// Facts of what will be made of the folder, and what would keep it from being made.
pub(super) fn survey(params: &DownloadParams, files: &LocalFiles) -> Survey {
    let mut survey = Survey::default();
    let Some(Origin::Folder(path)) = params.origin() else { return survey };
    let files = files.files(role(params.form));
    let problem = |message: String| Problem::error("bad-checkpoint", path.span, message, "cannot be used");
    let names: Vec<&str> = files.iter().map(|file| file.relative.as_str()).collect();
    let chosen = Selection::new(params.include.as_deref(), params.exclude.as_deref(), params.form)
        .and_then(|selection| selection.choose(&names, "the folder").map(drop));
    if let Err(error) = chosen {
        survey.problems.push(problem(error.to_string()).with_help_if(error.help));
        return survey;
    }
    let file = |name: &str| files.iter().find(|file| file.relative == name);
    match params.form {
        Form::Files => {}
        Form::Adapter => {
            let read = file(ADAPTER_CONFIG).map(|file| AdapterConfig::read(&file.path));
            if let Some(Err(error)) = read {
                survey.problems.push(problem(format!("the adapter cannot be used here: {error}")));
            }
            if let Some(weights) = file(record::RECORD).and_then(|file| record::trained_on(&file.path)) {
                survey.fact("adapter", checkpoint::WEIGHTS, weights);
            }
        }
        Form::Model => match file(CONFIG).map(model_facts) {
            Some(Ok(facts)) => drop(survey.outputs.insert("model".to_owned(), facts)),
            Some(Err(message)) => survey.problems.push(problem(message)),
            None => {}
        },
    }
    if let Some(ids) = file("tokenizer.json").filter(|_| params.form == Form::Model).and_then(|file| ids(&file.path)) {
        survey.fact("tokenizer", "vocab_size", ids);
    }
    survey
}

/// The facts of a model, from its configuration; why it cannot be used, else.
fn model_facts(file: &LocalFile) -> Result<Facts, String> {
    let text = read(&file.path).ok_or_else(|| format!("cannot read `{}`", file.name))?;
    Config::from_json(&text)
        .map_err(|error| format!("`{}` describes a model that cannot be used here: {error}", file.name))?;
    let config = serde_json::from_str(&text).map_err(|error| format!("`{}`: {error}", file.name))?;
    Ok(checkpoint::facts_of_config(config))
}

/// How many ids a tokenizer has, where its file is small enough to be read ahead.
fn ids(path: &Path) -> Option<usize> {
    let tokenizer: Value = serde_json::from_str(&read(path)?).ok()?;
    let vocabulary = match tokenizer.get("model")?.get("vocab")? {
        Value::Object(ids) => ids.len(),
        Value::Array(pieces) => pieces.len(),
        _ => return None,
    };
    let added = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added = added.filter_map(|token| token.get("id")?.as_u64()).filter(|id| *id >= vocabulary as u64).count();
    Some(vocabulary + added)
}

/// A file as text, where it is no longer than is read ahead.
fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let read = File::open(path).ok()?.take(MOST_READ + 1).read_to_string(&mut text).ok()?;
    (read as u64 <= MOST_READ).then_some(text)
}
