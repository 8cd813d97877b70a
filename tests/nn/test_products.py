"""What a model multiplies by in floating point is seen in one run, whatever class or variable holds it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_table import QUICK
from fresh import python
from torch import Tensor, nn
from torch.nn import functional

import pyquant
from pyquant import W8A8Dynamic
from pyquant.nn.matrices import is_matrix


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


class Holder(nn.Module):
    """One parameter `w` in a class that nobody knows, and one function that reads it."""

    def __init__(self, w: nn.Parameter, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.read = w, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x, self.w)


IDS = torch.tensor([1, 0, 2, 1])
MULTIPLIED: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "matmul": ((8, 6), lambda x, w: x @ w),
    "linear": ((6, 8), functional.linear),
    "from the left": ((5, 4), lambda x, w: w @ x),
    "addmm": ((8, 6), lambda x, w: torch.addmm(x[:, :6], x, w)),
    "einsum": ((8, 6), lambda x, w: torch.einsum("bk,kn->bn", x, w)),
    "tensordot": ((8, 6), lambda x, w: torch.tensordot(x, w, 1)),
    "batches": ((4, 8, 6), lambda x, w: torch.bmm(x[:, None], w)),
    "baddbmm": ((4, 8, 6), lambda x, w: torch.baddbmm(torch.zeros(4, 1, 6), x[:, None], w)),
    "conv1d": ((6, 8, 1), lambda x, w: functional.conv1d(x[..., None], w)),
    "in another type": ((8, 6), lambda x, w: x.bfloat16() @ w.bfloat16()),
    "autocast": ((8, 6), lambda x, w: torch.autocast("cpu", torch.bfloat16)(torch.matmul)(x, w)),
    "a slice of it": ((9, 12), lambda x, w: x @ w[1:, ::2].contiguous()),
    "joined with another": ((8, 6), lambda x, w: x @ torch.cat([w, torch.ones(8, 2)], 1)),
    "scaled before": ((8, 6), lambda x, w: x @ (w / w.norm() * 3.0)),
    "behind .data": ((8, 6), lambda x, w: x @ w.data.t().contiguous().t()),
    "chosen experts": ((3, 8, 6), lambda x, w: torch.bmm(x[:, None], w[IDS + (x[:, 0] > 9)])),
    "one expert a number": ((3, 8, 6), lambda x, w: x @ w[int(x.abs().sum() > 0)]),
    "permuted rows": ((8, 6), lambda x, w: x @ w[torch.arange(7, -1, -1)]),
    "distances": ((6, 8), torch.cdist),
    "a key of attention": ((4, 8), lambda x, w: functional.scaled_dot_product_attention(x[None], w[None], x[None])),
    "an LSTM's function": ((24, 8), lambda x, w: torch.lstm_cell(x, [x[:, :6], x[:, :6]], w, x.new_zeros(24, 6))[0]),
}
OTHERWISE: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor], str]] = {
    "position": ((1, 4, 8), lambda x, w: x + w, "added"),
    "position at places": ((9, 8), lambda x, w: x + w[torch.arange(4)], "added"),
    "look-up": ((9, 8), lambda x, w: functional.embedding(IDS, w) @ x.T, "added"),
    "look-up by index": ((9, 8), lambda x, w: w[IDS + (x[:, 0] > 9)] @ x.T, "added"),
    "mask of attention": (
        (4, 4),
        lambda x, w: functional.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=2 * w),
        "added",
    ),
    "mask, unfused": (
        (4, 4),
        lambda x, w: functional.scaled_dot_product_attention(*[x[None]] * 3, attn_mask=w),
        "added",
    ),
    "bias of a product": ((4, 6), lambda x, w: torch.addmm(w, x, x[:, :6].new_ones(8, 6)), "added"),
    "decay": ((4, 8), lambda x, w: x * -w.exp(), "other"),
    "nothing": ((4, 8), lambda x, w: x, "not reached"),
}


@pytest.mark.parametrize("how", MULTIPLIED)
def test_a_parameter_of_a_plain_module_is_named(how: str) -> None:
    shape, read = MULTIPLIED[how]
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict({"deep": Holder(matrix(*shape), read)})["deep"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        pyquant.quantize_(model, W8A8Dynamic())
    (found,) = pyquant.trace_floats(model, torch.randn(4, 8))
    assert (found.name, found.use, found.shape) == ("1.w", "multiplied", shape)
    assert found.ops
    assert "Holder" in found.reason
    assert found.share == pytest.approx(found.share) == pyquant.quantization_report(model)[-1].share


@pytest.mark.parametrize("how", OTHERWISE)
def test_what_is_not_multiplied_is_told_apart(how: str) -> None:
    shape, read, use = OTHERWISE[how]
    (found,) = pyquant.trace_floats(Holder(matrix(*shape), read), torch.randn(4, 8))
    assert found.use == use
    assert bool(found.ops) == (use != "not reached")


def test_tensors_that_no_module_holds_and_buffers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.listed = [torch.randn(8, 8)]
            self.register_buffer("fixed", torch.randn(8, 8), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.listed[0] @ self.fixed

    found = {m.name: m for m in pyquant.trace_floats(nn.ModuleList([Net()])[0], torch.randn(4, 8))}
    assert set(found) == {"[8, 8] in Net", "fixed"}
    assert all(m.use == "multiplied" for m in found.values())
    assert "no parameter" in found["[8, 8] in Net"].reason


def test_another_name_of_the_same_memory_is_the_parameter() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = matrix(8, 8)
            self.alias = [self.w.data]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.alias[0]

    (found,) = pyquant.trace_floats(Net(), torch.randn(4, 8))
    assert (found.name, found.use) == ("w", "multiplied")


def test_a_quantised_weight_that_its_parent_multiplies_by_is_no_integer_product() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other = nn.Linear(8, 6), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x.to(self.other.weight.dtype), self.fc.weight) + self.other(x)

    (found,) = pyquant.trace_floats(pyquant.quantize_(Net(), W8A8Dynamic()), torch.randn(4, 8))
    assert (found.name, found.use, found.ops) == ("fc.weight", "multiplied", ("mm",))
    assert "dequantised" in found.reason


def test_nothing_is_left_of_a_run() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.BatchNorm1d(8)).train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert [m.name for m in pyquant.trace_floats(model, torch.randn(4, 8))] == ["0.weight"]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError):
        pyquant.trace_floats(model, torch.randn(4, 9))
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (Holder(matrix(8, 6), torch.matmul), "a Holder does not say what it takes"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(7, 2)), "did not take those made for it"),
        (nn.Sequential(), "does not say"),
    ],
)
def test_without_an_example_it_says_so(model: nn.Module, got: str) -> None:
    with pytest.raises(pyquant.ArgumentError, match=f"example_inputs.*{got}"):
        pyquant.trace_floats(model)


@pytest.mark.parametrize("first", [nn.Linear(8, 4), nn.Conv2d(3, 4, 3), nn.Embedding(9, 4)])
def test_an_example_is_made_for_a_sequence(first: nn.Module) -> None:
    model = nn.Sequential(nn.Sequential(first), nn.ReLU())
    (found,) = pyquant.trace_floats(model)
    assert (found.name, found.use == "multiplied") == ("0.0.weight", not isinstance(first, nn.Embedding))
    assert [m.use for m in pyquant.trace_floats(model.half())] == [found.use]


def deepseek() -> nn.Module:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=120,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def _told(model: nn.Module, config: Any = None) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyquant.quantize_(model, config or W8A8Dynamic())
        return {m.name: m.use for m in pyquant.trace_floats(model)}


def test_other_peoples_models_are_run_on_inputs_made_for_them() -> None:
    pytest.importorskip("transformers")
    for name in ("T5", "Whisper", "ViT", "CLIP"):
        model, _ = QUICK[name]()
        held = {n for n, p in model.named_parameters() if is_matrix(p)}
        told = _told(model)
        left = {n for n, p in model.named_parameters() if is_matrix(p)}
        assert set(told) == left < held, name
        assert all(use == "added" for n, use in told.items() if "conv" not in n), (name, told)
    told = _told(QUICK["Mamba"]()[0])
    assert {told[f"layers.{i}.mixer.dt_proj.weight"] for i in (0, 1)} == {"multiplied"}  # its code reads .weight
    assert {told[f"layers.{i}.mixer.A_log"] for i in (0, 1)} == {"other"}


def test_experts_and_their_routers_are_multiplied() -> None:
    pytest.importorskip("transformers")
    for model, prefix in ((QUICK["Mixtral"]()[0], "layers.0.mlp."), (deepseek(), "model.layers.1.mlp.")):
        told = _told(model, {"*.experts": None, "_default": W8A8Dynamic()})
        for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
            assert told[prefix + name] == "multiplied", told
    told = _told(QUICK["Mixtral"]()[0])
    assert told["layers.0.mlp.gate.weight"] == "multiplied"
    assert not [name for name in told if "experts" in name]


PLAIN = """
import json, torch, pyquant
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.hidden = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 512))
    def forward(self, x):
        return self.fc(x) @ self.hidden
model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 16), Net()), pyquant.W8A8Dynamic())
print(json.dumps([(m.name, m.use, m.share > 0.9) for m in pyquant.trace_floats(model)]))
"""


def test_in_a_fresh_process(tmp_path: Path) -> None:
    assert python(PLAIN, tmp_path) == [["1.hidden", "multiplied", True]]


# ---- what quantize_ says of matrices that may be added as well as multiplied


def vision(positions: int, inner: int = 64) -> nn.Module:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(1, positions, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.position[:, : x.shape[1]]

    return nn.Sequential(Positions(), nn.Linear(16, inner), nn.Linear(inner, 16), nn.Conv1d(8, 8, 1))


def _warning_of(model: nn.Module, **options: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyquant.quantize_(model, W8A8Dynamic(), **options)
    return " ".join(str(w.message) for w in caught if "bytes stay" in str(w.message))


def test_a_small_table_that_may_be_added_is_no_noise_and_a_large_one_is_told() -> None:
    model = vision(2)
    assert "Conv1d" in (told := _warning_of(model))
    assert "Positions" not in told
    record = next(r for r in pyquant.quantization_report(model) if r.name == "0")
    assert not record.is_certain
    assert "holds them and may multiply by them itself (position [1, 2, 16])" in record.reason
    assert "Positions" in _warning_of(vision(64))


def test_a_run_clears_what_is_only_added() -> None:
    model, x = vision(512), torch.randn(2, 8, 16)
    assert "Positions" not in _warning_of(model, check_speed=x)
    assert "as a run showed" in next(r.reason for r in pyquant.quantization_report(model) if r.name == "0")
    hidden = nn.Sequential(nn.Linear(16, 16), Holder(matrix(1, 16, 64), torch.matmul))
    assert "1 (Holder" in _warning_of(hidden, check_speed=x)
