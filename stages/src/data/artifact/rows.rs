//! The Rows artefact: texts by column, conversations, or plain text.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use cache::Digest;
use engine::artifact::Facts;
use engine::context::Artifact;
use parquet::basic::Encoding;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::identity::{IdentityHasher, TableHasher};
use super::kind::{OutputKind, Rows};
use super::parts::{BYTES_PER_GROUP, PartsReader, PartsWriter, ROWS_PER_GROUP, TableError};
use super::said;
use crate::data::prompt::Template;

/// What a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Columns that a template turns into a prompt, and a column with the response.
    Prompt,
    /// A conversation.
    Messages,
    /// Plain text, all of which is learned.
    Text,
    /// A prompt with a better and a worse response.
    Pairs,
    /// A prompt with one response that is desirable or not.
    Judged,
}

impl Shape {
    /// Whether responses are compared: rows become documents with groups and roles.
    pub fn is_preference(self) -> bool {
        matches!(self, Self::Pairs | Self::Judged)
    }

    /// What it is called in messages.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Prompt => "prompts",
            Self::Messages => "conversations",
            Self::Text => "plain text",
            Self::Pairs => "pairs of responses",
            Self::Judged => "judged responses",
        }
    }
}

/// What a prompt or a response says: text, or turns of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Said {
    /// Text as it stands.
    Text(String),
    /// Turns.
    Turns(Vec<Message>),
}

impl Said {
    fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Turns(turns) => turns.iter().flat_map(Message::texts).map(str::len).sum(),
        }
    }

    /// Its texts: that of each turn.
    pub fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Turns(turns) => turns.iter().flat_map(Message::texts).collect(),
        }
    }

    /// Its turns; a text has none.
    pub fn turns(&self) -> &[Message] {
        match self {
            Self::Text(_) => &[],
            Self::Turns(turns) => turns,
        }
    }

    /// As it enters an identity: JSON, in one form for what is equal.
    fn to_cell(&self) -> String {
        match self {
            Self::Text(text) => serde_json::to_string(text).expect("text is JSON"),
            Self::Turns(turns) => canonical_messages(turns),
        }
    }
}

/// A prompt and what is known of responses to it. A pair has both, a judged response is one of them. Prompt and
/// responses are all text, or all turns.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    /// What stands before the response.
    pub prompt: Said,
    /// The better response, or a desirable one.
    pub chosen: Option<Said>,
    /// The worse response, or an undesirable one.
    pub rejected: Option<Said>,
}

impl Judged {
    /// The prompt, and the responses that there are.
    pub fn parts(&self) -> impl Iterator<Item = &Said> {
        [Some(&self.prompt), self.chosen.as_ref(), self.rejected.as_ref()].into_iter().flatten()
    }

    /// Whether one of them is turns of a conversation.
    pub fn has_turns(&self) -> bool {
        self.parts().any(|said| matches!(said, Said::Turns(_)))
    }

    /// Its values by column.
    fn cells(&self) -> BTreeMap<&'static str, String> {
        let mut cells = BTreeMap::from([("prompt", self.prompt.to_cell())]);
        match (&self.chosen, &self.rejected) {
            (Some(chosen), Some(rejected)) => {
                cells.extend([("chosen", chosen.to_cell()), ("rejected", rejected.to_cell())]);
            }
            (Some(only), None) | (None, Some(only)) => {
                let label = self.chosen.is_some().to_string();
                cells.extend([("completion", only.to_cell()), (LABEL, label)]);
            }
            (None, None) => {}
        }
        cells
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool` or whatever else the chat template knows.
    pub role: String,
    /// What is said. Null, and unknown to the template, where the turn holds something else, such as tool calls.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub content: Value,
    /// Everything else the data says about the turn, for the chat template.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The name under which the first message of a conversation has the tools that its assistant may call. No template
/// knows it: they are given the tools apart.
pub const TOOLS: &str = "@tools";

impl Message {
    /// A turn of plain text.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.into(), other: Map::new() }
    }

    /// What is said: one text, or that of each part.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let parts = self.content.as_array().into_iter().flatten();
        self.content.as_str().into_iter().chain(parts.filter_map(|part| part["text"].as_str()))
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Row {
    /// Text by column.
    Columns(BTreeMap<String, String>),
    /// A conversation.
    Messages(Vec<Message>),
    /// Plain text.
    Text(String),
    /// A prompt with responses that are judged.
    Judged(Box<Judged>),
}

impl Row {
    /// All its texts, one after the other as a model is shown them: columns in the order of the template, and the
    /// response last.
    pub fn text(&self, facts: &RowsFacts) -> String {
        let texts: Vec<&str> = match self {
            Self::Columns(columns) => {
                let shown = facts.template.as_ref().map(Template::placeholders).unwrap_or_default();
                let response = facts.response.as_ref();
                let is_other = |name: &&String| !shown.contains(name) && Some(*name) != response;
                let names = shown.iter().chain(columns.keys().filter(is_other)).chain(response);
                names.filter_map(|name| columns.get(name)).map(String::as_str).collect()
            }
            Self::Messages(messages) => messages.iter().flat_map(Message::texts).collect(),
            Self::Text(text) => vec![text],
            Self::Judged(judged) => judged.parts().flat_map(Said::texts).collect(),
        };
        texts.join("\n")
    }

    /// The first part of its turns that is an image, a video or sound: the turn, from 1, whose it is, and the type.
    pub fn medium(&self) -> Option<(usize, &str, &str)> {
        match self {
            Self::Messages(messages) => medium_in(messages, 1),
            Self::Judged(judged) => {
                let asked = judged.prompt.turns();
                let mut responses = [&judged.chosen, &judged.rejected].into_iter().flatten();
                medium_in(asked, 1).or_else(|| responses.find_map(|said| medium_in(said.turns(), asked.len() + 1)))
            }
            Self::Columns(_) | Self::Text(_) => None,
        }
    }

    /// How much text it holds, in bytes.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Columns(columns) => columns.values().map(String::len).sum(),
            Self::Messages(messages) => messages.iter().flat_map(Message::texts).map(str::len).sum(),
            Self::Text(text) => text.len(),
            Self::Judged(judged) => judged.parts().map(Said::text_bytes).sum(),
        }
    }
}

/// As [`Row::medium`], among turns of which the first has the number `first`.
fn medium_in(turns: &[Message], first: usize) -> Option<(usize, &str, &str)> {
    turns.iter().zip(first..).find_map(|(message, turn)| {
        let parts = message.content.as_array().into_iter().flatten();
        let mut kinds = parts.filter_map(|part| part["type"].as_str());
        let kind = kinds.find(|kind| ["image", "video", "audio"].into_iter().any(|medium| kind.contains(medium)))?;
        Some((turn, message.role.as_str(), kind))
    })
}

/// What is known about all rows together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RowsFacts {
    /// How many there are; not known, and 0, in what a survey says.
    #[serde(default)]
    pub rows: u64,
    /// What a row is.
    pub shape: Shape,
    /// Its columns, in order of their names.
    pub columns: Vec<String>,
    /// How columns become a prompt, for [`Shape::Prompt`].
    pub template: Option<Template>,
    /// The column with the response, for [`Shape::Prompt`].
    pub response: Option<String>,
    /// Source rows that were left out because they are unusable.
    #[serde(default)]
    pub dropped: u64,
    /// The same by what was wrong with them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dropped_by: BTreeMap<String, u64>,
    /// Source rows that a filter left out.
    #[serde(default)]
    pub filtered: u64,
    /// Rows, kept, in which a text is empty.
    #[serde(default)]
    pub empty: u64,
}

/// The column of judged responses that says whether one is desirable.
const LABEL: &str = "label";

/// What is foreseen of rows with judged responses: that the first of them have turns of a conversation.
pub const HAS_TURNS: &str = "has_turns";

/// What is foreseen of rows with turns of which one of the first has an image, a video or sound: a [`Medium`].
pub const MEDIUM: &str = "medium";

/// A part of a turn that is an image, a video or sound, which no stage computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Medium {
    /// Where its row is, for messages.
    pub place: String,
    /// The turn, from 1.
    pub turn: usize,
    /// Whose turn it is.
    pub role: String,
    /// Its type, such as `image_url`.
    pub kind: String,
}

/// Whether rows with these facts are known to need a chat template.
pub fn need_chat_template(facts: &Facts) -> bool {
    let are_conversations = RowsFacts::from_facts(facts).is_some_and(|rows| rows.shape == Shape::Messages);
    are_conversations || facts.get(HAS_TURNS) == Some(&Value::Bool(true))
}

/// What was counted while rows were taken from their source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Left out because they are unusable.
    pub dropped: u64,
    /// The same by what was wrong with them.
    pub dropped_by: BTreeMap<String, u64>,
    /// Left out by a filter.
    pub filtered: u64,
    /// Kept, with an empty text.
    pub empty: u64,
}

impl RowsFacts {
    /// Facts about no rows yet, of columns for a template.
    pub fn prompt(template: Template, response: &str, columns: impl IntoIterator<Item = String>) -> Self {
        let mut columns: Vec<String> = columns.into_iter().collect();
        columns.sort();
        columns.dedup();
        let (template, response) = (Some(template), Some(response.to_owned()));
        Self { template, response, ..Self::none(Shape::Prompt, columns) }
    }

    /// Facts about no rows yet, of conversations.
    pub fn messages() -> Self {
        Self::single(Shape::Messages, "messages")
    }

    /// Facts about no rows yet, of plain text.
    pub fn text() -> Self {
        Self::single(Shape::Text, "text")
    }

    /// Facts about no rows yet, of pairs of responses.
    pub fn pairs() -> Self {
        Self::none(Shape::Pairs, ["chosen", "prompt", "rejected"].map(str::to_owned).to_vec())
    }

    /// Facts about no rows yet, of judged responses.
    pub fn judged() -> Self {
        Self::none(Shape::Judged, ["completion", LABEL, "prompt"].map(str::to_owned).to_vec())
    }

    fn single(shape: Shape, column: &str) -> Self {
        Self::none(shape, vec![column.to_owned()])
    }

    fn none(shape: Shape, columns: Vec<String>) -> Self {
        let (rows, dropped, filtered, empty) = (0, 0, 0, 0);
        Self {
            rows,
            shape,
            columns,
            template: None,
            response: None,
            dropped,
            dropped_by: BTreeMap::new(),
            filtered,
            empty,
        }
    }

    /// The values of a row, in order of the columns.
    ///
    /// # Panics
    /// If the row lacks a column.
    pub fn values(&self, row: Row) -> Vec<String> {
        match row {
            Row::Columns(mut columns) => {
                let value = |name| columns.remove(name).expect("a row has every declared column");
                self.columns.iter().map(value).collect()
            }
            Row::Messages(messages) => vec![canonical_messages(&messages)],
            Row::Text(text) => vec![text],
            Row::Judged(judged) => {
                let mut cells = judged.cells();
                let value = |name: &String| cells.remove(name.as_str()).expect("a row has every declared column");
                self.columns.iter().map(value).collect()
            }
        }
    }

    /// Reads them from an artefact's facts; `None` where these are not facts about rows.
    pub fn from_facts(facts: &Facts) -> Option<Self> {
        serde_json::from_value(Value::Object(facts.clone())).ok()
    }

    /// As an artefact's facts.
    pub fn to_facts(&self) -> Facts {
        match serde_json::to_value(self).expect("facts are JSON") {
            Value::Object(facts) => facts,
            _ => unreachable!("a struct is a JSON object"),
        }
    }

    /// What a reader goes by: part of the identity.
    fn attributes(&self) -> Value {
        json!({"shape": self.shape, "template": self.template, "response": self.response})
    }

    /// Gives rows of a table with these facts their identities.
    pub fn identities(&self) -> RowIdentities<'_> {
        RowIdentities { facts: self, none: self.hasher() }
    }

    /// Calls `each` with the values of a row, in order of the columns.
    ///
    /// # Panics
    /// If the row lacks a column.
    fn each_value(&self, row: &Row, mut each: impl FnMut(&str)) {
        match row {
            Row::Columns(columns) => {
                self.columns.iter().for_each(|name| each(columns.get(name).expect("a row has every declared column")));
            }
            Row::Messages(messages) => each(&canonical_messages(messages)),
            Row::Text(text) => each(text),
            Row::Judged(judged) => {
                let cells = judged.cells();
                self.columns.iter().for_each(|name| {
                    each(cells.get(name.as_str()).expect("a row has every declared column"));
                });
            }
        }
    }

    fn hasher(&self) -> IdentityHasher {
        let schema: Vec<String> = self.columns.iter().map(|column| format!("{column}: string")).collect();
        let schema: Vec<&str> = schema.iter().map(String::as_str).collect();
        IdentityHasher::new(Rows::NAME, &schema, &self.attributes())
    }
}

/// The identities of rows by themselves: equal wherever the same rows stand.
pub struct RowIdentities<'a> {
    facts: &'a RowsFacts,
    /// That of no rows, which every other begins with.
    none: IdentityHasher,
}

impl RowIdentities<'_> {
    /// The identity of some rows.
    ///
    /// # Panics
    /// If a row lacks a column.
    pub fn of(&self, rows: &[Row]) -> Digest {
        let mut hasher = self.none.clone();
        rows.iter().for_each(|row| self.facts.each_value(row, |value| hasher.text(value)));
        hasher.finish()
    }
}

/// Writes a Rows artefact.
pub struct RowsWriter {
    facts: RowsFacts,
    parts: PartsWriter,
    schema: Arc<Schema>,
    identities: TableHasher,
    waiting: Vec<Vec<String>>,
    waiting_bytes: usize,
}

impl RowsWriter {
    /// Begins a table in an empty folder.
    pub fn create(folder: &Path, facts: RowsFacts) -> Self {
        let field = |name: &String| match facts.shape.is_preference() && name != LABEL {
            true => said::marked(name),
            false => Field::new(name, DataType::Utf8, false),
        };
        let fields: Vec<Field> = facts.columns.iter().map(field).collect();
        let schema = Arc::new(Schema::new(fields));
        let parts = PartsWriter::new(folder, schema.clone(), Encoding::PLAIN);
        let identities = TableHasher::new(facts.hasher());
        let waiting = facts.columns.iter().map(|_| Vec::new()).collect();
        Self { facts, parts, schema, identities, waiting, waiting_bytes: 0 }
    }

    /// Adds a row, whose shape must be that of the facts.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    ///
    /// # Panics
    /// If the row lacks a column or has another shape.
    pub fn write(&mut self, row: Row) -> Result<(), TableError> {
        let values = self.facts.values(row);
        self.write_values(values)
    }

    /// Adds a row by its values, in order of the columns, as [`RowsFacts::values`] gives them.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    ///
    /// # Panics
    /// If there are more or fewer values than columns.
    pub fn write_values(&mut self, values: Vec<String>) -> Result<(), TableError> {
        assert_eq!(values.len(), self.waiting.len(), "a row has the declared shape");
        for (column, value) in self.waiting.iter_mut().zip(values) {
            self.identities.take(|hasher| hasher.text(&value));
            let cell = if self.facts.shape.is_preference() { said::stored(value) } else { value };
            self.waiting_bytes += cell.len();
            column.push(cell);
        }
        self.facts.rows += 1;
        let waiting = self.waiting[0].len();
        let enough = waiting == ROWS_PER_GROUP || self.waiting_bytes >= BYTES_PER_GROUP;
        if enough || waiting as u64 == self.parts.room() {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TableError> {
        self.waiting_bytes = 0;
        let columns: Vec<ArrayRef> = self
            .waiting
            .iter_mut()
            .map(|column| Arc::new(StringArray::from_iter_values(column.drain(..))) as ArrayRef)
            .collect();
        let batch = RecordBatch::try_new(self.schema.clone(), columns).expect("columns are equally long");
        if batch.num_rows() > 0 {
            self.parts.write(batch)?;
        }
        if self.parts.room() == 0 {
            self.end_part()?;
        }
        Ok(())
    }

    fn end_part(&mut self) -> Result<(), TableError> {
        self.parts.end_part(self.identities.end_part())
    }

    /// Ends the table: its facts and its identity, for [`engine::context::StageContext::seal`].
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn finish(self, dropped: u64) -> Result<(Facts, Digest), TableError> {
        self.finish_counted(&RowCounts { dropped, ..RowCounts::default() })
    }

    /// The same, with all that was counted.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn finish_counted(mut self, counts: &RowCounts) -> Result<(Facts, Digest), TableError> {
        self.flush()?;
        self.end_part()?;
        self.facts.rows = self.parts.finish()?;
        let RowCounts { dropped, dropped_by, filtered, empty } = counts.clone();
        self.facts = RowsFacts { dropped, dropped_by, filtered, empty, ..self.facts };
        Ok((self.facts.to_facts(), self.identities.finish()))
    }
}

/// A conversation as one text: role, content, and the rest in order of its names.
fn canonical_messages(messages: &[Message]) -> String {
    let sorted: Vec<Message> = messages
        .iter()
        .map(|message| {
            let mut other: Vec<_> = message.other.clone().into_iter().collect();
            other.sort_by(|one, two| one.0.cmp(&two.0));
            Message { other: other.into_iter().collect(), ..message.clone() }
        })
        .collect();
    serde_json::to_string(&sorted).expect("messages are JSON")
}

/// Reads a Rows artefact; memory holds some dozens of rows at a time.
pub struct RowsReader {
    facts: RowsFacts,
    parts: PartsReader,
}

impl RowsReader {
    /// Opens an input.
    ///
    /// # Errors
    /// Fails where the artefact is no table of rows that this version can read.
    pub fn open(artifact: &Artifact) -> Result<Self, TableError> {
        Self::open_with(&artifact.folder, &artifact.description.kind, &artifact.description.facts)
    }

    /// Opens a stored folder of a kind, with its facts.
    ///
    /// # Errors
    /// As for [`RowsReader::open`].
    pub fn open_with(folder: &Path, kind: &str, facts: &Facts) -> Result<Self, TableError> {
        if kind != Rows::NAME {
            return Err(TableError::form(folder, format!("rows are expected, and it contains {kind}")));
        }
        let facts =
            RowsFacts::from_facts(facts).ok_or_else(|| TableError::form(folder, "its facts are not those of rows"))?;
        Ok(Self { facts, parts: PartsReader::open(folder)? })
    }

    /// What is known about the rows.
    pub fn facts(&self) -> &RowsFacts {
        &self.facts
    }

    /// How many rows there are.
    pub fn len(&self) -> u64 {
        self.parts.rows()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A row by its index. Reading in order decodes each stretch of rows once.
    ///
    /// # Errors
    /// Fails beyond the last row and where a file is damaged.
    pub fn row(&mut self, index: u64) -> Result<Row, TableError> {
        let (batch, position) = self.parts.row(index)?;
        let row = row_at(&self.facts, batch, position);
        row.map_err(|what| TableError::form(self.parts.folder(), format!("row {}: {what}", index + 1)))
    }

    /// All rows in order.
    pub fn iter(&mut self) -> impl Iterator<Item = Result<Row, TableError>> + '_ {
        (0..self.len()).map(|index| self.row(index))
    }
}

/// A row of a batch, or what is wrong with it.
fn row_at(facts: &RowsFacts, batch: &RecordBatch, position: usize) -> Result<Row, String> {
    let text = |column: &str| {
        batch
            .column_by_name(column)
            .and_then(|array| array.as_any().downcast_ref::<StringArray>())
            .filter(|array| array.is_valid(position))
            .map(|array| array.value(position).to_owned())
            .ok_or_else(|| format!("column `{column}` is missing or does not contain strings"))
    };
    match facts.shape {
        Shape::Prompt => {
            let columns: Result<_, String> =
                facts.columns.iter().map(|column| Ok((column.clone(), text(column)?))).collect();
            columns.map(Row::Columns)
        }
        Shape::Text => text("text").map(Row::Text),
        Shape::Pairs | Shape::Judged => {
            let said = |column: &str| -> Result<Said, String> {
                let cell = text(column)?;
                let is_marked = batch.schema_ref().field_with_name(column).is_ok_and(said::is_marked);
                let read = if is_marked { said::said(cell) } else { serde_json::from_str(&cell) };
                read.map_err(|error| format!("column `{column}` is not what this version writes: {error}"))
            };
            let prompt = said("prompt")?;
            let (chosen, rejected) = match facts.shape {
                Shape::Pairs => (Some(said("chosen")?), Some(said("rejected")?)),
                _ if text(LABEL)? == "true" => (Some(said("completion")?), None),
                _ => (None, Some(said("completion")?)),
            };
            Ok(Row::Judged(Box::new(Judged { prompt, chosen, rejected })))
        }
        Shape::Messages => serde_json::from_str(&text("messages")?)
            .map(Row::Messages)
            .map_err(|error| format!("its messages are not what this version writes: {error}")),
    }
}
