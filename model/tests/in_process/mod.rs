//! Workers that are threads of one process, to test what several of them compute without any.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part of this")]

use std::sync::{Arc, Barrier, Mutex};

use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Tensor};
use model::candle::DeviceSums;
use model::trainer::{Collective, CollectiveError};

/// What the workers give, by rank.
type Given = Mutex<Vec<Vec<f64>>>;

/// One of several workers.
#[derive(Clone)]
pub(crate) struct Worker {
    rank: usize,
    given: Arc<Given>,
    barrier: Arc<Barrier>,
}

/// Runs a function for each of so many workers, on a thread of its own, and gives what each made.
pub(crate) fn workers<T: Send>(size: usize, run: impl Fn(usize, Box<dyn Collective>) -> T + Sync) -> Vec<T> {
    workers_with_devices(size, |rank, collective, _| run(rank, collective))
}

/// As [`workers`], each with a device that adds up with those of the others.
pub(crate) fn workers_with_devices<T: Send>(
    size: usize,
    run: impl Fn(usize, Box<dyn Collective>, Arc<dyn DeviceSums>) -> T + Sync,
) -> Vec<T> {
    let (given, barrier) = (Arc::new(Mutex::new(vec![Vec::new(); size])), Arc::new(Barrier::new(size)));
    std::thread::scope(|scope| {
        let start = |rank| {
            let worker = Worker { rank, given: Arc::clone(&given), barrier: Arc::clone(&barrier) };
            let run = &run;
            scope.spawn(move || run(rank, Box::new(worker.clone()), Arc::new(Device(worker))))
        };
        let started: Vec<_> = (0..size).map(start).collect();
        started.into_iter().map(|worker| worker.join().unwrap()).collect()
    })
}

impl Worker {
    fn exchange(&self, values: Vec<f64>) -> Vec<Vec<f64>> {
        self.given.lock().unwrap()[self.rank] = values;
        self.barrier.wait();
        let all = self.given.lock().unwrap().clone();
        self.barrier.wait();
        all
    }
}

impl Collective for Worker {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.given.lock().unwrap().len()
    }

    fn sum(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        let all = self.exchange(values.iter().map(|value| f64::from(*value)).collect());
        for (index, value) in values.iter_mut().enumerate() {
            *value = all[1..].iter().fold(all[0][index] as f32, |sum, given| sum + given[index] as f32);
        }
        Ok(())
    }

    fn sum_totals(&mut self, totals: &mut [f64]) -> Result<(), CollectiveError> {
        let all = self.exchange(totals.to_vec());
        for (index, total) in totals.iter_mut().enumerate() {
            *total = all.iter().map(|given| given[index]).sum();
        }
        Ok(())
    }
}

/// A device that lies in the processor's memory. Like NCCL it adds up in place, and in no tensor's memory but the one
/// it is given.
struct Device(Worker);

impl DeviceSums for Device {
    fn describe(&self) -> String {
        "threads".to_owned()
    }

    fn begin(&self, values: &Tensor) -> candle_core::Result<()> {
        values.inplace_op1(self)
    }

    fn are_over(&self) -> candle_core::Result<bool> {
        Ok(true)
    }
}

impl InplaceOp1 for Device {
    fn name(&self) -> &'static str {
        "sum"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let CpuStorage::F32(values) = storage else { return Err(Error::msg("gradients are f32")) };
        assert_eq!(layout.contiguous_offsets(), Some((0, values.len())), "the sum has memory of its own");
        self.0.clone().sum(values).map_err(Error::wrap)
    }
}
