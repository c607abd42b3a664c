//! `uses: rank`: of several answers to each prompt the ones to learn from, by a score: a pair of the best and the
//! worst, or the best alone (rejection sampling).
//!
//! Prompts are those of the very rows that `generate` asked, turn by turn and column by column, so that what is trained
//! on is rendered as it was asked. Rows and answers are read side by side, a prompt at a time.

mod answers;
mod score;

use std::collections::BTreeMap;

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, OneOrMore, Parameters};
use engine::stage::{InputFacts, Smoke, Stage, StageKind};

use crate::data::artifact::{
    Judged, Message, OutputKind, Row, RowCounts, Rows, RowsFacts, RowsReader, RowsWriter, Said, Samples, Shape,
};
use crate::data::prompt::Template;
use crate::smoke::Lowered;
use answers::{Answer, Answers};
use score::{Score, Scorer};

/// What a pipeline file may say under `with:` for `uses: rank`.
#[derive(Parameters, Debug)]
pub struct Rank {
    /// The rows with the prompts of the samples.
    #[semantic]
    pub prompts: Input<Rows>,
    /// Their completions: of a `generate` stage with `samples_per_prompt`, or of several stages.
    #[semantic]
    pub samples: OneOrMore<Input<Samples>>,
    /// The score of completions; the highest is the best.
    #[semantic(default)]
    pub score: Score,
    /// The rows that are made from the completions of a prompt.
    #[semantic(default = Make::Pairs)]
    pub make: Make,
    /// A pair is made if the scores of its two completions differ by more than this.
    #[semantic(default = 0.0, range = 0.0..)]
    pub min_margin: f64,
    /// Prompts whose best completion has a lower score are left out.
    #[semantic]
    pub min_score: Option<f64>,
    /// What happens to completions without an end of text. Training on them teaches the model to stop there.
    #[semantic(default = CutOff::Drop)]
    pub on_cut_off: CutOff,
}

/// The rows that are made from the completions of a prompt.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Make {
    /// A pair: the completion with the highest score, and the one with the lowest.
    Pairs,
    /// The prompt's row, with the completion of the highest score as its response.
    Best,
}

/// What becomes of answers that `max_new_tokens` cut off.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutOff {
    /// They are left out.
    Drop,
    /// They are ranked like the others.
    Keep,
}

impl StageKind for Rank {
    const NAME: &'static str = "rank";
    const VERSION: u32 = 3; // 3: text of pairs stands in its columns as it is.
    const ABOUT: &'static str =
        "Makes pairs of a better and a worse completion, or keeps the best, of a model's own completions.";
    const ALSO_CALLED: &'static [&'static str] = &["best_of_n", "rejection_sampling", "judge"];

    /// Completions of so few tokens of a model that has hardly learned are all cut off, and none is good.
    fn smoke(parameters: &serde_json::Value) -> Smoke {
        let lowered = Lowered::from(parameters).set("on_cut_off", "keep");
        lowered.replace("min_margin", 0.0).replace("min_score", serde_json::Value::Null).done()
    }
}

impl Stage for Rank {
    fn outputs(&self) -> Vec<Output> {
        vec![Rows::output("rows")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.score.problems(self.samples.0.len(), span).into_iter().collect();
        let of_rows = self.prompts.reference.facts_in(inputs).and_then(RowsFacts::from_facts);
        if let Some(message) = of_rows.as_ref().and_then(|facts| self.unfit(facts)) {
            let label = format!("the rows are {}", of_rows.map_or("others", |facts| facts.shape.describe()));
            problems.push(Problem::error("bad-value", span, message, label).at("prompts"));
        }
        problems
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast::default();
        let prompts = &self.prompts.reference;
        let of_rows = prompts.facts_in(ahead.certain).and_then(RowsFacts::from_facts);
        let made = of_rows.map(|facts| self.facts(&facts).to_facts()).unwrap_or_default();
        let kept = made.into_iter().filter(|(name, _)| ["shape", "columns", "template", "response"].contains(&&**name));
        forecast.facts("rows", kept.collect());
        let rows = prompts.facts_in(ahead.expected).and_then(|facts| facts.get("rows")?.as_f64());
        forecast.work = rows.map(|rows| Work::new("prompts", rows));
        forecast
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let prompts = context.open(&self.prompts)?;
        let mut rows = RowsReader::open(&prompts)?;
        let facts = rows.facts().clone();
        if let Some(message) = self.unfit(&facts) {
            return Err(StageError::bad_data(message));
        }
        let mut answers = Answers::open(self, &prompts, context)?;
        let mut scorer = Scorer::open(&self.score, context)?;
        let draft = context.create("rows")?;
        let mut writer = RowsWriter::create(&draft.folder, self.facts(&facts));
        let mut tally = Tally::default();
        for number in 0..rows.len() {
            context.stop_if_cancelled()?;
            let mut scored = Vec::new();
            for (source, answer) in answers.of_prompt(number)? {
                tally.answers += 1;
                let score = scorer.score(source, answer.as_ref())?;
                match answer.zip(score) {
                    Some((answer, _)) if answer.is_cut && self.on_cut_off == CutOff::Drop => tally.cut_off += 1,
                    Some((answer, score)) => scored.push((score, answer)),
                    None => tally.unscored += 1,
                }
            }
            match self.choose(&scored) {
                Ok(chosen) => {
                    tally.add(&chosen);
                    writer.write(row_of(rows.row(number)?, &facts, chosen))?;
                }
                Err(reason) => *tally.left_out.entry(reason).or_default() += 1,
            }
            context.progress("prompts", number + 1, Some(rows.len()), None);
        }
        answers.finish()?;
        scorer.finish()?;
        let report = tally.report(self.make);
        if tally.made == 0 {
            return Err(StageError::bad_data(format!("there is nothing to train on: {report}"))
                .with_help(tally.help(self.min_margin > 0.0)));
        }
        context.report(report);
        let dropped_by: BTreeMap<String, u64> =
            tally.left_out.iter().map(|(reason, count)| (reason.words().to_owned(), *count)).collect();
        let counts = RowCounts { dropped: dropped_by.values().sum(), dropped_by, ..RowCounts::default() };
        let (facts, identity) = writer.finish_counted(&counts)?;
        context.seal(draft, facts, Some(identity))
    }
}

/// The answers that were chosen for a prompt, with their scores.
#[derive(Debug)]
struct Chosen {
    best: (f64, Answer),
    /// For a pair.
    worst: Option<(f64, Answer)>,
}

impl Rank {
    /// Why rows cannot be made of answers to these.
    fn unfit(&self, prompts: &RowsFacts) -> Option<&'static str> {
        let ends_otherwise = prompts.template.as_ref().is_some_and(|template| template.response_end.is_some());
        match self.make {
            Make::Pairs if ends_otherwise => Some(
                "responses to this template end in a way that those of pairs do not: give conversations (`messages`)",
            ),
            Make::Best if prompts.shape.is_preference() => {
                Some("`make: best` is for rows of prompts, conversations or plain text")
            }
            _ => None,
        }
    }

    /// Facts about the rows that are made of such prompts.
    fn facts(&self, prompts: &RowsFacts) -> RowsFacts {
        match (self.make, prompts.shape) {
            (Make::Pairs, _) => RowsFacts::pairs(),
            (Make::Best, Shape::Text) => {
                let columns = [INPUT, OUTPUT].map(str::to_owned);
                RowsFacts::prompt(Template::named("none").expect("a name"), OUTPUT, columns)
            }
            (Make::Best, _) => {
                RowsFacts { rows: 0, dropped: 0, dropped_by: BTreeMap::new(), filtered: 0, empty: 0, ..prompts.clone() }
            }
        }
    }

    /// What is learned from the answers to a prompt; among equal scores the first answer.
    fn choose(&self, scored: &[(f64, Answer)]) -> Result<Chosen, LeftOut> {
        let by_score = |one: &f64, other: &f64| one.total_cmp(other);
        let scores = || scored.iter().map(|(score, _)| *score);
        let (Some(highest), Some(lowest)) = (scores().max_by(by_score), scores().min_by(by_score)) else {
            return Err(LeftOut::NoAnswer);
        };
        if self.min_score.is_some_and(|least| highest < least) {
            return Err(LeftOut::LowScore);
        }
        let first_of = |wanted: f64| scored.iter().find(|(score, _)| score.total_cmp(&wanted).is_eq());
        let (Some(best), Some(worst)) = (first_of(highest), first_of(lowest)) else { return Err(LeftOut::NoAnswer) };
        let is_pair = highest - lowest > self.min_margin && best.1.text != worst.1.text;
        match self.make {
            Make::Best => Ok(Chosen { best: best.clone(), worst: None }),
            Make::Pairs if is_pair => Ok(Chosen { best: best.clone(), worst: Some(worst.clone()) }),
            Make::Pairs => Err(LeftOut::NoMargin),
        }
    }
}

/// The columns of plain text with an answer.
const INPUT: &str = "input";
const OUTPUT: &str = "output";

/// The row that is made of a prompt's.
fn row_of(asked: Row, facts: &RowsFacts, chosen: Chosen) -> Row {
    let response = chosen.best.1.text;
    if let Some((_, worst)) = chosen.worst {
        let prompt = prompt_of(asked, facts);
        let in_its_form = |text: String| match prompt {
            Said::Text(_) => Said::Text(text),
            Said::Turns(_) => Said::Turns(vec![Message::new(ASSISTANT, &text)]),
        };
        let (chosen, rejected) = (Some(in_its_form(response)), Some(in_its_form(worst.text)));
        return Row::Judged(Box::new(Judged { prompt, chosen, rejected }));
    }
    match asked {
        Row::Columns(mut columns) => {
            columns.insert(facts.response.clone().unwrap_or_default(), response);
            Row::Columns(columns)
        }
        Row::Messages(messages) => {
            let mut messages = asked_turns(messages);
            messages.push(Message::new(ASSISTANT, &response));
            Row::Messages(messages)
        }
        Row::Text(text) => Row::Columns(BTreeMap::from([(INPUT.to_owned(), text), (OUTPUT.to_owned(), response)])),
        Row::Judged(_) => unreachable!("`unfit` has refused them"),
    }
}

const ASSISTANT: &str = "assistant";

/// What a row asks, as [`crate::data::prompt::PromptRenderer::question`] takes it.
fn prompt_of(asked: Row, facts: &RowsFacts) -> Said {
    match asked {
        Row::Columns(columns) => {
            Said::Text(facts.template.as_ref().map_or_else(String::new, |template| template.render(&columns)))
        }
        Row::Messages(messages) => Said::Turns(asked_turns(messages)),
        Row::Text(text) => Said::Text(text),
        Row::Judged(judged) => judged.prompt,
    }
}

/// A conversation up to the last turn of the assistant.
fn asked_turns(mut messages: Vec<Message>) -> Vec<Message> {
    let answer = messages.iter().rposition(|message| message.role == ASSISTANT);
    messages.truncate(answer.unwrap_or(messages.len()));
    messages
}

/// Why nothing is learned from a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LeftOut {
    NoAnswer,
    NoMargin,
    LowScore,
}

impl LeftOut {
    fn words(self) -> &'static str {
        match self {
            Self::NoAnswer => "without an answer that takes part",
            Self::NoMargin => "without two answers whose scores differ enough",
            Self::LowScore => "whose best answer has too low a score",
        }
    }
}

/// What was counted.
#[derive(Debug, Default)]
struct Tally {
    answers: u64,
    cut_off: u64,
    unscored: u64,
    made: u64,
    /// Prompts that nothing is learned from.
    left_out: BTreeMap<LeftOut, u64>,
    /// Sums of scores.
    best: f64,
    worst: f64,
}

impl Tally {
    /// What to do where nothing is left, by what has left out the most.
    fn help(&self, has_margin: bool) -> &'static str {
        let most = self.left_out.iter().max_by_key(|(_, count)| **count).map(|(reason, _)| *reason);
        match most {
            Some(LeftOut::NoAnswer) if self.cut_off > 0 => {
                "raise `max_new_tokens` of the stage that drew the answers, or set `on_cut_off: keep`"
            }
            Some(LeftOut::LowScore) => "lower `min_score`, or draw more answers (`samples_per_prompt`)",
            Some(LeftOut::NoMargin) if has_margin => {
                "lower `min_margin`: scores have to differ by more; or use more `samples_per_prompt` at a higher `temperature`"
            }
            _ => "use more `samples_per_prompt` at a higher `temperature`, or scores with finer steps",
        }
    }

    fn add(&mut self, chosen: &Chosen) {
        self.made += 1;
        self.best += chosen.best.0;
        self.worst += chosen.worst.as_ref().map_or(0.0, |(score, _)| *score);
    }

    fn report(&self, make: Make) -> String {
        let prompts = self.made + self.left_out.values().sum::<u64>();
        let what = if make == Make::Pairs { "pairs" } else { "rows" };
        let mut parts = vec![format!("{} completions of {prompts} prompts: {} {what}", self.answers, self.made)];
        let mean = |sum: f64| sum / self.made as f64;
        if self.made > 0 {
            parts.push(match make {
                Make::Pairs => {
                    format!("mean score {:.4} of chosen, {:.4} of rejected", mean(self.best), mean(self.worst))
                }
                Make::Best => format!("mean score {:.4}", mean(self.best)),
            });
        }
        let answers = [(self.cut_off, "cut off"), (self.unscored, "without a score")];
        let some = answers.iter().filter(|(count, _)| *count > 0);
        parts.extend(some.map(|(count, why)| format!("{count} completions {why}")));
        parts.extend(self.left_out.iter().map(|(reason, count)| format!("{count} prompts {}", reason.words())));
        parts.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use engine::parameter::Reference;

    use super::*;

    fn params(make: Make, min_margin: f64, min_score: Option<f64>) -> Rank {
        let prompts = Input::new(Reference { stage: "rows".to_owned(), output: None, span: Span::default() });
        let (samples, score) = (OneOrMore(Vec::new()), Score::default());
        Rank { prompts, samples, score, make, min_margin, min_score, on_cut_off: CutOff::Drop }
    }

    fn answers(scores: &[f64]) -> Vec<(f64, Answer)> {
        let answer = |(index, score): (usize, &f64)| {
            let answer =
                Answer { text: format!("answer {index}"), compared: String::new(), reference: None, is_cut: false };
            (*score, answer)
        };
        scores.iter().enumerate().map(answer).collect()
    }

    fn texts(chosen: Result<Chosen, LeftOut>) -> Result<Vec<String>, LeftOut> {
        chosen.map(|chosen| [Some(chosen.best), chosen.worst].into_iter().flatten().map(|it| it.1.text).collect())
    }

    #[test]
    fn a_pair_is_the_first_best_and_the_first_worst() {
        let found = texts(params(Make::Pairs, 0.0, None).choose(&answers(&[0.5, 0.1, 0.9, 0.9, 0.1])));
        assert_eq!(found.unwrap(), ["answer 2", "answer 1"]);
    }

    #[test]
    fn equal_scores_are_no_preference() {
        assert_eq!(texts(params(Make::Pairs, 0.0, None).choose(&answers(&[0.5, 0.5]))), Err(LeftOut::NoMargin));
        assert_eq!(texts(params(Make::Pairs, 0.4, None).choose(&answers(&[0.5, 0.1]))), Err(LeftOut::NoMargin));
        assert_eq!(texts(params(Make::Pairs, 0.0, None).choose(&[])), Err(LeftOut::NoAnswer));
        let mut same = answers(&[0.5, 0.1]);
        same[1].1.text = same[0].1.text.clone();
        assert_eq!(texts(params(Make::Pairs, 0.0, None).choose(&same)), Err(LeftOut::NoMargin));
    }

    #[test]
    fn the_best_needs_its_score_and_no_other_answer() {
        assert_eq!(texts(params(Make::Best, 0.0, Some(0.5)).choose(&answers(&[0.5]))).unwrap(), ["answer 0"]);
        assert_eq!(texts(params(Make::Best, 0.0, Some(0.6)).choose(&answers(&[0.5]))), Err(LeftOut::LowScore));
    }
}
