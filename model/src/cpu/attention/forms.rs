//! One generic block of rows for each form that queries, keys and values come in.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;

use super::kernel::Kernel;
use super::{Operands, Qkv};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{self, Ready, Tiles};
use crate::cpu::instructions::InstructionSet;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::Avx512Bf16;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::NeonBf16;
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
            Qkv::Pairs(operands) => match set {
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Amx => in_tiles::<amx::Registers>(operands, block),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::AmxEmulated => in_tiles::<amx::Emulated>(operands, block),
                #[cfg(target_arch = "x86_64")]
                InstructionSet::Avx512Bf16 => of_pairs::<Avx512Bf16>(operands, block),
                #[cfg(target_arch = "aarch64")]
                InstructionSet::NeonBf16 => of_pairs::<NeonBf16>(operands, block),
                _ => unreachable!("pairs of {set}"),
            },
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
struct OfPairs<'a, K, B> {
    operands: Operands<'a, u32>,
    block: B,
    kernel: PhantomData<K>,
}

impl<K: Kernel<Word = u32>, B: Block> Routine for OfPairs<'_, K, B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for it.
        unsafe { self.block.run::<K>(self.operands) }
    }
}

/// Computes a block of pairs.
///
/// # Safety
/// The machine has the instructions; and as [`Block::run`].
unsafe fn of_pairs<K: Kernel<Word = u32>>(operands: Operands<'_, u32>, block: impl Block) {
    // SAFETY: the caller vouches for it.
    unsafe { K::compiled(OfPairs { operands, block, kernel: PhantomData::<K> }) }
}

/// Computes a block of pairs by a thread that is ready for tiles.
///
/// # Safety
/// As for [`of_pairs`], and the process has the permission to use tiles.
#[cfg(target_arch = "x86_64")]
unsafe fn in_tiles<T: Tiles>(operands: Operands<'_, u32>, block: impl Block) {
    // SAFETY: the caller vouches for it.
    unsafe {
        let _ready = Ready::<T>::new();
        of_pairs::<Avx512Bf16>(operands, block);
    }
}
