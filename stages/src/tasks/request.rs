//! What the model is asked for each row of a task.

use serde_json::Value;

use super::TaskError;
use super::documents::Document;
use super::fewshot::{FewShots, SEED};
use super::file::{FewshotConfig, FieldValue, OutputType, Task};
use super::prompt::{Asked, PromptOptions, Shot};
use super::template::{Field, printed};
use crate::data::prompt::ChatTemplate;

/// What the model is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// How likely a continuation of a context is.
    Continuation { context: String, continuation: String },
    /// How likely a text is.
    Rolling { text: String },
    /// To continue a context.
    Generation { context: String },
}

/// The right answer of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Gold {
    /// Choices by index: any of them.
    Choices(Vec<usize>),
    /// Texts: any of them.
    Texts(Vec<String>),
}

/// A row with what is asked for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub document: Document,
    /// `doc_to_target` of it.
    pub target: Value,
    pub gold: Gold,
    pub choices: Vec<String>,
    /// One a choice; with `acc_mutual_info` the same again without a context.
    pub requests: Vec<Request>,
}

/// The keys that make text of a row.
struct Fields<'t> {
    task: &'t Task,
    /// Of the row that is asked about.
    asked: Form<'t>,
    /// Of rows that are shown.
    shown: Form<'t>,
    description: Field<'t>,
    prefix: Option<Field<'t>>,
}

/// The keys of a question and its answer, with their names in messages.
struct Form<'t> {
    text: (&'static str, Field<'t>),
    target: (&'static str, Field<'t>),
    choices: Option<(&'static str, Field<'t>)>,
}

impl<'t> Fields<'t> {
    fn new(task: &'t Task) -> Result<Self, TaskError> {
        let field = |key: &str, value: &'t FieldValue| {
            Field::new(value).map_err(|message| TaskError::key(&task.file, key, message))
        };
        let named = |(key, value): (&'static str, &'t FieldValue)| Ok::<_, TaskError>((key, field(key, value)?));
        let text = ("doc_to_text", &task.doc_to_text);
        let target = ("doc_to_target", &task.doc_to_target);
        let choices = task.doc_to_choice.as_ref().map(|value| ("doc_to_choice", value));
        let FewshotConfig { doc_to_text, doc_to_target, doc_to_choice, .. } = &task.fewshot;
        let shown_text = doc_to_text.as_ref().map_or(text, |value| ("fewshot_config.doc_to_text", value));
        let shown_target = doc_to_target.as_ref().map_or(target, |value| ("fewshot_config.doc_to_target", value));
        let shown_choices = doc_to_choice.as_ref().map(|value| ("fewshot_config.doc_to_choice", value)).or(choices);
        let form = |text, target, choices: Option<_>| {
            let choices = choices.map(named).transpose()?;
            Ok::<_, TaskError>(Form { text: named(text)?, target: named(target)?, choices })
        };
        Ok(Self {
            task,
            asked: form(text, target, choices)?,
            shown: form(shown_text, shown_target, shown_choices)?,
            description: field("description", &task.description)?,
            prefix: task.gen_prefix.as_ref().map(|value| field("gen_prefix", value)).transpose()?,
        })
    }

    fn wrong(&self, key: &str, message: impl Into<String>) -> TaskError {
        TaskError::key(&self.task.file, key, message)
    }

    fn choices(&self, form: &Form<'_>, row: &Document) -> Result<Vec<String>, TaskError> {
        let Some((key, choices)) = &form.choices else { return Ok(Vec::new()) };
        choices.choices(row).map_err(|message| self.wrong(key, message))
    }

    fn text(&self, form: &Form<'_>, row: &Document) -> Result<Value, TaskError> {
        let (key, text) = &form.text;
        match text.index_or_text(row, form.choices.is_some()) {
            Ok(Value::Null) => Err(self.wrong(key, "there is no text, but None")),
            found => found.map_err(|message| self.wrong(key, message)),
        }
    }

    fn target(&self, form: &Form<'_>, row: &Document) -> Result<Value, TaskError> {
        let (key, target) = &form.target;
        target.target(row, form.choices.is_some()).map_err(|message| self.wrong(key, message))
    }

    fn description(&self, row: &Document) -> Result<String, TaskError> {
        let description = self.description.of(row).map_err(|message| self.wrong("description", message))?;
        Ok(printed(&description))
    }

    /// What an answer begins with.
    fn prefix(&self, row: &Document) -> Result<Option<String>, TaskError> {
        let Some(prefix) = &self.prefix else { return Ok(None) };
        let prefix = prefix.of(row).map_err(|message| self.wrong("gen_prefix", message))?;
        Ok(Some(printed(&prefix)).filter(|prefix| !prefix.is_empty()))
    }

    fn choice<'c>(&self, key: &str, choices: &'c [String], index: &Value) -> Result<(usize, &'c str), TaskError> {
        let at = index.as_u64().map(|at| at as usize);
        let found = at.and_then(|at| Some((at, choices.get(at)?.as_str())));
        found.ok_or_else(|| {
            self.wrong(key, format!("there are {} choices, and the right one is {index}", choices.len()))
        })
    }

    /// A row as it is shown.
    fn shot(&self, row: &Document) -> Result<Shot, TaskError> {
        let form = &self.shown;
        let choices = self.choices(form, row)?;
        let chosen = |(key, _): &(&'static str, Field<'_>), index: &Value| {
            self.choice(key, &choices, index).map(|(_, choice)| choice.to_owned())
        };
        let question = match self.text(form, row)? {
            index @ Value::Number(_) if form.choices.is_some() => chosen(&form.text, &index)?,
            text => printed(&text),
        };
        let target = match self.target(form, row)? {
            Value::Array(targets) => targets.into_iter().next().unwrap_or_default(),
            target => target,
        };
        let answer = match target {
            index @ Value::Number(_) if form.choices.is_some() => chosen(&form.target, &index)?,
            text => printed(&text),
        };
        Ok(Shot { question, prefix: self.prefix(row)?, answer: Some(answer).filter(|answer| !answer.is_empty()) })
    }

    /// The choices that are right.
    fn right(&self, key: &str, choices: &[String], target: &Value) -> Result<Vec<usize>, TaskError> {
        let index = |target: &Value| match target {
            Value::String(text) => choices.iter().position(|choice| choice == text).ok_or_else(|| {
                self.wrong(key, format!("the target `{text}` is not one of the {} choices", choices.len()))
            }),
            index => Ok(self.choice(key, choices, index)?.0),
        };
        match target {
            Value::Array(targets) => targets.iter().map(index).collect(),
            target => Ok(vec![index(target)?]),
        }
    }
}

/// Makes requests of the rows of a task.
pub struct Asking<'t> {
    pub task: &'t Task,
    pub options: PromptOptions<'t>,
    pub chat_template: Option<&'t ChatTemplate>,
    /// Rows to show before each; the task's own number if left out.
    pub num_fewshot: Option<usize>,
}

impl Asking<'_> {
    /// What is asked for these rows; `shown` are those that few shots come from, unless the task's file has its own.
    ///
    /// # Errors
    /// Fails with the row and the key that give no request.
    pub fn samples(&self, rows: &[Document], shown: &[Document]) -> Result<Vec<Sample>, TaskError> {
        let fields = Fields::new(self.task)?;
        let own = self.task.shown_samples().map_err(|message| fields.wrong("fewshot_config", message))?;
        let shown = own.as_deref().unwrap_or(shown);
        let mut shots = FewShots::new(self.task, self.task.shots(self.num_fewshot), shown, SEED);
        let sample = |(index, row): (usize, &Document)| {
            let shots = shots.next(row).map_err(|message| fields.wrong("num_fewshot", message))?;
            self.sample(&fields, row, &shots).map_err(|error| error.in_row(index))
        };
        rows.iter().enumerate().map(sample).collect()
    }

    fn sample(&self, fields: &Fields<'_>, row: &Document, shots: &[&Document]) -> Result<Sample, TaskError> {
        let shots: Vec<Shot> = shots.iter().map(|shot| fields.shot(shot)).collect::<Result<_, _>>()?;
        let target = fields.target(&fields.asked, row)?;
        let (description, prefix) = (fields.description(row)?, fields.prefix(row)?);
        let context = |question: &str| {
            let asked = Asked { description: &description, question, prefix: prefix.as_deref() };
            let context = self.task.context(&shots, asked, self.options, self.chat_template);
            context.map_err(|message| fields.wrong("doc_to_text", message))
        };
        let asked = |question: &Value| context(&printed(question));
        let choices = fields.choices(&fields.asked, row)?;
        let (requests, gold) = match self.task.output_type {
            OutputType::MultipleChoice => self.choice(fields, row, &target, &choices, &context)?,
            OutputType::Loglikelihood => {
                let continuation = printed(&target);
                let request =
                    Request::Continuation { context: asked(&fields.text(&fields.asked, row)?)?, continuation };
                (vec![request], Gold::Texts(vec![printed(&target)]))
            }
            OutputType::LoglikelihoodRolling => {
                (vec![Request::Rolling { text: printed(&target) }], Gold::Texts(Vec::new()))
            }
            OutputType::GenerateUntil => {
                let texts = match &target {
                    Value::Array(texts) => texts.iter().map(printed).collect(),
                    index @ Value::Number(_) if !choices.is_empty() && !self.task.has_own_results() => {
                        vec![fields.choice("doc_to_target", &choices, index)?.1.to_owned()]
                    }
                    text => vec![printed(text)],
                };
                (vec![Request::Generation { context: asked(&fields.text(&fields.asked, row)?)? }], Gold::Texts(texts))
            }
        };
        Ok(Sample { document: row.clone(), target, gold, choices, requests })
    }

    fn choice(
        &self,
        fields: &Fields<'_>,
        row: &Document,
        target: &Value,
        choices: &[String],
        context: &dyn Fn(&str) -> Result<String, TaskError>,
    ) -> Result<(Vec<Request>, Gold), TaskError> {
        if choices.is_empty() {
            return Err(fields.wrong("doc_to_choice", "there are no choices"));
        }
        let delimiter = self.task.delimiter(self.options);
        let question = fields.text(&fields.asked, row)?;
        // An index: the choices are contexts, and the target continues each.
        let contexts_differ = question.is_number();
        let by_length = self.task.metrics.iter().find(|metric| metric.divides_by_length());
        if let Some(metric) = by_length.filter(|_| !contexts_differ && choices.iter().any(String::is_empty)) {
            let message = format!("a choice has no text, and `{}` divides by its length", metric.name);
            return Err(fields.wrong("doc_to_choice", message));
        }
        let mut requests = Vec::with_capacity(choices.len());
        for choice in choices {
            let (question, continuation) =
                if contexts_differ { (choice.clone(), printed(target)) } else { (printed(&question), choice.clone()) };
            let continuation = format!("{delimiter}{continuation}");
            if continuation.is_empty() {
                return Err(fields.wrong("doc_to_choice", "a choice has no text"));
            }
            requests.push(Request::Continuation { context: context(&question)?, continuation });
        }
        let right = match contexts_differ {
            true => fields.right("doc_to_text", choices, &question),
            false => fields.right("doc_to_target", choices, target),
        };
        // A function of results has its own idea of what is right.
        let right = if self.task.has_own_results() { right.unwrap_or_default() } else { right? };
        if self.task.metrics.iter().any(|metric| metric.needs_unconditional()) {
            let unconditional = |request: &Request| match request {
                Request::Continuation { continuation, .. } => {
                    Request::Continuation { context: String::new(), continuation: continuation.clone() }
                }
                other => other.clone(),
            };
            let again: Vec<Request> = requests.iter().map(unconditional).collect();
            requests.extend(again);
        }
        Ok((requests, Gold::Choices(right)))
    }
}
