"""Bugs in the specification of fake quantisation, each one edit, and the law that must notice it."""

from __future__ import annotations

import fake_laws
import laws
import problems
from mutants import edit, register

from pyquant import numerics


def forward(seed: int) -> None:
    for granularity in laws.GRANULARITIES:
        for offset in range(3):
            fake_laws.normal(numerics, granularity, seed + offset)


def catalogue(seed: int) -> None:
    for granularity in laws.GRANULARITIES:
        for values in problems.VALUES:
            fake_laws.catalogue(numerics, values, granularity, seed)


def backward(seed: int) -> None:
    for granularity in laws.GRANULARITIES:
        for offset in range(3):
            fake_laws.backward(numerics, granularity, seed + offset)


def sums(seed: int) -> None:
    fake_laws.sums(numerics, seed)


EDITS = {
    forward: [
        (
            "v, torch.round(v), low, high",
            "v, torch.floor(v + 0.5), low + 1, high",
            "mask off by one at the lower limit",
        ),
        ("(qmax - offset)", "(qmax + offset)", "zero point with the wrong sign"),
        (
            "return y, pack_mask((rounded >= low) & (rounded <= high))",
            "return y, pack_mask((rounded > low) & (rounded <= high))",
            "the outermost code counts as clipped",
        ),
        ("[1, 2, 4, 8, 16, 32, 64, 128]", "[128, 64, 32, 16, 8, 4, 2, 1]", "bits in the other order"),
        ("F.pad(flat, (0, -flat.numel() % 8))", "F.pad(flat, (0, -flat.numel() % 8), value=1)", "tail bits not zero"),
        ("_, rounded, low, high = _steps", "rounded, _, low, high = _steps", "mask of the value before rounding"),
        (
            "granularity, group_size, x.dtype)\n    _, rounded",
            "granularity, group_size).to(torch.bfloat16).to(x.dtype)\n    _, rounded",
            "rounded twice",
        ),
    ],
    catalogue: [
        (
            "y = dequantize(codes, scale, None if symmetric else zero_point, granularity, group_size, x.dtype)",
            "y = dequantize(codes, scale, None, granularity, group_size, x.dtype)",
            "dynamic zero point dropped",
        ),
        (
            "quantize_dynamic(x, granularity, group_size, symmetric, qmin, qmax)",
            "quantize_dynamic(x.nan_to_num(), granularity, group_size, symmetric, qmin, qmax)",
            "NaN made plausible",
        ),
    ],
    backward: [
        (
            "torch.where(inside, rounded - v, clipped)",
            "torch.where(inside, v - rounded, clipped)",
            "gradient of the scale with the wrong sign inside",
        ),
        (
            "torch.where(inside, rounded - v, clipped)",
            "torch.where(inside, rounded - v, 0.0 * clipped)",
            "what is clipped does not pull the scale",
        ),
        (
            "torch.where(inside, rounded - v, clipped)",
            "rounded.clamp(low, high) - v",
            "slope of a clipped element as if it were inside",
        ),
        (
            "torch.where(inside.reshape(x.shape), grad, 0.0)",
            "grad",
            "clipped elements keep their gradient",
        ),
        (
            "torch.where(unpack_mask(mask, tuple(grad.shape)), grad",
            "torch.where(~unpack_mask(mask, tuple(grad.shape)), grad",
            "mask inverted",
        ),
        ("& 1\n", "& 3\n", "neighbouring bit read too"),
    ],
    sums: [
        ("BLOCK_LANES: Final = 64", "BLOCK_LANES: Final = 32", "half of the lanes"),
        ("BLOCK: Final = 1024", "BLOCK: Final = 2048", "blocks of another size"),
    ],
}
LANES = [
    (
        "lanes[..., 0::2] + lanes[..., 1::2]",
        "lanes[..., : lanes.shape[-1] // 2] + lanes[..., lanes.shape[-1] // 2 :]",
        "tree folds halves",
    ),
    ("for i in range(rows.shape[-2])", "for i in reversed(range(rows.shape[-2]))", "lanes added in descending order"),
]

for _check, _edits in EDITS.items():
    for _old, _new, _name in _edits:
        register(edit("numerics.fake_quantize", _old, _new), _check, name=_name, area="numerics.fake_quantize")
for _old, _new, _name in LANES:
    register(edit("numerics.norm", _old, _new), sums, name=_name, area="numerics.norm")
