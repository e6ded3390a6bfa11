"""An optimizer's `state_dict` in a checkpoint: the names of parameters in place of their numbers, so another cut finds them.

state      state of each parameter, by its name
groups     options and names of parameters of every group
rest       state of no parameter
other      what the class adds to its `state_dict`
forms      dtype and strides of each parameter
defaults   options that the optimizer was made with
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nwise.checkpoint.files import plain

_OF_PARAMETERS = ("params", "param_names")  # of a group
_STEP = "step"  # the entry that torch keeps on the CPU
Values = dict[str, Any]


def optimizer_kind(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of the class, with the options that add to its state."""
    options = {} if optimizer is None else optimizer.defaults
    names = ("amsgrad", "centered", *(["momentum"] if isinstance(optimizer, torch.optim.RMSprop) else []))
    extra = [name for name in names if options.get(name)]
    return type(optimizer).__name__ + (f" with {', '.join(extra)}" if extra else "")


# Saving ---------------------------------------------------------------------------------------------


def collect_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Values:
    """Return an optimizer's state, not copied.

    Args:
        optimizer: the optimizer.
        names: names of the pipeline's parameters.

    Raises:
        TypeError: the state has a value of another type than tensors, numbers, texts and their collections.
        ValueError: the optimizer has state of another network's parameters, or no `state_dict`.
    """
    saved = _state_dict(optimizer)
    by_index = _by_index(optimizer, saved)
    state: Values = {}
    rest: dict[Any, Any] = {}
    for index, entries in saved.get("state", {}).items():
        p = by_index.get(index)
        if p is None:
            rest[index] = entries
        elif p in names:
            state[names[p]] = entries
        elif entries:
            raise ValueError(_FOREIGN.format(shape=tuple(p.shape)))
    groups = [
        {k: v for k, v in g.items() if k not in _OF_PARAMETERS}
        | {"params": [names[p] for p in group["params"] if p in names]}
        for group, g in zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False)
    ]
    values = {
        "state": state,
        "groups": groups,
        "rest": rest,
        "other": {k: v for k, v in saved.items() if k not in ("state", "param_groups")},
        "forms": {names[p]: (p.dtype, p.stride()) for p in by_index.values() if p in names},
        "defaults": {k: v for k, v in optimizer.defaults.items() if isinstance(v, bool | int | float | str)},
    }
    try:
        for part in (*state.values(), *groups, rest, values["other"]):
            plain(part)
    except TypeError as error:
        raise TypeError(
            "An optimizer's state should consist of tensors, numbers, texts, and lists, tuples, sets and dictionaries of them to "
            f"be saved. Found {error}, of {type(optimizer).__name__}; make `Checkpoints` without the optimizer, and save its "
            "state in another way."
        ) from error
    return values


def refuse_foreign(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    """Raise ValueError if an optimizer trains a parameter that the pipeline does not have, which no checkpoint would hold."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.requires_grad and p not in names:
            raise ValueError(_FOREIGN.format(shape=tuple(p.shape)))


def after_first_state(optimizer: torch.optim.Optimizer, check: Callable[[], object]) -> None:
    """Call a function at the end of the first update in which an optimizer has state: a bad type is found before hours pass."""
    done: list[bool] = []

    def look(*_: object) -> None:
        if optimizer.state and not done:
            done.append(True)
            check()

    with suppress(AttributeError):  # of a class around an optimizer
        optimizer.register_step_post_hook(look)


# Loading --------------------------------------------------------------------------------------------


class SavedOptimizer:
    """The part of a checkpoint that belongs to this process's optimizer, in memory of its own.

    Args:
        optimizer: the optimizer.
        names: names in the checkpoint of this process's parameters.
        parts: what the processes that wrote it have saved of theirs, by first stage.
        stage: the first stage of this process.

    Raises:
        ValueError: what the optimizer's class adds to its `state_dict` is of other parameters.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], parts: Mapping[int, Values], stage: int
    ) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        updated = {p for group in groups for p in group["params"]}
        self._names = {p: name for p, name in names.items() if p in updated}
        # As in torch, the number of steps stays on the CPU unless a fused or capturable kernel reads it.
        self._counted = {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        self._parts = [part for _, part in sorted(parts.items())]
        self._placed: dict[Tensor, Tensor] = {}
        # What belongs to no parameter comes from the process that held this one's first stage: of parts that begin at stages 0
        # and 2, a process that begins at stage 1 gets that of 0.
        nearest: Values = parts.get(max((k for k in parts if k <= stage), default=-1), {"rest": {}, "other": {}})
        self._rest = {key: self._placed_in(value, None) for key, value in nearest["rest"].items()}
        self._other = {key: self._placed_in(value, None) for key, value in nearest["other"].items()}
        if self._other:
            self._check_own_keys(nearest)
        states = {name: state for part in self._parts for name, state in part["state"].items()}
        self._forms = {name: form for part in self._parts for name, form in part["forms"].items()}
        # An optimizer made of several may train a parameter by another one in another cut; it says whether it can go on.
        accepts = getattr(optimizer, "accepts_state", None)
        self._states = {
            p: self._placed_in(states[name], p)
            for p, name in self._names.items()
            if name in states and not (accepts and not accepts(p, list(states[name])))
        }
        # For each group the options of the saved groups that had its parameters.
        self._options = [
            [g for part in self._parts for g in part["groups"] if mine & set(g["params"])]
            for group in groups
            for mine in [{self._names[p] for p in group["params"] if p in self._names}]
        ]
        self._defaults = {**self._parts[0]["defaults"]} if self._parts else {}
        self._dropped = sorted(name for name in set(names.values()) - set(self._names.values()) if states.get(name))

    def load(self, *, settings: bool) -> list[str]:
        """Give the optimizer its state; return differences from the checkpoint, in words.

        With `settings` the groups get the options of the checkpoint, such as rates, in which the saved groups agree.
        """
        optimizer = self._optimizer
        present = _state_dict(optimizer)
        differing: set[str] = set()
        for found, group in zip(self._options, present.get("param_groups", ()), strict=False) if settings else ():
            for key in {key for options in found for key in options} - {"params"}:
                values = [options.get(key) for options in found]
                if all(_equal(values[0], value) for value in values):
                    group[key] = self._placed_in(values[0], None)
                else:
                    differing.add(key)
        # Torch's own function would cast states to the dtype of their parameters, and take a text for a list of letters.
        is_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        if "state" in present:
            by_index = {} if is_torchs else _by_index(optimizer, present)
            known = {index: self._states[p] for index, p in by_index.items() if p in self._states}
            present["state"] = {**present["state"], **self._rest, **known}
        optimizer.load_state_dict({**present, **self._other})
        for p, state in self._states.items() if is_torchs else ():
            optimizer.state[p] = state
        now = optimizer.defaults
        saved = self._defaults if settings else {}
        other = [k for k in saved if k in now and saved[k] != now[k] and k not in differing]
        dropped = ", ".join(self._dropped[:3]) + (", ..." if len(self._dropped) > 3 else "")
        return [
            *([f"the state of {dropped} is dropped, which the optimizer does not update"] if dropped else []),
            *(f"the optimizer's {k} is that of the checkpoint, not of {k}={now[k]}" for k in other),
            *(f"the optimizer's {k} is its own, because saved groups differ" for k in sorted(differing)),
        ]

    def _placed_in(self, value: Any, p: Tensor | None, key: object = "") -> Any:
        """Return nested values of the checkpoint in new memory, where an optimizer of a parameter needs them."""
        if isinstance(value, Tensor):
            if value not in self._placed:
                self._placed[value] = self._tensor(value, p, is_step=key == _STEP)
            return self._placed[value]
        if isinstance(value, dict):
            return {name: self._placed_in(one, p, name) for name, one in value.items()}
        if type(value) in (list, tuple, set):
            return type(value)(self._placed_in(one, p, key) for one in value)
        return value

    def _tensor(self, value: Tensor, p: Tensor | None, *, is_step: bool) -> Tensor:
        if p is None:
            return value.to(next((q.device for q in self._names), None), copy=True)
        # As in torch, a state in the dtype of its parameter follows it. Fused kernels go by memory, so it follows its order, too.
        then, strides = self._forms[self._names[p]]
        dtype = p.dtype if value.dtype == then and not is_step else value.dtype
        if is_step or value.shape != p.shape or value.stride() != tuple(strides):
            return value.to("cpu" if is_step and p not in self._counted else p.device, dtype, copy=True)
        return torch.empty_like(p.detach(), dtype=dtype).copy_(value)

    def _check_own_keys(self, part: Values) -> None:
        """Refuse what a class adds to its `state_dict` for other parameters, which may be by their number."""
        saved = [name for group in part["groups"] for name in group["params"]]
        here = [self._names[p] for group in self._optimizer.param_groups for p in group["params"] if p in self._names]
        if saved != here:
            raise ValueError(
                f"{type(self._optimizer).__name__} should resume with the parameters that it had, because it adds "
                f"{next(iter(self._other))!r} to its state dictionary. Found {len(here)} parameters here and "
                f"{len(saved)} there, or another order; resume with the same cut, or with another optimizer."
            )


def add_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Add the missing momenta of fused SGD, which needs those of all parameters or of none."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for p in group["params"] if group["fused"] and group["momentum"] else ():
            if p.requires_grad and "momentum_buffer" not in optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def _state_dict(optimizer: torch.optim.Optimizer) -> Values:
    try:
        return dict(optimizer.state_dict())
    except Exception as error:  # of a class that has replaced it
        raise ValueError(
            f"`optimizer` should have a `state_dict()`. Found that {type(optimizer).__name__} raises {error!r}; make "
            "`Checkpoints` without it, and save its state in another way."
        ) from error


def _by_index(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[Any, Tensor]:
    """Return the parameters by the number that they have in the state dictionary."""
    pairs = zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False)
    return {i: p for group, g in pairs for p, i in zip(group["params"], g["params"], strict=True)}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


_FOREIGN = (
    "The optimizer should be of the pipeline's parameters. Found another one, of shape {shape}; put its module into a stage or "
    "head, or train it with another optimizer."
)
