"""What vLLM finds of pyquant and where; and that the installed vLLM still has what pyquant builds on."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from house.test_imports import OF_TRANSFORMERS

pytestmark = pytest.mark.nightly
pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make nightly-vllm")

PROGRAM = """
import json, logging
logging.basicConfig(level=logging.INFO)
from vllm.plugins import load_general_plugins
import vllm.plugins
load_general_plugins()
vllm.plugins.plugins_loaded = False  # as in a process that begins with a copy of another's modules
load_general_plugins()
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.platforms import PlatformEnum
kinds = {"int8": linear._POSSIBLE_INT8_KERNELS, "mp": linear._POSSIBLE_KERNELS}
both = [(kind, lists, p) for kind, lists in kinds.items() for p in ("CPU", "CUDA")]
names = {f"{kind} {p}": [k.__name__ for k in lists[PlatformEnum[p]]] for kind, lists, p in both}
print("\\n" + json.dumps({"names": names, "methods": QUANTIZATION_METHODS.count("pyquant")}))
"""
OURS = {"int8": "PyquantInt8LinearKernel", "mp": "PyquantMixedLinearKernel"}


def plugins_of(**variables: str) -> tuple[dict[str, Any], str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "PYQUANT_VLLM")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | variables, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]), ran.stderr


@pytest.mark.parametrize("variables", [{}, {"PYQUANT_VLLM": "prefer"}, {"VLLM_PLUGINS": "pyquant,other"}], ids=str)
def test_vllm_finds_the_entry_point_and_kernels_stand_where_the_variable_says(variables: dict[str, str]) -> None:
    found, log = plugins_of(**variables)
    first = variables.get("PYQUANT_VLLM") == "prefer"
    for key, names in found["names"].items():
        assert names.count(OURS[key.split()[0]]) == 1 < len(names)
        assert names[0 if first else -1] == OURS[key.split()[0]]
    assert found["methods"] == 1
    assert f"stand {'first' if first else 'last'}" in log


@pytest.mark.parametrize("variables", [{"VLLM_PLUGINS": "other"}, {"PYQUANT_VLLM": "off"}], ids=str)
def test_it_can_be_left_out(variables: dict[str, str]) -> None:
    found, _ = plugins_of(**variables)
    assert found["methods"] == 0
    assert not any(name in names for names in found["names"].values() for name in OURS.values())


def test_vllms_transformers_has_the_names_that_pyquant_takes() -> None:
    for name in OF_TRANSFORMERS.split():
        module, _, attribute = f"transformers.{name}".rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, attribute) or importlib.import_module(f"{module}.{attribute}"), name


def test_every_method_that_vllm_calls_takes_what_vllms_own_class_takes() -> None:
    modules = [
        importlib.import_module(f"pyquant.integrations.vllm.{name}")
        for name in ("kernels", "scheme", "config", "embedding")
    ]
    classes = [
        one
        for module in modules
        for one in vars(module).values()
        if isinstance(one, type) and one.__module__ == module.__name__ and "vllm" in one.__mro__[1].__module__
    ]
    assert len(classes) == 5
    compared = 0
    for ours in classes:
        assert not getattr(ours, "__abstractmethods__", None), ours
        for name, method in vars(ours).items():
            theirs = next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)
            if theirs is None or name.startswith("__") or not callable(getattr(ours, name)):
                continue
            got, want = (inspect.signature(getattr(m, "__func__", m)).parameters for m in (method, theirs))
            if {p.kind for p in want.values()} & {inspect.Parameter.VAR_KEYWORD}:
                continue  # create_weights, below
            assert list(got) == list(want), f"{ours.__name__}.{name}"
            compared += 1
    assert compared >= 16


def test_what_pyquant_builds_on_is_there() -> None:
    from vllm.model_executor import parameter
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers import linear as layers
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as theirs
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes

    def takes(function: Any, *names: str) -> None:
        missing = set(names) - set(inspect.signature(function).parameters)
        assert not missing, f"{function}: {missing}"

    takes(linear.register_linear_kernel, "kernel_class", "platform", "kernel_type")
    takes(linear.MPLinearKernel, "c", "w_q_param_name", "w_s_param_name", "w_zp_param_name")
    takes(linear.Int8ScaledMMLinearKernel, "c", "layer_param_names")
    fields = {f.name for f in dataclasses.fields(linear.MPLinearLayerConfig)}
    assert {"partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points"} <= fields
    fields = {f.name for f in dataclasses.fields(linear.Int8ScaledMMLinearLayerConfig)}
    assert {"is_static_input_scheme", "is_channelwise", "input_symmetric"} <= fields
    assert "CompressedTensorsLinearMethod" in layers.WEIGHT_LOADER_V2_SUPPORTED
    given = inspect.getsource(theirs.CompressedTensorsLinearMethod.create_weights)
    asked = inspect.signature(importlib.import_module("pyquant.integrations.vllm.scheme").PyquantScheme.create_weights)
    for name, one in asked.parameters.items():
        assert name == "self" or one.kind is one.VAR_KEYWORD or f"{name}=" in given
    assert "_humming_input_quant_config" in inspect.getsource(schemes.CompressedTensorsWNA8Int.create_weights)
    for name in ("PackedvLLMParameter", "PackedColumnParameter", "GroupQuantScaleParameter", "PerTensorScaleParameter"):
        assert {"load_merged_column_weight", "load_qkv_weight", "load_row_parallel_weight"} <= set(
            dir(getattr(parameter, name))
        )
