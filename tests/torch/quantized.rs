//! Adapters on a base in 4 bits (QLoRA) by bitsandbytes: trained and asked as by the native backend, whose formats are
//! bitsandbytes' to the bit.

use std::fs;

use serde_json::Value;
use test_harness::{Unmet, do_everything, test};

use crate::bench::{Bench, LOSS_BOUND, PIPELINE};

/// Blocks of one row and of several, with and without second scales; DoRA reads the widened weights.
const BASES: [&[&str]; 3] = [
    &["adapter.quantize={base: nf4}"],
    &["adapter.quantize={base: fp4, double_quantization: false, block_size: 128}"],
    &["adapter.quantize={base: nf4, skip_modules: [lm_head, q_proj]}", "adapter.lora.use_dora=true"],
];

#[test]
fn an_adapter_is_trained_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = Bench::with_bitsandbytes()?;
    let one = &["--home=torch", "adapter.backend=torch"][..];
    let two = &["--home=ranks", "adapter.backend=torch", "adapter.resources.count=2"][..];
    for (at, base) in BASES.into_iter().enumerate() {
        let base = [base, &["adapter.max_steps=6"]].concat();
        bench.train(&base).ends_with(0);
        let expected = bench.trained(&base);
        // Two ranks hold a base as one does, whatever its format.
        let several = if at == 0 || do_everything() { &[one, two][..] } else { &[one] };
        for more in several {
            let torch = [&base[..], more].concat();
            bench.train(&torch).ends_with(0).says("computed by torch");
            bench.trained(&torch).is_like(&expected);
        }
    }
    Ok(())
}

/// What the Hub has of models that were saved after `load_in_4bit`.
#[test]
fn a_model_that_is_stored_so_is_trained_on_and_asked_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = Bench::with_bitsandbytes()?;
    let file = bench.project.path(PIPELINE);
    let stored = "  stored:\n    uses: quantize\n    with: { model: fresh, format: bnb_nf4 }\n";
    fs::write(&file, fs::read_to_string(&file).unwrap() + stored).unwrap();
    let base = ["adapter.model=stored", "adapter.max_steps=6", "scores.model=stored", "samples.model=stored"];
    let torch = ["--home=torch", "adapter.backend=torch", "scores.backend=torch", "samples.backend=torch"];
    let torch = [&base[..], &torch].concat();
    bench.run(&[&["run", PIPELINE], &base[..]].concat()).ends_with(0);
    bench.run(&[&["run", PIPELINE], &torch[..]].concat()).ends_with(0).says("computed by torch");
    bench.trained(&torch).is_like(&bench.trained(&base));
    let perplexity = |more: &[&str]| {
        let figures: Value = serde_json::from_slice(&bench.result("scores.metrics", "metrics.json", more)).unwrap();
        figures["perplexity"]["value"].as_f64().unwrap()
    };
    let (one, two) = (perplexity(&torch), perplexity(&base));
    assert!((one - two).abs() <= LOSS_BOUND * two, "{one} {two}");
    let answers = |more: &[&str]| bench.result("samples.samples", "samples.txt", more);
    assert_eq!(answers(&torch), answers(&base));
    Ok(())
}

#[test]
fn a_model_with_it_is_asked_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = Bench::with_bitsandbytes()?;
    let base = ["adapter.quantize={base: nf4}", "adapter.max_steps=6"];
    let figures = |more: &[&str]| -> Value {
        serde_json::from_slice(&bench.result("scores.metrics", "metrics.json", &[&base, more].concat())).unwrap()
    };
    let answers = |more: &[&str]| {
        String::from_utf8(bench.result("samples.samples", "samples.txt", &[&base, more].concat())).unwrap()
    };
    let run = |more: &[&str]| bench.run(&[&["run", PIPELINE], &base[..], more].concat());
    run(&[]).ends_with(0);
    let torch = ["--home=torch", "scores.backend=torch", "samples.backend=torch"];
    run(&torch).ends_with(0).says("computed by torch");
    run(&["scores.quantize=none"]).ends_with(0).warns("the adapter was trained on its base in `nf4`");
    let perplexity = |more: &[&str]| figures(more)["perplexity"]["value"].as_f64().unwrap();
    let (one, two, stored) = (perplexity(&torch), perplexity(&[]), perplexity(&["scores.quantize=none"]));
    assert!((one - two).abs() <= LOSS_BOUND * two, "{one} {two}");
    assert!((stored - two).abs() > 10.0 * LOSS_BOUND * two, "{stored} {two}");
    assert_eq!(answers(&torch), answers(&[]));
    Ok(())
}
