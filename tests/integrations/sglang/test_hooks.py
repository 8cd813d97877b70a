"""pyquant's hooks in SGLang's W8A8 layers give the bits of QLinears: with a registry that stands in for SGLang's and,
where its wheel is unpacked (make nightly-sglang), with its own registry, parameters, loaders and scheme."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.integrations import sglang
from pyquant.integrations.sglang import hooks
from pyquant.integrations.sglang.hooks import apply_weights, process_weights_after_loading

sys.path.append(__file__.rpartition("/")[0])
import stand_ins

unpacked = pytest.mark.skipif(not stand_ins.is_there(), reason=stand_ins.MISSING)
PER_CHANNEL = TensorScheme(8, granularity="per_channel", narrow_range=False)


def scheme_of(static: bool = False, symmetric: bool = True) -> Any:
    return SimpleNamespace(is_static_input_scheme=static, input_symmetric=symmetric, strategy="channel")


def layer_of(widths: list[int], k: int, *, bias: bool = False, by_tensor: bool = False, **more: Any) -> Any:
    """A layer as SGLang leaves it after loading."""
    torch.manual_seed(0)
    n = sum(widths)
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.randint(-128, 128, (n, k), dtype=torch.int8), requires_grad=False)
    scales = torch.rand(len(widths)) / 50 + 1e-3 if by_tensor else torch.rand(n, 1) / 50 + 1e-3
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    layer.bias = nn.Parameter(torch.randn(n)) if bias else None
    layer.logical_widths, layer.params_dtype, layer.skip_bias_add = widths, torch.float32, False
    for name, value in more.items():
        setattr(layer, name, value)
    return layer


def wanted(
    layer: Any, inputs: TensorScheme, scale: Tensor | None = None, zero: Tensor | None = None
) -> pyquant.QLinear:
    """The QLinear of the same numbers."""
    numbers = layer.weight_scale.data
    if numbers.dim() == 1:
        numbers = numbers.repeat_interleave(torch.tensor(layer.logical_widths))
    return pyquant.QLinear.from_codes(
        layer.weight.data.clone(),
        numbers.reshape(-1).clone(),
        scheme=QScheme(PER_CHANNEL, inputs),
        bias=None if layer.bias is None else layer.bias.data.clone(),
        input_scale=scale,
        input_zero_point=zero,
    ).eval()


DYNAMIC = TensorScheme(8, True, "per_token", dynamic=True, narrow_range=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"by_tensor": True}], ids=str)
def test_dynamic_layers_have_the_bits_of_qlinears(options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = layer_of([48, 17, 17], 96, **options)
    reference = wanted(layer, DYNAMIC)
    process_weights_after_loading(scheme_of(), layer)
    assert isinstance(layer.pyquant.parts[0], pyquant.QLinear)
    assert layer.weight is None
    assert layer.weight_scale is None
    for rows in (0, 1, 5, 33):
        x = torch.randn(rows, 96).to(dtype)
        assert torch.equal(apply_weights(scheme_of(), layer, x, layer.bias), reference(x))


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_layers_quantise_by_the_scale_of_the_file(symmetric: bool) -> None:
    """SGLang's own product finds a range for every token, whatever the file says."""
    zero = None if symmetric else torch.tensor([-7], dtype=torch.int8)
    more = {} if zero is None else {"input_zero_point": nn.Parameter(zero, requires_grad=False)}
    layer = layer_of([40], 64, bias=True, input_scale=nn.Parameter(torch.tensor([0.03])), **more)
    inputs = TensorScheme(8, symmetric, "per_tensor", narrow_range=False)
    reference = wanted(layer, inputs, torch.tensor([0.03]), None if zero is None else zero.int())
    process_weights_after_loading(scheme_of(static=True, symmetric=symmetric), layer)
    x = 3 * torch.randn(7, 64)
    assert torch.equal(apply_weights(scheme_of(), layer, x, layer.bias), reference(x))


@pytest.mark.parametrize("attribute", ["skip_bias_add", "input_is_parallel"])
def test_a_bias_that_sglang_adds_or_hands_on_is_not_packed(attribute: str) -> None:
    layer = layer_of([24], 32, bias=True, **{attribute: True})
    bias, layer.bias = layer.bias, None
    plain = wanted(layer, DYNAMIC)
    layer.bias = bias
    process_weights_after_loading(scheme_of(), layer)
    x = torch.randn(4, 32)
    assert torch.equal(apply_weights(scheme_of(), layer, x, None), plain(x))
    assert torch.equal(apply_weights(scheme_of(), layer, x, bias), plain(x) + bias)


def test_the_first_layer_of_each_scheme_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "_told", set())
    with caplog.at_level("INFO", logger="sglang.pyquant"):
        for name in ("a.gate_up_proj", "a.down_proj"):
            process_weights_after_loading(scheme_of(), layer_of([8], 16, prefix=name))
        static = {"input_scale": nn.Parameter(torch.tensor([0.1])), "prefix": "b.fc"}
        process_weights_after_loading(scheme_of(static=True), layer_of([8], 16, **static))
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["a.gate_up_proj", "b.fc"]
    assert caplog.records[0].getMessage().startswith("pyquant: W8A8Dynamic")


def test_weights_are_loaded_once_and_bad_numbers_are_named() -> None:
    layer = layer_of([8], 16, prefix="model.layers.0.mlp.up_proj")
    process_weights_after_loading(scheme_of(), layer)
    with pytest.raises(pyquant.CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj.*loaded once"):
        process_weights_after_loading(scheme_of(), layer)
    broken = layer_of([8], 16)
    broken.weight_scale.data[3] = float("nan")
    with pytest.raises(pyquant.CheckpointError, match="weight_scale"):
        process_weights_after_loading(scheme_of(), broken)


# ---- registration


class Registry:
    """What SGLang's registry is asked, written down."""

    calls: list[tuple[str, Any, str]]

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: str = "after", *, source: Any = None) -> None:
        cls.calls.append((target, hook, hook_type))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[Registry]:
    Registry.calls = []
    monkeypatch.setattr(hooks, "_registered", set())
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"):
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    module = sys.modules["sglang.srt.plugins.hook_registry"]
    module.HookRegistry, module.HookType = Registry, SimpleNamespace(REPLACE="replace")  # type: ignore[attr-defined]
    return Registry


def test_nothing_is_replaced_unless_it_is_asked_for(registry: type[Registry], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "off"):
        monkeypatch.delenv(sglang.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(sglang.VARIABLE, value)
        sglang.register()
        assert registry.calls == []
    monkeypatch.setenv(sglang.VARIABLE, "prefer")
    for _ in range(2):
        sglang.register()
    assert registry.calls == [
        (f"{sglang.SCHEME}.process_weights_after_loading", process_weights_after_loading, "replace"),
        (f"{sglang.SCHEME}.apply_weights", apply_weights, "replace"),
    ]
    monkeypatch.setenv(sglang.VARIABLE, "first")
    with pytest.raises(pyquant.ArgumentError, match="PYQUANT_SGLANG"):
        sglang.register()


def test_without_sglang_nothing_happens_and_without_its_registry_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.VARIABLE, "prefer")
    monkeypatch.setattr(hooks, "_registered", set())
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    sglang.register()
    empty = ModuleType("sglang")
    empty.__spec__ = SimpleNamespace(name="sglang")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "sglang", empty)
    with pytest.raises(ImportError, match="hook_registry"):
        sglang.register()


def test_the_entry_point_is_declared() -> None:
    text = (stand_ins.ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\npyquant = "pyquant.integrations.sglang:register"' in text


# ---- SGLang's own files


@unpacked
def test_the_stand_in_has_the_signature_of_the_registry() -> None:
    """Compared with the wheel's source, which is parsed, not executed."""
    tree = ast.parse(stand_ins.source("srt/plugins/hook_registry.py").read_text())
    theirs = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "register")
    ours = inspect.signature(Registry.register).parameters
    assert [a.arg for a in theirs.args.args[1:]] + [a.arg for a in theirs.args.kwonlyargs] == list(ours)
    names = {
        a.targets[0].id for a in ast.walk(tree) if isinstance(a, ast.Assign) and isinstance(a.targets[0], ast.Name)
    }
    assert "REPLACE" in names


@unpacked
def test_in_their_own_scheme_and_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices joined, filled shard by shard by SGLang's loaders: two QLinears side by side, to the bit."""
    monkeypatch.setenv(sglang.VARIABLE, "prefer")
    monkeypatch.setattr(hooks, "_registered", set())
    with stand_ins.sglang() as modules:
        sglang.register()
        modules.hook_registry.HookRegistry.apply_hooks()
        scheme = modules.scheme.CompressedTensorsW8A8Int8("channel", False, True)
        layer: Any = nn.Module()
        scheme.create_weights(layer, [40, 24], 32, torch.float32, weight_loader=None, input_size=32, output_size=64)
        assert type(layer.weight).__name__ == "ModelWeightParameter"
        parts = [pyquant.QLinear.from_float(nn.Linear(32, n, bias=False), pyquant.W8A8Dynamic()) for n in (40, 24)]
        offset = 0
        for part in parts:
            codes, numbers = part.state_dict()["weight"], part.weight_scale.reshape(-1, 1)
            for parameter, tensor in ((layer.weight, codes), (layer.weight_scale, numbers)):
                where = {
                    "shard_offset": offset,
                    "shard_size": len(codes),
                    "tp_rank": 0,
                    "use_presharded_weights": False,
                }
                parameter.load_merged_column_weight(tensor, **where)
            offset += len(codes)
        layer.bias, layer.skip_bias_add = None, False
        scheme.process_weights_after_loading(layer)
        for rows in (1, 9):
            x = torch.randn(rows, 32)
            want = torch.cat([part(x) for part in parts], -1)
            assert torch.equal(scheme.apply_weights(layer, x, None), want)
        assert sum(isinstance(m, pyquant.QLinear) for m in layer.modules()) == 1  # one integer product for both
