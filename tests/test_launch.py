"""Joining the processes that torchrun starts: devices, time limits, backends, several machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch import RANKS, forked, scripted
from nwise.app.recipes import recipe
from nwise.app.training.build import pick_device
from nwise.runtime.launch import make_mesh, start
from ranks.common import batches, pipeline


def test_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    arguments = ["-m", "nwise", "train", "digits", "--runs", str(tmp_path), "--max-steps", "2", "--num-stages", "2"]
    done = forked(3, arguments, tmp_path)
    assert done.returncode != 0
    assert "`torchrun` should start at most 2 processes, one for each stage, or a multiple of 2. Found 3" in done.stderr
    assert "nwise/pipeline.py" not in done.stderr, "no traceback of ours"


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


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf"])
def test_bad_time_limits_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nwise.runtime.launch import time_limit

    monkeypatch.setenv("NWISE_TIMEOUT", text)
    with pytest.raises(ValueError, match=r"`(NWISE_TIMEOUT|timeout)` should be a number of seconds"):
        time_limit(None)


def test_cpu_network_beside_a_group_for_gpus(tmp_path: Path) -> None:
    """Regression: beside a GPU torch's default group has nccl alone, so networks on the CPU did not train in several processes.

    Gloo for GPUs alone refuses the same tensors.
    """
    text = (
        "import torch.distributed as dist\nfrom ranks.common import batches, closed, pipeline, write\n"
        "dist.init_process_group('cuda:gloo')\npipe = pipeline(2, '2-wise', 1)\n"
        "write(closed(pipe, [pipe.step(x, target=y)[-1].item() for x, y in batches(1)]))\n"
    )
    done = scripted(2, text, tmp_path, str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    pipe = pipeline(2, "2-wise", 1)
    losses = [pipe.step(x, target=y)[-1].item() for x, y in batches(1)]
    assert json.loads((tmp_path / "1.json").read_text()) == losses


def test_destroyed_process_group_leaves_no_error(tmp_path: Path) -> None:
    """Regression: after `dist.destroy_process_group()`, which torch asks for, two exit handlers of nwise raised errors."""
    text = (
        "import torch.distributed as dist\nfrom ranks.common import batches, pipeline\npipe = pipeline(2, '2-wise', 1)\n"
        "for x, y in batches(2):\n    pipe.step(x, target=y)\n"
        "dist.destroy_process_group()\n"
    )
    done = scripted(2, text, tmp_path)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr


def test_default_group_beside_a_gpu_carries_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(backend: str, **_: object) -> None:
        assert backend == "cpu:gloo,cuda:nccl"
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", joined)
    with pytest.raises(InterruptedError):
        start()


def test_ranks_may_outnumber_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: with four ranks on one GPU torch's mesh asked for GPUs 1 to 3, so these ranks failed and rank 0 waited."""
    taken: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(taken))
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for _ in range(2):
            assert make_mesh(1, None).device_type == "cuda"
    finally:
        dist.destroy_process_group()
    assert taken == [1], "the first choice stays"


def test_every_rank_puts_its_data_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: data were moved before the rank chose its GPU, so with `cuda` all ranks shared the first."""
    taken: list[int] = []
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for device in ("auto", "cuda", "cuda:0"):
        assert pick_device(replace(recipe("digits"), device=device)).index == (0 if device == "cuda:0" else 1)
    assert taken == [1, 1, 0]
