//! The instruction sets of the kernels, of which one is chosen at run time: each kernel is compiled once per set.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::fmt;

#[cfg(target_arch = "aarch64")]
use super::simd::Neon;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Routine, Vector};
use crate::ops::Compute;

/// Instruction sets that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InstructionSet {
    /// What every machine of the architecture has.
    Portable,
    /// 256-bit vectors with fused multiply-add.
    Avx2,
    /// 512-bit vectors.
    Avx512,
    /// 512-bit vectors, with products of bf16 pairs that are summed in f32, and of bytes that are summed in 32 bits.
    Avx512Bf16,
    /// That, with products of bf16 in tiles (Intel AMX). [`InstructionSet::chosen`] takes it where it is fastest.
    Amx,
    /// The bits of [`InstructionSet::Amx`] on a machine without tiles, slowly: for tests.
    AmxEmulated,
    /// 128-bit vectors of ARM with fused multiply-add.
    Neon,
    /// Those, with products of bytes that are summed in 32 bits.
    NeonDot,
    /// That, with products of bf16 that are summed in f32, and of signed bytes with unsigned ones (Armv8.6).
    NeonBf16,
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.name())
    }
}

impl InstructionSet {
    /// All of them: of each architecture the narrower ones first, each of which those behind it contain.
    pub const ALL: [Self; 9] = [
        Self::Portable,
        Self::Avx2,
        Self::Avx512,
        Self::Avx512Bf16,
        Self::Amx,
        Self::AmxEmulated,
        Self::Neon,
        Self::NeonDot,
        Self::NeonBf16,
    ];

    /// The widest set of this machine but for tiles, which a process must ask for.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
            if avx512 && is_x86_feature_detected!("avx512vl") {
                let bf16 = is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("avx512dq");
                return if bf16 { Self::Avx512Bf16 } else { Self::Avx512 };
            }
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            if avx2 && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            use std::arch::is_aarch64_feature_detected;
            let dot = is_aarch64_feature_detected!("dotprod");
            let bf16 = is_aarch64_feature_detected!("bf16") && is_aarch64_feature_detected!("i8mm");
            match (dot, bf16) {
                (true, true) => Self::NeonBf16,
                (true, false) => Self::NeonDot,
                (false, _) => Self::Neon,
            }
        }
        #[cfg(not(target_arch = "aarch64"))]
        Self::Portable
    }

    /// Whether this machine has the set and, of tiles, lets this process use them.
    pub fn is_available(self) -> bool {
        let width = |set| Self::ALL.iter().position(|other| *other == set);
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512Bf16.is_available() && super::amx::permission().is_ok(),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Amx => false,
            Self::AmxEmulated => Self::Avx512Bf16.is_available(),
            Self::Portable => true,
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => {
                cfg!(target_arch = "x86_64") && width(self) <= width(Self::detect())
            }
            Self::Neon | Self::NeonDot | Self::NeonBf16 => {
                cfg!(target_arch = "aarch64") && width(self) <= width(Self::detect())
            }
        }
    }

    /// Whether it has products of bf16 pairs.
    pub fn multiplies_pairs(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::Amx | Self::AmxEmulated | Self::NeonBf16)
    }

    /// Whether it multiplies bf16 in tiles.
    pub fn has_tiles(self) -> bool {
        matches!(self, Self::Amx | Self::AmxEmulated)
    }

    /// What of it computes in a type: in f32 the widest sets do the same, and products of bytes are of neither.
    pub fn in_use(self, compute: Compute) -> Self {
        match (self, compute) {
            (Self::Avx512Bf16 | Self::Amx | Self::AmxEmulated, Compute::F32) => Self::Avx512,
            (Self::NeonBf16, Compute::F32) | (Self::NeonDot, _) => Self::Neon,
            _ => self,
        }
    }

    /// The name for a log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2+fma",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512+bf16",
            Self::Amx => "amx",
            Self::AmxEmulated => "amx emulated",
            Self::Neon => "neon",
            Self::NeonDot => "neon+dotprod",
            Self::NeonBf16 => "neon+bf16",
        }
    }

    /// Runs a routine, compiled with the instructions of this set.
    ///
    /// # Safety
    /// The machine has the set, and as [`Routine::run`].
    pub(crate) unsafe fn run<R: Routine>(self, routine: R) -> R::Output {
        // SAFETY: the caller vouches for both.
        unsafe {
            match self {
                Self::Portable => Portable::compiled(routine),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => Avx2::compiled(routine),
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 | Self::Avx512Bf16 | Self::Amx | Self::AmxEmulated => Avx512::compiled(routine),
                #[cfg(target_arch = "aarch64")]
                Self::Neon | Self::NeonDot | Self::NeonBf16 => Neon::compiled(routine),
                _ => unreachable!("{self}, which is of another architecture"),
            }
        }
    }
}

/// Defines a function of plain loops that is compiled for each [`InstructionSet`], of which its first argument chooses.
///
/// The argument must be a set that the machine has; [`super::Cpu`] makes sure of it.
macro_rules! multiversion {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments, reason = "kernels take their operands and dimensions")]
        #[allow(unsafe_code, reason = "the machine has the set that was chosen")]
        $visibility fn $name(
            set: $crate::cpu::instructions::InstructionSet,
            $($argument: $kind),*
        ) $(-> $result)? {
            #[allow(non_camel_case_types, reason = "each type has the name of its argument")]
            struct Arguments<$($argument),*>($($argument),*);

            impl $crate::cpu::simd::Routine for Arguments<$($kind),*> {
                #[allow(unused_parens, reason = "a unit without a result")]
                type Output = ($($result)?);

                #[inline(always)]
                unsafe fn run<V: $crate::cpu::simd::Vector>(self) -> Self::Output {
                    let Self($($argument),*) = self;
                    $body
                }
            }

            // SAFETY: a set other than the portable one is only ever chosen where the machine has it, and the body is
            // safe code.
            unsafe { set.run(Arguments($($argument),*)) }
        }
    };
}

pub(crate) use multiversion;
