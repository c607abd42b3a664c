//! `pipeline ui`: runs, graphs, curves, rows and comparisons in a browser. It only looks: every request is a GET.
//!
//! The page is in `ui/`, whose files are part of the program ([`assets`]); what it shows it asks for as JSON ([`api`]).

mod api;
mod assets;
mod changes;
mod curves;
mod graph;

use std::fmt::Write as _;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use engine::limits;
use http_server::{HostRule, Settings, Token};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::listen::listen;
use crate::progress::Verbosity;
use crate::render::Failure;
use crate::{Global, terminal};
use api::Api;

/// Threads that read requests and write responses; what takes long has others.
const IO_THREADS: usize = 2;

/// Connections at once.
const CONNECTIONS: usize = 256;

/// How long a client may take for a request, and nothing of what is there for it.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Show runs in the browser: their graphs, curves, rows and results, also of active runs.
///
/// The page is part of the program and needs no network. It only reads records, and changes nothing.
#[derive(Args)]
pub(crate) struct UiArgs {
    /// The address to listen at. If other machines can reach it, the printed link has a token.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// The port; 0 selects a free one.
    #[arg(long, value_name = "PORT", default_value_t = 7117)]
    port: u16,
}

/// Serves the page until it is asked to end.
pub(crate) fn run(args: &UiArgs, global: &Global) -> Result<(), Failure> {
    let (listener, address) = listen(&args.host, args.port)?;
    let token = if address.ip().is_loopback() { None } else { Some(random()?) };
    let settings = Settings {
        hosts: HostRule::of(address.ip()),
        token: token.as_deref().map(Token::new),
        body_bytes: 0,
        connections: CONNECTIONS,
        head_timeout: TIMEOUT,
        body_timeout: TIMEOUT,
        write_timeout: TIMEOUT,
        compress: true,
    };
    let runtime = limits::event_loop(Builder::new_multi_thread().worker_threads(IO_THREADS));
    let runtime = runtime.map_err(Failure::machine)?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).map_err(Failure::machine)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::machine)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::machine)?;
        if global.verbosity() > Verbosity::Quiet {
            let token = token.map(|token| format!("#token={token}")).unwrap_or_default();
            terminal::tell_line(format_args!("runs are shown at http://{address}/{token}"));
        }
        // What it shows are streams without an end: nothing is lost where they end with the program.
        tokio::select! {
            () = http_server::serve(listener, Arc::new(Api::new(global)), settings, std::future::pending()) => {}
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}

/// A token that nobody guesses.
fn random() -> Result<String, Failure> {
    let mut bytes = [0; 24];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut bytes))
        .map_err(Failure::machine)?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}
