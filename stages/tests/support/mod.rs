//! A Hub on 127.0.0.1 that goes wrong on request.

#![allow(dead_code, clippy::unwrap_used, reason = "support code of several tests, each of which uses a part of it")]

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use engine::error::StageError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::Digest as _;
use stages::hub::{Hub, HubError, Progress, Repository, RepositoryKind, Retry, Service, Snapshot};

/// The commit that `main` is at.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// The commit that `refs/convert/parquet` is at, where there is one.
pub(crate) const CONVERTED: &str = "fedcba9876543210fedcba9876543210fedcba98";

/// What the test's child `name` makes of parameters ([`in_child`]), in a process for which `endpoint` is the Hub; or
/// the message and the help of its failure.
pub(crate) fn in_process_with_hub<T: DeserializeOwned>(name: &str, endpoint: &str, with: &Value) -> Result<T, String> {
    let root = tempfile::tempdir().unwrap();
    let output = test_harness::child(name)
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", root.path().join("home"))
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_TOKEN")
        .env("TEST_FOLDER", root.path())
        .env("TEST_WITH", with.to_string())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&std::fs::read(root.path().join("result.json")).unwrap()).unwrap()
}

/// The child's side of [`in_process_with_hub`].
pub(crate) fn in_child<T: Serialize>(run: impl FnOnce(&Path, Value) -> Result<T, StageError>) {
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let with: Value = serde_json::from_str(&std::env::var("TEST_WITH").unwrap()).unwrap();
    let result = run(&root, with).map_err(|error| format!("{}\n{}", error.message, error.help.unwrap_or_default()));
    std::fs::write(root.join("result.json"), serde_json::to_vec(&result).unwrap()).unwrap();
}

/// What goes wrong with the answer to one request for a file.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// Another status, with a body that is not the file's.
    Status(u16, Option<&'static str>),
    /// The connection ends after so many bytes of the body.
    CutAfter(usize),
    /// The first byte of the body is changed.
    Flip,
    /// The request's range is not heeded.
    WholeFile,
    /// A shorter file, honestly announced.
    Short(usize),
    /// Each kilobyte takes so long.
    Slow(Duration),
    /// Nothing is answered for so long.
    Silent(Duration),
    /// The file is elsewhere.
    Redirect(String),
    /// A part that does not begin where it was asked to.
    WrongRange,
    /// More bytes are announced than come, and the connection is kept.
    Overstated,
}

/// One request, as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    /// Path and query.
    pub target: String,
    /// `Range`.
    pub range: Option<String>,
    /// `Authorization`.
    pub authorization: Option<String>,
    /// `Cookie`.
    pub cookie: Option<String>,
}

/// What the answers to the API have no end of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Endless {
    Blanks,
    Headers,
    /// Two pages of a listing that name each other as the next.
    Circle,
    /// Ever new pages of ever new files.
    Pages,
}

struct State {
    endless: Option<Endless>,
    files: BTreeMap<String, Vec<u8>>,
    /// The files at [`CONVERTED`].
    converted: BTreeMap<String, Vec<u8>>,
    /// How much is served of files that are listed with more.
    served: BTreeMap<String, usize>,
    faults: BTreeMap<String, VecDeque<Fault>>,
    api_faults: VecDeque<Fault>,
    requests: Vec<Request>,
    /// Further entries of the listing, as they are.
    listed_besides: Vec<serde_json::Value>,
    /// Whether access needs the token `secret`, and with which error code it is refused.
    gate: Option<&'static str>,
    page_size: usize,
    /// Whether every repository has these files.
    is_every_repository: bool,
    /// Whether ModelScope's listing says which commit is the newest.
    names_commit: bool,
    /// Whether ModelScope's listing says how many entries all pages have.
    names_total: bool,
    /// What ModelScope's listing is instead of one of the files.
    listing: Option<serde_json::Value>,
}

impl State {
    /// What is served of a file, and what goes wrong with it.
    fn take(&mut self, file: &str) -> (Option<Vec<u8>>, Option<Fault>) {
        let fault = self.faults.get_mut(file).and_then(VecDeque::pop_front);
        let mut content = self.files.get(file).cloned();
        if let (Some(content), Some(length)) = (&mut content, self.served.get(file)) {
            content.truncate(*length);
        }
        (content, fault)
    }
}

/// A running server with the one repository `owner/name`.
pub(crate) struct FaultyHub {
    /// `http://127.0.0.1:port`
    pub endpoint: String,
    state: Arc<Mutex<State>>,
}

impl FaultyHub {
    /// Serves files; those named `*.safetensors` are listed with SHA-256, the others with their git object id.
    pub(crate) fn serve(files: &[(&str, &[u8])]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State {
            endless: None,
            files: files.iter().map(|(path, content)| ((*path).to_owned(), content.to_vec())).collect(),
            converted: BTreeMap::new(),
            served: BTreeMap::new(),
            faults: BTreeMap::new(),
            api_faults: VecDeque::new(),
            requests: Vec::new(),
            listed_besides: Vec::new(),
            gate: None,
            page_size: 1000,
            names_commit: true,
            names_total: false,
            listing: None,
            is_every_repository: false,
        }));
        let served = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&served);
                // A client that leaves early is part of the tests.
                thread::spawn(move || drop(answer(stream, &state)));
            }
        });
        Self { endpoint, state }
    }

    /// Serves files of the Hub's own conversion, too.
    pub(crate) fn convert(&self, files: &[(&str, &[u8])]) {
        let files = files.iter().map(|(path, content)| ((*path).to_owned(), content.to_vec()));
        self.state.lock().unwrap().converted = files.collect();
    }

    /// The next requests for a file go wrong in these ways, one each.
    pub(crate) fn fail(&self, path: &str, faults: &[Fault]) {
        self.state.lock().unwrap().faults.entry(path.to_owned()).or_default().extend(faults.iter().cloned());
    }

    /// The next requests to the API go wrong in these ways, one each.
    pub(crate) fn fail_api(&self, faults: &[Fault]) {
        self.state.lock().unwrap().api_faults.extend(faults.iter().cloned());
    }

    /// Has the same files under every name, and not under `owner/name` alone.
    pub(crate) fn be_every_repository(&self) {
        self.state.lock().unwrap().is_every_repository = true;
    }

    /// Refuses everything without the token `secret`.
    pub(crate) fn gate(&self, code: &'static str) {
        self.state.lock().unwrap().gate = Some(code);
    }

    /// Lists so many entries per page.
    pub(crate) fn paginate(&self, page_size: usize) {
        self.state.lock().unwrap().page_size = page_size;
    }

    /// Lists one more entry, as it is.
    pub(crate) fn list_besides(&self, entry: serde_json::Value) {
        self.state.lock().unwrap().listed_besides.push(entry);
    }

    /// ModelScope's listing no longer says which commit is the newest.
    pub(crate) fn hide_commit(&self) {
        self.state.lock().unwrap().names_commit = false;
    }

    /// ModelScope's listing now says how many entries all pages have.
    pub(crate) fn name_total(&self) {
        self.state.lock().unwrap().names_total = true;
    }

    /// ModelScope's listing is this answer from now on, whatever revision and page is asked for.
    pub(crate) fn list_instead(&self, answer: serde_json::Value) {
        self.state.lock().unwrap().listing = Some(answer);
    }

    /// Serves only the beginning of a file, which is still listed whole.
    pub(crate) fn truncate(&self, path: &str, length: usize) {
        self.state.lock().unwrap().served.insert(path.to_owned(), length);
    }

    /// From now on has no end of answers.
    pub(crate) fn never_end(&self, endless: Endless) {
        self.state.lock().unwrap().endless = Some(endless);
    }

    /// Adds or replaces a file.
    pub(crate) fn put(&self, path: &str, content: &[u8]) {
        self.state.lock().unwrap().files.insert(path.to_owned(), content.to_vec());
    }

    /// All requests so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.state.lock().unwrap().requests.clone()
    }

    /// How many bytes of a file were sent so far, whatever went wrong with them, as far as the requests tell.
    pub(crate) fn bytes_asked_for(&self, path: &str) -> u64 {
        let length = self.state.lock().unwrap().files[path].len() as u64;
        let asked = self.requests_for(path).into_iter().map(|request| {
            let range = request.range.unwrap_or_else(|| "bytes=0-".to_owned());
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            last.parse().unwrap_or(length - 1) + 1 - first.parse::<u64>().unwrap()
        });
        asked.sum()
    }

    /// The requests for one file so far.
    pub(crate) fn requests_for(&self, path: &str) -> Vec<Request> {
        let endings = [format!("/resolve/{COMMIT}/{path}"), format!("Revision={COMMIT}&FilePath={path}")];
        let is_for = |request: &Request| endings.iter().any(|ending| request.target.ends_with(ending));
        self.requests().into_iter().filter(is_for).collect()
    }
}

/// A hub as the tests ask it.
#[derive(Clone, Copy)]
pub(crate) struct Tried(pub Service);

impl Tried {
    /// Every hub: what holds for one has to hold for all.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Service::ALL.iter().copied().map(Self)
    }

    pub(crate) fn repository(self) -> Repository {
        self.repository_of(RepositoryKind::Model)
    }

    pub(crate) fn repository_of(self, kind: RepositoryKind) -> Repository {
        Repository::parse(kind, &format!("{}owner/name", self.0.prefix())).unwrap()
    }

    pub(crate) fn snapshot(self) -> Snapshot {
        self.repository().at(COMMIT)
    }

    pub(crate) fn client(self, server: &FaultyHub) -> Hub {
        let retry = Retry { attempts: 3, first_pause: Duration::from_millis(5), silence: Duration::from_millis(1500) };
        Hub::new(&server.endpoint).unwrap().of(self.0).with_retry(retry)
    }

    /// Fetches everything the server lists.
    pub(crate) fn fetch(self, hub: &Hub, folder: &Path) -> Result<PathBuf, HubError> {
        self.fetch_at(hub, &self.snapshot(), folder)
    }

    pub(crate) fn fetch_at(self, hub: &Hub, snapshot: &Snapshot, folder: &Path) -> Result<PathBuf, HubError> {
        hub.download(snapshot, &hub.list_files(snapshot)?, folder, &mut go_on)
    }
}

pub(crate) fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Bytes that no other offset has in the same order.
pub(crate) fn content(length: usize) -> Vec<u8> {
    (0..length as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn answer(mut stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let request = read_request(&stream)?;
    state.lock().unwrap().requests.push(request.clone());
    let path = request.target.split('?').next().unwrap().to_owned();
    let path = if path.starts_with("/api/") { path } else { percent_decode(&path) };
    let path = if state.lock().unwrap().is_every_repository { of_the_repository(&path) } else { path };
    let gate = state.lock().unwrap().gate;
    if let Some(code) = gate
        && request.authorization.as_deref() != Some("Bearer secret")
    {
        return refuse(&mut stream, 401, Some(code));
    }
    if let Some(rest) = path.strip_prefix("/api/v1/") {
        return answer_modelscope(&mut stream, state, rest, &request);
    }
    let of_model = path.strip_prefix("/api/models/owner/name/");
    match of_model.or_else(|| path.strip_prefix("/api/datasets/owner/name/")) {
        Some(rest) => answer_api(&mut stream, state, rest, &request),
        None if path.starts_with("/api/") => refuse(&mut stream, 404, Some("RepoNotFound")),
        None => {
            // A file elsewhere is asked for by its bare name.
            let at = |commit: &str| path.split_once(&format!("/resolve/{commit}/")).map(|(_, file)| file);
            match at(CONVERTED) {
                Some(file) => {
                    let content = state.lock().unwrap().converted.get(file).cloned();
                    answer_file(&mut stream, content, None, &request)
                }
                None => {
                    let file = at(COMMIT).unwrap_or(&path[1..]);
                    let (content, fault) = state.lock().unwrap().take(file);
                    answer_file(&mut stream, content, fault, &request)
                }
            }
        }
    }
}

/// A path of the API with the repository that there is in the place of the one asked for.
fn of_the_repository(path: &str) -> String {
    let prefixes = ["/api/models/", "/api/datasets/", "/api/v1/models/", "/api/v1/datasets/"];
    let asked = prefixes.iter().find_map(|prefix| Some((prefix, path.strip_prefix(prefix)?.splitn(3, '/').nth(2)?)));
    asked.map_or_else(|| path.to_owned(), |(prefix, rest)| format!("{prefix}owner/name/{rest}"))
}

fn percent_decode(path: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let escaped =
            (*first == b'%').then(|| u8::from_str_radix(std::str::from_utf8(&after[..2]).unwrap(), 16).unwrap());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap()
}

fn read_request(stream: &TcpStream) -> std::io::Result<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut request = Request { target, range: None, authorization: None, cookie: None };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = Some(value.to_owned()),
            "cookie" => request.cookie = Some(value.to_owned()),
            "authorization" => request.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    Ok(request)
}

fn answer_api(stream: &mut TcpStream, state: &Mutex<State>, path: &str, request: &Request) -> std::io::Result<()> {
    if let Some(Fault::Status(status, code)) = state.lock().unwrap().api_faults.pop_front() {
        return refuse(stream, status, code);
    }
    let endless = state.lock().unwrap().endless;
    match (endless, request.target.split_once("cursor=").map(|(_, cursor)| cursor.to_owned())) {
        (None, _) => {}
        (Some(Endless::Blanks), _) => {
            write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
            let blanks = [b' '; 1 << 16];
            return (0..100_000).try_for_each(|_| stream.write_all(&blanks));
        }
        (Some(Endless::Headers), _) => {
            write!(stream, "HTTP/1.1 200 OK\r\n")?;
            return (0..100_000_000).try_for_each(|at| write!(stream, "X-{at}: {}\r\n", "a".repeat(1000)));
        }
        (Some(Endless::Circle), cursor) => {
            let next = if cursor.as_deref() == Some("a") { "b" } else { "a" };
            let link = format!("Link: <https://hub.invalid/?cursor={next}>; rel=\"next\"\r\n");
            return send_json(stream, &link, &serde_json::json!([]));
        }
        (Some(Endless::Pages), cursor) => {
            let at: u64 = cursor.map_or(0, |cursor| cursor.parse().unwrap());
            let link = format!("Link: <https://hub.invalid/?cursor={}>; rel=\"next\"\r\n", at + 1);
            let file = |entry: u64| serde_json::json!({"type": "file", "path": format!("{at}/{entry}"), "oid": "b".repeat(40), "size": 1});
            return send_json(stream, &link, &(0..1000).map(file).collect());
        }
    }
    match path {
        "revision/main" | "revision/refs%2Fpr%2F1" => {
            send_json(stream, "", &serde_json::json!({"id": "owner/name", "sha": COMMIT}))
        }
        "revision/refs%2Fconvert%2Fparquet" if !state.lock().unwrap().converted.is_empty() => {
            send_json(stream, "", &serde_json::json!({"id": "owner/name", "sha": CONVERTED}))
        }
        _ if path.starts_with("revision/") => refuse(stream, 404, Some("RevisionNotFound")),
        _ if path == format!("tree/{CONVERTED}") => {
            let entries = listing(&state.lock().unwrap().converted);
            send_json(stream, "", &serde_json::Value::from(entries))
        }
        _ if path == format!("tree/{COMMIT}") => {
            let (entries, page_size) = {
                let state = state.lock().unwrap();
                let mut entries = listing(&state.files);
                entries.extend(state.listed_besides.iter().cloned());
                (entries, state.page_size)
            };
            let cursor = request.target.split_once("cursor=").map_or(0, |(_, cursor)| cursor.parse().unwrap());
            let end = (cursor + page_size).min(entries.len());
            // The address names another server, as it does behind a mirror.
            let link = if end < entries.len() {
                format!("Link: <https://hub.invalid/{path}?recursive=true&cursor={end}>; rel=\"next\"\r\n")
            } else {
                String::new()
            };
            send_json(stream, &link, &serde_json::Value::from(entries[cursor..end].to_vec()))
        }
        _ => refuse(stream, 404, None),
    }
}

/// The API of ModelScope: models are listed at once, datasets in pages; a revision that is not there is an empty
/// answer.
fn answer_modelscope(
    stream: &mut TcpStream,
    state: &Mutex<State>,
    path: &str,
    request: &Request,
) -> std::io::Result<()> {
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    let asked = |name: &str| {
        let value = query.split('&').find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name));
        percent_decode(&value.map_or("", |(_, value)| value).replace('+', " "))
    };
    let revision = asked("Revision");
    let known = revision == "master" || revision == COMMIT;
    match path {
        "models/owner/name/repo/files" | "datasets/owner/name/repo/tree" => {
            if let Some(Fault::Status(status, code)) = state.lock().unwrap().api_faults.pop_front() {
                return refuse(stream, status, code);
            }
            let state = state.lock().unwrap();
            if let Some(answer) = &state.listing {
                return send_json(stream, "", answer);
            }
            if !known {
                return send_json(
                    stream,
                    "",
                    &serde_json::json!({"Code": 200, "Data": {"Files": null}, "Success": true}),
                );
            }
            let folder = serde_json::json!({"Path": "a-folder", "Name": "a-folder", "Type": "tree", "Size": 0});
            let mut entries = vec![folder];
            entries.extend(state.files.iter().enumerate().map(|(number, (path, content))| {
                // Each file has the commit that changed it last: only one of them is the newest.
                let commit = if number == 0 { COMMIT.to_owned() } else { "1".repeat(40) };
                serde_json::json!({
                    "Path": path, "Name": path.rsplit('/').next(), "Type": "blob", "Size": content.len(),
                    "Sha256": hex(&sha2::Sha256::digest(content)), "Revision": commit, "IsLFS": false,
                })
            }));
            entries.extend(state.listed_besides.iter().cloned());
            let total = state.names_total.then_some(entries.len());
            if path.starts_with("datasets") {
                let number = |name: &str| asked(name).parse::<usize>().unwrap();
                let (page, size) = (number("PageNumber"), number("PageSize").min(state.page_size));
                entries = entries.into_iter().skip((page - 1) * size).take(size).collect();
            }
            let latest = match state.names_commit {
                true => serde_json::json!({"Id": "", "ShortId": &COMMIT[..8]}),
                false => serde_json::Value::Null,
            };
            let data = serde_json::json!({"Files": entries, "LatestCommitter": latest, "TotalCount": total});
            send_json(stream, "", &serde_json::json!({"Code": 200, "Data": data, "Success": true}))
        }
        "models/owner/name/repo" | "datasets/owner/name/repo" if known => {
            let file = asked("FilePath");
            let (content, fault) = state.lock().unwrap().take(&file);
            answer_file(stream, content, fault, request)
        }
        _ => refuse(stream, 404, None),
    }
}

fn listing(files: &BTreeMap<String, Vec<u8>>) -> Vec<serde_json::Value> {
    let mut entries =
        vec![serde_json::json!({"type": "directory", "path": "a-folder", "oid": "0".repeat(40), "size": 0})];
    for (path, content) in files {
        let git = sha1::Sha1::new().chain_update(format!("blob {}\0", content.len())).chain_update(content).finalize();
        let mut entry = serde_json::json!({"type": "file", "path": path, "oid": hex(&git), "size": content.len()});
        if path.ends_with(".safetensors") {
            let oid = hex(&sha2::Sha256::digest(content));
            entry["lfs"] = serde_json::json!({"oid": oid, "size": content.len(), "pointerSize": 134});
        }
        entries.push(entry);
    }
    entries
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn answer_file(
    stream: &mut TcpStream,
    content: Option<Vec<u8>>,
    fault: Option<Fault>,
    request: &Request,
) -> std::io::Result<()> {
    let Some(content) = content else { return refuse(stream, 404, Some("EntryNotFound")) };
    let asked = request.range.as_ref().and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
    let (from, end): (usize, usize) = match (&fault, asked) {
        (Some(Fault::WholeFile), _) | (_, None) => (0, content.len()),
        (_, Some((first, last))) => {
            (first.parse().unwrap(), last.parse().map_or(content.len(), |last: usize| (last + 1).min(content.len())))
        }
    };
    let is_part = from > 0 || end < content.len();
    let mut body = content[from.min(end)..end].to_vec();
    match &fault {
        Some(Fault::Status(status, code)) => return refuse(stream, *status, *code),
        Some(Fault::Redirect(to)) => {
            return write!(
                stream,
                "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
        }
        Some(Fault::Silent(pause)) => thread::sleep(*pause),
        Some(Fault::Flip) => body[0] ^= 1,
        Some(Fault::Short(length)) => body.truncate(*length),
        _ => {}
    }
    if from > 0 && from >= content.len() {
        return refuse(stream, 416, None);
    }
    let shift = usize::from(matches!(fault, Some(Fault::WrongRange)));
    let status = if is_part || shift > 0 { "206 Partial Content" } else { "200 OK" };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\nAccept-Ranges: bytes\r\nConnection: close\r\n",
        body.len() + if matches!(fault, Some(Fault::Overstated)) { 1000 } else { 0 }
    )?;
    if is_part || shift > 0 {
        write!(stream, "Content-Range: bytes {}-{}/{}\r\n", from + shift, end - 1, content.len())?;
    }
    stream.write_all(b"\r\n")?;
    match fault {
        Some(Fault::CutAfter(length)) => stream.write_all(&body[..length.min(body.len())]),
        Some(Fault::Slow(pause)) => body.chunks(1024).try_for_each(|chunk| {
            thread::sleep(pause);
            stream.write_all(chunk).and_then(|()| stream.flush())
        }),
        Some(Fault::Overstated) => {
            stream.write_all(&body)?;
            stream.flush()?;
            thread::sleep(Duration::from_secs(20));
            Ok(())
        }
        _ => stream.write_all(&body),
    }
}

fn send_json(stream: &mut TcpStream, headers: &str, json: &serde_json::Value) -> std::io::Result<()> {
    let body = json.to_string();
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n{body}", body.len())
}

fn refuse(stream: &mut TcpStream, status: u16, code: Option<&str>) -> std::io::Result<()> {
    let code = code.map(|code| format!("X-Error-Code: {code}\r\n")).unwrap_or_default();
    let body = "{\"error\":\"boom\"}";
    write!(stream, "HTTP/1.1 {status} No\r\n{code}Content-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}
