//! Which tokens go on with a text of a grammar: JSON by a schema, or with something around it.
//!
//! The one place that knows llguidance.

use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use model::sampling::{Constraint, Next};
use serde_json::{Value, json};

use crate::data::tokenizer::Tokenizer;

/// The byte that no text has, before the names of special tokens: no grammar's text is written with one.
const SPECIAL: u8 = 0xff;

/// The field of a schema in which llguidance has its options.
const OPTIONS: &str = "x-guidance";

/// The white space that may stand between two parts of a document. Without a bound a model can go on with it for ever.
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,32}";

/// States of the automaton of a grammar's expressions, of 1 to 2 kB each.
const MOST_LEXER_STATES: usize = 20_000;

/// Letters of what llguidance says that are shown.
const LONGEST_MESSAGE: usize = 500;

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The vocabulary cannot be written with.
    #[error("no grammar can be followed with this vocabulary: {0}")]
    Vocabulary(String),
    /// The grammar is wrong, or has something that is not supported.
    #[error("{0}")]
    Grammar(String),
}

/// Makes constraints of grammars, for one vocabulary.
pub struct Grammars {
    factory: ParserFactory,
}

/// A text of a grammar, up to some token.
struct Matching {
    matcher: Matcher,
}

impl Grammars {
    /// For a tokenizer, and a model with so many logits.
    ///
    /// # Errors
    /// Fails where the vocabulary cannot be used.
    pub fn new(tokenizer: &Tokenizer, vocab_size: usize) -> Result<Self, GrammarError> {
        let wrong = |error: &dyn std::fmt::Display| GrammarError::Vocabulary(shortened(error));
        let mut words = tokenizer.bytes_by_id();
        words.resize(vocab_size.max(words.len()), Vec::new());
        for (id, word) in words.iter_mut().enumerate() {
            if tokenizer.is_special(id as u32) {
                word.insert(0, SPECIAL);
            }
        }
        // Where a text may end is asked for by itself; the trie wants a token for it.
        let eos = tokenizer.eos_token_id().or_else(|| tokenizer.stop_token_ids().first().copied()).unwrap_or(0);
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, eos), &words);
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment).map_err(|error| wrong(&error))?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        // Work that a schema can ask for: its expressions are not computed ahead over the whole vocabulary, and their
        // automaton has a bound of some tens of megabytes.
        limits.precompute_large_lexemes = false;
        limits.max_lexer_states = MOST_LEXER_STATES;
        Ok(Self { factory })
    }

    /// A JSON document of a schema.
    ///
    /// # Errors
    /// Fails where the schema is none, or has what is not supported.
    pub fn json(&self, schema: &Value) -> Result<Box<dyn Constraint>, GrammarError> {
        check(schema)?;
        let mut schema = schema.clone();
        if let Value::Object(fields) = &mut schema {
            let options = json!({ "whitespace_pattern": WHITE_SPACE });
            if fields.insert(OPTIONS.to_owned(), options).is_some() {
                return Err(GrammarError::Grammar(format!("`{OPTIONS}` is not supported")));
            }
        }
        self.constraint(TopLevelGrammar::from_json_schema(schema))
    }

    /// A text of a grammar in llguidance's form of Lark, and the schemas in it.
    ///
    /// # Errors
    /// As for [`Grammars::json`].
    pub fn lark<'s>(
        &self,
        grammar: String,
        schemas: impl IntoIterator<Item = &'s Value>,
    ) -> Result<Box<dyn Constraint>, GrammarError> {
        schemas.into_iter().try_for_each(check)?;
        self.constraint(TopLevelGrammar::from_lark(grammar))
    }

    fn constraint(&self, grammar: TopLevelGrammar) -> Result<Box<dyn Constraint>, GrammarError> {
        let matcher = Matcher::new(self.factory.create_parser(grammar));
        match matcher.get_error() {
            Some(error) => Err(GrammarError::Grammar(shortened(&error))),
            None => Ok(Box::new(Matching { matcher })),
        }
    }
}

/// Refuses what llguidance would compute wrongly, or without end.
fn check(schema: &Value) -> Result<(), GrammarError> {
    if let Some(bounds) = narrow_bounds(schema) {
        return Err(GrammarError::Grammar(format!("numbers {bounds} are not supported: the bounds are too close")));
    }
    let found = Expressions::of(schema);
    if found.meet && found.count > MOST_MEETING {
        let message = format!(
            "it has {} expressions which may hold at once (`allOf`, `$ref`, `patternProperties`), and at most {MOST_MEETING} are \
             supported",
            found.count
        );
        return Err(GrammarError::Grammar(message));
    }
    Ok(())
}

/// Expressions that one text may have to match at once. The work to see whether any text does grows with their product,
/// and no limit of llguidance holds there.
const MOST_MEETING: usize = 6;

/// The regular expressions of a schema.
#[derive(Default)]
struct Expressions {
    count: usize,
    /// Whether several may be of one text.
    meet: bool,
}

impl Expressions {
    fn of(schema: &Value) -> Self {
        let mut found = Self::default();
        found.add(schema);
        found
    }

    fn add(&mut self, schema: &Value) {
        match schema {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match (name.as_str(), value) {
                        ("pattern" | "format", Value::String(_)) => self.count += 1,
                        ("patternProperties", Value::Object(patterns)) => {
                            self.count += patterns.len();
                            self.meet = true;
                        }
                        ("allOf" | "$ref", _) => self.meet = true,
                        _ => {}
                    }
                    self.add(value);
                }
            }
            Value::Array(items) => items.iter().for_each(|item| self.add(item)),
            _ => {}
        }
    }
}

/// Bounds of numbers, one of them exclusive, that have one integer part: llguidance takes such a bound for one that may
/// be reached.
fn narrow_bounds(schema: &Value) -> Option<String> {
    match schema {
        Value::Object(fields) => {
            let bound =
                |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, fields.get(name)?.as_f64()?)));
            let (least, most) = (bound(["exclusiveMinimum", "minimum"]), bound(["exclusiveMaximum", "maximum"]));
            let of_integers = fields.get("type").is_some_and(|kind| kind == "integer");
            match least.zip(most).filter(|_| !of_integers) {
                Some(((from, least), (to, most)))
                    if least.trunc() == most.trunc() && [from, to].iter().any(|name| name.starts_with("exclusive")) =>
                {
                    Some(format!("with `{from}: {least}` and `{to}: {most}`"))
                }
                _ => fields.values().find_map(narrow_bounds),
            }
        }
        Value::Array(items) => items.iter().find_map(narrow_bounds),
        _ => None,
    }
}

fn shortened(error: &dyn std::fmt::Display) -> String {
    error.to_string().chars().take(LONGEST_MESSAGE).collect()
}

impl std::fmt::Debug for Matching {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Matching").finish_non_exhaustive()
    }
}

impl Constraint for Matching {
    fn apply(&mut self, logits: &mut [f32], stop_token_ids: &[u32]) {
        let may_end = self.matcher.is_accepting().unwrap_or(false);
        // Where its limits end it nothing is allowed, and the completion fails.
        let allowed = self.matcher.compute_mask().ok();
        for (id, logit) in logits.iter_mut().enumerate() {
            let id = id as u32;
            let is_allowed = match stop_token_ids.contains(&id) {
                true => may_end,
                false => allowed.as_ref().is_some_and(|allowed| allowed.is_allowed(id)),
            };
            if !is_allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    fn push(&mut self, token: u32) -> Next {
        match self.matcher.consume_token(token) {
            Ok(()) if self.matcher.is_stopped() => Next::End,
            // What could not be taken leaves nothing to choose from.
            Ok(()) | Err(_) => Next::Any,
        }
    }

    fn boxed_clone(&self) -> Box<dyn Constraint> {
        Box::new(Self { matcher: self.matcher.deep_clone() })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizer() -> Tokenizer {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers"));
        Tokenizer::from_folder(&folder.join("bytelevel")).unwrap()
    }

    /// Whether the tokens of a text are all allowed, and whether it may end behind them.
    fn follows(mut constraint: Box<dyn Constraint>, text: &str) -> Option<bool> {
        let tokenizer = tokenizer();
        let stop = tokenizer.eos_token_id().unwrap();
        let vocab_size = tokenizer.vocab_size();
        let mut ended = false;
        for id in tokenizer.encode(text).unwrap() {
            let mut logits = vec![0.0; vocab_size];
            constraint.apply(&mut logits, &[stop]);
            if ended || logits[id as usize] != 0.0 {
                return None;
            }
            ended = constraint.push(id) == Next::End;
        }
        let mut logits = vec![0.0; vocab_size];
        constraint.apply(&mut logits, &[stop]);
        Some(ended || logits[stop as usize] == 0.0)
    }

    #[test]
    fn only_documents_of_the_schema_can_be_written() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let schema = json!({
            "type": "object",
            "properties": { "city": { "enum": ["Zürich", "Bern"] }, "days": { "type": "integer", "minimum": 1 } },
            "required": ["city", "days"],
            "additionalProperties": false,
        });
        let json = |text: &str| follows(grammars.json(&schema).unwrap(), text);
        assert_eq!(json(r#"{"city": "Zürich", "days": 2}"#), Some(true));
        assert_eq!(json(r#"{"city": "Bern","days"#), Some(false));
        assert_eq!(json("{\n    \"city\": \"Bern\",\n    \"days\": 1\n}"), Some(true));
        assert_eq!(json("{\n\n"), None);
        assert_eq!(json("{  "), None);
        for wrong in ["x", "[1]", r#"{"city": "Basel""#, r#"{"days": 0"#, r#"{"city": "Bern", "days": 2, "rain""#] {
            assert_eq!(json(wrong), None, "{wrong}");
        }
        let any = |text: &str| follows(grammars.json(&json!({ "type": "object" })).unwrap(), text);
        assert_eq!(any(r#"{"a": [1, {"b": null}], "c": "d\n"}"#), Some(true));
        assert_eq!(any("[]"), None);
    }

    #[test]
    fn what_a_schema_has_beyond_what_is_supported_is_an_error() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        for schema in [
            json!({ "type": "text" }),
            json!({ "type": "object", "dependentSchemas": {} }),
            json!({ "$ref": "https://site.example/schema.json" }),
            json!({ "type": "object", "x-guidance": { "lenient": true } }),
            json!({ "type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.1 }),
            json!({ "properties": { "a": { "type": "number", "exclusiveMinimum": -0.1, "maximum": 0 } } }),
            json!(3),
        ] {
            let error = grammars.json(&schema).unwrap_err();
            assert!(matches!(&error, GrammarError::Grammar(text) if !text.is_empty()), "{schema}: {error}");
        }
    }

    /// Expressions whose automaton has a state for each set of places: it would take all memory, and hours.
    #[test]
    fn a_schema_cannot_ask_for_endless_work() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let schema = |most: usize| {
            let patterns = (3..most).map(|i| json!({ "type": "string", "pattern": format!(".*a.{{{i}}}b") }));
            json!({ "type": "object", "required": ["a"],
                "properties": { "a": { "allOf": patterns.collect::<Vec<_>>() } } })
        };
        let said = grammars.json(&schema(40)).unwrap_err().to_string();
        assert!(said.contains("37 expressions"), "{said}");
        assert!(grammars.lark("start: \"a\"".to_owned(), [&schema(40)]).is_err());
        assert!(grammars.json(&schema(5)).is_ok());
    }

    #[test]
    fn a_copy_goes_its_own_way() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let one = grammars.lark("start: \"ab\" | \"cd\"".to_owned(), []).unwrap();
        assert_eq!(follows(one.clone(), "ab"), Some(true));
        assert_eq!(follows(one.clone(), "cd"), Some(true));
        assert_eq!(follows(one, "ad"), None);
    }
}
