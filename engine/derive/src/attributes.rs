//! What the attributes of a field or variant say.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Attribute, Error, Expr, ExprLit, ExprRange, Lit, LitStr, Meta, RangeLimits, Result, Token};

/// How a field takes part in keys; the names of `cache::Class`.
#[derive(Clone, Copy)]
pub(crate) enum Class {
    Semantic,
    Resumable,
    Cosmetic,
}

/// Where the value of a field comes from that the file leaves out.
pub(crate) enum DefaultValue {
    /// `default`: the type's own.
    OfType,
    /// `default = expr`.
    Given(Box<Expr>),
}

/// One `#[semantic(…)]`, `#[resumable(…)]` or `#[cosmetic(…)]`.
pub(crate) struct Attributes {
    /// `None` where the field says nothing.
    pub class: Option<Class>,
    pub default: Option<DefaultValue>,
    pub rename: Option<LitStr>,
    /// Its own fields are keys of the mapping around it.
    pub flatten: bool,
    /// It enters the key only where it differs from its default.
    pub omit_default: bool,
    range: Option<ExprRange>,
    above: Option<Expr>,
}

impl Attributes {
    /// Reads the one attribute of ours among `attributes`.
    pub(crate) fn parse(attributes: &[Attribute]) -> Result<Self> {
        let mut found = Self::none();
        for attribute in attributes {
            let Some(class) = class_of(attribute) else { continue };
            if found.class.is_some() {
                return Err(Error::new_spanned(attribute, "a field has one class: semantic, resumable or cosmetic"));
            }
            found.class = Some(class);
            if !matches!(attribute.meta, Meta::Path(_)) {
                found.parse_arguments(attribute)?;
            }
        }
        if let (Some(range), Some(_)) = (&found.range, &found.above)
            && range.start.is_some()
        {
            return Err(Error::new_spanned(range, "`above` and the start of `range` say the same thing"));
        }
        if found.flatten && !found.is_bare() {
            let message = "a flattened field is what its own fields say: it has no class, default, range or name";
            return Err(Error::new_spanned(&attributes[attributes.len() - 1], message));
        }
        Ok(found)
    }

    /// Those of a field that says nothing.
    fn none() -> Self {
        Self { class: None, default: None, rename: None, flatten: false, omit_default: false, range: None, above: None }
    }

    /// Those of the one field of a variant without names, which is flattened.
    pub(crate) fn of_flattened() -> Self {
        Self { class: Some(Class::Semantic), flatten: true, ..Self::none() }
    }

    /// Reads the attribute of a variant, which has a name and may be the default.
    pub(crate) fn of_variant(attributes: &[Attribute]) -> Result<Self> {
        let found = Self::parse(attributes)?;
        let only_default = matches!(found.default, None | Some(DefaultValue::OfType));
        let nothing_of_fields = !found.flatten && !found.omit_default && found.range.is_none() && found.above.is_none();
        if matches!(found.class, None | Some(Class::Semantic)) && only_default && nothing_of_fields {
            return Ok(found);
        }
        let attribute = attributes.iter().find(|attribute| class_of(attribute).is_some());
        Err(Error::new_spanned(
            attribute,
            "a variant takes `#[semantic(rename = \"name\")]` and `#[semantic(default)]`",
        ))
    }

    /// Whether nothing is said but `flatten` and `omit_default`.
    fn is_bare(&self) -> bool {
        matches!(self.class, Some(Class::Semantic))
            && self.default.is_none()
            && self.rename.is_none()
            && self.range.is_none()
            && self.above.is_none()
    }

    fn parse_arguments(&mut self, attribute: &Attribute) -> Result<()> {
        attribute.parse_nested_meta(|meta| {
            if meta.path.is_ident("default") {
                self.default = Some(if meta.input.peek(Token![=]) {
                    DefaultValue::Given(Box::new(meta.value()?.parse()?))
                } else {
                    DefaultValue::OfType
                });
            } else if meta.path.is_ident("range") {
                self.range = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("above") {
                self.above = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("rename") {
                self.rename = Some(meta.value()?.parse()?);
            } else if meta.path.is_ident("flatten") {
                self.flatten = true;
            } else if meta.path.is_ident("omit_default") {
                self.omit_default = true;
            } else {
                return Err(meta.error("expected `default`, `omit_default`, `range`, `above`, `rename` or `flatten`"));
            }
            Ok(())
        })
    }

    /// The limits of a number, as an expression.
    pub(crate) fn limits(&self) -> TokenStream {
        let mut limits = quote!(::engine::parameter::Limits::NONE);
        if let Some(start) = self.range.as_ref().and_then(|range| range.start.as_ref()) {
            limits = quote!(#limits.at_least((#start) as f64));
        }
        if let Some(above) = &self.above {
            limits = quote!(#limits.above((#above) as f64));
        }
        if let Some(range) = &self.range
            && let Some(end) = &range.end
        {
            limits = match range.limits {
                RangeLimits::HalfOpen(_) => quote!(#limits.below((#end) as f64)),
                RangeLimits::Closed(_) => quote!(#limits.at_most((#end) as f64)),
            };
        }
        limits
    }
}

/// What `#[parameters(…)]` says of a struct or an enum.
#[derive(Default)]
pub(crate) struct Container {
    /// `default`: implements `Default` from the defaults of the fields.
    pub default: bool,
    /// `tagged`, or a `tag`: an enum is a tagged choice though none of its variants has a field yet.
    pub tagged: bool,
    /// `one_of`: each variant of an enum is a key, and exactly one of them is given.
    pub one_of: bool,
    /// `tag = "key"`: the key with the name of the variant, `name` if left out.
    pub tag: Option<LitStr>,
}

impl Container {
    /// Reads every `#[parameters(…)]` among `attributes`.
    pub(crate) fn parse(attributes: &[Attribute]) -> Result<Self> {
        let mut found = Self::default();
        for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("parameters")) {
            attribute.parse_nested_meta(|meta| {
                if meta.path.is_ident("default") {
                    found.default = true;
                } else if meta.path.is_ident("tagged") {
                    found.tagged = true;
                } else if meta.path.is_ident("one_of") {
                    found.one_of = true;
                } else if meta.path.is_ident("tag") {
                    found.tagged = true;
                    found.tag = Some(meta.value()?.parse()?);
                } else {
                    return Err(meta.error("expected `default`, `one_of`, `tagged` or `tag = \"key\"`"));
                }
                Ok(())
            })?;
        }
        Ok(found)
    }

    /// The key with the name of the variant.
    pub(crate) fn tag_name(&self) -> String {
        self.tag.as_ref().map_or_else(|| "name".to_owned(), LitStr::value)
    }
}

/// The doc comment as one text: lines joined, paragraphs kept apart.
pub(crate) fn doc_comment(attributes: &[Attribute]) -> String {
    let mut text = String::new();
    for attribute in attributes {
        let Meta::NameValue(pair) = &attribute.meta else { continue };
        if !pair.path.is_ident("doc") {
            continue;
        }
        let Expr::Lit(ExprLit { lit: Lit::Str(line), .. }) = &pair.value else { continue };
        let line = line.value();
        match (line.trim(), text.is_empty() || text.ends_with('\n')) {
            ("", true) => {}
            ("", false) => text.push_str("\n\n"),
            (line, true) => text.push_str(line),
            (line, false) => text.extend([" ", line]),
        }
    }
    text.trim_end().to_owned()
}

fn class_of(attribute: &Attribute) -> Option<Class> {
    [("semantic", Class::Semantic), ("resumable", Class::Resumable), ("cosmetic", Class::Cosmetic)]
        .into_iter()
        .find(|(name, _)| attribute.path().is_ident(name))
        .map(|(_, class)| class)
}
