"""Products of rows sorted by layer, with numbers of rows that a graph learns when it runs: the layers' own bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_samples import CPU_LAYOUT
from torch import Tensor, nn

import pyquant
from pyquant import ops
from pyquant.ops.schema import ROUTED

_ops = torch.ops.pyquant
COUNTS = [[3, 0, 4], [0, 0, 0], [9, 0, 0], [0, 0, 2], [1, 1, 1]]
ROWS, N, K = 9, 5, 16


def operands(name: str) -> tuple[list[Any], Any]:
    """The op's arguments behind x and counts, and what one layer gives."""
    torch.manual_seed(0)
    bias, scale = [torch.randn(N) for _ in range(3)], [torch.rand(N) / 9 + 0.01 for _ in range(3)]
    codes = [torch.randint(-127, 128, (N, K), dtype=torch.int8) for _ in range(3)]
    fused = ("relu", 0.0, 0.0)
    if name == "_routed_linear":
        spec = list(ops.LinearSpec(N, K, has_bias=True, layout=CPU_LAYOUT).to_ints())
        packed = [ops.pack_linear(c, s, spec, b) for c, s, b in zip(codes, scale, bias)]
        return [packed, spec, torch.bfloat16], lambda x, i: ops.qlinear(x, packed[i], None, spec, torch.bfloat16)
    if name == "_routed_weight_only":
        zeros = [torch.randint(-9, 9, (N,), dtype=torch.int32) for _ in range(3)]

        def one(x: Tensor, i: int) -> Tensor:
            return ops.weight_only_linear(x, codes[i], scale[i], zeros[i], bias[i], None, 8, 0, *fused)

        return [codes, scale, zeros, bias, N, 8, 0, *fused], one
    w = [torch.randn(N, K) for _ in range(3)]
    if name == "_routed_dense":
        return [w, bias], lambda x, i: nn.functional.linear(x, w[i], bias[i])
    return [w, [], *fused, torch.float16], lambda x, i: ops.float_linear(x, w[i], None, None, *fused, torch.float16)


@pytest.mark.parametrize("name", list(ROUTED))
def test_rows_have_the_bits_of_their_layers(name: str) -> None:
    op, (rest, one) = getattr(_ops, name).default, operands(name)
    x = torch.randn(ROWS, 2 * K)[:, ::2]
    for counts in COUNTS:
        got = op(x, torch.tensor(counts), *rest)
        parts = x[: sum(counts)].split(counts)
        want = [one(part, i) for i, part in enumerate(parts) if len(part)]
        want = torch.cat([*want, got.new_zeros(ROWS - sum(counts), N)])
        assert got.dtype == want.dtype
        assert torch.equal(got, want), counts


@pytest.mark.parametrize("name", list(ROUTED))
def test_layers_of_some_experts_leave_the_results_of_others(name: str) -> None:
    """What a node of the layers of one kind does in a bank of several: here experts 3, 0 and 4 of five."""
    op, (rest, one) = getattr(_ops, name).default, operands(name)
    x, which = torch.randn(12, K), [3, 0, 4]
    for counts in ([3, 2, 0, 4, 1], [0, 7, 0, 0, 5], [0, 5, 5, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]):
        parts = list(x[: sum(counts)].split(counts))
        alone = op(x, torch.tensor(counts), *rest, experts=which)
        others = torch.randn(12, N).to(alone.dtype)
        kept = others.clone()
        got = op(x, torch.tensor(counts), *rest, experts=which, others=others)
        for want, y in ((torch.zeros_like(alone), alone), (kept.clone(), got)):
            begins = [sum(counts[:e]) for e in range(5)]
            for i, e in enumerate(which):
                if counts[e]:
                    want[begins[e] : begins[e] + counts[e]] = one(parts[e], i)
            assert torch.equal(y, want), counts
        assert torch.equal(others, kept)


@pytest.mark.parametrize("name", list(ROUTED))
def test_wrong_experts_are_refused(name: str) -> None:
    for which in ([0, 1], [0, 1, 5]):
        with pytest.raises(pyquant.ArgumentError, match="argument 'counts'"):
            getattr(_ops, name)(torch.randn(ROWS, K), torch.tensor([1] * 5), *operands(name)[0], experts=which)


@pytest.mark.parametrize("name", list(ROUTED))
def test_opcheck(name: str) -> None:
    op, (rest, _) = getattr(_ops, name).default, operands(name)
    for counts in ([3, 0, 4], [0, 0, 0]):
        torch.library.opcheck(op, (torch.randn(ROWS, K), torch.tensor(counts), *rest))
        more = {"experts": [2, 0, 1], "others": op(torch.randn(ROWS, K), torch.tensor(counts), *rest)}
        torch.library.opcheck(op, (torch.randn(ROWS, K), torch.tensor([*counts, 1]), *rest), more)


def test_codes_with_their_scales() -> None:
    rest, _ = operands("_routed_linear")
    x, counts = torch.randn(ROWS, K), torch.tensor([2, 5, 1])
    codes, scale, _ = ops.quantize_dynamic(x, "per_token")
    got = _ops._routed_linear(codes, counts, *rest, scale)
    assert torch.equal(got, _ops._routed_linear(x, counts, *rest))


@pytest.mark.parametrize("counts", [[3, 3], [5, 5, 5], [-1, 3, 2]])
@pytest.mark.parametrize("name", list(ROUTED))
def test_wrong_counts_are_refused(name: str, counts: list[int]) -> None:
    with pytest.raises(pyquant.ArgumentError, match="argument 'counts'"):
        getattr(_ops, name)(torch.randn(ROWS, K), torch.tensor(counts), *operands(name)[0])


@pytest.mark.parametrize("name", ["_routed_linear", "_routed_weight_only"])
def test_without_the_library_the_bits_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer, as on a GPU."""
    (rest, _), op = operands(name), getattr(_ops, name)
    x, counts, more = torch.randn(ROWS, K), torch.tensor([2, 0, 5, 1]), {"experts": [3, 1, 2]}
    want = op(x, counts[:3], *rest), op(x, counts, *rest, **more)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    assert torch.equal(op(x, counts[:3], *rest), want[0])
    assert torch.equal(op(x, counts, *rest, **more), want[1])
