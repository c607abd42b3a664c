"""FSDP2: each layer's weights, gradients and moments lie in shards over the ranks, and come together to be computed with."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .device import Device
from .job import TrainJob
from .model import DocumentLoss, layers_of
from .precision import COMPUTE_TYPES


def shard(loss: DocumentLoss, job: TrainJob, device: Device, world: int) -> None:
    """Shards the layers one by one, and what is left with the loss itself, so that no device ever holds the whole model."""
    mesh = init_device_mesh(device.torch.type, (world,))
    # Where all weights are trained they lie in f32 and come together in the type that is computed in. With an adapter only that
    # is in f32, and small.
    full = job.method == "full" and job.dtype != "f32"
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_TYPES[job.dtype] if full else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in [*layers_of(loss.model), loss]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in loss.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loss is divided once, by the targets of the whole step.
            _set_divide_factor(module)
            if device.collectives == "gloo":
                # It has sums alone.
                module.set_force_sum_reduction_for_comms(True)
    # A buffer is small, and every rank has it.
    for buffer in loss.buffers():
        buffer.data = buffer.data.to(device.torch)


def _set_divide_factor(module: FSDPModule) -> None:
    # The name that it has since torch 2.8, and the one that it had before.
    name = "set_gradient_divide_factor"
    set_factor = getattr(module, name, None) or module.set_reduce_scatter_divide_factor
    set_factor(1.0)
