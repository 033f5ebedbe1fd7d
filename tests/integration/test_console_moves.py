"""The console while shards move under it: what somebody has opened, chosen or scrolled to stays, nothing is stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.support.console_page import Page, page, server
from tests.support.served import Served
from tests.support.waiting import wait_until

__all__ = ["page"]

pytestmark = pytest.mark.proof  # the main path is in test_console.py

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string())])
MANY = 40  # enough for a table that has to be scrolled


@pytest.fixture
def served() -> Iterator[Served]:
    with server() as running:
        yield running


def made(served: Served, *names: str) -> None:
    for name in names:
        served.client.create_shard(name, SCHEMA, ["id"]).insert([{"id": 1, "state": "new"}])


def drawn(page: Page, script: str, given: Any) -> Any:
    """What a script makes of draw.js, imported as `draw`, and of what is `given`."""
    page.open()
    return page.browser.driver.execute_async_script(
        f"const [given, done] = arguments; import('/console/draw.js').then((draw) => done({script}));", given
    )


# --- the list


def test_a_shard_that_somebody_makes_comes_into_the_list_and_none_of_the_others_is_called_gone(
    page: Page, served: Served
) -> None:
    made(served, "a", "c", "d")
    page.open()
    page.wait("document.querySelectorAll('.row .spark').length === 3")
    page.browser.run("document.querySelector('.list').focus()")
    page.browser.keys("\ue015")  # down, to "c"
    made(served, "b", "e")
    wait_until(lambda: page.rows_in_list() == ["a", "b", "c", "d", "e"], "all five are in the list")
    page.wait("document.querySelectorAll('.row .spark').length === 5")
    assert page.ask("document.querySelector('.head [role=status]').textContent") == "5 shards"
    assert page.ask("document.querySelector('[aria-selected=true] .name').textContent") == "c"
    assert page.ask("document.activeElement.getAttribute('aria-activedescendant')") == "row-2"
    served.client.shard("c").drop()
    page.wait("[...document.querySelectorAll('.row')].some((row) => row.textContent === 'cgone')")
    assert page.ask("document.querySelectorAll('.row .spark').length") == 4


def test_the_first_shard_comes_into_a_list_that_is_open_and_empty(page: Page, served: Served) -> None:
    page.open()
    page.wait("document.body.textContent.includes('There is no shard yet')")
    made(served, "first")
    wait_until(lambda: page.rows_in_list() == ["first"], "it is in the list")
    assert not page.ask("document.body.textContent.includes('There is no shard yet')")


def test_who_comes_back_from_a_shard_finds_the_names_that_were_sought(page: Page, served: Served) -> None:
    made(served, "eu/orders", "us/orders")
    page.open()
    page.wait("document.querySelectorAll('.row .spark').length === 2")
    page.browser.run("document.getElementById('prefix').focus()")
    page.browser.keys("eu/")
    wait_until(lambda: page.rows_in_list() == ["eu/orders"], "only these are in the list")
    page.browser.run("document.querySelector('.row').click()")
    page.wait("document.querySelector('.live.on')")
    page.browser.run("history.back()")
    wait_until(lambda: page.rows_in_list() == ["eu/orders"], "only these are in the list again")
    assert page.ask("document.getElementById('prefix').value") == "eu/"


# --- a shard


def test_what_is_open_scrolled_to_or_has_the_focus_stays_when_the_shard_moves(page: Page, served: Served) -> None:
    made(served, "moving")
    shard = served.client.shard("moving")
    for number in range(MANY):
        shard.insert([{"id": number, "state": "new"}])
        shard.tag(f"tag-{number:02}", at=number)
    for tall in range(20):  # until it has been merged, so that there is upkeep to tell of
        shard.insert([{"id": number, "state": "x" * 5_000} for number in range(40 * (tall + 1))])
    page.shard("moving")
    page.wait("[...document.querySelectorAll('summary')].some((one) => one.textContent.startsWith('Upkeep:'))")
    page.browser.run(
        "for (const one of document.querySelectorAll('details')) one.open = true;"
        "const holds = document.querySelector('[aria-label=Holds]'); holds.scrollTop = 150; holds.focus();"
    )
    looks = (
        "[[...document.querySelectorAll('details')].map((one) => one.open),"
        " document.querySelector('[aria-label=Holds]').scrollTop, document.activeElement.getAttribute('aria-label')]"
    )
    before = page.ask(looks)
    assert before == [[True, True], 150, "Holds"]
    upper = shard.upper().element
    assert upper is not None
    shard.insert([{"id": 1, "state": "later"}])
    wait_until(lambda: page.tile("upper") == str(upper + 1), "the commit is shown")
    page.wait(
        "document.querySelector('[aria-label=Batches] td:nth-child(2)').textContent === arguments[0]", str(upper + 1)
    )
    assert page.ask(looks) == before


def test_a_batch_that_was_chosen_stays_chosen_until_it_is_merged_and_then_what_covers_it_is(page: Page) -> None:
    batch = {"batches": 1, "runs": 1, "parts": 1, "rows": 1, "bytes": 500, "inline_bytes": 0, "level": 0}

    def trace(*edges: tuple[int, int]) -> dict[str, Any]:
        batches = [{**batch, "lower": [low], "upper": [high], "merging": False} for low, high in edges]
        return {
            "since": [0], "upper": [edges[-1][1]], "rows": 9, "bytes": 900, "batch_count": len(edges),
            "batches": batches, "merges": [], "recent": [],
        }  # fmt: skip

    traces = [
        trace((0, 1), (1, 2), (2, 3)),
        trace((0, 1), (1, 2), (2, 3), (3, 4)),
        trace((0, 2), (2, 3), (3, 4)),
        trace((0, 2), (2, 4)),
    ]
    page.stage()
    found = page.browser.driver.execute_async_script(
        """const [traces, done] = arguments;
        import('/console/trace.js').then(async ({ tracePanel }) => {
          let take;
          const panel = tracePanel({ signal: new AbortController().signal, onTrace: (one) => { take = one; } });
          document.getElementById("main").replaceChildren(panel);
          const drawn = () => new Promise((then) => requestAnimationFrame(() => requestAnimationFrame(then)));
          const told = [];
          for (const trace of traces) {
            take(trace);
            while (panel.querySelectorAll(".slot").length !== trace.batches.length) await drawn();
            const third = panel.querySelector("[data-index='2'] .hit");
            if (!told.length) third.dispatchEvent(new Event("click", {bubbles: true}));
            told.push(panel.querySelector(".notice").textContent.split(":")[0]);
          }
          done(told);
        });""",
        traces,
    )
    assert found == ["batch [2, 3)", "batch [2, 3)", "batch [2, 3)", "batch [2, 4)"]


def test_how_long_a_lease_has_goes_on_while_nothing_is_committed(page: Page) -> None:
    hold = {"kind": "reader", "since": [0], "count": 1, "names": [], "lapses_in_s": 7}
    trace = {
        "since": [0], "upper": [1], "readers": 1, "cursors": 0, "tags": 0, "writers": 0, "history_ms": 0,
        "holds": [hold], "batches": [],
    }  # fmt: skip
    page.stage()
    page.browser.driver.execute_async_script(
        """const [trace, done] = arguments;
        import('/console/holds.js').then(({ holdsPanel }) => {
          const shard = { signal: new AbortController().signal, onTrace: (take) => { shard.take = take; } };
          document.getElementById("main").replaceChildren(holdsPanel(shard));
          shard.take(trace);
          done();
        });""",
        trace,
    )
    assert page.table("Holds") == [["reader", "0", "7.00 s"]]
    wait_until(lambda: page.table("Holds") == [["reader", "0", "due"]], "the lease has come to its end")
