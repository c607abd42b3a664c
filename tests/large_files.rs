//! Files with tens of thousands of things, and of mistakes: the time to check them grows with their length, and no
//! faster.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use support::Project;

/// Seconds of CPU time that one of these may take in a build without optimizations. What grew with the square took
/// minutes.
const AT_MOST: Duration = Duration::from_secs(15);

/// The CPU time of all that was run so far.
fn spent() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).unwrap();
    let times = [usage.user_time(), usage.system_time()];
    times.iter().map(|time| Duration::from_micros((time.tv_sec() * 1_000_000 + time.tv_usec()).cast_unsigned())).sum()
}

fn lines(count: usize, line: impl Fn(usize) -> String) -> String {
    (0..count).map(line).collect()
}

/// One test, since all that runs beside it would count.
#[test]
fn the_time_of_a_check_does_not_grow_with_the_square() {
    let program = "{ uses: command, with: { run: 'true', outputs: { o: files } }";
    let words = lines(60_000, |at| format!("${{vars.a{at}}} "));
    let chain = lines(8_000, |at| format!("  s{at}: {program}, needs: [s{}] }}\n", at + 1));
    let pairs = lines(4_000, |at| {
        format!("  a{at}: {program}, needs: [b{at}, a{}] }}\n  b{at}: {program}, needs: [a{at}] }}\n", at + 1)
    });
    let off = lines(6_000, |at| format!("  s{at}: {program}, when: false }}\n"));
    let cases = [
        (
            "variables",
            2,
            format!("vars:\n{}stages: {{ s: {{ uses: k }} }}\n", lines(60_000, |at| format!("  v{at}: 1\n"))),
        ),
        (
            "variables of each other",
            2,
            format!(
                "vars:\n  v: 1\n{}stages: {{ s: {{ uses: k }} }}\n",
                lines(40_000, |at| format!("  v{at}: ${{vars.v}}\n"))
            ),
        ),
        ("unknown variables", 2, format!("stages:\n  s: {{ uses: dataset, with: {{ source: \"{words}\" }} }}\n")),
        ("unknown kinds", 2, format!("stages:\n{}", lines(30_000, |at| format!("  s{at}: {{ uses: k{at} }}\n")))),
        (
            "unknown stages",
            2,
            format!("stages:\n{}", lines(20_000, |at| format!("  s{at}: {{ uses: k, needs: [t{at}] }}\n"))),
        ),
        (
            "unknown keys",
            2,
            format!(
                "stages:\n{}",
                lines(12_000, |at| format!("  s{at}: {{ uses: train, with: {{ rank{at}: 1 }} }}\n"))
            ),
        ),
        (
            "wrong kinds",
            2,
            format!(
                "stages:\n  m: {program} }}\n{}",
                lines(8_000, |at| format!("  s{at}: {{ uses: pack, with: {{ tokens: m, max_seq_len: 8 }} }}\n"))
            ),
        ),
        ("a chain", 0, format!("stages:\n{chain}  s8000: {program} }}\n")),
        ("pairs that wait for each other", 2, format!("stages:\n{pairs}  a4000: {program} }}\n")),
        (
            "unknown targets",
            2,
            format!(
                "stages: {{ s: {{ uses: k }} }}\npublish:\n{}",
                lines(20_000, |at| format!("  t{at}: ./out/{at}\n"))
            ),
        ),
        (
            "targets that are left out",
            0,
            format!("stages:\n{off}publish:\n{}", lines(6_000, |at| format!("  s{at}: ./out/{at}\n"))),
        ),
    ];
    let project = Project::new();
    for (name, code, text) in cases {
        project.write("large.yaml", &format!("version: 1\n{text}"));
        let before = spent();
        let ran = project.run(&["validate", "large.yaml"]);
        let took = spent() - before;
        assert_eq!(ran.code, Some(code), "{name}: {}", &ran.stderr[..ran.stderr.len().min(2000)]);
        assert!(took < AT_MOST, "{name}: {took:?}");
        println!("{name}: {took:?}");
    }
}
