//! Texts that stand in other texts: by words in a row, or nearly whole.
//!
//! A text stands in another if the two have 13 words in a row in common (Brown et al., arXiv:2005.14165,
//! appendix C; a shorter text has to be there whole), or if four fifths of all their pairs of neighbouring words are in
//! both: a copy of twenty words in which one is another (Lee et al., arXiv:2107.06499). Texts to compare are found by
//! MinHash (Broder, 1997), and then compared exactly. Words are letters and digits, in lower case; in scripts without
//! spaces each letter is one.

use std::collections::{BTreeSet, HashMap, HashSet};

/// Words in a row that two texts must have in common.
const WORDS: usize = 13;

/// A text of fewer words is not looked for: it would stand in too many by chance.
pub const FEWEST_WORDS: usize = 5;

/// Runs of so many words are compared of whole texts.
const RUN: usize = 2;

/// The part of the runs that two texts must have in common.
const SIMILARITY: f64 = 0.8;

/// Hash functions: so many groups, of which one has to agree whole. Texts of a similarity of 0.8 are missed once in
/// 10⁸.
const BANDS: usize = 32;
const ROWS: usize = 4;

/// Texts that are looked for.
#[derive(Debug, Default)]
pub struct Sought {
    /// Those that have a run of words.
    in_a_row: HashMap<u64, Vec<usize>>,
    /// Those whose hashes agree in a group.
    bands: HashMap<(usize, u64), Vec<usize>>,
    /// The runs of each.
    runs: Vec<HashSet<u64>>,
    /// Lengths of the runs that are looked for, in words.
    lengths: Vec<usize>,
}

impl Sought {
    /// Adds a text; they are numbered in their order. Whether it is looked for: one of few words is not.
    pub fn add(&mut self, text: &str) -> bool {
        let number = self.runs.len();
        let words = words(text);
        self.runs.push(HashSet::new());
        if words.len() < FEWEST_WORDS {
            return false;
        }
        let length = words.len().min(WORDS);
        if !self.lengths.contains(&length) {
            self.lengths.push(length);
        }
        let all: HashSet<u64> = runs(&words, length).collect();
        for run in all {
            self.in_a_row.entry(run).or_default().push(number);
        }
        self.runs[number] = runs(&words, RUN).collect();
        for band in bands(&self.runs[number]) {
            self.bands.entry(band).or_default().push(number);
        }
        true
    }

    /// The texts that stand in another, by their numbers.
    pub fn found_in(&self, text: &str) -> BTreeSet<usize> {
        let words = words(text);
        let mut found = BTreeSet::new();
        for length in &self.lengths {
            for run in runs(&words, *length) {
                found.extend(self.in_a_row.get(&run).into_iter().flatten());
            }
        }
        let own: HashSet<u64> = runs(&words, RUN).collect();
        for band in bands(&own) {
            for number in self.bands.get(&band).into_iter().flatten() {
                let common = self.runs[*number].intersection(&own).count();
                let all = self.runs[*number].len() + own.len() - common;
                if common as f64 >= SIMILARITY * all as f64 {
                    found.insert(*number);
                }
            }
        }
        found
    }
}

/// A hash for each word.
fn words(text: &str) -> Vec<u64> {
    let mut words = Vec::new();
    let mut word: Option<u64> = None;
    for letter in text.chars().flat_map(char::to_lowercase) {
        let is_word = is_word_alone(letter);
        if is_word || !letter.is_alphanumeric() {
            words.extend(word.take());
        }
        if letter.is_alphanumeric() {
            let hash = mixed(word.unwrap_or(0) ^ u64::from(u32::from(letter)));
            if is_word { words.push(hash) } else { word = Some(hash) }
        }
    }
    words.extend(word);
    words
}

/// Whether a letter is of a script that sets no spaces between words: Chinese characters, kana, Thai, Lao, Khmer and
/// Burmese.
fn is_word_alone(letter: char) -> bool {
    matches!(u32::from(letter),
        0x0e00..=0x0eff | 0x1000..=0x109f | 0x1780..=0x17ff | 0x3040..=0x30ff | 0x3400..=0x9fff | 0xf900..=0xfaff | 0x2_0000..=0x3_ffff)
}

/// A hash for each run of so many words.
fn runs(words: &[u64], length: usize) -> impl Iterator<Item = u64> {
    words.windows(length).map(move |run| run.iter().fold(length as u64, |hash, word| mixed(hash ^ word)))
}

/// For each group of hash functions, its number and what the least values of all runs are.
fn bands(runs: &HashSet<u64>) -> Vec<(usize, u64)> {
    if runs.is_empty() {
        return Vec::new();
    }
    let least = |function: usize| {
        let seed = mixed(function as u64 + 1);
        runs.iter().map(|run| mixed(run ^ seed)).min().unwrap_or_default()
    };
    let of_band =
        |band: usize| (band * ROWS..(band + 1) * ROWS).fold(0, |hash, function| mixed(hash ^ least(function)));
    (0..BANDS).map(|band| (band, of_band(band))).collect()
}

/// SplitMix64's mixing of a number (Steele et al., 2014).
fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUESTION: &str =
        "Which of these is the largest planet of the Solar System, and how many moons does it have? Jupiter.";

    fn found(text: &str) -> BTreeSet<usize> {
        let mut sought = Sought::default();
        sought.add("An earlier question which nothing else has anything in common with at all.");
        sought.add(QUESTION);
        sought.add("Too short");
        sought.found_in(text)
    }

    #[test]
    fn words_in_a_row_are_found_whatever_stands_around_them() {
        let within = format!("Here is a quiz.\n\n{}\n\nGood luck with the next one!", QUESTION.to_uppercase());
        assert_eq!(found(&within), BTreeSet::from([1]));
        let thirteen = "largest planet of the solar system and how many moons does it have";
        assert_eq!(found(thirteen), BTreeSet::from([1]));
        assert!(found("largest planet of the solar system and how many moons does it own").is_empty());
        assert!(found("Too short").is_empty());
    }

    #[test]
    fn texts_that_are_nearly_the_same_are_found() {
        let copy = |changed: &[usize]| -> String {
            let word = |at: usize| if changed.contains(&at) { format!("else{at} ") } else { format!("word{at} ") };
            (0..20).map(word).collect()
        };
        let mut sought = Sought::default();
        sought.add(&copy(&[]));
        // No 13 in a row are left. Of 21 pairs 17 are in both, and of 23 then 15.
        assert_eq!(sought.found_in(&copy(&[10])), BTreeSet::from([0]));
        assert!(sought.found_in(&copy(&[8, 11])).is_empty());
    }

    #[test]
    fn a_short_text_has_to_be_there_whole_and_letters_without_spaces_are_words() {
        let mut sought = Sought::default();
        sought.add("下列哪一项是最大的行星");
        sought.add("the capital of France is Paris");
        assert_eq!(sought.found_in("问题:下列哪一项是最大的行星?答案:木星"), BTreeSet::from([0]));
        assert_eq!(sought.found_in("He knows: the capital of France is Paris, of course."), BTreeSet::from([1]));
        assert!(sought.found_in("the capital of France was Paris").is_empty());
        assert!(sought.found_in("").is_empty());
    }
}
