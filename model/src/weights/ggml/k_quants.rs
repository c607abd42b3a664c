//! ggml's K formats: blocks of 256 values, whose sub-blocks have scales that are quantised themselves.
//!
//! They have the bytes of ggml's own library, whose search is this one, in the same order of sums and without fused
//! products: it is made for all sub-blocks of a block at once, each in a lane of its own. Source: `make_qkx2_quants`,
//! `make_qx_quants` and `quantize_row_q{4,5,6}_K_ref` of ggml's `ggml-quants.c`.

use half::f16;

use crate::weights::{BLOCK, BlockDecoder, ROUND, f16_at, rounded};

/// Values of a block.
pub(super) const SUPER_BLOCK: usize = 256;

/// Values of a sub-block of `q4_K` and `q5_K`, and of one of `q6_K`.
const SUB_BLOCK: usize = 32;
const SMALL_SUB_BLOCK: usize = 16;

/// Sub-blocks of a block of `q4_K` and `q5_K`, and of one of `q6_K`.
const SUB_BLOCKS: usize = SUPER_BLOCK / SUB_BLOCK;
const SMALL_SUB_BLOCKS: usize = SUPER_BLOCK / SMALL_SUB_BLOCK;

/// A number of each sub-block.
type Row = [f32; SUB_BLOCKS];
type WideRow = [f32; SMALL_SUB_BLOCKS];

/// Computes one, lane by lane: a loop that becomes vectors.
#[inline(always)]
fn row(of: impl Fn(usize) -> f32) -> Row {
    let mut row = [0.0; SUB_BLOCKS];
    row.iter_mut().enumerate().for_each(|(lane, value)| *value = of(lane));
    row
}

/// The values of a block by their places in the sub-blocks.
#[inline(always)]
fn by_place<const LANES: usize, const PLACES: usize>(x: &[f32; SUPER_BLOCK]) -> [[f32; LANES]; PLACES] {
    let mut rows = [[0.0; LANES]; PLACES];
    for (at, row) in rows.iter_mut().enumerate() {
        row.iter_mut().enumerate().for_each(|(lane, value)| *value = x[lane * PLACES + at]);
    }
    rows
}

/// Scales below this are none.
const LEAST_SCALE: f32 = 1e-15;

/// The integer nearest to a number, and to a product.
#[inline(always)]
fn nearest(x: f32) -> i32 {
    rounded(x + ROUND)
}

#[inline(always)]
fn nearest_product(x: f32, y: f32) -> i32 {
    rounded(x * y + ROUND)
}

/// How `q4_K` and `q5_K` look for a scale: numbers up to `most`, the first of the inverse scales tried, and how many
/// follow, a tenth apart.
struct Search {
    most: i32,
    first: f32,
    steps: i32,
}

const SEARCH_Q4: Search = Search { most: 15, first: -1.0, steps: 20 };
const SEARCH_Q5: Search = Search { most: 31, first: -0.5, steps: 15 };

impl Search {
    /// Of each sub-block the numbers for value ≈ scale · number − offset, with the scale and the offset: the least sum
    /// of squares, weighted, of those tried.
    #[inline(always)]
    fn run(&self, x: &[Row; SUB_BLOCK], numbers: &mut [Row; SUB_BLOCK]) -> (Row, Row) {
        let mut squares = [0.0; SUB_BLOCKS];
        for x in x {
            (0..SUB_BLOCKS).for_each(|lane| squares[lane] += x[lane] * x[lane]);
        }
        let typical = squares.map(|sum| (sum / SUB_BLOCK as f32).sqrt());
        let mut weights = [[0.0; SUB_BLOCKS]; SUB_BLOCK];
        for (w, x) in weights.iter_mut().zip(x) {
            (0..SUB_BLOCKS).for_each(|lane| w[lane] = typical[lane] + x[lane].abs());
        }
        let (mut least, mut most) = (x[0], x[0]);
        let (mut sum_w, mut sum_x) = (weights[0], row(|lane| weights[0][lane] * x[0][lane]));
        for (x, w) in x.iter().zip(&weights).skip(1) {
            for lane in 0..SUB_BLOCKS {
                least[lane] = if x[lane] < least[lane] { x[lane] } else { least[lane] };
                most[lane] = if x[lane] > most[lane] { x[lane] } else { most[lane] };
                sum_w[lane] += w[lane];
                sum_x[lane] += w[lane] * x[lane];
            }
        }
        let mut least = least.map(|least| if least > 0.0 { 0.0 } else { least });

        // In a sub-block of one value, which is no greater than zero, all numbers and the scale are zero by an inverse
        // that is infinite, and nothing that is tried is better.
        let mut tried = [[0.0; SUB_BLOCKS]; SUB_BLOCK];
        let inverse = row(|lane| self.most as f32 / (most[lane] - least[lane]));
        let mut scale = inverse.map(|inverse| 1.0 / inverse);
        self.numbers_by(&inverse, &least, x, &mut tried);
        let mut smallest_error = error_of(&tried, &scale, &least, x, &weights);
        // What the numbers of the best are made by.
        let mut best = (inverse, least);
        for step in 0..=self.steps {
            // From the least value of the best so far, which is no longer that of the block.
            let shifted = self.first + 0.1 * step as f32 + self.most as f32;
            let inverse = row(|lane| shifted / (most[lane] - least[lane]));
            self.numbers_by(&inverse, &least, x, &mut tried);
            let (mut sum_l, mut sum_l2, mut sum_xl) = ([0.0; SUB_BLOCKS], [0.0; SUB_BLOCKS], [0.0; SUB_BLOCKS]);
            for ((number, x), w) in tried.iter().zip(x).zip(&weights) {
                for lane in 0..SUB_BLOCKS {
                    let weighted = w[lane] * number[lane];
                    sum_l[lane] += weighted;
                    sum_l2[lane] += weighted * number[lane];
                    sum_xl[lane] += weighted * x[lane];
                }
            }
            let determinant = row(|lane| sum_w[lane] * sum_l2[lane] - sum_l[lane] * sum_l[lane]);
            let fitted = row(|lane| (sum_w[lane] * sum_xl[lane] - sum_x[lane] * sum_l[lane]) / determinant[lane]);
            let below = row(|lane| (sum_l2[lane] * sum_x[lane] - sum_l[lane] * sum_xl[lane]) / determinant[lane]);
            let alone = row(|lane| sum_xl[lane] / sum_l2[lane]);
            let its_scale = row(|lane| if below[lane] > 0.0 { alone[lane] } else { fitted[lane] });
            let its_least = row(|lane| if below[lane] > 0.0 { 0.0 } else { below[lane] });
            let error = error_of(&tried, &its_scale, &its_least, x, &weights);
            let error = row(|lane| if determinant[lane] > 0.0 { error[lane] } else { f32::INFINITY });
            let better = |its: &Row, old: &Row| {
                row(|lane| if error[lane] < smallest_error[lane] { its[lane] } else { old[lane] })
            };
            best = (better(&inverse, &best.0), better(&least, &best.1));
            scale = better(&its_scale, &scale);
            least = better(&its_least, &least);
            smallest_error = better(&error, &smallest_error);
        }
        self.numbers_by(&best.0, &best.1, x, numbers);
        (scale, least.map(|least| -least))
    }

    #[inline(always)]
    fn numbers_by(&self, inverse: &Row, least: &Row, x: &[Row; SUB_BLOCK], numbers: &mut [Row; SUB_BLOCK]) {
        for (number, x) in numbers.iter_mut().zip(x) {
            for lane in 0..SUB_BLOCKS {
                number[lane] = nearest_product(inverse[lane], x[lane] - least[lane]).clamp(0, self.most) as f32;
            }
        }
    }

    /// A block's two scales and its quantised scales and offsets in 16 bytes, and the numbers by these.
    #[inline(always)]
    fn block(&self, x: &[f32; SUPER_BLOCK], header: &mut [u8], numbers: &mut [u8; SUPER_BLOCK]) {
        let mut found = [[0.0; SUB_BLOCKS]; SUB_BLOCK];
        let (scales, offsets) = self.run(&by_place(x), &mut found);
        for (at, number) in numbers.iter_mut().enumerate() {
            *number = found[at % SUB_BLOCK][at / SUB_BLOCK] as u8;
        }
        let subs: &[[f32; SUB_BLOCK]] = x.as_chunks().0;
        let largest = |of: &Row| of.iter().fold(0.0f32, |most, &x| if x > most { x } else { most });
        let (scale, offset) = (largest(&scales), largest(&offsets));
        let six_bits = |x: f32, largest: f32| {
            let inverse = if largest > 0.0 { 63.0 / largest } else { 0.0 };
            (nearest_product(inverse, x) as u8).min(63)
        };
        let (halves, packed) = header.split_at_mut(4);
        halves[..2].copy_from_slice(&f16::from_f32(scale / 63.0).to_le_bytes());
        halves[2..].copy_from_slice(&f16::from_f32(offset / 63.0).to_le_bytes());
        packed.fill(0);
        for j in 0..SUB_BLOCKS {
            let (s, m) = (six_bits(scales[j], scale), six_bits(offsets[j], offset));
            if j < 4 {
                packed[j] = s;
                packed[j + 4] = m;
            } else {
                packed[j + 4] = s & 15 | (m & 15) << 4;
                packed[j - 4] |= (s >> 4) << 6;
                packed[j] |= (m >> 4) << 6;
            }
        }
        for (j, sub) in subs.iter().enumerate() {
            let (scale, offset) = sub_block(header, j);
            if scale == 0.0 {
                continue;
            }
            for (number, x) in numbers[j * SUB_BLOCK..].iter_mut().zip(sub) {
                *number = nearest((x + offset) / scale).clamp(0, self.most) as u8;
            }
        }
    }
}

/// The weighted squares of what numbers are off, added up.
#[inline(always)]
fn error_of(
    numbers: &[Row; SUB_BLOCK],
    scale: &Row,
    least: &Row,
    x: &[Row; SUB_BLOCK],
    weights: &[Row; SUB_BLOCK],
) -> Row {
    let mut sums = [0.0; SUB_BLOCKS];
    for ((number, x), w) in numbers.iter().zip(x).zip(weights) {
        for lane in 0..SUB_BLOCKS {
            let error = scale[lane] * number[lane] + least[lane] - x[lane];
            sums[lane] += w[lane] * (error * error);
        }
    }
    sums
}

/// Scale and offset of a sub-block, as they are quantised: 6 bits each.
#[inline(always)]
fn quantised_scales(header: &[u8], j: usize) -> [u8; 2] {
    let s = &header[4..16];
    if j < 4 {
        [s[j] & 63, s[j + 4] & 63]
    } else {
        [s[j + 4] & 15 | (s[j - 4] >> 6) << 4, s[j + 4] >> 4 | (s[j] >> 6) << 4]
    }
}

/// Scale and offset of a sub-block.
#[inline(always)]
fn sub_block(header: &[u8], j: usize) -> (f32, f32) {
    let [scale, offset] = quantised_scales(header, j);
    (f16_at(header, 0) * f32::from(scale), f16_at(header, 2) * f32::from(offset))
}

/// Two sub-blocks to 32 bytes: the lower halves are the first's.
#[inline(always)]
fn pack_nibbles(numbers: &[u8; SUPER_BLOCK], bytes: &mut [u8]) {
    for (pair, bytes) in numbers.chunks(2 * SUB_BLOCK).zip(bytes.chunks_mut(SUB_BLOCK)) {
        let (first, second) = pair.split_at(SUB_BLOCK);
        for ((byte, first), second) in bytes.iter_mut().zip(first).zip(second) {
            *byte = first & 15 | (second & 15) << 4;
        }
    }
}

#[inline(always)]
pub(super) fn encode_q4_k(x: &[f32; SUPER_BLOCK], block: &mut [u8]) {
    let mut numbers = [0; SUPER_BLOCK];
    let (header, nibbles) = block.split_at_mut(16);
    SEARCH_Q4.block(x, header, &mut numbers);
    pack_nibbles(&numbers, nibbles);
}

#[inline(always)]
pub(super) fn encode_q5_k(x: &[f32; SUPER_BLOCK], block: &mut [u8]) {
    let mut numbers = [0; SUPER_BLOCK];
    let (header, rest) = block.split_at_mut(16);
    let (fifth_bits, nibbles) = rest.split_at_mut(SUB_BLOCK);
    SEARCH_Q5.block(x, header, &mut numbers);
    pack_nibbles(&numbers, nibbles);
    fifth_bits.fill(0);
    for (at, number) in numbers.iter().enumerate() {
        fifth_bits[at % SUB_BLOCK] |= (number >> 4) << (at / SUB_BLOCK);
    }
}

/// The blocks of `q4_K`, of `q5_K` and of `q6_K`, as products read them: 32 values at a time.
pub(crate) struct Q4K;
pub(crate) struct Q5K;
pub(crate) struct Q6K;

/// A K format as products of integers read it: numbers and quantised scales, not multiplied with one another.
pub(crate) trait QuantisedScales: BlockDecoder {
    /// The bits, in f16, of what the quantised scales and the quantised offsets of a block are multiplied with. `q6_K`
    /// has no offsets.
    fn wholes(block: &[u8]) -> [u16; 2];

    /// Of a part of a block its quantised scale and offset, or of `q6_K` the quantised scales of its halves.
    fn scales(block: &[u8], part: usize) -> [i8; 2];

    /// The numbers of a part of a block as they are stored, not negative.
    fn numbers(block: &[u8], part: usize) -> [u8; BLOCK];
}

/// The scales and the offsets of the sub-blocks of a block.
#[derive(Clone, Copy, Default)]
pub(crate) struct WithOffsets {
    scales: Row,
    offsets: Row,
}

impl WithOffsets {
    #[inline(always)]
    fn of(block: &[u8]) -> Self {
        let mut found = Self::default();
        for (j, (scale, offset)) in found.scales.iter_mut().zip(&mut found.offsets).enumerate() {
            (*scale, *offset) = sub_block(block, j);
        }
        found
    }

    /// The values of numbers of a sub-block.
    #[inline(always)]
    fn values(&self, numbers: &[u8; BLOCK], part: usize, x: &mut [f32; BLOCK]) {
        let (scale, offset) = (self.scales[part], self.offsets[part]);
        x.iter_mut().zip(numbers).for_each(|(x, number)| *x = scale * f32::from(*number) - offset);
    }
}

impl BlockDecoder for Q4K {
    const BLOCK_BYTES: usize = 144;
    const PARTS: usize = 8;

    type Header = WithOffsets;

    #[inline(always)]
    fn header(block: &[u8]) -> WithOffsets {
        WithOffsets::of(block)
    }

    #[inline(always)]
    fn decode_part(block: &[u8], header: &WithOffsets, part: usize, x: &mut [f32; BLOCK]) {
        header.values(&Self::numbers(block, part), part, x);
    }
}

impl QuantisedScales for Q4K {
    fn wholes(block: &[u8]) -> [u16; 2] {
        [0, 2].map(|at| u16::from_le_bytes([block[at], block[at + 1]]))
    }

    fn scales(block: &[u8], part: usize) -> [i8; 2] {
        quantised_scales(block, part).map(u8::cast_signed)
    }

    #[inline(always)]
    fn numbers(block: &[u8], part: usize) -> [u8; BLOCK] {
        let nibbles = &block[16 + SUB_BLOCK * (part / 2)..][..SUB_BLOCK];
        let shift = 4 * (part % 2);
        let mut numbers = [0; BLOCK];
        for (number, byte) in numbers.iter_mut().zip(nibbles) {
            *number = byte >> shift & 15;
        }
        numbers
    }
}

impl BlockDecoder for Q5K {
    const BLOCK_BYTES: usize = 176;
    const PARTS: usize = 8;

    type Header = WithOffsets;

    #[inline(always)]
    fn header(block: &[u8]) -> WithOffsets {
        WithOffsets::of(block)
    }

    #[inline(always)]
    fn decode_part(block: &[u8], header: &WithOffsets, part: usize, x: &mut [f32; BLOCK]) {
        header.values(&Self::numbers(block, part), part, x);
    }
}

impl QuantisedScales for Q5K {
    fn wholes(block: &[u8]) -> [u16; 2] {
        [0, 2].map(|at| u16::from_le_bytes([block[at], block[at + 1]]))
    }

    fn scales(block: &[u8], part: usize) -> [i8; 2] {
        quantised_scales(block, part).map(u8::cast_signed)
    }

    #[inline(always)]
    fn numbers(block: &[u8], part: usize) -> [u8; BLOCK] {
        let (fifth_bits, nibbles) = block[16..].split_at(SUB_BLOCK);
        let nibbles = &nibbles[SUB_BLOCK * (part / 2)..][..SUB_BLOCK];
        let shift = 4 * (part % 2);
        let mut numbers = [0; BLOCK];
        for ((number, byte), fifth) in numbers.iter_mut().zip(nibbles).zip(fifth_bits) {
            *number = byte >> shift & 15 | (fifth >> part & 1) << 4;
        }
        numbers
    }
}

impl BlockDecoder for Q6K {
    const BLOCK_BYTES: usize = 210;
    const PARTS: usize = 8;

    /// The scales of the halves of all parts.
    type Header = WideRow;

    #[inline(always)]
    fn header(block: &[u8]) -> Self::Header {
        let (whole, mut scales) = (f16_at(block, 208), [0.0; SMALL_SUB_BLOCKS]);
        scales.iter_mut().zip(&block[192..]).for_each(|(scale, byte)| *scale = whole * f32::from(byte.cast_signed()));
        scales
    }

    #[inline(always)]
    fn decode_part(block: &[u8], scales: &Self::Header, part: usize, x: &mut [f32; BLOCK]) {
        let numbers = Self::numbers(block, part);
        let (first, second) = x.split_at_mut(SMALL_SUB_BLOCK);
        let value = |scale: f32, number: u8| scale * (f32::from(number) - 32.0);
        first.iter_mut().zip(&numbers).for_each(|(x, number)| *x = value(scales[2 * part], *number));
        let numbers = &numbers[SMALL_SUB_BLOCK..];
        second.iter_mut().zip(numbers).for_each(|(x, number)| *x = value(scales[2 * part + 1], *number));
    }
}

impl QuantisedScales for Q6K {
    fn wholes(block: &[u8]) -> [u16; 2] {
        [u16::from_le_bytes([block[208], block[209]]), 0]
    }

    #[inline(always)]
    fn scales(block: &[u8], part: usize) -> [i8; 2] {
        let first = 192 + 2 * part;
        [block[first].cast_signed(), block[first + 1].cast_signed()]
    }

    #[inline(always)]
    fn numbers(block: &[u8], part: usize) -> [u8; BLOCK] {
        let (low, high) = (&block[..128], &block[128..192]);
        let (n, g) = (part / 4, part % 4);
        let low = &low[64 * n + 32 * (g % 2)..][..32];
        let high = &high[32 * n..][..32];
        let mut numbers = [0; BLOCK];
        for ((number, low), high) in numbers.iter_mut().zip(low).zip(high) {
            *number = low >> (4 * (g / 2)) & 15 | (high >> (2 * g) & 3) << 4;
        }
        numbers
    }
}

/// Of each sub-block the numbers from −32 to 31 for value ≈ scale · number, and the scale: the most of the values
/// explained, weighted by their squares, of the scales tried.
#[inline(always)]
fn symmetric(x: &[WideRow; SMALL_SUB_BLOCK], numbers: &mut [WideRow; SMALL_SUB_BLOCK]) -> WideRow {
    let mut largest: WideRow = [0.0; SMALL_SUB_BLOCKS];
    for x in x {
        for lane in 0..SMALL_SUB_BLOCKS {
            largest[lane] = if x[lane].abs() > largest[lane].abs() { x[lane] } else { largest[lane] };
        }
    }
    let mut inverse = largest.map(|largest| -32.0 / largest);
    let (mut scale, mut explained) = ([0.0; SMALL_SUB_BLOCKS], [0.0; SMALL_SUB_BLOCKS]);
    let (sum_lx, sum_l2) = sums_by(&inverse, x);
    for lane in 0..SMALL_SUB_BLOCKS {
        scale[lane] = if sum_l2[lane] == 0.0 { 0.0 } else { sum_lx[lane] / sum_l2[lane] };
        explained[lane] = scale[lane] * sum_lx[lane];
    }
    for step in (-9..=9).filter(|step| *step != 0) {
        let tried = largest.map(|largest| -(32.0 + 0.1 * step as f32) / largest);
        let (sum_lx, sum_l2) = sums_by(&tried, x);
        for lane in 0..SMALL_SUB_BLOCKS {
            let its_scale = sum_lx[lane] / sum_l2[lane];
            let is_better = sum_l2[lane] > 0.0 && sum_lx[lane] * sum_lx[lane] > explained[lane] * sum_l2[lane];
            inverse[lane] = if is_better { tried[lane] } else { inverse[lane] };
            scale[lane] = if is_better { its_scale } else { scale[lane] };
            explained[lane] = if is_better { its_scale * sum_lx[lane] } else { explained[lane] };
        }
    }
    for (number, x) in numbers.iter_mut().zip(x) {
        for lane in 0..SMALL_SUB_BLOCKS {
            let found = nearest_product(inverse[lane], x[lane]).clamp(-32, 31) as f32;
            // Of a sub-block without values the lowest, of which all bits are zero; by a scale of zero it is no other.
            number[lane] = if largest[lane].abs() < LEAST_SCALE { -32.0 } else { found };
        }
    }
    for lane in 0..SMALL_SUB_BLOCKS {
        scale[lane] = if largest[lane].abs() < LEAST_SCALE { 0.0 } else { scale[lane] };
    }
    scale
}

/// The sums of value · number and of number², weighted by the squares of the values, of numbers by inverse scales.
#[inline(always)]
fn sums_by(inverse: &WideRow, x: &[WideRow; SMALL_SUB_BLOCK]) -> (WideRow, WideRow) {
    let (mut sum_lx, mut sum_l2) = ([0.0; SMALL_SUB_BLOCKS], [0.0; SMALL_SUB_BLOCKS]);
    for x in x {
        for lane in 0..SMALL_SUB_BLOCKS {
            let number = nearest_product(inverse[lane], x[lane]).clamp(-32, 31) as f32;
            let w = x[lane] * x[lane];
            sum_lx[lane] += w * x[lane] * number;
            sum_l2[lane] += w * number * number;
        }
    }
    (sum_lx, sum_l2)
}

#[inline(always)]
pub(super) fn encode_q6_k(x: &[f32; SUPER_BLOCK], block: &mut [u8]) {
    let subs: &[[f32; SMALL_SUB_BLOCK]] = x.as_chunks().0;
    let mut found = [[0.0; SMALL_SUB_BLOCKS]; SMALL_SUB_BLOCK];
    let scales = symmetric(&by_place(x), &mut found);
    let mut numbers = [0i8; SUPER_BLOCK];
    for (at, number) in numbers.iter_mut().enumerate() {
        *number = found[at % SMALL_SUB_BLOCK][at / SMALL_SUB_BLOCK] as i8;
    }
    let largest = scales.iter().fold(0.0f32, |largest, &x| if x.abs() > largest.abs() { x } else { largest });
    block.fill(0);
    if largest.abs() < LEAST_SCALE {
        return;
    }
    let inverse = -128.0 / largest;
    let (bits, header) = block.split_at_mut(192);
    header[16..].copy_from_slice(&f16::from_f32(1.0 / inverse).to_le_bytes());
    for (byte, scale) in header.iter_mut().zip(&scales) {
        *byte = (nearest_product(inverse, *scale).min(127) as i8).cast_unsigned();
    }
    for (j, sub) in subs.iter().enumerate() {
        let scale = f16_at(header, 16) * f32::from(header[j].cast_signed());
        if scale == 0.0 {
            continue;
        }
        for (number, x) in numbers[j * SMALL_SUB_BLOCK..].iter_mut().zip(sub) {
            *number = nearest(x / scale).clamp(-32, 31) as i8;
        }
    }
    let (low, high) = bits.split_at_mut(128);
    for (at, number) in numbers.iter().enumerate() {
        let number = (number + 32).cast_unsigned();
        let (n, g, l) = (at / 128, at % 128 / 32, at % 32);
        low[64 * n + 32 * (g % 2) + l] |= (number & 15) << (4 * (g / 2));
        high[32 * n + l] |= (number >> 4) << (2 * g);
    }
}
