//! Fake quantisation: values moved to the nearest of a few, while gradients pass as if they had stayed.
//!
//! The numbers are those of torchao's `Int8DynActInt4WeightQATQuantizer` in f32: 4-bit weights, symmetric, with a scale
//! per group of inputs; 8-bit activations, asymmetric, with a scale and a zero point per token. It leaves to others
//! which tensors are moved, and when.

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
        Self { scale: (magnitude / 7.5).max(f32::MIN_POSITIVE), zero_point: 0.0, least: -8.0, most: 7.0 }
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
