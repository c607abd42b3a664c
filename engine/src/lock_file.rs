//! `pipeline.lock`: what mutable references (a branch of a hub repository) were when they were first used, and what was
//! in them.
//!
//! The file belongs in git: it is sorted, and has a line for each commit and each file. It leaves to the stage kinds
//! how a pin is found.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use cache::atomic::write_atomically;
use cache::{StoreError, regular};
use serde::{Deserialize, Serialize};

use crate::error::StageError;
use crate::pin::Pinned;
use crate::plan::Plan;
use crate::stage::{Outside, PinRequest, Registry};

/// Version of the file's form.
const VERSION: u32 = 2;

/// The form before: JSON, with commits alone.
const COMMITS_ALONE: u32 = 1;

/// What the file begins with.
const HEADER: &str = "# What the branches and tags that pipelines name were when they were first used. Written by `pipeline`; belongs in git.\n";

/// The pins, by `kind:name@revision`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockFile {
    path: PathBuf,
    pins: BTreeMap<String, Pinned>,
}

/// What every version of the form says.
#[derive(Deserialize)]
struct AnyVersion {
    version: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Content<P> {
    #[serde(rename = "version")]
    _version: u32,
    pins: BTreeMap<String, P>,
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

/// What became of a pin that was asked for anew.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Its name.
    pub pin: String,
    /// What it was, if it was pinned.
    pub old: Option<Pinned>,
    pub new: Pinned,
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
    /// Two branches of the repository were merged, and nobody has decided.
    #[error("`{path}` has the marks of a merge conflict (line {line})")]
    Conflict {
        /// The file.
        path: PathBuf,
        /// The first mark, counted from 1.
        line: usize,
    },
    /// The file is not of the form that this program writes.
    #[error("`{path}` is not a lock file: {reason}")]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file has a version that this program does not know.
    #[error("`{path}` has version {found}, and this program reads versions up to {VERSION}")]
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
    #[error("{} not pinned in `{path}`, and {why}", is_or_are(.missing))]
    NotPinned {
        /// The pins, each with the stage that reads it.
        missing: Vec<(String, String)>,
        /// The lock file.
        path: PathBuf,
        /// What forbids it.
        why: &'static str,
    },
    /// The stage kind could not find out.
    #[error("cannot find out what `{pin}`, which stage `{stage}` reads, is currently")]
    Resolve {
        /// The pin's name.
        pin: String,
        stage: String,
        /// The cause.
        source: Box<StageError>,
    },
}

impl LockError {
    /// What to do about it.
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Conflict { .. } => Some(
                "keep either side of each conflict, or neither, and remove the marks; `pipeline lock FILE` adds what is missing"
                    .to_owned(),
            ),
            Self::Form { .. } => {
                Some("restore it from git, or remove it: `pipeline lock FILE` writes a new one".to_owned())
            }
            Self::Version { .. } => Some("a newer version of this program wrote it: use that".to_owned()),
            Self::NotPinned { .. } => {
                Some("`pipeline lock FILE` pins it, where the network may be used; the file belongs in git".to_owned())
            }
            Self::Resolve { source, .. } => source.help.clone(),
            Self::Read { .. } | Self::Write(_) => None,
        }
    }
}

impl LockFile {
    /// Reads the file; one that does not exist holds no pins.
    ///
    /// # Errors
    /// Fails where it cannot be read or is not a lock file.
    pub fn read(path: &Path) -> Result<Self, LockError> {
        let path = path.to_owned();
        let text = match regular::open(&path).and_then(io::read_to_string) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self { path, pins: BTreeMap::new() }),
            Err(source) => return Err(LockError::Read { path, source }),
        };
        let pins = parse(&path, &text)?;
        Ok(Self { path, pins })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What something is pinned to.
    pub fn get(&self, request: &PinRequest) -> Option<&Pinned> {
        self.pins.get(&name(request))
    }

    /// All pins, by name.
    pub fn pins(&self) -> &BTreeMap<String, Pinned> {
        &self.pins
    }

    /// What the stages of a plan read and nothing is pinned for.
    pub fn missing<'a>(&self, plan: &'a Plan) -> Vec<(&'a str, PinRequest)> {
        let mut wanted = wanted(plan);
        wanted.retain(|(_, request)| self.get(request).is_none());
        wanted
    }

    /// Pins everything that the plan reads and that is not pinned yet, and writes the file if anything was. Says what
    /// was added.
    ///
    /// # Errors
    /// Fails where a pin is missing and may not be made, cannot be found, or the file cannot be written.
    pub fn resolve(&mut self, plan: &Plan, registry: &Registry, pinning: Pinning) -> Result<Vec<Change>, LockError> {
        let missing = self.missing(plan);
        if missing.is_empty() {
            return Ok(Vec::new());
        }
        let refuse = |why| {
            let missing = missing.iter().map(|(stage, request)| (name(request), (*stage).to_owned())).collect();
            Err(LockError::NotPinned { missing, path: self.path.clone(), why })
        };
        match pinning {
            Pinning::Resolve => {}
            Pinning::Locked => return refuse("`--locked` forbids to change that file"),
            Pinning::Offline => return refuse("`--offline` forbids to look it up"),
        }
        let mut changes = Vec::new();
        for (stage, request) in missing {
            changes.push(Change { pin: name(&request), old: None, new: find(plan, registry, stage, &request)? });
        }
        // Finding out may have taken long: what another run has pinned meanwhile stands.
        let meanwhile = Self::read(&self.path)?.pins;
        changes.retain(|change| !meanwhile.contains_key(&change.pin));
        self.pins.extend(meanwhile);
        self.take(&changes);
        self.write()?;
        Ok(changes)
    }

    /// Finds out anew what the things are that the plan reads, or those of them that `names` means (a pin's name, a
    /// repository, or a repository and a revision). Says what differs; [`LockFile::accept`] writes it down.
    ///
    /// # Errors
    /// Fails where one cannot be found.
    pub fn outdated(&self, plan: &Plan, registry: &Registry, names: &[String]) -> Result<Vec<Change>, LockError> {
        let mut changes = Vec::new();
        for (stage, request) in wanted(plan) {
            if !names.is_empty() && !names.iter().any(|name| is_meant(name, &request)) {
                continue;
            }
            let old = self.get(&request).cloned();
            let new = find(plan, registry, stage, &request)?;
            if old.as_ref() != Some(&new) {
                changes.push(Change { pin: name(&request), old, new });
            }
        }
        Ok(changes)
    }

    /// Writes changes down.
    ///
    /// # Errors
    /// Fails where the file cannot be written.
    pub fn accept(&mut self, changes: &[Change]) -> Result<(), LockError> {
        self.pins = Self::read(&self.path)?.pins;
        self.take(changes);
        self.write()
    }

    fn take(&mut self, changes: &[Change]) {
        self.pins.extend(changes.iter().map(|change| (change.pin.clone(), change.new.clone())));
    }

    fn write(&self) -> Result<(), LockError> {
        write_atomically(&self.path, self.text().as_bytes()).map_err(LockError::Write)
    }

    /// The file's form: YAML, in which each text is quoted as JSON would, so that no commit is taken for a number.
    fn text(&self) -> String {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let mut text = format!("{HEADER}version: {VERSION}\npins:");
        if self.pins.is_empty() {
            text.push_str(" {}\n");
            return text;
        }
        text.push('\n');
        for (name, Pinned { commit, files }) in &self.pins {
            let _ = writeln!(text, "  {}:\n    commit: {}", quoted(name), quoted(commit));
            if !files.is_empty() {
                text.push_str("    files:\n");
            }
            for (file, checksum) in files {
                let _ = writeln!(text, "      {}: {}", quoted(file), quoted(checksum));
            }
        }
        text
    }
}

/// A pin's name: `kind:name@revision`.
pub fn name(request: &PinRequest) -> String {
    format!("{}:{}@{}", request.kind, request.name, request.revision)
}

/// Whether a user who says `name` means this pin.
pub fn is_meant(name: &str, request: &PinRequest) -> bool {
    let revision = format!("{}@{}", request.name, request.revision);
    name == request.name || name == revision || name == self::name(request)
}

/// Everything that the stages of a plan read and that is to be pinned, each once, with the first stage that reads it.
pub fn wanted(plan: &Plan) -> Vec<(&str, PinRequest)> {
    let mut seen = BTreeSet::new();
    let of_stages = plan
        .stages
        .iter()
        .flat_map(|stage| requests(stage.bound.outside()).into_iter().map(move |request| (stage.id.as_str(), request)));
    of_stages.filter(|(_, request)| seen.insert(name(request))).collect()
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

fn find(plan: &Plan, registry: &Registry, stage: &str, request: &PinRequest) -> Result<Pinned, LockError> {
    let kind = plan.stages.iter().find(|planned| planned.id == stage).map_or("", |planned| planned.kind);
    let found = registry
        .get(kind)
        .map_or_else(|| Err(StageError::internal(format!("no stage kind `{kind}`"))), |kind| (kind.pin)(request));
    let (pin, stage) = (name(request), stage.to_owned());
    found.map_err(|source| LockError::Resolve { pin, stage, source: Box::new(source) })
}

fn parse(path: &Path, text: &str) -> Result<BTreeMap<String, Pinned>, LockError> {
    let is_mark = |line: &str| line.starts_with("<<<<<<< ") || line.starts_with(">>>>>>> ");
    if let Some(line) = text.lines().position(is_mark) {
        return Err(LockError::Conflict { path: path.to_owned(), line: line + 1 });
    }
    let form = |error: serde_yaml::Error| {
        // What follows the first line is the text with a mark, which a lock file of thousands of lines does not need.
        let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
        LockError::Form { path: path.to_owned(), reason }
    };
    let pins: BTreeMap<String, Pinned> = match serde_yaml::from_str::<AnyVersion>(text).map_err(form)?.version {
        VERSION => serde_yaml::from_str::<Content<Pinned>>(text).map_err(form)?.pins,
        COMMITS_ALONE => {
            let pins = serde_yaml::from_str::<Content<String>>(text).map_err(form)?.pins;
            pins.into_iter().map(|(name, commit)| (name, Pinned::commit(commit))).collect()
        }
        found => return Err(LockError::Version { path: path.to_owned(), found }),
    };
    // What stands here is asked for as it is, and a thing that moves would pass as one that is pinned.
    match pins.iter().find_map(|(name, pinned)| Some((name, pinned.fault()?))) {
        Some((name, fault)) => Err(LockError::Form { path: path.to_owned(), reason: format!("`{name}`: {fault}") }),
        None => Ok(pins),
    }
}

/// `` `a` (stage `x`) is`` or `` `a` (stage `x`) and `b` (stage `y`) are``.
fn is_or_are(missing: &[(String, String)]) -> String {
    let named: Vec<String> = missing.iter().map(|(pin, stage)| format!("`{pin}` (stage `{stage}`)")).collect();
    format!("{} {}", named.join(" and "), if named.len() == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests {
    use std::fs;

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

    fn change(pin: &str, commit: &str, files: &[(&str, &str)]) -> Change {
        let files = files.iter().map(|(name, checksum)| (name.to_string(), checksum.to_string())).collect();
        Change { pin: name(&request(pin)), old: None, new: Pinned { commit: commit.into(), files } }
    }

    #[test]
    fn reads_what_it_wrote_sorted_with_a_line_for_each_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipeline.lock");
        let mut lock = LockFile::read(&path).unwrap();
        assert_eq!(lock.get(&request("z/model")), None);
        // A commit that YAML would take for a number, and names that need their quotes.
        let (number, other) = (format!("0123e{:035}", 45), format!("{:040}", 222));
        let (git, sha256) = (format!("git:{:040} 2", 1), format!("sha256:{:064} 4", 3));
        let odd = [("a: b #c.json", git.as_str()), ("\"q\"", &sha256), ("no", &git)];
        lock.accept(&[change("z/model", &number, &odd), change("a/model", &other, &[])]).unwrap();
        let again = LockFile::read(&path).unwrap();
        assert_eq!(again, lock);
        assert_eq!(again.get(&request("z/model")).unwrap().commit, number);
        assert_eq!(again.get(&request("z/model")).unwrap().files.len(), 3);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.find("hub-model:a/model@main").unwrap() < text.find("hub-model:z/model@main").unwrap());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn reads_the_form_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipeline.lock");
        let commit = format!("{:040}", 123);
        let text =
            format!("{{\n  \"version\": 1,\n  \"pins\": {{\n    \"hub-model:a/b@main\": \"{commit}\"\n  }}\n}}\n");
        fs::write(&path, text).unwrap();
        assert_eq!(LockFile::read(&path).unwrap().get(&request("a/b")), Some(&Pinned::commit(commit)));
    }

    #[test]
    fn refuses_what_pins_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipeline.lock");
        for text in [
            "version: 2\npins: { \"hub-model:a/b@main\": { commit: \"main\" } }",
            "version: 1\npins: { \"hub-model:a/b@main\": \"../../etc\" }",
        ] {
            fs::write(&path, text).unwrap();
            let error = LockFile::read(&path).unwrap_err();
            assert!(matches!(&error, LockError::Form { .. }), "{error:?}");
            assert!(error.to_string().contains("`hub-model:a/b@main`") && error.help().is_some(), "{error}");
        }
    }

    #[test]
    fn refuses_what_it_does_not_understand() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipeline.lock");
        let read = |text: &str| {
            fs::write(&path, text).unwrap();
            LockFile::read(&path).unwrap_err()
        };
        let conflict = "version: 2\npins:\n<<<<<<< HEAD\n  \"a\": 1\n=======\n>>>>>>> other\n";
        assert!(matches!(read(conflict), LockError::Conflict { line: 3, .. }));
        assert!(matches!(read("version: 9\nwhat: ever\n"), LockError::Version { found: 9, .. }));
        let twice = "version: 2\npins:\n  \"a\": { commit: \"1\" }\n  \"a\": { commit: \"2\" }\n";
        for text in
            ["", "pins: {}", "version: 2\npins: { \"a\": { comit: \"1\" } }", "version: 2\npins: {}\nmore: 1", twice]
        {
            assert!(matches!(read(text), LockError::Form { .. }), "{text}");
        }
    }
}
