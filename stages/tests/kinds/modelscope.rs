//! ModelScope, as a stand-in server answers: what is its own. What it has in common with every hub is in `hub.rs`.

use std::fs;

use engine::error::Cause;
use stages::hub::{Hub, HubError, Repository, RepositoryKind, Retry, Service, Token};
use test_harness::test;

use crate::support::{COMMIT, FaultyHub, Tried, content};

const WEIGHTS: &str = "model.safetensors";

fn tried() -> Tried {
    Tried::all().find(|tried| tried.0.prefix() == "modelscope:").unwrap()
}

fn service() -> Service {
    tried().0
}

#[test]
fn a_revision_is_pinned_to_its_commit_and_files_are_fetched_at_it() {
    let weights = content(40_000);
    let server = FaultyHub::serve(&[("config.json", b"{}"), ("a folder/b+c.txt", b"x"), (WEIGHTS, &weights)]);
    let hub = tried().client(&server).with_token(Token::new("secret").unwrap());
    assert_eq!(hub.resolve_revision(&tried().repository(), "master").unwrap(), COMMIT);
    let folder = tempfile::tempdir().unwrap();
    let fetched = tried().fetch(&hub, folder.path()).unwrap();
    assert_eq!(fs::read(fetched.join(WEIGHTS)).unwrap(), weights);
    assert_eq!(fs::read(fetched.join("a folder/b+c.txt")).unwrap(), b"x");
    for request in server.requests() {
        assert!(request.target.contains(COMMIT) || request.target.contains("Revision=master"), "{}", request.target);
        assert_eq!(request.authorization.as_deref(), Some("Bearer secret"));
        assert_eq!(request.cookie.as_deref(), Some("m_session_id=secret"));
    }
    let unknown = hub.resolve_revision(&tried().repository(), "v9");
    assert!(matches!(unknown, Err(HubError::RevisionNotFound { .. })), "{unknown:?}");
    let other = Repository::parse(RepositoryKind::Model, "modelscope:owner/other").unwrap();
    let error = hub.resolve_revision(&other, "master").unwrap_err().of(service());
    assert_eq!(error.cause, Cause::BadParameters);
    assert!(error.to_string().contains("`modelscope:owner/other`"), "{error}");
}

#[test]
fn without_a_commit_the_listing_is_pinned_and_other_files_are_refused() {
    let server = FaultyHub::serve(&[("config.json", b"{}"), (WEIGHTS, b"weights")]);
    server.hide_commit();
    let hub = tried().client(&server);
    let pin = hub.resolve_revision(&tried().repository(), "master").unwrap();
    assert!(pin.starts_with("master@sha256:"), "{pin}");
    let folder = tempfile::tempdir().unwrap();
    let snapshot = tried().repository().at(&pin);
    tried().fetch_at(&hub, &snapshot, folder.path()).unwrap();
    server.put(WEIGHTS, b"changed");
    let moved = tried().fetch_at(&hub, &snapshot, folder.path());
    assert!(matches!(moved, Err(HubError::Moved { .. })), "{moved:?}");
}

#[test]
fn a_dataset_is_listed_in_pages() {
    let names: Vec<String> = (0..450).map(|number| format!("data/part-{number:04}.jsonl")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"{\"text\": \"x\"}\n"[..])).collect();
    let server = FaultyHub::serve(&files);
    let snapshot = tried().repository_of(RepositoryKind::Dataset).at(COMMIT);
    let listed = tried().client(&server).list_files(&snapshot).unwrap();
    assert_eq!(listed.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), names);
    assert_eq!(server.requests().len(), 3);
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
        match tried().client(&server).list_files(&tried().snapshot()) {
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
    let refused = tried().client(&server).resolve_revision(&tried().repository(), "master").unwrap_err();
    let failure = refused.of(service());
    assert!(failure.help.as_deref().unwrap().contains("MODELSCOPE_API_TOKEN"), "{failure:?}");
    let nobody = Hub::new("http://127.0.0.1:9").unwrap().of(service());
    let nobody = nobody.with_retry(Retry { attempts: 1, ..Retry::default() });
    let failure = nobody.resolve_revision(&tried().repository(), "master").unwrap_err();
    let help = failure.of(service()).help.unwrap();
    assert!(help.contains("MODELSCOPE_ENDPOINT") && !help.contains("HF_"), "{help}");
}
