"""The optimizer, with its state by the names of what is trained, whole and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from .checkpoint import USUAL_SETS, VALUES, SavedTensors, Tensors, write_set
from .failure import JobFailure
from .optimizers import NONE, OptimizerSettings
from .parallel import Ranks

Parameters = dict[str, torch.nn.Parameter]


class Optimizer:
    """An optimizer of `OPTIMIZERS` over named parameters, of which some are of embeddings and of the head."""

    def __init__(self, settings: OptimizerSettings, parameters: Parameters, embeddings: Set[str] = NONE) -> None:
        self._parameters = parameters
        self._state = {name: settings.state(name, parameter, embeddings) for name, parameter in parameters.items()}
        self._inner = settings.make(parameters, embeddings)
        self.rate_moves = settings.rate_moves
        self.steps = 0

    def step(self, learning_rate: float) -> None:
        """One update by the gradients."""
        for inner in self._inner:
            for group in inner.param_groups:
                group["lr"] = learning_rate
            inner.step()
        self.steps += 1

    def save(self, folder: Path, with_state: bool, ranks: Ranks) -> list[str]:
        """Writes everything that is trained, and the optimizer's state with it; the names of the files.

        Every rank has to take part. Each writes its share of the tensors, and no rank ever holds more of a set.
        """

        def value(name: str, is_ours: bool) -> torch.Tensor | None:
            return whole(self._parameters[name], is_ours)

        files = write_set(folder, VALUES, {name: p.numel() for name, p in self._parameters.items()}, value, ranks)
        owners = {name: inner for inner, name, _ in self._owned()}
        kept = {set_ for state in self._state.values() for set_ in state}
        for set_ in sorted({*USUAL_SETS, *kept}) if with_state else []:

            def state(name: str, is_ours: bool, set_: str = set_) -> torch.Tensor | None:
                parameter = self._parameters[name]
                found = owners[name].state[parameter].get(self._state[name][set_])
                if found is None:
                    # Before the first update.
                    return torch.zeros(parameter.shape) if is_ours else None
                return whole(found, is_ours)

            sizes = {name: self._parameters[name].numel() for name, state in self._state.items() if set_ in state}
            files += write_set(folder, set_, sizes, state, ranks)
        return files

    def save_values(self, folder: Path, ranks: Ranks, converted: Callable[[Tensors], Tensors]) -> list[str]:
        """Writes what rank 0 makes of all trained values together; the names of the files. Every rank has to take part."""
        values = {}
        for name, parameter in self._parameters.items():
            found = whole(parameter, ranks.rank == 0)
            if found is not None:
                values[name] = found
        values = converted(values) if ranks.rank == 0 else {}

        def value(name: str, _: bool) -> torch.Tensor | None:
            return values[name]

        return write_set(folder, VALUES, {name: tensor.numel() for name, tensor in values.items()}, value, ranks)

    def restore(self, steps: int, saved: SavedTensors) -> None:
        """Takes up saved values and state, after so many updates, a tensor at a time."""
        self._check(saved)
        self.steps = steps
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(like(saved.read(name, VALUES), parameter))
        for inner in self._inner:
            inner.state.clear()
        if steps == 0:
            # The first update makes its state itself; SGD's first is not a mean of two.
            return
        for inner, name, parameter in self._owned():
            state = inner.state[parameter]
            for set_, kept in self._state[name].items():
                state[kept] = like(saved.read(name, set_), parameter)
            if isinstance(inner, torch.optim.AdamW):
                # Its fused update reads it where the parameter is.
                device = parameter.device if inner.defaults["fused"] else None
                state["step"] = torch.tensor(float(steps), device=device)

    def _owned(self) -> list[tuple[torch.optim.Optimizer, str, torch.nn.Parameter]]:
        """Each parameter with its name and the optimizer that updates it, in the order of the parameters."""
        owners = {id(p): inner for inner in self._inner for group in inner.param_groups for p in group["params"]}
        return [(owners[id(parameter)], name, parameter) for name, parameter in self._parameters.items()]

    def _check(self, saved: SavedTensors) -> None:
        """Fails where a saved state is not one of these parameters."""
        expected = {name: {VALUES, *state} for name, state in self._state.items()}
        found = saved.sets()
        odd = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
        if odd:
            raise JobFailure("internal", f"the saved state and the model differ in `{odd[0]}`")
        for name, parameter in self._parameters.items():
            for set_ in expected[name]:
                shape = saved.shape(name, set_)
                if shape != list(parameter.shape):
                    raise JobFailure("internal", f"the saved `{name}` has shape {shape}, not {list(parameter.shape)}")


def whole(tensor: torch.Tensor, is_ours: bool) -> torch.Tensor | None:
    """A tensor with all its shards, as a copy on the CPU, on the ranks that want it; all have to take part."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to("cpu", copy=True) if is_ours else None


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor as a parameter is: on its device, and sharded as it is."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        # Every rank has read all of it.
        return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value
