//! Mappings with named fields, and the choice among forms of one: what derived code calls beside [`Fields`].

use cache::KeyDocument;

use super::{Fields, KeyWriter, ObjectSchema, Parameter, Reader};
use crate::file::tree::{Entry, Node, Value};

/// Parameters with named fields: what `#[derive(Parameters)]` makes of a struct and of a tagged choice, so that another
/// can hold it flattened.
pub trait Record: Parameter + Sized {
    /// Its keys; the one that chooses comes first.
    fn names() -> Vec<&'static str>;

    /// The key that names the variant, where there is one such key.
    fn tag() -> Option<&'static str> {
        None
    }

    /// Reads its fields from the mapping that holds them; on `None` at least one problem has been reported.
    fn read_fields(fields: &mut Fields<'_>) -> Option<Self>;

    /// Writes the names of the chosen variants into a key. They come first, since they say how to read the rest.
    fn write_tags(&self, _key: &mut KeyWriter<'_>) {}

    /// Writes all else into a key.
    fn write_fields(&self, key: &mut KeyWriter<'_>);

    /// Adds its fields to the schema of the mapping that holds them.
    fn add_to(schema: ObjectSchema) -> ObjectSchema;
}

/// A variant of a tagged choice: its name, and the keys that go with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// What the tag's value is.
    pub name: &'static str,
    /// Its options.
    pub options: Vec<&'static str>,
}

/// Reads a closed mapping with the fields of `T`. Where one of its keys names a variant, the bare word `x` is the
/// mapping `{ name: x }`.
pub fn read_record<T: Record>(node: &Node, reader: &mut Reader) -> Option<T> {
    let mapping = match (&node.value, T::tag()) {
        (Value::String(_), Some(tag)) => {
            let entry = Entry { key: tag.to_owned(), key_span: node.span, value: node.clone() };
            &Node { span: node.span, value: Value::Map(vec![entry]) }
        }
        _ => node,
    };
    let mut fields = Fields::of(mapping, reader, &T::names())?;
    T::read_fields(&mut fields)
}

/// The tag among those of several flattened fields: `None` where there is none, or more than one.
pub fn only_tag(tags: &[Option<&'static str>]) -> Option<&'static str> {
    let mut found = tags.iter().flatten();
    match (found.next(), found.next()) {
        (Some(tag), None) => Some(tag),
        _ => None,
    }
}

/// The keys of a mapping with its tag in the first place.
pub fn tag_first(mut names: Vec<&'static str>, tag: Option<&'static str>) -> Vec<&'static str> {
    names.sort_by_key(|name| Some(*name) != tag);
    names
}

/// The keys of a tagged choice: the tag, then the options of all variants, each once.
pub fn names_of_choices(tag: &'static str, choices: &[Choice]) -> Vec<&'static str> {
    let mut names = vec![tag];
    for option in choices.iter().flat_map(|choice| &choice.options) {
        if !names.contains(option) {
            names.push(option);
        }
    }
    names
}

/// Whether two values would enter a key alike. An input that is given differs from one that is not, whatever it is.
pub fn have_equal_keys<T: Parameter>(one: &T, other: &T) -> bool {
    let key = |value: &T| {
        let mut document = KeyDocument::default();
        value.write_key(&mut KeyWriter::new(&mut document, &|_, _| None));
        document
    };
    key(one) == key(other)
}
