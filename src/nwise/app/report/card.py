"""A model card for an exported network, as the Hugging Face Hub shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nwise.app.recipes import to_json
from nwise.app.report.html import asset
from nwise.app.report.summary import Summary
from nwise.app.training import Run
from nwise.checks import needed


def card_files(run: Run, weights: Path) -> dict[Path, str]:
    """Return the texts of the files that belong beside exported weights: a card, the recipe, and a text run's tokenizer.

    Raises:
        ImportError: the package `huggingface_hub` is missing.
        FileExistsError: there is another file with one of these names.
        ValueError: the run has no test of the weights.
    """
    hub = needed("huggingface_hub", "hf", "A model card")
    [summary] = Summary.open_all([run.folder])
    if (step := summary.tests[-1]["step"]) != run.weights_step:
        raise ValueError(
            f"{run.folder} should have been tested after step {run.weights_step}, whose weights it has. Found the last test "
            f"after step {step}; resume the run (`nwise train --resume {run.folder}`)."
        )
    tokenizer = run.folder / "tokenizer.json"
    texts = {"tokenizer.json": tokenizer.read_text()} if tokenizer.exists() else {}
    card = _card(hub, summary, weights.name, tokenizer=bool(texts))
    texts |= {"README.md": str(card), "config.json": json.dumps(to_json(summary.recipe), indent=2) + "\n"}
    files = {weights.parent / name: text for name, text in texts.items()}
    for path, text in files.items():
        if path.exists() and path.read_text() != text:
            raise FileExistsError(f"{path} should be free for the card. Found another file; use another folder.")
    return files


def _card(hub: Any, summary: Summary, weights: str, *, tokenizer: bool) -> Any:
    recipe, quality, last = summary.recipe, summary.recipe.quality, summary.tests[-1]
    values = to_json(recipe)
    data = values["data"]["type"]
    # Stage, loss and quality of every head that ran at the last test; a share, not per cent.
    scale = 1.0 if quality == "perplexity" else 0.01
    ends = [(k, last["loss"][k], summary.head("test", quality, k).values[-1]) for k in range(summary.num_stages)]
    scores = [(k, loss, scale * score) for k, loss, score in ends if loss is not None and score is not None]
    result = hub.EvalResult(
        task_type="text-generation" if quality == "perplexity" else "image-classification",
        dataset_type=data.lower(),
        dataset_name=data,
        metric_type=quality,
        metric_value=round(scores[-1][2], 4),
    )
    facts = hub.ModelCardData(
        model_name=recipe.name, library_name="nwise", tags=["local-learning"], eval_results=[result]
    )
    return hub.ModelCard.from_template(
        facts,
        template_str=asset("card.md"),
        recipe=recipe,
        stages=summary.num_stages,
        strategy=summary.strategy,
        weights=weights,
        tokenizer=tokenizer,
        last=last,
        data=data,
        quality=quality,
        scores=scores,
        optimizer=", ".join(f"{name} {value}" for name, value in values["optimizer"].items() if value),
        history=summary.history,
    )
