"""Costs as a text of the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nwise.checks import hint
from nwise.schedule import PAPER, TRANSFORMER, Costs

__all__ = ["PRESETS", "parse_costs", "read_file"]

PRESETS = {"paper": PAPER, "transformer": TRANSFORMER}


def parse_costs(text: str, *needed: str) -> Costs:
    """Parse costs from a text, as on the command line.

    Args:
        text: ``"paper"`` or ``"transformer"``; pairs like ``"forward=1,head=0.5,input_grad=1,weight_grad=1"``, with colons
            between the values of stages, as in ``head=0:0.5:0.5``; the leading values without any names, ``"1,0.5,1,1"``;
            a JSON object; or the path of a JSON file.
        needed: names that the text has to give beside the times, for a limit of memory.

    Raises:
        ValueError: the text is invalid, or lacks a name.

    >>> parse_costs("forward=1:2,head=0.5,input_grad=1,weight_grad=1").forward
    (1.0, 2.0)
    """
    names = [field.name for field in fields(Costs)]
    values: dict[str, Any]
    if text in PRESETS:
        values = dict.fromkeys(names[:4])
    elif text.startswith("{"):
        values = _from_json("The text", text)
    elif text.endswith(".json"):
        values = _from_json(text, read_file(Path(text), "costs"))
    else:
        values = _from_pairs(text, names)
    for name in values:
        if name not in names:
            raise ValueError(f"Costs should have names among {', '.join(names)}. Found {name!r}.{hint(name, names)}")
    for name in names[:4]:
        if name not in values:
            wanted = f"{', '.join(names[:4])}, or be one of {', '.join(PRESETS)}"
            raise ValueError(f"Costs should have {wanted}. Found no {name} in {text!r}.")
    for name in needed:
        if name not in values:
            raise ValueError(f"`costs` should give `{name}` if `memory` is limited. Found none in {text!r}.")
    return PRESETS[text] if text in PRESETS else Costs(**values)


def read_file(path: Path, option: str) -> str:
    """Read a text; raise ValueError that names the option if there is no such file, or it is not in UTF-8."""
    if not path.is_file():
        raise ValueError(f"`{option}` should be a file. Found none at {str(path)!r}; give another path.")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{option}` should be a file in UTF-8. Found {error} in {path}; convert it.") from error


def _from_pairs(text: str, names: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    parts = text.split(",")
    if len(parts) > len(names):
        raise ValueError(f"Costs should be at most {len(names)} numbers. Found {len(parts)} in {text!r}.")
    for part, place in zip(parts, names, strict=False):
        name, _, numbers = map(str.strip, part.partition("=") if "=" in text else (place, "", part))
        try:
            times = [float(number) for number in numbers.split(":")]
        except ValueError as error:
            raise ValueError(
                f"Costs should be {', '.join(PRESETS)}, or like forward=1,head=0.5,input_grad=1,weight_grad=1. Found {part!r}."
                f"{hint(text, PRESETS)}"
            ) from error
        if name in values:
            raise ValueError(f"Costs should have {name} once. Found it twice in {text!r}.")
        values[name] = times if len(times) > 1 else times[0]
    return values


def _from_json(where: str, text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} should contain JSON. Found {error}; correct it.") from error
    if not isinstance(values, dict):
        found = type(values).__name__
        raise ValueError(f"{where} should contain one JSON object of costs. Found {found}; give names and numbers.")
    return values
