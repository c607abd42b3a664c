//! An S3 server in this process, over a folder, on a port of its own: with faults to order.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{IF_MATCH, IF_NONE_MATCH};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;
use tokio::sync::Mutex;

/// The only account of the server.
pub(crate) const ACCOUNT: [(&str, &str); 3] =
    [("AWS_ACCESS_KEY_ID", "AKID"), ("AWS_SECRET_ACCESS_KEY", "SECRET"), ("AWS_REGION", "us-east-1")];

/// A server with one bucket, `bucket`. It ends with its value.
pub(crate) struct S3 {
    folder: tempfile::TempDir,
    address: SocketAddr,
    state: Arc<State>,
    _runtime: tokio::runtime::Runtime,
}

struct State {
    service: S3Service,
    /// The file server's own look before it creates is not one step with the creation, which a service promises.
    conditional: Mutex<()>,
    /// The next so many requests are answered with 503.
    busy: AtomicU32,
    /// How long each request waits first.
    delay_milliseconds: AtomicU64,
    requests: AtomicU64,
    /// Requests that brought content.
    writes: AtomicU64,
}

impl S3 {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bucket")).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let mut builder = S3ServiceBuilder::new(s3s_fs::FileSystem::new(folder.path()).unwrap());
        builder.set_auth(SimpleAuth::from_single("AKID", "SECRET"));
        let state = Arc::new(State {
            service: builder.build(),
            conditional: Mutex::default(),
            busy: AtomicU32::new(0),
            delay_milliseconds: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            writes: AtomicU64::new(0),
        });
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(serve(listener, Arc::clone(&state)));
        Self { folder, address, state, _runtime: runtime }
    }

    /// `http://127.0.0.1:PORT`.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Where an object of the bucket lies.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.bucket().join(name)
    }

    /// The bucket's folder.
    pub(crate) fn bucket(&self) -> PathBuf {
        self.folder.path().join("bucket")
    }

    /// The names of all objects, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        collect(&self.bucket(), &self.bucket(), &mut names);
        names.sort();
        names
    }

    /// Answers the next requests with 503.
    pub(crate) fn be_busy(&self, requests: u32) {
        self.state.busy.store(requests, Ordering::SeqCst);
    }

    /// Lets every request wait.
    pub(crate) fn be_slow(&self, milliseconds: u64) {
        self.state.delay_milliseconds.store(milliseconds, Ordering::SeqCst);
    }

    /// Requests so far.
    pub(crate) fn requests(&self) -> u64 {
        self.state.requests.load(Ordering::SeqCst)
    }

    /// Requests so far that brought content.
    pub(crate) fn writes(&self) -> u64 {
        self.state.writes.load(Ordering::SeqCst)
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    while let Ok((socket, _)) = listener.accept().await {
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            let answer = service_fn(move |request| answer(Arc::clone(&state), request));
            // A client that hangs up is its own affair.
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), answer).await;
        });
    }
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Result<Response<s3s::Body>, Infallible> {
    state.requests.fetch_add(1, Ordering::SeqCst);
    if matches!(*request.method(), Method::PUT | Method::POST) {
        state.writes.fetch_add(1, Ordering::SeqCst);
    }
    let delay = state.delay_milliseconds.load(Ordering::SeqCst);
    if delay > 0 {
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }
    if state.busy.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
        let busy = Response::builder().status(StatusCode::SERVICE_UNAVAILABLE).body(s3s::Body::empty());
        return Ok(busy.unwrap());
    }
    let conditional = request.headers().contains_key(IF_NONE_MATCH) || request.headers().contains_key(IF_MATCH);
    let _one_at_a_time = if conditional { Some(state.conditional.lock().await) } else { None };
    Ok(state.service.call(request.map(s3s::Body::from)).await.unwrap())
}

fn collect(folder: &Path, root: &Path, names: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, root, names);
        } else {
            names.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
}
