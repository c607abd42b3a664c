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
        code: "unreadable-rows",
        severity: Severity::Error,
        title: "a file that cannot be read as rows",
        meaning: "The file has an extension that no reader knows, or is not what its extension says: a Parquet file without its end, \
            text that is no JSON, UTF-16.",
        advice: "Mend the file or make it anew; `docs/stages/dataset.md` lists the forms. `download` with `as: files` takes anything.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./notes.md } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "unclear-rows",
        severity: Severity::Error,
        title: "what a row is cannot be told",
        meaning: "The data has neither `messages`, nor `text`, nor `input` and `output`, and nothing says which of its columns is what.",
        advice: "Name the columns: `template:` for what the prompt looks like, and `column_map:` for where its parts come from.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./questions.jsonl } }
",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./questions.jsonl, template: question_answer, column_map: { output: answer } }
",
        },
    },
    ProblemCode {
        code: "unknown-column",
        severity: Severity::Error,
        title: "a column that the data does not have",
        meaning: "The template, `column_map` or an expression asks for a column, and the first rows of the file, or its header, have none of \
            that name.",
        advice: "Take one of the columns that are named; `column_map: { name of the template: column of the data }` says which is which.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./questions.jsonl, template: question_answer, column_map: { output: anwser } }
",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./questions.jsonl, template: question_answer, column_map: { output: answer } }
",
        },
    },
    ProblemCode {
        code: "bad-row",
        severity: Severity::Error,
        title: "a row that cannot be used",
        meaning: "One of the first rows is none: no object, a column that is missing or holds no text, turns in no order that a conversation \
            has, or `filter` and `map` cannot be worked out on it. With `on_bad_row: error`, which is the default, the stage would fail there.",
        advice: "Mend the data, make text of the column with `map`, or leave such rows out with `on_bad_row: drop`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./counts.jsonl } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./counts.jsonl, map: { output: \"{{ output }}\" } } }
",
        },
    },
    ProblemCode {
        code: "bad-checkpoint",
        severity: Severity::Error,
        title: "a folder or repository that is no checkpoint",
        meaning: "The source of `download` lacks what a model or an adapter needs (`config.json`, safetensors weights, `tokenizer.json`), its \
            configuration describes a model that is not computed here, a file is a git-LFS pointer, or a file of weights is not as long as \
            its header says.",
        advice: "Name the folder that holds `config.json`; convert pickled weights to safetensors; `git lfs pull` in a clone, or fetch the file \
            anew; docs/models.md lists the families.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { path: ./data } }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { path: ./data, as: files } }
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
