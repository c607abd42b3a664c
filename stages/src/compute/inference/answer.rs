//! Prompts to answers: texts, cut where a stop string begins, and followed while they grow.

use std::error::Error;

use engine::context::StageContext;
use engine::error::StageError;
use engine::protocol::WorkerEvent;
use model::generation::{Completion, Flow, Listener, Request, Stop};

use super::pieces::Pieces;
use super::{CompletionText, Engine, InferenceSession, StopStrings, worker};
use crate::data::tokenizer::Tokenizer;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The model ended it, or a stop token did.
    EndOfText,
    /// A stop string did.
    StopString,
    /// The limit did.
    Length,
}

impl Ended {
    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfText => "end_of_text",
            Self::StopString => "stop_string",
            Self::Length => "length",
        }
    }
}

/// What a model answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The text, without special tokens, up to a stop string.
    pub text: String,
    /// Its tokens: those of a stop string count, the one that ended the text does not.
    pub tokens: usize,
    /// Why there is no more.
    pub ended: Ended,
}

/// How much of an answer is said while it grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamMode<'a> {
    /// How many tokens there are.
    Count,
    /// Its text, for a person who waits for it.
    Text {
        /// What was asked.
        prompt: &'a str,
    },
}

/// Whose answers grow, for messages: `prompts`, `done` before these and `total`.
#[derive(Debug, Clone, Copy)]
pub struct BatchProgress<'a> {
    /// What is counted.
    pub unit: &'a str,
    /// Answered before.
    pub done: u64,
    /// In all, where known.
    pub total: Option<u64>,
    /// What is said of each answer.
    pub mode: StreamMode<'a>,
}

impl InferenceSession {
    /// Answers prompts, several at a time. Each must fit the model ([`InferenceSession::misfit`]).
    ///
    /// # Errors
    /// Fails if a prompt does not fit, the model computes something that is no number, the device fails, or the user
    /// ends it.
    pub fn answer(
        &mut self,
        requests: &[Request<'_>],
        progress: BatchProgress<'_>,
        context: &mut StageContext,
    ) -> Result<Vec<Answer>, StageError> {
        if let (StreamMode::Text { prompt }, false) = (progress.mode, requests.is_empty()) {
            let text = format!("{}\n{}", visible(prompt), " ".repeat(ANSWER_INDENT));
            context.emit(WorkerEvent::Text { text });
        }
        let mut completions: Vec<Option<Completion>> = match &mut self.model {
            Engine::Native(_) => requests.iter().map(|request| self.pieces.completion_of(request)).collect(),
            Engine::Torch(worker) => {
                worker.complete(requests, &self.options, &mut self.pieces, context)?.into_iter().map(Some).collect()
            }
        };
        let (there, missing): (Vec<usize>, Vec<usize>) =
            (0..requests.len()).partition(|request| completions[*request].is_some());
        let mut streamer = TextStreamer {
            tokenizer: &self.tokenizer,
            stop_strings: &self.stop_strings,
            requests,
            numbers: there,
            drafts: vec![CompletionText::default(); requests.len()],
            progress,
            tokens: 0,
            pieces: None,
            context,
        };
        let mut followed: Vec<Completion> = completions.iter_mut().filter_map(Option::take).collect();
        worker::follow(&mut followed, &mut streamer)?;
        let there = std::mem::replace(&mut streamer.numbers, missing);
        there.into_iter().zip(followed).for_each(|(request, completion)| completions[request] = Some(completion));
        if let (Engine::Native(model), false) = (&mut self.model, streamer.numbers.is_empty()) {
            streamer.pieces = Some(&mut self.pieces);
            let asked: Vec<Request<'_>> = streamer.numbers.iter().map(|request| requests[*request]).collect();
            let (found, stats) = model.complete(&asked, &self.options, &mut streamer)?;
            self.stats += stats;
            streamer
                .numbers
                .iter()
                .zip(found)
                .for_each(|(request, completion)| completions[*request] = Some(completion));
        }
        let drafts = std::mem::take(&mut streamer.drafts);
        let completions = completions.into_iter().map(|completion| completion.expect("each request is completed"));
        drafts.into_iter().zip(completions).map(|(draft, completion)| streamer.finish(draft, completion)).collect()
    }
}

/// Follows the answers.
struct TextStreamer<'a> {
    tokenizer: &'a Tokenizer,
    stop_strings: &'a StopStrings,
    requests: &'a [Request<'a>],
    /// Which of the requests those are that are followed.
    numbers: Vec<usize>,
    drafts: Vec<CompletionText>,
    progress: BatchProgress<'a>,
    tokens: u64,
    /// Where completions that are new are noted.
    pieces: Option<&'a mut Pieces>,
    context: &'a mut StageContext,
}

impl Listener for TextStreamer<'_> {
    fn token(&mut self, request: usize, token: u32) -> Result<Flow, Box<dyn Error + Send + Sync>> {
        self.tokens += 1;
        let BatchProgress { unit, done, total, mode } = self.progress;
        self.context.progress(unit, done, total, Some(format!("{} tokens", self.tokens)));
        if self.stop_strings.is_empty() && mode == StreamMode::Count {
            return Ok(Flow::Continue);
        }
        let draft = &mut self.drafts[self.numbers[request]];
        draft.push(token, self.tokenizer, self.stop_strings)?;
        if mode != StreamMode::Count {
            say(self.context, draft.take_settled(self.stop_strings));
        }
        Ok(if draft.stopped().is_some() { Flow::Stop } else { Flow::Continue })
    }

    fn answered(&mut self, request: usize, completion: &Completion) {
        self.progress.done += 1;
        if let Some(pieces) = &mut self.pieces {
            pieces.add_completion(&self.requests[self.numbers[request]], completion);
        }
    }

    fn cancelled(&self) -> bool {
        self.context.cancelled()
    }
}

impl TextStreamer<'_> {
    fn finish(&mut self, mut draft: CompletionText, completion: Completion) -> Result<Answer, StageError> {
        let tokens = completion.ids.len();
        if !self.stop_strings.is_empty() || self.progress.mode != StreamMode::Count {
            draft.finish(self.tokenizer, self.stop_strings)?;
        }
        let ended = match completion.stop {
            _ if draft.stopped().is_some() => Ended::StopString,
            Stop::EndOfText => Ended::EndOfText,
            Stop::Listener => Ended::StopString,
            Stop::Length => Ended::Length,
        };
        let text = match draft.stopped() {
            Some(text) => text.to_owned(),
            None => self.tokenizer.decode(&completion.ids)?,
        };
        if self.progress.mode != StreamMode::Count {
            say(self.context, draft.take_rest());
        }
        Ok(Answer { text, tokens, ended })
    }
}

/// Says more of an answer.
fn say(context: &mut StageContext, more: &str) {
    if !more.is_empty() {
        context.emit(WorkerEvent::Text { text: indented(more, ANSWER_INDENT) });
    }
}

/// Blanks before an answer that stands under its prompt.
pub const ANSWER_INDENT: usize = 2;

/// Keeps the lines of an answer under each other.
pub fn indented(text: &str, by: usize) -> String {
    visible(text).replace('\n', &format!("\n{}", " ".repeat(by)))
}

/// A model may write anything, and a terminal obeys control characters.
pub fn visible(text: &str) -> String {
    text.replace(|letter: char| letter.is_control() && letter != '\n' && letter != '\t', "\u{fffd}")
}
