//! The values of a model: frozen, or trained with a gradient and optimizer state beside them.

use crate::checkpoint::Rows;
use crate::ops::{Ops, PrepareError, Result, WeightRole, WeightSource};
use crate::optimizer::{StateSpec, StateTensor};
use crate::weights::FakeQuantization;

/// A tensor that a checkpoint or an adapter names: a norm weight, a bias, an adapter matrix, or a trained weight.
pub struct Parameter<B: Ops> {
    /// Its name in the file: as on the Hub for a weight, as PEFT writes it for an adapter.
    pub name: String,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Its value; a vector is one row.
    pub value: B::Tensor,
    /// What training keeps beside the value. None: frozen, and no gradient is computed.
    pub training: Option<Training<B>>,
    /// The base model's own, while an adapter's copy stands in for it.
    replaced: Option<Box<Parameter<B>>>,
}

/// What training keeps beside a value.
pub struct Training<B: Ops> {
    /// The gradient of the summed loss since the last step.
    pub gradient: B::Tensor,
    /// What the optimizer keeps, as its rule lists it.
    pub state: Vec<StateTensor<B::Tensor>>,
}

impl<B: Ops> Parameter<B> {
    /// A frozen parameter of this value.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new(ops: &B, name: impl Into<String>, shape: &[usize], values: &[f32]) -> Result<Self> {
        let (rows, columns) = matrix_shape(shape);
        let value = ops.tensor(rows, columns, values)?;
        Ok(Self { name: name.into(), shape: shape.to_vec(), value, training: None, replaced: None })
    }

    /// Makes the parameter trained, with a gradient and state tensors of zero, unless it is already.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn train(&mut self, ops: &B, state: &[StateSpec]) -> Result {
        if self.training.is_none() {
            let (rows, columns) = matrix_shape(&self.shape);
            let state = state.iter().map(|spec| StateTensor::new(ops, *spec, rows, columns));
            self.training =
                Some(Training { gradient: ops.zeros(rows, columns)?, state: state.collect::<Result<_>>()? });
        }
        Ok(())
    }

    /// The value and, where trained, the gradient to add to.
    pub fn split(&mut self) -> (&B::Tensor, Option<&mut B::Tensor>) {
        (&self.value, self.training.as_mut().map(|training| &mut training.gradient))
    }

    /// Whether the parameter is trained.
    pub fn is_trained(&self) -> bool {
        self.training.is_some()
    }

    /// The base model's own: this one, unless an adapter's copy stands in for it.
    pub(crate) fn base(&self) -> &Self {
        self.replaced.as_deref().unwrap_or(self)
    }

    /// What of it is frozen: the parameter in use, and the base model's own while an adapter's copy stands in for it.
    pub(crate) fn frozen(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.replaced.as_deref()).filter(|parameter| !parameter.is_trained())
    }

    /// Puts an adapter's copy in the place of this one, which is kept for [`Parameter::give_back`].
    pub(crate) fn replace_by(&mut self, copy: Self) {
        self.give_back();
        let base = std::mem::replace(self, copy);
        self.replaced = Some(Box::new(base));
    }

    /// Puts the base model's own back in its place.
    pub(crate) fn give_back(&mut self) {
        if let Some(base) = self.replaced.take() {
            *self = *base;
        }
    }

    /// Puts the base model's own back in its place and returns the adapter's copy, if that was there.
    pub(crate) fn take_copy(&mut self) -> Option<Self> {
        let base = self.replaced.take()?;
        Some(std::mem::replace(self, *base))
    }

    /// Exchanges an adapter's copy and the base model's own, which are then kept for each other.
    pub(crate) fn exchange(&mut self) {
        if let Some(mut other) = self.replaced.take() {
            std::mem::swap(self, &mut other);
            self.replaced = Some(other);
        }
    }
}

/// Rows and columns of a tensor of this shape: a vector is one row.
fn matrix_shape(shape: &[usize]) -> (usize, usize) {
    let columns = shape.last().copied().unwrap_or(1);
    (shape.iter().product::<usize>() / columns.max(1), columns)
}

/// A weight matrix `[out, in]`: prepared for products and, where trained, also a parameter that it follows.
pub struct Matrix<B: Ops> {
    /// Its name in the checkpoint.
    pub name: String,
    /// Rows of the matrix.
    pub out_features: usize,
    /// Columns of the matrix.
    pub in_features: usize,
    /// The form that products read.
    pub weight: B::Weight,
    /// The trained values, from which `weight` is prepared again after each step.
    pub trained: Option<Parameter<B>>,
    /// The base model's own, while an adapter's copy stands in for it.
    replaced: Option<Box<MatrixCopy<B>>>,
}

/// The values of a matrix that are not in use: the base model's own while an adapter's copy stands in for it, or such a
/// copy.
pub(crate) struct MatrixCopy<B: Ops> {
    weight: B::Weight,
    trained: Option<Parameter<B>>,
}

/// What happens to the values of a matrix at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trainability {
    /// Only the prepared form is kept; the values never change.
    Frozen,
    /// They are kept as a parameter, to be trained.
    Trainable,
}

impl<B: Ops> Matrix<B> {
    /// A frozen matrix of rows that are read. Where processes share their weights, only one of them reads the rows.
    ///
    /// # Errors
    /// Fails if they cannot be read, or the device fails.
    pub fn frozen(
        ops: &B,
        name: impl Into<String>,
        shape: [usize; 2],
        role: WeightRole,
        rows: &dyn Rows,
    ) -> std::result::Result<Self, PrepareError> {
        let weight = ops.prepare(WeightSource::Rows(rows), shape, role)?;
        Ok(Self::of(name.into(), shape, weight, None))
    }

    /// A matrix of these values, `[out, in]` row by row, which are a parameter that can be trained.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn trainable(
        ops: &B,
        name: impl Into<String>,
        shape: [usize; 2],
        role: WeightRole,
        values: &[f32],
    ) -> Result<Self> {
        let name = name.into();
        let mut parameter = Parameter::new(ops, name.clone(), &shape, values)?;
        match ops.prepare(WeightSource::Trained(&mut parameter.value), shape, role) {
            Ok(weight) => Ok(Self::of(name, shape, weight, Some(parameter))),
            Err(PrepareError::Kernel(error)) => Err(error),
            Err(PrepareError::Read(_)) => unreachable!("trained values are not read from a file"),
        }
    }

    fn of(
        name: String,
        [out_features, in_features]: [usize; 2],
        weight: B::Weight,
        trained: Option<Parameter<B>>,
    ) -> Self {
        Self { name, out_features, in_features, weight, trained, replaced: None }
    }

    /// Prepares the weight again from its trained values, moved to their grids where it is fake-quantised; nothing to
    /// do for a frozen one.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn refresh(&mut self, ops: &B, fake_quantization: Option<FakeQuantization>) -> Result {
        let Some(parameter) = &mut self.trained else { return Ok(()) };
        let Some(fake_quantization) = fake_quantization else {
            return ops.refresh(&mut self.weight, &mut parameter.value);
        };
        let mut values = ops.read(&parameter.value)?;
        fake_quantization.forward(&mut values);
        let mut moved = ops.tensor(self.out_features, self.in_features, &values)?;
        ops.refresh(&mut self.weight, &mut moved)
    }

    /// Makes the gradient zero where the end of a grid's range holds the value back.
    ///
    /// # Errors
    /// Fails if the device does.
    pub(crate) fn hold_back(&mut self, ops: &B, fake_quantization: FakeQuantization) -> Result {
        let Some(Parameter { value, training: Some(training), .. }) = &mut self.trained else { return Ok(()) };
        let mut gradient = ops.read(&training.gradient)?;
        fake_quantization.backward(&ops.read(value)?, &mut gradient);
        ops.write(&mut training.gradient, &gradient)
    }

    /// Announces that its trained values, if it has any, are about to change; [`Matrix::refresh`] comes before the next
    /// product.
    pub fn release(&mut self, ops: &B) {
        if self.trained.is_some() {
            ops.release(&mut self.weight);
        }
    }

    /// The prepared weight and, where trained, the gradient to add to.
    pub fn split(&mut self) -> (&B::Weight, Option<&mut B::Tensor>) {
        let training = self.trained.as_mut().and_then(|parameter| parameter.training.as_mut());
        (&self.weight, training.map(|training| &mut training.gradient))
    }

    /// Whether the matrix is trained.
    pub fn is_trained(&self) -> bool {
        self.trained.as_ref().is_some_and(Parameter::is_trained)
    }

    /// What of it is frozen: the weight in use, and the base model's own while an adapter's copy stands in for it.
    pub(crate) fn frozen_weights(&self) -> impl Iterator<Item = &B::Weight> {
        let is_frozen = |trained: &Option<Parameter<B>>| !trained.as_ref().is_some_and(Parameter::is_trained);
        let base = self.replaced.as_deref().map(|base| (&base.weight, &base.trained));
        let all = std::iter::once((&self.weight, &self.trained)).chain(base);
        all.filter(move |(_, trained)| is_frozen(trained)).map(|(weight, _)| weight)
    }

    /// The base model's own values, read from its prepared form (in whose type they are rounded) a part at a time.
    ///
    /// # Errors
    /// Fails if the device does.
    pub(crate) fn base_values(&self, ops: &B) -> Result<Vec<f32>> {
        let weight = self.replaced.as_deref().map_or(&self.weight, |replaced| &replaced.weight);
        let ids: Vec<u32> = (0..self.out_features as u32).collect();
        let mut values = Vec::with_capacity(self.out_features * self.in_features);
        let mut rows = B::Tensor::default();
        for ids in ids.chunks((1 << 20) / self.in_features.max(1) + 1) {
            ops.embed(weight, ids, 1.0, &mut rows)?;
            values.extend(ops.read(&rows)?);
        }
        Ok(values)
    }

    /// Some of its rows, of the base model's own values.
    ///
    /// # Errors
    /// Fails if the device does.
    pub(crate) fn base_rows(&self, ops: &B, rows: &[u32]) -> Result<Vec<f32>> {
        let weight = self.replaced.as_deref().map_or(&self.weight, |replaced| &replaced.weight);
        let mut values = B::Tensor::default();
        ops.embed(weight, rows, 1.0, &mut values)?;
        ops.read(&values)
    }

    /// Puts an adapter's copy in the place of these values, which are kept for [`Matrix::give_back`].
    pub(crate) fn replace_by(&mut self, copy: Self) {
        self.put_copy(MatrixCopy { weight: copy.weight, trained: copy.trained });
    }

    /// As [`Matrix::replace_by`], of values that [`Matrix::take_copy`] returned.
    pub(crate) fn put_copy(&mut self, copy: MatrixCopy<B>) {
        self.give_back();
        let weight = std::mem::replace(&mut self.weight, copy.weight);
        let trained = std::mem::replace(&mut self.trained, copy.trained);
        self.replaced = Some(Box::new(MatrixCopy { weight, trained }));
    }

    /// Puts the base model's own values back in their place and returns the adapter's copy, if that was there.
    pub(crate) fn take_copy(&mut self) -> Option<MatrixCopy<B>> {
        let base = self.replaced.take()?;
        let weight = std::mem::replace(&mut self.weight, base.weight);
        let trained = std::mem::replace(&mut self.trained, base.trained);
        Some(MatrixCopy { weight, trained })
    }

    /// Puts the base model's own values back in their place.
    pub(crate) fn give_back(&mut self) {
        if let Some(base) = self.replaced.take() {
            (self.weight, self.trained) = (base.weight, base.trained);
        }
    }

    /// Exchanges an adapter's copy and the base model's own, which are then kept for each other.
    pub(crate) fn exchange(&mut self) {
        if let Some(other) = &mut self.replaced {
            std::mem::swap(&mut self.weight, &mut other.weight);
            std::mem::swap(&mut self.trained, &mut other.trained);
        }
    }
}
