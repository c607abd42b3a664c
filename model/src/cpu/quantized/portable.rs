//! The kernel in plain loops.

use std::ops::Range;

use super::super::product::Element;
use super::rows::{QuantizedRows, RowBlocks};
use super::{BLOCK, Bits, GROUP, GroupBlock, Quantized, Sums, TILE};

/// The products of up to [`TILE`] rows with a group.
pub(super) fn tile(x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    let mut sums = [[0.0; GROUP]; TILE];
    for (row, sums) in rows.zip(&mut sums) {
        let RowBlocks { values, scales, starts } = x.row(row);
        for (index, block) in weight.group(group).enumerate() {
            let products = products(weight.bits, &values[index], block);
            for ((sum, product), scale) in sums.iter_mut().zip(products).zip(block.scales) {
                *sum += (product + starts[index]) as f32 * (scale.widen() * scales[index]);
            }
        }
    }
    sums
}

/// The products of a block with one of each row of a group.
fn products(bits: Bits, x: &[i8; BLOCK], block: GroupBlock<'_>) -> [i32; GROUP] {
    let mut sums = [0; GROUP];
    for (line, x) in block.lines.iter().zip(x.chunks_exact(BLOCK / bits.lines())) {
        for (sum, bytes) in sums.iter_mut().zip(line.0.chunks_exact(4)) {
            for (place, byte) in bytes.iter().enumerate() {
                *sum += match bits {
                    Bits::Eight => i32::from(*byte) * i32::from(x[place]),
                    Bits::Four => {
                        i32::from(byte & 15) * i32::from(x[place]) + i32::from(byte >> 4) * i32::from(x[4 + place])
                    }
                };
            }
        }
    }
    sums
}
