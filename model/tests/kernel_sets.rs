//! One suite for all kernel sets: every operation and every block of each set against the `cpu` set, over odd shapes.
//!
//! The `candle` set's blocks are also compared with what candle's autograd makes of a naive forward, which shares no line with
//! either set.

#[path = "kernel_sets/autograd.rs"]
mod autograd;
#[path = "kernel_sets/case.rs"]
mod case;
#[path = "kernel_sets/operations.rs"]
mod operations;

use candle_core::Device;
use case::{Case, Results};
use model::candle::Candle;
use model::cpu::{Cpu, InstructionSet};
use model::ops::Compute;

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

#[test]
fn every_instruction_set_of_cpu_agrees() {
    for set in [InstructionSet::Portable, InstructionSet::Avx2, InstructionSet::Avx512] {
        let Ok(ops) = Cpu::with_instructions(1, Compute::F32, set) else {
            eprintln!("skipped: this machine has no {} instructions", set.name());
            continue;
        };
        for case in Case::all() {
            let what = format!("{} {case:?}", set.name());
            assert_close(&what, &operations::run(&ops, &case), &operations::run(&cpu(), &case), TOLERANCE);
            assert_close(&what, &case.run_blocks(&ops), &case.run_blocks(&cpu()), TOLERANCE);
        }
    }
}

#[test]
fn block_gradients_are_those_of_autograd() {
    for case in Case::all() {
        let expected = autograd::run_blocks(&case).expect("candle computes on the processor");
        assert_close(&format!("candle {case:?}"), &case.run_blocks(&candle()), &expected, TOLERANCE);
        assert_close(&format!("cpu {case:?}"), &case.run_blocks(&cpu()), &expected, TOLERANCE);
    }
}

/// bf16 operands, f32 sums: within what rounding the operands to 8 bits allows.
#[test]
fn bf16_of_candle_stays_near_f32() {
    let bf16 = Candle::new(Device::Cpu, Compute::Bf16);
    for case in Case::all() {
        let (found, expected) = (case.run_blocks(&bf16), case.run_blocks(&candle()));
        assert_close(&format!("{case:?}"), &found, &expected, 0.06);
        assert_ne!(found, expected, "something was rounded");
    }
}
