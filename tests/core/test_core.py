"""Code types, granularities and carriers; the C++ twins hold the same numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from pyquant import ops
from pyquant.core import bounds
from pyquant.core.dtypes import INT4, INT8, KERNEL_BITS, PRODUCTS, QDTYPES, SIMULATED_BITS, UINT8, code_type, qrange
from pyquant.core.granularity import scale_shape
from pyquant.core.names import GRANULARITIES
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]


def test_code_types_hold_what_their_bits_hold():
    assert set(QDTYPES) == {"int4", "int8", "uint8"}
    for t in (INT4, INT8, UINT8):
        assert t.qmax - t.qmin == 2**t.bits - 1
        assert t.per_element * t.bits == 8
        info = torch.iinfo(t.storage)
        assert t.is_packed or (info.min, info.max) == (t.qmin, t.qmax)


def test_facts_of_code_types_agree():
    for t in (*QDTYPES.values(), *map(code_type, SIMULATED_BITS)):
        assert t.largest == max(map(abs, t.range))
        assert t.holds(*t.range)
        assert not t.holds(t.qmin - 1, t.qmax)
        assert not t.holds(t.qmin, t.qmax + 1)
        assert t.weight_name == ("weight_packed" if t.storage == torch.uint8 and t.qmin < 0 else "weight")
        for k in range(5):
            memory = torch.empty(t.columns(k), dtype=t.storage)
            assert k * t.bits <= memory.nbytes * 8 < (k + t.per_element) * t.bits or not t.native_name
    assert [code_type(bits) for bits in KERNEL_BITS] == [INT4, INT8]


def test_every_product_is_an_op_that_takes_weights_as_their_type_stores_them():
    for name, (x_type, w_type) in PRODUCTS.items():
        x = torch.full((1, 5), x_type.qmin, dtype=torch.int8)
        w = torch.full((1, 5), w_type.qmin, dtype=torch.int8)
        y = getattr(ops, name)(x, ops.pack_int4(w) if w_type.is_packed else w, out_dtype=torch.int32)
        assert y.tolist() == [[5 * x_type.qmin * w_type.qmin]]
        with pytest.raises(ArgumentError, match="'w'"):
            getattr(ops, name)(x, w.to(torch.int16), out_dtype=torch.int32)


COMPARISON = re.compile(r"bits\s*(==|!=)\s*[48]\b|bits (not )?in \((4, 8|8, 4)\)")


def test_no_code_asks_for_bits_where_the_type_of_codes_knows():
    assert COMPARISON.search("codes if s.w_bits == 4 else w")
    folders = (ROOT / "pyquant" / name for name in ("core", "numerics", "ops", "nn", "simulate", "io"))
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 50
    assert [str(path) for path in files if COMPARISON.search(path.read_text())] == []


# Of C++: any number that bits are compared with, a fact written out behind the name of a type, one of two sizes.
COMPARISON_CPP = re.compile(
    r"[bB]its\w*(\([^()]*\))?\s*([=!]=|[<>]=?)\s*\d+\b|DType::s\d\b[^?:;]*\?\s*-?\d|\?\s*(4\s*:\s*8|8\s*:\s*4)\b"
)


def test_no_cpp_asks_for_bits_where_the_type_of_codes_knows():
    for line in (
        "if (s.w_bits != 4 && s.w_bits != 8)",
        "kResident = Math::kXBits == 16 && kTileM > 8",
        "bits_of(type) < 8",
        "x == DType::s4 ? -8 : -128",
        "type == DType::s4 && !packed ? 8 : bits_of(type)",
        "bits = wide ? 8 : 4;",
    ):
        assert COMPARISON_CPP.search(line), line
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert len(files) > 100
    assert [(str(p), m[0]) for p in files for m in COMPARISON_CPP.finditer(p.read_text())] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, True, True), (-127, 127)),
        ((8, True, False), (-128, 127)),
        ((8, False, True), (-128, 127)),
        ((8, False, False), (-128, 127)),
        ((4, True, True), (-7, 7)),
        ((4, True, False), (-8, 7)),
        ((4, False, True), (-8, 7)),
        ((4, False, False), (-8, 7)),
    ],
)
def test_qrange(arguments, expected):
    assert qrange(*arguments) == expected


@pytest.mark.parametrize("bits", [0, 1, 9, 15, 17, 32])
def test_qrange_refuses_other_bits(bits):
    with pytest.raises(ArgumentError) as caught:
        qrange(bits)
    assert caught.value.argument == "bits"


@pytest.mark.parametrize(
    ("granularity", "shape", "group", "expected"),
    [
        ("per_tensor", (), 0, (1,)),
        ("per_tensor", (3, 4), 0, (1,)),
        ("per_token", (3, 4), 0, (3,)),
        ("per_channel", (2, 3, 4), 0, (2, 3)),
        ("per_token", (4,), 0, ()),
        ("per_group", (3, 8), 8, (3, 1)),
        ("per_group", (3, 8), 1, (3, 8)),
        ("per_group", (3, 0), 4, (3, 0)),
        ("per_group", (8,), 2, (4,)),
    ],
)
def test_scale_shape(granularity, shape, group, expected):
    assert granularity in GRANULARITIES
    assert scale_shape(granularity, shape, group) == expected


@pytest.mark.parametrize(
    ("granularity", "shape", "group", "argument"),
    [
        ("rows", (3, 4), 0, "granularity"),
        ("per_token", (), 0, "shape"),
        ("per_group", (), 2, "shape"),
        ("per_group", (3, 8), 3, "group_size"),
        ("per_group", (3, 8), 0, "group_size"),
        ("per_group", (3, 8), -8, "group_size"),
        ("per_group", (3, 8), 16, "group_size"),
        ("per_token", (3, 8), 8, "group_size"),
        ("per_tensor", (3, 8), 1, "group_size"),
    ],
)
def test_scale_shape_refuses(granularity, shape, group, argument):
    with pytest.raises(ArgumentError) as caught:
        scale_shape(granularity, shape, group)
    assert caught.value.argument == argument


def test_qtensor_is_a_pytree_of_plain_tensors():
    q = QTensor(torch.ones(2, dtype=torch.int8), torch.ones(1))
    leaves, spec = torch.utils._pytree.tree_flatten(q)
    assert len(leaves) == 3
    assert isinstance(torch.utils._pytree.tree_unflatten(leaves, spec), QTensor)
    assert not isinstance(q, torch.Tensor)
    assert q.zero_point is None


TWINS = r"""
#include <cstdio>
#include <initializer_list>
#include "core/bounds.h"
#include "core/dtype.h"
using namespace pyquant;
int main() {
  for (const CodeType& t : kCodeTypes) {
    std::printf("%s %d %d %d %d %d", t.name, t.bits, t.qmin, t.qmax, t.per_byte, t.is_packed());
    std::printf(" %lld %lld", (long long)t.largest(), (long long)t.span());
    std::printf(" %d %d %d", t.holds(t.qmin, t.qmax), t.holds(t.qmin - 1, t.qmax), t.holds(t.qmin, t.qmax + 1));
    for (int64_t k = 0; k < 5; ++k) std::printf(" %lld", (long long)columns_of(t.type, k));
    std::printf(" %s %d\n", name_of(t.type), bits_of(t.type) * t.per_byte);
  }
  for (const Product& p : kProducts) std::printf("gemm_%s%s\n", name_of(p.x), name_of(p.w));
  for (int64_t bits = 0; bits < 17; ++bits)
    if (const CodeType* t = weight_type(bits)) std::printf("%lld %s\n", (long long)bits, t->name);
  for (int64_t x : {0, 7, 8, 127, 128, 255})
    for (int64_t w : {0, 7, 8, 127, 128}) std::printf("%lld\n", (long long)k_max(x, w));
  std::printf("%lld %lld\n", (long long)k_max_affine(-128, 127, 128), (long long)k_max_affine(-8, 7, 8));
}
"""


def test_cpp_twins_hold_the_same_numbers(tmp_path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source, program = tmp_path / "twins.cpp", tmp_path / "twins"
    source.write_text(TWINS)
    subprocess.run([compiler, "-std=c++17", f"-I{ROOT / 'csrc'}", "-o", program, source], check=True, timeout=120)
    lines = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    expected = [
        " ".join(
            map(
                str,
                (
                    t.native_name,
                    t.bits,
                    t.qmin,
                    t.qmax,
                    t.per_element,
                    int(t.is_packed),
                    t.largest,
                    t.qmax - t.qmin,
                    1,
                    0,
                    0,
                    *map(t.columns, range(5)),
                    t.native_name,
                    8,
                ),
            )
        )
        for t in QDTYPES.values()
    ]
    expected += [*PRODUCTS, *(f"{bits} {code_type(bits).native_name}" for bits in KERNEL_BITS)]
    expected += [str(bounds.k_max(x, w)) for x in (0, 7, 8, 127, 128, 255) for w in (0, 7, 8, 127, 128)]
    expected += [f"{bounds.k_max_affine(-128, 127, 128)} {bounds.k_max_affine(-8, 7, 8)}"]
    assert lines == expected
