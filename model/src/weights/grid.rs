//! Fake quantisation: values moved to the nearest of a few, while gradients pass as if they had stayed.
//!
//! The numbers are those of torchao's `Int8DynActInt4WeightQATQuantizer` in f32: 4-bit weights, symmetric, with a scale
//! per group of inputs; 8-bit activations, asymmetric, with a scale and a zero point per token. It leaves to
//! [`crate::adapter::Projection`] what a linear layer computes of them, and to trainers when.

use std::path::Path;

use crate::checkpoint::{Checkpoint, CheckpointError, Rows};

/// The file beside the weights of a model that was trained so: under the name of each weight that is on a grid its
/// scales, `[out, in / group_size]`. The weights themselves are stored rounded, and lie near enough to their numbers.
pub const SCALES_FILE: &str = "int8_dynamic_activations_int4_weights.safetensors";

/// The values that fake quantisation may give: `scale · (number − zero_point)`, the number an integer in a range.
///
/// Source: `_fake_quantize_affine` and `choose_qparams_affine` of torchao 0.18, whose order of operations it has, so
/// that values are equal bit for bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    /// The distance between neighbours.
    pub scale: f32,
    /// The number that stands for zero, an integer.
    pub zero_point: f32,
    least: f32,
    most: f32,
}

impl Grid {
    /// That of a group of weights: numbers from −8 to 7, around zero.
    ///
    /// The largest magnitude is 7.5 steps from zero: one that is positive becomes 7 steps, one that is negative 8.
    pub fn int4(group: &[f32]) -> Self {
        let magnitude = group.iter().fold(0.0f32, |most, value| most.max(value.abs()));
        Self::int4_of_scale((magnitude / 7.5).max(f32::MIN_POSITIVE))
    }

    /// That of a group of weights whose scale is known.
    pub fn int4_of_scale(scale: f32) -> Self {
        Self { scale, zero_point: 0.0, least: -8.0, most: 7.0 }
    }

    /// That of a token's activations: numbers from −128 to 127 over the range of the values and zero.
    pub fn int8(token: &[f32]) -> Self {
        let [least, most] = [-128.0f32, 127.0];
        let low = token.iter().copied().fold(0.0, f32::min);
        let high = token.iter().copied().fold(0.0, f32::max);
        let scale = ((high - low) / (most - least)).max(f32::EPSILON);
        let zero_point = (least - (low / scale).round_ties_even()).clamp(least, most);
        Self { scale, zero_point, least, most }
    }

    /// The grid's value in place of this one. One that is not finite becomes NaN.
    pub fn nearest(self, value: f32) -> f32 {
        (self.unbounded(value).clamp(self.least, self.most) - self.zero_point) * self.scale
    }

    /// Whether the gradient passes: not where an end of the range holds the value back.
    ///
    /// At the end itself it passes, as in torch until 2.13. Since then its `clamp` has a gradient of 0 there, which
    /// would freeze all that two of 16 numbers stand for.
    pub fn passes(self, value: f32) -> bool {
        (self.least..=self.most).contains(&self.unbounded(value))
    }

    /// The number of a value, were the range without end.
    fn unbounded(self, value: f32) -> f32 {
        (value * (1.0 / self.scale)).round_ties_even() + self.zero_point
    }
}

/// What shares a grid, among values that lie row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeQuantization {
    /// [`Grid::int4`] of so many weights along the input, which divide a row.
    Int4Weights {
        /// How many share a scale.
        group_size: usize,
    },
    /// [`Grid::int8`] of each token.
    Int8Activations {
        /// Values of a token.
        features: usize,
    },
}

impl FakeQuantization {
    /// The grid of each group of `values`, in order; the last group may be shorter.
    pub fn grids(self, values: &[f32]) -> impl Iterator<Item = Grid> {
        values.chunks(self.group_size()).map(move |group| self.grid(group))
    }

    /// Moves each value to its grid.
    pub fn forward(self, values: &mut [f32]) {
        for group in values.chunks_mut(self.group_size()) {
            let grid = self.grid(group);
            group.iter_mut().for_each(|value| *value = grid.nearest(*value));
        }
    }

    /// Makes the gradient of what [`Self::forward`] gave for `values` that of `values`: the same, and 0 where the end
    /// of a range holds a value back. Scales and zero points count as constants.
    pub fn backward(self, values: &[f32], gradient: &mut [f32]) {
        let group_size = self.group_size();
        for (group, gradient) in values.chunks(group_size).zip(gradient.chunks_mut(group_size)) {
            let grid = self.grid(group);
            for (value, gradient) in group.iter().zip(gradient) {
                if !grid.passes(*value) {
                    *gradient = 0.0;
                }
            }
        }
    }

    fn group_size(self) -> usize {
        match self {
            Self::Int4Weights { group_size } => group_size,
            Self::Int8Activations { features } => features,
        }
    }

    fn grid(self, group: &[f32]) -> Grid {
        match self {
            Self::Int4Weights { .. } => Grid::int4(group),
            Self::Int8Activations { .. } => Grid::int8(group),
        }
    }
}

/// Which linear layers stand in for ones of 4-bit weights and 8-bit activations, and how many weights share a scale.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakeQuantizedLayers {
    /// Weights along the input that share a scale; it divides the inputs of each layer.
    pub group_size: usize,
    /// Linear layers that are not quantised: their names, or parts of their paths (`o_proj`, `layers.0`).
    pub skip_modules: Vec<String>,
}

impl FakeQuantizedLayers {
    /// Whether the weight of this name is on a grid: that of a linear layer which is not skipped.
    pub fn covers(&self, name: &str) -> bool {
        super::is_linear_layer(name, &self.skip_modules)
    }

    /// What is done to its weights.
    pub fn of_weights(&self) -> FakeQuantization {
        FakeQuantization::Int4Weights { group_size: self.group_size }
    }
}

/// Where the grids of a frozen model's weights come from.
pub(crate) enum FrozenGrids {
    /// From the weights.
    Computed(FakeQuantizedLayers),
    /// From the file [`SCALES_FILE`].
    Stored(Checkpoint),
}

impl FrozenGrids {
    /// Those beside the weights in a folder, if they have any.
    pub(crate) fn beside(folder: &Path) -> Result<Option<Self>, CheckpointError> {
        let file = folder.join(SCALES_FILE);
        file.exists().then(|| Checkpoint::open_file(&file).map(Self::Stored)).transpose()
    }

    /// Weights of a group of the tensor of this name, if it is on a grid.
    pub(crate) fn group_size(
        &self,
        name: &str,
        [out_features, in_features]: [usize; 2],
    ) -> Result<Option<usize>, CheckpointError> {
        match self {
            Self::Computed(layers) => Ok(layers.covers(name).then_some(layers.group_size)),
            Self::Stored(scales) => {
                if !scales.contains(name) {
                    return Ok(None);
                }
                let groups = scales.shape(name)?.last().copied().filter(|groups| in_features.is_multiple_of(*groups));
                // Of those that do not divide the inputs, as many as there are inputs would be right.
                let groups = groups.unwrap_or(in_features);
                scales.expect_shape(name, &[out_features, groups])?;
                Ok(Some(in_features / groups))
            }
        }
    }

    /// The rows of a weight on its grid.
    pub(crate) fn rows<'a>(
        &self,
        rows: Box<dyn Rows + 'a>,
        name: &str,
        shape: [usize; 2],
    ) -> Result<Box<dyn Rows + 'a>, CheckpointError> {
        let Some(group_size) = self.group_size(name, shape)? else { return Ok(rows) };
        let scales = match self {
            Self::Computed(_) => None,
            Self::Stored(scales) => Some(scales.tensor_f32(name)?),
        };
        Ok(Box::new(GridRows { rows, columns: shape[1], group_size, scales }))
    }
}

/// Rows of a weight that are moved to their grids as they are read.
struct GridRows<'a> {
    rows: Box<dyn Rows + 'a>,
    columns: usize,
    group_size: usize,
    /// Of all groups, in order; computed from the weights where there are none.
    scales: Option<Vec<f32>>,
}

impl Rows for GridRows<'_> {
    fn read(&self, first: usize, values: &mut [f32]) -> Result<(), CheckpointError> {
        self.rows.read(first, values)?;
        let Some(scales) = &self.scales else {
            FakeQuantization::Int4Weights { group_size: self.group_size }.forward(values);
            return Ok(());
        };
        let first = first * self.columns / self.group_size;
        for (group, &scale) in values.chunks_mut(self.group_size).zip(&scales[first..]) {
            let grid = Grid::int4_of_scale(scale);
            group.iter_mut().for_each(|value| *value = grid.nearest(*value));
        }
        Ok(())
    }
}
