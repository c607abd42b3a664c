//! `${inputs.rows}`, `${files.script}` and `${outputs.made}` in what is run.

use std::borrow::Cow;

/// The groups of names.
pub(super) const INPUTS: &str = "inputs";
pub(super) const FILES: &str = "files";
pub(super) const OUTPUTS: &str = "outputs";

/// A name in a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Named<'t> {
    /// `inputs`, `files` or `outputs`.
    pub group: &'static str,
    pub name: &'t str,
}

impl Named<'_> {
    /// The environment variable that holds its path.
    pub(super) fn variable(&self) -> String {
        variable(self.group, self.name)
    }
}

/// The environment variable that holds the path of a name.
pub(super) fn variable(group: &str, name: &str) -> String {
    let prefix = match group {
        INPUTS => "INPUT",
        FILES => "FILE",
        _ => "OUTPUT",
    };
    format!("{prefix}_{name}")
}

pub(super) fn named(text: &str) -> impl Iterator<Item = Named<'_>> {
    pieces(text).filter_map(|piece| match piece {
        Piece::Named(named) => Some(named),
        Piece::Text(_) => None,
    })
}

/// The text with every name replaced.
pub(super) fn replaced<'t>(text: &'t str, value: impl Fn(&Named<'t>) -> String) -> String {
    let piece = |piece| match piece {
        Piece::Text(text) => Cow::Borrowed(text),
        Piece::Named(named) => Cow::Owned(value(&named)),
    };
    pieces(text).map(piece).collect()
}

enum Piece<'t> {
    Text(&'t str),
    Named(Named<'t>),
}

/// What else looks like `${…}` is text: it is the shell's.
fn pieces(text: &str) -> impl Iterator<Item = Piece<'_>> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, length) = match reference(rest) {
            Some((named, length)) => (Piece::Named(named), length),
            None => {
                let ends =
                    rest.match_indices("${").map(|(at, _)| at).find(|at| *at > 0 && reference(&rest[*at..]).is_some());
                let end = ends.unwrap_or(rest.len());
                (Piece::Text(&rest[..end]), end)
            }
        };
        rest = &rest[length..];
        Some(piece)
    })
}

/// The name that a text begins with, and its length.
fn reference(text: &str) -> Option<(Named<'_>, usize)> {
    let inner = text.strip_prefix("${")?;
    let end = inner.find('}')?;
    let (group, name) = inner[..end].trim().split_once('.')?;
    let group = [INPUTS, FILES, OUTPUTS].into_iter().find(|known| *known == group)?;
    Some((Named { group, name }, end + 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_replaced_and_the_shells_own_are_not() {
        let text = "cat ${HOME}/x ${inputs.rows}/a >${ outputs.made }/b ${files.a} ${nothing ${x.y}";
        let found: Vec<String> = named(text).map(|named| named.variable()).collect();
        assert_eq!(found, ["INPUT_rows", "OUTPUT_made", "FILE_a"]);
        let replaced = replaced(text, |named| format!("<{}>", named.name));
        assert_eq!(replaced, "cat ${HOME}/x <rows>/a ><made>/b <a> ${nothing ${x.y}");
        assert_eq!(named("").count(), 0);
    }
}
