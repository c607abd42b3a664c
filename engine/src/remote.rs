//! `remote:` in a pipeline file: where results are shared, and whether this pipeline's are sent there.

use std::collections::BTreeMap;
use std::path::Path;

use cache::remote::{BadPlace, Remote, RemoteError, RemotePlace};
use cache::{Digest, ResultRecord, Store};

use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{Json, KeyWriter, Parameter, Parameters, Reader};

/// The shared cache of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteSettings {
    /// Where it is.
    pub place: RemotePlace,
    /// Whether a run sends what it makes.
    pub push: bool,
}

/// What the file says of it.
pub(crate) struct RemoteKey {
    keys: RemoteKeys,
    span: Span,
}

/// The long form.
#[derive(Parameters)]
struct RemoteKeys {
    /// Where it is: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder` or a folder. Never a key.
    #[cosmetic]
    url: String,
    /// Whether a run sends what it makes.
    #[cosmetic(default = false)]
    push: bool,
    /// A server other than the service's own, such as `https://minio.example`.
    #[cosmetic]
    endpoint: Option<String>,
    /// The region of an S3 bucket.
    #[cosmetic]
    region: Option<String>,
}

impl RemoteKey {
    /// The settings of a file that is in `folder`.
    pub(crate) fn settings(&self, folder: &Path) -> Result<RemoteSettings, BadPlace> {
        let RemoteKeys { url, push, endpoint, region } = &self.keys;
        let mut place = RemotePlace::parse(url, folder)?;
        if let Some(endpoint) = endpoint {
            place = place.with_endpoint(endpoint)?;
        }
        if let Some(region) = region {
            place = place.with_region(region)?;
        }
        Ok(RemoteSettings { place, push: *push })
    }

    /// What is wrong with it.
    pub(crate) fn problem(&self) -> Option<Problem> {
        let error = self.settings(Path::new("/")).err()?;
        Some(Problem::error("bad-remote", self.span, error.to_string(), "not a remote").with_help(error.help()))
    }
}

impl Parameter for RemoteKey {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let keys = match &node.value {
            Value::String(url) => RemoteKeys { url: url.clone(), push: false, endpoint: None, region: None },
            _ => RemoteKeys::read(node, reader)?,
        };
        let whole = node.get("url").unwrap_or(node);
        Some(Self { keys, span: whole.span })
    }

    /// Where a result lies does not decide what it is.
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        serde_json::json!({ "anyOf": [String::schema(), RemoteKeys::schema()] })
    }
}

/// Asks a shared cache for one result after another, for as long as it answers.
pub struct Asking<'a> {
    place: &'a RemotePlace,
    store: &'a Store,
    remote: Option<Remote>,
    failed: Option<RemoteError>,
    refused: BTreeMap<Digest, RemoteError>,
}

impl<'a> Asking<'a> {
    /// Asks this one. What it has is remembered in the store.
    pub fn new(place: &'a RemotePlace, store: &'a Store) -> Self {
        Self { place, store, remote: None, failed: None, refused: BTreeMap::new() }
    }

    /// The result of a key, if the shared cache has one.
    pub fn result(&mut self, key: &Digest) -> Option<ResultRecord> {
        if self.failed.is_some() {
            return None;
        }
        let found = self.ask(key);
        match found {
            Ok(Ok(record)) => {
                // A convenience for the next command; this one goes on without it.
                let _ = record.as_ref().map(|record| self.store.remember(record));
                record
            }
            Ok(Err(refused)) => {
                self.refused.insert(*key, refused);
                None
            }
            Err(failed) => {
                self.failed = Some(failed);
                None
            }
        }
    }

    /// What ended the asking, if anything did, and the records that were refused, by their keys.
    pub fn failures(self) -> (Option<RemoteError>, BTreeMap<Digest, RemoteError>) {
        (self.failed, self.refused)
    }

    fn ask(&mut self, key: &Digest) -> Result<Result<Option<ResultRecord>, RemoteError>, RemoteError> {
        let remote = match self.remote.take() {
            Some(remote) => remote,
            None => Remote::open(self.place)?,
        };
        let answers = self.remote.insert(remote).look_up(std::slice::from_ref(key))?;
        Ok(answers.into_iter().next().unwrap_or(Ok(None)))
    }
}
