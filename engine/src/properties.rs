//! What the readers of pipeline files and of records hold for any text: they end without a panic, every place they name
//! is in the text, and what was written is read again as it was.
//!
//! Compiled for the tests here and for the fuzzer alone (`fuzz/`).

use std::env::VarError;
use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::file::condition;
use crate::file::interpolate::{interpolate, only_axis, with_axes};
use crate::file::overrides;
use crate::file::parse::parse;
use crate::file::problem::Problem;
use crate::file::source::{Sources, Span};
use crate::file::tree::{Node, Value};
use crate::history::{RunPlan, TimedEvent};
use crate::protocol::{Job, WorkerEvent};

/// Variables, references, conditions and overrides: a text is taken for a pipeline file, and each of its lines for a
/// condition and for an override.
pub fn interpolation(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let mut sources = Sources::default();
    let source = sources.add("pipeline.yaml", text.as_ref());
    let mut problems = Vec::new();
    let mut root = match parse(source, &text, &mut problems) {
        Ok(root) => root,
        Err(problem) => {
            problems.push(*problem);
            Node { value: Value::Map(Vec::new()), span: Span { source, offset: 0, len: 0 } }
        }
    };
    let lines: Vec<String> = text.lines().take(8).map(str::to_owned).collect();
    let replaced = overrides::apply(&mut root, &lines, &|_, _| true, &mut sources, &mut problems);
    let environment = |name: &str| (name == "HOME").then(|| "/home/${env.HOME}".to_owned()).ok_or(VarError::NotPresent);
    let placeholders = |_: &str| -> &'static [&'static str] { &["inputs"] };
    let interpolated =
        interpolate(&mut root, (&mut [], &replaced), &sources, &environment, &placeholders, &mut problems);
    interpolated.refine(&mut problems);
    places_are_in_the_text(&problems, &sources);
    for line in &lines {
        let _ = condition::evaluate(line, &mut |_, name| Some(Value::String(name.to_owned())));
        let _ = only_axis(line);
        let _ = with_axes(line, &mut |_, _| Some(Value::Integer(7)));
    }
}

/// Every problem names a place in its text, between characters.
fn places_are_in_the_text(problems: &[Problem], sources: &Sources) {
    for problem in problems {
        let others = problem.related.iter().map(|(span, _)| *span);
        for span in std::iter::once(problem.span).chain(others) {
            assert!(sources.text(span).is_some(), "`{}` is at {span:?}, which is no place in the text", problem.code);
        }
    }
}

/// What stage processes write, what is kept of it, and the plan of a run.
pub fn events(data: &[u8]) {
    for line in data.split(|byte| *byte == b'\n') {
        is_read_as_written::<WorkerEvent>(line);
        is_read_as_written::<TimedEvent>(line);
        let _ = serde_json::from_slice::<Job>(line);
    }
    is_read_as_written::<RunPlan>(data);
}

fn is_read_as_written<T: Serialize + DeserializeOwned + PartialEq + Debug>(json: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<T>(json) {
        let written = serde_json::to_string(&value).expect("it is made of JSON values");
        assert_eq!(serde_json::from_str::<T>(&written).ok(), Some(value), "{written}");
    }
}

#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolation_of_texts_near_real_ones() {
        mutations::hold(interpolation, "interpolation");
    }

    #[test]
    fn events_near_real_ones() {
        mutations::hold(events, "events");
    }
}
