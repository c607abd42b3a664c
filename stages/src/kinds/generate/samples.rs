//! The answers on disk: `samples.parquet` for programs, `samples.txt` for people.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, StringArray, UInt64Array};
use engine::error::{Cause, OrFail, StageError};

use super::prompts::EncodedPrompt;
use crate::compute::inference::Answer;
use crate::data::results::{TableWriter, TextReader};

/// The table in an output's folder.
pub const TABLE: &str = "samples.parquet";
const TEXT: &str = "samples.txt";

/// The fact that has the identity of the rows that were asked.
pub(crate) const PROMPTS: &str = "prompts";

/// The fact that has what ends the reasoning before an answer: references are without it.
pub(crate) const END_OF_REASONING: &str = "end_of_reasoning";

/// A prompt and its answer.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    /// The prompt's number, from 0.
    pub row: u64,
    /// Which of the answers to it, from 0.
    pub sample: u64,
    /// What was asked.
    pub prompt: String,
    /// The prompt's tokens, where it could be encoded.
    pub prompt_tokens: Option<u64>,
    /// The answer that the data gives.
    pub reference: Option<String>,
    /// The model's, or why there is none.
    pub answer: Result<Answer, String>,
}

impl Sample {
    /// A prompt with its answer; there is none where the prompt could not be asked.
    pub(super) fn new(asked: &EncodedPrompt, sample: u64, answer: Option<Answer>) -> Self {
        let EncodedPrompt { row, text, ids, reference } = asked;
        let prompt_tokens = ids.as_ref().ok().map(|ids| ids.len() as u64);
        let answer = match (answer, ids) {
            (Some(answer), _) => Ok(answer),
            (None, Err(problem)) => Err(problem.clone()),
            (None, Ok(_)) => unreachable!("a prompt that can be asked is answered"),
        };
        Self { row: *row, sample, prompt: text.clone(), prompt_tokens, reference: reference.clone(), answer }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Samples.
    pub rows: u64,
    /// Tokens of the answers.
    pub tokens: u64,
    /// Samples without an answer: their prompts could not be asked.
    pub skipped: u64,
}

/// Writes samples, a group at a time.
pub(super) struct SamplesWriter {
    table: TableWriter,
    text: BufWriter<File>,
    text_path: PathBuf,
    per_prompt: u64,
    tally: Tally,
}

impl SamplesWriter {
    /// Begins the files of an output's folder.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn create(folder: &Path, per_prompt: u64) -> Result<Self, StageError> {
        let text_path = folder.join(TEXT);
        let text = File::create(&text_path);
        let text = text.or_fail(Cause::Machine, || format!("cannot write `{}`", text_path.display()))?;
        let table = TableWriter::new(folder.join(TABLE));
        Ok(Self { table, text: BufWriter::new(text), text_path, per_prompt, tally: Tally::default() })
    }

    /// Adds samples.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn write(&mut self, samples: &[Sample]) -> Result<(), StageError> {
        let texts =
            |of: fn(&Sample) -> Option<&str>| -> ArrayRef { Arc::new(samples.iter().map(of).collect::<StringArray>()) };
        let counts =
            |of: fn(&Sample) -> Option<u64>| -> ArrayRef { Arc::new(samples.iter().map(of).collect::<UInt64Array>()) };
        let number = (self.per_prompt > 1).then(|| ("sample", counts(|sample| Some(sample.sample))));
        let columns = [
            ("row", counts(|sample| Some(sample.row))),
            ("prompt", texts(|sample| Some(&sample.prompt))),
            ("completion", texts(|sample| sample.answer.as_ref().ok().map(|answer| answer.text.as_str()))),
            ("reference", texts(|sample| sample.reference.as_deref())),
            ("prompt_tokens", counts(|sample| sample.prompt_tokens)),
            ("tokens", counts(|sample| sample.answer.as_ref().ok().map(|answer| answer.tokens as u64))),
            ("stop", texts(|sample| sample.answer.as_ref().ok().map(|answer| answer.ended.name()))),
            ("problem", texts(|sample| sample.answer.as_ref().err().map(String::as_str))),
        ];
        self.table.write(columns.into_iter().chain(number))?;
        for sample in samples {
            self.tally.rows += 1;
            match &sample.answer {
                Ok(answer) => self.tally.tokens += answer.tokens as u64,
                Err(_) => self.tally.skipped += 1,
            }
            write_text(&mut self.text, sample, self.per_prompt)
                .or_fail(Cause::Machine, || unwritable(&self.text_path))?;
        }
        Ok(())
    }

    /// Ends the files.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn finish(mut self) -> Result<Tally, StageError> {
        self.text.flush().or_fail(Cause::Machine, || unwritable(&self.text_path))?;
        self.table.finish()?;
        Ok(self.tally)
    }
}

fn unwritable(path: &Path) -> String {
    format!("cannot write `{}`", path.display())
}

/// A sample; the first of a prompt below that, and the last before the reference.
fn write_text(text: &mut impl Write, sample: &Sample, per_prompt: u64) -> std::io::Result<()> {
    if sample.sample == 0 {
        writeln!(text, "## {}\n\n{}\n", sample.row + 1, sample.prompt)?;
    }
    match &sample.answer {
        Ok(answer) => writeln!(text, "-> {}\n", answer.text.trim())?,
        Err(problem) => writeln!(text, "not asked: {problem}\n")?,
    }
    match &sample.reference {
        Some(reference) if sample.sample + 1 == per_prompt => writeln!(text, "reference: {reference}\n"),
        _ => Ok(()),
    }
}

/// The samples of another stage.
pub(super) struct Earlier(TextReader);

impl Earlier {
    /// Opens an output's folder.
    ///
    /// # Errors
    /// Fails if it holds no samples.
    pub(super) fn open(folder: &Path) -> Result<Self, StageError> {
        TextReader::open(&folder.join(TABLE), &["prompt", "completion"]).map(Self)
    }

    /// The next prompts with their answers; `None` at the end.
    ///
    /// # Errors
    /// Fails if the file is damaged.
    pub(super) fn next_rows(&mut self) -> Result<Option<Vec<(String, String)>>, StageError> {
        let Some(columns) = self.0.next_rows()? else { return Ok(None) };
        let [asked, answered] = <[Vec<String>; 2]>::try_from(columns).expect("two columns are read");
        Ok(Some(asked.into_iter().zip(answered).collect()))
    }

    /// What was answered to these prompts, as far as they were asked.
    ///
    /// # Errors
    /// Fails if the file is damaged.
    pub(super) fn answers_to(mut self, prompts: BTreeSet<&str>) -> Result<BTreeMap<String, String>, StageError> {
        let mut answers = BTreeMap::new();
        while answers.len() < prompts.len()
            && let Some(rows) = self.next_rows()?
        {
            for (prompt, answer) in rows {
                if prompts.contains(prompt.as_str()) {
                    answers.entry(prompt).or_insert(answer);
                }
            }
        }
        Ok(answers)
    }
}
