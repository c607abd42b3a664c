//! What an optimizer keeps of a trained tensor: in memory, in a kernel, and in saved states.

use std::sync::LazyLock;

use half::bf16;

use super::BLOCK;
use crate::cpu::nearest;
use crate::ops::{Ops, Result};

/// A state tensor, as a rule declares it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Its name in saved states.
    pub name: &'static str,
    /// How its elements are kept.
    pub format: StateFormat,
}

/// How the elements of a state tensor are kept. A formula gets them, and returns them, as f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateFormat {
    /// As f32, where the kernel set keeps its tensors.
    F32,
    /// Rounded to bf16 after each step, to the nearest and of two equally near ones the even; in main memory.
    Bf16,
    /// In 8 bits: codes of a dynamic map, times the largest magnitude of their block of `BLOCK`; in main memory.
    Dynamic8(Sign),
}

/// Which numbers a dynamic map has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Of both signs.
    Signed,
    /// None below zero.
    Unsigned,
}

impl StateFormat {
    /// Bytes of a tensor of so many elements.
    pub fn bytes(self, elements: usize) -> u64 {
        match self {
            Self::F32 => 4 * elements as u64,
            Self::Bf16 => 2 * elements as u64,
            Self::Dynamic8(_) => elements as u64 + 4 * elements.div_ceil(BLOCK) as u64,
        }
    }
}

/// The state tensor of a trained tensor. Formats other than f32 are kept in main memory.
pub struct StateTensor<T> {
    name: &'static str,
    data: Data<T>,
}

enum Data<T> {
    F32(T),
    Bf16(Vec<bf16>),
    Dynamic8 { codes: Vec<u8>, absmax: Vec<f32>, map: &'static DynamicMap },
}

/// One of the sets of values that a state tensor is saved as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedSet {
    /// Its name: that of the state tensor, with an ending where that has several sets.
    pub name: String,
    /// The dtype of its values.
    pub dtype: StateDtype,
    /// Number of its values.
    pub values: usize,
}

/// The dtype of saved values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDtype {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Codes of 8 bits.
    U8,
}

/// Saved values.
#[derive(Clone, Debug, PartialEq)]
pub enum StateValues {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// Codes of 8 bits.
    U8(Vec<u8>),
}

impl StateValues {
    /// Their dtype.
    pub fn dtype(&self) -> StateDtype {
        match self {
            Self::F32(_) => StateDtype::F32,
            Self::Bf16(_) => StateDtype::Bf16,
            Self::U8(_) => StateDtype::U8,
        }
    }

    /// Number of values.
    pub fn count(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::U8(values) => values.len(),
        }
    }

    /// Their bytes, little-endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::Bf16(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Self::U8(values) => values.clone(),
        }
    }

    /// The values in these bytes.
    pub fn from_bytes(dtype: StateDtype, bytes: &[u8]) -> Self {
        match dtype {
            StateDtype::F32 => Self::F32(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()),
            StateDtype::Bf16 => {
                Self::Bf16(bytes.as_chunks().0.iter().map(|value| bf16::from_le_bytes(*value)).collect())
            }
            StateDtype::U8 => Self::U8(bytes.to_vec()),
        }
    }
}

impl StateDtype {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::U8];

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }
}

impl<T> StateTensor<T> {
    /// The state tensor of a matrix before the first step: zero.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new<O: Ops<Tensor = T>>(ops: &O, spec: StateSpec, rows: usize, columns: usize) -> Result<Self> {
        let data = match spec.format {
            StateFormat::F32 => Data::F32(ops.zeros(rows, columns)?),
            StateFormat::Bf16 => Data::Bf16(vec![bf16::ZERO; rows * columns]),
            StateFormat::Dynamic8(sign) => {
                let (map, elements) = (DynamicMap::of(sign), rows * columns);
                let codes = vec![map.nearest.of(0.0); elements];
                Data::Dynamic8 { codes, absmax: vec![0.0; elements.div_ceil(BLOCK)], map }
            }
        };
        Ok(Self { name: spec.name, data })
    }

    /// The sets of values that it is saved as.
    pub fn saved_sets<O: Ops<Tensor = T>>(&self, ops: &O) -> Vec<SavedSet> {
        let set = |ending: &str, dtype, values| SavedSet { name: format!("{}{ending}", self.name), dtype, values };
        match &self.data {
            Data::F32(tensor) => {
                let (rows, columns) = ops.shape(tensor);
                vec![set("", StateDtype::F32, rows * columns)]
            }
            Data::Bf16(values) => vec![set("", StateDtype::Bf16, values.len())],
            Data::Dynamic8 { codes, absmax, .. } => {
                vec![set("", StateDtype::U8, codes.len()), set("_absmax", StateDtype::F32, absmax.len())]
            }
        }
    }

    /// A copy of the set of values at this index of [`StateTensor::saved_sets`].
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn read<O: Ops<Tensor = T>>(&self, ops: &O, set: usize) -> Result<StateValues> {
        match (&self.data, set) {
            (Data::F32(tensor), _) => Ok(StateValues::F32(ops.read(tensor)?)),
            (Data::Bf16(values), _) => Ok(StateValues::Bf16(values.clone())),
            (Data::Dynamic8 { codes, .. }, 0) => Ok(StateValues::U8(codes.clone())),
            (Data::Dynamic8 { absmax, .. }, _) => Ok(StateValues::F32(absmax.clone())),
        }
    }

    /// Overwrites a set with saved values, of its dtype and number.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn write<O: Ops<Tensor = T>>(&mut self, ops: &O, set: usize, values: &StateValues) -> Result {
        match (&mut self.data, set, values) {
            (Data::F32(tensor), _, StateValues::F32(values)) => ops.write(tensor, values),
            (Data::Bf16(kept), _, StateValues::Bf16(values)) => {
                kept.copy_from_slice(values);
                Ok(())
            }
            (Data::Dynamic8 { codes, .. }, 0, StateValues::U8(values)) => {
                codes.copy_from_slice(values);
                Ok(())
            }
            (Data::Dynamic8 { absmax, .. }, _, StateValues::F32(values)) => {
                absmax.copy_from_slice(values);
                Ok(())
            }
            _ => panic!("saved values are of the dtype of their set"),
        }
    }

    /// The tensor, where it is kept in f32.
    pub(crate) fn as_f32(&mut self) -> Option<&mut T> {
        match &mut self.data {
            Data::F32(tensor) => Some(tensor),
            Data::Bf16(_) | Data::Dynamic8 { .. } => None,
        }
    }

    /// Its elements for a kernel in main memory; `values` gives those of a tensor in f32.
    pub(crate) fn elements<'a>(&'a mut self, values: impl FnOnce(&'a mut T) -> &'a mut [f32]) -> StateElements<'a> {
        match &mut self.data {
            Data::F32(tensor) => StateElements::F32(values(tensor)),
            Data::Bf16(values) => StateElements::Bf16(values),
            Data::Dynamic8 { codes, absmax, map } => StateElements::Dynamic8 { codes, absmax, map },
        }
    }
}

/// Elements of a state tensor in main memory.
pub(crate) enum StateElements<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    Dynamic8 { codes: &'a mut [u8], absmax: &'a mut [f32], map: &'static DynamicMap },
}

impl<'a> StateElements<'a> {
    /// Splits them into runs of so many elements, a multiple of [`BLOCK`].
    pub(crate) fn runs(self, elements: usize) -> Vec<Self> {
        match self {
            Self::F32(values) => values.chunks_mut(elements).map(Self::F32).collect(),
            Self::Bf16(values) => values.chunks_mut(elements).map(Self::Bf16).collect(),
            Self::Dynamic8 { codes, absmax, map } => {
                let runs = codes.chunks_mut(elements).zip(absmax.chunks_mut(elements / BLOCK));
                runs.map(|(codes, absmax)| Self::Dynamic8 { codes, absmax, map }).collect()
            }
        }
    }

    /// Decodes the elements of a range that begins at a multiple of [`BLOCK`].
    #[inline(always)]
    pub(crate) fn load(&self, first: usize, block: &mut [f32; BLOCK]) {
        match self {
            Self::F32(values) => {
                let values = &values[first..];
                let count = values.len().min(BLOCK);
                block[..count].copy_from_slice(&values[..count]);
            }
            Self::Bf16(values) => block.iter_mut().zip(&values[first..]).for_each(|(x, value)| *x = value.to_f32()),
            Self::Dynamic8 { codes, absmax, map } => {
                let largest = absmax[first / BLOCK];
                let elements = block.iter_mut().zip(&codes[first..]);
                elements.for_each(|(x, code)| *x = map.values[usize::from(*code)] * largest);
            }
        }
    }

    /// Encodes elements again that were loaded.
    #[inline(always)]
    pub(crate) fn store(&mut self, first: usize, block: &[f32; BLOCK]) {
        match self {
            Self::F32(values) => {
                let values = &mut values[first..];
                let count = values.len().min(BLOCK);
                values[..count].copy_from_slice(&block[..count]);
            }
            Self::Bf16(values) => values[first..].iter_mut().zip(block).for_each(|(value, x)| *value = nearest(*x)),
            Self::Dynamic8 { codes, absmax, map } => {
                let codes = &mut codes[first..];
                let count = codes.len().min(BLOCK);
                // Magnitudes are ordered as their bits are.
                let bits = block[..count].iter().fold(0, |largest, x| x.abs().to_bits().max(largest));
                let largest = f32::from_bits(bits);
                absmax[first / BLOCK] = largest;
                let divisor = if largest == 0.0 { 1.0 } else { largest };
                codes.iter_mut().zip(block).for_each(|(code, x)| *code = map.nearest.of(x / divisor));
            }
        }
    }
}

/// The numbers that codes of 8 bits mean, rising. Small ones are dense: a run of zero bits gives the power of ten, from
/// 10⁻⁶ to 1, and the bits that are left cut its decade into equal parts, whose middles they are. Besides there are 0
/// and 1.
///
/// Source: Dettmers, arXiv:1511.04561, and Dettmers et al., arXiv:2110.02861, as `create_dynamic_map` of bitsandbytes.
pub(crate) struct DynamicMap {
    values: [f32; 256],
    nearest: NearestCodes,
}

/// Finds the code of the nearest number by two look-ups: numbers with the same sign, exponent and first bits of the
/// mantissa have at most two codes between them.
struct NearestCodes {
    /// The lower code of each such group of numbers.
    lower: [u32; 2 * GROUPS],
    /// The largest number that has it; infinite where no other is above.
    upper: [f32; 2 * GROUPS],
}

/// Groups of numbers of one sign, and a power of two.
const GROUPS: usize = 1 << 12;
/// Bits of a number that its group does not depend on: 7 of the mantissa are left.
const BITS_WITHIN: u32 = 16;
/// Of the first group of each sign, in which all numbers are whose nearest is zero: those up to 2⁻²².
const FIRST_GROUP: u32 = (127 - 23) << (23 - BITS_WITHIN);

impl NearestCodes {
    fn new(values: &[f32; 256]) -> Self {
        let upper: [f32; 255] = std::array::from_fn(|code| {
            let middle = (f64::from(values[code]) + f64::from(values[code + 1])) / 2.0;
            let rounded = middle as f32;
            if f64::from(rounded) > middle { rounded.next_down() } else { rounded }
        });
        let mut found = Self { lower: [0; 2 * GROUPS], upper: [f32::INFINITY; 2 * GROUPS] };
        for group in 0..GROUPS {
            let bits = (group as u32 + FIRST_GROUP) << BITS_WITHIN;
            let smallest = if group == 0 { 0.0 } else { f32::from_bits(bits) };
            let largest = f32::from_bits(bits | ((1 << BITS_WITHIN) - 1));
            for (place, least) in [(group, smallest), (GROUPS + group, -largest)] {
                let code = upper.partition_point(|upper| *upper < least);
                found.lower[place] = code as u32;
                found.upper[place] = upper.get(code).copied().unwrap_or(f32::INFINITY);
            }
        }
        found
    }

    /// The code of the number that is nearest to one of -1 to 1, the lower of two equally near ones; of what is not a
    /// number the first.
    #[inline(always)]
    fn of(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let group = (bits & 0x7fff_ffff) >> BITS_WITHIN;
        let group = group.max(FIRST_GROUP) - FIRST_GROUP;
        let place = (group.min(GROUPS as u32 - 1) | bits >> 31 << GROUPS.trailing_zeros()) as usize;
        let code = self.lower[place] + u32::from(x > self.upper[place]);
        (if x.is_nan() { 0 } else { code }) as u8
    }
}

impl DynamicMap {
    fn of(sign: Sign) -> &'static Self {
        static SIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(Sign::Signed));
        static UNSIGNED: LazyLock<DynamicMap> = LazyLock::new(|| DynamicMap::new(Sign::Unsigned));
        match sign {
            Sign::Signed => &SIGNED,
            Sign::Unsigned => &UNSIGNED,
        }
    }

    fn new(sign: Sign) -> Self {
        let mut values = vec![0.0f32, 1.0];
        for decade in 0..7 {
            let parts = match sign {
                Sign::Signed => 1 << decade,
                Sign::Unsigned => 2 << decade,
            };
            let boundaries = linspace(parts);
            let power = 10f64.powi(decade - 6) as f32;
            for pair in boundaries.windows(2) {
                let value = power * ((pair[0] + pair[1]) / 2.0);
                values.push(value);
                if sign == Sign::Signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f32::total_cmp);
        let values: [f32; 256] = values.try_into().expect("two numbers and 2 · 127 or 254");
        Self { nearest: NearestCodes::new(&values), values }
    }
}

/// From 0.1 to 1 in so many equal parts, in f32 as torch's `linspace`: from both ends, each product added unrounded.
fn linspace(parts: usize) -> Vec<f32> {
    let (start, step) = (0.1f32, (1.0 - 0.1f32) / parts as f32);
    let boundary = |index: usize| {
        if index < parts.div_ceil(2) {
            (f64::from(start) + f64::from(step) * index as f64) as f32
        } else {
            (1.0 - f64::from(step) * (parts - index) as f64) as f32
        }
    };
    (0..=parts).map(boundary).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_that_of_the_nearest_number_the_lower_of_two() {
        for sign in [Sign::Signed, Sign::Unsigned] {
            let DynamicMap { values, nearest } = DynamicMap::of(sign);
            let middles: Vec<f64> =
                values.windows(2).map(|pair| (f64::from(pair[0]) + f64::from(pair[1])) / 2.0).collect();
            let around = |x: f32| [x.next_down().next_down(), x.next_down(), x, x.next_up(), x.next_up().next_up()];
            let boundaries = middles.iter().map(|middle| *middle as f32);
            let groups = (0..GROUPS as u32).map(|group| f32::from_bits((group + FIRST_GROUP) << BITS_WITHIN));
            let between = (0..=1.0f32.to_bits()).step_by(4099).map(f32::from_bits);
            let all = boundaries.chain(values.iter().copied()).chain(groups).flat_map(around).chain(between);
            for x in all.flat_map(|x| [x, -x]).filter(|x| x.abs() <= 1.0) {
                let expected = middles.partition_point(|middle| *middle < f64::from(x));
                assert_eq!(usize::from(nearest.of(x)), expected, "{x:e}");
            }
            assert_eq!(nearest.of(f32::NAN), 0);
        }
    }
}
