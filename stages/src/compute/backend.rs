//! Which program computes a stage: this one, or the torch worker.

use devices::DeviceKind;
use engine::context::StageContext;
use engine::error::{Cause, StageError};
use engine::file::interpolate::is_secret;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Mapping, Parameters};
use engine::stage::Workers;
use model::config::{Architecture, Outline, StoredQuantized};
use serde::Serialize;

use crate::compute::kernels::native_devices;
use crate::compute::torch;
use crate::compute::variable::VariableText;

/// What computes.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// This program if it supports the device and the parameters, else the torch worker.
    Auto,
    /// This program: on the CPU, and on CUDA devices if it was built for them.
    Native,
    /// PyTorch, in separate processes: on the CPU, on GPUs and on NPUs.
    Torch,
}

/// How several ranks share the work of training.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parallel {
    /// Each rank has the whole model; gradients are summed.
    Ddp,
    /// Each rank has a shard of every weight, and gathers a layer when it is computed.
    Fsdp2,
}

/// The attention that the torch worker computes with.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// `flash` where device, dtype and model allow it, else `sdpa`.
    Auto,
    /// `scaled_dot_product_attention`, with a mask.
    Sdpa,
    /// `flex_attention`, which skips blocks between documents; on GPUs.
    Flex,
    /// FlashAttention with variable lengths; on NPUs their fused attention.
    Flash,
}

impl Attention {
    /// What asks for it, as in a pipeline file, and what it needs, in the words of the worker, which looks for all of
    /// it (`attention.py`); `None` of what every device has.
    pub fn needs(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Auto | Self::Sdpa => None,
            Self::Flex => Some(("`attention: flex`", "a CUDA or ROCm device, triton, and heads of 16 or wider")),
            Self::Flash => Some((
                "`attention: flash`",
                "a CUDA or ROCm device, bf16 or f16, heads of a multiple of 8, no soft-cap on the scores, and a torch \
                 whose varlen_attn has windows, or the package flash_attn",
            )),
        }
    }
}

/// What of a model in training the torch worker compiles with `torch.compile`.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compile {
    /// Nothing.
    None,
    /// Every layer, on CUDA and ROCm devices with Triton; a layer that torch cannot compile is left as it is.
    Auto,
    /// Every layer, on any device; one that torch cannot compile is an error.
    Layers,
}

/// Which of the two can compute what the parameters ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// Either.
    Both,
    /// This program, and the torch worker on a processor or a GPU where bitsandbytes lies beside it; with the parameter
    /// that decides it.
    WithBitsandbytes(&'static str),
    /// This program alone; with the parameter that decides it.
    Native(&'static str),
    /// The torch worker alone; with the parameter that decides it.
    Torch(&'static str),
}

/// What a model is called whose weights are stored quantised.
const STORED_QUANTIZED: &str = "a model whose weights are stored quantised";

impl Serves {
    /// Which of the two can compute it on a model.
    pub(crate) fn on(self, model: &Architecture) -> Self {
        match (self, model) {
            (Self::Both | Self::WithBitsandbytes(_), Architecture::Transformers(_)) => {
                Self::Torch("a model that is not native")
            }
            (Self::Both | Self::WithBitsandbytes(_), Architecture::Native(config)) => match config.stored_quantized {
                None => self,
                Some(StoredQuantized::Nf4(_)) => Self::WithBitsandbytes(STORED_QUANTIZED),
                Some(StoredQuantized::Gguf { .. }) => Self::Native(STORED_QUANTIZED),
            },
            (serves, _) => serves,
        }
    }
}

/// Who computes, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Whether it is the torch worker.
    pub is_torch: bool,
    /// A lower-case fragment.
    pub because: String,
    pub device: DeviceKind,
    /// On how many of them.
    pub workers: usize,
}

impl Backend {
    /// The kinds of device that it can compute on, the one that `device: auto` prefers first.
    ///
    /// A GPU is not preferred where the torch worker is not installed, so that a pipeline that runs on the processor
    /// today does not need PyTorch because the machine has one.
    pub fn devices(self, serves: Serves) -> Vec<DeviceKind> {
        let processor_last = || DeviceKind::accelerators().chain([DeviceKind::Cpu]);
        let has_bitsandbytes = |device: &DeviceKind| device.facts().torch.is_some_and(|torch| torch.bitsandbytes);
        let with_bitsandbytes = || processor_last().filter(has_bitsandbytes).collect();
        let processor_last = processor_last().collect();
        match (self, serves) {
            (Self::Native | Self::Auto, Serves::Native(_)) | (Self::Native, Serves::WithBitsandbytes(_)) => {
                vec![DeviceKind::Cpu]
            }
            (Self::Native, _) => native_devices().to_vec(),
            (Self::Torch, Serves::WithBitsandbytes(_)) => with_bitsandbytes(),
            (Self::Auto, Serves::WithBitsandbytes(_)) if torch::has_folder_of_bitsandbytes() => with_bitsandbytes(),
            (Self::Auto, Serves::WithBitsandbytes(_)) => vec![DeviceKind::Cpu],
            (Self::Torch, _) | (Self::Auto, Serves::Torch(_)) => processor_last,
            (Self::Auto, Serves::Both) if torch::is_installed() => processor_last,
            (Self::Auto, Serves::Both) => {
                let mut preferred = native_devices().to_vec();
                preferred.extend(DeviceKind::accelerators().filter(|device| !native_devices().contains(device)));
                preferred
            }
        }
    }

    /// Whether it can spread a stage over several devices of which each answers for itself.
    pub fn workers(self, serves: Serves) -> Workers {
        match (self, serves) {
            (Self::Native, _) | (Self::Auto, Serves::Native(_)) => Workers::One,
            (Self::Torch | Self::Auto, _) => Workers::Many,
        }
    }

    /// Who computes on so many devices of a kind. On a GPU that both compute on the torch worker is the faster one
    /// (docs/devices.md, "On an NVIDIA H200").
    pub fn choose(self, serves: Serves, device: DeviceKind, workers: usize) -> Choice {
        // A Python that is named and not there is said to be so: nothing is computed by another program instead.
        let has_worker = || torch::is_usable() || torch::is_named_in_vain();
        self.choose_of(serves, device, workers, native_devices(), has_worker)
    }

    /// The same, of a program that computes on these devices itself, beside a worker or without.
    fn choose_of(
        self,
        serves: Serves,
        device: DeviceKind,
        workers: usize,
        native_devices: &[DeviceKind],
        has_worker: impl Fn() -> bool,
    ) -> Choice {
        let native = |because: String| Choice { is_torch: false, because, device, workers };
        let torch = |because: String| Choice { is_torch: true, because, device, workers };
        match (self, serves, device) {
            (Self::Native, ..) => native("`backend: native` selects it".to_owned()),
            (Self::Torch, ..) => torch("`backend: torch` selects it".to_owned()),
            (Self::Auto, Serves::Native(what), _) => native(format!("only it supports {what}")),
            (Self::Auto, Serves::Torch(what), _) => torch(format!("only it supports {what}")),
            (Self::Auto, Serves::Both | Serves::WithBitsandbytes(_), DeviceKind::Cpu) => {
                native("it serves the CPU".to_owned())
            }
            (Self::Auto, Serves::Both, device) if !native_devices.contains(&device) => {
                torch(format!("this program does not compute on {device}"))
            }
            (Self::Auto, Serves::Both, _) if workers > 1 => {
                torch("it adds gradients up on the devices, and this program in the machine's memory".to_owned())
            }
            (Self::Auto, Serves::Both, device) if has_worker() => torch(format!("it is the faster one on {device}")),
            (Self::Auto, Serves::Both, device) => {
                native(format!("it serves {device}, and the torch worker is not installed"))
            }
            (Self::Auto, Serves::WithBitsandbytes(what), device) => {
                torch(format!("this program does not compute {what} on {device}"))
            }
        }
    }

    /// What is missing where nothing but the torch worker can compute it, and that is not on this machine.
    pub fn lacks(self, serves: Serves, span: Span) -> Option<Problem> {
        let worker = self.lacks_worker(serves, span, torch::what_it_lacks);
        worker.or_else(|| self.lacks_bitsandbytes(serves, span).filter(|_| !torch::has_bitsandbytes()))
    }

    /// What is missing without bitsandbytes.
    fn lacks_bitsandbytes(self, serves: Serves, span: Span) -> Option<Problem> {
        let (Self::Torch, Serves::WithBitsandbytes(what)) = (self, serves) else { return None };
        let message =
            format!("{what} with `backend: torch` needs bitsandbytes, which the torch worker's Python does not have");
        let help = format!("leave `backend` out, or install it: {}", torch::how_to_install_bitsandbytes());
        Some(Problem::error("no-device", span, message, "nothing here computes it").with_help(help).at("backend"))
    }

    /// What is missing where the torch worker `lacks` something: the end of a sentence about it, and what to do. That
    /// is asked only where nothing else will do.
    fn lacks_worker(
        self,
        serves: Serves,
        span: Span,
        lacks: impl FnOnce() -> Option<(String, String)>,
    ) -> Option<Problem> {
        let (what, field, instead) = match (self, serves) {
            (Self::Torch, Serves::Both | Serves::WithBitsandbytes(_)) => {
                ("`backend: torch`", "backend", "leave `backend` out")
            }
            // What goes without the worker is any other number type.
            (Self::Torch | Self::Auto, Serves::Torch(what)) => {
                (what, "dtype", "say `dtype: bf16`, which this program computes itself")
            }
            (Self::Native, _) | (Self::Auto, Serves::Both | Serves::WithBitsandbytes(_)) | (_, Serves::Native(_)) => {
                return None;
            }
        };
        let (lack, remedy) = lacks()?;
        let message = format!("{what} needs the torch worker, {lack}");
        let help = format!("{instead}, or {remedy}");
        Some(Problem::error("no-device", span, message, "nothing here computes it").with_help(help).at(field))
    }

    /// Why a model that is not native cannot be computed by what the parameters ask for, and what to do.
    pub(crate) fn refusal(self, serves: Serves, model: &Outline) -> Option<(String, String)> {
        let (what, help) = match (self, serves) {
            (_, Serves::Native(what)) => (what, format!("leave {what} out: `backend: torch` computes this model")),
            (Self::Native, _) => ("`backend: native`", "set `backend: torch`, or leave `backend` out".to_owned()),
            (Self::Auto | Self::Torch, _) => return None,
        };
        let Outline { model_type, because, .. } = model;
        let message = format!("{what} does not go with `{model_type}`, which is not computed natively: {because}");
        Some((message, help))
    }

    /// The problem of a model that is not native, where the parameters ask for the native backend.
    pub fn problem_on(self, serves: Serves, model: &Outline, span: Span) -> Option<Problem> {
        let (message, help) = self.refusal(serves, model)?;
        let problem = Problem::error("wrong-input", span, message, "only transformers computes this model");
        Some(problem.with_help(help).at("backend"))
    }

    /// What is wrong where the parameters are for the other one.
    pub fn problem(self, serves: Serves, span: Span) -> Option<Problem> {
        let (message, help) = self.contradiction(serves)?;
        let problem = Problem::error("bad-value", span, message, "they do not go together");
        Some(problem.with_help(help).at("backend"))
    }

    /// Why what is asked for is not for the backend that was named, and what to do.
    fn contradiction(self, serves: Serves) -> Option<(String, &'static str)> {
        let (what, other, field) = match (self, serves) {
            (Self::Native, Serves::Torch(what)) => (what, "torch", "native"),
            (Self::Torch, Serves::Native(what)) => (what, "native", "torch"),
            _ => return None,
        };
        let message = format!("{what} needs `backend: {other}`, and the stage has `backend: {field}`");
        Some((message, "leave `backend` out: the one that supports it is selected"))
    }
}

/// The failure of a model that is not native where the torch worker `lacks` something: the end of a sentence about it,
/// and what to do. No other device and no other dtype would help.
pub(crate) fn failure_without_worker(
    model: &Outline,
    lacks: impl FnOnce() -> Option<(String, String)>,
) -> Option<StageError> {
    let (lack, remedy) = lacks()?;
    let Outline { model_type, because, .. } = model;
    let message = format!("`{model_type}` is not computed natively ({because}), and needs the torch worker, {lack}");
    Some(StageError::new(Cause::Machine, message).with_help(remedy))
}

/// What is wrong with variables for the torch worker's processes.
pub(crate) fn problems_of_env(env: &Mapping<VariableText>, span: Span) -> Vec<Problem> {
    let visible: Vec<&str> = DeviceKind::ALL.into_iter().filter_map(DeviceKind::visible_variable).collect();
    let is_own = |name: &str| OWN.contains(&name) || visible.contains(&name) || name.starts_with("PIPELINE_");
    let own = env.keys().filter(|name| is_own(name));
    let mut problems: Vec<Problem> = own
        .map(|name| {
            let message = format!("`{name}` is a variable that the stage's processes are given");
            Problem::error("bad-value", span, message, "not to be set here").at("env")
        })
        .collect();
    let secrets = env.iter().filter(|(name, value)| is_secret(name) && value.0.parse::<f64>().is_err());
    problems.extend(secrets.map(|(name, _)| {
        let message = format!("`{name}` looks like a secret, and values of the file are written into records");
        let help = "set it in the environment of `pipeline run`: the stage's processes inherit it";
        Problem::error("secret-in-file", span, message, "in `env`").with_help(help).at("env")
    }));
    problems
}

/// By these the ranks find each other. By the variables of visible devices they find theirs.
const OWN: [&str; 7] =
    ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

impl Choice {
    /// Who computes a model in this stage; recorded with the result.
    ///
    /// # Errors
    /// Fails where neither computes on the device that the stage was given, or the one that is asked for does not
    /// compute the model or what is asked of it.
    pub fn of(
        asked: Backend,
        serves: Serves,
        model: &Architecture,
        context: &mut StageContext,
    ) -> Result<Self, StageError> {
        if let Architecture::Transformers(outline) = model {
            if let Some((message, help)) = asked.refusal(serves, outline) {
                return Err(StageError::new(Cause::BadParameters, message).with_help(help));
            }
            context.log(&format!("{outline}: {}", outline.because));
            if let Some(failure) = failure_without_worker(outline, torch::what_it_lacks) {
                return Err(failure);
            }
        }
        let serves = serves.on(model);
        if let Some((message, help)) = asked.contradiction(serves) {
            return Err(StageError::new(Cause::BadParameters, message).with_help(help));
        }
        if let (Serves::Torch(what), Architecture::Native(config)) = (serves, model)
            && matches!(config.stored_quantized, Some(StoredQuantized::Gguf { .. }))
        {
            let message = format!("the model's weights are stored quantised, which is not computed with {what}");
            return Err(StageError::new(Cause::BadParameters, message).with_help(format!("leave {what} out")));
        }
        let device = context.devices().kind;
        let workers = context.devices().workers();
        let choice = asked.choose(serves, device, workers);
        let served = if choice.is_torch { device.facts().torch.is_some() } else { native_devices().contains(&device) };
        if !served {
            let message = format!("{} does not compute on {}", choice.name(), device.in_words());
            return Err(StageError::new(Cause::BadParameters, message)
                .with_help("leave `backend` out, or set `resources.device` to another kind"));
        }
        context.record("backend", choice.name());
        context.record("backend_because", choice.because.as_str());
        context.log(&format!("backend: {choice}"));
        Ok(choice)
    }

    /// What the user is told at the end: who computed, and whether that was ever tried on such a device.
    pub fn report(&self) -> String {
        let untried = self.device.not_yet_run(self.workers).map(|note| format!("\n{note}"));
        format!("computed by {self}{}", untried.unwrap_or_default())
    }

    /// The backend's name.
    pub fn name(&self) -> &'static str {
        if self.is_torch { "torch" } else { "native" }
    }
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, since {}", self.name(), self.because)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn native_where_it_serves_else_torch() {
        let is_torch = |asked: Backend, serves, device| asked.choose(serves, device, 1).is_torch;
        assert!(!is_torch(Backend::Auto, Serves::Both, DeviceKind::Cpu));
        assert!(is_torch(Backend::Auto, Serves::Both, DeviceKind::Npu));
        assert!(is_torch(Backend::Auto, Serves::Torch("`dtype: f16`"), DeviceKind::Cpu));
        assert!(!is_torch(Backend::Auto, Serves::Native("`dtype: int8`"), DeviceKind::Cpu));
        assert!(is_torch(Backend::Torch, Serves::Both, DeviceKind::Cpu));
        let choice = Backend::Auto.choose(Serves::Both, DeviceKind::Npu, 1);
        let report = choice.report();
        assert!(report.starts_with("computed by torch, since this program does not compute on npu\nnot yet run on "));
        let on_processor = Backend::Auto.choose(Serves::Both, DeviceKind::Cpu, 1);
        assert_eq!(on_processor.report(), "computed by native, since it serves the CPU");
        // Built with kernels for CUDA, it computes on one such device itself where it has to.
        let cuda = [DeviceKind::Cuda, DeviceKind::Cpu];
        let is_torch = |asked: Backend, workers, has_worker| {
            asked.choose_of(Serves::Both, DeviceKind::Cuda, workers, &cuda, || has_worker).is_torch
        };
        assert!(is_torch(Backend::Auto, 1, true));
        assert!(!is_torch(Backend::Auto, 1, false));
        assert!(is_torch(Backend::Auto, 2, false));
        assert!(!is_torch(Backend::Native, 1, true));
    }

    #[test]
    fn what_attention_needs_is_what_the_worker_says() {
        let worker = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../workers/torch/src/pipeline_torch_worker/attention.py"
        ));
        // Python joins literals that follow each other.
        let lines: Vec<&str> = worker.lines().map(str::trim_start).collect();
        let worker = lines.join("").replace("\"\"", "");
        for (attention, name) in [(Attention::Flash, "flash"), (Attention::Flex, "flex")] {
            let (asked, needs) = attention.needs().expect("not everywhere");
            assert_eq!(asked, format!("`attention: {name}`"));
            assert!(worker.contains(&format!("\"{name}\": \"{needs}\",")), "{needs}");
        }
        assert!(worker.contains("f\"`attention: {asked}` cannot be used here: it needs {needs[asked]}\""));
    }

    #[test]
    fn devices_follow_the_backend() {
        assert_eq!(Backend::Native.devices(Serves::Both), native_devices());
        assert_eq!(Backend::Auto.devices(Serves::Native("`dtype: int4`")), [DeviceKind::Cpu]);
        let torch = [DeviceKind::Cuda, DeviceKind::Npu, DeviceKind::Rocm, DeviceKind::Cpu];
        assert_eq!(Backend::Torch.devices(Serves::Both), torch);
        assert_eq!(Backend::Auto.devices(Serves::Both).len(), 4);
    }

    #[test]
    fn what_needs_the_worker_says_what_to_do_without_it() {
        let lack = || Some(("which is not installed here".to_owned(), "run pip install".to_owned()));
        let lacks = |asked: Backend, serves| asked.lacks_worker(serves, Span::default(), lack);
        let f16 = lacks(Backend::Auto, Serves::Torch("`dtype: f16`")).expect("only the worker computes it");
        assert_eq!(f16.field.as_deref(), Some("dtype"));
        assert!(f16.help.is_some_and(|help| help.starts_with("say `dtype: bf16`") && help.contains("pip install")));
        assert!(lacks(Backend::Torch, Serves::Both).is_some_and(|problem| problem.field.as_deref() == Some("backend")));
        for (asked, serves) in [
            (Backend::Auto, Serves::Both),
            (Backend::Auto, Serves::Native("`dtype: int8`")),
            // Refused already, since the two contradict each other.
            (Backend::Native, Serves::Torch("`dtype: f16`")),
        ] {
            assert_eq!(lacks(asked, serves), None);
        }
        assert_eq!(Backend::Torch.lacks_worker(Serves::Both, Span::default(), || None), None);
    }

    #[test]
    fn without_the_worker_a_model_that_is_not_native_names_what_makes_it_so() {
        let mistral = r#"{"model_type": "mistral", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 144,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 512"#;
        for (key, said) in [
            (r#""attention_bias": true"#, "`attention_bias: true` is not supported; supported: false"),
            (r#""partial_rotary_factor": 0.5"#, "`partial_rotary_factor: 0.5` is not supported"),
            (r#""mlp_bias": true"#, "`mlp_bias: true` is not supported"),
        ] {
            let model = Architecture::from_json(&format!("{mistral}, {key}}}"));
            let Ok(Architecture::Transformers(outline)) = model else { panic!("{key} is not left to transformers") };
            let lack = || Some(("which is not installed here".to_owned(), "run pip install".to_owned()));
            let failure = failure_without_worker(&outline, lack).expect("nothing else computes it");
            assert!(failure.message.contains(said), "{}", failure.message);
            assert!(failure.message.ends_with("needs the torch worker, which is not installed here"));
            assert_eq!(failure.help.as_deref(), Some("run pip install"));
            assert!(failure_without_worker(&outline, || None).is_none());
        }
    }

    #[test]
    fn what_contradicts_itself_is_a_problem() {
        let problem = Backend::Native.problem(Serves::Torch("`dtype: f16`"), Span::default());
        let expected = "`dtype: f16` needs `backend: torch`, and the stage has `backend: native`";
        assert_eq!(problem.map(|problem| problem.message).as_deref(), Some(expected));
        assert!(Backend::Auto.problem(Serves::Torch("`dtype: f16`"), Span::default()).is_none());
    }
}
