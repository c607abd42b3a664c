//! `uses: tokenize`: rows of text become token ids and labels, with a model's own tokenizer.
//!
//! Every row is accounted for: shortened, left out, without anything to learn, without an end. The counts are printed
//! and stored with the tokens.
//!
//! Rows are gone through in chunks, and a chunk that an earlier result was made of is taken over from there: rows that
//! are added to a data set cost what they alone cost.

mod batch;
mod chunk;
mod counts;
mod earlier;
mod elsewhere;
mod groups;
mod row;
mod speed;

use engine::artifact::{Facts, Output};
use engine::change::{StoredArtifact, TableChange};
use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads};

use crate::compute::resources::thread_pool;
use crate::data::artifact::{
    Message, OptionalColumn, OutputKind, Rows, RowsFacts, RowsReader, Shape, TokensFacts, TokensWriter,
    need_chat_template,
};
use crate::data::prompt::{PROMPT, PromptParams, PromptRenderer, ResponseBorder, TrainOn};
use crate::data::tokenizer::Tokenizer;
use batch::{Batch, Done};
use chunk::Chunks;
use counts::Counts;
use earlier::{Earlier, Piece};
use groups::Groups;
use row::RowEncoder;
use speed::{FirstRows, Opened};

/// What happens to a row of more than `max_seq_len` tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnTooLong {
    /// Its end is cut off, and its last token becomes the end-of-text token.
    Truncate,
    /// It is left out, and counted.
    Drop,
    /// The stage fails and names it.
    Error,
    /// It is split into several rows; only for plain text.
    Split,
}

/// What happens to a row without a token to train on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnNoTarget {
    /// It is left out, and counted.
    Drop,
    /// It is kept; if it was truncated, its end-of-text token is trained, as in torchtune.
    Keep,
    /// The stage fails and names it.
    Error,
}

/// What a pipeline file may say under `with:` for `uses: tokenize`.
#[derive(Debug, Parameters)]
pub struct Tokenize {
    /// The rows.
    #[semantic]
    pub dataset: Input<Rows>,
    /// The tokenizer: a checkpoint's own.
    #[semantic]
    pub tokenizer: Input<crate::data::artifact::Tokenizer>,
    /// Maximum length of a row, in tokens. Default: no limit.
    #[semantic(range = 2..)]
    pub max_seq_len: Option<usize>,
    /// The tokens that are trained. Default: `assistant`, for preference rows `response`; there `assistant` also
    /// trains the turns of the prompt, as torchtune does.
    #[semantic]
    pub train_on: Option<TrainOn>,
    /// torchtune's name for `train_on: all`; `false` means `assistant`.
    #[semantic]
    pub train_on_input: Option<bool>,
    /// What happens to a longer row. Default: plain text is split (only plain text can be), preference rows are left
    /// out, and everything else is truncated. In preference rows responses are truncated, without a new end of text.
    #[semantic]
    pub on_too_long: Option<OnTooLong>,
    /// What happens to a row without a token to train on.
    #[semantic(default = OnNoTarget::Drop)]
    pub on_no_target: OnNoTarget,
    /// The column of a row with a prompt, or the field of an assistant's message, that contains its weight in the
    /// loss. Default weight: 1; with 0 nothing is trained.
    #[semantic(omit_default)]
    pub weight: Option<String>,
    /// Whether the `reasoning_content` of an assistant's messages is trained, if the chat template renders it.
    #[semantic(default = true, omit_default)]
    pub train_on_reasoning: bool,
    /// How the border of prompt and response is found in preference rows.
    #[semantic(default = ResponseBorder::Segments, omit_default)]
    pub response_border: ResponseBorder,
    /// How a row becomes a prompt.
    #[semantic(flatten)]
    pub prompt: PromptParams,
}

impl Tokenize {
    /// Whether rows with these facts, as far as they are known, may become more rows of tokens than there are.
    fn may_split(&self, facts: Option<&Facts>) -> bool {
        let shape = facts.and_then(|facts| serde_json::from_value(facts.get("shape")?.clone()).ok());
        self.max_seq_len.is_some() && self.on_too_long(shape.unwrap_or(Shape::Text)) == OnTooLong::Split
    }

    fn on_too_long(&self, shape: Shape) -> OnTooLong {
        let default = match shape {
            Shape::Text => OnTooLong::Split,
            Shape::Pairs | Shape::Judged => OnTooLong::Drop,
            Shape::Prompt | Shape::Messages => OnTooLong::Truncate,
        };
        self.on_too_long.unwrap_or(default)
    }

    /// Why rows with these facts have no weights of the name that is given.
    fn without_weight(&self, rows: &RowsFacts, span: Span) -> Option<Problem> {
        let name = self.weight.as_ref()?;
        let message = match rows.shape {
            Shape::Messages => return None,
            Shape::Prompt if rows.columns.contains(name) => return None,
            Shape::Prompt => {
                format!("the rows have no column `{name}` with weights: they have {}", listed(&rows.columns))
            }
            Shape::Text | Shape::Pairs | Shape::Judged => {
                format!("`weight` is for prompts and conversations, and the rows are {}", rows.shape.describe())
            }
        };
        Some(Problem::error("wrong-input", span, message, "there are no such weights").at("weight"))
    }

    /// Why rows of this shape cannot be learned in this way.
    fn without_response(&self, shape: Shape, span: Span) -> Option<Problem> {
        let (field, message) = match self.train_on(shape)? {
            TrainOn::All if shape.is_preference() => {
                ("train_on", "`train_on: all` is not for preferences: prompts are the same on both sides")
            }
            TrainOn::Response if !shape.is_preference() => {
                ("train_on", "`train_on: response` is for preference rows, and these are not")
            }
            _ if self.response_border != ResponseBorder::Segments && !shape.is_preference() => {
                ("response_border", "`response_border` is for preference rows, and these are not")
            }
            _ if self.on_no_target == OnNoTarget::Keep && shape.is_preference() => {
                ("on_no_target", "a pair needs both responses: `on_no_target: keep` is not for preferences")
            }
            _ => return None,
        };
        let problem = Problem::error("bad-value", span, message, format!("the rows are {}", shape.describe()));
        Some(problem.at(field))
    }

    /// What is learned of rows of this shape; `None` where the two keys for it contradict each other.
    fn train_on(&self, shape: Shape) -> Option<TrainOn> {
        match (self.train_on, self.train_on_input) {
            (Some(train_on), Some(on_input)) if (train_on == TrainOn::All) != on_input => None,
            (Some(train_on), _) => Some(train_on),
            (None, Some(true)) => Some(TrainOn::All),
            (None, _) if shape.is_preference() => Some(TrainOn::Response),
            (None, _) => Some(TrainOn::Assistant),
        }
    }
}

impl StageKind for Tokenize {
    const NAME: &'static str = "tokenize";
    const VERSION: u32 = 10; // 10: special tokens are those of transformers 5, also for templates; no BPE dropout.
    const ABOUT: &'static str = "Turns rows into token ids and labels with a model's own tokenizer.";
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = elsewhere::KEYS;
}

impl Stage for Tokenize {
    fn outputs(&self) -> Vec<Output> {
        vec![crate::data::artifact::Tokens::output("tokens")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let facts = self.dataset.reference.facts_in(inputs);
        let rows = facts.and_then(RowsFacts::from_facts);
        let splits_prompts =
            self.on_too_long == Some(OnTooLong::Split) && rows.as_ref().is_some_and(|rows| rows.shape != Shape::Text);
        let tokenizer = self.tokenizer.reference.facts_in(inputs);
        let untold = facts
            .is_some_and(need_chat_template)
            .then(|| self.prompt.without_template(tokenizer, "dataset", span))
            .flatten();
        let medium = self.prompt.with_medium(facts, "dataset", span);
        let unweighted = rows.as_ref().and_then(|rows| self.without_weight(rows, span));
        let shape = rows.as_ref().map_or(Shape::Prompt, |rows| rows.shape);
        let unlearned = rows.as_ref().and_then(|rows| self.without_response(rows.shape, span));
        let may_be_turns = |rows: &RowsFacts| rows.shape == Shape::Messages || rows.shape.is_preference();
        let idle = rows.map_or_else(Vec::new, |rows| self.prompt.without_effect(may_be_turns(&rows), span));
        let problem = || {
            Problem::error("bad-value", span, SPLIT_IS_FOR_TEXT, "`on_too_long: split` is set here")
                .with_help("use truncate, drop or error")
                .at("on_too_long")
        };
        let contradiction = || {
            let help = "`train_on_input: true` is `train_on: all`: leave one of them out";
            Problem::error(
                "bad-value",
                span,
                TWO_ANSWERS,
                "contradicts \
                `train_on`",
            )
            .with_help(help)
            .at("train_on_input")
        };
        let problems =
            [splits_prompts.then(problem), self.train_on(shape).is_none().then(contradiction), untold, medium];
        problems.into_iter().flatten().chain(unweighted).chain(unlearned).chain(idle).collect()
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast::default();
        forecast.pass("tokens", ahead, &self.dataset.reference, ["shape"]);
        forecast.pass("tokens", ahead, &self.tokenizer.reference, ["vocab_size"]);
        forecast.fact("tokens", PROMPT, serde_json::to_value(&self.prompt).expect("options are JSON"));
        if let Some(longest) = self.max_seq_len {
            forecast.fact("tokens", LONGEST_POSSIBLE, longest);
            forecast.expect("tokens", "longest_row", longest);
        }
        let facts = self.dataset.reference.facts_in(ahead.expected);
        let rows = facts.and_then(|facts| facts.get("rows")?.as_u64());
        forecast.work = rows.map(|rows| Work::new("rows", rows as f64));
        // Without splitting, each row of text becomes one of tokens, unless it is left out.
        if let Some(rows) = rows.filter(|_| !self.may_split(facts)) {
            forecast.expect("tokens", "rows", rows);
        }
        forecast
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn compare(&self, kind: &str, old: &StoredArtifact, new: &StoredArtifact) -> Option<TableChange> {
        crate::data::artifact::compare(kind, old, new)
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let pool = thread_pool(context)?;
        let mut rows = RowsReader::open(&context.open(&self.dataset)?)?;
        let folder = context.open(&self.tokenizer)?.folder;
        let first = FirstRows::read(&mut rows)?;
        let opened = pool.install(|| Opened::from_folder(&folder, first))?;
        let shape = rows.facts().shape;
        if shape != Shape::Text && self.on_too_long == Some(OnTooLong::Split) {
            return Err(StageError::new(Cause::BadParameters, SPLIT_IS_FOR_TEXT));
        }
        check_ends(self, &opened.tokenizer, shape, context)?;
        if let Some(problem) = self.without_response(shape, Span::default()) {
            return Err(StageError::new(Cause::BadParameters, problem.message));
        }
        let train_on = self.train_on(shape).ok_or_else(|| StageError::new(Cause::BadParameters, TWO_ANSWERS))?;
        let renderer = PromptRenderer::new(&self.prompt, rows.facts(), &opened.tokenizer)?.train_on(train_on);
        if let Some(problem) = self.without_weight(rows.facts(), Span::default()) {
            return Err(StageError::new(Cause::BadParameters, problem.message));
        }
        let renderer = renderer.weighted_by(self.weight.clone()).learning_reasoning(self.train_on_reasoning);
        for template in renderer.learns_headers() {
            context.warn(format!(
                "{template} ignores `add_generation_prompt` and has no `{{% generation %}}` marks around each \
                 assistant's turn: the header of an assistant's turn is trained with the turn"
            ));
        }
        for template in renderer.has_idle_marks() {
            context.warn(format!(
                "{template}'s `{{% generation %}}` marks are not one for each assistant's turn: they are ignored, and \
                 `train_on` alone decides what is trained"
            ));
        }
        for template in renderer.leaves_the_end_open() {
            context.warn(format!(
                "{template} writes nothing behind the last turn of a conversation: its end is not trained, so the \
                 model may not learn where to stop"
            ));
        }
        let tokenizer = pool.install(|| opened.speed_up(&renderer, context));
        let encoder = RowEncoder {
            tokenizer: &tokenizer,
            renderer: &renderer,
            max_seq_len: self.max_seq_len,
            on_too_long: self.on_too_long(shape),
            on_no_target: self.on_no_target,
            response_border: self.response_border,
        };
        let mut groups = Groups::of(&mut rows, &encoder)?;
        let family = context.family(self, &self.dataset.reference)?;
        let mut earlier = Earlier::new(context, &family);
        let draft = context.create("tokens")?;
        let mut writer = TokensWriter::tokens(&draft.folder, no_tokens_yet(&tokenizer, shape, self));
        let (mut counts, mut pieces, mut taken_over, mut left_out) = (Counts::default(), Vec::new(), 0, 0);
        let (rows_facts, total) = (rows.facts().clone(), rows.len());
        let mut chunks = Chunks::new(&mut rows, &rows_facts);
        // Within the pool, so that the writer encodes on its threads too.
        pool.install(|| {
            let mut batch = Batch::read(&mut chunks, &mut earlier, context)?;
            while !batch.is_empty() {
                context.stop_if_cancelled()?;
                let (done, next) =
                    rayon::join(|| batch.encode(&encoder), || Batch::read(&mut chunks, &mut earlier, context));
                for Done { identity, rows, counts: of_chunk, taken_over: is_taken, without_reasoning } in done? {
                    counts.add(&of_chunk);
                    taken_over += if is_taken { of_chunk.read } else { 0 };
                    left_out += without_reasoning;
                    let first = writer.facts().rows;
                    pieces.push(Piece { identity, first, rows: rows.len() as u64, counts: of_chunk });
                    rows.into_iter().try_for_each(|row| writer.write(groups.complete(row)))?;
                }
                context.progress("rows", counts.read, Some(total), None);
                batch = next?;
            }
            Ok::<_, StageError>(())
        })?;
        let (facts, identity) = writer.finish(|facts| counts.write_to(facts))?;
        // In a conversation `weight: 0` takes a turn out in any case.
        let weight = self.weight.as_deref().or((shape == Shape::Messages).then_some("weight"));
        counts.report(&facts, weight, taken_over, context);
        if left_out > 0 {
            context.warn(format!(
                "{left_out} of {} rows have reasoning (`reasoning_content`, `reasoning` or `thinking`) that the \
                 chat template does not render, so that the model does not see it: set a `chat_template` that renders it, \
                 or move it into `content`, as `<think>…</think>` before the answer",
                counts.read
            ));
        }
        counts.check(&facts, weight)?;
        context.record("rows_taken_over", taken_over);
        context.seal(draft, facts.to_facts(), Some(identity))?;
        // A judged response has the response of the row before beside it, which a chunk does not know.
        if shape == Shape::Judged {
            return Ok(());
        }
        context.offer(&family, "tokens", serde_json::to_value(pieces).expect("pieces are plain data"))
    }
}

/// The fact of tokens that are still to be made that says how many a document may have at most.
pub(crate) const LONGEST_POSSIBLE: &str = "longest_possible_document";

const SPLIT_IS_FOR_TEXT: &str =
    "only plain text can be split: the rest of a prompt or a conversation would lack its beginning";

const TWO_ANSWERS: &str = "`train_on` and `train_on_input` contradict each other";

/// What is asked of the ends of rows must be possible.
fn check_ends(
    params: &Tokenize,
    tokenizer: &Tokenizer,
    shape: Shape,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let ends = [
        ("add_bos", params.prompt.add_bos, "bos_token", tokenizer.bos_token_id()),
        ("add_eos", params.prompt.add_eos, "eos_token", tokenizer.eos_token_id()),
    ];
    for (name, asked, role, id) in ends {
        if asked == Some(true) && id.is_none() {
            let message = format!("`{name}: true` is set, and the tokenizer has no `{role}`");
            return Err(StageError::new(Cause::BadParameters, message));
        }
        if asked.is_some() && shape == Shape::Messages {
            context.warn(format!("`{name}` is ignored: the chat template adds the special tokens of conversations"));
        }
    }
    let named =
        params.prompt.chat_template.as_ref().filter(|_| shape == Shape::Messages).and_then(|choice| choice.named());
    if let Some(template) = named {
        let missing: Vec<String> = template.missing_from(tokenizer).iter().map(|token| format!("`{token}`")).collect();
        if !missing.is_empty() {
            context.warn(format!(
                "the tokenizer has no token {}, which `chat_template: {}` writes: they are encoded as plain text",
                missing.join(", "),
                template.name
            ));
        }
    }
    if shape != Shape::Messages && params.prompt.add_bos.is_none() && tokenizer.wants_bos() && begins_turns(tokenizer) {
        let bos = tokenizer.special_tokens().remove("bos_token").unwrap_or_default();
        context.warn(format!(
            "rows begin with `{bos}`, the tokenizer's `bos_token`, which begins turns in its chat template: `add_bos: \
             false` leaves it out"
        ));
    }
    if shape != Shape::Messages && params.prompt.add_eos.is_none() && tokenizer.eos_token_id().is_none() {
        context.warn("the tokenizer has no end-of-text token: the model does not learn where to stop");
    }
    Ok(())
}

/// Whether the beginning-of-text token begins each turn in the tokenizer's own chat template, and no text by itself.
fn begins_turns(tokenizer: &Tokenizer) -> bool {
    let added = tokenizer.encode_with_added("x").ok().and_then(|ids| ids.first().copied());
    if added == tokenizer.bos_token_id() {
        return false;
    }
    let turns = [Message::new("user", "x")];
    let rendered = tokenizer.chat_templates().and_then(|templates| templates.without_tools().render(&turns, true).ok());
    let bos = tokenizer.special_tokens().remove("bos_token").unwrap_or_default();
    rendered.is_some_and(|text| !bos.is_empty() && text.matches(&bos).count() > 1)
}

/// `` `one`, `two` ``.
fn listed(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn no_tokens_yet(tokenizer: &Tokenizer, shape: Shape, params: &Tokenize) -> TokensFacts {
    let columns = match shape.is_preference() {
        true => vec![OptionalColumn::Group, OptionalColumn::Role, OptionalColumn::DocumentLengths],
        false => params.weight.iter().map(|_| OptionalColumn::Weight).collect(),
    };
    TokensFacts {
        max_seq_len: params.max_seq_len.map(|length| length as u64),
        vocab_size: tokenizer.vocab_size() as u64,
        bos_token_id: tokenizer.bos_token_id(),
        eos_token_id: tokenizer.eos_token_id(),
        pad_token_id: tokenizer.pad_token_id(),
        prompt: Some(params.prompt.clone()),
        train_on: params.train_on(shape),
        columns,
        ..TokensFacts::none(shape)
    }
}

#[cfg(test)]
mod preference_golden;
#[cfg(test)]
mod tests;
