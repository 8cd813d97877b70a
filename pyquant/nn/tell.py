"""The one warning of a conversion: what stays in floating point without having been excluded, and what was changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Final

from pyquant.errors import QuantizationWarning
from pyquant.nn.report import LayerReport

NOTEWORTHY: Final = 0.01  # share of a model's weight bytes
UNCERTAIN: Final = 0.02  # and what may as well be added (positions) is not spoken of below this share
_SHOWN: Final = 5


def warn_of_floats(
    records: Sequence[LayerReport], wished: Iterable[str], what: str = "quantize_", stacklevel: int = 3
) -> None:
    """One QuantizationWarning of the report's records, or none; `wished` are names that the user asks to leave."""
    leave = set(wished)
    left = [record for record in records if record.scheme == "float" and record.name not in leave]
    if sum(record.share for record in left if not record.is_certain) < UNCERTAIN:
        left = [record for record in left if record.is_certain]
    sentences = []
    share = sum(record.share for record in left)
    if share >= NOTEWORTHY:
        sentences.append(f"{share:.0%} of the weight bytes stay in floating point: " + "; ".join(_groups(left)))
    changed = [record for record in records if record.scheme != "float" and record.reason]
    if changed:
        sentences.append(f"{len(changed)} layer(s) got another scheme: " + "; ".join(_groups(changed)))
    if sentences:
        advice = "pyquant.quantization_report(model) lists every layer"
        warnings.warn(f"{what}: {'. '.join(sentences)}. {advice}", QuantizationWarning, stacklevel=stacklevel)


def _groups(records: Sequence[LayerReport]) -> list[str]:
    """Records of one kind and reason in one line, the largest first."""
    groups: dict[tuple[str, str], list[LayerReport]] = {}
    for record in records:
        groups.setdefault((record.kind, record.reason), []).append(record)
    by_size = sorted(groups.items(), key=lambda item: -sum(record.share for record in item[1]))
    lines = []
    for (kind, reason), members in by_size[:_SHOWN]:
        name = members[0].name or "the model itself"
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        lines.append(f"{name}{more} ({kind}, {sum(record.share for record in members):.1%}): {reason}")
    hidden = sum(len(members) for _, members in by_size[_SHOWN:])
    return lines + ([f"{hidden} more"] if hidden else [])
