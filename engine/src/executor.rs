//! `executor:` in a pipeline file: where the processes of stages run, on this machine or as jobs of a Slurm cluster.
//!
//! It leaves to others: how they are run there ([`crate::execute`]). Nothing of it is part of a key.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::file::problem::Problem;
use crate::file::tree::{Node, Value};
use crate::parameter::{ByteSize, Fields, Json, KeyWriter, Limits, Parameter, Parameters, Period, Reader};

/// Where the processes of stages run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Parameters)]
#[serde(rename_all = "snake_case")]
pub enum ExecutorKind {
    /// On this machine.
    #[default]
    Local,
    /// Each as a job of a Slurm cluster.
    Slurm,
}

/// What `executor:` says, of the file or of one stage.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExecutorSettings {
    /// Where, if it says so.
    pub kind: Option<ExecutorKind>,
    /// What to ask of a cluster.
    pub slurm: SlurmSettings,
}

/// What to ask of a Slurm cluster. The keys are the long options of `sbatch`, with `_` for `-`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Parameters)]
pub struct SlurmSettings {
    /// The partition, or several with commas between them.
    #[cosmetic]
    pub partition: Option<String>,
    /// Who is charged.
    #[cosmetic]
    pub account: Option<String>,
    /// The quality of service.
    #[cosmetic]
    pub qos: Option<String>,
    /// The longest that a job may run, such as `12h`; without it the stage's `timeout`, or the partition's own.
    #[cosmetic]
    pub time: Option<Period>,
    /// What the cluster calls its devices: `gpu:h200` gets the number that the stage asks for, `gpu:h200:2` is asked
    /// for as it is.
    #[cosmetic]
    pub gres: Option<String>,
    /// Features that the nodes must have, such as `a100|h100`.
    #[cosmetic]
    pub constraint: Option<String>,
    /// Nodes, where `resources.nodes` does not say.
    #[cosmetic(range = 1..)]
    pub nodes: Option<u32>,
    /// Memory on each node, where `resources.memory` does not say.
    #[cosmetic]
    pub mem: Option<ByteSize>,
    /// CPUs, where `resources.threads` does not say.
    #[cosmetic(range = 1..)]
    pub cpus_per_task: Option<usize>,
    /// Further options of `sbatch`, such as `--exclusive` or `--reservation=tuesday`.
    #[cosmetic(default)]
    pub options: Vec<String>,
    /// How often the queue is asked at most; 10 s if left out.
    #[cosmetic]
    pub poll: Option<Period>,
}

/// Options of `sbatch` that would take from the program what it needs to follow a job.
const RESERVED: [(&str, &str); 15] = [
    ("--array", "-a"),
    ("--chdir", "-D"),
    ("--error", "-e"),
    ("--export-file", ""),
    ("--help", "-h"),
    ("--input", "-i"),
    ("--job-name", "-J"),
    ("--kill-on-invalid-dep", ""),
    ("--open-mode", ""),
    ("--output", "-o"),
    ("--parsable", ""),
    ("--signal", ""),
    ("--test-only", ""),
    ("--wait", "-W"),
    ("--wrap", ""),
];

/// How often the queue is asked where the file does not say.
const POLL: Duration = Duration::from_secs(10);

impl ExecutorSettings {
    /// Where a stage runs, and with which settings: `self` is what the stage says, `file` what the file does, `forced`
    /// the command line. A stage that is to stay on this machine stays there.
    pub fn resolve(&self, file: &Self, forced: Option<ExecutorKind>) -> (ExecutorKind, SlurmSettings) {
        let own = self.kind;
        let kind = match forced {
            Some(ExecutorKind::Local) => ExecutorKind::Local,
            Some(ExecutorKind::Slurm) => own.unwrap_or(ExecutorKind::Slurm),
            None => own.or(file.kind).unwrap_or_default(),
        };
        (kind, self.slurm.over(&file.slurm))
    }
}

impl SlurmSettings {
    /// These, and where they say nothing those of `below`. Further options are added to those.
    pub fn over(&self, below: &Self) -> Self {
        let text = |own: &Option<String>, below: &Option<String>| own.clone().or_else(|| below.clone());
        Self {
            partition: text(&self.partition, &below.partition),
            account: text(&self.account, &below.account),
            qos: text(&self.qos, &below.qos),
            time: self.time.or(below.time),
            gres: text(&self.gres, &below.gres),
            constraint: text(&self.constraint, &below.constraint),
            nodes: self.nodes.or(below.nodes),
            mem: self.mem.or(below.mem),
            cpus_per_task: self.cpus_per_task.or(below.cpus_per_task),
            options: below.options.iter().chain(&self.options).cloned().collect(),
            poll: self.poll.or(below.poll),
        }
    }

    /// How often the queue is asked at most.
    pub fn poll(&self) -> Duration {
        self.poll.map_or(POLL, |poll| poll.0)
    }
}

impl Parameter for ExecutorSettings {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::Map(_) => read_mapping(node, reader),
            Value::List(_) => {
                reader.wrong_type(node, "`local`, `slurm`, or a mapping with `slurm`");
                None
            }
            _ => Some(Self { kind: Some(ExecutorKind::read(node, reader)?), slurm: SlurmSettings::default() }),
        }
    }

    /// Where a result is made does not decide what it is.
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        let mut uses = ExecutorKind::schema();
        uses["description"] = "Which of them is used; `slurm` if left out.".into();
        serde_json::json!({ "anyOf": [
            ExecutorKind::schema(),
            {
                "type": "object",
                "properties": { "use": uses, "slurm": SlurmSettings::schema() },
                "additionalProperties": false,
            },
        ] })
    }
}

fn read_mapping(node: &Node, reader: &mut Reader) -> Option<ExecutorSettings> {
    let mut fields = Fields::of(node, reader, &["use", "slurm"])?;
    let kind = fields.required::<Option<ExecutorKind>>("use", &Limits::NONE)?;
    let slurm = fields.or_default("slurm", &Limits::NONE, SlurmSettings::default)?;
    let options = node.get("slurm").and_then(|slurm| slurm.get("options"));
    let problems = options.map(wrong_options).unwrap_or_default();
    let sound = problems.is_empty();
    reader.problems.extend(problems);
    sound.then_some(ExecutorSettings { kind: Some(kind.unwrap_or(ExecutorKind::Slurm)), slurm })
}

/// What is wrong with further options.
fn wrong_options(options: &Node) -> Vec<Problem> {
    let Value::List(items) = &options.value else { return Vec::new() };
    items.iter().filter_map(wrong_option).collect()
}

fn wrong_option(node: &Node) -> Option<Problem> {
    let Value::String(text) = &node.value else { return None };
    let name = text.split(['=', ' ']).next().unwrap_or_default();
    if !text.starts_with('-') {
        let message = format!("`{text}` is not an option of `sbatch`");
        return Some(
            Problem::error("bad-option", node.span, message, "does not begin with `-`")
                .with_help("write each option with its value as one string: `--reservation=tuesday`"),
        );
    }
    let is_short = |short: &str| !name.starts_with("--") && !short.is_empty() && name.starts_with(short);
    let reserved = RESERVED.iter().any(|(long, short)| name == *long || is_short(short));
    reserved.then(|| {
        let message = format!("`{name}` cannot be set: the program needs it to follow its jobs");
        Problem::error("bad-option", node.span, message, "set by the program itself").with_help("leave it out")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: Json) -> Result<ExecutorSettings, Vec<String>> {
        let mut reader = Reader::default();
        let read = ExecutorSettings::read(&Node::from_json(&json), &mut reader);
        let problems = reader.problems.iter().map(|problem| format!("{} {}", problem.code, problem.message));
        let problems: Vec<String> = problems.collect();
        if problems.is_empty() { Ok(read.unwrap()) } else { Err(problems) }
    }

    #[test]
    fn a_word_or_a_mapping() {
        assert_eq!(read("local".into()).unwrap().kind, Some(ExecutorKind::Local));
        assert_eq!(read("slurm".into()).unwrap().kind, Some(ExecutorKind::Slurm));
        let long = read(serde_json::json!({ "slurm": { "partition": "gpu", "time": "12h" } })).unwrap();
        assert_eq!((long.kind, long.slurm.partition.as_deref()), (Some(ExecutorKind::Slurm), Some("gpu")));
        let both = read(serde_json::json!({ "use": "local", "slurm": { "partition": "gpu" } })).unwrap();
        assert_eq!(both.kind, Some(ExecutorKind::Local));
        assert!(read("sluurm".into()).unwrap_err()[0].contains("unknown value `sluurm`"));
        assert!(read(serde_json::json!({ "slurm": { "partitoin": "gpu" } })).unwrap_err()[0].contains("partitoin"));
    }

    #[test]
    fn options_that_the_program_sets_itself_are_refused() {
        let with = |option: &str| read(serde_json::json!({ "slurm": { "options": [option] } }));
        for option in ["--array=1-4", "-a1-4", "-o", "--output=x", "--wrap=ls", "-W", "--wait"] {
            assert!(with(option).unwrap_err()[0].starts_with("bad-option"), "{option}");
        }
        for option in ["--exclusive", "--account=me", "-A me", "--exclude=n1", "--hint=nomultithread", "-w n1"] {
            assert!(with(option).is_ok(), "{option}");
        }
        assert!(with("exclusive").unwrap_err()[0].contains("not an option of `sbatch`"));
    }

    #[test]
    fn what_a_stage_says_goes_before_what_the_file_says() {
        let of = |json: Json| read(json).unwrap();
        let file =
            of(serde_json::json!({ "slurm": { "partition": "gpu", "account": "me", "options": ["--exclusive"] } }));
        let stage = of(serde_json::json!({ "slurm": { "partition": "cpu", "options": ["--hold"] } }));
        let (kind, slurm) = stage.resolve(&file, None);
        assert_eq!(kind, ExecutorKind::Slurm);
        assert_eq!((slurm.partition.as_deref(), slurm.account.as_deref()), (Some("cpu"), Some("me")));
        assert_eq!(slurm.options, ["--exclusive", "--hold"]);
        let none = ExecutorSettings::default();
        assert_eq!(none.resolve(&none, None).0, ExecutorKind::Local);
        assert_eq!(none.resolve(&none, Some(ExecutorKind::Slurm)).0, ExecutorKind::Slurm);
        assert_eq!(stage.resolve(&file, Some(ExecutorKind::Local)).0, ExecutorKind::Local);
        let here = of("local".into());
        assert_eq!(here.resolve(&file, Some(ExecutorKind::Slurm)).0, ExecutorKind::Local);
    }
}
