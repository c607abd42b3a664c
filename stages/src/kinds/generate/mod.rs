//! `uses: generate`: a model answers prompts, greedily or by drawing.
//!
//! Prompts are read, answered and written some hundreds at a time, so that memory stays bounded. A draw depends on the
//! seed, the prompt's number and the position alone. Times are said on the screen and stand in no artefact, so that the
//! same answers are the same artefact.

mod prompts;
mod report;
pub(crate) mod samples;

use std::path::Path;

use devices::DeviceKind;
use engine::artifact::{Facts, Output};
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, OneOf, Parameters};
use engine::stage::{InputFacts, LessMemory, Smoke, Stage, StageKind, Threads, Workers, WorkingState};
use model::generation::Request;
use model::sampling::Sampling;

use crate::compute::inference::{self, BatchProgress, InferenceParams, InferenceSession, StreamMode};
use crate::compute::journal;
use crate::data::artifact::{OutputKind, Rows, Samples};
use crate::data::prompt::PromptParams;
use crate::smoke;
use prompts::{EncodedPrompt, Prompts};
use report::Shown;
pub use report::answers;
pub use samples::TABLE;
use samples::{Sample, SamplesWriter};

/// What a pipeline file may say under `with:` for `uses: generate`.
#[derive(Parameters, Debug)]
pub struct Generate {
    /// The model and its limits.
    #[semantic(flatten)]
    pub inference: InferenceParams,
    /// The prompts: a list of strings, or a stage with rows, whose prompts are rendered as in training.
    #[semantic]
    pub prompts: OneOf<Vec<String>, Input<Rows>>,
    /// How a string becomes a prompt: the name of a template, a string with one placeholder, or `chat` for a user's
    /// turn in the model's chat template. Default: the string itself is the prompt.
    #[semantic]
    pub template: Option<String>,
    /// How texts and rows become prompts; the same as in `tokenize`.
    #[semantic(flatten)]
    pub prompt: PromptParams,
    /// Only the first rows, up to this number, for prompts from a stage.
    #[semantic(range = 1..)]
    pub limit: Option<u64>,
    /// What happens to a prompt that cannot be used: it is empty, fills the model's positions, or its chat template
    /// rejects it.
    #[semantic(default = OnBadPrompt::Skip)]
    pub on_bad_prompt: OnBadPrompt,
    /// Divides the logits; 0 is greedy decoding.
    #[semantic(default = 0.0, range = 0.0..)]
    pub temperature: f64,
    /// Samples only among this number of most likely tokens, and those tied with the last of them.
    #[semantic(range = 1..)]
    pub top_k: Option<usize>,
    /// Samples among the fewest most likely tokens whose probabilities reach this sum (nucleus sampling).
    #[semantic(above = 0.0, range = ..=1.0)]
    pub top_p: Option<f64>,
    /// Samples among the tokens whose probability is at least this share of the most likely one's.
    #[semantic(range = 0.0..=1.0)]
    pub min_p: Option<f64>,
    /// Divides the positive logits of tokens seen before, in prompt or completion, and multiplies the negative ones; 1
    /// changes nothing.
    #[semantic(above = 0.0)]
    pub repetition_penalty: Option<f64>,
    /// Random seed of sampling.
    #[semantic(default = 0)]
    pub seed: u64,
    /// Completions per prompt, sampled independently; several need a `temperature` above 0.
    #[semantic(default = 1, omit_default, range = 1..=1024)]
    pub samples_per_prompt: u64,
    /// The samples of another stage, shown next to these.
    #[semantic]
    pub compare_with: Option<Input<Samples>>,
}

/// What becomes of a prompt that cannot be asked.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnBadPrompt {
    /// It is counted, and is in the results with the reason instead of a completion.
    Skip,
    /// It ends the stage.
    Error,
}

impl Generate {
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}

impl StageKind for Generate {
    const NAME: &'static str = "generate";
    const VERSION: u32 = 12; // 12: as `tokenize` 10.
    const ABOUT: &'static str = "Generates completions of prompts.";
    const TEXTS: &'static [&'static str] = &["env"];
    const ALSO_CALLED: &'static [&'static str] = &["infer", "inference", "chat", "sample"];
    const GOAL: bool = true;

    fn smoke(parameters: &serde_json::Value) -> Smoke {
        let lowered = crate::compute::inference::lowered(parameters);
        match parameters.get("prompts").and_then(serde_json::Value::as_array) {
            Some(prompts) => {
                let few: Vec<_> = prompts.iter().take(smoke::PROMPTS as usize).cloned().collect();
                lowered.set("prompts", few).done()
            }
            None => lowered.at_most("limit", smoke::PROMPTS).done(),
        }
    }
}

impl Stage for Generate {
    fn outputs(&self) -> Vec<Output> {
        vec![Samples::output("samples")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = prompts::check(self, span);
        if let Some(conversations) = prompts::are_conversations(self, inputs) {
            problems.extend(self.prompt.without_effect(conversations, span));
            let field = if self.template.is_some() { "template" } else { "prompts" };
            let tokenizer = self.inference.tokenizer_facts(inputs).filter(|_| conversations);
            problems.extend(self.prompt.without_template(tokenizer, field, span));
        }
        if let OneOf::Stage(rows) = &self.prompts {
            problems.extend(self.prompt.with_medium(rows.reference.facts_in(inputs), "prompts", span));
        }
        let (model, adapter) = self.inference.facts(inputs);
        problems.extend(self.prompt.differs_from_training(model, adapter, span));
        problems.extend(self.inference.misfits(inputs, span));
        problems.extend(self.inference.problems(span));
        problems
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let prompts = match &self.prompts {
            OneOf::Literal(texts) => Some(texts.len() as u64),
            OneOf::Stage(rows) => rows.reference.facts_in(ahead.expected).and_then(|facts| facts.get("rows")?.as_u64()),
        };
        let prompts = prompts.map(|prompts| self.limit.map_or(prompts, |limit| prompts.min(limit)));
        let answers = |prompts: u64| prompts as f64 * self.samples_per_prompt as f64;
        let most = |prompts: u64| answers(prompts) * self.inference.max_new_tokens as f64;
        let work = prompts.map(|prompts| Work::new("new tokens", most(prompts)));
        Forecast { work, ..self.inference.forecast(ahead.expected) }
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
        let before = self.compare_with.as_ref().map(|input| context.open(input)).transpose()?;
        let before = before.map(|artifact| samples::Earlier::open(&artifact.folder)).transpose()?;
        let mut session = InferenceSession::open(&self.inference, self.sampling(), context)?;
        let mut prompts = Prompts::open(self, &session.tokenizer, context)?;
        session.end_at(&self.inference, &prompts.stop_texts(&session.tokenizer));

        let draft = context.create("samples")?;
        let mut writer = SamplesWriter::create(&draft.folder, self.samples_per_prompt)?;
        let mut shown = Shown::default();
        while let Some(asked) = prompts.next_group(&session)? {
            let samples = answer(self, asked, prompts.len(), &mut session, context)?;
            writer.write(&samples)?;
            shown.take(samples);
        }
        let tally = writer.finish()?;
        if tally.skipped > 0 {
            context.warn(format!(
                "{} of {} prompts could not be used: {}",
                tally.skipped / self.samples_per_prompt,
                tally.rows / self.samples_per_prompt,
                shown.first_problem().unwrap_or_default()
            ));
        }
        if tally.skipped == tally.rows {
            let message = format!("none of {} prompts could be used", prompts.len());
            return Err(match shown.first_problem() {
                Some(problem) => StageError::bad_data(format!("{message}: {problem}")),
                None => StageError::bad_data("there are no prompts"),
            });
        }

        let beside = before.map(|earlier| earlier.answers_to(shown.prompts())).transpose()?;
        let beside = beside.as_ref().zip(self.compare_with.as_ref());
        let beside = beside.map(|(answers, input)| (input.reference.stage.as_str(), answers));
        let text = shown.report(context.stage(), &tally, beside);
        context.report(text);
        context.report_detail(session.speed());
        let mut facts = Facts::new();
        facts.insert("rows".to_owned(), tally.rows.into());
        facts.insert("tokens".to_owned(), tally.tokens.into());
        facts.insert("skipped".to_owned(), tally.skipped.into());
        if let Some(identity) = prompts.identity() {
            facts.insert(samples::PROMPTS.to_owned(), identity.into());
        }
        if let Some(end) = prompts.end_of_reasoning() {
            facts.insert(samples::END_OF_REASONING.to_owned(), end.into());
        }
        context.seal(draft, facts, None)?;
        journal::forget(context.working());
        Ok(())
    }
}

/// Answers a group of prompts; those that cannot be asked become samples without an answer.
fn answer(
    params: &Generate,
    asked: Vec<EncodedPrompt>,
    total: u64,
    session: &mut InferenceSession,
    context: &mut StageContext,
) -> Result<Vec<Sample>, StageError> {
    for asked in &asked {
        match &asked.ids {
            Ok(ids) => session.check_vocabulary(ids, || format!("prompt {}", asked.row + 1))?,
            Err(problem) if params.on_bad_prompt == OnBadPrompt::Error => {
                return Err(StageError::bad_data(format!("prompt {} cannot be used: {problem}", asked.row + 1))
                    .with_help("`on_bad_prompt: skip` leaves such prompts out and counts them"));
            }
            Err(_) => {}
        }
    }
    let fitting = asked.iter().filter_map(|asked| Some((asked.row, asked.ids.as_ref().ok()?)));
    let each = 0..params.samples_per_prompt;
    let requests: Vec<Request<'_>> = fitting
        .flat_map(|(row, prompt)| each.clone().map(move |sample| Request { prompt, row: draws_of(row, sample) }))
        .collect();
    // What grows on the screen is what the report will say, so answers to be compared do not.
    let mode = match asked.as_slice() {
        [only] if total == 1 && requests.len() == 1 && params.compare_with.is_none() => {
            StreamMode::Text { prompt: &only.text }
        }
        _ => StreamMode::Count,
    };
    let progress =
        BatchProgress { unit: "prompts", done: asked.first().map_or(0, |asked| asked.row), total: Some(total), mode };
    let mut answers = session.answer(&requests, progress, context)?.into_iter();
    context.progress("prompts", asked.last().map_or(0, |asked| asked.row + 1), Some(total), None);
    let mut samples = Vec::new();
    for asked in asked {
        for sample in each.clone() {
            let answer = asked.ids.is_ok().then(|| answers.next()).flatten();
            samples.push(Sample::new(&asked, sample, answer));
        }
    }
    Ok(samples)
}

/// Where the draws of a sample are: those of the first are the prompt's own.
fn draws_of(row: u64, sample: u64) -> u64 {
    row | sample << 48
}
