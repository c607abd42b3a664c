//! What the pods of a pipeline read from the machine that exports it: the file, those it includes, sources and pins, in
//! a ConfigMap.
//!
//! They keep their places to one another, since paths in a pipeline file are relative to it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use cache::StatCache;
use engine::home::Home;
use engine::keys::read_outside;
use engine::lock_file::LockFile;
use engine::plan::{Plan, Rejected};
use engine::stage::Outside;
use serde_json::{Map, Value, json};

use super::arguments::{ClusterArgs, POD};
use super::names::Names;
use crate::render::{Failure, Message};
use crate::words;

/// The most that a ConfigMap holds.
const MOST_BYTES: u64 = 1 << 20;

/// The folder of a ConfigMap that holds everything: beside it lie the links that Kubernetes replaces a ConfigMap by,
/// which a glob over the pipeline's own folder must not find.
const WHOLE: &str = "job";

/// The longest key of a ConfigMap.
const LONGEST_KEY: usize = 253;

/// What the pods read.
pub(super) struct Files {
    /// The pipeline file, as pods name it.
    pub pipeline: String,
    /// What a ConfigMap brings, by path below [`WHOLE`]; nothing where the image has it.
    brought: BTreeMap<String, File>,
}

struct File {
    content: Vec<u8>,
    executable: bool,
}

impl Files {
    /// Those of a folder that the image, or a volume, has.
    pub(super) fn of_the_image(folder: &Path, file: &Path) -> Self {
        let pipeline = folder.join(file.file_name().unwrap_or_default()).display().to_string();
        Self { pipeline, brought: BTreeMap::new() }
    }

    /// The data of the ConfigMap, and the paths that its entries are to have; `None` where none is needed.
    pub(super) fn config_map(&self) -> Option<(Value, Value)> {
        if self.brought.is_empty() {
            return None;
        }
        let mut keys = Names::new(LONGEST_KEY, &[]);
        let (mut data, mut binary, mut items) = (Map::new(), Map::new(), Vec::new());
        for (path, file) in &self.brought {
            let key = keys.label(path);
            match std::str::from_utf8(&file.content) {
                Ok(text) => drop(data.insert(key.clone(), text.into())),
                Err(_) => drop(binary.insert(key.clone(), base64(&file.content).into())),
            }
            let mut item = json!({ "key": key, "path": format!("{WHOLE}/{path}") });
            if file.executable {
                item["mode"] = 0o555.into();
            }
            items.push(item);
        }
        let mut content = json!({ "data": data });
        if !binary.is_empty() {
            content["binaryData"] = binary.into();
        }
        Some((content, items.into()))
    }
}

/// Finds and reads them all.
///
/// # Errors
/// Fails where a source is missing or cannot be read; what pods could not be given is added to `problems`.
pub(super) fn collect(
    plan: &Plan,
    args: &ClusterArgs,
    home: &Home,
    problems: &mut Vec<Message>,
) -> Result<Files, Failure> {
    let lock = LockFile::read(&home.lock_file())?;
    let mut known = StatCache::load(&home.stat_cache());
    let outside = match read_outside(plan, &mut known, &lock) {
        Ok(outside) => outside,
        Err(problems) => return Err(Rejected::new(plan.sources.clone(), problems).into()),
    };
    let unpinned: Vec<&str> =
        outside.iter().flat_map(|of_stage| &of_stage.unpinned).map(|request| request.name.as_str()).collect();
    if !unpinned.is_empty() {
        let text = format!("not pinned: {}; each pod could find another version", unpinned.join(", "));
        problems.push(Message::chain(&[text], Some(format!("`pipeline lock {}` pins them", args.file.display()))));
    }
    problems.extend(absolute(plan, args));
    let pipeline = plain(&args.file);
    let sources =
        outside.iter().flat_map(|of_stage| of_stage.files.values().flatten()).map(|grant| grant.path.as_path());
    let included = plan.sources.all().filter(|source| source.folder.is_some()).map(|source| Path::new(&source.name));
    let mut paths: Vec<PathBuf> = sources.chain(included).map(plain).filter(|path| !args.is_mounted(path)).collect();
    paths.push(pipeline.clone());
    paths.sort();
    paths.dedup();
    let root = common_folder(&paths);
    let below = |path: &Path| path.strip_prefix(&root).unwrap_or(path).display().to_string();
    if let Some(text) = too_large(&paths, &below)? {
        let help = "put the folder into the image or on a volume and name it with `--folder`, or keep large sources on a volume (`--volume`) \
                    or on the Hub";
        problems.push(Message::chain(&[text], Some(help.to_owned())));
        return Ok(Files { pipeline: String::new(), brought: BTreeMap::new() });
    }
    let mut brought = BTreeMap::new();
    for path in &paths {
        brought.insert(below(path), read(path)?);
    }
    // In a pod no folder above the file is that of a project, so the pins are next to it.
    if outside.iter().any(|of_stage| !of_stage.pins.is_empty()) {
        let beside = pipeline.with_file_name("pipeline.lock");
        brought.insert(below(&beside), read(&home.lock_file())?);
    }
    Ok(Files { pipeline: format!("{POD}/files/{WHOLE}/{}", below(&pipeline)), brought })
}

/// Sources that a pod does not have under the name that the file gives them.
fn absolute(plan: &Plan, args: &ClusterArgs) -> Vec<Message> {
    let outside =
        plan.stages.iter().flat_map(|stage| stage.bound.outside().into_iter().map(move |outside| (stage, outside)));
    let message = |(stage, outside): (&engine::plan::PlannedStage, Outside)| match outside {
        Outside::Files { pattern, .. }
            if Path::new(&pattern).is_absolute() && !args.is_mounted(Path::new(&pattern)) =>
        {
            let place = crate::run::place(plan, &stage.id);
            let text = format!("stage `{}` reads `{pattern}`, an absolute path that pods do not have{place}", stage.id);
            let folder = Path::new(&pattern).parent().unwrap_or(Path::new("/")).display().to_string();
            let help =
                format!("write it relative to the pipeline file, or mount its volume: `--volume CLAIM={folder}`");
            Some(Message::chain(&[text], Some(help)))
        }
        _ => None,
    };
    outside.filter_map(message).collect()
}

/// A path without `.` and `..`, absolute.
fn plain(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

/// The deepest folder that holds all of them.
fn common_folder(paths: &[PathBuf]) -> PathBuf {
    let mut folders = paths.iter().filter_map(|path| path.parent());
    let mut common = folders.next().unwrap_or(Path::new("/")).to_owned();
    for folder in folders {
        while !folder.starts_with(&common) && common.pop() {}
    }
    common
}

fn too_large(paths: &[PathBuf], below: &dyn Fn(&Path) -> String) -> Result<Option<String>, Failure> {
    let mut sizes = Vec::with_capacity(paths.len());
    for path in paths {
        sizes.push((fs::metadata(path)?.len(), path));
    }
    let whole: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
    if whole < MOST_BYTES {
        return Ok(None);
    }
    sizes.sort_by(|a, b| b.cmp(a));
    let largest = sizes.iter().take(3).map(|(bytes, path)| format!("{} ({})", below(path), words::bytes(*bytes)));
    let largest = largest.collect::<Vec<_>>().join(", ");
    let whole = words::bytes(whole);
    Ok(Some(format!("the files of the pods have {whole}, and a ConfigMap has less than 1 MiB; the largest: {largest}")))
}

fn read(path: &Path) -> Result<File, Failure> {
    let unreadable =
        |error: std::io::Error| Failure::machine(error).with_help(format!("while reading `{}`", path.display()));
    let executable = fs::metadata(path).map_err(unreadable)?.permissions().mode() & 0o111 != 0;
    Ok(File { content: fs::read(path).map_err(unreadable)?, executable })
}

/// RFC 4648, with padding, as Kubernetes takes bytes.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * at)) as usize & 63];
            out.push(if at <= group.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_as_the_standard_has_them() {
        let cases =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("fooba", "Zm9vYmE=")];
        for (bytes, text) in cases {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }

    #[test]
    fn files_keep_their_places_to_one_another() {
        let paths = ["/a/b/job.yaml", "/a/b/data/rows.jsonl", "/a/common/data.yaml"].map(PathBuf::from);
        assert_eq!(common_folder(&paths), Path::new("/a"));
        assert_eq!(common_folder(&paths[..1]), Path::new("/a/b"));
        assert_eq!(common_folder(&["/x/y", "/z/y"].map(PathBuf::from)), Path::new("/"));
        assert_eq!(plain(Path::new("/a/./b/../c")), Path::new("/a/c"));
    }
}
