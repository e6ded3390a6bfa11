"""The ledger of a channel: what both its ends know, so a message needs no tag and rarely a description.

Only a stage that runs knows the shape of its output. But every rank knows the shapes of the model's inputs, from which the others
follow. So both ends keep a table of forms, by what a message is and by the shapes of its micro-batch. A message whose form is not
in the table follows a header, which both ends enter into their tables at the same place in the order. A message of a mini-batch
that does not exist, as in the first calls under a delay, is a header alone::

    sender      header + activation    activation    header that says: nothing
    receiver    enters the form        knows it      enters no form
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from nwise.flow import Flow
from nwise.runtime.shapes import Form, Specs, describe, from_json, make_specs, to_json, with_gradients
from nwise.schedule.actions import Action, Kind
from nwise.tensors import Tensors

# The name of a message: the action that receives it, without its age.
Key = Action
# What the form of a micro-batch's messages follows from: the specs of the model's inputs, and the dtype of autocast, if any.
Label = tuple[Specs, str]
# For every age the labels of the mini-batch's micro-batches; None for one that does not exist, or whose forms may change.
Window = tuple[tuple[Label, ...] | None, ...]

_MOST_FORMS = 2**16  # that a ledger keeps


class Labels(tuple[Label, ...]):
    """The labels of a mini-batch's micro-batches.

    >>> four, three = make_specs([torch.ones(4, 2)]), make_specs([torch.ones(3, 2)])
    >>> str(Labels([(four, ""), (four, ""), (three, "")]))
    '2 of float32 [4, 2], 1 of float32 [3, 2]'
    """

    def __str__(self) -> str:
        return ", ".join(f"{len(list(equal))} of {_described(*label)}" for label, equal in itertools.groupby(self))


def make_labels(inputs: Sequence[Tensors], autocast: torch.dtype | None, known: Labels) -> Labels:
    """Return the labels of a mini-batch's micro-batches, as the same object as `known` if they are equal."""
    # One object: every channel compares the labels of each call, and an object equals itself at once.
    labels = Labels((make_specs(one), "" if autocast is None else str(autocast)) for one in inputs)
    return known if labels == known else labels


def same(specs: Specs) -> Specs:
    """Return the specs as they are: without compression the tensors themselves travel."""
    return specs


@dataclass(frozen=True)
class MessagePlan:
    """The messages of a channel in one pass through the lists."""

    # For every call of the cycle its messages in the order of their sends: name, and age of the mini-batch.
    calls: tuple[tuple[tuple[Key, int], ...], ...] = ((),)
    travel: int = 0  # largest number of calls between a send and its receive
    digest: str = ""  # hash of the lists
    parts: Callable[[Specs], Specs] = same  # from the specs of tensors to those of what travels

    @cached_property
    def size(self) -> int:
        """Number of messages."""
        return sum(map(len, self.calls))


NOTHING = MessagePlan()


@dataclass(slots=True, eq=False)
class Expected:
    """A message that is to come."""

    key: Key
    label: tuple[Kind, int, Label] | None  # what its form follows from; None if it always follows a header
    form: Form | None = None  # None until both ends know it


class Ledger:
    """The messages of a channel in their order, and the forms of those that have had a header."""

    def __init__(self) -> None:
        self.plan = NOTHING  # the present one
        self.steady = False  # whether the present call has the plan and the shapes of the one before it
        self._window: Window = ()
        self._call = 0  # the next one
        self._messages: dict[int, list[Expected]] = {}
        self._forms: dict[Hashable, Form] = {}

    def follows(self, plan: MessagePlan, window: Window, call: int) -> bool:
        """Tell whether a call goes on with the plan and the shapes of the present one."""
        return (plan, window, call) == (self.plan, self._window, self._call)

    def breaks(self, plan: MessagePlan, window: Window, call: int) -> bool:
        """Tell whether a call is one for which all messages before it must have been taken."""
        return (self.steady or plan != self.plan) and not self.follows(plan, window, call)

    def begin(self, plan: MessagePlan, window: Window, call: int) -> list[Expected]:
        """Begin a call, given by its index in the cycle; return its messages."""
        self.steady = self.follows(plan, window, call)
        if not self.steady:
            self.plan, self._window, self._messages = plan, window, {}
        self._call = (call + 1) % len(plan.calls)
        return self._of(call)

    def ahead(self) -> Iterator[Expected]:
        """Iterate over the messages of the next calls, without end, if these follow the present one."""
        calls = len(self.plan.calls)
        return itertools.cycle([m for i in range(calls) for m in self._of((self._call + i) % calls)])

    def _of(self, call: int) -> list[Expected]:
        if call not in self._messages:
            self._messages[call] = [Expected(key, self._label(key, age)) for key, age in self.plan.calls[call]]
        return self._messages[call]

    def _label(self, key: Key, age: int) -> tuple[Kind, int, Label] | None:
        labels = self._window[age]
        return None if labels is None else (key.kind, key.stage, labels[key.microbatch])

    def form(self, message: Expected) -> Form | None:
        """Return the form of a message; None if it follows a header."""
        if message.form is None and message.label is not None:
            message.form = self._forms.get(message.label)
        return message.form

    def known(self, key: Key, label: Label) -> Form:
        """Return the form of a message, of which there has been one for a micro-batch with this label."""
        return self._forms[key.kind, key.stage, label]

    def enter(self, message: Expected, specs: Specs) -> Form:
        """Note the form of a message that has a header."""
        form = Form(specs, self.plan.parts(specs))
        # Both ends enter and forget at the same places, so neither expects a header that the other leaves out.
        if message.label is not None:
            message.form = self._forms[message.label] = form
            if len(self._forms) > _MOST_FORMS:
                del self._forms[next(iter(self._forms))]
        return form

    def header(self, message: Expected, specs: Specs) -> Any:
        """Return the content of the header of tensors with these specs, serialisable as JSON."""
        return [*self._facts(message), to_json(specs)]

    def specs(self, message: Expected, header: Any, peer: int) -> Specs:
        """Return the specs in the header of a message, which rank `peer` wrote.

        Raises:
            ValueError: that rank has another schedule, or another mini-batch.
        """
        *theirs, specs = header
        mine = self._facts(message)
        if theirs[0] != mine[0]:
            raise ValueError(
                f"Every rank should have the same schedule. Found lists that differ from those of rank {peer}; make the same "
                "calls on all ranks, and the schedule from the same costs, not from costs that each rank measures."
            )
        if theirs != mine:
            raise ValueError(
                f"Every rank should get the whole mini-batch, under the same autocast. Found micro-batches of {_words(mine[1])} "
                f"here and of {_words(theirs[1])} on rank {peer}; load the same data on all ranks."
            )
        return from_json(specs)

    def _facts(self, message: Expected) -> list[Any]:
        """Return what both ends should have alike."""
        #     [digest of the lists, [specs of the micro-batch's inputs, autocast]]        and then the specs of the message
        #     ["9f2c...", [[[[4, 2], "float32", "x"]], ""]]                               a header, without them
        if message.label is None:
            return [self.plan.digest, None]
        inputs, autocast = message.label[2]
        return [self.plan.digest, [to_json(inputs), autocast]]


@dataclass(slots=True)
class Exchanged:
    """What a rank knows of a mini-batch that it exchanges with others."""

    flows: Sequence[Flow] = ()  # of each micro-batch
    labels: Labels = field(default_factory=Labels)
    # Of the activations that its stages have got from other ranks or given to them, by (receiving stage, micro-batch).
    forms: dict[tuple[int, int], Form] = field(default_factory=dict)

    def note(self, key: Key, form: Form) -> None:
        """Note the form of a message."""
        if key.kind is Kind.RECEIVE_ACTIVATION:
            self.forms[key.stage, key.microbatch] = form

    def num_bytes(self, here: Container[int], parts: Callable[[Specs], Specs]) -> list[int]:
        """Return the bytes of the activations and of the gradients that the stages `here` send, as the flows say."""
        total = [0, 0]
        for (k, m), form in self.forms.items():
            if k - 1 in here:
                total[0] += form.num_bytes
            else:
                gradient = Form((), parts(with_gradients(form.specs)))
                total[1] += len(self.flows[m].stages[k].messages) * gradient.num_bytes
        return total


def _words(batch: Any) -> str:
    """Describe what the inputs of a micro-batch look like in a header."""
    return "nothing" if batch is None else _described(from_json(batch[0]), batch[1])


def _described(inputs: Specs, autocast: str) -> str:
    return describe(inputs) + (f" under autocast to {autocast}" if autocast else "")
