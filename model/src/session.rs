//! Several sequences of unequal length that grow together, their keys and values cached; [`crate::generation`]
//! completes prompts on it.

use std::sync::Arc;

use crate::batch::Documents;
use crate::blocks::{Blocks, Pass};
use crate::decoder::Decoder;
use crate::ops::{FEW_ROWS, KernelError, Result as KernelResult, RopeTables};

/// Sequences in progress on a decoder.
pub struct Session<'a, B: Blocks> {
    decoder: &'a Decoder<B>,
    /// One per layer.
    caches: Vec<B::Cache>,
    rope: RopeTables<B::Tensor>,
    /// The tokens of each sequence so far. Where longrope changes its frequencies, all of them are computed anew.
    tokens: Vec<Vec<u32>>,
    capacity: usize,
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Append<'a> {
    /// Index of the sequence.
    pub sequence: usize,
    /// Its next tokens: a prompt, or the one chosen last.
    pub tokens: &'a [u32],
}

/// Why tokens cannot be appended.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// There is no such sequence, or it stands twice in one call.
    #[error("sequence {sequence} of {sequences} is unknown or named twice")]
    Sequence {
        /// The index.
        sequence: usize,
        /// Number of sequences.
        sequences: usize,
    },
    /// Nothing is appended.
    #[error("no tokens for sequence {0}")]
    NoTokens(usize),
    /// The sequence would outgrow its cache.
    #[error("sequence {sequence} would have {tokens} tokens, the session holds {capacity}")]
    Full {
        /// The index.
        sequence: usize,
        /// Tokens it would have.
        tokens: usize,
        /// Tokens it may have.
        capacity: usize,
    },
    /// A token lies outside the vocabulary.
    #[error("token id {id} lies beyond the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// The device failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl<'a, B: Blocks> Session<'a, B> {
    /// A session of so many sequences of up to `capacity` tokens each.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new(decoder: &'a Decoder<B>, sequences: usize, capacity: usize) -> KernelResult<Self> {
        let ops = decoder.ops();
        let caches =
            decoder.attention_shapes().map(|shape| ops.cache(sequences, capacity, shape)).collect::<Result<_, _>>()?;
        let rope = decoder.config().rope.tables(&**ops, capacity)?;
        Ok(Self { decoder, caches, rope, tokens: vec![Vec::new(); sequences], capacity })
    }

    /// Tokens of a sequence so far.
    pub fn length(&self, sequence: usize) -> usize {
        self.tokens[sequence].len()
    }

    /// Forgets a sequence, so that another can take its place.
    pub fn clear(&mut self, sequence: usize) {
        self.tokens[sequence].clear();
    }

    /// Appends tokens to some of the sequences and returns, for each of these in their order, the logits after its last
    /// token.
    ///
    /// # Errors
    /// Fails if a sequence is unknown or full, a token is not in the vocabulary, or the device fails. Nothing has been
    /// appended then, unless the device failed.
    pub fn append(&mut self, new: &[Append<'_>]) -> Result<Vec<Vec<f32>>, SessionError> {
        self.check(new)?;
        let rows: Vec<usize> =
            new.iter().map(|new| self.tokens[new.sequence].len() - self.start(new) + new.tokens.len()).collect();
        let mut logits = vec![Vec::new(); new.len()];
        for pass in passes(&rows) {
            let of_pass: Vec<Append<'_>> = pass.iter().map(|&index| new[index]).collect();
            let found = self.run(&of_pass)?;
            pass.into_iter().zip(found).for_each(|(index, found)| logits[index] = found);
        }
        Ok(logits)
    }

    /// The first position of a sequence that is computed to append to it.
    fn start(&self, new: &Append<'_>) -> usize {
        let held = self.tokens[new.sequence].len();
        let anew = self.decoder.config().rope.turns_anew(held, held + new.tokens.len());
        if anew { 0 } else { held }
    }

    /// Appends tokens in one pass.
    fn run(&mut self, new: &[Append<'_>]) -> KernelResult<Vec<Vec<f32>>> {
        let ops = Arc::clone(self.decoder.ops());
        let (mut pieces, mut ids) = (Vec::with_capacity(new.len()), Vec::new());
        for new in new {
            let held = &self.tokens[new.sequence];
            let start = self.start(new);
            pieces.push((new.sequence, start, held.len() - start + new.tokens.len()));
            ids.extend_from_slice(&held[start..]);
            ids.extend_from_slice(new.tokens);
        }
        let documents = Documents::continued(pieces);
        let last_rows: Vec<u32> = documents.spans().iter().map(|span| span.rows.end as u32 - 1).collect();
        let pass = Pass { documents: &documents, rope: &self.rope, draws: None };
        let logits = self.decoder.logits_cached(&ids, &pass, &last_rows, &mut self.caches)?;
        for new in new {
            self.tokens[new.sequence].extend_from_slice(new.tokens);
        }
        let values = ops.read(&logits)?;
        if new.len() == 1 {
            return Ok(vec![values]);
        }
        Ok(values.chunks(self.decoder.config().vocab_size).map(<[f32]>::to_vec).collect())
    }

    fn check(&self, new: &[Append<'_>]) -> Result<(), SessionError> {
        let vocab_size = self.decoder.config().vocab_size;
        let mut seen = vec![false; self.tokens.len()];
        for &Append { sequence, tokens } in new {
            if seen.get(sequence).copied() != Some(false) {
                return Err(SessionError::Sequence { sequence, sequences: seen.len() });
            }
            seen[sequence] = true;
            if tokens.is_empty() {
                return Err(SessionError::NoTokens(sequence));
            }
            let length = self.tokens[sequence].len() + tokens.len();
            if length > self.capacity {
                return Err(SessionError::Full { sequence, tokens: length, capacity: self.capacity });
            }
            if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(SessionError::Vocabulary { id, vocab_size });
            }
        }
        Ok(())
    }
}

/// Which pieces, of so many rows each, run together: those of few rows apart from those of many, so that the products
/// of a sequence are summed in the same order in whatever company. Of each piece one row goes through the head, hence
/// the same bound there.
fn passes(rows: &[usize]) -> Vec<Vec<usize>> {
    let (few, many): (Vec<usize>, Vec<usize>) = (0..rows.len()).partition(|&index| rows[index] <= FEW_ROWS);
    let mut passes: Vec<Vec<usize>> = Vec::new();
    let mut left = 0;
    for index in few {
        match passes.last_mut().filter(|_| rows[index] <= left) {
            Some(pass) => pass.push(index),
            None => {
                passes.push(vec![index]);
                left = FEW_ROWS;
            }
        }
        left -= rows[index];
    }
    passes.extend(many.chunks(FEW_ROWS).map(<[usize]>::to_vec));
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pass_mixes_few_rows_with_many() {
        let rows = [1, 40, 16, 1, 15, 17, 1, 1];
        let passes = passes(&rows);
        assert_eq!(passes, [vec![0], vec![2], vec![3, 4], vec![6, 7], vec![1, 5]]);
        let of_decoding = super::passes(&[1; 20]);
        assert_eq!(of_decoding.iter().map(Vec::len).collect::<Vec<_>>(), [16, 4]);
        assert_eq!(super::passes(&[100; 20]).iter().map(Vec::len).collect::<Vec<_>>(), [16, 4]);
        assert!(super::passes(&[]).is_empty());
    }
}
