"""Data: embedded, from `datasets`, damaged; order and augmentation as functions of numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nwise
from nwise.app.data import (
    Bpe,
    Bytes,
    Images,
    augment,
    batch_indices,
    batches,
    digits,
    embedded_text,
    load_images,
    load_text,
    make_streams,
    sources,
)
from nwise.app.data.loading import permutation, steps_per_epoch
from nwise.app.data.sources import tables
from nwise.app.data.text import standard_library
from nwise.app.training import evaluate
from nwise.losses import TokenCrossEntropy

datasets = pytest.importorskip("datasets", reason="needs the extra 'data'")
from PIL import Image  # noqa: E402


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def encoded(pixels: np.ndarray[Any, Any], kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def png(value: int, size: int = 4) -> bytes:
    return encoded(np.full((size, size, 3), value, dtype=np.uint8))


def write(folder: Path, rows: list[tuple[Any, Any]], test: list[tuple[Any, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for split, part in (("train", rows), ("test", rows if test is None else test)):
        table = {"img": [{"bytes": b, "path": None} for b, _ in part], "label": [label for _, label in part]}
        datasets.Dataset.from_dict(table).to_parquet(str(folder / f"{split}-0.parquet"))
    return folder


def write_folders(folder: Path, images: dict[str, bytes], splits: tuple[str, ...] = ("train", "test")) -> Path:
    """Write images, by class and name, into folders of each split."""
    for split in splits:
        for name, content in images.items():
            (folder / split / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / split / name).write_bytes(content)
    return folder


def first_values(images: Images) -> list[int]:
    """The first value of each image: all of an image of `png` are equal."""
    assert isinstance(images.pixels, torch.Tensor)
    return images.pixels[:, 0, 0, 0].tolist()


# Order


def test_order_is_a_function_of_seed_epoch_and_step() -> None:
    assert torch.equal(permutation(10, 1, 2), permutation(10, 1, 2))
    assert not torch.equal(permutation(10, 1, 2), permutation(10, 1, 3))
    assert not torch.equal(permutation(10, 1, 2), permutation(10, 2, 2))
    assert steps_per_epoch(11, 4) == 2
    epoch = torch.cat([batch_indices(11, 4, 0, step) for step in (4, 5)])
    assert torch.equal(epoch, permutation(11, 0, 2)[:8])
    with pytest.raises(ValueError, match="at most the 3 samples there are. Found 4"):
        steps_per_epoch(3, 4)
    with pytest.raises(ValueError, match="at least 1. Found 0"):
        steps_per_epoch(3, 0)


# Images


def test_digits_are_split_once_and_normalised() -> None:
    train, test = digits()
    assert (len(train), len(test), train.channels, train.size) == (1437, 360, 1, 8)
    x, y = train.batch(torch.arange(len(train)))
    assert x.mean().abs() < 1e-5
    assert x.std() == pytest.approx(1, abs=1e-3)
    assert torch.bincount(y, minlength=10).min() > 100
    assert isinstance(train.pixels, torch.Tensor)
    assert isinstance(test.pixels, torch.Tensor)
    seen = {row.numpy().tobytes() for row in train.pixels}
    assert sum(row.numpy().tobytes() in seen for row in test.pixels) == 0


def test_parquet_images_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [(png(10 * i), i % 3) for i in range(9)])
    train, test = load_images(str(folder), num_classes=3)
    assert train.classes == ("0", "1", "2")
    assert first_values(train) == [10 * i for i in range(9)]
    assert train.labels.tolist() == [i % 3 for i in range(9)]
    assert test.mean == train.mean
    few, _ = load_images(str(folder), limit=(4, 2))
    again, _ = load_images(str(folder), limit=(4, 2))
    assert len(few) == 4
    assert torch.equal(few.labels, again.labels)


def test_shrink_averages_square_blocks(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [(png(10 * i, 8), i % 3) for i in range(9)])
    train, test = load_images(str(folder), shrink=4)
    assert (train.size, test.size) == (2, 2)
    assert isinstance(train.pixels, torch.Tensor)
    assert train.pixels[:, 0].flatten(1).tolist() == [[10 * i] * 4 for i in range(9)]
    stripes = np.zeros((8, 8, 3), dtype=np.uint8)
    stripes[:, ::2] = 200
    striped, _ = load_images(str(write(tmp_path / "stripes", [(encoded(stripes), 0), (png(7, 8), 1)])), shrink=2)
    assert isinstance(striped.pixels, torch.Tensor)
    assert [pixels.unique().tolist() for pixels in striped.pixels] == [[100], [7]]
    for shrink, size, said in (
        (3, None, "`shrink` should divide the images' size, 8 x 8. Found 3"),
        (0, None, "`shrink` should be at least 1, .*Found 0"),
        (2, 8, "and 1 with `size`. Found 2 and `size = 8`"),
    ):
        with pytest.raises(ValueError, match=said):
            load_images(str(folder), shrink=shrink, size=size)


def test_withheld_images_are_tested_on_and_not_trained_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [(png(10 * i), i % 3) for i in range(20)], [(png(255), 0)])
    train, test = load_images(str(folder), withheld=0.25)
    seen, held = first_values(train), first_values(test)
    assert (len(seen), len(held)) == (15, 5)
    assert sorted(seen + held) == [10 * i for i in range(20)], "each once; and no test image"
    assert test.labels.tolist() == [value // 10 % 3 for value in held]
    assert test.mean == train.mean
    few, _ = load_images(str(folder), withheld=0.25, limit=(4, None))
    assert set(first_values(few)) < set(seen)
    assert first_values(load_images(str(folder), withheld=0.25, seed=1)[1]) != held
    with pytest.raises(ValueError, match="`withheld` should be a number of at least 0 and below 1. Found 1"):
        load_images(str(folder), withheld=1)


def test_crops_are_padded_by_an_eighth(tmp_path: Path) -> None:
    """Regression: shrunk images were padded by the paper's 4 pixels (for 32), so a crop could lose a quarter of them."""
    folder = write(tmp_path / "data", [(png(200, 16), i % 2) for i in range(40)])
    train, _ = load_images(str(folder), augmentation="crop-flip")
    x, _ = train.batch(torch.arange(40), torch.Generator().manual_seed(0))
    black = (x == x.min()).all(1)
    rows = black.all(2).sum(1)
    assert x.min() < x.max()
    assert rows.max() == 2


def test_class_names_become_numbers_in_order(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [(png(1), "dog"), (png(2), "cat"), (png(3), "dog")], [(png(1), "cat")])
    train, test = load_images(str(folder), num_classes=2)
    assert train.classes == ("cat", "dog")
    assert train.labels.tolist() == [1, 0, 1]
    assert test.labels.tolist() == [0]


def test_numeric_class_names_are_not_indices(tmp_path: Path) -> None:
    """Regression: folders 1, 2, 3 became the classes 0, 0, 1 because the index was looked up among the names."""
    folder = write(tmp_path / "data", [(png(1), 5), (png(2), 1), (png(3), 2)])
    train, _ = load_images(str(folder))
    assert train.classes == ("1", "2", "5")
    assert train.labels.tolist() == [2, 0, 1]
    folder = write_folders(tmp_path / "folders", {f"{name}/1.png": png(10 * name) for name in (1, 2, 3)})
    train, _ = load_images(str(folder), num_classes=3)
    assert train.labels.tolist() == [0, 1, 2]
    assert train.classes == ("1", "2", "3")
    folder = write(tmp_path / "zero", [(png(1), 1), (png(2), 2)], [(png(1), 0)])
    with pytest.raises(ValueError, match=r"test-0.parquet, row 0, should be one of 2 classes. Found 0"):
        load_images(str(folder))


def test_augmentation_conflicting_with_size_raises(tmp_path: Path) -> None:
    for augmentation, size in (("resized-crop-flip", None), ("crop-flip", 4)):
        with pytest.raises(ValueError, match=f"`augmentation` should be .*Found '{augmentation}' and `size = {size}`"):
            load_images(str(tmp_path), augmentation=augmentation, size=size)  # type: ignore[arg-type]


def test_image_folders_are_read_and_resized(tmp_path: Path) -> None:
    write_folders(tmp_path / "data", {"bee/1.png": png(100, 6), "ant/1.png": png(100, 9)})
    train, _ = load_images(str(tmp_path / "data"), num_classes=2, size=5, augmentation="resized-crop-flip")
    assert train.classes == ("ant", "bee")
    x, y = train.batch(torch.tensor([0, 1]), torch.Generator().manual_seed(0))
    assert x.shape == (2, 3, 5, 5)
    assert sorted(y.tolist()) == [0, 1]
    with pytest.raises(ValueError, match=r"one size, or `size` be given. Found \(\d, \d\) at number 1"):
        load_images(str(tmp_path / "data"))


@pytest.mark.parametrize("content", [b"not an image", png(3)[:40], b""])
def test_damaged_image_error_names_file_and_row(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "data", [(png(1), 0), (png(2), 1), (content, 0)])
    with pytest.raises(
        ValueError, match=r"train-0.parquet, row 2, should hold a readable image. Found .*; repair or remove"
    ):
        load_images(str(folder))


def test_wrong_label_error_names_file_and_row(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [(png(1), 0), (png(2), 1), (png(2), 2)])
    with pytest.raises(
        ValueError, match=r"classes in .*, 3. Found 2. The first class too many is '2' in .*train-0.parquet, row 2"
    ):
        load_images(str(folder), num_classes=2)
    with pytest.raises(ValueError, match="`num_classes` should be the number of classes in .*, 3. Found 5"):
        load_images(str(folder), num_classes=5)
    # Regression: a row without a label raised a TypeError.
    folder = write(tmp_path / "unlabelled", [(png(1), None), (png(2), 1), (png(2), 2)])
    with pytest.raises(ValueError, match=r"train-0.parquet, row 0, should be one of 2 classes. Found None"):
        load_images(str(folder), num_classes=3)
    folder = write(tmp_path / "other", [(png(1), "a"), (png(2), "b")], [(png(1), "a"), (png(2), "c")])
    with pytest.raises(ValueError, match=r"test-0.parquet, row 1, should be one of 2 classes. Found 'c'"):
        load_images(str(folder))


def test_images_that_are_not_square_are_refused(tmp_path: Path) -> None:
    """Regression: the width alone was their size, so training ended in a traceback."""
    folder = write(tmp_path / "data", [(encoded(np.zeros((4, 6, 3), dtype=np.uint8)), 0)])
    with pytest.raises(ValueError, match="Images should be square, or `size` be given. Found 4 x 6"):
        load_images(str(folder))


def test_columns_of_another_kind_are_refused(tmp_path: Path) -> None:
    for i, (image, label, message) in enumerate(
        (
            ([1, 2], [0, 1], r"train-0.parquet, column img, should hold encoded images. Found Value\('int64'\)"),
            (
                [{"bytes": png(1), "path": None}] * 2,
                [[0], [1]],
                r"column label, should be numbers or texts. Found \[0\]",
            ),
        )
    ):
        (folder := tmp_path / str(i)).mkdir()
        for split in ("train", "test"):
            table = datasets.Dataset.from_dict({"img": image, "label": label})
            table.to_parquet(str(folder / f"{split}-0.parquet"))
        with pytest.raises(ValueError, match=message):
            load_images(str(folder))


def test_missing_file_or_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"should hold train\*.parquet.*Found nothing"):
        load_images(str(tmp_path))
    datasets.Dataset.from_dict({"x": [1]}).to_parquet(str(tmp_path / "train.parquet"))
    (tmp_path / "test.parquet").write_bytes((tmp_path / "train.parquet").read_bytes())
    with pytest.raises(ValueError, match="a column with the label, named label or fine_label or labels. Found x"):
        load_images(str(tmp_path))
    (tmp_path / "test.parquet").write_bytes(b"broken")
    with pytest.raises(ValueError, match="test.parquet should be a readable parquet file"):
        load_images(str(tmp_path))


def test_unknown_data_set_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(FileNotFoundError, match="a data set of the hub. Found 'nobody/nothing' in none of them"):
        load_images("nobody/nothing")


@pytest.mark.parametrize("is_reached", [True, False])
def test_unreachable_hub_is_not_asked_again_and_again(is_reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: without a network six retries took half a minute, and the message did not say where a copy belongs."""
    from huggingface_hub import constants

    seen = []

    def load(*args: object, **kwargs: object) -> None:
        seen.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(sources, "getproxies", dict)
    monkeypatch.setattr(sources, "_answers", lambda url: is_reached)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    why = r"\(ConnectionError\)" if is_reached else "and no connection to the hub"
    where = r"`--source FOLDER`, or put it at \$NWISE_DATA/cifar10. A copy holds train\*.parquet, train\*.txt or a folder train/"
    with pytest.raises(
        FileNotFoundError, match=f"in none of them {why}; check the name, give a local copy with {where}"
    ):
        load_images("cifar10", hub="uoft-cs/cifar10")
    assert seen == [(not is_reached, not is_reached)]
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_one_file_is_not_training_and_test_data(tmp_path: Path) -> None:
    """Regression: the accuracy was that on the training images."""
    folder = write(tmp_path / "data", [(png(10 * i), i % 2) for i in range(4)])
    with pytest.raises(
        ValueError, match="or `withheld` above 0. Found the file .*train-0.parquet, which has no test images"
    ):
        load_images(str(folder / "train-0.parquet"))
    assert [len(part) for part in load_images(str(folder / "train-0.parquet"), withheld=0.25)] == [3, 1]
    with pytest.raises(ValueError, match="`withheld` should leave at least one of the 4 training images. Found 0.999"):
        load_images(str(folder / "train-0.parquet"), withheld=0.999)


def test_names_in_image_folders_are_no_splits(tmp_path: Path) -> None:
    """Regression: the library took files called test_0.png for another split, and left them out."""
    files = [f"{name}/{file}" for name in ("cat", "train") for file in ("train_0.png", "test_0.png", "0.png")]
    folder = write_folders(tmp_path / "set [1]", {file: png(i) for i, file in enumerate(files)})
    train, test = load_images(str(folder))
    assert (len(train), len(test), train.classes) == (6, 6, ("cat", "train"))


@pytest.mark.parametrize(("mode", "kind"), [("I;16", np.uint16), ("F", np.float32)])
def test_grey_images_whose_values_are_no_bytes_are_refused(mode: str, kind: type, tmp_path: Path) -> None:
    """Regression: all their pixels became 255, or 0."""
    image = encoded(np.full((4, 4), 300, dtype=kind), "TIFF")
    folder = write(tmp_path / "data", [(image, 0), (image, 1)])
    with pytest.raises(
        ValueError,
        match=f"row 0, should hold a readable image. Found ValueError: mode {mode} with values that are no bytes",
    ):
        load_images(str(folder))


def test_labels_of_two_types_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [(png(1), 0), (png(2), 1)])
    (folder / "train-0.parquet").rename(folder / "train-1.parquet")
    datasets.Dataset.from_dict({"img": [{"bytes": png(1), "path": None}], "label": ["a"]}).to_parquet(
        str(folder / "train-0.parquet")
    )
    with pytest.raises(ValueError, match="should be of one type. Found int and str"):
        load_images(str(folder))


def test_text_in_another_encoding_names_it(tmp_path: Path) -> None:
    (tmp_path / "text [1].txt").write_bytes("blå\n".encode("latin-1") * 3)
    with pytest.raises(ValueError, match="should be a readable text file in UTF-8. Found: UnicodeDecodeError"):
        load_text(str(tmp_path / "text [1].txt"))
    (tmp_path / "text [1].txt").write_text("blå\n" * 3)
    assert [len(part) for part in load_text(str(tmp_path / "text [1].txt"))] == [2, 1]
    with pytest.raises(ValueError, match="`sequence_length` should be an integer of at least 1. Found 0"):
        make_streams(["some text"], ["some text"], 0)


def test_hub_names_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: experiments looked for the split `heldout` on the hub, where it is `test`, and so did not run."""
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split, revision: asked.append((revision, split)))
    for hub in ("billion-word-benchmark/lm1b", "nobody/own"):
        for split in ("train", "heldout"):
            tables("nobody", split, hub=hub)
    assert [split for _, split in asked] == ["train", "test", "train", "heldout"]
    assert [branch for branch, _ in asked] == [*["refs/convert/parquet"] * 2, None, None], (
        "lm1b itself has only a script"
    )


def test_missing_data_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'nwise\[data\]'"):
        load_images(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'nwise\[data\]'"):
        Bpe.train(["abc"], 300)


def noise(seed: int, size: int) -> bytes:
    """Encode random pixels."""
    return encoded(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two worker processes decode even a few images."""
    monkeypatch.setattr("nwise.app.data.loading._SPARE", 1)
    monkeypatch.setattr("nwise.app.data.loading.num_cores", lambda: 2)


@pytest.mark.usefixtures("two_workers")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.parametrize("augmentation", ["none", "resized-crop-flip"])
def test_worker_processes_decode_the_same_batches(augmentation: Any, tmp_path: Path) -> None:
    """Bit for bit, in order, and without a draw from the global generator. Starting two processes takes a tenth of a second."""
    rows = [(noise(i, 6 + i % 3), i % 3) for i in range(12)]
    data, _ = load_images(str(write(tmp_path / "data", rows)), size=5, augmentation=augmentation)
    wanted = [torch.tensor(some) for some in ([3, 1, 2], [0, 11, 5], [7, 8], [9, 4])]

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(i) for i in range(4)]

    state = torch.get_rng_state()
    found = list(batches(data, zip(wanted, generators(), strict=True)))
    assert torch.equal(torch.get_rng_state(), state)
    expected = [data.batch(*one) for one in zip(wanted, generators(), strict=True)]
    assert len(found) == 4
    for (x, y), (a, b) in zip(found, expected, strict=True):
        assert torch.equal(x, a)
        assert torch.equal(y, b)
    if augmentation != "none":
        other = data.batch(wanted[0], torch.Generator().manual_seed(9))[0]
        assert not torch.equal(other, expected[0][0]), "crops come from the generator"


@pytest.mark.usefixtures("two_workers")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_damaged_image_is_named_by_a_worker_too(tmp_path: Path) -> None:
    rows = [(png(0), 0), (png(1), 1), (b"no image", 0), (png(3), 1)]
    data, _ = load_images(str(write(tmp_path / "data", rows)), size=4)
    found = batches(data, ((torch.tensor([i]), None) for i in range(4)))
    next(found), next(found)
    with pytest.raises(ValueError, match=r"^[^\n]*row 2, should hold a readable image. Found [^\n]*$"):
        next(found)


# Augmentation


def test_flips_and_crops_come_from_the_generator() -> None:
    images = torch.arange(2 * 1 * 4 * 4, dtype=torch.uint8).view(2, 1, 4, 4).repeat(32, 1, 1, 1)
    flipped = augment.flip(images, torch.Generator().manual_seed(0))
    kept = (flipped == images).flatten(1).all(1)
    assert 15 < int(kept.sum()) < 49
    assert torch.equal(flipped[~kept], images[~kept].flip(-1))
    cropped = augment.crop(images, 2, torch.Generator().manual_seed(0))
    assert torch.equal(cropped, augment.crop(images, 2, torch.Generator().manual_seed(0)))
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    windows = [padded[:, :, a : a + 4, b : b + 4] for a in range(5) for b in range(5)]
    found = torch.stack([(cropped == window).flatten(1).all(1) for window in windows])
    assert bool(found.any(0).all())
    assert len({int(i) for i in found.int().argmax(0)}) > 10


def test_random_resized_crops_have_the_size_and_stay_inside() -> None:
    image = torch.randint(0, 256, (3, 20, 31), dtype=torch.uint8)
    for seed in range(20):
        cut = augment.random_resized_crop(image, 8, torch.Generator().manual_seed(seed))
        assert cut.shape == (3, 8, 8)
        assert cut.dtype == torch.uint8
    # A picture of its own coordinates tells how large the window was: 8 to 100 % of the area, on average half.
    line = torch.linspace(0, 255, 64).to(torch.uint8).expand(64, 64)
    ramp = torch.stack([line, line.T])
    areas = []
    for seed in range(200):
        cut = augment.random_resized_crop(ramp, 16, torch.Generator().manual_seed(seed)).float() / 255
        spans = [(cut[c].max() - cut[c].min()).item() for c in (0, 1)]
        areas.append(spans[0] * spans[1])
    assert min(areas) < 0.15
    assert max(areas) > 0.85
    assert sum(areas) / 200 == pytest.approx(0.5, abs=0.06)
    assert augment.centre_crop(image, 10).shape == (3, 10, 10)
    assert torch.equal(augment.centre_crop(image[:, :, :20], 20), image[:, :, :20])


# Text


def test_byte_stream_is_cut_into_windows() -> None:
    train, test = make_streams(["abcdefg"], ["xyzxyz"], 3)
    assert len(train) == 2
    x, y = train.batch(torch.tensor([1]))
    assert train.tokenizer.decode(x[0].tolist()) == "def"
    assert train.tokenizer.decode(y[0].tolist()) == "efg"
    assert test.tokenizer is train.tokenizer
    assert Bytes().decode(Bytes().encode("naïve")) == "naïve"
    with pytest.raises(ValueError, match="test text should have more than `sequence_length = 6` tokens. Found 2"):
        make_streams(["abcdefg"], ["xy"], 6)


@pytest.mark.parametrize("vocabulary_size", [None, 260])
def test_a_sentence_a_row(vocabulary_size: int | None) -> None:
    """Rows begin with a line feed, long sentences are cut off, and nothing behind the end of a short one is a target."""
    lines = ["ab\n", "abcdefgh\n", "x\n"]
    train, test = make_streams(lines, lines[::-1], 4, vocabulary_size, packed=False)
    assert (len(train), len(test)) == (3, 3)
    feed = train.tokenizer.encode("\n")
    assert len(feed) == 1
    for tokens, texts in ((train, lines), (test, lines[::-1])):
        x, y = tokens.batch(torch.arange(3))
        assert x.dtype == y.dtype == torch.int64
        for row, text in enumerate(texts):
            expected = (feed + tokens.tokenizer.encode(text))[:5]
            assert x[row, : len(expected) - 1].tolist() == expected[:-1]
            assert y[row].tolist() == expected[1:] + [-100] * (5 - len(expected))
    assert train.to(torch.device("cpu")).ends is not None


def test_texts_are_encoded_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {i}\n" for i in range(5)]
    (whole, _), sizes = make_streams(lines, lines, 4, 300), []
    encode_all = Bpe.encode_all
    monkeypatch.setattr("nwise.app.data.text._AT_ONCE", 2)

    def counted(bpe: Bpe, texts: list[str]) -> list[list[int]]:
        sizes.append(len(texts))
        return encode_all(bpe, texts)

    monkeypatch.setattr(Bpe, "encode_all", counted)
    apart, _ = make_streams(lines, lines, 4, tokenizer=whole.tokenizer)
    assert torch.equal(apart.stream, whole.stream)
    assert whole.tokenizer.decode(whole.stream.tolist()) == "".join(lines)
    assert sizes == [2, 2, 1] * 2


def test_padding_is_no_answer() -> None:
    """Scores are per token of the sentences: those of the rows without padding."""
    train, _ = make_streams(["ab\n", "c\n"], ["ab\n"], 6, packed=False)
    pipe = nwise.Pipeline([nn.Embedding(256, 256)], [], TokenCrossEntropy(), "end-to-end")
    x, y = train.batch(torch.arange(2))
    logits = pipe(x)[y >= 0].float()
    score = evaluate(pipe, train, 2).heads[0]
    assert score is not None
    assert len(logits) == 3 + 2
    assert score.loss == pytest.approx(nn.functional.cross_entropy(logits, y[y >= 0]).item(), rel=1e-6)
    assert score.accuracy == (logits.argmax(-1) == y[y >= 0]).float().mean()


def test_one_billion_word_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Regression: neither the folders of the archive nor the converted files of the hub were found."""
    archive = tmp_path / "archive"
    for folder, files in {
        "training-monolingual.tokenized.shuffled": {
            "news.en-00002-of-00100": "b\nc\n",
            "news.en-00001-of-00100": "a\n",
        },
        "heldout-monolingual.tokenized.shuffled": {"news.en.heldout-00000-of-00050": "d\n"},
    }.items():
        (archive / folder).mkdir(parents=True)
        for name, text in files.items():
            (archive / folder / name).write_text(text)
    assert load_text(str(archive), sentences=True) == (["a\n", "b\n", "c\n"], ["d\n"])
    for split, texts in {"train": ["a", "b"], "test": ["c"]}.items():
        (tmp_path / "converted" / split).mkdir(parents=True)
        datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "converted" / split / "0000.parquet")
    assert load_text(str(tmp_path / "converted"), sentences=True) == (["a\n", "b\n"], ["c\n"])


def test_embedded_text_is_the_standard_library() -> None:
    (train,), (test,) = embedded_text()
    assert len(train) > 1_000_000
    assert train + test == standard_library()
    assert "def " in test


def test_withheld_text_is_the_end_of_the_training_text() -> None:
    (train,), (test,) = embedded_text(100_000)
    (kept,), (withheld,) = embedded_text(100_000, withheld=0.25)
    assert kept + withheld == train
    assert len(withheld) == pytest.approx(0.25 * len(train), abs=1)
    assert embedded_text(100_000, test_limit=100)[1] == [test[:100]]
    with pytest.raises(ValueError, match="`withheld` should be a number of at least 0 and below 1. Found 1"):
        embedded_text(100_000, withheld=1)


def test_bpe_is_lossless_and_shorter(tmp_path: Path) -> None:
    text = standard_library(50_000)
    bpe = Bpe.train([text], 400)
    assert bpe.vocabulary_size == 400
    assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode(text)) < 0.8 * len(text.encode())
    bpe.save(tmp_path / "tokenizer.json")
    assert Bpe.load(tmp_path / "tokenizer.json").encode(text) == bpe.encode(text)
    with pytest.raises(ValueError, match="at least 257. Found 100"):
        Bpe.train([text], 100)


def test_text_files_are_read_and_single_files_are_cut(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("one\ntwo\n")
    (tmp_path / "heldout.txt").write_text("three\n")
    assert load_text(str(tmp_path), sentences=True) == (["one\n", "two\n"], ["three\n"])
    (tmp_path / "book.txt").write_text("\n".join(map(str, range(40))))
    train, test = load_text(str(tmp_path / "book.txt"))
    assert (len(train), test) == (38, ["38\n", "39\n"])


def test_empty_text_error_names_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("one\n\nthree\n")
    (tmp_path / "heldout.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"train.txt, row 1, should hold a text. Found ''; remove the row, or set"):
        load_text(str(tmp_path), sentences=True)
    with pytest.raises(ValueError, match=r"heldout.txt should hold text. Found 2 empty rows"):
        load_text(str(tmp_path))
    (tmp_path / "heldout.txt").write_text("")
    with pytest.raises(ValueError, match=r"heldout.txt should"):
        load_text(str(tmp_path))


# The real thing


def test_real_cifar10(shared_data: Path) -> None:
    del shared_data
    train, test = load_images("cifar10", num_classes=10, limit=(300, 100), augmentation="crop-flip")
    assert train.classes[3] == "cat"
    x, y = train.batch(torch.arange(64), torch.Generator().manual_seed(0))
    assert x.shape == (64, 3, 32, 32)
    assert x.std() == pytest.approx(1, abs=0.2)
    assert len(set(y.tolist())) == 10
    assert len(test) == 100


def test_real_one_billion_word(shared_data: Path) -> None:
    del shared_data
    train, test = load_text("lm1b", sentences=True)
    assert (len(train), len(test)) == (12216, 12105)
    assert sum(len(line.split()) for line in train) == 310490


def test_test_folders_may_lack_a_class(tmp_path: Path) -> None:
    """Regression: labels were indices into each folder's own classes."""
    write_folders(tmp_path, {f"{name}/0.png": png(0) for name in ("bird", "cat", "dog")}, ("train",))
    write_folders(tmp_path, {f"{name}/0.png": png(0) for name in ("cat", "dog")}, ("test",))
    train_images, test_images = load_images(str(tmp_path))
    assert train_images.classes == ("bird", "cat", "dog")
    assert test_images.labels.tolist() == [1, 2]


def test_numbers_are_no_text(tmp_path: Path) -> None:
    """A column of numbers called `text` ended in a traceback."""
    for split in ("train", "heldout"):
        datasets.Dataset.from_dict({"text": [1, 2, 3]}).to_parquet(str(tmp_path / f"{split}.parquet"))
    with pytest.raises(ValueError, match=r"row 0, should hold a text. Found 1; remove the row\."):
        load_text(str(tmp_path))
