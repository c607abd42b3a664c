//! What a repository holds at a commit, as the Hub lists it.

use std::collections::HashSet;

use super::checksum::Checksum;
use super::error::HubError;
use super::repository::Repository;

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

/// The most files of a repository, pages of its listing and bytes of all of them, and the longest query of a page. The
/// largest data sets that are files at all have some ten thousand.
const MOST_FILES: usize = 200_000;
const MOST_PAGES: usize = 2_000;
const MOST_BYTES: usize = 128 << 20;
const LONGEST_QUERY: usize = 8 << 10;

/// The longest path of a file that a file system takes.
const LONGEST_PATH: usize = 4096;

/// The largest file, so that the lengths of all of them have a sum.
const LARGEST_FILE: u64 = 1 << 44;

/// The files of a repository as they are listed page by page, by a server that may never come to an end.
pub(super) struct Listing {
    /// Whose files they are.
    repository: String,
    files: Vec<RemoteFile>,
    paths: HashSet<String>,
    /// The queries of the pages so far.
    queries: HashSet<String>,
    bytes: usize,
}

impl Listing {
    pub(super) fn of(repository: &Repository) -> Self {
        let (files, paths, queries) = (Vec::new(), HashSet::new(), HashSet::new());
        Self { repository: repository.written(), files, paths, queries, bytes: 0 }
    }

    /// One more file.
    pub(super) fn add(&mut self, file: RemoteFile) -> Result<(), HubError> {
        if !self.paths.insert(file.path.clone()) {
            return Err(self.bad(format!("it lists `{}` twice", file.path)));
        }
        if file.size > LARGEST_FILE {
            return Err(self.bad(format!("it lists `{}` with {} bytes", file.path, file.size)));
        }
        if self.files.len() == MOST_FILES {
            return Err(self.bad(format!("it lists more than {MOST_FILES} files")));
        }
        self.files.push(file);
        Ok(())
    }

    /// The page to ask for next, behind one of so many bytes that names it.
    pub(super) fn next_page(&mut self, bytes: usize, named: Option<String>) -> Result<Option<String>, HubError> {
        self.bytes += bytes;
        let Some(query) = named else { return Ok(None) };
        if query.len() > LONGEST_QUERY {
            return Err(self.bad(format!("a page of the listing has an address of {} bytes", query.len())));
        }
        if !self.queries.insert(query.clone()) {
            return Err(self.bad("the pages of the listing lead back to one that was there".to_owned()));
        }
        if self.queries.len() >= MOST_PAGES || self.bytes > MOST_BYTES {
            let megabytes = MOST_BYTES >> 20;
            return Err(self.bad(format!("its listing does not end within {MOST_PAGES} pages and {megabytes} MiB")));
        }
        Ok(Some(query))
    }

    pub(super) fn into_files(self) -> Vec<RemoteFile> {
        self.files
    }

    fn bad(&self, problem: String) -> HubError {
        HubError::BadAnswer { what: self.repository.clone(), problem }
    }
}

/// Whether a listed path stays below the folder that it is joined to.
pub(super) fn is_safe(path: &str) -> bool {
    !path.is_empty()
        && path.len() <= LONGEST_PATH
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
    use super::*;

    #[test]
    fn pages_that_lead_back_or_never_end_are_refused() {
        let repository = Repository::parse(super::super::RepositoryKind::Model, "owner/name").unwrap();
        let page = |listing: &mut Listing, query: &str| listing.next_page(100, Some(query.to_owned()));
        let mut listing = Listing::of(&repository);
        assert!(page(&mut listing, "cursor=a").is_ok() && page(&mut listing, "cursor=b").is_ok());
        let error = page(&mut listing, "cursor=a").unwrap_err().to_string();
        assert!(error.contains("lead back to one that was there"), "{error}");
        let mut listing = Listing::of(&repository);
        let pages = (0..1_000_000).take_while(|at| page(&mut listing, &format!("cursor={at}")).is_ok()).count();
        assert!(pages < MOST_PAGES);
        let mut listing = Listing::of(&repository);
        assert!(listing.next_page(MOST_BYTES + 1, Some("cursor=a".into())).is_err());
        assert!(page(&mut Listing::of(&repository), &"a".repeat(10_000)).is_err());
    }

    #[test]
    fn files_are_listed_once_and_not_without_end() {
        let repository = Repository::parse(super::super::RepositoryKind::Model, "owner/name").unwrap();
        let file = |path: String, size| RemoteFile { path, size, checksum: Checksum::GitBlob("b".repeat(40)) };
        let mut listing = Listing::of(&repository);
        listing.add(file("a".into(), 1)).unwrap();
        assert!(listing.add(file("a".into(), 1)).unwrap_err().to_string().contains("`a` twice"));
        assert!(listing.add(file("b".into(), u64::MAX)).is_err());
        let added = (0..MOST_FILES + 9).take_while(|at| listing.add(file(format!("{at}"), 1)).is_ok()).count();
        assert_eq!((added, listing.into_files().len()), (MOST_FILES - 1, MOST_FILES));
    }

    #[test]
    fn the_next_page_is_known_by_its_query() {
        let link = "<https://elsewhere.example/api/models/a/b/tree/main?recursive=true&cursor=Zm9v>; rel=\"next\"";
        assert_eq!(next_page(link).as_deref(), Some("recursive=true&cursor=Zm9v"));
        assert_eq!(next_page("<https://x.example/?a=1>; rel=\"prev\""), None);
    }
}
