//! Trackers of experiments, which are told what runs have recorded: `pipeline track`, and each run while it goes on.
//!
//! A tracker is a reader of a run's record and nothing waits for it: what it misses, since it is down or the run was
//! killed, is still recorded, and sent by the next run or by `pipeline track`. Which runs those are, files in the home
//! say (`unsent/RUN`, which hold the trackers). TensorBoard's curves are written by training itself.

mod mlflow;
mod offline;
mod sender;
mod story;
mod swanlab;
mod wandb;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use engine::home::Home;
use engine::track::Tracker;

use crate::progress::Verbosity;
use crate::render::{self, Exit, Failure, Message};
use crate::runs::Past;
use crate::{Global, terminal, words};

use mlflow::Mlflow;
pub(crate) use sender::Sender;
use story::Story;
use swanlab::Swanlab;
use wandb::Wandb;

/// Send runs to trackers: a run that was not tracked, or what a tracker missed while it was down.
///
/// Credentials are read from the environment, and never from a file: `MLFLOW_TRACKING_TOKEN`, or
/// `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`. W&B and SwanLab get offline runs in the run's folder,
/// which `wandb sync` and `swanlab sync` send.
#[derive(Args)]
pub(crate) struct TrackArgs {
    /// The runs [default: all runs that were not sent completely].
    #[arg(value_name = "RUN")]
    runs: Vec<String>,
    #[command(flatten)]
    trackers: TrackerArgs,
}

/// The choice of trackers.
#[derive(Args, Default)]
pub(crate) struct TrackerArgs {
    /// Tracker that overrides the file's `track:`: `mlflow[=URI]`, `wandb[=PROJECT]`, `swanlab[=PROJECT]`, or `none`;
    /// may be given several times.
    #[arg(long = "track", value_name = "TRACKER", value_parser = named)]
    named: Vec<Named>,
}

/// What `--track` takes.
#[derive(Debug, Clone)]
enum Named {
    Tracker(Tracker),
    /// None at all.
    Nobody,
}

fn named(text: &str) -> Result<Named, String> {
    if text == "none" { Ok(Named::Nobody) } else { Tracker::parse(text).map(Named::Tracker) }
}

impl TrackerArgs {
    /// The trackers: those of the command line, else these.
    pub(crate) fn or(&self, below: Vec<Tracker>) -> Vec<Tracker> {
        if self.named.is_empty() {
            return below;
        }
        let trackers = self.named.iter().filter_map(|named| match named {
            Named::Tracker(tracker) => Some(tracker.clone()),
            Named::Nobody => None,
        });
        trackers.collect()
    }
}

/// Why a tracker could not be told.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrackError {
    #[error("no MLflow server is named")]
    NoServer,
    #[error("{0}")]
    Settings(String),
    #[error("cannot reach the MLflow server `{uri}`")]
    Unreachable { uri: String, source: reqwest::Error },
    #[error("the MLflow server `{uri}` rejected the request \
        ({status}){}{message}", if message.is_empty() { "" } else { ": " })]
    Refused { uri: String, status: u16, message: String },
    #[error("the MLflow server's response has an unknown format")]
    Answer,
    #[error("cannot keep what was sent")]
    Disk(#[source] io::Error),
}

impl TrackError {
    fn help(&self) -> Option<&'static str> {
        match self {
            Self::NoServer => Some("set `uri` of `track:`, `--track mlflow=URI` or MLFLOW_TRACKING_URI"),
            Self::Refused { status: 401 | 403, .. } => {
                Some("credentials are MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
            }
            Self::Unreachable { .. } => Some("nothing is lost: `pipeline track` sends it later"),
            Self::Settings(_) | Self::Refused { .. } | Self::Answer | Self::Disk(_) => None,
        }
    }
}

/// Sends runs.
pub(crate) fn run(args: &TrackArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let runs = match &args.runs[..] {
        [] => unsent(&past.home),
        named => named.iter().map(|name| Ok(past.find(name)?.run)).collect::<Result<_, Failure>>()?,
    };
    let mut failed = false;
    for run in &runs {
        let trackers = args.trackers.or(trackers_of(&past.home, run));
        if trackers.is_empty() {
            return Err(Failure::wrong(format!("run `{run}` has no tracker"))
                .with_help("name one: `--track mlflow=URI`, `--track wandb` or `--track swanlab`"));
        }
        for (tracker, sent) in send_run(&past.home, run, &trackers).map_err(Failure::machine)? {
            match sent {
                Ok(sent) if global.verbosity() > Verbosity::Quiet => sent.tell(run, &tracker),
                Ok(_) => {}
                Err(error) => {
                    failed = true;
                    let texts: Vec<String> = causes(&error).collect();
                    render::message(&Message::chain(&texts, error.help().map(str::to_owned)));
                }
            }
        }
    }
    if runs.is_empty() && global.verbosity() > Verbosity::Quiet {
        terminal::tell_line("nothing is left to be sent");
    }
    Failure::after(if failed { Exit::Machine } else { Exit::Done }, Ok(()))
}

/// An error and what caused it, outermost first.
fn causes(error: &dyn std::error::Error) -> impl Iterator<Item = String> {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string)
}

/// How far a tracker has been told.
#[derive(Debug)]
enum Sent {
    /// All of the run.
    All(Vec<PathBuf>),
    /// What there is so far of a run that goes on.
    SoFar,
}

impl Sent {
    fn tell(&self, run: &str, tracker: &Tracker) {
        let name = tracker.name();
        match self {
            Self::SoFar => terminal::tell_line(format_args!("{name}: run {run}, as far as it is")),
            Self::All(folders) if folders.is_empty() => terminal::tell_line(format_args!("{name}: run {run}")),
            Self::All(folders) => {
                for folder in folders {
                    terminal::tell_line(format_args!("{name}: run {run}: {name} sync {}", words::path(folder)));
                }
            }
        }
    }
}

/// Tells a tracker of one run.
enum Link {
    Mlflow(Box<Mlflow>),
    /// Written whole at the end: `wandb` and `swanlab`.
    Files(Tracker),
}

impl Link {
    fn open(tracker: &Tracker, pipeline: &str, folder: &Path) -> Result<Self, TrackError> {
        match tracker {
            Tracker::Mlflow { uri, experiment, tags } => {
                let experiment = experiment.clone().unwrap_or_else(|| pipeline.to_owned());
                Ok(Self::Mlflow(Box::new(Mlflow::open(uri.as_deref(), experiment, tags, &tracking(folder))?)))
            }
            Tracker::Wandb { .. } | Tracker::Swanlab { .. } => Ok(Self::Files(tracker.clone())),
        }
    }

    /// Events of which a story needs no figures for it.
    fn skips(&self) -> usize {
        match self {
            Self::Mlflow(mlflow) => mlflow.events(),
            Self::Files(_) => 0,
        }
    }

    fn send(&mut self, story: &mut Story) -> Result<Sent, TrackError> {
        match self {
            Self::Mlflow(mlflow) => {
                mlflow.send(story)?;
                Ok(if mlflow.is_complete() { Sent::All(Vec::new()) } else { Sent::SoFar })
            }
            Self::Files(_) if story.ended.is_none() => Ok(Sent::SoFar),
            Self::Files(tracker) => write(tracker, story).map(Sent::All).map_err(TrackError::Disk),
        }
    }
}

fn write(tracker: &Tracker, story: &Story) -> io::Result<Vec<PathBuf>> {
    let or_pipeline = |project: &'_ Option<String>| project.clone().unwrap_or_else(|| story.plan.pipeline.clone());
    match tracker {
        Tracker::Wandb { project, entity, tags } => {
            Wandb { project: &or_pipeline(project), entity: entity.as_deref(), tags }.write(story)
        }
        Tracker::Swanlab { project, workspace, tags } => {
            Swanlab { project: &or_pipeline(project), workspace: workspace.as_deref(), tags }.write(story)
        }
        Tracker::Mlflow { .. } => Ok(Vec::new()),
    }
}

type Outcome = (Tracker, Result<Sent, TrackError>);

/// Sends all that is recorded of a run, and remembers whether that is all of it.
fn send_run(home: &Home, run: &str, trackers: &[Tracker]) -> io::Result<Vec<Outcome>> {
    let folder = home.run(run);
    fs::create_dir_all(tracking(&folder))?;
    // Another program that sends this run does all that this one would.
    let Some(_lock) = lock(&folder)? else { return Ok(Vec::new()) };
    let mut outcomes = Vec::new();
    for tracker in trackers {
        let sent = (|| {
            let pipeline = Story::open(&folder, 0).map_err(TrackError::Disk)?.plan.pipeline;
            let mut link = Link::open(tracker, &pipeline, &folder)?;
            let mut story = Story::open(&folder, link.skips()).map_err(TrackError::Disk)?;
            story.read_on().map_err(TrackError::Disk)?;
            link.send(&mut story)
        })();
        outcomes.push((tracker.clone(), sent));
    }
    if outcomes.iter().all(|(_, sent)| matches!(sent, Ok(Sent::All(_)))) {
        all_sent(home, run)?;
    } else {
        not_all_sent(home, run, trackers)?;
    }
    Ok(outcomes)
}

/// Where it is kept what trackers know of a run.
fn tracking(folder: &Path) -> PathBuf {
    folder.join("tracking")
}

/// The right to send a run; `None` where another program has it.
fn lock(folder: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().create(true).append(true).open(tracking(folder).join("lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(fs::TryLockError::WouldBlock) => Ok(None),
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

/// The runs of which something is still to be sent, the oldest first.
fn unsent(home: &Home) -> Vec<String> {
    let entries = fs::read_dir(home.unsent()).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut runs: Vec<String> = names.filter(|run| home.run(run).is_dir()).collect();
    runs.sort();
    runs
}

/// The trackers of a run: those that still miss something of it, else those of its plan.
fn trackers_of(home: &Home, run: &str) -> Vec<Tracker> {
    let missing = fs::read(home.unsent().join(run)).ok().and_then(|text| serde_json::from_slice(&text).ok());
    missing.or_else(|| Some(Story::open(&home.run(run), 0).ok()?.plan.track)).unwrap_or_default()
}

fn not_all_sent(home: &Home, run: &str, trackers: &[Tracker]) -> io::Result<()> {
    fs::create_dir_all(home.unsent())?;
    replace(&home.unsent().join(run), &serde_json::to_vec(trackers)?)
}

fn all_sent(home: &Home, run: &str) -> io::Result<()> {
    match fs::remove_file(home.unsent().join(run)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a file whole: a reader sees what was there or what is.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".partial");
    fs::write(&beside, bytes)?;
    fs::rename(&beside, path)
}
