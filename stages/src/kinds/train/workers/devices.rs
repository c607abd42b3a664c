//! Joins the CUDA devices of the workers, so that gradients are added up on them.

use devices::DeviceKind;
use engine::context::StageContext;
use engine::error::{Cause, StageError};
use model::candle::Candle;
use model::candle::nccl::{self, Invitation, NcclError};

use super::Workers;
use crate::kinds::train::failure;

impl Workers {
    /// Has the devices of the workers add up among themselves, where all workers find NCCL; else gradients go through
    /// the machine's memory.
    ///
    /// # Errors
    /// Fails where NCCL is there and does not connect the devices, or a worker is gone.
    pub(in crate::kinds::train) fn join_devices(
        &mut self,
        set: Candle,
        context: &mut StageContext,
    ) -> Result<Candle, StageError> {
        if self.process_group.size() == 1 || context.devices().kind != DeviceKind::Cuda {
            return Ok(set);
        }
        let own = nccl::version().and_then(|_| {
            if self.process_group.ranks().is_rank_zero() { Invitation::new().map(Some) } else { Ok(None) }
        });
        if self.gather(own.is_ok().into())?.contains(&0) {
            let reason = own.err().map_or_else(|| "another worker does not find NCCL".to_owned(), in_words);
            context.warn(format!("gradients are added up in the machine's memory, not on the GPUs: {reason}"));
            return Ok(set);
        }
        let mut words = own.ok().flatten().map_or([0; Invitation::WORDS], |invitation| invitation.words());
        for word in &mut words {
            *word = self.gather(*word)?[0];
        }
        let joining = set.join([self.process_group.rank(), self.process_group.size()], Invitation::of_words(words));
        self.collective.attend(&mut || joining.is_over()).map_err(failure::of_workers)?;
        joining.finish().map_err(|error| {
            let help = error.help();
            StageError::new(Cause::Machine, "the GPUs cannot be connected").with_source(error).with_help(help)
        })
    }

    /// What each worker gives, by rank.
    fn gather(&mut self, value: u64) -> Result<Vec<u64>, StageError> {
        self.collective.gather(value).map_err(failure::of_workers)
    }
}

fn in_words(error: NcclError) -> String {
    format!("{error} ({})", error.help())
}
