"""GPT-2 through Hugging Face's Trainer, with the gradients of 2-wise: pip install '.[hf]' accelerate."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import nwise


class PipelineTrainer(Trainer):  # type: ignore[misc]
    """A Trainer of a network whose gradients come from a pipeline of its modules, in one process."""

    def __init__(self, pipe: nwise.Pipeline, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.args.gradient_accumulation_steps * self.args.world_size * max(1, self.args.n_gpu) > 1:
            raise ValueError("Use `num_microbatches` instead of gradient accumulation, and one device.")
        self.pipe = pipe.to(self.args.device)

    def create_optimizer(self, model: Any = None) -> None:
        kind, options = self.get_optimizer_cls_and_kwargs(self.args)
        self.optimizer = kind(self.pipe.parameters(), weight_decay=self.args.weight_decay, **options)

    def training_step(self, model: Any, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        self.pipe.train().zero_grad()  # the Trainer's own call leaves out the heads
        self.pipe.steps, inputs = self.state.global_step, self._prepare_inputs(inputs)  # dropout depends on the step
        target = nn.functional.pad(inputs.pop("labels")[:, 1:], (0, 1), value=-100)  # the next tokens
        with self.compute_loss_context_manager():
            losses = self.pipe.step(inputs, target=target)
        nn.utils.clip_grad_norm_(self.pipe.heads.parameters(), self.args.max_grad_norm)  # the Trainer clips the network
        return losses[-1].to(self.args.device)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        torch.save(self.pipe.heads.state_dict(), Path(output_dir or self.args.output_dir) / "heads.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.pipe.heads.load_state_dict(torch.load(Path(resume_from_checkpoint) / "heads.pt"))


def main(folder: Path = Path("runs/hf_trainer"), *, resume: bool = False, **options: Any) -> float:
    """Train on counting, and return the loss on numbers that were not seen."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    nwise.untie(model := GPT2LMHeadModel(config))
    stages = nwise.split(model, at=4, example={"input_ids": torch.arange(16).expand(2, -1)})
    heads = nwise.heads.copied(stages)
    pipe = nwise.Pipeline(stages, heads, nwise.losses.TokenCrossEntropy(), "2-wise", num_microbatches=2, seed=0)
    counts = [{"input_ids": (x := (torch.arange(16) + 5 * i) % 64), "labels": x} for i in range(64)]
    arguments = TrainingArguments(str(folder), learning_rate=1e-2, report_to=[], **{"max_steps": 40, **options})
    trainer = PipelineTrainer(pipe, model, arguments, train_dataset=counts[:48], eval_dataset=counts[48:])
    trainer.train(resume_from_checkpoint=resume)
    return trainer.evaluate()["eval_loss"]


if __name__ == "__main__":
    print("loss on other numbers:", main())
