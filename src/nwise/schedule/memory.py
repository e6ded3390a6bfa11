"""The memory of every rank: parameters with their old versions, micro-batches in flight, and kept cotangents."""

from __future__ import annotations

from nwise.schedule.actions import Kind
from nwise.schedule.costs import Costs
from nwise.schedule.schedule import Schedule, Word


def peak_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return every rank's largest sum of fixed memory, activations in flight, and cotangents between an I and its W."""
    size = schedule.num_stages
    activations, cotangents = (costs.per_stage(f"{name}_bytes", size) for name in ("activation", "cotangent"))
    peaks = []
    for word, now in zip(schedule.words, fixed_bytes(schedule, costs), strict=True):
        changes = [(place, activations[k] * change) for place, k, change in schedule.lives(word)]
        if any(cotangents):
            changes = sorted([*changes, *((i, cotangents[k] * change) for i, k, change in _kept(schedule, word))])
        most = now
        for _, change in changes:
            now += change
            most = max(most, now)
        peaks.append(most)
    return tuple(peaks)


def fixed_bytes(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return every rank's memory that is always in use: parameters, gradients, optimizer state and older versions."""
    size = schedule.num_stages
    fixed, weights = (costs.per_stage(f"{name}_bytes", size) for name in ("fixed", "weight"))
    sums = [0.0] * schedule.num_ranks
    for k, rank in enumerate(schedule.placement):
        sums[rank] += fixed[k] + weights[k] * (schedule.ages[k] and schedule.ages[k] + 1)
    return tuple(sums)


def _kept(schedule: Schedule, word: Word) -> list[tuple[int, int, int]]:
    """List (place, stage, +1 or -1) for cotangents that an I keeps until its W; those of earlier cycles at place -1."""
    begun = {}
    changes = []
    for i, action in enumerate(word):
        if action.kind not in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
            continue
        flow = schedule.flows[action.turn][action.microbatch].stages[action.stage]
        key = (action.stage, action.microbatch, action.turn)
        if action.kind is Kind.INPUT_GRAD and flow.fused == action.message:
            begun[key] = schedule.cycles_late(action)
            changes.append((i, action.stage, 1))
        elif action.kind is Kind.WEIGHT_GRAD and flow.fused is not None:
            changes.append((i, action.stage, -1))
    for word_action in word:
        key = (word_action.stage, word_action.microbatch, word_action.turn)
        if word_action.kind is Kind.WEIGHT_GRAD and key in begun:
            changes += [(-1, word_action.stage, 1)] * (schedule.cycles_late(word_action) - begun[key])
    return changes
