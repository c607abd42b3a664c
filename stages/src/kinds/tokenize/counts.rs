//! What became of the rows: counted, said to the user, and stored with the tokens.

use engine::context::StageContext;
use engine::error::StageError;
use serde::{Deserialize, Serialize};

use super::row::{Fate, Outcome};
use crate::data::artifact::{TokenRow, TokensFacts};

/// What became of the rows read so far.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Counts {
    pub read: u64,
    truncated: u64,
    fully_masked: u64,
    without_eos: u64,
    too_long: u64,
    dropped: u64,
    sanitized: u64,
    #[serde(default)]
    equal: u64,
}

impl Counts {
    /// Counts a row and gives what is to be written of it.
    pub(super) fn note(&mut self, outcome: Outcome) -> Vec<TokenRow> {
        self.read += 1;
        self.sanitized += u64::from(outcome.sanitized);
        self.equal += u64::from(outcome.equal && matches!(outcome.fate, Fate::Kept { .. }));
        match outcome.fate {
            Fate::Kept { rows, truncated, fully_masked, without_eos } => {
                self.truncated += u64::from(truncated);
                self.fully_masked += u64::from(fully_masked);
                self.without_eos += u64::from(without_eos);
                rows
            }
            Fate::TooLong => {
                self.too_long += 1;
                self.dropped += 1;
                Vec::new()
            }
            Fate::NoTarget { truncated } => {
                self.truncated += u64::from(truncated);
                self.fully_masked += 1;
                self.dropped += 1;
                Vec::new()
            }
        }
    }

    /// Takes in the counts of some more rows.
    pub(super) fn add(&mut self, other: &Self) {
        let Self { read, truncated, fully_masked, without_eos, too_long, dropped, sanitized, equal } = other;
        self.read += read;
        self.truncated += truncated;
        self.fully_masked += fully_masked;
        self.without_eos += without_eos;
        self.too_long += too_long;
        self.dropped += dropped;
        self.sanitized += sanitized;
        self.equal += equal;
    }

    /// Puts the counts into the facts.
    pub(super) fn write_to(&self, facts: &mut TokensFacts) {
        facts.truncated = self.truncated;
        facts.fully_masked = self.fully_masked;
        facts.without_eos = self.without_eos;
        facts.dropped = self.dropped;
        facts.sanitized = self.sanitized;
        facts.equal_pairs = self.equal;
    }

    /// Why rows are left out, and what would keep them; `weight` is the name of their weights, where they may have
    /// some.
    fn why_dropped(&self, weight: Option<&str>) -> String {
        let without_target = self.dropped - self.too_long;
        let causes = [
            Some("an empty response".to_owned()),
            weight.map(|name| format!("a weight of 0 in `{name}`")),
            (self.truncated > 0).then(|| "a prompt that fills `max_seq_len`: raise it".to_owned()),
        ];
        let causes: Vec<String> = causes.into_iter().flatten().collect();
        let causes = match causes.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{}, or {last}", others.join(", ")),
            None => String::new(),
        };
        let reasons = [
            (self.too_long, "longer than `max_seq_len` (raise it, or set `on_too_long: truncate`)".to_owned()),
            (without_target, format!("without a token to train on ({causes})")),
        ];
        let reasons = reasons.iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
        reasons.collect::<Vec<_>>().join(", ")
    }

    /// Says what became of the rows, `taken_over` of which an earlier result had; `weight` is the name of their
    /// weights, where they may have some.
    pub(super) fn report(
        &self,
        facts: &TokensFacts,
        weight: Option<&str>,
        taken_over: u64,
        context: &mut StageContext,
    ) {
        let mut text = self.text(facts);
        if taken_over > 0 {
            text.push_str(&format!(
                "\n{taken_over} of the rows read were tokenized before: reused from an earlier result"
            ));
        }
        if self.equal > 0 {
            text.push_str(&format!(
                "\n{} pairs of equal responses, which count as pairs but have no \
                preference",
                self.equal
            ));
        }
        context.report_detail(text);
        if self.dropped > 0 {
            let why = self.why_dropped(weight);
            context.warn(format!("{} of {} rows are not trained on: {why}", self.dropped, self.read));
        }
        if self.sanitized > 0 {
            context.warn(format!(
                "{} rows have special tokens in their text, which are encoded as plain text; \
                 `sanitize_control_tokens: false` encodes them as tokens",
                self.sanitized
            ));
        }
    }

    /// The report: what was read and written, and what was lost on the way.
    pub(super) fn text(&self, facts: &TokensFacts) -> String {
        let TokensFacts { tokens, target_tokens, longest_row, .. } = facts;
        format!(
            "{} rows read, {} written: {tokens} tokens, {target_tokens} of them trained, longest row {longest_row}\n\
             {} truncated, {} too long and left out, {} without a token to train on, {} without an end of text, {} left out in all",
            self.read, facts.rows, self.truncated, self.too_long, self.fully_masked, self.without_eos, self.dropped
        )
    }

    /// A run that would learn nothing fails here, not after hours; `weight` is as in [`Counts::report`].
    ///
    /// # Errors
    /// Fails where there are no rows, or none with a token to learn.
    pub(super) fn check(&self, facts: &TokensFacts, weight: Option<&str>) -> Result<(), StageError> {
        if self.read == 0 {
            return Err(StageError::bad_data("the dataset has no rows"));
        }
        if facts.target_tokens > 0 {
            return Ok(());
        }
        let message = format!("none of the {} rows has a token to train on", self.read);
        let help = match (self.truncated, weight) {
            (1.., _) => "the prompts alone fill `max_seq_len`: raise it".to_owned(),
            (0, Some(name)) => format!("check the responses and `{name}`, or set `train_on: all`"),
            (0, None) => "check the response column, or set `train_on: all`".to_owned(),
        };
        Err(StageError::bad_data(message).with_help(help))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::artifact::Shape;

    #[test]
    fn every_row_is_counted_where_it_belongs() {
        let kept = |truncated, fully_masked, without_eos| Fate::Kept {
            rows: vec![TokenRow::document(vec![5, 6], vec![5, 6])],
            truncated,
            fully_masked,
            without_eos,
        };
        let fates = [
            kept(false, false, false),
            kept(true, false, true),
            kept(true, true, false),
            Fate::TooLong,
            Fate::NoTarget { truncated: true },
        ];
        let mut counts = Counts::default();
        let written: usize =
            fates.into_iter().map(|fate| counts.note(Outcome { fate, sanitized: false, equal: false }).len()).sum();
        let mut facts =
            TokensFacts { rows: 3, tokens: 6, target_tokens: 2, longest_row: 2, ..TokensFacts::none(Shape::Prompt) };
        counts.write_to(&mut facts);
        assert_eq!(written, 3);
        assert_eq!((facts.truncated, facts.fully_masked, facts.without_eos, facts.dropped), (3, 2, 1, 2));
        assert_eq!(
            counts.text(&facts),
            "5 rows read, 3 written: 6 tokens, 2 of them trained, longest row 2\n\
             3 truncated, 1 too long and left out, 2 without a token to train on, 1 without an end of text, 2 left out in all"
        );
    }

    #[test]
    fn rows_that_are_left_out_have_a_cause_that_is_possible() {
        let of = |truncated, weight| {
            let mut counts = Counts::default();
            counts.note(Outcome { fate: Fate::NoTarget { truncated }, sanitized: false, equal: false });
            counts.why_dropped(weight)
        };
        let begins = "1 without a token to train on (an empty response";
        assert_eq!(of(false, None), format!("{begins})"));
        assert_eq!(of(false, Some("importance")), format!("{begins}, or a weight of 0 in `importance`)"));
        assert_eq!(of(true, None), format!("{begins}, or a prompt that fills `max_seq_len`: raise it)"));
        let all = format!("{begins}, a weight of 0 in `weight`, or a prompt that fills `max_seq_len`: raise it)");
        assert_eq!(of(true, Some("weight")), all);
    }
}
