//! The vocabulary of a file, from the tokenizer's files beside a checkpoint.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value as Json};

use super::sentencepiece::{PieceKind, pieces};
use super::{GgufError, Value, pre_tokenizer};
use crate::config::Config;

/// What a token is, by its number in files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

/// The key of the default chat template, which those of all others begin with.
pub(super) const TEMPLATE: &str = "tokenizer.chat_template";
/// The name of the default chat template among others.
pub(super) const DEFAULT_TEMPLATE: &str = "default";

/// Scores of tokens that no merge makes, and of ids without a token.
const ADDED_SCORE: f32 = -1000.0;
const UNUSED_SCORE: f32 = -10_000.0;

struct Token {
    text: String,
    kind: TokenKind,
    score: f32,
}

impl Token {
    fn unused(id: usize) -> Self {
        Self { text: format!("[PAD{id}]"), kind: TokenKind::Unused, score: UNUSED_SCORE }
    }
}

/// A token that `tokenizer.json` or `tokenizer_config.json` lists apart from the vocabulary.
struct Added {
    id: usize,
    content: String,
    special: bool,
}

/// The tokenizer's files beside a checkpoint.
pub(super) struct TokenizerFiles {
    tokenizer: Json,
    settings: Json,
    chat_template: Option<String>,
    /// Those of the folder of others, by name.
    more_templates: BTreeMap<String, String>,
    sentencepiece: Option<Vec<u8>>,
}

impl TokenizerFiles {
    /// Reads them.
    pub(super) fn read(folder: &Path) -> Result<Self, GgufError> {
        let json = |name: &str| {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(None);
            }
            let text = fs::read(&path).map_err(GgufError::read(&path))?;
            let json = serde_json::from_slice::<Json>(&text);
            json.map(Some).map_err(|error| GgufError::Tokenizer(format!("`{name}` is not JSON: {error}")))
        };
        let missing = || GgufError::Tokenizer("there is no `tokenizer.json`".to_owned());
        let model = folder.join("tokenizer.model");
        let template = folder.join("chat_template.jinja");
        Ok(Self {
            tokenizer: json("tokenizer.json")?.ok_or_else(missing)?,
            settings: json("tokenizer_config.json")?.unwrap_or_default(),
            chat_template: match template.exists() {
                true => Some(fs::read_to_string(&template).map_err(GgufError::read(&template))?),
                false => None,
            },
            more_templates: templates_of(&folder.join("additional_chat_templates"))?,
            sentencepiece: match model.exists() {
                true => Some(fs::read(&model).map_err(GgufError::read(&model))?),
                false => None,
            },
        })
    }

    /// All of a file's metadata that is about text. `pre` names the pre-tokenizer where the user does.
    pub(super) fn metadata(
        &self,
        config: &Config,
        fields: &Map<String, Json>,
        pre: Option<&str>,
    ) -> Result<Vec<(String, Value)>, GgufError> {
        let model = &self.tokenizer["model"];
        if model["type"].as_str().is_some_and(|kind| kind != "BPE") || !model["vocab"].is_object() {
            return Err(GgufError::Tokenizer(format!("its model is {}, and only BPE is written", model["type"])));
        }
        let is_sentencepiece = model["byte_fallback"] == true;
        let tokens = if is_sentencepiece { self.pieces(config)? } else { self.byte_level(config)? };
        let mut said = Said::default();
        said.add("model", Value::String(if is_sentencepiece { "llama" } else { "gpt2" }.to_owned()));
        let name = match (pre, is_sentencepiece) {
            (Some(name), _) => name,
            (None, true) => "default",
            (None, false) => pre_tokenizer::name(&self.tokenizer)?,
        };
        said.add("pre", Value::String(name.to_owned()));
        said.add("tokens", Value::strings(tokens.iter().map(|token| token.text.clone())));
        said.add("token_type", Value::integers(tokens.iter().map(|token| token.kind as i32)));
        if is_sentencepiece {
            said.add("scores", Value::floats(tokens.iter().map(|token| token.score)));
        } else {
            said.add("merges", Value::strings(self.merges()?));
        }
        self.add_special(&tokens, fields, &mut said);
        self.add_template_flags(&tokens, is_sentencepiece, name, &mut said);
        if let Some(prefix) = self.space_prefix(config, is_sentencepiece) {
            said.add("add_space_prefix", Value::Bool(prefix));
        }
        let mut metadata = said.0;
        metadata.extend(self.chat_templates());
        Ok(metadata)
    }

    /// What llama.cpp does otherwise with the text. `pre` names the pre-tokenizer where the user does.
    pub(super) fn warnings(&self, pre: Option<&str>) -> Vec<String> {
        let mut warnings = Vec::new();
        let found =
            pre_tokenizer::name(&self.tokenizer).ok().filter(|_| self.tokenizer["model"]["byte_fallback"] != true);
        if let (Some(pre), Some(found)) = (pre, found)
            && pre != found
        {
            warnings.push(format!(
                "`tokenizer.json` splits text as `{found}`, and `pre_tokenizer` says `{pre}`: llama.cpp will split it otherwise"
            ));
        }
        let begins = self.template().and_then(|steps| steps.first()?["SpecialToken"]["id"].as_str());
        if let Some(token) = begins.filter(|_| self.settings.is_null()) {
            warnings.push(format!(
                "`tokenizer.json` begins every text with `{token}`, which no `tokenizer_config.json` names as `bos_token`: llama.cpp \
                 will not"
            ));
        }
        let listed = self.tokenizer["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
        let is_set = |token: &&Json| ["lstrip", "rstrip", "single_word"].iter().any(|flag| token[flag] == true);
        let lost: Vec<String> = listed.iter().filter(is_set).map(|token| token["content"].to_string()).collect();
        if let Some(first) = lost.first() {
            let more = if lost.len() > 1 { format!(" and {} others", lost.len() - 1) } else { String::new() };
            warnings.push(format!(
                "llama.cpp finds the added token {first}{more} wherever its text is: `lstrip`, `rstrip` and `single_word` have no \
                 place in a GGUF file"
            ));
        }
        warnings
    }

    fn added(&self) -> Vec<Added> {
        let listed = self.tokenizer["added_tokens"].as_array().map(Vec::as_slice).unwrap_or_default();
        listed.iter().filter_map(|token| Added::of(token, usize::try_from(token["id"].as_u64()?).ok()?)).collect()
    }

    fn added_by_settings(&self) -> Vec<Added> {
        let Some(listed) = self.settings["added_tokens_decoder"].as_object() else { return Vec::new() };
        listed.iter().filter_map(|(id, token)| Added::of(token, id.parse().ok()?)).collect()
    }

    /// The ids of the vocabulary proper.
    fn vocabulary(&self) -> impl Iterator<Item = (&str, usize)> {
        let listed = self.tokenizer["model"]["vocab"].as_object();
        let pairs = listed.into_iter().flatten();
        pairs.filter_map(|(text, id)| Some((text.as_str(), usize::try_from(id.as_u64()?).ok()?)))
    }

    /// A place for every id of the model.
    fn places(config: &Config) -> Vec<Token> {
        (0..config.vocab_size).map(Token::unused).collect()
    }

    fn byte_level(&self, config: &Config) -> Result<Vec<Token>, GgufError> {
        let mut tokens = Self::places(config);
        for (text, id) in self.vocabulary() {
            *place(&mut tokens, id)? = Token { text: text.to_owned(), kind: TokenKind::Normal, score: 0.0 };
        }
        for added in self.added() {
            *place(&mut tokens, added.id)? = added.token();
        }
        Ok(tokens)
    }

    fn pieces(&self, config: &Config) -> Result<Vec<Token>, GgufError> {
        let Some(file) = &self.sentencepiece else { return self.pieces_by_merges(config) };
        let mut tokens = Self::places(config);
        for (id, piece) in pieces(file)?.into_iter().enumerate() {
            let kind = match piece.kind {
                PieceKind::Normal | PieceKind::UserDefined => TokenKind::Normal,
                PieceKind::Unknown => TokenKind::Unknown,
                PieceKind::Control => TokenKind::Control,
                PieceKind::Unused => TokenKind::Unused,
                PieceKind::Byte => TokenKind::Byte,
            };
            *place(&mut tokens, id)? = Token { text: piece.text, kind, score: piece.score };
        }
        let mut added = self.added_by_settings();
        if config.model_type == "phi3" {
            added.extend(self.added());
        } else {
            // Those that were added to the model later are in `tokenizer.json` alone.
            let later = |added: &Added| tokens.get(added.id).is_none_or(|token| token.kind == TokenKind::Unused);
            added.extend(self.added().into_iter().filter(later));
        }
        for added in added {
            *place(&mut tokens, added.id)? = added.token();
        }
        Ok(tokens)
    }

    /// The pieces as `tokenizer.json` has them: those that merges make have ids in the order of these.
    fn pieces_by_merges(&self, config: &Config) -> Result<Vec<Token>, GgufError> {
        let is_byte = |text: &str| text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        let first = self.vocabulary().filter(|(text, _)| is_byte(text)).map(|(_, id)| id + 1).max();
        let first = first.ok_or_else(|| GgufError::Tokenizer("it has no tokens for bytes".to_owned()))?;
        let unknown = self.tokenizer["model"]["unk_token"].as_str();
        let mut tokens = Self::places(config);
        for (text, id) in self.vocabulary() {
            let kind = match text {
                text if Some(text) == unknown => TokenKind::Unknown,
                text if is_byte(text) => TokenKind::Byte,
                _ => TokenKind::Normal,
            };
            let score = -(id.saturating_sub(first) as f32);
            *place(&mut tokens, id)? = Token { text: text.to_owned(), kind, score };
        }
        for added in self.added() {
            let token = place(&mut tokens, added.id)?;
            if token.kind != TokenKind::Unknown {
                *token = added.token();
            }
        }
        Ok(tokens)
    }

    fn merges(&self) -> Result<Vec<String>, GgufError> {
        let unfit = || GgufError::Tokenizer("`merges` are neither texts nor pairs of texts".to_owned());
        let listed = self.tokenizer["model"]["merges"].as_array().ok_or_else(unfit)?;
        let merge = |merge: &Json| match (merge, merge.as_array().map(Vec::as_slice)) {
            (Json::String(text), _) => Some(text.clone()),
            (_, Some([one, other])) => Some(format!("{} {}", one.as_str()?, other.as_str()?)),
            _ => None,
        };
        listed.iter().map(|one| merge(one).ok_or_else(unfit)).collect()
    }

    /// The ids of special tokens: those that `tokenizer_config.json` names, else those of `config.json`.
    fn add_special(&self, tokens: &[Token], fields: &Map<String, Json>, said: &mut Said) {
        for (key, name) in [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")] {
            let named = token_name(&self.settings[format!("{key}_token")]);
            let id = match named.and_then(|name| tokens.iter().position(|token| token.text == name)) {
                Some(id) => Some(id),
                None => fields.get(&format!("{key}_token_id")).and_then(|id| usize::try_from(id.as_u64()?).ok()),
            };
            if let Some(id) = id.filter(|id| *id < tokens.len()) {
                said.add(&format!("{name}_token_id"), Value::U32(id as u32));
            }
        }
        // The converter's own key of the first gemma, which knows the token by its place.
        let end_of_turn = tokens.iter().position(|token| token.text == "<end_of_turn>");
        if let Some(id) = end_of_turn.filter(|_| fields.get("model_type").is_some_and(|kind| kind == "gemma")) {
            said.add("eot_token_id", Value::U32(id as u32));
        }
    }

    /// What is put around a text.
    fn add_template_flags(&self, tokens: &[Token], is_sentencepiece: bool, pre: &str, said: &mut Said) {
        let template = self.template();
        let id_of = |key: &str| token_name(&self.settings[key]);
        let special = |at: Option<&Json>| at.and_then(|step| step["SpecialToken"]["id"].as_str().map(str::to_owned));
        let first = template.and_then(|steps| special(steps.first()));
        let last = template.and_then(|steps| special(steps.last()));
        let said_of = |key: &str| self.settings[key].as_bool();
        let begins = first.is_some() && first == id_of("bos_token").map(str::to_owned);
        let ends = last.is_some() && last == id_of("eos_token").map(str::to_owned);
        // What llama.cpp does unless it is told.
        let is_added_unsaid = is_sentencepiece || ["llama-bpe", "tekken"].contains(&pre);
        let bos = match begins {
            true => Some(true),
            false => said_of("add_bos_token").or(is_added_unsaid.then_some(false)),
        };
        if let Some(bos) = bos.filter(|_| !tokens.is_empty()) {
            said.add("add_bos_token", Value::Bool(bos));
        }
        if template.is_some() {
            said.add("add_sep_token", Value::Bool(false));
        }
        if let Some(eos) = if ends { Some(true) } else { said_of("add_eos_token") } {
            said.add("add_eos_token", Value::Bool(eos));
        }
    }

    /// The steps of the template for a single text.
    fn template(&self) -> Option<&[Json]> {
        let processor = &self.tokenizer["post_processor"];
        let processors = processor["processors"].as_array().map_or(std::slice::from_ref(processor), Vec::as_slice);
        let template = processors.iter().find(|processor| processor["type"] == "TemplateProcessing")?;
        template["single"].as_array().map(Vec::as_slice)
    }

    /// Whether a space is put before a text, where that has to be said.
    fn space_prefix(&self, config: &Config, is_sentencepiece: bool) -> Option<bool> {
        match config.model_type.as_str() {
            "gemma" | "gemma2" => return Some(false),
            "llama" | "mistral" => {}
            _ => return None,
        }
        if let Some(said) = self.settings["add_prefix_space"].as_bool() {
            return Some(said);
        }
        let normalizer = &self.tokenizer["normalizer"];
        let steps = normalizer["normalizers"].as_array().map_or(std::slice::from_ref(normalizer), Vec::as_slice);
        let pre_tokenizer = &self.tokenizer["pre_tokenizer"];
        let is_put = steps.iter().any(|step| step["type"] == "Prepend")
            || pre_tokenizer["type"] == "Metaspace" && pre_tokenizer["prepend_scheme"] != "never";
        (is_sentencepiece && !is_put).then_some(false)
    }

    /// The chat templates under the keys that llama.cpp's converter gives them, in its order. The file of the default
    /// one replaces all those of the settings, and each file of the folder of others the one of its name.
    fn chat_templates(&self) -> Vec<(String, Value)> {
        let of_settings: Vec<(&str, &str)> = match &self.settings["chat_template"] {
            _ if self.chat_template.is_some() => Vec::new(),
            Json::String(template) => vec![(DEFAULT_TEMPLATE, template.as_str())],
            Json::Array(named) => {
                named.iter().filter_map(|one| Some((one["name"].as_str()?, one["template"].as_str()?))).collect()
            }
            _ => Vec::new(),
        };
        let of_file = self.chat_template.as_deref().map(|template| (DEFAULT_TEMPLATE, template));
        let of_folder = self.more_templates.iter().map(|(name, template)| (name.as_str(), template.as_str()));
        let mut default = None;
        let mut others: Vec<(String, &str)> = Vec::new();
        for (name, template) in of_settings.into_iter().chain(of_file).chain(of_folder) {
            let letter = |letter: char| if letter.is_ascii_alphanumeric() { letter } else { '_' };
            let name: String = name.chars().map(letter).collect();
            if name == DEFAULT_TEMPLATE {
                default = Some(template);
            } else if let Some((_, known)) = others.iter_mut().find(|(known, _)| *known == name) {
                *known = template;
            } else if !name.is_empty() {
                others.push((name, template));
            }
        }
        let text = |text: &str| Value::String(text.to_owned());
        let mut written: Vec<(String, Value)> =
            others.iter().map(|(name, template)| (format!("{TEMPLATE}.{name}"), text(template))).collect();
        if !others.is_empty() {
            let names = others.into_iter().map(|(name, _)| name);
            written.push(("tokenizer.chat_templates".to_owned(), Value::strings(names)));
        }
        written.extend(default.map(|template| (TEMPLATE.to_owned(), text(template))));
        written
    }
}

impl Added {
    fn of(token: &Json, id: usize) -> Option<Self> {
        let content = token["content"].as_str()?.to_owned();
        Some(Self { id, content, special: token["special"] == true })
    }

    fn token(&self) -> Token {
        let looks_special = |text: &str| text.starts_with("<|") && text.ends_with("|>");
        let (text, kind) = match self.special || looks_special(&self.content) {
            true => (self.content.clone(), TokenKind::Control),
            false => (self.content.replace('▁', " "), TokenKind::UserDefined),
        };
        Token { text, kind, score: ADDED_SCORE }
    }
}

/// The templates in a folder, `NAME.jinja` each. The default one has its place elsewhere.
fn templates_of(folder: &Path) -> Result<BTreeMap<String, String>, GgufError> {
    let mut templates = BTreeMap::new();
    if !folder.is_dir() {
        return Ok(templates);
    }
    for entry in fs::read_dir(folder).map_err(GgufError::read(folder))? {
        let path = entry.map_err(GgufError::read(folder))?.path();
        let name = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
        if let Some(name) = name.filter(|name| *name != DEFAULT_TEMPLATE && path.is_file()) {
            let text = fs::read_to_string(&path).map_err(GgufError::read(&path))?;
            templates.insert(name.to_owned(), text);
        }
    }
    Ok(templates)
}

/// Keys below `tokenizer.ggml`.
#[derive(Default)]
struct Said(Vec<(String, Value)>);

impl Said {
    fn add(&mut self, key: &str, value: Value) {
        self.0.push((format!("tokenizer.ggml.{key}"), value));
    }
}

fn place(tokens: &mut [Token], id: usize) -> Result<&mut Token, GgufError> {
    let most = tokens.len();
    let message = || GgufError::Tokenizer(format!("it has id {id}, and the model has {most} ids"));
    tokens.get_mut(id).ok_or_else(message)
}

/// A special token in `tokenizer_config.json`: its text, or an object with it.
fn token_name(named: &Json) -> Option<&str> {
    named.as_str().or_else(|| named["content"].as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The templates of a tokenizer with these files, as text.
    fn templates(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        let written = TokenizerFiles::read(folder.path()).unwrap().chat_templates().into_iter();
        let text = |value: Value| match value {
            Value::String(text) => text,
            Value::Array(_, values) => format!("{values:?}"),
            other => panic!("{other:?}"),
        };
        written.map(|(key, value)| format!("{key} = {}", text(value))).collect()
    }

    /// What `add_chat_template` of llama.cpp's gguf-py writes.
    #[test]
    fn chat_templates_have_the_keys_of_the_converter() {
        let settings = |template: Json| json!({"chat_template": template}).to_string();
        let one = settings(json!("in settings"));
        let all = settings(json!([
            {"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"},
            {"name": "rag-2", "template": "c"}, {"name": "", "template": "d"}, {"name": "none"},
        ]));
        let (one, all) = (one.as_str(), all.as_str());
        let tool_use = ("additional_chat_templates/tool_use.jinja", "of tools");
        let default = "tokenizer.chat_template = in file";
        let tools = "tokenizer.chat_template.tool_use = of tools";
        let tools_alone = r#"tokenizer.chat_templates = [String("tool_use")]"#;
        assert_eq!(templates(&[]), [""; 0]);
        assert_eq!(templates(&[("tokenizer_config.json", one)]), ["tokenizer.chat_template = in settings"]);
        assert_eq!(templates(&[("tokenizer_config.json", all), ("chat_template.jinja", "in file")]), [default]);
        let of_list = [
            "tokenizer.chat_template.tool_use = b",
            "tokenizer.chat_template.rag_2 = c",
            r#"tokenizer.chat_templates = [String("tool_use"), String("rag_2")]"#,
            "tokenizer.chat_template = a",
        ];
        assert_eq!(templates(&[("tokenizer_config.json", all)]), of_list);
        let other = [("additional_chat_templates/note.txt", ""), ("additional_chat_templates/default.jinja", "no")];
        let found = templates(&[("chat_template.jinja", "in file"), tool_use, other[0], other[1]]);
        assert_eq!(found, [tools, tools_alone, default]);
        let found = templates(&[("tokenizer_config.json", one), tool_use]);
        assert_eq!(found, [tools, tools_alone, "tokenizer.chat_template = in settings"]);
        let found = templates(&[("tokenizer_config.json", all), tool_use]);
        assert_eq!(found[0], tools);
    }
}
