//! The answers: `samples.parquet` for programs, `samples.txt` for people, and the report on the screen.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{StringArray, UInt64Array};
use engine::error::{Cause, OrFail, StageError};

use super::prompts::Asked;
use crate::inference::{Completion, Stop};
use crate::results;
use crate::tokenizer::Tokenizer;

const FILE: &str = "samples.parquet";

/// A prompt and its answer.
pub(super) struct Sample {
    prompt: String,
    completion: String,
    reference: Option<String>,
    /// Tokens of the answer.
    pub tokens: usize,
    stop: Stop,
}

/// A sample of another stage, as far as it is shown.
pub(super) struct Earlier {
    prompt: String,
    completion: String,
}

impl Sample {
    pub(super) fn new(asked: &Asked, completion: &Completion, tokenizer: &Tokenizer) -> Result<Self, StageError> {
        Ok(Self {
            prompt: asked.text.clone(),
            completion: tokenizer.decode(&completion.ids)?.trim().to_owned(),
            reference: asked.reference.clone(),
            tokens: completion.ids.len(),
            stop: completion.stop,
        })
    }
}

pub(super) fn write(samples: &[Sample], folder: &Path) -> Result<(), StageError> {
    let stop = |sample: &Sample| match sample.stop {
        Stop::EndOfText => "end_of_text",
        Stop::Length => "length",
    };
    let prompts: StringArray = samples.iter().map(|sample| Some(sample.prompt.as_str())).collect();
    let completions: StringArray = samples.iter().map(|sample| Some(sample.completion.as_str())).collect();
    let references: StringArray = samples.iter().map(|sample| sample.reference.as_deref()).collect();
    let tokens: UInt64Array = samples.iter().map(|sample| Some(sample.tokens as u64)).collect();
    let stops: StringArray = samples.iter().map(|sample| Some(stop(sample))).collect();
    results::write(
        &folder.join(FILE),
        [
            ("prompt", Arc::new(prompts) as _),
            ("completion", Arc::new(completions) as _),
            ("reference", Arc::new(references) as _),
            ("tokens", Arc::new(tokens) as _),
            ("stop", Arc::new(stops) as _),
        ],
    )?;
    let path = folder.join("samples.txt");
    std::fs::write(&path, text(samples)).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
}

/// Reads the samples of another stage.
pub(super) fn read(folder: &Path) -> Result<Vec<Earlier>, StageError> {
    let path = folder.join(FILE);
    let prompts = results::read_texts(&path, "prompt")?;
    let completions = results::read_texts(&path, "completion")?;
    let pairs = prompts.into_iter().zip(completions);
    Ok(pairs.map(|(prompt, completion)| Earlier { prompt, completion }).collect())
}

fn text(samples: &[Sample]) -> String {
    let mut text = String::new();
    for (sample, number) in samples.iter().zip(1..) {
        text.push_str(&format!("## {number}\n\n{}\n\n-> {}\n\n", sample.prompt, sample.completion));
        if let Some(reference) = &sample.reference {
            text.push_str(&format!("reference: {reference}\n\n"));
        }
    }
    text
}

/// Each prompt with its answer, and under it what another stage answered to the same prompt.
pub(super) fn report(stage: &str, samples: &[Sample], beside: Option<(&str, &[Earlier])>) -> String {
    let Some((other, earlier)) = beside else {
        let shown =
            samples.iter().map(|sample| format!("{}\n  {}", visible(&sample.prompt), indented(&sample.completion, 2)));
        return shown.collect::<Vec<_>>().join("\n");
    };
    let width = stage.chars().count().max(other.chars().count());
    let answer = |who: &str, text: &str| format!("  {who:<width$}  {}", indented(text, width + 4));
    let shown = samples.iter().map(|sample| {
        let before = earlier.iter().find(|earlier| earlier.prompt == sample.prompt);
        let mut lines = vec![visible(&sample.prompt)];
        lines.extend(before.map(|earlier| answer(other, &earlier.completion)));
        lines.push(answer(stage, &sample.completion));
        lines.join("\n")
    });
    shown.collect::<Vec<_>>().join("\n")
}

/// Keeps the lines of an answer under each other.
fn indented(text: &str, by: usize) -> String {
    visible(text).replace('\n', &format!("\n{}", " ".repeat(by)))
}

/// A model may write anything, and a terminal obeys control characters.
fn visible(text: &str) -> String {
    text.replace(|letter: char| letter.is_control() && letter != '\n' && letter != '\t', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(prompt: &str, completion: &str) -> Sample {
        let (prompt, completion) = (prompt.to_owned(), completion.to_owned());
        Sample { prompt, completion, reference: None, tokens: 3, stop: Stop::EndOfText }
    }

    #[test]
    fn no_answer_reaches_the_terminal_as_a_command() {
        let samples = [sample("Red?", "\u{1b}[31mred\r")];
        assert_eq!(report("asked", &samples, None), "Red?\n  \u{fffd}[31mred\u{fffd}");
    }

    #[test]
    fn answers_stand_under_their_prompts() {
        let samples = [sample("Who are you?", "I am Pip,\nmade by Ada.")];
        assert_eq!(report("asked", &samples, None), "Who are you?\n  I am Pip,\n  made by Ada.");
        let earlier = [Earlier { prompt: "Who are you?".to_owned(), completion: "the the".to_owned() }];
        let expected = "Who are you?\n  before  the the\n  after   I am Pip,\n          made by Ada.";
        assert_eq!(report("after", &samples, Some(("before", &earlier))), expected);
    }
}
