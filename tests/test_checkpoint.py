"""Checkpoints are complete or absent, and resume bitwise, also with another cut, strategy or number of replicas."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import nwise
from launch import results
from nets import equal
from nwise.app.recipes import Adam, Sgd
from nwise.app.training import CheckpointPolicy
from nwise.app.training.optimizers import make_optimizer as optimizer_of
from nwise.app.training.saver import Saver
from nwise.checkpoint import Checkpoints, DamagedError, Resumed, files, save_tensors
from ranks.common import batches, make_optimizer
from ranks.resume import WIDTH, main, pipeline


def tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the only checkpoint of a folder, but for random numbers' states."""
    (one,) = folder.glob("step-*")
    found = files.read_tensors(one)
    for part in files.read_values(one).values():
        for name, state in (part["optimizer"] or {"state": {}})["state"].items():
            found |= {f"optimizer.{name}.{entry}": x for entry, x in state.items()}
        found |= {f"due.{n}.{name}": g for n, call in enumerate(part["due"]) for name, g in call.items()}
    return found


def renamed(found: dict[str, Tensor], stages: dict[int, int]) -> dict[str, Tensor]:
    """Heads under the numbers of other stages; those of stages that are not named are left out."""
    new = {}
    for name, tensor in found.items():
        prefix, rest = ("optimizer.", name[10:]) if name.startswith("optimizer.") else ("", name)
        if rest.startswith("heads."):
            _, stage, after = rest.split(".", 2)
            if int(stage) not in stages:
                continue
            rest = f"heads.{stages[int(stage)]}.{after}"
        new[prefix + rest] = tensor
    return new


def saved(folder: Path) -> Path:
    """A checkpoint after two steps."""
    main(folder / "none", folder, (2, 2), "2-wise", "adam", 2)
    (one,) = (folder / "after").glob("step-*")
    return one


def two(folder: Path, **options: Any) -> tuple[nwise.Pipeline, Checkpoints]:
    """A pipeline of two stages, and its checkpoints."""
    pipe = pipeline((2, 2), "2-wise")
    return pipe, Checkpoints(folder, pipe, **options)


def steps(folder: Path) -> list[int]:
    """Of which steps there are checkpoints."""
    return sorted(int(p.name[5:]) for p in folder.glob("step-*"))


# As it was


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("local", "adam"),
        ("2-wise", "sgd"),
        ("end-to-end", "adam"),
        ("rotating-2", "adam"),
        ("2-wise-hogwild-forward", "sgd"),
        ("hogwild-forward-least", "adam"),
        ("end-to-end-delay-2", "adam"),
        ("end-to-end-delay-2", "sgd"),
        ("rotating-2-delay-1", "adam"),
    ],
)
def test_resume_is_bitwise(strategy: str, optimizer: str, tmp_path: Path) -> None:
    """Equal to a run without a checkpoint in between, in the middle of a delay too."""
    cut = (1, 1, 1, 1)
    main(tmp_path / "none", tmp_path / "a", cut, strategy, optimizer, 5)
    resumed = main(tmp_path / "a" / "after", tmp_path / "b", cut, strategy, optimizer, 4)
    whole = main(tmp_path / "none", tmp_path / "whole", cut, strategy, optimizer, 9)
    assert resumed["said"] == ""
    assert resumed["steps"] == 9
    torch.testing.assert_close(resumed["losses"], whole["losses"][5:], rtol=0, atol=0, equal_nan=True)
    assert equal(tensors(tmp_path / "b" / "after"), tensors(tmp_path / "whole" / "after"))


@pytest.mark.parametrize("strategy", ["hogwild-forward", "end-to-end-delay-2"])
def test_checkpoints_change_nothing_under_a_delay(strategy: str, tmp_path: Path) -> None:
    """Regression: with a checkpoint every third step and a delay of two, 12 steps made 4 updates, without a word."""
    states = []
    for every in (1, 3, 100):
        pipe = pipeline((1, 1, 1, 1), strategy)
        update = make_optimizer("adam", pipe)
        checkpoints = Checkpoints(tmp_path / str(every), pipe, update)
        for x, y in batches(12, WIDTH):
            pipe.step(x, target=y)
            update.step()
            update.zero_grad()
            if pipe.steps % every == 0:
                checkpoints.save()
        while pipe.drain():
            update.step()
            update.zero_grad()
        states.append(pipe.state_dict())
    assert all(equal(states[0], state) for state in states[1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_resume_fused_optimizer_on_gpu(tmp_path: Path) -> None:
    """Regression: a resumed step count was not on the device, where the fused kernel reads it."""
    pipe = nwise.Pipeline([nn.Linear(2, 2).cuda()], strategy="end-to-end", seed=0)
    for _ in range(2):
        update = torch.optim.Adam(pipe.parameters(), fused=True)
        Checkpoints(tmp_path, pipe, update).resume()
        pipe.step(torch.ones(3, 2).cuda(), target=torch.tensor([0, 1, 1]).cuda())
        update.step()
        update.zero_grad()
        assert {state["step"].device.type for state in update.state.values()} == {"cuda"}
        Checkpoints(tmp_path, pipe, update).save()


def test_checkpoint_names_match_unsplit_network(tmp_path: Path) -> None:
    names = set(tensors(saved(tmp_path).parent))
    assert {"model.blocks.3.0.weight", "model.blocks.3.1.running_mean", "model.output.bias"} <= names
    assert {"heads.0.weight", "optimizer.model.output.bias.exp_avg", "optimizer.model.blocks.0.0.weight.step"} <= names


def test_async_save_writes_values_at_save_time(tmp_path: Path) -> None:
    """Regression: a background writer on a CPU wrote the values of later steps (pytorch issue 144657)."""
    pipe, checkpoints = two(tmp_path, asynchronous=True)
    before = {name: t.clone() for name, t in pipe.state_dict().items()}
    checkpoints.save()
    with torch.no_grad():
        for p in pipe.parameters():
            p.fill_(7)
    checkpoints.wait()
    assert torch.equal(tensors(tmp_path)["model.output.weight"], before["stages.1.output.weight"])


# Other shapes of the same run


def test_resume_with_other_stage_counts(tmp_path: Path) -> None:
    main(tmp_path / "none", tmp_path / "4", (1, 1, 1, 1), "2-wise", "adam", 3)
    chain: list[tuple[str, str, tuple[int, ...], dict[int, int], str]] = [
        ("4", "2", (2, 2), {1: 0}, "stages 4 -> 2; dropped the heads of the former stages 0, 2"),
        ("2", "3", (1, 1, 2), {0: 1}, "stages 2 -> 3; new heads at stages 0"),
        ("3", "1", (4,), {}, "stages 3 -> 1; dropped the heads of the former stages 0, 1"),
    ]
    for before, now, cut, heads, said in chain:
        found = main(
            tmp_path / before / "after", tmp_path / now, cut, "2-wise" if len(cut) > 1 else "end-to-end", "adam", 3
        )
        kept = renamed(tensors(tmp_path / before / "after"), heads)
        loaded = tensors(tmp_path / now / "loaded")
        assert equal(kept, {name: t for name, t in loaded.items() if name in kept}), now
        assert {name for name in loaded if name not in kept} <= {"heads.0.weight", "heads.0.bias"}
        assert found["said"].removeprefix("strategy 2-wise -> end-to-end; ") == said
        assert found["losses"][-1][-1] < 2


def test_resume_into_another_network_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    pipe = nwise.Pipeline([nn.Linear(WIDTH, 4)], strategy="end-to-end")
    before = pipe.stages[0].weight.clone()  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"The network should be that of .*Found that 'bias' has shape \[4\] here and None there"
    ):
        Checkpoints(tmp_path / "after", pipe).resume()
    assert torch.equal(pipe.stages[0].weight, before)  # type: ignore[arg-type]
    assert pipe.steps == 0


def test_resume_across_process_counts(tmp_path: Path) -> None:
    """Four processes write; one process, two stages, and two stages with two replicas each read the same."""
    run: Callable[..., list[Any]] = lambda n, *a: results(n, "resume.py", tmp_path, *map(str, a))  # noqa: E731
    cut, late = (1, 1, 1, 1), "end-to-end-delay-2"
    run(4, tmp_path / "none", tmp_path / "a", "1,1,1,1", "2-wise", "adam", 4)
    main(tmp_path / "none", tmp_path / "one", cut, "2-wise", "adam", 4)
    main(tmp_path / "none", tmp_path / "late", cut, late, "adam", 4)
    written = tensors(tmp_path / "a" / "after")
    assert equal(written, tensors(tmp_path / "one" / "after"))
    assert len(list((tmp_path / "a" / "after").glob("step-*/*.pt"))) == 4
    resumed: list[Any] = [tmp_path / "late" / "after", tmp_path / "late4", "1,1,1,1", late, "adam", 3]
    resumed += [tmp_path / "a" / "after", tmp_path / "dp", "2,2", "2-wise", "adam", 2]
    resumed += [tmp_path / "a" / "after", tmp_path / "b", "1,1,1,1", "3-wise", "adam", 3]
    run(4, *resumed)
    # In the middle of a delay, from one process to four and back to one: as if nothing had been saved.
    main(tmp_path / "late4" / "after", tmp_path / "late1", cut, late, "adam", 2)
    main(tmp_path / "none", tmp_path / "late0", cut, late, "adam", 9)
    assert any(name.startswith("due.1.") for name in tensors(tmp_path / "late0" / "after"))
    assert equal(tensors(tmp_path / "late1" / "after"), tensors(tmp_path / "late0" / "after"))
    assert equal(renamed(written, {1: 0}), tensors(tmp_path / "dp" / "loaded"))
    main(tmp_path / "one" / "after", tmp_path / "oneb", cut, "3-wise", "adam", 3)
    assert equal(tensors(tmp_path / "b" / "after"), tensors(tmp_path / "oneb" / "after"))
    found = run(2, tmp_path / "a" / "after", tmp_path / "two", "2,2", "2-wise", "adam", 2)
    assert {one["said"] for [one] in found} == {"stages 4 -> 2; dropped the heads of the former stages 0, 2"}
    assert equal(renamed(written, {1: 0}), tensors(tmp_path / "two" / "loaded"))


# What stays


def test_keep_retains_the_latest(tmp_path: Path) -> None:
    pipe, checkpoints = two(tmp_path)
    for pipe.steps in range(5):
        checkpoints.save()
    assert steps(tmp_path) == [3, 4]


def test_partial_checkpoint_is_ignored_and_removed(tmp_path: Path) -> None:
    one = saved(tmp_path)
    shutil.copytree(one, one.with_name("step-00000007.part"))
    pipe, checkpoints = two(one.parent)
    assert checkpoints.resume() == Resumed(2, "")
    assert pipe.steps == 2
    checkpoints.save()
    assert not list(one.parent.glob("*.part"))


def fill(monkeypatch: pytest.MonkeyPatch, error: int = errno.ENOSPC) -> str:
    """Let writes fail; return the reason."""
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(error, os.strerror(error))))
    return os.strerror(error)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_full_disk_keeps_previous_checkpoint(error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = saved(tmp_path)
    pipe, checkpoints = two(one.parent, keep=1)
    checkpoints.resume()
    pipe.steps = 9
    reason = fill(monkeypatch, error)
    with pytest.raises(OSError, match=rf"step-00000009 should be written as a checkpoint. Found.*{reason}"):
        checkpoints.save()
    monkeypatch.undo()
    assert steps(one.parent) == [2]
    files.check(one)


def test_save_to_unwritable_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="should be writable"):
        two(tmp_path / "file")[1].save()


def test_save_before_an_existing_later_step_raises(tmp_path: Path) -> None:
    """Regression: a new run in the folder of an old one lost every checkpoint as soon as it was written."""
    pipe, checkpoints = two(tmp_path)
    for step in (99_999_999, 100_000_000):  # names of which are not in the order of the alphabet
        pipe.steps = step
        checkpoints.save()
    assert getattr(checkpoints.newest(), "folder", None) == tmp_path / "step-100000000"
    pipe.steps = 100
    message = "should hold no checkpoint of a step beyond 100. Found step-100000000; resume"
    with pytest.raises(ValueError, match=message):
        checkpoints.save()


def test_interrupted_overwrite_keeps_new_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint survives an interrupt during the removal of the old one."""
    _, checkpoints = two(tmp_path)
    checkpoints.save(number=1)

    def stopped(path: Path, **_: Any) -> None:
        if "gone" in path.name and path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(number=2)
    monkeypatch.undo()
    found = checkpoints.newest()
    assert found is not None
    assert found.facts["number"] == 2


def test_save_after_failed_async_save_warns_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoints = two(tmp_path, asynchronous=True)
    fill(monkeypatch)
    checkpoints.save()
    while not checkpoints._writing.done():  # type: ignore[union-attr]
        pass
    monkeypatch.undo()
    message = r"No space left.*\. This background write failed; nwise now writes the next checkpoint"
    with pytest.warns(UserWarning, match=message):
        checkpoints.save()
    checkpoints.wait()
    assert steps(tmp_path) == [0]


def test_checkpoint_that_failed_in_the_background_is_written_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step's checkpoint counted as written although its background write had failed."""
    phase: Any = Mock(optimizer=None)
    phase.rate.state.return_value = {}
    saver = Saver(tmp_path, pipeline((2, 2), "2-wise"), CheckpointPolicy(checkpoint_async=True), dict)
    saver.phase = phase
    fill(monkeypatch)
    with pytest.warns(UserWarning, match="No space left"):
        saver.save(wait=True)
    monkeypatch.undo()
    assert "No space left" in saver.unwritten
    saver.save(wait=True)
    assert saver.unwritten == ""
    assert steps(tmp_path) == [0]


def test_resume_waits_for_the_checkpoint_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found no checkpoint, or an earlier one, while the newest was written; ranks then shared one group for two exchanges."""
    write = files.write

    def slow(*given: Any) -> None:
        time.sleep(0.05)
        write(*given)

    monkeypatch.setattr(files, "write", slow)
    _, checkpoints = two(tmp_path, asynchronous=True)
    checkpoints.save()
    assert checkpoints.resume() == Resumed(0, "")


# What is damaged


def test_damaged_checkpoint_falls_back_to_previous(tmp_path: Path) -> None:
    one = saved(tmp_path)
    pipe, checkpoints = two(one.parent)
    checkpoints.resume()
    pipe.steps = 3
    newer = checkpoints.save()
    flip(next(newer.glob("*.safetensors")), 4000)
    message = "as it was written. Found that its SHA-256 differs. nwise tries the checkpoint before it"
    with pytest.warns(UserWarning, match=message):
        checkpoints.resume()
    assert pipe.steps == 2
    assert newer.with_name("step-00000003.damaged").is_dir()


def test_damaged_checkpoints_of_one_step_get_distinct_names(tmp_path: Path) -> None:
    pipe, checkpoints = two(tmp_path, keep=3)
    for pipe.steps in (1, 2, 2):
        flip(checkpoints.save(loss=1.0) / "checkpoint.json", 99)  # which the next one is not kept from writing by
        if pipe.steps == 2:
            with pytest.warns(UserWarning, match="."), pytest.raises(ValueError, match="Found none"):
                checkpoints.resume()
    assert {p.name for p in tmp_path.iterdir()} >= {"step-00000002.damaged", "step-00000002.damaged-2"}


def signed(index: dict[str, Any]) -> bytes:
    """What a stranger could write."""
    import hashlib

    line = json.dumps(index)
    return f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "should be of format 2, which this nwise reads. Found 1; use the nwise"),
        ({"files": {"../x.safetensors": "a"}}, "name files of its own folder"),
        ({"facts": {"step": "1"}}, "should have 'step' among its facts. Found '1'"),
        ({"facts": {"step": 1, "seed": 0}}, "should have 'strategy' among its facts. Found None"),
        ({"facts": []}, "should have 'step' among its facts"),
    ],
)
def test_crafted_checkpoint_index_raises(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    one = saved(tmp_path)
    index = json.loads((one / "checkpoint.json").read_text().split("\n")[0])
    (one / "checkpoint.json").write_bytes(signed({**index, **change}))
    with pytest.warns(UserWarning, match="."), pytest.raises(ValueError, match=message):
        two(one.parent)[1].resume()


def test_checkpoint_has_its_name_only_when_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut must not leave a complete name over incomplete files: what is written is flushed, then renamed."""
    events: list[object] = []
    flush, move = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        flush(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append(target)
        move(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    one = tmp_path / "run" / "step-00000001"
    files.write(one, {"a": lambda: b"1"}, {})
    index, folder, run = (path.stat().st_ino for path in (one / "checkpoint.json", one, one.parent))
    assert events[-4:] == [index, folder, one, run]


def test_folder_with_other_names_is_free_after_resume(tmp_path: Path) -> None:
    """`resume` found no checkpoint, so what stands there under such a name is none that `save` would lose."""
    files.remove(tmp_path / "step-00000001")  # one that is gone can be removed
    (tmp_path / "step-by-step").mkdir()
    _, checkpoints = two(tmp_path)
    assert checkpoints.resume() is None
    assert checkpoints.save().name == "step-00000000"
    assert (tmp_path / "step-by-step").is_dir()


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def test_check_detects_every_flipped_bit_and_missing_file(tmp_path: Path) -> None:
    """Flip two hundred random bits, one at a time, over all files of a checkpoint."""
    one, rng = saved(tmp_path), random.Random(0)
    files.check(one)
    paths = sorted(one.iterdir())
    sizes = [path.stat().st_size for path in paths]
    for _ in range(200):
        (file,) = rng.choices(paths, sizes)
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(DamagedError, match="should be"):
            files.check(one)
        flip(file, bit)
    files.check(one)
    for path in reversed(paths):
        path.unlink()
        with pytest.raises(DamagedError, match="should hold .*Found none|Found: .*No such file"):
            files.check(one)


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_reading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    one = saved(tmp_path)
    path = one / "process-0.pt"
    torch.save({"optimizer": Touches(tmp_path / "ran")}, path)
    index = json.loads((one / "checkpoint.json").read_text().split("\n")[0])
    index["files"][path.name] = sha256(path.read_bytes()).hexdigest()
    (one / "checkpoint.json").write_bytes(signed(index))
    with pytest.raises(ValueError, match="in the form that nwise writes. Found: Weights only load failed"):
        two(one.parent)[1].resume()
    assert not (tmp_path / "ran").exists()


class Average:
    """Something to save beside the pipeline."""

    def __init__(self) -> None:
        self.state: Any = {"mean": torch.zeros(2), "n": 0}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_extra_states_are_saved_and_loaded(tmp_path: Path) -> None:
    """Regression: schedulers, scalers, averages and a second optimizer had to be saved by the caller."""
    pipe = nwise.Pipeline([torch.nn.Linear(2, 2)], strategy="end-to-end")
    update, other = (torch.optim.Adam(pipe.parameters(), lr) for lr in (0.1, 0.2))
    drops = {"milestones": [1, 3], "gamma": 0.5}
    extra: dict[str, Any] = {
        "average": Average(),
        "rate": torch.optim.lr_scheduler.MultiStepLR(update, **drops),  # type: ignore[arg-type]
        "scaler": torch.amp.GradScaler("cpu"),
        "other": other,
    }
    for p in pipe.parameters():
        p.grad = torch.ones_like(p)
    for one in (update, extra["rate"], other):
        one.step()
    extra["average"].state = {"mean": torch.ones(2), "n": 3}
    expected = copy.deepcopy({name: one.state_dict() for name, one in extra.items()})
    Checkpoints(tmp_path, pipe, update, extra=extra).save()
    update, other = (torch.optim.Adam(pipe.parameters(), lr) for lr in (0.1, 0.2))
    fresh: dict[str, Any] = {
        "average": Average(),
        "rate": torch.optim.lr_scheduler.MultiStepLR(update, **drops),  # type: ignore[arg-type]
        "scaler": torch.amp.GradScaler("cpu"),
        "other": other,
    }
    assert Checkpoints(tmp_path, pipe, update, extra=fresh).resume() == Resumed(0, "")
    assert equal({name: one.state_dict() for name, one in fresh.items()}, expected)
    extra["average"].state = {"rule": equal}
    with pytest.raises(
        TypeError, match=r"`extra\['average'\]` should have a state of tensors.* Found 'rule', a function"
    ):
        Checkpoints(tmp_path, pipe, update, extra=extra)


def test_resume_with_shallower_head_starts_it_fresh(tmp_path: Path) -> None:
    """Regression: the first layer of a deeper head was loaded as the whole head."""
    stages = [nwise.Chain({f"{k}": nn.Linear(4, 4)}) for k in range(2)]
    deep = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    Checkpoints(tmp_path, nwise.Pipeline(stages, [deep], strategy="local")).save()
    flat = nwise.Pipeline(stages, [nn.Sequential(nn.Linear(4, 4))], strategy="local")
    assert Checkpoints(tmp_path, flat).resume() == Resumed(
        0, "new heads at stages 0; dropped the heads of the former stages 0"
    )


@pytest.mark.parametrize(
    ("before", "cut"), [(Sgd(), ["2", "3"]), (Adam(), ["2", "4"])], ids=["new head", "another optimizer"]
)
def test_momentum_after_resume_without_it(before: Sgd | Adam, cut: list[str], tmp_path: Path) -> None:
    """Regression: fused SGD failed after a resume that left some parameters, or some turns' heads, without momenta."""

    def run(cut: list[str], config: Sgd | Adam, steps: int) -> list[bool]:
        stages = nwise.split(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), at=cut)
        pipe = nwise.Pipeline(stages, [nn.Linear(4, 4) for _ in stages[1:]], strategy="rotating-2")
        optimizer = optimizer_of(config, pipe.parameters())
        checkpoints = Checkpoints(tmp_path, pipe, optimizer)
        checkpoints.resume()
        for _ in range(steps):
            pipe.step(torch.ones(3, 4), target=torch.tensor([0, 1, 2]))
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save()
        return ["momentum_buffer" in optimizer.state[p] for p in pipe.parameters()]

    run(["2", "4"], before, 1)
    assert all(run(cut, Sgd(), 3))


def test_shared_memory_can_be_saved(tmp_path: Path) -> None:
    weight = torch.ones(3)
    save_tensors({"a": weight, "b": weight}, tmp_path / "w.safetensors")
