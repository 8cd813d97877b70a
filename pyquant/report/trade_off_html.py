"""A TradeOff as one interactive HTML page that needs nothing else: no network, no library, its data inside."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any, Final

from pyquant.report.records.trade_off import TradeOff
from pyquant.report.trade_off_plot import scale_of

_TEMPLATE: Final = Path(__file__).with_name("trade_off.html")


def to_html(record: TradeOff) -> str:
    """The page: points with their configuration on hover or arrow keys, colours by a layer, filters, a sortable table.

    Every text of the record is data to the page: it is never read as HTML or as script.
    """
    title = html.escape(record.title)
    page = _TEMPLATE.read_text(encoding="utf-8")
    # Data last: nothing that it holds is looked at for placeholders.
    return page.replace("@@TITLE@@", title).replace("@@DATA@@", _embedded(_data(record)))


def _data(record: TradeOff) -> dict[str, Any]:
    """What the script draws; configurations as numbers into the list of formats."""
    by, unit = scale_of(record)
    index = {name: i for i, name in enumerate(record.formats)}
    return {
        "title": record.title,
        "xLabel": record.cost.text(unit),
        "xName": record.cost.name,
        "xUnit": unit,
        "xBy": by,
        "yLabel": record.quality.text(),
        "yName": record.quality.name,
        "yUnit": record.quality.unit,
        "higherIsBetter": record.higher_is_better,
        "groups": list(record.groups),
        "formats": list(record.formats),
        "points": [
            {
                "c": [index[p.configuration[group]] for group in record.groups],
                "x": p.cost,
                "y": p.quality,
                "low": p.low,
                "high": p.high,
                "measured": p.measured,
                "front": p.on_front,
                "chosen": p.chosen,
                "figures": p.figures,
            }
            for p in record.points
        ],
        "lines": [{"name": one.name, "x": one.cost, "y": one.quality} for one in record.lines],
        "pair": None if record.pair is None else [record.pair.slow, record.pair.fast, record.pair.reduction],
        "environment": record.caption,
        "notes": list(record.notes),
        "command": record.command,
    }


def _embedded(data: dict[str, Any]) -> str:
    """JSON that may stand inside <script>: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
