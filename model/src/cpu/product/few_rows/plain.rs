//! Lanes as an array, which the compiler turns into vector code.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;

use super::{Element, Lanes};

/// Lanes.
const WIDTH: usize = 8;

/// Sums of products with numbers of type `T`, fused where the machine multiplies and adds in one instruction.
pub(super) struct Plain<T, const FUSED: bool>([f32; WIDTH], PhantomData<T>);

impl<T, const FUSED: bool> Clone for Plain<T, FUSED> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const FUSED: bool> Copy for Plain<T, FUSED> {}

impl<T: Element, const FUSED: bool> Lanes for Plain<T, FUSED> {
    type Left = f32;
    type Right = T;
    type Loaded = [f32; WIDTH];
    const WIDTH: usize = WIDTH;

    #[inline(always)]
    fn zero() -> Self {
        Self([0.0; WIDTH], PhantomData)
    }

    #[inline(always)]
    unsafe fn left(from: *const f32) -> [f32; WIDTH] {
        // SAFETY: the caller vouches for so many numbers.
        unsafe { widened(from, WIDTH) }
    }

    #[inline(always)]
    unsafe fn left_part(from: *const f32, count: usize) -> [f32; WIDTH] {
        // SAFETY: as above.
        unsafe { widened(from, count) }
    }

    #[inline(always)]
    unsafe fn right(from: *const T) -> [f32; WIDTH] {
        // SAFETY: as above.
        unsafe { widened(from, WIDTH) }
    }

    #[inline(always)]
    unsafe fn right_part(from: *const T, count: usize) -> [f32; WIDTH] {
        // SAFETY: as above.
        unsafe { widened(from, count) }
    }

    #[inline(always)]
    unsafe fn add_products(mut self, left: [f32; WIDTH], right: [f32; WIDTH]) -> Self {
        for ((sum, left), right) in self.0.iter_mut().zip(left).zip(right) {
            *sum = if FUSED { left.mul_add(right, *sum) } else { left * right + *sum };
        }
        self
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

/// `count` numbers, with zeros after them.
///
/// # Safety
/// So many must lie there.
#[inline(always)]
unsafe fn widened<T: Element>(from: *const T, count: usize) -> [f32; WIDTH] {
    // SAFETY: the caller vouches for them.
    let values = unsafe { std::slice::from_raw_parts(from, count) };
    let mut widened = [0.0; WIDTH];
    widened.iter_mut().zip(values).for_each(|(widened, value)| *widened = value.widen());
    widened
}
