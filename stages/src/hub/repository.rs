//! Names of repositories and of their states.

use std::fmt;

use super::service::Service;

/// What kind of repository it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RepositoryKind {
    /// A model: weights, configuration and tokenizer.
    Model,
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
    service: Service,
    kind: RepositoryKind,
    name: String,
}

/// A text that cannot be the name of a repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not the name of a Hub repository")]
pub struct BadRepositoryName(String);

impl Repository {
    /// A repository by its name: `owner/name`, or a bare `name` for the few old ones that have no owner;
    /// `modelscope:owner/name` on ModelScope.
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
        let bad = || BadRepositoryName(name.to_owned());
        let named = |service: &Service| Some((*service, name.strip_prefix(service.prefix())?));
        let (service, own) = Service::ALL.iter().find_map(named).ok_or_else(bad)?;
        let parts = own.split('/').count();
        let has_parts = parts == 2 || parts == 1 && service.api().has_bare_names();
        let is_name = has_parts && own.split('/').all(is_part);
        if is_name { Ok(Self { service, kind, name: own.to_owned() }) } else { Err(bad()) }
    }

    /// Where it lies.
    pub fn service(&self) -> Service {
        self.service
    }

    /// Its name as a pipeline file writes it, service included.
    pub fn written(&self) -> String {
        format!("{}{}", self.service.prefix(), self.name)
    }

    /// What the pin of such a repository is called in `pipeline.lock`.
    pub fn pin_kind(&self) -> &'static str {
        self.service.api().pin_kind(self.kind)
    }

    /// The repository of a pin's kind and name.
    ///
    /// # Errors
    /// Fails where the name is none.
    pub fn of_pin(pin_kind: &str, name: &str) -> Result<Self, BadRepositoryName> {
        let kinds = [RepositoryKind::Model, RepositoryKind::Dataset];
        let all = Service::ALL.iter().flat_map(|service| kinds.map(|kind| (service, kind)));
        let of_kind = all.into_iter().find(|(service, kind)| service.api().pin_kind(*kind) == pin_kind);
        let (service, kind) = of_kind.ok_or_else(|| BadRepositoryName(name.to_owned()))?;
        Self::parse(kind, &format!("{}{name}", service.prefix()))
    }

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
    pub repository: Repository,
    /// The commit, 40 hexadecimal digits; on ModelScope it may be a revision with a digest of what it lists.
    pub commit: String,
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
        for bad in [
            "modelscope:",
            "modelscope:name",
            "modelscope:a/b/c",
            "other:a/b",
            "",
            "a/",
            "/a",
            "a/b/c",
            "../etc",
            "a/..",
            "a b/c",
            "a/b?x=1",
            "https://x/y",
            "a/b%2f",
        ] {
            assert!(Repository::parse(RepositoryKind::Model, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_pin_names_its_repository() {
        for name in ["modelscope:Qwen/Qwen2.5-0.5B", "gpt2", "a/b"] {
            for kind in [RepositoryKind::Model, RepositoryKind::Dataset] {
                let repository = Repository::parse(kind, name).expect("a name");
                assert_eq!(repository.written(), name);
                assert_eq!(Repository::of_pin(repository.pin_kind(), repository.name()), Ok(repository));
            }
        }
    }

    #[test]
    fn knows_a_full_commit() {
        assert!(is_commit("0123456789abcdef0123456789abcdef01234567"));
        assert!(!is_commit("main"));
        assert!(!is_commit("0123456789ABCDEF0123456789abcdef01234567"));
    }
}
