//! From scores to weights and from the weights' gradients to those of the scores, for a block that lies with its rows
//! in lanes, or its keys.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::mask::within;
use super::{AttentionMask, KEYS, ROWS, Scale};
use crate::cpu::simd::Vector;

/// Below every score, and far enough from minus infinity to be subtracted from itself.
const LOWEST: f32 = -1e30;
/// Lanes of the widest vector.
const WIDEST: usize = 16;

/// A block of rows and a block of keys.
pub(super) struct Block<'a> {
    pub mask: &'a AttentionMask,
    pub rows: Range<usize>,
    pub keys: Range<usize>,
    /// What becomes of a score.
    pub scale: Scale,
}

impl Block<'_> {
    /// Whether nothing of it is hidden.
    fn is_full(&self) -> bool {
        self.mask.all_seen(&self.rows, &self.keys)
    }

    /// Columns of the block whose rows see some of the block's keys, widened to whole vectors.
    pub(super) fn columns<V: Vector>(&self, keys: Range<usize>) -> Range<usize> {
        let keys = self.keys.start + keys.start..self.keys.start + keys.end;
        let seeing = within(self.mask.rows_seeing(&keys), &self.rows);
        if seeing.is_empty() {
            return 0..0;
        }
        seeing.start / V::LANES * V::LANES..seeing.end.next_multiple_of(V::LANES)
    }

    /// Rows of the block that see some of the block's keys.
    pub(super) fn seeing(&self, keys: Range<usize>) -> Range<usize> {
        let keys = self.keys.start + keys.start..self.keys.start + keys.end;
        within(self.mask.rows_seeing(&keys), &self.rows)
    }

    /// Keys of the block that some of the block's rows see.
    pub(super) fn seen(&self, rows: Range<usize>) -> Range<usize> {
        within(self.mask.keys(&(self.rows.start + rows.start..self.rows.start + rows.end)), &self.keys)
    }

    /// The vectors of the block: first column, and keys that one of its rows sees.
    fn vectors<V: Vector>(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let count = self.rows.len();
        (0..count).step_by(V::LANES).map(move |first| (first, self.seen(first..count.min(first + V::LANES))))
    }

    /// Lanes of a vector that see a key.
    fn lanes<V: Vector>(&self, first: usize, key: usize) -> Range<usize> {
        let (row, key) = (self.rows.start + first, self.keys.start + key);
        within(self.mask.rows_seeing(&(key..key + 1)), &(row..row + V::LANES))
    }
}

/// What a row keeps from block to block.
#[derive(Clone, Copy)]
pub(super) struct Running {
    /// The largest score so far, per row.
    pub largest: *mut f32,
    /// The sum of the exponentials so far, relative to it.
    pub total: *mut f32,
    /// Factor that takes what was summed before this block to the largest score with it.
    pub correction: *mut f32,
}

impl Running {
    /// As before the first block.
    ///
    /// # Safety
    /// The machine has the instructions, and the pointers are those of buffers for a block.
    #[inline(always)]
    pub(super) unsafe fn begin<V: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe {
            for row in (0..ROWS).step_by(V::LANES) {
                V::splat(LOWEST).store(self.largest.add(row));
                V::splat(0.0).store(self.total.add(row));
            }
        }
    }
}

/// Turns the scores of a block into exponentials relative to the largest score so far; zero where a row does not see.
/// Whether that changed for some row.
///
/// # Safety
/// The machine has the instructions, and the pointers are those of buffers for a block.
#[inline(always)]
pub(super) unsafe fn exponentials<V: Vector>(block: &Block<'_>, scores: *mut f32, running: Running) -> bool {
    // SAFETY: as the caller vouches.
    unsafe {
        if block.is_full() {
            exponentials_of::<V, true>(block, scores, running)
        } else {
            exponentials_of::<V, false>(block, scores, running)
        }
    }
}

#[inline(always)]
unsafe fn exponentials_of<V: Vector, const FULL: bool>(block: &Block<'_>, scores: *mut f32, running: Running) -> bool {
    let mut changed = false;
    // SAFETY: the caller vouches for buffers and instructions; columns and keys are those of a block.
    unsafe {
        let (zero, lowest) = (V::splat(0.0), V::splat(LOWEST));
        // With a soft-cap the first loop leaves nothing to be scaled.
        let factor = V::splat(if block.scale.cap.is_some() { 1.0 } else { block.scale.factor });
        for (first, keys) in block.vectors::<V>() {
            let place = |key: usize| scores.add(key * ROWS + first);
            let seen = |key: usize, value: V, other: V| {
                if FULL { value } else { value.keep(block.lanes::<V>(first, key), other) }
            };
            if let Scale { factor, cap: Some(cap) } = block.scale {
                let (factor, cap) = (V::splat(factor), V::splat(cap));
                for key in keys.clone() {
                    tangent(V::load(place(key)).mul(factor)).mul(cap).store(place(key));
                }
            }
            let before = V::load(running.largest.add(first));
            // Four at a time, not to wait for one another. A key's place in the block decides which sum it is added
            // to, and when: a row's total is the same bits whatever other rows, and keys that it does not see, are
            // beside it.
            let fours = || (keys.start / 4 * 4..keys.end).step_by(4);
            let is_whole = |four: usize| keys.start <= four && four + 4 <= keys.end;
            let mut largest = [before; 4];
            for four in fours() {
                for (key, largest) in (four..).zip(&mut largest) {
                    if is_whole(four) || keys.contains(&key) {
                        *largest = seen(key, V::load(place(key)).mul(factor), lowest).max(*largest);
                    }
                }
            }
            let largest = largest[0].max(largest[1]).max(largest[2].max(largest[3]));
            let below = zero.sub(largest);
            let mut totals = [zero; 4];
            for four in fours() {
                for (key, total) in (four..).zip(&mut totals) {
                    if is_whole(four) || keys.contains(&key) {
                        let weight = seen(key, V::load(place(key)).mul_add(factor, below).exp2(), zero);
                        weight.store(place(key));
                        *total = total.add(weight);
                    }
                }
            }
            for key in (0..keys.start).chain(keys.end..block.keys.len()) {
                zero.store(place(key));
            }
            let total = totals[0].add(totals[1]).add(totals[2].add(totals[3]));
            let correction = before.sub(largest).exp2();
            V::load(running.total.add(first)).mul_add(correction, total).store(running.total.add(first));
            correction.store(running.correction.add(first));
            largest.store(running.largest.add(first));
            changed |= largest.differs(before);
        }
    }
    changed
}

/// As [`exponentials`], to the bit, of scores that lie with the keys in lanes: rows of [`KEYS`].
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn exponentials_of_rows<V: Vector>(block: &Block<'_>, scores: *mut f32, running: Running) -> bool {
    let (mut largest, mut totals) = ([LOWEST; ROWS], [0.0; ROWS]);
    // SAFETY: the caller vouches for buffers and instructions; rows and keys are those of a block.
    unsafe {
        let (zero, lowest) = (V::splat(0.0), V::splat(LOWEST));
        let factor = V::splat(if block.scale.cap.is_some() { 1.0 } else { block.scale.factor });
        for row in 0..block.rows.len() {
            let seen = block.seen(row..row + 1);
            let scores = scores.add(row * KEYS);
            let vectors = || (seen.start / V::LANES * V::LANES..seen.end).step_by(V::LANES);
            // Lanes of a vector that the row sees.
            let lanes = |first: usize| seen.start.saturating_sub(first)..V::LANES.min(seen.end - first);
            if let Scale { factor, cap: Some(cap) } = block.scale {
                let (factor, cap) = (V::splat(factor), V::splat(cap));
                for first in vectors() {
                    tangent(V::load(scores.add(first)).mul(factor)).mul(cap).store(scores.add(first));
                }
            }
            let mut most = V::splat(*running.largest.add(row));
            for first in vectors() {
                most = V::load(scores.add(first)).mul(factor).keep(lanes(first), lowest).max(most);
            }
            let mut of_lanes = [LOWEST; WIDEST];
            most.store(of_lanes.as_mut_ptr());
            largest[row] = of_lanes.into_iter().fold(LOWEST, |most, lane| if lane > most { lane } else { most });
            let below = zero.sub(V::splat(largest[row]));
            let mut weights = [0.0; KEYS];
            for first in vectors() {
                let weight = V::load(scores.add(first)).mul_add(factor, below).exp2().keep(lanes(first), zero);
                weight.store(weights.as_mut_ptr().add(first));
            }
            // A key's place in the block decides which sum it is added to, and when.
            let mut sums = [0.0; 4];
            for four in weights.as_chunks::<4>().0 {
                sums.iter_mut().zip(four).for_each(|(sum, weight)| *sum += weight);
            }
            totals[row] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            std::ptr::copy_nonoverlapping(weights.as_ptr(), scores, KEYS);
        }
        let mut changed = false;
        for first in (0..block.rows.len()).step_by(V::LANES) {
            let (before, largest) = (V::load(running.largest.add(first)), V::load(largest.as_ptr().add(first)));
            let correction = before.sub(largest).exp2();
            let total = V::load(totals.as_ptr().add(first));
            V::load(running.total.add(first)).mul_add(correction, total).store(running.total.add(first));
            correction.store(running.correction.add(first));
            largest.store(running.largest.add(first));
            changed |= largest.differs(before);
        }
        changed
    }
}

/// What the backward knows of each row.
#[derive(Clone, Copy)]
pub(super) struct Known {
    /// The log of base 2 of the summed exponentials.
    pub logarithm: *const f32,
    /// The product of the output with its gradient.
    pub along: *const f32,
    /// Factor on the product of a query with a key.
    pub scale: f32,
}

/// Turns the scores of a block into weights, and the gradients of those into gradients of the products of queries with
/// keys.
///
/// # Safety
/// The machine has the instructions, and the pointers are those of buffers for a block.
#[inline(always)]
pub(super) unsafe fn weights_and_slopes<V: Vector>(
    block: &Block<'_>,
    scores: *mut f32,
    slopes: *mut f32,
    known: Known,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        match (block.is_full(), block.scale.cap.is_some()) {
            (true, false) => weights_and_slopes_of::<V, true, false>(block, scores, slopes, known),
            (false, false) => weights_and_slopes_of::<V, false, false>(block, scores, slopes, known),
            (true, true) => weights_and_slopes_of::<V, true, true>(block, scores, slopes, known),
            (false, true) => weights_and_slopes_of::<V, false, true>(block, scores, slopes, known),
        }
    }
}

#[inline(always)]
unsafe fn weights_and_slopes_of<V: Vector, const FULL: bool, const CAP: bool>(
    block: &Block<'_>,
    scores: *mut f32,
    slopes: *mut f32,
    known: Known,
) {
    // SAFETY: the caller vouches for buffers and instructions; columns and keys are those of a block.
    unsafe {
        let (zero, one, scale) = (V::splat(0.0), V::splat(1.0), V::splat(known.scale));
        let (factor, cap) = (V::splat(block.scale.factor), V::splat(block.scale.cap.unwrap_or(0.0)));
        for (first, keys) in block.vectors::<V>() {
            let below = zero.sub(V::load(known.logarithm.add(first)));
            let against = zero.sub(V::load(known.along.add(first)).mul(scale));
            for key in keys.clone() {
                let (score, slope) = (scores.add(key * ROWS + first), slopes.add(key * ROWS + first));
                let seen = |value: V| if FULL { value } else { value.keep(block.lanes::<V>(first, key), zero) };
                let from_mean = V::load(slope).mul_add(scale, against);
                let (weight, gradient) = if CAP {
                    let t = tangent(V::load(score).mul(factor));
                    let weight = t.mul_add(cap, below).exp2();
                    (weight, weight.mul(from_mean).mul(one.sub(t.mul(t))))
                } else {
                    let weight = V::load(score).mul_add(factor, below).exp2();
                    (weight, weight.mul(from_mean))
                };
                seen(weight).store(score);
                seen(gradient).store(slope);
            }
            for key in (0..keys.start).chain(keys.end..block.keys.len()) {
                zero.store(scores.add(key * ROWS + first));
                zero.store(slopes.add(key * ROWS + first));
            }
        }
    }
}

/// The hyperbolic tangent.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn tangent<V: Vector>(x: V) -> V {
    // SAFETY: as the caller vouches.
    unsafe {
        let one = V::splat(1.0);
        let power = x.mul(V::splat(2.0 * std::f32::consts::LOG2_E)).exp2();
        one.sub(V::splat(2.0).div(power.add(one)))
    }
}

const _: () = assert!(ROWS.is_multiple_of(16) && KEYS > 0, "a block is whole vectors of any set");
