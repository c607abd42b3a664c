//! The calls of NCCL, through cudarc.

#![allow(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::c_char;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::cuda_backend::cudarc::nccl::result::{NcclError as CallError, get_nccl_version};
use candle_core::cuda_backend::cudarc::nccl::{Comm, Id, ReduceOp};
use candle_core::{CpuStorage, CudaStorage, Device, Error, InplaceOp1, Layout, Result, Tensor};

use super::{DeviceSums, Invitation, NcclError};

pub(super) fn version() -> std::result::Result<String, NcclError> {
    let number = get_nccl_version().map_err(failed("ncclGetVersion"))?;
    // From 2.9 on: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/types.html.
    Ok(format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100))
}

pub(super) fn invite() -> std::result::Result<Invitation, NcclError> {
    let id = Id::new().map_err(failed("ncclGetUniqueId"))?;
    Ok(Invitation(id.internal().map(|byte| byte as u8)))
}

pub(super) fn connect(
    device: &Device,
    [rank, size]: [usize; 2],
    invitation: Invitation,
) -> std::result::Result<Arc<dyn DeviceSums>, NcclError> {
    const CALL: &str = "ncclCommInitRank";
    let stream = match device {
        Device::Cuda(device) => device.cuda_stream(),
        Device::Cpu | Device::Metal(_) => {
            return Err(NcclError::Failed { call: CALL, reason: "this is no CUDA device".to_owned() });
        }
    };
    let bound = stream.context().bind_to_thread();
    bound.map_err(|error| NcclError::Failed { call: CALL, reason: error.to_string() })?;
    let id = Id::uninit(invitation.0.map(|byte| byte as c_char));
    let communicator = Comm::from_rank(Arc::clone(&stream), rank, size, id).map_err(failed(CALL))?;
    Ok(Arc::new(Nccl {
        communicator: Mutex::new(Communicator(communicator)),
        stream,
        last: Mutex::new(None),
        version: version()?,
    }))
}

fn failed(call: &'static str) -> impl Fn(CallError) -> NcclError {
    move |CallError(code)| NcclError::Failed { call, reason: format!("{code:?}") }
}

struct Communicator(Comm);

// SAFETY: it is a pointer that NCCL takes from any thread, from one at a time: the mutex around it sees to that.
unsafe impl Send for Communicator {}

/// One worker's device among those that NCCL has connected.
struct Nccl {
    communicator: Mutex<Communicator>,
    stream: Arc<CudaStream>,
    /// Comes behind the last sum.
    last: Mutex<Option<CudaEvent>>,
    version: String,
}

impl DeviceSums for Nccl {
    fn describe(&self) -> String {
        format!("NCCL {}", self.version)
    }

    fn begin(&self, values: &Tensor) -> Result<()> {
        values.inplace_op1(&Sum(self))?;
        let event = self.stream.record_event(None).map_err(Error::wrap)?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(event);
        Ok(())
    }

    fn are_over(&self) -> Result<bool> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.as_ref().map_or(Ok(true), |event| event.try_is_complete().map_err(Error::wrap))
    }
}

/// `ncclAllReduce` of all that a tensor's memory holds, in place.
struct Sum<'a>(&'a Nccl);

impl InplaceOp1 for Sum<'_> {
    fn name(&self) -> &'static str {
        "ncclAllReduce"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        Err(Error::Msg("NCCL adds up what lies on CUDA devices".to_owned()))
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let values = storage.as_cuda_slice_mut::<f32>()?;
        if layout.contiguous_offsets() != Some((0, values.len())) {
            return Err(Error::Msg("a sum over workers is of a tensor that has its memory for itself".to_owned()));
        }
        let communicator = self.0.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = communicator.0.all_reduce_in_place(values, &ReduceOp::Sum);
        begun.map(drop).map_err(|CallError(code)| Error::Msg(format!("ncclAllReduce: {code:?}")))
    }
}
