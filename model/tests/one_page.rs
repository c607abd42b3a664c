//! A whole forward and backward on one page: a llama-like decoder with LoRA in plain `f64` loops, from token ids to the
//! mean cross-entropy and back to the gradients of the adapter. [`Decoder`] has to agree with it.
//!
//! Every activation is a matrix with one row per token of one document. Weights are `[out, in]`, as in a checkpoint.
//! Sources: RMSNorm, Zhang and Sennrich, arXiv:1910.07467; rotary embedding, Su et al., arXiv:2104.09864, in the
//! half-split layout of the published Llama weights; gated MLP, Shazeer, arXiv:2002.05202; LoRA, Hu et al.,
//! arXiv:2106.09685.

#![allow(clippy::unwrap_used, clippy::needless_range_loop, reason = "tests; formulas with indices")]

use std::collections::HashMap;
use std::sync::Arc;

use model::batch::{Batch, IGNORE_INDEX};
use model::config::Config;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::init::{Fill, fresh_tensor};
use model::ops::Compute;
use model::parameter::Trainability;
use model::peft::{AdapterConfig, AdapterModule};
use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, Trainer};

const VOCABULARY: usize = 19;
const HIDDEN: usize = 12;
const INTERMEDIATE: usize = 17;
const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 6;
const EPS: f64 = 1e-5;
const THETA: f64 = 10_000.0;
const RANK: usize = 3;
/// `alpha / rank`.
const SCALING: f64 = 5.0 / 3.0;
const PROJECTIONS: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const GATE: usize = 4;
const UP: usize = 5;
const DOWN: usize = 6;

/// Rows of equal length.
type Matrix = Vec<Vec<f64>>;

fn matrix(values: &[f32], columns: usize) -> Matrix {
    values.chunks(columns).map(|row| row.iter().map(|&value| f64::from(value)).collect()).collect()
}

/// `a · b`.
fn multiply(a: &Matrix, b: &Matrix) -> Matrix {
    let dot = |row: &Vec<f64>, column: usize| row.iter().zip(b).map(|(value, row)| value * row[column]).sum();
    a.iter().map(|row| (0..b[0].len()).map(|column| dot(row, column)).collect()).collect()
}

fn transpose(a: &Matrix) -> Matrix {
    (0..a[0].len()).map(|column| a.iter().map(|row| row[column]).collect()).collect()
}

/// `a + scale · b`.
fn add(a: &Matrix, scale: f64, b: &Matrix) -> Matrix {
    let row = |(a, b): (&Vec<f64>, &Vec<f64>)| a.iter().zip(b).map(|(a, b)| a + scale * b).collect();
    a.iter().zip(b).map(row).collect()
}

/// `y = x Wᵀ + s (x Aᵀ) Bᵀ`: a frozen weight with LoRA, and the gradients of A and B.
struct Projection {
    weight: Matrix,
    lora: [Matrix; 2],
    gradients: [Matrix; 2],
}

impl Projection {
    fn forward(&self, x: &Matrix) -> Matrix {
        let [a, b] = &self.lora;
        let low_rank = multiply(x, &transpose(a));
        add(&multiply(x, &transpose(&self.weight)), SCALING, &multiply(&low_rank, &transpose(b)))
    }

    /// Adds to the gradients of A and B, and returns that of `x`.
    fn backward(&mut self, x: &Matrix, dy: &Matrix) -> Matrix {
        let [a, b] = &self.lora;
        let low_rank = multiply(x, &transpose(a));
        let d_low_rank = multiply(dy, b);
        self.gradients[1] = add(&self.gradients[1], SCALING, &multiply(&transpose(dy), &low_rank));
        self.gradients[0] = add(&self.gradients[0], SCALING, &multiply(&transpose(&d_low_rank), x));
        add(&multiply(dy, &self.weight), SCALING, &multiply(&d_low_rank, a))
    }
}

fn inverse_rms(x: &[f64]) -> f64 {
    (x.iter().map(|value| value * value).sum::<f64>() / x.len() as f64 + EPS).sqrt().recip()
}

/// `y = x / rms(x) · w`.
fn norm(x: &Matrix, weight: &[f64]) -> Matrix {
    let row = |x: &Vec<f64>| x.iter().zip(weight).map(|(value, weight)| value * inverse_rms(x) * weight).collect();
    x.iter().map(row).collect()
}

/// `dx = (g - x̂ · mean(g · x̂)) / rms(x)` with `g = dy · w` and `x̂ = x / rms(x)`.
fn norm_backward(x: &Matrix, weight: &[f64], dy: &Matrix) -> Matrix {
    let row = |(x, dy): (&Vec<f64>, &Vec<f64>)| {
        let r = inverse_rms(x);
        let g: Vec<f64> = dy.iter().zip(weight).map(|(dy, weight)| dy * weight).collect();
        let mean = g.iter().zip(x).map(|(g, x)| g * x * r).sum::<f64>() / x.len() as f64;
        g.iter().zip(x).map(|(g, x)| (g - x * r * mean) * r).collect()
    };
    x.iter().zip(dy).map(row).collect()
}

/// Rotates each pair (`i`, `i + head_dim / 2`) of each head by its token's position; `direction` -1 rotates back, which
/// is the backward.
fn rope(x: &mut Matrix, direction: f64) {
    for (position, row) in x.iter_mut().enumerate() {
        for head in row.chunks_mut(HEAD_DIM) {
            for i in 0..HEAD_DIM / 2 {
                let angle = direction * position as f64 * THETA.powf(-2.0 * i as f64 / HEAD_DIM as f64);
                let (a, b) = (head[i], head[i + HEAD_DIM / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + HEAD_DIM / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The columns of a query head, and those of its key and value head: each of the latter serves several query heads.
fn head_columns(head: usize) -> [std::ops::Range<usize>; 2] {
    [head, head / (HEADS / KV_HEADS)].map(|head| head * HEAD_DIM..(head + 1) * HEAD_DIM)
}

/// The probabilities with which token `i` attends to itself and the tokens before it.
fn probabilities(q: &Matrix, k: &Matrix, head: usize, i: usize) -> Vec<f64> {
    let [of_q, of_k] = head_columns(head);
    let scale = (HEAD_DIM as f64).sqrt().recip();
    softmax(&(0..=i).map(|j| scale * dot(&q[i][of_q.clone()], &k[j][of_k.clone()])).collect::<Vec<f64>>())
}

/// Causal attention: `o_i = Σ_{j ≤ i} p_ij v_j`.
fn attention(q: &Matrix, k: &Matrix, v: &Matrix) -> Matrix {
    let mut o = vec![vec![0.0; HEADS * HEAD_DIM]; q.len()];
    for (head, i) in (0..HEADS).flat_map(|head| (0..q.len()).map(move |i| (head, i))) {
        let [of_o, of_v] = head_columns(head);
        for (j, p) in probabilities(q, k, head, i).into_iter().enumerate() {
            o[i][of_o.clone()].iter_mut().zip(&v[j][of_v.clone()]).for_each(|(o, v)| *o += p * v);
        }
    }
    o
}

/// The gradients of queries, keys and values.
fn attention_backward(q: &Matrix, k: &Matrix, v: &Matrix, d_o: &Matrix) -> [Matrix; 3] {
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![vec![0.0; x[0].len()]; x.len()]);
    let scale = (HEAD_DIM as f64).sqrt().recip();
    for (head, i) in (0..HEADS).flat_map(|head| (0..q.len()).map(move |i| (head, i))) {
        let [of_q, of_k] = head_columns(head);
        let p = probabilities(q, k, head, i);
        let dp: Vec<f64> = (0..=i).map(|j| dot(&d_o[i][of_q.clone()], &v[j][of_k.clone()])).collect();
        let mean = dot(&p, &dp);
        for j in 0..=i {
            let d_score = scale * p[j] * (dp[j] - mean);
            for (x, y) in of_q.clone().zip(of_k.clone()) {
                dv[j][y] += p[j] * d_o[i][x];
                dq[i][x] += d_score * k[j][y];
                dk[j][y] += d_score * q[i][x];
            }
        }
    }
    [dq, dk, dv]
}

/// One layer: `h = x + attention(norm(x))`, `y = h + mlp(norm(h))`.
struct Layer {
    projections: Vec<Projection>,
    input_layernorm: Vec<f64>,
    post_attention_layernorm: Vec<f64>,
}

/// The activations that a layer's backward reads.
struct Saved {
    x: Matrix,
    x_norm: Matrix,
    qkv: [Matrix; 3],
    o: Matrix,
    h: Matrix,
    h_norm: Matrix,
    gate: Matrix,
    up: Matrix,
    gated: Matrix,
}

impl Layer {
    fn forward(&self, x: Matrix) -> (Matrix, Saved) {
        let projections = &self.projections;
        let x_norm = norm(&x, &self.input_layernorm);
        let [mut q, mut k, v] = [Q, K, V].map(|it| projections[it].forward(&x_norm));
        rope(&mut q, 1.0);
        rope(&mut k, 1.0);
        let o = attention(&q, &k, &v);
        let h = add(&x, 1.0, &projections[O].forward(&o));
        let h_norm = norm(&h, &self.post_attention_layernorm);
        let [gate, up] = [GATE, UP].map(|it| projections[it].forward(&h_norm));
        let silu = |(gate, up): (&f64, &f64)| gate / (1.0 + (-gate).exp()) * up;
        let gated: Matrix = gate.iter().zip(&up).map(|(gate, up)| gate.iter().zip(up).map(silu).collect()).collect();
        let y = add(&h, 1.0, &projections[DOWN].forward(&gated));
        (y, Saved { x, x_norm, qkv: [q, k, v], o, h, h_norm, gate, up, gated })
    }

    /// Adds to the gradients of the adapter, and returns that of the layer's input.
    fn backward(&mut self, saved: &Saved, dy: &Matrix) -> Matrix {
        let projections = &mut self.projections;
        let d_gated = projections[DOWN].backward(&saved.gated, dy);
        let (mut d_gate, mut d_up) = (saved.gate.clone(), saved.up.clone());
        for (t, i) in (0..dy.len()).flat_map(|t| (0..INTERMEDIATE).map(move |i| (t, i))) {
            let (gate, up) = (saved.gate[t][i], saved.up[t][i]);
            let sigmoid = 1.0 / (1.0 + (-gate).exp());
            d_gate[t][i] = d_gated[t][i] * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
            d_up[t][i] = d_gated[t][i] * gate * sigmoid;
        }
        let d_h_norm = projections[GATE].backward(&saved.h_norm, &d_gate);
        let d_h_norm = add(&d_h_norm, 1.0, &projections[UP].backward(&saved.h_norm, &d_up));
        let dh = add(dy, 1.0, &norm_backward(&saved.h, &self.post_attention_layernorm, &d_h_norm));

        let [q, k, v] = &saved.qkv;
        let d_o = projections[O].backward(&saved.o, &dh);
        let mut d_qkv = attention_backward(q, k, v, &d_o);
        rope(&mut d_qkv[0], -1.0);
        rope(&mut d_qkv[1], -1.0);
        let mut d_x_norm = vec![vec![0.0; HIDDEN]; dy.len()];
        for (it, d) in [Q, K, V].into_iter().zip(&d_qkv) {
            d_x_norm = add(&d_x_norm, 1.0, &projections[it].backward(&saved.x_norm, d));
        }
        add(&dh, 1.0, &norm_backward(&saved.x, &self.input_layernorm, &d_x_norm))
    }
}

struct Model {
    embedding: Matrix,
    layers: Vec<Layer>,
    final_norm: Vec<f64>,
    head: Matrix,
}

impl Model {
    /// The summed cross-entropy of one document, whose gradients, times `weight`, are added to those of the adapter.
    /// `labels[t]` is predicted from the tokens before `t`.
    fn loss_and_gradients(&mut self, input_ids: &[u32], labels: &[i32], weight: f64) -> f64 {
        let mut x: Matrix = input_ids.iter().map(|&id| self.embedding[id as usize].clone()).collect();
        let mut saved = Vec::new();
        for layer in &self.layers {
            let (y, of_layer) = layer.forward(x);
            saved.push(of_layer);
            x = y;
        }
        let logits = multiply(&norm(&x, &self.final_norm), &transpose(&self.head));
        let mut loss = 0.0;
        let mut d_logits = vec![vec![0.0; VOCABULARY]; logits.len()];
        for t in (1..labels.len()).filter(|&t| labels[t] != IGNORE_INDEX) {
            let p = softmax(&logits[t - 1]);
            let label = labels[t] as usize;
            loss -= p[label].ln();
            d_logits[t - 1] = p.iter().map(|p| weight * p).collect();
            d_logits[t - 1][label] -= weight;
        }
        let mut dx = norm_backward(&x, &self.final_norm, &multiply(&d_logits, &self.head));
        for (layer, saved) in self.layers.iter_mut().zip(&saved).rev() {
            dx = layer.backward(saved, &dx);
        }
        loss
    }
}

/// The same weights and adapter as a [`Trainer`] of the model crate and as a [`Model`] of this page.
fn both(tied: bool) -> (Trainer<Cpu>, Model) {
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": {VOCABULARY}, "hidden_size": {HIDDEN}, "head_dim": {HEAD_DIM},
            "intermediate_size": {INTERMEDIATE}, "num_hidden_layers": {LAYERS}, "num_attention_heads": {HEADS},
            "num_key_value_heads": {KV_HEADS}, "max_position_embeddings": 64, "rms_norm_eps": {EPS},
            "rope_theta": {THETA}, "tie_word_embeddings": {tied}}}"#
    );
    let mut weights: HashMap<String, Vec<f32>> = HashMap::new();
    let ops = Arc::new(Cpu::new(2, Compute::F32).unwrap());
    let mut decoder = Decoder::build(ops, Config::from_json(&config).unwrap(), Trainability::Frozen, |name, shape| {
        let mut values = fresh_tensor(1, name, shape.iter().product(), Fill::Normal(0.3));
        if name.ends_with("norm.weight") {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        weights.insert(name.to_owned(), values.clone());
        Ok(values)
    })
    .unwrap();

    let targets = PROJECTIONS.map(str::to_owned).to_vec();
    let mut adapter = decoder.fresh_adapter(&AdapterConfig::new(RANK, SCALING * RANK as f64, targets), 4).unwrap();
    for (name, module) in &mut adapter.modules {
        // A fresh B is zero, and the gradient of A with it.
        module.lora_b = fresh_tensor(5, name, module.lora_b.len(), Fill::Normal(0.3));
    }
    decoder.attach(&adapter).unwrap();

    let vector = |name: &str| weights[name].iter().map(|&value| f64::from(value)).collect::<Vec<f64>>();
    let projection = |path: String| {
        let AdapterModule { in_features, lora_a, lora_b, .. } = &adapter.modules[&path];
        let lora = [matrix(lora_a, *in_features), matrix(lora_b, RANK)];
        let gradients = lora.clone().map(|it| vec![vec![0.0; it[0].len()]; it.len()]);
        Projection { weight: matrix(&weights[&format!("{path}.weight")], *in_features), lora, gradients }
    };
    let layer = |index: usize| {
        let prefix = format!("model.layers.{index}");
        let path =
            |(at, name): (usize, &&str)| format!("{prefix}.{}.{name}", if at < GATE { "self_attn" } else { "mlp" });
        Layer {
            projections: PROJECTIONS.iter().enumerate().map(|it| projection(path(it))).collect(),
            input_layernorm: vector(&format!("{prefix}.input_layernorm.weight")),
            post_attention_layernorm: vector(&format!("{prefix}.post_attention_layernorm.weight")),
        }
    };
    let head = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let model = Model {
        embedding: matrix(&weights["model.embed_tokens.weight"], HIDDEN),
        layers: (0..LAYERS).map(layer).collect(),
        final_norm: vector("model.norm.weight"),
        head: matrix(&weights[head], HIDDEN),
    };
    let options = TrainOptions::new(Trained::Adapter, Optimizer::AdamW(AdamW::default()));
    (Trainer::new(decoder, options).unwrap(), model)
}

#[test]
fn the_decoder_agrees_with_plain_loops() {
    for tied in [false, true] {
        let (mut trainer, mut model) = both(tied);
        let documents: [(Vec<u32>, Vec<i32>); 2] = [
            (vec![3, 17, 0, 8, 8, 11, 2], vec![IGNORE_INDEX, IGNORE_INDEX, 0, 8, IGNORE_INDEX, 11, 2]),
            (vec![5, 1, 18], vec![5, 1, 18]),
        ];
        let mut batch = Batch::default();
        for (row, (input_ids, labels)) in documents.iter().enumerate() {
            batch.push_row(row as u64, input_ids, labels, &[input_ids.len()]);
        }
        let targets = batch.targets().ids.len();
        trainer.accumulate(&batch).unwrap();
        let gradients = trainer.gradients().unwrap();
        let scores = trainer.decoder_mut().score(&batch).unwrap();
        let loss = scores.iter().map(|score| f64::from(score.nll)).sum::<f64>();

        let weight = 1.0 / targets as f64;
        let expected: f64 = documents.iter().map(|(ids, labels)| model.loss_and_gradients(ids, labels, weight)).sum();
        assert!((loss - expected).abs() < 1e-4 * expected, "tied {tied}: a loss of {loss}, expected {expected}");

        let mut compared = 0;
        for (index, layer) in model.layers.iter().enumerate() {
            for (projection, name) in layer.projections.iter().zip(PROJECTIONS) {
                for (gradient, matrix) in projection.gradients.iter().zip(["lora_A", "lora_B"]) {
                    let is_it = |path: &str| {
                        path.contains(&format!(".{index}.")) && path.contains(name) && path.contains(matrix)
                    };
                    let (path, found) = gradients.iter().find(|(path, _)| is_it(path)).unwrap();
                    let expected: Vec<f64> = gradient.iter().flatten().copied().collect();
                    assert_eq!(found.len(), expected.len(), "{path}");
                    let size = dot(&expected, &expected).sqrt();
                    let error: f64 = found.iter().zip(&expected).map(|(x, y)| (f64::from(*x) - y).powi(2)).sum();
                    assert!(size > 1e-6 && error.sqrt() < 1e-4 * size, "{path}: {} of {size}", error.sqrt());
                    compared += 1;
                }
            }
        }
        assert_eq!((compared, gradients.len()), (2 * 7 * LAYERS, 2 * 7 * LAYERS));
    }
}
