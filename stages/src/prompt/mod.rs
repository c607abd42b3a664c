//! Prompts: how a row becomes the text a model sees, for training, evaluation and generation alike.
//!
//! A prompt is a list of segments, each encoded apart and learned or not. Everything that feeds a model goes through
//! [`PromptRenderer`], so that a model is asked in the words it was taught in.

mod chat;
mod python;
mod render;
mod template;

pub use chat::{ChatError, ChatTemplate, Turn};
pub use render::{Encoded, Piece, Prompt, PromptError, PromptOptions, PromptRenderer, Question, Segment};
pub use template::{NAMED, Template, TemplateError};
