//! Numbers that may lie in memory that a mapping has made, and how memory is laid out for them.

use half::{bf16, f16};

/// As long and as aligned as a cache line: buffers are made of these. A vector, or a row of a tile, that begins within
/// a line is read as two.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
pub(super) struct Line([u128; 4]);

impl Line {
    /// Its size.
    pub(super) const BYTES: usize = size_of::<Self>();
}

/// A number type that any bits are a value of, zero bits that of zero.
pub(super) trait Plain: Copy + Default {}

impl Plain for f32 {}
impl Plain for bf16 {}
impl Plain for f16 {}
