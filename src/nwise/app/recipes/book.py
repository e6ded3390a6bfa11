"""The recipes: complete configurations by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from nwise.app.recipes.config import ConvNet, Digits, EmbeddedText, Gpt, ImageSource, Recipe, ResNet, TextSource
from nwise.app.recipes.optimizers import Adam, Sgd
from nwise.checks import hint

RECIPES: dict[str, Callable[[], Recipe]] = {}


def _named(make: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Enter a recipe into `RECIPES` under the name of its function; its docstring is its description."""
    name = make.__name__.replace("_", "-")

    @wraps(make)
    def named() -> Recipe:
        return replace(make(), name=name)

    RECIPES[name] = named
    return named


def recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    >>> recipe("digits").strategy
    '2-wise-mean'
    """
    if name not in RECIPES:
        raise ValueError(f"A recipe should be one of {', '.join(RECIPES)}. Found {name!r}.{hint(name, RECIPES)}")
    return RECIPES[name]()


# Embedded: no network, no files.


@_named
def digits() -> Recipe:
    """Bundled 8x8 digits, a 4-stage convolutional network: under a minute on 2 cores."""
    return Recipe(data=Digits(), model=ConvNet(num_stages=4), optimizer=Adam(lr=1e-3), batch_size=64, epochs=20)


@_named
def source_code() -> Recipe:
    """Bytes of Python's standard library, a small 4-stage GPT: a few minutes on 2 cores."""
    return Recipe(
        data=EmbeddedText(),
        model=Gpt(blocks_per_stage=1, width=128, sequence_length=64, head_blocks=1),
        optimizer=Adam(lr=128**-0.5, beta2=0.98, eps=1e-9, warmup_steps=200),
        strategy="2-wise-mean",
        batch_size=32,
        epochs=1,
        max_steps=600,
        eval_every=0.1,
    )


# The paper's small convolutional network.

_CIFAR10 = ImageSource(source="cifar10", hub="uoft-cs/cifar10")


@_named
def cifar10_convnet_small() -> Recipe:
    """E1, small: half the filters, 10,000 images of CIFAR-10 at half their size, 4 epochs, a minute on a core."""
    data = replace(_CIFAR10, train_limit=10000, test_limit=2000, shrink=2)
    model = ConvNet(num_stages=6, filters=16)
    return Recipe(data=data, model=model, optimizer=Adam(lr=5e-4), batch_size=64, epochs=4, eval_every=2)


@_named
def cifar10_convnet() -> Recipe:
    """E1, full size: 6-stage convolutional network on CIFAR-10, Adam 1e-4, 100 epochs (batch 128 is our choice)."""
    return Recipe(data=_CIFAR10, model=ConvNet(num_stages=6), optimizer=Adam(lr=1e-4), epochs=100)


# The paper's residual networks.

_CROP_FLIP = replace(_CIFAR10, augmentation="crop-flip")
_DROPS = (91 / 200, 136 / 200, 182 / 200)
_LATE_DROPS = (0.7, 0.85, 0.95)  # of the paper's shorter runs


@_named
def cifar10_resnet_small() -> Recipe:
    """E2, small: two blocks a stage, an eighth of the channels, 10,000 images halved in size, 5 epochs, a minute on a core."""
    data = replace(_CROP_FLIP, train_limit=10000, test_limit=5000, shrink=2)
    model = ResNet(variant="18", width_factor=1 / 8)
    return Recipe(data=data, model=model, optimizer=Sgd(drops=_LATE_DROPS), epochs=5)


@_named
def cifar10_resnet() -> Recipe:
    """E2, full size: ResNet-32 on CIFAR-10, SGD 0.1, 200 epochs: 38 hours on 2 cores; try cifar10-resnet-small first."""
    return Recipe(data=_CROP_FLIP, model=ResNet(), optimizer=Sgd(drops=_DROPS), epochs=200)


@_named
def cifar10_finetune() -> Recipe:
    """E4, full size: 80 epochs local, heads discarded, optimizer reset, 20 epochs end-to-end."""
    sgd = Sgd()  # 1-wise's own schedule drops first after 112 epochs
    then = Sgd(drops=(12 / 20, 16 / 20, 18 / 20))
    strategy = "local@80epochs,end-to-end"
    return Recipe(data=_CROP_FLIP, model=ResNet(), optimizer=sgd, then=then, strategy=strategy, epochs=100)


@_named
def cifar100_resnet() -> Recipe:
    """E2, full size: the paper's ResNet-32 on CIFAR-100, SGD 0.1, 200 epochs: 38 hours on 2 cores."""
    data = ImageSource(source="cifar100", hub="uoft-cs/cifar100", num_classes=100, augmentation="crop-flip")
    return Recipe(data=data, model=ResNet(), optimizer=Sgd(drops=_DROPS), epochs=200)


@_named
def imagenet_resnet() -> Recipe:
    """E2, full size: ResNet-50 on ImageNet, SGD 0.1 divided by 10 on plateaus, 120 epochs, batch 256."""
    data = ImageSource(
        source="imagenet",
        hub="ILSVRC/imagenet-1k",
        num_classes=1000,
        splits=("train", "validation"),
        augmentation="resized-crop-flip",
        size=224,
    )
    sgd = Sgd(plateau_epochs=10)
    return Recipe(data=data, model=ResNet(variant="50"), optimizer=sgd, epochs=120, batch_size=256)


# The paper's Transformer.

_LM1B = TextSource(source="lm1b", hub="billion-word-benchmark/lm1b", sentences=True)


@_named
def lm1b_small() -> Recipe:
    """E6, small: 4 stages of one block, width 64, BPE of 500 on a piece of One Billion Word, a minute on a core."""
    return Recipe(
        data=replace(_LM1B, test_limit=200),
        model=Gpt(blocks_per_stage=1, width=64, sequence_length=32, head_blocks=1, vocabulary_size=500),
        optimizer=Adam(lr=0.025, beta2=0.98, eps=1e-9, warmup_steps=40),
        strategy="2-wise-mean",
        batch_size=16,
        epochs=1,
        max_steps=400,
        eval_every=0.025,
    )


@_named
def lm1b() -> Recipe:
    """E6, full size: 152M parameters a stage and head on One Billion Word, batches of 1024 sentences, one epoch."""
    return Recipe(
        data=replace(_LM1B, packed=False),
        model=Gpt(vocabulary_size=50257),
        optimizer=Adam(lr=1024**-0.5, beta2=0.98, eps=1e-9, warmup_steps=4000),
        strategy="2-wise-mean",
        microbatches=16,  # for memory: no gradient depends on it
        batch_size=1024,
        epochs=1,
        eval_every=0.05,
        precision="bf16",
    )
