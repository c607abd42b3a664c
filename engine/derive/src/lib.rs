//! `#[derive(Parameters)]`: a struct's fields as reader, checks, key and JSON Schema.
//!
//! The generated code holds no logic of its own: it lists the fields and calls `engine::parameter`, which reads, checks
//! and describes them. So an error here is a mistake in a declaration, and everything else is ordinary, tested code.

#![forbid(unsafe_code)]

use proc_macro::TokenStream;
use syn::{Data, DeriveInput, Error, Fields, parse_macro_input};

mod attributes;
mod choice;
mod key;
mod one_of;
mod record;
mod tagged;

use attributes::Container;

/// Derives `Parameter` for a struct with named fields or for an enum.
///
/// # Fields
/// A field is `#[semantic]`, `#[resumable]` or `#[cosmetic]`, and says which; each takes `default` or `default = expr`,
/// `range = a..b`, `above = a` and `rename = "name"`. Doc comments become descriptions in the JSON Schema.
///
/// `omit_default`: the field enters the key only where its value differs from its default. Every parameter that is
/// added to a kind with results in somebody's store has it, so that the keys of pipelines which do not use it stay as
/// they are. What is compared is what would enter the key, so the type needs no `PartialEq`; it works for a field that
/// is a whole mapping (`loss`), too. An `Option` without another default has the default `None`.
///
/// A struct or a tagged choice under `#[semantic(flatten)]` lends its own fields to the mapping around it, so that
/// several kinds can share keys, or several choices the same options beside their own.
///
/// # Enums
/// An enum of unit variants is one of a few names: `method: lora`. A variant is written in snake case, or as
/// `#[semantic(rename = "name")]` says.
///
/// An enum in which a variant has fields is a tagged choice: a mapping in which the key `name` is the variant and the
/// other keys are its options, `{ name: adamw, betas: [0.9, 0.999] }`. The bare word `adamw` is the mapping with that
/// name alone. A variant has named fields, which take the attributes above; or holds one struct (`Dpo(DpoParams)`),
/// whose fields are its options; or nothing. An option of another variant is a problem of its own. The variant with
/// `#[semantic(default)]` is meant where `name` is left out. In a key the name comes first, then the fields in the
/// order of their declaration, also where the choice is flattened and does not stand first.
///
/// `#[parameters(tag = "kind")]` gives the tag another key, and `#[parameters(tagged)]` makes a tagged choice of an
/// enum whose variants have no options yet.
///
/// In an enum with `#[parameters(one_of)]` each variant is a key of the mapping around it, and holds its value:
/// `Steps(u64)` and `Ratio(f64)`, as `warmup_steps` and `warmup_ratio`. Exactly one of them is given; or none, where
/// one has a default. A variant takes the attributes of a field.
///
/// # Defaults
/// `#[parameters(default)]` on the struct or enum implements `Default` from the defaults of its fields, of its default
/// variant's, so that no default is written twice.
#[proc_macro_derive(Parameters, attributes(semantic, resumable, cosmetic, parameters))]
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
        Data::Enum(data) if Container::parse(&input.attrs)?.one_of => one_of::expand(input, data),
        Data::Enum(data) if tagged::is_tagged(input, data)? => tagged::expand(input, data),
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
                        B(u32, u32),
                    }
                ),
                "a variant has named fields, each an option, or holds one struct with them",
            ),
            (
                parse_quote!(
                    enum A {
                        B { a: u32 },
                    }
                ),
                "a field says how it takes part in keys",
            ),
            (
                parse_quote!(
                    enum A {
                        B {
                            #[semantic]
                            name: u32,
                        },
                    }
                ),
                "`name` is the key that names the variant",
            ),
            (
                parse_quote!(
                    enum A {
                        #[cosmetic]
                        B,
                    }
                ),
                "a variant takes `#[semantic(rename = \"name\")]` and `#[semantic(default)]`",
            ),
            (
                parse_quote!(
                    enum A {
                        #[semantic(default)]
                        B,
                        #[semantic(default)]
                        C {},
                    }
                ),
                "one variant is the default",
            ),
            (
                parse_quote!(
                    #[parameters(default)]
                    enum A {
                        B,
                    }
                ),
                "needs a variant with `#[semantic(default)]`",
            ),
            (
                parse_quote!(
                    #[parameters(default)]
                    enum A {
                        #[semantic(default)]
                        B {
                            #[semantic]
                            a: u32,
                        },
                    }
                ),
                "needs a default for every field",
            ),
            (
                parse_quote!(
                    #[parameters(default)]
                    struct A {
                        #[semantic]
                        a: u32,
                    }
                ),
                "needs a default for every field",
            ),
            (
                parse_quote!(
                    #[parameters(defaults)]
                    struct A {}
                ),
                "expected `default`, `one_of`, `tagged` or `tag = \"key\"`",
            ),
            (
                parse_quote!(
                    #[parameters(one_of)]
                    enum A {
                        #[semantic]
                        B { a: u32 },
                    }
                ),
                "each variant is a key of the mapping and holds its value",
            ),
            (
                parse_quote!(
                    #[parameters(one_of)]
                    enum A {
                        #[semantic(default = 1)]
                        B(u32),
                        #[semantic(default = 1)]
                        C(u32),
                    }
                ),
                "one variant has a default",
            ),
            (
                parse_quote!(
                    #[parameters(one_of, default)]
                    enum A {
                        #[semantic]
                        B(u32),
                    }
                ),
                "needs a variant with a default",
            ),
            (
                parse_quote!(
                    struct A {
                        #[semantic(omit_default)]
                        a: u32,
                    }
                ),
                "`omit_default` needs a default",
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
                "expected `default`, `omit_default`, `range`, `above`, `rename` or `flatten`",
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
