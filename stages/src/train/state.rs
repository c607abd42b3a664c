//! Working state: what an interrupted run continues from, exactly.
//!
//! Each saved step is a folder `step-<n>` with the trained tensors and both moments as f32 safetensors under their PEFT
//! or Hub names, the metrics up to that step, and `state.json`, which holds the digests of the others and is what makes
//! the folder count. A folder appears under its name only when it is whole; one that is damaged later is noticed by its
//! digests, and the one before it is used.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::Digest;
use model::trainer::TrainedTensor;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde::{Deserialize, Serialize};

/// Saved steps that are kept.
const KEPT: usize = 2;
/// The file that says what the others must be.
const STATE_FILE: &str = "state.json";
/// The metrics up to the saved step, one JSON object per line.
const METRICS_FILE: &str = "metrics.jsonl";
/// The three sets of tensors.
const TENSOR_FILES: [&str; 3] = ["trainable.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors"];

/// f32 tensors as a file has them: name, shape, values; sorted by name.
type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Where a saved run stood.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// Optimizer steps done.
    pub step: u64,
    /// Optimizer steps of the run that saved it.
    pub total_steps: u64,
    /// Updates that the moments have seen, which the bias correction counts.
    pub optimizer_steps: u64,
    /// Target tokens trained on so far.
    pub target_tokens: u64,
    /// The kernel set, its instructions and its threads; with others the last digits may differ.
    pub computed_by: String,
}

/// A saved run.
#[derive(Debug, Clone, PartialEq)]
pub struct State {
    /// Where it stood.
    pub progress: Progress,
    /// The trained tensors and their moments, sorted by name.
    pub tensors: Vec<TrainedTensor>,
    /// The metrics so far.
    pub metrics: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile {
    version: u32,
    progress: Progress,
    files: BTreeMap<String, Digest>,
}

/// Why a state cannot be saved or read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The disk refused.
    #[error("cannot write or read `{path}`")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file is not what it was when it was saved.
    #[error("`{path}` is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// Saves a state under `working` and removes all but the newest few up to it: later ones, which were damaged or passed over,
/// are no part of this run.
///
/// # Errors
/// Fails if the disk refuses; no half-written state is left to be taken for a whole one.
pub fn save(working: &Path, state: &State) -> Result<(), StateError> {
    let unfinished = working.join("unfinished");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished).map_err(at(&unfinished))?;
    }
    fs::create_dir_all(&unfinished).map_err(at(&unfinished))?;
    let mut files = BTreeMap::new();
    let values: [fn(&TrainedTensor) -> &[f32]; 3] =
        [|tensor| &tensor.value, |tensor| &tensor.exp_avg, |tensor| &tensor.exp_avg_sq];
    for (name, values) in TENSOR_FILES.into_iter().zip(values) {
        files.insert(name.to_owned(), write(&unfinished.join(name), &encode(&state.tensors, values))?);
    }
    files.insert(METRICS_FILE.to_owned(), write(&unfinished.join(METRICS_FILE), state.metrics.as_bytes())?);
    let text = serde_json::to_vec_pretty(&StateFile { version: 1, progress: state.progress.clone(), files })
        .expect("numbers, strings and digests always have a JSON form");
    write(&unfinished.join(STATE_FILE), &text)?;
    flush_folder(&unfinished)?;

    let whole = working.join(format!("step-{}", state.progress.step));
    if whole.exists() {
        fs::remove_dir_all(&whole).map_err(at(&whole))?;
    }
    fs::rename(&unfinished, &whole).map_err(at(&whole))?;
    flush_folder(working)?;
    let (until_now, later): (Vec<_>, Vec<_>) =
        saved_steps(working)?.into_iter().rev().partition(|(step, _)| *step <= state.progress.step);
    for (_, folder) in until_now.into_iter().skip(KEPT).chain(later) {
        fs::remove_dir_all(&folder).map_err(at(&folder))?;
    }
    Ok(())
}

/// The newest whole state under `working`, and why newer ones were passed over.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub fn newest(working: &Path) -> Result<(Option<State>, Vec<StateError>), StateError> {
    let mut damaged = Vec::new();
    for (_, folder) in saved_steps(working)?.into_iter().rev() {
        match read(&folder) {
            Ok(state) => return Ok((Some(state), damaged)),
            Err(error) => damaged.push(error),
        }
    }
    Ok((None, damaged))
}

/// Removes every saved state, to start over.
///
/// # Errors
/// Fails if the disk refuses.
pub fn clear(working: &Path) -> Result<(), StateError> {
    for (_, folder) in saved_steps(working)? {
        fs::remove_dir_all(&folder).map_err(at(&folder))?;
    }
    Ok(())
}

/// The folders of saved steps, the oldest first.
fn saved_steps(working: &Path) -> Result<Vec<(u64, PathBuf)>, StateError> {
    let mut found = Vec::new();
    if !working.exists() {
        return Ok(found);
    }
    for entry in fs::read_dir(working).map_err(at(working))? {
        let path = entry.map_err(at(working))?.path();
        let step = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("step-"));
        if let Some(step) = step.and_then(|step| step.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

fn read(folder: &Path) -> Result<State, StateError> {
    let path = folder.join(STATE_FILE);
    let text = fs::read(&path).map_err(at(&path))?;
    let file: StateFile = serde_json::from_slice(&text)
        .map_err(|error| StateError::Damaged { path: path.clone(), what: error.to_string() })?;
    let content = |name: &str| -> Result<Vec<u8>, StateError> {
        let path = folder.join(name);
        let bytes = fs::read(&path).map_err(at(&path))?;
        if file.files.get(name) != Some(&Digest::of(&bytes)) {
            return Err(StateError::Damaged { path, what: "it is not what was saved".to_owned() });
        }
        Ok(bytes)
    };
    let tensors = |name: &str| decode(&content(name)?, &folder.join(name));
    let metrics = String::from_utf8(content(METRICS_FILE)?)
        .map_err(|error| StateError::Damaged { path: folder.join(METRICS_FILE), what: error.to_string() })?;
    let [values, exp_avg, exp_avg_sq] = TENSOR_FILES;
    let (exp_avg, exp_avg_sq) = (tensors(exp_avg)?, tensors(exp_avg_sq)?);
    let moments = exp_avg.into_iter().zip(exp_avg_sq);
    let tensors = tensors(values)?.into_iter().zip(moments).map(|((name, shape, value), (first, second))| {
        TrainedTensor { name, shape, value, exp_avg: first.2, exp_avg_sq: second.2 }
    });
    Ok(State { tensors: tensors.collect(), progress: file.progress, metrics })
}

fn encode(tensors: &[TrainedTensor], values: fn(&TrainedTensor) -> &[f32]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> =
        tensors.iter().map(|tensor| values(tensor).iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|(tensor, bytes)| {
        let view = TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).expect("a tensor's bytes fit its shape");
        (tensor.name.as_str(), view)
    });
    serialize(views, None).expect("f32 tensors with distinct names can always be written")
}

fn decode(bytes: &[u8], path: &Path) -> Result<Tensors, StateError> {
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

/// Writes and flushes a file and returns its digest.
fn write(path: &Path, bytes: &[u8]) -> Result<Digest, StateError> {
    fs::write(path, bytes).map_err(at(path))?;
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(at(path))?;
    Ok(Digest::of(bytes))
}

fn flush_folder(path: &Path) -> Result<(), StateError> {
    fs::File::open(path).and_then(|folder| folder.sync_all()).map_err(at(path))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { path, source }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    fn state(step: u64) -> State {
        let tensor = |name: &str| TrainedTensor {
            name: name.to_owned(),
            shape: vec![2, 1],
            value: vec![step as f32, -0.5],
            exp_avg: vec![0.25, 1e-9],
            exp_avg_sq: vec![1e-30, 0.0],
        };
        State {
            progress: Progress {
                step,
                total_steps: 9,
                optimizer_steps: step,
                target_tokens: 10 * step,
                computed_by: "cpu".to_owned(),
            },
            tensors: vec![tensor("layers.0.lora_A.weight"), tensor("layers.0.lora_B.weight")],
            metrics: "{\"step\":0}\n".repeat(step as usize),
        }
    }

    #[test]
    fn what_is_saved_comes_back_and_the_two_newest_stay() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(newest(&folder.path().join("absent")).unwrap().0, None);
        for step in [5, 10, 15] {
            save(folder.path(), &state(step)).unwrap();
        }
        assert_eq!(newest(folder.path()).unwrap().0, Some(state(15)));
        assert!(!folder.path().join("step-5").exists() && folder.path().join("step-10").exists());
        clear(folder.path()).unwrap();
        assert_eq!(newest(folder.path()).unwrap().0, None);
    }

    #[test]
    fn a_damaged_state_is_noticed_and_the_one_before_it_used() {
        for (file, damage) in [(TENSOR_FILES[1], 40), (STATE_FILE, 3), (METRICS_FILE, 2)] {
            let folder = tempfile::tempdir().unwrap();
            save(folder.path(), &state(1)).unwrap();
            save(folder.path(), &state(2)).unwrap();
            let path = folder.path().join("step-2").join(file);
            let mut bytes = fs::read(&path).unwrap();
            bytes[damage] ^= 1;
            fs::write(&path, bytes).unwrap();
            let (found, damaged) = newest(folder.path()).unwrap();
            assert_eq!((found, damaged.len()), (Some(state(1)), 1), "{file}");
        }
    }

    #[test]
    fn a_half_written_state_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &state(1)).unwrap();
        fs::create_dir(folder.path().join("unfinished")).unwrap();
        fs::write(folder.path().join("unfinished/state.json"), "{").unwrap();
        assert_eq!(newest(folder.path()).unwrap().0, Some(state(1)));
        save(folder.path(), &state(2)).unwrap();
        assert_eq!(newest(folder.path()).unwrap().0, Some(state(2)));
    }

    #[test]
    fn a_state_that_was_passed_over_does_not_push_out_the_good_ones() {
        let folder = tempfile::tempdir().unwrap();
        for step in [10, 20, 30] {
            save(folder.path(), &state(step)).unwrap();
        }
        for step in [20, 30] {
            fs::write(folder.path().join(format!("step-{step}")).join(METRICS_FILE), "gone").unwrap();
        }
        save(folder.path(), &state(12)).unwrap();
        let (found, damaged) = newest(folder.path()).unwrap();
        assert_eq!((found, damaged.len()), (Some(state(12)), 0));
    }
}
