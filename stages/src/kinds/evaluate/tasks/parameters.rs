//! What a stage says about evaluation tasks: which ones, where their rows are, and how their prompts are put together.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::local_files::{Extent, LocalFiles};
use engine::parameter::{Given, Input, KeyWriter, LocalPath, OneOrMore, Parameter, Parameters, Reader};
use engine::stage::{Counted, Outside, PinRequest, Secret};
use serde_json::{Value, json};

use crate::compute::torch::worker_python;
use crate::data::artifact::Rows;
use crate::hub::Service;
use crate::tasks::TaskError;
use crate::tasks::file::{Task, TaskFile};
use crate::tasks::functions::Python;
use crate::tasks::group::Overrides;
use crate::tasks::prompt::PromptOptions;
use crate::tasks::shipped;

/// What the Hub calls datasets, in pins.
const DATASET_PIN: &str = "hub-dataset";

/// The role of the folder with rows.
pub(in crate::kinds) const DATA: &str = "task_data";

/// A task by its name, or its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskName(LocalPath);

/// What `evaluate` says about tasks.
#[derive(Parameters, Debug)]
pub struct TaskParams {
    /// Which ones, in the place of rows.
    #[semantic(flatten)]
    pub choice: TaskChoice,
    /// Rows that the model was trained on: rows of tasks that they contain are counted.
    #[semantic]
    pub train_data: Option<Input<Rows>>,
}

/// Evaluation tasks, and how their prompts are put together.
#[derive(Parameters, Debug)]
pub struct TaskChoice {
    /// Evaluation tasks (in `evaluate` instead of `data`): names of built-in tasks, or task files of
    /// lm-evaluation-harness (`.yaml`).
    #[semantic]
    pub tasks: Option<OneOrMore<TaskName>>,
    /// A folder with the files that tasks read: rows of each split, and files that task files include. Default: the
    /// rows of built-in tasks come from the Hub.
    #[semantic]
    pub task_data: Option<LocalPath>,
    /// Datasets on the Hub whose rows task files read (`dataset_path: TIGER-Lab/MMLU-Pro`): pinned, and fetched split
    /// by split. Default: those of built-in tasks, unless there is `task_data`.
    #[semantic(omit_default)]
    pub task_datasets: Option<OneOrMore<String>>,
    /// Whether Python functions that task files name (`!function utils.process_docs`) are run, by the Python that
    /// `PIPELINE_PYTHON` names; default: no, and they are errors.
    #[semantic(omit_default)]
    pub task_functions: Option<bool>,
    /// Number of few-shot examples before each question; default: the task's own number. A task that sets 0 has none.
    #[semantic]
    pub num_fewshot: Option<usize>,
    /// Whether prompts of tasks are rendered with the tokenizer's chat template; default: no.
    #[semantic]
    pub apply_chat_template: Option<bool>,
    /// Whether each few-shot example is a separate turn; default: as `apply_chat_template`.
    #[semantic]
    pub fewshot_as_multiturn: Option<bool>,
    /// The system message of a conversation, or the beginning of a prompt.
    #[semantic]
    pub system_instruction: Option<String>,
}

impl TaskName {
    pub(super) fn text(&self) -> &str {
        &self.0.text
    }

    pub(super) fn is_file(&self) -> bool {
        [".yaml", ".yml"].iter().any(|extension| self.text().ends_with(extension))
    }

    pub(in crate::kinds) fn role(&self) -> String {
        format!("tasks.{}", self.text())
    }
}

impl Parameter for TaskName {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let name = Self(LocalPath::read(node, reader)?);
        if !name.is_file() && !shipped::has(name.text()) {
            let message = format!("there is no task `{}` (known: {})", name.text(), shipped::names().join(", "));
            reader.bad_value(node, &message, "the name of a task, or a task file that ends in `.yaml`");
            return None;
        }
        Some(name)
    }

    /// Of a task of the program the definition, of a file its content, which enters as the file.
    fn write_key(&self, key: &mut KeyWriter<'_>) {
        if !self.is_file() {
            let definition = cache::Digest::of(shipped::definition(self.text()).unwrap_or_default().as_bytes());
            key.value(format!("{} {definition}", self.text()));
        }
    }

    fn schema() -> Value {
        json!({ "anyOf": [
            { "type": "string", "enum": shipped::names() },
            { "type": "string", "pattern": "\\.ya?ml$", "description": "A task file, relative to the pipeline file." },
        ] })
    }
}

impl Given for TaskParams {
    fn is_given(&self) -> bool {
        self.choice.tasks.is_some()
    }
}

impl TaskChoice {
    pub(in crate::kinds) fn chosen(&self) -> impl Iterator<Item = &TaskName> {
        self.tasks.iter().flat_map(|tasks| &tasks.0)
    }

    /// Tasks of the program whose rows are those on the Hub: all, where no folder with rows is named.
    fn on_hub(&self) -> Vec<Task> {
        if self.task_data.is_some() { Vec::new() } else { self.shipped() }
    }

    /// The datasets on the Hub that rows come from.
    pub(in crate::kinds) fn datasets(&self) -> BTreeSet<String> {
        let shipped = self.on_hub().into_iter().filter_map(|task| task.dataset_path);
        shipped.chain(self.named_datasets().cloned()).collect()
    }

    /// Those that the file names.
    pub(in crate::kinds) fn named_datasets(&self) -> impl Iterator<Item = &String> {
        self.task_datasets.iter().flat_map(|names| &names.0)
    }

    fn pins(&self) -> Vec<PinRequest> {
        self.datasets().iter().map(|name| self.pin(name)).collect()
    }

    pub(in crate::kinds) fn pin(&self, dataset: &str) -> PinRequest {
        PinRequest {
            kind: DATASET_PIN.to_owned(),
            name: dataset.to_owned(),
            revision: Service::HUGGING_FACE.default_revision().to_owned(),
            token_env: None,
            span: self.chosen().next().map(|name| name.0.span).unwrap_or_default(),
        }
    }

    /// The token for the Hub, where rows come from there.
    pub(in crate::kinds) fn secrets(&self) -> Vec<Secret> {
        let is_on_hub = !self.pins().is_empty();
        is_on_hub.then(|| Secret::token(None, Service::HUGGING_FACE.token_variable())).into_iter().collect()
    }

    pub(in crate::kinds) fn outside(&self) -> Vec<Outside> {
        let files = |role: String, path: &LocalPath| Outside::Files {
            role,
            pattern: path.text.clone(),
            span: path.span,
            count: Counted::All,
        };
        let tasks = self.chosen().filter(|name| name.is_file()).map(|name| files(name.role(), &name.0));
        let local = tasks.chain(self.task_data.iter().map(|path| files(DATA.to_owned(), path)));
        local.chain(self.pins().into_iter().map(Outside::Pin)).collect()
    }

    /// Tasks of the program that are named, themselves or by a group.
    pub(in crate::kinds) fn shipped(&self) -> Vec<Task> {
        let mut found: Vec<Task> = Vec::new();
        let mut names: Vec<String> =
            self.chosen().filter(|name| !name.is_file()).map(|name| name.text().to_owned()).collect();
        while let Some(name) = names.pop() {
            let definition = shipped::definition(&name).unwrap_or_default();
            match TaskFile::shipped(&name, &definition, &Overrides::default()) {
                Ok(TaskFile::Group(group)) => names.extend(group.names().into_iter().map(str::to_owned)),
                Ok(TaskFile::Task(task)) if found.iter().all(|known| known.name != task.name) => found.push(*task),
                _ => {}
            }
        }
        found
    }

    /// What runs functions of task files, where that is wanted.
    pub(super) fn python(&self) -> Option<Arc<Python>> {
        (self.task_functions == Some(true)).then(|| Arc::new(Python::new(worker_python())))
    }

    /// The task files that are named, as far as they are here, and what is wrong with the others.
    pub(in crate::kinds) fn local(&self, files: &LocalFiles) -> (Vec<(Span, TaskFile)>, Vec<Problem>) {
        let (mut found, mut problems, python) = (Vec::new(), Vec::new(), self.python());
        for name in self.chosen().filter(|name| name.is_file()) {
            let [file] = files.files(&name.role()) else { continue };
            if file.extent != Extent::Whole {
                continue;
            }
            match TaskFile::read(&file.path, python.as_ref()) {
                Ok(task) => found.push((name.0.span, task)),
                Err(error) => {
                    let path = if error.file == file.path { PathBuf::from(&file.name) } else { error.file.clone() };
                    let message = TaskError { file: path, ..error }.to_string();
                    problems.push(Problem::error("bad-value", name.0.span, message, "a task file that cannot be read"));
                }
            }
        }
        (found, problems)
    }

    /// What is wrong with the values taken together, whose keys begin with `below`.
    pub(in crate::kinds) fn problems(&self, below: &str, span: Span) -> Vec<Problem> {
        let bad = |field: &str, message: &str| {
            Problem::error("bad-value", span, message, "in this stage").at(format!("{below}{field}"))
        };
        let mut problems = Vec::new();
        if self.tasks.as_ref().is_some_and(|tasks| tasks.0.is_empty()) {
            problems.push(bad("tasks", "`tasks` is empty"));
        }
        let mut seen = BTreeSet::new();
        for name in self.chosen().filter(|name| !seen.insert(name.text())) {
            problems.push(bad("tasks", &format!("the task `{}` is named twice", name.text())));
        }
        if self.fewshot_as_multiturn == Some(true) && self.apply_chat_template != Some(true) {
            problems.push(bad("fewshot_as_multiturn", "turns are of a conversation: `apply_chat_template` makes one"));
        }
        problems
    }

    pub(super) fn options(&self) -> PromptOptions<'_> {
        PromptOptions {
            apply_chat_template: self.apply_chat_template.unwrap_or(false),
            fewshot_as_multiturn: self.fewshot_as_multiturn.or(self.apply_chat_template).unwrap_or(false),
            system_instruction: self.system_instruction.as_deref(),
        }
    }
}

impl TaskParams {
    /// What is wrong with the values taken together.
    pub(in crate::kinds) fn problems(&self, has_data: bool, span: Span) -> Vec<Problem> {
        let Self { choice, train_data } = self;
        let bad = |field: &str, message: &str| Problem::error("bad-value", span, message, "in this stage").at(field);
        let mut problems = match (choice.tasks.is_some(), has_data) {
            (true, true) => vec![bad("tasks", "`tasks` replaces `data`: give one of them")],
            (false, false) => {
                let message = "`evaluate` needs `data`, the rows to measure on, or `tasks`";
                vec![Problem::error("missing-key", span, message, "in this stage")]
            }
            _ => Vec::new(),
        };
        problems.extend(choice.problems("", span));
        if choice.tasks.is_none() {
            let without: [(&str, bool); 8] = [
                ("task_data", choice.task_data.is_some()),
                ("task_datasets", choice.task_datasets.is_some()),
                ("task_functions", choice.task_functions.is_some()),
                ("num_fewshot", choice.num_fewshot.is_some()),
                ("apply_chat_template", choice.apply_chat_template.is_some()),
                ("fewshot_as_multiturn", choice.fewshot_as_multiturn.is_some()),
                ("system_instruction", choice.system_instruction.is_some()),
                ("train_data", train_data.is_some()),
            ];
            let given = without.into_iter().filter(|(_, given)| *given);
            problems
                .extend(given.map(|(field, _)| bad(field, &format!("`{field}` is for `tasks`, and there are none"))));
        }
        problems
    }
}
