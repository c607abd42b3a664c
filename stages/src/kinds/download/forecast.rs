//! What a checkpoint is, known from the names of its files, its configuration and the headers of its weights alone: of
//! a folder on this machine, or of a repository whose metadata was fetched.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use engine::artifact::Facts;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::forecast::{Ahead, Forecast};
use engine::local_files::{Extent, LocalFile, MOST_READ, PINNED};
use model::config::{Architecture, Outline};
use model::peft::AdapterConfig;
use serde_json::{Map, Value};

use super::selection::Selection;
use super::{ADAPTER_CONFIG, CONFIG, Download, Form, Origin, check_fetched, gguf, in_place_of, outside, role};
use crate::compute::adapter::record;
use crate::compute::checkpoint::{self, CHAT_TEMPLATE};
use crate::compute::torch;
use crate::data::artifact::CHAT_TEMPLATE_FILE;
use crate::data::tokenizer::template_in_config;

/// Facts of what will be made of the files, and what would keep it from being made.
pub(super) fn forecast(params: &Download, ahead: &Ahead<'_>) -> Forecast {
    let (files, span) = (ahead.files, ahead.span);
    let mut forecast = Forecast::default();
    outside::foretell(params, &mut forecast);
    let (files, place) = match params.origin() {
        Some(Origin::Folder(_)) => (files.files(role(params.form)), "the folder".to_owned()),
        Some(Origin::Hub(name)) => (files.files(PINNED), format!("`{name}`")),
        None => return forecast,
    };
    // Of a repository nothing is known before its metadata is here.
    if files.is_empty() {
        return forecast;
    }
    let problem = |message: String| match params.origin() {
        Some(Origin::Folder(path)) => Problem::error("bad-checkpoint", path.span, message, "cannot be used"),
        Some(Origin::Hub(_)) | None => Problem::error("bad-checkpoint", span, message, "cannot be used").at("repo"),
    };
    let names: Vec<&str> = files.iter().map(|file| file.relative.as_str()).collect();
    let selection = Selection::new(params.include.as_deref(), params.exclude.as_deref(), params.form);
    let mut chosen = match selection.choose(&names, &place) {
        Ok(chosen) => Chosen(files.iter().filter(|file| chosen.contains(&file.relative.as_str())).collect()),
        Err(error) => {
            forecast.problems.push(problem(error.to_string()).with_help_if(error.help));
            return forecast;
        }
    };
    if params.form != Form::Files {
        chosen.0.retain(|file| match damage(params, file) {
            None => true,
            Some(error) => {
                forecast.problems.push(problem(error.message).with_help_if(error.help));
                false
            }
        });
    }
    let is_sound = forecast.problems.is_empty();
    match params.form {
        Form::Files => {}
        Form::Adapter => {
            let read = chosen.whole(ADAPTER_CONFIG).map(|file| AdapterConfig::read(&file.path));
            if let Some(Err(error)) = read {
                forecast.problems.push(problem(format!("the adapter cannot be used here: {error}")));
            }
            let folder = chosen.named(ADAPTER_CONFIG).and_then(|file| file.path.parent());
            for (name, fact) in folder.and_then(record::trained_on).into_iter().flatten() {
                forecast.fact("adapter", &name, fact);
            }
        }
        Form::Model if gguf::source(&chosen.names()).is_some() => {
            let source = gguf::source(&chosen.names()).and_then(|name| chosen.whole(name));
            match source.map(|file| gguf::facts(&file.path, params.pre_tokenizer.as_deref())) {
                Some(Ok([model, tokenizer])) => {
                    forecast.facts("model", model);
                    forecast.facts("tokenizer", tokenizer);
                }
                Some(Err(error)) => forecast.problems.push(problem(error.to_string()).with_help_if(error.help)),
                None => {}
            }
            return forecast;
        }
        Form::Model => match chosen.whole(CONFIG).map(model_facts) {
            Some(Ok((facts, architecture))) => {
                if let Architecture::Transformers(outline) = architecture {
                    forecast.problems.push(of_transformers(&outline, &problem(outline.to_string())));
                }
                forecast.facts("model", facts);
            }
            Some(Err(message)) => {
                let config = chosen.whole(CONFIG).and_then(|file| read(&file.path));
                let help = config.and_then(|config| in_place_of(&config));
                forecast.problems.push(problem(message).with_help_if(help.map(str::to_owned)));
            }
            None => {}
        },
    }
    if params.form == Form::Model {
        if let Some(ids) = chosen.whole("tokenizer.json").and_then(|file| ids(&file.path)) {
            forecast.fact("tokenizer", "vocab_size", ids);
        }
        if let Some(has_template) = chosen.chat_template().filter(|_| is_sound) {
            ["model", "tokenizer"].into_iter().for_each(|output| forecast.fact(output, CHAT_TEMPLATE, has_template));
        }
    }
    forecast
}

/// The note that a model is not native, at the place of a problem with it.
fn of_transformers(outline: &Outline, at: &Problem) -> Problem {
    let note = Problem::warning("not-native", at.span, at.message.clone(), "this model");
    let note = note.with_help(match torch::is_installed() {
        true => format!("its stages run on the torch worker: {}", outline.because),
        false => format!(
            "{}; its stages need the torch worker, which is not installed here: {}",
            outline.because,
            torch::how_to_install()
        ),
    });
    Problem { field: at.field.clone(), ..note }
}

/// The files that are taken.
struct Chosen<'a>(Vec<&'a LocalFile>);

impl<'a> Chosen<'a> {
    fn names(&self) -> Vec<&'a str> {
        self.0.iter().map(|file| file.relative.as_str()).collect()
    }

    fn named(&self, name: &str) -> Option<&'a LocalFile> {
        self.0.iter().copied().find(|file| file.relative == name)
    }

    /// A file that is here as a whole.
    fn whole(&self, name: &str) -> Option<&'a LocalFile> {
        self.named(name).filter(|file| file.extent == Extent::Whole)
    }

    /// Whether the tokenizer has a chat template; `None` where its configuration is too long to be read ahead.
    fn chat_template(&self) -> Option<bool> {
        if self.named(CHAT_TEMPLATE_FILE).is_some() {
            return Some(true);
        }
        for name in ["tokenizer_config.json", "special_tokens_map.json"] {
            let Some(file) = self.named(name) else { continue };
            let text = self.whole(name).and_then(|_| read(&file.path))?;
            let config: Map<String, Value> = serde_json::from_str(&text).ok()?;
            if template_in_config(&config).is_some() {
                return Some(true);
            }
            // The older map beside it is not read then.
            if config.contains_key("added_tokens_decoder") {
                break;
            }
        }
        Some(false)
    }
}

/// What is wrong with a file that is not what its name says.
fn damage(params: &Download, file: &LocalFile) -> Option<StageError> {
    let is_here = file.extent != Extent::Name;
    let check: fn(&Path, &str) -> Result<(), StageError> = match params.origin() {
        Some(Origin::Hub(_)) => check_fetched,
        Some(Origin::Folder(_)) | None => checkpoint::check_file,
    };
    is_here.then(|| check(&file.path, &file.name).err())?
}

/// The facts of a model, from its configuration, and what it describes; why it cannot be used, else.
fn model_facts(file: &LocalFile) -> Result<(Facts, Architecture), String> {
    let text = read(&file.path).ok_or_else(|| format!("cannot read `{}`", file.name))?;
    let architecture = Architecture::from_json(&text)
        .map_err(|error| format!("`{}` describes a model that cannot be used here: {error}", file.name))?;
    let config = serde_json::from_str(&text).map_err(|error| format!("`{}`: {error}", file.name))?;
    Ok((checkpoint::facts_of_config(config), architecture))
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
