//! `uses: pack`: documents of tokens are laid into rows of one length, so that little of a row is padding.

mod best_fit;
mod elsewhere;
mod next_fit;

use engine::artifact::{Facts, Output};
use engine::change::{StoredArtifact, TableChange};
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads};

use crate::compute::resources::thread_pool;
use crate::data::artifact::{OutputKind, Packs, Shape, TokenRow, Tokens, TokensFacts, TokensReader, TokensWriter};
use crate::data::prompt::PROMPT;
use crate::kinds::tokenize::LONGEST_POSSIBLE;
pub use best_fit::BestFit;
pub use next_fit::{NextFit, TooLong};

/// The packing strategy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum Strategy {
    /// In order: a row ends when the next document would not fit, as in torchtune.
    NextFit,
    /// The longest document first, into the fullest row that has space for it: little padding, but the order changes.
    BestFit,
}

/// What a pipeline file may say under `with:` for `uses: pack`.
#[derive(Debug, Parameters)]
pub struct Pack {
    /// The tokens.
    #[semantic]
    pub tokens: Input<Tokens>,
    /// Length of every row, in tokens.
    #[semantic(range = 2..=16_777_216)]
    pub max_seq_len: usize,
    /// Whether a document that does not fit into the rest of a row is split and continues in the next; default: plain
    /// text is, prompts and conversations are not.
    #[semantic]
    pub split_across_pack: Option<bool>,
    /// The packing strategy.
    #[semantic(default = Strategy::NextFit)]
    pub strategy: Strategy,
}

impl Pack {
    fn splits(&self, shape: Shape) -> bool {
        self.split_across_pack.unwrap_or(shape == Shape::Text) && !shape.is_preference()
    }

    /// A pair lies whole in one pack.
    fn cuts_groups(&self, tokens: Option<&Facts>, span: Span) -> Option<Problem> {
        let shape: Shape = serde_json::from_value(tokens?.get("shape")?.clone()).ok()?;
        let message = "`split_across_pack: true` is not for preferences: responses that are compared stay together";
        let problem = || Problem::error("bad-value", span, message, format!("the rows are {}", shape.describe()));
        (shape.is_preference() && self.split_across_pack == Some(true)).then(|| problem().at("split_across_pack"))
    }
}

impl StageKind for Pack {
    const NAME: &'static str = "pack";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Lays several documents into each row, so that little of it is padding.";
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = elsewhere::KEYS;
}

impl Stage for Pack {
    fn outputs(&self) -> Vec<Output> {
        vec![Packs::output("packs")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let facts = self.tokens.reference.facts_in(inputs);
        if let Some(problem) = self.cuts_groups(facts, span) {
            return vec![problem];
        }
        if let Some(problem) = may_be_too_long(self, facts, span) {
            return vec![problem];
        }
        let tokens = facts.and_then(TokensFacts::from_facts);
        let too_long =
            tokens.filter(|tokens| tokens.longest_row > self.max_seq_len as u64 && !self.splits(tokens.shape));
        let problem = |tokens: TokensFacts| {
            let longest = tokens.longest_row;
            let message = format!("the longest row has {longest} tokens, and `max_seq_len` is {}", self.max_seq_len);
            let problem = Problem::error("out-of-range", span, message, "too short for the tokens");
            problem.with_help(fits(tokens.shape)).at("max_seq_len")
        };
        too_long.map(problem).into_iter().collect()
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast::default();
        let tokens = &self.tokens.reference;
        forecast.pass("packs", ahead, tokens, ["shape", "vocab_size", PROMPT]);
        let longest = tokens.facts_in(ahead.certain).and_then(|facts| facts.get(LONGEST_POSSIBLE)?.as_u64());
        let own = self.max_seq_len as u64;
        forecast.fact("packs", LONGEST_POSSIBLE, longest.map_or(own, |longest| longest.min(own)));
        forecast.expect("packs", "longest_row", own);
        let tokens = tokens.facts_in(ahead.expected).and_then(|facts| facts.get("tokens")?.as_f64());
        forecast.work = tokens.map(|tokens| Work::new("tokens", tokens));
        forecast
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn compare(&self, kind: &str, old: &StoredArtifact, new: &StoredArtifact) -> Option<TableChange> {
        crate::data::artifact::compare(kind, old, new)
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let mut tokens = TokensReader::open(&context.open(&self.tokens)?)?;
        let facts = tokens.facts().clone();
        let mut packer = Packer::new(self, &facts);
        let draft = context.create("packs")?;
        let max_seq_len = Some(self.max_seq_len as u64);
        let mut writer = TokensWriter::packs(&draft.folder, TokensFacts { max_seq_len, ..facts.clone() });
        let total = tokens.len();
        // Within the pool, so that the writer encodes on its threads.
        thread_pool(context)?.install(|| {
            for index in 0..total {
                let document = tokens.row(index)?;
                packer.push(&document).map_err(|error| too_long(error, index, facts.shape))?;
                while let Some(pack) = packer.next_full() {
                    writer.write(pack)?;
                }
                if index % 256 == 255 {
                    context.stop_if_cancelled()?;
                    context.progress("rows", index + 1, Some(total), None);
                }
            }
            packer.finish().try_for_each(|pack| writer.write(pack)).map_err(StageError::from)
        })?;
        context.progress("rows", total, Some(total), None);
        let (packed, identity) = writer.finish(|_| ())?;
        context.report_detail(summary(total, &packed));
        check(&packed)?;
        context.seal(draft, packed.to_facts(), Some(identity))
    }
}

/// A packer of either strategy.
enum Packer {
    NextFit(NextFit),
    BestFit(BestFit),
}

impl Packer {
    fn new(params: &Pack, facts: &TokensFacts) -> Self {
        let (splits, padding_id) = (params.splits(facts.shape), facts.pad_token_id.unwrap_or(0));
        match params.strategy {
            Strategy::NextFit => Self::NextFit(NextFit::new(params.max_seq_len, splits, padding_id)),
            Strategy::BestFit => Self::BestFit(BestFit::new(params.max_seq_len, splits, padding_id)),
        }
    }

    fn push(&mut self, document: &TokenRow) -> Result<(), TooLong> {
        match self {
            Self::NextFit(packer) => packer.push(document),
            Self::BestFit(packer) => packer.push(document),
        }
    }

    fn next_full(&mut self) -> Option<TokenRow> {
        match self {
            Self::NextFit(packer) => packer.next_full(),
            Self::BestFit(packer) => packer.next_full(),
        }
    }

    fn finish(self) -> Box<dyn Iterator<Item = TokenRow>> {
        match self {
            Self::NextFit(packer) => Box::new(packer.finish().into_iter()),
            Self::BestFit(packer) => Box::new(packer.finish()),
        }
    }
}

/// What to do about a row that is too long for a pack.
fn fits(shape: Shape) -> &'static str {
    match shape.is_preference() {
        true => "raise `max_seq_len` here, or lower it in `tokenize` to half of this: a row has both responses",
        false => "raise `max_seq_len` here, lower it in `tokenize`, or set `split_across_pack: true`",
    }
}

fn too_long(error: TooLong, index: u64, shape: Shape) -> StageError {
    StageError::bad_data(format!("row {} of the tokens does not fit into a pack", index + 1))
        .with_source(error)
        .with_help(fits(shape))
}

fn summary(rows: u64, packed: &TokensFacts) -> String {
    let all = packed.tokens + packed.padding;
    let share = 100.0 * packed.padding as f64 / all.max(1) as f64;
    format!(
        "{rows} rows in {} packs of {}: {} tokens, {} of them trained, {share:.1}% padding",
        packed.rows, packed.longest_row, packed.tokens, packed.target_tokens
    )
}

/// Rows that are not cut have to fit, and may be longer.
fn may_be_too_long(params: &Pack, tokens: Option<&Facts>, span: Span) -> Option<Problem> {
    let longest = tokens?.get(LONGEST_POSSIBLE)?.as_u64()?;
    let shape = serde_json::from_value(tokens?.get("shape")?.clone()).ok()?;
    if longest <= params.max_seq_len as u64 || params.splits(shape) {
        return None;
    }
    let message = format!("a row may have {longest} tokens, and `max_seq_len` is {} here", params.max_seq_len);
    let problem = Problem::warning("out-of-range", span, message, "too short for the longest rows");
    Some(
        problem
            .with_help("packing fails at the first row that is longer: give `tokenize` this `max_seq_len` too")
            .at("max_seq_len"),
    )
}

fn check(packed: &TokensFacts) -> Result<(), StageError> {
    match packed.target_tokens {
        0 => Err(StageError::bad_data("the packs contain no token to train on")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
