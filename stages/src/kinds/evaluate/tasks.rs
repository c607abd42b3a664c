//! Evaluation tasks: which ones, where their rows are, and what becomes of the answers.
//!
//! All that can be wrong with a task, its rows and its prompts is found before the model is loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float64Array, StringArray, UInt64Array};
use engine::artifact::Facts;
use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::{Given, Input, KeyWriter, LocalPath, OneOrMore, Parameter, Parameters, Reader};
use engine::stage::{Outside, PinRequest, Secret};
use model::generation::Request as Prompt;
use model::sampling::Sampling;
use serde_json::{Map, Value, json};

use super::beside::{Difference, Other};
use super::contamination::{self, Contamination};
use super::task_rows::{Granted, fetched};
use super::{EvaluateParams, write_text};
use crate::compute::inference::{Aloud, Respondent, Standing};
use crate::data::artifact::{Rows, RowsReader};
use crate::data::results::TableWriter;
use crate::data::tokenizer::Tokenizer;
use crate::hub::{Service, forget_working_files};
use crate::tasks::encode::{self, Pair};
use crate::tasks::file::{Group, Task, TaskFile};
use crate::tasks::metric::BOOTSTRAP_ITERATIONS;
use crate::tasks::prompt::PromptOptions;
use crate::tasks::request::{Asking, Request, Sample};
use crate::tasks::results::{Answer, Results};
use crate::tasks::{TaskError, score, shipped};

/// What the Hub calls datasets, in pins.
const DATASET_PIN: &str = "hub-dataset";

/// The role of the folder with rows.
pub(super) const DATA: &str = "task_data";

/// A task by its name, or its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskName(LocalPath);

/// Evaluation tasks, and how their prompts are put together.
#[derive(Parameters, Debug)]
pub struct TaskParams {
    /// Evaluation tasks in the place of `data`: names of those that are part of the program, or task files of
    /// lm-evaluation-harness (`.yaml`).
    #[semantic]
    pub tasks: Option<OneOrMore<TaskName>>,
    /// A folder with what tasks read: rows of each split, and files that task files include. Left out, the rows of the
    /// program's own tasks come from the Hub.
    #[semantic]
    pub task_data: Option<LocalPath>,
    /// Rows that are shown before each question; the task's own number if left out.
    #[semantic]
    pub num_fewshot: Option<usize>,
    /// Whether prompts of tasks are conversations by the tokenizer's chat template; they are not if left out.
    #[semantic]
    pub apply_chat_template: Option<bool>,
    /// Whether each row that is shown is a turn of its own.
    #[semantic]
    pub fewshot_as_multiturn: Option<bool>,
    /// What a conversation, or a prompt, begins with.
    #[semantic]
    pub system_instruction: Option<String>,
    /// Rows that the model was trained on: those of tasks that stand in them are counted.
    #[semantic]
    pub train_data: Option<Input<Rows>>,
}

impl TaskName {
    fn text(&self) -> &str {
        &self.0.text
    }

    fn is_file(&self) -> bool {
        [".yaml", ".yml"].iter().any(|extension| self.text().ends_with(extension))
    }

    pub(super) fn role(&self) -> String {
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
        self.tasks.is_some()
    }
}

impl TaskParams {
    pub(super) fn chosen(&self) -> impl Iterator<Item = &TaskName> {
        self.tasks.iter().flat_map(|tasks| &tasks.0)
    }

    /// Tasks of the program whose rows are those on the Hub: all, where no folder with rows is named.
    pub(super) fn on_hub(&self) -> Vec<Task> {
        let mut found: Vec<Task> = Vec::new();
        let mut names: Vec<String> = match self.task_data {
            Some(_) => Vec::new(),
            None => self.chosen().filter(|name| !name.is_file()).map(|name| name.text().to_owned()).collect(),
        };
        while let Some(name) = names.pop() {
            let definition = shipped::definition(&name).unwrap_or_default();
            match TaskFile::shipped(&name, &definition) {
                Ok(TaskFile::Group(group)) => names.extend(group.tasks),
                Ok(TaskFile::Task(task)) if found.iter().all(|known| known.name != task.name) => found.push(*task),
                _ => {}
            }
        }
        found
    }

    /// The datasets on the Hub that rows come from.
    fn pins(&self) -> Vec<PinRequest> {
        let tasks = self.on_hub();
        let names: BTreeSet<&str> = tasks.iter().filter_map(|task| task.dataset_path.as_deref()).collect();
        names.into_iter().map(|name| self.pin(name)).collect()
    }

    pub(super) fn pin(&self, dataset: &str) -> PinRequest {
        PinRequest {
            kind: DATASET_PIN.to_owned(),
            name: dataset.to_owned(),
            revision: Service::HuggingFace.default_revision().to_owned(),
            token_env: None,
            span: self.chosen().next().map(|name| name.0.span).unwrap_or_default(),
        }
    }

    /// The token for the Hub, where rows come from there.
    pub(super) fn secrets(&self) -> Vec<Secret> {
        let is_on_hub = !self.pins().is_empty();
        is_on_hub.then(|| Secret::token(None, Service::HuggingFace.token_variable())).into_iter().collect()
    }

    pub(super) fn outside(&self) -> Vec<Outside> {
        let files =
            |role: String, path: &LocalPath| Outside::Files { role, pattern: path.text.clone(), span: path.span };
        let tasks = self.chosen().filter(|name| name.is_file()).map(|name| files(name.role(), &name.0));
        let local = tasks.chain(self.task_data.iter().map(|path| files(DATA.to_owned(), path)));
        local.chain(self.pins().into_iter().map(Outside::Pin)).collect()
    }

    /// What is wrong with the values taken together.
    pub(super) fn problems(&self, has_data: bool, span: Span) -> Vec<Problem> {
        let bad = |field: &str, message: &str| Problem::error("bad-value", span, message, "in this stage").at(field);
        let mut problems = Vec::new();
        match (&self.tasks, has_data) {
            (Some(_), true) => {
                problems.push(bad("tasks", "`tasks` stands in the place of `data`: one of them is given"))
            }
            (None, false) => problems.push(Problem::error(
                "missing-key",
                span,
                "`evaluate` needs `data`, the rows to measure on, or `tasks`",
                "in this stage",
            )),
            (Some(OneOrMore(tasks)), false) if tasks.is_empty() => problems.push(bad("tasks", "`tasks` is empty")),
            _ => {}
        }
        let mut seen = BTreeSet::new();
        for name in self.chosen().filter(|name| !seen.insert(name.text())) {
            problems.push(bad("tasks", &format!("the task `{}` is named twice", name.text())));
        }
        if self.tasks.is_none() {
            let without: [(&str, bool); 6] = [
                ("task_data", self.task_data.is_some()),
                ("num_fewshot", self.num_fewshot.is_some()),
                ("apply_chat_template", self.apply_chat_template.is_some()),
                ("fewshot_as_multiturn", self.fewshot_as_multiturn.is_some()),
                ("system_instruction", self.system_instruction.is_some()),
                ("train_data", self.train_data.is_some()),
            ];
            let given = without.into_iter().filter(|(_, given)| *given);
            problems
                .extend(given.map(|(field, _)| bad(field, &format!("`{field}` is for `tasks`, and there are none"))));
        }
        if self.fewshot_as_multiturn == Some(true) && self.apply_chat_template != Some(true) {
            problems.push(bad("fewshot_as_multiturn", "turns are of a conversation: `apply_chat_template` makes one"));
        }
        problems
    }

    fn options(&self) -> PromptOptions<'_> {
        PromptOptions {
            apply_chat_template: self.apply_chat_template.unwrap_or(false),
            fewshot_as_multiturn: self.fewshot_as_multiturn.unwrap_or(false),
            system_instruction: self.system_instruction.as_deref(),
        }
    }
}

/// A task with its rows as requests.
pub(super) struct Prepared {
    pub task: Task,
    num_fewshot: usize,
    pub samples: Vec<Sample>,
    /// Rows that it has.
    original: usize,
}

/// Tasks, and the groups that they belong to.
#[derive(Default)]
struct Chosen {
    tasks: Vec<Task>,
    groups: Vec<Group>,
}

impl Chosen {
    fn add(
        &mut self,
        name: &str,
        file: TaskFile,
        find: &dyn Fn(&str) -> Result<TaskFile, StageError>,
    ) -> Result<(), StageError> {
        match file {
            TaskFile::Task(task) if self.tasks.iter().any(|known| known.name == task.name) => {}
            TaskFile::Task(task) => self.tasks.push(*task),
            TaskFile::Group(group) if self.groups.iter().any(|known| known.name == group.name) => {
                let message = format!("the group `{}` is part of itself, or named twice, by `{name}`", group.name);
                return Err(StageError::new(Cause::BadParameters, message));
            }
            TaskFile::Group(group) => {
                let members = group.tasks.clone();
                self.groups.push(group);
                for member in members {
                    self.add(&member, find(&member)?, find)?;
                }
            }
        }
        Ok(())
    }
}

fn chosen(params: &TaskParams, granted: &Granted<'_>) -> Result<Chosen, StageError> {
    let read = |path: &Path| -> Result<TaskFile, StageError> {
        let (file, read) = TaskFile::read_with_includes(path)?;
        read.iter().try_for_each(|included| granted.check(path, included))?;
        Ok(file)
    };
    // What a group names: a task of the program, or a file of that name beside the others.
    let find = |name: &str| -> Result<TaskFile, StageError> {
        if let Some(definition) = shipped::definition(name) {
            return Ok(TaskFile::shipped(name, &definition)?);
        }
        let file = granted.files.iter().find(|grant| grant.path.file_stem().is_some_and(|stem| stem == name));
        let file = file.ok_or_else(|| {
            StageError::new(Cause::BadParameters, format!("there is no task `{name}`, which a group names"))
                .with_help("name its file in `tasks`, or have it in the folder of `task_data`")
        })?;
        read(&file.path)
    };
    let mut chosen = Chosen::default();
    for name in params.chosen() {
        let file = match name.is_file() {
            false => find(name.text())?,
            true => match granted.context.files(&name.role()) {
                [file] => read(&file.path.clone())?,
                _ => return Err(StageError::new(Cause::BadParameters, format!("`{}` is no file", name.text()))),
            },
        };
        chosen.add(name.text(), file, &find)?;
    }
    Ok(chosen)
}

/// Makes requests of the rows of a task.
fn prepare(
    params: &EvaluateParams,
    task: Task,
    granted: &Granted<'_>,
    tokenizer: &Tokenizer,
) -> Result<Prepared, StageError> {
    let split = task.evaluated_split().unwrap_or_default().to_owned();
    let mut rows = granted.rows(&task, &split)?;
    let original = rows.len();
    if original == 0 {
        return Err(StageError::bad_data(format!("the split `{split}` of the task `{}` has no rows", task.name)));
    }
    rows.truncate(params.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX)));
    let num_fewshot = params.task.0.num_fewshot.unwrap_or(task.num_fewshot);
    let shown = match task.shown_split().filter(|_| num_fewshot > 0) {
        Some(split) => granted.rows(&task, split)?,
        None => Vec::new(),
    };
    let asking = Asking {
        task: &task,
        options: params.task.0.options(),
        chat_template: tokenizer.chat_template().map(Arc::as_ref),
        num_fewshot: Some(num_fewshot),
    };
    let samples = asking.samples(&rows, &shown)?;
    Ok(Prepared { task, num_fewshot, samples, original })
}

/// What the model is asked in one go, and for which request.
#[derive(Default)]
struct Requests {
    pairs: Vec<Pair>,
    /// Task, row and request of each pair: those of the windows of a long text are one request.
    of_pairs: Vec<(usize, usize, usize)>,
    prompts: Vec<Vec<u32>>,
    of_prompts: Vec<(usize, usize)>,
}

impl Requests {
    fn of(prepared: &[Prepared], tokenizer: &Tokenizer, max_length: usize) -> Result<Self, StageError> {
        let mut requests = Self::default();
        for (at, Prepared { task, samples, .. }) in prepared.iter().enumerate() {
            for (row, sample) in samples.iter().enumerate() {
                let wrong = |key: &str, message: String| TaskError::in_row_of(&task.file, row, key, message);
                for (number, request) in sample.requests.iter().enumerate() {
                    let encoded = match request {
                        Request::Continuation { context, continuation } => {
                            let pair = encode::pair(tokenizer, context, continuation)?;
                            let pair = pair.ok_or_else(|| {
                                wrong(
                                    "doc_to_text",
                                    "there is no context, and the tokenizer has neither a BOS nor an EOS token \
                                                      to stand for it"
                                        .to_owned(),
                                )
                            })?;
                            if pair.continuation_ids.is_empty() {
                                let message = format!("`{continuation}` has no tokens of its own behind its context");
                                return Err(wrong("doc_to_choice", message).into());
                            }
                            if pair.continuation_ids.len() > max_length {
                                let tokens = pair.continuation_ids.len();
                                let message =
                                    format!("a continuation has {tokens} tokens, and the model reads {max_length}");
                                return Err(wrong("doc_to_choice", message).into());
                            }
                            vec![pair]
                        }
                        Request::Rolling { text } => {
                            let prefix = encode::prefix_token(tokenizer).ok_or_else(|| {
                                wrong(
                                    "doc_to_target",
                                    "the tokenizer has neither a BOS nor an EOS token to begin with".to_owned(),
                                )
                            })?;
                            encode::windows(&encode::text(tokenizer, text)?, prefix, max_length)
                        }
                        Request::Generation { context } => {
                            let ids = encode::text(tokenizer, context)?;
                            let most = max_length.saturating_sub(task.generation.max_new_tokens);
                            if most == 0 {
                                let message = format!(
                                    "`max_gen_toks` leaves no room for a prompt: the model has {max_length} positions"
                                );
                                return Err(TaskError::of(&task.file, "generation_kwargs", message).into());
                            }
                            let from = ids.len().saturating_sub(most);
                            requests.prompts.push(ids[from..].to_vec());
                            requests.of_prompts.push((at, row));
                            Vec::new()
                        }
                    };
                    requests.of_pairs.extend(std::iter::repeat_n((at, row, number), encoded.len()));
                    requests.pairs.extend(encoded);
                }
            }
        }
        Ok(requests)
    }
}

/// Evaluates the tasks.
pub(super) fn run(params: &EvaluateParams, context: &mut StageContext) -> Result<(), StageError> {
    let mut others = Vec::new();
    for input in params.compare_with.iter().flat_map(|others| &others.0) {
        others.push(Other::read(&input.reference.stage, &context.open(input)?.folder)?);
    }
    let folder = match &params.inference.tokenizer {
        Some(tokenizer) => context.open(tokenizer)?.folder,
        None => context.open(&params.inference.model)?.folder,
    };
    let tokenizer = Tokenizer::from_folder(&folder)?;
    let on_hub = fetched(&params.task.0, context)?;
    let (prepared, groups) = {
        let granted = Granted::of(&params.task.0, &on_hub, context);
        let Chosen { tasks, groups } = chosen(&params.task.0, &granted)?;
        let prepared = tasks.into_iter().map(|task| prepare(params, task, &granted, &tokenizer));
        (prepared.collect::<Result<Vec<_>, _>>()?, groups)
    };
    let contamination = match &params.task.0.train_data {
        None => Vec::new(),
        Some(input) => contamination::look(&prepared, &mut RowsReader::open(&context.open(input)?)?, context)?,
    };
    if !on_hub.is_empty() {
        forget_working_files(context.working())?;
    }
    let mut respondent = Respondent::open(&params.inference, Sampling::GREEDY, context)?;
    let positions = respondent.max_position_embeddings();
    let max_length = params.max_seq_len.unwrap_or(positions).min(positions);
    let requests = Requests::of(&prepared, &tokenizer, max_length)?;
    for ids in
        requests.pairs.iter().flat_map(|pair| [&pair.context_ids, &pair.continuation_ids]).chain(&requests.prompts)
    {
        respondent.check_vocabulary(ids, || "a prompt of a task".to_owned())?;
    }
    let mut answers: Vec<Vec<Vec<Option<Answer>>>> = prepared
        .iter()
        .map(|task| task.samples.iter().map(|sample| vec![None; sample.requests.len()]).collect())
        .collect();
    let total = requests.pairs.len() as u64;
    let scored = score::loglikelihoods(&requests.pairs, max_length, |contexts| {
        respondent.score_continuations(
            contexts,
            &mut |done, context| context.progress("requests", done as u64, Some(total), None),
            context,
        )
    })?;
    for ((task, row, number), found) in requests.of_pairs.iter().zip(scored) {
        if found.sum.is_nan() {
            let message =
                format!("a log-likelihood of row {} of `{}` is no number", row + 1, prepared[*task].task.name);
            return Err(
                StageError::new(Cause::Numeric, message).with_help("is this model trained, and on this tokenizer?")
            );
        }
        let answer = &mut answers[*task][*row][*number];
        let (sum, is_greedy) = match answer {
            Some(Answer::Loglikelihood { sum, is_greedy }) => (*sum, *is_greedy),
            _ => (0.0, true),
        };
        *answer = Some(Answer::Loglikelihood { sum: sum + found.sum, is_greedy: is_greedy && found.is_greedy });
    }
    generate(&prepared, &requests, &mut respondent, &mut answers, context)?;
    finish(&prepared, &groups, answers, &others, &contamination, context)
}

/// Lets the model continue the prompts of each task that asks for it.
fn generate(
    prepared: &[Prepared],
    requests: &Requests,
    respondent: &mut Respondent,
    answers: &mut [Vec<Vec<Option<Answer>>>],
    context: &mut StageContext,
) -> Result<(), StageError> {
    for (at, Prepared { task, .. }) in prepared.iter().enumerate() {
        let of_task = || requests.of_prompts.iter().zip(&requests.prompts).filter(|((of, _), _)| *of == at);
        let prompts: Vec<Prompt<'_>> =
            of_task().map(|((_, row), prompt)| Prompt { prompt, row: *row as u64 }).collect();
        if prompts.is_empty() {
            continue;
        }
        respondent.end_at(task.generation.max_new_tokens, &task.generation.until);
        let standing = Standing { unit: "prompts", done: 0, total: Some(prompts.len() as u64), aloud: Aloud::Count };
        let said = respondent.answer(&prompts, standing, context)?;
        for (((_, row), _), answer) in of_task().zip(said) {
            answers[at][*row][0] = Some(Answer::Text(answer.text));
        }
    }
    Ok(())
}

/// The figures of tasks and groups: their table, their files, their facts.
fn finish(
    prepared: &[Prepared],
    groups: &[Group],
    answers: Vec<Vec<Vec<Option<Answer>>>>,
    others: &[Other],
    contamination: &[Contamination],
    context: &mut StageContext,
) -> Result<(), StageError> {
    let none = Answer::Loglikelihood { sum: 0.0, is_greedy: true };
    let draft = context.create("metrics")?;
    let mut results: BTreeMap<&str, Results> = BTreeMap::new();
    for (at, (Prepared { task, samples, .. }, answers)) in prepared.iter().zip(answers).enumerate() {
        let answers: Vec<Vec<Answer>> = answers
            .into_iter()
            .map(|row| row.into_iter().map(|answer| answer.unwrap_or_else(|| none.clone())).collect())
            .collect();
        results.insert(&task.name, task.results(samples, &answers, BOOTSTRAP_ITERATIONS)?);
        let held = contamination.get(at).map(|found| found.rows.as_slice());
        write_samples(task, samples, &answers, held, &draft.folder.join(samples_file(&task.name)))?;
    }
    let mut of_groups: Vec<(&Group, Results)> = Vec::new();
    // A group may be part of one that stands before it.
    for group in groups.iter().rev() {
        let of = |name: &String| {
            let of_group = of_groups.iter().find(|(known, _)| known.name == *name).map(|(_, results)| results);
            results.get(name.as_str()).or(of_group)
        };
        let members: Vec<&Results> = group.tasks.iter().filter_map(of).collect();
        let found = group.results(&members);
        of_groups.insert(0, (group, found));
    }
    let mut facts = Facts::new();
    let mut add = |name: &str, results: &Results| {
        let single = prepared.len() == 1;
        for (key, figure) in &results.figures {
            for (key, value) in [(key.clone(), Some(figure.value)), (stderr_key(key), figure.stderr)] {
                let Some(value) = value.filter(|value| value.is_finite()) else { continue };
                facts.insert(format!("{name}.{key}"), value.into());
                // Those of one task have their own names, too: children of a sweep over tasks are compared by them.
                if single {
                    facts.insert(key, value.into());
                }
            }
        }
    };
    prepared.iter().for_each(|of| add(&of.task.name, &results[of.task.name.as_str()]));
    of_groups.iter().for_each(|(group, found)| add(&group.name, found));
    for (of, found) in prepared.iter().zip(contamination) {
        facts.insert(format!("{}.contaminated_rows", of.task.name), found.count().into());
    }
    facts.insert("rows".to_owned(), prepared.iter().map(|of| of.samples.len()).sum::<usize>().into());
    let of_tasks = prepared.iter().map(|of| (of.task.name.as_str(), &results[of.task.name.as_str()]));
    let all = || of_tasks.clone().chain(of_groups.iter().map(|(group, found)| (group.name.as_str(), found)));
    let mut differences: Vec<Difference> = Vec::new();
    for other in others {
        for (name, found) in all() {
            for (key, figure) in &found.figures {
                differences.extend(other.difference(name, key, (figure.value, figure.stderr), &draft.folder)?);
            }
        }
    }
    let mut value = report(prepared, &results, &of_groups);
    if !differences.is_empty() {
        value["compared"] = differences.iter().map(Difference::json).collect();
    }
    if !contamination.is_empty() {
        let of_task = |(of, found): (&Prepared, &Contamination)| (of.task.name.clone(), found.json());
        value["contamination"] = prepared.iter().zip(contamination).map(of_task).collect::<Map<_, _>>().into();
    }
    let text = serde_json::to_string_pretty(&value).expect("figures are plain data");
    write_text(&draft.folder.join("metrics.json"), &(text + "\n"))?;
    let compared = differences.iter().map(|difference| format!("\n{}", difference.words())).collect::<String>();
    let found = prepared.iter().zip(contamination).filter_map(|(of, found)| found.words(&of.task.name));
    let mut found: Vec<String> = found.collect();
    if found.is_empty() && !contamination.is_empty() {
        found.push("no row of a task stands in the training data".to_owned());
    }
    let found: String = found.iter().map(|line| format!("\n{line}")).collect();
    context.report(table(prepared, &results, &of_groups) + &compared + &found);
    context.seal(draft, facts, None)
}

/// The file with what was asked for each row of a task, and what came back.
pub(super) fn samples_file(task: &str) -> String {
    format!("samples_{task}.parquet")
}

/// The name of a figure's standard error: `acc,none` has `acc_stderr,none`.
pub(super) fn stderr_key(key: &str) -> String {
    key.split_once(',').map_or_else(|| format!("{key}_stderr"), |(metric, filter)| format!("{metric}_stderr,{filter}"))
}

/// The results as the harness writes them.
fn report(prepared: &[Prepared], results: &BTreeMap<&str, Results>, groups: &[(&Group, Results)]) -> Value {
    let figures = |name: &str, results: &Results| {
        let mut value = Map::new();
        value.insert("alias".to_owned(), name.into());
        for (key, figure) in &results.figures {
            value.insert(key.clone(), json!(figure.value));
            value.insert(stderr_key(key), figure.stderr.map_or_else(|| json!("N/A"), |error| json!(error)));
        }
        value.insert("sample_len".to_owned(), results.sample_len.into());
        Value::Object(value)
    };
    let of_tasks = |make: &dyn Fn(&Prepared) -> Value| -> Map<String, Value> {
        prepared.iter().map(|of| (of.task.name.clone(), make(of))).collect()
    };
    let mut all = of_tasks(&|of| figures(&of.task.name, &results[of.task.name.as_str()]));
    let of_groups: Map<String, Value> =
        groups.iter().map(|(group, found)| (group.name.clone(), figures(&group.name, found))).collect();
    all.extend(of_groups.clone());
    json!({
        "results": all,
        "groups": of_groups,
        "group_subtasks": groups.iter().map(|(group, _)| (group.name.clone(), json!(group.tasks))).collect::<Map<_, _>>(),
        "versions": of_tasks(&|of| of.task.version.clone()),
        "n-shot": of_tasks(&|of| of.num_fewshot.into()),
        "higher_is_better": of_tasks(&|of| {
            of.task.metrics.iter().map(|metric| (metric.kind.name().to_owned(), json!(metric.higher_is_better))).collect::<Map<_, _>>().into()
        }),
        "n-samples": of_tasks(&|of| json!({ "original": of.original, "effective": of.samples.len() })),
    })
}

/// The table of the harness.
fn table(prepared: &[Prepared], results: &BTreeMap<&str, Results>, groups: &[(&Group, Results)]) -> String {
    let head = ["task", "version", "filter", "n-shot", "metric", "", "value", "", "stderr"];
    let mut rows: Vec<Vec<String>> = vec![head.map(str::to_owned).to_vec()];
    let mut add = |name: &str, task: Option<&Prepared>, results: &Results| {
        for (at, (key, figure)) in results.figures.iter().enumerate() {
            let (metric, filter) = key.split_once(',').unwrap_or((key, "none"));
            let of = |value: &dyn Fn(&Prepared) -> String| task.map(value).filter(|_| at == 0).unwrap_or_default();
            let better = task.and_then(|of| of.task.metrics.iter().find(|known| known.kind.name() == metric));
            let arrow = better.map_or("", |metric| if metric.higher_is_better { "↑" } else { "↓" });
            let (sign, error) = figure.stderr.map_or(("", String::new()), |error| ("±", format!("{error:.4}")));
            rows.push(vec![
                if at == 0 { name.to_owned() } else { String::new() },
                of(&|of| of.task.version.to_string().trim_matches('"').replace("null", "")),
                filter.to_owned(),
                of(&|of| of.num_fewshot.to_string()),
                metric.to_owned(),
                arrow.to_owned(),
                format!("{:.4}", figure.value),
                sign.to_owned(),
                error,
            ]);
        }
    };
    prepared.iter().for_each(|of| add(&of.task.name, Some(of), &results[of.task.name.as_str()]));
    groups.iter().for_each(|(group, found)| add(&group.name, None, found));
    super::report::aligned(&rows).join("\n")
}

/// What was asked for each row, what came back, and what it is worth.
fn write_samples(
    task: &Task,
    samples: &[Sample],
    answers: &[Vec<Answer>],
    in_training_data: Option<&[bool]>,
    path: &Path,
) -> Result<(), StageError> {
    let texts = |text: &dyn Fn(usize) -> String| -> ArrayRef {
        Arc::new((0..samples.len()).map(|row| Some(text(row))).collect::<StringArray>())
    };
    let request = |request: &Request| match request {
        Request::Continuation { context, continuation } => json!([context, continuation]),
        Request::Rolling { text } => json!([text]),
        Request::Generation { context } => json!([context]),
    };
    let answer = |answer: &Answer| match answer {
        Answer::Loglikelihood { sum, is_greedy } => json!([sum, is_greedy]),
        Answer::Text(text) => json!(text),
    };
    let asked = |row: usize| samples[row].requests.iter().map(request).collect::<Value>().to_string();
    let answered = |row: usize| answers[row].iter().map(answer).collect::<Value>().to_string();
    let mut columns: Vec<(String, ArrayRef)> = vec![
        ("doc_id".to_owned(), Arc::new((0..samples.len() as u64).collect::<UInt64Array>())),
        ("doc".to_owned(), texts(&|row| Value::Object(samples[row].document.clone()).to_string())),
        ("target".to_owned(), texts(&|row| samples[row].target.to_string())),
        ("arguments".to_owned(), texts(&asked)),
        ("resps".to_owned(), texts(&answered)),
    ];
    if let Some(held) = in_training_data {
        columns.push(("in_training_data".to_owned(), Arc::new(BooleanArray::from(held.to_vec()))));
    }
    for (name, worth) in task.worths(samples, answers)? {
        columns.push((name, Arc::new(worth.into_iter().collect::<Float64Array>())));
    }
    let mut writer = TableWriter::new(path.to_owned());
    writer.write(columns.iter().map(|(name, column)| (name.as_str(), Arc::clone(column))))?;
    writer.finish()
}
