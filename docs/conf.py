"""The manual: Sphinx, MyST and Furo. `make docs` builds it; warnings are errors.

The sources are the pages of the whole repository, so links between them open pages.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nwise
from nwise.app.report.explore import Choices, explore
from nwise.schedule import PAPER, TRANSFORMER

project = "nwise"
author = "the nwise authors"
copyright = "the nwise authors, Apache-2.0"
version = release = nwise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
if os.environ.get("NWISE_INTERSPHINX"):  # needs the network, which a build at home should not
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "numpy": ("https://numpy.org/doc/stable", None),
}
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/api/*.md", "experiments/**.md", "benchmarks/**.md", "*.md"]
exclude_patterns = ["AGENTS.md", "README.md", "docs/_build"]
html_theme = "furo"
html_title = f"nwise {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {"navigation_with_keys": True}
default_role = "code"  # `name` in docstrings
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
autodoc_inherit_docstrings = False  # an override without a docstring is documented in its base class
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Links are checked by tests/test_docs.py, with their anchors; records of experiments are reached from pages.
suppress_warnings = ["myst.xref_missing", "toc.not_included"]

ROOT = Path(__file__).parents[1]
EXPLORER = "explore.html"


def _prepare(app: Any, docname: str, source: list[str]) -> None:
    """Turn pages that read well on GitHub into pages of the manual."""
    del app
    here = (ROOT / docname).parent

    def target(match: re.Match[str]) -> str:
        return f"]({match[1].rstrip('/')}/README.md)" if (here / match[1] / "README.md").exists() else match[0]

    source[0] = re.sub(r"\]\(([^)#:]+)\)", target, source[0])
    if docname in ("docs/index", "docs/api/index"):  # the lists of links are the sidebar
        source[0] = re.sub(r"^(?:## (.*)\n\n)?((?:- \[.*\n(?:  .*\n)*)+)", _with_tree, source[0], flags=re.M)
    if docname == "docs/index":
        source[0] = re.sub(
            r"\[([^]]+)\]\(looking.md#the-schedule-explorer\)", rf'<a href="{EXPLORER}">\1</a>', source[0]
        )


def _with_tree(match: re.Match[str]) -> str:
    pages = re.findall(r"^- \[.*?\]\((\S+)\.md\)", match[2], re.M)
    caption = [f":caption: {match[1]}"] if match[1] else []
    return "\n".join([match[0], "```{toctree}", ":hidden:", *caption, "", *pages, "```", ""])


def _explorer(app: Any, error: Exception | None) -> None:
    """Write the schedule explorer beside the pages."""
    if error is None and app.builder.name == "html":
        costs = {"transformer": TRANSFORMER, "paper": PAPER}
        methods = ("2-wise", "local", "3-wise", "end-to-end", "end-to-end-delay-1", "gpipe", "1f1b", "zero-bubble")
        explore(Choices(methods, (2, 4, 8), (1, 2, 4, 8), costs, (0.0, 1.0)), Path(app.outdir) / "docs" / EXPLORER)
        first = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html><title>nwise</title>{first}\n")


def setup(app: Any) -> None:
    """Hooks of the manual."""
    app.connect("source-read", _prepare)
    app.connect("build-finished", _explorer)
