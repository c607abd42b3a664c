//! The pages of the stage kinds say what the program reads: every parameter, and none that is not there.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;
use support::Project;

/// The paths of a schema's properties, nested ones with dots: `lora.rank`.
fn paths(schema: &Value, prefix: &str, found: &mut BTreeSet<String>) {
    for alternative in schema["anyOf"].as_array().into_iter().flatten() {
        paths(alternative, prefix, found);
    }
    for inner in ["items", "additionalProperties"] {
        if let Some(inner) = schema.get(inner).filter(|inner| inner.is_object()) {
            paths(inner, prefix, found);
        }
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{prefix}{name}");
        paths(property, &format!("{path}."), found);
        found.insert(path);
    }
}

/// The names in the first column of a page's table of parameters.
fn documented(page: &str) -> Vec<&str> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| parameter |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect()
}

/// The words that stand between backticks.
fn words_of_code(page: &str) -> impl Iterator<Item = &str> {
    let code = page.split('`').skip(1).step_by(2);
    code.flat_map(|code| code.split(|letter: char| !letter.is_alphanumeric() && letter != '_'))
}

#[test]
fn every_parameter_is_documented_and_nothing_else() {
    let schema = Project::new().run(&["schema"]).ends_with(0).json();
    let kinds = schema["$defs"]
        .as_object()
        .unwrap()
        .iter()
        .filter_map(|(name, definition)| Some((name.strip_suffix("_parameters")?.to_owned(), definition)));
    let mut wrong = Vec::new();
    let mut seen = 0;
    for (kind, definition) in kinds {
        seen += 1;
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("docs/stages/{kind}.md"));
        let page = fs::read_to_string(&page).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
        let mut known = BTreeSet::new();
        paths(definition, "", &mut known);
        let rows = documented(&page);
        for path in &known {
            let nested = || rows.iter().any(|row| row.starts_with(&format!("{path}.")));
            let last = path.rsplit('.').next().unwrap_or(path);
            // Options of one choice among several may stand in a table of their own.
            let mentioned = path.contains('.') && words_of_code(&page).any(|word| word == last);
            if !rows.contains(&path.as_str()) && !nested() && !mentioned {
                wrong.push(format!("docs/stages/{kind}.md lacks `{path}`"));
            }
        }
        let unknown = rows.iter().filter(|row| !known.contains(**row));
        wrong.extend(unknown.map(|row| format!("docs/stages/{kind}.md has `{row}`, which {kind} does not read")));
    }
    assert!(seen >= 9, "{seen} kinds");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
