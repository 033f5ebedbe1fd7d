"""The console when luck or somebody is bad: odd values, closed shards, hidden tabs, wrong clocks, silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
import rpc.change_streams
from persist.client.shard import Shard
from persist.core.commands import ADMIN
from rpc.settings import ServerSettings
from tests.services.chromium import Browser
from tests.support.console_page import Page, page, server
from tests.support.served import Served
from tests.support.token_file import write_tokens
from tests.support.waiting import wait_until

__all__ = ["page"]

pytestmark = pytest.mark.proof  # the main path is in test_console.py

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string())])
LEFT = "\ue012"
NANOSECONDS = 1_795_000_000_000_000_001
DAY_MS = 24 * 3600 * 1000
LAST_TIME = str(2**63 - 2)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with server() as running:
        yield running


def made(served: Served, name: str, count: int = 1, **settings: Any) -> Shard:
    """A shard with so many rows, each at a time of its own."""
    shard = served.client.create_shard(name, SCHEMA, ["id"], **settings)
    for number in range(count):
        shard.insert([{"id": number, "state": "before"}])
    return shard


def followed(page: Page) -> None:
    """Follow the shard of the page, until the server has said so."""
    page.wait("[...document.querySelectorAll('button')].some((one) => one.textContent === 'Follow' && !one.disabled)")
    page.press("Follow")
    wait_until(lambda: "in 0 steps" in tail(page), "the tail waits")


def tail(page: Page) -> str:
    """What the panel of the tail says."""
    of_it = "[...document.querySelectorAll('.panel')].find((it) => it.querySelector('h2').textContent === 'Live tail')"
    found: str = page.ask(f"[...{of_it}.querySelectorAll('.notice, .bad')].map((one) => one.textContent).join(' ')")
    return found


def readers(served: Served, name: str) -> int:
    """How many leases listeners have; who reads rows has one for a moment, too."""
    found = served.location.machine(name).refresh().leased_readers.values()
    return len([one for one in found if one.purpose == "http listen"])


def run_async(page: Page, script: str, *given: Any) -> Any:
    """What a script gives to `done`."""
    return page.browser.driver.execute_async_script(f"const done = arguments[arguments.length - 1]; {script}", *given)


# --- values and shards


def test_a_text_with_any_line_end_of_unicode_comes_in_the_tail(page: Page, served: Served) -> None:
    shard = made(served, "line-ends")
    page.shard("line-ends")
    followed(page)
    for number, text in enumerate(("a\u2028b", "a\u2029b", "a\x85b", "a\r\nb", "after"), 10):
        shard.insert([{"id": number, "state": text}])
        wait_until(lambda n=number: str(n) in [row[2] for row in page.table("Updates")], f"the update {number} came")
        assert page.table("Updates")[0][2:] == [str(number), text]


@pytest.mark.parametrize("first", [0, NANOSECONDS])
def test_a_shard_closed_to_writes_is_drawn_and_its_rows_are_shown(page: Page, served: Served, first: int) -> None:
    """Its last times are those of its last update."""
    shard = served.client.create_shard(f"closed-{first}", SCHEMA, ["id"])
    shard.append([{"id": 1, "state": "x", "__time": first}], 0, first + 1)
    shard.append([{"id": 2, "state": "y", "__time": first + 1}], first + 1, first + 2)
    shard.advance_upper(None)
    page.shard(f"closed-{first}")
    page.wait("document.querySelectorAll('.slot').length === 3")
    wait_until(lambda: page.shown() == str(first + 1), "the latest rows are shown")
    assert [row[1] for row in page.table("Rows")] == ["1", "2"]
    page.browser.run("document.querySelector('input[type=range][aria-label=\"As of\"]').focus()")
    page.browser.keys(LEFT)
    wait_until(lambda: page.shown() == str(first), "the rows before are shown")
    assert [row[1] for row in page.table("Rows")] == ["1"]


def test_a_shard_whose_last_batch_closed_it_is_read_at_the_last_time_of_all(page: Page, served: Served) -> None:
    shard = served.client.create_shard("closing", SCHEMA, ["id"])
    shard.compare_and_append([{"id": 1, "state": "x", "__time": 7}], 0, None)
    page.shard("closing")
    wait_until(lambda: page.shown() == LAST_TIME, "the latest rows are shown")
    assert [row[1] for row in page.table("Rows")] == ["1"]


def test_the_tail_of_a_shard_that_is_closed_meanwhile_ends_and_says_so(page: Page, served: Served) -> None:
    shard = made(served, "closed-meanwhile")
    page.shard("closed-meanwhile")
    followed(page)
    shard.advance_upper(None)
    wait_until(lambda: "closed to writes" in tail(page), "the tail has ended")
    assert "ended the stream" not in tail(page)
    wait_until(lambda: not readers(served, "closed-meanwhile"), "it holds nothing")


def test_following_a_closed_shard_does_not_read_all_that_it_has(page: Page, served: Served) -> None:
    made(served, "long-closed", 3).advance_upper(None)
    page.shard("long-closed")
    page.press("Follow")
    wait_until(lambda: "closed to writes" in tail(page), "the tail has ended")
    assert page.table("Updates") == []


def test_rows_come_back_once_since_stands_before_upper_again(page: Page, served: Served) -> None:
    shard = made(served, "nothing-held", 3, history="none")
    page.shard("nothing-held")
    wait_until(page.shown, "rows are shown")
    with persist.connect(served.url) as client:  # the server gives up the lease that it keeps for the page's next read
        client.shard("nothing-held").downgrade_since(3, force=True)
    page.wait("document.body.textContent.includes('since has come to upper')")
    shard.insert([{"id": 9, "state": "x"}])
    wait_until(lambda: page.shown() == "3", "rows are shown again")


def test_lines_of_the_tail_stand_below_the_names_of_their_own_schema(page: Page, served: Served) -> None:
    """Two columns that change their names while nobody looks would have swapped what is below them."""
    schema = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])
    shard = served.client.create_shard("swapped", schema, ["id"])
    page.shard("swapped")
    followed(page)
    shard.insert([{"id": 1, "a": "of a", "b": "of b"}])
    wait_until(lambda: page.table("Updates"), "the first one came")
    hidden(page)
    wait_until(lambda: not readers(served, "swapped"), "the stream has ended")
    for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
        shard.rename_column(old, new)
    served.client.shard("swapped").insert([{"id": 2, "a": "new a", "b": "new b"}])
    seen(page)
    wait_until(lambda: "2" in [row[2] for row in page.table("Updates")], "the second one came")
    names = page.ask("[...document.querySelectorAll('[aria-label=Updates] th')].slice(2).map((one) => one.textContent)")
    assert [dict(zip(names, row[2:], strict=True)) for row in page.table("Updates")] == [
        {"id": "2", "a": "new a", "b": "new b"}
    ]


# --- it only reads


def test_who_follows_lets_no_history_go_whatever_the_token_may_do(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc.change_streams, "MOVES_PER_LEASE", 36_000)
    file = tmp_path / "tokens.json"
    token = write_tokens(file, {"root": (ADMIN,)})["root"]
    with server(ServerSettings(tokens_file=str(file))) as served:
        shard = made(served, "looked-at", 5, history="none")
        page = Page(browser, served.url)
        page.open()
        page.wait("document.getElementById('ask').open")
        browser.problems()
        given(page, token)
        page.wait("document.querySelector('.row')")
        browser.run("location.hash = '#/shard/looked-at'")
        followed(page)
        shard.insert([{"id": 9, "state": "x"}])

        def hold() -> int:
            found = served.location.machine("looked-at").refresh().leased_readers.values()
            return max((one.since.element or 0 for one in found if one.purpose == "http listen"), default=0)

        wait_until(lambda: hold() >= 5, "what the listener holds has moved")
        assert shard.since().element == 0
        assert browser.problems() == []


def given(page: Page, token: str) -> None:
    page.browser.run(
        "document.getElementById('ask-token').value = arguments[0]; document.querySelector('#ask .main').click()", token
    )


def test_a_token_that_no_header_can_hold_is_asked_for_again(page: Page, served: Served) -> None:
    page.open()
    page.wait("document.querySelector('.head')")
    page.browser.run("document.getElementById('token').click()")
    given(page, "pt_root_\u2026")
    page.wait("document.getElementById('ask').open && document.querySelector('.state.bad')")
    assert "characters that no token has" in page.ask("document.getElementById('ask-why').textContent")


def hidden(page: Page) -> None:
    """Somebody looks at another tab."""
    page.browser.driver.switch_to.new_window("tab")


def seen(page: Page) -> None:
    """Somebody looks at the page again."""
    page.browser.driver.close()
    page.browser.driver.switch_to.window(page.browser.driver.window_handles[0])


def test_a_tab_that_nobody_sees_follows_nothing_and_goes_on_without_a_gap(page: Page, served: Served) -> None:
    shard = made(served, "unseen")
    page.shard("unseen")
    followed(page)
    shard.insert([{"id": 10, "state": "seen"}])
    wait_until(lambda: len(page.table("Updates")) == 1, "the first one came")
    hidden(page)
    wait_until(lambda: not readers(served, "unseen"), "it holds nothing")
    for number in (11, 12):
        shard.insert([{"id": number, "state": "unseen"}])
    seen(page)
    wait_until(lambda: [row[2] for row in page.table("Updates")] == ["12", "11", "10"], "what was missed came")


# --- the list


def test_an_answer_that_is_older_than_what_is_shown_is_passed_over(page: Page, served: Served) -> None:
    """Behind one address there may be several servers, of which one has not heard of the last commits."""
    shard = made(served, "older/a")
    page.open()
    page.wait("document.querySelector('.row .spark')")
    page.browser.run(
        "const right = window.fetch; window.asked = 0; window.old = null;"
        "window.fetch = async (...given) => { const answer = await right(...given);"
        "if (!String(given[0]).includes('/v1/activity')) return answer;"
        "window.old ??= await answer.clone().text(); window.asked += 1;"
        "return window.asked % 2 ? answer : new Response(window.old); };"
    )
    updates = "[...document.querySelectorAll('.row')].find((one) => one.textContent.startsWith('older/a')).children[1]"
    page.wait("window.asked >= 1")
    shard.insert([{"id": 7, "state": "x"}])
    page.wait(f"{updates}.textContent === '2'")
    asked = page.ask("window.asked")
    page.wait("window.asked > arguments[0]", asked)
    page.browser.run("return new Promise((done) => setTimeout(done, 100))")
    assert page.ask(f"{updates}.textContent") == "2"


def test_earlier_entries_come_once_however_often_they_are_asked_for(page: Page, served: Served) -> None:
    made(served, "much-done", 70)
    page.shard("much-done")
    page.browser.run("document.querySelector('.panel:nth-child(7)').scrollIntoView()")
    page.wait("document.querySelectorAll('[aria-label=History] tbody tr').length === 50")
    page.browser.run(
        "const it = [...document.querySelectorAll('button')].find((one) => one.textContent === 'Earlier');"
        "for (let n = 0; n < 5; n += 1) it.click();"
    )
    page.wait("document.querySelectorAll('[aria-label=History] tbody tr').length > 50")
    versions = [row[0] for row in page.table("History")]
    assert len(versions) == len(set(versions))


# --- servers and clocks


@pytest.mark.parametrize("apart_ms", [-DAY_MS, DAY_MS])
def test_an_age_is_told_by_the_servers_clock(page: Page, served: Served, apart_ms: int) -> None:
    made(served, f"aged-{apart_ms > 0}")
    driver = page.browser.driver
    wrong = f"const right = Date.now; Date.now = () => right() + {apart_ms};"
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": wrong})
    try:
        page.shard(f"aged-{apart_ms > 0}")
        at = page.ask("Math.abs(Date.now() - new Date().getTime())")
        assert at > DAY_MS / 2, "the clock of the browser is wrong"
        wait_until(lambda: page.tile("last commit"), "the age is told")
        assert "d ago" not in page.tile("last commit")
        now = run_async(page, "import('/console/clock.js').then(({ nowMs }) => done(nowMs() - new Date().getTime()));")
        assert abs(now) < DAY_MS / 2
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_a_stream_that_falls_silent_is_given_up(page: Page) -> None:
    page.open()
    found = run_async(
        page,
        "const real = setTimeout; window.setTimeout = (work, ms) => real(work, ms >= 30000 ? 0 : ms);"
        "window.fetch = async () => new Response(new ReadableStream({}));"
        "import('/console/api.js').then(async ({ events }) => {"
        "try { for await (const event of events('v1/shards/x/trace', {})) done(event); done('ended'); }"
        "catch (problem) { done([problem.kind, problem.message]); } });",
    )
    assert found == ["silent", "The server has fallen silent."]


def test_a_page_that_fails_to_draw_does_not_say_that_it_is_live(browser: Browser, served: Served) -> None:
    page = Page(browser, served.url)
    page.open()
    page.wait("document.querySelector('.head')")
    browser.run(
        "const odd = 'event: trace\\ndata: {}\\n\\n';"
        "window.fetch = async (url) => new Response(String(url).endsWith('/trace') ? odd : '{}');"
        "location.hash = '#/shard/broken'"
    )
    page.wait("document.querySelector('.live')?.textContent === 'stopped'")
    assert "failed to show" in page.ask("document.querySelector('.state.bad').textContent")
    browser.problems()  # the failure itself


def test_a_server_that_was_started_anew_has_no_rates_below_nothing(page: Page) -> None:
    page.open()
    found = run_async(
        page, "import('/console/metrics.js').then(({ rateOf }) => done([rateOf(30, 10, 10), rateOf(3, 900, 10)]));"
    )
    assert found == [2, None]
