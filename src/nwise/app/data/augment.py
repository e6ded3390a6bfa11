"""Augmentation of images in plain torch, random only through a generator.

B  batch    C  channels    H, W  height and width
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def flip(images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image with probability one half."""
    mirrored = torch.rand(len(images_BCHW), generator=generator) < 0.5
    return torch.where(mirrored.to(images_BCHW.device)[:, None, None, None], images_BCHW.flip(-1), images_BCHW)


def crop(images_BCHW: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad with zeros, then crop each image to its old size at a random place."""
    count, _, height, width = images_BCHW.shape
    padded = functional.pad(images_BCHW, (padding,) * 4)
    offsets = torch.randint(0, 2 * padding + 1, (2, count), generator=generator).to(images_BCHW.device)
    rows = offsets[0][:, None] + torch.arange(height, device=images_BCHW.device)
    columns = offsets[1][:, None] + torch.arange(width, device=images_BCHW.device)
    index = torch.arange(count, device=images_BCHW.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def random_resized_crop(image_CHW: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Crop to 8 to 100 % of the area and an aspect ratio of 3:4 to 4:3, then resize to ``size x size``."""
    _, height, width = image_CHW.shape
    for _ in range(10):
        area, aspect = torch.rand(2, generator=generator).tolist()
        target = height * width * (0.08 + 0.92 * area)
        ratio = math.exp((2 * aspect - 1) * math.log(4 / 3))
        w = round(math.sqrt(target * ratio))
        h = round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, (), generator=generator))
            left = int(torch.randint(0, width - w + 1, (), generator=generator))
            return resize(image_CHW[:, top : top + h, left : left + w], size, size)
    return centre_crop(image_CHW, size)


def centre_crop(image_CHW: Tensor, size: int) -> Tensor:
    """Resize the shortest side to ``size`` and crop to the centre."""
    _, height, width = image_CHW.shape
    scale = size / min(height, width)
    image_CHW = resize(image_CHW, max(size, round(height * scale)), max(size, round(width * scale)))
    top = (image_CHW.shape[1] - size) // 2
    left = (image_CHW.shape[2] - size) // 2
    return image_CHW[:, top : top + size, left : left + size]


def resize(image_CHW: Tensor, height: int, width: int) -> Tensor:
    """Resize bilinearly, with antialiasing; bytes stay bytes."""
    resized = functional.interpolate(
        image_CHW[None].float(), (height, width), mode="bilinear", align_corners=False, antialias=True
    )[0]
    return resized.round().clamp(0, 255).to(image_CHW.dtype)
