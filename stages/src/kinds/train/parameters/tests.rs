//! What parameters come to when they are taken together.

use cache::KeyDocument;
use engine::file::tree::Node;
use engine::parameter::{Json, KeyWriter, Parameter, Reader};
use engine::stage::Stage;
use serde_json::json;

use super::*;

fn read(more: Json) -> Train {
    let mut parameters = json!({"model": "base", "data": "rows"});
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut reader = Reader::default();
    let read = Train::read(&Node::from_json(&parameters), &mut reader);
    assert!(reader.problems.is_empty(), "{:?}", reader.problems);
    read.unwrap()
}

fn key(more: Json) -> KeyDocument {
    let params = read(more);
    let mut document = KeyDocument::default();
    let none = |_: &_, _: &'static [&'static str]| None;
    let mut writer = KeyWriter::new(&mut document, &none);
    params.write_whole_key(&mut writer);
    document
}

#[test]
fn what_is_said_of_an_existing_adapter_is_looked_at_though_it_is_the_default() {
    // A fresh adapter is the same whether the file gives a default or leaves it out; an existing one may contradict it.
    assert_eq!(key(json!({})), key(json!({"lora": {"rank": 8}})));
    let warm = key(json!({"adapter": "before"}));
    assert_ne!(warm, key(json!({"adapter": "before", "lora": {"rank": 8}})));
    assert_eq!(warm, key(json!({"adapter": "before", "lora": {}})));
}

#[test]
fn the_default_loss_is_in_no_key_and_every_other_is() {
    let plain = key(json!({}));
    for same in [json!("cross_entropy"), json!({}), json!({"label_smoothing": 0.0})] {
        assert_eq!(key(json!({ "loss": same })), plain);
    }
    let entries = |loss: Json| -> Vec<String> {
        let document = key(json!({ "loss": loss }));
        document.entries.iter().map(|entry| entry.path.clone()).filter(|path| path.starts_with("loss.")).collect()
    };
    assert_eq!(entries(json!({"label_smoothing": 0.1})), ["loss.name", "loss.label_smoothing"]);
    let distillation = ["loss.name", "loss.teacher", "loss.temperature", "loss.alpha", "loss.divergence"];
    assert_eq!(entries(json!({"name": "distillation", "teacher": "large"})), distillation);
}

#[test]
fn what_was_added_is_in_no_key_until_it_is_used() {
    let plain = key(json!({}));
    let same = json!({"lora": {"learning_rate_ratio": 1, "layers_to_transform": []}, "neftune_noise_alpha": null});
    assert_eq!(key(same), plain);
    let added = |more: Json| {
        let entries = key(more).entries.into_iter().filter(|entry| !plain.entries.contains(entry));
        entries.map(|entry| format!("{} = {}", entry.path, entry.value)).collect::<Vec<_>>()
    };
    assert_eq!(added(json!({"neftune_noise_alpha": 5})), ["neftune_noise_alpha = 5.0"]);
    assert_eq!(added(json!({"matmul_precision": "highest"})), Vec::<String>::new());
    assert_eq!(added(json!({"matmul_precision": "high"})), ["matmul_precision = high"]);
    assert_eq!(added(json!({"lora": {"learning_rate_ratio": 16}})), ["lora.learning_rate_ratio = 16.0"]);
    assert_eq!(added(json!({"lora": {"layers_to_transform": [1]}})), ["lora.layers_to_transform = 1"]);
    let quantize = [
        "quantize.base = nf4",
        "quantize.double_quantization = true",
        "quantize.block_size = 64",
        "quantize.skip_modules[0] = \"lm_head\"",
    ];
    assert_eq!(added(json!({"quantize": {"base": "nf4"}})), quantize);
}

#[test]
fn what_the_native_backend_alone_computes_is_refused_by_name_elsewhere() {
    let problems = |more: Json| -> Vec<String> {
        read(more).problems(Span::default()).into_iter().map(|problem| problem.message).collect()
    };
    for (more, name) in [
        (json!({"neftune_noise_alpha": 5}), "`neftune_noise_alpha`"),
        (json!({"matmul_precision": "high"}), "`matmul_precision`"),
        (json!({"quantize": {"base": "nf4_torchao"}}), "`quantize`"),
        (json!({"quantize": {"base": "q8_0"}}), "`quantize`"),
        (json!({"lora": {"learning_rate_ratio": 16}}), "`lora.learning_rate_ratio`"),
    ] {
        assert_eq!(problems(more.clone()), [""; 0]);
        for (key, value) in [("backend", "torch"), ("dtype", "f16")] {
            let mut more = more.clone();
            more[key] = value.into();
            let found = problems(more);
            assert!(found.len() == 1 && found[0].contains(name), "{key}: {found:?}");
        }
    }
}

#[test]
fn formats_of_bitsandbytes_go_with_the_worker_but_not_in_shards() {
    let problems = |more: Json| -> Vec<String> {
        read(more).problems(Span::default()).into_iter().map(|problem| problem.message).collect()
    };
    for (backend, dtype) in [("torch", "bf16"), ("torch", "f16"), ("auto", "f16"), ("native", "f32")] {
        let more = json!({"quantize": {"base": "fp4"}, "backend": backend, "dtype": dtype});
        assert_eq!(problems(more), [""; 0], "{backend} {dtype}");
    }
    let found = problems(json!({"quantize": {"base": "nf4"}, "parallel": "fsdp2"}));
    assert_eq!(found, ["`quantize` is not computed with `parallel: fsdp2`"]);
}

#[test]
fn attention_of_gpus_is_refused_on_a_cpu_that_the_worker_computes_on() {
    let problems = |more: Json, device| -> Vec<String> {
        read(more).check_on(device, Span::default()).into_iter().map(|problem| problem.message).collect()
    };
    let of = |attention: &str, more: Json| {
        let mut parameters = json!({ "attention": attention });
        parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parameters
    };
    for more in [json!({"backend": "torch"}), json!({"dtype": "f16"})] {
        for attention in ["flex", "flash"] {
            let found = problems(of(attention, more.clone()), DeviceKind::Cpu);
            let said = format!("`attention: {attention}` cannot be used here: it needs a CUDA or ROCm device, ");
            assert!(found.len() == 1 && found[0].starts_with(&said), "{found:?}");
            assert_eq!(problems(of(attention, more.clone()), DeviceKind::Cuda), [""; 0]);
        }
        for attention in ["auto", "sdpa"] {
            assert_eq!(problems(of(attention, more.clone()), DeviceKind::Cpu), [""; 0], "{attention}");
        }
    }
    // The native backend does not read it.
    assert_eq!(problems(of("flex", json!({})), DeviceKind::Cpu), [""; 0]);
}

#[test]
fn a_learning_rate_below_the_normal_numbers_of_f32_is_refused() {
    let problems = |rate: f64| read(json!({"optimizer": {"learning_rate": rate}})).problems(Span::default());
    for rate in [1e-60, 1e-38] {
        let found = problems(rate);
        assert!(
            found.len() == 1 && found[0].message.contains("the smallest normal number of f32"),
            "{rate}: {found:?}"
        );
        assert_eq!(found[0].field.as_deref(), Some("optimizer.learning_rate"));
    }
    assert!(problems(1.2e-38).is_empty());
}

#[test]
fn a_learning_rate_that_stays_below_its_highest_is_said() {
    let low = |scheduler: Json, steps| read(json!({"scheduler": scheduler})).low_peak(steps);
    let decay = |steps: u64| json!({"name": "warmup_stable_decay", "num_decay_steps": steps});
    assert_eq!(low(decay(3), 12), None);
    let message = low(decay(300), 12).unwrap();
    assert!(message.contains("no place for its highest rate in the run of 12"), "{message}");
    let message = low(json!({"name": "linear", "warmup_steps": 12}), 12).unwrap();
    assert!(message.contains("the warm-up of 12 steps does not end within the run of 12"), "{message}");
    for name in ["constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "one_cycle"] {
        assert_eq!(low(json!({"name": name}), 12), None, "{name}");
    }
}
