//! Whether a model can be trained on rows of tokens at all: known from their facts, before the first step.

use engine::error::StageError;

use crate::artifact::TokensFacts;

/// Why a model cannot be trained on these rows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Misfit {
    /// The rows were made for a larger vocabulary.
    #[error("the tokens go up to id {largest_id} (their tokenizer has {tokenizer} ids), and the model has {model}")]
    Vocabulary { largest_id: u32, tokenizer: u64, model: u64 },
    /// A document has more tokens than the model has positions.
    #[error("the longest document has {tokens} tokens, and the model has {positions} positions")]
    TooLong { tokens: u64, positions: u64 },
}

impl Misfit {
    /// What to do about it.
    pub(super) fn help(&self) -> &'static str {
        match self {
            Self::Vocabulary { .. } => "tokenize with the tokenizer of the model that is trained",
            Self::TooLong { .. } => "lower `max_seq_len` of `tokenize` (or of `pack`)",
        }
    }
}

impl From<Misfit> for StageError {
    fn from(misfit: Misfit) -> Self {
        StageError::bad_data(misfit.to_string()).with_help(misfit.help())
    }
}

/// Compares what the rows need with what the model has.
pub(super) fn check(tokens: &TokensFacts, vocab_size: u64, positions: u64) -> Result<(), Misfit> {
    if let Some(largest_id) = tokens.largest_id.filter(|id| u64::from(*id) >= vocab_size) {
        return Err(Misfit::Vocabulary { largest_id, tokenizer: tokens.vocab_size, model: vocab_size });
    }
    if tokens.longest_document > positions {
        return Err(Misfit::TooLong { tokens: tokens.longest_document, positions });
    }
    Ok(())
}
