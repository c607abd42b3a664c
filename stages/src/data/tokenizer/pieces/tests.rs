//! Against what `tokenizers` makes of the whole text.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::{BulkEncoder, Candidate};
use super::*;

fn golden(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers")).join(name)
}

fn golden_json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name).join("tokenizer.json")).unwrap()).unwrap()
}

fn special(id: u64, content: &str) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true})
}

const CONTROLS: [&str; 5] = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"];

/// The golden vocabulary of pieces with another way to get from a text to them.
fn pieces(change: impl FnOnce(&mut Value)) -> Value {
    let mut json = golden_json("metaspace");
    let size = json["model"]["vocab"].as_object().unwrap().len() as u64;
    json["model"]["vocab"]["<|user|>"] = size.into();
    json["model"]["vocab"]["<|assistant|>"] = (size + 1).into();
    let ids = CONTROLS.map(|text| json["model"]["vocab"][text].as_u64().unwrap());
    json["added_tokens"] = ids.into_iter().zip(CONTROLS).map(|(id, text)| special(id, text)).collect();
    json["post_processor"] = Value::Null;
    change(&mut json);
    json
}

fn metaspace(scheme: &str, split: bool) -> Value {
    pieces(|json| {
        json["pre_tokenizer"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split});
        if scheme == "never" {
            json["decoder"]["decoders"].as_array_mut().unwrap().pop();
        }
    })
}

fn replace() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
}

/// As Llama 2 has it, and Mistral up to 0.2.
fn prepend() -> Value {
    pieces(|json| {
        json["normalizer"] =
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace()]});
        json["pre_tokenizer"] = Value::Null;
    })
}

fn gemma() -> Value {
    pieces(|json| {
        json["normalizer"] = replace();
        json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
            "invert": false});
        json["decoder"]["decoders"].as_array_mut().unwrap().pop();
    })
}

fn unigram() -> Value {
    pieces(|json| {
        let vocab = json["model"]["vocab"].as_object().unwrap();
        let mut vocab: Vec<(&String, u64)> = vocab.iter().map(|(text, id)| (text, id.as_u64().unwrap())).collect();
        vocab.sort_by_key(|(_, id)| *id);
        let score = |text: &str| -9.0 + (text.chars().count() as f64).sqrt();
        let vocab: Vec<Value> = vocab.iter().map(|(text, _)| json!([text, score(text)])).collect();
        json["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": true});
        json["pre_tokenizer"] =
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    })
}

fn bytes(add_prefix_space: bool) -> Value {
    let mut json = golden_json("bytelevel");
    json["pre_tokenizer"]["add_prefix_space"] = add_prefix_space.into();
    json
}

/// All of them, by what they are to be called.
fn all() -> Vec<(&'static str, Value)> {
    vec![
        ("prepend", prepend()),
        ("always", metaspace("always", true)),
        ("always, not split", metaspace("always", false)),
        ("first", metaspace("first", true)),
        ("never", metaspace("never", true)),
        ("unigram", unigram()),
        ("gemma", gemma()),
        ("bytes behind a space", bytes(true)),
        ("bytes", bytes(false)),
    ]
}

fn tokenizer(json: &Value) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::from_folder(folder.path()).unwrap()
}

/// The same with the fast encoder.
fn fast(json: &Value) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let mut tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    tokenizer.bulk = Some(BulkEncoder::new(Candidate::load(folder.path()).unwrap(), &tokenizer.inner, &[]).unwrap());
    tokenizer
}

/// What a piece of a conversation may be made of.
const ATOMS: [&str; 22] = [
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
    "\n",
    "\n\n",
    " ",
    "  ",
    "Rain",
    " rain",
    "the hills",
    " fell on",
    ".",
    ":",
    "12",
    "7",
    "é",
    "日本",
    "[INST] ",
    " [/INST]",
    "▁",
    "",
];

/// Texts that follow each other, others for each number.
fn texts(number: u64) -> Vec<String> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    };
    let count = 1 + draw(5);
    let mut text = || (0..draw(6)).map(|_| ATOMS[draw(ATOMS.len())]).collect::<String>();
    // Drawn twice from one generator: first how many, then which.
    (0..count).map(|_| text()).collect()
}

fn as_strs(texts: &[String]) -> Vec<&str> {
    texts.iter().map(String::as_str).collect()
}

/// What `tokenizers` makes of the whole, and whether a token of it lies in two of the texts.
fn whole(tokenizer: &Tokenizer, texts: &[&str]) -> (Vec<u32>, bool) {
    let encoding = tokenizer.inner.encode(texts.concat(), false).unwrap();
    let borders = borders(texts);
    let shared = |(start, end): &(usize, usize)| borders.iter().any(|border| start < border && border < end);
    (encoding.get_ids().to_vec(), encoding.get_offsets().iter().any(shared))
}

const CASES: std::ops::Range<u64> = 0..1200;

#[test]
fn ids_are_those_of_the_whole_text_and_spell_it_in_any_case() {
    for (name, json) in all() {
        let tokenizer = tokenizer(&json);
        let (mut equal, mut cut) = (0, 0);
        for texts in CASES.map(texts) {
            let texts = as_strs(&texts);
            let ids = tokenizer.encode_texts(&texts).unwrap();
            assert_eq!(ids.len(), texts.len());
            let (expected, shared) = whole(&tokenizer, &texts);
            let text = |ids: &[u32]| tokenizer.decode_with_special(ids).unwrap();
            // A vocabulary of bytes keeps each border, and cuts some texts otherwise at one that no token crosses.
            if shared || name == "bytes" {
                assert_eq!(text(&ids.concat()), text(&expected), "{name}: {texts:?}");
                cut += 1;
            } else {
                assert_eq!(ids.concat(), expected, "{name}: {texts:?}");
                equal += 1;
            }
        }
        assert!(cut > 50 && (equal > 500 || name == "bytes"), "{name}: {equal} and {cut}");
    }
}

#[test]
fn texts_are_encoded_in_the_ids_that_they_have_before_more_texts() {
    for (name, json) in all() {
        let tokenizer = tokenizer(&json);
        for texts in CASES.map(texts) {
            let texts = as_strs(&texts);
            let ids = tokenizer.encode_texts(&texts).unwrap();
            for count in 0..texts.len() {
                assert_eq!(tokenizer.encode_texts(&texts[..count]).unwrap(), ids[..count], "{name}: {texts:?}");
            }
        }
    }
}

#[test]
fn the_fast_encoder_cuts_as_the_other_does() {
    for (name, json) in all() {
        // It does not read all of them; those that Llama 2, Mistral and TinyLlama have it must.
        let loaded = std::panic::catch_unwind(|| fast(&json));
        let Ok(fast) = loaded else {
            assert!(!["prepend", "always", "first", "bytes"].contains(&name), "{name}");
            continue;
        };
        let (stable, mut spelled) = (tokenizer(&json), 0);
        for texts in CASES.map(texts) {
            let texts = as_strs(&texts);
            assert_eq!(fast.encode_texts(&texts).unwrap(), stable.encode_texts(&texts).unwrap(), "{name}: {texts:?}");
            let cut = fast.bulk.as_ref().and_then(|bulk| bulk.cut(&texts.concat(), &borders(&texts)));
            if let Some(cut) = cut {
                let expected = stable.cut_with_offsets(&texts.concat(), &borders(&texts), AddedTokens::Recognised);
                assert_eq!(cut, expected.unwrap(), "{name}: {texts:?}");
                spelled += 1;
            }
        }
        assert!(spelled > 600, "{name}: {spelled} texts are cut by the fast encoder itself");
    }
}

#[test]
fn bytes_are_encoded_apart() {
    let tokenizer = tokenizer(&bytes(false));
    for texts in CASES.map(texts) {
        let apart: Vec<Vec<u32>> = texts
            .iter()
            .map(|text| tokenizer.inner.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec())
            .collect();
        assert_eq!(tokenizer.encode_texts(&as_strs(&texts)).unwrap(), apart, "{texts:?}");
    }
}

#[test]
fn a_border_that_a_token_would_cross_stays_one() {
    for json in [prepend(), metaspace("always", true), metaspace("first", true), unigram()] {
        let tokenizer = tokenizer(&json);
        let ids = tokenizer.encode_texts(&["Rain fell on the ", "hills."]).unwrap();
        let pieces: Vec<String> = ids[1].iter().map(|id| tokenizer.inner.id_to_token(*id).unwrap()).collect();
        assert_eq!(pieces.concat(), "hills.", "no space before it");
        assert_eq!(tokenizer.decode(&ids.concat()).unwrap(), "Rain fell on the hills.");
        // With the space behind the border no token crosses it.
        let ids = tokenizer.encode_texts(&["Rain fell on the", " hills."]).unwrap();
        assert_eq!(ids.concat(), tokenizer.encode("Rain fell on the hills.").unwrap());
        assert_eq!(tokenizer.inner.id_to_token(ids[1][0]).unwrap().chars().next(), Some('▁'));
    }
}

#[test]
fn marked_texts_get_no_space_at_a_border() {
    for json in [prepend(), metaspace("always", true), metaspace("first", true)] {
        let tokenizer = tokenizer(&json);
        let marked = tokenizer.control_texts().mark("say </s> twice").unwrap();
        let ids = tokenizer.encode_texts(&["Rain: ", &marked, ". Hills:", " fell"]).unwrap();
        let end = tokenizer.token_id("</s>").unwrap();
        assert!(!ids.concat().contains(&end));
        assert_eq!(tokenizer.decode(&ids.concat()).unwrap(), "Rain: say </s> twice. Hills: fell");
    }
}

#[test]
fn cuts_are_where_ids_meet() {
    let cut = |ranges: &[(usize, usize)], borders: &[usize]| {
        Cut::new(vec![0; ranges.len()], ranges.iter().copied(), borders).places
    };
    assert_eq!(cut(&[(0, 2), (2, 5)], &[0, 2, 3, 5]), [Some(0), Some(1), None, Some(2)]);
    assert_eq!(cut(&[], &[0, 0]), [Some(0), Some(0)]);
    // The ids of a character's bytes, and a space that was put before a text.
    assert_eq!(cut(&[(0, 3), (0, 3), (3, 3), (3, 4)], &[3, 3]), [Some(2), Some(2)]);
}

/// A template that cuts a text at a control token leaves a mark of it on either side.
#[test]
fn marks_without_their_partners_are_borders() {
    let tokenizer = tokenizer(&metaspace("first", true));
    let ids = tokenizer.encode_marked(&format!("{PLAIN_BEGIN}a<|user|>b</s>c{PLAIN_END}d")).unwrap();
    for control in ["<|user|>", "</s>"] {
        assert!(ids.contains(&tokenizer.token_id(control).unwrap()), "{control}: {ids:?}");
    }
    let ids = tokenizer.encode_marked(&format!("{PLAIN_BEGIN}</s>{PLAIN_END}")).unwrap();
    assert!(!ids.contains(&tokenizer.token_id("</s>").unwrap()), "{ids:?}");
}
