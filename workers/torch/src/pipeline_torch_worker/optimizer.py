"""The optimizer: `torch.optim`'s, with its moments by the names of what is trained, whole and on the processor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from .checkpoint import Tensors, Trained
from .failure import JobFailure
from .job import OptimizerSettings

Parameters = dict[str, torch.nn.Parameter]


class Optimizer:
    """AdamW or SGD over named parameters."""

    def __init__(self, settings: OptimizerSettings, parameters: Parameters) -> None:
        self._parameters = parameters
        self._moments = _MOMENTS[settings.name] if settings.name == "adamw" or settings.momentum else []
        self._inner = _make(settings, list(parameters.values()))
        self.is_adaptive = settings.name == "adamw"
        self.steps = 0

    def step(self, learning_rate: float) -> None:
        """One update by the gradients."""
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        self._inner.step()
        self.steps += 1

    def trained(self) -> Trained:
        """A copy of everything that is trained, with its moments. Every rank has to take part."""
        values = {name: whole(parameter) for name, parameter in self._parameters.items()}
        moments: list[Tensors] = [{}, {}]
        for moment, kept in zip(self._moments, moments, strict=False):
            for name, parameter in self._parameters.items():
                value = self._inner.state[parameter].get(moment)
                kept[name] = torch.zeros_like(values[name]) if value is None else whole(value)
        return Trained(values, *moments)

    def restore(self, steps: int, saved: Trained) -> None:
        """Takes up saved values and moments, after so many updates."""
        _check(self._parameters, saved, len(self._moments))
        self.steps = steps
        set_values(self._parameters, saved.values)
        if steps == 0:
            # The first update makes its moments itself; SGD's first is not a mean of two.
            return
        for name, parameter in self._parameters.items():
            state = self._inner.state[parameter]
            for moment, kept in zip(self._moments, (saved.exp_avg, saved.exp_avg_sq), strict=False):
                state[moment] = like(kept[name], parameter)
            if self.is_adaptive:
                state["step"] = torch.tensor(float(steps))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its shards, as a copy on the processor."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True)


def set_values(parameters: Parameters, values: Tensors) -> None:
    """Puts other values in the place of those of the parameters."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(like(values[name], parameter))


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a parameter is: on its device, and sharded as it is."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        # Every rank has read all of it.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value


_MOMENTS = {"adamw": ["exp_avg", "exp_avg_sq"], "sgd": ["momentum_buffer"]}


def _make(settings: OptimizerSettings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    # The learning rate comes with each step.
    if settings.name == "adamw":
        beta1, beta2 = settings.betas
        return torch.optim.AdamW(
            parameters, lr=0.0, betas=(beta1, beta2), eps=settings.eps, weight_decay=settings.weight_decay
        )
    return torch.optim.SGD(
        parameters,
        lr=0.0,
        momentum=settings.momentum,
        dampening=settings.dampening,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov,
    )


def _check(parameters: Parameters, saved: Trained, moments: int) -> None:
    """Fails where a saved state is not one of these parameters."""
    sets = [saved.values, saved.exp_avg, saved.exp_avg_sq][: 1 + moments]
    for tensors in sets:
        if tensors.keys() != parameters.keys():
            odd = sorted(tensors.keys() ^ parameters.keys())[0]
            raise JobFailure("internal", f"the saved state and the model differ in `{odd}`")
        for name, tensor in tensors.items():
            if tensor.shape != parameters[name].shape:
                found, expected = list(tensor.shape), list(parameters[name].shape)
                raise JobFailure("internal", f"the saved `{name}` has shape {found}, not {expected}")
