//! MLflow's tracking server, by its REST interface: a run of ours is a run there, and each stage with figures a run
//! nested in it.
//!
//! How far it was told is kept in the run's folder. What is sent twice, since the answer was lost, MLflow knows as the
//! same: a metric is one by its name, step, time and value, and runs are looked for by our tags before they are made.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use engine::history::{RunState, stage_folder};
use engine::limits;
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Client, StatusCode, Url};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};

use super::story::{Ended, Millis, StageStory, Story, flat};
use super::{TrackError, replace};

/// How long the server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a request may hold, by the interface's own limits.
const MOST_METRICS: usize = 1000;
const MOST_PARAMETERS: usize = 100;
/// Letters of a parameter's value, which older servers do not take more of.
const LONGEST_VALUE: usize = 500;
const LONGEST_NAME: usize = 250;

/// The tag by which a run is found again.
const FOLDER_TAG: &str = "pipeline.folder";

/// A server, and what it has been told of a run.
pub(super) struct Mlflow {
    client: Client,
    runtime: Runtime,
    authorization: Option<HeaderValue>,
    experiment: String,
    tags: Vec<String>,
    sent: Sent,
    file: PathBuf,
}

/// What a server has been told of a run.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Sent {
    uri: String,
    experiment_id: Option<String>,
    run_id: Option<String>,
    stages: BTreeMap<String, SentStage>,
    /// Events whose figures it has.
    events: usize,
    complete: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct SentStage {
    run_id: String,
    ended: bool,
}

impl Mlflow {
    /// Goes on with what was told before.
    ///
    /// # Errors
    /// Fails where no server is named, or what the environment says of it cannot be used.
    pub(super) fn open(
        uri: Option<&str>,
        experiment: String,
        tags: &[String],
        folder: &std::path::Path,
    ) -> Result<Self, TrackError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let uri = uri.map(str::to_owned).or_else(|| variable("MLFLOW_TRACKING_URI"));
        let uri = uri.ok_or(TrackError::NoServer)?;
        engine::track::check_uri(&uri).map_err(TrackError::Settings)?;
        let uri = uri.trim_end_matches('/').to_owned();
        let file = folder.join("mlflow.json");
        let known = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Sent>(&text).ok());
        let sent = known.filter(|sent| sent.uri == uri).unwrap_or_else(|| Sent { uri, ..Sent::default() });
        cache::remote::provide_tls();
        let client = Client::builder().timeout(PATIENCE).connect_timeout(PATIENCE / 2).build();
        Ok(Self {
            client: client.map_err(|error| TrackError::Settings(error.to_string()))?,
            runtime: limits::event_loop(&mut Builder::new_current_thread()).map_err(TrackError::Disk)?,
            authorization: authorization(&variable)?,
            experiment,
            tags: tags.to_vec(),
            sent,
            file,
        })
    }

    /// Events whose figures are with the server.
    pub(super) fn events(&self) -> usize {
        self.sent.events
    }

    /// Whether nothing more is to be told.
    pub(super) fn is_complete(&self) -> bool {
        self.sent.complete
    }

    /// Tells what the server does not have yet.
    ///
    /// # Errors
    /// Fails where the server is not there or refuses; what it has taken until then is known.
    pub(super) fn send(&mut self, story: &mut Story) -> Result<(), TrackError> {
        let tracked: Vec<usize> = story.tracked().map(|(at, _)| at).collect();
        for at in tracked {
            self.send_stage(story, at)?;
        }
        if let (Some((state, time)), Some(run)) = (story.ended, self.sent.run_id.clone()) {
            let results: Vec<Value> = story
                .tracked()
                .flat_map(|(at, stage)| {
                    let id = &story.plan.stages[at].id;
                    stage.results.iter().map(move |(name, value)| metric(&format!("{id}/{name}"), *value, time, 0))
                })
                .collect();
            self.log(&run, "metrics", &results, MOST_METRICS)?;
            self.end(&run, status(state), time)?;
        }
        self.sent.complete = story.ended.is_some();
        self.sent.events = story.read;
        self.save()
    }

    fn send_stage(&mut self, story: &mut Story, at: usize) -> Result<(), TrackError> {
        let id = story.plan.stages[at].id.clone();
        let run = self.stage_run(story, at)?;
        let Some(stage) = story.stages.get_mut(&at) else { return Ok(()) };
        let many = |figures: &super::story::Figures| figures.values.len();
        while !stage.figures.is_empty() {
            let mut metrics = 0;
            let fits = stage.figures.iter().take_while(|figures| {
                metrics += many(figures);
                metrics <= MOST_METRICS
            });
            let count = fits.count().max(1);
            let batch: Vec<Value> = stage.figures[..count]
                .iter()
                .flat_map(|told| told.values.iter().map(|(name, value)| metric(name, *value, told.time, told.step)))
                .collect();
            self.log(&run, "metrics", &batch, MOST_METRICS)?;
            stage.figures.drain(..count);
        }
        let ended = stage.ended.or(story.ended.map(|(_, time)| (Ended::Failed, time)));
        if let (Some((how, time)), false) = (ended, self.sent.stages[&id].ended) {
            let results: Vec<Value> =
                story.stages[&at].results.iter().map(|(name, value)| metric(name, *value, time, 0)).collect();
            self.log(&run, "metrics", &results, MOST_METRICS)?;
            self.end(&run, if how == Ended::Done { "FINISHED" } else { "FAILED" }, time)?;
            if let Some(sent) = self.sent.stages.get_mut(&id) {
                sent.ended = true;
            }
            self.save()?;
        }
        Ok(())
    }

    /// The server's run of a stage, made if it is not there.
    fn stage_run(&mut self, story: &Story, at: usize) -> Result<String, TrackError> {
        let (plan, planned) = (&story.plan, &story.plan.stages[at]);
        if let Some(sent) = self.sent.stages.get(&planned.id) {
            return Ok(sent.run_id.clone());
        }
        let parent = self.parent(story)?;
        let stage: &StageStory = &story.stages[&at];
        let tags = [
            (FOLDER_TAG, format!("{}/{}", plan.run, stage_folder(&planned.id))),
            ("pipeline.stage", planned.id.clone()),
            ("pipeline.kind", planned.kind.clone()),
            ("mlflow.parentRunId", parent),
        ];
        let run = self.find_or_make(story, &planned.id, stage.started, &tags)?;
        let values = flat(&planned.parameters).into_iter().chain(planned.axes.clone());
        let by_name: BTreeMap<String, Value> = values.filter(|(_, value)| !value.is_null()).collect();
        let parameters: Vec<Value> =
            by_name.iter().map(|(name, value)| json!({ "key": named(name), "value": text(value) })).collect();
        self.log(&run, "params", &parameters, MOST_PARAMETERS)?;
        self.sent.stages.insert(planned.id.clone(), SentStage { run_id: run.clone(), ended: false });
        self.save()?;
        Ok(run)
    }

    /// The server's run that those of the stages are nested in.
    fn parent(&mut self, story: &Story) -> Result<String, TrackError> {
        if let Some(run) = &self.sent.run_id {
            return Ok(run.clone());
        }
        let name = format!("{} {}", story.plan.pipeline, story.plan.run);
        let tags = [(FOLDER_TAG, story.plan.run.clone())];
        let run = self.find_or_make(story, &name, super::story::millis(&story.plan.started), &tags)?;
        self.sent.run_id = Some(run.clone());
        self.save()?;
        Ok(run)
    }

    fn find_or_make(
        &mut self,
        story: &Story,
        name: &str,
        start: Millis,
        own: &[(&str, String)],
    ) -> Result<String, TrackError> {
        let experiment = self.experiment_id()?;
        let filter = format!("tags.`{FOLDER_TAG}` = '{}'", own[0].1);
        let wanted = json!({ "experiment_ids": [experiment], "filter": filter, "max_results": 1 });
        let found = self.post("runs/search", &wanted)?;
        if let Some(run) = found["runs"][0]["info"]["run_id"].as_str() {
            return Ok(run.to_owned());
        }
        let of_all = [
            ("pipeline", story.plan.pipeline.clone()),
            ("pipeline.run", story.plan.run.clone()),
            ("pipeline.version", story.plan.program.clone()),
            ("pipeline.host", story.plan.host.name.clone()),
            ("mlflow.source.name", story.plan.file.display().to_string()),
            ("mlflow.source.type", "LOCAL".to_owned()),
        ];
        let tag = |key: &str, value: &str| json!({ "key": key, "value": value });
        let mut tags: Vec<Value> = own.iter().chain(&of_all).map(|(key, value)| tag(key, value)).collect();
        tags.extend(self.tags.iter().map(|text| {
            let (key, value) = text.split_once('=').unwrap_or((text, ""));
            tag(key, value)
        }));
        let made = json!({ "experiment_id": experiment, "run_name": name, "start_time": start, "tags": tags });
        let made = self.post("runs/create", &made)?;
        text_of(&made["run"]["info"]["run_id"])
    }

    fn experiment_id(&mut self) -> Result<String, TrackError> {
        if let Some(id) = &self.sent.experiment_id {
            return Ok(id.clone());
        }
        let id = match self.experiment_by_name()? {
            Some(id) => id,
            None => match self.post("experiments/create", &json!({ "name": self.experiment })) {
                Ok(made) => text_of(&made["experiment_id"])?,
                // Another run has made it in the meantime.
                Err(refused) => self.experiment_by_name()?.ok_or(refused)?,
            },
        };
        self.sent.experiment_id = Some(id.clone());
        self.save()?;
        Ok(id)
    }

    fn experiment_by_name(&self) -> Result<Option<String>, TrackError> {
        let name = [("experiment_name", &self.experiment)];
        let url = Url::parse_with_params(&self.address("experiments/get-by-name"), &name)
            .map_err(|error| TrackError::Settings(error.to_string()))?;
        match self.answer(self.client.get(url)) {
            Ok(found) => text_of(&found["experiment"]["experiment_id"]).map(Some),
            Err(TrackError::Refused { status: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends entries of a run, no more at once than a request may hold.
    fn log(&self, run: &str, what: &str, entries: &[Value], most: usize) -> Result<(), TrackError> {
        for entries in entries.chunks(most) {
            self.post("runs/log-batch", &json!({ "run_id": run, what: entries }))?;
        }
        Ok(())
    }

    fn end(&self, run: &str, status: &str, time: Millis) -> Result<(), TrackError> {
        self.post("runs/update", &json!({ "run_id": run, "status": status, "end_time": time })).map(drop)
    }

    fn post(&self, method: &str, body: &Value) -> Result<Value, TrackError> {
        self.answer(self.client.post(self.address(method)).json(body))
    }

    fn address(&self, method: &str) -> String {
        format!("{}/api/2.0/mlflow/{method}", self.sent.uri)
    }

    fn answer(&self, request: reqwest::RequestBuilder) -> Result<Value, TrackError> {
        let request = match &self.authorization {
            Some(authorization) => request.header(AUTHORIZATION, authorization.clone()),
            None => request,
        };
        let unreachable =
            |error: reqwest::Error| TrackError::Unreachable { uri: self.sent.uri.clone(), source: error.without_url() };
        let (status, text) = self.runtime.block_on(async {
            let answer = request.send().await.map_err(unreachable)?;
            let status = answer.status();
            Ok::<_, TrackError>((status, answer.text().await.map_err(unreachable)?))
        })?;
        let said: Value = serde_json::from_str(&text).unwrap_or_default();
        if status == StatusCode::OK {
            return Ok(said);
        }
        let message = said["message"].as_str().unwrap_or_default().chars().take(300).collect();
        Err(TrackError::Refused { uri: self.sent.uri.clone(), status: status.as_u16(), message })
    }

    fn save(&self) -> Result<(), TrackError> {
        let text = serde_json::to_vec_pretty(&self.sent).map_err(std::io::Error::from).map_err(TrackError::Disk)?;
        replace(&self.file, &text).map_err(TrackError::Disk)
    }
}

/// What the environment knows of the server's users.
fn authorization(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<HeaderValue>, TrackError> {
    let bearer = variable("MLFLOW_TRACKING_TOKEN").map(|token| format!("Bearer {}", token.trim()));
    let basic = || {
        let user = variable("MLFLOW_TRACKING_USERNAME")?;
        let password = variable("MLFLOW_TRACKING_PASSWORD").unwrap_or_default();
        Some(format!("Basic {}", base64(format!("{user}:{password}").as_bytes())))
    };
    let Some(text) = bearer.or_else(basic) else { return Ok(None) };
    let mut header = HeaderValue::from_str(&text)
        .map_err(|_| TrackError::Settings("MLFLOW_TRACKING_TOKEN cannot be sent in a request".to_owned()))?;
    header.set_sensitive(true);
    Ok(Some(header))
}

/// RFC 4648.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits = three.iter().chain([0, 0].iter()).take(3).fold(0u32, |bits, byte| bits << 8 | u32::from(*byte));
        for at in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= three.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

fn metric(name: &str, value: f64, time: Millis, step: i64) -> Value {
    json!({ "key": named(name), "value": value, "timestamp": time, "step": step })
}

/// A name that the server takes: letters, digits, `_`, `-`, `.`, `/` and spaces.
fn named(name: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "_-./ ".contains(letter);
    name.chars().map(|letter| if plain(letter) { letter } else { '_' }).take(LONGEST_NAME).collect()
}

fn text(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    if text.chars().count() <= LONGEST_VALUE {
        return text;
    }
    text.chars().take(LONGEST_VALUE - 1).chain(['…']).collect()
}

fn text_of(value: &Value) -> Result<String, TrackError> {
    value.as_str().map(str::to_owned).ok_or(TrackError::Answer)
}

fn status(state: RunState) -> &'static str {
    match state {
        RunState::Running => "RUNNING",
        RunState::Succeeded => "FINISHED",
        RunState::Failed => "FAILED",
        RunState::CutOff | RunState::Interrupted => "KILLED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_encoded_as_basic_authentication() {
        // RFC 7617, section 2, and RFC 4648, section 10.
        assert_eq!(base64(b"Aladdin:open sesame"), "QWxhZGRpbjpvcGVuIHNlc2FtZQ==");
        assert_eq!(["", "f", "fo", "foo"].map(|text| base64(text.as_bytes())), ["", "Zg==", "Zm8=", "Zm9v"]);
    }

    #[test]
    fn a_token_goes_before_a_user_and_is_not_shown() {
        let with = |names: &'static [(&str, &str)]| {
            authorization(&|name| names.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
                .unwrap()
        };
        let header = with(&[
            ("MLFLOW_TRACKING_TOKEN", "abc"),
            ("MLFLOW_TRACKING_USERNAME", "u"),
            ("MLFLOW_TRACKING_PASSWORD", "p"),
        ]);
        assert_eq!(header.as_ref().unwrap(), "Bearer abc");
        assert!(!format!("{header:?}").contains("abc"));
        assert_eq!(with(&[]), None);
    }

    #[test]
    fn names_are_those_that_the_server_takes() {
        assert_eq!(named("adapter[lora.rank=4]/last_loss"), "adapter_lora.rank_4_/last_loss");
        assert_eq!(text(&Value::from("x".repeat(600))).chars().count(), LONGEST_VALUE);
    }
}
