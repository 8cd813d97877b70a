"""python -m bench.rowwise: a row-parallel layer beside the whole layer, in one process that is the only rank.

What is left is what a share costs by itself: its exchanges with nobody, which gloo takes time for too, and its passes.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant.integrations.distributed import PyquantRowwise


def quickest_quarter(call: Callable[[], object], rounds: int) -> float:
    """Microseconds of a call: the first quartile of the rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[rounds // 4] * 1e6


def exchanges(rows: int, width: int) -> None:
    """What the ranks of a layer with dynamic inputs exchange in a call."""
    dist.all_reduce(torch.ones(rows, 1, device="cpu"), dist.ReduceOp.MAX)
    dist.all_reduce(torch.zeros(rows, width, dtype=torch.int32, device="cpu"))


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Prints a table of times and their ratio; the results of both are compared first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemes", nargs="+", default=["W8A8Dynamic", "W4A8Dynamic(group_size=128)"])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(arguments)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    heads = ("scheme", "rows", "whole layer, us", "exchanges, us", "share, us", "share / whole")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for scheme in given.schemes:
        torch.manual_seed(0)
        whole = pyquant.quantize_(nn.Sequential(nn.Linear(given.width, given.width)), scheme, check_speed=False)
        share = parallelize_module(copy.deepcopy(whole), mesh, {"0": PyquantRowwise()})
        for rows in given.rows:
            x = torch.randn(rows, given.width, device="cpu")
            if not torch.equal(share(x), whole(x)):
                raise SystemExit(f"{scheme}, {rows} rows: the share gives other bits")
            calls = (partial(whole, x), partial(exchanges, rows, given.width), partial(share, x))
            one, sent, cut = (quickest_quarter(call, given.rounds) for call in calls)
            print(f"| {scheme} | {rows} | {one:.0f} | {sent:.0f} | {cut:.0f} | {cut / one:.2f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
