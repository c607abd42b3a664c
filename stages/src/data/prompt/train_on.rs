//! What the loss of a conversation or a prompt is taken over.

use engine::parameter::Parameters;
use serde::{Deserialize, Serialize};

/// What the loss is taken over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, Parameters)]
#[serde(rename_all = "snake_case")]
pub enum TrainOn {
    /// What the model is to say: a response, or every assistant's turn of a conversation. An assistant's message with
    /// `weight: 0` is left out, as in OpenAI's format.
    #[default]
    Assistant,
    /// Every token, those of the prompt among them.
    All,
    /// The last assistant's turn of a conversation alone; a response.
    Last,
    /// The assistant's turns of a response that is judged, and none of those in its prompt: for rows of preferences,
    /// and their default.
    Response,
}
