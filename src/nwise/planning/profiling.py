"""Profile: the measured cost of each piece of a network on this machine, for the planner.

Every piece runs alone on the output of the one before, at each requested size of micro-batch: forward, gradient of its input
only (I), of its weights only (W with its chain), of both (B), its update, and a head behind it. The result is the median of
some rounds. The rounds of all pieces take turns, so a busy moment affects all of them alike.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nwise._torch import BatchNorm
from nwise.checks import check_at_least
from nwise.flow import find_flow
from nwise.losses import explain
from nwise.microbatch import Batch
from nwise.planning.partitions import Piece
from nwise.schedule.actions import Action, Kind
from nwise.stage.stage import Stage
from nwise.stage.tape import Tape
from nwise.stage.weights import Weights
from nwise.strategies import EndToEnd
from nwise.tensors import Tensors, as_argument, as_leaves, as_tuple, run_module

__all__ = ["Network", "Profile", "numbers_to_try", "profile"]

# The flow of a single stage. Made here, because among the fake tensors of a prediction no value can be read.
_ALONE = find_flow(EndToEnd().credit(1)).stages[0]

_WHAT = "The output of a piece"


@dataclass(frozen=True)
class Network:
    """A network to measure, with all that a training step needs.

    Args:
        pieces: its pieces in order, by name.
        heads: a head behind every piece, None for none; the last piece has none.
        batch: function from a number of samples to inputs of the first piece and a target.
        batch_size: samples in a mini-batch.
        loss_fn: loss of the output of a head or of the last piece, given the target.
        optimizer: function that makes an optimizer of some parameters; None to leave its time and memory out.
        device: the device of everything.
        starts: index of the first piece of every stage, if the network is cut already; default: one stage.
        autocast: function that returns a context for forwards; default: none.
    """

    pieces: dict[str, nn.Module]
    heads: Sequence[nn.Module | None]
    batch: Callable[[int], tuple[Tensors, Any]]
    batch_size: int
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
    device: torch.device
    starts: tuple[int, ...] = (0,)
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of every piece, in seconds and bytes.

    Args:
        pieces: the pieces, by the number of micro-batches per mini-batch.
        device: the device they were measured on.
        batch_size: samples in a mini-batch.
        starts: index of the first piece of every stage of the network, as it was cut.
        spread: half the distance between the quartiles of the rounds over their median; nan for a single round.
        overhead: seconds that nwise itself needs for a forward or a backward; default: 0.
    """

    pieces: dict[int, list[Piece]]
    device: str
    batch_size: int
    starts: tuple[int, ...]
    spread: float
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all passes of a mini-batch, summed over the numbers of micro-batches."""
        times = (m * (p.forward + p.input_grad + p.weight_grad) for m, pieces in self.pieces.items() for p in pieces)
        return sum(times)

    def as_json(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> Profile:
        """Return the profile with these values, which may have been JSON."""
        pieces = {int(m): [Piece(**piece) for piece in group] for m, group in values["pieces"].items()}
        return Profile(**{**values, "pieces": pieces, "starts": tuple(values["starts"])})


def profile(
    network: Network,
    microbatches: int | Sequence[int] | None = None,
    *,
    rounds: int = 5,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Profile:
    """Measure a network. Batch norm and dropout run as in training, so give a copy of a network that must not change.

    Args:
        network: the network.
        microbatches: numbers M of micro-batches; default: see `numbers_to_try`.
        rounds: number of rounds after a warm-up round; default 5.
        progress: wraps the list of measurements, for a progress bar.

    Raises:
        ValueError: a number of micro-batches is above the batch size.
    """
    microbatches = numbers_to_try(microbatches, network.batch_size, network.pieces.values())
    bench = _Bench(network)
    times: dict[tuple[int, int], list[dict[str, float]]] = {}
    todo = [(r, m, i) for r in range(rounds + 1) for m in microbatches for i in range(len(bench.names))]
    for r, m, i in progress(todo):
        seconds = bench.measure(i, network.batch_size // m)
        if r:
            times.setdefault((m, i), []).append(seconds)
    pieces = {
        m: [_piece(bench, i, times[m, i], network.batch_size // m) for i in range(len(bench.names))]
        for m in microbatches
    }
    spread = _spread(list(times.values()))
    return Profile(pieces, str(network.device), network.batch_size, network.starts, spread, _action_overhead())


def numbers_to_try(microbatches: Any, size: int | None = None, modules: Iterable[nn.Module] = ()) -> list[int]:
    """Return numbers of micro-batches: those given, or powers of two up to 32 and up to the size of the mini-batch.

    Args:
        microbatches: a number or several; None for the powers.
        size: samples in a mini-batch; default: any number.
        modules: the network; with batch norm each micro-batch has two samples or more. Default: none.

    Raises:
        ValueError: the list is empty, or a number is not from 1 to the size of the mini-batch.

    >>> numbers_to_try(None, 10), numbers_to_try((4, 2))
    ([1, 2, 4, 8], [2, 4])
    """
    if microbatches is None:
        # A batch norm needs two samples.
        least = 2 if any(isinstance(part, BatchNorm) for module in modules for part in module.modules()) else 1
        return [m for m in (1, 2, 4, 8, 16, 32) if m == 1 or size is None or m * least <= size]
    ms = list(microbatches) if isinstance(microbatches, Iterable) else [microbatches]
    if not ms:
        raise ValueError("`microbatches` should contain at least one number to try. Found none.")
    for m in ms:
        check_at_least(1, microbatches=m)
        if size is not None and m > size:
            raise ValueError(f"`microbatches` should be at most the {size} samples of a mini-batch. Found {m}.")
    return sorted({int(m) for m in ms})


def _action_overhead() -> float:
    """Measure the seconds that nwise itself needs for a forward or a backward, on a stage that computes next to nothing."""
    layer = nn.Linear(1, 1)
    stage = Stage(0, layer, None, nn.functional.mse_loss)
    stage.survey(layer, None)
    x = torch.zeros(1, 1)
    batch = Batch([(x,)], [(x,)], [[0.0]])

    def both() -> None:
        tape = Tape(_ALONE, batch, 0, _ALONE.passes, Weights(stage.learns))
        for kind in (Kind.FORWARD, Kind.HEAD, Kind.WEIGHT_GRAD):
            stage.run(Action(kind, 0, 0), tape, {None: (x,)})

    return statistics.median(timeit.repeat(both, number=1, repeat=20)) / 2


def _spread(times: list[list[dict[str, float]]]) -> float:
    totals = [sum(sum(seconds.values()) for seconds in column) for column in zip(*times, strict=True)]
    if len(totals) < 2:
        return float("nan")
    low, middle, high = statistics.quantiles(totals, n=4, method="inclusive")
    return (high - low) / 2 / middle


def _piece(bench: _Bench, i: int, rounds: list[dict[str, float]], size: int) -> Piece:
    """Take medians, and separate the work that the passes share."""
    median = {name: statistics.median(seconds[name] for seconds in rounds) for name in rounds[0]}
    through = median["input_grad"]
    weights = median["weights"]
    both = median["both"]
    # Three passes are timed, and a schedule is made of others. For a piece of several layers:
    #
    #     through   the chain of layers, to the input         I
    #     both      the chain and all weights                 B = I + W, so W adds `alone` to a chain that has been walked
    #     weights   all weights, and most of the chain        a W that walks for itself: `alone` and `chain`
    alone = max(0.0, both - through)  # added by weights to a pass that computes the input's gradient anyway
    return Piece(
        name=bench.names[i],
        forward=median["forward"],
        input_grad=through,
        weight_grad=alone,
        chain=min(through, max(0.0, weights - alone)),
        head=median["head"],
        update=median["update"],
        **bench.sizes(i, size),
    )


class _Bench:
    """The pieces of a network, with an input for each."""

    def __init__(self, network: Network) -> None:
        self.names = list(network.pieces)
        self._network = network
        self._device = network.device
        self._autocast = network.autocast
        self._pieces = list(network.pieces.values())
        self._inputs: dict[tuple[int, int], Tensors] = {}
        self._optimizers = [_optimizer(network, piece) for piece in self._pieces]

    def measure(self, i: int, size: int) -> dict[str, float]:
        """Run piece i in every way once, and return the seconds."""
        piece = self._pieces[i]
        leaves = self._leaves(i, size)
        weights: list[Tensor] = [p for p in piece.parameters() if p.requires_grad]
        tracked = [x for x in leaves if x.requires_grad]
        with self._autocast():
            forward, outputs = self._timed(lambda: run_module(piece, leaves, _WHAT))
        roots = [y for y in outputs if y.requires_grad]
        seeds = list(map(torch.randn_like, roots))

        def back(wrt: list[Tensor]) -> float:
            if not wrt or not roots:
                return 0.0
            seconds, _ = self._timed(
                lambda: torch.autograd.grad(roots, wrt, seeds, retain_graph=True, allow_unused=True)
            )
            return seconds

        head = self._time_head(i, size, outputs)
        passes = {"input_grad": back(tracked), "weights": back(weights), "both": back(tracked + weights)}
        update = self._timed(lambda: self._update(i))[0]
        return {"forward": forward, **passes, "head": head, "update": update}

    def _time_head(self, i: int, size: int, outputs: Tensors) -> float:
        head, loss_fn = self._head(i, size)
        if head is None:
            return 0.0
        leaves = as_leaves(outputs, tracked=True)
        wrt = [x for x in (*head.parameters(), *leaves) if x.requires_grad]

        def whole() -> None:
            with self._autocast():
                try:
                    loss = loss_fn(run_module(head, leaves, _WHAT))
                except (TypeError, ValueError, RuntimeError, IndexError) as error:
                    target = self._network.batch(size)[1]
                    known = None if target is None else as_tuple(target, "`target`")
                    explain(error, f"module {self.names[i]!r}", leaves, known)
                    raise
            torch.autograd.grad(loss, wrt, allow_unused=True)

        return self._timed(whole)[0] if wrt else 0.0

    def _head(self, i: int, size: int) -> tuple[nn.Module | None, Callable[[Tensors], Tensor]]:
        """Return the module after piece i, one that does nothing for the last one, and the loss of its output."""
        target = self._network.batch(size)[1]
        head = _Nothing() if i == len(self._pieces) - 1 else self._network.heads[i]
        return head, lambda outputs: self._network.loss_fn(as_argument(outputs), target)

    def sizes(self, i: int, size: int) -> dict[str, Any]:
        """Return the bytes, as `Piece` names them; a head has gradients and state like the pieces, by parameter."""
        weights, learns, state = self._held[i]
        learnable = sum(held[1] for held in self._held)
        extra = sum(held[1] + held[2] for held in self._held) / learnable if learnable else 0.0
        head = self._head(i, 1)[0]
        beside = 0 if head is None else sum(p.nbytes for p in head.parameters())
        return {
            "learns": learns > 0,
            "message_bytes": float(sum(y.nbytes for y in self._input(i + 1, size))),
            "activation_bytes": float(self._activations(i, size)),
            "weight_bytes": float(weights),
            "fixed_bytes": float(weights + learns + state),
            "head_bytes": beside * (1 + extra),
        }

    @cached_property
    def _held(self) -> list[tuple[int, int, int]]:
        """The bytes of every piece's parameters, of those that learn, and of the optimizer's state."""
        return [
            (
                sum(p.nbytes for p in piece.parameters()),
                sum(p.nbytes for p in piece.parameters() if p.requires_grad),
                0 if optimizer is None else _state_bytes(optimizer),
            )
            for piece, optimizer in zip(self._pieces, self._optimizers, strict=True)
        ]

    def _activations(self, i: int, size: int) -> int:
        """Return the bytes that a piece's forward makes and keeps: what autograd saves, and the output."""
        piece = self._pieces[i]
        leaves = self._leaves(i, size)
        kept = set[torch.UntypedStorage]()

        def keep(tensor: Tensor) -> Tensor:
            kept.add(tensor.untyped_storage())
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor), self._autocast():
            outputs = run_module(piece, leaves, _WHAT)
        for tensor in outputs:
            keep(tensor)
        # The input belongs to the piece before, and the parameters are always there.
        given = {tensor.untyped_storage() for tensor in (*leaves, *piece.parameters(), *piece.buffers())}
        return sum(storage.nbytes() for storage in kept - given)

    def _leaves(self, i: int, size: int) -> Tensors:
        return as_leaves(self._input(i, size), tracked=i > 0)

    def _input(self, i: int, size: int) -> Tensors:
        """Return the input of piece i for a micro-batch of this size."""
        if (i, size) not in self._inputs:
            if i == 0:
                self._inputs[i, size] = self._network.batch(size)[0]
            else:
                with torch.no_grad(), self._autocast():
                    self._inputs[i, size] = run_module(self._pieces[i - 1], self._input(i - 1, size), _WHAT)
        return self._inputs[i, size]

    def _update(self, i: int) -> None:
        optimizer = self._optimizers[i]
        if optimizer is not None:
            optimizer.step()

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        start = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - start, result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _Nothing(nn.Module):
    """Stands for the head of the last stage, whose outputs go to the loss."""

    def forward(self, *outputs: Tensor) -> Tensor | Tensors:
        return outputs if len(outputs) > 1 else outputs[0]


def _optimizer(network: Network, piece: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in piece.parameters() if p.requires_grad]
    if not parameters or network.optimizer is None:
        return None
    for p in parameters:
        p.grad = torch.zeros_like(p)
    return network.optimizer(parameters)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state, without its counters of steps."""
    state = (value for values in optimizer.state.values() for value in values.values())
    return sum(value.nbytes for value in state if isinstance(value, Tensor) and value.dim())
