//! The tokenizer of a file, as the `tokenizer.json` and `tokenizer_config.json` of a checkpoint.
//!
//! llama.cpp has normalisation and splitting compiled in, by name; here they are written out. Merges of a SentencePiece
//! vocabulary, which a file does not have, follow from its pieces and scores, as in transformers' converter.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use super::import::integer;
use super::vocabulary::{DEFAULT_TEMPLATE, TEMPLATE, TokenKind};
use super::{GgufError, GgufFile, Value, pre_tokenizer};

/// The two files.
#[derive(Clone, Debug)]
pub struct TokenizerJson {
    /// `tokenizer.json`.
    pub tokenizer: Json,
    /// `tokenizer_config.json`, with the chat template.
    pub settings: Json,
}

/// The tokenizer of a file. `pre_tokenizer` names how text is split where the file's own name is not known.
///
/// # Errors
/// Fails if the file has none, or one of another kind, or it splits text in a way that is not known.
pub fn tokenizer(file: &GgufFile, pre_tokenizer: Option<&str>) -> Result<TokenizerJson, GgufError> {
    let vocabulary = Vocabulary::read(file)?;
    let tokenizer = match vocabulary.text("model") {
        Some("gpt2") => vocabulary.byte_level(pre_tokenizer)?,
        Some("llama") => vocabulary.sentencepiece()?,
        Some(other) => {
            return Err(unusable(format!("its tokenizer is of kind `{other}`; `gpt2` and `llama` are read")));
        }
        None => return Err(unusable("it has no `tokenizer.ggml.model`".to_owned())),
    };
    Ok(TokenizerJson { tokenizer, settings: vocabulary.settings() })
}

fn unusable(what: String) -> GgufError {
    GgufError::Unusable(what)
}

struct Token<'a> {
    id: usize,
    text: &'a str,
    kind: i32,
    score: f32,
}

impl Token<'_> {
    fn is(&self, kind: TokenKind) -> bool {
        self.kind == kind as i32
    }

    /// Whether it stands in the place of an id that has no token.
    fn is_padding(&self) -> bool {
        self.is(TokenKind::Unused) && self.text == format!("[PAD{}]", self.id)
    }
}

struct Vocabulary<'a> {
    file: &'a GgufFile,
    tokens: Vec<Token<'a>>,
}

impl<'a> Vocabulary<'a> {
    fn read(file: &'a GgufFile) -> Result<Self, GgufError> {
        let list = |key: &str| match file.get(&format!("tokenizer.ggml.{key}")) {
            Some(Value::Array(_, values)) => values.as_slice(),
            _ => &[],
        };
        let (texts, kinds, scores) = (list("tokens"), list("token_type"), list("scores"));
        if texts.is_empty() {
            return Err(unusable("it has no `tokenizer.ggml.tokens`".to_owned()));
        }
        if [kinds.len(), scores.len()].iter().any(|count| ![0, texts.len()].contains(count)) {
            let (kinds, scores) = (kinds.len(), scores.len());
            return Err(unusable(format!("it has {} tokens, {kinds} types and {scores} scores", texts.len())));
        }
        let token = |(id, text): (usize, &'a Value)| {
            let kind = match kinds.get(id) {
                None => Some(TokenKind::Normal as i32),
                Some(Value::I32(kind)) => Some(*kind),
                Some(_) => None,
            };
            let score = match scores.get(id) {
                None => Some(0.0),
                Some(Value::F32(score)) => Some(*score),
                Some(_) => None,
            };
            let Value::String(text) = text else { return None };
            Some(Token { id, text, kind: kind?, score: score? })
        };
        let tokens: Option<Vec<_>> = texts.iter().enumerate().map(token).collect();
        let tokens =
            tokens.ok_or_else(|| unusable("its tokens, their types or scores are of other types".to_owned()))?;
        Ok(Self { file, tokens })
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.file.get(&format!("tokenizer.ggml.{key}"))
    }

    fn text(&self, key: &str) -> Option<&'a str> {
        match self.get(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    fn flag(&self, key: &str) -> Option<bool> {
        match self.get(key) {
            Some(Value::Bool(flag)) => Some(*flag),
            _ => None,
        }
    }

    /// The token that a key names by its id.
    fn special(&self, role: &str) -> Option<&Token<'a>> {
        self.tokens.get(integer(self.get(&format!("{role}_token_id"))?)?)
    }

    /// Those with an id of their own.
    fn vocabulary(&self) -> impl Iterator<Item = &Token<'a>> {
        self.tokens.iter().filter(|token| !token.is_padding())
    }

    fn ids(&self) -> Map<String, Json> {
        self.vocabulary().map(|token| (token.text.to_owned(), json!(token.id))).collect()
    }

    /// Tokens that are found in a text before it is split.
    fn added(&self) -> Vec<Json> {
        let is_phi = self.file.get("general.architecture") == Some(&Value::String("phi3".to_owned()));
        let is_added = |token: &&Token<'_>| {
            [TokenKind::Unknown, TokenKind::Control, TokenKind::UserDefined].iter().any(|kind| token.is(*kind))
        };
        let added = self.vocabulary().filter(is_added).map(|token| {
            // As llama.cpp has it for these models: blanks behind such a token belong to it.
            let rstrip = is_phi && !["<unk>", "<s>", "<|endoftext|>"].contains(&token.text);
            json!({
                "id": token.id, "content": token.text, "single_word": false, "lstrip": false, "rstrip": rstrip,
                "normalized": false, "special": !token.is(TokenKind::UserDefined),
            })
        });
        added.collect()
    }

    fn byte_level(&self, named: Option<&str>) -> Result<Json, GgufError> {
        let name = named.or_else(|| self.text("pre")).unwrap_or("default");
        let split = pre_tokenizer::written_out(name).ok_or_else(|| GgufError::UnknownSplit(name.to_owned()))?;
        let Some(Value::Array(_, merges)) = self.get("merges") else {
            return Err(unusable("it has no `tokenizer.ggml.merges`".to_owned()));
        };
        let pair = |merge: &Value| match merge {
            Value::String(text) => text.split_once(' ').map(|(one, other)| json!([one, other])),
            _ => None,
        };
        let merges: Option<Vec<Json>> = merges.iter().map(pair).collect();
        let merges = merges.ok_or_else(|| unusable("`tokenizer.ggml.merges` are no pairs".to_owned()))?;
        let by_bytes = json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true,
        });
        let processors: Vec<Json> = [by_bytes.clone()].into_iter().chain(self.template(split.adds_bos)).collect();
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added(),
            "normalizer": split.normalizer,
            "pre_tokenizer": split.pre_tokenizer,
            "post_processor": {"type": "Sequence", "processors": processors},
            "decoder": by_bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": split.ignores_merges, "vocab": self.ids(), "merges": merges,
            },
        }))
    }

    fn sentencepiece(&self) -> Result<Json, GgufError> {
        let unknown = self.tokens.iter().find(|token| token.is(TokenKind::Unknown)).or_else(|| self.special("unknown"));
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let has_prefix = self.flag("add_space_prefix").unwrap_or(true);
        let normalizer = match has_prefix {
            true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}),
            false => spaces,
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if has_prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added(),
            "normalizer": normalizer,
            "pre_tokenizer": null,
            "post_processor": self.template(true).unwrap_or_default(),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": unknown.map(|token| token.text),
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                "ignore_merges": false, "vocab": self.ids(), "merges": self.merges_of_pieces(),
            },
        }))
    }

    /// Every way to put a piece together of two, the pieces by their scores.
    fn merges_of_pieces(&self) -> Vec<Json> {
        let pieces = || self.tokens.iter().filter(|token| token.is(TokenKind::Normal));
        let ids: HashMap<&str, usize> = pieces().map(|token| (token.text, token.id)).collect();
        let mut merges: Vec<(f32, &str, &str)> = Vec::new();
        for token in pieces() {
            let cuts = token.text.char_indices().skip(1).map(|(at, _)| token.text.split_at(at));
            let mut of_piece: Vec<(usize, usize, &str, &str)> =
                cuts.filter_map(|(one, other)| Some((*ids.get(one)?, *ids.get(other)?, one, other))).collect();
            of_piece.sort_unstable();
            merges.extend(of_piece.into_iter().map(|(_, _, one, other)| (token.score, one, other)));
        }
        let length = |text: &str| text.chars().count();
        merges.sort_by(|a, b| {
            b.0.total_cmp(&a.0).then(length(b.1).cmp(&length(a.1))).then(length(b.2).cmp(&length(a.2)))
        });
        merges.into_iter().map(|(_, one, other)| json!([one, other])).collect()
    }

    /// What is put around a text. `adds_bos` is what llama.cpp does where the file does not say.
    fn template(&self, adds_bos: bool) -> Option<Json> {
        let bos = self.special("bos").filter(|_| self.flag("add_bos_token").unwrap_or(adds_bos));
        let eos = self.special("eos").filter(|_| self.flag("add_eos_token").unwrap_or(false));
        if bos.is_none() && eos.is_none() {
            return None;
        }
        let special = |token: Option<&Token<'_>>, of: u8| {
            token.map(|token| json!({"SpecialToken": {"id": token.text, "type_id": of}}))
        };
        let sequence = |name: &str, of: u8| {
            let text = json!({"Sequence": {"id": name, "type_id": of}});
            special(bos, of).into_iter().chain([text]).chain(special(eos, of)).collect::<Vec<_>>()
        };
        let tokens: Map<String, Json> = { [bos, eos].into_iter().flatten() }
            .map(|token| {
                let described = json!({"id": token.text, "ids": [token.id], "tokens": [token.text]});
                (token.text.to_owned(), described)
            })
            .collect();
        let pair = [sequence("A", 0), sequence("B", 1)].concat();
        Some(json!({
            "type": "TemplateProcessing", "single": sequence("A", 0),
            "pair": pair, "special_tokens": tokens,
        }))
    }

    /// The chat template, or where there are several a list of them by name.
    fn chat_template(&self) -> Option<Json> {
        let template = |(key, value): &'a (String, Value)| match value {
            Value::String(text) if key == TEMPLATE => Some((DEFAULT_TEMPLATE, text)),
            Value::String(text) => Some((key.strip_prefix(TEMPLATE)?.strip_prefix('.')?, text)),
            _ => None,
        };
        let mut named: Vec<(&str, &String)> = self.file.metadata().iter().filter_map(template).collect();
        named.sort_by_key(|(name, _)| *name != DEFAULT_TEMPLATE);
        match named.as_slice() {
            [] => None,
            [(DEFAULT_TEMPLATE, text)] => Some(json!(text)),
            named => {
                let named = named.iter().map(|(name, text)| json!({"name": name, "template": text}));
                Some(named.collect())
            }
        }
    }

    fn settings(&self) -> Json {
        let mut settings = Map::new();
        for (role, key) in [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")] {
            if let Some(token) = self.special(role) {
                settings.insert(format!("{key}_token"), json!(token.text));
            }
        }
        for key in ["add_bos_token", "add_eos_token"] {
            settings.extend(self.flag(key).map(|flag| (key.to_owned(), json!(flag))));
        }
        if let Some(prefix) = self.flag("add_space_prefix") {
            settings.insert("add_prefix_space".to_owned(), json!(prefix));
        }
        settings.extend(self.chat_template().map(|template| ("chat_template".to_owned(), template)));
        settings.insert("tokenizer_class".to_owned(), json!("PreTrainedTokenizerFast"));
        Json::Object(settings)
    }
}
