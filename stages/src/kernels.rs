//! The kernel sets as a stage makes them.

use std::sync::Arc;

use engine::error::{Cause, OrFail, StageError};
use model::candle::Candle;
use model::cpu::Cpu;
use model::ops::Compute;

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
