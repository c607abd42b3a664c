//! From the columns of the data to rows: which column is what, and whether a value can be used.

use std::collections::BTreeMap;

use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::suggest;
use serde_json::{Map, Value};

use super::Dataset;
use super::conversation::{check_order, conversation, is_assistant, says_nothing};
use super::flaw::{Flaw, Reason, describe};
use super::parameters::TurnOrder;
use super::preference::{self, Layout};
use super::tools;
use crate::data::artifact::{Message, Row, RowsFacts, Shape, TOOLS};
use crate::data::prompt::Template;

/// The key of `column_map` for the response, and for the only placeholder of a template that has one.
const OUTPUT: &str = "output";
const INPUT: &str = "input";

/// The key of `column_map` for the weight of a row in the loss, which `tokenize` reads.
const WEIGHT: &str = "weight";

/// TRL's columns, of which both hold text or both turns, and what the text is in a row.
const OF_TRL: [(&str, &str); 2] = [(INPUT, preference::PROMPT), (OUTPUT, preference::COMPLETION)];

/// The column with the turns, as OpenAI and torchtune spell it, and as ShareGPT does.
const MESSAGES: &str = "messages";
/// The column of the tools of a conversation.
const TOOLS_COLUMN: &str = "tools";
const CONVERSATIONS: &str = "conversations";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Required,
    /// A row without it has an empty text there.
    Optional,
    /// The data has the column, of numbers or their texts; a row without a value has an empty text there.
    Weight,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Column {
    /// What rows call it.
    name: String,
    /// What the data calls it.
    source: String,
    need: Need,
}

/// How records become rows.
#[derive(Debug)]
pub(super) struct RowMapping {
    pub facts: RowsFacts,
    columns: Vec<Column>,
    turn_order: TurnOrder,
    /// Where prompts and responses stand, for rows of preferences.
    preference: Option<Layout>,
    /// Whether prompt and response are those of TRL's columns.
    is_of_trl: bool,
}

/// The template that was asked for; `none` is the same as no word about it.
fn template(params: &Dataset) -> Option<&Template> {
    params.template.as_ref().map(|choice| &choice.0).filter(|template| template.name != "none")
}

/// The only placeholder of a template, which `input` stands for too, as in newer torchtune.
fn only_placeholder(template: &Template) -> Option<String> {
    let mut names = template.placeholders();
    (names.len() == 1).then(|| names.remove(0))
}

/// Problems with `column_map` that need no data to be seen.
pub(super) fn check_names(params: &Dataset, span: Span) -> Vec<Problem> {
    let known: Vec<String> = match template(params) {
        Some(template) => {
            let also = only_placeholder(template).map(|_| INPUT.to_owned());
            template.placeholders().into_iter().chain(also).chain([OUTPUT, WEIGHT].map(str::to_owned)).collect()
        }
        None => {
            let names = [MESSAGES, CONVERSATIONS, TOOLS_COLUMN, "text", INPUT, OUTPUT, WEIGHT];
            names.into_iter().chain(preference::KEYS).map(str::to_owned).collect()
        }
    };
    let unknown = params.column_map.iter().filter(|(key, _)| !known.contains(key));
    unknown
        .map(|(key, column)| {
            let message = format!("`column_map` has `{key}`, which the template does not use");
            let turned = known
                .contains(column)
                .then(|| format!("it maps the template's name to the data's column: `{column}: {key}`"));
            let help = turned.or_else(|| suggest::help(key, "name", &known));
            Problem::error("unknown-key", span, message, format!("for `{key}`, which is no name of the template"))
                .with_help_if(help)
                .at(format!("column_map.{key}"))
        })
        .collect()
}

/// What a row is, where the parameters alone decide it.
pub(super) fn shape_asked_for(params: &Dataset) -> Option<Shape> {
    let names = |keys: &[&str]| keys.iter().any(|key| params.column_map.contains_key(*key));
    if template(params).is_some() {
        Some(Shape::Prompt)
    } else if names(&[preference::CHOSEN, preference::REJECTED]) {
        Some(Shape::Pairs)
    } else if names(&[preference::COMPLETION, preference::LABEL]) {
        Some(Shape::Judged)
    } else if names(&[MESSAGES, CONVERSATIONS]) {
        Some(Shape::Messages)
    } else if names(&["text"]) {
        Some(Shape::Text)
    } else {
        names(&[INPUT, OUTPUT]).then_some(Shape::Prompt)
    }
}

/// Whether the columns of the data decide what a row is.
pub(super) fn columns_decide(params: &Dataset) -> bool {
    let makes_turns = [MESSAGES, CONVERSATIONS].iter().any(|name| params.map.contains_key(*name));
    params.source.is_some() && shape_asked_for(params).is_none() && !makes_turns
}

/// Whether a column of tools is asked for where rows may be of preferences, which had none before.
pub(super) fn may_give_tools_to_preferences(params: &Dataset) -> bool {
    let names_preference = preference::KEYS.iter().any(|name| params.column_map.contains_key(*name));
    params.column_map.contains_key(TOOLS_COLUMN) && (names_preference || columns_decide(params))
}

/// What rows will be, where the parameters alone decide it.
pub(super) fn facts_asked_for(params: &Dataset) -> Option<RowsFacts> {
    Some(match shape_asked_for(params)? {
        Shape::Prompt => {
            RowMapping::prompt(params, template(params).cloned().unwrap_or_else(without_template), &[]).facts
        }
        Shape::Messages => RowsFacts::messages(),
        Shape::Text => RowsFacts::text(),
        Shape::Pairs => RowsFacts::pairs(),
        Shape::Judged => RowsFacts::judged(),
    })
}

/// Why no rows can be made of data with these columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ColumnMisfit {
    /// The code of the problem.
    code: &'static str,
    /// The parameter that asks for the column, or should say what a row is.
    field: String,
    message: String,
    help: String,
}

impl ColumnMisfit {
    /// As a problem of the stage whose `with:` stands at `span`.
    pub(super) fn problem(self, span: Span) -> Problem {
        let label = if self.code == "unknown-column" { "no column of the data" } else { "which column is what?" };
        Problem::error(self.code, span, self.message, label).with_help(self.help).at(self.field)
    }
}

impl From<ColumnMisfit> for StageError {
    fn from(misfit: ColumnMisfit) -> Self {
        StageError::bad_data(misfit.message).with_help(misfit.help)
    }
}

impl RowMapping {
    /// Finds out what rows of these columns are.
    pub(super) fn plan(params: &Dataset, columns: &[String], file: &str) -> Result<Self, ColumnMisfit> {
        let has = |column: &str| columns.iter().any(|known| known == column);
        let mapped = |name: &str| params.column_map.get(name).cloned();
        let names_key = |name: &str| params.column_map.contains_key(name);
        let turns = [MESSAGES, CONVERSATIONS];
        let mapped_turns = turns.iter().find_map(|name| mapped(name));
        let own_turns = turns.into_iter().find(|name| has(name));
        let says_what = names_key(INPUT) || names_key(OUTPUT) || names_key("text");
        let made = turns.iter().any(|name| params.map.contains_key(*name));
        let names_preference = preference::KEYS.iter().any(|name| names_key(name));
        let says_otherwise = !names_preference && (says_what || mapped_turns.is_some() || made);
        let layout = Layout::of(columns, &mapped).filter(|_| template(params).is_none() && !says_otherwise);
        let mapping = if let Some(template) = template(params) {
            Self::prompt(params, template.clone(), columns)
        } else if let Some(layout) = layout {
            let mut mapping = Self::preference(params, layout, columns);
            mapping.columns.extend(mapped(TOOLS_COLUMN).map(tools_in));
            mapping
        } else if names_preference {
            return Err(half_a_pair(columns, file));
        } else if let Some(column) = mapped_turns.or_else(|| own_turns.filter(|_| !says_what).map(str::to_owned)) {
            let mut mapping = Self::single(params, RowsFacts::messages(), column);
            mapping.columns.extend(mapped(TOOLS_COLUMN).map(tools_in));
            mapping
        } else if names_key("text") || (params.column_map.is_empty() && has("text") && !has(OUTPUT)) {
            Self::single(params, RowsFacts::text(), mapped("text").unwrap_or_else(|| "text".to_owned()))
        } else if names_key(INPUT) || names_key(OUTPUT) || (has(INPUT) && has(OUTPUT) && !has("instruction")) {
            Self::prompt(params, without_template(), columns)
        } else if OF_TRL.iter().all(|(_, source)| has(source)) {
            let mut mapping = Self::prompt(params, without_template(), columns);
            for (name, source) in OF_TRL {
                let column = mapping.columns.iter_mut().find(|column| column.name == name);
                source.clone_into(&mut column.expect("`none` has both").source);
            }
            Self { is_of_trl: true, ..mapping }
        } else {
            return Err(unclear(columns, file));
        };
        mapping.check_columns(params, columns, file)?;
        Ok(mapping)
    }

    /// The columns of which the data decides whether they hold text or turns.
    pub(super) fn may_hold_turns(&self) -> Option<[&'static str; 2]> {
        self.is_of_trl.then(|| OF_TRL.map(|(_, source)| source))
    }

    /// The same of columns that hold turns: rows are conversations.
    pub(super) fn of_turns(self, params: &Dataset) -> Self {
        let of = |source: &str| Column { name: source.to_owned(), source: source.to_owned(), need: Need::Required };
        let tools = params.column_map.get(TOOLS_COLUMN).cloned().map(tools_in);
        let columns = OF_TRL.into_iter().map(|(_, source)| of(source)).chain(tools).collect();
        Self { facts: RowsFacts::messages(), columns, ..self }
    }

    fn single(params: &Dataset, facts: RowsFacts, source: String) -> Self {
        let column = Column { name: facts.columns[0].clone(), source, need: Need::Required };
        Self { facts, columns: vec![column], turn_order: params.turn_order, preference: None, is_of_trl: false }
    }

    fn preference(params: &Dataset, layout: Layout, columns: &[String]) -> Self {
        let required = layout.columns().into_iter().map(|(name, source)| Column {
            name: name.to_owned(),
            source,
            need: Need::Required,
        });
        let optional = layout.optional_columns().iter().filter(|name| columns.iter().any(|column| column == *name));
        let optional =
            optional.map(|name| Column { name: (*name).to_owned(), source: (*name).to_owned(), need: Need::Optional });
        let columns = required.chain(optional).collect();
        Self {
            facts: layout.facts(),
            columns,
            turn_order: params.turn_order,
            preference: Some(layout),
            is_of_trl: false,
        }
    }

    fn prompt(params: &Dataset, template: Template, columns: &[String]) -> Self {
        let mapped = |name: &str| params.column_map.get(name).cloned();
        let only = only_placeholder(&template);
        let source = |name: &str| {
            let is_only = only.as_deref() == Some(name);
            let input_in_data = is_only && !columns.iter().any(|column| column == name);
            let by_default = if input_in_data && columns.iter().any(|column| column == INPUT) { INPUT } else { name };
            mapped(name).or_else(|| mapped(INPUT).filter(|_| is_only)).unwrap_or_else(|| by_default.to_owned())
        };
        let required = template.required();
        let need = |name: &String| if required.contains(name) { Need::Required } else { Need::Optional };
        let mut all: Vec<Column> = template
            .placeholders()
            .into_iter()
            .map(|name| Column { source: source(&name), need: need(&name), name })
            .collect();
        // A template that uses `{output}` itself needs no second column of that name.
        if !all.iter().any(|column| column.name == OUTPUT) {
            let source = mapped(OUTPUT).unwrap_or_else(|| OUTPUT.to_owned());
            all.push(Column { name: OUTPUT.to_owned(), source, need: Need::Required });
        }
        if let Some(source) = mapped(WEIGHT).filter(|_| !all.iter().any(|column| column.name == WEIGHT)) {
            all.push(Column { name: WEIGHT.to_owned(), source, need: Need::Weight });
        }
        let names = all.iter().map(|column| column.name.clone());
        let facts = RowsFacts::prompt(template, OUTPUT, names);
        Self { facts, columns: all, turn_order: params.turn_order, preference: None, is_of_trl: false }
    }

    /// The columns that rows are made of, by the names that the data has for them.
    pub(super) fn sources(&self) -> Vec<String> {
        self.columns.iter().map(|column| column.source.clone()).collect()
    }

    fn check_columns(&self, params: &Dataset, columns: &[String], file: &str) -> Result<(), ColumnMisfit> {
        let missing = |column: &&Column| column.need != Need::Optional && !columns.contains(&column.source);
        let Some(column) = self.columns.iter().find(missing) else { return Ok(()) };
        let nearest = suggest::nearest(&column.source, columns);
        let mean = nearest.map_or_else(String::new, |name| format!(" (did you mean `{name}`?)"));
        let message =
            format!("`{file}` has no column `{}`, which `{}` is to come from{mean}", column.source, column.name);
        let help = format!("its columns are {}; name them in `column_map: {{{}: ...}}`", list(columns), column.name);
        let mapped = params.column_map.iter().find(|(_, source)| **source == column.source);
        let field = match (mapped, &params.template) {
            (Some((name, _)), _) => format!("column_map.{name}"),
            (None, Some(_)) => "template".to_owned(),
            (None, None) => "source".to_owned(),
        };
        Err(ColumnMisfit { code: "unknown-column", field, message, help })
    }

    /// A row, or what is wrong with the record.
    pub(super) fn row(&self, mut fields: Map<String, Value>) -> Result<Row, Flaw> {
        if let Some(layout) = &self.preference {
            let tools = self.tools(&mut fields)?;
            let mut row = layout.row(fields, self.turn_order)?;
            if let Some((column, tools)) = tools {
                preference::give_tools(&mut row, &tools).map_err(|flaw| flaw.of_column(column))?;
            }
            return Ok(Row::Judged(Box::new(row)));
        }
        match self.facts.shape {
            Shape::Prompt => {
                let columns: Result<BTreeMap<_, _>, Flaw> =
                    self.columns.iter().map(|column| Ok((column.name.clone(), text_of(column, &fields)?))).collect();
                columns.map(Row::Columns)
            }
            Shape::Text => text_of(&self.columns[0], &fields).map(Row::Text),
            Shape::Messages => {
                let mut messages = if self.is_of_trl {
                    answered(&mut fields, self.turn_order)?
                } else {
                    let source = &self.columns[0].source;
                    let value = fields.remove(source).ok_or_else(|| missing(source))?;
                    conversation(value, self.turn_order).map_err(|flaw| flaw.of_column(source))?
                };
                if let Some((_, tools)) = self.tools(&mut fields)? {
                    messages[0].other.insert(TOOLS.to_owned(), tools);
                }
                Ok(Row::Messages(messages))
            }
            Shape::Pairs | Shape::Judged => unreachable!("rows of preferences have a layout"),
        }
    }

    /// The tools of a conversation, with their column.
    fn tools(&self, fields: &mut Map<String, Value>) -> Result<Option<(&str, Value)>, Flaw> {
        let Some(column) = self.columns.iter().find(|column| column.name == TOOLS_COLUMN) else { return Ok(None) };
        let Some(value) = fields.remove(&column.source) else { return Ok(None) };
        let tools = tools::read(value).map_err(|flaw| flaw.of_column(&column.source))?;
        Ok(tools.map(|tools| (column.source.as_str(), tools)))
    }

    /// What is said nothing in: a column that should hold something, or a turn.
    pub(super) fn emptiness(&self, row: &Row) -> Option<String> {
        match row {
            Row::Columns(columns) => {
                let empty = |column: &&Column| {
                    let text = columns.get(&column.name).map_or("", String::as_str);
                    column.need == Need::Required && text.trim().is_empty()
                };
                self.columns.iter().find(empty).map(|column| format!("column `{}` is empty", column.source))
            }
            Row::Text(text) => text.trim().is_empty().then(|| format!("column `{}` is empty", self.columns[0].source)),
            Row::Messages(messages) => {
                messages.iter().position(says_nothing).map(|index| format!("turn {} is empty", index + 1))
            }
            Row::Judged(row) => preference::emptiness(row),
        }
    }
}

/// The column of the tools; not every conversation has some.
fn tools_in(source: String) -> Column {
    Column { name: TOOLS_COLUMN.to_owned(), source, need: Need::Weight }
}

fn missing(source: &str) -> Flaw {
    Flaw::new(Reason::Missing, format!("column `{source}` is missing"))
}

/// The conversation of TRL's columns: the turns of the prompt, and those of the completion, which alone are trained.
fn answered(fields: &mut Map<String, Value>, order: TurnOrder) -> Result<Vec<Message>, Flaw> {
    let [prompt, completion] = OF_TRL.map(|(_, source)| source);
    let mut value = |source: &str| fields.remove(source).ok_or_else(|| missing(source));
    let (asked, answer) = (value(prompt)?, value(completion)?);
    if let (Value::Array(_), Value::String(_)) | (Value::String(_), Value::Array(_)) = (&asked, &answer) {
        let kind = |value: &Value| if value.is_array() { "a list of turns" } else { "a string" };
        let problem = format!(
            "column `{prompt}` has {}, and column `{completion}` {}: both are to be lists of turns, or both strings",
            kind(&asked),
            kind(&answer)
        );
        return Err(Flaw::new(Reason::Turns, problem));
    }
    let turns = |value, source| conversation(value, TurnOrder::Any).map_err(|flaw| flaw.of_column(source));
    let mut messages = turns(asked, prompt)?;
    for message in &mut messages {
        if is_assistant(&message.role) {
            message.other.insert(WEIGHT.to_owned(), 0.into());
        }
    }
    messages.extend(turns(answer, completion)?);
    if order == TurnOrder::Alternate {
        check_order(&messages).map_err(|problem| Flaw::new(Reason::Turns, problem))?;
    }
    Ok(messages)
}

/// The template that takes the prompt as it stands.
fn without_template() -> Template {
    Template::named("none").expect("`none` is a template")
}

/// How many columns a message names.
const NAMED: usize = 24;

pub(super) fn list(columns: &[String]) -> String {
    let more = columns.len().saturating_sub(NAMED);
    let named = columns.iter().take(NAMED).map(|column| format!("`{column}`")).collect::<Vec<_>>().join(", ");
    if more > 0 { format!("{named} and {more} more") } else { named }
}

fn unclear(columns: &[String], file: &str) -> ColumnMisfit {
    let help = if columns.iter().any(|column| column == "instruction") {
        "set `template: alpaca` for instruction, input and output".to_owned()
    } else if let [only] = columns
        && only.contains([';', '\t', '|'])
    {
        "is another separator in use? the values of `.csv` are separated by commas, those of `.tsv` by tabs".to_owned()
    } else if let [only] = columns
        && file.contains(".json")
    {
        format!("if the rows are under a key of one object in a `.json` file, set `field: {only}`")
    } else {
        "set `template:` and `column_map:`, or have `messages`, `text`, `input` and `output`, or `prompt` and `completion`".to_owned()
    };
    let message = format!("the kind of rows of `{file}` is not clear from its columns {}", list(columns));
    ColumnMisfit { code: "unclear-rows", field: "source".to_owned(), message, help }
}

/// `column_map` names a column of preferences, and the others that belong to it are not there.
fn half_a_pair(columns: &[String], file: &str) -> ColumnMisfit {
    let message = format!("`column_map` names preferences, and the columns of `{file}` do not make them complete");
    let help = format!(
        "pairs have `chosen` and `rejected`, judged responses `completion` and `label`, each with `prompt` or without; \
         its columns are {}",
        list(columns)
    );
    ColumnMisfit { code: "unclear-rows", field: "column_map".to_owned(), message, help }
}

fn text_of(column: &Column, fields: &Map<String, Value>) -> Result<String, Flaw> {
    let source = &column.source;
    match (fields.get(source), column.need) {
        (Some(Value::String(text)), _) => Ok(text.clone()),
        (Some(Value::Number(weight)), Need::Weight) => Ok(weight.to_string()),
        (None | Some(Value::Null), Need::Optional | Need::Weight) => Ok(String::new()),
        (None, Need::Required) => Err(missing(source)),
        (Some(Value::Null), Need::Required) => Err(Flaw::new(Reason::Null, format!("column `{source}` is null"))),
        (Some(other), _) => {
            Err(Flaw::new(Reason::NotText, format!("column `{source}` has {}, not a string", describe(other))))
        }
    }
}
