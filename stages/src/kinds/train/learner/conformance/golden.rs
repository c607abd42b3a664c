//! The runs of `tests/golden/preference` as whole stages on every backend: what TRL trained is what a file's `loss:`
//! trains.
//!
//! A step of a run is two rows, so that two ranks have work in each; packed as they are, every document of a row lies
//! beside others. The loss is a mean over all pairs of a step, whatever the rows.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::device::DeviceGrant;
use engine::test_bench::TestBench;
use model::batch::{Batch, Role};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use test_harness::do_everything;

use super::{Backend, backends, backends_but_replicas};
use crate::data::artifact::{OptionalColumn, Shape, TokensFacts, TokensWriter};
use crate::kinds::train::Train;

/// Bounds of the README beside the runs, in f32.
const LOSS_BOUND: f64 = 5e-5;
const REWARD_BOUND: f64 = 1e-4;
const RELATIVE_BOUND: f64 = 1e-4;
const VALUE_BOUND: f32 = 5e-5;
/// Entries of the embedding have gradients near AdamW's `eps`.
const EMBEDDING_BOUND: f32 = 2e-4;
/// How far losses in bf16 may be apart, as a share of the loss and of 1 together.
const BF16_BOUND: f64 = 3e-2;

/// Where the estimate of the divergence is that of a micro-batch, as a file cannot say.
const NOT_OFFERED: &str = "kto_lora";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden")
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A run of the reference, by its family and name.
struct Run {
    checkpoint: PathBuf,
    folder: PathBuf,
    settings: Value,
}

impl Run {
    fn of(family: &str, name: &str) -> Self {
        let folder = golden().join("preference").join(family).join(name);
        Self { checkpoint: golden().join(family), settings: json_of(&folder.join("steps.json")), folder }
    }

    /// Every run that a file can ask for.
    fn all() -> Vec<Self> {
        let families = ["llama31", "qwen2"].into_iter();
        let names = families.flat_map(|family| {
            let folder = fs::read_dir(golden().join("preference").join(family)).unwrap();
            folder.map(move |entry| (family, entry.unwrap().file_name().into_string().unwrap()))
        });
        let mut names: Vec<_> = names.filter(|(_, name)| name != NOT_OFFERED).collect();
        names.sort();
        assert_eq!(names.len(), 12, "{names:?}");
        names.iter().map(|(family, name)| Self::of(family, name)).collect()
    }

    fn steps(&self) -> &[Value] {
        self.settings["steps"].as_array().unwrap()
    }

    fn is_full(&self) -> bool {
        self.settings["lora"].is_null()
    }

    /// `loss:` as a file says it.
    fn loss(&self) -> Value {
        let golden = &self.settings["loss"];
        let mut loss = golden.clone();
        for term in golden["terms"].as_array().unwrap() {
            match term["loss"].as_str().unwrap() {
                "nll" if loss["name"] == "orpo" => loss["nll"] = golden["nll_tokens"].clone(),
                "nll" => loss["sft_weight"] = term["weight"].clone(),
                "sigmoid" | "sigmoid_smoothed" => loss["name"] = "dpo".into(),
                other => loss["name"] = other.into(),
            }
        }
        loss.as_object_mut().unwrap().retain(|name, _| !["terms", "nll_tokens", "kl"].contains(&name.as_str()));
        loss
    }

    fn parameters(&self, backend: Backend, dtype: &str) -> Value {
        let optimizer = &self.settings["optimizer"];
        let optimizer = json!({
            "name": "adamw", "learning_rate": optimizer["lr"], "betas": optimizer["betas"], "eps": optimizer["eps"],
            "weight_decay": optimizer["weight_decay"],
        });
        let warmup_steps = &self.settings["scheduler"]["num_warmup_steps"];
        let mut parameters = json!({
            "model": "base", "data": "rows", "loss": self.loss(), "optimizer": optimizer, "shuffle": false, "dtype": dtype,
            "scheduler": {"name": "cosine", "warmup_steps": warmup_steps}, "clip_grad_norm": self.settings["clip_grad_norm"],
            "micro_batch_size": 1, "gradient_accumulation_steps": 2,
        });
        match self.is_full() {
            true => parameters["method"] = "full".into(),
            false => parameters["adapter"] = "init".into(),
        }
        if self.settings["reference"] == "adapter_disabled" {
            parameters["reference"] = "disabled".into();
        }
        if let Backend::Torch { parallel, .. } = backend {
            (parameters["backend"], parameters["parallel"]) = ("torch".into(), parallel.into());
        }
        parameters
    }

    /// Trains it, and returns the figures of each step and the file of values.
    fn train(&self, backend: Backend, dtype: &str) -> (Vec<Value>, Vec<u8>) {
        let root = tempfile::tempdir().unwrap();
        let parameters = self.parameters(backend, dtype);
        let outputs = self.bench(root.path(), backend).run::<Train>(parameters);
        let outputs = outputs.unwrap_or_else(|error| panic!("{}, {backend:?}: {error:?}", self.folder.display()));
        let read = |output: &Artifact, file: &str| fs::read(output.folder.join(file)).unwrap();
        let metrics = String::from_utf8(read(&outputs["metrics"], "metrics.jsonl")).unwrap();
        let steps = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let values = match self.is_full() {
            true => read(&outputs["model"], "model.safetensors"),
            false => read(&outputs["adapter"], "adapter_model.safetensors"),
        };
        (steps, values)
    }

    fn bench(&self, root: &Path, backend: Backend) -> TestBench {
        let grant = DeviceGrant { count: backend.ranks(), ..DeviceGrant::PROCESSOR };
        let mut bench = TestBench::new(root).input("base.model", "model", &self.checkpoint, Facts::new()).unwrap();
        let rows = root.join("rows");
        let facts = self.write_rows(&rows);
        bench = bench.input("rows.tokens", "tokens", &rows, facts).unwrap();
        if !self.is_full() {
            let folder = root.join("init");
            fs::create_dir(&folder).unwrap();
            for (from, to) in [
                ("adapter/adapter_config.json", "adapter_config.json"),
                ("adapter_init.safetensors", "adapter_model.safetensors"),
            ] {
                fs::copy(self.folder.join(from), folder.join(to)).unwrap();
            }
            bench = bench.input("init.adapter", "adapter", &folder, Facts::new()).unwrap();
        }
        bench.devices(grant)
    }

    /// Writes the documents of each step as two rows.
    fn write_rows(&self, folder: &Path) -> Facts {
        fs::create_dir(folder).unwrap();
        let bytes = fs::read(self.folder.join("batches.safetensors")).unwrap();
        let tensors = Integers::of(&bytes);
        let is_judged = self.settings["loss"]["terms"][0]["loss"] == "kto";
        let columns = vec![OptionalColumn::Group, OptionalColumn::Role, OptionalColumn::DocumentLengths];
        let shape = if is_judged { Shape::Judged } else { Shape::Pairs };
        let largest = tensors.0.iter().filter(|(name, _)| name.ends_with("input_ids")).flat_map(|(_, ids)| ids).max();
        let facts = TokensFacts { vocab_size: *largest.unwrap() as u64 + 1, columns, ..TokensFacts::none(shape) };
        let mut writer = TokensWriter::tokens(folder, facts);
        let mut group = 0;
        for (number, step) in self.steps().iter().enumerate() {
            let micro_batches = step["micro_batches"].as_array().unwrap().len();
            let groups: Vec<Batch> = (0..micro_batches)
                .flat_map(|micro| tensors.groups(&format!("step{number}.micro{micro}"), &mut group))
                .collect();
            let (first, second) = groups.split_at(groups.len() / 2);
            for half in [first, second] {
                let mut row = Batch::default();
                half.iter().for_each(|group| row.extend(group));
                writer.write(row).unwrap();
            }
        }
        writer.finish(|_| ()).unwrap().0.to_facts()
    }

    /// Compares what was trained with what the reference trained; the number of comparisons.
    fn check(&self, backend: Backend) -> usize {
        let (found, values) = self.train(backend, "f32");
        let what = |name: &str| format!("{} of {} on {backend:?}", name, self.folder.display());
        let mut compared = 0;
        let mut near = |name: &str, found: f64, expected: f64, bound: f64| {
            assert!((found - expected).abs() <= bound, "{}: {found}, not {expected}", what(name));
            compared += 1;
        };
        assert_eq!(found.len(), self.steps().len());
        for (found, expected) in found.iter().zip(self.steps()) {
            let number = |record: &Value, name: &str| record[name].as_f64();
            near("the loss", number(found, "loss").unwrap(), number(expected, "loss").unwrap(), LOSS_BOUND);
            let norm = number(expected, "grad_norm").unwrap();
            near("the norm", number(found, "grad_norm").unwrap(), norm, RELATIVE_BOUND * norm);
            near("the rate", number(found, "learning_rate").unwrap(), number(expected, "lr").unwrap(), 1e-12);
            for (ours, theirs) in [
                ("rewards/chosen", "chosen_reward"),
                ("rewards/rejected", "rejected_reward"),
                ("rewards/margins", "margin"),
                ("rewards/chosen", "reward_desirable"),
                ("rewards/rejected", "reward_undesirable"),
            ] {
                if let Some(expected) = number(expected, theirs) {
                    near(ours, number(found, ours).unwrap(), expected, REWARD_BOUND);
                }
            }
            if let Some(expected) = expected["kl"][0].as_f64() {
                near("kl", number(found, "kl").unwrap(), expected, REWARD_BOUND);
            }
        }
        let expected = match self.is_full() {
            true => self.folder.join("final.safetensors"),
            false => self.folder.join("adapter/adapter_model.safetensors"),
        };
        let (found, expected) = (floats(&values), floats(&fs::read(expected).unwrap()));
        for (name, expected) in &expected {
            let bound = if name.contains("embed_tokens") { EMBEDDING_BOUND } else { VALUE_BOUND };
            let furthest = found[name].iter().zip(expected).map(|(one, two)| (one - two).abs()).fold(0.0, f32::max);
            assert!(furthest <= bound, "{}: {furthest}", what(name));
            compared += expected.len();
        }
        compared
    }
}

/// The integers of a safetensors file by name.
struct Integers(BTreeMap<String, Vec<i64>>);

impl Integers {
    fn of(bytes: &[u8]) -> Self {
        let tensors = SafeTensors::deserialize(bytes).unwrap();
        let integers = |data: &[u8]| data.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        Self(tensors.iter().map(|(name, tensor)| (name.to_owned(), integers(tensor.data()))).collect())
    }

    /// The documents of a micro-batch, each by itself.
    fn documents(&self, prefix: &str) -> Vec<Batch> {
        let integers = |name: &str| &self.0[&format!("{prefix}.{name}")];
        let mut start = 0;
        let of_length = |length: &i64| {
            let piece = start..start + *length as usize;
            start = piece.end;
            let ids = integers("input_ids")[piece.clone()].iter().map(|id| *id as u32).collect();
            Batch::document(ids, integers("labels")[piece].iter().map(|label| *label as i32).collect())
        };
        integers("document_lengths").iter().map(of_length).collect()
    }

    /// The pairs of a micro-batch; or its judged responses, each with its mismatched one.
    fn groups(&self, prefix: &str, number: &mut u64) -> Vec<Batch> {
        let documents = self.documents(prefix);
        let pairs: Vec<[(Role, Batch); 2]> = match self.0.get(&format!("{prefix}.desirable")) {
            None => documents
                .as_chunks::<2>()
                .0
                .iter()
                .map(|[chosen, rejected]| [(Role::Chosen, chosen.clone()), (Role::Rejected, rejected.clone())])
                .collect(),
            Some(desirable) => {
                let roles = desirable.iter().map(|is| if *is == 1 { Role::Chosen } else { Role::Rejected });
                let mismatched = self.documents(&format!("{prefix}.kl"));
                let both = roles.zip(documents).zip(mismatched);
                both.map(|(judged, mismatched)| [judged, (Role::Mismatched, mismatched)]).collect()
            }
        };
        let of_pair = |pair: [(Role, Batch); 2]| {
            let mut group = Batch::default();
            for (role, document) in pair {
                group.extend(&Batch { groups: vec![*number], roles: vec![role], ..document });
            }
            *number += 1;
            group
        };
        pairs.into_iter().map(of_pair).collect()
    }
}

fn floats(bytes: &[u8]) -> BTreeMap<String, Vec<f32>> {
    let tensors = SafeTensors::deserialize(bytes).unwrap();
    let floats = |data: &[u8]| data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    tensors.iter().map(|(name, tensor)| (name.to_owned(), floats(tensor.data()))).collect()
}

fn of_llama(names: &[&str]) -> Vec<Run> {
    names.iter().map(|name| Run::of("llama31", name)).collect()
}

#[test]
fn every_backend_trains_preferences_as_the_reference_does() {
    for backend in backends() {
        let runs = match backend {
            Backend::Native | Backend::NativePair => Run::all(),
            Backend::Torch { ranks: 1, .. } if do_everything() => Run::all(),
            // What a loss is, is computed here for every backend; each of these asks something else of the worker.
            Backend::Torch { ranks: 1, .. } => {
                let others = [Run::of("qwen2", "dpo_lora")];
                let runs = of_llama(&["dpo_lora", "dpo_full", "orpo_lora", "simpo_lora", "kto_step_kl_lora"]);
                runs.into_iter().chain(others).collect()
            }
            Backend::Torch { .. } if do_everything() => {
                of_llama(&["dpo_lora", "dpo_full", "orpo_lora", "kto_step_kl_lora"])
            }
            Backend::Torch { parallel: "ddp", .. } => of_llama(&["kto_step_kl_lora"]),
            Backend::Torch { .. } => of_llama(&["dpo_full"]),
        };
        for run in runs {
            let compared = run.check(backend);
            println!("{backend:?}: {}: {compared} comparisons", run.folder.display());
        }
    }
}

#[test]
fn preferences_in_bf16_are_near_to_those_in_f32() {
    for backend in backends_but_replicas().into_iter().filter(|backend| *backend != Backend::Native) {
        let names: &[&str] = if do_everything() { &["dpo_lora", "dpo_full"] } else { &["dpo_lora"] };
        for name in names {
            let run = Run::of("llama31", name);
            let (found, _) = run.train(backend, "bf16");
            let mut apart = 0.0_f64;
            for (found, expected) in found.iter().zip(run.steps()) {
                let (found, expected) = (found["loss"].as_f64().unwrap(), expected["loss"].as_f64().unwrap());
                apart = apart.max((found - expected).abs() / (1.0 + expected));
            }
            println!("{backend:?}: {name} in bf16 is {apart:.1e} apart");
            assert!(apart > 0.0 && apart <= BF16_BOUND, "{name} on {backend:?}: {apart}");
        }
    }
}
