"""Hostile input: every configuration, command line, schedule and file runs or ends in a sentence; nothing hangs.

``NWISE_FUZZ=40 pytest tests/test_fuzz.py`` tries forty times as many examples as usual, more than ten thousand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from nwise.app import cli
from nwise.app.cli.costs import parse_costs
from nwise.app.recipes import RECIPES, Recipe, from_json, recipe, to_json
from nwise.schedule import Schedule
from nwise.schedule.find import method_schedule
from nwise.schedule.validation import validate

TIMES = int(os.environ.get("NWISE_FUZZ", "1"))
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # examples take a second each
CODES = {0, 1, 2, 75}

NUMBERS = st.sampled_from([-7, -1, 0, 1, 2, 3, 5, 17, 10**4, 10**9, 10**30, 0.5, -0.5, 1e-300, 1e300])
NASTY = st.sampled_from(
    ["", " ", "nan", "inf", "-inf", "None", "\x00", "é", "../..", "/", "/dev/null", "[red]", "a,b;c", "1,"]
)
VALUES = st.one_of(NUMBERS, NASTY, st.text(max_size=8), st.none(), st.booleans())
JSONS: Any = st.recursive(
    VALUES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)


def spoilt(value: Any, place: int, new: Any, action: str) -> Any:
    """A JSON value, one of whose entries at any depth is replaced, taken away or renamed."""
    places: list[tuple[Any, Any]] = []

    def collect(inner: Any) -> None:
        for key in inner if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ():
            places.append((inner, key))
            collect(inner[key])

    copy = json.loads(json.dumps(value))
    collect(copy)
    if not places:
        return new
    inner, key = places[place % len(places)]
    if action == "drop":
        del inner[key]
    elif action == "rename" and isinstance(inner, dict):
        inner[str(new)] = inner.pop(key)
    else:
        inner[key] = new
    return copy


SPOILS = st.lists(st.tuples(st.integers(0, 999), JSONS, st.sampled_from(["replace", "drop", "rename"])), max_size=3)


def a_sentence(error: Exception) -> None:
    """What it should be."""
    assert "should" in str(error), error


@settings(max_examples=60 * TIMES)
@given(st.sampled_from(sorted(RECIPES)), SPOILS)
def test_mutated_configurations_load_or_raise(name: str, spoils: list[Any]) -> None:
    config = to_json(recipe(name))
    for spoil in spoils:
        config = spoilt(config, *spoil)
    try:
        found = from_json(config)
    except (ValueError, TypeError) as error:
        a_sentence(error)
        return
    if isinstance(found, Recipe):
        assert from_json(json.loads(json.dumps(to_json(found)))) == found


def command(arguments: list[str], folder: Path) -> None:
    """Run a command as at a terminal: it ends with a known code, and says what is wrong in a line."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                code: Any = cli.run(arguments)
            except SystemExit as error:  # what tyro does
                code = error.code
    finally:
        os.chdir(before)
    said = err.getvalue()
    assert code in CODES, arguments
    assert "Traceback" not in said + out.getvalue()
    assert code == 0 or said.strip(), (arguments, code)


@cache
def options() -> dict[str, list[str]]:
    """Of every command, as its help names them."""
    found = {}
    for name in ("train", "compare", "evaluate", "export", "recipes", "plan", "schedule", "flow", "report"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            cli.run([name, "--help"])
        found[name] = sorted({word.strip(",") for word in out.getvalue().split() if word.startswith("--")})
    return found


WORDS = st.one_of(
    VALUES.map(str),
    st.sampled_from(
        ["digits", "2-wise", "local", "end-to-end", "rotating-2", "hogwild", "credit-1,0;1,1", "local@1,end-to-end", "0.5",
         "paper", "gpipe", "1f1b", "zero-bubble", "forward=1,head=0", "x.png", "x.json", "auto", "cpu", "sgd", "best", "all"]
    ),
)  # fmt: skip
# Last, so that what runs is small; evaluation takes batches of twice the size, here one of all 360 test images.
SMALL = ["--max-steps", "1", "--batch-size", "180", "--microbatches", "1", "--eval-every", "9", "--device", "cpu"]


@settings(max_examples=40 * TIMES, phases=NO_SHRINKING)
@given(st.data())
def test_random_command_lines_exit_cleanly(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*options(), "nothing", "--help"]))
    arguments = [name]
    for _ in range(data.draw(st.integers(0, 4))):
        if name in options():
            arguments.append(data.draw(st.sampled_from(options()[name] or ["--x"])))
        arguments += data.draw(st.lists(WORDS, max_size=2))
    if name in ("train", "compare"):
        arguments += [option for option in SMALL if name == "train" or option != "--device"]
    if name == "plan":
        arguments += ["--rounds", "1"]
    with tempfile.TemporaryDirectory() as folder:
        command(arguments, Path(folder))


CREDITS = st.lists(st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, -1.0, float("nan")]), max_size=5), max_size=5)
METHODS = st.sampled_from(
    [
        "local",
        "2-wise",
        "3-wise-mean",
        "end-to-end",
        "rotating-2",
        "blocks-2",
        "geometric-0.5",
        "gpipe",
        "1f1b",
        "zero-bubble",
    ]
)
COSTS = st.one_of(
    st.just("paper"),
    st.lists(
        st.tuples(st.sampled_from(["forward", "head", "input_grad", "weight_grad", "latency", "x", ""]), NUMBERS),
        max_size=4,
    ).map(lambda pairs: ",".join(f"{name}={value}" for name, value in pairs)),
)


@pytest.mark.filterwarnings("ignore:`n = ")
@settings(max_examples=60 * TIMES)
@given(st.one_of(METHODS, CREDITS), st.integers(-1, 6), st.integers(-1, 6), COSTS)
def test_random_schedules_are_timed_or_raise(method: Any, stages: int, m: int, costs: str) -> None:
    text = method if isinstance(method, str) else "credit-" + ";".join(",".join(map(str, row)) for row in method)
    try:
        schedule = method_schedule(text, num_stages=stages, num_microbatches=m, costs=parse_costs(costs))
    except (ValueError, TypeError) as error:
        a_sentence(error)
        return
    assert isinstance(schedule, Schedule)
    assert schedule.period >= schedule.lower_bound - 1e-9 * abs(schedule.lower_bound)


@settings(max_examples=40 * TIMES)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(0, 99), st.sampled_from("xds")), max_size=4)
)
def test_mutated_action_lists_validate_or_raise(changes: list[tuple[int, int, int, str]]) -> None:
    """Swap, remove or duplicate tasks; the lists are valid or raise one sentence."""
    schedule = method_schedule("2-wise", num_stages=4, num_microbatches=2, costs=parse_costs("paper"))
    lists = [list(tasks) for tasks in schedule.lists[0]]
    for k, i, j, action in changes:
        tasks = lists[k]
        if len(tasks) < 2:
            continue
        i, j = i % len(tasks), j % len(tasks)
        if action == "x":
            tasks[i], tasks[j] = tasks[j], tasks[i]
        elif action == "d":
            del tasks[i]
        else:
            tasks.insert(j, tasks[i])
    try:
        validate(dataclasses.replace(schedule, lists=(tuple(map(tuple, lists)),)))
    except ValueError as error:
        a_sentence(error)


@cache
def run_folder() -> Path:
    """A finished run with checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix="nwise-fuzz-"))
    with contextlib.redirect_stdout(io.StringIO()):
        assert (
            cli.run(
                ["train", "digits", "--runs", str(folder), "--filters", "2", *SMALL[:-2], "--checkpoint-every", "1"]
            )
            == 0
        )
    return next(folder.iterdir())


EDITS = st.lists(
    st.tuples(st.sampled_from("ridtz"), st.integers(0, 10**6), st.binary(min_size=1, max_size=6)),
    min_size=1,
    max_size=3,
)


def edited(data: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    """Some bytes replaced, put in, taken away; or the end cut off; or nothing left."""
    for kind, place, new in edits:
        at = place % (len(data) + 1)
        rest = {"r": data[at + len(new) :], "i": data[at:], "d": data[at + len(new) :], "t": b"", "z": b""}[kind]
        data = b"" if kind == "z" else data[:at] + (new if kind in "ri" else b"") + rest
    return data


@settings(max_examples=30 * TIMES, phases=NO_SHRINKING)
@given(st.integers(0, 99), EDITS, st.booleans())
def test_corrupted_run_files_exit_cleanly(which: int, edits: list[tuple[str, int, bytes]], signed: bool) -> None:
    """Commands that read a run exit with a known code, whatever its files contain."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        shutil.copytree(run_folder(), folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = files[which % len(files)]
        before = path.read_bytes()
        path.write_bytes(edited(before, edits))
        if signed and path.suffix == ".safetensors" and path.parent.name.startswith("step-"):
            sign(path)
        for arguments in (
            ["evaluate", str(folder), "--device", "cpu"],
            ["train", "--resume", str(folder), *SMALL, "--max-steps", "2"],
        ):
            command(arguments, Path(name))


def sign(path: Path) -> None:
    """As a stranger would, who can make a checkpoint look whole."""
    index_path = path.with_name("checkpoint.json")
    index = json.loads(index_path.read_text().split("\n")[0])
    index["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    line = json.dumps(index)
    index_path.write_text(f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n")


@settings(max_examples=30 * TIMES, phases=NO_SHRINKING)
@given(SPOILS)
def test_mutated_checkpoint_facts_exit_cleanly(spoils: list[Any]) -> None:
    """Correctly signed but mutated facts are either resumed from or refused."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        shutil.copytree(run_folder(), folder)
        (path,) = folder.glob("checkpoints/*/checkpoint.json")
        index = json.loads(path.read_text().split("\n")[0])
        for spoil in spoils:
            index["facts"] = spoilt(index["facts"], *spoil)
        line = json.dumps(index)
        path.write_text(f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n")
        command(["train", "--resume", str(folder), *SMALL, "--max-steps", "2"], Path(name))
