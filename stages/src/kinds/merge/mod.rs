//! Merges adapters into their base, and proves it: base and adapters together must compute what the merged model does.

mod elsewhere;
mod parameters;
mod proof;
mod report;
mod rows;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cache::{Digest, Hasher};
use engine::artifact::{Facts, Output};
use engine::context::{Artifact, Draft, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::stage::{InputFacts, Stage, StageKind, Threads};
use model::batch::Batch;
use model::checkpoint::Flush;
use model::config::Architecture;
use model::merge::WeightedAdapter;
use model::merge::{
    Merge as ModelMerge, MergeError, MergeInto, MergeOptions, MergeReport, Progress, Proof, ProofError, TrainedOn,
};
use model::ops::Compute;
use model::peft::Adapter as PeftAdapter;

use serde_json::Value;

use crate::compute::checkpoint::SAVED_TEMPLATE;
use crate::compute::{adapter, aware, checkpoint, kernels};
use crate::data::artifact::{Model, OutputKind};
use crate::data::generation_config;
use crate::data::prompt::PROMPT;
pub use parameters::{Dtype, IntoWeights, Merge, Weighted};

/// What the stage writes beside the weights: what the merge did, and its proof.
const REPORT_FILE: &str = "merge_report.json";

impl StageKind for Merge {
    const NAME: &'static str = "merge";
    const VERSION: u32 = 5; // 5: as `tokenize` 10.
    const ABOUT: &'static str = "Merges adapters into their base model and proves the result.";
    const ALSO_CALLED: &'static [&'static str] = &["export", "merge_lora", "merge_and_unload"];
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = elsewhere::KEYS;
    const GOAL: bool = true;
}

impl Stage for Merge {
    fn outputs(&self) -> Vec<Output> {
        vec![Model::output("model")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        parameters::check(self, inputs, span)
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        parameters::forecast(self, ahead)
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let base = context.open(&self.model)?;
        if aware::is_aware(&base.folder) {
            let message = "the model was trained for 4-bit weights (QAT), and merged weights would no longer be \
                rounded to 4 bits";
            return Err(StageError::new(Cause::BadParameters, message).with_help(
                "use the adapter without merging, or merge into the model before quantisation-aware \
                    training",
            ));
        }
        let architecture = checkpoint::architecture(&base.folder)?;
        let adapters = open_adapters(self, &base, context)?;
        let facts: Vec<&Facts> = adapters.iter().map(|opened| &opened.facts).collect();
        let trained_on = parameters::trained_on(self.into, &facts)?;
        let worker = match &architecture {
            Architecture::Native(_) => None,
            Architecture::Transformers(outline) => {
                Some(proof::Worker::begin(self, outline, trained_on.as_ref(), context)?)
            }
        };
        let mut trained_on = trained_on.map(|(base, into)| (base.base(), into));
        if let (Some(worker), Some((quantized, MergeInto::Dequantized))) = (&worker, &mut trained_on) {
            quantized.layers = Some(worker.quantized_layers(&base, context)?);
        }
        let weighted: Vec<WeightedAdapter<'_>> =
            adapters.iter().map(|opened| WeightedAdapter { adapter: &opened.adapter, weight: opened.weight }).collect();
        let repo = base.description.facts.get(checkpoint::REPO).and_then(|repo| repo.as_str());
        let options = MergeOptions {
            max_shard_bytes: self.max_shard_size.0,
            dtype: self.dtype.map(Dtype::stored),
            base_model: self.base_name.as_deref().or(repo),
            // The store flushes what it takes in; meanwhile the merge is proved.
            flush: Flush::Later,
            trained_on: trained_on.as_ref().map(|(base, into)| TrainedOn { base, into: *into }),
        };
        for (opened, weighted) in adapters.iter().zip(&weighted) {
            let misfit = |error| failure(error, &format!("adapter `{}` does not fit the model", opened.stage));
            ModelMerge::new(&base.folder, std::slice::from_ref(weighted), options).map_err(misfit)?;
        }
        let whole = "cannot merge the adapters into the model";
        let merge = ModelMerge::new(&base.folder, &weighted, options).map_err(|error| failure(error, whole))?;

        let mut draft = context.create("model")?;
        let profile = context.profile().clone();
        let writing = profile.phase("merge and write");
        let written = write(&merge, &draft, context)?;
        drop(writing);
        draft.begin_flush()?;
        checkpoint::carry_along(&base.folder, &draft.folder)?;
        report::warn_of_rounding(&written, context);
        let batches = rows::batches(self, &base.folder, context)?;
        let proving = profile.phase("prove");
        let proof = match worker {
            None => prove(&merge, &draft, &batches, context)?,
            Some(worker) => worker.prove(&base, &draft, &batches, context)?,
        };
        drop(proving);
        let taught = taught(&base, &adapters);
        seal(self, draft, &written, &proof, taught, context)
    }
}

/// An adapter of the file, opened.
struct Opened {
    /// The stage that made it.
    stage: String,
    adapter: PeftAdapter,
    weight: f64,
    facts: Facts,
}

fn open_adapters(params: &Merge, base: &Artifact, context: &mut StageContext) -> Result<Vec<Opened>, StageError> {
    let open = |(input, weight)| {
        let artifact = context.open::<crate::data::artifact::Adapter>(input)?;
        let stage = input.reference.stage.clone();
        let mut adapter = adapter::open(&artifact, base).map_err(|mut error| {
            error.message = format!("adapter `{stage}`: {}", error.message);
            error
        })?;
        if adapter::is_of(&artifact.description.facts, &base.description.facts) {
            // Whatever it was called where the adapter was trained.
            adapter.config.base_model = None;
        }
        Ok(Opened { stage, adapter, weight, facts: artifact.description.facts })
    };
    params.weighted().into_iter().map(open).collect()
}

fn write(merge: &ModelMerge<'_>, draft: &Draft, context: &mut StageContext) -> Result<MergeReport, StageError> {
    let threads = rayon::ThreadPoolBuilder::new().num_threads(context.threads());
    let threads = threads.build().or_fail(Cause::Machine, || "cannot start threads".to_owned())?;
    let mut observe = |Progress { done, total }| {
        context.progress("bytes", done, Some(total), Some("merging".to_owned()));
        if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    threads
        .install(|| merge.write(&draft.folder, &mut observe))
        .map_err(|error| failure(error, "cannot merge the adapters into the model"))
}

fn prove(
    merge: &ModelMerge<'_>,
    draft: &Draft,
    batches: &[Batch],
    context: &mut StageContext,
) -> Result<Proof, StageError> {
    // The stored weights are used once each.
    let ops = Arc::new(kernels::cpu_on(context.threads(), Compute::F32, context)?.for_passing_weights());
    let mut observe = |Progress { done, total }| {
        context.progress("layers", done, Some(total), Some("proving".to_owned()));
        if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    merge.prove(&ops, &draft.folder, batches, &mut observe).map_err(unproved)
}

/// How the prompts were made that the adapters were trained on, where they agree; those of the base where none says it.
fn taught(base: &Artifact, adapters: &[Opened]) -> Option<Value> {
    let said: Vec<&Value> = adapters.iter().filter_map(|opened| opened.facts.get(PROMPT)).collect();
    match said.split_first() {
        None => base.description.facts.get(PROMPT).cloned(),
        Some((first, others)) => others.iter().all(|other| other == first).then(|| (*first).clone()),
    }
}

/// Writes the report, fails if the merge is not proved, and hands the model over.
fn seal(
    params: &Merge,
    mut draft: Draft,
    written: &MergeReport,
    proof: &Proof,
    taught: Option<Value>,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let is_saved = checkpoint::save_chat_template(&draft.folder, taught.as_ref())?;
    generation_config::end_at_turns(&draft.folder, |warning| context.warn(warning))?;
    let hashing = context.profile().phase("hash weights");
    let mut facts = checkpoint::facts(&mut draft)?;
    drop(hashing);
    facts.extend(taught.map(|prompt| (PROMPT.to_owned(), prompt)));
    facts.extend(is_saved.then(|| (SAVED_TEMPLATE.to_owned(), true.into())));
    // The figures of the proof are about the model and no part of it: other rows to compare on give the same model.
    let weights = facts.get(checkpoint::WEIGHTS).and_then(|weights| weights.as_str()).unwrap_or_default();
    let identity = identity(weights, &mut draft)?;
    let report = report::of(params, written, proof);
    fs::write(draft.folder.join(REPORT_FILE), format!("{report:#}\n"))
        .or_fail(Cause::Machine, || format!("cannot write `{REPORT_FILE}`"))?;
    proof.check().map_err(|error| match error {
        ProofError::NotFinite { .. } => unproved(error).with_help(why_not_finite(params)),
        _ => unproved(error),
    })?;
    context.report_detail(report::text(written, proof));
    context.seal(draft, facts, Some(identity))
}

/// A digest of the weights and of the contents of all other files that are there.
fn identity(weights: &str, draft: &mut Draft) -> Result<Digest, StageError> {
    let folder = draft.folder.clone();
    let mut files = Vec::new();
    add_other_files(&folder, &mut files)?;
    files.sort();
    let mut hasher = Hasher::new();
    hasher.value(weights.as_bytes());
    for path in files {
        let digest = draft.digest(&path)?;
        let name = path.strip_prefix(&folder).expect("it is in the folder");
        hasher.value(name.as_os_str().as_encoded_bytes()).value(digest.as_bytes());
    }
    Ok(hasher.finish())
}

/// Adds the files of a folder, and of those in it, that are no weights.
fn add_other_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), StageError> {
    let unreadable = || format!("cannot read `{}`", folder.display());
    for entry in fs::read_dir(folder).or_fail(Cause::Machine, unreadable)? {
        let path = entry.or_fail(Cause::Machine, unreadable)?.path();
        if path.is_dir() {
            add_other_files(&path, files)?;
        } else if path.extension().is_none_or(|extension| extension != "safetensors") {
            files.push(path);
        }
    }
    Ok(())
}

fn failure(error: MergeError, message: &str) -> StageError {
    let cause = match &error {
        MergeError::Read(_) | MergeError::Write(_) => Cause::Machine,
        MergeError::Stopped => Cause::Cancelled,
        _ => Cause::BadData,
    };
    let help = help(&error);
    let error = StageError::new(cause, message).with_source(error);
    match help {
        Some(help) => error.with_help(help),
        None => error,
    }
}

fn help(error: &MergeError) -> Option<&'static str> {
    Some(match error {
        MergeError::UnknownModule { .. } | MergeError::WrongShape { .. } => {
            "give `model` the model that the adapter was trained on"
        }
        MergeError::NoRow { .. } => "resize the model as it was for training, with an `add_tokens` stage",
        MergeError::OtherBase { .. } => {
            "give `model` the model that the adapter was trained on; if this is a copy of it, say so with `base_name`"
        }
        MergeError::NotAFloat { .. } => "merge into the model before it was quantised",
        MergeError::AdapterNotFinite { .. } => "its training diverged: lower the learning rate and train again",
        MergeError::NotFinite { .. } => {
            "a `weight` that is too great does that, and so do values of the base that are not finite"
        }
        MergeError::TiedRows => "train rows of `embed_tokens` alone",
        MergeError::Overflow { .. } => "`dtype: bf16` has the range of f32",
        _ => return None,
    })
}

/// What makes values of a merge overflow.
fn why_not_finite(params: &Merge) -> String {
    let weights = params.weighted().into_iter().map(|(_, weight)| weight);
    match weights.max_by(|one, other| one.abs().total_cmp(&other.abs())) {
        Some(weight) if weight.abs() > 1.0 => {
            format!("nothing was handed over; a `weight` that is too great does that, and the greatest is {weight:?}")
        }
        _ => "nothing was handed over; values of the base or of an adapter are too great: did training diverge?"
            .to_owned(),
    }
}

fn unproved(error: ProofError) -> StageError {
    let cause = match &error {
        ProofError::Differs { .. } | ProofError::NotFinite { .. } => Cause::Numeric,
        ProofError::Stopped => Cause::Cancelled,
        ProofError::Read(_) => Cause::Machine,
        ProofError::Config(_) | ProofError::Run(_) | ProofError::NoToken => Cause::BadData,
    };
    let help = match &error {
        ProofError::Differs { .. } => Some(
            "nothing was handed over; `dtype: f32` shows whether it is the rounding, other `data` whether it is these rows",
        ),
        ProofError::NoToken => Some("give `data` rows with tokens, or leave it out for rows of random tokens"),
        _ => None,
    };
    let error = StageError::new(cause, "the merge is not proved").with_source(error);
    match help {
        Some(help) => error.with_help(help),
        None => error,
    }
}
