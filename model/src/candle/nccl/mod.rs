//! NCCL, by which the CUDA devices of one machine's workers add up among themselves.
//!
//! Built with the feature `nccl`, the program opens the library when it is first called (`scripts/build-cuda.sh`); so
//! what is missing shows here. Nothing of this has run on hardware yet.

#[cfg(feature = "nccl")]
mod linked;
#[cfg(not(feature = "nccl"))]
mod linked {
    //! A build without NCCL.

    use std::sync::Arc;

    use candle_core::Device;

    use super::{DeviceSums, Invitation, NcclError};

    pub(super) fn version() -> Result<String, NcclError> {
        Err(NcclError::NotBuilt)
    }

    pub(super) fn invite() -> Result<Invitation, NcclError> {
        Err(NcclError::NotBuilt)
    }

    pub(super) fn connect(_: &Device, _: [usize; 2], _: Invitation) -> Result<Arc<dyn DeviceSums>, NcclError> {
        Err(NcclError::NotBuilt)
    }
}

use std::sync::Arc;
use std::thread::{self, JoinHandle};

use super::{Candle, DeviceSums};

/// Why devices cannot add up among themselves.
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// The program was built without it.
    #[error("this build of the program has no NCCL")]
    NotBuilt,
    /// The library is missing, or fails.
    #[error("{call} of NCCL failed: {reason}")]
    Failed {
        /// The function that was called.
        call: &'static str,
        /// What NVIDIA's software says.
        reason: String,
    },
}

impl NcclError {
    /// What to do about it.
    pub fn help(&self) -> &'static str {
        match self {
            Self::NotBuilt => "build it with `scripts/build-cuda.sh`",
            Self::Failed { .. } => {
                "`libnccl.so.2` must be found: `pip install nvidia-nccl-cu13`, and its folder in LD_LIBRARY_PATH; where it is, \
                 NCCL_DEBUG=INFO tells more"
            }
        }
    }
}

/// The version of the library, `2.30.4`.
///
/// # Errors
/// Fails where it is missing.
pub fn version() -> Result<String, NcclError> {
    linked::version()
}

/// What rank 0 hands to all workers, so that they find each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invitation([u8; Self::BYTES]);

impl Invitation {
    const BYTES: usize = 128;

    /// The numbers that it is handed on as.
    pub const WORDS: usize = Self::BYTES / size_of::<u64>();

    /// A new one, of this process.
    ///
    /// # Errors
    /// Fails where the library is missing, or no other process could reach this one.
    pub fn new() -> Result<Self, NcclError> {
        linked::invite()
    }

    /// As numbers.
    pub fn words(&self) -> [u64; Self::WORDS] {
        let (words, _) = self.0.as_chunks();
        std::array::from_fn(|at| u64::from_le_bytes(words[at]))
    }

    /// That of these numbers.
    pub fn of_words(words: [u64; Self::WORDS]) -> Self {
        let mut bytes = [0; Self::BYTES];
        let (places, _) = bytes.as_chunks_mut();
        places.iter_mut().zip(words).for_each(|(place, word)| *place = word.to_le_bytes());
        Self(bytes)
    }
}

/// A set whose device is about to be joined with those of the other workers, which takes until the last of them has
/// come.
pub struct Joining {
    set: Candle,
    connecting: JoinHandle<Result<Arc<dyn DeviceSums>, NcclError>>,
}

impl Joining {
    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.connecting.is_finished()
    }

    /// The set that adds up with the others'; waits for it.
    ///
    /// # Errors
    /// Fails where NCCL does not connect the devices.
    pub fn finish(self) -> Result<Candle, NcclError> {
        let connected = self.connecting.join();
        let sums = connected.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(self.set.adding_up_by(sums))
    }
}

impl Candle {
    /// Begins to join this set's CUDA device with those of the other workers, as number `rank` of `size`.
    pub fn join(self, [rank, size]: [usize; 2], invitation: Invitation) -> Joining {
        let device = self.device.clone();
        // On a thread of its own: NCCL waits for workers that may be gone, and the caller looks after them meanwhile.
        let connecting = thread::spawn(move || linked::connect(&device, [rank, size], invitation));
        Joining { set: self, connecting }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_handed_on_as_numbers() {
        let invitation = Invitation(std::array::from_fn(|at| (at * 37 % 251) as u8));
        assert_eq!(Invitation::of_words(invitation.words()), invitation);
    }

    #[test]
    fn a_machine_without_nccl_says_what_is_missing() {
        match version() {
            Ok(version) => {
                println!("NCCL {version}: {:?}", Invitation::new().map(|_| "invites"));
                assert!(version.starts_with("2."), "{version}");
            }
            Err(error) => {
                let named = if cfg!(feature = "nccl") { "libnccl.so.2" } else { "scripts/build-cuda.sh" };
                assert!(error.help().contains(named), "{error}: {}", error.help());
                assert!(Invitation::new().is_err());
            }
        }
    }
}
