"""Ten rules of local learning on one small network: a rule is a strategy, heads, a loss, and sometimes work after the update.

    pip install '.[app]'; python examples/rules.py                          # all of them
    pip install '.[app]'; python examples/rules.py contrastive man

docs/rules.md explains each. All run on one process or several: torchrun --nproc-per-node 4 examples/rules.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.app.data import batch_indices, digits

A, CHANNELS, CLASSES = 4, 8, 10


def likeliest(pipe: nwise.Pipeline, x: Tensor) -> Tensor | None:
    """Return the likeliest class of each image by the network's logits, None in processes without the last stage."""
    output = pipe(x)
    logits = output[0] if isinstance(output, tuple) else output
    return None if logits is None else logits.argmax(1)


@dataclass
class Rule:
    """A network with what trains it.

    Args:
        pipe: the pipeline.
        step: function of the pipeline, images and labels that runs a step; default: the labels are the target of every loss.
        after_update: called after every update; default: nothing.
        predict: function from the pipeline and images to the classes, None where another process knows; default: the likeliest.
    """

    pipe: nwise.Pipeline
    step: Callable[[nwise.Pipeline, Tensor, Tensor], Tensor] = lambda pipe, x, y: pipe.step(x, target=y)
    after_update: Callable[[], object] = lambda: None
    predict: Callable[[nwise.Pipeline, Tensor], Tensor | None] = likeliest


def block(k: int) -> nn.Module:
    """Return a convolution of 8 x 8 digits with its ReLU."""
    return nn.Sequential(nn.Conv2d(1 if k == 0 else CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())


def classifier(bias: bool = True) -> nn.Module:
    """Return a linear layer on the flattened features."""
    return nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 64, CLASSES, bias=bias))


def network(end: nn.Module) -> list[nn.Module]:
    """Return A stages of a block each, the last one with an output."""
    return [*(block(k) for k in range(A - 1)), nn.Sequential(block(A - 1), end)]


def dgl() -> Rule:
    """Return decoupled greedy learning (Belilovsky et al. 2020): every block learns from its own convolutional head."""
    heads = [nwise.heads.convolutional(CHANNELS, CLASSES, widths=(8, 8), norm=None) for _ in range(A - 1)]
    return Rule(nwise.Pipeline(network(classifier()), heads, strategy="local"))


class PredSim(nn.Module):
    """Logits, and features whose similarities over the samples are compared with those of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.predict, self.similar = classifier(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict(x), self.similar(x).flatten(1)


def predsim_loss(outputs: tuple[Tensor, Tensor], y: Tensor, beta: float = 0.9) -> Tensor:
    """Return cross-entropy and the error of the samples' cosines, weighted."""
    logits, features = outputs
    onehot = functional.one_hot(y, CLASSES).to(features)
    first, second = (functional.normalize(z - z.mean(1, keepdim=True)) for z in (features, onehot))
    matching = functional.mse_loss(first @ first.T, second @ second.T)
    return (1 - beta) * functional.cross_entropy(logits, y) + beta * matching


def predsim() -> Rule:
    """Return local errors of two kinds (Nøkland and Eidnes 2019)."""
    heads = [PredSim() for _ in range(A - 1)]
    return Rule(nwise.Pipeline(network(PredSim()), heads, predsim_loss, "local"))


class InfoPro(nn.Module):
    """Logits, and the image as far as the features still have it."""

    def __init__(self) -> None:
        super().__init__()
        self.predict, self.decode = classifier(), nn.Conv2d(CHANNELS, 1, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict(x), self.decode(x)


def infopro_loss(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], weight: float = 0.3) -> Tensor:
    """Return cross-entropy, and the error of the reconstructed image, weighted."""
    return functional.cross_entropy(outputs[0], target[0]) + weight * functional.mse_loss(outputs[1], target[1])


def infopro() -> Rule:
    """Return information propagation (Wang et al. 2021): early blocks also keep what the image says; the last one need not."""

    def last(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(output, target[0])

    losses: list[Callable[..., Tensor]] = [*(infopro_loss for _ in range(A - 1)), last]
    pipe = nwise.Pipeline(network(classifier()), [InfoPro() for _ in range(A - 1)], losses, "local")
    return Rule(pipe, lambda pipe, x, y: pipe.step(x, target=(y, x)))


def auglocal(depth: int = 2) -> Rule:
    """Return heads of layers like those still to come, uniformly chosen (AugLocal, Ma et al. 2024); new values of their own."""
    heads = []
    for k in range(A - 1):
        left = A - 1 - k
        chosen = [round(k + left / min(depth, left) * i) for i in range(1, min(depth, left) + 1)]
        heads.append(nn.Sequential(*map(block, chosen), classifier()))
    return Rule(nwise.Pipeline(network(classifier()), heads, strategy="local"))


class MomentumHead(nn.Module):
    """A moving average of the next block beside a block that learns, then a classifier."""

    def __init__(self, following: nn.Module) -> None:
        super().__init__()
        self.average = copy.deepcopy(following).requires_grad_(False)
        self.bias, self.predict = block(1), classifier()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.predict(self.average(x) + self.bias(x))
        return logits


def man(momentum: float = 0.99) -> Rule:
    """Return a momentum auxiliary network (Su et al. 2024): the head of a block hears of the next one through its average."""
    stages = network(classifier())
    blocks = [stages[k] if k < A - 1 else stages[k].get_submodule("0") for k in range(A)]
    pipe = nwise.Pipeline(stages, [MomentumHead(blocks[k + 1]) for k in range(A - 1)], strategy="local")

    def follow() -> None:
        processes = pipe.processes
        for k in range(A - 1):
            here, there = k in processes.here, k + 1 in processes.here
            # The next block may be on another rank, which sends its values.
            values = [p.detach() for p in blocks[k + 1].parameters()] if there else []
            if there and not here:
                processes.send(values, processes.stage_rank(k))
            if here and not there:
                values = list(processes.receive(processes.stage_rank(k + 1)))
            if here:
                for mean, value in zip(pipe.heads[k].get_submodule("average").parameters(), values, strict=True):
                    mean.data.lerp_(value, 1 - momentum)

    return Rule(pipe, after_update=follow)


def mono_forward() -> Rule:
    """Return Mono-Forward (2025): a projection of every layer onto the classes, and no backward pass between layers."""
    heads = [classifier(bias=False) for _ in range(A - 1)]
    return Rule(nwise.Pipeline(network(classifier(bias=False)), heads, strategy="local"))


class KeepInput(nn.Module):
    """The first stage of a half, which passes on what it has been given, for the reconstruction."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), x.detach()


class Pass(nn.Module):
    """A later stage of that half; the half after it drops the second tensor."""

    def __init__(self, body: nn.Module, *, drop: bool = False) -> None:
        super().__init__()
        self.body, self.drop = body, drop

    def forward(self, x: Tensor, given: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.body(x) if self.drop else (self.body(x), given)


class Reconstruct(nn.Module):
    """The input of a half, decoded from its output, beside that input."""

    def __init__(self) -> None:
        super().__init__()
        self.decode = nn.Conv2d(CHANNELS, 1, 3, padding=1)

    def forward(self, x: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        return self.decode(x), given


def lopt() -> Rule:
    """Return LoPT (Shi et al. 2026): the first half reconstructs its input, the second learns the task."""
    a, b, c, d = network(classifier())
    stages = [KeepInput(a), Pass(b), Pass(c, drop=True), d]
    heads = [None, Reconstruct(), None]

    def reconstruction(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        return functional.mse_loss(*outputs)

    losses: list[Callable[..., Tensor]] = [
        reconstruction,
        reconstruction,
        functional.cross_entropy,
        functional.cross_entropy,
    ]
    return Rule(nwise.Pipeline(stages, heads, losses, nwise.Blocks(2)))


def backlink(size: int = 2, reach: int = 1) -> Rule:
    """Return backward links (Guo et al. 2022): the loss of a block of stages also trains the last stages of the block before."""
    credit = torch.zeros(A, A)
    for last in range(size - 1, A, size):
        credit[last, max(0, last + 1 - size - reach) : last + 1] = 1
    heads = [classifier() if credit[k].any() else None for k in range(A - 1)]
    return Rule(nwise.Pipeline(network(classifier()), heads, strategy=nwise.Credit(credit.tolist())))


class Normalized(nn.Module):
    """A linear layer with its ReLU on features of one length, so it cannot see how good the layer before found them."""

    def __init__(self, features: int, width: int = 128) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(features, width), features**0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.scale * functional.normalize(x.flatten(1))).relu()


def marked(x: Tensor, y: Tensor) -> Tensor:
    """Return images beside a label, as one vector."""
    return torch.cat([x.flatten(1), 3.0 * functional.one_hot(y, CLASSES).to(x)], 1)


def goodness(features: Tensor) -> Tensor:
    """Return the mean square of the features of each sample."""
    return features.flatten(1).square().mean(1)


def goodness_loss(features: Tensor, sign: Tensor, threshold: float = 0.5) -> Tensor:
    """Return how far from the threshold the goodness is on the wrong side; `sign` is 1 for right labels, -1 for wrong ones."""
    return functional.softplus(sign * (threshold - goodness(features))).mean()


def forward_forward() -> Rule:
    """Return the forward-forward algorithm (Hinton 2022): images with right and with wrong labels in one batch, no backward."""
    stages = [Normalized(64 + CLASSES), *(Normalized(128) for _ in range(1, A))]
    pipe = nwise.Pipeline(stages, [nn.Identity() for _ in range(A - 1)], goodness_loss, "local")

    def step(pipe: nwise.Pipeline, x: Tensor, y: Tensor) -> Tensor:
        wrong = (y + 1 + torch.arange(len(y)) % (CLASSES - 1)) % CLASSES
        signs = torch.tensor([1.0, -1.0]).repeat_interleave(len(y)).to(x)
        return pipe.step(torch.cat([marked(x, y), marked(x, wrong)]), target=signs)

    def best(pipe: nwise.Pipeline, x: Tensor) -> Tensor | None:
        found = [pipe.head_outputs(marked(x, torch.full((len(x),), label))) for label in range(CLASSES)]
        here = {k: torch.stack([goodness(outputs[k]) for outputs in found]) for k in pipe.here}  # type: ignore[arg-type]
        return pipe.processes.table(here).sum(0).argmax(0)  # of all stages, on every process

    return Rule(pipe, step, predict=best)


class Probed(nn.Module):
    """A projection of the features, and logits that teach the features nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 64, 32))
        self.predict = classifier()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict(x.detach()), self.project(x)


def views(x: Tensor) -> Tensor:
    """Return two views of every image, moved by a pixel and in noise: first all first ones, then all second ones."""
    # The values of the images seed the noise, so all processes draw the same.
    drawn = torch.Generator().manual_seed(int(x.double().sum().item() * 1000))
    moves = torch.randint(-1, 2, (2, 2), generator=drawn).tolist()
    moved = torch.cat([x.roll(move, (2, 3)) for move in moves])
    return moved + 0.3 * torch.randn(moved.shape, generator=drawn).to(x)


def contrast(outputs: tuple[Tensor, Tensor], y: Tensor, temperature: float = 0.2) -> Tensor:
    """Return how badly the two views of an image find each other among all others, and the loss of the probe."""
    logits, features = outputs
    codes = functional.normalize(features)
    alike = codes @ codes.T / temperature - torch.eye(len(codes)).to(codes) * 1e9
    other = torch.arange(len(codes)).roll(len(codes) // 2)
    return functional.cross_entropy(alike, other) + functional.cross_entropy(logits, y)


def contrastive(microbatches: int = 2) -> Rule:
    """Return a contrastive loss for every block (as Xiong et al. 2020 and Siddiqui et al. 2023), without labels.

    A pair must stay in one micro-batch, so the step is given whole micro-batches.
    """
    heads = [Probed() for _ in range(A - 1)]
    pipe = nwise.Pipeline(network(Probed()), heads, contrast, "local", microbatches)

    def step(pipe: nwise.Pipeline, x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)
        pairs = [(views(images), labels.repeat(2)) for images, labels in parts]
        return pipe.step(microbatches=[pair[0] for pair in pairs], targets=[pair[1] for pair in pairs])

    return Rule(pipe, step)


RULES: dict[str, Callable[[], Rule]] = {
    "dgl": dgl,
    "predsim": predsim,
    "infopro": infopro,
    "auglocal": auglocal,
    "man": man,
    "mono-forward": mono_forward,
    "lopt": lopt,
    "backlink": backlink,
    "forward-forward": forward_forward,
    "contrastive": contrastive,
}


def train(name: str, steps: int = 150, seed: int = 0) -> float:
    """Train the digits by a rule, and return the test accuracy; nan in processes without the last stage."""
    torch.manual_seed(seed)
    rule = RULES[name]()
    pipe = rule.pipe
    train, test = digits()
    optimizer = torch.optim.Adam((p for p in pipe.parameters() if p.requires_grad), lr=3e-3)
    for step in range(steps):
        x, y = train.batch(batch_indices(len(train), 64, seed=seed, step=step))
        rule.step(pipe, x, y)
        optimizer.step()
        optimizer.zero_grad()
        rule.after_update()
    pipe.eval()
    with torch.no_grad():
        x, y = test.batch(torch.arange(len(test)))
        found = rule.predict(pipe, x)
    pipe.close()
    return float("nan") if found is None else (found == y).float().mean().item()


if __name__ == "__main__":
    for name in sys.argv[1:] or RULES:
        accuracy = train(name)
        if accuracy == accuracy:
            print(f"{name:14}{100 * accuracy:.1f} %", flush=True)
