//! `pipeline schema`: the JSON Schema of pipeline files and of runs, and how each field takes part in keys.

use std::collections::BTreeMap;
use std::io::Write;

use clap::Args;
use engine::history::RunView;
use engine::parameter::{Class, DeclaredField, declared_fields};
use schemars::schema_for;
use serde::Serialize;

use crate::Format;
use crate::render::Failure;
use crate::table::Table;

/// Print the JSON Schema of pipeline files, for editors, or that of a run, for programs.
///
/// With the YAML language server, put `# yaml-language-server: $schema=./pipeline.schema.json` on a file's first line.
#[derive(Args)]
pub(crate) struct SchemaArgs {
    /// Print instead the class of each field of each stage kind in cache keys: semantic (part of the key), resumable
    /// (as semantic, but saved working state can be continued under another value) or cosmetic (not part of the
    /// key).
    #[arg(long)]
    keys: bool,
    /// Print instead the schema of what `pipeline runs show --format json` prints.
    #[arg(long, conflicts_with = "keys")]
    run: bool,
    /// How to print the table of `--keys`.
    #[arg(long, value_enum, default_value_t, requires = "keys")]
    format: Format,
}

/// How the fields of a stage kind take part in keys, as a program reads it.
#[derive(Serialize)]
struct KindView {
    version: u32,
    fields: Vec<DeclaredField>,
}

/// Prints the schema.
pub(crate) fn run(args: &SchemaArgs) -> Result<(), Failure> {
    if args.run {
        return crate::print_json(schema_for!(RunView<'_>).as_value());
    }
    let registry = stages::registry();
    if !args.keys {
        return crate::print_json(&engine::schema::json_schema(&registry));
    }
    let kinds = registry.kinds().map(|kind| (kind, declared_fields(&(kind.schema)())));
    match args.format {
        Format::Json => {
            let of_kind = kinds.map(|(kind, fields)| (kind.name, KindView { version: kind.version, fields }));
            crate::print_json(&of_kind.collect::<BTreeMap<_, _>>())
        }
        Format::Text => {
            let mut table = Table::new(["kind", "field", "class"]);
            for (kind, fields) in kinds {
                let shown = format!("{} (version {})", kind.name, kind.version);
                for (number, field) in fields.into_iter().enumerate() {
                    let kind = if number == 0 { shown.as_str() } else { "" };
                    table.row([kind, &field.path, class_name(field.class)]);
                }
            }
            Ok(write!(crate::screen::stdout(), "{table}")?)
        }
    }
}

/// A class, as stages declare it.
pub(crate) fn class_name(class: Class) -> &'static str {
    match class {
        Class::Semantic => "semantic",
        Class::Resumable => "resumable",
        Class::Cosmetic => "cosmetic",
    }
}
