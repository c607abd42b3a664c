//! A model that is asked through the torch worker: all rows or prompts of a stage in one go, since each go loads it
//! anew.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::protocol::WorkerEvent;
use model::config::Architecture;
use model::generation::{Completion, Listener, Options, Request, Stop};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Flow, InferenceParams};
use crate::compute::adapter;
use crate::compute::torch::Work;
use crate::compute::torch::job::{Generate, Job, Score};
use crate::data::prompt::Encoded;

/// A model, an adapter perhaps, and how they are asked.
pub(super) struct Worker {
    architecture: Architecture,
    model: PathBuf,
    adapter: Option<PathBuf>,
    dtype: &'static str,
    batch_size: usize,
    env: BTreeMap<String, String>,
    done: Done,
}

/// What was done so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    goes: usize,
    new_tokens: usize,
    took: Duration,
    peak_memory_bytes: Option<u64>,
}

/// What a model makes of a row.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct RowScore {
    /// Summed negative log-likelihood of its targets, in nats.
    #[serde(rename = "loss")]
    pub nll: f64,
    /// Its targets.
    #[serde(rename = "targets")]
    pub tokens: u64,
    /// Those that the model finds the most likely.
    pub correct: u64,
}

#[derive(Deserialize)]
struct Answered {
    output_ids: Vec<u32>,
    ended: EndedBy,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum EndedBy {
    Stop,
    Length,
}

impl Worker {
    pub(super) fn open(
        params: &InferenceParams,
        model: &Artifact,
        adapter: Option<&Artifact>,
        architecture: Architecture,
    ) -> Result<Self, StageError> {
        // That it belongs to this model and holds numbers is looked at here; the worker loads it by itself.
        adapter.map(|adapter| adapter::open(adapter, model)).transpose()?;
        if let Some(quantized) = params.precision.says() {
            return Err(StageError::internal(format!("{quantized} is for the native backend")));
        }
        let dtype = params.precision.dtype.in_job();
        Ok(Self {
            architecture,
            model: model.folder.clone(),
            adapter: adapter.map(|adapter| adapter.folder.clone()),
            dtype,
            batch_size: params.batch_size,
            env: params.env.clone(),
            done: Done::default(),
        })
    }

    pub(super) fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    pub(super) fn score(&mut self, rows: &[Encoded], context: &mut StageContext) -> Result<Vec<RowScore>, StageError> {
        let work = self.work(context)?;
        let file = work.folder.join("rows.jsonl");
        let lines = rows.iter().map(|row| json!({ "input_ids": row.input_ids, "labels": row.labels }));
        write_lines(&file, lines)?;
        let common = work.common(self.dtype, self.model.clone(), self.adapter.clone(), context);
        let job = Job::Score(Score { common, rows: file, batch_size: self.batch_size });
        self.run(&work, &job, context)?;
        read_lines(&work.output.join("scores.jsonl"), rows.len())
    }

    /// Completes prompts.
    pub(super) fn complete(
        &mut self,
        requests: &[Request<'_>],
        options: &Options,
        context: &mut StageContext,
    ) -> Result<Vec<Completion>, StageError> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let work = self.work(context)?;
        let file = work.folder.join("prompts.jsonl");
        let sampling = &options.sampling;
        // Draws are addressed as ours are: by seed, row and position.
        let line =
            |request: &Request<'_>| json!({ "input_ids": request.prompt, "seed": sampling.seed, "row": request.row });
        let lines = requests.iter().map(line);
        write_lines(&file, lines)?;
        let job = Job::Generate(Generate {
            common: work.common(self.dtype, self.model.clone(), self.adapter.clone(), context),
            prompts: file,
            max_new_tokens: options.max_new_tokens,
            min_new_tokens: options.min_new_tokens,
            stop_ids: options.stop_token_ids.clone(),
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            batch_size: self.batch_size,
        });
        self.run(&work, &job, context)?;
        let answers: Vec<Answered> = read_lines(&work.output.join("answers.jsonl"), requests.len())?;
        self.done.new_tokens += answers.iter().map(|answer| answer.output_ids.len()).sum::<usize>();
        Ok(answers.into_iter().map(Completion::from).collect())
    }

    /// Time and memory, in the words of `speed`. The rates are of these processes on this machine and belong into no
    /// artefact.
    pub(super) fn speed(&self) -> String {
        let Done { new_tokens, took, peak_memory_bytes, .. } = self.done;
        let seconds = took.as_secs_f64();
        let rate = if seconds > 0.0 { new_tokens as f64 / seconds } else { 0.0 };
        let mut text = format!(
            "Time for inference: {seconds:.2} sec total, {rate:.2} tokens/sec ({new_tokens} new tokens), loading PyTorch and the \
             model included"
        );
        if let Some(bytes) = peak_memory_bytes {
            let memory = bytes as f64 / 1e9;
            text.push_str(&format!(
                "\nMemory used: {memory:.2} GB (peak of the rank that took most, by its device's counter)"
            ));
        }
        text
    }

    /// A folder for the next go.
    fn work(&mut self, context: &StageContext) -> Result<Work, StageError> {
        self.done.goes += 1;
        let mut work = Work::begin(&format!("torch-{}", self.done.goes), context)?;
        work.env.clone_from(&self.env);
        Ok(work)
    }

    fn run(&mut self, work: &Work, job: &Job, context: &mut StageContext) -> Result<(), StageError> {
        let began = Instant::now();
        let summary = work.run(job, context, &mut |event, context| {
            if let WorkerEvent::Progress { .. } = event {
                context.emit(event);
            }
            Ok(())
        })?;
        self.done.took += began.elapsed();
        self.done.peak_memory_bytes = self.done.peak_memory_bytes.max(summary.peak_memory_bytes());
        Ok(())
    }
}

impl From<Answered> for Completion {
    fn from(answered: Answered) -> Self {
        let stop = match answered.ended {
            EndedBy::Stop => Stop::EndOfText,
            EndedBy::Length => Stop::Length,
        };
        Self { ids: answered.output_ids, stop }
    }
}

/// Lets a listener follow answers that are there already, and ends each where it says so.
pub(super) fn follow(completions: &mut [Completion], listener: &mut dyn Listener) -> Result<(), StageError> {
    for (request, completion) in completions.iter_mut().enumerate() {
        for taken in 1..=completion.ids.len() {
            let flow = listener.token(request, completion.ids[taken - 1]);
            let flow = flow.or_fail(Cause::BadData, || "prompts cannot be completed".to_owned())?;
            if flow == Flow::Stop {
                completion.ids.truncate(taken);
                completion.stop = Stop::Listener;
                break;
            }
        }
        listener.answered(request);
    }
    Ok(())
}

fn write_lines(path: &Path, lines: impl Iterator<Item = Value>) -> Result<(), StageError> {
    let write = || -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        for line in lines {
            writeln!(file, "{line}")?;
        }
        file.flush()
    };
    write().or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
}

/// The lines of a file, of which there must be so many.
fn read_lines<T: DeserializeOwned>(path: &Path, expected: usize) -> Result<Vec<T>, StageError> {
    let failed = || format!("cannot read what the torch worker left in `{}`", path.display());
    let file = File::open(path).or_fail(Cause::Internal, failed)?;
    let mut found = Vec::with_capacity(expected);
    for line in BufReader::new(file).lines() {
        let line = line.or_fail(Cause::Internal, failed)?;
        found.push(serde_json::from_str(&line).or_fail(Cause::Internal, failed)?);
    }
    match found.len() == expected {
        true => Ok(found),
        false => Err(StageError::internal(format!("the torch worker answered {} of {expected} rows", found.len()))),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    /// Stops each answer at a token.
    struct StopsAt(u32, Vec<usize>);

    impl Listener for StopsAt {
        fn token(&mut self, _: usize, token: u32) -> Result<Flow, Box<dyn Error + Send + Sync>> {
            Ok(if token == self.0 { Flow::Stop } else { Flow::Continue })
        }

        fn answered(&mut self, request: usize) {
            self.1.push(request);
        }

        fn cancelled(&self) -> bool {
            false
        }
    }

    #[test]
    fn answers_that_are_there_end_where_the_listener_says() {
        let answers = [r#"{"output_ids": [1, 2, 3], "ended": "stop"}"#, r#"{"output_ids": [4, 5], "ended": "length"}"#];
        let answers = answers.map(|answer| serde_json::from_str::<Answered>(answer).unwrap());
        let mut completions: Vec<Completion> = answers.into_iter().map(Completion::from).collect();
        let mut listener = StopsAt(2, Vec::new());
        follow(&mut completions, &mut listener).unwrap();
        assert_eq!(completions[0], Completion { ids: vec![1, 2], stop: Stop::Listener });
        assert_eq!(completions[1], Completion { ids: vec![4, 5], stop: Stop::Length });
        assert_eq!(listener.1, [0, 1]);
    }
}
