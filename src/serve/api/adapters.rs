//! `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them.

use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use engine::error::StageError;
use http_server::{Response, StatusCode};
use serde_json::json;
use stages::compute::inference::{AdapterWeights, facts_of_adapter, read_adapter};
use tokio::sync::oneshot;

use super::Api;
use super::error::ApiError;
use super::fields::Fields;
use crate::serve::worker::Order;

const NAME: &str = "lora_name";
const PATH: &str = "lora_path";

/// Loads an adapter from a folder inside of those that are allowed, under a name that no model has.
pub(super) async fn load(api: &Api, body: &[u8]) -> Result<Response, ApiError> {
    let mut fields = Fields::of(body)?;
    let name = name(&mut fields)?;
    let path = fields.string(PATH)?.ok_or_else(|| ApiError::field(PATH, format!("`{PATH}` is missing")))?;
    fields.finish()?;
    let folder = allowed(Path::new(&path), &api.adapter_folders).ok_or_else(|| {
        let message = format!("`{PATH}` is no folder inside of those of `--adapter-folder`, all links resolved");
        ApiError::field(PATH, message)
    })?;
    let taken = || ApiError::field(NAME, format!("`{NAME}` is `{name}`, which is loaded"));
    if api.vocabulary.model(&name).is_some() {
        return Err(taken());
    }
    let wrong = |error: &dyn std::error::Error| {
        let source = error.source().map(|source| format!(": {source}")).unwrap_or_default();
        ApiError::unprocessable(PATH, format!("the adapter cannot be loaded: {error}{source}"))
    };
    let facts = facts_of_adapter(&folder);
    let adapter = tokio::task::block_in_place(|| read_adapter(&folder, &facts, api.vocabulary.facts()));
    let adapter = adapter.map_err(|error| wrong(&error))?;
    let number = api.load(adapter).await?.map_err(|error| wrong(&error))?;
    let named = api.vocabulary.named(&name, number, &facts).map_err(|error| wrong(&error))?;
    if let Some(other) = api.vocabulary.put(named) {
        // Another request has loaded one of that name meanwhile, whose place this one took.
        api.unload(other.number)?;
    }
    Ok(Response::json(StatusCode::OK, json!({ "id": name, "object": "model" }).to_string()))
}

/// Unloads an adapter; requests that are in progress with it are completed.
pub(super) fn unload(api: &Api, body: &[u8]) -> Result<Response, ApiError> {
    let mut fields = Fields::of(body)?;
    let name = name(&mut fields)?;
    fields.finish()?;
    if api.model(&name).map_err(|error| error.about(NAME))?.number == 0 {
        return Err(ApiError::field(NAME, format!("`{NAME}` is `{name}`, which is the base")));
    }
    if let Some(model) = api.vocabulary.take(&name) {
        api.unload(model.number)?;
    }
    Ok(Response::json(StatusCode::OK, json!({ "id": name, "object": "model", "deleted": true }).to_string()))
}

fn name(fields: &mut Fields) -> Result<String, ApiError> {
    let name = fields.string(NAME)?.filter(|name| !name.is_empty());
    name.ok_or_else(|| ApiError::field(NAME, format!("`{NAME}` is missing")))
}

/// A folder, all links followed, if it is inside of one of these.
fn allowed(path: &Path, folders: &[PathBuf]) -> Option<PathBuf> {
    let folder = path.canonicalize().ok().filter(|path| path.is_dir())?;
    folders.iter().any(|allowed| folder.starts_with(allowed)).then_some(folder)
}

impl Api {
    /// Has the worker add an adapter.
    async fn load(&self, adapter: AdapterWeights) -> Result<Result<usize, StageError>, ApiError> {
        let (reply, loaded) = oneshot::channel();
        self.order(Order::Load { adapter: Box::new(adapter), reply })?;
        loaded.await.map_err(|_| ApiError::unavailable("the server is ending"))
    }

    fn unload(&self, number: usize) -> Result<(), ApiError> {
        self.order(Order::Unload { number })
    }

    pub(super) fn order(&self, order: Order) -> Result<(), ApiError> {
        let sent = self.orders.lock().unwrap_or_else(PoisonError::into_inner).send(order);
        sent.map_err(|_| ApiError::unavailable("the server is ending"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_inside_of_the_named_ones_are_allowed() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        std::fs::create_dir_all(path("allowed/one")).unwrap();
        std::fs::create_dir_all(path("other")).unwrap();
        std::fs::write(path("allowed/file"), "").unwrap();
        std::os::unix::fs::symlink(path("other"), path("allowed/link")).unwrap();
        let folders = [path("allowed").canonicalize().unwrap()];
        assert!(allowed(&path("allowed/one"), &folders).is_some());
        for outside in ["other", "allowed/../other", "allowed/link", "allowed/file", "allowed/nothing", "allowed_too"] {
            assert_eq!(allowed(&path(outside), &folders), None, "{outside}");
        }
    }
}
