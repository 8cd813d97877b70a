"""Builds the documentation site: `make docs`, or python tools/site/build.py [--out FOLDER] [--source FOLDER].

The Markdown pages of the repository are its only source. They are laid out in a folder as they lie in the repository,
so that their links hold, beside generated pages of the public names; Sphinx makes the site of that. A warning is an
error. Nothing is fetched: what is built can be read without a network, by double-clicking too.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

NEEDED = ("sphinx", "furo", "myst_nb", "sphinx_copybutton")
ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# The pages lie under docs/, as in the repository: the site's first address leads there.
FIRST = '<!doctype html><meta charset="utf-8"><title>pyquant</title><meta http-equiv="refresh" content="0; url={0}">'


def build(out: Path, source: Path) -> int:
    """Stage the pages and build them into out. -> Sphinx's exit status."""
    sys.path.insert(0, str(ROOT))  # the names are those of this checkout
    from sphinx.cmd.build import main as sphinx_build
    from stage import stage

    stage(source)
    shutil.rmtree(out, ignore_errors=True)
    words = ["-W", "--keep-going", "-q", "-E", "-j", "auto", "-c", str(HERE), "-d", str(source.parent / "doctrees")]
    status: int = sphinx_build([*words, str(source), str(out)])
    (out / "index.html").write_text(FIRST.format("docs/index.html"))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site" / "html", help="where the site goes")
    parser.add_argument("--source", type=Path, default=ROOT / "build" / "site" / "source", help="where pages are laid")
    args = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"pyquant: the site needs {', '.join(missing)}: `make docs` installs them", file=sys.stderr)
        return 2
    status = build(args.out, args.source)
    print(f"pyquant: {args.out / 'index.html'}" if status == 0 else "pyquant: the site has faults (above)")
    return status


if __name__ == "__main__":
    sys.exit(main())
