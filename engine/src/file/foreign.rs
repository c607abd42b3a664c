//! Configurations of other tools: which one a file belongs to.
//!
//! A reader of pipeline files that meets one says so, and `pipeline import` reads it.

use super::problem::Problem;
use super::tree::{Entry, Node, Value};

/// A tool whose configurations are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    Torchtune,
    Axolotl,
    LlamaFactory,
    MsSwift,
    Trl,
}

/// Keys of [`Tool::LlamaFactory`] that no other tool has beside `model_name_or_path`.
const LLAMA_FACTORY: &[&str] = &["finetuning_type", "stage", "dataset_dir", "cutoff_len", "template", "export_dir"];

/// Keys of ms-swift that tell its files, and the `args.json` that it writes, from others with a `model`.
const MS_SWIFT: &[&str] =
    &["tuner_type", "train_type", "swift_version", "split_dataset_ratio", "template_backend", "target_modules"];

impl Tool {
    pub const ALL: [Self; 5] = [Self::Torchtune, Self::Axolotl, Self::LlamaFactory, Self::MsSwift, Self::Trl];

    pub fn name(self) -> &'static str {
        match self {
            Self::Torchtune => "torchtune",
            Self::Axolotl => "axolotl",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::MsSwift => "ms-swift",
            Self::Trl => "TRL",
        }
    }

    /// Its name behind an article.
    pub fn with_article(self) -> &'static str {
        match self {
            Self::Torchtune => "a torchtune",
            Self::Axolotl => "an axolotl",
            Self::LlamaFactory => "a LLaMA-Factory",
            Self::MsSwift => "an ms-swift",
            Self::Trl => "a TRL",
        }
    }

    /// The tool that a file belongs to, and a key that shows it; `None` for pipeline files and whatever else there is.
    pub fn recognize(root: &Node) -> Option<(Self, &Entry)> {
        let Value::Map(entries) = &root.value else { return None };
        let key = |name: &str| entries.iter().find(|entry| entry.key == name);
        if key("stages").is_some() {
            return None;
        }
        let any = |names: &[&str]| names.iter().find_map(|name| key(name));
        if let Some(entry) = entries.iter().find_map(component) {
            return Some((Self::Torchtune, entry));
        }
        if let Some(entry) = key("base_model") {
            return Some((Self::Axolotl, entry));
        }
        if let Some(model) = key("model_name_or_path") {
            return Some(any(LLAMA_FACTORY).map_or((Self::Trl, model), |entry| (Self::LlamaFactory, entry)));
        }
        key("model").and(any(MS_SWIFT)).map(|entry| (Self::MsSwift, entry))
    }
}

/// torchtune's key for what is built of a mapping, in this entry or below it.
fn component(entry: &Entry) -> Option<&Entry> {
    if entry.key == "_component_" {
        return Some(entry);
    }
    let Value::Map(entries) = &entry.value.value else { return None };
    entries.iter().find_map(component)
}

/// What is said of a file of another tool in the place of a pipeline file.
pub(crate) fn foreign_file(root: &Node, name: &str) -> Option<Problem> {
    let (tool, entry) = Tool::recognize(root)?;
    let message = format!("this is {} file, not a pipeline file", tool.with_article());
    let label = format!("a key of {}", tool.name());
    let help = format!("`pipeline import {name} -o NEW.yaml` writes the pipeline file that does the same");
    Some(Problem::error("foreign-file", entry.key_span, message, label).with_help(help))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::parse::parse;
    use crate::file::source::SourceId;

    fn tool(text: &str) -> Option<Tool> {
        let root = parse(SourceId(0), text, &mut Vec::new()).expect("it is YAML");
        Tool::recognize(&root).map(|(tool, _)| tool)
    }

    #[test]
    fn tools_are_known_by_their_keys() {
        assert_eq!(tool("model: { _component_: torchtune.models.llama3.llama3_8b }"), Some(Tool::Torchtune));
        assert_eq!(tool("base_model: a/b\ndatasets: []"), Some(Tool::Axolotl));
        assert_eq!(tool("model_name_or_path: a/b\nstage: sft"), Some(Tool::LlamaFactory));
        assert_eq!(tool("model_name_or_path: a/b\ndataset_name: c/d"), Some(Tool::Trl));
        assert_eq!(tool("model: a/b\ntuner_type: lora\ndataset: [c]"), Some(Tool::MsSwift));
        assert_eq!(tool("version: 1\nstages: { a: { uses: train, with: { base_model: x } } }"), None);
        assert_eq!(tool("model: a"), None);
        assert_eq!(tool("version: 1\nname: x"), None);
    }
}
