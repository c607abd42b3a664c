//! A model's own tokenizer: text to ids and back, its special tokens, its chat template.
//!
//! The one place that knows the `tokenizers` crate. Where much is to be encoded, a faster one stands before it
//! (`bulk`).

mod bulk;
mod extend;
mod hard_texts;
mod limits;
mod pieces;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::context::Artifact;
use engine::error::{Cause, StageError};
use serde_json::{Map, Value};
use tokenizers::ModelWrapper;

use crate::data::artifact::{CHAT_TEMPLATE_FILE, CHAT_TEMPLATES_FOLDER};
use crate::data::prompt::{ChatError, ChatTemplates, ControlTexts};
use bulk::BulkEncoder;
pub(crate) use bulk::{Candidate, Unfit};
pub use extend::{AddTokensError, NewToken, add_tokens};

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file is missing or cannot be read.
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A file does not hold what its name says.
    #[error("cannot understand `{}`", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A special token is named that the vocabulary lacks.
    #[error("the tokenizer names `{token}` as its {role}, and its vocabulary has no such token")]
    UnknownSpecial {
        /// `bos_token`, `eos_token` …
        role: &'static str,
        token: String,
    },
    /// A token is declared beside `tokenizer.json` that its vocabulary lacks.
    #[error("{place} has the token `{token}`, which the vocabulary of `tokenizer.json` lacks")]
    NotInVocabulary {
        /// The token.
        token: String,
        /// Where it is declared.
        place: &'static str,
    },
    /// The chat template does not compile.
    #[error("the chat template cannot be used")]
    ChatTemplate(#[source] ChatError),
    /// A text cannot be encoded, or ids not decoded.
    #[error("the tokenizer failed")]
    Coding(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl From<TokenizerError> for StageError {
    fn from(error: TokenizerError) -> Self {
        let help = match &error {
            TokenizerError::Read { path, source }
                if source.kind() == ErrorKind::NotFound && path.ends_with("tokenizer.json") =>
            {
                Some(
                    "a `tokenizer.json` is needed; where a checkpoint has only `tokenizer.model`, or `vocab.json` and `merges.txt`, write \
                     one once with transformers: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`",
                )
            }
            TokenizerError::UnknownSpecial { .. } | TokenizerError::NotInVocabulary { .. } => Some(
                "correct the name; or, if the model has an embedding for the token, save the tokenizer anew with transformers, which \
                 adds it to the vocabulary: `AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`",
            ),
            _ => None,
        };
        let help = help.map(|help| match &error {
            TokenizerError::NotInVocabulary { place, .. } if *place == OLDER_ADDED => {
                format!("{help}; or leave the file out of the `download`: `exclude: [added_tokens.json]`")
            }
            _ => help.to_owned(),
        });
        StageError { help, ..StageError::new(Cause::BadData, "the tokenizer cannot be used").with_source(error) }
    }
}

/// A tokenizer with its special tokens and its chat templates.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bulk: Option<BulkEncoder>,
    /// Whether texts that follow each other may be encoded apart.
    encodes_apart: bool,
    config: Map<String, Value>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<u32>,
    pad_token_id: Option<u32>,
    chat_templates: Option<Arc<ChatTemplates>>,
    control_texts: ControlTexts,
}

impl Tokenizer {
    /// Opens an input of kind Tokenizer.
    ///
    /// # Errors
    /// Fails where a file is missing or does not hold what it should.
    pub fn open(artifact: &Artifact) -> Result<Self, TokenizerError> {
        Self::from_folder(&artifact.folder)
    }

    /// Opens a folder with `tokenizer.json` and its companions, such as a checkpoint.
    ///
    /// # Errors
    /// As for [`Tokenizer::open`].
    pub fn from_folder(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        let form = |source| TokenizerError::Form { path: path.clone(), source };
        let bytes = read_bounded(&path).map_err(|source| TokenizerError::Read { path: path.clone(), source })?;
        limits::check(&bytes).map_err(|problem| form(problem.into()))?;
        let mut inner = unpanicked(|| tokenizers::Tokenizer::from_bytes(bytes)).map_err(form)?;
        without_dropout(&mut inner);
        probe(&inner).map_err(form)?;
        // Both are left behind in some published files; lengths are the pipeline's affair.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|source| TokenizerError::Form { path: path.clone(), source })?;
        let config = read_config(folder)?;
        let named = special_tokens(&config);
        let id = |role| special_id(&inner, &named, role);
        let (bos_token_id, eos_token_id, pad_token_id) = (id("bos_token")?, id("eos_token")?, id("pad_token")?);
        check_declared(&inner, folder, &config)?;
        let mentions_bos = ["bos_token", "add_bos_token"].iter().any(|name| config.contains_key(*name));
        let is_named = bos_token_id.is_some() || mentions_bos;
        let bos_token_id = if is_named { bos_token_id } else { beginning(&inner) };
        let chat_templates = chat_templates(folder, &config)?;
        let added = inner.get_added_tokens_decoder();
        let special = added.into_values().filter(|token| token.special).map(|token| token.content);
        let control_texts = ControlTexts::new(special);
        Ok(Self {
            encodes_apart: pieces::encodes_apart(&inner),
            inner,
            bulk: None,
            config,
            bos_token_id,
            eos_token_id,
            pad_token_id,
            chat_templates,
            control_texts,
        })
    }

    /// From now on encodes with a faster encoder of the same folder, where that has the same ids for texts made to be
    /// hard and for these. It takes a tenth of a second to find that out: worth it from some megabytes of text on.
    ///
    /// # Errors
    /// Says why the faster encoder cannot be used; everything is then as it was.
    pub(crate) fn speed_up(&mut self, candidate: Candidate, samples: &[String]) -> Result<(), Unfit> {
        self.bulk = Some(BulkEncoder::new(candidate, &self.inner, samples)?);
        Ok(())
    }

    /// The ids of a text, without any the tokenizer would add by itself. Special tokens written in the text are
    /// recognised.
    ///
    /// # Errors
    /// Fails where the vocabulary has no way to write the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if let Some(ids) = self.bulk.as_ref().and_then(|bulk| bulk.encode(text)) {
            return Ok(ids);
        }
        let encoding = unpanicked(|| self.inner.encode_fast(text, false)).map_err(TokenizerError::Coding)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The ids of a text with those that the tokenizer adds by itself, such as a beginning of text: what its file says,
    /// unless the configuration has `add_bos_token: false`.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_with_added(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if self.config.get("add_bos_token") == Some(&Value::Bool(false)) {
            return self.encode(text);
        }
        let encoding = unpanicked(|| self.inner.encode_fast(text, true)).map_err(TokenizerError::Coding)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids, special tokens left out.
    ///
    /// # Errors
    /// Fails where the decoder does.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        unpanicked(|| self.inner.decode(ids, true)).map_err(TokenizerError::Coding)
    }

    /// The text of ids, special tokens written out.
    ///
    /// # Errors
    /// Fails where the decoder does.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        unpanicked(|| self.inner.decode(ids, false)).map_err(TokenizerError::Coding)
    }

    /// The text of ids as they are written behind others, special tokens left out.
    ///
    /// # Errors
    /// Fails where the decoder does.
    pub fn decode_inside(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        let Some(before) = ["a", "e", "A", "0"].iter().find_map(|token| self.token_id(token)) else {
            return self.decode(ids);
        };
        let text = self.decode(&[&[before], ids].concat())?;
        match text.strip_prefix(self.decode(&[before])?.as_str()) {
            Some(text) => Ok(text.to_owned()),
            None => self.decode(ids),
        }
    }

    /// How many ids there are, added tokens among them.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The id of a token, if the vocabulary has it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The bytes that each id stands for, by id; none where there is no such id.
    pub fn bytes_by_id(&self) -> Vec<Vec<u8>> {
        bulk::bytes_by_id(&self.inner)
    }

    /// Whether an id is a special token, such as an end of turn.
    pub fn is_special(&self, id: u32) -> bool {
        let token = self.inner.id_to_token(id);
        token.is_some_and(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// Beginning of text: what the configuration names, or else what the tokenizer's file puts before every text.
    pub fn bos_token_id(&self) -> Option<u32> {
        self.bos_token_id
    }

    /// End of text.
    pub fn eos_token_id(&self) -> Option<u32> {
        self.eos_token_id
    }

    /// Padding.
    pub fn pad_token_id(&self) -> Option<u32> {
        self.pad_token_id
    }

    /// Whether a text begins with the beginning-of-text token: where there is one and the configuration does not refuse
    /// it.
    pub fn wants_bos(&self) -> bool {
        self.bos_token_id.is_some() && self.config.get("add_bos_token") != Some(&Value::Bool(false))
    }

    /// Ids after which generation stops: end of text, and the end of a turn where the chat template writes one.
    pub fn stop_token_ids(&self) -> Vec<u32> {
        const ENDS_OF_TURN: [&str; 6] =
            ["<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<|endofturn|>"];
        let turns = ENDS_OF_TURN.iter().filter_map(|token| self.token_id(token));
        let mut ids: Vec<u32> = self.eos_token_id.into_iter().chain(turns).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The tokens that end a turn of its chat templates, the default one's first: of each the special token that its
    /// end of a turn begins with, or the added one that it is. A template that ends turns with other text has none.
    fn end_of_turn_ids(&self) -> Vec<u32> {
        let templates = self.chat_templates.iter().flat_map(|templates| templates.all());
        templates.filter_map(|template| self.ending_token(template.end_of_turn()?.trim())).collect()
    }

    fn ending_token(&self, text: &str) -> Option<u32> {
        let ids = self.encode(text).ok()?;
        let (&first, rest) = ids.split_first()?;
        let is_added = || self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&first);
        (self.is_special(first) || (rest.is_empty() && is_added())).then_some(first)
    }

    /// The chat templates, if the model has any.
    pub fn chat_templates(&self) -> Option<&Arc<ChatTemplates>> {
        self.chat_templates.as_ref()
    }

    /// The texts of its special tokens, to find them in data.
    pub fn control_texts(&self) -> &ControlTexts {
        &self.control_texts
    }

    /// Its special tokens by role, as a chat template knows them: `bos_token`, `eos_token` ….
    pub fn special_tokens(&self) -> BTreeMap<String, String> {
        special_tokens(&self.config)
    }
}

/// The token that a tokenizer's file puts before every text.
fn beginning(tokenizer: &tokenizers::Tokenizer) -> Option<u32> {
    let encode = |with_added| unpanicked(|| tokenizer.encode_fast("a", with_added)).ok();
    let (with, without) = (encode(true)?, encode(false)?);
    let first = *with.get_ids().first()?;
    (without.get_ids().first() != Some(&first)).then_some(first)
}

/// What the `tokenizers` crate answers, a panic over a file that it should have refused included. What is known of such
/// files is refused before ([`limits`]).
fn unpanicked<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("the `tokenizers` crate panics over it".into()))
}

/// Encodes some texts of all kinds: a file over which the crate panics is refused when it is opened, and not by the
/// millionth row.
fn probe(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<()> {
    for text in ["", " ", "a", "aa\n\n  b\t", "Hello, world! 123", "é漢字 🙂 ﷺ\u{200d}"] {
        // That a vocabulary cannot write a text is no fault of the file.
        let encode = || Ok(tokenizer.encode_fast(text, false).map(|_| ()).ok());
        unpanicked(encode)?;
    }
    Ok(())
}

/// Has byte pair encoding merge all that it can. With the dropout that a vocabulary was made for, which its file may
/// still have, equal texts would have other ids each time.
fn without_dropout(tokenizer: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model()
        && bpe.dropout.is_some()
    {
        let mut bpe = bpe.clone();
        bpe.dropout = None;
        tokenizer.with_model(bpe);
    }
}

/// The bytes of a file, up to one more than a tokenizer's may have.
fn read_bounded(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(limits::LARGEST_FILE + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read_object(path: &Path) -> Result<Map<String, Value>, TokenizerError> {
    let bytes = match read_bounded(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Map::new()),
        Err(source) => return Err(TokenizerError::Read { path: path.to_owned(), source }),
    };
    serde_json::from_slice(&bytes)
        .map_err(|source| TokenizerError::Form { path: path.to_owned(), source: source.into() })
}

/// The special tokens that every tokenizer may have. Others have names of their own.
const ROLES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"];

/// Further special tokens: a list, or an object of them by name.
const EXTRA: &str = "extra_special_tokens";

/// The older name of such a list.
const ADDITIONAL: &str = "additional_special_tokens";

/// The tokens that are added to a vocabulary, by id. A configuration that has them was saved when it held everything:
/// transformers reads neither `special_tokens_map.json` nor `added_tokens.json` then.
const ADDED: &str = "added_tokens_decoder";

/// The file in which older tokenizers have them.
const OLDER_ADDED: &str = "`added_tokens.json`";

/// What `tokenizer_config.json` says of a tokenizer, and where that has no [`ADDED`] tokens, over it what
/// `special_tokens_map.json` says, a null as well: as transformers reads them.
fn read_config(folder: &Path) -> Result<Map<String, Value>, TokenizerError> {
    let mut config = read_object(&folder.join("tokenizer_config.json"))?;
    if config.contains_key(ADDED) {
        return Ok(config);
    }
    for (name, value) in read_object(&folder.join("special_tokens_map.json"))? {
        // Of tokens with names of their own those of the configuration stay.
        let is_own = name.ends_with("_token") && !ROLES.contains(&name.as_str());
        if is_own && special_text(&config, &name).is_some() {
            continue;
        }
        let value = match (config.remove(&name), value) {
            (Some(Value::Array(known)), Value::Array(more)) if name == EXTRA => Value::Array([known, more].concat()),
            (Some(Value::Object(mut known)), Value::Object(more)) if name == EXTRA => {
                known.extend(more);
                Value::Object(known)
            }
            (_, value) => value,
        };
        config.insert(name, value);
    }
    Ok(config)
}

/// A special token's text: the configuration holds a string, or an object with `content`.
fn special_text<'a>(config: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    token_text(config.get(name)?)
}

fn token_text(token: &Value) -> Option<&str> {
    match token {
        Value::String(text) => Some(text),
        Value::Object(token) => token.get("content")?.as_str(),
        _ => None,
    }
}

/// The texts of a list of tokens, or of an object of them.
fn token_texts(tokens: &Value) -> Vec<&str> {
    match tokens {
        Value::Array(tokens) => tokens.iter().filter_map(token_text).collect(),
        Value::Object(tokens) => tokens.values().filter_map(token_text).collect(),
        _ => Vec::new(),
    }
}

fn special_id(
    inner: &tokenizers::Tokenizer,
    named: &BTreeMap<String, String>,
    role: &'static str,
) -> Result<Option<u32>, TokenizerError> {
    let Some(token) = named.get(role) else { return Ok(None) };
    let unknown = || TokenizerError::UnknownSpecial { role, token: token.clone() };
    inner.token_to_id(token).map(Some).ok_or_else(unknown)
}

/// Checks that the vocabulary has the tokens that the files beside `tokenizer.json` declare. transformers appends those
/// that it lacks as it reads them; here they would be encoded in pieces, and whoever else reads `tokenizer.json` (the
/// fast encoder, a GGUF file) would have other ids. Tokens of ids that the model beside them has no rows for are passed
/// over: it can be given none of them.
fn check_declared(
    inner: &tokenizers::Tokenizer,
    folder: &Path,
    config: &Map<String, Value>,
) -> Result<(), TokenizerError> {
    // Beside a list under its newer name transformers does not read that of the older one.
    let has_extra = config.get(EXTRA).and_then(Value::as_array).is_some_and(|list| !list.is_empty());
    let places = [
        (EXTRA, "`extra_special_tokens` of `tokenizer_config.json` or `special_tokens_map.json`"),
        (ADDITIONAL, "`additional_special_tokens` of `tokenizer_config.json` or `special_tokens_map.json`"),
    ];
    let places = places.into_iter().filter(|(name, _)| *name != ADDITIONAL || !has_extra);
    let rows = vocabulary_of_model(folder);
    let has_row = |id: Option<u64>| rows.zip(id).is_none_or(|(rows, id)| id < rows);
    let added = config.get(ADDED).and_then(Value::as_object).into_iter().flatten();
    let added = added.filter(|(id, _)| has_row(id.parse().ok())).filter_map(|(_, token)| token_text(token));
    let mut declared: Vec<(&str, &'static str)> =
        added.map(|token| (token, "`added_tokens_decoder` of `tokenizer_config.json`")).collect();
    for (name, place) in places {
        declared.extend(config.get(name).into_iter().flat_map(token_texts).map(|token| (token, place)));
    }
    let older = if config.contains_key(ADDED) { Map::new() } else { read_object(&folder.join("added_tokens.json"))? };
    let older = older.iter().filter(|(_, id)| has_row(id.as_u64()));
    declared.extend(older.map(|(token, _)| (token.as_str(), OLDER_ADDED)));
    let missing = declared.into_iter().find(|(token, _)| !token.is_empty() && inner.token_to_id(token).is_none());
    match missing {
        Some((token, place)) => Err(TokenizerError::NotInVocabulary { token: token.to_owned(), place }),
        None => Ok(()),
    }
}

/// Opens a copy of the tokenizer in a model's folder, which has no `config.json` beside it. From the copy
/// `added_tokens.json` is removed where that alone makes it unusable: of the tokens that the vocabulary lacks the model
/// has no rows.
///
/// # Errors
/// As for [`Tokenizer::open`]; and where the file cannot be removed.
pub(crate) fn open_copy(copy: &Path, model: &Path) -> Result<Tokenizer, TokenizerError> {
    match Tokenizer::from_folder(copy) {
        Err(TokenizerError::NotInVocabulary { place, .. })
            if place == OLDER_ADDED && Tokenizer::from_folder(model).is_ok() =>
        {
            let path = copy.join("added_tokens.json");
            std::fs::remove_file(&path).map_err(|source| TokenizerError::Read { path, source })?;
            Tokenizer::from_folder(copy)
        }
        opened => opened,
    }
}

/// How many tokens the model in a folder has rows for, if there is one that says so.
fn vocabulary_of_model(folder: &Path) -> Option<u64> {
    let config = read_object(&folder.join("config.json")).ok()?;
    let of_text = config.get("text_config").and_then(|text| text.get("vocab_size"));
    config.get("vocab_size").or(of_text)?.as_u64()
}

/// The special tokens that a template has by name, as transformers gives it them: those of the configuration's keys
/// that end in `_token`, and over them those of `extra_special_tokens`.
fn special_tokens(config: &Map<String, Value>) -> BTreeMap<String, String> {
    let keys = config.keys().filter(|name| name.ends_with("_token")).map(|name| (name, config));
    let extra = config.get(EXTRA).and_then(Value::as_object);
    let extra = extra.into_iter().flat_map(|tokens| tokens.keys().map(move |name| (name, tokens)));
    let named = keys.chain(extra);
    named.filter_map(|(name, of)| Some((name.clone(), special_text(of, name)?.to_owned()))).collect()
}

/// Whether a tokenizer in a folder has a chat template, if its configuration can be read.
pub(crate) fn has_chat_template(folder: &Path) -> Option<bool> {
    let config = read_config(folder).ok()?;
    Some(folder.join(CHAT_TEMPLATE_FILE).is_file() || template_in_config(&config).is_some())
}

/// The tokens that end a turn of the chat templates in a folder, the default one's first.
///
/// # Errors
/// Fails where the tokenizer or its default template cannot be opened, with why, for a warning: those who only hand its
/// files on do not need it.
pub(crate) fn end_of_turn_ids(folder: &Path) -> Result<Vec<u32>, String> {
    // Opening fails, too, over a configuration that does not tell.
    if has_chat_template(folder) == Some(false) {
        return Ok(Vec::new());
    }
    let why = |error: TokenizerError| {
        let causes = std::iter::successors(std::error::Error::source(&error), |error| error.source());
        let text = causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"));
        // Of a folder that is being made nothing is left when the warning is read.
        text.replace(&format!("{}/", folder.display()), "")
    };
    Tokenizer::from_folder(folder).map(|tokenizer| tokenizer.end_of_turn_ids()).map_err(why)
}

/// The name of the template of conversations with tools.
const TOOL_USE: &str = "tool_use";

/// The chat templates of a tokenizer in a folder, as transformers reads them: the file of the default one replaces all
/// those of the configuration, and each file of the folder of others replaces the one of its name. Where that folder
/// alone is there, transformers has no default template; here it is the configuration's.
fn chat_templates(folder: &Path, config: &Map<String, Value>) -> Result<Option<Arc<ChatTemplates>>, TokenizerError> {
    let file = template_in_file(folder.join(CHAT_TEMPLATE_FILE))?;
    let tool_use = template_in_file(folder.join(CHAT_TEMPLATES_FOLDER).join(format!("{TOOL_USE}.jinja")))?;
    let (default, tool_use) = match file {
        Some(file) => (Some(file), tool_use),
        None => {
            let in_config = || named_template(config, TOOL_USE).map(str::to_owned);
            (template_in_config(config), tool_use.or_else(in_config))
        }
    };
    let Some(default) = default else { return Ok(None) };
    let templates = ChatTemplates::new(&default, tool_use.as_deref(), special_tokens(config));
    Ok(Some(Arc::new(templates.map_err(TokenizerError::ChatTemplate)?)))
}

/// The text of a template's file, if it is there.
fn template_in_file(path: PathBuf) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(source) => Err(TokenizerError::Read { path, source }),
    }
}

/// `chat_template` is a text, or a list of named ones, of which `default` is for conversations without tools.
pub(crate) fn template_in_config(config: &Map<String, Value>) -> Option<String> {
    let text = config.get("chat_template")?.as_str().or_else(|| named_template(config, "default"))?;
    Some(text.to_owned())
}

/// The template of this name, where the configuration has several.
fn named_template<'a>(config: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    let named = config.get("chat_template")?.as_array()?.iter().find(|one| one["name"] == name)?;
    named["template"].as_str()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::artifact::{Message, TOOLS};

    fn golden(name: &str) -> PathBuf {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers")).join(name)
    }

    /// A tokenizer with this `tokenizer.json`.
    fn tokenizer(json: &Value) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap()
    }

    fn special(id: u32, content: &str) -> Value {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    }

    #[test]
    fn padding_and_truncation_left_in_the_file_are_not_heeded() {
        let mut json: Value =
            serde_json::from_slice(&std::fs::read(golden("bytelevel/tokenizer.json")).unwrap()).unwrap();
        let before = tokenizer(&json).encode("Rain fell on the hills all night.").unwrap();
        json["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        json["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<|end_of_text|>"});
        let after = tokenizer(&json);
        assert_eq!(after.encode("Rain fell on the hills all night.").unwrap(), before);
        assert!(before.len() > 2 && before.len() < 64);
    }

    /// With this `dropout` two encodings of the text are alike once in more than a million times.
    #[test]
    fn dropout_left_in_the_file_is_not_heeded() {
        let mut json: Value =
            serde_json::from_slice(&std::fs::read(golden("bytelevel/tokenizer.json")).unwrap()).unwrap();
        let text = "Rain fell on the hills all night. ".repeat(20);
        let before = tokenizer(&json).encode(&text).unwrap();
        json["model"]["dropout"] = json!(0.5);
        let after = tokenizer(&json);
        assert_eq!([after.encode(&text).unwrap(), after.encode(&text).unwrap()], [before.clone(), before]);
    }

    /// The folder of a tokenizer with the vocabulary `metaspace`, and these files beside it.
    fn metaspace(files: &[(&str, Value)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(golden("metaspace/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content.to_string()).unwrap();
        }
        folder
    }

    /// Tokens are those of transformers 5.23.
    #[test]
    fn the_older_map_of_special_tokens_is_read_as_transformers_reads_it() {
        let both = json!({ "bos_token": "<s>", "eos_token": "</s>" });
        let nulls = json!({ "bos_token": null, "eos_token": null });
        let added = json!({ "0": { "content": "<unk>", "special": true } });
        let of_decoder = json!({ "bos_token": "<s>", "eos_token": "</s>", "added_tokens_decoder": added });
        let nulls_of_decoder = json!({ "bos_token": null, "eos_token": null, "added_tokens_decoder": {} });
        for (config, map, expected) in [
            (json!({}), both.clone(), [Some(1), Some(2)]),
            (nulls.clone(), both.clone(), [Some(1), Some(2)]),
            (both.clone(), json!({ "eos_token": { "content": "<unk>", "lstrip": false } }), [Some(1), Some(0)]),
            (both.clone(), nulls, [None, None]),
            (of_decoder, json!({ "eos_token": "<unk>" }), [Some(1), Some(2)]),
            (nulls_of_decoder, both, [None, None]),
            (
                json!({ "eos_token": "</s>", "extra_special_tokens": { "eos_token": "<unk>" } }),
                json!({}),
                [Some(1), Some(0)],
            ),
        ] {
            let folder =
                metaspace(&[("tokenizer_config.json", config.clone()), ("special_tokens_map.json", map.clone())]);
            let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
            assert_eq!([tokenizer.bos_token_id(), tokenizer.eos_token_id()], expected, "{config} {map}");
        }
    }

    #[test]
    fn tokens_that_tokenizer_json_lacks_are_reported_with_their_file() {
        let config = |name: &str, tokens: Value| ("tokenizer_config.json", json!({ name: tokens }));
        let (known, new) = (json!({ "content": "</s>" }), json!({ "content": "<|im_start|>" }));
        for (files, place) in [
            (vec![config(ADDED, json!({ "2": known, "300": new }))], "`added_tokens_decoder`"),
            (vec![config(ADDITIONAL, json!(["</s>", "<|im_start|>"]))], "`additional_special_tokens`"),
            (vec![config(EXTRA, json!([known, new]))], "`extra_special_tokens`"),
            (vec![config(EXTRA, json!({ "image_token": "<|im_start|>" }))], "`extra_special_tokens`"),
            (vec![("special_tokens_map.json", json!({ ADDITIONAL: [new] }))], "`additional_special_tokens`"),
            (vec![("added_tokens.json", json!({ "</s>": 2, "<|im_start|>": 300 }))], "`added_tokens.json`"),
        ] {
            let folder = metaspace(&files);
            let Err(error) = Tokenizer::from_folder(folder.path()) else { panic!("{files:?}") };
            let text = error.to_string();
            assert!(text.starts_with(place) && text.contains("the token `<|im_start|>`"), "{text}");
            let error = StageError::from(error);
            assert_eq!(error.cause, Cause::BadData);
            let help = error.help.unwrap();
            assert!(help.contains("save_pretrained"), "{help}");
            assert_eq!(help.contains("`exclude: [added_tokens.json]`"), place == "`added_tokens.json`", "{help}");
        }
        for files in [
            vec![config(ADDED, json!({ "7": known })), ("added_tokens.json", json!({ "<|im_start|>": 300 }))],
            vec![config(ADDITIONAL, json!(["</s>", ""])), ("added_tokens.json", json!({ "</s>": 300 }))],
            vec![("tokenizer_config.json", json!({ EXTRA: ["</s>"], ADDITIONAL: ["<|im_start|>"] }))],
        ] {
            assert!(Tokenizer::from_folder(metaspace(&files).path()).is_ok(), "{files:?}");
        }
    }

    /// As in published folders of Llama 2, whose `<pad>` has no row in the model.
    #[test]
    fn tokens_that_the_model_has_no_rows_for_are_passed_over() {
        let new = json!({ "content": "<|im_start|>" });
        for declared in [
            ("added_tokens.json", json!({ "<|im_start|>": 300 })),
            ("tokenizer_config.json", json!({ ADDED: { "300": new } })),
        ] {
            for (config, is_fine) in [
                (json!({ "vocab_size": 300 }), true),
                (json!({ "text_config": { "vocab_size": 300 } }), true),
                (json!({ "vocab_size": 301 }), false),
                (json!({}), false),
            ] {
                let folder = metaspace(&[("config.json", config.clone()), declared.clone()]);
                assert_eq!(Tokenizer::from_folder(folder.path()).is_ok(), is_fine, "{declared:?} {config}");
                let copy = metaspace(std::slice::from_ref(&declared));
                let is_older = declared.0 == "added_tokens.json";
                assert_eq!(open_copy(copy.path(), folder.path()).is_ok(), is_fine && is_older, "{declared:?} {config}");
                assert_eq!(copy.path().join(declared.0).exists(), !(is_fine && is_older));
            }
        }
    }

    /// As transformers 5.23 gives them.
    #[test]
    fn templates_have_special_tokens_by_name() {
        let config = json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>"}, "image_token": "<no>", "custom_token": "<custom>",
            "add_bos_token": true, "additional_special_tokens": ["<more>"],
            "extra_special_tokens": {"image_token": "<image>", "audio_token": {"content": "<audio>"}, "eos_token": "<other>"},
        });
        let tokens = special_tokens(config.as_object().unwrap());
        let tokens: Vec<_> = tokens.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        let expected = [
            ("audio_token", "<audio>"),
            ("bos_token", "<s>"),
            ("custom_token", "<custom>"),
            ("eos_token", "<other>"),
            ("image_token", "<image>"),
        ];
        assert_eq!(tokens, expected);
    }

    #[test]
    fn names_of_its_own_are_the_configurations_before_those_of_the_older_map() {
        let folder = metaspace(&[
            (
                "tokenizer_config.json",
                json!({ "custom_token": "<s>", "chat_template": "{{ custom_token }}{{ other_token }}" }),
            ),
            ("special_tokens_map.json", json!({ "custom_token": "</s>", "other_token": "<unk>" })),
        ]);
        assert_eq!(rendered(folder.path()), ["<s><unk>", "<s><unk>"]);
    }

    /// What the tokenizer of a folder makes of a conversation without tools and of one with a tool.
    fn rendered(folder: &Path) -> [String; 2] {
        let tokenizer = Tokenizer::from_folder(folder).unwrap();
        let mut messages = [Message::new("user", "x")];
        let text = |messages: &[Message]| {
            let template = tokenizer.chat_templates().unwrap().of(messages).unwrap();
            template.render(messages, false).unwrap()
        };
        let plain = text(&messages);
        messages[0].other.insert(TOOLS.to_owned(), json!([{ "name": "f" }]));
        [plain, text(&messages)]
    }

    /// Texts are as transformers renders them.
    #[test]
    fn of_named_templates_one_is_for_tools() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(golden("bytelevel/tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        let named = |name: &str, template: &str| json!({ "name": name, "template": template });
        let written = |templates: Value| {
            let config = json!({ "chat_template": templates }).to_string();
            std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
            rendered(folder.path())
        };
        let (default, tool_use) = (named("default", "default"), named("tool_use", "{{ tools[0].name }}"));
        assert_eq!(written(json!([tool_use, default])), ["default", "f"]);
        assert_eq!(written(json!([default, named("rag", "rag")])), ["default", "default"]);
        assert_eq!(written(json!("one")), ["one", "one"]);
        std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
        assert_eq!(written(json!([tool_use, default])), ["file", "file"]);
    }

    /// As transformers 5 saves several templates, and reads them; but it has no default one where `chat_template.jinja`
    /// is missing.
    #[test]
    fn a_folder_has_the_templates_beside_the_default_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::copy(golden("bytelevel/tokenizer.json"), path("tokenizer.json")).unwrap();
        std::fs::create_dir(path("additional_chat_templates")).unwrap();
        let tool_use = path("additional_chat_templates/tool_use.jinja");
        std::fs::write(&tool_use, "{{ tools[0].name }} of the folder").unwrap();
        std::fs::write(path("additional_chat_templates/rag.jinja"), "{% for").unwrap();
        std::fs::write(path("chat_template.jinja"), "file").unwrap();
        assert_eq!(rendered(folder.path()), ["file", "f of the folder"]);
        let named = |name: &str| json!({ "name": name, "template": format!("{name} of the configuration") });
        let config = json!({ "chat_template": [named("default"), named("tool_use")] }).to_string();
        std::fs::write(path("tokenizer_config.json"), config).unwrap();
        assert_eq!(rendered(folder.path()), ["file", "f of the folder"]);
        std::fs::remove_file(path("chat_template.jinja")).unwrap();
        assert_eq!(rendered(folder.path()), ["default of the configuration", "f of the folder"]);
        std::fs::remove_file(tool_use).unwrap();
        assert_eq!(rendered(folder.path()), ["default of the configuration", "tool_use of the configuration"]);
        std::fs::write(path("chat_template.jinja"), "file").unwrap();
        assert_eq!(rendered(folder.path()), ["file", "file"]);
    }

    #[test]
    fn a_text_begins_as_the_file_says_where_no_configuration_does() {
        let json = std::fs::read(golden("metaspace/tokenizer.json")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), &json).unwrap();
        let begins = |config: Option<Value>| {
            let path = folder.path().join("tokenizer_config.json");
            config.into_iter().for_each(|config| std::fs::write(&path, config.to_string()).unwrap());
            let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
            (tokenizer.bos_token_id(), tokenizer.wants_bos())
        };
        assert_eq!(begins(None), (Some(1), true));
        assert_eq!(begins(Some(json!({ "eos_token": "</s>" }))), (Some(1), true));
        assert_eq!(begins(Some(json!({ "bos_token": null }))), (None, false));
        assert_eq!(begins(Some(json!({ "add_bos_token": false }))), (None, false));
        assert_eq!(begins(Some(json!({ "bos_token": "<s>", "add_bos_token": false }))), (Some(1), false));
    }

    #[test]
    fn word_pieces_are_read_and_special_tokens_in_data_are_not() {
        let tokenizer = tokenizer(&json!({
            "version": "1.0", "added_tokens": [special(1, "[SEP]")],
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {"[UNK]": 0, "[SEP]": 1, "rain": 2, "##s": 3, "[": 4, "]": 5, "sep": 6}},
        }));
        assert_eq!(tokenizer.encode("Rains [SEP]").unwrap(), [2, 3, 1]);
        let marked = tokenizer.control_texts().mark("Rains [SEP]").unwrap();
        assert_eq!(tokenizer.encode_marked(&marked).unwrap(), [2, 3, 4, 6, 5]);
        assert_eq!(tokenizer.decode(&[2, 3]).unwrap(), "rains");
    }

    #[test]
    fn a_vocabulary_of_pieces_is_read_and_finds_no_special_token_in_data() {
        let pieces = [
            ("<unk>", 0.0),
            ("</s>", 0.0),
            ("▁rain", -1.0),
            ("<", -5.0),
            ("/", -5.0),
            ("s", -5.0),
            (">", -5.0),
            ("▁", -2.0),
            ("\n", -5.0),
        ];
        let tokenizer = tokenizer(&json!({
            "version": "1.0", "added_tokens": [special(1, "</s>")], "normalizer": null,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "post_processor": null,
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
            "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false},
        }));
        assert_eq!(tokenizer.encode("rain</s>").unwrap(), [2, 1]);
        let marked = tokenizer.control_texts().mark("rain</s>").unwrap();
        let ids = tokenizer.encode_marked(&marked).unwrap();
        assert!(!ids.contains(&1), "{ids:?}");
        assert_eq!(tokenizer.decode(&ids).unwrap().replace(' ', ""), "rain</s>");
    }

    #[test]
    fn hostile_files_are_refused_and_nothing_panics() {
        let golden: Value =
            serde_json::from_slice(&std::fs::read(golden("bytelevel/tokenizer.json")).unwrap()).unwrap();
        let replace = |pattern: &str, content: String| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
        for normalizer in [
            json!({"type": "Sequence", "normalizers": vec![replace("a", "a".repeat(1000)); 5]}),
            replace("", "b".to_owned()),
            json!({"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}),
        ] {
            let mut json = golden.clone();
            json["normalizer"] = normalizer;
            let folder = tempfile::tempdir().unwrap();
            std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
            let begin = std::time::Instant::now();
            let refused = Tokenizer::from_folder(folder.path()).err().map(StageError::from);
            assert_eq!(refused.map(|error| error.cause), Some(Cause::BadData), "{}", json["normalizer"]);
            assert!(begin.elapsed() < std::time::Duration::from_secs(1));
        }
    }

    #[test]
    fn a_folder_without_tokenizer_json_says_how_to_make_one() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.model"), "sentencepiece").unwrap();
        let Err(error) = Tokenizer::from_folder(folder.path()) else { panic!("there is no tokenizer.json") };
        let error = StageError::from(error);
        let help = error.help.clone().unwrap();
        assert!(help.contains("only `tokenizer.model`") && help.contains("save_pretrained"), "{help}");
        assert_eq!(error.cause, Cause::BadData);
    }
}
