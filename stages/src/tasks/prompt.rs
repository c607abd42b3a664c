//! How a row and the rows shown before it become the text of a request.

use serde_json::Value;

use super::file::{FieldValue, Task};
use crate::data::artifact::Message;
use crate::data::prompt::ChatTemplate;

/// How prompts are put together, beside what the task says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptOptions<'o> {
    /// As a conversation, by the model's chat template.
    pub apply_chat_template: bool,
    /// Each shown row is a turn of its own; else they are one with the question.
    pub fewshot_as_multiturn: bool,
    pub system_instruction: Option<&'o str>,
}

/// A shown row: what is asked, what its answer begins with, and the answer, if it has one.
pub struct Shot {
    pub question: String,
    pub prefix: Option<String>,
    pub answer: Option<String>,
}

/// What a row is asked with.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    pub description: &'a str,
    pub question: &'a str,
    /// What the response begins with.
    pub prefix: Option<&'a str>,
}

impl Shot {
    /// What is said for an answer; `None` where nothing is.
    fn said(&self) -> Option<String> {
        match (&self.prefix, &self.answer) {
            (Some(prefix), Some(answer)) => Some(joined(prefix, " ", answer)),
            (said, None) | (None, said) => said.clone(),
        }
    }
}

/// Two texts with something between, unless white space is there already or one is empty.
fn joined(first: &str, between: &str, second: &str) -> String {
    let has_space = first.ends_with(char::is_whitespace) || second.starts_with(char::is_whitespace);
    let between = if first.is_empty() || second.is_empty() || has_space { "" } else { between };
    format!("{first}{between}{second}")
}

impl Task {
    /// What comes between a prompt and a choice.
    pub fn delimiter(&self, options: PromptOptions<'_>) -> &str {
        let after_prefix = match &self.gen_prefix {
            Some(FieldValue::Value(Value::String(prefix))) => !prefix.ends_with(char::is_whitespace),
            _ => false,
        };
        if options.apply_chat_template && !after_prefix { "" } else { &self.target_delimiter }
    }

    /// Shots one after the other.
    fn shown(&self, shots: &[Shot]) -> String {
        let mut text = String::new();
        for shot in shots {
            match (&shot.prefix, shot.said()) {
                (None, Some(said)) => text.extend([shot.question.as_str(), &self.target_delimiter, &said]),
                (_, said) => {
                    text.push_str(&joined(&shot.question, &self.target_delimiter, &said.unwrap_or_default()));
                }
            }
            if shot.answer.is_some() {
                text.push_str(&self.fewshot_delimiter);
            }
        }
        text
    }

    /// The context of a question.
    ///
    /// # Errors
    /// Fails where a chat template is to be applied that the tokenizer lacks, or that refuses the conversation.
    pub fn context(
        &self,
        shots: &[Shot],
        asked: Asked<'_>,
        options: PromptOptions<'_>,
        chat_template: Option<&ChatTemplate>,
    ) -> Result<String, String> {
        let Asked { description, question, prefix } = asked;
        let system = joined(options.system_instruction.unwrap_or(""), &self.fewshot_delimiter, description);
        if !options.apply_chat_template {
            let asked = joined(question, &self.target_delimiter, prefix.unwrap_or(""));
            return Ok(format!("{system}{}{asked}", self.shown(shots)));
        }
        let template = chat_template.ok_or("the tokenizer has no chat template to apply")?;
        let mut messages = Vec::new();
        if !system.is_empty() {
            messages.push(Message::new("system", &system));
        }
        if options.fewshot_as_multiturn {
            for shot in shots {
                messages.push(Message::new("user", &shot.question));
                messages.extend(shot.said().map(|said| Message::new("assistant", &said)));
            }
            messages.push(Message::new("user", question));
        } else {
            messages.push(Message::new("user", &format!("{}{question}", self.shown(shots))));
        }
        let Some(prefix) = prefix else {
            return template.render(&messages, true).map_err(|error| error.to_string());
        };
        messages.push(Message::new("assistant", prefix));
        let text = template.render(&messages, false).map_err(|error| error.to_string())?;
        // A template may trim what is said.
        let said = if text.contains(prefix) { prefix } else { prefix.trim() };
        let at = text.rfind(said).ok_or("the chat template leaves out the beginning of the response")?;
        Ok(text[..at + said.len()].to_owned())
    }
}
