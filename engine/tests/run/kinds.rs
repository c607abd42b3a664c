//! Stage kinds small enough to see through: they pass one integer on.

#![allow(unsafe_code, reason = "limits and signals of a process")]

use std::fs;
use std::path::Path;
use std::process;
use std::thread::sleep;
use std::time::Duration;

use engine::artifact::{Facts, Output};
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::parameter::{ArtifactKind, ByteSize, Class, Input, KeyWriter, LocalPath, Parameters};
use engine::pin::Pinned;
use engine::protocol::WorkerEvent;
use engine::stage::{
    Counted, InputFacts, LessMemory, Outside, PinRequest, Registry, Stage, StageKind, Threads, WorkingState,
};
use nix::libc;
use nix::sys::signal::{Signal, raise};

/// An artefact that is one number in `number.txt`.
pub(crate) struct Number;

impl ArtifactKind for Number {
    const KINDS: &'static [&'static str] = &["number"];
}

pub(crate) fn registry() -> Registry {
    Registry::new()
        .with::<Constant>()
        .with::<Sum>()
        .with::<Half>()
        .with::<ReadNumber>()
        .with::<Slow>()
        .with::<Unlucky>()
        .with::<Hungry>()
        .with::<Named>()
}

fn number_of(context: &mut StageContext, input: &Input<Number>) -> Result<i64, StageError> {
    let artifact = context.open(input)?;
    let text =
        fs::read_to_string(artifact.folder.join("number.txt")).or_fail(Cause::BadData, || "unreadable".into())?;
    text.parse().or_fail(Cause::BadData, || "not a number".into())
}

fn put(context: &mut StageContext, number: i64) -> Result<(), StageError> {
    let draft = context.create("number")?;
    fs::write(draft.folder.join("number.txt"), number.to_string()).or_fail(Cause::Machine, || "cannot write".into())?;
    let mut facts = Facts::new();
    facts.insert("number".to_owned(), number.into());
    context.seal(draft, facts, None)
}

/// `constant`: a number from the file, or a pinned one.
#[derive(Debug, Parameters)]
pub(crate) struct Constant {
    #[semantic(default = 0)]
    value: i64,
    #[cosmetic(default)]
    note: String,
    /// A name whose present number is looked up.
    #[semantic]
    pinned: Option<String>,
}

impl Constant {
    fn request(&self) -> Option<PinRequest> {
        let name = self.pinned.clone()?;
        Some(PinRequest { kind: "number".into(), name, revision: "now".into(), token_env: None, span: Span::default() })
    }
}

impl StageKind for Constant {
    const NAME: &'static str = "constant";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "a number";

    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        match request.name.as_str() {
            "nobody" => Err(StageError::new(Cause::Network, "nobody answers")),
            "slow" => {
                sleep(Duration::from_secs(60));
                Err(StageError::new(Cause::Network, "it took too long"))
            }
            // Another run pins something while this one asks.
            lock_file if lock_file.ends_with("pipeline.lock") => {
                let pins = format!("{{ \"version\": 1, \"pins\": {{ \"number:other@now\": \"{}\" }} }}", commit(9));
                fs::write(lock_file, pins).or_fail(Cause::Machine, || "cannot write".into())?;
                Ok(Pinned::commit(commit(1)))
            }
            name => Ok(Pinned::commit(commit(name.len()))),
        }
    }
}

impl Stage for Constant {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn outside(&self) -> Vec<Outside> {
        self.request().map(Outside::Pin).into_iter().collect()
    }

    fn forecast(&self, _: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast::default();
        if self.pinned.is_none() {
            forecast.expect("number", "number", self.value);
        }
        forecast
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let pinned = self.request().map(|request| format!("number:{}@now", request.name));
        let pinned = pinned.and_then(|name| context.pin(&name)?.commit.parse::<i64>().ok());
        context.progress("numbers", 1, Some(1), Some(self.note.clone()));
        put(context, self.value + pinned.unwrap_or(0))
    }
}

pub(crate) fn commit(number: usize) -> String {
    format!("{number:040}")
}

/// `sum`: of numbers.
#[derive(Debug, Parameters)]
pub(crate) struct Sum {
    #[semantic]
    of: Vec<Input<Number>>,
    #[semantic(default = 0)]
    plus: i64,
}

impl StageKind for Sum {
    const NAME: &'static str = "sum";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "adds numbers";
}

impl Stage for Sum {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let thirteen = inputs.values().any(|facts| facts.get("number").is_some_and(|number| number == 13));
        if thirteen && self.plus == 0 {
            return vec![Problem::error("unlucky", span, "13 must not be added", "adds 13")];
        }
        Vec::new()
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        let mut forecast = Forecast::default();
        let numbers: Vec<i64> = ahead.expected.values().filter_map(|facts| facts.get("number")?.as_i64()).collect();
        forecast.figure("terms", numbers.len(), format!("{numbers:?}"));
        forecast.peak_memory_bytes = Some(numbers.len() as u64);
        if numbers.contains(&7) {
            forecast.problems.push(Problem::warning("sevens", ahead.span, "adds a seven", "here"));
        }
        forecast
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let numbers: Result<Vec<i64>, _> = self.of.iter().map(|input| number_of(context, input)).collect();
        context.record("terms", self.of.len());
        put(context, numbers?.iter().sum::<i64>() + self.plus)
    }
}

/// `half`: rounded down, so that different inputs can have equal outputs.
#[derive(Debug, Parameters)]
pub(crate) struct Half {
    #[semantic]
    of: Input<Number>,
}

impl StageKind for Half {
    const NAME: &'static str = "half";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "halves a number";
}

impl Stage for Half {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let number = number_of(context, &self.of)?;
        put(context, number / 2)
    }
}

/// `read_number`: the sum of the numbers in some files.
#[derive(Debug, Parameters)]
pub(crate) struct ReadNumber {
    #[semantic]
    source: LocalPath,
}

impl StageKind for ReadNumber {
    const NAME: &'static str = "read_number";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "reads numbers";
}

impl Stage for ReadNumber {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn outside(&self) -> Vec<Outside> {
        let LocalPath { text, span } = self.source.clone();
        vec![Outside::Files { role: "source".into(), pattern: text, span, count: Counted::All }]
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let mut sum = 0;
        for file in context.files("source") {
            context.verify(file)?;
            let text = fs::read_to_string(&file.path).or_fail(Cause::BadData, || "unreadable".into())?;
            sum +=
                text.trim().parse::<i64>().or_fail(Cause::BadData, || format!("`{}` is no number", file.relative))?;
        }
        put(context, sum)
    }
}

/// `slow`: counts to its parameter, saving after each step, and passes on how many processes it took.
#[derive(Debug, Parameters)]
pub(crate) struct Slow {
    /// Read and not used.
    #[semantic]
    after: Option<Input<Number>>,
    #[resumable(default = 3)]
    steps: u64,
    #[semantic(default = 50)]
    milliseconds: u64,
    /// Does not heed requests to stop.
    #[cosmetic(default)]
    stubborn: bool,
    /// Starts a process that outlives this one if nobody ends it.
    #[cosmetic(default)]
    child: bool,
    #[semantic(default)]
    label: String,
    /// The memory that it is estimated to take, within 15 %.
    #[cosmetic]
    estimate: Option<ByteSize>,
}

impl StageKind for Slow {
    const NAME: &'static str = "slow";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "takes its time";
}

impl Stage for Slow {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn forecast(&self, _: &Ahead<'_>) -> Forecast {
        let peak_memory_bytes = self.estimate.as_ref().map(|size| size.0);
        Forecast { peak_memory_bytes, memory_margin: Some(0.15), ..Forecast::default() }
    }

    fn threads(&self) -> Threads {
        Threads::One
    }

    fn working_state(&self, folder: &Path, _: &InputFacts) -> Option<WorkingState> {
        let saved = fs::read_to_string(folder.join("state")).ok()?;
        let done = saved.split(' ').next()?.parse().ok()?;
        Some(WorkingState::GoesOn { unit: "step".to_owned(), done, of: Some(self.steps) })
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let state = context.working().join("state");
        let saved = fs::read_to_string(&state).unwrap_or_else(|_| "0 0".to_owned());
        let (mut step, processes) = saved.split_once(' ').map_or((0, 0), |(step, processes)| {
            (step.parse::<u64>().unwrap_or(0), processes.parse::<i64>().unwrap_or(0))
        });
        if self.child {
            process::Command::new("sleep").arg("1000").spawn().or_fail(Cause::Machine, || "no sleep".into())?;
        }
        while step < self.steps {
            if context.cancelled() && !self.stubborn {
                return Err(StageError::new(Cause::Cancelled, "stopped"));
            }
            sleep(Duration::from_millis(self.milliseconds));
            step += 1;
            fs::write(&state, format!("{step} {}", processes + 1)).or_fail(Cause::Machine, || "cannot save".into())?;
            context.emit(WorkerEvent::Checkpoint { step });
        }
        put(context, processes + 1)
    }
}

/// `unlucky`: fails in a way of the file's choice until it has been tried often enough.
#[derive(Debug, Parameters)]
pub(crate) struct Unlucky {
    #[semantic]
    how: How,
    #[semantic(default = 1000)]
    times: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Parameters)]
enum How {
    Data,
    Network,
    Panic,
    Abort,
    Silence,
    Noise,
    Parameters,
    Numeric,
    /// Writes to a disk that is full, and takes it for something else.
    Disk,
    /// What a driver says of a device that is gone.
    Device,
    /// What a driver says of a device whose memory is full.
    DeviceMemory,
    /// Is killed, by itself.
    Killed,
    /// Is told to stop by somebody who is not the engine.
    Stopped,
}

impl StageKind for Unlucky {
    const NAME: &'static str = "unlucky";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "fails";
}

impl Stage for Unlucky {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let state = context.working().join("tries");
        let tries: u64 = fs::read_to_string(&state).ok().and_then(|text| text.parse().ok()).unwrap_or(0) + 1;
        fs::write(&state, tries.to_string()).or_fail(Cause::Machine, || "cannot save".into())?;
        if tries > self.times {
            return put(context, i64::try_from(tries).unwrap_or(0));
        }
        match self.how {
            How::Data => Err(StageError::bad_data("the data is bad").with_help("use better data")),
            How::Network => {
                Err(StageError::new(Cause::Network, "the server is away").with_source("connection refused"))
            }
            How::Panic => panic!("this should not happen"),
            How::Abort => process::abort(),
            How::Silence => process::exit(0),
            How::Parameters => Err(StageError::new(Cause::BadParameters, "the model has no module `x_proj`")),
            How::Numeric => Err(StageError::new(Cause::Numeric, "the loss is not finite")),
            How::Disk => fs::write("/dev/full", "text").or_fail(Cause::BadData, || "cannot write the table".into()),
            How::Device => Err(StageError::new(Cause::Machine, "training stopped").with_source("CUDA_ERROR_NO_DEVICE")),
            How::DeviceMemory => {
                Err(StageError::internal("training stopped").with_source("CUDA out of memory. Tried to allocate 2 GiB"))
            }
            How::Killed => {
                raise(Signal::SIGKILL).or_fail(Cause::Internal, || "alive".into())?;
                unreachable!("nobody survives this signal")
            }
            How::Stopped => {
                raise(Signal::SIGTERM).or_fail(Cause::Internal, || "no signal".into())?;
                assert!(context.cancelled());
                Err(StageError::new(Cause::Cancelled, "stopped"))
            }
            How::Noise => {
                println!("a library prints this");
                eprintln!("and this");
                put(context, 1)
            }
        }
    }
}

/// What an allocation of a batch of one takes: much more than the address space that the allocator sets aside for each
/// new thread.
pub(crate) const BATCH_BYTES: usize = 512 << 20;

/// `hungry`: needs memory in proportion to its batch, of which there is little.
#[derive(Debug, Parameters)]
pub(crate) struct Hungry {
    #[cosmetic(default = 1)]
    batch: usize,
    #[cosmetic(default = 1)]
    accumulation: usize,
    /// The largest batch that there is memory for; none at all with 0.
    #[semantic(default = 1)]
    fits: usize,
}

impl StageKind for Hungry {
    const NAME: &'static str = "hungry";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "needs memory";
}

impl Stage for Hungry {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("number", "number")]
    }

    fn write_derived_key(&self, key: &mut KeyWriter<'_>) {
        let product = self.batch * self.accumulation;
        key.field("product", Class::Semantic, |key| key.value(product.to_string()));
    }

    fn with_less_memory(&self, parameters: &serde_json::Value) -> LessMemory {
        let of = |name: &str| parameters.get(name).and_then(serde_json::Value::as_u64).unwrap_or(1);
        let (batch, accumulation) = (of("batch"), of("accumulation"));
        if batch == 1 {
            return LessMemory::Advice("find a machine with more".to_owned());
        }
        let mut parameters = parameters.clone();
        parameters["batch"] = (batch / 2).into();
        parameters["accumulation"] = (accumulation * 2).into();
        LessMemory::Set { parameters, change: format!("batch {batch} → {}", batch / 2) }
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        limit_address_space(self.fits * BATCH_BYTES + BATCH_BYTES / 2)?;
        // An allocation that fails ends the process as it does everywhere. Memory that nothing is written to is none.
        let batch = std::hint::black_box(Vec::<u8>::with_capacity(self.batch * BATCH_BYTES));
        put(context, i64::try_from(batch.capacity() / BATCH_BYTES).unwrap_or(0))
    }
}

/// `files`: files that hold their names.
#[derive(Debug, Parameters)]
pub(crate) struct Named {
    #[semantic]
    names: Vec<String>,
}

impl StageKind for Named {
    const NAME: &'static str = "files";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "makes files";
}

impl Stage for Named {
    fn outputs(&self) -> Vec<Output> {
        vec![Output::new("files", "files")]
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let draft = context.create("files")?;
        for name in &self.names {
            let path = draft.folder.join(name);
            let folder = path.parent().expect("it is in the draft");
            let written = fs::create_dir_all(folder).and_then(|()| fs::write(&path, name));
            written.or_fail(Cause::Machine, || "cannot write".into())?;
        }
        context.seal(draft, Facts::new(), None)
    }
}

/// Lets this process have so much more address space than it has.
fn limit_address_space(more: usize) -> Result<(), StageError> {
    let pages = fs::read_to_string("/proc/self/statm").or_fail(Cause::Internal, || "no statm".into())?;
    let pages: usize = pages.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let limit = u64::try_from(pages * 4096 + more).or_fail(Cause::Internal, || "too much".into())?;
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: the pointer is to a live value of the right type.
    let set = unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) };
    assert_eq!(set, 0, "the limit is lower than the one before");
    Ok(())
}
