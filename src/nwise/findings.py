"""What a check finds: the kinds of differences from plain autograd, each with a sentence of the contract and a way out."""

from __future__ import annotations

from dataclasses import dataclass, field

from nwise.stage.weights import NO_HOOKS

__all__ = ["ContractError", "Finding", "Report"]

_CHANGES = (
    "2: A forward depends on something that changes, such as a counter or a generator of its own, so nothing else was compared; "
    "keep states in buffers, and draw from the global generators."
)
# What is found, by kind: the number of the contract's sentence, and what to do. With the first ones training is wrong.
ERRORS = {
    "plain autograd != itself, and `recompute` runs it again": _CHANGES,
    "an output that requires no gradient, of a stage to train": "1: The reentrant `torch.utils.checkpoint` may be the cause: "
    "give it `use_reentrant=False`, or replace it by `Pipeline(..., recompute=True)`; or freeze the stage.",
    "a tensor from outside that requires a gradient": "1: Register it in the module that uses it, or detach it.",
    "parameters that a forward changes": "3: Leave updates to the time after `step`; under a delay a forward has copies.",
    "buffers != those after one forward": "6: They depend on how often a forward runs (a block under `torch.utils.checkpoint` "
    "runs again), on whether it makes a graph, or on a backward; change them in every forward alike.",
    "a block that runs again": f"6: A stage {NO_HOOKS}",
    "step != plain autograd": "7, 8: A backward does more than return its gradient. It may add one, also to a `.grad`: give the "
    "loss behind it to `nwise.inject`. Or it writes over what it saved, keeps a state, or is not linear.",
}
WARNINGS = {
    "plain autograd != itself": _CHANGES,
    "2 micro-batches != both at once, samples": "4, 8: Samples are not computed alone, a backward adds a gradient (use "
    "`nwise.inject`), or a hook is not linear. Accept it, set `num_microbatches=1`, or pass those that belong together by "
    "`step(microbatches=...)`.",
    "2 micro-batches != both at once, the loss": "5: Outputs agree, so the loss is no mean over samples. Return a mean, such as "
    "`.mean()`; give a mean over other terms a method `count(target)`; or set `num_microbatches=1`.",
    "replicas with other values": "9: Load the same weights everywhere; for batch norms call `nwise.defer_batchnorm`, and "
    "register buffers that may differ with `persistent=False`.",
    "not trained": "10: Give the optimizer `pipe.parameters()`, heads included, or freeze what should stay.",
}
KINDS = ERRORS | WARNINGS
RERUN, NOTHING, OUTSIDE, WRITTEN, BUFFERS, AGAIN, STEP, PLAIN, SAMPLES, LOSS, REPLICAS, IDLE = KINDS
NOTE = "not compared"


class ContractError(ValueError):
    """A step differs from plain autograd, because code of a stage, head or loss breaks the contract (docs/contract.md)."""


@dataclass
class Finding:
    """What differs: its kind, and the names of parameters, stages or losses with what was found there."""

    kind: str
    where: list[str]

    @property
    def is_error(self) -> bool:
        """Whether training would be wrong; otherwise the cut changes it, or plain autograd does not repeat itself."""
        return self.kind in ERRORS

    def __str__(self) -> str:
        number, _, remedy = KINDS[self.kind].partition(": ")
        more = f", and {len(self.where) - 3} more" if len(self.where) > 3 else ""
        return f"{self.kind}: {', '.join(self.where[:3])}{more}. {remedy} (docs/contract.md, {number})"


@dataclass
class Report:
    """What a check has found: strategy, M and time; the findings; and what was not compared, and why."""

    title: str = ""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [f"nwise.check: {count or 'no'} difference{'s' * (count != 1)} from plain autograd ({self.title})."]
        for number, one in enumerate(self.findings, 1):
            lines.append(f"  {number}. {'error' if one.is_error else 'warning'}: {one}")
        return "\n".join([*lines, *(f"  Not compared: {note}." for note in self.notes)])
