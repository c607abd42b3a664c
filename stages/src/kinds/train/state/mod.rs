//! Working state: what an interrupted run continues from, exactly.
//!
//! Each saved step is a folder `step-<n>` with the trained tensors and, a file for each set of values, the optimizer's
//! state of them as safetensors under their PEFT or Hub names, the metrics up to that step, and `state.json`, which
//! holds the digests of the others and is what makes the folder count. A folder appears under its name only when it is
//! whole; one that is damaged later is noticed by its digests, and the one before it is used. Several ranks write a
//! set in shards, `<set>-00001-of-00002.safetensors`, each with some of the tensors; who reads them need not be as
//! many.
//!
//! The weights of the step with the lowest validation loss are beside them, as `best/step-<n>.safetensors`, or in
//! shards as well. A saved step names the best one of its time by its digest, so an older one stays until no saved step
//! names it.

mod tensors;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cache::Digest;
use engine::error::{Cause, StageError};
use model::ops::KernelError;
use model::trainer::LossScalerState;
use serde::{Deserialize, Serialize};

pub(super) use tensors::{read_tensors, sets, write_tensors};

use super::learner::TensorFiles;
use super::validation::Course;

/// Version of the form of a saved step.
const VERSION: u32 = 3;
/// The file that says what the others must be.
const STATE_FILE: &str = "state.json";
/// The metrics up to the saved step, one JSON object per line.
const METRICS_FILE: &str = "metrics.jsonl";
/// The set of the trained values.
pub(super) const VALUES: &str = "trainable";
/// The ending of files of tensors.
pub(super) const TENSORS: &str = ".safetensors";
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
    /// Steps done when it was last asked the tasks of `validation_tasks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<u64>,
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
            tasks: None,
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
    /// Digest of their file; of several, digest of theirs in order.
    pub digest: Digest,
    /// Files that they are in.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub shards: usize,
}

fn one() -> usize {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(shards: &usize) -> bool {
    *shards == 1
}

impl BestWeights {
    /// Their files, which are what was saved.
    ///
    /// # Errors
    /// Fails where one is not.
    pub(super) fn files(&self, working: &Path) -> Result<Vec<PathBuf>, StateError> {
        let files = self.names(working);
        match digest_of_shards(&files)? {
            digest if digest == self.digest => Ok(files),
            _ => Err(changed(&files[0])),
        }
    }

    /// Their files, as they are named.
    fn names(&self, working: &Path) -> Vec<PathBuf> {
        let name = |shard| match self.shards {
            1 => format!("step-{}{TENSORS}", self.step),
            shards => format!("step-{}-{shard:05}-of-{shards:05}{TENSORS}", self.step),
        };
        (1..=self.shards).map(|shard| working.join(BEST_FOLDER).join(name(shard))).collect()
    }
}

/// A saved run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Saved {
    /// Where it stood.
    pub progress: Progress,
    /// The metrics so far.
    pub metrics: String,
    /// The trained tensors and their state.
    pub files: TensorFiles,
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
    #[error("cannot read the trainable parameters")]
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

/// A failure of the stage.
pub(super) fn failure(error: StateError) -> StageError {
    StageError::new(Cause::Machine, "cannot keep the state of training").with_source(error)
}

/// A state that is about to be saved: a folder for its tensors, which counts once it is whole.
pub(super) struct StateDraft {
    working: PathBuf,
    folder: PathBuf,
}

impl StateDraft {
    /// Makes the folder.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn begin(working: &Path) -> Result<Self, StateError> {
        let folder = fresh_folder(working)?;
        Ok(Self { working: working.to_owned(), folder })
    }

    /// Where the tensors are to be written, flushed.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Ends a state whose tensors are in these files of the folder, and removes all but the `keep` newest up to it:
    /// later ones, which were damaged or passed over, are no part of this run.
    ///
    /// # Errors
    /// Fails if the disk refuses; no half-written state is left to be taken for a whole one.
    pub(super) fn finish(
        self,
        progress: &Progress,
        metrics: &str,
        tensors: Vec<String>,
        keep: usize,
    ) -> Result<(), StateError> {
        let Self { working, folder } = self;
        let mut files = BTreeMap::new();
        for file in tensors {
            let digest = digest_of(&folder.join(&file))?;
            files.insert(file, digest);
        }
        files.insert(METRICS_FILE.to_owned(), write(&folder.join(METRICS_FILE), metrics.as_bytes())?);
        let text = serde_json::to_vec_pretty(&StateFile::new(progress.clone(), files))
            .expect("numbers, strings and digests always have a JSON form");
        write(&folder.join(STATE_FILE), &text)?;
        flush_folder(&folder)?;

        let whole = working.join(format!("step-{}", progress.step));
        remove(&whole)?;
        fs::rename(&folder, &whole).map_err(at(&whole))?;
        flush_folder(&working)?;
        // The store has made the folder, and not flushed its name.
        working.parent().map_or(Ok(()), flush_folder)?;
        let (until_now, later): (Vec<_>, Vec<_>) =
            saved_steps(&working)?.into_iter().rev().partition(|(step, _)| *step <= progress.step);
        for (_, folder) in until_now.into_iter().skip(keep).chain(later) {
            remove(&folder)?;
        }
        remove_unnamed_best(&working)
    }
}

/// The weights of the best step, which are about to be saved.
pub(super) struct BestDraft {
    working: PathBuf,
    folder: PathBuf,
}

impl BestDraft {
    /// Makes a folder for them.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn begin(working: &Path) -> Result<Self, StateError> {
        let best = working.join(BEST_FOLDER);
        if best.is_file() {
            remove(&best)?;
        }
        let folder = fresh_folder(&best)?;
        Ok(Self { working: working.to_owned(), folder })
    }

    /// Where they are to be written, flushed.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Puts the files of the folder into their place as those of a step.
    ///
    /// # Errors
    /// Fails if the disk refuses; each file is there whole or not at all.
    pub(super) fn finish(self, step: u64, mut files: Vec<String>) -> Result<BestWeights, StateError> {
        let Self { working, folder } = self;
        files.sort();
        let written: Vec<PathBuf> = files.iter().map(|file| folder.join(file)).collect();
        let best = BestWeights { step, digest: digest_of_shards(&written)?, shards: written.len() };
        for (from, to) in written.iter().zip(best.names(&working)) {
            // A file is replaced in one step.
            if to.is_dir() {
                remove(&to)?;
            }
            fs::rename(from, &to).map_err(at(&to))?;
        }
        remove(&folder)?;
        flush_folder(&working.join(BEST_FOLDER))?;
        Ok(best)
    }
}

/// An empty folder for what is not finished, within another.
fn fresh_folder(within: &Path) -> Result<PathBuf, StateError> {
    let folder = within.join("unfinished");
    remove(&folder)?;
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    Ok(folder)
}

/// The newest whole state under `working`, and why newer ones were passed over. Tensors are checked and not held in
/// memory.
///
/// # Errors
/// Fails if the folder cannot be listed.
pub(super) fn newest(working: &Path) -> Result<(Option<Saved>, Vec<StateError>), StateError> {
    let mut damaged = Vec::new();
    for (_, folder) in saved_steps(working)?.into_iter().rev() {
        match read(&folder) {
            Ok(state) => return Ok((Some(state), damaged)),
            Err(error) => damaged.push(error),
        }
    }
    Ok((None, damaged))
}

/// The files of the trained values of a saved step.
///
/// # Errors
/// Fails where the step is not saved.
pub(super) fn values_of_step(working: &Path, step: u64) -> Result<Vec<PathBuf>, StateError> {
    let folder = working.join(format!("step-{step}"));
    let file = read_state_file(&folder)?;
    Ok(tensor_files(&folder, &file.files).remove(VALUES).unwrap_or_default())
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

/// Removes the best weights that no saved step names. A step that cannot be read names none: it will be passed over.
fn remove_unnamed_best(working: &Path) -> Result<(), StateError> {
    let folder = working.join(BEST_FOLDER);
    if !folder.is_dir() {
        return remove(&folder);
    }
    let saved = saved_steps(working)?;
    let named = saved.iter().filter_map(|(_, step)| read_state_file(step).ok()?.progress.best_weights);
    let named: Vec<PathBuf> = named.flat_map(|best| best.names(working)).collect();
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

/// Reads a saved step, and checks every file of it.
fn read(folder: &Path) -> Result<Saved, StateError> {
    let StateFile { progress, files: digests, .. } = read_state_file(folder)?;
    let missing = |name: &str| StateError::Damaged { path: folder.join(name), what: "it was not saved".to_owned() };
    let path = folder.join(METRICS_FILE);
    let metrics = read_file(&path, Some(digests.get(METRICS_FILE).ok_or_else(|| missing(METRICS_FILE))?))?;
    let metrics = String::from_utf8(metrics).map_err(|error| StateError::Damaged { path, what: error.to_string() })?;
    for (name, digest) in &digests {
        let path = folder.join(name);
        if digest_of(&path)? != *digest {
            return Err(changed(&path));
        }
    }
    let files = tensor_files(folder, &digests);
    if !files.contains_key(VALUES) {
        return Err(missing(VALUES));
    }
    if let (Some(best), Some(working)) = (&progress.best_weights, folder.parent()) {
        best.files(working)?;
    }
    Ok(Saved { progress, metrics, files })
}

/// The files of tensors among those of a saved step.
fn tensor_files(folder: &Path, digests: &BTreeMap<String, Digest>) -> TensorFiles {
    let mut files = TensorFiles::new();
    for name in digests.keys() {
        let Some(stem) = name.strip_suffix(TENSORS) else { continue };
        files.entry(without_shard(stem).to_owned()).or_default().push(folder.join(name));
    }
    files
}

/// The set that a file holds a shard of: the name without `-00001-of-00002`.
fn without_shard(stem: &str) -> &str {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = stem.rsplit_once("-of-").and_then(|(rest, of)| Some((rest.rsplit_once('-')?, of)));
    match parts {
        Some(((set, shard), of)) if is_number(shard) && is_number(of) => set,
        _ => stem,
    }
}

/// A file's bytes, which must be those of a digest where one is given.
fn read_file(path: &Path, digest: Option<&Digest>) -> Result<Vec<u8>, StateError> {
    let bytes = fs::read(path).map_err(at(path))?;
    match digest {
        Some(digest) if *digest != Digest::of(&bytes) => Err(changed(path)),
        _ => Ok(bytes),
    }
}

/// The digest of a file, which is not held in memory.
fn digest_of(path: &Path) -> Result<Digest, StateError> {
    let found = Digest::of_file(path);
    found
        .map(|(digest, _)| digest)
        .map_err(|error| StateError::Damaged { path: path.to_owned(), what: error.to_string() })
}

/// The digest of a file, or of those of several.
fn digest_of_shards(files: &[PathBuf]) -> Result<Digest, StateError> {
    let digests: Vec<Digest> = files.iter().map(|file| digest_of(file)).collect::<Result<_, _>>()?;
    match digests[..] {
        [only] => Ok(only),
        _ => Ok(Digest::of(digests.iter().map(Digest::to_string).collect::<Vec<_>>().join("\n").as_bytes())),
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
