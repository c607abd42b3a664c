//! Which stages go stale when something changes: every field of every kind is given another value, in a pipeline of all
//! kinds.
//!
//! `keys/flips.txt` holds a flip for each field that a kind declares. A field without one fails the test, and so does
//! one without a class, which does not compile. Nothing runs: an output's identity is taken to be another one whenever
//! its stage's key is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cache::{Class, Digest, StatCache};
use engine::keys::{read_outside, stage_key};
use engine::lock_file::LockFile;
use engine::parameter::declared_fields;
use engine::plan::{Plan, load};
use stages::registry;
use test_harness::test;

mod table;

/// The keys of a stage: of its result, and of its working state.
type Keys = (Digest, Digest);

struct Project {
    folder: tempfile::TempDir,
}

struct Flip {
    field: String,
    before: Vec<String>,
    change: Vec<String>,
}

impl Project {
    fn new() -> Self {
        let project = Self { folder: tempfile::tempdir().unwrap() };
        let files = [
            ("text.jsonl", "{\"text\": \"a\"}\n"),
            ("rows.jsonl", "{\"question\": \"a\", \"answer\": \"b\"}\n"),
            ("other.jsonl", "{\"question\": \"c\", \"answer\": \"d\"}\n"),
            ("script.sh", "sort\n"),
            ("other.sh", "sort -r\n"),
            ("model/config.json", "{}"),
            ("model/tokenizer.json", "{}"),
            ("other_model/config.json", "{ }"),
        ];
        for (file, text) in files {
            project.write(file, text);
        }
        let pins = ["hub-model:owner/model", "hub-model:owner/other", "hub-dataset:owner/rows"];
        let pins = pins
            .iter()
            .flat_map(|name| [format!("\"{name}@main\": \"c1{:038}\"", 0), format!("\"{name}@v2\": \"c2{:038}\"", 0)]);
        let pins = pins.collect::<Vec<_>>().join(", ");
        project.write("pipeline.lock", &format!("{{ \"version\": 1, \"pins\": {{ {pins} }} }}"));
        fs::copy(here("pipeline.yaml"), project.path("pipeline.yaml")).unwrap();
        project
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    fn write(&self, file: &str, text: &str) {
        fs::create_dir_all(self.path(file).parent().unwrap()).unwrap();
        fs::write(self.path(file), text).unwrap();
    }

    fn plan(&self, overrides: &[String]) -> Result<Plan, String> {
        load(&self.path("pipeline.yaml"), overrides, &registry()).map_err(|rejected| {
            let messages = rejected.problems.into_iter().map(|problem| problem.message);
            messages.collect::<Vec<_>>().join("; ")
        })
    }

    fn keys(&self, plan: &Plan) -> BTreeMap<String, Keys> {
        let lock = LockFile::read(&self.path("pipeline.lock")).unwrap();
        let outside = read_outside(plan, &mut StatCache::default(), &lock).unwrap();
        let mut keys: BTreeMap<String, Keys> = BTreeMap::new();
        for (stage, outside) in plan.stages.iter().zip(&outside) {
            let identity =
                |stage: &str, output: &str| Some(Digest::of(format!("{} {output}", keys.get(stage)?.0).as_bytes()));
            let key = stage_key(stage, outside, |input| identity(&input.stage, &input.output));
            assert_eq!(key.unknown, 0, "`{}` has no key", stage.id);
            keys.insert(stage.id.clone(), (key.document.result_key(), key.document.working_key()));
        }
        keys
    }

    /// The stages whose results a change makes stale, and those whose working state it does.
    fn stale(&self, flip: &Flip) -> Result<(BTreeSet<String>, BTreeSet<String>), String> {
        let before = self.plan(&flip.before).map_err(|why| format!("before: {why}"))?;
        let after = self.plan(&[flip.before.clone(), flip.change.clone()].concat())?;
        let (before, after) = (self.keys(&before), self.keys(&after));
        let differing = |key: fn(&Keys) -> Digest| {
            before
                .iter()
                .filter(|(stage, keys)| key(keys) != key(&after[*stage]))
                .map(|(stage, _)| stage.clone())
                .collect()
        };
        Ok((differing(|keys| keys.0), differing(|keys| keys.1)))
    }
}

fn here(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/keys").join(file)
}

fn flips() -> Vec<Flip> {
    let text = fs::read_to_string(here("flips.txt")).unwrap();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let overrides = |text: &str| -> Vec<String> {
        text.split(';').map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned).collect()
    };
    let flip = |line: &str| {
        let (before, change) = line.split_once(" | ").unwrap();
        let (field, before) = before.split_once(' ').unwrap_or((before, ""));
        Flip { field: field.to_owned(), before: overrides(before), change: overrides(change) }
    };
    lines.map(flip).collect()
}

/// The fields that the kinds declare, as `kind.path`.
fn declared() -> BTreeMap<String, Class> {
    let registry = registry();
    let fields = registry.kinds().flat_map(|kind| {
        let name = kind.name;
        declared_fields(&(kind.schema)()).into_iter().map(move |field| (format!("{name}.{}", field.path), field.class))
    });
    fields.collect()
}

/// The stages that read a stage, directly or not.
fn dependents(plan: &Plan, stage: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::from([stage.to_owned()]);
    for reader in &plan.stages {
        if reader.inputs.iter().any(|input| found.contains(&input.stage)) {
            found.insert(reader.id.clone());
        }
    }
    found.remove(stage);
    found
}

#[test]
fn every_field_makes_stale_what_its_class_says() {
    let project = Project::new();
    let mut declared = declared();
    let mut wrong = Vec::new();
    for flip in flips() {
        let Some(class) = declared.remove(&flip.field) else {
            wrong.push(format!("{}: no kind has this field, or it has two flips", flip.field));
            continue;
        };
        let target = flip.change[0].split('.').next().unwrap().to_owned();
        let (results, working) = match project.stale(&flip) {
            Ok(stale) => stale,
            Err(why) => {
                wrong.push(format!("{}: {why}", flip.field));
                continue;
            }
        };
        let plans = [flip.before.clone(), [flip.before.clone(), flip.change.clone()].concat()];
        let readers: BTreeSet<String> =
            plans.iter().flat_map(|overrides| dependents(&project.plan(overrides).unwrap(), &target)).collect();
        let with_target = readers.iter().cloned().chain([target.clone()]).collect::<BTreeSet<_>>();
        let expected = match class {
            Class::Semantic => (with_target.clone(), with_target),
            Class::Resumable => (with_target, readers),
            Class::Cosmetic => (BTreeSet::new(), BTreeSet::new()),
        };
        if (&results, &working) != (&expected.0, &expected.1) {
            wrong.push(format!(
                "{} is {class:?}: results {results:?}, working {working:?}, expected {expected:?}",
                flip.field
            ));
        }
    }
    wrong.extend(declared.keys().map(|field| format!("{field} has no flip in `keys/flips.txt`")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn content_pins_and_versions_make_stale_what_reads_them() {
    let project = Project::new();
    let plan = project.plan(&[]).unwrap();
    let before = project.keys(&plan);
    let stale = |plan: &Plan| {
        let after = project.keys(plan);
        before
            .iter()
            .filter(|(stage, keys)| after[*stage] != **keys)
            .map(|(stage, _)| stage.clone())
            .collect::<BTreeSet<_>>()
    };
    let with_readers =
        |stage: &str| dependents(&plan, stage).into_iter().chain([stage.to_owned()]).collect::<BTreeSet<_>>();
    for (file, reader) in [
        ("rows.jsonl", "articles"),
        ("model/tokenizer.json", "base"),
        ("model/config.json", "base"),
        ("script.sh", "script"),
    ] {
        let text = fs::read_to_string(project.path(file)).unwrap();
        project.write(file, &format!("{text} "));
        assert_eq!(stale(&plan), with_readers(reader), "{file}");
        project.write(file, &text);
    }
    project.write("model/chat_template.jinja", "{{ messages }}");
    assert_eq!(stale(&plan), with_readers("base"), "a file more");
    fs::remove_file(project.path("model/chat_template.jinja")).unwrap();
    let lock = fs::read_to_string(project.path("pipeline.lock")).unwrap();
    for (pin, reader) in [("hub-model:owner/model", "remote"), ("hub-dataset:owner/rows", "hub_rows")] {
        project.write("pipeline.lock", &lock.replace(&format!("{pin}@main\": \"c1"), &format!("{pin}@main\": \"c9")));
        assert_eq!(stale(&plan), with_readers(reader), "{pin}");
    }
    project.write("pipeline.lock", &lock);
    for kind in registry().kinds() {
        let mut raised = project.plan(&[]).unwrap();
        let of_kind = raised.stages.iter_mut().filter(|stage| stage.kind == kind.name);
        let ids: Vec<String> = of_kind
            .map(|stage| {
                stage.version += 1;
                stage.id.clone()
            })
            .collect();
        let expected: BTreeSet<String> = ids.iter().flat_map(|id| with_readers(id)).collect();
        assert!(!ids.is_empty(), "the pipeline has no stage of kind {}", kind.name);
        assert_eq!(stale(&raised), expected, "{}", kind.name);
    }
}

/// What says how the work is done, and not what: in no key.
#[test]
fn the_frame_of_a_stage_is_in_no_key() {
    let project = Project::new();
    let before = project.keys(&project.plan(&[]).unwrap());
    for change in [
        "adapter.retries=3",
        "adapter.timeout=12h",
        "adapter.needs=[text]",
        "adapter.resources={threads: 1, memory: 1GiB, device: cpu}",
        "name=other",
        "publish={merged: ./out/model}",
    ] {
        assert_eq!(project.keys(&project.plan(&[change.to_owned()]).unwrap()), before, "{change}");
    }
    for (folder, moved) in [("model", "moved_model"), ("rows.jsonl", "moved.jsonl")] {
        fs::rename(project.path(folder), project.path(moved)).unwrap();
    }
    let moved = ["base.path=./moved_model".to_owned(), "articles.source=./moved.jsonl".to_owned()];
    assert_eq!(project.keys(&project.plan(&moved).unwrap()), before);
}
