//! Shapes to try, and the blocks of a decoder in such a shape with everything trained.

use std::collections::BTreeMap;

use model::adapter::{Lora, Projection};
use model::batch::Documents;
use model::blocks::{
    AttentionBlock, Blocks, GateUpProjections, HeadBlock, HeadLoss, InputGradient, MlpBlock, Norm, Pass, QkNorms,
    QkvProjections,
};
use model::loss::CrossEntropy;
use model::ops::{Activation, AttentionShape, NormWeight, Ops, RmsNorm, RopeTables, WeightRole};
use model::parameter::{Matrix, Parameter};
use model::random::{Address, Purpose, Stream};

/// Named results.
pub(crate) type Results = BTreeMap<String, Vec<f32>>;

/// Factor on the adapters' outputs.
pub(crate) const SCALING: f32 = 1.5;
/// Rank of the adapters.
pub(crate) const RANK: usize = 3;

/// Whether a family's optional parts are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extras {
    /// A llama.
    None,
    /// Biases, norms on heads and after the branches, and fused projections.
    All,
}

/// A shape.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub documents: Vec<usize>,
    pub hidden_size: usize,
    pub inner: usize,
    pub vocab_size: usize,
    pub shape: AttentionShape,
    pub rotary_dims: usize,
    pub norm: RmsNorm,
    pub activation: Activation,
    pub head_soft_cap: Option<f32>,
    pub extras: Extras,
}

/// Numbers near 0, a function of the name alone.
pub(crate) fn values(name: &str, count: usize) -> Vec<f32> {
    let stream = Stream::new(17, Address::named(Purpose::ModelInit, name));
    (0..count as u64).map(|index| stream.uniform_at(index, 0.5)).collect()
}

impl Case {
    /// All shapes.
    pub(crate) fn all() -> Vec<Self> {
        let plain = RmsNorm { eps: 1e-5, weight: NormWeight::Plain };
        let plus_one = RmsNorm { eps: 1e-6, weight: NormWeight::PlusOne };
        let heads = |num_attention_heads, num_key_value_heads, head_dim, window, soft_cap| AttentionShape {
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            scale: 0.4,
            window,
            soft_cap,
        };
        vec![
            Self {
                documents: vec![5, 1, 7],
                hidden_size: 24,
                inner: 19,
                vocab_size: 37,
                shape: heads(4, 2, 6, None, None),
                rotary_dims: 6,
                norm: plain,
                activation: Activation::Silu,
                head_soft_cap: None,
                extras: Extras::None,
            },
            Self {
                documents: vec![9, 4],
                hidden_size: 15,
                inner: 33,
                vocab_size: 70,
                shape: heads(6, 2, 10, Some(3), Some(2.0)),
                rotary_dims: 4,
                norm: plus_one,
                activation: Activation::GeluTanh,
                head_soft_cap: Some(1.5),
                extras: Extras::All,
            },
            Self {
                documents: vec![1],
                hidden_size: 3,
                inner: 1,
                vocab_size: 2,
                shape: heads(1, 1, 2, Some(1), None),
                rotary_dims: 2,
                norm: plain,
                activation: Activation::Silu,
                head_soft_cap: None,
                extras: Extras::All,
            },
            // Longer than a block of queries of the candle set, and than any of the cpu set.
            Self {
                documents: vec![3, 700, 90],
                hidden_size: 8,
                inner: 12,
                vocab_size: 50,
                shape: heads(3, 1, 4, Some(150), None),
                rotary_dims: 4,
                norm: plain,
                activation: Activation::Silu,
                head_soft_cap: None,
                extras: Extras::None,
            },
        ]
    }

    pub(crate) fn rows(&self) -> usize {
        self.documents.iter().sum()
    }

    pub(crate) fn q_width(&self) -> usize {
        self.shape.num_attention_heads * self.shape.head_dim
    }

    pub(crate) fn kv_width(&self) -> usize {
        self.shape.num_key_value_heads * self.shape.head_dim
    }

    /// A tensor whose values follow from its name.
    pub(crate) fn tensor<B: Ops>(&self, ops: &B, name: &str, rows: usize, columns: usize) -> B::Tensor {
        ops.tensor(rows, columns, &values(name, rows * columns)).expect("a tensor")
    }

    /// Rotary angles of every position a row may have.
    pub(crate) fn angles(&self) -> Vec<f32> {
        let half = self.rotary_dims / 2;
        let positions = *self.documents.iter().max().expect("documents") + 8;
        (0..positions * half).map(|i| (i / half) as f32 * 10.0_f32.powf(-((i % half) as f32))).collect()
    }

    pub(crate) fn rope<B: Ops>(&self, ops: &B) -> RopeTables<B::Tensor> {
        let (angles, half) = (self.angles(), self.rotary_dims / 2);
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|angle| f(*angle)).collect();
            ops.tensor(values.len() / half, half, &values).expect("a table")
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        RopeTables { cos, sin, rotary_dims: self.rotary_dims, head_dim: self.shape.head_dim, short_positions: None }
    }

    fn parameter<B: Ops>(&self, ops: &B, name: &str, shape: &[usize]) -> Parameter<B> {
        let values = values(name, shape.iter().product());
        let mut parameter = Parameter::new(ops, name, shape, &values).expect("a parameter");
        parameter.train(ops, &[]).expect("a gradient");
        parameter
    }

    pub(crate) fn norm<B: Ops>(&self, ops: &B, name: &str, columns: usize) -> Norm<B> {
        Norm { rms: self.norm, weight: self.parameter(ops, name, &[columns]) }
    }

    pub(crate) fn projection<B: Ops>(
        &self,
        ops: &B,
        name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Projection<B> {
        let shape = [out_features, in_features];
        let weights = values(name, out_features * in_features);
        let mut matrix = Matrix::trainable(ops, name, shape, WeightRole::Matrix, &weights).expect("a weight");
        matrix.trained.as_mut().expect("kept").train(ops, &[]).expect("a gradient");
        let bias = (self.extras == Extras::All).then(|| self.parameter(ops, &format!("{name}.bias"), &[out_features]));
        let lora = Lora {
            a: self.parameter(ops, &format!("{name}.a"), &[RANK, in_features]),
            b: self.parameter(ops, &format!("{name}.b"), &[out_features, RANK]),
            scaling: SCALING,
            dropout: None,
            dora: None,
            rows: None,
        };
        Projection { lora: Some(lora), ..Projection::new(matrix, bias) }
    }

    pub(crate) fn attention_block<B: Ops>(&self, ops: &B) -> AttentionBlock<B> {
        let (hidden, q, kv) = (self.hidden_size, self.q_width(), self.kv_width());
        let extras = self.extras == Extras::All;
        let head_norm = |name| self.norm(ops, name, self.shape.head_dim);
        AttentionBlock {
            norm: self.norm(ops, "norm", hidden),
            qkv: if extras {
                QkvProjections::Fused { qkv_proj: self.projection(ops, "qkv", q + 2 * kv, hidden) }
            } else {
                QkvProjections::Split {
                    q_proj: self.projection(ops, "q", q, hidden),
                    k_proj: self.projection(ops, "k", kv, hidden),
                    v_proj: self.projection(ops, "v", kv, hidden),
                }
            },
            qk_norms: extras.then(|| QkNorms { q_norm: head_norm("q_norm"), k_norm: head_norm("k_norm") }),
            o_proj: self.projection(ops, "o", hidden, q),
            post_norm: extras.then(|| self.norm(ops, "post_norm", hidden)),
            shape: self.shape,
        }
    }

    pub(crate) fn mlp_block<B: Ops>(&self, ops: &B) -> MlpBlock<B> {
        let (hidden, inner) = (self.hidden_size, self.inner);
        let extras = self.extras == Extras::All;
        MlpBlock {
            norm: self.norm(ops, "norm", hidden),
            gate_up: if extras {
                GateUpProjections::Fused { gate_up_proj: self.projection(ops, "gate_up", 2 * inner, hidden) }
            } else {
                GateUpProjections::Split {
                    gate_proj: self.projection(ops, "gate", inner, hidden),
                    up_proj: self.projection(ops, "up", inner, hidden),
                }
            },
            down_proj: self.projection(ops, "down", hidden, inner),
            post_norm: extras.then(|| self.norm(ops, "post_norm", hidden)),
            activation: self.activation,
        }
    }

    /// The target of each row.
    pub(crate) fn targets(&self) -> Vec<u32> {
        (0..self.rows()).map(|row| (row * 7 % self.vocab_size) as u32).collect()
    }

    /// Forward, backward and gradients of the three blocks; the gradient of the output is that of its product with `g`.
    pub(crate) fn run_blocks<B: Blocks>(&self, ops: &B) -> Results {
        let mut results = Results::new();
        self.run_attention(ops, &mut results);
        self.run_cached(ops, &mut results);
        self.run_mlp(ops, &mut results);
        self.run_head(ops, &mut results);
        results
    }

    fn run_attention<B: Blocks>(&self, ops: &B, results: &mut Results) {
        let documents = Documents::new(&self.documents);
        let rope = self.rope(ops);
        let pass = Pass { documents: &documents, rope: &rope, draws: None, adapters: &[] };
        let mut block = self.attention_block(ops);
        let mut x = self.tensor(ops, "x", self.rows(), self.hidden_size);
        let mut saved = B::AttentionSaved::default();
        ops.attention_block(&block, &pass, &mut x, &mut saved).expect("a forward");
        results.insert("attention".to_owned(), ops.read(&x).expect("values"));
        let mut gradient = self.tensor(ops, "g", self.rows(), self.hidden_size);
        ops.attention_block_backward(&mut block, &pass, &mut saved, &mut gradient, InputGradient::Needed)
            .expect("a backward");
        results.insert("attention.x".to_owned(), ops.read(&gradient).expect("values"));
        let mut read = Reader { ops, prefix: "attention", results };
        read.norm(&block.norm);
        match &block.qkv {
            QkvProjections::Split { q_proj, k_proj, v_proj } => {
                [q_proj, k_proj, v_proj].into_iter().for_each(|projection| read.projection(projection));
            }
            QkvProjections::Fused { qkv_proj } => read.projection(qkv_proj),
        }
        if let Some(QkNorms { q_norm, k_norm }) = &block.qk_norms {
            read.norm(q_norm);
            read.norm(k_norm);
        }
        read.projection(&block.o_proj);
        block.post_norm.iter().for_each(|norm| read.norm(norm));
    }

    /// The documents again, over a cache, in two pieces each: the same output.
    fn run_cached<B: Blocks>(&self, ops: &B, results: &mut Results) {
        let block = self.attention_block(ops);
        let rope = self.rope(ops);
        let longest = *self.documents.iter().max().expect("documents");
        let mut cache = ops.cache(self.documents.len(), longest, &self.shape).expect("a cache");
        let x = values("x", self.rows() * self.hidden_size);
        let mut output = x.clone();
        for part in 0..2 {
            // Each document's first two thirds, then the rest.
            let pieces: Vec<(usize, usize, usize)> = self
                .documents
                .iter()
                .enumerate()
                .map(|(slot, length)| {
                    let cut = length * 2 / 3;
                    if part == 0 { (slot, 0, cut) } else { (slot, cut, length - cut) }
                })
                .filter(|piece| piece.2 > 0)
                .collect();
            if pieces.is_empty() {
                continue;
            }
            let first_row = |slot: usize| self.documents[..slot].iter().sum::<usize>();
            let rows: Vec<usize> = pieces
                .iter()
                .flat_map(|(slot, start, count)| {
                    let first = first_row(*slot) + start;
                    first..first + count
                })
                .collect();
            let documents = Documents::continued(pieces);
            let pass = Pass { documents: &documents, rope: &rope, draws: None, adapters: &[] };
            let hidden = self.hidden_size;
            let new: Vec<f32> = rows.iter().flat_map(|row| x[row * hidden..(row + 1) * hidden].to_vec()).collect();
            let mut new = ops.tensor(rows.len(), hidden, &new).expect("rows");
            ops.attention_block_cached(&block, &pass, &mut cache, &mut new).expect("a forward");
            let new = ops.read(&new).expect("values");
            for (row, new) in rows.iter().zip(new.chunks(hidden)) {
                output[row * hidden..(row + 1) * hidden].copy_from_slice(new);
            }
        }
        results.insert("attention_cached".to_owned(), output);
    }

    fn run_mlp<B: Blocks>(&self, ops: &B, results: &mut Results) {
        let mut block = self.mlp_block(ops);
        let mut x = self.tensor(ops, "x", self.rows(), self.hidden_size);
        let mut saved = B::MlpSaved::default();
        ops.mlp_block(&block, None, &mut x, &mut saved).expect("a forward");
        results.insert("mlp".to_owned(), ops.read(&x).expect("values"));
        let mut gradient = self.tensor(ops, "g", self.rows(), self.hidden_size);
        ops.mlp_block_backward(&mut block, None, &mut saved, &mut gradient, InputGradient::Needed).expect("a backward");
        results.insert("mlp.x".to_owned(), ops.read(&gradient).expect("values"));
        let mut read = Reader { ops, prefix: "mlp", results };
        read.norm(&block.norm);
        match &block.gate_up {
            GateUpProjections::Split { gate_proj, up_proj } => {
                read.projection(gate_proj);
                read.projection(up_proj);
            }
            GateUpProjections::Fused { gate_up_proj } => read.projection(gate_up_proj),
        }
        read.projection(&block.down_proj);
        block.post_norm.iter().for_each(|norm| read.norm(norm));
    }

    fn run_head<B: Blocks>(&self, ops: &B, results: &mut Results) {
        let norm = self.norm(ops, "norm", self.hidden_size);
        let mut head = HeadBlock { norm, soft_cap: self.head_soft_cap, chunk_rows: 4 };
        let mut output = self.projection(ops, "head", self.vocab_size, self.hidden_size);
        let x = self.tensor(ops, "x", self.rows(), self.hidden_size);
        let (mut scores, mut scores_alone) = (Vec::new(), Vec::new());
        let [mut logits, mut gradient] = <[B::Tensor; 2]>::default();
        ops.head_logits(&head, &output, &x, &mut logits).expect("logits");
        ops.head_scores(&head, &output, &x, &self.targets(), &mut scores_alone).expect("scores");
        let targets = self.targets();
        let loss = HeadLoss {
            loss: &CrossEntropy { label_smoothing: 0.0 },
            targets: &targets,
            weights: None,
            teacher: None,
            scale: 1.0,
            draws: None,
        };
        ops.head_loss(&mut head, &mut output, &loss, &x, &mut scores, &mut gradient).expect("a loss");
        assert_eq!(scores, scores_alone);
        results.insert("head".to_owned(), ops.read(&logits).expect("values"));
        results.insert("head.nll".to_owned(), scores.iter().map(|score| score.nll).collect());
        results.insert("head.correct".to_owned(), scores.iter().map(|score| f32::from(score.correct)).collect());
        results.insert("head.x".to_owned(), ops.read(&gradient).expect("values"));
        let mut read = Reader { ops, prefix: "head", results };
        read.norm(&head.norm);
        read.projection(&output);
    }
}

/// Collects gradients.
struct Reader<'a, B> {
    ops: &'a B,
    prefix: &'static str,
    results: &'a mut Results,
}

impl<B: Ops> Reader<'_, B> {
    fn parameter(&mut self, parameter: &Parameter<B>) {
        let training = parameter.training.as_ref().expect("everything is trained");
        let gradient = self.ops.read(&training.gradient).expect("values");
        self.results.insert(format!("{}.{}", self.prefix, parameter.name), gradient);
    }

    fn norm(&mut self, norm: &Norm<B>) {
        self.parameter(&norm.weight);
    }

    fn projection(&mut self, projection: &Projection<B>) {
        self.parameter(projection.matrix.trained.as_ref().expect("kept"));
        projection.bias.iter().for_each(|bias| self.parameter(bias));
        let lora = projection.lora.as_ref().expect("an adapter");
        self.parameter(&lora.a);
        self.parameter(&lora.b);
    }
}
