//! The `cpu` kernel set: plain blocked loops, compiled for several instruction sets and cut over threads.
//!
//! It is the default and the oracle: other sets are compared with it. Work is cut so that each element of a result is
//! computed by one thread in one order; the number of threads changes nothing but speed. Weights stay row-major, in the
//! type that is computed in: with bf16 they take half the memory, and what they are multiplied with is rounded to bf16
//! on the way.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod blocks;
mod cache;
mod choice;
#[cfg(any(test, feature = "guard-pages"))]
mod guarded;
mod heads;
pub(crate) mod instructions;
mod limits;
mod loss;
mod memory;
mod nf4;
mod norm;
mod operand;
mod operations;
mod optimizer;
mod plain;
mod pointwise;
mod product;
mod quantized;
mod reading;
mod rounding;
mod scratch;
mod shared;
pub(crate) mod simd;
mod stored;
mod tensor;
pub(crate) mod vector;
mod weight;
mod work;
mod workers;

use std::sync::Arc;

use profile::Profile;

#[cfg(target_arch = "x86_64")]
pub use amx::TilesRefused;
pub use blocks::{AttentionSaved, MlpSaved};
pub use cache::Cache;
pub use choice::{Measurement, Rates};
pub use instructions::InstructionSet;
pub(crate) use instructions::multiversion;
pub(crate) use loss::cross_entropy as cross_entropy_row;
pub(crate) use optimizer::update_elements;
pub(crate) use rounding::{bf16_bytes, nearest, widen_bf16};
pub use shared::{SharedWeights, SharedWeightsError};
pub use tensor::Tensor;
pub(crate) use vector::sum;
pub use weight::Weight;

use crate::ops::{Compute, MatmulPrecision};
use crate::weights::Quantization;
use memory::Arena;
use product::Target;
use tensor::BufferPool;
use workers::Workers;

/// The kernel set.
pub struct Cpu {
    workers: Workers,
    set: InstructionSet,
    compute: Compute,
    quantization: Option<Quantization>,
    /// The widest instructions that may be used, of which `set` are those that make a difference.
    available: InstructionSet,
    /// Whether products of f32 with weights are computed in tiles, their operands split.
    of_high_precision: bool,
    buffers: Arc<BufferPool>,
    weights: Arena,
    /// Memory of the keys and values of all layers.
    caches: Arc<Arena>,
    profile: Profile,
    /// Where frozen weights lie that several processes read.
    shared: Option<SharedWeights>,
}

/// Whether this process may use the tiles of the processor (AMX); asking is what gives it the permission.
///
/// # Errors
/// Says why not.
#[cfg(target_arch = "x86_64")]
pub fn tiles() -> Result<(), TilesRefused> {
    amx::permission()
}

/// Why the kernel set cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The machine lacks the instructions.
    #[error("this machine has no {0} instructions")]
    Instructions(InstructionSet),
    /// It may not use tiles.
    #[cfg(target_arch = "x86_64")]
    #[error("{} cannot be computed with", InstructionSet::Amx.name())]
    Tiles(#[from] TilesRefused),
    /// The system gave no threads.
    #[error("cannot start {threads} threads")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// From so many elements on, work is cut over threads.
const WORTH_CUTTING: usize = 1 << 14;

impl Cpu {
    /// A kernel set of so many threads (at least one), with the widest instructions of the machine.
    ///
    /// # Errors
    /// Fails if the system gives no threads.
    pub fn new(threads: usize, compute: Compute) -> Result<Self, CpuError> {
        Self::with_instructions(threads, compute, InstructionSet::detect())
    }

    /// As [`Cpu::new`], with given instructions.
    ///
    /// # Errors
    /// As [`Cpu::new`], and if the machine lacks the instructions.
    pub fn with_instructions(threads: usize, compute: Compute, set: InstructionSet) -> Result<Self, CpuError> {
        #[cfg(target_arch = "x86_64")]
        if set == InstructionSet::Amx {
            amx::permission()?;
        }
        if !set.is_available() {
            return Err(CpuError::Instructions(set));
        }
        let threads = threads.max(1);
        let workers = Workers::new(threads).map_err(|source| CpuError::Threads { threads, source })?;
        Ok(Self {
            workers,
            set: set.in_use(compute),
            compute,
            quantization: None,
            available: set,
            of_high_precision: false,
            buffers: Arc::default(),
            weights: Arena::default(),
            caches: Arc::default(),
            profile: Profile::OFF,
            shared: None,
        })
    }

    /// Has matrices of f32 multiplied with weights, and for their gradients, so. With tiles, [`MatmulPrecision::High`]
    /// is three products of bf16 in them; without tiles it is as exact as [`MatmulPrecision::Highest`], and so are
    /// products of up to [`crate::ops::FEW_ROWS`] rows, which wait for memory.
    #[must_use]
    pub fn with_matmul_precision(self, precision: MatmulPrecision) -> Self {
        let of_high_precision =
            precision == MatmulPrecision::High && self.compute == Compute::F32 && self.available.has_tiles();
        let set = if of_high_precision { self.available } else { self.set };
        Self { set, of_high_precision, ..self }
    }

    /// Has it recorded what takes how long, beside what the machine can do.
    #[must_use]
    pub fn recorded_by(self, profile: Profile) -> Self {
        profile.set_limits(|| self.limits());
        Self { profile, ..self }
    }

    /// Has frozen weights lie where other processes see them: this one puts them there, or takes those that are there.
    #[must_use]
    pub fn sharing(self, weights: SharedWeights) -> Self {
        Self { shared: Some(weights), ..self }
    }

    /// Has frozen weights quantised when they are loaded.
    #[must_use]
    pub fn quantizing(self, quantization: Quantization) -> Self {
        // Products of integers have instructions that those of f32 have no use for.
        Self { quantization: Some(quantization), set: self.available, ..self }
    }

    /// Has memory of weights that are gone serve those that are read next: for weights that are used once, layer by
    /// layer, as in a proof.
    #[must_use]
    pub fn for_passing_weights(self) -> Self {
        Self { weights: Arena::for_passing_weights(), ..self }
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.workers.threads()
    }

    /// The instructions in use.
    pub fn instructions(&self) -> InstructionSet {
        self.set
    }

    /// Runs a function for each of `parts` parts, over the threads where `elements` is worth it.
    fn each(&self, parts: usize, elements: usize, run: impl Fn(usize) + Sync + Send) {
        if elements < WORTH_CUTTING {
            (0..parts).for_each(run);
        } else {
            self.workers.each(parts, run);
        }
    }

    /// Runs a function on each piece of `y`, of `rows` rows of `columns`, with the index of its first row.
    fn each_rows(&self, y: &mut [f32], columns: usize, run: impl Fn(usize, &mut [f32]) + Sync + Send) {
        let Some(rows) = y.len().checked_div(columns) else { return };
        let block = (4096 / columns).max(1);
        let target = Target::new(y, columns);
        self.each(rows.div_ceil(block), rows * columns, |part| {
            let first = part * block;
            let count = block.min(rows - first);
            // SAFETY: pieces do not overlap.
            run(first, unsafe { target.offset(first, 0).row(0, 0..count * columns) });
        });
    }
}
