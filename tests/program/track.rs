//! Trackers: what they are told is what is recorded, and a run never waits for them.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use test_harness::{Requirement, Unmet, test};

use crate::support::{Project, Ran};

/// As much of MLflow's interface as a tracker needs, by its description (`mlflow/protos/service.proto`), in memory.
#[derive(Default)]
struct Served {
    experiments: Vec<String>,
    runs: BTreeMap<String, Value>,
    authorizations: Vec<Option<String>>,
    /// The most metrics and the most parameters of one request.
    most: (usize, usize),
}

struct Server {
    port: u16,
    served: Arc<Mutex<Served>>,
}

impl Server {
    fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    fn on(listener: TcpListener) -> Self {
        let port = listener.local_addr().unwrap().port();
        let served = Arc::new(Mutex::new(Served::default()));
        let of_thread = served.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                of_thread.lock().unwrap().answer(stream.unwrap());
            }
        });
        Self { port, served }
    }

    fn tracker(&self) -> String {
        format!("mlflow=http://127.0.0.1:{}", self.port)
    }

    /// The runs, by name.
    fn runs(&self) -> BTreeMap<String, Value> {
        let served = self.served.lock().unwrap();
        served.runs.values().map(|run| (run["name"].as_str().unwrap().to_owned(), run.clone())).collect()
    }
}

impl Served {
    fn answer(&mut self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap());
        let (mut first, mut length, mut authorization) = (String::new(), 0, None);
        lines.read_line(&mut first).unwrap();
        loop {
            let mut line = String::new();
            lines.read_line(&mut line).unwrap();
            let Some((name, value)) = line.trim().split_once(": ") else { break };
            match name.to_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "authorization" => authorization = Some(value.to_owned()),
                _ => {}
            }
        }
        self.authorizations.push(authorization);
        let mut body = vec![0; length];
        lines.read_exact(&mut body).unwrap();
        let path = first.split(' ').nth(1).unwrap().strip_prefix("/api/2.0/mlflow/").unwrap();
        let (status, answer) = self.of(path, &serde_json::from_slice(&body).unwrap_or_default());
        let answer = answer.to_string();
        let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", answer.len());
        stream.write_all((head + &answer).as_bytes()).unwrap();
    }

    fn of(&mut self, path: &str, asked: &Value) -> (u16, Value) {
        let text = |name: &str| asked[name].as_str().unwrap().to_owned();
        match path.split('?').next().unwrap() {
            "experiments/get-by-name" => {
                let name = path.split('=').nth(1).unwrap();
                match self.experiments.iter().position(|known| known == name) {
                    Some(at) => (200, json!({ "experiment": { "experiment_id": at.to_string() } })),
                    None => (404, json!({ "error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none" })),
                }
            }
            "experiments/create" => {
                self.experiments.push(text("name"));
                (200, json!({ "experiment_id": (self.experiments.len() - 1).to_string() }))
            }
            "runs/search" => {
                let folder = text("filter").split('\'').nth(1).unwrap().to_owned();
                let is_it = |run: &&Value| run["tags"]["pipeline.folder"] == folder;
                let found: Vec<Value> =
                    self.runs.values().filter(is_it).map(|run| json!({ "info": { "run_id": run["id"] } })).collect();
                (200, json!({ "runs": found }))
            }
            "runs/create" => {
                let id = format!("run{}", self.runs.len());
                let tags = asked["tags"].as_array().unwrap().iter();
                let tags: Value =
                    tags.map(|tag| (tag["key"].as_str().unwrap().to_owned(), tag["value"].clone())).collect();
                let run = json!({ "id": id, "name": asked["run_name"], "tags": tags, "status": "RUNNING", "params": {}, "metrics": [] });
                self.runs.insert(id.clone(), run);
                (200, json!({ "run": { "info": { "run_id": id } } }))
            }
            "runs/log-batch" => {
                let run = self.runs.get_mut(&text("run_id")).unwrap();
                let entries = |name: &str| asked[name].as_array().cloned().unwrap_or_default();
                let (metrics, parameters) = (entries("metrics"), entries("params"));
                self.most = (self.most.0.max(metrics.len()), self.most.1.max(parameters.len()));
                for parameter in parameters {
                    run["params"][parameter["key"].as_str().unwrap()] = parameter["value"].clone();
                }
                run["metrics"].as_array_mut().unwrap().extend(metrics);
                (200, json!({}))
            }
            "runs/update" => {
                let run = self.runs.get_mut(&text("run_id")).unwrap();
                run["status"] = asked["status"].clone();
                run["end_time"] = asked["end_time"].clone();
                (200, json!({}))
            }
            other => (404, json!({ "message": other })),
        }
    }
}

/// What a training told of its steps, as it is recorded: name, step and value.
fn told(project: &Project) -> Vec<(String, i64, f64)> {
    let runs = fs::read_dir(project.path(".pipeline/runs")).unwrap();
    let first = runs.map(|run| run.unwrap().path()).min().unwrap();
    let mut told = Vec::new();
    for line in fs::read_to_string(first.join("events.jsonl")).unwrap().lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        let values = &event["what"]["said"]["values"];
        if event["what"]["stage"] == "adapter" && values.is_object() {
            let (kind, step) = (values["kind"].as_str().unwrap(), values["step"].as_i64().unwrap());
            let numbers = values.as_object().unwrap().iter().filter(|(name, _)| *name != "step");
            told.extend(numbers.filter_map(|(name, value)| Some((format!("{kind}/{name}"), step, value.as_f64()?))));
        }
    }
    told
}

/// The metrics that a server has of a run, without those of its result.
fn by_step(run: &Value) -> Vec<(String, i64, f64)> {
    let metrics = run["metrics"].as_array().unwrap().iter();
    let of_steps = metrics.filter(|metric| metric["key"].as_str().unwrap().contains('/'));
    let figure = |metric: &Value| {
        let name = metric["key"].as_str().unwrap().to_owned();
        (name, metric["step"].as_i64().unwrap(), metric["value"].as_f64().unwrap())
    };
    of_steps.map(figure).collect()
}

fn unsent(project: &Project) -> usize {
    fs::read_dir(project.path(".pipeline/unsent")).map_or(0, Iterator::count)
}

#[test]
fn mlflow_is_told_of_parameters_figures_and_results() {
    let project = Project::with_pipeline("lora.yaml");
    let server = Server::start();
    let mut command = project.command(&["run", "lora.yaml", "--track", &server.tracker()]);
    command.env("MLFLOW_TRACKING_TOKEN", "hush-hush");
    Ran::of(command, &["run"]).ends_with(0);
    let runs = server.runs();
    let trained = &runs["adapter"];
    assert_eq!(by_step(trained), told(&project));
    assert_eq!((&trained["status"], &trained["tags"]["pipeline.kind"]), (&json!("FINISHED"), &json!("train")));
    assert_eq!(trained["params"]["lora.rank"], "4", "{trained}");
    let parent = runs.iter().find(|(name, _)| name.starts_with("lora ")).unwrap().1;
    assert_eq!((&parent["id"], &parent["status"]), (&trained["tags"]["mlflow.parentRunId"], &json!("FINISHED")));
    let results = parent["metrics"].as_array().unwrap();
    assert!(results.iter().any(|metric| metric["key"] == "adapter/last_loss"), "{results:?}");
    let served = server.served.lock().unwrap();
    assert!(served.authorizations.iter().all(|header| header.as_deref() == Some("Bearer hush-hush")));
    assert!(served.most.0 <= 1000 && served.most.1 <= 100);
    assert_eq!(unsent(&project), 0);
    let found = Command::new("grep").args(["-r", "hush-hush", "."]).current_dir(project.path("")).output().unwrap();
    assert!(found.stdout.is_empty(), "{}", String::from_utf8_lossy(&found.stdout));
}

#[test]
fn what_a_tracker_missed_is_sent_later_and_once() {
    let project = Project::with_pipeline("lora.yaml");
    // Reserved, and nobody answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let text = fs::read_to_string(project.path("lora.yaml")).unwrap();
    project.write("lora.yaml", &format!("{text}\ntrack: {{ name: mlflow, uri: \"http://127.0.0.1:{port}\" }}\n"));
    project.run(&["run", "lora.yaml"]).ends_with(0).warns("pipeline track");
    assert_eq!(unsent(&project), 1);
    project.run(&["track"]).ends_with(3);
    let server = Server::on(TcpListener::bind(("127.0.0.1", port)).unwrap());
    // Nothing is computed, but what is left is sent.
    project.run(&["run", "lora.yaml"]).ends_with(0);
    let once = server.runs();
    assert_eq!((by_step(&once["adapter"]), unsent(&project)), (told(&project), 0));
    project.run(&["track", "latest~1"]).ends_with(0);
    assert_eq!(by_step(&server.runs()["adapter"]), by_step(&once["adapter"]));
    assert_eq!(server.runs().len(), once.len());
}

#[test]
fn a_tracker_that_does_not_answer_costs_a_run_nothing() {
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml"]).ends_with(0);
    // It takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let tracker = format!("mlflow=http://{}", silent.local_addr().unwrap());
    let began = Instant::now();
    project.run(&["run", "lora.yaml", "--force", "adapter", "--track", &tracker]).ends_with(0);
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    assert_eq!(unsent(&project), 1);
}

#[test]
fn who_is_told_is_part_of_no_key() {
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml"]).ends_with(0);
    let text = fs::read_to_string(project.path("lora.yaml")).unwrap();
    project.write("lora.yaml", &format!("{text}\ntrack: [{{ name: wandb, project: x, tags: [a] }}, swanlab]\n"));
    let ran = project.run(&["run", "lora.yaml", "--format", "json"]).ends_with(0);
    assert_eq!(ran.json()["counts"]["done"], 0);
    project.run(&["run", "lora.yaml", "--track", "mlflow=http://me:secret@host"]).ends_with(2);
    project.write("lora.yaml", &format!("{text}\ntrack: {{ name: mlflow, uri: \"http://me:secret@host\" }}\n"));
    let told = project.run(&["validate", "lora.yaml"]).ends_with(2).reports("bad-value");
    assert!(told.stderr.contains("MLFLOW_TRACKING_TOKEN"), "{}", told.stderr);
}

/// The offline runs below a folder of a run's, by their ending.
fn offline(project: &Project, folder: &str, ending: &str) -> Vec<PathBuf> {
    let runs = fs::read_dir(project.path(".pipeline/runs")).unwrap();
    let first = runs.map(|run| run.unwrap().path()).min().unwrap().join(folder);
    let runs = fs::read_dir(first).unwrap().map(|run| run.unwrap().path());
    let mut files: Vec<PathBuf> = runs
        .flat_map(|run| fs::read_dir(run).unwrap())
        .map(|file| file.unwrap().path())
        .filter(|file| file.extension().is_some_and(|extension| extension == ending))
        .collect();
    files.sort();
    files
}

#[test]
fn offline_runs_are_the_same_each_time_that_they_are_written() {
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml", "--track", "wandb=p", "--track", "swanlab"]).ends_with(0);
    let files = [offline(&project, "wandb", "wandb"), offline(&project, "swanlog", "swanlab")].concat();
    assert!(files.len() >= 2 && unsent(&project) == 0, "{files:?}");
    let before: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    let told = project.run(&["track", "latest"]).ends_with(0).stderr;
    assert!(told.contains("wandb sync") && told.contains("swanlab sync"), "{told}");
    let after: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(before == after);
}

/// A Python with the trackers' own packages.
fn python() -> Result<String, Unmet> {
    let python = std::env::var("PIPELINE_TRACKERS_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let found = Command::new(&python).args(["-c", "import mlflow, wandb, swanlab"]).output();
    match found {
        Ok(output) if output.status.success() => Ok(python),
        _ => Err(Requirement::Trackers
            .unmet("no Python with mlflow, wandb and swanlab (PIPELINE_TRACKERS_PYTHON names one)")),
    }
}

/// `tests/support/read_trackers.py` with these arguments.
fn read(python: &str, arguments: &[&str]) -> Value {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/read_trackers.py");
    let output = Command::new(python).arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn their_own_packages_read_what_is_written() -> Result<(), Unmet> {
    let python = python()?;
    let project = Project::with_pipeline("lora.yaml");
    project.run(&["run", "lora.yaml", "--track", "wandb=p", "--track", "swanlab=p"]).ends_with(0);
    for (folder, ending) in [("wandb", "wandb"), ("swanlog", "swanlab")] {
        let files = offline(&project, folder, ending);
        let runs: Vec<Value> = files.iter().map(|file| read(&python, &[ending, &file.to_string_lossy()])).collect();
        let trained = runs.iter().find(|run| run["name"] == "adapter").unwrap();
        let mut figures: Vec<(String, i64, f64)> = serde_json::from_value(trained["figures"].clone()).unwrap();
        let mut expected = told(&project);
        figures.retain(|(name, ..)| name.contains('/'));
        let order = |one: &(String, i64, f64), other: &(String, i64, f64)| (&one.0, one.1).cmp(&(&other.0, other.1));
        figures.sort_by(order);
        expected.sort_by(order);
        assert_eq!(figures, expected, "{ending}");
        assert_eq!(trained["config"]["lora"]["rank"], 4, "{trained}");
        assert_eq!((&trained["project"], &trained["finished"]), (&json!("p"), &json!(true)));
        assert!(trained["results"]["last_loss"].is_number(), "{trained}");
    }
    Ok(())
}

/// A real server, ended with the test.
struct Mlflow(Child);

impl Drop for Mlflow {
    fn drop(&mut self) {
        // Its workers are of its process group.
        let _ = Command::new("kill").arg("--").arg(format!("-{}", self.0.id())).status();
        let _ = self.0.wait();
    }
}

#[test]
fn a_real_mlflow_server_has_what_is_recorded() -> Result<(), Unmet> {
    use std::os::unix::process::CommandExt;
    let python = python()?;
    let project = Project::with_pipeline("lora.yaml");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let mut server = Command::new(&python);
    server.args(["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", &port, "--workers", "1"]);
    server.args(["--backend-store-uri", "sqlite:///mlflow.db"]).current_dir(project.path("")).process_group(0);
    let _server = Mlflow(server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let uri = format!("http://127.0.0.1:{port}");
    let began = Instant::now();
    while read(&python, &["mlflow-is-up", &uri]) != json!(true) {
        assert!(began.elapsed() < Duration::from_secs(120), "the server does not start");
        std::thread::sleep(Duration::from_millis(500));
    }
    project.run(&["run", "lora.yaml", "--track", &format!("mlflow={uri}")]).ends_with(0);
    project.run(&["track", "latest", "--track", &format!("mlflow={uri}")]).ends_with(0);
    let runs = read(&python, &["mlflow", &uri, "lora"]);
    let trained = runs.as_array().unwrap().iter().find(|run| run["name"] == "adapter").unwrap();
    let mut figures: Vec<(String, i64, f64)> = serde_json::from_value(trained["figures"].clone()).unwrap();
    let mut expected = told(&project);
    let order = |one: &(String, i64, f64), other: &(String, i64, f64)| (&one.0, one.1).cmp(&(&other.0, other.1));
    figures.sort_by(order);
    expected.sort_by(order);
    assert_eq!(figures, expected);
    assert_eq!((&trained["params"]["lora.rank"], &trained["status"]), (&json!("4"), &json!("FINISHED")));
    assert!(trained["tags"]["mlflow.parentRunId"].is_string() && trained["results"]["last_loss"].is_number());
    Ok(())
}
