//! Trains a byte-level BPE tokenizer, in the Hub's form.
//!
//! Bytes are the alphabet, so that any text has tokens, also in a script the training text lacks.

use std::path::Path;

use serde_json::json;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};

/// Begins a text.
pub(super) const BOS_TOKEN: &str = "<|begin_of_text|>";
/// Ends a text.
pub(super) const EOS_TOKEN: &str = "<|end_of_text|>";
/// Fills up rows.
pub(super) const PAD_TOKEN: &str = "<|pad|>";

/// The special tokens and the bytes, which every tokenizer has.
const LEAST_IDS: usize = 3 + 256;

/// Ids of a tokenizer that was made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BpeTokenizer {
    /// Number of ids.
    pub vocab_size: usize,
    /// Id of [`BOS_TOKEN`].
    pub bos_token_id: u32,
    /// Id of [`EOS_TOKEN`].
    pub eos_token_id: u32,
    /// Id of [`PAD_TOKEN`].
    pub pad_token_id: u32,
}

/// Trains on `texts` up to `vocab_size` ids and writes `tokenizer.json`, `tokenizer_config.json` and
/// `special_tokens_map.json` into `folder`. Fewer ids result where the text has fewer pairs worth merging.
///
/// # Errors
/// Fails if the tokenizer cannot be trained or a file cannot be written.
pub(super) fn train(
    texts: &[String],
    vocab_size: usize,
    max_position_embeddings: usize,
    folder: &Path,
) -> tokenizers::Result<BpeTokenizer> {
    // The trainer makes room for all ids at once. There are fewer merges than bytes: each leaves a piece less of the
    // text.
    let bytes: usize = texts.iter().map(String::len).sum();
    let vocab_size = vocab_size.min(LEAST_IDS + bytes);
    let special = [BOS_TOKEN, EOS_TOKEN, PAD_TOKEN].map(|token| AddedToken::from(token, true));
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(2)
        .show_progress(false)
        .special_tokens(special.to_vec())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let byte_level = ByteLevel::new(false, false, true);
    let mut tokenizer = TokenizerBuilder::<BPE, tokenizers::NormalizerWrapper, ByteLevel, ByteLevel, ByteLevel>::new()
        .with_model(BPE::default())
        .with_pre_tokenizer(Some(byte_level))
        .with_post_processor(Some(byte_level))
        .with_decoder(Some(byte_level))
        .build()?;
    tokenizer.train(&mut trainer, texts.iter())?;
    tokenizer.save(folder.join("tokenizer.json"), true)?;

    let config = json!({
        "add_bos_token": false,
        "bos_token": BOS_TOKEN,
        "clean_up_tokenization_spaces": false,
        "eos_token": EOS_TOKEN,
        "model_max_length": max_position_embeddings,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    let map = json!({"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN});
    for (name, content) in [("tokenizer_config.json", config), ("special_tokens_map.json", map)] {
        std::fs::write(folder.join(name), format!("{content:#}\n"))?;
    }

    let id = |token: &str| tokenizer.token_to_id(token).expect("special tokens are in the vocabulary");
    Ok(BpeTokenizer {
        vocab_size: tokenizer.get_vocab_size(true),
        bos_token_id: id(BOS_TOKEN),
        eos_token_id: id(EOS_TOKEN),
        pad_token_id: id(PAD_TOKEN),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vocabulary_that_no_text_could_fill_takes_no_room() {
        let sizes = |texts: &[&str], vocab_size| {
            let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
            let folder = tempfile::tempdir().unwrap();
            let made = train(&texts, vocab_size, 64, folder.path()).unwrap();
            (made.vocab_size, std::fs::read(folder.path().join("tokenizer.json")).unwrap())
        };
        // Of two texts that are equal each byte but the first is merged.
        let text = "abcdefghijklmnopqrstuvwxyz";
        let (most, made) = sizes(&[text, text], 9_999_999_999);
        assert_eq!(most, LEAST_IDS + text.len() - 1);
        assert!(made == sizes(&[text, text], most).1);
        assert_eq!(sizes(&["a"], usize::MAX).0, LEAST_IDS);
    }

    #[test]
    fn equal_texts_give_an_equal_tokenizer_that_reads_any_script() {
        let texts: Vec<String> = (0..200).map(|n| format!("the {n} cats sat on the mat 你好")).collect();
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let made = folders.each_ref().map(|folder| train(&texts, 300, 64, folder.path()).unwrap());
        assert_eq!(made[0], made[1]);
        assert!((260..=300).contains(&made[0].vocab_size), "{:?}", made[0]);
        assert_eq!((made[0].bos_token_id, made[0].eos_token_id, made[0].pad_token_id), (0, 1, 2));
        let files = folders.each_ref().map(|folder| std::fs::read(folder.path().join("tokenizer.json")).unwrap());
        assert_eq!(files[0], files[1]);

        let tokenizer = tokenizers::Tokenizer::from_file(folders[0].path().join("tokenizer.json")).unwrap();
        for text in ["the cats", " two  spaces", "Ünïcode 字 \n🙂"] {
            let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        }
    }
}
