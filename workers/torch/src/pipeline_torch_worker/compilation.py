"""Layers that `torch.compile` has made fewer kernels of: what lies between two products is computed in one."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from .architecture import layers_of
from .attention import NAME, attend
from .device import Device
from .draws import AddressedDropout
from .failure import JobFailure
from .job import CompileKind


class Layers:
    """The compiled layers of a model, each around its attention, which stays as it is.

    Layers are compiled one by one, since they share their code, for any number of tokens.
    """

    def __init__(self, model: PreTrainedModel, errors: bool) -> None:
        import torch._dynamo

        self._enabled = True
        # What torch cannot compile is computed as it would be without.
        torch._dynamo.config.suppress_errors = not errors
        # Documents are of many lengths, and a mask of dropout is drawn from whole numbers of 64 bits.
        AttentionInterface.register(NAME, torch.compiler.disable(attend))
        dropouts: list[Any] = [module for module in model.modules() if isinstance(module, AddressedDropout)]
        for dropout in dropouts:
            dropout.forward = torch.compiler.disable(dropout.forward)
        for layer in layers_of(model):
            plain = layer.forward
            compiled = torch.compile(plain, dynamic=True)
            layer.forward = functools.partial(self._forward, compiled, plain)

    def _forward(self, compiled: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            return plain(*args, **kwargs)
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            message = f"torch {torch.__version__} cannot compile the model's layers"
            raise JobFailure("machine", message, "leave `compile` out") from error

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The same layers, not compiled: prompts are completed a token at a time, beside a cache."""
        self._enabled = False
        try:
            yield
        finally:
            self._enabled = True


def compile_layers(model: PreTrainedModel, asked: CompileKind, device: Device) -> Layers | None:
    """Has a model's layers compiled, where that is asked for and, by `auto`, where torch makes kernels with Triton."""
    has_triton = device.kind in ("cuda", "rocm") and importlib.util.find_spec("triton") is not None
    if asked == "none" or (asked == "auto" and not has_triton):
        return None
    return Layers(model, errors=asked == "layers")
