"""A loop of Accelerate: its loader, mixed precision, clipping and trackers; the pipeline itself is not prepared.

pip install . accelerate; python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nwise


def main(mixed_precision: str = "bf16", epochs: int = 6) -> float:
    """Train, and return the last loss."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 2))
    stages = nwise.split(model.to(accelerator.device), at=["1", "2", "3"])
    heads = nwise.heads.fitting(stages, torch.zeros(1, 8, device=accelerator.device), 2)
    # `prepare` would wrap the network for data parallelism, so only the optimizer and the loader go through it.
    pipe = nwise.Pipeline(stages, heads, nn.functional.cross_entropy, "2-wise", num_microbatches=2)
    x = torch.randn(512, 8)
    data = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 32, shuffle=True)
    optimizer, loader = accelerator.prepare(torch.optim.AdamW(pipe.parameters(), 1e-2), data)
    for _ in range(epochs):
        for inputs, target in loader:
            with accelerator.autocast():
                losses = pipe.step(inputs, target=target)  # instead of `accelerator.backward`
            accelerator.clip_grad_norm_(pipe.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"losses {[round(loss, 3) for loss in losses.tolist()]}")
    return losses[-1].item()


if __name__ == "__main__":
    main()
