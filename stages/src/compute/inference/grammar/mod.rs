//! Which tokens go on with a text of a grammar: JSON by a schema, or with something around it.
//!
//! The one place that knows llguidance.

mod dead_end;
mod formats;
mod subschemas;

use std::collections::BTreeSet;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use model::sampling::{Constraint, Next};
use serde_json::{Map, Value, json};

use self::dead_end::has_dead_end;
use self::formats::narrow_formats;
use self::subschemas::{each_schema, find_in};
use crate::data::tokenizer::Tokenizer;

/// The byte that no text has, before the names of special tokens: no grammar's text is written with one.
const SPECIAL: u8 = 0xff;

/// The field of a schema in which llguidance has its options.
const OPTIONS: &str = "x-guidance";

/// The white space that may be between two parts of a document. Without a bound a model can go on with it for ever.
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,32}";

/// What may follow a backslash. With `u` a name that a schema does not declare could be one that it does, written anew:
/// llguidance tells them apart as they are written. Control characters that have no other form are not written, then.
const ESCAPES: &str = "nrbtf\\\"";

/// The option that has these.
const ALLOWED_ESCAPES: &str = "json_allowed_escapes";

/// What comes before a schema in a grammar of Lark's form.
const SCHEMA: &str = "%json ";

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
        let mut narrowed = schema.clone();
        narrow_formats(&mut narrowed);
        if let Value::Object(fields) = &mut narrowed {
            let options = json!({ "whitespace_pattern": WHITE_SPACE, ALLOWED_ESCAPES: ESCAPES });
            if fields.insert(OPTIONS.to_owned(), options).is_some() {
                return Err(GrammarError::Grammar(format!("`{OPTIONS}` is not supported")));
            }
        }
        self.constraint(TopLevelGrammar::from_json_schema(narrowed), &[schema])
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
        let schemas: Vec<&Value> = schemas.into_iter().collect();
        schemas.iter().copied().try_for_each(check)?;
        let lines: Vec<String> = grammar.lines().map(with_narrow_schema).collect();
        self.constraint(TopLevelGrammar::from_lark(lines.join("\n")), &schemas)
    }

    /// Of a grammar with these schemas.
    fn constraint(&self, grammar: TopLevelGrammar, schemas: &[&Value]) -> Result<Box<dyn Constraint>, GrammarError> {
        let parser = self.factory.create_parser(grammar);
        if parser.as_ref().is_ok_and(|parser| has_dead_end(parser.parser.grammar(), self.factory.limits())) {
            return Err(GrammarError::Grammar(DEAD_END.to_owned()));
        }
        let matcher = Matcher::new(parser);
        match matcher.get_error() {
            // It names an option, which only a program can set.
            Some(error) if error.contains("oneOf constraints are not supported") => {
                Err(GrammarError::Grammar(ONE_OF.to_owned()))
            }
            Some(error) => {
                let reference = |schema: &&Value| find_in(schema, |fields| outer_reference(fields, &error));
                Err(GrammarError::Grammar(shortened(&schemas.iter().find_map(reference).unwrap_or(error))))
            }
            None => Ok(Box::new(Matching { matcher })),
        }
    }
}

/// Said of a grammar with dead ends.
const DEAD_END: &str = "nothing can be written for a part of the schema: look for `patternProperties` that match nothing, or \
    only names in `properties`, for bounds without a multiple of `multipleOf` between them, for constants with control \
    characters, and for definitions that require themselves";

/// Said of a `oneOf` that llguidance refuses.
const ONE_OF: &str = "a `oneOf` is supported where its schemas exclude each other: by their types, by constant strings, or by \
    constant strings of a property that each requires; write `anyOf` for others, where one value may be of several";

/// Refuses what llguidance would compute wrongly, or without end.
fn check(schema: &Value) -> Result<(), GrammarError> {
    if let Some(problem) = find_in(schema, |fields| narrow_bounds(fields).or_else(|| uncounted_names(fields))) {
        return Err(GrammarError::Grammar(shortened(&problem)));
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
        each_schema(schema, &mut |fields: &Map<String, Value>| {
            for (keyword, value) in fields {
                match (keyword.as_str(), value) {
                    ("pattern" | "format", Value::String(_)) => found.count += 1,
                    ("patternProperties", Value::Object(patterns)) => {
                        found.count += patterns.len();
                        found.meet = true;
                    }
                    ("allOf" | "$ref", _) => found.meet = true,
                    _ => {}
                }
            }
        });
        found
    }
}

/// Bounds of numbers, one of them exclusive, that have one integer part: llguidance takes such a bound for one that may
/// be reached.
fn narrow_bounds(fields: &Map<String, Value>) -> Option<String> {
    let bound = |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, fields.get(name)?.as_f64()?)));
    let (from, least) = bound(["exclusiveMinimum", "minimum"])?;
    let (to, most) = bound(["exclusiveMaximum", "maximum"])?;
    let of_integers = fields.get("type").is_some_and(|kind| kind == "integer");
    let is_exclusive = [from, to].iter().any(|name| name.starts_with("exclusive"));
    (!of_integers && is_exclusive && least.trunc() == most.trunc()).then(|| {
        format!("numbers with `{from}: {least}` and `{to}: {most}` are not supported: the bounds are too close")
    })
}

/// A number of properties that takes several without a name in the schema: what has been written is not remembered, so
/// that they may all be one.
fn uncounted_names(fields: &Map<String, Value>) -> Option<String> {
    let least = fields.get("minProperties")?.as_u64()?;
    let names = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let required = names.filter_map(Value::as_str).collect::<BTreeSet<_>>().len() as u64;
    let is_closed =
        fields.get("additionalProperties") == Some(&Value::Bool(false)) && !fields.contains_key("patternProperties");
    (!is_closed && least > required + 1).then(|| {
        format!(
            "`minProperties: {least}` with {required} names in `required` is not supported: the others could be one name, \
             written again; require the names themselves"
        )
    })
}

/// A reference that llguidance says it does not follow: it looks nothing up, and knows no `$id` and no `$anchor`.
fn outer_reference(fields: &Map<String, Value>, said: &str) -> Option<String> {
    let reference = fields.get("$ref")?.as_str()?;
    said.contains(&format!("ref '{reference}'")).then(|| {
        format!(
            "`$ref` is `{reference}`, and only references into the schema itself are supported: copy what it names into \
             `$defs`, and write `#/$defs/NAME`"
        )
    })
}

/// A line of a grammar in Lark's form; a schema in it as [`Grammars::json`] takes one.
fn with_narrow_schema(line: &str) -> String {
    let parts =
        line.split_once(SCHEMA).and_then(|(rule, schema)| Some((rule, serde_json::from_str::<Value>(schema).ok()?)));
    let Some((rule, Value::Object(mut fields))) = parts else { return line.to_owned() };
    if let Value::Object(options) = fields.entry(OPTIONS).or_insert_with(|| json!({})) {
        options.insert(ALLOWED_ESCAPES.to_owned(), json!(ESCAPES));
    }
    let mut schema = Value::Object(fields);
    narrow_formats(&mut schema);
    format!("{rule}{SCHEMA}{schema}")
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
            json!({ "type": "object", "patternProperties": { "^a$": {} }, "additionalProperties": false, "minProperties": 2 }),
            json!({ "type": "object", "required": ["a", "a"], "minProperties": 3 }),
            json!({ "allOf": [{ "type": "object", "minProperties": 2 }, { "additionalProperties": { "type": "null" } }] }),
            json!(3),
        ] {
            let error = grammars.json(&schema).unwrap_err();
            assert!(matches!(&error, GrammarError::Grammar(text) if !text.is_empty()), "{schema}: {error}");
        }
    }

    #[test]
    fn messages_name_what_a_user_can_write_instead() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let one_of = json!({ "oneOf": [{ "type": "number" }, { "type": "integer" }] });
        assert_eq!(grammars.json(&one_of).unwrap_err().to_string(), ONE_OF);
        let lark = format!("start: %json {one_of}");
        assert_eq!(grammars.lark(lark, [&one_of]).unwrap_err().to_string(), ONE_OF);
        for reference in ["https://site.example/schema.json", "other.json#/a", "#name", "T0"] {
            let said = grammars.json(&json!({ "items": { "$ref": reference } })).unwrap_err().to_string();
            assert!(said.contains(reference) && said.contains("`#/$defs/NAME`"), "{said}");
            let property = json!({ "type": "object", "properties": { "default": { "$ref": reference } } });
            let said = grammars.lark(format!("start: %json {property}"), [&property]).unwrap_err().to_string();
            assert!(said.contains(reference) && said.contains("`#/$defs/NAME`"), "{said}");
        }
    }

    /// What looks like a schema in a value, and what no text comes to.
    #[test]
    fn only_schemas_are_checked() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let data = json!({ "$ref": "other.json", "minProperties": 3 });
        for (schema, text) in [
            (json!({ "const": data }), data.to_string()),
            (json!({ "enum": [data, 1] }), "1".to_owned()),
            (json!({ "type": "integer", "default": data, "examples": [data] }), "1".to_owned()),
            (json!({ "type": "integer", "$defs": { "a": { "$ref": "other.json" } } }), "1".to_owned()),
        ] {
            assert_eq!(follows(grammars.json(&schema).unwrap(), &text), Some(true), "{schema}");
        }
        let named = json!({ "type": "object", "properties": { "default": { "type": "object", "minProperties": 2 } } });
        assert!(grammars.json(&named).unwrap_err().to_string().contains("`minProperties: 2`"));
    }

    #[test]
    fn a_declared_name_is_written_once() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"],
            "additionalProperties": { "type": "string" }, "minProperties": 2 });
        let json = |text: &str| follows(grammars.json(&schema).unwrap(), text);
        assert_eq!(json(r#"{"a": 1, "b": "x"}"#), Some(true));
        assert_eq!(json(r#"{"a": 1, "é\\\"\n🦀": "\t"}"#), Some(true));
        for wrong in [r#"{"a": 1}"#, r#"{"a": 1, "a": "x"}"#, r#"{"a": 1, "\u0061": "x"}"#] {
            assert_eq!(json(wrong), None, "{wrong}");
        }
        // Names that the schema does not have may be one name. That is enough where it asks for one.
        let any = |least: u64| json!({ "type": "object", "additionalProperties": {}, "minProperties": least });
        assert!(grammars.json(&any(1)).is_ok());
        assert!(grammars.json(&any(2)).unwrap_err().to_string().contains("`minProperties: 2`"));
    }

    /// The names that a pattern leaves are seen to be none where its schema is merged with others, too.
    #[test]
    fn a_schema_in_which_a_text_could_get_stuck_is_an_error() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let object = |rest: Value| {
            let mut object =
                json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
            object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            object
        };
        let closed = |pattern: &str, schema: Value| json!({ "patternProperties": { pattern: schema }, "additionalProperties": false });
        let least = json!({ "minimum": 0 });
        // There are multiples and integers, and none is both.
        let no_integer = json!({ "type": "integer", "multipleOf": 0.75, "minimum": 0.75, "maximum": 2.25 });
        let no_multiple = json!({ "type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6 });
        for schema in [
            object(closed("^a$", least.clone())),
            json!({ "allOf": [object(json!({})), closed("^a$", least.clone())] }),
            object(json!({ "properties": { "a": no_integer } })),
            json!({ "type": "object", "properties": { "a": no_integer } }),
            json!({ "const": "\u{1b}" }),
            json!({ "$ref": "#/$defs/a", "$defs": { "a": object(json!({ "properties": { "a": { "$ref": "#/$defs/a" } } })) } }),
        ] {
            assert_eq!(grammars.json(&schema).unwrap_err().to_string(), DEAD_END, "{schema}");
        }
        // These llguidance sees: what is required is an error, and else it is not written.
        let of_no_multiple = object(json!({ "properties": { "a": no_multiple } }));
        assert!(grammars.json(&of_no_multiple).unwrap_err().to_string().contains("'a' is unsatisfiable"));
        let optional = json!({ "type": "object", "properties": { "a": no_multiple } });
        assert_eq!(follows(grammars.json(&optional).unwrap(), r#"{"b": 1}"#), Some(true));
        assert_eq!(follows(grammars.json(&optional).unwrap(), r#"{"a""#), None);
        for (schema, text) in [
            (object(closed("^a", least.clone())), r#"{"a": 1, "ab": true}"#),
            (object(json!({ "patternProperties": { "^a$": least } })), r#"{"a": 1, "b": true}"#),
            (json!({ "type": "object", "patternProperties": { ".*": { "type": "integer" } } }), r#"{"b": 1, "c": 2}"#),
            (json!({ "enum": ["\u{1b}", "a"] }), r#""a""#),
            (
                json!({ "$ref": "#/$defs/a", "$defs": { "a": { "type": "array", "items": { "$ref": "#/$defs/a" } } } }),
                "[[], [[]]]",
            ),
        ] {
            assert_eq!(follows(grammars.json(&schema).unwrap(), text), Some(true), "{schema}");
        }
        assert_eq!(
            follows(grammars.json(&object(closed("^a", json!({ "minimum": 0 })))).unwrap(), r#"{"a": -1"#),
            None
        );
    }

    #[test]
    fn formats_have_no_text_that_readers_refuse() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        let label = |length: usize| "a".repeat(length);
        let name = |last: usize| [label(63), label(63), label(63), label(last)].join(".");
        for (format, good, bad) in [
            ("time", vec!["11:33:59z".to_owned(), "23:59:59.25+01:00".to_owned()], vec!["11:33:60z".to_owned()]),
            (
                "date",
                ["2024-02-29", "2000-02-29", "0004-02-29", "2023-02-28", "2023-12-31", "0001-01-01"]
                    .map(String::from)
                    .to_vec(),
                ["2023-02-29", "1900-02-29", "0000-01-01", "2023-11-31"].map(String::from).to_vec(),
            ),
            (
                "date-time",
                vec!["2024-02-29T23:59:59.5Z".to_owned()],
                ["2023-02-29T00:00:00Z", "2016-12-31T23:59:60Z"].map(String::from).to_vec(),
            ),
            ("hostname", vec![label(63), name(61)], vec![label(64), name(62)]),
            (
                "email",
                vec![format!("{}@b.c", label(64)), format!("a@b.{}", label(63)), "a@[127.0.0.1]".to_owned()],
                vec![format!("{}@b.c", label(65)), format!("a@b.{}", label(64))],
            ),
        ] {
            let schema = json!({ "type": "object", "required": ["format"], "properties": { "format": { "format": format, "type": "string" } } });
            let lark = format!("start: %json {schema}");
            let is_written = |text: &String| {
                let document = json!({ "format": text }).to_string();
                let by_json = follows(grammars.json(&schema).unwrap(), &document);
                assert_eq!(follows(grammars.lark(lark.clone(), [&schema]).unwrap(), &document), by_json, "{document}");
                by_json == Some(true)
            };
            assert!(good.iter().all(is_written), "{format}");
            assert!(!bad.iter().any(is_written), "{format}");
        }
        // A value is no schema, and a pattern and its format still hold together.
        let value = json!({ "const": { "format": "time" } });
        assert_eq!(follows(grammars.json(&value).unwrap(), r#"{"format": "time"}"#), Some(true));
        let both = json!({ "type": "string", "format": "email", "pattern": r"@example\.com$" });
        assert_eq!(follows(grammars.json(&both).unwrap(), r#""a@example.com""#), Some(true));
        assert_eq!(follows(grammars.json(&both).unwrap(), r#""a@other.com""#), None);
    }

    #[test]
    fn a_format_can_have_a_pattern_and_lengths() {
        let grammars = Grammars::new(&tokenizer(), tokenizer().vocab_size()).unwrap();
        for (schema, good, bad) in [
            (json!({ "type": "string", "format": "email", "maxLength": 254 }), "a@b.c", "a@b..c"),
            (json!({ "type": "string", "format": "email", "minLength": 6 }), "aa@b.c", "a@b.c"),
            (
                json!({ "type": "string", "format": "email", "minLength": 64 }),
                &*format!("{}@b.c", "a".repeat(60)),
                "a@b.c",
            ),
            (json!({ "format": "hostname", "pattern": r"\.example\.com$" }), "a.example.com", "a.other.com"),
            (json!({ "type": "string", "format": "hostname", "maxLength": 5 }), "a.com", "aa.com"),
            (json!({ "format": "date-time", "minLength": 20 }), "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z"),
            (
                json!({ "format": "date-time", "pattern": r"\.\d{3}", "maxLength": 24 }),
                "2024-02-29T00:00:00.125Z",
                "2024",
            ),
            (json!({ "type": ["string", "null"], "format": "date" }), "2024-02-29", "2023-02-29"),
        ] {
            let follows = |text: &str| follows(grammars.json(&schema).unwrap(), &json!(text).to_string());
            assert_eq!(follows(good), Some(true), "{schema}");
            assert_eq!(follows(bad), None, "{schema}");
        }
        let nothing = json!({ "type": ["string", "null"], "format": "date" });
        assert_eq!(follows(grammars.json(&nothing).unwrap(), "null"), Some(true));
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
