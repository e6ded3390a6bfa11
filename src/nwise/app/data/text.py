"""Text as a stream of tokens: Python's standard library, or any text that `datasets` reads.

B  batch    T  sequence length
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwise.app.data import sources
from nwise.checks import check_at_least, check_range, needed
from nwise.progress import with_progress_bar

__all__ = ["Bpe", "Bytes", "Tokens", "embedded_text", "load_text", "make_streams", "standard_library"]

_TEST_SHARE = 0.05  # of the standard library


class Bytes:
    """A tokenizer for which every byte of UTF-8 is a token."""

    vocabulary_size = 256  # number of different tokens, V

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text.

        >>> Bytes().encode("né")
        [110, 195, 169]
        """
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        """Decode bytes; invalid UTF-8 becomes a replacement character."""
        return bytes(tokens).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Write the tokenizer as JSON."""
        path.write_text(json.dumps({"type": "bytes"}))


class Bpe:
    """Byte-level byte-pair encoding by Hugging Face `tokenizers`, trained on the training text."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary_size: int) -> Bpe:
        """Learn the merges from pieces of text; a vocabulary has at least 257 tokens, 256 bytes and one merge."""
        if vocabulary_size < 257:
            raise ValueError(
                f"`vocabulary_size` of a byte-pair encoding should be at least 257. Found {vocabulary_size}."
            )
        library = _tokenizers()
        inner = library.Tokenizer(library.models.BPE())
        inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = library.decoders.ByteLevel()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        options = {"vocab_size": vocabulary_size, "initial_alphabet": alphabet, "show_progress": False}
        inner.train_from_iterator(texts, library.trainers.BpeTrainer(**options))
        return cls(inner)

    @classmethod
    def load(cls, path: Path) -> Bpe:
        """Read a file written by `save`."""
        return cls(_tokenizers().Tokenizer.from_file(str(path)))

    @property
    def vocabulary_size(self) -> int:
        """Number of different tokens, V."""
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of several texts; all cores encode."""
        return [one.ids for one in self._inner.encode_batch(texts)]

    def decode(self, tokens: list[int]) -> str:
        return str(self._inner.decode(tokens))

    def save(self, path: Path) -> None:
        self._inner.save(str(path))


def _tokenizers() -> Any:
    return needed("tokenizers", "data", "A byte-pair encoding")


Tokenizer = Bytes | Bpe


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer that a run wrote; ValueError if the file is none."""
    try:
        return Bytes() if json.loads(path.read_text()).get("type") == "bytes" else Bpe.load(path)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{path} should be a tokenizer that a run wrote. Found: {error}; train again.") from error


_NOT_COUNTED = -100  # what losses ignore as a target


@dataclass(frozen=True, slots=True)
class Tokens:
    """A stream of tokens cut into sequences; the target is the next token.

    Args:
        stream: integers ``[num]``.
        sequence_length: tokens in a sequence, T.
        tokenizer: the tokenizer that made the stream.
        ends: for a row a sentence: where each one ends in the stream, after the end of the text before the first,
            ``[num sentences + 1]``. A longer sentence is cut off, and behind a shorter one the targets are -100. Default: packed
            windows of T tokens, over the borders of sentences.

    >>> tokens = Tokens(torch.tensor([0, 5, 6, 0, 7, 0]), 3, Bytes(), ends=torch.tensor([1, 4, 6]))
    >>> [part.tolist() for part in tokens.batch(torch.tensor([0, 1]))]
    [[[0, 5, 6], [0, 7, 0]], [[5, 6, 0], [7, 0, -100]]]
    """

    stream: Tensor
    sequence_length: int
    tokenizer: Tokenizer
    ends: Tensor | None = None

    def __len__(self) -> int:
        return (len(self.stream) - 1) // self.sequence_length if self.ends is None else len(self.ends) - 1

    def to(self, device: torch.device) -> Tokens:
        """Move the stream to a device."""
        ends = None if self.ends is None else self.ends.to(device)
        return replace(self, stream=self.stream.to(device), ends=ends)

    def batch(self, indices: Tensor, random: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens and next tokens of some sequences, int64 ``[B, T]`` each; text is not augmented at random."""
        indices = indices.to(self.stream.device)[:, None]
        offsets = torch.arange(self.sequence_length + 1, device=self.stream.device)
        if self.ends is None:
            window = self.stream[indices * self.sequence_length + offsets].long()
            return window[:, :-1], window[:, 1:]
        # A row begins with the last token of the sentence before, its line feed.
        places = self.ends[indices] - 1 + offsets
        window = self.stream[places.clamp(max=len(self.stream) - 1)].long()
        inside = places[:, 1:] < self.ends[indices + 1]
        return window[:, :-1], torch.where(inside, window[:, 1:], _NOT_COUNTED)


def standard_library(max_bytes: int = 2_000_000) -> str:
    """Concatenate the source of the standard library, the same for the same installation of Python, up to a size."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces = []
    total = 0
    for file in sorted(folder.glob("*.py")):
        with suppress(UnicodeDecodeError):
            pieces.append(file.read_text(encoding="utf-8"))
            total += len(pieces[-1].encode())
        if total >= max_bytes:
            break
    if not pieces:
        raise FileNotFoundError(
            f"The standard library's source should be in {folder}. Found no .py file; give a text file."
        )
    return "".join(pieces)


def make_streams(
    train_text: list[str],
    test_text: list[str],
    sequence_length: int,
    vocabulary_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    packed: bool = True,
) -> tuple[Tokens, Tokens]:
    """Tokenise the pieces of training and test text.

    Args:
        sequence_length: tokens in a sequence, T.
        vocabulary_size: size of the vocabulary of a BPE that is trained on the training text; None for bytes.
        tokenizer: existing tokenizer to use instead of training one.
        packed: whether sequences continue over the borders of pieces; if not, every piece is a row, cut off or padded, and should
            end with a line feed.
    """
    check_at_least(1, sequence_length=sequence_length)
    if tokenizer is None:
        tokenizer = Bytes() if vocabulary_size is None else Bpe.train(train_text, vocabulary_size)
    parts = []
    for name, text in (("training", train_text), ("test", test_text)):
        numbers, lengths = _encoded(tokenizer, text, f"tokenising {name} text")
        if packed and len(numbers) <= sequence_length:
            raise ValueError(
                f"The {name} text should have more than `sequence_length = {sequence_length}` tokens. Found {len(numbers)}."
            )
        if packed:
            parts.append(Tokens(numbers, sequence_length, tokenizer))
            continue
        before = torch.tensor(tokenizer.encode("\n"), dtype=numbers.dtype)  # as the sentence before would end
        ends = torch.cat([torch.tensor([0]), lengths.cumsum(0)]) + len(before)
        parts.append(Tokens(torch.cat([before, numbers]), sequence_length, tokenizer, ends))
    return parts[0], parts[1]


_AT_ONCE = 10_000  # pieces of text to encode, by all cores


def _encoded(tokenizer: Tokenizer, pieces: Sequence[str], what: str) -> tuple[Tensor, Tensor]:
    """Return the tokens of all pieces in one row, int32, and the number of each piece's."""
    numbers = []
    lengths = []
    for start in with_progress_bar(range(0, len(pieces), _AT_ONCE), what, least=2):
        encoded = tokenizer.encode_all(pieces[start : start + _AT_ONCE])
        numbers.append(np.fromiter(chain.from_iterable(encoded), dtype=np.int32))
        lengths += [len(piece) for piece in encoded]
    return torch.from_numpy(np.concatenate(numbers)), torch.tensor(lengths)


def embedded_text(
    max_bytes: int = 2_000_000, *, withheld: float = 0.0, test_limit: int | None = None
) -> tuple[list[str], list[str]]:
    """Split the standard library's source into training text and test text, its last twentieth; needs no network.

    The arguments are the fields of `nwise.app.recipes.EmbeddedText`.

    Raises:
        ValueError: `withheld` is negative or at least 1.
    """
    check_range("withheld", withheld, 1, least=True)
    text = standard_library(max_bytes)
    border = int(len(text) * (1 - _TEST_SHARE))
    train = text[:border]
    test = text[border:]
    if withheld:
        kept = int(border * (1 - withheld))
        train, test = train[:kept], train[kept:]
    return [train], [test[:test_limit]]


def load_text(
    source: str, *, hub: str | None = None, splits: tuple[str, str] = ("train", "heldout"), sentences: bool = False
) -> tuple[list[str], list[str]]:
    """Load training and test text through Hugging Face `datasets`, as lines with a line feed at the end of each.

    The arguments are those fields of `nwise.app.recipes.TextSource`. The last twentieth of a single file is the test text.

    Raises:
        ValueError: an empty text, by file and row.
    """
    path = sources.local_folder(source)
    if path is not None and path.is_file():
        lines = _lines(sources.tables(source, "text"), sentences)
        if len(lines) < 2:
            raise ValueError(
                f"{path} should have at least 2 lines, to hold one out. Found {len(lines)}; add line ends."
            )
        border = len(lines) - max(1, len(lines) // 20)
        return lines[:border], lines[border:]
    train, test = (_lines(sources.tables(source, split, hub=hub), sentences) for split in splits)
    return train, test


def _lines(tables: list[sources.Table], sentences: bool) -> list[str]:
    lines: list[str] = []
    for table in tables:
        texts = table.rows[sources.column(table, ("text", "sentence"), "text")][:]
        for row, text in enumerate(texts):
            if not isinstance(text, str) or (sentences and not text.strip()):
                advice = ", or set `sentences=False`" if isinstance(text, str) else ""
                raise ValueError(
                    f"{table.name}, row {row}, should hold a text. Found {text!r}; remove the row{advice}."
                )
        if not any(map(str.strip, texts)):
            raise ValueError(f"{table.name} should hold text. Found {len(texts)} empty rows; give another file.")
        lines += [text + "\n" for text in texts]
    return lines
