"""A real browser without a window: Chromium, driven by its driver. One serves all tests of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.services.process import ServerMissing

PROGRAMS = ("chromium", "chromedriver")
PACKAGES = "chromium, chromium-driver"
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # CI is root
    "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--no-first-run", "--hide-scrollbars",
)  # fmt: skip
SCRIPT_S = 120


class Browser:
    """`driver` is Selenium's. A page is opened in a fresh one: without token, at the top, nothing logged yet."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, still: bool = False) -> None:
        """`still`: somebody who wants reduced motion looks."""
        self.driver.get("about:blank")
        self.size(width, height)
        media = {"prefers-color-scheme": "dark" if dark else "light"}
        media["prefers-reduced-motion"] = "reduce" if still else "no-preference"
        features = [{"name": name, "value": value} for name, value in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        if url.startswith("http"):
            self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": origin(url), "storageTypes": "all"})
        self.problems()
        self.driver.get(url)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *given: Any) -> Any:
        """What a script returns; a promise is waited for."""
        return self.driver.execute_script(script, *given)

    def keys(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def focus(self) -> dict[str, str]:
        """What has the focus: its tag, its id, its role and its words."""
        script = """const at = document.activeElement;
            return {tag: at.tagName.toLowerCase(), id: at.id, role: at.getAttribute("role") ?? "",
                    words: at.getAttribute("aria-label") ?? at.textContent.trim().slice(0, 60)};"""
        found: dict[str, str] = self.run(script)
        return found

    def problems(self) -> list[str]:
        """What the console of the browser has said since the last call, but for what it only tells."""
        return [one["message"] for one in self.driver.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path, height_max: int = 4_000) -> None:
        """The whole page, as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        self.size(width, min(height, height_max))
        self.driver.save_screenshot(str(path))

    def close(self) -> None:
        self.driver.quit()


def origin(url: str) -> str:
    return "/".join(url.split("/")[:3])


def start_chromium(which: Callable[[str], str | None] = shutil.which) -> Browser:
    """Start it. ServerMissing: it is not installed on this machine, or its driver, or Selenium."""
    places = [which(program) for program in PROGRAMS]
    if None in places:
        raise ServerMissing(f"a browser is not installed: install {PACKAGES}")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError as error:
        raise ServerMissing("selenium is not installed: run `make venv`") from error
    options = webdriver.ChromeOptions()
    options.binary_location = places[0]
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(places[1]))
    driver.set_script_timeout(SCRIPT_S)
    return Browser(driver)
