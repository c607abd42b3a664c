//! Buffers of a thread, made once and used by every call.

#[cfg(not(any(test, feature = "guard-pages")))]
use std::cell::RefCell;
#[cfg(not(any(test, feature = "guard-pages")))]
use std::sync::LazyLock;

#[cfg(not(any(test, feature = "guard-pages")))]
use super::memory::{Arena, Memory};
#[cfg(not(any(test, feature = "guard-pages")))]
use super::plain::Line;

/// Where the buffers of all threads lie.
#[cfg(not(any(test, feature = "guard-pages")))]
static MEMORY: LazyLock<Arena> = LazyLock::new(Arena::default);

#[cfg(not(any(test, feature = "guard-pages")))]
thread_local! {
    /// What no call has at the moment: a call within another has buffers of its own.
    static FREE: RefCell<Vec<Memory<f32>>> = const { RefCell::new(Vec::new()) };
}

/// Runs a function with buffers of so many values each, which begin at cache lines and hold whatever they hold.
#[cfg(not(any(test, feature = "guard-pages")))]
pub(super) fn with_buffers<const COUNT: usize, R>(
    lengths: [usize; COUNT],
    run: impl FnOnce([*mut f32; COUNT]) -> R,
) -> R {
    let mut memory = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let counts = lengths.map(|length| length.next_multiple_of(Line::BYTES / size_of::<f32>()));
    let total: usize = counts.iter().sum();
    if memory.len() < total {
        drop(std::mem::take(&mut memory));
        memory = MEMORY.room(total.next_power_of_two());
    }
    let mut rest = &mut memory[..];
    let result = run(counts.map(|count| {
        let (buffer, others) = std::mem::take(&mut rest).split_at_mut(count);
        rest = others;
        buffer.as_mut_ptr()
    }));
    FREE.with_borrow_mut(|free| free.push(memory));
    result
}

/// The same with each buffer between guard pages, and full of values that no result may come from: what is read before
/// it is written shows.
#[cfg(any(test, feature = "guard-pages"))]
pub(super) fn with_buffers<const COUNT: usize, R>(
    lengths: [usize; COUNT],
    run: impl FnOnce([*mut f32; COUNT]) -> R,
) -> R {
    let mut buffers = lengths.map(|length| {
        let mut buffer = super::guarded::Guarded::zeros(length, 64);
        buffer.fill(f32::NAN);
        buffer
    });
    run(buffers.each_mut().map(|buffer| buffer.as_mut_ptr()))
}
