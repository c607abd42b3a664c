//! Prompts with responses that are judged, as documents: what of them is learned, and where a prompt ends.

use engine::parameter::Parameters;
use serde::{Deserialize, Serialize};

use super::render::{Encoded, Prompt, PromptError, PromptRenderer};
use super::train_on::TrainOn;
use crate::data::artifact::{IGNORE_INDEX, Judged, Message, Role, Said};
use crate::data::tokenizer::Tokenizer;

/// Where in its ids a prompt ends and a response begins.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Parameters)]
#[serde(rename_all = "snake_case")]
pub enum ResponseBorder {
    /// Prompt and response are encoded separately, as for fine-tuning: training sees the tokens of generation.
    #[default]
    Segments,
    /// Prompt and response are encoded as one text, and the prompt is the common prefix of its ids and both texts, as
    /// in TRL: a token that crosses the border belongs to the responses, and every turn of a response is trained.
    Joint,
}

/// A response after its prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Responded {
    /// Whether it is the better or the worse one.
    pub role: Role,
    /// Its ids, of which the response's are learned.
    pub encoded: Encoded,
    /// Whether the data had control tokens written out that are read as plain text.
    pub sanitized: bool,
}

impl PromptRenderer {
    /// The responses of a row, each after the prompt.
    ///
    /// # Errors
    /// Fails where the chat template is missing or refuses a conversation, or prompt and response are not both text or
    /// both turns.
    pub fn responses(
        &self,
        row: &Judged,
        border: ResponseBorder,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Responded>, PromptError> {
        let sides = [(Role::Chosen, &row.chosen), (Role::Rejected, &row.rejected)];
        let sides: Vec<(Role, &Said)> =
            sides.into_iter().filter_map(|(role, said)| Some((role, said.as_ref()?))).collect();
        match border {
            ResponseBorder::Segments => {
                let of_side = |(role, response): (Role, &Said)| {
                    let prompt = self.responded(&row.prompt, response, tokenizer)?;
                    Ok(Responded { role, sanitized: prompt.is_sanitized(), encoded: prompt.encode(tokenizer)? })
                };
                sides.into_iter().map(of_side).collect()
            }
            ResponseBorder::Joint => self.joint(&row.prompt, &sides, tokenizer),
        }
    }

    /// A prompt with a response, in segments.
    pub(super) fn responded(
        &self,
        prompt: &Said,
        response: &Said,
        tokenizer: &Tokenizer,
    ) -> Result<Prompt, PromptError> {
        match (prompt, response) {
            (Said::Text(prompt), Said::Text(response)) => {
                let mut lesson = self.prompter.asked_text(prompt, tokenizer);
                lesson.text(self.prompter.data(response, tokenizer, true), true);
                lesson.id(self.prompter.eos(tokenizer), true);
                Ok(lesson)
            }
            (Said::Turns(prompt), Said::Turns(response)) => {
                let whole: Vec<Message> = prompt.iter().chain(response).cloned().collect();
                let messages = self.prompter.messages(&whole, tokenizer)?;
                let first = messages.len() - response.len();
                let template = self.prompter.chat_template(&messages)?;
                let turns = match self.train_on {
                    TrainOn::Response => template.turns_from(&messages, first)?,
                    train_on => template.turns(&messages, train_on)?,
                };
                let mut lesson = Prompt::default();
                turns.into_iter().for_each(|turn| lesson.text(turn.text, turn.learn));
                Ok(lesson)
            }
            _ => Err(PromptError::OtherShape),
        }
    }

    fn joint(
        &self,
        prompt: &Said,
        sides: &[(Role, &Said)],
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Responded>, PromptError> {
        let alone = self.joined(prompt, None, tokenizer)?;
        let prompt_ids = alone.encode(tokenizer)?.input_ids;
        let wholes = sides.iter().map(|(role, response)| {
            let whole = self.joined(prompt, Some(response), tokenizer)?;
            Ok((*role, whole.is_sanitized(), whole.encode(tokenizer)?.input_ids))
        });
        let wholes = wholes.collect::<Result<Vec<_>, PromptError>>()?;
        let common = |ids: &Vec<u32>| ids.iter().zip(&prompt_ids).take_while(|(one, other)| one == other).count();
        let border = wholes.iter().map(|(.., ids)| common(ids)).min().unwrap_or(0);
        let of_whole = |(role, sanitized, input_ids): (Role, bool, Vec<u32>)| {
            let label = |(place, id): (usize, &u32)| if place < border { IGNORE_INDEX } else { *id as i32 };
            let labels = input_ids.iter().enumerate().map(label).collect();
            Responded { role, sanitized, encoded: Encoded { input_ids, labels, weights: Vec::new() } }
        };
        Ok(wholes.into_iter().map(of_whole).collect())
    }

    /// A prompt with a response, or without, as one text.
    fn joined(&self, prompt: &Said, response: Option<&Said>, tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        let prompter = &self.prompter;
        match (prompt, response) {
            (Said::Text(prompt), None) => {
                let mut lesson = Prompt::default();
                lesson.id(prompter.bos(tokenizer), false);
                let text = prompter.data(prompt, tokenizer, true);
                if !text.is_empty() {
                    lesson.text(text, false);
                }
                Ok(lesson)
            }
            (Said::Text(prompt), Some(Said::Text(response))) => {
                let mut text = prompter.data(prompt, tokenizer, true) + &prompter.data(response, tokenizer, true);
                if prompter.eos(tokenizer).is_some() {
                    let eos = tokenizer.special_tokens().remove("eos_token").unwrap_or_default();
                    text += if text.ends_with(&eos) { "" } else { &eos };
                }
                let mut lesson = Prompt::default();
                lesson.id(prompter.bos(tokenizer), false);
                lesson.text(text, false);
                Ok(lesson)
            }
            (Said::Turns(prompt), None) => {
                let messages = prompter.messages(prompt, tokenizer)?;
                let mut lesson = Prompt::default();
                lesson.text(prompter.chat_template(&messages)?.render(&messages, true)?, false);
                Ok(lesson)
            }
            (Said::Turns(prompt), Some(Said::Turns(response))) => {
                let whole: Vec<Message> = prompt.iter().chain(response).cloned().collect();
                let messages = prompter.messages(&whole, tokenizer)?;
                let mut lesson = Prompt::default();
                lesson.text(prompter.chat_template(&messages)?.render(&messages, false)?, false);
                Ok(lesson)
            }
            _ => Err(PromptError::OtherShape),
        }
    }
}
