"""Bugs that were found, each with its story."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

import nwise
from nwise.app.data.images import _decode
from nwise.app.data.text import load_text
from nwise.app.recipes import Adam, Recipe, Sgd
from nwise.app.training import make_optimizer
from nwise.app.training.calibrate import Seen, Work, calibrate
from nwise.checkpoint import save_tensors
from nwise.flow import find_flow, flows_for
from nwise.microbatch import Batch
from nwise.schedule import Costs, Kind, baseline, best, simulate, validate
from nwise.schedule.named import named_schedule
from nwise.schedule.placement import make_placement
from nwise.training.clip import Clip, squared_norm

X, Y = torch.linspace(-1, 1, 48).view(6, 8), torch.tensor([0, 1, 2, 0, 1, 2])


def three(strategy: str | nwise.Strategy, heads: bool = True, **options: Any) -> nwise.Pipeline:
    sides = [nn.Linear(8, 3), nn.Linear(8, 3)] if heads else None
    return nwise.Pipeline([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)], sides, strategy=strategy, **options)


def train(pipe: nwise.Pipeline, steps: int) -> list[list[int]]:
    """Ages of the parameters in every step."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    ages = []
    for _ in range(steps):
        pipe.step(X, target=Y)
        ages.append(pipe.staleness.flatten().tolist())
        optimizer.step()
        optimizer.zero_grad()
    return ages


def test_missing_head_raises() -> None:
    """Regression: heads of a later phase were discarded; its losses then used the stage's own output."""
    pipe = three("end-to-end@2,local")
    with pytest.raises(ValueError, match=r"needs the heads of stages \[0, 1\] from step 0 on"):
        pipe.discard_heads()
    bare = three("end-to-end", heads=False)
    bare.strategy = "local"
    assert bare.strategy == nwise.Local()
    with pytest.raises(ValueError, match="a head for stage 0, whose loss 'local' needs"):
        bare.step(X, target=Y)


def test_removed_head_raises_at_the_next_step() -> None:
    """The schedule of the step before fits, but the loss would get the stage's own output."""
    pipe = three("2-wise-mean")
    pipe.step(X, target=Y)
    del pipe.heads["0"]
    with pytest.raises(ValueError, match="head"):
        pipe.step(X, target=Y)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_deepcopy_of_compiled_pipeline_is_independent() -> None:
    """Regression: the compiled call of a copied `nn.Sequential` still used the original's parameters."""
    pipe = nwise.Pipeline([nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3)], None, strategy="end-to-end")
    for stage in pipe.stages:
        nwise.compile_module(stage, "aot_eager")
    pipe.step(X, target=Y)
    twin = copy.deepcopy(pipe)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(X).any()
    twin.zero_grad()
    twin.step(X, target=Y)
    assert all(p.grad is not None for p in twin.parameters())
    assert nwise.reference_grads(list(pipe.stages), None, nn.functional.cross_entropy, X, Y, pipe.credit)[
        "stages.0.0.weight"
    ].any()
    torch.compiler.reset()


def test_head_outputs_of_in_place_head_raise() -> None:
    """Regression: under end-to-end such a head never ran in a step, but it spoilt the scores of later stages."""
    heads = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3)) for _ in range(2)]
    pipe = nwise.Pipeline([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)], heads, strategy="end-to-end")
    with torch.no_grad(), pytest.raises(ValueError, match="The head of stage 0 should not change its input in place"):
        pipe.head_outputs(X)


@pytest.mark.filterwarnings("ignore:With 3 micro-batches")
def test_defer_batchnorm_keeps_shared_norm_shared() -> None:
    norm = nn.BatchNorm1d(8)
    stage = nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh(), norm, nn.Sequential(nn.Linear(8, 8), norm))
    pipe = nwise.Pipeline([stage, nn.Linear(8, 3)], None, strategy="end-to-end", num_microbatches=3)
    nwise.defer_batchnorm(pipe)
    assert stage[1] is stage[3] is stage[4][1]  # type: ignore[index]
    pipe.step(X, target=Y)
    assert int(stage[1].num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
def test_deferred_batchnorm_sums_are_float64_and_reset() -> None:
    """Regression: in bf16 the difference of two large sums gave a variance of 0.9 instead of 1.1."""
    norm = nn.BatchNorm1d(8)
    pipe = nwise.Pipeline([nn.Sequential(norm), nn.Linear(8, 3)], None, strategy="end-to-end", num_microbatches=2)
    nwise.defer_batchnorm(pipe)
    deferred = pipe.stages[0][0]  # type: ignore[index]
    pipe.bfloat16()
    assert deferred._sums.dtype == torch.float64
    pipe.float()
    with pytest.raises(IndexError):
        pipe.step(X, target=torch.tensor([0, 1, 2, 0, 1, 99]))
    pipe(100 * X)  # inference in training mode
    before = deferred.running_mean.clone()
    pipe.step(X, target=Y)
    torch.testing.assert_close(deferred.running_mean, before.lerp(X.mean(0), 0.1))


@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_hogwild_thawed_stage_becomes_stale() -> None:
    pipe = three("hogwild", heads=False)
    pipe.stages[0].requires_grad_(False)
    assert train(pipe, 4)[-1] == [0, 1, 0]
    pipe.stages[0].requires_grad_(True)
    assert train(pipe, 5)[-1] == [2, 1, 0]
    pipe.stages[0].requires_grad_(False)
    pipe.step(X, target=Y)
    assert all(p.grad is None for p in pipe.stages[0].parameters())


def test_hogwild_frozen_parameter_gets_no_late_gradient() -> None:
    """Its forward came before it was frozen, so the version of that forward still has a gradient."""
    pipe = three("hogwild", heads=False)
    train(pipe, 4)
    weight, bias = pipe.stages[0].parameters()
    weight.requires_grad_(False)
    pipe.step(X, target=Y)
    assert weight.grad is None
    assert bias.grad is not None


@pytest.mark.filterwarnings("ignore:All gradients should be applied")
def test_hogwild_replaced_stage_has_no_history() -> None:
    """Regression: the new module always ran with the old one's parameters."""
    pipe = three("hogwild", heads=False)
    train(pipe, 5)
    pipe.stages[0] = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in pipe.stages[0].parameters():
            parameter.zero_()
    seen: list[Tensor] = []
    pipe.stages[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    pipe.step(X, target=Y)
    assert not seen[0].any()


COPIES: dict[str, Callable[[nwise.Pipeline], nwise.Pipeline]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pipe: pickle.loads(pickle.dumps(pipe)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copied_pipeline_runs_its_own_strategy(duplicate: Callable[[nwise.Pipeline], nwise.Pipeline]) -> None:
    """Orders went by the identity of their schedule and were copied along: in 900 steps of copies, deepcopy raised three
    times and pickle twice, and once a pickled pipeline ran the order of another strategy without a word.

    `test_nothing_is_keyed_by_id` forbids the cause; here are the copies.
    """
    pipe = three("local")
    train(pipe, 1)
    for i in range(24):
        other = duplicate(pipe)
        other.strategy = ("2-wise", "end-to-end", "rotating-2-microbatch", "hogwild")[i % 4]
        other.num_microbatches = 1 + i % 3
        fresh = three(other.strategy, num_microbatches=other.num_microbatches, seed=pipe.seed)
        fresh.load_state_dict(other.state_dict())
        fresh.steps = other.steps
        other.zero_grad()
        assert torch.equal(other.step(X, target=Y).nan_to_num(), fresh.step(X, target=Y).nan_to_num())
        for p, q in zip(other.parameters(), fresh.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or q.grad is None or torch.equal(p.grad, q.grad)
        pipe = other


def test_copied_pipeline_starts_without_late_gradients() -> None:
    pipe = three("hogwild", heads=False)
    train(pipe, 4)
    twin = copy.deepcopy(pipe)
    assert not twin.drain()
    assert train(twin, 1) == train(pipe, 1) == [[2, 1, 0]]
    assert [pipe.drain() for _ in range(3)] == [True, True, False]


def test_pipeline_changes_between_steps_take_effect() -> None:
    """Regression: a new order was ignored, and so was a head added under `heads="all"` after the first step."""
    pipe = three(nwise.EndToEnd(heads="all"), heads=False, num_microbatches=2)
    ran: list[str] = []
    pipe.on_action = lambda action: ran.append(str(action))
    pipe.step(X, target=Y)
    depth_first, ran[:] = list(ran), []
    pipe.schedule = "phase"
    pipe.step(X, target=Y)
    assert sorted(ran) == sorted(depth_first) != ran != depth_first
    pipe.heads[1] = nn.Linear(8, 3)
    assert pipe.step(X, target=Y).ran == (False, True, True)
    del pipe.heads["1"]
    assert pipe.step(X, target=Y).ran == (False, False, True)
    pipe.num_microbatches = 3
    assert pipe.step(X, target=Y).ran == (False, False, True)
    assert pipe.staleness.shape == (3, 3)
    with pytest.raises(ValueError, match="`schedule` should be one of best.*Found 'phases'. Did you mean 'phase'?"):
        pipe.schedule = "phases"
    with pytest.raises(ValueError, match="`num_microbatches` should be an integer of at least 1. Found 0"):
        pipe.num_microbatches = 0
    pipe.step(X, target=Y)


def test_changing_credit_every_step_leaks_no_memory() -> None:
    """Regression: every new matrix left a flow, a schedule and an order in memory."""
    pipe = three("local")
    sizes = []
    for i in range(300):
        pipe.strategy = nwise.Credit([[1, 0, 0], [0, 1, 0], [1 + i, 0, 1]])
        pipe.step(X, target=Y)
        pipe.zero_grad()
        if i in (270, 299):
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[1] - sizes[0] < 50


def test_late_gradients_survive_updates_through_data() -> None:
    """Regression: an optimizer that writes to `parameter.data` leaves torch's counters unchanged."""
    pipe, twin = three("hogwild", heads=False, seed=0), three("hogwild", heads=False, seed=0)
    twin.load_state_dict(pipe.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(5):
        assert torch.equal(pipe.step(X, target=Y).nan_to_num(), twin.step(X, target=Y).nan_to_num())
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("change", ["phase", "cast", "load", "stage", "micro-batches"])
def test_late_gradients_are_dropped_by_changes(change: str) -> None:
    """Gradients of another strategy, kind, or network are not due any more."""
    pipe = three("hogwild@4,end-to-end" if change == "phase" else "hogwild", heads=False)
    train(pipe, 4)

    def step() -> None:
        if change == "cast":
            pipe.double()
        elif change == "load":
            pipe.load_state_dict(pipe.state_dict())
        elif change == "stage":
            pipe.stages[0] = nn.Linear(8, 8)
        elif change == "micro-batches":
            pipe.num_microbatches = 2
        pipe.step(X.double() if change == "cast" else X, target=Y)

    with pytest.warns(UserWarning, match="with gradients still due, lost now"):
        step()
    late = [p.grad is None for p in pipe.stages[0].parameters()]
    assert late == [change != "phase"] * 2


def test_complex_activations_carry_gradients() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(self.linear(x))

    class Magnitude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.abs())

    first = Spectrum()
    stages = [first, Magnitude()]
    pipe = nwise.Pipeline(stages, None, strategy="end-to-end")
    expected = nwise.reference_grads(stages, None, nn.functional.cross_entropy, X, Y, pipe.credit)
    pipe.step(X, target=Y)
    assert first.linear.weight.grad is not None
    torch.testing.assert_close(first.linear.weight.grad, expected["stages.0.linear.weight"])


@pytest.mark.parametrize("num_stages", [3, 6, 8, 12, 16])
@pytest.mark.parametrize("kind", ["geometric", "power", "gaussian", "wild"])
def test_credit_of_extreme_magnitudes_stays_accurate(kind: str, num_stages: int) -> None:
    """Regression: fading credit failed an assertion, or lost digits by multiplying messages by 1e10."""
    distance = np.arange(num_stages)[:, None] - np.arange(num_stages)[None, :]
    random = np.random.default_rng(num_stages)
    matrix = np.tril(
        {
            "geometric": 1e-3 ** np.maximum(distance, 0.0),
            "power": 1.0 / (1.0 + np.maximum(distance, 0)) ** 6,
            "gaussian": np.exp(-2.0 * distance**2.0),
            "wild": 10.0 ** random.uniform(-10, 4, (num_stages, num_stages)),
        }[kind]
    )
    flow = find_flow(torch.from_numpy(matrix))
    above: list[np.ndarray[Any, Any]] = []
    for k in reversed(range(num_stages)):
        stage = flow.stages[k]
        contents = []
        for cotangent in (*stage.messages, *([stage.weights] if stage.weights else [])):
            vector = np.zeros(num_stages)
            vector[k] = cotangent.own
            for weight, message in zip(cotangent.received, above, strict=True):
                vector += weight * message
            contents.append(vector)
        np.testing.assert_allclose(contents[-1], matrix[:, k], rtol=1e-9, atol=1e-11 * matrix[:, k].max())
        above = contents[: len(stage.messages)]
    if kind == "geometric":
        assert set(flow.messages) == {1}


def test_pipeline_can_be_pickled() -> None:
    pipe = three("2-wise")
    twin = pickle.loads(pickle.dumps(pipe))
    assert torch.equal(twin.step(X, target=Y).nan_to_num(), pipe.step(X, target=Y).nan_to_num())


def test_shared_memory_can_be_saved(tmp_path: Path) -> None:
    weight = torch.ones(3)
    save_tensors({"a": weight, "b": weight}, tmp_path / "w.safetensors")


def test_test_folders_may_lack_a_class(tmp_path: Path) -> None:
    """Regression: labels were indices into each folder's own classes."""
    pytest.importorskip("datasets", reason="needs the extra 'data'")
    from PIL import Image

    from nwise.app.data import load_images

    for split, classes in (("train", ("bird", "cat", "dog")), ("test", ("cat", "dog"))):
        for name in classes:
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / split / name / "0.png")
    train_images, test_images = load_images(str(tmp_path))
    assert train_images.classes == ("bird", "cat", "dog")
    assert test_images.labels.tolist() == [1, 2]


def test_empty_mini_batch_raises() -> None:
    with pytest.raises(ValueError, match="The mini-batch should have at least one sample. Found none"):
        three("local").step(X[:0], target=Y[:0])


def test_heads_are_set_by_number() -> None:
    pipe = three("local")
    pipe.heads[0] = nn.Linear(8, 3)
    pipe.step(X, target=Y)
    assert pipe.heads[0].weight.grad is not None


def test_evaluate_skips_untrained_heads() -> None:
    """Regression: every head ran in an evaluation, and the outputs of untrained heads were thrown away."""
    from nwise.app.data import digits
    from nwise.app.training import evaluate

    model = nwise.app.models.convnet(4, in_channels=1, image_size=8)
    pipe = nwise.Pipeline(model.stages, model.heads, strategy="3-wise")
    ran: list[int] = []
    for k in range(3):
        pipe.heads[k].register_forward_hook(lambda module, args, output, k=k: ran.append(k))
    scores = evaluate(pipe, digits()[1], 360)
    assert [score is None for score in scores.heads] == [True, True, False, False]
    assert ran == [2]


def test_records_that_arrive_late_have_the_ages_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with several processes the last steps before a switch were logged with the next strategy's staleness."""
    from nwise.app.training import log

    class Slow:
        """Gathers from this process alone, and delivers at the end."""

        def __init__(self, processes: object) -> None:
            self.tables: list[tuple[int, Tensor]] = []

        def put(self, step: int, column: list[float]) -> None:
            self.tables.append((step, torch.tensor([column])))

        def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
            return self.tables if wait else []

    pipe = three("local@2,hogwild")
    monkeypatch.setattr(log, "AsyncGather", Slow)
    monkeypatch.setattr(type(pipe.processes), "size", 2)
    records = log.StepLog(pipe)
    for step in range(1, 5):
        records.put(step, pipe.step(X, target=Y), 0.1, 0.0)
    assert [record.get("staleness") for _, record in records.take(wait=True)] == [None, None, *[[[2], [1], [0]]] * 2]


def test_every_sample_leaves_at_the_end_even_with_a_confidence_of_nan() -> None:
    """Regression: nan is not at least 0, so the shares of the samples that leave did not add up to 1."""
    from nwise.app.training.calibrate import Seen, Work, outcome

    seen = Seen(
        (0, 1), torch.tensor([[0.9, 0.9], [torch.nan, torch.nan]]), torch.tensor([[True, True], [False, False]])
    )
    assert outcome(seen, Work([50, 50], {0: 10}), {0: 0.8}).leaving == (0.5, 0.5)


# Found by trying odd uses


class Given(nwise.Strategy):
    """A strategy that returns a given value as its credit."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        object.__setattr__(self, "value", value)

    def credit(self, num_stages: int, turn: int = 0) -> Any:
        return self.value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        (torch.ones(2, 2).triu(), r"zeros above the diagonal.*Found C.0, 1. = 1.0"),
        (torch.tensor([[1.0, 0.0], [float("nan"), 1.0]]), "should have finite numbers"),
        ([[1, 0], [0, 1]], "a tensor of shape .2, 2. with values. Found list"),
        (torch.eye(3), "Found shape .3, 3. on cpu"),
        (torch.eye(2, device="meta"), "Found shape .2, 2. on meta"),
        (torch.eye(2) * 1j, "should be real numbers in a tensor .* Found shape .2, 2. on cpu, torch.complex64"),
    ],
)
def test_credit_of_custom_strategies_is_checked(credit: Any, message: str) -> None:
    """A transposed matrix trained locally without a word; the others ended deep inside."""
    with pytest.raises(ValueError, match=message):
        nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], strategy=Given(credit))


def test_head_set_to_none_is_missing() -> None:
    """The stage learned from its raw output."""
    pipe = nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], strategy="local")
    pipe.heads[0] = None
    with pytest.raises(ValueError, match="should have a head for stage 0"):
        pipe.step(torch.ones(2, 2), target=torch.tensor([0, 1]))
    assert (len(pipe.heads), 0 in pipe.heads) == (0, False)
    pipe.heads[0] = nn.Linear(2, 2)
    del pipe.heads[0]
    assert 0 not in pipe.heads


def test_steps_from_a_file_may_be_a_tensor() -> None:
    """No stage was trained from then on."""
    pipe = nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end")
    pipe.steps = torch.tensor(3)  # type: ignore[assignment]
    assert torch.isfinite(pipe.step(torch.ones(2, 2), target=torch.tensor([0, 1]))).all()
    assert pipe.steps == 4
    assert isinstance(pipe.steps, int)


@pytest.mark.parametrize("recompute", [False, True])
def test_batches_under_a_delay_may_reuse_their_memory(recompute: bool) -> None:
    """The late gradient was that of the later values, or torch raised an error of changed memory."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 3)]
    x, y = torch.randn(2, 6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    pipe = nwise.Pipeline(stages, None, strategy="end-to-end-delay-1", recompute=recompute)
    memory = x[0].clone()
    for batch in x:
        memory.copy_(batch)
        pipe.step(memory, target=y)
    expected = torch.autograd.grad(
        functional.cross_entropy(stages[1](stages[0](x[0])), y), list(stages[0].parameters())
    )
    for p, gradient in zip(stages[0].parameters(), expected, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, gradient)


class ActNorm(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_deferring_keeps_what_a_batch_norm_does() -> None:
    """A subclass lost its activation, and any batch norm its hooks."""
    with pytest.raises(ValueError, match="the forward of torch's batch norm. Found ActNorm, which has its own"):
        nwise.defer_batchnorm(nn.Sequential(ActNorm(3)))
    norm, calls = nn.BatchNorm1d(3), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    nwise.defer_batchnorm(nn.Sequential(norm))(torch.randn(4, 3))
    assert calls == [1]


def test_batch_norm_warning_when_m_rises() -> None:
    pipe = nwise.Pipeline([nn.BatchNorm1d(2), nn.Linear(2, 2)], None, strategy="end-to-end")
    with pytest.warns(UserWarning, match="With 2 micro-batches, batch norm") as seen:
        pipe.num_microbatches = 2
    assert [w.filename for w in seen] == [__file__]
    for fewer in (2, 1):
        pipe.num_microbatches = fewer  # without a warning


@dataclass
class Masked:
    """A mean over the targets that are there; constant if there are none."""

    scale: float = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        there = ~target.isnan()
        return self.scale * (output - target)[there].square().mean() if there.any() else torch.zeros(())

    def count(self, target: Tensor) -> int:
        return int((~target.isnan()).sum())


def test_loss_of_a_dataclass_that_is_constant_where_nothing_counts() -> None:
    """A micro-batch of weight 0 was refused, and a loss without a hash raised a TypeError."""
    target = torch.randn(4, 2)
    target[2:] = float("nan")
    pipe = nwise.Pipeline([nn.Linear(3, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], Masked(), "local", 2)
    assert torch.isfinite(pipe.step(torch.randn(4, 3), target=target)).all()


def test_untie_copies_shared_buffers() -> None:
    """`split` advised it, and it did nothing."""
    table = torch.ones(2)
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for block in blocks:
        block.register_buffer("table", table)
    assert nwise.untie(nn.Sequential(*blocks)) == ["1.table"]
    assert blocks[1].table is not table


def test_muon_takes_no_group_later_and_a_norm_is_positive() -> None:
    """Parameters of a later group were never updated; a negative norm turned the gradients round."""
    pipe = nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end")
    optimizer = make_optimizer(Adam(muon_lr=0.01), pipe.parameters(), [pipe.stages[0].weight])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="should get all parameters when it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="`max_norm` should be above 0. Found -1"):
        Clip(pipe, -1.0)
    half = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.full_like(half, 2e4)
    assert squared_norm([half]) == pytest.approx(8e8, rel=1e-3)


def test_losses_of_two_precisions_keep_theirs() -> None:
    losses = {(0, 0): torch.tensor(1.0, dtype=torch.bfloat16), (1, 0): torch.tensor(1.0236), (2, 0): torch.tensor(2)}
    batch = Batch([], [], [[1.0] * 4], losses=losses)
    assert batch.mean_losses(4).tolist() == pytest.approx([1.0, 1.0236, 2.0, float("nan")], nan_ok=True, abs=1e-6)


def test_loss_without_a_counted_term_has_not_diverged() -> None:
    """With all targets of its micro-batches ignored, a loss was nan, and the warning advised a lower rate."""
    target = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    pipe = three("rotating-2-microbatch", num_microbatches=4)
    target[[0, 1, 4, 5]] = -100
    losses = pipe.step(torch.linspace(-1, 1, 64).view(8, 8), target=target)
    assert losses.isnan().any()
    assert losses.diverged == ()
    pipe.num_microbatches = 2  # with a single micro-batch it was 0
    assert pipe.step(torch.ones(8, 8), target=torch.tensor([-100] * 4 + [0] * 4)).isnan().any()
    assert all(p.grad is None or p.grad.isfinite().all() for p in pipe.parameters())


def test_a_seed_of_numpy_draws_what_the_integer_draws() -> None:
    """It drew other numbers, and a checkpoint with it could not be written."""

    def loss(seed: Any) -> Tensor:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Dropout(), nn.Linear(8, 3))]
        return nwise.Pipeline(stages, strategy="end-to-end", seed=seed).step(X, target=Y)

    assert torch.equal(loss(np.int64(3)), loss(3))
    pipe = three("local", seed=0)
    pipe.seed = np.int64(3)  # type: ignore[assignment]
    pipe.step(X, target=Y)
    assert type(pipe.seed) is int


@pytest.mark.parametrize("stage", [2, 9])
def test_head_of_the_last_stage_is_refused(stage: int) -> None:
    """The step trained through it, and `forward` and `evaluate` left it out."""
    pipe = three("2-wise")
    pipe.heads[stage] = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=rf"Found one of stage {stage} with 3 stages; remove it, or make it a part"):
        pipe.step(X, target=Y)


def test_synchronised_batch_norm_is_not_deferred() -> None:
    """It became one that no longer synchronises, without a word."""
    with pytest.raises(ValueError, match="Found SyncBatchNorm, which has its own"):
        nwise.defer_batchnorm(nn.Sequential(nn.SyncBatchNorm(3)))


def test_drops_are_not_ignored_on_a_plateau() -> None:
    with pytest.raises(ValueError, match=r"`drops` should be empty with `plateau_epochs`.* Found \(0.5,\); set one"):
        Sgd(drops=(0.5,), plateau_epochs=5)


def test_switches_within_an_epoch() -> None:
    """The name was checked as if an epoch had one step, so both switches came at step 1."""
    mixed = Recipe(strategy="local@0.2epochs,2-wise@0.4epochs,end-to-end")
    assert [first for first, _ in mixed.strategy_for(22).phases()] == [0, 4, 9]
    with pytest.raises(ValueError, match="A second switch should come after the first"):
        Recipe(strategy="local@0.4epochs,2-wise@0.2epochs,end-to-end")


def test_warning_of_pillow_does_not_spoil_an_image(tmp_path: Path) -> None:
    """Photos with damaged EXIF data, of which ImageNet has some, were called unreadable."""
    picture, facts = Image.new("RGB", (4, 4), (9, 9, 9)), Image.Exif()
    facts[0x010E] = "x" * 40
    picture.save(tmp_path / "photo.jpg", exif=facts.tobytes()[:-20])
    with pytest.warns(UserWarning, match="Truncated File Read"):
        assert _decode({"bytes": (tmp_path / "photo.jpg").read_bytes()}, "row 0").shape == (3, 4, 4)


def test_interleaved_order_of_uneven_stages() -> None:
    """Five stages on two ranks ended in a deadlock."""
    flows = flows_for(nwise.NWise(2), 5, 2)
    validate(named_schedule("interleaved-1f1b", flows, (0, 1, 0, 1, 0), (0,) * 5, Costs(1, 0, 1, 1)))


def test_jitter_keeps_stages_back() -> None:
    """With jitter a stage began its next forward before the stage above had taken the activation."""
    costs = Costs([1, 3, 1], 0, 1, 1, latency=0.1)
    timeline = simulate(
        best("local", num_stages=3, num_microbatches=2, costs=costs).schedule, costs, cycles=30, jitter=0.5
    )
    starts = {
        (event.batch, event.action.stage, event.action.microbatch): event.start
        for event in timeline.events
        if event.action.kind is Kind.FORWARD
    }
    pairs = [(start, starts[b - 1, k + 1, m]) for (b, k, m), start in starts.items() if b and k < 2]
    assert len(pairs) > 100
    assert all(start >= taken - 1e-9 for start, taken in pairs)


def test_memory_by_rank_and_numbers_of_micro_batches_are_checked() -> None:
    costs = Costs(1, 0.5, 1, 1)
    with pytest.raises(ValueError, match=r"`memory` should be one number, or one for each of 4 ranks. Found \[3.0"):
        baseline("1f1b", num_stages=4, num_microbatches=4, costs=costs, memory=[3.0, 3.0, 3.0])
    with pytest.raises(ValueError, match=r"`microbatches` should be an integer of at least 1. Found 0"):
        nwise.plan(costs, devices=4, microbatches=(0,))
    assert make_placement(list(np.array([0, 1, 1])), 3, 2) == (0, 1, 1)


def test_numbers_are_no_text(tmp_path: Path) -> None:
    """A column of numbers called `text` ended in a traceback."""
    for split in ("train", "heldout"):
        datasets.Dataset.from_dict({"text": [1, 2, 3]}).to_parquet(str(tmp_path / f"{split}.parquet"))
    with pytest.raises(ValueError, match=r"row 0, should hold a text. Found 1; remove the row\."):
        load_text(str(tmp_path))


def test_confidence_that_is_no_number_turns_no_exit_off() -> None:
    seen = Seen(
        (0, 1), torch.rand(100, 2, generator=torch.Generator().manual_seed(0)), torch.ones(100, 2, dtype=torch.bool)
    )
    expected = calibrate(seen, Work([1, 1], {0: 0}), 0.5)
    seen.confidence[0, 0] = torch.nan
    assert expected.keys() == calibrate(seen, Work([1, 1], {0: 0}), 0.5).keys() == {0}
