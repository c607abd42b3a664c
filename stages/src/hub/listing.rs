//! What a repository holds at a commit, as the Hub lists it.

use serde::Deserialize;

use super::checksum::Checksum;
use super::error::HubError;

/// A file of a repository, with what its content must turn out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFile {
    /// Its path in the repository, with `/`; checked to stay below the folder it is put in.
    pub path: String,
    /// Its length in bytes.
    pub size: u64,
    /// Its content.
    pub checksum: Checksum,
}

/// One entry of the Hub's `tree` answer.
#[derive(Debug, Deserialize)]
pub(super) struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    oid: String,
    #[serde(default)]
    size: u64,
    lfs: Option<LargeFile>,
}

#[derive(Debug, Deserialize)]
struct LargeFile {
    oid: String,
    size: u64,
}

impl TreeEntry {
    /// The file, or nothing for a folder.
    pub(super) fn into_file(self) -> Result<Option<RemoteFile>, HubError> {
        if self.kind != "file" {
            return Ok(None);
        }
        if !is_safe(&self.path) {
            return Err(HubError::UnsafeName(self.path));
        }
        let (size, checksum) = match self.lfs {
            Some(large) => {
                let hex = large.oid.strip_prefix("sha256:").unwrap_or(&large.oid).to_ascii_lowercase();
                (large.size, Checksum::Sha256(hex))
            }
            None => (self.size, Checksum::GitBlob(self.oid.to_ascii_lowercase())),
        };
        let digits = match checksum {
            Checksum::Sha256(_) => 64,
            Checksum::GitBlob(_) => 40,
        };
        if checksum.hex().len() != digits || !checksum.hex().bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(HubError::BadAnswer {
                what: self.path,
                problem: "a file is listed without a checksum".to_owned(),
            });
        }
        Ok(Some(RemoteFile { path: self.path, size, checksum }))
    }
}

/// Whether a listed path stays below the folder that it is joined to.
pub(super) fn is_safe(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(['\\', '\0'])
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// The query of the `rel="next"` address in a `Link` header.
///
/// Only the query is used: mirrors pass the header on with the original server's address in it, and the token must go
/// nowhere else than to the endpoint that was asked for.
pub(super) fn next_page(link: &str) -> Option<String> {
    link.split(',').find_map(|part| {
        let (address, relation) = part.trim().split_once('>')?;
        let address = address.strip_prefix('<')?;
        relation.contains("rel=\"next\"").then_some(())?;
        address.split_once('?').map(|(_, query)| query.to_owned())
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn entry(json: serde_json::Value) -> Result<Option<RemoteFile>, HubError> {
        serde_json::from_value::<TreeEntry>(json).unwrap().into_file()
    }

    #[test]
    fn large_files_are_known_by_sha256_and_small_ones_by_git_blob() {
        let sha256 = "a".repeat(64);
        let large = entry(serde_json::json!({
            "type": "file", "path": "model.safetensors", "oid": "b".repeat(40), "size": 134,
            "lfs": {"oid": sha256, "size": 1000, "pointerSize": 134}, "xetHash": "c".repeat(64),
        }));
        let expected = RemoteFile { path: "model.safetensors".into(), size: 1000, checksum: Checksum::Sha256(sha256) };
        assert_eq!(large.unwrap().unwrap(), expected);
        let small = entry(serde_json::json!({"type": "file", "path": "a/b.json", "oid": "b".repeat(40), "size": 7}));
        assert_eq!(small.unwrap().unwrap().checksum, Checksum::GitBlob("b".repeat(40)));
        let folder = entry(serde_json::json!({"type": "directory", "path": "a", "oid": "b".repeat(40), "size": 0}));
        assert_eq!(folder.unwrap(), None);
    }

    #[test]
    fn names_that_climb_are_refused() {
        for path in ["../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a\\..\\b", "", "a/.."] {
            let listed = entry(serde_json::json!({"type": "file", "path": path, "oid": "b".repeat(40), "size": 1}));
            assert!(matches!(listed, Err(HubError::UnsafeName(_))), "{path}");
        }
    }

    #[test]
    fn a_file_without_a_checksum_is_refused() {
        let listed = entry(serde_json::json!({"type": "file", "path": "a", "oid": "", "size": 1}));
        assert!(matches!(listed, Err(HubError::BadAnswer { .. })));
    }

    #[test]
    fn the_next_page_is_known_by_its_query() {
        let link = "<https://elsewhere.example/api/models/a/b/tree/main?recursive=true&cursor=Zm9v>; rel=\"next\"";
        assert_eq!(next_page(link).as_deref(), Some("recursive=true&cursor=Zm9v"));
        assert_eq!(next_page("<https://x.example/?a=1>; rel=\"prev\""), None);
    }
}
