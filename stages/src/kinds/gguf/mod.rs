//! `uses: gguf`: a model as one file that llama.cpp, Ollama and others run. The format is [`model::gguf`]'s.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;

use engine::artifact::{Facts, Output};
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast, Work};
use engine::parameter::{Input, Parameters};
use engine::stage::{InputFacts, Stage, StageKind, Threads};
use model::gguf::{Export, ExportOptions, FileType, GgufError, PRE_TOKENIZERS, Progress, Value};
use serde_json::{Map, Value as Json};

use crate::compute::checkpoint;
use crate::data::artifact::{Files, Message, Model, OutputKind};
use crate::data::prompt::{ChatTemplate, ChatTemplateChoice};
use crate::data::tokenizer::end_of_turn_ids;
use crate::forecast::PROCESS_BYTES;

/// The file, and what Ollama makes a model of it by.
const FILE: &str = "model.gguf";
const MODELFILE: &str = "Modelfile";

/// The template of a model's own in the file.
const CHAT_TEMPLATE: &str = "tokenizer.chat_template";

/// ChatML in the language of Ollama's templates, Go's, and what ends its turns.
const CHATML: &str =
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n";
const END_OF_CHATML: &str = "<|im_end|>";

/// What the writer holds beside the process itself: a piece of a tensor as it is stored, and some values per thread.
const WRITER_BYTES: u64 = 48 << 20;

/// What a pipeline file may say under `with:` for `uses: gguf`.
#[derive(Parameters, Debug)]
pub struct Gguf {
    /// The model, with its tokenizer.
    #[semantic]
    pub model: Input<Model>,
    /// The format of the weights. Norms and biases are always f32.
    #[semantic(default = Type::Q8_0, rename = "type")]
    pub file_type: Type,
    /// The name of the model in the file; default: its name on the Hub, or `model`.
    #[semantic]
    pub name: Option<String>,
    /// llama.cpp's name of the pre-tokenizer; default: recognised from `tokenizer.json`.
    #[semantic]
    pub pre_tokenizer: Option<String>,
    /// Whether to write a `Modelfile`, for `ollama create`.
    #[semantic(default = false)]
    pub modelfile: bool,
}

/// How weights are stored; the names are llama.cpp's.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names are those of pipeline files")]
pub enum Type {
    /// 32-bit floats.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits: 8.5 bits per weight.
    Q8_0,
    /// 4 bits: 4.5 bits per weight.
    Q4_0,
    /// 5 bits: 5.5 bits per weight.
    Q5_0,
    /// 4 bits with quantised scales, 6 bits for the most sensitive tensors.
    Q4_K_M,
    /// 5 bits with quantised scales, 6 bits for the most sensitive tensors.
    Q5_K_M,
    /// 6 bits with quantised scales: 6.6 bits per weight.
    Q6_K,
}

impl Type {
    fn file_type(self) -> FileType {
        match self {
            Self::F32 => FileType::F32,
            Self::F16 => FileType::F16,
            Self::Bf16 => FileType::Bf16,
            Self::Q8_0 => FileType::Q8_0,
            Self::Q4_0 => FileType::Q4_0,
            Self::Q5_0 => FileType::Q5_0,
            Self::Q4_K_M => FileType::Q4KM,
            Self::Q5_K_M => FileType::Q5KM,
            Self::Q6_K => FileType::Q6K,
        }
    }
}

impl StageKind for Gguf {
    const NAME: &'static str = "gguf";
    const VERSION: u32 = 5; // 5: what the Modelfile says of turns and of the context.
    const ABOUT: &'static str = "Writes a model as a GGUF file, for llama.cpp and Ollama.";
    const ALSO_CALLED: &'static [&'static str] = &["llama_cpp", "ollama", "export_gguf"];
    const GOAL: bool = true;
}

impl Stage for Gguf {
    fn outputs(&self) -> Vec<Output> {
        vec![Files::output("files")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = Vec::new();
        if let Some(Err(error)) = config(self, inputs).map(model::gguf::check_config) {
            let label = "this model cannot be a GGUF file";
            problems.push(Problem::error("bad-value", span, error.to_string(), label).at("model"));
        }
        if self.pre_tokenizer.as_ref().is_some_and(|name| name.trim().is_empty()) {
            let problem = Problem::error("bad-value", span, "`pre_tokenizer` is empty", "a name of llama.cpp's");
            problems.push(problem.with_help("leave it out, to have it recognised").at("pre_tokenizer"));
        }
        problems
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let fields = config(self, ahead.expected);
        let bytes = fields.and_then(|fields| model::gguf::tensor_bytes(fields, self.file_type.file_type()));
        Forecast {
            work: bytes.map(|bytes| Work::new("bytes", bytes as f64)),
            disk_bytes: bytes,
            peak_memory_bytes: Some(PROCESS_BYTES + WRITER_BYTES),
            ..Forecast::default()
        }
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let model = context.open(&self.model)?;
        let options = ExportOptions {
            file_type: self.file_type.file_type(),
            name: name(self, &model),
            pre_tokenizer: self.pre_tokenizer.clone(),
        };
        let mut export = Export::plan(&model.folder, &options).map_err(failure)?;
        let ends = end_of_turn_ids(&model.folder).unwrap_or_else(|why| {
            context.warn(format!(
                "the file does not name the token that ends a turn, so that llama.cpp may generate beyond it: {why}"
            ));
            Vec::new()
        });
        // A file names one: that of the default template comes first.
        ends.iter().for_each(|id| export.end_turns_with(*id));
        export.warnings().iter().for_each(|warning| context.warn(warning));
        let draft = context.create("files")?;
        let profile = context.profile().clone();
        let writing = profile.phase("quantise and write");
        let threads = rayon::ThreadPoolBuilder::new().num_threads(context.threads());
        let threads = threads.build().or_fail(Cause::Machine, || "cannot start threads".to_owned())?;
        let mut observe = |Progress { done, total }| {
            context.progress("bytes", done, Some(total), Some("writing".to_owned()));
            if context.cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let path = draft.folder.join(FILE);
        // The observer speaks to the engine from this thread; the pieces are read and quantised on those.
        export.write(&path, &threads, &mut observe).map_err(failure)?;
        drop(writing);
        if self.modelfile {
            let turns = Turns::of(&export);
            if turns == Turns::Other {
                context.warn(format!(
                    "Ollama may not know the chat template, and would give the model the bare prompt: compare `ollama \
                     show --template` with it, and add a TEMPLATE to `{MODELFILE}` where they differ"
                ));
            }
            fs::write(draft.folder.join(MODELFILE), modelfile(&export, turns, &ends))
                .or_fail(Cause::Machine, || format!("cannot write `{MODELFILE}`"))?;
        }
        context.report(report(&export));
        context.seal(draft, Facts::new(), None)
    }
}

/// The `config.json` of the model, where its facts have it.
fn config<'a>(params: &Gguf, inputs: &'a InputFacts) -> Option<&'a Map<String, Json>> {
    params.model.reference.facts_in(inputs)?.get(checkpoint::CONFIG)?.as_object()
}

fn name(params: &Gguf, model: &Artifact) -> String {
    let repo = model.description.facts.get(checkpoint::REPO).and_then(Json::as_str);
    let short = |repo: &str| repo.rsplit('/').next().unwrap_or(repo).to_owned();
    params.name.clone().or_else(|| repo.map(short)).unwrap_or_else(|| "model".to_owned())
}

/// What was written, and in which types.
fn report(export: &Export) -> String {
    let mut kinds: Vec<(&str, usize)> = Vec::new();
    for tensor in export.tensors() {
        let name = tensor.tensor_type.name();
        match kinds.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => kinds.push((name, 1)),
        }
    }
    let kinds: Vec<String> = kinds.into_iter().map(|(name, count)| format!("{count} {name}")).collect();
    let megabytes = export.tensor_bytes() as f64 / 1e6;
    format!("{} tensors ({}), {megabytes:.1} MB", export.tensors().len(), kinds.join(", "))
}

/// How a file's chat template writes turns. Ollama reads no Jinja: it looks for a nearly equal text in a list, which
/// has a template of its own for each, and where there is none, the model is given the bare prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turns {
    /// There is no template.
    None,
    ChatMl,
    Other,
}

impl Turns {
    fn of(export: &Export) -> Self {
        let Some(Value::String(template)) = find(export, CHAT_TEMPLATE) else { return Self::None };
        let written = turns_of(template);
        match written.is_some() && written == turns_of(ChatTemplateChoice::new("chatml").text()) {
            true => Self::ChatMl,
            false => Self::Other,
        }
    }
}

/// What a chat template writes of a conversation with a system message, and of one without.
fn turns_of(template: &str) -> Option<[String; 2]> {
    let tokens = ["bos_token", "eos_token"].map(|name| (name.to_owned(), format!("<{name}>")));
    let template = ChatTemplate::new(template, BTreeMap::from(tokens)).ok()?;
    let messages = ["system", "user", "assistant", "user"].map(|role| Message::new(role, "x"));
    Some([template.render(&messages, true).ok()?, template.render(&messages[1..], true).ok()?])
}

fn find<'a>(export: &'a Export, key: &str) -> Option<&'a Value> {
    export.metadata().iter().find(|(known, _)| known == key).map(|(_, value)| value)
}

/// What Ollama makes a model by. The length of the context is Ollama's to choose: it allocates the whole of it.
fn modelfile(export: &Export, turns: Turns, ends: &[u32]) -> String {
    let mut lines = vec![format!("FROM ./{FILE}")];
    match turns {
        Turns::None => {}
        Turns::ChatMl => lines.push(format!("TEMPLATE \"\"\"{CHATML}\"\"\"")),
        Turns::Other => lines.push(
            "# Ollama may not know the chat template in the file: compare `ollama show --template`, or add a TEMPLATE."
                .to_owned(),
        ),
    }
    let id = |key: &str| match find(export, key) {
        Some(Value::U32(id)) => Some(*id),
        _ => None,
    };
    let tokens = match find(export, "tokenizer.ggml.tokens") {
        Some(Value::Array(_, tokens)) => tokens.as_slice(),
        _ => &[],
    };
    let text = |id: u32| match tokens.get(id as usize) {
        Some(Value::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let of_file = [id("tokenizer.ggml.eos_token_id"), id("tokenizer.ggml.eot_token_id")].into_iter().flatten();
    // That of ChatML may be no token of the model's, but plain text.
    let of_turns = (turns == Turns::ChatMl).then_some(END_OF_CHATML);
    let mut stops: Vec<&str> = Vec::new();
    for stop in of_file.chain(ends.iter().copied()).filter_map(text).chain(of_turns) {
        if !stops.contains(&stop) {
            stops.push(stop);
        }
    }
    lines.extend(stops.into_iter().map(|stop| format!("PARAMETER stop {}", Json::from(stop))));
    lines.join("\n") + "\n"
}

fn failure(error: GgufError) -> StageError {
    let cause = match &error {
        GgufError::File { .. } => Cause::Machine,
        GgufError::Stopped => Cause::Cancelled,
        _ => Cause::BadData,
    };
    let help = match &error {
        GgufError::UnknownPreTokenizer(_) => Some(format!(
            "if llama.cpp has a name for it, say it with `pre_tokenizer`; found by themselves are {}",
            PRE_TOKENIZERS.join(", ")
        )),
        _ => None,
    };
    let error = StageError::new(cause, "cannot write the model as a GGUF file").with_source(error);
    match help {
        Some(help) => error.with_help(help),
        None => error,
    }
}
