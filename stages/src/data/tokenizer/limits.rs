//! What a `tokenizer.json` of a stranger may ask for. It is looked at before the `tokenizers` crate reads it, which
//! takes whatever it is told: a replacement that makes a thousand letters of one, five times over, or a map that points
//! beside itself.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

/// The largest file: the largest that are published have some 35 MB.
pub(super) const LARGEST_FILE: u64 = 64 << 20;

/// The largest id of a token: what is indexed by ids has an entry for each up to it.
const LARGEST_ID: u64 = (1 << 24) - 1;

/// How many bytes may come of one, all steps of a normalizer or decoder taken together: SentencePiece's own make three
/// of a space, and NFKC eleven of a few letters.
const MOST_GROWTH: f64 = 32.0;

/// The longest text that is put before or behind another.
const LONGEST_ADDITION: usize = 1 << 10;

/// How deep lists of steps may lie within each other.
const DEEPEST: usize = 4;

/// What is wrong with a `tokenizer.json`.
#[derive(Debug, thiserror::Error)]
pub(super) enum TooMuch {
    #[error("it is larger than {} MiB", LARGEST_FILE >> 20)]
    File,
    #[error("it is not the JSON of a tokenizer")]
    Json(#[from] serde_json::Error),
    #[error("a token has the id {0}, and the largest that can be is {LARGEST_ID}")]
    Id(u64),
    #[error("`{0}` holds steps more than {DEEPEST} lists deep")]
    Deep(&'static str),
    #[error("`{0}` replaces a pattern that matches nothing at all, which is everywhere")]
    Empty(&'static str),
    #[error("`{0}` makes more than {MOST_GROWTH} bytes of one")]
    Growth(&'static str),
    #[error("`{0}` adds a text of {1} bytes, and the maximum is {LONGEST_ADDITION}")]
    Addition(&'static str, usize),
    #[error("`{0}` cuts into pieces of no length")]
    NoLength(&'static str),
    #[error("the `precompiled_charsmap` of `{0}` is damaged: {1}")]
    Precompiled(&'static str, &'static str),
}

#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: Option<ModelParts>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct ModelParts {
    #[serde(default)]
    vocab: Option<LargestId>,
}

#[derive(Deserialize)]
struct AddedToken {
    #[serde(default)]
    id: u64,
}

/// The largest id of a vocabulary, which is an object of ids or a list of pieces.
struct LargestId(u64);

impl<'de> Deserialize<'de> for LargestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Ids;
        impl<'de> Visitor<'de> for Ids {
            type Value = LargestId;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut ids: A) -> Result<LargestId, A::Error> {
                let mut largest = 0;
                while let Some((_, id)) = ids.next_entry::<IgnoredAny, u64>()? {
                    largest = largest.max(id);
                }
                Ok(LargestId(largest))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut pieces: A) -> Result<LargestId, A::Error> {
                let mut count = 0u64;
                while pieces.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(LargestId(count.saturating_sub(1)))
            }
        }
        deserializer.deserialize_any(Ids)
    }
}

/// Looks at the text of a `tokenizer.json`.
///
/// # Errors
/// Says what of it cannot be taken.
pub(super) fn check(json: &[u8]) -> Result<(), TooMuch> {
    if json.len() as u64 > LARGEST_FILE {
        return Err(TooMuch::File);
    }
    let parts: Parts = serde_json::from_slice(json)?;
    let vocabulary = parts.model.and_then(|model| model.vocab).map(|largest| largest.0);
    let largest = parts.added_tokens.iter().map(|token| token.id).chain(vocabulary).max().unwrap_or(0);
    if largest > LARGEST_ID {
        return Err(TooMuch::Id(largest));
    }
    for (name, steps) in
        [("normalizer", &parts.normalizer), ("pre_tokenizer", &parts.pre_tokenizer), ("decoder", &parts.decoder)]
    {
        let growth = growth(name, steps, 0)?;
        if growth.is_nan() || growth > MOST_GROWTH {
            return Err(TooMuch::Growth(name));
        }
    }
    Ok(())
}

/// How many bytes come of one at most, in a step or a list of them.
fn growth(name: &'static str, step: &Value, depth: usize) -> Result<f64, TooMuch> {
    let Some(kind) = step.get("type").and_then(Value::as_str) else { return Ok(1.0) };
    let text = |key: &str| step.get(key).and_then(Value::as_str).unwrap_or_default();
    match kind {
        "Sequence" => {
            if depth >= DEEPEST {
                return Err(TooMuch::Deep(name));
            }
            let lists = ["normalizers", "pretokenizers", "decoders"];
            let steps = lists.iter().filter_map(|key| step.get(*key)?.as_array()).flatten();
            let mut product = 1.0;
            for step in steps {
                product *= growth(name, step, depth + 1)?;
            }
            Ok(product)
        }
        "Replace" => replacement(name, &step["pattern"], text("content")),
        "Split" if step["pattern"]["String"].as_str().is_some_and(str::is_empty) => Err(TooMuch::Empty(name)),
        "Prepend" | "WordPiece" | "BPEDecoder" | "Metaspace" => {
            let longest = ["prepend", "prefix", "suffix", "replacement"].into_iter().map(|key| text(key).len()).max();
            match longest {
                Some(length) if length > LONGEST_ADDITION => Err(TooMuch::Addition(name, length)),
                _ => Ok(1.0),
            }
        }
        "FixedLength" if step["length"].as_u64() == Some(0) => Err(TooMuch::NoLength(name)),
        "Precompiled" => {
            let damaged = |problem| TooMuch::Precompiled(name, problem);
            let map = from_base64(text("precompiled_charsmap")).ok_or_else(|| damaged("it is no base64"))?;
            precompiled_growth(&map).map_err(damaged)
        }
        _ => Ok(1.0),
    }
}

fn replacement(name: &'static str, pattern: &Value, content: &str) -> Result<f64, TooMuch> {
    let content = content.len() as f64;
    if let Some(text) = pattern["String"].as_str() {
        return if text.is_empty() { Err(TooMuch::Empty(name)) } else { Ok((content / text.len() as f64).max(1.0)) };
    }
    // What a regular expression matches has a byte at least, or none: then the content stands beside each letter.
    let Some(text) = pattern["Regex"].as_str() else { return Ok(1.0) };
    // What only the crate's own engine understands is tried out when the tokenizer is opened.
    let everywhere =
        |regex: regex::Regex| regex.find_iter("\u{10FFFD}\u{10FFFD}").filter(|found| found.is_empty()).count() > 2;
    if regex::Regex::new(text).is_ok_and(everywhere) { Err(TooMuch::Empty(name)) } else { Ok(content + 1.0) }
}

/// How many bytes come of one by the rules of a SentencePiece map: a trie as an array of units, and the texts that its
/// leaves point to, each up to a zero. Every place that a text can lead to is looked at: the crate that uses the map
/// trusts it.
fn precompiled_growth(map: &[u8]) -> Result<f64, &'static str> {
    let (length, rest) = map.split_first_chunk::<4>().ok_or("it has no length")?;
    let length = u32::from_le_bytes(*length) as usize / 4 * 4;
    let (trie, texts) = rest.split_at_checked(length).ok_or("it is shorter than its header says")?;
    let texts = std::str::from_utf8(texts).map_err(|_| "its texts are no UTF-8")?;
    let trie: Vec<usize> = trie.as_chunks::<4>().0.iter().map(|unit| u32::from_le_bytes(*unit) as usize).collect();
    let offset = |unit: usize| (unit >> 10) << ((unit & (1 << 9)) >> 6);
    let first = *trie.first().ok_or("it is empty")?;
    let mut seen = vec![false; trie.len()];
    let mut waiting = vec![(offset(first), 0usize)];
    let mut growth = 1.0f64;
    while let Some((base, depth)) = waiting.pop() {
        for letter in 1..=255usize {
            let place = base ^ letter;
            let unit = *trie.get(place).ok_or("it has an offset outside of itself")?;
            if unit & ((1 << 31) | 0xFF) != letter || std::mem::replace(&mut seen[place], true) {
                continue;
            }
            let next = place ^ offset(unit);
            if unit >> 8 & 1 == 1 {
                let leaf = trie.get(next).ok_or("it has an offset outside of itself")? & ((1 << 31) - 1);
                let text = texts.get(leaf..).ok_or("a leaf points outside of its texts")?;
                let text = text.split('\0').next().unwrap_or_default();
                growth = growth.max(text.len() as f64 / (depth + 1) as f64);
            }
            waiting.push((next, depth + 1));
        }
    }
    Ok(growth)
}

/// The bytes that stand in base64, padded.
fn from_base64(text: &str) -> Option<Vec<u8>> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => Some(u32::from(letter - b'A')),
        b'a'..=b'z' => Some(u32::from(letter - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(letter - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let letters = text.trim_end_matches('=').as_bytes();
    let mut bytes = Vec::with_capacity(letters.len() / 4 * 3 + 2);
    for group in letters.chunks(4) {
        let mut bits = 0u32;
        for letter in group {
            bits = bits << 6 | value(*letter)?;
        }
        bits <<= 6 * (4 - group.len());
        let count = group.len().checked_sub(1).filter(|count| *count > 0)?;
        bytes.extend_from_slice(&bits.to_be_bytes()[1..=count]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;

    fn problem(part: &str, step: Value) -> Option<String> {
        let begin = Instant::now();
        let result = check(json!({ part: step }).to_string().as_bytes());
        assert!(begin.elapsed() < Duration::from_secs(1));
        result.err().map(|error| error.to_string())
    }

    fn replace(pattern: &str, content: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": pattern}, "content": content})
    }

    fn sequence(steps: Vec<Value>) -> Value {
        json!({"type": "Sequence", "normalizers": steps})
    }

    #[test]
    fn replacements_that_multiply_a_text_are_refused() {
        let thousandfold = vec![replace("a", &"a".repeat(1000)); 5];
        assert_eq!(
            problem("normalizer", sequence(thousandfold)).unwrap(),
            "`normalizer` makes more than 32 bytes of one"
        );
        let threefold = vec![replace("a", "aaa"); 4];
        assert!(problem("normalizer", sequence(threefold)).unwrap().contains("more than 32 bytes of one"));
        let regex = json!({"type": "Replace", "pattern": {"Regex": "."}, "content": "a".repeat(100)});
        assert!(problem("decoder", regex).unwrap().starts_with("`decoder` makes more"));
        assert!(problem("normalizer", replace("", "a")).unwrap().contains("matches nothing at all"));
        let regex = |pattern: &str| json!({"type": "Replace", "pattern": {"Regex": pattern}, "content": "b"});
        assert!(problem("normalizer", regex("a*")).unwrap().contains("matches nothing at all"));
        assert!(problem("normalizer", regex("()")).unwrap().contains("matches nothing at all"));
        assert_eq!((problem("normalizer", regex("^")), problem("normalizer", regex("a+"))), (None, None));
        let deep = (0..200).fold(replace("a", "b"), |step, _| sequence(vec![step]));
        assert!(problem("normalizer", deep).is_some());
        let prepended = json!({"type": "Prepend", "prepend": "a".repeat(1 << 20)});
        assert!(problem("normalizer", prepended).unwrap().contains("adds a text of 1048576 bytes"));
        let pieces = json!({"type": "FixedLength", "length": 0});
        assert!(problem("pre_tokenizer", pieces).unwrap().contains("no length"));
    }

    #[test]
    fn what_published_tokenizers_do_is_taken() {
        let llama = sequence(vec![json!({"type": "Prepend", "prepend": "▁"}), replace(" ", "▁")]);
        let spaces = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
        let quotes = sequence(vec![replace("``", "\""), replace("''", "\""), json!({"type": "NFKC"}), spaces]);
        for normalizer in [Value::Null, llama, quotes] {
            assert_eq!(problem("normalizer", normalizer), None);
        }
    }

    #[test]
    fn ids_that_no_table_can_have_are_refused() {
        for model in [
            json!({"model": {"type": "BPE", "vocab": {"a": 0, "b": 4_294_967_295u32}, "merges": []}}),
            json!({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 4_294_967_295u32, "content": "b"}]}),
        ] {
            let error = check(model.to_string().as_bytes()).unwrap_err();
            assert!(matches!(error, TooMuch::Id(4_294_967_295)), "{error}");
        }
        let unigram = json!({"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}});
        assert!(check(unigram.to_string().as_bytes()).is_ok());
    }

    /// A map that makes of `a` what stands in `texts` at `leaf`.
    fn map(leaf: u32, texts: &[u8]) -> Vec<u8> {
        let mut trie = vec![0u32; 512];
        let unit = |offset: u32, more: u32| offset << 10 | more;
        // The root's children lie in the second block, and so does what `a` leads to.
        trie[0] = unit(256, 0);
        let child = 256 ^ u32::from(b'a');
        trie[child as usize] = unit(child ^ 0x100 ^ 0x180, 1 << 8 | u32::from(b'a'));
        trie[(child ^ (child ^ 0x100 ^ 0x180)) as usize] = leaf | 1 << 31;
        let mut map = (trie.len() as u32 * 4).to_le_bytes().to_vec();
        map.extend(trie.iter().flat_map(|unit| unit.to_le_bytes()));
        map.extend_from_slice(texts);
        map
    }

    #[test]
    fn maps_that_point_beside_themselves_are_refused() {
        assert_eq!(precompiled_growth(&map(2, b"x\0yz\0")), Ok(2.0));
        assert_eq!(precompiled_growth(&map(99, b"x\0yz\0")), Err("a leaf points outside of its texts"));
        assert_eq!(precompiled_growth(&map(1, "é\0".as_bytes())), Err("a leaf points outside of its texts"));
        assert!(precompiled_growth(&map(0, &[b'x'; 1000])).is_ok_and(|growth| growth == 1000.0));
        let mut beside = map(0, b"x\0");
        beside[4..8].copy_from_slice(&(60_000u32 << 10).to_le_bytes());
        assert_eq!(precompiled_growth(&beside), Err("it has an offset outside of itself"));
        assert!(precompiled_growth(&[1, 2]).is_err());
        assert!(precompiled_growth(&[255, 255, 255, 255, 0]).is_err());
        let step = json!({"type": "Precompiled", "precompiled_charsmap": "AAECAwQFBgc="});
        assert!(problem("normalizer", step).unwrap().contains("is damaged"));
    }

    #[test]
    fn base64_is_read_as_anywhere() {
        assert_eq!(from_base64("aGVsbG8=").unwrap(), b"hello");
        assert_eq!(from_base64("aGVsbA==").unwrap(), b"hell");
        assert_eq!(from_base64("aGVsbG8h").unwrap(), b"hello!");
        assert_eq!((from_base64("a"), from_base64("a b=")), (None, None));
    }
}
