//! Where an artefact comes from: every result on the way to it, back to source files and pinned versions.

use std::collections::BTreeMap;

use cache::{Digest, OutputRecord, ResultRecord, Store};
use serde::Serialize;
use serde_json::{Map, Value};

use super::Words;
use super::index::History;
use super::recorded::Recorded;
use super::results::{LookUpError, Origin};
use crate::home::Home;
use crate::keys::PIN;

/// The results that led to one, that one first; each once.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Provenance {
    pub results: Vec<Ancestor>,
}

/// A result on the way.
#[derive(Debug, Clone, Serialize)]
pub struct Ancestor {
    pub key: Digest,
    /// The kind of stage that made it.
    pub kind: String,
    pub version: String,
    /// The stage that made it, where the record of its run is still there.
    pub stage: Option<String>,
    /// The run that made it.
    pub run: Option<String>,
    /// The parameters as the file gave them, where the record of the run is still there; else those of the key,
    /// defaults filled in.
    pub parameters: Value,
    /// How it came about: kernel set, threads, program, machine, time.
    pub how: Map<String, Value>,
    /// What was made.
    pub outputs: BTreeMap<String, OutputRecord>,
    pub files: Vec<SourceFile>,
    /// Pinned versions by `kind:name@revision`.
    pub pins: BTreeMap<String, String>,
    pub inputs: Vec<InputOrigin>,
}

/// A source file of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SourceFile {
    /// What it is for, and which of several, as `source[0]`.
    pub role: String,
    /// Where it lay, where that is known.
    pub path: Option<std::path::PathBuf>,
    /// The digest of its content.
    pub digest: String,
    /// Its length in bytes, where that is known.
    pub size: Option<u64>,
}

/// An input of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InputOrigin {
    /// The parameter that takes it.
    pub field: String,
    /// Its name, as `stage.output`, where that is known.
    pub name: Option<String>,
    /// What it is, to whoever reads it.
    pub identity: Digest,
    /// The key of the result that it belongs to; `None` where all trace of that is gone.
    pub key: Option<Digest>,
}

/// Follows results back.
pub struct Tracer<'a> {
    home: &'a Home,
    history: &'a History,
    store: &'a Store,
    /// The results of the store by the identities of their outputs; listed when first needed.
    by_identity: Option<BTreeMap<Digest, Digest>>,
}

impl<'a> Tracer<'a> {
    /// One that has followed nothing yet.
    pub fn new(home: &'a Home, history: &'a History, store: &'a Store) -> Self {
        Self { home, history, store, by_identity: None }
    }

    /// Everything that led to the result of a key.
    ///
    /// # Errors
    /// Fails where the index or the store does. What is gone is no error: it ends the way back.
    pub fn trace(&mut self, key: &Digest) -> Result<Provenance, LookUpError> {
        let mut provenance = Provenance::default();
        let mut open = vec![*key];
        while let Some(key) = open.pop() {
            if provenance.get(&key).is_some() {
                continue;
            }
            let Some(ancestor) = self.ancestor(&key)? else { continue };
            open.extend(ancestor.inputs.iter().rev().filter_map(|input| input.key));
            provenance.results.push(ancestor);
        }
        Ok(provenance)
    }

    fn ancestor(&mut self, key: &Digest) -> Result<Option<Ancestor>, LookUpError> {
        let Some(origin) = Origin::find(self.home, self.history, self.store, key)? else { return Ok(None) };
        let maker = origin.by.as_ref().and_then(|(run, _)| Recorded::read(&self.home.run(run), Words::Skip));
        let inputs = self.inputs(&origin, maker.as_ref())?;
        let Origin { by, record, job, .. } = origin;
        let (run, stage) = by.unzip();
        let parameters = job.as_ref().map_or_else(|| keyed(&record), |job| job.parameters.clone());
        Ok(Some(Ancestor {
            key: *key,
            kind: record.kind.clone(),
            version: record.key.get("@version").unwrap_or_default().to_owned(),
            stage,
            run: run.or_else(|| record.how.get("run").and_then(Value::as_str).map(str::to_owned)),
            parameters,
            files: files(&record, job.as_ref()),
            pins: pins(&record),
            inputs,
            how: record.how,
            outputs: record.outputs,
        }))
    }

    /// The inputs by the identities in the key, each followed by the run's own plan, else by who makes such a thing.
    fn inputs(&mut self, origin: &Origin, maker: Option<&Recorded>) -> Result<Vec<InputOrigin>, LookUpError> {
        let entries = origin.record.key.entries.iter().filter(|entry| !entry.path.starts_with('@'));
        let identities = entries.filter_map(|entry| Some((entry.path.clone(), entry.value.parse::<Digest>().ok()?)));
        let mut found = Vec::new();
        for (field, identity) in identities {
            let granted = origin.job.iter().flat_map(|job| &job.inputs);
            let name = granted.filter(|(_, grant)| grant.identity == identity).map(|(name, _)| name.clone()).next();
            let of_run = name.as_ref().and_then(|name| {
                let (stage, _) = name.rsplit_once('.')?;
                maker?.stage(stage)?.summary.key
            });
            let key = match of_run {
                Some(key) => Some(key),
                None => self.maker_of(&identity)?,
            };
            found.push(InputOrigin { field, name, identity, key });
        }
        Ok(found)
    }

    fn maker_of(&mut self, identity: &Digest) -> Result<Option<Digest>, LookUpError> {
        if self.by_identity.is_none() {
            let results = self.store.results()?;
            let of_result = |(key, record): &(Digest, ResultRecord)| {
                let key = *key;
                record.outputs.values().map(move |output| (output.identity, key)).collect::<Vec<_>>()
            };
            self.by_identity = Some(results.iter().flat_map(of_result).collect());
        }
        Ok(self.by_identity.as_ref().and_then(|by_identity| by_identity.get(identity).copied()))
    }
}

impl Provenance {
    /// The result of a key.
    pub fn get(&self, key: &Digest) -> Option<&Ancestor> {
        self.results.iter().find(|ancestor| ancestor.key == *key)
    }
}

/// The parameters that a key holds.
fn keyed(record: &ResultRecord) -> Value {
    let entries = record.key.entries.iter().filter(|entry| !entry.path.starts_with('@'));
    let values = entries.filter(|entry| entry.value.parse::<Digest>().is_err());
    Value::Object(values.map(|entry| (entry.path.clone(), entry.value.clone().into())).collect())
}

fn files(record: &ResultRecord, job: Option<&crate::protocol::Job>) -> Vec<SourceFile> {
    let granted = job.iter().flat_map(|job| &job.files).flat_map(|(role, grants)| {
        grants.iter().enumerate().map(move |(order, grant)| (format!("{role}[{order}]"), grant))
    });
    let granted: BTreeMap<String, _> = granted.collect();
    let entries = record.key.entries.iter().filter_map(|entry| {
        let role = entry.path.strip_prefix("@files.")?;
        let (_, digest) = entry.value.rsplit_once(' ')?;
        let grant = granted.get(role);
        Some(SourceFile {
            role: role.to_owned(),
            path: grant.map(|grant| grant.path.clone()),
            digest: digest.to_owned(),
            size: grant.map(|grant| grant.size),
        })
    });
    entries.collect()
}

fn pins(record: &ResultRecord) -> BTreeMap<String, String> {
    let entries = record.key.entries.iter();
    let pins = entries.filter_map(|entry| Some((entry.path.strip_prefix(PIN)?.to_owned(), entry.value.clone())));
    pins.collect()
}
