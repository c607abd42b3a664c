//! Folders that Hugging Face datasets saved, and files that git-LFS did not fetch.

use super::*;

/// An Arrow file of plain text, as `save_to_disk` writes it.
fn arrow(folder: &Path, name: &str, text: &str) -> PathBuf {
    let texts: ArrayRef = Arc::new(StringArray::from(vec![text]));
    let batch = RecordBatch::try_from_iter([("text", texts)]).unwrap();
    let mut writer = arrow::ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    write(folder, name, writer.into_inner().unwrap())
}

fn state(folder: &Path, files: &[&str]) -> PathBuf {
    let files: Vec<Value> = files.iter().map(|name| json!({"filename": name})).collect();
    write(folder, "state.json", json!({"_data_files": files, "_fingerprint": "0", "_split": null}).to_string())
}

#[test]
fn a_saved_dataset_is_the_arrow_files_of_its_state_in_their_order() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("saved");
    std::fs::create_dir(&saved).unwrap();
    let mut files = vec![
        arrow(&saved, "cache-0.arrow", "cached"),
        arrow(&saved, "data-0.arrow", "first"),
        arrow(&saved, "data-1.arrow", "second"),
        write(&saved, "dataset_info.json", json!({"features": {"text": {"dtype": "string"}}}).to_string()),
    ];
    let made = |files: &[PathBuf]| run(folder.path(), files, json!({}));
    assert_eq!(column(&made(&files).unwrap(), "text"), ["cached", "first", "second"], "it has no state");
    files.push(state(&saved, &["data-1.arrow", "data-0.arrow"]));
    assert_eq!(column(&made(&files).unwrap(), "text"), ["second", "first"]);
    files.insert(0, write(folder.path(), "a.jsonl", "{\"text\":\"beside\"}\n"));
    assert_eq!(column(&made(&files).unwrap(), "text"), ["beside", "second", "first"]);
    state(&saved, &["data-0.arrow", "data-2.arrow"]);
    let error = made(&files).unwrap_err();
    assert!(error.message.contains("state.json` lists `data-2.arrow`, which is not there"), "{error}");
}

#[test]
fn files_that_are_only_called_like_descriptions_are_rows() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["dataset_dict.json", "dataset_info.json", "state.json"];
    let files = names.map(|name| write(folder.path(), name, json!({"text": name}).to_string()));
    assert_eq!(column(&run(folder.path(), &files, json!({})).unwrap(), "text"), names);
}

#[test]
fn several_splits_of_a_saved_dataset_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = vec![write(folder.path(), "dataset_dict.json", json!({"splits": ["test", "train"]}).to_string())];
    for split in ["test", "train"] {
        let folder = folder.path().join(split);
        std::fs::create_dir(&folder).unwrap();
        files.extend([arrow(&folder, "data-0.arrow", split), state(&folder, &["data-0.arrow"])]);
    }
    let error = run(folder.path(), &files, json!({})).unwrap_err();
    assert!(error.message.contains("describes several splits, each in its folder: `test`, `train`"), "{error}");
    assert!(error.help.unwrap().ends_with(&format!("`source: {}/train`", folder.path().display())));
    assert_eq!(column(&run(folder.path(), &files[1..3], json!({})).unwrap(), "text"), ["test"]);
}

#[test]
fn a_git_lfs_pointer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let pointer = format!("version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 9\n", "a".repeat(64));
    let rows = write(folder.path(), "a.jsonl", "{\"text\":\"a\"}\n");
    for name in ["b.jsonl", "b.json", "b.parquet", "b.arrow", "b.jsonl.gz"] {
        let files = [rows.clone(), write(folder.path(), name, &pointer)];
        let error = run(folder.path(), &files, json!({})).unwrap_err();
        assert!(error.message.contains(&format!("{name}` is a git-LFS pointer")), "{error}");
        assert!(error.help.unwrap().contains("git lfs pull"));
    }
}
