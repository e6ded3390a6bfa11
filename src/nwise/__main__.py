"""The command `nwise`, also as ``python -m nwise``: it runs the application, or names the extra that brings it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line."""
    try:
        from nwise.app.cli import main as run

        run()
    except ImportError as error:
        if (error.name or "").startswith("nwise"):
            raise
        sys.exit(
            f"nwise: the command needs {error.name}, which is not installed. Install it with `pip install 'nwise[app]'`."
        )


if __name__ == "__main__":
    main()
