"""A vision transformer through Lightning: manual optimization, because a pipeline computes its gradients itself.

pip install '.[hf]' lightning; python examples/lightning_vit.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import ViTConfig, ViTForImageClassification

import nwise


class LitPipeline(lightning.LightningModule):
    """A pipeline with its optimizer; Lightning saves, resumes and logs it like any module."""

    automatic_optimization = False

    def __init__(self, pipe: nwise.Pipeline, rate: float) -> None:
        super().__init__()
        self.pipe, self.rate = pipe, rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.pipe.parameters(), self.rate)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        self.pipe.steps = self.global_step  # dropout depends on it, also after a resume
        losses = self.pipe.step(batch[0], target=batch[1])
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.log_dict({f"loss of stage {k}": loss for k, loss in enumerate(losses) if not loss.isnan()})

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("accuracy", (self.pipe(batch[0]).argmax(-1) == batch[1]).float().mean())


def main(**options: Any) -> float:
    """Train on bright and dark images, and return the accuracy on others."""
    lightning.seed_everything(0, verbose=False)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=8, patch_size=4
    )
    stages = nwise.split(ViTForImageClassification(config), at=4, example=torch.zeros(2, 3, 8, 8))
    heads = nwise.heads.copied(stages)
    pipe = nwise.Pipeline(stages, heads, torch.nn.functional.cross_entropy, "2-wise", seed=0)
    y = torch.arange(512) % 2
    x = torch.randn(512, 3, 8, 8) + y[:, None, None, None] * torch.linspace(0, 1, 8)  # brighter on the right, or not
    first, second = (DataLoader(TensorDataset(x[part], y[part]), 32) for part in (slice(384), slice(384, 512)))
    trainer = lightning.Trainer(max_epochs=3, enable_checkpointing=False, logger=False, **options)
    trainer.fit(LitPipeline(pipe, 2e-3), first, second)
    return float(trainer.callback_metrics["accuracy"])


if __name__ == "__main__":
    print(f"accuracy on other images: {main():.2f}")
