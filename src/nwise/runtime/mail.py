"""The mail of a rank: its channels to and from the other ranks of its replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nwise.dtensor import is_dtensor
from nwise.runtime.channel import Receiver, Sender, start_all
from nwise.runtime.ledger import NOTHING, Label, Window
from nwise.runtime.messages import Arc, Messages
from nwise.runtime.processes import Processes
from nwise.runtime.shapes import Form, check_sendable
from nwise.schedule.actions import SENDS
from nwise.stage.stage import Stage
from nwise.tensors import Tensors


class Mail:
    """Sends and receives the messages of a rank; with one rank there are none.

    Args:
        processes: the processes.
        device: device of the messages.
    """

    def __init__(self, processes: Processes, device: torch.device) -> None:
        self._processes, self._device = processes, device
        self._alone = processes.num_ranks == 1
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._spared: set[int] = set()

    @property
    def sent(self) -> list[int]:
        """The bytes that the present call has sent as activations and as gradients."""
        return [sum(sender.num_bytes[kind] for sender in self._senders.values()) for kind in SENDS.values()]

    def start(self, messages: Messages, call: int, window: Window) -> None:
        """Begin a call on all channels.

        Args:
            messages: the messages.
            call: index of the call in its cycle.
            window: labels of the mini-batches.
        """
        if self._alone:
            return
        if not self._senders:
            self._senders, self._receivers = self._processes.channels(self._device)
        incoming = [(receiver, messages.incoming.get(peer, NOTHING)) for peer, receiver in self._receivers.items()]
        outgoing = [(sender, messages.outgoing.get(peer, NOTHING)) for peer, sender in self._senders.items()]
        start_all(outgoing, incoming, window, call)

    def spare(self, inputs: Iterable[Tensors], stages: Iterable[Stage]) -> None:
        """Let messages share no memory with the model's inputs and with parameters and buffers (`apart`)."""
        # An optimizer changes parameters, and the caller may reuse a batch. A send returns before its message has left.
        if not self._alone:
            tensors = [x for microbatch in inputs for x in microbatch]
            for stage in stages:
                tensors += [*stage.module.parameters(), *stage.module.buffers()]
            self._spared = {t.untyped_storage().data_ptr() for t in tensors if not is_dtensor(t)}

    def apart(self, tensors: Tensors, stage: int) -> Tensors:
        """Copy outputs of a stage whose memory may change before they have left, and tensors of other types."""
        check_sendable(tensors, stage, self._device)
        # Tensor parallelism returns tensors of a subclass, whose values may still be on their way.
        plain = [type(t) is Tensor and t.untyped_storage().data_ptr() not in self._spared for t in tensors]
        return tensors if all(plain) else tuple(t if p else t.clone() for t, p in zip(tensors, plain, strict=True))

    def send(self, arc: Arc, tensors: Sequence[Tensor], parts: Tensors) -> Form:
        """Send a message (`Sender.send`)."""
        return self._senders[arc.peer].send(arc.key, tensors, parts)

    def send_nothing(self, arc: Arc) -> None:
        """Send a message of no mini-batch."""
        self._senders[arc.peer].send_nothing()

    def take(self, arc: Arc) -> tuple[Tensors, Form]:
        """Wait for a message; return what has travelled, and its form."""
        return self._receivers[arc.peer].take(arc.key)

    def form(self, arc: Arc, label: Label) -> Form:
        """Return the form of a message to this rank, of which there has been one for a micro-batch with this label."""
        return self._receivers[arc.peer].form(arc.key, label)

    def post(self) -> None:
        """Post the next receives; this rank's own sends have been issued, so no other rank is blocked on it."""
        for receiver in self._receivers.values():
            receiver.post()

    def forget(self) -> None:
        """Drop the messages that are on their way."""
        for receiver in self._receivers.values():
            receiver.forget()
