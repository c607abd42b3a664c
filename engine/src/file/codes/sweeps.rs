//! Codes of sweeps and conditions.

use super::{Example, ProblemCode};
use crate::file::problem::Severity;

pub(super) const CODES: &[ProblemCode] = &[
    ProblemCode {
        code: "axis-mismatch",
        severity: Severity::Error,
        title: "two axes of one name with different values",
        meaning: "A stage reads two stages that are swept over axes of the same name, which is one axis, and their values are not the same; \
            or the children of a stage would not all have the same axes.",
        advice: "Give both the same values; or name one child, `stage[axis=value]`; or give one axis a name of its own and put \
            `${matrix.name}` where its value goes.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  a: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { seed: [1, 2] } }
  b: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { seed: [1, 3] } }
  both: { uses: dataset, with: { datasets: [{ rows: a }, { rows: b }] } }
",
            right: "\
version: 1
stages:
  a: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { seed: [1, 2] } }
  b: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { seed: [1, 2] } }
  both: { uses: dataset, with: { datasets: [{ rows: a }, { rows: b }] } }
",
        },
    },
    ProblemCode {
        code: "bad-condition",
        severity: Severity::Error,
        title: "a `when:` that is no condition",
        meaning: "A condition is a variable that is true or false, or compares values with `==` and `!=`, joined by `and`, `or`, `not` and \
            parentheses. Values of different types are never compared.",
        advice: "Write `when: ${vars.x}`, or compare: `when: ${vars.size} == large and not ${env.CI}`.",
        example: Example::File {
            wrong: "\
version: 1
vars: { size: large }
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl }, when: \"${vars.size}\" }
",
            right: "\
version: 1
vars: { size: large }
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl }, when: \"${vars.size} == large\" }
",
        },
    },
    ProblemCode {
        code: "bad-matrix",
        severity: Severity::Error,
        title: "a `matrix:` that gives no combination",
        meaning: "An axis has no values, or one of them twice, or a name that is none; a combination under `include:` lacks an axis; or \
            nothing is left once `exclude:` is done.",
        advice: "An axis is the path of a parameter with a list of values: `matrix: { lora.rank: [4, 8] }`.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { seed: [1, 1] } }
",
            right: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { seed: [1, 2] } }
",
        },
    },
    ProblemCode {
        code: "measurement",
        severity: Severity::Error,
        title: "what is read is the same in all children",
        meaning: "An axis over something that changes no result, such as `resources.threads`, makes each child a measurement: all of them \
            make the same, and only their metrics can be read by other stages.",
        advice: "Read the metrics, or declare a stage like it without the axis to go on from.",
        example: Example::File {
            wrong: "\
version: 1
stages:
  rows: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { resources.threads: [1, 2] } }
  all: { uses: dataset, with: { datasets: [{ rows: rows }] } }
",
            right: "\
version: 1
stages:
  timed: { uses: dataset, with: { source: ./rows.jsonl }, matrix: { resources.threads: [1, 2] } }
  rows: { uses: dataset, with: { source: ./rows.jsonl } }
  all: { uses: dataset, with: { datasets: [{ rows: rows }] } }
",
        },
    },
    ProblemCode {
        code: "too-many-stages",
        severity: Severity::Error,
        title: "a sweep with more children than can be run",
        meaning: "The axes of a matrix, or those of the stages that one reads, make more than 2000 children of a stage.",
        advice: "Shorten an axis, or list the combinations that matter under `include:`.",
        example: Example::File {
            wrong: "\
version: 1
vars: { many: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] }
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    matrix: { seed: \"${vars.many}\", limit: \"${vars.many}\", resources.threads: \"${vars.many}\" }
",
            right: "\
version: 1
vars: { many: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] }
stages:
  rows:
    uses: dataset
    with: { source: ./rows.jsonl }
    matrix: { seed: \"${vars.many}\", resources.threads: \"${vars.many}\" }
",
        },
    },
];
