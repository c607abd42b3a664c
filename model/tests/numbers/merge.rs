//! Merges proved: base with adapters beside the merged model, in every way in which an adapter can change a model.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
use model::config::{Config, HeadWeight};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::{Fill, NewModel, fresh_tensor};
use model::merge::{Merge, MergeOptions, MergeReport, Proof, ProofError, WeightedAdapter, merge};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::{Adapter, AdapterConfig, AdapterModule, SavedTensor};
use test_harness::test;

const VOCAB: usize = 60;
const Q: &str = "model.layers.0.self_attn.q_proj";
const DOWN: &str = "model.layers.1.mlp.down_proj";
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
}

fn ops() -> Arc<Cpu> {
    Arc::new(Cpu::new(2, Compute::F32).unwrap())
}

fn whole(adapter: &Adapter) -> WeightedAdapter<'_> {
    WeightedAdapter { adapter, weight: 1.0 }
}

fn batches() -> Vec<Batch> {
    let mut packed = Batch::text((0..20).map(|at| (11 * at + 3) % 59).collect());
    packed.document_lengths = vec![13, 7];
    vec![packed, Batch::text((0..9).map(|at| (5 * at + 1) % 59).collect())]
}

/// A model of two layers and 60 ids with weights that count.
fn base(folder: &Path, tie_word_embeddings: bool, dtype: Dtype) {
    let model = NewModel {
        vocab_size: VOCAB,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        tie_word_embeddings,
        initializer_range: 0.3,
        ..NewModel::default()
    };
    model.write(folder, 5, dtype).unwrap();
}

/// An adapter of this rank without a zero in it.
fn lora(seed: u64, rank: usize, modules: &[(&str, usize, usize)]) -> Adapter {
    let values = |name: String, count| fresh_tensor(seed, &name, count, Fill::Normal(0.2));
    let modules = modules.iter().map(|(name, out_features, in_features)| {
        let (out_features, in_features) = (*out_features, *in_features);
        let lora_a = values(format!("{name}.a"), rank * in_features);
        let lora_b = values(format!("{name}.b"), out_features * rank);
        ((*name).to_owned(), AdapterModule { rank, in_features, out_features, lora_a, lora_b, magnitude: None })
    });
    let config = AdapterConfig::new(rank, 8.0, vec![]);
    Adapter { config, modules: modules.collect(), saved_tensors: BTreeMap::new(), token_rows: BTreeMap::new() }
}

fn saved(tensors: &[(&str, &[usize])]) -> Adapter {
    let mut adapter = lora(3, 2, &[(Q, 16, 16)]);
    for (name, shape) in tensors {
        let values = fresh_tensor(9, name, shape.iter().product(), Fill::Normal(0.4));
        adapter.saved_tensors.insert((*name).to_owned(), SavedTensor { shape: shape.to_vec(), values });
        adapter.config.modules_to_save.push(name.trim_end_matches(".weight").to_owned());
    }
    adapter
}

fn merged(
    base: &Path,
    adapters: &[WeightedAdapter<'_>],
    output: &Path,
    dtype: Option<Dtype>,
    batches: &[Batch],
) -> (MergeReport, Proof) {
    let options = MergeOptions { dtype, ..MergeOptions::default() };
    let merge = Merge::new(base, adapters, options).unwrap();
    let report = merge.write(output, &mut |_| ControlFlow::Continue(())).unwrap();
    let proof = merge.prove(&ops(), output, batches, &mut |_| ControlFlow::Continue(())).unwrap();
    (report, proof)
}

fn is_tied(folder: &Path) -> bool {
    Config::read(folder).unwrap().head == HeadWeight::Tied
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

fn assert_close(found: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let bound = tolerance * largest(expected);
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= bound, "{what}: {found} and {expected}");
    }
}

#[test]
fn the_golden_adapters_are_proved() {
    for variant in [
        "llama31/lora/attention",
        "llama31/lora/all_linear",
        "llama31/lora/rslora",
        "llama31/lora/dora",
        "phi3/lora/attention",
    ] {
        let base = golden(variant).join("../..");
        let adapter = Adapter::load(&golden(variant).join("adapter")).unwrap();
        let output = tempfile::tempdir().unwrap();
        let (_, proof) = merged(&base, &[whole(&adapter)], output.path(), None, &batches());
        proof.check().unwrap();
        assert_eq!((proof.rows, proof.positions, proof.dtype.as_str()), (3, 29, "F32"));
        assert!(proof.merged.max_abs_logit_difference <= 1e-5 * proof.merged.max_abs_logit, "{variant}: {proof:?}");
        assert_eq!(proof.merged.top_1_agreement, 1.0);
        assert_eq!(proof.rounding.max_abs_logit_difference, 0.0);
    }
}

#[test]
fn weighted_adapters_are_the_cat_of_peft() {
    let family = golden("llama31");
    let expected = Checkpoint::open_file(&family.join("lora/weighted.safetensors")).unwrap();
    let ids = expected.bytes("check.input_ids").unwrap().as_chunks::<8>().0;
    let batch = Batch::text(ids.iter().map(|id| i64::from_le_bytes(*id) as u32).collect());
    let load = |variant: &str| Adapter::load(&family.join("lora").join(variant).join("adapter")).unwrap();
    let (attention, all_linear) = (load("attention"), load("all_linear"));
    let both =
        [WeightedAdapter { adapter: &attention, weight: 0.75 }, WeightedAdapter { adapter: &all_linear, weight: -0.5 }];
    let half = [WeightedAdapter { adapter: &attention, weight: 0.5 }];
    for (case, adapters) in [("both", both.as_slice()), ("half", half.as_slice())] {
        let output = tempfile::tempdir().unwrap();
        let (_, proof) = merged(&family, adapters, output.path(), None, std::slice::from_ref(&batch));
        proof.check().unwrap();
        let found = Checkpoint::open(output.path()).unwrap();
        for name in expected.names().filter_map(|name| name.strip_prefix(case)?.strip_prefix(".model.")) {
            let name = format!("model.{name}");
            let expected = expected.tensor_f32(&format!("{case}.{name}")).unwrap();
            assert_close(&found.tensor_f32(&name).unwrap(), &expected, 1e-6, &name);
        }
        let mut decoder = Decoder::load(ops(), output.path(), Trainability::Frozen).unwrap();
        let logits = decoder.logits(&batch).unwrap();
        for which in ["merged_logits", "adapted_logits"] {
            assert_close(&logits, &expected.tensor_f32(&format!("{case}.{which}")).unwrap(), 1e-4, which);
        }
        // The proof ran the very thing that PEFT ran: its greatest logit is PEFT's.
        let adapted = largest(&expected.tensor_f32(&format!("{case}.adapted_logits")).unwrap());
        assert!((proof.merged.max_abs_logit - adapted).abs() <= 1e-4 * adapted);
    }
}

#[test]
fn what_rounding_does_is_told_from_what_the_merge_does() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::F32);
    let adapter = lora(1, 4, &[(Q, 16, 16), (DOWN, 16, 24), ("lm_head", VOCAB, 16)]);
    for (dtype, name) in [(Dtype::BF16, "BF16"), (Dtype::F16, "F16")] {
        let (report, proof) = merged(folder.path(), &[whole(&adapter)], output.path(), Some(dtype), &batches());
        proof.check().unwrap();
        assert_eq!(proof.dtype, name);
        assert!(proof.before_rounding.max_abs_logit_difference <= 1e-5 * proof.merged.max_abs_logit);
        assert!(proof.rounding.max_abs_logit_difference > 1e-5 * proof.merged.max_abs_logit, "{proof:?}");
        assert!(proof.merged.max_abs_logit_difference <= 1.01 * proof.rounding.max_abs_logit_difference);
        for tensor in &report.merged {
            assert!(tensor.rounding_over_delta > 0.0 && tensor.rounding_over_delta < 0.1, "{tensor:?}");
        }
    }
    // A change below the last bit of the weights is lost, and said to be.
    let mut faint = lora(1, 4, &[(Q, 16, 16)]);
    faint.config.alpha = 1e-4;
    let (report, proof) = merged(folder.path(), &[whole(&faint)], output.path(), Some(Dtype::BF16), &batches());
    proof.check().unwrap();
    assert!(report.merged[0].rounding_over_delta > 1.0, "{report:?}");
}

#[test]
fn adapters_on_a_tied_head_untie_it_and_are_proved() {
    let folder = tempfile::tempdir().unwrap();
    for dtype in [Dtype::F32, Dtype::BF16] {
        base(folder.path(), true, dtype);
        assert!(is_tied(folder.path()));
        let before = Checkpoint::open(folder.path()).unwrap();
        let on_head = lora(2, 3, &[("lm_head", VOCAB, 16), (Q, 16, 16)]);
        let head = saved(&[(HEAD, &[VOCAB, 16])]);
        let embedding = saved(&[(EMBEDDING, &[VOCAB, 16])]);
        let both = saved(&[(HEAD, &[VOCAB, 16]), (EMBEDDING, &[VOCAB, 16])]);
        for (adapter, changes_embedding, changes_head) in
            [(&on_head, false, true), (&head, false, true), (&embedding, true, false), (&both, true, true)]
        {
            let output = tempfile::tempdir().unwrap();
            let (report, proof) = merged(folder.path(), &[whole(adapter)], output.path(), None, &batches());
            proof.check().unwrap();
            assert!(report.untied_head && !is_tied(output.path()));
            assert_eq!(report.replaced, adapter.saved_tensors.keys().cloned().collect::<Vec<_>>());
            let after = Checkpoint::open(output.path()).unwrap();
            let old = before.bytes(EMBEDDING).unwrap();
            assert_eq!(after.bytes(EMBEDDING).unwrap() != old, changes_embedding);
            assert_eq!(after.bytes(HEAD).unwrap() != old, changes_head);
            // The adapter on the decoder does the same as the merge.
            let mut decoder = Decoder::load(ops(), folder.path(), Trainability::Frozen).unwrap();
            decoder.attach(adapter).unwrap();
            let mut merged = Decoder::load(ops(), output.path(), Trainability::Frozen).unwrap();
            let tolerance = if dtype == Dtype::F32 { 1e-5 } else { 5e-2 };
            let batch = &batches()[0];
            assert_close(&merged.logits(batch).unwrap(), &decoder.logits(batch).unwrap(), tolerance, "logits");
        }
    }
}

#[test]
fn modules_that_were_trained_whole_replace_those_of_the_base() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::F32);
    let norm = "model.layers.1.input_layernorm.weight";
    let adapter = saved(&[(HEAD, &[VOCAB, 16]), (norm, &[16]), ("model.layers.1.mlp.up_proj.weight", &[24, 16])]);
    let (report, proof) = merged(folder.path(), &[whole(&adapter)], output.path(), None, &batches());
    proof.check().unwrap();
    assert!(!report.untied_head);
    assert_eq!((report.merged.len(), report.replaced.len()), (1, 3));
    let after = Checkpoint::open(output.path()).unwrap();
    for (name, SavedTensor { values, .. }) in &adapter.saved_tensors {
        assert_eq!(after.tensor_f32(name).unwrap(), *values, "{name}");
    }
}

#[test]
fn a_base_in_shards_of_f16_stays_what_it_is() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::F16);
    let whole_base = Checkpoint::open(folder.path()).unwrap();
    let sharded = tempfile::tempdir().unwrap();
    let specs = whole_base.tensors().map(|(name, info)| TensorSpec::new(name, info.dtype, &info.shape)).collect();
    let mut writer = CheckpointWriter::create(sharded.path(), specs, 2000).unwrap();
    whole_base.names().for_each(|name| writer.write_bytes(name, whole_base.bytes(name).unwrap()).unwrap());
    assert!(writer.finish().unwrap().len() > 3);
    std::fs::copy(folder.path().join("config.json"), sharded.path().join("config.json")).unwrap();

    let adapter = lora(1, 4, &[(Q, 16, 16), (DOWN, 16, 24)]);
    let (_, proof) = merged(sharded.path(), &[whole(&adapter)], output.path(), None, &batches());
    proof.check().unwrap();
    let after = Checkpoint::open(output.path()).unwrap();
    assert_eq!(after.files().count(), 1, "shards are cut anew");
    assert!(after.names().eq(whole_base.names()));
    assert!(after.tensors().all(|(_, info)| info.dtype == Dtype::F16));
    for name in after.names().filter(|name| !name.contains("q_proj") && !name.contains("1.mlp.down_proj")) {
        assert_eq!(after.bytes(name).unwrap(), whole_base.bytes(name).unwrap(), "{name}");
    }
}

#[test]
fn a_merged_model_that_computes_something_else_is_found_and_the_layer_named() {
    let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    base(folder.path(), false, Dtype::BF16);
    let adapter = lora(1, 4, &[(Q, 16, 16), (DOWN, 16, 24)]);
    let adapters = [whole(&adapter)];
    let check = Merge::new(folder.path(), &adapters, MergeOptions::default()).unwrap();
    // What a merge that forgets its adapter in layer 1 writes, and one that forgets that of the head.
    let forgetful = lora(1, 4, &[(Q, 16, 16)]);
    merge(folder.path(), &[whole(&forgetful)], output.path(), MergeOptions::default()).unwrap();
    let prove = |merge: &Merge<'_>| {
        merge.prove(&ops(), output.path(), &batches(), &mut |_| ControlFlow::Continue(())).unwrap().check().unwrap_err()
    };
    let found = prove(&check);
    assert!(matches!(found, ProofError::Differs { layer: Some(1), .. }), "{found}");
    assert!(found.to_string().contains("the outputs of layer 1 differ by"), "{found}");
    let on_head = lora(1, 4, &[(Q, 16, 16), ("lm_head", VOCAB, 16)]);
    let adapters = [whole(&on_head)];
    let check = Merge::new(folder.path(), &adapters, MergeOptions::default()).unwrap();
    let found = prove(&check);
    assert!(matches!(found, ProofError::Differs { layer: None, .. }), "{found}");
    let none = check.prove(&ops(), output.path(), &[], &mut |_| ControlFlow::Continue(()));
    assert!(matches!(none, Err(ProofError::NoToken)));
    let stopped = check.prove(&ops(), output.path(), &batches(), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(ProofError::Stopped)));
}
