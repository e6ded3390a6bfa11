"""Optimizers that tolerate late gradients: Muon for matrices, and extrapolated updates.

A gradient that is one update late was computed before the last update. Muon loses less by that than Adam, and an extrapolated
update makes up for most of the rest ("One-step gradient delay is not a barrier", arXiv 2606.30634).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nwise.pipeline import Pipeline


def hidden_matrices(pipe: Pipeline) -> list[nn.Parameter]:
    """Return this process's matrices, except those of embeddings and the last one of each head and of the network."""
    hidden = []
    for k in pipe.processes.here:
        for part, ends in ((pipe.stages[k], k == pipe.num_stages - 1), (pipe.heads.get(k), True)):
            modules = [] if part is None else [m for m in part.modules() if not isinstance(m, nn.Embedding)]
            matrices = [p for m in modules for p in m._parameters.values() if p is not None and p.ndim == 2]
            hidden += matrices[:-1] if ends else matrices
    return list(dict.fromkeys(hidden))


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for all other parameters, as one optimizer.

    Args:
        groups: groups of parameters, with a learning rate each or none.
        matrices: the parameters that Muon trains.
        lr: AdamW's learning rate.
        muon_lr: Muon's learning rate; for a group with a separate learning rate, both rates change in proportion.
        betas, eps, weight_decay: as in `torch.optim.AdamW`; Muon has the same weight decay.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Collection[Tensor],
        lr: float,
        muon_lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        muon, adam = [], []
        for group in groups:
            rate = group.get("lr", lr)
            hidden = [p for p in group["params"] if p in matrices]
            rest = [p for p in group["params"] if p not in matrices]
            muon += [{**group, "params": hidden, "lr": rate / lr * muon_lr}] if hidden else []
            adam += [{**group, "params": rest, "lr": rate}] if rest else []
        self._parts: list[torch.optim.Optimizer] = []
        if muon:
            self._parts.append(torch.optim.Muon(muon, lr=muon_lr, weight_decay=weight_decay))
        if adam:
            self._parts.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._matrices = {p for group in muon for p in group["params"]}
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state, so schedulers and checkpoints reach them."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, with the parts, which torch would leave out."""
        return {**super().__getstate__(), "_parts": self._parts, "_matrices": self._matrices}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: the parts have all parameters from the start."""
        if len(self.param_groups) == sum(len(part.param_groups) for part in self._parts):
            raise ValueError(
                "`MuonWithAdam` should get all parameters when it is made. Found a group to add later; make another."
            )
        super().add_param_group(param_group)

    def trains_by_muon(self, parameter: Tensor) -> bool:
        """Return whether Muon trains a parameter, not AdamW."""
        return parameter in self._matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("`closure` should be None, because several losses train a network. Found a function.")
        for part in self._parts:
            part.step()


def extrapolate(optimizer: torch.optim.Optimizer) -> None:
    """Make every update of an optimizer extrapolate: the change between the last two updates is added once more.

    With u[t] the update of the optimizer itself, ``w[t + 1] = w[t] + u[t] + (u[t] - u[t - 1])``. The first update stays as it is.

    Args:
        optimizer: the optimizer; its state keeps the last update of every parameter, under ``last_update``.

    >>> w = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([w], lr=1.0)
    >>> extrapolate(optimizer)
    >>> for gradient in (0.5, 0.25):
    ...     w.grad = torch.tensor([gradient])
    ...     optimizer.step()
    >>> w.item()  # 1 - 0.5, then - 0.25 + (-0.25 + 0.5)
    0.5
    """
    before: dict[Tensor, Tensor] = {}

    def remember(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        learns = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        before.update({p: p.detach().clone() for p in learns})

    @torch.no_grad()
    def add(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        for p, old in before.items():
            update = p - old
            state = optimizer.state[p]
            if "last_update" in state:
                p += update - state["last_update"]
            state["last_update"] = update
        before.clear()

    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(add)
