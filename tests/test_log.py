"""A log of any training loop: what it writes, how it goes on, and that the report reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nwise
from launch import results
from nwise.app import Log, cli
from nwise.app.recipes import recipe
from nwise.app.report.summary import Summary
from nwise.app.training import Run, new_run
from ranks import logged
from ranks.common import closed, digests


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def pipeline(strategy: str | nwise.Strategy = "2-wise-mean") -> nwise.Pipeline:
    torch.manual_seed(0)
    return nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 3)], [nn.Linear(4, 3)], strategy=strategy)


def step(pipe: nwise.Pipeline) -> torch.Tensor:
    return pipe.step(torch.randn(6, 4), target=torch.arange(6) % 3)


def test_a_stopped_loop_goes_on_in_its_log(tmp_path: Path) -> None:
    """Steps after the checkpoint are made again, and the log has each of them once."""
    _, whole = logged.logged(tmp_path / "whole", 6)
    logged.logged(tmp_path / "stopped", 3)
    _, records = logged.logged(tmp_path / "stopped", 6)
    assert untimed(records) == untimed(whole)
    assert [(record["kind"], record["step"]) for record in records if record["kind"] == "test"] == [
        ("test", 2),
        ("test", 4),
        ("test", 6),
    ]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert sorted(record["seconds"] for record in records) == [record["seconds"] for record in records]
    run = Run.open(tmp_path / "stopped")
    assert run.status == "done"
    assert run.state["resumed"][0]["step"] == 2


def test_logs_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    pipe, expected = logged.logged(tmp_path / "one", 6)
    assert expected[0]["loss"] != [None] * 3
    found = results(3, "logged.py", tmp_path, str(tmp_path / "several"))
    for one, two in zip(untimed(found[0]["records"]), untimed(expected), strict=True):
        assert one.keys() == two.keys()
        for name in ("loss", "accuracy"):
            if name in two:
                assert one[name] == pytest.approx(two[name], rel=1e-6, nan_ok=True)
        assert (one["kind"], one["step"], one["samples"]) == (two["kind"], two["step"], two["samples"])
    together = {name: digest for one in found for name, digest in one["digests"].items()}
    assert together == json.loads(json.dumps(closed(pipe, digests(pipe))))
    assert [one["records"] for one in found[1:]] == [[], []]
    (summary,) = Summary.open_all([tmp_path / "several"])
    assert summary.measured is not None
    assert len(summary.measured.bytes_sent) == 3


def test_a_log_is_shown_beside_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    logged.logged(tmp_path / "mine", 4)
    assert cli.run(["report", str(tmp_path / "mine"), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    assert (one["run"], one["strategy"], one["status"]) == ("mine", "2-wise-mean", "done")
    assert len(one["last_test"]["accuracy"]) == 3
    assert "2-wise-mean" in (tmp_path / "mine" / "report.html").read_text()


def test_a_log_knows_every_strategy_of_its_loop(tmp_path: Path) -> None:
    pipe = pipeline("local")
    with Log(tmp_path / "mine", pipe, batch_size=6, every=1) as log:
        for strategy in ("local", "local", "end-to-end"):
            pipe.strategy = nwise.strategy(strategy)
            log.step(step(pipe))
        log.test(torch.tensor([0.5, float("nan")]))
    (summary,) = Summary.open_all([tmp_path / "mine"])
    assert summary.strategy == "local@2,end-to-end"
    assert summary.tests[0]["loss"] == [0.5, None]
    assert summary.tests[0]["accuracy"] == [None, None]


def test_a_log_that_goes_on_keeps_its_strategies_and_samples(tmp_path: Path) -> None:
    """Regression: a resumed log lost the strategies before it, or listed two at one step, which `nwise report` cannot read."""
    pipe = pipeline("local")
    for strategies in (["end-to-end", "end-to-end"], ["end-to-end"], ["2-wise", "local", "local"]):
        pipe.strategy = nwise.strategy(strategies[0], heads="all")
        with Log(tmp_path / "mine", pipe, batch_size=6, every=2) as log:
            for strategy in strategies:
                pipe.strategy = nwise.strategy(strategy, heads="all")
                log.step(step(pipe), lr=0.1)
            log.test(torch.zeros(2))
    (summary,) = Summary.open_all([tmp_path / "mine"])
    assert summary.strategy == "end-to-end@3,2-wise@4,local"
    assert [(one["step"], one["samples"]) for one in summary.records] == [
        *((2, 12), (2, 12), (3, 18), (4, 24), (6, 36), (6, 36))
    ]
    assert summary.history == ["resumed from step 2", "resumed from step 3"]


def test_a_strategy_that_is_set_before_the_first_step_is_the_first(tmp_path: Path) -> None:
    pipe = pipeline("local")
    with Log(tmp_path / "mine", pipe, batch_size=6, every=1) as log:
        pipe.strategy = nwise.strategy("end-to-end")
        log.step(step(pipe))
        log.test(torch.zeros(2))
    assert Summary.open_all([tmp_path / "mine"])[0].strategy == "end-to-end"


def test_a_loop_that_fails_leaves_a_log_that_says_so(tmp_path: Path) -> None:
    pipe = pipeline()

    def loop() -> None:
        with Log(tmp_path / "mine", pipe, batch_size=6, every=1) as log:
            log.step(step(pipe))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        loop()
    assert Run.open(tmp_path / "mine").status == "failed"
    assert len(Run.open(tmp_path / "mine").metrics()) == 1


def test_what_a_log_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(nwise.Local):
        name = "mine"

    run = new_run(recipe("digits"), tmp_path)
    with pytest.raises(ValueError, match="should be a new folder, or one with a log. Found a run of `nwise train`"):
        Log(run.folder, pipeline(), batch_size=6)
    with pytest.raises(
        ValueError, match="should have a name that `nwise.strategy` knows. Found 'mine'; give its matrix"
    ):
        Log(tmp_path / "own", pipeline(Own()), batch_size=6)
    with pytest.raises(ValueError, match="`every` should be an integer of at least 1. Found 0"):
        Log(tmp_path / "own", pipeline(), batch_size=6, every=0)
    with pytest.raises(ValueError, match="`quality` should be one of loss, accuracy, perplexity. Found 'bogus'"):
        Log(tmp_path / "own", pipeline(), batch_size=6, quality="bogus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`timeline` should be 0 in one process. Found 2"):
        Log(tmp_path / "own", pipeline(), batch_size=6, timeline=2)
    with Log(tmp_path / "mine", pipeline(), batch_size=6) as log:
        with pytest.raises(ValueError, match=r"`loss` should have a number for each of the 2 stages. Found shape \[\]"):
            log.test(torch.tensor(0.5))
        with pytest.raises(
            ValueError, match=r"`losses` should have a number for each of the 2 stages. Found shape \[3\]"
        ):
            log.step(torch.zeros(3))
    assert cli.run(["same", str(tmp_path / "mine"), str(tmp_path / "mine")]) == 1
    assert "Neither run has a record or weights." in capsys.readouterr().out
    assert cli.run(["evaluate", str(tmp_path / "mine")]) == 2
    assert "should be a run of `nwise train`. Found the log of another loop" in capsys.readouterr().err


def test_two_runs_are_the_same_or_part_somewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["train", "digits", "--filters", "2", "--max-steps", "6", "--log-every", "2", "--runs", str(tmp_path)]
    assert cli.run(quick) == cli.run(quick) == cli.run([*quick, "--lr", "0.002"]) == 0
    one, two, three = (str(tmp_path / f"digits-2-wise-mean-00{i}") for i in (1, 2, 3))
    capsys.readouterr()
    assert cli.run(["same", one, two]) == 0
    assert re.fullmatch(r"The same: \d+ records and \d+ tensors, bit for bit.\n", capsys.readouterr().out)
    assert cli.run(["same", one, three]) == 1
    out = capsys.readouterr().out
    assert re.search(r"They part at step 2, train: loss of stage \d is 2\.\d+ and 2\.\d+\.", out)
    assert re.search(r"\d+ of \d+ tensors of the weights differ, \S+ most: by ", out)
    with (tmp_path / "digits-2-wise-mean-002" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 8}\n')
    assert cli.run(["same", one, two, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["alone"], found["first"], found["apart"]) == (False, 1, None, {})
    assert cli.run(["same", one, str(tmp_path)]) == 2
    assert "A run should be a folder with a run.json" in capsys.readouterr().err
