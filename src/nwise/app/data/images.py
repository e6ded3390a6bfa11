"""Labelled images: bundled digits, or any data set that `datasets` reads.

B  batch    C  channels    H, W  height and width
"""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import ConcatDataset, Dataset, Subset

from nwise.app.data import augment, sources
from nwise.checks import check_limits, check_range, needed
from nwise.progress import MANY, with_progress_bar
from nwise.randomness import generator

Augmentation = Literal["none", "crop-flip", "resized-crop-flip"]
LazyImages = ConcatDataset[Tensor] | Subset[Tensor]  # images that are decoded on access


@dataclass(frozen=True, slots=True)
class Images:
    """Labelled images as bytes ``[C, H, W]``, all of one size or decoded on access.

    Args:
        pixels: uint8 ``[num, C, H, W]``, or a data set of uint8 ``[C, H, W]`` of any size.
        labels: int64 ``[num]``.
        classes: names of the classes.
        mean: mean of each channel after division of the pixels by 255; batches are normalised by it.
        deviation: standard deviation of each channel, likewise.
        augmentation: augmentation of training batches.
        size: height and width of the images in a batch.
    """

    pixels: Tensor | LazyImages
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    augmentation: Augmentation
    size: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Number of channels, C."""
        return len(self.mean)

    def to(self, device: torch.device) -> Images:
        """Move the labels, and the pixels if all images have one size, to a device."""
        pixels = self.pixels.to(device) if isinstance(self.pixels, Tensor) else self.pixels
        return replace(self, pixels=pixels, labels=self.labels.to(device))

    def batch(self, indices: Tensor, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return some normalised float images ``[B, C, H, W]`` and their labels ``[B]``; without a generator not augmented."""
        if isinstance(self.pixels, Tensor):
            return self.finished(self.pixels[indices.to(self.pixels.device)], indices, random)
        return self.finished(torch.stack([self[key] for key in self.keys(indices, random)]), indices, random)

    def keys(self, indices: Tensor, random: torch.Generator | None) -> list[tuple[int, int | None]]:
        """Return row and seed of the crop of each image of a batch that is decoded on access; the seed is None without a crop."""
        if random is None or self.augmentation == "none":
            return [(row, None) for row in indices.tolist()]
        seeds = torch.randint(2**62, (len(indices),), generator=random)
        return list(zip(indices.tolist(), seeds.tolist(), strict=True))

    def __getitem__(self, key: tuple[int, int | None]) -> Tensor:
        """Decode an image and cut it to size, uint8 ``[C, H, W]``; `key` is one of `keys`."""
        row, seed = key
        if seed is None:
            return augment.centre_crop(self.pixels[row], self.size)
        return augment.random_resized_crop(self.pixels[row], self.size, torch.Generator().manual_seed(seed))

    def finished(self, pixels: Tensor, indices: Tensor, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the batch of images that are decoded, and cut to size for `keys`; `random` is what made the keys."""
        if random is not None and self.augmentation != "none":
            pixels = augment.flip(pixels, random)
            if isinstance(self.pixels, Tensor):
                pixels = augment.crop(pixels, self.size // 8, random)
        device = self.labels.device
        mean, deviation = torch.tensor([self.mean, self.deviation], device=device)[:, :, None, None]
        return (pixels.to(device).float() / 255 - mean) / deviation, self.labels[indices.to(device)]

    def subset(self, indices: Tensor) -> Images:
        """Select some of the images; the normalisation stays."""
        every = self.pixels
        pixels = every[indices] if isinstance(every, Tensor) else Subset(every, indices.tolist())
        return replace(self, pixels=pixels, labels=self.labels[indices])


def digits(seed: int = 0) -> tuple[Images, Images]:
    """Split scikit-learn's 1,797 grey 8x8 digits into 1,437 training and 360 test images; needs no network.

    >>> train, test = digits()
    >>> len(train), len(test), train.size
    (1437, 360, 8)
    """
    # The loader of scikit-learn imports all of it and of SciPy, for two seconds at every start. Its file is read in no time.
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if file is not None and file.is_file():
        table = np.loadtxt(file, np.uint8, delimiter=",")  # 64 pixels of 0 to 16, and the label
        values = table[:, :64]
        target = table[:, 64]
    else:
        bundle = needed("sklearn.datasets", "app", "The bundled digits").load_digits()
        values = bundle.data
        target = bundle.target
    pixels = torch.from_numpy(np.round(values * (255 / 16)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(target.astype(np.int64))
    order = torch.randperm(len(labels), generator=generator(seed, "digits"))
    train = order[:1437]
    test = order[1437:]
    images = Images(pixels, labels, tuple(map(str, range(10))), *_statistics(pixels[train]), "none", 8)
    return images.subset(train), images.subset(test)


def _statistics(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    values = pixels.transpose(0, 1).flatten(1).double() / 255
    return tuple(values.mean(1).tolist()), tuple(values.std(1).clamp(min=1e-8).tolist())


# The training statistics of ImageNet, which would take a pass over 138 GB to compute.
_IMAGENET: tuple[tuple[float, ...], tuple[float, ...]] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def load_images(
    source: str,
    *,
    hub: str | None = None,
    num_classes: int | None = None,
    splits: tuple[str, str] = ("train", "test"),
    augmentation: Augmentation = "none",
    size: int | None = None,
    limit: tuple[int | None, int | None] = (None, None),
    shrink: int = 1,
    withheld: float = 0.0,
    seed: int = 0,
) -> tuple[Images, Images]:
    """Load training and test images through Hugging Face `datasets`.

    The arguments are the fields of `nwise.app.recipes.ImageSource`, its two limits in one, and the seed that draws the images to
    keep or withhold. Without `num_classes` any number will do.

    With `size` (ImageNet) images are decoded on access and normalised by ImageNet's statistics. Otherwise (CIFAR) they have one
    size, stay decoded in memory, and are normalised by the statistics of the training images.

    Raises:
        ValueError: a damaged image or an invalid label, by file and row (labels also of images that `limit` leaves out); a
            missing column; an augmentation that contradicts `size`.
    """
    if augmentation not in get_args(Augmentation):
        raise ValueError(f"`augmentation` should be {', '.join(get_args(Augmentation))}. Found {augmentation!r}.")
    if (augmentation == "resized-crop-flip") != (size is not None) and augmentation != "none":
        allowed = "'crop-flip' or 'none' without `size`, 'resized-crop-flip' or 'none' with it"
        raise ValueError(f"`augmentation` should be {allowed}. Found {augmentation!r} and `size = {size}`.")
    check_limits(train_limit=limit[0], test_limit=limit[1])
    if shrink < 1 or (shrink > 1 and size is not None):
        raise ValueError(f"`shrink` should be at least 1, and 1 with `size`. Found {shrink} and `size = {size}`.")
    check_range("withheld", withheld, 1, least=True)
    path = sources.local_folder(source)
    if path is not None and path.is_file() and not withheld:
        raise ValueError(
            f"`source` should be a folder with training and test images, or `withheld` above 0. Found the file {path}, which has "
            "no test images."
        )
    train_tables = sources.tables(source, splits[0], hub=hub)
    test_tables = [] if withheld else sources.tables(source, splits[1], hub=hub)
    classes = _classes(train_tables)
    own = [_Table(table, classes) for table in train_tables]
    if num_classes is not None:
        _check_classes(own, classes, num_classes)
    train = _joined(own, classes, size)
    if withheld:
        order = torch.randperm(len(train), generator=generator(seed, "withheld"))
        share = max(1, round(withheld * len(order)))
        if share >= len(order):
            raise ValueError(
                f"`withheld` should leave at least one of the {len(order)} training images. Found {withheld}."
            )
        train, test = train.subset(order[share:]), train.subset(order[:share])
    else:
        test = _joined([_Table(table, classes) for table in test_tables], classes, size)
    train, test = (_limited(images, count, seed) for images, count in zip((train, test), limit, strict=True))
    if size is None:
        pixels, test_pixels = (_shrink(_stack(images), shrink) for images in (train, test))
        height, width = pixels.shape[-2:]
        if height != width:
            raise ValueError(f"Images should be square, or `size` be given. Found {height} x {width}.")
        train = Images(pixels, train.labels, classes, *_statistics(pixels), "none", width)
        test = replace(train, pixels=test_pixels, labels=test.labels)
    return replace(train, augmentation=augmentation), test


def _joined(tables: list[_Table], classes: tuple[str, ...], size: int | None) -> Images:
    """Return the images of some tables, decoded on access; without a size they cannot be batched yet."""
    labels = torch.tensor([label for table in tables for label in table.labels], dtype=torch.int64)
    return Images(ConcatDataset(tables), labels, classes, *_IMAGENET, "none", size or 0)


def _limited(images: Images, count: int | None, seed: int) -> Images:
    """Draw at most `count` of the images by the seed."""
    if count is None or count >= len(images):
        return images
    return images.subset(torch.randperm(len(images), generator=generator(seed, "subset"))[:count])


def _shrink(pixels: Tensor, by: int) -> Tensor:
    """Average squares of `by` pixels' side."""
    if by == 1:
        return pixels
    height, width = pixels.shape[-2:]
    if height % by or width % by:
        raise ValueError(f"`shrink` should divide the images' size, {height} x {width}. Found {by}.")
    return functional.avg_pool2d(pixels.float(), by).round().to(torch.uint8)


_IMAGE = ("img", "image")
_LABEL = ("label", "fine_label", "labels")


def _labels(table: sources.Table) -> tuple[list[Any], list[str] | None]:
    """Return the column of labels, and the names that it declares for its numbers."""
    name = sources.column(table, _LABEL, "label")
    labels: list[Any] = table.rows[name][:]
    if wrong := [value for value in labels if isinstance(value, list | dict)]:
        where = f"{table.name}, column {name}"
        raise ValueError(f"The labels of {where}, should be numbers or texts. Found {wrong[0]!r}; convert them.")
    return labels, getattr(table.rows.features[name], "names", None)


def _classes(tables: list[sources.Table]) -> tuple[str, ...]:
    """Return the names that the label column declares, or all its values in order."""
    columns = list(map(_labels, tables))
    if (names := columns[0][1]) is not None:
        return tuple(names)
    values = {value for labels, _ in columns for value in labels} - {None}
    kinds = sorted({type(value).__name__ for value in values})
    if len(kinds) > 1:
        where = f"{tables[0].name} and the files beside it"
        found = " and ".join(kinds)
        raise ValueError(f"The labels of {where} should be of one type. Found {found}; convert them.")
    return tuple(map(str, sorted(values)))


class _Table(Dataset[Tensor]):
    """The images of one table, decoded on access, and their labels."""

    def __init__(self, table: sources.Table, classes: tuple[str, ...]) -> None:
        self.name = table.name
        image = sources.column(table, _IMAGE, "images")
        undecoded = sources.library().Image(decode=False)
        cells = table.rows.select_columns([image])
        try:
            self._images = cells.cast_column(image, undecoded)
        except Exception as error:
            found = f"Found {cells.features[image]}; convert them."
            raise ValueError(f"{table.name}, column {image}, should hold encoded images. {found}") from error
        values, names = _labels(table)
        numbers = {name: i for i, name in enumerate(classes)}
        self.labels: list[int] = []
        for row, value in enumerate(values):
            # Another file may have fewer names, or another order.
            named = names is not None and isinstance(value, int) and 0 <= value < len(names)
            name = names[value] if named else str(value)  # type: ignore[index]
            if name not in numbers:
                where = f"The label of {self.name}, row {row},"
                wanted = f"one of {len(numbers)} classes"
                raise ValueError(f"{where} should be {wanted}. Found {value!r}; correct or remove the row.")
            self.labels.append(numbers[name])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Tensor:
        (cell,) = self._images[row].values()
        return _decode(cell, f"{self.name}, row {row}")


def _check_classes(tables: list[_Table], classes: tuple[str, ...], num_classes: int) -> None:
    """Raise ValueError unless there are some number of classes; if more, it names the first row of one too many."""
    if len(classes) == num_classes:
        return
    rows = ((table.name, row, k) for table in tables for row, k in enumerate(table.labels) if k >= num_classes)
    more = next((f" The first class too many is {classes[k]!r} in {name}, row {row}." for name, row, k in rows), "")
    raise ValueError(
        f"`num_classes` should be the number of classes in {tables[0].name}, {len(classes)}. Found {num_classes}.{more}"
    )


def _decode(cell: Any, where: str) -> Tensor:
    pictures = needed("PIL.Image", "data", "A data set of images")
    try:
        content = cell["bytes"]
        picture = pictures.open(io.BytesIO(content) if content is not None else cell["path"])
        # A conversion of grey images to bytes clips larger values, and cuts off fractions.
        with np.errstate(invalid="ignore"):
            if picture.mode[0] in "IF" and not np.array_equal(grey := np.asarray(picture), grey.astype(np.uint8)):
                raise ValueError(f"mode {picture.mode} with values that are no bytes")
        array = np.asarray(picture.convert("RGB"))
    except Exception as error:
        raise ValueError(
            f"{where}, should hold a readable image. Found {type(error).__name__}: {error}; repair or remove the row."
        ) from error
    return torch.from_numpy(array.copy()).permute(2, 0, 1)


def _stack(images: Images) -> Tensor:
    """Decode all images, which should have one size."""
    first = images.pixels[0]
    pixels = torch.empty((len(images), *first.shape), dtype=torch.uint8)
    for i in with_progress_bar(range(len(images)), "decoding images", least=MANY):
        image = images.pixels[i]
        if image.shape != first.shape:
            raise ValueError(
                f"Images should have one size, or `size` be given. Found {tuple(image.shape[1:])} at number {i} after "
                f"{tuple(first.shape[1:])}."
            )
        pixels[i] = image
    return pixels
