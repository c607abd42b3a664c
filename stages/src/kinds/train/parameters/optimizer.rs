//! `optimizer:`: how a gradient becomes an update. Each optimizer takes its own options and no other's.

use engine::file::problem::Problem;
use engine::file::tree::Node;
use engine::parameter::{Class, Json, KeyWriter, Parameter, Parameters, Reader};
use model::trainer::{AdamW, Optimizer, Sgd};

use super::given::only_options_of;

/// What a file may say, whatever the optimizer.
#[derive(Parameters)]
struct Written {
    /// Its name.
    #[semantic(default = OptimizerName::Adamw)]
    name: OptimizerName,
    /// The learning rate at its highest.
    #[semantic(default = 3e-4, above = 0.0)]
    learning_rate: f64,
    /// `adamw`: decay rates of the two moments, [0.9, 0.999] if left out.
    #[semantic(range = 0.0..1.0)]
    betas: Option<Vec<f64>>,
    /// `adamw`: added to the root of the second moment, 1e-8 if left out; without it a gradient of zero would divide
    /// zero by zero.
    #[semantic(above = 0.0)]
    eps: Option<f64>,
    /// `adamw`: decoupled weight decay, 0.01 if left out. `sgd`: coupled (added to the gradient), 0 if left out.
    #[semantic(range = 0.0..)]
    weight_decay: Option<f64>,
    /// `sgd`: share of the momentum buffer that each step keeps, 0 (no buffer) if left out.
    #[semantic(range = 0.0..1.0)]
    momentum: Option<f64>,
    /// `sgd`: the gradient enters the buffer times one minus this, 0 if left out.
    #[semantic(range = 0.0..1.0)]
    dampening: Option<f64>,
    /// `sgd`: looks one step ahead along the buffer, false if left out.
    #[semantic]
    nesterov: Option<bool>,
}

/// An optimizer.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).
    Adamw,
    /// Gradient descent with momentum, as `torch.optim.SGD`.
    Sgd,
}

/// The optimizer and its learning rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerParams {
    /// The learning rate at its highest.
    pub learning_rate: f64,
    /// Which it is, with its options.
    pub optimizer: Optimizer,
}

impl Default for OptimizerParams {
    fn default() -> Self {
        Self { learning_rate: 3e-4, optimizer: Optimizer::AdamW(AdamW::default()) }
    }
}

impl OptimizerName {
    /// Its name in the file and its options.
    fn options(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Adamw => ("adamw", &["learning_rate", "betas", "eps", "weight_decay"]),
            Self::Sgd => ("sgd", &["learning_rate", "momentum", "dampening", "nesterov", "weight_decay"]),
        }
    }
}

impl Parameter for OptimizerParams {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let written = Written::read(node, reader)?;
        let (name, options) = written.name.options();
        only_options_of("optimizer", name, options, node, reader);
        let optimizer = match written.name {
            OptimizerName::Adamw => written.adamw(node, reader),
            OptimizerName::Sgd => written.sgd(node, reader),
        };
        // What is wrong here keeps nothing else in the stage from being checked.
        Some(Self { learning_rate: written.learning_rate, optimizer })
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        let mut field = |name: &str, write: &dyn Fn(&mut KeyWriter<'_>)| key.field(name, Class::Semantic, write);
        match self.optimizer {
            Optimizer::AdamW(AdamW { betas, eps, weight_decay }) => {
                field("name", &|key| OptimizerName::Adamw.write_key(key));
                field("learning_rate", &|key| self.learning_rate.write_key(key));
                field("betas", &|key| vec![betas.0, betas.1].write_key(key));
                field("eps", &|key| eps.write_key(key));
                field("weight_decay", &|key| weight_decay.write_key(key));
            }
            Optimizer::Sgd(Sgd { momentum, dampening, nesterov, weight_decay }) => {
                field("name", &|key| OptimizerName::Sgd.write_key(key));
                field("learning_rate", &|key| self.learning_rate.write_key(key));
                field("momentum", &|key| momentum.write_key(key));
                field("dampening", &|key| dampening.write_key(key));
                field("nesterov", &|key| nesterov.write_key(key));
                field("weight_decay", &|key| weight_decay.write_key(key));
            }
        }
    }

    fn schema() -> Json {
        Written::schema()
    }
}

impl Written {
    fn adamw(&self, node: &Node, reader: &mut Reader) -> Optimizer {
        let default = AdamW::default();
        let betas = match self.betas.as_deref() {
            None => default.betas,
            Some(&[first, second]) => (first, second),
            Some(other) => {
                let span = node.get("betas").map_or(node.span, |node| node.span);
                let message = format!("`optimizer.betas` must be two numbers, and it has {}", other.len());
                reader.problems.push(Problem::error("out-of-range", span, message, "such as [0.9, 0.999]"));
                default.betas
            }
        };
        Optimizer::AdamW(AdamW {
            betas,
            eps: self.eps.unwrap_or(default.eps),
            weight_decay: self.weight_decay.unwrap_or(default.weight_decay),
        })
    }

    fn sgd(&self, node: &Node, reader: &mut Reader) -> Optimizer {
        let sgd = Sgd {
            momentum: self.momentum.unwrap_or(0.0),
            dampening: self.dampening.unwrap_or(0.0),
            nesterov: self.nesterov.unwrap_or(false),
            weight_decay: self.weight_decay.unwrap_or(0.0),
        };
        if sgd.nesterov && (sgd.momentum == 0.0 || sgd.dampening != 0.0) {
            let span = node.get("nesterov").map_or(node.span, |node| node.span);
            let message = "`nesterov` needs a `momentum`, and no `dampening`";
            reader.problems.push(Problem::error("bad-value", span, message, "such as `momentum: 0.9`"));
        }
        Optimizer::Sgd(sgd)
    }
}

#[cfg(test)]
mod tests {
    use cache::KeyDocument;
    use serde_json::json;

    use super::*;

    fn read(json: Json) -> Result<OptimizerParams, Vec<String>> {
        let mut reader = Reader::default();
        let read = OptimizerParams::read(&Node::from_json(&json), &mut reader);
        read.filter(|_| reader.problems.is_empty())
            .ok_or_else(|| reader.problems.into_iter().map(|problem| problem.message).collect())
    }

    #[test]
    fn defaults_are_those_of_torch() {
        assert_eq!(read(json!({})).unwrap(), OptimizerParams::default());
        let sgd = read(json!({"name": "sgd", "momentum": 0.9, "nesterov": true})).unwrap();
        let expected = Sgd { momentum: 0.9, dampening: 0.0, nesterov: true, weight_decay: 0.0 };
        assert_eq!(sgd.optimizer, Optimizer::Sgd(expected));
    }

    #[test]
    fn an_option_of_another_optimizer_is_a_problem_of_its_own() {
        for (wrong, says) in [
            (json!({"momentum": 0.9}), "the optimizer `adamw` has no `momentum`"),
            (json!({"name": "sgd", "betas": [0.9, 0.99]}), "the optimizer `sgd` has no `betas`"),
            (json!({"name": "sgd", "nesterov": true}), "`nesterov` needs a `momentum`, and no `dampening`"),
            (json!({"betas": [0.9]}), "`optimizer.betas` must be two numbers, and it has 1"),
        ] {
            assert_eq!(read(wrong.clone()).unwrap_err(), [says], "{wrong}");
        }
    }

    #[test]
    fn the_key_has_the_options_of_its_optimizer_alone() {
        let key = |json: Json| {
            let mut document = KeyDocument::default();
            read(json).unwrap().write_key(&mut KeyWriter::new(&mut document, &|_, _| None));
            document.entries.iter().map(|entry| format!("{} = {}", entry.path, entry.value)).collect::<Vec<_>>()
        };
        let adamw = ["name = adamw", "learning_rate = 0.0003", "betas[0] = 0.9", "betas[1] = 0.999", "eps = 1e-8"];
        assert_eq!(key(json!({}))[..5], adamw);
        assert_eq!(key(json!({})), key(json!({"betas": [0.9, 0.999], "weight_decay": 0.01})));
        let sgd = ["name = sgd", "learning_rate = 0.1", "momentum = 0.0", "dampening = 0.0", "nesterov = false"];
        assert_eq!(key(json!({"name": "sgd", "learning_rate": 0.1}))[..5], sgd);
    }
}
