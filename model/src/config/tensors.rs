//! The tensors that a checkpoint of a configuration must hold.

use super::{AttentionBias, Config, HeadWeight, LayerNorms, MlpBias, Projections, QkNorm};

impl Config {
    /// Name and shape of every weight, in the order in which a forward needs them. A tied head has none of its own.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let table = vec![self.vocab_size, self.hidden_size];
        let mut found = vec![("model.embed_tokens.weight".to_owned(), table.clone())];
        for layer in 0..self.num_hidden_layers {
            let prefix = format!("model.layers.{layer}");
            let mut add = |name: &str, shape: &[usize]| found.push((format!("{prefix}.{name}"), shape.to_vec()));
            self.attention_tensors(&mut add);
            self.mlp_tensors(&mut add);
        }
        found.push(("model.norm.weight".to_owned(), vec![self.hidden_size]));
        match self.head {
            HeadWeight::Tied => {}
            HeadWeight::Own => found.push(("lm_head.weight".to_owned(), table)),
        }
        found
    }

    fn attention_tensors(&self, add: &mut impl FnMut(&str, &[usize])) {
        let hidden = self.hidden_size;
        let (queries, keys) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let (qkv_bias, o_bias) = match self.attention_bias {
            AttentionBias::None => (false, false),
            AttentionBias::Qkv => (true, false),
            AttentionBias::All => (true, true),
        };
        let mut project = |name: &str, out: usize, input: usize, bias: bool| {
            add(&format!("self_attn.{name}.weight"), &[out, input]);
            if bias {
                add(&format!("self_attn.{name}.bias"), &[out]);
            }
        };
        match self.projections {
            Projections::Split => {
                project("q_proj", queries, hidden, qkv_bias);
                project("k_proj", keys, hidden, qkv_bias);
                project("v_proj", keys, hidden, qkv_bias);
            }
            Projections::Fused => project("qkv_proj", queries + 2 * keys, hidden, qkv_bias),
        }
        project("o_proj", hidden, queries, o_bias);
        match self.qk_norm {
            QkNorm::None => {}
            QkNorm::PerHead => {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
        }
        add("input_layernorm.weight", &[hidden]);
        add("post_attention_layernorm.weight", &[hidden]);
    }

    fn mlp_tensors(&self, add: &mut impl FnMut(&str, &[usize])) {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let bias = match self.mlp_bias {
            MlpBias::None => false,
            MlpBias::All => true,
        };
        let mut project = |name: &str, out: usize, input: usize| {
            add(&format!("mlp.{name}.weight"), &[out, input]);
            if bias {
                add(&format!("mlp.{name}.bias"), &[out]);
            }
        };
        match self.projections {
            Projections::Split => {
                project("gate_proj", inner, hidden);
                project("up_proj", inner, hidden);
            }
            Projections::Fused => project("gate_up_proj", 2 * inner, hidden),
        }
        project("down_proj", hidden, inner);
        match self.layer_norms {
            LayerNorms::Pre => {}
            LayerNorms::PreAndPost => {
                add("pre_feedforward_layernorm.weight", &[hidden]);
                add("post_feedforward_layernorm.weight", &[hidden]);
            }
        }
    }
}
