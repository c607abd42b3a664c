//! Working state: what an interrupted run continues from, exactly.
//!
//! Each saved step is a folder `step-<n>` with the trained tensors and, a file for each set of values, the optimizer's
//! state of them as safetensors under their PEFT or Hub names, the metrics up to that step, and `state.json`, which
//! holds the digests of the others and is what makes the folder count. A folder appears under its name only when it is
//! whole; one that is damaged later is noticed by its digests, and the one before it is used.
//!
//! The weights of the step with the lowest validation loss lie beside them, as `best/step-<n>.safetensors`. A saved
//! step names the best one of its time by its digest, so an older one stays until no saved step names it.

mod tensors;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::Digest;
use model::ops::KernelError;
use model::optimizer::StateValues;
use model::trainer::{LossScalerState, TrainedTensor};
use serde::{Deserialize, Serialize};

pub(super) use tensors::ToSave;
use tensors::{Part, decode, decode_values, write_tensors};

use super::validation::Course;

/// Version of the form of a saved step.
const VERSION: u32 = 3;
/// The file that says what the others must be.
const STATE_FILE: &str = "state.json";
/// The metrics up to the saved step, one JSON object per line.
const METRICS_FILE: &str = "metrics.jsonl";
/// The trained values.
const VALUES_FILE: &str = "trainable.safetensors";
/// Sets of optimizer state that every saved step has a file of, which is empty where the optimizer has no such set.
const USUAL_SETS: [&str; 2] = ["exp_avg", "exp_avg_sq"];
/// The ending of files of tensors.
const TENSORS: &str = ".safetensors";
/// Folder of the best steps' weights.
const BEST_FOLDER: &str = "best";

/// Where a saved run stood.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Progress {
    /// Optimizer steps done, skipped ones among them.
    pub step: u64,
    /// Steps whose gradients overflowed, for which the schedule stood still.
    pub skipped_steps: u64,
    /// Optimizer steps of the run that saved it.
    pub total_steps: u64,
    /// Updates that the moments have seen, which the bias correction counts.
    pub optimizer_steps: u64,
    /// Target tokens trained on so far.
    pub target_tokens: u64,
    /// How validation has gone.
    pub validation: Course,
    /// The weights of the best step, where they are kept.
    pub best_weights: Option<BestWeights>,
    /// The factor on the loss, with loss scaling.
    pub loss_scaler: Option<LossScalerState>,
    /// The kernel set, its instructions and its threads, and the micro-batch size; with others the last digits may
    /// differ.
    pub computed_by: String,
}

impl Progress {
    /// A run before its first step.
    pub(super) fn fresh(total_steps: u64, computed_by: String) -> Self {
        Self {
            step: 0,
            skipped_steps: 0,
            total_steps,
            optimizer_steps: 0,
            target_tokens: 0,
            validation: Course::default(),
            best_weights: None,
            loss_scaler: None,
            computed_by,
        }
    }
}

/// The weights of a step, kept apart from the saved steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct BestWeights {
    /// Steps done.
    pub step: u64,
    /// Digest of their file.
    pub digest: Digest,
}

/// A saved run, or one that is to be saved.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct State<T = TrainedTensor> {
    /// Where it stood.
    pub progress: Progress,
    /// The trained tensors and their moments; sorted by name where they were read.
    pub tensors: Vec<T>,
    /// The metrics so far.
    pub metrics: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StateFile {
    version: u32,
    progress: Progress,
    files: BTreeMap<String, Digest>,
    /// Of the two fields before it, so that a flipped digit is noticed here as it is in the other files.
    digest: Digest,
}

impl StateFile {
    fn new(progress: Progress, files: BTreeMap<String, Digest>) -> Self {
        let digest = Self::digest_of(&progress, &files);
        Self { version: VERSION, progress, files, digest }
    }

    fn digest_of(progress: &Progress, files: &BTreeMap<String, Digest>) -> Digest {
        let text = serde_json::to_vec(&(progress, files));
        Digest::of(&text.expect("numbers, strings and digests always have a JSON form"))
    }
}

/// Why a state cannot be saved or read.
#[derive(Debug, thiserror::Error)]
pub(super) enum StateError {
    /// The disk refused.
    #[error("cannot write or read `{path}`")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The values to be saved cannot be read.
    #[error("cannot read what is trained")]
    Device(#[from] KernelError),
    /// A file is not what it was when it was saved.
    #[error("`{path}` is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

/// Saves a state under `working` and removes all but the `keep` newest up to it: later ones, which were damaged or
/// passed over, are no part of this run.
///
/// # Errors
/// Fails if the disk or the device refuses; no half-written state is left to be taken for a whole one.
pub(super) fn save<T: ToSave>(working: &Path, state: &State<T>, keep: usize) -> Result<(), StateError> {
    let unfinished = working.join("unfinished");
    remove(&unfinished)?;
    fs::create_dir_all(&unfinished).map_err(at(&unfinished))?;
    let mut files = BTreeMap::new();
    let mut write_part = |file: String, part: Part<'_>| -> Result<(), StateError> {
        let digest = write_tensors(&unfinished.join(&file), &state.tensors, part)?;
        files.insert(file, digest);
        Ok(())
    };
    write_part(VALUES_FILE.to_owned(), Part::Value)?;
    let mut sets: BTreeSet<String> = USUAL_SETS.map(str::to_owned).into();
    sets.extend(state.tensors.iter().flat_map(ToSave::state_sets).map(|set| set.name));
    for set in &sets {
        write_part(format!("{set}{TENSORS}"), Part::State(set))?;
    }
    files.insert(METRICS_FILE.to_owned(), write(&unfinished.join(METRICS_FILE), state.metrics.as_bytes())?);
    let text = serde_json::to_vec_pretty(&StateFile::new(state.progress.clone(), files))
        .expect("numbers, strings and digests always have a JSON form");
    write(&unfinished.join(STATE_FILE), &text)?;
    flush_folder(&unfinished)?;

    let whole = working.join(format!("step-{}", state.progress.step));
    remove(&whole)?;
    fs::rename(&unfinished, &whole).map_err(at(&whole))?;
    flush_folder(working)?;
    let (until_now, later): (Vec<_>, Vec<_>) =
        saved_steps(working)?.into_iter().rev().partition(|(step, _)| *step <= state.progress.step);
    for (_, folder) in until_now.into_iter().skip(keep).chain(later) {
        remove(&folder)?;
    }
    remove_unnamed_best(working)
}

/// Keeps the values of the best step's tensors.
///
/// # Errors
/// Fails if the disk or the device refuses; the file is there whole or not at all.
pub(super) fn save_best<T: ToSave>(working: &Path, step: u64, tensors: &[T]) -> Result<BestWeights, StateError> {
    let folder = working.join(BEST_FOLDER);
    if folder.is_file() {
        remove(&folder)?;
    }
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    let (unfinished, whole) = (folder.join("unfinished"), best_file(working, step));
    remove(&unfinished)?;
    // A file is replaced in one step.
    if whole.is_dir() {
        remove(&whole)?;
    }
    let digest = write_tensors(&unfinished, tensors, Part::Value)?;
    fs::rename(&unfinished, &whole).map_err(at(&whole))?;
    flush_folder(&folder)?;
    Ok(BestWeights { step, digest })
}

/// Puts the best step's values in the place of those of `tensors`, which are all that are trained, sorted by name.
///
/// # Errors
/// Fails if the file is not what was saved.
pub(super) fn load_best(working: &Path, best: &BestWeights, tensors: &mut [TrainedTensor]) -> Result<(), StateError> {
    let path = best_file(working, best.step);
    let saved = decode_values(&read_file(&path, Some(&best.digest))?, &path)?;
    let same = |(tensor, (name, shape, _)): (&TrainedTensor, &(String, Vec<usize>, Vec<f32>))| {
        tensor.name == *name && tensor.shape == *shape
    };
    if saved.len() != tensors.len() || !tensors.iter().zip(&saved).all(same) {
        return Err(StateError::Damaged { path, what: "it holds other tensors than are trained".to_owned() });
    }
    for (tensor, (_, _, value)) in tensors.iter_mut().zip(saved) {
        tensor.value = value;
    }
    Ok(())
}

/// The newest whole state under `working`, and why newer ones were passed over.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub(super) fn newest(working: &Path) -> Result<(Option<State>, Vec<StateError>), StateError> {
    let mut damaged = Vec::new();
    for (_, folder) in saved_steps(working)?.into_iter().rev() {
        match read(&folder) {
            Ok(state) => return Ok((Some(state), damaged)),
            Err(error) => damaged.push(error),
        }
    }
    Ok((None, damaged))
}

/// A saved step: where the run stood, and its folder.
pub(super) type SavedStep = (Progress, PathBuf);

/// As [`newest`], by its folder: its files are checked and not held in memory.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub(super) fn newest_whole(working: &Path) -> Result<(Option<SavedStep>, Vec<StateError>), StateError> {
    let mut damaged = Vec::new();
    for (_, folder) in saved_steps(working)?.into_iter().rev() {
        match check(&folder) {
            Ok(progress) => return Ok((Some((progress, folder)), damaged)),
            Err(error) => damaged.push(error),
        }
    }
    Ok((None, damaged))
}

/// How far the newest saved state is that can be read; its tensors are not looked at.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub(super) fn newest_progress(working: &Path) -> Result<Option<Progress>, StateError> {
    let mut saved = saved_steps(working)?.into_iter().rev();
    Ok(saved.find_map(|(_, folder)| read_state_file(&folder).ok()).map(|file| file.progress))
}

/// Removes every saved state, to start over.
///
/// # Errors
/// Fails if the disk refuses.
pub(super) fn clear(working: &Path) -> Result<(), StateError> {
    for (_, folder) in saved_steps(working)? {
        remove(&folder)?;
    }
    remove_unnamed_best(working)
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

fn best_file(working: &Path, step: u64) -> PathBuf {
    working.join(BEST_FOLDER).join(format!("step-{step}.safetensors"))
}

/// Removes the best weights that no saved step names. A step that cannot be read names none: it will be passed over.
fn remove_unnamed_best(working: &Path) -> Result<(), StateError> {
    let folder = working.join(BEST_FOLDER);
    if !folder.is_dir() {
        return remove(&folder);
    }
    let saved = saved_steps(working)?;
    let named = saved.iter().filter_map(|(_, step)| read_state_file(step).ok()?.progress.best_weights);
    let named: Vec<PathBuf> = named.map(|best| best_file(working, best.step)).collect();
    for entry in fs::read_dir(&folder).map_err(at(&folder))? {
        let path = entry.map_err(at(&folder))?.path();
        if !named.contains(&path) {
            remove(&path)?;
        }
    }
    Ok(())
}

/// Removes what lies at a path, if anything does: a folder as well as a file that nobody expects there.
fn remove(path: &Path) -> Result<(), StateError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    };
    removed.map_err(at(path))
}

fn read_state_file(folder: &Path) -> Result<StateFile, StateError> {
    let path = folder.join(STATE_FILE);
    let file: StateFile = serde_json::from_slice(&read_file(&path, None)?)
        .map_err(|error| StateError::Damaged { path: path.clone(), what: error.to_string() })?;
    match file.version {
        VERSION if file.digest != StateFile::digest_of(&file.progress, &file.files) => Err(changed(&path)),
        VERSION => Ok(file),
        other => Err(StateError::Damaged { path, what: format!("it is of version {other}, not {VERSION}") }),
    }
}

/// Checks every file of a saved step.
fn check(folder: &Path) -> Result<Progress, StateError> {
    let StateFile { progress, files, .. } = read_state_file(folder)?;
    for name in [VALUES_FILE, METRICS_FILE] {
        if !files.contains_key(name) {
            return Err(StateError::Damaged { path: folder.join(name), what: "it was not saved".to_owned() });
        }
    }
    for (name, digest) in &files {
        check_digest(&folder.join(name), digest)?;
    }
    if let (Some(best), Some(working)) = (&progress.best_weights, folder.parent()) {
        check_digest(&best_file(working, best.step), &best.digest)?;
    }
    Ok(progress)
}

fn read(folder: &Path) -> Result<State, StateError> {
    let file = read_state_file(folder)?;
    let content = |name: &str| {
        let path = folder.join(name);
        let Some(digest) = file.files.get(name) else {
            return Err(StateError::Damaged { path, what: "it was not saved".to_owned() });
        };
        read_file(&path, Some(digest))
    };
    let metrics = String::from_utf8(content(METRICS_FILE)?)
        .map_err(|error| StateError::Damaged { path: folder.join(METRICS_FILE), what: error.to_string() })?;
    if let (Some(best), Some(working)) = (&file.progress.best_weights, folder.parent()) {
        check_digest(&best_file(working, best.step), &best.digest)?;
    }
    let mut states: BTreeMap<String, BTreeMap<String, StateValues>> = BTreeMap::new();
    for file in file.files.keys().filter(|file| *file != VALUES_FILE) {
        let Some(set) = file.strip_suffix(TENSORS) else { continue };
        for (name, _, values) in decode(&content(file)?, &folder.join(file))? {
            states.entry(name).or_default().insert(set.to_owned(), values);
        }
    }
    let values = decode_values(&content(VALUES_FILE)?, &folder.join(VALUES_FILE))?;
    let tensors = values.into_iter().map(|(name, shape, value)| {
        let state = states.remove(&name).unwrap_or_default();
        TrainedTensor { name, shape, value, state }
    });
    Ok(State { tensors: tensors.collect(), progress: file.progress, metrics })
}

/// A file's bytes, which must be those of a digest where one is given.
fn read_file(path: &Path, digest: Option<&Digest>) -> Result<Vec<u8>, StateError> {
    let bytes = fs::read(path).map_err(at(path))?;
    match digest {
        Some(digest) if *digest != Digest::of(&bytes) => Err(changed(path)),
        _ => Ok(bytes),
    }
}

/// Checks a file without holding it in memory.
fn check_digest(path: &Path, digest: &Digest) -> Result<(), StateError> {
    match Digest::of_file(path) {
        Ok((found, _)) if found == *digest => Ok(()),
        Ok(_) => Err(changed(path)),
        Err(error) => Err(StateError::Damaged { path: path.to_owned(), what: error.to_string() }),
    }
}

fn changed(path: &Path) -> StateError {
    StateError::Damaged { path: path.to_owned(), what: "it is not what was saved".to_owned() }
}

/// Writes and flushes a file and returns its digest.
fn write(path: &Path, bytes: &[u8]) -> Result<Digest, StateError> {
    fs::write(path, bytes).map_err(at(path))?;
    flush(path)?;
    Ok(Digest::of(bytes))
}

fn flush(path: &Path) -> Result<(), StateError> {
    fs::File::open(path).and_then(|file| file.sync_all()).map_err(at(path))
}

fn flush_folder(path: &Path) -> Result<(), StateError> {
    fs::File::open(path).and_then(|folder| folder.sync_all()).map_err(at(path))
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { path, source }
}

#[cfg(test)]
mod tests;
