//! What a merge promises: the weights of PEFT, everything else untouched, and refusals by name.

use super::*;
use crate::init::{NewModel, fresh_lora_a};
use crate::peft::{AdapterConfig, AdapterModule, SavedTensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
}

fn whole(adapter: &Adapter) -> WeightedAdapter<'_> {
    WeightedAdapter { adapter, weight: 1.0 }
}

/// An adapter of rank 2 with no zero in it.
fn adapter(modules: &[(&str, usize, usize)]) -> Adapter {
    let modules = modules.iter().map(|(name, out_features, in_features)| {
        let (out_features, in_features) = (*out_features, *in_features);
        let lora_a = fresh_lora_a(1, name, 2, in_features);
        let lora_b = fresh_lora_a(2, name, out_features, 2);
        let module = AdapterModule { rank: 2, in_features, out_features, lora_a, lora_b, magnitude: None };
        ((*name).to_owned(), module)
    });
    Adapter {
        config: AdapterConfig::new(2, 4.0, vec![]),
        modules: modules.collect(),
        saved_tensors: Default::default(),
        token_rows: Default::default(),
    }
}

/// An adapter with the row of token 3 in each of these tables, beside LoRA on a projection.
fn token_rows(tables: &[&str]) -> Adapter {
    let mut adapter = adapter(&[(Q, 8, 8)]);
    for table in tables {
        adapter.config.trainable_token_indices.insert((*table).to_owned(), vec![3]);
        adapter.token_rows.insert((*table).to_owned(), SavedTensor { shape: vec![1, 8], values: vec![0.5; 8] });
    }
    adapter
}

fn base(folder: &Path, tie_word_embeddings: bool, dtype: Dtype) {
    let model = NewModel {
        vocab_size: 20,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        tie_word_embeddings,
        ..NewModel::default()
    };
    model.write(folder, 5, dtype).unwrap();
}

const Q: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn merged_weights_are_those_of_peft() {
    for variant in [
        "llama31/lora/attention",
        "llama31/lora/all_linear",
        "llama31/lora/rslora",
        "llama31/lora/dora",
        "llama2/lora/attention",
    ] {
        let base = golden(variant).join("../..");
        let adapter = Adapter::load(&golden(variant).join("adapter")).unwrap();
        let output = tempfile::tempdir().unwrap();
        let report = merge(&base, &[whole(&adapter)], output.path(), MergeOptions::default()).unwrap();
        assert_eq!(report.merged.len(), adapter.modules.len());
        assert!(report.merged.iter().all(|merged| merged.max_abs_delta > 0.0));
        let merged = Checkpoint::open(output.path()).unwrap();
        let before = Checkpoint::open(&base).unwrap();
        assert!(merged.names().eq(before.names()));
        let expected = Checkpoint::open_file(&golden(variant).join("merged.safetensors")).unwrap();
        for name in expected.names().filter(|name| name.starts_with("model.")) {
            let (found, expected) = (merged.tensor_f32(name).unwrap(), expected.tensor_f32(name).unwrap());
            let largest = expected.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!((found - expected).abs() <= 1e-6 * largest, "{variant} {name}: {found} {expected}");
            }
        }
    }
}

#[test]
fn a_sum_is_rounded_once_and_the_rest_is_copied() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::BF16);
    std::fs::write(folder.path().join("generation_config.json"), "{}").unwrap();
    let adapter = adapter(&[(Q, 8, 8)]);
    let options = MergeOptions { max_shard_bytes: 600, ..MergeOptions::default() };
    let report = merge(folder.path(), &[whole(&adapter)], output.path(), options).unwrap();
    assert!(report.files.len() > 4 && report.files.iter().all(|path| path.exists()), "several shards and two configs");
    let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
    for name in before.names().filter(|name| !name.contains("q_proj")) {
        assert_eq!(before.bytes(name).unwrap(), after.bytes(name).unwrap(), "{name}");
    }
    let (a, b) = (&adapter.modules[Q].lora_a, &adapter.modules[Q].lora_b);
    let weight = before.tensor_f32("model.layers.0.self_attn.q_proj.weight").unwrap();
    let expected = (0..64).map(|i| {
        let (row, column) = (i / 8, i % 8);
        let delta = 2.0 * (b[row * 2] * a[column] + b[row * 2 + 1] * a[8 + column]);
        half::bf16::from_f32(weight[i] + delta).to_f32()
    });
    assert_eq!(after.tensor_f32("model.layers.0.self_attn.q_proj.weight").unwrap(), expected.collect::<Vec<_>>());
}

#[test]
fn several_adapters_enter_with_their_weights() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::F32);
    let adapter = adapter(&[(Q, 8, 8)]);
    let halves =
        [WeightedAdapter { adapter: &adapter, weight: 0.5 }, WeightedAdapter { adapter: &adapter, weight: -0.5 }];
    merge(folder.path(), &halves, output.path(), MergeOptions::default()).unwrap();
    let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
    let name = "model.layers.0.self_attn.q_proj.weight";
    for (before, after) in before.tensor_f32(name).unwrap().iter().zip(after.tensor_f32(name).unwrap()) {
        assert!((before - after).abs() < 1e-6, "the halves cancel");
    }
}

#[test]
fn a_tied_head_is_untied_and_the_embedding_stays() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), true, Dtype::F32);
    let report =
        merge(folder.path(), &[whole(&adapter(&[("lm_head", 20, 8)]))], output.path(), MergeOptions::default())
            .unwrap();
    assert!(report.untied_head);
    let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
    assert_eq!(before.bytes(EMBEDDING).unwrap(), after.bytes(EMBEDDING).unwrap());
    assert_ne!(after.bytes(HEAD).unwrap(), after.bytes(EMBEDDING).unwrap());
    assert_eq!(read_config(&output.path().join("config.json")).unwrap()["tie_word_embeddings"], false);
}

#[test]
fn rows_of_a_tied_head_are_refused_with_the_reason() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), true, Dtype::F32);
    let merge =
        |tables: &[&str]| merge(folder.path(), &[whole(&token_rows(tables))], output.path(), MergeOptions::default());
    for tables in [&["model.embed_tokens", "lm_head"][..], &["lm_head"]] {
        let error = merge(tables).unwrap_err();
        assert!(matches!(error, MergeError::TiedRows), "{error}");
    }
    assert!(!merge(&["model.embed_tokens"]).unwrap().untied_head);
}

#[test]
fn another_dtype_can_be_asked_for() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::F32);
    let options = MergeOptions { dtype: Some(Dtype::F16), ..MergeOptions::default() };
    merge(folder.path(), &[whole(&adapter(&[(Q, 8, 8)]))], output.path(), options).unwrap();
    let after = Checkpoint::open(output.path()).unwrap();
    assert!(after.tensors().all(|(_, info)| info.dtype == Dtype::F16));
    assert_eq!(read_config(&output.path().join("config.json")).unwrap()["torch_dtype"], "float16");
}

#[test]
fn a_value_that_a_type_cannot_hold_is_an_error() {
    let mut bytes = [0; 4];
    let mut encoded = |dtype, value: f32| {
        let fits = encode("w", dtype, &[1.0, value], &mut bytes);
        let stored = [bytes[2], bytes[3]];
        let finite = match dtype {
            Dtype::F16 => half::f16::from_le_bytes(stored).is_finite(),
            _ => half::bf16::from_le_bytes(stored).is_finite(),
        };
        (fits.is_ok(), finite)
    };
    for (dtype, greatest, least_beyond) in
        [(Dtype::F16, 65_519.996, 65_520.0), (Dtype::BF16, f32::from_bits(0x7f7f_7fff), f32::from_bits(0x7f7f_8000))]
    {
        assert_eq!(encoded(dtype, greatest), (true, true), "{dtype}");
        assert_eq!(encoded(dtype, -least_beyond), (false, false), "{dtype}");
        assert_eq!(encoded(dtype, f32::INFINITY), (true, false), "it was so in the base");
    }
    let mut wide = [0; 8];
    assert!(encode("w", Dtype::F32, &[1.0, f32::MAX], &mut wide).is_ok());
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_before_anything_is_written() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::F32);
    let refuse = |adapters: &[WeightedAdapter<'_>], base_model| {
        let options = MergeOptions { base_model, ..MergeOptions::default() };
        let error = merge(folder.path(), adapters, output.path(), options).unwrap_err();
        assert_eq!(std::fs::read_dir(output.path()).unwrap().count(), 0);
        error
    };
    let wide = adapter(&[(Q, 8, 10)]);
    assert!(matches!(refuse(&[whole(&wide)], None), MergeError::WrongShape { adapter, .. } if adapter == [8, 10]));
    let unknown = adapter(&[("model.layers.0.self_attn.q_prj", 8, 8)]);
    assert!(matches!(refuse(&[whole(&unknown)], None), MergeError::UnknownModule { nearest, .. } if nearest == Q));
    let mut named = adapter(&[(Q, 8, 8)]);
    named.config.base_model = Some("meta-llama/Llama-3.1-8B".to_owned());
    let other = refuse(&[whole(&named)], Some("Qwen/Qwen2-7B")).to_string();
    assert_eq!(other, "the adapter was trained on `meta-llama/Llama-3.1-8B`, not on `Qwen/Qwen2-7B`");
    let mut dora = adapter(&[(Q, 8, 8)]);
    dora.modules.get_mut(Q).unwrap().magnitude = Some(vec![1.0; 8]);
    let half = WeightedAdapter { adapter: &dora, weight: 0.5 };
    assert!(matches!(refuse(&[half], None), MergeError::DoraCombined { .. }));
    assert!(matches!(refuse(&[whole(&dora), whole(&dora)], None), MergeError::DoraCombined { .. }));
    assert!(matches!(refuse(&[], None), MergeError::NoAdapter));
    let rows = token_rows(&["model.embed_tokens"]);
    let half = WeightedAdapter { adapter: &rows, weight: 0.5 };
    let of_embedding =
        |error: MergeError| matches!(error, MergeError::RowsCombined { module } if module == "model.embed_tokens");
    assert!(of_embedding(refuse(&[half], None)));
    assert!(of_embedding(refuse(&[whole(&rows), whole(&rows)], None)));
    let on_head = adapter(&[("lm_head", 20, 8)]);
    let beside = refuse(&[whole(&token_rows(&["lm_head"])), whole(&on_head)], None);
    assert!(matches!(beside, MergeError::RowsCombined { module } if module == "lm_head"));
    let mut broken = adapter(&[(Q, 8, 8)]);
    broken.modules.get_mut(Q).unwrap().lora_b[3] = f32::NAN;
    assert!(matches!(refuse(&[whole(&broken)], None), MergeError::AdapterNotFinite { module } if module == Q));
}
