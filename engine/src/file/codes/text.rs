//! Codes of the text itself: what keeps it from being read as one YAML document of a sensible size.

use super::{Example, ProblemCode};
use crate::file::parse::MAX_BYTES;
use crate::file::problem::Severity;

pub(super) const CODES: &[ProblemCode] = &[
    ProblemCode {
        code: "syntax",
        severity: Severity::Error,
        title: "the file is not YAML",
        meaning: "The text cannot be read as YAML 1.2: a bracket or quote that is not closed, a tab in the indentation, keys of one \
            mapping that begin in different columns, an alias without its anchor. Nothing else can be said of the file until it can be read.",
        advice: "Look at the place and the line before it. Texts that hold `: `, ` #`, or begin with `*`, `&`, `!`, `%`, `@`, `[` or `{` \
            need quotes; indentation is spaces.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl
",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
",
        },
    },
    ProblemCode {
        code: "not-utf8",
        severity: Severity::Error,
        title: "the file is not UTF-8",
        meaning: "A byte of the file belongs to no character of UTF-8. Editors on Windows may save in another encoding.",
        advice: "Save the file as UTF-8, or convert it: `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`.",
        example: Example::Made {
            told: "`name: caf\\xe9`, saved in Latin-1",
            wrong: || {
                b"version: 1\nname: caf\xe9\nstages:\n  rows: { uses: dataset, with: { source: ./rows.jsonl } }\n"
                    .to_vec()
            },
            right: "\
version: 1
name: café
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "empty-file",
        severity: Severity::Error,
        title: "the file holds nothing",
        meaning: "There is no value in the file: it is empty, or all of it is comments.",
        advice: "Begin with `version: 1` and `stages:`; `pipelines/quickstart.yaml` is a file to copy.",
        example: Example::File {
            wrong: "# to be written\n",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
",
        },
    },
    ProblemCode {
        code: "not-a-mapping",
        severity: Severity::Error,
        title: "the file holds a list or a single value",
        meaning: "A pipeline file is a mapping of `version`, `stages` and a few more keys.",
        advice: "Put what the file holds under `stages:`, each stage under an id of its own.",
        example: Example::File {
            wrong: "\
- uses: dataset
  with: { source: ./rows.jsonl }
",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
",
        },
    },
    ProblemCode {
        code: "second-document",
        severity: Severity::Error,
        title: "the file holds two documents",
        meaning: "A line `---` begins another YAML document, and one file is one pipeline.",
        advice: "Remove the `---`, or make two files.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
---
version: 1
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "duplicate-key",
        severity: Severity::Error,
        title: "a key is set twice",
        meaning: "The same key stands twice in one mapping. YAML readers that take the last one, or the first, hide such a mistake.",
        advice: "Remove one of the two; both places are shown.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
    uses: dataset
    with:
      source: ./rows.jsonl
      split: train
      split: train[:10]
",
            right: "\
version: 1
stages:
  rows:
    uses: dataset
    with:
      source: ./rows.jsonl
      split: train[:10]
",
        },
    },
    ProblemCode {
        code: "merge-key",
        severity: Severity::Error,
        title: "`<<` merges a mapping into another",
        meaning: "Merge keys were a proposal for YAML 1.1 and are no part of YAML 1.2.",
        advice: "Write the keys out, or give the whole mapping by an alias: `with: *defaults`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: &defaults { source: ./rows.jsonl } }
  few: { uses: dataset, with: { <<: *defaults, source: ./data/rows.jsonl } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  few: { uses: dataset, with: { source: ./data/rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "bad-key",
        severity: Severity::Error,
        title: "a key is a list or a mapping",
        meaning: "YAML allows any value as a key; here every key is a text. A `{` without quotes is often meant as a text.",
        advice: "Write the key as a text, in quotes where it holds brackets.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  few: { uses: dataset, with: { source: ./rows.jsonl, limit: 1 } }
  [rows]: { uses: dataset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
stages:
  few: { uses: dataset, with: { source: ./rows.jsonl, limit: 1 } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "unknown-tag",
        severity: Severity::Error,
        title: "a tag of YAML that is not read",
        meaning: "A value that begins with `!` is a tag, such as those of CloudFormation or Python loaders. None of them is read.",
        advice: "Remove the tag; put a text that begins with `!` in quotes.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: !path ./rows.jsonl } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "too-large",
        severity: Severity::Error,
        title: "the file is too large",
        meaning: "A pipeline file has at most 1 MiB and 250,000 values, references written out: what is larger is most often data that \
            was passed by mistake.",
        advice: "Is it the right file? Data belongs into files of its own, which `source:` names.",
        example: Example::Made {
            told: "a file of more than 1 MiB",
            wrong: || format!("version: 1\n{}", "#".repeat(MAX_BYTES)).into_bytes(),
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "too-deep",
        severity: Severity::Error,
        title: "values nest too deep",
        meaning: "Mappings and lists nest deeper than 64 levels, which no pipeline needs.",
        advice: "Look for brackets that were not meant.",
        example: Example::Made {
            told: "a hundred brackets, one inside the other",
            wrong: || format!("version: 1\nvars: {{ x: {}{} }}\n", "[".repeat(100), "]".repeat(100)).into_bytes(),
            right: "\
version: 1
vars: { x: [./rows.jsonl] }
stages:
  rows: { uses: dataset, with: { source: \"${vars.x}\" } }
",
        },
    },
    ProblemCode {
        code: "too-many-aliases",
        severity: Severity::Error,
        title: "aliases stand for too many values",
        meaning: "Aliases (`*name`) are written out when the file is read; aliases of aliases multiply, and a few lines can stand for \
            billions of values. At most 100,000 are written out.",
        advice: "Write the values out, or use variables.",
        example: Example::Made {
            told: "six lists, each of ten aliases of the one before",
            wrong: alias_bomb,
            right: "\
version: 1
vars: { a: &a [./rows.jsonl] }
stages:
  rows: { uses: dataset, with: { source: \"${vars.a}\" } }
  same: { uses: dataset, with: { source: *a } }
",
        },
    },
];

fn alias_bomb() -> Vec<u8> {
    let mut text = "version: 1\nvars:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..7 {
        let aliases = vec![format!("*a{}", level - 1); 10].join(", ");
        text += &format!("  a{level}: &a{level} [{aliases}]\n");
    }
    text.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::super::all;

    #[test]
    fn codes_are_names_and_stand_once() {
        let codes: Vec<&str> = all().map(|code| code.code).collect();
        assert!(codes.windows(2).all(|pair| pair[0] < pair[1]), "{codes:?}");
        let is_name =
            |code: &&str| code.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        assert!(codes.iter().all(is_name), "{codes:?}");
    }

    #[test]
    fn what_is_told_is_made_of_sentences() {
        for code in all() {
            assert!(code.meaning.ends_with('.') && code.advice.ends_with(['.', '?']), "{}", code.code);
            assert!(!code.title.ends_with('.'), "{}", code.code);
        }
    }
}
