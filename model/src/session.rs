//! Several sequences of unequal length that grow together, their keys and values cached; [`crate::generation`] completes prompts on it.

use std::sync::Arc;

use crate::batch::Documents;
use crate::blocks::{Blocks, Pass};
use crate::decoder::Decoder;
use crate::ops::{KernelError, Result as KernelResult, RopeTables};

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

    /// Appends tokens to some of the sequences and returns, for each of these in their order, the logits after its last token.
    ///
    /// # Errors
    /// Fails if a sequence is unknown or full, a token is not in the vocabulary, or the device fails. Nothing has been appended then,
    /// unless the device failed.
    pub fn append(&mut self, new: &[Append<'_>]) -> Result<Vec<Vec<f32>>, SessionError> {
        self.check(new)?;
        if new.is_empty() {
            return Ok(Vec::new());
        }
        let ops = Arc::clone(self.decoder.ops());
        let rope = &self.decoder.config().rope;
        let (mut pieces, mut ids) = (Vec::with_capacity(new.len()), Vec::new());
        for new in new {
            let held = &self.tokens[new.sequence];
            let anew = rope.turns_anew(held.len(), held.len() + new.tokens.len());
            let start = if anew { 0 } else { held.len() };
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
