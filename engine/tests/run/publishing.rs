//! Copies outside the store.

use std::fs;

use engine::publish::OnChanged;
use engine::run::{Conclusion, RunEvent};

use crate::project::{Project, Ran};

pub const TESTS: &[(&str, fn())] = &[
    ("a_published_folder_follows_its_result", a_published_folder_follows_its_result),
    ("a_folder_that_somebody_changed_is_left_alone", a_folder_that_somebody_changed_is_left_alone),
    ("a_foreign_folder_is_left_alone", a_foreign_folder_is_left_alone),
];

const PUBLISHED: &str = "
stages:
  a: { uses: constant, with: { value: 4 } }
publish: { a: ./out/number }
";

fn written(ran: &Ran) -> Option<bool> {
    ran.events.iter().find_map(|event| match event {
        RunEvent::Published { written, .. } => Some(*written),
        _ => None,
    })
}

fn a_published_folder_follows_its_result() {
    let project = Project::new(PUBLISHED);
    assert_eq!(written(&project.run().succeeded()), Some(true));
    let file = project.path("out/number/number.txt");
    assert_eq!(fs::read_to_string(&file).unwrap(), "4");
    assert_eq!(written(&project.run().succeeded()), Some(false));
    // A copy with other times (a checkout, a restored backup) is still the same folder.
    fs::File::options().write(true).open(&file).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(false));
    project.write(&PUBLISHED.replace("value: 4", "value: 5"));
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert_eq!(fs::read_to_string(&file).unwrap(), "5");
    let left: Vec<_> = fs::read_dir(project.path("out")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["number"]);
    // What a process leaves that is killed before it has removed the old folder.
    fs::create_dir(project.path("out/.number.pipeline-new")).unwrap();
    fs::write(project.path("out/.number.pipeline-new/number.txt"), "4").unwrap();
    assert_eq!(written(&project.run().succeeded()), Some(false));
    assert!(!project.path("out/.number.pipeline-new").exists());
    // The copy is the user's: writable, and no link into the store.
    fs::write(&file, "6").unwrap();
    assert_eq!(project.store().verify(&|_| {}).unwrap().faults, []);
}

fn a_folder_that_somebody_changed_is_left_alone() {
    let mut project = Project::new(PUBLISHED);
    project.run().succeeded();
    let notes = project.path("out/number/notes.txt");
    fs::write(&notes, "mine").unwrap();
    let ran = project.run();
    assert_eq!(ran.outcome.conclusion, Conclusion::Failed);
    let Some(RunEvent::PublishFailed { messages, help, .. }) =
        ran.events.iter().find(|event| matches!(event, RunEvent::PublishFailed { .. }))
    else {
        panic!("{:#?}", ran.events)
    };
    assert!(messages[0].ends_with("was changed since it was published: `notes.txt` was added"), "{messages:?}");
    assert!(help.as_deref().unwrap().contains("--overwrite"));
    assert_eq!(fs::read_to_string(&notes).unwrap(), "mine");
    project.options.on_changed_target = OnChanged::Overwrite;
    assert_eq!(written(&project.run().succeeded()), Some(true));
    assert!(!notes.exists());
}

fn a_foreign_folder_is_left_alone() {
    let project = Project::new(PUBLISHED);
    fs::create_dir_all(project.path("out/number")).unwrap();
    // An empty folder is nobody's.
    project.run().succeeded();
    fs::remove_file(project.path("out/number/.pipeline-published.json")).unwrap();
    assert_eq!(project.run().outcome.conclusion, Conclusion::Failed);
    assert!(project.path("out/number/number.txt").exists());
}
