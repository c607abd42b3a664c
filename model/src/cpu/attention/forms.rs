//! One generic block of rows for each form that queries, keys and values come in.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::kernel::Kernel;
use super::{Operands, Qkv};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{self, Ready, Tiles};
use crate::cpu::instructions::InstructionSet;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx512Bf16, Multiplier};
use crate::cpu::simd::{Floats, Routine, Vector};

/// What is computed of a block of rows, by any kernel.
pub(super) trait Block {
    /// Computes it. Implementations are `#[inline(always)]`, as those of [`Routine::run`].
    ///
    /// # Safety
    /// The machine has the instructions; and what the block itself asks for.
    unsafe fn run<K: Kernel>(self, operands: Operands<'_, K::Word>);
}

/// Computes a block of rows on operands in whatever form they are in, with the instructions of a set.
///
/// # Safety
/// The machine has the set, and instructions for pairs where there are some; and as [`Block::run`].
pub(super) unsafe fn in_each_form(set: InstructionSet, qkv: Qkv<'_>, block: impl Block) {
    // SAFETY: the caller vouches for it all.
    unsafe {
        match qkv {
            Qkv::F32(operands) => set.run(OfFloats::<_, false> { operands, block }),
            Qkv::Rounded(operands) => set.run(OfFloats::<_, true> { operands, block }),
            #[cfg(target_arch = "x86_64")]
            Qkv::Pairs(operands) => {
                let pairs = OfPairs { operands, block };
                match set {
                    InstructionSet::Amx => pairs.in_tiles::<amx::Registers>(),
                    InstructionSet::AmxEmulated => pairs.in_tiles::<amx::Emulated>(),
                    _ => Avx512Bf16::compiled(pairs),
                }
            }
        }
    }
}

/// A block of values, rounded or not.
struct OfFloats<'a, B, const ROUNDED: bool> {
    operands: Operands<'a, f32>,
    block: B,
}

impl<B: Block, const ROUNDED: bool> Routine for OfFloats<'_, B, ROUNDED> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe { self.block.run::<Floats<V, ROUNDED>>(self.operands) }
    }
}

/// A block of pairs.
#[cfg(target_arch = "x86_64")]
struct OfPairs<'a, B> {
    operands: Operands<'a, u32>,
    block: B,
}

#[cfg(target_arch = "x86_64")]
impl<B: Block> OfPairs<'_, B> {
    /// Computes it by a thread that is ready for tiles.
    ///
    /// # Safety
    /// As for [`in_each_form`], and the process has the permission to use tiles.
    unsafe fn in_tiles<T: Tiles>(self) {
        // SAFETY: the caller vouches for it.
        unsafe {
            let _ready = Ready::<T>::new();
            Avx512Bf16::compiled(self);
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl<B: Block> Routine for OfPairs<'_, B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe { self.block.run::<Avx512Bf16>(self.operands) }
    }
}
