//! Finds a tool's configuration in what was given: a file, a shell script, or a command.

use std::fs;
use std::path::{Path, PathBuf};

use engine::file::foreign::Tool;
use engine::file::parse::parse;
use engine::file::problem::Problem;
use engine::file::scalar;
use engine::file::source::{SourceId, Sources, Span};
use engine::file::tree::{Entry, Node, Value};

use super::command_line::{self, Command, Word};
use super::key::{Becomes, Key, Keys};
use super::launcher::{self, Launched, Launcher};
use super::reading::Lists;
use super::torchtune;

/// A configuration, with what only its command says.
#[derive(Debug)]
pub(super) struct Configuration {
    pub(super) tool: Tool,
    pub(super) root: Node,
    /// Its file, whose folder paths may be relative to.
    pub(super) file: Option<PathBuf>,
    /// torchtune's recipe, where one is named.
    pub(super) recipe: Option<(String, Span)>,
    /// `sft`, `pt` and the like, where the command says it.
    pub(super) verb: Option<(String, Span)>,
    /// Processes that train together on one machine, and machines.
    pub(super) devices: i64,
    pub(super) nodes: i64,
    /// The kind of device that the command's variables name.
    pub(super) device: Option<&'static str>,
    pub(super) uses_model_scope: bool,
    /// Commands behind the training's, such as a merge.
    pub(super) merges: bool,
    /// What is said of the launcher's options.
    pub(super) of_launcher: Lists,
    /// The precision that the launcher gives a trainer without one.
    pub(super) mixed_precision: Option<Word>,
}

impl Configuration {
    fn new(tool: Tool, root: Node) -> Self {
        Self {
            tool,
            root,
            file: None,
            recipe: None,
            verb: None,
            devices: 1,
            nodes: 1,
            device: None,
            uses_model_scope: false,
            merges: false,
            of_launcher: Lists::default(),
            mixed_precision: None,
        }
    }

    /// Takes over what the launcher's options say.
    fn launch(&mut self, launcher: Launcher, sources: &mut Sources, problems: &mut Vec<Problem>) {
        let Launched { devices, machines, mixed_precision, lists } = launcher.launched(sources, problems);
        (self.devices, self.nodes) = (devices, machines);
        (self.mixed_precision, self.of_launcher) = (mixed_precision, lists);
    }
}

/// Reads a file of a tool; `None` where it belongs to none that is known.
pub(super) fn of_file(
    path: &Path,
    text: &str,
    from: Option<Tool>,
    sources: &mut Sources,
    problems: &mut Vec<Problem>,
) -> Result<Option<Configuration>, Box<Problem>> {
    let source = sources.add(path.display().to_string(), text);
    let is_data = path.extension().is_some_and(|ending| ["yaml", "yml", "json"].iter().any(|known| ending == *known));
    if !is_data {
        return Ok(of_commands(source, text, sources, problems));
    }
    let root = parse(source, text, problems)?;
    let tool = from.or_else(|| Tool::recognize(&root).map(|(tool, _)| tool));
    Ok(tool.map(|tool| {
        let mut root = if tool == Tool::Torchtune { interpolated(&root) } else { root };
        let mut launcher = Launcher::default();
        if let (Tool::Trl, Value::Map(entries)) = (tool, &mut root.value) {
            launcher.take_from(entries);
        }
        let mut found = Configuration { file: Some(path.to_owned()), ..Configuration::new(tool, root) };
        found.launch(launcher, sources, problems);
        found
    }))
}

/// Reads the commands of a text: the first that trains, and what follows it.
pub(super) fn of_commands(
    source: SourceId,
    text: &str,
    sources: &mut Sources,
    problems: &mut Vec<Problem>,
) -> Option<Configuration> {
    let commands = command_line::commands(source, text, problems);
    let mut found: Option<Configuration> = None;
    for command in &commands {
        let Some(call) = Call::of(command) else { continue };
        match &mut found {
            None => found = call.configuration(sources, problems),
            Some(first) if call.verb.text == "export" && call.tool == first.tool => first.merges = true,
            Some(_) => {
                let message = format!("`{}` is not carried over", call.verb.text);
                let label = "a second command: a separate stage here";
                problems.push(Problem::warning("not-carried-over", call.verb.span, message, label));
            }
        }
    }
    found
}

/// TRL's commands, which are scripts too.
const TRL: [&str; 6] = ["sft", "dpo", "kto", "grpo", "reward", "rloo"];

/// A command of a tool.
struct Call<'a> {
    tool: Tool,
    verb: Word,
    arguments: &'a [Word],
    /// The words before the tool's own, such as a launcher's.
    launcher: &'a [Word],
    environment: &'a [(String, Word)],
}

impl<'a> Call<'a> {
    fn of(command: &'a Command) -> Option<Self> {
        let words = &command.words;
        let (at, tool, verb) = words.iter().enumerate().find_map(|(at, word)| {
            let name = word.text.rsplit('/').next().unwrap_or_default();
            let next = words.get(at + 1);
            let verbs: &[&str] = match name {
                "swift" => &["sft", "pt", "rlhf", "export", "infer", "deploy", "eval", "sample", "app"],
                "tune" => &["run"],
                "axolotl" => &["train", "preprocess", "merge-lora", "evaluate", "inference"],
                "llamafactory-cli" | "lmf" => &["train", "export", "chat", "api", "webui"],
                "trl" => &TRL,
                _ => &[],
            };
            let verb = next.filter(|next| verbs.contains(&next.text.as_str()));
            let tool = match name {
                "swift" => Tool::MsSwift,
                "tune" => Tool::Torchtune,
                "axolotl" => Tool::Axolotl,
                "llamafactory-cli" | "lmf" => Tool::LlamaFactory,
                _ => Tool::Trl,
            };
            let train = |tool| Some((at, tool, Word { text: "train".to_owned(), span: word.span }));
            let sft = |tool| Some((at, tool, Word { text: "sft".to_owned(), span: word.span }));
            match (verb, word.text.as_str()) {
                (Some(verb), _) => Some((at + 1, tool, verb.clone())),
                (None, "axolotl.cli.train") => train(Tool::Axolotl),
                (None, text) if text.ends_with("swift/cli/sft.py") => sft(Tool::MsSwift),
                (None, text) if text.ends_with("src/train.py") && words.iter().any(|word| word.text == "--stage") => {
                    train(Tool::LlamaFactory)
                }
                (None, text) => TRL
                    .iter()
                    .find(|verb| text.ends_with(&format!("trl/scripts/{verb}.py")))
                    .map(|verb| (at, Tool::Trl, Word { text: (*verb).to_owned(), span: word.span })),
            }
        })?;
        let (launcher, arguments) = (&words[..at], &words[at + 1..]);
        Some(Self { tool, verb, arguments, launcher, environment: &command.environment })
    }

    fn configuration(&self, sources: &mut Sources, problems: &mut Vec<Problem>) -> Option<Configuration> {
        let mut found = Configuration::new(self.tool, Node { span: self.verb.span, value: Value::Map(Vec::new()) });
        found.verb = Some((self.verb.text.clone(), self.verb.span));
        let mut launcher = Launcher::of_words(self.launcher);
        match self.tool {
            Tool::Torchtune => self.tune(&mut found, &mut launcher, sources, problems)?,
            Tool::MsSwift | Tool::Trl | Tool::Axolotl | Tool::LlamaFactory => {
                let mut entries = Vec::new();
                let mut flags = self.arguments;
                if let [first, rest @ ..] = flags
                    && !first.text.starts_with('-')
                {
                    entries = self.file(first, &mut found, sources, problems)?;
                    flags = rest;
                }
                for entry in self.flags(flags, problems) {
                    if entry.key == "config" && self.tool == Tool::Trl {
                        let Value::String(path) = &entry.value.value else { continue };
                        let word = Word { text: path.clone(), span: entry.value.span };
                        let below = self.file(&word, &mut found, sources, problems)?;
                        // What the command line says comes first.
                        below.into_iter().for_each(|entry| {
                            if !entries.iter().any(|known: &Entry| known.key == entry.key) {
                                entries.push(entry);
                            }
                        });
                    } else {
                        set(&mut entries, entry);
                    }
                }
                if self.tool == Tool::Trl {
                    launcher.take_from(&mut entries);
                }
                found.root.value = Value::Map(entries);
            }
        }
        found.launch(launcher, sources, problems);
        self.variables(&mut found, problems);
        Some(found)
    }

    /// The entries of a configuration that the command names.
    fn file(
        &self,
        word: &Word,
        found: &mut Configuration,
        sources: &mut Sources,
        problems: &mut Vec<Problem>,
    ) -> Option<Vec<Entry>> {
        let text = match fs::read_to_string(&word.text) {
            Ok(text) => text,
            Err(error) => {
                let message = format!("`{}` cannot be read: {error}", word.text);
                problems.push(Problem::error("file-missing", word.span, message, "the configuration of the command"));
                return None;
            }
        };
        let source = sources.add(word.text.as_str(), text.as_str());
        found.file = Some(PathBuf::from(&word.text));
        match parse(source, &text, problems) {
            Ok(Node { value: Value::Map(entries), span }) => {
                found.root.span = span;
                Some(entries)
            }
            Ok(_) => None,
            Err(problem) => {
                problems.push(*problem);
                None
            }
        }
    }

    /// `--key value…`, `--key=value`, and LLaMA-Factory's `key=value`.
    fn flags(&self, words: &[Word], problems: &mut Vec<Problem>) -> Vec<Entry> {
        // With whether a flag has a value, which may be an empty one.
        let mut entries: Vec<(Entry, bool)> = Vec::new();
        for word in words {
            let flag = word.text.strip_prefix("--").filter(|flag| !flag.is_empty());
            match (flag, word.text.split_once('=')) {
                (Some(flag), _) => {
                    let (key, value) = match flag.split_once('=') {
                        Some((key, value)) => (key, Some(argument(value))),
                        None => (flag, None),
                    };
                    let has_value = value.is_some();
                    let value = Node { span: word.span, value: value.unwrap_or(Value::Null) };
                    entries.push((Entry { key: key.replace('-', "_"), key_span: word.span, value }, has_value));
                }
                (None, Some((key, value))) if self.tool == Tool::LlamaFactory => {
                    let value = Node { span: word.span, value: scalar::plain(value) };
                    entries.push((Entry { key: key.to_owned(), key_span: word.span, value }, true));
                }
                (None, _) if word.text == "..." || word.text == "…" => {
                    let message = "arguments that are left out are not carried over";
                    problems.push(Problem::error("not-carried-over", word.span, message, "stands for others"));
                }
                (None, _) if entries.is_empty() => {
                    let message = format!("`{}` is no argument", word.text);
                    problems.push(Problem::error("bad-value", word.span, message, "a word without its `--key`"));
                }
                (None, _) => {
                    let item = Node { span: word.span, value: argument(&word.text) };
                    if let Some((last, has_value)) = entries.last_mut() {
                        match has_value {
                            true => add(&mut last.value, item),
                            false => last.value = item,
                        }
                        *has_value = true;
                    }
                }
            }
        }
        let (keys, _) = super::table(self.tool);
        let of_flag = |(entry, has_value): (Entry, bool)| match has_value {
            true => entry,
            false => switch(entry, &keys),
        };
        entries.into_iter().map(of_flag).collect()
    }

    /// `tune run [LAUNCHER] RECIPE --config CONFIG [KEY=VALUE | ~KEY]…`.
    fn tune(
        &self,
        found: &mut Configuration,
        launcher: &mut Launcher,
        sources: &mut Sources,
        problems: &mut Vec<Problem>,
    ) -> Option<()> {
        let mut words = self.arguments.iter().peekable();
        let mut config = None;
        let mut overrides = Vec::new();
        while let Some(word) = words.next() {
            let flag = word.text.strip_prefix("--").map(|flag| {
                let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
                (name.replace('-', "_"), value.map(|text| Word { text: text.to_owned(), span: word.span }))
            });
            match flag.as_ref().map(|(name, value)| (name.as_str(), value)) {
                Some(("config", value)) => config = value.clone().or_else(|| words.next().cloned()),
                Some((name @ ("nproc_per_node" | "nnodes"), value)) => {
                    if let Some(value) = value.clone().or_else(|| words.next().cloned()) {
                        launcher.set(name, value);
                    }
                }
                Some((_, Some(_))) => {}
                Some((_, None)) => drop(words.next_if(|next| !next.text.contains('='))),
                None if found.recipe.is_none() && !word.text.contains('=') => {
                    found.recipe = Some((word.text.clone(), word.span));
                }
                None => overrides.push(word),
            }
        }
        let Some(config) = config else {
            let problem =
                Problem::error("missing-key", self.verb.span, "`--config` is missing", "`tune run` requires it");
            problems.push(problem);
            return None;
        };
        let is_old = overrides.iter().any(|word| {
            ["dataset.template=", "dataset.max_seq_len="].iter().any(|prefix| word.text.starts_with(prefix))
        });
        found.root = if Path::new(&config.text).is_file() {
            let entries = self.file(&config, found, sources, problems)?;
            Node { span: found.root.span, value: Value::Map(entries) }
        } else {
            match torchtune::builtin(&config.text, is_old, sources) {
                Ok(root) => root,
                Err(near) => {
                    let message =
                        format!("`{}` is neither a file nor a config of torchtune for fine-tuning", config.text);
                    let problem = Problem::error("unknown-value", config.span, message, "not known here");
                    let help = near.map(|near| format!("did you mean `{near}`?"));
                    problems.push(problem.with_help_if(
                        help.or_else(|| Some(format!("`tune cp {} my.yaml`, and import that file", config.text))),
                    ));
                    return None;
                }
            }
        };
        overrides.iter().for_each(|word| override_key(&mut found.root, word, problems));
        found.root = interpolated(&found.root);
        Some(())
    }

    /// The variables before a command.
    fn variables(&self, found: &mut Configuration, problems: &mut Vec<Problem>) {
        let mut visible = None;
        for (name, word) in self.environment {
            match name.as_str() {
                "NPROC_PER_NODE" => match word.text.parse() {
                    Ok(devices) => found.devices = devices,
                    Err(_) => {
                        let reason = "the number of processes is not known here: taken for one";
                        let item = launcher::item("NPROC_PER_NODE", word, None, Some(reason.to_owned()));
                        found.of_launcher.differing.push(item);
                    }
                },
                "NNODES" => found.nodes = word.text.parse().unwrap_or(1),
                "CUDA_VISIBLE_DEVICES" | "HIP_VISIBLE_DEVICES" | "ROCR_VISIBLE_DEVICES" => {
                    visible = Some(word.text.split(',').count() as i64);
                }
                "ASCEND_RT_VISIBLE_DEVICES" => {
                    visible = Some(word.text.split(',').count() as i64);
                    found.device = Some("npu");
                }
                "USE_MODELSCOPE_HUB" => found.uses_model_scope = matches!(word.text.as_str(), "1" | "true"),
                "USE_HF" if self.tool != Tool::MsSwift => {}
                "USE_HF" => {
                    let entry = Entry {
                        key: "use_hf".to_owned(),
                        key_span: word.span,
                        value: Node {
                            span: word.span,
                            value: Value::Bool(!matches!(word.text.as_str(), "0" | "false" | "False")),
                        },
                    };
                    if let Value::Map(entries) = &mut found.root.value {
                        entries.push(entry);
                    }
                }
                "FORCE_TORCHRUN" | "MASTER_PORT" | "MASTER_ADDR" | "NODE_RANK" | "RANK" | "OMP_NUM_THREADS" => {}
                "ACCELERATE_LOG_LEVEL" | "TOKENIZERS_PARALLELISM" | "DISABLE_VERSION_CHECK" => {}
                name if ["WANDB_", "HF_", "NCCL_", "HCCL_", "PYTORCH_", "TORCH_", "SWANLAB_"]
                    .iter()
                    .any(|prefix| name.starts_with(prefix)) => {}
                name => {
                    let message = format!("the variable `{name}` is not known here");
                    let problem = Problem::error("unknown-key", word.span, message, "may change the result");
                    problems.push(problem.with_help("leave it out, if it does not"));
                }
            }
        }
        // LLaMA-Factory starts a process for each device that it sees.
        if let (Tool::LlamaFactory, Some(count), 1) = (self.tool, visible, found.devices) {
            found.devices = count;
        }
    }
}

fn set(entries: &mut Vec<Entry>, entry: Entry) {
    match entries.iter_mut().find(|known| known.key == entry.key) {
        Some(known) => *known = entry,
        None => entries.push(entry),
    }
}

/// A flag alone, which is a switch; `--no_…` switches off what is on by default, as transformers' parser has it.
fn switch(entry: Entry, keys: &Keys) -> Entry {
    let is_on = |key: &&Key| key.default == Some("true") || matches!(key.becomes, Becomes::Nothing(_));
    let other = match keys.find(&entry.key) {
        Some(_) => None,
        None => entry.key.strip_prefix("no_").and_then(|name| keys.find(name)).filter(is_on),
    };
    let value = Node { span: entry.key_span, value: Value::Bool(other.is_none()) };
    Entry { key: other.map_or(entry.key, |key| key.name.to_owned()), value, ..entry }
}

/// The value of a word, where no word is an empty text.
fn argument(text: &str) -> Value {
    if text.is_empty() { Value::String(String::new()) } else { scalar::plain(text) }
}

/// A further value of a flag: the second makes a list of them.
fn add(value: &mut Node, item: Node) {
    match &mut value.value {
        Value::List(items) => items.push(item),
        _ => {
            let first = value.clone();
            value.value = Value::List(vec![first, item]);
        }
    }
}

/// `a.b=value`, `a=component` and `~a.b`, as OmegaConf reads them.
fn override_key(root: &mut Node, word: &Word, problems: &mut Vec<Problem>) {
    let (path, value) = match (word.text.strip_prefix('~'), word.text.split_once('=')) {
        (Some(path), _) => (path, None),
        (None, Some((path, value))) => (path, Some(value)),
        (None, None) => {
            let message = format!("`{}` is no override", word.text);
            problems.push(Problem::error("bad-override", word.span, message, "expected `key=value` or `~key`"));
            return;
        }
    };
    let value = value.map(|value| match parse(word.span.source, value, &mut Vec::new()) {
        // Its place is that of the word, whatever the value's own text is.
        Ok(node) => Node::from_json(&node.to_json()),
        Err(_) => Node { span: word.span, value: Value::String(value.to_owned()) },
    });
    let keys: Vec<&str> = path.split('.').collect();
    put(root, &keys, value, word.span);
}

fn put(node: &mut Node, keys: &[&str], value: Option<Node>, span: Span) {
    let [key, rest @ ..] = keys else { return };
    if !matches!(node.value, Value::Map(_)) {
        node.value = Value::Map(Vec::new());
    }
    let Value::Map(entries) = &mut node.value else { return };
    let at = entries.iter().position(|entry| entry.key == *key);
    match (at, value, rest) {
        (Some(at), None, []) => drop(entries.remove(at)),
        (_, None, []) => {}
        // A component's name in the place of a component keeps its other keys.
        (Some(at), Some(Node { value: Value::String(name), .. }), [])
            if entries[at].value.get("_component_").is_some() && name.contains('.') =>
        {
            entries[at].key_span = span;
            put(&mut entries[at].value, &["_component_"], Some(Node { span, value: Value::String(name) }), span);
        }
        (Some(at), Some(value), []) => {
            entries[at] = Entry { key: (*key).to_owned(), key_span: span, value: Node { span, ..value } };
        }
        (None, Some(value), []) => {
            entries.push(Entry { key: (*key).to_owned(), key_span: span, value: Node { span, ..value } });
        }
        (Some(at), value, rest) => put(&mut entries[at].value, rest, value, span),
        (None, None, _) => {}
        (None, value, rest) => {
            let mut below = Node { span, value: Value::Map(Vec::new()) };
            put(&mut below, rest, value, span);
            entries.push(Entry { key: (*key).to_owned(), key_span: span, value: below });
        }
    }
}

/// A config with `${key}` replaced by what the key holds, as OmegaConf does.
fn interpolated(root: &Node) -> Node {
    replaced(root, root)
}

fn replaced(node: &Node, root: &Node) -> Node {
    let value = match &node.value {
        Value::String(text) if text.contains("${") => scalar::plain(&filled(text, root, 0)),
        Value::List(items) => Value::List(items.iter().map(|item| replaced(item, root)).collect()),
        Value::Map(entries) => {
            let entry = |entry: &Entry| Entry { value: replaced(&entry.value, root), ..entry.clone() };
            Value::Map(entries.iter().map(entry).collect())
        }
        other => other.clone(),
    };
    Node { span: node.span, value }
}

fn filled(text: &str, root: &Node, depth: usize) -> String {
    let Some((before, behind)) = text.split_once("${") else { return text.to_owned() };
    let Some((path, after)) = behind.split_once('}') else { return text.to_owned() };
    let value = match path.split('.').try_fold(root, |node, key| node.get(key)).map(Node::to_json) {
        Some(serde_json::Value::String(value)) if depth < 8 => filled(&value, root, depth + 1),
        Some(value) if value.is_number() || value.is_boolean() => value.to_string(),
        _ => format!("${{{path}}}"),
    };
    format!("{before}{value}{}", filled(after, root, depth))
}
