//! Prompts: how a row becomes the text a model sees, for training, evaluation and generation alike.
//!
//! A prompt is a list of segments, learned or not, and no token lies in two of them. Everything that feeds a model goes
//! through [`Prompter`] and [`PromptRenderer`] under one [`PromptParams`], so that inference uses the prompts of
//! training.

mod chat;
mod chat_templates;
mod control;
mod frame;
mod named;
mod params;
mod preference;
pub(crate) mod python;
mod render;
mod spelling;
mod strftime;
mod template;
mod tool_calls;
mod train_on;

pub use chat::{ChatError, ChatTemplate, Turn};
pub use chat_templates::ChatTemplates;
pub use control::{ControlTexts, PLAIN_BEGIN, PLAIN_END, is_marked, without_marks};
pub use named::NamedTemplate;
pub use params::{ChatTemplateChoice, PROMPT, PromptParams, UnknownTemplate};
pub use preference::{Responded, ResponseBorder};
pub use render::{
    Encoded, Piece, Prompt, PromptError, PromptRenderer, Prompter, Question, Segment, StopTexts, behind_reasoning,
};
pub use template::{NAMED, Template, TemplateError};
pub use tool_calls::{Calls, SaidWithCalls, Tool, ToolCall, ToolForm};
pub use train_on::TrainOn;

#[cfg(test)]
mod golden;
