//! `pipeline.lock`: what moving things (a branch of a hub repository) were when they were first used.
//!
//! The file belongs in git, so it is sorted and changes by one line per pin. It leaves to the stage kinds how a pin is found.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::StoreError;
use cache::atomic::write_atomically;
use serde::{Deserialize, Serialize};

use crate::error::StageError;
use crate::plan::Plan;
use crate::stage::{Outside, PinRequest, Registry};

/// Version of the file's form.
const VERSION: u32 = 1;

/// The pins, by `kind:name@revision`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockFile {
    path: PathBuf,
    pins: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    pins: BTreeMap<String, String>,
}

/// What a run may do about things that are not pinned yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pinning {
    /// Go out, ask, and write the answer down.
    #[default]
    Resolve,
    /// `--locked`: refuse to change the file.
    Locked,
    /// `--offline`: refuse to go out.
    Offline,
}

/// Why pins could not be read or made.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The file could not be read.
    #[error("cannot read `{path}`")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not of the form that this program writes.
    #[error("`{path}` is not a lock file of this version of the program")]
    Form {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// The file has a version that this program does not know.
    #[error("`{path}` has version {found}, and this program reads version {VERSION}")]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: u32,
    },
    /// The file could not be written.
    #[error("the pins cannot be written down")]
    Write(#[source] StoreError),
    /// Something is not pinned and may not be.
    #[error("`{pin}`, which stage `{stage}` reads, is not pinned in `{path}`, and {why}")]
    NotPinned {
        /// The pin's name.
        pin: String,
        /// The stage.
        stage: String,
        /// The lock file.
        path: PathBuf,
        /// What forbids it.
        why: &'static str,
    },
    /// The stage kind could not find out.
    #[error("cannot find out what `{pin}`, which stage `{stage}` reads, is at present")]
    Resolve {
        /// The pin's name.
        pin: String,
        /// The stage.
        stage: String,
        /// The cause.
        source: Box<StageError>,
    },
}

impl LockFile {
    /// Reads the file; one that does not exist holds no pins.
    ///
    /// # Errors
    /// Fails where it cannot be read or is not a lock file.
    pub fn read(path: &Path) -> Result<Self, LockError> {
        let path = path.to_owned();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self { path, pins: BTreeMap::new() }),
            Err(source) => return Err(LockError::Read { path, source }),
        };
        let content: Content =
            serde_json::from_str(&text).map_err(|source| LockError::Form { path: path.clone(), source })?;
        if content.version != VERSION {
            return Err(LockError::Version { path, found: content.version });
        }
        Ok(Self { path, pins: content.pins })
    }

    /// What something is pinned to.
    pub fn get(&self, request: &PinRequest) -> Option<&str> {
        self.pins.get(&name(request)).map(String::as_str)
    }

    /// All pins, by name.
    pub fn pins(&self) -> &BTreeMap<String, String> {
        &self.pins
    }

    /// What the stages of a plan read and nothing is pinned for.
    pub fn missing<'a>(&self, plan: &'a Plan) -> Vec<(&'a str, PinRequest)> {
        let mut seen = BTreeSet::new();
        let requests = plan.stages.iter().flat_map(|stage| {
            requests(stage.bound.outside()).into_iter().map(move |request| (stage.id.as_str(), request))
        });
        requests.filter(|(_, request)| self.get(request).is_none() && seen.insert(name(request))).collect()
    }

    /// Pins everything that the plan reads and that is not pinned yet, and writes the file if anything was.
    ///
    /// # Errors
    /// Fails where a pin is missing and may not be made, cannot be found, or the file cannot be written.
    pub fn resolve(&mut self, plan: &Plan, registry: &Registry, pinning: Pinning) -> Result<(), LockError> {
        let missing = self.missing(plan);
        if missing.is_empty() {
            return Ok(());
        }
        for (stage, request) in missing {
            let pin = name(&request);
            let refuse =
                |why| LockError::NotPinned { pin: pin.clone(), stage: stage.to_owned(), path: self.path.clone(), why };
            match pinning {
                Pinning::Resolve => {}
                Pinning::Locked => return Err(refuse("`--locked` forbids to change that file")),
                Pinning::Offline => return Err(refuse("`--offline` forbids to look it up")),
            }
            let kind = plan.stages.iter().find(|planned| planned.id == stage).map_or("", |planned| planned.kind);
            let found = registry.get(kind).map_or_else(
                || Err(StageError::internal(format!("no stage kind `{kind}`"))),
                |kind| kind.pin(&request),
            );
            let version = found.map_err(|source| LockError::Resolve {
                pin: pin.clone(),
                stage: stage.to_owned(),
                source: Box::new(source),
            })?;
            self.pins.insert(pin, version);
        }
        // Finding out may have taken long: what another run has pinned meanwhile stands.
        self.pins.append(&mut Self::read(&self.path)?.pins);
        self.write()
    }

    fn write(&self) -> Result<(), LockError> {
        let content = Content { version: VERSION, pins: self.pins.clone() };
        let mut text = serde_json::to_string_pretty(&content).expect("pins are strings");
        text.push('\n');
        write_atomically(&self.path, text.as_bytes()).map_err(LockError::Write)
    }
}

/// A pin's name: `kind:name@revision`.
pub fn name(request: &PinRequest) -> String {
    format!("{}:{}@{}", request.kind, request.name, request.revision)
}

/// The pin requests among the things that a stage reads from outside.
pub fn requests(outside: Vec<Outside>) -> Vec<PinRequest> {
    outside
        .into_iter()
        .filter_map(|outside| match outside {
            Outside::Pin(request) => Some(request),
            Outside::Files { .. } => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;
    use crate::file::source::Span;

    fn request(name: &str) -> PinRequest {
        PinRequest {
            kind: "hub-model".into(),
            name: name.into(),
            revision: "main".into(),
            token_env: None,
            span: Span::default(),
        }
    }

    #[test]
    fn reads_what_it_wrote_sorted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipeline.lock");
        let mut lock = LockFile::read(&path).unwrap();
        assert_eq!(lock.get(&request("z/model")), None);
        lock.pins.insert(name(&request("z/model")), "111".into());
        lock.pins.insert(name(&request("a/model")), "222".into());
        lock.write().unwrap();
        let again = LockFile::read(&path).unwrap();
        assert_eq!(again, lock);
        assert_eq!(again.get(&request("z/model")), Some("111"));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.find("hub-model:a/model@main").unwrap() < text.find("hub-model:z/model@main").unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn refuses_what_it_does_not_understand() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipeline.lock");
        fs::write(&path, "<<<<<<< HEAD").unwrap();
        assert!(matches!(LockFile::read(&path), Err(LockError::Form { .. })));
        fs::write(&path, r#"{ "version": 9, "pins": {} }"#).unwrap();
        assert!(matches!(LockFile::read(&path), Err(LockError::Version { found: 9, .. })));
    }
}
