"""The documentation site: built without a warning, every link and anchor leads somewhere, and a browser shows it."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import browser
import pytest

import pyquant

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "site"
PACKAGES = ("sphinx", "furo", "myst_nb", "sphinx_copybutton")


def part(name: str) -> Any:
    """A module of tools/site, which is no package."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in PACKAGES:
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, str(TOOLS / "build.py"), "--out", str(folder / "html"), "--source", str(folder / "source")]
    offline = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, env={**os.environ, **offline})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


# ---- what is on it


def test_every_public_name_stands_on_one_page() -> None:
    names = [name for topic in part("api").topics() for name in topic.names.split()]
    assert sorted(names) == sorted([*pyquant.__all__, "doctor"])


def test_every_integration_has_its_page() -> None:
    folder = Path(pyquant.__file__).parent / "integrations"
    packages = {f"pyquant.integrations.{path.parent.name}" for path in folder.glob("*/__init__.py")}
    assert packages == set(part("api").modules()) - {"pyquant.ops"}


def test_the_navigation_is_the_table_of_the_landing_page() -> None:
    pages = [page for pages in part("stage").navigation().values() for page in pages]
    assert len(pages) == len(set(pages))
    in_docs = {
        path.relative_to(ROOT).as_posix() for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)
    }
    assert set(pages) == (in_docs - {"docs/index.md"}) | {"CONTRIBUTING.md", "bench/README.md"}


# ---- docstrings


def test_a_docstring_of_the_house_becomes_rst() -> None:
    lines = """Does `this`, to x_ and *args.

x, y      float [M, K], *any* stride;
          more of it.
options   keywords:
    deep  one.     wide  two.
->        the sum.
Raises ArgumentError.

Example:
    >>> 1 + 1
    2
""".splitlines()
    text = "\n".join(part("docstrings").rst(lines))
    for expected in (
        "Does ``this``, to x\\_ and \\*args.",
        "\n``x, y``\n    float [M, K], \\*any\\* stride;\n    more of it.\n",
        "\n``options``\n    keywords:\n\n    ``deep``\n        one.\n\n\n    ``wide``\n        two.\n",
        "\n**Returns**\n    the sum.\n",
        "Raises ArgumentError.",
        ".. rubric:: Example\n\n.. code-block:: pycon\n\n    >>> 1 + 1\n    2\n",
    ):
        assert expected in text, f"{expected!r} is not in\n{text}"


# ---- links


class Links(HTMLParser):
    """Addresses that a page asks for or leads to, and the places in it that an address can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.leads: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        held = dict(attributes)
        self.ids |= {value for key in ("id", "name") if (value := held.get(key))}
        address = held.get("href") or held.get("src")
        if address and tag == "a":
            self.leads.append(address)
        elif address and held.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.loads.append(address)


def broken(site: Path) -> list[str]:
    """Links and pictures of the site's pages that lead nowhere in it; files that pages would fetch from elsewhere."""
    pages = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        here = path.relative_to(site)
        wrong += [f"{here} loads {address}" for address in page.loads if urlsplit(address).scheme in ("http", "https")]
        for address in page.leads + page.loads:
            url = urlsplit(address)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if not target.is_file():
                wrong.append(f"{here} -> {address}: no such file")
            elif url.fragment and target in pages and unquote(url.fragment) not in pages[target].ids:
                wrong.append(f"{here} -> {address}: no such place")
    return wrong


def test_no_link_is_broken(site: Path) -> None:
    assert len(list(site.rglob("*.html"))) > 60
    assert broken(site) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="x"><a href="b.html">b</a><a href="#y">y</a><a href="#x">x</a>')
    (tmp_path / "c.html").write_text(
        '<img src="d.png"><script src="https://cdn.example/x.js"></script><a href="a.html#x">'
    )
    assert sorted(wrong.partition(": ")[0] for wrong in broken(tmp_path)) == [
        "a.html -> #y",
        "a.html -> b.html",
        "c.html -> d.png",
        "c.html loads https://cdn.example/x.js",
    ]


def test_the_links_of_markdown_became_pages(site: Path) -> None:
    """README links to docs/..., pages to ../README.md and to bench/: in the site all of them are pages."""
    assert 'href="docs/quickstart.html"' in (site / "README.html").read_text()
    assert 'href="../README.html' in (site / "docs" / "quickstart.html").read_text()
    assert '.md"' not in (site / "docs" / "index.html").read_text()


def test_every_public_name_is_rendered_with_its_docstring(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html")}
    everything = "\n".join(pages.values())
    for name in pyquant.__all__:
        assert f'id="pyquant.{name}"' in everything, name
    first = (inspect.getdoc(pyquant.quantize_) or "").splitlines()[0]
    assert first in everything
    for name in ("from_float", "from_codes", "kernel_info", "reference"):  # those of its own bases too
        assert f'id="pyquant.QLinear.{name}"' in everything, name


# ---- in a browser


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[tuple[browser.Page, str]]:
    """A tab, and the address of the site on a server of this machine."""
    if not (browser.CHROMIUM and browser.DRIVER):
        pytest.skip(browser.MISSING)
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser.browser() as tab:
            yield tab, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Says nothing. A browser may ask for favicon.ico before it has read which icon a page names."""

    def do_GET(self) -> None:
        if self.path != "/favicon.ico":
            return super().do_GET()
        self.send_response(204)
        self.end_headers()
        return None

    def log_message(self, *_: Any) -> None:
        pass


def test_the_first_page_leads_to_the_table(page: tuple[browser.Page, str]) -> None:
    tab, address = page
    tab.visit(f"{address}/index.html")
    tab.wait("document.querySelector('article h1')")
    assert tab.text("article h1").startswith("Documentation")
    captions = tab.run("return [...document.querySelectorAll('.sidebar-tree .caption-text')].map(e => e.textContent)")
    assert captions[:3] == ["Install", "Quantise", "Calibrate"]
    assert {"Reference", "Project"} <= set(captions)
    tab.click(".sidebar-tree a[href='quickstart.html']")
    tab.wait("document.title.startsWith('Quick start')")
    assert tab.console() == []


def test_pictures_are_shown_and_nothing_is_wider_than_the_page(page: tuple[browser.Page, str]) -> None:
    tab, address = page
    for name in ("docs/founding-experiment", "README", "docs/notebooks/mixed_precision_search"):
        tab.visit(f"{address}/{name}.html")
        shown = "[...document.querySelectorAll('article img')].map(e => [e.complete && e.naturalWidth, e.clientWidth])"
        sizes = tab.run(f"return {shown}")
        assert sizes, name
        assert all(natural > 300 and width > 300 for natural, width in sizes), (name, sizes)
        over = tab.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert over <= 0, name
    assert tab.console() == []


def test_search_finds_a_name_with_an_underscore(page: tuple[browser.Page, str]) -> None:
    tab, address = page
    tab.visit(f"{address}/docs/index.html")
    tab.type("input[name=q]", "per_token\ue007")
    tab.wait("document.querySelectorAll('#search-results li a').length > 3")
    found = tab.run("return [...document.querySelectorAll('#search-results li a')].map(e => e.getAttribute('href'))")
    pages = {urlsplit(link).path for link in found}
    assert {"docs/numerics.html", "api/ops.html"} & {one.lstrip("./") for one in pages}, pages


def test_a_page_of_the_reference(page: tuple[browser.Page, str]) -> None:
    tab, address = page
    tab.visit(f"{address}/api/layers.html#pyquant.QLinear")
    text = tab.run("return document.getElementById('pyquant.QLinear').closest('dl').innerText")
    assert "y = activation(x @ W.T + bias) + residual" in text
    assert "in_features: int" in text
    assert "QLinear.from_float(nn.Linear(64, 32), W8A8Dynamic())" in text
    link = tab.run("return document.getElementById('pyquant.QLinear').querySelector('a[href*=QScheme]').href")
    assert link.endswith("api/schemes.html#pyquant.QScheme")
    assert tab.console() == []


def test_a_dark_page_stays_readable(page: tuple[browser.Page, str]) -> None:
    tab, address = page
    try:
        tab.prefers("dark")
        tab.visit(f"{address}/docs/quickstart.html")
        colour = "return getComputedStyle(document.querySelector('{}')).{}"
        colours = (tab.run(colour.format("body", "backgroundColor")), tab.run(colour.format("article p", "color")))
        ground, ink = (sum(map(int, colour.split("(")[1].rstrip(")").split(",")[:3])) for colour in colours)
        assert ground < 150
        assert ink > 450
    finally:
        tab.prefers("light")
