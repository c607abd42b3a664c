//! `uses: evaluate`: how well a model predicts the responses of rows, and how close its own answers come to them.
//!
//! The prompts are those of training: the same code renders them, and each segment is encoded apart. Every figure says
//! which convention it follows, since perplexities and ROUGE scores of different conventions cannot be compared.

mod examples;
mod figures;
mod perplexity;
mod report;
mod rouge;

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, Parameters};
use engine::protocol::WorkerEvent;
use engine::stage::{InputFacts, Stage, Threads};

use crate::artifact::{Adapter, Metrics, Model, OutputKind, Rows, RowsFacts, RowsReader, Shape, Tokenizer};
use crate::inference::{self, Inference};
use crate::prompt::{PromptParams, PromptRenderer};
use crate::tokenize::facts_of;
use crate::train::Kernels;
use examples::Example;
use figures::Figures;

/// Something to measure.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// How surprised the model is by the responses that the rows give.
    Perplexity,
    /// How many words and word sequences its own answers share with them.
    Rouge,
}

/// What a pipeline file may say under `with:` for `uses: evaluate`.
#[derive(Parameters, Debug)]
pub struct EvaluateParams {
    /// The model.
    #[semantic]
    pub model: Input<Model>,
    /// An adapter to put onto it.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// Its tokenizer; the model's own if left out.
    #[semantic]
    pub tokenizer: Option<Input<Tokenizer>>,
    /// The rows, which the model should not have seen.
    #[semantic]
    pub data: Input<Rows>,
    /// How rows become prompts; the same as in `tokenize`.
    #[semantic(flatten)]
    pub prompt: PromptParams,
    /// What is measured.
    #[semantic(default = vec![Metric::Perplexity])]
    pub metrics: Vec<Metric>,
    /// Only the first so many rows.
    #[semantic(range = 1..)]
    pub limit: Option<u64>,
    /// Longest row, in tokens, that perplexity is taken over; a longer one is cut. The model's positions if left out.
    #[semantic(range = 2..)]
    pub max_seq_len: Option<usize>,
    /// Longest answer for ROUGE, in tokens.
    #[semantic(default = 128, range = 1..)]
    pub max_new_tokens: usize,
    /// Whether ROUGE compares words by their stems.
    #[semantic(default = true)]
    pub use_stemmer: bool,
    /// The kernels that compute.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
    /// The metrics of another evaluation, to be shown beside these.
    #[semantic]
    pub compare_with: Option<Input<Metrics>>,
}

/// The stage kind.
pub struct Evaluate;

impl Stage for Evaluate {
    const NAME: &'static str = "evaluate";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Measures a model on rows: perplexity of the responses, ROUGE of its own answers.";
    type Params = EvaluateParams;

    fn outputs(_: &EvaluateParams) -> Vec<Output> {
        vec![Metrics::output("metrics")]
    }

    fn check(params: &EvaluateParams, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = Vec::new();
        if params.metrics.is_empty() {
            problems.push(Problem::error("bad-value", span, "`metrics` is empty", "nothing would be measured"));
        }
        let rows = facts_of(&params.data.reference, inputs).and_then(RowsFacts::from_facts);
        if params.metrics.contains(&Metric::Rouge) && rows.is_some_and(|rows| rows.shape == Shape::Text) {
            let message = "ROUGE compares answers, and the rows are plain text without any";
            problems.push(Problem::error("bad-value", span, message, "`rouge` is asked for here"));
        }
        problems
    }

    fn threads(_: &EvaluateParams) -> Threads {
        Threads::Many
    }

    fn run(params: &EvaluateParams, context: &mut StageContext) -> Result<(), StageError> {
        let before = params.compare_with.as_ref().map(|input| context.open(input)).transpose()?;
        let before = before.map(|artifact| figures::read(&artifact.folder)).transpose()?;
        let mut subject = Subject::open(params, context)?;
        let count = params.limit.unwrap_or(u64::MAX).min(subject.rows.len());
        let mut examples: Vec<Example> = (0..count).map(Example::new).collect();
        let mut found = Figures { rows: count, ..Figures::default() };
        for metric in [Metric::Perplexity, Metric::Rouge] {
            match metric {
                _ if !params.metrics.contains(&metric) => {}
                Metric::Perplexity => {
                    found.perplexity = Some(perplexity::measure(params, &mut subject, &mut examples, context)?);
                }
                Metric::Rouge => found.rouge = Some(rouge::measure(params, &mut subject, &mut examples, context)?),
            }
        }

        let draft = context.create("metrics")?;
        figures::write(&found, &draft.folder)?;
        examples::write(&examples, &draft.folder)?;
        let beside = before.as_ref().zip(params.compare_with.as_ref());
        let beside = beside.map(|(figures, input)| (input.reference.stage.as_str(), figures));
        let text = report::text(context.stage(), &found, beside);
        context.emit(WorkerEvent::Report { text });
        context.seal(draft, found.facts(), None)
    }
}

/// What is evaluated, and on what.
struct Subject {
    model: Box<dyn Inference>,
    tokenizer: crate::tokenizer::Tokenizer,
    stop_token_ids: Vec<u32>,
    renderer: PromptRenderer,
    rows: RowsReader,
}

impl Subject {
    fn open(params: &EvaluateParams, context: &mut StageContext) -> Result<Self, StageError> {
        let rows = RowsReader::open(&context.open(&params.data)?)?;
        if rows.is_empty() {
            return Err(StageError::bad_data("there are no rows to evaluate on"));
        }
        let model = context.open(&params.model)?;
        let adapter = params.adapter.as_ref().map(|input| context.open(input)).transpose()?;
        let tokenizer = params.tokenizer.as_ref().map(|input| context.open(input)).transpose()?;
        let tokenizer_folder = tokenizer.as_ref().map_or(&model.folder, |artifact| &artifact.folder);
        let tokenizer = crate::tokenizer::Tokenizer::from_folder(tokenizer_folder)?;
        Ok(Self {
            stop_token_ids: inference::stop_token_ids(&model.folder, &tokenizer)?,
            renderer: PromptRenderer::new(&params.prompt, rows.facts(), &tokenizer)?,
            model: inference::open(&model, adapter.as_ref(), params.kernels, context)?,
            tokenizer,
            rows,
        })
    }
}

/// Writes a text file of the output.
fn write_text(path: &std::path::Path, text: &str) -> Result<(), StageError> {
    std::fs::write(path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
}
