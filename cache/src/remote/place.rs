//! Addresses of shared stores: what may be written, and what may not.

use std::fmt;
use std::path::{Path, PathBuf};

use object_store::path::Path as Prefix;

/// The address of a shared store. It never holds a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePlace {
    pub(super) location: Location,
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
}

/// Where a shared store lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Location {
    /// A bucket, and a prefix of all names in it.
    Bucket { service: Service, bucket: String, prefix: Prefix },
    /// A folder, absolute.
    Folder(PathBuf),
}

/// Who keeps a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Service {
    S3,
    Google,
    Azure,
}

/// Why a text is not the address of a shared store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPlace {
    /// Nothing is given.
    #[error("the address of the remote is empty")]
    Empty,
    #[error("`{0}://` is no kind of remote")]
    Scheme(String),
    /// No bucket after the scheme.
    #[error("`{0}` names no bucket")]
    Bucket(String),
    /// A name below the bucket that would not survive.
    #[error("the prefix of `{0}` has an empty part, `.`, `..` or a character that cannot be in a name")]
    Prefix(String),
    /// `file://` and a relative path.
    #[error("`{0}` is not absolute: a `file://` address has three slashes")]
    Relative(String),
    /// Something that looks like a key: it is not repeated in the message.
    #[error("the {0} holds more than a place: `@` or `?`, as keys and signatures have")]
    Secret(&'static str),
    /// An endpoint that is no web address.
    #[error("`{0}` is not an endpoint: `http://` or `https://`, a host, and nothing behind it")]
    Endpoint(String),
    /// A setting that this kind of remote does not have.
    #[error("`{setting}` has no meaning for {of}")]
    NotASetting {
        setting: &'static str,
        /// The kind of remote.
        of: &'static str,
    },
}

impl BadPlace {
    /// What to do about it.
    pub fn help(&self) -> &'static str {
        match self {
            Self::Secret(_) => {
                "keys do not belong into a pipeline file or a command: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_SERVICE_ACCOUNT, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
            }
            Self::NotASetting { .. } => "`endpoint` is for buckets, `region` for S3",
            Self::Empty
            | Self::Scheme(_)
            | Self::Bucket(_)
            | Self::Prefix(_)
            | Self::Relative(_)
            | Self::Endpoint(_) => {
                "a remote is `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder` or a folder"
            }
        }
    }
}

impl RemotePlace {
    /// Reads an address; a plain path is taken from `base`.
    ///
    /// # Errors
    /// Fails where it is no address, or holds a key.
    pub fn parse(text: &str, base: &Path) -> Result<Self, BadPlace> {
        let text = text.trim();
        if text.is_empty() {
            return Err(BadPlace::Empty);
        }
        let location = match text.split_once("://") {
            None => Location::Folder(absolute(&base.join(text))),
            Some(("file", path)) if path.starts_with('/') => Location::Folder(absolute(Path::new(path))),
            Some(("file", _)) => return Err(BadPlace::Relative(text.to_owned())),
            Some(("s3", rest)) => bucket(Service::S3, rest, text)?,
            Some(("gs", rest)) => bucket(Service::Google, rest, text)?,
            Some(("az", rest)) => bucket(Service::Azure, rest, text)?,
            Some((scheme, _)) => return Err(BadPlace::Scheme(scheme.chars().take(20).collect())),
        };
        Ok(Self { location, endpoint: None, region: None })
    }

    /// A server other than the service's own.
    ///
    /// # Errors
    /// Fails where it is no web address, holds a key, or the remote is a folder.
    pub fn with_endpoint(mut self, endpoint: &str) -> Result<Self, BadPlace> {
        if matches!(self.location, Location::Folder(_)) {
            return Err(BadPlace::NotASetting { setting: "endpoint", of: "a folder" });
        }
        if endpoint.contains(['@', '?']) {
            return Err(BadPlace::Secret("endpoint"));
        }
        let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
        if !host.is_some_and(|host| !host.trim_matches('/').is_empty() && !host.contains(char::is_whitespace)) {
            return Err(BadPlace::Endpoint(endpoint.to_owned()));
        }
        self.endpoint = Some(endpoint.trim_end_matches('/').to_owned());
        Ok(self)
    }

    /// The region of an S3 bucket.
    ///
    /// # Errors
    /// Fails where the remote is something else.
    pub fn with_region(mut self, region: &str) -> Result<Self, BadPlace> {
        let of = match &self.location {
            Location::Bucket { service: Service::S3, .. } => {
                self.region = Some(region.to_owned());
                return Ok(self);
            }
            Location::Bucket { service: Service::Google, .. } => "Google Cloud Storage",
            Location::Bucket { service: Service::Azure, .. } => "Azure",
            Location::Folder(_) => "a folder",
        };
        Err(BadPlace::NotASetting { setting: "region", of })
    }
}

impl RemotePlace {
    /// The folder, where it is one; absolute.
    pub fn folder(&self) -> Option<&Path> {
        match &self.location {
            Location::Folder(folder) => Some(folder),
            Location::Bucket { .. } => None,
        }
    }

    /// The environment variables that hold keys to it, where no role of the machine opens it.
    pub fn keys(&self) -> &'static [&'static str] {
        match &self.location {
            Location::Folder(_) => &[],
            Location::Bucket { service: Service::S3, .. } => {
                &["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
            }
            Location::Bucket { service: Service::Google, .. } => &["GOOGLE_SERVICE_ACCOUNT_KEY"],
            Location::Bucket { service: Service::Azure, .. } => {
                &["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"]
            }
        }
    }
}

impl Service {
    fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
        }
    }
}

/// Its name, by which is noted what is there and what is to be sent: two places have two.
impl fmt::Display for RemotePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.location {
            Location::Folder(folder) => write!(f, "file://{}", folder.display())?,
            Location::Bucket { service, bucket, prefix } if prefix.as_ref().is_empty() => {
                write!(f, "{}://{bucket}", service.scheme())?;
            }
            Location::Bucket { service, bucket, prefix } => write!(f, "{}://{bucket}/{prefix}", service.scheme())?,
        }
        match &self.endpoint {
            Some(endpoint) => write!(f, " at {endpoint}"),
            None => Ok(()),
        }
    }
}

fn bucket(service: Service, rest: &str, text: &str) -> Result<Location, BadPlace> {
    if rest.contains(['@', '?']) {
        return Err(BadPlace::Secret("address of the remote"));
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if bucket.is_empty() || !bucket.chars().all(allowed) {
        return Err(BadPlace::Bucket(text.to_owned()));
    }
    let prefix = Prefix::parse(prefix).map_err(|_| BadPlace::Prefix(text.to_owned()))?;
    Ok(Location::Bucket { service, bucket: bucket.to_owned(), prefix })
}

fn absolute(path: &Path) -> PathBuf {
    // One place must not have two names: what is to be sent there is noted by its name.
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.canonicalize().unwrap_or_else(|_| path.components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RemotePlace, BadPlace> {
        RemotePlace::parse(text, Path::new("/project"))
    }

    #[test]
    fn addresses_are_shown_as_they_are_meant() {
        let cases = [
            ("s3://bucket/team/a", "s3://bucket/team/a"),
            ("s3://bucket", "s3://bucket"),
            ("s3://bucket/", "s3://bucket"),
            ("gs://bucket/a/", "gs://bucket/a"),
            ("az://container/a", "az://container/a"),
            ("file:///srv/cache", "file:///srv/cache"),
            ("/srv/cache/", "file:///srv/cache"),
            ("./cache", "file:///project/cache"),
        ];
        for (text, shown) in cases {
            assert_eq!(parse(text).unwrap().to_string(), shown, "{text}");
        }
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in
            ["", "http://host/x", "s3://", "s3:///x", "s3://b/../x", "s3://b/x//y", "file://relative", "s3://b c/x"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_key_in_an_address_is_refused_and_not_repeated() {
        for text in ["s3://AKIAXYZ:hunter2@bucket/x", "az://container/x?sig=hunter2", "gs://hunter2@bucket"] {
            let error = parse(text).unwrap_err();
            assert!(matches!(error, BadPlace::Secret(_)), "{error}");
            assert!(!error.to_string().contains("hunter2"));
        }
        let endpoint = parse("s3://bucket").unwrap().with_endpoint("https://me:hunter2@host");
        assert_eq!(endpoint, Err(BadPlace::Secret("endpoint")));
    }

    #[test]
    fn settings_belong_to_what_has_them() {
        assert!(parse("s3://b").unwrap().with_region("eu-central-1").is_ok());
        assert!(parse("gs://b").unwrap().with_region("eu").is_err());
        assert!(parse("/folder").unwrap().with_region("eu").is_err());
        assert!(parse("/folder").unwrap().with_endpoint("http://host").is_err());
        assert!(parse("s3://b").unwrap().with_endpoint("host:9000").is_err());
        let places = ["http://host:9000/", "http://host:9001"]
            .map(|endpoint| parse("s3://b/c").unwrap().with_endpoint(endpoint).unwrap().to_string());
        assert_eq!(places, ["s3://b/c at http://host:9000", "s3://b/c at http://host:9001"]);
    }
}
