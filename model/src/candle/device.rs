//! CUDA devices for the `candle` set: opening one, and in which words it is said that there is none.
//!
//! Built without the feature `cuda`, it opens none. Built with it, the program starts on every machine
//! (`scripts/build-cuda.sh` says how), so what is missing shows here first.

use candle_core::Device;

use super::Candle;
use crate::ops::Compute;

/// Why there are no kernels on a CUDA device.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// The program was built for the processor alone.
    #[error("this build of the program has no kernels for CUDA devices")]
    NotBuilt,
    /// The device, its driver or one of NVIDIA's libraries does not answer as it should.
    #[error("CUDA device {index} cannot be used: {reason}")]
    Unusable {
        /// The device, counted among those that the process sees.
        index: usize,
        /// What NVIDIA's software says.
        reason: String,
    },
}

impl CudaError {
    /// What to do about it.
    pub fn help(&self) -> &'static str {
        match self {
            Self::NotBuilt => {
                "build it with `scripts/build-cuda.sh`; or use the torch worker (`backend: torch`), or the processor (`device: cpu`)"
            }
            Self::Unusable { reason, .. } => help(reason),
        }
    }
}

/// By what NVIDIA's software says.
fn help(reason: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    // Newer code than the driver knows, in the words of the driver and of the runtime.
    if says(&["UNSUPPORTED_PTX_VERSION", "INSUFFICIENT_DRIVER", "SYSTEM_DRIVER_MISMATCH", "NO_BINARY_FOR_GPU"]) {
        "this build needs driver 580 or newer (CUDA 13.0) and a GPU of compute capability 8.0 or higher: see `nvidia-smi`"
    } else if says(&["CUBLAS_STATUS_NOT_INITIALIZED"]) {
        "`libcublas.so.13` and `libcublasLt.so.13` must be found: `pip install 'nvidia-cublas==13.*'`, and its folder in LD_LIBRARY_PATH"
    } else if says(&["CURAND_STATUS_INITIALIZATION_FAILED"]) {
        "`libcurand.so.10` must be found: `pip install nvidia-curand`, and its folder in LD_LIBRARY_PATH"
    } else if says(&["OUT_OF_MEMORY"]) {
        "the device's memory is in use by others: see `nvidia-smi`"
    } else {
        "there is no NVIDIA driver, or no GPU that this process may use: look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and /dev/nvidia*"
    }
}

impl Candle {
    /// Whether this build has kernels for CUDA devices.
    pub const SERVES_CUDA: bool = cfg!(feature = "cuda");

    /// A set on a CUDA device, counted among those that the process sees.
    ///
    /// # Errors
    /// Fails where the program was built without them, or the device cannot be used.
    pub fn on_cuda(index: usize, compute: Compute) -> Result<Self, CudaError> {
        if !Self::SERVES_CUDA {
            return Err(CudaError::NotBuilt);
        }
        let device = Device::new_cuda(index)
            .map_err(|error| CudaError::Unusable { index, reason: first_line(&error.to_string()) })?;
        Ok(Self::new(device, compute))
    }
}

/// candle's errors may carry a backtrace.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_what_is_missing() {
        let cases = [
            ("DriverError(CUDA_ERROR_NO_DEVICE, \"no CUDA-capable device is detected\")", "no NVIDIA driver"),
            ("DriverError(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, \"…\")", "driver 580"),
            ("CublasError(CUBLAS_STATUS_NOT_INITIALIZED)", "libcublas.so.13"),
            ("CurandError(CURAND_STATUS_INITIALIZATION_FAILED)", "libcurand.so.10"),
            ("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")", "in use by others"),
        ];
        for (reason, named) in cases {
            assert!(help(reason).contains(named), "{reason}: {}", help(reason));
        }
    }

    #[test]
    fn a_build_for_the_processor_says_so() {
        if !Candle::SERVES_CUDA {
            let error = Candle::on_cuda(0, Compute::F32).err();
            assert!(matches!(error, Some(CudaError::NotBuilt)));
        }
    }
}
