//! Memory that ends where a page begins that nobody may touch: a kernel that reads or writes past its buffer is stopped
//! at that instruction.
//!
//! For tests alone: every buffer takes three pages and two system calls. What lies before the values, down to the
//! page's beginning, has a pattern that is compared when the memory is given back, so that a write before the buffer is
//! found too.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use super::plain::Plain;

/// What lies before the values.
const PATTERN: u8 = 0xa5;

/// Zeros between guard pages.
pub(super) struct Guarded<T> {
    mapping: *mut u8,
    /// Bytes of the mapping, the two guard pages included.
    mapped: usize,
    /// Bytes before the values, the first guard page included.
    offset: usize,
    length: usize,
    of: PhantomData<T>,
}

// SAFETY: it owns its mapping, to which nothing else has a pointer.
unsafe impl<T: Send> Send for Guarded<T> {}
// SAFETY: as above; it is written to through an exclusive borrow alone.
unsafe impl<T: Sync> Sync for Guarded<T> {}

fn page() -> usize {
    // SAFETY: it reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).expect("pages have a size")
}

impl<T: Plain> Guarded<T> {
    /// So many zeros, aligned to `alignment` bytes. They end at the guard page, or as little before it as the alignment
    /// asks for.
    pub(super) fn zeros(length: usize, alignment: usize) -> Self {
        let page = page();
        let bytes = length * size_of::<T>();
        let alignment = alignment.max(align_of::<T>());
        let room = bytes.next_multiple_of(alignment).next_multiple_of(page);
        let mapped = room + 2 * page;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping of memory that is nobody's yet, at a place that the system chooses.
        let mapping =
            unsafe { libc::mmap(std::ptr::null_mut(), mapped, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED, "the system gives no memory");
        let mapping = mapping.cast::<u8>();
        for guard in [0, page + room] {
            // SAFETY: a page of the mapping above.
            let protected = unsafe { libc::mprotect(mapping.add(guard).cast(), page, libc::PROT_NONE) };
            assert_eq!(protected, 0, "the system protects no page");
        }
        let offset = page + room - bytes.next_multiple_of(alignment);
        // SAFETY: what lies between the first guard page and the values.
        unsafe { mapping.add(page).write_bytes(PATTERN, offset - page) };
        Self { mapping, mapped, offset, length, of: PhantomData }
    }
}

impl<T: Plain> Deref for Guarded<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: any bits are a value of the type, and the values lie in the mapping, aligned.
        unsafe { std::slice::from_raw_parts(self.mapping.add(self.offset).cast(), self.length) }
    }
}

impl<T: Plain> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and this is the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.add(self.offset).cast(), self.length) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        let page = page();
        // SAFETY: what was filled with the pattern.
        let before = unsafe { std::slice::from_raw_parts(self.mapping.add(page), self.offset - page) };
        let is_whole = before.iter().all(|byte| *byte == PATTERN);
        // SAFETY: the mapping is this one's own, and nothing points to it any more.
        let unmapped = unsafe { libc::munmap(self.mapping.cast(), self.mapped) };
        if !std::thread::panicking() {
            assert!(is_whole, "something wrote before the beginning of a buffer");
            assert_eq!(unmapped, 0, "the system takes its memory back");
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn values_end_at_the_guard_page() {
        for length in [0, 1, 15, 1024, 100_000] {
            let mut values = Guarded::<f32>::zeros(length, 4);
            assert_eq!(values.as_ptr_range().end as usize % page(), 0);
            assert!(values.iter().all(|value| *value == 0.0));
            values.fill(1.0);
            let aligned = Guarded::<bf16>::zeros(length, 64);
            assert_eq!(aligned.as_ptr() as usize % 64, 0);
            assert!(page() - 1 - (aligned.as_ptr_range().end as usize - 1) % page() < 64);
        }
    }

    #[test]
    #[should_panic(expected = "before the beginning")]
    fn a_write_before_the_values_is_found() {
        let mut values = Guarded::<f32>::zeros(3, 4);
        // SAFETY: the four bytes before the values belong to the mapping.
        unsafe { values.as_mut_ptr().sub(1).write(1.0) };
    }
}
