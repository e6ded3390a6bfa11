"""The training loop of a recipe: one process with all stages, or one for every stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nwise.batchnorm import defer_batchnorm
from nwise.compiled import compile_module
from nwise.data import Images, Tokens, batch_indices, steps_per_epoch
from nwise.losses import TokenCrossEntropy
from nwise.models import materialize
from nwise.pipeline import Pipeline
from nwise.randomness import generator
from nwise.recipes import Recipe
from nwise.runtime.timeline import Timeline
from nwise.runtime.world import launched
from nwise.split import Chain
from nwise.stage import LossFn
from nwise.training.clip import Clip
from nwise.training.evaluate import Scores, evaluate
from nwise.training.log import StepLog
from nwise.training.optimizers import Rate, optimizer_of, parameter_groups
from nwise.training.run import Run, weights_of


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
        data: what the recipe loads, if it was loaded before.

    Raises:
        ValueError: configuration, data and network do not fit together.
    """

    def __init__(self, recipe: Recipe, data: tuple[Images, Images] | tuple[Tokens, Tokens] | None = None) -> None:
        self.recipe = recipe
        self.run: Run | None = None
        self.watchers: tuple[Watcher, ...] = ()
        self.device = device_of(recipe)
        self.train_data, self.test_data = (part.to(self.device) for part in data or recipe.load())
        self.steps_per_epoch = steps_per_epoch(len(self.train_data), recipe.batch_size)
        self.num_steps = max(1, round(recipe.epochs * self.steps_per_epoch))
        if recipe.max_steps is not None:
            self.num_steps = min(self.num_steps, recipe.max_steps)
        self.pipe = pipeline_of(recipe, self.train_data, self.steps_per_epoch).to(self.device)
        self._layout = torch.channels_last if recipe.channels_last else torch.preserve_format
        if recipe.channels_last:
            self.pipe.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs lack it
        if recipe.compile:
            compile_blocks(self.pipe)
        here = [sum(p.numel() for p in part) for part in (self.pipe.main_parameters(), self.pipe.head_parameters())]
        facts = [here] if self.pipe.team is None else self.pipe.team.facts(here)
        self.num_parameters = tuple(map(sum, zip(*facts, strict=True)))  # of the main network and of the heads
        self._log = StepLog(self.pipe)
        self._timeline: Timeline | None = None
        self._losses = torch.full((self.pipe.num_stages,), torch.nan)  # the last known, for display

    @property
    def num_samples(self) -> int:
        """Training samples of the whole run."""
        return self.num_steps * self.recipe.batch_size

    def train(self, run: Run | None = None, watchers: tuple[Watcher, ...] = ()) -> Scores:
        """All steps of the recipe, recording and saving as it says.

        Args:
            run: where to write; None to write nothing. Of several processes only rank 0 has one.
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
            if self._timeline is not None:
                self._timeline.save(None if run is None else run.folder / "timeline.json")
            status = "done"
        except KeyboardInterrupt:
            status = "interrupted"
            self._record("interrupted", self.pipe.steps)
            raise
        finally:
            if run is not None:
                if status != "done" and self.pipe.team is None:  # the last evaluation has saved them otherwise
                    run.save_weights(weights_of(self.pipe))
                run.finish(status)
            self._tell("finished", status)
        return scores

    def record_timeline(self, steps: int) -> None:
        """Record what every process does in so many steps, once the pipeline is full.

        Raises:
            ValueError: there is one process, or fewer steps than that.
        """
        if not steps:
            return
        first = self.pipe.num_stages
        if self.pipe.team is None:
            raise ValueError("`timeline` should be asked of several processes. Found one; start them with torchrun.")
        if not 2 <= steps <= self.num_steps - first:
            raise ValueError(
                f"`timeline` should be from 2 to {self.num_steps - first} steps, since the first {first} fill the pipeline. "
                f"Found {steps}."
            )
        now = self.pipe.strategy.in_force(first)
        if now.asynchronous:
            raise ValueError(
                "`timeline` should be asked of a strategy whose lists repeat. Found Hogwild, whose actions come as gradients do."
            )
        self._timeline = Timeline(self.pipe.team, now.name, first, first + steps)

    def _all_phases(self) -> Scores:
        scores = self._evaluate(0)
        for number, (first, last) in enumerate(self.pipe.strategy.phases(stop=self.num_steps)):
            config = self.recipe.optimizer if number == 0 else self.recipe.then or self.recipe.optimizer
            if number and not self.pipe.needed_heads():
                self.pipe.discard_heads()
            optimizer = optimizer_of(config, parameter_groups(self.pipe, config.lr, self.recipe.stage_lr))
            rate = Rate(config, optimizer, last - first, self.recipe.eval_every)
            clip = None if self.recipe.clip is None else Clip(self.pipe, self.recipe.clip, self.recipe.clip_by)
            for step in range(first, last):
                self._step(step, optimizer, rate, clip)
                while step + 1 == last and self.pipe.drain():  # Hogwild's last gradients
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                if self._is_due(step + 1):
                    scores = self._evaluate(step + 1)
                    last_head = scores.heads[-1]
                    assert last_head is not None
                    rate.evaluated(last_head.loss)
        return scores

    def _step(self, step: int, optimizer: torch.optim.Optimizer, rate: Rate, clip: Clip | None) -> None:
        recipe = self.recipe
        indices = batch_indices(len(self.train_data), recipe.batch_size, recipe.seed, step)
        inputs, target = self.train_data.batch(indices, generator(recipe.seed, "augmentation", step))
        with autocast(recipe, self.device):
            inputs = inputs.to(self.device, memory_format=self._layout)
            losses = self.pipe.step(inputs, target=target.to(self.device))
        if clip is not None:
            clip()
        lr = rate.value
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        rate.step()
        if (step + 1) % recipe.log_every == 0 or step + 1 == self.num_steps:
            self._log.put(step + 1, losses, lr, self._seconds)
        self._write_log()
        self._tell("stepped", step + 1, losses if self.pipe.team is None else self._losses)

    def _write_log(self, *, wait: bool = False) -> None:
        for step, values in self._log.take(wait=wait):
            self._record("train", step, **values)
            self._losses = torch.tensor(values["loss"])

    def _is_due(self, step: int) -> bool:
        every = max(1, round(self.recipe.eval_every * self.steps_per_epoch))
        return step % every == 0 or step == self.num_steps

    def _evaluate(self, step: int) -> Scores:
        def on_batch(done: int, total: int) -> None:
            self._tell("evaluating", done, total)

        self._write_log(wait=True)
        if self.pipe.team is not None and step:  # what had not come yet when the step was told of
            self._tell("stepped", step, self._losses)
        with autocast(self.recipe, self.device):
            scores = evaluate(self.pipe, self.test_data, 2 * self.recipe.batch_size, on_batch=on_batch)
        loss = [None if score is None else score.loss for score in scores.heads]
        accuracy = [None if score is None else score.accuracy for score in scores.heads]
        self._record("test", step, loss=loss, accuracy=accuracy)
        if self.run is not None or self.pipe.team is not None:
            weights = weights_of(self.pipe)
            if self.run is not None:
                self.run.save_weights(weights)
        self._tell("evaluated", step, scores)
        return scores

    @property
    def _seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.run is not None:
            epoch = round(step / self.steps_per_epoch, 4)
            samples = step * self.recipe.batch_size
            when = {"seconds": self._seconds, **values}  # a step's record may come later than the step
            self.run.record(kind=kind, step=step, epoch=epoch, samples=samples, **when)

    def _tell(self, event: str, *values: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, event)(*values)


def device_of(recipe: Recipe) -> torch.device:
    """The recipe's device, resolved."""
    if recipe.device == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        # Several processes of one machine have a GPU each, as far as there are any.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
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
    """The recipe's network as a pipeline, on the CPU; of several processes each builds its own stage."""
    with torch.device("meta") if launched() else nullcontext():
        model = recipe.build(data)

    if recipe.stage_lr and len(recipe.stage_lr) != len(model.stages):
        raise ValueError(
            f"`stage_lr` should have a factor for each of the {len(model.stages)} stages. Found {len(recipe.stage_lr)}."
        )

    def made(module: nn.Module, name: str = "") -> nn.Module:
        module = materialize(module, recipe.seed, name) if launched() else module
        return defer_batchnorm(module) if recipe.defer_batchnorm else module

    return Pipeline(
        [partial(made, stage) for stage in model.stages],
        [partial(made, head, f"heads.{k}") for k, head in enumerate(model.heads)],
        loss_of(data),
        recipe.strategy_for(steps_per_epoch),
        recipe.microbatches,
        schedule=None if recipe.schedule == "best" else recipe.schedule,
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
