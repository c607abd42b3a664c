//! Tensors of the working state as safetensors files, one tensor in memory at a time while they are written.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use model::blocks::Blocks;
use model::ops::KernelError;
use model::optimizer::{SavedSet, StateDtype, StateValues};
use model::trainer::{TrainedTensor, TrainedView};
use safetensors::tensor::{Dtype, SafeTensors, View, serialize_to_file};

use super::{StateError, VALUES, at, flush};
use crate::kinds::train::learner::TensorFiles;

/// Tensors as a file has them: name, shape, values; sorted by name.
type Tensors = Vec<(String, Vec<usize>, StateValues)>;

/// Sets of optimizer state that every saved step has a file of, which is empty where the optimizer has no such set.
const USUAL_SETS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// A trained tensor to be saved. Its values are asked for when their turn to be written comes, so that no more than
/// those of one tensor need be in memory beside the ones in training.
pub(in crate::kinds::train) trait ToSave {
    /// Its name in the file.
    fn name(&self) -> &str;
    /// Its shape in the file.
    fn shape(&self) -> &[usize];
    /// Its value.
    ///
    /// # Errors
    /// Fails if the device does.
    fn value(&self) -> Result<Vec<f32>, KernelError>;
    /// The sets of values that the optimizer keeps of it.
    fn state_sets(&self) -> Vec<SavedSet>;
    /// The set of this name, which is one of them.
    ///
    /// # Errors
    /// Fails if the device does.
    fn state(&self, name: &str) -> Result<Option<StateValues>, KernelError>;
}

impl ToSave for TrainedTensor {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn value(&self) -> Result<Vec<f32>, KernelError> {
        Ok(self.value.clone())
    }

    fn state_sets(&self) -> Vec<SavedSet> {
        let set = |(name, values): (&String, &StateValues)| SavedSet {
            name: name.clone(),
            dtype: values.dtype(),
            values: values.count(),
        };
        self.state.iter().map(set).collect()
    }

    fn state(&self, name: &str) -> Result<Option<StateValues>, KernelError> {
        Ok(self.state.get(name).cloned())
    }
}

impl<B: Blocks> ToSave for TrainedView<'_, B> {
    fn name(&self) -> &str {
        self.name()
    }

    fn shape(&self) -> &[usize] {
        self.shape()
    }

    fn value(&self) -> Result<Vec<f32>, KernelError> {
        self.value()
    }

    fn state_sets(&self) -> Vec<SavedSet> {
        self.state_sets()
    }

    fn state(&self, name: &str) -> Result<Option<StateValues>, KernelError> {
        self.state(name)
    }
}

/// One set of a tensor's values, read and turned into bytes when its turn to be written comes.
struct Values<'a, T> {
    tensor: &'a T,
    set: &'a str,
    dtype: StateDtype,
    shape: Vec<usize>,
    /// What went wrong, which [`View::data`] cannot say.
    failure: &'a RefCell<Option<KernelError>>,
}

impl<'a, T: ToSave> Values<'a, T> {
    /// None where the tensor has no such set.
    fn of(tensor: &'a T, set: &'a str, failure: &'a RefCell<Option<KernelError>>) -> Option<Self> {
        let shape = tensor.shape();
        let (dtype, shape) = match set {
            VALUES => (StateDtype::F32, shape.to_vec()),
            name => {
                let set = tensor.state_sets().into_iter().find(|set| set.name == name)?;
                // A set of other than one value per element is a list.
                let shape =
                    if set.values == shape.iter().product::<usize>() { shape.to_vec() } else { vec![set.values] };
                (set.dtype, shape)
            }
        };
        Some(Self { tensor, set, dtype, shape, failure })
    }

    fn bytes(&self) -> Result<Vec<u8>, KernelError> {
        Ok(match self.set {
            VALUES => StateValues::F32(self.tensor.value()?).to_bytes(),
            name => self.tensor.state(name)?.map(|values| values.to_bytes()).unwrap_or_default(),
        })
    }
}

impl<T: ToSave> View for Values<'_, T> {
    fn dtype(&self) -> Dtype {
        in_file(self.dtype)
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.bytes() {
            Ok(bytes) => bytes.into(),
            Err(error) => {
                self.failure.replace(Some(error));
                Cow::default()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bytes()
    }
}

/// The dtype in a file.
fn in_file(dtype: StateDtype) -> Dtype {
    match dtype {
        StateDtype::F32 => Dtype::F32,
        StateDtype::Bf16 => Dtype::BF16,
        StateDtype::U8 => Dtype::U8,
    }
}

/// The sets of values of these tensors.
pub(in crate::kinds::train) fn sets<T: ToSave>(tensors: &[T]) -> Vec<String> {
    let mut sets: BTreeSet<String> = USUAL_SETS.map(str::to_owned).into();
    sets.extend(tensors.iter().flat_map(ToSave::state_sets).map(|set| set.name));
    std::iter::once(VALUES.to_owned()).chain(sets).collect()
}

/// Writes one set of values of all tensors that have it, and flushes it.
pub(in crate::kinds::train) fn write_tensors<T: ToSave>(
    path: &Path,
    tensors: &[T],
    set: &str,
) -> Result<(), StateError> {
    let failure = RefCell::new(None);
    let view = |tensor| Some((T::name(tensor), Values::of(tensor, set, &failure)?));
    let views = tensors.iter().filter_map(view);
    let written = serialize_to_file(views, None, path);
    if let Some(error) = failure.take() {
        return Err(error.into());
    }
    written.map_err(|error| StateError::Io { path: path.to_owned(), source: io::Error::other(error) })?;
    flush(path)
}

/// Reads the tensors of a saved state, sorted by name.
pub(in crate::kinds::train) fn read_tensors(files: &TensorFiles) -> Result<Vec<TrainedTensor>, StateError> {
    let mut tensors = BTreeMap::new();
    let bytes = |path: &Path| fs::read(path).map_err(at(path));
    for path in files.get(VALUES).into_iter().flatten() {
        for (name, shape, value) in decode_values(&bytes(path)?, path)? {
            tensors.insert(name.clone(), TrainedTensor { name, shape, value, state: BTreeMap::new() });
        }
    }
    for (set, paths) in files.iter().filter(|(set, _)| *set != VALUES) {
        for path in paths {
            for (name, _, values) in decode(&bytes(path)?, path)? {
                if let Some(tensor) = tensors.get_mut(&name) {
                    tensor.state.insert(set.clone(), values);
                }
            }
        }
    }
    Ok(tensors.into_values().collect())
}

/// A trained tensor: its name, its shape and its values.
type NamedValues = (String, Vec<usize>, Vec<f32>);

/// As [`decode`], of the values of tensors.
fn decode_values(bytes: &[u8], path: &Path) -> Result<Vec<NamedValues>, StateError> {
    let values = |(name, shape, values)| match values {
        StateValues::F32(values) => Ok((name, shape, values)),
        other => {
            let what = format!("tensor `{name}` is {:?} and not F32", other.dtype());
            Err(StateError::Damaged { path: path.to_owned(), what })
        }
    };
    decode(bytes, path)?.into_iter().map(values).collect()
}

/// The tensors in the bytes of a file, which its path is for messages.
fn decode(bytes: &[u8], path: &Path) -> Result<Tensors, StateError> {
    let damaged = |what: String| StateError::Damaged { path: path.to_owned(), what };
    let file = SafeTensors::deserialize(bytes).map_err(|error| damaged(error.to_string()))?;
    let mut tensors = Tensors::new();
    for (name, view) in file.iter() {
        let Some(dtype) = StateDtype::ALL.into_iter().find(|dtype| in_file(*dtype) == view.dtype()) else {
            return Err(damaged(format!("tensor `{name}` is {:?}, which no saved tensor is", view.dtype())));
        };
        tensors.push((name.to_owned(), view.shape().to_vec(), StateValues::from_bytes(dtype, view.data())));
    }
    tensors.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(tensors)
}
