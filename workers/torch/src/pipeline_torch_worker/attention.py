"""Attention within documents: a token sees those before it in its own document, and none of another.

transformers calls one function for every family, with the window and the soft-cap of the layer; the documents of the sequence come
to it as a keyword argument of the model's forward. Which kernel computes it depends on the device; `sdpa` is there everywhere.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from transformers import AttentionInterface, PretrainedConfig

from .device import Device
from .failure import JobFailure
from .job import AttentionKind, DType

NAME = "pipeline_documents"
Kernel = Literal["sdpa", "flex", "flash", "npu"]


@dataclass(frozen=True)
class Documents:
    """The documents of a sequence, and the kernel that attends within them."""

    lengths: list[int]
    kernel: Kernel
    device: torch.device

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Where documents begin and end: 0, then the sums of lengths so far, `[documents + 1]`."""
        sums = torch.tensor([0, *self.lengths]).cumsum(0)
        return sums.to(torch.int32).to(self.device, non_blocking=self.device.type == "cuda")

    @functools.cached_property
    def _masks(self) -> dict[int | None, Any]:
        return {}

    def flex_mask(self, window: int | None) -> Any:
        """The blocks that flex attention computes: made once for all layers with this window."""
        if window not in self._masks:
            self._masks[window] = _flex_mask(self.lengths, window, self.device)
        return self._masks[window]


def choose(asked: AttentionKind, device: Device, dtype: DType, config: PretrainedConfig) -> Kernel:
    """The kernel for a model on a device; fails where the one that is asked for cannot compute it."""
    softcap = getattr(config, "attn_logit_softcapping", None) is not None
    half = dtype != "f32"
    on_gpu = device.kind in ("cuda", "rocm")
    width = _head_dim(config) or 0
    # Values of another width than queries and keys are beyond it.
    even = width > 0 and width % 8 == 0 and getattr(config, "v_head_dim", None) is None
    flash = on_gpu and half and not softcap and even and _flash_varlen() is not None
    # torch's kernel has no tiles for narrower heads: "NYI: embedding dimension of the query, key, and value must be at least 16".
    flex = on_gpu and _has("triton") and width >= 16
    if asked == "auto":
        if device.kind == "npu" and half and not softcap and hasattr(device.npu_module, "npu_fusion_attention"):
            return "npu"
        # Flex attention has to be asked for: torch 2.11 did not compile it for a small model's rows on an H200.
        return "flash" if flash else "sdpa"
    possible = {"sdpa": True, "flex": flex, "flash": flash}
    if not possible[asked]:
        # Of the CPU `pipeline validate` says the same, before anything runs (`Attention::needs` in stages/src/compute/backend.rs).
        needs = {
            "flash": "a CUDA or ROCm device, bf16 or f16, heads of a multiple of 8, no soft-cap on the "
            "scores, and a torch whose varlen_attn has windows, or the package flash_attn",
            "flex": "a CUDA or ROCm device, triton, and heads of 16 or wider",
            "sdpa": "nothing",
        }
        message = f"`attention: {asked}` cannot be used here: it needs {needs[asked]}"
        raise JobFailure("bad_parameters", message, "leave `attention` out, or take `sdpa`")
    return asked


def _head_dim(config: PretrainedConfig) -> int | None:
    """The width of a head; `None` of a model without attention, and of one whose layers have several."""
    try:
        given: int | None = getattr(config, "head_dim", None)
    except RuntimeError:
        # `AmbiguousGlobalPerLayerAttributeError`, which not every transformers 5 has.
        return None
    heads: int | None = getattr(config, "num_attention_heads", None)
    return given or (config.hidden_size // heads if heads else None)


# What models hand to their attention besides, and what says nothing that documents and positions do not say already.
_WITHOUT_EFFECT = {
    *("dropout", "position_ids", "position_embeddings", "output_attentions", "output_router_logits", "use_cache"),
    *("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position"),
}


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    documents: Documents,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: object,
) -> tuple[torch.Tensor, None]:
    """Attends within each document.

    `query` is `(1, heads, tokens, head_dim)`, `key` and `value` have the key heads; the result is `(1, tokens, heads, head_dim)`.
    """
    if attention_mask is not None:
        raise ValueError("a mask came along, and documents are all that may be masked by")
    given = {name for name, value in more.items() if value is not None}
    unknown = sorted(given - _WITHOUT_EFFECT - {"is_causal"})
    if unknown or not more.get("is_causal", getattr(module, "is_causal", True)):
        what = f"`{unknown[0]}`" if unknown else "attention that is not causal"
        message = f"`{type(module).__name__}` computes with {what}, which attention within documents does not know"
        raise JobFailure("bad_parameters", message, "this worker cannot train or score this architecture")
    window = sliding_window if sliding_window and max(documents.lengths) > sliding_window else None
    if torch.is_autocast_enabled(query.device.type):
        # The rotation by positions may have made f32 of them.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kernel = _KERNELS[documents.kernel]
    return kernel(query, key, value, documents, scaling, window, softcap).to(value.dtype), None


AttentionInterface.register(NAME, attend)

_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Documents, float, int | None, float | None], torch.Tensor]


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One document after the other: nothing between two of them is computed, and no mask as wide as the sequence is made."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    outputs = []
    for q, k, v in zip(*(torch.split(x, documents.lengths, dim=2) for x in (query, key, value)), strict=True):
        length = q.shape[2]
        if softcap is not None:
            outputs.append(_capped(q, k, v, scaling, window, softcap))
        elif window is not None and length > window:
            mask = _window_mask(length, window, q.device)
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
        else:
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None, softcap: float
) -> torch.Tensor:
    """Attention whose scores go through `c · tanh(score / c)` before the mask."""
    scores = (q @ k.transpose(2, 3)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    mask = _window_mask(q.shape[2], window or q.shape[2], q.device)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights.to(v.dtype) @ v


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where token `i` sees `j`: `0 <= i - j < window`."""
    place = torch.arange(length)
    distance = place[:, None] - place
    return ((distance >= 0) & (distance < window)).to(device)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    assert softcap is None, "flash attention was not chosen for a model with a soft-cap"
    flash = _flash_varlen()
    assert flash is not None, "flash attention was chosen where it is there"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return flash(q, k, v, documents.ends, max(documents.lengths), scaling, window).unsqueeze(0)


@functools.cache
def _flash_varlen() -> Callable[..., torch.Tensor] | None:
    """Flash attention over documents of any lengths: torch's own, or that of the package `flash_attn`."""
    # torch's first version had no window and no scale.
    varlen: Any = importlib.import_module("torch.nn.attention.varlen") if _has("torch.nn.attention.varlen") else None
    takes = inspect.signature(varlen.varlen_attn).parameters.keys() if varlen is not None else set()
    if {"window_size", "scale"} <= takes:
        has_groups = "enable_gqa" in takes

        def of_torch(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            ends: torch.Tensor,
            longest: int,
            scaling: float,
            window: int | None,
        ) -> torch.Tensor:
            groups = q.shape[1] // k.shape[1]
            if groups > 1 and not has_groups:
                k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            left = -1 if window is None else window - 1
            more = {"enable_gqa": groups > 1} if has_groups else {}
            found = varlen.varlen_attn(
                q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(left, 0), **more
            )
            assert isinstance(found, torch.Tensor)
            return found

        return of_torch
    if not _has("flash_attn"):
        return None
    package: Any = importlib.import_module("flash_attn")

    def of_package(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ends: torch.Tensor,
        longest: int,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        left = -1 if window is None else window - 1
        found = package.flash_attn_varlen_func(
            q, k, v, ends, ends, longest, longest, softmax_scale=scaling, causal=True, window_size=(left, 0)
        )
        assert isinstance(found, torch.Tensor)
        return found

    return of_package


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    found = _compiled_flex()(
        query,
        key,
        value,
        score_mod=None if softcap is None else capped,
        block_mask=documents.flex_mask(window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Not compiled it would hold all scores at once. Sequences are of many lengths.
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _flex_mask(lengths: list[int], window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)

    def sees(_batch: torch.Tensor, _head: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = (i >= j) & (document[i] == document[j])
        return seen if window is None else seen & (i - j < window)

    tokens = len(document)
    return create_block_mask(sees, B=None, H=None, Q_LEN=tokens, KV_LEN=tokens, device=device)


def _npu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Ascend's fused attention, in its layout of tokens first (`TND`).

    Its compressed mask is an upper triangle of 2048 × 2048 whatever the lengths; `sparse_mode` 3 is causal, and 4 a band that ends
    at the diagonal. Source: `torch_npu.npu_fusion_attention` in the Ascend Extension for PyTorch.
    """
    from .device import npu_module

    assert softcap is None, "the fused attention was not chosen for a model with a soft-cap"
    ends = documents.ends[1:].tolist() if documents.ends.device.type == "cpu" else _sums(documents.lengths)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    found = npu_module().npu_fusion_attention(
        q,
        k,
        v,
        head_num=q.shape[1],
        input_layout="TND",
        atten_mask=_upper_triangle(query.device),
        scale=scaling,
        pre_tockens=2**31 - 1 if window is None else window - 1,
        next_tockens=0,
        sparse_mode=3 if window is None else 4,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )[0]
    assert isinstance(found, torch.Tensor)
    return found.unsqueeze(0)


def _sums(lengths: list[int]) -> list[int]:
    return [sum(lengths[: index + 1]) for index in range(len(lengths))]


@functools.cache
def _upper_triangle(device: torch.device) -> torch.Tensor:
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool), diagonal=1).to(device)


_KERNELS: dict[Kernel, _Kernel] = {"sdpa": _sdpa, "flash": _flash, "flex": _flex, "npu": _npu}
