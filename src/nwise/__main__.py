"""``python -m nwise``."""

from nwise.cli import main

main()
