//! Memory of tensors and weights. Large pieces lie in mappings for which the system is asked to use huge pages: a
//! product strides over many rows at once, and at 4 KiB a page it would wait for the translation of their addresses.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::collections::BTreeMap;
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
            Self::Part(part) => unsafe { std::slice::from_raw_parts(part.start, part.length) },
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
            Self::Part(part) => unsafe { std::slice::from_raw_parts_mut(part.start, part.length) },
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

/// Memory for tensors, weights or caches: pieces that are no larger than a few huge pages lie side by side in mappings,
/// and where one is given up there is room for the next. A mapping for each would begin and end within a huge page, and
/// mostly lie in small ones.
#[derive(Default)]
pub(super) struct Arena(Arc<Mappings>);

/// The mappings of an arena, each held until the last of its pieces is gone. It takes memory only where it was written.
#[derive(Default)]
struct Mappings {
    /// By address.
    mappings: Mutex<BTreeMap<usize, Mapping>>,
    /// Whether pages are held that no piece needs any more, until a piece finds no room in them.
    keeps: bool,
}

struct Mapping {
    memory: MmapRaw,
    /// Where there is room: the end of each range by its start, in bytes. No two touch.
    free: BTreeMap<usize, usize>,
    /// From here on nothing was ever given.
    untouched: usize,
}

/// Bytes of a mapping of pieces.
const MAPPING: usize = 32 << 20;
/// From so many bytes on a piece has a mapping of its own, of which little lies in small pages.
const LARGE_PIECE: usize = MAPPING / 4;
/// Pieces begin at multiples of this: the widest loads, and the lines of the cache.
const ALIGNMENT: usize = Line::BYTES;
/// Bytes of a huge page.
const HUGE_PAGE: usize = 2 << 20;

impl Arena {
    /// One for weights that come and go, layer by layer: the system clears each page that it gives, which would take as
    /// long as reading the weights, so that pages are used again.
    pub(super) fn for_passing_weights() -> Self {
        Self(Arc::new(Mappings { keeps: true, ..Mappings::default() }))
    }

    /// Room for so many values, all of which the caller is to write: what is there before is anything.
    pub(super) fn room<T: Plain>(&self, length: usize) -> Memory<T> {
        #[cfg(any(test, feature = "guard-pages"))]
        return Memory::Guarded(Guarded::zeros(length, ALIGNMENT));
        #[cfg(not(any(test, feature = "guard-pages")))]
        self.unguarded(length, |_| {})
    }

    /// So many zeros.
    pub(super) fn zeros<T: Plain>(&self, length: usize) -> Memory<T> {
        #[cfg(any(test, feature = "guard-pages"))]
        return Memory::Guarded(Guarded::zeros(length, ALIGNMENT));
        #[cfg(not(any(test, feature = "guard-pages")))]
        self.unguarded(length, |used| used.fill(T::default()))
    }

    /// Room, of which `clear` is given what may have been written before.
    #[cfg_attr(feature = "guard-pages", allow(dead_code, reason = "tests of it alone"))]
    fn unguarded<T: Plain>(&self, length: usize, clear: impl FnOnce(&mut [T])) -> Memory<T> {
        let bytes = (length * size_of::<T>()).next_multiple_of(ALIGNMENT);
        if bytes == 0 {
            return Memory::default();
        }
        let Some((start, is_untouched)) = self.0.take(bytes) else { return Memory::unguarded(length) };
        let mut memory = Memory::Part(Part { start: start.cast(), length, bytes, of: Arc::clone(&self.0) });
        if !is_untouched {
            clear(&mut memory);
        }
        memory
    }
}

impl Mappings {
    /// A range of so many bytes, and whether nothing was ever written there; none if the system gives no more.
    fn take(&self, bytes: usize) -> Option<(*mut u8, bool)> {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        // The smallest range that is large enough, so that larger pieces find room too.
        let ranges = mappings.iter().flat_map(|(address, mapping)| {
            mapping.free.iter().map(|(start, end)| (end - start, *address, *start)).filter(|(room, ..)| *room >= bytes)
        });
        let (address, start) = match ranges.min() {
            Some((_, address, start)) => (address, start),
            None => {
                let unused = if self.keeps { take_unused(&mut mappings) } else { Vec::new() };
                // Before the new one is made, which may then lie in their place.
                drop(unused);
                let memory: MmapRaw = map(if bytes < LARGE_PIECE { MAPPING } else { bytes })?.into();
                let (address, free) = (memory.as_ptr().addr(), BTreeMap::from([(0, memory.len())]));
                mappings.insert(address, Mapping { memory, free, untouched: 0 });
                (address, 0)
            }
        };
        let mapping = mappings.get_mut(&address).expect("it was found or made");
        let (end, until) = (start + bytes, mapping.free.remove(&start).expect("a range begins here"));
        if end < until {
            mapping.free.insert(end, until);
        }
        let is_untouched = start >= mapping.untouched;
        mapping.untouched = mapping.untouched.max(end);
        Some((mapping.memory.as_mut_ptr().wrapping_add(start), is_untouched))
    }

    /// Takes back a range, and gives the huge pages that have become free to the system.
    fn give(&self, at: *mut u8, bytes: usize) {
        let mut mappings = self.mappings.lock().unwrap_or_else(PoisonError::into_inner);
        let (address, mapping) = mappings.range_mut(..=at.addr()).next_back().expect("a piece lies in a mapping");
        let (address, mut start) = (*address, at.addr() - address);
        let mut end = start + bytes;
        if let Some((before, _)) = mapping.free.range(..start).next_back().filter(|(_, end)| **end == start) {
            start = *before;
        }
        if let Some(behind) = mapping.free.remove(&end) {
            end = behind;
        }
        mapping.free.insert(start, end);
        if self.keeps {
            return;
        }
        if mapping.is_unused() {
            let unused = mappings.remove(&address);
            drop(mappings);
            return drop(unused);
        }
        // What was free before was given back before, but for the ends of it.
        let (given, until) = (at.addr().saturating_sub(HUGE_PAGE).max(address + start), at.addr() + bytes + HUGE_PAGE);
        let pages = given.next_multiple_of(HUGE_PAGE)..until.min(address + end) / HUGE_PAGE * HUGE_PAGE;
        #[cfg(unix)]
        if !pages.is_empty() {
            // SAFETY: the range is nobody's, and what lies in it is not read before it is written. Where the system
            // keeps the pages it works as well.
            let given = unsafe {
                let free = memmap2::UncheckedAdvice::DontNeed;
                mapping.memory.unchecked_advise_range(free, pages.start - address, pages.len())
            };
            given.ok();
        }
    }
}

impl Mapping {
    fn is_unused(&self) -> bool {
        self.free.get(&0) == Some(&self.memory.len())
    }
}

/// Takes out the mappings that no piece lies in.
fn take_unused(mappings: &mut BTreeMap<usize, Mapping>) -> Vec<Mapping> {
    let (unused, used) = std::mem::take(mappings).into_iter().partition(|(_, mapping)| mapping.is_unused());
    *mappings = used;
    BTreeMap::into_values(unused).collect()
}

/// A part of a mapping that is its owner's alone.
pub(super) struct Part<T> {
    start: *mut T,
    length: usize,
    /// Of the range that it takes.
    bytes: usize,
    of: Arc<Mappings>,
}

// SAFETY: the range is the owner's alone, until it is given back.
unsafe impl<T: Send> Send for Part<T> {}
// SAFETY: as above; it is written to through an exclusive borrow alone.
unsafe impl<T: Sync> Sync for Part<T> {}

impl<T> Drop for Part<T> {
    fn drop(&mut self) {
        self.of.give(self.start.cast(), self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use half::bf16;

    use super::*;

    /// Pieces of an arena as they are outside of tests, what was used before being cleared.
    fn zeros(arena: &Arena, length: usize) -> Memory<f32> {
        arena.unguarded(length, |used| used.fill(0.0))
    }

    fn mappings(arena: &Arena) -> usize {
        arena.0.mappings.lock().expect("no test has failed with it").len()
    }

    #[test]
    fn pieces_lie_side_by_side_aligned_and_apart() {
        let arena = Arena::default();
        let lengths = [1, 1000, 0, 17, LARGE_PIECE / 4 - 16, LARGE_PIECE / 4, 300];
        let mut pieces: Vec<Memory<f32>> =
            lengths.iter().chain(&lengths).chain(&lengths).map(|length| zeros(&arena, *length)).collect();
        for (piece, number) in pieces.iter_mut().zip(1u8..) {
            assert!(piece.iter().all(|value| *value == 0.0));
            assert_eq!(piece.as_ptr() as usize % ALIGNMENT, 0);
            piece.fill(f32::from(number));
        }
        assert!(mappings(&arena) <= 4, "one of small pieces, and one for each large one");
        let held = Arc::clone(&arena.0);
        drop(arena);
        pieces.remove(4);
        for (piece, number) in pieces.iter().zip((1u8..).filter(|number| *number != 5)) {
            assert!(piece.iter().all(|value| *value == f32::from(number)), "piece {number}");
        }
        drop(pieces);
        assert_eq!(mappings(&Arena(held)), 0);
    }

    /// Pieces come and go in any order: none overlaps another, zeros are zeros, and all room is found again.
    #[test]
    fn what_is_given_up_is_room_for_others() {
        for arena in [Arena::default(), Arena::for_passing_weights()] {
            let (mut pieces, mut state): (Vec<(Memory<f32>, f32)>, u64) = (Vec::new(), 1);
            let mut draw = |below: usize| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as usize % below
            };
            for number in 1u16..600 {
                if pieces.len() > 12 || draw(3) == 0 && !pieces.is_empty() {
                    let (piece, number) = pieces.swap_remove(draw(pieces.len()));
                    assert!(piece.iter().all(|value| *value == number));
                } else {
                    let most = [100, 10_000, 1_000_000, 2_500_000][draw(4)];
                    let mut piece = zeros(&arena, 1 + draw(most));
                    assert!(piece.iter().all(|value| *value == 0.0));
                    piece.fill(f32::from(number));
                    pieces.push((piece, f32::from(number)));
                }
            }
            assert!(pieces.iter().all(|(piece, number)| piece.iter().all(|value| value == number)));
            drop(pieces);
            let held = arena.0.mappings.lock().expect("no other thread has it");
            assert_eq!(held.is_empty(), !arena.0.keeps);
            assert!(held.values().all(Mapping::is_unused));
        }
    }

    #[test]
    fn the_smallest_room_is_taken_first() {
        let arena = Arena::default();
        let pieces: Vec<_> = [4096, 64, 1024, 64].map(|length| zeros(&arena, length)).into();
        let places: Vec<_> = pieces.iter().map(|piece| piece.as_ptr()).collect();
        let [large, _between, small, _behind] = <[_; 4]>::try_from(pieces).ok().expect("as many as were made");
        drop((large, small));
        let (first, second) = (zeros(&arena, 1000), zeros(&arena, 2000));
        assert_eq!([first.as_ptr(), second.as_ptr()], [places[2], places[0]]);
    }

    #[test]
    fn a_weight_that_passes_leaves_its_memory_to_the_next() {
        let arena = Arena::for_passing_weights();
        let layer = |lengths: [usize; 2]| {
            let mut pieces = lengths.map(|length| zeros(&arena, length));
            assert!(pieces.iter().all(|piece| piece.iter().all(|value| *value == 0.0)));
            pieces.iter_mut().for_each(|piece| piece.fill(1.0));
            BTreeSet::from(pieces.map(|piece| piece.as_ptr()))
        };
        let places = layer([1 << 20, MAPPING / 4]);
        assert_eq!((layer([1 << 20, MAPPING / 4]), mappings(&arena)), (places, 2));
        layer([1 << 20, MAPPING]);
        assert_eq!(mappings(&arena), 2, "the one that had no room for it is gone");
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
