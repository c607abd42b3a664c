//! `pipeline graph`: the stages and what they hand to each other, as a drawing.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use engine::plan::GraphFormat;

use crate::Global;
use crate::render::{self, Failure};

/// Print the graph of a pipeline, for Mermaid or Graphviz.
#[derive(Args)]
pub(crate) struct GraphArgs {
    /// The pipeline file.
    file: PathBuf,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
    /// The drawing's language.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
enum Format {
    /// A `flowchart`, which GitHub and GitLab draw.
    #[default]
    Mermaid,
    /// Graphviz: `pipeline graph FILE --format dot | dot -Tsvg`.
    Dot,
}

/// Prints the graph.
pub(crate) fn run(args: &GraphArgs, global: &Global) -> Result<(), Failure> {
    let plan = engine::plan::load(&args.file, &args.overrides, &stages::registry())?;
    render::warnings(&plan.sources, &plan.warnings, global.verbosity());
    render::left_out(&plan, global.verbosity());
    let format = match args.format {
        Format::Mermaid => GraphFormat::Mermaid,
        Format::Dot => GraphFormat::Dot,
    };
    write!(crate::screen::stdout_of_others(), "{}", engine::plan::graph_text(&plan, format))?;
    Ok(())
}
