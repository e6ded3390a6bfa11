"""Another strategy from a step on, the paper's fine-tuning: by hand, and in the trainer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import nwise
from nwise.app.recipes import Adam, ConvNet, Mlp, Sgd, recipe
from nwise.app.training import Callback, CheckpointPolicy, Trainer, new_run


@pytest.mark.usefixtures("float64")
def test_switch_updates_by_hand() -> None:
    """y = w1 w0 x, loss = output, x = 1, w = 2, head v = 3 at stage 0, rate 0.1; local for one step, then end-to-end.

    step 0, local:      g0 = v = 3, gv = w0 = 2, g1 = w0 = 2   -> w0 = 1.7, v = 2.8, w1 = 1.8
    step 1, end-to-end: g0 = w1 = 1.8, g1 = w0 = 1.7, no head  -> w0 = 1.52, w1 = 1.63
    """
    stages = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    head = nn.Linear(1, 1, bias=False)
    for module, value in ((stages[0], 2.0), (stages[1], 2.0), (head, 3.0)):
        nn.init.constant_(module.weight, value)
    pipe = nwise.Pipeline(stages, [head], lambda output, target: output.mean(), "local")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    assert torch.equal(pipe.credit, torch.eye(2))
    assert pipe.step(torch.ones(1, 1)).tolist() == [6.0, 4.0]
    optimizer.step()
    optimizer.zero_grad()
    assert [stages[0].weight.item(), head.weight.item(), stages[1].weight.item()] == pytest.approx([1.7, 2.8, 1.8])

    pipe.strategy = "end-to-end"
    assert torch.equal(pipe.credit, nwise.EndToEnd().credit(2))
    pipe.discard_heads()
    assert list(pipe.head_parameters()) == []
    losses = pipe.step(torch.ones(1, 1))
    assert losses[0].isnan()
    optimizer.step()
    assert [stages[0].weight.item(), stages[1].weight.item()] == pytest.approx([1.52, 1.63])
    assert head.weight.item() == pytest.approx(2.8)


def test_switch_in_trainer_resets_heads_optimizer_and_rate(tmp_path: Path) -> None:
    config = dataclasses.replace(
        recipe("digits"),
        model=ConvNet(num_stages=4, filters=2),
        strategy="local@2epochs,end-to-end",
        heads="live",
        optimizer=Adam(lr=1e-3),
        then=Sgd(lr=0.05, momentum=0.9, weight_decay=0.0, drops=(0.5,)),
        epochs=4,
        log_every=1,
    )
    run = new_run(config, tmp_path)
    trainer = Trainer(config)
    trainer.train(run)
    assert trainer.steps_per_epoch == 22
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = {r["step"]: r for r in records if r["kind"] == "train"}
    assert [steps[s]["lr"] for s in (1, 44, 45, 66, 67, 88)] == pytest.approx([1e-3, 1e-3, 0.05, 0.05, 0.005, 0.005])
    assert all(value is not None for value in steps[44]["loss"])
    assert steps[45]["loss"][:-1] == [None, None, None]
    assert not trainer.pipe.heads
    assert not [name for name in run.weights() if name.startswith("heads.")]


class Notes(Callback):
    def __init__(self) -> None:
        self.changes = ""

    def resumed(self, step: int, changes: str) -> None:
        self.changes = f"{step}: {changes}"


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("local@2,end-to-end", "2: dropped the heads of the former stages 0, 1"),
        ("local@3,end-to-end", "2: strategy local@2,end-to-end -> local@3,end-to-end"),
    ],
)
def test_resume_tells_of_the_strategies_of_all_steps(then: str, told: str, tmp_path: Path) -> None:
    """The strategy at the end of one phase is another than at the start of the next; that alone is no change."""
    config = dataclasses.replace(
        recipe("digits"), model=Mlp(num_stages=3, width=8), strategy="local@2,end-to-end", heads="live", max_steps=2
    )
    run, notes = new_run(config, tmp_path), Notes()
    Trainer(config).train(run, policy=CheckpointPolicy())
    Trainer(dataclasses.replace(config, strategy=then, max_steps=4)).train(run, (notes,), resume=True)
    assert notes.changes == told
