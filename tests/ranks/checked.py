"""What the check finds in stages of several ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import nwise
from breaking import KINDS, TENSORS, WIDTH, X, Y
from ranks.common import closed, write

NAMES = [name for name, (*_, several, _) in KINDS.items() if several != "raises"]


def pipeline(name: str) -> nwise.Pipeline:
    """Four stages, of which the third may break the contract."""
    torch.manual_seed(0)
    net = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), TENSORS[name](), nn.Linear(WIDTH, 3)]
    heads = [nn.Linear(WIDTH, 3) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch norm with micro-batches
        return nwise.Pipeline(net, heads, strategy="2-wise-mean", num_microbatches=2, schedule="skewed", seed=0)


def found(name: str) -> list[str]:
    """The findings, as every rank has them."""
    pipe = pipeline(name)
    return closed(pipe, [str(one) for one in nwise.check(pipe, X, target=Y).findings])


def raised() -> str:
    """The error of a first step."""
    pipe = pipeline("adds a gradient")
    with pytest.raises(nwise.ContractError) as error:
        pipe.step(X, target=Y)
    return closed(pipe, str(error.value).splitlines()[1])


def replicas(*, deferred: bool) -> list[str]:
    """The findings in two stages, with batch norm; on four ranks in two replicas."""
    torch.manual_seed(0)
    net: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), nn.Linear(WIDTH, 3)]
    pipe = nwise.Pipeline(
        [nwise.defer_batchnorm(stage) if deferred else stage for stage in net], strategy="end-to-end", seed=0
    )
    return closed(pipe, [str(one) for one in nwise.check(pipe, X, target=Y).findings])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    findings = {name: found(name) for name in NAMES}
    write([findings, replicas(deferred=False), replicas(deferred=True), raised()])
