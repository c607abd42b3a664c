//! Whether the weights of a checkpoint are those of its configuration: looked up in the headers, before a value is
//! read.

use std::collections::BTreeSet;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::{Config, HeadWeight};

const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

impl Config {
    /// Checks that a checkpoint has every weight of this configuration, in its shape and in a type that we read, and
    /// none of the decoder that the configuration has no place for: a bias or a layer left out would change the
    /// results and tell nobody.
    ///
    /// What lies beside the decoder (a value head, say) and the tables of frequencies in older files are passed over.
    ///
    /// # Errors
    /// Fails with the first tensor that is missing or of another shape or type, or with those that are too many.
    pub fn check_weights(&self, checkpoint: &Checkpoint) -> Result<(), CheckpointError> {
        let mut known = BTreeSet::new();
        for (name, shape) in self.tensors() {
            checkpoint.expect_shape(&name, &shape)?;
            checkpoint.expect_float(&name)?;
            known.insert(name);
        }
        if self.head == HeadWeight::Tied && checkpoint.contains(HEAD) {
            if checkpoint.bytes(HEAD)? != checkpoint.bytes(EMBEDDING)? {
                return Err(CheckpointError::TiedHeadDiffers { path: checkpoint.path().to_path_buf() });
            }
            checkpoint.release(HEAD);
            checkpoint.release(EMBEDDING);
            known.insert(HEAD.to_owned());
        }
        let of_decoder = |name: &&str| name.starts_with("model.") || name.starts_with("lm_head.");
        let left_over: Vec<&str> = checkpoint
            .names()
            .filter(of_decoder)
            .filter(|name| !known.contains(*name) && !name.ends_with(".rotary_emb.inv_freq"))
            .collect();
        match left_over.first() {
            Some(first) => Err(CheckpointError::NoPlace {
                path: checkpoint.path().to_path_buf(),
                tensor: (*first).to_owned(),
                more: left_over.len() - 1,
            }),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::checkpoint::{CheckpointWriter, Dtype, TensorSpec};
    use crate::cpu::Cpu;
    use crate::decoder::Decoder;
    use crate::init::NewModel;
    use crate::ops::Compute;
    use crate::parameter::Trainability;

    fn golden() -> impl Iterator<Item = std::path::PathBuf> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden");
        let folders = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        folders.filter(|folder| folder.join("config.json").exists())
    }

    #[test]
    fn the_list_of_tensors_is_what_a_decoder_is_built_of() {
        for folder in golden() {
            let config = Config::read(&folder).unwrap();
            let mut asked = Vec::new();
            let values = |name: &str, shape: &[usize]| {
                asked.push((name.to_owned(), shape.to_vec()));
                Ok(vec![0.0; shape.iter().product()])
            };
            Decoder::build(Arc::new(Cpu::new(1, Compute::F32).unwrap()), config.clone(), Trainability::Frozen, values)
                .unwrap();
            let mut listed = config.tensors();
            asked.sort();
            listed.sort();
            assert_eq!(asked, listed, "{}", folder.display());
            config.check_weights(&Checkpoint::open(&folder).unwrap()).unwrap();
        }
    }

    /// A checkpoint in one file, of the small model's tensors after a change to them.
    fn check(tied: bool, change: impl FnOnce(&mut Vec<(String, Dtype, Vec<usize>)>)) -> Result<(), CheckpointError> {
        let model = NewModel {
            vocab_size: 16,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            tie_word_embeddings: tied,
            ..NewModel::default()
        };
        let text = serde_json::Value::Object(model.config(Dtype::F32).unwrap()).to_string();
        let config = Config::from_json(&text).unwrap();
        let mut tensors: Vec<_> = config.tensors().into_iter().map(|(name, shape)| (name, Dtype::F32, shape)).collect();
        change(&mut tensors);
        let folder = tempfile::tempdir().unwrap();
        let specs = tensors.iter().map(|(name, dtype, shape)| TensorSpec::new(name.as_str(), *dtype, shape)).collect();
        let mut writer = CheckpointWriter::create(folder.path(), specs, 1 << 30).unwrap();
        for (name, dtype, shape) in &tensors {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            writer.write_bytes(name, &vec![u8::from(name == HEAD); bytes]).unwrap();
        }
        writer.finish().unwrap();
        config.check_weights(&Checkpoint::open(folder.path()).unwrap())
    }

    #[test]
    fn weights_of_another_model_are_refused_before_a_value_is_read() {
        type Tensors = Vec<(String, Dtype, Vec<usize>)>;
        let add = |name: &'static str, shape: &'static [usize]| {
            move |tensors: &mut Tensors| tensors.push((name.to_owned(), Dtype::F32, shape.to_vec()))
        };
        check(false, |_| ()).unwrap();
        let said = |error: Result<(), CheckpointError>| error.unwrap_err().to_string();

        let missing = said(check(false, |tensors| tensors.retain(|(name, ..)| name != HEAD)));
        assert!(missing.contains("has no tensor `lm_head.weight`"), "{missing}");
        let shape = said(check(false, |tensors| tensors[0].2 = vec![17, 8]));
        assert!(shape.contains("`model.embed_tokens.weight`") && shape.contains("[17, 8]"), "{shape}");
        for dtype in [Dtype::F64, Dtype::U8, Dtype::F8_E4M3] {
            let refused = said(check(false, |tensors| tensors[1].1 = dtype));
            assert!(refused.contains(&format!("dtype {dtype}")) && refused.contains("q_proj"), "{refused}");
        }

        let bias = said(check(false, add("model.layers.0.self_attn.q_proj.bias", &[8])));
        assert!(bias.contains("`model.layers.0.self_attn.q_proj.bias`") && bias.contains("no place"), "{bias}");
        let layer = said(check(false, add("model.layers.1.mlp.up_proj.weight", &[12, 8])));
        assert!(layer.contains("`model.layers.1.mlp.up_proj.weight`"), "{layer}");
        check(false, add("model.layers.0.self_attn.rotary_emb.inv_freq", &[2])).unwrap();
        check(false, add("v_head.weight", &[1, 8])).unwrap();

        // The embedding is all zeros here, this head is not.
        let head = said(check(true, add(HEAD, &[16, 8])));
        assert!(head.contains("`tie_word_embeddings`"), "{head}");
    }
}
