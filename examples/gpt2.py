"""GPT-2 of Hugging Face, 2-wise: padded text with attention masks, checkpoints, resumed, and saved for `from_pretrained`.

pip install '.[app,hf]'
python examples/gpt2.py                                   # stop it and start it again: it goes on
torchrun --nproc-per-node 4 examples/gpt2.py              # a process for every stage, the same numbers
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import nwise
from nwise.app.data import Bytes, batch_indices, embedded_text
from nwise.checkpoint import Checkpoints, gather_weights, under
from nwise.losses import TokenCrossEntropy

LENGTH = 48


def network() -> GPT2LMHeadModel:
    """Eight blocks with random weights; `GPT2LMHeadModel.from_pretrained("gpt2")` is cut in the same way."""
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=8, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    nwise.untie(model)  # embedding and output are on different stages, and learn from different losses
    return model


def batch(lines: list[str], step: int, size: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    """Tokens with a mask of those that are not padding, and the tokens that follow; a function of the step."""
    chosen = [lines[i] for i in batch_indices(len(lines), size, seed=0, step=step).tolist()]
    coded = [Bytes().encode(line)[: LENGTH + 1] for line in chosen]
    tokens, mask = torch.zeros(size, LENGTH + 1, dtype=torch.long), torch.zeros(size, LENGTH + 1, dtype=torch.long)
    for i, line in enumerate(coded):
        tokens[i, : len(line)], mask[i, : len(line)] = torch.tensor(line), 1
    target = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)  # padding does not count
    return {"input_ids": tokens[:, :-1], "attention_mask": mask[:, :-1]}, target


def main(folder: Path = Path("runs/gpt2"), steps: int = 60) -> list[float]:
    """Train on Python's own source, save the network, and return the losses of the last stage."""
    torch.manual_seed(0)
    model = network()
    lines = [line for line in embedded_text()[0][0].splitlines() if len(line) > 20]
    example, _ = batch(lines, step=0, size=2)
    stages = nwise.split(model, ["transformer.h.2", "transformer.h.4", "transformer.h.6"], example)  # or at=4
    heads = nwise.heads.copied(stages, blocks=1)  # the last block, final norm and output matrix, for every other stage
    pipe = nwise.Pipeline(stages, heads, TokenCrossEntropy(), "2-wise-mean", num_microbatches=2)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
    checkpoints = Checkpoints(folder / "checkpoints", pipe, optimizer)
    checkpoints.resume()

    history = []
    for step in range(pipe.steps, steps):
        inputs, target = batch(lines, step)
        losses = pipe.gather(pipe.step(inputs, target=target))  # of all stages, in every process
        optimizer.step()
        optimizer.zero_grad()
        history.append(losses[-1].item())
        if pipe.steps % 10 == 0:
            if pipe.processes.is_first:
                print(f"step {pipe.steps:3d}  losses {[round(loss, 2) for loss in losses.tolist()]}", flush=True)
            checkpoints.save()

    weights = under(gather_weights(pipe), "model.")  # of all stages, on rank 0
    if pipe.processes.is_first:
        model.load_state_dict(weights, strict=True)
        model.save_pretrained(folder / "model")
        again = GPT2LMHeadModel.from_pretrained(folder / "model")
        print(f"saved and loaded back: {folder / 'model'}, {again.num_parameters():,} parameters")
    pipe.close()
    return history


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/gpt2"))
