//! Why a stage runs: one cause each, for programs as data and for people in a line.

use std::fmt;

use serde::Serialize;

use crate::change::{ArtifactChange, FileChange, files_in_words};
use crate::stage::WorkingState;

/// One reason for a stage to run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub enum Reason {
    /// No run of this pipeline has a result of this stage.
    NeverRan,
    /// A parameter differs from that of the last result.
    Changed {
        /// The field's dotted path.
        field: String,
        /// The value before; `None` where the field is new.
        old: Option<String>,
        /// The value now; `None` where the field is gone.
        new: Option<String>,
        /// Where the field stands, or the mapping that it was taken out of, as `file:line:column`.
        place: Option<String>,
    },
    /// An input is another one than that of the last result.
    InputChanged {
        /// The field that takes it.
        field: String,
        /// The stage that makes it, with the output where it has several.
        input: String,
        /// What in it differs, where both versions are in the store.
        change: Option<ArtifactChange>,
    },
    /// An input has to be made first; should it come out as it was, this stage does not run.
    InputRebuilt {
        /// The stage that makes it, with the output where it has several.
        input: String,
    },
    /// Source files differ.
    SourceChanged {
        /// What they are for, such as `source`.
        role: String,
        /// The files, as paths from the pipeline file's folder.
        files: Vec<FileChange>,
        /// Where the file names them, as `file:line:column`.
        place: Option<String>,
    },
    /// Another version is pinned.
    PinChanged {
        /// The pin's name.
        pin: String,
        /// The version before.
        old: Option<String>,
        /// The version now.
        new: Option<String>,
    },
    /// The version to use is found out when the pipeline runs.
    NotPinned {
        /// The pin's name.
        pin: String,
    },
    /// The stage is of another kind than before, under the same id.
    KindChanged {
        /// The kind before.
        old: String,
        /// The kind now.
        new: String,
    },
    /// This version of the program makes this kind of result in another way.
    VersionRaised {
        /// The kind's version before.
        old: String,
        /// The kind's version now.
        new: String,
    },
    /// The same result was made before, and is no longer whole in the store.
    ResultMissing,
    /// The same result was made before, and nothing of it is left in the store.
    ResultRemoved,
    /// The command line asks for it, though its result is there.
    Forced,
    /// An earlier attempt left working state.
    WorkingState(WorkingState),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |f: &mut fmt::Formatter<'_>, place: &Option<String>| {
            place.as_ref().map_or(Ok(()), |place| write!(f, " ({place})"))
        };
        match self {
            Self::NeverRan => f.write_str("never ran"),
            Self::Changed { field, old, new, place } => {
                write!(f, "{field} {} → {}", value_in_words(old.as_deref()), value_in_words(new.as_deref()))?;
                at(f, place)
            }
            Self::InputChanged { input, change, .. } => {
                write!(f, "input {input} changed")?;
                change
                    .as_ref()
                    .map(ToString::to_string)
                    .filter(|change| !change.is_empty())
                    .map_or(Ok(()), |change| write!(f, " ({change})"))
            }
            Self::InputRebuilt { input } => {
                write!(f, "input {input} is made first (stays cached if it comes out as it was)")
            }
            Self::SourceChanged { files, place, .. } => {
                let several = if files.len() == 1 { "" } else { "s" };
                write!(f, "source file{several} changed: {}", files_in_words(files))?;
                at(f, place)
            }
            Self::PinChanged { pin, old, new } => {
                write!(f, "pin {pin} {} → {}", value_in_words(old.as_deref()), value_in_words(new.as_deref()))
            }
            Self::NotPinned { pin } => write!(f, "{pin} is not pinned yet"),
            Self::KindChanged { old, new } => write!(f, "kind {old} → {new}"),
            Self::VersionRaised { old, new } => write!(f, "version of the stage kind {old} → {new}"),
            Self::ResultMissing => f.write_str("its result is no longer whole in the store"),
            Self::ResultRemoved => f.write_str("its result is no longer in the store"),
            Self::Forced => f.write_str("has a result, and is forced to run"),
            Self::WorkingState(state) => state.fmt(f),
        }
    }
}

/// A value of a key as a person writes it: small numbers with an exponent, as learning rates are, and nothing longer
/// than a line.
pub fn value_in_words(value: Option<&str>) -> String {
    const LONGEST: usize = 60;
    let Some(value) = value else { return "not set".to_owned() };
    if let "{}" | "[]" | "" = value {
        return "empty".to_owned();
    }
    if let Ok(number) = value.parse::<f64>()
        && number != 0.0
        && number.abs() < 1e-3
    {
        return format!("{number:e}");
    }
    // A template has line breaks, and a reason is one line.
    let visible =
        |letter: char| if letter.is_control() { letter.escape_default().to_string() } else { letter.to_string() };
    let value: String = value.chars().map(visible).collect();
    match value.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::Change;

    #[test]
    fn reasons_are_a_line_each() {
        let changed = Reason::Changed {
            field: "optimizer.learning_rate".to_owned(),
            old: Some("0.0001".to_owned()),
            new: Some("0.0002".to_owned()),
            place: Some("xsum_lora.yaml:31:24".to_owned()),
        };
        assert_eq!(changed.to_string(), "optimizer.learning_rate 1e-4 → 2e-4 (xsum_lora.yaml:31:24)");
        let files = vec![FileChange { file: "rows.jsonl".to_owned(), change: Change::Changed }];
        let source = Reason::SourceChanged { role: "source".to_owned(), files, place: Some("f.yaml:5:15".to_owned()) };
        assert_eq!(source.to_string(), "source file changed: rows.jsonl (f.yaml:5:15)");
        let goes_on = WorkingState::GoesOn { unit: "step".to_owned(), done: 6, of: Some(24) };
        assert_eq!(Reason::WorkingState(goes_on).to_string(), "continues from step 6 of 24");
    }

    #[test]
    fn values_are_as_a_person_writes_them() {
        assert_eq!(
            ["0.0001", "0.003", "0", "64", "\"a\""].map(|value| value_in_words(Some(value))),
            ["1e-4", "0.003", "0", "64", "\"a\""]
        );
        assert_eq!(value_in_words(Some(&"x".repeat(100))).chars().count(), 61);
        assert_eq!(value_in_words(Some("Q: {question}\nA: ")), "Q: {question}\\nA: ");
    }
}
