//! Merging holds about one tensor in memory and proving it about one layer, however large the model. Alone in its
//! process, whose peak is measured.

mod process_memory;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use model::batch::Batch;
use model::checkpoint::{Checkpoint, Dtype};
use model::config::Config;
use model::cpu::Cpu;
use model::init::NewModel;
use model::merge::{Merge, MergeOptions, WeightedAdapter};
use model::ops::Compute;
use model::peft::{Adapter, AdapterConfig, AdapterModule};
use process_memory::{MIB, forget_peak, status_bytes};
use test_harness::{Unmet, test};

test_harness::main!();

#[test]
fn peak_memory_is_two_of_the_largest_tensors_and_two_layers() -> Result<(), Unmet> {
    let (base, output) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let model = NewModel {
        vocab_size: 16_384,
        hidden_size: 512,
        intermediate_size: 2048,
        num_hidden_layers: 12,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        ..NewModel::default()
    };
    model.write(base.path(), 1, Dtype::BF16).expect("a model");
    let checkpoint = Checkpoint::open(base.path()).expect("what was written");
    let sizes = checkpoint.tensors().map(|(_, info)| info.size_bytes() as u64);
    let (largest, total) = sizes.fold((0, 0), |(largest, total), size| (size.max(largest), total + size));
    assert_eq!(largest, 16 * MIB);
    assert!(total > 6 * largest);
    drop(checkpoint);

    let on = |in_features: usize, out_features: usize| AdapterModule {
        rank: 4,
        in_features,
        out_features,
        lora_a: vec![0.01; 4 * in_features],
        lora_b: vec![0.01; out_features * 4],
        magnitude: None,
    };
    let mut modules: BTreeMap<String, AdapterModule> =
        (0..12).map(|layer| (format!("model.layers.{layer}.mlp.down_proj"), on(2048, 512))).collect();
    modules.insert("lm_head".to_owned(), on(512, 16_384));
    let adapter = Adapter {
        config: AdapterConfig::new(4, 8.0, vec![]),
        modules,
        saved_tensors: Default::default(),
        token_rows: Default::default(),
    };

    let adapters = [WeightedAdapter { adapter: &adapter, weight: 1.0 }];
    for dtype in [None, Some(Dtype::F16)] {
        let options = MergeOptions { dtype, ..MergeOptions::default() };
        let merge = Merge::new(base.path(), &adapters, options).expect("an adapter that fits");
        let peak = peak_of(|| {
            merge.write(output.path(), &mut |_| ControlFlow::Continue(())).expect("a merge");
        })?;
        assert!(peak < 2 * largest, "{} MiB for tensors of up to {} MiB", peak / MIB, largest / MIB);

        let ops = Arc::new(Cpu::new(2, Compute::F32).expect("threads"));
        let batches = [Batch::text((0..96).map(|at| (997 * at) % 16_384).collect())];
        let proof = |_| ControlFlow::Continue(());
        let peak = peak_of(|| {
            let proof = merge.prove(&ops, output.path(), &batches, &mut { proof }).expect("a proof");
            proof.check().expect("what was merged");
        })?;
        let config = Config::read(base.path()).expect("what was written");
        let layer: u64 = config.layer_modules().iter().map(|module| 4 * module.weights()).sum();
        let bound = 2 * largest + 2 * layer;
        assert!(bound < total, "the bound says nothing");
        assert!(peak < bound, "{} MiB where {} MiB are promised", peak / MIB, bound / MIB);
    }
    Ok(())
}

/// The peak of the process's memory in a piece of work, above what it had before.
fn peak_of(work: impl FnOnce()) -> Result<u64, Unmet> {
    forget_peak()?;
    let before = status_bytes("VmRSS");
    work();
    let peak = status_bytes("VmHWM").saturating_sub(before);
    eprintln!("peak: {} MiB", peak / MIB);
    Ok(peak)
}
