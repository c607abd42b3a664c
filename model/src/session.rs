//! Several sequences of unequal length that grow together, their keys and values cached; [`crate::generation`]
//! completes prompts on it.

use std::ops::Range;

use crate::batch::Documents;
use crate::blocks::{AdapterRows, Blocks, Pass};
use crate::decoder::Decoder;
use crate::ops::{CachedRows, FEW_ROWS, KernelError, Result as KernelResult, RopeTables};

/// Sequences in progress on a decoder, which every call is given: it may carry another adapter from call to call, and
/// a sequence is always continued with the one that it was begun with.
pub struct Session<B: Blocks> {
    /// One per layer.
    caches: Vec<B::Cache>,
    rope: RopeTables<B::Tensor>,
    /// The tokens of each sequence so far. Where longrope changes its frequencies, all of them are computed anew.
    tokens: Vec<Vec<u32>>,
    capacity: usize,
}

/// Keys and values of some tokens of a sequence.
pub(crate) struct CachedBlock {
    /// One per layer.
    layers: Vec<CachedRows>,
}

impl CachedBlock {
    /// Of those of each layer.
    pub(crate) fn of(layers: Vec<CachedRows>) -> Self {
        Self { layers }
    }
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Append<'a> {
    /// Index of the sequence.
    pub sequence: usize,
    /// Its next tokens: a prompt, or the one chosen last.
    pub tokens: &'a [u32],
    /// After which of them logits are computed.
    pub logits: LogitsAfter,
    /// The adapter of the sequence, where it resides on the decoder; it is always the same.
    pub adapter: usize,
}

/// After which of the new tokens of a sequence logits are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsAfter {
    /// None: more of a prompt follows.
    None,
    /// The last one.
    Last,
    /// Each of them.
    Each,
}

impl<'a> Append<'a> {
    /// Tokens of which only the next one is wanted.
    pub fn new(sequence: usize, tokens: &'a [u32]) -> Self {
        Self { sequence, tokens, logits: LogitsAfter::Last, adapter: 0 }
    }
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

impl<B: Blocks> Session<B> {
    /// A session of so many sequences of up to `capacity` tokens each.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new(decoder: &Decoder<B>, sequences: usize, capacity: usize) -> KernelResult<Self> {
        let ops = decoder.ops();
        let caches =
            decoder.attention_shapes().map(|shape| ops.cache(sequences, capacity, shape)).collect::<Result<_, _>>()?;
        let rope = decoder.config().rope.tables(&**ops, capacity)?;
        Ok(Self { caches, rope, tokens: vec![Vec::new(); sequences], capacity })
    }

    /// Tokens of a sequence so far.
    pub fn length(&self, sequence: usize) -> usize {
        self.tokens[sequence].len()
    }

    /// Forgets a sequence, so that another can take its place.
    pub fn clear(&mut self, decoder: &Decoder<B>, sequence: usize) {
        self.tokens[sequence].clear();
        self.caches.iter_mut().for_each(|cache| decoder.ops().cache_clear(cache, sequence));
    }

    /// A copy of the keys and values of some tokens of a sequence, where the kernel set can make one.
    pub(crate) fn read(&self, decoder: &Decoder<B>, sequence: usize, tokens: Range<usize>) -> Option<CachedBlock> {
        let of_layer = |cache: &B::Cache| decoder.ops().cache_read(cache, sequence, tokens.clone());
        self.caches.iter().map(of_layer).collect::<Option<_>>().map(CachedBlock::of)
    }

    /// Appends tokens to a sequence whose keys and values, behind the same tokens, have been computed before.
    pub(crate) fn extend(&mut self, decoder: &Decoder<B>, sequence: usize, tokens: &[u32], block: &CachedBlock) {
        for (cache, rows) in self.caches.iter_mut().zip(&block.layers) {
            decoder.ops().cache_extend(cache, sequence, rows);
        }
        self.tokens[sequence].extend_from_slice(tokens);
    }

    /// Appends tokens to some of the sequences and returns, for each of these in their order, the logits after its last
    /// token.
    ///
    /// # Errors
    /// Fails if a sequence is unknown or full, a token is not in the vocabulary, or the device fails. Nothing has been
    /// appended then, unless the device failed.
    pub fn append(&mut self, decoder: &Decoder<B>, new: &[Append<'_>]) -> Result<Vec<Vec<f32>>, SessionError> {
        let mut logits = vec![Vec::new(); new.len()];
        self.append_each(decoder, new, &mut |index, _, found| logits[index] = found.to_vec())?;
        Ok(logits)
    }

    /// Appends tokens to some of the sequences. `each` gets all logits that are wanted: the index in `new`, that of the
    /// token which they follow, in its order, and the logits.
    ///
    /// # Errors
    /// As for [`Session::append`].
    pub fn append_each(
        &mut self,
        decoder: &Decoder<B>,
        new: &[Append<'_>],
        each: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), SessionError> {
        self.check(decoder, new)?;
        let rows: Vec<usize> =
            new.iter().map(|new| self.length(new.sequence) - self.start(decoder, new) + new.tokens.len()).collect();
        for pass in passes(&rows) {
            let of_pass: Vec<Append<'_>> = pass.iter().map(|&index| new[index]).collect();
            self.run(decoder, &of_pass, &mut |index, token, logits| each(pass[index], token, logits))?;
        }
        Ok(())
    }

    /// The first position of a sequence that is computed to append to it.
    fn start(&self, decoder: &Decoder<B>, new: &Append<'_>) -> usize {
        let held = self.length(new.sequence);
        let anew = decoder.config().rope.turns_anew(held, held + new.tokens.len());
        if anew { 0 } else { held }
    }

    /// Appends tokens in one pass.
    fn run(
        &mut self,
        decoder: &Decoder<B>,
        new: &[Append<'_>],
        each: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> KernelResult {
        let (mut pieces, mut ids) = (Vec::with_capacity(new.len()), Vec::new());
        for new in new {
            let held = &self.tokens[new.sequence];
            let start = self.start(decoder, new);
            pieces.push((new.sequence, start, held.len() - start + new.tokens.len()));
            ids.extend_from_slice(&held[start..]);
            ids.extend_from_slice(new.tokens);
        }
        let adapters = adapter_rows(decoder, new.iter().zip(&pieces).map(|(new, (_, _, rows))| (new.adapter, *rows)));
        let documents = Documents::continued(pieces);
        let pass = Pass { documents: &documents, rope: &self.rope, draws: None, adapters: &adapters };
        let x = decoder.append_cached(&ids, &pass, &mut self.caches)?;
        for new in new {
            self.tokens[new.sequence].extend_from_slice(new.tokens);
        }
        let mut wanted = Vec::new();
        for (index, (new, span)) in new.iter().zip(documents.spans()).enumerate() {
            let first = match new.logits {
                LogitsAfter::None => new.tokens.len(),
                LogitsAfter::Last => new.tokens.len() - 1,
                LogitsAfter::Each => 0,
            };
            let first_row = span.rows.end - new.tokens.len();
            wanted.extend((first..new.tokens.len()).map(|token| (index, token, (first_row + token) as u32)));
        }
        // Never more rows at once than a product of few has: the logits after a token are the same bits whether or not
        // those after others are wanted.
        for wanted in wanted.chunks(FEW_ROWS) {
            let rows: Vec<u32> = wanted.iter().map(|(_, _, row)| *row).collect();
            let adapters = adapter_rows(decoder, wanted.iter().map(|(index, ..)| (new[*index].adapter, 1)));
            let logits = decoder.ops().read(&decoder.logits_of_rows(&x, &rows, &adapters)?)?;
            for ((index, token, _), logits) in wanted.iter().zip(logits.chunks(decoder.config().vocab_size)) {
                each(*index, *token, logits);
            }
        }
        Ok(())
    }

    fn check(&self, decoder: &Decoder<B>, new: &[Append<'_>]) -> Result<(), SessionError> {
        let vocab_size = decoder.config().vocab_size;
        let mut seen = vec![false; self.tokens.len()];
        for &Append { sequence, tokens, .. } in new {
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

/// Which rows have which of the adapters that reside on the decoder, where each adapter has so many, one below the
/// other.
fn adapter_rows<B: Blocks>(decoder: &Decoder<B>, rows: impl Iterator<Item = (usize, usize)>) -> Vec<AdapterRows> {
    let (mut found, mut end): (Vec<AdapterRows>, usize) = (Vec::new(), 0);
    for (adapter, count) in rows {
        let rows = end..end + count;
        end = rows.end;
        match found.last_mut().filter(|last| last.adapter == adapter && last.rows.end == rows.start) {
            Some(last) => last.rows.end = rows.end,
            None if decoder.is_resident(adapter) => found.push(AdapterRows { rows, adapter }),
            None => {}
        }
    }
    found
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
