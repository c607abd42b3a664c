"""The optimizers by the names of the job file: options with their defaults, how each is made of `torch.optim`, and what of
its state is saved under which name. An optimizer is added by a class here and a line in `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch.distributed.tensor import DTensor

Named = dict[str, torch.nn.Parameter]
NONE: Set[str] = frozenset()


class OptimizerSettings(Protocol):
    """Options of an optimizer without its learning rate, which comes with each step."""

    @property
    def rate_moves(self) -> bool:
        """Whether an update is about as large as the learning rate, however small the gradient."""
        ...

    def make(self, parameters: Named, embeddings: Set[str] = NONE) -> list[torch.optim.Optimizer]:
        """The optimizers that share the parameters, of which some are of embeddings and of the head."""
        ...

    def state(self, name: str, parameter: torch.nn.Parameter, embeddings: Set[str] = NONE) -> dict[str, str]:
        """Names of a parameter's state tensors: in saved states, with that in `torch.optim`."""
        ...

    def problems(self) -> list[str]:
        """What is wrong with the options beyond their types."""
        ...


def has_fused_update(parameter: torch.Tensor) -> bool:
    """Whether torch updates such a parameter by one operation for all of them."""
    return parameter.device.type in ("cpu", "cuda") and not isinstance(parameter, DTensor)


@dataclass(frozen=True)
class AdamW:
    """`torch.optim.AdamW`."""

    weight_decay: float
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8

    rate_moves = True

    def make(self, parameters: Named, embeddings: Set[str] = NONE) -> list[torch.optim.Optimizer]:  # noqa: ARG002
        """See the protocol."""
        beta1, beta2 = self.betas
        values = list(parameters.values())
        return [
            torch.optim.AdamW(
                values,
                lr=0.0,
                betas=(beta1, beta2),
                eps=self.eps,
                weight_decay=self.weight_decay,
                fused=all(map(has_fused_update, values)),
            )
        ]

    def state(self, name: str, parameter: torch.nn.Parameter, embeddings: Set[str] = NONE) -> dict[str, str]:  # noqa: ARG002
        """See the protocol."""
        return {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def problems(self) -> list[str]:
        """See the protocol."""
        return _problems_of_betas(self.betas)


@dataclass(frozen=True)
class Sgd:
    """`torch.optim.SGD`."""

    weight_decay: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    rate_moves = False

    def make(self, parameters: Named, embeddings: Set[str] = NONE) -> list[torch.optim.Optimizer]:  # noqa: ARG002
        """See the protocol."""
        sgd = torch.optim.SGD(
            list(parameters.values()),
            lr=0.0,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )
        return [sgd]

    def state(self, name: str, parameter: torch.nn.Parameter, embeddings: Set[str] = NONE) -> dict[str, str]:  # noqa: ARG002
        """See the protocol."""
        return {"exp_avg": "momentum_buffer"} if self.momentum else {}

    def problems(self) -> list[str]:
        """See the protocol."""
        return []


class LionStep(torch.optim.Optimizer):
    """Lion, which `torch.optim` has not: the sign of an interpolated momentum.

    Source: Chen et al., arXiv:2302.06675, algorithm 2.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """One update by the gradients."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum, gradient = state["exp_avg"], parameter.grad
                direction = (momentum * beta1 + gradient * (1 - beta1)).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate)
                momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)


@dataclass(frozen=True)
class Lion:
    """Lion, by the rule above."""

    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])

    rate_moves = True

    def make(self, parameters: Named, embeddings: Set[str] = NONE) -> list[torch.optim.Optimizer]:  # noqa: ARG002
        """See the protocol."""
        beta1, beta2 = self.betas
        return [LionStep(list(parameters.values()), (beta1, beta2), self.weight_decay)]

    def state(self, name: str, parameter: torch.nn.Parameter, embeddings: Set[str] = NONE) -> dict[str, str]:  # noqa: ARG002
        """See the protocol."""
        return {"exp_avg": "exp_avg"}

    def problems(self) -> list[str]:
        """See the protocol."""
        return _problems_of_betas(self.betas)


@dataclass(frozen=True)
class Muon:
    """`torch.optim.Muon` of matrices; AdamW of vectors, the embedding and the LM head, with what adapts them."""

    adamw: AdamW
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    adjust_lr: Literal["original", "match_rms_adamw"] = "original"

    # A gradient whose norm is below torch's epsilon is not brought to norm 1.
    rate_moves = False

    def make(self, parameters: Named, embeddings: Set[str] = NONE) -> list[torch.optim.Optimizer]:
        """See the protocol."""
        hidden = {name for name, parameter in parameters.items() if _is_hidden_matrix(name, parameter, embeddings)}
        matrices = [parameter for name, parameter in parameters.items() if name in hidden]
        others = {name: parameter for name, parameter in parameters.items() if name not in hidden}
        made = self.adamw.make(others) if others else []
        if matrices:
            muon = torch.optim.Muon(
                matrices,
                lr=0.0,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=self.weight_decay,
                adjust_lr_fn=self.adjust_lr,
            )
            made.append(muon)
        return made

    def state(self, name: str, parameter: torch.nn.Parameter, embeddings: Set[str] = NONE) -> dict[str, str]:
        """See the protocol."""
        if _is_hidden_matrix(name, parameter, embeddings):
            return {"momentum_buffer": "momentum_buffer"}
        return self.adamw.state(name, parameter)

    def problems(self) -> list[str]:
        """See the protocol."""
        has_muon = hasattr(torch.optim, "Muon")
        missing = [] if has_muon else [f"`optimizer` is `muon`, which torch {torch.__version__} has not: it needs 2.9"]
        return missing + self.adamw.problems()


def _is_hidden_matrix(name: str, parameter: torch.nn.Parameter, embeddings: Set[str]) -> bool:
    is_embedding = name in embeddings or "embed_tokens" in name or "lm_head" in name
    return parameter.dim() == 2 and not is_embedding


OPTIMIZERS: dict[str, type[OptimizerSettings]] = {"adamw": AdamW, "sgd": Sgd, "lion": Lion, "muon": Muon}


def _problems_of_betas(betas: list[float]) -> list[str]:
    return [] if len(betas) == 2 else [f"`optimizer.betas` has {len(betas)} numbers, not 2"]
