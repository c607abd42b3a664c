//! `pipeline serve` at a port of its own, and clients of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::Project;

/// A server, ended with the test, and the project that it serves a model of.
pub(crate) struct Server<P = Project> {
    pub child: Child,
    pub address: String,
    /// What it has printed on standard error.
    pub said: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
    pub project: P,
}

impl<P> Drop for Server<P> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<P> Server<P> {
    /// Waits until a program that was started serves.
    pub(crate) fn of(mut child: Child, project: P) -> Self {
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let said = Arc::new(Mutex::new(String::new()));
        let mut heard = String::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("it does not serve:\n{heard}"));
            heard += &format!("{line}\n");
            if let Some((_, address)) = line.starts_with("serving ").then(|| line.rsplit_once("http://")).flatten() {
                break address.trim_end_matches("/v1").to_owned();
            }
        };
        said.lock().unwrap().push_str(&heard);
        let more = Arc::clone(&said);
        // Else the program's next line would find its pipe closed.
        let reader = std::thread::spawn(move || lines.for_each(|line| *more.lock().unwrap() += &format!("{line}\n")));
        Self { child, address, said, reader: Some(reader), project }
    }

    /// Waits until it has ended: its exit code, and all that it has printed on standard error.
    pub(crate) fn ended(&mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        (code, self.said.lock().unwrap().clone())
    }

    pub(crate) fn send(&self, head: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        write!(stream, "{head}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}").unwrap();
        stream
    }

    pub(crate) fn ask(&self, head: &str, body: &str) -> (u16, String) {
        let mut answer = String::new();
        self.send(head, body).read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, answer) = self.ask(&head(path), &body.to_string());
        (status, serde_json::from_str(&answer).unwrap())
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    pub(crate) fn metrics(&self) -> String {
        self.ask("GET /metrics HTTP/1.1\r\nHost: localhost", "").1
    }

    pub(crate) fn metric(&self, name: &str) -> u64 {
        let text = self.metrics();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned));
        line.unwrap().trim().parse().unwrap()
    }
}

/// The head of a request with a body.
pub(crate) fn head(path: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json")
}
