//! What a launcher decides: how many processes train together, on how many machines, and in which precision, where the
//! trainer does not say so (`accelerate launch`, `torchrun`, `deepspeed`, `tune run`, and `trl`, which passes on what
//! it does not know).

use std::fs;

use engine::file::parse::parse;
use engine::file::problem::Problem;
use engine::file::source::Sources;
use engine::file::tree::{Entry, Node, Value};
use serde_json::Value as Json;

use super::command_line::Word;
use super::reading::{Item, Lists};

/// What `trl` passes on to `accelerate launch`.
const PASSED_ON: &[&str] =
    &["num_processes", "num_machines", "mixed_precision", "multi_gpu", "accelerate_config", "config_file"];

/// The configurations that TRL brings, all of 8 processes in bf16.
const OF_TRL: &[&str] = &["fsdp1", "fsdp2", "multi_gpu", "single_gpu", "zero1", "zero2", "zero3"];

/// A launcher's options.
#[derive(Debug, Default)]
pub(super) struct Launcher {
    /// Processes on all machines together.
    processes: Option<i64>,
    /// Processes on each machine.
    on_each: Option<i64>,
    machines: Option<i64>,
    mixed_precision: Option<Word>,
    /// The configuration of accelerate.
    config: Option<Word>,
    /// Where it is said that all devices are used.
    uses_all: Option<Word>,
    /// Whether several processes are asked for, whatever the configuration says.
    is_distributed: bool,
    /// Whether it was said that a number is not known.
    is_told: bool,
    lists: Lists,
}

/// What is known of the processes.
#[derive(Debug)]
pub(super) struct Launched {
    /// Processes on each machine.
    pub(super) devices: i64,
    pub(super) machines: i64,
    pub(super) mixed_precision: Option<Word>,
    pub(super) lists: Lists,
}

impl Launcher {
    /// Reads the words before a tool's own.
    pub(super) fn of_words(words: &[Word]) -> Self {
        let mut launcher = Self::default();
        for (at, word) in words.iter().enumerate() {
            let program = word.text.rsplit('/').next().unwrap_or_default();
            let is_accelerate = matches!(program, "accelerate" | "accelerate-launch" | "accelerate.commands.launch");
            if is_accelerate || (program == "deepspeed" && at == 0) {
                launcher.uses_all = Some(word.clone());
            }
            let Some(flag) = word.text.strip_prefix("--") else { continue };
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, Word { text: value.to_owned(), span: word.span }),
                None => (flag, words.get(at + 1).cloned().unwrap_or_else(|| word.clone())),
            };
            launcher.set(&name.replace('-', "_"), value);
        }
        launcher
    }

    /// Takes what `trl` passes on out of its arguments.
    pub(super) fn take_from(&mut self, entries: &mut Vec<Entry>) {
        let is_passed_on = |entry: &Entry| PASSED_ON.contains(&entry.key.as_str()) && entry.value.value != Value::Null;
        let (passed_on, own): (Vec<Entry>, Vec<Entry>) = std::mem::take(entries).into_iter().partition(is_passed_on);
        *entries = own;
        for entry in passed_on {
            self.set(&entry.key, Word { text: written(&entry.value), span: entry.key_span });
        }
    }

    /// Takes one option.
    pub(super) fn set(&mut self, name: &str, value: Word) {
        match name {
            "num_processes" => self.processes = self.number(name, value),
            "nproc_per_node" | "num_gpus" => self.on_each = self.number(name, value),
            "num_machines" | "nnodes" | "num_nodes" => self.machines = self.number(name, value),
            "config_file" | "accelerate_config" => self.config = Some(value),
            "mixed_precision" => self.mixed_precision = Some(value),
            "gradient_accumulation_steps" => self.steps(value),
            "multi_gpu" | "use_fsdp" | "use_deepspeed" => {
                self.is_distributed = true;
                self.uses_all = Some(value);
            }
            _ => {}
        }
    }

    fn number(&mut self, name: &str, value: Word) -> Option<i64> {
        let number = value.text.parse::<i64>().ok().filter(|number| *number >= 1);
        if number.is_none() {
            let are_machines = matches!(name, "num_machines" | "nnodes" | "num_nodes");
            let what = if are_machines { "machines" } else { "processes" };
            self.is_told |= !are_machines;
            self.differs(name, value, format!("the number of {what} is not known here: taken for one"));
        }
        number
    }

    /// The trainer gives its own number to accelerate, which takes no other.
    fn steps(&mut self, value: Word) {
        let reason = "without effect there: the trainer's own `gradient_accumulation_steps` counts";
        self.differs("gradient_accumulation_steps", value, reason.to_owned());
    }

    fn differs(&mut self, name: &str, value: Word, reason: String) {
        self.lists.differing.push(item(name, &value, None, Some(reason)));
    }

    /// Reads accelerate's configuration, over which the options come.
    fn configuration(&mut self, sources: &mut Sources, problems: &mut Vec<Problem>) {
        let Some(word) = self.config.take() else { return };
        let Ok(text) = fs::read_to_string(&word.text) else {
            if OF_TRL.contains(&word.text.as_str()) {
                let bf16 = Word { text: "bf16".to_owned(), span: word.span };
                self.mixed_precision = self.mixed_precision.take().or(Some(bf16));
                return self.of_file(&word, Some(8), Some(1), word.text == "single_gpu");
            }
            let known = self.processes.is_some();
            self.is_told = true;
            let reason = match known {
                true => "it is not on this machine, so that what else it says is not known",
                false => "it is not on this machine, so that the number of processes is not known: taken for one",
            };
            return self.differs("config_file", word, reason.to_owned());
        };
        let source = sources.add(word.text.as_str(), text.as_str());
        let root = match parse(source, &text, problems) {
            Ok(root) => root,
            Err(problem) => return problems.push(*problem),
        };
        let value = |name: &str| root.get(name).filter(|node| node.value != Value::Null);
        let of_deepspeed = root.get("deepspeed_config").and_then(|node| node.get("gradient_accumulation_steps"));
        if let Some(steps) = value("gradient_accumulation_steps").or(of_deepspeed) {
            self.steps(Word { text: written(steps), span: steps.span });
        }
        if let Some(precision) = value("mixed_precision").filter(|_| self.mixed_precision.is_none()) {
            self.mixed_precision = Some(Word { text: written(precision), span: precision.span });
        }
        let number = |name: &str| {
            let number = value(name).and_then(|node| written(node).parse::<i64>().ok());
            number.filter(|number| *number >= 1)
        };
        // Without a kind of distribution a single process is started, whatever their number.
        let is_single = value("distributed_type").is_some_and(|kind| written(kind).eq_ignore_ascii_case("no"));
        let (processes, machines) = (number("num_processes"), number("num_machines"));
        self.of_file(&word, processes, machines, is_single);
    }

    /// Takes over what accelerate's configuration says of processes.
    fn of_file(&mut self, word: &Word, processes: Option<i64>, machines: Option<i64>, is_single: bool) {
        if is_single && !self.is_distributed {
            (self.processes, self.machines) = (Some(1), Some(1));
        } else {
            self.processes = self.processes.or(processes);
            self.machines = self.machines.or(machines);
        }
        if self.processes.is_none() {
            self.is_told = true;
            let reason = "it does not say the number of processes: taken for one";
            return self.differs("config_file", word.clone(), reason.to_owned());
        }
        let reason = "the number of processes, and of machines";
        self.lists.same.push(item("config_file", word, None, Some(reason.to_owned())));
    }

    /// What is known in the end.
    pub(super) fn launched(mut self, sources: &mut Sources, problems: &mut Vec<Problem>) -> Launched {
        self.configuration(sources, problems);
        let machines = self.machines.unwrap_or(1);
        let devices = self.on_each.or(self.processes.map(|processes| processes / machines)).unwrap_or(1).max(1);
        let is_known = self.is_told || self.on_each.is_some() || self.processes.is_some();
        if let Some(word) = self.uses_all.take().filter(|_| !is_known) {
            let reason = "a process for each device of the machine is started there; taken for one here";
            self.differs("num_processes", Word { text: "not set".to_owned(), ..word }, reason.to_owned());
        }
        Launched { devices, machines, mixed_precision: self.mixed_precision, lists: self.lists }
    }
}

/// A launcher's option, as the lists show it.
pub(super) fn item(name: &str, value: &Word, becomes: Option<&str>, reason: Option<String>) -> Item {
    let becomes = becomes.map(str::to_owned);
    Item { key: name.to_owned(), value: Json::from(value.text.as_str()), span: Some(value.span), becomes, reason }
}

/// A value as a word.
fn written(node: &Node) -> String {
    let json = node.to_json();
    json.as_str().map_or_else(|| json.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use engine::file::source::{SourceId, Span};

    use super::*;

    fn launched(text: &str) -> Launched {
        let word = |text: &str| Word { text: text.to_owned(), span: Span { source: SourceId(0), offset: 0, len: 0 } };
        let words: Vec<Word> = text.split(' ').map(word).collect();
        Launcher::of_words(&words).launched(&mut Sources::default(), &mut Vec::new())
    }

    #[track_caller]
    fn starts(text: &str, devices: i64, machines: i64) -> Launched {
        let launched = launched(text);
        assert_eq!((launched.devices, launched.machines), (devices, machines), "{text}: {launched:?}");
        launched
    }

    #[test]
    fn processes_of_accelerate_are_those_of_all_machines_and_of_torchrun_those_of_each() {
        for text in [
            "accelerate launch --num_processes 8",
            "accelerate launch --num-processes=16 --num_machines 2",
            "torchrun --nproc_per_node 8",
            "python -m torch.distributed.run --nproc-per-node=8 --nnodes 2",
            "deepspeed --num_gpus 8 --num_nodes=2",
        ] {
            let machines = if text.contains('2') { 2 } else { 1 };
            assert!(starts(text, 8, machines).lists.differing.is_empty(), "{text}");
        }
        assert!(starts("", 1, 1).lists.differing.is_empty());
        assert!(starts("python", 1, 1).lists.differing.is_empty());
    }

    #[test]
    fn a_number_that_is_not_known_is_said_once() {
        for text in [
            "torchrun --nproc_per_node gpu",
            "torchrun --nproc-per-node=auto",
            "torchrun --nnodes 1:4",
            "accelerate launch",
            "accelerate launch --multi_gpu",
            "accelerate launch --multi_gpu --config_file /nowhere/accelerate.yaml",
        ] {
            let launched = starts(text, 1, 1);
            let [item] = launched.lists.differing.as_slice() else { panic!("{text}: {launched:?}") };
            assert!(item.reason.as_ref().unwrap().contains("taken for one"), "{text}: {item:?}");
        }
    }

    #[test]
    fn options_that_the_trainer_has_of_its_own_are_named() {
        let text = "accelerate launch --num_processes 2 --gradient_accumulation_steps 4 --mixed_precision fp16";
        let launched = starts(text, 2, 1);
        assert_eq!(launched.mixed_precision.unwrap().text, "fp16");
        assert_eq!(launched.lists.differing[0].key, "gradient_accumulation_steps");
    }
}
