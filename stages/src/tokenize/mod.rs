//! `uses: tokenize`: rows of text become token ids and labels, with a model's own tokenizer.
//!
//! Every row is accounted for: shortened, left out, without anything to learn, without an end. The counts are printed
//! and stored with the tokens.

mod row;

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, Parameters, Reference};
use engine::protocol::WorkerEvent;
use engine::stage::{InputFacts, Stage, Threads};
use rayon::prelude::*;

use crate::artifact::{OutputKind, Row, Rows, RowsFacts, RowsReader, Shape, TokensFacts, TokensWriter};
use crate::prompt::{PromptOptions, PromptRenderer};
use crate::tokenizer::Tokenizer;
use row::{Fate, RowEncoder, RowError};

/// Rows that are encoded together: memory holds this many at a time, and fewer of long ones.
const ROWS_PER_BATCH: usize = 1024;
const BYTES_PER_BATCH: usize = 8 << 20;

/// What happens to a row of more than `max_seq_len` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnTooLong {
    /// Its end is cut off, and its last token becomes the end-of-text token.
    Truncate,
    /// It is left out, and counted.
    Drop,
    /// The stage fails and names it.
    Error,
    /// It is cut into several rows; for plain text.
    Split,
}

/// What happens to a row of which nothing is learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnNoTarget {
    /// It is left out, and counted.
    Drop,
    /// It stays; where it was shortened, its end-of-text token is learned, as in torchtune.
    Keep,
    /// The stage fails and names it.
    Error,
}

/// What a pipeline file may say under `with:` for `uses: tokenize`.
#[derive(Debug, Parameters)]
pub struct TokenizeParams {
    /// The rows.
    pub dataset: Input<Rows>,
    /// The tokenizer: a checkpoint's own.
    pub tokenizer: Input<crate::artifact::Tokenizer>,
    /// Longest row kept, in tokens. Without it every row keeps its length.
    #[semantic(range = 2..)]
    pub max_seq_len: Option<usize>,
    /// Whether the loss is taken over the prompt as well as over the response.
    #[semantic(default = false)]
    pub train_on_input: bool,
    /// What happens to a longer row; by default plain text is split, and everything else truncated.
    pub on_too_long: Option<OnTooLong>,
    /// What happens to a row of which nothing is learned.
    #[semantic(default = OnNoTarget::Drop)]
    pub on_no_target: OnNoTarget,
    /// Whether prompts and texts begin with the beginning-of-text token; by default as the tokenizer's configuration says.
    /// Conversations take it from the chat template.
    pub add_bos: Option<bool>,
    /// Whether prompts and texts end with the end-of-text token, which is learned; by default where there is one.
    pub add_eos: Option<bool>,
}

impl TokenizeParams {
    fn on_too_long(&self, shape: Shape) -> OnTooLong {
        let default = if shape == Shape::Text { OnTooLong::Split } else { OnTooLong::Truncate };
        self.on_too_long.unwrap_or(default)
    }

    fn prompt_options(&self) -> PromptOptions {
        PromptOptions { add_bos: self.add_bos, add_eos: self.add_eos, train_on_input: self.train_on_input }
    }
}

/// The stage kind.
pub struct Tokenize;

impl Stage for Tokenize {
    const NAME: &'static str = "tokenize";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Turns rows into token ids and labels with a model's own tokenizer.";
    type Params = TokenizeParams;

    fn outputs(_: &TokenizeParams) -> Vec<Output> {
        vec![crate::artifact::Tokens::output("tokens")]
    }

    fn check(params: &TokenizeParams, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let rows = facts_of(&params.dataset.reference, inputs).and_then(RowsFacts::from_facts);
        let splits_prompts =
            params.on_too_long == Some(OnTooLong::Split) && rows.is_some_and(|rows| rows.shape != Shape::Text);
        let problem = || {
            Problem::error("bad-value", span, SPLIT_IS_FOR_TEXT, "`on_too_long: split` stands here")
                .with_help("use truncate, drop or error")
        };
        splits_prompts.then(problem).into_iter().collect()
    }

    fn threads(_: &TokenizeParams) -> Threads {
        Threads::Many
    }

    fn run(params: &TokenizeParams, context: &mut StageContext) -> Result<(), StageError> {
        let tokenizer = Tokenizer::open(&context.open(&params.tokenizer)?)?;
        let mut rows = RowsReader::open(&context.open(&params.dataset)?)?;
        let shape = rows.facts().shape;
        if shape != Shape::Text && params.on_too_long == Some(OnTooLong::Split) {
            return Err(StageError::new(Cause::BadParameters, SPLIT_IS_FOR_TEXT));
        }
        check_ends(params, &tokenizer, shape, context)?;
        let renderer = PromptRenderer::from_rows_facts(rows.facts(), params.prompt_options())?;
        let encoder = RowEncoder {
            tokenizer: &tokenizer,
            renderer: &renderer,
            max_seq_len: params.max_seq_len,
            on_too_long: params.on_too_long(shape),
            on_no_target: params.on_no_target,
        };
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(context.threads())
            .build()
            .or_fail(Cause::Machine, || "cannot start threads".to_owned())?;

        let draft = context.create("tokens")?;
        let mut writer = TokensWriter::tokens(&draft.folder, no_tokens_yet(&tokenizer, shape, params));
        let mut counts = Counts::default();
        let total = rows.len();
        while counts.read < total {
            stop_if_cancelled(context)?;
            let batch = next_batch(&mut rows, counts.read)?;
            let fates: Vec<Result<Fate, RowError>> =
                threads.install(|| batch.par_iter().map(|row| encoder.encode(row)).collect());
            for (offset, fate) in fates.into_iter().enumerate() {
                let fate = fate.map_err(|error| error.at_row(counts.read + offset as u64))?;
                for row in counts.note(fate) {
                    writer.write(row)?;
                }
            }
            counts.read += batch.len() as u64;
            context.progress("rows", counts.read, Some(total), None);
        }
        let (facts, identity) = writer.finish(|facts| counts.write_to(facts))?;
        counts.report(&facts, context);
        counts.check(&facts)?;
        context.seal(draft, facts.to_facts(), Some(identity))
    }
}

const SPLIT_IS_FOR_TEXT: &str =
    "only plain text can be split: of a prompt or a conversation the rest would lack its beginning";

/// The facts of an input, by the stage and output that a reference names.
pub(crate) fn facts_of<'a>(reference: &Reference, inputs: &'a InputFacts) -> Option<&'a engine::artifact::Facts> {
    let prefix = format!("{}.", reference.stage);
    match &reference.output {
        Some(output) => inputs.get(&format!("{prefix}{output}")),
        None => inputs.iter().find(|(name, _)| name.starts_with(&prefix)).map(|(_, facts)| facts),
    }
}

/// Ends the stage where the user asked for it.
pub(crate) fn stop_if_cancelled(context: &StageContext) -> Result<(), StageError> {
    if context.cancelled() { Err(StageError::new(Cause::Cancelled, "ended by the user")) } else { Ok(()) }
}

fn next_batch(rows: &mut RowsReader, from: u64) -> Result<Vec<Row>, StageError> {
    let mut batch = Vec::new();
    let mut bytes = 0;
    for index in from..rows.len() {
        let row = rows.row(index)?;
        bytes += row.text_bytes();
        batch.push(row);
        if batch.len() == ROWS_PER_BATCH || bytes >= BYTES_PER_BATCH {
            break;
        }
    }
    Ok(batch)
}

/// What is asked of the ends of rows must be possible.
fn check_ends(
    params: &TokenizeParams,
    tokenizer: &Tokenizer,
    shape: Shape,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let ends = [
        ("add_bos", params.add_bos, "bos_token", tokenizer.bos_token_id()),
        ("add_eos", params.add_eos, "eos_token", tokenizer.eos_token_id()),
    ];
    for (name, asked, role, id) in ends {
        if asked == Some(true) && id.is_none() {
            let message = format!("`{name}: true` is asked for, and the tokenizer has no `{role}`");
            return Err(StageError::new(Cause::BadParameters, message));
        }
        if asked.is_some() && shape == Shape::Messages {
            context.warn(format!("`{name}` is not heeded: conversations are framed by the chat template"));
        }
    }
    if shape != Shape::Messages && params.add_eos.is_none() && tokenizer.eos_token_id().is_none() {
        context.warn("the tokenizer has no end-of-text token: the model does not learn where to stop");
    }
    Ok(())
}

fn no_tokens_yet(tokenizer: &Tokenizer, shape: Shape, params: &TokenizeParams) -> TokensFacts {
    TokensFacts {
        rows: 0,
        documents: 0,
        tokens: 0,
        target_tokens: 0,
        longest_row: 0,
        longest_document: 0,
        largest_id: None,
        max_seq_len: params.max_seq_len.map(|length| length as u64),
        shape,
        vocab_size: tokenizer.vocab_size() as u64,
        bos_token_id: tokenizer.bos_token_id(),
        eos_token_id: tokenizer.eos_token_id(),
        pad_token_id: tokenizer.pad_token_id(),
        truncated: 0,
        fully_masked: 0,
        without_eos: 0,
        dropped: 0,
        padding: 0,
    }
}

/// What became of the rows.
#[derive(Default)]
struct Counts {
    read: u64,
    truncated: u64,
    fully_masked: u64,
    without_eos: u64,
    too_long: u64,
    dropped: u64,
}

impl Counts {
    fn note(&mut self, fate: Fate) -> Vec<crate::artifact::TokenRow> {
        match fate {
            Fate::Kept { rows, truncated, fully_masked, without_eos } => {
                self.truncated += u64::from(truncated);
                self.fully_masked += u64::from(fully_masked);
                self.without_eos += u64::from(without_eos);
                rows
            }
            Fate::TooLong => {
                self.too_long += 1;
                self.dropped += 1;
                Vec::new()
            }
            Fate::NoTarget { truncated } => {
                self.truncated += u64::from(truncated);
                self.fully_masked += 1;
                self.dropped += 1;
                Vec::new()
            }
        }
    }

    fn write_to(&self, facts: &mut TokensFacts) {
        facts.truncated = self.truncated;
        facts.fully_masked = self.fully_masked;
        facts.without_eos = self.without_eos;
        facts.dropped = self.dropped;
    }

    fn report(&self, facts: &TokensFacts, context: &mut StageContext) {
        let TokensFacts { tokens, target_tokens, longest_row, .. } = facts;
        let text = format!(
            "{} rows read, {} written: {tokens} tokens, {target_tokens} of them trained, longest row {longest_row}\n\
             {} truncated, {} too long and left out, {} without anything to learn, {} without an end of text, {} left out in all",
            self.read, facts.rows, self.truncated, self.too_long, self.fully_masked, self.without_eos, self.dropped
        );
        context.emit(WorkerEvent::Report { text });
        if self.dropped > 0 {
            context.warn(format!("{} of {} rows are left out and not trained on", self.dropped, self.read));
        }
    }

    /// A run that would learn nothing fails here, not after hours.
    fn check(&self, facts: &TokensFacts) -> Result<(), StageError> {
        if self.read == 0 {
            return Err(StageError::bad_data("the dataset has no rows"));
        }
        if facts.target_tokens > 0 {
            return Ok(());
        }
        let message = format!("none of the {} rows has a token to learn", self.read);
        let help = if self.truncated > 0 {
            "the prompts alone fill `max_seq_len`: raise it"
        } else {
            "check the response column, or set `train_on_input: true`"
        };
        Err(StageError::bad_data(message).with_help(help))
    }
}

#[cfg(test)]
mod tests;
