//! Codes of source files: missing, unreadable, found twice, or with rows that are not what the stage takes.

use super::{Example, ProblemCode};
use crate::file::problem::Severity;

pub(super) const CODES: &[ProblemCode] = &[
    ProblemCode {
        code: "file-missing",
        severity: Severity::Error,
        title: "a file is not there",
        meaning: "The pipeline file, or a file that a stage reads, does not exist; or a folder or pattern holds no file. Paths are relative \
            to the folder of the pipeline file.",
        advice: "Check the spelling, and that the path is seen from the pipeline file's folder.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rowz.jsonl } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "file-unreadable",
        severity: Severity::Error,
        title: "a file is there and cannot be read",
        meaning: "The system refuses to read the file or the folder: its permissions, a damaged disk, links that lead back to themselves; \
            or the pipeline file is a folder.",
        advice: "See what the system says; `ls -l` shows permissions and links.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./looped } } # looped/again is a link to looped
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./data } }
",
        },
    },
    ProblemCode {
        code: "file-twice",
        severity: Severity::Error,
        title: "a pattern finds one file twice",
        meaning: "Through a link the pattern finds the same file under two names, and its rows would count twice.",
        advice: "Narrow the pattern, or list the files one by one.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: \"./linked/*.jsonl\" } } # one of them is a link to the other
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./linked/rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "bad-glob",
        severity: Severity::Error,
        title: "a path that is no pattern",
        meaning: "The path holds `*`, `?` or `[` and cannot be read as a pattern of file names.",
        advice: "Close the bracket; `**` stands alone between two slashes. A file whose name really holds such characters is taken as it is.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: \"./data/[a.jsonl\" } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: \"./data/[a-z]*.jsonl\" } }
",
        },
    },
    ProblemCode {
        code: "wrong-rows",
        severity: Severity::Error,
        title: "datasets that cannot be mixed",
        meaning: "`datasets` joins rows of one form: all of them conversations, or plain text, or columns for the same template.",
        advice: "Give the stages that make them the same `template`, and name their columns alike with `column_map`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  chats: { uses: dataset, with: { source: ./chats.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: rows }, { rows: chats }] } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  more: { uses: dataset, with: { source: ./data/rows.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: rows }, { rows: more }] } }
",
        },
    },
];
