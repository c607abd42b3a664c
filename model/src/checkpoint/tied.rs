//! An embedding under the name of the head that it is tied to.

use std::path::Path;

use serde_json::Value;

use super::Checkpoint;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// What the names of all other tensors begin with.
const OTHERS: [&str; 2] = ["model.layers.", "model.norm."];

impl Checkpoint {
    /// Gives an embedding that is stored as the head alone the name that transformers stores it under. It loads both.
    pub(super) fn name_tied_embedding(&mut self, folder: &Path) {
        // In other architectures the embedding has another name.
        let is_other = |name: &str| OTHERS.iter().any(|beginning| name.starts_with(beginning));
        let has_no_other_table = self.names().all(|name| name == HEAD || is_other(name));
        // A tensor in 4 bits is known by its name elsewhere, too; bitsandbytes leaves the head as it is.
        if has_no_other_table
            && !self.nf4.is_stored(HEAD)
            && is_tied(folder)
            && let Some(head) = self.tensors.remove(HEAD)
        {
            self.tensors.insert(EMBEDDING.to_owned(), head);
        }
    }
}

/// Whether the configuration says that the head is the embedding. One that cannot be read is reported by who needs it.
fn is_tied(folder: &Path) -> bool {
    let text = std::fs::read(folder.join("config.json")).unwrap_or_default();
    let config: Value = serde_json::from_slice(&text).unwrap_or_default();
    config["tie_word_embeddings"] == true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{CheckpointWriter, Dtype, SINGLE_FILE, TensorSpec};
    use crate::init::NewModel;

    /// A model whose file has the embedding as the head, and the checkpoint before that.
    fn stored_as_head(folder: &Path, tie_word_embeddings: bool) -> Checkpoint {
        let model = NewModel {
            vocab_size: 20,
            hidden_size: 8,
            intermediate_size: 12,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            tie_word_embeddings,
            ..NewModel::default()
        };
        model.write(folder, 5, Dtype::F32).unwrap();
        let before = Checkpoint::open(folder).unwrap();
        let names: Vec<&str> = before.names().filter(|name| *name != HEAD).collect();
        let stored = |name: &str| if name == EMBEDDING { HEAD.to_owned() } else { name.to_owned() };
        let spec = |name: &str| TensorSpec::new(stored(name), Dtype::F32, before.shape(name).unwrap());
        let file = folder.join("stored.safetensors");
        let mut writer = CheckpointWriter::create_file(&file, names.iter().copied().map(spec).collect()).unwrap();
        for name in names {
            writer.write_bytes(&stored(name), before.bytes(name).unwrap()).unwrap();
        }
        writer.finish().unwrap();
        std::fs::rename(file, folder.join(SINGLE_FILE)).unwrap();
        before
    }

    #[test]
    fn a_tied_embedding_may_be_stored_as_the_head() {
        let folder = tempfile::tempdir().unwrap();
        let before = stored_as_head(folder.path(), true);
        let found = Checkpoint::open(folder.path()).unwrap();
        assert!(found.names().eq(before.names()));
        for name in before.names() {
            assert_eq!(found.bytes(name).unwrap(), before.bytes(name).unwrap(), "{name}");
        }
        // A model whose head is one of its own lacks its embedding.
        let folder = tempfile::tempdir().unwrap();
        stored_as_head(folder.path(), false);
        let found = Checkpoint::open(folder.path()).unwrap();
        assert!(found.contains(HEAD) && !found.contains(EMBEDDING));
    }
}
