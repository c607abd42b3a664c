//! ModelScope, as a stand-in server answers: what is its own. What it has in common with every hub is in `hub.rs`.

use std::fs;

use engine::error::Cause;
use serde_json::json;
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
fn a_listing_has_all_entries_where_the_server_gives_fewer_at_once_than_are_asked_for() {
    let names: Vec<String> = (0..250).map(|number| format!("data/part-{number:04}.jsonl")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b"{}\n"[..])).collect();
    let server = FaultyHub::serve(&files);
    server.paginate(100);
    server.name_total();
    let snapshot = tried().repository_of(RepositoryKind::Dataset).at(COMMIT);
    let listed = tried().client(&server).list_files(&snapshot).unwrap();
    assert_eq!(listed.iter().map(|file| file.path.as_str()).collect::<Vec<_>>(), names);
    assert_eq!(server.requests().len(), 3);
}

#[test]
fn a_listing_that_ends_before_its_total_is_refused() {
    let entry = json!({"Path": "a.jsonl", "Type": "blob", "Size": 1, "Sha256": "0".repeat(64)});
    let snapshot = tried().repository_of(RepositoryKind::Dataset).at(COMMIT);
    for (entries, problem) in [
        (json!([entry]), "page 2 of its listing has entries that were there, after 1 of 3"),
        (json!([]), "page 1 of its listing has nothing, after 0 of 3"),
    ] {
        let server = FaultyHub::serve(&[]);
        server.list_instead(json!({"Code": 200, "Data": {"Files": entries, "TotalCount": 3}, "Success": true}));
        let error = tried().client(&server).list_files(&snapshot).unwrap_err();
        assert!(matches!(error, HubError::BadAnswer { .. }) && error.to_string().ends_with(problem), "{error}");
    }
}

#[test]
fn a_revision_that_lists_nothing_does_not_exist() {
    let folder = json!({"Path": "a-folder", "Type": "tree", "Size": 0});
    for files in [json!([]), json!([folder]), json!(null)] {
        for kind in [RepositoryKind::Model, RepositoryKind::Dataset] {
            let server = FaultyHub::serve(&[]);
            server.list_instead(json!({"Code": 200, "Data": {"Files": files}, "Success": true}));
            for revision in ["v9", COMMIT] {
                let pinned = tried().client(&server).pin(&tried().repository_of(kind), revision);
                let error = pinned.unwrap_err().of(service());
                assert_eq!(error.to_string(), format!("`modelscope:owner/name` has no revision `{revision}`"));
                assert_eq!(error.cause, Cause::BadParameters);
            }
        }
    }
}

#[test]
fn a_server_that_declines_is_told_in_its_words() {
    let long = "x".repeat(1000);
    for (code, message, told) in [
        (json!(10_010), json!("no permission\n\u{1b}[2J"), "no permission\\n\\x1b[2J".to_owned()),
        (json!(10_010), json!(long), format!("{} [...]", &long[..300])),
        (json!(10_010), json!(null), "code 10010, and no message".to_owned()),
        (json!(null), json!(""), "no message".to_owned()),
    ] {
        let server = FaultyHub::serve(&[]);
        server.list_instead(json!({"Code": code, "Message": message, "Success": false, "Data": null}));
        let error = tried().client(&server).resolve_revision(&tried().repository(), "master").unwrap_err();
        let failure = error.of(service());
        assert_eq!(failure.message, format!("the Hub refused the request for `modelscope:owner/name`: {told}"));
        assert_eq!(failure.cause, Cause::Network);
        assert!(failure.help.unwrap().contains("MODELSCOPE_API_TOKEN"));
    }
}

#[test]
fn a_server_that_declines_for_a_moment_is_asked_again() {
    for (code, tries) in [
        (json!(429), 3),
        (json!("503"), 3),
        (json!(403), 1),
        (json!(404), 1),
        (json!(10_010_205_001_u64), 1),
        (json!(null), 1),
    ] {
        let server = FaultyHub::serve(&[]);
        server.list_instead(json!({"Code": code, "Message": "busy", "Success": false, "Data": null}));
        let error = tried().client(&server).resolve_revision(&tried().repository(), "master").unwrap_err();
        assert_eq!(server.requests().len(), tries, "{code}");
        let failure = error.of(service());
        assert_eq!(failure.message, "the Hub refused the request for `modelscope:owner/name`: busy");
        assert_eq!(failure.help.unwrap().contains("run again later"), tries > 1, "{code}");
    }
}

#[test]
fn an_address_that_is_none_is_answered_with_that_of_this_service() {
    let help = Hub::new("ftp://x").unwrap_err().of(service()).help.unwrap();
    assert_eq!(help, "set MODELSCOPE_ENDPOINT to an address such as https://www.modelscope.cn");
    let of_hub = Hub::new("ftp://x").unwrap_err().of(Service::HUGGING_FACE).help.unwrap();
    assert_eq!(of_hub, "set HF_ENDPOINT to an address such as https://huggingface.co");
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
