//! ModelScope: the same questions as to the Hub, asked in its own API's words.
//!
//! Known from its Python SDK and from what other clients read: a listing names for each file the SHA-256 of its
//! content, its length and the commit that changed it last, and for the whole the first digits of the newest commit. A
//! revision that does not exist is an empty listing and no error. What it declines it may answer with status 200,
//! `Success: false` and a message.

use engine::visible::on_one_line;
use reqwest::Url;
use reqwest::header::HeaderValue;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::checksum::{Checksum, hex};
use super::connection::{Connection, Page, Subject, Token};
use super::error::HubError;
use super::listing::{Listing, RemoteFile, is_safe};
use super::repository::{Repository, RepositoryKind, Snapshot, is_commit};
use super::service::{Api, HubFuture, Variable};

/// Entries of a dataset's listing that come at once.
const PAGE_SIZE: usize = 200;

/// Pages of a listing; what has more files is no data set to fetch file by file.
const MOST_PAGES: usize = 500;

/// Bytes of all pages of a listing.
const MOST_BYTES: usize = 128 << 20;

/// Characters of a server's message that are told.
const LONGEST_MESSAGE: usize = 300;

/// Stands between a revision and the digest of its listing, in the pin of a repository whose commit the API does not
/// name.
const LISTING: &str = "@sha256:";

#[derive(Deserialize)]
struct Answer {
    #[serde(rename = "Data")]
    data: Option<Answered>,
    #[serde(rename = "TotalCount")]
    total: Option<usize>,
    /// An answer without it is one that succeeded.
    #[serde(rename = "Success")]
    success: Option<bool>,
    #[serde(rename = "Code")]
    code: Option<serde_json::Value>,
    #[serde(rename = "Message")]
    message: Option<String>,
}

/// One page of a listing, or the whole.
struct ListedPage {
    entries: Vec<Entry>,
    latest: Option<Latest>,
    /// Entries of all pages, where the server says how many there are.
    total: Option<usize>,
    /// Length of the answer.
    bytes: usize,
}

#[derive(Deserialize)]
struct Answered {
    #[serde(rename = "Files")]
    files: Option<Vec<Entry>>,
    #[serde(rename = "LatestCommitter")]
    latest: Option<Latest>,
    #[serde(rename = "TotalCount")]
    total: Option<usize>,
}

#[derive(Deserialize)]
struct Latest {
    #[serde(rename = "Id", default)]
    id: String,
    #[serde(rename = "ShortId", default)]
    short_id: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "Path")]
    path: String,
    #[serde(rename = "Type", default)]
    kind: String,
    #[serde(rename = "Size", default)]
    size: u64,
    #[serde(rename = "Sha256", default)]
    sha256: Option<String>,
    #[serde(rename = "Revision", default)]
    revision: Option<String>,
}

pub(super) struct ModelScope;

impl Api for ModelScope {
    fn prefix(&self) -> &'static str {
        "modelscope:"
    }

    fn pin_kind(&self, kind: RepositoryKind) -> &'static str {
        match kind {
            RepositoryKind::Model => "modelscope-model",
            RepositoryKind::Dataset => "modelscope-dataset",
        }
    }

    fn variables(&self) -> (&'static str, &'static str) {
        ("MODELSCOPE_ENDPOINT", "MODELSCOPE_API_TOKEN")
    }

    fn address(&self, variable: Variable<'_>) -> String {
        format!("https://{}", variable("MODELSCOPE_DOMAIN").as_deref().unwrap_or("www.modelscope.cn"))
    }

    fn default_revision(&self) -> &'static str {
        "master"
    }

    fn page_folder(&self, kind: RepositoryKind) -> &'static str {
        match kind {
            RepositoryKind::Model => "models/",
            RepositoryKind::Dataset => "datasets/",
        }
    }

    /// Its own clients are known by it.
    fn cookie(&self, token: &Token) -> Option<HeaderValue> {
        token.cookie("m_session_id")
    }

    /// Where a pin is no commit, only the listing shows that a branch has moved.
    fn commits_name_content(&self) -> bool {
        false
    }

    /// `api/v1/models/owner/name/repo?Revision=…&FilePath=…`.
    fn file_url(&self, connection: &Connection, snapshot: &Snapshot, path: &str) -> Url {
        let mut url = api(connection, &snapshot.repository, &["repo"]);
        url.query_pairs_mut().append_pair("Revision", revision(&snapshot.commit)).append_pair("FilePath", path);
        url
    }

    fn resolve<'a>(
        &'a self,
        connection: &'a Connection,
        repository: &'a Repository,
        revision: &'a str,
    ) -> HubFuture<'a, String> {
        Box::pin(resolve(connection, repository, revision))
    }

    fn list<'a>(&'a self, connection: &'a Connection, snapshot: &'a Snapshot) -> HubFuture<'a, Vec<RemoteFile>> {
        Box::pin(list(connection, snapshot))
    }
}

/// What a revision currently resolves to: its commit, or, where the API does not name that, the revision and a
/// digest of what it lists.
async fn resolve(connection: &Connection, repository: &Repository, asked: &str) -> Result<String, HubError> {
    let (entries, latest) = entries(connection, repository, asked, Subject::Revision(asked)).await?;
    let commits = || entries.iter().filter_map(|entry| entry.revision.as_deref()).filter(|commit| is_commit(commit));
    let commit = latest.and_then(|latest| match is_commit(&latest.id) {
        true => Some(latest.id),
        // The newest commit is that of a file, unless it only removed some.
        false if latest.short_id.len() >= 7 => {
            commits().find(|commit| commit.starts_with(&latest.short_id)).map(str::to_owned)
        }
        false => None,
    });
    match commit {
        Some(commit) => Ok(commit),
        None => Ok(format!("{asked}{LISTING}{}", digest(&files(entries, repository)?))),
    }
}

/// The files of a snapshot, which must be those that were pinned.
async fn list(connection: &Connection, snapshot: &Snapshot) -> Result<Vec<RemoteFile>, HubError> {
    let asked = revision(&snapshot.commit);
    let (entries, _) = entries(connection, &snapshot.repository, asked, Subject::Listing(asked)).await?;
    let files = files(entries, &snapshot.repository)?;
    if let Some((_, pinned)) = snapshot.commit.split_once(LISTING)
        && pinned != digest(&files)
    {
        return Err(HubError::Moved { name: snapshot.repository.written(), revision: asked.to_owned() });
    }
    Ok(files)
}

/// What a revision lists, and its newest commit. A revision without a file is one that does not exist.
async fn entries(
    connection: &Connection,
    repository: &Repository,
    asked: &str,
    subject: Subject<'_>,
) -> Result<(Vec<Entry>, Option<Latest>), HubError> {
    let path = match repository.kind() {
        RepositoryKind::Model => ["repo", "files"],
        RepositoryKind::Dataset => ["repo", "tree"],
    };
    let mut url = api(connection, repository, &path);
    url.query_pairs_mut().append_pair("Revision", asked).append_pair("Recursive", "true");
    let (entries, latest) = match repository.kind() {
        RepositoryKind::Model => {
            let page = listed_page(connection, &url, repository, subject).await?;
            (page.entries, page.latest)
        }
        RepositoryKind::Dataset => all_pages(connection, &url, repository, subject).await?,
    };
    match entries.iter().all(Entry::is_folder) {
        true => Err(HubError::RevisionNotFound { name: repository.written(), revision: asked.to_owned() }),
        false => Ok((entries, latest)),
    }
}

/// What a dataset's revision lists, page by page, and its newest commit.
async fn all_pages(
    connection: &Connection,
    url: &Url,
    repository: &Repository,
    subject: Subject<'_>,
) -> Result<(Vec<Entry>, Option<Latest>), HubError> {
    let bad = |problem: String| HubError::BadAnswer { what: repository.written(), problem };
    let mut all: Vec<Entry> = Vec::new();
    let mut latest = None;
    let mut bytes = 0;
    for number in 1..=MOST_PAGES {
        let mut url = url.clone();
        url.query_pairs_mut()
            .append_pair("PageNumber", &number.to_string())
            .append_pair("PageSize", &PAGE_SIZE.to_string());
        let page = listed_page(connection, &url, repository, subject).await?;
        bytes += page.bytes;
        if bytes > MOST_BYTES {
            return Err(bad(format!("its listing has more than {} MiB", MOST_BYTES >> 20)));
        }
        latest = latest.or(page.latest);
        let count = page.entries.len();
        // A server that does not know pages gives the first one again.
        let again = page.entries.first().is_some_and(|first| all.iter().any(|known| known.path == first.path));
        if !again {
            all.extend(page.entries);
        }
        // A server may give fewer at once than are asked for.
        let missing = page.total.filter(|total| all.len() < *total);
        match missing {
            Some(total) if again || count == 0 => {
                let what = if again { "entries that were there" } else { "nothing" };
                return Err(bad(format!("page {number} of its listing has {what}, after {} of {total}", all.len())));
            }
            None if again || count < PAGE_SIZE => return Ok((all, latest)),
            Some(_) | None => {}
        }
    }
    Err(bad(format!("its listing does not end within {MOST_PAGES} pages")))
}

/// One answer of a listing. One that declines is an error in the server's words, after retries where they could help.
async fn listed_page(
    connection: &Connection,
    url: &Url,
    repository: &Repository,
    subject: Subject<'_>,
) -> Result<ListedPage, HubError> {
    let mut failures = 0;
    let (answer, bytes) = loop {
        let Page { value: answer, bytes, .. } = connection.json::<Answer>(url, repository, subject).await?;
        if answer.success != Some(false) {
            break (answer, bytes);
        }
        let (message, status) = (answer.reason(), answer.status());
        let declined = HubError::Declined { what: repository.written(), message, status };
        connection.pause_or_give_up(declined, &mut failures).await?;
    };
    let total = answer.total;
    // What is not there is listed as nothing.
    let Some(data) = answer.data else { return Ok(ListedPage { entries: Vec::new(), latest: None, total, bytes }) };
    let entries = data.files.unwrap_or_default();
    Ok(ListedPage { entries, latest: data.latest, total: data.total.or(total), bytes })
}

impl Answer {
    /// Why the server declines, in its words.
    fn reason(&self) -> String {
        let message = self.message.as_deref().map(str::trim).filter(|message| !message.is_empty());
        match (message, &self.code) {
            (Some(message), _) => clipped(message),
            (None, Some(code)) => clipped(&format!("code {code}, and no message")),
            (None, None) => "no message".to_owned(),
        }
    }

    /// Its code where that is an HTTP status, as that of success is; most are numbers of its own, of eleven digits.
    fn status(&self) -> Option<u16> {
        let code = self.code.as_ref()?;
        let status = code.as_u64().or_else(|| code.as_str()?.parse().ok())?;
        u16::try_from(status).ok().filter(|status| (100..600).contains(status))
    }
}

impl Entry {
    fn is_folder(&self) -> bool {
        self.kind == "tree"
    }
}

/// The beginning of a server's text, on one line.
fn clipped(text: &str) -> String {
    match text.char_indices().nth(LONGEST_MESSAGE) {
        Some((end, _)) => format!("{} [...]", on_one_line(&text[..end])),
        None => on_one_line(text).into_owned(),
    }
}

/// The files among the entries, each with what its content must turn out to be.
fn files(entries: Vec<Entry>, repository: &Repository) -> Result<Vec<RemoteFile>, HubError> {
    let file = |entry: Entry| {
        if !is_safe(&entry.path) {
            return Err(HubError::UnsafeName(entry.path));
        }
        let sha256 = entry.sha256.unwrap_or_default().to_ascii_lowercase();
        if sha256.len() != 64 || !sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            let problem = "a file is listed without a checksum".to_owned();
            return Err(HubError::BadAnswer { what: entry.path, problem });
        }
        Ok(RemoteFile { path: entry.path, size: entry.size, checksum: Checksum::Sha256(sha256) })
    };
    let mut listing = Listing::of(repository);
    entries.into_iter().filter(|entry| !entry.is_folder()).try_for_each(|entry| listing.add(file(entry)?))?;
    Ok(listing.into_files())
}

/// The files that one answer lists.
#[cfg(any(test, fuzzing))]
pub(super) fn files_of_answer(json: &[u8], repository: &Repository) -> Option<Vec<RemoteFile>> {
    let answer: Answer = serde_json::from_slice(json).ok()?;
    files(answer.data?.files?, repository).ok()
}

/// A digest of what is listed, in whatever order.
fn digest(files: &[RemoteFile]) -> String {
    let mut lines: Vec<String> =
        files.iter().map(|file| format!("{} {} {}\n", file.checksum.hex(), file.size, file.path)).collect();
    lines.sort();
    hex(&Sha256::digest(lines.concat()))
}

/// What to ask for, of a pin.
fn revision(pin: &str) -> &str {
    pin.split_once(LISTING).map_or(pin, |(revision, _)| revision)
}

fn api(connection: &Connection, repository: &Repository, rest: &[&str]) -> Url {
    let path = ["api", "v1", repository.kind().api_segment()].into_iter();
    connection.url(path.chain(repository.name().split('/')).chain(rest.iter().copied()))
}
