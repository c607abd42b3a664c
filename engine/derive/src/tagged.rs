//! Enums whose variants have fields: a mapping in which one key, the tag, names the variant and the others are its
//! options.

use std::collections::BTreeMap;

use proc_macro2::TokenStream;
use quote::quote;
use syn::{DataEnum, DeriveInput, Error, Fields, Ident, Result, Variant};

use crate::attributes::{Container, doc_comment};
use crate::choice::{attributes_of, default_variant, name_of};
use crate::key::Key;
use crate::record::{default_of, parameter};

/// One variant with its options.
struct Choice<'a> {
    ident: &'a Ident,
    name: String,
    doc: String,
    keys: Vec<Key<'a>>,
    /// Whether its fields have names.
    named: bool,
}

/// Whether an enum is a tagged choice: a variant has fields, or an attribute says so.
pub(crate) fn is_tagged(input: &DeriveInput, data: &DataEnum) -> Result<bool> {
    let has_fields = data.variants.iter().any(|variant| !matches!(variant.fields, Fields::Unit));
    Ok(has_fields || Container::parse(&input.attrs)?.tagged)
}

/// The implementation for an enum.
pub(crate) fn expand(input: &DeriveInput, data: &DataEnum) -> Result<TokenStream> {
    let container = Container::parse(&input.attrs)?;
    let tag = container.tag_name();
    let attributes = attributes_of(data)?;
    let choices = data
        .variants
        .iter()
        .zip(&attributes)
        .map(|(variant, attributes)| Choice::new(variant, name_of(variant, attributes), &tag))
        .collect::<Result<Vec<_>>>()?;
    let default = default_variant(input, &attributes)?.map(|at| &choices[at]);
    let default_impl = match default {
        Some(choice) if container.default => default_of(input, &choice.default()?),
        _ => TokenStream::new(),
    };
    let default_name = match default {
        Some(Choice { name, .. }) => quote!(::core::option::Option::Some(#name)),
        None => quote!(::core::option::Option::None),
    };
    let options: Vec<_> = choices.iter().map(Choice::options).collect();
    let reads = choices.iter().map(Choice::read);
    let checks = checks_of_any(&choices);
    let names: Vec<_> = choices.iter().map(|choice| &choice.name).collect();
    let idents: Vec<_> = choices.iter().map(|choice| choice.ident).collect();
    let patterns: Vec<_> = choices.iter().map(Choice::pattern).collect();
    let writes = choices.iter().map(Choice::write_fields);
    let inner_tags = choices.iter().map(Choice::write_tags);
    let schemas = choices.iter().map(Choice::schema);
    let visits = choices.iter().map(Choice::visit_inputs);
    let collected = choices.iter().flat_map(|choice| &choice.keys).map(Key::collected);
    let (ident, doc) = (&input.ident, doc_comment(&input.attrs));
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let parameter = parameter(
        input,
        &quote!(match self { #(#patterns => { #visits })* }),
        &quote!(::engine::parameter::only_reference(&[#(#collected),*])),
    );
    Ok(quote! {
        #parameter
        #default_impl

        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Record for #ident #type_generics #where_clause {
            fn names() -> ::std::vec::Vec<&'static str> {
                ::engine::parameter::names_of_choices(#tag, &[#(#options),*])
            }

            fn tag() -> ::core::option::Option<&'static str> {
                ::core::option::Option::Some(#tag)
            }

            #[allow(unused_variables)]
            fn read_fields(fields: &mut ::engine::parameter::Fields<'_>) -> ::core::option::Option<Self> {
                match fields.choose(#tag, #default_name, &[#(#options),*]) {
                    #(::core::option::Option::Some(#names) => { #reads })*
                    _ => {
                        #checks
                        ::core::option::Option::None
                    }
                }
            }

            #[allow(unused_variables)]
            fn write_tags(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                key.field(#tag, ::engine::parameter::Class::Semantic, |key| {
                    key.value(match self { #(Self::#idents { .. } => #names,)* })
                });
                match self { #(#patterns => { #inner_tags })* }
            }

            #[allow(unused_variables)]
            fn write_fields(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                match self { #(#patterns => { #writes })* }
            }

            fn add_to(schema: ::engine::parameter::ObjectSchema) -> ::engine::parameter::ObjectSchema {
                schema.with_choice(#tag, #doc, #default_name, ::std::vec![#(#schemas),*])
            }
        }
    })
}

impl<'a> Choice<'a> {
    fn new(variant: &'a Variant, name: String, tag: &str) -> Result<Self> {
        let (named, keys) = match &variant.fields {
            Fields::Unit => (true, Vec::new()),
            Fields::Named(fields) => (true, fields.named.iter().map(Key::named).collect::<Result<Vec<_>>>()?),
            Fields::Unnamed(fields) if fields.unnamed.len() == 1 => (false, vec![Key::flattened(&fields.unnamed[0])]),
            Fields::Unnamed(_) => {
                let message = "a variant has named fields, each an option, or holds one struct with them";
                return Err(Error::new_spanned(variant, message));
            }
        };
        if let Some(key) = keys.iter().find(|key| !key.attributes.flatten && key.name == tag) {
            return Err(Error::new_spanned(key.ty, format!("`{tag}` is the key that names the variant")));
        }
        Ok(Self { ident: &variant.ident, name, doc: doc_comment(&variant.attrs), keys, named })
    }

    /// The name, and the keys that go with it.
    fn options(&self) -> TokenStream {
        let (name, names) = (&self.name, self.keys.iter().map(Key::names));
        quote! {
            ::engine::parameter::Choice { name: #name, options: {
                #[allow(unused_mut, clippy::vec_init_then_push)]
                let options = { let mut names = ::std::vec::Vec::new(); #(#names)* names };
                options
            } }
        }
    }

    fn read(&self) -> TokenStream {
        let (ident, reads, variables) = (self.ident, self.keys.iter().map(Key::read), self.variables());
        let value = match (self.named, self.keys.is_empty()) {
            (true, true) => quote!(Self::#ident {}),
            (true, false) => {
                let fields = self.keys.iter().filter_map(|key| key.ident);
                quote!(Self::#ident { #(#fields: #variables?),* })
            }
            (false, _) => quote!(Self::#ident(#(#variables?),*)),
        };
        quote!(#(#reads)* ::core::option::Option::Some(#value))
    }

    fn default(&self) -> Result<TokenStream> {
        let ident = self.ident;
        let defaults = self.keys.iter().map(Key::default_or_error).collect::<Result<Vec<_>>>()?;
        let fields = self.keys.iter().filter_map(|key| key.ident);
        Ok(match self.named {
            true => quote!(Self::#ident { #(#fields: #defaults),* }),
            false => quote!(Self::#ident(#(#defaults),*)),
        })
    }

    /// A pattern that gives each field the name of its variable.
    fn pattern(&self) -> TokenStream {
        let (ident, variables) = (self.ident, self.variables());
        let fields = self.keys.iter().filter_map(|key| key.ident);
        match self.named {
            true => quote!(Self::#ident { #(#fields: #variables),* }),
            false => quote!(Self::#ident(#(#variables),*)),
        }
    }

    fn variables(&self) -> Vec<Ident> {
        self.keys.iter().map(Key::variable).collect()
    }

    /// The keys, each with a reference to its value.
    fn values(&self) -> impl Iterator<Item = (&Key<'a>, TokenStream)> {
        self.keys.iter().map(|key| {
            let variable = key.variable();
            (key, quote!(#variable))
        })
    }

    fn write_tags(&self) -> TokenStream {
        self.values().filter_map(|(key, value)| key.write_tags(&value)).collect()
    }

    fn write_fields(&self) -> TokenStream {
        self.values().map(|(key, value)| key.write_key(&value)).collect()
    }

    fn visit_inputs(&self) -> TokenStream {
        let visit = |(_, value)| quote!(::engine::parameter::Parameter::visit_inputs(#value, visit););
        self.values().map(visit).collect()
    }

    fn schema(&self) -> TokenStream {
        let (name, doc, schemas) = (&self.name, &self.doc, self.keys.iter().map(Key::schema));
        quote!((#name, #doc, ::engine::parameter::ObjectSchema::default() #(#schemas)*))
    }
}

/// Where the variant is not known: options that have one type wherever they occur can be checked all the same.
fn checks_of_any(choices: &[Choice<'_>]) -> TokenStream {
    let mut checks: BTreeMap<&str, Option<String>> = BTreeMap::new();
    let mut tokens = BTreeMap::new();
    for key in choices.iter().flat_map(|choice| &choice.keys).filter(|key| !key.attributes.flatten) {
        let check = key.check_given();
        let text = check.to_string();
        checks
            .entry(&key.name)
            .and_modify(|known| *known = known.take().filter(|known| *known == text))
            .or_insert(Some(text));
        tokens.insert(key.name.as_str(), check);
    }
    checks.iter().filter(|(_, agreed)| agreed.is_some()).map(|(name, _)| tokens[name].clone()).collect()
}
