"""GPTQ and AWQ checkpoints of a model of transformers: the perplexity that the formats' formulas give."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch

import pyquant
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)
GROUP = 32
Pack = Callable[..., dict[str, torch.Tensor]]


def rounded(weight: torch.Tensor, group_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unsigned 4-bit q [K, N] with zero points and fp16 scales [G, N] that cover each group."""
    w, groups = weight.double().T, int(group_of.max()) + 1
    low = torch.stack([w[group_of == i].amin(0).clamp(max=0) for i in range(groups)])
    high = torch.stack([w[group_of == i].amax(0).clamp(min=0) for i in range(groups)])
    scales = ((high - low) / 15).half()
    z = (-low / scales.double()).round().clamp(0, 15).long()
    q = ((w / scales.double()[group_of]).round() + z[group_of]).clamp(0, 15).long()
    return q, z, scales


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def make(folder: Path, words: dict[str, Any], pack: Pack, has_order: bool = False) -> tuple[Any, Any]:
    """A folder in the format, and the float model with the weights of the format's formula."""
    model, g = llama(), torch.Generator().manual_seed(2)
    tensors, reals = {}, {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if "_proj" not in name:
            tensors |= {} if layer == "lm_head" else {name: tensor.half()}
            continue
        k = tensor.shape[1]
        group_of = (torch.randperm(k, generator=g) if has_order else torch.arange(k)) // GROUP
        q, z, scales = rounded(tensor, group_of)
        tensors |= foreign.of_layer(layer, pack(q, z, scales, group_of))
        reals[name] = foreign.dequantised(q, z, scales, group_of)
    kept = {name: t.float() for name, t in tensors.items() if name.endswith("weight") and "_proj" not in name}
    model.load_state_dict({**kept, "lm_head.weight": kept["model.embed_tokens.weight"], **reals})
    return foreign.write(folder, words, tensors, shards=2, **model.config.to_dict()), model


def loss_of(model: Any) -> float:
    ids = torch.randint(0, 60, (4, 32), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Pack, bool]] = {
    "gptq": (GPTQ, lambda q, z, s, i: foreign.gptq_layer(q, z, s, 4, 1, i), False),
    "gptq v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda q, z, s, i: foreign.gptq_layer(q, z, s, 4, 2, i),
        False,
    ),
    "gptq desc_act": ({**GPTQ, "desc_act": True}, lambda q, z, s, i: foreign.gptq_layer(q, z, s, 4, 1, i), True),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        lambda q, z, s, i: foreign.awq_layer(q, z, s),
        False,
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_perplexity_is_that_of_the_formula(name: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder, twin = make(tmp_path / "m", *FORMATS[name])
    with torch.device("meta"):
        empty = LlamaForCausalLM(twin.config)
    model = pyquant.load_quantized_(empty, folder).eval()
    layers = [m for m in model.modules() if isinstance(m, QLinear)]
    assert len(layers) == 14
    assert any(isinstance(m, Reordered) for m in model.modules()) == FORMATS[name][2]
    want = loss_of(twin)
    assert abs(loss_of(model) - want) < 1e-5 * want
    assert abs(loss_of(llama()) - want) > 1e-3, "quantisation changed nothing: nothing was tested"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_what_was_read_can_be_saved_and_loaded(tmp_path: Path) -> None:
    from transformers import AutoConfig, LlamaForCausalLM

    folder, twin = make(tmp_path / "m", *FORMATS["gptq desc_act"])
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    assert config.quantization_config["quant_method"] == "gptq"
    model = pyquant.load_quantized_(LlamaForCausalLM(config), folder).eval()
    assert not hasattr(model.config, "quantization_config"), "its layers are of another tool now"
    with pytest.warns(pyquant.QuantizationWarning, match="in another order"):
        pyquant.save_pretrained(model, tmp_path / "saved")
    again = pyquant.load_pretrained(tmp_path / "saved", lambda: LlamaForCausalLM(twin.config)).eval()
    assert loss_of(again) == loss_of(model)
