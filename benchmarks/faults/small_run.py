"""One rank of a small training run on random images, which continues when torchrun starts it again; for `kills.py`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nwise.app.data import Images
from nwise.app.recipes import Mlp, Recipe
from nwise.app.training import CheckpointPolicy, Run, Trainer, new_run


def data() -> tuple[Images, Images]:
    """Draw random images, the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (512, 1, 8, 8), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (512,), generator=generator)
    classes = tuple(map(str, range(10)))

    def part(chosen: slice) -> Images:
        return Images(pixels[chosen], labels[chosen], classes, (0.5,), (0.3,), "none", 8)

    return part(slice(384)), part(slice(384, None))


def main(parent: Path, steps: int, every: int) -> None:
    """Train; rank 0 writes for all."""
    torch.set_num_threads(1)
    (parent / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    recipe = Recipe(
        name="faults",
        model=Mlp(num_stages=4, width=64),
        strategy="2-wise",
        microbatches=2,
        batch_size=32,
        epochs=1000,
        max_steps=steps,
        eval_every=0.5,
        log_every=5,
    )
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    earlier = Run.find_restarted(parent, recipe) if again else None
    trainer = Trainer(recipe, data())
    run = (earlier or new_run(recipe, parent)) if os.environ["RANK"] == "0" else None
    trainer.train(run, policy=CheckpointPolicy(checkpoint_every=every), resume=earlier is not None, allow_restart=True)
