//! What the loss of a conversation or a prompt is taken over.

use engine::parameter::Parameters;
use serde::{Deserialize, Serialize};

/// What the loss is taken over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Parameters)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// The response, or every assistant's turn of a conversation. An assistant's message with `weight: 0` is not
    /// trained, as in OpenAI's format.
    #[default]
    Assistant,
    /// Every token, including the prompt.
    All,
    /// Only the last assistant's turn of a conversation, or the response.
    Last,
    /// The assistant's turns of the judged responses, not those of the prompt: for preference rows, and their default.
    Response,
}
