"""The page of a trade-off, in a real browser: notes, filters, sorting, keys, and nothing of the data is executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, MISSING, Page, browser
from trade_offs import NASTY, seed_trade_off, small_trade_off

from pyquant.report.trade_off_html import to_html

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def seed_page(tab: Page, tmp_path: Path) -> Iterator[Page]:
    """The page of 729 points; afterwards the console must be empty."""
    tab.console()
    path = tmp_path / "page.html"
    path.write_text(to_html(seed_trade_off()), encoding="utf-8")
    tab.open(path)
    yield tab
    assert tab.console() == []


def shown(page: Page) -> int:
    return int(page.run("return document.querySelectorAll('circle.point:not([display])').length"))


def test_hovering_shows_the_configuration_and_its_figures(seed_page: Page) -> None:
    made = seed_trade_off()
    assert shown(seed_page) == 729
    assert not seed_page.run("return document.getElementById('tip').checkVisibility()")
    assert made.pair is not None
    for i in (made.pair.slow, made.pair.fast, 0):
        seed_page.hover(f'circle.point[data-i="{i}"]')
        note = seed_page.text("#tip").replace("\u202f", "")
        point = made.points[i]
        for group, name in point.configuration.items():
            assert f"{group} {name}" in note
        assert f"latency {point.cost / 1e3:.5g}"[:12] in note
        assert f"capacity {point.quality:.0f} bits" in note
        assert ("on the front" in note) == point.on_front
    seed_page.hover("h1")
    assert not seed_page.run("return document.getElementById('tip').checkVisibility()")


def test_filters_select_points_and_rows_and_can_be_cleared(seed_page: Page) -> None:
    made = seed_trade_off()
    seed_page.click("#filter-0 option:nth-child(3)")
    seed_page.click("#filter-5 option:nth-child(4)")
    assert shown(seed_page) == 81
    assert seed_page.text("#count") == "81 of 729 configurations shown"
    rows = seed_page.run("return [...document.querySelectorAll('#rows tbody tr')].map(r => +r.dataset.i)")
    assert len(rows) == 81
    for i in rows:
        formats = list(made.points[i].configuration.values())
        assert (formats[0], formats[5]) == ("int8", "int4")
    seed_page.click("#clear")
    seed_page.click("#only-front")
    assert shown(seed_page) == len(made.front)
    seed_page.click("#clear")
    assert shown(seed_page) == 729


def test_the_table_sorts_by_every_column_both_ways(seed_page: Page) -> None:
    made = seed_trade_off()
    first = "return +document.querySelector('#rows tbody tr').dataset.i"
    latencies = [p.cost for p in made.points]
    assert made.points[seed_page.run(first)].cost == min(latencies)
    seed_page.click('#rows button[data-key="x"]')
    assert made.points[seed_page.run(first)].cost == max(latencies)
    seed_page.click('#rows button[data-key="y"]')
    assert made.points[seed_page.run(first)].quality == 258048
    assert seed_page.run("return document.querySelector('th[aria-sort=ascending]').textContent")[:8] == "capacity"
    seed_page.click('#rows button[data-key="y"]')
    assert made.points[seed_page.run(first)].quality == 1032192


def test_arrow_keys_walk_through_the_points_and_are_spoken(seed_page: Page) -> None:
    made = seed_trade_off()
    by_latency = sorted(made.points, key=lambda p: p.cost)
    spoken = "return document.getElementById('spoken').textContent"
    seed_page.type("#plot", "\ue011")  # Home
    assert seed_page.run(spoken).startswith("all int4: 10.60 ms")
    seed_page.type("#plot", "\ue014")  # right
    words = " ".join(by_latency[1].configuration.values())
    assert seed_page.run(spoken).startswith(words)
    seed_page.type("#plot", "\ue010")  # End
    assert seed_page.run(spoken).startswith("all fp32: 20 ms")
    seed_page.type("#plot", "\ue00c")  # Escape
    assert not seed_page.run("return document.getElementById('tip').checkVisibility()")


def test_colours_follow_the_chosen_layer_in_light_and_dark(seed_page: Page) -> None:
    fill = "return getComputedStyle(document.querySelector('circle[data-i=\"2\"]')).fill"
    light = seed_page.run(fill)
    legend = "return [...document.querySelectorAll('#legend span')].map(s => s.textContent)"
    assert seed_page.run(legend) == [f"{n} of 6 not in fp32" for n in (0, 3, 6)]  # no layer is the first by itself
    shades = "return new Set([...document.querySelectorAll('circle.point')].map(c => getComputedStyle(c).fill)).size"
    assert seed_page.run(shades) == 7
    seed_page.click("#colour option:nth-child(7)")
    assert seed_page.run(fill) != light  # point 2: fp32 fp32 fp32 fp32 fp32 int4
    assert seed_page.run(shades) == 3
    seed_page.prefers("dark")
    dark = "return getComputedStyle(document.body).backgroundColor"
    assert seed_page.run(dark) != "rgb(255, 255, 255)"
    seed_page.prefers("light")
    assert seed_page.run(dark) == "rgb(255, 255, 255)"


def test_what_is_marked_is_explained_and_no_column_is_cut_off(tab: Page, tmp_path: Path) -> None:
    made = seed_trade_off()
    figures = dict.fromkeys(("size_bytes", "effective_bits", "predicted_loss", "quality", "drop", "end_to_end_us"), 4e5)
    points = tuple(replace(p, chosen=i == 7, figures=figures) for i, p in enumerate(made.points))
    path = tmp_path / "chosen.html"
    path.write_text(to_html(replace(made, points=points)), encoding="utf-8")
    tab.open(path)
    legend = tab.run("return [...document.querySelectorAll('#legend em')].map(s => s.textContent)")
    assert [text.split()[0] for text in legend] == ["front:", "chosen"]
    assert tab.run("return [...document.querySelectorAll('#rows tr.chosen')].map(r => +r.dataset.i)") == [7]
    assert "chosen" in tab.text("#rows tr.chosen td:last-child")
    assert tab.run("const s = document.querySelector('.scroll'); return s.scrollWidth <= s.clientWidth")


def test_texts_of_the_record_are_never_executed(tab: Page, tmp_path: Path) -> None:
    tab.console()
    path = tmp_path / "page.html"
    path.write_text(to_html(small_trade_off()), encoding="utf-8")
    tab.open(path)
    assert tab.run("return document.title") != "broken"
    assert tab.run("return document.scripts.length") == 2
    assert tab.run("return document.querySelectorAll('i').length") == 0
    tab.hover('circle.point[data-i="1"]')
    assert "<i>" in tab.text("#tip")
    assert NASTY.split("\u2028")[0].strip() in tab.text("#notes")
    assert tab.console() == []


def test_a_search_over_many_groups_is_drawn_too(tab: Page, tmp_path: Path) -> None:
    from trade_offs import CAPACITY, LATENCY

    from pyquant.report.records.trade_off import TradeOffPoint, trade_off

    groups = [f"encoder.layer.{i}" for i in range(36)]
    points = [
        TradeOffPoint({g: "int8" if k < i else "fp32" for k, g in enumerate(groups)}, 100.0 - i, 0.01 * i)
        for i in range(37)
    ]
    made = trade_off(points, "many", LATENCY, CAPACITY, higher_is_better=False, formats=("fp32", "int8"))
    path = tmp_path / "page.html"
    path.write_text(to_html(made), encoding="utf-8")
    tab.console()
    tab.open(path)
    assert shown(tab) == 37
    tab.hover('circle.point[data-i="5"]')
    assert "5 of 36 groups" in tab.text("#tip")
    assert tab.console() == []
