//! `POST /v1/completions`: texts or token ids as they stand.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use stages::compute::inference::{ChosenToken, Detokenizer, TokenLogprobs};
use stages::data::tokenizer::Tokenizer;

use super::Head;
use super::answer::{Chunks, Completed, Usage};
use super::chat::finite;
use super::error::ApiError;
use super::fields::Fields;
use super::options::{MOST_LOGPROBS, Options};
use crate::inference::{Named, Vocabulary};
use crate::serve::worker::Finish;

/// New tokens where a request does not say.
const MAX_TOKENS: usize = 16;

/// What is asked.
pub(super) struct CompletionRequest {
    pub(super) model: String,
    prompts: Vec<PromptField>,
    pub(super) options: Options,
    pub(super) logprobs: Option<usize>,
    /// Whether the answer begins with the prompt.
    pub(super) echo: bool,
}

/// A prompt as a request has it.
enum PromptField {
    Text(String),
    Ids(Vec<u32>),
}

/// A prompt as the model reads it.
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    /// Its text, where the answer repeats it.
    pub(super) text: String,
    /// How many tokens stand before that text.
    begins: usize,
}

impl CompletionRequest {
    pub(super) fn read(body: &[u8], vocabulary: &Vocabulary) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let model = fields.string("model")?.ok_or_else(|| ApiError::field("model", "`model` is missing"))?;
        let prompt = fields.take("prompt").ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
        let prompts = read_prompts(prompt, vocabulary)?;
        let mut options = Options::read(&mut fields, vocabulary)?;
        let max_tokens = fields.integer("max_tokens", 0..=i64::MAX)?;
        options.max_tokens = Some(max_tokens.map_or(MAX_TOKENS, |most| most as usize));
        let logprobs = fields.integer("logprobs", 0..=MOST_LOGPROBS)?.map(|top| top as usize);
        let echo = fields.boolean("echo")?;
        if echo && options.stream {
            return Err(ApiError::unsupported("echo", "`echo` is not supported together with `stream`"));
        }
        let choices = options.choices as i64;
        fields.only("best_of", |value| value.as_i64() == Some(choices))?;
        fields.only("suffix", |value| value == "")?;
        fields.finish()?;
        Ok(Self { model, prompts, options, logprobs, echo })
    }

    /// The prompts in tokens.
    pub(super) fn prompts(&self, model: &Named, vocabulary: &Vocabulary) -> Result<Vec<Prompt>, ApiError> {
        let prompt = |prompt: &PromptField| {
            let ids = match prompt {
                PromptField::Text(text) => vocabulary.text(model, text).map_err(|error| {
                    ApiError::unprocessable("prompt", format!("the prompt cannot be encoded: {error}"))
                })?,
                PromptField::Ids(ids) => ids.clone(),
            };
            let text = match prompt {
                PromptField::Text(text) => text.clone(),
                PromptField::Ids(ids) if self.echo => {
                    vocabulary.tokenizer.decode_with_special(ids).map_err(|error| {
                        ApiError::unprocessable("prompt", format!("the prompt cannot be decoded: {error}"))
                    })?
                }
                PromptField::Ids(_) => String::new(),
            };
            let begins = match prompt {
                PromptField::Text(_) => usize::from(vocabulary.tokenizer.bos_token_id() == ids.first().copied()),
                PromptField::Ids(_) => 0,
            };
            Ok(Prompt { ids, text, begins })
        };
        self.prompts.iter().map(prompt).collect()
    }
}

fn read_prompts(prompt: Value, vocabulary: &Vocabulary) -> Result<Vec<PromptField>, ApiError> {
    let wrong = |what: &str| ApiError::field("prompt", format!("`prompt` {what}"));
    let items = match prompt {
        Value::String(text) => return Ok(vec![PromptField::Text(text)]),
        Value::Array(items) if !items.is_empty() => items,
        Value::Array(_) => return Err(wrong("is an empty list")),
        _ => return Err(wrong("is neither a string, nor a list of strings, of token ids or of lists of token ids")),
    };
    let ids = |items: &[Value]| {
        let id = |item: &Value| item.as_u64().filter(|id| *id < vocabulary.vocab_size as u64).map(|id| id as u32);
        items.iter().map(id).collect::<Option<Vec<u32>>>()
    };
    if items[0].is_number() {
        let ids = ids(&items).ok_or_else(|| wrong("has an item that is no id of the model's vocabulary"))?;
        return Ok(vec![PromptField::Ids(ids)]);
    }
    let each = items.into_iter().map(|item| match item {
        Value::String(text) => Ok(PromptField::Text(text)),
        Value::Array(items) => ids(&items)
            .map(PromptField::Ids)
            .ok_or_else(|| wrong("has an item that is no id of the model's vocabulary")),
        _ => Err(wrong("is neither a string, nor a list of strings, of token ids or of lists of token ids")),
    });
    each.collect()
}

/// The whole answer.
pub(super) fn answer(
    head: &Head,
    request: &CompletionRequest,
    prompts: &[Prompt],
    completed: &[Completed],
    usage: Usage,
    vocabulary: &Vocabulary,
) -> Value {
    let chosen = |completed: &Completed| {
        let prompt = &prompts[completed.prompt];
        let text = if request.echo { format!("{}{}", prompt.text, completed.text) } else { completed.text.clone() };
        let logprobs = request.logprobs.map(|_| {
            let mut listed = Listed::new(vocabulary);
            if request.echo {
                let found = std::iter::once(None).chain(completed.of_prompt.iter().map(Some));
                let mut offset = Offset { detokenizer: Detokenizer::with_special(), characters: 0 };
                for (at, (id, found)) in prompt.ids.iter().zip(found).enumerate() {
                    listed.push(*id, found, offset.characters);
                    if at >= prompt.begins {
                        offset.advance(*id, &vocabulary.tokenizer);
                    }
                }
            }
            let characters = if request.echo { prompt.text.chars().count() } else { 0 };
            let mut offset = Offset { detokenizer: Detokenizer::behind(&prompt.ids), characters };
            for (id, found) in &completed.tokens {
                listed.push(*id, found.as_ref(), offset.characters);
                offset.advance(*id, &vocabulary.tokenizer);
            }
            // It is no part of the text, but of what was chosen: a client may count on as many as it asked for.
            let stop_token = completed.stop_token.iter();
            stop_token.for_each(|token| listed.push(token.id, token.logprobs.as_ref(), offset.characters));
            listed.json()
        });
        choice(completed.index, &text, logprobs, Some(completed.finish))
    };
    head.whole(OBJECT, completed.iter().map(chosen).collect(), usage)
}

/// What an answer is called, and an event of one.
const OBJECT: &str = "text_completion";

fn choice(index: usize, text: &str, logprobs: Option<Value>, finish: Option<Finish>) -> Value {
    let finish = finish.map(Finish::name);
    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
}

/// Where a token begins in a text, in characters; a part of one begins where that does.
#[derive(Debug, Clone)]
struct Offset {
    detokenizer: Detokenizer,
    characters: usize,
}

impl Offset {
    /// Goes on behind a token. What cannot be decoded is no part of the text.
    fn advance(&mut self, id: u32, tokenizer: &Tokenizer) {
        let added = self.detokenizer.push(id, tokenizer).unwrap_or_default();
        self.characters += added.chars().count();
    }
}

/// A token as this endpoint writes it: as text, or by its bytes where those are a part of a character.
fn written(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| format!("{text}\\x{byte:02x}")),
    }
}

/// Log-probabilities in lists beside each other, as this endpoint has them.
struct Listed<'a> {
    vocabulary: &'a Vocabulary,
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl<'a> Listed<'a> {
    fn new(vocabulary: &'a Vocabulary) -> Self {
        let (tokens, token_logprobs, top_logprobs, text_offset) = Default::default();
        Self { vocabulary, tokens, token_logprobs, top_logprobs, text_offset }
    }

    fn push(&mut self, id: u32, found: Option<&TokenLogprobs>, offset: usize) {
        let text = written(self.vocabulary.token_bytes(id));
        self.top_logprobs.push(found.map(|found| {
            let mut top = Map::new();
            // The likeliest of tokens with the same text is the one that counts.
            for (other, logprob) in &found.top {
                top.entry(written(self.vocabulary.token_bytes(*other))).or_insert_with(|| json!(finite(*logprob)));
            }
            top.entry(text.clone()).or_insert_with(|| json!(finite(found.logprob)));
            top
        }));
        self.token_logprobs.push(found.map(|found| finite(found.logprob)));
        self.text_offset.push(offset);
        self.tokens.push(text);
    }

    fn json(self) -> Value {
        let Self { tokens, token_logprobs, top_logprobs, text_offset, .. } = self;
        json!({
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        })
    }
}

/// The events of completions.
pub(super) struct CompletionChunks {
    pub(super) head: Head,
    pub(super) include_usage: bool,
    pub(super) wants_logprobs: bool,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) offsets: Offsets,
}

/// Where the next token of each choice begins.
pub(super) struct Offsets {
    prompts: Vec<Vec<u32>>,
    /// Choices of each prompt.
    choices: usize,
    of_choices: BTreeMap<usize, Offset>,
}

impl Offsets {
    pub(super) fn new(prompts: Vec<Vec<u32>>, choices: usize) -> Self {
        Self { prompts, choices, of_choices: BTreeMap::new() }
    }

    fn of(&mut self, choice: usize) -> &mut Offset {
        let prompt = &self.prompts[choice / self.choices];
        let begin = || Offset { detokenizer: Detokenizer::behind(prompt), characters: 0 };
        self.of_choices.entry(choice).or_insert_with(begin)
    }
}

impl CompletionChunks {
    /// The lists of one token, which counts on from those before it.
    fn listed(&mut self, index: usize, id: u32, found: Option<&TokenLogprobs>) -> Value {
        let offset = self.offsets.of(index);
        let mut listed = Listed::new(&self.vocabulary);
        listed.push(id, found, offset.characters);
        offset.advance(id, &self.vocabulary.tokenizer);
        listed.json()
    }

    fn chunk(&self, index: usize, text: &str, logprobs: Option<Value>, finish: Option<Finish>) -> Value {
        self.head.chunk(OBJECT, choice(index, text, logprobs, finish), self.include_usage)
    }
}

impl Chunks for CompletionChunks {
    fn first(&self, _: usize) -> Option<Value> {
        None
    }

    fn more(&mut self, index: usize, text: &str, token: Option<(u32, Option<&TokenLogprobs>)>) -> Option<Value> {
        let found = token.filter(|_| self.wants_logprobs);
        if text.is_empty() && found.is_none() {
            return None;
        }
        let logprobs = found.map(|(id, found)| self.listed(index, id, found));
        Some(self.chunk(index, text, logprobs, None))
    }

    fn last(&mut self, index: usize, finish: Finish, stop_token: Option<&ChosenToken>) -> Vec<Value> {
        let stop_token = stop_token.filter(|_| self.wants_logprobs);
        let stop_token = stop_token.map(|token| self.listed(index, token.id, token.logprobs.as_ref()));
        vec![self.chunk(index, "", stop_token, Some(finish))]
    }

    fn usage(&self, usage: Usage) -> Value {
        self.head.whole(OBJECT, Vec::new(), usage)
    }
}
