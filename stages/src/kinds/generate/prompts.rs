//! What is asked: texts of the file, or rows of a stage.

use std::collections::BTreeMap;

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::OneOf;
use engine::stage::InputFacts;

use super::Generate;
use crate::compute::inference::InferenceSession;
use crate::data::artifact::{RowsFacts, RowsReader, Shape};
use crate::data::prompt::{NAMED, Prompt, PromptRenderer, Prompter, Template};
use crate::data::tokenizer::Tokenizer;

/// The `template` that stands for the model's chat template.
const CHAT: &str = "chat";

/// A prompt, ready for the model.
pub(super) struct EncodedPrompt {
    /// Its number, from 0.
    pub row: u64,
    /// What a person asked: the text of the file, or the prompt of the row.
    pub text: String,
    /// What the model reads, or why it cannot be used as a prompt.
    pub ids: Result<Vec<u32>, String>,
    /// The answer that the data gives.
    pub reference: Option<String>,
}

/// How a text becomes a prompt.
enum Form {
    Plain,
    Chat,
    Template { template: Template, placeholder: String },
}

impl Form {
    fn of(template: Option<&str>) -> Result<Self, String> {
        let Some(text) = template else { return Ok(Self::Plain) };
        if text == CHAT {
            return Ok(Self::Chat);
        }
        let template = match Template::named(text) {
            Some(template) => template,
            None => Template::custom(text).map_err(|error| error.to_string())?,
        };
        match template.required().as_slice() {
            [placeholder] => Ok(Self::Template { placeholder: placeholder.clone(), template }),
            several => Err(format!("the template has {} placeholders, and a prompt fills one", several.len())),
        }
    }

    fn prompt(&self, text: &str, prompter: &Prompter, tokenizer: &Tokenizer) -> Result<Prompt, StageError> {
        Ok(match self {
            Self::Plain => prompter.plain(text, tokenizer),
            Self::Chat => prompter.user_turn(text, tokenizer)?,
            Self::Template { template, placeholder } => {
                let columns = BTreeMap::from([(placeholder.clone(), text.to_owned())]);
                prompter.templated(template, &columns, tokenizer)
            }
        })
    }
}

/// What is wrong with the prompts, as far as the file tells.
pub(super) fn check(params: &Generate, span: Span) -> Vec<Problem> {
    let problem = |message: String, label: &str| Problem::error("bad-value", span, message, label);
    let mut problems = Vec::new();
    match &params.prompts {
        OneOf::Literal(texts) if texts.is_empty() => {
            problems.push(problem("`prompts` is empty".to_owned(), "no prompts"));
        }
        OneOf::Literal(_) if params.limit.is_some() => {
            problems.push(problem("`limit` is for prompts from a stage".to_owned(), "the prompts are listed here"));
        }
        OneOf::Stage(_) if params.template.is_some() => {
            let message = "`template` is for prompts that are strings; rows have their own".to_owned();
            problems.push(problem(message, "the prompts come from a stage"));
        }
        _ => {}
    }
    if params.samples_per_prompt > 1 && params.temperature == 0.0 {
        let message = "`samples_per_prompt` needs sampling, and `temperature: 0` is greedy decoding".to_owned();
        let label = "all completions of a prompt would be the same";
        problems.push(problem(message, label).at("samples_per_prompt").with_help("set `temperature: 0.8`, say"));
    }
    let filters =
        [("top_k", params.top_k.is_some()), ("top_p", params.top_p.is_some()), ("min_p", params.min_p.is_some())];
    let idle = filters.into_iter().filter(|(_, is_given)| *is_given && params.temperature == 0.0);
    problems.extend(idle.map(|(key, _)| {
        let message = format!("`{key}` is for sampling, and `temperature: 0` is greedy decoding");
        let problem = Problem::warning("no-effect", span, message, "the most likely token is always among them");
        problem.at(key).with_help("set `temperature: 0.8`, say")
    }));
    if let Err(message) = Form::of(params.template.as_deref()) {
        let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).chain([CHAT]).collect();
        let help = format!("write a string with one placeholder, or one of {}", names.join(", "));
        problems.push(problem(message, "`template` is used here").with_help(help));
    }
    problems
}

/// Whether what is asked are conversations, where that is known.
pub(super) fn are_conversations(params: &Generate, inputs: &InputFacts) -> Option<bool> {
    match &params.prompts {
        OneOf::Literal(_) => Some(params.template.as_deref() == Some(CHAT)),
        OneOf::Stage(rows) => {
            let rows = rows.reference.facts_in(inputs).and_then(RowsFacts::from_facts)?;
            Some(rows.shape == Shape::Messages)
        }
    }
}

/// Samples that are drawn before the next prompts are read, unless a single prompt has more.
const SAMPLES_PER_GROUP: usize = 256;

/// What they may have together, in tokens, unless a single one has more.
const TOKENS_PER_GROUP: usize = 1 << 18;

/// The same in bytes of text: one that is too long for the model has no tokens.
const BYTES_PER_GROUP: usize = 32 << 20;

/// The prompts, read in order.
pub(super) struct Prompts {
    source: Source,
    next: u64,
    len: u64,
    /// Answers to each.
    samples: usize,
    /// The rows that they come from, where they come from a stage.
    identity: Option<String>,
}

enum Source {
    Texts { texts: Vec<String>, form: Form, prompter: Prompter },
    Rows { rows: Box<RowsReader>, renderer: PromptRenderer },
}

impl Prompts {
    /// Opens what the parameters name.
    ///
    /// # Errors
    /// Fails if there are none, or the template cannot be used.
    pub(super) fn open(
        params: &Generate,
        tokenizer: &Tokenizer,
        context: &mut StageContext,
    ) -> Result<Self, StageError> {
        let mut identity = None;
        let (source, len) = match &params.prompts {
            OneOf::Literal(texts) => {
                let form = Form::of(params.template.as_deref())
                    .map_err(|message| StageError::new(Cause::BadParameters, message))?;
                let prompter = Prompter::new(&params.prompt, tokenizer)?;
                (Source::Texts { texts: texts.clone(), form, prompter }, texts.len() as u64)
            }
            OneOf::Stage(input) => {
                let artifact = context.open(input)?;
                identity = Some(artifact.description.identity.to_string());
                let rows = RowsReader::open(&artifact)?;
                let renderer = PromptRenderer::new(&params.prompt, rows.facts(), tokenizer)?;
                let len = params.limit.unwrap_or(u64::MAX).min(rows.len());
                (Source::Rows { rows: Box::new(rows), renderer }, len)
            }
        };
        if len == 0 {
            return Err(StageError::bad_data("there are no prompts"));
        }
        Ok(Self { source, next: 0, len, samples: params.samples_per_prompt as usize, identity })
    }

    /// The identity of the rows, where they come from a stage.
    pub(super) fn identity(&self) -> Option<&str> {
        self.identity.as_deref()
    }

    /// The texts that end an answer, where they are no tokens that end a completion by themselves.
    pub(super) fn stop_texts(&self, tokenizer: &Tokenizer) -> Vec<String> {
        match &self.source {
            // What the pipeline file lists are conversations without tools.
            Source::Texts { form: Form::Chat, prompter, .. } => {
                prompter.stop_texts(tokenizer).without_tools.into_iter().collect()
            }
            Source::Texts { .. } => Vec::new(),
            Source::Rows { renderer, .. } => renderer.stop_texts(tokenizer),
        }
    }

    /// What ends the reasoning before an answer.
    pub(super) fn end_of_reasoning(&self) -> Option<&str> {
        match &self.source {
            Source::Texts { .. } => None,
            Source::Rows { renderer, .. } => renderer.end_of_reasoning(),
        }
    }

    /// How many there are.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// The next few of them; `None` at the end.
    ///
    /// # Errors
    /// Fails if rows cannot be read.
    pub(super) fn next_group(&mut self, session: &InferenceSession) -> Result<Option<Vec<EncodedPrompt>>, StageError> {
        let (mut group, mut tokens, mut bytes) = (Vec::new(), 0, 0);
        let (all, samples) = (session.prefers_all_at_once(), self.samples);
        let has_room = |group: &Vec<EncodedPrompt>, tokens, bytes| {
            all || group.len() * samples < SAMPLES_PER_GROUP && tokens < TOKENS_PER_GROUP && bytes < BYTES_PER_GROUP
        };
        while self.next < self.len && has_room(&group, tokens, bytes) {
            let asked = self.asked(self.next, session)?;
            tokens += asked.ids.as_ref().map_or(0, Vec::len);
            bytes += asked.text.len();
            group.push(asked);
            self.next += 1;
        }
        Ok((!group.is_empty()).then_some(group))
    }

    fn asked(&mut self, row: u64, session: &InferenceSession) -> Result<EncodedPrompt, StageError> {
        let tokenizer = &session.tokenizer;
        let encoded = |prompt: Prompt| {
            let ids = prompt.encode(tokenizer).map_err(StageError::from).map_err(in_one_line)?.input_ids;
            session.misfit(&ids).map_or(Ok(ids), Err)
        };
        match &mut self.source {
            Source::Texts { texts, form, prompter } => {
                let text = texts[row as usize].clone();
                let ids = form.prompt(&text, prompter, tokenizer).map_err(in_one_line).and_then(encoded);
                Ok(EncodedPrompt { row, text, ids, reference: None })
            }
            Source::Rows { rows, renderer } => {
                let asked = rows.row(row)?;
                match renderer.question(&asked, tokenizer) {
                    Ok(question) => {
                        let text = question.prompt.to_text(tokenizer)?;
                        Ok(EncodedPrompt { row, text, ids: encoded(question.prompt), reference: question.reference })
                    }
                    Err(error) => {
                        let ids = Err(in_one_line(error.into()));
                        Ok(EncodedPrompt { row, text: String::new(), ids, reference: None })
                    }
                }
            }
        }
    }
}

/// A failure with all that lay beneath.
fn in_one_line(error: StageError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_has_one_place_for_the_prompt() {
        assert!(matches!(Form::of(None), Ok(Form::Plain)));
        assert!(matches!(Form::of(Some("chat")), Ok(Form::Chat)));
        let Ok(Form::Template { placeholder, .. }) = Form::of(Some("Question: {question}\nAnswer: ")) else {
            panic!("not taken as a template");
        };
        assert_eq!(placeholder, "question");
        // `input` may be empty in Alpaca's template, so the instruction is the prompt.
        assert!(
            matches!(Form::of(Some("alpaca")), Ok(Form::Template { placeholder, .. }) if placeholder == "instruction")
        );
        assert!(Form::of(Some("{a} and {b}")).err().unwrap().contains("2 placeholders"));
        assert!(Form::of(Some("none at all")).is_err());
    }
}
