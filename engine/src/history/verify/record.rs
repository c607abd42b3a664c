//! What is recorded of a result, in several places, held against each other: all hang on the key, whose digest nobody
//! can make up.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use cache::{Digest, Examined, KeyDocument, OutputRecord, ResultRecord, Store, StoreError, Verify};
use serde_json::{Map, Value};

use crate::context::pick;
use crate::file::tree::Node;
use crate::history::folder::{JOB_FILE, RESULT_FILE};
use crate::history::recorded::Recorded;
use crate::home::Home;
use crate::keys::{PIN, push_kinds};
use crate::parameter::{KeyWriter, Reader, Reference};
use crate::protocol::Job;
use crate::stage::Registry;

/// The records of one result.
pub(super) struct Records {
    stage: String,
    key: Digest,
    /// What its process was told.
    pub job: Option<Job>,
    /// What came out, by the events of the run.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// The run's copy, and the store's record, each with its name.
    copies: Vec<(String, Result<ResultRecord, String>)>,
    program: String,
    /// Files that are no record at all.
    unreadable: Vec<String>,
}

impl Records {
    /// Reads what there is, and changes nothing: who asks the store for a result that is damaged makes it forget it.
    pub(super) fn read(home: &Home, store: &Store, run: &Recorded, stage: &str, key: &Digest) -> Self {
        let kept = run.stage_folder(stage).join(RESULT_FILE);
        let copy = fs::read(&kept).ok().map(|text| {
            let record = serde_json::from_slice(&text).map_err(|error| format!("cannot be read: {error}"));
            (below(home, &kept), record)
        });
        let stored = match store.examine(key) {
            Ok(Examined::None) => None,
            Ok(Examined::Sound(record)) => Some(Ok(*record)),
            Ok(Examined::Damaged) => Some(Err("is not what was written".to_owned())),
            Err(error) => Some(Err(format!("cannot be read: {error}"))),
        };
        let stored = stored.map(|record| (format!("store/results/{key}.json"), record));
        let copies = copy.into_iter().chain(stored);
        let job_file = run.stage_folder(stage).join(JOB_FILE);
        let job = fs::read(&job_file).ok().map(|text| serde_json::from_slice::<Job>(&text));
        let unreadable = match &job {
            // What is JSON and no job is of another version of this program, and no damage.
            Some(Err(error)) if !error.is_data() => {
                vec![format!("`{}` cannot be read: {error}", below(home, &job_file))]
            }
            Some(_) | None => Vec::new(),
        };
        Self {
            stage: stage.to_owned(),
            key: *key,
            job: job.and_then(Result::ok),
            outputs: run.stage(stage).map(|stage| stage.outputs.clone()).unwrap_or_default(),
            copies: copies.collect(),
            program: run.program.clone(),
            unreadable,
        }
    }

    /// Where the records contradict each other.
    pub(super) fn contradictions(&self, registry: &Registry) -> Vec<String> {
        let mut found = self.unreadable.clone();
        for (name, copy) in &self.copies {
            match copy {
                Err(how) => found.push(format!("`{name}` {how}")),
                Ok(record) if record.key.result_key() != self.key => {
                    found.push(format!("`{name}` does not belong to its key {}", self.key.short()));
                }
                Ok(record) => found.extend(self.other_outputs(name, record)),
            }
        }
        if let (Some(job), Some(document)) = (&self.job, self.document()) {
            found.extend(self.job_against_key(job, document, registry));
        }
        found
    }

    /// What explains a difference that nobody is to blame for.
    pub(super) fn notes(&self, registry: &Registry) -> Vec<String> {
        let mut notes = Vec::new();
        let program = env!("CARGO_PKG_VERSION");
        if self.program != program {
            notes.push(format!("it was made by version {} of this program, which is {program}", self.program));
        }
        let recorded = self.document().and_then(|document| document.get("@version"));
        let kind = self.job.as_ref().and_then(|job| registry.get(&job.kind));
        if let (Some(recorded), Some(kind)) = (recorded, kind)
            && recorded != kind.version.to_string()
        {
            let now = kind.version;
            notes.push(format!("it was made by version {recorded} of its kind, which is {now} now"));
        }
        notes
    }

    /// What a result that is made now was computed by, where that is not what the recorded one was: it explains a
    /// difference in the last digits.
    pub(super) fn otherwise_computed(&self, how: &Map<String, Value>) -> Vec<String> {
        /// Facts of how a result came about that its bits may depend on.
        const DECISIVE: [&str; 2] = ["backend", "kernel_set"];
        let recorded = self.copies.iter().find_map(|(_, copy)| copy.as_ref().ok()).map(|record| &record.how);
        let text = |how: &Map<String, Value>, name: &str| how.get(name).and_then(Value::as_str).map(str::to_owned);
        let differs = |name: &&str| {
            let (before, now) = (text(recorded?, name)?, text(how, name)?);
            (before != now).then(|| format!("it was computed by {before}, and now by {now}: last digits may differ"))
        };
        DECISIVE.iter().filter_map(differs).collect()
    }

    /// Stored files of the outputs that are not what they were.
    pub(super) fn damaged_outputs(&self, store: &Store) -> Vec<String> {
        let mut found = Vec::new();
        for (name, output) in &self.outputs {
            let tree = match store.tree(&output.tree) {
                Ok(tree) => tree,
                // What was collected is no damage.
                Err(StoreError::MissingTree { .. }) => continue,
                Err(error) => {
                    found.push(format!("output `{name}`: {error}"));
                    continue;
                }
            };
            for file in tree.files() {
                match store.check(file, Verify::Contents) {
                    // A file of the user's is no part of the store, and the job that left it there is not done again
                    // unless it is what it was.
                    Ok(()) | Err(StoreError::MissingObject { .. } | StoreError::Outside { .. }) => {}
                    Err(_) => {
                        let (path, short) = (&file.path, file.digest.short());
                        found.push(format!("output `{name}`: `{path}` (object {short}) is damaged in the store"));
                    }
                }
            }
        }
        found
    }

    /// The key document, from a record whose digest shows that it is the right one.
    fn document(&self) -> Option<&KeyDocument> {
        let records = self.copies.iter().filter_map(|(_, copy)| copy.as_ref().ok());
        records.map(|record| &record.key).find(|document| document.result_key() == self.key)
    }

    fn other_outputs(&self, name: &str, record: &ResultRecord) -> Vec<String> {
        let differs = |(output, recorded): (&String, &OutputRecord)| {
            let other = record.outputs.get(output);
            let same = other.is_some_and(|other| {
                (other.tree, other.identity, &other.kind) == (recorded.tree, recorded.identity, &recorded.kind)
            });
            (!same).then(|| format!("`{name}` and the events of the run disagree on output `{output}`"))
        };
        self.outputs.iter().filter_map(differs).collect()
    }

    /// Where the job would have had another key. A field that this version of the kind has and that one had not is no
    /// difference.
    fn job_against_key(&self, job: &Job, document: &KeyDocument, registry: &Registry) -> Vec<String> {
        let stage = &self.stage;
        let mut found = Vec::new();
        let mut differs = |path: &str, now: &str| {
            if let Some(recorded) = document.get(path).filter(|recorded| *recorded != now) {
                found.push(format!("the job of `{stage}` has `{path}` {now}, and its key has {recorded}"));
            }
        };
        for (role, grants) in &job.files {
            for (order, grant) in grants.iter().enumerate() {
                let path = format!("@files.{role}[{order}]");
                let name = document.get(&path).and_then(|value| value.rsplit_once(' ')).map_or("", |(name, _)| name);
                differs(&path, &format!("{name} {}", grant.digest));
            }
        }
        for (name, pinned) in &job.pins {
            differs(&format!("{PIN}{name}"), &pinned.commit);
        }
        let of_this_version =
            |kind: &crate::stage::Kind| document.get("@version") == Some(kind.version.to_string().as_str());
        if let Some(kind) = registry.get(&job.kind).filter(|kind| of_this_version(kind)) {
            match told(job, kind) {
                Some(now) => now.entries.iter().for_each(|entry| differs(&entry.path, &entry.value)),
                None => found.push(format!("the job of `{stage}` is not valid for its kind")),
            }
        }
        found
    }
}

/// The part of a key that follows from the parameters and inputs of a job.
fn told(job: &Job, kind: &crate::stage::Kind) -> Option<KeyDocument> {
    let mut reader = Reader::default();
    let bound = kind.read(&Node::from_json(&job.parameters), &mut reader);
    let bound = bound.filter(|_| reader.problems.is_empty())?;
    let granted = |reference: &Reference, kinds: &[&str]| {
        let granted = job.inputs.iter().filter_map(|(name, grant)| {
            let output = name.strip_prefix(&reference.stage)?.strip_prefix('.')?;
            Some((grant, output, grant.kind.as_str()))
        });
        pick(reference, kinds, granted)
    };
    let identity = |reference: &Reference, kinds: &'static [&'static str]| Some(granted(reference, kinds)?.identity);
    let mut document = KeyDocument::default();
    let mut writer = KeyWriter::new(&mut document, &identity);
    bound.write_whole_key(&mut writer);
    let of_any_kind = std::mem::take(&mut writer.of_any_kind);
    push_kinds(&mut document, of_any_kind, |reference| Some(granted(reference, &[])?.kind.as_str()));
    Some(document)
}

/// A path as it is named to people: below the home.
fn below(home: &Home, path: &Path) -> String {
    path.strip_prefix(home.root()).unwrap_or(path).display().to_string()
}
