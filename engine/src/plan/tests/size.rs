//! Files as large as they get.

use super::*;

#[test]
fn a_thousand_stages_are_planned_in_no_time() {
    let mut text = "version: 1\nstages:\n".to_owned();
    for index in (0..1000).rev() {
        let rows = if index == 0 { "rows".to_owned() } else { format!("s{}.left", index - 1) };
        text.push_str(&format!(
            "  s{index}:\n    uses: split\n    with:\n      rows: {rows}\n    resources: {{ count: 1 }}\n"
        ));
    }
    text.push_str("  rows: { uses: dataset, with: { source: x } }\n");
    let registry = registry();
    // The fastest of several: what a busy machine adds is not the planner's.
    let times = (0..5).map(|_| {
        let started = Instant::now();
        let plan = load_text(Path::new("file.yaml"), &text, &[], &registry).unwrap();
        let took = started.elapsed();
        assert_eq!((plan.stages.len(), plan.stages[1000].id.as_str()), (1001, "s999"));
        took
    });
    let took = times.min().unwrap();
    assert!(took < Duration::from_millis(if cfg!(debug_assertions) { 5000 } else { 250 }), "took {took:?}");
}

#[test]
fn a_long_chain_needs_no_deep_stack() {
    let mut text = "version: 1\nstages:\n  s0: { uses: dataset, with: { source: x } }\n".to_owned();
    for index in 1..10_000 {
        text.push_str(&format!("  s{index}: {{ uses: dataset, with: {{ source: x }}, needs: [s{}] }}\n", index - 1));
    }
    assert_eq!(plan(&text).stages.len(), 10_000);
    let closed = text.replacen("{ source: x } }", "{ source: x }, needs: [s9999] }", 1);
    let found = wrong(&closed);
    assert!(found.len() == 1 && found[0].contains("s0 → s9999 → s9998"), "{}", &found[0][..200]);
}

#[test]
fn thousands_of_variables_are_read_in_no_time_also_where_each_is_made_of_the_one_before() {
    let mut text = "version: 1\nvars:\n  v0: ./rows\n".to_owned();
    for index in 1..8000 {
        text.push_str(&format!("  v{index}: ${{vars.v{}}}\n", index - 1));
    }
    text.push_str("stages:\n  rows: { uses: dataset, with: { source: \"${vars.v7999}\" } }\n");
    let started = Instant::now();
    let plan = plan(&text);
    assert_eq!(plan.stages[0].parameters["source"], "./rows");
    let took = started.elapsed();
    assert!(took < Duration::from_secs(if cfg!(debug_assertions) { 20 } else { 5 }), "took {took:?}");
}
