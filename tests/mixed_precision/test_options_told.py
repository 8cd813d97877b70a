"""The docstring of pyquant.search lists every keyword."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from pyquant.mixed_precision import search as api
from pyquant.mixed_precision.options import SearchOptions


def test_every_option_is_in_the_docstring() -> None:
    text = Path(inspect.getfile(api)).read_text()
    told = text[text.index("keywords, each with a default:") : text.index("->                 Plan")]
    missing = [field.name for field in dataclasses.fields(SearchOptions) if field.name not in told]
    assert not missing
