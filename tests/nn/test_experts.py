"""QExperts: banks of experts are right to the bit, in every family, and are layers to everything else."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_banks import FAMILIES, Bank, Biased, Interleaved, experts_of, model_of, one_by_one, register_banks, routing
from torch import Tensor, nn

import pyquant
from pyquant import QExperts, QLinear, ops
from pyquant.nn import expert_rows, expert_rules
from pyquant.nn.expert_kinds import by_kind, kind_of
from pyquant.nn.experts import bank_of
from pyquant.ops import fallback, one_launch, plan, tuned

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)
needs_library = pytest.mark.skipif(not pyquant.ops.native_available(), reason="the grouped product is compiled")
INTEGER = (pyquant.W8A8Dynamic(), pyquant.W4A8Dynamic(16))
SCHEMES = (*INTEGER, pyquant.W8A16(), pyquant.W4A16(32), pyquant.FP16())


@pytest.fixture(autouse=True)
def banks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    register_banks()


def sqnr(got: Tensor, want: Tensor) -> float:
    got, want = got.detach(), want.detach()
    return float(20 * torch.log10(want.double().norm() / (got.double() - want.double()).norm()))


def quantised(bank: nn.Module, scheme: Any = "W8A8Dynamic") -> QExperts:
    model = nn.ModuleDict({"experts": copy.deepcopy(bank), "other": nn.Linear(32, 32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(model, scheme, check_speed=False)
    found = model["experts"]
    assert isinstance(found, QExperts)
    return found


def dense(bank: Any, scheme: Any) -> list[tuple[QLinear, QLinear]]:
    """QLinears made of each matrix by itself."""
    names = (("gate_up_proj", "up_bias"), ("down_proj", "down_bias"))
    return [tuple(QLinear.from_float(bank.layer(e, *name), scheme) for name in names) for e in range(bank.num_experts)]  # type: ignore[misc]


# ---- right, to the bit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheme", INTEGER, ids=str)
@pytest.mark.parametrize("kind", [Bank, Biased, Interleaved])
def test_it_gives_the_bits_of_dense_layers(kind: Any, scheme: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    bank = kind(5, 32, 48).to(dtype)
    gate = bank.gate if kind is Interleaved else None
    experts, layers = quantised(bank, scheme), dense(bank, scheme)
    for tokens, slots in ((1, 1), (9, 2), (40, 3)):
        x, (ids, weights) = torch.randn(tokens, 32, dtype=dtype), routing(tokens, 5, slots)
        want = one_by_one(layers, bank.act_fn, x, ids, weights, gate)
        got = experts(x, ids, weights)
        assert torch.equal(got, want)
        assert got.dtype == dtype


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_formats_lose_what_dense_layers_lose(scheme: Any) -> None:
    torch.manual_seed(2)
    bank, x, (ids, weights) = Bank(6, 64, 96), torch.randn(64, 64), routing(64, 6, 2)
    want, layers = bank(x, ids, weights), dense(bank, scheme)
    got, beside = quantised(bank, scheme)(x, ids, weights), one_by_one(layers, bank.act_fn, x, ids, weights)
    assert abs(sqnr(got, want) - sqnr(beside, want)) < 0.2
    assert sqnr(got, want) > (12 if "W4" in str(scheme) else 30)


def watched(experts: QExperts, *case: Tensor) -> Tensor:
    """The bank with each of its layers called by itself, as hooks make it."""
    handles = [layer.register_forward_hook(lambda *_: None) for pair in experts.experts() for layer in pair]
    try:
        return experts(*case)  # type: ignore[no-any-return]
    finally:
        for handle in handles:
            handle.remove()


def calls_of(experts: QExperts, *case: Tensor) -> dict[str, int]:
    """How often a call of the bank calls ops that multiply."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        experts(*case)
    names = ("_grouped_linear", "_grouped_weight_only", "qlinear", "_weight_only", "float_linear")
    found = {event.key.removeprefix("pyquant::"): event.count for event in profile.key_averages()}
    return {name: found[name] for name in names if name in found}


WEIGHT_ONLY = [
    pyquant.W8A16(),
    pyquant.W8A16(16, symmetric=False),
    pyquant.W4A16(16),
    pyquant.W4A16(None, symmetric=False),
]
ROUTINGS = ((1, 1), (9, 2), (70, 3))  # tokens, experts of each


@needs_library
@pytest.mark.parametrize("scheme", WEIGHT_ONLY, ids=str)
@pytest.mark.parametrize("kind", [Bank, Biased, Interleaved])
def test_weight_only_experts_are_one_call_with_the_bits_of_single_ones(kind: Any, scheme: Any) -> None:
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        experts = quantised(kind(5, 32, 48).to(dtype), scheme)
        for tokens, slots in ROUTINGS:
            x, (ids, weights) = torch.randn(tokens, 32, dtype=dtype), routing(tokens, 5, slots)
            for case in ((x, ids, weights), (x, torch.full_like(ids, 3), weights), (x, ids - 1, weights)):
                assert torch.equal(experts(*case), watched(experts, *case))
    assert calls_of(experts, x, ids, weights) == {"_grouped_weight_only": 2}


@needs_library
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_autocast_narrows_the_rows_once_and_a_bank_stays_one_call(scheme: Any) -> None:
    torch.manual_seed(1)
    bank = Bank(5, 32, 64)
    experts, layers = quantised(bank, scheme).eval(), dense(bank, scheme)
    x, (ids, weights) = torch.randn(9, 32), routing(9, 5, 2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want = one_by_one(layers, bank.act_fn, x, ids, weights)
        assert torch.equal(experts(x, ids, weights), want)
        calls = calls_of(experts, x, ids, weights)
        torch._dynamo.reset()
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, ids, weights), want)
    assert calls == calls_of(experts, x.bfloat16(), ids, weights)
    assert want.dtype == torch.float32
    given = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        experts(given, ids, weights).sum().backward()
        gradient, given.grad = given.grad, None
        watched(experts, given, ids, weights).sum().backward()
    assert torch.equal(gradient, given.grad), "derivatives add up in the type of the rows"  # type: ignore[arg-type]


@needs_library
def test_autocast_of_banks_whose_rows_come_sorted() -> None:
    """As Llama-4's: no routing, as many rows for every expert."""
    expert_rules.register_experts(Sorts, expert_rules.ExpertsRule(is_routed=False))
    torch.manual_seed(1)
    experts, x = quantised(Sorts(4, 32, 64)).eval(), torch.randn(12, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(experts(x), watched(experts, x))
        assert calls_of(experts, x) == {"_grouped_linear": 2}


class Sorts(Bank):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        raise NotImplementedError


MIXED = {
    "experts.0.*": pyquant.W8A16(16),
    "experts.1.*": pyquant.W4A8Dynamic(16),
    "experts.2.gate_up_proj": None,
    "experts.2.down_proj": pyquant.FP16(),
    "experts.4.*": pyquant.W4A8Dynamic(16),
    "experts.5.down_proj": pyquant.W8A16(16),
    "_default": pyquant.W8A8Dynamic(),
}


@needs_library
@pytest.mark.parametrize("kind", [Bank, Biased])
def test_experts_of_several_schemes_are_a_call_a_scheme(kind: Any) -> None:
    torch.manual_seed(1)
    experts = quantised(kind(6, 32, 48), MIXED)
    for tokens, slots in ROUTINGS:
        x, (ids, weights) = torch.randn(tokens, 32), torch.rand(tokens, 6).topk(slots)[::-1]
        for case in ((x, ids, weights), (x, torch.full_like(ids, 3), weights), (x, ids - 1, weights)):
            assert torch.equal(experts(*case), watched(experts, *case))
    # experts 1 and 4 are together twice; 3 and 5, then 0 and 5, once; the others are the only ones of their scheme
    together = {"_grouped_linear": 3, "_grouped_weight_only": 1}
    assert calls_of(experts, x, ids, weights) == together | {"qlinear": 1, "_weight_only": 1, "float_linear": 1}


def test_kernel_info_says_how_many_calls_serve_a_bank_and_why() -> None:
    def told(scheme: Any, kind: Any = Bank) -> dict[str, Any]:
        return quantised(kind(6, 32, 48), scheme).kernel_info(40)

    for scheme in ("W8A8Dynamic", "W4A16(group_size=16)"):
        info = told(scheme)
        assert list(info) == ["gate_up_proj", "down_proj"]
        assert info["down_proj"].is_exact == (scheme == "W8A8Dynamic")
        if pyquant.ops.native_available():
            assert info["down_proj"].reason.startswith("one call for 6 experts"), info
        else:
            assert info["down_proj"].reason.startswith("a call for each of 6 experts"), info
    if pyquant.ops.native_available():
        mixed = told(MIXED)
        assert mixed["gate_up_proj"].reason.startswith(
            "3 calls, one for the experts of each of 3 schemes; 1 experts by"
        )
        assert "torch matmul" in mixed["gate_up_proj"].kernel
        assert told("FP16")["down_proj"].reason.startswith("6 experts by themselves")
    with pytest.raises(pyquant.ArgumentError, match="rows"):
        quantised(Bank(2, 32, 16)).kernel_info(-1)


def test_what_the_plan_says_of_a_launch_is_asked_again_after_other_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """pyquant tune, and tuned.activate by hand."""
    answers = {"kernel": None}
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: plan.Device(80, 108, 166912, 41943040)))
    monkeypatch.setattr(plan, "select", lambda *_, **__: plan.Selection(answers["kernel"], 1.0, (), False))
    layers, x = (
        [QLinear.from_float(nn.Linear(32, 16), pyquant.W8A8Dynamic()).eval() for _ in range(2)],
        torch.zeros(2, 32),
    )
    one_launch.forget()
    try:
        with torch.no_grad():
            assert not expert_rows.is_one_call(layers, x, 2)
            answers["kernel"] = "gemm_sm80_s8s8_experts"  # type: ignore[assignment]
            assert not expert_rows.is_one_call(layers, x, 2)  # remembered
            tuned.activate(tuned.load())
            assert expert_rows.is_one_call(layers, x, 2)
    finally:
        one_launch.forget()


def test_kinds_are_those_of_every_layer_by_itself() -> None:
    """by_kind looks at what kinds are made of instead: layers that differ in one thing each, in several orders."""
    w4 = pyquant.W4A16(16)
    schemes = (w4, pyquant.W4A16(16), pyquant.W4A16(16, symmetric=False), pyquant.W8A16(), pyquant.W8A8Dynamic())
    layers: list[nn.Module] = [QLinear.from_float(nn.Linear(32, 16), scheme) for scheme in schemes for _ in range(2)]
    layers += [QLinear.from_float(nn.Linear(32, 16, bias=False), scheme) for scheme in schemes]
    layers += [QLinear.from_float(nn.Linear(32, 16), scheme, activation="relu") for scheme in schemes]
    layers += [QLinear.from_float(nn.Linear(32, 16), w4, activation="clamp", clamp=(0, high)) for high in (1, 2)]
    layers += [QLinear.from_float(nn.Linear(32, 24), w4), QLinear.from_float(nn.Linear(16, 16), w4)]
    layers += [QLinear(32, 16, scheme=pyquant.W8A8()), QLinear.from_float(nn.Linear(32, 16), pyquant.FP16())]
    layers += [nn.Linear(32, 16), nn.Linear(32, 16, bias=False), nn.Identity()]
    watched, own = (QLinear.from_float(nn.Linear(32, 16), w4) for _ in range(2))
    watched.register_forward_pre_hook(lambda *_: None)
    own.forward = own.forward  # type: ignore[method-assign]
    layers += [watched, own, QLinear.from_float(nn.Linear(32, 16), w4).to_empty(device="cpu")]
    for seed in range(20):
        order = torch.randperm(len(layers), generator=torch.Generator().manual_seed(seed)).tolist()
        some = [layers[i] for i in order]
        want: dict[Any, list[int]] = {}
        for place, layer in enumerate(some):
            kind = kind_of(layer)
            want.setdefault(place if kind is None else kind, []).append(place)
        assert by_kind(some) == want
        assert len(want) > 15


W4 = pyquant.W4A8Dynamic(16)


def layers_of(bank: Any) -> list[Any]:
    return [layer for pair in bank.experts() for layer in pair]


def test_layers_know_how_many_share_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which decides how their weights lie on a GPU: whoever puts them into a bank, and before they are moved."""
    model = nn.ModuleDict({"experts": Bank(3, 32, 16)})
    bank = pyquant.quantize_(model, {"experts.1.*": None, "_default": pyquant.W4A8Dynamic(16)})["experts"]
    told = [getattr(layer, "_experts", None) for layer in layers_of(bank)]
    assert told == [3, 3, None, None, 3, 3]
    pyquant.quantize_(model, {"experts.1.*": pyquant.W8A16(), "_default": None}, check_speed=False)
    assert [layer._experts for layer in layers_of(bank)] == [3] * 6
    assert [layer._experts for layer in layers_of(copy.deepcopy(bank))] == [3] * 6
    own = bank_of([(QLinear(32, 32), QLinear(16, 32)) for _ in range(5)], pyquant.ExpertsRule())
    assert [layer._experts for layer in layers_of(own)] == [5] * 10
    own.expert(2)[0]._experts = own.expert(4)[1]._experts = 0
    own.double()
    assert [layer._experts for layer in layers_of(own)] == [5] * 10
    asked: list[int] = []
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: plan.Device(80, 108, 166912, 41943040)))
    monkeypatch.setattr(plan, "bank_layout", lambda spec, device, experts: asked.append(experts) or "rows")
    layer = own.expert(0)[0]
    assert layer._layout_on(torch.device("cuda"), ops.LinearSpec.from_ints(layer._spec)) == "rows"
    assert asked == [5]
    assert layer._layout_on(torch.device("cpu"), ops.LinearSpec.from_ints(layer._spec)) == ops.layout_for(
        torch.device("cpu")
    )


def test_weights_that_lie_on_a_gpu_already_are_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the layouts of CPUs in place of those of a GPU: the numbers stay, and a failure brings all back."""
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(QLinear, "_layout_on", lambda layer, *_: "rows" if layer._experts else "cpu_blocked")
    pack, unpack, stand_in = ops.pack_linear, ops.unpack_linear, fallback.IMPLEMENTATIONS

    def packed(w: Tensor, scale: Tensor, spec: Any, *numbers: Any) -> Any:
        is_rows = ops.LinearSpec.from_ints(spec).layout == "rows"
        return stand_in["pack_linear"](w, scale, *numbers, spec) if is_rows else pack(w, scale, spec, *numbers)

    def unpacked(storage: Tensor, spec: Any) -> Any:
        is_rows = ops.LinearSpec.from_ints(spec).layout == "rows"
        return (stand_in["unpack_linear"] if is_rows else unpack)(storage, spec)

    monkeypatch.setattr(ops, "pack_linear", packed)
    monkeypatch.setattr(ops, "unpack_linear", unpacked)
    pairs = [(QLinear.from_float(nn.Linear(32, 32), W4), QLinear.from_float(nn.Linear(16, 32), W4)) for _ in range(3)]
    layers = [layer for pair in pairs for layer in pair]

    def are(layout: str, experts: int) -> None:
        for layer, state, _ in before:
            assert ops.LinearSpec.from_ints(layer._spec).layout == layout
            assert layer._experts == experts
            now = layer.state_dict()
            assert state.keys() == now.keys()
            assert all(torch.equal(now[name], value) for name, value in state.items())

    before = [(layer, layer.state_dict(), layer.storage) for layer in layers]
    are("cpu_blocked", 0)
    bank = bank_of(pairs, pyquant.ExpertsRule())
    are("rows", 3)
    for layer in layers:
        layer._experts = 0
        layer._fill(layer._state())
    are("cpu_blocked", 0)
    undo: list[Any] = []
    bank._settle_layers(undo)
    bank._settle_layers([])  # nothing to be done
    are("rows", 3)
    for step in reversed(undo):
        step()
    are("cpu_blocked", 0)
    assert all(torch.equal(layer.storage, storage) for layer, _, storage in before)


def test_whoever_leads_calls_round_sees_each() -> None:
    """Hooks, and a `forward` of the module's own: clocks of a search, accelerate."""
    torch.manual_seed(0)
    bank = pyquant.quantize_(nn.ModuleDict({"experts": Bank(3, 16, 8)}), pyquant.W8A8Dynamic())["experts"]
    x, (ids, weights) = torch.randn(20, 16), routing(20, 3, 2)
    want, seen = bank(x, ids, weights), []
    for gate_up, down in bank.experts():
        for layer in (gate_up, down):
            layer.__dict__["forward"] = lambda x, run=layer.forward: (seen.append(run), run(x))[1]
    assert torch.equal(bank(x, ids, weights), want)
    assert len(seen) == 2 * len(ids.unique())


def test_a_search_times_banks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts, self.head = nn.Linear(16, 3), Bank(3, 16, 8), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = self.router(x).softmax(-1).topk(2)
            return self.head(self.experts(x, ids, weights))

    torch.manual_seed(0)
    model = pyquant.expose_linears_(Model().eval())
    batches = [torch.randn(64, 16) for _ in range(4)]
    options = {"num_batches": 4, "rounds": 3, "min_rounds": 2, "max_seconds": 5.0, "held_out": 1}
    table = pyquant.measure_latency(model, batches[0], ("float", "W8A8Dynamic"), batches, **options)
    assert {"experts.*.gate_up_proj", "experts.*.down_proj"} <= set(table.groups)
    assert all(us is not None for row in table.group_us for us in row)


def test_no_tokens_no_slots_and_experts_elsewhere() -> None:
    bank = Bank(4, 32, 16)
    experts = quantised(bank)
    assert experts(torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)).shape == (0, 32)
    assert torch.equal(
        experts(torch.ones(3, 32), torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, 0)), torch.zeros(3, 32)
    )
    x, ids = torch.randn(6, 32), torch.tensor([[0, 4], [4, 4], [1, 7], [-1, 2], [3, 0], [9, 9]])
    weights = torch.rand(6, 2)
    assert torch.equal(
        experts(x, ids, weights), one_by_one(dense(bank, pyquant.W8A8Dynamic()), bank.act_fn, x, ids, weights)
    )
    assert torch.equal(experts(x, ids, weights)[[1, 5]], torch.zeros(2, 32))
    for strange in (torch.inf, torch.nan):  # of a router that gave up on what is not here
        wild = torch.where((ids < 0) | (ids > 3), strange, weights)
        assert torch.equal(experts(x, ids, wild), experts(x, ids, weights))


def test_without_waiting_for_counts_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x, (ids, weights) = quantised(Biased(4, 32, 16)), torch.randn(9, 32), routing(9, 4, 2)
    ids[3, 1], x[5] = 7, torch.nan
    want = experts(x, ids, weights)
    monkeypatch.setattr("pyquant.nn.experts.must_not_wait", lambda _: True)
    monkeypatch.setattr("pyquant.nn.experts.Sorted", None)
    got = experts(x, ids, weights)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, 32)


def test_one_poisoned_token_poisons_no_other() -> None:
    bank, x, (ids, weights) = Bank(4, 32, 16), torch.randn(8, 32), routing(8, 4, 2)
    experts = quantised(bank)
    want = experts(x, ids, weights)
    x[3, 5] = float("nan")
    got = experts(x, ids, weights)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(got[keep], want[keep])


def test_wrong_arguments_are_named() -> None:
    experts = quantised(Bank(4, 32, 16))
    x, (ids, weights) = torch.randn(5, 32), routing(5, 4, 2)
    for argument, call in (
        ("hidden_states", (x[:, :31], ids, weights)),
        ("hidden_states", (x[None], ids, weights)),
        ("hidden_states", (x.long(), ids, weights)),
        ("top_k_index", (x, ids.float(), weights)),
        ("top_k_index", (x, ids[:4], weights[:4])),
        ("top_k_index", (x, None, weights)),
        ("top_k_weights", (x, ids, weights[:, :1])),
        ("top_k_weights", (x, ids, None)),
    ):
        with pytest.raises(pyquant.ArgumentError, match=argument):
            experts(*call)
    with pytest.raises(pyquant.ArgumentError, match="module"):
        QExperts.from_float(nn.Linear(2, 2))


def test_the_float_bank_computes_the_same_and_trains() -> None:
    torch.manual_seed(3)
    model = nn.ModuleDict({"experts": Bank(4, 32, 16)})
    x, (ids, weights) = torch.randn(16, 32), routing(16, 4, 2)
    want = model["experts"](x, ids, weights)
    held = model["experts"].gate_up_proj.data_ptr()
    pyquant.expose_linears_(model)
    got = model["experts"](x, ids, weights)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.square().sum().backward()
    assert model["experts"].expert(0)[0].weight.grad is not None
    assert model["experts"].expert(0)[0].weight.data_ptr() == held  # no copy


def test_gradients_reach_tokens_and_routing_weights() -> None:
    experts = quantised(Bank(4, 32, 16))
    x, (ids, weights) = torch.randn(6, 32, requires_grad=True), routing(6, 4, 2)
    weights.requires_grad_()
    experts(x, ids, weights).sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    assert bool((x.grad.abs().sum(1) > 0).all() and (weights.grad != 0).all())


# ---- layers to everything else


def test_it_is_saved_reported_and_taken_back(tmp_path: Path) -> None:
    torch.manual_seed(4)

    def build() -> nn.Module:
        return nn.ModuleDict({"experts": Biased(3, 32, 48)})

    model, x, (ids, weights) = build(), torch.randn(7, 32), routing(7, 3, 2)
    pyquant.quantize_(model, {"experts.*.down_proj": pyquant.W4A8Dynamic(16), "_default": pyquant.W8A8Dynamic()})
    want = model["experts"](x, ids, weights)
    report = {r.name: r for r in pyquant.quantization_report(model)}
    assert set(report) == {f"experts.{e}.{name}" for e in range(3) for name in ("gate_up_proj", "down_proj")}
    assert report["experts.1.down_proj"].scheme == "W4A8Dynamic(group_size=16)"
    assert sum(r.bytes_before for r in report.values()) == 4 * 3 * (96 * 32 + 96 + 48 * 32 + 32)
    pyquant.save_pretrained(model, tmp_path)
    assert torch.equal(pyquant.load_pretrained(tmp_path, build)["experts"](x, ids, weights), want)  # type: ignore[index]
    back: Any = pyquant.dequantize_(copy.deepcopy(model))["experts"]  # type: ignore[index]
    assert type(back) is Biased
    assert list(dict(back.named_parameters())) == ["gate_up_proj", "down_proj", "up_bias", "down_bias"]
    assert sqnr(back(x, ids, weights), want) > 30


def test_who_decides_about_an_expert() -> None:
    def told(config: Any) -> set[str]:
        model = nn.ModuleDict({"experts": Bank(2, 32, 48), "fc": nn.Linear(32, 32)})
        pyquant.quantize_(model, config)
        return {name for name, m in model.named_modules() if isinstance(m, QLinear)}

    every = {f"experts.{e}.{name}" for e in range(2) for name in ("gate_up_proj", "down_proj")}
    assert told({"experts": pyquant.W8A8Dynamic()}) == every
    assert told({Bank: None, "_default": pyquant.W8A8Dynamic()}) == {"fc"}
    assert told({"experts.1.*": None, "experts.*": pyquant.W8A8Dynamic()}) == {n for n in every if ".0." in n}
    assert told({"experts.*.down_proj": pyquant.W8A16()}) == {n for n in every if "down" in n}


def test_a_bank_that_is_out_of_the_ordinary_stays_and_is_named() -> None:
    class Scaled(Bank):
        def forward(self, *args: Any) -> Tensor:
            return 2 * super().forward(*args)

    other = Bank(2, 32, 48)
    other.more = nn.Parameter(torch.ones(2))
    model = nn.ModuleDict({"a": Scaled(2, 32, 48), "b": other, "fc": nn.Linear(32, 32)})
    with pytest.warns(pyquant.QuantizationWarning, match="register_experts"):
        pyquant.quantize_(model, pyquant.W8A8Dynamic())
    assert type(model["a"]) is Scaled
    assert type(model["b"]) is Bank


def test_rules_are_checked() -> None:
    for layer, rule in ((3, pyquant.ExpertsRule()), (nn.Linear(2, 2), pyquant.ExpertsRule()), (Bank, {"up": "w"})):
        with pytest.raises(pyquant.ArgumentError):
            pyquant.register_experts(layer, rule)  # type: ignore[arg-type]


# ---- transformers


@needs_transformers
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_quantised_whole(family: str, tmp_path: Path) -> None:
    model, ids = model_of(family), torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    calls: dict[str, tuple[Any, Tensor]] = {}
    for name, bank in experts_of(model).items():
        bank.register_forward_hook(lambda _, args, y, name=name: calls.update({name: (args, y)}))
    with torch.no_grad():
        model(ids)
        routers = {n: p.clone() for n, p in model.named_parameters() if "router" in n or n.endswith("mlp.gate.weight")}
        want = dict(calls)
        pyquant.quantize_(model, {"lm_head": None, "_default": pyquant.W8A8Dynamic()}, check_speed=False)
        for name, bank in experts_of(model).items():
            assert type(bank) is QExperts
            assert sqnr(bank(*want[name][0]), want[name][1]) > 33, name  # what dense layers of such a block give
        left = {n: p for n, p in model.named_parameters() if "router" in n or n.endswith("mlp.gate.weight")}
        assert not [r for r in pyquant.quantization_report(model) if r.kind.endswith("Experts")]
        assert family == "Llama4" or all(torch.equal(left[n], p) for n, p in routers.items())
        got = model(ids).logits
        pyquant.save_pretrained(model, tmp_path)
        again = pyquant.load_pretrained(tmp_path, lambda: model_of(family))
        assert torch.equal(again(ids).logits, got)


@needs_transformers
def test_mixtrals_experts_become_a_quarter_in_four_bits() -> None:
    import transformers

    config = transformers.MixtralConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=64)
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    pyquant.quantize_(model, pyquant.W4A16(), check_speed=False)
    records = [r for r in pyquant.quantization_report(model) if ".experts." in r.name]
    assert len(records) == 16
    assert sum(r.bytes_after for r in records) <= 0.27 * sum(r.bytes_before for r in records)
