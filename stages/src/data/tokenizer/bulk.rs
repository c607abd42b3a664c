//! The fast way to turn texts into ids: tokenizers 1.0, wherever it gives the ids of 0.23.
//!
//! It is a release candidate, it refuses some files, and it recognises words by hashes of them. So nothing of it is
//! taken on trust: before it is used for a tokenizer it is compared with 0.23 over texts made to be hard, over the
//! vocabulary itself and over the first of the data, and of every text afterwards its ids must spell that text again.
//! Where they do not — a normalizer has changed the text, a letter is unknown, two words have one hash — the text is
//! for 0.23 to encode.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use rayon::prelude::*;
use tokenizers::DecoderWrapper;
use tokenizers_1::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};
use tokenizers_1::{canonicalize_str, from_json};

use super::hard_texts;
use super::pieces::Cut;

/// Why 0.23 has to encode all texts.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("tokenizers 1.0 does not read this `tokenizer.json`: {0}")]
    Form(String),
    #[error("tokenizers 1.0 fails over the text {0:?}")]
    Fails(String),
    #[error("tokenizers 1.0 has other ids for the text {0:?}")]
    Differs(String),
    #[error("its ids do not decode to their texts")]
    Unspelled,
}

/// Tokenizers 1.0 with a `tokenizer.json`, compared with nothing yet.
pub(crate) struct Candidate(PipelineTokenizer);

impl Candidate {
    /// That of a folder with `tokenizer.json`.
    ///
    /// # Errors
    /// Says why it cannot be had.
    pub(crate) fn load(folder: &Path) -> Result<Self, Unfit> {
        let json = std::fs::read_to_string(folder.join("tokenizer.json"));
        Self::of_json(&json.map_err(|error| Unfit::Form(error.to_string()))?)
    }

    fn of_json(json: &str) -> Result<Self, Unfit> {
        let loaded = catch_unwind(|| {
            let canonical = canonicalize_str(json).map_err(|error| error.to_string())?;
            from_json(&canonical).map_err(|error| error.to_string())
        });
        loaded.unwrap_or_else(|_| Err("it panics".to_owned())).map(Self).map_err(Unfit::Form)
    }
}

/// Encodes with tokenizers 1.0. Memory holds a table of words per thread, of fixed size, and room for the longest text
/// met.
pub(super) struct BulkEncoder {
    inner: PipelineTokenizer,
    spelling: Spelling,
}

impl BulkEncoder {
    /// The candidate of the same `tokenizer.json` as `tokenizer`, if it does the same: over hard texts and these
    /// `samples`. They are encoded on all threads of the pool that this runs in.
    ///
    /// # Errors
    /// Says why it is not to be used.
    pub(super) fn new(
        candidate: Candidate,
        tokenizer: &tokenizers::Tokenizer,
        samples: &[String],
    ) -> Result<Self, Unfit> {
        let (spelling, hard) = rayon::join(|| Spelling::of(tokenizer), || hard_texts::all(tokenizer));
        let encoder = Self { inner: candidate.0, spelling };
        let texts = hard.par_iter().chain(samples);
        // The first of them, so that the log says the same each time.
        if let Some(unfit) = texts.find_map_first(|text| encoder.compare(tokenizer, text).err()) {
            return Err(unfit);
        }
        // Else most of the data would be encoded twice.
        let spelled = samples.par_iter().filter(|text| encoder.encode(text).is_some()).count();
        if 2 * spelled < samples.len() { Err(Unfit::Unspelled) } else { Ok(encoder) }
    }

    /// Whether both encoders make the same of a text.
    fn compare(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<(), Unfit> {
        match (tokenizer.encode_fast(text, false), self.ids(text)) {
            (Ok(expected), Some(ids)) if expected.get_ids() == PipelineToken::cast_slice(&ids) => Ok(()),
            (Ok(_), Some(_)) => Err(Unfit::Differs(text.to_owned())),
            // What the other cannot encode either, it will say so of.
            (Err(_), None) => Ok(()),
            (Ok(_), None) | (Err(_), Some(_)) => Err(Unfit::Fails(text.to_owned())),
        }
    }

    /// The ids of a text; `None` where it is for 0.23 to say.
    pub(super) fn encode(&self, text: &str) -> Option<Vec<u32>> {
        let ids = self.ids(text)?;
        let ids = PipelineToken::cast_slice(&ids);
        self.spelling.spells(ids, text).then(|| ids.to_vec())
    }

    /// The ids of a text with borders in it; `None` where it is for 0.23 to say.
    pub(super) fn cut(&self, text: &str, borders: &[usize]) -> Option<Cut> {
        let ids = self.ids(text)?;
        let ids = PipelineToken::cast_slice(&ids);
        Some(Cut::new(ids.to_vec(), self.spelling.ranges(ids, text)?, borders))
    }

    fn ids(&self, text: &str) -> Option<Vec<PipelineToken>> {
        let options =
            EncodeOptions { truncation: Override::Off, padding: Override::Off, ..EncodeOptions::no_specials() };
        let mut ids = Vec::with_capacity(text.len() / 3);
        // A panic of a release candidate is no reason to lose a run that 0.23 can do.
        let encode = AssertUnwindSafe(|| self.inner.encode_into(text, &options, &mut ids));
        matches!(catch_unwind(encode), Ok(Ok(()))).then_some(ids)
    }
}

/// The bytes that each id stands for.
struct Spelling {
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
    /// By id, where a space may be put before a text: whether another text begins behind it.
    ends_text: Option<Vec<bool>>,
}

/// The bytes of one id: up to eight of them at hand, and where they all lie.
struct Piece {
    head: u64,
    start: u32,
    length: u32,
}

/// Ids up to one behind which another text begins.
#[derive(Clone, Copy)]
struct Section<'a> {
    ids: &'a [u32],
    /// Whether a space was put before its text.
    space_before: bool,
}

impl Spelling {
    fn of(tokenizer: &tokenizers::Tokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        let bytes = bytes_by_id(tokenizer);
        let ends_text =
            (!is_byte_level(tokenizer)).then(|| (0..bytes.len() as u32).map(|id| added.contains_key(&id)).collect());
        let mut spelling = Self { bytes: Vec::new(), pieces: Vec::new(), ends_text };
        bytes.iter().for_each(|bytes| spelling.push(bytes));
        spelling
    }

    fn push(&mut self, bytes: &[u8]) {
        let mut head = [0; 8];
        head.iter_mut().zip(bytes).for_each(|(slot, byte)| *slot = *byte);
        let (start, length) = (self.bytes.len() as u32, bytes.len() as u32);
        self.pieces.push(Piece { head: u64::from_le_bytes(head), start, length });
        self.bytes.extend_from_slice(bytes);
    }

    fn bytes(&self, piece: &Piece) -> &[u8] {
        &self.bytes[piece.start as usize..][..piece.length as usize]
    }

    /// Whether ids stand for a text.
    fn spells(&self, ids: &[u32], text: &str) -> bool {
        self.each_section(ids, text, |_| ())
    }

    /// What part of a text each id stands for, if they stand for it.
    fn ranges(&self, ids: &[u32], text: &str) -> Option<Vec<(usize, usize)>> {
        let (mut ranges, mut end) = (Vec::with_capacity(ids.len()), 0);
        let spells = self.each_section(ids, text, |section| {
            let mut space = usize::from(section.space_before);
            for id in section.ids {
                let start = end;
                end += self.pieces[*id as usize].length as usize - std::mem::take(&mut space);
                ranges.push((start, end));
            }
        });
        spells.then_some(ranges)
    }

    /// Whether ids stand for a text, and what is put before each part of it where that may be.
    fn each_section(&self, ids: &[u32], text: &str, mut each: impl FnMut(Section<'_>)) -> bool {
        let mut rest = text.as_bytes();
        let Some(ends_text) = &self.ends_text else {
            each(Section { ids, space_before: false });
            return self.behind(ids, rest).is_some_and(<[u8]>::is_empty);
        };
        for ids in ids.split_inclusive(|id| ends_text.get(*id as usize).is_some_and(|ends| *ends)) {
            let (behind, space_before) = match self.behind(ids, rest) {
                Some(behind) => (Some(behind), false),
                None => (self.behind_space(ids, rest), true),
            };
            let Some(behind) = behind else { return false };
            each(Section { ids, space_before });
            rest = behind;
        }
        rest.is_empty()
    }

    /// What follows in a text behind ids before which a space was put.
    fn behind_space<'a>(&self, ids: &[u32], text: &'a [u8]) -> Option<&'a [u8]> {
        let (first, others) = ids.split_first()?;
        let first = self.bytes(self.pieces.get(*first as usize)?).strip_prefix(b" ")?;
        self.behind(others, text.strip_prefix(first)?)
    }

    /// What follows in a text behind the bytes of ids; `None` where it does not begin with them.
    fn behind<'a>(&self, ids: &[u32], mut rest: &'a [u8]) -> Option<&'a [u8]> {
        for id in ids {
            let piece = self.pieces.get(*id as usize)?;
            let begins = match (piece.length, rest.first_chunk()) {
                (0, _) => false,
                (length @ 1..=8, Some(chunk)) => {
                    u64::from_le_bytes(*chunk) << (64 - 8 * length) == piece.head << (64 - 8 * length)
                }
                _ => rest.starts_with(self.bytes(piece)),
            };
            if !begins {
                return None;
            }
            rest = &rest[piece.length as usize..];
        }
        Some(rest)
    }
}

/// The bytes that each id stands for; none where there is no such id.
pub(super) fn bytes_by_id(tokenizer: &tokenizers::Tokenizer) -> Vec<Vec<u8>> {
    let added = tokenizer.get_added_tokens_decoder();
    let (byte_level, hidden) = (is_byte_level(tokenizer), hidden_bytes());
    let last = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
    let bytes = |id: u32| {
        let token = tokenizer.id_to_token(id).unwrap_or_default();
        match fallback_byte(&token) {
            _ if added.contains_key(&id) => token.into_bytes(),
            _ if byte_level => token.chars().filter_map(|letter| byte_of(letter, &hidden)).collect(),
            Some(byte) => vec![byte],
            None => token.replace('▁', " ").into_bytes(),
        }
    };
    (0..=last).map(bytes).collect()
}

fn is_byte_level(tokenizer: &tokenizers::Tokenizer) -> bool {
    matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
}

/// The byte that a letter of a byte-level vocabulary stands for: printable Latin-1 for itself, the others from U+0100
/// on.
fn byte_of(letter: char, hidden: &[u8]) -> Option<u8> {
    let code = u32::from(letter);
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => hidden.get(code as usize - 0x100).copied(),
    }
}

/// The bytes that are no printable letters of Latin-1, in order.
fn hidden_bytes() -> Vec<u8> {
    (0..=255).filter(|byte| !is_printable(*byte)).collect()
}

fn is_printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// The byte of a token such as `<0x0A>`, which stands for what no other token does.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn golden(name: &str) -> String {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers"));
        std::fs::read_to_string(folder.join(name).join("tokenizer.json")).unwrap()
    }

    fn stable(json: &str) -> tokenizers::Tokenizer {
        json.parse().unwrap()
    }

    /// The bulk encoder of one file against the stable one of another.
    fn compared(json: &str, other: &str) -> Result<BulkEncoder, Unfit> {
        BulkEncoder::new(Candidate::of_json(json)?, &stable(other), &[])
    }

    fn changed(json: &str, change: impl FnOnce(&mut Value)) -> String {
        let mut value: Value = serde_json::from_str(json).unwrap();
        change(&mut value);
        value.to_string()
    }

    /// Letters of many scripts, blanks, digits and signs, in no order.
    fn muddle(seed: u64) -> String {
        const RANGES: [(u32, u32); 12] = [
            (0x20, 0x5f),
            (0x61, 0x1a),
            (0x61, 0x1a),
            (0x20, 1),
            (0x09, 5),
            (0x30, 10),
            (0xa0, 0x60),
            (0x300, 0x40),
            (0x4e00, 0x400),
            (0x2000, 0x70),
            (0x1f600, 0x50),
            (0x600, 0x100),
        ];
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut draw = |below: u32| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as u32 % below
        };
        let length = draw(90);
        let letter = |_| {
            let (first, count) = RANGES[draw(RANGES.len() as u32) as usize];
            char::from_u32(first + draw(count)).unwrap()
        };
        (0..length).map(letter).collect()
    }

    /// Patterns that published tokenizers cut words with.
    const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    /// The golden byte-level tokenizer with the rules of others for what a word is.
    fn with_words_of(pre_tokenizers: Value) -> String {
        changed(&golden("bytelevel"), |json| {
            json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": pre_tokenizers});
        })
    }

    fn split(pattern: &str) -> Value {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        json!([{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false}, bytes])
    }

    #[test]
    fn its_ids_are_those_of_the_stable_tokenizer() {
        let digits = json!([{"type": "Digits", "individual_digits": true},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]);
        let composed = changed(&with_words_of(split(QWEN_2)), |json| json["normalizer"] = json!({"type": "NFC"}));
        let files =
            [golden("bytelevel"), golden("metaspace"), with_words_of(split(LLAMA_3)), composed, with_words_of(digits)];
        for json in files {
            let stable = stable(&json);
            let bulk = BulkEncoder::new(Candidate::of_json(&json).unwrap(), &stable, &[]).unwrap();
            let mut told = 0;
            for text in (0..1500).map(muddle) {
                let Some(ids) = bulk.encode(&text) else { continue };
                assert_eq!(ids, stable.encode_fast(text.as_str(), false).unwrap().get_ids(), "{text:?}");
                told += 1;
            }
            // The one of pieces knows few letters.
            let few = json.contains("\"unk_token\":\"<unk>\"") || json.contains("\"unk_token\": \"<unk>\"");
            assert!(told > if few { 20 } else { 1000 }, "{told} of 1500 texts");
        }
    }

    #[test]
    fn an_encoder_with_other_ids_is_not_used() {
        let (bytelevel, metaspace) = (golden("bytelevel"), golden("metaspace"));
        let merged_otherwise = changed(&bytelevel, |json| json["model"]["merges"].as_array_mut().unwrap().reverse());
        assert!(matches!(compared(&merged_otherwise, &bytelevel), Err(Unfit::Differs(_))));
        let cut_otherwise = with_words_of(split(QWEN_2));
        assert!(matches!(compared(&cut_otherwise, &bytelevel), Err(Unfit::Differs(_))));
        assert!(matches!(compared(&bytelevel, &metaspace), Err(Unfit::Differs(_) | Unfit::Fails(_))));
        // The first of the data decide too.
        let stable = stable(&bytelevel);
        let added = changed(&bytelevel, |json| {
            let token = json!({"id": 2048, "content": "qqqq", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": false});
            json["added_tokens"].as_array_mut().unwrap().push(token);
        });
        let over = |samples: &[String]| BulkEncoder::new(Candidate::of_json(&added).unwrap(), &stable, samples);
        assert!(over(&[]).is_ok());
        let samples = ["of them".to_owned(), "a qqqq of them".to_owned(), "no qqqq of them".to_owned()];
        assert!(matches!(over(&samples), Err(Unfit::Differs(text)) if text == samples[1]), "the first is told");
    }

    #[test]
    fn a_file_that_it_cannot_read_or_spell_is_left_to_the_stable_tokenizer() {
        let words = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"});
        let unknown = changed(&golden("bytelevel"), |json| json["model"] = words);
        assert!(matches!(compared(&unknown, &unknown).err(), Some(Unfit::Form(_))));
        let odd_words = with_words_of(split(r"[aeiou]{2,5}(?=x)"));
        assert!(matches!(compared(&odd_words, &odd_words), Err(Unfit::Form(_) | Unfit::Fails(_))));
        assert!(matches!(compared("{}", &golden("bytelevel")), Err(Unfit::Form(_))));
        let upside_down = changed(&golden("bytelevel"), |json| {
            json["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "~"});
        });
        let samples = ["Rain fell.".to_owned(), "Rain fell on the hills.".to_owned()];
        let result = BulkEncoder::new(Candidate::of_json(&upside_down).unwrap(), &stable(&upside_down), &samples);
        assert!(matches!(result, Err(Unfit::Unspelled)), "{:?}", result.err());
    }

    #[test]
    fn ids_that_do_not_spell_the_text_are_not_believed() {
        let bytes = Spelling::of(&stable(&golden("bytelevel")));
        let spaces = Spelling::of(&stable(&golden("metaspace")));
        for (spelling, json) in [(&bytes, golden("bytelevel")), (&spaces, golden("metaspace"))] {
            let stable = stable(&json);
            for text in ["Rain fell on the hills.", " two  spaces", "", "x"] {
                let ids = stable.encode_fast(text, false).unwrap().get_ids().to_vec();
                assert!(spelling.spells(&ids, text), "{text:?}");
                assert!(!spelling.spells(&ids, &format!("{text}s")));
                assert!(!spelling.spells(&[ids.clone(), vec![u32::MAX - 2]].concat(), &format!("{text}s")));
                for place in 0..ids.len() {
                    let mut wrong = ids.clone();
                    wrong[place] = if wrong[place] == 300 { 301 } else { 300 };
                    assert!(!spelling.spells(&wrong, text), "{text:?} at {place}");
                }
            }
        }
        let text = "e\u{301}";
        let composed = changed(&golden("bytelevel"), |json| json["normalizer"] = json!({"type": "NFC"}));
        let bulk = compared(&composed, &composed).unwrap();
        assert_eq!(bulk.encode(text), None, "the normalizer makes another text of it");
        assert!(bulk.encode("é").is_some());
    }
}
