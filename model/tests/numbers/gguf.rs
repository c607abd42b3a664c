//! GGUF files against llama.cpp's: the blocks of ggml's C code, the mixtures of its quantiser, whole files of its
//! converter and of its quantiser.
//!
//! The cases lie in `tests/golden/gguf` of the repository, or in the folder `gguf` of what `PIPELINE_GOLDEN_DIR` names.
//! Every folder found there must be one that can be run; `tests/golden/gguf/README.md` says what is in them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::batch::Batch;
use model::checkpoint::{Checkpoint, CheckpointWriter, Dtype, TensorSpec};
use model::config::Config;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::gguf::{Export, ExportOptions, FileType, GgufFile, TensorType, TokenizerJson, Value};
use model::ops::Compute;
use model::parameter::Trainability;
use safetensors::SafeTensors;
use serde_json::Value as Json;
use sha2::{Digest, Sha256};
use test_harness::test;

/// Types of blocks that there are cases of, and that are not written here.
const NOT_WRITTEN: [&str; 3] = ["Q2_K", "Q3_K", "Q4_1"];
/// Types of files that are not.
const NO_SUCH_FILE: [&str; 3] = ["Q2_K", "Q3_K_M", "Q4_K_S"];
/// Keys made from the folder's name or from the number of parameters.
const MADE_UP: [&str; 4] = ["general.name", "general.basename", "general.version", "general.size_label"];

fn cases() -> PathBuf {
    let given = std::env::var_os("PIPELINE_GOLDEN_DIR").map(PathBuf::from);
    given.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")).join("gguf")
}

fn json(file: &Path) -> Json {
    let text = std::fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    serde_json::from_str(&text).unwrap()
}

fn file_type(name: &str) -> Option<FileType> {
    Some(match name {
        "f32" => FileType::F32,
        "f16" => FileType::F16,
        "bf16" => FileType::Bf16,
        "q8_0" | "Q8_0" => FileType::Q8_0,
        "Q4_0" => FileType::Q4_0,
        "Q5_0" => FileType::Q5_0,
        "Q4_K_M" => FileType::Q4KM,
        "Q5_K_M" => FileType::Q5KM,
        "Q6_K" => FileType::Q6K,
        other if NO_SUCH_FILE.contains(&other) => return None,
        other => panic!("files of type `{other}` cannot be compared"),
    })
}

#[test]
fn blocks_are_ggmls() {
    let file = std::fs::read(cases().join("blocks.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let floats = |name: &str| -> Vec<f32> {
        let bytes = tensors.tensor(name).unwrap().data().to_vec();
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let mut compared: BTreeMap<&str, usize> = BTreeMap::new();
    for name in tensors.names() {
        let Some((case, kind)) = name.split_once('.').filter(|(_, kind)| *kind != "source") else { continue };
        if kind.ends_with(".dequantised") || NOT_WRITTEN.contains(&kind) {
            continue;
        }
        let known = TensorType::ALL.into_iter().find(|known| known.name() == kind);
        let known = known.unwrap_or_else(|| panic!("blocks of type {kind} cannot be compared"));
        let source = floats(&format!("{case}.source"));
        let expected = tensors.tensor(name).unwrap().data();
        let mut found = vec![0; known.bytes(source.len())];
        known.encode(&source, &mut found);
        let block = known.bytes(known.block_values());
        let pairs = found.chunks(block).zip(expected.chunks(block));
        let unlike = pairs.filter(|(one, other)| one != other).count();
        assert!(found.len() == expected.len(), "{name}");
        assert!(unlike == 0, "{name}: {unlike} blocks have other bytes");
        let mut values = vec![f32::NAN; source.len()];
        known.decode(expected, &mut values);
        // Halves have only one value each, and no case has it.
        if known.block_values() > 1 {
            let expected: Vec<u32> = floats(&format!("{name}.dequantised")).into_iter().map(f32::to_bits).collect();
            let values: Vec<u32> = values.into_iter().map(f32::to_bits).collect();
            assert_eq!(values, expected, "the values of {name}");
        }
        *compared.entry(known.name()).or_default() += found.len() / block;
    }
    println!("gguf blocks: {compared:?} compared");
    for needed in TensorType::ALL.into_iter().filter(|needed| *needed != TensorType::F32) {
        assert!(compared.contains_key(needed.name()), "no block of {}", needed.name());
    }
}

#[test]
fn every_tensor_has_the_type_of_llama_cpps_mixture() {
    let mixtures = json(&cases().join("mixtures.json"));
    let mut compared = 0;
    for (case, expected) in mixtures.as_object().unwrap() {
        let (name, head) = case.split_once('.').unwrap();
        let Some(file_type) = file_type(name) else { continue };
        assert_eq!(expected["general.file_type"], file_type.number(), "{case}");
        let types = expected["types"].as_object().unwrap();
        let layers = types.keys().filter(|name| name.ends_with(".attn_v.weight")).count();
        let config = Config::from_json(&format!(
            r#"{{"model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
                "num_attention_heads": 4, "num_hidden_layers": {layers}, "num_key_value_heads": 2,
                "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 512,
                "tie_word_embeddings": {}}}"#,
            head == "tied"
        ));
        let config = config.unwrap();
        for (tensor, expected) in types {
            let found = file_type.tensor(tensor, &[256, 256], &config);
            assert_eq!(found.name(), expected, "`{tensor}` of {case}");
            compared += 1;
        }
    }
    println!("gguf mixtures: {compared} types equal");
    assert!(compared > 0);
}

/// A value as `expected.json` has it.
fn described(value: &Value) -> Json {
    fn plain(value: &Value) -> Json {
        match value {
            Value::U32(x) => (*x).into(),
            Value::I32(x) => (*x).into(),
            Value::F32(x) => f64::from(*x).into(),
            Value::Bool(x) => (*x).into(),
            Value::String(x) => x.as_str().into(),
            other => panic!("{other:?} is not written"),
        }
    }
    let name = |value: &Value| match value {
        Value::U32(_) => "UINT32",
        Value::I32(_) => "INT32",
        Value::F32(_) => "FLOAT32",
        Value::Bool(_) => "BOOL",
        Value::String(_) => "STRING",
        other => panic!("{other:?} is not written"),
    };
    let Value::Array(_, values) = value else {
        return serde_json::json!({"type": name(value), "value": plain(value)});
    };
    let text = Json::Array(values.iter().map(plain).collect()).to_string();
    serde_json::json!({
        "type": format!("ARRAY/{}", name(&values[0])),
        "length": values.len(),
        "sha256_of_json": hex(text.as_bytes()),
    })
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a folder's file of a type.
fn export(folder: &Path, file_type: FileType, path: &Path) -> Export {
    // The vocabularies are small, and split as those that the names were given to.
    let options = ExportOptions { file_type, name: "golden".to_owned(), pre_tokenizer: None };
    let export = Export::plan(folder, &options).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    export.write(path, &threads, &mut |_| ControlFlow::Continue(())).unwrap();
    export
}

fn compare(folder: &Path, expected: &Json, file_type: FileType, what: &str) -> usize {
    let written = tempfile::tempdir().unwrap();
    let path = written.path().join("model.gguf");
    export(folder, file_type, &path);
    let found = GgufFile::open(&path).unwrap();

    let keep = |key: &&String| !MADE_UP.contains(&key.as_str());
    let mut keys: Vec<&String> = found.metadata().iter().map(|(key, _)| key).filter(keep).collect();
    keys.sort();
    let mut expected_keys: Vec<&String> = expected["metadata"].as_object().unwrap().keys().filter(keep).collect();
    expected_keys.sort();
    assert_eq!(keys, expected_keys, "{what}");
    for key in keys {
        let found = described(found.get(key).unwrap());
        let expected = &expected["metadata"][key];
        for (part, found) in found.as_object().unwrap() {
            assert_eq!(found, &expected[part], "{what}: `{key}`");
        }
    }
    let tensors = expected["tensors"].as_array().unwrap();
    let names = |names: Vec<&str>| names.join("\n");
    assert_eq!(
        names(found.tensors().iter().map(|tensor| tensor.name.as_str()).collect()),
        names(tensors.iter().map(|tensor| tensor["name"].as_str().unwrap()).collect()),
        "{what}"
    );
    for (tensor, expected) in found.tensors().iter().zip(tensors) {
        let shape: Vec<usize> = tensor.shape.iter().rev().copied().collect();
        let of = format!("{what}: `{}`", tensor.name);
        assert_eq!(expected["type"], tensor.tensor_type.name(), "{of}");
        assert_eq!(expected["shape"], serde_json::json!(shape), "{of}");
        assert_eq!(expected["offset"], tensor.offset, "{of}");
        assert_eq!(expected["bytes"], tensor.bytes(), "{of}");
        assert_eq!(expected["sha256"], hex(&found.tensor_bytes(tensor).unwrap()), "{of}");
    }
    expected_keys.len() + tensors.len()
}

/// The folders with a checkpoint.
fn folders() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(cases()).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

#[test]
fn files_are_those_of_the_converter_and_of_the_quantiser() {
    let folders = folders();
    assert!(!folders.is_empty(), "no folder in {}", cases().display());
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let mut compared = 0;
        let mut files = Vec::new();
        let expected = json(&folder.join("expected.json"));
        for (file, expected) in expected.as_object().unwrap() {
            let Some(kind) = file_type(file.strip_prefix("llama_quantize.").unwrap_or(file)) else { continue };
            compared += compare(&folder, expected, kind, &format!("{name} as {file}"));
            files.push(file.as_str());
        }
        assert!(compared > 0, "{name}: nothing to compare");
        println!("gguf/{name}: {compared} keys and tensors equal ({})", files.join(", "));
    }
}

#[test]
fn files_of_others_are_read_to_the_same_tensors() {
    let mut read = 0;
    for folder in folders() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let Some(kind) = name.strip_suffix(".gguf").and_then(|stem| stem.rsplit_once('-')) else { continue };
            let Some(kind) = file_type(kind.1) else { continue };
            let written = tempfile::tempdir().unwrap();
            let own = written.path().join("model.gguf");
            export(&folder, kind, &own);
            let (theirs, own) = (GgufFile::open(&path).unwrap(), GgufFile::open(&own).unwrap());
            assert_eq!(theirs.tensors(), own.tensors(), "{name}");
            for tensor in theirs.tensors() {
                let values = theirs.tensor_f32(tensor).unwrap();
                assert!(values.iter().all(|value| value.is_finite()), "{name}: `{}`", tensor.name);
                assert!(values == own.tensor_f32(tensor).unwrap(), "{name}: other values of `{}`", tensor.name);
            }
            read += 1;
        }
    }
    println!("gguf: {read} files of others read");
    assert!(read > 0);
}

/// 100 headers, each with a byte changed, or cut: an error or a header that is sound, never a crash; and every cut, and
/// most changes of what says lengths and places, is found.
#[test]
fn damaged_headers_are_refused() {
    let folder = folders().into_iter().next().unwrap();
    let written = tempfile::tempdir().unwrap();
    let path = written.path().join("model.gguf");
    let export = export(&folder, FileType::Q8_0, &path);
    let whole = std::fs::read(&path).unwrap();
    let header = whole.len() - export.tensor_bytes() as usize;
    let refuses = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        GgufFile::open(&path).is_err()
    };
    assert!(!refuses(&whole));
    for part in 0..50 {
        assert!(refuses(&whole[..whole.len() * part / 50]), "{part} of 50 parts");
    }
    assert!(refuses(&whole[..whole.len() - 1]));
    // The last entry is `name, dimensions, extents, type, offset`: its high bytes, and those of the counts.
    let last = export.tensors().last().unwrap();
    let mut entry = (last.name.len() as u64).to_le_bytes().to_vec();
    entry.extend(last.name.as_bytes());
    let entry = whole[..header].windows(entry.len()).rposition(|window| window == entry).unwrap();
    let places = entry + 8 + last.name.len();
    let bytes = (0..24).chain(entry + 1..entry + 8).chain(places..places + 4 + 8 * last.shape.len() + 12);
    let mut refused = 0;
    for at in bytes {
        let mut changed = whole.clone();
        changed[at] ^= 0x80;
        assert!(refuses(&changed), "byte {at} of {header}");
        refused += 1;
    }
    assert!(refused + 50 >= 100, "{refused}");
    println!("gguf: {} damaged headers refused", refused + 51);
}

fn changed(folder: &Path, file: &str, change: impl FnOnce(&mut Json)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if ["json", "model", "safetensors"].iter().any(|kind| path.extension().is_some_and(|own| own == *kind)) {
            // Not its permissions.
            std::fs::write(copy.path().join(path.file_name().unwrap()), std::fs::read(&path).unwrap()).unwrap();
        }
    }
    let mut content = json(&copy.path().join(file));
    change(&mut content);
    std::fs::write(copy.path().join(file), content.to_string()).unwrap();
    copy
}

fn full_attention(config: &mut Json) {
    let layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
    config["layer_types"] = vec!["full_attention"; layers].into();
}

#[test]
fn what_gguf_cannot_hold_is_an_error_and_a_window_a_warning() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf");
    let options = ExportOptions { file_type: FileType::F16, name: "m".to_owned(), pre_tokenizer: None };
    let refusal = |family: &str, file: &str, change: fn(&mut Json)| {
        let folder = changed(&here.join(family), file, change);
        Export::plan(folder.path(), &options).err().map(|error| error.to_string())
    };
    let dynamic = refusal("mistral", "config.json", |config| {
        config["rope_scaling"] = serde_json::json!({"rope_type": "dynamic", "factor": 2.0});
    });
    assert!(dynamic.unwrap().contains("dynamic"));
    let scale = refusal("gemma2", "config.json", |config| config["query_pre_attn_scalar"] = 16.into());
    assert!(scale.unwrap().contains("`query_pre_attn_scalar` is 16, where llama.cpp has 24"));
    for (family, change, says) in [
        (
            "llama31",
            (|config| config["hidden_act"] = "gelu_pytorch_tanh".into()) as fn(&mut Json),
            "another activation",
        ),
        ("gemma2", |config| config["hidden_activation"] = "silu".into(), "another activation"),
        ("gemma2", |config| config["final_logit_softcapping"] = Json::Null, "no soft caps"),
        ("gemma2", |config| config["tie_word_embeddings"] = false.into(), "its head is not its embedding"),
        ("gemma2", full_attention, "it has no windows"),
    ] {
        let refused = refusal(family, "config.json", change).unwrap_or_else(|| panic!("{family}: {says}"));
        assert!(refused.contains(says), "{refused}");
    }
    let splits = |json: &mut Json| json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+".into();
    assert!(refusal("llama31", "tokenizer.json", splits).unwrap().contains("splits text as none of those"));
    let folder = changed(&here.join("llama31"), "tokenizer.json", splits);
    let named = ExportOptions { pre_tokenizer: Some("qwen2".to_owned()), ..options.clone() };
    let export = Export::plan(folder.path(), &named).unwrap();
    let pre = export.metadata().iter().find(|(key, _)| key == "tokenizer.ggml.pre").unwrap();
    assert_eq!(pre.1, Value::String("qwen2".to_owned()));
    assert!(export.warnings().is_empty());
    let warned = |file: &str, change: fn(&mut Json)| {
        let folder = changed(&here.join("llama31"), file, change);
        Export::plan(folder.path(), &named).unwrap().warnings().join("\n")
    };
    let other = "splits text as `llama-bpe`, and `pre_tokenizer` says `qwen2`";
    assert!(warned("tokenizer_config.json", |_| ()).contains(other));
    let flag = |tokenizer: &mut Json| tokenizer["added_tokens"][0]["single_word"] = true.into();
    assert!(warned("tokenizer.json", flag).contains("`lstrip`, `rstrip` and `single_word` have no place"));
    let bare = changed(&here.join("llama31"), "config.json", |_| ());
    std::fs::remove_file(bare.path().join("tokenizer_config.json")).unwrap();
    let warnings = Export::plan(bare.path(), &options).unwrap().warnings().join("\n");
    assert!(
        warnings.contains("begins every text with `<|begin_of_text|>`, which no `tokenizer_config.json` names"),
        "{warnings}"
    );

    let windowed = Export::plan(&here.join("mistral"), &options).unwrap();
    assert!(windowed.warnings()[0].contains("up to 16 tokens"), "{:?}", windowed.warnings());
}

/// The model of a folder with other values in a tensor, and with a tensor more.
fn with_weights(
    folder: &Path,
    change: impl Fn(&str, &mut Vec<f32>),
    more: Option<(&str, &[usize])>,
) -> tempfile::TempDir {
    let output = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|kind| kind == "json" || kind == "model") {
            std::fs::write(output.path().join(entry.file_name().unwrap()), std::fs::read(&entry).unwrap()).unwrap();
        }
    }
    let checkpoint = Checkpoint::open(folder).unwrap();
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = checkpoint
        .tensors()
        .map(|(name, info)| (name.to_owned(), (info.shape.clone(), checkpoint.tensor_f32(name).unwrap())))
        .collect();
    tensors.iter_mut().for_each(|(name, (_, values))| change(name, values));
    if let Some((name, shape)) = more {
        tensors.insert(name.to_owned(), (shape.to_vec(), vec![0.5; shape.iter().product()]));
    }
    let specs = tensors.iter().map(|(name, (shape, _))| TensorSpec::new(name.as_str(), Dtype::F32, shape)).collect();
    let mut writer = CheckpointWriter::create(output.path(), specs, 1 << 30).unwrap();
    tensors.iter().for_each(|(name, (_, values))| writer.write_f32(name, values).unwrap());
    writer.finish().unwrap();
    output
}

#[test]
fn what_is_no_number_and_what_is_no_part_of_the_model_is_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/gguf/llama31");
    let refusal = |model: &Path, file_type: FileType| {
        let options = ExportOptions { file_type, name: "m".to_owned(), pre_tokenizer: None };
        let threads = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let path = model.join("written.gguf");
        let written = Export::plan(model, &options)
            .and_then(|export| export.write(&path, &threads, &mut |_| ControlFlow::Continue(())));
        written.err().map(|error| error.to_string())
    };
    let same = with_weights(&folder, |_, _| (), None);
    assert_eq!(refusal(same.path(), FileType::F32), None);
    for (name, written) in
        [("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"), ("model.norm.weight", "output_norm.weight")]
    {
        for value in [f32::NAN, f32::INFINITY] {
            let broken = with_weights(
                &folder,
                |own, values| {
                    if own == name {
                        values[1] = value
                    }
                },
                None,
            );
            for file_type in [FileType::F32, FileType::Bf16, FileType::Q8_0, FileType::Q4KM] {
                let refused = refusal(broken.path(), file_type).unwrap();
                assert!(refused.contains(&format!("`{written}` has the value {value}")), "{refused}");
            }
        }
    }
    let more = with_weights(&folder, |_, _| (), Some(("model.layers.1.mlp.foo.weight", &[4, 4])));
    assert!(
        refusal(more.path(), FileType::F32).unwrap().contains("no place for tensor `model.layers.1.mlp.foo.weight`")
    );
}

/// A folder as `download` makes it of a file.
fn imported(file: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(file, folder.path().join(model::gguf::FILE)).unwrap();
    let read = GgufFile::open(file).unwrap();
    let config = model::gguf::config(&read).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let TokenizerJson { tokenizer, settings } = model::gguf::tokenizer(&read, None).unwrap();
    for (name, content) in
        [("config.json", Json::Object(config)), ("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)]
    {
        std::fs::write(folder.path().join(name), content.to_string()).unwrap();
    }
    folder
}

/// The largest difference of a model's logits from those of another.
fn difference(one: &Path, other: &Path) -> f32 {
    // A window is no part of a file of mistral's: up to it both are one.
    let ids: Vec<u32> = (0..16).map(|at| (37 * at + 5) % 251).collect();
    let logits = |folder: &Path| {
        let cpu = Arc::new(Cpu::new(1, Compute::F32).unwrap());
        let mut decoder = Decoder::load(cpu, folder, Trainability::Frozen).unwrap_or_else(|error| panic!("{error:?}"));
        decoder.logits(&Batch::text(ids.clone())).unwrap()
    };
    let (one, other) = (logits(one), logits(other));
    assert_eq!(one.len(), other.len());
    one.iter().zip(&other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max)
}

/// What was written and read back is the model that it was: to the bit in f32, near it in 8 bits; quantised, it is what
/// the dequantised weights give.
#[test]
fn files_are_read_back_as_the_models_that_they_were() {
    for folder in folders() {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let written = tempfile::tempdir().unwrap();
        let path = written.path().join(model::gguf::FILE);
        let mut said = Vec::new();
        for (kind, file_type) in [
            ("f32", FileType::F32),
            ("f16", FileType::F16),
            ("q8_0", FileType::Q8_0),
            ("q4_0", FileType::Q4_0),
            ("q4_k_m", FileType::Q4KM),
            ("q5_k_m", FileType::Q5KM),
        ] {
            export(&folder, file_type, &path);
            let back = imported(&path);
            if file_type == FileType::F32 {
                let apart = difference(&folder, back.path());
                assert_eq!(apart, 0.0, "{name}");
                said.push(format!("{kind} {apart:e}"));
            }
            if file_type == FileType::Q8_0 {
                let apart = difference(&folder, back.path());
                assert!(apart > 0.0 && apart <= 0.35, "{name}: {apart}");
                said.push(format!("{kind} {apart:.3}"));
            }
            let dequantised = dequantised(back.path());
            let apart = difference(back.path(), dequantised.path());
            assert_eq!(apart, 0.0, "{name} as {kind}");
            let again = written.path().join("again.gguf");
            export(back.path(), file_type, &again);
            same_file(&path, &again, &format!("{name} as {kind}"), file_type);
        }
        println!("gguf/{name}: read back, {}", said.join(", "));
    }
}

/// The same checkpoint with its tensors in f32.
fn dequantised(folder: &Path) -> tempfile::TempDir {
    let output = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(folder).unwrap();
    let specs = checkpoint.tensors().map(|(name, info)| TensorSpec::new(name, Dtype::F32, &info.shape)).collect();
    let mut writer = CheckpointWriter::create(output.path(), specs, 1 << 30).unwrap();
    for name in checkpoint.names() {
        writer.write_f32(name, &checkpoint.tensor_f32(name).unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let mut config = json(&folder.join("config.json"));
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(output.path().join("config.json"), config.to_string()).unwrap();
    output
}

/// A file and what was written of what it was read as: the same keys, and the same floats.
fn same_file(one: &Path, other: &Path, what: &str, file_type: FileType) {
    let (one, other) = (GgufFile::open(one).unwrap(), GgufFile::open(other).unwrap());
    // Where the converter writes nothing of a key, what is taken by default is written out.
    let unsaid = ["tokenizer.ggml.add_sep_token", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"];
    for (key, value) in one.metadata().iter().filter(|(key, _)| !unsaid.contains(&key.as_str())) {
        // The scores of a vocabulary without `tokenizer.model` are those of its merges.
        if ["tokenizer.ggml.scores", "tokenizer.ggml.token_type"].contains(&key.as_str()) {
            continue;
        }
        assert_eq!(other.get(key), Some(value), "{what}: `{key}`");
    }
    assert_eq!(one.tensors(), other.tensors(), "{what}");
    if matches!(file_type, FileType::F32 | FileType::F16) {
        for tensor in one.tensors() {
            let (one, other) = (one.tensor_f32(tensor).unwrap(), other.tensor_f32(tensor).unwrap());
            let apart = one.iter().zip(&other).map(|(one, other)| (one - other).abs()).fold(0.0, f32::max);
            assert!(apart <= 1e-6, "{what}: `{}` differs by {apart}", tensor.name);
        }
    }
}
