"""Improvers through banks of experts: every format, experts that some batches or all of them leave out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import expert_banks
import pytest
import torch
from expert_banks import Bank, model_of, register_banks, routing
from torch import Tensor, nn

import pyquant
from pyquant.nn import expert_rules
from pyquant.ptq.improve.smooth_rules import matrices_of
from pyquant.simulate.calibrate import calibrate_

SCHEMES = [
    "W8A16",
    "W4A16(group_size=16)",
    "W4A16(group_size=16, symmetric=False)",
    "W8A16(group_size=16, symmetric=False)",
    "W4A8TwoLevelDynamic(group_size=16)",
    "W4A8Dynamic(group_size=16)",
    "W8A8",
]
FAMILIES = ("Mixtral", "Qwen3Moe")
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "vocab_size": 48,
    "moe_intermediate_size": 16,
}
QUICK: dict[str, Any] = {"num_batches": 3}


@pytest.fixture(autouse=True)
def banks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    for name, size in _SIZES.items():
        monkeypatch.setitem(expert_banks.SIZES, name, size)
    register_banks()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        yield


def small(family: str) -> Any:
    """A model of a family with one layer, in which every expert gets tokens."""
    pytest.importorskip("transformers")
    expert_banks.SIZES.pop("moe_intermediate_size", None) if family == "Mixtral" else None
    return model_of(family)


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(3, 48, (4, 24), generator=draw)} for _ in range(count)]


def simulated(model: nn.Module, scheme: str, data: list[Any], **how: Any) -> nn.Module:
    head: dict[str, Any] = {"lm_head": None} if hasattr(model, "lm_head") else {}
    pyquant.insert_fake_quantize_(pyquant.expose_linears_(model), {**head, "_default": scheme})
    if scheme == "W8A8":
        calibrate_(model, data, len(data), **how)
    return model


def expert_layers(names: Any) -> set[str]:
    return {name for name in names if ".experts." in name}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gptq_goes_through_experts_in_every_format(family: str, scheme: str) -> None:
    model, data = small(family), batches()
    experts = next(iter(expert_banks.experts_of(model).values())).num_experts
    simulated(model, scheme, data)
    found = pyquant.gptq_(model, data, act_order=False, correct_targets=False, **QUICK)
    assert len(expert_layers(found)) == 2 * experts
    assert all(one.error_after <= one.error_before for one in found.values() if one.accepted)
    assert sum(found[name].accepted for name in expert_layers(found)) >= experts // 2
    with torch.no_grad():
        want = model(**data[0]).logits
        chosen = {name: layer.weight.clone() for name, layer in model.named_modules() if name in expert_layers(found)}
        pyquant.convert_(model)
        for name, weight in chosen.items():
            layer = model.get_submodule(name)
            assert torch.equal(layer.to_float().weight, weight) == found[name].accepted or found[name].accepted is False
        got = model(**data[0]).logits
    assert float((got - want).norm() / want.norm()) < 0.3  # another route for a token or two, at most


@pytest.mark.parametrize(
    "scheme", ["W8A16", "W4A16(group_size=16, symmetric=False)", "W4A8TwoLevelDynamic(group_size=16)", "W8A8"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_learned_rounding_and_bias_correction_go_through_experts(family: str, scheme: str) -> None:
    model, data = small(family), batches()
    experts = next(iter(expert_banks.experts_of(model).values())).num_experts
    simulated(model, scheme, data)
    learned = pyquant.learn_rounding_(model, data, steps=4, **QUICK)
    assert len(expert_layers(learned)) == 2 * experts
    assert all(one.error_after <= one.error_before for one in learned.values() if one.accepted)
    corrected = pyquant.bias_correction_(model, data, **QUICK)
    assert len(expert_layers(corrected)) == 2 * experts
    with torch.no_grad():
        want = model(**data[0]).logits
        got = pyquant.convert_(model)(**data[0]).logits
    assert float((got - want).norm() / want.norm()) < 0.3


# ---- experts that data leaves out


class Routed(nn.Module):
    """A bank whose routing comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(32, 32), Bank(5, 32, 16), nn.Linear(32, 8)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x), ids, weights))  # type: ignore[no-any-return]


def routed(first: list[int], others: list[int], count: int = 4) -> list[Any]:
    """Batches whose tokens go to these experts: those of the first batch, and of the others."""
    torch.manual_seed(8)
    found = []
    for i in range(count):
        _, weights = routing(40, 5, 2)
        open_to = torch.tensor(others if i else first)
        found.append((torch.randn(40, 32), open_to[torch.randint(len(open_to), (40, 2))], weights))
    return found


IMPROVERS: dict[str, Any] = {
    "gptq": lambda *args, **how: pyquant.gptq_(*args, act_order=False, **how),
    "learn_rounding": lambda *args, **how: pyquant.learn_rounding_(*args, steps=3, **how),
    "bias_correction": pyquant.bias_correction_,
}


@pytest.mark.parametrize("improver", list(IMPROVERS))
def test_an_expert_that_only_later_batches_reach_is_improved(improver: str) -> None:
    torch.manual_seed(1)
    model, data = Routed().eval(), routed([0, 1, 3, 4], [0, 1, 2, 4])
    simulated(model, "W4A16(group_size=16)", data)
    found = list(IMPROVERS[improver](model, data, 4, batch_to_inputs=tuple))
    every = [f"experts.{e}.{name}" for name in ("gate_up_proj", "down_proj") for e in range(5)]
    assert set(found) == {"first", *every, "last"}
    assert found.index("first") < found.index("experts.2.gate_up_proj") < found.index("experts.2.down_proj")
    assert found.index("experts.2.down_proj") < found.index("last")


@pytest.mark.parametrize("improver", list(IMPROVERS))
def test_experts_that_no_batch_reaches_are_named_and_stay(improver: str) -> None:
    torch.manual_seed(1)
    model, data = Routed().eval(), routed([0, 1], [0, 1, 3])
    scheme = pyquant.W4A16(group_size=16)
    before = [[layer.weight.clone() for layer in pair] for pair in pyquant.expose_linears_(model).experts.experts()]
    simulated(model, "W4A16(group_size=16)", data)
    said = r"2 of 5 experts of experts saw no token of the data \(2, 4\): their weights keep their nearest codes"
    with pytest.warns(pyquant.QuantizationWarning, match=said):
        found = IMPROVERS[improver](model, data, 4, batch_to_inputs=tuple)
    assert not any(f"experts.{e}." in name for e in (2, 4) for name in found)
    pyquant.convert_(model)
    for e, weights in enumerate(before):
        for layer, weight in zip(model.experts.expert(e), weights, strict=True):
            linear = nn.Linear(*reversed(weight.shape), bias=False)
            linear.weight.data = weight
            nearest = pyquant.QLinear.from_float(linear, scheme)
            assert torch.equal(layer.codes, nearest.codes) or e not in (2, 4)
            if e in (2, 4):
                assert layer.bias is None
    notes = {r.name: r.reason for r in pyquant.quantization_report(model)}
    for name, reason in notes.items():
        assert ("saw no token of the data" in reason) == (".2." in name or ".4." in name), name


def test_what_calibration_has_named_is_not_named_twice() -> None:
    torch.manual_seed(1)
    model, data = Routed().eval(), routed([0, 1], [0, 1, 3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        simulated(model, "W8A8", data, batch_to_inputs=tuple)
        pyquant.bias_correction_(model, data, 4, batch_to_inputs=tuple)
    told = [str(w.message) for w in caught if "saw no token" in str(w.message)]
    assert len(told) == 1
    assert "calibration data (2, 4)" in told[0]


def test_bias_correction_compares_no_outputs_that_are_not_there() -> None:
    """Of experts that rounding takes all tokens from, or gives the first ones to: their biases stay what they were."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Bank(3, 32, 16)

        def forward(self, x: Tensor) -> Tensor:
            is_rounded = self.experts.expert(0)[0].weight_fake_quant.mode == "quantize"
            ids = torch.tensor([[2, int(is_rounded)]]).repeat(len(x), 1)
            return self.experts(x, ids, torch.ones(len(x), 2))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model: Any = simulated(Switch().eval(), "W4A16(group_size=16)", [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pyquant.bias_correction_(model, [torch.randn(8, 32) for _ in range(2)], 2)
    assert found["experts.2.down_proj"] > 0
    assert model.experts.expert(2)[1].bias is not None
    for e in (0, 1):
        assert all(layer.bias is None for layer in model.experts.expert(e))


# ---- factors between a norm and the experts that read it


def spread(model: Any) -> Any:
    """Channels of the norms in front of experts that are far larger than others, which their readers make up for."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("post_attention_layernorm"):
                module.weight[[3, 17]] *= 64
            elif name.endswith((".experts", ".mlp.gate")):
                for matrix in matrices_of(module):
                    matrix[..., [3, 17]] /= 64
    return model


def smoothed_families(family: str) -> tuple[Any, list[dict[str, Tensor]]]:
    for name in ("moe_intermediate_size",):
        if family == "Mixtral":
            expert_banks.SIZES.pop(name, None)
    return spread(small(family)), batches()


@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "Qwen2Moe"])
def test_smoothing_through_experts_keeps_every_bit_of_the_float_model(family: str, exposed: bool) -> None:
    model, data = smoothed_families(family)
    if exposed:
        pyquant.expose_linears_(model)
    with torch.no_grad():
        want = [model(**batch).logits for batch in data]
        norm = next(m for n, m in model.named_modules() if n.endswith("post_attention_layernorm"))
        before = norm.weight.clone()
        found = pyquant.smooth_(model, data, 2)
        assert any(name.endswith("post_attention_layernorm") and size > 4 for name, size in found.items())
        factors = before / norm.weight
        assert torch.equal(factors.frexp()[0], torch.full_like(factors, 0.5))  # powers of two
        assert all(torch.equal(model(**batch).logits, y) for batch, y in zip(data, want, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothed_experts_lose_less_to_rounded_inputs(family: str) -> None:
    def error(improve: tuple[str, ...]) -> float:
        model, data = smoothed_families(family)
        name, block = next((n, m) for n, m in model.named_modules() if n.endswith(".mlp"))
        norm = model.get_submodule(name.removesuffix("mlp") + "post_attention_layernorm")
        draw = torch.Generator().manual_seed(2)
        x = torch.randn(1, 64, 32, generator=draw)
        with torch.no_grad():
            want = block(norm(x))
            layers = {"*.experts.*": "W8A8Dynamic", "_default": None}
            pyquant.quantize_(model, layers, data=data, improve=improve, check_speed=False)
            got = model.get_submodule(name)(norm(x))
        return float((got - want).norm() / want.norm())

    assert error(("smooth",)) < error(()) / 2


@pytest.mark.parametrize("exposed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_searched_scales_judge_experts_too(family: str, exposed: bool) -> None:
    model, data = smoothed_families(family)
    if exposed:
        pyquant.expose_linears_(model)
    with torch.no_grad():
        want = model(**data[0]).logits
        found = pyquant.search_scales_(model, {"lm_head": None, "_default": "W8A8Dynamic"}, data, 3, error="mse")
        assert torch.equal(model(**data[0]).logits, want)
    assert found.errors["smoothed"] < found.errors["none"] / 1.2
    assert found.chosen != "none"
    assert found.found["model.layers.0.post_attention_layernorm"] is not None
    assert any(isinstance(m, pyquant.QExperts) for m in model.modules()) == exposed


def test_a_pair_that_leaves_the_router_out_is_found_out_and_undone() -> None:
    model, data = smoothed_families("Mixtral")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    pair = ("model.layers.0.post_attention_layernorm", ["model.layers.0.mlp.experts"])
    with pytest.raises(pyquant.ArgumentError, match=r"moved by.*undone: model.layers.0.post_attention_layernorm"):
        pyquant.smooth_(model, data, 2, pairs=[pair])
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
