//! Frozen weights in memory that several processes map: one of them prepares them, and the others read what it has
//! prepared.
//!
//! They lie one behind the other in the order in which a decoder is built, which is the same in every process; nothing
//! else needs to be agreed on. The processes that read have them mapped read-only.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::{MmapOptions, MmapRaw};

use super::plain::Plain;
use crate::ops::KernelError;

/// Weights begin at multiples of this: the widest loads, and the lines of the cache.
const ALIGNMENT: usize = 64;

/// A place for frozen weights that several processes map.
pub struct SharedWeights {
    mapping: Arc<MmapRaw>,
    made: Made,
    /// Bytes that are taken.
    taken: AtomicUsize,
}

/// Who prepares the weights.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Made {
    Here,
    Elsewhere,
}

/// Why weights cannot be shared.
#[derive(Debug, thiserror::Error)]
pub enum SharedWeightsError {
    /// The memory cannot be mapped.
    #[error("cannot map the memory for shared weights")]
    Map(#[source] io::Error),
    /// There is less memory than the weights need.
    #[error("the weights need more than the {bytes} bytes of the memory that they are to share")]
    Full {
        /// Its size.
        bytes: usize,
    },
}

impl SharedWeightsError {
    pub(super) fn in_operation(self, operation: &'static str) -> KernelError {
        KernelError { kernel_set: "cpu", operation, source: Box::new(self) }
    }
}

impl SharedWeights {
    /// The place, in the process that prepares the weights. The file is memory (`memfd_create`) of
    /// [`SharedWeights::bytes_for`] them.
    ///
    /// # Errors
    /// Fails if it cannot be mapped.
    pub fn made_here(memory: &File) -> Result<Self, SharedWeightsError> {
        let mapping = MmapOptions::new().map_raw(memory).map_err(SharedWeightsError::Map)?;
        // Where the system gives huge pages to shared memory (`shmem_enabled`), products wait less for addresses.
        #[cfg(target_os = "linux")]
        mapping.advise(memmap2::Advice::HugePage).ok();
        Ok(Self::new(mapping, Made::Here))
    }

    /// The place, in a process that reads them once they are there.
    ///
    /// # Errors
    /// Fails if it cannot be mapped.
    pub fn made_elsewhere(memory: &File) -> Result<Self, SharedWeightsError> {
        let mapping = MmapOptions::new().map_raw_read_only(memory).map_err(SharedWeightsError::Map)?;
        Ok(Self::new(mapping, Made::Elsewhere))
    }

    fn new(mapping: MmapRaw, made: Made) -> Self {
        Self { mapping: Arc::new(mapping), made, taken: AtomicUsize::new(0) }
    }

    /// Bytes enough for so many weights of so many bytes in all.
    pub fn bytes_for(weights: usize, bytes: u64) -> u64 {
        bytes + (weights * ALIGNMENT) as u64
    }

    pub(super) fn are_made_elsewhere(&self) -> bool {
        self.made == Made::Elsewhere
    }

    /// A copy of a weight, where every process sees it.
    pub(super) fn put<T: Plain>(&self, values: &[T]) -> Result<SharedValues<T>, SharedWeightsError> {
        let place: SharedValues<T> = self.next(values.len())?;
        // SAFETY: the mapping is writable in the process that prepares weights, the place lies within it, is aligned,
        // and was given to nobody else; no other process reads it before it is told that all weights are there.
        unsafe { place.address().cast_mut().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        Ok(place)
    }

    /// The place of the next weight.
    pub(super) fn next<T: Plain>(&self, length: usize) -> Result<SharedValues<T>, SharedWeightsError> {
        let bytes = (length * size_of::<T>()).next_multiple_of(ALIGNMENT);
        let offset = self.taken.fetch_add(bytes, Ordering::Relaxed);
        if offset + bytes > self.mapping.len() {
            return Err(SharedWeightsError::Full { bytes: self.mapping.len() });
        }
        Ok(SharedValues { mapping: Arc::clone(&self.mapping), offset, length, of: PhantomData })
    }
}

/// The values of one weight.
pub(super) struct SharedValues<T> {
    mapping: Arc<MmapRaw>,
    /// In bytes.
    offset: usize,
    length: usize,
    of: PhantomData<T>,
}

impl<T> SharedValues<T> {
    fn address(&self) -> *const T {
        self.mapping.as_ptr().wrapping_add(self.offset).cast()
    }
}

impl<T: Plain> Deref for SharedValues<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: any bits are a value of the type; the place lies within the mapping and is aligned, as that is to a
        // page; nobody writes to it any more once its weight is made, and the mapping lives as long as this.
        unsafe { std::slice::from_raw_parts(self.address(), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn weights_are_read_where_they_were_put() {
        let file = tempfile::tempfile().unwrap();
        let (one, two) = ([1.0f32, 2.0, 3.0], [4.0, 5.0].map(bf16::from_f32));
        file.set_len(SharedWeights::bytes_for(2, 3 * 4 + 2 * 2)).unwrap();
        let here = SharedWeights::made_here(&file).unwrap();
        assert!(!here.are_made_elsewhere());
        assert_eq!(*here.put(&one).unwrap(), one);
        assert_eq!(*here.put(&two).unwrap(), two);
        let there = SharedWeights::made_elsewhere(&file).unwrap();
        assert!(there.are_made_elsewhere());
        assert_eq!(*there.next::<f32>(3).unwrap(), one);
        assert_eq!(*there.next::<bf16>(2).unwrap(), two);
        assert!(matches!(there.next::<f32>(3), Err(SharedWeightsError::Full { .. })));
    }
}
