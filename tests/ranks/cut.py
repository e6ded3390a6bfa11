"""Five networks in three stages, trained by two strategies; writes the bits of all gradients, and loads the weights back.

Two processes hold the three stages in turn: every boundary is crossed, and each process imports transformers, for seconds.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import nwise
from cutting import VOCABULARY, Gpt, UNet, tiny
from nwise.checkpoint import gather_weights
from nwise.checkpoint.weights import under
from ranks.common import RANK, closed, digest, write

os.environ["HF_HUB_OFFLINE"] = "1"
IN_TURN = (0, 1, 0)
NETWORKS: dict[str, tuple[Any, Any]] = {
    "Llama": (lambda: tiny("LlamaForCausalLM"), 3),
    "Mixtral": (lambda: tiny("MixtralForCausalLM"), 3),
    "T5": (lambda: tiny("T5ForConditionalGeneration"), ["decoder.block.0", "decoder.block.1"]),
    "GPT": (Gpt, 3),
    "U-Net": (UNet, ["middle", "out"]),
}


def batch(name: str, length: int) -> tuple[Any, Any]:
    """Inputs and a target."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(4, VOCABULARY, (4, length), generator=generator)
    if name == "U-Net":
        return torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, 2, 8, 8, generator=generator)
    mask = torch.ones(4, length, dtype=torch.long)
    mask[1, 3:] = 0
    decoder = {"decoder_input_ids": ids} if name == "T5" else {}
    return ids if name == "GPT" else {"input_ids": ids, "attention_mask": mask, **decoder}, ids


def trained() -> dict[str, dict[str, str]]:
    """The bits of this process's weights after six steps of several lengths, by network and name."""
    found = {}
    for name, (make, at) in NETWORKS.items():
        torch.manual_seed(0)
        network = make().train()
        stages = nwise.split(network, at, batch(name, 9)[0])
        heads = nwise.heads.copied(stages, blocks=1) if name in ("Llama", "GPT") else None
        loss = torch.nn.functional.mse_loss if name == "U-Net" else nwise.losses.TokenCrossEntropy()
        strategy = "2-wise-mean" if heads else "end-to-end"
        pipe = nwise.Pipeline(stages, heads, loss, strategy, 2, seed=1, placement=IN_TURN)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
        for length in (9, 9, 5, 9, 9, 7):
            inputs, target = batch(name, length)
            pipe.step(inputs, target=target)
            optimizer.step()
            optimizer.zero_grad()
        if name == "Llama":
            weights = under(gather_weights(pipe), "model.")
            if RANK == 0:
                tiny("LlamaForCausalLM").load_state_dict(weights, strict=True)
        found[name] = closed(pipe, {n: digest(p) for n, p in pipe.named_parameters()})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(trained())
