//! What `pipeline show` prints: rows as a person wants to see them.
//!
//! It gives a structure and leaves colours and widths to the command line.

use std::borrow::Cow;
use std::path::Path;

use engine::artifact::Facts;
use engine::error::StageError;
use model::batch::target_count;
use serde::Serialize;
use serde_json::Value;

use crate::data::artifact::{
    IGNORE_INDEX, Message, OutputKind, Packs, Role, Row, Rows, RowsReader, Said, Samples, TOOLS, TokenRow, Tokens,
    TokensReader,
};
use crate::data::results::TextReader;
use crate::data::tokenizer::Tokenizer;
use crate::kinds::generate::samples;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RowView {
    /// A row of text.
    Text {
        /// Its index, from 0.
        index: u64,
        /// Its columns, or its turns by role.
        fields: Vec<Field>,
    },
    /// A row of tokens.
    Tokens {
        /// Its index, from 0.
        index: u64,
        documents: Vec<DocumentView>,
        /// Padding after them, in tokens.
        padding: usize,
    },
}

/// A named text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Field {
    /// A column, or who speaks.
    pub name: String,
    /// What it holds.
    pub text: String,
}

/// A document of a row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DocumentView {
    /// What it is in its group, and the group, where responses are compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Its length in tokens.
    pub tokens: usize,
    /// How many of them the loss is taken over.
    pub trained: usize,
    /// Its text, in stretches that are trained or not.
    pub segments: Vec<SegmentView>,
}

/// Consecutive tokens that are all trained, or none of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SegmentView {
    /// Decoded text, special tokens written out; without a tokenizer, the ids.
    pub text: String,
    pub tokens: usize,
    /// Whether the loss is taken over them.
    pub trained: bool,
}

/// The first rows of an artefact of rows, tokens, packs or samples.
///
/// # Errors
/// Fails where the artefact is of another kind, or cannot be read.
pub fn describe_rows(
    folder: &Path,
    kind: &str,
    facts: &Facts,
    tokenizer: Option<&Tokenizer>,
    rows: u64,
) -> Result<Vec<RowView>, StageError> {
    if kind == Rows::NAME {
        let mut reader = RowsReader::open_with(folder, kind, facts)?;
        let shown = rows.min(reader.len());
        return (0..shown).map(|index| Ok(RowView::Text { index, fields: fields(reader.row(index)?) })).collect();
    }
    if kind == Samples::NAME {
        return samples(folder, rows);
    }
    if kind != Tokens::NAME && kind != Packs::NAME {
        return Err(StageError::bad_data(format!("an artefact of kind {kind} has no rows to show")));
    }
    let mut reader = TokensReader::open_with(folder, kind, facts)?;
    let shown = rows.min(reader.len());
    (0..shown).map(|index| token_row(index, &reader.row(index)?, tokenizer)).collect()
}

/// The first prompts of a generation, each with its answer or why there is none.
fn samples(folder: &Path, rows: u64) -> Result<Vec<RowView>, StageError> {
    const NAMES: [&str; 4] = ["prompt", "completion", "problem", "reference"];
    let mut reader = TextReader::open(&folder.join(samples::TABLE), &NAMES)?;
    let mut views = Vec::new();
    while (views.len() as u64) < rows
        && let Some(columns) = reader.next_rows()?
    {
        let columns = <[Vec<String>; 4]>::try_from(columns).expect("as many columns are read");
        let [prompts, completions, problems, references] = columns.map(Vec::into_iter);
        for (((prompt, completion), problem), reference) in prompts.zip(completions).zip(problems).zip(references) {
            let answered = problem.is_empty();
            let texts = NAMES.into_iter().zip([prompt, completion, problem, reference]);
            let present =
                |name: &str, text: &str| name == "prompt" || !text.is_empty() || name == "completion" && answered;
            let fields = texts.filter(|(name, text)| present(name, text));
            let fields = fields.map(|(name, text)| Field { name: name.to_owned(), text }).collect();
            views.push(RowView::Text { index: views.len() as u64, fields });
        }
    }
    views.truncate(usize::try_from(rows).unwrap_or(usize::MAX));
    Ok(views)
}

/// A text for a screen: of a long one its beginning and its end, and how many characters lie between them.
///
/// Up to `most` characters of it are kept, of which a quarter is the end: there stands what ends a document.
pub fn shortened(text: &str, most: usize) -> Cow<'_, str> {
    // No text has more characters than bytes.
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let characters = text.chars().count();
    if characters <= most {
        return Cow::Borrowed(text);
    }
    let (end, left_out) = (most / 4, characters - most);
    let place = |character: usize| text.char_indices().nth(character).map_or(text.len(), |(byte, _)| byte);
    let (begin, end) = (&text[..place(most - end)], &text[place(characters - end)..]);
    Cow::Owned(format!("{begin}\n… {left_out} characters left out …\n{end}"))
}

fn fields(row: Row) -> Vec<Field> {
    match row {
        Row::Columns(columns) => columns.into_iter().map(|(name, text)| Field { name, text }).collect(),
        Row::Text(text) => vec![Field { name: "text".to_owned(), text }],
        Row::Messages(messages) => messages.into_iter().flat_map(fields_of_turn).collect(),
        Row::Judged(judged) => {
            let named = [("prompt", Some(judged.prompt)), ("chosen", judged.chosen), ("rejected", judged.rejected)];
            let field = |(name, said): (&str, Option<Said>)| match said? {
                Said::Text(text) => Some(vec![Field { name: name.to_owned(), text }]),
                Said::Turns(turns) => {
                    let of_turns = fields(Row::Messages(turns)).into_iter();
                    let in_part = |field: Field| Field { name: format!("{name}, {}", field.name), ..field };
                    Some(of_turns.map(in_part).collect())
                }
            };
            named.into_iter().filter_map(field).flatten().collect()
        }
    }
}

/// What a turn says, and all else that the chat template is given of it: calls of tools, reasoning, the tools
/// themselves.
fn fields_of_turn(turn: Message) -> Vec<Field> {
    let Message { role, content, other } = turn;
    let text = |value: Value| match value {
        Value::String(text) => text,
        other => other.to_string(),
    };
    let is_said = other.is_empty() || !(content.is_null() || content == "");
    let said = is_said.then(|| Field { name: role.clone(), text: text(content) });
    let other = other.into_iter().map(|(name, value)| match name.as_str() {
        TOOLS => Field { name: "tools".to_owned(), text: text(value) },
        _ => Field { name: format!("{role}, {name}"), text: text(value) },
    });
    said.into_iter().chain(other).collect()
}

fn token_row(index: u64, row: &TokenRow, tokenizer: Option<&Tokenizer>) -> Result<RowView, StageError> {
    let mut documents = Vec::new();
    let mut start = 0;
    for (number, length) in row.document_lengths.iter().enumerate() {
        let end = start + length;
        let view = document(&row.input_ids[start..end], &row.labels[start..end], tokenizer)?;
        let role = row.roles.get(number).map(|role| role_name(*role).to_owned());
        documents.push(DocumentView { role, ..view });
        start = end;
    }
    Ok(RowView::Tokens { index, documents, padding: row.input_ids.len() - start })
}

fn document(ids: &[u32], labels: &[i32], tokenizer: Option<&Tokenizer>) -> Result<DocumentView, StageError> {
    let mut segments = Vec::new();
    let mut start = 0;
    for stretch in labels.chunk_by(|one, two| (*one == IGNORE_INDEX) == (*two == IGNORE_INDEX)) {
        let end = start + stretch.len();
        let text = match tokenizer {
            Some(tokenizer) => text_of(&ids[..end], start, tokenizer)?,
            None => ids[start..end].iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        };
        segments.push(SegmentView { text, tokens: stretch.len(), trained: stretch[0] != IGNORE_INDEX });
        start = end;
    }
    Ok(DocumentView { role: None, tokens: ids.len(), trained: target_count(labels), segments })
}

fn role_name(role: Role) -> &'static str {
    match role {
        Role::Chosen => "chosen",
        Role::Rejected => "rejected",
        Role::Mismatched => "mismatched",
    }
}

/// The text that the ids from `start` on add to those before them. SentencePiece tokenizers drop a space at the
/// beginning of a text, which a segment inside a document is not.
fn text_of(ids: &[u32], start: usize, tokenizer: &Tokenizer) -> Result<String, StageError> {
    let (before, whole) = (tokenizer.decode_with_special(&ids[..start])?, tokenizer.decode_with_special(ids)?);
    match whole.strip_prefix(&before) {
        Some(added) => Ok(added.to_owned()),
        // The segment ends inside a character of several tokens.
        None => Ok(tokenizer.decode_with_special(&ids[start..])?),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, StringArray};

    use super::*;
    use crate::data::results::TableWriter;

    #[test]
    fn a_segment_inside_a_document_keeps_its_leading_space() {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/metaspace");
        let tokenizer = Tokenizer::from_folder(std::path::Path::new(golden)).unwrap();
        let ids = ["▁o", "r", "▁o", "n"].map(|token| tokenizer.token_id(token).unwrap());
        let labels = [IGNORE_INDEX, IGNORE_INDEX, ids[2] as i32, ids[3] as i32];
        let document = document(&ids, &labels, Some(&tokenizer)).unwrap();
        let texts: Vec<&str> = document.segments.iter().map(|segment| segment.text.as_str()).collect();
        assert_eq!(texts, ["or", " on"]);
    }

    #[test]
    fn of_a_long_text_beginning_and_end_are_shown() {
        assert_eq!(shortened("größe", 5), "größe");
        assert_eq!(shortened(&"é".repeat(8), 8), "é".repeat(8));
        let text = format!("{}{}{}", "a".repeat(6), "b".repeat(100), "z".repeat(2));
        assert_eq!(shortened(&text, 8), "aaaaaa\n… 100 characters left out …\nzz");
    }

    #[test]
    fn as_many_samples_are_told_as_are_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let texts = |texts: &[Option<&str>]| -> ArrayRef { Arc::new(texts.iter().copied().collect::<StringArray>()) };
        let mut writer = TableWriter::new(folder.path().join(samples::TABLE));
        let columns = [
            ("prompt", texts(&[Some("Who?"), Some(""), Some("Why?")])),
            ("completion", texts(&[Some(""), None, Some("So.")])),
            ("reference", texts(&[Some("Me."), None, None])),
            ("problem", texts(&[None, Some("it has no tokens"), None])),
        ];
        writer.write(columns).unwrap();
        writer.finish().unwrap();
        let told = |rows| -> Vec<Vec<(String, String)>> {
            let views = describe_rows(folder.path(), Samples::NAME, &Facts::new(), None, rows).unwrap();
            let fields = views.into_iter().map(|view| match view {
                RowView::Text { fields, .. } => fields.into_iter().map(|field| (field.name, field.text)).collect(),
                RowView::Tokens { .. } => panic!("samples are text"),
            });
            fields.collect()
        };
        let pairs = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
        };
        let first = pairs(&[("prompt", "Who?"), ("completion", ""), ("reference", "Me.")]);
        let second = pairs(&[("prompt", ""), ("problem", "it has no tokens")]);
        assert_eq!(told(2), [first, second]);
        assert_eq!((told(0).len(), told(9).len()), (0, 3));
    }

    #[test]
    fn trained_stretches_and_document_borders_are_told() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/bytelevel");
        let tokenizer = Tokenizer::from_folder(Path::new(path)).unwrap();
        let (prompt, answer) = (tokenizer.encode("Who?").unwrap(), tokenizer.encode(" Me.").unwrap());
        let ids: Vec<u32> = [prompt.clone(), answer.clone(), vec![1], answer.clone(), vec![0; 3]].concat();
        let mut labels = vec![IGNORE_INDEX; ids.len()];
        for at in prompt.len()..prompt.len() + 2 * answer.len() + 1 {
            labels[at] = ids[at] as i32;
        }
        let document_lengths = vec![prompt.len() + answer.len() + 1, answer.len()];
        let row = TokenRow { input_ids: ids, labels, document_lengths, ..TokenRow::default() };
        let RowView::Tokens { documents, padding, .. } = token_row(0, &row, Some(&tokenizer)).unwrap() else {
            panic!("no row of tokens")
        };
        assert_eq!(padding, 3);
        let texts: Vec<Vec<(&str, bool)>> = documents
            .iter()
            .map(|document| document.segments.iter().map(|part| (part.text.as_str(), part.trained)).collect())
            .collect();
        assert_eq!(texts, [vec![("Who?", false), (" Me.<|end_of_text|>", true)], vec![(" Me.", true)]]);
        assert_eq!(documents[0].trained, answer.len() + 1);
        assert_eq!(documents[1].trained, answer.len() - 1);
        let RowView::Tokens { documents, .. } = token_row(0, &row, None).unwrap() else { panic!("no row of tokens") };
        assert_eq!(documents[0].segments[0].text, prompt.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
    }
}
