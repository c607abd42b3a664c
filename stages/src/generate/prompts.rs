//! What is asked: texts of the file, or rows of a stage.

use std::collections::BTreeMap;

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::OneOf;

use super::GenerateParams;
use crate::artifact::RowsReader;
use crate::prompt::{NAMED, Prompt, PromptOptions, PromptRenderer, Template};
use crate::tokenizer::Tokenizer;

/// The `template` that stands for the model's chat template.
const CHAT: &str = "chat";

/// A prompt, ready for the model.
pub(super) struct Asked {
    /// What a person asked: the text of the file, or the prompt of the row.
    pub text: String,
    /// What the model reads.
    pub ids: Vec<u32>,
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

    fn prompt(&self, text: &str, tokenizer: &Tokenizer) -> Result<Prompt, StageError> {
        Ok(match self {
            Self::Plain => Prompt::plain(text, tokenizer),
            Self::Chat => Prompt::user_turn(text, tokenizer)?,
            Self::Template { template, placeholder } => {
                let columns = BTreeMap::from([(placeholder.clone(), text.to_owned())]);
                Prompt::plain(&template.render(&columns), tokenizer)
            }
        })
    }
}

/// What is wrong with the prompts, as far as the file tells.
pub(super) fn check(params: &GenerateParams, span: Span) -> Vec<Problem> {
    let problem = |message: String, label: &str| Problem::error("bad-value", span, message, label);
    let mut problems = Vec::new();
    match &params.prompts {
        OneOf::Literal(texts) if texts.is_empty() => {
            problems.push(problem("`prompts` is empty".to_owned(), "nothing would be asked"));
        }
        OneOf::Literal(_) if params.limit.is_some() => {
            problems.push(problem("`limit` is for prompts from a stage".to_owned(), "the prompts are listed here"));
        }
        OneOf::Stage(_) if params.template.is_some() => {
            let message = "`template` is for prompts that are texts; rows bring their own".to_owned();
            problems.push(problem(message, "the prompts come from a stage"));
        }
        _ => {}
    }
    if let Err(message) = Form::of(params.template.as_deref()) {
        let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).chain([CHAT]).collect();
        let help = format!("write a text with one placeholder, or one of {}", names.join(", "));
        problems.push(problem(message, "`template` is used here").with_help(help));
    }
    problems
}

/// All prompts, in order.
pub(super) fn collect(
    params: &GenerateParams,
    tokenizer: &Tokenizer,
    context: &mut StageContext,
) -> Result<Vec<Asked>, StageError> {
    let asked: Vec<Asked> = match &params.prompts {
        OneOf::Literal(texts) => {
            let form = Form::of(params.template.as_deref())
                .map_err(|message| StageError::new(Cause::BadParameters, message))?;
            texts
                .iter()
                .map(|text| {
                    let ids = form.prompt(text, tokenizer)?.encode(tokenizer)?.input_ids;
                    Ok(Asked { text: text.clone(), ids, reference: None })
                })
                .collect::<Result<_, StageError>>()?
        }
        OneOf::Stage(input) => {
            let mut rows = RowsReader::open(&context.open(input)?)?;
            let renderer = PromptRenderer::from_rows_facts(rows.facts(), PromptOptions::default())?;
            let most = params.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
            rows.iter()
                .take(most)
                .map(|row| {
                    let question = renderer.question(&row?, tokenizer)?;
                    let ids = question.prompt.encode(tokenizer)?.input_ids;
                    Ok(Asked { text: question.prompt.to_text(tokenizer)?, ids, reference: question.reference })
                })
                .collect::<Result<_, StageError>>()?
        }
    };
    if asked.is_empty() {
        return Err(StageError::bad_data("there are no prompts to answer"));
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

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
