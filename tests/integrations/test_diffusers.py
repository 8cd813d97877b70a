"""pyquant inside of from_pretrained of the real diffusers: models and pipelines that are quantised while they load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pyquant

D = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning")
INPUTS = {
    "hidden_states": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)),
    "timestep": torch.tensor([3]),
    "class_labels": torch.tensor([1]),
}


def ours(*args: Any, **words: Any) -> Any:
    from pyquant.integrations.diffusers import PyquantConfig

    return PyquantConfig(*args, **{"check_speed": False} | words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DiT in floating point, in several files."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "in_channels": 4, "num_layers": 1, "sample_size": 8}
    model = D.DiTTransformer2DModel(
        **sizes, patch_size=2, out_channels=8, num_embeds_ada_norm=1000, norm_type="ada_norm_zero"
    )
    path = tmp_path_factory.mktemp("dit")
    model.save_pretrained(path, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def load(folder: Path, **words: Any) -> Any:
    return D.DiTTransformer2DModel.from_pretrained(folder, **words)


def out(model: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        y: torch.Tensor = model(**INPUTS | {"hidden_states": INPUTS["hidden_states"].to(dtype)}).sample
    return y


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W8A16", {"re:.*attn.*": "W4A16(group_size=32)"}])
def test_loaded_with_a_config_is_quantized_after_loading(folder: Path, scheme: Any) -> None:
    model = load(folder, quantization_config=ours(scheme))
    after = pyquant.quantize_(load(folder), scheme, check_speed=False)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds == {name: type(module).__name__ for name, module in after.named_modules()}
    assert list(kinds.values()).count("QLinear") == (4 if isinstance(scheme, dict) else 11)
    assert torch.equal(out(model), out(after))
    assert 0 < (out(model) - out(load(folder))).norm() < 0.1 * out(model).norm()
    assert model.is_quantized
    json.dumps(model.config.quantization_config.to_dict())


def test_types_and_devices(folder: Path) -> None:
    half = load(folder, quantization_config=ours(), torch_dtype=torch.bfloat16)
    assert half.transformer_blocks[0].attn1.to_q.dtype == torch.bfloat16
    assert out(half, torch.bfloat16).dtype == torch.bfloat16
    whole = load(folder, quantization_config=ours(), device_map={"": "cpu"})
    assert torch.equal(out(whole), out(load(folder, quantization_config=ours())))
    with pytest.raises(pyquant.UnsupportedError, match="device_map"):
        load(folder, quantization_config=ours(), device_map={"pos_embed": "cpu", "": "disk"})


def test_saving(folder: Path, tmp_path: Path) -> None:
    model = load(folder, quantization_config=ours())
    with pytest.raises(pyquant.UnsupportedError, match=r"pyquant\.save_pretrained"):
        model.save_pretrained(tmp_path / "refused")
    assert not list(tmp_path.rglob("*.safetensors"))
    pyquant.save_pretrained(model, tmp_path / "codes")
    floats = D.DiTTransformer2DModel.from_config(D.DiTTransformer2DModel.load_config(folder)).eval()
    assert torch.equal(out(pyquant.load_pretrained(tmp_path / "codes", floats)), out(model))
    expected = out(pyquant.dequantize_(load(folder, quantization_config=ours())))
    model.dequantize()
    assert torch.equal(out(model), expected)


def test_a_part_of_a_pipeline(folder: Path, tmp_path: Path) -> None:
    blocks = {"block_out_channels": (8,), "norm_num_groups": 2, "sample_size": 16, "latent_channels": 4}
    vae = D.AutoencoderKL(**blocks, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",))
    D.DiTPipeline(transformer=load(folder), vae=vae, scheduler=D.DDIMScheduler()).save_pretrained(tmp_path)
    from pyquant.integrations.transformers import PyquantConfig as OfTransformers

    kinds = {"transformer": ours(), "text_encoder": OfTransformers()}  # the second is for a part that this one lacks
    words = D.quantizers.PipelineQuantizationConfig(quant_mapping=kinds)
    pipe = D.DiTPipeline.from_pretrained(tmp_path, quantization_config=words)
    pipe.set_progress_bar_config(disable=True)
    assert torch.equal(out(pipe.transformer), out(load(folder, quantization_config=ours())))
    assert not any(isinstance(module, pyquant.QLinear) for module in pipe.vae.modules())
    images = pipe(class_labels=[1], num_inference_steps=2, output_type="np").images
    assert images.shape[0] == 1
    with pytest.raises(pyquant.UnsupportedError, match=r"pyquant\.save_pretrained"):
        pipe.save_pretrained(tmp_path / "again")


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(pyquant.ArgumentError, match="data"):
        load(folder, quantization_config=ours("W8A8"))
    with pytest.raises(pyquant.ArgumentError, match="options"):
        ours(data=[1])
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "pyquant"}}))
    for file in folder.glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(pyquant.UnsupportedError, match="quant_method 'pyquant'"):
        load(tmp_path)


def test_adapters_of_peft_go_around_the_layers(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    from pyquant.integrations import peft as pyquant_peft

    model = load(folder, quantization_config=ours())
    y = out(model)
    pyquant_peft.enable()
    try:
        words = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
        peft.inject_adapter_in_model(words, model)
    finally:
        pyquant_peft.disable()
    assert isinstance(model.transformer_blocks[0].attn1.to_q, pyquant_peft.PyquantLoraLinear)
    assert not torch.equal(out(model), y)
