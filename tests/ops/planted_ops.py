"""Bugs around the ops that no result of a call shows by itself, each one edit, and the test that must notice it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mutants import edit, register
from ops import test_contract, test_tuned


def users_choices(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        test_tuned.check_that_the_users_choice_wins(Path(folder))


def pinned_schemas(seed: int) -> None:
    test_contract.test_schemas_are_pinned()


def defaults(seed: int) -> None:
    test_contract.check_defaults_of_the_wrappers()


_WRAPPER = """    out_qmin: int = -127,
    out_qmax: int = 127,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    \"\"\"Integer product of codes"""

# check: module, what it says, what the bug makes of it, the bug in words
EDITS = {
    users_choices: [
        (
            "ops.tuned",
            "(lambda: PACKAGED, lambda: cache_folder() / FILE)",
            "(lambda: cache_folder() / FILE, lambda: PACKAGED)",
            "the package's tuned table beats the user's",
        ),
        (
            "ops.tuned",
            "for path_of in (lambda: PACKAGED, lambda: cache_folder() / FILE):",
            "for path_of in (lambda: PACKAGED,):",
            "the user's tuned table is not read",
        ),
    ],
    pinned_schemas: [
        (
            "ops.schema",
            "float clamp_max=0.0, int out_qmin=-127, int out_qmax=127",
            "float clamp_max=0.0, int out_qmin=-128, int out_qmax=127",
            "a gemm_* schema has another default of out_qmin",
        ),
        (
            "ops.schema",
            'ScalarType? out_dtype=None) -> Tensor"\n)',
            'ScalarType out_dtype=half) -> Tensor"\n)',
            "a gemm_* schema has another default of out_dtype",
        ),
        (
            "ops.schema",
            "Tensor? out_scale=None, Tensor? out_zero_point=None, int group_size=0, ",
            "Tensor? out_scale=None, Tensor? out_zero_point=None, int group_size=32, ",
            "a gemm_* schema has another default of group_size",
        ),
    ],
    defaults: [
        (
            "ops.linear",
            _WRAPPER,
            _WRAPPER.replace("out_qmin: int = -127", "out_qmin: int = -128"),
            "gemm_s8s8 has another default than its schema",
        ),
    ],
}

for notice, edits in EDITS.items():
    for module, old, new, name in edits:
        register(edit(module, old, new), notice, name=name, area=module)
