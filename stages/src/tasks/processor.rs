//! Functions that tasks name with `!function`, where they are known: what they make of rows.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Value, json};

use super::documents::Document;
use super::functions::Function;

/// What `process_docs` of a task does.
#[derive(Debug, Clone, PartialEq)]
pub enum RowProcessor {
    /// `utils.process_docs` of HellaSwag.
    HellaSwag,
    /// `preprocess_wikitext.wikitext_detokenizer`: the page without the blanks of its tokens as `detokenized`.
    WikiText,
    /// It makes other rows of all rows.
    Function(Function),
}

static BRACKETS: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\[.*?\]").expect("it is an expression"));

impl RowProcessor {
    /// The function of a name, where the task's data is the one that it is written for.
    pub fn of(function: &str, dataset: Option<&str>) -> Option<Self> {
        let is_of = |name: &str| dataset.is_some_and(|dataset| dataset.rsplit('/').next() == Some(name));
        match function {
            "utils.process_docs" if is_of("hellaswag") => Some(Self::HellaSwag),
            "preprocess_wikitext.wikitext_detokenizer" if is_of("wikitext_document_level") => Some(Self::WikiText),
            _ => None,
        }
    }

    /// The function that it is.
    pub fn function(&self) -> Option<&Function> {
        if let Self::Function(function) = self { Some(function) } else { None }
    }

    /// Rows as the task's templates read them.
    ///
    /// # Errors
    /// Says which column is missing or of another type, with the row, or what a function fails over.
    pub fn apply(&self, mut rows: Vec<Document>) -> Result<Vec<Document>, (Option<usize>, String)> {
        if let Self::Function(function) = self {
            return function.documents(rows).map_err(|message| (None, message));
        }
        for (index, row) in rows.iter_mut().enumerate() {
            self.apply_to(row).map_err(|message| (Some(index), message))?;
        }
        Ok(rows)
    }

    fn apply_to(&self, row: &mut Document) -> Result<(), String> {
        match self {
            Self::Function(_) => Ok(()),
            Self::WikiText => {
                let page = row.get("page").and_then(Value::as_str).ok_or("a row has no text `page`")?;
                let text = detokenized(page);
                row.insert("detokenized".to_owned(), text.into());
                Ok(())
            }
            Self::HellaSwag => {
                let text = |name: &str| {
                    let value = row.get(name).and_then(Value::as_str);
                    value.ok_or_else(|| format!("a row has no text `{name}`"))
                };
                let (label, start, end) = (text("activity_label")?, text("ctx_a")?, text("ctx_b")?);
                let query = cleaned(&format!("{label}: {start} {}", capitalized(end)));
                let endings = row.get("endings").and_then(Value::as_array).ok_or("a row has no list `endings`")?;
                let ending = |ending: &Value| ending.as_str().map(cleaned).ok_or("`endings` must contain strings");
                let choices: Vec<String> = endings.iter().map(ending).collect::<Result<_, _>>()?;
                row.insert("query".to_owned(), query.into());
                row.insert("choices".to_owned(), json!(choices));
                Ok(())
            }
        }
    }
}

/// Expressions of [`detokenized`], in their order, each with what replaces it.
static BRACKETED: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let pairs = [
        (r"\(\s*([^)]*?)\s*\)", "(${1})"),
        (r"\[\s*([^\]]*?)\s*\]", "[${1}]"),
        (r"\{\s*([^}]*?)\s*\}", "{${1}}"),
        ("\"\\s*([^\"]*?)\\s*\"", "\"${1}\""),
        (r"'\s*([^']*?)\s*'", "'${1}'"),
    ];
    pairs.map(|(pattern, by)| (Regex::new(pattern).expect("it is an expression"), by)).into()
});

/// A page of WikiText as it is written, without the blanks that part its tokens.
fn detokenized(page: &str) -> String {
    const BEFORE: [(&str, &str); 10] = [
        ("s '", "s'"),
        (" @-@ ", "-"),
        (" @,@ ", ","),
        (" @.@ ", "."),
        (" : ", ": "),
        (" ; ", "; "),
        (" . ", ". "),
        (" ! ", "! "),
        (" ? ", "? "),
        (" , ", ", "),
    ];
    const AFTER: [(&str, &str); 8] = [
        ("= = = =", "===="),
        ("= = =", "==="),
        ("= =", "=="),
        (" \u{b0} ", "\u{b0}"),
        (" \n", "\n"),
        ("\n ", "\n"),
        (" N ", " 1 "),
        (" 's", "'s"),
    ];
    let replaced =
        |text: String, pairs: &[(&str, &str)]| pairs.iter().fold(text, |text, (from, to)| text.replace(from, to));
    let text = replaced(page.to_owned(), &BEFORE);
    let text = BRACKETED.iter().fold(text, |text, (pattern, by)| pattern.replace_all(&text, *by).into_owned());
    replaced(text, &AFTER)
}

/// HellaSwag's texts without the marks of WikiHow.
fn cleaned(text: &str) -> String {
    let text = text.trim().replace(" [title]", ". ");
    BRACKETS.replace_all(&text, "").replace("  ", " ")
}

/// `str.capitalize`: the first letter large, all others small.
fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(letters.as_str().to_lowercase().chars()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wikitext_is_written_as_the_harness_does() {
        let page = " = Robert = \n = = Life = = \n He , a \" great \" man ( born 1 @.@ 5 m tall ) , said : ' yes ' . The dogs ' 20 @,@ 000 bones 's end at 5 \u{b0} N of [ it ] ; well @-@ known ! \n";
        let text = " = Robert =\n== Life ==\nHe, a \"great\" man (born 1.5 m tall), said: 'yes'. The dogs'20,000 bones's end at 5\u{b0}N of [it]; well-known!\n";
        assert_eq!(detokenized(page), text);
    }

    #[test]
    fn hellaswag_is_cleaned_as_the_harness_does() {
        let row = json!({
            "activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he STARTS", "label": "1",
            "endings": [" [header] Go [title] on.  Then", "stop [step] now"],
        });
        let rows = RowProcessor::HellaSwag.apply(vec![row.as_object().unwrap().clone()]).unwrap();
        assert_eq!(rows[0]["query"], "Roof: A man sits. He starts");
        assert_eq!(rows[0]["choices"], json!([" Go. on. Then", "stop now"]));
        assert_eq!(RowProcessor::HellaSwag.apply(vec![Document::new()]).unwrap_err().0, Some(0));
        assert_eq!(RowProcessor::of("utils.process_docs", Some("piqa")), None);
    }
}
