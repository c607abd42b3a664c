//! A kernel set on candle's tensors: for GPUs, and as a second opinion on the processor in tests.
//!
//! It runs on whatever [`candle_core::Device`] it is given. Every backward is written out: candle's autograd is never
//! called, because its fused operations (`rms_norm`, `rope`, `softmax_last_dim`, `sdpa`) have no gradient and cut the
//! graph without a word, and because its products compute a gradient for every frozen weight. Only differentiable
//! primitives are used here, so that tests can compare each backward with what autograd makes of its forward.

mod attention;
mod device;
mod loss;
pub mod nccl;
mod operations;
mod optimizer;
mod rows;
mod together;

pub use device::CudaError;
pub use together::DeviceSums;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use profile::Profile;

use crate::ops::{Compute, Write};

/// The kernel set on candle's tensors.
#[derive(Clone)]
pub struct Candle {
    device: Device,
    compute: Compute,
    profile: Profile,
    sums: Option<Arc<dyn DeviceSums>>,
}

/// A matrix of f32 on the set's device; empty by default.
///
/// candle's tensors are shared and immutable, so an output is exchanged, not overwritten.
#[derive(Debug, Clone, Default)]
pub struct CandleTensor(Option<Tensor>);

/// A matrix prepared for products.
#[derive(Debug, Clone)]
pub struct CandleWeight(Tensor);

/// Keys and values of one layer: for each sequence `[capacity, kv_heads · head_dim]`.
#[derive(Debug)]
pub struct CandleCache {
    keys: Vec<Tensor>,
    values: Vec<Tensor>,
}

impl CandleTensor {
    /// The tensor; asking for that of an output that nothing was written to is a bug of the caller.
    fn get(&self) -> &Tensor {
        self.0.as_ref().expect("a tensor is written before it is read")
    }

    fn put(&mut self, write: Write, result: Tensor) -> candle_core::Result<()> {
        self.0 = Some(match write {
            Write::Replace => result,
            Write::Add => (self.get() + result)?,
        });
        Ok(())
    }
}

impl Candle {
    /// A set on the processor, in f32.
    pub fn on_processor() -> Self {
        Self::on_processor_in(Compute::F32)
    }

    /// A set on the processor.
    pub fn on_processor_in(compute: Compute) -> Self {
        Self::new(Device::Cpu, compute)
    }

    /// A set on this device.
    pub fn new(device: Device, compute: Compute) -> Self {
        Self { device, compute, profile: Profile::OFF, sums: None }
    }

    /// Has it recorded what takes how long.
    #[must_use]
    pub fn recorded_by(self, profile: Profile) -> Self {
        Self { profile, ..self }
    }

    /// Rounds an operand of a large product to the compute type.
    fn operand(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self.compute {
            Compute::F32 => Ok(x.clone()),
            Compute::Bf16 => x.to_dtype(DType::BF16),
        }
    }

    fn indices(&self, indices: &[u32]) -> candle_core::Result<Tensor> {
        Tensor::from_slice(indices, indices.len(), &self.device)
    }
}
