//! Codes of values: of the wrong type, out of range, or at odds with each other.

#![allow(unsafe_code, reason = "signals and limits are calls of the C library")]

use super::{Example, ProblemCode};
use crate::file::problem::Severity;

pub(super) const CODES: &[ProblemCode] = &[
    ProblemCode {
        code: "wrong-type",
        severity: Severity::Error,
        title: "a value of another type",
        meaning: "The field takes a number, a text, a list …, and the value is something else. Quotes make a text: `\"512\"` is no number. \
            `yes`, `no`, `on` and `off` are texts in YAML 1.2.",
        advice: "Write a value of the type that is named.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, limit: \"10\" } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, limit: 10 } }
",
        },
    },
    ProblemCode {
        code: "out-of-range",
        severity: Severity::Error,
        title: "a number that is too small or too large",
        meaning: "The field takes numbers within bounds, and the value lies outside them.",
        advice: "Take a number within the bounds that are named.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, limit: 0 } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, limit: 1 } }
",
        },
    },
    ProblemCode {
        code: "bad-option",
        severity: Severity::Error,
        title: "an option that cannot be passed to the cluster",
        meaning: "`executor.slurm.options` takes further options of `sbatch`, each with its value as one text. Those that the program needs to \
            find, hear and stop its jobs (`--output`, `--job-name`, `--array`, `--wrap` …) are its own.",
        advice: "Leave it out, or write it with its dashes.",
        example: Example::File {
            wrong: "\
version: 1
executor: { slurm: { options: [--array=1-4] } }
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
executor: { slurm: { options: [--exclusive] } }
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "bad-remote",
        severity: Severity::Error,
        title: "not the address of a shared cache",
        meaning: "`remote:` takes `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `file:///folder` or a folder, and \
            settings that this kind of place has. Keys and signatures are refused: a pipeline file is for everybody to read.",
        advice: "Write the place alone. Credentials are taken from the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`).",
        example: Example::File {
            wrong: "\
version: 1
remote: https://bucket.s3.amazonaws.com/team
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
            right: "\
version: 1
remote: s3://bucket/team
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
",
        },
    },
    ProblemCode {
        code: "unknown-value",
        severity: Severity::Error,
        title: "not one of the values to choose from",
        meaning: "The field takes one of a few names, and this is none of them.",
        advice: "Take one of the names that are given.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, on_bad_row: skip } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, on_bad_row: drop } }
",
        },
    },
    ProblemCode {
        code: "bad-value",
        severity: Severity::Error,
        title: "a value that cannot be read, or cannot stand here",
        meaning: "The value has the right type and does not read as what it should be (a split, a length of time, a template, an \
            expression), or another value of the same stage leaves no sense to it.",
        advice: "Write it in the form that is named, or leave out one of the two values.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, split: \"train[:10\" } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl, split: \"train[:10]\" } }
",
        },
    },
    ProblemCode {
        code: "wrong-option",
        severity: Severity::Error,
        title: "an option that belongs to another choice",
        meaning: "Optimizers and schedules have options of their own, and this one belongs to another: `momentum` to `sgd`, `num_cycles` to \
            cosine schedules. `loss_scale` belongs to f16.",
        advice: "Leave it out, or make the choice that it belongs to; the options of the present one are given.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter:
    uses: train
    with: { model: base, data: tokens, optimizer: { name: adamw, momentum: 0.9 } }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  tokens: { uses: tokenize, with: { dataset: rows, tokenizer: base } }
  adapter:
    uses: train
    with: { model: base, data: tokens, optimizer: { name: sgd, momentum: 0.9 } }
",
        },
    },
    ProblemCode {
        code: "bad-source",
        severity: Severity::Error,
        title: "`download` cannot tell what to bring",
        meaning: "`download` takes either `repo:` (a model on the Hub, `owner/name`) or `path:` (a folder on this machine), and patterns of \
            file names.",
        advice: "Give one of the two, a name as the Hub has it, and patterns such as `*.json`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: ./checkpoint } }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
",
        },
    },
    ProblemCode {
        code: "bad-shape",
        severity: Severity::Error,
        title: "a model of this shape cannot be built",
        meaning: "The sizes of `new_model` do not go together: the hidden size has to be divided among the attention heads, and those among \
            the key and value heads.",
        advice: "Choose a `hidden_size` that `num_attention_heads` divides, and heads that `num_key_value_heads` divides.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  base:
    uses: new_model
    with:
      text: rows
      vocab_size: 300
      hidden_size: 100
      intermediate_size: 64
      num_hidden_layers: 1
      num_attention_heads: 3
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  base:
    uses: new_model
    with:
      text: rows
      vocab_size: 300
      hidden_size: 96
      intermediate_size: 64
      num_hidden_layers: 1
      num_attention_heads: 3
",
        },
    },
    ProblemCode {
        code: "unsafe-target",
        severity: Severity::Error,
        title: "a folder that publishing would take along",
        meaning: "`publish:` replaces a folder as a whole. This one is, holds or lies in the pipeline file, a file that it includes, the home, \
            the shared cache, another target, or something that a stage of the file reads (`source`, `path`, `files`). Folders are compared \
            by the places that they really are: links, `..` and absolute paths are other spellings. `--overwrite` changes nothing about it.",
        advice: "Publish to a folder of its own, such as `./out/model`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./data/rows.jsonl } }
publish: { rows: ./data }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./data/rows.jsonl } }
publish: { rows: ./out/rows }
",
        },
    },
    ProblemCode {
        code: "target-taken",
        severity: Severity::Warning,
        title: "a folder to publish to that others made or changed",
        meaning: "Something is there already that this program did not put there, or no longer what it put there. A run refuses it before it \
            begins (then this is an error), unless it may replace it (`--overwrite`).",
        advice: "Move it away, publish to another folder, or run with `--overwrite`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
publish: { rows: ./notes.md }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
publish: { rows: ./out/rows }
",
        },
    },
    ProblemCode {
        code: "duplicate-path",
        severity: Severity::Error,
        title: "two targets are published to one place",
        meaning: "A published folder is replaced as a whole, so that two targets cannot share one, nor one lie inside the other.",
        advice: "Give each target a folder of its own.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
publish: { base.model: ./out, base.tokenizer: ./out/tokenizer }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
publish: { base.model: ./out/model, base.tokenizer: ./out/tokenizer }
",
        },
    },
    ProblemCode {
        code: "never-fits",
        severity: Severity::Error,
        title: "a stage takes more slots than there are",
        meaning: "`resources.slots` of a stage asks for more of a slot than `slots:` of the file says there are, so that the stage could \
            never start.",
        advice: "Lower what the stage takes, or raise the number; `--slots NAME=COUNT` raises it for one run.",
        example: Example::File {
            wrong: "\
version: 1
slots: { license: 1 }
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { slots: { license: 2 } }
",
            right: "\
version: 1
slots: { license: 2 }
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { slots: { license: 2 } }
",
        },
    },
    ProblemCode {
        code: "no-effect",
        severity: Severity::Warning,
        title: "a value that changes nothing here",
        meaning: "What is said is read and has no effect: `resources.count` above 1 for a kind of stage that computes on one device; \
            `system_prompt` or `chat_template` where nothing is a conversation.",
        advice: "Leave it out, so that nobody counts on it.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    resources: { count: 2 }
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
        code: "older-name",
        severity: Severity::Warning,
        title: "an older name of a value",
        meaning: "The value is understood and has a newer name: `dtype: int8` and `dtype: int4` of `generate` and `evaluate` are \
            `quantize: int8` and `quantize: int4`, since they are how weights are stored and not a dtype.",
        advice: "Write the newer name. Both have the same key, so that what is cached stays so.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
  samples:
    uses: generate
    with: { model: base, prompts: [Hello], dtype: int8 }
",
            right: "\
version: 1
stages:
  base: { uses: download, with: { repo: owner/name } }
  samples:
    uses: generate
    with: { model: base, prompts: [Hello], quantize: int8 }
",
        },
    },
];
