"""Self-speculative decoding with heads that nwise trained: acceptance and tokens per second, by strategy and exit.

    python -m benchmarks.speculation train        # 20 minutes on 2 cores; skips what is there
    python -m benchmarks.speculation measure      # on a quiet machine

A Llama of 8 layers learns the bytes of Python's standard library, a layer to a stage. All exits share the last norm and the
vocabulary matrix (`nwise.heads.shared`), so transformers can draft tokens with the first k layers and check them with all
(`generate(..., assistant_early_exit=k)`). Greedy output is the same, token for token; `measure` checks that.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import nwise
from nwise.app.data import embedded_text
from nwise.machine import processor

HERE = Path(__file__).parent
RUNS = Path("runs/speculation")
STRATEGIES = ("end-to-end", "deep-supervision", "2-wise-mean", "local")
LAYERS, LENGTH = 8, 64
EXITS = (1, 2, 3, 4, 6)
DRAFTED = 5  # tokens before each check


def text(index: int) -> Tensor:
    """Return the bytes of the training texts (0) or of the held-out ones (1)."""
    return torch.frombuffer(bytearray("".join(embedded_text()[index]).encode()), dtype=torch.uint8).long()


def windows(tokens: Tensor, starts: Tensor) -> Tensor:
    """Return ``[B, LENGTH + 1]`` tokens."""
    return tokens[starts[:, None] + torch.arange(LENGTH + 1)]


def new_model() -> LlamaForCausalLM:
    """Return a network of 3.6 million parameters."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(steps: int = 900, batch_size: int = 8, lr: float = 1e-3, threads: int = 2) -> None:
    """Train every strategy from the same start on the same batches.

    Args:
        steps: steps of AdamW, a tenth of them to warm up, then a cosine to zero.
        batch_size: windows of a step.
        lr: the largest learning rate, for all strategies alike.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    tokens = text(0)
    for strategy in STRATEGIES:
        folder = RUNS / strategy
        if (folder / "config.json").exists():
            continue
        model = new_model()
        stages = nwise.split(model, at=LAYERS, example=tokens[None, :64].expand(2, -1))
        pipe = nwise.Pipeline(stages, nwise.heads.shared(stages), nwise.losses.TokenCrossEntropy(), strategy, seed=0)
        update = torch.optim.AdamW(pipe.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        numbers = torch.Generator().manual_seed(0)
        for step in track(range(steps), strategy, console=Console(stderr=True)):
            warm = min(1.0, (step + 1) / (0.1 * steps))
            update.param_groups[0]["lr"] = lr * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            batch = windows(tokens, torch.randint(len(tokens) - LENGTH, (batch_size,), generator=numbers))
            pipe.step(batch[:, :-1], target=batch[:, 1:])
            torch.nn.utils.clip_grad_norm_(pipe.parameters(), 1.0)
            update.step()
            update.zero_grad()
        model.save_pretrained(folder)


@torch.no_grad()
def agreement(model: LlamaForCausalLM, batch: Tensor) -> list[dict[str, float]]:
    """Return for every exit its loss, and how often its likeliest token is that of the whole network."""
    states: list[Any] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, y: states.append(y)) for layer in model.model.layers]
    last = model(batch[:, :-1]).logits
    for hook in hooks:
        hook.remove()
    rows = []
    for k, state in enumerate(states, start=1):
        logits = model.lm_head(model.model.norm(state[0] if isinstance(state, tuple) else state))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        agreed = float((logits.argmax(-1) == last.argmax(-1)).double().mean())
        rows.append({"exit": k, "loss": float(loss), "agreement": agreed})
    return rows


def generate(model: LlamaForCausalLM, prompts: list[Tensor], count: int, **options: Any) -> tuple[list[Tensor], float]:
    """Generate greedy continuations; return them, and the tokens per second."""
    start_time = time.perf_counter()
    outputs = [
        model.generate(prompt[None], max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
        for prompt in prompts
    ]
    return outputs, count * len(prompts) / (time.perf_counter() - start_time)


def measure(prompts: int = 6, count: int = 128, rounds: int = 3, threads: int = 2) -> None:
    """Measure every strategy and exit, and write the records.

    Args:
        prompts: number of held-out prompts of 64 bytes.
        count: tokens to generate for each.
        rounds: how often, all exits in turn.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    tokens = text(1)
    numbers = torch.Generator().manual_seed(1)
    batch = windows(tokens, torch.randint(len(tokens) - LENGTH, (256,), generator=numbers))
    asked = [row[:-1] for row in batch[:prompts]]
    records = []
    for strategy in track(STRATEGIES, "measuring", console=Console(stderr=True)):
        model = LlamaForCausalLM.from_pretrained(RUNS / strategy).eval()
        model.generation_config.num_assistant_tokens = DRAFTED
        model.generation_config.num_assistant_tokens_schedule = "constant"
        model.generation_config.assistant_confidence_threshold = 0.0
        rates: dict[int, list[float]] = {k: [] for k in (0, *EXITS)}
        expected = None
        for _, k in itertools.product(range(rounds + 1), rates):
            outputs, rate = generate(model, asked, count, **({"assistant_early_exit": k} if k else {}))
            expected = outputs if expected is None else expected
            if not all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True)):
                raise AssertionError(f"{strategy}, exit {k}: generation with an early exit should give the same tokens")
            rates[k].append(rate)
        plain = statistics.median(rates[0][1:])
        for row in agreement(model, batch):
            k = int(row["exit"])
            speed = {"tokens_per_second": statistics.median(rates[k][1:]), "plain": plain} if k in rates else {}
            machine = {"processor": processor(), "threads": threads, "torch": torch.__version__}
            records.append({"strategy": strategy, **row, **speed, **machine})
    (HERE / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    show()


def show() -> None:
    """Print the tables of the records."""
    records = [json.loads(line) for line in (HERE / "records.jsonl").open()]
    heads = " | ".join(f"exit {k}" for k in EXITS)
    for title, name in (("agreement with the whole network, %", "agreement"), ("tokens per second / plain", "speed")):
        print(f"| {title} | {heads} |\n|---|{'---|' * len(EXITS)}")
        for strategy in STRATEGIES:
            rows = {record["exit"]: record for record in records if record["strategy"] == strategy}
            cells = [
                f"{100 * rows[k]['agreement']:.1f}"
                if name == "agreement"
                else f"{rows[k]['tokens_per_second'] / rows[k]['plain']:.2f}"
                for k in EXITS
            ]
            print(f"| {strategy} | {' | '.join(cells)} |")
        print()
    print("| test loss, nats per byte | " + " | ".join(f"exit {k}" for k in range(1, LAYERS)) + " | all |")
    print(f"|---|{'---|' * LAYERS}")
    for strategy in STRATEGIES:
        losses = [record["loss"] for record in records if record["strategy"] == strategy]
        print(f"| {strategy} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |")
