//! llama.cpp's name for how a byte-level tokenizer splits text, found by what the tokenizer does.
//!
//! llama.cpp has the splitting compiled in, by name. Its converter finds the name by the ids that a text gets, which a
//! vocabulary that was trained anew never has; `tokenizer.json` says the splitting itself.

use serde_json::{Value, json};

use super::GgufError;

const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The names that are found by what `tokenizer.json` says.
pub const PRE_TOKENIZERS: [&str; 5] = ["llama-bpe", "qwen2", "gpt-2", "smollm", "tekken"];

/// What a step of a pre-tokenizer does, as far as any of these takes it.
#[derive(PartialEq)]
enum Step<'a> {
    /// Pieces are the matches of an expression, and what is between them.
    Regex(&'a str),
    /// Every digit is a piece.
    Digits,
    /// Bytes as characters, after splitting by GPT-2's expression.
    Gpt2,
    /// Bytes as characters, nothing else.
    Bytes,
    /// Anything else.
    Other,
}

impl<'a> Step<'a> {
    fn of(step: &'a Value) -> Self {
        let is = |key: &str, unsaid: bool| step[key].as_bool().unwrap_or(unsaid);
        match step["type"].as_str() {
            Some("Split") if step["behavior"] == "Isolated" && !is("invert", false) => {
                step["pattern"]["Regex"].as_str().map_or(Self::Other, Self::Regex)
            }
            Some("Digits") if is("individual_digits", false) => Self::Digits,
            Some("ByteLevel") if is("add_prefix_space", true) => Self::Other,
            Some("ByteLevel") if is("use_regex", true) => Self::Gpt2,
            Some("ByteLevel") => Self::Bytes,
            _ => Self::Other,
        }
    }
}

/// The name, or an error that says what the tokenizer does instead.
pub(super) fn name(tokenizer: &Value) -> Result<&'static str, GgufError> {
    let pre_tokenizer = &tokenizer["pre_tokenizer"];
    let steps = match pre_tokenizer["pretokenizers"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(pre_tokenizer),
    };
    let steps: Vec<Step<'_>> = steps.iter().map(Step::of).collect();
    let name = match steps.as_slice() {
        [Step::Regex(LLAMA_3), Step::Bytes] => "llama-bpe",
        [Step::Regex(QWEN_2), Step::Bytes] => "qwen2",
        [Step::Regex(TEKKEN), Step::Bytes] => "tekken",
        [Step::Gpt2] => "gpt-2",
        [Step::Digits, Step::Gpt2] => "smollm",
        _ => return Err(GgufError::UnknownPreTokenizer(format!("`pre_tokenizer` is {pre_tokenizer}"))),
    };
    // The converter takes no notice of qwen2's NFC either: llama.cpp normalises no text.
    let normalizer = &tokenizer["normalizer"];
    let passed_over = normalizer.is_null() || name == "qwen2" && normalizer["type"] == "NFC";
    match passed_over {
        true => Ok(name),
        false => Err(GgufError::UnknownPreTokenizer(format!("`normalizer` is {normalizer}"))),
    }
}

/// How a tokenizer of this name normalises and splits text.
pub(super) struct WrittenOut {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    /// Whether a piece that is a token becomes that one, whatever merges would make of it.
    pub(super) ignores_merges: bool,
    /// Whether llama.cpp puts a beginning-of-text token before a text where a file does not say.
    pub(super) adds_bos: bool,
}

/// What a name stands for, if it is known.
pub(super) fn written_out(name: &str) -> Option<WrittenOut> {
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let steps = |steps: [Value; 2]| json!({"type": "Sequence", "pretokenizers": steps});
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let (pre_tokenizer, is_whole) = match name {
        "llama-bpe" | "llama3" | "llama-v3" => (steps([split(LLAMA_3), bytes(false)]), true),
        "qwen2" | "deepseek-r1-qwen" => (steps([split(QWEN_2), bytes(false)]), false),
        "tekken" => (steps([split(TEKKEN), bytes(false)]), true),
        "gpt-2" => (bytes(true), false),
        "smollm" => (steps([json!({"type": "Digits", "individual_digits": true}), bytes(true)]), false),
        _ => return None,
    };
    Some(WrittenOut {
        normalizer: if name == "qwen2" { json!({"type": "NFC"}) } else { Value::Null },
        pre_tokenizer,
        ignores_merges: is_whole,
        adds_bos: is_whole,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(use_regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
    }

    fn split(regex: &str) -> Value {
        json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
    }

    #[test]
    fn a_name_is_found_by_what_is_done() {
        let of = |steps: Vec<Value>| {
            name(&json!({"normalizer": null, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}})).ok()
        };
        assert_eq!(of(vec![split(LLAMA_3), bytes(false)]), Some("llama-bpe"));
        assert_eq!(of(vec![split(QWEN_2), bytes(false)]), Some("qwen2"));
        assert_eq!(of(vec![split(TEKKEN), bytes(false)]), Some("tekken"));
        assert_eq!(of(vec![json!({"type": "Digits", "individual_digits": true}), bytes(true)]), Some("smollm"));
        assert_eq!(name(&json!({"pre_tokenizer": bytes(true)})).unwrap(), "gpt-2");
        assert_eq!(of(vec![split(LLAMA_3), bytes(true)]), None);
        assert_eq!(of(vec![split(r"\p{L}+"), bytes(false)]), None);
        assert_eq!(of(vec![json!({"type": "Digits", "individual_digits": false}), bytes(true)]), None);
    }

    #[test]
    fn a_text_that_is_changed_first_has_no_name() {
        let of = |kind: &str| name(&json!({"normalizer": {"type": kind}, "pre_tokenizer": bytes(true)}));
        assert!(of("Lowercase").unwrap_err().to_string().contains("Lowercase"));
        let qwen = json!({"normalizer": {"type": "NFC"}, "pre_tokenizer":
            {"type": "Sequence", "pretokenizers": [split(QWEN_2), bytes(false)]}});
        assert_eq!(name(&qwen).unwrap(), "qwen2");
    }
}
