//! Adapters on a base in 4 bits (QLoRA) by bitsandbytes: trained and asked as by the native backend, whose formats are
//! bitsandbytes' to the bit.

use std::fs;

use serde_json::Value;
use test_harness::{Unmet, do_everything, test};

use crate::architectures::{self, families, reference};
use crate::bench::{Bench, LOSS_BOUND, PIPELINE};

/// Blocks of one row and of several, with and without second scales; DoRA reads the widened weights.
const BASES: [&[&str]; 3] = [
    &["adapter.quantize={base: nf4}"],
    &["adapter.quantize={base: fp4, double_quantization: false, block_size: 128}"],
    &["adapter.quantize={base: nf4, skip_modules: [lm_head, q_proj]}", "adapter.lora.use_dora=true"],
];

#[test]
fn an_adapter_is_trained_as_by_the_native_backend() -> Result<(), Unmet> {
    let bench = Bench::new()?.with_bitsandbytes()?;
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
    let bench = Bench::new()?.with_bitsandbytes()?;
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
    let bench = Bench::new()?.with_bitsandbytes()?;
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

/// Which layers bitsandbytes had quantised transformers alone knows, which also computes the proof: both merges against
/// what was trained.
#[test(each = families())]
fn it_is_merged_into_a_model_that_is_not_native(family: &str) -> Result<(), Unmet> {
    let bench = Bench::of(architectures::PIPELINE)?.with_bitsandbytes()?;
    reference(&bench, &["make", family, "checkpoint", architectures::TOKENIZER]);
    let quantize = "adapter.quantize={base: nf4, block_size: 128}";
    let run = |more: &[&str]| {
        let given = ["run", architectures::PIPELINE, "--until", "scores_of_merged", quantize, "adapter.max_steps=3"];
        bench.run(&[&given, more].concat())
    };
    run(&[]).ends_with(2).warns("`into` is not given");
    let perplexity = |stage: &str, into: &str| -> f64 {
        let given = ["export", architectures::PIPELINE, stage, "exported", quantize, "adapter.max_steps=3", into];
        let _ = fs::remove_dir_all(bench.project.path("exported"));
        bench.run(&given).ends_with(0);
        let figures = fs::read(bench.project.path("exported/metrics.json")).unwrap();
        let figures: Value = serde_json::from_slice(&figures).unwrap();
        figures["perplexity"]["value"].as_f64().unwrap()
    };
    for name in ["original", "dequantized"] {
        let into = format!("merged.into={name}");
        run(&[&into]).ends_with(0);
        let given = ["export", architectures::PIPELINE, "merged", "exported", quantize, "adapter.max_steps=3", &into];
        let _ = fs::remove_dir_all(bench.project.path("exported"));
        bench.run(&given).ends_with(0);
        let report = fs::read(bench.project.path("exported/merge_report.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        let against = &report["proof"]["against_training"];
        assert_eq!(against["into"], name, "{report:#}");
        let off = |merge: &str| against[merge]["max_abs_logit_difference"].as_f64().unwrap();
        assert!(off("dequantized") < 1e-4 && off("original") > 1e-2, "{report:#}");
    }
    let trained = {
        bench.run(&["run", architectures::PIPELINE, "--until", "scores", quantize, "adapter.max_steps=3"]).ends_with(0);
        perplexity("scores", "merged.into=original")
    };
    let [original, dequantized] =
        ["merged.into=original", "merged.into=dequantized"].map(|into| perplexity("scores_of_merged", into));
    assert!((dequantized - trained).abs() <= LOSS_BOUND * trained, "{dequantized} {trained}");
    assert!((original - trained).abs() > 10.0 * LOSS_BOUND * trained, "{original} {trained}");
    Ok(())
}
