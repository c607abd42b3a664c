//! `#[derive(Parameters)]`: a struct's fields as reader, checks, key and JSON Schema.
//!
//! The generated code holds no logic of its own: it lists the fields and calls `engine::parameter`, which reads, checks
//! and describes them. So an error here is a mistake in a declaration, and everything else is ordinary, tested code.

use proc_macro::TokenStream;
use syn::{Data, DeriveInput, Error, Fields, parse_macro_input};

mod attributes;
mod choice;
mod record;

/// Derives `Parameter` for a struct with named fields or for an enum of unit variants.
///
/// A field is `#[semantic]` (the default), `#[resumable]` or `#[cosmetic]`; each takes `default` or `default = expr`,
/// `range = a..b`, `above = a` and `rename = "name"`. Doc comments become descriptions in the JSON Schema. A variant is
/// written in snake case, or as `#[semantic(rename = "name")]` says.
#[proc_macro_derive(Parameters, attributes(semantic, resumable, cosmetic))]
pub fn derive_parameters(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    let expanded = match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => record::expand(&input, fields),
            _ => Err(Error::new_spanned(
                &input.ident,
                "parameters need named fields: each is a key of the pipeline file",
            )),
        },
        Data::Enum(data) => choice::expand(&input, data),
        Data::Union(_) => Err(Error::new_spanned(&input.ident, "a union cannot be read from a pipeline file")),
    };
    expanded.unwrap_or_else(Error::into_compile_error).into()
}
