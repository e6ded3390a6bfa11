"""The runtime of many processes where the plain loop ends: other shapes, evaluation, clipping, refusals, the command line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nwise
from benchmarks.runtime.bench import Case, measure
from benchmarks.runtime.command import main as bench
from launch import RANKS, forked, results
from nwise.app.cli import run
from nwise.app.cli.output import Output
from nwise.app.cli.report import _print_comparison
from nwise.app.report.charts import utilisation
from nwise.app.report.grid import row_names
from nwise.app.report.measured import Comparison
from nwise.app.training.optimizers import parameter_groups
from nwise.app.training.timeline import load
from nwise.runtime.processes import Processes
from nwise.runtime.shapes import Spec, check_sendable, from_json, make_spec, packed, to_json, unpacked
from nwise.schedule import best, simulate
from nwise.schedule.actions import Action, Kind
from nwise.schedule.costs import PAPER, Costs
from nwise.schedule.named import ORDERS, choose
from nwise.training.clip import Clip, clip_groups
from ranks import edges
from ranks.common import batches, pipeline


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return results(edges.A, "edges.py", tmp_path_factory.mktemp("edges"))


@pytest.mark.parametrize("name", edges.CASES)
def test_multi_process_matches_single_process(name: str, found: list[Any]) -> None:
    expected = json.loads(json.dumps(edges.CASES[name]()))
    together: dict[str, Any] = {}
    for rank in range(edges.A):
        here = found[rank][name]
        assert {key.split(".")[1] for key in here if "." in key} <= {str(rank)}
        together |= here
    assert together == expected


def test_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    arguments = ["-m", "nwise", "train", "digits", "--runs", str(tmp_path), "--max-steps", "2", "--num-stages", "2"]
    done = forked(3, arguments, tmp_path)
    assert done.returncode != 0
    assert "`torchrun` should start at most 2 processes, one for each stage, or a multiple of 2. Found 3" in done.stderr
    assert "nwise/pipeline.py" not in done.stderr, "no traceback of ours"


def test_ranks_whose_strategies_differ_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "disagree.py"
    script.write_text(
        "import os\nfrom ranks.common import pipeline\npipeline(2, ['local', '2-wise-mean'][int(os.environ['RANK'])], 1)\n"
    )
    done = forked(2, [str(script)], tmp_path)
    assert done.returncode != 0
    assert (
        "`strategy` should be the same on every rank. Found 'local' on rank 0 and '2-wise-mean' on rank 1"
        in done.stderr
    )


def test_failed_step_leaves_no_trace_on_its_rank(tmp_path: Path) -> None:
    """The other ranks stop because their messages never arrive."""
    done = forked(2, [str(RANKS / "undone.py"), str(tmp_path)], tmp_path)
    assert "rank 0 (stage 0) stops: Rank 1 (stage 1) failed at" in done.stderr
    found = json.loads((tmp_path / "1.json").read_text())
    assert found["same"]
    assert found["gradients"] >= 4
    assert "the fault of this test" in found["error"]


def test_ranks_whose_schedules_differ_are_refused(tmp_path: Path) -> None:
    """Regression: lists of equal shapes in another order trained a micro-batch with another one's gradient."""
    script = tmp_path / "schedules.py"
    script.write_text(
        "import os\n"
        "from ranks.common import batches, pipeline\n"
        "order = ['skewed', 'depth-first'][int(os.environ['RANK'])]\n"
        "pipe = pipeline(2, '2-wise', 2, schedule=order)\n"
        "for x, y in batches(1):\n    pipe.step(x, target=y)\n"
    )
    done = forked(2, [str(script)], tmp_path)
    assert done.returncode != 0
    assert re.search(
        r"Every rank should have the same schedule. Found lists that differ from those of rank [01]; make the same calls",
        done.stderr,
    )


def test_output_whose_size_depends_on_values_ends_all_ranks_at_once(tmp_path: Path) -> None:
    """Regression: shapes came from a run on fake tensors, which refused such stages on one rank, with torch's words, while the
    others waited."""
    script = tmp_path / "picks.py"
    script.write_text(
        "import nwise, torch\nfrom torch import nn\n"
        "class Picks(nn.Module):\n    def forward(self, x):\n        return x[x[:, 0] > 0]\n"
        "stages = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Picks()), nn.Identity()]\n"
        "pipe = nwise.Pipeline(stages, None, lambda y, _: y.sum(), 'end-to-end')\n"
        "stages[1][0].weight.data, stages[1][0].bias.data = torch.eye(2), torch.zeros(2)\n"
        "stages[0].weight.data, stages[0].bias.data = torch.eye(2), torch.zeros(2)\n"
        "for x in ([[1, 1], [1, 1]], [[1, 1], [2, 2]], [[1, 1], [-1, 1]]):\n    pipe.step(torch.tensor(x).float())\n"
    )
    began = time.monotonic()
    done = forked(3, [str(script)], tmp_path)
    said = re.findall(r"^nwise: rank \d .* stops: (.*)$", done.stderr, re.MULTILINE)
    assert time.monotonic() - began < 100, "and not the time limit"
    assert len(said) == 3
    assert len(set(said)) == 1
    assert re.fullmatch(
        r"Rank 1 \(stage 1\) failed at SX1\(0\) .* of step 2: ValueError: The output of stage 1 should have the same shapes, "
        r"dtypes and names .*\. Found float32 \[1, 2\], after float32 \[2, 2\] earlier; pad an output .*",
        said[0],
    )


ODD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, "sparse_coo"),
    "nested": (lambda y: torch.nested.as_nested_tensor([y], layout=torch.jagged), "nested"),
    "quantized": (lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8), "quantized"),
    "meta": (lambda y: y.to("meta"), "on the device 'meta'"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ODD)
def test_outputs_that_cannot_travel_are_named(kind: str) -> None:
    """Regression: torch's words about storages or JSON ended the ranks; an output on the device meta hung them."""
    function, found = ODD[kind]
    message = f"The output of stage 3 should be dense tensors on the device 'cpu'.*Found a tensor that is {found};"
    check_sendable((torch.ones(2), torch.ones(1, 3).T), 3, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        check_sendable((torch.ones(2), function(torch.ones(2, 2))), 3, torch.device("cpu"))


def test_nested_tensors_have_no_spec() -> None:
    """Regression: several processes ended with torch's words, such as that a SymInt is not JSON serializable."""
    with pytest.raises(ValueError, match="should have a shape that all of them know. Found a nested tensor; pass"):
        make_spec(torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))


def test_mini_batches_of_other_shapes_end_all_ranks_soon(tmp_path: Path) -> None:
    """Shapes that both ranks know: no header tells the difference. A process test, because gloo ended the process.

    Regression: the last batch of one rank was larger, and a message met memory of another size.
    """
    script = tmp_path / "lengths.py"
    script.write_text(
        "import os, torch\nfrom ranks.common import batches, pipeline\npipe = pipeline(2, '2-wise', 1)\n"
        "for x, y in batches(3, sizes=(4, 5, 4 + int(os.environ['RANK']))):\n    pipe.step(x, target=y)\n"
    )
    done = forked(2, [str(script)], tmp_path)
    assert done.returncode == 1, done.stderr
    assert re.search(
        r"should get mini-batches of the same shapes as rank \d. Found micro-batches, 1 of float32 \[\d, 6\] in step 2",
        done.stderr,
    ), done.stderr


def test_rank_with_fewer_steps_fails_all_ranks(tmp_path: Path) -> None:
    """Regression: local training showed the difference only at its end, and the exit code was 0."""
    script = tmp_path / "fewer.py"
    script.write_text(
        "import os\nfrom ranks.common import batches, pipeline\npipe = pipeline(2, 'local', 1)\n"
        "for x, y in batches(3 - int(os.environ['RANK'])):\n    pipe.step(x, target=y)\n"
    )
    done = forked(2, [str(script)], tmp_path)
    assert done.returncode != 0
    assert re.search(
        r"All ranks should make the same calls of nwise|Found (step 2 .*|the end .*) on rank [01] and (step 2|the end)",
        done.stderr,
    )


@pytest.mark.parametrize("call", ["pipe.step(x[:3], target=y[:3])", "gather_weights(pipe)"])
def test_rank_leaving_before_a_call_of_all_ends_all_ranks(call: str, tmp_path: Path) -> None:
    """Regression: with a batch of another shape, or a function of all ranks that one rank calls, that rank waited unwatched for
    twenty minutes. Then the other one was blamed."""
    script = tmp_path / "leaving.py"
    script.write_text(
        "import os\nfrom nwise.training import gather_weights\nfrom ranks.common import batches, pipeline\n"
        "pipe = pipeline(2, '2-wise', 1)\nfor x, y in batches(2):\n    pipe.step(x, target=y)\n"
        f"if os.environ['RANK'] == '0':\n    {call}\n"
    )
    began = time.monotonic()
    done = forked(2, [str(script)], tmp_path)
    assert done.returncode != 0
    place = rf"\(`{'Pipeline.step' if 'step' in call else 'gather_weights'}` in leaving.py, line 8\)"
    assert re.search(
        rf"Found (.* {place} on rank 0 and the end|the end .* on rank 1 and .* {place} on rank 0)", done.stderr
    )
    assert time.monotonic() - began < 100, "and not 4 x 300 seconds"


@pytest.mark.parametrize("call", ["gather_weights(pipe)", "pipe(x)", "Clip(pipe, 1.0)()"])
def test_call_of_one_rank_only_is_found_at_once(call: str, tmp_path: Path) -> None:
    """Regression: ``if rank == 0: gather_weights(pipe)`` between two steps hung for twenty minutes without a word."""
    script = tmp_path / "guarded.py"
    script.write_text(
        "import os\nfrom nwise.training import gather_weights\nfrom nwise.training.clip import Clip\n"
        "from ranks.common import batches, pipeline\n"
        "pipe = pipeline(2, '2-wise', 1)\nfor x, y in batches(3):\n    pipe.step(x, target=y)\n"
        f"    if os.environ['RANK'] == '0':\n        {call}\n"
    )
    began = time.monotonic()
    done = forked(2, [str(script)], tmp_path)
    assert done.returncode != 0
    assert re.search(
        r"Found .* \(`.*` in guarded.py, line [79]\) on rank [01] and .* \(`.*` in guarded.py, line [79]\) on rank [01]; make",
        done.stderr,
    ), done.stderr
    assert time.monotonic() - began < 60, "and not 4 x 300 seconds"


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
    assert numbers["bytes"] == [
        {"measured": one["predicted"], "predicted": one["predicted"]} for one in numbers["bytes"]
    ]
    assert numbers["period_ms"]["measured"] > 0
    trace = json.loads((many / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in trace} == {0, 1}
    assert run(["report", str(many)]) == 0
    assert "Largest deviations" in capsys.readouterr().out
    assert run(["report", str(one)]) == 0
    assert "measured" not in capsys.readouterr().out


@pytest.mark.slow("a developer's instrument, which starts torchrun twice")
def test_bench_runtime_counts_slots_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Assert counts, but no time that a busy machine could spoil."""
    assert bench(["--stages", "3", "--slot-ms", "5", "--batches", "4", "--rounds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_slots"] == 4
    assert found["measured_slots"] > 3.99, "time does not run faster"
    assert found["efficiency"] == pytest.approx(found["predicted_slots"] / found["measured_slots"])
    assert found["bytes_sent"] == found["bytes_predicted"] == [[8, 0], [8, 8], [0, 8]]
    assert bench(["--stages", "2", "--slot-ms", "2", "--batches", "2", "--rounds", "1"]) == 0
    assert "as predicted" in capsys.readouterr().out


def test_virtual_stages_have_what_the_engine_reads() -> None:
    """Regression: the benchmark failed, because its stages lacked `Stage.learns`; only a slow test ran it."""
    found = measure(Processes(2), Case(stages=2, ranks=1, slot_ms=0.1, batches=1, rounds=1))
    assert found.predicted_slots == 4
    assert found.bytes_sent == found.bytes_predicted == [(0, 0)], "one process sends nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "0"], "`stages` should be an integer of at least 1"),
        (["--slot-ms", "0"], "`slot_ms` should be above 0"),
        (["--message-mib", "-1"], "`message_mib` should be from 0"),
        (["--strategy", "3wise"], "`strategy` should be one like"),
        (["--costs", "1,2"], "Costs should have"),
    ],
)
def test_bad_benchmarks_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(arguments) == 2
    assert message in capsys.readouterr().err


NAMESPACES = """
set -e
ip netns add nwise_a; ip netns add nwise_b
trap 'ip netns del nwise_a; ip netns del nwise_b' EXIT
ip link add nwise_va type veth peer name nwise_vb
ip link set nwise_va netns nwise_a; ip link set nwise_vb netns nwise_b
ip netns exec nwise_a sh -c 'ip addr add 10.77.0.1/24 dev nwise_va; ip link set nwise_va up; ip link set lo up'
ip netns exec nwise_b sh -c 'ip addr add 10.77.0.2/24 dev nwise_vb; ip link set nwise_vb up; ip link set lo up'
run() { ip netns exec $1 env GLOO_SOCKET_IFNAME=$2 TP_SOCKET_IFNAME=$2 $PYTHON -m torch.distributed.run --nnodes 2 \
  --node-rank $3 --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29511 $SCRIPT $FOLDER 4; }
run nwise_b nwise_vb 1 & other=$!
run nwise_a nwise_va 0
wait $other
"""


def namespaces_allowed() -> bool:
    try:
        made = subprocess.run(["ip", "netns", "add", "nwise_probe"], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", "nwise_probe"], check=True)
    return made.returncode == 0


@pytest.mark.slow("two launchers in network namespaces")
def test_two_nodes_match_single_process_bitwise(tmp_path: Path) -> None:
    """Two launchers run in separate network namespaces, joined by a virtual cable."""
    if not namespaces_allowed():
        pytest.skip("network namespaces are not allowed here")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "SCRIPT": str(RANKS / "two_nodes.py"),
        "FOLDER": str(tmp_path),
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RANKS.parent)}
    done = subprocess.run(
        ["bash", "-c", NAMESPACES], capture_output=True, text=True, env=environment, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    together: dict[str, str] = {}
    for rank in range(4):
        together |= json.loads((tmp_path / f"{rank}.json").read_text())
    from ranks.two_nodes import case

    assert together == case(4)


def test_schedule_is_chosen_by_name() -> None:
    flows = best("2-wise", num_stages=3, num_microbatches=2, costs=Costs(1, 0, 1, 1)).schedule.flows
    for order in ORDERS:
        assert choose(order, flows).flows == flows
    with pytest.raises(ValueError, match=r"`schedule` should be one of best, .*Found 'gpip'"):
        choose("gpip", flows)
    with pytest.raises(TypeError, match="`schedule` should be a Schedule or one of .*Found int"):
        choose(3, flows)  # type: ignore[arg-type]
    other = best("end-to-end", num_stages=3, num_microbatches=2, costs=Costs(1, 0, 1, 1))
    with pytest.raises(ValueError, match="should be made for the pipeline's strategy"):
        choose(other, flows)


def test_custom_schedule_is_run() -> None:
    found = best("2-wise", num_stages=3, num_microbatches=2, costs=Costs(1, 0, 1, 1))
    ran: list[Action] = []
    pipe = pipeline(3, "2-wise", 2, schedule=found)
    pipe.on_action = ran.append
    pipe.step(torch.randn(4, 6), target=torch.zeros(4, dtype=torch.int64))
    for k, actions in enumerate(found.schedule.work):
        assert [a for a in ran if a.stage == k] == [a for a in actions if a.kind is not Kind.UPDATE]


def test_gradient_messages_leave_out_integer_tensors() -> None:
    specs = (Spec((2, 3), torch.float32), Spec((2,), torch.int64), Spec((2, 1), torch.bfloat16))
    assert from_json(to_json(specs)) == specs
    gradient = torch.ones(2, 3)
    sent, absent = packed((gradient, None, None), specs, torch.device("cpu"))
    assert sent[0] is gradient
    assert torch.equal(sent[1], torch.zeros(2, 1, dtype=torch.bfloat16))
    assert absent == [1]
    assert [g is None for g in unpacked(sent, specs)] == [False, True, False]


def test_clip_groups() -> None:
    pipe = pipeline(3, "2-wise", 1)
    everything = tuple(sorted([(0, False), (1, False), (2, False), (0, True), (1, True)]))
    assert clip_groups(pipe, "global") == [everything]
    assert clip_groups(pipe, "stage") == [((0, False), (0, True)), ((1, False), (1, True)), ((2, False),)]
    assert clip_groups(pipe, "loss") == [((0, False), (1, True)), ((0, True),), ((1, False), (2, False))]
    with pytest.raises(ValueError, match="`clip_by` should be global, stage or loss. Found 'all'"):
        clip_groups(pipe, "all")  # type: ignore[arg-type]


def test_learning_rates_by_stage() -> None:
    pipe = pipeline(3, "2-wise", 1)
    groups = parameter_groups(pipe, 0.1, (1.0, 0.5, 2.0))
    assert [group["lr"] for group in groups] == [0.1, 0.05, 0.2]
    assert sum(len(group["params"]) for group in groups) == len(list(pipe.parameters()))


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf"])
def test_bad_time_limits_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nwise.runtime.launch import time_limit

    monkeypatch.setenv("NWISE_TIMEOUT", text)
    with pytest.raises(ValueError, match=r"`(NWISE_TIMEOUT|timeout)` should be a number of seconds"):
        time_limit(None)


def test_measured_run_is_compared_with_its_prediction() -> None:
    """The measured times are simulated, plus one delay that the prediction does not know."""
    costs = Costs(forward=2.0, head=1.0, input_grad=3.0, weight_grad=2.0, chain_share=0.0)
    schedule = best("2-wise", num_stages=3, num_microbatches=1, costs=costs).schedule
    line = simulate(schedule, costs, cycles=6)
    stages: list[list[tuple[int, Action, float, float]]] = [[] for _ in range(3)]
    for e in line.events:
        late = 1e-3 if e.action.kind is Kind.WEIGHT_GRAD and e.action.stage == 1 else 0.0
        stages[e.action.stage].append((e.cycle, e.action, e.start / 1e3 + late, e.end / 1e3 + late))
    found = Comparison(schedule, stages, [])
    assert found.costs.per_stage("forward", 3) == pytest.approx((2, 2, 2))
    assert found.costs.per_stage("input_grad", 3)[1] == pytest.approx(3)
    assert found.period == pytest.approx(line.period)
    assert found.predicted.period == pytest.approx(line.period)
    worst = found.deviations(1)[0]
    assert str(worst.action) == "W1(0)"
    assert worst.measured - worst.predicted == pytest.approx(1)


def test_ranks_with_several_stages_have_no_name_of_a_stage() -> None:
    """They were called stage 0, 1 and so on in the page and the table of a report."""
    schedule = best("2-wise", num_stages=4, num_microbatches=1, costs=PAPER, placement=[0, 0, 0, 1]).schedule
    ranks: list[list[tuple[int, Action, float, float]]] = [[], []]
    for e in simulate(schedule, PAPER, cycles=6).events:
        ranks[schedule.placement[e.action.stage]].append((e.cycle, e.action, e.start, e.end))
    found = Comparison(schedule, ranks, [{"measured": [8, 8], "predicted": [8, 8]}] * 2)
    chart = utilisation(row_names(schedule.placement), {"measured": found.utilisation})
    assert chart["data"][0]["x"] == ["rank 0", "rank 1"]
    console = Output(file=io.StringIO(), width=120)
    _print_comparison(console, types.SimpleNamespace(title="run", run=types.SimpleNamespace(folder=Path())), found)  # type: ignore[arg-type]
    assert "bytes sent by rank 1 in a step" in console.file.getvalue()  # type: ignore[attr-defined]


def test_broken_timeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with pytest.raises(FileNotFoundError, match="should hold a measured timeline"):
        load(path)
    path.write_text('{"events": [[["X", 0]]]}')
    with pytest.raises(ValueError, match="should hold a measured timeline. Found"):
        load(path)


def test_one_process_holds_all_stages() -> None:
    pipe = pipeline(2, "local", 1)
    assert (pipe.processes.size, pipe.processes.here) == (1, (0, 1))
    assert not pipe.drain()
    assert (
        nwise.Pipeline([nn.Linear(2, 2)], None, nn.functional.mse_loss, "local", schedule="phase").schedule == "phase"
    )


def test_cpu_network_beside_a_group_for_gpus(tmp_path: Path) -> None:
    """Regression: beside a GPU torch's default group has nccl alone, so networks on the CPU did not train in several processes.

    Gloo for GPUs alone refuses the same tensors.
    """
    script = tmp_path / "gpus.py"
    script.write_text(
        "import torch.distributed as dist\nfrom ranks.common import batches, closed, pipeline, write\n"
        "dist.init_process_group('cuda:gloo')\npipe = pipeline(2, '2-wise', 1)\n"
        "write(closed(pipe, [pipe.step(x, target=y)[-1].item() for x, y in batches(1)]))\n"
    )
    done = forked(2, [str(script), str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    pipe = pipeline(2, "2-wise", 1)
    losses = [pipe.step(x, target=y)[-1].item() for x, y in batches(1)]
    assert json.loads((tmp_path / "1.json").read_text()) == losses


def test_destroyed_process_group_leaves_no_error(tmp_path: Path) -> None:
    """Regression: after `dist.destroy_process_group()`, which torch asks for, two exit handlers of nwise raised errors."""
    script = tmp_path / "destroyed.py"
    script.write_text(
        "import torch.distributed as dist\nfrom ranks.common import batches, pipeline\npipe = pipeline(2, '2-wise', 1)\n"
        "for x, y in batches(2):\n    pipe.step(x, target=y)\n"
        "dist.destroy_process_group()\n"
    )
    done = forked(2, [str(script)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_clip_follows_a_switch() -> None:
    """Regression: a `Clip` made before the switch kept the groups of the first strategy."""

    def train(anew: bool) -> list[torch.Tensor]:
        pipe = pipeline(3, "local", 1)
        update, clip = torch.optim.SGD(pipe.parameters(), lr=0.1), Clip(pipe, 0.05, "loss")
        for x, y in batches(4):
            if pipe.steps == 2:
                pipe.strategy = "end-to-end"
            if anew and pipe.steps == 2:
                clip = Clip(pipe, 0.05, "loss")
            pipe.step(x, target=y)
            clip()
            update.step()
            update.zero_grad()
        return [p.detach() for p in pipe.parameters()]

    assert all(map(torch.equal, train(anew=False), train(anew=True)))
