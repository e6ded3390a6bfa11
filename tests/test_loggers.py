"""What is logged with the tools that people watch runs with is what the run's own records say."""

from __future__ import annotations

import json
import sqlite3
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import forked
from nwise.app import cli
from nwise.app.training import Run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


TRAIN = ["train", "digits", "--max-steps", "24", "--log-every", "8", "--filters", "4", "--log-to"]


def train(name: str) -> dict[tuple[str, int], float]:
    """A run of 24 steps; every number that should be logged."""
    assert cli.run([*TRAIN, name]) == 0
    return recorded()


def recorded() -> dict[tuple[str, int], float]:
    """The numbers of the run's records, by name and step."""
    wanted = {}
    for record in Run.open(Path("runs/digits-2-wise-001")).metrics():
        for name in ("loss", "accuracy")[: 1 + (record["kind"] == "test")]:
            for k, value in enumerate(record[name]):
                if value is not None:
                    wanted[f"{record['kind']}_{name}/stage_{k}", record["step"]] = value
    assert len(wanted) > 20
    return wanted


def train_in_a_process(name: str, **variables: str) -> None:
    """As trackers start processes and threads of their own."""
    done = forked(1, ["-m", "nwise", *TRAIN, name], Path.cwd(), environment=variables)
    assert done.returncode == 0, done.stderr[-2000:]


def test_tensorboard_matches_run_records() -> None:
    pytest.importorskip("tensorboard", reason="needs the extra 'tensorboard'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = train("tensorboard")
    events = EventAccumulator("runs/digits-2-wise-001").Reload()
    found = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.timeout(120)
def test_wandb_offline_matches_run_records() -> None:
    """wandb runs in its own process because it starts others; offline mode makes no network request."""
    pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    # What wandb finds out about the machine and its load is not looked at.
    train_in_a_process("wandb", WANDB_CONSOLE="off", WANDB_X_DISABLE_STATS="true", WANDB_X_DISABLE_META="true")
    [offline] = Path("runs/digits-2-wise-001").glob("wandb/offline-run-*/run-*.wandb")
    assert wandb_history(offline) == pytest.approx(recorded(), rel=1e-6)


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind a header of 7 bytes: blocks of 32 KiB, parts with a type."""
    at, parts = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block is empty
            at += 32768 - at % 32768
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb_history(path: Path) -> dict[tuple[str, int], float]:
    """What an offline file holds."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        for name, value in values.items():
            if "/" in name:
                found[name, int(values["_step"])] = value
    return found


def test_trackio_calls_match_run_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub trackio, whose calls are those of wandb: it needs an older pillow than the other tests have."""
    calls: list[tuple[str, Any]] = []
    package = types.ModuleType("trackio")
    package.init = lambda **options: calls.append(("init", options))  # type: ignore[attr-defined]
    package.log = lambda values, step: calls.append((step, values))  # type: ignore[attr-defined]
    package.finish = lambda: calls.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", package)
    wanted = train("trackio")
    assert calls[0][0] == "init"
    assert calls[0][1]["config"]["strategy"] == "2-wise"
    assert calls[0][1]["name"] == "digits-2-wise-001"
    assert calls[-1][0] == "finish"
    found = {(name, step): value for step, values in calls[1:-1] for name, value in values.items()}
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.timeout(120)
def test_trackio_database_matches_run_records(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs the extra 'trackio', which asks for pillow below 13")
    train_in_a_process("trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "nwise.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    found = {(name, step): value for step, text in rows for name, value in json.loads(text).items()}
    assert found == pytest.approx(recorded(), rel=1e-6)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_missing_logger_package_names_the_extra(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard.writer"}.get(name, name), None)
    assert cli.run(["train", "--log-to", name]) == 2
    assert f"pip install 'nwise[{name}]'" in capsys.readouterr().err
    assert not Path("runs").exists(), "what is missing shows before a folder is made"
