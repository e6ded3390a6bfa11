"""Replicas of a stage: gradients of all kinds are those of plain PyTorch, and a difference between replicas is found."""

from __future__ import annotations

from pathlib import Path

from launch import results
from ranks.replicated import CASES

REFUSALS = {
    "CrossEntropyLoss": "should be alike. Found loss: CrossEntropyLoss",
    "partial": "should be alike. Found loss: cross_entropy with {'ignore_index': 0} on rank 0",
    "frozen": "Found parameter stage.0.weight: [4, 4], torch.float32, trainable on rank 0 and [4, 4], torch.float32, frozen on",
    "evaluated": "Found mode of stage.0: training on rank 0 and evaluation on rank 1",
    "options": "Found options of stage.2: p=0.1, inplace=False on rank 0 and p=0.5, inplace=False on rank 1",
    "split": "Found stage.0.weight of stage 0 split over the mesh's dimension 'dp'",
    "values": "should have the same parameters. Found stage.1.bias with values that differ by 0.00",
    "evaluated later": "should have the same trainable parameters and modes. Found others on some ranks",
    "frozen later": "should have the same trainable parameters and modes. Found others on some ranks",
}


def test_replicas_match_plain_training_and_differences_are_found(tmp_path: Path) -> None:
    """Regressions: sparse gradients failed; a loss, mode or frozen parameter that differed trained something else in silence, and
    so did weights that one replica loaded later, and updates in a post-accumulate hook, which saw half of a gradient."""
    for found in results(2, "replicated.py", tmp_path):
        assert found["errors"].keys() == CASES.keys()
        for name, error in found["errors"].items():
            assert error < (2e-2 if name == "two precisions" else 1e-12), name
        assert found["refusals"].keys() == REFUSALS.keys()
        for name, text in REFUSALS.items():
            assert text in found["refusals"][name], name
        assert "`inputs` should be the same on every rank. Found" in found["inputs"]
