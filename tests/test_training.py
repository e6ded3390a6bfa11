"""Training a recipe: records, weights, evaluation, determinism, interruption."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from launch import forked
from nets import X, Y, three
from nwise.app.cli import run
from nwise.app.data import Images, digits
from nwise.app.recipes import (
    RECIPES,
    Adam,
    ConvNet,
    EmbeddedText,
    Gpt,
    ImageSource,
    Mlp,
    Recipe,
    ResNet,
    Sgd,
    from_json,
    recipe,
    to_json,
)
from nwise.app.training import (
    Callback,
    CheckpointPolicy,
    Run,
    Score,
    Scores,
    StoppedError,
    Trainer,
    compile_blocks,
    evaluate,
    log,
    make_pipeline,
    new_run,
)
from nwise.app.training.build import check_channels_last, pick_device
from nwise.checkpoint import main_state, save_tensors

SHORT = dataclasses.replace(recipe("digits"), epochs=2, heads="all", model=ConvNet(num_stages=4, filters=8))
TEXT = Recipe(
    name="tiny-text",
    data=EmbeddedText(max_bytes=200_000, test_limit=20_000),
    model=Gpt(num_stages=2, blocks_per_stage=1, width=16, num_heads=2, sequence_length=16, head_blocks=1),
    optimizer=Adam(lr=0.1, warmup_steps=10),
    strategy="2-wise-mean",
    batch_size=16,
    max_steps=6,
    eval_every=100,
    log_every=2,
)


def last_head(scores: Scores) -> Score:
    last = scores.heads[-1]
    assert last is not None
    return last


def train(config: Recipe, folder: Path) -> tuple[Run, Trainer, Scores]:
    run = new_run(config, folder)
    trainer = Trainer(config)
    return run, trainer, trainer.train(run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Trainer, Scores]:
    return train(SHORT, tmp_path_factory.mktemp("runs"))


def test_run_learns_and_records(trained: tuple[Run, Trainer, Scores]) -> None:
    run, trainer, scores = trained
    assert run.folder.name == "digits-2-wise-mean-001"
    assert all(score is not None and score.accuracy > 0.9 for score in scores.heads)
    state = json.loads((run.folder / "run.json").read_text())
    assert state["status"] == "done"
    assert state["seed"] == 0
    assert state["versions"]["torch"] == torch.__version__
    assert run.recipe == SHORT
    records = run.metrics()
    assert [r["step"] for r in records if r["kind"] == "train"] == [10, 20, 30, 40, 44]
    tests = [r for r in records if r["kind"] == "test"]
    assert [r["step"] for r in tests] == [0, 22, 44]
    assert tests[-1]["accuracy"][-1] == last_head(scores).accuracy
    assert trainer.num_steps == 44
    assert tests[-1]["samples"] == 44 * 64
    assert not list(run.folder.glob("*.part"))


def test_run_is_determined_by_its_seed(tmp_path: Path) -> None:
    states = [main_state(train(dataclasses.replace(SHORT, seed=s, max_steps=10), tmp_path)[1].pipe) for s in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_micro_batches_train_the_same_network(tmp_path: Path) -> None:
    """The network has no batch statistics, so only the order of the sums differs."""
    config = dataclasses.replace(SHORT, model=Mlp(num_stages=3), max_steps=20)
    whole = last_head(train(config, tmp_path)[2])
    parts = last_head(train(dataclasses.replace(config, microbatches=4), tmp_path)[2])
    assert parts.loss == pytest.approx(whole.loss, rel=1e-3)


def test_saved_weights_give_the_scores_they_had(trained: tuple[Run, Trainer, Scores]) -> None:
    run, trainer, scores = trained
    fresh = make_pipeline(run.recipe, trainer.train_data, trainer.pipe.strategy)
    run.load_weights(fresh)
    for again, score in zip(evaluate(fresh, trainer.test_data, 50).heads, scores.heads, strict=True):
        assert again is not None
        assert score is not None
        assert (again.loss, again.accuracy) == pytest.approx((score.loss, score.accuracy))
    names = set(run.weights())
    assert "model.blocks.0.0.weight" in names
    assert "heads.0.1.weight" in names


def test_text_recipe_trains(tmp_path: Path) -> None:
    run, _, scores = train(TEXT, tmp_path)
    assert (run.folder / "tokenizer.json").exists()
    last = last_head(scores)
    assert last.perplexity == pytest.approx(math.exp(last.loss))
    assert last.perplexity < 256
    rates = [r["lr"] for r in run.metrics() if r["kind"] == "train"]
    assert rates == pytest.approx([0.1 * step * 10**-1.5 for step in (2, 4, 6)])


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"recompute": True},
        {"clip": 0.1},
        {"strategy": "hogwild-forward-least", "heads": "live"},  # the paper's form learns too little in these few steps
        {"strategy": "rotating-2-microbatch", "microbatches": 2},
        {"strategy": "credit-1,0,0,0;0,1,0,0;0.5,0,1,0;0,1,0,1"},
        {"optimizer": Sgd(lr=0.05, plateau_epochs=1)},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
def test_every_option_trains(change: dict[str, Any], tmp_path: Path) -> None:
    run, _, scores = train(dataclasses.replace(SHORT, **change), tmp_path)
    assert last_head(scores).accuracy > 0.8
    if change.get("strategy") == "hogwild-forward-least":
        assert next(r["staleness"] for r in run.metrics() if r["kind"] == "train") == [[3], [2], [1], [0]]


def test_training_augments_and_testing_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = Images.batch, []

    def batch(self: Images, indices: Tensor, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        seen.append((len(self), None if random is None else random.initial_seed()))
        return original(self, indices, random)

    monkeypatch.setattr(Images, "batch", batch)
    Trainer(dataclasses.replace(SHORT, max_steps=3)).train()
    training = [seed for length, seed in seen if length == 1437]
    assert len(set(training)) == 3
    assert None not in training
    assert {seed for length, seed in seen if length == 360} == {None}


def test_bf16_runs_in_bf16_and_recompute_recomputes() -> None:
    trainer = Trainer(dataclasses.replace(SHORT, precision="bf16", recompute=True, max_steps=1))
    dtypes: list[torch.dtype] = []
    stage = trainer.pipe.stages[1]
    # The copy that the check makes has the same hooks.
    stage.register_forward_hook(lambda one, _, output: dtypes.append(output.dtype) if one is stage else None)
    trainer.train()
    # a test before and one after of three batches each, and between them a step with its recomputation
    assert len(dtypes) == 3 + 2 + 3
    assert set(dtypes) == {torch.bfloat16}


def test_narrow_channels_last_on_cpu_raises() -> None:
    """Regression: a narrow ResNet with channels last died of a segmentation fault (oneDNN issue 6035)."""
    narrow = dataclasses.replace(recipe("digits"), model=ResNet(width_factor=1 / 8), channels_last=True)
    with pytest.raises(
        ValueError,
        match=r"strided 1x1 convolutions should have at least 16 .* Found 8 in stages\.1\..*; leave `channels_last` out",
    ):
        Trainer(narrow)
    check_channels_last(nn.Conv2d(8, 16, 1, stride=2), torch.device("cuda"))
    check_channels_last(nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.Conv2d(8, 16, 1)), torch.device("cpu"))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("config", [SHORT, TEXT], ids=["digits", "text"])
def test_compiling_reaches_every_block_and_head(config: Recipe) -> None:
    """Regression: `Module.compile` had no effect on an `nn.Sequential` of layers, such as the convnet's."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    trainer = Trainer(dataclasses.replace(config, max_steps=1))
    plain = Trainer(dataclasses.replace(config, max_steps=1))
    compile_blocks(trainer.pipe, backend)
    x, y = trainer.train_data.batch(torch.arange(4))
    torch.testing.assert_close(trainer.pipe.step(x, target=y), plain.pipe.step(x, target=y), equal_nan=True)
    pieces = sum(len(stage.pieces()) for stage in trainer.pipe.stages if isinstance(stage, nwise.Chain))
    assert len(graphs) >= pieces / 2 + len(trainer.pipe.heads)  # equal blocks may share a graph
    torch.compiler.reset()


def test_trainer_drops_the_rate_on_plateaus(tmp_path: Path) -> None:
    """A frozen network never improves: the rate drops after every second test, and an epoch has two."""
    still = Sgd(lr=1e-20, momentum=0.0, weight_decay=0.0, plateau_epochs=1)
    config = dataclasses.replace(
        SHORT, model=Mlp(num_stages=2), optimizer=still, epochs=3, eval_every=0.5, log_every=11
    )
    run, _, _ = train(config, tmp_path)
    rates = [r["lr"] for r in run.metrics() if r["kind"] == "train"]
    assert rates == pytest.approx([1e-20, 1e-20, 1e-20, 1e-21, 1e-21, 1e-22])


def test_deferred_batch_norm_is_a_setting() -> None:
    config = dataclasses.replace(SHORT, microbatches=4, defer_batchnorm=True, max_steps=2)
    trainer = Trainer(config)  # warnings are errors
    trainer.train()
    norm = trainer.pipe.stages[0].get_submodule("blocks.0.1")
    assert int(norm.num_batches_tracked) == 2  # type: ignore[arg-type]


def test_clipping_bounds_the_norm_of_all_gradients() -> None:
    sgd = Sgd(lr=1.0, momentum=0.0, weight_decay=0.0)
    trainer = Trainer(dataclasses.replace(SHORT, clip=1e-3, optimizer=sgd, max_steps=1))
    before = [p.detach().clone() for p in trainer.pipe.parameters()]
    trainer.train()
    moved = torch.cat([(p - q).flatten() for p, q in zip(trainer.pipe.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-2)


class Interrupts(Callback):
    """Presses Ctrl-C after a few steps."""

    def stepped(self, step: int, losses: Tensor) -> None:
        if step == 30:
            raise KeyboardInterrupt

    def finished(self, status: str) -> None:
        self.status = status


def test_interrupted_run_saves_usable_weights(tmp_path: Path) -> None:
    run = new_run(SHORT, tmp_path)
    callback = Interrupts()
    trainer = Trainer(SHORT)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(run, (callback,))
    assert callback.status == "interrupted"
    assert json.loads((run.folder / "run.json").read_text())["status"] == "interrupted"
    assert run.metrics()[-1]["kind"] == "interrupted"
    weights = run.weights()
    assert torch.equal(weights["model.output.1.weight"], main_state(trainer.pipe)["output.1.weight"])
    assert run.weights_step == trainer.pipe.steps == 30


class StopsInTest(Callback):
    """Asks for a stop after the first batch of the test of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def started(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.batches = 0

    def evaluating(self, done: int, total: int) -> None:
        if self.trainer.pipe.steps == self.step:
            self.batches += 1
            assert total > 2
            self.trainer.stop()


@pytest.mark.parametrize("step", [0, 22, 44])
def test_stop_breaks_off_a_test_which_a_resumed_run_repeats(step: int, tmp_path: Path) -> None:
    """Regression: a stop waited for the whole test, which took five minutes before the first step of the paper's ResNet."""
    config = dataclasses.replace(SHORT, model=Mlp(num_stages=3), optimizer=Sgd(lr=0.05, plateau_epochs=1))
    policy = CheckpointPolicy()
    whole = new_run(config, tmp_path)
    trained = Trainer(config)
    scores = trained.train(whole, policy=policy)
    run, callback = new_run(config, tmp_path), StopsInTest(step)
    with pytest.raises(StoppedError, match=f"Stopped at step {step}, before its test was done, as requested"):
        Trainer(config).train(run, (callback,), policy)
    assert callback.batches == 1
    assert run.status == "stopped"
    assert run.weights_step == step
    trainer = Trainer(config)
    assert trainer.train(run, policy=policy, resume=True) == scores
    assert all(torch.equal(main_state(trainer.pipe)[name], value) for name, value in main_state(trained.pipe).items())
    facts = [[{**record, "seconds": 0} for record in each.metrics()] for each in (run, whole)]
    assert facts[0] == facts[1]


def test_stop_at_a_switch_of_strategies_ends_the_test_first(tmp_path: Path) -> None:
    """Else the resumed run would test without the heads of the strategy before."""
    config = dataclasses.replace(SHORT, model=Mlp(num_stages=3), strategy="local@22,end-to-end", heads="live")
    run, callback = new_run(config, tmp_path), StopsInTest(22)
    with pytest.raises(StoppedError, match="Stopped at step 22, as requested"):
        Trainer(config).train(run, (callback,), CheckpointPolicy())
    assert callback.batches > 2
    assert run.metrics()[-1]["kind"] == "test"


class FailsAtFirst(Callback):
    def started(self, trainer: Trainer) -> None:
        raise UnicodeEncodeError("ascii", "–", 0, 1, "not in range")


def test_run_whose_display_fails_is_not_left_running(tmp_path: Path) -> None:
    run = new_run(SHORT, tmp_path)
    with pytest.raises(UnicodeEncodeError):
        Trainer(SHORT).train(run, (FailsAtFirst(),))
    assert json.loads((run.folder / "run.json").read_text())["status"] == "failed"


def test_samples_and_weights_step_after_a_resume_with_larger_batches(tmp_path: Path) -> None:
    """Regression: samples were steps times the present size; weights of a killed run had the step of the last record."""
    before = dataclasses.replace(SHORT, max_steps=4, eval_every=100.0)
    run = new_run(before, tmp_path)
    Trainer(before).train(run, policy=CheckpointPolicy())
    assert run.weights_step == 4
    run.record(kind="train", step=9)
    assert run.weights_step == 4
    save_tensors(run.weights(), run.weights_file)  # as older versions did
    assert run.weights_step == 4, "that of the last test"
    after = dataclasses.replace(before, max_steps=6, batch_size=2 * before.batch_size)
    Trainer(after).train(run, policy=CheckpointPolicy(), resume=True)
    last = run.metrics()[-1]
    assert (last["step"], last["samples"]) == (6, 4 * before.batch_size + 2 * after.batch_size)


# Scores


def test_scores_by_hand() -> None:
    """Two stages give fixed logits; the ensemble averages probabilities, not logits."""

    class Fixed(nn.Module):
        def __init__(self, logits: list[float]) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.tensor(logits))

        def forward(self, x: Tensor) -> Tensor:
            return self.logits.expand(len(x), -1)

    _, test = digits()
    few = test.subset(torch.arange(10))
    few.labels[:] = torch.tensor([0] * 7 + [1] * 3)
    near, far = torch.tensor([0.9, 0.1]), torch.tensor([0.2, 0.8])
    pipe = nwise.Pipeline([nn.Identity(), Fixed(far.log().tolist())], [Fixed(near.log().tolist())], strategy="local")
    scores = evaluate(pipe, few, 4, ensembles=True)
    first, last = scores.heads
    assert first is not None
    assert last is not None
    assert first.accuracy == pytest.approx(0.7)
    assert last.accuracy == pytest.approx(0.3)
    assert last.loss == pytest.approx(-(7 * math.log(0.2) + 3 * math.log(0.8)) / 10)
    assert scores.ensembles[0].loss == pytest.approx(last.loss)
    assert scores.ensembles[1].loss == pytest.approx(-(7 * math.log(0.55) + 3 * math.log(0.45)) / 10)
    assert scores.ensembles[1].accuracy == pytest.approx(0.7)


# Configurations


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_are_complete_and_survive_json(name: str) -> None:
    made = recipe(name)
    assert made.name == name
    assert from_json(json.loads(json.dumps(to_json(made)))) == made
    assert (RECIPES[name].__doc__ or "").strip()


def test_recipes_match_the_paper() -> None:
    """Check every setting of the full-size experiments that the paper prints."""
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 2e-4}
    cifar = {
        "epochs": 200,
        "batch_size": 128,
        "optimizer": Sgd(**sgd, drops=(91 / 200, 136 / 200, 182 / 200)),
        "model": ResNet(variant="paper-32"),
    }
    gpt = Gpt(num_stages=4, blocks_per_stage=6, width=1024, num_heads=4, sequence_length=128, vocabulary_size=50257)
    table: dict[str, dict[str, Any]] = {
        "cifar10-convnet": {
            "epochs": 100,
            "batch_size": 128,
            "optimizer": Adam(lr=1e-4),
            "model": ConvNet(num_stages=6),
        },
        "cifar10-resnet": cifar,
        "cifar100-resnet": cifar,
        "imagenet-resnet": {
            "epochs": 120,
            "batch_size": 256,
            "optimizer": Sgd(**sgd, plateau_epochs=10),
            "model": ResNet(variant="50"),
        },
        "cifar10-finetune": {
            "epochs": 100,
            "batch_size": 128,
            "optimizer": Sgd(**sgd),  # 1-wise's own drops come after the first phase
            "then": Sgd(**sgd, drops=(0.6, 0.8, 0.9)),
            "strategy": "local@80epochs,end-to-end",
        },
        "lm1b": {
            "epochs": 1,
            "batch_size": 1024,
            "optimizer": Adam(lr=1024**-0.5, beta1=0.9, beta2=0.98, eps=1e-9, warmup_steps=4000),
            "model": gpt,
            "strategy": "2-wise-mean",
        },
    }
    for name, settings in table.items():
        for field, value in settings.items():
            assert getattr(recipe(name), field) == value, (name, field)
    augmented = {name: recipe(name).data for name in ("cifar10-resnet", "cifar100-resnet", "cifar10-finetune")}
    assert all(isinstance(data, ImageSource) and data.augmentation == "crop-flip" for data in augmented.values())
    imagenet, plain = recipe("imagenet-resnet").data, recipe("cifar10-convnet").data
    assert isinstance(imagenet, ImageSource)
    assert (imagenet.augmentation, imagenet.size, imagenet.num_classes) == ("resized-crop-flip", 224, 1000)
    assert isinstance(plain, ImageSource)
    assert plain.augmentation == "none"
    drops = recipe("cifar10-resnet").optimizer
    assert isinstance(drops, Sgd)
    assert [round(share * 200) for share in drops.drops] == [91, 136, 182]
    assert recipe("cifar10-finetune").phases(390)[1] == (80 * 390, nwise.EndToEnd())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "`batch_size` should be an integer of at least 1. Found 0"),
        ({"epochs": 0}, "`epochs` should be a number above 0 and below 1e\\+12. Found 0"),
        ({"clip": -1.0}, "`clip` should be a finite number above 0. Found -1.0"),
        ({"max_steps": 0}, "`max_steps` should be an integer of at least 1. Found 0"),
        ({"microbatches": 65, "batch_size": 64}, "`microbatches` should be at most `batch_size = 64`. Found 65"),
        ({"model": Gpt()}, "both be of text or both of images. Found Gpt and Digits"),
        ({"strategy": "x"}, "`strategy` should be one like"),
        ({"strategy": "local@threeepochs,2-wise"}, "a number of epochs above 0 after '@'"),
    ],
)
def test_configurations_that_cannot_run_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SHORT, **change)


def test_devices_that_do_not_exist_are_refused() -> None:
    for device in ("cuda:99", "quantum", "meta"):
        with pytest.raises(ValueError, match=f"`device` should be .* Found '{device}'"):
            pick_device(dataclasses.replace(SHORT, device=device))


def test_unknown_names_in_json_are_errors() -> None:
    value = to_json(SHORT)
    with pytest.raises(ValueError, match="A Recipe should have fields .*Found 'epoch'"):
        from_json({**value, "epoch": 3})
    with pytest.raises(ValueError, match="`type` should be one of .*Found 'Net'"):
        from_json({"type": "Net"})


def test_invalid_run_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a folder with a run.json.*Found none"):
        Run.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json should hold a run's configuration"):
        _ = Run.open(tmp_path).recipe
    (tmp_path / "run.json").write_text(json.dumps({"config": to_json(Mlp())}))
    with pytest.raises(ValueError, match=r"should hold a Recipe under 'config'. Found Mlp"):
        _ = Run.open(tmp_path).recipe
    with pytest.raises(FileNotFoundError, match="should hold the run's weights. Found none"):
        Run.open(tmp_path).weights()
    (tmp_path / "weights.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="should be a safetensors file. Found"):
        Run.open(tmp_path).weights()


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    run, trainer, _ = train(dataclasses.replace(SHORT, max_steps=1), tmp_path)
    other = make_pipeline(
        dataclasses.replace(SHORT, model=ConvNet(num_stages=5)), trainer.train_data, trainer.pipe.strategy
    )
    with pytest.raises(ValueError, match="names of the network's parameters and buffers. Found no 'blocks.4"):
        run.load_weights(other)


def test_stages_with_colliding_names_cannot_be_saved() -> None:
    pipe = nwise.Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], None, strategy="end-to-end")
    with pytest.raises(ValueError, match="Found 'weight' in stage 1 and in an earlier one"):
        main_state(pipe)


def test_metrics_with_bytes_that_are_not_utf8_are_no_records(tmp_path: Path) -> None:
    """A damaged byte inside a text must not be replaced in silence; resuming drops the line."""
    run = Run(tmp_path)
    run.record(kind="train", step=1)
    (tmp_path / "metrics.jsonl").write_bytes(
        (tmp_path / "metrics.jsonl").read_bytes() + b'{"kind": "tr\xff", "step": 2}\n'
    )
    with pytest.raises(ValueError, match="line 2, should be a record"):
        run.metrics()
    run.rewind(9)
    assert [record["step"] for record in run.metrics()] == [1]


def test_evaluate_skips_untrained_heads() -> None:
    """Regression: every head ran in an evaluation, and the outputs of untrained heads were thrown away."""
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

    class Slow:
        """Gathers from this process alone, and delivers at the end."""

        def __init__(self, processes: object) -> None:
            self.tables: list[tuple[int, Tensor]] = []

        def put(self, step: int, column: list[float]) -> None:
            self.tables.append((step, torch.tensor([column])))

        def take(self, *, wait: bool = False) -> list[tuple[int, Tensor]]:
            return self.tables if wait else []

    pipe = three("local")
    monkeypatch.setattr(log, "AsyncGather", Slow)
    with monkeypatch.context() as several:
        several.setattr(type(pipe.processes), "size", 2)
        records = log.StepLog(pipe)
    for step in range(1, 5):
        pipe.strategy = "local" if step <= 2 else "hogwild"
        records.put(step, pipe.step(X, target=Y), 0.1, 0.0)
    assert [record.get("staleness") for _, record in records.take(wait=True)] == [None, None, *[[[4], [2], [0]]] * 2]


def test_switches_within_an_epoch() -> None:
    """The name was checked as if an epoch had one step, so both switches came at step 1."""
    mixed = Recipe(strategy="local@0.2epochs,2-wise@0.4epochs,end-to-end")
    assert [first for first, _ in mixed.phases(22)] == [0, 4, 9]
    with pytest.raises(ValueError, match="`strategy` should change at steps that rise, from at least 1"):
        Recipe(strategy="local@0.4epochs,2-wise@0.2epochs,end-to-end")


_OWN = """
from torch import nn

def network(data):
    end = nn.Linear(12, len(data.classes))
    nn.init.normal_(end.weight)  # not what `reset_parameters` draws
    return [nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU()), end], [nn.Linear(12, len(data.classes))]

def wrong(data):
    return []

def too_few(data):
    return [nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 10)], [nn.Linear(12, 10)]
"""


def test_network_of_ones_own_is_compared_trained_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_network.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["digits", "--model", "my_own_network:network", "--max-steps", "6", "--strategy", "local"]
    assert run(["compare", *options, "--strategies", "local", "end-to-end", "--seeds", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["strategy"], one["seed"]) for one in results] == [
        ("local", 0), ("local", 1), ("end-to-end", 0), ("end-to-end", 1)
    ]  # fmt: skip
    assert len({str(one["curve"]["values"]) for one in results}) > 1
    assert run(["train", *options, "--runs", "one"]) == 0
    done = forked(2, ["-m", "nwise", "train", *options, "--runs", "many"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (many,), (one,) = (list((tmp_path / name).iterdir()) for name in ("many", "one"))
    assert (many / "weights.safetensors").read_bytes() == (one / "weights.safetensors").read_bytes()
    assert run(["train", "--resume", str(one), "--max-steps", "8"]) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my own", "`model` should be a module and its function, like mine:network. Found 'my own': invalid format"),
        (
            "my_own_network:nothing",
            "Found 'my_own_network:nothing': module 'my_own_network' has no attribute 'nothing'",
        ),
        ("my_own_network:wrong", r"should return two lists: stages, and heads of all but the last. Found \[\]"),
        ("my_own_network:too_few", "`heads` should have 2 entries, one for every stage but the last.* Found 1"),
        ("no_such_module:network", "No module named 'no_such_module'"),
    ],
)
def test_bad_networks_of_ones_own_are_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_own_network.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert run(["train", "digits", "--model", name]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ValueError, match="`cut` should be empty with `model`.* Found"):
        Recipe(network=name, cut=(2, 2))


def test_command_line_training_matches_single_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-steps", "30", "--log-every", "7", "--clip", "0.5", "--clip-by", "loss", "--microbatches", "2"]
    options += ["--stage-lr", "1", "0.5", "1", "2", "--defer-batchnorm", "--filters", "2"]
    arguments = ["train", "digits", *options, "--runs"]
    done = forked(4, ["-m", "nwise", *arguments, str(tmp_path / "many"), "--timeline", "8"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("Run folder") == 1, "one rank draws"
    assert run([*arguments, str(tmp_path / "one")]) == 0
    (many,), (one,) = (list((tmp_path / name).iterdir()) for name in ("many", "one"))
    assert (many / "weights.safetensors").read_bytes() == (one / "weights.safetensors").read_bytes()

    def records(folder: Path) -> list[Any]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return sorted(
            ({k: v for k, v in r.items() if k != "seconds"} for r in lines), key=lambda r: (r["step"], r["kind"])
        )

    for a, b in zip(records(many), records(one), strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"loss", "accuracy"}:
            assert a[key] == b[key]
        for key in a.keys() & {"loss", "accuracy"}:
            assert [x is None for x in a[key]] == [x is None for x in b[key]]
            assert [x for x in a[key] if x is not None] == pytest.approx([x for x in b[key] if x is not None], rel=1e-6)
    capsys.readouterr()
    assert run(["report", str(many), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)["runs"][0]["timeline"]
    forward, back = map(sum, zip(*numbers["bytes"], strict=True))
    assert forward == back > 0, "2-wise sends a gradient for each activation"
    assert numbers["period_ms"]["measured"] > 0
    trace = json.loads((many / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in trace} == {0, 1}
    assert run(["report", str(many)]) == 0
    assert "Largest deviations" in capsys.readouterr().out
    assert run(["report", str(one)]) == 0
    assert "measured" not in capsys.readouterr().out
