//! Expressions of Python's `re`: what they match, and in which order.

use fancy_regex::{Captures, Regex, RegexBuilder};

/// Steps back that a search may take; Python takes as many as there are.
const BACKTRACKS: usize = 50_000_000;

/// An expression, compiled.
#[derive(Debug, Clone)]
pub struct Expression(Regex);

/// A match: the text of each group, that of the whole first.
pub type Groups<'t> = Vec<Option<&'t str>>;

impl Expression {
    /// Compiles an expression of Python's, of what both have.
    ///
    /// # Errors
    /// Says what of it is not known.
    pub fn new(pattern: &str) -> Result<Self, String> {
        let compiled = RegexBuilder::new(&of_python(pattern)).backtrack_limit(BACKTRACKS).build();
        compiled.map(Self).map_err(|error| format!("the expression `{pattern}` cannot be used: {error}"))
    }

    /// All matches, as `re.finditer` gives them: one of nothing may stand right behind another one.
    ///
    /// # Errors
    /// Fails where a search takes too many steps.
    pub fn find_all<'t>(&self, text: &'t str) -> Result<Vec<Groups<'t>>, String> {
        let groups = |captures: Captures<'t>| captures.iter().map(|group| group.map(|group| group.as_str())).collect();
        let mut matches = Vec::new();
        let mut from = 0;
        while from <= text.len() {
            let Some(captures) = self.0.captures_from_pos(text, from).map_err(|error| self.too_long(&error))? else {
                break;
            };
            let whole = captures.get(0).map_or(from..from, |whole| whole.range());
            from = match whole.is_empty() {
                true => text[whole.end..].chars().next().map_or(text.len() + 1, |letter| whole.end + letter.len_utf8()),
                false => whole.end,
            };
            matches.push(groups(captures));
        }
        Ok(matches)
    }

    /// `re.sub`, of the first `count` matches, or of all where it is 0; `replacement` is one of this crate's.
    ///
    /// # Errors
    /// As for [`Expression::find_all`].
    pub fn replace(&self, text: &str, count: usize, replacement: &str) -> Result<String, String> {
        let replaced = self.0.try_replacen(text, count, replacement).map_err(|error| self.too_long(&error))?;
        Ok(replaced.into_owned())
    }

    fn too_long(&self, error: &fancy_regex::Error) -> String {
        format!("the expression `{}` cannot be used on a text: {error}", self.0.as_str())
    }
}

/// Letters of words to Python, `str.isalnum` and the underscore: here marks and joiners are some, and `½` is none.
const WORD: &str = r"\p{L}\p{N}_";

/// White space to Python, `str.isspace`: here the separators of ASCII are none.
const SPACE: &str = r"\s\x1c-\x1f";

/// A class that an escaped letter stands for, written so that it holds what it holds in Python.
fn shorthand(escaped: char) -> Option<String> {
    match escaped {
        'w' => Some(format!("[{WORD}]")),
        'W' => Some(format!("[^{WORD}]")),
        's' => Some(format!("[{SPACE}]")),
        'S' => Some(format!("[^{SPACE}]")),
        _ => None,
    }
}

/// An expression of Python's `re`, written so that it means the same here: `$` is also before a last line feed, `\<` is
/// a letter, a class has neither classes in it nor operators, and letters of words and white space are those of Python.
fn of_python(pattern: &str) -> String {
    let flags = pattern.strip_prefix("(?").and_then(|rest| rest.split_once(')'));
    let by_lines = flags.is_some_and(|(flags, _)| flags.bytes().all(|f| f.is_ascii_lowercase()) && flags.contains('m'));
    let mut written = String::with_capacity(pattern.len() + 8);
    let mut letters = pattern.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some(angle @ ('<' | '>')) => written.push(angle),
                Some('Z') => written.push_str("\\z"),
                Some('b') => written.push_str(&format!("(?:(?<=[{WORD}])(?![{WORD}])|(?<![{WORD}])(?=[{WORD}]))")),
                Some('B') => written.push_str(&format!("(?:(?<=[{WORD}])(?=[{WORD}])|(?<![{WORD}])(?![{WORD}]))")),
                Some(escaped) => match shorthand(escaped) {
                    Some(class) => written.push_str(&class),
                    None => written.extend(['\\', escaped]),
                },
                None => written.push('\\'),
            },
            '$' if !by_lines => written.push_str(r"(?=\n?\z)"),
            '{' if letters.peek() == Some(&',') => written.push_str("{0"),
            '[' => class(&mut letters, &mut written),
            letter => written.push(letter),
        }
    }
    written
}

/// A class behind its bracket, to the one that closes it.
fn class(letters: &mut std::iter::Peekable<std::str::Chars<'_>>, written: &mut String) {
    written.push('[');
    if letters.peek() == Some(&'^') {
        written.extend(letters.next());
    }
    // The first may be the bracket that else closes it.
    let mut is_first = true;
    // Whether a `-` that follows makes a range of what stands before it.
    let mut may_begin_range = false;
    while let Some(letter) = letters.next() {
        match letter {
            ']' if !is_first => {
                written.push(']');
                return;
            }
            '-' if may_begin_range && letters.peek().is_some_and(|next| *next != ']') => {
                written.push('-');
                // Its end, which begins no other.
                match letters.next() {
                    Some('\\') => written.extend(std::iter::once('\\').chain(letters.next())),
                    Some(end) => member(end, written),
                    None => {}
                }
                may_begin_range = false;
                continue;
            }
            '\\' => match letters.next() {
                Some(angle @ ('<' | '>')) => written.push(angle),
                // A backspace, in a class.
                Some('b') => written.push_str(r"\x08"),
                escaped => match escaped.and_then(shorthand) {
                    Some(class) => written.push_str(&class),
                    None => written.extend(std::iter::once('\\').chain(escaped)),
                },
            },
            letter => member(letter, written),
        }
        (is_first, may_begin_range) = (false, true);
    }
}

/// A letter of a class.
fn member(letter: char, written: &mut String) {
    if matches!(letter, '[' | ']' | '&' | '~' | '-' | '^') {
        written.push('\\');
    }
    written.push(letter);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_mean_what_they_mean_in_python() {
        // What `re.findall(pattern, text)` gives, its strings and the first groups of its tuples.
        for (pattern, text, all) in [
            (r"make ([0-9,]+)\.$", "A: make 73.\n", &["73"][..]),
            (r"(\d+)$", "1\n2", &["2"]),
            (r"(?m)^(\d+)$", "1\n2", &["1", "2"]),
            (r"\<answer\>(.*?)\</answer\>", "<answer>7</answer>", &["7"]),
            (r"([0-9&&5-9]+)", "a 3& b", &["3&"]),
            (r"([0-9~~5]+)", "4~", &["4~"]),
            (r"([+--])", "a,b", &[","]),
            (r"([[a]+)", "x[a", &["[a"]),
            (r"[]x]", "]", &["]"]),
            (r"[^]x]", "]a", &["a"]),
            (r"a{,2}b", "aab", &["aab"]),
            (r"\d*", "17", &["17", ""]),
            (r"\d*", "a1", &["", "1", ""]),
            (r"[a\-z]+", "a-z", &["a-z"]),
            (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", "it is $18.", &["$18."]),
            // Looking around.
            (r"(?<=the answer is )(.*)(?=.)", "So the answer is no.", &["no"]),
            (r"([A-E])(?= şıkkıdır| şıkkı)", "A şıkkı, B, C şıkkıdır", &["A", "C"]),
            (r"(a)\1", "aa a", &["a"]),
            (r"(?<!\d)(\d)(?!\d)", "12 3", &["3"]),
            (r"(x$)", "x\n", &["x"]),
            // Letters of words and white space.
            (r"\w+", "हिन्दी x² ½_", &["ह", "न", "द", "x²", "½_"]),
            (r"[\w.]+", "½.i\u{300}", &["½.i"]),
            (r"[^\W\d]+", "a1½\u{200d}b_", &["a", "½", "b_"]),
            (r"\W", "a\u{300}\u{203f}", &["\u{300}", "\u{203f}"]),
            (r"[\W_]", "a_\u{300}", &["_", "\u{300}"]),
            (r"\s+", "a\u{1c}\u{1f} b", &["\u{1c}\u{1f} "]),
            (r"[^\S ]", " \u{1d}", &["\u{1d}"]),
            (r"\S+", "a\u{1e}b", &["a", "b"]),
            (r"\b\d+\b", "12½ 12 हि1", &["12", "1"]),
            (r"\B\d", "½1 i\u{300}2", &["1"]),
            (r"[\b]", "b\u{8}", &["\u{8}"]),
        ] {
            let expression = Expression::new(pattern).unwrap_or_else(|error| panic!("{error}"));
            let matches = expression.find_all(text).unwrap();
            let found: Vec<&str> = matches.iter().map(|groups| groups[groups.len().min(2) - 1].unwrap_or("")).collect();
            assert_eq!(found, all, "{pattern}");
        }
    }

    #[test]
    fn what_cannot_be_compiled_or_searched_for_is_told() {
        assert!(Expression::new("(a").unwrap_err().contains("the expression `(a` cannot be used"));
        let endless = Expression::new(r"(a|aa)+\1b").unwrap();
        let error = endless.find_all(&"a".repeat(60)).unwrap_err();
        assert!(error.contains("cannot be used on a text"), "{error}");
    }

    #[test]
    fn what_is_replaced_is_what_python_replaces() {
        let replace = |pattern: &str, text: &str| Expression::new(pattern).unwrap().replace(text, 0, "").unwrap();
        assert_eq!(replace(r"\.$", "A. B.\n"), "A. B\n");
        assert_eq!(replace(r"(?i)the ", "The a the b"), "a b");
    }
}
