"""The optimizer, with its state by the names of what is trained, whole and on the CPU."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from .checkpoint import Tensors, Trained
from .failure import JobFailure
from .optimizers import OptimizerSettings

Parameters = dict[str, torch.nn.Parameter]


class Optimizer:
    """An optimizer of `OPTIMIZERS` over named parameters."""

    def __init__(self, settings: OptimizerSettings, parameters: Parameters) -> None:
        self._parameters = parameters
        self._state = {name: settings.state(name, parameter) for name, parameter in parameters.items()}
        self._inner = settings.make(parameters)
        self.rate_moves = settings.rate_moves
        self.steps = 0

    def step(self, learning_rate: float) -> None:
        """One update by the gradients."""
        for inner in self._inner:
            for group in inner.param_groups:
                group["lr"] = learning_rate
            inner.step()
        self.steps += 1

    def trained(self) -> Trained:
        """A copy of everything that is trained, with the optimizer's state. Every rank has to take part."""
        values = {name: whole(parameter) for name, parameter in self._parameters.items()}
        state: dict[str, Tensors] = {}
        for inner, name, parameter in self._owned():
            for saved, kept in self._state[name].items():
                value = inner.state[parameter].get(kept)
                state.setdefault(saved, {})[name] = torch.zeros_like(values[name]) if value is None else whole(value)
        return Trained(values, state)

    def restore(self, steps: int, saved: Trained) -> None:
        """Takes up saved values and state, after so many updates."""
        self._check(saved)
        self.steps = steps
        set_values(self._parameters, saved.values)
        if steps == 0:
            # The first update makes its state itself; SGD's first is not a mean of two.
            return
        for inner, name, parameter in self._owned():
            state = inner.state[parameter]
            for set_, kept in self._state[name].items():
                state[kept] = like(saved.state[set_][name], parameter)
            if isinstance(inner, torch.optim.AdamW):
                state["step"] = torch.tensor(float(steps))

    def _owned(self) -> list[tuple[torch.optim.Optimizer, str, torch.nn.Parameter]]:
        """Each parameter with its name and the optimizer that updates it, in the order of the parameters."""
        owners = {id(p): inner for inner in self._inner for group in inner.param_groups for p in group["params"]}
        return [(owners[id(parameter)], name, parameter) for name, parameter in self._parameters.items()]

    def _check(self, saved: Trained) -> None:
        """Fails where a saved state is not one of these parameters."""
        expected = {name: {"value", *state} for name, state in self._state.items()}
        sets = {"value": saved.values, **saved.state}
        found: dict[str, set[str]] = {}
        for set_, tensors in sets.items():
            for name, tensor in tensors.items():
                found.setdefault(name, set()).add(set_)
                parameter = self._parameters.get(name)
                if parameter is not None and tensor.shape != parameter.shape:
                    shapes = f"{list(tensor.shape)}, not {list(parameter.shape)}"
                    raise JobFailure("internal", f"the saved `{name}` has shape {shapes}")
        odd = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
        if odd:
            raise JobFailure("internal", f"the saved state and the model differ in `{odd[0]}`")


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
