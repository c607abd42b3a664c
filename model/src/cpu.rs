//! The `cpu` kernel set: plain blocked loops in f32, compiled for several instruction sets and cut over threads.
//!
//! It is the default and the oracle: other sets are compared with it. Work is cut so that each element of a result is computed
//! by one thread in one order; the number of threads changes nothing but speed. Weights stay row-major.

mod attention;
mod cache;
mod instructions;
mod loss;
mod norm;
mod operations;
mod pointwise;
mod product;
mod tensor;
mod vector;

use std::sync::Arc;

use rayon::prelude::*;

pub use cache::Cache;
pub use instructions::InstructionSet;
pub use tensor::Tensor;

use crate::ops::Compute;
use product::{Into, Partition, Target, View};
use tensor::BufferPool;

/// The kernel set.
pub struct Cpu {
    pool: rayon::ThreadPool,
    threads: usize,
    set: InstructionSet,
    buffers: Arc<BufferPool>,
}

/// A weight, row-major.
pub struct Weight {
    out_features: usize,
    in_features: usize,
    values: Vec<f32>,
}

/// Why the kernel set cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The set has no kernels of this type.
    #[error("the cpu kernel set computes in f32, not in {0:?}")]
    Compute(Compute),
    /// The machine lacks the instructions.
    #[error("this machine has no {} instructions", .0.name())]
    Instructions(InstructionSet),
    /// The system gave no threads.
    #[error("cannot start {threads} threads")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// Why.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
}

/// From so many elements on, work is cut over threads.
const WORTH_CUTTING: usize = 1 << 14;

impl Cpu {
    /// A kernel set of so many threads (at least one), with the widest instructions of the machine.
    ///
    /// # Errors
    /// Fails if the system gives no threads or the compute type is not f32.
    pub fn new(threads: usize, compute: Compute) -> Result<Self, CpuError> {
        Self::with_instructions(threads, compute, InstructionSet::detect())
    }

    /// As [`Cpu::new`], with given instructions.
    ///
    /// # Errors
    /// As [`Cpu::new`], and if the machine lacks the instructions.
    pub fn with_instructions(threads: usize, compute: Compute, set: InstructionSet) -> Result<Self, CpuError> {
        if compute != Compute::F32 {
            return Err(CpuError::Compute(compute));
        }
        if !set.is_available() {
            return Err(CpuError::Instructions(set));
        }
        let threads = threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|index| format!("cpu-{index}"));
        let pool = pool.build().map_err(|source| CpuError::Threads { threads, source })?;
        Ok(Self { pool, threads, set, buffers: Arc::default() })
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instructions in use.
    pub fn instructions(&self) -> InstructionSet {
        self.set
    }

    /// Runs a function for each of `parts` parts, over the threads where `elements` is worth it.
    fn each(&self, parts: usize, elements: usize, run: impl Fn(usize) + Sync + Send) {
        if self.threads == 1 || parts == 1 || elements < WORTH_CUTTING {
            (0..parts).for_each(run);
        } else {
            self.pool.install(|| (0..parts).into_par_iter().for_each(run));
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

    fn product(&self, scale: f32, a: View<'_>, b: View<'_>, write: Into, c: &mut [f32]) {
        let (rows, inner, columns) = (a.rows(), a.columns(), b.columns());
        let partition = Partition::new(rows, columns, self.threads);
        let target = Target::new(c, columns);
        self.each(partition.parts(), rows * columns * inner.max(1), |part| {
            // SAFETY: parts do not overlap.
            unsafe { partition.product(part, self.set, scale, a, b, write, target) };
        });
    }
}
