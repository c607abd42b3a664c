//! A model's own chat template: a conversation as text, turn by turn.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, context};
use serde_json::{Value, json};

use super::frame::Frame;
use super::python;
use super::render::behind_reasoning;
use super::spelling::{REASONING, Spelling, calls_tools, conversation_with_a_call, has_reasoning, tool};
use super::train_on::TrainOn;
use crate::data::artifact::{Message, TOOLS};
use crate::data::jinja::{self, Form, Program};

/// The filter that stands for `{% generation %}`.
const MARK_FILTER: &str = "generation_mark";

/// Noncharacters, which no text holds, around what `{% generation %}` marks.
const MARK_BEGIN: char = '\u{FDD0}';
const MARK_END: char = '\u{FDD1}';

/// What stands in the place of a text to find out where a template writes it: a noncharacter.
pub(super) const PLACE: &str = "\u{FDD4}";

/// The letters of a template's own message that are shown.
const LONGEST_MESSAGE: usize = 1000;

/// Where all chat templates are rendered: what they expect of Python is there, within the limits of any template.
static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = Environment::new();
    jinja::bound(&mut environment);
    python::install(&mut environment);
    environment.add_filter(MARK_FILTER, |text: &str| -> Result<String, Error> {
        jinja::made(text.len() as u64)?;
        Ok(format!("{MARK_BEGIN}{text}{MARK_END}"))
    });
    environment.add_function("raise_exception", |message: &str| -> Result<minijinja::Value, Error> {
        let message = message.chars().take(LONGEST_MESSAGE).collect::<String>();
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment
});

/// The text of a template for as long as the process lives. A compiled template borrows from its text; there are few of
/// them, and the same one, opened again, is kept once.
fn kept_text(text: String) -> &'static str {
    static TEXTS: LazyLock<Mutex<HashSet<&'static str>>> = LazyLock::new(Mutex::default);
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = texts.get(text.as_str()) {
        return known;
    }
    let text: &'static str = Box::leak(text.into_boxed_str());
    texts.insert(text);
    text
}

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template has a mistake.
    #[error("the chat template cannot be read: {0}")]
    Template(String),
    /// The template of conversations with tools has a mistake.
    #[error("conversations with tools have the template `tool_use`, and {0}")]
    ToolUse(String),
    /// The template refused the conversation, or failed over it.
    #[error("the chat template rejects the conversation: {0}")]
    Refused(String),
    /// Marks and turns do not belong together one by one.
    #[error("the chat template's `{{% generation %}}` marks are not one for each assistant's turn")]
    Marks,
    /// What a turn adds cannot be told.
    #[error(
        "turn {turn} cannot be separated: the chat template rewrites earlier turns and has no `{{% generation %}}` \
         marks"
    )]
    NotAPrefix {
        /// The turn, from 1.
        turn: usize,
    },
    /// Arguments of a call are text, and the template writes an object.
    #[error("turn {turn}: `arguments` of call {call} are text, and no JSON object with numbers of at most 64 bits")]
    Arguments {
        /// The turn, from 1.
        turn: usize,
        /// The call in the turn, from 1.
        call: usize,
    },
    /// A part of what is said is no text.
    #[error("turn {turn}: its `content` has a part {found}, and the chat template writes text alone")]
    Part {
        /// The turn, from 1.
        turn: usize,
        /// What the part is.
        found: String,
    },
    /// A turn calls tools, and the template would leave that out.
    #[error("turn {turn} calls a tool, and the chat template does not write calls")]
    Calls {
        /// The turn, from 1.
        turn: usize,
    },
    /// A turn calls a function in OpenAI's older format, and the template would leave that out.
    #[error("turn {turn} has a `function_call`, and the chat template does not write it")]
    FunctionCall {
        /// The turn, from 1.
        turn: usize,
    },
    /// There are tools, and the template would leave them out.
    #[error("there are tools, and the chat template does not write tools")]
    Tools,
}

/// Part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Its text, special tokens written out.
    pub text: String,
    /// Whether an assistant says it, so that it is learned.
    pub learn: bool,
    /// The message that it is, where an assistant says it and it can be told apart.
    pub message: Option<usize>,
}

/// What follows a conversation's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Nothing.
    End,
    /// The header of an assistant's turn.
    Answer,
}

/// A compiled chat template.
pub struct ChatTemplate {
    program: Program<'static>,
    special_tokens: BTreeMap<String, String>,
    has_marks: bool,
    marks_turns: OnceLock<bool>,
    spelling: OnceLock<Spelling>,
    frame: OnceLock<Option<Frame>>,
    end_of_reasoning: OnceLock<Option<String>>,
    /// Whether reasoning is left out of a turn that speaks, and of one that calls a tool.
    leaves_out_reasoning: OnceLock<[bool; 2]>,
}

impl ChatTemplate {
    /// Compiles a template as transformers does (jinja2 with `trim_blocks` and `lstrip_blocks`); `special_tokens` are
    /// its variables `bos_token`, `eos_token` ….
    ///
    /// # Errors
    /// Fails where it is no template.
    pub fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Result<Self, ChatError> {
        // Jinja reads each of the three ends of lines as this one.
        let (source, has_marks) = as_the_engine_reads(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let form = Form::Template(syntax.expect("the default delimiters are fine"));
        let program =
            Program::compile(kept_text(source), &form).map_err(|error| ChatError::Template(first_line(&error)))?;
        Ok(Self {
            program,
            special_tokens,
            has_marks,
            marks_turns: OnceLock::new(),
            spelling: OnceLock::new(),
            frame: OnceLock::new(),
            end_of_reasoning: OnceLock::new(),
            leaves_out_reasoning: OnceLock::new(),
        })
    }

    /// The text of a conversation; `add_generation_prompt` appends the header of an assistant's turn.
    ///
    /// # Errors
    /// Fails where the template refuses the conversation.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let mut text = self.render_with_marks(messages, add_generation_prompt)?;
        text.retain(|letter| letter != MARK_BEGIN && letter != MARK_END);
        Ok(text)
    }

    fn render_with_marks(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        self.render_as_spelled(&self.spelled(messages)?, add_generation_prompt)
    }

    fn spelling(&self) -> &Spelling {
        self.spelling.get_or_init(|| Spelling::of(|probe| self.render_as_spelled(probe, false).ok()))
    }

    /// Messages in the spelling that the template writes as it should; rendering does the same.
    ///
    /// # Errors
    /// Fails where there is none.
    pub fn spelled<'a>(&self, messages: &'a [Message]) -> Result<Cow<'a, [Message]>, ChatError> {
        let matters = Spelling::matters(messages) || self.spelling().wants_parts();
        if matters { self.spelling().apply(messages) } else { Ok(Cow::Borrowed(messages)) }
    }

    /// Checks that the template writes the tools and the calls of messages: most that cannot leave them out, and what
    /// remains of such a turn is an empty one.
    ///
    /// # Errors
    /// Fails where it would leave them out.
    pub fn check(&self, messages: &[Message]) -> Result<(), ChatError> {
        if Spelling::matters(messages) { self.spelling().check(messages) } else { Ok(()) }
    }

    fn render_as_spelled(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let tools = messages.first().and_then(|message| message.other.get(TOOLS));
        let mut messages = Cow::Borrowed(messages);
        if tools.is_some() {
            messages.to_mut()[0].other.shift_remove(TOOLS);
        }
        let context = || {
            context! {
                messages => minijinja::Value::from(Serde(&*messages)),
                add_generation_prompt => add_generation_prompt,
                tools => tools.map_or(minijinja::Value::from(()), |tools| minijinja::Value::from(Serde(tools))),
                documents => (),
                ..minijinja::Value::from(Serde(&self.special_tokens))
            }
        };
        self.program.render(&ENVIRONMENT, context).map_err(|error| ChatError::Refused(first_line(&error)))
    }

    /// A conversation in pieces, each of which is learned or not: of an assistant's turn what it says and its end, but
    /// not its header.
    ///
    /// What a template's `{% generation %}` marks surround is an assistant's turn, as for transformers; a template that
    /// marks each turn of an ordinary conversation is to mark each of every one. Without such marks, it is what
    /// rendering one message more adds to the generation prompt, or where the template rewrites earlier turns, what
    /// stands around its words. [`TrainOn::All`] needs neither, and [`TrainOn::Last`] only that the last turn can be
    /// told from what precedes it. Otherwise the pieces are the same whatever is learned.
    ///
    /// # Errors
    /// Fails where the template refuses the conversation, marks some turns of it alone, or rewrites earlier turns so
    /// that they are not found.
    pub fn turns(&self, messages: &[Message], train_on: TrainOn) -> Result<Vec<Turn>, ChatError> {
        let spoken = || (0..messages.len()).filter(|index| messages[*index].role == "assistant");
        let mut learned: Vec<usize> = match train_on {
            TrainOn::Last => spoken().next_back().into_iter().collect(),
            TrainOn::All | TrainOn::Assistant | TrainOn::Response => spoken().collect(),
        };
        let last = learned.clone();
        learned.retain(|index| train_on == TrainOn::All || has_weight(&messages[*index]));
        let spoken: Vec<usize> = spoken().collect();
        match self.marked(messages, Then::End, &learned) {
            Ok(Some(mut turns)) => {
                turns.iter_mut().for_each(|turn| turn.learn |= train_on == TrainOn::All);
                return Ok(turns);
            }
            Ok(None) => {}
            Err(ChatError::Marks) if train_on == TrainOn::All => {}
            Err(error) => return Err(error),
        }
        let turns = match self.turns_by_prefix(messages, Then::End, &spoken, &learned) {
            // Only the borders of what is learned must be known.
            Err(_) if train_on == TrainOn::Last => self.turns_told_apart(messages, Then::End, &last, &learned),
            Err(ChatError::NotAPrefix { turn }) => self.turns_by_place(messages, Then::End, &spoken, &learned, turn),
            result => result,
        };
        let turns = match turns {
            Err(ChatError::NotAPrefix { .. }) if train_on == TrainOn::All => {
                Ok(vec![Turn { text: self.render(messages, false)?, learn: true, message: None }])
            }
            Err(ChatError::NotAPrefix { .. }) if self.has_marks => Err(ChatError::Marks),
            result => result,
        };
        let mut turns = turns?;
        turns.iter_mut().for_each(|turn| turn.learn |= train_on == TrainOn::All);
        Ok(turns)
    }

    /// The pieces of [`ChatTemplate::turns`], where assistants' turns from a message on are learned, and none before.
    ///
    /// # Errors
    /// Fails where the template refuses the conversation, or the turns that are learned cannot be told apart.
    pub fn turns_from(&self, messages: &[Message], first: usize) -> Result<Vec<Turn>, ChatError> {
        let spoken: Vec<usize> = (0..messages.len()).filter(|index| messages[*index].role == "assistant").collect();
        let after: Vec<usize> = spoken.iter().copied().filter(|index| *index >= first).collect();
        let learned: Vec<usize> = after.iter().copied().filter(|index| has_weight(&messages[*index])).collect();
        if let Some(turns) = self.marked(messages, Then::End, &learned)? {
            return Ok(turns);
        }
        let turns = self.turns_by_prefix(messages, Then::End, &spoken, &learned);
        let turns = turns.or_else(|_| self.turns_told_apart(messages, Then::End, &after, &learned));
        turns.map_err(|error| if self.has_marks { ChatError::Marks } else { error })
    }

    /// A conversation up to an assistant's answer, in the pieces that [`ChatTemplate::turns`] has before that answer:
    /// no token lies in two pieces, so a model is asked in the tokens it was trained on. One piece where the
    /// template rewrites earlier turns and has no marks.
    ///
    /// # Errors
    /// Fails where the template refuses the conversation.
    pub fn asked(&self, messages: &[Message]) -> Result<Vec<Turn>, ChatError> {
        let spoken: Vec<usize> = (0..messages.len()).filter(|index| messages[*index].role == "assistant").collect();
        match self.marked(messages, Then::Answer, &[]) {
            Ok(Some(turns)) => return Ok(turns),
            Ok(None) | Err(ChatError::Marks) => {}
            Err(error) => return Err(error),
        }
        self.turns_told_apart(messages, Then::Answer, &spoken, &[])
            .or_else(|_| Ok(vec![Turn { text: self.render(messages, true)?, learn: false, message: None }]))
    }

    /// The pieces by prefixes, or else by places.
    fn turns_told_apart(
        &self,
        messages: &[Message],
        then: Then,
        told_apart: &[usize],
        learned: &[usize],
    ) -> Result<Vec<Turn>, ChatError> {
        match self.turns_by_prefix(messages, then, told_apart, learned) {
            Err(ChatError::NotAPrefix { turn }) => self.turns_by_place(messages, then, told_apart, learned, turn),
            result => result,
        }
    }

    /// The pieces where what is rendered first is not how it stays (Qwen 3 takes the reasoning out of earlier turns):
    /// each turn of `told_apart` is around a letter that takes the place of what it says, from the header before to the
    /// end behind. `turn` is the one that prefixes do not tell apart.
    fn turns_by_place(
        &self,
        messages: &[Message],
        then: Then,
        told_apart: &[usize],
        learned: &[usize],
        turn: usize,
    ) -> Result<Vec<Turn>, ChatError> {
        let cannot = || ChatError::NotAPrefix { turn };
        let frame = self.frame().filter(|frame| frame.ends_turns()).ok_or_else(cannot)?;
        let whole = self.render(messages, then == Then::Answer)?;
        let messages = self.spelled(messages)?;
        // Turns reach no further than what is said before them and behind.
        let around = told_apart.iter().flat_map(|index| index.saturating_sub(1)..=index + 1);
        let around: BTreeSet<usize> = around.filter(|index| *index < messages.len()).collect();
        let place_of = |index| Some((index, self.place_of(&messages, then, index, &whole)?));
        let places: BTreeMap<usize, Range<usize>> = around.into_iter().filter_map(place_of).collect();
        let mut turns = Vec::new();
        let mut done = 0;
        for &index in told_apart {
            let said = places.get(&index).filter(|said| done <= said.start).ok_or_else(cannot)?;
            let before = index.checked_sub(1).and_then(|before| places.get(&before)).map(|before| before.end);
            let from = before.filter(|end| (done..=said.start).contains(end)).unwrap_or(done);
            let begin = frame.begin_in(&whole[from..said.start]).ok_or_else(cannot)? + from;
            let next = places.get(&(index + 1)).and_then(|next| next.start.checked_sub(said.end));
            let own = if index + 1 < messages.len() { next } else { Some(whole.len() - said.end) };
            let end = frame.end_in(&whole[said.end..], own).ok_or_else(cannot)? + said.end;
            turns.push(Turn { text: whole[done..begin].to_owned(), learn: false, message: None });
            let learn = learned.contains(&index);
            turns.push(Turn { text: whole[begin..end].to_owned(), learn, message: Some(index) });
            done = end;
        }
        turns.push(Turn { text: whole[done..].to_owned(), learn: false, message: None });
        turns.retain(|turn| !turn.text.is_empty());
        Ok(turns)
    }

    /// Where in the whole a message, in the template's spelling, says something: its text, or the name of its last
    /// call.
    fn place_of(&self, messages: &[Message], then: Then, index: usize, whole: &str) -> Option<Range<usize>> {
        let mut messages = messages.to_vec();
        let message = &mut messages[index];
        let speaks = message.role == "assistant";
        match &mut message.content {
            Value::String(text) if !speaks => PLACE.clone_into(text),
            // Reasoning that stands in the text stays where it is.
            Value::String(text) if !text.trim().is_empty() => {
                let said = behind_reasoning(text, self.end_of_reasoning()).len();
                text.replace_range(text.len() - said.., PLACE);
            }
            Value::Array(parts) if !parts.is_empty() => *parts = vec![json!({ "type": "text", "text": PLACE })],
            _ => {
                let call = message.other.get_mut("tool_calls")?.as_array_mut()?.last_mut()?;
                let call = if call["function"].is_object() { &mut call["function"] } else { call };
                *call.get_mut("name")? = PLACE.into();
            }
        }
        place_in(whole, &self.render(&messages, then == Then::Answer).ok()?)
    }

    /// What the template writes around what an assistant says, if it can be told.
    fn frame(&self) -> Option<&Frame> {
        let eos = self.special_tokens.get("eos_token").map_or("", String::as_str);
        let told = || Frame::of(|messages, asks| self.render(messages, asks).ok(), eos);
        self.frame.get_or_init(told).as_ref()
    }

    /// Whether it writes nothing behind the last turn of a conversation, so that its end is not learned.
    pub fn leaves_the_end_open(&self) -> bool {
        self.end_of_turn().is_some_and(|end| end.trim().is_empty())
    }

    /// What the template writes behind what an assistant says.
    pub fn end_of_turn(&self) -> Option<&str> {
        self.frame().map(|frame| frame.end.as_str())
    }

    /// What the template writes behind an assistant's reasoning, if it writes any.
    pub fn end_of_reasoning(&self) -> Option<&str> {
        let told = || {
            let mut message = Message::new("assistant", "x");
            message.other.insert(REASONING[0].to_owned(), PLACE.into());
            let said = self.render(&[Message::new("user", "x"), message], false).ok()?;
            let end = said.split_once(PLACE)?.1.split_once('x')?.0.trim().to_owned();
            (!end.is_empty()).then_some(end)
        };
        self.end_of_reasoning.get_or_init(told).as_deref()
    }

    /// Whether a message has reasoning and the template writes none in such a turn, with a call or without, even where
    /// it is the last one: of earlier turns some leave it out on purpose (Qwen 3).
    pub fn leaves_out_reasoning(&self, message: &Message) -> bool {
        if !has_reasoning(message) {
            return false;
        }
        let probed = || {
            let speaks = [Message::new("user", "x"), Message::new("assistant", "x")];
            let mut calls = conversation_with_a_call("f", json!({ "n": 1 }));
            calls[0].other.insert(TOOLS.to_owned(), json!([tool("f")]));
            [speaks, calls].map(|mut probe| {
                probe[1].other.insert(REASONING[0].to_owned(), PLACE.into());
                // A template that refuses the probe may write the reasoning of others.
                self.render(&probe, false).is_ok_and(|written| !written.contains(PLACE))
            })
        };
        let [speaks, calls] = *self.leaves_out_reasoning.get_or_init(probed);
        if calls_tools(message) { calls } else { speaks }
    }

    /// What an assistant says in its last message, as the template writes it, without the end of the turn: what a model
    /// is to answer where it is asked with `asked`. None where that is not how the conversation begins.
    pub fn answer_to(&self, asked: &str, messages: &[Message]) -> Result<Option<String>, ChatError> {
        let whole = self.render(messages, false)?;
        let Some(said) = whole.strip_prefix(asked) else { return Ok(None) };
        let end = self.end_of_turn().map_or("", str::trim_end);
        let said = said.trim_end();
        Ok(Some(said.strip_suffix(end).unwrap_or(said).to_owned()))
    }

    /// The pieces, with borders before and behind the turns of `told_apart`.
    fn turns_by_prefix(
        &self,
        messages: &[Message],
        then: Then,
        told_apart: &[usize],
        learned: &[usize],
    ) -> Result<Vec<Turn>, ChatError> {
        let whole = self.render(messages, then == Then::Answer)?;
        let mut turns = Vec::new();
        let mut done = 0;
        let mut add = |end: Option<usize>, message: Option<usize>, index: usize| {
            let text = end.and_then(|end| whole.get(done..end)).ok_or(ChatError::NotAPrefix { turn: index + 1 })?;
            if !text.is_empty() {
                let learn = message.is_some_and(|message| learned.contains(&message));
                turns.push(Turn { text: text.to_owned(), learn, message });
            }
            done += text.len();
            Ok(())
        };
        for &index in told_apart {
            let asked = self.render(&messages[..index], true)?;
            add(whole.starts_with(&asked).then_some(asked.len()), None, index)?;
            let said = self.render(&messages[..=index], false)?;
            let end = self.end_within(&whole, &said);
            let missing = |end: usize| self.frame().map_or(0, |frame| frame.missing_end(&whole[end..]));
            add(end.map(|end| end + missing(end)), Some(index), index)?;
        }
        add(Some(whole.len()), None, messages.len().saturating_sub(1))?;
        Ok(turns)
    }

    /// Where a conversation ends within a longer one. Some templates (Phi-3) close whatever they are given with the
    /// end-of-text token, which the longer one has at its own end.
    fn end_within(&self, whole: &str, shorter: &str) -> Option<usize> {
        let eos = self.special_tokens.get("eos_token").map_or("", String::as_str);
        let open = shorter.strip_suffix(eos).unwrap_or(shorter);
        [shorter, open].into_iter().find(|text| whole.starts_with(text)).map(str::len)
    }

    /// Whether what is to come is asked for in another text than what is there: without that, an assistant's header
    /// cannot be told from what it says.
    pub fn has_generation_prompt(&self) -> bool {
        let messages = [Message::new("user", "x")];
        match (self.render(&messages, false), self.render(&messages, true)) {
            (Ok(whole), Ok(asked)) => self.marks_turns() || asked != whole,
            _ => true,
        }
    }

    /// Whether its marks decide in every conversation: they are one for each assistant's turn of an ordinary one.
    fn marks_turns(&self) -> bool {
        let told = || {
            let turns = ["user", "assistant", "user", "assistant"].map(|role| Message::new(role, "x"));
            self.render_with_marks(&turns, false).map_or(true, |text| text.matches(MARK_END).count() == 2)
        };
        self.has_marks && *self.marks_turns.get_or_init(told)
    }

    /// Whether it has marks that are not one for each assistant's turn, and decide nothing.
    pub fn has_idle_marks(&self) -> bool {
        self.has_marks && !self.marks_turns()
    }

    /// The pieces by its marks, where these decide.
    fn marked(&self, messages: &[Message], then: Then, learned: &[usize]) -> Result<Option<Vec<Turn>>, ChatError> {
        if self.marks_turns() { self.turns_by_marks(messages, then, learned).map(Some) } else { Ok(None) }
    }

    /// As its marks alone decide, for tests.
    #[cfg(test)]
    pub(super) fn turns_by_marks_of_all(&self, messages: &[Message]) -> Result<Vec<Turn>, ChatError> {
        self.turns_by_marks(messages, Then::End, &(0..messages.len()).collect::<Vec<_>>())
    }

    fn turns_by_marks(&self, messages: &[Message], then: Then, learned: &[usize]) -> Result<Vec<Turn>, ChatError> {
        let text = self.render_with_marks(messages, then == Then::Answer)?;
        let mut spoken = (0..messages.len()).filter(|index| messages[*index].role == "assistant");
        if text.matches(MARK_END).count() != spoken.clone().count() {
            return Err(ChatError::Marks);
        }
        let mut turns = Vec::new();
        for piece in text.split_inclusive([MARK_BEGIN, MARK_END]) {
            let message = piece.ends_with(MARK_END).then(|| spoken.next()).flatten();
            let learn = message.is_some_and(|index| learned.contains(&index));
            let text = piece.trim_end_matches([MARK_BEGIN, MARK_END]);
            if !text.is_empty() {
                turns.push(Turn { text: text.to_owned(), learn, message });
            }
        }
        Ok(turns)
    }
}

/// Where a text is that [`PLACE`] takes the place of in another rendering, if it does so once.
pub(super) fn place_in(whole: &str, with_place: &str) -> Option<Range<usize>> {
    let (before, behind) = with_place.split_once(PLACE)?;
    let end = whole.len().checked_sub(behind.len()).filter(|end| *end >= before.len())?;
    (whole.starts_with(before) && whole.ends_with(behind) && !behind.contains(PLACE)).then_some(before.len()..end)
}

/// Whether a message is not taken out of the loss with `weight: 0`, as OpenAI's format has it.
fn has_weight(message: &Message) -> bool {
    message.other.get("weight").and_then(Value::as_f64) != Some(0.0)
}

fn first_line(error: &Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (line {line} of the template)"),
        None => detail,
    }
}

/// A template as minijinja has to be given it, and whether it has marks of assistants' turns. `{% generation %}` is an
/// extension of transformers: a filter block with a scope of its own. Behind `{% raw %}` Jinja keeps a line break,
/// which minijinja trims.
fn as_the_engine_reads(source: &str) -> (String, bool) {
    let (mut result, mut has_marks) = (String::with_capacity(source.len()), false);
    let mut rest = source;
    while let Some(at) = ["{#", "{{", "{%"].iter().filter_map(|open| rest.find(open)).min() {
        let (before, from) = rest.split_at(at);
        result.push_str(before);
        rest = from;
        let end = match &from[..2] {
            "{#" => from.find("#}").map(|end| end + 2),
            "{{" => end_behind_strings(from, "}}"),
            _ => end_behind_strings(from, "%}"),
        };
        let Some(end) = end else { break };
        let (tag, after) = from.split_at(end);
        rest = after;
        let open = tag.trim_end_matches("%}");
        match name_of_tag(tag) {
            Some("generation") => {
                has_marks = true;
                result.push_str(&tag.replacen("generation", &format!("filter {MARK_FILTER} %}}{{% with"), 1));
            }
            Some("endgeneration") => result.push_str(&tag.replacen("endgeneration", "endwith %}{% endfilter", 1)),
            Some("raw") => {
                let keeps = !open.ends_with(['-', '+']);
                result.extend(if keeps { [open, "+%}"] } else { [tag, ""] });
                let (text, behind) = after.split_at(end_of_raw(after));
                result.push_str(text);
                rest = behind;
            }
            _ => result.push_str(tag),
        }
    }
    (result + rest, has_marks)
}

/// What stands in a tag, between `{%` and `%}`; none for what is no tag.
fn name_of_tag(tag: &str) -> Option<&str> {
    let inside = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    Some(inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim())
}

/// Where what has been opened is closed, which a string within it does not do.
fn end_behind_strings(text: &str, close: &str) -> Option<usize> {
    let mut quote = None;
    let mut letters = text.char_indices().skip(2);
    while let Some((at, letter)) = letters.next() {
        match quote {
            Some(_) if letter == '\\' => drop(letters.next()),
            Some(open) if letter == open => quote = None,
            Some(_) => {}
            None if text[at..].starts_with(close) => return Some(at + close.len()),
            None if matches!(letter, '\'' | '"') => quote = Some(letter),
            None => {}
        }
    }
    None
}

/// Where `{% endraw %}` begins, or the text ends.
fn end_of_raw(text: &str) -> usize {
    let tags = text.match_indices("{%").map(|(at, _)| at);
    let is_end = |at: &usize| {
        let end = text[*at..].find("%}").map(|end| at + end + 2);
        end.is_some_and(|end| name_of_tag(&text[*at..end]) == Some("endraw"))
    };
    tags.into_iter().find(is_end).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())])).unwrap()
    }

    fn conversation() -> [Message; 4] {
        [
            Message::new("user", "one"),
            Message::new("assistant", "two"),
            Message::new("user", "three"),
            Message::new("assistant", "four"),
        ]
    }

    fn pieces(turns: &[Turn]) -> Vec<(&str, bool)> {
        turns.iter().map(|turn| (turn.text.as_str(), turn.learn)).collect()
    }

    /// As jinja2 renders them.
    #[test]
    fn tags_in_strings_comments_and_raw_text_are_none() {
        for (source, expected) in [
            ("{{ '{% raw %}' }}", "{% raw %}"),
            ("{{ \"{% generation %}\" }}", "{% generation %}"),
            ("{{ '\\'{% raw %}' }}", "'{% raw %}"),
            ("{% raw %}a {% raw %} b{% endraw %}", "a {% raw %} b"),
            ("{% raw %}{% generation %}{{ x }}{% endraw %}", "{% generation %}{{ x }}"),
            ("{# a {% b #}{% raw %}\nx{% endraw %}", "\nx"),
            ("{{ '{%' }}{% raw %}\nq{% endraw %}", "{%\nq"),
            ("{# {% generation %} #}x{% set a = '%}' %}{{ a }}", "x%}"),
        ] {
            let template = template(source);
            assert_eq!(template.render(&[], false).unwrap(), expected, "{source}");
            assert!(!template.has_marks, "{source}");
        }
        let marked = template("{# {% #}{% generation %}x{% endgeneration %}");
        assert!(marked.has_marks);
        assert_eq!(marked.render(&[], false).unwrap(), "x");
    }

    #[test]
    fn an_assistants_header_is_not_learned() {
        let source = "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}.{% endfor %}\
                      {% if add_generation_prompt %}<assistant>{% endif %}";
        let turns = template(source).turns(&conversation(), TrainOn::Assistant).unwrap();
        let expected =
            [("<s><user>one.<assistant>", false), ("two.", true), ("<user>three.<assistant>", false), ("four.", true)];
        assert_eq!(pieces(&turns), expected);
    }

    #[test]
    fn a_conversation_is_asked_in_the_pieces_it_is_taught_in() {
        let template = template(
            "{% for message in messages %}<{{ message.role }}>{{ message.content }}.{% endfor %}\
             {% if add_generation_prompt %}<assistant>{% endif %}",
        );
        let asked = template.asked(&conversation()[..3]).unwrap();
        assert_eq!(asked.len(), 3, "{asked:?}");
        for train_on in [TrainOn::Assistant, TrainOn::Last] {
            let taught = template.turns(&conversation(), train_on).unwrap();
            let texts = |turns: &[Turn]| turns.iter().map(|turn| turn.text.clone()).collect::<Vec<_>>();
            assert_eq!(texts(&asked), texts(&taught[..3]), "{train_on:?}");
        }
    }

    #[test]
    fn what_is_rewritten_is_asked_in_the_pieces_of_its_marks_or_in_one() {
        let asked = template(REWRITES).asked(&conversation()[..3]).unwrap();
        assert_eq!(pieces(&asked), [("U:one|A:", false), ("t|", false), ("U:three|A:", false)]);
        let unmarked = REWRITES.replace("{%- generation %}", "").replace("{% endgeneration %}", "");
        let by_place = template(&unmarked).asked(&conversation()[..3]).unwrap();
        assert_eq!(pieces(&by_place), [("U:one|A:", false), ("t|", false), ("U:three|A:", false)]);
        let without_end = unmarked.replace('|', "");
        let asked = template(&without_end).asked(&conversation()[..3]).unwrap();
        assert_eq!(
            asked.iter().map(|turn| turn.text.trim()).collect::<String>().replace('\n', ""),
            "U:oneA:tU:threeA:"
        );
        assert_eq!(asked.len(), 1);
    }

    /// As some templates drop the reasoning of earlier turns.
    const REWRITES: &str = "{% for message in messages %}\n\
         {%- if message.role == 'assistant' %}\n\
         A:{%- generation %}{{ message.content if loop.last else message.content[:1] }}|{% endgeneration %}\n\
         {%- else %}U:{{ message.content }}|{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}";

    #[test]
    fn generation_marks_decide_where_earlier_turns_are_rewritten() {
        let turns = template(REWRITES).turns(&conversation(), TrainOn::Assistant).unwrap();
        assert_eq!(pieces(&turns), [("U:one|A:", false), ("t|", true), ("U:three|A:", false), ("four|", true)]);
    }

    #[test]
    fn marks_come_before_the_generation_prompt() {
        let source = "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}hm\
                      {% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}.\
                      {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let template = template(source);
        let marked = [("<user>one.<assistant>hm", false), ("two", true), (".<user>three.<assistant>hm", false)];
        let expected = [&marked[..], &[("four", true), (".", false)]].concat();
        assert_eq!(pieces(&template.turns(&conversation(), TrainOn::Assistant).unwrap()), expected);
        let asked = template.asked(&conversation()[..3]).unwrap();
        assert_eq!(
            pieces(&asked),
            [("<user>one.<assistant>hm", false), ("two", false), (".<user>three.<assistant>", false)]
        );
        // Marks that are not one for each turn say nothing.
        let first = "{% for message in messages %}<{{ message.role }}>{% if loop.index == 2 %}{% generation %}\
                     {{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}.{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
        let turns = self::template(first).turns(&conversation(), TrainOn::Assistant).unwrap();
        assert_eq!(pieces(&turns)[1], ("two.", true));
    }

    #[test]
    fn fields_of_a_message_lie_as_they_do_without_tools() {
        let mut message = Message::new("user", "x");
        let other = json!({ TOOLS: [{ "name": "f" }], "alpha": 2, "mid": 4, "zeta": 1 });
        message.other = other.as_object().unwrap().clone();
        let rendered = template("{{ messages[0]|tojson }}{{ tools|length }}").render(&[message], false).unwrap();
        assert_eq!(rendered, r#"{"role": "user", "content": "x", "alpha": 2, "mid": 4, "zeta": 1}1"#);
    }

    #[test]
    fn ends_of_lines_in_a_template_are_read_as_jinja_reads_them() {
        let source = "{% for m in messages %}\r\n{{ m.content }}\r\n{% endfor %}\rend";
        let rendered = template(source).render(&[Message::new("user", "a\r\nb")], false).unwrap();
        assert_eq!(rendered, "a\r\nb\nend");
    }

    #[test]
    fn reasoning_that_a_template_writes_in_no_turn_is_left_out() {
        let mut speaks = Message::new("assistant", "4");
        speaks.other.insert("thinking".to_owned(), "2 + 2".into());
        let mut calls = speaks.clone();
        calls.other.insert("tool_calls".to_owned(), json!([{ "function": { "name": "f", "arguments": {} } }]));
        let left_out = |writes: &str| {
            let source =
                format!("{{% for m in messages %}}<{{{{ m.role }}}}>{writes}{{{{ m.content }}}}{{% endfor %}}");
            let template = template(&source);
            [&speaks, &calls].map(|message| template.leaves_out_reasoning(message))
        };
        let writes = "{{ m.reasoning_content or '' }}";
        let writes_if = |condition: &str| format!("{{% if {condition} %}}{writes}{{% endif %}}");
        for (writes, expected) in [
            ("", [true, true]),
            (writes, [false, false]),
            ("{{ m.thinking or '' }}", [false, false]),
            ("{{ m|tojson }}", [false, false]),
            (writes_if("loop.last").as_str(), [false, false]),
            (writes_if("m.tool_calls").as_str(), [true, false]),
            (writes_if("enable_thinking").as_str(), [true, true]),
            // What it does not write of a call is not known.
            ("{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}", [true, false]),
        ] {
            assert_eq!(left_out(writes), expected, "{writes}");
        }
        let none = template("");
        let [blank, others] = [("assistant", " "), ("user", "2 + 2")].map(|(role, reasoning)| {
            let mut message = Message::new(role, "4");
            message.other.insert("reasoning_content".to_owned(), reasoning.into());
            none.leaves_out_reasoning(&message)
        });
        assert!(!blank && !others && !none.leaves_out_reasoning(&Message::new("assistant", "4")));
    }

    #[test]
    fn marks_decide_in_every_row_or_in_none() {
        let turn = "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>";
        let source = |marked: &str| {
            format!(
                "{{% for m in messages %}}<{{{{ m.role }}}}>{{% if m.role == 'assistant' and {marked} %}}{turn}\
                 {{% else %}}{{{{ m.content }}}}<|im_end|>{{% endif %}}{{% endfor %}}"
            )
        };
        let mut calls = conversation();
        calls[1].other.insert("tool_calls".to_owned(), json!([{ "function": { "name": "f", "arguments": {} } }]));
        let marks_speech = template(&source("not m.tool_calls"));
        let turns = marks_speech.turns(&conversation(), TrainOn::Assistant).unwrap();
        assert_eq!(pieces(&turns)[1], ("two", true));
        for train_on in [TrainOn::Assistant, TrainOn::Last] {
            assert!(matches!(marks_speech.turns(&calls, train_on), Err(ChatError::Marks)), "{train_on:?}");
        }
        assert!(matches!(marks_speech.turns_from(&calls, 2), Err(ChatError::Marks)));
        assert!(marks_speech.turns(&calls, TrainOn::All).unwrap().iter().all(|turn| turn.learn));
        assert!(!marks_speech.has_idle_marks() && marks_speech.has_generation_prompt());
        assert_eq!(
            marks_speech.asked(&calls[..3]).unwrap().iter().map(|turn| turn.text.as_str()).collect::<String>(),
            marks_speech.render(&calls[..3], true).unwrap()
        );
        // A row of one turn goes by the same rule as longer ones.
        let marks_last = template(&source("loop.last"));
        assert!(marks_last.has_idle_marks() && !marks_last.has_generation_prompt());
        for messages in [&conversation()[..2], &conversation()] {
            let turns = marks_last.turns(messages, TrainOn::Assistant).unwrap();
            let last = turns.iter().rfind(|turn| turn.learn).unwrap();
            assert!(last.text.ends_with("<|im_end|>") && last.text.starts_with("<assistant>"), "{turns:?}");
        }
    }

    #[test]
    fn a_template_asks_or_marks_or_neither() {
        let plain = "{% for message in messages %}<{{ message.role }}>{{ message.content }}.{% endfor %}";
        assert!(!template(plain).has_generation_prompt());
        let asks = format!("{plain}{{% if add_generation_prompt %}}<assistant>{{% endif %}}");
        assert!(template(&asks).has_generation_prompt());
        let marks = plain.replace(
            "{{ message.content }}",
            "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% else %}\
             {{ message.content }}{% endif %}",
        );
        assert!(template(&marks).has_generation_prompt());
    }

    #[test]
    fn a_last_turn_without_weight_is_not_learned() {
        let source = "{% for message in messages %}<{{ message.role }}>{{ message.content }}.{% endfor %}\
                      {% if add_generation_prompt %}<assistant>{% endif %}";
        let mut conversation = conversation();
        conversation[3].other.insert("weight".to_owned(), 0.into());
        let turns = template(source).turns(&conversation, TrainOn::Last).unwrap();
        assert!(turns.iter().all(|turn| !turn.learn), "{turns:?}");
    }

    #[test]
    fn a_turn_that_is_rewritten_is_found_in_its_place_if_something_ends_it() {
        let source = REWRITES.replace("{%- generation %}", "").replace("{% endgeneration %}", "");
        let expected = [("U:one|A:", false), ("t|", true), ("U:three|A:", false), ("four|", true)];
        assert_eq!(pieces(&template(&source).turns(&conversation(), TrainOn::Assistant).unwrap()), expected);
        let error = template(&source.replace('|', "")).turns(&conversation(), TrainOn::Assistant).unwrap_err();
        assert!(matches!(error, ChatError::NotAPrefix { turn: 2 }), "{error}");
    }

    #[test]
    fn a_template_can_refuse() {
        let error =
            template("{{ raise_exception('roles must alternate') }}").render(&conversation(), false).unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    /// Texts are as transformers renders them.
    #[test]
    fn generation_marks_are_a_scope() {
        for (source, expected) in [
            (
                "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = x + 1 %}\
                 {{ m.content }}{{ x }}{{ loop.index }}{% endgeneration %}{% endif %}{{ x }}{% endfor %}{{ x }}",
                "1two2211",
            ),
            (
                "{% set n = namespace(x=1) %}{%- generation -%} {% set n.x = 2 %}{% set y = 3 %}{{ y }}\n\
                 {%- endgeneration -%} {{ n.x }}{{ y is defined }}",
                "32False",
            ),
            ("{% generation %}{% macro f() %}m{% endmacro %}{{ f() }}{% endgeneration %}{{ f is defined }}", "mFalse"),
            ("a{% if true %}\n  {% generation %}\n  b\n  {% endgeneration %}\n{% endif %}c", "a  b\nc"),
        ] {
            assert_eq!(template(source).render(&conversation()[..2], false).unwrap(), expected, "{source}");
        }
        let filters = "{% filter upper %}{{ messages[0].content }}{% endfilter %}";
        assert!(!template(filters).has_idle_marks());
    }

    /// Texts are as transformers renders them.
    #[test]
    fn a_line_break_behind_raw_stays() {
        for (source, expected) in [
            ("{% raw %}\n  {{ a }}\n{% endraw %}\nb", "\n  {{ a }}\nb"),
            ("  {%- raw -%}\n {{ a }}\n  {%- endraw %}\nb", "{{ a }}b"),
            ("x{%raw%}\n\n{{ a }}{% endraw %}\n\nb", "x\n\n{{ a }}\nb"),
        ] {
            assert_eq!(template(source).render(&conversation(), false).unwrap(), expected, "{source}");
        }
    }

    /// Texts and errors are those of transformers.
    #[test]
    fn what_is_not_defined_is_no_json_and_keys_are_no_attributes() {
        let rendered = |source: &str| template(source).render(&conversation()[..2], false);
        for source in [
            "{{ missing|tojson }}",
            "{{ [messages[0].missing]|tojson }}",
            "{{ {'a': {'b': [1, messages[0].missing]}}|tojson }}",
        ] {
            let error = rendered(source).unwrap_err().to_string();
            assert!(error.contains("an undefined value is not JSON serializable"), "{source}: {error}");
        }
        for source in ["{{ missing|attr('x') }}", "{{ messages|attr(0) }}"] {
            assert!(rendered(source).is_err(), "{source}");
        }
        for (source, expected) in [
            ("{{ none|tojson }}{{ [none]|tojson }}{{ missing|default('x')|tojson }}", "null[null]\"x\""),
            ("{{ messages[0]|attr('role') is defined }}{{ {'a': 1}|attr('a') }}", "False"),
            ("{{ none|attr('x') is defined }}{{ 'a'|attr('x') is defined }}", "FalseFalse"),
            ("{% set n = namespace(x=1) %}{{ n|attr('x') }}{{ n|attr('y') is defined }}", "1False"),
            ("{% for m in messages %}{{ loop|attr('index') }}{% endfor %}", "12"),
            ("{% macro f(a) %}{% endmacro %}{{ f|attr('name') }}", "f"),
            ("{{ messages|map(attribute='role')|join(' ') }}", "user assistant"),
        ] {
            assert_eq!(rendered(source).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn no_template_of_a_checkpoint_takes_the_machine() {
        for source in [
            "{{ '%2000000000s'|format(messages[0].content) }}",
            "{{ (messages[0].content * 100000).replace('o', messages[0].content * 100000) }}",
            "{{ range(90000)|join(messages[0].content * 10000) }}",
            "{{ messages|batch(1000000000, 1)|list|length }}",
            "{{ messages[0].content|indent(2000000000) }}",
            "{{ messages|tojson(indent=2000000000) }}",
            "{{ messages|tojson(separators=('a' * 100000, 'b' * 100000)) * 1000 }}",
            "{{ (messages * 1000000)|tojson }}",
            "{% set n = namespace(x=messages[0].content) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "{% set n = namespace(x=messages) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
            "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}",
            "{% for a in range(100000) %}{% generation %}{{ 'a' * 100000 }}{% endgeneration %}{% endfor %}",
            "{{ strftime_now('%F' * 100000000) }}",
        ] {
            let begin = std::time::Instant::now();
            let refused = ChatTemplate::new(source, BTreeMap::new())
                .and_then(|template| template.render(&conversation(), false))
                .map(|text| text.len())
                .expect_err(source);
            assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{source}: {:?}", begin.elapsed());
            let told = ["256 MiB", "10000000 steps", "nested deeper", "constants"];
            let refused = refused.to_string();
            assert!(told.iter().any(|told| refused.contains(told)) && refused.len() < 300, "{source}: {refused}");
        }
        let deep = format!("{{{{ {}1 }}}}", "-".repeat(100_000));
        assert!(matches!(ChatTemplate::new(&deep, BTreeMap::new()), Err(ChatError::Template(_))));
    }

    #[test]
    fn what_templates_expect_of_python_is_there() {
        let source = "{%- for message in messages %}\n    {%- if message['role'].startswith('user') %}\n\
            {{- message.content.strip().upper() + '\\n' }}\n    {%- endif %}\n{%- endfor %}\n\
            {{- messages[0] | tojson }}{{ strftime_now('%d %b %Y') }}{{ none }}{{ tools is none }}{{ x is defined }}";
        let text = template(source).render(&conversation()[..2], false).unwrap();
        assert_eq!(text, "ONE\n{\"role\": \"user\", \"content\": \"one\"}26 Jul 2024NoneTrueFalse");
    }
}
