"""Optimizer steps: gradients summed over micro-batches and ranks, one clipped update, and the checks that it is real."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.distributed.tensor import DTensor

from . import adapter
from .architecture import embedding_parameters, refuse_packs, shares_state, tensors_in_files, turns_by_length
from .attention import NAME, choose
from .audit import Audit
from .checkpoint import SavedTensors
from .compilation import compile_layers
from .data import Batch
from .device import Device
from .draws import Draws
from .failure import JobFailure
from .inference import Inference
from .job import TrainJob
from .losses import CrossEntropy, Distillation
from .model import DocumentLoss, Taught, load, load_empty, read_config, recompute_layers, stored_in_4_bits
from .optimizer import Optimizer, Parameters
from .parallel import Ranks
from .precision import COMPUTE_TYPES, LossScaler, ScalerState, computing_in
from .sharding import shard
from .weights import check_names, names_in_files

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

# Who scores documents without dropout: the model as it is now, or what its adapter is on.
Scorer = Literal["policy", "base"]


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    loss: float
    """The loss over the targets of the step, each times its weight, divided by the sum of the weights."""
    grad_norm: float | None
    """Norm of the gradient of that loss over all that is trained, before clipping; none in a skipped step."""
    loss_scale: float | None
    """With which gradients may overflow: nothing moves then, moments included."""
    peak_memory_bytes: list[int]
    """The most memory that each rank has had so far."""


@dataclass(frozen=True)
class Stopped:
    """Why a step cannot be done; the stage process has the words for it."""

    why: Literal["loss_not_finite", "gradient_not_finite", "overflow_persists", "not_moved"]
    details: dict[str, Any]


class Trainer:
    """A model in training on this rank."""

    def __init__(self, job: TrainJob, device: Device, ranks: Ranks) -> None:
        self._job = job
        self._device = device
        self._ranks = ranks
        config = self._config = read_config(job.model)
        self.kernel = choose(job.attention, device, job.dtype, config)
        # What is trained is kept in f32 throughout.
        kept_in = COMPUTE_TYPES[job.dtype] if job.method == "lora" else torch.float32
        self._sharded = job.parallel == "fsdp2" and ranks.world > 1
        if self._sharded:
            if stored_in_4_bits(config):
                message = "`parallel: fsdp2` does not go with weights that are stored in 4 bits"
                raise JobFailure("bad_parameters", message, "leave `parallel` out: every device has the whole model")
            model = load_empty(job.model, config, kept_in, NAME)
        else:
            model = load(job.model, config, kept_in, NAME, job.quantize, device.torch)
        state = shares_state(model)
        if state is not None and job.packed:
            raise refuse_packs(model, state)
        self._apart = state is not None or turns_by_length(config)
        self._draws = Draws(job.seed)
        self._adapted: PeftModel | None = None
        self._adapter_layers: list[LoraLayer] = []
        if job.adapter is not None and job.method == "lora":
            self._adapted = adapter.attach(model, job.adapter, trained=True)
            adapter.set_dropout(self._adapted, job.dropout, self._draws)
            self._adapter_layers = [layer for _, layer in adapter.lora_layers(self._adapted)]
        else:
            model.requires_grad_(True)
        self._compiled = compile_layers(model, job.compile, device)
        if self._adapted is not None and self._compiled is None:
            # What is compiled is fused by the compiler.
            adapter.fuse_products(self._adapted)
        if job.activation_checkpointing:
            recompute_layers(model, self._draws, nested=not self._sharded and self._compiled is None)
        self._loss = DocumentLoss(model, self.kernel, self._draws)
        self._of_targets = self._loss_of_targets()
        if self._sharded:
            with ranks.collective("share the weights out"):
                shard(self._loss, job, device, ranks.world)
        else:
            self._loss.to(device.torch)
        self.parameters = self._trained_parameters()
        self._stored = names_in_files(job.model) if self._adapted is None else set()
        if self._adapted is None:
            check_names(self._stored, self._names_in_files())
        of_embeddings = {id(parameter) for parameter in embedding_parameters(self._loss.model)}
        embeddings = {name for name, parameter in self.parameters.items() if id(parameter) in of_embeddings}
        self._optimizer = Optimizer(job.optimizer, self.parameters, embeddings)
        self._scaler = None if job.loss_scale is None else LossScaler(job.loss_scale)
        self._largest_gradient: str | None = None
        # Of the micro-batches since the last step, and what their sum is divided by. The step looks at them: earlier, the device
        # would be waited for between forward and backward.
        self._losses: list[tuple[Batch, torch.Tensor]] = []
        self._weight = 1.0
        # Documents that wait for their weights.
        self._held: list[tuple[Batch, torch.Tensor]] = []
        trained = {id(parameter) for parameter in self.parameters.values()}
        frozen = {name: p for name, p in self._loss.named_parameters() if id(p) not in trained}
        self._audit = Audit(self.parameters, frozen, self._optimizer.rate_moves, ranks)

    def _loss_of_targets(self) -> CrossEntropy | Taught:
        job, settings = self._job, self._job.distillation
        if settings is None:
            return CrossEntropy(job.label_smoothing)
        config = read_config(settings.teacher)
        teacher = load(settings.teacher, config, COMPUTE_TYPES[job.dtype], NAME, None, self._device.torch)
        self._apart = self._apart or shares_state(teacher) is not None or turns_by_length(config)
        kernel = choose(job.attention, self._device, job.dtype, config)
        scored = DocumentLoss(teacher, kernel, self._draws).to(self._device.torch)
        return Taught(Distillation(settings.temperature, settings.alpha, settings.divergence), scored)

    def _trained_parameters(self) -> Parameters:
        """What is trained, by its names in files. Sharding has put other parameters in the place of the model's."""
        if self._adapted is None:
            return dict(self._loss.model.named_parameters())
        named = self._adapted.named_parameters()
        return {adapter.file_name(name): parameter for name, parameter in named if parameter.requires_grad}

    @property
    def is_compiled(self) -> bool:
        """Whether torch compiles the model's layers."""
        return self._compiled is not None

    @property
    def steps(self) -> int:
        """Updates so far; skipped steps do not count."""
        return self._optimizer.steps

    @property
    def scaler_state(self) -> ScalerState | None:
        """The factor on the loss, with loss scaling."""
        return None if self._scaler is None else self._scaler.state

    def save(self, folder: Path, with_state: bool) -> list[str]:
        """Writes all that is trained, with the optimizer's state; the names of the files. Every rank has to take part.

        Without it values have the names of the base's files.
        """
        with self._ranks.collective("save what is trained"):
            if with_state or self.is_named_as_in_files:
                return self._optimizer.save(folder, with_state, self._ranks)
            return self._optimizer.save_values(folder, self._ranks, lambda values: self._in_files(values))

    @property
    def is_named_as_in_files(self) -> bool:
        """Whether what is trained has the names that the base's files give it."""
        return self._names_in_files() == set(self.parameters)

    def _names_in_files(self) -> set[str]:
        if self._adapted is not None:
            return set(self.parameters)
        return set(self._in_files({name: torch.empty_like(p, device="meta") for name, p in self.parameters.items()}))

    def _in_files(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Trained weights by the names and in the form of the base's files."""
        return tensors_in_files(self._loss.model, values, self._stored)

    def restore(self, steps: int, saved: SavedTensors, scaler: ScalerState | None) -> None:
        """Takes up a saved state."""
        self._optimizer.restore(steps, saved)
        if self._scaler is not None and scaler is not None:
            self._scaler.state = scaler
        self._audit.restart()

    @contextmanager
    def inference(self) -> Iterator[Inference]:
        """The model as it is, to be scored and to complete prompts."""
        if self._sharded:
            what = "a model whose weights are shared out (`parallel: fsdp2`)"
            message = f"{what} cannot be scored by rows or complete prompts"
            raise JobFailure("bad_parameters", message, "set `parallel: ddp`")
        self._begin(training=False)
        inference = Inference(self._loss, self._config, self._job.dtype, self._device, self._ranks)
        try:
            with nullcontext() if self._compiled is None else self._compiled.switched_off():
                yield inference
        finally:
            inference.attend_by_documents()

    def check_frozen(self) -> str | None:
        """The first frozen tensor that is not what it was before training."""
        return self._audit.check_frozen()

    def accumulate(self, ranks: Sequence[Sequence[Batch]], weight: float) -> None:
        """Adds the gradients of this rank's micro-batches to those of the step, whose targets have `weight` together."""
        self._begin()
        self._weight = weight
        for batch in self._evened(ranks):
            self._add(batch, self._scale / weight)

    def score_documents(
        self, ranks: Sequence[Sequence[Batch]], held: bool, scorer: Scorer | None = None
    ) -> list[list[float]]:
        """The score of each document with a target of this rank's micro-batches: by the model in training unless another is named.

        That is the negative log-likelihood of its response, and that of all its targets. `held`: what their gradients need is
        kept for `weigh`.
        """
        self._begin(training=scorer is None)
        adapted = self._adapted if scorer == "base" else None
        with nullcontext() if adapted is None else adapter.switched_off(adapted):
            return self._scores_of_documents(ranks, held)

    def _scores_of_documents(self, ranks: Sequence[Sequence[Batch]], held: bool) -> list[list[float]]:
        scores: list[list[float]] = []
        for batch in self._evened(ranks):
            with torch.set_grad_enabled(held), self._computing():
                batch = self._on_device(batch)
                nll = self._loss(batch)
            if held:
                self._held.append((batch, nll))
            scores += _scores_of_documents(batch, nll)
        return scores

    def weigh(self, weights: Sequence[Sequence[float]]) -> None:
        """Adds the gradients of what is held, each document by the weights of its response and of all its targets."""
        table = torch.tensor([list(of_document) for of_document in weights], dtype=torch.float64).view(-1, 2)
        first = 0
        for batch, nll in self._held:
            documents = batch.documents_of_targets()
            count = int(documents[-1]) + 1 if len(documents) else 0
            of_targets = table[first : first + count][documents].to(torch.float32).to(nll.device)
            response = 1.0 if batch.responses is None else batch.responses
            first += count
            with self._computing():
                # A batch of nothing has one zero that takes part.
                weighted = nll * (of_targets[:, 1] + of_targets[:, 0] * response) if count else nll * 0
                (weighted.sum() * self._scale).backward()
        self._held.clear()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Watches over the collectives of sharded layers, and computes in the job's type."""
        together = self._ranks.collective("forward and backward of sharded layers") if self._sharded else nullcontext()
        with together, computing_in(self._job.dtype, self._device.torch):
            yield

    def _begin(self, training: bool = True) -> None:
        """Draws are those of the step that is computed."""
        self._draws.step = self.steps + 1
        if self._adapted is not None:
            adapter.set_training(self._adapter_layers, training)

    @property
    def _scale(self) -> float:
        return 1.0 if self._scaler is None else self._scaler.scale

    def step(self, learning_rate: float) -> StepReport | Stopped:
        """Updates what is trained by the gradients since the last step, those of all ranks."""
        scale = self._scale
        self._reduce()
        squares = self._squares()
        # Of this step as far as its backward: where its update takes more, the next step tells it.
        memory = self._ranks.placed(self._device.peak_memory_bytes())
        own_sum, own_broken = self._look_at_losses()
        loss_sum, *memory = self._ranks.sum([own_sum, *memory], "add up losses")
        loss, self._weight = loss_sum / self._weight, 1.0
        peaks = [int(peak) for peak in memory]
        loss_scale = None if self._scaler is None else scale
        if not math.isfinite(loss_sum):
            broken = self._ranks.gather_lists([own_broken] if own_broken else [], "gather losses that are not finite")
            return Stopped("loss_not_finite", next(of_rank[0] for of_rank in broken if of_rank))
        overflowed = next((name for name, square in squares.items() if not math.isfinite(square)), None)
        if overflowed is not None:
            return self._skip(overflowed) or StepReport(loss, None, loss_scale, peaks)
        norm = math.sqrt(sum(squares.values())) / scale
        self._note(squares)
        self._update(norm, scale, learning_rate)
        stayed = self._audit.after_step(learning_rate, loss)
        if stayed is not None:
            return Stopped("not_moved", {"tensor": stayed, "steps": self._audit.steps})
        return StepReport(loss, norm, loss_scale, peaks)

    @torch.no_grad()
    def score(self, ranks: Sequence[Sequence[Batch]]) -> float:
        """The negative log-likelihood summed over the targets of this rank's micro-batches."""
        self._begin(training=False)
        total = 0.0
        for batch in self._evened(ranks):
            with computing_in(self._job.dtype, self._device.torch):
                total += _sum(self._loss(self._on_device(batch)))
        return total

    def _evened(self, ranks: Sequence[Sequence[Batch]]) -> Iterable[Batch]:
        """This rank's micro-batches as they are computed; as many on every rank where each computation takes all of them."""
        computed = [[batch for batch in of_rank if batch.tokens > 0] for of_rank in ranks]
        if self._apart:
            computed = [[piece for batch in of_rank for piece in batch.documents()] for of_rank in computed]
        ours = computed[self._ranks.rank]
        if self._sharded:
            ours += [Batch.of_nothing()] * (max(map(len, computed)) - len(ours))
        return ours

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self._device.torch)

    def _add(self, batch: Batch, factor: float) -> None:
        """Adds the gradients of a micro-batch to those of the step."""
        with self._ranks.collective("forward and backward of sharded layers") if self._sharded else nullcontext():
            with computing_in(self._job.dtype, self._device.torch):
                batch = self._on_device(batch)
                nll = self._loss(batch, self._of_targets)
            if batch.weights is not None:
                nll = nll * batch.weights
            (nll.sum() * factor).backward()
        self._losses.append((batch, nll.detach()))

    def _look_at_losses(self) -> tuple[float, dict[str, Any] | None]:
        """The sum of this rank's losses since the last step, and the first micro-batch whose loss is not finite."""
        sums = [_sum(nll) for _, nll in self._losses]
        odd = next((index for index, total in enumerate(sums) if not math.isfinite(total)), None)
        broken = None if odd is None else self._not_finite(*self._losses[odd], sums[odd])
        self._losses.clear()
        return sum(sums), broken

    def _reduce(self) -> None:
        """The sum of all ranks' gradients, in each; sharded ones are sums already."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self._sharded:
            self._ranks.add_up(self._gradients(), "add up gradients")

    def _gradients(self) -> list[torch.Tensor]:
        """Those of all that is trained, in the order of the parameters."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def _squares(self) -> dict[str, float]:
        """The sum of the squares of each tensor's gradient."""
        # An NPU has no f64.
        wide = torch.float32 if self._device.kind == "npu" else torch.float64
        gradients = self._gradients()
        if self._sharded:
            # A share may be empty.
            local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
            norms = [torch.linalg.vector_norm(gradient, dtype=wide) for gradient in local]
        else:
            norms = list(torch._foreach_norm(gradients, 2, dtype=wide))
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
        if clipping / scale != 1:
            torch._foreach_mul_(self._gradients(), clipping / scale)
        self._optimizer.step(learning_rate)
        self._forget()
        if self._scaler is not None:
            self._scaler.after_step()

    def _skip(self, tensor: str) -> Stopped | None:
        """Forgets gradients that overflowed under the factor on the loss; without such a factor they end the run."""
        if self._scaler is None:
            details = {"tensor": tensor, "largest_gradient": self._largest_gradient}
            return Stopped("gradient_not_finite", details)
        scale = self._scaler.scale
        self._scaler.after_overflow()
        if self._scaler.is_hopeless:
            skipped = self._scaler.state.skipped
            return Stopped("overflow_persists", {"tensor": tensor, "skipped": skipped, "loss_scale": scale})
        self._forget()
        return None

    def _forget(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _not_finite(self, batch: Batch, nll: torch.Tensor, total: float) -> dict[str, Any]:
        of_targets = batch.rows.cpu()[batch.where.cpu()]
        guilty = of_targets[~nll.isfinite().cpu()]
        return {
            # JSON has no such number.
            "loss": str(total),
            "guilty": guilty.unique().tolist(),
            "rows": batch.rows.unique().tolist(),
            "largest_gradient": self._largest_gradient,
        }


def _scores_of_documents(batch: Batch, nll: torch.Tensor) -> list[list[float]]:
    documents = batch.documents_of_targets()
    if len(documents) == 0:
        return []
    found = nll.detach().cpu().double()
    response = found if batch.responses is None else found * batch.responses.cpu()
    sums = torch.zeros(int(documents[-1]) + 1, 2, dtype=torch.float64)
    scores: list[list[float]] = sums.index_add_(0, documents, torch.stack([response, found], dim=1)).tolist()
    return scores


def _sum(nll: torch.Tensor) -> float:
    return float(nll.detach().cpu().double().sum())
