//! The proof of a merge: base with adapters, the merge before it is rounded, and the merged checkpoint run side by
//! side.
//!
//! The first two compute the same in f32 and may differ by the order of sums alone; the last two differ by one rounding
//! of the weights. So a mistake of the merge shows, however coarse the type that the result is stored in.
//!
//! Of adapters that were trained on quantised weights, what they were trained as and the merge that was not written run
//! along.

use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::against_training::{self, AgainstTraining};
use super::combine::combined;
use super::views::{Base, Rounding};
use super::{Merge, MergeInto, Progress, TrainedOn};
use crate::batch::Batch;
use crate::blocks::Blocks;
use crate::checkpoint::{Checkpoint, CheckpointError, Dtype};
use crate::config::{Config, ConfigError};
use crate::decoder::{StreamError, StreamedDecoder};

/// Tokens that go through the layers together. More of them go in groups, each of which reads all weights again.
pub const GROUP_TOKENS: usize = 2048;
/// Bytes of the head that are in memory at a time.
pub const HEAD_BYTES: usize = 8 << 20;

/// Share of the greatest value by which two runs in f32 may differ that add in another order.
const ORDER_TOLERANCE: f32 = 1e-3;

/// Why a merge is not proved.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The merged checkpoint cannot be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// Its configuration cannot.
    #[error("cannot use the merged model's configuration")]
    Config(#[from] ConfigError),
    /// The batches do not go through one of the models.
    #[error("cannot run the batches to compare on")]
    Run(#[from] StreamError),
    /// Without a token every bound holds.
    #[error("the batches to compare on hold no token")]
    NoToken,
    /// The models compute something else.
    #[error("{what}{}: {} differ by {found:.3e}, the bound is {bound:.3e}", if layer.is_some() { " from that layer on" } else { "" }, place(*layer))]
    Differs {
        /// Which of them, in words.
        what: &'static str,
        /// The first layer after which they differ by more than the bound; none: only the logits do.
        layer: Option<usize>,
        /// The greatest difference there.
        found: f32,
        /// The greatest that rounding explains.
        bound: f32,
    },
    /// What a model computes overflows, so that there is nothing to compare.
    #[error("{} have a value that is not finite", place(*layer))]
    NotFinite {
        /// The first layer after which one of the models has such a value; none: only the logits do.
        layer: Option<usize>,
    },
    /// The caller asked to stop.
    #[error("the proof was stopped")]
    Stopped,
}

fn place(layer: Option<usize>) -> String {
    layer.map_or("the logits".to_owned(), |layer| format!("the outputs of layer {layer}"))
}

/// How far two sets of numbers lie apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// The greatest difference. NaN where a number is not finite.
    pub max_abs_difference: f32,
    /// The greatest number of the first set.
    pub max_abs: f32,
}

impl Distance {
    /// That of two sets of the same size.
    pub fn of(one: &[f32], other: &[f32]) -> Self {
        let pairs = one.iter().zip(other);
        let distance =
            |(one, other): (&f32, &f32)| Self { max_abs_difference: (one - other).abs(), max_abs: one.abs() };
        pairs.map(distance).fold(Self::default(), Self::and)
    }

    /// That of both together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        // `max` passes over a NaN on either side, which must not go unseen.
        let (one, two) = (self.max_abs_difference, other.max_abs_difference);
        Self {
            max_abs_difference: if one.is_nan() || two.is_nan() { f32::NAN } else { one.max(two) },
            max_abs: self.max_abs.max(other.max_abs),
        }
    }

    fn is_within(self, tolerance: f32) -> bool {
        // An infinite difference is beyond any bound, also one of an infinite value.
        self.max_abs_difference.is_finite() && self.max_abs_difference <= tolerance * self.max_abs
    }
}

/// What two models computed from the same tokens.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The greatest difference of two logits.
    pub max_abs_logit_difference: f32,
    /// The greatest logit of the first model.
    pub max_abs_logit: f32,
    /// Share of the positions at which both find the same token the most likely.
    pub top_1_agreement: f64,
    /// The greatest difference of two logits that is explained: `tolerance` times the greatest logit.
    pub bound: f32,
    /// Share of the greatest value by which the two may differ, at the logits and after each layer.
    pub tolerance: f32,
    /// The residual stream after each layer.
    pub layers: Vec<Distance>,
}

impl Comparison {
    /// Fails if the two differ by more than is explained.
    fn check(&self, what: &'static str) -> Result<(), ProofError> {
        let logits = Distance { max_abs_difference: self.max_abs_logit_difference, max_abs: self.max_abs_logit };
        let layers = self.layers.iter().copied().enumerate().map(|(layer, distance)| (Some(layer), distance));
        let beyond = layers.chain([(None, logits)]).find(|(_, distance)| !distance.is_within(self.tolerance));
        let Some((layer, Distance { max_abs_difference: found, max_abs })) = beyond else { return Ok(()) };
        match found.is_finite() {
            true => Err(ProofError::Differs { what, layer, found, bound: self.tolerance * max_abs }),
            false => Err(ProofError::NotFinite { layer }),
        }
    }
}

/// How far base with adapters and the merged model lie apart, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Proof {
    /// Documents that were compared.
    pub rows: usize,
    /// Their tokens.
    pub positions: usize,
    /// The coarsest type among the merged weights.
    pub dtype: String,
    /// Base with adapters against the merged checkpoint.
    #[serde(flatten)]
    pub merged: Comparison,
    /// Base with adapters against the merge before it was rounded: what the arithmetic of the merge changed.
    pub before_rounding: Comparison,
    /// The merge before it was rounded against the merged checkpoint: what the stored type changed.
    pub rounding: Comparison,
    /// What was trained against the merge, of adapters that were trained on quantised weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against_training: Option<AgainstTraining>,
}

/// What another program has measured of the same three models, where this one does not compute the architecture.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Measured {
    rows: usize,
    positions: usize,
    merged: Difference,
    before_rounding: Difference,
    rounding: Difference,
    against_training: Option<AgainstTraining>,
}

/// How far two of them lie apart.
#[derive(Debug, Clone, PartialEq, Deserialize)]
struct Difference {
    layers: Vec<Distance>,
    logits: Distance,
    top_1_agreement: f64,
}

impl Difference {
    fn comparison(self, tolerance: f32) -> Comparison {
        Comparison {
            max_abs_logit_difference: self.logits.max_abs_difference,
            max_abs_logit: self.logits.max_abs,
            top_1_agreement: self.top_1_agreement,
            bound: tolerance * self.logits.max_abs,
            tolerance,
            layers: self.layers,
        }
    }
}

impl Measured {
    /// The proof that it is, for a checkpoint that a merge wrote; as with [`Merge::prove`], whether the bounds hold is
    /// for [`Proof::check`] to say.
    ///
    /// # Errors
    /// Fails if it holds no token, or the checkpoint cannot be read.
    pub fn proof(self, merged: &Path) -> Result<Proof, ProofError> {
        if self.positions == 0 {
            return Err(ProofError::NoToken);
        }
        let dtype = coarsest(&Checkpoint::open(merged)?);
        let tolerance = rounding_tolerance(dtype);
        Ok(Proof {
            rows: self.rows,
            positions: self.positions,
            dtype: format!("{dtype:?}"),
            merged: self.merged.comparison(tolerance),
            before_rounding: self.before_rounding.comparison(ORDER_TOLERANCE),
            rounding: self.rounding.comparison(tolerance),
            against_training: self.against_training,
        })
    }
}

impl Proof {
    /// Fails if the merged model computes something else than base with adapters, naming the first layer that does.
    ///
    /// # Errors
    /// [`ProofError::Differs`], or [`ProofError::NotFinite`] where there is nothing to compare.
    pub fn check(&self) -> Result<(), ProofError> {
        self.before_rounding.check("the merged weights do not compute what base and adapter do")?;
        self.rounding
            .check("the merged weights as they are stored do not compute what they did before they were rounded")?;
        self.merged.check("the merged model does not compute what base and adapter do")
    }
}

impl Merge<'_> {
    /// Compares base with adapters and the checkpoint that this merge wrote to `merged`, on the tokens of `batches`.
    ///
    /// The models are run in f32, layer by layer: memory holds one decoder layer at a time, and the residual streams of
    /// some thousand tokens. `observe` hears of the layers and may stop the proof. Whether the bounds hold is for
    /// [`Proof::check`] to say.
    ///
    /// # Errors
    /// Fails if the batches hold no token or do not fit the model, the checkpoint cannot be read, or the device fails.
    pub fn prove<B: Blocks>(
        &self,
        ops: &Arc<B>,
        merged: &Path,
        batches: &[Batch],
        observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Proof, ProofError> {
        // The merged configuration serves all three: it says whether the head is a weight of its own now.
        let config = Config::read(merged)?;
        let stored = Checkpoint::open(merged)?;
        let dtype = coarsest(&stored);
        let base = Base::new(self, &self.checkpoint);
        let unrounded = Base::new(self, &self.checkpoint).merged(Rounding::None);
        let adapter = combined(&self.adapters);
        let groups = groups(batches);
        let mut done = Progress { done: 0, total: (groups.len() * config.num_hidden_layers) as u64 };
        let mut tally = Tally::new(config.num_hidden_layers);
        let mut against = self.options.trained_on.map(|TrainedOn { into, .. }| against_training::Tally::new(into));
        // What was trained is base with adapters, where they are merged into the weights they were trained on.
        let others = self.other.as_ref();
        let is_trained = |trained_on: &TrainedOn<'_>| trained_on.into == MergeInto::Dequantized;
        let trained = others.filter(|_| !self.options.trained_on.as_ref().is_some_and(is_trained));
        let trained = trained.map(|other| Base::new(self, other));
        let other = others.map(|other| Base::new(self, other).merged(Rounding::AsStored));
        for group in groups {
            let batches = &batches[group];
            let stream = |weights, adapter| StreamedDecoder::new(Arc::clone(ops), &config, weights, adapter, batches);
            let mut adapted = stream(&base, Some(&*adapter))?;
            let mut merged = stream(&stored, None)?;
            // Where nothing is rounded, the merged weights are those before rounding.
            let mut unrounded = if dtype == Dtype::F32 { None } else { Some(stream(&unrounded, None)?) };
            let mut trained = trained.as_ref().map(|trained| stream(trained, Some(&*adapter))).transpose()?;
            let mut other = other.as_ref().map(|other| stream(other, None)).transpose()?;
            for layer in 0..config.num_hidden_layers {
                for alongside in trained.iter_mut().chain(&mut other) {
                    alongside.layer(layer)?;
                }
                adapted.layer(layer)?;
                merged.layer(layer)?;
                unrounded.as_mut().map_or(Ok(()), |unrounded| unrounded.layer(layer))?;
                for batch in 0..batches.len() {
                    let unrounded = unrounded.as_ref().map(|unrounded| unrounded.residual(batch)).transpose()?;
                    let outputs = [adapted.residual(batch)?, merged.residual(batch)?];
                    tally.add_layer(layer, &outputs, unrounded.as_deref());
                }
                done.done += 1;
                if observe(done).is_break() {
                    return Err(ProofError::Stopped);
                }
            }
            for ids in blocks(&config) {
                let outputs = [adapted.logits(ids.clone())?, merged.logits(ids.clone())?];
                let unrounded = unrounded.as_ref().map(|unrounded| unrounded.logits(ids.clone())).transpose()?;
                tally.add_logits(&ids, &outputs, unrounded.as_deref());
                if let (Some(against), Some(other)) = (&mut against, &other) {
                    let [adapted, merged] = &outputs;
                    let trained = trained.as_ref().map(|trained| trained.logits(ids.clone())).transpose()?;
                    let other = other.logits(ids.clone())?;
                    against.add_logits(&ids, [trained.as_ref().unwrap_or(adapted), merged, &other]);
                }
            }
            tally.end_logits();
            if let Some(against) = &mut against {
                against.end_logits();
            }
        }
        if tally.positions == 0 {
            return Err(ProofError::NoToken);
        }
        let rows = batches.iter().map(|batch| batch.document_lengths.len()).sum();
        let against_training = against.map(against_training::Tally::end);
        Ok(Proof { against_training, ..tally.proof(rows, dtype) })
    }
}

/// Ranges of batches that go through the layers together.
fn groups(batches: &[Batch]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut tokens = 0;
    for (index, batch) in batches.iter().enumerate() {
        tokens += batch.tokens();
        match groups.last_mut() {
            Some(group) if tokens <= GROUP_TOKENS => group.end = index + 1,
            _ => {
                groups.push(index..index + 1);
                tokens = batch.tokens();
            }
        }
    }
    groups
}

/// Ranges of ids whose rows of the head are in memory together.
fn blocks(config: &Config) -> impl Iterator<Item = Range<usize>> + use<> {
    let (vocab_size, rows) = (config.vocab_size, (HEAD_BYTES / 4 / config.hidden_size).max(1));
    (0..vocab_size).step_by(rows).map(move |first| first..(first + rows).min(vocab_size))
}

/// The coarsest type among the weights, which decides how far rounding can lead.
fn coarsest(checkpoint: &Checkpoint) -> Dtype {
    let dtypes: BTreeSet<Dtype> = checkpoint.tensors().map(|(_, info)| info.dtype).collect();
    [Dtype::BF16, Dtype::F16].into_iter().find(|dtype| dtypes.contains(dtype)).unwrap_or(Dtype::F32)
}

/// Share of the greatest value by which one rounding of the weights to this type, carried through the layers, may
/// change any.
///
/// A value of bf16 has 8 significant bits and one of f16 has 11: a rounded weight is off by up to 2⁻⁹ or 2⁻¹² of
/// itself. Errors of single weights are independent and mostly cancel in a product. These bounds are an order of
/// magnitude above what models of the field show, and as far below what a forgotten or doubled adapter does.
fn rounding_tolerance(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::BF16 => 5e-2,
        Dtype::F16 => 1e-2,
        _ => ORDER_TOLERANCE,
    }
}

/// The most likely id at a position, and its logit.
pub(super) type Top = (u32, f32);

/// Takes in the logits of some ids, batch by batch.
pub(super) fn note_tops(tops: &mut Vec<Top>, ids: &Range<usize>, logits: &[Vec<f32>]) {
    let rows = logits.iter().flat_map(|batch| batch.chunks_exact(ids.len()));
    for (position, row) in rows.enumerate() {
        if tops.len() == position {
            tops.push((0, f32::NEG_INFINITY));
        }
        for (id, logit) in ids.clone().zip(row) {
            if *logit > tops[position].1 {
                tops[position] = (id as u32, *logit);
            }
        }
    }
}

/// The number of positions at which two models find the same id the most likely.
pub(super) fn same_tops(one: &[Top], other: &[Top]) -> usize {
    one.iter().zip(other).filter(|((one, _), (other, _))| one == other).count()
}

/// Sums of a comparison.
#[derive(Default)]
pub(super) struct Sums {
    layers: Vec<Distance>,
    pub(super) logits: Distance,
    pub(super) same_top: usize,
}

impl Sums {
    /// Takes in the logits of some ids: of each model, batch by batch.
    pub(super) fn add_logits(&mut self, one: &[Vec<f32>], other: &[Vec<f32>]) {
        let distances = one.iter().zip(other).map(|(one, other)| Distance::of(one, other));
        self.logits = distances.fold(self.logits, Distance::and);
    }

    fn comparison(self, positions: usize, tolerance: f32) -> Comparison {
        Comparison {
            max_abs_logit_difference: self.logits.max_abs_difference,
            max_abs_logit: self.logits.max_abs,
            top_1_agreement: self.same_top as f64 / positions as f64,
            bound: tolerance * self.logits.max_abs,
            tolerance,
            layers: self.layers,
        }
    }
}

/// What is gathered while the three models run.
struct Tally {
    positions: usize,
    merged: Sums,
    /// Empty where nothing is rounded.
    before_rounding: Sums,
    rounding: Sums,
    /// Those of each of the models at each position of the group.
    tops: [Vec<Top>; 3],
    is_rounded: bool,
}

impl Tally {
    fn new(layers: usize) -> Self {
        let sums = || Sums { layers: vec![Distance::default(); layers], ..Sums::default() };
        Self {
            positions: 0,
            merged: sums(),
            before_rounding: sums(),
            rounding: sums(),
            tops: Default::default(),
            is_rounded: false,
        }
    }

    fn add_layer(&mut self, layer: usize, [adapted, merged]: &[Vec<f32>; 2], unrounded: Option<&[f32]>) {
        let add = |sums: &mut Sums, one: &[f32], other: &[f32]| {
            sums.layers[layer] = sums.layers[layer].and(Distance::of(one, other));
        };
        add(&mut self.merged, adapted, merged);
        if let Some(unrounded) = unrounded {
            self.is_rounded = true;
            add(&mut self.before_rounding, adapted, unrounded);
            add(&mut self.rounding, unrounded, merged);
        }
    }

    /// Takes in the logits of some ids: of each model, batch by batch.
    fn add_logits(
        &mut self,
        ids: &Range<usize>,
        [adapted, merged]: &[Vec<Vec<f32>>; 2],
        unrounded: Option<&[Vec<f32>]>,
    ) {
        self.merged.add_logits(adapted, merged);
        if let Some(unrounded) = unrounded {
            self.before_rounding.add_logits(adapted, unrounded);
            self.rounding.add_logits(unrounded, merged);
        }
        let models = [adapted.as_slice(), merged.as_slice(), unrounded.unwrap_or_default()];
        for (tops, logits) in self.tops.iter_mut().zip(models) {
            note_tops(tops, ids, logits);
        }
    }

    fn end_logits(&mut self) {
        let [adapted, merged, unrounded] = std::mem::take(&mut self.tops);
        self.positions += adapted.len();
        self.merged.same_top += same_tops(&adapted, &merged);
        self.before_rounding.same_top += same_tops(&adapted, &unrounded);
        self.rounding.same_top += same_tops(&unrounded, &merged);
    }

    fn proof(self, rows: usize, dtype: Dtype) -> Proof {
        let Self { positions, merged, before_rounding, rounding, is_rounded, .. } = self;
        let tolerance = rounding_tolerance(dtype);
        let merged = merged.comparison(positions, tolerance);
        let (before_rounding, rounding) = match is_rounded {
            true => (before_rounding.comparison(positions, ORDER_TOLERANCE), rounding.comparison(positions, tolerance)),
            false => (merged.clone(), nothing_rounded(&merged)),
        };
        Proof {
            rows,
            positions,
            dtype: format!("{dtype:?}"),
            merged,
            before_rounding,
            rounding,
            against_training: None,
        }
    }
}

/// The comparison of a model with itself.
fn nothing_rounded(merged: &Comparison) -> Comparison {
    let same = |layer: &Distance| Distance { max_abs_difference: 0.0, max_abs: layer.max_abs };
    let layers = merged.layers.iter().map(same).collect();
    Comparison { max_abs_logit_difference: 0.0, top_1_agreement: 1.0, layers, ..merged.clone() }
}
