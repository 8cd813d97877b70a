"""Linear forms: attention, recurrences and renamed Linears compute the same when made of nn.Linear, and quantise."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import pyquant
from pyquant import W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.nn import forms
from pyquant.nn.attention import Attention
from pyquant.nn.recurrent import Recurrent

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)


def sqnr(got: Tensor, want: Tensor) -> float:
    return float(20 * torch.log10(want.norm() / (got - want).norm()))


def scheme_text(model: nn.Module) -> dict[str, str]:
    return {n: str(m.scheme) for n, m in model.named_modules() if isinstance(m, pyquant.QLinear)}


# ---- the forms compute what the classes compute

ATTENTION = list(
    itertools.product(
        (False, True),
        (False, True),
        (False, True),
        (None, 12),
        (False, True),
        (False, True),
        (False, True),
        range(4),
        range(3),
        (False, True),
    )
)


def attention_case(case: tuple[Any, ...]) -> tuple[nn.MultiheadAttention, tuple[Tensor, ...], dict[str, Any]]:
    batch_first, bias_kv, zero, kdim, bias, weights, average, mask, padding, is_batched = case
    module = nn.MultiheadAttention(
        16, 4, bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero, kdim=kdim, vdim=kdim, batch_first=batch_first
    ).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    length, source, batch = 3, 5, 2
    q, k, v = (torch.randn(batch, n, w) for n, w in ((length, 16), (source, kdim or 16), (source, kdim or 16)))
    attn = (None, torch.rand(length, source) < 0.3, torch.randn(length, source), torch.randn(batch * 4, length, source))
    pad = (None, torch.tensor([[0, 0, 0, 0, 1], [0, 1, 0, 0, 0]]).bool(), torch.randn(batch, source))
    masks: dict[str, Any] = {"attn_mask": attn[mask], "key_padding_mask": pad[padding]}
    if not is_batched:
        q, k, v = q[0], k[0], v[0]
        masks["attn_mask"] = masks["attn_mask"][:4] if mask == 3 else masks["attn_mask"]
        masks["key_padding_mask"] = None if padding == 0 else masks["key_padding_mask"][0]
    elif not batch_first:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return module, (q, k, v), {**masks, "need_weights": weights, "average_attn_weights": average}


def test_attention_made_of_layers_computes_the_same() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for case in ATTENTION[::7]:
            module, args, kwargs = attention_case(case)
            wants, gots = module(*args, **kwargs), Attention.from_float(module)(*args, **kwargs)
            for got, want in zip(gots, wants, strict=True):
                assert (got is None) == (want is None), case
                if want is not None:
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, c=case: f"{c}: {m}")


def test_a_causal_hint_and_gradients() -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True)
    form, x = Attention.from_float(module), torch.randn(2, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for weights in (False, True):
        want = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=weights)[0]
        got = form(x, x, x, attn_mask=mask, is_causal=True, need_weights=weights)[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="attn_mask"):
        form(x, x, x, is_causal=True)
    got.sum().backward()
    assert all(p.grad is not None for p in form.parameters())
    assert form.q_proj.weight.data_ptr() == module.in_proj_weight.data_ptr()  # no copy


RECURRENT = [
    (kind, *rest)
    for kind, *rest in itertools.product(
        (nn.LSTM, nn.GRU), (1, 2), (False, True), (False, True), (False, True), (0, 3), range(4), (False, True)
    )
    if kind is nn.LSTM or not rest[4]
]


def test_recurrences_made_of_layers_compute_the_same() -> None:
    torch.manual_seed(0)
    for kind, layers, both, batch_first, bias, proj, inputs, has_state in RECURRENT[::3]:
        more = {"proj_size": proj} if proj else {}
        module = kind(6, 5, layers, bias, batch_first, bidirectional=both, **more)
        x = torch.randn(3, 4, 6) if batch_first else torch.randn(4, 3, 6)
        count = layers * (1 + both)
        start = [torch.randn(count, 3, proj or 5), torch.randn(count, 3, 5)][: 1 + (kind is nn.LSTM)]
        if inputs == 0:
            x, start = torch.randn(4, 6), [s[:, 0] for s in start]
        given: Any = x
        if inputs >= 2:
            lengths = torch.tensor([4, 3, 1] if inputs == 2 else [2, 4, 1])
            given = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=inputs == 2)
        state = None if not has_state else tuple(start) if kind is nn.LSTM else start[0]
        with torch.no_grad():
            want, want_last = module(given, state)
            got, got_last = Recurrent.from_float(module)(given, state)
        if isinstance(want, PackedSequence):
            for a, b in zip(got[1:], want[1:], strict=True):
                assert (a is None) == (b is None)
                assert a is None or torch.equal(a, b)
            got, want = got.data, want.data
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got_last, want_last, rtol=1e-5, atol=1e-6)


# ---- quantised


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrences_are_quantised_and_saved(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = kind(32, 48, 2, bidirectional=True), nn.Linear(96, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0])  # type: ignore[no-any-return]

    model, x = Tagger().eval(), torch.randn(7, 3, 32)
    with torch.no_grad():
        want = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pyquant.QuantizationWarning)
            pyquant.quantize_(model, W8A8Dynamic())
        got = model(x)
        assert sqnr(got, want) > 25
        assert set(scheme_text(model)) == {
            "out",
            *(f"rnn.{w}_l{i}{r}" for w in ("ih", "hh") for i in (0, 1) for r in ("", "_reverse")),
        }
        pyquant.save_pretrained(model, tmp_path)
        assert torch.equal(pyquant.load_pretrained(tmp_path, Tagger)(x), got)
        with torch.device("meta"):
            empty = Tagger()
        assert torch.equal(pyquant.load_pretrained(tmp_path, empty).eval()(x), got)
        with pytest.raises(pyquant.CheckpointError, match=r"'rnn' was saved as a \w+ made of layers"):
            pyquant.load_pretrained(tmp_path, lambda: nn.ModuleDict({"rnn": nn.Linear(2, 2), "out": nn.Linear(96, 8)}))


def test_transformer_layers_are_quantised_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    build: Callable[[], nn.Module] = lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval()  # noqa: E731
    model = build()
    source, target = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    with torch.no_grad():
        want = model(source, target, **masks)
        pyquant.quantize_(model, W8A8Dynamic())
        got = model(source, target, **masks)
        assert sqnr(got, want) > 25
        assert len(scheme_text(model)) == 2 * (4 + 2) + 2 * (4 + 4 + 2)
        pyquant.save_pretrained(model, tmp_path)
        assert torch.equal(pyquant.load_pretrained(tmp_path, build)(source, target, **masks), got)
    assert not [r for r in pyquant.quantization_report(model) if r.scheme == "float"]


def test_who_decides_about_a_layer_of_a_form() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4), "rnn": nn.LSTM(32, 32), "fc": nn.Linear(32, 32)})

    def told(config: Any, **more: Any) -> dict[str, str]:
        return scheme_text(pyquant.quantize_(model(), config, **more))

    assert set(told({"attn.q_proj": W8A8Dynamic()})) == {"attn.q_proj"}
    assert set(told({"attn": W8A8Dynamic()})) == {f"attn.{x}_proj" for x in ("q", "k", "v", "out")}
    assert set(told({nn.LSTM: W4A8Dynamic(32), "fc": None})) == {"rnn.ih_l0", "rnn.hh_l0"}
    assert set(told({nn.MultiheadAttention: None, "_default": W8A8Dynamic()})) == {"rnn.ih_l0", "rnn.hh_l0", "fc"}
    assert set(told({"rnn": None, "attn.*": None, "_default": W8A8Dynamic()})) == {"fc"}
    assert set(told(W8A8Dynamic(), filter_fn=lambda m, name: name.endswith("out_proj"))) == {"attn.out_proj"}
    mixed = told({"attn.*": W8A8Dynamic(), "attn.out_proj": W4A8Dynamic(16)})
    assert mixed["attn.out_proj"] == "W4A8Dynamic(group_size=16)"
    untouched = pyquant.quantize_(model(), {"fc": W8A8Dynamic()})
    assert type(untouched["attn"]) is nn.MultiheadAttention
    assert type(untouched["rnn"]) is nn.LSTM


def test_static_schemes_want_a_scale_or_leave_the_form_and_say_so() -> None:
    def model() -> nn.ModuleDict:
        return nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4), "fc": nn.Linear(32, 32)})

    with pytest.warns(pyquant.QuantizationWarning, match=r"attn.*no input scale is given for attn\.out_proj"):
        half = pyquant.quantize_(model(), W8A8(), input_scales={"fc": 0.1})
    assert type(half["attn"]) is nn.MultiheadAttention
    names = [f"attn.{x}_proj" for x in ("q", "k", "v", "out")]
    whole = pyquant.quantize_(model(), W8A8(), input_scales=dict.fromkeys([*names, "fc"], 0.1))
    assert set(scheme_text(whole)) == {*names, "fc"}
    with pytest.raises(pyquant.ArgumentError, match=r"nothing for attn\.q_proj"):
        pyquant.quantize_(model(), {"attn.q_proj": W8A8()})


def test_hooks_sharing_and_failures() -> None:
    shared = nn.MultiheadAttention(16, 2)
    model = nn.ModuleDict({"a": shared, "b": shared, "bad": nn.Linear(8, 8)})
    calls: list[int] = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model["bad"].weight[0, 0] = float("nan")
    with pytest.raises(pyquant.NonFiniteError):
        pyquant.quantize_(model, W8A8Dynamic())
    assert model["a"] is shared
    pyquant.quantize_(model, {"bad": None, "_default": W8A8Dynamic()})
    assert model["a"] is model["b"]
    x = torch.randn(3, 1, 16)
    model["a"](x, x, x)
    assert calls == [1]


def test_exposed_layers_are_trained_and_calibrated_like_any_other() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        want = model(x)
        pyquant.expose_linears_(model)
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
        quantizer = pyquant.SelectiveQuantizer(mode="naive", verbose=False)
        quantizer.quantize_module(model)
        pyquant.QuantizationCalibrator().calibrate_model(model, [x] * 2, method="max", num_calib_batches=2)
        pyquant.convert_(model)
        assert sqnr(model(x), want) > 20
    assert len(scheme_text(model)) == 6


def test_a_class_of_ones_own_is_registered_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_FORMS", dict(forms._FORMS))

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.matrix

    class Other(Row):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    pyquant.register_linear_form(f"{Row.__module__}.{Row.__qualname__}", lambda m: forms.linear_of(m.matrix.t(), None))
    model = nn.ModuleDict({"row": Row(), "other": Other(), "fc": nn.Linear(8, 8)})
    with pytest.warns(pyquant.QuantizationWarning, match=r"other \(Other"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert set(scheme_text(model)) == {"row", "fc"}
    for layer, make in ((nn.Linear, lambda m: m), (3, lambda m: m), (Row, "row")):
        with pytest.raises(pyquant.ArgumentError):
            pyquant.register_linear_form(layer, make)  # type: ignore[arg-type]
    pyquant.register_linear_form(Row, lambda m: 5)  # type: ignore[arg-type,return-value]
    with pytest.raises(pyquant.ArgumentError, match="make"):
        pyquant.expose_linears_(nn.Sequential(Row()))


# ---- transformers


@needs_transformers
def test_gpt2s_conv1d_is_a_linear(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    build: Callable[[], Any] = lambda: transformers.GPT2LMHeadModel(config).eval()  # noqa: E731
    model, ids = build(), torch.arange(24).reshape(2, 12)
    reference = copy.deepcopy(model)
    pyquant.quantize_(model, W8A8Dynamic(), heads=False)
    assert len(scheme_text(model)) == 8
    with torch.no_grad():
        got = model(ids).logits
        assert sqnr(got, reference(ids).logits) > 30
        pyquant.save_pretrained(model, tmp_path)
        assert torch.equal(pyquant.load_pretrained(tmp_path, build)(ids).logits, got)


@needs_transformers
def test_falcon_is_quantised() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96, bos_token_id=1, eos_token_id=2
    )
    model, ids = transformers.FalconForCausalLM(config).eval(), torch.arange(24).reshape(2, 12)
    reference = copy.deepcopy(model)
    pyquant.quantize_(model, W8A8Dynamic(), heads=False)
    assert len(scheme_text(model)) == 8
    with torch.no_grad():
        assert sqnr(model(ids).logits, reference(ids).logits) > 30


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W8A8"])
def test_a_scripted_part_stays_as_it_is(scheme: str) -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = nn.Sequential(nn.Linear(8, 8), part)
    x = torch.randn(4, 8)
    pyquant.quantize_(model, scheme, data=[x] if scheme == "W8A8" else None, check_speed=False)
    assert type(model[0]).__name__ == "QLinear"
    assert model[1] is part
    assert model(x).shape == (4, 8)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_recurrent_modules_within_autocast(kind: Any, both_ways: bool, with_gradients: bool) -> None:
    """In the types of torch's own: GRU's steps mixed the state's with that of the products."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(16, 8, 2, bidirectional=both_ways, batch_first=True)).eval()
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(with_gradients):
        want = model(x)
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
        got = model(x)
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert one.dtype == other.dtype
        assert torch.allclose(one.float(), other.float(), atol=0.03)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False, attn_mask=None)[0]


class Recurs(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner = kind(16, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@pytest.mark.parametrize("make", [Attends, partial(Recurs, nn.LSTM), partial(Recurs, nn.GRU)])
def test_forms_are_one_node_of_torch_fx_as_the_modules_were(make: Any) -> None:
    model, x = make().eval(), torch.randn(2, 3, 16)
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["inner"]
    assert torch.equal(traced(x), model(x))
