//! Instruction templates: text with `{placeholders}` that columns fill.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A template that is no text with placeholders.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// A brace without its partner.
    #[error("`{0}` has a brace without its partner; write `{{{{` or `}}}}` for a brace itself")]
    Brace(String),
    /// `{}`.
    #[error("`{0}` has a placeholder without a name")]
    Nameless(String),
    #[error("`{0}` has no placeholder such as {{input}}")]
    NoPlaceholder(String),
}

/// How columns become a prompt. It is stored with the rows, so that every later stage asks in the same words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Template {
    /// Its name, or `custom`.
    pub name: String,
    pub text: String,
    /// The text that takes its place where a column is empty.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub without: Option<Without>,
    /// What follows the response and is learned with it, in place of the end-of-text token.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub response_end: Option<String>,
}

/// What a template says where a column is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Without {
    /// The column's placeholder.
    pub placeholder: String,
    /// The text without it.
    pub text: String,
}

/// The names that `template:` knows, and their texts, byte for byte those of torchtune.
pub const NAMED: &[(&str, &str)] = &[
    ("none", "{input}"),
    ("summarize", "Summarize this dialogue:\n{dialogue}\n---\nSummary:\n"),
    ("alpaca", ALPACA),
    ("grammar", "Correct this to standard English: {sentence}\n---\nCorrected: "),
    ("question_answer", "Question: {question}\n\nAnswer: "),
    ("chatml", "<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n"),
];

const ALPACA: &str = "Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n\
### Response:\n";

const ALPACA_WITHOUT_INPUT: &str = "Below is an instruction that describes a task. Write a response that appropriately \
completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n";

impl Template {
    /// The template of a name.
    pub fn named(name: &str) -> Option<Self> {
        let (name, text) = NAMED.iter().find(|(known, _)| *known == name)?;
        let without = (*name == "alpaca")
            .then(|| Without { placeholder: "input".to_owned(), text: ALPACA_WITHOUT_INPUT.to_owned() });
        let response_end = (*name == "chatml").then(|| "<|im_end|>\n".to_owned());
        Some(Self { name: (*name).to_owned(), text: (*text).to_owned(), without, response_end })
    }

    /// A template of the user's own.
    ///
    /// # Errors
    /// Fails where braces do not pair or there is no placeholder.
    pub fn custom(text: &str) -> Result<Self, TemplateError> {
        let pieces = parse(text)?;
        if !pieces.iter().any(|piece| matches!(piece, Piece::Placeholder(_))) {
            return Err(TemplateError::NoPlaceholder(text.to_owned()));
        }
        Ok(Self { name: "custom".to_owned(), text: text.to_owned(), without: None, response_end: None })
    }

    /// The placeholders that a row must fill, in order of their first use.
    pub fn required(&self) -> Vec<String> {
        let mut names = self.placeholders();
        names.retain(|name| Some(name) != self.without.as_ref().map(|without| &without.placeholder));
        names
    }

    /// All placeholders, in order of their first use.
    pub fn placeholders(&self) -> Vec<String> {
        let mut names = Vec::new();
        for piece in parse(&self.text).unwrap_or_default() {
            if let Piece::Placeholder(name) = piece
                && !names.contains(&name)
            {
                names.push(name);
            }
        }
        names
    }

    /// The prompt of a row; a column that the row lacks counts as empty.
    pub fn render(&self, columns: &BTreeMap<String, String>) -> String {
        self.render_with_data(columns).0
    }

    /// [`Template::render`], with where in it columns stand, in order.
    pub(super) fn render_with_data(&self, columns: &BTreeMap<String, String>) -> (String, Vec<Range<usize>>) {
        let column = |name: &str| columns.get(name).map_or("", String::as_str);
        let text = match &self.without {
            Some(without) if column(&without.placeholder).is_empty() => &without.text,
            _ => &self.text,
        };
        let (mut prompt, mut data) = (String::new(), Vec::new());
        for piece in parse(text).unwrap_or_default() {
            match piece {
                Piece::Literal(text) => prompt.push_str(&text),
                Piece::Placeholder(name) => {
                    let begin = prompt.len();
                    prompt.push_str(column(&name));
                    data.push(begin..prompt.len());
                }
            }
        }
        (prompt, data)
    }
}

/// A stretch of a template.
enum Piece {
    Literal(String),
    Placeholder(String),
}

/// Splits a text as Python's `str.format` does: `{name}`, and doubled braces for a brace itself.
fn parse(text: &str) -> Result<Vec<Piece>, TemplateError> {
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '{' | '}' if letters.peek() == Some(&letter) => {
                letters.next();
                literal.push(letter);
            }
            '{' => {
                pieces.push(Piece::Literal(std::mem::take(&mut literal)));
                pieces.push(Piece::Placeholder(placeholder(text, &mut letters)?));
            }
            '}' => return Err(TemplateError::Brace(text.to_owned())),
            _ => literal.push(letter),
        }
    }
    pieces.push(Piece::Literal(literal));
    Ok(pieces)
}

fn placeholder(text: &str, letters: &mut impl Iterator<Item = char>) -> Result<String, TemplateError> {
    let mut name = String::new();
    for letter in letters {
        match letter {
            '}' if name.trim().is_empty() => return Err(TemplateError::Nameless(text.to_owned())),
            '}' => return Ok(name.trim().to_owned()),
            '{' => break,
            _ => name.push(letter),
        }
    }
    Err(TemplateError::Brace(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn alpaca_has_another_text_for_rows_without_input() {
        let alpaca = Template::named("alpaca").unwrap();
        let with = alpaca.render(&columns(&[("instruction", "Add."), ("input", "1 2")]));
        assert!(with.contains("paired with an input") && with.ends_with("### Input:\n1 2\n\n### Response:\n"));
        let without = alpaca.render(&columns(&[("instruction", "Add."), ("input", "")]));
        assert!(without.ends_with("completes the request.\n\n### Instruction:\nAdd.\n\n### Response:\n"));
        assert_eq!(alpaca.required(), ["instruction"]);
        assert_eq!(alpaca.placeholders(), ["instruction", "input"]);
    }

    #[test]
    fn braces_in_a_column_are_no_placeholders() {
        let template = Template::custom("{{json}} {a}: {a}").unwrap();
        assert_eq!(template.render(&columns(&[("a", "{b}")])), "{json} {b}: {b}");
        assert_eq!(template.placeholders(), ["a"]);
    }

    #[test]
    fn broken_templates_are_refused() {
        assert!(matches!(Template::custom("{a"), Err(TemplateError::Brace(_))));
        assert!(matches!(Template::custom("a}"), Err(TemplateError::Brace(_))));
        assert!(matches!(Template::custom("{}"), Err(TemplateError::Nameless(_))));
        assert!(matches!(Template::custom("plain"), Err(TemplateError::NoPlaceholder(_))));
    }
}
