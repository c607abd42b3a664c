//! `pipeline serve`: a model behind an address that OpenAI's clients know.
//!
//! One thread owns the model ([`worker`]); others read and write HTTP and make JSON of it ([`api`]).

mod api;
mod metrics;
mod newer;
mod worker;

use std::future::Future;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use clap::Args;
use engine::error::StageError;
use engine::limits;
use engine::parameter::{ByteSize, Period};
use http_server::{HostRule, Settings, Token};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};

use crate::inference::{Missing, ModelArgs, Opened, Room};
use crate::listen::listen;
use crate::progress::Verbosity;
use crate::render::{Exit, Failure};
use crate::{Global, terminal};
use api::{Api, Log, Prompts};
use metrics::{Computes, Metrics};
use worker::Worker;

const SERVER: &str = "Server";

/// Threads that read and write for clients; the model has its own.
const IO_THREADS: usize = 2;

/// Connections at once.
const CONNECTIONS: usize = 1024;

/// How long a client may take for the head of a request, and idle between two.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client may take for a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client may read nothing of what is there for it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Serve a model over HTTP with OpenAI's API: chat and text completions, streamed or whole.
///
/// The model is the output of a stage, which runs first if it has no result, or a folder (`--model`). `model` of a
/// request selects it or one of its adapters. The first SIGTERM or Ctrl-C ends the server after the requests in
/// progress, the second at once.
#[derive(Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen at.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = SERVER)]
    host: String,
    /// The port; 0 selects a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = SERVER)]
    port: u16,
    /// Completions that are generated at once; further ones wait.
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256), help_heading = SERVER)]
    max_concurrency: u16,
    /// Completions that may wait; further ones get the response 429.
    #[arg(long, value_name = "COUNT", default_value_t = 64, help_heading = SERVER)]
    queue: u16,
    /// Memory of the prefix cache: keys and values of common beginnings of prompts; `0B` disables it.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size, help_heading = SERVER)]
    prefix_cache: u64,
    /// The environment variable with the key that requests must have.
    #[arg(long, value_name = "VARIABLE", help_heading = SERVER)]
    api_key_env: Option<String>,
    /// Do not train a missing adapter: serve it as soon as a run has produced it, and every newer one.
    #[arg(long, conflicts_with = "model", help_heading = SERVER)]
    watch: bool,
    /// Allow clients with the key to load adapters from this folder, but not through links out of it; may be given
    /// several times.
    #[arg(long = "adapter-folder", value_name = "FOLDER", requires = "api_key_env", help_heading = SERVER)]
    adapter_folders: Vec<PathBuf>,
    /// Maximum size of a request in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, help_heading = SERVER)]
    max_body_bytes: u32,
    /// Maximum time of a completion, including waiting.
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration, help_heading = SERVER)]
    timeout: Duration,
    /// Print prompts on standard error.
    #[arg(long, help_heading = SERVER)]
    log_prompts: bool,
}

fn duration(text: &str) -> Result<Duration, String> {
    let Period(duration) = text.parse::<Period>()?;
    match duration.is_zero() {
        true => Err("`--timeout` must be above 0".to_owned()),
        false => Ok(duration),
    }
}

fn size(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>().map(|size| size.0)
}

/// Serves until it is asked to end.
pub(crate) fn run(args: &ServeArgs, global: &Global) -> Result<(), Failure> {
    let token = args.token()?;
    let adapter_folders = args.adapter_folders()?;
    // Before the model is loaded, which may take long.
    let (listener, address) = listen(&args.host, args.port)?;
    if !address.ip().is_loopback() && token.is_none() {
        terminal::tell_line("warning: anybody who reaches this address can use the model: `--api-key-env` wants a key");
    }
    let sequences = usize::from(args.max_concurrency);
    let missing = if args.watch { Missing::Await } else { Missing::Make };
    let Opened { engine, choice, vocabulary, staging, watched } =
        args.model.open(Room { sequences, prefix_bytes: args.prefix_cache }, missing, global)?;
    let computes =
        Computes { backend: choice.name(), device: choice.device.name(), batching: engine.batching().name() };
    let (vocabulary, metrics) = (Arc::new(vocabulary), Arc::new(Metrics::new(computes)));
    let (orders, received) = mpsc::channel();
    let worker = Worker {
        engine,
        vocabulary: Arc::clone(&vocabulary),
        metrics: Arc::clone(&metrics),
        orders: received,
        timeout: args.timeout,
    };
    let log = Log {
        verbosity: global.verbosity(),
        prompts: if args.log_prompts { Prompts::Printed } else { Prompts::Hidden },
    };
    let (keep_watching, stop) = mpsc::channel();
    let watching = watched.map(|watched| {
        let (vocabulary, orders) = (Arc::clone(&vocabulary), orders.clone());
        let watch = move || newer::watch(watched, &vocabulary, &orders, &stop);
        std::thread::Builder::new().name("watch".to_owned()).spawn(watch).map_err(Failure::machine)
    });
    let watching = watching.transpose()?;
    let names: Vec<String> = vocabulary.models().iter().map(|model| format!("`{}`", model.name)).collect();
    let api =
        Arc::new(Api::new(vocabulary, metrics, orders, adapter_folders, sequences + usize::from(args.queue), log));
    let settings = Settings {
        hosts: HostRule::of(address.ip()),
        token,
        body_bytes: args.max_body_bytes as usize,
        connections: CONNECTIONS,
        head_timeout: HEAD_TIMEOUT,
        body_timeout: BODY_TIMEOUT,
        write_timeout: WRITE_TIMEOUT,
        compress: false,
    };
    let (ended, has_ended) = oneshot::channel();
    let thread = std::thread::Builder::new().name("model".to_owned()).spawn(move || {
        // Whoever waits for it may be gone.
        let _ = ended.send(worker.run());
    });
    let thread = thread.map_err(Failure::machine)?;
    let runtime = limits::event_loop(Builder::new_multi_thread().worker_threads(IO_THREADS));
    let runtime = runtime.map_err(Failure::machine)?;
    let served = runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).map_err(Failure::machine)?;
        let stops = Stops::new().map_err(Failure::machine)?;
        if global.verbosity() > Verbosity::Quiet {
            terminal::tell_line(format_args!("serving {} at http://{address}/v1", names.join(", ")));
        }
        let (drain, drained) = watch::channel(false);
        let serving = http_server::serve(listener, Arc::clone(&api), settings, is_set(drained));
        until_it_ends(serving, &api, &drain, stops, has_ended).await
    });
    // The worker ends when nobody can send it anything.
    drop(runtime);
    drop(api);
    drop::<mpsc::Sender<()>>(keep_watching);
    let _ = watching.map(std::thread::JoinHandle::join);
    let _ = thread.join();
    drop(staging);
    served
}

async fn is_set(mut flag: watch::Receiver<bool>) {
    let _ = flag.wait_for(|is_set| *is_set).await;
}

/// Serves until a signal has it drain, or the model fails.
async fn until_it_ends(
    serving: impl Future<Output = ()>,
    api: &Api,
    drain: &watch::Sender<bool>,
    mut stops: Stops,
    mut worker: oneshot::Receiver<Result<(), StageError>>,
) -> Result<(), Failure> {
    let mut serving = pin!(serving);
    let mut failed = None;
    loop {
        tokio::select! {
            () = &mut serving => return failed.map_or(Ok(()), |error: StageError| Err(error.into())),
            () = stops.next() => {
                if *drain.borrow() {
                    return Err(Failure::Shown(Exit::Interrupted));
                }
                terminal::tell_line("ending: requests in progress finish first; a second signal ends at once");
            }
            ended = &mut worker, if failed.is_none() => {
                let error = match ended {
                    Ok(Err(error)) => error,
                    Ok(Ok(())) | Err(_) => StageError::internal("the model's thread has ended"),
                };
                failed = Some(error);
            }
        }
        api.drain();
        drain.send_replace(true);
    }
}

/// The signals that ask for an end.
struct Stops {
    interrupt: Signal,
    terminate: Signal,
}

impl Stops {
    fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

impl ServeArgs {
    fn token(&self) -> Result<Option<Token>, Failure> {
        let Some(variable) = &self.api_key_env else { return Ok(None) };
        match std::env::var(variable).ok().filter(|key| !key.trim().is_empty()) {
            Some(key) => Ok(Some(Token::new(key.trim()))),
            None => Err(Failure::wrong(format!("the environment variable `{variable}` has no key"))),
        }
    }

    /// The folders that adapters may be loaded from, all links followed.
    fn adapter_folders(&self) -> Result<Vec<PathBuf>, Failure> {
        let whole = |folder: &PathBuf| {
            let whole = folder.canonicalize().ok().filter(|folder| folder.is_dir());
            whole.ok_or_else(|| Failure::wrong(format!("`{}` is no folder", folder.display())))
        };
        self.adapter_folders.iter().map(whole).collect()
    }
}
