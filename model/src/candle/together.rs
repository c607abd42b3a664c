//! Workers whose devices add up among themselves.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use super::{Candle, CandleTensor};

/// How the devices of the workers that train together add up, as the set of one of them uses it.
pub trait DeviceSums: Send + Sync {
    /// Who does it, in a log: `NCCL 2.30.4`.
    fn describe(&self) -> String;

    /// Begins to replace the values of a contiguous tensor of f32 by their sums over all workers, after all that its
    /// device was given to do before, and before all that it is given later.
    ///
    /// # Errors
    /// Fails where the device does not take it.
    fn begin(&self, values: &Tensor) -> Result<()>;

    /// Whether the device has done all that was begun.
    ///
    /// # Errors
    /// Fails where the device has.
    fn are_over(&self) -> Result<bool>;
}

impl Candle {
    /// Has its device add up with those of other workers ([`crate::ops::Ops::begin_sums`]).
    #[must_use]
    pub fn adding_up_by(self, sums: Arc<dyn DeviceSums>) -> Self {
        Self { sums: Some(sums), ..self }
    }
}

/// Has tensors added up as one, of which they are parts from then on.
pub(super) fn begin(sums: &dyn DeviceSums, tensors: &mut [&mut CandleTensor]) -> Result<()> {
    let parts: Vec<Tensor> = tensors.iter().map(|tensor| tensor.get().flatten_all()).collect::<Result<_>>()?;
    // A copy in any case: others may hold these tensors, and sums are made in place.
    let joined = match &parts[..] {
        [only] => only.copy()?,
        _ => Tensor::cat(&parts, 0)?,
    };
    sums.begin(&joined)?;
    let mut from = 0;
    for tensor in tensors {
        let shape = tensor.get().shape().clone();
        let part = joined.narrow(0, from, shape.elem_count())?;
        from += shape.elem_count();
        **tensor = CandleTensor(Some(part.reshape(shape)?));
    }
    Ok(())
}
