//! The command that runs a plan, for what is recorded of a run: who reads that later has no command line to complete it
//! from.

use super::{Plan, Scale};
use crate::file::overrides::COMMAND_LINE;
use crate::home::Home;

impl Plan {
    /// The command that makes a stage's result, as a shell takes it: with the overrides of the plan, and the home where
    /// it is not the one that the file has by itself.
    pub(crate) fn command_until(&self, stage: &str, home: &Home) -> String {
        let file = self.file.display().to_string();
        let home = home.elsewhere().map(|home| home.display().to_string());
        let overrides = self.sources.all().filter(|source| source.name == COMMAND_LINE);
        let mut words = vec!["pipeline", "run", file.as_str()];
        words.extend(overrides.map(|source| source.text.as_str()));
        if self.name.ends_with(Scale::SMOKE_ENDING) {
            words.push("--smoke");
        }
        if let Some(home) = &home {
            words.extend(["--home", home.as_str()]);
        }
        words.extend(["--until", stage]);
        words.into_iter().map(for_shell).collect::<Vec<_>>().join(" ")
    }
}

/// A word as a shell takes it back.
pub fn for_shell(word: &str) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "-_=./:,+@%#".contains(letter);
    // A `#` at the beginning of a word is a comment.
    match !word.is_empty() && !word.starts_with('#') && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}
