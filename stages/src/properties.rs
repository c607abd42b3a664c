//! What the readers of foreign text hold for any text: they end without a panic, soon and in little memory, and what
//! they return keeps its promises.
//!
//! Compiled for the tests here and for the fuzzer alone (`fuzz/`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use engine::file::problem::Problem;
use engine::file::source::Sources;

use crate::data::artifact::Message;
use crate::data::prompt::{ChatTemplate, Template, TrainOn};
use crate::data::tokenizer::Tokenizer;
use crate::kinds::dataset::split::Split;

pub use crate::hub::properties::hub_answers;
pub use crate::kinds::dataset::properties::filter;

/// A whole pipeline file, with the stage kinds of this program: every problem is at a place in the text, and a second
/// reading finds the same.
pub fn pipeline_file(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let read = || engine::plan::load_text(Path::new("/nonexistent/pipeline.yaml"), &text, &[], &crate::registry());
    match (read(), read()) {
        (Ok(plan), Ok(again)) => {
            assert_eq!(plan.warnings, again.warnings);
            places_are_in_the_text(&plan.warnings, &plan.sources);
            assert!(!plan.stages.is_empty());
        }
        (Err(rejected), Err(again)) => {
            assert_eq!(rejected.problems, again.problems);
            assert!(!rejected.problems.is_empty());
            places_are_in_the_text(&rejected.problems, &rejected.sources);
        }
        (one, other) => panic!("read once as {:?}, once as {:?}", one.is_ok(), other.is_ok()),
    }
}

fn places_are_in_the_text(problems: &[Problem], sources: &Sources) {
    for problem in problems {
        let others = problem.related.iter().map(|(span, _)| *span);
        let missing = std::iter::once(problem.span).chain(others).find(|span| sources.text(*span).is_none());
        assert_eq!(missing, None, "`{}` is at no place in the text", problem.code);
    }
}

/// Selections of rows, `train[10%:20%]+test`: rows that there are, in order.
pub fn split(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Ok(split) = Split::parse(&text) else { return };
    assert!(!split.names().is_empty());
    for rows in [0, 1, 99, 100, 12_345, u64::MAX] {
        for range in split.ranges(|_| Some(rows)).into_iter().flatten() {
            assert!(
                range.rows.start <= range.rows.end && range.rows.end <= rows.max(range.rows.start),
                "{text}: {range:?}"
            );
        }
    }
}

/// Chat templates and prompt templates: what a conversation is cut into is its whole text.
pub fn templates(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let columns = BTreeMap::from([("a".to_owned(), "A".to_owned()), ("b".to_owned(), String::new())]);
    if let Ok(template) = Template::custom(&text) {
        assert!(!template.placeholders().is_empty());
        let _ = template.render(&columns);
    }
    let special_tokens =
        BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned()), ("eos_token".to_owned(), "</s>".to_owned())]);
    let Ok(template) = ChatTemplate::new(&text, special_tokens) else { return };
    let messages = [Message::new("system", "S"), Message::new("user", "U\n"), Message::new("assistant", " A")];
    for messages in [&messages[..], &messages[1..2], &[]] {
        let rendered = template.render(messages, false);
        for train_on in [TrainOn::All, TrainOn::Assistant, TrainOn::Last] {
            if let (Ok(rendered), Ok(turns)) = (&rendered, template.turns(messages, train_on)) {
                let joined: String = turns.iter().map(|turn| turn.text.as_str()).collect();
                assert_eq!(*rendered, joined, "{train_on:?}");
            }
        }
    }
}

/// `tokenizer.json`: ids are of the vocabulary, and can be decoded.
pub fn tokenizer(data: &[u8]) {
    let folder = temporary("tokenizer");
    std::fs::create_dir_all(&folder).expect("the temporary folder can be written to");
    std::fs::write(folder.join("tokenizer.json"), data).expect("the temporary folder can be written to");
    if let Ok(tokenizer) = Tokenizer::from_folder(&folder) {
        for text in ["", "a", " Hello, world!\n", "<s>é\u{0}\u{10ffff}</s>"] {
            if let Ok(ids) = tokenizer.encode(text) {
                let _ = tokenizer.decode(&ids);
            }
        }
    }
    std::fs::remove_dir_all(&folder).expect("it was made above");
}

/// A name of this thread's own: tests run beside each other, and fuzzers in several processes.
fn temporary(name: &str) -> PathBuf {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    std::env::temp_dir().join(format!("stages-properties-{process}-{thread:?}-{name}"))
}

#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipeline_files_near_real_ones() {
        mutations::hold(pipeline_file, "pipeline_file");
    }

    #[test]
    fn splits_near_real_ones() {
        mutations::hold(split, "split");
    }

    #[test]
    fn templates_near_real_ones() {
        mutations::hold(templates, "templates");
    }

    #[test]
    fn filters_near_real_ones() {
        mutations::hold(filter, "filter");
    }

    #[test]
    fn tokenizers_near_real_ones() {
        mutations::hold(tokenizer, "tokenizer");
    }

    #[test]
    fn hub_answers_near_real_ones() {
        mutations::hold(hub_answers, "hub_answers");
    }
}
