"""A vision transformer of Hugging Face, 2-wise, with every head scored; saved and loaded back by its own class.

pip install '.[app,hf]'
python examples/vit.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

import nwise
from nwise.app.data import batch_indices, digits
from nwise.app.training import evaluate


def main(folder: Path, epochs: int = 8) -> float:
    """Train on the bundled digits; the accuracy of the network that was saved and loaded back."""
    train, test = digits()
    torch.manual_seed(0)
    image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    size = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    model = ViTForImageClassification(ViTConfig(**image, **size, hidden_dropout_prob=0.0))

    x, _ = test.batch(torch.arange(2))
    stages = nwise.split(model, at=4, example=x)  # two images that the stages and the model are compared on
    # The network answers from its class token, so the heads should too, or the first stages would fill the others only.
    heads = nwise.heads.copied(stages)  # layer norm and classifier of the network itself
    pipe = nwise.Pipeline(stages, heads, strategy=nwise.NWise(2, heads="all"))  # a probe at stage 0 too
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)

    for step in range(epochs * len(train) // 64):
        x, y = train.batch(batch_indices(len(train), 64, seed=0, step=step))
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    scores = [score for score in evaluate(pipe, test, 256).heads if score is not None]
    print("test accuracy of the heads of stages 0 to 3:", *(f"{100 * score.accuracy:.1f} %" for score in scores))

    model.save_pretrained(folder)
    again = ViTForImageClassification.from_pretrained(folder).eval()
    x, y = test.batch(torch.arange(len(test)))
    with torch.no_grad():
        accuracy = (again(x).logits.argmax(1) == y).float().mean().item()
    print(f"test accuracy of the network loaded from {folder}: {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
