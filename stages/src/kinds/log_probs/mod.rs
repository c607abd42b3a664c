//! `uses: log_probs`: how likely a model finds each document of tokens or packs, in their order.
//!
//! The very artefact that `train` reads is scored, and the result says which one it was and by which weights: a
//! reference that a whole sweep compares with, or a figure to choose rows by.

mod table;

use std::path::Path;
use std::sync::Arc;

use cache::Digest;
use engine::artifact::{Facts, Output};
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads, WorkingState};
use model::batch::{Batch, TargetScope};
use model::blocks::Blocks;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::compute::adapter;
use crate::compute::journal::{self, Journal};
use crate::compute::kernels::{self, Dtype, Kernels};
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
        let compute = self.dtype.compute();
        let adapter = self.adapter.as_ref().map(|input| context.open(input)).transpose()?;
        let format = weight_format(self.quantize.as_ref(), adapter.as_ref(), context)?;
        match self.kernels {
            Kernels::Cpu => {
                let kernels = format.applied_to(kernels::cpu_on(context.threads(), compute, context)?);
                run(self, Arc::new(kernels), adapter.as_ref(), &format, context)
            }
            Kernels::Candle => {
                let kernels = kernels::candle_computing(compute, context)?;
                run(self, Arc::new(kernels), adapter.as_ref(), &format, context)
            }
        }
    }
}

fn run<B: Blocks>(
    params: &LogProbabilities,
    ops: Arc<B>,
    adapter: Option<&Artifact>,
    format: &WeightFormat,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let model = context.open(&params.model)?;
    let data = context.open(&params.data)?;
    let mut rows = TokensReader::open(&data)?;
    let computed_by = ops.describe();
    context.record("kernel_set", computed_by.clone());
    let decoder = format.load(ops, &model.folder);
    let mut decoder = decoder.or_fail(Cause::BadData, || "cannot load the model".to_owned())?;
    if let Some(adapter) = adapter {
        let opened = adapter::open(adapter, &model)?;
        decoder.attach(&opened).or_fail(Cause::BadData, || "cannot attach the adapter".to_owned())?;
    }
    let draft = context.create("log_probs")?;
    let mut writer = table::Writer::create(&draft.folder);
    // Only the kernels of this program give a row the same bits in whatever company.
    let mut journal: Option<Journal<Vec<Record>>> =
        (params.kernels == Kernels::Cpu).then(|| Journal::open(context.working(), computed_by.clone()));
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
        let mut records = match known {
            Some(known) => known.clone(),
            None => vec![Record { log_prob: 0.0, targets: 0 }; batch.document_lengths.len()],
        };
        if batch.tokens() > 0 && known.is_none() {
            let scores = decoder.score_documents(&batch, TargetScope::Response);
            let scores = scores.or_fail(Cause::BadData, || format!("cannot score rows {} to {end}", next + 1))?;
            for (document, score) in scores {
                let targets = score.response_targets as u64;
                records[document] = Record { log_prob: score.response_log_prob, targets };
            }
        }
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
    let (documents, log_prob, targets) = writer.finish()?;
    let scored = Scored {
        data: identity(&data),
        model: identity(&model),
        adapter: adapter.map(identity),
        quantize: format.fact(),
        dtype: params.dtype.in_job().to_owned(),
        computed_by,
        documents,
    };
    let mut facts = match serde_json::to_value(&scored) {
        Ok(Value::Object(facts)) => facts,
        _ => unreachable!("a struct is a JSON object"),
    };
    facts.insert("targets".to_owned(), targets.into());
    let mean = log_prob / targets.max(1) as f64;
    facts.insert("perplexity".to_owned(), (-mean).exp().into());
    let text = format!("{documents} documents, {targets} targets, perplexity {:.4}", (-mean).exp());
    context.report(text);
    context.seal(draft, facts, None)?;
    journal::forget(context.working());
    Ok(())
}
