//! One field of a struct or of a variant: what it contributes to each generated function.

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::ext::IdentExt;
use syn::{Attribute, Error, Field, Ident, Result, Type, Variant};

use crate::attributes::{Attributes, Class, DefaultValue, doc_comment};
use crate::choice::snake_case;

/// A field, with all that is said about it.
pub(crate) struct Key<'a> {
    /// The field in Rust; `None` for what a variant holds without a name.
    pub ident: Option<&'a Ident>,
    /// The key in the pipeline file.
    pub name: String,
    pub ty: &'a Type,
    class: Class,
    pub attributes: Attributes,
    doc: String,
}

impl<'a> Key<'a> {
    /// A field with a name.
    pub(crate) fn named(field: &'a Field) -> Result<Self> {
        let ident = field.ident.as_ref().expect("the fields are named");
        Self::new(Some(ident), ident.unraw().to_string(), &field.ty, &field.attrs, field)
    }

    /// A variant that is a key with this type.
    pub(crate) fn of_variant(variant: &'a Variant, ty: &'a Type) -> Result<Self> {
        let key = Self::new(None, snake_case(&variant.ident.unraw().to_string()), ty, &variant.attrs, variant)?;
        match key.attributes.flatten || key.attributes.omit_default {
            true => {
                Err(Error::new_spanned(variant, "a variant that is a key takes neither `flatten` nor `omit_default`"))
            }
            false => Ok(key),
        }
    }

    fn new(
        ident: Option<&'a Ident>,
        name: String,
        ty: &'a Type,
        attributes: &[Attribute],
        place: &dyn ToTokens,
    ) -> Result<Self> {
        let doc = doc_comment(attributes);
        let attributes = Attributes::parse(attributes)?;
        // A default class would be a guess about somebody's cached results.
        let class = attributes.class.ok_or_else(|| {
            let message = "a field says how it takes part in keys: #[semantic], #[resumable] or #[cosmetic]";
            Error::new_spanned(place, message)
        })?;
        let name = attributes.rename.as_ref().map_or(name, syn::LitStr::value);
        let key = Self { ident, name, ty, class, attributes, doc };
        if key.attributes.omit_default && key.default_value().is_none() {
            return Err(Error::new_spanned(place, "`omit_default` needs a default that the value is compared with"));
        }
        Ok(key)
    }

    /// The one field of a variant without names: its own fields are options of the variant.
    pub(crate) fn flattened(field: &'a Field) -> Self {
        Self {
            ident: None,
            name: String::new(),
            ty: &field.ty,
            class: Class::Semantic,
            attributes: Attributes::of_flattened(),
            doc: String::new(),
        }
    }

    fn is_flat(&self) -> bool {
        self.attributes.flatten
    }

    /// The default that the attribute gives.
    fn given_default(&self) -> Option<TokenStream> {
        let ty = self.ty;
        Some(match self.attributes.default.as_ref()? {
            DefaultValue::OfType => quote!(<#ty as ::core::default::Default>::default()),
            DefaultValue::Given(expression) => quote!(#expression),
        })
    }

    /// The value of the field where the file says nothing.
    fn default_value(&self) -> Option<TokenStream> {
        let ty = self.ty;
        match self.given_default() {
            Some(default) => Some(default),
            None if self.is_flat() => Some(quote!(<#ty as ::core::default::Default>::default())),
            None => is_option(ty).then(|| quote!(::core::option::Option::None)),
        }
    }

    /// The value of the field in the `Default` of its struct or variant.
    pub(crate) fn default_or_error(&self) -> Result<TokenStream> {
        let message = "`#[parameters(default)]` needs a default for every field, and this one has none";
        self.default_value().ok_or_else(|| Error::new_spanned(self.ty, message))
    }

    /// `let field_NAME = …;`, an `Option` of the value.
    pub(crate) fn read(&self) -> TokenStream {
        let (variable, name, ty, limits) = (self.variable(), &self.name, self.ty, self.attributes.limits());
        if self.is_flat() {
            return quote!(let #variable = <#ty as ::engine::parameter::Record>::read_fields(fields););
        }
        match self.given_default() {
            Some(default) => quote!(let #variable = fields.or_default::<#ty>(#name, &#limits, || #default);),
            None => quote!(let #variable = fields.required::<#ty>(#name, &#limits);),
        }
    }

    /// Checks the value where it is given, and makes nothing of it.
    pub(crate) fn check_given(&self) -> TokenStream {
        let (name, ty, limits) = (&self.name, self.ty, self.attributes.limits());
        quote!(fields.check_given::<#ty>(#name, &#limits);)
    }

    /// Writes the names of what is chosen in a flattened field; `value` is a reference to the field.
    pub(crate) fn write_tags(&self, value: &TokenStream) -> Option<TokenStream> {
        self.is_flat()
            .then(|| self.unless_default(value, &quote!(::engine::parameter::Record::write_tags(#value, key);)))
    }

    /// Writes the field into the key; `value` is a reference to it.
    pub(crate) fn write_key(&self, value: &TokenStream) -> TokenStream {
        let name = &self.name;
        let write = if self.is_flat() {
            quote!(::engine::parameter::Record::write_fields(#value, key);)
        } else {
            let class = self.class();
            quote! {
                key.field(#name, #class, |key| {
                    ::engine::parameter::Parameter::write_key(#value, key)
                });
            }
        };
        self.unless_default(value, &write)
    }

    fn unless_default(&self, value: &TokenStream, write: &TokenStream) -> TokenStream {
        match self.default_value() {
            Some(default) if self.attributes.omit_default => {
                let ty = self.ty;
                quote! {
                    if !::engine::parameter::have_equal_keys::<#ty>(#value, &#default) {
                        #write
                    }
                }
            }
            _ => write.clone(),
        }
    }

    fn class(&self) -> TokenStream {
        match self.class {
            Class::Semantic => quote!(::engine::parameter::Class::Semantic),
            Class::Resumable => quote!(::engine::parameter::Class::Resumable),
            Class::Cosmetic => quote!(::engine::parameter::Class::Cosmetic),
        }
    }

    /// A call on an `ObjectSchema` that adds the field.
    pub(crate) fn schema(&self) -> TokenStream {
        let (name, doc, ty, limits, class) = (&self.name, &self.doc, self.ty, self.attributes.limits(), self.class());
        match self.given_default() {
            _ if self.is_flat() => quote!(.with_fields_of::<#ty>()),
            Some(default) => quote!(.with_default::<#ty>(#name, #doc, #class, &#limits, &#default)),
            None => quote!(.with::<#ty>(#name, #doc, #class, &#limits)),
        }
    }

    /// Its name, where it names a stage and cannot be left out.
    pub(crate) fn collected(&self) -> TokenStream {
        let (name, ty) = (&self.name, self.ty);
        quote!((#name, <#ty as ::engine::parameter::Parameter>::collected()))
    }

    /// Adds the keys of the pipeline file to `names`.
    pub(crate) fn names(&self) -> TokenStream {
        let (name, ty) = (&self.name, self.ty);
        match self.is_flat() {
            true => quote!(names.extend(<#ty as ::engine::parameter::Record>::names());),
            false => quote!(names.push(#name);),
        }
    }

    /// The tag of a flattened choice.
    pub(crate) fn tag(&self) -> Option<TokenStream> {
        let ty = self.ty;
        self.is_flat().then(|| quote!(<#ty as ::engine::parameter::Record>::tag()))
    }

    /// A name that collides with none of the generated function's own.
    pub(crate) fn variable(&self) -> Ident {
        match self.ident {
            Some(ident) => format_ident!("field_{}", ident.unraw()),
            None => format_ident!("field_0"),
        }
    }
}

fn is_option(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "Option"))
}
