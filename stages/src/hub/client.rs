//! The Hub as the stages see it: three questions, each a blocking call.

use std::fs;
use std::future::{Future, pending};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use engine::error::{Cause, OrFail, StageError};
use engine::limits;
use engine::pin::Pinned;
use engine::protocol::Network;
use reqwest::Url;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;

use super::connection::{Connection, Retry, Token};
use super::error::HubError;
use super::listing::RemoteFile;
use super::locked;
use super::parallel::{PARALLEL_FILES, in_tasks};
use super::repository::{Repository, Snapshot, is_commit};
use super::service::{Service, Variable};
use super::transfer::{Source, Transfer};

/// How often the caller hears how far a download is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// How far a download is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes there.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// A Hub, or a mirror of it.
#[derive(Debug, Clone)]
pub struct Hub {
    service: Service,
    endpoint: Url,
    token: Option<Token>,
    pub(super) cache: Option<hf_hub::Cache>,
    retry: Retry,
    pub(super) network: Network,
}

impl Hub {
    /// The Hub that the environment names: `HF_ENDPOINT`; the token of `HF_TOKEN`, else the stored one; the cache that
    /// other tools fill. For ModelScope: `MODELSCOPE_ENDPOINT`, else `MODELSCOPE_DOMAIN`; `MODELSCOPE_API_TOKEN`.
    /// `token_env` names another variable for the token. `HF_HUB_OFFLINE` keeps from every hub.
    ///
    /// # Errors
    /// Fails where the endpoint is not a web address, or the token cannot be one.
    pub fn from_environment(service: Service, token_env: Option<&str>) -> Result<Self, HubError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
        let api = service.api();
        let (endpoint, token) = api.variables();
        let mut hub = Self::new(&variable(endpoint).unwrap_or_else(|| api.address(&variable)))?.of(service);
        let text = match token_env {
            Some(name) => Some(variable(name).ok_or_else(|| HubError::NoToken(name.to_owned()))?),
            None => variable(token).or_else(|| api.stored_token()),
        };
        if let Some(text) = text {
            hub.token = Some(Token::new(&text).ok_or(HubError::BadToken)?);
        }
        (hub.cache, hub.network) = (api.cache(), network(&variable));
        Ok(hub)
    }

    /// A Hub by its address, without a token or a cache.
    ///
    /// # Errors
    /// Fails where it is not a web address.
    pub fn new(endpoint: &str) -> Result<Self, HubError> {
        let bad = || HubError::BadEndpoint(without_credentials(endpoint.trim()));
        let url = Url::parse(endpoint.trim()).map_err(|_| bad())?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(bad());
        }
        let (service, network) = (Service::HUGGING_FACE, Network::Online);
        Ok(Self { service, endpoint: url, token: None, cache: None, retry: Retry::default(), network })
    }

    /// Speaks another service's API.
    #[must_use]
    pub fn of(mut self, service: Service) -> Self {
        self.service = service;
        self
    }

    /// Whose API it speaks.
    pub fn service(&self) -> Service {
        self.service
    }

    /// Sends a token.
    #[must_use]
    pub fn with_token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Takes files from a Hub cache where it has them.
    #[must_use]
    pub fn with_cache(mut self, folder: PathBuf) -> Self {
        self.cache = Some(hf_hub::Cache::new(folder));
        self
    }

    /// Asks nobody where `network` says so: what the cache has not is an error that names it.
    #[must_use]
    pub fn with_network(mut self, network: Network) -> Self {
        if network == Network::Offline {
            self.network = network;
        }
        self
    }

    /// The commit that a repository's revision currently resolves to, and its files.
    ///
    /// # Errors
    /// As [`Hub::resolve_revision`] and [`Hub::list_files`].
    pub fn pin(&self, repository: &Repository, revision: &str) -> Result<Pinned, HubError> {
        let commit = self.resolve_revision(repository, revision)?;
        self.pin_commit(repository, commit)
    }

    /// A commit, and the files there.
    ///
    /// # Errors
    /// As [`Hub::list_files`].
    pub fn pin_commit(&self, repository: &Repository, commit: String) -> Result<Pinned, HubError> {
        let files = locked::lines(&self.list_files(&repository.at(&commit))?);
        Ok(Pinned { commit, files })
    }

    /// The files of a pinned commit: those written down, else those that the Hub lists. A service whose commits are not
    /// addresses is asked where it may be, since only its listing shows that a branch has moved.
    ///
    /// # Errors
    /// As [`Hub::list_files`]; also where what is written down makes no sense.
    pub fn pinned_files(&self, repository: &Repository, pinned: &Pinned) -> Result<Vec<RemoteFile>, HubError> {
        let trusted = self.service.api().commits_name_content() || self.network == Network::Offline;
        match trusted && !pinned.files.is_empty() {
            true => locked::files(&pinned.files),
            false => self.list_files(&repository.at(&pinned.commit)),
        }
    }

    /// Gives up after a second try, and soon: for what need not be had now.
    #[must_use]
    pub fn impatient(self) -> Self {
        let retry = Retry { attempts: 2, silence: Duration::from_secs(5), ..self.retry };
        self.with_retry(retry)
    }

    /// Sets the patience.
    #[must_use]
    pub fn with_retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
        self
    }

    /// The commit that a revision (branch, tag or commit) currently resolves to.
    ///
    /// # Errors
    /// Fails where there is no such repository or revision, access is refused, or the Hub cannot be reached.
    pub fn resolve_revision(&self, repository: &Repository, revision: &str) -> Result<String, HubError> {
        if is_commit(revision) {
            return Ok(revision.to_owned());
        }
        if matches!(revision, "" | "." | "..") {
            let (name, revision) = (repository.written(), revision.to_owned());
            return Err(HubError::RevisionNotFound { name, revision });
        }
        self.block_on(async {
            let connection = self.connect()?;
            self.service.api().resolve(&connection, repository, revision).await
        })
    }

    /// The files of a snapshot, in the Hub's order, each with its size and checksum.
    ///
    /// # Errors
    /// As [`Hub::resolve_revision`]; also where the Hub lists a name that leaves its folder, or no checksum.
    pub fn list_files(&self, snapshot: &Snapshot) -> Result<Vec<RemoteFile>, HubError> {
        self.block_on(async {
            let connection = self.connect()?;
            self.service.api().list(&connection, snapshot).await
        })
    }

    /// Puts files of a snapshot into `folder`, several at a time, and returns the folder below it in which they lie
    /// under their own paths. Each of them has been checked against its listed size and checksum.
    ///
    /// `folder` is working state: what an earlier call left there, finished or not, is checked and continued. `observe`
    /// is called on the caller's thread; where it breaks, the transfer stops and keeps what it has.
    ///
    /// # Errors
    /// Fails with the first file that cannot be had.
    pub fn download(
        &self,
        snapshot: &Snapshot,
        files: &[RemoteFile],
        folder: &Path,
        observe: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<PathBuf, HubError> {
        let finished = folder.join("finished");
        let total = files.iter().map(|file| file.size).sum();
        let done = Arc::new(AtomicU64::new(0));
        let (stop, mut stopped) = watch::channel(false);
        let until_stopped = async move {
            // The sender is there as long as the download.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        };
        self.block_on_observed(self.fetch_all(snapshot, files, folder, &finished, &done, until_stopped), || {
            if observe(Progress { done: done.load(Ordering::Relaxed), total }).is_break() {
                stop.send_replace(true);
            }
        })?;
        let _ = observe(Progress { done: total, total });
        Ok(finished)
    }

    /// [`Hub::download`] of small files under their own paths in `folder`.
    ///
    /// # Errors
    /// As there.
    pub fn download_into(&self, snapshot: &Snapshot, files: &[RemoteFile], folder: &Path) -> Result<(), HubError> {
        let unfinished = folder.with_added_extension("unfinished");
        let done = Arc::new(AtomicU64::new(0));
        let fetched = self.block_on(self.fetch_all(snapshot, files, &unfinished, folder, &done, pending()));
        match std::fs::remove_dir_all(&unfinished) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                fetched.and(Err(HubError::Disk { path: unfinished, source: error }))
            }
            _ => fetched,
        }
    }

    async fn fetch_all(
        &self,
        snapshot: &Snapshot,
        files: &[RemoteFile],
        folder: &Path,
        finished: &Path,
        done: &Arc<AtomicU64>,
        stop: impl Future<Output = ()>,
    ) -> Result<(), HubError> {
        let source = Arc::new(Source {
            connection: self.connect()?,
            cache: self.cache.clone(),
            snapshot: snapshot.clone(),
            done: Arc::clone(done),
        });
        let transfer = |file: &RemoteFile| Transfer {
            source: Arc::clone(&source),
            file: file.clone(),
            finished: finished.join(&file.path),
            unfinished: folder.join("unfinished").join(&file.path),
        };
        let transfers: Vec<Transfer> = files.iter().map(transfer).collect();
        in_tasks(transfers, Transfer::run, stop).await
    }

    pub(super) fn connect(&self) -> Result<Connection, HubError> {
        Connection::new(self.service, &self.endpoint, self.token.as_ref(), self.retry, self.network)
    }

    pub(super) fn block_on<T: Send>(
        &self,
        work: impl Future<Output = Result<T, HubError>> + Send,
    ) -> Result<T, HubError> {
        self.block_on_observed(work, || ())
    }

    /// Runs a future on a thread and runtime of its own, so that callers may be inside a runtime or not.
    fn block_on_observed<T: Send>(
        &self,
        work: impl Future<Output = Result<T, HubError>> + Send,
        mut observe: impl FnMut(),
    ) -> Result<T, HubError> {
        let (sender, receiver) = mpsc::channel();
        std::thread::scope(|scope| {
            let worker = scope.spawn(move || {
                let result = runtime().and_then(|runtime| runtime.block_on(work));
                // The receiver outlives this thread, except while the caller unwinds.
                let _ = sender.send(result);
            });
            loop {
                match receiver.recv_timeout(PROGRESS_INTERVAL) {
                    Ok(result) => return result,
                    Err(RecvTimeoutError::Timeout) => observe(),
                    Err(RecvTimeoutError::Disconnected) => {
                        let panic = worker.join().expect_err("a worker that sent nothing has panicked");
                        std::panic::resume_unwind(panic)
                    }
                }
            }
        })
    }
}

/// Whether the environment forbids to ask a hub, whichever it is.
fn network(variable: Variable<'_>) -> Network {
    let says = variable("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_lowercase();
    if matches!(says.as_str(), "1" | "true" | "yes" | "on") { Network::Offline } else { Network::Online }
}

/// An address that may be none, without what may be a password in it.
fn without_credentials(address: &str) -> String {
    let Some((before, host)) = address.rsplit_once('@') else { return address.to_owned() };
    let scheme = before.split_once("://").map_or_else(String::new, |(scheme, _)| format!("{scheme}://"));
    format!("{scheme}…@{host}")
}

fn runtime() -> Result<Runtime, HubError> {
    limits::event_loop(Builder::new_multi_thread().worker_threads(PARALLEL_FILES).thread_name("hub"))
        .map_err(|source| HubError::Disk { path: PathBuf::from("a thread pool"), source })
}

/// Removes the files that were kept for a run that is cut off; the outputs are in the store by now.
pub(crate) fn forget_working_files(working: &Path) -> Result<(), StageError> {
    for name in ["finished", "unfinished"] {
        let folder = working.join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder).or_fail(Cause::Machine, || format!("cannot remove `{}`", folder.display()))?;
        }
    }
    Ok(())
}
