//! Loading holds the decoder and about one tensor more. Alone in its process, whose peak is measured.

mod process_memory;

use std::sync::Arc;

use model::checkpoint::{Checkpoint, Dtype};
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::NewModel;
use model::ops::Compute;
use model::parameter::Trainability;
use process_memory::{MIB, forget_peak, status_bytes};
use test_harness::{Unmet, test};

test_harness::main!();

#[test]
fn peak_memory_is_the_decoder_and_two_of_its_largest_tensors() -> Result<(), Unmet> {
    let folder = tempfile::tempdir().expect("a folder");
    let model = NewModel {
        vocab_size: 16_384,
        hidden_size: 512,
        intermediate_size: 2048,
        num_hidden_layers: 24,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        ..NewModel::default()
    };
    model.write(folder.path(), 1, Dtype::BF16).expect("a model");
    let checkpoint = Checkpoint::open(folder.path()).expect("what was written");
    let sizes = checkpoint.tensors().map(|(_, info)| info.elements() as u64 * 2);
    let (largest, total) = sizes.fold((0, 0), |(largest, total), size| (size.max(largest), total + size));
    drop(checkpoint);
    let ops = Arc::new(Cpu::new(1, Compute::F32).expect("a kernel set"));

    forget_peak()?;
    let before = status_bytes("VmRSS");
    let decoder = Decoder::load(ops, folder.path(), Trainability::Frozen).expect("a decoder");
    let (peak, held) = (status_bytes("VmHWM") - before, status_bytes("VmRSS").saturating_sub(before));
    drop(decoder);
    println!(
        "{} MiB in bf16, largest tensor {} MiB: peak {} MiB, then {} MiB",
        total / MIB,
        largest / MIB,
        peak / MIB,
        held / MIB
    );
    assert!(peak < total + 2 * largest, "{} MiB for {} MiB of weights", peak / MIB, total / MIB);
    Ok(())
}
