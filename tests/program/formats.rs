//! What `pipeline validate` writes for other programs, over every broken file of `tests/diagnostics`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use test_harness::test;

use crate::support::{Project, Ran, program};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/diagnostics")
}

/// Checks all broken files at once.
fn validate(format: &str) -> Ran {
    let yaml = |below: &str| {
        let entries = fs::read_dir(folder().join(below)).unwrap();
        let names = entries.map(|entry| format!("{below}{}", entry.unwrap().file_name().to_string_lossy()));
        names.filter(|name| name.ends_with(".yaml")).collect::<Vec<_>>()
    };
    let mut files = [yaml(""), yaml("broken/")].concat();
    files.sort();
    let mut command = program(&folder());
    command.args(["validate", "--format", format]).args(&files).args(["no-such.yaml"]);
    let ran = Ran::of(command, &["validate", "--format", format]).ends_with(2);
    assert_eq!(ran.stderr, "");
    ran
}

fn problems(json: &Value) -> Vec<&Value> {
    json.as_array().unwrap().iter().flat_map(|file| file["problems"].as_array().unwrap()).collect()
}

#[test]
fn sarif_is_that_of_the_published_schema_and_holds_every_problem() {
    let log = validate("sarif").json();
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sarif/sarif-schema-2.1.0.json");
    let mut schema: Value = serde_json::from_slice(&fs::read(schema).unwrap()).unwrap();
    // The published pattern of languages has a bracket too many, which JavaScript lets pass and others do not; we write
    // none.
    for object in ["run", "toolComponent"] {
        schema["definitions"][object]["properties"]["language"].as_object_mut().unwrap().remove("pattern").unwrap();
    }
    let validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> =
        validator.iter_errors(&log).map(|error| format!("{}: {error}", error.instance_path())).collect();
    assert!(errors.is_empty(), "{errors:#?}");
    // The schema is one that says no, too.
    let mut wrong = log.clone();
    wrong["runs"][0]["results"][0]["level"] = "fatal".into();
    assert!(!validator.is_valid(&wrong));

    let json = validate("json").json();
    let problems = problems(&json);
    let results = log["runs"][0]["results"].as_array().unwrap();
    assert!(problems.len() > 150, "{}", problems.len());
    assert_eq!(results.len(), problems.len());
    let rules: Vec<&Value> =
        log["runs"][0]["tool"]["driver"]["rules"].as_array().unwrap().iter().map(|rule| &rule["id"]).collect();
    for (result, problem) in results.iter().zip(&problems) {
        assert_eq!((&result["ruleId"], &result["level"]), (&problem["code"], &problem["severity"]));
        assert!(rules.contains(&&result["ruleId"]), "{result}");
        let place = &result["locations"][0]["physicalLocation"];
        assert_eq!(place["artifactLocation"]["uri"], problem["file"]);
        assert!(place["region"].is_null() || place["region"]["startLine"] == problem["line"], "{result} {problem}");
    }
}

/// The columns of a place behind a letter that UTF-16 writes in two units.
#[test]
fn columns_are_counted_in_the_unit_of_each_format() {
    let project = Project::new();
    project.write("p.yaml", "version: 1\nname: \"😀\" \nstages: { \"😀\": { uses: datset } }\n");
    let json = project.run(&["validate", "--format", "json", "p.yaml"]).ends_with(2).json();
    let of = |code: &str| problems(&json).into_iter().find(|problem| problem["code"] == code).unwrap().clone();
    assert_eq!(of("unknown-kind")["column"], 24);
    let log = project.run(&["validate", "--format", "sarif", "p.yaml"]).ends_with(2).json();
    let results = log["runs"][0]["results"].as_array().unwrap();
    let kind = results.iter().find(|result| result["ruleId"] == "unknown-kind").unwrap();
    let region = &kind["locations"][0]["physicalLocation"]["region"];
    assert_eq!((&region["startColumn"], &region["endColumn"]), (&25.into(), &31.into()));
    assert_eq!(log["runs"][0]["columnKind"], "utf16CodeUnits");
    let github = project.run(&["validate", "--format", "github", "p.yaml"]).ends_with(2);
    let expected = "::error file=p.yaml,line=3,endLine=3,col=24,endColumn=30,title=unknown-kind::unknown stage kind `datset` (did you mean `dataset`?)";
    assert!(github.stdout.lines().any(|line| line == expected), "{github}");
}

#[test]
fn junit_has_a_suite_per_file_and_a_failure_per_error() {
    let json = validate("json").json();
    let xml = validate("junit").stdout;
    let errors = problems(&json).iter().filter(|problem| problem["severity"] == "error").count();
    let files = json.as_array().unwrap();
    assert_eq!(xml.matches("<testsuite ").count(), files.len());
    assert_eq!(xml.matches("<failure ").count(), errors);
    assert_eq!(xml.matches("name=\"valid\"").count(), files.iter().filter(|file| file["valid"] == true).count());
    assert!(xml.contains(&format!("failures=\"{errors}\" errors=\"0\">")), "{xml}");
}

#[test]
fn valid_files_give_empty_reports_and_no_failure() {
    let project = Project::new();
    project.write("rows.jsonl", "{\"text\": \"a\"}\n");
    project.write("p.yaml", "version: 1\nstages: { rows: { uses: dataset, with: { source: ./rows.jsonl } } }\n");
    let log = project.run(&["validate", "--format", "sarif", "p.yaml"]).ends_with(0).json();
    assert_eq!(log["runs"][0]["results"], Value::Array(Vec::new()));
    project
        .run(&["validate", "--format", "junit", "p.yaml"])
        .ends_with(0)
        .says("failures=\"0\"")
        .says("name=\"valid\"");
    let github = project.run(&["validate", "--format", "github", "p.yaml"]).ends_with(0);
    assert_eq!(github.stdout, "");
}
