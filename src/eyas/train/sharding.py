"""Trained weights, gradients and moments in equal shares on all ranks (FSDP), and whole again for a checkpoint.

The frozen matrices stay whole on every rank: they have no gradient, and need not be collected at every step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, device: torch.device) -> None:
    """Splits each trained weight of `model` (on `device`) along its rows over all ranks.

    The drafter is one unit: it has one layer in most recipes, whose weights every TTT step needs.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, ignored_params={p for p in model.parameters() if not p.requires_grad})


class Sharded(nn.Module):
    """A sharded model as Trainer wants to see it: wrapped, so that it is not wrapped for DDP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def release(model: nn.Module) -> None:
    """Gives up the whole weights that a forward pass without a backward pass leaves in memory."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, on every rank; every rank must ask. A tensor that is not sharded as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The whole `tensor`, which every rank has, on `other`'s device and sharded as `other`."""
    moved = tensor.to(other.device)
    if not isinstance(other, DTensor):
        return moved
    return distribute_tensor(moved, other.device_mesh, other.placements, src_data_rank=None)
