//! The head of a dataset's README: which files are which configuration and split.

use engine::error::StageError;
use serde_json::Value;

/// A configuration that a README declares.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Configuration {
    pub name: String,
    /// Whether it is the one that is meant where none is named.
    pub is_default: bool,
    /// Patterns of paths, by split; none where the names of the files say which split they are.
    pub data_files: Option<Vec<(String, Vec<String>)>>,
    /// The folder that its files lie in.
    pub data_dir: Option<String>,
    /// The key under which JSON files hold the rows.
    pub field: Option<String>,
    /// What else it says about how files are to be read.
    pub other: Vec<String>,
}

/// What the Hub says about a configuration and what no reader acts upon.
const DESCRIPTIVE: &[&str] =
    &["config_name", "default", "description", "version", "features", "drop_labels", "data_dir", "data_files", "field"];

/// The configurations that a README declares; none where it declares none.
///
/// # Errors
/// Fails where its head cannot be understood.
pub(super) fn configurations(readme: &str) -> Result<Vec<Configuration>, StageError> {
    let Some(head) = head(readme).filter(|head| head.lines().any(|line| line.starts_with("configs:"))) else {
        return Ok(Vec::new());
    };
    let head: Value = serde_yaml::from_str(head).map_err(|error| {
        StageError::bad_data("cannot read the YAML at the head of the dataset's README.md").with_source(error)
    })?;
    let entries = head.get("configs").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    entries.iter().map(configuration).collect()
}

/// The text between the first two lines of dashes.
fn head(readme: &str) -> Option<&str> {
    let rest = readme.trim_start_matches('\u{feff}').strip_prefix("---")?;
    let rest = rest.trim_start_matches('\r').strip_prefix('\n')?;
    let end = rest.match_indices("\n---").find(|(at, _)| {
        let behind = &rest[at + 4..];
        behind.is_empty() || behind.starts_with(['\n', '\r'])
    })?;
    Some(&rest[..end.0 + 1])
}

fn configuration(entry: &Value) -> Result<Configuration, StageError> {
    let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
    let name = text("config_name").unwrap_or_else(|| "default".to_owned());
    let data_files = match entry.get("data_files") {
        None | Some(Value::Null) => None,
        Some(files) => Some(data_files(files).ok_or_else(|| {
            StageError::bad_data(format!("the README's `data_files` of configuration `{name}` cannot be understood"))
        })?),
    };
    let keys = entry.as_object().into_iter().flat_map(|map| map.keys());
    let other = keys.filter(|key| !DESCRIPTIVE.contains(&key.as_str())).cloned().collect();
    Ok(Configuration {
        is_default: entry.get("default").and_then(Value::as_bool).unwrap_or(false),
        data_dir: text("data_dir"),
        field: text("field"),
        name,
        data_files,
        other,
    })
}

/// A path, a list of paths, or a list of `{split, path}`.
fn data_files(value: &Value) -> Option<Vec<(String, Vec<String>)>> {
    let paths = |value: &Value| match value {
        Value::String(path) => Some(vec![path.clone()]),
        Value::Array(paths) => paths.iter().map(|path| path.as_str().map(str::to_owned)).collect(),
        _ => None,
    };
    match value {
        Value::Array(entries) if entries.iter().any(Value::is_object) => entries
            .iter()
            .map(|entry| Some((entry.get("split")?.as_str()?.to_owned(), paths(entry.get("path")?)?)))
            .collect(),
        Value::Object(splits) => splits.iter().map(|(split, path)| Some((split.clone(), paths(path)?))).collect(),
        other => Some(vec![("train".to_owned(), paths(other)?)]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_are_read_in_each_of_their_spellings() {
        let readme = "---\nlicense: mit\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n  - split: train\n    path: main/train-*\n  \
            - split: test\n    path: [a.csv, b.csv]\n- config_name: plain\n  data_files: all.jsonl\n  sep: \";\"\n- config_name: several\n  \
            data_files: [\"*.csv\"]\n- config_name: folder\n  data_dir: deep\n---\n# Text\n---\n";
        let found = configurations(readme).unwrap();
        let files = |index: usize| found[index].data_files.clone();
        let owned = |paths: &[&str]| paths.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>();
        let main =
            vec![("train".to_owned(), owned(&["main/train-*"])), ("test".to_owned(), owned(&["a.csv", "b.csv"]))];
        assert_eq!((found[0].name.as_str(), found[0].is_default, files(0)), ("main", true, Some(main)));
        assert_eq!(files(1), Some(vec![("train".to_owned(), owned(&["all.jsonl"]))]));
        assert_eq!(found[1].other, ["sep"]);
        assert_eq!(files(2), Some(vec![("train".to_owned(), owned(&["*.csv"]))]));
        assert_eq!((files(3), found[3].data_dir.as_deref()), (None, Some("deep")));
    }

    #[test]
    fn a_readme_without_configurations_declares_none() {
        for readme in
            ["", "# Text", "---\nlicense: mit\n---\n", "---\nconfigs: none of it ends", "---\nother: \"unclosed\n---\n"]
        {
            assert_eq!(configurations(readme).unwrap(), [], "{readme:?}");
        }
        assert!(configurations("---\nconfigs: [\n---\n").is_err());
        assert!(configurations("---\nconfigs:\n- data_files: 7\n---\n").is_err());
    }
}
