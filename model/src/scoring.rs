//! Scores continuations of contexts, and reads what several of them begin with once.
//!
//! The contexts of a call are read in one pass, their keys and values cached; then their continuations take turns
//! behind them, one of each context in a pass. What all contexts begin with (the rows shown before a question, say) is
//! read before them, and kept for the next call.
//!
//! What a continuation scores does not depend on what is scored beside it, nor on what was shared: attention goes over
//! keys in blocks that are counted from position 0, and every pass is one of more than [`FEW_ROWS`] rows, whose
//! products are sums of one order.

use crate::batch::{BatchError, Documents};
use crate::blocks::{Blocks, Pass};
use crate::decoder::{Decoder, RunError};
use crate::ops::{CachedRows, FEW_ROWS, Result as KernelResult, RopeTables, TokenScore};

/// What contexts must have in common at least, in tokens, to be worth a pass of its own.
const SHARED_TOKENS: usize = 2 * FEW_ROWS;

/// A context of so many tokens costs less to read again than a pass more.
const SHORT_TOKENS: usize = 8;

/// Tokens, and what may follow them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Context<'a> {
    /// The tokens: one at least.
    pub ids: &'a [u32],
    /// What may follow: of one token at least each.
    pub continuations: Vec<&'a [u32]>,
}

impl Context<'_> {
    /// Tokens of the context with its longest continuation, whose last token is only predicted.
    pub fn positions(&self) -> usize {
        self.ids.len() + self.continuations.iter().map(|ids| ids.len()).max().unwrap_or(0).saturating_sub(1)
    }
}

/// How many tokens two sequences begin with in common.
pub fn common_tokens(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// What scoring keeps from call to call. It is for one decoder as it is: after a change of its weights or its adapter
/// another is needed.
pub struct Scorer<B: Blocks> {
    rope: Option<RopeTables<B::Tensor>>,
    /// Positions the tables are for.
    positions: usize,
    /// What the last contexts began with.
    shared: Vec<u32>,
    /// Its keys and values in each layer.
    rows: Vec<CachedRows>,
}

impl<B: Blocks> Default for Scorer<B> {
    fn default() -> Self {
        Self { rope: None, positions: 0, shared: Vec::new(), rows: Vec::new() }
    }
}

/// A continuation, by its context's index and its own.
type Place = (usize, usize);

/// A sequence that is read in the first pass.
struct Trunk {
    ids: Vec<u32>,
    /// What is predicted after one of its tokens.
    targets: Vec<(usize, u32, Place)>,
    /// Continuations that are read behind it.
    branches: Vec<Place>,
}

/// A sequence's next tokens in a pass.
struct Piece<'a> {
    slot: usize,
    start: usize,
    ids: &'a [u32],
    /// What is predicted after one of them.
    targets: Vec<(usize, u32, Place)>,
}

impl<B: Blocks> Scorer<B> {
    /// Scores each token of each continuation of each context: `[context][continuation][token]`.
    ///
    /// # Errors
    /// Fails if a context or a continuation has no tokens, tokens are not in the vocabulary or more than the model has
    /// positions, or the device fails.
    pub fn score(
        &mut self,
        decoder: &Decoder<B>,
        contexts: &[Context<'_>],
    ) -> Result<Vec<Vec<Vec<TokenScore>>>, RunError> {
        check(decoder, contexts)?;
        let Some(longest) = contexts.iter().map(Context::positions).max() else { return Ok(Vec::new()) };
        let mut scores: Vec<Vec<Vec<TokenScore>>> =
            contexts.iter().map(|context| vec![Vec::new(); context.continuations.len()]).collect();
        // Where frequencies change with a sequence's length, keys of a context are not those of what it grows to.
        let is_one_pass = decoder.config().rope.turns_anew(0, longest);
        let trunks = trunks(contexts, is_one_pass);
        self.make_tables(decoder, longest)?;
        // A slot more, for the rows that keep others company.
        let ops = decoder.ops();
        let capacity = longest.max(FEW_ROWS + 1);
        let mut caches: Vec<B::Cache> = decoder
            .attention_shapes()
            .map(|shape| ops.cache(trunks.len() + 1, capacity, shape))
            .collect::<KernelResult<_>>()?;
        let begun = if is_one_pass { 0 } else { self.share(decoder, &trunks, &mut caches)? };
        let pieces: Vec<Piece<'_>> = trunks
            .iter()
            .enumerate()
            .map(|(slot, trunk)| Piece {
                slot,
                start: begun,
                ids: &trunk.ids[begun..],
                targets: trunk.targets.iter().map(|(row, id, place)| (row - begun, *id, *place)).collect(),
            })
            .collect();
        self.pass(decoder, &pieces, trunks.len(), &mut caches, &mut scores)?;
        let turns = trunks.iter().map(|trunk| trunk.branches.len()).max().unwrap_or(0);
        for turn in 0..turns {
            let of_turn = |(slot, trunk): (usize, &Trunk)| {
                let place = *trunk.branches.get(turn)?;
                let ids = contexts[place.0].continuations[place.1];
                let targets = ids[1..].iter().enumerate().map(|(row, id)| (row, *id, place)).collect();
                Some(Piece { slot, start: trunk.ids.len(), ids: &ids[..ids.len() - 1], targets })
            };
            let pieces: Vec<Piece<'_>> = trunks.iter().enumerate().filter_map(of_turn).collect();
            self.pass(decoder, &pieces, trunks.len(), &mut caches, &mut scores)?;
        }
        Ok(scores)
    }

    /// Reads what all sequences begin with, where that is worth it, and puts it into each one's slot; returns how many
    /// tokens that is.
    fn share(&mut self, decoder: &Decoder<B>, trunks: &[Trunk], caches: &mut [B::Cache]) -> Result<usize, RunError> {
        let (first, rest) = trunks.split_first().expect("there is a context");
        // The tokens that something is predicted after are read by each.
        let most = |trunk: &Trunk| trunk.targets.iter().map(|(row, _, _)| *row).min().unwrap_or(0);
        let common = |trunk: &Trunk| common_tokens(&trunk.ids, &first.ids).min(most(trunk));
        let known = common_tokens(&self.shared, &first.ids);
        let shared = rest.iter().map(common).min().unwrap_or(known).min(most(first));
        if shared < SHARED_TOKENS
            || caches.first().is_some_and(|cache| decoder.ops().cache_read(cache, 0, 0..0).is_none())
        {
            return Ok(0);
        }
        if known < shared {
            // Begun where the last one's agree with it, and read on.
            self.forget_behind(known);
            self.put(decoder, 0, caches);
            let piece = Piece { slot: 0, start: known, ids: &first.ids[known..shared], targets: Vec::new() };
            self.pass(decoder, &[piece], trunks.len(), caches, &mut [])?;
            let read = |cache: &B::Cache| decoder.ops().cache_read(cache, 0, 0..shared);
            self.rows = caches.iter().filter_map(read).collect();
            self.shared = first.ids[..shared].to_vec();
            caches.iter_mut().for_each(|cache| decoder.ops().cache_clear(cache, 0));
        } else if shared < self.shared.len() {
            self.forget_behind(shared);
        }
        (0..trunks.len()).for_each(|slot| self.put(decoder, slot, caches));
        Ok(shared)
    }

    /// Keeps the first tokens alone: each slot gets a copy of what is kept.
    fn forget_behind(&mut self, tokens: usize) {
        if tokens == 0 {
            self.rows.clear();
        }
        for rows in &mut self.rows {
            let values = rows.keys.len() / self.shared.len() * tokens;
            rows.keys.truncate(values);
            rows.values.truncate(values);
        }
        self.shared.truncate(tokens);
    }

    /// Puts what is kept into an empty slot.
    fn put(&self, decoder: &Decoder<B>, slot: usize, caches: &mut [B::Cache]) {
        for (cache, rows) in caches.iter_mut().zip(&self.rows) {
            decoder.ops().cache_extend(cache, slot, rows);
        }
    }

    /// Reads pieces, in company where they are few, and adds what their targets score. No sequence has the slot
    /// `spare`.
    fn pass(
        &self,
        decoder: &Decoder<B>,
        pieces: &[Piece<'_>],
        spare: usize,
        caches: &mut [B::Cache],
        scores: &mut [Vec<Vec<TokenScore>>],
    ) -> Result<(), RunError> {
        let mut ids: Vec<u32> = Vec::new();
        let (mut rows, mut targets, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut spans = Vec::new();
        for piece in pieces {
            let first = ids.len();
            ids.extend_from_slice(piece.ids);
            spans.push((piece.slot, piece.start, piece.ids.len()));
            for (row, id, place) in &piece.targets {
                rows.push((first + row) as u32);
                targets.push(*id);
                places.push(*place);
            }
        }
        let Some(&id) = ids.first() else { return Ok(()) };
        if ids.len() <= FEW_ROWS || (1..=FEW_ROWS).contains(&targets.len()) {
            let first = ids.len() as u32;
            let company = FEW_ROWS + 1;
            ids.extend(std::iter::repeat_n(id, company));
            spans.push((spare, 0, company));
            rows.extend(first..first + company as u32);
            targets.extend(std::iter::repeat_n(id, company));
        }
        let documents = Documents::continued(spans);
        let rope = self.rope.as_ref().expect("the tables are made before the first pass");
        let pass = Pass { documents: &documents, rope, draws: None, adapters: &[] };
        let x = decoder.append_cached(&ids, &pass, caches)?;
        if places.is_empty() {
            return Ok(());
        }
        let found = decoder.scores_of_rows(&x, &rows, &targets)?;
        for ((context, continuation), score) in places.into_iter().zip(found) {
            scores[context][continuation].push(score);
        }
        Ok(())
    }

    fn make_tables(&mut self, decoder: &Decoder<B>, longest: usize) -> KernelResult {
        let longest = longest.max(FEW_ROWS + 1);
        if longest > self.positions || self.rope.is_none() {
            let most = decoder.config().max_position_embeddings.max(FEW_ROWS + 1);
            self.positions = longest.next_power_of_two().min(most);
            self.rope = Some(decoder.config().rope.tables(&**decoder.ops(), self.positions)?);
        }
        Ok(())
    }
}

/// The sequences of the first pass: a context; with a continuation, where there is one only, or another pass would cost
/// more or other bits.
fn trunks(contexts: &[Context<'_>], is_one_pass: bool) -> Vec<Trunk> {
    let mut trunks = Vec::new();
    for (index, Context { ids, continuations }) in contexts.iter().enumerate() {
        let last = ids.len() - 1;
        if is_one_pass || continuations.len() == 1 || ids.len() <= SHORT_TOKENS {
            for (number, continuation) in continuations.iter().enumerate() {
                let targets = continuation.iter().enumerate().map(|(row, id)| (last + row, *id, (index, number)));
                trunks.push(Trunk {
                    ids: [ids, &continuation[..continuation.len() - 1]].concat(),
                    targets: targets.collect(),
                    branches: Vec::new(),
                });
            }
            continue;
        }
        let firsts = continuations.iter().enumerate().map(|(number, ids)| (last, ids[0], (index, number)));
        let longer = continuations.iter().enumerate().filter(|(_, ids)| ids.len() > 1);
        trunks.push(Trunk {
            ids: ids.to_vec(),
            targets: firsts.collect(),
            branches: longer.map(|(number, _)| (index, number)).collect(),
        });
    }
    trunks
}

fn check<B: Blocks>(decoder: &Decoder<B>, contexts: &[Context<'_>]) -> Result<(), BatchError> {
    let config = decoder.config();
    for context in contexts {
        if context.ids.is_empty() || context.continuations.iter().any(|ids| ids.is_empty()) {
            return Err(BatchError::Empty);
        }
        let tokens = context.positions();
        if tokens > config.max_position_embeddings {
            return Err(BatchError::TooLong { tokens, max_position_embeddings: config.max_position_embeddings });
        }
        let ids = context.ids.iter().chain(context.continuations.iter().copied().flatten());
        let beyond = ids.enumerate().find(|(_, id)| **id as usize >= config.vocab_size);
        if let Some((index, &id)) = beyond {
            return Err(BatchError::Vocabulary { index, id: id.into(), vocab_size: config.vocab_size });
        }
    }
    Ok(())
}
