//! What the page asks for, as JSON. What is meant is in the query: ids of runs and stages may hold anything.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use engine::history::{LOG_FILE, Recorded, RunSummary, Words};
use engine::home::Home;
use http_server::{Method, Refusal, Request, Response, Service, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};

use super::assets;
use super::changes::Changes;
use super::curves::{Curves, Wanted};
use super::graph;
use crate::render::Failure;
use crate::runs::{Past, StageStory, compare, stage_of};
use crate::{Global, cache, devices, show};

/// Rows of an output that are shown at most.
const MOST_ROWS: u64 = 200;

/// Bytes of a log that are sent at once: its end.
const MOST_OF_A_LOG: u64 = 256 << 10;

/// What the page asks of one stage at a time (`/api/stage`): a run may have a thousand.
const OF_ONE_STAGE: [&str; 6] = ["key", "threads", "warnings", "inputs", "needs", "outputs"];

/// What went wrong.
#[derive(Serialize)]
struct Problem<'a> {
    error: &'a str,
    /// What to do about it.
    help: Option<&'a str>,
}

/// The runs of a home; there may be none yet, as it is made by the first run.
#[derive(Default, Serialize)]
struct Runs {
    home: Option<PathBuf>,
    runs: Vec<RunSummary>,
}

/// A piece of a stage's log, and where in the log it is, in bytes.
#[derive(Default, Serialize)]
struct LogPiece {
    text: String,
    from: u64,
    to: u64,
}

/// Answers the page's requests from what is recorded in a home.
pub(super) struct Api(Arc<Looks>);

struct Looks {
    global: Global,
    curves: Mutex<Curves>,
}

impl Api {
    /// Looks where the command line says.
    pub(super) fn new(global: &Global) -> Self {
        Self(Arc::new(Looks { global: global.clone(), curves: Mutex::default() }))
    }
}

impl Service for Api {
    fn is_public(&self, path: &str) -> bool {
        // The page itself: what it shows asks for a token.
        assets::has(path)
    }

    async fn respond(&self, request: Request) -> Response {
        if request.method != Method::GET {
            return problem(StatusCode::METHOD_NOT_ALLOWED, "this page only looks: GET", None);
        }
        if let Some(file) = assets::get(&request.path) {
            return file;
        }
        let looks = Arc::clone(&self.0);
        if request.path == "/api/changes" {
            return match looks.changes(&request) {
                Ok(changes) => Response::events(Box::new(changes)),
                Err(failure) => failed(&failure),
            };
        }
        let answered = tokio::task::spawn_blocking(move || looks.answer(&request)).await;
        match answered {
            Ok(Some(Ok(json))) => assets::guarded(Response::json(StatusCode::OK, json)),
            Ok(Some(Err(failure))) => failed(&failure),
            Ok(None) => problem(StatusCode::NOT_FOUND, "there is no such page", None),
            Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "this request met a defect of the program", None),
        }
    }

    fn refuse(&self, refusal: Refusal) -> Response {
        let message = match refusal {
            Refusal::Host => "this server is called by another name: another site's page may have led here",
            Refusal::Token => "the token of the link that `pipeline ui` printed is wanted",
            Refusal::BodyTooLarge { .. } | Refusal::BodyTimeout | Refusal::BadBody => "this page only looks: GET",
        };
        problem(refusal.status(), message, None)
    }
}

fn problem(status: StatusCode, message: &str, help: Option<&str>) -> Response {
    let json = serde_json::to_string(&Problem { error: message, help }).expect("texts are JSON");
    assets::guarded(Response::json(status, json))
}

fn failed(failure: &Failure) -> Response {
    let (messages, help) = failure.told();
    problem(StatusCode::NOT_FOUND, &messages.join(": "), help)
}

/// The value that a request has to have.
fn wanted(request: &Request, name: &str) -> Result<String, Failure> {
    request.value(name).ok_or_else(|| Failure::wrong(format!("the request lacks `{name}`")))
}

fn number(request: &Request, name: &str) -> Option<f64> {
    request.value(name)?.parse().ok().filter(|value: &f64| value.is_finite())
}

/// An answer as it is sent.
fn sent(answer: &impl Serialize) -> Result<String, Failure> {
    Ok(serde_json::to_string(answer).map_err(std::io::Error::from)?)
}

impl Looks {
    /// What is asked for, as JSON; `None` where it is nothing that there is.
    fn answer(&self, request: &Request) -> Option<Result<String, Failure>> {
        Some(match request.path.as_str() {
            "/api/runs" => self.runs(),
            "/api/run" => self.run(request),
            "/api/stage" => self.stage(request),
            "/api/log" => self.log(request),
            "/api/figures" => self.available(request),
            "/api/curve" => self.curve(request),
            "/api/output" => self.output(request),
            "/api/lengths" => self.lengths(request),
            "/api/compare" => self.compare(request),
            "/api/store" => cache::usage(self.home().as_ref()).and_then(|usage| sent(&usage)),
            "/api/devices" => sent(&devices::Here::now()),
            _ => return None,
        })
    }

    fn home(&self) -> Option<Home> {
        self.global.home_here()
    }

    fn past(&self) -> Result<Past, Failure> {
        Past::open(&self.global)
    }

    fn recorded(&self, request: &Request, past: &Past, words: Words) -> Result<Recorded, Failure> {
        past.recorded(&past.find(&wanted(request, "run")?)?.run, words)
    }

    fn changes(&self, request: &Request) -> Result<Changes, Failure> {
        let Some(run) = request.value("run") else {
            let runs = self.home().map(|home| home.runs()).unwrap_or_default();
            return Ok(Changes::of(runs));
        };
        let past = self.past()?;
        let folder = past.home.run(&past.find(&run)?.run);
        Ok(Changes::of(engine::history::events_file(&folder)))
    }

    fn runs(&self) -> Result<String, Failure> {
        let Some(home) = self.home() else { return sent(&Runs::default()) };
        let past = Past::of(home)?;
        let runs = past.history.runs().map_err(Failure::machine)?;
        sent(&Runs { home: Some(past.home.root().to_owned()), runs })
    }

    fn run(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Skip)?;
        let open: BTreeSet<String> = request.values("open").collect();
        let mut value = json!(recorded.view());
        for stage in value["stages"].as_array_mut().into_iter().flatten().filter_map(Value::as_object_mut) {
            stage.retain(|name, _| !OF_ONE_STAGE.contains(&name.as_str()));
        }
        value["graph"] = json!(graph::draw(&recorded, &open));
        sent(&value)
    }

    fn stage(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Read)?;
        let stage = stage_of(&recorded, &wanted(request, "stage")?)?;
        sent(&StageStory::of(&past, &recorded, stage)?.view())
    }

    /// The end of a stage's log, or what came since `from`.
    fn log(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Skip)?;
        let stage = &stage_of(&recorded, &wanted(request, "stage")?)?.summary.stage;
        let Ok(mut log) = File::open(recorded.stage_folder(stage).join(LOG_FILE)) else {
            return sent(&LogPiece::default());
        };
        let length = log.metadata()?.len();
        let asked = number(request, "from").map_or(0, |from| from as u64).min(length);
        let from = asked.max(length.saturating_sub(MOST_OF_A_LOG));
        log.seek(SeekFrom::Start(from))?;
        let mut text = Vec::new();
        log.take(length - from).read_to_end(&mut text)?;
        let to = from + text.len() as u64;
        sent(&LogPiece { text: String::from_utf8_lossy(&text).into_owned(), from, to })
    }

    fn available(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Skip)?;
        let mut curves = self.curves.lock().unwrap_or_else(PoisonError::into_inner);
        sent(&curves.available(&past, &recorded, &wanted(request, "stage")?)?)
    }

    fn curve(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Skip)?;
        let curve = Wanted {
            kind: wanted(request, "kind")?,
            figure: wanted(request, "figure")?,
            smooth: number(request, "smooth").filter(|weight| (0.0..1.0).contains(weight)),
            from: number(request, "from"),
            to: number(request, "to"),
        };
        let mut curves = self.curves.lock().unwrap_or_else(PoisonError::into_inner);
        sent(&curves.curve(&past, &recorded, &wanted(request, "stage")?, &curve)?)
    }

    fn output(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Skip)?;
        let rows = number(request, "rows").map_or(20, |rows| rows as u64).min(MOST_ROWS);
        let (stage, output) = (wanted(request, "stage")?, wanted(request, "output")?);
        sent(&show::of_run(&past, &recorded, &stage, &output, rows)?)
    }

    fn lengths(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let recorded = self.recorded(request, &past, Words::Skip)?;
        let (stage, output) = (wanted(request, "stage")?, wanted(request, "output")?);
        sent(&show::lengths_of_run(&past, &recorded, &stage, &output)?)
    }

    fn compare(&self, request: &Request) -> Result<String, Failure> {
        let past = self.past()?;
        let runs: Vec<String> = request.values("run").collect();
        let comparison = match request.value("sweep") {
            Some(sweep) => compare::of_children(&past, &wanted(request, "run")?, &sweep)?,
            None => compare::of_runs(&past, &runs, false)?,
        };
        sent(&comparison.view(compare::ParameterForm::Texts))
    }
}
