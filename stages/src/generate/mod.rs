//! `uses: generate`: a model answers prompts, greedily or by drawing.
//!
//! A draw depends on the seed, the prompt's number and the position alone. Times are said on the screen and stand in no
//! artefact, so that the same answers are the same artefact.

mod prompts;
mod samples;

use std::time::{Duration, Instant};

use engine::artifact::{Facts, Output};
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, OneOf, Parameters};
use engine::protocol::WorkerEvent;
use engine::stage::{InputFacts, Stage, Threads};
use model::sampling::Sampling;

use crate::artifact::{Adapter, Model, OutputKind, Rows, Samples, Tokenizer};
use crate::inference::{self, Inference, Limits, Request};
use crate::train::Kernels;
use prompts::Asked;
use samples::Sample;

/// Prompts that are completed together.
const PROMPTS_PER_BATCH: usize = 8;

/// What a pipeline file may say under `with:` for `uses: generate`.
#[derive(Parameters, Debug)]
pub struct GenerateParams {
    /// The model.
    #[semantic]
    pub model: Input<Model>,
    /// An adapter to put onto it.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// Its tokenizer; the model's own if left out.
    #[semantic]
    pub tokenizer: Option<Input<Tokenizer>>,
    /// What is asked: a list of texts, or a stage with rows, whose prompts are taken as training takes them.
    #[semantic]
    pub prompts: OneOf<Vec<String>, Input<Rows>>,
    /// How a text becomes a prompt: the name of a template, a text with one placeholder, or `chat` for a user's turn in the
    /// model's chat template. A text is a prompt as it stands if this is left out.
    #[semantic]
    pub template: Option<String>,
    /// Only the first so many rows, for prompts from a stage.
    #[semantic(range = 1..)]
    pub limit: Option<u64>,
    /// Longest answer, in tokens.
    #[semantic(default = 128, range = 1..)]
    pub max_new_tokens: usize,
    /// Divides the logits; 0 always takes the most likely token.
    #[semantic(default = 0.0, range = 0.0..)]
    pub temperature: f32,
    /// Draws among so many most likely tokens only.
    #[semantic(range = 1..)]
    pub top_k: Option<usize>,
    /// Draws among the fewest most likely tokens whose probabilities reach this sum.
    #[semantic(above = 0.0, range = ..=1.0)]
    pub top_p: Option<f32>,
    /// Divides the positive logits of tokens seen before and multiplies the negative ones; 1 changes nothing.
    #[semantic(above = 0.0)]
    pub repetition_penalty: Option<f32>,
    /// Decides the draws.
    #[semantic(default = 0)]
    pub seed: u64,
    /// The kernels that compute.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
    /// The samples of another stage, to be shown beside these.
    #[semantic]
    pub compare_with: Option<Input<Samples>>,
}

impl GenerateParams {
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }
}

/// The stage kind.
pub struct Generate;

impl Stage for Generate {
    const NAME: &'static str = "generate";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Lets a model answer prompts.";
    type Params = GenerateParams;

    fn outputs(_: &GenerateParams) -> Vec<Output> {
        vec![Samples::output("samples")]
    }

    fn check(params: &GenerateParams, _: &InputFacts, span: Span) -> Vec<Problem> {
        prompts::check(params, span)
    }

    fn threads(_: &GenerateParams) -> Threads {
        Threads::Many
    }

    fn run(params: &GenerateParams, context: &mut StageContext) -> Result<(), StageError> {
        let before = params.compare_with.as_ref().map(|input| context.open(input)).transpose()?;
        let before = before.map(|artifact| samples::read(&artifact.folder)).transpose()?;
        let model = context.open(&params.model)?;
        let adapter = params.adapter.as_ref().map(|input| context.open(input)).transpose()?;
        let tokenizer = params.tokenizer.as_ref().map(|input| context.open(input)).transpose()?;
        let tokenizer_folder = tokenizer.as_ref().map_or(&model.folder, |artifact| &artifact.folder);
        let tokenizer = crate::tokenizer::Tokenizer::from_folder(tokenizer_folder)?;
        let asked = prompts::collect(params, &tokenizer, context)?;
        let stop_token_ids = inference::stop_token_ids(&model.folder, &tokenizer)?;
        let limits = Limits { max_new_tokens: params.max_new_tokens, stop_token_ids: &stop_token_ids };
        let respondent = inference::open(&model, adapter.as_ref(), params.kernels, context)?;

        let mut answers = Vec::with_capacity(asked.len());
        let mut time = Duration::ZERO;
        for group in asked.chunks(PROMPTS_PER_BATCH) {
            let begin = Instant::now();
            answers.extend(answer(group, answers.len(), &*respondent, limits, params.sampling(), &tokenizer, context)?);
            time += begin.elapsed();
            context.progress("prompts", answers.len() as u64, Some(asked.len() as u64), None);
        }

        let draft = context.create("samples")?;
        samples::write(&answers, &draft.folder)?;
        let beside = before.as_deref().zip(params.compare_with.as_ref());
        let beside = beside.map(|(samples, input)| (input.reference.stage.as_str(), samples));
        let tokens: usize = answers.iter().map(|sample| sample.tokens).sum();
        let text = format!("{}\n{}", samples::report(context.stage(), &answers, beside), speed(tokens, time));
        context.emit(WorkerEvent::Report { text });
        let mut facts = Facts::new();
        facts.insert("rows".to_owned(), answers.len().into());
        facts.insert("tokens".to_owned(), tokens.into());
        context.seal(draft, facts, None)
    }
}

/// Completes a few prompts, the first of which has the number `first`.
fn answer(
    asked: &[Asked],
    first: usize,
    respondent: &dyn Inference,
    limits: Limits<'_>,
    sampling: Sampling,
    tokenizer: &crate::tokenizer::Tokenizer,
    context: &StageContext,
) -> Result<Vec<Sample>, StageError> {
    let positions = respondent.max_position_embeddings();
    for (asked, number) in asked.iter().zip(first + 1..) {
        if asked.ids.is_empty() || asked.ids.len() >= positions {
            let message =
                format!("prompt {number} has {} tokens, and the model has {positions} positions", asked.ids.len());
            return Err(StageError::bad_data(message));
        }
    }
    let requests: Vec<Request<'_>> =
        asked.iter().zip(first as u64..).map(|(asked, row)| Request { prompt: &asked.ids, row }).collect();
    let completions = respondent.complete(&requests, limits, sampling, &|| context.cancelled())?;
    asked.iter().zip(completions).map(|(asked, completion)| Sample::new(asked, &completion, tokenizer)).collect()
}

/// The line that torchtune prints. The time is that of reading the prompts and of writing the answers; the tokens are those
/// of the answers.
fn speed(tokens: usize, time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let rate = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
    format!("Time for inference: {seconds:.2} sec total, {rate:.2} tokens/sec")
}
