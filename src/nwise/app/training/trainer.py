"""The training loop of a recipe, in one process or several."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwise.app.data import Images, Tokens, batch_indices, batches, steps_per_epoch
from nwise.app.recipes import Recipe, in_force, spans, to_json
from nwise.app.training.build import autocast, check_channels_last, compile_blocks, make_pipeline, pick_device
from nwise.app.training.callback import Callback
from nwise.app.training.evaluation import Scores, evaluate
from nwise.app.training.log import StepLog, TimelineRecorder, check_timeline
from nwise.app.training.optimizers import Phase, check_phases
from nwise.app.training.run import Run, versions
from nwise.app.training.saver import CheckpointPolicy, Requests, Saver
from nwise.checkpoint import CheckpointInfo, discard_unsaved_heads, gather_weights, read_tensors
from nwise.microbatch import check_parts
from nwise.randomness import generator
from nwise.strategies import Strategy
from nwise.training import actual_weights


class StoppedError(Exception):
    """Training was stopped from outside, between two steps."""


class Trainer:
    """Trains a recipe: its data, pipeline and optimizer, and the folder that it records into.

    Args:
        recipe: the configuration.
        data: training and test data; default: the recipe loads them.

    Raises:
        ValueError: configuration, data and network do not fit together.
    """

    def __init__(self, recipe: Recipe, data: tuple[Images, Images] | tuple[Tokens, Tokens] | None = None) -> None:
        self.recipe = recipe
        self.run: Run | None = None
        self.callbacks: tuple[Callback, ...] = ()
        self.device = pick_device(recipe)
        if self.device.type == "cuda":
            # Its fastest gradients of weights are sums of atomic additions, in no fixed order.
            torch.backends.cudnn.deterministic = True
        self.train_data, self.test_data = (part.to(self.device) for part in data or recipe.load())
        self.steps_per_epoch = steps_per_epoch(len(self.train_data), recipe.batch_size)
        self.num_steps = max(1, round(recipe.epochs * self.steps_per_epoch))
        if recipe.max_steps is not None:
            self.num_steps = min(self.num_steps, recipe.max_steps)
        self.steps_per_test = max(1, round(recipe.eval_every * self.steps_per_epoch))
        self._phases = recipe.phases(self.steps_per_epoch)
        self.pipe = make_pipeline(recipe, self.train_data, self._phases[0][1]).to(self.device)
        check_parts(recipe.batch_size, recipe.microbatches, self.pipe.processes.num_replicas)
        self._layout = torch.channels_last if recipe.channels_last else torch.preserve_format
        if recipe.channels_last:
            check_channels_last(self.pipe, self.device)
            self.pipe.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs lack it
        if recipe.compile:
            compile_blocks(self.pipe)
        rules = [rule for _, rule in spans(self._phases, self.num_steps)]
        self._needed_heads = check_phases(recipe, self.pipe, rules)
        here = [sum(p.numel() for p in part) for part in (self.pipe.main_parameters(), self.pipe.head_parameters())]
        counts = self.pipe.processes.by_place("parameters", here)
        self.num_parameters = tuple(map(sum, zip(*counts, strict=True)))  # main network, heads
        self._log = StepLog(self.pipe)
        self._timeline: TimelineRecorder | None = None
        self._requests = Requests(self.pipe.processes)
        self._saver: Saver | None = None
        self._actual: Callable[[], AbstractContextManager[None]] = nullcontext  # around what looks at the weights
        self._losses = torch.full((self.pipe.num_stages,), torch.nan)  # the latest, for display
        self._resumed_at = 0, 0  # step and samples
        self._is_untested = False  # whether a test of the present state was broken off
        self._save_is_due = False  # whether a checkpoint was asked for during an evaluation

    def train(
        self,
        run: Run | None = None,
        callbacks: tuple[Callback, ...] = (),
        policy: CheckpointPolicy | None = None,
        *,
        resume: bool = False,
        allow_restart: bool = False,
    ) -> Scores:
        """Run all steps of the recipe, with its records and checkpoints; return the scores after the last step.

        An interruption (Ctrl-C) saves the weights before it is raised. A file that cannot be written does not end training;
        see `unwritten`.

        Args:
            run: the folder to write to; None to write nothing. With several processes only rank 0 has one.
            callbacks: called as training proceeds.
            policy: when to write checkpoints into the run's folder; None for never.
            resume: resume from the newest checkpoint of the run.
            allow_restart: start over if there is no checkpoint, e.g. when the run crashed before its first one.

        Raises:
            ValueError: another process writes to the run's folder, or there is no checkpoint to resume from.
            StoppedError: `stop` was called; a checkpoint has been written.
            nwise.training.NotFiniteError: a loss or gradient is not finite, and the recipe says to stop.
        """
        with nullcontext() if run is None else run.locked():
            self.run = run
            self.callbacks = callbacks
            checkpoint = self._open(policy, resume, allow_restart)
            status = "failed"
            begun = False
            try:
                self._notify("started", self)
                begun = True
                if run is not None and isinstance(self.train_data, Tokens):
                    run.save_tokenizer(self.train_data.tokenizer)
                scores = self._all_phases(checkpoint)
                if self._timeline is not None:
                    self._timeline.save(run)
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
                    # With several processes the last evaluation has saved the weights. They are also kept if training
                    # has failed after it.
                    if status in ("stopped", "interrupted") and self.pipe.processes.size == 1:
                        with self._actual():
                            run.save_weights(gather_weights(self.pipe), self.pipe.steps)
                    run.finish(status)
                if begun:
                    self._notify("finished", status)
        return scores

    def stop(self) -> None:
        """Make all processes finish a step, write a checkpoint and raise `StoppedError`; safe in a signal handler."""
        self._requests.ask("stop")

    def record_timeline(self, steps: int) -> None:
        """Record some steps of every process once the pipeline is full; ValueError in one process, or if there are too few."""
        first = self.pipe.num_stages
        check_timeline(self.pipe.processes, steps)
        if steps and not 2 <= steps <= self.num_steps - first:
            raise ValueError(
                f"`timeline` should be from 2 to {self.num_steps - first} steps, since the first {first} fill the pipeline. "
                f"Found {steps}."
            )
        if steps:
            self._timeline = TimelineRecorder(self.pipe, in_force(self._phases, first).name, first, first + steps)

    @property
    def unwritten(self) -> dict[str, str]:
        """The files that could not be written, e.g. on a full disk, with the reasons; by path."""
        files = {} if self.run is None else {str(path): why for path, why in self.run.unwritten.items()}
        why = "" if self._saver is None else self._saver.unwritten
        return files | ({f"{self._folder}/checkpoints": why} if why else {})

    def _open(self, policy: CheckpointPolicy | None, resume: bool, allow_restart: bool) -> CheckpointInfo | None:
        """Agree on the folder with all processes; return the checkpoint to resume from."""
        shared: list[Any] = [None if self.run is None else str(self.run.folder.resolve()), resume, allow_restart]
        self._folder, resume, allow_restart = self.pipe.processes.gather("run", shared)[0]  # rank 0 decides
        self._is_ready = not resume  # until then the run's folder must not change
        if self._folder is not None and (policy is not None or resume):
            policy = policy or CheckpointPolicy(checkpoint_minutes=0)
            self._saver = Saver(Path(self._folder) / "checkpoints", self.pipe, policy, self._facts)
        self._began = time.perf_counter()
        if not resume:
            return None
        assert self._saver is not None
        checkpoint = self._saver.newest()
        if checkpoint is None:
            if not allow_restart:
                raise ValueError(f"{self._folder} should hold a checkpoint to resume from. Found none; train again.")
            return None
        if self.pipe.steps > self.num_steps:
            raise ValueError(
                f"`epochs` and `max_steps` should give more than the {self.pipe.steps} steps that were done. Found "
                f"{self.num_steps}."
            )
        self._began -= checkpoint.facts["seconds"]
        self._resumed_at = self.pipe.steps, checkpoint.facts.get("samples", self._samples(self.pipe.steps))
        return checkpoint

    def _all_phases(self, checkpoint: CheckpointInfo | None) -> Scores:
        if checkpoint is None:
            self._ready(-1)
        scores = None
        for number, (steps, rule) in enumerate(spans(self._phases, self.num_steps)):
            first = steps.start
            last = steps.stop
            begin = max(steps.start, self.pipe.steps)
            self._follow(number, rule, checkpoint)
            if begin >= last:
                continue
            self._phase = Phase(self.recipe, self.pipe, number, steps, self._post_mortem)
            self._actual = partial(actual_weights, self._phase.optimizer)
            if self._saver is not None:
                self._saver.phase = self._phase
            is_untested = checkpoint is None and begin == 0
            if checkpoint is not None:
                is_untested = self._restore(checkpoint, done=begin - first)
                checkpoint = None
            if is_untested:
                scores = self._test(begin, first, last)
            wanted = ((self._indices(s), generator(self.recipe.seed, "augmentation", s)) for s in range(begin, last))
            mini_batches = batches(self.train_data, wanted)
            for step in range(begin, last):
                self._do_requests(step)
                self._step(step, *next(mini_batches))
                if step + 1 == last:
                    self._phase.drain()
                if self._is_due(step + 1):
                    scores = self._test(step + 1, first, last)
                elif self._saver is not None:
                    self._saver.stepped(is_last=False)
        if checkpoint is not None:
            self._restore(checkpoint, done=0)
        return self._evaluate(self.num_steps) if scores is None else scores

    def _follow(self, number: int, rule: Strategy, checkpoint: CheckpointInfo | None) -> None:
        """Begin a phase: set its strategy, and discard the heads if neither it nor a later one needs any."""
        if number:
            self.pipe.strategy = rule
        if any(self._needed_heads[number:]):
            return
        if number:
            self.pipe.discard_heads()
        elif checkpoint is not None:
            discard_unsaved_heads(self.pipe, read_tensors(checkpoint.folder))

    def _test(self, step: int, first: int, last: int) -> Scores:
        """Evaluate after a step of a phase (the steps from `first` to `last`), and tell its learning rate and the saver."""
        # At a switch of strategies the next phase would resume without this one's heads.
        try:
            with self._actual():
                scores = self._evaluate(step, can_stop=step < last or last == self.num_steps)
        except StoppedError:
            self._is_untested = True  # so a resumed run tests first
            if self._saver is not None:
                self._saver.save(wait=True)
            raise
        assert scores.heads[-1] is not None
        loss = scores.heads[-1].loss
        if step > first:
            self._phase.rate.evaluated(loss)
        if self._saver is not None and step:
            self._saver.stepped(is_last=step == self.num_steps)
        return scores

    def _step(self, step: int, inputs: Tensor, target: Tensor) -> None:
        recipe = self.recipe
        phase = self._phase
        phase.guard.remember()
        with autocast(recipe, self.device):
            inputs = inputs.to(self.device, memory_format=self._layout)
            losses = self.pipe.step(inputs, target=target.to(self.device))
        lr = phase.rate.value
        skipped = phase.update()
        phase.rate.step()
        if self._is_logged(step + 1) or self._is_due(step + 1):  # a test shows the losses of its own step
            self._log.put(step + 1, losses, lr, self._seconds)
        if skipped:
            self._record("skipped", step + 1, stages=skipped)
        self._write_log()
        self._notify("stepped", step + 1, losses if self.pipe.processes.size == 1 else self._losses)

    def _indices(self, step: int) -> Tensor:
        return batch_indices(len(self.train_data), self.recipe.batch_size, self.recipe.seed, step)

    def _do_requests(self, step: int) -> None:
        """Save or stop before a step, if a process asks for it."""
        if self._saver is not None and self.run is not None and self._saver.is_late:
            self._requests.ask("save")
        asked = self._requests.due()
        if self._saver is not None and (asked or self._save_is_due):
            self._saver.save(wait="stop" in asked)
        self._save_is_due = False
        if "stop" in asked:
            raise StoppedError(f"Stopped at step {step}, as requested.")

    def _tested_batch(self, done: int, total: int) -> None:
        """Break off an evaluation after a batch, if a process asks for it."""
        self._notify("evaluating", done, total)
        asked = self._requests.due()
        if "stop" in asked:
            raise StoppedError(f"Stopped at step {self.pipe.steps}, before its test was done, as requested.")
        self._save_is_due |= bool(asked)  # before the next step

    def _facts(self) -> dict[str, Any]:
        """Return the facts of the run for a checkpoint, after writing the records up to it."""
        self._write_log(wait=True)
        states = {type(c).__name__: state for c in self.callbacks if (state := c.state()) is not None}
        facts = {"seconds": self._seconds, "samples": self._samples(self.pipe.steps), "config": to_json(self.recipe)}
        return {**facts, "versions": versions(), "untested": self._is_untested, "callbacks": states}

    def _restore(self, checkpoint: CheckpointInfo, done: int) -> bool:
        """Load a checkpoint; return whether its state has to be tested, because a stop broke off the test."""
        assert self._saver is not None
        facts = checkpoint.facts
        changes = self._saver.restore(checkpoint, done, facts["config"].get("strategy"), self.recipe.strategy)
        is_untested = bool(facts.get("untested"))
        self._ready(self.pipe.steps, changes, is_untested=is_untested)
        for callback in self.callbacks:
            if (state := facts.get("callbacks", {}).get(type(callback).__name__)) is not None:
                callback.restore(state)
        self._notify("resumed", self.pipe.steps, changes)
        return is_untested

    def _ready(self, step: int, changes: str = "", *, is_untested: bool = False) -> None:
        """Drop the records written after the checkpoint and log the resumption, if the run resumes."""
        if self.run is not None and not self._is_ready:
            self.run.rewind(step, is_untested=is_untested)
            self.run.resumed(self.recipe, max(0, step), changes)
        self._is_ready = True

    def _post_mortem(self, facts: dict[str, Any]) -> None:
        """Write the facts to ``post-mortem.json``, unless another process was first or the disk is full."""
        if self._folder is not None:
            facts = {**facts, "lr": self._phase.rate.value, "samples": self._indices(facts["step"]).tolist()}
            with suppress(OSError), (Path(self._folder) / "post-mortem.json").open("x") as file:
                file.write(json.dumps(facts, indent=2) + "\n")

    def _write_log(self, *, wait: bool = False) -> None:
        for step, values in self._log.take(wait=wait):
            if self._is_logged(step):
                self._record("train", step, **values)
            self._losses = torch.tensor(values["loss"])
            self._notify("logged", step, self._losses)

    def _is_logged(self, step: int) -> bool:
        return step % self.recipe.log_every == 0 or step == self.num_steps

    def _is_due(self, step: int) -> bool:
        return step % self.steps_per_test == 0 or step == self.num_steps

    def _evaluate(self, step: int, *, can_stop: bool = True) -> Scores:
        self._write_log(wait=True)
        on_batch = self._tested_batch if can_stop else partial(self._notify, "evaluating")
        with autocast(self.recipe, self.device):
            scores = evaluate(self.pipe, self.test_data, 2 * self.recipe.batch_size, on_batch=on_batch)
        loss, accuracy = ([score and getattr(score, n) for score in scores.heads] for n in ("loss", "accuracy"))
        self._record("test", step, loss=loss, accuracy=accuracy)
        if self.run is not None or self.pipe.processes.size > 1:
            weights = gather_weights(self.pipe)
            if self.run is not None:
                self.run.save_weights(weights, step)
        self._notify("evaluated", step, scores)
        return scores

    def _samples(self, step: int) -> int:
        """Return the number of samples trained on up to a step; the batches before a resume may have had another size."""
        first, samples = self._resumed_at
        return samples + (step - first) * self.recipe.batch_size

    @property
    def _seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    def _record(self, kind: str, step: int, **values: Any) -> None:
        if self.run is not None:
            samples = self._samples(step)
            epoch = round(samples / self.recipe.batch_size / self.steps_per_epoch, 4)
            values = {"seconds": self._seconds, **values}  # a record that comes later than its step has its own time
            self.run.record(kind=kind, step=step, epoch=epoch, samples=samples, **values)

    def _notify(self, event: str, *values: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(*values)
