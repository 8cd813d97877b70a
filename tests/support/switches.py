"""Integrations that are on while the tests of a module run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def on(integration: Any) -> Any:
    """A fixture for every test of the module that names it: enable() before, disable() after."""

    @pytest.fixture(autouse=True, name="_enabled")
    def enabled() -> Iterator[None]:
        integration.enable()
        yield
        integration.disable()

    return enabled
