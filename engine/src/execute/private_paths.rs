//! The folders that a stage process has for itself: they are gone when somebody reads what it said, so its words name
//! files without them.

use crate::error::Failure;
use crate::protocol::{Job, WorkerEvent};

/// The beginnings of private paths, the longest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct PrivatePaths(Vec<String>);

impl PrivatePaths {
    /// Those of a job.
    pub(crate) fn of(job: &Job) -> Self {
        let folders = [job.inputs_folder.clone(), job.staging.join("outputs"), job.staging.clone()];
        Self(folders.iter().map(|folder| format!("{}/", folder.display())).collect())
    }

    /// A text without them: `tokens.tokens/part-00000.parquet` is what is left of an input's file.
    pub(crate) fn hide(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, folder| text.replace(folder, ""))
    }

    /// A message without them.
    pub(crate) fn hide_in(&self, event: WorkerEvent) -> WorkerEvent {
        match event {
            WorkerEvent::Warning { message } => WorkerEvent::Warning { message: self.hide(&message) },
            WorkerEvent::Note { message } => WorkerEvent::Note { message: self.hide(&message) },
            WorkerEvent::Report { text, level } => WorkerEvent::Report { text: self.hide(&text), level },
            WorkerEvent::Failed(failure) => WorkerEvent::Failed(Failure {
                messages: failure.messages.iter().map(|message| self.hide(message)).collect(),
                help: failure.help.map(|help| self.hide(&help)),
                ..failure
            }),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_names_the_file() {
        let staging = "/home/.pipeline/store/staging/4f1c";
        let paths = ["inputs", "outputs"].map(|folder| format!("{staging}/{folder}/")).into_iter();
        let paths = PrivatePaths(paths.chain([format!("{staging}/")]).collect());
        let said = |text: &str| paths.hide(&text.replace('~', staging));
        assert_eq!(said("cannot use `~/inputs/tokens.tokens/a.parquet`"), "cannot use `tokens.tokens/a.parquet`");
        assert_eq!(said("`~/outputs/packs/a` and `~/scratch/b`"), "`packs/a` and `scratch/b`");
        assert_eq!(said("`/elsewhere/staging/a`"), "`/elsewhere/staging/a`");
    }
}
