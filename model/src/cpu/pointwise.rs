//! What is done element by element or row by row: rotary embedding, gated activation, soft-cap, sums.

use half::bf16;

use super::instructions::multiversion;
use super::rounding::nearest;
use super::vector::{sigmoid, tanh};
use crate::ops::{Activation, Rotation};
use crate::random::DropoutMask;

multiversion! {
    /// Turns the heads of one row: elements `i` and `i + half` of each, by the row's cosines and sines.
    pub(super) fn rotate(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32], rotation: Rotation) {
        let half = cos.len();
        let sign = match rotation {
            Rotation::Forward => 1.0,
            Rotation::Backward => -1.0,
        };
        for head in row.chunks_exact_mut(head_dim) {
            let (low, high) = head.split_at_mut(half);
            for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                let sin = sign * sin;
                (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
            }
        }
    }
}

/// Of the tanh form of GELU: `0.5 x (1 + tanh(c · (x + 0.044715 x³)))`.
const GELU_FACTOR: f32 = 0.797_884_6;
const GELU_CUBE: f32 = 0.044_715;

#[inline(always)]
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + tanh(GELU_FACTOR * (x + GELU_CUBE * x * x * x)))
}

#[inline(always)]
fn gelu_slope(x: f32) -> f32 {
    let t = tanh(GELU_FACTOR * (x + GELU_CUBE * x * x * x));
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU_FACTOR * (1.0 + 3.0 * GELU_CUBE * x * x)
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// The gradients of gate and up, of SiLU.
#[inline(always)]
fn silu_backward(gate: f32, up: f32, dy: f32) -> (f32, f32) {
    let s = sigmoid(gate);
    (dy * up * s * (1.0 + gate * (1.0 - s)), dy * gate * s)
}

/// As [`silu_backward`], of GELU.
#[inline(always)]
fn gelu_backward(gate: f32, up: f32, dy: f32) -> (f32, f32) {
    (dy * up * gelu_slope(gate), dy * gelu(gate))
}

/// The bits of two numbers as bf16, the first in the lower half.
#[inline(always)]
fn rounded_pair(low: f32, high: f32) -> f32 {
    f32::from_bits(u32::from(nearest(low).to_bits()) | u32::from(nearest(high).to_bits()) << 16)
}

/// The numbers of [`rounded_pair`].
#[inline(always)]
fn widened_pair(word: f32) -> (f32, f32) {
    (f32::from_bits(word.to_bits() << 16), f32::from_bits(word.to_bits() & 0xffff_0000))
}

/// Runs a body with the function of an activation, so that there is a loop for each.
macro_rules! with_activation {
    ($activation:ident, $silu:ident or $gelu:ident as $name:ident, $body:expr) => {
        match $activation {
            Activation::Silu => {
                let $name = $silu;
                $body
            }
            Activation::GeluTanh => {
                let $name = $gelu;
                $body
            }
        }
    };
}

multiversion! {
    /// `y = activation(gate) ∘ up`.
    pub(super) fn gated(activation: Activation, gate: &[f32], up: &[f32], y: &mut [f32]) {
        with_activation!(activation, silu or gelu as activated, {
            y.iter_mut().zip(gate).zip(up).for_each(|((y, gate), up)| *y = activated(*gate) * up);
        })
    }
}

/// A row of [`gated_and_rounded`], all slices of one length.
pub(super) struct GatedRow<'a> {
    pub gate: &'a [f32],
    pub up: &'a [f32],
    /// Where gate and up go, both of an element in a word.
    pub words: &'a mut [f32],
    pub y: &'a mut [bf16],
}

multiversion! {
    /// [`gated`], rounded to bf16, and [`round_pairs`] of gate and up, of some rows: those of a part are short.
    pub(super) fn gated_and_rounded(activation: Activation, rows: &mut [GatedRow<'_>]) {
        with_activation!(activation, silu or gelu as activated, {
            for GatedRow { gate, up, words, y } in rows {
                let elements = y.iter_mut().zip(words.iter_mut()).zip(gate.iter().zip(*up));
                elements.for_each(|((y, word), (gate, up))| {
                    *y = nearest(activated(*gate) * up);
                    *word = rounded_pair(*gate, *up);
                });
            }
        })
    }
}

multiversion! {
    /// Rounds to bf16, elements of `low` into the lower halves of words and those of `high` into the upper ones.
    pub(super) fn round_pairs(low: &[f32], high: &[f32], words: &mut [f32]) {
        for ((word, low), high) in words.iter_mut().zip(low).zip(high) {
            *word = rounded_pair(*low, *high);
        }
    }
}

multiversion! {
    /// What [`round_pairs`] has rounded.
    pub(super) fn widen_pairs(words: &[f32], low: &mut [f32], high: &mut [f32]) {
        for ((word, low), high) in words.iter().zip(low).zip(high) {
            (*low, *high) = widened_pair(*word);
        }
    }
}

multiversion! {
    /// The gradients of [`gated`].
    pub(super) fn gated_backward(
        activation: Activation,
        gate: &[f32],
        up: &[f32],
        dy: &[f32],
        dgate: &mut [f32],
        dup: &mut [f32],
    ) {
        with_activation!(activation, silu_backward or gelu_backward as gradients, {
            let elements = gate.iter().zip(up).zip(dy).zip(dgate.iter_mut().zip(dup));
            elements.for_each(|(((gate, up), dy), (dgate, dup))| (*dgate, *dup) = gradients(*gate, *up, *dy));
        })
    }
}

/// A row of [`gated_backward_rounded`], all slices of one length.
pub(super) struct GatedGradientRow<'a> {
    /// Gate and up, both of an element in a word.
    pub words: &'a [f32],
    pub dy: &'a [f32],
    pub dgate: &'a mut [bf16],
    pub dup: &'a mut [bf16],
}

multiversion! {
    /// [`gated_backward`] of what [`round_pairs`] has rounded, the gradients rounded to bf16, of some rows.
    pub(super) fn gated_backward_rounded(activation: Activation, rows: &mut [GatedGradientRow<'_>]) {
        with_activation!(activation, silu_backward or gelu_backward as gradients, {
            for GatedGradientRow { words, dy, dgate, dup } in rows {
                let elements = words.iter().zip(*dy).zip(dgate.iter_mut().zip(dup.iter_mut()));
                elements.for_each(|((word, dy), (dgate, dup))| {
                    let (gate, up) = widened_pair(*word);
                    let (of_gate, of_up) = gradients(gate, up, *dy);
                    (*dgate, *dup) = (nearest(of_gate), nearest(of_up));
                });
            }
        })
    }
}

multiversion! {
    /// `x = cap · tanh(x / cap)`.
    pub(super) fn soft_cap(x: &mut [f32], cap: f32) {
        for x in x {
            *x = cap * tanh(*x / cap);
        }
    }
}

multiversion! {
    /// `y += x`.
    pub(super) fn add(x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x;
        }
    }
}

multiversion! {
    /// `z += x ∘ y`.
    pub(super) fn add_product(x: &[f32], y: &[f32], z: &mut [f32]) {
        for ((z, x), y) in z.iter_mut().zip(x).zip(y) {
            *z += x * y;
        }
    }
}

multiversion! {
    /// `y += scale · mask ∘ x` for a row of the mask, whose factors come to lie in `factors`.
    pub(super) fn add_dropped(
        mask: &DropoutMask<'_>,
        row: usize,
        scale: f32,
        factors: &mut [f32],
        x: &[f32],
        y: &mut [f32],
    ) {
        mask.factors(row, factors);
        for ((y, x), factor) in y.iter_mut().zip(x).zip(factors) {
            *y += scale * *factor * x;
        }
    }
}

multiversion! {
    /// The sum of squares, in f64 and in eight lanes.
    pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
        let mut lanes = [0.0f64; 8];
        let chunks = x.chunks_exact(8);
        let rest = chunks.remainder();
        for chunk in chunks {
            for (lane, &value) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(value) * f64::from(value);
            }
        }
        let of_rest: f64 = rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
        lanes.iter().sum::<f64>() + of_rest
    }
}

#[cfg(test)]
mod tests {
    use super::super::InstructionSet;
    use super::super::rounding::round;
    use super::*;

    fn values(count: usize, seed: f32) -> Vec<f32> {
        (0..count).map(|index| 6.0 * (seed * (index + 1) as f32).sin()).collect()
    }

    #[test]
    fn what_is_rounded_on_the_way_has_the_bits_of_what_is_rounded_after() {
        for set in InstructionSet::ALL.into_iter().filter(|set| set.is_available()) {
            for (count, activation) in [1, 15, 16, 48, 97]
                .into_iter()
                .flat_map(|count| [Activation::Silu, Activation::GeluTanh].map(|kind| (count, kind)))
            {
                let [gate, up, dy] = [0.3, 0.7, 1.1].map(|seed| values(count, seed));
                let (mut y, mut expected) = (vec![0.0; count], vec![bf16::ZERO; count]);
                gated(set, activation, &gate, &up, &mut y);
                round(set, &y, &mut expected);
                let (mut words, mut expected_words) = (vec![0.0; count], vec![0.0; count]);
                round_pairs(set, &gate, &up, &mut expected_words);
                let mut rounded = vec![bf16::ZERO; count];
                let row = GatedRow { gate: &gate, up: &up, words: &mut words, y: &mut rounded };
                gated_and_rounded(set, activation, &mut [row]);
                assert_eq!((&rounded, &words), (&expected, &expected_words), "{count} {activation:?} {}", set.name());

                let [mut gate, mut up] = [gate, up];
                widen_pairs(set, &words, &mut gate, &mut up);
                let [mut dgate, mut dup] = [(); 2].map(|()| vec![0.0; count]);
                gated_backward(set, activation, &gate, &up, &dy, &mut dgate, &mut dup);
                let expected = [dgate, dup].map(|gradient| {
                    round(set, &gradient, &mut rounded);
                    rounded.clone()
                });
                let [mut dgate, mut dup] = [(); 2].map(|()| vec![bf16::ZERO; count]);
                let row = GatedGradientRow { words: &words, dy: &dy, dgate: &mut dgate, dup: &mut dup };
                gated_backward_rounded(set, activation, &mut [row]);
                assert_eq!([dgate, dup], expected, "{count} {activation:?} {}", set.name());
            }
        }
    }
}
