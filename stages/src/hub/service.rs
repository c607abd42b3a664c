//! The hubs that are known. What differs from one to the next is an [`Api`], a file each; all else is common to them.

use std::fmt;
use std::future::Future;
use std::hash::{Hash, Hasher};
use std::pin::Pin;

use reqwest::Url;
use reqwest::header::HeaderValue;

use super::connection::{Connection, Token};
use super::error::HubError;
use super::hugging_face::HuggingFace;
use super::listing::RemoteFile;
use super::modelscope::ModelScope;
use super::repository::{Repository, RepositoryKind, Snapshot};

/// Where a repository lies: one of [`Service::ALL`].
#[derive(Clone, Copy)]
pub struct Service(&'static dyn Api);

/// An answer on its way.
pub(super) type HubFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, HubError>> + Send + 'a>>;

/// A variable of the environment that is set.
pub(super) type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

/// How a hub is asked, and what it is called. What is common to most has a default.
pub(super) trait Api: Sync {
    /// What names of its repositories begin with in a pipeline file; the names of one hub begin with nothing.
    fn prefix(&self) -> &'static str;

    /// What the pins of its repositories are called in `pipeline.lock`.
    fn pin_kind(&self, kind: RepositoryKind) -> &'static str;

    /// The environment variables that people set for it: address and token.
    fn variables(&self) -> (&'static str, &'static str);

    /// Its address where no variable gives one.
    fn address(&self, variable: Variable<'_>) -> String;

    /// The branch that is meant where none is named.
    fn default_revision(&self) -> &'static str;

    /// Where it keeps its own conversion of a data set to Parquet, if it makes such.
    fn converted_revision(&self) -> Option<&'static str> {
        None
    }

    /// Whether it has repositories without an owner.
    fn has_bare_names(&self) -> bool {
        false
    }

    /// What stands before a repository's name in the address of its page for people.
    fn page_folder(&self, kind: RepositoryKind) -> &'static str;

    /// The token that its own tools have stored.
    fn stored_token(&self) -> Option<String> {
        None
    }

    /// The cache that its own tools fill.
    fn cache(&self) -> Option<hf_hub::Cache> {
        None
    }

    /// The token as a cookie, where the hub wants one beside the header.
    fn cookie(&self, _token: &Token) -> Option<HeaderValue> {
        None
    }

    /// Whether a commit names its content, so that what was written down of it need not be compared with a listing.
    fn commits_name_content(&self) -> bool;

    /// The address of a file.
    fn file_url(&self, connection: &Connection, snapshot: &Snapshot, path: &str) -> Url;

    /// The commit that a branch or tag is at now, or what else pins it.
    fn resolve<'a>(
        &'a self,
        connection: &'a Connection,
        repository: &'a Repository,
        revision: &'a str,
    ) -> HubFuture<'a, String>;

    /// The files of a snapshot, in its order, each with its size and checksum.
    fn list<'a>(&'a self, connection: &'a Connection, snapshot: &'a Snapshot) -> HubFuture<'a, Vec<RemoteFile>>;
}

impl Service {
    /// The Hugging Face Hub, or a mirror of it.
    pub const HUGGING_FACE: Self = Self(&HuggingFace);

    /// Every hub. The one whose names begin with nothing comes last: they could be those of any.
    pub const ALL: &'static [Self] = &[Self(&ModelScope), Self::HUGGING_FACE];

    /// The branch that is meant where none is named.
    pub fn default_revision(self) -> &'static str {
        self.0.default_revision()
    }

    /// The environment variable that holds the token, where no other one is named.
    pub fn token_variable(self) -> &'static str {
        self.0.variables().1
    }

    /// What names of its repositories begin with in a pipeline file.
    pub fn prefix(self) -> &'static str {
        self.0.prefix()
    }

    /// Where it keeps its own conversion of a data set to Parquet, if it makes such.
    pub fn converted_revision(self) -> Option<&'static str> {
        self.0.converted_revision()
    }

    pub(super) fn api(self) -> &'static dyn Api {
        self.0
    }
}

impl PartialEq for Service {
    fn eq(&self, other: &Self) -> bool {
        self.prefix() == other.prefix()
    }
}

impl Eq for Service {}

impl Hash for Service {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.prefix().hash(state);
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Service({:?})", self.prefix())
    }
}
