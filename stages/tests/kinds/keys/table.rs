//! The key documents of what is shipped, as text: `keys/documents.txt`.
//!
//! Results in people's stores are found by these keys. A change of this table makes them stale: either it is a mistake,
//! or the stage's `VERSION` is raised with the reason, and `PIPELINE_BLESS=1 cargo test --release --test kinds keys::`
//! writes the table anew. What stands for an input is its name, and files and pins of the outside are left out, so that
//! a line is about parameters alone.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use cache::{Digest, KeyDocument, differences};
use engine::keys::{StageOutside, stage_key};
use engine::plan::{Plan, PlannedStage};

use test_harness::test;

use super::*;

/// The document of a stage's key, each input's identity replaced by the input's name.
fn document(stage: &PlannedStage) -> KeyDocument {
    let mut names = BTreeMap::new();
    for input in &stage.inputs {
        let name = format!("<{}.{}>", input.stage, input.output);
        names.insert(Digest::of(name.as_bytes()).to_string(), name);
    }
    let identity = |input: &engine::plan::ResolvedInput| {
        Some(Digest::of(format!("<{}.{}>", input.stage, input.output).as_bytes()))
    };
    let mut document = stage_key(stage, &StageOutside::default(), identity).document;
    for entry in &mut document.entries {
        if let Some(name) = names.get(&entry.value) {
            entry.value.clone_from(name);
        }
    }
    document
}

fn write_plan(text: &mut String, title: &str, plan: &Plan) {
    for stage in &plan.stages {
        let document = document(stage);
        let (result, working) = (document.result_key().short(), document.working_key().short());
        writeln!(text, "\n## {title}: {} ({result}, {working})", stage.id).unwrap();
        for entry in document.entries {
            writeln!(text, "{} = {}", entry.path, entry.value).unwrap();
        }
    }
}

/// The pipeline files of the repository and of its pages.
fn shipped(folder: &Path) -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let names = |folder: &str, extension: &str| {
        let entries = fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path());
        let mut found: Vec<PathBuf> =
            entries.filter(|path| path.extension().is_some_and(|ending| ending == extension)).collect();
        found.sort();
        found
    };
    let mut found = Vec::new();
    for folder in ["pipelines", "pipelines/recipes"] {
        for path in names(folder, "yaml") {
            found.push((format!("{folder}/{}", path.file_name().unwrap().to_string_lossy()), path));
        }
    }
    // Each shows wrong files beside right ones, or includes files that it does not show.
    let of_pages = names("docs", "md").into_iter().filter(|path| !path.ends_with("problems.md"));
    for page in of_pages {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(&page).unwrap();
        let blocks = text.split("\n```yaml\n").skip(1).filter_map(|rest| rest.split("\n```").next());
        for (at, block) in blocks.filter(|block| block.starts_with("version: 1")).enumerate() {
            let path = folder.join(format!("{name}-{at}.yaml"));
            fs::write(&path, block).unwrap();
            found.push((format!("docs/{name} {}", at + 1), path));
        }
    }
    found
}

fn table() -> String {
    let mut text = String::from(
        "# Key documents of the pipelines that are shipped, then what each flip of `flips.txt` changes in the first stage that\n\
         # it is about. See `table.rs`; written by `PIPELINE_BLESS=1 cargo test --release --test kinds keys::`.\n",
    );
    let folder = tempfile::tempdir().unwrap();
    for (title, path) in shipped(folder.path()) {
        let plan = load(&path, &[], &registry());
        let plan = plan.unwrap_or_else(|rejected| panic!("{title}: {:?}", rejected.problems));
        write_plan(&mut text, &title, &plan);
    }
    let project = Project::new();
    let base = project.plan(&[]).unwrap();
    write_plan(&mut text, "stages/tests/keys/pipeline.yaml", &base);
    for flip in flips() {
        let target = flip.change[0].split('.').next().unwrap();
        let of = |plan: &Plan| plan.stages.iter().find(|stage| stage.id == target).map(document).unwrap();
        let after = of(&project.plan(&[flip.before.clone(), flip.change.clone()].concat()).unwrap());
        writeln!(text, "\n## flip {} | {} ({})", flip.field, flip.change.join("; "), after.result_key().short())
            .unwrap();
        for change in differences(&of(&base), &after) {
            let [old, new] = [change.old, change.new].map(|value| value.unwrap_or_else(|| "-".to_owned()));
            writeln!(text, "{}: {old} → {new}", change.path).unwrap();
        }
    }
    text
}

/// `download` reads some patterns otherwise than it did; what was fetched by others is found as it was.
#[test]
fn patterns_that_select_otherwise_are_in_the_key() {
    let project = Project::new();
    let entry = |field: &str, pattern: &str| {
        let plan = project.plan(&[format!("remote.{field}=['{pattern}']")]).unwrap();
        let remote = plan.stages.iter().find(|stage| stage.id == "remote").map(document).unwrap();
        remote.get("patterns").map(str::to_owned)
    };
    for field in ["include", "exclude"] {
        for pattern in ["*.bin", "original/*", "a?c", "a]", "/a"] {
            assert_eq!(entry(field, pattern), None, "{field}: {pattern}");
        }
        for pattern in ["original/", "a**h", "[ab]*", "a\\b"] {
            assert_eq!(entry(field, pattern).as_deref(), Some("of_the_hub"), "{field}: {pattern}");
        }
    }
}

#[test]
fn the_keys_of_what_is_shipped_are_those_of_the_table() {
    let (path, now) = (here("documents.txt"), table());
    if std::env::var_os("PIPELINE_BLESS").is_some() {
        fs::write(&path, &now).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap();
    let sections = |text: &str| -> BTreeMap<String, String> {
        let sections = text.split("\n## ").skip(1).filter_map(|section| section.split_once('\n'));
        // Its digests are in the title, so that it is found without them.
        let name = |title: &str| title.rsplit_once(" (").map_or(title, |(name, _)| name).to_owned();
        sections.map(|(title, lines)| (name(title), format!("{title}\n{lines}"))).collect()
    };
    let (old, new) = (sections(&committed), sections(&now));
    let mut wrong = Vec::new();
    for name in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
        match (old.get(name), new.get(name)) {
            (Some(old), Some(new)) if old == new => {}
            (Some(old), Some(new)) => {
                let gone = old.lines().filter(|line| !new.lines().any(|other| other == *line));
                let come = new.lines().filter(|line| !old.lines().any(|other| other == *line));
                let changes = gone.map(|line| format!("- {line}")).chain(come.map(|line| format!("+ {line}")));
                wrong.push(format!("{name}:\n  {}", changes.collect::<Vec<_>>().join("\n  ")));
            }
            (Some(_), None) => wrong.push(format!("{name}: gone")),
            (None, _) => wrong.push(format!("{name}: not in the table")),
        }
    }
    assert!(
        wrong.is_empty(),
        "results in stores would be stale, or the table lacks what is new:\n{}\nIf this is meant, raise the VERSION of the \
         kind where a key changed, and write the table anew by PIPELINE_BLESS=1",
        wrong.join("\n")
    );
}
