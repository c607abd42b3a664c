//! `pipeline init`: a pipeline file for the user's rows, model and machine, made of a recipe.
//!
//! [`rows`] looks at the data, whose [`columns`] have names, [`machine`] at the machine, [`questions`] asks for what is
//! not given, of which [`answers`] says whether it is there. [`mod@check`] says what is wrong with the file before it
//! is written, [`chat_template`] helps a model that has none.

mod answers;
mod chat_template;
mod check;
mod columns;
mod machine;
mod questions;
mod rows;

use std::fs;
use std::path::PathBuf;

use clap::Args;

use self::chat_template::missing_tokens;
use self::check::{Writable, check, check_publish};
use self::columns::{Chosen, listed};
use self::machine::Machine;
use self::questions::{Question, answer};
use self::rows::{Form, Rows};
use super::edit::Draft;
use super::models::Model;
use super::{Recipe, models};
use crate::import::places::Places;
use crate::progress::Verbosity;
use crate::render::Failure;
use crate::{Global, new_file, terminal, words};

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
    /// Which columns of the rows are what, where their names do not say it: `prompt=Review,response=Stars`. May be
    /// given several times; a column with a comma in its name cannot be named.
    #[arg(long, value_name = "NAME=COLUMN", value_delimiter = ',')]
    columns: Vec<Chosen>,
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
    let question = Question { option: "--data", text: "Your rows, a file or a data set on the Hub", default: None };
    let is_quiet = global.verbosity() == Verbosity::Quiet;
    let tells = args.data.is_none() && !is_quiet;
    let data = answer(args.data.as_deref(), &question, &|name| answers::data(name, &places, tells))?;
    let rows = Rows::of(&data, &places, &args.columns)?;
    let recipe = recipe(args.purpose.as_deref(), &rows)?;
    let suggested = Some(machine.suggested(recipe.name).repo);
    let question = Question { option: "--model", text: "A model, on the Hub or in a folder", default: suggested };
    let tells = args.model.is_none() && !is_quiet;
    let model = answer(args.model.as_deref(), &question, &|name| answers::model(name, &places, tells))?;

    let mut draft = draft(recipe, &rows, (&model, &data), &machine, &places)?;
    check_publish(&mut draft, &args.file, global);
    let missing = missing_tokens(&model, &places);
    let Writable { text, until } = check(&mut draft, &args.file, &rows, missing.as_deref())?;
    new_file::write(&args.file, &text, args.overwrite)?;
    if let Some(unread) = unread(&rows) {
        terminal::tell_line(format_args!("not read: {unread}"));
    }
    warn(recipe, &model, &machine);
    let file = words::path(&args.file);
    match until {
        Some(until) => terminal::tell_line(format_args!("the file is written, and a run of it fails until {until}")),
        None if is_quiet => {}
        None => {
            let command = words::for_shell(&file);
            terminal::tell_line(format_args!("{file}: written; `pipeline run {command} --smoke` tries it"));
        }
    }
    Ok(())
}

/// The recipe with what was asked and found out. `named` are the model and the data.
fn draft(
    recipe: &'static Recipe,
    rows: &Rows,
    named: (&str, &str),
    machine: &Machine,
    places: &Places,
) -> Result<Draft, Failure> {
    let (model, data) = named;
    let mut draft = Draft::new(recipe);
    draft.explain(format!("Written by `pipeline init`: `{}` for {}.", recipe.name, model));
    draft.explain(format!("Data: {data}, {}.", rows.describe()));
    if let Some(unread) = unread(rows) {
        draft.explain(format!("Not read: {unread}."));
    }
    draft.explain(format!("Machine: {}.", machine.describe()));
    draft.set("model", model, places)?;
    draft.set("data", data, places)?;
    if let Some(positions) = positions(model, places).filter(|&positions| positions < MAX_SEQ_LEN)
        && draft.has_variable("max_seq_len")
    {
        draft.set("max_seq_len", &positions.to_string(), places)?;
    }
    if let Some(parameters) = &rows.parameters {
        draft.add("dataset", parameters);
    }
    fit(&mut draft, rows, machine);
    Ok(draft)
}

/// The columns that nothing is made of, where there are any.
fn unread(rows: &Rows) -> Option<String> {
    let (named, more) = rows.unread.split_at(rows.unread.len().min(COLUMNS_NAMED));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let noun = if rows.unread.len() == 1 { "the column" } else { "the columns" };
    (!named.is_empty()).then(|| format!("{noun} {}{more}", listed(named)))
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
    let text = format!("What for: {}", names.join(", "));
    let question = Question { option: "--purpose", text: &text, default: Some(usual) };
    answer(purpose, &question, &|name| of_rows(name, &names))
}

/// The recipe of a name, which has to be one of `names`.
fn of_rows(name: &str, names: &[&str]) -> Result<&'static Recipe, Failure> {
    let recipe = Recipe::find(name)?;
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
