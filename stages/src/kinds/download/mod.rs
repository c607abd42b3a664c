//! Brings a checkpoint into the pipeline: from the Hub or a mirror, or from a folder on this machine.
//!
//! A repository is pinned to a commit when the pipeline is planned, so that a branch that moves changes nothing until
//! it is pinned anew. Every file is checked against what the Hub lists, or against the digest it was planned with.

mod forecast;
mod gguf;
mod metadata;
mod outside;
mod pattern;
mod selection;

use std::fs::{self, File};
use std::io::Read;
use std::ops::ControlFlow;
use std::path::Path;

use engine::artifact::{ARTIFACT_FILE, Facts, Output, is_description};
use engine::context::{Draft, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::metadata::FetchedFile;
use engine::parameter::{KeyWriter, LocalPath, Parameters};
use engine::pin::Pinned;
use engine::protocol::{FileGrant, Network};
use engine::stage::{Counted, InputFacts, Outside, PinRequest, Secret, Smoke, Stage, StageKind};
use model::checkpoint::is_lfs_pointer;
use model::config::Architecture;
use model::gguf::FILE;
use model::peft::AdapterConfig;

use crate::compute::adapter::{self, record};
use crate::compute::checkpoint;
use crate::compute::quantize::WeightFormat;
use crate::data::artifact::{Adapter, Files, Model, OutputKind, Tokenizer};
use crate::data::tokenizer::open_copy;
use crate::hub::{
    BadRepositoryName, Hub, HubError, Progress, RemoteFile, Repository, RepositoryKind, forget_working_files,
};
use selection::Selection;

/// The settings of an adapter.
const ADAPTER_CONFIG: &str = model::peft::CONFIG_FILE;
/// The shape of a checkpoint's model.
const CONFIG: &str = "config.json";

/// The role of the files below `path`. It stands in the key, and what is made of an adapter has changed once: it says
/// now which weights it was trained on.
fn role(form: Form) -> &'static str {
    match form {
        Form::Model | Form::Files => "checkpoint",
        Form::Adapter => "adapter",
    }
}

/// How the files are used.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A checkpoint: outputs `model` (all files) and `tokenizer` (the tokenizer's files).
    Model,
    /// An adapter in PEFT's format: output `adapter`.
    Adapter,
    /// Any files: one output `files`.
    Files,
}

/// What a pipeline file may say under `with:` for `uses: download`.
#[derive(Parameters, Debug)]
pub struct Download {
    /// A model on the Hub, `owner/name`, or on ModelScope, `modelscope:owner/name`. Give either this or `path`.
    #[semantic]
    pub repo: Option<String>,
    /// The branch, tag or commit of `repo`; default: `main`, on ModelScope `master`.
    #[semantic]
    pub revision: Option<String>,
    /// The environment variable with the access token; default: `HF_TOKEN`, for ModelScope `MODELSCOPE_API_TOKEN`.
    #[cosmetic]
    pub token_env: Option<String>,
    /// A folder with a checkpoint on this machine, or a GGUF file. Give either this or `repo`.
    #[semantic]
    pub path: Option<LocalPath>,
    /// Whether the files of `path` are copied into the store. With `false` those of 64 KiB and more stay where they
    /// are, but for the tokenizer's and `config.json`.
    #[cosmetic(default = true)]
    pub copy: bool,
    /// Patterns of the files to fetch, such as `*.json`; `*` also matches `/`. Default: all files.
    #[semantic]
    pub include: Option<Vec<String>>,
    /// Patterns of files to leave out.
    ///
    /// Where neither pattern is given and there are safetensors weights, copies of the weights in other forms are left
    /// out too: `original/*`, `*.pth`, `*.bin`, `*.pt`, `*.gguf`, `*.h5`, `*.msgpack`, `*.onnx`.
    #[semantic]
    pub exclude: Option<Vec<String>>,
    /// How the files are used.
    #[semantic(default = Form::Model, rename = "as")]
    pub form: Form,
    /// The pre-tokenizer of a GGUF file, if the name in the file is unknown: `llama-bpe`, `qwen2`, `gpt-2`, `smollm`
    /// or `tekken`.
    #[semantic(omit_default)]
    pub pre_tokenizer: Option<String>,
}

/// Where the files come from.
enum Origin<'a> {
    Hub(&'a str),
    Folder(&'a LocalPath),
}

impl Download {
    /// The origin; nothing where the parameters name none or two, which the check reports.
    fn origin(&self) -> Option<Origin<'_>> {
        match (&self.repo, &self.path) {
            (Some(name), None) => Some(Origin::Hub(name)),
            (None, Some(path)) => Some(Origin::Folder(path)),
            _ => None,
        }
    }

    /// The pin of a repository, where its name is one.
    fn pin_request(&self, name: &str) -> Option<PinRequest> {
        let repository = Repository::parse(RepositoryKind::Model, name).ok()?;
        let revision = self.revision.as_deref().unwrap_or(repository.service().default_revision());
        Some(PinRequest {
            kind: repository.pin_kind().to_owned(),
            name: repository.name().to_owned(),
            revision: revision.to_owned(),
            token_env: self.token_env.clone(),
            span: Span::default(),
        })
    }
}

impl StageKind for Download {
    const NAME: &'static str = "download";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Brings a checkpoint from the Hub or a folder, every file checked.";
    const ALSO_CALLED: &'static [&'static str] = &["model", "base_model", "hub", "hf_hub"];

    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        let repository = Repository::of_pin(&request.kind, &request.name).map_err(bad_name)?;
        let service = repository.service();
        let hub = Hub::from_environment(service, request.token_env.as_deref());
        hub.and_then(|hub| hub.pin(&repository, &request.revision)).map_err(|error| error.of(service))
    }

    /// A checkpoint has no smaller form; and what was fetched for a smoke run need not be fetched again.
    fn smoke(_: &serde_json::Value) -> Smoke {
        Smoke::Same
    }
}

impl Stage for Download {
    fn outputs(&self) -> Vec<Output> {
        match self.form {
            Form::Model => vec![Model::output("model"), Tokenizer::output("tokenizer")],
            Form::Adapter => vec![Adapter::output("adapter")],
            Form::Files => vec![Files::output("files")],
        }
    }

    fn check(&self, _: &InputFacts, span: Span) -> Vec<Problem> {
        let problem = |message: String, label: &str| Problem::error("bad-source", span, message, label);
        let mut problems = Vec::new();
        match (&self.repo, &self.path) {
            (Some(_), Some(_)) => {
                problems
                    .push(problem("`repo` and `path` are both given".to_owned(), "one of them is enough").at("path"));
            }
            (None, None) => {
                let missing = problem("neither `repo` nor `path` is given".to_owned(), "where does it come from?");
                problems.push(missing.with_help("say `repo: owner/name` for the Hub, or `path: ./folder`"));
            }
            (None, Some(_)) if self.revision.is_some() => {
                let problem = problem("`revision` belongs to `repo`".to_owned(), "a folder has no revisions");
                problems.push(problem.at("revision"));
            }
            (None, Some(_)) if self.token_env.is_some() => {
                problems.push(problem("`token_env` belongs to `repo`".to_owned(), "a folder needs no token"));
            }
            _ => {}
        }
        if let Some(Err(error)) = self.repo.as_ref().map(|name| Repository::parse(RepositoryKind::Model, name)) {
            let help = "a repository is named `owner/name`; a folder on this machine is given as `path:`";
            problems.push(problem(error.to_string(), "not a name on the Hub").with_help(help).at("repo"));
        }
        problems.extend(outside::check(self, span));
        if let Some(name) = self.pre_tokenizer.as_ref().filter(|name| !gguf::is_pre_tokenizer(name)) {
            let unknown = problem(format!("there is no pre-tokenizer `{name}`"), "not a known name");
            let known = model::gguf::PRE_TOKENIZERS.join(", ");
            problems.push(unknown.with_help(format!("known are {known}")).at("pre_tokenizer"));
        }
        problems
    }

    fn outside(&self) -> Vec<Outside> {
        match self.origin() {
            Some(Origin::Hub(name)) => self.pin_request(name).map(Outside::Pin).into_iter().collect(),
            Some(Origin::Folder(path)) => {
                let (role, pattern) = (role(self.form).to_owned(), path.text.clone());
                vec![Outside::Files { role, pattern, span: path.span, count: Counted::All }]
            }
            None => Vec::new(),
        }
    }

    fn secrets(&self) -> Vec<Secret> {
        let Some(Origin::Hub(name)) = self.origin() else { return Vec::new() };
        let repository = Repository::parse(RepositoryKind::Model, name).ok();
        let by_default = repository.map(|repository| repository.service().token_variable());
        by_default.map(|variable| Secret::token(self.token_env.as_deref(), variable)).into_iter().collect()
    }

    fn takes_files_outside(&self) -> bool {
        !self.copy
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        forecast::forecast(self, ahead)
    }

    fn write_derived_key(&self, key: &mut KeyWriter<'_>) {
        // These patterns select otherwise than before. Where there is none nothing has changed, and `VERSION` would
        // fetch every model anew.
        let mut patterns = [&self.include, &self.exclude].into_iter().flatten().flatten();
        if patterns.any(|text| pattern::was_read_otherwise(text)) {
            key.field("patterns", cache::Class::Semantic, |key| key.value("of_the_hub".to_owned()));
        }
    }

    fn derived_from(&self, entry: &str) -> &'static [&'static str] {
        if entry == "patterns" { &["include", "exclude"] } else { &[] }
    }

    fn fetch_metadata(
        &self,
        pinned: &Pinned,
        folder: &Path,
        network: Network,
    ) -> Result<Option<Vec<FetchedFile>>, StageError> {
        metadata::fetch(self, pinned, folder, network)
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let selection = Selection::new(self.include.as_deref(), self.exclude.as_deref(), self.form);
        let output = match self.form {
            Form::Model => "model",
            Form::Adapter => "adapter",
            Form::Files => "files",
        };
        let mut draft = context.create(output)?;
        let trained_on = match self.origin() {
            Some(Origin::Hub(name)) => fetch(name, self, &selection, &draft, context)?,
            Some(Origin::Folder(_)) => take(self, &selection, &mut draft, context)?,
            None => return Err(StageError::internal("a download without an origin passed the check")),
        };
        match self.form {
            Form::Files => context.seal(draft, Facts::new(), None)?,
            Form::Adapter => seal_adapter(draft, trained_on, context)?,
            Form::Model => seal_checkpoint(draft, found_at(self, context), context)?,
        }
        forget_working_files(context.working())
    }
}

fn bad_name(error: BadRepositoryName) -> StageError {
    StageError::new(Cause::BadParameters, error.to_string())
}

/// Fetches the selected files of a repository, and puts them under their own names into the output. Gives the weights
/// that an adapter was trained on, where one lies with it.
fn fetch(
    name: &str,
    params: &Download,
    selection: &Selection,
    draft: &Draft,
    context: &mut StageContext,
) -> Result<Option<Facts>, StageError> {
    let repository = Repository::parse(RepositoryKind::Model, name).map_err(bad_name)?;
    let service = repository.service();
    let pinned = pinned(name, params, context)
        .ok_or_else(|| StageError::internal(format!("the job does not say which commit of `{name}` is meant")))?
        .clone();
    let snapshot = repository.at(&pinned.commit);
    let failed = |error: HubError| error.of(service);
    let hub = Hub::from_environment(service, params.token_env.as_deref()).map_err(failed)?;
    let hub = hub.with_network(context.network());
    let listed = hub.pinned_files(&repository, &pinned).map_err(failed)?;
    let names: Vec<&str> = listed.iter().map(|file| file.path.as_str()).collect();
    let chosen = selection.choose(&names, &format!("`{name}`"))?;
    let mut files: Vec<RemoteFile> =
        listed.iter().filter(|file| chosen.contains(&file.path.as_str())).cloned().collect();

    let working = context.working().to_owned();
    let note = format!("{} files of {name}", files.len());
    let mut observe = |progress: Progress| {
        context.progress("bytes", progress.done, Some(progress.total), Some(note.clone()));
        if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let source = gguf::source(&chosen).filter(|_| params.form == Form::Model);
    if params.form == Form::Model && source.is_none() {
        // It comes alone and first: the gigabytes of a model that cannot be used are not moved.
        let configuration: Vec<RemoteFile> = files.iter().filter(|file| file.path == CONFIG).cloned().collect();
        let folder = hub.download(&snapshot, &configuration, &working, &mut observe).map_err(failed)?;
        check_configuration(&folder.join(CONFIG))?;
    }
    let record = listed.iter().filter(|file| params.form == Form::Adapter && record::is_one(&file.path));
    let all: Vec<RemoteFile> = files.iter().chain(record.filter(|record| !files.contains(record))).cloned().collect();
    let fetched = hub.download(&snapshot, &all, &working, &mut observe).map_err(failed)?;
    if params.form != Form::Files {
        // What arrived is what was uploaded, and that may be half a file.
        let check = |file: &RemoteFile| check_fetched(&fetched.join(&file.path), &file.path);
        files.iter().try_for_each(check)?;
    }
    let trained_on = (params.form == Form::Adapter).then(|| record::trained_on(&fetched)).flatten();
    files.retain(|file| !is_own(&file.path, &fetched.join(&file.path)));
    files.iter().try_for_each(|file| put(&fetched.join(&file.path), &draft.folder.join(&file.path)))?;
    if let Some(source) = source {
        gguf::complete(&draft.folder, source, params.pre_tokenizer.as_deref())?;
    }
    Ok(trained_on)
}

/// As [`checkpoint::check_file`], for a file of a repository: a pointer there was uploaded, and nothing else can be
/// fetched.
fn check_fetched(path: &Path, name: &str) -> Result<(), StageError> {
    checkpoint::check_file(path, name).map_err(|error| {
        let mut first = Vec::new();
        let is_read = File::open(path).is_ok_and(|file| file.take(64).read_to_end(&mut first).is_ok());
        match is_read && is_lfs_pointer(&first) {
            true => error.with_help("the repository has it in the file's place: name another `revision` or `repo`"),
            false => error,
        }
    })
}

/// What the plan has pinned a repository to.
fn pinned<'a>(name: &str, params: &Download, context: &'a StageContext) -> Option<&'a Pinned> {
    let request = params.pin_request(name)?;
    context.pin(&format!("{}:{}@{}", request.kind, request.name, request.revision))
}

/// Whether a file is the description that a version of this program put into the folders that it published: it is no
/// part of what was published, so that an artefact taken back is the one that it was.
fn is_own(name: &str, path: &Path) -> bool {
    name == ARTIFACT_FILE && is_description(path)
}

/// The largest `config.json` that is read: published ones have some kilobytes.
const LARGEST_CONFIGURATION: u64 = 16 << 20;

/// Makes sure that the model is one that is computed, natively or by transformers.
fn check_configuration(path: &Path) -> Result<(), StageError> {
    let size = fs::metadata(path).map_or(0, |found| found.len());
    if size > LARGEST_CONFIGURATION {
        return Err(StageError::bad_data(format!("the checkpoint's `config.json` has {size} bytes and is not read")));
    }
    let text = fs::read_to_string(path).or_fail(Cause::Machine, || format!("cannot read `{}`", path.display()))?;
    match Architecture::from_json(&text) {
        Ok(_) => Ok(()),
        Err(error) => {
            let message = "the checkpoint's `config.json` describes a model that cannot be used here";
            let help = "its weights were left where they are; with `as: files` anything can be taken";
            Err(StageError::bad_data(message).with_source(error).with_help(in_place_of(&text).unwrap_or(help)))
        }
    }
}

/// What to take in the place of a model whose `config.json` says that its weights are stored quantised.
fn in_place_of(config: &str) -> Option<&'static str> {
    let config: serde_json::Value = serde_json::from_str(config).ok()?;
    let is_quantised = ["quantization_config", "compression_config"].iter().any(|key| config[key].is_object());
    is_quantised.then_some(
        "use the original model in 16 bits (`base_model` in its model card), and train with `quantize: { base: nf4 }` \
         to quantise it to 4 bits; weights that bitsandbytes stored in 4 bits and GGUF files are read as they are",
    )
}

/// Moves a fetched file into the output. A process that is killed between this and the seal has to fetch again: a
/// second name for the file would let it change behind the store's back, and a second copy doubles the disk that a
/// download takes.
fn put(from: &Path, to: &Path) -> Result<(), StageError> {
    create_parent(to)?;
    fs::rename(from, to).or_else(|_| checkpoint::copy(from, to))
}

/// Takes the selected files of the folder into the output, as copies or where they are; each is checked against the
/// digest that it was planned with. Gives the weights that an adapter was trained on, where one lies with it.
fn take(
    params: &Download,
    selection: &Selection,
    draft: &mut Draft,
    context: &mut StageContext,
) -> Result<Option<Facts>, StageError> {
    let form = params.form;
    let granted: Vec<FileGrant> = context.files(role(form)).to_vec();
    let names: Vec<&str> = granted.iter().map(|file| file.relative.as_str()).collect();
    let chosen = selection.choose(&names, "the folder")?;
    let source = gguf::source(&chosen).filter(|_| form == Form::Model);
    let chosen = granted.iter().filter(|file| chosen.contains(&file.relative.as_str()));
    let files: Vec<&FileGrant> = chosen.filter(|file| !is_own(&file.relative, &file.path)).collect();
    files.iter().filter(|file| !file.path.exists()).try_for_each(|gone| context.verify(gone))?;
    if form == Form::Model && source.is_none() {
        let configuration = files.iter().find(|file| file.relative == CONFIG).expect("it was chosen");
        check_configuration(&configuration.path)?;
    }
    if form != Form::Files {
        files.iter().try_for_each(|file| checkpoint::check_file(&file.path, &file.path.display().to_string()))?;
    }
    let total = files.iter().map(|file| file.size).sum();
    let mut done = 0;
    for file in files {
        let is_source = source == Some(file.relative.as_str());
        let name = if is_source { FILE } else { &file.relative };
        let to = draft.folder.join(name);
        create_parent(&to)?;
        context.progress("bytes", done, Some(total), Some(file.relative.clone()));
        if !outside::leave(params, file, draft, name, context)? {
            checkpoint::copy_source(file, &to, context)?;
        }
        if context.cancelled() {
            return Err(StageError::new(Cause::Cancelled, "the copy was stopped"));
        }
        done += file.size;
    }
    context.progress("bytes", total, Some(total), None);
    if source.is_some() {
        gguf::complete(&draft.folder, FILE, params.pre_tokenizer.as_deref())?;
    }
    let configuration = granted.iter().find(|file| form == Form::Adapter && file.relative == ADAPTER_CONFIG);
    Ok(configuration.and_then(|file| record::trained_on(file.path.parent()?)))
}

/// Checks that the files are an adapter that we compute; of one that was made here, `trained_on` says on what.
fn seal_adapter(mut draft: Draft, trained_on: Option<Facts>, context: &mut StageContext) -> Result<(), StageError> {
    let mut facts = adapter_facts(&draft.folder)?;
    facts.extend(trained_on.unwrap_or_default());
    let quantize = WeightFormat::of_adapter(&facts)?.fact();
    let identity = adapter::identity(read_adapter_config(&draft.folder)?, quantize.as_ref(), &mut draft)?;
    context.seal(draft, facts, Some(identity))
}

/// What is known of an adapter in PEFT's form, if we compute it.
pub(crate) fn adapter_facts(folder: &Path) -> Result<Facts, StageError> {
    let config = read_adapter_config(folder)?;
    let mut facts = Facts::new();
    facts.insert("rank".to_owned(), config.rank.into());
    if let Some(base_model) = config.base_model {
        facts.insert("base_model".to_owned(), base_model.into());
    }
    Ok(facts)
}

fn read_adapter_config(folder: &Path) -> Result<AdapterConfig, StageError> {
    AdapterConfig::read(&folder.join(ADAPTER_CONFIG))
        .or_fail(Cause::BadData, || "the adapter cannot be used here".to_owned())
}

/// What is known of a checkpoint in the Hub's format, if it is whole and we compute its model.
pub(crate) fn model_facts(draft: &mut Draft) -> Result<Facts, StageError> {
    check_configuration(&draft.folder.join(CONFIG))?;
    selection::check_shards(&draft.folder)?;
    checkpoint::facts(draft)
}

/// What adapters call the checkpoint, as facts.
fn found_at(params: &Download, context: &StageContext) -> Facts {
    let mut facts = Facts::new();
    let mut set = |name: &str, value: &str| drop(facts.insert(name.to_owned(), value.into()));
    match params.origin() {
        Some(Origin::Hub(name)) => {
            set(checkpoint::REPO, name);
            if let Some(pinned) = pinned(name, params, context) {
                set(checkpoint::REVISION, &pinned.commit);
            }
        }
        Some(Origin::Folder(path)) => set(checkpoint::FOLDER, &path.text),
        None => {}
    }
    facts
}

/// Checks that the files are a checkpoint, and makes outputs of it and of its tokenizer. `found_at` is what adapters
/// call it.
fn seal_checkpoint(mut draft: Draft, found_at: Facts, context: &mut StageContext) -> Result<(), StageError> {
    selection::check_shards(&draft.folder)?;
    let mut facts = checkpoint::facts(&mut draft)?;
    facts.extend(found_at);
    let tokenizer_draft = context.create("tokenizer")?;
    checkpoint::copy_tokenizer(&draft.folder, &tokenizer_draft.folder)?;
    let tokenizer = open_copy(&tokenizer_draft.folder, &draft.folder)?;
    let mut tokenizer_facts = Facts::new();
    tokenizer_facts.insert("vocab_size".to_owned(), tokenizer.vocab_size().into());
    tokenizer_facts.insert(checkpoint::CHAT_TEMPLATE.to_owned(), tokenizer.chat_templates().is_some().into());
    context.seal(tokenizer_draft, tokenizer_facts, None)?;
    context.seal(draft, facts, None)
}

fn create_parent(path: &Path) -> Result<(), StageError> {
    let folder = path.parent().expect("a file has a folder");
    fs::create_dir_all(folder).or_fail(Cause::Machine, || format!("cannot create folder `{}`", folder.display()))
}
