//! Every shape read from a file has the learning rates of transformers and torch, and takes no option but its own.

use engine::file::tree::Node;
use engine::parameter::{Parameter, Reader};
use serde_json::{Value, json};

use super::*;

const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/schedules.json"));
const GOLDEN_MORE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/schedules_more.json"));

fn read(json: Value) -> Result<SchedulerParams, Vec<String>> {
    let mut reader = Reader::default();
    let read = SchedulerParams::read(&Node::from_json(&json), &mut reader);
    read.filter(|_| reader.problems.is_empty())
        .ok_or_else(|| reader.problems.into_iter().map(|problem| problem.message).collect())
}

#[test]
fn each_shape_gives_the_reference_learning_rates() {
    let golden: [Value; 2] = [GOLDEN, GOLDEN_MORE].map(|text| serde_json::from_str(text).unwrap());
    for (reference, total, options) in [
        ("constant_with_warmup(warmup=5)", 20, json!({"name": "constant", "warmup_steps": 5})),
        ("linear_with_warmup(warmup=5)", 20, json!({"name": "linear", "warmup_ratio": 0.21})),
        ("cosine_with_warmup(warmup=5,cycles=0.5)", 20, json!({"name": "cosine", "warmup_ratio": 0.25})),
        ("cosine_with_warmup(warmup=0,cycles=0.5)", 20, json!({})),
        (
            "cosine_with_min_lr(warmup=5,min_lr_rate=0.1)",
            20,
            json!({"name": "cosine_with_min_lr", "warmup_steps": 5, "min_lr": 2e-5}),
        ),
        ("one_cycle(max_lr=1,pct_start=0.3,div_factor=25,final_div_factor=1e4,cos)", 21, json!({"name": "one_cycle"})),
        (
            "cosine_with_hard_restarts(warmup=5,cycles=2)",
            20,
            json!({"name": "cosine_with_restarts", "warmup_steps": 5, "num_cycles": 2}),
        ),
        (
            "polynomial(warmup=5,power=2,lr_end=0.1)",
            20,
            json!({"name": "polynomial", "warmup_steps": 5, "power": 2, "lr_end": 2e-5}),
        ),
        ("inverse_sqrt(warmup=5)", 20, json!({"name": "inverse_sqrt", "warmup_steps": 5})),
        (
            "wsd(warmup=5,decay=8,min_lr_ratio=0.1)",
            20,
            json!({"name": "warmup_stable_decay", "warmup_steps": 5, "num_decay_steps": 8, "min_lr_ratio": 0.1}),
        ),
    ] {
        let expected: Vec<f64> = golden
            .iter()
            .find_map(|golden| serde_json::from_value(golden[reference].clone()).ok())
            .unwrap_or_else(|| panic!("no {reference}"));
        let learning_rate = 2e-4;
        let schedule = read(options).unwrap().schedule(learning_rate, total);
        for (step, expected) in expected.into_iter().enumerate() {
            let factor = schedule.factor(step as u64, total);
            assert!((factor - expected).abs() < 1e-12, "{reference} at {step}: {factor}, not {expected}");
        }
    }
}

#[test]
fn what_a_schedule_cannot_take_is_said() {
    for (wrong, says) in [
        (json!({"power": 2}), "`cosine` has no option `power`"),
        (json!({"name": "linear", "num_cycles": 2}), "`linear` has no option `num_cycles`"),
        (json!({"name": "one_cycle", "warmup_steps": 2}), "`one_cycle` has no option `warmup_steps`"),
        (
            json!({"name": "cosine_with_min_lr", "min_lr_ratio": 0.1, "min_lr_rate": 0.1}),
            "`cosine_with_min_lr` has no option `min_lr_ratio`",
        ),
        (json!("cosine_with_min_lr"), "one of `min_lr`, `min_lr_rate` is required"),
        (json!({"name": "warmup_stable_decay"}), "`num_decay_steps` is missing"),
        (json!({"warmup_steps": 1, "warmup_ratio": 0.1}), "`warmup_steps` and `warmup_ratio` exclude each other"),
    ] {
        assert_eq!(read(wrong.clone()).unwrap_err(), [says], "{wrong}");
    }
    let low = |shape: Value| read(shape).unwrap().problem(1e-4, Span::default());
    assert!(low(json!({"name": "polynomial", "lr_end": 1e-4})).is_some());
    assert!(low(json!({"name": "cosine_with_min_lr", "min_lr": 1e-3})).is_some());
    assert!(low(json!({"name": "polynomial"})).is_none());
}

#[test]
fn the_length_of_the_run_enters_all_but_two() {
    let open = |options: Value| read(options).unwrap().horizon() == Horizon::Open;
    assert!(open(json!({"name": "constant", "warmup_steps": 3})) && open(json!({"name": "inverse_sqrt"})));
    // A share of the run is another number of steps in a longer run.
    assert!(!open(json!({"name": "constant", "warmup_ratio": 0.1})));
    assert!(!open(json!({})) && !open(json!({"name": "one_cycle"})));
    let ratio = read(json!({"warmup_ratio": 0.1})).unwrap();
    assert_eq!([0, 1, 10, 11, 100].map(|total| ratio.warmup_steps(total)), [0, 1, 1, 2, 10]);
}
