//! Completions and scores as pieces of a journal: an interrupted stage continues from those that it has.

use cache::Digest;
use engine::context::StageContext;
use model::generation::{Completion, Request, Stop};
use model::sampling::Sampling;
use model::scoring::Context;
use serde::{Deserialize, Serialize};

use super::RowScore;
use crate::compute::journal::{self, Journal};
use crate::data::prompt::Encoded;

/// A piece.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Piece {
    Completion {
        ids: Vec<u32>,
        ended: Ended,
    },
    /// Of a row, or of each continuation of a context.
    Scores(Vec<RowScore>),
}

/// [`Stop`], as it is written.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Ended {
    EndOfText,
    Length,
    StopString,
}

/// The pieces of a stage, and what decides its next completions apart from their prompts.
pub(super) struct Pieces {
    /// `None` where another attempt might compute other bits.
    journal: Option<Journal<Piece>>,
    completed_as: Vec<u8>,
}

impl Pieces {
    /// Opens the journal of a stage. `computed_by`: all that might change bits and is not in the stage's key.
    pub(super) fn open(computed_by: Option<String>, context: &mut StageContext) -> Self {
        let journal = computed_by.map(|computed_by| Journal::open(context.working(), computed_by));
        journal::note(journal.as_ref().map_or(0, Journal::known), context);
        Self { journal, completed_as: Vec::new() }
    }

    /// How the next completions come about.
    pub(super) fn complete_as(&mut self, max_new_tokens: usize, stop_strings: &[String], sampling: Sampling) {
        self.completed_as = format!("{max_new_tokens} {stop_strings:?} {sampling:?}").into_bytes();
    }

    pub(super) fn completion_of(&self, request: &Request<'_>) -> Option<Completion> {
        match self.journal.as_ref()?.get(&self.of_completion(request))? {
            Piece::Completion { ids, ended } => Some(Completion { ids: ids.clone(), stop: (*ended).into() }),
            Piece::Scores(_) => None,
        }
    }

    pub(super) fn add_completion(&mut self, request: &Request<'_>, completion: &Completion) {
        let address = self.of_completion(request);
        let Some(journal) = &mut self.journal else { return };
        journal.add(address, Piece::Completion { ids: completion.ids.clone(), ended: completion.stop.into() });
    }

    pub(super) fn score_of(&self, row: &Encoded) -> Option<RowScore> {
        self.scores(&of_row(row)).and_then(|scores| scores.first().copied())
    }

    pub(super) fn add_score(&mut self, row: &Encoded, score: RowScore) {
        self.add_scores(of_row(row), vec![score]);
    }

    pub(super) fn scores_of(&self, context: &Context<'_>) -> Option<Vec<RowScore>> {
        let scores = self.scores(&of_context(context))?;
        (scores.len() == context.continuations.len()).then(|| scores.to_vec())
    }

    pub(super) fn add_scores_of(&mut self, context: &Context<'_>, scores: Vec<RowScore>) {
        self.add_scores(of_context(context), scores);
    }

    fn scores(&self, address: &Digest) -> Option<&[RowScore]> {
        match self.journal.as_ref()?.get(address)? {
            Piece::Scores(scores) => Some(scores),
            Piece::Completion { .. } => None,
        }
    }

    fn add_scores(&mut self, address: Digest, scores: Vec<RowScore>) {
        // What is no number is no JSON, and ends the stage.
        let Some(journal) = self.journal.as_mut().filter(|_| scores.iter().all(|score| score.nll.is_finite())) else {
            return;
        };
        journal.add(address, Piece::Scores(scores));
    }

    fn of_completion(&self, request: &Request<'_>) -> Digest {
        address("completion", [self.completed_as.clone(), request.row.to_le_bytes().into(), bytes(request.prompt)])
    }
}

fn of_row(row: &Encoded) -> Digest {
    let labels = row.labels.iter().flat_map(|label| label.to_le_bytes()).collect();
    address("row", [bytes(&row.input_ids), labels])
}

fn of_context(context: &Context<'_>) -> Digest {
    address("context", std::iter::once(context.ids).chain(context.continuations.iter().copied()).map(bytes))
}

fn bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

/// The digest of parts, each with its length.
fn address(what: &str, parts: impl IntoIterator<Item = Vec<u8>>) -> Digest {
    let mut all = what.as_bytes().to_vec();
    for part in parts {
        all.extend((part.len() as u64).to_le_bytes());
        all.extend(part);
    }
    Digest::of(&all)
}

impl From<Stop> for Ended {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::EndOfText => Self::EndOfText,
            Stop::Length => Self::Length,
            Stop::Listener => Self::StopString,
        }
    }
}

impl From<Ended> for Stop {
    fn from(ended: Ended) -> Self {
        match ended {
            Ended::EndOfText => Self::EndOfText,
            Ended::Length => Self::Length,
            Ended::StopString => Self::Listener,
        }
    }
}
