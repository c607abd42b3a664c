//! One row: encoded, cut to length, and judged by what is left to learn of it.

use engine::error::StageError;
use model::batch::target_count;

use super::{OnNoTarget, OnTooLong};
use crate::data::artifact::{IGNORE_INDEX, Judged, Role, Row, TokenRow};
use crate::data::prompt::{ChatError, Encoded, PromptError, PromptRenderer, Responded, ResponseBorder};
use crate::data::tokenizer::Tokenizer;

/// Why a row cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum RowError {
    #[error("it cannot be encoded")]
    Prompt(#[from] PromptError),
    #[error("it has {tokens} tokens, and `max_seq_len` is {limit}")]
    TooLong { tokens: usize, limit: usize },
    #[error("it has no token to train on")]
    NoTarget,
    #[error("its {} has no token to train on", if *role == Role::Chosen { "better response" } else { "worse \
        response" })]
    NoResponse { role: Role },
}

impl RowError {
    /// As the failure of the stage over the row of an index, from 0.
    pub(super) fn at_row(self, index: u64) -> StageError {
        let help = match &self {
            Self::Prompt(PromptError::Chat(ChatError::NotAPrefix { .. })) => Some(
                "set `train_on: last` or `all`, or a `chat_template` with `{% generation %}` around the assistant's \
                 text"
                    .to_owned(),
            ),
            Self::Prompt(error) => error.help().map(str::to_owned),
            Self::TooLong { .. } => Some("set `on_too_long` to truncate or drop, or raise `max_seq_len`".to_owned()),
            Self::NoTarget => Some("set `on_no_target` to drop or keep".to_owned()),
            Self::NoResponse { .. } => Some("leave such rows out with `on_no_target: drop`".to_owned()),
        };
        let error = StageError::bad_data(format!("row {} of the dataset cannot be used", index + 1)).with_source(self);
        StageError { help, ..error }
    }
}

/// What was made of a row.
#[derive(Debug, PartialEq)]
pub(super) struct Outcome {
    pub fate: Fate,
    /// Whether special tokens that it has written out are read as plain text.
    pub sanitized: bool,
    /// Whether it is a pair of equal responses.
    pub equal: bool,
}

/// What becomes of a row.
#[derive(Debug, PartialEq)]
pub(super) enum Fate {
    /// It stays, as one row or as several pieces.
    Kept { rows: Vec<TokenRow>, truncated: bool, fully_masked: bool, without_eos: bool },
    /// It is left out because of its length.
    TooLong,
    /// It is left out because it has no token to train on.
    NoTarget { truncated: bool },
}

/// Encodes rows, all in the same way; shared by threads.
pub(super) struct RowEncoder<'a> {
    pub tokenizer: &'a Tokenizer,
    pub renderer: &'a PromptRenderer,
    pub max_seq_len: Option<usize>,
    pub on_too_long: OnTooLong,
    pub on_no_target: OnNoTarget,
    pub response_border: ResponseBorder,
}

impl RowEncoder<'_> {
    /// # Errors
    /// Fails where the row cannot be encoded, or a policy says that such a row is an error.
    pub(super) fn encode(&self, row: &Row) -> Result<Outcome, RowError> {
        if let Row::Judged(judged) = row {
            return self.encode_judged(judged);
        }
        let prompt = self.renderer.lesson(row, self.tokenizer)?;
        let fate = self.judge(prompt.encode(self.tokenizer)?)?;
        Ok(Outcome { fate, sanitized: prompt.is_sanitized(), equal: false })
    }

    /// Responses after their prompt: documents of one row, which stays whole or goes. One that is cut gets no
    /// other end.
    fn encode_judged(&self, judged: &Judged) -> Result<Outcome, RowError> {
        let mut responses = self.renderer.responses(judged, self.response_border, self.tokenizer)?;
        let sanitized = responses.iter().any(|response| response.sanitized);
        let equal = judged.chosen == judged.rejected;
        let of_fate = |fate| Ok(Outcome { fate, sanitized, equal });
        let limit = self.max_seq_len.unwrap_or(usize::MAX);
        let longest = responses.iter().map(|response| response.encoded.input_ids.len()).max().unwrap_or(0);
        let truncated = longest > limit;
        if truncated {
            match self.on_too_long {
                OnTooLong::Drop => return of_fate(Fate::TooLong),
                OnTooLong::Error => return Err(RowError::TooLong { tokens: longest, limit }),
                OnTooLong::Truncate | OnTooLong::Split => responses.iter_mut().for_each(|response| {
                    response.encoded.input_ids.truncate(limit);
                    response.encoded.labels.truncate(limit);
                }),
            }
        }
        if let Some(empty) = responses.iter().find(|response| target_count(&response.encoded.labels) == 0) {
            return match self.on_no_target {
                OnNoTarget::Drop => of_fate(Fate::NoTarget { truncated }),
                OnNoTarget::Keep | OnNoTarget::Error => Err(RowError::NoResponse { role: empty.role }),
            };
        }
        let mut row = TokenRow::default();
        for Responded { role, encoded, .. } in &responses {
            let document = TokenRow::document(encoded.input_ids.clone(), encoded.labels.clone());
            row.extend(&TokenRow { groups: vec![0], roles: vec![*role], ..document });
        }
        let without_eos = responses.iter().any(|response| !self.has_an_end(&response.encoded.input_ids));
        of_fate(Fate::Kept { rows: vec![row], truncated, fully_masked: false, without_eos })
    }

    fn judge(&self, encoded: Encoded) -> Result<Fate, RowError> {
        let Encoded { mut input_ids, mut labels, mut weights } = encoded;
        let limit = self.max_seq_len.unwrap_or(usize::MAX);
        let mut truncated = false;
        if input_ids.len() > limit {
            match self.on_too_long {
                OnTooLong::Drop => return Ok(Fate::TooLong),
                OnTooLong::Error => return Err(RowError::TooLong { tokens: input_ids.len(), limit }),
                OnTooLong::Split => return Ok(self.pieces(&input_ids, &labels, &weights, limit)),
                OnTooLong::Truncate => {
                    truncate(&mut input_ids, &mut labels, limit, self.eos_of_cut());
                    weights.truncate(limit);
                    truncated = true;
                }
            }
        }
        let fully_masked = target_count(&labels) == 0;
        if fully_masked {
            match self.on_no_target {
                OnNoTarget::Drop => return Ok(Fate::NoTarget { truncated }),
                OnNoTarget::Error => return Err(RowError::NoTarget),
                OnNoTarget::Keep => {
                    // As torchtune does: the end-of-text token that replaced the last one is learned in any case.
                    if let (true, Some(eos), Some(last)) = (truncated, self.eos_of_cut(), labels.last_mut()) {
                        *last = eos as i32;
                    }
                }
            }
        }
        let without_eos = !self.has_an_end(&input_ids);
        let row = TokenRow { weights, ..TokenRow::document(input_ids, labels) };
        Ok(Fate::Kept { rows: vec![row], truncated, fully_masked, without_eos })
    }

    fn pieces(&self, input_ids: &[u32], labels: &[i32], weights: &[f32], limit: usize) -> Fate {
        let whole = TokenRow { weights: weights.to_vec(), ..TokenRow::document(input_ids.to_vec(), labels.to_vec()) };
        let starts = (0..input_ids.len()).step_by(limit);
        let rows: Vec<TokenRow> = starts
            .map(|start| whole.piece(0, start..input_ids.len().min(start + limit)))
            // A piece of one token teaches nothing: it is predicted from nothing.
            .filter(|piece| piece.input_ids.len() > 1)
            .collect();
        let end_is_learned = self.has_an_end(input_ids) && input_ids.len() % limit != 1;
        Fate::Kept { rows, truncated: false, fully_masked: false, without_eos: !end_is_learned }
    }

    /// What a row that is cut ends with.
    fn eos_of_cut(&self) -> Option<u32> {
        self.tokenizer.eos_token_id().filter(|_| self.renderer.ends_what_is_cut())
    }

    /// Whether the last token says that here is an end: of the text, or of a turn.
    fn has_an_end(&self, input_ids: &[u32]) -> bool {
        let (bos, eos) = (self.tokenizer.bos_token_id(), self.tokenizer.eos_token_id());
        let ends = |id: &u32| self.tokenizer.is_special(*id) && Some(*id) != bos;
        // Chat templates often end a turn with a line break after its mark.
        let tail = &input_ids[input_ids.len().saturating_sub(2)..];
        tail.last().is_some_and(|last| Some(*last) == eos) || tail.iter().any(ends)
    }
}

/// Cuts a row, and makes its last token the end-of-text token. That one is learned only where it follows something
/// learned and replaces something that would have been: a prompt that was cut off has not ended.
fn truncate(input_ids: &mut Vec<u32>, labels: &mut Vec<i32>, limit: usize, eos: Option<u32>) {
    input_ids.truncate(limit);
    labels.truncate(limit);
    let (Some(eos), Some(last)) = (eos, limit.checked_sub(1)) else { return };
    input_ids[last] = eos;
    let learned = labels[last] != IGNORE_INDEX && target_count(&labels[..last]) > 0;
    labels[last] = if learned { eos as i32 } else { IGNORE_INDEX };
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: i32 = IGNORE_INDEX;

    #[test]
    fn a_shortened_response_ends_and_the_end_is_learned() {
        let (mut ids, mut labels) = (vec![5, 6, 7, 8, 9], vec![NO, NO, 7, 8, 9]);
        truncate(&mut ids, &mut labels, 4, Some(1));
        assert_eq!((ids, labels), (vec![5, 6, 7, 1], vec![NO, NO, 7, 1]));
    }

    #[test]
    fn the_end_of_a_shortened_prompt_is_not_learned() {
        let (mut ids, mut labels) = (vec![5, 6, 7, 8], vec![NO, NO, 7, 8]);
        truncate(&mut ids, &mut labels, 3, Some(1));
        assert_eq!((ids, labels), (vec![5, 6, 1], vec![NO, NO, NO]), "the first response token was replaced");
    }

    #[test]
    fn without_an_end_of_text_token_a_row_is_only_cut() {
        let (mut ids, mut labels) = (vec![5, 6, 7], vec![5, 6, 7]);
        truncate(&mut ids, &mut labels, 2, None);
        assert_eq!((ids, labels), (vec![5, 6], vec![5, 6]));
    }
}
