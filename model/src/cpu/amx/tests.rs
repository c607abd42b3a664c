//! The emulation against what is known of the instruction and, where the machine has it, against the instruction.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::emulation::{Words, multiply};
use super::{Emulated, Registers, SIDE, Square, Strip, Strips, TILE, Tiles, permission};
use crate::cpu::InstructionSet;
use crate::cpu::rounding::nearest;

/// A word of two values.
fn word(first: f32, second: f32) -> u32 {
    u32::from(nearest(first).to_bits()) | u32::from(nearest(second).to_bits()) << 16
}

/// The first sum of tiles of which only the first row and column have words.
fn first_sum(sum: f32, left: &[u32], right: &[u32]) -> f32 {
    let (mut lefts, mut rights): (Words, Words) = ([[0; SIDE]; SIDE], [[0; SIDE]; SIDE]);
    for (step, (left, right)) in left.iter().zip(right).enumerate() {
        (lefts[0][step], rights[step][0]) = (*left, *right);
    }
    let mut sums = [[0.0; SIDE]; SIDE];
    sums[0][0] = sum;
    multiply(&mut sums, &lefts, &rights);
    assert!(sums.iter().flatten().skip(1).all(|sum| *sum == 0.0), "other sums");
    sums[0][0]
}

#[test]
fn a_sum_is_two_chains_that_are_added_last() {
    // In one chain, or added to the sum first, the ones would be lost beside 2²⁴.
    let large = f32::from(1u16 << 12);
    let one = [word(1.0, 0.0); 2];
    assert_eq!(first_sum(16_777_216.0, &one, &one), 16_777_218.0);
    let (left, right) = ([word(large, 1.0), word(0.0, 1.0)], [word(large, 1.0), word(0.0, 1.0)]);
    assert_eq!(first_sum(0.0, &left, &right), 16_777_218.0);
}

#[test]
fn denormal_numbers_are_zeros() {
    let least = f32::MIN_POSITIVE;
    assert_eq!(first_sum(least / 2.0, &[], &[]).to_bits(), 0, "a sum");
    assert_eq!(first_sum(0.0, &[word(least / 2.0, 0.0)], &[word(1.0, 0.0)]).to_bits(), 0, "an operand");
    assert_eq!(first_sum(0.0, &[word(least, 0.0)], &[word(0.5, 0.0)]).to_bits(), 0, "a product");
    assert_eq!(first_sum(0.0, &[word(least, 0.0)], &[word(1.0, 0.0)]), least);
}

/// Words of any bits but those that are not numbers.
fn words(count: usize, seed: u32) -> Vec<u32> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let bits = state >> 16;
        if bits >> 7 & 0xff == 0xff { bits & 0x807f } else { bits }
    };
    (0..count).map(|_| next() | next() << 16).collect()
}

/// The bits of the sums of a square.
unsafe fn square<T: Tiles>(seed: u32, strides: [usize; 2], between: usize, [go_on, split]: [bool; 2]) -> Vec<u32> {
    const STEPS: usize = 3;
    // The rests of the left operand lie behind its values, those of the right one before them.
    let second = 2 * STEPS * TILE;
    let (left, right) = (words(4 * STEPS * TILE, seed), words(4 * STEPS * TILE, seed + 1));
    // Some that are none lie between their rows.
    let row = 2 * SIDE + between;
    let mut sums: Vec<f32> = (0..2 * SIDE * row).map(|index| index as f32 * 0.37).collect();
    let [left_stride, right_stride] = strides;
    // SAFETY: there are as many tiles and sums; the caller vouches for the machine.
    unsafe {
        T::begin();
        T::square(&Square {
            left: Strips::packed(left.as_ptr(), left_stride),
            right: Strips::packed(right.as_ptr().wrapping_add(second), right_stride),
            rests: split.then(|| [left.as_ptr().wrapping_add(second), right.as_ptr()]),
            steps: STEPS,
            sums: sums.as_mut_ptr(),
            sums_row: row * size_of::<f32>(),
            go_on,
        });
        T::end();
    }
    sums.into_iter().map(f32::to_bits).collect()
}

/// A square of operands with rests is the three squares of their matrices, a step after the other.
#[test]
fn of_operands_with_rests_three_products_are_summed() {
    if !InstructionSet::AmxEmulated.is_available() {
        return eprintln!("skipped: the emulation needs AVX-512 with bf16");
    }
    let operands = [words(4 * TILE, 1), words(4 * TILE, 3)];
    let strips = |operand: usize, rests: usize| Strips::packed(operands[operand][rests * 2 * TILE..].as_ptr(), TILE);
    let run = |products: &[(usize, usize)], rests: Option<[*const u32; 2]>| {
        let mut sums = vec![1.0f32; 4 * TILE];
        for (left, right) in products {
            // SAFETY: there are as many tiles and sums, and the machine has the vectors.
            unsafe {
                Emulated::square(&Square {
                    left: strips(0, *left),
                    right: strips(1, *right),
                    rests,
                    steps: 1,
                    sums: sums.as_mut_ptr(),
                    sums_row: 2 * SIDE * size_of::<f32>(),
                    go_on: true,
                });
            }
        }
        sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let rests = [strips(0, 1).first, strips(1, 1).first];
    assert_eq!(run(&[(0, 0)], Some(rests)), run(&[(1, 0), (0, 0), (0, 1)], None));
}

/// The bits of the first tile of a square, and of a strip of the same tiles.
unsafe fn first_tile_and_strip<T: Tiles>(seed: u32, go_on: bool) -> [Vec<u32>; 2] {
    const STEPS: usize = 5;
    // Left tiles where they lie: rows of all steps.
    let row = STEPS * SIDE * size_of::<u32>();
    let (left, right) = (words(2 * STEPS * TILE, seed), words(2 * STEPS * TILE, seed + 1));
    let before = |index: usize| index as f32 * 0.37;
    let mut square: Vec<f32> = (0..4 * TILE).map(before).collect();
    let mut strip: Vec<f32> = (0..TILE).map(|index| before(index / SIDE * 2 * SIDE + index % SIDE)).collect();
    let step = SIDE * size_of::<u32>();
    let rows = Strips { first: left.as_ptr(), next: SIDE * row, row, step };
    // SAFETY: there are as many tiles and sums; the caller vouches for the machine.
    unsafe {
        T::begin();
        T::square(&Square {
            left: rows,
            right: Strips::packed(right.as_ptr(), STEPS * TILE),
            rests: None,
            steps: STEPS,
            sums: square.as_mut_ptr(),
            sums_row: 2 * SIDE * size_of::<f32>(),
            go_on,
        });
        T::strip(&Strip {
            left: left.as_ptr(),
            left_row: row,
            left_step: step,
            right: right.as_ptr(),
            steps: STEPS,
            ahead: left.as_ptr(),
            sums: strip.as_mut_ptr(),
            go_on,
        });
        T::end();
    }
    let first = square.chunks(2 * SIDE).take(SIDE).flat_map(|row| &row[..SIDE]).map(|sum| sum.to_bits()).collect();
    [first, strip.into_iter().map(f32::to_bits).collect()]
}

#[test]
fn a_strip_has_the_bits_of_a_square() {
    if !InstructionSet::AmxEmulated.is_available() {
        return eprintln!("skipped: the emulation needs AVX-512 with bf16");
    }
    for (seed, go_on) in (0..20).flat_map(|seed| [(seed, false), (seed, true)]) {
        // SAFETY: the machine has the vectors.
        let [square, strip] = unsafe { first_tile_and_strip::<Emulated>(seed, go_on) };
        assert_eq!(square, strip, "seed {seed}");
        if permission().is_ok() {
            // SAFETY: the process has the permission.
            let in_registers = unsafe { first_tile_and_strip::<Registers>(seed, go_on) };
            assert_eq!(in_registers, [square, strip], "seed {seed}, in registers");
        }
    }
}

#[test]
fn the_emulation_has_the_bits_of_the_registers() {
    if let Err(refused) = permission() {
        return eprintln!("skipped: {refused}");
    }
    assert!(InstructionSet::Amx.is_available(), "permission, and vectors");
    for seed in 0..200 {
        for (strides, between, go_on) in
            [([3 * TILE, 3 * TILE], 0, false), ([0, 3 * TILE], 7, true), ([3 * TILE, 0], 0, true), ([0, 0], 48, false)]
        {
            for how in [[go_on, false], [go_on, true]] {
                // SAFETY: the process has the permission, and the machine the vectors.
                let (found, expected) = unsafe {
                    (square::<Emulated>(seed, strides, between, how), square::<Registers>(seed, strides, between, how))
                };
                assert_eq!(found, expected, "seed {seed} {how:?}");
            }
        }
    }
}
