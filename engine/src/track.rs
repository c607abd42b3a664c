//! `track:` in a pipeline file: which trackers are told of its runs.
//!
//! It leaves to others: telling them, which reads what a run has recorded.

use serde::{Deserialize, Serialize};

use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{Json, KeyWriter, Parameter, Parameters, Reader};

/// A tracker, as a file or the command line names it. Keys and tokens are no part of it: they are the environment's.
#[derive(Parameters, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Tracker {
    /// An MLflow server.
    Mlflow {
        /// Its address, `http://…` or `https://…` [default: `$MLFLOW_TRACKING_URI`]. Never a key.
        #[cosmetic]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        uri: Option<String>,
        /// The experiment [default: the pipeline's name].
        #[cosmetic]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        experiment: Option<String>,
        /// Tags of each run, as `key=value` or `key`.
        #[cosmetic(default = Vec::new())]
        #[serde(default)]
        tags: Vec<String>,
    },
    /// Offline runs of Weights & Biases, which `wandb sync` sends.
    Wandb {
        /// The project [default: the pipeline's name].
        #[cosmetic]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        project: Option<String>,
        /// The user or team that the project belongs to.
        #[cosmetic]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        entity: Option<String>,
        /// Tags of each run.
        #[cosmetic(default = Vec::new())]
        #[serde(default)]
        tags: Vec<String>,
    },
    /// Offline runs of SwanLab, which `swanlab sync` sends.
    Swanlab {
        /// The project [default: the pipeline's name].
        #[cosmetic]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        project: Option<String>,
        /// The user or team that the project belongs to.
        #[cosmetic]
        #[serde(default, skip_serializing_if = "Option::is_none")]
        workspace: Option<String>,
        /// Tags of each run.
        #[cosmetic(default = Vec::new())]
        #[serde(default)]
        tags: Vec<String>,
    },
}

impl Tracker {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Mlflow { .. } => "mlflow",
            Self::Wandb { .. } => "wandb",
            Self::Swanlab { .. } => "swanlab",
        }
    }

    /// What the command line names: `mlflow`, `mlflow=http://127.0.0.1:5000`, `wandb`, `swanlab`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, place) = text.split_once('=').map_or((text, None), |(name, place)| (name, Some(place.to_owned())));
        let (project, tags) = (place.clone(), Vec::new());
        match name {
            "mlflow" => {
                place.as_deref().map_or(Ok(()), check_uri)?;
                Ok(Self::Mlflow { uri: place, experiment: None, tags })
            }
            "wandb" => Ok(Self::Wandb { project, entity: None, tags }),
            "swanlab" => Ok(Self::Swanlab { project, workspace: None, tags }),
            _ => Err("a tracker is `mlflow[=URI]`, `wandb[=PROJECT]` or `swanlab[=PROJECT]`".to_owned()),
        }
    }
}

/// Whether this can be the address of a server, with nothing in it that must not be recorded.
///
/// # Errors
/// What is wrong with it.
pub fn check_uri(uri: &str) -> Result<(), String> {
    let Some(rest) = uri.strip_prefix("http://").or_else(|| uri.strip_prefix("https://")) else {
        return Err(format!("`{}` is no `http://` or `https://` address", uri.split('@').next_back().unwrap_or(uri)));
    };
    if rest.contains('@') || rest.contains('?') || rest.contains('#') {
        return Err("the address of a tracker has no user, password or parameters in it".to_owned());
    }
    if rest.split('/').next().is_none_or(str::is_empty) {
        return Err(format!("`{uri}` names no server"));
    }
    Ok(())
}

/// What the file says: a tracker, or several.
#[derive(Default)]
pub(crate) struct TrackKey(pub Vec<Tracker>);

impl Parameter for TrackKey {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let nodes = match &node.value {
            Value::Null => return Some(Self::default()),
            Value::List(nodes) => nodes.iter().collect(),
            _ => vec![node],
        };
        let mut trackers: Vec<Tracker> = Vec::new();
        for node in nodes {
            let tracker = Tracker::read(node, reader)?;
            if let (Tracker::Mlflow { uri: Some(uri), .. }, Some(place)) = (&tracker, node.get("uri"))
                && let Err(error) = check_uri(uri)
            {
                reader.problems.push(bad_uri(place.span, error));
            }
            if trackers.iter().any(|other| other.name() == tracker.name()) {
                let message = format!("`{}` is named twice", tracker.name());
                reader.problems.push(Problem::error("bad-value", node.span, message, "named before"));
            }
            trackers.push(tracker);
        }
        Some(Self(trackers))
    }

    /// Who is told of a result does not decide what it is.
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        let one = Tracker::schema();
        serde_json::json!({ "anyOf": [one, { "type": "array", "items": one }] })
    }
}

fn bad_uri(span: Span, error: String) -> Problem {
    Problem::error("bad-value", span, error, "not the address of a tracker")
        .with_help("credentials are read from the environment: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Json) -> Result<Vec<Tracker>, Vec<String>> {
        let mut reader = Reader::default();
        let read = TrackKey::read(&Node::from_json(&json), &mut reader);
        let problems: Vec<String> = reader.problems.iter().map(|problem| problem.message.clone()).collect();
        if problems.is_empty() { Ok(read.unwrap().0) } else { Err(problems) }
    }

    #[test]
    fn a_word_a_mapping_or_a_list() {
        assert_eq!(read("wandb".into()).unwrap(), [Tracker::parse("wandb").unwrap()]);
        let mapping = serde_json::json!({ "name": "mlflow", "uri": "http://127.0.0.1:5000" });
        assert_eq!(read(mapping.clone()).unwrap(), [Tracker::parse("mlflow=http://127.0.0.1:5000").unwrap()]);
        assert_eq!(read(serde_json::json!([mapping, "swanlab"])).unwrap().len(), 2);
        assert!(read("mlfow".into()).unwrap_err()[0].contains("mlfow"));
        assert!(read(serde_json::json!(["wandb", "wandb"])).unwrap_err()[0].contains("twice"));
        let trackers = read(serde_json::json!([{ "name": "swanlab", "project": "x", "tags": ["a"] }])).unwrap();
        let text = serde_json::to_string(&trackers).unwrap();
        assert_eq!(serde_json::from_str::<Vec<Tracker>>(&text).unwrap(), trackers);
    }

    #[test]
    fn an_address_has_no_secrets_in_it() {
        for uri in ["ftp://host", "http://", "http://me:secret@host", "https://host?token=secret"] {
            let error = read(serde_json::json!({ "name": "mlflow", "uri": uri })).unwrap_err();
            assert!(!error[0].contains("secret"), "{error:?}");
            assert!(Tracker::parse(&format!("mlflow={uri}")).is_err());
        }
    }
}
