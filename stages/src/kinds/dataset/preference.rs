//! Rows of preferences: which columns hold prompt and responses, in the spellings that are in use, and what a row of
//! them is.

use serde_json::{Map, Value};

use super::conversation::{check_order, conversation, says_nothing};
use super::flaw::{Flaw, Reason, describe};
use super::parameters::TurnOrder;
use crate::data::artifact::{Judged, Message, RowsFacts, Said, Shape, TOOLS};

/// Keys of `column_map`.
pub(super) const PROMPT: &str = "prompt";
pub(super) const CHOSEN: &str = "chosen";
pub(super) const REJECTED: &str = "rejected";
pub(super) const COMPLETION: &str = "completion";
pub(super) const LABEL: &str = "label";

/// All of them.
pub(super) const KEYS: [&str; 5] = [PROMPT, CHOSEN, REJECTED, COMPLETION, LABEL];

/// Where a row's prompt and responses stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    prompt: PromptFrom,
    responses: ResponsesFrom,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum PromptFrom {
    /// A column of text or turns.
    Column(String),
    /// LLaMA-Factory's columns in the style of Alpaca: `instruction`, and `input`, `system` and `history` where the
    /// data has them.
    Instruction,
    /// What both responses have in common at their beginnings; of a single response all turns but the last.
    Implicit,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum ResponsesFrom {
    /// A column for each.
    Pair { chosen: String, rejected: String },
    /// ms-swift: the chosen one ends the conversation, and another column has what is worse in its place.
    LastTurn { turns: String, rejected: String },
    /// A response, and whether it is desirable.
    Judged { completion: String, label: String },
}

/// The columns with turns.
const TURNS: [&str; 2] = ["messages", "conversations"];

/// What rows with these columns are, where they hold preferences and no `column_map` says otherwise, and which of the
/// columns they are made of.
pub fn preferences(columns: &[String]) -> Option<(Shape, Vec<String>)> {
    let layout = Layout::of(columns, &|_| None)?;
    let optional = layout.optional_columns().iter().map(|name| (*name).to_owned());
    let read = layout.columns().into_iter().map(|(_, column)| column).chain(optional);
    Some((layout.shape(), read.collect()))
}

impl Layout {
    /// The layout of data with these columns, `mapped` being what `column_map` says; `None` where they hold no
    /// preferences.
    pub(super) fn of(columns: &[String], mapped: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let has = |name: &str| columns.iter().any(|column| column == name);
        let own = |name: &str| mapped(name).or_else(|| has(name).then(|| name.to_owned()));
        let turns = || TURNS.iter().find_map(|name| mapped(name)).or_else(|| TURNS.iter().find_map(|name| own(name)));
        let prompt = || match own(PROMPT).or_else(turns) {
            Some(column) => PromptFrom::Column(column),
            None if has("instruction") => PromptFrom::Instruction,
            None => PromptFrom::Implicit,
        };
        if let (Some(chosen), Some(rejected)) = (own(CHOSEN), own(REJECTED)) {
            return Some(Self { prompt: prompt(), responses: ResponsesFrom::Pair { chosen, rejected } });
        }
        let conversations = ["chosen_conversations", "rejected_conversations"].map(str::to_owned);
        if let [true, true] = [has(&conversations[0]), has(&conversations[1])] {
            let [chosen, rejected] = conversations;
            let prompt = mapped(PROMPT).map_or(PromptFrom::Implicit, PromptFrom::Column);
            return Some(Self { prompt, responses: ResponsesFrom::Pair { chosen, rejected } });
        }
        let replacing = ["rejected_response", "rejected_messages"].into_iter().find(|name| has(name));
        if let (Some(turns), Some(rejected)) = (turns(), mapped(REJECTED).or(replacing.map(str::to_owned))) {
            let responses = ResponsesFrom::LastTurn { turns, rejected };
            return Some(Self { prompt: PromptFrom::Implicit, responses });
        }
        // Other data has labels too: without a completion it takes a word that they are meant.
        let tag = mapped(LABEL).or_else(|| has("kto_tag").then(|| "kto_tag".to_owned()));
        if let Some(completion) = own(COMPLETION)
            && let Some(label) = tag.clone().or_else(|| own(LABEL))
        {
            return Some(Self { prompt: prompt(), responses: ResponsesFrom::Judged { completion, label } });
        }
        let (completion, label) = (turns()?, tag?);
        let responses = ResponsesFrom::Judged { completion, label };
        Some(Self { prompt: PromptFrom::Implicit, responses })
    }

    /// What a row of it is.
    pub(super) fn shape(&self) -> Shape {
        match self.responses {
            ResponsesFrom::Judged { .. } => Shape::Judged,
            ResponsesFrom::Pair { .. } | ResponsesFrom::LastTurn { .. } => Shape::Pairs,
        }
    }

    /// Facts of its rows.
    pub(super) fn facts(&self) -> RowsFacts {
        if self.shape() == Shape::Judged { RowsFacts::judged() } else { RowsFacts::pairs() }
    }

    /// The columns that it reads, each with what it is in a row.
    pub(super) fn columns(&self) -> Vec<(&'static str, String)> {
        let mut columns = match &self.prompt {
            PromptFrom::Column(column) => vec![(PROMPT, column.clone())],
            PromptFrom::Instruction => vec![(PROMPT, "instruction".to_owned())],
            PromptFrom::Implicit => Vec::new(),
        };
        columns.extend(match &self.responses {
            ResponsesFrom::Pair { chosen, rejected } => [(CHOSEN, chosen.clone()), (REJECTED, rejected.clone())],
            ResponsesFrom::LastTurn { turns, rejected } => [(CHOSEN, turns.clone()), (REJECTED, rejected.clone())],
            ResponsesFrom::Judged { completion, label } => [(COMPLETION, completion.clone()), (LABEL, label.clone())],
        });
        columns
    }

    /// Columns that it reads where the data has them.
    pub(super) fn optional_columns(&self) -> &'static [&'static str] {
        if self.prompt == PromptFrom::Instruction { &["input", "system", "history"] } else { &[] }
    }

    /// The row of a record, or what is wrong with it.
    pub(super) fn row(&self, mut fields: Map<String, Value>, order: TurnOrder) -> Result<Judged, Flaw> {
        let row = match &self.responses {
            ResponsesFrom::Pair { chosen, rejected } => {
                let sides = [said(&mut fields, chosen)?, said(&mut fields, rejected)?];
                let (prompt, [chosen, rejected]) = self.with_prompt(&mut fields, sides)?;
                Judged { prompt, chosen: Some(chosen), rejected: Some(rejected) }
            }
            ResponsesFrom::LastTurn { turns, rejected } => {
                let chosen = said(&mut fields, turns)?;
                let worse = said(&mut fields, rejected)?;
                let (prompt, [chosen, rejected]) = replaced(turns, chosen, rejected, worse)?;
                Judged { prompt, chosen: Some(chosen), rejected: Some(rejected) }
            }
            ResponsesFrom::Judged { completion, label } => {
                let desirable = desirable(&fields, label)?;
                let completion = said(&mut fields, completion)?;
                let (prompt, [completion]) = match self.prompt {
                    PromptFrom::Implicit => last_turn(completion)?,
                    _ => self.with_prompt(&mut fields, [completion])?,
                };
                let (chosen, rejected) = if desirable { (Some(completion), None) } else { (None, Some(completion)) };
                Judged { prompt, chosen, rejected }
            }
        };
        if order == TurnOrder::Alternate {
            check_orders(&row)?;
        }
        Ok(row)
    }

    /// Prompt and responses, all of them text or all of them turns.
    fn with_prompt<const N: usize>(
        &self,
        fields: &mut Map<String, Value>,
        responses: [Said; N],
    ) -> Result<(Said, [Said; N]), Flaw> {
        let prompt = match &self.prompt {
            PromptFrom::Column(column) => said(fields, column)?,
            PromptFrom::Instruction => Said::Turns(instruction(fields)?),
            PromptFrom::Implicit => return common_beginning(responses),
        };
        let all_text = responses.iter().all(|response| matches!(response, Said::Text(_)));
        let all_turns = responses.iter().all(|response| matches!(response, Said::Turns(_)));
        match prompt {
            Said::Text(_) if all_text => Ok((prompt, responses)),
            Said::Text(text) if all_turns => {
                let asked = Message::new("user", &text);
                // Whole conversations hold the prompt already.
                if responses.iter().all(|response| asks_first(response, &text)) {
                    return common_beginning(responses);
                }
                Ok((Said::Turns(vec![asked]), responses))
            }
            Said::Turns(turns) => {
                let as_turns = responses.map(|response| match response {
                    Said::Text(text) => vec![Message::new("assistant", &text)],
                    Said::Turns(turns) => turns,
                });
                let holds_prompt =
                    |response: &Vec<Message>| response.len() > turns.len() && response.starts_with(&turns);
                let repeated = if as_turns.iter().all(holds_prompt) { turns.len() } else { 0 };
                Ok((Said::Turns(turns), as_turns.map(|response| Said::Turns(response[repeated..].to_vec()))))
            }
            Said::Text(_) => Err(mixed()),
        }
    }
}

/// Gives a row's conversations the tools that its assistant may call: they stand with the first message.
pub(super) fn give_tools(row: &mut Judged, tools: &Value) -> Result<(), Flaw> {
    let Said::Turns(prompt) = &mut row.prompt else {
        return Err(Flaw::new(
            Reason::Turns,
            "has tools, which are for conversations, and the row's prompt is a \
            string",
        ));
    };
    if let Some(first) = prompt.first_mut() {
        first.other.insert(TOOLS.to_owned(), tools.clone());
        return Ok(());
    }
    for response in [&mut row.chosen, &mut row.rejected].into_iter().flatten() {
        if let Said::Turns(turns) = response
            && let Some(first) = turns.first_mut()
        {
            first.other.insert(TOOLS.to_owned(), tools.clone());
        }
    }
    Ok(())
}

/// Whether nothing is said in the prompt or a response.
pub(super) fn emptiness(row: &Judged) -> Option<String> {
    let is_empty = |said: &Said| match said {
        Said::Text(text) => text.trim().is_empty(),
        Said::Turns(turns) => turns.is_empty() || turns.iter().any(says_nothing),
    };
    let parts = [
        ("prompt", Some(&row.prompt)),
        ("better response", row.chosen.as_ref()),
        ("worse response", row.rejected.as_ref()),
    ];
    let empty = parts.into_iter().find(|(_, said)| said.is_some_and(is_empty));
    empty.map(|(name, _)| format!("the {name} is empty"))
}

fn mixed() -> Flaw {
    Flaw::new(Reason::Turns, "one response is a string and the other a list of turns")
}

/// The text or the turns of a column.
fn said(fields: &mut Map<String, Value>, column: &str) -> Result<Said, Flaw> {
    let flaw = |reason, problem: String| Flaw::new(reason, format!("column `{column}` {problem}"));
    match fields.remove(column) {
        None => Err(flaw(Reason::Missing, "is missing".to_owned())),
        Some(Value::Null) => Err(flaw(Reason::Null, "is null".to_owned())),
        Some(Value::String(text)) => Ok(Said::Text(text)),
        Some(value @ (Value::Array(_) | Value::Object(_))) => {
            let turns = if value.is_object() { Value::Array(vec![value]) } else { value };
            let turns = conversation(turns, TurnOrder::Any);
            turns.map(Said::Turns).map_err(|found| found.of_column(column))
        }
        Some(other) => Err(flaw(Reason::NotText, format!("has {}, not a string or turns", describe(&other)))),
    }
}

fn desirable(fields: &Map<String, Value>, column: &str) -> Result<bool, Flaw> {
    let flaw = |reason, problem: String| Err(Flaw::new(reason, format!("column `{column}` {problem}")));
    match fields.get(column) {
        Some(Value::Bool(label)) => Ok(*label),
        Some(Value::Number(number)) if number.as_f64() == Some(1.0) => Ok(true),
        Some(Value::Number(number)) if number.as_f64() == Some(0.0) => Ok(false),
        Some(Value::String(text)) if ["true", "1"].contains(&text.to_ascii_lowercase().as_str()) => Ok(true),
        Some(Value::String(text)) if ["false", "0"].contains(&text.to_ascii_lowercase().as_str()) => Ok(false),
        None => flaw(Reason::Missing, "is missing".to_owned()),
        Some(Value::Null) => flaw(Reason::Null, "is null".to_owned()),
        Some(other) => flaw(Reason::NotText, format!("has {}, and true or false is expected", describe(other))),
    }
}

/// The turns of LLaMA-Factory's columns: `system`, pairs of `history`, and `instruction` with `input` in a new line.
fn instruction(fields: &mut Map<String, Value>) -> Result<Vec<Message>, Flaw> {
    let mut text = |column: &str| match fields.remove(column) {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text),
        Some(other) => {
            let problem = format!("column `{column}` has {}, not a string", describe(&other));
            Err(Flaw::new(Reason::NotText, problem))
        }
    };
    let (asked, input, system) = (text("instruction")?, text("input")?, text("system")?);
    let mut turns: Vec<Message> = Vec::new();
    if !system.is_empty() {
        turns.push(Message::new("system", &system));
    }
    if let Some(Value::Array(history)) = fields.get("history") {
        for exchange in history {
            let texts: Vec<&str> = exchange.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            let [question, answer] = texts[..] else {
                return Err(Flaw::new(Reason::Turns, "column `history` does not contain pairs of strings"));
            };
            turns.extend([Message::new("user", question), Message::new("assistant", answer)]);
        }
    }
    let asked = if input.is_empty() { asked } else { format!("{asked}\n{input}") };
    turns.push(Message::new("user", &asked));
    Ok(turns)
}

fn asks_first(response: &Said, text: &str) -> bool {
    let Said::Turns(turns) = response else { return false };
    let first = turns.iter().find(|turn| turn.role != "system");
    let says = |turn: &Message| turn.role == "user" && turn.content.as_str().map(str::trim) == Some(text.trim());
    turns.len() > 1 && first.is_some_and(says)
}

/// What responses have in common at their beginnings is the prompt: of text letters, of conversations whole turns.
///
/// TRL's extraction leaves the last letter of the common beginning in the responses where one begins the other, and
/// fails over an empty text; here the whole of it is the prompt. As there, a space before the first difference belongs
/// to the responses, and the last turn of the shorter conversation does.
fn common_beginning<const N: usize>(responses: [Said; N]) -> Result<(Said, [Said; N]), Flaw> {
    if let Some(texts) = all(&responses, |said| if let Said::Text(text) = said { Some(text.as_str()) } else { None }) {
        let mut common = texts[0].len();
        for text in &texts[1..] {
            let letters = texts[0].char_indices().zip(text.chars());
            let differs = letters.into_iter().find(|((_, one), other)| one != other).map(|((place, _), _)| place);
            common = common.min(differs.unwrap_or(texts[0].len().min(text.len())));
        }
        let goes_on = texts.iter().any(|text| text.len() > common);
        if goes_on && texts[0][..common].ends_with(' ') {
            common -= 1;
        }
        let prompt = Said::Text(texts[0][..common].to_owned());
        return Ok((prompt, std::array::from_fn(|side| Said::Text(texts[side][common..].to_owned()))));
    }
    let turns = all(&responses, |said| if let Said::Turns(turns) = said { Some(turns.as_slice()) } else { None });
    let Some(turns) = turns else { return Err(mixed()) };
    let shortest = turns.iter().map(|turns| turns.len()).min().unwrap_or(0);
    let is_common = |index: &usize| turns.iter().all(|other| other[*index] == turns[0][*index]);
    let common = (0..shortest.saturating_sub(1)).take_while(is_common).count();
    if let Some(turn) = turns.iter().filter_map(|turns| turns.get(common)).find(|turn| turn.role == "user") {
        let problem = format!("its responses do not answer the same: turn {} (`{}`) differs", common + 1, turn.role);
        return Err(Flaw::new(Reason::Turns, problem));
    }
    let prompt = Said::Turns(turns[0][..common].to_vec());
    Ok((prompt, std::array::from_fn(|side| Said::Turns(turns[side][common..].to_vec()))))
}

fn all<'a, T>(responses: &'a [Said], of: impl Fn(&'a Said) -> Option<T>) -> Option<Vec<T>> {
    responses.iter().map(of).collect()
}

/// A conversation whose last turn is the response.
fn last_turn(conversation: Said) -> Result<(Said, [Said; 1]), Flaw> {
    let Said::Turns(mut turns) = conversation else {
        return Err(Flaw::new(Reason::Missing, "it has no prompt: name its column in `column_map: { prompt: ... }`"));
    };
    match turns.pop() {
        Some(response) if !turns.is_empty() => Ok((Said::Turns(turns), [Said::Turns(vec![response])])),
        _ => Err(Flaw::new(Reason::Turns, "its conversation is one turn, without a response")),
    }
}

/// ms-swift's form: a conversation that ends with the chosen response, and what was rejected in its place, or the whole
/// conversation with it.
fn replaced(column: &str, conversation: Said, of_worse: &str, worse: Said) -> Result<(Said, [Said; 2]), Flaw> {
    let Said::Turns(turns) = conversation else {
        return Err(Flaw::new(Reason::Turns, format!("column `{column}` has a string, not a list of turns")));
    };
    match worse {
        Said::Turns(other) if of_worse.ends_with("messages") => {
            common_beginning([Said::Turns(turns), Said::Turns(other)])
        }
        worse => {
            let worse = match worse {
                Said::Text(text) => Said::Turns(vec![Message::new("assistant", &text)]),
                turns => turns,
            };
            let (prompt, [chosen]) = last_turn(Said::Turns(turns))?;
            Ok((prompt, [chosen, worse]))
        }
    }
}

/// Prompt and each response are one conversation.
fn check_orders(row: &Judged) -> Result<(), Flaw> {
    let Said::Turns(prompt) = &row.prompt else { return Ok(()) };
    for response in [&row.chosen, &row.rejected].into_iter().flatten() {
        let Said::Turns(response) = response else { continue };
        let whole: Vec<Message> = prompt.iter().chain(response).cloned().collect();
        check_order(&whole).map_err(|problem| Flaw::new(Reason::Turns, problem))?;
    }
    Ok(())
}

/// The row of a record whose columns hold preferences, for tests.
#[cfg(test)]
pub(crate) fn judged(fields: Map<String, Value>) -> Result<Judged, Flaw> {
    let columns: Vec<String> = fields.keys().cloned().collect();
    Layout::of(&columns, &|_| None).expect("these are preferences").row(fields, TurnOrder::Any)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(fields: Value) -> Result<Judged, Flaw> {
        let Value::Object(fields) = fields else { panic!("a row is an object") };
        let columns: Vec<String> = fields.keys().cloned().collect();
        let layout = Layout::of(&columns, &|_| None).expect("these are preferences");
        layout.row(fields, TurnOrder::Alternate)
    }

    fn turn(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    fn text(said: &Said) -> &str {
        let Said::Text(text) = said else { panic!("{said:?} is no text") };
        text
    }

    fn texts(fields: Value) -> [String; 3] {
        let row = row(fields).unwrap();
        [&row.prompt, row.chosen.as_ref().unwrap(), row.rejected.as_ref().unwrap()].map(|said| text(said).to_owned())
    }

    #[test]
    fn a_common_beginning_is_the_prompt() {
        let of = |chosen: &str, rejected: &str| texts(json!({"chosen": chosen, "rejected": rejected}));
        assert_eq!(of("The sky is blue.", "The sky is green."), ["The sky is", " blue.", " green."]);
        assert_eq!(of("The end", "The end is near"), ["The end", "", " is near"]);
        assert_eq!(of("abc", "abc"), ["abc", "", ""]);
        assert_eq!(of("Yes ", "No."), ["", "Yes ", "No."]);
        assert_eq!(of("Yes.", ""), ["", "Yes.", ""]);
        assert_eq!(of("größer", "größte"), ["größ", "er", "te"]);
    }

    #[test]
    fn every_spelling_is_the_same_pair() {
        let (asked, good, bad) = (turn("user", "Who?"), turn("assistant", "Me."), turn("assistant", "You."));
        let expected = row(json!({"prompt": [asked], "chosen": [good], "rejected": [bad]})).unwrap();
        for spelling in [
            json!({"prompt": "Who?", "chosen": [good], "rejected": [bad]}),
            json!({"prompt": "Who?", "chosen": [asked, good], "rejected": [asked, bad]}),
            json!({"prompt": [asked], "chosen": [asked, good], "rejected": [asked, bad]}),
            json!({"prompt": [asked], "chosen": "Me.", "rejected": "You."}),
            json!({"chosen": [asked, good], "rejected": [asked, bad]}),
            json!({"chosen_conversations": [asked, good], "rejected_conversations": [asked, bad]}),
            json!({"messages": [asked, good], "rejected_response": "You."}),
            json!({"messages": [asked, good], "rejected_messages": [asked, bad]}),
            json!({"instruction": "Who?", "input": "", "chosen": "Me.", "rejected": "You."}),
            json!({"conversations": [{"from": "human", "value": "Who?"}], "chosen": {"from": "gpt", "value": "Me."},
                   "rejected": {"from": "gpt", "value": "You."}}),
        ] {
            assert_eq!(row(spelling.clone()).unwrap(), expected, "{spelling}");
        }
    }

    #[test]
    fn a_judged_response_is_desirable_or_not() {
        let (asked, good) = (turn("user", "Who?"), turn("assistant", "Me."));
        let judged = |fields: Value| row(fields).unwrap();
        let expected = judged(json!({"prompt": [asked], "completion": [good], "label": true}));
        assert!(expected.chosen.is_some() && expected.rejected.is_none());
        assert_eq!(judged(json!({"messages": [asked, good], "kto_tag": "true"})), expected);
        assert_eq!(judged(json!({"prompt": "Who?", "completion": [good], "label": 1})), expected);
        let undesirable = judged(json!({"prompt": "Who?", "completion": " Me.", "label": false}));
        assert!(undesirable.chosen.is_none() && undesirable.rejected.is_some());
        let columns = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(Layout::of(&columns(&["messages", "label"]), &|_| None), None, "a label may be anything");
    }

    #[test]
    fn what_is_wrong_with_a_row_is_named() {
        let flaw = |fields: Value, extra: &str| {
            let Value::Object(fields) = fields else { panic!("a row is an object") };
            let mut columns: Vec<String> = fields.keys().cloned().collect();
            columns.push(extra.to_owned());
            let layout = Layout::of(&columns, &|_| None).expect("these are preferences");
            layout.row(fields, TurnOrder::Alternate).unwrap_err().problem
        };
        let (asked, good) = (turn("user", "Who?"), turn("assistant", "Me."));
        assert_eq!(flaw(json!({"prompt": "a", "chosen": "b"}), "rejected"), "column `rejected` is missing");
        assert_eq!(flaw(json!({"chosen": "b", "rejected": null}), ""), "column `rejected` is null");
        assert!(flaw(json!({"chosen": "b", "rejected": [good]}), "").contains("the other a list"));
        assert!(flaw(json!({"chosen": "b", "rejected": 7}), "").contains("a number"));
        assert!(flaw(json!({"prompt": [asked], "chosen": [asked], "rejected": [good]}), "").contains("twice"));
        assert!(flaw(json!({"prompt": "a", "completion": "b", "label": "so-so"}), "").contains("true or false"));
    }
}
