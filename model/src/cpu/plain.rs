//! Numbers that may lie in memory that a mapping has made.

use half::{bf16, f16};

/// A number type that any bits are a value of, zero bits that of zero.
pub(super) trait Plain: Copy + Default {}

impl Plain for f32 {}
impl Plain for bf16 {}
impl Plain for f16 {}
