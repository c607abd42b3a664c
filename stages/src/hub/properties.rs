//! What the readers of a Hub's answers hold for any bytes: they end without a panic, and no file is outside of its
//! folder or without a checksum.

use std::path::{Component, Path};

use super::connection::content_range;
use super::hugging_face::TreeEntry;
use super::listing::{Listing, next_page};
use super::modelscope;
use super::repository::{Repository, RepositoryKind};

/// Listings of both services, and the headers that lead on.
pub fn hub_answers(data: &[u8]) {
    let repository = Repository::parse(RepositoryKind::Model, "owner/name").expect("it is a name");
    let mut listing = Listing::of(&repository);
    for entry in serde_json::from_slice::<Vec<TreeEntry>>(data).into_iter().flatten() {
        if let Ok(Some(file)) = entry.into_file() {
            is_checked(&file);
            let _ = listing.add(file);
        }
    }
    modelscope::files_of_answer(data, &repository).iter().flatten().for_each(is_checked);
    let text = String::from_utf8_lossy(data);
    let mut seen = 0;
    while let Ok(Some(_)) = listing.next_page(data.len(), next_page(&text)) {
        seen += 1;
        assert!(seen < 2, "a page that leads to itself is followed");
    }
    let mut headers = reqwest::header::HeaderMap::new();
    if let Ok(value) = reqwest::header::HeaderValue::from_bytes(data) {
        headers.insert(reqwest::header::CONTENT_RANGE, value);
        let _ = content_range(&headers);
    }
}

fn is_checked(file: &super::RemoteFile) {
    let parts = Path::new(&file.path).components();
    assert!(parts.into_iter().all(|part| matches!(part, Component::Normal(_))), "{:?}", file.path);
    assert!(matches!(file.checksum.hex().len(), 40 | 64), "{file:?}");
}
