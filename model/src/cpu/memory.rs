//! Memory of tensors and weights. Large pieces lie in mappings for which the system is asked to use huge pages: a product strides
//! over many rows at once, and at 4 KiB a page it would wait for the translation of their addresses.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

use super::plain::Plain;
use super::shared::SharedValues;

/// From so many bytes on a piece is a mapping of its own. (The system joins mappings that lie side by side, and only ranges of whole
/// huge pages become such, so that none is larger for it.)
const LARGE: usize = 1 << 20;

/// Owned values. The default has none.
pub(super) enum Memory<T> {
    /// From the allocator.
    Heap(Vec<T>),
    /// A mapping, of so many values.
    Mapping(MmapMut, usize),
    /// Frozen ones, which other processes see too.
    Shared(SharedValues<T>),
}

impl<T> Default for Memory<T> {
    fn default() -> Self {
        Self::Heap(Vec::new())
    }
}

impl<T: Plain> Memory<T> {
    /// So many zeros.
    pub(super) fn zeros(length: usize) -> Self {
        let bytes = length * size_of::<T>();
        if bytes >= LARGE
            && let Ok(mapping) = MmapMut::map_anon(bytes)
        {
            // Without huge pages it works as well, only slower.
            #[cfg(target_os = "linux")]
            mapping.advise(memmap2::Advice::HugePage).ok();
            return Self::Mapping(mapping, length);
        }
        Self::Heap(vec![T::default(); length])
    }
}

impl<T: Plain> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Heap(values) => values,
            // SAFETY: any bits are a value of the type; a mapping begins at a page, so that all its values are aligned.
            Self::Mapping(mapping, length) => unsafe { &mapping.align_to().1[..*length] },
            Self::Shared(values) => values,
        }
    }
}

impl<T: Plain> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Heap(values) => values,
            // SAFETY: as above.
            Self::Mapping(mapping, length) => unsafe { &mut mapping.align_to_mut().1[..*length] },
            Self::Shared(_) => unreachable!("only frozen weights are shared, and nothing writes to these"),
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn small_and_large_pieces_are_zeros_to_write() {
        for length in [0, 1, 1000, LARGE / 4 - 1, LARGE / 4, LARGE / 2 + 3] {
            let mut values = Memory::<f32>::zeros(length);
            assert_eq!(values.len(), length);
            assert!(values.iter().all(|value| *value == 0.0));
            values.iter_mut().zip(0u16..).for_each(|(value, index)| *value = index.into());
            assert!(values.iter().zip(0u16..).all(|(value, index)| *value == f32::from(index)));
            assert_eq!(matches!(values, Memory::Mapping(..)), length * 4 >= LARGE);
        }
        assert_eq!(Memory::<bf16>::zeros(LARGE).len(), LARGE);
    }
}
