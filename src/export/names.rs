//! Names that Kubernetes takes (DNS labels of RFC 1123), a different one for each name of ours.

use std::collections::HashSet;

use cache::Digest;

/// Letters of a digest that make a name its own.
const MARK: usize = 6;

/// Hands out names.
pub(super) struct Names {
    taken: HashSet<String>,
    longest: usize,
}

impl Names {
    /// Names of at most so many letters, none of them among those that are reserved.
    pub(super) fn new(longest: usize, reserved: &[&str]) -> Self {
        Self { taken: reserved.iter().map(|&name| name.to_owned()).collect(), longest }
    }

    /// A label that reads like a name: the same for the same names in the same order. `adapter[lora.rank=4]` is
    /// `adapter-lora-rank-4`.
    pub(super) fn label(&mut self, name: &str) -> String {
        let plain = label(name);
        let mut wanted = plain.clone();
        let digest = Digest::of(name.as_bytes()).to_string();
        let mut mark = MARK;
        while wanted.is_empty() || wanted.len() > self.longest || self.taken.contains(&wanted) {
            wanted = marked(&plain, &digest[..mark.min(digest.len())], self.longest);
            mark += 1;
        }
        self.taken.insert(wanted.clone());
        wanted
    }
}

/// A label with a mark behind it, of at most so many letters.
pub(super) fn marked(label: &str, mark: &str, longest: usize) -> String {
    let room = longest.saturating_sub(mark.len() + 1);
    let kept = label[..label.len().min(room)].trim_end_matches('-');
    if kept.is_empty() { mark.to_owned() } else { format!("{kept}-{mark}") }
}

/// Small letters and digits, all else one hyphen between them; empty where nothing is left.
pub(super) fn label(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_label(name: &str, longest: usize) -> bool {
        let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !name.is_empty()
            && name.len() <= longest
            && name.bytes().all(inner)
            && !name.starts_with('-')
            && !name.ends_with('-')
    }

    #[test]
    fn names_read_like_what_they_stand_for() {
        let mut names = Names::new(63, &["dag"]);
        assert_eq!(
            names.label("adapter[lora.rank=4,optimizer.learning_rate=0.001]"),
            "adapter-lora-rank-4-optimizer-learning-rate-0-001"
        );
        assert_eq!(names.label("data/articles"), "data-articles");
        assert_eq!(names.label("Merged_Model"), "merged-model");
    }

    #[test]
    fn every_name_has_a_label_of_its_own() {
        let mut names = Names::new(63, &["dag"]);
        let long = "x".repeat(100);
        let hyphens = format!("{}-{}", "y".repeat(55), "z".repeat(40));
        let given = [
            "a_b",
            "a-b",
            "A-B",
            "a.b",
            "dag",
            "Dag",
            "___",
            "[=]",
            "über",
            "ber",
            &long,
            &format!("{long}y"),
            &hyphens,
        ];
        let made: Vec<String> = given.iter().map(|name| names.label(name)).collect();
        for (name, label) in given.iter().zip(&made) {
            assert!(is_label(label, 63), "{name}: {label}");
            assert_ne!(label, "dag");
        }
        assert_eq!(made.iter().collect::<HashSet<_>>().len(), given.len(), "{made:?}");
    }

    #[test]
    fn the_same_names_get_the_same_labels() {
        let labels = || {
            let mut names = Names::new(63, &[]);
            ["a_b", "a-b", "a.b"].map(|name| names.label(name))
        };
        assert_eq!(labels(), labels());
    }
}
