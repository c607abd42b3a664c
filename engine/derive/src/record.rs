//! Structs: a closed mapping with one key per field.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{DeriveInput, FieldsNamed, Result};

use crate::attributes::{Container, doc_comment};
use crate::key::Key;

/// The implementation for a struct.
pub(crate) fn expand(input: &DeriveInput, fields: &FieldsNamed) -> Result<TokenStream> {
    let keys = fields.named.iter().map(Key::named).collect::<Result<Vec<_>>>()?;
    let idents: Vec<_> = keys.iter().filter_map(|key| key.ident).collect();
    let values: Vec<_> = idents.iter().map(|ident| quote!(&self.#ident)).collect();
    let names = keys.iter().map(Key::names);
    let variables = keys.iter().map(Key::variable);
    let reads = keys.iter().map(Key::read);
    let tags = keys.iter().filter_map(Key::tag);
    let tag_writes = keys.iter().zip(&values).filter_map(|(key, value)| key.write_tags(value));
    let writes = keys.iter().zip(&values).map(|(key, value)| key.write_key(value));
    let schemas = keys.iter().map(Key::schema);
    let collected = keys.iter().map(Key::collected);
    let (ident, doc) = (&input.ident, doc_comment(&input.attrs));
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let parameter = parameter(
        input,
        &quote!(#(::engine::parameter::Parameter::visit_inputs(#values, visit);)*),
        &quote!(::engine::parameter::only_reference(&[#(#collected),*])),
    );
    let default = if Container::parse(&input.attrs)?.default { default(input, &keys)? } else { TokenStream::new() };
    Ok(quote! {
        #parameter
        #default

        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Record for #ident #type_generics #where_clause {
            #[allow(unused_mut, clippy::vec_init_then_push)]
            fn names() -> ::std::vec::Vec<&'static str> {
                let mut names = ::std::vec::Vec::new();
                #(#names)*
                ::engine::parameter::tag_first(names, <Self as ::engine::parameter::Record>::tag())
            }

            fn tag() -> ::core::option::Option<&'static str> {
                ::engine::parameter::only_tag(&[#(#tags),*])
            }

            #[allow(unused_variables)]
            fn read_fields(fields: &mut ::engine::parameter::Fields<'_>) -> ::core::option::Option<Self> {
                // Every field is read before the first one that failed ends the function.
                #(#reads)*
                ::core::option::Option::Some(Self { #(#idents: #variables?),* })
            }

            #[allow(unused_variables)]
            fn write_tags(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                #(#tag_writes)*
            }

            #[allow(unused_variables)]
            fn write_fields(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                #(#writes)*
            }

            fn add_to(schema: ::engine::parameter::ObjectSchema) -> ::engine::parameter::ObjectSchema {
                schema.described(#doc) #(#schemas)*
            }
        }
    })
}

/// What every `Record` is as a `Parameter`: a mapping of its own.
pub(crate) fn parameter(input: &DeriveInput, visits: &TokenStream, collected: &TokenStream) -> TokenStream {
    let ident = &input.ident;
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    quote! {
        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Parameter for #ident #type_generics #where_clause {
            fn read(
                node: &::engine::file::tree::Node,
                reader: &mut ::engine::parameter::Reader,
            ) -> ::core::option::Option<Self> {
                ::engine::parameter::read_record(node, reader)
            }

            fn write_key(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                ::engine::parameter::Record::write_tags(self, key);
                ::engine::parameter::Record::write_fields(self, key);
            }

            fn schema() -> ::engine::parameter::Json {
                <Self as ::engine::parameter::Record>::add_to(::engine::parameter::ObjectSchema::default()).finish()
            }

            #[allow(unused_variables)]
            fn visit_inputs(
                &self,
                visit: &mut dyn FnMut(&::engine::parameter::Reference, &'static [&'static str]),
            ) {
                #visits
            }

            fn collected() -> ::core::option::Option<::engine::parameter::Collected> {
                #collected
            }
        }
    }
}

fn default(input: &DeriveInput, keys: &[Key<'_>]) -> Result<TokenStream> {
    let idents = keys.iter().filter_map(|key| key.ident);
    let defaults = keys.iter().map(Key::default_or_error).collect::<Result<Vec<_>>>()?;
    Ok(default_of(input, &quote!(Self { #(#idents: #defaults),* })))
}

/// `Default` with this value.
pub(crate) fn default_of(input: &DeriveInput, value: &TokenStream) -> TokenStream {
    let ident = &input.ident;
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    quote! {
        #[automatically_derived]
        impl #impl_generics ::core::default::Default for #ident #type_generics #where_clause {
            fn default() -> Self {
                #value
            }
        }
    }
}
