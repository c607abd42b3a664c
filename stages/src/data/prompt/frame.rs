//! What a chat template writes around what an assistant says, told by what it makes of letters in the places of texts.

use std::cmp::Reverse;

use super::chat::PLACE;
use crate::data::artifact::Message;

/// What a template writes around what an assistant says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    /// The header where an answer is asked for, or what ends a user's turn where there is none.
    begin: String,
    /// The header of a turn that is there: where an answer is asked for, its reasoning may be open already.
    header: String,
    /// What ends the last turn.
    pub end: String,
    /// What ends a turn that another one follows.
    between: String,
}

impl Frame {
    /// The frame of a template, if it can be told; `eos` is its end-of-text token.
    pub(super) fn of(render: impl Fn(&[Message], bool) -> Option<String>, eos: &str) -> Option<Self> {
        let user = [Message::new("user", PLACE)];
        let (base, asked) = (render(&user, false)?, render(&user, true)?);
        let begin = match asked.strip_prefix(&base).filter(|header| !header.is_empty()) {
            Some(header) => header.to_owned(),
            None => base.split_once(PLACE)?.1.to_owned(),
        };
        let said = render(&[Message::new("user", "x"), Message::new("assistant", PLACE)], false)?;
        let end = said.split_once(PLACE)?.1.to_owned();
        if begin.is_empty() {
            return None;
        }
        let turns = ["user", "assistant", "user", "assistant", "user"].map(|role| Message::new(role, PLACE));
        let behind_user = base.split_once(PLACE).map_or("", |(_, behind)| behind);
        let header = |turns: &[Message]| {
            let whole = render(turns, false)?;
            let written = whole.split(PLACE).nth(1)?.strip_prefix(behind_user)?;
            (!written.trim().is_empty() && begin.starts_with(written)).then(|| written.to_owned())
        };
        let headers = [header(&turns[..2]), header(&turns[..3])].into_iter().flatten();
        let header = headers.min_by_key(String::len).unwrap_or_else(|| begin.clone());
        let whole = render(&turns, false).unwrap_or_default();
        let between = match whole.split(PLACE).collect::<Vec<_>>()[..] {
            // What changes from turn to turn is no end.
            [opening, _, to_user, _, again, _] if to_user == again => {
                end_before_a_header(to_user, [&end, behind_user], eos, opening)
            }
            _ => &end,
        };
        Some(Self { between: between.to_owned(), begin, header, end })
    }

    fn ends(&self) -> [&str; 2] {
        [&self.end, &self.between]
    }

    /// Whether something ends a turn.
    pub(super) fn ends_turns(&self) -> bool {
        self.ends().iter().any(|end| !end.trim().is_empty())
    }

    /// Where an assistant's turn begins in a text that ends with what stands before its words.
    pub(super) fn begin_in(&self, text: &str) -> Option<usize> {
        let behind = |header: &String| {
            let begin = text.rfind(header)? + header.len();
            // Another turn's header is no header of this one.
            let ends = self.ends().map(str::trim);
            (!ends.iter().any(|end| !end.is_empty() && text[begin..].contains(end))).then_some(begin)
        };
        [&self.begin, &self.header].into_iter().find_map(behind)
    }

    /// Where an assistant's turn ends in what follows its words, of which the first `own` bytes are before anything
    /// that another one says; `own` is not known of every text.
    pub(super) fn end_in(&self, rest: &str, own: Option<usize>) -> Option<usize> {
        let end_of = |end: &str| {
            let is_blank = end.trim().is_empty();
            let at = match (own, is_blank) {
                _ if end.is_empty() => return None,
                (None, true) => return None,
                (None, false) | (_, true) => rest.starts_with(end).then_some(0)?,
                (Some(own), false) => rest.get(..own)?.find(end)?,
            };
            (at + end.len() <= own.unwrap_or(rest.len())).then(|| (at, Reverse(at + end.len())))
        };
        let found = self.ends().into_iter().filter_map(end_of).min().map(|(_, Reverse(end))| end);
        // The last turn of a template that ends only those before.
        found.or_else(|| (self.end.trim().is_empty() && rest.trim().is_empty()).then_some(rest.len()))
    }

    /// How much more of a text is the end of the turn before it: some templates end a turn only where another follows.
    pub(super) fn missing_end(&self, rest: &str) -> usize {
        let missing = self.between.strip_prefix(&self.end).filter(|_| self.end.trim().is_empty());
        missing.filter(|end| !end.trim().is_empty() && rest.starts_with(end)).map_or(0, str::len)
    }
}

/// What ends an assistant's turn in a text that ends with a user's header, as the first of all turns begins
/// (`opening`); `ends` are those of other turns.
fn end_before_a_header<'a>(text: &'a str, ends: [&str; 2], eos: &str, opening: &str) -> &'a str {
    if let Some(end) = ends.into_iter().find(|end| !end.trim().is_empty() && text.starts_with(end)) {
        return &text[..end.len()];
    }
    if let Some(behind) = text.strip_prefix(eos).filter(|_| !eos.is_empty()) {
        return &text[..text.len() - behind.trim_start().len()];
    }
    let same = text.chars().rev().zip(opening.chars().rev()).take_while(|(one, other)| one == other);
    &text[..text.len() - same.map(|(letter, _)| letter.len_utf8()).sum::<usize>()]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::chat::ChatTemplate;
    use super::super::train_on::TrainOn;
    use super::*;

    const ASKS: &str = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

    fn template(source: &str) -> ChatTemplate {
        let special_tokens = BTreeMap::from([("eos_token".to_owned(), "<|im_end|>".to_owned())]);
        ChatTemplate::new(source, special_tokens).unwrap()
    }

    /// What is learned of a question, an answer, a question and an answer.
    fn learned(template: &ChatTemplate) -> Vec<String> {
        let messages = [("user", "a"), ("assistant", "b"), ("user", "SECRET"), ("assistant", "d")];
        let messages = messages.map(|(role, text)| Message::new(role, text));
        let turns = template.turns(&messages, TrainOn::Assistant).unwrap();
        let joined: String = turns.iter().map(|turn| turn.text.as_str()).collect();
        assert_eq!(joined, template.render(&messages, false).unwrap());
        let last = template.turns(&messages, TrainOn::Last).unwrap();
        assert_eq!(last.iter().filter(|turn| turn.learn).count(), 1);
        turns.into_iter().filter(|turn| turn.learn).map(|turn| turn.text).collect()
    }

    #[test]
    fn a_turn_ends_before_another_one_begins() {
        let turn = |end_between: &str, last_end: &str| {
            format!(
                "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{{% if m.role == 'assistant' \
                 and not loop.last %}}{end_between}{{% elif m.role == 'assistant' %}}{last_end}{{% else %}}<|im_end|>\n\
                 {{% endif %}}{{% endfor %}}{ASKS}"
            )
        };
        for (end_between, last_end) in
            [("<eot>\n", "<|im_end|>\n"), ("<|im_end|>\n", "<|endoftext|>"), ("<eot>\n", "<|endoftext|>")]
        {
            let expected = [format!("b{end_between}"), format!("d{last_end}")];
            assert_eq!(learned(&template(&turn(end_between, last_end))), expected);
        }
        let ends_once = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}\
                         assistant: {% elif messages[-1].role == 'assistant' %}<|endoftext|>{% endif %}";
        assert_eq!(learned(&template(ends_once)), ["b\n", "d\n<|endoftext|>"]);
    }

    #[test]
    fn an_end_that_is_written_where_another_turn_follows_is_learned_there() {
        let qwen = |system: &str| {
            format!(
                "{{% for m in messages %}}{system}{{{{ '<|im_start|>' + m.role + '\n' + m.content }}}}{{% if (loop.last and \
                 add_generation_prompt) or not loop.last %}}{{{{ '<|im_end|>' + '\n' }}}}{{% endif %}}{{% endfor %}}{ASKS}"
            )
        };
        let system = "{% if loop.first %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}";
        for system in ["", system] {
            let template = template(&qwen(system));
            assert_eq!(learned(&template), ["b<|im_end|>\n", "d"]);
            assert!(template.leaves_the_end_open());
        }
        // The number of a round is no end.
        let rounds = "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index0 // 2 + 1 }}]\n\nQ: {{ m.content \
                      }}\n\nA: {% else %}{{ m.content }}{% if not loop.last %}\n\n{% endif %}{% endif %}{% endfor %}";
        assert_eq!(learned(&template(rounds)), ["b", "d"]);
    }

    #[test]
    fn a_header_may_open_reasoning_that_finished_turns_lack() {
        let r1 = "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>{{ \
                  m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}\
                  <|Assistant|><think>\n{% endif %}";
        assert_eq!(learned(&template(r1)), ["b<|im_end|>", "d<|im_end|>"]);
        let messages = [Message::new("user", "a"), Message::new("assistant", "<think>\nr\n</think>\n\nb")];
        for train_on in [TrainOn::Assistant, TrainOn::Last] {
            let turns = template(r1).turns(&messages, train_on).unwrap();
            let pieces: Vec<_> = turns.iter().map(|turn| (turn.text.as_str(), turn.learn)).collect();
            assert_eq!(pieces, [("<|User|>a<|Assistant|>", false), ("\n\nb<|im_end|>", true)]);
        }
    }
}
