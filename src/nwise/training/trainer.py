"""The training loop of a recipe: one process with all stages, or one for every stage."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwise.data import Images, Tokens, batch_indices, steps_per_epoch
from nwise.randomness import generator
from nwise.recipes import Recipe, to_json
from nwise.runtime.appointment import Appointment
from nwise.runtime.timeline import Timeline
from nwise.training.build import autocast, compile_blocks, device_of, pipeline_of
from nwise.training.checkpoint import sizes_of
from nwise.training.checkpoints import Checkpoints, Found, Keeping
from nwise.training.clip import Clip
from nwise.training.evaluate import Scores, evaluate
from nwise.training.finite import Finite, write_post_mortem
from nwise.training.log import StepLog
from nwise.training.optimizers import Rate, optimizer_of, parameter_groups
from nwise.training.run import Run, versions
from nwise.training.state import checked
from nwise.training.weights import weights_of


class Watcher:
    """Who is told how training goes, such as `nwise.report.display`; does nothing of itself."""

    def started(self, trainer: Trainer) -> None:
        """Before the first step."""

    def stepped(self, step: int, losses: Tensor) -> None:
        """After each step."""

    def evaluated(self, step: int, scores: Scores) -> None:
        """After each evaluation."""

    def evaluating(self, done: int, total: int) -> None:
        """After each batch of an evaluation."""

    def resumed(self, step: int, changes: str) -> None:
        """After a checkpoint has been gone on from; what is not as it was saved."""

    def finished(self, status: str) -> None:
        """After the last step; also after an interruption or an error."""


class StoppedError(Exception):
    """Training has been stopped from outside, between two steps."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What is made anew when the strategy changes."""

    optimizer: torch.optim.Optimizer
    rate: Rate
    clip: Clip | None
    finite: Finite


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
        self._appointment = Appointment(self.pipe.team)
        self._checkpoints: Checkpoints | None = None
        self._best = float("inf")
        self._losses = torch.full((self.pipe.num_stages,), torch.nan)  # the last known, for display

    @property
    def num_samples(self) -> int:
        """Training samples of the whole run."""
        return self.num_steps * self.recipe.batch_size

    def train(
        self,
        run: Run | None = None,
        watchers: tuple[Watcher, ...] = (),
        keeping: Keeping | None = None,
        *,
        resume: bool = False,
    ) -> Scores:
        """All steps of the recipe, recording and saving as it says.

        Args:
            run: where to write; None to write nothing. Of several processes only rank 0 has one.
            watchers: who is told.
            keeping: when checkpoints are written into the run's folder; None for never.
            resume: go on from the newest checkpoint of the run, if there is one.

        Returns:
            The scores after the last step. An interruption (Ctrl-C) saves the weights before it goes on.

        Raises:
            StoppedError: after `stop`, once a checkpoint has been written.
            nwise.training.NotFiniteError: a loss or gradient is not finite, and the recipe says to stop.
        """
        self.run, self.watchers, self._keeping = run, watchers, keeping
        folder = None if run is None else str(run.folder.resolve())
        self._folder = folder if self.pipe.team is None else self.pipe.team.world.everyone("folder", folder)[0]
        if self._folder is not None and (keeping is not None or resume):
            self._checkpoints = (keeping or Keeping()).checkpoints(Path(self._folder) / "checkpoints", self.pipe)
        status = "failed"
        self._began = self._saved = time.perf_counter()
        found = self._found() if resume else None
        self._is_ready = not resume  # before that, nothing in the run's folder should change
        self._tell("started", self)
        try:
            if run is not None and isinstance(self.train_data, Tokens):
                run.save_tokenizer(self.train_data.tokenizer)
            scores = self._all_phases(found)
            if self._timeline is not None:
                self._timeline.save(None if run is None else run.folder / "timeline.json")
            status = "done"
        except KeyboardInterrupt:
            status = "interrupted"
            self._record("interrupted", self.pipe.steps)
            raise
        except StoppedError:
            status = "stopped"
            raise
        finally:
            if run is not None and self._is_ready:
                if status != "done" and self.pipe.team is None:  # the last evaluation has saved them otherwise
                    run.save_weights(weights_of(self.pipe))
                run.finish(status)
            self._tell("finished", status)
        return scores

    def stop(self) -> None:
        """Have all processes finish a step, write a checkpoint and raise `StoppedError`; safe in a signal handler."""
        self._appointment.ask("stop")

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

    def _found(self) -> Found | None:
        """The checkpoint that is gone on from."""
        assert self._checkpoints is not None
        found = self._checkpoints.newest()
        step = -1 if found is None else int(found.facts["step"])
        if found is not None:
            checked(found.facts, found.folder, {"rate": dict[str, int | float], "seconds": float, "best": float})
        if step > self.num_steps:
            raise ValueError(
                f"`epochs` and `max_steps` should give more than the {step} steps that were done. Found "
                f"{self.num_steps}."
            )
        if found is not None:
            self.pipe.steps = step
            self._began -= found.facts["seconds"]
            self._best = found.facts["best"]
            if not any(name.startswith("heads.") for name in sizes_of(found.folder)) and not self.pipe.needed_heads():
                self.pipe.discard_heads()  # as the run did
        return found

    def _all_phases(self, found: Found | None) -> Scores:
        if found is None:
            self._ready(-1)
        scores = None if found is not None else self._evaluate(0)
        for number, (first, last) in enumerate(self.pipe.strategy.phases(stop=self.num_steps)):
            begin = max(first, self.pipe.steps)
            if begin >= last:
                continue
            if number and not self.pipe.needed_heads():
                self.pipe.discard_heads()
            self._phase = self._phase_from(number, first, last, begin)
            if found is not None:
                self._restore(found, midway=begin > first)
                found = None
            for step in range(begin, last):
                self._keep_appointments(step)
                self._step(step)
                while step + 1 == last and self.pipe.drain():  # Hogwild's last gradients
                    self._update()
                if self._is_due(step + 1):
                    scores = self._evaluate(step + 1)
                    assert scores.heads[-1] is not None
                    self._phase.rate.evaluated(scores.heads[-1].loss)
                self._save_if_due(step + 1, scores)
        if found is not None:
            self._restore(found, midway=False)
        if scores is None:
            scores = self._evaluate(self.num_steps)
        if self._checkpoints is not None:
            self._checkpoints.wait()
        return scores

    def _phase_from(self, number: int, first: int, last: int, begin: int) -> Phase:
        recipe = self.recipe
        config = recipe.optimizer if number == 0 else recipe.then or recipe.optimizer
        optimizer = optimizer_of(config, parameter_groups(self.pipe, config.lr, recipe.stage_lr))
        before, self.pipe.steps = self.pipe.steps, begin
        clip = None if recipe.clip is None else Clip(self.pipe, recipe.clip, recipe.clip_by)
        finite = Finite(self.pipe, recipe.on_nan, self._post_mortem)
        self.pipe.steps = before
        if self._checkpoints is not None:
            self._checkpoints.optimizer = optimizer
        return Phase(optimizer, Rate(config, optimizer, last - first, recipe.eval_every), clip, finite)

    def _step(self, step: int) -> None:
        recipe, phase = self.recipe, self._phase
        inputs, target = self.train_data.batch(self._indices(step), generator(recipe.seed, "augmentation", step))
        phase.finite.remember()
        with autocast(recipe, self.device):
            inputs = inputs.to(self.device, memory_format=self._layout)
            losses = self.pipe.step(inputs, target=target.to(self.device))
        lr = phase.rate.value
        left_out = self._update()
        phase.rate.step()
        if (step + 1) % recipe.log_every == 0 or step + 1 == self.num_steps:
            self._log.put(step + 1, losses, lr, self._seconds)
        if left_out:
            self._record("skipped", step + 1, stages=left_out)
        self._write_log()
        self._tell("stepped", step + 1, losses if self.pipe.team is None else self._losses)

    def _update(self) -> list[int]:
        """With the gradients that are there; the stages of this process that are left out."""
        phase = self._phase
        left_out = phase.finite()
        if phase.clip is not None:
            phase.clip()
        phase.optimizer.step()
        phase.optimizer.zero_grad(set_to_none=True)
        return left_out

    def _indices(self, step: int) -> Tensor:
        return batch_indices(len(self.train_data), self.recipe.batch_size, self.recipe.seed, step)

    def _keep_appointments(self, step: int) -> None:
        """Before a step: what all processes do at once."""
        keeping = self._keeping
        seconds = 60 * keeping.checkpoint_minutes if keeping is not None and self.run is not None else 0
        if seconds and time.perf_counter() - self._saved > seconds:
            self._appointment.ask("save")
        while (what := self._appointment.due(step)) is not None:
            if self._checkpoints is not None:
                self._save()
            if what == "stop":
                if self._checkpoints is not None:
                    self._checkpoints.wait()
                raise StoppedError(f"Stopped at step {step}, as asked.")

    def _save_if_due(self, step: int, scores: Scores | None) -> None:
        keeping = self._keeping
        if self._checkpoints is None or keeping is None:
            return
        loss = None
        if scores is not None and self._is_due(step) and scores.heads[-1] is not None:
            loss = scores.heads[-1].loss
        better = keeping.keep_best and loss is not None and loss < self._best
        self._best = self._best if loss is None else min(self._best, loss)
        if better or step == self.num_steps or (keeping.checkpoint_every and step % keeping.checkpoint_every == 0):
            try:
                self._save(loss)
            except OSError as error:
                if step == self.num_steps:
                    raise
                if self.pipe.team is None or not self.pipe.team.world.rank:
                    warnings.warn(f"{error} Training goes on; the checkpoint before it stays.", stacklevel=2)

    def _save(self, loss: float | None = None) -> None:
        assert self._checkpoints is not None
        while self.pipe.drain():  # Hogwild's gradients under way have no place in a checkpoint
            self._update()
        self.pipe.forget_versions()
        self._write_log(wait=True)
        self._saved = time.perf_counter()
        self._checkpoints.save(
            loss=loss,
            best=self._best,
            seconds=self._seconds,
            samples=self.pipe.steps * self.recipe.batch_size,
            rate=self._phase.rate.state(),
            config=to_json(self.recipe),
            versions=versions(),
        )

    def _restore(self, found: Found, *, midway: bool) -> None:
        """Put the state back; the optimizer's only in the middle of a phase, which otherwise begins with a new one."""
        assert self._checkpoints is not None
        optimizer = self._checkpoints.optimizer
        self._checkpoints.optimizer = optimizer if midway else None
        said = self._checkpoints.restore(found)
        self._checkpoints.optimizer = optimizer
        if midway:
            self._phase.rate.restore(found.facts["rate"])
        self._ready(self.pipe.steps, said)
        self._tell("resumed", self.pipe.steps, said)

    def _ready(self, step: int, changes: str = "") -> None:
        """Of a run that is gone on from: records after its checkpoint go, and it is noted."""
        if self.run is not None and not self._is_ready:
            self.run.rewind(step)
            self.run.resumed(self.recipe, max(0, step), changes)
        self._is_ready = True

    def _post_mortem(self, facts: dict[str, Any]) -> None:
        if self._folder is not None:
            samples = self._indices(facts["step"]).tolist()
            write_post_mortem(Path(self._folder), {**facts, "lr": self._phase.rate.value, "samples": samples})

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
