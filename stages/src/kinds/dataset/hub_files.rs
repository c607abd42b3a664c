//! A dataset on the Hub: which commit it is at, and fetching its files.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::pin::Pinned;
use engine::stage::PinRequest;

use super::form::SourceFile;
use super::hub_card::{self, Configuration};
use super::hub_splits::{self, is_data};
use crate::hub::{Hub, HubError, Progress, RemoteFile, Repository, Snapshot};

/// The commit of a dataset. A dataset that is made by a script has no data files on `main`; the Hub's conversion of it
/// is taken instead.
pub(crate) fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
    let repository = Repository::of_pin(&request.kind, &request.name)
        .map_err(|error| StageError::new(Cause::BadParameters, error.to_string()))?;
    let service = repository.service();
    let failed = |error: HubError| error.of(service);
    let hub = Hub::from_environment(service, request.token_env.as_deref()).map_err(failed)?;
    let commit = hub.resolve_revision(&repository, &request.revision).map_err(failed)?;
    let converted = service.converted_revision().filter(|_| request.revision == service.default_revision());
    let Some(converted) = converted else { return hub.pin_commit(&repository, commit).map_err(failed) };
    let files = hub.list_files(&repository.at(&commit)).map_err(failed)?;
    let script = script(&repository, &files);
    if script.is_none() && files.iter().any(|file| is_data(&file.path)) {
        return hub.pin_commit(&repository, commit).map_err(failed);
    }
    match (hub.resolve_revision(&repository, converted), script) {
        (Ok(converted), _) => hub.pin_commit(&repository, converted).map_err(failed),
        (Err(_), Some(script)) => Err(made_by(&repository, &script)),
        // The run says that there are no files.
        (Err(_), None) => Ok(Pinned::commit(commit)),
    }
}

/// The script that makes the dataset, where one does: beside Parquet files it is a remnant.
fn script(repository: &Repository, files: &[RemoteFile]) -> Option<String> {
    let name = repository.name().rsplit('/').next().unwrap_or_default();
    let script = format!("{name}.py");
    let there = files.iter().any(|file| file.path == script);
    let has_parquet = files.iter().any(|file| file.path.ends_with(".parquet"));
    (there && !has_parquet).then_some(script)
}

fn made_by(repository: &Repository, script: &str) -> StageError {
    let name = repository.name();
    StageError::bad_data(format!("`{name}` is made by a script, `{script}`, and the Hub has no conversion of it to Parquet")).with_help(
        "scripts of others are not run here; write it as Parquet once with `datasets` before version 4 (`load_dataset(..., \
         trust_remote_code=True)[\"train\"].to_parquet(\"train.parquet\")`) and give the path of the file",
    )
}

/// Files that were fetched.
pub(crate) struct Fetched {
    /// Those of each split that was asked for.
    pub splits: BTreeMap<String, Vec<SourceFile>>,
    /// The key under which JSON files hold the rows, where the README names one.
    pub field: Option<String>,
}

/// Fetches the files of some splits of a pinned dataset, of one configuration of it.
pub(crate) fn fetch(
    request: &PinRequest,
    config: Option<&str>,
    splits: &[&str],
    context: &mut StageContext,
) -> Result<Fetched, StageError> {
    let repository = &Repository::of_pin(&request.kind, &request.name)
        .map_err(|error| StageError::new(Cause::BadParameters, error.to_string()))?;
    let pin = format!("{}:{}@{}", request.kind, request.name, request.revision);
    let pinned = context.pin(&pin).cloned();
    let pinned = pinned.ok_or_else(|| StageError::internal(format!("the job does not say which commit `{pin}` is")))?;
    let snapshot = repository.at(&pinned.commit);
    let failed = |error: HubError| error.of(repository.service());
    let hub = Hub::from_environment(repository.service(), request.token_env.as_deref()).map_err(failed)?;
    let hub = hub.with_network(context.network());
    let listed = hub.pinned_files(repository, &pinned).map_err(failed)?;
    if let Some(script) = script(repository, &listed) {
        return Err(made_by(repository, &script));
    }
    let declared = declared(&hub, &snapshot, &listed, context)?;
    let configuration = hub_splits::configuration(&declared, config)?;
    let data: Vec<&RemoteFile> = listed.iter().filter(|file| is_data(&file.path)).collect();
    let paths: Vec<&str> = data.iter().map(|file| file.path.as_str()).collect();
    let splits = hub_splits::choose(&paths, configuration, config, splits)?;
    warn_of_what_is_not_acted_upon(configuration, &splits, context);

    let wanted = |file: &&&RemoteFile| splits.values().any(|paths| paths.contains(&file.path));
    let wanted: Vec<RemoteFile> = data.iter().filter(wanted).map(|file| (**file).clone()).collect();
    let folder = download(&hub, &snapshot, &wanted, context)?;
    let source_file = |path: &String| {
        SourceFile::new(folder.join(path), path.clone()).expect("a data file has a form that can be read")
    };
    let files = |paths: Vec<String>| paths.iter().map(source_file).collect();
    let splits = splits.into_iter().map(|(name, paths)| (name, files(paths))).collect();
    Ok(Fetched { splits, field: configuration.and_then(|configuration| configuration.field.clone()) })
}

/// The largest README that is read for what it declares.
const LARGEST_README: u64 = 16 << 20;

/// The configurations that the README declares.
fn declared(
    hub: &Hub,
    snapshot: &Snapshot,
    listed: &[RemoteFile],
    context: &mut StageContext,
) -> Result<Vec<Configuration>, StageError> {
    let Some(readme) = listed.iter().find(|file| file.path == "README.md") else { return Ok(Vec::new()) };
    if readme.size > LARGEST_README {
        let size = readme.size;
        return Err(StageError::bad_data(format!("the README.md of the data set has {size} bytes and is not read")));
    }
    let folder = download(hub, snapshot, std::slice::from_ref(readme), context)?;
    let text =
        fs::read(folder.join(&readme.path)).or_fail(Cause::Machine, || "cannot read the README.md".to_owned())?;
    hub_card::configurations(&String::from_utf8_lossy(&text))
}

fn warn_of_what_is_not_acted_upon(
    configuration: Option<&Configuration>,
    splits: &hub_splits::Splits,
    context: &mut StageContext,
) {
    if let Some(Configuration { name, other, .. }) = configuration
        && !other.is_empty()
    {
        let other: Vec<String> = other.iter().map(|key| format!("`{key}`")).collect();
        context
            .warn(format!("the dataset's configuration `{name}` sets {}, which is not acted upon", other.join(", ")));
    }
    let is_partial = |path: &&String| path.split('/').any(|part| part.starts_with("partial-"));
    if let Some(path) = splits.values().flatten().find(is_partial) {
        context.warn(format!("the Hub has converted only the beginning of this dataset (`{path}`)"));
    }
}

fn download(
    hub: &Hub,
    snapshot: &Snapshot,
    files: &[RemoteFile],
    context: &mut StageContext,
) -> Result<PathBuf, StageError> {
    let working = context.working().to_owned();
    let note = format!("{} files of {}", files.len(), snapshot.repository.name());
    let mut observe = |progress: Progress| {
        context.progress("bytes", progress.done, Some(progress.total), Some(note.clone()));
        if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let service = snapshot.repository.service();
    hub.download(snapshot, files, Path::new(&working), &mut observe).map_err(|error| error.of(service))
}
