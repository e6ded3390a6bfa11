"""A run's complete configuration: frozen dataclasses, stored as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro
from typeguard import CollectionCheckStrategy, TypeCheckError, check_type

from nwise.app import models
from nwise.app.data import images as image_data
from nwise.app.data import text as text_data
from nwise.app.data.images import Augmentation, Images
from nwise.app.data.text import Tokenizer, Tokens
from nwise.app.models import StagedModel
from nwise.app.recipes.loop import OwnLoop, Quality
from nwise.app.recipes.optimizers import Adam, Sgd
from nwise.app.recipes.phases import Phases, parse_phases
from nwise.checks import check_at_least, check_limits, check_range
from nwise.compression import named
from nwise.schedule.named import ORDERS, check_order
from nwise.schedule.placement import check_name, parse_placement
from nwise.strategies import Heads
from nwise.strategies.base import example_names

__all__ = ["FLAT"]


@dataclass(frozen=True, kw_only=True)
class Digits:
    """scikit-learn's bundled digits."""

    def load(self, seed: int) -> tuple[Images, Images]:
        return image_data.digits(seed)


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Images through Hugging Face `datasets`."""

    source: str
    """A local folder, a name inside $NWISE_DATA, or a data set of the hub."""
    hub: str | None = None
    """Name on the hub if there is no local `source`."""
    num_classes: int = 10
    """Expected number of classes."""
    splits: tuple[str, str] = ("train", "test")
    """Names of the training and the test split."""
    augmentation: Augmentation = "none"
    """Augmentation of training batches."""
    size: int | None = None
    """Height and width to crop to; None if all images have one size."""
    train_limit: int | None = None
    """Training images to keep; None for all."""
    test_limit: int | None = None
    """Test images to keep; None for all."""
    shrink: int = 1
    """Side in pixels of the squares averaged into one pixel, for small trials."""
    withheld: float = 0.0
    """Share of the training images to test on instead of the test images; they are not trained on."""

    def load(self, seed: int) -> tuple[Images, Images]:
        options = dict(vars(self))
        limit = options.pop("train_limit"), options.pop("test_limit")
        return image_data.load_images(**options, limit=limit, seed=seed)


@dataclass(frozen=True, kw_only=True)
class EmbeddedText:
    """Source code of the interpreter's standard library, as bytes."""

    max_bytes: int = 2_000_000
    """Size of the source after which to stop."""
    test_limit: int | None = None
    """Test characters to keep, from the start; None for all."""
    withheld: float = 0.0
    """Share of the training text, its end, to test on instead of the test text; it is not trained on."""

    def __post_init__(self) -> None:
        check_at_least(1, max_bytes=self.max_bytes)
        check_limits(test_limit=self.test_limit)
        check_range("withheld", self.withheld, 1, least=True)

    def texts(self) -> tuple[list[str], list[str]]:
        return text_data.embedded_text(self.max_bytes, withheld=self.withheld, test_limit=self.test_limit)


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Text through Hugging Face `datasets`."""

    source: str
    """A local folder or file, a name inside $NWISE_DATA, or a data set of the hub."""
    hub: str | None = None
    """Name on the hub if there is no local `source`."""
    splits: tuple[str, str] = ("train", "heldout")
    """Names of the training and the test split."""
    sentences: bool = False
    """Whether every line is a sentence, so an empty one is an error."""
    packed: bool = True
    """Whether sequences continue over line ends; if not, every line is a row, cut off or padded to the sequence length."""
    train_limit: int | None = None
    """Training lines to keep, from the start; None for all."""
    test_limit: int | None = None
    """Test lines to keep, from the start; None for all."""

    def __post_init__(self) -> None:
        check_limits(train_limit=self.train_limit, test_limit=self.test_limit)

    def texts(self) -> tuple[list[str], list[str]]:
        train, test = text_data.load_text(self.source, hub=self.hub, splits=self.splits, sentences=self.sentences)
        return train[: self.train_limit], test[: self.test_limit]


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A multi-layer perceptron (`nwise.app.models.mlp`)."""

    num_stages: int = 4
    """Number of stages."""
    width: int = 128
    """Width of every hidden layer."""

    def build(self, data: Images, seed: int) -> StagedModel:
        features = data.channels * data.size**2
        return models.mlp(self.num_stages, features, self.width, len(data.classes), seed=seed)


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """The paper's small convolutional network (`nwise.app.models.convnet`)."""

    num_stages: int = 6
    """Number of stages."""
    filters: int = 32
    """Filters of the first stages; the last two have twice as many."""

    def build(self, data: Images, seed: int) -> StagedModel:
        images = {"num_classes": len(data.classes), "in_channels": data.channels, "image_size": data.size}
        return models.convnet(**vars(self), **images, seed=seed)


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """A residual network (`nwise.app.models.resnet`)."""

    variant: Literal["paper-32", "18", "32", "50"] = "paper-32"
    """paper-32: the paper's; 18: the same with two blocks a stage; 32: He's; 50: with bottlenecks, for ImageNet."""
    width_factor: float = 1.0
    """Factor of all channels."""

    def build(self, data: Images, seed: int) -> StagedModel:
        return models.resnet(self.variant, len(data.classes), data.size, width_factor=self.width_factor, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Gpt:
    """The paper's Transformer (`nwise.app.models.gpt`)."""

    num_stages: int = 4
    """Number of stages."""
    blocks_per_stage: int = 6
    """Transformer blocks of each stage."""
    width: int = 1024
    """Width of the tokens."""
    num_heads: int = 4
    """Attention heads of each block."""
    head_blocks: int = 2
    """Transformer blocks of each auxiliary head."""
    head_rank: int | None = None
    """Rank of the vocabulary matrix of each auxiliary head; None for any."""
    loss_fraction: float = 1.0
    """Fraction of the tokens, drawn at random in every step, that the losses take in training."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    vocabulary_size: int | None = None
    """Vocabulary size of a byte-pair encoding trained on the text; None for bytes."""

    def build(self, data: Tokens, seed: int) -> StagedModel:
        return models.gpt(**{**vars(self), "vocabulary_size": data.tokenizer.vocabulary_size}, seed=seed)


Text = EmbeddedText | TextSource
Data = Digits | ImageSource | Text
Model = Mlp | ConvNet | ResNet | Gpt
Optimizer = Sgd | Adam

# For options without a prefix: the command line has `--lr`, not `--optimizer.lr`.
FLAT = tyro.conf.arg(name="")

_STRATEGY_HELP = (
    f"Which loss trains which stage: {', '.join(example_names())}. credit- has the rows of a custom matrix. "
    "local@500,end-to-end changes after step 500, local@3epochs,end-to-end after epoch 3."
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete configuration: every setting that determines a run's results."""

    name: tyro.conf.Suppress[str] = "custom"
    """Name of the recipe that this configuration derives from."""
    data: Annotated[Data, FLAT] = field(default_factory=Digits)
    """Training and test data."""
    model: Annotated[Model, FLAT] = field(default_factory=ConvNet)
    """The network."""
    network: Annotated[str, tyro.conf.arg(name="model", metavar="MODULE:FUNCTION")] = ""
    """Your own network instead: a function of the training data that returns stages, and heads of all but the last."""
    cut: tuple[int, ...] = ()
    """Numbers of the network's own stages to merge into each stage, separated by spaces, e.g. 2 2; empty: no merging."""
    optimizer: Annotated[Optimizer, FLAT] = field(default_factory=Adam)
    """Optimizer of every stage and head."""
    then: Optimizer | None = None
    """Settings of the new optimizer after a switch of strategy; None keeps the settings of `optimizer`."""
    strategy: Annotated[str, tyro.conf.arg(help=_STRATEGY_HELP)] = "2-wise-mean"
    heads: Heads = "live"
    """Heads to run: live, those whose loss trains a stage; all, the others too, as probes that train themselves only."""
    microbatches: int = 1
    """Number of parts to cut a mini-batch into, M."""
    batch_size: int = 128
    """Samples in a mini-batch."""
    epochs: float = 10
    """Passes over the training data."""
    max_steps: int | None = None
    """Number of steps after which to stop, even before `epochs` are over."""
    eval_every: float = 1
    """Epochs between evaluations of every head; the end is always evaluated."""
    log_every: int = 10
    """Steps between records of the training losses."""
    clip: float | None = None
    """Norm to clip the gradients to; None for no clipping."""
    clip_by: Literal["global", "stage", "loss"] = "global"
    """Gradients that share a norm: all, those of a stage and its head, or those of the stages that share a loss."""
    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    """On a value that is not finite: stop all processes, skip the update of all stages that share the loss, or ignore it."""
    stage_lr: tuple[float, ...] = ()
    """Factors of the learning rates of the stages and their heads, separated by spaces; empty: all 1."""
    schedule: Annotated[str, tyro.conf.arg(metavar="{" + ",".join(ORDERS) + "}")] = "best"
    """Order of work with several processes. In one process it affects only memory, and best is depth-first."""
    placement: str = "contiguous"
    """Process of each stage, with several processes: contiguous, interleaved, v, or ranks like 0,1,1,0 (`nwise plan`)."""
    compress: str = "none"
    """Compression of the messages between two stages: none, bf16, int8, or top-5% for the largest 5 percent."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 runs forwards under autocast."""
    defer_batchnorm: bool = False
    """Update batch norm's running statistics once per mini-batch, not once per micro-batch."""
    recompute: bool = False
    """Keep only each stage's input and rerun its forward before the backward passes."""
    compile: bool = False
    """Compile the blocks of every stage and head; needs a C++ compiler."""
    capture: bool = False
    """Record steps on a GPU and replay them without Python; not for delays, compression or replicas."""
    channels_last: bool = False
    """Store images and convolutions channels innermost, for GPUs; on a CPU not strided 1x1 convolutions of under 16 channels."""
    device: str = "auto"
    """Device to run on; auto is cuda if there is one, else cpu."""
    seed: int = 0
    """Seed of initial values, order, augmentation and dropout."""

    def __post_init__(self) -> None:
        check_at_least(1, batch_size=self.batch_size, log_every=self.log_every)
        check_limits(max_steps=self.max_steps)
        check_range("epochs", self.epochs, 1e12)
        check_range("eval_every", self.eval_every, 1e12)
        if self.clip is not None:
            check_range("clip", self.clip)
        for factor in self.stage_lr:
            check_range("stage_lr", factor, least=True)
        if self.microbatches > self.batch_size:
            raise ValueError(
                f"`microbatches` should be at most `batch_size = {self.batch_size}`. Found {self.microbatches}."
            )
        for name, kind in {"data": Data, "model": Model, "optimizer": Optimizer, "then": Optimizer | None}.items():
            if not isinstance(value := getattr(self, name), kind):
                kinds = ", ".join(k.__name__ for k in get_args(kind))
                raise TypeError(f"`{name}` should be one of {kinds}. Found {value!r}.")
        is_text = isinstance(self.data, Text)
        if isinstance(self.model, Gpt) != is_text:
            model = type(self.model).__name__
            data = type(self.data).__name__
            raise ValueError(f"`model` and `data` should both be of text or both of images. Found {model} and {data}.")
        if self.network and self.cut:
            raise ValueError(f"`cut` should be empty with `model`, so leave it out. Found {self.cut}.")
        if self.channels_last and is_text:
            raise ValueError("`channels_last` should be off for text, which has none. Found it on; leave it out.")
        check_order(self.schedule)
        if isinstance(placement := parse_placement(self.placement), str):
            check_name(placement)
        named(self.compress)
        try:
            self.phases(1)
        except ValueError as error:
            try:  # changes within an epoch are in order if it has enough steps
                self.phases(10**6)
            except ValueError:
                raise error from None

    @property
    def quality(self) -> Quality:
        """Name of the heads' score besides the loss."""
        return "perplexity" if isinstance(self.data, Text) else "accuracy"

    def phases(self, steps_per_epoch: int) -> Phases:
        """Return the first step of every strategy of a run, and the strategy."""
        return parse_phases(self.strategy, steps_per_epoch, self.heads)

    def load(self, tokenizer: Tokenizer | None = None) -> tuple[Images, Images] | tuple[Tokens, Tokens]:
        """Load the training and the test data; text by an existing tokenizer or a new one."""
        if not isinstance(self.data, Text):
            return self.data.load(self.seed)
        assert isinstance(self.model, Gpt)
        train, test = self.data.texts()
        sizes = self.model.sequence_length, self.model.vocabulary_size
        packed = not isinstance(self.data, TextSource) or self.data.packed
        return text_data.make_streams(train, test, *sizes, tokenizer, packed=packed)

    def build(self, data: Images | Tokens) -> StagedModel:
        """Build the network for the data."""
        if self.network:
            return models.own(self.network, data, self.seed)
        model = self.model.build(data, self.seed)  # type: ignore[arg-type] # __post_init__ checks that they match
        return models.merged(model, self.cut, self.seed) if self.cut else model


_TYPES = {kind.__name__: kind for kind in (*get_args(Data | Model | Optimizer), OwnLoop, Recipe)}


def to_json(config: Any) -> Any:
    """Turn a configuration into JSON values; a dataclass has its name under ``type``.

    >>> from_json(to_json(Recipe())) == Recipe()
    True
    """
    if dataclasses.is_dataclass(config):
        values = {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
        return {"type": type(config).__name__, **values}
    return list(config) if isinstance(config, tuple) else config


def from_json(value: Any) -> Any:
    """Rebuild the object from the result of `to_json`; unknown names and values of the wrong type are errors."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    name = value.get("type")
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"`type` should be one of {', '.join(_TYPES)}. Found {name!r}.")
    hints = get_type_hints(kind)
    fields = {key: from_json(inner) for key, inner in value.items() if key != "type"}
    for key, inner in fields.items():
        if key not in hints:
            raise ValueError(f"A {name} should have fields {', '.join(sorted(hints))}. Found {key!r}.")
        try:
            check_type(inner, hints[key], collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        except TypeCheckError as error:
            expected = getattr(hints[key], "__name__", hints[key])
            raise ValueError(f"`{key}` should be of type {expected}. Found {inner!r}.") from error
    for f in dataclasses.fields(kind):
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in fields:
            raise ValueError(f"A {name} should have {f.name!r}. Found none.")
    return kind(**fields)
