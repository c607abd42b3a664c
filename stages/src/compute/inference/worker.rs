//! Inference by the torch worker: its ranks stay, with the model loaded, from the first request to the last.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::batch::{Batch, TargetScope};
use model::config::Architecture;
use model::generation::{Completion, Listener, Options, Request, Stop};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::pieces::Pieces;
use super::{Flow, InferenceParams};
use crate::compute::adapter;
use crate::compute::quantize::WeightFormat;
use crate::compute::torch::batches::{MicroBatch, encode};
use crate::compute::torch::job::{Infer, Job, Quantize};
use crate::compute::torch::{Connection, PEAK_MEMORY_OF_RANKS, Work};
use crate::compute::variable;
use crate::data::prompt::Encoded;

/// A model, an adapter perhaps, and the ranks that have loaded them.
pub(super) struct Worker {
    architecture: Architecture,
    model: PathBuf,
    adapter: Option<PathBuf>,
    dtype: &'static str,
    quantize: Option<Quantize>,
    batch_size: usize,
    env: BTreeMap<String, String>,
    /// From the first request on.
    connection: Option<Connection>,
    done: Done,
}

/// What was done so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    new_tokens: usize,
    took: Duration,
    /// The most memory of each rank.
    peaks: Vec<u64>,
}

/// What a rank is to do.
#[derive(Serialize)]
#[serde(tag = "request", rename_all = "snake_case")]
enum WorkerRequest<'a> {
    /// Scores the rows of a micro-batch of each rank.
    ScoreRows { ranks: &'a [Vec<MicroBatch>] },
    /// Completes prompts of each rank, which grow together.
    Generate { prompts: Vec<Vec<Prompt<'a>>>, options: GenerateOptions<'a> },
}

/// A prompt. Its draws are addressed as ours are: by seed, row and position.
#[derive(Serialize)]
struct Prompt<'a> {
    input_ids: &'a [u32],
    seed: u64,
    row: u64,
}

#[derive(Serialize)]
struct GenerateOptions<'a> {
    max_new_tokens: usize,
    min_new_tokens: usize,
    stop_ids: &'a [u32],
    temperature: f64,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
}

/// The results of each rank, and the most memory of each.
#[derive(Deserialize)]
struct Answer<T> {
    ranks: Vec<Vec<T>>,
    peak_memory_bytes: Vec<u64>,
}

/// The number of a row, the negative log-likelihood of its targets, their number, and that of those that are the
/// likeliest.
type Scored = (u64, Option<f64>, f64, f64);

/// What a model makes of a row.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RowScore {
    /// Summed negative log-likelihood of its targets, in nats.
    pub nll: f64,
    /// Its targets.
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
        format: &WeightFormat,
    ) -> Result<Self, StageError> {
        // That it belongs to this model and holds numbers is looked at here; the worker loads it by itself.
        adapter.map(|adapter| adapter::open(adapter, model)).transpose()?;
        let dtype = params.precision.dtype.in_job();
        Ok(Self {
            architecture,
            model: model.folder.clone(),
            adapter: adapter.map(|adapter| adapter.folder.clone()),
            dtype,
            quantize: format.of_worker()?,
            batch_size: params.batch_size,
            env: variable::texts(&params.env),
            connection: None,
            done: Done::default(),
        })
    }

    pub(super) fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Scores rows, some on each rank at a time; `told` hears how many are done. Rows that an interrupted attempt
    /// scored together are taken from it: others beside a row might change its last digits.
    pub(super) fn score(
        &mut self,
        rows: &[Encoded],
        told: &mut dyn FnMut(usize, &mut StageContext),
        pieces: &mut Pieces,
        context: &mut StageContext,
    ) -> Result<Vec<RowScore>, StageError> {
        let (batch_size, size) = (self.batch_size, context.devices().workers());
        let mut scores: Vec<Option<RowScore>> = rows.iter().map(|row| pieces.score_of(row)).collect();
        let numbered: Vec<(usize, &Encoded)> = rows.iter().enumerate().collect();
        let rounds = numbered.chunks(batch_size * size);
        let rounds: Vec<_> = rounds.filter(|round| round.iter().any(|(row, _)| scores[*row].is_none())).collect();
        let request = |connection: &mut Connection, round: &[(usize, &Encoded)]| {
            let batches: Vec<Batch> = round.chunks(batch_size).map(batch_of).collect();
            let (ranks, payload) = encode(of_ranks(&batches, size), TargetScope::Response);
            connection.request(&WorkerRequest::ScoreRows { ranks: &ranks }, &payload);
        };
        let mut done = rows.len() - rounds.iter().map(|round| round.len()).sum::<usize>();
        self.converse(&rounds, request, context, |round, answers: Vec<Vec<Scored>>, context| {
            for (row, nll, tokens, correct) in answers.into_iter().flatten() {
                let nll = nll.unwrap_or(f64::NAN);
                scores[row as usize] = Some(RowScore { nll, tokens: tokens as u64, correct: correct as u64 });
            }
            for (row, encoded) in round {
                pieces.add_score(encoded, scores[*row].unwrap_or_default());
            }
            done += round.len();
            told(done, context);
        })?;
        Ok(scores.into_iter().map(Option::unwrap_or_default).collect())
    }

    /// Completes prompts, those of about one length together, so that little is padded. Prompts that an interrupted
    /// attempt completed together are taken from it.
    pub(super) fn complete(
        &mut self,
        requests: &[Request<'_>],
        options: &Options,
        pieces: &mut Pieces,
        context: &mut StageContext,
    ) -> Result<Vec<Completion>, StageError> {
        let mut completions: Vec<Option<Completion>> =
            requests.iter().map(|request| pieces.completion_of(request)).collect();
        let (batch_size, size) = (self.batch_size, context.devices().workers());
        let mut by_length: Vec<usize> = (0..requests.len()).collect();
        by_length.sort_by_key(|index| requests[*index].prompt.len());
        let rounds = by_length.chunks(batch_size * size);
        let rounds: Vec<_> = rounds.filter(|round| round.iter().any(|index| completions[*index].is_none())).collect();
        let sampling = &options.sampling;
        let prompt = |index: &usize| {
            let Request { prompt, row, .. } = &requests[*index];
            Prompt { input_ids: prompt, seed: sampling.seed, row: *row }
        };
        let request = |connection: &mut Connection, round: &[usize]| {
            let mut prompts: Vec<Vec<Prompt<'_>>> =
                round.chunks(batch_size).map(|batch| batch.iter().map(prompt).collect()).collect();
            prompts.resize_with(size, Vec::new);
            let options = GenerateOptions {
                max_new_tokens: options.max_new_tokens,
                min_new_tokens: options.min_new_tokens,
                stop_ids: &options.stop_token_ids,
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                repetition_penalty: sampling.repetition_penalty,
            };
            connection.request(&WorkerRequest::Generate { prompts, options }, &[]);
        };
        let mut done = (requests.len() - rounds.iter().map(|round| round.len()).sum::<usize>()) as u64;
        self.converse(&rounds, request, context, |round, answers: Vec<Vec<Answered>>, context| {
            for (index, answered) in round.iter().zip(answers.into_iter().flatten()) {
                let completion = answered.into();
                pieces.add_completion(&requests[*index], &completion);
                completions[*index] = Some(completion);
            }
            done += round.len() as u64;
            context.progress("prompts", done, Some(requests.len() as u64), None);
        })?;
        let all: Option<Vec<Completion>> = completions.into_iter().collect();
        let all = all.ok_or_else(|| StageError::internal("the torch worker left prompts without a completion"))?;
        self.done.new_tokens += all.iter().map(|completion| completion.ids.len()).sum::<usize>();
        Ok(all)
    }

    /// Sends a request for each round, the next before the answer to the one before it is read, and hands on the
    /// answers.
    fn converse<R: ?Sized, T: DeserializeOwned>(
        &mut self,
        rounds: &[&R],
        request: impl Fn(&mut Connection, &R),
        context: &mut StageContext,
        mut answered: impl FnMut(&R, Vec<Vec<T>>, &mut StageContext),
    ) -> Result<(), StageError> {
        let Some(first) = rounds.first() else { return Ok(()) };
        let began = Instant::now();
        let mut connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect(context)?,
        };
        request(&mut connection, first);
        for (index, round) in rounds.iter().enumerate() {
            context.stop_if_cancelled()?;
            if let Some(next) = rounds.get(index + 1) {
                request(&mut connection, next);
            }
            let Answer { ranks, peak_memory_bytes } = connection.answer(context)?;
            self.done.peaks = peak_memory_bytes;
            answered(round, ranks, context);
        }
        context.record(PEAK_MEMORY_OF_RANKS, self.done.peaks.clone());
        self.connection = Some(connection);
        self.done.took += began.elapsed();
        Ok(())
    }

    /// Starts the ranks, which load the model.
    fn connect(&self, context: &mut StageContext) -> Result<Connection, StageError> {
        let mut work = Work::begin("torch", context)?;
        work.env.clone_from(&self.env);
        let common = work.common(self.dtype, self.model.clone(), self.quantize.clone());
        let job = Job::Infer(Infer { common, widen: false, adapter: self.adapter.clone() });
        let (mut connection, _) = Connection::open(&work, &job, context)?;
        connection.end_when_cancelled();
        Ok(connection)
    }

    /// Time and memory, in the words of `speed`. The rates are of these processes on this machine and belong into no
    /// artefact.
    pub(super) fn speed(&self) -> String {
        let Done { new_tokens, took, peaks } = &self.done;
        let seconds = took.as_secs_f64();
        let rate = if seconds > 0.0 { *new_tokens as f64 / seconds } else { 0.0 };
        let mut text = format!(
            "Time for inference: {seconds:.2} sec total, {rate:.2} tokens/sec ({new_tokens} new tokens), loading PyTorch and the \
             model included"
        );
        if let Some(bytes) = peaks.iter().max() {
            let memory = *bytes as f64 / 1e9;
            text.push_str(&format!(
                "\nMemory used: {memory:.2} GB (peak of the rank that took most, by its device's counter)"
            ));
        }
        text
    }
}

/// Rows as a batch in which each is a document of its own.
fn batch_of(rows: &[(usize, &Encoded)]) -> Batch {
    let mut batch = Batch::default();
    for (number, row) in rows.iter().filter(|(_, row)| !row.input_ids.is_empty()) {
        batch.push_row(*number as u64, &row.input_ids, &row.labels, &[row.input_ids.len()]);
    }
    batch
}

/// A batch for each rank, as far as there are any.
fn of_ranks(batches: &[Batch], size: usize) -> impl Iterator<Item = &[Batch]> {
    (0..size).map(|rank| batches.get(rank).map_or(&[][..], std::slice::from_ref))
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
        listener.answered(request, completion);
    }
    Ok(())
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

        fn answered(&mut self, request: usize, _: &Completion) {
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
