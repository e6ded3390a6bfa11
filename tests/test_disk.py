"""A full disk, a disk that cannot be read for a moment, and two writers: nothing is lost, and nothing ends without a sentence."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from torch import Tensor

from launch import scripted, started, until
from nwise.app.cli import run as command
from nwise.app.report.display import PlainDisplay
from nwise.app.training import Callback, CheckpointPolicy, Run, Trainer, new_run
from nwise.checkpoint import Checkpoints, Resumed, files
from nwise.checkpoint.lock import FolderLock
from ranks.resume import pipeline
from test_checkpoint import flip, saved, signed
from test_faults import OPTIONS, TINY, Stops

# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB, which root can make."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can make a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path) -> None:
    """Leave no room, not even for a line."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    file.write(b"x" * size)


def called(name: str, own: Callable[..., None], callbacks: Sequence[Callback]) -> Callable[..., None]:
    """A method of a display that calls others, too."""

    def method(display: PlainDisplay, *values: Any) -> None:
        own(display, *values)
        for callback in callbacks:
            getattr(callback, name)(*values)

    return method


class Fills(Callback):
    """Fills the disk after a step, and makes room after another."""

    def __init__(self, disk: Path, after: int, until: int | None = None) -> None:
        self.disk, self.after, self.until = disk, after, until

    def stepped(self, step: int, losses: Tensor) -> None:
        if step == self.after:
            fill(self.disk)
        if step == self.until:
            (self.disk / "filler").unlink()


LONG = dataclasses.replace(TINY, max_steps=50)  # so that metrics need a second page of memory


def test_training_outlives_a_full_disk(small_disk: Path) -> None:
    """Regression: weights raised an unrelated error, and a failed metrics line left the run's status at `running`."""
    run, trainer = new_run(LONG, small_disk), Trainer(LONG)
    whole = Trainer(LONG)
    with pytest.warns(UserWarning, match="No space left") as seen:
        scores = trainer.train(run, (Fills(small_disk, after=2),), CheckpointPolicy(checkpoint_every=4))
    assert scores == whole.train()
    told = [str(warning.message).split(" should be")[0].rpartition("/")[2] for warning in seen]
    assert told.count("metrics.jsonl") == 1, "once for each file"
    assert {"metrics.jsonl", "weights.safetensors", "step-00000004"} <= set(told)
    assert {Path(path).name for path in trainer.unwritten} >= {"metrics.jsonl", "checkpoints"}
    assert not list(run.folder.glob("*.part"))
    assert all(json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines())


def test_pending_writes_finish_when_disk_has_room_again(small_disk: Path) -> None:
    run, trainer = new_run(LONG, small_disk), Trainer(LONG)
    with pytest.warns(UserWarning, match="No space left"):
        trainer.train(run, (Fills(small_disk, after=2, until=45),), CheckpointPolicy(checkpoint_every=4))
    assert not trainer.unwritten
    assert run.status == "done"
    assert [record["step"] for record in run.metrics() if record["kind"] == "train"] == list(range(1, 51))
    assert run.weights()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stop", [False, True])
def test_train_command_on_full_disk_ends_in_one_sentence(
    stop: bool, small_disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks = (Fills(small_disk, after=2), *([Stops(after=45)] if stop else []))
    for name in ("started", "stepped"):
        monkeypatch.setattr(PlainDisplay, name, called(name, getattr(PlainDisplay, name), callbacks))
    code = command(
        ["train", "digits", *OPTIONS, "--max-steps", "50", "--checkpoint-every", "20", "--runs", str(small_disk)]
    )
    said = capsys.readouterr().err
    assert code == (75 if stop else 74)
    assert "metrics.jsonl should be written. Found: [Errno 28] No space left on device. Training continues." in said
    assert (
        "Stopped at step 45, as requested. Not written:" in said
        if stop
        else "all steps are done, but not everything" in said
    )
    assert "Traceback" not in said
    (small_disk / "filler").unlink()
    (folder,) = small_disk.glob("digits*")
    assert command(["train", "--resume", str(folder)]) == 2  # there is no checkpoint, and it says so


@pytest.mark.parametrize("what", ["weights", "metrics", "state"])
def test_failed_write_warns_and_is_recorded(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a full disk without root: each writer raises in turn."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)") if what == "weights" else full_disk

    full_disk = OSError(errno.ENOSPC, "No space left on device")
    run, trainer = new_run(TINY, tmp_path), Trainer(TINY)
    places = {
        "weights": "safetensors.torch.save_file",
        "metrics": "os.truncate",
        "state": "nwise.app.training.run.write_text",
    }
    if what == "metrics":
        monkeypatch.setattr(Run, "_append", full)
    else:
        monkeypatch.setattr(places[what], full)
    with pytest.warns(UserWarning, match=r"should be written. Found: .*No space left"):
        trainer.train(run)
    name = {"weights": "weights.safetensors", "metrics": "metrics.jsonl", "state": "run.json"}[what]
    assert [Path(path).name for path in trainer.unwritten] == [name]


def test_several_processes_outlive_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    text = (
        "import sys, pathlib\nfrom nwise.app import cli\nfrom nwise.app.report.display import PlainDisplay\n"
        "from test_disk import Fills\nfills = Fills(pathlib.Path(sys.argv[1]), after=2)\n"
        "PlainDisplay.stepped = lambda _, *values: fills.stepped(*values)\n"
        f"more = {[*OPTIONS, '--cut', '2', '2', '--max-steps', '50', '--checkpoint-every', '20']}\n"
        "sys.exit(cli.run(['train', 'digits', *more, '--runs', sys.argv[1]]))\n"
    )
    done = scripted(2, text, tmp_path, str(small_disk))
    assert done.returncode == 74
    assert "nwise train: all steps are done, but not everything is written" in done.stderr
    assert "metrics.jsonl should be written" in done.stderr


# A disk that cannot be read for a moment


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize("which", ["checkpoint.json", "*.safetensors"])
def test_transient_read_error_is_not_damage(
    number: int, which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: healthy checkpoints were renamed; torchrun's restart then began at step 0 and emptied the metrics."""
    one = saved(tmp_path)
    before = sorted(p.name for p in one.parent.iterdir())

    def broken(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.match(which):
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    def broken_bytes(path: Path) -> bytes:
        with broken(path, "rb") as file:
            data: bytes = file.read()
        return data

    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", broken)
        patch.setattr(Path, "read_bytes", broken_bytes)
        with pytest.raises(
            OSError, match=rf"should be readable. Found: .*{os.strerror(number)}.*Nothing has been changed"
        ):
            Checkpoints(one.parent, pipeline((2, 2), "2-wise")).resume()
    assert sorted(p.name for p in one.parent.iterdir()) == before
    assert Checkpoints(one.parent, pipeline((2, 2), "2-wise")).resume() == Resumed(2, "")


def test_damaged_checkpoints_are_not_started_over(tmp_path: Path) -> None:
    """Regression: the first start renamed them; the second found no checkpoint and began at step 0."""
    one = saved(tmp_path)
    flip(one / "checkpoint.json", 99)
    pipe = pipeline((2, 2), "2-wise")
    with (
        pytest.warns(UserWarning, match="SHA-256"),
        pytest.raises(ValueError, match="To start over, use another folder"),
    ):
        Checkpoints(one.parent, pipe).resume()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"step-00000002.damaged was found to be damaged. To start over"):
            Checkpoints(one.parent, pipe).resume()
        with pytest.raises(
            ValueError, match="should hold no checkpoints of another run. Found step-00000002.damaged; resume"
        ):
            Checkpoints(one.parent, pipe).save()


@pytest.mark.filterwarnings("ignore:.*nwise tries the checkpoint before it")
def test_trainer_restart_does_not_overwrite_damaged_run(tmp_path: Path) -> None:
    run = new_run(TINY, tmp_path)
    Trainer(TINY).train(run, policy=CheckpointPolicy())
    before = run.metrics()
    for path in run.folder.glob("checkpoints/step-*/checkpoint.json"):
        path.write_text("")
    for _ in range(2):
        with pytest.raises(ValueError, match="Found none: .*To start over, use another folder"):
            Trainer(TINY).train(run, policy=CheckpointPolicy(), resume=True, allow_restart=True)
    assert run.metrics() == before
    assert run.status == "done"


def test_save_next_to_another_runs_checkpoints_raises(tmp_path: Path) -> None:
    one = saved(tmp_path)
    pipe = pipeline((2, 2), "2-wise")
    checkpoints = Checkpoints(one.parent, pipe)
    pipe.steps = 7
    with pytest.raises(
        ValueError, match=r"should hold no checkpoints of another run. Found step-00000002; resume from it"
    ):
        checkpoints.save()
    checkpoints.resume()
    checkpoints.save()


@pytest.mark.parametrize(
    "index",
    [
        {"format": files.FORMAT},
        {"format": files.FORMAT, "facts": {}},
        {"format": files.FORMAT, "files": [], "facts": {}},
        {"format": files.FORMAT, "files": {}},
        [],
        "[" * 100_000,
    ],
)
def test_crafted_checkpoint_index_is_damage(index: Any, tmp_path: Path) -> None:
    """Regression: crafted indices ended in a KeyError or a RecursionError."""
    one = saved(tmp_path)
    data = signed(index)
    if isinstance(index, str):
        import hashlib

        data = f"{index}\n{hashlib.sha256(index.encode()).hexdigest()}\n".encode()
    (one / "checkpoint.json").write_bytes(data)
    with pytest.raises(files.DamagedError, match="should"):
        files.check(one)


# Two writers

HOLD = """
import sys
import time
from pathlib import Path
from nwise.checkpoint.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]) / "folder")
lock.acquire()
(Path(sys.argv[1]) / "held").touch()
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Any]:
    """Another process that writes to `tmp_path / "folder"`."""
    (tmp_path / "hold.py").write_text(HOLD)
    [process] = started(1, [str(tmp_path / "hold.py"), str(tmp_path)], tmp_path)
    until((tmp_path / "held").exists)
    yield process
    process.kill()
    process.join()


def test_folder_lock_allows_one_writer(other: Any, tmp_path: Path) -> None:
    """Regression: two writers both finished as done with every record twice, or mixed a checkpoint."""
    folder = tmp_path / "folder"
    checkpoints = Checkpoints(folder, pipeline((2, 2), "2-wise"))
    with pytest.raises(ValueError, match="by one process at a time. Found that another process writes to it; wait"):
        checkpoints.save()
    trainer = Trainer(TINY)
    run = new_run(TINY, tmp_path)
    run.folder.joinpath("run.json").rename(folder / "run.json")
    with pytest.raises(ValueError, match="by one process at a time"):
        trainer.train(Run.open(folder))
    assert not (folder / "metrics.jsonl").exists()
    other.kill()  # whose lock ends with it
    other.join()
    checkpoints.save()


def test_folder_lock_is_shared_within_a_process(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    second.acquire()
    second.release()
    first.release()
    first.release()


# What stays


def test_save_with_reserved_fact_name_raises(tmp_path: Path) -> None:
    """Regression: `save(step=7)` overwrote the checkpoint's own step."""
    checkpoints = Checkpoints(tmp_path, pipeline((2, 2), "2-wise"))
    with pytest.raises(ValueError, match="facts with other names. Found 'step', which nwise writes"):
        checkpoints.save(step=7, loss=1.0)
    assert not list(tmp_path.iterdir())


def test_save_removes_only_its_own_part_folders(tmp_path: Path) -> None:
    for name in ("download.part", "step-1.part", "step-00000001.part"):
        (tmp_path / name).mkdir()
    Checkpoints(tmp_path, pipeline((2, 2), "2-wise")).save()
    assert {p.name for p in tmp_path.glob("*.part")} == {"download.part", "step-1.part"}
