"""Running cells, several at once, each in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from itertools import takewhile
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from experiments.harness.cell import Cell, Data, Record, measure
from nwise.app.recipes import Gpt, Recipe

_POLL_SECONDS = 0.2  # between two looks at the progress of the cells

OnProgress = Callable[[str, int, int], None]


def run_cells(
    cells: Iterable[Cell | None], workers: int, on_progress: OnProgress, folder: Path | None = None
) -> Generator[tuple[Cell, Record], None, None]:
    """Run cells and yield the record of each as it ends.

    Cells of one seed come after each other, so that an interrupted run has whole seeds.

    Args:
        cells: the cells, each of them asked for when a process is free; None if the next one waits for a record.
        workers: number of processes; 1 runs in this one.
        on_progress: function called with a cell's name, its steps done, and all its steps.
        folder: folder in which each cell has a folder of checkpoints; default: none.

    Raises:
        OSError: a process died.
    """
    if workers == 1:
        _set_threads()
        for cell in takewhile(bool, cells):
            assert cell is not None
            yield cell, measure(cell, _data_for(cell), partial(on_progress, cell.name), folder and cell.folder(folder))
        return
    context = _context()
    news: SimpleQueue[tuple[int, int, int]] = context.SimpleQueue()
    pool = ProcessPoolExecutor(workers, context, _begin, (news,))
    try:
        waiting: dict[Future[Record], Cell] = {}
        names: list[str] = []
        left = iter(cells)
        while True:
            while len(waiting) < workers and (cell := next(left, None)) is not None:
                waiting[pool.submit(_run, len(names), cell, folder)] = cell
                names.append(cell.name)
            if not waiting:
                return
            done, _ = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            while not news.empty():
                number, steps, total = news.get()
                on_progress(names[number], steps, total)
            for future in done:
                yield waiting.pop(future), future.result()
    except BrokenProcessPool as error:
        raise OSError(
            f"{workers} processes should run the cells. Found that one has died, perhaps for want of memory; the records so far "
            "are kept, and the same command goes on (`--workers 1` takes less memory)."
        ) from error
    except BaseException:  # Ctrl-C above all: nobody wants to wait for the cells that run
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _context() -> Any:
    """Return how workers start: forked from a server that has imported everything once, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")  # Windows
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@lru_cache(maxsize=1)  # the next cell often has the same data
def _load(recipe: Recipe) -> Data:
    return recipe.load()


def _data_for(cell: Cell) -> Data:
    """Load the data of a cell's recipe, which depend on nothing else of it."""
    recipe, model = cell.recipe, cell.recipe.model
    if isinstance(model, Gpt):
        model = Gpt(sequence_length=model.sequence_length, vocabulary_size=model.vocabulary_size)
        return _load(Recipe(data=recipe.data, model=model, seed=recipe.seed))
    return _load(Recipe(data=recipe.data, seed=recipe.seed))


_news: Any = None


def _begin(news: Any) -> None:
    """Prepare a new worker: one thread, since the others compute too; no Ctrl-C, but the end of the process that asked."""
    global _news
    _news = news
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _set_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with_parent() -> None:
    """Wait until the parent has ended, even by a kill, and end too, because no process is left to read the record."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _set_threads() -> None:
    """Set as many threads however many workers there are, since sums of several threads differ in their last digits."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _run(number: int, cell: Cell, folder: Path | None) -> Record:
    def report(done: int, total: int) -> None:
        if done % max(1, total // 50) == 0 or done == total:
            _news.put((number, done, total))

    record = measure(cell, _data_for(cell), report, folder and cell.folder(folder))
    gc.collect()  # a pipeline has cycles, and the next cell needs the memory of a GPU
    return record
