//! `uses: log_probs`: how likely a model finds each document of tokens or packs, in their order.
//!
//! The very artefact that `train` reads is scored, and the result says which one it was and by which weights: a
//! reference that a whole sweep compares with, or a figure to choose rows by.

mod table;

use std::path::Path;

use cache::Digest;
use engine::artifact::{Facts, Output};
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads, WorkingState};
use model::batch::Batch;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compute::adapter;
use crate::compute::inference::{self, Evaluator, Opened};
use crate::compute::journal::{self, Journal};
use crate::compute::kernels::{Dtype, Kernels};
use crate::compute::quantize::{WeightFormat, weight_format};
use crate::data::artifact::{Adapter, LogProbs, Model, OutputKind, TokensOrPacks, TokensReader};
pub(crate) use table::{Record, read};

/// What a pipeline file may say under `with:` for `uses: log_probs`.
#[derive(Parameters, Debug)]
pub struct LogProbabilities {
    /// The model.
    #[semantic]
    pub model: Input<Model>,
    /// An adapter of the model.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// The rows whose documents are scored.
    #[semantic]
    pub data: Input<TokensOrPacks>,
    /// Compute dtype; use that of the training with this reference.
    #[semantic(default = Dtype::F32)]
    pub dtype: Dtype,
    /// The format of the model's weights, as in `evaluate`. Default: the format that the adapter was trained on;
    /// without an adapter the stored weights. For the reference of a training with `quantize`, use the same value.
    #[semantic(omit_default)]
    pub quantize: Option<WeightFormat>,
    /// Rows computed at once.
    #[cosmetic(default = 1, range = 1..)]
    pub micro_batch_size: usize,
    /// The kernels of the computation.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
}

/// What was scored by what: part of the facts of the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Scored {
    /// Identity of the tokens or packs.
    pub data: String,
    /// Identity of the model.
    pub model: String,
    /// Identity of the adapter, where there was one.
    pub adapter: Option<String>,
    /// The base that its linear layers were quantised to, where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantize: Option<Value>,
    /// Compute dtype.
    pub dtype: String,
    /// The kernel set and its instructions.
    pub computed_by: String,
    /// Documents.
    pub documents: u64,
}

impl Scored {
    /// Reads it from an artefact's facts; `None` where these are others.
    pub(crate) fn from_facts(facts: &Facts) -> Option<Self> {
        serde_json::from_value(Value::Object(facts.clone())).ok()
    }
}

/// The identity of an artefact, as [`Scored`] has it.
pub(crate) fn identity(artifact: &Artifact) -> String {
    artifact.description.identity.to_string()
}

impl StageKind for LogProbabilities {
    const NAME: &'static str = "log_probs";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Scores each document of tokens or packs: its summed log-probability, and its targets.";
}

impl Stage for LogProbabilities {
    fn outputs(&self) -> Vec<Output> {
        vec![LogProbs::output("log_probs")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let of_dtype = (self.dtype == Dtype::F16).then(|| {
            let message = "`dtype: f16` is for the torch backend, and `log_probs` is native";
            Problem::error("bad-value", span, message, "in this stage").at("dtype")
        });
        let model = self.model.reference.facts_in(inputs);
        let others = self.adapter.iter().filter(|it| adapter::is_of_others(it.reference.facts_in(inputs), model));
        let others = others.map(|it| adapter::problem(&it.reference, &self.model.reference, span));
        let of_format = self.quantize.as_ref().and_then(|quantize| quantize.problem(span));
        let of_kernels = matches!((self.kernels, &self.quantize), (Kernels::Candle, Some(WeightFormat::Blocks(_))));
        let of_kernels = of_kernels.then(|| {
            let message = "`kernels: candle` has no weights in `int8` or `int4`";
            Problem::error("bad-value", span, message, "in this stage").at("kernels")
        });
        of_dtype.into_iter().chain(others).chain(of_format).chain(of_kernels).collect()
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let rows = self.data.reference.facts_in(ahead.expected).and_then(|facts| facts.get("rows")?.as_f64());
        Forecast { work: rows.map(|rows| Work::new("rows", rows)), ..Forecast::default() }
    }

    fn working_state(&self, folder: &Path, _: &InputFacts) -> Option<WorkingState> {
        journal::progress(folder)
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let adapter = self.adapter.as_ref().map(|input| context.open(input)).transpose()?;
        let format = weight_format(self.quantize.as_ref(), adapter.as_ref(), context)?;
        let (model, data) = (context.open(&self.model)?, context.open(&self.data)?);
        let with = (self.dtype.compute(), self.kernels);
        let mut opened = inference::open_native(&model, adapter.as_ref(), with, &format, context)?;
        let draft = context.create("log_probs")?;
        let mut writer = table::Writer::create(&draft.folder);
        score(self, &mut opened, &data, &mut writer, context)?;
        let (documents, log_prob, targets) = writer.finish()?;
        let scored = Scored {
            data: identity(&data),
            model: identity(&model),
            adapter: adapter.as_ref().map(identity),
            quantize: format.fact(),
            dtype: self.dtype.in_job().to_owned(),
            computed_by: opened.computed_by,
            documents,
        };
        let mut facts = match serde_json::to_value(&scored) {
            Ok(Value::Object(facts)) => facts,
            _ => unreachable!("a struct is a JSON object"),
        };
        facts.insert("targets".to_owned(), targets.into());
        let perplexity = (-log_prob / targets.max(1) as f64).exp();
        facts.insert("perplexity".to_owned(), perplexity.into());
        context.report(format!("{documents} documents, {targets} targets, perplexity {perplexity:.4}"));
        context.seal(draft, facts, None)?;
        journal::forget(context.working());
        Ok(())
    }
}

/// Scores all documents, some rows at a time.
fn score(
    params: &LogProbabilities,
    opened: &mut Opened,
    data: &Artifact,
    writer: &mut table::Writer,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let mut rows = TokensReader::open(data)?;
    // Only the kernels of this program give a row the same bits in whatever company.
    let mut journal: Option<Journal<Vec<Record>>> =
        (params.kernels == Kernels::Cpu).then(|| Journal::open(context.working(), opened.computed_by.clone()));
    journal::note(journal.as_ref().map_or(0, Journal::known), context);
    let (total, mut next) = (rows.len(), 0);
    while next < total {
        context.stop_if_cancelled()?;
        let end = total.min(next + params.micro_batch_size as u64);
        let mut batch = Batch::default();
        for row in next..end {
            batch.push(row, &rows.row(row)?);
        }
        let piece = Digest::of(format!("{next} {end}").as_bytes());
        let known = journal.as_ref().and_then(|journal| journal.get(&piece));
        let records = match known {
            Some(known) => known.clone(),
            None => of_documents(&mut *opened.model, &batch).map_err(|error| {
                StageError::new(error.cause, format!("cannot score rows {} to {end}", next + 1)).with_source(error)
            })?,
        };
        if let Some(bad) = records.iter().find(|record| !record.log_prob.is_finite()) {
            let message =
                format!("the log-probability of a document in rows {} to {end} is {}", next + 1, bad.log_prob);
            return Err(StageError::new(Cause::Numeric, message));
        }
        writer.write(&records)?;
        if let Some(journal) = &mut journal {
            journal.add(piece, records);
        }
        next = end;
        context.progress("rows", next, Some(total), None);
    }
    Ok(())
}

/// A record for each document of a batch.
fn of_documents(model: &mut dyn Evaluator, batch: &Batch) -> Result<Vec<Record>, StageError> {
    let scores = if batch.tokens() == 0 { Vec::new() } else { model.score(batch)? };
    let (mut scores, mut end) = (scores.into_iter().peekable(), 0);
    let of_document = |length: &usize| {
        end += length;
        let mut record = Record { log_prob: 0.0, targets: 0 };
        while let Some(target) = scores.next_if(|target| target.token < end) {
            record.log_prob -= f64::from(target.nll);
            record.targets += 1;
        }
        record
    };
    Ok(batch.document_lengths.iter().map(of_document).collect())
}
