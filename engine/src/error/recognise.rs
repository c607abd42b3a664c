//! Recognises a lack of disk or memory, and a lost device, beneath whatever else an error says.
//!
//! What meets a full disk is a write of any crate in any stage, and what it becomes on the way up is that crate's
//! affair; what the operating system said is at the bottom of the chain.

use std::error::Error;
use std::io;

use nix::libc::{EDQUOT, ENOMEM, ENOSPC};

use super::Cause;

/// Words that libraries and drivers print, and what they mean. The first that is found decides: a device's lack of
/// memory is told in the words of a lack of memory, too.
const WORDS: [(&str, Cause); 20] = [
    ("CUDA_ERROR_OUT_OF_MEMORY", Cause::DeviceOutOfMemory),
    ("CUDA out of memory", Cause::DeviceOutOfMemory),
    ("HIP out of memory", Cause::DeviceOutOfMemory),
    ("NPU out of memory", Cause::DeviceOutOfMemory),
    ("MPS backend out of memory", Cause::DeviceOutOfMemory),
    ("cudaErrorMemoryAllocation", Cause::DeviceOutOfMemory),
    ("CUDA_ERROR_ECC_UNCORRECTABLE", Cause::DeviceLost),
    ("uncorrectable ECC error", Cause::DeviceLost),
    ("CUDA_ERROR_DEVICE_UNAVAILABLE", Cause::DeviceLost),
    ("CUDA_ERROR_NO_DEVICE", Cause::DeviceLost),
    ("fallen off the bus", Cause::DeviceLost),
    ("GPU is lost", Cause::DeviceLost),
    ("No space left on device", Cause::DiskFull),
    ("Disk quota exceeded", Cause::DiskFull),
    // Of Rust's allocator, glibc, C++ and PyTorch.
    ("memory allocation of ", Cause::OutOfMemory),
    ("Cannot allocate memory", Cause::OutOfMemory),
    ("std::bad_alloc", Cause::OutOfMemory),
    ("DefaultCPUAllocator: can't allocate memory", Cause::OutOfMemory),
    ("DefaultCPUAllocator: not enough memory", Cause::OutOfMemory),
    ("MemoryError", Cause::OutOfMemory),
];

/// The cause that an error's chain gives away, whatever cause it was given on the way.
pub(crate) fn by_system_error(error: &(dyn Error + 'static)) -> Option<Cause> {
    links(error).find_map(|link| of_system_error(link.downcast_ref::<io::Error>()?))
}

/// As [`by_system_error`], by the words of the chain.
pub(super) fn by_words(error: &(dyn Error + 'static)) -> Option<Cause> {
    links(error).find_map(|link| of_words(&link.to_string()))
}

/// What the words of a library, or a process's last words, give away.
pub(crate) fn of_words(text: &str) -> Option<Cause> {
    WORDS.iter().find(|(words, _)| text.contains(words)).map(|(_, cause)| *cause)
}

fn of_system_error(error: &io::Error) -> Option<Cause> {
    match (error.raw_os_error(), error.kind()) {
        (Some(ENOSPC | EDQUOT), _) | (_, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
            Some(Cause::DiskFull)
        }
        (Some(ENOMEM), _) | (_, io::ErrorKind::OutOfMemory) => Some(Cause::OutOfMemory),
        _ => None,
    }
}

fn links<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |link: &&'a (dyn Error + 'static)| (*link).source())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use super::*;
    use crate::error::{OrFail, StageError};

    #[derive(Debug, thiserror::Error)]
    #[error("a table cannot be written")]
    struct Wrapped(#[source] io::Error);

    #[test]
    fn a_full_disk_is_found_beneath_every_layer() {
        let full = || File::options().write(true).open("/dev/full").unwrap().write_all(b"text").unwrap_err();
        let errors: [StageError; 4] = [
            StageError::new(Cause::Machine, "cannot write").with_source(full()),
            StageError::bad_data("cannot be used").with_source(Wrapped(full())),
            StageError::internal("a library failed").with_source(format!("io: {}", full())),
            Err::<(), _>(io::Error::other(Wrapped(full()))).or_fail(Cause::Network, || "lost".into()).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.known_cause(), Cause::DiskFull, "{error:?}");
        }
    }

    #[test]
    fn words_of_devices_and_allocators_are_known() {
        let cause = |text: &str| StageError::new(Cause::Machine, "training stopped").with_source(text).known_cause();
        assert_eq!(cause("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")"), Cause::DeviceOutOfMemory);
        assert_eq!(
            cause("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
            Cause::DeviceOutOfMemory
        );
        assert_eq!(cause("NVRM: Xid 79, GPU has fallen off the bus."), Cause::DeviceLost);
        assert_eq!(cause("memory allocation of 1048576 bytes failed"), Cause::OutOfMemory);
        assert_eq!(cause("permission denied"), Cause::Machine);
        // What a user's data says is no evidence.
        assert_eq!(StageError::bad_data("row 3 says `MemoryError`").known_cause(), Cause::BadData);
    }
}
