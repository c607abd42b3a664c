//! Fake quantisation against torchao: values and scales bit for bit, a linear layer forward and backward, steps of SGD.
//!
//! The cases are made by `tests/reference/make_golden_qat.py`.

use std::collections::BTreeMap;
use std::path::Path;

use model::adapter::{Projection, ProjectionSaved};
use model::blocks::OfRows;
use model::candle::Candle;
use model::cpu::Cpu;
use model::ops::{Compute, Ops, WeightRole, Write};
use model::parameter::Matrix;
use model::weights::FakeQuantization;
use safetensors::SafeTensors;
use test_harness::test;

/// Tensors of all cases, and the group size of each case.
struct Golden {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    groups: BTreeMap<String, usize>,
    rate: f32,
}

fn golden() -> Golden {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/qat/linear.safetensors");
    let bytes = std::fs::read(file).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let said = metadata.metadata().clone().unwrap();
    let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = tensors
        .tensors()
        .into_iter()
        .map(|(name, tensor)| (name, (tensor.shape().to_vec(), tensor.data().chunks(4).map(float).collect())));
    Golden {
        tensors: tensors.collect(),
        groups: serde_json::from_str(&said["groups"]).unwrap(),
        rate: said["rate"].parse().unwrap(),
    }
}

impl Golden {
    /// The cases: name, group size of weights, values of a token.
    fn cases(&self) -> impl Iterator<Item = (&str, FakeQuantization, FakeQuantization)> {
        assert_eq!(self.groups.len(), 3);
        self.groups.iter().map(|(case, group_size)| {
            let features = self.tensors[&format!("{case}.x")].0[1];
            let weights = FakeQuantization::Int4Weights { group_size: *group_size };
            (case.as_str(), weights, FakeQuantization::Int8Activations { features })
        })
    }

    fn of(&self, case: &str, name: &str) -> &[f32] {
        &self.tensors[&format!("{case}.{name}")].1
    }

    fn shape(&self, case: &str, name: &str) -> &[usize] {
        &self.tensors[&format!("{case}.{name}")].0
    }
}

fn moved(quantization: FakeQuantization, values: &[f32]) -> Vec<f32> {
    let mut values = values.to_vec();
    quantization.forward(&mut values);
    values
}

/// `left · right`, `left` being `[rows, inner]` and `right` `[inner, columns]`, read through `(row, column)`.
fn product(
    [rows, inner, columns]: [usize; 3],
    left: impl Fn(usize, usize) -> f32,
    right: impl Fn(usize, usize) -> f32,
) -> Vec<f32> {
    let sum = |row, column| (0..inner).map(|k| f64::from(left(row, k)) * f64::from(right(k, column))).sum::<f64>();
    (0..rows * columns).map(|index| sum(index / columns, index % columns) as f32).collect()
}

/// The gradient of the weight, `[out, in]`, of a layer that fake-quantises both operands.
fn weight_gradient(golden: &Golden, case: &str, weight: &[f32], of: [FakeQuantization; 2]) -> Vec<f32> {
    let [rows, features] = golden.shape(case, "x") else { panic!("no matrix") };
    let out = golden.shape(case, "weight")[0];
    let (x, dy) = (moved(of[1], golden.of(case, "x")), golden.of(case, "dy"));
    let mut gradient = product([out, *rows, *features], |o, row| dy[row * out + o], |row, i| x[row * features + i]);
    of[0].backward(weight, &mut gradient);
    gradient
}

#[track_caller]
fn assert_near(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() <= 2e-6 * largest, "{what}[{index}]: {found} for {expected}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    // The sign of a zero says nothing.
    values.iter().map(|value| (value + 0.0).to_bits()).collect()
}

#[test]
fn values_and_scales_are_torchaos() {
    let golden = golden();
    for (case, weights, activations) in golden.cases() {
        assert_eq!(bits(&moved(activations, golden.of(case, "x"))), bits(golden.of(case, "x_fake")), "{case}");
        assert_eq!(bits(&moved(weights, golden.of(case, "weight"))), bits(golden.of(case, "weight_fake")), "{case}");
        let scales: Vec<f32> = weights.grids(golden.of(case, "weight")).map(|grid| grid.scale).collect();
        assert_eq!(bits(&scales), bits(golden.of(case, "scales")), "{case}");
    }
}

#[test]
fn a_layer_is_torchaos_forward_and_backward() {
    let golden = golden();
    for (case, weights, activations) in golden.cases() {
        let (x, weight, dy) = (golden.of(case, "x"), golden.of(case, "weight"), golden.of(case, "dy"));
        let [rows, features] = golden.shape(case, "x") else { panic!("no matrix") };
        let out = golden.shape(case, "weight")[0];
        let (fake_x, fake_weight) = (moved(activations, x), moved(weights, weight));
        let y =
            product([*rows, *features, out], |row, i| fake_x[row * features + i], |i, o| fake_weight[o * features + i]);
        assert_near(case, &y, golden.of(case, "y"));
        let mut dx = product([*rows, out, *features], |row, o| dy[row * out + o], |o, i| fake_weight[o * features + i]);
        activations.backward(x, &mut dx);
        assert_near(case, &dx, golden.of(case, "dx"));
        let gradient = weight_gradient(&golden, case, weight, [weights, activations]);
        assert_near(case, &gradient, golden.of(case, "dweight"));
        let stopped = |gradient: &[f32]| gradient.iter().filter(|value| **value == 0.0).count();
        assert_eq!(stopped(&gradient), stopped(golden.of(case, "dweight")), "{case}");
        assert_ne!(stopped(&gradient), 0, "{case} has a largest weight that is positive");
    }
}

#[test]
fn a_projection_is_torchaos_on_every_kernel_set() {
    projections_are_torchaos(&Cpu::new(1, Compute::F32).unwrap());
    projections_are_torchaos(&Cpu::new(3, Compute::F32).unwrap());
    projections_are_torchaos(&Candle::on_processor());
}

fn projections_are_torchaos<B: Ops>(ops: &B) {
    let golden = golden();
    for (case, weights, _) in golden.cases() {
        let (shape, weight) = (golden.shape(case, "weight"), golden.of(case, "weight"));
        let [rows, features] = golden.shape(case, "x") else { panic!("no matrix") };
        let mut matrix =
            Matrix::trainable(ops, "layer.weight", [shape[0], shape[1]], WeightRole::Matrix, weight).unwrap();
        matrix.trained.as_mut().unwrap().train(ops, &[]).unwrap();
        let mut projection = Projection::new(matrix, None);
        projection.fake_quantization = Some(weights);
        projection.refresh(ops).unwrap();
        let x = ops.tensor(*rows, *features, golden.of(case, "x")).unwrap();
        let dy = ops.tensor(*rows, shape[0], golden.of(case, "dy")).unwrap();
        let (mut y, mut saved) = (B::Tensor::default(), ProjectionSaved::default());
        let alone = OfRows { draws: None, adapters: &[] };
        projection.forward(ops, &x, alone, Write::Replace, &mut y, &mut saved).unwrap();
        assert_near(case, &ops.read(&y).unwrap(), golden.of(case, "y"));
        // Added to what is there, as in a block.
        let mut dx = ops.tensor(*rows, *features, &vec![1.0; rows * features]).unwrap();
        projection.backward(ops, &saved, &x, None, &dy, Some((Write::Add, &mut dx))).unwrap();
        let dx: Vec<f32> = ops.read(&dx).unwrap().iter().map(|value| value - 1.0).collect();
        let expected = golden.of(case, "dx");
        let apart = dx.iter().zip(expected).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
        assert!(apart < 1e-5 * expected.iter().fold(1.0f32, |most, value| most.max(value.abs())), "{case}: {apart}");
        let training = projection.matrix.trained.as_ref().unwrap().training.as_ref().unwrap();
        let mut gradient = ops.read(&training.gradient).unwrap();
        weights.backward(weight, &mut gradient);
        assert_near(case, &gradient, golden.of(case, "dweight"));
    }
}

/// Each step starts from torchao's weights: the largest of a group is 7.5 scales but for the last bit, which decides
/// whether it moves, so that two sums in different orders soon part.
#[test]
fn steps_move_the_weights_beneath_the_grid_as_torchaos() {
    let golden = golden();
    for (case, weights, activations) in golden.cases() {
        for (from, to) in [("weight", "steps.0"), ("steps.0", "steps.1"), ("steps.1", "steps.2")] {
            let mut weight = golden.of(case, from).to_vec();
            let gradient = weight_gradient(&golden, case, &weight, [weights, activations]);
            weight.iter_mut().zip(gradient).for_each(|(weight, gradient)| *weight -= golden.rate * gradient);
            assert_near(&format!("{case}, {to}"), &weight, golden.of(case, to));
        }
    }
}

#[test]
fn the_values_of_a_grid_stay_where_they_are() {
    let values: Vec<f32> = (0..256).map(|index| ((index * 37) % 101) as f32 / 50.0 - 1.0).collect();
    let grid = FakeQuantization::Int8Activations { features: 256 }.grids(&values).next().unwrap();
    for value in &values {
        let nearest = grid.nearest(*value);
        assert_eq!(grid.nearest(nearest).to_bits(), nearest.to_bits());
        assert!(!grid.passes(*value) || (nearest - value).abs() <= grid.scale * 0.5001);
    }
}

#[test]
fn what_is_not_finite_does_not_look_like_a_number() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for of in [FakeQuantization::Int4Weights { group_size: 4 }, FakeQuantization::Int8Activations { features: 4 }] {
            assert!(moved(of, &[1.0, bad, 2.0, 3.0])[1].is_nan(), "{of:?} of {bad}");
        }
    }
}
