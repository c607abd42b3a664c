"""An NPU that is none: a device named `npu` that computes on the processor.

It stands in for torch_npu where `PIPELINE_TORCH_WORKER_NPU_MODULE` names it, so that its whole path for an NPU runs without
one: device strings, moving tensors, memory counters, the fused attention's arguments. Collectives are gloo's over tensors of the
processor, in HCCL's place, and autocast casts nothing. What it cannot show is what an NPU computes, and how fast.

torch has the place for such a device (PrivateUse1) and a way to fill it from Python, which is experimental. A tensor of the device
wraps one of the processor; an operation takes the wrapped ones, and wraps what comes out. autograd knows of one such device,
so that tensors of all of them say that they are of the first.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

from fused_attention import npu_fusion_attention as npu_fusion_attention

# Read by the worker: what takes HCCL's place.
COLLECTIVES = "gloo"


def _visible() -> list[int]:
    """The devices that this process may use, as CANN reads the variable: ascending numbers between commas."""
    value = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    numbers = [int(number) for number in value.split(",")]
    if numbers != sorted(set(numbers)) or value != ",".join(map(str, numbers)):
        raise RuntimeError(
            f"ASCEND_RT_VISIBLE_DEVICES={value}: numbers have to ascend, with commas and no blank between"
        )
    print(f"emulated NPU: ASCEND_RT_VISIBLE_DEVICES={value}", file=sys.stderr, flush=True)
    return numbers


COUNT = len(_visible())
Device = torch.device | str | int | None


class Tensor(torch.Tensor):
    """A tensor of the device, around one of the processor."""

    wrapped_tensor: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Tensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("npu", 0),
        )
        made.wrapped_tensor = inner
        found: Tensor = made
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.wrapped_tensor!r}@npu"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_npu = bool(given)
        inner_args, inner_kwargs = tree_map(
            lambda leaf: leaf.wrapped_tensor if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        if kwargs.get("device") is not None:
            to = torch.device(kwargs["device"])
            inner_kwargs["device"] = torch.device("cpu")
            is_npu = to.type == "npu"
        if function is torch.ops.aten.copy_.default and not isinstance(args[0], Tensor):
            return args[0].copy_(inner_args[1])
        _refuse_f64(inner_args, inner_kwargs, function)
        # What an operation changes in place is the tensor that it was given.
        wrapped = {id(tensor.wrapped_tensor): tensor for tensor in given}

        def wrap(leaf: Any) -> Any:
            if not is_npu or not isinstance(leaf, torch.Tensor):
                return leaf
            return wrapped[id(leaf)] if id(leaf) in wrapped else Tensor(leaf)

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
        self.current = device if isinstance(device, int) else torch.device(device or "npu").index or 0

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
        # What a test can tell from a process's resident memory, and one device from another.
        return (123 + self.current) << 20

    def mem_get_info(self, _device: Device = None) -> tuple[int, int]:
        return (60 << 30, 64 << 30)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def _install() -> list[torch.library.Library]:
    backend_registration._setup_privateuseone_for_python_backend("npu", backend_module=_Counters("torch.npu"))
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
        return Tensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
        return Tensor(torch.empty_strided(size, stride, dtype=dtype))

    # torch's own would make an empty tensor and have it grow, which a wrapper does not see.
    def eye(n: int, dtype: Any = None, **_: Any) -> Tensor:
        return Tensor(torch.eye(n, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")

    # What makes a tensor of numbers copies them past the wrapper's own dispatch.
    def copy_from(source: torch.Tensor, target: torch.Tensor, _non_blocking: bool = False) -> torch.Tensor:
        of_source, of_target = (x.wrapped_tensor if isinstance(x, Tensor) else x for x in (source, target))
        of_target.copy_(of_source)
        return target

    library.impl("eye", eye, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    # Autocast is accepted, and casts nothing.
    autocast = torch.library.Library("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    return [library, autocast]


# Registrations last as long as the objects that made them.
_LIBRARIES = _install()
