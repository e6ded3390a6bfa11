"""`Pipeline`: losses, options of real training, and everything it refuses."""

from __future__ import annotations

import copy
import functools
import gc
import shutil
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import nwise
from nets import Net, equal, perceptron, tokens
from test_contract import assert_same, gradients, pipeline

cross_entropy = nn.functional.cross_entropy


def linears(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in pairwise(sizes)]


# A step that raises


class Fails(nn.Module):
    """Raises in its forward or its backward when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)
        self.fail = ""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        if self.fail == "forward":
            raise self.error()
        if self.fail == "backward" and y.requires_grad:
            y.register_hook(self._hook)
        return y

    def _hook(self, gradient: Tensor) -> None:
        raise self.error()

    error: type[BaseException] = ArithmeticError


@pytest.mark.filterwarnings("ignore:With 2 micro-batches")
@pytest.mark.parametrize("strategy", ["local", "2-wise", "3-wise-mean", "end-to-end", "2-wise-hogwild"])
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(("deferred", "error"), [(False, ArithmeticError), (True, KeyboardInterrupt)])
def test_failed_step_leaves_no_trace(strategy: str, earlier: bool, deferred: bool, error: type[BaseException]) -> None:
    """Regression: half the gradients stayed in `.grad`, so after a skipped batch up to 63 % of them were wrong."""
    stages = [Fails() for _ in range(4)]
    pipe = nwise.Pipeline(stages, [nn.Linear(5, 5) for _ in range(3)], cross_entropy, strategy, 2)
    if deferred:
        nwise.defer_batchnorm(pipe)
    x, y = torch.randn(6, 5), torch.randint(0, 5, (6,))
    if earlier:
        pipe.step(x, target=y)
    identities = {name: p.grad for name, p in pipe.named_parameters()}
    before = copy.deepcopy((pipe.state_dict(), identities, pipe.steps, pipe.staleness, pipe.microbatch_losses))
    # Under Hogwild stage 0 has no pass in the first call, and what is due of an earlier mini-batch is dropped.
    failures = ("forward",) if "hogwild" in strategy else ("forward", "backward")
    for k, stage in enumerate(stages):
        for stage.fail in failures:
            stage.error = error
            with pytest.raises(error):
                pipe.step(x, target=y)
            now = (pipe.state_dict(), {n: p.grad for n, p in pipe.named_parameters()}, pipe.steps, pipe.staleness)
            assert equal((*now, pipe.microbatch_losses), before), k
            assert all(p.grad is identities[name] for name, p in pipe.named_parameters()), k
        stage.fail = ""
    fresh = copy.deepcopy(pipe)
    assert torch.equal(pipe.step(x, target=y).nan_to_num(), fresh.step(x, target=y).nan_to_num())


# Parameters


def test_replaced_stage_and_head_train() -> None:
    pipe = nwise.Pipeline(linears(3, 3, 3), [nn.Linear(3, 3)], strategy="local")
    pipe.stages[0], pipe.heads["0"] = nn.Linear(3, 3), nn.Linear(3, 3)
    pipe.step(torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0]))
    assert all(p.grad is not None for p in pipe.parameters())
    assert pipe.heads[0] is pipe.heads["0"]


@pytest.mark.usefixtures("float64")
def test_frozen_parameters_get_nothing_and_change_nothing_else() -> None:
    net = perceptron(4)
    x, y = net.draw(6)
    credit = nwise.NWise(3).credit(4)
    everything = nwise.reference_grads(net.stages, net.heads, net.loss_fn, x, y, credit)
    net.stages[0].requires_grad_(False)
    net.stages[2][0].weight.requires_grad_(False)  # type: ignore[index]
    pipe = pipeline(net, "3-wise")
    pipe.step(x, target=y)
    found = gradients(pipe)
    frozen = {n for n in everything if n.startswith("stages.0.")} | {"stages.2.0.weight"}
    assert_same(found, {n: g for n, g in everything.items() if n not in frozen}, 1e-12)
    # thawed between two steps, without a new pipeline
    net.stages[0].requires_grad_(True)
    pipe.zero_grad()
    pipe.step(x, target=y)
    assert "stages.0.0.weight" in gradients(pipe)


def test_parameters_that_a_stage_does_not_use_have_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(x)
            return y

    stages = [Unused(), Unused()]
    pipe = nwise.Pipeline(stages, [nn.Linear(3, 3)], strategy="2-wise")
    pipe.step(torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0]))
    assert stages[0].used.weight.grad is not None
    assert stages[0].unused.weight.grad is None


def test_main_and_head_parameters_are_all_parameters() -> None:
    net = perceptron(3)
    pipe = pipeline(net, "local")
    main, heads = list(pipe.main_parameters()), list(pipe.head_parameters())
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in main + heads}
    assert len(heads) == 4
    assert pipe.credit.dtype == torch.float64
    assert set(dict(pipe.named_parameters())) >= {"stages.0.0.weight", "heads.0.weight"}


# Data types, devices, recomputation, compilation


def test_several_dtypes_between_stages() -> None:
    class To(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=dtype)
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x.to(self.dtype))
            return y

    stages = [To(torch.float64), To(torch.bfloat16), To(torch.float32)]
    heads = [To(torch.float32), To(torch.float64)]
    pipe = nwise.Pipeline(stages, heads, cross_entropy, "3-wise", 2)
    pipe.step(torch.randn(5, 4), target=torch.tensor([0, 1, 2, 3, 0]))
    assert [s.linear.weight.grad.dtype for s in stages if s.linear.weight.grad is not None] == [
        torch.float64,
        torch.bfloat16,
        torch.float32,
    ]


@pytest.mark.parametrize("strategy", ["local", "2-wise", "3-wise-mean", "end-to-end"])
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_gradients_are_close_to_float32(strategy: str, recompute: bool) -> None:
    net = perceptron(3)
    x, y = net.draw(64)
    exact, short = pipeline(net, strategy), pipeline(net, strategy, recompute=recompute)
    exact.step(x, target=y)
    wanted = {n: g.clone() for n, g in gradients(exact).items()}
    exact.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        losses = short.step(x, target=y)
    assert losses.dtype == torch.float32
    found = gradients(short)
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], gradient, rtol=0.1, atol=0.01, msg=name)


def test_autocast_around_the_loop_casts_the_present_weights() -> None:
    """torch keeps the bf16 weights of the first forward until the context ends: later steps trained with stale ones."""

    def trained(*, around: bool) -> list[Tensor]:
        torch.manual_seed(0)
        pipe = nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], [nn.Linear(4, 4)], nn.MSELoss(), "2-wise", seed=0)
        update = torch.optim.SGD(pipe.parameters(), lr=0.5)
        with torch.autocast("cpu", torch.bfloat16) if around else nullcontext():
            for _ in range(4):
                x = torch.randn(6, 4)
                with torch.autocast("cpu", torch.bfloat16):
                    pipe.step(x, target=x)
                update.step()
                update.zero_grad()
        return list(pipe.parameters())

    assert all(map(torch.equal, trained(around=False), trained(around=True)))


def test_passes_of_a_layer_without_autocast_run_without_it() -> None:
    """A stage that turns autocast off for its forward had its gradients computed in bfloat16 if the passes ran under it."""

    class Exact(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x)

    stages = [Exact(3, 3), Exact(3, 3)]
    pipe = nwise.Pipeline(stages, None, nn.functional.mse_loss, "end-to-end")
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pipe.step(x, target=y)
        found.append(gradients(pipe))
        pipe.zero_grad()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def gradients_of(net: Net, strategy: str, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a plain pipeline gives; the network is left without gradients."""
    pipe = pipeline(net, strategy)
    pipe.step(x, target=y)
    found = {n: g.clone() for n, g in gradients(pipe).items()}
    pipe.zero_grad()
    return found


_MORE = pytest.mark.slow("the same code for another strategy, which takes a second to compile")


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        ("2-wise", "aot_eager"),
        ("3-wise-mean", "aot_eager"),
        ("end-to-end", "aot_eager"),
        ("3-wise-mean", "inductor"),
        pytest.param("2-wise", "inductor", marks=_MORE),
        pytest.param("end-to-end", "inductor", marks=_MORE),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_blocks_compute_the_same(strategy: str, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    net = tokens(3)
    x, y = net.draw(4)
    wanted = gradients_of(net, strategy, x, y)
    for module in (*net.stages, *net.heads):
        assert module is not None
        module.compile(backend=backend)
    compiled = pipeline(net, strategy, recompute=strategy == "2-wise")
    compiled.step(x, target=y)
    assert_same(gradients(compiled), wanted, 1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_pipeline_recompiles_graphs_with_donated_buffers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with donated buffers a graph's second pass in 3-wise-mean failed, or would be silently wrong."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch._functorch.config.donated_buffer = True  # torch's default, which an earlier test may have changed
    net = tokens(3)
    x, y = net.draw(4)
    wanted = gradients_of(net, "3-wise-mean", x, y)
    for module in (*net.stages, *net.heads):
        assert module is not None
        module.compile(backend=backend)
    with monkeypatch.context() as patch:
        patch.setattr("nwise.compiled.keep_buffers", lambda: None)
        # Whether a second pass is refused here depends on what the compiler makes of the graphs and on its caches.
        with suppress(RuntimeError):
            pipeline(net, "3-wise-mean").step(x, target=y)
    compiled = pipeline(net, "3-wise-mean")
    compiled.zero_grad()
    compiled.step(x, target=y)
    assert_same(gradients(compiled), wanted, 1e-5)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, about itself
def test_every_module_is_compiled_and_equal_ones_once() -> None:
    """Regression: torch compiled eight modules; all others ran uncompiled, after no more than a line of its log."""
    numbers = count()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        next(numbers)
        return graph.forward

    torch.compiler.reset()
    for depth in (*range(1, 11), 5, 5):
        module = nn.Sequential(*[nn.ReLU()] * depth)
        nwise.compile_module(module, backend)
        assert torch.equal(module(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    torch.compiler.reset()
    assert next(numbers) == 10


# Inference


def test_evaluation_does_not_change_training() -> None:
    from nwise.app.data import digits
    from nwise.app.training import evaluate

    train, test = digits()
    results = []
    for evaluations in (0, 1):
        model = nwise.app.models.convnet(3, in_channels=1, image_size=8)
        pipe = nwise.Pipeline(model.stages, model.heads, cross_entropy, "2-wise", seed=0)
        pipe.heads["0"].eval()  # a mode that a user chose
        x, y = train.batch(torch.arange(32))
        pipe.step(x, target=y)
        for _ in range(evaluations):
            evaluate(pipe, test, 100)
        pipe.step(x, target=y)
        assert pipe.training
        assert not pipe.heads["0"].training
        results.append({n: t.clone() for n, t in [*pipe.named_buffers(), *gradients(pipe).items()]})
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


# Refusals: what it should be, what was found


def two() -> list[nn.Module]:
    return linears(3, 3, 3)


tied = nn.Linear(3, 3)


def made(*arguments: Any, **options: Any) -> nwise.Pipeline:
    return nwise.Pipeline(two(), [nn.Linear(3, 3)], *arguments, **options)


WRONG_TYPES: list[tuple[Callable[[], Any], str]] = [
    (lambda: nwise.Pipeline([]), "`stages` should be one or more nn.Modules, .*. Found none"),
    (lambda: nwise.Pipeline([1]), "Found int"),  # type: ignore[list-item]
    (
        lambda: nwise.Pipeline(two(), cross_entropy),  # type: ignore[arg-type]
        "`heads` should be a list of nn.Modules or None. Found function",
    ),
    (
        lambda: nwise.Pipeline(two(), ["x"]),  # type: ignore[list-item]
        r"`heads\[0\]` should be an nn.Module, a function that makes it, or None. Found str",
    ),
    (lambda: made(3), "`loss_fn` should be callable.*Found int"),
]
WRONG_VALUES: list[tuple[Callable[[], Any], str]] = [
    (lambda: nwise.Pipeline(two(), []), r"`heads` should have 1 entries, one for every stage but the last.*Found 0"),
    (lambda: nwise.Pipeline(two(), strategy="local"), "a head for stage 0, whose loss 'local' needs"),
    (lambda: nwise.Pipeline(linears(3, 3, 3, 3), [None, nn.Linear(3, 3)], strategy="local"), "a head for stage 0"),
    (lambda: nwise.Pipeline(two(), strategy="rotating-2"), "a head for stage 0, whose loss 'rotating-2' needs"),
    (lambda: made([cross_entropy]), "one function or a list of 2. Found 1"),
    (
        lambda: made(nn.Bilinear(3, 3, 1)),
        "`loss_fn` should have no parameters. Found some in Bilinear; put them into the heads",
    ),
    (
        lambda: made(functools.partial(cross_entropy, reduction="sum")),
        "mean over a micro-batch. Found reduction = 'sum'; use reduction='mean'",
    ),
    (lambda: made(nn.CrossEntropyLoss(reduction="none")), "Found reduction = 'none'"),
    (
        lambda: nwise.Pipeline([tied, nn.Sequential(tied)], [nn.Linear(3, 3)]),
        r"to one stage, or to heads and the output. Found stages.0.weight again as stages.1.0.weight; untie them",
    ),
    (lambda: nwise.Pipeline([tied, nn.Linear(3, 3)], [tied]), "Found stages.0.weight again as heads.0.weight"),
    (lambda: made(num_microbatches=0), "`num_microbatches` should be an integer of at least 1. Found 0"),
    (lambda: made(strategy=nwise.Credit([[1]])), "each of the 2 stages. Found 1"),
    (lambda: made(strategy="1.5-wise"), "Found '1.5-wise'"),
]


@pytest.mark.parametrize(
    ("error", "build", "message"),
    [(error, *case) for error, cases in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES)) for case in cases],
)
def test_invalid_pipeline_arguments_raise(error: type[Exception], build: Callable[[], Any], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x * self.weight)


X, Y = torch.ones(4, 3), torch.tensor([0, 1, 2, 0])


def in_place() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))


# What is not as in a step that is right: stages, heads, options, the input `x` and the target `y`.
Steps = list[tuple[dict[str, Any], str]]
WRONG_STEP_TYPES: Steps = [
    ({"y": 3}, "`target` should be a tensor, a tuple of tensors or a dictionary of them. Found int"),
    ({"x": "text"}, "input of `step` should be a tensor, a tuple .*Found tuple of str"),
    (
        {"stages": [Returns(lambda y: {"logits": y, "cache": None}), nn.Linear(3, 3)]},
        "output of stage 0 should have a tensor under every name. Found NoneType under 'cache'; convert it or leave it out",
    ),
    ({"stages": [Returns(lambda y: (y, None)), nn.Linear(3, 3)]}, "Found tuple of Tensor, NoneType"),
]
HEAD_IN_PLACE = "The head or loss of stage 0 should not change its input or target in place"
WRONG_STEP_VALUES: Steps = [
    ({"num_microbatches": 5}, "at most the 4 samples of the mini-batch, over all replicas. Found 5; use fewer"),
    ({"num_microbatches": 2, "y": Y[:3]}, "`target` should have the input's 4 samples. Found 3"),
    (
        {"num_microbatches": 2, "y": torch.tensor(3)},
        "`target` should have samples along dimension 0. Found a tensor without dimensions; cut the mini-batch yourself",
    ),
    (
        {"stages": [nn.Linear(3, 3), in_place()]},
        "Stage 1 should not change its input or target in place.*set `inplace=False`",
    ),
    (
        {"stages": [nn.Linear(3, 3), in_place()], "strategy": "local"},
        "Stage 1 should not change its input or target in place",
    ),
    ({"heads": [in_place()], "strategy": "local"}, HEAD_IN_PLACE),
    ({"heads": [in_place()], "strategy": nwise.EndToEnd(heads="all")}, HEAD_IN_PLACE),
    (
        {"loss_fn": lambda output, target: output.sum(1)},
        r"`loss_fn` of stage 1 should return one number, the mean over the micro-batch. Found shape \(4,\)",
    ),
    ({"loss_fn": lambda output, target: 1.0}, "Found float"),
    (
        {"loss_fn": lambda output, target: output.detach().mean()},
        "loss of stage 1 should depend on the stage's output.*Found a loss without gradient",
    ),
    ({"num_microbatches": 2, "y": torch.full((4,), -100)}, "at least one term that counts. Found only ignored ones"),
]


@pytest.mark.parametrize(
    ("error", "given", "message"),
    [(kind, *one) for kind, all_ in ((TypeError, WRONG_STEP_TYPES), (ValueError, WRONG_STEP_VALUES)) for one in all_],
)
def test_invalid_step_inputs_and_outputs_raise(error: type[Exception], given: dict[str, Any], message: str) -> None:
    given = {"stages": two(), "heads": [nn.Linear(3, 3)], "strategy": "2-wise", "x": X, "y": Y, **given}
    x, y = given.pop("x"), given.pop("y")
    pipe = nwise.Pipeline(**given)
    with pytest.raises(error, match=message):
        pipe.step(x, target=y)


def test_error_after_an_in_place_change_is_the_modules_own() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            raise KeyError("mine")

    pipe = nwise.Pipeline([Broken(), nn.Linear(3, 3)], None, strategy="end-to-end")
    with pytest.raises(KeyError, match="mine"):
        pipe.step(torch.randn(4, 3), target=torch.tensor([0, 1, 2, 0]))


# What is said of a pipeline, and what it is not given


def test_summary_lists_head_sizes_credit_and_passes() -> None:
    pipe = nwise.Pipeline(linears(3, 4, 4, 2), [nn.Linear(4, 2), None], strategy="end-to-end", num_microbatches=2)
    pipe.strategy = nwise.Credit([[0.5, 0, 0], [0, 0, 0], [0.5, 1, 1]])
    assert pipe.summary().splitlines() == [
        "3 stages, credit-0.5,0,0;0,0,0;0.5,1,1, 2 micro-batches",
        "stage  parameters       head                 learns from  passes  sends back",
        "    0          16         10  0.5 × loss 0, 0.5 × loss 2       1           0",
        "    1          20          –                      loss 2       1           1",
        "    2          10     output                      loss 2       1           1",
        "  all          46  10 (22 %)                                   3           2",
    ]


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_uninitialised_lazy_module_raises() -> None:
    lazy = nn.LazyBatchNorm1d(affine=False)
    with pytest.raises(
        ValueError, match=r"Found stages.0.running_mean of a lazy module without any; run the network once"
    ):
        nwise.Pipeline([lazy, nn.Linear(3, 3)], strategy="end-to-end")
    lazy(torch.randn(4, 3))
    nwise.Pipeline([lazy, nn.Linear(3, 3)], strategy="end-to-end").step(X, target=Y)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # since torch 2.15
def test_torchscript_stages_train_within_their_limits() -> None:
    def scripted(strategy: str, m: int = 1, **options: Any) -> nwise.Pipeline:
        first = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        return nwise.Pipeline([first, nn.Linear(3, 3)], [nn.Linear(3, 3)], cross_entropy, strategy, m, **options)

    pipe = scripted("local")
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    with pytest.raises(IndexError):
        pipe.step(X, target=Y + 99)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items()), "no trace"
    pipe.step(X, target=Y)
    assert all(p.grad is not None for p in pipe.parameters())
    with pytest.raises(ValueError, match="Stage 0 should not be TorchScript.*as under a delay or with `recompute`"):
        scripted("2-wise", recompute=True).step(X, target=Y)
    with pytest.warns(UserWarning, match=r"With 2 micro-batches, batch norm .* \(stages.0.1\)"):
        pipe = scripted("local", 2)
    with pytest.raises(ValueError, match="Batch norms should be deferred before they are scripted. Found 'stages.0.1'"):
        nwise.defer_batchnorm(pipe)


@pytest.mark.parametrize("strategy", ["2-wise", "2-wise-delay-1"])
def test_pipelines_are_freed_without_the_garbage_collector(strategy: str) -> None:
    """Regression: a hook held the pipeline that it belonged to, and with it all parameters and gradients."""
    stages, heads = [nn.Linear(4, 4), nn.Linear(4, 3)], [nn.Linear(4, 3)]
    pipe = nwise.Pipeline(stages, heads, strategy=strategy)
    for _ in range(3):
        pipe.step(torch.randn(2, 4), target=torch.tensor([0, 1]))
    found = weakref.ref(stages[0].weight)
    gc.disable()
    try:
        del pipe, stages, heads
        assert found() is None
    finally:
        gc.enable()


def test_steps_from_a_file_may_be_a_tensor() -> None:
    """No stage was trained from then on."""
    pipe = nwise.Pipeline([nn.Linear(2, 2)], strategy="end-to-end")
    pipe.steps = torch.tensor(3)  # type: ignore[assignment]
    assert type(pipe.steps) is int
    assert torch.isfinite(pipe.step(torch.ones(2, 2), target=torch.tensor([0, 1]))).all()
    assert pipe.steps == 4
    assert isinstance(pipe.steps, int)


@pytest.mark.parametrize(
    ("context", "name"),
    [(torch.inference_mode, "torch.inference_mode"), (parametrize.cached, "torch.nn.utils.parametrize.cached")],
)
def test_contexts_that_change_gradients_are_refused(context: Any, name: str) -> None:
    """Regression: a cached parametrization left no gradient, in silence; inference mode ended in words about the loss."""
    pipe = nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 3)], strategy="end-to-end")
    with context(), pytest.raises(ValueError, match=f"`step` should run outside `{name}`.*Found it on; end it first"):
        pipe.step(torch.zeros(2, 4), target=torch.tensor([0, 1]))
    assert pipe.steps == 0


def test_parameters_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        stages = [nn.Linear(4, 4), nn.Linear(4, 3)]
    with pytest.raises(ValueError, match=r"`stages\[0\]` should be made outside `torch.inference_mode`.*copy.deepcopy"):
        nwise.Pipeline(stages, strategy="end-to-end")
    nwise.Pipeline(copy.deepcopy(stages), strategy="end-to-end")


def test_losses_cannot_be_replaced() -> None:
    """Regression: an assignment had no effect, without a word."""
    pipe = nwise.Pipeline([nn.Linear(4, 4), nn.Linear(4, 3)], strategy="end-to-end")
    with pytest.raises(
        AttributeError, match="`loss_fns` should stay as the pipeline was made.*Found an assignment; make another"
    ):
        pipe.loss_fns = (nn.CrossEntropyLoss(),) * 2
    assert pipe.loss_fns == (nn.functional.cross_entropy,) * 2
