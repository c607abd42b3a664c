//! The Hugging Face Hub, and mirrors of it.

use reqwest::Url;
use serde::Deserialize;

use super::cache;
use super::checksum::Checksum;
use super::connection::{Connection, Subject};
use super::error::HubError;
use super::listing::{Listing, RemoteFile, is_safe};
use super::repository::{Repository, RepositoryKind, Snapshot, is_commit};
use super::service::{Api, HubFuture, Variable};

pub(super) struct HuggingFace;

impl Api for HuggingFace {
    fn prefix(&self) -> &'static str {
        ""
    }

    fn pin_kind(&self, kind: RepositoryKind) -> &'static str {
        match kind {
            RepositoryKind::Model => "hub-model",
            RepositoryKind::Dataset => "hub-dataset",
        }
    }

    fn variables(&self) -> (&'static str, &'static str) {
        ("HF_ENDPOINT", "HF_TOKEN")
    }

    fn address(&self, _variable: Variable<'_>) -> String {
        "https://huggingface.co".to_owned()
    }

    fn default_revision(&self) -> &'static str {
        "main"
    }

    fn converted_revision(&self) -> Option<&'static str> {
        Some("refs/convert/parquet")
    }

    fn has_bare_names(&self) -> bool {
        true
    }

    fn page_folder(&self, kind: RepositoryKind) -> &'static str {
        match kind {
            RepositoryKind::Model => "",
            RepositoryKind::Dataset => "datasets/",
        }
    }

    fn stored_token(&self) -> Option<String> {
        cache::stored_token()
    }

    fn cache(&self) -> Option<hf_hub::Cache> {
        cache::from_environment()
    }

    fn commits_name_content(&self) -> bool {
        true
    }

    /// `owner/name/resolve/commit/path/of/file`; data sets begin with `datasets`.
    fn file_url(&self, connection: &Connection, snapshot: &Snapshot, path: &str) -> Url {
        let repository = &snapshot.repository;
        let prefix = self.page_folder(repository.kind()).split_terminator('/');
        let segments = prefix.chain(repository.name().split('/')).chain(["resolve", snapshot.commit.as_str()]);
        connection.url(segments.chain(path.split('/')))
    }

    fn resolve<'a>(
        &'a self,
        connection: &'a Connection,
        repository: &'a Repository,
        revision: &'a str,
    ) -> HubFuture<'a, String> {
        Box::pin(async move {
            let url = connection.url(api_path(repository).chain(["revision", revision]));
            let info = connection.json::<RevisionInfo>(&url, repository, Subject::Revision(revision)).await?.value;
            if is_commit(&info.sha) {
                return Ok(info.sha);
            }
            let problem = format!("`{}` is not a commit", info.sha);
            Err(HubError::BadAnswer { what: repository.name().to_owned(), problem })
        })
    }

    fn list<'a>(&'a self, connection: &'a Connection, snapshot: &'a Snapshot) -> HubFuture<'a, Vec<RemoteFile>> {
        Box::pin(async move {
            let repository = &snapshot.repository;
            let mut url = connection.url(api_path(repository).chain(["tree", snapshot.commit.as_str()]));
            url.set_query(Some("recursive=true"));
            let mut listing = Listing::of(repository);
            loop {
                let subject = Subject::Listing(&snapshot.commit);
                let page = connection.json::<Vec<TreeEntry>>(&url, repository, subject).await?;
                for entry in page.value {
                    if let Some(file) = entry.into_file()? {
                        listing.add(file)?;
                    }
                }
                match listing.next_page(page.bytes, page.next)? {
                    None => return Ok(listing.into_files()),
                    Some(query) => url.set_query(Some(&query)),
                }
            }
        })
    }
}

/// `api/models/owner/name`, in segments.
fn api_path(repository: &Repository) -> impl Iterator<Item = &str> {
    ["api", repository.kind().api_segment()].into_iter().chain(repository.name().split('/'))
}

#[derive(Deserialize)]
struct RevisionInfo {
    sha: String,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(json: serde_json::Value) -> Result<Option<RemoteFile>, HubError> {
        serde_json::from_value::<TreeEntry>(json).unwrap().into_file()
    }

    #[test]
    fn names_that_climb_are_refused() {
        for path in ["../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a\\..\\b", "", "a/..", &"a/".repeat(3000)] {
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
}
