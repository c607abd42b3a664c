//! `pipeline cat`: a recipe as it is shipped.

use std::io::Write;

use clap::Args;

use super::Recipe;
use crate::render::Failure;

/// Print a recipe.
#[derive(Args)]
pub(crate) struct CatArgs {
    /// Its name, as `pipeline ls` lists it.
    #[arg(value_name = "NAME")]
    name: String,
}

pub(crate) fn run(args: &CatArgs) -> Result<(), Failure> {
    let recipe = Recipe::find(&args.name)?;
    Ok(std::io::stdout().lock().write_all(recipe.text.as_bytes())?)
}
