"""The job file, read into typed fields. Its form is `job.schema.json`; a test holds the two together."""

from __future__ import annotations

import dataclasses
import json
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .failure import JobFailure
from .optimizers import OPTIMIZERS, OptimizerSettings

DeviceKind = Literal["cpu", "cuda", "rocm", "npu"]
DType = Literal["f32", "bf16", "f16"]
AttentionKind = Literal["auto", "sdpa", "flex", "flash"]
CompileKind = Literal["none", "auto", "layers"]
ParallelKind = Literal["ddp", "fsdp2"]
DivergenceKind = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


@dataclass(frozen=True)
class AtLeast:
    """The least value of a number."""

    least: float


Count = Annotated[int, AtLeast(1)]
NotNegative = Annotated[float, AtLeast(0)]


@dataclass(frozen=True)
class LossScaleSettings:
    """As of `torch.amp.GradScaler`."""

    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int


@dataclass(frozen=True)
class DistillationSettings:
    """A teacher, and how its distributions are compared with the student's."""

    teacher: Path
    temperature: float
    alpha: NotNegative
    divergence: DivergenceKind


@dataclass(frozen=True)
class QuantizeSettings:
    """Frozen linear layers in 4 bits, by bitsandbytes."""

    base: Literal["nf4", "fp4"]
    double_quantization: bool
    block_size: Count
    skip_modules: list[str]


@dataclass(frozen=True)
class TrainJob:
    """An adapter or all weights in training, which requests direct."""

    protocol: Literal[1]
    task: Literal["train"]
    device: DeviceKind
    dtype: DType
    threads: Count
    model: Path
    quantize: QuantizeSettings | None
    method: Literal["lora", "full"]
    adapter: Path | None
    dropout: NotNegative
    parallel: ParallelKind
    attention: AttentionKind
    compile: CompileKind
    packed: bool
    label_smoothing: NotNegative
    distillation: DistillationSettings | None
    optimizer: OptimizerSettings
    clip_grad_norm: float | None
    loss_scale: LossScaleSettings | None
    activation_checkpointing: bool
    seed: Annotated[int, AtLeast(0)]
    run_folder: Path
    profile: bool
    watchdog_seconds: float


@dataclass(frozen=True)
class InferJob:
    """A model that requests score, have complete prompts, and compare.

    One that is quantised is widened again where it is to be merged into.
    """

    protocol: Literal[1]
    task: Literal["infer"]
    device: DeviceKind
    dtype: DType
    threads: Count
    model: Path
    quantize: QuantizeSettings | None
    widen: bool
    adapter: Path | None


@dataclass(frozen=True)
class ServeJob:
    """A model, and adapters that come and go, whose logits requests ask for."""

    protocol: Literal[1]
    task: Literal["serve"]
    device: DeviceKind
    dtype: DType
    threads: Count
    model: Path
    quantize: QuantizeSettings | None


Job = TrainJob | InferJob | ServeJob
TASKS: dict[str, type[Job]] = {"train": TrainJob, "infer": InferJob, "serve": ServeJob}


def read_job(path: Path) -> Job:
    """Reads a job file; what is wrong with it is said all at once."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise JobFailure("internal", f"cannot read the job file `{path}`") from error
    if not isinstance(value, dict) or value.get("task") not in TASKS:
        known = ", ".join(f"`{task}`" for task in TASKS)
        raise JobFailure("internal", f"`{path}` is no job: `task` has to be one of {known}")
    problems: list[str] = []
    job = _read(TASKS[value["task"]], value, "", problems)
    if not problems and isinstance(job, TrainJob):
        problems.extend(_contradictions(job))
    if problems or not isinstance(job, Job):
        help_ = "the program that wrote it and this worker are of different versions, or it was written by hand"
        raise JobFailure("bad_parameters", f"the job file `{path}` is wrong: {'; '.join(problems)}", help_)
    return job


def _contradictions(job: TrainJob) -> list[str]:
    problems = []
    if job.method == "lora" and job.adapter is None:
        problems.append("`method` is `lora`, and `adapter` is null")
    if job.quantize is not None and (job.method == "full" or job.parallel == "fsdp2"):
        problems.append("`quantize` is for `lora`, and for weights that every rank has whole")
    if job.dropout >= 1:
        problems.append(f"`dropout` is {job.dropout}, which is not below 1")
    if job.dtype == "f16" and job.loss_scale is None:
        problems.append("`dtype` is `f16`, and `loss_scale` is null: small gradients would round to zero")
    return problems + job.optimizer.problems()


def _read(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    """`value` as one of `kind`; `None` and a problem where it is none."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner, limit = get_args(kind)
        read = _read(inner, value, name, problems)
        if read is not None and read < limit.least:
            problems.append(f"`{name}` is {value}, which is below {limit.least}")
        return read
    if origin in (Union, types.UnionType):
        (inner,) = [option for option in get_args(kind) if option is not type(None)]
        return None if value is None else _read(inner, value, name, problems)
    if origin is Literal:
        if value in get_args(kind) and not isinstance(value, bool):
            return value
        known = ", ".join(f"`{option}`" for option in get_args(kind))
        problems.append(f"`{name}` is {json.dumps(value)}, not one of {known}")
        return None
    if origin is list:
        if not isinstance(value, list):
            problems.append(f"`{name}` is {json.dumps(value)}, not a list")
            return None
        (inner,) = get_args(kind)
        return [_read(inner, item, f"{name}[{index}]", problems) for index, item in enumerate(value)]
    if kind is OptimizerSettings:
        return _read_optimizer(value, name, problems)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, name, problems)
    return _read_plain(kind, value, name, problems)


def _read_optimizer(value: Any, name: str, problems: list[str]) -> Any:
    """The options of the optimizer that is named beside them."""
    if not isinstance(value, dict) or value.get("name") not in OPTIMIZERS:
        known = ", ".join(f"`{optimizer}`" for optimizer in OPTIMIZERS)
        problems.append(f"`{name}.name` has to be one of {known}")
        return None
    options = {key: option for key, option in value.items() if key != "name"}
    return _read_fields(OPTIMIZERS[value["name"]], options, name, problems)


def _read_fields(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"`{name}` is {json.dumps(value)}, not an object")
        return None
    hints = get_type_hints(kind, include_extras=True)
    prefix = f"{name}." if name else ""
    problems.extend(f"`{prefix}{key}` is not known" for key in value if key not in hints)
    known = len(problems)
    fields = {}
    for field in dataclasses.fields(kind):
        if field.name in value:
            fields[field.name] = _read(hints[field.name], value[field.name], prefix + field.name, problems)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"`{prefix}{field.name}` is missing")
    return kind(**fields) if len(problems) == known else None


def _read_plain(kind: Any, value: Any, name: str, problems: list[str]) -> Any:
    accepted: tuple[type, ...] = {float: (int, float), Path: (str,)}.get(kind, (kind,))
    is_truth = isinstance(value, bool)
    if isinstance(value, accepted) and is_truth == (kind is bool):
        return kind(value)
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", Path: "a path"}[kind]
    problems.append(f"`{name}` is {json.dumps(value)}, not {expected}")
    return None
