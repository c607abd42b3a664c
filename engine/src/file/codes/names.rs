//! Codes of names: keys, kinds, stages, outputs and variables that are not there, and what they refer to.

use super::{Example, ProblemCode};
use crate::file::problem::Severity;

pub(super) const CODES: &[ProblemCode] = &[
    ProblemCode {
        code: "unknown-key",
        severity: Severity::Error,
        title: "a key that is not known here",
        meaning: "Every mapping of a pipeline file has a fixed set of keys; one that is not read would change nothing, in silence. It is \
            also said of an entry of `column_map` that the template has no place for.",
        advice: "Take the nearest name, if one is given. `pipeline schema` gives editors the known keys, and docs/stages/ describes them.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { soruce: ./rows.jsonl, source: ./rows.jsonl }
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
        code: "missing-key",
        severity: Severity::Error,
        title: "a required key is missing, or has no value",
        meaning: "The mapping lacks a key that has no default; a key without a value counts as missing. It is also said where one key asks \
            for another: `keep_best` for `validation`.",
        advice: "Add the key, with its value.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
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
        code: "no-stages",
        severity: Severity::Error,
        title: "the pipeline has no stages",
        meaning: "`stages:` is an empty mapping, so there is nothing to run.",
        advice: "Declare a stage.",
        example: Example::File {
            wrong: "\
version: 1
stages: {}
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "unknown-version",
        severity: Severity::Error,
        title: "a version of the form that this program cannot read",
        meaning: "`version:` says which form the file has, and this program reads version 1.",
        advice: "Write `version: 1`; a file of a later version needs a later program.",
        example: Example::File {
            wrong: "\
version: 2
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "bad-stage-id",
        severity: Severity::Error,
        title: "a name that no stage can have",
        meaning: "A stage's id is part of folder names and of references, where a dot ends it.",
        advice: "Use letters, digits, `_` and `-`, 100 of them at most.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  \"my rows\": { uses: dataset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
stages:
  my_rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "unknown-kind",
        severity: Severity::Error,
        title: "a stage kind that does not exist",
        meaning: "`uses:` names the kind of work of a stage, and this program has none of that name.",
        advice: "Take the nearest name, if one is given; docs/stages/ has a page for each kind.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: datset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "unknown-stage",
        severity: Severity::Error,
        title: "a stage that is not declared",
        meaning: "A field that takes an artefact, `needs:`, `publish:` or an override names a stage that `stages:` does not have.",
        advice: "Take the nearest id, if one is given, or declare the stage. Where a field takes literals or a stage, a plain text is a \
            stage: write a list for literals.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: row }] } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: rows }] } }
",
        },
    },
    ProblemCode {
        code: "unknown-slot",
        severity: Severity::Error,
        title: "a slot that is not declared",
        meaning: "`resources.slots` of a stage names something that `slots:` of the file does not say the number of.",
        advice: "Take the nearest name, if one is given, or say under `slots:` how many there are.",
        example: Example::File {
            wrong: "\
version: 1
slots: { license: 1 }
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { slots: { licence: 1 } }
",
            right: "\
version: 1
slots: { license: 1 }
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { slots: { license: 1 } }
",
        },
    },
    ProblemCode {
        code: "unknown-output",
        severity: Severity::Error,
        title: "an output that the stage does not make",
        meaning: "A reference `stage.output` names an output that the stage, with its present parameters, does not have: `train_test_split` \
            makes `train` and `test` in the place of `rows`.",
        advice: "Take one of the outputs that are named; mostly the stage's id alone is enough.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: rows.train }] } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: rows }] } }
",
        },
    },
    ProblemCode {
        code: "ambiguous-output",
        severity: Severity::Error,
        title: "more than one output fits",
        meaning: "A stage's id alone means its only output of a kind that the field takes; here there are two. `publish:` takes any kind.",
        advice: "Name the output: `stage.output`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
publish: { base: ./out }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
publish: { base.model: ./out }
",
        },
    },
    ProblemCode {
        code: "wrong-kind",
        severity: Severity::Error,
        title: "a stage that makes something else than the field takes",
        meaning: "Each input takes artefacts of certain kinds (rows, tokens, packs, a model …), and the stage that is named makes others.",
        advice: "Name a stage that makes the kind; those of the file that do are given. Between rows and training stand `tokenize` and `pack`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  adapter: { uses: train, with: { model: base, data: rows } }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter: { uses: train, with: { model: base, data: tokens } }
",
        },
    },
    ProblemCode {
        code: "cycle",
        severity: Severity::Error,
        title: "stages wait for each other",
        meaning: "A stage runs when all it reads is there; following `with:` and `needs:` from stage to stage leads back to the first. The \
            whole way round is shown.",
        advice: "Take out one of the steps that are shown.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  one: { uses: dataset, with: { datasets: [{ rows: two }] } }
  two: { uses: dataset, with: { datasets: [{ rows: one }] } }
",
            right: "\
version: 1
stages:
  one: { uses: dataset, with: { source: ./rows.jsonl } }
  two: { uses: dataset, with: { datasets: [{ rows: one }] } }
",
        },
    },
    ProblemCode {
        code: "bad-reference",
        severity: Severity::Error,
        title: "`${…}` that refers to nothing",
        meaning: "`${` begins a reference to a variable of the file or of the environment, and this is neither, or nothing closes it.",
        advice: "Write `${vars.NAME}` or `${env.NAME}`; `$${` stands for the characters `${`.",
        example: Example::File {
            wrong: "\
version: 1
vars: { file: ./rows.jsonl }
stages:
  rows: { uses: dataset, with: { source: \"${file}\" } }
",
            right: "\
version: 1
vars: { file: ./rows.jsonl }
stages:
  rows: { uses: dataset, with: { source: \"${vars.file}\" } }
",
        },
    },
    ProblemCode {
        code: "unknown-variable",
        severity: Severity::Error,
        title: "a variable that is not there",
        meaning: "`${vars.x}` is not declared under `vars:` above its use, `${env.X}` is not set in the environment, or an override sets a \
            variable that the file does not declare. Or a stage that has no result yet takes an environment variable (`pass_env`, `token_env`) \
            that is not set.",
        advice: "Declare it, or set it where the program is started: `X=… pipeline run FILE`.",
        example: Example::File {
            wrong: "\
version: 1
vars: { file: ./rows.jsonl }
stages:
  rows: { uses: dataset, with: { source: \"${vars.flie}\" } }
",
            right: "\
version: 1
vars: { file: ./rows.jsonl }
stages:
  rows: { uses: dataset, with: { source: \"${vars.file}\" } }
",
        },
    },
    ProblemCode {
        code: "unused-variable",
        severity: Severity::Warning,
        title: "a variable that nothing refers to",
        meaning: "Changing it changes nothing, which is seldom meant: perhaps a value was written out where the variable should stand.",
        advice: "Refer to it as `${vars.NAME}`, or remove it.",
        example: Example::File {
            wrong: "\
version: 1
vars: { file: ./rows.jsonl }
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
vars: { file: ./rows.jsonl }
stages:
  rows: { uses: dataset, with: { source: \"${vars.file}\" } }
",
        },
    },
    ProblemCode {
        code: "secret-in-file",
        severity: Severity::Error,
        title: "a secret would be written down",
        meaning: "`${env.X}` puts the value into keys, logs and the store, and a variable with TOKEN, KEY, SECRET or PASSWORD in its name \
            holds a secret.",
        advice: "Leave it out: what needs a secret reads it from the environment itself, the Hub its HF_TOKEN.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name, revision: \"${env.HF_TOKEN}\" } }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name, revision: main } }
",
        },
    },
    ProblemCode {
        code: "bad-override",
        severity: Severity::Error,
        title: "an argument that is no override",
        meaning: "What follows the file on the command line changes a value of it: `stage.path=value`. Here is no `=`, or an empty name.",
        advice: "Write `stage.path=value`, `vars.name=value`, `name=value` or `publish.target=folder`.",
        example: Example::Override { wrong: "rows.split", right: "rows.split=train[:1]" },
    },
    ProblemCode {
        code: "bad-index",
        severity: Severity::Error,
        title: "an override of an item that the list does not have",
        meaning: "A number in an override's path counts the items of a list from 0; the number behind the last item adds one.",
        advice: "Take a number within the list, or set the list as a whole: `'rows.source=[a.jsonl, b.jsonl]'`.",
        example: Example::Override {
            wrong: "rows.source.7=./data/rows.jsonl",
            right: "rows.source.1=./data/rows.jsonl",
        },
    },
];
