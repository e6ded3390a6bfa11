"""The guard of a stage's graphs, or of its head's: it looks through some of them, and chooses how to walk back through all.

A step walks a graph in parts, and once for every micro-batch and message. That is right for torch's own operations. A user's code
may add a gradient whatever cotangent it gets, as auxiliary losses inside a stage do. It should count with the weight of the loss
that the walk belongs to, but each walk would add it in full::

    walk with the cotangent g            J g + a
    walk with the cotangent 0                  a      found here, and
    gradient                             J g + a - (1 - share) a

So graphs number 1, 2, 4, 8, ... are looked through when they are made, and decide::

    what the graph has             a walk
    torch's operations alone       is made at once, as is the only walk with a share of 1
    hooks of hidden tensors        is followed by one with the cotangent 0 if a hook has changed a gradient, and refused if that
                                   has found anything
    functions of the user's        is followed by one with the cotangent 0, in the graphs that are looked through, and in all
                                   once one of them has added anything

What only looks on notices nothing of the walks with the cotangent 0: hooks that change no gradient rest, and what a function's
backward keeps in buffers is restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nwise._torch import has_custom, has_foreign, versions
from nwise.held import tensors_in, values_in, with_values
from nwise.looks import is_due
from nwise.microbatch import Batch
from nwise.stage.graph import (
    add_gradients,
    check_leaves,
    nodes_of,
    surplus,
    without_backward,
    without_side_gradients,
)
from nwise.stage.hooks import noted, resting, watched
from nwise.stage.tape import Cotangents, Look, Tape


@dataclass(slots=True)
class Noted:
    """Tensors of which a forward has called a method, which its graph does not tell.

    Args:
        hooked: those that it has put a hook on.
        asked: those that it has let require a gradient, as PEFT does with the output of a frozen embedding.
    """

    hooked: list[Tensor] = field(default_factory=list)
    asked: list[Tensor] = field(default_factory=list)


class Guard:
    """Looks through graphs, and walks back through them.

    Args:
        owner: the stage or head, for errors.
        always: whether to look through every graph.

    Attributes:
        owner: as given.
        owners: modules in which a function's backward may keep a state.
        graphs: number of graphs so far.
        registered: number of hooks that the forward of the last graph has put on.
        writes: whether a walk may write over the cotangents that it begins with; None until a graph or a walk shows it.
        unknown: whether the graphs may add something, and no walk has shown yet whether they do.
        wary: whether any graph may add something, so `prepare` has to decide about each.
    """

    def __init__(self, owner: str, always: bool) -> None:
        self.owners: Sequence[nn.Module] = ()
        self.graphs = self.registered = 0
        self.writes: bool | None = None
        self.owner, self._always = owner, always
        self.unknown = self.wary = False
        self._adds: bool | None = None  # whether a graph has added anything; None until a walk shows it
        self._foreign = False  # whether a graph has had functions of the user's, which may begin to add something

    def due(self, batch: Batch) -> bool:
        """Return whether to look through the next graph, of a mini-batch."""
        # Walks with the cotangent 0 will follow, and hooks that only look on should rest in them.
        hooks = self._foreign and self.registered and self.owner not in batch.looked
        return self._always or bool(hooks) or is_due(self.graphs + 1)

    @contextmanager
    def watching(self, leaves: Sequence[Tensor]) -> Iterator[Noted]:
        """Note what the body, which makes a graph, does to tensors; raise ValueError if it calls ``backward``."""
        seen, before = Noted(), RemovableHandle.next_id
        with (
            without_backward(leaves, self.owner),
            noted("register_hook", seen.hooked.append),
            noted("requires_grad_", seen.asked.append),
        ):
            yield seen
        self.registered = RemovableHandle.next_id - before

    def look_through(
        self, roots: Sequence[Tensor], leaves: Sequence[Tensor], named: Mapping[str, Tensor], seen: Noted, look: Look
    ) -> None:
        """Look through a graph, and note what it has.

        Args:
            roots: its outputs.
            leaves: the tensors whose gradients the step computes.
            named: parameters by name, for errors.
            seen: what the forward has done to tensors.
            look: what is known of the graph.

        Raises:
            ValueError: it ends at another tensor.
        """
        nodes = nodes_of(roots)
        made = [x for x in seen.asked if not isinstance(x, nn.Parameter)]
        check_leaves(nodes, [*leaves, *made], named, self.owner)
        custom = has_custom(nodes)
        self.unknown |= custom and self._adds is None
        self._foreign |= has_foreign(nodes)
        self.wary |= self._foreign
        look.suspect |= custom
        hidden = [x for x in seen.hooked if not isinstance(x, nn.Parameter)]
        self._watch(watched(hidden, nodes, look.moved), len(hidden) == len(seen.hooked), look)
        if look.suspect or look.hooked:
            self.writes = True

    def notice(self, roots: Sequence[Tensor], registered: int, look: Look) -> None:
        """Note the hooks of a graph that was not looked through, whose forward has put on others than the one before.

        Args:
            roots: its outputs.
            registered: how many the forward has put on.
            look: what is known of the graph.
        """
        self.registered = registered
        if registered:
            hooks = watched((), nodes_of(roots), look.moved)
            self._watch(hooks, sum(map(len, hooks)) == registered, look)
            self.graphs, self.writes = 0, True  # the next graph is looked through

    def _watch(self, hooks: list[dict[int, Any]], complete: bool, look: Look) -> None:
        look.hooks, look.hooked, look.num_hooks = hooks, bool(hooks) or not complete, sum(map(len, hooks))
        if not complete:
            look.moved.append(None)

    def prepare(self, look: Look, tape: Tape) -> None:
        """Decide how the next walk through a graph is made, if the guard is wary.

        Args:
            look: what is known of the graph.
            tape: the micro-batch.
        """
        # A coefficient may grow from zero at any step, so the first micro-batch of each looks.
        looks = self._foreign and tape.share != 1 and self.owner not in tape.batch.looked
        if not look.suspect and (self._adds or looks):
            tape.batch.looked.add(self.owner)
            look.suspect = True

    def walk(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        wanted: Sequence[Tensor],
        leaves: Sequence[Tensor],
        look: Look,
        tape: Tape,
        *,
        again: bool,
    ) -> None:
        """Add the gradients of one walk through a graph that may add something, with the tape's share of what it adds.

        Args:
            roots, seeds, wanted: as for `add_gradients`.
            leaves: all leaves of the graph that any walk wants.
            look, tape: as for `prepare`, which comes before.
            again: whether another walk will follow.

        Raises:
            ValueError: hooks of hidden tensors add to gradients, or another walk would give other ones.
        """
        only = not again and not look.walked
        self._refuse_removals(look)
        if not look.suspect or (only and tape.share == 1):  # what a graph adds counts as it is
            checks = look.hooked and tape.share != 1
            add_gradients(roots, seeds, wanted, retain_graph=again or checks)
            if again:
                self._refuse_removals(look)
            if checks:
                self.refuse_hooks(roots, seeds, leaves, look, tape)
            return
        share, now = tape.share, set(wanted)
        with resting(leaves):  # a sum over replicas has to wait for the correction
            states = tensors_in(*self.owners)
            before = versions(states)
            others = [] if only else [x for x in leaves if x not in now]
            with without_side_gradients(others, self.owner):
                add_gradients(roots, [seed.clone() for seed in seeds], wanted, retain_graph=True)
            if again:
                self._refuse_removals(look)
            moved = [x for x, old, new in zip(states, before, versions(states), strict=True) if old != new]
            extra = self._extra(roots, seeds, leaves, look, tape, moved, again=again)
        for tensor, added in zip(leaves, extra, strict=True):
            if added is not None and tensor in now and tensor.grad is not None:
                tensor.grad.sub_(added * (1 - share))
        self._adds = bool(self._adds) or any(added is not None for added in extra)
        self.unknown, self.wary = False, self.wary or self._adds

    def apart(self, gradients: Cotangents) -> Cotangents:
        """Return gradients that no function of the user's writes over, as one does that returns a part of a workspace."""
        return tuple(g if g is None else g.clone() for g in gradients) if self._foreign else gradients

    def _refuse_removals(self, look: Look) -> None:
        """Raise ValueError if a graph that is to be walked has fewer hooks than after its forward."""
        if sum(map(len, look.hooks)) < look.num_hooks:
            raise ValueError(
                f"{self.owner} should keep the hooks of its hidden tensors until the last walk back through their graph. Found "
                "one that is gone, as deep equilibrium models remove theirs in the backward; leave it, as it goes with the graph."
            )

    def refuse_hooks(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], look: Look, tape: Tape
    ) -> None:
        """Raise ValueError, after a walk, if a graph whose only code of the user's is hooks adds anything; arguments as there."""
        # A number that is added for each sample counts in full, and the gradient of a mean by its share. A hook does not tell.
        if not leaves or tape.share == 1 or not look.moved:
            return
        with resting(leaves):
            extra = self._extra(roots, seeds, leaves, look, tape)
        if any(added is not None for added in extra):
            raise ValueError(
                f"{self.owner} should have no hooks of hidden tensors that add to a gradient, because they would add once for "
                "each micro-batch and pass. Found one; add the loss by `nwise.inject`, change the gradients of parameters by "
                "`Parameter.register_hook`, or use one micro-batch and the strategy 'end-to-end'."
            )

    def _extra(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        leaves: Sequence[Tensor],
        look: Look,
        tape: Tape,
        states: Sequence[Tensor] = (),
        *,
        again: bool = False,
    ) -> list[Tensor | None]:
        """Return what `surplus` finds, without the hooks that only look on, and restore the states of a backward."""
        kept = [x.clone() for x in states]
        share, tape.share = tape.share, 0.0  # `nwise.inject` has counted already
        try:
            with resting((), () if look.moved else look.hooks), with_values(values_in(*self.owners)):
                return surplus(roots, seeds, leaves, self.owner, again=again)
        finally:
            tape.share = share
            with torch.no_grad():
                for state, value in zip(states, kept, strict=True):
                    state.copy_(value)
