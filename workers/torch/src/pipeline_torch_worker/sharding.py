"""FSDP2: each layer's weights, gradients and moments lie in shards over the ranks, and come together to be computed with.

Weights that are on the meta device are read from the checkpoint once they are sharded: of each tensor, a rank reads its share.
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from .architecture import layers_of, name_in_base
from .device import Device
from .job import TrainJob
from .model import DocumentLoss
from .precision import COMPUTE_TYPES
from .weights import WeightFiles


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
    if any(parameter.is_meta for parameter in loss.parameters()):
        _fill(loss, WeightFiles(job.model, loss.model), device, mesh.get_local_rank())
    # A buffer is small, and every rank has it. What PEFT would take merged rows of tokens back to stays without values: sharded
    # weights are never merged.
    for buffer in loss.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device.torch)


def _fill(loss: DocumentLoss, files: WeightFiles, device: Device, rank: int) -> None:
    """Reads this rank's share of each weight that is on the meta device, and the buffers that are stored."""
    filled: dict[str, torch.Tensor] = {}
    # A tied weight is one parameter under several names, and stays one.
    read: dict[int, torch.nn.Parameter] = {}
    for name, parameter in loss.model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            continue
        if id(parameter) not in read:
            assert isinstance(parameter, DTensor), "every weight is sharded"
            read[id(parameter)] = _share(parameter, name_in_base(name), files, device)
        filled[f"model.{name}"] = read[id(parameter)]
    loss.load_state_dict(filled, strict=False, assign=True)
    for name, buffer in loss.model.named_buffers():
        if name_in_base(name) in files:
            buffer.data = files.read_whole(name_in_base(name)).to(buffer.dtype)
    print(f"rank {rank} has read {files.bytes_read} bytes of the checkpoint's weights", file=sys.stderr)


def _share(parameter: DTensor, name: str, files: WeightFiles, device: Device) -> torch.nn.Parameter:
    """This rank's part of a weight."""
    mesh, (placement,) = parameter.device_mesh, parameter.placements
    assert isinstance(placement, Shard), "FSDP shards every weight over one dimension"
    length, own = parameter.shape[placement.dim], parameter.to_local().shape[placement.dim]
    # Equal parts, of which the last may be smaller or empty (`torch.chunk`).
    start = min(mesh.get_local_rank() * -(-length // mesh.size()), length)
    part = files.read(name, placement.dim, start, start + own)
    # A copy: what is read is a view of the mapped file.
    part = part.to(device=device.torch, dtype=parameter.dtype, copy=True)
    whole = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return torch.nn.Parameter(whole, requires_grad=parameter.requires_grad)


def _set_divide_factor(module: FSDPModule) -> None:
    # The name that it has since torch 2.8, and the one that it had before.
    name = "set_gradient_divide_factor"
    set_factor = getattr(module, name, None) or module.set_reduce_scatter_divide_factor
    set_factor(1.0)
