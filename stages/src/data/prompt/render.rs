//! From a row to a prompt, and from a prompt to ids and labels.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use engine::error::{Cause, StageError};

use super::chat::{ChatError, ChatTemplate, PLACE, Turn, place_in};
use super::chat_templates::{ChatTemplates, has_tools};
use super::control::{ControlTexts, is_marked, without_marks, without_our_own};
use super::params::PromptParams;
use super::spelling::REASONING;
use super::strftime;
use super::template::Template;
use super::tool_calls::ToolForm;
use super::train_on::TrainOn;
use crate::data::artifact::{IGNORE_INDEX, Message, Row, RowsFacts, Said, Shape, TOOLS};
use crate::data::tokenizer::{Tokenizer, TokenizerError};

/// Why a row does not become a prompt.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The rows' facts name no template.
    #[error("the rows do not say which template makes a prompt of them")]
    NoTemplate,
    /// Conversations need a chat template.
    #[error("conversations need a chat template, and the tokenizer has none; `chat_template` can give one")]
    NoChatTemplate,
    /// The row is of another shape than its facts say.
    #[error("a row is not what the facts about the rows say")]
    OtherShape,
    /// The chat template that was asked for does not compile.
    #[error("`chat_template` cannot be used")]
    ChatTemplate(#[source] ChatError),
    /// The chat template fails over a conversation.
    #[error("a conversation cannot be rendered")]
    Chat(#[from] ChatError),
    /// The tokenizer fails.
    #[error("a prompt cannot be encoded")]
    Tokenizer(#[from] TokenizerError),
    /// A weight is none.
    #[error("its weight `{name}` is {found}, and a number of at least 0 is expected")]
    Weight {
        /// Where it is: the column, or the field of a message.
        name: String,
        /// What is there.
        found: String,
    },
    /// A weight has no full precision in f32: gradients times it would be nothing, and divided by it no numbers.
    #[error("its weight `{name}` is {found}, below {:e}, the smallest normal number of f32", f32::MIN_POSITIVE)]
    WeightTooSmall {
        /// Where it is: the column, or the field of a message.
        name: String,
        /// What is there.
        found: String,
    },
    /// Where a template writes reasoning cannot be told.
    #[error("the chat template does not write the reasoning of a turn as it is in one place")]
    Reasoning,
    /// Turns have weights, and where they begin and end is not known.
    #[error("its turns have weights, and the chat template does not mark the text of each turn")]
    WeightOfUnknownTurn,
}

impl PromptError {
    /// What to do about it, in any stage.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::NoChatTemplate => Some("set `chat_template: chatml`, or take the tokenizer of a chat model"),
            Self::Chat(ChatError::NotAPrefix { .. }) => {
                Some("give a `chat_template` with `{% generation %}` around the assistant's text")
            }
            Self::Chat(ChatError::Marks) => {
                Some("give a `chat_template` with `{% generation %}` around every assistant's turn, or with none")
            }
            Self::Chat(
                ChatError::ToolUse(_)
                | ChatError::Refused(_)
                | ChatError::Arguments { .. }
                | ChatError::Part { .. }
                | ChatError::Calls { .. }
                | ChatError::Tools,
            ) => {
                Some("give another `chat_template`, or leave such rows out with `filter` in the stage that makes them")
            }
            Self::Chat(ChatError::FunctionCall { .. }) => Some(
                "write it as `tool_calls`, OpenAI's newer format, or leave such rows out with `filter` in the stage that makes them",
            ),
            Self::WeightOfUnknownTurn => {
                Some("give a `chat_template` with `{% generation %}` around the assistant's text")
            }
            Self::Reasoning => {
                Some("give another `chat_template`, or train on reasoning too: `train_on_reasoning: true`")
            }
            Self::WeightTooSmall { .. } => {
                Some("multiply all weights by the same number, which changes nothing else, or set small ones to 0")
            }
            Self::Weight { .. } => {
                Some("correct the rows, or leave them out with `filter` in the stage that makes them")
            }
            Self::NoTemplate
            | Self::OtherShape
            | Self::ChatTemplate(_)
            | Self::Chat(ChatError::Template(_))
            | Self::Tokenizer(_) => None,
        }
    }

    /// As the failure of a stage, in these words.
    pub fn failing(self, cause: Cause, message: impl Into<String>) -> StageError {
        let help = self.help();
        let failure = StageError::new(cause, message).with_source(self);
        match help {
            Some(help) => failure.with_help(help),
            None => failure,
        }
    }
}

impl From<PromptError> for StageError {
    fn from(error: PromptError) -> Self {
        let cause = match &error {
            PromptError::ChatTemplate(_) => Cause::BadParameters,
            _ => Cause::BadData,
        };
        error.failing(cause, "a row cannot be turned into a prompt")
    }
}

/// What a segment holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text. What stands between the marks of [`ControlTexts::mark`] is plain text.
    Text(String),
    /// Ids that no text stands for, such as the beginning of a text.
    Ids(Vec<u32>),
}

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    /// What it holds.
    pub piece: Piece,
    /// Whether the loss is taken over it.
    pub learn: bool,
    /// Its weight in the loss, where the rows have weights; else 1.
    pub weight: f32,
}

impl Segment {
    /// Gives it a weight; what has none is not learned.
    fn weigh(&mut self, weight: f32) {
        self.weight = weight;
        self.learn &= weight > 0.0;
    }

    fn text(&self) -> Option<&str> {
        match &self.piece {
            Piece::Text(text) => Some(text),
            Piece::Ids(_) => None,
        }
    }
}

/// What a model is shown.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prompt {
    /// Its parts, in order.
    pub segments: Vec<Segment>,
}

/// A prompt as ids, and what each position is to be predicted as.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Encoded {
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// Labels, not shifted; [`IGNORE_INDEX`] where nothing is learned.
    pub labels: Vec<i32>,
    /// Weight of each id in the loss; empty where all are 1.
    pub weights: Vec<f32>,
}

impl Encoded {
    fn add(&mut self, ids: &[u32], segment: &Segment, is_weighted: bool) {
        self.labels.extend(ids.iter().map(|id| if segment.learn { *id as i32 } else { IGNORE_INDEX }));
        self.input_ids.extend(ids);
        if is_weighted {
            self.weights.resize(self.input_ids.len(), segment.weight);
        }
    }
}

/// A prompt without its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// What the model is asked.
    pub prompt: Prompt,
    /// What the data gives as the answer, if it gives one.
    pub reference: Option<String>,
}

impl Prompt {
    pub(super) fn text(&mut self, text: impl Into<String>, learn: bool) {
        self.segments.push(Segment { piece: Piece::Text(text.into()), learn, weight: 1.0 });
    }

    pub(super) fn id(&mut self, id: Option<u32>, learn: bool) {
        if let Some(id) = id {
            self.segments.push(Segment { piece: Piece::Ids(vec![id]), learn, weight: 1.0 });
        }
    }

    /// Encodes the text of the segments as the tokenizer does ([`Tokenizer::encode_texts`]), and cuts its ids where
    /// segments meet.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Result<Encoded, PromptError> {
        let mut encoded = Encoded::default();
        let is_weighted = self.segments.iter().any(|segment| segment.weight != 1.0);
        for run in self.runs() {
            let texts: Vec<&str> = run.iter().filter_map(Segment::text).collect();
            let mut of_texts = tokenizer.encode_texts(&texts)?.into_iter();
            for segment in run {
                match &segment.piece {
                    Piece::Text(_) => encoded.add(&of_texts.next().unwrap_or_default(), segment, is_weighted),
                    Piece::Ids(ids) => encoded.add(ids, segment, is_weighted),
                }
            }
        }
        Ok(encoded)
    }

    /// Segments of text that follow each other, and each segment of ids by itself: a text begins anew behind them.
    fn runs(&self) -> impl Iterator<Item = &[Segment]> {
        self.segments.chunk_by(|one, next| one.text().is_some() && next.text().is_some())
    }

    /// The texts that the tokenizer is given.
    pub(crate) fn encoded_texts(&self, tokenizer: &Tokenizer) -> Vec<String> {
        let of_run = |run: &[Segment]| {
            let texts: Vec<&str> = run.iter().filter_map(Segment::text).collect();
            tokenizer.encoded_together(&texts).into_iter().map(Cow::into_owned).collect::<Vec<_>>()
        };
        self.runs().flat_map(of_run).collect()
    }

    /// Whether the data had control tokens written out that are read as plain text.
    pub fn is_sanitized(&self) -> bool {
        self.segments.iter().any(|segment| matches!(&segment.piece, Piece::Text(text) if is_marked(text)))
    }

    /// The text of the segments, for people.
    pub fn to_text(&self, tokenizer: &Tokenizer) -> Result<String, PromptError> {
        let mut text = String::new();
        for segment in &self.segments {
            match &segment.piece {
                Piece::Text(piece) => text.push_str(&without_marks(piece)),
                Piece::Ids(ids) => text.push_str(&tokenizer.decode_with_special(ids)?),
            }
        }
        Ok(text)
    }
}

/// Makes prompts of texts, in the one way that the parameters describe. [`PromptRenderer`] does so of rows.
#[derive(Clone)]
pub struct Prompter {
    params: PromptParams,
    /// The one asked for, else those of the tokenizer.
    chat_templates: Option<Arc<ChatTemplates>>,
}

impl Prompter {
    /// For a tokenizer; every call takes the same one.
    ///
    /// # Errors
    /// Fails where `chat_template` does not compile.
    pub fn new(params: &PromptParams, tokenizer: &Tokenizer) -> Result<Self, PromptError> {
        let chat_templates = match &params.chat_template {
            Some(choice) => {
                let templates = ChatTemplates::new(choice.text(), None, tokenizer.special_tokens());
                Some(Arc::new(templates.map_err(PromptError::ChatTemplate)?))
            }
            None => tokenizer.chat_templates().cloned(),
        };
        Ok(Self { params: params.clone(), chat_templates })
    }

    /// A text as it stands, after the beginning-of-text token where one is wanted.
    pub fn plain(&self, text: &str, tokenizer: &Tokenizer) -> Prompt {
        let mut prompt = Prompt::default();
        prompt.id(self.bos(tokenizer), false);
        prompt.text(self.data(text, tokenizer, false), false);
        prompt
    }

    /// A text that a response follows, after the beginning-of-text token where one is wanted.
    pub(super) fn asked_text(&self, text: &str, tokenizer: &Tokenizer) -> Prompt {
        let mut prompt = Prompt::default();
        prompt.id(self.bos(tokenizer), false);
        if !text.is_empty() {
            prompt.text(self.data(text, tokenizer, true), false);
        }
        prompt
    }

    /// What a template makes of columns, after the beginning-of-text token where one is wanted.
    pub fn templated(&self, template: &Template, columns: &BTreeMap<String, String>, tokenizer: &Tokenizer) -> Prompt {
        let mut prompt = Prompt::default();
        prompt.id(self.bos(tokenizer), false);
        prompt.text(self.fill(template, columns, tokenizer), false);
        prompt
    }

    /// What a user says, in the words of the chat template, up to the assistant's answer.
    ///
    /// # Errors
    /// Fails where there is no chat template or it refuses.
    pub fn user_turn(&self, text: &str, tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        self.conversation(&[Message::new("user", text)], tokenizer)
    }

    /// A conversation up to the assistant's answer.
    ///
    /// # Errors
    /// Fails where there is no chat template or it refuses.
    pub fn conversation(&self, messages: &[Message], tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        let messages = self.messages(messages, tokenizer)?;
        asked(self.chat_template(&messages)?, &messages)
    }

    /// The same where `strftime_now` of the template has the local time. In all that is kept, it stands still.
    ///
    /// # Errors
    /// As for [`Prompter::conversation`].
    pub fn conversation_now(&self, messages: &[Message], tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        strftime::at_local_time(|| self.conversation(messages, tokenizer))
    }

    /// The last message as a model is to say it that is asked with a prompt: what the template writes of it, but for
    /// reasoning; where the prompt is not how the conversation begins, its text.
    fn reference(&self, prompt: &Prompt, messages: &[Message], tokenizer: &Tokenizer) -> Result<String, PromptError> {
        let template = self.chat_template(messages)?;
        let asked: String = prompt.segments.iter().filter_map(Segment::text).collect();
        let text = || messages.last().into_iter().flat_map(Message::texts).collect();
        let said = template.answer_to(&asked, messages)?.unwrap_or_else(text);
        // As a completion is decoded.
        let said = tokenizer.control_texts().decoded(&said);
        Ok(behind_reasoning(&said, template.end_of_reasoning()).trim().to_owned())
    }

    /// What ends the reasoning that the template of a conversation lets a model write before its answer.
    fn end_of_reasoning(&self, messages: &[Message]) -> Option<&str> {
        self.chat_template(messages).ok()?.end_of_reasoning()
    }

    /// The texts that end the answers to conversations.
    pub fn stop_texts(&self, tokenizer: &Tokenizer) -> StopTexts {
        let of = |template: &ChatTemplate| stop_text(template.end_of_turn()?, tokenizer);
        let templates = self.chat_templates();
        StopTexts {
            without_tools: templates.and_then(|templates| of(templates.without_tools())),
            with_tools: templates.and_then(|templates| of(templates.with_tools().ok()?)),
        }
    }

    /// How the template of conversations with tools writes calls of them, if it does and in a form that can be read.
    pub fn tool_form(&self) -> Option<ToolForm> {
        ToolForm::of(self.chat_templates()?.with_tools().ok()?)
    }

    /// Whether prompts and texts begin with the beginning-of-text token.
    pub fn adds_bos(&self, tokenizer: &Tokenizer) -> bool {
        self.bos(tokenizer).is_some()
    }

    /// The template of a conversation.
    ///
    /// # Errors
    /// Fails where there is none, or it is one with a mistake.
    pub fn chat_template(&self, messages: &[Message]) -> Result<&ChatTemplate, PromptError> {
        Ok(self.chat_templates().ok_or(PromptError::NoChatTemplate)?.of(messages)?)
    }

    /// The templates of conversations, if there are any.
    pub fn chat_templates(&self) -> Option<&ChatTemplates> {
        self.chat_templates.as_deref()
    }

    pub(super) fn bos(&self, tokenizer: &Tokenizer) -> Option<u32> {
        let wanted = self.params.add_bos.unwrap_or(tokenizer.wants_bos());
        tokenizer.bos_token_id().filter(|_| wanted)
    }

    pub(super) fn eos(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.eos_token_id().filter(|_| self.params.add_eos.unwrap_or(true))
    }

    /// The end-of-text token behind a response that its template has ended already.
    fn eos_if_asked(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.eos_token_id().filter(|_| self.params.add_eos == Some(true))
    }

    /// A text of the data, in which control tokens are marked as plain text where that is asked for.
    pub(super) fn data(&self, text: &str, tokenizer: &Tokenizer, by_default: bool) -> String {
        let marked = self.control_texts(tokenizer, by_default).and_then(|control| control.mark(text));
        marked.unwrap_or_else(|| text.to_owned())
    }

    fn fill(&self, template: &Template, columns: &BTreeMap<String, String>, tokenizer: &Tokenizer) -> String {
        let Some(control) = self.control_texts(tokenizer, true) else { return template.render(columns) };
        let mut clean = Cow::Borrowed(columns);
        for (name, text) in columns {
            if let Cow::Owned(text) = without_our_own(text) {
                clean.to_mut().insert(name.clone(), text);
            }
        }
        let (text, data) = template.render_with_data(&clean);
        control.mark_within(&text, &data).unwrap_or(text)
    }

    /// The messages as a chat template gets them: with a system message where one is to be added.
    ///
    /// # Errors
    /// Fails where the template cannot write what they hold.
    pub(super) fn messages(&self, messages: &[Message], tokenizer: &Tokenizer) -> Result<Vec<Message>, PromptError> {
        // First, since control tokens are looked for in what a template is given.
        let messages = match self.chat_templates() {
            Some(templates) => {
                let template = templates.of(messages)?;
                template.check(messages)?;
                template.spelled(messages)?
            }
            None => Cow::Borrowed(messages),
        };
        let control = self.control_texts(tokenizer, true);
        let mut all = Vec::with_capacity(messages.len() + 1);
        if let Some(system) = &self.params.system_prompt
            && !messages.iter().any(|message| message.role == "system")
        {
            all.push(Message::new("system", system));
        }
        match control.and_then(|control| control.mark_messages(&messages)) {
            Some(marked) => all.extend(marked),
            None => all.extend_from_slice(&messages),
        }
        // They stand with the first message, which may be another one now.
        if let Some(tools) = all.get_mut(1).and_then(|message| message.other.shift_remove(TOOLS)) {
            all[0].other.insert(TOOLS.to_owned(), tools);
        }
        Ok(all)
    }

    fn control_texts<'a>(&self, tokenizer: &'a Tokenizer, by_default: bool) -> Option<&'a ControlTexts> {
        let sanitize = self.params.sanitize_control_tokens.unwrap_or(by_default);
        sanitize.then(|| tokenizer.control_texts())
    }
}

/// Messages as a chat template gets them, up to the assistant's answer.
fn asked(template: &ChatTemplate, messages: &[Message]) -> Result<Prompt, PromptError> {
    let mut prompt = Prompt::default();
    for turn in template.asked(messages)? {
        prompt.text(turn.text, false);
    }
    Ok(prompt)
}

/// What a model said, without the reasoning that it wrote before; `end` is what ends that.
pub fn behind_reasoning<'a>(said: &'a str, end: Option<&str>) -> &'a str {
    let behind = end.and_then(|end| said.rsplit_once(end));
    behind.map_or(said, |(_, behind)| behind.trim_start())
}

/// The texts that end the answers to conversations, where they are no tokens that end a completion by themselves.
#[derive(Debug, Clone)]
pub struct StopTexts {
    /// Where a conversation has no tools.
    pub without_tools: Option<String>,
    /// Where it has tools.
    pub with_tools: Option<String>,
}

impl StopTexts {
    /// That of a conversation.
    pub fn of(&self, messages: &[Message]) -> Option<&str> {
        if has_tools(messages) { self.with_tools.as_deref() } else { self.without_tools.as_deref() }
    }
}

/// The text that a completion ends with, where it is learned as plain text: no token of it ends one.
fn stop_text(end: &str, tokenizer: &Tokenizer) -> Option<String> {
    let end = end.trim();
    let ids = tokenizer.encode(end).ok().filter(|ids| !ids.is_empty())?;
    let stops = tokenizer.stop_token_ids();
    let ends = |id: &u32| tokenizer.is_special(*id) || stops.contains(id);
    (!ids.iter().any(ends)).then(|| end.to_owned())
}

/// Turns rows into prompts, in the one way that their facts and the parameters describe.
#[derive(Clone)]
pub struct PromptRenderer {
    pub(super) prompter: Prompter,
    pub(super) train_on: TrainOn,
    shape: Shape,
    template: Option<Template>,
    response: String,
    /// The column, or the field of a message, with the weight in the loss.
    weight: Option<String>,
    /// Whether an assistant's `reasoning_content` is learned with its turn.
    learn_reasoning: bool,
}

/// The text of a turn in pieces, and whether each is learned: what lies in `masked` is not. `begins` is where the turn
/// begins, as the places of `masked` are counted.
fn pieces<'a>(turn: &'a Turn, begins: usize, masked: &[Range<usize>]) -> Vec<(&'a str, bool)> {
    let (mut pieces, mut done) = (Vec::new(), 0);
    let within = |place: usize| place.saturating_sub(begins).min(turn.text.len());
    for place in masked.iter().filter(|_| turn.learn) {
        let (from, to) = (within(place.start).max(done), within(place.end));
        if from < to {
            pieces.extend([(&turn.text[done..from], true), (&turn.text[from..to], false)]);
            done = to;
        }
    }
    pieces.push((&turn.text[done..], turn.learn));
    pieces.retain(|(text, _)| !text.is_empty());
    pieces
}

/// Where in a conversation the reasoning of what is learned is written, in order.
fn places_of_reasoning(
    template: &ChatTemplate,
    messages: &[Message],
    turns: &[Turn],
) -> Result<Vec<Range<usize>>, PromptError> {
    let is_learned = |index| turns.iter().find(|turn| turn.message == Some(index)).is_none_or(|turn| turn.learn);
    let reasons = |message: &Message| {
        let reasoning = message.other.get(REASONING[0]).and_then(serde_json::Value::as_str);
        message.role == "assistant" && reasoning.is_some_and(|reasoning| !reasoning.trim().is_empty())
    };
    let whole: String = turns.iter().map(|turn| turn.text.as_str()).collect();
    let mut places = Vec::new();
    for index in (0..messages.len()).filter(|index| reasons(&messages[*index]) && is_learned(*index)) {
        let mut messages = messages.to_vec();
        let fields = &mut messages[index].other;
        REASONING.iter().for_each(|name| drop(fields.insert((*name).to_owned(), PLACE.into())));
        let with_place = template.render(&messages, false)?;
        // A template need not write it.
        if with_place.contains(PLACE) {
            places.push(place_in(&whole, &with_place).ok_or(PromptError::Reasoning)?);
        }
    }
    places.sort_by_key(|place| place.start);
    Ok(places)
}

/// The conversation that a row asks, as far as it is one.
fn asked_in(row: &Row) -> &[Message] {
    match row {
        Row::Messages(messages) => messages,
        Row::Judged(judged) => judged.prompt.turns(),
        Row::Columns(_) | Row::Text(_) => &[],
    }
}

impl PromptRenderer {
    /// A renderer for rows with these facts; it teaches what the model is to say. Every call takes the same tokenizer.
    ///
    /// # Errors
    /// Fails where the rows name no template and need one, or `chat_template` does not compile.
    pub fn new(params: &PromptParams, facts: &RowsFacts, tokenizer: &Tokenizer) -> Result<Self, PromptError> {
        if facts.shape == Shape::Prompt && facts.template.is_none() {
            return Err(PromptError::NoTemplate);
        }
        let prompter = Prompter::new(params, tokenizer)?;
        let response = facts.response.clone().unwrap_or_default();
        Ok(Self {
            prompter,
            train_on: TrainOn::Assistant,
            shape: facts.shape,
            template: facts.template.clone(),
            response,
            weight: None,
            learn_reasoning: true,
        })
    }

    /// The same, with another choice of what is learned.
    #[must_use]
    pub fn train_on(self, train_on: TrainOn) -> Self {
        Self { train_on, ..self }
    }

    /// The same, where a column of prompts, or a field of an assistant's messages, is the weight in the loss.
    #[must_use]
    pub fn weighted_by(self, weight: Option<String>) -> Self {
        Self { weight, ..self }
    }

    /// The same, where an assistant's `reasoning_content` is learned with its turn or is not.
    #[must_use]
    pub fn learning_reasoning(self, learn_reasoning: bool) -> Self {
        Self { learn_reasoning, ..self }
    }

    /// The chat templates whose headers of assistants' turns are learned because they do not tell them apart: of each
    /// what a sentence about it begins with.
    pub fn learns_headers(&self) -> Vec<&'static str> {
        self.templates_where(|template| self.train_on != TrainOn::All && !template.has_generation_prompt())
    }

    /// The chat templates with marks that decide nothing, since they are not one for each assistant's turn.
    pub fn has_idle_marks(&self) -> Vec<&'static str> {
        self.templates_where(ChatTemplate::has_idle_marks)
    }

    /// The chat templates that write nothing behind a conversation, so that the end of an answer is not learned.
    pub fn leaves_the_end_open(&self) -> Vec<&'static str> {
        self.templates_where(ChatTemplate::leaves_the_end_open)
    }

    /// Whether a row has reasoning that its chat template writes in no such turn, so that no model sees it.
    pub fn leaves_out_reasoning(&self, row: &Row) -> bool {
        let said: Vec<&[Message]> = match row {
            Row::Messages(messages) => vec![messages.as_slice()],
            Row::Judged(judged) => judged.parts().map(Said::turns).collect(),
            Row::Columns(_) | Row::Text(_) => return false,
        };
        let Ok(template) = self.prompter.chat_template(asked_in(row)) else { return false };
        said.into_iter().flatten().any(|message| template.leaves_out_reasoning(message))
    }

    /// The templates of rows that are conversations of which something holds. Whether any of them has tools is not
    /// known before they are read.
    fn templates_where(&self, holds: impl Fn(&ChatTemplate) -> bool) -> Vec<&'static str> {
        let templates = self.prompter.chat_templates().filter(|_| self.shape == Shape::Messages);
        templates.map(|templates| templates.subjects(holds)).unwrap_or_default()
    }

    /// What ends the reasoning before the answer to a row, where it may be a conversation.
    pub fn end_of_reasoning_in(&self, row: &Row) -> Option<&str> {
        match (self.shape, row) {
            (Shape::Prompt | Shape::Text, _) => None,
            (Shape::Messages | Shape::Pairs | Shape::Judged, row) => self.prompter.end_of_reasoning(asked_in(row)),
        }
    }

    /// What ends the reasoning before an answer, as it is noted for a whole stage, where the rows may be conversations:
    /// what the default template says, or else that of conversations with tools. Where the two write it in different
    /// tags, that is not known of the answers to conversations with tools.
    pub fn end_of_reasoning(&self) -> Option<&str> {
        match self.shape {
            Shape::Prompt | Shape::Text => None,
            Shape::Messages | Shape::Pairs | Shape::Judged => {
                self.prompter.chat_templates()?.all().find_map(ChatTemplate::end_of_reasoning)
            }
        }
    }

    /// The texts that end an answer, where they are no tokens that end a completion by themselves. Of two chat
    /// templates they are those of both: completions of many rows are made together and end by the same texts, and an
    /// answer hardly says what ends a turn of the other template.
    pub fn stop_texts(&self, tokenizer: &Tokenizer) -> Vec<String> {
        match self.shape {
            Shape::Prompt => {
                let end = self.template.as_ref().and_then(|template| template.response_end.as_deref());
                end.and_then(|end| stop_text(end, tokenizer)).into_iter().collect()
            }
            Shape::Text => Vec::new(),
            Shape::Messages | Shape::Pairs | Shape::Judged => {
                let StopTexts { without_tools, with_tools } = self.prompter.stop_texts(tokenizer);
                let mut texts: Vec<String> = without_tools.into_iter().chain(with_tools).collect();
                texts.dedup();
                texts
            }
        }
    }

    /// Whether a row that is cut ends with the end-of-text token all the same.
    pub fn ends_what_is_cut(&self) -> bool {
        self.shape == Shape::Messages || self.prompter.params.add_eos != Some(false)
    }

    /// What a row teaches: prompt and response with their ends, a conversation, or a whole text. Of responses that are
    /// judged it is the better one.
    ///
    /// Prompts and texts begin with the beginning-of-text token and end with the end-of-text token. Conversations take
    /// both from the chat template.
    ///
    /// # Errors
    /// Fails where the chat template is missing or refuses the conversation.
    pub fn lesson(&self, row: &Row, tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        let prompter = &self.prompter;
        match (self.shape, row) {
            (Shape::Prompt, Row::Columns(columns)) => {
                let mut prompt = self.asked(columns, tokenizer)?;
                prompt.segments.iter_mut().for_each(|segment| segment.learn = self.train_on == TrainOn::All);
                let response = columns.get(&self.response).map_or("", String::as_str);
                let response = prompter.data(response, tokenizer, true);
                match self.template.as_ref().and_then(|template| template.response_end.as_ref()) {
                    Some(end) => {
                        prompt.text(response + end, true);
                        prompt.id(prompter.eos_if_asked(tokenizer), true);
                    }
                    None => {
                        prompt.text(response, true);
                        prompt.id(prompter.eos(tokenizer), true);
                    }
                }
                let weight = self.weight_in(|name| {
                    columns
                        .get(name)
                        .filter(|text| !text.trim().is_empty())
                        .map(|text| (text.trim().parse().ok(), text.clone()))
                })?;
                prompt.segments.iter_mut().for_each(|segment| segment.weigh(weight));
                Ok(prompt)
            }
            (Shape::Text, Row::Text(text)) => {
                let mut prompt = prompter.plain(text, tokenizer);
                prompt.segments.iter_mut().for_each(|segment| segment.learn = true);
                prompt.id(prompter.eos(tokenizer), true);
                Ok(prompt)
            }
            (Shape::Messages, Row::Messages(messages)) => {
                let messages = prompter.messages(messages, tokenizer)?;
                let mut prompt = Prompt::default();
                let weights = messages.iter().map(|message| self.weight_of(message)).collect::<Result<Vec<_>, _>>()?;
                let template = prompter.chat_template(&messages)?;
                let turns = template.turns(&messages, self.train_on)?;
                let masked =
                    if self.learn_reasoning { Vec::new() } else { places_of_reasoning(template, &messages, &turns)? };
                let are_weighted = weights.iter().any(|weight| *weight != 1.0);
                if are_weighted && turns.iter().all(|turn| turn.message.is_none()) {
                    return Err(PromptError::WeightOfUnknownTurn);
                }
                let mut begins = 0;
                for turn in turns {
                    let first = prompt.segments.len();
                    pieces(&turn, begins, &masked).into_iter().for_each(|(text, learn)| prompt.text(text, learn));
                    begins += turn.text.len();
                    let weight = turn.message.map_or(1.0, |message| weights[message]);
                    prompt.segments[first..].iter_mut().for_each(|segment| segment.weigh(weight));
                }
                Ok(prompt)
            }
            (Shape::Pairs | Shape::Judged, Row::Judged(judged)) => {
                let response = judged.chosen.as_ref().or(judged.rejected.as_ref()).ok_or(PromptError::OtherShape)?;
                self.responded(&judged.prompt, response, tokenizer)
            }
            _ => Err(PromptError::OtherShape),
        }
    }

    /// The weight that an assistant's message gives itself; 1 where it gives none, and of every other message.
    fn weight_of(&self, message: &Message) -> Result<f32, PromptError> {
        if message.role != "assistant" {
            return Ok(1.0);
        }
        self.weight_in(|name| message.other.get(name).map(|value| (value.as_f64(), value.to_string())))
    }

    /// The weight under the name that weights have; `find` gives it with its text.
    fn weight_in(&self, find: impl Fn(&str) -> Option<(Option<f64>, String)>) -> Result<f32, PromptError> {
        let Some(name) = &self.weight else { return Ok(1.0) };
        let Some((number, text)) = find(name) else { return Ok(1.0) };
        let weight = number.map(|number| number as f32).filter(|weight| weight.is_finite() && *weight >= 0.0);
        let found = || format!("`{text}`");
        match weight {
            None => Err(PromptError::Weight { name: name.clone(), found: found() }),
            Some(weight) if weight < f32::MIN_POSITIVE && number > Some(0.0) => {
                Err(PromptError::WeightTooSmall { name: name.clone(), found: found() })
            }
            Some(weight) => Ok(weight),
        }
    }

    /// What a row asks: its prompt without the answer, and the answer the data gives. The last assistant's turn of a
    /// conversation is its answer; a plain text is a prompt as it stands.
    ///
    /// # Errors
    /// As for [`PromptRenderer::lesson`].
    pub fn question(&self, row: &Row, tokenizer: &Tokenizer) -> Result<Question, PromptError> {
        match (self.shape, row) {
            (Shape::Prompt, Row::Columns(columns)) => {
                let reference = columns.get(&self.response).cloned();
                Ok(Question { prompt: self.asked(columns, tokenizer)?, reference })
            }
            (Shape::Text, Row::Text(text)) => {
                Ok(Question { prompt: self.prompter.plain(text, tokenizer), reference: None })
            }
            (Shape::Messages, Row::Messages(messages)) => {
                let answer = messages.iter().rposition(|message| message.role == "assistant");
                // A system message counts wherever it stands in the row, as in a lesson.
                let all = self.prompter.messages(messages, tokenizer)?;
                let behind = messages.len() - answer.unwrap_or(messages.len());
                let (asks, answers) = all.split_at(all.len() - behind);
                let prompt = asked(self.prompter.chat_template(&all)?, asks)?;
                let reference = match answers.is_empty() {
                    true => None,
                    false => Some(self.prompter.reference(&prompt, &all[..=asks.len()], tokenizer)?),
                };
                Ok(Question { prompt, reference })
            }
            (Shape::Pairs | Shape::Judged, Row::Judged(judged)) => {
                let prompt = match &judged.prompt {
                    Said::Text(text) => self.prompter.asked_text(text, tokenizer),
                    Said::Turns(turns) => self.prompter.conversation(turns, tokenizer)?,
                };
                let reference = judged.chosen.as_ref().map(|said| said.texts().concat());
                Ok(Question { prompt, reference })
            }
            _ => Err(PromptError::OtherShape),
        }
    }

    fn asked(&self, columns: &BTreeMap<String, String>, tokenizer: &Tokenizer) -> Result<Prompt, PromptError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        Ok(self.prompter.templated(template, columns, tokenizer))
    }
}
