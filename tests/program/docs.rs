//! The pages say what is so: those of the stage kinds have every parameter and none that is not there, pipeline files
//! are valid, and the commands of guides are taken.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use test_harness::test;

use crate::support::Project;

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

/// The fenced blocks of a page in a language.
fn blocks<'p>(page: &'p str, language: &str) -> Vec<&'p str> {
    let mut found = Vec::new();
    let mut rest = page;
    while let Some(begin) = rest.find(&format!("\n```{language}\n")) {
        rest = &rest[begin + language.len() + 5..];
        let end = rest.find("\n```").unwrap_or(rest.len());
        found.push(&rest[..end]);
        rest = &rest[end..];
    }
    found
}

/// The pages of a folder and below it.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The name that a whole pipeline file of a page goes by: `name: xsum` is `xsum.yaml`.
fn file_name(text: &str) -> String {
    let name = text.lines().find_map(|line| line.strip_prefix("name: "));
    let name = name.map(|name| name.split(" #").next().unwrap_or(name).trim());
    format!("{}.yaml", name.unwrap_or("pipeline"))
}

/// What is wrong with a file, but for sources, which a page does not bring.
fn problems(project: &Project, file: &str) -> Vec<String> {
    let checked = project.run(&["validate", "--format", "json", file]).json();
    let problems = checked[0]["problems"].as_array().unwrap().clone();
    let told = problems.iter().filter(|problem| problem["severity"] == "error" && problem["code"] != "file-missing");
    told.map(|problem| format!("line {}: {}", problem["line"], problem["message"])).collect()
}

#[test]
fn every_pipeline_file_of_a_page_is_valid() {
    let mut found = Vec::new();
    pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join("docs"), &mut found);
    // It shows wrong files, each beside a right one, and has a test of its own.
    found.retain(|path| !path.ends_with("problems.md"));
    let mut seen = 0;
    let mut wrong = Vec::new();
    for path in found {
        let page = fs::read_to_string(&path).unwrap();
        for text in blocks(&page, "yaml").into_iter().filter(|text| text.starts_with("version: 1")) {
            seen += 1;
            let project = Project::new();
            project.write("page.yaml", text);
            wrong.extend(problems(&project, "page.yaml").iter().map(|told| format!("{}: {told}", path.display())));
        }
    }
    assert!(seen >= 6, "{seen} files");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The words of a command without its comment, quotes taken off.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quote = None;
    for letter in command.chars() {
        match (quote, letter) {
            (None, '#') if words.last().is_some_and(String::is_empty) => break,
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), letter) if open == letter => quote = None,
            (None, letter) if letter.is_whitespace() => words.push(String::new()),
            (_, letter) => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// In the guides for those who come from elsewhere, whose commands are there to be copied.
#[test]
fn the_overrides_of_the_guides_are_taken() {
    for (guide, least) in [("from-torchtune.md", 1), ("from-ms-swift.md", 4)] {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(guide);
        let page = fs::read_to_string(&page).unwrap();
        let project = Project::new();
        for text in blocks(&page, "yaml") {
            project.write(&file_name(text), text);
        }
        let mut seen = 0;
        for command in blocks(&page, "sh").iter().flat_map(|block| block.split('\n')) {
            let Some(rest) = command.strip_prefix("pipeline run ") else { continue };
            seen += 1;
            // The graph of what `run` would do, by the same overrides.
            let rest = words(rest);
            let overrides = rest.iter().filter(|word| !word.starts_with('-') && word.contains('='));
            let arguments: Vec<&str> =
                ["graph", rest[0].as_str()].into_iter().chain(overrides.map(String::as_str)).collect();
            project.run(&arguments).ends_with(0);
        }
        assert!(seen >= least, "{guide}: {seen} commands");
    }
}

#[test]
fn no_comment_is_wider_than_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["benches", "cache", "devices", "engine", "model", "profile", "src", "stages", "tests"] {
        sources(&root.join(folder), &mut files);
    }
    assert!(files.len() > 500, "found only {} files", files.len());
    let mut wide = Vec::new();
    for file in files {
        for (number, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
            // What cannot be broken stays: a row of a table, an address, a text in back quotes.
            let comment = line.trim_start();
            let breakable = !comment.contains('|') && !comment.contains('`') && !comment.contains("://");
            if comment.starts_with("//") && breakable && line.chars().count() > 120 {
                wide.push(format!("{}:{}", file.display(), number + 1));
            }
        }
    }
    assert!(wide.is_empty(), "scripts/wrap-comments wraps these: {}", wide.join(", "));
}

/// Of a suite with a harness of its own the compiler drops what the standard attribute marks, and of any suite the
/// files that no `mod` names, and says nothing.
#[test]
fn no_test_of_a_suite_with_its_own_harness_is_left_out() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut seen = 0;
    let mut left_out = Vec::new();
    for package in [".", "cache", "devices", "engine", "model", "profile", "stages", "tests/harness"] {
        let package = root.join(package);
        let manifest = fs::read_to_string(package.join("Cargo.toml")).unwrap();
        for suite in manifest.split("[[test]]").skip(1).filter(|suite| suite.contains("harness = false")) {
            let (_, name) = suite.split_once("name = \"").unwrap();
            let suite = package.join("tests").join(name.split('"').next().unwrap());
            let mut files: Vec<PathBuf> =
                Some(suite.with_extension("rs")).filter(|file| file.exists()).into_iter().collect();
            if suite.is_dir() {
                sources(&suite, &mut files);
            }
            let mains = [suite.join("main.rs"), suite.with_extension("rs")];
            let main = mains.iter().find_map(|file| fs::read_to_string(file).ok()).unwrap();
            for file in files {
                let module = file.strip_prefix(&suite).unwrap_or(Path::new("")).with_extension("");
                let module = module.iter().next().map_or("main", |name| name.to_str().unwrap());
                if module != "main" && !main.contains(&format!("mod {module};\n")) {
                    left_out.push(format!("{} (no `mod`)", file.display()));
                }
                let text = fs::read_to_string(&file).unwrap();
                let tests = text.lines().filter(|line| line.starts_with("#[test")).count();
                let imports = text.lines().find(|line| line.starts_with("use test_harness::")).unwrap_or_default();
                let is_ours =
                    imports.split(|letter: char| !letter.is_alphanumeric() && letter != '_').any(|word| word == "test");
                seen += tests;
                if tests > 0 && !is_ours {
                    left_out.push(format!("{} (no `use test_harness::test`)", file.display()));
                }
            }
        }
    }
    assert!(seen > 150, "found only {seen} tests");
    assert!(left_out.is_empty(), "not run: {}", left_out.join(", "));
}

/// Names in backquotes that are places in this tree: `engine/src/keys.rs`, `engine/src/keys.rs::stage_key`,
/// `tests/golden/`.
fn places(page: &str) -> impl Iterator<Item = &str> {
    let tops = [
        "benches/",
        "cache/",
        "devices/",
        "docs/",
        "engine/",
        "fuzz/",
        "http-server/",
        "model/",
        "pipelines/",
        "profile/",
        "scripts/",
        "src/",
        "stages/",
        "tests/",
        "ui/",
        "workers/",
    ];
    let in_words = page.split('`').skip(1).step_by(2);
    // The map of the tree: a place is the first word of an indented line.
    let in_map = page.lines().filter_map(|line| line.strip_prefix("    ")?.split(' ').next());
    let is_place =
        move |word: &&str| tops.iter().any(|top| word.starts_with(top)) && !word.contains([' ', '<', '{', '*', '…']);
    in_words.chain(in_map).filter(is_place)
}

#[test]
fn the_maps_of_the_code_name_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut missing = Vec::new();
    let mut seen = 0;
    for page in ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/walk.md"] {
        let text = fs::read_to_string(root.join(page)).unwrap();
        for place in places(&text) {
            seen += 1;
            let (path, item) = place.split_once("::").unwrap_or((place, ""));
            let is_word = |text: String| {
                text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').any(|word| word == item)
            };
            let found =
                root.join(path).exists() && (item.is_empty() || fs::read_to_string(root.join(path)).is_ok_and(is_word));
            if !found {
                missing.push(format!("{page}: {place}"));
            }
        }
    }
    assert!(seen > 100, "found only {seen} places");
    assert!(missing.is_empty(), "not in the tree:\n{}", missing.join("\n"));
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}
