"""python -m bench.sharding: the bytes that one of 2 and 4 processes holds of a quantised model, by how it is shared.

Counts tensors, times nothing. Processes are of gloo, on the CPU, where what a row-parallel product reads of scales lies
beside its codes as well; on a GPU it does not.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant.integrations.distributed import PyquantColwise, PyquantRowwise, codes_to_parameters_

WIDTH, INNER, BLOCKS = 1024, 4096, 2
WAYS = ("fully_shard", "codes_to_parameters_, fully_shard", "PyquantColwise, PyquantRowwise")


def model_of(scheme: str) -> nn.Sequential:
    """Blocks of two Linears, quantised."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)) for _ in range(BLOCKS)]
    return pyquant.quantize_(nn.Sequential(*layers), scheme, check_speed=False)  # type: ignore[return-value]


def shared(model: nn.Sequential, way: str, world: int) -> nn.Module:
    """The model, shared in one of WAYS."""
    if way == WAYS[2]:
        plan = {"*.0": PyquantColwise(), "*.1": PyquantRowwise()}
        return parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    if way == WAYS[1]:
        codes_to_parameters_(model)
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def bytes_held(model: nn.Module) -> int:
    """Of all tensors of a model, in this process."""
    held: list[Any] = [*model.parameters(), *model.buffers()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
    return sum(t.numel() * t.element_size() for t in local)


def work(rank: int, world: int, port: int, schemes: tuple[str, ...]) -> None:
    """One process of a group: the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for scheme in schemes:
        cells = [f"{bytes_held(shared(model_of(scheme), way, world)) / 2**20:.2f}" for way in WAYS]
        if rank == 0:
            print(f"| {scheme} | {world} | " + " | ".join(cells) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Prints a table of MiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--schemes", nargs="+", default=["W8A8Dynamic", "W4A8Dynamic(group_size=64)"])
    given = parser.parse_args(arguments)
    print(f"| scheme | processes | {' | '.join(WAYS)} |\n|{'---|' * (2 + len(WAYS))}")
    for scheme in given.schemes:
        print(f"| {scheme} | 1 | {bytes_held(model_of(scheme)) / 2**20:.2f} |" + " |" * (len(WAYS) - 1), flush=True)
    for world in given.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(work, (world, port, tuple(given.schemes)), nprocs=world)


if __name__ == "__main__":
    main()
