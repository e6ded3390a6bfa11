"""The command line, in this process and as a newcomer starts it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch import forked, signal_when, started
from nwise.app import cli, models
from nwise.app.cli.dispatch import parse
from nwise.app.recipes import RECIPES

NARROW = ("--filters", "4")  # the digits in a tenth of the time


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def test_train_evaluate_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["train", *NARROW, "--epochs", "1", "--strategy", "3-wise", "--heads", "all"]) == 0
    out = capsys.readouterr().out
    assert "digits: 4 stages, 3-wise" in out
    assert "Run folder: runs/digits-3-wise-001" in out
    run = "runs/digits-3-wise-001"

    assert cli.run(["evaluate", run]) == 0
    assert "mean of the top 4" in capsys.readouterr().out
    assert cli.run(["evaluate", run, "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert len(scores["heads"]) == len(scores["ensembles"]) == 4
    assert scores["heads"][3] == pytest.approx(scores["ensembles"][0])

    assert cli.run(["export", run, "--out", f"{run}/weights.safetensors"]) == 2
    assert "another file than the run's own weights" in capsys.readouterr().err
    assert cli.run(["export", run, "--out", "out/net.safetensors"]) == 0
    weights = load_file(tmp_path / "out" / "net.safetensors")
    whole = models.convnet(1, filters=4, in_channels=1, image_size=8)
    assert not [name for name in weights if name.startswith(("heads", "model"))]
    stages = models.convnet(4, filters=4, in_channels=1, image_size=8).stages
    for stage in stages:
        stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    assert {name for stage in stages for name in stage.state_dict()} == set(weights)
    assert set(whole.stages[0].state_dict()) < set(weights)


def test_train_prints_only_json_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "digits", *NARROW, "--max-steps", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["run"]).is_dir()
    assert len(result["heads"]) == 4


def test_recipe_argument_may_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    command = parse("train", ["--max-steps", "2", "source-code", "--batch-size", "3"])
    expected = dataclasses.replace(RECIPES["source-code"](), max_steps=2, batch_size=3)
    assert (command.recipe, command.config) == ("source-code", expected)
    command = parse("train", ["--width", "64", "source-code"])  # an option of this recipe only
    assert (command.recipe, command.config.model.width) == ("source-code", 64)
    command = parse("train", ["--json", "--runs", "lm1b"])
    assert (command.recipe, command.runs, command.config) == ("digits", Path("lm1b"), RECIPES["digits"]())
    with pytest.raises(SystemExit):
        parse("train", ["--help"])
    assert "(default: digits)" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_compare_draws_and_tabulates(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "--filters", "2", "--max-steps"]
    assert cli.run([*arguments, "4", "--strategies", "local", "local@2,end-to-end", "--page", "f/c.html"]) == 0
    out = capsys.readouterr().out
    assert "equal time" in out
    assert "modelled and not measured" in out
    assert "end-to-end" in Path("f/c.html").read_text()
    assert cli.run([*arguments, "44", "--strategies", "local", "local@22,end-to-end", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    rows = record["results"]
    assert json.loads(Path("runs/compare-digits-002/compare.json").read_text())["results"] == rows
    assert record["versions"]["torch"] == torch.__version__
    assert [row["strategy"] for row in rows] == ["local", "local@22,end-to-end"]
    # 4 stages: 2 slots a local step, 8 an end-to-end one.
    assert [row["curve"]["slots"] for row in rows] == [[0, 44, 88], [0, 44, 44 + 22 * 8]]
    assert rows[0]["curve"]["values"][0] == rows[1]["curve"]["values"][0]
    # The budget is 88 slots: a quarter of the way from the test at 44 to that at 220.
    first, second = rows[1]["curve"]["values"][1:]
    assert rows[1]["at_equal_time"] == pytest.approx(0.75 * first + 0.25 * second)


def test_compare_gives_each_strategy_its_best_rate_and_several_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--filters", "2", "--max-steps", "44"]
    arguments = ["compare", *small, "--strategies", "local", "end-to-end", "--rates", "1e-9", "0.003", "--seeds", "2"]
    assert cli.run([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["strategy"], row["seed"], row["lr"]) for row in rows] == [
        ("local", 0, 0.003),
        ("local", 1, 0.003),
        ("end-to-end", 0, 0.003),
        ("end-to-end", 1, 0.003),
    ]
    assert rows[0]["curve"]["values"] != rows[1]["curve"]["values"]
    assert cli.run(["compare", *small, "--strategies", "local", "--lr", "0.003", "--seed", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["curve"] == rows[1]["curve"]
    assert cli.run(arguments) == 0
    assert re.search(r"local +│ +0\.003 +│ +\d+\.\d\d ± \d+\.\d\d", capsys.readouterr().out)


@pytest.mark.filterwarnings("ignore")
def test_a_rate_that_diverges_is_not_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a network of nan is right by chance, and its rate won; and no deviation of nan could be printed."""
    small = [
        "compare",
        "--filters",
        "2",
        "--max-steps",
        "6",
        "--strategies",
        "end-to-end",
        "end-to-end",
        "--seeds",
        "2",
    ]
    assert cli.run([*small, "--rates", "1e20", "0.001", "--json"]) == 0
    assert [row["lr"] for row in json.loads(capsys.readouterr().out)["results"]] == [0.001, 0.001]
    assert cli.run([*small, "--rates", "1e20"]) == 0
    assert "– ± –" in capsys.readouterr().out


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in RECIPES)
    assert cli.run(["recipes", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(RECIPES)


def test_flow_is_drawn() -> None:
    for name in ("flow.png", "flow.svg"):
        assert cli.run(["flow", "--strategy", "2-wise", "rotating-2", "--stages", "5", "--out", name]) == 0
        assert Path(name).stat().st_size > 1000


def test_export_to_an_unwritable_path_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: torch's own error came with a traceback."""
    assert cli.run(["train", *NARROW, "--max-steps", "1", "--json"]) == 0
    Path("closed.pt.part").mkdir()
    assert cli.run(["export", "runs/digits-2-wise-mean-001", "--out", "closed.pt"]) == 2
    assert "'closed.pt' should be a path that can be read and written. Found: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("chosen", "threads"), [(None, 1), ("3", 3)])
def test_digits_take_one_thread_unless_told(
    chosen: str | None, threads: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: beside other work `nwise compare` took six times as long, with a thread for every core."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert cli.run(["train", *NARROW, "--max-steps", "1"]) == 0
    finally:
        torch.set_num_threads(before)
    assert f"on cpu with {threads} thread" in capsys.readouterr().out


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.run([name, "--help"])
        out = capsys.readouterr().out
        [example] = re.findall(r"^Example: nwise (.*)$", out, re.M)
        parse(name, shlex.split(example)[1:])


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert cli.run(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in ("train", "compare", "evaluate", "export", "recipes", "flow"))
    for name in ("train", "compare", "evaluate", "export", "recipes", "flow"):
        with pytest.raises(SystemExit) as stop:
            cli.run([name, "--help"])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "Which loss trains which stage" in out
    for name in RECIPES:
        with pytest.raises(SystemExit) as stop:
            cli.run(["train", name, "--help"])
        assert stop.value.code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exits", "runs/x"], "Found 'exits'. Choose thresholds in a script, as `examples/exits.py` does"),
        (["train", "--log-to", "wandb"], "should log by a callback of yours \\(docs/looking.md\\). Found `--log-to`"),
        (["tran"], "A command should be one of .*Found 'tran'. Did you mean 'train'?"),
        (["train", "digit"], "A recipe should be one of .*Found 'digit'. Did you mean 'digits'?"),
        (
            ["train", "--placement", "interleave"],
            "`placement` should be one of .*Found 'interleave'. Did you mean 'interleaved'?",
        ),
        (["train", "--placement", "0,2,2,2"], "every rank from 0 to 2 a stage.*Found \\[0, 2, 2, 2\\]"),
        (["train", "--device", "cuda:77"], "`device` should be one of .*Found 'cuda:77'"),
        (["train", "--num-stages", "0"], "`num_stages` should be an integer of at least 1. Found 0"),
        (["train", "--batch-size", "5000"], "`batch_size` should be at most the 1437 samples there are. Found 5000"),
        (["train", "--strategy", "credit-1,0;0,1"], "each of the 4 stages. Found 2"),
        (["compare", "--strategies", "local", "nothing"], "`strategy` should be one like .*Found 'nothing'"),
        (["evaluate", "nowhere"], "A run should be a folder with a run.json.*Found none in 'nowhere'"),
        (["evaluate", "."], "Found none in '.'"),
        (["export", "nowhere"], "A run should be a folder"),
        (["flow", "--stages", "0"], "`stages` should be from 1 to 32.*Found 0"),
        (["flow", "--out", "picture.xyz"], "ends in .png, .svg or .pdf. Found 'picture.xyz'"),
        (["flow", "--out", "."], "Found '.'"),
        (["flow", "--strategies"], "`strategy` should name at least one"),
        (["compare", "--strategies"], "`strategies` should name at least one"),
        (["compare", "--page", "x.png"], "A page should be a file that ends in .html. Found 'x.png'"),
        (["compare", "--seeds", "0"], "`seeds` should be an integer of at least 1. Found 0"),
        (["compare", "--rates", "0"], "`rates` should be above 0. Found 0"),
        (["train", "--epochs", "inf"], "`epochs` should be a number above 0 and below 1e\\+12. Found inf"),
        (["train", "--eval-every", "nan"], "`eval_every` should be a number above 0 and below 1e\\+12. Found nan"),
        (["explore", "--stages", "0", "--out", "x/e.html"], "`stages` should be an integer of at least 1. Found 0"),
        (["train", "--strategy", "local@infepochs,end-to-end"], "a number of epochs above 0 after '@'"),
        (["train", "--device", "meta"], "`device` should be auto, cpu, cuda or cuda:<number>. Found 'meta'"),
        (["train", "--warmup-steps", "-5"], "`warmup_steps` should be an integer of at least 0. Found -5"),
        (["train", "--strategy", "rotating-30000000"], "from 1 to 1024"),
        (["train", "--strategy", "e2e"], "Found 'e2e'. Did you mean 'end-to-end'?"),
        (["train", "--strategy", "local@-5epochs,end-to-end"], "a number of epochs above 0 after '@'"),
        (["train", "--lr", "-1"], "`lr` should be a finite number above 0. Found -1"),
        (["train", "--lr", "nan"], "`lr` should be a finite number above 0. Found nan"),
        (["train", "--beta1", "1"], "`beta1` should be a number of at least 0 and below 1. Found 1"),
        (["train", "--weight-decay", "-1"], "`weight_decay` should be a finite number of at least 0. Found -1"),
        (["train", "--stage-lr", "1", "1", "-1", "1"], "`stage_lr` should be a finite number of at least 0. Found -1"),
        (
            ["train", "cifar10-resnet-small", "--momentum", "1"],
            "`momentum` should be .* at least 0 and below 1. Found 1",
        ),
        (["compare", "--strategies", "local", "2-wize"], "Found '2-wize'. Did you mean '2-wise'?"),
        (["compare", "--strategies", "local", "credit-1,0;0,1"], "each of the 4 stages. Found 2"),
        (["schedule", "--strategy", "1f2b"], "or one of gpipe, 1f1b.*Found '1f2b'. Did you mean '1f1b'?"),
        (["explore", "--strategy", "1f2b", "--out", "x/e.html"], "Did you mean '1f1b'?"),
        (["flow", "--strategy", "2-wize", "--out", "x/f.png"], "Did you mean '2-wise'?"),
        (["plan", "--costs", "transformr"], "Found 'transformr'. Did you mean 'transformer'?"),
        (["report", "nope"], "A run should be a folder with a run.json.*Found none in 'nope'"),
        (["flow", "--strategy", "2-wise-means"], "Found '2-wise-means'. Did you mean '2-wise-mean'?"),
        (
            ["train", "--runs", "/dev/null/x"],
            "'/dev/null/x' should be a path that can be .*Not a directory; give another path",
        ),
        (["flow", "--out", "/dev/null/x.png"], "'/dev/null' should be a path that can be .*; give another path"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: some of these left empty folders."""
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message.replace("?", r"\?"), error), error
    assert "Traceback" not in error
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "y"), ("TORCHELASTIC_RESTART_COUNT", "z")])
def test_invalid_torchrun_environment_is_one_sentence(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `RANK=x` ended in a traceback instead of the error message."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(name, value)
    assert cli.run(["train", "--max-steps", "1"]) == 2
    error = capsys.readouterr().err
    assert f"`{name}` in the environment should be a whole number, as torchrun sets it. Found {value!r}" in error
    assert not list(Path().iterdir())


def test_train_with_closed_stdout_can_be_resumed(tmp_path: Path) -> None:
    """Regression: `nwise train | head -1` marked the run as failed without a message."""
    os.mkfifo(tmp_path / "said-0.out")  # instead of the file that the process would write
    (process,) = started(1, ["-m", "nwise", "train", *NARROW, "--epochs", "500"], tmp_path)
    try:
        with (tmp_path / "said-0.out").open() as out:
            assert "digits: 4 stages" in out.readline()
        process.join(60)
    finally:
        process.kill()
    error = (tmp_path / "said-0.err").read_text()
    assert process.exitcode == 75, error  # 1 if the last flush of the standard output failed
    assert "as requested. Resume with `nwise train --resume runs/digits-2-wise-mean-001`." in error
    assert "Traceback" not in error


def test_command_imports_only_what_it_needs_and_exits_with_141_if_stdout_is_closed() -> None:
    """Regression: `nwise recipes` took 1.5 s longer than torch, for unused imports of figures and checkpoints."""
    script = "import sys; from nwise.app import cli; sys.stdin.read(1)\ntry: cli.main(['recipes'])\n"
    script += "finally: open('modules', 'w').write('\\n'.join(sys.modules))"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate("x", timeout=60)
    assert process.returncode == 141
    assert error == "nwise recipes: the output was closed.\n"
    loaded = set(Path("modules").read_text().split())
    assert "torch" in loaded
    slow = {"matplotlib", "plotly", "datasets", "tokenizers", "transformers"}
    slow |= {"torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"}
    assert not slow & loaded


@pytest.mark.parametrize(
    "arguments", [["train", "--epochs", "x"], ["train", "--strategy", "two"], ["train", "--nonsense"], ["evaluate"]]
)
def test_bad_options_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert captured.err


def test_compare_keeps_diverged_run_in_table(capsys: pytest.CaptureFixture[str]) -> None:
    small = "--max-steps 3 --blocks-per-stage 1 --width 8 --num-heads 1 --batch-size 64 --num-stages 2 --sequence-length 128"
    options = [*small.split(), *"--test-limit 20000 --eval-every 9 --lr 1e20 --warmup-steps 0".split()]
    assert cli.run(["compare", "source-code", "--strategies", "local", "end-to-end", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert len(rows) == 2
    assert rows[1]["curve"]["values"][-1] is None
    assert cli.run(["train", "source-code", "--json", "--on-nan", "ignore", *options]) == 0
    assert "NaN" not in capsys.readouterr().out


def test_heads_that_a_later_strategy_needs_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: heads were discarded at the first switch; their losses were then taken of the bare activations."""
    arguments = ["train", *NARROW, "--heads", "live", "--max-steps", "6", "--eval-every", "9", "--strategy"]
    assert cli.run([*arguments, "local@2,end-to-end@4,local", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert None not in result["heads"]
    assert cli.run(["evaluate", result["run"]]) == 0
    assert cli.run([*arguments, "local@6,end-to-end", "--json"]) == 0
    assert None not in json.loads(capsys.readouterr().out.splitlines()[-1])["heads"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("run.json", {"config": {"model": None}}, "run.json should hold a run's configuration"),
        ("run.json", {"config": {"data": {"type": "Sgd"}}}, "run.json should hold a run's configuration"),
        ("run.json", {"config": {"strategy": 3}}, "run.json should hold a run's configuration"),
        ("run.json", {"config": {"model": {"type": "ConvNet", "num_stages": 5}}}, "names of the network's parameters"),
        ("run.json", {"config": {"model": {"type": "Mlp", "num_stages": 4}}}, "names of the network's parameters"),
        ("metrics.jsonl", "{}", "metrics.jsonl, line 1, should be a record with 'kind' and 'step'"),
        ("metrics.jsonl", '{"kind": "te', "metrics.jsonl, line 1, should be a record"),
    ],
)
def test_damaged_run_folder_error_names_the_file(
    file: str, content: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", *NARROW, "--max-steps", "1", "--json"]) == 0
    folder = Path(json.loads(capsys.readouterr().out)["run"])
    if isinstance(content, dict):
        state = json.loads((folder / file).read_text())
        state["config"].update(content["config"])
        content = json.dumps(state)
    (folder / file).write_text(str(content))
    assert cli.run(["report" if file == "metrics.jsonl" else "evaluate", str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_train_interrupted_by_ctrl_c_exits_with_75(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = tmp_path / "runs" / "digits-2-wise-mean-001" / "metrics.jsonl"
    trained = lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3  # noqa: E731
    sender = signal_when(trained, signal.SIGINT, tmp_path)
    done = forked(1, ["-m", "nwise", "train", *NARROW, "--epochs", "500", "--log-every", "1"], tmp_path)
    sender.join()
    assert done.returncode == 75, done.stderr
    assert "as requested. Resume with `nwise train --resume runs/digits-2-wise-mean-001`." in done.stderr
    assert done.stderr.startswith("stopping after this step; Ctrl-C again to end now\n")
    assert "Traceback" not in done.stdout + done.stderr
    assert cli.run(["evaluate", "runs/digits-2-wise-mean-001"]) == 0
    assert "stopped at step" in capsys.readouterr().out
    assert torch.isfinite(load_file(metrics.parent / "weights.safetensors")["model.output.1.weight"]).all()


def test_ctrl_c_while_a_command_is_imported_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: in its first two seconds a command answered Ctrl-C with a traceback of Python's imports."""

    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    with pytest.raises(SystemExit, match="^130$"):
        cli.main(["evaluate", "runs/digits-2-wise-mean-001"])
    assert capsys.readouterr() == ("", "nwise: interrupted\n")


@pytest.mark.parametrize("command", ["train", "recipes"])
def test_command_without_options_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: plain `nwise train`, as in `make train`, failed in the search for `--resume`."""
    monkeypatch.setattr(
        "nwise.app.cli.training.TrainCommand.run", lambda self, console: 0 if self.recipe == "digits" else 1
    )
    assert cli.run([command]) == 0
