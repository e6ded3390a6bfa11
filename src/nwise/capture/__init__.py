"""Captured steps: recorded once on a GPU, and replayed without Python."""

from nwise.capture.capture import Capture

__all__ = ["Capture"]
