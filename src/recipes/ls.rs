//! `pipeline ls`: the recipes, and the models that they are for.

use std::io::Write;

use clap::Args;
use serde_json::json;

use super::models::{self, Model};
use super::{ALL, Recipe};
use crate::Format;
use crate::render::Failure;
use crate::table::Table;
use crate::terminal::Look;

/// List recipes: pipeline files to copy.
///
/// With words, lists only recipes whose name, model or family contains each word: `pipeline ls lora qwen3`.
#[derive(Args)]
pub(crate) struct LsArgs {
    /// Words that the recipe or model must contain, in any case.
    #[arg(value_name = "WORD")]
    words: Vec<String>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// A recipe, for a model where it takes one.
type Pair = (&'static Recipe, Option<&'static Model>);

pub(crate) fn run(args: &LsArgs) -> Result<(), Failure> {
    let words: Vec<String> = args.words.iter().map(|word| word.to_lowercase()).collect();
    let pairs: Vec<Pair> = pairs().filter(|pair| words.iter().all(|word| contains(*pair, word))).collect();
    if pairs.is_empty() {
        let help = "`pipeline ls` without words lists all of them; any checkpoint can be set as `model=`";
        return Err(Failure::wrong(format!("no recipe and model contain `{}`", args.words.join(" "))).with_help(help));
    }
    match args.format {
        Format::Json => crate::print_json(&pairs.iter().map(as_json).collect()),
        Format::Text => {
            let mut out = crate::screen::stdout();
            let text = if words.is_empty() { recipes() } else { pairs_table(&pairs) };
            Ok(out.write_all(text.as_bytes())?)
        }
    }
}

fn pairs() -> impl Iterator<Item = Pair> {
    ALL.iter().flat_map(|recipe| {
        let models: Vec<Option<&Model>> =
            if recipe.takes_a_model() { models::ALL.iter().map(Some).collect() } else { vec![None] };
        models.into_iter().map(move |model| (recipe, model))
    })
}

fn contains((recipe, model): Pair, word: &str) -> bool {
    let model = model.map_or(["", ""], |model| [model.repo, model.family]);
    [recipe.name].into_iter().chain(model).any(|text| text.to_lowercase().contains(word))
}

fn as_json((recipe, model): &Pair) -> serde_json::Value {
    json!({
        "recipe": recipe.name,
        "summary": recipe.summary(),
        "model": model.map(|model| model.repo),
        "family": model.map(|model| model.family),
    })
}

/// A line for each recipe, its summary below the others' where the line is too long.
fn recipes() -> String {
    let width = ALL.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0) + 2;
    let look = Look::stdout();
    let lines = ALL.iter().map(|recipe| {
        let line = format!("{:width$}{}", recipe.name, recipe.summary());
        look.wrap(&line, width) + "\n"
    });
    lines.collect::<String>()
        + "\n`pipeline ls lora qwen3`: a recipe's models; `pipeline cp lora job.yaml model=…`: a copy\n"
}

fn pairs_table(pairs: &[Pair]) -> String {
    let mut table = Table::new(["recipe", "family", "model"]);
    for (recipe, model) in pairs {
        let [family, repo] = model.map_or(["", ""], |model| [model.family, model.repo]);
        table.row([recipe.name, family, repo]);
    }
    table.to_string()
}
