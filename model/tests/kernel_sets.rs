//! One suite for all kernel sets: every operation and every block of each set against the `cpu` set, over odd shapes.
//!
//! The `candle` set's blocks are also compared with what candle's autograd makes of a naive forward, which shares no
//! line with either set.

#[path = "kernel_sets/autograd.rs"]
mod autograd;
#[path = "kernel_sets/case.rs"]
mod case;
#[path = "kernel_sets/fused.rs"]
mod fused;
#[path = "kernel_sets/operations.rs"]
mod operations;
mod support;

use candle_core::Device;
use case::{Case, Results};
use model::blocks::Blocks;
use model::candle::Candle;
use model::cpu::{Cpu, InstructionSet};
use model::ops::{Compute, Ops};
use support::cpu_with;
use test_harness::{Unmet, test};

test_harness::main!();

/// Results agree if they differ by at most this share of the greatest value of the tensor.
const TOLERANCE: f32 = 2e-5;

fn assert_close(what: &str, found: &Results, expected: &Results, tolerance: f32) {
    assert!(found.keys().eq(expected.keys()), "{what}: {:?} where {:?}", found.keys(), expected.keys());
    for (name, expected) in expected {
        let found = &found[name];
        assert_eq!(found.len(), expected.len(), "{what}: length of {name}");
        let largest = expected.iter().fold(1e-6, |largest: f32, value| largest.max(value.abs()));
        for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
            // Infinities are equal or not; their difference says nothing.
            let close = found == expected || (found - expected).abs() <= tolerance * largest;
            assert!(close, "{what}: {name}[{index}] is {found} where {expected} is expected (largest {largest})");
        }
    }
}

fn cpu() -> Cpu {
    Cpu::new(2, Compute::F32).expect("two threads")
}

fn candle() -> Candle {
    Candle::new(Device::Cpu, Compute::F32)
}

#[test]
fn every_operation_of_candle_is_that_of_cpu() {
    for case in Case::all() {
        let (found, expected) = (operations::run(&candle(), &case), operations::run(&cpu(), &case));
        assert_close(&format!("{case:?}"), &found, &expected, TOLERANCE);
    }
}

#[test]
fn every_block_of_candle_is_that_of_cpu() {
    for case in Case::all() {
        let (found, expected) = (case.run_blocks(&candle()), case.run_blocks(&cpu()));
        assert_close(&format!("{case:?}"), &found, &expected, TOLERANCE);
    }
}

#[test(each = InstructionSet::ALL)]
fn every_instruction_set_of_cpu_agrees(set: InstructionSet) -> Result<(), Unmet> {
    let ops = cpu_with(1, Compute::F32, set)?;
    for case in Case::all() {
        let what = format!("{set} {case:?}");
        assert_close(&what, &operations::run(&ops, &case), &operations::run(&cpu(), &case), TOLERANCE);
        assert_close(&what, &case.run_blocks(&ops), &case.run_blocks(&cpu()), TOLERANCE);
    }
    Ok(())
}

#[test]
fn block_gradients_are_those_of_autograd() {
    for case in Case::all() {
        let expected = autograd::run_blocks(&case).expect("candle computes on the processor");
        assert_close(&format!("candle {case:?}"), &case.run_blocks(&candle()), &expected, TOLERANCE);
        assert_close(&format!("cpu {case:?}"), &case.run_blocks(&cpu()), &expected, TOLERANCE);
    }
}

/// Attention in bf16 differs by at most this share of the greatest value: its weights are rounded between its products,
/// where a last digit of f32 may decide; and candle's attention stays in f32.
const OF_ATTENTION: f32 = 0.03;

/// In bf16 an operation rounds what it is given, and from then on sums in f32: all sets and instructions agree as
/// closely as in f32. (Blocks do not, nor does attention: a last digit of f32 may decide how an operand in their middle
/// is rounded.)
#[test(each = InstructionSet::ALL)]
fn every_operation_in_bf16_is_that_of_portable(set: InstructionSet) -> Result<(), Unmet> {
    is_that_of_portable(&cpu_with(2, Compute::Bf16, set)?);
    Ok(())
}

#[test]
fn every_operation_of_candle_in_bf16_is_that_of_portable() {
    is_that_of_portable(&Candle::new(Device::Cpu, Compute::Bf16));
}

fn is_that_of_portable(ops: &impl Ops) {
    let portable = Cpu::with_instructions(1, Compute::Bf16, InstructionSet::Portable).expect("a thread");
    for case in Case::all() {
        let (expected, expected_of_attention) = attention_apart(operations::run(&portable, &case));
        let (found, of_attention) = attention_apart(operations::run(ops, &case));
        let what = format!("{} {case:?}", ops.describe());
        assert_close(&what, &found, &expected, TOLERANCE);
        assert_close(&what, &of_attention, &expected_of_attention, OF_ATTENTION);
    }
}

/// All results but those of attention, and those.
fn attention_apart(results: Results) -> (Results, Results) {
    let of_attention = ["attention", "logsumexp", "dq", "dk", "dv"];
    results.into_iter().partition(|(name, _)| !of_attention.contains(&name.split(' ').next().unwrap_or_default()))
}

/// bf16 operands, f32 sums: within what rounding the operands to 8 bits allows.
#[test(each = InstructionSet::ALL)]
fn every_block_in_bf16_stays_near_f32(set: InstructionSet) -> Result<(), Unmet> {
    stays_near_f32(&cpu_with(2, Compute::Bf16, set)?);
    Ok(())
}

#[test]
fn every_block_of_candle_in_bf16_stays_near_f32() {
    stays_near_f32(&Candle::new(Device::Cpu, Compute::Bf16));
}

fn stays_near_f32(ops: &impl Blocks) {
    for case in Case::all() {
        let (found, expected) = (case.run_blocks(ops), case.run_blocks(&cpu()));
        assert_close(&format!("{} {case:?}", ops.describe()), &found, &expected, 0.06);
        assert_ne!(found, expected, "something was rounded");
    }
}
