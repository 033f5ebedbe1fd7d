"""The console as somebody sees and uses it, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import Location
from rpc.settings import ServerSettings
from tests.services.chromium import Browser
from tests.support.location import InlineBackground
from tests.support.served import Served
from tests.support.waiting import wait_until

REQUESTS = "Requests to this server"


class Page:
    """What somebody sees and does."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = f"{url}/console"

    def open(self, place: str = "#/", **look: Any) -> None:
        self.browser.open(self.url + place, **look)

    def stage(self) -> None:
        """A page whose `main` a test may fill itself: the list, which fills it once the server answered, has."""
        self.open()
        self.wait("document.getElementById('prefix')")

    def shard(self, name: str = "eu/orders", **look: Any) -> None:
        self.open(f"#/shard/{name.replace('/', '%2F')}", **look)
        self.wait("document.querySelector('.live.on')")

    def ask(self, expression: str, *given: Any) -> Any:
        return self.browser.run(f"return {expression};", *given)

    def wait(self, expression: str, *given: Any) -> None:
        wait_until(lambda: self.ask(f"Boolean({expression})", *given), expression)

    def press(self, words: str) -> None:
        """The button with these words."""
        script = "const it = [...document.querySelectorAll('button')].find((one) => one.textContent === arguments[0]);"
        self.wait("[...document.querySelectorAll('button')].some((one) => one.textContent === arguments[0])", words)
        self.browser.run(f"{script} it.click();", words)

    def tile(self, label: str) -> str:
        script = "[...document.querySelectorAll('.tile')].find((one) => one.lastChild.textContent === arguments[0])"
        found: str = self.ask(f"{script}?.firstChild.textContent ?? ''", label)
        return found

    def table(self, label: str) -> list[list[str]]:
        """The cells of the table in the region of that label."""
        rows = 'document.querySelectorAll(`[aria-label="${arguments[0]}"] tbody tr`)'
        found: list[list[str]] = self.ask(
            f"[...{rows}].map((row) => [...row.cells].map((one) => one.textContent))", label
        )
        return found

    def shown(self) -> str:
        """Which time, or times, the rows are of."""
        found: str = self.ask("document.querySelector('[aria-label=Rows]')?.dataset.shown ?? ''")
        return found

    def show_requests(self) -> None:
        """Scroll to the panel of requests, the last but one, which asks once it is in sight."""
        self.browser.run("document.querySelector('.panel:nth-last-child(2)').scrollIntoView()")
        self.wait("document.querySelector(`[aria-label='${arguments[0]}']`)", REQUESTS)

    def rows_in_list(self) -> list[str]:
        found: list[str] = self.ask("[...document.querySelectorAll('.row')].map((row) => row.firstChild.textContent)")
        return found


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    """The console of the module's server `served`, in which nothing may have gone wrong."""
    yield Page(browser, served.url)
    assert browser.problems() == []


@contextmanager
def server(settings: ServerSettings | None = None) -> Iterator[Served]:
    """A server over stores in memory."""
    location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
    with Served(location, settings) as running:
        yield running
    location.close()
