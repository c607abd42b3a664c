//! `pipeline schema`: the JSON Schema of pipeline files.

use clap::Args;

use crate::render::Failure;

/// Print the JSON Schema of pipeline files, for editors.
///
/// With the YAML language server, put `# yaml-language-server: $schema=./pipeline.schema.json` on a file's first line.
#[derive(Args)]
pub struct SchemaArgs {}

/// Prints the schema.
pub fn run(_: &SchemaArgs) -> Result<(), Failure> {
    crate::print_json(&engine::schema::json_schema(&stages::registry()))
}
