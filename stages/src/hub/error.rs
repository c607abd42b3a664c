//! What can go wrong between here and the Hub.

use std::io;
use std::path::PathBuf;

use engine::error::{Cause, StageError};

use super::repository::{BadRepositoryName, RepositoryKind};
use super::service::Service;

/// A failure to get something from the Hub. No message holds a token or a signed address.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name cannot be a repository's.
    #[error(transparent)]
    BadName(#[from] BadRepositoryName),
    /// The endpoint is not a web address.
    #[error("the Hub endpoint `{0}` is not an http or https address")]
    BadEndpoint(String),
    /// The token has characters that no token has.
    #[error("the Hub token (HF_TOKEN, or the stored one) holds characters that cannot be sent")]
    BadToken,
    /// The variable that `token_env` names is not set.
    #[error("the environment variable `{0}`, which `token_env` names, is not set")]
    NoToken(String),
    /// A file with certificates cannot be used.
    #[error("the certificates in `{path}`, which REQUESTS_CA_BUNDLE names, cannot be read: {problem}")]
    BadCertificates {
        /// The file.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A repository whose commit is not known lists other files than when it was pinned.
    #[error("`{name}` no longer lists the files that it had at `{revision}` when it was pinned")]
    Moved {
        /// The repository.
        name: String,
        /// The revision asked for.
        revision: String,
    },
    /// No such repository, or a private one.
    #[error("the Hub at {endpoint} has no {kind} `{name}`, or it is private")]
    RepositoryNotFound {
        /// The server asked.
        endpoint: String,
        /// The repository's kind.
        kind: RepositoryKind,
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
    /// The server leads from address to address.
    #[error("the Hub at {endpoint} redirects in a loop, or more than 10 times in a row")]
    Redirects {
        /// The server asked.
        endpoint: String,
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
    /// The server's file is shorter than what is listed.
    #[error("the server's file `{path}` has {found} bytes where {listed} are listed")]
    Shorter {
        /// The file.
        path: String,
        /// Its bytes on the server.
        found: u64,
        /// Its bytes in the listing.
        listed: u64,
    },
    /// An answer that says no, in the server's words.
    #[error("the Hub refused the request for `{what}`: {message}")]
    Declined {
        /// What was asked for.
        what: String,
        /// What the server said, on one line.
        message: String,
        /// The HTTP status that it says it with, where its code is one.
        status: Option<u16>,
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
    /// `--offline`, or `HF_HUB_OFFLINE`.
    #[error("nothing may be fetched (`--offline` or HF_HUB_OFFLINE), and this machine lacks {what}")]
    Offline {
        /// What would have been asked for.
        what: String,
    },
    /// Nothing may be fetched, and what the Hub cache has of a file is not what is listed.
    #[error(
        "nothing may be fetched (`--offline` or HF_HUB_OFFLINE), and `{path}` in the Hub cache is not the `{name}` \
         that the Hub lists: its length or content differs, or it cannot be read"
    )]
    OtherInCache {
        /// The file.
        name: String,
        /// Where it lies in the cache.
        path: PathBuf,
    },
    /// What `pipeline.lock` says of a file makes no sense.
    #[error("`pipeline.lock` says of `{path}`: `{line}`, which is no checksum and length")]
    BadLock {
        /// The file.
        path: String,
        /// What is written there.
        line: String,
    },
    /// The caller asked to stop.
    #[error("the download was stopped")]
    Stopped,
}

impl HubError {
    /// Whether the same request may well succeed a little later.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Cut { .. } | Self::Shorter { .. } => true,
            Self::Status { status, .. } | Self::Declined { status: Some(status), .. } => {
                matches!(status, 408 | 429 | 500..=599)
            }
            _ => false,
        }
    }

    /// Whether there is no connection to the server at all: no network, no such name, nobody there.
    pub(super) fn is_of_connecting(&self) -> bool {
        matches!(self, Self::Unreachable { source, .. } if source.is_connect())
    }

    /// What the user can do about it.
    pub fn help(&self) -> Option<String> {
        const LOGIN: &str = "set HF_TOKEN to an access token of an account that may read it";
        const LATER: &str = "run again later: what was fetched already is kept";
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
            Self::Unreachable { source, .. } if is_untrusted(source) => Some(
                "the server's certificate is signed by nobody that this machine trusts: name the file with your company's \
                 certificates in REQUESTS_CA_BUNDLE (added to the machine's) or SSL_CERT_FILE (in their place)"
                    .to_owned(),
            ),
            Self::Unreachable { .. } => {
                Some(
                    "check the network and HF_ENDPOINT; what was fetched already is kept for the next run, and \
                     `--offline` uses nothing but what this machine has"
                        .to_owned(),
                )
            }
            Self::Redirects { .. } => {
                Some("check HF_ENDPOINT: addresses of a mirror or a proxy on the way lead to each other".to_owned())
            }
            Self::Status { .. } | Self::Cut { .. } => Some(LATER.to_owned()),
            Self::Moved { .. } => Some("remove its line from pipeline.lock to take what is there now".to_owned()),
            Self::NoToken(name) => Some(format!("set it where `pipeline run` is started: `export {name}=…`")),
            Self::Declined { .. } if self.is_transient() => Some(LATER.to_owned()),
            Self::Declined { .. } => Some(format!("if it is a matter of access, {LOGIN}")),
            Self::Shorter { .. } => Some(
                "a proxy or mirror on the way has a part of it, or another page in its place: try another HF_ENDPOINT"
                    .to_owned(),
            ),
            Self::Corrupt { .. } => {
                Some(
                    "a proxy or mirror on the way alters files: try another HF_ENDPOINT; if `pipeline.lock` was edited, take it from git again"
                        .to_owned(),
                )
            }
            Self::Offline { .. } => Some(
                "run once without `--offline`, or take the result from a machine that has it: `pipeline cache pull`"
                    .to_owned(),
            ),
            Self::OtherInCache { .. } => Some(
                "remove it and run without `--offline`, or fetch it again with the tool that put it there".to_owned(),
            ),
            Self::BadLock { .. } => Some("take `pipeline.lock` from git again, or remove the entry".to_owned()),
            _ => None,
        }
    }

    /// The cause that decides retries and the exit code.
    pub fn cause(&self) -> Cause {
        match self {
            Self::BadName(_)
            | Self::BadEndpoint(_)
            | Self::BadToken
            | Self::Moved { .. }
            | Self::RepositoryNotFound { .. }
            | Self::RevisionNotFound { .. }
            | Self::FileNotFound { .. }
            | Self::BadLock { .. } => Cause::BadParameters,
            Self::Gated { .. }
            | Self::Refused { .. }
            | Self::Unreachable { .. }
            | Self::Redirects { .. }
            | Self::Status { .. }
            | Self::Cut { .. }
            | Self::Shorter { .. }
            | Self::Declined { .. }
            | Self::BadAnswer { .. }
            | Self::Corrupt { .. }
            | Self::UnsafeName(_) => Cause::Network,
            Self::Client(_)
            | Self::Disk { .. }
            | Self::NoToken(_)
            | Self::BadCertificates { .. }
            | Self::Offline { .. }
            | Self::OtherInCache { .. } => Cause::Machine,
            Self::Stopped => Cause::Cancelled,
        }
    }
}

/// Whether a connection failed since the server's certificate is not trusted.
fn is_untrusted(error: &reqwest::Error) -> bool {
    let mut next = std::error::Error::source(error);
    while let Some(error) = next {
        if error.to_string().contains("invalid peer certificate") {
            return true;
        }
        next = error.source();
    }
    false
}

impl HubError {
    /// The failure of a stage that asked this service: its help names the variables and the address that count there.
    pub fn of(self, service: Service) -> StageError {
        let mut failure = StageError::from(self);
        let of_hub = Service::HUGGING_FACE.api().variables();
        let (endpoint, token) = service.api().variables();
        let address = |service: Service| service.api().address(&|_: &str| None);
        let address_there = |help: String| help.replace(&address(Service::HUGGING_FACE), &address(service));
        let named = |help: String| address_there(help).replace(of_hub.0, endpoint).replace(of_hub.1, token);
        failure.help = failure.help.map(named);
        failure
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_message_and_the_exit_code_of_each_answer() {
        let page = include_str!("../../../docs/hub.md");
        let [name, elsewhere] = ["a/b", "…"].map(str::to_owned);
        let with_token = false;
        let (kind, endpoint, what) = (RepositoryKind::Model, elsewhere.clone(), elsewhere.clone());
        for error in [
            HubError::BadEndpoint(elsewhere.clone()),
            HubError::RepositoryNotFound { endpoint: endpoint.clone(), kind, name: name.clone(), with_token },
            HubError::RevisionNotFound { name: name.clone(), revision: "x".to_owned() },
            HubError::FileNotFound { name: name.clone(), commit: elsewhere.clone(), path: "x".to_owned() },
            HubError::Gated { name, page: elsewhere, with_token },
            HubError::Refused { what: what.clone(), status: 403, with_token },
            HubError::Declined { what: what.clone(), message: what.clone(), status: None },
            HubError::Status { what, status: 500, retry_after_seconds: None },
            HubError::Redirects { endpoint },
        ] {
            let code = match error.cause() {
                Cause::BadParameters => 2,
                Cause::Network => 3,
                other => panic!("{error}: {other:?}"),
            };
            let row = page.lines().find(|line| line.starts_with('|') && line.contains(&error.to_string()));
            assert!(row.is_some_and(|row| row.ends_with(&format!("| {code} |"))), "{error}: {row:?}");
        }
    }
}
