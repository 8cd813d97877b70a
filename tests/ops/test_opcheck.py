"""torch.library.opcheck of every op: what torch.compile and torch.export assume of schemas, rules and derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_samples import WRITTEN, samples, spec
from torch import Tensor
from torch.testing._internal.optests.generate_tests import ALL_TEST_UTILS, DEFAULT_TEST_UTILS

from pyquant import ops
from pyquant.ops.schema import SCHEMAS

_ops = torch.ops.pyquant
EVERY = list(ALL_TEST_UTILS)
# opcheck adds the outputs up in the type of the first one, and fails where that is an integer type.
CODES_FIRST = {"quantize_dynamic", "add_rms_norm_quantize", "add_layer_norm_quantize"}


def test_these_are_all_that_torch_has() -> None:
    assert {f"test_{what}" for what in ("schema", "autograd_registration", "faketensor")} < set(EVERY)
    assert {"test_aot_dispatch_static", "test_aot_dispatch_dynamic"} < set(EVERY)


# What does not trace: a row alone goes through the same graph as three, on other kernels.
PLAIN = [utility for utility in EVERY if "dispatch" not in utility]


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("size", [(3, 5, 8), (1, 16, 64), (0, 4, 7)])
def test_opcheck(name: str, size: tuple[int, int, int]) -> None:
    op = getattr(_ops, name).default
    args = samples(*size)[name]
    torch.library.opcheck(op, args, test_utils=PLAIN if size[0] == 1 else DEFAULT_TEST_UTILS)
    if args[0].dim() == 2 and size[0] > 1 and 0 not in WRITTEN.get(name, ()):
        strided = torch.empty(args[0].shape[0], args[0].shape[1] * 2, dtype=args[0].dtype)[:, ::2]
        strided.copy_(args[0])
        torch.library.opcheck(op, (strided, *args[1:]), test_utils=EVERY)


@pytest.mark.parametrize("name", sorted(set(SCHEMAS) - set(WRITTEN)))
def test_with_gradients(name: str) -> None:
    args = [
        a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in samples(3, 5, 8)[name]
    ]
    utilities = [u for u in EVERY if "dispatch" not in u or name not in CODES_FIRST]
    torch.library.opcheck(getattr(_ops, name).default, tuple(args), test_utils=utilities)


def layers() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of qlinear: every field of its spec that changes what goes in or comes out."""
    one, zero = torch.tensor([0.05]), torch.tensor([3], dtype=torch.int32)
    x, x_q = torch.linspace(-2, 2, 3 * 16).reshape(3, 16), torch.arange(48, dtype=torch.int8).reshape(3, 16)
    w, w4 = torch.arange(-40, 40, dtype=torch.int8).reshape(5, 16), (torch.arange(80) % 15 - 7).to(torch.int8)
    w4, scales = ops.pack_int4(w4.reshape(5, 16)), torch.linspace(0.1, 0.5, 5)
    affine = {"x_symmetric": False, "x_qmin": -128}

    def call(codes: Tensor, w_scale: Tensor, *rest: Any, operands: tuple[Any, ...] = (), **fields: Any) -> Any:
        words = spec(5, 16, **fields)
        held = [one if fields.get("input") == "static" else None, None, one if fields.get("codes_out") else None, None]
        if fields.get("input") == "static" and "x_symmetric" in fields:
            held[1] = zero
        packed = _ops.pack_linear(codes, w_scale, None, *held, words)
        return (rest[0], packed, None, words, *(rest[1:] or (None,)), *operands)

    yield "static", call(w, scales, x, input="static")
    yield "static affine", call(w, scales, x, input="static", **affine)
    yield "static, codes in", call(w, scales, x_q, torch.float16, input="static")
    yield "codes out", call(w, scales, x, torch.int8, input="static", codes_out=True)
    four = {"codes_out": True, "out_qmin": -7, "out_qmax": 7}
    yield "packed codes out", call(w, scales, x, torch.uint8, input="static", **four)
    yield "dynamic affine", call(w, scales, x, **affine)
    yield "dynamic, codes in", call(w, scales, x_q, None, operands=(torch.ones(3), None))
    affine_codes = (torch.ones(3), torch.zeros(3, dtype=torch.int32))
    yield "affine codes in", call(w, scales, x_q, torch.bfloat16, operands=affine_codes, **affine)
    yield "4 bits", call(w4, scales, x, w_bits=4)
    yield "4 bits, groups", call(w4, scales[:, None].repeat(1, 4).contiguous(), x, w_bits=4, group_size=4)
    yield "clamped", call(w, scales, x, activation="clamp", clamp_min=-1.0, clamp_max=2.0)
    yield "3-D", call(w, scales, x.view(1, 3, 16))


@pytest.mark.parametrize("case", [pytest.param(args, id=name) for name, args in layers()])
def test_every_kind_of_layer(case: tuple[Any, ...]) -> None:
    torch.library.opcheck(_ops.qlinear.default, case, test_utils=EVERY)


def test_it_sees_a_rule_that_tells_another_shape() -> None:
    """The utilities look: a rule that is wrong, as planted, is told."""
    (args,) = [args for name, args in layers() if name == "4 bits"]
    library = torch.library.Library("pyquant", "FRAGMENT")
    library.define("planted(Tensor x) -> Tensor", tags=())
    library.impl("planted", lambda x: x.new_zeros(x.shape[0], 2), "CPU")
    torch.library.register_fake("pyquant::planted", lambda x: x.new_zeros(x.shape[0], 3), lib=library)
    try:
        with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError, match="test_faketensor"):
            torch.library.opcheck(_ops.planted.default, (args[0],), test_utils=EVERY)
    finally:
        library._destroy()
