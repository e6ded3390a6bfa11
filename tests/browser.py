"""A headless Chromium of this machine, for tests of pages; tests skip where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root, as in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # a page that asks for anything gets an error
)


@contextmanager
def browser(profile: Path, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A driver with an empty profile.

    Args:
        profile: an empty folder.
        width, height: of the page that is seen, in pixels.
    """
    selenium = pytest.importorskip("selenium.webdriver", reason="needs selenium, of the extra 'dev'")
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt install chromium chromium-driver)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        found.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        yield found
    finally:
        found.quit()


def complaints(driver: Any) -> list[str]:
    """What the page wrote to its console."""
    return [entry["message"] for entry in driver.get_log("browser")]


def picture(driver: Any, path: Path, *, whole: bool = True) -> None:
    """The page as a PNG, all of it or what is seen."""
    import base64

    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole, "format": "png"})
    path.write_bytes(base64.b64decode(shot["data"]))
