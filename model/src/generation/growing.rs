//! A request in progress: what is chosen after its tokens, and when it ends. Where the logits come from is the business
//! of others.

use super::queue::{ChosenToken, Progress, QueuedRequest, RequestId};
use super::{GenerateError, Stop, TOKENS_PER_PASS};
use crate::ops::FEW_ROWS;
use crate::sampling::{Next, Place, Sampler, TokenLogprobs};
use crate::session::{Append, LogitsAfter, SessionError};

/// A prompt and its completion so far.
#[derive(Debug)]
pub struct Growing {
    pub(super) id: RequestId,
    pub(super) request: QueuedRequest,
    sampler: Sampler,
    /// The prompt and the completion.
    pub(super) tokens: Vec<u32>,
    /// Tokens of the prompt.
    prompt: usize,
    /// Tokens that the session has.
    pub(super) read: usize,
    /// Tokens at most.
    pub(super) most: usize,
}

impl Growing {
    /// A request that is the `number`-th of a model with such a vocabulary, which may have so many positions.
    ///
    /// # Errors
    /// Fails if the prompt does not fit, holds a token that the model has not, or a setting of the sampling lies
    /// outside of its range.
    pub fn new(
        number: u64,
        mut request: QueuedRequest,
        positions: usize,
        vocab_size: usize,
    ) -> Result<Self, GenerateError> {
        let tokens = std::mem::take(&mut request.prompt);
        if !(1..=positions).contains(&tokens.len()) {
            return Err(GenerateError::Prompt { request: number as usize, tokens: tokens.len(), positions });
        }
        if let Some(&id) = tokens.iter().find(|id| **id as usize >= vocab_size) {
            return Err(SessionError::Vocabulary { id, vocab_size }.into());
        }
        let sampler = Sampler::new(request.sampling)?;
        let (prompt, most) = (tokens.len(), tokens.len().saturating_add(request.max_new_tokens).min(positions));
        Ok(Self { id: RequestId(number), request, sampler, tokens, prompt, read: 0, most })
    }

    /// The request.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The adapter that completes it, by its number.
    pub fn adapter(&self) -> usize {
        self.request.adapter
    }

    /// The tokens of the prompt and of the completion so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt
    }

    /// Whether log-probabilities of the tokens of the prompt are wanted.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.request.prompt_logprobs.is_some()
    }

    /// Whether a part of its prompt has not been read.
    pub(super) fn is_new(&self) -> bool {
        self.read < self.prompt
    }

    /// Tokens of the prompt that are read in pieces of many rows, in whatever pieces: all but a last one of few.
    pub(super) fn read_in_passes(&self) -> usize {
        match self.prompt % TOKENS_PER_PASS {
            few @ 1..=FEW_ROWS => self.prompt - few,
            _ => self.prompt,
        }
    }

    /// Tokens of the prompt that may be taken as another prompt has them: those of its pieces of many rows, if what is
    /// left is of as many or few rows as ever. Where the prompt's log-probabilities are wanted all are computed.
    pub(super) fn reusable(&self) -> usize {
        let read_in_passes = self.read_in_passes();
        match self.request.prompt_logprobs {
            Some(_) => 0,
            None if read_in_passes < self.prompt => read_in_passes,
            None => self.prompt.saturating_sub(FEW_ROWS + 1),
        }
    }

    /// Where the next piece of the prompt ends, of about so many tokens.
    ///
    /// Borders are at multiples of [`TOKENS_PER_PASS`], and between them at those of `tokens`, but for a last piece of
    /// so few that it would be summed in another order than the whole: it belongs to the one before. So how long
    /// pieces are changes no bit.
    pub(super) fn piece_end(&self, tokens: usize) -> usize {
        let border = (self.read / TOKENS_PER_PASS + 1) * TOKENS_PER_PASS;
        let border = border.min(self.prompt);
        match border.saturating_sub(self.read + tokens) {
            0..=FEW_ROWS => border,
            _ => self.read + tokens,
        }
    }

    /// The tokens to compute next, up to an end.
    pub(super) fn append(&self, slot: usize, end: usize) -> Append<'_> {
        let logits = match self.request.prompt_logprobs {
            Some(_) if self.is_new() => LogitsAfter::Each,
            _ if end == self.tokens.len() => LogitsAfter::Last,
            _ => LogitsAfter::None,
        };
        Append { sequence: slot, tokens: &self.tokens[self.read..end], logits, adapter: self.request.adapter }
    }

    /// The log-probabilities of the token of the prompt that follows a position, where they are wanted.
    pub fn prompt_logprobs_after(&self, position: usize, logits: &[f32]) -> Option<TokenLogprobs> {
        let top = self.request.prompt_logprobs?;
        let next = self.tokens[..self.prompt].get(position + 1)?;
        Some(TokenLogprobs::of(logits, *next, top))
    }

    /// Chooses the next token; `logits` are those after the last one.
    pub fn choose(&mut self, logits: &[f32]) -> Progress {
        let nothing = self.nothing_new();
        if self.tokens.len() >= self.most {
            return Progress { ended: Some(Ok(Stop::Length)), ..nothing };
        }
        let QueuedRequest { row, min_new_tokens, stop_token_ids, adjustments, constraint, logprobs, .. } =
            &mut self.request;
        let completion = &self.tokens[self.prompt..];
        let place = Place {
            seen: &self.tokens,
            banned: if completion.len() < *min_new_tokens { stop_token_ids } else { &[] },
            row: *row,
            position: self.tokens.len() as u64,
        };
        let chosen = match constraint.is_none() && adjustments.is_empty() {
            true => self.sampler.next_token(logits, &place),
            false => {
                let mut adjusted = logits.to_vec();
                adjustments.apply(&mut adjusted, completion);
                if let Some(constraint) = constraint {
                    constraint.apply(&mut adjusted, stop_token_ids);
                }
                self.sampler.next_token(&adjusted, &place)
            }
        };
        let id = match chosen {
            Ok(id) => id,
            Err(error) => return Progress { ended: Some(Err(error)), ..nothing },
        };
        let logprobs = logprobs.map(|top| TokenLogprobs::of(logits, id, top));
        let token = Some(ChosenToken { id, logprobs });
        if stop_token_ids.contains(&id) {
            return Progress { stop_token: token, ended: Some(Ok(Stop::EndOfText)), ..nothing };
        }
        self.tokens.push(id);
        let next = constraint.as_mut().map_or(Next::Any, |constraint| constraint.push(id));
        let ended = match next {
            Next::End => Some(Ok(Stop::EndOfText)),
            Next::Any => (self.tokens.len() >= self.most).then_some(Ok(Stop::Length)),
        };
        Progress { token, ended, ..nothing }
    }

    /// That nothing was added.
    pub fn nothing_new(&self) -> Progress {
        Progress { id: self.id, prompt_logprobs: Vec::new(), token: None, stop_token: None, ended: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::{Adjustments, Sampling};

    fn ends(prompt: usize, tokens: usize) -> Vec<usize> {
        let request = QueuedRequest {
            prompt: vec![0; prompt],
            row: 0,
            adapter: 0,
            max_new_tokens: 1,
            min_new_tokens: 0,
            stop_token_ids: Vec::new(),
            sampling: Sampling::GREEDY,
            adjustments: Adjustments::default(),
            constraint: None,
            logprobs: None,
            prompt_logprobs: None,
        };
        let mut growing = Growing::new(0, request, usize::MAX, 1).expect("a token of the vocabulary");
        let mut ends = Vec::new();
        while growing.is_new() {
            growing.read = growing.piece_end(tokens);
            ends.push(growing.read);
        }
        ends
    }

    #[test]
    fn pieces_are_of_few_rows_only_where_the_longest_pieces_are() {
        assert_eq!(ends(5, 128), [5]);
        assert_eq!(ends(144, 128), [144]);
        assert_eq!(ends(145, 128), [128, 145]);
        assert_eq!(ends(300, 128), [128, 256, 300]);
        assert_eq!(ends(1030, 512), [512, 1024, 1030]);
        for prompt in 1..2100 {
            let long = ends(prompt, TOKENS_PER_PASS);
            assert_eq!(long.len(), prompt.div_ceil(TOKENS_PER_PASS), "{prompt}");
            for tokens in [17, 32, 100, 128, 700] {
                let short = ends(prompt, tokens);
                assert!(long.iter().all(|end| short.contains(end)), "{prompt} {tokens}");
                let is_few = |end: usize, ends: &[usize]| {
                    let begin = ends.iter().copied().filter(|other| *other < end).max().unwrap_or(0);
                    end - begin <= FEW_ROWS
                };
                for end in &short {
                    let of_long = *long.iter().find(|border| *border >= end).expect("the prompt's end is a border");
                    assert_eq!(is_few(*end, &short), is_few(of_long, &long), "{prompt} {tokens} {end}");
                }
            }
        }
    }
}
