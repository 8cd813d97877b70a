"""`pyquant bench WHAT`: one module of this package for each kind of measurement."""

from __future__ import annotations

import argparse

from pyquant.cli import bench_calib, bench_decode, bench_gemm, bench_mlp, bench_qat

_KINDS = {"gemm": bench_gemm, "mlp": bench_mlp, "calib": bench_calib, "qat": bench_qat, "decode": bench_decode}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measurements."
    kinds = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    for name, module in _KINDS.items():
        kind = kinds.add_parser(name, help=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
        kind.set_defaults(run=module.run)
        module.add_arguments(kind)
