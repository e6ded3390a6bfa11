"""An optimizer's `state_dict` in a checkpoint, under names that do not depend on the cut.

    optimizer.<parameter>.<entry>     tensor of the state of a parameter
    optimizer.rest.<stage>.<place>    tensor of a group, or of what the optimizer of the process keeps for no parameter

What is not a tensor is JSON among the facts, one object for each process of a replica::

    stage       first stage of the process
    groups      names of the parameters and options of every group
    state       state of the parameters (`values.pack`)
    rest        state of no parameter, and what a `state_dict` has beside state and groups
    host        names of tensors on the CPU although the parameters are not
    defaults    options that the optimizer was made with
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nwise.checkpoint.values import UnknownTypeError, as_name, pack, unpack

_OF_PARAMETERS = ("params", "param_names")  # of a group
_STEP = (".step", "/step")  # ends of the names of numbers of steps


def optimizer_kind(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of the class, with the options that add to its state."""
    options = {} if optimizer is None else optimizer.defaults
    names = ("amsgrad", "centered", *(["momentum"] if isinstance(optimizer, torch.optim.RMSprop) else []))
    extra = [name for name in names if options.get(name)]
    return type(optimizer).__name__ + (f" with {', '.join(extra)}" if extra else "")


def collect_state(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], stage: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an optimizer's state by name, not copied, and everything else as JSON.

    `names` has the names of the pipeline's parameters, and `stage` is the first one of this process.

    Raises:
        TypeError: the state has a value of another type than tensors, numbers, texts and their collections.
        ValueError: the optimizer has state of another network's parameters, or no `state_dict`.
    """
    tensors: dict[str, Tensor] = {}
    memory = {_memory(p): name for p, name in names.items()}
    saved = _state_dict(optimizer)
    by_index = _by_index(optimizer, saved)

    def put(prefix: str, tensor: Tensor, place: str) -> str:
        """Name a tensor; what is one tensor here, such as a count of all parameters, gets one name and stays one."""
        if (name := memory.get(key := _memory(tensor))) is None:
            name = prefix + as_name(place)
            while name in tensors:
                name += "_"
            tensors[name] = tensor
            memory[key] = name
        return name

    # The state of a parameter goes under its name, so another cut finds it; all else under the process's first stage.
    put_rest = partial(put, f"optimizer.rest.{stage}.")
    states: dict[str, Any] = {}
    others = {k: v for k, v in saved.items() if k not in ("state", "param_groups")}
    rest: dict[str, Any] = {"state": {}, "other": others}
    try:
        for index, entries in saved.get("state", {}).items():
            p = by_index.get(index)
            if p is None:
                rest["state"][index] = entries
            elif p in names:
                states[names[p]] = pack(entries, partial(put, f"optimizer.{names[p]}."), like=p)
            elif entries:
                raise ValueError(_FOREIGN.format(shape=tuple(p.shape)))
        groups = [
            {
                "params": [names[p] for p in group["params"] if p in names],
                "options": pack({k: v for k, v in g.items() if k not in _OF_PARAMETERS}, put_rest),
            }
            for group, g in zip(optimizer.param_groups, saved.get("param_groups", ()), strict=False)
        ]
        packed = pack(rest, put_rest) if any(rest.values()) else None
    except UnknownTypeError as error:
        raise TypeError(
            "An optimizer's state should consist of tensors, numbers, texts, and lists, tuples, sets and dictionaries of them to "
            f"be saved. Found {error}, of {type(optimizer).__name__}; make `Checkpoints` without the optimizer, and save its "
            "state in another way."
        ) from error
    home = next((p.device for p in by_index.values()), torch.device("cpu"))
    return tensors, {
        "stage": stage,
        "groups": groups,
        "state": states,
        "rest": packed,
        "host": [n for n, t in tensors.items() if t.device.type == "cpu" != home.type and not n.endswith(_STEP)],
        "defaults": {k: v for k, v in optimizer.defaults.items() if isinstance(v, bool | int | float | str)},
    }


def _memory(tensor: Tensor) -> object:
    """Return a value that is equal for two tensors only if they are the same place in memory."""
    if not tensor.numel():
        return object()
    place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype, tensor.device


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


class SavedOptimizer:
    """The part of a checkpoint that belongs to this process's optimizer.

    The JSON is unpacked into states with memory for their tensors, `fresh` by name, which reading fills in place::

        checkpoint.json -> unpack -> states, fresh -> files.read -> load_state_dict

    Raises:
        ValueError: what the optimizer's class adds to its `state_dict` is of other parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],  # of this process, by their names in the checkpoint
        parts: Sequence[Mapping[str, Any]],  # JSON of all processes that wrote it
        layout: Mapping[str, Tensor],  # the checkpoint's tensors, without values
        stage: int,  # the first one of this process
    ) -> None:
        self._optimizer = optimizer
        self._parts = parts
        self._layout = layout
        groups = optimizer.param_groups
        updated = {p for group in groups for p in group["params"]}
        self._parameters = {name: p for name, p in parameters.items() if p in updated}
        self._names = {p: name for name, p in self._parameters.items()}
        # As in torch, the number of steps stays on the CPU unless a fused or capturable kernel reads it.
        self._counted = {p for g in groups if g.get("fused") or g.get("capturable") for p in g["params"]}
        self._host = {name for part in parts for name in part["host"]}
        self._one = {name: first for part in parts for first, *others in part.get("same", ()) for name in others}
        self.fresh: dict[str, Tensor] = {}
        self._placed: set[tuple[Tensor, str]] = set()  # parameters, and the ends of the names of their tensors
        # What belongs to no parameter comes from the process that held this one's first stage: of parts that begin at stages 0
        # and 2, a process that begins at stage 1 gets that of 0.
        nearest = max((part for part in parts if part["stage"] <= stage), key=lambda part: part["stage"], default={})
        get_rest = partial(self._tensor, torch.empty(0, device=next((p.device for p in self._names), None)))
        rest = nearest and nearest["rest"]
        self._rest = unpack(rest, get_rest) if rest else {"state": {}, "other": {}}
        if self._rest["other"]:
            self._check_own_keys(nearest)
        self._states: dict[Tensor, Any] = {}
        packed = {name: s for part in parts for name, s in part["state"].items()}
        for name, p in self._parameters.items():
            # An optimizer made of several may train a parameter by another one in another cut; it says whether it can go on.
            accepts = getattr(optimizer, "accepts_state", None)
            if name in packed and not (accepts and not accepts(p, [key for key, _ in packed[name]["dict"]])):
                self._states[p] = unpack(packed[name], partial(self._tensor, p))
        # For each group the options of the saved groups that had its parameters.
        self._options = [
            [unpack(g["options"], get_rest) for part in parts for g in part["groups"] if names & set(g["params"])]
            for group in groups
            for names in [{self._names[p] for p in group["params"] if p in self._names}]
        ]
        owners = {full.rpartition(".")[0] for full in layout}  # with a tensor in their state
        self._dropped = sorted(
            name for name in parameters.keys() - self._parameters.keys() if f"optimizer.{name}" in owners
        )
        # A tensor of a state that is not in its place in the JSON would be lost without a word.
        known = {f"optimizer.{self._names[p]}": p for p in self._states}
        for full in sorted(layout):
            owner, _, entry = full.rpartition(".")
            if owner in known and (known[owner], entry.rstrip("_")) not in self._placed:
                raise LookupError(full)

    def _check_own_keys(self, part: Mapping[str, Any]) -> None:
        """Refuse what a class adds to its `state_dict` for other parameters, which may be by their number."""
        saved = [name for group in part["groups"] for name in group["params"]]
        here = [self._names[p] for group in self._optimizer.param_groups for p in group["params"] if p in self._names]
        if saved != here:
            raise ValueError(
                f"{type(self._optimizer).__name__} should resume with the parameters that it had, because it adds "
                f"{next(iter(self._rest['other']))!r} to its state dictionary. Found {len(here)} parameters here and "
                f"{len(saved)} there, or another order; resume with the same cut, or with another optimizer."
            )

    def load(self, *, settings: bool) -> list[str]:
        """Give the optimizer the states, whose tensors have been read; return differences from the checkpoint, in words.

        With `settings` the groups get the options of the checkpoint, such as rates, in which the saved groups agree.
        """
        optimizer = self._optimizer
        present = _state_dict(optimizer)
        differing: set[str] = set()
        for found, group in zip(self._options, present.get("param_groups", ()), strict=False) if settings else ():
            first = found[0] if found else {}
            agreed = {k: v for k, v in first.items() if all(k in other and _equal(v, other[k]) for other in found)}
            group.update(agreed)
            differing |= {k for options in found for k in options} - agreed.keys()
        # Torch's own function would cast states to the dtype of their parameters, and take a text for a list of letters.
        is_torchs = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        if "state" in present:
            by_index = {} if is_torchs else _by_index(optimizer, present)
            known = {index: self._states[p] for index, p in by_index.items() if p in self._states}
            present["state"] = {**present["state"], **self._rest["state"], **known}
        optimizer.load_state_dict({**present, **self._rest["other"]})
        for p, state in self._states.items() if is_torchs else ():
            optimizer.state[p] = state
        saved = self._parts[0]["defaults"] if self._parts and settings else {}
        now = optimizer.defaults
        changed = [k for k in saved if k in now and saved[k] != now[k] and k not in differing]
        dropped = ", ".join(self._dropped[:3]) + (", ..." if len(self._dropped) > 3 else "")
        return [
            *([f"the state of {dropped} is dropped, which the optimizer does not update"] if dropped else []),
            *(f"the optimizer's {k} is that of the checkpoint, not of {k}={now[k]}" for k in changed),
            *(f"the optimizer's {k} is its own, because saved groups differ" for k in sorted(differing)),
        ]

    def _tensor(self, p: Tensor, content: Mapping[str, Any], place: str) -> Tensor:
        """Return memory for a tensor of the checkpoint, where an optimizer of a parameter needs it; see `unpack`."""
        self._placed.add((p, as_name(place).rstrip("_")))  # `put` appends "_" if a name is taken
        name = self._one.get(content["name"], content["name"])
        if name in self._parameters:
            return self._parameters[name].detach()
        if name not in self.fresh:
            like = self._layout[name]
            is_step = name.endswith(_STEP)
            on_host = name in self._host or (is_step and p not in self._counted)
            device = torch.device("cpu") if on_host else p.device
            # As in torch, a state in the dtype of its parameter follows it.
            follows = p in self._names and not is_step and like.dtype == self._layout[self._names[p]].dtype
            dtype = p.dtype if follows else like.dtype
            pairs = content.get("complex", False)
            if strides := content.get("strides"):
                strides = [*(2 * n for n in strides), 1] if pairs else strides
                self.fresh[name] = torch.empty_strided(like.shape, strides, dtype=dtype, device=device)
            elif is_step or pairs or like.shape != p.shape:
                self.fresh[name] = torch.empty(like.shape, dtype=dtype, device=device)
            else:
                # Same strides as the parameter: fused optimizers go by memory.
                self.fresh[name] = torch.empty_like(p.detach(), dtype=dtype, device=device)
        return self.fresh[name]


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
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


def add_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Add the missing momenta of fused SGD, which needs those of all parameters or of none."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ():
        for p in group["params"] if group["fused"] and group["momentum"] else ():
            if p.requires_grad and "momentum_buffer" not in optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
