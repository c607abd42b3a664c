//! One generic function for each form that queries, keys and values come in.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

/// Defines a function that runs a generic kernel on operands in whatever form they are in, with the instructions that
/// its first argument names.
///
/// The argument must be a set that the machine has; [`crate::cpu::Cpu`] makes sure of it, and of the instructions for
/// pairs where there are some.
macro_rules! for_each_form {
    ($visibility:vis unsafe fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = $kernel:ident) => {
        $visibility unsafe fn $name(
            set: $crate::cpu::instructions::InstructionSet,
            qkv: $crate::cpu::attention::Qkv<'_>,
            $($argument: $kind),*
        ) {
            use $crate::cpu::attention::floats::{Floats, Tile};
            use $crate::cpu::attention::{Operands, Qkv};
            use $crate::cpu::simd::vectorised;

            #[inline(always)]
            unsafe fn exact<V: Tile>(operands: Operands<'_, f32>, $($argument: $kind),*) {
                // SAFETY: the caller vouches for the arguments and the instructions.
                unsafe { $kernel::<Floats<V, false>>(operands, $($argument),*) }
            }

            #[inline(always)]
            unsafe fn rounded<V: Tile>(operands: Operands<'_, f32>, $($argument: $kind),*) {
                // SAFETY: as above.
                unsafe { $kernel::<Floats<V, true>>(operands, $($argument),*) }
            }

            vectorised! { unsafe fn in_f32(operands: Operands<'_, f32>, $($argument: $kind),*) = exact }
            vectorised! { unsafe fn in_rounded_f32(operands: Operands<'_, f32>, $($argument: $kind),*) = rounded }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
            unsafe fn in_pairs(operands: Operands<'_, u32>, $($argument: $kind),*) {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::cpu::attention::pairs::Pairs>(operands, $($argument),*) }
            }

            // SAFETY: the caller vouches for it all.
            unsafe {
                match qkv {
                    Qkv::F32(operands) => in_f32(set, operands, $($argument),*),
                    Qkv::Rounded(operands) => in_rounded_f32(set, operands, $($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    Qkv::Pairs(operands) => in_pairs(operands, $($argument),*),
                }
            }
        }
    };
}

pub(super) use for_each_form;
