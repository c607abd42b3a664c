//! What a program wrote: checked to be what was declared, described as the other stages describe theirs, and stored.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use engine::artifact::Facts;
use engine::context::{Draft, StageContext};
use engine::error::{Cause, OrFail, StageError};
use serde_json::{Map, Value};

use super::mask::Masker;
use super::parameters::{OutputForm, OutputParams};
use super::secrets;
use crate::data::number;
use crate::data::tokenizer::Tokenizer;
use crate::kinds::dataset::{self, SourceFile};
use crate::kinds::download;

/// The file inside a Metrics artefact.
const METRICS: &str = "metrics.json";

/// An output in the making.
pub(super) struct Made<'a> {
    pub name: &'a str,
    pub params: &'a OutputParams,
    /// Where the program writes.
    pub folder: PathBuf,
    draft: Draft,
}

impl<'a> Made<'a> {
    /// An empty folder for an output. Data files that become rows are written beside the output, everything else into
    /// it.
    pub(super) fn begin(
        name: &'a str,
        params: &'a OutputParams,
        context: &mut StageContext,
    ) -> Result<Self, StageError> {
        let draft = context.create(name)?;
        let folder = match params.kind {
            OutputForm::Rows => context.scratch().join("outputs").join(name),
            _ => draft.folder.clone(),
        };
        super::make_folder(&folder)?;
        Ok(Self { name, params, folder, draft })
    }

    /// Checks what the program wrote and stores it.
    pub(super) fn seal(self, masker: &Masker, context: &mut StageContext) -> Result<(), StageError> {
        let Self { name, params, folder, mut draft } = self;
        let variable = super::placeholders::variable(super::placeholders::OUTPUTS, name);
        // What a link leads to is not the program's to give away.
        if !fs::symlink_metadata(&folder).is_ok_and(|found| found.is_dir()) {
            let message =
                format!("the program removed the folder of its output `{name}`, or put something in its place");
            return Err(StageError::bad_data(message).with_help(format!("it should write into `${variable}`")));
        }
        let Below { files, empty } = below(&folder)?;
        if files.is_empty() {
            let kind = kind_name(params.kind);
            return Err(StageError::bad_data(format!(
                "the program ended well and wrote nothing for its output `{name}`"
            ))
            .with_help(format!(
                "it should write its {kind} into the folder `${variable}`, which exists and is empty"
            )));
        }
        secrets::refuse(name, &folder, masker)?;
        if let [first, others @ ..] = empty.as_slice() {
            let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
            context.warn(format!(
                "the output `{name}` has an empty folder `{first}`{more}: an output is files, and a folder without one is not stored"
            ));
        }
        let wrong = |error: StageError| {
            let kind = kind_name(params.kind);
            let cause = if error.cause == Cause::Machine { Cause::Machine } else { Cause::BadData };
            let message = format!("the output `{name}` is declared as {kind}, and what the program wrote is not");
            let help = error.help.clone();
            StageError { help, ..StageError::new(cause, message).with_source(error) }
        };
        let sealed = match params.kind {
            OutputForm::Files => context.seal(draft, Facts::new(), None),
            OutputForm::Rows => seal_rows(params, &folder, &files, draft, context),
            OutputForm::Model => download::model_facts(&mut draft).and_then(|facts| context.seal(draft, facts, None)),
            OutputForm::Tokenizer => tokenizer_facts(&draft.folder).and_then(|facts| context.seal(draft, facts, None)),
            OutputForm::Adapter => {
                download::adapter_facts(&draft.folder).and_then(|facts| context.seal(draft, facts, None))
            }
            OutputForm::Metrics => metrics_facts(&draft.folder).and_then(|facts| context.seal(draft, facts, None)),
        };
        sealed.map_err(wrong)
    }
}

fn kind_name(kind: OutputForm) -> &'static str {
    match kind {
        OutputForm::Files => "files",
        OutputForm::Rows => "rows",
        OutputForm::Model => "a model",
        OutputForm::Tokenizer => "a tokenizer",
        OutputForm::Adapter => "an adapter",
        OutputForm::Metrics => "metrics",
    }
}

fn seal_rows(
    params: &OutputParams,
    folder: &Path,
    files: &[String],
    draft: Draft,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let mut sources = Vec::new();
    for file in files {
        let source = SourceFile::new(folder.join(file), file.clone()).ok_or_else(|| {
            StageError::bad_data(format!("`{file}` does not have a format that rows can be read from"))
                .with_help("write data files such as `rows.jsonl`, and other files into a separate output")
        })?;
        sources.push(source);
    }
    let (facts, identity) =
        dataset::rows_of_files(params.template.as_ref(), &params.column_map, &sources, &draft.folder, context)?;
    context.seal(draft, facts, Some(identity))
}

fn tokenizer_facts(folder: &Path) -> Result<Facts, StageError> {
    let tokenizer = Tokenizer::from_folder(folder)?;
    Ok(Facts::from_iter([("vocab_size".to_owned(), tokenizer.vocab_size().into())]))
}

/// The numbers in `metrics.json`, a nested one under its dotted name.
fn metrics_facts(folder: &Path) -> Result<Facts, StageError> {
    let text = fs::read(folder.join(METRICS)).or_fail(Cause::BadData, || format!("there is no `{METRICS}`"))?;
    let Value::Object(metrics) = parse_metrics(&text)? else {
        return Err(StageError::bad_data(format!("`{METRICS}` is not a JSON object of figures")));
    };
    if metrics.is_empty() {
        return Err(StageError::bad_data(format!("`{METRICS}` contains no metrics")));
    }
    let mut facts = Facts::new();
    add_numbers(metrics, "", &mut facts)?;
    Ok(facts)
}

fn parse_metrics(text: &[u8]) -> Result<Value, StageError> {
    let error = match serde_json::from_slice(text) {
        Ok(metrics) => return Ok(metrics),
        Err(error) => error,
    };
    // Python writes words for numbers that JSON has none for.
    let kept = std::str::from_utf8(text).ok().map(number::with_digits_kept);
    let metrics = kept.and_then(|kept| serde_json::from_str::<Value>(&kept).ok());
    match metrics.and_then(|metrics| not_finite(&metrics, "")) {
        Some((name, word)) => {
            Err(StageError::bad_data(format!("`{name}` of `{METRICS}` is {word}, which is not JSON"))
                .with_help("let the program write null for a metric without a finite value, or leave it out"))
        }
        None => Err(error).or_fail(Cause::BadData, || format!("`{METRICS}` is not JSON")),
    }
}

/// The name of the first number that is not finite, and how Python writes it.
fn not_finite(value: &Value, name: &str) -> Option<(String, &'static str)> {
    match (number::digits_of(value), value) {
        (Some("nan"), _) => Some((name.to_owned(), "NaN")),
        (Some("inf"), _) => Some((name.to_owned(), "Infinity")),
        (Some("-inf"), _) => Some((name.to_owned(), "-Infinity")),
        (None, Value::Object(map)) => map.iter().find_map(|(key, value)| not_finite(value, &dotted(name, key))),
        (None, Value::Array(items)) => {
            items.iter().enumerate().find_map(|(at, item)| not_finite(item, &format!("{name}[{at}]")))
        }
        _ => None,
    }
    .filter(|(name, _)| !name.is_empty())
}

fn add_numbers(metrics: Map<String, Value>, outer: &str, facts: &mut Facts) -> Result<(), StageError> {
    for (key, value) in metrics {
        let name = dotted(outer, &key);
        match value {
            Value::Object(below) => add_numbers(below, &name, facts)?,
            Value::Number(_) if facts.contains_key(&name) => {
                return Err(StageError::bad_data(format!("`{METRICS}` has two metrics `{name}`"))
                    .with_help("a nested metric is named by its keys, with dots between them"));
            }
            Value::Number(_) => {
                facts.insert(name, value);
            }
            Value::Null | Value::Bool(_) | Value::String(_) | Value::Array(_) => {}
        }
    }
    Ok(())
}

fn dotted(outer: &str, key: &str) -> String {
    if outer.is_empty() { key.to_owned() } else { format!("{outer}.{key}") }
}

/// What is below a folder: paths, sorted.
#[derive(Default)]
struct Below {
    /// All files. What is no file is reported when the folder is stored.
    files: Vec<String>,
    /// The folders that hold nothing.
    empty: Vec<String>,
}

fn below(folder: &Path) -> Result<Below, StageError> {
    fn walk(folder: &Path, prefix: &str, found: &mut Below) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let path = format!("{prefix}{}", entry.file_name().to_string_lossy());
            if !entry.file_type()?.is_dir() {
                found.files.push(path);
                continue;
            }
            let before = found.files.len() + found.empty.len();
            walk(&entry.path(), &format!("{path}/"), found)?;
            if found.files.len() + found.empty.len() == before {
                found.empty.push(path);
            }
        }
        Ok(())
    }
    let mut found = Below::default();
    walk(folder, "", &mut found).or_fail(Cause::Machine, || format!("cannot list `{}`", folder.display()))?;
    found.files.sort();
    found.empty.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts(text: &str) -> Result<Facts, StageError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(METRICS), text).unwrap();
        metrics_facts(folder.path())
    }

    #[test]
    fn nested_numbers_are_metrics() {
        let text = r#"{"loss": 1.5, "nested": {"a": 2, "b": {"c": 3}}, "s": "x", "none": null, "list": [1]}"#;
        assert_eq!(Value::Object(facts(text).unwrap()), json!({"loss": 1.5, "nested.a": 2, "nested.b.c": 3}));
        let two = facts(r#"{"a.b": 1, "a": {"b": 2}}"#).unwrap_err();
        assert_eq!(two.message, "`metrics.json` has two metrics `a.b`");
    }

    #[test]
    fn a_number_that_is_not_finite_is_named() {
        for (text, message) in [
            (r#"{"loss": NaN}"#, "`loss` of `metrics.json` is NaN, which is not JSON"),
            (r#"{"a": 1, "b": {"c": [0, -Infinity]}}"#, "`b.c[1]` of `metrics.json` is -Infinity, which is not JSON"),
            (r#"{"loss": NaN"#, "`metrics.json` is not JSON"),
            ("NaN", "`metrics.json` is not JSON"),
        ] {
            assert_eq!(facts(text).unwrap_err().message, message, "{text}");
        }
    }
}
