"""Files that name experts one by one, in every format that is read: banks of the model with those very weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accept
import expert_banks
import foreign
import gguf_file
import pytest
import torch
from torch import Tensor

import pyquant
from pyquant.errors import CheckpointError
from pyquant.io.compressed_tensors import pack_to_int32
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)
FAMILIES = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "DeepseekV3")
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Tensors = dict[str, Tensor]


def in_files(model: Any, family: str) -> Tensors:
    """The state of a model as its files name it: a matrix an expert."""
    found: Tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        path, _, which = name.rpartition(".")
        for e, matrix in enumerate(tensor):
            halves = (
                dict(zip(("gate_proj", "up_proj"), matrix.chunk(2))) if which == "gate_up_proj" else {which: matrix}
            )
            for part, half in halves.items():
                word = MIXTRAL[part] if family == "Mixtral" else part
                found[f"{path}.{e}.{word}.weight"] = half
    if family == "Mixtral":
        found = {name.replace(".mlp.", ".block_sparse_moe."): t for name, t in found.items()}
    return found


def is_quantised(name: str) -> bool:
    """The layers that tools quantise: Linears of the blocks, whose sizes here suit every format."""
    inside = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight")
    return name.endswith(inside) and "kv_a" not in name and "q_a" not in name


def to_int(weight: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    top = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / top
    return (weight / scale).round().clamp(-top - 1, top).to(torch.int8), scale


def packed(weight: Tensor, group: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """q [K, N], z and fp16 scales [G, N] of unsigned 4-bit groups."""
    k = weight.shape[1]
    w = weight.double().T.reshape(k // group, group, -1)
    scales = ((w.amax(1) - w.amin(1)) / 15).half()
    z = (-w.amin(1) / scales.double()).round().clamp(0, 15).long()
    q = ((w / scales.double()[:, None]).round() + z[:, None]).clamp(0, 15).long().reshape(k, -1)
    return q, z, scales


def w4a16(weight: Tensor) -> tuple[Tensors, Tensor]:
    q, z, scales = packed(weight)
    parts = {
        "weight_packed": pack_to_int32((q.T - 8).to(torch.int8).contiguous(), 4),
        "weight_shape": torch.tensor(weight.shape),
        "weight_scale": scales.T,
        "weight_zero_point": pack_to_int32((z - 8).to(torch.int8).contiguous(), 4).T,
    }
    return parts, foreign.dequantised(q, z, scales)


def w8a8(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale = to_int(weight)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def per_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax().reshape(1) / 127
    codes = (weight / scale).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.02])}, codes.float() * scale


def gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    q, z, scales = packed(weight)
    return foreign.gptq_layer(q, z, scales, 4, 1), foreign.dequantised(q, z, scales)


def gptq_by_activation(weight: Tensor) -> tuple[Tensors, Tensor]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    q, z, scales = packed(weight[:, order.argsort()])
    back, group_of = order, order // 16
    return foreign.gptq_layer(q[back], z, scales, 4, 1, group_of), foreign.dequantised(q[back], z, scales, group_of)


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    q, z, scales = packed(weight)
    return foreign.awq_layer(q, z, scales), foreign.dequantised(q, z, scales)


def bitsandbytes(weight: Tensor) -> tuple[Tensors, Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest}, codes.float() * (largest / 127.0)[:, None]


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
GROUP = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 16}
FORMATS: dict[str, tuple[Mapping[str, Any], Callable[[Tensor], tuple[Tensors, Tensor]]]] = {
    "W4A16": (foreign.group_config("pack-quantized", GROUP), w4a16),
    "W8A8Dynamic": (foreign.group_config("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKEN), w8a8),
    "W8A8": (foreign.group_config("int-quantized", {"num_bits": 8, "strategy": "tensor"}, STATIC), per_tensor),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "sym": False}, gptq),
    "GPTQ, desc_act": ({"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": True}, gptq_by_activation),
    "AWQ": ({"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, awq),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes),
}


def quantised_by(pack: Callable[[Tensor], tuple[Tensors, Tensor]], twin: Any, keep: str = "no name") -> Tensors:
    """What a tool makes of a Qwen3-MoE; layers whose name has `keep` in it stay in floating point."""
    found: Tensors = {}
    for name, tensor in in_files(twin, "Qwen3Moe").items():
        is_left = not is_quantised(name) or keep in name
        found |= {name: tensor} if is_left else foreign.of_layer(name.removesuffix(".weight"), pack(tensor)[0])
    return found


def written(folder: Path, family: str, form: str, more: Tensors | None = None) -> tuple[Path, Any, int]:
    """A folder of the format, the float model with the weights of its formula, and how many matrices are codes."""
    words, pack = FORMATS[form]
    twin = expert_banks.model_of(family)
    tensors, real = {}, {}
    for name, tensor in in_files(twin, family).items():
        tensors[name] = real[name] = tensor
        if is_quantised(name):
            del tensors[name]
            parts, real[name] = pack(tensor)
            tensors |= foreign.of_layer(name.removesuffix(".weight"), parts)
    count = sum(is_quantised(name) for name in real)
    for name, own in twin.state_dict().items():
        path = name.rpartition(".")[0]
        prefix = path.replace(".mlp.", ".block_sparse_moe.") if family == "Mixtral" else path
        words_of = MIXTRAL if family == "Mixtral" else {part: part for part in MIXTRAL}

        parts = {
            part: [real[f"{prefix}.{e}.{word}.weight"] for e in range(len(own))] if path.endswith("experts") else []
            for part, word in words_of.items()
        }
        if name.endswith("experts.gate_up_proj"):
            pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
            own.copy_(torch.stack([torch.cat(pair) for pair in pairs]))
        elif name.endswith("experts.down_proj"):
            own.copy_(torch.stack(parts["down_proj"]))
        elif name in real:
            own.copy_(real[name])
    path = foreign.write(folder, words, {**tensors, **(more or {})}, shards=3, **twin.config.to_dict())
    return path, twin, count


def empty(twin: Any) -> Any:
    with torch.device("meta"):
        return type(twin)(twin.config)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_that_of_the_file(family: str, form: str, tmp_path: Path) -> None:
    folder, twin, count = written(tmp_path / "m", family, form)
    model = pyquant.load_quantized_(empty(twin), folder).eval()
    layers = [m for m in model.modules() if isinstance(m, QLinear)]
    banks = [m for m in model.modules() if isinstance(m, pyquant.QExperts)]
    assert len(layers) + sum(bank.num_experts for bank in banks) == count, "gate and up are one layer"
    assert any(isinstance(m, Reordered) for m in model.modules()) == (form == "GPTQ, desc_act")
    for name, bank in expert_banks.experts_of(model).items():
        float_bank: Any = twin.get_submodule(name)
        for e, (up, down) in enumerate(bank.experts()):  # type: ignore[operator]
            for layer, real in ((up, float_bank.gate_up_proj[e]), (down, float_bank.down_proj[e])):
                shown = layer.weight if isinstance(layer, Reordered) else layer.to_float(torch.float32).weight
                accept.t1(shown.detach() + 0.0, real.detach() + 0.0)
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        got = pyquant.load_quantized_(empty(twin), folder, activations="float").eval()(input_ids=ids).logits
        want = twin(input_ids=ids).logits
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_what_was_read_is_saved_and_read_again(tmp_path: Path) -> None:
    for form in ("W4A16", "GPTQ, desc_act"):
        folder, twin, _ = written(tmp_path / form, "Qwen3Moe", form)
        model = pyquant.load_quantized_(empty(twin), folder).eval()
        with pytest.warns(pyquant.QuantizationWarning):
            pyquant.save_pretrained(model, tmp_path / f"{form} saved")
        again = pyquant.load_pretrained(tmp_path / f"{form} saved", empty(twin)).eval()
        ids = torch.arange(12)[None]
        with torch.no_grad():
            accept.t1(again(input_ids=ids).logits, model(input_ids=ids).logits)


def test_banks_in_floating_point_are_parameters_again(tmp_path: Path) -> None:
    twin = expert_banks.model_of("Mixtral")
    tensors = {name: t.half() for name, t in in_files(twin, "Mixtral").items()}
    layer = "model.layers.0.self_attn.q_proj"
    parts, _ = w8a8(tensors.pop(f"{layer}.weight").float())
    folder = foreign.write(tmp_path / "m", FORMATS["W8A8Dynamic"][0], {**tensors, **foreign.of_layer(layer, parts)})
    model = pyquant.load_quantized_(empty(twin), folder)
    assert not any(isinstance(m, pyquant.QExperts) for m in model.modules())
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.1.mlp.experts.{name}"
        accept.t1(model.state_dict()[key], twin.state_dict()[key].half().float())


def test_an_expert_alone_may_stay_in_floating_point(tmp_path: Path) -> None:
    twin = expert_banks.model_of("Qwen3Moe")
    tensors = quantised_by(w8a8, twin, keep="experts.2.")
    folder = foreign.write(tmp_path / "m", FORMATS["W8A8Dynamic"][0], tensors)
    model = pyquant.load_quantized_(empty(twin), folder)
    bank: Any = model.get_submodule("model.layers.0.mlp.experts")
    kinds = [type(bank.expert(e)[0]).__name__ for e in range(4)]
    accept.t0(kinds, ["QLinear", "QLinear", "Linear", "QLinear"])
    accept.t1(bank.expert(2)[0].weight.detach(), twin.model.layers[0].mlp.experts.gate_up_proj[2].detach())


def test_a_router_of_codes_becomes_real_numbers(tmp_path: Path) -> None:
    """bitsandbytes takes every Linear, and the router was one before transformers 5."""
    twin, key = expert_banks.model_of("Qwen3Moe"), "model.layers.0.mlp.gate.weight"
    parts, real = bitsandbytes(twin.state_dict()[key])
    tensors = quantised_by(bitsandbytes, twin)
    del tensors[key]
    tensors |= foreign.of_layer(key.removesuffix(".weight"), parts)
    folder = foreign.write(tmp_path / "router", FORMATS["bitsandbytes"][0], tensors)
    accept.t1(pyquant.load_quantized_(empty(twin), folder).state_dict()[key], real)


def test_layers_that_the_model_itself_passes_over(tmp_path: Path) -> None:
    """DeepSeek-V3's files have a layer 61 for predicting further tokens, which its class does not build."""
    extra = foreign.of_layer("model.layers.61.mlp.experts.0.gate_proj", w8a8(torch.ones(16, 64))[0])
    folder, twin, _ = written(
        tmp_path / "m", "DeepseekV3", "W8A8Dynamic", {**extra, "model.layers.61.enorm.weight": torch.ones(64)}
    )
    pyquant.load_quantized_(empty(twin), folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"model.layers.1.mlp.experts.3.up_proj.input_scale": torch.tensor([0.5])}), "input scales"),
        (lambda t: [t.pop(k) for k in list(t) if ".experts.3.up_proj." in k], "half of"),
        (lambda t: [t.pop(k) for k in list(t) if ".experts.3.down_proj." in k], "missing in the checkpoint"),
    ],
)
def test_what_no_bank_can_hold_is_refused(change: Callable[[Tensors], object], message: str, tmp_path: Path) -> None:
    twin = expert_banks.model_of("Qwen3Moe")
    tensors = quantised_by(per_tensor, twin)
    change(tensors)
    folder, model = foreign.write(tmp_path / "m", FORMATS["W8A8"][0], tensors), empty(twin)
    before = str(model)
    with pytest.raises(CheckpointError, match=message):
        pyquant.load_quantized_(model, folder)
    assert str(model) == before


@pytest.mark.parametrize(
    ("family", "architecture"), [("Mixtral", "llama"), ("Qwen2Moe", "qwen2moe"), ("Qwen3Moe", "qwen3moe")]
)
def test_gguf(family: str, architecture: str, tmp_path: Path) -> None:
    """Tensors [E, N, K] of blocks; the router, and of Qwen2-MoE the shared expert, beside them."""
    twin = expert_banks.model_of(family)
    config = twin.config
    own = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }
    outside = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, tensor in twin.state_dict().items():
        path, _, kind = name.rpartition(".")
        if path in outside:
            tensors[f"{outside[path]}.weight"] = gguf_file.plain(tensor)
            continue
        _, _, block, inside = path.split(".", 3)
        if inside == "mlp.experts":
            matrices = [tensor] if kind == "down_proj" else tensor.chunk(2, 1)
            names = ["ffn_down_exps"] if kind == "down_proj" else ["ffn_gate_exps", "ffn_up_exps"]
            for at, (word, matrix) in enumerate(zip(names, matrices, strict=True)):
                e, n, k = matrix.shape
                if k % 32:  # no blocks: such matrices stay in floating point
                    tensors[f"blk.{block}.{word}.weight"] = gguf_file.plain(matrix)
                    continue
                form, _, data = gguf_file.blocks("Q8_0", e * n, k, at)
                matrix.copy_(gguf_file.numbers(form, (e * n, k), data).reshape(e, n, k))
                tensors[f"blk.{block}.{word}.weight"] = form, (e, n, k), data
            continue
        word = f"blk.{block}.{own[inside]}.{kind}"
        if inside in heads and architecture == "llama":
            rows = tensor.reshape(heads[inside], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            tensors[word] = gguf_file.plain(rows)
        else:
            tensors[word] = gguf_file.plain(tensor.reshape(-1) if inside == "mlp.shared_expert_gate" else tensor)
    words = {
        "general.architecture": architecture,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
    }
    path = gguf_file.write(tmp_path / "m.gguf", words, tensors)
    model = pyquant.load_quantized_(empty(twin), path).eval()
    assert len(expert_banks.experts_of(model)) == 2
    assert all(isinstance(bank, pyquant.QExperts) for bank in expert_banks.experts_of(model).values())
    ids = torch.arange(20)[None]
    with torch.no_grad():
        want = twin(input_ids=ids).logits
        assert (model(input_ids=ids).logits - want).abs().max() < 1e-4 * want.abs().max()
