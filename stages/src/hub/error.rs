//! What can go wrong between here and the Hub.

use std::io;
use std::path::PathBuf;

use engine::error::{Cause, StageError};

use super::repository::{BadRepositoryName, RepositoryKind};

/// A failure to get something from the Hub. No message holds a token or a signed address.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name cannot be a repository's.
    #[error(transparent)]
    BadName(#[from] BadRepositoryName),
    /// `HF_ENDPOINT` is not a web address.
    #[error("the Hub endpoint `{0}` is not an http or https address")]
    BadEndpoint(String),
    /// The token has characters that no token has.
    #[error("the Hub token (HF_TOKEN, or the stored one) holds characters that cannot be sent")]
    BadToken,
    /// No such repository, or a private one.
    #[error("the Hub at {endpoint} has no {kind} `{name}`, or it is private")]
    RepositoryNotFound {
        /// The server asked.
        endpoint: String,
        /// The repository's kind.
        kind: RepositoryKind,
        /// Its name.
        name: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// No such branch, tag or commit.
    #[error("`{name}` has no revision `{revision}`")]
    RevisionNotFound {
        /// The repository.
        name: String,
        /// The revision asked for.
        revision: String,
    },
    /// No such file.
    #[error("`{name}` has no file `{path}` at commit {commit}")]
    FileNotFound {
        /// The repository.
        name: String,
        /// The commit.
        commit: String,
        /// The file.
        path: String,
    },
    /// A licence has to be accepted first.
    #[error("`{name}` is gated: its files are only for accounts that accepted its terms")]
    Gated {
        /// The repository.
        name: String,
        /// The page where the terms are accepted.
        page: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// 401 or 403.
    #[error("the Hub refused access to `{what}` (status {status})")]
    Refused {
        /// What was asked for.
        what: String,
        /// The HTTP status.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// No answer at all.
    #[error("the Hub at {endpoint} cannot be reached")]
    Unreachable {
        /// The server asked.
        endpoint: String,
        /// What failed.
        #[source]
        source: reqwest::Error,
    },
    /// The machine cannot open secure connections.
    #[error("cannot set up an HTTP client")]
    Client(#[source] reqwest::Error),
    /// A status that is none of the above, after retries where they could help.
    #[error("the Hub answered with status {status} to the request for `{what}`")]
    Status {
        /// What was asked for.
        what: String,
        /// The HTTP status.
        status: u16,
        /// How long the server asks to wait.
        retry_after_seconds: Option<u64>,
    },
    /// The connection broke within a file.
    #[error("the transfer of `{path}` was cut at byte {at} of {size}")]
    Cut {
        /// The file.
        path: String,
        /// How many bytes are there.
        at: u64,
        /// How many there should be.
        size: u64,
        /// What broke it, where that is known.
        #[source]
        source: Option<reqwest::Error>,
    },
    /// An answer that makes no sense.
    #[error("the Hub's answer to the request for `{what}` makes no sense: {problem}")]
    BadAnswer {
        /// What was asked for.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The content is not what the Hub lists, twice.
    #[error("`{path}` arrived damaged twice: the Hub lists {expected}, received was {found}")]
    Corrupt {
        /// The file.
        path: String,
        /// The listed checksum.
        expected: String,
        /// The checksum of what arrived.
        found: String,
    },
    /// A listed name that would be written outside its folder.
    #[error("the Hub lists a file with the unsafe name `{0}`")]
    UnsafeName(String),
    /// The disk refused.
    #[error("cannot write `{path}`")]
    Disk {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The caller asked to stop.
    #[error("the download was stopped")]
    Stopped,
}

impl HubError {
    /// Whether the same request may well succeed a little later.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Cut { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500..=599),
            _ => false,
        }
    }

    /// What the user can do about it.
    pub fn help(&self) -> Option<String> {
        const LOGIN: &str = "set HF_TOKEN to an access token of an account that may read it";
        match self {
            Self::BadName(_) => Some("a repository is named `owner/name`, as in the address of its page".to_owned()),
            Self::BadEndpoint(_) => Some("set HF_ENDPOINT to an address such as https://huggingface.co".to_owned()),
            Self::RepositoryNotFound { with_token: false, .. } => {
                Some(format!("check the spelling; if it is private, {LOGIN}"))
            }
            Self::RepositoryNotFound { with_token: true, .. } => Some(
                "check the spelling; if it is private, the account of the token must be able to read it".to_owned(),
            ),
            Self::Gated { page, with_token: false, .. } => {
                Some(format!("accept the licence at {page}, then set HF_TOKEN to a token of that account"))
            }
            Self::Gated { page, with_token: true, .. } => {
                Some(format!("accept the licence at {page} with the account that HF_TOKEN belongs to"))
            }
            Self::Refused { with_token: false, .. } => Some(LOGIN.to_owned()),
            Self::Refused { with_token: true, .. } => {
                Some("the token sent may have expired, or lack the permission to read this".to_owned())
            }
            Self::Unreachable { .. } => {
                Some("check the network and HF_ENDPOINT; what was fetched already is kept for the next run".to_owned())
            }
            Self::Status { .. } | Self::Cut { .. } => {
                Some("run again later: what was fetched already is kept".to_owned())
            }
            Self::Corrupt { .. } => {
                Some("a proxy or mirror on the way alters files: try another HF_ENDPOINT".to_owned())
            }
            _ => None,
        }
    }

    /// The cause that decides retries and the exit code.
    pub fn cause(&self) -> Cause {
        match self {
            Self::BadName(_)
            | Self::BadEndpoint(_)
            | Self::BadToken
            | Self::RepositoryNotFound { .. }
            | Self::RevisionNotFound { .. }
            | Self::FileNotFound { .. } => Cause::BadParameters,
            Self::Gated { .. }
            | Self::Refused { .. }
            | Self::Unreachable { .. }
            | Self::Status { .. }
            | Self::Cut { .. }
            | Self::BadAnswer { .. }
            | Self::Corrupt { .. }
            | Self::UnsafeName(_) => Cause::Network,
            Self::Client(_) | Self::Disk { .. } => Cause::Machine,
            Self::Stopped => Cause::Cancelled,
        }
    }
}

impl From<HubError> for StageError {
    fn from(error: HubError) -> Self {
        let mut failure = StageError::new(error.cause(), error.to_string());
        failure.help = error.help();
        failure.source = match error {
            HubError::Unreachable { source, .. } | HubError::Client(source) => Some(source.into()),
            HubError::Cut { source: Some(source), .. } => Some(source.into()),
            HubError::Disk { source, .. } => Some(source.into()),
            _ => None,
        };
        failure
    }
}
