//! ModelScope, as a stand-in server answers: nothing counts that is not what the service lists.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use engine::error::Cause;
use stages::hub::{Hub, HubError, Progress, Repository, RepositoryKind, Retry, Service, Snapshot, Token};
use support::{COMMIT, Fault, FaultyHub, content};

const WEIGHTS: &str = "model.safetensors";

fn repository(kind: RepositoryKind) -> Repository {
    Repository::parse(kind, "modelscope:owner/name").unwrap()
}

fn model() -> Snapshot {
    repository(RepositoryKind::Model).at(COMMIT)
}

fn client(server: &FaultyHub) -> Hub {
    let retry = Retry { attempts: 3, first_pause: Duration::from_millis(5), silence: Duration::from_millis(1500) };
    Hub::new(&server.endpoint).unwrap().of(Service::ModelScope).with_retry(retry)
}

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn fetch(hub: &Hub, snapshot: &Snapshot, folder: &Path) -> Result<PathBuf, HubError> {
    let files = hub.list_files(snapshot)?;
    hub.download(snapshot, &files, folder, &mut go_on)
}

#[test]
fn a_revision_is_pinned_to_its_commit_and_files_are_fetched_at_it() {
    let weights = content(40_000);
    let server = FaultyHub::serve(&[("config.json", b"{}"), ("a folder/b+c.txt", b"x"), (WEIGHTS, &weights)]);
    let hub = client(&server).with_token(Token::new("secret").unwrap());
    assert_eq!(hub.resolve_revision(&repository(RepositoryKind::Model), "master").unwrap(), COMMIT);
    let folder = tempfile::tempdir().unwrap();
    let fetched = fetch(&hub, &model(), folder.path()).unwrap();
    assert_eq!(fs::read(fetched.join(WEIGHTS)).unwrap(), weights);
    assert_eq!(fs::read(fetched.join("a folder/b+c.txt")).unwrap(), b"x");
    for request in server.requests() {
        assert!(request.target.contains(COMMIT) || request.target.contains("Revision=master"), "{}", request.target);
        assert_eq!(request.authorization.as_deref(), Some("Bearer secret"));
        assert_eq!(request.cookie.as_deref(), Some("m_session_id=secret"));
    }
    let unknown = hub.resolve_revision(&repository(RepositoryKind::Model), "v9");
    assert!(matches!(unknown, Err(HubError::RevisionNotFound { .. })), "{unknown:?}");
    let other = Repository::parse(RepositoryKind::Model, "modelscope:owner/other").unwrap();
    let error = hub.resolve_revision(&other, "master").unwrap_err().of(Service::ModelScope);
    assert_eq!(error.cause, Cause::BadParameters);
    assert!(error.to_string().contains("`modelscope:owner/other`"), "{error}");
}

#[test]
fn without_a_commit_the_listing_is_pinned_and_other_files_are_refused() {
    let server = FaultyHub::serve(&[("config.json", b"{}"), (WEIGHTS, b"weights")]);
    server.hide_commit();
    let hub = client(&server);
    let pin = hub.resolve_revision(&repository(RepositoryKind::Model), "master").unwrap();
    assert!(pin.starts_with("master@sha256:"), "{pin}");
    let folder = tempfile::tempdir().unwrap();
    let snapshot = repository(RepositoryKind::Model).at(&pin);
    fetch(&hub, &snapshot, folder.path()).unwrap();
    server.put(WEIGHTS, b"changed");
    let moved = fetch(&hub, &snapshot, folder.path());
    assert!(matches!(moved, Err(HubError::Moved { .. })), "{moved:?}");
}

#[test]
fn a_dataset_is_listed_in_pages() {
    let names: Vec<String> = (0..450).map(|number| format!("data/part-{number:04}.jsonl")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"{\"text\": \"x\"}\n"[..])).collect();
    let server = FaultyHub::serve(&files);
    let snapshot = repository(RepositoryKind::Dataset).at(COMMIT);
    let listed = client(&server).list_files(&snapshot).unwrap();
    assert_eq!(listed.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), names);
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn cuts_are_continued_and_what_is_damaged_does_not_count() {
    let weights = content(60_000);
    let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
    let hub = client(&server);
    for faults in [
        vec![Fault::CutAfter(20_000), Fault::Status(503, None), Fault::CutAfter(1)],
        vec![Fault::CutAfter(20_000), Fault::WholeFile],
        vec![Fault::Flip],
        vec![Fault::Short(100)],
        vec![Fault::CutAfter(9), Fault::WrongRange],
    ] {
        let wrong_range = faults.iter().any(|fault| matches!(fault, Fault::WrongRange));
        server.fail(WEIGHTS, &faults);
        let folder = tempfile::tempdir().unwrap();
        match fetch(&hub, &model(), folder.path()) {
            Ok(fetched) => assert_eq!(fs::read(fetched.join(WEIGHTS)).unwrap(), weights, "{faults:?}"),
            Err(error) => assert!(wrong_range, "{faults:?}: {error}"),
        }
    }
    server.fail(WEIGHTS, &[Fault::Flip, Fault::Flip]);
    let folder = tempfile::tempdir().unwrap();
    let damaged = fetch(&hub, &model(), folder.path());
    assert!(matches!(damaged, Err(HubError::Corrupt { .. })), "{damaged:?}");
    assert!(!folder.path().join("finished").join(WEIGHTS).exists());
}

#[test]
fn names_that_climb_and_files_without_a_checksum_are_refused() {
    for (entry, climbs) in [
        (serde_json::json!({"Path": "../x", "Type": "blob", "Size": 1, "Sha256": "0".repeat(64)}), true),
        (serde_json::json!({"Path": "x", "Type": "blob", "Size": 1, "Sha256": ""}), false),
        (serde_json::json!({"Path": "x", "Type": "blob", "Size": 1}), false),
    ] {
        let server = FaultyHub::serve(&[("config.json", b"{}")]);
        server.list_besides(entry);
        match client(&server).list_files(&model()) {
            Err(HubError::UnsafeName(_)) => assert!(climbs),
            Err(HubError::BadAnswer { .. }) => assert!(!climbs),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_refusal_names_the_variables_of_this_service() {
    let server = FaultyHub::serve(&[("config.json", b"{}")]);
    server.gate("GatedRepo");
    let refused = client(&server).resolve_revision(&repository(RepositoryKind::Model), "master").unwrap_err();
    let failure = refused.of(Service::ModelScope);
    assert!(failure.help.as_deref().unwrap().contains("MODELSCOPE_API_TOKEN"), "{failure:?}");
    let nobody = Hub::new("http://127.0.0.1:9").unwrap().of(Service::ModelScope);
    let nobody = nobody.with_retry(Retry { attempts: 1, ..Retry::default() });
    let failure = nobody.resolve_revision(&repository(RepositoryKind::Model), "master").unwrap_err();
    let help = failure.of(Service::ModelScope).help.unwrap();
    assert!(help.contains("MODELSCOPE_ENDPOINT") && !help.contains("HF_"), "{help}");
}
