//! Names of repositories and of their states.

use std::fmt;

/// What kind of repository it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RepositoryKind {
    /// A model: weights, configuration and tokenizer.
    Model,
    /// A dataset.
    Dataset,
}

impl RepositoryKind {
    /// The kind's name in the Hub's API.
    pub(super) fn api_segment(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }

    /// What the pin of such a repository is called in `pipeline.lock`.
    pub fn pin_kind(self) -> &'static str {
        match self {
            Self::Model => "hub-model",
            Self::Dataset => "hub-dataset",
        }
    }

    pub(super) fn repo_type(self) -> hf_hub::RepoType {
        match self {
            Self::Model => hf_hub::RepoType::Model,
            Self::Dataset => hf_hub::RepoType::Dataset,
        }
    }
}

impl fmt::Display for RepositoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        })
    }
}

/// A repository on the Hub, such as the model `meta-llama/Llama-3.1-8B-Instruct`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Repository {
    kind: RepositoryKind,
    name: String,
}

/// A text that cannot be the name of a repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the name of a Hub repository")]
pub struct BadRepositoryName(String);

impl Repository {
    /// A repository by its name: `owner/name`, or a bare `name` for the few old ones that have no owner.
    ///
    /// # Errors
    /// Fails where the Hub could not have given the name to anything; such a text never becomes part of a URL.
    pub fn parse(kind: RepositoryKind, name: &str) -> Result<Self, BadRepositoryName> {
        let is_part = |part: &str| {
            !part.is_empty()
                && part.len() <= 96
                && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
                && !part.starts_with(['-', '.'])
                && !part.ends_with(['-', '.'])
                && !part.contains("..")
        };
        if name.split('/').count() <= 2 && name.split('/').all(is_part) {
            Ok(Self { kind, name: name.to_owned() })
        } else {
            Err(BadRepositoryName(name.to_owned()))
        }
    }

    /// Its kind.
    pub fn kind(&self) -> RepositoryKind {
        self.kind
    }

    /// Its name, `owner/name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// This repository at a commit.
    pub fn at(&self, commit: &str) -> Snapshot {
        Snapshot { repository: self.clone(), commit: commit.to_owned() }
    }
}

/// A repository at one commit: what it holds never changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The repository.
    pub repository: Repository,
    /// The commit, 40 hexadecimal digits.
    pub commit: String,
}

impl Snapshot {
    /// `owner/name/resolve/commit/path/of/file`, in segments; datasets begin with `datasets`.
    pub(super) fn file_path<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a str> {
        let prefix = match self.repository.kind() {
            RepositoryKind::Model => None,
            RepositoryKind::Dataset => Some("datasets"),
        };
        prefix
            .into_iter()
            .chain(self.repository.name().split('/'))
            .chain(["resolve", self.commit.as_str()])
            .chain(path.split('/'))
    }
}

/// Whether a revision is a full commit, which needs no resolving.
pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_names_that_the_hub_gives_and_no_others() {
        for good in ["meta-llama/Llama-3.1-8B-Instruct", "gpt2", "EdinburghNLP/xsum", "a/b_c.d"] {
            assert!(Repository::parse(RepositoryKind::Model, good).is_ok(), "{good}");
        }
        for bad in ["", "a/", "/a", "a/b/c", "../etc", "a/..", "a b/c", "a/b?x=1", "https://x/y", "a/b%2f"] {
            assert!(Repository::parse(RepositoryKind::Model, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn knows_a_full_commit() {
        assert!(is_commit("0123456789abcdef0123456789abcdef01234567"));
        assert!(!is_commit("main"));
        assert!(!is_commit("0123456789ABCDEF0123456789abcdef01234567"));
    }
}
