"""LoRA on a tiny Llama over devices of any speed: only adapters are trained, the rest stays frozen.

pip install '.[hf]' peft; python examples/lora.py; torchrun --nproc-per-node 3 examples/lora.py
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import nwise
from nwise.checkpoint import gather_weights, under
from nwise.losses import TokenCrossEntropy
from nwise.runtime.launch import launched


def main(folder: Path = Path("runs/lora"), steps: int = 40) -> list[float]:
    """Train the adapters on counting, save them, and return the losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    network = model.get_base_model()  # with adapters inside; or LlamaForCausalLM.from_pretrained(...)
    tokens = (torch.arange(17) + 5 * torch.arange(32)[:, None]) % 64  # counting, from other numbers
    x, y = tokens[:, :-1], tokens[:, 1:]

    # Under torchrun the processes measure how fast they are; alone, the plan is for three equal devices.
    plan = nwise.plan(
        network, x, y, devices=None if launched() else 3, heads=nwise.heads.copied, loss_fn=TokenCrossEntropy()
    )
    stages = nwise.split(network, at=plan.at, example=x)
    heads = nwise.heads.copied(stages)  # copies of the final norm and the frozen output matrix
    pipe = nwise.Pipeline(stages, heads, TokenCrossEntropy(), "2-wise", placement=plan, seed=0)
    optimizer = torch.optim.AdamW((p for p in pipe.parameters() if p.requires_grad), 2e-2)
    history = []
    for _ in range(steps):
        losses = pipe.gather(pipe.step(x, target=y))  # of all stages, in every process
        optimizer.step()
        optimizer.zero_grad()
        history.append(losses[-1].item())

    weights = under(gather_weights(pipe), "model.")  # of all stages, on rank 0
    if pipe.processes.is_first:
        network.load_state_dict(weights)
        model.save_pretrained(str(folder))  # the adapters alone, as PEFT writes them
    pipe.close()
    return history


if __name__ == "__main__":
    first, *_, last = main()
    print(f"loss {first:.3f} at first, {last:.3f} at last")
