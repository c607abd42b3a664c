//! From a row to a prompt, and from a prompt to ids and labels.

use engine::error::{Cause, StageError};

use super::chat::ChatError;
use super::template::Template;
use crate::artifact::{IGNORE_INDEX, Message, Row, RowsFacts, Shape};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Why a row does not become a prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The rows' facts name no template.
    #[error("the rows do not say which template makes a prompt of them")]
    NoTemplate,
    /// Conversations need a chat template.
    #[error("the rows are conversations, and the tokenizer has no chat template")]
    NoChatTemplate,
    /// The row is of another shape than its facts say.
    #[error("a row is not what the facts about the rows say")]
    OtherShape,
    /// The chat template fails over a conversation.
    #[error("a conversation cannot be rendered")]
    Chat(#[from] ChatError),
    /// The tokenizer fails.
    #[error("a prompt cannot be encoded")]
    Tokenizer(#[from] TokenizerError),
}

impl From<PromptError> for StageError {
    fn from(error: PromptError) -> Self {
        StageError::new(Cause::BadData, "a row cannot be turned into a prompt").with_source(error)
    }
}

/// What a segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text, encoded apart from its neighbours.
    Text(String),
    /// Ids that no text stands for, such as the beginning of a text.
    Ids(Vec<u32>),
}

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// What it holds.
    pub piece: Piece,
    /// Whether the loss is taken over it.
    pub learn: bool,
}

/// What a model is shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    /// Its parts, in order.
    pub segments: Vec<Segment>,
}

/// A prompt as ids, and what each position is to be predicted as.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// Labels, not shifted; [`IGNORE_INDEX`] where nothing is learned.
    pub labels: Vec<i32>,
}

/// A prompt without its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// What the model is asked.
    pub prompt: Prompt,
    /// What the data gives as the answer, if it gives one.
    pub reference: Option<String>,
}

impl Prompt {
    fn text(&mut self, text: impl Into<String>, learn: bool) {
        self.segments.push(Segment { piece: Piece::Text(text.into()), learn });
    }

    fn id(&mut self, id: Option<u32>, learn: bool) {
        if let Some(id) = id {
            self.segments.push(Segment { piece: Piece::Ids(vec![id]), learn });
        }
    }

    /// A text as it stands, after the beginning-of-text token where the tokenizer wants one.
    pub fn plain(text: &str, tokenizer: &Tokenizer) -> Self {
        let mut prompt = Self::default();
        prompt.id(tokenizer.bos_token_id().filter(|_| tokenizer.wants_bos()), false);
        prompt.text(text, false);
        prompt
    }

    /// What a user says, in the words of the tokenizer's chat template, up to the assistant's answer.
    ///
    /// # Errors
    /// Fails where there is no chat template or it refuses.
    pub fn user_turn(text: &str, tokenizer: &Tokenizer) -> Result<Self, PromptError> {
        conversation(&[Message::new("user", text)], tokenizer)
    }

    /// Encodes each segment apart.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Encoded, PromptError> {
        let mut encoded = Encoded::default();
        for segment in &self.segments {
            let ids = match &segment.piece {
                Piece::Text(text) => tokenizer.encode(text)?,
                Piece::Ids(ids) => ids.clone(),
            };
            encoded.labels.extend(ids.iter().map(|id| if segment.learn { *id as i32 } else { IGNORE_INDEX }));
            encoded.input_ids.extend(ids);
        }
        Ok(encoded)
    }

    /// The text of the segments, for people.
    pub fn to_text(&self, tokenizer: &Tokenizer) -> Result<String, PromptError> {
        let mut text = String::new();
        for segment in &self.segments {
            match &segment.piece {
                Piece::Text(piece) => text.push_str(piece),
                Piece::Ids(ids) => text.push_str(&tokenizer.decode_with_special(ids)?),
            }
        }
        Ok(text)
    }
}

/// What is added to a row's own text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PromptOptions {
    /// Whether a row begins with the beginning-of-text token; as the tokenizer says where this is absent.
    pub add_bos: Option<bool>,
    /// Whether it ends with the end-of-text token, which is learned; by default where there is one.
    pub add_eos: Option<bool>,
    /// Whether the loss is taken over the prompt too.
    pub train_on_input: bool,
}

/// Turns rows into prompts, in the one way that their facts describe.
#[derive(Debug, Clone)]
pub struct PromptRenderer {
    shape: Shape,
    template: Option<Template>,
    response: String,
    options: PromptOptions,
}

impl PromptRenderer {
    /// A renderer for rows with these facts.
    ///
    /// # Errors
    /// Fails where they name no template and need one.
    pub fn from_rows_facts(facts: &RowsFacts, options: PromptOptions) -> Result<Self, PromptError> {
        if facts.shape == Shape::Prompt && facts.template.is_none() {
            return Err(PromptError::NoTemplate);
        }
        let response = facts.response.clone().unwrap_or_default();
        Ok(Self { shape: facts.shape, template: facts.template.clone(), response, options })
    }

    /// What a row teaches: prompt and response with their ends, a conversation, or a whole text.
    ///
    /// Prompts and texts begin with the beginning-of-text token and end with the end-of-text token. Conversations take
    /// both from the chat template.
    ///
    /// # Errors
    /// Fails where the chat template is missing or refuses the conversation.
    pub fn lesson(&self, row: &Row, tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        let learn_prompt = self.options.train_on_input;
        let mut prompt = Prompt::default();
        match (self.shape, row) {
            (Shape::Prompt, Row::Columns(columns)) => {
                prompt.id(self.bos(tokenizer), learn_prompt);
                prompt.text(self.template()?.render(columns), learn_prompt);
                prompt.text(columns.get(&self.response).cloned().unwrap_or_default(), true);
                prompt.id(self.eos(tokenizer), true);
            }
            (Shape::Text, Row::Text(text)) => {
                prompt.id(self.bos(tokenizer), true);
                prompt.text(text.clone(), true);
                prompt.id(self.eos(tokenizer), true);
            }
            (Shape::Messages, Row::Messages(messages)) => {
                let template = tokenizer.chat_template().ok_or(PromptError::NoChatTemplate)?;
                for turn in template.turns(messages)? {
                    prompt.text(turn.text, turn.learn || learn_prompt);
                }
            }
            _ => return Err(PromptError::OtherShape),
        }
        Ok(prompt)
    }

    /// What a row asks: its prompt without the answer, and the answer the data gives. The last assistant's turn of a
    /// conversation is its answer; a plain text is a prompt as it stands.
    ///
    /// # Errors
    /// As for [`PromptRenderer::lesson`].
    pub fn question(&self, row: &Row, tokenizer: &Tokenizer) -> Result<Question, PromptError> {
        let mut prompt = Prompt::default();
        let reference = match (self.shape, row) {
            (Shape::Prompt, Row::Columns(columns)) => {
                prompt.id(self.bos(tokenizer), false);
                prompt.text(self.template()?.render(columns), false);
                columns.get(&self.response).cloned()
            }
            (Shape::Text, Row::Text(text)) => {
                prompt.id(self.bos(tokenizer), false);
                prompt.text(text.clone(), false);
                None
            }
            (Shape::Messages, Row::Messages(messages)) => {
                let answer = messages.iter().rposition(|message| message.role == "assistant");
                prompt = conversation(&messages[..answer.unwrap_or(messages.len())], tokenizer)?;
                answer.and_then(|index| messages[index].content.as_str().map(|text| text.trim().to_owned()))
            }
            _ => return Err(PromptError::OtherShape),
        };
        Ok(Question { prompt, reference })
    }

    fn template(&self) -> Result<&Template, PromptError> {
        self.template.as_ref().ok_or(PromptError::NoTemplate)
    }

    fn bos(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let wanted = self.options.add_bos.unwrap_or(tokenizer.wants_bos());
        tokenizer.bos_token_id().filter(|_| wanted)
    }

    fn eos(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.eos_token_id().filter(|_| self.options.add_eos.unwrap_or(true))
    }
}

/// A conversation up to the assistant's answer.
fn conversation(messages: &[Message], tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
    let template = tokenizer.chat_template().ok_or(PromptError::NoChatTemplate)?;
    let mut prompt = Prompt::default();
    prompt.text(template.render(messages, true)?, false);
    Ok(prompt)
}
