//! Problems as SARIF 2.1.0, which code scanning reads (GitHub, GitLab, Azure DevOps, editors).

use std::collections::BTreeSet;
use std::path::{Component, Path};

use engine::file::codes::{self, ProblemCode};
use engine::file::problem::{Problem, Severity};
use engine::file::source::{ColumnUnit, Sources, Span};
use serde_json::{Value, json};

/// What SARIF calls the form that is written.
const VERSION: &str = "2.1.0";
const SCHEMA: &str = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json";

/// The problems of several files, each with the texts that they are in.
pub(crate) fn log<'a>(files: impl Iterator<Item = (&'a Sources, &'a [Problem])> + Clone) -> Value {
    let used: BTreeSet<&str> = files.clone().flat_map(|(_, problems)| problems).map(|problem| problem.code).collect();
    let rules: Vec<Value> = codes::all().filter(|code| used.contains(code.code)).map(rule).collect();
    let of_file =
        |(sources, problems): (&'a Sources, &'a [Problem])| problems.iter().map(move |it| result(sources, it));
    let results: Vec<Value> = files.flat_map(of_file).collect();
    json!({
        "$schema": SCHEMA,
        "version": VERSION,
        "runs": [{
            "tool": { "driver": { "name": "pipeline", "version": env!("CARGO_PKG_VERSION"), "rules": rules } },
            // What editors and GitHub count in; the place in a line with emoji depends on it.
            "columnKind": "utf16CodeUnits",
            "results": results,
        }],
    })
}

fn rule(code: &ProblemCode) -> Value {
    json!({
        "id": code.code,
        "shortDescription": { "text": code.title },
        "fullDescription": { "text": code.meaning },
        "help": { "text": code.advice },
        "defaultConfiguration": { "level": level(code.severity) },
    })
}

fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

fn result(sources: &Sources, problem: &Problem) -> Value {
    let help = problem.help.as_ref().map(|help| format!("\n{help}")).unwrap_or_default();
    let related = problem.related.iter().filter_map(|(span, label)| {
        let mut location = location(sources, *span)?;
        location["message"] = json!({ "text": label });
        Some(location)
    });
    json!({
        "ruleId": problem.code,
        "level": level(problem.severity),
        "message": { "text": format!("{}{help}", problem.message) },
        "locations": location(sources, problem.span).into_iter().collect::<Vec<_>>(),
        "relatedLocations": related.collect::<Vec<_>>(),
    })
}

/// A place; of a file that could not be read, the file alone.
fn location(sources: &Sources, span: Span) -> Option<Value> {
    let source = sources.get(span.source)?;
    let artifact = json!({ "uri": uri(Path::new(&source.name)) });
    if source.text.is_empty() && span.len == 0 {
        return Some(json!({ "physicalLocation": { "artifactLocation": artifact } }));
    }
    let (line, column) = sources.place(span, ColumnUnit::Utf16);
    let (end_line, end_column) = sources.place(Span { offset: span.end(), ..span }, ColumnUnit::Utf16);
    let region = json!({ "startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column });
    Some(json!({ "physicalLocation": { "artifactLocation": artifact, "region": region } }))
}

/// A path as a URI: relative where the path is, so that a reader finds the file in its own copy of the repository.
fn uri(path: &Path) -> String {
    let mut uri = String::new();
    for component in path.components() {
        match component {
            Component::RootDir => uri.push_str("file://"),
            Component::CurDir => continue,
            Component::ParentDir | Component::Normal(_) | Component::Prefix(_) => {}
        }
        if component == Component::RootDir {
            continue;
        }
        if !uri.is_empty() {
            uri.push('/');
        }
        for byte in component.as_os_str().as_encoded_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => uri.push(char::from(*byte)),
                _ => uri.push_str(&format!("%{byte:02X}")),
            }
        }
    }
    uri
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_becomes_a_uri() {
        for (path, expected) in [
            ("a.yaml", "a.yaml"),
            ("./jobs/a b.yaml", "jobs/a%20b.yaml"),
            ("../x/ä.yaml", "../x/%C3%A4.yaml"),
            ("/home/me/a.yaml", "file:///home/me/a.yaml"),
            ("c:d.yaml", "c%3Ad.yaml"),
        ] {
            assert_eq!(uri(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn columns_are_those_of_utf_16() {
        let mut sources = Sources::default();
        let source = sources.add("a.yaml", "name: \"😀ä\" # x\n");
        let span = Span { source, offset: "name: \"😀ä\" ".len(), len: 3 };
        let problem = Problem::error("wrong-type", span, "m", "l");
        let log = log(std::iter::once((&sources, std::slice::from_ref(&problem))));
        let region = &log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"];
        assert_eq!(region, &json!({ "startLine": 1, "startColumn": 13, "endLine": 1, "endColumn": 16 }));
    }
}
