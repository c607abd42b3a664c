//! Texts near to well-formed ones: the fuzzer's seeds and words (`fuzz/seeds`, `fuzz/dictionaries`), cut and spliced,
//! as a proptest strategy.
//!
//! The crates' own property tests include this file. A fuzzer with coverage goes further; this has a fixed budget and
//! the same cases on every machine (`PROPTEST_CASES` and `PROPTEST_RNG_SEED` change both).

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use proptest::sample::{Index, select};
use proptest::test_runner::{Config, RngSeed};

/// How many cases a property is tried on.
const CASES: u32 = 2048;

/// One change of a text. Positions are fractions of its length at that moment.
#[derive(Debug, Clone)]
enum Mutation {
    /// Bytes from one position to another are removed.
    Remove(Index, Index),
    /// Bytes from one position to another are inserted again at a third.
    Copy(Index, Index, Index),
    /// A word of the format is inserted.
    Insert(Index, Vec<u8>),
    /// A byte is replaced.
    Replace(Index, u8),
}

impl Mutation {
    fn apply(&self, text: &mut Vec<u8>) {
        let ends = text.len() + 1;
        match self {
            Self::Remove(from, to) => {
                let (from, to) = (from.index(ends), to.index(ends));
                text.drain(from.min(to)..from.max(to));
            }
            Self::Copy(from, to, at) => {
                let (from, to) = (from.index(ends), to.index(ends));
                let part = text[from.min(to)..from.max(to)].to_vec();
                let at = at.index(ends);
                text.splice(at..at, part);
            }
            Self::Insert(at, word) => {
                let at = at.index(ends);
                text.splice(at..at, word.iter().copied());
            }
            Self::Replace(at, byte) => {
                if !text.is_empty() {
                    let at = at.index(text.len());
                    text[at] = *byte;
                }
            }
        }
    }
}

fn mutation(words: Vec<Vec<u8>>) -> impl Strategy<Value = Mutation> {
    prop_oneof![
        2 => any::<(Index, Index)>().prop_map(|(from, to)| Mutation::Remove(from, to)),
        1 => any::<(Index, Index, Index)>().prop_map(|(from, to, at)| Mutation::Copy(from, to, at)),
        3 => (any::<Index>(), select(words)).prop_map(|(at, word)| Mutation::Insert(at, word)),
        1 => any::<(Index, u8)>().prop_map(|(at, byte)| Mutation::Replace(at, byte)),
    ]
}

/// One of the seeds, changed in up to six places.
fn near(seeds: Vec<Vec<u8>>, words: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (select(seeds), prop::collection::vec(mutation(words), 0..=6)).prop_map(|(mut text, mutations)| {
        mutations.iter().for_each(|mutation| mutation.apply(&mut text));
        text
    })
}

/// Tries a property on texts near the seeds of the fuzzer's target of this name.
pub(super) fn hold(property: fn(&[u8]), target: &str) {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz"));
    let mut seeds = Vec::new();
    read_all(&folder.join("seeds").join(target), &mut seeds);
    let words =
        words(&fs::read_to_string(folder.join(format!("dictionaries/{target}.txt"))).expect("it has a dictionary"));
    let mut config = Config::with_cases(CASES);
    config.failure_persistence = None;
    if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(1);
    }
    if let Some(cases) = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()) {
        config.cases = cases;
    }
    proptest!(config, |(text in near(seeds, words))| property(&text));
}

fn read_all(folder: &Path, seeds: &mut Vec<Vec<u8>>) {
    let entries = fs::read_dir(folder).expect("it has seeds");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("it can be listed").path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            read_all(&path, seeds);
        } else {
            seeds.push(fs::read(path).expect("it can be read"));
        }
    }
}

/// The words of a dictionary in libFuzzer's form: one in quotes on each line, other bytes as `\xAB`.
fn words(dictionary: &str) -> Vec<Vec<u8>> {
    let quoted = dictionary.lines().filter_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    quoted.map(word).collect()
}

fn word(quoted: &str) -> Vec<u8> {
    let mut bytes = quoted.bytes();
    let mut word = Vec::new();
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => match bytes.next().expect("something is escaped") {
                b'x' => {
                    let digits = [bytes.next(), bytes.next()].map(|digit| char::from(digit.expect("two digits")));
                    let digit = |digit: char| digit.to_digit(16).expect("it is hexadecimal") as u8;
                    word.push(16 * digit(digits[0]) + digit(digits[1]));
                }
                other => word.push(other),
            },
            plain => word.push(plain),
        }
    }
    word
}
