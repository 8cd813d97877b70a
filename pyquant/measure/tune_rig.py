"""The rig of `pyquant tune`: launches rows of the kernel table on torch's memory and checks what they write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.core.scheme import QScheme
from pyquant.errors import UnsupportedError
from pyquant.measure.exact import check_rows, is_exact, sqnr_db
from pyquant.measure.floors import random_codes
from pyquant.measure.gpu_timing import Rotating, copies_beyond_cache, copies_of, held_bytes
from pyquant.measure.timing import Candidate, Clock, make_clock
from pyquant.measure.tune import TORCH, USUAL, Problem
from pyquant.nn.qlinear import QLinear
from pyquant.numerics.gemm import gemm as specification
from pyquant.numerics.pack import pack_int4
from pyquant.ops import plan

_DTYPES: Final = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "s8": torch.int8}
_COLD_BYTES: Final = 256 << 20  # weights rotate over this much memory, more than any last-level cache holds
_NEAR_DB: Final = 35.0  # of a weight-only product against the float one of the same weights, in 16 bits
_FLOAT_ERROR: Final = 0.02  # of the largest result: float products have a tolerance, a wrong one is far off
_CODES: Final = {"s8": 127, "s4": 7, "u8": 127}
Launch = Callable[..., None]


class GpuRig:
    """A CUDA device of torch, which becomes the current one. Raises UnsupportedError when torch sees no GPU, or the
    kernels were not built.

    layer_clock  'cuda-events': as in eager mode, what the launches take counts; 'cuda-graph': captured.
    """

    def __init__(self, index: int = 0, layer_clock: str = "cuda-events") -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError("tune measures on a GPU, and torch sees none here", [])
        torch.cuda.set_device(index)  # where streams, events and graphs are made
        native = plan._native()
        if not native.build_info()["kernels_compiled"]:
            raise UnsupportedError("tune measures compiled kernels, and this build has none", [])
        self.device: Mapping[str, Any] = native.device_info(index)
        self.clock: Clock = make_clock("cuda-graph")  # no launch gaps
        self.layer_clock: Clock = make_clock(layer_clock)
        self._memory = torch.device("cuda", index)

    def layer(self, n: int, k: int, scheme: QScheme, m: int, dtype: torch.dtype) -> tuple[Candidate, Candidate, bool]:
        """A whole layer, torch's, and whether the first is right."""
        return layer_pair(n, k, scheme, m, dtype, self._memory)

    def prepare(self, problem: Problem) -> Callable[[str], tuple[Candidate, bool]]:
        """Memory for a problem, and how to run a row on it."""
        native = plan._native()
        return Bench(problem, self._memory, native.gemm, native).build


def layer_pair(
    n: int, k: int, scheme: QScheme, m: int, dtype: torch.dtype, device: torch.device
) -> tuple[Candidate, Candidate, bool]:
    """Calls of a layer of random weights and of torch's Linear, each rotating over copies that no cache holds together;
    and whether the layer has the bits of its specification (weight-only: is near them)."""
    linear = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
    x = torch.randn(m, k, device=device, dtype=dtype)
    ranges: dict[str, Any] = {"input_scale": 0.05} if scheme.is_static else {}
    if scheme.is_static and scheme.inputs is not None and not scheme.inputs.symmetric:
        ranges["input_zero_point"] = 0
    layer = QLinear.from_float(linear, scheme, **ranges)
    ours, theirs = ([*copies_of(one, _copies(one, device))] for one in (layer, linear))
    if scheme.is_integer:
        right = is_exact(layer, x)
    else:
        with torch.inference_mode():
            right = sqnr_db(layer.to_float()(x), layer(x)) > _NEAR_DB
    return Rotating([partial(one, x) for one in ours]), Rotating([partial(one, x) for one in theirs]), right


def _copies(module: nn.Module, device: torch.device) -> int:
    return copies_beyond_cache(held_bytes(module), _COLD_BYTES) if device.type == "cuda" else 1


class Bench:
    """Operands of one problem on one device, and the check of what a launch writes.

    launch  pyquant._native.gemm, or a stand-in.
    """

    def __init__(self, problem: Problem, device: torch.device, launch: Launch, native: Any) -> None:
        self.problem, self.device, self._launch, self._native = problem, device, launch, native
        p = {**USUAL, **problem}
        self.m, self.n, self.k = int(p["m"]), int(p["n"]), int(p["k"])
        self.group_size, self.is_float = int(p["group_size"]), p["x"] in ("f16", "bf16")
        self.is_weight_only = self.is_float and p["w"] in _CODES
        self.x_type, self.w_type, self.layout, self.x_packed = p["x"], p["w"], p["w_layout"], bool(p["x_packed"])
        ldx = int(p.get("ldx", self.k))
        self.x = self._values(self.x_type, self.m, ldx)
        self.w = self._values(self.w_type, self.n, int(p.get("ldw", self.k)))
        groups = self.k // self.group_size if self.group_size else 1
        self.x_scale = torch.rand(self.m if p.get("per_token_scale") else 1, dtype=torch.float32, device=device) + 0.5
        self.w_scale = (torch.rand(self.n, groups, dtype=torch.float32, device=device) + 0.5) / 127
        self.x_zero_point: Tensor | None = None
        self.w_sum: Tensor | None = None
        if p.get("has_zero_point"):
            count = self.m if p.get("per_token_zero_point") else 1
            self.x_zero_point = torch.randint(-5, 6, (count,), device=device, dtype=torch.int32)
            self.w_sum = self.w[:, : self.k].reshape(self.n, groups, -1).sum(-1, dtype=torch.int32).contiguous()
        kind = p.get("residual")
        self.residual = (
            None if kind is None else torch.randn(self.m, self.n, dtype=torch.float32, device=device).to(_DTYPES[kind])
        )
        self.out = torch.empty(self.m, self.n, device=device, dtype=_DTYPES[p["out"]])
        stored = self._stored()
        copies = max(1, min(64, _COLD_BYTES // max(1, stored.numel() * stored.element_size())))
        self.stored = [stored, *(stored.clone() for _ in range(copies - 1 if device.type == "cuda" else 0))]
        self.x_stored = pack_int4(self.x) if self.x_packed else self.x
        self._expected: Tensor | None = None

    def build(self, name: str) -> tuple[Candidate, bool]:
        """The candidate of a row or of torch's product, and whether its result is right."""
        run = self._torch() if name == TORCH else self._row(name)
        self.out.fill_(0 if self.out.dtype == torch.int8 else float("nan"))
        run()
        return run, self._is_right()

    def _row(self, name: str) -> Candidate:
        index = self.device.index or 0
        needed = self._native.workspace_bytes(name, self.problem, index)
        workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device=self.device)
        optional = {"x_zero_point": self.x_zero_point, "w_sum": self.w_sum, "residual": self.residual}
        fixed = {
            "x": self.x_stored.data_ptr(),
            "out": self.out.data_ptr(),
            "workspace": workspace.data_ptr(),
            **{key: tensor.data_ptr() for key, tensor in optional.items() if tensor is not None},
        }
        if not self.is_float:
            fixed["x_scale"] = self.x_scale.data_ptr()
        if not self.is_float or self.is_weight_only:
            fixed["w_scale"] = self.w_scale.data_ptr()

        def run(operands: Mapping[str, int]) -> Tensor:
            stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
            self._launch(name, self.problem, operands, {}, index, stream)
            return workspace  # keeps it alive as long as the candidate

        return Rotating([partial(run, {**fixed, "w": weights.data_ptr()}) for weights in self.stored])

    def _torch(self) -> Candidate:
        if self.is_weight_only:
            return Rotating([partial(self._by_framework, stored) for stored in self.stored])
        x, weights = self.x[:, : self.k], (stored[:, : self.k].t() for stored in self.stored)
        return Rotating([partial(torch.mm, x, w, out=self.out) for w in weights])

    def _by_framework(self, stored: Tensor) -> None:
        """As weight-only layers of many rows run: dequantised, then torch's product."""
        codes = ops.unpack_int4(stored, self.k) if self.w_type == "s4" else stored[:, : self.k]
        scale = self.w_scale if self.group_size else self.w_scale.reshape(-1)
        how = "per_group" if self.group_size else "per_channel"
        real = ops.dequantize(codes, scale, None, how, self.group_size, self.x.dtype)
        torch.mm(self.x[:, : self.k], real.t(), out=self.out)
        if self.residual is not None:
            self.out.add_(self.residual)

    def _is_right(self) -> bool:
        rows = check_rows(self.m)
        got = self.out[rows].cpu()
        if self._expected is None:
            self._expected = self._reference(rows)
        if not self.is_float:
            return torch.equal(got, self._expected)
        return bool((got.double() - self._expected).abs().max() <= _FLOAT_ERROR * self._expected.abs().max())

    def _reference(self, rows: Tensor) -> Tensor:
        x, w = self.x[rows, : self.k].cpu(), self.w[:, : self.k].cpu()
        residual = None if self.residual is None else self.residual[rows].cpu()
        if self.is_float:
            real = w.double()
            if self.is_weight_only:
                real *= self.w_scale.cpu().double().repeat_interleave(self.group_size or self.k, 1)
            return x.double() @ real.t() + (0 if residual is None else residual.double())
        w_scale = self.w_scale.cpu() if self.group_size else self.w_scale.cpu().reshape(-1)
        return specification(
            x,
            w,
            w_scale,
            self._of_rows(self.x_scale, rows),
            self._of_rows(self.x_zero_point, rows),
            residual=residual,
            group_size=self.group_size,
            out_dtype=self.out.dtype,
        )

    @staticmethod
    def _of_rows(values: Tensor | None, rows: Tensor) -> Tensor | None:
        return None if values is None else (values[rows] if values.numel() > 1 else values).cpu()

    def _values(self, kind: str, rows: int, ld: int) -> Tensor:
        if kind in ("f16", "bf16"):
            return torch.randn(rows, ld, dtype=torch.float32, device=self.device).to(_DTYPES[kind])
        codes = random_codes((rows, ld), self.device, _CODES[kind])
        codes[:, self.k :] = 0
        return codes.abs_().to(torch.uint8) if kind == "u8" else codes

    def _stored(self) -> Tensor:
        if self.w_type != "s4":
            return self.w
        packed = pack_int4(self.w)
        if self.layout == "natural":
            return packed
        size = self._native.blocked128_bytes(self.n, self.k)
        blocked = torch.empty(size, dtype=torch.uint8, device=self.device)
        where = self.device.index or 0 if self.device.type == "cuda" else None
        self._native.pack_blocked128(packed.data_ptr(), self.n, self.k, packed.shape[1] * 2, blocked.data_ptr(), where)
        return blocked
