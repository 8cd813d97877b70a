"""QEmbedding: rows of codes times their scale, exactly."""

from __future__ import annotations

import copy

import accept
import pytest
import torch
from torch import nn

import pyquant
from pyquant.nn.qembedding import QEmbedding


def embedding(rows: int = 50, width: int = 12) -> nn.Embedding:
    torch.manual_seed(rows)
    return nn.Embedding(rows, width, padding_idx=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (7,), (0,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("index_type", [torch.int64, torch.int32])
def test_forward_is_scale_times_code(dtype: torch.dtype, shape: tuple[int, ...], index_type: torch.dtype) -> None:
    q = QEmbedding.from_float(embedding().to(dtype))
    ids = torch.randint(0, 50, shape, dtype=index_type)
    exact = q.codes[ids.long()].double() * q.weight_scale[ids.long()].double().unsqueeze(-1)
    assert q(ids).dtype == dtype
    accept.t1(q(ids), exact.float().to(dtype), waiver="a lookup of few rows")


def test_rows_are_within_half_a_step_and_padding_is_zero() -> None:
    e = embedding()
    q = QEmbedding.from_float(e)
    error = (q.to_float().weight - e.weight).detach().abs()
    assert bool((error <= 0.5001 * q.weight_scale.unsqueeze(1)).all())
    assert not bool(q(torch.tensor(3)).any())
    assert q.to_float().padding_idx == q.padding_idx == 3
    accept.t1(q.weight_scale[4:5], e.weight.detach()[4].abs().max().reshape(1) / torch.tensor([127.0]))


def test_strided_indices() -> None:
    q = QEmbedding.from_float(embedding())
    ids = torch.randint(0, 50, (6, 8)).T[::2]
    accept.t1(q(ids), q(ids.contiguous()))


def test_a_quarter_of_the_memory() -> None:
    q = QEmbedding.from_float(nn.Embedding(1000, 384))
    assert sum(t.numel() * t.element_size() for t in q.state_dict().values()) == 1000 * 384 + 4000


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float"])
def test_casts_change_the_result_type_only(cast: str) -> None:
    q = QEmbedding.from_float(embedding())
    before = copy.deepcopy(q)
    getattr(nn.Sequential(q), cast)()
    assert q.codes.dtype == torch.int8
    assert q.weight.dtype == q.dtype
    assert torch.equal(q.weight_scale, before.weight_scale)
    ids = torch.arange(50)
    assert torch.equal(q(ids), before(ids).to(q.dtype))


def test_state_dict_round_trip_and_refusals() -> None:
    q = QEmbedding.from_float(embedding())
    again = QEmbedding(50, 12, 3)
    again.load_state_dict(q.state_dict())
    ids = torch.arange(50)
    accept.t1(again(ids), q(ids))
    meta = QEmbedding(50, 12, device="meta")
    meta.load_state_dict(q.state_dict(), assign=True)
    accept.t1(meta(ids), q(ids))
    for name, value, match in (
        ("weight_scale", torch.zeros(50), "above 0"),
        ("weight_scale", torch.ones(49), r"\[49\]"),
        ("weight", torch.full((50, 12), -128, dtype=torch.int8), "-128"),
        ("weight", torch.zeros(50, 12), "float32"),
    ):
        with pytest.raises(RuntimeError, match=match):
            again.load_state_dict({**q.state_dict(), name: value})
        accept.t1(again(ids), q(ids))


def test_zero_sizes() -> None:
    assert QEmbedding.from_float(nn.Embedding(5, 0))(torch.tensor([1])).shape == (1, 0)
    assert QEmbedding(0, 4)(torch.zeros(0, dtype=torch.int64)).shape == (0, 4)


def test_compiles() -> None:
    q = QEmbedding.from_float(embedding())
    ids = torch.randint(0, 50, (4,))
    compiled = torch.compile(q, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(ids), q(ids))
    torch._dynamo.reset()


def test_repr() -> None:
    assert repr(QEmbedding(10, 4, 1)) == "QEmbedding(10, 4, padding_idx=1, int8 per row)"
    assert pyquant.QEmbedding is QEmbedding
