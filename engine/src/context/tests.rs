//! What the context promises to a stage.

use super::*;
use crate::artifact::Output;
use crate::artifact::{ARTIFACT_FILE, description_file};
use crate::file::source::Span;
use crate::protocol::{InputGrant, PROTOCOL};

pub(crate) fn job(folder: &Path) -> Job {
    let private = Store::open(folder.join("store")).unwrap().staging().unwrap();
    let staging = private.path().to_owned();
    // The engine holds its lock until the job is over.
    std::mem::forget(private);
    Job {
        protocol: PROTOCOL,
        stage: "s".into(),
        kind: "test".into(),
        parameters: Value::Null,
        inputs: BTreeMap::new(),
        files: BTreeMap::new(),
        network: crate::protocol::Network::Online,
        pins: BTreeMap::new(),
        outputs: vec![Output::new("rows", "rows")],
        store: folder.join("store"),
        inputs_folder: staging.join("inputs"),
        staging,
        working: folder.join("working"),
        run_folder: folder.join("run"),
        profile: None,
        key: Digest::of(b"key"),
        threads: 1,
        devices: DeviceGrant::PROCESSOR,
    }
}

fn reference(stage: &str, output: Option<&str>) -> Reference {
    Reference { stage: stage.into(), output: output.map(Into::into), span: Span::default() }
}

#[test]
fn a_reference_stands_for_the_output_of_the_preferred_kind() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(folder.path());
    let grants = [
        ("base.model", "model"),
        ("base.tokenizer", "tokenizer"),
        ("base2.model", "model"),
        ("fit[lora.rank=4].adapter", "adapter"),
    ];
    for (name, kind) in grants {
        let grant = InputGrant { kind: kind.into(), tree: Digest::of(b"t"), identity: Digest::of(b"i"), facts: None };
        job.inputs.insert(name.into(), grant);
    }
    let context = StageContext::new(job, Voice::Silent).unwrap();
    let resolve = |stage, output, kinds: &[&str]| context.resolve(&reference(stage, output), kinds);
    assert_eq!(resolve("base", None, &["tokenizer"]).as_deref(), Some("base.tokenizer"));
    assert_eq!(resolve("base", None, &["adapter", "tokenizer", "model"]).as_deref(), Some("base.tokenizer"));
    assert_eq!(resolve("base", Some("model"), &["tokenizer", "model"]).as_deref(), Some("base.model"));
    assert_eq!(resolve("base", Some("model"), &["tokenizer"]), None);
    assert_eq!(resolve("fit[lora.rank=4]", None, &["adapter"]).as_deref(), Some("fit[lora.rank=4].adapter"));
    assert_eq!(resolve("bas", None, &["model"]), None);
}

#[test]
fn an_output_is_described_and_stored() {
    let folder = tempfile::tempdir().unwrap();
    let mut context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    assert_eq!(context.create("other").unwrap_err().cause, Cause::Internal);
    let draft = context.create("rows").unwrap();
    fs::write(draft.folder.join("part.txt"), "rows").unwrap();
    let mut facts = Facts::new();
    facts.insert("rows".into(), 1.into());
    context.seal(draft, facts.clone(), None).unwrap();
    context.record("backend", "none");
    let store = Store::open(folder.path().join("store")).unwrap();
    let outcome = context.finish().unwrap();
    let rows = &outcome.outputs["rows"];
    assert_eq!((outcome.how["backend"].as_str(), &rows.facts), (Some("none"), &facts));
    let read = folder.path().join("read");
    store.link_folder(&rows.tree, &read, Verify::Contents).unwrap();
    // What the program knows of it is in the record of the result, and not among its files.
    assert_eq!(fs::read_dir(&read).unwrap().count(), 1);
    // The description is no part of the identity: facts may be added without a change downstream.
    fs::create_dir(folder.path().join("plain")).unwrap();
    fs::write(folder.path().join("plain/part.txt"), "rows").unwrap();
    assert_eq!(Tree::of_folder(&folder.path().join("plain")).unwrap().identity(), rows.identity);
}

/// Stores files as the input `other.files` of a job.
fn granted(job: &mut Job, files: &[(&str, &str)], identity: Option<Digest>, facts: Option<Facts>) -> Digest {
    let store = Store::open(&job.store).unwrap();
    let staging = store.staging().unwrap();
    for (name, content) in files {
        fs::write(staging.path().join(name), content).unwrap();
    }
    let identity = identity.unwrap_or_else(|| Tree::of_folder(staging.path()).unwrap().identity());
    let tree = store.add_folder(staging.path()).unwrap();
    job.inputs.insert("other.files".into(), InputGrant { kind: "files".into(), tree, identity, facts });
    identity
}

fn opened(job: Job) -> (Artifact, Vec<String>) {
    struct Files;
    impl ArtifactKind for Files {
        const KINDS: &'static [&'static str] = &["files"];
    }
    let mut context = StageContext::new(job, Voice::Silent).unwrap();
    let artifact = context.open(&Input::<Files>::new(reference("other", None))).unwrap();
    let names = fs::read_dir(&artifact.folder).unwrap();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(Description::read_beside(&artifact.folder).unwrap(), artifact.description);
    assert!(description_file(&artifact.folder).starts_with(artifact.folder.parent().unwrap()));
    (artifact, names)
}

#[test]
fn a_users_file_with_the_name_of_the_description_is_a_file_like_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(folder.path());
    let facts: Facts = [("rows".to_owned(), 3.into())].into_iter().collect();
    // Even one that looks like a description: of something else.
    let looks = serde_json::to_string(&Description::new("files", Digest::of(b"other"), Facts::new())).unwrap();
    for content in ["mine", &looks] {
        let identity = granted(&mut job, &[("a", "1"), (ARTIFACT_FILE, content)], None, Some(facts.clone()));
        let (artifact, names) = opened(Job { inputs_folder: folder.path().join(identity.short()), ..job.clone() });
        assert_eq!(names, ["a", ARTIFACT_FILE]);
        assert_eq!(fs::read_to_string(artifact.folder.join(ARTIFACT_FILE)).unwrap(), content);
        assert_eq!(artifact.description, Description::new("files", identity, facts.clone()));
    }
}

#[test]
fn what_was_stored_together_with_its_description_is_opened_without_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("plain")).unwrap();
    fs::write(folder.path().join("plain/a"), "1").unwrap();
    let identity = Tree::of_folder(&folder.path().join("plain")).unwrap().identity();
    let facts: Facts = [("rows".to_owned(), 3.into())].into_iter().collect();
    let description = Description::new("files", identity, facts.clone());
    let text = serde_json::to_string_pretty(&description).unwrap();
    // As this version grants it, and as a job says that another version wrote.
    for granted_facts in [Some(facts), None] {
        let mut job = job(folder.path());
        granted(&mut job, &[("a", "1"), (ARTIFACT_FILE, &text)], Some(identity), granted_facts.clone());
        job.inputs_folder = folder.path().join(format!("inputs-{}", granted_facts.is_some()));
        let (artifact, names) = opened(job);
        assert_eq!((names, &artifact.description), (vec!["a".to_owned()], &description));
    }
}

#[test]
fn a_stage_that_makes_nothing_is_at_fault() {
    let folder = tempfile::tempdir().unwrap();
    let context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    let error = context.finish().unwrap_err();
    assert_eq!(error.to_string(), "stage kind `test` ended without making its output `rows`");
}

#[test]
fn a_changed_source_file_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("source.txt");
    fs::write(&path, "before").unwrap();
    let (digest, size) = Digest::of_file(&path).unwrap();
    let grant = FileGrant { path: path.clone(), relative: "source.txt".into(), digest, size, named: None };
    let context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    context.verify(&grant).unwrap();
    fs::write(&path, "behind").unwrap();
    assert_eq!(context.verify(&grant).unwrap_err().cause, Cause::ChangedWhileRunning);
    fs::remove_file(&path).unwrap();
    assert_eq!(context.verify(&grant).unwrap_err().cause, Cause::ChangedWhileRunning);
}

#[test]
fn the_last_progress_is_never_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let mut context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    let at = |done| WorkerEvent::Progress { unit: "rows".into(), done, total: Some(3), note: None };
    let dropped: Vec<bool> = (0..=3).map(|done| context.is_too_frequent(&at(done))).collect();
    assert_eq!(dropped, [false, true, true, false]);
    assert!(!context.is_too_frequent(&WorkerEvent::Checkpoint { step: 1 }));
}
