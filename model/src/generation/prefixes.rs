//! Keys and values of the beginnings of prompts, kept by whole blocks for prompts that begin alike.

use std::collections::HashMap;
use std::ops::Range;

use crate::session::CachedBlock;

/// Tokens of a block. A border of pieces of prompts is one of blocks, too.
pub(super) const BLOCK_TOKENS: usize = 64;

/// The blocks that are kept. Those that have not been used for the longest time make room for others.
pub(super) struct Prefixes {
    /// By adapter, and by all tokens up to the block's end.
    blocks: HashMap<usize, HashMap<Box<[u32]>, Kept>>,
    count: usize,
    most: usize,
    /// Counts the prompts that used or added blocks.
    clock: u64,
}

struct Kept {
    block: CachedBlock,
    /// The clock when it was used last.
    used: u64,
}

impl Prefixes {
    /// None yet, and never more than so many tokens.
    pub(super) fn new(most_tokens: usize) -> Self {
        Self { blocks: HashMap::new(), count: 0, most: most_tokens / BLOCK_TOKENS, clock: 0 }
    }

    /// Tokens that are kept.
    pub(super) fn tokens(&self) -> usize {
        self.count * BLOCK_TOKENS
    }

    /// Forgets what is kept for an adapter.
    pub(super) fn forget(&mut self, adapter: usize) {
        self.count -= self.blocks.remove(&adapter).map_or(0, |blocks| blocks.len());
    }

    /// The blocks that the beginning of an adapter's prompt consists of, as far as they are kept.
    pub(super) fn find(&mut self, adapter: usize, beginning: &[u32]) -> Vec<&CachedBlock> {
        self.clock += 1;
        let Some(of_adapter) = self.blocks.get_mut(&adapter) else { return Vec::new() };
        let mut found = 0;
        for range in blocks_of(beginning) {
            let Some(kept) = of_adapter.get_mut(&beginning[..range.end]) else { break };
            kept.used = self.clock;
            found = range.end;
        }
        blocks_of(&beginning[..found])
            .filter_map(|range| Some(&of_adapter.get(&beginning[..range.end])?.block))
            .collect()
    }

    /// Keeps the whole blocks of the beginning of an adapter's prompt; `read` copies the keys and values of some of its
    /// tokens, where that can be done.
    pub(super) fn keep(
        &mut self,
        adapter: usize,
        beginning: &[u32],
        mut read: impl FnMut(Range<usize>) -> Option<CachedBlock>,
    ) {
        self.clock += 1;
        // A block without those before it would never be found.
        for range in blocks_of(beginning).take(self.most) {
            let used = self.clock;
            let beginning = &beginning[..range.end];
            if let Some(kept) = self.blocks.get_mut(&adapter).and_then(|of_adapter| of_adapter.get_mut(beginning)) {
                kept.used = used;
                continue;
            }
            let Some(block) = read(range) else { return };
            if self.count == self.most {
                self.forget_one();
            }
            self.blocks.entry(adapter).or_default().insert(beginning.into(), Kept { block, used });
            self.count += 1;
        }
    }

    /// Forgets the block that has not been used for the longest time: of those of one prompt the last.
    fn forget_one(&mut self) {
        let all = self.blocks.iter().flat_map(|(adapter, blocks)| blocks.iter().map(move |block| (*adapter, block)));
        let oldest = all.min_by_key(|(_, (beginning, kept))| (kept.used, std::cmp::Reverse(beginning.len())));
        let Some((adapter, beginning)) = oldest.map(|(adapter, (beginning, _))| (adapter, beginning.clone())) else {
            return;
        };
        if let Some(of_adapter) = self.blocks.get_mut(&adapter)
            && of_adapter.remove(&beginning).is_some()
        {
            self.count -= 1;
        }
    }
}

/// Where the whole blocks of some tokens are.
fn blocks_of(tokens: &[u32]) -> impl Iterator<Item = Range<usize>> + use<> {
    (0..tokens.len() / BLOCK_TOKENS).map(|block| block * BLOCK_TOKENS..(block + 1) * BLOCK_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::CachedRows;

    /// A prompt of so many blocks, which begins with some number.
    fn prompt(first: u32, blocks: usize) -> Vec<u32> {
        (0..(blocks * BLOCK_TOKENS) as u32).map(|at| if at == 0 { first } else { at }).collect()
    }

    fn keep(prefixes: &mut Prefixes, adapter: usize, prompt: &[u32]) {
        let block = |range: Range<usize>| {
            let keys = prompt[range].iter().map(|id| *id as f32).collect();
            Some(CachedBlock::of(vec![CachedRows { keys, values: vec![adapter as f32] }]))
        };
        prefixes.keep(adapter, prompt, block);
    }

    fn found(prefixes: &mut Prefixes, adapter: usize, beginning: &[u32]) -> usize {
        prefixes.find(adapter, beginning).len()
    }

    #[test]
    fn whole_blocks_of_what_prompts_begin_with_are_found_by_their_adapter() {
        let mut prefixes = Prefixes::new(1000);
        let mut kept = prompt(7, 3);
        kept.push(1);
        keep(&mut prefixes, 0, &kept);
        assert_eq!(prefixes.tokens(), 3 * BLOCK_TOKENS);
        assert_eq!(found(&mut prefixes, 0, &kept), 3);
        assert_eq!(found(&mut prefixes, 1, &kept), 0);
        assert_eq!(found(&mut prefixes, 0, &kept[..2 * BLOCK_TOKENS + 5]), 2);
        let mut other = kept.clone();
        other[BLOCK_TOKENS] = 999;
        assert_eq!(found(&mut prefixes, 0, &other), 1);
        other[0] = 8;
        assert_eq!(found(&mut prefixes, 0, &other), 0);
        prefixes.forget(1);
        assert_eq!(found(&mut prefixes, 0, &kept), 3);
        prefixes.forget(0);
        assert_eq!((found(&mut prefixes, 0, &kept), prefixes.tokens()), (0, 0));
    }

    #[test]
    fn never_more_is_kept_than_may_be_and_the_longest_unused_goes_from_its_end() {
        let mut prefixes = Prefixes::new(4 * BLOCK_TOKENS + 1);
        let (first, second) = (prompt(1, 2), prompt(2, 2));
        keep(&mut prefixes, 0, &first);
        keep(&mut prefixes, 1, &second);
        assert_eq!(found(&mut prefixes, 0, &first), 2);
        keep(&mut prefixes, 0, &prompt(3, 1));
        assert_eq!(prefixes.tokens(), 4 * BLOCK_TOKENS);
        assert_eq!([found(&mut prefixes, 0, &first), found(&mut prefixes, 1, &second)], [2, 1]);
        keep(&mut prefixes, 0, &prompt(4, 9));
        assert_eq!(prefixes.tokens(), 4 * BLOCK_TOKENS);
        assert_eq!(found(&mut prefixes, 0, &prompt(4, 9)), 4);
        let mut nothing = Prefixes::new(BLOCK_TOKENS - 1);
        keep(&mut nothing, 0, &first);
        assert_eq!(found(&mut nothing, 0, &first), 0);
    }
}
