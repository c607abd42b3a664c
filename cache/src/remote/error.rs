//! What can go wrong between the store and a shared one.

use std::error::Error;
use std::io;

use object_store::path::Path as Name;

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
    /// A folder that may not be entered or listed.
    #[error("the remote {remote} cannot be read: {reason}")]
    NotReadable {
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
    /// Something in a folder that may not be read.
    #[error("`{name}` in the remote {remote} cannot be read: {reason}")]
    Unreadable {
        /// Its address.
        remote: String,
        /// Its name there.
        name: String,
        /// What the operating system said.
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
        source: io::Error,
    },
    /// The local store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// [`crate::remote::Remote::stop`] was called.
    #[error("stopped")]
    Stopped,
}

/// What was asked of a remote.
#[derive(Debug, Clone, Copy)]
pub(super) enum Asked<'a> {
    /// What has this name, or its length.
    Read(&'a Name),
    /// Which names there are.
    List,
    Write,
}

impl RemoteError {
    /// Whether it is about one result, and says nothing of the next one.
    pub fn is_of_one_result(&self) -> bool {
        match self {
            Self::Refused { .. } | Self::Unreadable { .. } | Self::Missing { .. } | Self::Store(_) => true,
            Self::Unreachable { .. }
            | Self::NotWritable { .. }
            | Self::NotReadable { .. }
            | Self::Denied { .. }
            | Self::NoBucket { .. }
            | Self::Settings { .. }
            | Self::Version { .. }
            | Self::Machine { .. }
            | Self::Stopped => false,
        }
    }

    /// Whether a result that could not be sent because of it is still to be sent: one that is gone here, or damaged, is
    /// sent by whoever makes it again, and what may not be read or written there once it may.
    pub fn stays_to_be_sent(&self) -> bool {
        !self.is_of_one_result() || matches!(self, Self::Unreadable { .. })
    }

    /// What to do about it.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Unreachable { .. } | Self::NotWritable { .. } => Some("`--no-remote` leaves the shared cache out"),
            Self::NotReadable { .. } => Some(
                "whoever owns the folder lets others read it (`chmod a+rX`); `--no-remote` leaves the shared cache out",
            ),
            Self::Denied { .. } => Some(
                "credentials are taken from the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY; reading needs leave to list as well",
            ),
            Self::NoBucket { .. } => Some("make the bucket or folder first; this program makes none"),
            Self::Version { .. } => Some("use another prefix, or the version of this program that wrote it"),
            Self::Refused { .. } | Self::Missing { .. } => {
                Some("a machine that has the result puts it right with `pipeline cache push --verify`")
            }
            Self::Unreadable { .. } => Some("whoever owns it lets others read it (`chmod a+r`)"),
            Self::Settings { .. } | Self::Machine { .. } | Self::Store(_) | Self::Stopped => None,
        }
    }

    /// Sorts a failure by what can be done about it. One that says that something is not there is for the caller to
    /// judge.
    pub(super) fn of(remote: &str, asked: Asked<'_>, error: &object_store::Error) -> Self {
        let (remote, reason) = (remote.to_owned(), innermost(error));
        let refusal = if remote.starts_with("file://") { refusal(error) } else { None };
        match (refusal, asked) {
            (Some(Refusal::Permission), Asked::Read(name)) => {
                return Self::Unreadable { remote, name: name.to_string(), reason };
            }
            (Some(Refusal::Permission), Asked::List) => return Self::NotReadable { remote, reason },
            (Some(Refusal::Permission), Asked::Write) | (Some(Refusal::Writing), _) => {
                return Self::NotWritable { remote, reason };
            }
            (None, _) => {}
        }
        match error {
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

    /// Why a folder cannot be opened.
    pub(super) fn of_folder(remote: String, error: &io::Error) -> Self {
        let reason = error.to_string();
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::NoBucket { remote, reason },
            io::ErrorKind::PermissionDenied => Self::NotReadable { remote, reason },
            _ => Self::Unreachable { remote, reason },
        }
    }
}

/// In what way the operating system refused something in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refusal {
    /// This user may not do it.
    Permission,
    /// There is no room, or a limit on the length of files (`ulimit -f`), or nobody may write.
    Writing,
}

fn refusal(error: &object_store::Error) -> Option<Refusal> {
    use std::io::ErrorKind::{FileTooLarge, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let mut causes = std::iter::successors(Some(error as &dyn Error), |cause| (*cause).source());
    causes.find_map(|cause| match cause.downcast_ref::<io::Error>()?.kind() {
        PermissionDenied => Some(Refusal::Permission),
        FileTooLarge | QuotaExceeded | ReadOnlyFilesystem | StorageFull => Some(Refusal::Writing),
        _ => None,
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

    fn of(remote: &str, asked: Asked<'_>, kind: ErrorKind) -> RemoteError {
        let source = Box::new(io::Error::from(kind));
        RemoteError::of(remote, asked, &object_store::Error::Generic { store: "LocalFileSystem", source })
    }

    #[test]
    fn a_folder_that_is_full_is_not_out_of_reach() {
        let kinds = [ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem, ErrorKind::FileTooLarge];
        for kind in kinds.into_iter().chain([ErrorKind::PermissionDenied]) {
            let error = of("file:///srv/cache", Asked::Write, kind);
            assert!(matches!(error, RemoteError::NotWritable { .. }) && !error.is_of_one_result(), "{error}");
            assert!(matches!(of("s3://bucket", Asked::Write, kind), RemoteError::Unreachable { .. }), "{kind}");
        }
        let error = of("file:///srv/cache", Asked::Write, ErrorKind::TimedOut);
        assert!(matches!(error, RemoteError::Unreachable { .. }), "{error}");
    }

    #[test]
    fn what_may_not_be_read_is_of_one_result_and_a_folder_that_may_not_be_listed_of_all() {
        let name = Name::from("objects/49/ab");
        let missing = RemoteError::Missing { remote: "file:///srv/cache".to_owned(), name: name.to_string() };
        assert!(missing.is_of_one_result() && !missing.stays_to_be_sent());
        let error = of("file:///srv/cache", Asked::Read(&name), ErrorKind::PermissionDenied);
        assert!(error.stays_to_be_sent());
        assert!(matches!(error, RemoteError::Unreadable { .. }) && error.is_of_one_result(), "{error:?}");
        let told = error.to_string();
        assert!(
            told.starts_with("`objects/49/ab` in the remote file:///srv/cache cannot be read: ")
                && !told.contains("written"),
            "{told}"
        );
        let listed = of("file:///srv/cache", Asked::List, ErrorKind::PermissionDenied);
        let opened = |kind: ErrorKind| RemoteError::of_folder("file:///srv/cache".to_owned(), &kind.into());
        for error in [listed, opened(ErrorKind::PermissionDenied)] {
            assert!(matches!(error, RemoteError::NotReadable { .. }) && !error.is_of_one_result(), "{error:?}");
        }
        assert!(matches!(opened(ErrorKind::NotFound), RemoteError::NoBucket { .. }));
        assert!(matches!(opened(ErrorKind::TimedOut), RemoteError::Unreachable { .. }));
    }
}
