//! Several adapters for one base. Those that are low-rank and nothing else reside on the projections, and each row of a
//! pass may have its own; of the others the decoder carries one at a time. To change it moves no value.

use super::Decoder;
use super::adapt::AttachError;
use super::embeddings::Copies;
use crate::adapter::{Lora, Projection};
use crate::blocks::Blocks;
use crate::ops::Ops;
use crate::parameter::{MatrixCopy, Parameter};
use crate::peft::Adapter;
use crate::peft::targets::HEAD;

/// Adapters that are prepared for a decoder, by number; 0 is the base alone.
pub struct Adapters<B: Blocks> {
    /// What each has on the decoder while it is carried; that of the carried one is empty, and so are those of
    /// residents.
    detached: Vec<Detached<B>>,
    carried: usize,
}

/// What a decoder carries for a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Carried {
    /// Nothing: the rows are the base's and those of residents.
    Nothing,
    /// The adapter of this number.
    Adapter(usize),
}

impl<B: Blocks> Default for Adapters<B> {
    fn default() -> Self {
        Self { detached: vec![Detached::default()], carried: 0 }
    }
}

impl<B: Blocks> Adapters<B> {
    /// Prepares an adapter and returns its number.
    ///
    /// # Errors
    /// Fails if the adapter does not fit the model; the decoder carries none then.
    pub fn add(&mut self, decoder: &mut Decoder<B>, adapter: &Adapter) -> Result<usize, AttachError> {
        self.select(decoder, Carried::Nothing);
        if let Err(error) = decoder.attach(adapter) {
            decoder.detach();
            return Err(error);
        }
        let number = self.detached.len();
        self.detached.push(Detached::default());
        match may_reside(adapter) {
            true => decoder.settle(number),
            false => self.carried = number,
        }
        Ok(number)
    }

    /// Gives the memory of an adapter back; its number is not used again. 0 cannot be removed.
    pub fn remove(&mut self, decoder: &mut Decoder<B>, number: usize) {
        if number != 0 {
            self.select(decoder, Carried::Nothing);
            self.detached[number] = Detached::default();
            decoder.evict(number);
        }
    }

    /// Has the decoder carry an adapter whose number [`Adapters::add`] returned, or none.
    pub fn select(&mut self, decoder: &mut Decoder<B>, carried: Carried) {
        let number = match carried {
            Carried::Nothing => 0,
            Carried::Adapter(number) => number,
        };
        if number != self.carried {
            self.detached[self.carried] = decoder.take_adapter();
            decoder.put_adapter(std::mem::take(&mut self.detached[number]));
            self.carried = number;
        }
    }
}

/// Whether an adapter does nothing but add to what projections in layers make of each row.
fn may_reside(adapter: &Adapter) -> bool {
    let adds_alone = adapter.modules.values().all(|module| module.magnitude.is_none());
    let is_of_layers = adapter.saved_tensors.is_empty() && adapter.token_rows.is_empty();
    adds_alone && is_of_layers && !adapter.modules.contains_key(HEAD)
}

/// What an adapter has on a decoder, by place.
struct Detached<B: Ops> {
    lora: Vec<Option<Lora<B>>>,
    matrices: Vec<Option<MatrixCopy<B>>>,
    biases: Vec<Option<Parameter<B>>>,
    norms: Vec<Option<Parameter<B>>>,
    embed_tokens: Option<MatrixCopy<B>>,
    tied: Copies<B>,
}

impl<B: Ops> Default for Detached<B> {
    fn default() -> Self {
        Self {
            lora: Vec::new(),
            matrices: Vec::new(),
            biases: Vec::new(),
            norms: Vec::new(),
            embed_tokens: None,
            tied: Copies::NONE,
        }
    }
}

impl<B: Blocks> Decoder<B> {
    /// What this decoder has to carry for rows of an adapter.
    pub fn carried_for(&self, adapter: usize) -> Carried {
        match adapter == 0 || self.is_resident(adapter) {
            true => Carried::Nothing,
            false => Carried::Adapter(adapter),
        }
    }

    pub(crate) fn is_resident(&self, adapter: usize) -> bool {
        self.residents.contains(&adapter)
    }

    /// Makes the adapter that is attached a resident.
    fn settle(&mut self, number: usize) {
        for projection in self.projections_mut() {
            if let Some(lora) = projection.lora.take() {
                projection.residents.insert(number, lora);
            }
        }
        self.residents.insert(number);
    }

    /// Takes a resident off, if there is one of this number.
    fn evict(&mut self, number: usize) {
        if self.residents.remove(&number) {
            self.projections_mut().into_iter().for_each(|projection| drop(projection.residents.remove(&number)));
        }
    }

    /// Takes the adapter off, so that it can be put back.
    fn take_adapter(&mut self) -> Detached<B> {
        // The projections first, while an adapter's copy of the output is among them.
        let of_projections = self.projections_mut().into_iter().map(|Projection { matrix, bias, lora, .. }| {
            (lora.take(), matrix.take_copy(), bias.as_mut().and_then(Parameter::take_copy))
        });
        let mut detached = Detached::default();
        for (lora, matrix, bias) in of_projections {
            detached.lora.push(lora);
            detached.matrices.push(matrix);
            detached.biases.push(bias);
        }
        detached.norms = self.norms_mut().into_iter().map(|norm| norm.weight.take_copy()).collect();
        (detached.embed_tokens, detached.tied) = self.embeddings.take_copies();
        detached
    }

    /// Puts an adapter back that [`Decoder::take_adapter`] took off; the decoder carries none.
    fn put_adapter(&mut self, detached: Detached<B>) {
        let Detached { lora, matrices, biases, norms, embed_tokens, tied } = detached;
        self.embeddings.put_copies(embed_tokens, tied);
        for (norm, copy) in self.norms_mut().into_iter().zip(norms) {
            copy.into_iter().for_each(|copy| norm.weight.replace_by(copy));
        }
        let of_projections = lora.into_iter().zip(matrices).zip(biases);
        for (projection, ((lora, matrix), bias)) in self.projections_mut().into_iter().zip(of_projections) {
            projection.lora = lora;
            matrix.into_iter().for_each(|copy| projection.matrix.put_copy(copy));
            if let (Some(base), Some(copy)) = (&mut projection.bias, bias) {
                base.replace_by(copy);
            }
        }
    }
}
