//! The tables of parameters in `docs/stages/`, written from the schema, which the declarations give: names, types,
//! defaults, classes, and doc comments as the meaning.
//!
//! After a change of a declaration, `PIPELINE_BLESS=1 cargo test --release --test program parameters::` writes the
//! tables anew; what stands outside of their markers is written by hand.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value};
use test_harness::test;

use crate::support::Project;

const BEGIN: &str =
    "<!-- parameters: written by `PIPELINE_BLESS=1 cargo test --release --test program parameters::` -->\n";
const END: &str = "<!-- end of parameters -->";

/// What the classes of the table mean, in one sentence each.
const CLASSES: &str = "The [class](../cache.md#keys) of a parameter is the effect of changing it. *Semantic*: the stage \
    runs again. *Resumable*: it runs again and continues from its saved state. *Cosmetic*: the result and its cache key \
    stay.";

/// How the schema describes a path.
const A_PATH: &str = "A path relative to the pipeline file; its content is in the key.";

/// What a page says of one parameter.
struct Row {
    path: String,
    kind: String,
    default: String,
    class: String,
    meaning: String,
}

/// The value of a schema with a reference to a variable beside it: `or_reference` of the engine puts one there.
fn without_reference(schema: &Value) -> &Value {
    let Some(alternatives) = schema["anyOf"].as_array() else { return schema };
    match alternatives.iter().filter(|one| one.get("$ref").is_none()).collect::<Vec<_>>()[..] {
        [one] if alternatives.len() > 1 => one,
        _ => schema,
    }
}

/// The mapping that a value is or, beside other forms, can be.
fn mapping(schema: &Value) -> Option<&Map<String, Value>> {
    let own = schema["properties"].as_object().and_then(|_| schema.as_object());
    let alternatives = schema["anyOf"].as_array().into_iter().flatten();
    own.or_else(|| {
        alternatives.filter(|one| one.get("allOf").is_none_or(|_| one.get("type").is_some())).find_map(mapping)
    })
}

/// The inner mapping of a value: its own, of its items, or of its entries.
fn inner(schema: &Value) -> Option<&Map<String, Value>> {
    let alternatives = || schema["anyOf"].as_array().into_iter().flatten();
    mapping(schema)
        .or_else(|| ["items", "additionalProperties"].into_iter().find_map(|key| inner(schema.get(key)?)))
        .or_else(|| alternatives().find_map(inner))
}

/// The mappings that a value can be, where it has several forms.
fn mappings(schema: &Value) -> Vec<&Map<String, Value>> {
    let alternatives = schema["anyOf"].as_array().into_iter().flatten();
    let own = schema["properties"].as_object().and_then(|_| schema.as_object());
    own.into_iter().chain(alternatives.flat_map(mappings)).collect()
}

/// A variant of a tagged choice, and what holds for it.
type Variant<'s> = (&'s str, &'s Map<String, Value>);

fn rows(mapping: &Map<String, Value>, prefix: &str, around: &str, found: &mut Vec<Row>) {
    let conditions = mapping.get("allOf").and_then(Value::as_array).into_iter().flatten();
    let variants: Vec<Variant<'_>> = conditions
        .filter_map(|condition| {
            let name = condition["if"]["properties"].as_object()?.values().next()?["const"].as_str()?;
            Some((name, condition["then"].as_object()?))
        })
        .collect();
    for (name, property) in mapping["properties"].as_object().unwrap() {
        let path = format!("{prefix}{name}");
        let class = match property["x-class"].as_str().unwrap() {
            "semantic" => around,
            class => class,
        };
        let has = |(_, then): &&Variant<'_>| then["properties"].get(name).is_some_and(Value::is_object);
        let having: Vec<Variant<'_>> = variants.iter().filter(has).copied().collect();
        let mut meaning = meaning(property);
        if !having.is_empty() && having.len() < variants.len() && !meaning.starts_with('`') {
            let lacking: Vec<&str> = variants.iter().filter(|it| !has(it)).map(|(name, _)| *name).collect();
            let of = match lacking[..] {
                [one] if variants.len() > 3 => format!("all but `{one}`"),
                _ => quoted(having.iter().map(|(name, _)| *name)),
            };
            meaning = format!("({of}) {meaning}");
        }
        found.push(Row {
            path: path.clone(),
            kind: kind(property),
            default: default(name, property, mapping, &having),
            class: class.to_owned(),
            meaning,
        });
        if let Some(inner) = inner(property) {
            rows(inner, &format!("{path}."), class, found);
            for other in mappings(property).into_iter().filter(|other| !std::ptr::eq(*other, inner)) {
                let mut more = Vec::new();
                rows(other, &format!("{path}."), class, &mut more);
                more.retain(|row| found.iter().all(|known| known.path != row.path));
                found.extend(more);
            }
        }
    }
}

/// The default of a parameter, or those of the variants that have it.
fn default(name: &str, property: &Value, mapping: &Map<String, Value>, having: &[Variant<'_>]) -> String {
    let in_mapping = |property: &Value, mapping: &Map<String, Value>| {
        let required = mapping.get("required").and_then(Value::as_array);
        match property.get("default") {
            Some(default) => format!("`{}`", escaped(&value(default))),
            None if required.is_some_and(|names| names.iter().any(|other| other == name)) => "required".to_owned(),
            None => "none".to_owned(),
        }
    };
    let mut defaults: Vec<(String, Vec<&str>)> = Vec::new();
    for (variant, then) in having {
        let text = in_mapping(&then["properties"][name], then);
        match defaults.iter_mut().find(|(known, _)| *known == text) {
            Some((_, variants)) => variants.push(variant),
            None => defaults.push((text, vec![variant])),
        }
    }
    match &defaults[..] {
        [] => in_mapping(property, mapping),
        [(text, _)] => text.clone(),
        several => {
            let of = |(text, variants): &(String, Vec<&str>)| format!("{}: {text}", quoted(variants.iter().copied()));
            several.iter().map(of).collect::<Vec<_>>().join(", ")
        }
    }
}

/// A default as a pipeline file has it.
fn value(value: &Value) -> String {
    match value {
        Value::String(text) => size(text).unwrap_or_else(|| text.clone()),
        Value::Array(items) => format!("[{}]", items.iter().map(self::value).collect::<Vec<_>>().join(", ")),
        // As a person would write it: `16` and not `16.0`, `3e-4` and not `0.0003`.
        Value::Number(number) => {
            let small = number.as_f64().filter(|number| *number != 0.0 && number.abs() < 1e-3);
            let text = small.map_or_else(|| number.to_string(), |number| format!("{number:e}"));
            text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
        }
        other => other.to_string(),
    }
}

/// A number of bytes in the largest unit that gives a whole number.
fn size(text: &str) -> Option<String> {
    let bytes: u64 = text.strip_suffix('B')?.parse().ok()?;
    let units = [("GiB", 1 << 30), ("GB", 1_000_000_000), ("MiB", 1 << 20), ("MB", 1_000_000), ("KiB", 1 << 10)];
    let (unit, factor) = units.into_iter().find(|(_, factor)| bytes.is_multiple_of(*factor))?;
    Some(format!("{}{unit}", bytes / factor))
}

fn quoted<'s>(names: impl Iterator<Item = &'s str>) -> String {
    names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// The doc comment of the field, and of each name that it can have.
fn meaning(property: &Value) -> String {
    let Some(text) = property["description"].as_str() else { return String::new() };
    let mut paragraphs = text.split("\n\n");
    let own = paragraphs.next().unwrap_or_default();
    let names: Vec<&str> = names(property).collect();
    let is_of_name = |text: &&str| names.iter().any(|name| text.starts_with(&format!("`{name}`: ")));
    let of_variant = |text: &&str| text.starts_with('`') && own.starts_with('`');
    let rest = paragraphs.filter(|text| is_of_name(text) || of_variant(text));
    escaped(&std::iter::once(own).chain(rest).collect::<Vec<_>>().join(" "))
}

fn names(schema: &Value) -> impl Iterator<Item = &str> {
    let own = schema["enum"].as_array().into_iter().flatten();
    let inner =
        schema["anyOf"].as_array().into_iter().flatten().flat_map(|one| one["enum"].as_array().into_iter().flatten());
    own.chain(inner).filter_map(Value::as_str)
}

/// The key of a tagged choice that names the variant.
fn tag(schema: &Value) -> Option<&str> {
    let value = without_reference(schema);
    let forms = value["anyOf"].as_array()?;
    let choice = forms.iter().map(without_reference).find(|form| form["allOf"][0]["if"].is_object())?;
    choice["allOf"][0]["if"]["properties"].as_object()?.keys().next().map(String::as_str)
}

/// The type in the field's words, with the limits of a number.
fn kind(schema: &Value) -> String {
    let of_stage = schema["description"].as_str().and_then(|text| {
        let stage = text.rsplit("\n\n").next()?.strip_suffix(": `stage` or `stage.output`.")?;
        Some(stage.strip_prefix("A stage that makes ").map_or("any output".to_owned(), str::to_owned))
    });
    if let Some(kinds) = of_stage.filter(|_| schema["type"] == "string") {
        return kinds;
    }
    if schema["description"].as_str().is_some_and(|text| text.ends_with(A_PATH)) {
        return "path".to_owned();
    }
    if let Some(tag) = tag(schema) {
        return format!("mapping, or its `{tag}`");
    }
    if let Some(forms) = schema["anyOf"].as_array() {
        let mut kinds: Vec<String> = Vec::new();
        for form in forms.iter().filter(|form| form.get("$ref").is_none()) {
            let kind = kind(form);
            if !kind.is_empty() && !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        return kinds.join(", or ");
    }
    if schema.get("enum").is_some() {
        return quoted(names(schema));
    }
    // `{ collect: stage }`: the prose of sweeps has it.
    if schema.get("allOf").is_some() && schema.get("type").is_none() {
        return String::new();
    }
    match schema["type"].as_str() {
        Some("array") => match schema["maxItems"].as_u64().filter(|most| schema["minItems"].as_u64() == Some(*most)) {
            Some(count) => format!("list of {count} {}", plural(&kind(&schema["items"]))),
            None => format!("list of {}", plural(&kind(&schema["items"]))),
        },
        Some("object") if schema["additionalProperties"].is_object() => {
            format!("mapping of names to {}", plural(&kind(&schema["additionalProperties"])))
        }
        Some("object") => "mapping".to_owned(),
        Some(number @ ("integer" | "number")) => format!("{number}{}", limits(schema)),
        Some("string") => match schema["pattern"].as_str() {
            Some(pattern) if pattern.contains("KMGT") => "size, such as `40GiB`".to_owned(),
            Some(pattern) if pattern.contains("ms|s|m|h|d") => "duration, such as `90s`".to_owned(),
            _ => "string".to_owned(),
        },
        Some(other) => other.to_owned(),
        None if schema.get("pattern").is_some() => "string".to_owned(),
        None => "any value".to_owned(),
    }
}

fn plural(kind: &str) -> String {
    let words = ["string", "integer", "number", "boolean", "mapping", "path"];
    words.into_iter().fold(kind.to_owned(), |kind, word| kind.replace(word, &format!("{word}s")))
}

fn limits(schema: &Value) -> String {
    let of = |inclusive: &str, exclusive: &str| {
        let inclusive = schema.get(inclusive).map(|limit| (limit.to_string(), true));
        inclusive.or_else(|| schema.get(exclusive).map(|limit| (limit.to_string(), false)))
    };
    match (of("minimum", "exclusiveMinimum"), of("maximum", "exclusiveMaximum")) {
        (None, None) => String::new(),
        (Some((least, closed)), None) => format!(" {} {least}", if closed { "≥" } else { ">" }),
        (None, Some((most, closed))) => format!(" {} {most}", if closed { "≤" } else { "<" }),
        (Some((least, from)), Some((most, to))) => {
            format!(" in {}{least}, {most}{}", if from { '[' } else { '(' }, if to { ']' } else { ')' })
        }
    }
}

fn table(definition: &Value) -> String {
    let mut found = Vec::new();
    rows(inner(definition).unwrap(), "", "semantic", &mut found);
    let mut table = format!("{CLASSES}\n\n| parameter | type | default | class | meaning |\n|---|---|---|---|---|\n");
    for Row { path, kind, default, class, meaning } in found {
        writeln!(table, "| `{path}` | {kind} | {default} | {class} | {meaning} |").unwrap();
    }
    table
}

#[test]
fn the_tables_of_parameters_are_those_of_the_schema() {
    let schema = Project::new().run(&["schema"]).ends_with(0).json();
    let mut wrong = Vec::new();
    for (name, definition) in schema["$defs"].as_object().unwrap() {
        let Some(kind) = name.strip_suffix("_parameters") else { continue };
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/stages/{kind}.md"));
        let page = fs::read_to_string(&path).unwrap();
        let around = page.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?)));
        let (before, (found, after)) =
            around.unwrap_or_else(|| panic!("docs/stages/{kind}.md has no markers of its table"));
        let expected = table(definition);
        if std::env::var_os("PIPELINE_BLESS").is_some() {
            fs::write(&path, format!("{before}{BEGIN}{expected}{END}{after}")).unwrap();
        } else if found != expected {
            let differs = expected.lines().find(|line| !found.lines().any(|other| other == *line));
            wrong.push(format!("docs/stages/{kind}.md: {}", differs.unwrap_or("a row too many")));
        }
    }
    assert!(
        wrong.is_empty(),
        "tables are not those of the declarations, see the head of this file:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn every_parameter_has_a_meaning() {
    let schema = Project::new().run(&["schema"]).ends_with(0).json();
    let mut without = Vec::new();
    for (name, definition) in
        schema["$defs"].as_object().unwrap().iter().filter(|(name, _)| name.ends_with("_parameters"))
    {
        let mut found = Vec::new();
        rows(inner(definition).unwrap(), "", "semantic", &mut found);
        without.extend(found.iter().filter(|row| row.meaning.is_empty()).map(|row| format!("{name}: {}", row.path)));
    }
    assert!(without.is_empty(), "without a doc comment: {}", without.join(", "));
}
