"""One writer of a folder at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nwise.checks import needed


class FolderLock:
    """A lock on a folder, ``.lock`` in it, which one process holds until it releases the lock or ends in any way.

    Objects in one process share it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: Any = None

    def acquire(self) -> None:
        """Take the lock; ValueError if another process holds it, OSError if it cannot be made."""
        if self._lock is not None:
            return
        # The operating system drops the lock with the process, so a kill leaves no lock.
        filelock = needed("filelock", "checkpoint", "A checkpoint or a run")
        lock = filelock.FileLock(self._folder / ".lock", timeout=0, is_singleton=True)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except filelock.Timeout:
            raise ValueError(
                f"{self._folder} should be written by one process at a time. Found that another process writes to it; wait for "
                "it, stop it, or give another folder."
            ) from None
        except OSError as error:
            raise OSError(f"{self._folder} should be writable. Found: {error}") from error
        self._lock = lock

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
