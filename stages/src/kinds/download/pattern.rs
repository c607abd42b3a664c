//! Patterns of file names as the Hub's own tools read them: huggingface_hub's `filter_repo_objects`, which matches by
//! Python's `fnmatch.fnmatchcase`. Every text is a pattern.

/// A pattern.
pub(super) struct Pattern(Vec<Piece>);

enum Piece {
    /// `*`: any text, with `/`.
    Text,
    Letter(char),
    /// `?`, `[…]`: one letter.
    Set(Set),
}

/// The letters within these ranges, or all others.
struct Set {
    negated: bool,
    ranges: Vec<(char, char)>,
}

impl Pattern {
    pub(super) fn new(text: &str) -> Self {
        let mut text: Vec<char> = text.chars().map(slash).collect();
        if text.last() == Some(&'/') {
            // All that is in the folder.
            text.push('*');
        }
        let mut pieces = Vec::new();
        let mut rest = text.as_slice();
        while let Some((first, after)) = rest.split_first() {
            rest = after;
            pieces.push(match first {
                '*' => Piece::Text,
                '?' => Piece::Set(Set { negated: true, ranges: Vec::new() }),
                '[' => match closing(after) {
                    Some(at) => {
                        rest = &after[at + 1..];
                        Piece::Set(Set::of(&after[..at]))
                    }
                    None => Piece::Letter('['),
                },
                letter => Piece::Letter(*letter),
            });
        }
        Self(pieces)
    }

    /// Whether a name is of this pattern, in as many steps as its length times the pattern's at most.
    pub(super) fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().map(slash).collect();
        let (mut at, mut piece): (usize, usize) = (0, 0);
        // The piece behind the last `*`, and where in the name it was tried last. Where it fits nowhere, an earlier `*`
        // that takes more does not help.
        let mut tried: Option<(usize, usize)> = None;
        while at < name.len() {
            let is_next = match self.0.get(piece) {
                Some(Piece::Text) => {
                    piece += 1;
                    tried = Some((piece, at));
                    continue;
                }
                Some(Piece::Letter(letter)) => *letter == name[at],
                Some(Piece::Set(set)) => set.has(name[at]),
                None => false,
            };
            if is_next {
                (at, piece) = (at + 1, piece + 1);
                continue;
            }
            let Some((behind, from)) = tried else { return false };
            (at, piece) = (from + 1, behind);
            tried = Some((piece, at));
        }
        self.0[piece..].iter().all(|piece| matches!(piece, Piece::Text))
    }
}

impl Set {
    /// The set that is written so between brackets.
    fn of(written: &[char]) -> Self {
        // What stands between the hyphens that make ranges: none at the beginning, or right behind a range.
        let mut parts: Vec<Vec<char>> = Vec::new();
        let mut rest = written;
        let mut first = if written.first() == Some(&'!') { 2 } else { 1 };
        while let Some(at) = rest.iter().skip(first).position(|letter| *letter == '-') {
            let (part, after) = rest.split_at(first + at);
            parts.push(part.to_vec());
            rest = &after[1..];
            first = 2;
        }
        match parts.last_mut() {
            Some(last) if rest.is_empty() => last.push('-'),
            _ => parts.push(rest.to_vec()),
        }
        // A range that ends before it begins has no letters.
        for at in (1..parts.len()).rev() {
            if parts[at - 1].last() > parts[at].first() {
                let after = parts.remove(at);
                parts[at - 1].pop();
                parts[at - 1].extend_from_slice(&after[1..]);
            }
        }
        let negated = parts[0].first() == Some(&'!');
        if negated {
            parts[0].remove(0);
        }
        let between = parts.windows(2).map(|pair| match (pair[0].last(), pair[1].first()) {
            (Some(from), Some(to)) => (*from, *to),
            // Nothing is left before it.
            _ => ('-', '-'),
        });
        let letters = parts.iter().flatten().map(|letter| (*letter, *letter));
        Self { negated, ranges: letters.chain(between).collect() }
    }

    fn has(&self, letter: char) -> bool {
        self.ranges.iter().any(|(from, to)| (*from..=*to).contains(&letter)) != self.negated
    }
}

/// Whether a pattern may select other files than it did when the crate `glob` matched it.
pub(super) fn was_read_otherwise(text: &str) -> bool {
    text.contains("**") || text.contains(['[', '\\']) || text.ends_with('/')
}

/// Where the bracket is that closes the one before this text. One that comes at once, or behind `!`, is a letter.
fn closing(text: &[char]) -> Option<usize> {
    let negation = usize::from(text.first() == Some(&'!'));
    let first = negation + usize::from(text.get(negation) == Some(&']'));
    text.iter().skip(first).position(|letter| *letter == ']').map(|at| first + at)
}

/// Paths of Windows are taken for what they mean.
fn slash(letter: char) -> char {
    if letter == '\\' { '/' } else { letter }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `filter_repo_objects(names, allow_patterns=pattern)` of huggingface_hub gives.
    #[test]
    fn names_match_as_in_huggingface_hub() {
        for (pattern, names, chosen) in [
            ("original/", "original, original/a, original/b/c, x/original/a", "original/a, original/b/c"),
            ("extra dir/", "extra dir/a b.txt, extra", "extra dir/a b.txt"),
            ("original\\", "original/a", "original/a"),
            ("*.json", "a.json, a/b.json, .json, a.JSON", "a.json, a/b.json, .json"),
            ("**/*.json", "a.json, a/b.json, a/b/c.json", "a/b.json, a/b/c.json"),
            ("***", "a, a/b", "a, a/b"),
            ("a**h", "ah, abch, a/h, ahx", "ah, abch, a/h"),
            ("a?c", "abc, a/c, aéc, ac", "abc, a/c, aéc"),
            ("a[b", "a[b, ab", "a[b"),
            ("[]x]", "], x, []x]", "], x"),
            ("[!]x]", "], x, a", "a"),
            ("[!x]*", "xa, ya", "ya"),
            ("[a-c]", "b, d, -", "b"),
            ("[a-]", "a, -, b", "a, -"),
            ("[-a]", "a, -, b", "a, -"),
            ("[a-c-e]", "b, -, e, d", "b, -, e"),
            ("[c-a]", "a, b, c, -", ""),
            ("[!c-a]", "a, -", "a, -"),
            ("[c-ax]", "a, c, x", "x"),
            ("[^a]", "^, a, b", "^, a"),
            ("[]", "[], ]", "[]"),
            ("[!]", "[!], !", "[!]"),
            ("", "a", ""),
        ] {
            let compiled = Pattern::new(pattern);
            let matching: Vec<&str> = names.split(", ").filter(|name| compiled.matches(name)).collect();
            assert_eq!(matching.join(", "), chosen, "{pattern}");
        }
    }

    #[test]
    fn many_stars_take_no_time() {
        let name = "a".repeat(4096);
        assert!(!Pattern::new(&("*a".repeat(500) + "*b")).matches(&name));
        assert!(Pattern::new(&"*a".repeat(500)).matches(&name));
    }
}
