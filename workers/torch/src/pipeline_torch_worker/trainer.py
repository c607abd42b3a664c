"""Optimizer steps: gradients summed over micro-batches and ranks, one clipped update, and the checks that it is real."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor

from . import adapter
from .architecture import refuse_packs, shares_state, tensors_in_files, turns_by_length
from .attention import NAME, choose
from .audit import Audit
from .checkpoint import Trained
from .data import Batch, Row, listed
from .device import Device
from .draws import Draws
from .failure import JobFailure
from .job import TrainJob
from .model import DocumentLoss, load_base, load_empty, read_config, recompute_layers
from .optimizer import Optimizer, Parameters, set_values
from .parallel import Ranks
from .precision import COMPUTE_TYPES, LossScaler, ScalerState, computing_in
from .sharding import shard


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    loss: float
    """Mean negative log-likelihood over the targets of the step, in nats."""
    target_tokens: int
    grad_norm: float | None
    """Norm of the gradient of that mean over all that is trained, before clipping; none in a skipped step."""
    loss_scale: float | None
    skipped: bool
    """Gradients overflowed under the loss scale: nothing moved, moments included."""
    peak_memory_bytes: list[int]
    """The most memory that each rank has had so far."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together on this rank."""

    rows: list[int]
    batch: Batch
    padded: int
    """Tokens that they would be, each as long as the longest."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> MicroBatch:
        """A micro-batch of whole rows."""
        longest = max((len(row.input_ids) for row in rows), default=0)
        return cls([row.number for row in rows], Batch.of(rows), longest * len(rows))


class Trainer:
    """A model in training on this rank."""

    def __init__(self, job: TrainJob, device: Device, ranks: Ranks) -> None:
        self._job = job
        self._device = device
        self._ranks = ranks
        config = read_config(job.model)
        self.kernel = choose(job.attention, device, job.dtype, config)
        # What is trained is kept in f32 throughout.
        kept_in = COMPUTE_TYPES[job.dtype] if job.method == "lora" else torch.float32
        self._sharded = job.parallel == "fsdp2" and ranks.world > 1
        model = (load_empty if self._sharded else load_base)(job.model, config, kept_in, NAME)
        state = shares_state(model)
        if state is not None and (job.data.packed or (job.validation is not None and job.validation.packed)):
            raise refuse_packs(model, state)
        self._apart = state is not None or turns_by_length(config)
        self._draws = Draws(job.seed)
        self._adapted: PeftModel | None = None
        if job.adapter is not None and job.method == "lora":
            self._adapted = adapter.attach(model, job.adapter, trained=True)
            adapter.set_dropout(self._adapted, job.dropout, self._draws)
        else:
            model.requires_grad_(True)
        if job.activation_checkpointing:
            recompute_layers(model, self._draws)
        self._loss = DocumentLoss(model, self.kernel, self._draws)
        if self._sharded:
            with ranks.collective("share the weights out"):
                shard(self._loss, job, device, ranks.world)
        else:
            self._loss.to(device.torch)
        self.parameters = self._trained_parameters()
        self._optimizer = Optimizer(job.optimizer, self.parameters)
        self._scaler = None if job.loss_scale is None else LossScaler(job.loss_scale)
        self._largest_gradient: str | None = None
        self._audit = self._new_audit()

    def _trained_parameters(self) -> Parameters:
        """What is trained, by its names in files. Sharding has put other parameters in the place of the model's."""
        if self._adapted is None:
            return dict(self._loss.model.named_parameters())
        named = self._adapted.named_parameters()
        return {adapter.file_name(name): parameter for name, parameter in named if parameter.requires_grad}

    def _new_audit(self) -> Audit:
        return Audit(self.parameters, self._optimizer.rate_moves, self._ranks)

    @property
    def steps(self) -> int:
        """Updates so far; skipped steps do not count."""
        return self._optimizer.steps

    @property
    def scaler_state(self) -> ScalerState | None:
        """The factor on the loss, with loss scaling."""
        return None if self._scaler is None else self._scaler.state

    def trained(self) -> Trained:
        """A copy of all that is trained, with its moments. Every rank has to take part."""
        with self._ranks.collective("bring the trained tensors together"):
            return self._optimizer.trained()

    def in_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Trained weights by the names and in the form of the base's files."""
        return tensors_in_files(self._loss.model, values)

    def restore(self, steps: int, saved: Trained, scaler: ScalerState | None) -> None:
        """Takes up a saved state."""
        self._optimizer.restore(steps, saved)
        if self._scaler is not None and scaler is not None:
            self._scaler.state = scaler
        self._audit = self._new_audit()

    def take_values(self, values: dict[str, torch.Tensor]) -> None:
        """Puts other values in the place of the trained ones."""
        set_values(self.parameters, values)

    def step(self, micro_batches: Sequence[MicroBatch], targets: int, learning_rate: float) -> StepReport:
        """One optimizer step over the micro-batches of all ranks, which have `targets` targets together."""
        number = self.steps + 1
        self._draws.step = number
        if self._adapted is not None:
            adapter.set_training(self._adapted, True)
        scale = 1.0 if self._scaler is None else self._scaler.scale
        nll = 0.0
        for micro_batch in self._evened(micro_batches):
            nll += self._accumulate(micro_batch, scale / targets, number)
        self._reduce()
        squares = self._squares()
        # Of this step as far as its backward: where its update takes more, the next step tells it.
        memory = self._ranks.placed(self._device.peak_memory_bytes())
        nll, *memory = self._ranks.sum([nll, *memory], "add up losses")
        peaks = [int(peak) for peak in memory]
        loss = nll / targets
        loss_scale = None if self._scaler is None else scale
        broken = next((name for name, square in squares.items() if not math.isfinite(square)), None)
        if broken is not None:
            self._skip(broken, number)
            return StepReport(loss, targets, None, loss_scale, skipped=True, peak_memory_bytes=peaks)
        norm = math.sqrt(sum(squares.values())) / scale
        self._note(squares)
        self._update(norm, scale, learning_rate)
        self._audit.after_step(learning_rate)
        return StepReport(loss, targets, norm, loss_scale, skipped=False, peak_memory_bytes=peaks)

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The negative log-likelihood summed over the targets of this rank's micro-batches."""
        if self._adapted is not None:
            adapter.set_training(self._adapted, False)
        total = 0.0
        for micro_batch in self._evened(micro_batches):
            with computing_in(self._job.dtype, self._device.torch):
                total += _sum(self._loss(self._on_device(micro_batch.batch)))
        return total

    def _evened(self, micro_batches: Sequence[MicroBatch]) -> Iterable[MicroBatch]:
        """The micro-batches as they are computed; as many on every rank where each computation takes all of them."""
        computed = [micro_batch for micro_batch in micro_batches if micro_batch.batch.tokens > 0]
        if self._apart:
            computed = [MicroBatch(m.rows, piece, m.padded) for m in computed for piece in m.batch.documents()]
        if self._sharded:
            most = self._ranks.greatest(len(computed), "agree on the number of micro-batches")
            computed += [MicroBatch([], Batch.of_nothing(), 0)] * (most - len(computed))
        return computed

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self._device.torch)

    def _accumulate(self, micro_batch: MicroBatch, factor: float, number: int) -> float:
        """Adds the gradients of a micro-batch to those of the step; its summed loss."""
        with self._ranks.collective("forward and backward of sharded layers") if self._sharded else nullcontext():
            with computing_in(self._job.dtype, self._device.torch):
                nll = self._loss(self._on_device(micro_batch.batch))
            total = _sum(nll)
            if not math.isfinite(total):
                raise self._not_finite(micro_batch, nll, total, number)
            (nll.sum() * factor).backward()
        return total

    def _reduce(self) -> None:
        """The sum of all ranks' gradients, in each; sharded ones are sums already."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._sharded:
            gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            self._ranks.add_up(gradients, "add up gradients")

    def _squares(self) -> dict[str, float]:
        """The sum of the squares of each tensor's gradient."""
        # An NPU has no f64.
        wide = torch.float32 if self._device.kind == "npu" else torch.float64
        norms = []
        for parameter in self.parameters.values():
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            assert local is not None
            norms.append(torch.linalg.vector_norm(local, dtype=wide))
        squares = [norm * norm for norm in torch.stack(norms).cpu().double().tolist()]
        if self._sharded:
            squares = self._ranks.sum(squares, "add up gradient norms")
        return dict(zip(self.parameters, squares, strict=True))

    def _note(self, squares: dict[str, float]) -> None:
        for name, square in squares.items():
            if square > 0:
                self._audit.reached(name)
        self._largest_gradient = max(squares, key=lambda name: squares[name])

    def _update(self, norm: float, scale: float, learning_rate: float) -> None:
        limit = self._job.clip_grad_norm
        clipping = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(clipping / scale)
        self._optimizer.step(learning_rate)
        self._forget()
        if self._scaler is not None:
            self._scaler.after_step()

    def _skip(self, tensor: str, number: int) -> None:
        """Forgets gradients that overflowed under the factor on the loss; without such a factor they are an error."""
        if self._scaler is None:
            message = f"the gradient of `{tensor}` is not finite in step {number}{self._before()}"
            raise JobFailure("numeric", message, _remedy(number))
        scale = self._scaler.scale
        self._scaler.after_overflow()
        if self._scaler.is_hopeless:
            message = (
                f"the gradient of `{tensor}` is not finite in step {number}, after {self._scaler.state.skipped} skipped "
                f"attempts down to a loss scale of {scale:g}"
            )
            raise JobFailure("numeric", message, "compute in bf16 or f32")
        self._forget()

    def _forget(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _before(self) -> str:
        largest = self._largest_gradient
        return f"; the largest gradient before it was that of `{largest}`" if largest else ""

    def _not_finite(self, micro_batch: MicroBatch, nll: torch.Tensor, total: float, number: int) -> JobFailure:
        batch = micro_batch.batch
        of_targets = batch.rows[batch.targets.cpu() != -100]
        guilty = sorted({int(row) for row in of_targets[~nll.detach().isfinite().cpu()]})
        message = f"the loss is {total} in step {number}{self._before()}"
        rows = f"its rows of the data: {listed(guilty)}, in a micro-batch of rows {listed(micro_batch.rows)}"
        return JobFailure("numeric", message, f"{_remedy(number)}; {rows} (look at them with `pipeline show`)")


def _sum(nll: torch.Tensor) -> float:
    return float(nll.detach().cpu().double().sum())


def _remedy(number: int) -> str:
    if number == 1:
        return (
            "nothing has been trained yet: the model, or the adapter to go on from, holds values that are not finite or too great, "
            "or `lora.alpha` is too great"
        )
    return "lower `optimizer.learning_rate`, or set `clip_grad_norm` or a longer `scheduler.warmup_steps`"
