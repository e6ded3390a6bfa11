"""A graph on a CPU: it holds the calls of a body, and makes them again in the same memory, as a CUDA graph does on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nwise.capturing.recording import Reads

POISON = 1e30  # stands in all memory between the recording and the first replay, as nothing has been computed


class Calls(TorchDispatchMode):
    """Notes all calls of operators, and what they change of the tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()  # addresses of memory that the body has made
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.draws: list[tuple[int, int]] = []  # place in the list, and the stream of the draws from there on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or "batch_norm" in func.name():  # whose schema does not say that statistics move
            for x in (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
                address = x.untyped_storage().data_ptr()
                if address not in self.made:
                    self.before.setdefault(address, (x, x.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        if not func.is_view:
            self.made |= {x.untyped_storage().data_ptr() for x in tree_leaves(result) if isinstance(x, Tensor)} - set(
                self.before
            )
        return result


class CpuGraph:
    """Records calls, and repeats them."""

    @contextmanager
    def recording(self, num_streams: int) -> Iterator[None]:
        self.calls = Calls()
        self.num_streams = num_streams
        state = torch.default_generator.get_state()
        try:
            with self.calls, Reads():
                yield
        finally:
            torch.default_generator.set_state(state)
            with torch.no_grad():  # by `data`, because a pass goes back through what is changed
                for x, values in self.calls.before.values():
                    x.data.copy_(values)
                for _, _, _, result in self.calls.calls:
                    for x in tree_leaves(result):
                        fresh = isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self.calls.made
                        if fresh and x.is_floating_point():
                            x.data.fill_(POISON)

    def draw_from(self, stream: int) -> None:
        assert stream < self.num_streams
        self.calls.draws.append((len(self.calls.calls), stream))

    @torch.no_grad()
    def replay(self, seeds: Sequence[int]) -> None:
        assert len(seeds) == self.num_streams
        state = torch.default_generator.get_state()
        draws = dict(self.calls.draws)
        for i, (func, args, kwargs, result) in enumerate(self.calls.calls):
            if i in draws:
                torch.default_generator.manual_seed(seeds[draws[i]])
            again = func(*args, **kwargs)
            if not func.is_view:
                for x, y in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(x, Tensor) and x is not y and x.numel():
                        x.detach().copy_(y)
        torch.default_generator.set_state(state)


class CpuGraphs:
    """Makes such graphs."""

    def __init__(self, device: torch.device) -> None:
        self.made: list[CpuGraph] = []

    def new(self) -> CpuGraph:
        self.made.append(CpuGraph())
        return self.made[-1]

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield
