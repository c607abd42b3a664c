"""The audit of a training run: gradients must have reached and moved all that is trained.

A tensor that stays where it was is the mark of a graph cut somewhere, which no loss curve shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from .optimizer import Parameters
from .parallel import Ranks

# Steps with a learning rate that counts after which every tensor must have moved.
STEPS = 3
# A lower learning rate, as at the start of a long warm-up, may round away in each step, and rightly moves nothing.
LEAST_RATE = 1e-6
# How names of trained rows of an embedding end.
TOKEN_ROWS = ".trainable_tokens_delta"


class Audit:
    """Where everything was at first, and what gradients did since."""

    def __init__(
        self, parameters: Parameters, frozen: Mapping[str, torch.Tensor], rate_moves: bool, ranks: Ranks
    ) -> None:
        self._parameters = parameters
        self._frozen = frozen
        self._frozen_before = [_sum_of_bits(tensor) for tensor in frozen.values()]
        self._ranks = ranks
        # An update in proportion to the gradient may well round away.
        self._rate_moves = rate_moves
        self._before: list[float] | None = self._sums()
        self._reached: set[str] = set()
        # Those whose learning rate was high enough to move a tensor.
        self.steps = 0

    def reached(self, name: str) -> None:
        """Notes that the gradient of a tensor is not zero: weight decay moves a tensor without any."""
        self._reached.add(name)

    def after_step(self, learning_rate: float, loss: float) -> str | None:
        """Looks at what is trained once enough steps are done; the first tensor that stayed where it was.

        A step whose loss is zero is none of them: a hinge that is satisfied has no gradient.
        """
        if learning_rate >= LEAST_RATE and loss != 0.0:
            self.steps += 1
        if self._before is None or self.steps < STEPS:
            return None
        moved = [now != before for now, before in zip(self._sums(), self._before, strict=True)]
        self._before = None
        all_must = self._rate_moves or not any(moved)
        for name, has_moved in zip(self._parameters, moved, strict=True):
            # Rows of tokens have a gradient only where these tokens are read.
            if name not in self._reached and name.endswith(TOKEN_ROWS):
                continue
            if name not in self._reached or (all_must and not has_moved):
                return name
        return None

    def restart(self) -> None:
        """Forgets what gradients did: other values were put in the place of those that they moved."""
        self._before, self._reached, self.steps = self._sums(), set(), 0

    def check_frozen(self) -> str | None:
        """Compares everything frozen with what it was at first; the first tensor that has changed."""
        now = [_sum_of_bits(tensor) for tensor in self._frozen.values()]
        pairs = zip(self._frozen, now, self._frozen_before, strict=True)
        return next((name for name, after, before in pairs if after != before), None)

    def _sums(self) -> list[float]:
        """A checksum of each tensor's bits, over all ranks."""
        sums = [_sum_of_bits(parameter) for parameter in self._parameters.values()]
        is_sharded = any(isinstance(p, DTensor) for p in self._parameters.values())
        return self._ranks.sum(sums, "sum up checksums") if is_sharded else sums


def _sum_of_bits(tensor: torch.Tensor) -> float:
    """A checksum of the bits that this rank has of a tensor, cut to what a float tells apart, also summed over ranks."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
    # An NPU is slow at integers of 64 bits.
    local = local.cpu() if local.device.type not in ("cpu", "cuda") else local
    width = {1: torch.uint8, 2: torch.int16}.get(local.element_size(), torch.int32)
    return float(int(local.view(width).sum(dtype=torch.int64)) % (1 << 40))
