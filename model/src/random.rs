//! Random draws that are addressed, not carried: each is a function of a seed and of what it is for.
//!
//! Nothing here has state that a checkpoint would have to save. A resumed run, a run on more devices and a run whose
//! rows are visited in another order draw the same numbers, because a draw depends on its [`Address`] and its index
//! alone.
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

use crate::batch::TokenPlace;

/// What a draw is for. The numbers are part of every result: never reuse or change one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The order of the rows in an epoch.
    RowOrder = 1,
    /// Fresh weights of a new model.
    ModelInit = 2,
    /// Fresh weights of an adapter.
    AdapterInit = 3,
    /// Dropout masks.
    Dropout = 4,
    /// The choice of the next token.
    Sampling = 5,
    /// The order of a dataset's rows.
    DatasetShuffle = 6,
    /// Which rows of a dataset are held out.
    DatasetSplit = 7,
    /// Which of several datasets the next row comes from.
    DatasetMix = 8,
    /// Noise on token embeddings.
    EmbeddingNoise = 9,
}

/// Which draws are meant: their purpose, and as much of the rest as it needs (the remainder stays 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// What the draws are for.
    pub purpose: Purpose,
    /// Optimizer step or epoch, or the position of a token.
    pub step: u64,
    /// Row of the data, or prompt.
    pub row: u64,
    /// Layer of the decoder.
    pub layer: u32,
    /// Module within the layer, or [`Address::named`].
    pub module: u32,
}

impl Address {
    /// The draws of a purpose that needs no further address.
    pub const fn new(purpose: Purpose) -> Self {
        Self { purpose, step: 0, row: 0, layer: 0, module: 0 }
    }

    /// The same draws at an optimizer step, epoch or token position.
    pub const fn step(mut self, step: u64) -> Self {
        self.step = step;
        self
    }

    /// The same draws for a row or prompt.
    pub const fn row(mut self, row: u64) -> Self {
        self.row = row;
        self
    }

    /// The same draws in a layer and a module of it.
    pub const fn module(mut self, layer: u32, module: u32) -> Self {
        self.layer = layer;
        self.module = module;
        self
    }

    /// The same draws for a document of these tokens, whatever row it stands in.
    pub fn tokens(self, ids: &[u32]) -> Self {
        self.row(ids.iter().fold(FNV_OFFSET, |hash, id| fnv1a_from(hash, &id.to_le_bytes())))
    }

    /// The draws for a tensor or module that is known by its full name, such as `model.layers.0.self_attn.q_proj`.
    pub fn named(purpose: Purpose, name: &str) -> Self {
        let hash = fnv1a(name.as_bytes());
        Self::new(purpose).module((hash >> 32) as u32, hash as u32)
    }
}

/// 64-bit FNV-1a: names become numbers in the same way on every machine and in every version.
fn fnv1a(bytes: &[u8]) -> u64 {
    fnv1a_from(FNV_OFFSET, bytes)
}

fn fnv1a_from(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The hash of nothing.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// An endless sequence of draws at one address; any index of it can be read directly.
#[derive(Debug, Clone)]
pub struct Stream {
    key: [u32; 2],
    tag: [u32; 2],
    next: u64,
    block: [u32; 4],
}

impl Stream {
    /// The draws at `address` under `seed`.
    ///
    /// Seed and address are mixed by two applications of Philox: `m = philox([step, row], key = seed)`, then
    /// `n = philox([m0 ^ purpose, m1 ^ layer, m2 ^ module, m3], key = seed ^ (0, 1))`. Block `i` of the stream is
    /// `philox([i, n2, n3], key = [n0, n1])`, the lower half of each 64-bit number first.
    pub fn new(seed: u64, address: Address) -> Self {
        let seed = halves(seed);
        let (step, row) = (halves(address.step), halves(address.row));
        let mixed = philox([step[0], step[1], row[0], row[1]], seed);
        let place = [mixed[0] ^ address.purpose as u32, mixed[1] ^ address.layer, mixed[2] ^ address.module, mixed[3]];
        let place = philox(place, [seed[0], seed[1] ^ 1]);
        Self { key: [place[0], place[1]], tag: [place[2], place[3]], next: 0, block: [0; 4] }
    }

    /// The four words of block `index`, independent of what was drawn before.
    pub fn block(&self, index: u64) -> [u32; 4] {
        let index = halves(index);
        philox([index[0], index[1], self.tag[0], self.tag[1]], self.key)
    }

    /// The words of `L` blocks from block `first` on, side by side: `[word][block]`.
    #[inline(always)]
    fn blocks<const L: usize>(&self, first: u64) -> [[u32; L]; 4] {
        let index = |lane: usize| halves(first.wrapping_add(lane as u64));
        let counter = [
            std::array::from_fn(|lane| index(lane)[0]),
            std::array::from_fn(|lane| index(lane)[1]),
            [self.tag[0]; L],
            [self.tag[1]; L],
        ];
        philox_lanes(counter, self.key)
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        let word = (self.next % 4) as usize;
        if word == 0 {
            self.block = self.block(self.next / 4);
        }
        self.next += 1;
        self.block[word]
    }

    /// The next 64 random bits: two draws, the first the lower half.
    pub fn next_u64(&mut self) -> u64 {
        let low = u64::from(self.next_u32());
        low | u64::from(self.next_u32()) << 32
    }

    /// A number in `[0, 1)` with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }

    /// A whole number in `0..bound`, each equally likely.
    ///
    /// Source: Lemire, "Fast Random Integer Generation in an Interval", arXiv:1805.10941.
    ///
    /// # Panics
    /// Panics if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "an empty range has no draw");
        let rejected = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= rejected {
                return (product >> 64) as u64;
            }
        }
    }

    /// Element `index` of a tensor of numbers uniform in `[-limit, limit)`, with 32 random bits.
    pub fn uniform_at(&self, index: u64, limit: f64) -> f32 {
        let word = self.block(index / 4)[(index % 4) as usize];
        (limit * (2.0 * f64::from(word) / WORDS - 1.0)) as f32
    }

    /// Elements `4 × block` and the three after it of [`Stream::uniform_at`].
    pub fn uniforms_at(&self, block: u64, limit: f64) -> [f32; 4] {
        self.block(block).map(|word| (limit * (2.0 * f64::from(word) / WORDS - 1.0)) as f32)
    }

    /// Elements `4 × block` and the three after it of a tensor of standard normal numbers (Box and Muller's transform).
    pub fn normals_at(&self, block: u64) -> [f64; 4] {
        let [a, b, c, d] = self.block(block);
        let ([a, b], [c, d]) = (box_muller(a, b), box_muller(c, d));
        [a, b, c, d]
    }
}

/// The seed of a training run and the number of an optimizer step in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepSeed {
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step, from 1.
    pub step: u64,
}

/// Which of dropout's draws a training pass makes: those of an optimizer step, for rows at these places in the data.
///
/// The mask of a module is a function of seed, step, the module's name, the token's row and number in it, and the
/// column. So it is the same however a step is cut into micro-batches, and a backward draws it again instead of keeping
/// it.
#[derive(Debug, Clone, Copy)]
pub struct Draws<'a> {
    /// The step.
    pub step: StepSeed,
    /// The place in the data of each row of the activation.
    pub places: &'a [TokenPlace],
}

impl Draws<'_> {
    /// Those of some of the rows.
    pub fn of_rows(&self, rows: std::ops::Range<usize>) -> Draws<'_> {
        Draws { step: self.step, places: &self.places[rows] }
    }
}

/// The mask of dropout on the input of one module, for the rows of an activation.
///
/// Element `(token, column)` of a row of `columns` is dropped if word `column % 4` of block
/// `token · ⌈columns / 4⌉ + ⌊column / 4⌋` of the row's stream is below `probability · 2³²`, rounded. What stays is
/// scaled by `1 / (1 - probability)`, so that its mean stays (inverted dropout).
#[derive(Debug, Clone, Copy)]
pub struct DropoutMask<'a> {
    /// The draws of the pass.
    pub draws: Draws<'a>,
    /// The module, by [`Address::named`].
    pub module: Address,
    /// How likely an element is dropped, in `[0, 1)`.
    pub probability: f64,
}

impl DropoutMask<'_> {
    /// Writes what the elements of row `row` of the activation are multiplied by.
    // Inlined, so that it is compiled for the instructions of the kernels that call it.
    #[inline(always)]
    pub fn factors(&self, row: usize, factors: &mut [f32]) {
        let TokenPlace { row, token } = self.draws.places[row];
        let StepSeed { seed, step } = self.draws.step;
        let stream = Stream::new(seed, self.module.step(step).row(row));
        let dropped_below = (self.probability * WORDS).round() as u32;
        let kept = (1.0 / (1.0 - self.probability)) as f32;
        let factor = |word: u32| if word < dropped_below { 0.0 } else { kept };
        let first = token * factors.len().div_ceil(4) as u64;
        let mut pieces = factors.chunks_exact_mut(4 * LANES);
        let mut block = first;
        for piece in &mut pieces {
            let words = stream.blocks::<LANES>(block);
            for (lane, factors) in piece.chunks_exact_mut(4).enumerate() {
                factors.iter_mut().zip(&words).for_each(|(target, words)| *target = factor(words[lane]));
            }
            block += LANES as u64;
        }
        for (block, factors) in (block..).zip(pieces.into_remainder().chunks_mut(4)) {
            factors.iter_mut().zip(stream.block(block)).for_each(|(target, word)| *target = factor(word));
        }
    }
}

/// Blocks of a stream that are drawn side by side.
const LANES: usize = 16;

/// How many values a draw of 32 bits has.
const WORDS: f64 = 4_294_967_296.0;

/// Two independent standard normal numbers from 64 random bits.
fn box_muller(radius: u32, angle: u32) -> [f64; 2] {
    // Half a step above 0, so that the logarithm is finite.
    let radius = (-2.0 * ((f64::from(radius) + 0.5) / WORDS).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * (f64::from(angle) / WORDS)).sin_cos();
    [radius * cos, radius * sin]
}

/// The order in which epoch `epoch` visits `rows` rows: a function of `(seed, epoch, rows)` alone.
///
/// Fisher and Yates' shuffle of `0..rows`: for `i` from the last down to 1, swap `i` with a uniform draw from `0..=i`.
pub fn permutation(seed: u64, epoch: u64, rows: usize) -> Vec<usize> {
    let mut stream = Stream::new(seed, Address::new(Purpose::RowOrder).step(epoch));
    let mut order: Vec<usize> = (0..rows).collect();
    for last in (1..rows).rev() {
        order.swap(last, stream.below(last as u64 + 1) as usize);
    }
    order
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Philox4x32 with 10 rounds: 128 bits of counter and 64 of key to 128 random bits.
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox_lanes(counter.map(|word| [word]), key).map(|[word]| word)
}

/// Philox of several counters side by side, `[word][lane]`: what a compiler makes vector instructions of.
#[inline(always)]
fn philox_lanes<const L: usize>(mut counter: [[u32; L]; 4], mut key: [u32; 2]) -> [[u32; L]; 4] {
    for _ in 0..10 {
        let [mut a, mut b, mut c, mut d] = [[0; L]; 4];
        for lane in 0..L {
            let first = u64::from(counter[0][lane]) * 0xD251_1F53;
            let second = u64::from(counter[2][lane]) * 0xCD9E_8D57;
            a[lane] = (second >> 32) as u32 ^ counter[1][lane] ^ key[0];
            b[lane] = second as u32;
            c[lane] = (first >> 32) as u32 ^ counter[3][lane] ^ key[1];
            d[lane] = first as u32;
        }
        counter = [a, b, c, d];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of Random123 1.09, `tests/kat_vectors`.
    #[test]
    fn philox_gives_the_published_answers() {
        let answers = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in answers {
            assert_eq!(philox(counter, key), expected);
        }
    }

    /// Answers of an implementation in Python, written from the documentation of [`Stream::new`] and [`permutation`]
    /// alone.
    #[test]
    fn streams_and_orders_are_as_documented() {
        let order = [17, 8, 15, 1, 6, 18, 16, 5, 11, 13, 7, 0, 14, 9, 3, 19, 4, 10, 12, 2];
        assert_eq!(permutation(7, 3, 20), order);
        let stream = Stream::new(7, Address::named(Purpose::ModelInit, "a"));
        assert_eq!(stream.block(0), [2_654_290_389, 622_394_862, 3_217_499_577, 2_986_324_037]);
        let normals = stream.normals_at(1);
        assert!(
            (normals[0] - 0.797_111_039_344_929).abs() < 1e-12 && (normals[1] + 0.742_298_173_009_664).abs() < 1e-12
        );
    }

    #[test]
    fn every_part_of_an_address_changes_the_draws() {
        let base = Address::new(Purpose::Dropout).step(3).row(5).module(7, 11);
        let addresses = [
            base,
            Address { purpose: Purpose::Sampling, ..base },
            base.step(4),
            base.step(3 + (1 << 32)),
            base.row(6),
            base.module(8, 11),
            base.module(7, 12),
            Address::named(Purpose::Dropout, "q_proj"),
            Address::named(Purpose::Dropout, "v_proj"),
        ];
        let mut seen: Vec<u64> = addresses.iter().map(|address| Stream::new(1, *address).next_u64()).collect();
        seen.push(Stream::new(2, base).next_u64());
        seen.push(Stream::new(1 + (1 << 32), base).next_u64());
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn draws_are_uniform_and_normal() {
        let mut stream = Stream::new(42, Address::new(Purpose::Sampling));
        let draws = 200_000;
        let mean = (0..draws).map(|_| stream.uniform()).sum::<f64>() / f64::from(draws);
        assert!((mean - 0.5).abs() < 0.003, "{mean}");
        let mut counts = [0; 7];
        (0..70_000).for_each(|_| counts[stream.below(7) as usize] += 1);
        assert!(counts.iter().all(|count| (9_600..10_400).contains(count)), "{counts:?}");

        let normals: Vec<f64> = (0..50_000).flat_map(|block| stream.normals_at(block)).collect();
        let moment = |power: i32| normals.iter().map(|x| x.powi(power)).sum::<f64>() / normals.len() as f64;
        assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.02, "{} {}", moment(1), moment(2));
        assert!(moment(3).abs() < 0.05 && (moment(4) - 3.0).abs() < 0.1, "{} {}", moment(3), moment(4));
        let uniform: Vec<f32> = (0..10_000).map(|index| stream.uniform_at(index, 0.25)).collect();
        assert!(uniform.iter().all(|x| (-0.25..=0.25).contains(x)));
        assert!(uniform.iter().any(|x| *x < -0.24) && uniform.iter().any(|x| *x > 0.24));
    }

    /// The mask is a function of the address alone, keeps what it should, and keeps the mean.
    #[test]
    fn dropout_masks_are_addressed() {
        let places: Vec<TokenPlace> =
            (0..400).map(|index| TokenPlace { row: index / 100, token: index % 100 }).collect();
        let factors = |step, module: &str, probability, places: &[TokenPlace]| {
            let draws = Draws { step: StepSeed { seed: 11, step }, places };
            let mask = DropoutMask { draws, module: Address::named(Purpose::Dropout, module), probability };
            let mut all = vec![0.0; places.len() * 66];
            all.chunks_mut(66).enumerate().for_each(|(row, factors)| mask.factors(row, factors));
            all
        };
        for probability in [0.05, 0.5, 0.9] {
            let all = factors(1, "q_proj", probability, &places);
            let kept = all.iter().filter(|factor| **factor != 0.0).count() as f64 / all.len() as f64;
            assert!((kept - (1.0 - probability)).abs() < 0.01, "{kept} where {probability} are dropped");
            let scale = (1.0 / (1.0 - probability)) as f32;
            assert!(all.iter().all(|factor| *factor == 0.0 || *factor == scale));
            // No row of a mask is like the one before it.
            assert!(all.chunks(66).zip(all.chunks(66).skip(1)).filter(|(row, next)| row == next).count() < 2);
        }
        let all = factors(1, "q_proj", 0.5, &places);
        assert_eq!(factors(1, "q_proj", 0.5, &places[130..140]), all[130 * 66..140 * 66]);
        assert_ne!(factors(2, "q_proj", 0.5, &places), all);
        assert_ne!(factors(1, "k_proj", 0.5, &places), all);
        assert_ne!(factors(1, "q_proj", 0.5, &places[100..200]), all[..100 * 66]);
    }

    #[test]
    fn an_epoch_visits_every_row_once_in_an_order_of_its_own() {
        for rows in [0, 1, 2, 7, 1000] {
            let mut order = permutation(9, 3, rows);
            order.sort_unstable();
            assert!(order.into_iter().eq(0..rows));
        }
        assert_ne!(permutation(9, 3, 100), permutation(9, 4, 100));
        assert_ne!(permutation(9, 3, 100), permutation(8, 3, 100));
    }
}
