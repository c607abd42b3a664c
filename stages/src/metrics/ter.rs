//! Translation edit rate, equal to the figures of the `sacrebleu` package with its defaults.
//!
//! The convention: lower case, words between white space, one reference; insertions, deletions, substitutions and
//! shifts of a phrase cost 1 each. Which shifts are tried, and in which order, is Tercom's heuristic, with its limits.
//! Of a corpus all edits by all words of the references. From 0 to 100 and above; lower is better.
//!
//! Source: Snover et al., "A Study of Translation Edit Rate with Targeted Human Annotation", AMTA 2006.

use std::collections::HashMap;

use crate::data::prompt::python::is_space;

/// The longest phrase that is shifted, in words.
const LONGEST_SHIFT: usize = 10;

/// How far apart its places in both texts may be.
const FARTHEST_SHIFT: usize = 50;

/// Shifts that are tried for a pair.
const CANDIDATES: usize = 1000;

/// How far from the diagonal alignments are looked for.
const BEAM: f64 = 25.0;

const INFINITE: u32 = u32::MAX / 2;

/// What turns the hypothesis into the reference at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edit {
    Keep,
    Substitute,
    /// A word of the reference is put in.
    Insert,
    /// A word of the hypothesis is left out.
    Delete,
}

/// The edits that turn a hypothesis into its reference, and the reference's words: of several pairs they add up.
pub fn edits(hypothesis: &str, reference: &str) -> (u64, u64) {
    let mut numbers = HashMap::new();
    let (hypothesis, reference) = (hypothesis.to_lowercase(), reference.to_lowercase());
    let mut words = |text: &str| -> Vec<usize> {
        let words = text.split(is_space).filter(|word| !word.is_empty());
        words
            .map(|word| {
                let next = numbers.len();
                *numbers.entry(word.to_owned()).or_insert(next)
            })
            .collect()
    };
    let (hypothesis, reference) = (words(&hypothesis), words(&reference));
    let length = reference.len() as u64;
    if reference.is_empty() {
        return (hypothesis.len() as u64, 0);
    }
    let mut distance = Distance::to(&reference);
    let (mut words, mut shifts, mut tried) = (hypothesis, 0, 0);
    while let Some(shifted) = best_shift(&words, &reference, &mut distance, &mut tried) {
        words = shifted;
        shifts += 1;
    }
    (shifts + u64::from(distance.of(&words).0), length)
}

/// The score of the edits of some pairs and the words of their references.
pub fn score(edits: u64, words: u64) -> f64 {
    match (edits, words) {
        (0, 0) => 0.0,
        (_, 0) => 100.0,
        (edits, words) => 100.0 * (edits as f64 / words as f64),
    }
}

/// The words with the phrase shifted that saves most edits; of equal ones the longest phrase, then the first, then the
/// first place. `None` if nothing is saved, or enough was tried.
fn best_shift(
    words: &[usize],
    reference: &[usize],
    distance: &mut Distance<'_>,
    tried: &mut usize,
) -> Option<Vec<usize>> {
    use std::cmp::Reverse;

    let (before, edits) = distance.of(words);
    let alignment = Alignment::of(&edits);
    let mut best = None;
    for (start, at, length) in common_phrases(words, reference) {
        let is_right = !alignment.is_wrong[start..start + length].contains(&true)
            || !alignment.is_missed[at..at + length].contains(&true);
        let is_there = (start as i64..(start + length) as i64).contains(&alignment.places[at]);
        if is_right || is_there {
            continue;
        }
        let mut last = None;
        for target in at as i64 - 1..(at + length) as i64 {
            let target = match target {
                -1 => 0,
                target => match alignment.places.get(target as usize) {
                    Some(place) => (place + 1) as usize,
                    None => break,
                },
            };
            if last.replace(target) == Some(target) {
                continue;
            }
            let shifted = shifted(words, start, length, target);
            let saved = i64::from(before) - i64::from(distance.of(&shifted).0);
            *tried += 1;
            let rank = (saved, length, Reverse(start), Reverse(target));
            if best.as_ref().is_none_or(|(known, _)| rank > *known) {
                best = Some((rank, shifted));
            }
        }
        if *tried >= CANDIDATES {
            return None;
        }
    }
    best.filter(|((saved, ..), _)| *saved > 0).map(|(_, shifted)| shifted)
}

/// Phrases that both have, by where they begin in each and how long they are.
fn common_phrases<'w>(words: &'w [usize], reference: &'w [usize]) -> impl Iterator<Item = (usize, usize, usize)> + 'w {
    let pairs = (0..words.len()).flat_map(|start| (0..reference.len()).map(move |at| (start, at)));
    pairs.filter(|(start, at)| start.abs_diff(*at) <= FARTHEST_SHIFT).flat_map(|(start, at)| {
        let same = words[start..].iter().zip(&reference[at..]).take(LONGEST_SHIFT);
        let longest = same.take_while(|(one, other)| one == other).count();
        (1..=longest).map(move |length| (start, at, length))
    })
}

/// The words with a phrase moved to another place, which is that of the words as they stood.
fn shifted(words: &[usize], start: usize, length: usize, target: usize) -> Vec<usize> {
    let phrase = &words[start..start + length];
    let (before, behind) = (&words[..start], &words[start + length..]);
    if target < start {
        return [&words[..target], phrase, &words[target..start], behind].concat();
    }
    // A place within the phrase is so many words further, as Tercom has it.
    let passed = if target > start + length { target - start - length } else { target - start };
    let passed = passed.min(behind.len());
    [before, &behind[..passed], phrase, &behind[passed..]].concat()
}

/// How the words of a hypothesis stand to those of its reference.
struct Alignment {
    /// For each word of the reference the place of the hypothesis' word that it belongs to; -1 before the first.
    places: Vec<i64>,
    /// Words of the reference that the hypothesis does not have there.
    is_missed: Vec<bool>,
    /// Words of the hypothesis that the reference does not have there.
    is_wrong: Vec<bool>,
}

impl Alignment {
    fn of(edits: &[Edit]) -> Self {
        let mut alignment = Self { places: Vec::new(), is_missed: Vec::new(), is_wrong: Vec::new() };
        for edit in edits {
            let is_error = *edit != Edit::Keep;
            if *edit != Edit::Insert {
                alignment.is_wrong.push(is_error);
            }
            if *edit != Edit::Delete {
                alignment.places.push(alignment.is_wrong.len() as i64 - 1);
                alignment.is_missed.push(is_error);
            }
        }
        alignment
    }
}

/// Edit distances to a reference, of hypotheses of one length.
struct Distance<'r> {
    reference: &'r [usize],
    /// The words that the rows are of.
    words: Vec<usize>,
    /// For each number of words the cost of turning them into each number of the reference's, and the last edit.
    rows: Vec<Vec<(u32, Edit)>>,
}

impl<'r> Distance<'r> {
    fn to(reference: &'r [usize]) -> Self {
        let first = (0..=reference.len() as u32).map(|cost| (cost, Edit::Insert)).collect();
        Self { reference, words: Vec::new(), rows: vec![first] }
    }

    /// The distance of some words, and the edits from the first on. Rows of words that are as last time are kept.
    fn of(&mut self, words: &[usize]) -> (u32, Vec<Edit>) {
        let same = self.words.iter().zip(words).take_while(|(one, other)| one == other).count();
        self.rows.truncate(same + 1);
        self.words = words.to_vec();
        let length = self.reference.len();
        let ratio = if words.is_empty() { 1.0 } else { length as f64 / words.len() as f64 };
        let beam = if BEAM < ratio / 2.0 { (ratio / 2.0 + BEAM).ceil() } else { BEAM } as usize;
        for at in same + 1..=words.len() {
            let diagonal = (at as f64 * ratio).floor() as usize;
            let from = diagonal.saturating_sub(beam);
            let to = if at == words.len() { length + 1 } else { (diagonal + beam).min(length + 1) };
            let above = &self.rows[at - 1];
            let mut row = vec![(INFINITE, Edit::Keep); length + 1];
            for j in from..to {
                if j == 0 {
                    row[0] = (above[0].0 + 1, Edit::Delete);
                    continue;
                }
                let replaced = match words[at - 1] == self.reference[j - 1] {
                    true => (above[j - 1].0, Edit::Keep),
                    false => (above[j - 1].0 + 1, Edit::Substitute),
                };
                for (cost, edit) in [replaced, (above[j].0 + 1, Edit::Delete), (row[j - 1].0 + 1, Edit::Insert)] {
                    if row[j].0 > cost {
                        row[j] = (cost, edit);
                    }
                }
            }
            self.rows.push(row);
        }
        let (mut i, mut j) = (words.len(), length);
        let cost = self.rows[i][j].0;
        let mut edits = Vec::with_capacity(i.max(j));
        while i > 0 || j > 0 {
            let edit = self.rows[i][j].1;
            edits.push(edit);
            i -= usize::from(edit != Edit::Insert);
            j -= usize::from(edit != Edit::Delete);
        }
        edits.reverse();
        (cost, edits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::chrf::tests::Golden;

    #[test]
    fn equals_the_reference_package() {
        let golden = Golden::read();
        let (mut all_edits, mut all_words) = (0, 0);
        for pair in &golden.pairs {
            let (found, words) = edits(&pair.hypothesis, &pair.reference);
            assert_eq!(found, pair.figures.edits, "{pair:?}");
            assert!((score(found, words) - pair.figures.ter).abs() <= 1e-9, "{pair:?}: {found} of {words}");
            all_edits += found;
            all_words += words;
        }
        assert_eq!(all_edits, golden.together.edits);
        assert!((score(all_edits, all_words) - golden.together.ter).abs() <= 1e-9);
    }
}
