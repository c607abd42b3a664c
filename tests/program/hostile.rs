//! Templates and filters that ask for the memory and the time of the machine: refused at a limit, by `validate` and by
//! `run`.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use test_harness::test;

use crate::support::Project;

/// How the program ended, what it said, the most memory it took in bytes, and how long.
struct Ended {
    code: Option<i32>,
    said: String,
    peak: u64,
    took: Duration,
}

fn ended(project: &Project, arguments: &[&str]) -> Ended {
    let log = project.path("said.log");
    let begin = Instant::now();
    let mut command = project.command(arguments);
    let mut child = command.stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let mut peak = 0;
    let code = loop {
        for (process, _) in project.processes().into_iter().chain([(child.id() as i32, String::new())]) {
            let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
            peak = peak.max(kilobytes.unwrap_or(0) << 10);
        }
        if let Some(status) = child.try_wait().unwrap() {
            break status.code();
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{arguments:?} does not end");
        std::thread::sleep(Duration::from_millis(5));
    };
    Ended { code, said: fs::read_to_string(log).unwrap(), peak, took: begin.elapsed() }
}

/// A pipeline whose rows are made, or chosen, in this way.
fn project(key: &str, text: &str) -> Project {
    let project = Project::new();
    project.write("rows.jsonl", "{\"text\": \"hello, world of long lines\"}\n{\"text\": \"and\\nmore\"}\n");
    let with = match key {
        "map" => serde_json::json!({"source": "./rows.jsonl", "map": {"text": text}}),
        _ => serde_json::json!({"source": "./rows.jsonl", "filter": text}),
    };
    let file =
        serde_json::json!({"version": 1, "name": "hostile", "stages": {"rows": {"uses": "dataset", "with": with}}});
    project.write("hostile.yaml", &file.to_string());
    project
}

const TAKES_THE_MACHINE: [(&str, &str); 14] = [
    ("map", "{{ '%2000000000s'|format(text) }}"),
    ("map", "{{ (text*10000).replace('l', text*10000) }}"),
    ("map", "{{ range(90000)|join(text*10000) }}"),
    ("map", "{{ text|batch(1000000000, 1)|list|length }}"),
    ("map", "{{ text|slice(1000000000)|list|length }}"),
    ("map", "{{ text|indent(2000000000) }}"),
    ("map", "{% set n = namespace(x=text) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"),
    ("map", "{% set n = namespace(x=[text]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"),
    ("map", "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}"),
    ("map", "{% for a in range(100000) %}{% for b in range(100000) %}{{ a }}{% endfor %}{% endfor %}"),
    ("map", "{{ range(100000) * 1000 }}"),
    ("filter", "'%2000000000s'|format(text)"),
    ("filter", "(range(100000) * 1000)|list|length > 1"),
    ("filter", "(text * 1000000).replace('l', text * 1000) == text"),
];

#[test]
fn no_template_takes_the_machine() {
    for (key, text) in TAKES_THE_MACHINE {
        let project = project(key, text);
        let ended = ended(&project, &["validate", "hostile.yaml"]);
        assert_eq!(ended.code, Some(2), "{text}: {}", ended.said);
        let told = ["makes a string of more than 256 MiB", "needs more than 10000000 steps", "nested deeper than 200"];
        let said = ended.said.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(told.iter().any(|told| said.contains(told)), "{text}: {}", ended.said);
        assert!(ended.peak < 500 << 20, "{text}: {} MB", ended.peak >> 20);
        assert!(ended.took < Duration::from_secs(8), "{text}: {:?}", ended.took);
    }
}

#[test]
fn no_text_goes_too_deep_to_be_read() {
    for (key, text) in [
        ("filter", "-".repeat(20_000) + "1"),
        ("filter", "(".repeat(20_000) + "1"),
        ("filter", "1".to_owned() + &"+1".repeat(200_000)),
        ("map", "{{ ".to_owned() + &"[".repeat(20_000) + " }}"),
        ("map", "{% if text %}".repeat(20_000)),
    ] {
        let project = project(key, &text);
        let ended = ended(&project, &["validate", "hostile.yaml"]);
        assert_eq!(ended.code, Some(2), "{}: {}", &text[..20], &ended.said[..ended.said.len().min(500)]);
        assert!(ended.took < Duration::from_secs(8) && ended.peak < 500 << 20);
    }
}

#[test]
fn a_stage_ends_at_the_limits_too() {
    for (_, text) in [TAKES_THE_MACHINE[1], TAKES_THE_MACHINE[8]] {
        let project = project("map", text);
        // Beyond the rows that are tried before a run.
        let rows = "{\"text\": \"a\"}\n".repeat(100) + "{\"text\": \"hello, world of long lines\"}\n";
        project.write("rows.jsonl", &rows);
        let text = format!("{{% if text|length > 1 %}}{text}{{% endif %}}");
        let file = fs::read_to_string(project.path("hostile.yaml")).unwrap();
        let mut file: serde_json::Value = serde_json::from_str(&file).unwrap();
        file["stages"]["rows"]["with"]["map"]["text"] = text.as_str().into();
        project.write("hostile.yaml", &file.to_string());
        let ended = ended(&project, &["run", "hostile.yaml"]);
        assert_eq!(ended.code, Some(1), "{text}: {}", ended.said);
        assert!(ended.said.contains("`map.text`"), "{}", ended.said);
        assert!(ended.peak < 500 << 20, "{text}: {} MB", ended.peak >> 20);
    }
}
