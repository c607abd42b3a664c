//! The kernel sets: as `train`, `evaluate` and `generate` name them, and as a stage makes them.

use std::sync::Arc;

use engine::error::{Cause, OrFail, StageError};
use engine::parameter::Parameters;
use model::candle::Candle;
use model::cpu::Cpu;
use model::ops::Compute;

/// A set of kernels.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// Our own, for processors.
    Cpu,
    /// Candle's tensors, as a second opinion.
    Candle,
}

/// The number type of the computation.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// Products of 16-bit brain floats, summed in f32; what is trained, its moments and the loss stay f32.
    Bf16,
}

impl Dtype {
    /// The number type as kernels know it.
    pub fn compute(self) -> Compute {
        match self {
            Self::F32 => Compute::F32,
            Self::Bf16 => Compute::Bf16,
        }
    }
}

/// Our own kernels in f32, on so many threads.
///
/// # Errors
/// Fails if the machine gives no threads.
pub fn cpu(threads: usize) -> Result<Arc<Cpu>, StageError> {
    cpu_computing(Compute::F32, threads)
}

/// Our own kernels, on so many threads.
///
/// # Errors
/// Fails if the machine gives no threads, or the kernels do not compute in this type.
pub fn cpu_computing(compute: Compute, threads: usize) -> Result<Arc<Cpu>, StageError> {
    Cpu::new(threads, compute).map(Arc::new).or_fail(Cause::Machine, || "cannot start the cpu kernels".to_owned())
}

/// Candle's tensors on the processor, in f32.
pub fn candle() -> Arc<Candle> {
    candle_computing(Compute::F32)
}

/// Candle's tensors on the processor.
pub fn candle_computing(compute: Compute) -> Arc<Candle> {
    Arc::new(Candle::on_processor_in(compute))
}
