"""What the worker has to know of an architecture of transformers: its parts, whether documents may share a sequence in it, and what
its tensors are called in files.

The families that the native backend computes are held to it by golden cases. Any other causal model is computed as transformers
does; whether its documents really are apart is checked on the model itself, before the first of them is computed.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from .failure import JobFailure

# The families of `model/src/families.rs`.
NATIVE_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"})
# Kinds of layers, as `layer_types` names them, that a token sees others in through attention alone, causal or within a window.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Layers that carry something from token to token other than by attention.
_STATE = re.compile(
    r"mamba|ssm|recurrent|rwkv|deltanet|deltarule|shortconv|linearattention|lightning|retention|hyena", re.I
)
_STATE_PARAMETERS = {"A_log", "time_decay"}
# What PEFT puts between a module and its path in the base model.
_WRAPPERS = (".token_adapter", ".base_layer", ".original_module")
# What a trial found, by the class of the configuration, and the name of its attention function.
_HANDED_OVER: dict[tuple[type[PretrainedConfig], bool], bool] = {}
_TRIAL = "pipeline_trial"
# What configurations call the number of positions, as in `model/src/config/outline.rs`.
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
# Tokens of each of the two documents that separation is checked on.
_PROBE_TOKENS = 4
# Share of the greatest hidden value by which two computations of the same document may differ, whatever the dtype rounds.
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_PROBE_TOLERANCE_OF_HALF = 5e-2


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head."""
    decoder = cast(torch.nn.Module, model.get_decoder())
    # transformers gives the whole where it does not find the part: that of llama4 has another name than its class says.
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)] if decoder is model else []
    return parts[0] if len(parts) == 1 else decoder


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's layers, in order: the list with as many modules as the configuration has layers."""
    count = model.config.num_hidden_layers
    lists = [module for module in decoder_of(model).children() if isinstance(module, torch.nn.ModuleList)]
    found = next((layers for layers in lists if len(layers) == count), None)
    if found is None:
        message = f"`{_name(model)}` has no list of its {count} layers"
        raise JobFailure("bad_parameters", message, "this architecture cannot be computed layer by layer")
    return list(found)


def embedding_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Those of embeddings, of positions too, and of the head, with what adapts them."""
    head = model.get_output_embeddings()
    paths = tuple(
        f"{name_in_base(name)}."
        for name, module in model.named_modules()
        if module is head or isinstance(module, torch.nn.Embedding)
    )
    return [parameter for name, parameter in model.named_parameters() if name.startswith(paths)]


def turns_by_length(config: PretrainedConfig) -> bool:
    """Whether rotary positions turn a long document in another way than a short one, so that each has to be computed alone."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "longrope"


def positions_of(config: PretrainedConfig) -> int | None:
    """The positions that a model has for a prompt and its completion together; `None` where nothing bounds them."""
    # An attribute may be another one by this name: rwkv's is the length of the texts that it has learned.
    sizes = config.get_text_config().to_dict()
    return next((int(sizes[name]) for name in _POSITIONS if sizes.get(name)), None)


def shares_state(model: PreTrainedModel) -> str | None:
    """What a model has, in words, that attention cut between documents does not separate; `None` if it has nothing of the kind.

    Such a model computes each document alone, by transformers' own attention, and no packed rows.
    """
    if model.config.model_type in NATIVE_FAMILIES:
        return None
    others = sorted(set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if others:
        return f"layers of type `{others[0]}`"
    for layer in layers_of(model):
        for module in layer.modules():
            named = _STATE.search(type(module).__name__)
            if named or isinstance(module, torch.nn.Conv1d) or _STATE_PARAMETERS & module._parameters.keys():
                return f"`{type(module).__name__}`, which carries state from token to token"
            if "sinks" in module._parameters:
                return f"attention sinks in `{type(module).__name__}`"
    return None if hands_attention_over(model.config) else "attention that is computed by code of its own"


def hands_attention_over(config: PretrainedConfig) -> bool:
    """Whether models of this configuration call the attention function that they are given, with all that it needs."""
    if not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_attention_backend", False):
        return False
    if config.model_type in NATIVE_FAMILIES:
        return True
    kind = (type(config), _has_windows(config))
    if kind not in _HANDED_OVER:
        _HANDED_OVER[kind] = _hands_documents_over(config)
    return _HANDED_OVER[kind]


def _has_windows(config: PretrainedConfig) -> bool:
    """Whether a layer's attention reaches over a window alone."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None)
    is_used = getattr(text, "use_sliding_window", True) is not False
    return bool(getattr(text, "sliding_window", None)) and is_used and (layers is None or "sliding_attention" in layers)


class _Attended(Exception):
    """An attention function was called."""

    def __init__(self, has_documents: bool, has_window: bool) -> None:
        self.has_documents = has_documents
        self.has_window = has_window


def _attended(*_: Any, documents: object = None, **more: Any) -> None:
    raise _Attended(documents is not None, "sliding_window" in more)


AttentionInterface.register(_TRIAL, _attended)


def _hands_documents_over(config: PretrainedConfig) -> bool:
    """Whether the first call of the attention function has what the decoder was called with, in a model without weights.

    What transformers says of the class does not tell it: some layers keep it to themselves, and some have their window
    in the mask alone, which attention within documents does not read.
    """
    has_windows = _has_windows(config)
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=_TRIAL)
            model.train(False)
            ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long)
            decoder_of(model)(
                input_ids=ids, position_ids=torch.arange(_PROBE_TOKENS)[None], use_cache=False, documents=object()
            )
    except _Attended as attended:
        return attended.has_documents and (attended.has_window or not has_windows)
    except Exception as error:
        # A computation that looks at values, which are not there: `check_separation` will see.
        print(f"no trial of the attention of `{config.model_type}`: {error}", file=sys.stderr)
    return not has_windows


def refuse_packs(model: PreTrainedModel, state: str) -> JobFailure:
    """Why rows of several documents cannot be computed."""
    message = f"`{_name(model)}` has {state}: the documents of a packed row would not be apart"
    return JobFailure("bad_parameters", message, "leave `pack` out: a row of one document is computed alone")


@torch.no_grad()
def check_separation(model: PreTrainedModel, packed: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """Fails where a document behind another in one sequence is not what transformers itself makes of it alone.

    `packed` gives the hidden states of ids, `[tokens]`, that are documents of so many tokens each.
    """
    vocabulary = model.config.get_text_config().vocab_size
    first = torch.arange(_PROBE_TOKENS) % vocabulary
    second = torch.arange(_PROBE_TOKENS, 2 * _PROBE_TOKENS) % vocabulary
    device = next(model.parameters()).device
    behind = packed(torch.cat([first, second]).to(device), _PROBE_TOKENS)[_PROBE_TOKENS:].float()
    with _own_attention(model):
        decoded = decoder_of(model)(input_ids=second[None].to(device), use_cache=False)
    alone = decoded.last_hidden_state[0].float()
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    bound = _PROBE_TOLERANCE.get(dtype, _PROBE_TOLERANCE_OF_HALF) * alone.abs().max()
    # A token near the boundary between two experts may go to the other one by a rounding: not most of them.
    apart = (behind - alone).abs().amax(dim=-1) <= bound
    if apart.sum() * 2 <= len(apart):
        message = f"`{_name(model)}`: a document behind another is not computed as it is alone"
        raise JobFailure("bad_parameters", message, "this worker cannot cut the attention of this architecture")


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """transformers' own attention meanwhile."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls the cache of tokens before: one that it does not know would be passed over in silence."""
    parameters = inspect.signature(type(model).forward).parameters
    found = next((name for name in ("past_key_values", "cache_params") if name in parameters), None)
    if found is None:
        message = f"`{_name(model)}` has no cache of keys and values"
        raise JobFailure("bad_parameters", message, "this worker cannot generate with this architecture")
    return found


def head_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of hidden states, `(1, tokens, hidden_size)`, by the model's own forward: head, biases, scales and caps."""
    decoder = decoder_of(model)

    def decoded(*_: Any, **__: Any) -> _Decoded:
        return _Decoded(last_hidden_state=hidden)

    # An attribute of the instance stands before the method of its class.
    decoder.forward = decoded
    try:
        found = model(inputs_embeds=hidden, use_cache=False)
    finally:
        del decoder.forward
    return cast(torch.Tensor, found.logits)


class _Decoded(BaseModelOutputWithPast):
    """What a decoder returns: of all that those of some architectures return besides, nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def tensors_in_files(
    model: PreTrainedModel, values: Mapping[str, torch.Tensor], there: Set[str]
) -> dict[str, torch.Tensor]:
    """Tensors by the names and in the form that the model's files have: transformers may hold several of them as one.

    `there` are the names in the files. They may be those of the decoder alone, as in the first checkpoints of gpt2.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        reverted = dict(values)
    else:
        reverted = dict(revert_weight_conversion(model, dict(values)))
    found = {}
    for name, tensor in reverted.items():
        in_decoder = name.removeprefix(f"{model.base_model_prefix}.")
        found[in_decoder if name not in there and in_decoder in there else name] = tensor
    return found


def name_in_base(parameter: str) -> str:
    """The name that a frozen parameter has without the adapter around it."""
    for wrapper in _WRAPPERS:
        parameter = parameter.replace(wrapper, "")
    return parameter


def names_in_model(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str | None]:
    """What tensors of a checkpoint are called in the model; `None` for one that transformers makes another tensor of."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return {name: name for name in names}
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = {name_in_base(name): tensor for name, tensor in model.state_dict().items()}
    found = {}
    for name in names:
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        found[name] = renamed if converted is None else None
    return found


def _name(model: PreTrainedModel) -> str:
    return str(model.config.model_type)
