"""An NPU that is none: a device named `npu` that computes on the processor.

It stands in for torch_npu where `PIPELINE_TORCH_WORKER_NPU_MODULE` names it, so that the worker's whole path for an NPU runs without one:
device strings, moving tensors, autocast, memory counters, the fused attention's arguments. Collectives are gloo's over tensors of the
processor, in HCCL's place. What it cannot show is what an NPU computes, and how fast.

torch has the place for such a device (PrivateUse1) and a way to fill it from Python, which is experimental. Each tensor of the device wraps
one of the processor; each operation takes the wrapped ones, and wraps what comes out.
"""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

# Read by the worker: what takes HCCL's place.
COLLECTIVES = "gloo"
COUNT = int(os.environ.get("FAKE_NPU_COUNT", "2"))
Device = torch.device | str | int | None


def _index(device: Device) -> int:
    if isinstance(device, int):
        return device
    return (torch.device(device).index or 0) if device is not None else 0


class Tensor(torch.Tensor):
    """A tensor of the device, around one of the processor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int = 0) -> Tensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("npu", index),
        )
        made.inner = inner
        found: Tensor = made
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.inner!r}@npu:{self.device.index}"

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        index = given[0].device.index if given else None
        inner_args, inner_kwargs = tree_map(
            lambda leaf: leaf.inner if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        if kwargs.get("device") is not None:
            to = torch.device(kwargs["device"])
            inner_kwargs["device"] = torch.device("cpu")
            index = _index(to) if to.type == "npu" else None
        if function is torch.ops.aten.copy_.default and not isinstance(args[0], Tensor):
            return args[0].copy_(inner_args[1])
        _refuse_f64(inner_args, inner_kwargs, function)
        # What an operation changes in place is the tensor that it was given.
        wrapped = {id(tensor.inner): tensor for tensor in given}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if index is None:
                return leaf
            return wrapped[id(leaf)] if id(leaf) in wrapped else Tensor(leaf, index)

        return tree_map(wrap, function(*inner_args, **inner_kwargs))


def _refuse_f64(args: Any, kwargs: Any, function: Any) -> None:
    """An NPU computes nothing in f64; neither does this."""
    leaves = tree_leaves((args, kwargs))
    wide = any(
        leaf is torch.float64 or (isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64) for leaf in leaves
    )
    if wide:
        raise RuntimeError(f"{function}: an NPU has no f64")


class _Counters(types.ModuleType):
    """`torch.npu`."""

    current = 0
    peak = 0

    def is_available(self) -> bool:
        return COUNT > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return COUNT

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: Device) -> None:
        self.current = _index(device)

    def synchronize(self, _device: Device = None) -> None:
        pass

    def get_device_name(self, _device: Device = None) -> str:
        return "Fake910B"

    def get_rng_state(self, _device: Device = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, _device: Device = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, _seed: int) -> None:
        pass

    def max_memory_allocated(self, _device: Device = None) -> int:
        # As large as what a test can tell from a process's resident memory.
        return 123 << 20

    def mem_get_info(self, _device: Device = None) -> tuple[int, int]:
        return (60 << 30, 64 << 30)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: torch.Tensor,
    scale: float,
    pre_tockens: int,
    next_tockens: int,
    sparse_mode: int,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
) -> tuple[torch.Tensor, ...]:
    """The fused attention as its documentation has it, for the arguments that the worker gives: `TND`, modes 3 and 4."""
    if input_layout != "TND" or query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"layout {input_layout} of {query.dtype} is not supported")
    if query.shape[1] != head_num or sparse_mode not in (3, 4) or next_tockens != 0 or atten_mask.shape != (2048, 2048):
        raise RuntimeError("arguments that do not go together")
    if actual_seq_qlen != actual_seq_kvlen or actual_seq_qlen[-1] != len(query):
        raise RuntimeError("the sums of lengths do not fit the tokens")
    groups = head_num // key.shape[1]
    found, start = [], 0
    for end in actual_seq_qlen:
        q, k, v = (x[start:end].transpose(0, 1).float() for x in (query, key, value))
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        place = torch.arange(end - start)
        distance = place[:, None] - place
        # A band counts from the diagonal: `pre_tockens` before it may be seen.
        seen = (distance >= 0) & (distance <= (pre_tockens if sparse_mode == 4 else end))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen.to(q.device), float("-inf"))
        found.append((scores.softmax(dim=-1) @ v).transpose(0, 1).to(query.dtype))
        start = end
    return (torch.cat(found), None, None, None)  # type: ignore[return-value]


def _install() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=_Counters("torch.npu"))
    library = torch.library.Library("aten", "IMPL")

    def empty(
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> Tensor:
        return Tensor(torch.empty(size, dtype=dtype), _index(device))

    def empty_strided(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Tensor:
        return Tensor(torch.empty_strided(size, stride, dtype=dtype), _index(device))

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    # Autocast is accepted, and casts nothing.
    autocast = torch.library.Library("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return [library, autocast]


# Registrations last as long as the objects that made them.
_LIBRARIES = _install()
