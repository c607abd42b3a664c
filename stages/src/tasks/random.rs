//! CPython's `random.Random`, bit for bit: few shots and bootstraps of a harness's run depend on it.

use std::collections::HashSet;

const WORDS: usize = 624;
const MIDDLE: usize = 397;

/// The Mersenne Twister MT19937, with the draws that CPython makes of it.
pub struct PythonRandom {
    state: [u32; WORDS],
    next: usize,
}

impl PythonRandom {
    /// `random.Random(seed)`.
    pub fn new(seed: u64) -> Self {
        let low = seed as u32;
        let high = (seed >> 32) as u32;
        let key = [low, high];
        Self::by_array(if high == 0 { &key[..1] } else { &key })
    }

    /// `init_by_array` of the reference implementation.
    fn by_array(key: &[u32]) -> Self {
        let mut state = [0u32; WORDS];
        state[0] = 19_650_218;
        for at in 1..WORDS {
            let before = state[at - 1];
            state[at] = 1_812_433_253u32.wrapping_mul(before ^ (before >> 30)).wrapping_add(at as u32);
        }
        let mut at = 1;
        let wrap = |state: &mut [u32; WORDS], at: &mut usize| {
            *at += 1;
            if *at == WORDS {
                state[0] = state[WORDS - 1];
                *at = 1;
            }
        };
        for step in 0..WORDS.max(key.len()) {
            let before = state[at - 1];
            let part = step % key.len();
            state[at] = (state[at] ^ (before ^ (before >> 30)).wrapping_mul(1_664_525))
                .wrapping_add(key[part])
                .wrapping_add(part as u32);
            wrap(&mut state, &mut at);
        }
        for _ in 1..WORDS {
            let before = state[at - 1];
            state[at] = (state[at] ^ (before ^ (before >> 30)).wrapping_mul(1_566_083_941)).wrapping_sub(at as u32);
            wrap(&mut state, &mut at);
        }
        state[0] = 0x8000_0000;
        Self { state, next: WORDS }
    }

    fn twist(&mut self) {
        for at in 0..WORDS {
            let joined = (self.state[at] & 0x8000_0000) | (self.state[(at + 1) % WORDS] & 0x7fff_ffff);
            let odd = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[at] = self.state[(at + MIDDLE) % WORDS] ^ (joined >> 1) ^ odd;
        }
        self.next = 0;
    }

    /// `getrandbits(32)`.
    pub fn word(&mut self) -> u32 {
        if self.next == WORDS {
            self.twist();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    /// `random()`: in [0, 1), of 53 bits.
    pub fn unit(&mut self) -> f64 {
        let (high, low) = (self.word() >> 5, self.word() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// `randrange(below)` for `below` up to 2³², by rejection.
    fn below(&mut self, below: usize) -> usize {
        let bits = usize::BITS - below.leading_zeros();
        loop {
            let drawn = (self.word() >> (32 - bits)) as usize;
            if drawn < below {
                return drawn;
            }
        }
    }

    /// `sample(range(of), count)`; `None` where there are fewer.
    pub fn sample(&mut self, of: usize, count: usize) -> Option<Vec<usize>> {
        if count > of {
            return None;
        }
        // Where CPython keeps the rest in a list, and where it draws again what it has drawn.
        let mut largest_pool = 21;
        if count > 5 {
            largest_pool += 4usize.pow(((count * 3) as f64).log(4.0).ceil() as u32);
        }
        if of <= largest_pool {
            let mut pool: Vec<usize> = (0..of).collect();
            let draw = |drawn: usize| {
                let at = self.below(of - drawn);
                let chosen = pool[at];
                pool[at] = pool[of - drawn - 1];
                chosen
            };
            return Some((0..count).map(draw).collect());
        }
        let mut chosen = HashSet::with_capacity(count);
        let draw = |_| loop {
            let at = self.below(of);
            if chosen.insert(at) {
                return at;
            }
        };
        Some((0..count).map(draw).collect())
    }

    /// An index of `choices(range(of), …)`.
    pub fn choice(&mut self, of: usize) -> usize {
        (self.unit() * of as f64) as usize
    }
}
