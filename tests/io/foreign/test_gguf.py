"""GGUF files: the weights of the layouts, to the bit, the owner's package, llama's rows, and damaged headers."""

from __future__ import annotations

import importlib.util
import random
import struct
from pathlib import Path
from typing import Any

import accept
import gguf_file
import problems
import pytest
import torch
from torch import nn

import pyquant
from pyquant.errors import CheckpointError
from pyquant.io.foreign.gguf import Source
from pyquant.nn.qlinear import QLinear

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)
N, K = 6, 512
WORDS = {"general.architecture": "toy", "general.name": "a", "tokens": ["a", "b"], "sizes": [1, 2], "eps": 1e-5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def toy(tmp_path: Path, kind: str, seed: int = 1) -> tuple[Path, torch.Tensor]:
    block = gguf_file.blocks(kind, N, K, seed)
    tensors = {"fc.weight": block, "fc.bias": gguf_file.plain(torch.arange(N).float())}
    return gguf_file.write(tmp_path / "m.gguf", WORDS, tensors), gguf_file.numbers(*block)


def weight(layer: Any) -> torch.Tensor:
    return layer.to_float(torch.float32).weight.detach() + 0.0  # no zero with a sign


@pytest.mark.parametrize(("kind", "bits", "group"), [("Q8_0", 8, 32), ("Q4_0", 4, 32), ("Q6_K", 8, 16)])
def test_blocks(kind: str, bits: int, group: int, tmp_path: Path) -> None:
    path, want = toy(tmp_path, kind)
    layer = pyquant.load_quantized_(Net(), path).fc
    assert isinstance(layer, QLinear)
    accept.t1(weight(layer), want + 0.0)
    accept.t0((layer.scheme.weights.bits, layer.scheme.weights.group_size), (bits, group))
    accept.t0(layer.scheme.weights.symmetric, kind != "Q4_0")
    accept.t1(layer.bias.detach(), torch.arange(N).float())


@needs_gguf
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_blocks_of_the_owners_package(kind: str, tmp_path: Path) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType as Types
    from gguf import GGUFWriter, dequantize, quantize

    path, _ = toy(tmp_path, kind)
    real = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).numpy()
    if kind == "Q6_K":  # the package has no quantiser of it
        data = np.frombuffer(gguf_file.blocks(kind, N, K, 3)[2], dtype=np.uint8).reshape(N, -1)
    else:
        data = quantize(real, Types[kind])
    writer = GGUFWriter(path, "toy")
    writer.add_tensor("fc.weight", data, raw_dtype=Types[kind])
    writer.add_tensor("fc.bias", np.zeros(N, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    theirs = torch.from_numpy(dequantize(data, Types[kind])).reshape(N, K)
    accept.t1(weight(pyquant.load_quantized_(Net(), path).fc), theirs + 0.0)


def test_activations_as_codes(tmp_path: Path) -> None:
    path, want = toy(tmp_path, "Q8_0")
    layer = pyquant.load_quantized_(Net(), path, activations="int8").fc
    assert layer.scheme.is_integer
    accept.t1(weight(layer), want + 0.0)
    with pytest.raises(CheckpointError, match="activations='float'"):
        pyquant.load_quantized_(Net(), toy(tmp_path, "Q4_0")[0], activations="int8")


def sorted_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """As llama.cpp's converter sorts the rows of q and k."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@needs_transformers
def test_a_llama_has_the_names_and_rows_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    names |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    twin, tensors = LlamaForCausalLM(config), {"rope_freqs.weight": gguf_file.plain(torch.ones(8))}
    state = twin.state_dict()
    for i, name in enumerate(state):
        parts = name.split(".")
        if name == "lm_head.weight":
            continue
        if parts[1] != "layers":
            own = {"embed_tokens": "token_embd.weight", "norm": "output_norm.weight"}[parts[1]]
        else:
            own = f"blk.{parts[2]}.{names[parts[-2]]}.weight"
        if state[name].dim() == 1:
            tensors[own] = gguf_file.plain(state[name])
            continue
        tensors[own] = gguf_file.blocks("Q8_0", *state[name].shape, i)
        real = gguf_file.numbers(*tensors[own])
        heads = {"q_proj": 4, "k_proj": 2}.get(parts[-2])
        if heads:  # the file holds sorted rows: those of the model are the ones that sorting gives
            unsorted = torch.empty_like(real)
            unsorted[sorted_rows(torch.arange(len(real)).reshape(-1, 1), heads).flatten()] = real
            real = unsorted
        state[name].copy_(real)
    words = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2}
    path = gguf_file.write(tmp_path / "m.gguf", words, tensors)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    pyquant.load_quantized_(model, path).eval()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QLinear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        accept.t1(weight(layer), state[f"{name}.weight"] + 0.0)
    ids = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(model(input_ids=ids).logits, twin.eval()(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_types_without_an_exact_map_are_named(tmp_path: Path) -> None:
    for kind in ("Q4_1", "Q4_K"):
        tensors = {"fc.weight": (kind, (N, K), b"\0" * 4096)}
        path = gguf_file.write(tmp_path / "m.gguf", WORDS, tensors)
        with pytest.raises(CheckpointError, match=f"tensor 'fc.weight': {kind}, offsets that are real numbers"):
            pyquant.load_quantized_(Net(), path)


def test_damaged_headers(tmp_path: Path) -> None:
    path, _ = toy(tmp_path, "Q8_0")
    data = path.read_bytes()
    cases = {
        b"GGML" + data[4:]: "no GGUF file",
        b"": "no GGUF file",
        data[:4] + struct.pack("<I", 1) + data[8:]: "version 1; allowed: 2 or 3",
        data[:8] + struct.pack("<Q", 2**60) + data[16:]: "tensors; allowed: at most",
        data[:16] + struct.pack("<Q", 2**60) + data[24:]: "words; allowed: at most",
        data[:24] + struct.pack("<Q", 2**60) + data[32:]: "bytes of text; allowed: at most",
        data[:-500]: "tensor 'fc",
        data[:100]: "a header beyond",
    }
    for bad, told in cases.items():
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=told):
            pyquant.load_quantized_(Net(), path)


def test_tensors_that_lie_wrong(tmp_path: Path) -> None:
    good = gguf_file.blocks("Q8_0", N, K, 1)
    bias = gguf_file.plain(torch.zeros(N))
    for tensors, told in (
        ({"fc.weight": ("Q8_0", (N, 33), good[2]), "fc.bias": bias}, "rows of 33; allowed: multiples of 32"),
        ({"../x": good, "fc.bias": bias}, "allowed: 4, 1 to 256 printable"),
        ({"fc.weight": ("Q8_0", (2**40, K), good[2])}, "tensor 'fc.weight': bytes"),
        ({"fc.weight": ("Q8_0", (N * 2, K), good[2]), "fc.bias": bias}, "allowed"),
        ({"fc.weight": good}, "missing in the checkpoint fc.bias|the model has a bias, the checkpoint has none"),
        ({"fc.weight": good, "fc.bias": bias, "more": bias}, "unexpected more"),
    ):
        path = gguf_file.write(tmp_path / "m.gguf", WORDS, tensors)
        with pytest.raises(CheckpointError, match=told):
            pyquant.load_quantized_(Net(), path)


def test_random_damage_never_gives_another_error(tmp_path: Path) -> None:
    path, _ = toy(tmp_path, "Q4_0")
    data, rng, refusals = path.read_bytes(), random.Random(problems.BASE_SEED), 0
    for _ in range(200):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(330)] = rng.randrange(256)
        path.write_bytes(bytes(bad))
        try:
            pyquant.load_quantized_(Net(), path)
        except CheckpointError:
            refusals += 1
    assert refusals > 100


def llama(tmp_path: Path, heads_kv: Any) -> Any:
    """q and k of two layers, rows as llama.cpp's converter sorts them; -> the model that was read, and the weights."""
    q, k = torch.randn(16, 32), torch.randn(8, 32)  # 4 heads of 4 rows; 2 of k
    sort = lambda w, heads: w.reshape(heads, 2, -1, w.shape[1]).transpose(1, 2).reshape(w.shape)  # noqa: E731
    words = {"general.architecture": "llama", "llama.attention.head_count": 4}
    words |= {} if heads_kv is None else {"llama.attention.head_count_kv": heads_kv}
    tensors = {f"blk.{i}.attn_q.weight": gguf_file.plain(sort(q, 4)) for i in range(2)}
    tensors |= {f"blk.{i}.attn_k.weight": gguf_file.plain(sort(k, 2)) for i in range(2)}
    source = Source(gguf_file.write(tmp_path / "m.gguf", words, tensors))
    read = [source.read(f"model.layers.{i}.self_attn.{n}_proj.weight") for i in range(2) for n in "qk"]
    return all(torch.equal(a, b) for a, b in zip(read, (q, k, q, k), strict=True))


@pytest.mark.parametrize("heads", [2, [2, 2]])
def test_heads_are_a_number_or_one_for_each_layer(heads: Any, tmp_path: Path) -> None:
    assert llama(tmp_path, heads)


@pytest.mark.parametrize("heads", [[2], [2] * 5000, "2"])
def test_heads_that_say_nothing_of_a_layer(heads: Any, tmp_path: Path) -> None:
    """The default is the number of heads of q, which would be silently wrong."""
    with pytest.raises(CheckpointError, match="heads"):
        llama(tmp_path, heads)


@pytest.mark.parametrize("name", ["granite", "gemma", "gemma3", "olmo", "falcon"])
def test_what_is_stored_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    path = gguf_file.write(tmp_path / "m.gguf", WORDS | {"general.architecture": name}, toy_tensors())
    with pytest.raises(CheckpointError, match=f"architecture '{name}', of which llama.cpp stores"):
        pyquant.load_quantized_(Net(), path)


def test_what_nobody_has_looked_at_is_warned_of(tmp_path: Path) -> None:
    path = gguf_file.write(tmp_path / "m.gguf", WORDS, toy_tensors())
    with pytest.warns(pyquant.QuantizationWarning, match="architecture 'toy'"):
        pyquant.load_quantized_(Net(), path)


def toy_tensors() -> dict[str, Any]:
    return {"fc.weight": gguf_file.blocks("Q8_0", N, K, 1), "fc.bias": gguf_file.plain(torch.arange(N).float())}


def test_a_part_of_a_split_file_and_other_byte_orders(tmp_path: Path) -> None:
    path = gguf_file.write(tmp_path / "m.gguf", WORDS | {"split.count": 3}, toy_tensors())
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        pyquant.load_quantized_(Net(), path)
    data = bytearray(gguf_file.write(tmp_path / "m.gguf", WORDS, toy_tensors()).read_bytes())
    data[4:8] = struct.pack(">I", 3)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="big-endian"):
        pyquant.load_quantized_(Net(), path)


@pytest.mark.parametrize("name", ["M.GGUF", "0123abcd"])
def test_a_file_of_any_name(name: str, tmp_path: Path) -> None:
    """A hub's cache holds blobs."""
    path, want = toy(tmp_path, "Q8_0")
    accept.t1(weight(pyquant.load_quantized_(Net(), path.rename(tmp_path / name)).fc), want + 0.0)
