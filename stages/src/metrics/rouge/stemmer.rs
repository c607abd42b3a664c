//! Porter's stemmer with NLTK's extensions, which is what `rouge_score` uses.
//!
//! Words here are non-empty and consist of `a`–`z` and `0`–`9`; digits count as consonants.
//!
//! Source: Porter, "An algorithm for suffix stripping", Program 14 (1980); the departures are those of
//! `nltk.stem.porter.PorterStemmer` in its mode `NLTK_EXTENSIONS`, and are named where they stand.

/// Words that have no regular stem (NLTK).
const IRREGULAR: &[(&str, &str)] = &[
    ("sky", "sky"),
    ("skies", "sky"),
    ("dying", "die"),
    ("lying", "lie"),
    ("tying", "tie"),
    ("news", "news"),
    ("innings", "inning"),
    ("inning", "inning"),
    ("outings", "outing"),
    ("outing", "outing"),
    ("cannings", "canning"),
    ("canning", "canning"),
    ("howe", "howe"),
    ("proceed", "proceed"),
    ("exceed", "exceed"),
    ("succeed", "succeed"),
];

/// The stem of a word in lower case.
pub(super) fn stem(word: &str) -> String {
    if let Some((_, stem)) = IRREGULAR.iter().find(|(irregular, _)| *irregular == word) {
        return (*stem).to_owned();
    }
    if word.len() <= 2 {
        return word.to_owned();
    }
    let word = step_1a(word);
    let word = step_1b(&word);
    let word = step_1c(&word);
    let word = step_2(&word);
    let word = step_3(&word);
    let word = step_4(&word);
    let word = step_5a(&word);
    step_5b(&word)
}

fn is_vowel(letter: u8) -> bool {
    b"aeiou".contains(&letter)
}

/// Whether the letter at `at` is a consonant: `y` is one at the beginning and after a vowel.
fn is_consonant(word: &str, at: usize) -> bool {
    let letters = word.as_bytes();
    if letters[at] != b'y' {
        return !is_vowel(letters[at]);
    }
    // Of a run of y's every second one is a consonant; only the letter before the run decides which.
    let run = letters[..at].iter().rev().take_while(|letter| **letter == b'y').count();
    let begins_as_consonant = run == at || is_vowel(letters[at - run - 1]);
    (run % 2 == 0) == begins_as_consonant
}

/// How often a consonant follows a vowel: Porter's m.
fn measure(stem: &str) -> usize {
    (1..stem.len()).filter(|at| is_consonant(stem, *at) && !is_consonant(stem, at - 1)).count()
}

fn contains_vowel(stem: &str) -> bool {
    (0..stem.len()).any(|at| !is_consonant(stem, at))
}

fn ends_in_double_consonant(word: &str) -> bool {
    let letters = word.as_bytes();
    let length = letters.len();
    length >= 2 && letters[length - 1] == letters[length - 2] && is_consonant(word, length - 1)
}

/// Whether a word ends in consonant, vowel, consonant, the last not `w`, `x` or `y`; or is a vowel and a consonant
/// (NLTK).
fn ends_in_short_syllable(word: &str) -> bool {
    let length = word.len();
    if length == 2 {
        return !is_consonant(word, 0) && is_consonant(word, 1);
    }
    length >= 3
        && is_consonant(word, length - 3)
        && !is_consonant(word, length - 2)
        && is_consonant(word, length - 1)
        && !word.ends_with(['w', 'x', 'y'])
}

/// Replaces the first ending of `rules` that the word has, if `condition` holds for what stands before it.
fn replace_ending(word: &str, rules: &[(&str, &str)], condition: impl Fn(&str) -> bool) -> String {
    for (ending, replacement) in rules {
        if let Some(stem) = word.strip_suffix(ending) {
            return if condition(stem) { format!("{stem}{replacement}") } else { word.to_owned() };
        }
    }
    word.to_owned()
}

/// Plurals.
fn step_1a(word: &str) -> String {
    match word.strip_suffix("ies") {
        // NLTK: "dies" is of "die".
        Some(stem) if word.len() == 4 => format!("{stem}ie"),
        _ => replace_ending(word, &[("sses", "ss"), ("ies", "i"), ("ss", "ss"), ("s", "")], |_| true),
    }
}

/// Past tense and participles.
fn step_1b(word: &str) -> String {
    if let Some(stem) = word.strip_suffix("ied") {
        // NLTK: "died" is of "die", and longer words follow those in -ies.
        return if word.len() == 4 { format!("{stem}ie") } else { format!("{stem}i") };
    }
    if word.ends_with("eed") {
        return replace_ending(word, &[("eed", "ee")], |stem| measure(stem) > 0);
    }
    let stem = ["ed", "ing"].iter().find_map(|ending| word.strip_suffix(ending).filter(|stem| contains_vowel(stem)));
    stem.map_or_else(|| word.to_owned(), mend)
}

/// Gives a stem back what its ending took away: an `e`, or takes a doubled letter.
fn mend(stem: &str) -> String {
    if ["at", "bl", "iz"].iter().any(|ending| stem.ends_with(ending)) {
        return format!("{stem}e");
    }
    if ends_in_double_consonant(stem) {
        let keeps_both = stem.ends_with(['l', 's', 'z']);
        return if keeps_both { stem.to_owned() } else { stem[..stem.len() - 1].to_owned() };
    }
    if measure(stem) == 1 && ends_in_short_syllable(stem) { format!("{stem}e") } else { stem.to_owned() }
}

/// A final `y`: NLTK turns it after a consonant, not after any stem with a vowel.
fn step_1c(word: &str) -> String {
    replace_ending(word, &[("y", "i")], |stem| stem.len() > 1 && is_consonant(stem, stem.len() - 1))
}

fn step_2(word: &str) -> String {
    const RULES: &[(&str, &str)] = &[
        ("ational", "ate"),
        ("tional", "tion"),
        ("enci", "ence"),
        ("anci", "ance"),
        ("izer", "ize"),
        ("bli", "ble"),
        ("alli", "al"),
        ("entli", "ent"),
        ("eli", "e"),
        ("ousli", "ous"),
        ("ization", "ize"),
        ("ation", "ate"),
        ("ator", "ate"),
        ("alism", "al"),
        ("iveness", "ive"),
        ("fulness", "ful"),
        ("ousness", "ous"),
        ("aliti", "al"),
        ("iviti", "ive"),
        ("biliti", "ble"),
        ("fulli", "ful"),
    ];
    if let Some(stem) = word.strip_suffix("alli")
        && measure(stem) > 0
    {
        // NLTK: what -alli leaves may have another ending of this step.
        return step_2(&format!("{stem}al"));
    }
    if word.ends_with("logi") {
        // The l is counted with the stem, so that "geologi" is treated as "archaeologi" is.
        return replace_ending(word, &[("ogi", "og")], |stem| measure(stem) > 0);
    }
    replace_ending(word, RULES, |stem| measure(stem) > 0)
}

fn step_3(word: &str) -> String {
    const RULES: &[(&str, &str)] =
        &[("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""), ("ness", "")];
    replace_ending(word, RULES, |stem| measure(stem) > 0)
}

fn step_4(word: &str) -> String {
    const BEFORE_ION: &[&str] = &["al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent"];
    const AFTER_ION: &[&str] = &["ou", "ism", "ate", "iti", "ous", "ive", "ize"];
    for ending in BEFORE_ION.iter().chain(&["ion"]).chain(AFTER_ION) {
        let Some(stem) = word.strip_suffix(ending) else { continue };
        let long_enough = measure(stem) > 1 && (*ending != "ion" || stem.ends_with(['s', 't']));
        return if long_enough { stem.to_owned() } else { word.to_owned() };
    }
    word.to_owned()
}

/// A final `e`.
fn step_5a(word: &str) -> String {
    replace_ending(word, &[("e", "")], |stem| {
        let measure = measure(stem);
        measure > 1 || (measure == 1 && !ends_in_short_syllable(stem))
    })
}

/// A final `ll`.
fn step_5b(word: &str) -> String {
    replace_ending(word, &[("ll", "l")], |_| measure(&word[..word.len() - 1]) > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stems_as_nltk_does() {
        for (word, expected) in [
            ("caresses", "caress"),
            ("ponies", "poni"),
            ("dies", "die"),
            ("died", "die"),
            ("studied", "studi"),
            ("agreed", "agre"),
            ("hopping", "hop"),
            ("controlling", "control"),
            ("falling", "fall"),
            ("happy", "happi"),
            ("enjoy", "enjoy"),
            ("relational", "relat"),
            ("rationally", "ration"),
            ("geology", "geolog"),
            ("generalizations", "gener"),
            ("skies", "sky"),
            ("yyyy", "yyyi"),
            ("2019s", "2019"),
        ] {
            assert_eq!(stem(word), expected, "{word}");
        }
    }
}
