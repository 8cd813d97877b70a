"""The line that says what machine a figure belongs to."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pyquant
from pyquant.measure.environment import (
    command_line,
    cpu_features,
    cpu_model_and_flags,
    describe_environment,
    package_version,
)


def test_environment_names_versions_and_threads() -> None:
    environment = describe_environment("cpu", clock="cpu")
    assert environment.torch == torch.__version__
    assert environment.pyquant == pyquant.__version__
    assert environment.threads == torch.get_num_threads()
    assert environment.cpu
    line = environment.line()
    assert environment.torch in line
    assert "clock: cpu" in line


def test_gpu_takes_the_place_of_the_cpu() -> None:
    environment = replace(describe_environment("cpu"), gpu="NVIDIA H200, sm_90, 132 SMs", driver="570.1", cuda="13.0")
    assert environment.line().startswith("NVIDIA H200")
    assert "driver 570.1" in environment.line()


def test_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench/some.py", "--m", "1", "a b"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command_line() == "python bench/some.py --m 1 'a b'"


def test_features_are_known_ones() -> None:
    assert cpu_features() <= {
        "avx2",
        "avx512f",
        "avx512_vnni",
        "avx_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_int8",
        "amx_bf16",
        "asimd",
        "asimddp",
        "i8mm",
        "bf16",
    }
    assert package_version("no-such-package-here") == ""


def test_a_processor_of_arm_is_told_by_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: told)
    name, _ = cpu_model_and_flags()
    assert name.endswith("(implementer 0x41, part 0xd4f)")
    assert cpu_features() == {"asimd", "asimddp", "i8mm"}
