//! `score:`: what answers are compared by.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, OneOrMore, Parameters};
use serde::Deserialize;

use super::answers::Answer;
use crate::data::artifact::Files;
use crate::metrics::bleu;
use crate::metrics::exact_match::Normalization;
use crate::metrics::rouge::{Stemming, rouge};

/// The score of completions; the highest is the best.
#[derive(Parameters, Debug)]
#[parameters(default)]
pub enum Score {
    /// Words that the completion shares with the row's response: the F-measure of `rouge_score`.
    #[semantic(default)]
    Rouge {
        /// The variant of ROUGE.
        #[semantic(default = RougeVariant::RougeL)]
        variant: RougeVariant,
        /// Whether words are compared by their stems (Porter).
        #[semantic(default = true)]
        use_stemmer: bool,
    },
    /// sacrebleu's `sentence_bleu` of the completion against the row's response, from 0 to 100.
    Bleu,
    /// 1 if the completion equals the row's response, else 0.
    ExactMatch {
        /// How both are normalised before the comparison.
        #[semantic(default = Normalization::Strip)]
        normalization: Normalization,
    },
    /// Your own scores, from a `command` stage: its output of kind `files` has a file `scores.jsonl`, with one line per
    /// sample in the same order: a number, an object with `score`, or null for a sample without a score.
    Given {
        /// The files; for several stages of samples one for each, in the same order.
        #[semantic]
        scores: OneOrMore<Input<Files>>,
    },
}

/// Which words ROUGE counts.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum RougeVariant {
    /// Single words.
    Rouge1,
    /// Pairs of words.
    Rouge2,
    /// The longest common sequence.
    #[parameters(rename = "rougeL")]
    RougeL,
}

impl Score {
    /// What is wrong with it for so many stages of samples.
    pub(super) fn problems(&self, sources: usize, span: Span) -> Option<Problem> {
        let Self::Given { scores } = self else { return None };
        let message = format!("`scores` names {} stages, and `samples` {sources}", scores.0.len());
        let problem = Problem::error("bad-value", span, message, "each stage of samples has separate scores");
        (scores.0.len() != sources).then(|| problem.at("score"))
    }
}

/// Gives answers their scores.
pub(super) enum Scorer {
    Rouge { variant: RougeVariant, stemming: Stemming },
    Bleu,
    ExactMatch { normalization: Normalization },
    Given(Vec<Given>),
}

/// Scores from a file.
pub(super) struct Given {
    path: PathBuf,
    lines: Lines<BufReader<File>>,
    read: u64,
}

impl Scorer {
    /// Opens what is needed.
    ///
    /// # Errors
    /// Fails where a file is missing.
    pub(super) fn open(score: &Score, context: &mut StageContext) -> Result<Self, StageError> {
        Ok(match score {
            Score::Rouge { variant, use_stemmer } => {
                let stemming = if *use_stemmer { Stemming::Porter } else { Stemming::Off };
                Self::Rouge { variant: *variant, stemming }
            }
            Score::Bleu => Self::Bleu,
            Score::ExactMatch { normalization } => Self::ExactMatch { normalization: *normalization },
            Score::Given { scores } => {
                let files = scores.0.iter().map(|input| Given::open(context.open(input)?.folder.join(SCORES)));
                Self::Given(files.collect::<Result<_, StageError>>()?)
            }
        })
    }

    /// The score of a sample of a stage; `None` where it has none: without an answer, or without a response to compare
    /// it with.
    ///
    /// # Errors
    /// Fails where a file has no number for it.
    pub(super) fn score(&mut self, source: usize, answer: Option<&Answer>) -> Result<Option<f64>, StageError> {
        let given = match self {
            Self::Given(files) => files[source].next()?,
            _ => None,
        };
        let Some(answer) = answer else { return Ok(None) };
        let of_reference =
            |score: &dyn Fn(&str, &str) -> f64| Some(score(&answer.compared, answer.reference.as_deref()?.trim()));
        Ok(match self {
            Self::Given(_) => given,
            Self::Rouge { variant, stemming } => of_reference(&|text, reference| {
                let scores = rouge(text, reference, *stemming);
                match variant {
                    RougeVariant::Rouge1 => scores.rouge1.fmeasure,
                    RougeVariant::Rouge2 => scores.rouge2.fmeasure,
                    RougeVariant::RougeL => scores.rouge_l.fmeasure,
                }
            }),
            Self::Bleu => of_reference(&|text, reference| bleu::Counts::of(text, reference).sentence().score),
            Self::ExactMatch { normalization } => {
                of_reference(&|text, reference| f64::from(normalization.equal(text, reference)))
            }
        })
    }

    /// Checks that no score is left.
    ///
    /// # Errors
    /// Fails where there are more scores than samples.
    pub(super) fn finish(self) -> Result<(), StageError> {
        let Self::Given(files) = self else { return Ok(()) };
        for mut file in files {
            if file.lines.next().is_some() {
                let (path, read) = (file.path.display(), file.read);
                return Err(StageError::bad_data(format!("`{path}` has more scores than there are samples, {read}")));
            }
        }
        Ok(())
    }
}

/// The file that scores are read from.
const SCORES: &str = "scores.jsonl";

/// A line of it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Number(f64),
    Object { score: Option<f64> },
    None(()),
}

impl Given {
    fn open(path: PathBuf) -> Result<Self, StageError> {
        let file = File::open(&path).or_fail(Cause::BadData, || format!("there is no `{SCORES}` among the scores"))?;
        Ok(Self { lines: BufReader::new(file).lines(), path, read: 0 })
    }

    /// The score of the next sample.
    fn next(&mut self) -> Result<Option<f64>, StageError> {
        let path = self.path.display();
        let line = self.lines.next().ok_or_else(|| {
            let message = format!("`{path}` has {} scores, and there are more samples", self.read);
            StageError::bad_data(message).with_help("write a line for each row of `samples.parquet`, in their order")
        })?;
        self.read += 1;
        let unusable = || format!("line {} of `{path}` is no score", self.read);
        let line = line.or_fail(Cause::BadData, unusable)?;
        let score = match serde_json::from_str(&line).or_fail(Cause::BadData, unusable)? {
            Line::Number(score) | Line::Object { score: Some(score) } => score,
            Line::Object { score: None } | Line::None(()) => return Ok(None),
        };
        match score.is_finite() {
            true => Ok(Some(score)),
            false => Err(StageError::bad_data(unusable())),
        }
    }
}
