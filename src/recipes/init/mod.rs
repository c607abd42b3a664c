//! `pipeline init`: a pipeline file for the user's rows, model and machine, made of a recipe.
//!
//! [`rows`] looks at the data, [`machine`] at the machine, [`questions`] asks for what is not given.

mod machine;
mod questions;
mod rows;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use stages::data::tokenizer::Tokenizer;

use self::machine::Machine;
use self::questions::answer;
use self::rows::{Form, Rows};
use super::edit::Draft;
use super::models::Model;
use super::{Recipe, models};
use crate::import::places::Places;
use crate::import::write;
use crate::import::{is_of_the_machine, validated};
use crate::render::{self, Exit, Failure};
use crate::terminal::{self, Look};
use crate::{Global, new_file, words};

/// Rows of an optimizer step where there are enough of them.
const ROWS_PER_STEP: u64 = 16;

/// `max_seq_len` of the recipes.
const MAX_SEQ_LEN: u64 = 2048;

/// How many columns are named that are not read.
const COLUMNS_NAMED: usize = 12;

/// Steps that an epoch should have at least.
const STEPS_PER_EPOCH: u64 = 20;

/// Write a pipeline file for rows, a model and a machine of your own.
///
/// On a terminal, asks for what is not given. Looks at the first row of the data (which columns), at their number (rows
/// of a step) and at this machine (which model, how many devices). `pipeline run FILE --smoke` then tries the file.
#[derive(Args)]
pub(crate) struct InitArgs {
    /// The pipeline file to write.
    #[arg(value_name = "FILE", default_value = "pipeline.yaml")]
    file: PathBuf,
    /// A file of rows, or a dataset on the Hub: `owner/name`.
    #[arg(long, value_name = "FILE|NAME")]
    data: Option<String>,
    /// A recipe that reads rows, as `pipeline ls` lists them; default: the one that fits the rows.
    #[arg(long, value_name = "RECIPE")]
    purpose: Option<String>,
    /// A folder with a checkpoint, or a model on the Hub: `owner/name`; by default one that this machine has memory
    /// for.
    #[arg(long, value_name = "FOLDER|NAME")]
    model: Option<String>,
    /// Replace an existing pipeline file.
    #[arg(long)]
    overwrite: bool,
}

pub(crate) fn run(args: &InitArgs, global: &Global) -> Result<(), Failure> {
    if args.file.exists() && !args.overwrite {
        return Err(new_file::taken(&args.file));
    }
    let places = Places::new(None, Some(&args.file));
    let machine = Machine::here();
    let data = answer(args.data.as_deref(), "--data", "Your rows, a file or a data set on the Hub", None)?;
    if places.is_path(&data) && places.find(&data).is_none() && !data.contains(['*', '?']) {
        return Err(Failure::wrong(format!("there is no file `{data}`")));
    }
    let rows = Rows::of(&data, &places);
    let recipe = recipe(args.purpose.as_deref(), &rows)?;
    let suggested = machine.suggested(recipe.name).repo;
    let model = answer(args.model.as_deref(), "--model", "A model, on the Hub or in a folder", Some(suggested))?;

    let mut draft = Draft::new(recipe);
    draft.explain(format!("Written by `pipeline init`: `{}` for {}.", recipe.name, model));
    draft.explain(format!("Data: {data}, {}.", rows.describe()));
    let unread = unread(&rows);
    if let Some(unread) = &unread {
        draft.explain(format!("Not read: {unread}."));
    }
    draft.explain(format!("Machine: {}.", machine.describe()));
    draft.set("model", &model, &places)?;
    draft.set("data", &data, &places)?;
    if let Some(positions) = positions(&model, &places).filter(|&positions| positions < MAX_SEQ_LEN)
        && draft.has_variable("max_seq_len")
    {
        draft.set("max_seq_len", &positions.to_string(), &places)?;
    }
    if let Some(parameters) = &rows.parameters {
        draft.add("dataset", parameters);
    }
    fit(&mut draft, &rows, &machine);
    let text = check(&mut draft, &args.file, missing_tokens(&model, &places).as_deref())?;
    new_file::write(&args.file, &text, args.overwrite)?;
    if let Some(unread) = unread {
        terminal::tell_line(format_args!("not read: {unread}"));
    }
    warn(recipe, &model, &machine);
    if global.verbosity() != crate::progress::Verbosity::Quiet {
        let file = words::path(&args.file);
        terminal::tell_line(format_args!("{file}: written; `pipeline run {file} --smoke` tries it"));
    }
    Ok(())
}

/// The columns that nothing is made of, where there are any.
fn unread(rows: &Rows) -> Option<String> {
    let (named, more) = rows.unread.split_at(rows.unread.len().min(COLUMNS_NAMED));
    let names: Vec<String> = named.iter().map(|name| format!("`{}`", words::visible(name))).collect();
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let noun = if rows.unread.len() == 1 { "the column" } else { "the columns" };
    (!names.is_empty()).then(|| format!("{noun} {}{more}", names.join(", ")))
}

/// How many tokens a checkpoint on this machine reads at once, by its configuration.
fn positions(model: &str, places: &Places) -> Option<u64> {
    let text = fs::read_to_string(places.find(model)?.join("config.json")).ok()?;
    serde_json::from_str::<serde_json::Value>(&text).ok()?["max_position_embeddings"].as_u64()
}

/// What the rows are for, or what the user wants of those that read rows.
fn recipe(purpose: Option<&str>, rows: &Rows) -> Result<&'static Recipe, Failure> {
    let usual = match rows.form {
        Form::Conversations | Form::Unknown => "lora",
        Form::Text => "pretrain",
        Form::Pairs => "dpo",
        Form::Judged => "kto",
    };
    let names: Vec<&str> = purposes().map(|recipe| recipe.name).collect();
    let question = format!("What for: {}", names.join(", "));
    let recipe = Recipe::find(&answer(purpose, "--purpose", &question, Some(usual))?)?;
    if names.contains(&recipe.name) {
        return Ok(recipe);
    }
    let name = recipe.name;
    Err(Failure::wrong(format!("`{name}` is not made for rows and a model of your own"))
        .with_help(format!("`--purpose` is one of {}; `pipeline cp {name} FILE` copies this one", names.join(", "))))
}

/// The recipes whose rows and model are variables, but for the study of one data set.
fn purposes() -> impl Iterator<Item = &'static Recipe> {
    let is_open = |recipe: &&'static Recipe| {
        let draft = Draft::new(recipe);
        draft.has_variable("model") && draft.has_variable("data") && recipe.name != "scaling"
    };
    super::ALL.iter().filter(is_open)
}

/// Sets what follows from the number of rows and of devices.
fn fit(draft: &mut Draft, rows: &Rows, machine: &Machine) {
    let devices = machine.accelerators.len().max(1) as u64;
    if devices > 1 {
        draft.request("train", "{ count: all }");
    }
    let per_step = rows.count.map_or(ROWS_PER_STEP, |count| (count / STEPS_PER_EPOCH).clamp(1, ROWS_PER_STEP));
    if per_step < ROWS_PER_STEP || devices > 4 {
        // Each device computes at least one row at once.
        let at_once = per_step.min(4).max(devices);
        draft.replace("micro_batch_size", &at_once.to_string());
        draft.replace("gradient_accumulation_steps", &per_step.div_ceil(at_once).to_string());
    }
}

/// What ends turns in ChatML.
const TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

/// Those that the tokenizer of a checkpoint does not have; `None` where it is not on this machine.
fn missing_tokens(model: &str, places: &Places) -> Option<Vec<&'static str>> {
    let tokenizer = Tokenizer::from_folder(&places.find(model)?).ok()?;
    Some(TOKENS.into_iter().filter(|token| tokenizer.token_id(token).is_none()).collect())
}

/// Gives the stages a chat template, and the model its tokens, so that a response ends with one; returns the text, if
/// it validates.
fn with_chat_template(draft: &mut Draft, file: &Path, missing: Option<&[&str]>) -> Option<String> {
    const NO_TEMPLATE: &str = "The model has no chat template, so that turns are written as ChatML";
    for kind in ["tokenize", "evaluate", "generate"] {
        draft.add(kind, "chat_template: chatml");
    }
    let valid = |draft: &Draft| {
        let text = draft.write(file);
        validated(file, &text).is_none().then_some(text)
    };
    let names = |tokens: &[&str]| tokens.iter().map(|token| format!("`{token}`")).collect::<Vec<_>>().join(" and ");
    let plain = match missing {
        Some([]) => {
            draft.explain(format!("{NO_TEMPLATE}."));
            return valid(draft);
        }
        // A teacher's vocabulary is that of its student.
        Some(missing) if !draft.has_variable("teacher") => {
            let mut wider = draft.clone();
            let parameters = format!("added_special_tokens: {}", write::flow(&json!(missing)));
            wider.put_between("base", "wider", "add_tokens", &parameters);
            wider.explain(format!("{NO_TEMPLATE}, whose {} the stage `wider` adds.", names(missing)));
            if let Some(text) = valid(&wider) {
                let tokens = names(missing);
                terminal::tell_line(format_args!("the model has no chat template: ChatML's {tokens} are added to it"));
                *draft = wider;
                return Some(text);
            }
            format!("{} are no tokens of it", names(missing))
        }
        Some(missing) => format!("{} are no tokens of it", names(missing)),
        None => format!("{} may be no tokens of it", names(&TOKENS)),
    };
    let plain = format!("{plain}, and at plain text no response ends by itself: docs/stages/add_tokens.md");
    draft.explain(format!("{NO_TEMPLATE}."));
    draft.explain(format!("{plain}."));
    let text = valid(draft)?;
    terminal::tell_line(format_args!("warning: the model has no chat template; ChatML's {plain}"));
    Some(text)
}

/// The text, which validates. A checkpoint that has no chat template gets one.
fn check(draft: &mut Draft, file: &Path, missing_tokens: Option<&[&str]>) -> Result<String, Failure> {
    let text = draft.write(file);
    let Some(rejected) = validated(file, &text) else { return Ok(text) };
    if rejected.problems.iter().any(|problem| problem.code == "no-chat-template")
        && let Some(text) = with_chat_template(draft, file, missing_tokens)
    {
        return Ok(text);
    }
    terminal::tell(render::problems(&rejected.sources, &rejected.problems, Look::stderr()));
    if rejected.problems.iter().all(|problem| problem.code == "bad-row") {
        terminal::tell_line(format_args!(
            "the file is written, and a run of it fails until these rows are as they should be"
        ));
        return Ok(text);
    }
    let are_of_the_machine = rejected.problems.iter().all(is_of_the_machine);
    match are_of_the_machine {
        true => Err(Failure::Shown(Exit::Wrong)),
        false => Err(Failure::wrong("nothing is written: a file for this model and these rows does not validate")),
    }
}

/// Says where a model is too large for this machine.
fn warn(recipe: &Recipe, model: &str, machine: &Machine) {
    let Some(model) = Model::find(model) else { return };
    let (needed, room) = (machine::needed(recipe.name, model), machine.room());
    if needed > room {
        let (needed, room) = (words::bytes(needed), words::bytes(room));
        let others: Vec<&str> = models::ALL
            .iter()
            .filter(|other| other.family == model.family && machine::needed(recipe.name, other) <= machine.room())
            .map(|other| other.repo)
            .collect();
        let help = if others.is_empty() { String::new() } else { format!("; there is room for {}", others.join(", ")) };
        terminal::tell_line(format_args!(
            "warning: `{}` of {} needs about {needed}, and this machine has {room}{help}",
            recipe.name, model.repo
        ));
    }
}
