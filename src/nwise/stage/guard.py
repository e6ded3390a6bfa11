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

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nwise._torch import has_custom, has_foreign, versions
from nwise.held import kept, states_of, tensors_in, values_in, with_values
from nwise.looks import looks_at
from nwise.randomness import seeded
from nwise.stage.graph import add_gradients, check_leaves, leaving, nodes_of
from nwise.stage.hooks import after_adding, noted, resting, watched
from nwise.tensors import agree, asks


class Guard:
    """What the graphs of a stage, or of its head, have shown so far.

    Args:
        owner: the stage or head, for errors.
        always: whether to look through every graph.

    Attributes:
        owner, always: as given.
        owners: modules in which a function's backward may keep a state.
        graphs: number of graphs so far.
        registered: number of hooks that the forward of the last graph has put on.
        writes: whether a walk may write over the cotangents that it begins with, as only code of the user's does.
        foreign: whether a graph has had functions of the user's, which may begin to add something.
        adds: whether a graph has added anything; None if one may, and no walk has shown yet whether it does.
    """

    def __init__(self, owner: str, always: bool) -> None:
        self.owner, self.always = owner, always
        self.owners: Sequence[nn.Module] = ()
        self.graphs = self.registered = 0
        self.writes = self.foreign = False
        self.adds: bool | None = False


class Graph:
    """A graph that a forward makes, and the walks back through it.

    Args:
        guard: what the graphs before have shown.
        learns: the parameters at which it may end.
        inputs: its other leaves.
        looked: the stages and heads that have looked in this mini-batch for gradients that their graphs add.

    Attributes:
        share: weight of an auxiliary loss inside the graph (`nwise.inject`) in the present walk.
        checked: whether it is looked through.
        suspect: whether it may add gradients that do not come from its outputs, so its walks have to look.
        hooked: whether it has hooks of hidden tensors, which may do so.
        moved: what has changed a gradient: hooks, or None for one that cannot be watched.
        expected: number of the next hook if the forward has put on as many as the one before.
    """

    def __init__(self, guard: Guard, learns: Sequence[Tensor], inputs: Sequence[Tensor], looked: set[str]) -> None:
        self._guard, self._learns, self._inputs, self._looked = guard, learns, inputs, looked
        self.share = 1.0
        # Walks with the cotangent 0 will follow, and hooks that only look on should rest in them.
        hooks = guard.foreign and guard.registered and guard.owner not in looked
        self.checked = guard.always or bool(hooks) or looks_at(guard.graphs + 1)
        # A micro-batch may come here before the first walk of the one whose graph was looked through.
        self.suspect, self.hooked = guard.adds is None, False
        self.moved: list[object] = []
        self.expected = RemovableHandle.next_id + guard.registered
        self._hooks: Sequence[dict[int, Any]] = ()
        self._num_hooks = 0  # after the forward

    @property
    def leaves(self) -> list[Tensor]:
        """All leaves whose gradients a walk may want."""
        return list(filter(asks, (*self._learns, *self._inputs)))  # under a delay some may be frozen by now

    @contextmanager
    def watching(self, leaves: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Let the body make the graph, and see what it does to tensors.

        Args:
            leaves: tensors whose gradients the step computes.

        Yields:
            The tensors that the body puts hooks on; and those that it lets require a gradient, as PEFT does with the output of a
            frozen embedding.

        Raises:
            ValueError: the body calls ``backward``.
        """
        hooked, asked = list[Tensor](), list[Tensor]()

        def hook(x: Tensor, hook: object) -> None:
            if not str(getattr(hook, "__module__", "")).startswith("torch."):  # those of `FlopCounterMode` look on
                hooked.append(x)

        def ask(x: Tensor, *_: bool, **named: bool) -> None:
            asked.append(x)

        without_backward = leaving(
            leaves,
            (),
            f"{self._guard.owner} should leave gradients to `step`. Found a call of `backward` in its forward; add the loss by "
            "`nwise.inject`, or to the loss that `loss_fn` returns.",
        )
        with without_backward, noted("register_hook", hook), noted("requires_grad_", ask):
            yield hooked, asked

    def look(
        self, roots: Sequence[Tensor], module: nn.Module | None, hooked: Sequence[Tensor], asked: Sequence[Tensor]
    ) -> None:
        """Note what the graph has: everything if it is checked; otherwise its hooks, which are others than those before.

        Args:
            roots: its outputs.
            module: what has its parameters, for errors.
            hooked, asked: tensors, as `watching` gives them.

        Raises:
            ValueError: it ends at a tensor whose gradient the step does not compute.
        """
        guard, nodes = self._guard, nodes_of(roots)
        guard.registered += RemovableHandle.next_id - self.expected
        hidden = [x for x in hooked if not isinstance(x, nn.Parameter)]
        if self.checked:
            made = [x for x in asked if not isinstance(x, nn.Parameter)]
            named = {} if module is None else dict(module.named_parameters())
            check_leaves(nodes, [*self.leaves, *made], named, guard.owner)
            guard.foreign |= has_foreign(nodes)
            if has_custom(nodes):
                self.suspect, guard.adds = True, guard.adds or None
        elif guard.registered:
            guard.graphs = 0  # the next graph is looked through
        self._hooks = watched(hidden, nodes, self.moved) if self.checked or guard.registered else ()
        self._num_hooks = sum(map(len, self._hooks))
        if len(hidden) < len(hooked) if self.checked else self._num_hooks < guard.registered:
            self.moved.append(None)
        self.hooked = bool(self._hooks or self.moved)
        guard.writes |= self.suspect or self.hooked or bool(guard.registered)

    @contextmanager
    def without_updates(self, parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> Iterator[None]:
        """Raise ValueError if the body, a walk, changes what it should leave.

        Args:
            parameters: parameters; the next micro-batch would find other ones.
            copies: buffers and tensors that a second forward had instead of the module's own, which would not change.
        """
        updates = leaving(
            (),
            parameters,
            f"{self._guard.owner} should leave updates to the time after `step`. Found parameters that its backward changes; "
            "update by an optimizer, or in `register_post_accumulate_grad_hook`, which runs once a step.",
        )
        states = leaving(
            (),
            copies,
            f"{self._guard.owner} should keep no state in its backward with `recompute`, whose second forward has copies of the "
            "buffers and tensors. Found a buffer or tensor that its backward changes, as the scaling of float8 does; set "
            "`recompute=False`.",
        )
        with updates, states:
            yield

    def prepare(self) -> None:
        """Decide how the next walk is made, if any graph of the guard may add something."""
        # A coefficient may grow from zero at any step, so the first micro-batch of each looks.
        guard = self._guard
        looks = guard.foreign and self.share != 1 and guard.owner not in self._looked
        if not self.suspect and (guard.adds or looks):
            self._looked.add(guard.owner)
            self.suspect = True

    def walk(
        self,
        roots: Sequence[Tensor],
        seeds: Sequence[Tensor],
        wanted: Sequence[Tensor],
        *,
        retain_graph: bool,
        alone: bool,
    ) -> None:
        """Add the gradients of one walk through a graph that may add something, with the share of what it adds.

        Args:
            roots, seeds, wanted, retain_graph: as for `add_gradients`.
            alone: whether it is the only walk of the micro-batch.

        Raises:
            ValueError: hooks of hidden tensors add to gradients, or another walk would give other ones.
        """
        guard = self._guard
        self._refuse_removals()
        if not self.suspect or (alone and self.share == 1):  # what a graph adds counts as it is
            checks = self.hooked and self.share != 1
            add_gradients(roots, seeds, wanted, retain_graph=retain_graph or checks)
            if retain_graph:
                self._refuse_removals()
            if checks:
                self.refuse_hooks(roots, seeds)
            return
        now, leaves = set(wanted), self.leaves
        with resting(after_adding(leaves)):  # a sum over replicas has to wait for the correction
            states = tensors_in(*guard.owners)
            before = versions(states)
            others = [] if alone else [x for x in leaves if x not in now]
            with self._without_side_gradients(others):
                add_gradients(roots, [seed.clone() for seed in seeds], wanted, retain_graph=True)
            if retain_graph:
                self._refuse_removals()
            moved = [x for x, old, new in zip(states, before, versions(states), strict=True) if old != new]
            extra = self._surplus(roots, seeds, moved, again=retain_graph)
        for tensor, added in zip(leaves, extra, strict=True):
            if added is not None and tensor in now and tensor.grad is not None:
                tensor.grad.sub_(added * (1 - self.share))
        guard.adds = bool(guard.adds) or any(added is not None for added in extra)

    def _without_side_gradients(self, others: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Raise ValueError if the body, one of several walks, adds to other gradients, or to attributes such as ``main_grad``."""
        return leaving(
            others,
            [value for x in others for value in vars(x).values() if isinstance(value, Tensor)],
            f"{self._guard.owner} should return its gradients to autograd, because this strategy walks its graph more than once. "
            "Found a backward that adds them itself, to `.grad` or to an attribute such as `main_grad`, as reversible blocks and "
            "fused accumulation do; pass the parameters to the `torch.autograd.Function` and return their gradients, or use an "
            "order and strategy with one pass, such as 'end-to-end' with 'gpipe'.",
        )

    def _refuse_removals(self) -> None:
        """Raise ValueError if the graph, which is to be walked, has fewer hooks than after its forward."""
        if sum(map(len, self._hooks)) < self._num_hooks:
            raise ValueError(
                f"{self._guard.owner} should keep the hooks of its hidden tensors until the last walk back through their graph. "
                "Found one that is gone, as deep equilibrium models remove theirs in the backward; leave it, as it goes with the "
                "graph."
            )

    def refuse_hooks(self, roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
        """Raise ValueError, after a walk, if the graph, whose only code of the user's is hooks, adds anything."""
        # A number that is added for each sample counts in full, and the gradient of a mean by its share. A hook does not tell.
        leaves = self.leaves
        if not leaves or self.share == 1 or not self.moved:
            return
        with resting(after_adding(leaves)):
            extra = self._surplus(roots, seeds)
        if any(added is not None for added in extra):
            raise ValueError(
                f"{self._guard.owner} should have no hooks of hidden tensors that add to a gradient, because they would add once "
                "for each micro-batch and pass. Found one; add the loss by `nwise.inject`, change the gradients of parameters by "
                "`Parameter.register_hook`, or use one micro-batch and the strategy 'end-to-end'."
            )

    def _surplus(
        self, roots: Sequence[Tensor], seeds: Sequence[Tensor], states: Sequence[Tensor] = (), *, again: bool = False
    ) -> list[Tensor | None]:
        """Return for each leaf the gradient that the graph adds even if every cotangent is zero, None where it adds nothing.

        A `torch.autograd.Function` that injects the gradient of an auxiliary loss adds one, and so may the hook of a hidden
        tensor. The graph stays.

        Args:
            roots, seeds: as for `walk`, which comes before.
            states: what the walk has changed beside gradients, and the present ones should not.
            again: whether another walk will follow.

        Raises:
            ValueError: another walk fails, or would give other gradients.
        """
        leaves, owner, owners = self.leaves, self._guard.owner, self._guard.owners
        # A function may return a part of a workspace, which its next call writes over.
        before = [x.grad if x.grad is None or isinstance(x, nn.Parameter) else x.grad.clone() for x in leaves]

        def walk(seeds: Sequence[Tensor]) -> list[Tensor | None]:
            # Not `torch.autograd.grad`, in which hooks on several leaves, as of `FlopCounterMode`, fail.
            for x in leaves:
                x.grad = None
            try:
                # A user's function may divide by the norm of a cotangent, and may draw random numbers, such as for rounding.
                with torch.autograd.set_detect_anomaly(False), seeded(0, seeds[0].device):
                    add_gradients(roots, [seed.clone() for seed in seeds], leaves, retain_graph=True)
                return [x.grad for x in leaves]
            except Exception as error:
                raise ValueError(
                    f"{owner} should have a backward that can run more than once, because nwise runs it with zeros to see "
                    f"whether it adds a gradient. Found that it cannot ({type(error).__name__}: {error}); let the backward of "
                    "its `torch.autograd.Function` leave what its forward kept as it is, or use one micro-batch and the "
                    "strategy 'end-to-end'."
                ) from error
            finally:
                for x, gradient in zip(leaves, before, strict=True):
                    x.grad = gradient

        # Hooks that only look on rest, and `nwise.inject` has counted already.
        share = partial(setattr, self, "share"), self.share
        with (
            resting(() if self.moved else self._hooks),
            with_values(values_in(*owners)),
            kept([*states_of(states), share]),
        ):
            self.share = 0.0
            for first, second in zip(walk(seeds), walk(seeds), strict=True) if again else ():
                if not agree(first, second, 1e-5, 1e-8):
                    raise ValueError(
                        f"{owner} should give the same gradients each time its graph is walked, because this strategy walks it "
                        "more than once. Found other ones the second time; let the backward of its `torch.autograd.Function` "
                        "leave the tensors that it saved as they are and keep no state, or use an order and strategy with one "
                        "pass, such as 'end-to-end'."
                    )
            added = walk([torch.zeros_like(seed) for seed in seeds])
        return [g if g is not None and _counts(g) else None for g in added]


def _counts(gradient: Tensor) -> bool:
    """Return whether a gradient is finite and not zero."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all() and values.any())
