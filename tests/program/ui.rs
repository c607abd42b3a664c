//! `pipeline ui` and `pipeline report`: what they say is what is recorded, and nobody else hears it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Child;
use std::time::Duration;

use flate2::read::GzDecoder;
use serde_json::Value;
use test_harness::test;

use crate::support::Project;

/// A server on a port of its own, ended with the test.
struct Server {
    child: Child,
    address: String,
    token: Option<String>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(project: &Project, more: &[&str]) -> Self {
        let mut child = project.start(&[&["ui", "--port", "0"], more].concat());
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let link = line.trim().rsplit_once("http://").unwrap().1;
        let (address, token) = link.split_once('/').unwrap();
        let port = address.rsplit_once(':').unwrap().1;
        let token = token.strip_prefix("#token=").map(str::to_owned);
        Self { child, address: format!("127.0.0.1:{port}"), token }
    }

    fn send(&self, head: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "{head}\r\nConnection: close\r\n\r\n").unwrap();
        stream
    }

    fn ask(&self, head: &str) -> (u16, String, String) {
        let (status, head, body) = self.bytes(head);
        (status, head, String::from_utf8(body).unwrap())
    }

    fn bytes(&self, head: &str) -> (u16, String, Vec<u8>) {
        let mut answer = Vec::new();
        self.send(head).read_to_end(&mut answer).unwrap();
        let at = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        let (head, body) = (str::from_utf8(&answer[..at]).unwrap(), answer[at + 4..].to_vec());
        (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_lowercase(), body)
    }

    fn get(&self, path: &str) -> (u16, Value) {
        let token = self.token.iter().map(|token| format!("\r\nAuthorization: Bearer {token}")).collect::<String>();
        let (status, _, body) = self.ask(&format!("GET {path} HTTP/1.1\r\nHost: localhost{token}"));
        (status, serde_json::from_str(&body).unwrap_or_default())
    }
}

fn trained() -> Project {
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml"]).ends_with(0);
    project
}

#[test]
fn the_page_is_told_what_is_recorded() {
    let project = trained();
    let server = Server::start(&project, &[]);
    let (_, runs) = server.get("/api/runs");
    let run = runs["runs"][0]["run"].as_str().unwrap();
    assert_eq!(runs["runs"].as_array().unwrap().len(), 1);
    let (status, told) = server.get(&format!("/api/run?run={run}"));
    let shown = project.run(&["runs", "show", "--format", "json"]).ends_with(0);
    let mut shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    shown["graph"] = told["graph"].clone();
    for (shown, told) in shown["stages"].as_array_mut().unwrap().iter_mut().zip(told["stages"].as_array().unwrap()) {
        shown.as_object_mut().unwrap().retain(|name, _| told.get(name).is_some());
        assert_eq!(shown["stage"], told["stage"]);
    }
    assert_eq!((status, &told), (200, &shown));
    let stages = told["stages"].as_array().unwrap();
    let (_, head, packed) =
        server.bytes(&format!("GET /api/run?run={run} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip"));
    assert!(head.contains("content-encoding: gzip") && packed.len() < told.to_string().len() / 2, "{head}");
    let unpacked: Value = serde_json::from_reader(GzDecoder::new(packed.as_slice())).unwrap();
    assert_eq!(unpacked, told);
    let [nodes, edges] = ["nodes", "edges"].map(|part| told["graph"][part].as_array().unwrap());
    assert_eq!(nodes.len(), stages.len());
    let ends =
        |edge: &Value| ["from", "to"].map(|end| nodes[edge[end].as_u64().unwrap() as usize]["y"].as_i64().unwrap());
    assert!(!edges.is_empty() && edges.iter().map(ends).all(|[from, to]| from < to), "{edges:?}");
    let trains = stages.iter().find(|stage| stage["kind"] == "train").unwrap()["stage"].as_str().unwrap();
    let (_, figures) = server.get(&format!("/api/figures?run={run}&stage={trains}"));
    assert_eq!(figures[0]["kind"], "train", "{figures}");
    let (_, curve) = server.get(&format!("/api/curve?run={run}&stage={trains}&kind=train&figure=loss&smooth=0.5"));
    let length = |name: &str| curve[name].as_array().unwrap().len();
    assert!(
        length("values") > 1
            && ["steps", "tokens", "seconds", "smooth"].iter().all(|name| length(name) == length("values"))
    );
    assert_eq!(curve["smooth"][0], curve["values"][0]);
    let rows = stages.iter().find(|stage| stage["kind"] == "tokenize").unwrap()["stage"].as_str().unwrap();
    let (_, story) = server.get(&format!("/api/stage?run={run}&stage={rows}"));
    assert!(story["reports"][0].as_str().unwrap().contains("rows read"), "{story}");
    let (_, lengths) = server.get(&format!("/api/lengths?run={run}&stage={rows}&output=tokens"));
    let counted: u64 = lengths["documents"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!((counted, &lengths["rows"]), (lengths["of"].as_u64().unwrap(), &lengths["of"]), "{lengths}");
    let leases = server.get("/api/devices").1["leases"].clone();
    assert_eq!(leases.as_array().map(Vec::len), Some(0), "nothing computes on a device here");
    let (status, output) = server.get(&format!("/api/output?run={run}&stage={rows}&output=tokens&rows=2"));
    assert_eq!((status, output["rows"].as_array().map(Vec::len)), (200, Some(2)), "{output}");
    for path in ["/api/stage?run=latest", "/api/run?run=../../x", "/api/nothing", "/../Cargo.toml"] {
        assert_eq!(server.get(path).0, 404, "{path}");
    }
}

#[test]
fn changes_are_told_as_they_come() {
    let project = trained();
    let server = Server::start(&project, &[]);
    let mut events = BufReader::new(server.send("GET /api/changes HTTP/1.1\r\nHost: localhost")).lines();
    let mut next = || events.by_ref().map(Result::unwrap).find(|line| line.starts_with("data: ")).unwrap();
    let first = next();
    project.run(&["run", "lora.yaml"]).ends_with(0);
    assert_ne!(next(), first);
}

#[test]
fn other_sites_and_other_machines_are_kept_out() {
    let project = Project::with_pipeline("lora.yaml");
    let server = Server::start(&project, &[]);
    let (status, head, _) = server.ask("GET / HTTP/1.1\r\nHost: localhost");
    assert!(status == 200 && head.contains("default-src 'none'") && !head.contains("unsafe"), "{head}");
    assert_eq!(server.get("/api/runs").1["runs"], serde_json::json!([]));
    assert_eq!(server.ask("GET /api/runs HTTP/1.1\r\nHost: example.org").0, 400);
    assert_eq!(server.ask("POST /api/runs HTTP/1.1\r\nHost: localhost").0, 405);
    let open = Server::start(&project, &["--host", "0.0.0.0"]);
    assert_eq!(open.ask("GET /api/runs HTTP/1.1\r\nHost: example.org").0, 401);
    assert_eq!(open.get("/api/runs").0, 200);
    assert_ne!(open.token, None);
}

#[test]
fn a_port_that_is_taken_is_told() {
    let project = Project::with_pipeline("lora.yaml");
    let server = Server::start(&project, &[]);
    let port = server.address.rsplit_once(':').unwrap().1;
    let told = project.run(&["ui", "--port", port]).ends_with(3);
    assert!(told.stderr.contains("--port"), "{}", told.stderr);
}

#[test]
fn a_report_is_one_file() {
    let project = trained();
    project.run(&["run", "lora.yaml"]).ends_with(0);
    project.run(&["report", "latest~1", "-o", "report.html"]).ends_with(0);
    let page = std::fs::read_to_string(project.path("report.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("default-src 'none'") && !page.contains("<script"), "{page}");
    let text = project.run(&["report", "latest", "--compare", "latest~1"]).ends_with(0).stdout;
    assert!(text.contains("## Compared") && text.contains("## Stages"), "{text}");
    project.run(&["report", "-o", "report.pdf"]).ends_with(2);
}
