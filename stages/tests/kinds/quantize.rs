//! The stage kind `quantize`: the files that bitsandbytes stores, what is told of them, and what is refused.

use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::error::{Cause, StageError};
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use model::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
use serde_json::{Value, json};
use stages::kinds::log_probs::LogProbabilities;
use stages::kinds::quantize::Quantize;
use test_harness::{Requirement, test};

use crate::tiny::Tiny;
use crate::training::{learned, write_tokens};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn quantize(model: &Path, more: Value) -> Result<Artifact, StageError> {
    let root = tempfile::tempdir().unwrap().keep();
    let bench = TestBench::new(&root).threads(2).input("base.model", "model", model, Facts::new()).unwrap();
    let mut parameters = json!({"model": "base"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Ok(bench.run::<Quantize>(parameters)?.remove("model").unwrap())
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The tensors of a file as they are stored, whatever they stand for.
fn stored(folder: &Path) -> Vec<(String, String, Vec<usize>, Vec<u8>)> {
    let file = fs::read(folder.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut found: Vec<_> = tensors
        .iter()
        .map(|(name, view)| {
            (name.to_owned(), format!("{:?}", view.dtype()), view.shape().to_vec(), view.data().to_vec())
        })
        .collect();
    found.sort();
    found
}

/// What bitsandbytes saved of the same model: all bytes, but for the mean of the scales and the blanks behind it.
#[test]
fn the_files_are_those_that_transformers_saves() {
    for (saved, format) in [("nf4/llama31-bnb4", "bnb_nf4"), ("quantize/bnb_int8", "bnb_int8")] {
        let made = quantize(&golden("llama31"), json!({"format": format})).unwrap();
        let (own, theirs) = (stored(&made.folder), stored(&golden(saved)));
        let names = |tensors: &[(String, String, Vec<usize>, Vec<u8>)]| {
            tensors.iter().map(|(name, dtype, ..)| format!("{name} {dtype}")).collect::<Vec<_>>()
        };
        assert_eq!(names(&own), names(&theirs), "{format}");
        for ((name, _, shape, bytes), (_, _, expected_shape, expected)) in own.iter().zip(&theirs) {
            if name.contains(".quant_state.") {
                let [own, theirs] = [bytes, expected].map(|text| serde_json::from_slice::<Value>(text).unwrap());
                let offset = |state: &Value| state["nested_offset"].as_f64().unwrap();
                assert!((offset(&own) / offset(&theirs) - 1.0).abs() < 3.6e-7, "{name}");
                let without = |mut state: Value| {
                    state["nested_offset"] = Value::Null;
                    state
                };
                assert_eq!(without(own), without(theirs), "{name}");
                continue;
            }
            assert_eq!(shape, expected_shape, "{name}");
            if name.ends_with(".nested_absmax") {
                let floats =
                    |bytes: &[u8]| bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect::<Vec<_>>();
                let pairs = floats(bytes).into_iter().zip(floats(expected));
                assert!({ pairs }.all(|(one, other)| (one / other - 1.0).abs() < 1e-5), "{name}");
                continue;
            }
            // A mean that differs in its last place may move a scale by a level.
            let unlike = bytes.iter().zip(expected).filter(|(one, other)| one != other).count();
            let most = if name.ends_with(".absmax") { bytes.len() / 16 } else { 0 };
            assert!(bytes.len() == expected.len() && unlike <= most, "{name}: {unlike} of {}", bytes.len());
        }
        let [own, theirs] =
            [made.folder.join("config.json"), golden(saved).join("config.json")].map(|path| read(&path));
        let expected = &theirs["quantization_config"];
        for (key, value) in own["quantization_config"].as_object().unwrap() {
            assert_eq!(expected[key], *value, "{format}: {key}");
        }
        assert_eq!(made.description.facts["config"]["quantization_config"]["quant_method"], "bitsandbytes");
    }
}

/// A model with its tensors in f32, as a quantised one stands for them.
fn dequantised(quantised: &Path, to: &Path) {
    let checkpoint = Checkpoint::open(quantised).unwrap();
    let is_part = |name: &str| name.ends_with(".SCB") || name.ends_with(".weight_format");
    let tensors = || checkpoint.tensors().filter(|(name, _)| !is_part(name));
    let specs = tensors().map(|(name, info)| TensorSpec::new(name, Dtype::F32, &info.shape)).collect();
    let mut writer = CheckpointWriter::create_file(to, specs).unwrap();
    for (name, info) in tensors() {
        let values = match info.dtype {
            Dtype::I8 => {
                let scales = checkpoint.tensor_f32(&name.replace(".weight", ".SCB")).unwrap();
                let rows = checkpoint.bytes(name).unwrap().chunks_exact(info.shape[1]).zip(scales);
                rows.flat_map(|(row, scale)| row.iter().map(move |x| f32::from(x.cast_signed()) * scale / 127.0))
                    .collect()
            }
            _ => checkpoint.tensor_f32(name).unwrap(),
        };
        writer.write_f32(name, &values).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn transformers_loads_them() {
    let python = std::env::var_os("PIPELINE_PYTHON").filter(|set| !set.is_empty()).unwrap_or_else(|| "python3".into());
    let can = Command::new(&python).args(["-c", "import bitsandbytes, transformers, safetensors"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("not run: no Python with transformers and bitsandbytes (PIPELINE_PYTHON)");
        Requirement::Bitsandbytes.may_be_lacking("no Python with transformers and bitsandbytes (PIPELINE_PYTHON)");
        return;
    }
    for more in [
        json!({"format": "bnb_nf4"}),
        json!({"format": "bnb_nf4", "double_quantization": false, "skip_modules": ["layers.1", "o_proj"]}),
        json!({"format": "bnb_fp4"}),
        json!({"format": "bnb_int8"}),
    ] {
        let made = quantize(&golden("llama31"), more.clone()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let expected = folder.path().join("expected.safetensors");
        dequantised(&made.folder, &expected);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/load_quantized.py");
        let output = Command::new(&python).arg(script).arg(&made.folder).arg(&expected).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{more}: {said}");
        let layers = if more["skip_modules"].is_null() { 14 } else { 6 };
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(told.contains(&format!("{layers} layers compared")), "{more}: {told}");
    }
}

#[test]
fn errors_and_perplexities_are_told_and_may_fail_the_stage() {
    let (tiny, root) = (Tiny::new(), tempfile::tempdir().unwrap());
    let tokens = root.path().join("tokens");
    let facts =
        write_tokens(&tokens, (0..8).map(|row| learned((0..16).map(|at| 3 + (7 * row + 5 * at) % 200))).collect());
    let bench = |folder: &str| {
        let bench = tiny.bench_in(&root.path().join(folder));
        bench.input("tokens.tokens", "tokens", &tokens, facts.clone()).unwrap()
    };
    let run = |folder: &str, more: Value| {
        let mut parameters = json!({"model": "base", "data": "tokens"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        bench(folder).run::<Quantize>(parameters).map(|mut outputs| outputs.remove("model").unwrap())
    };
    let perplexity = |folder: &str, more: Value| {
        let mut parameters = json!({"model": "base", "data": "tokens"});
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let outputs = bench(folder).run::<LogProbabilities>(parameters).unwrap();
        outputs["log_probs"].description.facts["perplexity"].as_f64().unwrap()
    };
    let near = |found: &Value, expected: f64| (found.as_f64().unwrap() / expected - 1.0).abs() < 1e-6;
    let before = perplexity("before", json!({}));
    let mut errors = Vec::new();
    for format in ["bnb_nf4", "bnb_fp4", "bnb_int8"] {
        let made = run(format, json!({"format": format})).unwrap();
        let report = read(&made.folder.join("quantize_report.json"));
        assert!(near(&report["perplexity"]["before"], before), "{format}: {report}");
        if let Some(base) = format.strip_prefix("bnb_").filter(|base| *base != "int8") {
            let after = perplexity(&format!("after {base}"), json!({"quantize": {"base": base}}));
            assert!(near(&report["perplexity"]["after"], after), "{format}: {report} {after}");
        }
        let tensors = report["quantized"].as_array().unwrap();
        assert_eq!(tensors.len(), 14);
        let of = |key: &str| tensors.iter().map(|tensor| tensor[key].as_f64().unwrap()).collect::<Vec<_>>();
        assert!(of("cosine").iter().all(|cosine| (0.98..=1.0).contains(cosine)), "{format}: {report}");
        errors.push(of("relative_error").into_iter().fold(0.0, f64::max));
        assert!(report["bytes_after"].as_u64() < report["bytes_before"].as_u64());
    }
    // About what is expected of normally distributed weights.
    assert!((0.08..0.11).contains(&errors[0]) && errors[1] > errors[0] && errors[2] < 0.012, "{errors:?}");

    let error = run("bound", json!({"max_relative_error": 0.05})).unwrap_err();
    assert_eq!(error.cause, Cause::Numeric);
    assert!(error.message.contains("and `max_relative_error` is 0.05") && error.help.is_some(), "{}", error.message);
    let error = run("ratio", json!({"max_perplexity_ratio": 0.5})).unwrap_err();
    assert!(error.message.contains("`max_perplexity_ratio` is 0.5"), "{}", error.message);
    assert!(run("within", json!({"max_relative_error": 0.2, "max_perplexity_ratio": 5.0})).is_ok());
}

fn problems(more: Value, config: Value) -> Vec<String> {
    let mut parameters = json!({"model": "base"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut reader = Reader::default();
    let bound = stages::registry().get("quantize").unwrap().read(&Node::from_json(&parameters), &mut reader);
    let facts = InputFacts::from([("base.model".to_owned(), Facts::from_iter([("config".to_owned(), config)]))]);
    let found = bound.map_or_else(Vec::new, |bound| bound.check(&facts, Span::default()));
    reader.problems.into_iter().chain(found).map(|problem| problem.message).collect()
}

#[test]
fn what_cannot_be_is_found_before_the_run_and_when_it_runs() {
    let plain = read(&golden("llama31").join("config.json"));
    assert_eq!(problems(json!({}), plain.clone()), [""; 0]);
    for (more, said) in [
        (json!({"block_size": 96}), "it has to be a power of two"),
        (json!({"format": "bnb_int8", "block_size": 128}), "`bnb_int8` has a scale to a row"),
        (json!({"max_relative_error": 0.0}), "`max_relative_error` has to be above 0"),
        (json!({"max_perplexity_ratio": 1.1}), "`max_perplexity_ratio` needs rows"),
    ] {
        let found = problems(more.clone(), plain.clone());
        assert!(found.len() == 1 && found[0].contains(said), "{more}: {found:?}");
    }
    for method in ["gptq", "awq", "fp8", "bitsandbytes", "gguf"] {
        let mut config = plain.clone();
        config["quantization_config"] = json!({"quant_method": method});
        let found = problems(json!({}), config);
        assert!(found[0].contains(&format!("stored quantised (`{method}`)")), "{found:?}");
    }
    let told = |error: StageError| format!("{}: {}", error.message, error.source().unwrap());
    let again = told(quantize(&golden("nf4/llama31-bnb4"), json!({})).unwrap_err());
    assert!(again.contains("stored quantised (`bitsandbytes`)"), "{again}");
    let nothing = told(quantize(&golden("llama31"), json!({"skip_modules": ["self_attn", "mlp"]})).unwrap_err());
    assert!(nothing.contains("`skip_modules` names all of them"), "{nothing}");
}
