//! Compares the optimizers of every kernel set with torch's, step by step.

use std::collections::BTreeMap;
use std::fmt;

use half::bf16;
use model::candle::Candle;
use model::cpu::InstructionSet;
use model::ops::{Compute, Ops};
use model::optimizer::{
    AdamW, AdamW8bit, EmbeddingState, MomentDtype, Optimizer, Sgd, StateTensor, StateValues, Step, TensorInfo, Updated,
};
use safetensors::SafeTensors;
use serde::Deserialize;
use test_harness::{Unmet, test};

use crate::support::cpu_with;

const GOLDEN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/optimizers.json"));

/// What `tests/reference/make_golden_optimizers.py` writes.
#[derive(Deserialize)]
struct Golden {
    optimizers: Optimizers,
}

#[derive(Deserialize)]
struct Optimizers {
    start: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    learning_rates: Vec<f64>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    settings: Settings,
    values: Vec<Vec<f32>>,
    exp_avg: Vec<Vec<f32>>,
    exp_avg_sq: Vec<Vec<f32>>,
}

/// AdamW's or SGD's.
#[derive(Deserialize)]
struct Settings {
    betas: Option<(f64, f64)>,
    #[serde(default)]
    eps: f64,
    weight_decay: f64,
    #[serde(default)]
    momentum: f64,
    #[serde(default)]
    dampening: f64,
    #[serde(default)]
    nesterov: bool,
}

impl Settings {
    fn optimizer(&self) -> Optimizer {
        let Self { betas, eps, weight_decay, momentum, dampening, nesterov } = *self;
        match betas {
            Some(betas) => AdamW { betas, eps, weight_decay, ..AdamW::default() }.into(),
            None => Sgd { momentum, dampening, nesterov, weight_decay }.into(),
        }
    }
}

/// A check of a kernel set.
trait Check {
    fn run<B: Ops>(&self, ops: &B);
}

/// What is checked.
#[derive(Clone, Copy)]
enum KernelSet {
    Cpu(InstructionSet),
    Candle,
}

impl KernelSet {
    fn all() -> impl Iterator<Item = Self> {
        InstructionSet::ALL.into_iter().map(Self::Cpu).chain([Self::Candle])
    }

    /// Fails where this machine lacks its instructions.
    fn check(self, check: &impl Check) -> Result<(), Unmet> {
        match self {
            Self::Cpu(set) => check.run(&cpu_with(1, Compute::F32, set)?),
            Self::Candle => check.run(&Candle::on_processor()),
        }
        Ok(())
    }
}

impl fmt::Display for KernelSet {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(set) => write!(to, "cpu {set}"),
            Self::Candle => write!(to, "candle"),
        }
    }
}

/// A tensor in training by an optimizer.
struct Trained<'a, B: Ops> {
    ops: &'a B,
    optimizer: Optimizer,
    name: &'a str,
    shape: Vec<usize>,
    value: B::Tensor,
    state: Vec<StateTensor<B::Tensor>>,
    steps: u64,
}

impl<'a, B: Ops> Trained<'a, B> {
    fn new(ops: &'a B, optimizer: Optimizer, name: &'a str, shape: &[usize], start: &[f32]) -> Self {
        let columns = shape[shape.len() - 1];
        let rows = start.len() / columns;
        let specs = optimizer.state(TensorInfo { name, shape });
        let state = specs.into_iter().map(|spec| StateTensor::new(ops, spec, rows, columns).unwrap()).collect();
        let value = ops.tensor(rows, columns, start).unwrap();
        Self { ops, optimizer, name, shape: shape.to_vec(), value, state, steps: 0 }
    }

    fn step(&mut self, gradient: &[f32], learning_rate: f64) {
        self.steps += 1;
        // Half of it, with a factor of two: the factor has to act before everything else.
        let half: Vec<f32> = gradient.iter().map(|value| value / 2.0).collect();
        let (rows, columns) = self.ops.shape(&self.value);
        let gradient = self.ops.tensor(rows, columns, &half).unwrap();
        let step = Step { learning_rate, number: self.steps, gradient_scale: 2.0 };
        let tensor = TensorInfo { name: self.name, shape: &self.shape };
        let updated = Updated { value: &mut self.value, gradient: &gradient, state: &mut self.state };
        self.optimizer.update(self.ops, &step, tensor, updated).unwrap();
    }

    fn value(&self) -> Vec<f32> {
        self.ops.read(&self.value).unwrap()
    }

    /// The state by the names of its sets.
    fn state(&self) -> BTreeMap<String, StateValues> {
        let mut found = BTreeMap::new();
        for state in &self.state {
            for (index, set) in state.saved_sets(self.ops).into_iter().enumerate() {
                found.insert(set.name, state.read(self.ops, index).unwrap());
            }
        }
        found
    }

    /// A set of the state that is f32; empty where there is none.
    fn moment(&self, name: &str) -> Vec<f32> {
        match self.state().remove(name) {
            Some(StateValues::F32(values)) => values,
            Some(other) => panic!("{name} is {:?}", other.dtype()),
            None => Vec::new(),
        }
    }

    /// Overwrites a state tensor of one set.
    fn restore_one(&mut self, name: &str, values: StateValues) {
        let ops = self.ops;
        let state = self.state.iter_mut().find(|state| state.saved_sets(ops)[0].name == name).unwrap();
        state.write(ops, 0, &values).unwrap();
    }

    /// Overwrites the state with what was saved.
    fn restore(&mut self, saved: &BTreeMap<String, StateValues>) {
        for state in &mut self.state {
            for (index, set) in state.saved_sets(self.ops).into_iter().enumerate() {
                state.write(self.ops, index, &saved[&set.name]).unwrap();
            }
        }
    }
}

/// How far apart the values are, of the largest of those that are expected.
fn furthest(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let furthest = found.iter().zip(expected).fold(0.0f32, |furthest, (a, b)| furthest.max((a - b).abs()));
    if furthest == 0.0 { 0.0 } else { furthest / largest }
}

/// Steps as in the golden file.
struct StepsAsTorch;

#[test(each = KernelSet::all())]
fn every_kernel_set_steps_as_torch_does(set: KernelSet) -> Result<(), Unmet> {
    set.check(&StepsAsTorch)
}

impl Check for StepsAsTorch {
    fn run<B: Ops>(&self, ops: &B) {
        let Golden { optimizers } = serde_json::from_str(GOLDEN).unwrap();
        let size = optimizers.start.len();
        assert!(optimizers.cases.len() >= 7 && optimizers.gradients.len() == 10);
        for case in &optimizers.cases {
            let mut trained = Trained::new(ops, case.settings.optimizer(), "weight", &[size], &optimizers.start);
            let steps = optimizers.gradients.iter().zip(&optimizers.learning_rates);
            for (index, (gradient, &learning_rate)) in steps.enumerate() {
                trained.step(gradient, learning_rate);
                for (what, found, expected) in [
                    ("value", trained.value(), &case.values[index]),
                    ("exp_avg", trained.moment("exp_avg"), &case.exp_avg[index]),
                    ("exp_avg_sq", trained.moment("exp_avg_sq"), &case.exp_avg_sq[index]),
                ] {
                    let place = format!("{}: {} in step {}, {what}", ops.describe(), case.name, index + 1);
                    assert!(furthest(&found, expected) <= 1e-6, "{place}: {found:?} where {expected:?} is expected");
                }
            }
        }
    }
}

/// Cases of `tests/golden/optimizers/*.json`, from `tests/reference/make_golden_*.py` of their names.
#[derive(Deserialize)]
struct Described {
    cases: Vec<DescribedCase>,
}

#[derive(Deserialize)]
struct DescribedCase {
    name: String,
    optimizer: Optimizer,
    tensor: DescribedTensor,
    start: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    learning_rates: Vec<f64>,
    /// Share of the largest element by which values may differ.
    tolerance: f32,
    /// The same of the state; as of the values if left out.
    state_tolerance: Option<f32>,
    #[serde(default)]
    compare: Compare,
    values: Vec<Vec<f32>>,
    state: BTreeMap<String, Vec<Vec<f32>>>,
}

#[derive(Deserialize)]
struct DescribedTensor {
    name: String,
    shape: Vec<usize>,
}

/// What of the values is compared.
#[derive(Deserialize, Default, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Compare {
    #[default]
    Values,
    /// What each step changed.
    Updates,
}

struct StepsAsDescribed(Vec<DescribedCase>);

#[test(each = KernelSet::all())]
fn every_kernel_set_steps_as_the_references_of_further_optimizers_do(set: KernelSet) -> Result<(), Unmet> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/optimizers");
    let mut cases = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = std::fs::read_to_string(&path).unwrap();
            let described: Described = serde_json::from_str(&text).unwrap();
            assert!(!described.cases.is_empty(), "{}", path.display());
            cases.extend(described.cases);
        }
    }
    set.check(&StepsAsDescribed(cases))
}

impl Check for StepsAsDescribed {
    fn run<B: Ops>(&self, ops: &B) {
        for case in &self.0 {
            let tensor = &case.tensor;
            let mut trained = Trained::new(ops, case.optimizer, &tensor.name, &tensor.shape, &case.start);
            let (mut before, mut expected_before) = (case.start.clone(), &case.start);
            for (index, (gradient, &rate)) in case.gradients.iter().zip(&case.learning_rates).enumerate() {
                trained.step(gradient, rate);
                let (found, expected) = (trained.value(), &case.values[index]);
                let place = format!("{}: {:?}, {} in step {}", ops.describe(), case.optimizer, case.name, index + 1);
                let apart = match case.compare {
                    Compare::Values => furthest(&found, expected),
                    Compare::Updates => furthest(&changes(&before, &found), &changes(expected_before, expected)),
                };
                assert!(apart <= case.tolerance, "{place}: values differ by {apart:e}");
                assert!(trained.state().keys().eq(case.state.keys()), "{place}: {:?}", trained.state().keys());
                for (name, expected) in &case.state {
                    let apart = furthest(&trained.moment(name), &expected[index]);
                    assert!(apart <= case.state_tolerance.unwrap_or(case.tolerance), "{place}: {name} by {apart:e}");
                }
                (before, expected_before) = (found, expected);
            }
        }
    }
}

fn changes(before: &[f32], after: &[f32]) -> Vec<f32> {
    before.iter().zip(after).map(|(before, after)| after - before).collect()
}

/// Moments in bf16 are those of a step in f32, rounded, and the next step begins with them.
struct RoundedMoments;

#[test(each = KernelSet::all())]
fn moments_in_bf16_are_those_of_f32_rounded_after_each_step(set: KernelSet) -> Result<(), Unmet> {
    set.check(&RoundedMoments)
}

impl Check for RoundedMoments {
    fn run<B: Ops>(&self, ops: &B) {
        let Golden { optimizers } = serde_json::from_str(GOLDEN).unwrap();
        // More than a block.
        let repeated = |values: &[f32]| -> Vec<f32> {
            (0..301).map(|index| values[index % values.len()] * (1.0 + index as f32 / 77.0)).collect()
        };
        let start = repeated(&optimizers.start);
        let rounded = AdamW { state_dtype: MomentDtype::Bf16, ..AdamW::default() };
        let mut trained = Trained::new(ops, rounded.into(), "weight", &[7, 43], &start);
        let mut reference = Trained::new(ops, AdamW::default().into(), "weight", &[7, 43], &start);
        for (gradient, &rate) in optimizers.gradients.iter().zip(&optimizers.learning_rates) {
            let gradient = repeated(gradient);
            trained.step(&gradient, rate);
            reference.step(&gradient, rate);
            assert!(furthest(&trained.value(), &reference.value()) <= 1e-6);
            for (name, values) in reference.state() {
                let StateValues::F32(exact) = values else { panic!("{name}") };
                let StateValues::Bf16(found) = &trained.state()[&name] else { panic!("{name}") };
                // Kernel sets that compute with whole tensors associate the moments in another way.
                let apart =
                    found.iter().zip(&exact).map(|(found, exact)| found.to_f32() - bf16::from_f32(*exact).to_f32());
                let differ = apart.filter(|apart| *apart != 0.0).count();
                assert!(differ <= if ops.name() == "cpu" { 0 } else { 3 }, "{}: {differ} of {name}", ops.describe());
                let rounded = exact.iter().map(|value| bf16::from_f32(*value).to_f32()).collect();
                reference.restore_one(&name, StateValues::F32(rounded));
            }
        }
        assert_eq!(trained.optimizer.state_bytes(TensorInfo { name: "weight", shape: &[7, 43] }), 2 * 2 * 301);
    }
}

/// What `tests/reference/make_golden_adamw_8bit.py` writes.
struct StepsIn8Bits(Vec<u8>);

#[test(each = KernelSet::all())]
fn every_kernel_set_keeps_moments_in_8_bits_as_the_exact_reference(set: KernelSet) -> Result<(), Unmet> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/optimizers/adamw_8bit.safetensors");
    set.check(&StepsIn8Bits(std::fs::read(path).unwrap()))
}

impl Check for StepsIn8Bits {
    fn run<B: Ops>(&self, ops: &B) {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let bytes = |name: &str| file.tensor(name).unwrap().data().to_vec();
        let floats = |name: &str| -> Vec<f32> {
            bytes(name).as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
        };
        let optimizer = AdamW8bit { weight_decay: 0.1, ..AdamW8bit::default() };
        let start = floats("start");
        let mut trained = Trained::new(ops, optimizer.into(), "weight", &[start.len()], &start);
        for (step, rate) in [0.01, 0.02, 0.015, 0.005].into_iter().enumerate() {
            trained.step(&floats(&format!("gradient.{}", step + 1)), rate);
            let place = |what: &str| format!("{}: {what} in step {}", ops.describe(), step + 1);
            let expected = |name: &str| format!("{name}.{}", step + 1);
            let values = floats(&expected("value"));
            assert!(
                furthest(&changes(&start, &trained.value()), &changes(&start, &values)) <= 1e-6,
                "{}",
                place("value")
            );
            let state = trained.state();
            assert_eq!(state.len(), 4);
            for moment in ["exp_avg", "exp_avg_sq"] {
                let absmax = format!("{moment}_absmax");
                let StateValues::F32(found) = &state[&absmax] else { panic!("{}", place(&absmax)) };
                assert!(furthest(found, &floats(&expected(&absmax))) <= 1e-6, "{}", place(&absmax));
                let StateValues::U8(found) = &state[moment] else { panic!("{}", place(moment)) };
                let codes = bytes(&expected(moment));
                let differ = found.iter().zip(&codes).filter(|(found, code)| found != code).count();
                assert_eq!((found.len(), differ), (codes.len(), 0), "{}", place(moment));
            }
            // What is saved and taken up again goes on as if nothing had been.
            let mut resumed = Trained::new(ops, optimizer.into(), "weight", &[start.len()], &trained.value());
            resumed.restore(&state);
            resumed.steps = trained.steps;
            trained = resumed;
        }
        let bytes = |elements| trained.optimizer.state_bytes(TensorInfo { name: "weight", shape: &[elements] });
        // A byte for each moment, and an f32 for each of 17 blocks of both; small tensors keep theirs in f32.
        assert_eq!(bytes(start.len()), 2 * (4200 + 17 * 4));
        assert_eq!(bytes(4095), 8 * 4095);
        let of_embedding = |embedding_state| {
            let optimizer = Optimizer::from(AdamW8bit { embedding_state, ..AdamW8bit::default() });
            optimizer.state_bytes(TensorInfo { name: "model.embed_tokens.weight", shape: &[70, 60] })
        };
        assert_eq!(of_embedding(EmbeddingState::F32), 2 * 4 * 4200);
        assert_eq!(of_embedding(EmbeddingState::Int8), 2 * (4200 + 17 * 4));
    }
}
