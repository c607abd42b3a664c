//! Merges adapters into a base checkpoint for good, tensor by tensor.
//!
//! Each adapted weight becomes `W + Σ weight · scaling · B·A`: the delta is computed and added in f32 and the sum is
//! rounded once to the type of `W`. Everything else is copied byte for byte. Memory holds one tensor in its stored type.
//! Proving that the result computes what base and adapter did is left to the caller.

mod delta;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::checkpoint::{
    Checkpoint, CheckpointError, CheckpointWriteError, CheckpointWriter, DEFAULT_MAX_SHARD_BYTES, Dtype, TensorSpec,
    write_atomically,
};
use crate::peft::{Adapter, AdapterModule};
use delta::{Share, merge_tensor};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// An adapter and how much of it enters.
#[derive(Debug, Clone, Copy)]
pub struct WeightedAdapter<'a> {
    /// The adapter.
    pub adapter: &'a Adapter,
    /// Factor on its delta; 1 for the whole of it.
    pub weight: f64,
}

/// How the merged checkpoint is written.
#[derive(Debug, Clone, Copy)]
pub struct MergeOptions<'a> {
    /// Size at which a shard is closed.
    pub max_shard_bytes: u64,
    /// Type of the merged floats; that of each base tensor if absent.
    pub dtype: Option<Dtype>,
    /// Name of the base model, to be compared with what the adapters say that they were trained on.
    pub base_model: Option<&'a str>,
}

impl Default for MergeOptions<'_> {
    fn default() -> Self {
        Self { max_shard_bytes: DEFAULT_MAX_SHARD_BYTES, dtype: None, base_model: None }
    }
}

/// Why adapters cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// The base cannot be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The result cannot be written.
    #[error(transparent)]
    Write(#[from] CheckpointWriteError),
    /// The base's configuration cannot be read.
    #[error("cannot read `{}`", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No adapter was given.
    #[error("there is no adapter to merge")]
    NoAdapter,
    /// The adapter says that it was trained on another model.
    #[error("the adapter was trained on `{expected}`, not on `{found}`")]
    OtherBase {
        /// `base_model_name_or_path` of the adapter.
        expected: String,
        /// The base to merge into.
        found: String,
    },
    /// The base has no weight for a module that the adapter adapts.
    #[error("the base has no module `{module}`, which the adapter adapts{}", if nearest.is_empty() { String::new() } else { format!("; the nearest is `{nearest}`") })]
    UnknownModule {
        /// The module.
        module: String,
        /// The nearest module of the base, empty if it has none.
        nearest: String,
    },
    /// The adapter is for a module of another shape.
    #[error("`{module}` of the base is {base:?}, that of the adapter {adapter:?} (outputs by inputs)")]
    WrongShape {
        /// The module.
        module: String,
        /// The base's shape.
        base: Vec<usize>,
        /// The adapter's.
        adapter: [usize; 2],
    },
    /// The adapted weight is not stored as a float that we round to.
    #[error("`{module}` of the base is stored as {dtype}: a quantised weight cannot be merged into")]
    NotAFloat {
        /// The module.
        module: String,
        /// Its type.
        dtype: Dtype,
    },
    /// DoRA changes a weight's row norms, which has no meaning for a share of it or beside another delta.
    #[error("`{module}` has a DoRA adapter, which can only be merged alone and with weight 1")]
    DoraCombined {
        /// The module.
        module: String,
    },
    /// The merged weight holds NaN or infinity.
    #[error("merging `{module}` gives a value that is not finite")]
    NotFinite {
        /// The module.
        module: String,
    },
}

/// What merging did to one weight.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MergedTensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// The greatest change of a value before rounding.
    pub max_abs_delta: f32,
    /// The greatest value of the base, to compare that with.
    pub max_abs_base: f32,
}

/// What a merge did.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct MergeReport {
    /// The weights that changed, by name.
    pub merged: Vec<MergedTensor>,
    /// How many tensors were copied as they stood.
    pub copied: usize,
    /// The output head was the embedding and has become a weight of its own, because an adapter changed it alone.
    pub untied_head: bool,
    /// The files written.
    #[serde(skip)]
    pub files: Vec<PathBuf>,
}

/// Merges `adapters` into the checkpoint in `base` and writes the result to `output`: weights, `config.json` and, where there is
/// one, `generation_config.json`.
///
/// All adapters and shapes are checked before anything is written. A head that is tied to the embedding and has an adapter is
/// untied: written as a weight of its own, with `tie_word_embeddings` false.
///
/// # Errors
/// Fails if an adapter does not fit the base, or a file cannot be read or written.
pub fn merge(
    base: &Path,
    adapters: &[WeightedAdapter<'_>],
    output: &Path,
    options: MergeOptions<'_>,
) -> Result<MergeReport, MergeError> {
    check_base_names(adapters, options.base_model)?;
    let checkpoint = Checkpoint::open(base)?;
    let config_path = base.join("config.json");
    let mut config = read_config(&config_path)?;
    let head_is_tied = is_tied(&checkpoint, &config);
    let shares = gather_shares(&checkpoint, adapters, head_is_tied)?;
    let untied_head = head_is_tied && shares.contains_key(HEAD);

    let mut targets: Vec<&str> = checkpoint.names().collect();
    if untied_head && !checkpoint.contains(HEAD) {
        targets.push(HEAD);
        targets.sort_unstable();
    }
    let source_of = |name| if untied_head && name == HEAD { EMBEDDING } else { name };
    let specs = targets.iter().map(|name| {
        let info = checkpoint.info(source_of(name))?;
        let dtype = if is_float(info.dtype) { options.dtype.unwrap_or(info.dtype) } else { info.dtype };
        Ok(TensorSpec::new(*name, dtype, &info.shape))
    });
    let specs = specs.collect::<Result<Vec<_>, CheckpointError>>()?;
    let mut writer = CheckpointWriter::create(output, specs.clone(), options.max_shard_bytes)?;
    let mut report = MergeReport { merged: Vec::new(), copied: 0, untied_head, files: Vec::new() };
    for TensorSpec { name, dtype, .. } in &specs {
        let source = source_of(name);
        if let Some(shares) = shares.get(name.as_str()) {
            let (bytes, merged) = merge_tensor(&checkpoint, source, name, shares, *dtype)?;
            writer.write_bytes(name, &bytes)?;
            report.merged.push(merged);
        } else {
            copy_tensor(&checkpoint, source, name, *dtype, &mut writer)?;
            report.copied += 1;
        }
        checkpoint.release(source);
    }
    report.files = writer.finish()?;
    if untied_head {
        config.insert("tie_word_embeddings".to_owned(), Value::Bool(false));
    }
    set_dtype(&mut config, options.dtype);
    report.files.extend(write_configs(base, output, &config)?);
    Ok(report)
}

fn check_base_names(adapters: &[WeightedAdapter<'_>], base_model: Option<&str>) -> Result<(), MergeError> {
    if adapters.is_empty() {
        return Err(MergeError::NoAdapter);
    }
    // A path says where a model lay, not which one it is.
    let is_hub_name = |name: &&str| name.matches('/').count() == 1 && !name.starts_with(['/', '.', '~']);
    let Some(found) = base_model.filter(is_hub_name) else { return Ok(()) };
    let trained_on = adapters.iter().filter_map(|weighted| weighted.adapter.config.base_model.as_deref());
    match trained_on.filter(is_hub_name).find(|expected| !expected.eq_ignore_ascii_case(found)) {
        Some(expected) => Err(MergeError::OtherBase { expected: expected.to_owned(), found: found.to_owned() }),
        None => Ok(()),
    }
}

/// A head is tied if the configuration says so, or, where it is silent (gemma), if there is no weight for it.
fn is_tied(checkpoint: &Checkpoint, config: &Map<String, Value>) -> bool {
    match config.get("tie_word_embeddings").and_then(Value::as_bool) {
        Some(tied) => tied,
        None => !checkpoint.contains(HEAD),
    }
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Finds each adapted weight in the base and checks that the adapters fit it. The key is the name of the merged tensor.
fn gather_shares<'a>(
    checkpoint: &Checkpoint,
    adapters: &[WeightedAdapter<'a>],
    head_is_tied: bool,
) -> Result<BTreeMap<String, Vec<Share<'a>>>, MergeError> {
    let mut shares: BTreeMap<String, Vec<Share<'a>>> = BTreeMap::new();
    for WeightedAdapter { adapter, weight } in adapters {
        for (name, module) in &adapter.modules {
            let target = format!("{name}.weight");
            let source = if head_is_tied && target == HEAD { EMBEDDING } else { target.as_str() };
            check_fit(checkpoint, name, source, module)?;
            let scaling = (adapter.config.scaling_of(name) * weight) as f32;
            let of_module = shares.entry(target).or_default();
            of_module.push(Share { module, scaling });
            let has_dora = of_module.iter().any(|share| share.module.magnitude.is_some());
            if has_dora && (of_module.len() > 1 || *weight != 1.0) {
                return Err(MergeError::DoraCombined { module: name.clone() });
            }
        }
    }
    Ok(shares)
}

fn check_fit(checkpoint: &Checkpoint, name: &str, source: &str, module: &AdapterModule) -> Result<(), MergeError> {
    let info = match checkpoint.info(source) {
        Ok(info) => info,
        Err(CheckpointError::MissingTensor { nearest, .. }) => {
            let nearest = nearest.iter().find_map(|nearest| nearest.strip_suffix(".weight")).unwrap_or_default();
            return Err(MergeError::UnknownModule { module: name.to_owned(), nearest: nearest.to_owned() });
        }
        Err(other) => return Err(other.into()),
    };
    if !is_float(info.dtype) {
        return Err(MergeError::NotAFloat { module: name.to_owned(), dtype: info.dtype });
    }
    let adapter = [module.out_features, module.in_features];
    if info.shape != adapter {
        return Err(MergeError::WrongShape { module: name.to_owned(), base: info.shape.clone(), adapter });
    }
    Ok(())
}

fn copy_tensor(
    checkpoint: &Checkpoint,
    source: &str,
    name: &str,
    dtype: Dtype,
    writer: &mut CheckpointWriter,
) -> Result<(), MergeError> {
    if checkpoint.dtype(source)? == dtype {
        writer.write_bytes(name, checkpoint.bytes(source)?)?;
    } else {
        writer.write_f32(name, &checkpoint.tensor_f32(source)?)?;
    }
    Ok(())
}

fn read_config(path: &Path) -> Result<Map<String, Value>, MergeError> {
    let error = |source| MergeError::Config { path: path.to_path_buf(), source };
    let text = std::fs::read(path).map_err(|source| error(source.into()))?;
    serde_json::from_slice(&text).map_err(|source| error(source.into()))
}

fn set_dtype(config: &mut Map<String, Value>, dtype: Option<Dtype>) {
    let Some(name) = dtype.and_then(crate::checkpoint::torch_name) else { return };
    // transformers renamed the key in version 5; a file keeps the spelling it has.
    let key = if config.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    config.insert(key.to_owned(), Value::from(name));
}

fn write_configs(base: &Path, output: &Path, config: &Map<String, Value>) -> Result<Vec<PathBuf>, MergeError> {
    let path = output.join("config.json");
    write_atomically(&path, format!("{:#}\n", Value::Object(config.clone())).as_bytes())?;
    let mut written = vec![path];
    let generation = base.join("generation_config.json");
    if generation.exists() {
        let error = |source: std::io::Error| MergeError::Config { path: generation.clone(), source: source.into() };
        let path = output.join("generation_config.json");
        write_atomically(&path, &std::fs::read(&generation).map_err(error)?)?;
        written.push(path);
    }
    Ok(written)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::init::{NewModel, fresh_lora_a};
    use crate::peft::AdapterConfig;

    fn golden(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(path)
    }

    fn whole(adapter: &Adapter) -> WeightedAdapter<'_> {
        WeightedAdapter { adapter, weight: 1.0 }
    }

    /// An adapter of rank 2 with no zero in it.
    fn adapter(modules: &[(&str, usize, usize)]) -> Adapter {
        let modules = modules.iter().map(|(name, out_features, in_features)| {
            let (out_features, in_features) = (*out_features, *in_features);
            let lora_a = fresh_lora_a(1, name, 2, in_features);
            let lora_b = fresh_lora_a(2, name, out_features, 2);
            let module = AdapterModule { rank: 2, in_features, out_features, lora_a, lora_b, magnitude: None };
            ((*name).to_owned(), module)
        });
        Adapter { config: AdapterConfig::new(2, 4.0, vec![]), modules: modules.collect() }
    }

    fn base(folder: &Path, tie_word_embeddings: bool, dtype: Dtype) {
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
        model.write(folder, 5, dtype).unwrap();
    }

    const Q: &str = "model.layers.0.self_attn.q_proj";

    #[test]
    fn merged_weights_are_those_of_peft() {
        for variant in [
            "llama31/lora/attention",
            "llama31/lora/all_linear",
            "llama31/lora/rslora",
            "llama31/lora/dora",
            "llama2/lora/attention",
        ] {
            let base = golden(variant).join("../..");
            let adapter = Adapter::load(&golden(variant).join("adapter")).unwrap();
            let output = tempfile::tempdir().unwrap();
            let report = merge(&base, &[whole(&adapter)], output.path(), MergeOptions::default()).unwrap();
            assert_eq!(report.merged.len(), adapter.modules.len());
            assert!(report.merged.iter().all(|merged| merged.max_abs_delta > 0.0));
            let merged = Checkpoint::open(output.path()).unwrap();
            let before = Checkpoint::open(&base).unwrap();
            assert!(merged.names().eq(before.names()));
            let expected = Checkpoint::open_file(&golden(variant).join("merged.safetensors")).unwrap();
            for name in expected.names().filter(|name| name.starts_with("model.")) {
                let (found, expected) = (merged.tensor_f32(name).unwrap(), expected.tensor_f32(name).unwrap());
                let largest = expected.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() <= 1e-6 * largest, "{variant} {name}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn a_sum_is_rounded_once_and_the_rest_is_copied() {
        let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        base(folder.path(), false, Dtype::BF16);
        std::fs::write(folder.path().join("generation_config.json"), "{}").unwrap();
        let adapter = adapter(&[(Q, 8, 8)]);
        let options = MergeOptions { max_shard_bytes: 600, ..MergeOptions::default() };
        let report = merge(folder.path(), &[whole(&adapter)], output.path(), options).unwrap();
        assert!(
            report.files.len() > 4 && report.files.iter().all(|path| path.exists()),
            "several shards and two configs"
        );
        let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
        for name in before.names().filter(|name| !name.contains("q_proj")) {
            assert_eq!(before.bytes(name).unwrap(), after.bytes(name).unwrap(), "{name}");
        }
        let (a, b) = (&adapter.modules[Q].lora_a, &adapter.modules[Q].lora_b);
        let weight = before.tensor_f32("model.layers.0.self_attn.q_proj.weight").unwrap();
        let expected = (0..64).map(|i| {
            let (row, column) = (i / 8, i % 8);
            let delta = 2.0 * (b[row * 2] * a[column] + b[row * 2 + 1] * a[8 + column]);
            half::bf16::from_f32(weight[i] + delta).to_f32()
        });
        assert_eq!(after.tensor_f32("model.layers.0.self_attn.q_proj.weight").unwrap(), expected.collect::<Vec<_>>());
    }

    #[test]
    fn several_adapters_enter_with_their_weights() {
        let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        base(folder.path(), false, Dtype::F32);
        let adapter = adapter(&[(Q, 8, 8)]);
        let halves =
            [WeightedAdapter { adapter: &adapter, weight: 0.5 }, WeightedAdapter { adapter: &adapter, weight: -0.5 }];
        merge(folder.path(), &halves, output.path(), MergeOptions::default()).unwrap();
        let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
        let name = "model.layers.0.self_attn.q_proj.weight";
        for (before, after) in before.tensor_f32(name).unwrap().iter().zip(after.tensor_f32(name).unwrap()) {
            assert!((before - after).abs() < 1e-6, "the halves cancel");
        }
    }

    #[test]
    fn a_tied_head_is_untied_and_the_embedding_stays() {
        let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        base(folder.path(), true, Dtype::F32);
        let report =
            merge(folder.path(), &[whole(&adapter(&[("lm_head", 20, 8)]))], output.path(), MergeOptions::default())
                .unwrap();
        assert!(report.untied_head);
        let (before, after) = (Checkpoint::open(folder.path()).unwrap(), Checkpoint::open(output.path()).unwrap());
        assert_eq!(before.bytes(EMBEDDING).unwrap(), after.bytes(EMBEDDING).unwrap());
        assert_ne!(after.bytes(HEAD).unwrap(), after.bytes(EMBEDDING).unwrap());
        assert_eq!(read_config(&output.path().join("config.json")).unwrap()["tie_word_embeddings"], false);
    }

    #[test]
    fn another_dtype_can_be_asked_for() {
        let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        base(folder.path(), false, Dtype::F32);
        let options = MergeOptions { dtype: Some(Dtype::F16), ..MergeOptions::default() };
        merge(folder.path(), &[whole(&adapter(&[(Q, 8, 8)]))], output.path(), options).unwrap();
        let after = Checkpoint::open(output.path()).unwrap();
        assert!(after.tensors().all(|(_, info)| info.dtype == Dtype::F16));
        assert_eq!(read_config(&output.path().join("config.json")).unwrap()["torch_dtype"], "float16");
    }

    #[test]
    fn an_adapter_that_does_not_fit_is_refused_before_anything_is_written() {
        let (folder, output) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        base(folder.path(), false, Dtype::F32);
        let refuse = |adapters: &[WeightedAdapter<'_>], base_model| {
            let options = MergeOptions { base_model, ..MergeOptions::default() };
            let error = merge(folder.path(), adapters, output.path(), options).unwrap_err();
            assert_eq!(std::fs::read_dir(output.path()).unwrap().count(), 0);
            error
        };
        let wide = adapter(&[(Q, 8, 10)]);
        assert!(matches!(refuse(&[whole(&wide)], None), MergeError::WrongShape { adapter: [8, 10], .. }));
        let unknown = adapter(&[("model.layers.0.self_attn.q_prj", 8, 8)]);
        assert!(matches!(refuse(&[whole(&unknown)], None), MergeError::UnknownModule { nearest, .. } if nearest == Q));
        let mut named = adapter(&[(Q, 8, 8)]);
        named.config.base_model = Some("meta-llama/Llama-3.1-8B".to_owned());
        let other = refuse(&[whole(&named)], Some("Qwen/Qwen2-7B")).to_string();
        assert_eq!(other, "the adapter was trained on `meta-llama/Llama-3.1-8B`, not on `Qwen/Qwen2-7B`");
        let mut dora = adapter(&[(Q, 8, 8)]);
        dora.modules.get_mut(Q).unwrap().magnitude = Some(vec![1.0; 8]);
        let half = WeightedAdapter { adapter: &dora, weight: 0.5 };
        assert!(matches!(refuse(&[half], None), MergeError::DoraCombined { .. }));
        assert!(matches!(refuse(&[whole(&dora), whole(&dora)], None), MergeError::DoraCombined { .. }));
        assert!(matches!(refuse(&[], None), MergeError::NoAdapter));
        let mut broken = adapter(&[(Q, 8, 8)]);
        broken.modules.get_mut(Q).unwrap().lora_b[3] = f32::NAN;
        assert!(matches!(refuse(&[whole(&broken)], None), MergeError::NotFinite { module } if module == Q));
    }
}
