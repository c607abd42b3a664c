//! Whether tiles can be used: the processor has them, the system saves them, and this process may use them.

#![allow(unsafe_code, reason = "a system call and a register that the standard library has no name for")]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Why tiles cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TilesRefused {
    /// The processor lacks the instructions, or its tiles are of other sizes.
    #[error("the processor has no tiles of 16 rows of 64 bytes (AMX)")]
    Processor,
    /// The operating system does not save the registers.
    #[error("the operating system does not save the tile registers")]
    System,
    /// The system refused: 22 (EINVAL) before Linux 5.16, 1 (EPERM) under a seccomp filter, 28 (ENOSPC) where a
    /// thread's alternate signal stack is too small.
    #[error("the operating system refused the use of tiles (error {0})")]
    Request(i64),
}

/// Asks, once for all threads of the process and for those that it starts later, for the use of tiles.
///
/// The system gives a thread its state at the thread's first tile instruction. A process that never asked is killed
/// there. `fork` keeps the permission, `exec` does not.
pub(in crate::cpu) fn permission() -> Result<(), TilesRefused> {
    static ANSWER: OnceLock<Result<(), TilesRefused>> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        if !processor_has_tiles() {
            return Err(TilesRefused::Processor);
        }
        if !system_saves_tiles() {
            return Err(TilesRefused::System);
        }
        request()
    })
}

/// Whether there are the instructions, and eight tiles of 16 rows of 64 bytes.
fn processor_has_tiles() -> bool {
    let highest = __cpuid(0).eax;
    if highest < 0x1e {
        return false;
    }
    let seven = __cpuid_count(7, 0).edx;
    let has = |bit: u32| seven >> bit & 1 == 1;
    // Leaf 0x1d, palette 1: bytes of a row, tiles, rows. Leaf 0x1e: what the unit multiplies at most.
    let (palette, unit) = (__cpuid_count(0x1d, 1), __cpuid_count(0x1e, 0));
    let sizes = palette.ebx & 0xffff == 64 && palette.ebx >> 16 == 8 && palette.ecx & 0xffff == 16;
    has(24) && has(22) && sizes && unit.ebx & 0xff == 16 && unit.ebx >> 8 & 0xffff == 64
}

/// Bits 17 and 18 of the register that says which state the system saves.
fn system_saves_tiles() -> bool {
    /// Of leaf 1: the system has made the register readable.
    const OSXSAVE: u32 = 1 << 27;
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: the instruction exists, and only reads a register.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    low >> 17 & 3 == 3
}

#[cfg(target_os = "linux")]
fn request() -> Result<(), TilesRefused> {
    /// The state component of the tile registers.
    const XTILEDATA: u64 = 18;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const SYS_ARCH_PRCTL: i64 = 158;
    let answer: i64;
    // SAFETY: a system call that changes nothing but the permission; the system overwrites rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    if answer == 0 { Ok(()) } else { Err(TilesRefused::Request(-answer)) }
}

#[cfg(not(target_os = "linux"))]
fn request() -> Result<(), TilesRefused> {
    Err(TilesRefused::System)
}
