"""E2: residual networks in four stages (table 1); the runs of E3 and E5 too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.harness import markdown
from experiments.harness.cell import Cell
from experiments.harness.claims import Claim, differences, equal, exact, greater, no_greater
from experiments.harness.clock import describe_costs, network_costs, slots_text, step_time, work, work_table
from experiments.harness.experiment import Result, Size, Waiting
from experiments.harness.plots import accuracy_and_step_time
from experiments.harness.runs import Runs, accuracy
from experiments.harness.search import TRIAL_SEED, Search, with_rate
from experiments.harness.trained import Parts, Trained, on_a_gpu
from nwise.app.recipes import ImageSource, Recipe, ResNet, recipe
from nwise.schedule import Costs
from nwise.strategies import Credit, Heads, Strategy, strategy

PAPER = ("end-to-end", "1-wise", "2-wise", "3-wise")
BEYOND = ("2-wise-mean", "rotating-2", "geometric-0.5", "deep-supervision")
_SUMS_OF_1 = Credit([[1 / (4 - stage) if stage <= loss else 0.0 for stage in range(4)] for loss in range(4)])
# Checks of small size, with the strategy and the heads of each: does deep supervision owe its lead to larger gradients, and do
# rotating blocks need heads that learn at every step?
_CHECKS: dict[str, tuple[str, Heads]] = {
    "deep-supervision, sums of 1": (_SUMS_OF_1.name, "all"),
    "rotating-2, live heads": ("rotating-2", "live"),
}
# The paper's table, accuracy and one standard error over three seeds (ImageNet: one seed).
PRINTED = {
    "cifar10": ("CIFAR-10, ResNet-32", ("95.20 (0.11)", "94.20 (0.09)", "95.05 (0.09)", "95.42 (0.06)")),
    "cifar100": ("CIFAR-100, ResNet-32", ("76.71 (0.14)", "75.02 (0.09)", "78.09 (0.13)", "77.84 (0.04)")),
    "imagenet": ("ImageNet, ResNet-50", ("75.60", "72.05", "74.45", "76.27")),
}
_LEAN = 0.5  # mini-batches' activations of a stage, where memory is short


_SMALL = recipe("cifar10-resnet-small")
_IMAGES = ImageSource(source="cifar10", hub="uoft-cs/cifar10", augmentation="crop-flip", shrink=2)
_QUARTER = ResNet(variant="18", width_factor=1 / 4)
_MEDIUM = replace(
    _SMALL, name="cifar10-resnet-medium", data=_IMAGES, model=_QUARTER, epochs=20, eval_every=4, channels_last=True
)


def base(size: Size, source: str = "cifar10") -> Recipe:
    """Return the recipe of a size but for strategy and seed, in medium size but for the rate."""
    return {"small": _SMALL, "medium": _MEDIUM}.get(size) or on_a_gpu(recipe(f"{source}-resnet"))


def _trial(method: str, rate: float) -> Recipe:
    """Return the run of two epochs that tries a rate."""
    data = replace(_IMAGES, withheld=0.1)
    settings = replace(_MEDIUM, data=data, strategy=method, seed=TRIAL_SEED, heads="all", epochs=2, eval_every=2)
    return with_rate(settings, rate)


SEARCH = Search(
    title="E2, SGD",
    grid=(0.025, 0.05, 0.1, 0.2, 0.4),
    trials={method: partial(_trial, method) for method in (*PAPER, *BEYOND)},
    prefix="E2 ",
)


def costs(runs: Runs) -> Costs:
    """Return honest costs of the network."""
    model = base(runs.size, runs.source).model
    assert isinstance(model, ResNet)
    return network_costs(model)


def _methods(size: Size) -> tuple[str, ...]:
    """Return all methods of a size."""
    return (*PAPER, *BEYOND, *(_CHECKS if size == "small" else ()))


def cells(size: Size, seeds: int) -> list[Cell]:
    """Return the cells: methods by seeds; ImageNet has one seed, as in the paper.

    In medium size every method has its own rate, and one that has not been tried with all rates has no cells.
    """
    rates = SEARCH.rates() if size == "medium" else dict.fromkeys(_methods(size))

    def settings(source: str, rate: float | None) -> Recipe:
        return base(size, source) if rate is None else with_rate(base(size, source), rate)

    return [
        Cell(method=method, recipe=replace(settings(source, rate), strategy=strategy, seed=seed, heads=heads))
        for source in (PRINTED if size == "full" else ["cifar10"])
        for seed in range(1 if source == "imagenet" else seeds)
        for method, rate in rates.items()
        for strategy, heads in [_CHECKS.get(method, (method, "all"))]
    ]


def claims(runs: Runs) -> list[Claim]:
    """Test the claims of table 1 and those about more strategies; "read": what the table shows and the text does not say."""

    def scores(method: str) -> dict[int, float]:
        return runs.scores(accuracy, method)

    claims = [
        greater("end-to-end above 1-wise", "table 1", scores("end-to-end"), scores("1-wise")),
        greater("2-wise above 1-wise", "table 1", scores("2-wise"), scores("1-wise")),
        greater("3-wise above 1-wise", "table 1", scores("3-wise"), scores("1-wise")),
    ]
    # The text has 3-wise above end-to-end on CIFAR-10, 2-wise too on CIFAR-100, and neither on ImageNet.
    above = "table 1, read" if runs.source == "imagenet" else "table 1"
    claims.append(greater("3-wise above end-to-end", above, scores("3-wise"), scores("end-to-end")))
    if runs.source == "cifar100":
        claims.append(greater("2-wise above end-to-end", "table 1", scores("2-wise"), scores("end-to-end")))
    if runs.source == "cifar10":
        claims.append(equal("2-wise equals end-to-end", "table 1", scores("2-wise"), scores("end-to-end"), within=1))
        # Section 5 says so, table 1 does not; written down after the runs of small and medium size.
        claims.append(greater("2-wise above end-to-end", "section 5", scores("2-wise"), scores("end-to-end")))
    if runs.source != "imagenet":  # there the table has 3-wise 1.82 points above, so the text says "consistently"
        text = "3-wise is not above 2-wise by half a point, four stages"
        claims.append(no_greater(text, "table 1", scores("3-wise"), scores("2-wise"), by=0.5))
    claims += [greater(f"{method} above 2-wise", "ours", scores(method), scores("2-wise")) for method in BEYOND]
    for method in ("2-wise", "3-wise"):
        more = 100 * (work(method, 4, costs(runs)) / work("end-to-end", 4, costs(runs)) - 1)
        text = f"{method} computes more in total than end-to-end, four stages, by what is multiplied"
        claims.append(exact(text, "section 3", more, holds=more > 0, wanted="> 0", unit="%"))
    return claims


_CHECKED = (
    "No claims: both outcomes were known before from runs whose records were not kept. Each stage's weights sum to 1, so deep "
    "supervision has no larger gradients than 2-wise."
)


def _priced(method: str) -> str | Strategy:
    """Return what has the price of a method's runs.

    All heads run. A head that trains no stage is a probe without a price, except with rotating blocks, where it learns for the
    turn in which it trains one. Weights have no price.
    """
    if method == "rotating-2":
        return strategy(method, heads="all")
    return method.partition(", ")[0]


def tables(runs: Runs) -> str:
    """Return our accuracies beside the paper's, and the slots of a step, also with little memory."""
    name, printed = PRINTED[runs.source]
    rows = [[f"**ours**: {runs.source}", *(runs.shown(accuracy, m) for m in PAPER)], [f"paper: {name}", *printed]]
    headings = ("", "accuracy at equal steps, %", "slots a step (M)", f"slots a step with memory {_LEAN:g} (M)")
    honest = costs(runs)
    beyond = [
        [m, runs.shown(accuracy, m), slots_text(_priced(m), 4, honest), slots_text(_priced(m), 4, honest, _LEAN)]
        for m in _methods(runs.size)
    ]
    note = (
        f"Slots are forwards of a mini-batch through a stage. {describe_costs(honest)} Accuracy at equal time is E4's: rates "
        "drop at shares of a run, so that a curve cut off is not what a shorter run reaches."
    )
    parts = [
        markdown.table(["test accuracy, %", *PAPER], rows),
        "## Beyond the paper",
        markdown.table(headings, beyond),
        note,
    ]
    parts += ["## Work", work_table(PAPER, 4, honest)]
    if runs.size == "small":
        sums, live = (runs.scores(accuracy, method) for method in _CHECKS)
        pairs = [
            ("deep supervision with weights that sum to 1, above 2-wise", [(sums, runs.scores(accuracy, "2-wise"))]),
            ("rotating-2: all heads above live heads", [(runs.scores(accuracy, "rotating-2"), live)]),
        ]
        parts += ["## Checks", differences(("", "points (95 % interval)"), pairs, digits=2), _CHECKED]
    return "\n\n".join(parts)


def draw(runs: Runs, path: Path) -> None:
    """Draw accuracy against steps, and at the end against the time of a step."""
    slots = {m: step_time(_priced(m), 4, costs(runs)).slots for m in (*PAPER, *BEYOND)}
    accuracy_and_step_time(runs, slots, 4, path.with_suffix(".png"))


EXPERIMENT = Trained(
    "e2",
    "E2, residual networks in four stages",
    Parts(
        cells=cells,
        claims=claims,
        tables=tables,
        draw=draw,
        seeds={"small": 2, "medium": 3, "full": 3},
        ours=(*BEYOND, *_CHECKS),
    ),
    [
        Result("table 1", "residual networks (E2)", "table 1"),
        Result("", "text: work in total, residual networks", "section 3"),
        Result("", "text: 2-wise above end-to-end on CIFAR-10 (E2)", "section 5"),
        Result("", "ours: other strategies for residual networks", "ours"),
    ],
    waiting=[
        Waiting("table 1", "residual networks on CIFAR-100 and ImageNet", ("cifar100", "imagenet")),
        Waiting("figure 6, table 3", "every head, and ensembles, on ImageNet", ("imagenet",)),
    ],
)
