//! What a mutable reference on a server was fixed to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Stands between a revision and the digest of what it lists, where a server does not name its commits.
const LISTING: &str = "@sha256:";

/// What something was pinned to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pinned {
    pub commit: String,
    /// The files at that commit, each with its checksum and length in the words of the stage kind that pinned it.
    /// Empty where the commit alone is written down.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

impl Pinned {
    /// A commit, without its files.
    pub fn commit(commit: impl Into<String>) -> Self {
        Self { commit: commit.into(), files: BTreeMap::new() }
    }

    /// What is wrong with it, if anything: what is pinned never moves, so that a branch's name is no pin, and its files
    /// are in its folder.
    pub fn fault(&self) -> Option<String> {
        if !is_commit(&self.commit) && !is_listing(&self.commit) {
            return Some(format!("`{}` is no commit, which has 40 hexadecimal digits", self.commit));
        }
        self.files.iter().find_map(|(path, line)| {
            if !is_plain(path) {
                return Some(format!("`{path}` is no path of a file in a folder"));
            }
            (!is_checksum(line))
                .then(|| format!("`{line}` of `{path}` is no checksum and length, such as `sha256:` with 64 hexadecimal digits, and `1234`"))
        })
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_commit(text: &str) -> bool {
    is_hex(text, 40)
}

/// `master@sha256:9f86…`.
fn is_listing(text: &str) -> bool {
    text.split_once(LISTING).is_some_and(|(revision, digest)| {
        !revision.is_empty() && !revision.contains(|c: char| c.is_control() || c.is_whitespace()) && is_hex(digest, 64)
    })
}

/// `sha256:9f86… 1234`, or `git:8d0e… 7`.
fn is_checksum(line: &str) -> bool {
    let Some((checksum, size)) = line.split_once(' ') else { return false };
    let is_sound = match checksum.split_once(':') {
        Some(("sha256", hex)) => is_hex(hex, 64),
        Some(("git", hex)) => is_hex(hex, 40),
        _ => false,
    };
    is_sound && size.parse::<u64>().is_ok()
}

/// Whether a path names something in its folder, in one way, and shows as what it is.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|part| !matches!(part, "" | "." | ".."))
        && !path.contains(|c: char| c == '\\' || c.is_control())
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn a_pin_is_a_commit_or_a_digest_of_what_is_listed() {
        let digest = "c".repeat(64);
        for sound in [COMMIT.to_owned(), format!("master@sha256:{digest}")] {
            assert_eq!(Pinned::commit(sound).fault(), None);
        }
        let upper = COMMIT.to_uppercase();
        let empty = format!("@sha256:{digest}");
        for moving in ["main", "", "../../etc", "zzz", &COMMIT[1..], &upper, "v1@sha256:12", &empty, "\u{1b}[31m"] {
            assert!(Pinned::commit(moving).fault().is_some(), "{moving}");
        }
    }

    #[test]
    fn files_have_plain_paths_and_whole_checksums() {
        let fault = |path: &str, line: &str| {
            let files = BTreeMap::from([(path.to_owned(), line.to_owned())]);
            Pinned { commit: COMMIT.to_owned(), files }.fault()
        };
        let (git, sha256) = (format!("git:{} 7", "b".repeat(40)), format!("sha256:{} 5000000000", "a".repeat(64)));
        for sound in [&git, &sha256] {
            assert_eq!(fault("a b/c: d.json", sound), None);
        }
        for path in ["../a", "/a", "a//b", "a/./b", "", ".", "a/..", "a\\b", "a\nb", "a\u{7f}"] {
            assert!(fault(path, &git).is_some(), "{path:?}");
        }
        let long = format!("{git} 8");
        for line in [
            "",
            "git:bb 7",
            &git[..44],
            "md5:x 1",
            &long,
            "sha256:aa",
            &git.replace('b', "g"),
            &git.replace(" 7", " -7"),
        ] {
            assert!(fault("a", line).is_some(), "{line}");
        }
    }
}
