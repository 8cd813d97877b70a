"""Sphinx's configuration of the site; build.py calls it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import docstrings

import pyquant

project, author = "pyquant", "the pyquant authors"
version = release = pyquant.__version__
html_title = f"pyquant {release}"
root_doc = "docs/index"
extensions = ["sphinx.ext.autodoc", "myst_nb", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}

# Pages are read as GitHub reads them: links of headings, nothing that only this site would understand.
myst_heading_anchors = 4
myst_enable_extensions: list[str] = []
nb_execution_mode = "off"  # notebooks come with their output; the suite executes them
highlight_language = "none"
smartquotes = False  # names in quotes are code as often as not
suppress_warnings = ["myst.header"]  # generated tables skip levels of headings
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # what torch says of a method that a layer overrides stands in torch's documentation
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
templates_path: list[str] = []


def setup(app: Any) -> None:
    """Docstrings in the house's form become reStructuredText."""
    app.connect("autodoc-process-docstring", docstrings.process)
