"""The fuzz targets for seconds: every seed, and seeds that hypothesis bends."""

from __future__ import annotations

import sys

import pytest
from fuzz import targets
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyquant.errors import CheckpointError
from pyquant.io import manifest

pytest.importorskip("yaml", reason="PyYAML is not installed")


def seeds(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((targets.SEEDS / name).iterdir())]


@pytest.mark.parametrize("name", targets.TARGETS)
def test_seeds(name: str) -> None:
    found = seeds(name)
    assert len(found) >= 2
    for data in found:
        if name in ("recipe", "config") and sys.version_info < (3, 11) and data[:1] == b"\x02":
            continue
        targets.TARGETS[name](data)


def test_seeds_reach_what_lies_behind_the_parsers() -> None:
    """At least one seed of each kind is accepted: a fuzzer that only ever meets refusals tests nothing else."""
    manifest.parse(seeds("manifest")[0])
    for name in ("recipe", "config", "tuned"):
        bent = seeds(name)[0]
        targets.TARGETS[name](bent)
    with pytest.raises(CheckpointError):
        manifest.parse(seeds("manifest")[0][:-1])


@pytest.mark.parametrize("name", targets.TARGETS)
def test_bent_seeds(name: str) -> None:
    edit = st.tuples(
        st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8) | st.sampled_from([b"[", b"9" * 40, b"&a "])
    )

    @given(st.sampled_from(seeds(name)), st.lists(edit, max_size=4))
    @settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
    def run(data: bytes, edits: list[tuple[float, int, bytes]]) -> None:
        for place, cut, piece in edits:
            at = int(place * len(data))
            data = data[:at] + piece + data[at + cut :]
        targets.TARGETS[name](data)

    run()
