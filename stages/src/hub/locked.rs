//! Files of a repository as `pipeline.lock` has them: a line with checksum and length for each.

use std::collections::BTreeMap;

use super::checksum::Checksum;
use super::error::HubError;
use super::listing::{RemoteFile, is_safe};

/// Of a repository with more files than this the commit alone is written down: a lock file is read by people.
const MOST_FILES: usize = 2000;

/// What is written down: `sha256:9f86… 1234`, or `git:8d0e… 7` for small files.
pub(super) fn lines(files: &[RemoteFile]) -> BTreeMap<String, String> {
    if files.len() > MOST_FILES {
        return BTreeMap::new();
    }
    let line = |file: &RemoteFile| {
        let (kind, hex) = match &file.checksum {
            Checksum::Sha256(hex) => ("sha256", hex),
            Checksum::GitBlob(hex) => ("git", hex),
        };
        (file.path.clone(), format!("{kind}:{hex} {}", file.size))
    };
    files.iter().map(line).collect()
}

/// What was written down, sorted by path.
pub(super) fn files(lines: &BTreeMap<String, String>) -> Result<Vec<RemoteFile>, HubError> {
    lines.iter().map(|(path, line)| file(path, line)).collect()
}

fn file(path: &str, line: &str) -> Result<RemoteFile, HubError> {
    if !is_safe(path) {
        return Err(HubError::UnsafeName(path.to_owned()));
    }
    let bad = || HubError::BadLock { path: path.to_owned(), line: line.to_owned() };
    let (checksum, size) = line.split_once(' ').ok_or_else(bad)?;
    let size = size.parse().map_err(|_| bad())?;
    let is_hex = |hex: &str, digits| hex.len() == digits && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    let checksum = match checksum.split_once(':') {
        Some(("sha256", hex)) if is_hex(hex, 64) => Checksum::Sha256(hex.to_ascii_lowercase()),
        Some(("git", hex)) if is_hex(hex, 40) => Checksum::GitBlob(hex.to_ascii_lowercase()),
        _ => return Err(bad()),
    };
    Ok(RemoteFile { path: path.to_owned(), size, checksum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_down_is_read_again() {
        let file = |path: &str, checksum, size| RemoteFile { path: path.to_owned(), size, checksum };
        let listed = [
            file("a/b.json", Checksum::GitBlob("b".repeat(40)), 7),
            file("model.safetensors", Checksum::Sha256("a".repeat(64)), 5_000_000_000),
        ];
        assert_eq!(files(&lines(&listed)).unwrap(), listed);
        let many: Vec<_> =
            (0..=MOST_FILES).map(|i| file(&format!("{i}"), Checksum::GitBlob("b".repeat(40)), 1)).collect();
        assert!(lines(&many).is_empty());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let sound = format!("git:{} 7", "b".repeat(40));
        for (path, line) in
            [("../a", sound.as_str()), ("a", "git:bb 7"), ("a", ""), ("a", &sound[..44]), ("a", "md5:x 1")]
        {
            assert!(file(path, line).is_err(), "{path} {line}");
        }
    }
}
