//! How texts are made alike before they are compared.

use std::sync::LazyLock;

use serde_json::Value;

use super::expression::Expression;

/// What of texts does not count.
#[derive(Debug, Clone, Default)]
pub struct Alike {
    /// Whatever one of these finds.
    pub regexes: Vec<Expression>,
    pub case: bool,
    pub punctuation: Option<Punctuation>,
    pub digits: bool,
}

/// What is punctuation.
#[derive(Debug, Clone, Copy)]
pub enum Punctuation {
    /// Python's `string.punctuation`.
    Ascii,
    /// Unicode's categories that begin with `P`.
    Unicode,
}

impl Alike {
    /// Reads the argument `regexes_to_ignore`.
    ///
    /// # Errors
    /// Says what is no expression.
    pub fn regexes(list: &Value) -> Result<Vec<Expression>, String> {
        let patterns = list.as_array().ok_or("`regexes_to_ignore` is to be a list")?;
        let pattern =
            |text: &Value| Expression::new(text.as_str().ok_or("`regexes_to_ignore` must contain expressions")?);
        patterns.iter().map(pattern).collect()
    }

    /// Whether two texts are the same but for what does not count.
    ///
    /// # Errors
    /// As for [`Alike::bared`].
    pub fn same(&self, one: &str, other: &str) -> Result<bool, String> {
        Ok(self.bared(one)? == self.bared(other)?)
    }

    /// A text without what does not count.
    ///
    /// # Errors
    /// Says which expression cannot be used on it.
    pub fn bared(&self, text: &str) -> Result<String, String> {
        static UNICODE: LazyLock<Expression> =
            LazyLock::new(|| Expression::new(r"\p{P}").expect("the expression is a right one"));
        let mut text = text.to_owned();
        for pattern in &self.regexes {
            text = pattern.replace(&text, 0, "")?;
        }
        if self.case {
            text = text.to_lowercase();
        }
        match self.punctuation {
            None => {}
            Some(Punctuation::Ascii) => text.retain(|letter| !letter.is_ascii_punctuation()),
            Some(Punctuation::Unicode) => text = UNICODE.replace(&text, 0, "")?,
        }
        if self.digits {
            text.retain(|letter| !letter.is_ascii_digit());
        }
        Ok(text)
    }
}
