"""What users of other pipelines asked for, where no other test shows it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nwise
from launch import forked, results
from nwise.microbatch import Parts
from nwise.program.cutting import check_same_batch
from nwise.runtime import launch as world
from nwise.runtime.launch import check_same
from ranks.asks import CASES, first_place, second_of
from ranks.common import network
from test_contract import assert_same, gradients


def test_multi_process_matches_single_process(tmp_path: Path) -> None:
    ranks = results(3, "asks.py", tmp_path)
    for name, case in CASES.items():
        together = {key: value for rank in ranks for key, value in rank[name].items()}
        assert together == case(), name


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("strategy", ["local", "2-wise", "2-wise-mean", "end-to-end"])
def test_per_stage_loss_picks_its_target_from_a_tuple(strategy: str) -> None:
    stages, heads = network(3)
    losses: Any = [first_place, second_of, first_place]
    for module in (*stages, *heads):
        module.eval()  # dropout has other numbers in the reference
    pipe = nwise.Pipeline(stages, heads, losses, strategy, 2)
    x, target = torch.randn(7, 6), (torch.randint(0, 4, (7,)), torch.randn(7, 4))
    expected = nwise.reference_grads(stages, heads, losses, x, target, pipe.credit, 2)
    pipe.step(x, target=target)
    assert_same(gradients(pipe), expected, 1e-12)


def script(folder: Path, body: str) -> str:
    """A script of two ranks: `pipe`, `RANK`, batches, and what the test is about."""
    path = folder / "script.py"
    head = "import torch\nfrom ranks.common import RANK, batches, pipeline\npipe = pipeline(2, '2-wise', 1)\n"
    path.write_text(f"{head}data = batches(40)\n{body}")
    return str(path)


def test_mismatched_batches_across_ranks_raise(tmp_path: Path) -> None:
    """Regression: loaders with different shuffle seeds paired inputs of one sample with labels of another, unnoticed."""
    body = "x, y = data[RANK]\npipe.step(x, target=y)\nraise SystemExit('not refused')\n"
    done = forked(2, [script(tmp_path, body)], tmp_path)
    assert done.returncode != 0
    assert "`target` should be the same on every rank. Found" in done.stderr
    assert "not refused" not in done.stderr


def test_targets_of_any_layout_are_compared() -> None:
    """Regression: a column of a table could not be viewed as bytes."""
    codes: list[dict[str, str | None]] = []

    def agree(**code: str | None) -> None:  # every call is another process
        codes.append(code)
        check_same(codes)

    def batch(target: torch.Tensor) -> Parts:
        return Parts([()], [(target,)], [3], whole=True)

    joining: Any = SimpleNamespace(num_replicas=1, here=(0,), agree=agree)
    column = torch.arange(6).reshape(3, 2)[:, 1]
    check_same_batch(joining, batch(column.clone()))
    check_same_batch(joining, batch(column))
    with pytest.raises(
        ValueError, match="`target` should be the same on every rank. Found '.*' on rank 0 and '.*' on rank 2"
    ):
        check_same_batch(joining, batch(column + 1))


def test_rank_without_loss_accepts_target_none(tmp_path: Path) -> None:
    """Rank 0 needs no target because stage 0's head does not run under 2-wise."""
    body = "x, y = data[0]\npipe.step(x, target=y if RANK else None)\npipe.close()\nprint('done')\n"
    done = forked(2, [script(tmp_path, body)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("done") == 2


@pytest.mark.parametrize(
    ("local", "total", "given", "expected"),
    [("2", "2", None, "lo"), ("2", "2", "eth7", "eth7"), ("2", "4", None, None), ("2", "4", "eth7", "eth7")],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the loopback device has another name")
def test_gloo_uses_loopback_on_a_single_node(
    local: str, total: str, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the variable only: `init_process_group` is patched to raise before any connection."""

    class Stopped(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("WORLD_SIZE", total)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    monkeypatch.setattr(torch.distributed, "init_process_group", stop)
    with pytest.raises(Stopped):
        world.start()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


OFFLINE = """
import socket, sys
def refuse(*arguments, **options):
    raise AssertionError(f"a connection was asked for: {arguments}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from nwise.app import cli
for line in sys.argv[1:]:
    if code := cli.run(line.split()):
        sys.exit(code)
odd = {"torchvision", "transformers", "datasets", "tokenizers", "plotly"} & set(sys.modules)
assert not odd, odd
"""


SMALL = {
    "digits": "--filters 4",
    "source-code": "--num-stages 2 --width 8 --num-heads 1 --sequence-length 256 --batch-size 64 --test-limit 20000",
}


def test_training_needs_no_network_and_imports_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train both recipes in one new process."""
    monkeypatch.chdir(tmp_path)
    lines = [f"train {recipe} {options} --max-steps 2 --runs runs" for recipe, options in SMALL.items()]
    (tmp_path / "offline.py").write_text(OFFLINE)
    done = forked(1, [str(tmp_path / "offline.py"), *lines], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == ["digits-2-wise-mean-001", "source-code-2-wise-mean-001"]
    assert all((run / "weights.safetensors").exists() for run in runs)
