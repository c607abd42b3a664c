//! A model for `serve` and `chat`: which one the command line names, opened with its adapters, tokenizer and templates.

mod stored;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use ::devices::DeviceKind;
use cache::Staging;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use engine::artifact::Facts;
use engine::error::StageError;
use engine::suggest;
use stages::compute::backend::{Backend, Choice};
use stages::compute::inference::{
    Adjustments, EngineSettings, GrammarError, Grammars, InferenceEngine, OpenedEngine, QueuedRequest, Sampling,
    facts_of_adapter, facts_of_model, open_engine, read_adapter, token_ids_of_model,
};
use stages::compute::kernels::Dtype;
use stages::compute::precision::Precision;
use stages::compute::quantize::{BlockFormat, WeightFormat, difference};
use stages::data::artifact::Message;
use stages::data::prompt::{ChatTemplateChoice, PROMPT, PromptError, PromptParams, Prompter, StopTexts, ToolForm};
use stages::data::tokenizer::Tokenizer;

use crate::progress::Verbosity;
use crate::render::Failure;
use crate::{Global, terminal};
pub(crate) use stored::{Newer, Watched};

const MODEL: &str = "Model";

/// The shape of a checkpoint's model.
const CONFIG: &str = "config.json";

/// Which model a command uses.
#[derive(Args)]
pub(crate) struct ModelArgs {
    /// The pipeline file.
    #[arg(required_unless_present = "model", requires = "output")]
    file: Option<PathBuf>,
    /// The stage with a model or an adapter, or one of its outputs; stages without a result run first.
    #[arg(value_name = "STAGE[.OUTPUT]")]
    output: Option<String>,
    /// Changes to the file, as `stage.path=value` or `vars.name=value`.
    #[arg(value_name = "OVERRIDE")]
    overrides: Vec<String>,
    /// A model's folder, instead of a pipeline file.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["file", "output"], help_heading = MODEL)]
    model: Option<PathBuf>,
    /// An adapter's folder, as PEFT writes it, and its name in requests; may be given several times.
    #[arg(long = "adapter", value_name = "NAME=FOLDER", help_heading = MODEL)]
    adapters: Vec<NamedFolder>,
    /// A tokenizer's folder [default: the one that the model was trained with, else the model's own].
    #[arg(long, value_name = "FOLDER", help_heading = MODEL)]
    tokenizer: Option<PathBuf>,
    /// The chat template: a family's name, or a Jinja template [default: the one that the model was trained with, else
    /// its own].
    #[arg(long, value_name = "TEMPLATE", value_parser = ChatTemplateChoice::known, help_heading = MODEL)]
    chat_template: Option<ChatTemplateChoice>,
    /// The backend [default: this program if it supports the device, else the torch worker].
    #[arg(long, value_enum, default_value = "auto", hide_default_value = true, help_heading = MODEL)]
    backend: BackendArg,
    /// The kind of device, of which one is used [default: the first that the backend prefers and the machine has].
    #[arg(long, value_parser = DeviceArg::parser(), default_value = "auto", hide_default_value = true, help_heading = MODEL)]
    device: DeviceArg,
    /// Compute dtype; `f16` only on the torch worker.
    #[arg(long, value_enum, default_value = "f32", help_heading = MODEL)]
    dtype: DtypeArg,
    /// The format that weights are quantised to when they are loaded.
    #[arg(long, value_enum, help_heading = MODEL)]
    quantize: Option<QuantizeArg>,
    /// Number of threads [default: those of the machine].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..), help_heading = MODEL)]
    threads: Option<u16>,
    /// Maximum number of tokens of a prompt and its completion together [default: the model's positions].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..), help_heading = MODEL)]
    max_model_len: Option<u32>,
}

/// What an opened model is used for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Requests at once.
    pub(crate) sequences: usize,
    /// Bytes for the keys and values of prompts that others begin with.
    pub(crate) prefix_bytes: u64,
}

/// What becomes of an adapter that its stage has not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Missing {
    /// It is made first.
    Make,
    /// It is used once a run has made it, and so is every newer one.
    Await,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum BackendArg {
    Auto,
    Native,
    Torch,
}

/// A kind of device that models are served on; `auto` is none.
#[derive(Debug, Clone, Copy)]
struct DeviceArg(Option<DeviceKind>);

impl DeviceArg {
    fn parser() -> impl TypedValueParser<Value = Self> {
        let kinds = [DeviceKind::Cpu].into_iter().chain(DeviceKind::accelerators());
        let names = ["auto"].into_iter().chain(kinds.map(DeviceKind::name));
        PossibleValuesParser::new(names).map(|name| Self(DeviceKind::of_name(&name)))
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DtypeArg {
    F32,
    Bf16,
    F16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum QuantizeArg {
    Int8,
    Int4,
}

/// `name=folder`.
#[derive(Debug, Clone)]
struct NamedFolder {
    name: String,
    folder: PathBuf,
}

impl FromStr for NamedFolder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
                Ok(Self { name: name.to_owned(), folder: folder.into() })
            }
            _ => Err("expected `NAME=FOLDER`, such as `mine=./out/adapter`".to_owned()),
        }
    }
}

/// Folders to open.
struct Source {
    base: PathBuf,
    base_name: String,
    /// What is known of the base.
    facts: Facts,
    tokenizer: PathBuf,
    adapters: Vec<AdapterSource>,
    /// Keeps links into the store for as long as they are used.
    staging: Option<Staging>,
    /// Finds newer results of the adapter, where these are awaited.
    watched: Option<Watched>,
}

struct AdapterSource {
    name: String,
    folder: PathBuf,
    /// What is known of it.
    facts: Facts,
}

/// A model that is open, with all that goes with it.
pub(crate) struct Opened {
    pub(crate) engine: Box<dyn InferenceEngine>,
    /// Who computes.
    pub(crate) choice: Choice,
    pub(crate) vocabulary: Vocabulary,
    /// Keeps links into the store for as long as they are used.
    pub(crate) staging: Option<Staging>,
    /// Finds newer results of the adapter, where these are awaited.
    pub(crate) watched: Option<Watched>,
}

/// What texts become tokens and tokens texts by, and what there is to complete them.
pub(crate) struct Vocabulary {
    pub(crate) tokenizer: Tokenizer,
    /// The first is what the command line names; the base is among them.
    models: RwLock<Vec<Arc<Named>>>,
    /// What is known of the base.
    facts: Facts,
    /// The chat template of the command line, which all models have.
    chat_template: Option<ChatTemplateChoice>,
    /// What ends a completion.
    stop_token_ids: Vec<u32>,
    /// Tokens of a prompt and its completion together, at most.
    pub(crate) positions: usize,
    pub(crate) vocab_size: usize,
    /// From the first request on that has one.
    grammars: OnceLock<Result<Grammars, GrammarError>>,
    /// By id; from the first request on that asks for log-probabilities.
    token_bytes: OnceLock<Vec<Vec<u8>>>,
}

/// The base or an adapter on it.
pub(crate) struct Named {
    pub(crate) name: String,
    /// Its number in the engine.
    pub(crate) number: usize,
    prompter: Prompter,
    tool_form: Option<ToolForm>,
    stop_texts: StopTexts,
}

impl Named {
    /// The text that ends the answer to a conversation, where it is no token that ends a completion by itself.
    pub(crate) fn stop_text(&self, messages: &[Message]) -> Option<&str> {
        self.stop_texts.of(messages)
    }

    /// How it writes calls of tools, if its chat template has any in a form that can be read.
    pub(crate) fn tool_form(&self) -> Option<ToolForm> {
        self.tool_form
    }
}

impl ModelArgs {
    /// Opens the model, and runs what of the pipeline has to be run for it.
    ///
    /// # Errors
    /// Fails where a file or folder cannot be used, a stage fails, or the machine lacks what is asked for.
    pub(crate) fn open(&self, room: Room, missing: Missing, global: &Global) -> Result<Opened, Failure> {
        let source = self.source(missing, global)?;
        let _preparing = engine::run::ExitOnInterrupt::new();
        let tokenizer = Tokenizer::from_folder(&source.tokenizer).map_err(StageError::from)?;
        let read = |adapter: &AdapterSource| read_adapter(&adapter.folder, &adapter.facts, &source.facts);
        let weights: Vec<_> = source.adapters.iter().map(read).collect::<Result<_, _>>()?;
        let threads = self.threads.map(usize::from);
        let threads = threads.or_else(|| std::thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
        let settings = EngineSettings {
            backend: match self.backend {
                BackendArg::Auto => Backend::Auto,
                BackendArg::Native => Backend::Native,
                BackendArg::Torch => Backend::Torch,
            },
            device: self.device.0,
            precision: self.precision(&source.adapters)?,
            threads,
            sequences: room.sequences,
            prefix_bytes: room.prefix_bytes,
            positions: self.max_model_len.map(|tokens| tokens as usize),
            holder: "a served model",
            log: if global.verbosity() == Verbosity::Verbose { |line| terminal::tell_line(line) } else { |_| () },
            profile: profile::Profile::OFF,
        };
        let OpenedEngine { engine, choice } = open_engine(&source.base, &weights, &settings)?;
        if choice.is_torch && global.verbosity() > Verbosity::Quiet {
            terminal::tell_line(choice.report());
            terminal::tell_line(
                "static batches: requests that wait at the same time start together, and no request joins them later",
            );
        }
        let positions = engine.max_position_embeddings();
        if let Some(asked) = self.max_model_len.filter(|asked| *asked as usize > positions) {
            let message = format!("`--max-model-len {asked}` is more than the model's {positions} positions");
            return Err(Failure::wrong(message).with_help("leave it out for all of them"));
        }
        let vocabulary = Vocabulary {
            stop_token_ids: token_ids_of_model(&source.base, &tokenizer)?,
            models: RwLock::default(),
            facts: source.facts.clone(),
            chat_template: self.chat_template.clone(),
            positions,
            vocab_size: engine.vocab_size(),
            tokenizer,
            grammars: OnceLock::new(),
            token_bytes: OnceLock::new(),
        };
        let adapters = source.adapters.iter().enumerate();
        let adapters = adapters.map(|(index, adapter)| (&adapter.name, index + 1, &adapter.facts));
        for (name, number, facts) in adapters.chain([(&source.base_name, 0, &source.facts)]) {
            let named = vocabulary.named(name, number, facts).map_err(|error| prompt_failure(error, name))?;
            if vocabulary.put(named).is_some() {
                return Err(Failure::wrong(format!("two models have the name `{name}`"))
                    .with_help("give the adapter another one: `--adapter NAME=FOLDER`"));
            }
        }
        Ok(Opened { engine, choice, vocabulary, staging: source.staging, watched: source.watched })
    }

    fn source(&self, missing: Missing, global: &Global) -> Result<Source, Failure> {
        let mut source = match (&self.model, &self.file, &self.output) {
            (Some(_), ..) if missing == Missing::Await => {
                return Err(Failure::wrong("`--watch` is for the stage of a pipeline file that makes an adapter"));
            }
            (Some(folder), ..) => {
                is_model(folder)?;
                Source {
                    base: folder.clone(),
                    base_name: folder_name(folder),
                    facts: facts_of_model(folder),
                    tokenizer: folder.clone(),
                    adapters: Vec::new(),
                    staging: None,
                    watched: None,
                }
            }
            (None, Some(file), Some(output)) => stored::source(file, &self.overrides, output, missing, global)?,
            (None, ..) => return Err(Failure::wrong("neither a pipeline file with a stage nor `--model` is given")),
        };
        for NamedFolder { name, folder } in &self.adapters {
            is_folder(folder)?;
            let facts = facts_of_adapter(folder);
            source.adapters.push(AdapterSource { name: name.clone(), folder: folder.clone(), facts });
        }
        if let Some(folder) = &self.tokenizer {
            is_folder(folder)?;
            source.tokenizer = folder.clone();
        }
        Ok(source)
    }

    /// What is computed in. Without a format on the command line weights have the one that the first adapter was
    /// trained on.
    fn precision(&self, adapters: &[AdapterSource]) -> Result<Precision, Failure> {
        let dtype = match self.dtype {
            DtypeArg::F32 => Dtype::F32,
            DtypeArg::Bf16 => Dtype::Bf16,
            DtypeArg::F16 => Dtype::F16,
        };
        let asked = self.quantize.map(|quantize| match quantize {
            QuantizeArg::Int8 => BlockFormat::Int8,
            QuantizeArg::Int4 => BlockFormat::Int4,
        });
        let formats = adapters.iter().map(|adapter| WeightFormat::of_adapter(&adapter.facts));
        let formats: Vec<_> = formats.collect::<Result<_, _>>()?;
        let format = asked.map(WeightFormat::Blocks).or_else(|| formats.first().cloned());
        let format = format.unwrap_or(WeightFormat::AsStored);
        for (adapter, trained_on) in adapters.iter().zip(&formats) {
            // That of an adapter on weights as they are stored is what `--quantize` asks for.
            let is_asked = asked.is_some() && *trained_on == WeightFormat::AsStored;
            if let Some(warning) = difference(trained_on, &format).filter(|_| !is_asked && !adapter.facts.is_empty()) {
                terminal::tell_line(format_args!("warning: `{}`: {warning}", adapter.name));
            }
        }
        Ok(Precision::new(dtype, format))
    }
}

/// How a model's prompts were made when it was trained, where it was.
fn prompt_of(facts: &Facts) -> PromptParams {
    facts.get(PROMPT).and_then(|prompt| serde_json::from_value(prompt.clone()).ok()).unwrap_or_default()
}

fn is_folder(path: &Path) -> Result<(), Failure> {
    match path.is_dir() {
        true => Ok(()),
        false => Err(Failure::wrong(format!("`{}` is no folder", path.display())).with_help_if(help_for(path))),
    }
}

/// What is looked for where a model or an adapter is named, and the folder nearest to a name that is none.
fn help_for(path: &Path) -> Option<String> {
    const WANTED: &str = "a folder with a checkpoint or an adapter is named, such as one that a pipeline file publishes \
        to; a stage's result is named by its file, `FILE STAGE`";
    let name = path.file_name()?.to_string_lossy().into_owned();
    let within = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folders = within.read_dir().into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    let names: Vec<String> = folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    Some(match suggest::nearest(&name, &names) {
        Some(near) => format!("did you mean `{}`? {WANTED}", path.with_file_name(near).display()),
        None => WANTED.to_owned(),
    })
}

/// Whether a folder may be a checkpoint's.
fn is_model(path: &Path) -> Result<(), Failure> {
    let is_gguf = |path: &Path| path.extension().is_some_and(|extension| extension == "gguf");
    let has_gguf =
        || path.read_dir().is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|it| is_gguf(&it.path()))));
    if is_gguf(path) || (path.is_dir() && !path.join(CONFIG).exists() && has_gguf()) {
        let message = format!("`{}` is in GGUF, and `--model` is for a checkpoint's folder", path.display());
        let help = "a GGUF file is read by a stage: `base: { uses: download, with: { path: FILE } }`, and named by it";
        return Err(Failure::wrong(message).with_help(help));
    }
    is_folder(path)?;
    match path.join(CONFIG).exists() {
        true => Ok(()),
        false => Err(Failure::wrong(format!("`{}` has no `{CONFIG}`: it is no checkpoint", path.display()))),
    }
}

/// The name that a folder's model is served by.
fn folder_name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn prompt_failure(error: PromptError, name: &str) -> Failure {
    let help = error.help().map(str::to_owned);
    Failure::from(StageError { help, ..StageError::bad_data(format!("`{name}` cannot be used")).with_source(error) })
}

impl Vocabulary {
    /// All models; the first is what the command line names.
    pub(crate) fn models(&self) -> Vec<Arc<Named>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A model by its name.
    pub(crate) fn model(&self, name: &str) -> Option<Arc<Named>> {
        self.models().into_iter().find(|model| model.name == name)
    }

    /// A model by a name, which the engine knows by a number. Prompts are made as they were when it was trained; for an
    /// adapter of which nothing is known, as for the base.
    ///
    /// # Errors
    /// Fails where its chat template does not compile.
    pub(crate) fn named(&self, name: &str, number: usize, facts: &Facts) -> Result<Named, PromptError> {
        let mut prompt = prompt_of(if facts.is_empty() { &self.facts } else { facts });
        if let Some(template) = &self.chat_template {
            prompt.chat_template = Some(template.clone());
        }
        let prompter = Prompter::new(&prompt, &self.tokenizer)?;
        let tool_form = prompter.tool_form();
        let stop_texts = prompter.stop_texts(&self.tokenizer);
        Ok(Named { name: name.to_owned(), number, prompter, tool_form, stop_texts })
    }

    /// What is known of the base.
    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Has requests choose a model by its name, in the place of the one that had that name, which is returned.
    pub(crate) fn put(&self, named: Named) -> Option<Arc<Named>> {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        match models.iter_mut().find(|model| model.name == named.name) {
            Some(model) => Some(std::mem::replace(model, Arc::new(named))),
            None => {
                models.push(Arc::new(named));
                None
            }
        }
    }

    /// Has no request choose a model any more.
    pub(crate) fn take(&self, name: &str) -> Option<Arc<Named>> {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        let place = models.iter().position(|model| model.name == name)?;
        Some(models.remove(place))
    }

    /// The tokens of a conversation up to the assistant's answer, by the model's own template, which has the local
    /// time.
    ///
    /// # Errors
    /// Fails where there is no chat template or it refuses.
    pub(crate) fn conversation(&self, model: &Named, messages: &[Message]) -> Result<Vec<u32>, PromptError> {
        Ok(model.prompter.conversation_now(messages, &self.tokenizer)?.encode(&self.tokenizer)?.input_ids)
    }

    /// The tokens of a text as it stands, after the beginning-of-text token where the tokenizer wants one.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub(crate) fn text(&self, model: &Named, text: &str) -> Result<Vec<u32>, PromptError> {
        Ok(model.prompter.plain(text, &self.tokenizer).encode(&self.tokenizer)?.input_ids)
    }

    /// A greedy request for a prompt, with as long a completion as there is room for.
    pub(crate) fn request(&self, model: &Named, prompt: Vec<u32>) -> QueuedRequest {
        QueuedRequest {
            max_new_tokens: self.positions.saturating_sub(prompt.len()),
            prompt,
            row: 0,
            adapter: model.number,
            min_new_tokens: 0,
            stop_token_ids: self.stop_token_ids.clone(),
            sampling: Sampling::GREEDY,
            adjustments: Adjustments::default(),
            constraint: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }

    /// Makes constraints of grammars, with this vocabulary.
    ///
    /// # Errors
    /// Fails where the vocabulary cannot be used.
    pub(crate) fn grammars(&self) -> Result<&Grammars, GrammarError> {
        let grammars = self.grammars.get_or_init(|| Grammars::new(&self.tokenizer, self.vocab_size));
        grammars.as_ref().map_err(Clone::clone)
    }

    /// The bytes that a token stands for; of a special one, those of its name.
    pub(crate) fn token_bytes(&self, id: u32) -> &[u8] {
        let bytes = self.token_bytes.get_or_init(|| self.tokenizer.bytes_by_id());
        bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }
}
