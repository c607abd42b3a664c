//! `pipeline ls`: the recipes, and the models that they are for.

use std::io::Write;

use clap::Args;
use serde::Serialize;

use super::ALL;
use super::models::{self, Model};
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
#[derive(Clone, Copy, Serialize)]
struct Pair {
    recipe: &'static str,
    summary: &'static str,
    model: Option<&'static str>,
    family: Option<&'static str>,
}

pub(crate) fn run(args: &LsArgs) -> Result<(), Failure> {
    let words: Vec<String> = args.words.iter().map(|word| word.to_lowercase()).collect();
    let pairs: Vec<Pair> = pairs().filter(|pair| words.iter().all(|word| pair.contains(word))).collect();
    if pairs.is_empty() {
        let help = "`pipeline ls` without words lists all of them; any checkpoint can be set as `model=`";
        return Err(Failure::wrong(format!("no recipe and model contain `{}`", args.words.join(" "))).with_help(help));
    }
    match args.format {
        Format::Json => crate::print_json(&pairs),
        Format::Text => {
            let mut out = crate::screen::stdout();
            let look = Look::stdout();
            let text = if words.is_empty() { recipes(look) } else { pairs_table(&pairs).fitted(look).to_string() };
            Ok(out.write_all(text.as_bytes())?)
        }
    }
}

fn pairs() -> impl Iterator<Item = Pair> {
    ALL.iter().flat_map(|recipe| {
        let alone = Pair { recipe: recipe.name, summary: recipe.summary(), model: None, family: None };
        let with = |model: &Model| Pair { model: Some(model.repo), family: Some(model.family), ..alone };
        if recipe.takes_a_model() { models::ALL.iter().map(with).collect() } else { vec![alone] }
    })
}

impl Pair {
    fn contains(&self, word: &str) -> bool {
        let texts = [Some(self.recipe), self.model, self.family];
        texts.iter().flatten().any(|text| text.to_lowercase().contains(word))
    }
}

/// A line for each recipe, its summary below the others' where the line is too long.
fn recipes(look: Look) -> String {
    let width = ALL.iter().map(|recipe| recipe.name.len()).max().unwrap_or(0) + 2;
    let lines = ALL.iter().map(|recipe| {
        let line = format!("{:width$}{}", recipe.name, recipe.summary());
        look.wrap(&line, width) + "\n"
    });
    let help = "`pipeline ls lora qwen3`: a recipe's models; `pipeline cp lora job.yaml model=…`: a copy";
    lines.collect::<String>() + &format!("\n{}\n", look.wrap(help, 2))
}

fn pairs_table(pairs: &[Pair]) -> Table {
    let mut table = Table::new(["recipe", "family", "model"]).sparing(["family"]);
    for Pair { recipe, family, model, .. } in pairs {
        table.row([recipe, family.unwrap_or_default(), model.unwrap_or_default()]);
    }
    table
}
