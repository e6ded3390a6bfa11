"""Llama in three stages, masks and positions given; writes the weights of the whole network, which its own class takes back.

Two processes hold the three stages in turn: every boundary is crossed, and each process imports transformers, for seconds.

Before that, the gradients of networks whose work depends on values: routers of experts, and blocks that are left out at random.
"""

from __future__ import annotations

import os
from typing import Any

import torch

import nwise
from architectures import VOCABULARY, tiny
from nwise.checkpoint import gather_weights
from nwise.checkpoint.weights import under
from ranks.common import RANK, closed, digest, write

os.environ["HF_HUB_OFFLINE"] = "1"
IN_TURN = (0, 1, 0)


def model() -> Any:
    """A tiny Llama, the same on every rank."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def train() -> dict[str, Any]:
    """Six 2-wise steps of two micro-batches, of other lengths in between."""
    network = model()
    stages = nwise.split(network, at=3)
    heads = nwise.heads.copied(stages, blocks=1)
    pipe = nwise.Pipeline(stages, heads, nwise.losses.TokenCrossEntropy(), "2-wise", 2, seed=1, placement=IN_TURN)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    for length in (9, 9, 5, 9, 9, 7):
        ids = torch.randint(0, 37, (4, length + 1), generator=generator)
        mask = torch.ones(4, length, dtype=torch.long)
        mask[1, 3:] = 0
        positions = torch.arange(length).expand(4, length).clone()
        pipe.step(ids[:, :-1], mask, positions, target=ids[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
    weights = under(gather_weights(pipe), "model.")
    loaded = False
    if RANK == 0:
        model().load_state_dict(weights, strict=True)
        loaded = True
    return closed(pipe, {"weights": {name: w.tolist() for name, w in weights.items()}, "loaded": loaded})


ROUTED = (
    *((f"{name}ForCausalLM", {}) for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "GptOss")),
    ("WhisperForConditionalGeneration", {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}),
)


def routed() -> dict[str, dict[str, str]]:
    """The bits of every gradient of this process after steps of two lengths, by class and name."""
    found = {}
    for name, options in ROUTED:
        sound = [torch.ones(4, 4, 16)] if "Whisper" in name else []
        at = ["model.decoder.embed_tokens", "model.decoder.layers.1"] if sound else 3
        stages = nwise.split(tiny(name, **options).train(), at=at)
        pipe = nwise.Pipeline(
            stages, None, nwise.losses.TokenCrossEntropy(), "end-to-end", 2, seed=1, placement=IN_TURN
        )
        for length in (9, 5):
            ids = torch.randint(0, VOCABULARY, (4, length), generator=torch.Generator().manual_seed(length))
            pipe.step(*sound, ids, target=ids)
        weights = [(n, p) for k in pipe.processes.here for n, p in pipe.stages[k].named_parameters()]
        found[name] = closed(pipe, {n: "" if p.grad is None else digest(p.grad) for n, p in weights})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    write({**train(), "routed": routed()})
