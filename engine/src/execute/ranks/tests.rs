//! Ranks are started with the right variables, heard, and stopped whatever becomes of one of them.

use std::path::Path;

use serde_json::json;

use super::*;
use crate::context::Voice;
use crate::context::tests::job;

fn shell(per_node: usize, script: &str) -> Ranks {
    Ranks {
        nodes: 1,
        per_node,
        command: ["sh", "-c", script].map(Into::into).to_vec(),
        env: [("GREETING".to_owned(), "hello".into())].into(),
        ..Ranks::default()
    }
}

/// Runs ranks to their end, with the notes of their progress.
fn attended(folder: &Path, ranks: &Ranks) -> (Result<(), StageError>, Vec<(usize, String)>) {
    let mut context = StageContext::new(job(folder), Voice::Silent).unwrap();
    let mut notes = Vec::new();
    let running = ranks.start().unwrap();
    let ended = running.attend(&mut context, &mut |rank, event, _| {
        if let WorkerEvent::Warning { message } = event {
            notes.push((rank, message));
        }
        Ok(())
    });
    notes.sort();
    (ended, notes)
}

#[test]
fn each_rank_knows_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"echo 'no word of the protocol'; echo "to the log" >&2
        printf '{"event":"warning","message":"%s"}\n' \
            "$GREETING $RANK $LOCAL_RANK $GROUP_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE at $MASTER_ADDR ${MASTER_PORT:+port}""#;
    let (ended, notes) = attended(folder.path(), &shell(2, script));
    ended.unwrap();
    let place = |rank: usize| (rank, format!("hello {rank} {rank} 0 of 2 2 at 127.0.0.1 port"));
    assert_eq!(notes, [place(0), place(1)]);
}

#[test]
fn the_rank_that_was_killed_is_named_and_the_others_are_stopped() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 0 notices the loss of its partner, says so, and would go on for ever.
    let script = r#"if [ $RANK = 1 ]; then echo "last words" >&2; kill -9 $$; fi
        echo '{"event":"failed","cause":"crashed","messages":["connection reset by peer"],"help":null,"object":null}'
        exec sleep 1000"#;
    let (ended, _) = attended(folder.path(), &shell(3, script));
    let error = ended.unwrap_err();
    assert!(error.message.starts_with("rank 1 of 3 (process "), "{error:?}");
    assert!(error.message.ends_with(") was killed (SIGKILL)"), "{error:?}");
    assert_eq!(error.cause, Cause::Crashed);
    assert_eq!(error.source.unwrap().to_string(), "its last output:\nlast words");
}

#[test]
fn a_rank_fails_in_its_own_words() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"echo '{"event":"failed","cause":"numeric","messages":["training stopped","the loss is NaN"],"help":"lower it","object":null}'
        exit 1"#;
    let error = attended(folder.path(), &shell(1, script)).0.unwrap_err();
    assert_eq!((error.cause, error.message.as_str()), (Cause::Numeric, "training stopped"));
    assert_eq!(
        (error.source.unwrap().to_string().as_str(), error.help.as_deref()),
        ("the loss is NaN", Some("lower it"))
    );
}

#[test]
fn an_end_without_a_word_is_explained_by_the_last_lines() {
    let folder = tempfile::tempdir().unwrap();
    let script = "echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; exit 3";
    let error = attended(folder.path(), &shell(1, script)).0.unwrap_err();
    assert_eq!((error.cause, error.message.as_str()), (Cause::DeviceOutOfMemory, "the worker ended with exit code 3"));
}

#[test]
fn silence_ends_them() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = Ranks { silence: Some(Duration::from_millis(200)), ..shell(2, "exec sleep 1000") };
    let error = attended(folder.path(), &ranks).0.unwrap_err();
    assert_eq!(error.message, "none of 2 ranks has sent a message for 0 s: stopped");
}

#[test]
fn where_the_stage_will_not_go_on_they_are_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    let script = r#"echo '{"event":"warning","message":"x"}'; exec sleep 1000"#;
    let running = shell(1, script).start().unwrap();
    let ended = running.attend(&mut context, &mut |_, _, _| Err(StageError::bad_data("enough")));
    assert_eq!(ended.unwrap_err().message, "enough");
}

#[test]
fn dropped_ranks_are_gone() {
    let running = shell(1, "exec sleep 1000").start().unwrap();
    let process = format!("/proc/{}", running.ranks[0].id());
    assert!(Path::new(&process).exists());
    drop(running);
    assert!(!Path::new(&process).exists());
}

#[test]
fn several_machines_need_a_cluster() {
    let error = Ranks { nodes: 2, ..shell(1, "true") }.start().unwrap_err();
    assert!(error.help.unwrap().contains("slurm"));
}

#[test]
fn rank_0_answers_requests_in_their_order_and_ends_with_its_input() {
    let folder = tempfile::tempdir().unwrap();
    let mut context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    let script = r#"[ $RANK = 0 ] || exit 0
        while read -r line; do
            echo "{\"event\":\"warning\",\"message\":\"$line\"}"; echo 'to the log'; printf "{\"answer\":[$line,$RANK],\"bytes\":3}\na\n$line"
        done"#;
    let mut running = Ranks { take_requests: true, ..shell(2, script) }.start().unwrap();
    let mut heard = Vec::new();
    let mut listen = |_: usize, event: WorkerEvent, _: &mut StageContext| {
        heard.push(event);
        Ok(())
    };
    // The second is sent before the first is answered.
    (1..3).for_each(|number| running.request(format!("{number}\n").into_bytes()));
    let answers = [(); 2].map(|()| running.answer(&mut context, &mut listen).unwrap());
    assert_eq!(answers.each_ref().map(|answer| &answer.value), [&json!([1, 0]), &json!([2, 0])]);
    assert_eq!(answers.map(|answer| answer.numbers), [b"a\n1", b"a\n2"]);
    running.check(&mut context, &mut listen).unwrap();
    running.end_requests();
    running.attend(&mut context, &mut listen).unwrap();
    assert_eq!(heard.len(), 2);
}

#[test]
fn who_waits_for_an_answer_hears_why_none_comes() {
    let folder = tempfile::tempdir().unwrap();
    let mut context = StageContext::new(job(folder.path()), Voice::Silent).unwrap();
    let answer = |script: &str, context: &mut StageContext| {
        let mut running = Ranks { take_requests: true, ..shell(2, script) }.start().unwrap();
        running.request(b"go\n".to_vec());
        running.answer(context, &mut |_, _, _| Ok(())).unwrap_err()
    };
    let killed = answer("read -r line; [ $RANK = 1 ] && kill -9 $$; exec sleep 1000", &mut context);
    assert!(killed.message.starts_with("rank 1 of 2 (process "), "{killed:?}");
    let ended = answer("exit 0", &mut context);
    assert_eq!((ended.cause, ended.message.as_str()), (Cause::Crashed, "the ranks ended before their work was done"));
    // Where nobody waits it is heard all the same.
    let mut running = Ranks { take_requests: true, ..shell(1, "kill -9 $$") }.start().unwrap();
    let error = loop {
        if let Err(error) = running.check(&mut context, &mut |_, _, _| Ok(())) {
            break error;
        }
    };
    assert!(error.message.ends_with("was killed (SIGKILL)"), "{error:?}");
}

/// A port that was free when the ranks were started could be another's before rank 0 listens.
#[test]
fn rank_0_takes_over_the_socket_at_which_they_meet() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"socket=$(readlink "/proc/self/fd/${PIPELINE_LISTENER:-none}" | cut -d: -f1)
        printf '{"event":"warning","message":"%s"}\n' "${socket:-none}""#;
    let listening = Ranks { take_requests: true, ..shell(2, script) };
    let (ended, notes) = attended(folder.path(), &listening);
    ended.unwrap();
    assert_eq!(notes, [(0, "socket".to_owned()), (1, "none".to_owned())]);
    for ranks in [shell(2, script), Ranks { take_requests: true, ..shell(1, script) }] {
        let (ended, notes) = attended(folder.path(), &ranks);
        ended.unwrap();
        assert!(notes.iter().all(|(_, said)| said == "none"), "{notes:?}");
    }
}
