"""Ranks that do not do the same: all of them end, with one sentence."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from launch import Done, forked


def on_two_ranks(script: Path, text: str) -> Done:
    """Write a script and run it on two ranks."""
    script.write_text(text)
    return forked(2, [str(script)], script.parent)


def test_ranks_whose_strategies_differ_are_refused(tmp_path: Path) -> None:
    done = on_two_ranks(
        tmp_path / "disagree.py",
        "import os\nfrom ranks.common import pipeline\npipeline(2, ['local', '2-wise-mean'][int(os.environ['RANK'])], 1)\n",
    )
    assert done.returncode != 0
    assert (
        "`strategy` should be the same on every rank. Found 'local' on rank 0 and '2-wise-mean' on rank 1"
        in done.stderr
    )


def test_ranks_whose_schedules_differ_are_refused(tmp_path: Path) -> None:
    """Regression: lists of equal shapes in another order trained a micro-batch with another one's gradient."""
    done = on_two_ranks(
        tmp_path / "schedules.py",
        "import os\n"
        "from ranks.common import batches, pipeline\n"
        "order = ['skewed', 'depth-first'][int(os.environ['RANK'])]\n"
        "pipe = pipeline(2, '2-wise', 2, schedule=order)\n"
        "for x, y in batches(1):\n    pipe.step(x, target=y)\n",
    )
    assert done.returncode != 0
    assert re.search(
        r"Every rank should have the same schedule. Found lists that differ from those of rank [01]; make the same calls",
        done.stderr,
    )


def test_mini_batches_of_other_shapes_end_all_ranks_soon(tmp_path: Path) -> None:
    """Shapes that both ranks know: no header tells the difference. A process test, because gloo ended the process.

    Regression: the last batch of one rank was larger, and a message met memory of another size.
    """
    done = on_two_ranks(
        tmp_path / "lengths.py",
        "import os, torch\nfrom ranks.common import batches, pipeline\npipe = pipeline(2, '2-wise', 1)\n"
        "for x, y in batches(3, sizes=(4, 5, 4 + int(os.environ['RANK']))):\n    pipe.step(x, target=y)\n",
    )
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"should get mini-batches of the same shapes as rank \d. Found micro-batches, 1 of float32 \[\d, 6\] in step 2",
        done.stderr,
    ), done.stderr


def test_rank_with_fewer_steps_fails_all_ranks(tmp_path: Path) -> None:
    """Regression: local training showed the difference only at its end, and the exit code was 0."""
    done = on_two_ranks(
        tmp_path / "fewer.py",
        "import os\nfrom ranks.common import batches, pipeline\npipe = pipeline(2, 'local', 1)\n"
        "for x, y in batches(3 - int(os.environ['RANK'])):\n    pipe.step(x, target=y)\n",
    )
    assert done.returncode != 0
    assert re.search(
        r"All ranks should make the same calls of nwise|Found (step 2 .*|the end .*) on rank [01] and (step 2|the end)",
        done.stderr,
    )


@pytest.mark.parametrize("call", ["pipe.step(x[:3], target=y[:3])", "gather_weights(pipe)"])
def test_rank_leaving_before_a_call_of_all_ends_all_ranks(call: str, tmp_path: Path) -> None:
    """Regression: with a batch of another shape, or a function of all ranks that one rank calls, that rank waited unwatched for
    twenty minutes. Then the other one was blamed."""
    began = time.monotonic()
    done = on_two_ranks(
        tmp_path / "leaving.py",
        "import os\nfrom nwise.training import gather_weights\nfrom ranks.common import batches, pipeline\n"
        "pipe = pipeline(2, '2-wise', 1)\nfor x, y in batches(2):\n    pipe.step(x, target=y)\n"
        f"if os.environ['RANK'] == '0':\n    {call}\n",
    )
    assert done.returncode != 0
    place = rf"\(`{'Pipeline.step' if 'step' in call else 'gather_weights'}` in leaving.py, line 8\)"
    assert re.search(
        rf"Found (.* {place} on rank 0 and the end|the end .* on rank 1 and .* {place} on rank 0)", done.stderr
    )
    assert time.monotonic() - began < 100, "and not 4 x 300 seconds"


@pytest.mark.parametrize("call", ["gather_weights(pipe)", "pipe(x)", "Clip(pipe, 1.0)()", "saved.save()"])
def test_call_of_one_rank_only_is_found_at_once(call: str, tmp_path: Path) -> None:
    """Regression: ``if rank == 0: gather_weights(pipe)`` between two steps hung for twenty minutes in silence; so did `save`."""
    began = time.monotonic()
    done = on_two_ranks(
        tmp_path / "guarded.py",
        "import os\nfrom nwise.checkpoint import Checkpoints\nfrom nwise.training import gather_weights\n"
        "from nwise.training.clip import Clip\nfrom ranks.common import batches, pipeline\n"
        f"pipe = pipeline(2, '2-wise', 1)\nsaved = Checkpoints({str(tmp_path)!r}, pipe)\n"
        "for x, y in batches(3):\n    pipe.step(x, target=y)\n"
        f"    if os.environ['RANK'] == '0':\n        {call}\n",
    )
    assert done.returncode != 0
    place = r".* \(`.*` in guarded.py, line (9|11)\) on rank [01]"
    assert re.search(f"Found {place} and {place}; make", done.stderr), done.stderr
    assert time.monotonic() - began < 60, "and not 4 x 300 seconds"
