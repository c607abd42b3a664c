//! A training job, whatever tool described it, as the stages of a pipeline file.

use std::mem;

use engine::file::tree::Value;
use serde_json::{Value as Json, json};

use super::parameters::{Note, Parameter, Parameters};
use super::places::Places;
use super::reading::Reading;
use super::write::Writer;

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Method {
    #[default]
    Lora,
    Full,
}

/// Rows that are not trained on.
#[derive(Debug, Clone, Default)]
pub(super) enum HeldOut {
    #[default]
    Nothing,
    /// A part of the rows, which the loss is measured on: a share below 1, or a number.
    Split(Parameter),
    /// The same, where no loss is measured on it.
    Unmeasured(Parameter),
    /// Data sets of their own, which the loss is measured on.
    Own(Vec<Parameters>),
}

/// A job. Its parameters have paths that begin with the stage: `base`, `wider` (tokens that it adds), `rows` (what
/// holds for the rows of all data sets), `tokens`, `packs`, `train` and `resources`.
#[derive(Debug, Clone, Default)]
pub(super) struct Job {
    pub(super) name: String,
    /// Comments at the head of the file.
    pub(super) head: Vec<String>,
    pub(super) method: Method,
    /// The `dataset` stages of the training rows.
    pub(super) datasets: Vec<Parameters>,
    pub(super) held_out: HeldOut,
    pub(super) packs: bool,
    /// An adapter to go on from: the parameters of its `download`.
    pub(super) warm_start: Option<Parameters>,
    pub(super) merges: bool,
    /// Where the result goes.
    pub(super) output: Option<String>,
    pub(super) parameters: Parameters,
}

/// Why rows that are held out are not the same ones.
pub(super) const DRAWN: &str = "as many rows, but others: each program draws its own";

/// Why rows to measure the loss on are not carried over where the tool's evaluation is off.
pub(super) const NOT_MEASURED: &str = "no loss is measured";

impl Job {
    /// Goes on from the adapter in a folder, which a key of the tool names.
    pub(super) fn go_on_from(&mut self, reading: &mut Reading<'_>, key: &'static str, folder: &str, places: &Places) {
        let mut begin = Parameters::default();
        begin.set("path", places.written(folder), Note::Given);
        begin.set("as", "adapter", Note::Given);
        reading.nothing(key, "the stage `begin`");
        self.warm_start = Some(begin);
    }

    /// Adds the tokens that a key of the tool lists; `path` is the parameter of `add_tokens`, and `saved` the tool's
    /// key of modules that an adapter has copies of.
    pub(super) fn add_tokens(&mut self, reading: &mut Reading<'_>, key: &'static str, path: &str, saved: &'static str) {
        let tokens: Vec<String> = reading.texts(key).into_iter().filter(|token| !token.is_empty()).collect();
        if tokens.is_empty() {
            return;
        }
        let reason = "their rows are drawn around the mean of all others there; here they are the mean";
        let (is_saved, is_adapter) =
            (reading.texts(saved).iter().any(|module| module == "embed_tokens"), self.method == Method::Lora);
        match is_adapter && !is_saved {
            true => {
                let reason = format!("{reason}, and the adapter trains these rows, which are frozen there");
                reading.put_differing(key, path, json!(tokens), reason);
            }
            false => reading.put_differing(key, path, json!(tokens), reason),
        }
        // What trains all rows of the embedding trains the new ones.
        if is_saved && is_adapter {
            let reason = "`modules_to_save` trains every row of the embedding, the new ones among them.";
            reading.parameters.need("train.lora.trainable_token_indices", json!([]), reason);
        }
    }

    /// Holds out what a key of the tool says: a share of the rows below 1, or so many rows; nothing for 0.
    pub(super) fn hold_out(&mut self, reading: &mut Reading<'_>, key: &'static str, size: f64, reason: &str) {
        const SIZE: &str = "rows.train_test_split.test_size";
        if size <= 0.0 {
            return;
        }
        let size = if size >= 1.0 { json!(size as i64) } else { json!(size) };
        reading.put_differing(key, SIZE, size, reason);
        if let Some(split) = reading.parameters.remove(SIZE) {
            self.held_out = HeldOut::Split(Parameter { path: "test_size".to_owned(), ..split });
        }
    }

    /// Measures no loss; rows that are split off are not trained on all the same.
    pub(super) fn measure_nothing(&mut self) {
        self.held_out = match mem::take(&mut self.held_out) {
            HeldOut::Split(size) | HeldOut::Unmeasured(size) => HeldOut::Unmeasured(size),
            HeldOut::Nothing | HeldOut::Own(_) => HeldOut::Nothing,
        };
    }

    /// Whether there are rows that the loss is measured on.
    pub(super) fn is_measured(&self) -> bool {
        match self.held_out {
            HeldOut::Split(_) | HeldOut::Own(_) => true,
            HeldOut::Nothing | HeldOut::Unmeasured(_) => false,
        }
    }
}

/// What a key has compiled, of which each tool has forms of its own: a flag, `auto`, or a mapping of flags for parts.
pub(super) fn compile(reading: &mut Reading<'_>, key: &'static str) {
    let is_asked_for = match reading.value(key) {
        Value::String(text) if text == "auto" => true,
        Value::Map(parts) => parts.iter().any(|part| part.value.value == Value::Bool(true)),
        _ => reading.flag(key),
    };
    match is_asked_for {
        true => reading.put(key, "train.compile", "auto"),
        false => reading.nothing(key, "the default"),
    }
}

/// Keys of `train` in the order of its page; what is not named comes last.
const ORDER: &[&str] = &[
    "model",
    "data",
    "validation",
    "adapter",
    "method",
    "lora",
    "loss",
    "optimizer",
    "scheduler",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "epochs",
    "max_steps",
    "max_steps_per_epoch",
    "leftover",
    "shuffle",
    "seed",
    "clip_grad_norm",
    "neftune_noise_alpha",
    "dtype",
    "activation_checkpointing",
    "backend",
    "parallel",
    "attention",
    "compile",
];

impl Job {
    /// The pipeline file.
    pub(super) fn write(&self) -> String {
        let mut writer = Writer::default();
        self.head.iter().for_each(|line| writer.comment(0, line));
        writer.line(0, "version: 1");
        writer.entry(0, "name", &self.name.as_str().into(), "");
        writer.line(0, "stages:");
        stage(&mut writer, "base", "download", &self.parameters.below("base"));
        let added = self.parameters.below("wider");
        if !added.is_empty() {
            let mut wider = own(&[("model", "base".into())]);
            wider.extend(&added);
            stage(&mut writer, "wider", "add_tokens", &wider);
        }
        if let Some(adapter) = &self.warm_start {
            stage(&mut writer, "begin", "download", adapter);
        }
        let rows = self.rows(&mut writer);
        let of_rows = |rows: &str| {
            let mut tokens = own(&[("dataset", rows.into()), ("tokenizer", self.model().into())]);
            tokens.extend(&self.parameters.below("tokens"));
            tokens
        };
        stage(&mut writer, "tokens", "tokenize", &of_rows(&rows.train));
        if let Some(held_out) = &rows.held_out {
            stage(&mut writer, "held_out", "tokenize", &of_rows(held_out));
        }
        if self.packs {
            let mut packs = own(&[("tokens", "tokens".into())]);
            packs.extend(&self.parameters.below("packs"));
            stage(&mut writer, "packs", "pack", &packs);
        }
        self.training(&mut writer, rows.held_out.is_some());
        let trained = self.trained();
        if self.merges && self.method == Method::Lora {
            let mut merged = own(&[("model", self.model().into()), ("adapter", trained.into())]);
            if self.parameters.get("train.quantize.base").is_some() {
                merged.extend(&own(&[("into", "dequantized".into())]));
            } else if self.parameters.get("train.quantize.aware").is_some() {
                merged.extend(&own(&[("into", "original".into())]));
            }
            stage(&mut writer, "merged", "merge", &merged);
        }
        if let Some(output) = &self.output {
            writer.line(0, "publish:");
            writer.entry(2, &format!("{trained}.{trained}"), &output.as_str().into(), "");
            if self.merges && self.method == Method::Lora {
                writer.entry(2, "merged", &format!("{}-merged", output.trim_end_matches('/')).into(), "");
            }
        }
        writer.finish()
    }

    /// The stage whose model is trained.
    fn model(&self) -> &'static str {
        if self.parameters.below("wider").is_empty() { "base" } else { "wider" }
    }

    /// The stage that trains, and its output.
    fn trained(&self) -> &'static str {
        match self.method {
            Method::Lora => "adapter",
            Method::Full => "model",
        }
    }

    fn rows(&self, writer: &mut Writer) -> Rows {
        let split = match &self.held_out {
            HeldOut::Split(size) | HeldOut::Unmeasured(size) => Some(size),
            HeldOut::Nothing | HeldOut::Own(_) => None,
        };
        let train = self.mixed(writer, "rows", &self.datasets, split);
        match &self.held_out {
            HeldOut::Nothing => Rows { train, held_out: None },
            HeldOut::Split(_) => Rows { train: "rows.train".to_owned(), held_out: Some("rows.test".to_owned()) },
            HeldOut::Unmeasured(_) => Rows { train: "rows.train".to_owned(), held_out: None },
            HeldOut::Own(datasets) => {
                let held_out = self.mixed(writer, "held_out_rows", datasets, None);
                Rows { train, held_out: Some(held_out) }
            }
        }
    }

    /// The stages of one or several data sets; several are made one.
    fn mixed(&self, writer: &mut Writer, id: &str, datasets: &[Parameters], split: Option<&Parameter>) -> String {
        let mut last = match datasets {
            [only] => only.clone(),
            several => {
                let names: Vec<String> = (1..=several.len()).map(|number| format!("{id}_{number}")).collect();
                for (name, dataset) in names.iter().zip(several) {
                    let mut dataset = dataset.clone();
                    dataset.remove("weight");
                    stage(writer, name, "dataset", &dataset);
                }
                let entry = |(name, dataset): (&String, &Parameters)| match dataset.get("weight") {
                    Some(weight) => json!({ "rows": name, "weight": weight }),
                    None => json!({ "rows": name }),
                };
                let mut mix = own(&[("datasets", names.iter().zip(several).map(entry).collect())]);
                mix.extend(&self.parameters.below("mix"));
                mix
            }
        };
        last.remove("weight");
        if let Some(Parameter { value, note, .. }) = split {
            last.set("train_test_split.test_size", value.clone(), note.clone());
        }
        stage(writer, id, "dataset", &last);
        id.to_owned()
    }

    fn training(&self, writer: &mut Writer, is_validated: bool) {
        let mut with =
            own(&[("model", self.model().into()), ("data", if self.packs { "packs" } else { "tokens" }.into())]);
        if is_validated {
            with.set("validation", "held_out", Note::Given);
        }
        if self.warm_start.is_some() {
            with.set("adapter", "begin", Note::Given);
        }
        let method = match self.method {
            Method::Lora => "lora",
            Method::Full => "full",
        };
        with.set("method", method, Note::Given);
        with.extend(&self.parameters.below("train"));
        with.sort(ORDER);
        let id = self.trained();
        stage(writer, id, "train", &with);
        let resources = self.parameters.below("resources");
        if !resources.is_empty() {
            writer.line(4, "resources:");
            writer.parameters(6, &resources);
        }
    }
}

/// The outputs that hold rows.
struct Rows {
    train: String,
    held_out: Option<String>,
}

/// Parameters that only name other stages.
fn own(entries: &[(&str, Json)]) -> Parameters {
    let mut parameters = Parameters::default();
    entries.iter().for_each(|(path, value)| parameters.set(path, value.clone(), Note::Given));
    parameters
}

fn stage(writer: &mut Writer, id: &str, kind: &str, with: &Parameters) {
    writer.line(2, &format!("{id}:"));
    writer.line(4, &format!("uses: {kind}"));
    writer.line(4, "with:");
    writer.parameters(6, with);
}
