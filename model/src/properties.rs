//! What the readers of published checkpoints hold for any bytes: they end without a panic, soon and in little memory,
//! and what they accept is whole.
//!
//! Compiled for the tests here and for the fuzzer alone (`fuzz/`).

use std::path::PathBuf;

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::gguf::GgufFile;
use crate::peft::AdapterConfig;

/// A safetensors file: each tensor that its header names is in it.
pub fn safetensors(data: &[u8]) {
    let path = temporary("safetensors");
    std::fs::write(&path, data).expect("the temporary folder can be written to");
    if let Ok(checkpoint) = Checkpoint::open_file(&path) {
        for (name, info) in checkpoint.tensors() {
            let bytes = checkpoint.bytes(name).expect("the header names it");
            assert_eq!(bytes.len(), info.size_bytes(), "{name}");
            std::hint::black_box(bytes.iter().fold(0_u8, |sum, byte| sum ^ byte));
            let _ = checkpoint.tensor_f32(name);
            let _ = checkpoint.expect_shape(name, &info.shape);
        }
    }
    std::fs::remove_file(&path).expect("it was written above");
}

/// A GGUF file: each tensor that its header names is in it.
pub fn gguf(data: &[u8]) {
    let path = temporary("gguf");
    std::fs::write(&path, data).expect("the temporary folder can be written to");
    if let Ok(file) = GgufFile::open(&path) {
        for tensor in file.tensors() {
            assert_eq!(file.tensor_f32(tensor).expect("it is in the file").len(), tensor.values(), "{}", tensor.name);
        }
        std::hint::black_box(file.get("general.architecture"));
    }
    std::fs::remove_file(&path).expect("it was written above");
}

/// `config.json` of a checkpoint, and `adapter_config.json`.
pub fn config(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(config) = Config::from_json(&text) {
        std::hint::black_box(config.tensors());
    }
    if let Ok(serde_json::Value::Object(fields)) = serde_json::from_str(&text)
        && let Ok(adapter) = AdapterConfig::from_fields(fields)
    {
        let again = serde_json::from_str(&adapter.to_json()).expect("it writes JSON");
        assert!(AdapterConfig::from_fields(again).is_ok(), "{}", adapter.to_json());
    }
}

/// A name of this thread's own: tests run beside each other, and fuzzers in several processes.
fn temporary(ending: &str) -> PathBuf {
    let (process, thread) = (std::process::id(), std::thread::current().id());
    std::env::temp_dir().join(format!("model-properties-{process}-{thread:?}.{ending}"))
}

#[cfg(test)]
#[path = "../../fuzz/mutations.rs"]
mod mutations;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_a_whole_file() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/safetensors/two.safetensors");
        assert_eq!(Checkpoint::open_file(path.as_ref()).map(|file| file.names().count()).ok(), Some(2));
    }

    #[test]
    fn safetensors_near_real_ones() {
        mutations::hold(safetensors, "safetensors");
    }

    #[test]
    fn gguf_files_near_real_ones() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/seeds/gguf/two.gguf");
        assert_eq!(GgufFile::open(path.as_ref()).map(|file| file.tensors().len()).ok(), Some(2));
        mutations::hold(gguf, "gguf");
    }

    #[test]
    fn configs_near_real_ones() {
        mutations::hold(config, "config");
    }
}
