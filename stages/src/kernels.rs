//! The kernel sets as a stage makes them.

use std::sync::Arc;

use engine::error::{Cause, OrFail, StageError};
use model::candle::Candle;
use model::cpu::Cpu;
use model::ops::Compute;

/// Our own kernels, on so many threads.
///
/// # Errors
/// Fails if the machine gives no threads.
pub fn cpu(threads: usize) -> Result<Arc<Cpu>, StageError> {
    Cpu::new(threads, Compute::F32).map(Arc::new).or_fail(Cause::Machine, || "cannot start the cpu kernels".to_owned())
}

/// Candle's tensors on the processor.
pub fn candle() -> Arc<Candle> {
    Arc::new(Candle::on_processor())
}
