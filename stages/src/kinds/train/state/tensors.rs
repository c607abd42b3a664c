//! Tensors of the working state as safetensors files, one tensor in memory at a time while they are written.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io;
use std::path::Path;

use cache::Digest;
use model::blocks::Blocks;
use model::ops::KernelError;
use model::trainer::{TrainedPart, TrainedTensor, TrainedView};
use safetensors::tensor::{Dtype, SafeTensors, View, serialize_to_file};

use super::{StateError, flush};

/// f32 tensors as a file has them: name, shape, values; sorted by name.
pub(super) type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// A trained tensor to be saved. Its values are asked for when their turn to be written comes, so that no more than
/// those of one tensor need be in memory beside the ones in training.
pub(crate) trait ToSave {
    /// Its name in the file.
    fn name(&self) -> &str;
    /// Its shape in the file.
    fn shape(&self) -> &[usize];
    /// Number of values of a set; 0 where the optimizer keeps none.
    fn values(&self, part: TrainedPart) -> usize;
    /// A set of its values.
    ///
    /// # Errors
    /// Fails if the device does.
    fn read(&self, part: TrainedPart) -> Result<Cow<'_, [f32]>, KernelError>;
}

impl ToSave for TrainedTensor {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn values(&self, part: TrainedPart) -> usize {
        self.part(part).len()
    }

    fn read(&self, part: TrainedPart) -> Result<Cow<'_, [f32]>, KernelError> {
        Ok(self.part(part).into())
    }
}

impl<B: Blocks> ToSave for TrainedView<'_, B> {
    fn name(&self) -> &str {
        self.name()
    }

    fn shape(&self) -> &[usize] {
        self.shape()
    }

    fn values(&self, part: TrainedPart) -> usize {
        self.values(part)
    }

    fn read(&self, part: TrainedPart) -> Result<Cow<'_, [f32]>, KernelError> {
        Ok(self.read(part)?.into())
    }
}

/// One set of a tensor's values, read and turned into bytes when its turn to be written comes.
struct Values<'a, T> {
    tensor: &'a T,
    part: TrainedPart,
    /// What went wrong, which [`View::data`] cannot say.
    failure: &'a RefCell<Option<KernelError>>,
}

impl<T: ToSave> View for Values<'_, T> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.tensor.read(self.part) {
            Ok(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Err(error) => {
                self.failure.replace(Some(error));
                Cow::default()
            }
        }
    }

    fn data_len(&self) -> usize {
        self.tensor.values(self.part) * size_of::<f32>()
    }
}

/// Writes one set of values of all tensors that have it, flushes it and returns its digest.
pub(super) fn write_tensors<T: ToSave>(path: &Path, tensors: &[T], part: TrainedPart) -> Result<Digest, StateError> {
    let failure = RefCell::new(None);
    let views = tensors.iter().filter(|tensor| tensor.values(part) > 0);
    let views = views.map(|tensor| (tensor.name(), Values { tensor, part, failure: &failure }));
    let written = serialize_to_file(views, None, path);
    if let Some(error) = failure.take() {
        return Err(error.into());
    }
    let io = |source| StateError::Io { path: path.to_owned(), source };
    written.map_err(|error| io(io::Error::other(error)))?;
    flush(path)?;
    let (digest, _) = Digest::of_file(path).map_err(|error| io(io::Error::other(error)))?;
    Ok(digest)
}

/// The tensors in the bytes of a file, which its path is for messages.
pub(super) fn decode(bytes: &[u8], path: &Path) -> Result<Tensors, StateError> {
    let damaged = |what: String| StateError::Damaged { path: path.to_owned(), what };
    let file = SafeTensors::deserialize(bytes).map_err(|error| damaged(error.to_string()))?;
    let mut tensors = Tensors::new();
    for (name, view) in file.iter() {
        if view.dtype() != Dtype::F32 {
            return Err(damaged(format!("tensor `{name}` is {:?} and not F32", view.dtype())));
        }
        let values = view.data().as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect();
        tensors.push((name.to_owned(), view.shape().to_vec(), values));
    }
    tensors.sort_by(|one, other| one.0.cmp(&other.0));
    Ok(tensors)
}
