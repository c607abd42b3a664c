//! The kernel sets: as `train`, `evaluate` and `generate` name them, and as a stage makes them.

use std::path::PathBuf;

use devices::DeviceKind;
use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::parameter::Parameters;
use model::candle::Candle;
use model::cpu::{Cpu, InstructionSet};
pub use model::cpu::{Measurement, Rates};
use model::ops::Compute;
use profile::Profile;
use serde::Serialize;

/// A set of kernels.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// Our own, for CPUs.
    Cpu,
    /// Candle's tensors, for comparison.
    Candle,
}

impl Kernels {
    /// The set that computes on a device: on the processor the one that is asked for, on a GPU candle's.
    pub fn on(self, device: DeviceKind) -> Self {
        if device == DeviceKind::Cuda { Self::Candle } else { self }
    }
}

/// The kinds of device that this program computes on itself, the fastest first.
pub fn native_devices() -> &'static [DeviceKind] {
    if Candle::SERVES_CUDA { &[DeviceKind::Cuda, DeviceKind::Cpu] } else { &[DeviceKind::Cpu] }
}

/// The number type of the computation.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// Matrix multiplications of bfloat16, summed in f32; trainable parameters, their moments and the loss stay f32.
    Bf16,
    /// As `bf16`, in half precision, with a loss scale (`loss_scale`); on GPUs and the torch worker.
    F16,
}

impl Dtype {
    /// The number type as kernels know it. Kernels of ours do not compute in f16; what a value takes is what one in
    /// bf16 takes.
    pub fn compute(self) -> Compute {
        match self {
            Self::F32 => Compute::F32,
            Self::Bf16 | Self::F16 => Compute::Bf16,
        }
    }
}

/// How exactly matrices of f32 are multiplied, as `torch.set_float32_matmul_precision`.
#[derive(Parameters, Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MatmulPrecision {
    /// In f32.
    #[default]
    Highest,
    /// On a CPU with AMX as three multiplications of bf16, with factors of about 16 bits; elsewhere in f32.
    High,
}

impl MatmulPrecision {
    /// As kernels know it.
    pub fn of_kernels(self) -> model::ops::MatmulPrecision {
        match self {
            Self::Highest => model::ops::MatmulPrecision::Highest,
            Self::High => model::ops::MatmulPrecision::High,
        }
    }

    /// The type whose instructions are taken to compute in another with this precision: those for bf16 multiply f32 of
    /// high precision, too.
    pub fn instructions_of(self, compute: Compute) -> Compute {
        match self {
            Self::Highest => compute,
            Self::High => Compute::Bf16,
        }
    }
}

/// The variable that names the instructions of our own kernels, in place of those that are chosen.
const VARIABLE: &str = "PIPELINE_CPU_KERNELS";

/// The instructions of our own kernels for a type: those that the environment names, else the fastest of this machine,
/// which are measured once and kept in the user's cache folder.
///
/// # Errors
/// Fails if the environment names none that there are.
pub fn instructions(compute: Compute) -> Result<InstructionSet, StageError> {
    let Some(name) = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty()) else {
        return Ok(InstructionSet::chosen(compute, cache_folder().as_deref()));
    };
    instructions_named(&name)
}

/// What our own kernels compute with on this machine, and why.
#[derive(Debug, Serialize)]
pub struct Instructions {
    pub f32: &'static str,
    pub bf16: &'static str,
    /// Whether the environment names them.
    pub named: bool,
    /// The measurement that chose those of bf16, where there are several ways.
    pub measured: Option<Measurement>,
}

/// What our own kernels compute with on this machine, as [`instructions`] has it.
///
/// # Errors
/// As there.
pub fn of_this_machine() -> Result<Instructions, StageError> {
    let in_use = |compute| Ok::<_, StageError>(instructions(compute)?.in_use(compute).name());
    let (f32, bf16) = (in_use(Compute::F32)?, in_use(Compute::Bf16)?);
    let named = std::env::var_os(VARIABLE).is_some_and(|name| !name.is_empty());
    let measured = cache_folder().filter(|_| !named).and_then(|folder| Measurement::kept(&folder));
    Ok(Instructions { f32, bf16, named, measured })
}

/// Why the tiles of the CPU (AMX) cannot be used, where it has some.
pub fn tiles_refused() -> Option<String> {
    #[cfg(target_arch = "x86_64")]
    match model::cpu::tiles() {
        Ok(()) | Err(model::cpu::TilesRefused::Processor) => None,
        Err(refused) => Some(refused.to_string()),
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

fn instructions_named(name: &str) -> Result<InstructionSet, StageError> {
    InstructionSet::named(name).ok_or_else(|| {
        let names: Vec<_> = InstructionSet::ALL.iter().map(|set| format!("`{}`", set.name())).collect();
        StageError::new(Cause::Machine, format!("{VARIABLE} names `{name}`, which is no set of instructions"))
            .with_help(format!("set it to one of {}, or leave it unset", names.join(", ")))
    })
}

/// Where the user's caches of this program are.
fn cache_folder() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = named.or_else(|| std::env::home_dir().map(|home| home.join(".cache")));
    caches.map(|caches| caches.join("pipeline"))
}

/// Our own kernels, on so many threads of those that a stage has.
///
/// # Errors
/// Fails if the machine gives no threads, or the kernels do not compute in this type.
pub fn cpu_on(threads: usize, compute: Compute, context: &StageContext) -> Result<Cpu, StageError> {
    cpu_with(instructions(compute)?, threads, compute, context)
}

/// As [`cpu_on`], with the instructions of a set.
///
/// # Errors
/// As there, and if this process cannot use the set.
pub fn cpu_with(
    set: InstructionSet,
    threads: usize,
    compute: Compute,
    context: &StageContext,
) -> Result<Cpu, StageError> {
    cpu(set, threads, compute, context.profile())
}

/// As [`cpu_on`], without a stage.
///
/// # Errors
/// As there.
pub fn cpu_recorded(threads: usize, compute: Compute, profile: &Profile) -> Result<Cpu, StageError> {
    cpu(instructions(compute)?, threads, compute, profile)
}

fn cpu(set: InstructionSet, threads: usize, compute: Compute, profile: &Profile) -> Result<Cpu, StageError> {
    let kernels = Cpu::with_instructions(threads, compute, set);
    let kernels = kernels.or_fail(Cause::Machine, || "cannot start the cpu kernels".to_owned())?;
    let _phase = profile.phase("measure the machine");
    Ok(kernels.recorded_by(profile.clone()))
}

/// Candle's tensors, on the device that a stage has: of the CUDA devices that its process sees the one with this
/// worker's number, else the processor.
///
/// # Errors
/// Fails where there is no such device, or this build has no kernels for it.
pub fn candle_computing(compute: Compute, context: &StageContext) -> Result<Candle, StageError> {
    let rank = context.membership().map_or(0, |membership| membership.rank);
    let set = if context.devices().kind == DeviceKind::Cuda {
        Candle::on_cuda(rank, compute).map_err(|error| {
            let help = error.help();
            StageError::new(Cause::Machine, "the kernels for CUDA devices cannot start")
                .with_source(error)
                .with_help(help)
        })?
    } else {
        Candle::on_processor_in(compute)
    };
    Ok(set.recorded_by(context.profile().clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_the_environment_is_that_of_a_set() {
        assert_eq!(instructions_named("portable").ok(), Some(InstructionSet::Portable));
        let error = instructions_named("sse").expect_err("no such set");
        assert!(error.to_string().contains("PIPELINE_CPU_KERNELS names `sse`"), "{error}");
    }
}
