//! Enums whose variants are keys of one mapping, of which exactly one is given: a limit in steps or as a share.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{DataEnum, DeriveInput, Error, Fields, Ident, Result, Variant};

use crate::attributes::{Container, doc_comment};
use crate::key::Key;
use crate::record::{default_of, parameter};

/// The implementation for an enum.
pub(crate) fn expand(input: &DeriveInput, data: &DataEnum) -> Result<TokenStream> {
    let keys = data.variants.iter().map(key_of).collect::<Result<Vec<_>>>()?;
    let idents: Vec<_> = data.variants.iter().map(|variant| &variant.ident).collect();
    let container = Container::parse(&input.attrs)?;
    let with_default: Vec<usize> =
        keys.iter().enumerate().filter(|(_, key)| key.attributes.default.is_some()).map(|(at, _)| at).collect();
    let default = match with_default[..] {
        [] if container.default => {
            let message = "`#[parameters(default)]` needs a variant with a default";
            return Err(Error::new_spanned(&input.ident, message));
        }
        [] => None,
        [one] => Some(one),
        _ => return Err(Error::new_spanned(&input.ident, "one variant has a default, and here are several")),
    };
    let default_impl = match default {
        Some(at) if container.default => {
            let (ident, value) = (idents[at], keys[at].default_or_error()?);
            default_of(input, &quote!(Self::#ident(#value)))
        }
        _ => TokenStream::new(),
    };
    let default_name = match default {
        Some(at) => {
            let name = &keys[at].name;
            quote!(::core::option::Option::Some(#name))
        }
        None => quote!(::core::option::Option::None),
    };
    let value = quote!(value);
    let names: Vec<_> = keys.iter().map(|key| &key.name).collect();
    let reads = keys.iter().zip(&idents).map(|(key, ident)| read(key, ident));
    let writes = keys.iter().map(|key| key.write_key(&value));
    let schemas = keys.iter().map(Key::schema);
    let collected = keys.iter().map(Key::collected);
    let (ident, doc) = (&input.ident, doc_comment(&input.attrs));
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let parameter = parameter(
        input,
        &quote!(match self { #(Self::#idents(value) => ::engine::parameter::Parameter::visit_inputs(value, visit),)* }),
        &quote!(::engine::parameter::only_reference(&[#(#collected),*])),
    );
    Ok(quote! {
        #parameter
        #default_impl

        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Record for #ident #type_generics #where_clause {
            fn names() -> ::std::vec::Vec<&'static str> {
                ::std::vec![#(#names),*]
            }

            fn read_fields(fields: &mut ::engine::parameter::Fields<'_>) -> ::core::option::Option<Self> {
                match fields.one_of(&[#(#names),*], #default_name)? {
                    #(#names => { #reads })*
                    _ => ::core::option::Option::None,
                }
            }

            fn write_fields(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                match self { #(Self::#idents(value) => { #writes })* }
            }

            fn add_to(schema: ::engine::parameter::ObjectSchema) -> ::engine::parameter::ObjectSchema {
                schema.described(#doc).with_one_of(
                    ::engine::parameter::ObjectSchema::default() #(#schemas)*,
                    #default_name,
                )
            }
        }
    })
}

fn key_of(variant: &Variant) -> Result<Key<'_>> {
    match &variant.fields {
        Fields::Unnamed(fields) if fields.unnamed.len() == 1 => Key::of_variant(variant, &fields.unnamed[0].ty),
        _ => Err(Error::new_spanned(variant, "each variant is a key of the mapping and holds its value")),
    }
}

fn read(key: &Key<'_>, ident: &Ident) -> TokenStream {
    let (read, variable) = (key.read(), key.variable());
    quote!(#read #variable.map(Self::#ident))
}
