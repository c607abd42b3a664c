//! Control tokens that somebody wrote into the data: put between marks before a template sees them, so that they can be
//! told from the template's own afterwards. transformers does so under `sanitize_control_tokens`.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Value, json};

use crate::data::artifact::Message;

/// Stands before a control token that is to be read as plain text. A noncharacter, which no text should hold.
pub const PLAIN_BEGIN: char = '\u{FDD2}';
/// Stands behind it.
pub const PLAIN_END: char = '\u{FDD3}';

/// Noncharacters that have a meaning here or in a chat template; they are taken out of the data.
const OUR_OWN: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDD4}';

/// The control tokens of a vocabulary (its special tokens), as texts to look for.
#[derive(Debug, Clone, Default)]
pub struct ControlTexts {
    /// Longest first.
    texts: Vec<String>,
    /// By byte: whether one of them, or a noncharacter of our own, begins with it.
    begins: Vec<bool>,
}

/// What stands at a place of a text.
enum Found<'a> {
    Control(&'a str),
    OurOwn,
}

impl ControlTexts {
    /// For tokens of these texts.
    pub fn new(texts: impl IntoIterator<Item = String>) -> Self {
        let mut texts: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).collect();
        texts.sort_by(|one, two| two.len().cmp(&one.len()).then_with(|| one.cmp(two)));
        texts.dedup();
        // Every character of `OUR_OWN` has the same first byte.
        let own = PLAIN_BEGIN.to_string();
        let mut begins = vec![false; 256];
        texts.iter().chain([&own]).for_each(|text| begins[usize::from(text.as_bytes()[0])] = true);
        Self { texts, begins }
    }

    /// Whether a text is one of the control tokens.
    pub fn has(&self, text: &str) -> bool {
        self.texts.iter().any(|control| control == text)
    }

    /// The text with each control token in it between marks; `None` if it holds none.
    pub fn mark(&self, text: &str) -> Option<String> {
        let (mut at, mut found) = self.find(text)?;
        let mut marked = String::with_capacity(text.len() + 16);
        let mut rest = text;
        loop {
            marked.push_str(&rest[..at]);
            let Found::Control(control) = found else {
                // What stands on both sides of such a letter may be a control token.
                let text = without_our_own(text).into_owned();
                return Some(self.mark(&text).unwrap_or(text));
            };
            marked.push(PLAIN_BEGIN);
            marked.push_str(control);
            marked.push(PLAIN_END);
            rest = &rest[at + control.len()..];
            match self.find(rest) {
                Some(next) => (at, found) = next,
                None => break,
            }
        }
        marked.push_str(rest);
        Some(marked)
    }

    /// The text of a template with each control token between marks that some data is a part of, be it that data ends
    /// one which other data has begun; `data` is where the data are, without letters of our own. `None` if there is
    /// none.
    pub fn mark_within(&self, text: &str, data: &[Range<usize>]) -> Option<String> {
        let is_data = |place: &Range<usize>| data.iter().any(|data| data.start < place.end && place.start < data.end);
        let (mut marked, mut done) = (String::new(), 0);
        for place in self.places(text).filter(is_data) {
            marked.push_str(&text[done..place.start]);
            marked.push(PLAIN_BEGIN);
            marked.push_str(&text[place.clone()]);
            marked.push(PLAIN_END);
            done = place.end;
        }
        (done > 0).then(|| marked + &text[done..])
    }

    /// Where control tokens are in a text.
    fn places(&self, text: &str) -> impl Iterator<Item = Range<usize>> {
        let mut at = 0;
        std::iter::from_fn(move || {
            loop {
                let (begins, found) = self.find(&text[at..])?;
                let begins = at + begins;
                match found {
                    Found::OurOwn => at = begins + PLAIN_BEGIN.len_utf8(),
                    Found::Control(control) => {
                        at = begins + control.len();
                        return Some(begins..at);
                    }
                }
            }
        })
    }

    /// A text as it is decoded: without its control tokens, of which those between marks are plain text.
    pub(super) fn decoded(&self, text: &str) -> String {
        let (mut decoded, mut rest, mut is_marked) = (String::new(), text, false);
        while let Some((at, found)) = self.find(rest) {
            decoded.push_str(&rest[..at]);
            let length = match found {
                Found::Control(control) => {
                    decoded.push_str(if is_marked && at == 0 { control } else { "" });
                    control.len()
                }
                Found::OurOwn => PLAIN_BEGIN.len_utf8(),
            };
            is_marked = rest[at..].starts_with(PLAIN_BEGIN);
            rest = &rest[at + length..];
        }
        decoded + rest
    }

    /// The first control token or noncharacter of a text, and where it begins.
    fn find(&self, text: &str) -> Option<(usize, Found<'_>)> {
        let is_begin = |byte: u8| self.begins.get(usize::from(byte)).is_some_and(|begins| *begins);
        let begins = text.bytes().enumerate().filter(|(_, byte)| is_begin(*byte));
        begins.filter_map(|(at, _)| Some((at, self.found_at(text.get(at..)?)?))).next()
    }

    fn found_at(&self, text: &str) -> Option<Found<'_>> {
        if let Some(control) = self.texts.iter().find(|control| text.starts_with(control.as_str())) {
            return Some(Found::Control(control));
        }
        text.starts_with(|letter| OUR_OWN.contains(&letter)).then_some(Found::OurOwn)
    }

    /// The messages with every control token in them between marks; `None` if they hold none.
    pub fn mark_messages(&self, messages: &[Message]) -> Option<Vec<Message>> {
        let holds = |message: &Message| {
            self.find(&message.role).is_some()
                || self.is_in(&message.content)
                || self.joined_parts(&message.content).is_some()
                || message.other.values().any(|value| self.is_in(value))
        };
        if !messages.iter().any(holds) {
            return None;
        }
        let mut marked = messages.to_vec();
        for message in &mut marked {
            if let Some(role) = self.mark(&message.role) {
                message.role = role;
            }
            if let Some(joined) = self.joined_parts(&message.content) {
                message.content = joined;
            }
            self.mark_value(&mut message.content);
            message.other.values_mut().for_each(|value| self.mark_value(value));
        }
        Some(marked)
    }

    /// Parts, of which those that make a control token together are one; `None` if none do.
    fn joined_parts(&self, content: &Value) -> Option<Value> {
        let Value::Array(parts) = content else { return None };
        // One that says no type is text, too.
        let is_text = |part: &Value| part.get("type").is_none_or(|kind| kind == "text");
        let text_of = |part: &Value| part["text"].as_str().filter(|_| is_text(part)).map(str::to_owned);
        let (mut all, mut are_joined) = (Vec::new(), false);
        for run in parts.chunk_by(|one, next| text_of(one).is_some() && text_of(next).is_some()) {
            let texts: Vec<String> = run.iter().filter_map(text_of).collect();
            let texts: Vec<Cow<'_, str>> = texts.iter().map(|text| without_our_own(text)).collect();
            // A template may trim each.
            let trimmed: Vec<Cow<'_, str>> = texts.iter().map(|text| text.trim().into()).collect();
            if self.crosses_a_border(&texts) || self.crosses_a_border(&trimmed) {
                all.push(json!({ "type": "text", "text": texts.concat() }));
                are_joined = true;
            } else {
                all.extend_from_slice(run);
            }
        }
        are_joined.then(|| all.into())
    }

    fn crosses_a_border(&self, texts: &[Cow<'_, str>]) -> bool {
        let (mut whole, mut borders) = (String::new(), Vec::new());
        for text in texts {
            borders.push(whole.len());
            whole += text;
        }
        let crosses = |place: Range<usize>| borders.iter().any(|border| place.start < *border && *border < place.end);
        borders.len() > 1 && self.places(&whole).any(crosses)
    }

    fn is_in(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => self.find(text).is_some(),
            Value::Array(items) => items.iter().any(|item| self.is_in(item)),
            Value::Object(map) => map.iter().any(|(key, item)| self.find(key).is_some() || self.is_in(item)),
            Value::Null | Value::Bool(_) | Value::Number(_) => false,
        }
    }

    fn mark_value(&self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.mark(text).unwrap_or_else(|| std::mem::take(text)),
            Value::Array(items) => items.iter_mut().for_each(|item| self.mark_value(item)),
            Value::Object(map) => {
                let marked = std::mem::take(map).into_iter().map(|(key, mut item)| {
                    self.mark_value(&mut item);
                    (self.mark(&key).unwrap_or(key), item)
                });
                *map = marked.collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// A text of the data without the letters that have a meaning here.
pub(super) fn without_our_own(text: &str) -> Cow<'_, str> {
    // Each of them begins with this byte, which few texts have.
    if text.bytes().any(|byte| byte == 0xEF) {
        text.replace(|letter| OUR_OWN.contains(&letter), "").into()
    } else {
        text.into()
    }
}

/// Whether a text holds marks.
pub fn is_marked(text: &str) -> bool {
    text.contains([PLAIN_BEGIN, PLAIN_END])
}

pub fn without_marks(text: &str) -> String {
    text.replace([PLAIN_BEGIN, PLAIN_END], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> ControlTexts {
        ControlTexts::new(["</s>", "<|end|>", "<|end|>x", "▁<eop>"].map(str::to_owned))
    }

    #[test]
    fn control_tokens_are_marked_and_nothing_else() {
        assert_eq!(texts().mark("a < b </ s> |end|> é"), None);
        assert_eq!(texts().mark("x</s>y<|end|>").unwrap(), "x\u{FDD2}</s>\u{FDD3}y\u{FDD2}<|end|>\u{FDD3}");
        assert_eq!(texts().mark("é▁<eop><|end|>x").unwrap(), "é\u{FDD2}▁<eop>\u{FDD3}\u{FDD2}<|end|>x\u{FDD3}");
        assert_eq!(without_marks(&texts().mark("<</s></s>").unwrap()), "<</s></s>");
    }

    #[test]
    fn marks_cannot_be_forged() {
        assert_eq!(texts().mark("\u{FDD2}a\u{FDD1}\u{FDD3}").unwrap(), "a");
        assert!(is_marked("a\u{FDD3}") && !is_marked("\u{FDD4}"));
    }

    #[test]
    fn they_are_found_at_any_depth_of_a_message() {
        let plain = Message::new("user", "hi");
        assert_eq!(texts().mark_messages(std::slice::from_ref(&plain)), None);
        let content = serde_json::json!([{"type": "text", "text": "</s>"}]);
        let marked = texts().mark_messages(&[plain.clone(), Message { content, ..plain }]).unwrap();
        assert_eq!(marked[1].content[0]["text"], "\u{FDD2}</s>\u{FDD3}");
        let marked = texts().mark_messages(&[Message::new("narrator</s>", "x")]).unwrap();
        assert_eq!(marked[0].role, "narrator\u{FDD2}</s>\u{FDD3}");
    }

    #[test]
    fn parts_that_make_a_control_token_are_one() {
        let part = |text: &str| json!({ "type": "text", "text": text });
        let marked = |split: &[&str]| {
            let content = split.iter().map(|text| part(text)).collect();
            texts()
                .mark_messages(&[Message { content, ..Message::new("user", "") }])
                .map(|marked| marked[0].content.clone())
        };
        let one = "a\u{FDD2}</s>\u{FDD3}b";
        for split in [&["a</", "s>b"][..], &["a<", "/", "s>b"], &["a</\u{FDD0}", "s>b"]] {
            assert_eq!(marked(split).unwrap(), json!([part(one)]), "{split:?}");
        }
        assert_eq!(marked(&["a</ ", " s>b"]).unwrap(), json!([part("a</  s>b")]));
        assert_eq!(marked(&["a", "</s>"]).unwrap(), json!([part("a"), part("\u{FDD2}</s>\u{FDD3}")]));
        assert_eq!(marked(&["a", "b"]), None);
        let content = json!([{ "text": "a</" }, part("s>b")]);
        let marked = texts().mark_messages(&[Message { content, ..Message::new("user", "") }]);
        assert_eq!(marked.unwrap()[0].content, json!([part(one)]));
    }

    #[test]
    fn no_letter_of_ours_and_no_border_hides_a_control_token() {
        let marked = "\u{FDD2}</s>\u{FDD3}";
        assert_eq!(texts().mark("a<\u{FDD0}/s>").unwrap(), format!("a{marked}"));
        assert_eq!(texts().mark("</s>\u{FDD4}").unwrap(), marked);
        let mark = |text: &str, data: &[Range<usize>]| texts().mark_within(text, data);
        assert_eq!(mark("</s></s>", &[0..2, 2..4]).unwrap(), format!("{marked}</s>"));
        assert_eq!(mark("</s>x", std::slice::from_ref(&(4..5))), None);
        assert_eq!(mark("x</s>", std::slice::from_ref(&(0..2))).unwrap(), format!("x{marked}"));
        assert_eq!(texts().decoded(&format!("a</s>b{marked}c<|end|>{marked}")), "ab</s>c</s>");
        let mut message = Message::new("assistant", "");
        message.other.insert("tool_calls".to_owned(), serde_json::json!([{ "arguments": { "</s>": 1 } }]));
        let found = texts().mark_messages(&[message]).unwrap();
        assert_eq!(found[0].other["tool_calls"][0]["arguments"], serde_json::json!({ (marked): 1 }));
    }
}
