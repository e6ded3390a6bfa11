"""Ranks that do not do the same: all of them end, with one sentence."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from launch import scripted

HEAD = """import os, torch
from nwise.checkpoint import Checkpoints
from nwise.checkpoint import gather_weights
from nwise.training.clip import Clip
from ranks.common import batches, pipeline
RANK = int(os.environ["RANK"])
"""
TRAIN = "for x, y in data:\n    pipe.step(x, target=y)\n"

# What two ranks do, and what both say.
DIFFERENT = {
    "strategies": (
        "pipeline(2, ['local', '2-wise-mean'][RANK], 1)",
        "`strategy` should be the same on every rank. Found 'local' on rank 0 and '2-wise-mean' on rank 1",
    ),
    # Regression: lists of equal shapes in another order trained a micro-batch with another one's gradient.
    "schedules": (
        f"pipe, data = pipeline(2, '2-wise', 2, schedule=['skewed', 'depth-first'][RANK]), batches(1)\n{TRAIN}",
        "same schedule. Found 2-wise with M = 2 here and 2-wise with M = 2 on rank [01], with lists that differ; make",
    ),
    # Regression: the last batch of one rank was larger, and a message met memory of another size.
    "lengths": (
        f"pipe, data = pipeline(2, '2-wise', 1), batches(3, sizes=(4, 5, 4 + RANK))\n{TRAIN}",
        r"should get (mini-batches of the same shapes|the whole mini-batch).*\. Found micro-batches, 1 of float32 \[\d, 6\]",
    ),
    # Regression: local training showed the difference only at its end, and the exit code was 0.
    "steps": (
        f"pipe, data = pipeline(2, 'local', 1), batches(3 - RANK)\n{TRAIN}",
        r"All ranks should make the same calls of nwise|Found (step 2 .*|the end .*) on rank [01] and (step 2|the end)",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_refused(what: str, tmp_path: Path) -> None:
    body, sentence = DIFFERENT[what]
    done = scripted(2, HEAD + body, tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(sentence, done.stderr), done.stderr


@pytest.mark.parametrize("call", ["pipe.step(x[:3], target=y[:3])", "gather_weights(pipe)"])
def test_rank_leaving_before_a_call_of_all_ends_all_ranks(call: str, tmp_path: Path) -> None:
    """Regression: with a batch of another shape, or a function of all ranks that one rank calls, that rank waited unwatched for
    twenty minutes. Then the other one was blamed."""
    began = time.monotonic()
    body = f"pipe, data = pipeline(2, '2-wise', 1), batches(2)\n{TRAIN}if RANK == 0:\n    {call}\n"
    done = scripted(2, HEAD + body, tmp_path)
    assert done.returncode != 0
    place = rf"\(`{'Pipeline.step' if 'step' in call else 'gather_weights'}` in script.py, line 11\)"
    assert re.search(
        rf"Found (.* {place} on rank 0 and the end|the end .* on rank 1 and .* {place} on rank 0)", done.stderr
    )
    assert time.monotonic() - began < 100, "and not 4 x 300 seconds"


@pytest.mark.parametrize("call", ["gather_weights(pipe)", "pipe(x)", "Clip(pipe, 1.0)()", "saved.save()"])
def test_call_of_one_rank_only_is_found_at_once(call: str, tmp_path: Path) -> None:
    """Regression: ``if rank == 0: gather_weights(pipe)`` between two steps hung for twenty minutes in silence; so did `save`."""
    began = time.monotonic()
    body = f"saved = Checkpoints({str(tmp_path)!r}, pipe)\n{TRAIN}    if RANK == 0:\n        {call}\n"
    done = scripted(2, f"{HEAD}pipe, data = pipeline(2, '2-wise', 1), batches(3)\n{body}", tmp_path)
    assert done.returncode != 0
    place = r".* \(`.*` in script.py, line (10|12)\) on rank [01]"
    assert re.search(f"Found {place} and {place}; make", done.stderr), done.stderr
    assert time.monotonic() - began < 60, "and not 4 x 300 seconds"
