"""The base model, from a Hub folder, and its loss over a batch of documents."""

from __future__ import annotations

import copy
import functools
import sys
from collections import UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from accelerate import init_empty_weights
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .architecture import (
    NATIVE_FAMILIES,
    check_separation,
    decoder_of,
    hands_attention_over,
    head_logits,
    layers_of,
    shares_state,
)
from .attention import Documents, Kernel
from .data import Batch
from .draws import Draws, Places
from .failure import JobFailure
from .job import QuantizeSettings
from .losses import CrossEntropy, Distillation
from .weights import WeightFiles

# Its bars would fill the log.
transformers.utils.logging.disable_progress_bar()

# Targets whose logits exist at a time.
HEAD_CHUNK = 1024
NLL = CrossEntropy()


def read_config(folder: Path) -> PretrainedConfig:
    """The model's settings; fails at those that would be left out of the computation."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise JobFailure("bad_parameters", f"transformers cannot read the model in `{folder}`") from error
    stored = getattr(config, "quantization_config", None)
    if stored and not stored_in_4_bits(config):
        raise JobFailure(
            "bad_parameters", f"`quantization_config` = {stored} in the model's config.json is not supported"
        )
    if getattr(config, "rescale_every", 0):
        # Out of training mode rwkv would divide weights by powers of two, against overflows of f16.
        config.rescale_every = 0
    return config


def stored_in_4_bits(config: PretrainedConfig) -> bool:
    """Whether bitsandbytes has stored the model's linear layers in 4 bits."""
    stored = getattr(config, "quantization_config", None)
    return (
        isinstance(stored, dict) and stored.get("quant_method") == "bitsandbytes" and bool(stored.get("load_in_4bit"))
    )


def load(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    quantize: QuantizeSettings | None,
    device: torch.device,
) -> PreTrainedModel:
    """As `load_base`, with linear layers in 4 bits on the device where that is asked for, or they are stored so."""
    is_stored = stored_in_4_bits(config)
    if quantize is None and not is_stored:
        return load_base(folder, config, dtype, attention)
    try:
        from .quantization import load_quantized, load_stored
    except ImportError as error:
        help_ = f"install it with `{sys.executable} -m pip install bitsandbytes`"
        raise JobFailure("machine", "weights in 4 bits need bitsandbytes, which cannot be imported", help_) from error
    if quantize is None:
        return load_stored(folder, config, dtype, attention, device)
    if is_stored:
        raise JobFailure("bad_parameters", "the model's weights are stored in 4 bits already", "leave `quantize` out")
    return load_quantized(folder, config, dtype, attention, quantize, device)


def load_base(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype | Literal["auto"],
    attention: str | None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Loads the model on the processor or a device, every weight frozen; `attention` by the name that transformers knows it by.

    An architecture whose attention cannot be cut between documents keeps transformers' own.
    """
    if attention is None or hands_attention_over(config):
        model = _from_files(folder, config, dtype, attention, device)
        if attention is None or shares_state(model) is None:
            return frozen(model)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        return frozen(model)
    return frozen(_from_files(folder, config, dtype, None, device))


def load_empty(folder: Path, config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model with its buffers alone, every weight on the meta device: `sharding.shard` reads each rank's share of them.

    It is loaded as a whole where transformers makes other tensors of those in the files.
    """
    model = without_weights(folder, config, dtype, attention)
    if isinstance(model, PreTrainedModel):
        return model
    print(f"each rank reads the whole checkpoint: {model}", file=sys.stderr)
    return load_base(folder, config, dtype, attention)


def without_weights(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, attention: str | None
) -> PreTrainedModel | str:
    """The model with its buffers alone, every weight on the meta device; why not, where its files have other tensors, or its
    attention is its own.
    """
    if attention is not None and not hands_attention_over(config):
        return "attention that is computed by code of its own"
    given = {} if attention is None else {"attn_implementation": attention}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **given)
    model.tie_weights()
    reason = WeightFiles(folder, model).differ_from(model)
    if reason is None and attention is not None:
        reason = shares_state(model)
    return frozen(model) if reason is None else reason


def _from_files(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype | Literal["auto"],
    attention: str | None,
    device: torch.device | None,
) -> PreTrainedModel:
    given: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if device is not None:
        given["device_map"] = {"": device}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, local_files_only=True, **given)
    assert isinstance(model, PreTrainedModel)
    return model


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """The model with every weight frozen, as it is asked."""
    model.requires_grad_(False)
    model.train(False)
    return model


@dataclass(frozen=True)
class _Chunk:
    """Positions with a target, for the head."""

    hidden: torch.Tensor
    targets: torch.Tensor
    places: Places
    taught: torch.Tensor | None = None
    """The teacher's hidden states there, where one is learned from."""


class DocumentLoss(torch.nn.Module):
    """A loss of each target of a batch: its negative log-likelihood, or another.

    The head runs for positions that carry a target only, and logits exist only for a chunk of them: the backward computes a chunk's
    again.
    """

    def __init__(self, model: PreTrainedModel, kernel: Kernel, draws: Draws) -> None:
        super().__init__()
        self.model = model
        self._kernel: Kernel = kernel
        self._draws = draws
        self._softcap: float | None = getattr(model.config, "final_logit_softcapping", None)
        self._is_native = model.config.model_type in NATIVE_FAMILIES
        self._is_separated = shares_state(model) is None
        self._is_checked = self._is_native

    def forward(self, batch: Batch, of_targets: CrossEntropy | Taught = NLL) -> torch.Tensor:
        """`[target_tokens]` in f32, in nats; a batch without targets gives one zero that a backward can start at."""
        taught = of_targets.hidden(batch) if isinstance(of_targets, Taught) else None
        hidden = self._hidden(batch)
        chunks = list(self._chunks(hidden, batch, taught))
        if not chunks:
            # The head takes part all the same: ranks that share its weights add up its gradients together.
            nothing = torch.zeros_like(batch.targets[:1])
            return 0 * self._scored(_Chunk(hidden[:1], nothing, Places(batch.rows[:1], batch.tokens_in_row[:1])), NLL)
        scored = functools.partial(checkpoint, self._scored, use_reentrant=False, preserve_rng_state=False)
        return torch.cat([scored(chunk, of_targets) for chunk in chunks])

    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The negative log-likelihood of each target, and whether it is the likeliest token; without gradients."""
        nll, correct = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
        for chunk in self._chunks(self._hidden(batch), batch):
            logits = self._logits(chunk)
            nll.append(NLL(logits, chunk.targets).cpu())
            correct.append((logits.argmax(dim=-1) == chunk.targets).cpu())
        return torch.cat(nll), torch.cat(correct)

    def _hidden(self, batch: Batch) -> torch.Tensor:
        """What the decoder makes of each token, `[tokens, hidden_size]`."""
        if not self._is_separated:
            return self._alone(batch)
        if not self._is_checked:
            self._is_checked = True
            check_separation(self.model, self._packed_probe)
        documents = Documents(batch.document_lengths, self._kernel, batch.input_ids.device)
        with self._draws.at(Places(batch.rows, batch.tokens_in_row)):
            return self._decoded(batch.input_ids, batch.positions, documents)

    def _decoded(self, input_ids: torch.Tensor, positions: torch.Tensor, documents: Documents) -> torch.Tensor:
        decoded = decoder_of(self.model)(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, documents=documents
        )
        return cast(torch.Tensor, decoded.last_hidden_state)[0]

    def _alone(self, batch: Batch) -> torch.Tensor:
        """The hidden states of a document, by transformers' own attention."""
        assert len(batch.document_lengths) == 1, "documents of such a model come one by one"
        with self._draws.at(Places(batch.rows, batch.tokens_in_row)):
            decoded = decoder_of(self.model)(input_ids=batch.input_ids[None], use_cache=False)
        return cast(torch.Tensor, decoded.last_hidden_state)[0]

    def _packed_probe(self, input_ids: torch.Tensor, length: int) -> torch.Tensor:
        count = len(input_ids) // length
        positions = torch.arange(length, device=input_ids.device).repeat(count)
        places = torch.arange(len(input_ids))
        with self._draws.at(Places(torch.zeros_like(places), places)):
            return self._decoded(input_ids, positions, Documents([length] * count, self._kernel, input_ids.device))

    def _chunks(self, hidden: torch.Tensor, batch: Batch, taught: torch.Tensor | None = None) -> Iterator[_Chunk]:
        """The positions that carry a target, some at a time."""
        for start in range(0, len(batch.where), HEAD_CHUNK):
            place = batch.where[start : start + HEAD_CHUNK]
            of_draws = place.to(batch.rows.device)
            yield _Chunk(
                hidden[place],
                batch.targets[place],
                Places(batch.rows[of_draws], batch.tokens_in_row[of_draws]),
                None if taught is None else taught[place],
            )

    def _scored(self, chunk: _Chunk, of_targets: CrossEntropy | Taught) -> torch.Tensor:
        logits = self._logits(chunk)
        if isinstance(of_targets, Taught):
            return of_targets.loss(logits, of_targets.logits(chunk), chunk.targets)
        return of_targets(logits, chunk.targets)

    def _logits(self, chunk: _Chunk) -> torch.Tensor:
        with self._draws.at(chunk.places):
            if not self._is_native:
                return head_logits(self.model, chunk.hidden[None])[0].float()
            head = cast(torch.nn.Module, self.model.get_output_embeddings())
            logits: torch.Tensor = head(chunk.hidden[None])[0].float()
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class Taught:
    """A loss that compares with a teacher, a frozen model that every rank has whole."""

    def __init__(self, loss: Distillation, teacher: DocumentLoss) -> None:
        self.loss = loss
        self._teacher = teacher

    @torch.no_grad()
    def hidden(self, batch: Batch) -> torch.Tensor:
        """What the teacher's decoder makes of each token."""
        return self._teacher._hidden(batch)

    @torch.no_grad()
    def logits(self, chunk: _Chunk) -> torch.Tensor:
        """The teacher's logits at some positions."""
        assert chunk.taught is not None, "the teacher has seen the batch"
        return self._teacher._logits(replace(chunk, hidden=chunk.taught))


def recompute_layers(model: PreTrainedModel, draws: Draws, nested: bool) -> None:
    """Keeps of each layer its input alone; the backward computes the rest again (activation checkpointing).

    transformers' own switch acts in training mode only, in which dropouts draw from a generator with a state.

    `nested`: a layer's backward is a backward of its own inside the model's, as with torch's `use_reentrant`. That needs no hook
    for each tensor that a layer would keep, which the processor would have to call, and records no graph until then. FSDP
    cannot have it, and compiled layers have few tensors. Nor can a layer that hands tensors to later ones in a container, as some
    do with their keys and values: they would have no graph there.
    """

    def recomputed(forward: Any, *args: Any, **kwargs: Any) -> Any:
        places = draws.places

        def again(*args: Any, **kwargs: Any) -> Any:
            with draws.at(places):
                return forward(*args, **kwargs)

        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if _is_constant((*args, *kwargs.values())):
            if nested and _only_first_needs_gradient(args, kwargs):
                hidden, *rest = args
                return NestedBackward.apply(lambda hidden: again(hidden, *rest, **kwargs), hidden)
            return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        before = _copied(args, "an argument"), {name: _copied(value, f"`{name}`") for name, value in kwargs.items()}
        is_first = True

        def as_before() -> Any:
            # The first computation leaves in containers what later layers read; the second one finds them as the first did.
            nonlocal is_first
            given, named = (args, kwargs) if is_first else _copied(before, "an argument")
            is_first = False
            return again(*given, **named)

        return checkpoint(as_before, use_reentrant=False, preserve_rng_state=False)

    for layer in layers_of(model):
        layer.forward = functools.partial(recomputed, layer.forward)


# What a layer cannot leave anything in. Documents only keep masks that they were asked for.
_CONSTANTS = (torch.Tensor, torch.dtype, torch.device, Documents, bool, int, float, str, type(None))


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if isinstance(value, tuple) else isinstance(value, _CONSTANTS)


def _copied(value: Any, name: str) -> Any:
    """The same, with other containers where a layer can leave something in them; `name` is for messages."""
    if _is_constant(value):
        return value
    if isinstance(value, (dict, UserDict)):
        copied = copy.copy(value)
        copied.update({key: _copied(of_key, name) for key, of_key in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copied(element, name) for element in value)
    message = f"`activation_checkpointing` cannot compute again what a layer does to {name}, a `{type(value).__name__}`"
    raise JobFailure("bad_parameters", message, "leave `activation_checkpointing` out")


def _only_first_needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether, of all that a layer is called with, a gradient flows to its first argument alone."""
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor) and value.requires_grad]
    return len(given) == 1 and len(args) > 0 and given[0] is args[0]


class NestedBackward(torch.autograd.Function):
    """A function of one tensor and of parameters, computed without a graph, and again with one once its gradient is there.

    The gradients of the parameters add up as those of any backward do.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> Any:
        """What `run` makes of `hidden`: a tensor, or a tuple with tensors."""
        kind = hidden.device.type
        ctx.run, ctx.kind = run, kind
        ctx.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        """The gradient of `hidden`."""
        (kept,) = ctx.saved_tensors
        hidden = kept.detach().requires_grad_()
        enabled, dtype = ctx.autocast
        with torch.enable_grad(), torch.autocast(ctx.kind, dtype=dtype, enabled=enabled):
            found = ctx.run(hidden)
        found = found if isinstance(found, tuple) else (found,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(found, gradients, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and gradient is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return None, hidden.grad
