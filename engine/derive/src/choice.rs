//! Enums of unit variants: one of a few names.

use proc_macro2::TokenStream;
use quote::quote;
use syn::ext::IdentExt;
use syn::{DataEnum, DeriveInput, Error, LitStr, Result, Variant};

use crate::attributes::{Attributes, Container, doc_comment};
use crate::record::default_of;

/// The implementation for an enum.
pub(crate) fn expand(input: &DeriveInput, data: &DataEnum) -> Result<TokenStream> {
    let attributes = attributes_of(data)?;
    let names: Vec<_> = data.variants.iter().zip(&attributes).map(|(variant, said)| name_of(variant, said)).collect();
    let variants: Vec<_> = data.variants.iter().map(|variant| &variant.ident).collect();
    let docs = data.variants.iter().map(|variant| doc_comment(&variant.attrs));
    let default = match default_variant(input, &attributes)? {
        Some(at) if Container::parse(&input.attrs)?.default => {
            let variant = variants[at];
            default_of(input, &quote!(Self::#variant))
        }
        _ => TokenStream::new(),
    };
    let (ident, doc) = (&input.ident, doc_comment(&input.attrs));
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    Ok(quote! {
        #default

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

/// The attributes of each variant.
pub(crate) fn attributes_of(data: &DataEnum) -> Result<Vec<Attributes>> {
    data.variants.iter().map(|variant| Attributes::of_variant(&variant.attrs)).collect()
}

/// The variant with `#[semantic(default)]`.
pub(crate) fn default_variant(input: &DeriveInput, attributes: &[Attributes]) -> Result<Option<usize>> {
    let defaults: Vec<usize> =
        attributes.iter().enumerate().filter(|(_, said)| said.default.is_some()).map(|(at, _)| at).collect();
    match defaults[..] {
        [] if Container::parse(&input.attrs)?.default => Err(Error::new_spanned(
            &input.ident,
            "`#[parameters(default)]` needs a variant with `#[semantic(default)]`",
        )),
        [] => Ok(None),
        [one] => Ok(Some(one)),
        _ => Err(Error::new_spanned(&input.ident, "one variant is the default, and here are several")),
    }
}

/// How the file names a variant.
pub(crate) fn name_of(variant: &Variant, attributes: &Attributes) -> String {
    attributes.rename.as_ref().map_or_else(|| snake_case(&variant.ident.unraw().to_string()), LitStr::value)
}

/// `OnTooLong` → `on_too_long`.
pub(crate) fn snake_case(name: &str) -> String {
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
