//! What is saved comes back whole or not at all.

use model::optimizer::StateValues;
use model::trainer::TrainedTensor;

use super::*;

/// A saved run with its tensors.
#[derive(Debug, Clone, PartialEq)]
struct State {
    progress: Progress,
    tensors: Vec<TrainedTensor>,
    metrics: String,
}

fn save(working: &Path, state: &State, keep: usize) -> Result<(), StateError> {
    let draft = StateDraft::begin(working)?;
    let write = |set: String| {
        let file = format!("{set}{TENSORS}");
        write_tensors(&draft.folder().join(&file), &state.tensors, &set).unwrap();
        file
    };
    let files = sets(&state.tensors).into_iter().map(write).collect();
    draft.finish(&state.progress, &state.metrics, files, keep)
}

fn save_best(working: &Path, step: u64, tensors: &[TrainedTensor]) -> Result<BestWeights, StateError> {
    let draft = BestDraft::begin(working)?;
    write_tensors(&draft.folder().join("trainable.safetensors"), tensors, VALUES)?;
    draft.finish(step, vec!["trainable.safetensors".to_owned()])
}

fn best_file(working: &Path, step: u64) -> PathBuf {
    working.join(format!("best/step-{step}.safetensors"))
}

/// The newest state, with its tensors read.
fn newest(working: &Path) -> Result<(Option<State>, Vec<StateError>), StateError> {
    let (saved, damaged) = super::newest(working)?;
    let read = |Saved { progress, metrics, files }| {
        let tensors = read_tensors(&files).unwrap();
        State { progress, tensors, metrics }
    };
    Ok((saved.map(read), damaged))
}

fn state(step: u64) -> State {
    let tensor = |name: &str| TrainedTensor {
        name: name.to_owned(),
        shape: vec![2, 1],
        value: vec![step as f32, -0.5],
        state: [("exp_avg", [0.25, 1e-9]), ("exp_avg_sq", [1e-30, 0.0])]
            .map(|(set, values)| (set.to_owned(), StateValues::F32(values.to_vec())))
            .into(),
    };
    State {
        progress: Progress {
            step,
            optimizer_steps: step,
            target_tokens: 10 * step,
            tasks: Some(step),
            ..Progress::fresh(9, "cpu".to_owned())
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
        save(folder.path(), &state(step), 2).unwrap();
    }
    assert_eq!(newest(folder.path()).unwrap().0, Some(state(15)));
    assert!(!folder.path().join("step-5").exists() && folder.path().join("step-10").exists());
    clear(folder.path()).unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, None);
}

#[test]
fn a_damaged_state_is_noticed_and_the_one_before_it_used() {
    for (file, damage) in [("exp_avg.safetensors", 40), (STATE_FILE, 3), (METRICS_FILE, 2)] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), &state(1), 2).unwrap();
        save(folder.path(), &state(2), 2).unwrap();
        let path = folder.path().join("step-2").join(file);
        let mut bytes = fs::read(&path).unwrap();
        bytes[damage] ^= 1;
        fs::write(&path, bytes).unwrap();
        let (found, damaged) = newest(folder.path()).unwrap();
        assert_eq!((found, damaged.len()), (Some(state(1)), 1), "{file}");
    }
}

#[test]
fn a_flipped_digit_of_the_progress_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &state(1), 2).unwrap();
    save(folder.path(), &state(2), 2).unwrap();
    let path = folder.path().join("step-2").join(STATE_FILE);
    let text = fs::read_to_string(&path).unwrap();
    let flipped = text.replace("\"target_tokens\": 20", "\"target_tokens\": 21");
    assert_ne!(text, flipped);
    fs::write(&path, flipped).unwrap();
    let (found, damaged) = newest(folder.path()).unwrap();
    assert_eq!((found, damaged.len()), (Some(state(1)), 1));
    assert!(damaged[0].to_string().contains("not what was saved"), "{}", damaged[0]);
}

#[test]
fn junk_in_the_folder_is_passed_over_and_goes() {
    let folder = tempfile::tempdir().unwrap();
    let junk = |name: &str| fs::write(folder.path().join(name), "junk").unwrap();
    save(folder.path(), &state(1), 2).unwrap();
    ["step-0", "step-2", "step-3", "unfinished", BEST_FOLDER].into_iter().for_each(junk);
    let (found, damaged) = newest(folder.path()).unwrap();
    assert_eq!((found, damaged.len()), (Some(state(1)), 2));
    let best = save_best(folder.path(), 2, &state(2).tensors).unwrap();
    assert_eq!(best.step, 2);
    save(folder.path(), &state(2), 1).unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, Some(state(2)));
    assert_eq!(saved_steps(folder.path()).unwrap().len(), 1);
    // And folders where files should be.
    fs::create_dir_all(folder.path().join("best/unfinished/deep")).unwrap();
    fs::create_dir_all(folder.path().join("best/step-4.safetensors/deep")).unwrap();
    save_best(folder.path(), 4, &state(4).tensors).unwrap();
    junk("step-7");
    clear(folder.path()).unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, None);
}

#[test]
fn a_half_written_state_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), &state(1), 2).unwrap();
    fs::create_dir(folder.path().join("unfinished")).unwrap();
    fs::write(folder.path().join("unfinished/state.json"), "{").unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, Some(state(1)));
    save(folder.path(), &state(2), 2).unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, Some(state(2)));
}

#[test]
fn a_state_that_was_passed_over_does_not_push_out_the_good_ones() {
    let folder = tempfile::tempdir().unwrap();
    for step in [10, 20, 30] {
        save(folder.path(), &state(step), 2).unwrap();
    }
    for step in [20, 30] {
        fs::write(folder.path().join(format!("step-{step}")).join(METRICS_FILE), "gone").unwrap();
    }
    save(folder.path(), &state(12), 2).unwrap();
    let (found, damaged) = newest(folder.path()).unwrap();
    assert_eq!((found, damaged.len()), (Some(state(12)), 0));
}

#[test]
fn an_optimizer_without_moments_has_none_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut with_momentum = state(3);
    with_momentum.tensors.iter_mut().for_each(|tensor| drop(tensor.state.remove("exp_avg_sq")));
    save(folder.path(), &with_momentum, 2).unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, Some(with_momentum.clone()));
    with_momentum.tensors.iter_mut().for_each(|tensor| tensor.state.clear());
    save(folder.path(), &with_momentum, 2).unwrap();
    assert_eq!(newest(folder.path()).unwrap().0, Some(with_momentum));
}

/// A state that names the best weights of a step.
fn state_with_best(working: &Path, step: u64, best: u64) -> State {
    let mut state = state(step);
    state.progress.best_weights = Some(save_best(working, best, &self::state(best).tensors).unwrap());
    state
}

#[test]
fn the_best_weights_stay_as_long_as_a_saved_step_names_them() {
    let folder = tempfile::tempdir().unwrap();
    let working = folder.path();
    let there = |step: u64| best_file(working, step).exists();
    save(working, &state_with_best(working, 10, 7), 2).unwrap();
    save(working, &state_with_best(working, 20, 16), 2).unwrap();
    assert!(there(7) && there(16));
    // One that no saved step names yet: its step was not saved before the process died.
    save_best(working, 23, &state(23).tensors).unwrap();
    save(working, &state_with_best(working, 30, 16), 2).unwrap();
    assert!(!there(7) && there(16) && !there(23));
    let saved = newest(working).unwrap().0.unwrap();
    let files = saved.progress.best_weights.unwrap().files(working).unwrap();
    let tensors = read_tensors(&[(VALUES.to_owned(), files)].into()).unwrap();
    assert_eq!(tensors[0].value, [16.0, -0.5]);
    clear(working).unwrap();
    assert!(!there(16));
}

#[test]
fn a_step_whose_best_weights_are_damaged_or_gone_is_passed_over() {
    for gone in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let working = folder.path();
        save(working, &state_with_best(working, 10, 7), 2).unwrap();
        save(working, &state_with_best(working, 20, 16), 2).unwrap();
        let path = best_file(working, 16);
        let mut bytes = fs::read(&path).unwrap();
        bytes[90] ^= 1;
        if gone {
            fs::remove_file(&path).unwrap()
        } else {
            fs::write(&path, bytes).unwrap()
        }
        let (found, damaged) = newest(working).unwrap();
        assert_eq!((found.unwrap().progress.step, damaged.len()), (10, 1), "gone: {gone}");
    }
}

#[test]
fn shards_are_read_together_and_each_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (working, expected) = (folder.path(), state(4));
    let shards = |draft: &Path, set: &str| -> Vec<String> {
        let shard = |(index, tensor)| {
            let file = format!("{set}-{:05}-of-00002{TENSORS}", index + 1);
            write_tensors(&draft.join(&file), std::slice::from_ref(tensor), set).unwrap();
            file
        };
        expected.tensors.iter().enumerate().map(shard).collect()
    };
    let best = BestDraft::begin(working).unwrap();
    let files = shards(best.folder(), VALUES);
    let best = best.finish(3, files).unwrap();
    assert_eq!(best.files(working).unwrap().len(), 2);
    let draft = StateDraft::begin(working).unwrap();
    let files = sets(&expected.tensors).iter().flat_map(|set| shards(draft.folder(), set)).collect();
    let progress = Progress { best_weights: Some(best), ..expected.progress.clone() };
    draft.finish(&progress, &expected.metrics, files, 2).unwrap();
    let found = newest(working).unwrap().0.unwrap();
    assert_eq!((&found.tensors, found.progress), (&expected.tensors, progress));
    assert_eq!(values_of_step(working, 4).unwrap().len(), 2);
    fs::write(working.join("best/step-3-00002-of-00002.safetensors"), "gone").unwrap();
    assert_eq!(newest(working).unwrap().0, None);
}
