"""One HTML file that opens offline: texts, numbers, styles and scripts are all in it."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from nwise.app.records import plain, write_text
from nwise.checkpoint import PARTIAL
from nwise.checks import needed


class HtmlCell(str):
    """A table cell that is already HTML; all other texts are escaped."""

    __slots__ = ()


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", kind: str = "") -> str:
    """Build a table whose first column names the rows."""
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    lines = []
    for first, *others in rows:
        cells = "".join(cell if isinstance(cell, HtmlCell) else f"<td>{html.escape(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    style = f' class="{kind}"' if kind else ""
    inside = f"{title}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide" tabindex="0"><table{style}>{inside}</table></div>'


def embed_json(name: str, value: Any) -> str:
    """Embed data for the page's script; ``<`` is escaped, so no text in it can end the element."""
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def asset(name: str) -> str:
    """Return a text of the folder `assets`."""
    return (files("nwise.app.report") / "assets" / name).read_text(encoding="utf-8")


def write_page(path: Path, title: str, body: str, script: str, data: Any) -> None:
    """Write a page with data, and a script of the folder `assets` that draws them."""
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<style>{asset('page.css')}</style></head><body>",
        f'<a class="skip" href="#content">Skip to the content</a><main id="content">{body}</main>',
        embed_json("data", data),
        f"<script>{plotly()}</script>",
        *(f"<script>{asset(name)}</script>" for name in ("gantt.js", script)),
        "</body></html>\n",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "\n".join(parts))


def plotly() -> str:
    """Return the source of plotly; raise an ImportError that names the extra if it is missing."""
    return str(needed("plotly.offline", "app", "A page").get_plotlyjs())


def check_page(path: Path) -> None:
    """Raise early, before any work for the page, if its path is unusable or plotly is missing."""
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(f"A page should be a file that ends in .html. Found {str(path)!r}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise OSError(
            f"A page should be in a folder that can be written to. Found {str(path)!r}: {error}; give another path."
        ) from error
    plotly()
