//! What can go wrong between the store and a shared one.

use std::error::Error;

use crate::StoreError;

/// Where machines of a cloud learn their own role.
const METADATA_SERVICE: &str = "://169.254.169.254";

/// A failure of a shared store.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The server, or the way to it, failed: after several tries, or in a way that trying again does not mend.
    #[error("the remote {remote} cannot be reached: {reason}")]
    Unreachable {
        /// Its address.
        remote: String,
        /// What was said at the lowest level.
        reason: String,
    },
    /// The server refused access.
    #[error("the remote {remote} refused access: {reason}")]
    Denied {
        /// Its address.
        remote: String,
        /// What the server said.
        reason: String,
    },
    /// It cannot be written to: a folder on a disk that is full, or that may only be read.
    #[error("the remote {remote} cannot be written to: {reason}")]
    NotWritable {
        /// Its address.
        remote: String,
        /// What the operating system said.
        reason: String,
    },
    /// There is no such bucket or folder.
    #[error("the remote {remote} does not exist: {reason}")]
    NoBucket {
        /// Its address.
        remote: String,
        /// What the server said.
        reason: String,
    },
    /// Credentials or settings in the environment that cannot be used.
    #[error("the remote {remote} cannot be used: {reason}")]
    Settings {
        /// Its address.
        remote: String,
        /// What is wrong with them.
        reason: String,
    },
    /// A newer version of this program writes there, or something else does.
    #[error("the remote {remote} is of a form that this program does not know: {found}")]
    Version {
        /// Its address.
        remote: String,
        /// What its marker holds.
        found: String,
    },
    /// Something there is not what its name says.
    #[error("`{name}` in the remote {remote} cannot be used: {reason}")]
    Refused {
        /// Its address.
        remote: String,
        /// Its name there.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Something that another thing there names is gone.
    #[error("`{name}` is missing in the remote {remote}")]
    Missing {
        /// Its address.
        remote: String,
        /// Its name there.
        name: String,
    },
    /// A thread or socket could not be had.
    #[error("the remote {remote} cannot be used: {source}")]
    Machine {
        /// Its address.
        remote: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The local store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// [`crate::remote::Remote::stop`] was called.
    #[error("stopped")]
    Stopped,
}

impl RemoteError {
    /// Whether it is about one result, and says nothing of the next one.
    pub fn is_of_one_result(&self) -> bool {
        match self {
            Self::Refused { .. } | Self::Missing { .. } | Self::Store(_) => true,
            Self::Unreachable { .. }
            | Self::NotWritable { .. }
            | Self::Denied { .. }
            | Self::NoBucket { .. }
            | Self::Settings { .. }
            | Self::Version { .. }
            | Self::Machine { .. }
            | Self::Stopped => false,
        }
    }

    /// What to do about it.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Unreachable { .. } | Self::NotWritable { .. } => Some("`--no-remote` leaves the shared cache out"),
            Self::Denied { .. } => Some(
                "credentials are taken from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY; reading needs leave to list as well",
            ),
            Self::NoBucket { .. } => Some("make the bucket or folder first; this program makes none"),
            Self::Version { .. } => Some("use another prefix, or the version of this program that wrote it"),
            Self::Refused { .. } | Self::Missing { .. } => {
                Some("a machine that has the result puts it right with `pipeline cache push`")
            }
            Self::Settings { .. } | Self::Machine { .. } | Self::Store(_) | Self::Stopped => None,
        }
    }

    /// Sorts a failure by what can be done about it. One that says that something is not there is for the caller to
    /// judge.
    pub(super) fn of(remote: &str, error: &object_store::Error) -> Self {
        let (remote, reason) = (remote.to_owned(), innermost(error));
        match error {
            _ if remote.starts_with("file://") && is_unwritable(error) => Self::NotWritable { remote, reason },
            // Without credentials the machine's own role is asked for, at an address that only machines of a cloud
            // have.
            _ if error.to_string().contains(METADATA_SERVICE) => {
                Self::Denied { remote, reason: "the environment has no credentials".to_owned() }
            }
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Self::Denied { remote, reason }
            }
            object_store::Error::NotFound { .. } => Self::NoBucket { remote, reason },
            _ if reason.contains("NoSuchBucket") => Self::NoBucket { remote, reason },
            _ => Self::Unreachable { remote, reason },
        }
    }
}

/// Whether the operating system refused to write to a folder.
fn is_unwritable(error: &object_store::Error) -> bool {
    use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let mut causes = std::iter::successors(Some(error as &dyn Error), |cause| (*cause).source());
    causes.any(|cause| {
        let io = cause.downcast_ref::<std::io::Error>();
        io.is_some_and(|io| matches!(io.kind(), PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull))
    })
}

/// The cause at the bottom of a chain whose every message repeats the ones below it, in one short line.
fn innermost(error: &object_store::Error) -> String {
    const LONGEST: usize = 240;
    let mut cause: &dyn Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    let text = cause.to_string();
    let text = match (between(&text, "<Code>", "</Code>"), between(&text, "<Message>", "</Message>")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        (None, _) => text,
    };
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST + 1).collect();
    if line.chars().count() > LONGEST {
        line.pop();
        line.push('…');
    }
    line
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    Some(rest.split_once(end)?.0)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::*;

    #[test]
    fn a_folder_that_is_full_is_not_out_of_reach() {
        let of = |remote: &str, kind: ErrorKind| {
            let source = Box::new(std::io::Error::from(kind));
            RemoteError::of(remote, &object_store::Error::Generic { store: "LocalFileSystem", source })
        };
        for kind in [ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem, ErrorKind::PermissionDenied] {
            assert!(matches!(of("file:///srv/cache", kind), RemoteError::NotWritable { .. }), "{kind}");
            assert!(matches!(of("s3://bucket", kind), RemoteError::Unreachable { .. }), "{kind}");
        }
        assert!(matches!(of("file:///srv/cache", ErrorKind::TimedOut), RemoteError::Unreachable { .. }));
    }
}
