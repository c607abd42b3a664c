//! Buffers of a thread, made once and used by every call.

#[cfg(not(any(test, feature = "guard-pages")))]
use std::cell::RefCell;

#[cfg(not(any(test, feature = "guard-pages")))]
use super::plain::Line;

#[cfg(not(any(test, feature = "guard-pages")))]
thread_local! {
    /// What no call has at the moment: a call within another has buffers of its own.
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

#[cfg(not(any(test, feature = "guard-pages")))]
/// Runs a function with buffers of so many values each, which hold whatever they hold.
pub(super) fn with_buffers<const COUNT: usize, R>(
    lengths: [usize; COUNT],
    run: impl FnOnce([*mut f32; COUNT]) -> R,
) -> R {
    let mut lines = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let counts = lengths.map(|length| (length * size_of::<f32>()).div_ceil(Line::BYTES));
    let total = counts.iter().sum();
    if lines.len() < total {
        lines.resize(total, Line::default());
    }
    let mut rest = &mut lines[..];
    let result = run(counts.map(|count| {
        let (buffer, others) = std::mem::take(&mut rest).split_at_mut(count);
        rest = others;
        buffer.as_mut_ptr().cast()
    }));
    FREE.with_borrow_mut(|free| free.push(lines));
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
