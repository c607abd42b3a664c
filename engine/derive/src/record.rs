//! Structs: a closed mapping with one key per field.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::ext::IdentExt;
use syn::{DeriveInput, Error, Field, FieldsNamed, Ident, Result, Type};

use crate::attributes::{Attributes, Class, DefaultValue, doc_comment};

/// One field, with all that is said about it.
struct Key<'a> {
    /// The field in Rust.
    ident: &'a Ident,
    /// The key in the pipeline file.
    name: String,
    ty: &'a Type,
    class: Class,
    attributes: Attributes,
    doc: String,
}

impl<'a> Key<'a> {
    fn new(field: &'a Field) -> Result<Self> {
        let ident = field.ident.as_ref().expect("the fields are named");
        let attributes = Attributes::parse(&field.attrs)?;
        // A default class would be a guess about somebody's cached results.
        let class = attributes.class.ok_or_else(|| {
            Error::new_spanned(
                field,
                "a field says how it takes part in keys: #[semantic], #[resumable] or #[cosmetic]",
            )
        })?;
        let name = attributes.rename.as_ref().map_or_else(|| ident.unraw().to_string(), syn::LitStr::value);
        Ok(Self { ident, name, ty: &field.ty, class, attributes, doc: doc_comment(&field.attrs) })
    }

    fn default(&self) -> Option<TokenStream> {
        let ty = self.ty;
        Some(match self.attributes.default.as_ref()? {
            DefaultValue::OfType => quote!(<#ty as ::core::default::Default>::default()),
            DefaultValue::Given(expression) => quote!(#expression),
        })
    }

    fn read(&self) -> TokenStream {
        let (variable, name, ty, limits) = (self.variable(), &self.name, self.ty, self.attributes.limits());
        if self.attributes.flatten {
            return quote!(let #variable = <#ty as ::engine::parameter::Record>::read_fields(fields););
        }
        match self.default() {
            Some(default) => quote!(let #variable = fields.or_default::<#ty>(#name, &#limits, || #default);),
            None => quote!(let #variable = fields.required::<#ty>(#name, &#limits);),
        }
    }

    fn write_key(&self) -> TokenStream {
        let (ident, name) = (self.ident, &self.name);
        if self.attributes.flatten {
            return quote!(::engine::parameter::Parameter::write_key(&self.#ident, key););
        }
        let class = self.class();
        quote! {
            key.field(#name, #class, |key| {
                ::engine::parameter::Parameter::write_key(&self.#ident, key)
            });
        }
    }

    fn class(&self) -> TokenStream {
        match self.class {
            Class::Semantic => quote!(::engine::parameter::Class::Semantic),
            Class::Resumable => quote!(::engine::parameter::Class::Resumable),
            Class::Cosmetic => quote!(::engine::parameter::Class::Cosmetic),
        }
    }

    fn schema(&self) -> TokenStream {
        let (name, doc, ty, limits, class) = (&self.name, &self.doc, self.ty, self.attributes.limits(), self.class());
        match self.default() {
            _ if self.attributes.flatten => quote!(.with_fields_of::<#ty>()),
            Some(default) => quote!(.with_default::<#ty>(#name, #doc, #class, &#limits, &#default)),
            None => quote!(.with::<#ty>(#name, #doc, #class, &#limits)),
        }
    }

    /// Its name, where it names a stage and cannot be left out.
    fn collected(&self) -> TokenStream {
        let (name, ty) = (&self.name, self.ty);
        quote!((#name, <#ty as ::engine::parameter::Parameter>::collected()))
    }

    /// Adds the keys of the pipeline file to `names`.
    fn names(&self) -> TokenStream {
        let (name, ty) = (&self.name, self.ty);
        match self.attributes.flatten {
            true => quote!(names.extend(<#ty as ::engine::parameter::Record>::names());),
            false => quote!(names.push(#name);),
        }
    }

    /// A name that collides with none of the generated function's own.
    fn variable(&self) -> Ident {
        format_ident!("field_{}", self.ident.unraw())
    }
}

/// The implementation for a struct.
pub(crate) fn expand(input: &DeriveInput, fields: &FieldsNamed) -> Result<TokenStream> {
    let keys = fields.named.iter().map(Key::new).collect::<Result<Vec<_>>>()?;
    let (ident, doc) = (&input.ident, doc_comment(&input.attrs));
    let (impl_generics, type_generics, where_clause) = input.generics.split_for_impl();
    let names = keys.iter().map(Key::names);
    let idents: Vec<_> = keys.iter().map(|key| key.ident).collect();
    let variables = keys.iter().map(Key::variable);
    let reads = keys.iter().map(Key::read);
    let writes = keys.iter().map(Key::write_key);
    let schemas = keys.iter().map(Key::schema);
    let collected = keys.iter().map(Key::collected);
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Parameter for #ident #type_generics #where_clause {
            fn read(
                node: &::engine::file::tree::Node,
                reader: &mut ::engine::parameter::Reader,
            ) -> ::core::option::Option<Self> {
                let mut fields =
                    ::engine::parameter::Fields::of(node, reader, &<Self as ::engine::parameter::Record>::names())?;
                <Self as ::engine::parameter::Record>::read_fields(&mut fields)
            }

            #[allow(unused_variables)]
            fn write_key(&self, key: &mut ::engine::parameter::KeyWriter<'_>) {
                #(#writes)*
            }

            fn schema() -> ::engine::parameter::Json {
                ::engine::parameter::ObjectSchema::new(#doc) #(#schemas)* .finish()
            }

            #[allow(unused_variables)]
            fn visit_inputs(
                &self,
                visit: &mut dyn FnMut(&::engine::parameter::Reference, &'static [&'static str]),
            ) {
                #(::engine::parameter::Parameter::visit_inputs(&self.#idents, visit);)*
            }

            fn collected() -> ::core::option::Option<::engine::parameter::Collected> {
                ::engine::parameter::only_reference(&[#(#collected),*])
            }
        }

        #[automatically_derived]
        impl #impl_generics ::engine::parameter::Record for #ident #type_generics #where_clause {
            #[allow(unused_mut, clippy::vec_init_then_push)]
            fn names() -> ::std::vec::Vec<&'static str> {
                let mut names = ::std::vec::Vec::new();
                #(#names)*
                names
            }

            #[allow(unused_variables)]
            fn read_fields(fields: &mut ::engine::parameter::Fields<'_>) -> ::core::option::Option<Self> {
                // Every field is read before the first one that failed ends the function.
                #(#reads)*
                ::core::option::Option::Some(Self { #(#idents: #variables?),* })
            }
        }
    })
}
