"""Optimizers that tolerate late gradients: Muon for matrices, extrapolated updates, and predicted weights.

A gradient that is one update late was computed before the last update. Muon loses less by that than Adam, and an extrapolated
update makes up for most of the rest ("One-step gradient delay is not a barrier", arXiv 2606.30634). For longer delays a forward
can run at weights that are predicted for the time of its gradient (SpecTrain, arXiv 1809.02839; XPipe, arXiv 1911.04610).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from nwise._torch import COMPILED, plain_name, post_hooks
from nwise.checks import check_at_least
from nwise.pipeline import Pipeline
from nwise.training.fused import Fused, known_parts

__all__ = ["MuonWithAdam", "actual_weights", "extrapolate", "hidden_matrices", "predict", "settle"]

# Parameters of two dimensions that multiply nothing, such as the biases of all experts, or that make a matrix with others.
_NO_MATRIX = re.compile(r"bias|embed|token|pos_|position|table|A_log|original|weight_(orig|g|v)$")
_ADAPTER = re.compile(r"(^|\.)(lora_|lokr_|hada_)")


def hidden_matrices(
    pipe: Pipeline, fused: Mapping[str, Fused | None] | None = None
) -> dict[nn.Parameter, Fused | None]:
    """Return this process's matrices that Muon should train, each with its logical matrices, None if it is one.

    These are the trainable parameters of two dimensions, except embeddings, the last matrix of each head and of the network,
    and adapters of low rank (LoRA). Stacked matrices of more dimensions, such as those of experts, are not among them.

    Args:
        pipe: the pipeline.
        fused: by name or pattern of names (``"*.qkv.weight"``), how a matrix consists of several, or None if it is one matrix;
            default: known layers are fused as in their own code (`docs/options.md`).

    Raises:
        ValueError: a matrix looks fused, and neither `fused` nor a known layer says how; or its shape differs.
    """
    hidden: dict[nn.Parameter, Fused | None] = {}
    for k in pipe.processes.here:
        for what, part in (("model", pipe.stages[k]), (f"heads.{k}", pipe.heads.get(k))):
            ends = what != "model" or k == pipe.num_stages - 1
            found = [] if part is None else list(_matrices(part))
            for name, p, layer, owner in found[:-1] if ends else found:
                if p.requires_grad and p not in hidden:
                    whole = f"{what}.{name}"
                    given = [parts for pattern, parts in (fused or {}).items() if fnmatchcase(whole, pattern)]
                    hidden[p] = parts = given[0] if given else known_parts(name, p, layer, owner)
                    if parts is not None:
                        parts.check(p, whole)
    return hidden


def _matrices(part: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module, nn.Module]]:
    """Iterate over the names and matrices of a stage or head, with their layer and the module around it."""
    modules = dict(part.named_modules())
    # Those that PEFT adds.
    added = tuple(f".{path}.{a}." for path, m in modules.items() for a in getattr(m, "adapter_layer_names", ()))
    for path, layer in modules.items():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) or f".{path}.".startswith(added):
            continue
        bare = re.sub(rf"((^|\.)({COMPILED}|base_layer))+$", "", path)  # the place of a layer that something wraps
        owner = modules[bare.rpartition(".")[0]]
        for leaf, p in layer.named_parameters(recurse=False):
            name = plain_name(f"{bare}.{leaf}" if bare else leaf)
            is_matrix = p.ndim == 2 and min(p.shape) > 1 and not _NO_MATRIX.search(leaf)
            if is_matrix and not _ADAPTER.search(name):
                yield name, p, layer, owner


class MuonWithAdam(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for all other parameters, as one optimizer.

    Args:
        groups: groups of parameters, with a learning rate each or none.
        matrices: the parameters that Muon trains, with the logical matrices of fused ones (`hidden_matrices`); without them,
            each is one matrix.
        lr: AdamW's learning rate.
        muon_lr: Muon's learning rate; for a group with a separate learning rate, both rates change in proportion.
        betas, eps, weight_decay: as in `torch.optim.AdamW`; Muon has the same weight decay.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Mapping[nn.Parameter, Fused | None] | Collection[Tensor],
        lr: float,
        muon_lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        muon = []
        adam = []
        known: Mapping[Any, Fused | None] = matrices if isinstance(matrices, Mapping) else dict.fromkeys(matrices)
        # A group with half of AdamW's rate has half of Muon's, too.
        for group in groups:
            rate = group.get("lr", lr)
            if hidden := [p for p in group["params"] if p in known]:
                muon.append({**group, "params": hidden, "lr": rate / lr * muon_lr})
            if rest := [p for p in group["params"] if p not in known]:
                adam.append({**group, "params": rest, "lr": rate})
        self._parts: list[torch.optim.Optimizer] = []
        if muon:
            self._parts.append(torch.optim.Muon(muon, lr=muon_lr, weight_decay=weight_decay))
        if adam:
            self._parts.append(torch.optim.AdamW(adam, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._matrices = {p: known[p] for group in muon for p in group["params"]}
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on this optimizer's groups and state, so schedulers and checkpoints reach them."""
        #     self.param_groups    [ muon group 0, muon group 1, adam group 0 ]
        #     parts                Muon: the first two, AdamW: the last        the same dictionaries
        #     self.state           one for all                                 the same object
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

    def accepts_state(self, parameter: Tensor, entries: Collection[str]) -> bool:
        """Return whether saved entries are of the optimizer that trains a parameter: in another cut it may be the other one."""
        return (parameter in self._matrices) == ("exp_avg" not in entries)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("`closure` should be None, because several losses train a network. Found a function.")
        for part in self._parts:
            self._step_muon(part) if isinstance(part, torch.optim.Muon) else part.step()

    def _step_muon(self, muon: torch.optim.Muon) -> None:
        """Let Muon update the logical matrices of fused parameters as if each were a parameter."""
        # For this one step Muon gets other groups and another state, with copies of the logical matrices:
        #
        #     qkv.weight             -> q, k, v -> Muon -> back into qkv.weight
        #     its momentum_buffer    -> q, k, v -> Muon -> back into the state of qkv.weight
        groups = muon.param_groups
        state = muon.state
        muon.param_groups = [{**group, "params": []} for group in groups]
        muon.state = type(state)(dict)
        copies: list[tuple[Tensor, Tensor]] = []
        for group, apart in zip(groups, muon.param_groups, strict=True):
            for p in group["params"]:
                if p.grad is None:
                    continue
                if (fused := self._matrices[p]) is None:
                    apart["params"].append(p)
                    muon.state[p] = state[p]
                    continue
                if "momentum_buffer" not in state[p]:
                    state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                wholes = (p, p.grad, state[p]["momentum_buffer"])
                for three in zip(*map(fused.parts, wholes), strict=True):
                    # Copies, because the rows of a logical matrix in blocks are no view of two dimensions.
                    matrix, gradient, moments = (view.flatten(fused.dim, fused.dim + 1).clone() for view in three)
                    matrix.grad = gradient
                    apart["params"].append(matrix)
                    muon.state[matrix] = {"momentum_buffer": moments}
                    copies += [(three[0], matrix), (three[2], moments)]
        try:
            muon.step()
        finally:
            muon.param_groups = groups
            muon.state = state
        for view, matrix in copies:
            view.copy_(matrix.view_as(view))


def extrapolate(optimizer: torch.optim.Optimizer) -> None:
    """Make every update of an optimizer extrapolate: the change between the last two updates is added once more.

    With u[t] the update of the optimizer itself, ``w[t + 1] = w[t] + u[t] + (u[t] - u[t - 1])``. The first update stays as it is.
    A copy of the optimizer lacks the hooks: call `extrapolate` again.

    Args:
        optimizer: the optimizer; its state keeps the last update of every parameter, under ``last_update``.

    Raises:
        ValueError: the optimizer predicts or extrapolates already.

    >>> w = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([w], lr=1.0)
    >>> extrapolate(optimizer)
    >>> for gradient in (0.5, 0.25):
    ...     w.grad = torch.tensor([gradient])
    ...     optimizer.step()
    >>> w.item()  # 1 - 0.5, then - 0.25 + (-0.25 + 0.5)
    0.5
    """

    def add(p: Tensor, update: Tensor, state: dict[str, Any]) -> None:
        if "last_update" in state:
            p += update - state["last_update"]
        state["last_update"] = update

    _refuse_twice(optimizer)
    _Changes(optimizer, add)


def predict(optimizer: torch.optim.Optimizer, delay: int) -> None:
    """Let forwards run at the weights that the last update predicts for the time of their gradient.

    Between two updates each parameter holds ``w + delay * u``, with w its actual value and u the change by the last update; after
    an update without its gradient it holds w. An update begins from w, and so does every hook after it, such as a clamp. Test and
    export within `actual_weights`. To resume, save outside it, with the optimizer's state. Call `settle` after the last update,
    and before you load other weights, which the next update would drop. A copy of the optimizer lacks the hooks: call `predict`
    again. If updates do not depend on weights, a delay of 1 trains as `extrapolate` does, apart from the first update.

    Args:
        optimizer: the optimizer; its state keeps the actual value of every parameter, under ``actual``.
        delay: number of updates by which gradients are late, as 2 for ``"end-to-end-delay-2"``; at least 1.

    Raises:
        ValueError: `delay` is less than 1, or the optimizer predicts or extrapolates already.

    >>> w = nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = torch.optim.SGD([w], lr=1.0)
    >>> predict(optimizer, 2)
    >>> for gradient in (0.5, 0.25):
    ...     w.grad = torch.tensor([gradient])
    ...     optimizer.step()
    >>> w.item()  # the actual value is 1 - 0.5 - 0.25, and twice the last change is -0.5
    -0.25
    """
    check_at_least(1, delay=delay)

    def move(p: Tensor, update: Tensor, state: dict[str, Any]) -> None:
        state["actual"] = p.detach().clone()
        p.add_(update, alpha=delay)

    _refuse_twice(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, *_: settle(optimizer))
    _Changes(optimizer, move, last=True)


@torch.no_grad()
def settle(optimizer: torch.optim.Optimizer) -> None:
    """Put the actual weights into the place of predicted ones, until the next update; without `predict` this does nothing.

    Raises:
        ValueError: the optimizer has lost its hooks, as a copy has.
    """
    _check_hooks(optimizer)
    for p, state in optimizer.state.items():
        if "actual" in state:  # which the state no longer needs: what is written from here on, as by loading, stays
            p.copy_(state.pop("actual"))


@contextmanager
def actual_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Run the body with the actual weights instead of predicted ones; raise what `settle` raises."""
    _check_hooks(optimizer)
    found = [
        (p, p.detach().clone(), state, state["actual"]) for p, state in optimizer.state.items() if "actual" in state
    ]
    settle(optimizer)
    try:
        yield
    finally:
        with torch.no_grad():
            for p, predicted, state, actual in found:
                state["actual"] = actual
                p.copy_(predicted)


class _Changes:
    """After every update of an optimizer, calls a function with each parameter that had a gradient, its change, and its state.

    Args:
        optimizer: the optimizer.
        change: the function.
        last: whether it is called after hooks that are registered later, too; default: in their order.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        change: Callable[[Tensor, Tensor, dict[str, Any]], None],
        *,
        last: bool = False,
    ) -> None:
        # Around the optimizer's own update, whatever it is: the change of a parameter is what stands there after it.
        self._before: dict[Tensor, Tensor] = {}
        self._change = change
        self._last = last
        optimizer.register_step_pre_hook(self._remember)
        self._handle = optimizer.register_step_post_hook(self)

    def _remember(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        learns = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        self._before.update({p: p.detach().clone() for p in learns})
        if self._last:
            post_hooks(optimizer).move_to_end(self._handle.id)

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p, old in self._before.items():
            self._change(p, p - old, optimizer.state[p])
        self._before.clear()


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return any(isinstance(hook, _Changes) for hook in post_hooks(optimizer).values())


def _refuse_twice(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer predicts or extrapolates already."""
    if _has_hooks(optimizer):
        raise ValueError(
            "`optimizer` should predict or extrapolate, and be asked once. Found one that does already, so each change would be "
            "added twice; make another optimizer."
        )


def _check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if weights are predicted, and there are no hooks that would keep them."""
    if not _has_hooks(optimizer) and any("actual" in state for state in optimizer.state.values()):
        raise ValueError(
            "`optimizer` should predict the weights that its state calls predicted. Found no hooks, since copies and pickles of "
            "an optimizer lose them; call `predict` on this one, too."
        )
