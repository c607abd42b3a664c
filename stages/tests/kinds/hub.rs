//! The hub client against servers that go wrong: nothing counts that is not what the hub lists. What every hub has to
//! hold is tried on each of them; what is the Hugging Face Hub's alone comes last, and `modelscope.rs` has what is
//! ModelScope's.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use engine::error::{Cause, StageError};
use engine::protocol::Network;
use stages::hub::{Hub, HubError, Progress, Repository, RepositoryKind, Retry, Service, Token};
use test_harness::{child, test};

use crate::support::{COMMIT, Endless, Fault, FaultyHub, Tried, content, go_on};

const WEIGHTS: &str = "model.safetensors";

/// No file of any size lies in the folder of finished files.
fn nothing_finished(folder: &Path) -> bool {
    !folder.join("finished").join(WEIGHTS).exists()
}

#[test]
fn fetches_what_is_listed() {
    for tried in Tried::all() {
        let weights = content(300_000);
        let server = FaultyHub::serve(&[
            ("config.json", b"{}"),
            (WEIGHTS, &weights),
            ("sub/folder/more nötes?.txt", "nötes".as_bytes()),
            ("empty.txt", b""),
        ]);
        server.paginate(2);
        let hub = tried.client(&server);
        assert_eq!(hub.resolve_revision(&tried.repository(), tried.0.default_revision()).unwrap(), COMMIT);
        let files = hub.list_files(&tried.snapshot()).unwrap();
        let names: Vec<_> = files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(names, ["config.json", "empty.txt", WEIGHTS, "sub/folder/more nötes?.txt"]);

        let folder = tempfile::tempdir().unwrap();
        let mut last = None;
        let mut observe = |progress| {
            last = Some(progress);
            ControlFlow::Continue(())
        };
        let finished = hub.download(&tried.snapshot(), &files, folder.path(), &mut observe).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
        assert_eq!(fs::read(finished.join("config.json")).unwrap(), b"{}");
        assert_eq!(fs::read(finished.join("empty.txt")).unwrap(), b"");
        assert_eq!(fs::read(finished.join("sub/folder/more nötes?.txt")).unwrap(), "nötes".as_bytes());
        assert_eq!(last, Some(Progress { done: 300_008, total: 300_008 }));

        let before = server.requests().len();
        hub.download(&tried.snapshot(), &files, folder.path(), &mut go_on).unwrap();
        assert_eq!(server.requests().len(), before, "files that are there were fetched again");
    }
}

#[test]
fn a_cut_is_continued_where_it_happened() {
    for tried in Tried::all() {
        let weights = content(500_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::CutAfter(200_000), Fault::CutAfter(100_000)]);
        let folder = tempfile::tempdir().unwrap();
        let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
        let ranges: Vec<_> = server.requests_for(WEIGHTS).into_iter().map(|request| request.range).collect();
        assert_eq!(ranges, [None, Some("bytes=200000-".to_owned()), Some("bytes=300000-".to_owned())]);
    }
}

#[test]
fn a_server_without_ranges_is_read_from_the_start() {
    for tried in Tried::all() {
        let weights = content(400_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::CutAfter(150_000), Fault::WholeFile]);
        let folder = tempfile::tempdir().unwrap();
        let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
    }
}

#[test]
fn a_part_from_elsewhere_is_refused() {
    for tried in Tried::all() {
        let server = FaultyHub::serve(&[(WEIGHTS, &content(5_000))]);
        server.fail(WEIGHTS, &[Fault::WrongRange]);
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(tried.fetch(&tried.client(&server), folder.path()), Err(HubError::BadAnswer { .. })));
        assert!(nothing_finished(folder.path()));
    }
}

#[test]
fn a_flipped_byte_is_fetched_anew_once() {
    for tried in Tried::all() {
        let weights = content(100_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Flip]);
        let folder = tempfile::tempdir().unwrap();
        let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
        assert_eq!(server.requests_for(WEIGHTS).len(), 2);
    }
}

#[test]
fn a_file_that_stays_damaged_never_counts() {
    for tried in Tried::all() {
        for name in [WEIGHTS, "config.json"] {
            let server = FaultyHub::serve(&[(name, &content(100_000))]);
            server.fail(name, &[Fault::Flip, Fault::Flip, Fault::Flip]);
            let folder = tempfile::tempdir().unwrap();
            let failure = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
            assert!(matches!(&failure, HubError::Corrupt { path, .. } if path == name), "{failure}");
            assert!(!folder.path().join("finished").join(name).exists());
            assert!(!folder.path().join("unfinished").join(name).exists(), "damaged bytes would be continued");
        }
    }
}

#[test]
fn a_shorter_file_than_listed_never_counts() {
    for tried in Tried::all() {
        let server = FaultyHub::serve(&[(WEIGHTS, &content(100_000))]);
        server.fail(WEIGHTS, &vec![Fault::Short(40_000); 1]);
        server.fail(WEIGHTS, &vec![Fault::Short(0); 3]);
        let folder = tempfile::tempdir().unwrap();
        let failure = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
        assert!(matches!(failure, HubError::Cut { at: 40_000, size: 100_000, .. }), "{failure}");
        assert!(nothing_finished(folder.path()));
    }
}

/// The ranges that were asked for of the weights.
fn ranges(server: &FaultyHub) -> Vec<Option<String>> {
    server.requests_for(WEIGHTS).into_iter().map(|request| request.range).collect()
}

#[test]
fn a_file_that_is_shorter_than_listed_is_fetched_anew_once() {
    let rest = Some("bytes=40000-".to_owned());
    for tried in Tried::all() {
        // A server that refuses the rest, and one that sends what it has again.
        for faults in [vec![], vec![Fault::WholeFile; 20]] {
            let server = FaultyHub::serve(&[(WEIGHTS, &content(100_000))]);
            server.truncate(WEIGHTS, 40_000);
            server.fail(WEIGHTS, &faults);
            let folder = tempfile::tempdir().unwrap();
            let failure = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
            let said = failure.to_string();
            assert_eq!(said, format!("the server's file `{WEIGHTS}` has 40000 bytes where 100000 are listed"));
            assert_eq!(ranges(&server), [None, rest.clone(), None, rest.clone()]);
            assert!(nothing_finished(folder.path()));
            assert_eq!(failure.of(tried.0).cause, Cause::Network);
        }
    }
}

#[test]
fn small_files_that_are_shorter_than_listed_end_too() {
    for tried in Tried::all() {
        for length in [0, 10] {
            let server = FaultyHub::serve(&[("config.json", &[b' '; 50])]);
            server.truncate("config.json", length);
            let hub = tried.client(&server).impatient();
            let files = hub.list_files(&tried.snapshot()).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let failure = hub.download_into(&tried.snapshot(), &files, &folder.path().join("metadata")).unwrap_err();
            assert!(matches!(failure, HubError::Shorter { listed: 50, .. }), "{failure}");
            assert!(failure.to_string().contains(&format!("has {length} bytes where 50 are listed")), "{failure}");
        }
    }
}

#[test]
fn starts_from_the_first_byte_are_no_progress() {
    for tried in Tried::all() {
        let server = FaultyHub::serve(&[(WEIGHTS, &content(100_000))]);
        // It knows no ranges, and each answer ends before those that came further.
        let cuts = [50_000, 30_000, 40_000, 45_000].map(Fault::CutAfter);
        let refused = Fault::Status(416, None);
        let faults = cuts.into_iter().flat_map(|cut| [cut, refused.clone()]);
        server.fail(WEIGHTS, &faults.collect::<Vec<_>>());
        let folder = tempfile::tempdir().unwrap();
        let failure = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
        assert!(matches!(failure, HubError::Cut { at: 30_000, size: 100_000, .. }), "{failure}");
        assert_eq!(ranges(&server), [None, Some("bytes=50000-".to_owned()), None]);
        assert!(nothing_finished(folder.path()));
    }
}

#[test]
fn a_part_of_a_file_of_another_length_is_refused() {
    for tried in Tried::all() {
        let weights = content(100_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.truncate(WEIGHTS, 40_000);
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("unfinished")).unwrap();
        fs::write(folder.path().join("unfinished").join(WEIGHTS), &weights[..30_000]).unwrap();
        let failure = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
        assert!(matches!(failure, HubError::BadAnswer { .. }), "{failure}");
        let said = failure.to_string();
        assert!(said.ends_with("a part of a file of 40000 bytes where 100000 are listed"), "{said}");
    }
}

#[test]
fn a_variable_keeps_from_every_hub() {
    for tried in Tried::all() {
        let server = FaultyHub::serve(&[("config.json", b"{}")]);
        let folder = tempfile::tempdir().unwrap();
        let output = child("asks_the_hub_of_the_environment")
            .env("TEST_HUB", tried.0.prefix())
            .env("HF_HUB_OFFLINE", "1")
            .env("HF_HOME", folder.path())
            .env("HF_ENDPOINT", &server.endpoint)
            .env("MODELSCOPE_ENDPOINT", &server.endpoint)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("nothing may be fetched"), "{said}");
        let what = format!("lacks what revision `v1` of `{}` is", tried.repository().written());
        assert!(said.contains(&what), "{said}");
        assert!(server.requests().is_empty());
    }
}

#[child]
fn asks_the_hub_of_the_environment() {
    let prefix = std::env::var("TEST_HUB").unwrap();
    let tried = Tried::all().find(|tried| tried.0.prefix() == prefix).unwrap();
    let hub = Hub::from_environment(tried.0, None).unwrap();
    println!("{}", hub.resolve_revision(&tried.repository(), "v1").unwrap_err());
}

#[test]
fn an_error_body_is_never_taken_for_the_file() {
    for tried in Tried::all() {
        let weights = content(50_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Status(500, None), Fault::Status(503, None)]);
        let folder = tempfile::tempdir().unwrap();
        let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);

        server.fail(WEIGHTS, &[Fault::Status(500, None), Fault::Status(500, None), Fault::Status(500, None)]);
        let folder = tempfile::tempdir().unwrap();
        let failure = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
        assert!(matches!(failure, HubError::Status { status: 500, .. }), "{failure}");
        assert!(nothing_finished(folder.path()));
    }
}

#[test]
fn the_api_is_asked_again_after_a_hiccup() {
    for tried in Tried::all() {
        let server = FaultyHub::serve(&[("config.json", b"{}")]);
        server.fail_api(&[Fault::Status(502, None), Fault::Status(429, None)]);
        assert_eq!(
            tried.client(&server).resolve_revision(&tried.repository(), tried.0.default_revision()).unwrap(),
            COMMIT
        );
    }
}

#[test]
fn a_silent_server_counts_as_cut() {
    for tried in Tried::all() {
        let weights = content(10_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Silent(Duration::from_secs(20))]);
        let folder = tempfile::tempdir().unwrap();
        let begin = Instant::now();
        let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
        assert!(begin.elapsed() < Duration::from_secs(15));
    }
}

#[test]
fn a_stopped_download_keeps_what_it_has() {
    for tried in Tried::all() {
        let weights = content(400_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Slow(Duration::from_millis(10))]);
        let hub = tried.client(&server);
        let files = hub.list_files(&tried.snapshot()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut stop_soon = |progress: Progress| {
            if progress.done > 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let stopped = hub.download(&tried.snapshot(), &files, folder.path(), &mut stop_soon);
        assert!(matches!(stopped, Err(HubError::Stopped)));
        continues(tried, &server, &hub, folder.path(), &weights);
    }
}

#[test]
fn a_killed_download_is_continued_by_the_next_process() {
    for tried in Tried::all() {
        let weights = content(4_000_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Slow(Duration::from_millis(5))]);
        let folder = tempfile::tempdir().unwrap();
        let mut child = child("fetches_in_a_process_of_its_own")
            .env("TEST_HUB", tried.0.prefix())
            .env("TEST_ENDPOINT", &server.endpoint)
            .env("TEST_FOLDER", folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let unfinished = folder.path().join("unfinished").join(WEIGHTS);
        let begin = Instant::now();
        while fs::metadata(&unfinished).map_or(0, |file| file.len()) < 50_000 {
            assert!(begin.elapsed() < Duration::from_secs(60), "the child fetches nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(nothing_finished(folder.path()));
        continues(tried, &server, &tried.client(&server), folder.path(), &weights);
    }
}

#[child]
fn fetches_in_a_process_of_its_own() {
    let variable = |name: &str| std::env::var(name).unwrap();
    let tried = Tried::all().find(|tried| tried.0.prefix() == variable("TEST_HUB")).unwrap();
    let hub = Hub::new(&variable("TEST_ENDPOINT")).unwrap().of(tried.0);
    tried.fetch(&hub, Path::new(&variable("TEST_FOLDER"))).unwrap();
}

/// The next download asks for the missing part alone, and the whole is right.
fn continues(tried: Tried, server: &FaultyHub, hub: &Hub, folder: &Path, weights: &[u8]) {
    let kept = fs::metadata(folder.join("unfinished").join(WEIGHTS)).unwrap().len();
    assert!(kept > 0 && kept < weights.len() as u64, "{kept} bytes were kept");
    let finished = tried.fetch(hub, folder).unwrap();
    assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
    let last = server.requests_for(WEIGHTS).pop().unwrap();
    assert_eq!(last.range, Some(format!("bytes={kept}-")));
}

#[test]
fn a_partial_file_of_other_content_is_found_out() {
    for tried in Tried::all() {
        let weights = content(100_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        let folder = tempfile::tempdir().unwrap();
        for (left, requests) in [(vec![7; 30_000], 2), (vec![7; 100_000], 1), (vec![7; 200_000], 1)] {
            let _ = fs::remove_dir_all(folder.path().join("finished"));
            fs::create_dir_all(folder.path().join("unfinished")).unwrap();
            fs::write(folder.path().join("unfinished").join(WEIGHTS), left).unwrap();
            let before = server.requests_for(WEIGHTS).len();
            let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
            assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
            assert_eq!(server.requests_for(WEIGHTS).len() - before, requests);
        }
    }
}

#[test]
fn a_finished_file_that_changed_since_is_fetched_anew() {
    for tried in Tried::all() {
        let weights = content(10_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        let folder = tempfile::tempdir().unwrap();
        let finished = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        let mut damaged = weights.clone();
        damaged[5_000] ^= 1;
        fs::write(finished.join(WEIGHTS), damaged).unwrap();
        tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
    }
}

#[test]
fn a_server_that_is_not_there_is_named() {
    for tried in Tried::all() {
        // Nothing listens on the port that a listener has just given back.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let retry = Retry { attempts: 2, first_pause: Duration::from_millis(1), silence: Duration::from_secs(1) };
        let hub = Hub::new(&format!("http://127.0.0.1:{port}")).unwrap().of(tried.0).with_retry(retry);
        let error = hub.resolve_revision(&tried.repository(), tried.0.default_revision()).unwrap_err();
        assert_eq!(error.to_string(), format!("the Hub at http://127.0.0.1:{port} cannot be reached"));
        assert!(error.help().is_some_and(|help| help.contains("--offline")), "{:?}", error.help());
    }
}

#[test]
fn a_machine_without_a_network_is_not_kept_waiting() {
    for tried in Tried::all() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let retry = Retry { attempts: 8, first_pause: Duration::from_millis(100), silence: Duration::from_secs(1) };
        let hub = Hub::new(&format!("http://127.0.0.1:{port}")).unwrap().of(tried.0).with_retry(retry);
        let begin = std::time::Instant::now();
        hub.resolve_revision(&tried.repository(), tried.0.default_revision()).unwrap_err();
        // Three tries wait 0.3 s, eight 12.7 s.
        assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    }
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    for tried in Tried::all() {
        let weights = content(10_000);
        let store = FaultyHub::serve(&[("elsewhere", &weights)]);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Redirect(format!("{}/elsewhere?signature=abc", store.endpoint))]);
        let hub = tried.client(&server).with_token(Token::new("secret").unwrap());
        let folder = tempfile::tempdir().unwrap();
        let finished = tried.fetch(&hub, folder.path()).unwrap();
        assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
        assert!(server.requests().iter().all(|request| request.authorization.as_deref() == Some("Bearer secret")));
        let redirected = store.requests();
        assert_eq!(redirected.len(), 1);
        assert_eq!(redirected[0].authorization, None);
    }
}

#[test]
fn redirects_in_a_loop_are_an_error_at_once() {
    for tried in Tried::all() {
        let server = FaultyHub::serve(&[(WEIGHTS, &content(1_000))]);
        server.fail(WEIGHTS, &vec![Fault::Redirect(format!("{}/{WEIGHTS}", server.endpoint)); 50]);
        let folder = tempfile::tempdir().unwrap();
        let error = tried.fetch(&tried.client(&server), folder.path()).unwrap_err();
        assert!(matches!(error, HubError::Redirects { .. }), "{error}");
        assert!(error.to_string().contains("redirects in a loop"), "{error}");
        // The listing, the request and those that it leads to.
        assert!(server.requests().len() <= 13, "{}", server.requests().len());
        assert_eq!(error.of(tried.0).cause, Cause::Network);
    }
}

#[test]
fn an_address_that_is_none_is_shown_without_its_password() {
    for (address, shown) in [
        ("hps://h/a", "hps://h/a"),
        ("hps://u:sekret@h", "hps://…@h"),
        ("https://u:sek/ret@h:99", "https://…@h:99"),
        ("u:sekret@h", "…@h"),
    ] {
        let error = Hub::new(address).unwrap_err();
        assert_eq!(error.to_string(), format!("the Hub endpoint `{shown}` is not an http or https address"));
    }
}

#[test]
fn no_more_is_waited_for_than_is_listed() {
    for tried in Tried::all() {
        let weights = content(100_000);
        let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
        server.fail(WEIGHTS, &[Fault::Overstated]);
        let folder = tempfile::tempdir().unwrap();
        let begin = std::time::Instant::now();
        let fetched = tried.fetch(&tried.client(&server), folder.path()).unwrap();
        assert_eq!(fs::read(fetched.join(WEIGHTS)).unwrap(), weights);
        assert_eq!(server.requests_for(WEIGHTS).len(), 1);
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}

#[test]
fn a_full_commit_needs_no_request() {
    let tried = Tried(Service::HUGGING_FACE);
    let server = FaultyHub::serve(&[]);
    assert_eq!(tried.client(&server).resolve_revision(&tried.repository(), COMMIT).unwrap(), COMMIT);
    assert!(server.requests().is_empty());
}

#[test]
fn the_hub_cache_is_used_where_it_is_right() {
    let tried = Tried(Service::HUGGING_FACE);
    let (weights, config) = (content(20_000), b"{\"a\": 1}".to_vec());
    let server = FaultyHub::serve(&[(WEIGHTS, &weights), ("config.json", &config)]);
    let cache = tempfile::tempdir().unwrap();
    let cached = cache.path().join("models--owner--name/snapshots").join(COMMIT);
    fs::create_dir_all(&cached).unwrap();
    fs::write(cached.join(WEIGHTS), &weights).unwrap();
    // Of the right length, and not what the Hub lists.
    fs::write(cached.join("config.json"), b"{\"a\": 2}").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let finished = tried.fetch(&tried.client(&server).with_cache(cache.path().to_owned()), folder.path()).unwrap();
    assert_eq!(fs::read(finished.join(WEIGHTS)).unwrap(), weights);
    assert_eq!(fs::read(finished.join("config.json")).unwrap(), config);
    assert!(server.requests_for(WEIGHTS).is_empty());
    assert_eq!(server.requests_for("config.json").len(), 1);
    assert_eq!(fs::read(cached.join("config.json")).unwrap(), b"{\"a\": 2}", "the cache is others' property");
}

#[test]
fn offline_a_damaged_file_of_the_hub_cache_is_told_from_one_that_is_missing() {
    let tried = Tried(Service::HUGGING_FACE);
    let weights = content(20_000);
    let server = FaultyHub::serve(&[(WEIGHTS, &weights)]);
    let files = tried.client(&server).list_files(&tried.snapshot()).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let hub = tried.client(&server).with_cache(cache.path().to_owned()).with_network(Network::Offline);
    let fetch = || {
        let folder = tempfile::tempdir().unwrap();
        hub.download(&tried.snapshot(), &files, folder.path(), &mut go_on).map(drop)
    };
    let missing = fetch().unwrap_err();
    assert!(missing.to_string().contains("this machine lacks `model.safetensors`"), "{missing}");
    let cached = cache.path().join("models--owner--name/snapshots").join(COMMIT).join(WEIGHTS);
    fs::create_dir_all(cached.parent().unwrap()).unwrap();
    for damaged in [&weights[1..], &[7; 20_000]] {
        fs::write(&cached, damaged).unwrap();
        let error = fetch().unwrap_err();
        let (said, path) = (error.to_string(), cached.display());
        assert!(said.contains(&format!("`{path}` in the Hub cache is not the `{WEIGHTS}`")), "{said}");
        assert_eq!(error.of(tried.0).cause, Cause::Machine);
    }
    fs::write(&cached, &weights).unwrap();
    fetch().unwrap();
}

#[test]
fn refusals_say_what_to_do() {
    let tried = Tried(Service::HUGGING_FACE);
    let server = FaultyHub::serve(&[(WEIGHTS, b"x")]);
    let hub = tried.client(&server);
    let told = |error: HubError| {
        let failure = StageError::from(error);
        format!("{} / {}", failure.message, failure.help.unwrap_or_default())
    };
    let unknown = Repository::parse(RepositoryKind::Model, "owner/nmae").unwrap();
    let error = hub.resolve_revision(&unknown, "main").unwrap_err();
    assert!(matches!(error, HubError::RepositoryNotFound { .. }), "{error}");
    assert!(told(error).contains("no model `owner/nmae`"));

    let error = hub.resolve_revision(&tried.repository(), "mian").unwrap_err();
    assert_eq!(told(error), "`owner/name` has no revision `mian` / ");

    let mut files = hub.list_files(&tried.snapshot()).unwrap();
    files[0].path = "gone.safetensors".to_owned();
    let folder = tempfile::tempdir().unwrap();
    let error = hub.download(&tried.snapshot(), &files, folder.path(), &mut go_on).unwrap_err();
    assert!(told(error).starts_with(&format!("`owner/name` has no file `gone.safetensors` at commit {COMMIT}")));

    server.gate("GatedRepo");
    let said = told(hub.resolve_revision(&tried.repository(), "main").unwrap_err());
    assert!(said.contains("`owner/name` is gated"), "{said}");
    assert!(said.contains(&format!("accept the licence at {}/owner/name", server.endpoint)), "{said}");
    assert!(said.contains("HF_TOKEN"), "{said}");
    let with_token = hub.clone().with_token(Token::new("secret").unwrap());
    assert_eq!(with_token.resolve_revision(&tried.repository(), "main").unwrap(), COMMIT);

    let wrong = Hub::with_token(hub, Token::new("mistaken").unwrap());
    let error = wrong.resolve_revision(&tried.repository(), "main").unwrap_err();
    assert!(!format!("{error} {error:?} {wrong:?}").contains("mistaken"), "the token is shown");
}

#[test]
fn answers_without_an_end_are_refused() {
    let tried = Tried(Service::HUGGING_FACE);
    for (endless, problem) in [
        (Endless::Blanks, "an answer of more than 16 MiB"),
        (Endless::Circle, "lead back to one that was there"),
        (Endless::Pages, "it lists more than 200000 files"),
    ] {
        let server = FaultyHub::serve(&[]);
        server.never_end(endless);
        let begin = std::time::Instant::now();
        let error = tried.client(&server).list_files(&tried.snapshot()).unwrap_err();
        assert!(matches!(error, HubError::BadAnswer { .. }) && error.to_string().contains(problem), "{error}");
        assert!(begin.elapsed() < Duration::from_secs(10), "{endless:?}: {:?}", begin.elapsed());
    }
    let server = FaultyHub::serve(&[]);
    server.never_end(Endless::Headers);
    let begin = std::time::Instant::now();
    assert!(tried.client(&server).resolve_revision(&tried.repository(), "main").is_err());
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[test]
fn a_listed_name_that_climbs_is_refused() {
    let tried = Tried(Service::HUGGING_FACE);
    let server = FaultyHub::serve(&[]);
    let entry = serde_json::json!({"type": "file", "path": "../../escape", "oid": "0".repeat(40), "size": 1});
    server.list_besides(entry);
    assert!(matches!(tried.client(&server).list_files(&tried.snapshot()), Err(HubError::UnsafeName(_))));
}
