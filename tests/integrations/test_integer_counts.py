"""No silent float layer: how many integer products each stack runs, and how many float ones, by torch's own count.

A model that was loaded, wrapped, compiled or exported may look quantised and compute in floating point. The profiler
counts the ops that ran: one integer product a layer, and of float products the output head's alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.integrations import transformers as ours

T = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
LAYERS, HEADS = 14, 1  # of the model: q, k, v, o, gate, up, down, twice
_FLOAT = ("aten::addmm", "aten::mm")
IDS = torch.arange(1, 8)[None]


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = T.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96, pad_token_id=0)
    return T.LlamaForCausalLM(config).eval()


def counted(call: Callable[[], Any]) -> tuple[int, int]:
    """(products of pyquant, float products) of a call."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    counts = {event.key: event.count for event in profile.key_averages()}
    return counts.get("pyquant::qlinear", 0), sum(counts.get(name, 0) for name in _FLOAT)


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    ours.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    ours.disable()


@pytest.fixture
def quantised() -> Any:
    return pyquant.quantize_(llama(), "W8A8Dynamic", heads=False, check_speed=False)


def test_the_count_sees_float_layers(quantised: Any) -> None:
    assert counted(lambda: llama()(IDS)) == (0, LAYERS + HEADS)
    layer = quantised.model.layers[1].mlp
    layer.up_proj = layer.up_proj.to_float()
    assert counted(lambda: quantised(IDS)) == (LAYERS - 1, HEADS + 1)


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=32)", "W4A4Dynamic"])
def test_transformers(scheme: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    config = ours.PyquantConfig(scheme, heads=False, check_speed=False)
    model = T.AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    assert counted(lambda: model(IDS)) == (LAYERS, HEADS)
    model.save_pretrained(tmp_path / "codes")
    again = T.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    for _ in range(2):  # transformers' own reader decompresses at the first call
        assert counted(lambda: again(IDS)) == (LAYERS, HEADS)
    steps = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert counted(lambda: again.generate(IDS, **steps)) == (3 * LAYERS, 3 * HEADS)


def test_files_of_others(quantised: Any, tmp_path: Path) -> None:
    quantised.save_pretrained(tmp_path)
    model = pyquant.load_quantized_(llama(), tmp_path, activations="int8")
    assert counted(lambda: model(IDS)) == (LAYERS, HEADS)


def test_peft(quantised: Any) -> None:
    peft = pytest.importorskip("peft")
    from pyquant.integrations import peft as switch

    switch.enable()
    try:
        model = peft.get_peft_model(quantised, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)).eval()
        adapters = 2 * 2 * 2  # two factors, two layers, two blocks
        assert counted(lambda: model(input_ids=IDS)) == (LAYERS, HEADS + adapters)
        merged = model.merge_and_unload()
        assert counted(lambda: merged(IDS)) == (LAYERS, HEADS)
    finally:
        switch.disable()


def test_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    from pyquant.integrations.diffusers import PyquantConfig

    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1, "sample_size": 8}
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(**sizes, patch_size=2, norm_num_groups=2).eval()
    model.save_pretrained(tmp_path)
    step = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    image = torch.randn(1, 4, 8, 8)
    _, products = counted(lambda: model(image, **step))
    again = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path, quantization_config=PyquantConfig("W8A8Dynamic"))
    layers = sum(isinstance(module, pyquant.QLinear) for module in again.modules())
    assert layers == sum(isinstance(module, nn.Linear) for module in model.modules())
    assert counted(lambda: again(image, **step)) == (products, 0)


def test_compiled_and_exported() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 10)).eval()
    pyquant.quantize_(model, {"3": None, "_default": pyquant.W8A8Dynamic()}, check_speed=False)
    x: Tensor = torch.randn(5, 32)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        compiled(x)
    assert counted(lambda: compiled(x)) == (2, 1)
    program = torch.export.export(model, (x,)).module()
    assert counted(lambda: program(x)) == (2, 1)
