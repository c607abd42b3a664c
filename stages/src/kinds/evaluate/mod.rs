//! `uses: evaluate`: how well a model predicts the responses of rows, and how close its own answers come to them.
//!
//! The prompts are those of training: the same code renders and encodes them. Rows are read, measured and written some
//! hundreds at a time, so that memory stays bounded. Every figure says which convention it follows, since figures of
//! different conventions cannot be compared.

mod answers;
mod examples;
mod figures;
mod likelihood;
mod measures;
mod pairs;
mod report;
pub(in crate::kinds) mod tasks;

use std::path::Path;

use devices::DeviceKind;
use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::figure::{Foreseen, Unit};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, Later, OneOrMore, Parameters};
use engine::pin::Pinned;
use engine::stage::{
    InputFacts, LessMemory, Outside, PinRequest, Secret, Smoke, Stage, StageKind, Threads, Workers, WorkingState,
};
use model::sampling::Sampling;

use crate::compute::inference::{self, DEFAULT_NEW_TOKENS, InferenceParams, InferenceSession};
use crate::compute::journal;
use crate::data::artifact::{Metrics, OutputKind, Row, Rows, RowsFacts, RowsReader, Shape, need_chat_template};
use crate::data::prompt::{PromptParams, PromptRenderer};
use crate::kinds::dataset::pin_on_hub;
use crate::metrics::{self, Found, Headline, Metric, MetricOptions, Reads};
use crate::smoke;
use answers::Answers;
use examples::{Example, ExamplesWriter};
use figures::Figures;
use likelihood::Likelihood;
use measures::Measures;
use pairs::Pairs;
use tasks::TaskParams;

/// What a pipeline file may say under `with:` for `uses: evaluate`.
#[derive(Parameters, Debug)]
pub struct Evaluate {
    /// The model and the limits of its answers, which are greedy.
    #[semantic(flatten)]
    pub inference: InferenceParams,
    /// Held-out rows, which the model was not trained on.
    #[semantic]
    pub data: Option<Input<Rows>>,
    /// Evaluation tasks in the place of rows.
    #[semantic(flatten)]
    pub task: Later<TaskParams>,
    /// How rows become prompts; the same as in `tokenize`.
    #[semantic(flatten)]
    pub prompt: PromptParams,
    /// The metrics to compute.
    #[semantic(default = vec![Metric::Perplexity])]
    pub metrics: Vec<Metric>,
    /// Only the first rows, up to this number.
    #[semantic(range = 1..)]
    pub limit: Option<u64>,
    /// Maximum length of a row, in tokens, for perplexity and token accuracy; a longer one is truncated. Default: the
    /// model's positions.
    #[semantic(range = 2..)]
    pub max_seq_len: Option<usize>,
    /// How some metrics compare.
    #[semantic(flatten)]
    pub options: MetricOptions,
    /// The metrics of other evaluations, shown next to these. `{ collect: stage }` means all children of a sweep.
    #[semantic]
    pub compare_with: Option<OneOrMore<Input<Metrics>>>,
}

impl Evaluate {
    /// The first of the metrics that read such of the rows.
    fn reading(&self, reads: Reads) -> Option<Metric> {
        self.metrics.iter().copied().find(|metric| metric.definition().reads == reads)
    }

    fn reads(&self, reads: Reads) -> bool {
        self.reading(reads).is_some()
    }

    /// What is for rows alone, where there are tasks in their place: it would have no effect.
    fn without_effect_on_tasks(&self, span: Span) -> Vec<Problem> {
        let Self { inference, prompt, metrics, .. } = self;
        let template = prompt.chat_template.is_some() && self.task.0.choice.apply_chat_template != Some(true);
        let given = [
            ("metrics", *metrics != [Metric::Perplexity], "`metric_list` of a task names its metrics"),
            ("max_new_tokens", inference.max_new_tokens != DEFAULT_NEW_TOKENS, "`max_gen_toks` of a task is its limit"),
            ("stop_strings", !inference.stop_strings.is_empty(), "`until` of a task says where a response ends"),
            ("system_prompt", prompt.system_prompt.is_some(), "`system_instruction` is that of tasks"),
            ("add_bos", prompt.add_bos.is_some(), "tasks are encoded as the tokenizer does by default"),
            ("add_eos", prompt.add_eos.is_some(), "nothing follows a prompt of a task"),
            ("chat_template", template, "set `apply_chat_template: true`, by which tasks become conversations"),
        ];
        let given = given.into_iter().filter(|(_, is_given, _)| *is_given);
        given
            .map(|(field, _, instead)| {
                let message = format!("`{field}` has no effect on `tasks`");
                Problem::error("bad-value", span, message, "it is for rows").at(field).with_help(instead)
            })
            .collect()
    }
}

impl StageKind for Evaluate {
    const NAME: &'static str = "evaluate";
    const VERSION: u32 = 17; // 17: as `tokenize` 10.
    const ABOUT: &'static str = "Evaluates a model on rows: perplexity and token accuracy of the responses; ROUGE, \
        BLEU and exact match of its predictions.";
    const TEXTS: &'static [&'static str] = &["env"];
    const ALSO_CALLED: &'static [&'static str] = &["eval", "test", "predict"];
    const GOAL: bool = true;

    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        pin_on_hub(request)
    }

    fn smoke(parameters: &serde_json::Value) -> Smoke {
        // What tasks generate they limit themselves.
        let lowered = match parameters.get("tasks").is_some_and(|tasks| !tasks.is_null()) {
            true => smoke::Lowered::from(parameters),
            false => inference::lowered(parameters),
        };
        lowered.at_most("limit", smoke::ROWS).done()
    }
}

impl Stage for Evaluate {
    fn outputs(&self) -> Vec<Output> {
        vec![Metrics::output("metrics")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = self.inference.problems(span);
        problems.extend(self.task.0.problems(self.data.is_some(), span));
        if self.task.0.choice.tasks.is_some() && self.data.is_none() {
            problems.extend(self.without_effect_on_tasks(span));
        }
        if self.metrics.is_empty() {
            problems.push(
                Problem::error("bad-value", span, "`metrics` is empty", "nothing would be measured").at("metrics"),
            );
        }
        let (model, adapter) = self.inference.facts(inputs);
        problems.extend(self.prompt.differs_from_training(model, adapter, span));
        problems.extend(self.inference.misfits(inputs, span));
        let facts = self.data.as_ref().and_then(|data| data.reference.facts_in(inputs));
        let rows = facts.and_then(RowsFacts::from_facts);
        if let Some(rows) = &rows {
            let may_be_turns = rows.shape == Shape::Messages || rows.shape.is_preference();
            problems.extend(self.prompt.without_effect(may_be_turns, span));
            if let Some(metric) = self.reading(Reads::Pair).filter(|_| rows.shape != Shape::Pairs) {
                let message = format!("`{}` needs pairs of responses, and these rows have none", metric.name());
                let label = format!("the rows are {}", rows.shape.describe());
                problems.push(Problem::error("bad-value", span, message, label).at("metrics"));
            }
            let tokenizer = self.inference.tokenizer_facts(inputs).filter(|_| facts.is_some_and(need_chat_template));
            problems.extend(self.prompt.without_template(tokenizer, "data", span));
            problems.extend(self.prompt.with_medium(facts, "data", span));
        }
        let of_answers = self.reading(Reads::Answer);
        if let Some(metric) = of_answers.filter(|_| rows.is_some_and(|rows| rows.shape == Shape::Text)) {
            let name = metric.name();
            let message = format!("`{name}` compares predictions, and the rows are plain text without a response");
            problems
                .push(Problem::error("bad-value", span, message, format!("`{name}` is requested here")).at("metrics"));
        }
        problems
    }

    fn figure(&self, name: &str) -> Foreseen {
        if self.data.is_none() {
            return metrics::foreseen_of_task(name);
        }
        let headlines = self.metrics.iter().flat_map(|metric| metric.definition().headlines);
        let with_error = |headline: &Headline| {
            let error = headline.error_name().map(|name| (name, headline.unit));
            std::iter::once((headline.name.to_owned(), headline.unit)).chain(error)
        };
        let known: Vec<(String, Unit)> =
            headlines.flat_map(with_error).chain([("rows".to_owned(), Unit::Number)]).collect();
        match known.iter().find(|(known, _)| known == name) {
            Some((_, unit)) => Foreseen::In(*unit),
            None => Foreseen::Absent { others: known.into_iter().map(|(name, _)| name).collect() },
        }
    }

    fn outside(&self) -> Vec<Outside> {
        self.task.0.choice.outside()
    }

    fn secrets(&self) -> Vec<Secret> {
        self.task.0.choice.secrets()
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let facts = self.data.as_ref().and_then(|data| data.reference.facts_in(ahead.expected));
        let rows = facts.and_then(|facts| facts.get("rows")?.as_u64());
        let rows = rows.map(|rows| self.limit.map_or(rows, |limit| rows.min(limit)));
        let work = rows.map(|rows| Work::new("rows", rows as f64));
        let mut forecast = Forecast { work, ..self.inference.forecast(ahead.expected) };
        forecast.problems.extend(self.task.0.choice.local(ahead.files).1);
        forecast
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn workers(&self) -> Workers {
        self.inference.backend.workers(self.inference.serves())
    }

    fn devices(&self) -> Vec<DeviceKind> {
        self.inference.devices()
    }

    fn lacks(&self, span: Span) -> Vec<Problem> {
        self.inference.lacks(span)
    }

    fn working_state(&self, folder: &Path, _: &InputFacts) -> Option<WorkingState> {
        journal::progress(folder)
    }

    fn with_less_memory(&self, parameters: &serde_json::Value) -> LessMemory {
        inference::with_less_memory(parameters)
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let Some(data) = &self.data else { return tasks::run(self, context) };
        let mut others: Vec<(&str, Figures)> = Vec::new();
        for input in self.compare_with.iter().flat_map(|others| &others.0) {
            others.push((&input.reference.stage, Figures::read(&context.open(input)?.folder)?));
        }
        let mut subject = Subject::open(self, data, context)?;
        let profile = context.profile().clone();
        let draft = context.create("metrics")?;
        let mut writer = ExamplesWriter::create(&draft.folder);
        let mut measures = Measures::start(self);
        let (mut likelihood, mut answers, mut pairs) = (Likelihood::default(), Answers::default(), Pairs::default());
        while let Some(mut group) = subject.next_group()? {
            if self.reads(Reads::Likelihood) {
                let _phase = profile.phase("likelihood");
                likelihood.measure(self, &mut subject, &mut group, &mut measures, context)?;
            }
            if self.reads(Reads::Pair) {
                let _phase = profile.phase("pairs");
                pairs.measure(&mut subject, &mut group, &mut measures, context)?;
            }
            if self.reads(Reads::Answer) {
                let _phase = profile.phase("answers");
                answers.measure(&mut subject, &mut group, &mut measures, context)?;
            }
            let examples: Vec<Example> = group.into_iter().map(|(_, example)| example).collect();
            writer.write(&examples)?;
        }
        writer.finish()?;
        if self.reads(Reads::Likelihood) {
            likelihood.warn(self, &subject, context)?;
        }
        if self.reads(Reads::Answer) {
            answers.warn(self, context)?;
        }
        if self.reads(Reads::Pair) {
            pairs.warn(context)?;
        }
        let (figures, meanings) = figures(subject.count, &measures, &answers, &pairs)?;
        figures.write(&draft.folder)?;
        let table = [report::table(context.stage(), &figures, &others)];
        context.report(table.into_iter().chain(answers.unfinished()).collect::<Vec<_>>().join("\n"));
        context.report_detail(meanings.join("\n"));
        context.seal(draft, figures.facts(), None)?;
        journal::forget(context.working());
        Ok(())
    }
}

/// The figures asked for, and what each means.
fn figures(
    rows: u64,
    measures: &Measures,
    answers: &Answers,
    pairs: &Pairs,
) -> Result<(Figures, Vec<String>), StageError> {
    let skipped = |reads| match reads {
        Reads::Likelihood => 0,
        Reads::Answer => answers.skipped_rows,
        Reads::Pair => pairs.skipped_rows,
    };
    let (mut figures, mut meanings) = (Figures::of_rows(rows), Vec::new());
    for found in measures.figures(skipped) {
        let (metric, Found { figure, meaning }) = found?;
        if metric.definition().reads == Reads::Answer {
            figures.insert("answers", serde_json::to_value(answers).expect("counts are plain data"));
        }
        figures.insert(metric.name(), figure);
        meanings.push(meaning);
    }
    Ok((figures, meanings))
}

/// Rows that are measured before the next ones are read.
const ROWS_PER_GROUP: usize = 256;

/// What they may have together, in bytes of text, unless a single one has more.
const BYTES_PER_GROUP: usize = 32 << 20;

/// What is evaluated, and on what.
struct Subject {
    session: InferenceSession,
    renderer: PromptRenderer,
    rows: RowsReader,
    /// Rows that are evaluated on.
    count: u64,
    next: u64,
}

impl Subject {
    fn open(params: &Evaluate, data: &Input<Rows>, context: &mut StageContext) -> Result<Self, StageError> {
        let rows = RowsReader::open(&context.open(data)?)?;
        if rows.is_empty() {
            return Err(StageError::bad_data("there are no rows to evaluate on"));
        }
        let mut session = InferenceSession::open(&params.inference, Sampling::GREEDY, context)?;
        let renderer = PromptRenderer::new(&params.prompt, rows.facts(), &session.tokenizer)?;
        session.end_at(&params.inference, &renderer.stop_texts(&session.tokenizer));
        Ok(Self { renderer, session, count: params.limit.unwrap_or(u64::MAX).min(rows.len()), rows, next: 0 })
    }

    /// The next few rows, with nothing known of them; `None` at the end.
    fn next_group(&mut self) -> Result<Option<Vec<(Row, Example)>>, StageError> {
        let (mut group, mut bytes) = (Vec::new(), 0);
        let all = self.session.prefers_all_at_once();
        while self.next < self.count && (all || group.len() < ROWS_PER_GROUP && bytes < BYTES_PER_GROUP) {
            let row = self.rows.row(self.next)?;
            bytes += row.text_bytes();
            group.push((row, Example::new(self.next)));
            self.next += 1;
        }
        Ok((!group.is_empty()).then_some(group))
    }
}

/// A failure that is about a row.
fn of_row(row: u64) -> impl Fn(crate::data::prompt::PromptError) -> StageError {
    move |error| error.failing(Cause::BadData, format!("row {} cannot be turned into a prompt", row + 1))
}

/// Writes a text file of the output.
fn write_text(path: &std::path::Path, text: &str) -> Result<(), StageError> {
    std::fs::write(path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
}
