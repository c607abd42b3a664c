//! Enums of unit variants: one of a few names.

use proc_macro2::TokenStream;
use quote::quote;
use syn::ext::IdentExt;
use syn::{DataEnum, DeriveInput, Error, Fields, LitStr, Result, Variant};

use crate::attributes::{Attributes, doc_comment};

/// The implementation for an enum.
pub(crate) fn expand(input: &DeriveInput, data: &DataEnum) -> Result<TokenStream> {
    let names = data.variants.iter().map(name_of).collect::<Result<Vec<_>>>()?;
    let variants: Vec<_> = data.variants.iter().map(|variant| &variant.ident).collect();
    let docs = data.variants.iter().map(|variant| doc_comment(&variant.attrs));
    let (ident, doc) = (&input.ident, doc_comment(&input.attrs));
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Parameter for #ident #type_generics #where_clause {
            fn read(
                node: &::engine::file::tree::Node,
                reader: &mut ::engine::parameter::Reader,
            ) -> ::core::option::Option<Self> {
                match ::engine::parameter::read_choice(node, reader, &[#(#names),*])? {
                    #(#names => ::core::option::Option::Some(Self::#variants),)*
                    _ => ::core::option::Option::None,
                }
            }

            fn write_key(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                key.value(match self {
                    #(Self::#variants => #names,)*
                });
            }

            fn schema() -> ::engine::parameter::Json {
                ::engine::parameter::choice_schema(#doc, &[#((#names, #docs)),*])
            }
        }
    })
}

fn name_of(variant: &Variant) -> Result<String> {
    if !matches!(variant.fields, Fields::Unit) {
        return Err(Error::new_spanned(variant, "a parameter enum is a choice of names: its variants hold nothing"));
    }
    let attributes = Attributes::parse(&variant.attrs)?;
    Ok(attributes.rename.as_ref().map_or_else(|| snake_case(&variant.ident.unraw().to_string()), LitStr::value))
}

/// `OnTooLong` → `on_too_long`.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    let mut before = None::<char>;
    for letter in name.chars() {
        if letter.is_uppercase() && before.is_some_and(|before| !before.is_uppercase() && before != '_') {
            snake.push('_');
        }
        snake.extend(letter.to_lowercase());
        before = Some(letter);
    }
    snake
}
