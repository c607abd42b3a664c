//! Memory of tensors and weights. Large pieces lie in mappings for which the system is asked to use huge pages: a
//! product strides over many rows at once, and at 4 KiB a page it would wait for the translation of their addresses.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};

#[cfg(any(test, feature = "guard-pages"))]
use super::guarded::Guarded;
use super::plain::{Line, Plain};
use super::shared::SharedValues;

/// From so many bytes on a piece is a mapping of its own. (The system joins mappings that lie side by side, and only
/// ranges of whole huge pages become such, so that none is larger for it.)
const LARGE: usize = 1 << 20;

/// Owned values. The default has none.
pub(super) enum Memory<T> {
    /// From the allocator, so many values.
    Heap(Vec<Line>, usize),
    /// A mapping, of so many values.
    Mapping(MmapMut, usize),
    /// A part of a mapping that others lie in, too.
    Part(Part<T>),
    /// Between pages that nobody may touch.
    #[cfg(any(test, feature = "guard-pages"))]
    Guarded(Guarded<T>),
    /// Frozen ones, which other processes see too.
    Shared(SharedValues<T>),
    /// The first so many of values that others may read. Written to by whoever is alone with them, or has copied them.
    Lent(Arc<Memory<T>>, usize),
}

impl<T> Default for Memory<T> {
    fn default() -> Self {
        Self::Heap(Vec::new(), 0)
    }
}

impl<T: Plain> Memory<T> {
    /// So many zeros.
    pub(super) fn zeros(length: usize) -> Self {
        #[cfg(any(test, feature = "guard-pages"))]
        return Self::Guarded(Guarded::zeros(length, align_of::<T>()));
        #[cfg(not(any(test, feature = "guard-pages")))]
        Self::unguarded(length)
    }

    /// So many zeros, as they are outside of tests.
    #[cfg_attr(feature = "guard-pages", allow(dead_code, reason = "tests of it alone"))]
    fn unguarded(length: usize) -> Self {
        let bytes = length * size_of::<T>();
        if bytes >= LARGE
            && let Some(mapping) = map(bytes)
        {
            return Self::Mapping(mapping, length);
        }
        Self::Heap(vec![Line::default(); bytes.div_ceil(Line::BYTES)], length)
    }

    /// The first `length` values, which others may read from now on, as long as nobody writes to them here.
    pub(super) fn lend(&mut self, length: usize) -> Self {
        let whole = self.len();
        let values = match std::mem::take(self) {
            Self::Lent(values, _) => values,
            own => Arc::new(own),
        };
        *self = Self::Lent(Arc::clone(&values), whole);
        Self::Lent(values, length)
    }

    /// The memory itself, unless others still read from it.
    pub(super) fn alone(self) -> Option<Self> {
        match self {
            Self::Lent(values, _) => Arc::into_inner(values),
            own => Some(own),
        }
    }

    /// Copies values that others read.
    fn own(&mut self) {
        if let Self::Lent(values, length) = self
            && Arc::get_mut(values).is_none()
        {
            let mut copy = Self::zeros(*length);
            copy.copy_from_slice(&values[..*length]);
            *self = copy;
        }
    }
}

impl<T: Plain> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            // SAFETY: any bits are a value of the type, no type is aligned to more than a line, and there is room.
            Self::Heap(lines, length) => unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), *length) },
            // SAFETY: any bits are a value of the type; a mapping begins at a page, so that all its values are aligned.
            Self::Mapping(mapping, length) => unsafe { &mapping.align_to().1[..*length] },
            // SAFETY: any bits are a value of the type; the part is aligned, lies within its mapping, and was given to
            // nobody else.
            Self::Part(part) => unsafe { std::slice::from_raw_parts(part.address(), part.length) },
            #[cfg(any(test, feature = "guard-pages"))]
            Self::Guarded(values) => values,
            Self::Shared(values) => values,
            Self::Lent(values, length) => &values[..*length],
        }
    }
}

impl<T: Plain> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.own();
        match self {
            // SAFETY: as above.
            Self::Heap(lines, length) => unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), *length) },
            // SAFETY: as above.
            Self::Mapping(mapping, length) => unsafe { &mut mapping.align_to_mut().1[..*length] },
            // SAFETY: as above, and this is the only way to it.
            Self::Part(part) => unsafe { std::slice::from_raw_parts_mut(part.address(), part.length) },
            #[cfg(any(test, feature = "guard-pages"))]
            Self::Guarded(values) => values,
            Self::Shared(_) => unreachable!("only frozen weights are shared, and nothing writes to these"),
            Self::Lent(values, length) => {
                &mut Arc::get_mut(values).expect("values that others read were copied")[..*length]
            }
        }
    }
}

/// A mapping of so many bytes, if the system gives one.
fn map(bytes: usize) -> Option<MmapMut> {
    let mapping = MmapMut::map_anon(bytes).ok()?;
    // Without huge pages it works as well, only slower.
    #[cfg(target_os = "linux")]
    mapping.advise(memmap2::Advice::HugePage).ok();
    Some(mapping)
}

/// Memory for the weights of a model, or for its caches: pieces that are no larger than a few huge pages lie side by
/// side in one mapping after the other. A mapping for each would begin and end within a huge page, and mostly lie in
/// small ones.
#[derive(Default)]
pub(super) struct Arena {
    open: Mutex<Option<Open>>,
    /// The mappings of weights that come and go.
    passing: Option<Passing>,
}

/// The mapping that has room.
struct Open {
    mapping: Arc<MmapRaw>,
    /// Bytes that are taken.
    taken: usize,
}

/// Bytes of a mapping of pieces. It is held until the last of them is gone, and takes memory only where it was
/// written.
const MAPPING: usize = 32 << 20;
/// From so many bytes on a piece has a mapping of its own, of which little lies in small pages.
const LARGE_PIECE: usize = MAPPING / 4;
/// Pieces begin at multiples of this: the widest loads, and the lines of the cache.
const ALIGNMENT: usize = Line::BYTES;

impl Arena {
    /// One for weights that come and go, layer by layer: the system clears each page that it gives, which would take as
    /// long as reading the weights, so that mappings are used again.
    pub(super) fn for_passing_weights() -> Self {
        Self { passing: Some(Passing::default()), ..Self::default() }
    }

    /// Room for so many values, all of which the caller is to write: what is there before is anything.
    pub(super) fn room<T: Plain>(&self, length: usize) -> Memory<T> {
        #[cfg(any(test, feature = "guard-pages"))]
        return Memory::Guarded(Guarded::zeros(length, ALIGNMENT));
        #[cfg(not(any(test, feature = "guard-pages")))]
        self.unguarded_room(length)
    }

    #[cfg_attr(feature = "guard-pages", allow(dead_code, reason = "tests of it alone"))]
    fn unguarded_room<T: Plain>(&self, length: usize) -> Memory<T> {
        let bytes = length * size_of::<T>();
        let mapping = self.passing.as_ref().filter(|_| bytes >= LARGE).and_then(|passing| passing.take(bytes));
        match mapping {
            Some(mapping) => Memory::Part(Part { mapping, offset: 0, length, of: PhantomData }),
            None => self.unguarded(length),
        }
    }

    /// So many zeros.
    pub(super) fn zeros<T: Plain>(&self, length: usize) -> Memory<T> {
        #[cfg(any(test, feature = "guard-pages"))]
        return Memory::Guarded(Guarded::zeros(length, ALIGNMENT));
        #[cfg(not(any(test, feature = "guard-pages")))]
        self.unguarded(length)
    }

    #[cfg_attr(feature = "guard-pages", allow(dead_code, reason = "tests of it alone"))]
    fn unguarded<T: Plain>(&self, length: usize) -> Memory<T> {
        let bytes = (length * size_of::<T>()).next_multiple_of(ALIGNMENT);
        if bytes >= LARGE_PIECE {
            return Memory::unguarded(length);
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.as_ref().is_none_or(|open| open.taken + bytes > MAPPING) {
            let Some(mapping) = map(MAPPING) else { return Memory::unguarded(length) };
            *open = Some(Open { mapping: Arc::new(mapping.into()), taken: 0 });
        }
        let open = open.as_mut().expect("it was opened");
        let offset = open.taken;
        open.taken += bytes;
        Memory::Part(Part { mapping: Arc::clone(&open.mapping), offset, length, of: PhantomData })
    }
}

/// A part of a mapping that is its owner's alone.
pub(super) struct Part<T> {
    mapping: Arc<MmapRaw>,
    /// In bytes.
    offset: usize,
    length: usize,
    of: PhantomData<T>,
}

impl<T> Part<T> {
    fn address(&self) -> *mut T {
        self.mapping.as_mut_ptr().wrapping_add(self.offset).cast()
    }
}

/// Mappings for one weight each, those in use and those whose weight is gone.
#[derive(Default)]
struct Passing(Mutex<Vec<Arc<MmapRaw>>>);

impl Passing {
    /// The smallest that is not in use and large enough. If there is none, a new one takes the place of all that are
    /// not in use: so there are never many more than were in use at once.
    fn take(&self, bytes: usize) -> Option<Arc<MmapRaw>> {
        let mut mappings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |mapping: &mut Arc<MmapRaw>| Arc::get_mut(mapping).is_some();
        let free = mappings.iter_mut().filter(|mapping| mapping.len() >= bytes);
        let smallest = free.filter_map(|mapping| is_free(mapping).then_some(&*mapping)).min_by_key(|free| free.len());
        if let Some(mapping) = smallest {
            return Some(Arc::clone(mapping));
        }
        mappings.retain_mut(|mapping| !is_free(mapping));
        let mapping: Arc<MmapRaw> = Arc::new(map(bytes)?.into());
        mappings.push(Arc::clone(&mapping));
        Some(mapping)
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn weights_lie_side_by_side_aligned_and_apart() {
        let memory = Arena::default();
        let lengths = [1, 1000, 0, 17, LARGE_PIECE / 4 - 16, LARGE_PIECE / 4, 300];
        let mut weights: Vec<Memory<f32>> =
            lengths.iter().chain(&lengths).chain(&lengths).map(|length| memory.unguarded(*length)).collect();
        for (weight, number) in weights.iter_mut().zip(1u8..) {
            assert!(weight.iter().all(|value| *value == 0.0));
            assert_eq!(weight.as_ptr() as usize % ALIGNMENT, 0);
            weight.fill(f32::from(number));
        }
        drop(memory);
        weights.remove(4);
        for (weight, number) in weights.iter().zip((1u8..).filter(|number| *number != 5)) {
            assert!(weight.iter().all(|value| *value == f32::from(number)), "weight {number}");
        }
        assert_eq!(weights.iter().filter(|weight| matches!(weight, Memory::Mapping(..))).count(), 3);
    }

    #[test]
    fn a_weight_that_passes_leaves_its_memory_to_the_next() {
        let memory = Arena::for_passing_weights();
        let held = || memory.passing.as_ref().map(|passing| passing.0.lock().map_or(0, |held| held.len()));
        let (small, large) = (LARGE / 4, LARGE / 2);
        let (one, two): (Memory<f32>, Memory<f32>) = (memory.unguarded_room(small), memory.unguarded_room(large));
        assert_ne!(one.as_ptr(), two.as_ptr());
        let places = (one.as_ptr(), two.as_ptr());
        drop((one, two));
        let one: Memory<f32> = memory.unguarded_room(small);
        let two: Memory<f32> = memory.unguarded_room(small);
        assert_eq!((one.as_ptr(), two.as_ptr()), places, "the smallest that is large enough first");
        assert_eq!((two.len(), held()), (small, Some(2)));
        drop(one);
        let three: Memory<f32> = memory.unguarded_room(2 * large);
        assert_eq!(held(), Some(2), "the free one was too small and is gone");
        assert_eq!((three.len(), two.len()), (2 * large, small));
        assert_eq!(memory.unguarded_room::<f32>(small - 1).len(), small - 1);
        assert_eq!(held(), Some(2), "small ones lie side by side");
    }

    #[test]
    fn small_and_large_pieces_are_zeros_to_write() {
        for length in [0, 1, 1000, LARGE / 4 - 1, LARGE / 4, LARGE / 2 + 3] {
            let mut values = Memory::<f32>::unguarded(length);
            assert_eq!((values.len(), values.as_ptr().addr() % Line::BYTES), (length, 0));
            assert!(values.iter().all(|value| *value == 0.0));
            values.iter_mut().zip((0..=u16::MAX).cycle()).for_each(|(value, index)| *value = index.into());
            assert!(values.iter().zip((0..=u16::MAX).cycle()).all(|(value, index)| *value == f32::from(index)));
            assert_eq!(matches!(values, Memory::Mapping(..)), length * 4 >= LARGE);
        }
        assert_eq!(Memory::<bf16>::unguarded(LARGE).len(), LARGE);
    }
}
