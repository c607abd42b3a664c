//! Every operation of a kernel set once, on tensors of a case's shapes.

use model::batch::{Documents, TokenPlace};
use model::checkpoint::ValueRows;
use model::ops::{
    Activation, AttentionGradients, AttentionOperands, Form, LogitGradient, LossRows, Ops, Rotation, WeightRole,
    WeightSource, Write,
};
use model::optimizer::{AdamW, Optimizer, Sgd, StateTensor, StateValues, Step, TensorInfo, Updated};
use model::random::{Address, Draws, DropoutMask, Purpose, StepSeed};

use crate::case::{Case, Results, values};

/// A run of a set's operations.
struct Run<'a, B: Ops> {
    ops: &'a B,
    case: &'a Case,
    results: Results,
}

/// Runs every operation.
pub(crate) fn run<B: Ops>(ops: &B, case: &Case) -> Results {
    let mut run = Run { ops, case, results: Results::new() };
    run.memory();
    run.rows_and_columns();
    run.products();
    run.pointwise();
    run.attention();
    run.loss_and_optimizer();
    run.results
}

impl<B: Ops> Run<'_, B> {
    fn tensor(&self, name: &str, rows: usize, columns: usize) -> B::Tensor {
        self.case.tensor(self.ops, name, rows, columns)
    }

    fn record(&mut self, name: &str, tensor: &B::Tensor) {
        let values = self.ops.read(tensor).expect("values");
        let (rows, columns) = self.ops.shape(tensor);
        assert_eq!(rows * columns, values.len(), "shape of {name}");
        self.results.insert(format!("{name} {rows}x{columns}"), values);
    }

    fn memory(&mut self) {
        let (ops, rows) = (self.ops, self.case.rows());
        assert_eq!(ops.shape(&B::Tensor::default()), (0, 0));
        let mut x = ops.zeros(rows, 3).expect("zeros");
        assert!(ops.read(&x).expect("values").iter().all(|value| *value == 0.0));
        ops.write(&mut x, &values("written", rows * 3)).expect("a write");
        let mut copy = B::Tensor::default();
        ops.copy(&x, &mut copy).expect("a copy");
        ops.write(&mut x, &vec![1.0; rows * 3]).expect("a write");
        self.record("copy", &copy);
        assert_eq!(ops.read(&copy).expect("values"), values("written", rows * 3), "a copy keeps its values");
    }

    fn rows_and_columns(&mut self) {
        let (ops, rows, hidden, vocab) = (self.ops, self.case.rows(), self.case.hidden_size, self.case.vocab_size);
        let x = self.tensor("x", rows, hidden);
        let mut y = B::Tensor::default();
        let stored = values("table", vocab * hidden);
        let stored = WeightSource::Rows(&ValueRows::new(&stored, hidden));
        let table = ops.prepare(stored, [vocab, hidden], WeightRole::Table).expect("a weight");
        let ids: Vec<u32> = (0..rows).map(|row| (row * row % vocab) as u32).collect();
        ops.embed(&table, &ids, 1.25, &mut y).expect("embed");
        self.record("embed", &y);
        let mut gradient = self.tensor("table_gradient", vocab, hidden);
        ops.embed_gradient(&ids, &x, 1.25, &mut gradient).expect("embed_gradient");
        self.record("embed_gradient", &gradient);
        let odd: Vec<u32> = (0..rows as u32).rev().step_by(2).collect();
        ops.gather_rows(&x, &odd, &mut y).expect("gather_rows");
        self.record("gather_rows", &y);
        let mut scattered = B::Tensor::default();
        ops.scatter_rows(&y, &odd, rows + 1, &mut scattered).expect("scatter_rows");
        self.record("scatter_rows", &scattered);
        ops.take_columns(&x, 1, hidden - 2, &mut y).expect("take_columns");
        self.record("take_columns", &y);
        let mut joined = B::Tensor::default();
        ops.join_columns(&[&x, &y, &x], &mut joined).expect("join_columns");
        self.record("join_columns", &joined);
        let one = self.tensor("one", 1, hidden);
        ops.join_rows(&[&x, &one], &mut joined).expect("join_rows");
        self.record("join_rows", &joined);
        let mut sum = self.tensor("sum", rows, hidden);
        ops.add(&x, &mut sum).expect("add");
        self.record("add", &sum);
        let mut sums = self.tensor("sums", 1, hidden);
        ops.add_column_sums(&x, &mut sums).expect("add_column_sums");
        self.record("add_column_sums", &sums);
        self.columns_and_dropout(&x);
    }

    /// What DoRA and dropout need; `x` is `[rows, hidden]`. These results are checked here, too: they are their own
    /// definition.
    fn columns_and_dropout(&mut self, x: &B::Tensor) {
        let (ops, rows, hidden) = (self.ops, self.case.rows(), self.case.hidden_size);
        let before = self.tensor("before", rows, hidden);
        let mut dots = self.tensor("dots", 1, hidden);
        ops.add_column_dots(x, &before, &mut dots).expect("add_column_dots");
        self.record("add_column_dots", &dots);
        let (factors, bias) = (self.tensor("factors", 1, hidden), self.tensor("bias", 1, hidden));
        let places: Vec<TokenPlace> =
            (0..rows as u64).map(|row| TokenPlace { row: row / 5, token: row % 5 + 3 }).collect();
        let mask = DropoutMask {
            draws: Draws { step: StepSeed { seed: 3, step: 4 }, places: &places },
            module: Address::named(Purpose::Dropout, "module"),
            probability: 0.4,
        };
        let read = |tensor: &B::Tensor| ops.read(tensor).expect("values");
        let [x_values, before_values] = ["x", "before"].map(|name| values(name, rows * hidden));
        let factor_values = values("factors", hidden);
        let mut of_row = vec![0.0; hidden];
        for (name, write) in [("replaced", Write::Replace), ("added", Write::Add)] {
            let mut y = self.tensor("before", rows, hidden);
            ops.scale_columns(x, &factors, Some(&bias), write, &mut y).expect("scale_columns");
            self.record(&format!("scale_columns {name}"), &y);
            let mut y = self.tensor("before", rows, hidden);
            ops.dropout(x, &mask, -1.5, write, &mut y).expect("dropout");
            self.record(&format!("dropout {name}"), &y);
            for (index, found) in read(&y).into_iter().enumerate() {
                if index % hidden == 0 {
                    mask.factors(index / hidden, &mut of_row);
                }
                let there = if write == Write::Add { before_values[index] } else { 0.0 };
                let expected = there - 1.5 * of_row[index % hidden] * x_values[index];
                assert!((found - expected).abs() < 1e-4, "dropout {name}[{index}] is {found}, not {expected}");
            }
        }
        let mut y = B::Tensor::default();
        ops.scale_columns(x, &factors, None, Write::Replace, &mut y).expect("scale_columns");
        for (index, found) in read(&y).into_iter().enumerate() {
            let expected = x_values[index] * factor_values[index % hidden];
            assert!((found - expected).abs() < 1e-5, "scale_columns[{index}] is {found}, not {expected}");
        }
    }

    fn products(&mut self) {
        let (ops, rows, hidden, inner) = (self.ops, self.case.rows(), self.case.hidden_size, self.case.inner);
        let (x, dy) = (self.tensor("x", rows, hidden), self.tensor("dy", rows, inner));
        let source = WeightSource::Trained(&mut self.tensor("other", inner, hidden));
        let mut weight = ops.prepare(source, [inner, hidden], WeightRole::Matrix).expect("a weight");
        ops.refresh(&mut weight, &mut self.tensor("weight", inner, hidden)).expect("refresh");
        let bias = self.tensor("bias", 1, inner);
        for (name, write, bias) in [
            ("replaced", Write::Replace, None),
            ("added", Write::Add, Some(&bias)),
            ("biased", Write::Replace, Some(&bias)),
        ] {
            let mut y = self.tensor("y", rows, inner);
            ops.linear(&x, &weight, bias, write, &mut y).expect("linear");
            self.record(&format!("linear {name}"), &y);
            let mut dx = self.tensor("dx", rows, hidden);
            ops.linear_backward(&dy, &weight, write, &mut dx).expect("linear_backward");
            self.record(&format!("linear_backward {name}"), &dx);
        }
        for (form, a, b) in [
            (Form::Nn, (rows, hidden), (hidden, inner)),
            (Form::Nt, (rows, hidden), (inner, hidden)),
            (Form::Tn, (hidden, rows), (hidden, inner)),
        ] {
            let mut c = self.tensor("c", rows, inner);
            let (a, b) = (self.tensor("a", a.0, a.1), self.tensor("b", b.0, b.1));
            ops.matmul(form, -0.75, &a, &b, Write::Add, &mut c).expect("matmul");
            let mut replaced = B::Tensor::default();
            ops.matmul(form, 2.0, &a, &b, Write::Replace, &mut replaced).expect("matmul");
            self.results.insert(format!("matmul {form:?} added"), ops.read(&c).expect("values"));
            self.results.insert(format!("matmul {form:?}"), ops.read(&replaced).expect("values"));
        }
    }

    fn pointwise(&mut self) {
        let (ops, case) = (self.ops, self.case);
        let (rows, head_dim, q) = (case.rows(), case.shape.head_dim, case.q_width());
        let (x, dy, up) = (self.tensor("x", rows, q), self.tensor("dy", rows, q), self.tensor("up", rows, q));
        for (name, columns) in [("row", q), ("heads", head_dim)] {
            let weight = self.tensor("norm", 1, columns);
            let [mut y, mut inverse_rms] = <[B::Tensor; 2]>::default();
            ops.norm(&x, &weight, case.norm, &mut y, &mut inverse_rms).expect("norm");
            self.record(&format!("norm {name}"), &y);
            self.record(&format!("inverse_rms {name}"), &inverse_rms);
            let mut dx = self.tensor("dx", rows, q);
            let mut gradient = self.tensor("norm_gradient", 1, columns);
            ops.norm_backward(&x, &weight, case.norm, &inverse_rms, &dy, Write::Add, &mut dx, Some(&mut gradient))
                .expect("norm_backward");
            self.record(&format!("norm_backward {name}"), &dx);
            self.record(&format!("norm weight gradient {name}"), &gradient);
        }
        let (rope, documents) = (case.rope(ops), Documents::new(&case.documents));
        let mut turned = self.tensor("x", rows, q);
        ops.rope(&mut turned, &rope, documents.positions(), Rotation::Forward).expect("rope");
        self.record("rope", &turned);
        ops.rope(&mut turned, &rope, documents.positions(), Rotation::Backward).expect("rope");
        self.record("rope and back", &turned);
        // From far left of where exp overflows to far right of it.
        let wide: Vec<f32> =
            values("gate", rows * q).iter().enumerate().map(|(i, x)| x * [1.0, 8.0, 400.0][i % 3]).collect();
        let gate = ops.tensor(rows, q, &wide).expect("a tensor");
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let [mut y, mut dgate, mut dup] = <[B::Tensor; 3]>::default();
            ops.gated(activation, &gate, &up, &mut y).expect("gated");
            self.record(&format!("{activation:?}"), &y);
            ops.gated_backward(activation, &gate, &up, &dy, &mut dgate, &mut dup).expect("gated_backward");
            self.record(&format!("{activation:?} gate"), &dgate);
            self.record(&format!("{activation:?} up"), &dup);
        }
    }

    fn attention(&mut self) {
        let (ops, case) = (self.ops, self.case);
        let (rows, q, kv) = (case.rows(), case.q_width(), case.kv_width());
        let documents = Documents::new(&case.documents);
        let (q, k, v) = (self.tensor("q", rows, q), self.tensor("k", rows, kv), self.tensor("v", rows, kv));
        let [mut y, mut logsumexp, mut cached] = <[B::Tensor; 3]>::default();
        ops.attention(&q, &k, &v, &documents, &case.shape, &mut y, &mut logsumexp).expect("attention");
        self.record("attention", &y);
        self.record("logsumexp", &logsumexp);
        let [mut dq, mut dk, mut dv] = <[B::Tensor; 3]>::default();
        let operands = AttentionOperands { q: &q, k: &k, v: &v, y: &y, logsumexp: &logsumexp };
        let gradients = AttentionGradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        let dy = self.tensor("dy", rows, case.q_width());
        ops.attention_backward(operands, &dy, &documents, &case.shape, gradients).expect("attention_backward");
        for (name, gradient) in [("dq", &dq), ("dk", &dk), ("dv", &dv)] {
            self.record(name, gradient);
        }
        let longest = *case.documents.iter().max().expect("documents");
        let mut cache = ops.cache(case.documents.len(), longest + 1, &case.shape).expect("a cache");
        ops.cache_append(&mut cache, &k, &v, &documents).expect("cache_append");
        ops.attention_cached(&q, &cache, &documents, &case.shape, &mut cached).expect("attention_cached");
        self.record("attention_cached", &cached);
    }

    fn loss_and_optimizer(&mut self) {
        let (ops, case) = (self.ops, self.case);
        let (rows, vocab) = (case.rows(), case.vocab_size);
        // Rounded, so that the greatest logit often stands there twice.
        let logits: Vec<f32> = values("logits", rows * vocab).iter().map(|x| (x * 16.0).round()).collect();
        for cap in [None, Some(3.0)] {
            for gradient in [LogitGradient::InPlace { scale: 0.75 }, LogitGradient::Skip] {
                let mut logits = ops.tensor(rows, vocab, &logits).expect("logits");
                let mut scores = Vec::new();
                let targets = case.targets();
                let scored = LossRows::scored(&targets, cap);
                ops.token_loss(&mut logits, &scored, gradient, &mut scores).expect("token_loss");
                let nll = scores.iter().map(|score| score.nll);
                self.results.insert(format!("nll {cap:?} {gradient:?}"), nll.collect());
                let correct = scores.iter().map(|score| f32::from(score.correct));
                self.results.insert(format!("correct {cap:?} {gradient:?}"), correct.collect());
                if gradient != LogitGradient::Skip {
                    self.record(&format!("logit gradient {cap:?}"), &logits);
                }
            }
        }
        let mut capped = ops.tensor(rows, vocab, &logits).expect("logits");
        ops.soft_cap(&mut capped, 2.5).expect("soft_cap");
        self.record("soft_cap", &capped);
        let huge = ops.tensor(1, 3, &[3e38, -3e38, 1.0]).expect("a tensor");
        let square = ops.sum_of_squares(&huge).expect("sum_of_squares");
        assert!((square / 1.8e77 - 1.0).abs() < 1e-6, "squares beyond f32 are finite: {square}");
        let nan = ops.tensor(1, 2, &[f32::NAN, 0.0]).expect("a tensor");
        assert!(!ops.sum_of_squares(&nan).expect("sum_of_squares").is_finite());
        self.optimizer("adamw", AdamW { weight_decay: 0.1, ..AdamW::default() }.into(), 0.01);
        for (momentum, nesterov) in [(0.0, false), (0.9, false), (0.9, true)] {
            let sgd = Sgd { momentum, dampening: 0.3, nesterov, weight_decay: 0.2 };
            self.optimizer(&format!("sgd, momentum {momentum}, nesterov {nesterov}"), sgd.into(), 0.1);
        }
    }

    /// Three updates of a matrix.
    fn optimizer(&mut self, name: &str, optimizer: Optimizer, learning_rate: f64) {
        let ops = self.ops;
        let tensor = TensorInfo { name: "model.layers.0.mlp.up_proj.weight", shape: &[5, 7] };
        let state = |spec| StateTensor::new(ops, spec, 5, 7).expect("zeros");
        let mut state: Vec<_> = optimizer.state(tensor).into_iter().map(state).collect();
        let mut value = self.tensor("value", 5, 7);
        for number in 1..=3 {
            let gradient = self.tensor(&format!("gradient {number}"), 5, 7);
            let step = Step { learning_rate, number, gradient_scale: 0.03 };
            let updated = Updated { value: &mut value, gradient: &gradient, state: &mut state };
            optimizer.update(ops, &step, tensor, updated).expect("an update");
        }
        self.record(&format!("{name} value"), &value);
        for state in &state {
            let StateValues::F32(values) = state.read(ops, 0).expect("state") else { panic!("state in f32") };
            let kept = ops.tensor(5, 7, &values).expect("a tensor");
            self.record(&format!("{name} {}", state.saved_sets(ops)[0].name), &kept);
        }
    }
}
