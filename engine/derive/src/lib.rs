//! `#[derive(Parameters)]`: a struct's fields as reader, checks, key and JSON Schema.
//!
//! The generated code holds no logic of its own: it lists the fields and calls `engine::parameter`, which reads, checks
//! and describes them. So an error here is a mistake in a declaration, and everything else is ordinary, tested code.

#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use syn::{Data, DeriveInput, Error, Fields, parse_macro_input};

mod attributes;
mod choice;
mod record;

/// Derives `Parameter` for a struct with named fields or for an enum of unit variants.
///
/// A field is `#[semantic]`, `#[resumable]` or `#[cosmetic]`, and says which; each takes `default` or `default = expr`,
/// `range = a..b`, `above = a` and `rename = "name"`; a struct under `#[semantic(flatten)]` lends its own fields to the
/// mapping around it, so that several kinds can share keys. Doc comments become descriptions in the JSON Schema. A
/// variant is written in snake case, or as `#[semantic(rename = "name")]` says.
#[proc_macro_derive(Parameters, attributes(semantic, resumable, cosmetic))]
pub fn derive_parameters(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(input: &DeriveInput) -> Result<proc_macro2::TokenStream, Error> {
    match &input.data {
        Data::Struct(data) => match &data.fields {
            Fields::Named(fields) => record::expand(input, fields),
            _ => Err(Error::new_spanned(
                &input.ident,
                "parameters need named fields: each is a key of the pipeline file",
            )),
        },
        Data::Enum(data) => choice::expand(input, data),
        Data::Union(_) => Err(Error::new_spanned(&input.ident, "a union cannot be read from a pipeline file")),
    }
}

#[cfg(test)]
mod tests {
    use syn::parse_quote;

    use super::*;

    fn mistake(input: &DeriveInput) -> String {
        expand(input).map(|tokens| tokens.to_string()).expect_err("a declaration with a mistake").to_string()
    }

    #[test]
    fn a_mistake_in_a_declaration_is_explained() {
        for (input, explanation) in [
            (
                parse_quote!(
                    struct A(u32);
                ),
                "parameters need named fields",
            ),
            (parse_quote!(union A { a: u32 }), "a union cannot be read"),
            (
                parse_quote!(
                    enum A {
                        B(u32),
                    }
                ),
                "its variants hold nothing",
            ),
            (
                parse_quote!(
                    struct A {
                        a: u32,
                    }
                ),
                "a field says how it takes part in keys",
            ),
            (
                parse_quote!(
                    struct A {
                        #[semantic]
                        #[cosmetic]
                        a: u32,
                    }
                ),
                "a field has one class",
            ),
            (
                parse_quote!(
                    struct A {
                        #[semantic(defualt = 3)]
                        a: u32,
                    }
                ),
                "expected `default`, `range`, `above`, `rename` or `flatten`",
            ),
            (
                parse_quote!(
                    struct A {
                        #[semantic(above = 0, range = 1..)]
                        a: u32,
                    }
                ),
                "say the same thing",
            ),
            (
                parse_quote!(
                    struct A {
                        #[cosmetic(flatten)]
                        a: B,
                    }
                ),
                "a flattened field is what its own fields say",
            ),
        ] {
            let message = mistake(&input);
            assert!(message.contains(explanation), "{message}");
        }
    }

    #[test]
    fn names_are_those_of_the_file() {
        let choice = expand(&parse_quote!(
            enum A {
                OnTooLong,
                Bf16,
                #[semantic(rename = "q-lora")]
                QLora,
            }
        ));
        let choice = choice.expect("a choice of names").to_string();
        for name in ["\"on_too_long\"", "\"bf16\"", "\"q-lora\""] {
            assert!(choice.contains(name), "{name} is not in {choice}");
        }
        let record = expand(&parse_quote!(
            struct A {
                #[semantic]
                r#type: u32,
            }
        ))
        .expect("a mapping")
        .to_string();
        assert!(record.contains("\"type\""), "{record}");
    }
}
