//! The torch worker beside the native backend: the same losses, adapters, scores and answers, and runs that one begins
//! and the other ends.

use serde_json::Value;
use test_harness::{Unmet, test};

use crate::bench::{Bench, LOSS_BOUND, PIPELINE, losses};

#[test]
fn one_and_two_ranks_train_as_the_native_backend_does() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    bench.train(&[]).ends_with(0);
    let expected = bench.trained(&[]);
    assert_eq!(losses(&expected.records).len(), 20);
    let one = ["--home=one-rank", "adapter.backend=torch"];
    bench.train(&one).ends_with(0).says("computed by torch");
    bench.trained(&one).is_like(&expected);
    bench.trained_by_two_ranks().is_like(&expected);
    Ok(())
}

#[test]
fn a_run_goes_on_with_the_other_backend() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    let plain = ["adapter.scheduler={name: constant}"];
    bench.train(&[&plain[..], &["--home=whole"]].concat()).ends_with(0);
    let expected = bench.trained(&[&plain[..], &["--home=whole"]].concat());
    for (home, first, then) in [("--home=one", "native", "torch"), ("--home=two", "torch", "native")] {
        let backend = |name: &str| format!("adapter.backend={name}");
        let first = [plain[0], home, "adapter.max_steps=8", &backend(first)].map(str::to_owned);
        let then = [plain[0], home, &backend(then)].map(str::to_owned);
        bench.train(&first.each_ref().map(String::as_str)).ends_with(0);
        let went_on = bench.train(&then.each_ref().map(String::as_str));
        went_on.ends_with(0).warns("resuming from step 8 of 20").warns("their last digits may differ");
        bench.trained(&then.each_ref().map(String::as_str)).is_like(&expected);
    }
    Ok(())
}

#[test]
fn a_model_is_asked_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = Bench::new()?;
    bench.run(&["run", PIPELINE]).ends_with(0);
    let figures = |more: &[&str]| -> Value {
        serde_json::from_slice(&bench.result("scores.metrics", "metrics.json", more)).unwrap()
    };
    let answers = |more: &[&str]| String::from_utf8(bench.result("samples.samples", "samples.txt", more)).unwrap();
    let (expected, expected_answers) = (figures(&[]), answers(&[]));
    let torch = ["--home=torch", "scores.backend=torch", "samples.backend=torch", "scores.resources.count=2"];
    bench.run(&[&["run", PIPELINE], &torch[..]].concat()).ends_with(0).says("computed by torch");
    let found = figures(&torch);
    let perplexity = |figures: &Value| figures["perplexity"]["value"].as_f64().unwrap();
    let (one, two) = (perplexity(&found), perplexity(&expected));
    assert!((one - two).abs() <= LOSS_BOUND * two, "{found:#} {expected:#}");
    assert_eq!(found["token_accuracy"], expected["token_accuracy"]);
    assert_eq!(found["exact_match"], expected["exact_match"]);
    assert_eq!(answers(&torch), expected_answers);
    Ok(())
}
