//! The Tokens and Packs artefacts: token ids and labels.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, Float32Array, Int32Array, ListArray, PrimitiveArray, RecordBatch, UInt8Array, UInt32Array,
    UInt64Array,
};
use arrow::buffer::{OffsetBuffer, ScalarBuffer};
use arrow::datatypes::{
    ArrowPrimitiveType, DataType, Field, Float32Type, Int32Type, Schema, UInt8Type, UInt32Type, UInt64Type,
};
use cache::Digest;
use engine::artifact::Facts;
use engine::context::Artifact;
use parquet::basic::Encoding;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::identity::{IdentityHasher, TableHasher};
use super::kind::{OutputKind, Packs, Tokens};
use super::parts::{BYTES_PER_GROUP, PartsReader, PartsWriter, ROWS_PER_GROUP, TableError};
use super::rows::Shape;
use crate::data::prompt::{PromptParams, TrainOn};

/// A row of a table of tokens: a document, or several of them and padding.
pub use model::batch::Batch as TokenRow;
pub use model::batch::{IGNORE_INDEX, Role};

/// An id and a label.
const BYTES_PER_TOKEN: usize = 8;

/// A column that a table of tokens may have beside its ids and labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptionalColumn {
    /// The weight of each token in the loss.
    Weight,
    /// The group of each document.
    Group,
    /// The role of each document within its group.
    Role,
    /// The length of each document, where a row that is not packed holds several: those of one group.
    DocumentLengths,
}

impl OptionalColumn {
    fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::Group => "group",
            Self::Role => "role",
            Self::DocumentLengths => "document_lengths",
        }
    }

    fn item(self) -> DataType {
        match self {
            Self::Weight => DataType::Float32,
            Self::Group => DataType::UInt64,
            Self::Role => DataType::UInt8,
            Self::DocumentLengths => DataType::UInt32,
        }
    }

    /// As the identity of a table spells it.
    fn described(self) -> &'static str {
        match self {
            Self::Weight => "weight: list<f32>",
            Self::Group => "group: list<u64>",
            Self::Role => "role: list<u8>",
            Self::DocumentLengths => "document_lengths: list<u32>",
        }
    }
}

/// What is known about all rows of tokens together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokensFacts {
    /// How many rows there are.
    pub rows: u64,
    /// How many documents (pieces of them, where packing cut some).
    pub documents: u64,
    /// Tokens of documents, without padding.
    pub tokens: u64,
    /// Tokens that the loss is taken over.
    pub target_tokens: u64,
    /// Tokens of the longest row; of packs, the length of every row.
    pub longest_row: u64,
    /// Tokens of the longest document: the positions that a model needs.
    pub longest_document: u64,
    /// The largest id of a document: a model needs a larger vocabulary.
    pub largest_id: Option<u32>,
    /// The length asked for.
    pub max_seq_len: Option<u64>,
    /// What the rows were before they were tokens.
    pub shape: Shape,
    /// Ids the tokenizer has, added tokens among them.
    pub vocab_size: u64,
    /// Its beginning-of-text id.
    pub bos_token_id: Option<u32>,
    /// Its end-of-text id.
    pub eos_token_id: Option<u32>,
    /// Its padding id.
    pub pad_token_id: Option<u32>,
    /// Rows that were shortened.
    pub truncated: u64,
    /// Rows of which nothing is learned.
    pub fully_masked: u64,
    /// Rows that end without an end-of-text token, so that their end is not learned.
    pub without_eos: u64,
    /// Rows that were left out.
    pub dropped: u64,
    /// Padding in all rows together, in tokens.
    pub padding: u64,
    /// Rows in which the data wrote out special tokens that are read as plain text.
    #[serde(default)]
    pub sanitized: u64,
    /// How the prompts were made, so that inference makes them in the same way; `None` in what older versions wrote.
    #[serde(default)]
    pub prompt: Option<PromptParams>,
    /// What the loss is taken over; `None` in what older versions wrote.
    #[serde(default)]
    pub train_on: Option<TrainOn>,
    /// Documents by role: better or desirable responses, and worse or undesirable ones; 0 where rows are no
    /// preferences.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub chosen: u64,
    /// The others.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rejected: u64,
    /// Pairs of equal responses: there is nothing to learn of them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub equal_pairs: u64,
    /// The optional columns, in the order of the table.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub columns: Vec<OptionalColumn>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl TokensFacts {
    /// Facts about no rows yet, of this shape.
    pub fn none(shape: Shape) -> Self {
        Self {
            rows: 0,
            documents: 0,
            tokens: 0,
            target_tokens: 0,
            longest_row: 0,
            longest_document: 0,
            largest_id: None,
            max_seq_len: None,
            shape,
            vocab_size: 0,
            bos_token_id: None,
            eos_token_id: None,
            pad_token_id: None,
            truncated: 0,
            fully_masked: 0,
            without_eos: 0,
            dropped: 0,
            padding: 0,
            sanitized: 0,
            prompt: None,
            train_on: None,
            chosen: 0,
            rejected: 0,
            equal_pairs: 0,
            columns: Vec::new(),
        }
    }

    /// Reads them from an artefact's facts; `None` where these are not facts about tokens.
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
        json!({
            "shape": self.shape,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        })
    }
}

/// Writes a Tokens or a Packs artefact.
pub struct TokensWriter {
    kind: &'static str,
    facts: TokensFacts,
    schema: Arc<Schema>,
    parts: PartsWriter,
    identities: TableHasher,
    /// The group that is being filled.
    filling: Columns,
}

/// Rows that become a row group.
#[derive(Default)]
struct Columns {
    input_ids: Vec<u32>,
    labels: Vec<i32>,
    document_lengths: Vec<u32>,
    weights: Vec<f32>,
    groups: Vec<u64>,
    roles: Vec<u8>,
    row_lengths: Vec<usize>,
    rows_documents: Vec<usize>,
}

impl Columns {
    /// Adds a row with all that these columns may hold.
    fn push(&mut self, row: &TokenRow, values: &OptionalValues) {
        self.input_ids.extend_from_slice(&row.input_ids);
        self.labels.extend_from_slice(&row.labels);
        self.document_lengths.extend_from_slice(&values.document_lengths);
        self.weights.extend_from_slice(&values.weights);
        self.groups.extend_from_slice(&values.groups);
        self.roles.extend_from_slice(&values.roles);
        self.row_lengths.push(row.input_ids.len());
        self.rows_documents.push(row.document_lengths.len());
    }

    fn is_full(&self) -> bool {
        self.row_lengths.len() == ROWS_PER_GROUP || self.input_ids.len() * BYTES_PER_TOKEN >= BYTES_PER_GROUP
    }

    /// As a batch of a table of this kind with these optional columns.
    fn into_batch(self, schema: &Arc<Schema>, kind: &str, optional: &[OptionalColumn]) -> RecordBatch {
        let rows = OffsetBuffer::from_lengths(self.row_lengths);
        let documents = OffsetBuffer::from_lengths(self.rows_documents);
        let mut columns =
            vec![list::<UInt32Type>(rows.clone(), self.input_ids), list::<Int32Type>(rows.clone(), self.labels)];
        let mut lengths = self.document_lengths;
        if kind == Packs::NAME {
            columns.push(list::<UInt32Type>(documents.clone(), std::mem::take(&mut lengths)));
        }
        let (mut weights, mut groups, mut roles) = (self.weights, self.groups, self.roles);
        columns.extend(optional.iter().map(|column| match column {
            OptionalColumn::Weight => list::<Float32Type>(rows.clone(), std::mem::take(&mut weights)),
            OptionalColumn::Group => list::<UInt64Type>(documents.clone(), std::mem::take(&mut groups)),
            OptionalColumn::Role => list::<UInt8Type>(documents.clone(), std::mem::take(&mut roles)),
            OptionalColumn::DocumentLengths => list::<UInt32Type>(documents.clone(), std::mem::take(&mut lengths)),
        }));
        RecordBatch::try_new(schema.clone(), columns).expect("columns are equally long")
    }
}

/// The values of a row in the optional columns that a table has; in the others nothing.
#[derive(Default)]
struct OptionalValues {
    weights: Vec<f32>,
    groups: Vec<u64>,
    roles: Vec<u8>,
    document_lengths: Vec<u32>,
}

impl OptionalValues {
    /// # Panics
    /// If the row has values for a column that the table lacks: they would be lost.
    fn of(row: &TokenRow, columns: &[OptionalColumn]) -> Self {
        let (tokens, documents) = (0..row.input_ids.len(), 0..row.document_lengths.len());
        let has = |column| columns.contains(&column);
        assert!(has(OptionalColumn::Weight) || row.weights.is_empty(), "the table has a column of weights");
        assert!(has(OptionalColumn::Group) || row.groups.is_empty(), "the table has a column of groups");
        assert!(has(OptionalColumn::Role) || row.roles.is_empty(), "the table has a column of roles");
        let mut values = Self::default();
        if has(OptionalColumn::Weight) {
            values.weights = tokens.map(|token| row.weight(token)).collect();
        }
        if has(OptionalColumn::Group) {
            values.groups = documents.clone().map(|document| row.group(document)).collect();
        }
        if has(OptionalColumn::Role) {
            values.roles = documents.map(|document| row.role(document) as u8).collect();
        }
        values.document_lengths = row.document_lengths.iter().map(|length| *length as u32).collect();
        values
    }

    fn hash(&self, columns: &[OptionalColumn], hasher: &mut IdentityHasher) {
        for column in columns {
            match column {
                OptionalColumn::Weight => hasher.weights(&self.weights),
                OptionalColumn::Group => hasher.groups(&self.groups),
                OptionalColumn::Role => hasher.bytes(&self.roles),
                OptionalColumn::DocumentLengths => hasher.ids(&self.document_lengths),
            }
        }
    }
}

impl TokensWriter {
    /// Begins a Tokens table; the facts' counts of rows and tokens are filled in as rows come.
    pub fn tokens(folder: &Path, facts: TokensFacts) -> Self {
        Self::create(folder, Tokens::NAME, facts)
    }

    /// Begins a Packs table.
    pub fn packs(folder: &Path, mut facts: TokensFacts) -> Self {
        // Packs have such a column in any case.
        facts.columns.retain(|column| *column != OptionalColumn::DocumentLengths);
        Self::create(folder, Packs::NAME, facts)
    }

    fn create(folder: &Path, kind: &'static str, facts: TokensFacts) -> Self {
        let list = |name: &str, item: DataType| {
            Field::new(name, DataType::List(Arc::new(Field::new("element", item, false))), false)
        };
        let mut fields = vec![list("input_ids", DataType::UInt32), list("labels", DataType::Int32)];
        if kind == Packs::NAME {
            fields.push(list("document_lengths", DataType::UInt32));
        }
        fields.extend(facts.columns.iter().map(|column| list(column.name(), column.item())));
        let schema = Arc::new(Schema::new(fields));
        // The upper bytes of ids are mostly alike: apart from the lower ones they take next to no room.
        let parts = PartsWriter::new(folder, schema.clone(), Encoding::BYTE_STREAM_SPLIT);
        let identities = TableHasher::new(hasher(kind, &facts));
        let facts = TokensFacts {
            rows: 0,
            documents: 0,
            tokens: 0,
            target_tokens: 0,
            longest_row: 0,
            longest_document: 0,
            largest_id: None,
            padding: 0,
            chosen: 0,
            rejected: 0,
            ..facts
        };
        Self { kind, facts, schema, parts, identities, filling: Columns::default() }
    }

    /// What was written so far.
    pub fn facts(&self) -> &TokensFacts {
        &self.facts
    }

    /// Adds a row.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    ///
    /// # Panics
    /// If ids and labels differ in number, or documents do not fit into the row.
    pub fn write(&mut self, row: TokenRow) -> Result<(), TableError> {
        assert_eq!(row.input_ids.len(), row.labels.len(), "each id has a label");
        assert!(row.real_tokens() <= row.input_ids.len(), "documents lie within their row");
        let optional = OptionalValues::of(&row, &self.facts.columns);
        self.identities.take(|hasher| {
            hasher.ids(&row.input_ids);
            hasher.labels(&row.labels);
            if self.kind == Packs::NAME {
                hasher.ids(&optional.document_lengths);
            }
            optional.hash(&self.facts.columns, hasher);
        });
        let (length, real) = (row.input_ids.len() as u64, row.real_tokens() as u64);
        self.facts.rows += 1;
        self.facts.documents += row.document_lengths.len() as u64;
        self.facts.tokens += real;
        self.facts.padding += length - real;
        self.facts.target_tokens += row.target_tokens() as u64;
        self.facts.longest_row = self.facts.longest_row.max(length);
        self.facts.chosen += row.roles.iter().filter(|role| **role == Role::Chosen).count() as u64;
        self.facts.rejected += row.roles.iter().filter(|role| **role == Role::Rejected).count() as u64;
        let longest = row.document_lengths.iter().copied().max().unwrap_or(0);
        self.facts.longest_document = self.facts.longest_document.max(longest as u64);
        self.facts.largest_id = self.facts.largest_id.max(row.input_ids[..real as usize].iter().copied().max());
        self.filling.push(&row, &optional);
        let ends_part = self.filling.row_lengths.len() as u64 == self.parts.room();
        if ends_part || self.filling.is_full() {
            self.end_group()?;
        }
        if ends_part {
            self.end_part()?;
        }
        Ok(())
    }

    fn end_group(&mut self) -> Result<(), TableError> {
        let filled = std::mem::take(&mut self.filling);
        self.parts.write(filled.into_batch(&self.schema, self.kind, &self.facts.columns))
    }

    fn end_part(&mut self) -> Result<(), TableError> {
        self.parts.end_part(self.identities.end_part())
    }

    /// Ends the table: its facts, counts of left-out rows among them, and its identity.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn finish(mut self, complete: impl FnOnce(&mut TokensFacts)) -> Result<(TokensFacts, Digest), TableError> {
        if !self.filling.row_lengths.is_empty() {
            self.end_group()?;
        }
        self.end_part()?;
        complete(&mut self.facts);
        self.parts.finish()?;
        Ok((self.facts, self.identities.finish()))
    }
}

fn hasher(kind: &str, facts: &TokensFacts) -> IdentityHasher {
    let mut schema = vec!["input_ids: list<u32>", "labels: list<i32>"];
    if kind == Packs::NAME {
        schema.push("document_lengths: list<u32>");
    }
    schema.extend(facts.columns.iter().map(|column| column.described()));
    IdentityHasher::new(kind, &schema, &facts.attributes())
}

fn list<T: ArrowPrimitiveType>(offsets: OffsetBuffer<i32>, values: Vec<T::Native>) -> ArrayRef {
    let values = Arc::new(PrimitiveArray::<T>::new(ScalarBuffer::from(values), None));
    Arc::new(ListArray::new(Arc::new(Field::new("element", T::DATA_TYPE, false)), offsets, values, None))
}

/// Reads a Tokens or a Packs artefact; memory holds some dozens of rows at a time.
pub struct TokensReader {
    facts: TokensFacts,
    packed: bool,
    parts: PartsReader,
}

impl TokensReader {
    /// Opens an input.
    ///
    /// # Errors
    /// Fails where the artefact is no table of tokens that this version can read.
    pub fn open(artifact: &Artifact) -> Result<Self, TableError> {
        Self::open_with(&artifact.folder, &artifact.description.kind, &artifact.description.facts)
    }

    /// Opens a stored folder of a kind, with its facts.
    ///
    /// # Errors
    /// As for [`TokensReader::open`].
    pub fn open_with(folder: &Path, kind: &str, facts: &Facts) -> Result<Self, TableError> {
        if kind != Tokens::NAME && kind != Packs::NAME {
            return Err(TableError::form(folder, format!("tokens or packs are expected, and it contains {kind}")));
        }
        let facts = TokensFacts::from_facts(facts)
            .ok_or_else(|| TableError::form(folder, "its facts are not those of tokens"))?;
        Ok(Self { facts, packed: kind == Packs::NAME, parts: PartsReader::open(folder)? })
    }

    /// What is known about the rows.
    pub fn facts(&self) -> &TokensFacts {
        &self.facts
    }

    /// How many rows there are.
    pub fn len(&self) -> u64 {
        self.parts.rows()
    }

    /// Whether a row holds several documents, and padding.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    /// The files with the rows, in order.
    pub fn part_files(&self) -> Vec<PathBuf> {
        self.parts.files()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A row by its index. Any order will do; reading in order decodes each stretch of rows once.
    ///
    /// # Errors
    /// Fails beyond the last row and where a file is damaged.
    pub fn row(&mut self, index: u64) -> Result<TokenRow, TableError> {
        let (batch, position) = self.parts.row(index)?;
        let row = row_at(batch, position);
        row.ok_or_else(|| {
            TableError::form(self.parts.folder(), format!("row {} does not have ids with as many labels", index + 1))
        })
    }

    /// All rows in order.
    pub fn iter(&mut self) -> impl Iterator<Item = Result<TokenRow, TableError>> + '_ {
        (0..self.len()).map(|index| self.row(index))
    }
}

fn row_at(batch: &RecordBatch, position: usize) -> Option<TokenRow> {
    let list = |column: &str| {
        let array = batch.column_by_name(column)?.as_any().downcast_ref::<ListArray>()?;
        array.is_valid(position).then(|| array.value(position))
    };
    let ids = |column: &str| list(column)?.as_any().downcast_ref::<UInt32Array>().map(|array| array.values().to_vec());
    let input_ids = ids("input_ids")?;
    let labels = list("labels")?.as_any().downcast_ref::<Int32Array>()?.values().to_vec();
    let document_lengths: Vec<usize> = match batch.column_by_name("document_lengths") {
        Some(_) => ids("document_lengths")?.into_iter().map(|length| length as usize).collect(),
        None => vec![input_ids.len()],
    };
    let optional = |column: OptionalColumn| match batch.column_by_name(column.name()) {
        Some(_) => list(column.name()).map(Some),
        None => Some(None),
    };
    let weights = values::<Float32Array, _>(optional(OptionalColumn::Weight)?, |array| array.values().to_vec())?;
    let groups = values::<UInt64Array, _>(optional(OptionalColumn::Group)?, |array| array.values().to_vec())?;
    let roles = values::<UInt8Array, _>(optional(OptionalColumn::Role)?, |array| array.values().to_vec())?;
    let roles = roles.into_iter().map(Role::of_number).collect::<Option<Vec<Role>>>()?;
    let (tokens, documents) = (input_ids.len(), document_lengths.len());
    let fits = |entries: usize, places: usize| entries == 0 || entries == places;
    let row = TokenRow { input_ids, labels, document_lengths, weights, groups, roles, ..TokenRow::default() };
    let is_whole = row.labels.len() == tokens
        && row.real_tokens() <= tokens
        && fits(row.weights.len(), tokens)
        && fits(row.groups.len(), documents)
        && fits(row.roles.len(), documents);
    is_whole.then_some(row)
}

/// The values of an optional column, none where the table lacks it; `None` where they have another type.
fn values<A: 'static, T>(list: Option<ArrayRef>, values: impl Fn(&A) -> Vec<T>) -> Option<Vec<T>> {
    let Some(list) = list else { return Some(Vec::new()) };
    list.as_any().downcast_ref::<A>().map(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> TokensFacts {
        TokensFacts { vocab_size: 10, bos_token_id: Some(0), eos_token_id: Some(1), ..TokensFacts::none(Shape::Prompt) }
    }

    fn row(number: u32) -> TokenRow {
        let length = 1 + number % 5;
        let ids: Vec<u32> = (number..number + length).collect();
        let labels = ids.iter().map(|id| if id % 2 == 0 { *id as i32 } else { IGNORE_INDEX }).collect();
        TokenRow::document(ids, labels)
    }

    fn write(folder: &Path, facts: TokensFacts, rows: impl Iterator<Item = TokenRow>) -> (TokensFacts, Digest) {
        let mut writer = TokensWriter::tokens(folder, facts);
        rows.for_each(|row| writer.write(row).unwrap());
        writer.finish(|_| ()).unwrap()
    }

    #[test]
    fn any_row_of_several_parts_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let (facts, _) = write(folder.path(), facts(), (0..17_000).map(row));
        assert!(folder.path().join("part-00002.parquet").exists());
        let mut reader = TokensReader::open_with(folder.path(), "tokens", &facts.to_facts()).unwrap();
        for index in [16_999, 0, 8191, 8192, 64, 63, 16_384, 5] {
            assert_eq!(reader.row(index).unwrap(), row(index as u32));
        }
        assert!(matches!(reader.row(17_000), Err(TableError::NoSuchRow { index: 17_000, rows: 17_000 })));
        assert!(reader.iter().enumerate().all(|(index, read)| read.unwrap() == row(index as u32)));
    }

    #[test]
    fn optional_columns_are_read_as_they_were_written_and_decide_the_identity() {
        let weighted = |number: u32| {
            let row = row(number);
            let weights = (0..row.input_ids.len()).map(|token| token as f32 / 4.0).collect();
            let role = if number.is_multiple_of(2) { Role::Chosen } else { Role::Rejected };
            TokenRow { weights, groups: vec![u64::from(number / 2)], roles: vec![role], ..row }
        };
        let columns = vec![OptionalColumn::Weight, OptionalColumn::Group, OptionalColumn::Role];
        let with_columns = TokensFacts { columns, ..facts() };
        let folder = tempfile::tempdir().unwrap();
        let (written, identity) = write(folder.path(), with_columns.clone(), (0..100).map(weighted));
        let mut reader = TokensReader::open_with(folder.path(), "tokens", &written.to_facts()).unwrap();
        assert_eq!(reader.facts().columns, with_columns.columns);
        assert!((0..100).all(|index| reader.row(index).unwrap() == weighted(index as u32)));
        let other = tempfile::tempdir().unwrap();
        let heavier = |number| {
            let mut row = weighted(number);
            row.weights[0] += 1.0;
            row
        };
        assert_ne!(write(other.path(), with_columns, (0..100).map(heavier)).1, identity);
        let plain = tempfile::tempdir().unwrap();
        assert!(!write(plain.path(), facts(), (0..100).map(row)).0.to_facts().contains_key("columns"));
    }

    #[test]
    fn values_and_special_ids_decide_the_identity_and_counts_do_not() {
        let identity = |facts: TokensFacts, rows: std::ops::Range<u32>| {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), facts, rows.map(row)).1
        };
        let one = identity(facts(), 0..10);
        assert_eq!(identity(TokensFacts { truncated: 3, ..facts() }, 0..10), one);
        assert_ne!(identity(TokensFacts { pad_token_id: Some(2), ..facts() }, 0..10), one);
        assert_ne!(identity(facts(), 0..11), one);
    }

    #[test]
    fn a_damaged_or_foreign_folder_is_an_error_and_no_panic() {
        let folder = tempfile::tempdir().unwrap();
        let (facts, _) = write(folder.path(), facts(), (0..10).map(row));
        let facts = facts.to_facts();
        assert!(TokensReader::open_with(folder.path(), "rows", &facts).is_err());
        assert!(TokensReader::open_with(folder.path(), "tokens", &Facts::new()).is_err());
        let part = folder.path().join("part-00000.parquet");
        let bytes = std::fs::read(&part).unwrap();
        std::fs::write(&part, &bytes[..bytes.len() / 2]).unwrap();
        let mut reader = TokensReader::open_with(folder.path(), "tokens", &facts).unwrap();
        assert!(matches!(reader.row(0), Err(TableError::Parquet { .. })));
        std::fs::remove_file(&part).unwrap();
        assert!(matches!(reader.row(0), Err(TableError::Io { .. })));
    }
}
