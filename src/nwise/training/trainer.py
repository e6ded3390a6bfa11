"""The training loop of a recipe: one process, all stages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nwise.batchnorm import defer_batchnorm
from nwise.compiled import compile_module
from nwise.data import Images, Tokens, batch_indices, steps_per_epoch
from nwise.losses import TokenCrossEntropy
from nwise.pipeline import Pipeline
from nwise.randomness import generator
from nwise.recipes import Recipe
from nwise.split import Chain
from nwise.stage import LossFn
from nwise.training.evaluate import Scores, evaluate
from nwise.training.optimizers import Rate, optimizer_of
from nwise.training.run import Run


class Watcher(Protocol):
    """Who is told how training goes, such as `nwise.report.display`."""

    def started(self, trainer: Trainer) -> None:
        """Before the first step."""

    def stepped(self, step: int, losses: Tensor) -> None:
        """After each step."""

    def evaluated(self, step: int, scores: Scores) -> None:
        """After each evaluation."""

    def evaluating(self, done: int, total: int) -> None:
        """After each batch of an evaluation."""

    def finished(self, status: str) -> None:
        """After the last step; also after an interruption or an error."""


class Trainer:
    """A recipe, resolved: data, pipeline, optimizer, and the folder it records into.

    Args:
        recipe: the configuration.

    Raises:
        ValueError: configuration, data and network do not fit together.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.run: Run | None = None
        self.watchers: tuple[Watcher, ...] = ()
        self.device = device_of(recipe)
        self.train_data, self.test_data = (part.to(self.device) for part in recipe.load())
        self.steps_per_epoch = steps_per_epoch(len(self.train_data), recipe.batch_size)
        self.num_steps = max(1, round(recipe.epochs * self.steps_per_epoch))
        if recipe.max_steps is not None:
            self.num_steps = min(self.num_steps, recipe.max_steps)
        self.pipe = pipeline_of(recipe, self.train_data, self.steps_per_epoch).to(self.device)
        if recipe.compile:
            compile_blocks(self.pipe)

    @property
    def num_samples(self) -> int:
        """Training samples of the whole run."""
        return self.num_steps * self.recipe.batch_size

    def train(self, run: Run | None = None, watchers: tuple[Watcher, ...] = ()) -> Scores:
        """All steps of the recipe, recording and saving as it says.

        Args:
            run: where to write; None to write nothing.
            watchers: who is told.

        Returns:
            The scores after the last step. An interruption (Ctrl-C) saves the weights before it goes on.
        """
        self.run, self.watchers = run, watchers
        status = "failed"
        self._began = time.perf_counter()
        self._tell("started", self)
        try:
            if run is not None and isinstance(self.train_data, Tokens):
                run.save_tokenizer(self.train_data.tokenizer)
            scores = self._all_phases()
            status = "done"
        except KeyboardInterrupt:
            status = "interrupted"
            self._record("interrupted", self.pipe.steps)
            raise
        finally:
            if run is not None:
                if status != "done":  # the last evaluation has saved them otherwise
                    run.save_weights(self.pipe)
                run.finish(status)
            self._tell("finished", status)
        return scores

    def _all_phases(self) -> Scores:
        scores = self._evaluate(0)
        for number, (first, last) in enumerate(self.pipe.strategy.phases(stop=self.num_steps)):
            config = self.recipe.optimizer if number == 0 else self.recipe.then or self.recipe.optimizer
            if number and not self.pipe.needed_heads():
                self.pipe.discard_heads()
            optimizer = optimizer_of(config, self.pipe.parameters())
            rate = Rate(config, optimizer, last - first, self.recipe.eval_every)
            for step in range(first, last):
                self._step(step, optimizer, rate)
                if self._is_due(step + 1):
                    scores = self._evaluate(step + 1)
                    last_head = scores.heads[-1]
                    assert last_head is not None
                    rate.evaluated(last_head.loss)
        return scores

    def _step(self, step: int, optimizer: torch.optim.Optimizer, rate: Rate) -> None:
        recipe = self.recipe
        indices = batch_indices(len(self.train_data), recipe.batch_size, recipe.seed, step)
        inputs, target = self.train_data.batch(indices, generator(recipe.seed, "augmentation", step))
        with autocast(recipe, self.device):
            losses = self.pipe.step(inputs.to(self.device), target=target.to(self.device))
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(self.pipe.parameters(), recipe.clip)
        lr = rate.value
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rate.step()
        self._tell("stepped", step + 1, losses)
        if (step + 1) % recipe.log_every == 0 or step + 1 == self.num_steps:
            stale = {"staleness": self.pipe.staleness.tolist()} if self.pipe.staleness.any() else {}
            self._record("train", step + 1, loss=losses, lr=lr, **stale)

    def _is_due(self, step: int) -> bool:
        every = max(1, round(self.recipe.eval_every * self.steps_per_epoch))
        return step % every == 0 or step == self.num_steps

    def _evaluate(self, step: int) -> Scores:
        def on_batch(done: int, total: int) -> None:
            self._tell("evaluating", done, total)

        with autocast(self.recipe, self.device):
            scores = evaluate(self.pipe, self.test_data, 2 * self.recipe.batch_size, on_batch=on_batch)
        loss = [None if score is None else score.loss for score in scores.heads]
        accuracy = [None if score is None else score.accuracy for score in scores.heads]
        self._record("test", step, loss=loss, accuracy=accuracy)
        if self.run is not None:
            self.run.save_weights(self.pipe)
        self._tell("evaluated", step, scores)
        return scores

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.run is not None:
            seconds = round(time.perf_counter() - self._began, 3)
            epoch = round(step / self.steps_per_epoch, 4)
            samples = step * self.recipe.batch_size
            self.run.record(kind=kind, step=step, epoch=epoch, samples=samples, seconds=seconds, **values)

    def _tell(self, event: str, *values: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, event)(*values)


def device_of(recipe: Recipe) -> torch.device:
    """The recipe's device, resolved."""
    if recipe.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(recipe.device)
    except RuntimeError as error:
        raise ValueError(f"`device` should be auto, cpu, cuda or cuda:<number>. Found {recipe.device!r}.") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"`device` should be auto, cpu, cuda or cuda:<number>. Found {recipe.device!r}.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"`device` should be one of the {torch.cuda.device_count()} GPUs, or cpu. Found {recipe.device!r}."
        )
    return device


def loss_of(data: Images | Tokens) -> LossFn:
    """Cross-entropy, of classes or of tokens."""
    return TokenCrossEntropy() if isinstance(data, Tokens) else nn.functional.cross_entropy


def pipeline_of(recipe: Recipe, data: Images | Tokens, steps_per_epoch: int) -> Pipeline:
    """The recipe's network as a pipeline, on the CPU."""
    model = recipe.build(data)
    if recipe.defer_batchnorm:
        for module in (*model.stages, *model.heads):
            defer_batchnorm(module)
    return Pipeline(
        model.stages,
        model.heads,
        loss_of(data),
        recipe.strategy_for(steps_per_epoch),
        recipe.microbatches,
        recompute=recipe.recompute,
        seed=recipe.seed,
    )


def autocast(recipe: Recipe, device: torch.device) -> Any:
    """bf16 autocast if the recipe asks for it."""
    return torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()


def compile_blocks(pipe: Pipeline, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile every piece of every stage, and every head."""
    for stage in pipe.stages:
        for piece in stage.pieces().values() if isinstance(stage, Chain) else [stage]:
            compile_module(piece, backend)
    for head in pipe.heads.values():
        compile_module(head, backend)


def new_run(recipe: Recipe, parent: Path) -> Run:
    """A fresh folder named after the recipe and the strategy."""
    strategy = "".join(c if c.isalnum() or c in "-." else "_" for c in recipe.strategy)[:40]
    return Run.create(parent, f"{recipe.name}-{strategy}", recipe)
