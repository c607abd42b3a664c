//! What of a repository is fetched ahead of its weights: configurations, the tokenizer, the headers of the weights.

use std::path::Path;

use engine::error::StageError;
use engine::local_files::{Extent, MOST_READ};
use engine::metadata::FetchedFile;
use engine::pin::Pinned;
use engine::protocol::Network;

use super::selection::Selection;
use super::{ADAPTER_CONFIG, CONFIG, Download, Form, Origin, bad_name};
use crate::data::artifact::TOKENIZER_FILES;
use crate::hub::{Hub, HubError, Piece, RemoteFile, Repository, RepositoryKind};

/// Fetches it. Of a repository that is taken as it is nothing is known ahead.
pub(super) fn fetch(
    params: &Download,
    pinned: &Pinned,
    folder: &Path,
    network: Network,
) -> Result<Option<Vec<FetchedFile>>, StageError> {
    let Some(Origin::Hub(name)) = params.origin().filter(|_| params.form != Form::Files) else { return Ok(None) };
    let repository = Repository::parse(RepositoryKind::Model, name).map_err(bad_name)?;
    let service = repository.service();
    let failed = |error: HubError| error.of(service);
    let hub = Hub::from_environment(service, params.token_env.as_deref()).map_err(failed)?;
    let hub = hub.with_network(network).impatient();
    let listed = hub.pinned_files(&repository, pinned).map_err(failed)?;
    let names: Vec<&str> = listed.iter().map(|file| file.path.as_str()).collect();
    let selection = Selection::new(params.include.as_deref(), params.exclude.as_deref(), params.form);
    // Where the names alone show that it cannot be used, nothing more is needed to say so.
    let chosen = selection.choose(&names, name).unwrap_or_default();
    let chosen: Vec<&RemoteFile> = listed.iter().filter(|file| chosen.contains(&file.path.as_str())).collect();
    let small: Vec<RemoteFile> = chosen.iter().copied().filter(|file| is_read_ahead(file)).cloned().collect();
    let headers = chosen.iter().copied().filter(|file| file.path.ends_with(".safetensors"));
    let headers: Vec<(&RemoteFile, Piece)> = headers.map(|file| (file, Piece::SafetensorsHeader)).collect();
    let snapshot = repository.at(&pinned.commit);
    hub.download_into(&snapshot, &small, folder).map_err(failed)?;
    hub.fetch_pieces(&snapshot, &headers, folder).map_err(failed)?;
    let extent = |file: &RemoteFile| match file {
        file if small.contains(file) => Extent::Whole,
        file if headers.iter().any(|(header, _)| *header == file) => Extent::Pieces,
        _ => Extent::Name,
    };
    let fetched = listed.iter().map(|file| FetchedFile { path: file.path.clone(), extent: extent(file) });
    Ok(Some(fetched.collect()))
}

fn is_read_ahead(file: &RemoteFile) -> bool {
    let name = file.path.as_str();
    file.size <= MOST_READ && ([CONFIG, ADAPTER_CONFIG].contains(&name) || TOKENIZER_FILES.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Checksum;

    #[test]
    fn of_the_templates_the_default_one_alone_is_read_ahead() {
        let is_read = |path: &str| {
            let checksum = Checksum::GitBlob("ce013625030ba8dba906f756967f9e9ca394464a".to_owned());
            is_read_ahead(&RemoteFile { path: path.to_owned(), size: 6, checksum })
        };
        assert!(is_read("chat_template.jinja") && is_read("tokenizer_config.json"));
        assert!(!is_read("additional_chat_templates/tool_use.jinja"));
    }
}
