//! Whether a model can be trained on rows of tokens and with an adapter at all: known from their facts, before the
//! first step.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use engine::artifact::Facts;
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::stage::InputFacts;
use model::config::Architecture;
use model::peft::{AdapterConfig, Modules};
use serde_json::Value;

use super::forecast::ADAPTER_CONFIG;
use super::parameters::{AdapterOrigin, For, LEAVE_IT_OUT, Loss, Method, Train, contradicts};
use crate::compute::{adapter, checkpoint};
use crate::data::artifact::{Shape, TokensFacts};
use crate::forecast::{model_config, not_native};
use crate::kinds::tokenize::LONGEST_POSSIBLE;

/// What does not fit together, as far as results say that are there.
pub(super) fn problems(params: &Train, inputs: &InputFacts, span: Span) -> Vec<Problem> {
    let mut problems = Vec::new();
    let wrong_input = |message: String, help: &str| {
        Problem::error("wrong-input", span, message, "they meet in this stage").with_help(help)
    };
    let model = params.model.reference.facts_in(inputs);
    for data in [Some(&params.data), params.validation.as_ref()].into_iter().flatten() {
        let other = data.reference.facts_in(inputs).and_then(|facts| other_rows(&params.loss, facts));
        problems.extend(other.map(|error| {
            let problem = Problem::error("wrong-input", data.reference.span, error.message, "rows of another kind");
            problem.with_help_if(error.help)
        }));
        let (Some(facts), Some(model)) = (data.reference.facts_in(inputs), model) else { continue };
        let Some(tokens) = TokensFacts::from_facts(facts) else {
            problems.extend(ahead(facts, model, data.reference.span));
            continue;
        };
        let size = |name: &str| model.get(name).and_then(Value::as_u64).unwrap_or(u64::MAX);
        let misfit = check(&tokens, size("vocab_size"), size("max_position_embeddings"));
        problems.extend(misfit.err().map(|misfit| wrong_input(misfit.to_string(), misfit.help())));
    }
    if let Some(teacher) = params.loss.teacher() {
        let size = |facts: Option<&Facts>| facts?.get("vocab_size")?.as_u64();
        let sizes = size(model).zip(size(teacher.reference.facts_in(inputs)));
        let misfit = sizes.and_then(|(student, teacher)| equal_vocabularies(student, teacher).err());
        problems.extend(misfit.map(|misfit| wrong_input(misfit.to_string(), misfit.help())));
    }
    if let Some(outline) = not_native(&params.model.reference, inputs) {
        problems.extend(params.backend.problem_on(params.serves(), &outline, span));
    }
    if let (Some(quantize), Some(config)) = (&params.quantize, model_config(&params.model.reference, inputs)) {
        problems.extend(quantize.problem_on(&config, span));
    }
    if params.method == Method::Full {
        let config = model_config(&params.model.reference, inputs);
        if config.is_some_and(|config| config.stored_quantized.is_some()) {
            let message = "the model's weights are stored quantised, and `method: full` trains every weight";
            let problem = Problem::error("bad-value", span, message, "quantised already").at("method");
            problems.push(problem.with_help("set `method: lora`, or start from the model before it was quantised"));
        }
        return problems;
    }
    if let Some(config) = model_config(&params.model.reference, inputs) {
        let origin = if params.adapter.is_some() { AdapterOrigin::Existing } else { AdapterOrigin::Fresh };
        problems.extend(params.lora.problem_on(&Modules::from(&config), origin, span));
    }
    problems.extend(contradicted(params, inputs, span));
    let others = params.adapter.iter().filter(|it| adapter::is_of_others(it.reference.facts_in(inputs), model));
    problems.extend(others.map(|it| adapter::problem(&it.reference, &params.model.reference, span)));
    problems
}

/// A setting of the file that contradicts the adapter of the warm start, where another stage of the file has yet to
/// train that one: the run would find it only then.
fn contradicted(params: &Train, inputs: &InputFacts, span: Span) -> Option<Problem> {
    let adapter = &params.adapter.as_ref()?.reference;
    let fields = serde_json::from_str(adapter.facts_in(inputs)?.get(ADAPTER_CONFIG)?.as_str()?).ok()?;
    let existing = AdapterConfig::from_fields(fields).ok()?;
    let model = Modules::from(&model_config(&params.model.reference, inputs)?);
    let (key, file, adapters) = params.lora.contradiction(&existing, &model).ok()??;
    let label = format!("contradicts the adapter of `{}`", adapter.stage);
    let problem = Problem::error("wrong-input", span, contradicts(&key, &file, &adapters), label);
    Some(problem.at(format!("lora.{key}")).with_help(LEAVE_IT_OUT))
}

/// What may not fit, as far as it is known before there are tokens.
fn ahead(tokens: &Facts, model: &Facts, span: Span) -> Vec<Problem> {
    let fact = |facts: &Facts, name: &str| facts.get(name).and_then(Value::as_u64);
    let both = |of_tokens: &str, of_model: &str| {
        let (needed, there) = (fact(tokens, of_tokens)?, fact(model, of_model)?);
        (needed > there).then_some((needed, there))
    };
    let vocabulary = both("vocab_size", "vocab_size").map(|(ids, there)| {
        let message = format!("the tokens' tokenizer has {ids} ids, and the model has {there}");
        Problem::warning("wrong-input", span, message, "made with another tokenizer?")
            .with_help("tokenize with the tokenizer of the model that is trained")
    });
    let length = both(LONGEST_POSSIBLE, "max_position_embeddings").map(|(longest, positions)| {
        let message = format!("a document may have {longest} tokens, and the model has {positions} positions");
        Problem::warning("too-long-for-model", span, message, "longer than the model reads")
            .with_help("lower `max_seq_len` of `tokenize` (or of `pack`): training fails at the first longer document")
    });
    vocabulary.into_iter().chain(length).collect()
}

/// Why a model cannot be trained on these rows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Misfit {
    /// The rows were made for a larger vocabulary.
    #[error("the tokens go up to id {largest_id} (their tokenizer has {tokenizer} ids), and the model has {model}")]
    Vocabulary { largest_id: u32, tokenizer: u64, model: u64 },
    /// The teacher's distributions are over other tokens.
    #[error("the teacher has a vocabulary of {teacher} tokens, and the model one of {student}")]
    TeacherVocabulary { student: u64, teacher: u64 },
    /// The same number of tokens, and not the same ones.
    #[error("the teacher has another tokenizer: `{token}` is {teacher} there, and {student} of the model")]
    TeacherTokens { token: String, student: String, teacher: String },
    /// A document has more tokens than the model has positions.
    #[error("the longest document has {tokens} tokens, and the model has {positions} positions")]
    TooLong { tokens: u64, positions: u64 },
}

impl Misfit {
    /// What to do about it.
    pub(super) fn help(&self) -> &'static str {
        match self {
            Self::Vocabulary { .. } => "tokenize with the tokenizer of the model that is trained",
            Self::TeacherVocabulary { .. } | Self::TeacherTokens { .. } => {
                "distillation compares distributions token by token: take a teacher of the same family, with the same \
                 tokenizer and `vocab_size`"
            }
            Self::TooLong { .. } => "lower `max_seq_len` of `tokenize` (or of `pack`)",
        }
    }
}

impl From<Misfit> for StageError {
    fn from(misfit: Misfit) -> Self {
        StageError::bad_data(misfit.to_string()).with_help(misfit.help())
    }
}

/// Why rows with these facts are not what a loss is for.
pub(super) fn other_rows(loss: &Loss, tokens: &Facts) -> Option<StageError> {
    let shape: Shape = serde_json::from_value(tokens.get("shape")?.clone()).ok()?;
    let (name, rows) = (loss.name(), loss.rows());
    if !rows.takes(shape) {
        let message = format!("`loss: {name}` is for {}, and the rows are {}", rows.describe(), shape.describe());
        let help = match (rows, shape) {
            (For::Ordinary, Shape::Pairs) => "set `loss: dpo`, or another loss of pairs",
            (For::Ordinary, Shape::Judged) => "set `loss: kto`",
            (For::Judged, Shape::Pairs) => {
                "`loss: dpo` and its relatives are for pairs; KTO's rows have `completion` and `label`"
            }
            (For::Pairs, Shape::Judged) => "`loss: kto` is for responses with a label",
            _ => "a `dataset` stage makes them of the columns `chosen` and `rejected`, or `completion` and `label`",
        };
        return Some(StageError::new(Cause::BadParameters, message).with_help(help));
    }
    let tokens = TokensFacts::from_facts(tokens).filter(|_| shape == Shape::Judged)?;
    let lacking = match (tokens.chosen, tokens.rejected) {
        (0, _) => "desirable",
        (_, 0) => "undesirable",
        _ => return None,
    };
    let message = format!("`loss: {name}` needs responses of both labels, and no row is {lacking}");
    Some(StageError::new(Cause::BadData, message).with_help("look at the column with the labels"))
}

/// Compares the vocabularies of a model and its teacher by their sizes.
fn equal_vocabularies(student: u64, teacher: u64) -> Result<(), Misfit> {
    if student == teacher { Ok(()) } else { Err(Misfit::TeacherVocabulary { student, teacher }) }
}

/// Compares a model and its teacher: the sizes of their vocabularies and, where both have a `tokenizer.json`, the id of
/// each token in it.
pub(super) fn same_tokens(student: &Artifact, teacher: &Artifact) -> Result<(), StageError> {
    let size = |model: &Artifact| {
        let config = checkpoint::config(&model.folder)?;
        Ok::<_, StageError>(config.get("vocab_size").and_then(Value::as_u64).unwrap_or_default())
    };
    equal_vocabularies(size(student)?, size(teacher)?)?;
    let (Some(student), Some(teacher)) = (token_ids(&student.folder), token_ids(&teacher.folder)) else {
        return Ok(());
    };
    let id = |ids: &BTreeMap<String, u64>, token| ids.get(token).map_or("none".to_owned(), |id| format!("id {id}"));
    let other = student.keys().chain(teacher.keys()).find(|token| student.get(*token) != teacher.get(*token));
    match other {
        None => Ok(()),
        Some(token) => Err(Misfit::TeacherTokens {
            token: token.clone(),
            student: id(&student, token),
            teacher: id(&teacher, token),
        }
        .into()),
    }
}

/// The id of each token of a model's `tokenizer.json`; `None` where it has none of a form that lists them.
fn token_ids(folder: &Path) -> Option<BTreeMap<String, u64>> {
    let file: Value = serde_json::from_slice(&fs::read(folder.join("tokenizer.json")).ok()?).ok()?;
    let mut ids: BTreeMap<String, u64> = match &file["model"]["vocab"] {
        Value::Object(vocab) => vocab.iter().filter_map(|(token, id)| Some((token.clone(), id.as_u64()?))).collect(),
        // Unigram: tokens with their scores, by id.
        Value::Array(vocab) => {
            let token = |(id, entry): (usize, &Value)| Some((entry[0].as_str()?.to_owned(), id as u64));
            vocab.iter().enumerate().filter_map(token).collect()
        }
        _ => return None,
    };
    let added = file["added_tokens"].as_array().into_iter().flatten();
    ids.extend(added.filter_map(|token| Some((token["content"].as_str()?.to_owned(), token["id"].as_u64()?))));
    Some(ids)
}

/// Compares what the rows need with what a model of this architecture has, as far as its configuration says.
pub(super) fn check_on(model: &Architecture, tokens: &TokensFacts) -> Result<(), Misfit> {
    let size = |size: Option<usize>| size.map_or(u64::MAX, |size| size as u64);
    check(tokens, size(model.vocab_size()), size(model.max_position_embeddings()))
}

/// Warns of a model's own dropouts, which the torch worker does not apply.
pub(super) fn warn_of_dropouts(model: &Architecture, context: &mut StageContext) {
    if let Architecture::Transformers(outline) = model {
        for key in &outline.dropouts {
            context.warn(format!("`{key}` of the model's config.json is not 0: it is trained without that dropout"));
        }
    }
}

/// Compares what the rows need with what the model has.
pub(super) fn check(tokens: &TokensFacts, vocab_size: u64, positions: u64) -> Result<(), Misfit> {
    if let Some(largest_id) = tokens.largest_id.filter(|id| u64::from(*id) >= vocab_size) {
        return Err(Misfit::Vocabulary { largest_id, tokenizer: tokens.vocab_size, model: vocab_size });
    }
    if tokens.longest_document > positions {
        return Err(Misfit::TooLong { tokens: tokens.longest_document, positions });
    }
    Ok(())
}
