"""Data: images and text, embedded or through Hugging Face `datasets`, in an order that depends on seed, epoch and step alone."""

from functools import partial

from nwise.app.data.images import Images, digits, load_images
from nwise.app.data.loading import batch_indices, batches, permutation, steps_per_epoch
from nwise.app.data.text import Bpe, Bytes, Tokens, embedded_text, load_text, make_streams
from nwise.lazy import submodule

__all__ = [
    "Bpe",
    "Bytes",
    "Images",
    "Tokens",
    "batch_indices",
    "batches",
    "digits",
    "embedded_text",
    "load_images",
    "load_text",
    "permutation",
    "steps_per_epoch",
    "make_streams",
]

__getattr__ = partial(submodule, __name__)
