//! The instruction set of the kernels: each is a plain loop, compiled once per set and chosen at run time.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::fmt;

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
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.name())
    }
}

impl InstructionSet {
    /// All of them, narrower ones first; each contains those before it.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The widest set of this machine.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl") {
                let bf16 = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512bw");
                let bf16 = bf16 && is_x86_feature_detected!("avx512vnni");
                return if bf16 { Self::Avx512Bf16 } else { Self::Avx512 };
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    /// Whether this machine has the set.
    pub fn is_available(self) -> bool {
        let width = |set| Self::ALL.iter().position(|other| *other == set);
        width(self) <= width(Self::detect())
    }

    /// The name for a log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2+fma",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512+bf16",
        }
    }
}

/// Compiles the body of a function for each [`InstructionSet`] and lets the first argument choose.
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
            #[inline(always)]
            #[allow(clippy::too_many_arguments, reason = "kernels take their operands and dimensions")]
            fn body($($argument: $kind),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            #[allow(clippy::too_many_arguments, reason = "kernels take their operands and dimensions")]
            fn avx2($($argument: $kind),*) $(-> $result)? {
                body($($argument),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
            #[allow(clippy::too_many_arguments, reason = "kernels take their operands and dimensions")]
            fn avx512($($argument: $kind),*) $(-> $result)? {
                body($($argument),*)
            }

            match set {
                // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::instructions::InstructionSet::Avx512
                | $crate::cpu::instructions::InstructionSet::Avx512Bf16 => unsafe { avx512($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::instructions::InstructionSet::Avx2 => unsafe { avx2($($argument),*) },
                #[cfg(not(target_arch = "x86_64"))]
                $crate::cpu::instructions::InstructionSet::Avx2
                | $crate::cpu::instructions::InstructionSet::Avx512
                | $crate::cpu::instructions::InstructionSet::Avx512Bf16 => {
                    unreachable!("an instruction set of another architecture")
                }
                $crate::cpu::instructions::InstructionSet::Portable => body($($argument),*),
            }
        }
    };
}

pub(crate) use multiversion;
