"""Graphs: computations on a GPU that are launched once by Python, and then replayed without it (CUDA graphs).

A graph knows only addresses. It reads and writes the same memory each time. So what goes in is copied to tensors that it
reads, and what comes out is in tensors that it writes::

    record    Python --> kernels at their addresses, none of which runs
    replay               kernels at their addresses, in one launch

Random numbers come from streams: each part of a step that draws has its own generator, which gets a new seed for each replay.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch

from nwise._torch import TorchDispatchMode
from nwise.randomness import StepSeeds, StreamKey, T, random_states

__all__ = ["CudaGraphs", "NotRecordableError"]


class NotRecordableError(RuntimeError):
    """What a step does cannot be recorded; the message names it."""


class CudaGraph:
    """A CUDA graph, recorded on a stream, in a pool of memory that several graphs share.

    Tests put a graph of the CPU in its place (`tests/recorder.py`).
    """

    def __init__(self, device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self._stream = stream
        self._generator = torch.cuda.default_generators[device.index]
        self._streams: list[torch.Generator] = []

    @contextmanager
    def recording(self, num_streams: int) -> Iterator[None]:
        """Record what the body launches, with so many streams of random numbers; nothing has values before a replay."""
        # A recorded kernel reads the seed from memory that belongs to a generator's state, so each stream is a state of its own.
        present = self._generator.graphsafe_get_state()
        self._streams = [self._generator.clone_state() for _ in range(num_streams)]
        for stream in self._streams:
            self._graph.register_generator_state(stream)
        # Other threads may go on, such as those that pin the memory of the next batch.
        mode = "thread_local"
        # Torch warns of a graph that launches nothing.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            try:
                with torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode=mode), Reads():
                    yield
            finally:
                self._generator.graphsafe_set_state(present)

    def draw_from(self, stream: int) -> None:
        """Let what is recorded from here on draw from a stream."""
        self._generator.graphsafe_set_state(self._streams[stream])

    def replay(self, seeds: Sequence[int]) -> None:
        """Launch the graph on the present stream of the GPU, with a seed for each stream of random numbers."""
        for stream, seed in zip(self._streams, seeds, strict=True):
            stream.manual_seed(seed)
        self._graph.replay()


Seeded = tuple[CudaGraph, Sequence[StreamKey]]  # a graph, and the part that draws from each of its streams


class CudaGraphs:
    """Makes graphs on a GPU that share a pool of memory, so they are replayed in the order in which they were recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def new(self) -> CudaGraph:
        """Return an empty graph."""
        return CudaGraph(self._device, self._pool, self._stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the body on the stream of the graphs."""
        # What autograd keeps for a parameter belongs to the stream of its first use.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)


class Reads(TorchDispatchMode):
    """Raises NotRecordableError where the body reads a value, or where a shape depends on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise NotRecordableError("reads a value (`item`, `float`, `bool`, `if`, `print`)")
        # `x[i]` has the shape of i, unless i is a mask; torch gives both one tag.
        by_mask = func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if by_mask or (torch.Tag.dynamic_output_shape in func.tags and func is not torch.ops.aten.index.Tensor):
            raise NotRecordableError(
                f"calls `{func.overloadpacket.__name__}`, whose result has a shape that depends on values"
            )
        return func(*args, **(kwargs or {}))


def has_drawn(device: torch.device, seed: int) -> bool:
    """Return whether random numbers have been drawn on a device since its generator was seeded."""
    if device.type == "cuda":
        return bool(torch.cuda.default_generators[device.index].get_offset())
    fresh = torch.Generator().manual_seed(seed)
    return not torch.equal(torch.default_generator.get_state(), fresh.get_state())


class Observed(StepSeeds):
    """Notes which parts draw random numbers on the device: `drawing` has them, and how often."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawing = Counter[StreamKey]()

    def run(self, part: StreamKey, device: torch.device, function: Callable[..., T], *arguments: Any) -> T:
        made = super().run(part, device, function, *arguments)
        if has_drawn(device, self.seed_of(part)):
            self.drawing[part] += 1
        return made


class Recorded(StepSeeds):
    """Records the body. Each part draws from its own stream; a part that draws from the CPU is refused.

    `drawing` is that of `Observed`, and `graph` is what has been recorded.
    """

    def __init__(self, graphs: CudaGraphs, drawing: Counter[StreamKey]) -> None:
        super().__init__()
        # What draws though it has not drawn before gets a stream that is the same for all:
        #
        #     drawing    {stage 1 of micro-batch 0: 2, its head: 1}
        #     streams    0: other    1 and 2: stage 1, which draws twice    3: the head
        parts: list[StreamKey] = [("other", 0, 0), *drawing.elements()]
        self._streams = {part: [i for i, one in enumerate(parts) if one == part] for part in drawing}
        self.graph: Seeded = graphs.new(), parts
        self._open = ExitStack()
        self._part = ""

    def __enter__(self) -> Self:
        graph, parts = self.graph
        self._open.enter_context(graph.recording(len(parts)))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def run(self, part: StreamKey, device: torch.device, function: Callable[..., T], *arguments: Any) -> T:
        what, stage, _ = part
        self._part = f"The {what} of stage {stage}" if what == "head" else f"Stage {stage}"
        states = self._present(device)
        streams = self._streams.get(part)
        self.graph[0].draw_from(streams.pop(0) if streams else 0)
        made = function(*arguments)
        if states != self._present(device):
            raise NotRecordableError("draws random numbers on the CPU")
        self._part = ""
        return made

    @property
    def name(self) -> str:
        """Name of the present part."""
        return self._part or "A module or loss"

    def _present(self, device: torch.device) -> list[str]:
        """Return the states of all generators on the CPU, but for that which a part on the CPU draws from."""
        states = [state for _, state in random_states()]
        states += [torch.default_generator.get_state()] if device.type != "cpu" else []
        return [repr(state.tolist() if isinstance(state, torch.Tensor) else state) for state in states]
