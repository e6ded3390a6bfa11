"""fp16 with one loss scale for all stages: an overflow on any rank skips the update on every rank and lowers the scale of all.

pip install .; python examples/fp16.py; torchrun --nproc-per-node 2 examples/fp16.py
"""

from functools import partial

import torch
from torch import Tensor, nn

import nwise
from nwise.runtime.sums import Sums


def scaled(scaler: torch.amp.GradScaler, output: Tensor, target: Tensor) -> Tensor:
    """Return the loss times the scale."""
    return scaler.scale(nn.functional.cross_entropy(output.float(), target))


def overflow_everywhere(pipe: nwise.Pipeline) -> bool:
    """Return whether any rank's gradients are not finite; if so, leave such a gradient on every rank, so all scalers skip."""
    gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    bad = torch.tensor([float(sum(bool((~g.isfinite()).any()) for g in gradients))])
    all_stages = tuple(range(pipe.num_stages))
    [count] = Sums(pipe.processes, [all_stages])([(all_stages, bad)])
    if count:
        gradients[0].view(-1)[0] = float("inf")
    return bool(count)


def main(steps: int = 60, first_scale: float = 2.0**17) -> tuple[float, int, float]:
    """Train, and return the last loss, the number of skipped updates and the last scale."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)), nn.Linear(16, 2)).to(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=first_scale, growth_interval=20)
    scaler.scale(torch.zeros((), device=device))  # it makes its scale at the first call, and some ranks have no loss
    stages = nwise.split(model, at=["1"])
    heads = nwise.heads.fitting(stages, torch.zeros(1, 16, device=device), 2)
    pipe = nwise.Pipeline(stages, heads, partial(scaled, scaler), "2-wise", num_microbatches=2)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)
    skipped = 0
    for _ in range(steps):
        x, scale = torch.randn(32, 16, device=device), scaler.get_scale()
        with torch.autocast(device.type, torch.float16):
            losses = pipe.step(x, target=(x.sum(1) > 0).long())
        skipped += overflow_everywhere(pipe)
        scaler.step(optimizer)  # divides the gradients by the scale, or skips
        scaler.update()
        optimizer.zero_grad()
    result = losses[-1].item() / scale, skipped, scaler.get_scale()
    pipe.close()
    return result


if __name__ == "__main__":
    loss, skipped, scale = main()
    if loss == loss:  # nan where another process has the last stage
        print(f"loss {loss:.3f}, {skipped} steps skipped, scale {scale:g}")
