//! What chats and completions have in common: how tokens are chosen, where a completion ends, how it is sent.

use std::hash::{BuildHasher, RandomState};

use serde_json::Value;
use stages::compute::inference::{Adjustments, QueuedRequest, Sampling, StopStrings};

use super::error::ApiError;
use super::fields::Fields;
use crate::inference::Vocabulary;

/// Most completions of one prompt.
const MOST_CHOICES: i64 = 128;

/// Most stop strings.
const MOST_STOPS: usize = 16;

/// Most likely tokens beside each.
pub(super) const MOST_LOGPROBS: i64 = 20;

/// Most that a logit may be changed by.
const MOST_BIAS: f64 = 100.0;

/// How a request wants its prompts completed.
pub(super) struct Options {
    /// Completions of each prompt.
    pub(super) choices: usize,
    sampling: Sampling,
    adjustments: Adjustments,
    stops: Vec<String>,
    pub(super) max_tokens: Option<usize>,
    /// Whether the answer comes as events.
    pub(super) stream: bool,
    pub(super) include_usage: bool,
}

impl Options {
    /// Reads them. Where neither a temperature nor a seed is given, they are OpenAI's: 1, and another one each time.
    pub(super) fn read(fields: &mut Fields, vocabulary: &Vocabulary) -> Result<Self, ApiError> {
        let stream = fields.boolean("stream")?;
        let include_usage = include_usage(fields, stream)?;
        let choices = fields.integer("n", 1..=MOST_CHOICES)?.unwrap_or(1) as usize;
        let top_p = fields.number("top_p", 0.0..=1.0)?;
        if top_p == Some(0.0) {
            return Err(ApiError::field("top_p", "`top_p` is 0, and no token would be left"));
        }
        let repetition_penalty = fields.number("repetition_penalty", f64::MIN_POSITIVE..=f64::from(f32::MAX))?;
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0),
            // -1 and 0 mean all of them, as elsewhere.
            top_k: fields.integer("top_k", -1..=i64::MAX)?.filter(|top_k| *top_k > 0).map(|top_k| top_k as usize),
            top_p,
            min_p: fields.number("min_p", 0.0..=1.0)?,
            repetition_penalty,
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map_or_else(another_seed, |seed| seed as u64),
        };
        let adjustments = Adjustments {
            logit_bias: logit_bias(fields, vocabulary)?,
            presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
            frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0) as f32,
        };
        let stops = stops(fields)?;
        // An identifier of whoever asks, by which no token is chosen.
        fields.string("user")?;
        for name in ["store", "ignore_eos"] {
            fields.only(name, |value| value == false)?;
        }
        fields.only("service_tier", |value| value == "auto" || value == "default")?;
        Ok(Self { choices, sampling, adjustments, stops, max_tokens: None, stream, include_usage })
    }

    /// The request of a choice of a prompt. Draws are where `generate` has them: by the prompt's number and the
    /// sample's.
    pub(super) fn request(&self, plain: QueuedRequest, prompt: usize, choice: usize) -> QueuedRequest {
        QueuedRequest {
            row: prompt as u64 | (choice as u64) << 48,
            max_new_tokens: self.max_tokens.unwrap_or(usize::MAX).min(plain.max_new_tokens),
            sampling: self.sampling,
            adjustments: self.adjustments.clone(),
            ..plain
        }
    }

    /// The same, where completions end before a text of the model's own, too.
    pub(super) fn ending_at(mut self, text: Option<&str>) -> Self {
        self.stops.extend(text.map(str::to_owned));
        self
    }

    /// The same, where a grammar alone ends completions: a text that would end others may be a part of what it writes.
    pub(super) fn ending_by_grammar(mut self) -> Self {
        self.stops.clear();
        self
    }

    pub(super) fn stop_strings(&self) -> StopStrings {
        StopStrings::new(&self.stops)
    }

    /// Special tokens among the stop strings, which no decoded text holds, as tokens.
    pub(super) fn stop_tokens<'a>(&'a self, vocabulary: &'a Vocabulary) -> impl Iterator<Item = u32> + 'a {
        let ids = self.stops.iter().filter_map(|text| vocabulary.tokenizer.token_id(text));
        ids.filter(|id| vocabulary.tokenizer.is_special(*id))
    }
}

fn another_seed() -> u64 {
    RandomState::new().hash_one(0)
}

fn include_usage(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    const NAME: &str = "stream_options";
    let Some(options) = fields.take(NAME) else { return Ok(false) };
    let Value::Object(mut options) = options else {
        return Err(ApiError::field(NAME, format!("`{NAME}` is not an object")));
    };
    if !stream {
        return Err(ApiError::field(NAME, format!("`{NAME}` goes with `stream: true`")));
    }
    let mut boolean = |name: &str| match options.remove(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(value)) => Ok(value),
        Some(_) => Err(ApiError::field(NAME, format!("`{NAME}.{name}` is not a boolean"))),
    };
    let include = boolean("include_usage")?;
    // OpenAI's servers pad events by it, so that their lengths do not tell what is in them; clients read no padding.
    boolean("include_obfuscation")?;
    match options.keys().next() {
        Some(name) => {
            let name = format!("{NAME}.{name}");
            let message = format!("`{name}` is not supported by this server");
            Err(ApiError::unsupported(name, message))
        }
        None => Ok(include),
    }
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let wrong = |what: &str| ApiError::field("stop", format!("`stop` {what}"));
    let stops = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => {
            let texts = stops.into_iter().map(|stop| match stop {
                Value::String(stop) => Ok(stop),
                _ => Err(wrong("has an item that is not a string")),
            });
            texts.collect::<Result<_, _>>()?
        }
        Some(_) => return Err(wrong("is neither a string nor a list of strings")),
    };
    if stops.len() > MOST_STOPS {
        return Err(wrong(&format!("has more than {MOST_STOPS} strings")));
    }
    match stops.iter().any(String::is_empty) {
        true => Err(wrong("has an empty string, which would end every completion at once")),
        false => Ok(stops),
    }
}

fn logit_bias(fields: &mut Fields, vocabulary: &Vocabulary) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    let Some(biases) = fields.take(NAME) else { return Ok(Vec::new()) };
    let Value::Object(biases) = biases else {
        return Err(ApiError::field(NAME, format!("`{NAME}` is not an object of token ids and numbers")));
    };
    let bias = |(token, bias): (String, Value)| {
        let id = token.parse::<u32>().ok().filter(|id| (*id as usize) < vocabulary.vocab_size);
        let id = id.ok_or_else(|| ApiError::field(NAME, format!("`{NAME}` has `{token}`, which is no token's id")))?;
        let number = bias.as_f64().filter(|bias| bias.abs() <= MOST_BIAS);
        let number = number.ok_or_else(|| {
            ApiError::field(
                NAME,
                format!("`{NAME}` has {bias} for token {id}, and a number from -100 to 100 is expected"),
            )
        })?;
        Ok((id, number as f32))
    };
    biases.into_iter().map(bias).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn options_of_a_stream_are_read_and_others_named() {
        let read = |options: Value, stream: bool| {
            let body = json!({ "stream_options": options }).to_string();
            let read = include_usage(&mut Fields::of(body.as_bytes()).ok().unwrap(), stream);
            read.map_err(|error| error.json()["error"]["message"].as_str().unwrap().to_owned())
        };
        assert_eq!(read(json!({ "include_usage": true, "include_obfuscation": false }), true), Ok(true));
        assert_eq!(read(json!({ "include_obfuscation": true }), true), Ok(false));
        for (options, stream, expected) in [
            (json!({ "include_obfuscation": "no" }), true, "`stream_options.include_obfuscation` is not a boolean"),
            (json!({ "include": true }), true, "`stream_options.include` is not supported by this server"),
            (json!({ "include_obfuscation": false }), false, "`stream_options` goes with `stream: true`"),
        ] {
            assert_eq!(read(options, stream), Err(expected.to_owned()));
        }
    }
}
