"""The console in a real browser: what it shows is what the shards hold, by mouse, by keyboard, on every width.

After each test the browser must have had nothing to complain of. Pictures are left in .cache/console.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from persist.client.shard import Shard
from rpc.settings import ServerSettings
from tests.services.chromium import Browser
from tests.support.console_page import Page, page, server
from tests.support.served import Served
from tests.support.token_file import write_tokens
from tests.support.waiting import wait_until

SHARDS = 10_000
ROWS_MAX = 200
PICTURES = Path(__file__).resolve().parents[2] / ".cache" / "console"
__all__ = ["page"]

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string())])
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
HOSTILE_SCHEMA = pa.schema([("key", pa.string()), (HOSTILE, pa.string())])
DOWN, LEFT, RIGHT, HOME, END, TAB, ENTER = (
    "\ue015", "\ue012", "\ue014", "\ue011", "\ue010", "\ue004", "\ue007",
)  # fmt: skip
MANY_DIGITS = 2**62 - 3


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with server() as running:
        client = running.client
        orders = client.create_shard("eu/orders", SCHEMA, ["id"])
        for time in range(30):
            left = [{"id": time - 1, "state": "new", "__diff": -1}] if time else []
            orders.insert([*left, {"id": time, "state": "new"}, {"id": 1_000 + time, "state": f"at {time}"}])
        orders.tag("eom", at=10)
        orders.critical_reader("billing")
        cells = ["<script>document.title='owned'</script>", "", None, 'quo"te,\nline', "\u202egnp.exe", "x" * 5_000]
        hostile = client.create_shard("hostile", HOSTILE_SCHEMA, ["key"])
        hostile.insert([{"key": f"{number} {HOSTILE}", HOSTILE: cell} for number, cell in enumerate(cells)])
        client.create_shard("empty", SCHEMA, ["id"])
        yield running


@pytest.fixture(scope="module")
def crowded() -> Iterator[Served]:
    """A server with very many shards."""
    with server() as running:
        for number in range(SHARDS):
            running.client.create_shard(f"t{number // 1_000}/s{number:05}", SCHEMA, ["id"])
        yield running


# --- many shards


@pytest.mark.proof
def test_of_ten_thousand_shards_only_those_in_sight_are_in_the_document(browser: Browser, crowded: Served) -> None:
    page = Page(browser, crowded.url)
    page.open()
    page.wait("document.querySelector('.head [role=status]')?.textContent === '10,000 shards'")
    height = page.ask("document.querySelector('.list').scrollHeight")
    for part in (0, 0.3, 0.5001, 0.99, 1):
        browser.run("document.querySelector('.list').scrollTop = arguments[0]", int(height * part))
        first = min(SHARDS - 1, int(height * part) // 44)
        page.wait("document.getElementById(`row-${arguments[0]}`)", min(first, SHARDS - 5))
        assert 0 < len(page.rows_in_list()) <= ROWS_MAX
    browser.run("document.querySelector('.list').focus()")
    browser.keys(END)
    assert page.ask("document.querySelector('[aria-selected=true] .name').textContent") == "t9/s09999"
    page.wait("[...document.querySelectorAll('.row')].every((row) => row.querySelector('.spark'))")
    assert len(page.rows_in_list()) <= ROWS_MAX
    assert browser.problems() == []


@pytest.mark.proof
def test_shards_are_found_by_the_beginning_of_their_names(browser: Browser, crowded: Served) -> None:
    page = Page(browser, crowded.url)
    page.open()
    page.wait("document.querySelectorAll('.row').length")
    browser.run("document.getElementById('prefix').focus()")
    browser.keys("t7/s070")
    page.wait("document.querySelector('.head [role=status]')?.textContent === '100 shards'")
    wait_until(lambda: page.rows_in_list()[:1] == ["t7/s07000"], "the first that is found is shown")
    browser.keys("nothing")
    page.wait("document.querySelector('.state')?.textContent.includes('No shard')")
    assert page.rows_in_list() == []
    assert browser.problems() == []


# --- a shard


def test_a_shard_shows_what_its_trace_tells_and_follows_commits(page: Page, served: Served) -> None:
    shard = served.client.create_shard("followed", SCHEMA, ["id"])
    shard.insert([{"id": 1, "state": "a"}])
    page.shard("followed")
    for number in range(2, 5):
        wait_until(lambda upper=number - 1: page.tile("upper") == str(upper), f"the upper {number - 1} is shown")
        shard.insert([{"id": number, "state": "b"}])
    wait_until(lambda: (page.tile("upper"), page.tile("updates kept")) == ("4", "4"), "all of it is shown")
    page.wait("document.querySelectorAll('.slot').length === 4")


def test_the_slider_shows_the_rows_of_its_time(page: Page, served: Served) -> None:
    page.shard()
    shard = served.client.shard("eu/orders")
    upper = shard.upper().element
    assert upper is not None
    wait_until(lambda: page.shown() == str(upper - 1), "the latest rows are shown")
    page.browser.run("document.querySelector('input[type=range][aria-label=\"As of\"]').focus()")
    for keys, time in (((LEFT,), upper - 2), ((HOME,), 0), ((RIGHT, RIGHT), 2), ((END,), upper - 1)):
        page.browser.keys(*keys)
        wait_until(lambda time=time: page.shown() == str(time), f"the rows as of {time} are shown")
        assert page.table("Rows") == expected(shard, time)


def expected(shard: Shard, time: int) -> list[list[str]]:
    rows = shard.snapshot(as_of=time).to_arrow().to_pylist()
    return [[f"\u00d7{row['__diff']}", str(row["id"]), row["state"]] for row in sorted(rows, key=lambda row: row["id"])]


@pytest.mark.proof
def test_any_time_can_be_typed_and_one_that_cannot_be_read_becomes_the_nearest(page: Page) -> None:
    page.shard()
    wait_until(page.shown, "rows are shown")
    for typed, shown in (("7", "7"), ("99999", "29"), ("nonsense", "29")):
        page.browser.run(
            "const it = document.querySelector('input[aria-label=\"As of: the exact time\"]');"
            "it.focus(); it.value = arguments[0]; it.dispatchEvent(new Event('change'));",
            typed,
        )
        wait_until(lambda shown=shown: page.shown() == shown, f"the rows as of {shown} are shown")


def test_changes_between_two_times_say_what_came_and_what_left(page: Page, served: Served) -> None:
    page.shard()
    wait_until(page.shown, "rows are shown")
    page.press("Changes")
    wait_until(lambda: page.shown() == "28-29", "the last step is shown")
    found = served.client.shard("eu/orders").changes(28, 29).to_arrow().to_pylist()
    signed = {(("+" if row["__diff"] > 0 else "\u2212") + str(abs(row["__diff"])), str(row["id"])) for row in found}
    assert {(sign, number) for sign, number, _ in page.table("Rows")} == signed
    assert len(signed) == 3


def test_the_tail_shows_updates_as_they_are_committed_once_it_is_started(page: Page, served: Served) -> None:
    shard = served.client.create_shard("tailed", SCHEMA, ["id"])
    shard.insert([{"id": 1, "state": "before"}])
    page.shard("tailed")
    page.press("Follow")
    page.wait("[...document.querySelectorAll('[role=status]')].some((one) => one.textContent.startsWith('Waiting'))")
    for number in (MANY_DIGITS, 2):
        shard.insert([{"id": number, "state": "live"}])
        wait_until(lambda n=number: [str(n), "live"] in [row[2:] for row in page.table("Updates")], f"{number} came")
    assert ["1", "before"] not in [row[2:] for row in page.table("Updates")]
    page.press("Stop")


@pytest.mark.proof
def test_who_holds_what_and_what_was_done_are_told(page: Page) -> None:
    page.shard()
    page.wait("document.querySelector('[aria-label=Holds]')")
    holds = {row[0]: row[1:] for row in page.table("Holds")}
    assert holds["tag eom"] == ["10", "never"]
    assert holds["cursor billing"] == ["0", "never"]
    page.browser.run("document.querySelector('.panel:last-child').scrollIntoView()")
    page.wait("document.querySelector('[aria-label=History]')")
    assert ["insert", "[29, 30)"] in [row[2:4] for row in page.table("History")]


@pytest.mark.proof
def test_a_check_runs_when_it_is_asked_for(page: Page) -> None:
    page.shard("empty")
    page.press("Examine")
    page.wait("[...document.querySelectorAll('.panel p')].some((one) => / findings?,/.test(one.textContent))")


@pytest.mark.proof
def test_an_empty_shard_says_that_there_is_nothing_yet(page: Page) -> None:
    page.shard("empty")
    page.wait("document.body.textContent.includes('there is no time to read as of')")
    page.wait("document.body.textContent.includes('no updates yet')")


def test_a_shard_that_is_not_there_is_told_in_the_servers_words(browser: Browser, served: Served) -> None:
    page = Page(browser, served.url)
    page.open("#/shard/nowhere")
    page.wait("document.querySelector('.live.off')?.textContent === 'stopped'")
    assert "there is no shard 'nowhere' here" in page.ask("document.querySelector('.state.bad').textContent")
    assert all("404" in one for one in browser.problems())


# --- what others have chosen


def test_names_and_values_are_text_whatever_is_in_them(page: Page) -> None:
    page.shard("hostile")
    wait_until(lambda: page.shown() == "0", "the rows are shown")
    cells = [row[1:] for row in page.table("Rows")]
    assert [key for key, _ in cells] == [f"{number} {HOSTILE}" for number in range(6)]
    assert cells[0][1] == "<script>document.title='owned'</script>"
    assert [cells[1][1], cells[2][1]] == ["empty text", "null"]
    assert cells[3][1] == 'quo"te,\nline'
    assert page.ask("document.querySelectorAll('main img, main script').length") == 0
    assert page.ask("[...document.querySelectorAll('th')].some((one) => one.textContent === arguments[0])", HOSTILE)
    assert page.ask("document.title") == "hostile - persist"


def test_a_hostile_address_is_text_as_well(browser: Browser, served: Served) -> None:
    page = Page(browser, served.url)
    page.open("#/shard/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    page.wait("document.querySelector('.state.bad')")
    assert page.ask("document.querySelector('h1').textContent") == "<img src=x onerror=alert(1)>"
    assert page.ask("document.querySelectorAll('main img').length") == 0
    page.open("#/shard/%E0%A4%A")
    page.wait("document.querySelector('.state.bad')")
    browser.problems()


@pytest.mark.parametrize(
    "attempt",
    [
        "try { document.createElement('script').textContent = 'broken = null'; } catch { /* refused */ }",
        "const it = document.createElement('div'); it.setAttribute('style', 'color: red'); document.body.append(it);",
        "fetch('http://127.0.0.2:1/').catch(() => {});",
        "const it = document.createElement('img'); it.src = 'http://127.0.0.2:1/x.png'; document.body.append(it);",
        "const it = document.createElement('iframe'); it.src = '/console'; document.body.append(it);",
        "try { document.body.innerHTML = '<b>x</b>'; } catch { /* what is not trusted is refused */ }",
    ],
)
def test_the_policy_holds_in_the_browser(browser: Browser, served: Served, attempt: str) -> None:
    page = Page(browser, served.url)
    page.open("#/shard/empty")
    page.wait("document.querySelector('.live.on')")
    browser.run(
        "globalThis.broken = []; document.addEventListener('securitypolicyviolation', (event) => "
        f"broken.push(event.effectiveDirective));{attempt}"
    )
    page.wait("broken.length")
    assert page.ask("document.title") == "empty - persist"
    browser.problems()


# --- exact figures


def test_csv_is_read_as_it_is_written_however_it_is_cut(page: Page) -> None:
    page.open()
    random_ = random.Random(1)
    texts = ["", "a", 'say "x"', "a,b", "two\nlines", "ü€\U0001f600", "null", " "]
    for _ in range(20):
        rows = [[random_.choice(texts) for _ in range(3)] for _ in range(random_.randrange(1, 6))]
        sink = io.StringIO()
        csv.writer(sink, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
        found = page.browser.driver.execute_async_script(
            "const [text, size, done] = arguments; import('/console/api.js').then(({ Csv }) => { const csv = new Csv();"
            "const chars = [...text];"
            "for (let at = 0; at < chars.length; at += size) csv.take(chars.slice(at, at + size).join(''));"
            "csv.end(); done(csv.records); });",
            sink.getvalue(),
            random_.randrange(1, 9),
        )
        assert found == rows


def test_a_number_that_javascript_would_round_keeps_its_digits(page: Page) -> None:
    page.open()
    found = page.browser.driver.execute_async_script(
        "const [text, done] = arguments;"
        "import('/console/api.js').then(({ parse }) => done(parse(text).map((one) => [typeof one, String(one)])));",
        json.dumps([2**53 - 1, 2**62 + 1, -(2**63), 1.5, 1e300, "9007199254740993"]),
    )
    assert found[:3] == [["number", str(2**53 - 1)], ["bigint", str(2**62 + 1)], ["bigint", str(-(2**63))]]
    assert found[3:] == [["number", "1.5"], ["number", "1e+300"], ["string", "9007199254740993"]]


# --- tokens


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, dict[str, str]]]:
    """A server with tokens: one that reads all, and one that reads `eu/`."""
    file = tmp_path_factory.mktemp("tokens") / "tokens.json"
    tokens = write_tokens(file, {"all": ("read",), "eu": ("read", "eu/")})
    with server(ServerSettings(tokens_file=str(file))) as running:
        for name in ("eu/orders", "us/orders"):
            running.client.create_shard(name, SCHEMA, ["id"]).insert([{"id": 1, "state": name}])
        yield running, tokens


def test_the_console_asks_for_a_token_and_keeps_it_in_the_tab_alone(
    browser: Browser, guarded: tuple[Served, dict[str, str]]
) -> None:
    served, tokens = guarded
    page = Page(browser, served.url)
    page.open()
    page.wait("document.getElementById('ask').open")
    browser.keys("wrong", ENTER)
    page.wait("document.getElementById('ask').open && document.getElementById('ask-token').value === ''")
    browser.run("document.getElementById('ask-token').focus()")
    browser.keys(tokens["all"], ENTER)
    wait_until(lambda: page.rows_in_list() == ["eu/orders", "us/orders"], "both shards are listed")
    assert page.ask("[...Object.values(localStorage)].join() + document.cookie + location.href").find(tokens["all"]) < 0
    page.open("#/shard/eu%2Forders")  # a fresh tab knows nothing
    page.wait("document.getElementById('ask').open")
    browser.problems()  # the refusals, which are what is tested


def test_a_token_for_some_names_sees_those_and_is_told_so_elsewhere(
    browser: Browser, guarded: tuple[Served, dict[str, str]]
) -> None:
    served, tokens = guarded
    page = Page(browser, served.url)
    page.open()
    page.wait("document.getElementById('ask').open")
    browser.keys(tokens["eu"], ENTER)
    page.wait(
        "document.querySelector('.state.bad')?.textContent.includes(\"may only list names with the prefixes ['eu/']\")"
    )
    browser.run("document.getElementById('prefix').focus()")
    browser.keys("eu/")
    wait_until(lambda: page.rows_in_list() == ["eu/orders"], "its shard is listed")
    browser.run("location.hash = '#/shard/eu%2Forders'")
    page.wait("document.querySelector('.live.on')")
    page.press("Examine")
    page.wait("[...document.querySelectorAll('.panel .state.bad')].some((one) => one.textContent.includes('admin'))")
    browser.problems()


# --- keyboard, widths, colours


@pytest.mark.proof
def test_everything_is_reached_by_keyboard(page: Page) -> None:
    page.open()
    page.wait("document.querySelector('.row .spark')")
    seen = []
    for _ in range(7):
        page.browser.keys(TAB)
        seen.append(page.browser.focus())
    assert [one["words"] or one["id"] for one in seen] == [
        "Skip to the contents", "persist", "Colours: auto. Press for the next.", "Token", "prefix", "Refresh", "Shards",
    ]  # fmt: skip
    page.browser.keys(DOWN)
    assert page.ask("document.activeElement.getAttribute('aria-activedescendant')") == "row-1"
    assert page.ask("document.querySelector('[aria-selected=true] .name').textContent") == "eu/orders"
    page.browser.keys(ENTER)
    page.wait("document.querySelector('.live.on')")
    assert page.browser.focus()["id"] == "main"
    wait_until(page.shown, "rows are shown")
    reached = []
    while len(reached) < 60 and (not reached or reached[-1]["words"] != "Examine"):
        page.browser.keys(TAB)
        reached.append(page.browser.focus())
    words = [one["words"] for one in reached]
    wanted = ["By time", "Alike", "Contents", "Changes", "As of", "As of: the exact time", "Rows", "Follow", "Examine"]
    assert [word for word in words if word in wanted] == wanted


@pytest.mark.proof
@pytest.mark.parametrize("width", [360, 768, 1280, 3840])
@pytest.mark.parametrize("place", ["list", "shard"])
def test_nothing_is_wider_than_the_page(page: Page, place: str, width: int) -> None:
    dark = width in (768, 3840)
    if place == "list":
        page.open(width=width, dark=dark)
        page.wait("document.querySelector('.row .spark')")
    else:
        page.shard(width=width, dark=dark)
        wait_until(page.shown, "rows are shown")
        page.show_requests()
    assert page.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.proof
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_pictures_are_left_for_those_who_look(page: Page, width: int, dark: bool) -> None:
    name = f"{'dark' if dark else 'light'}-{width}.png"
    page.open(width=width, dark=dark, still=True)
    page.wait("document.querySelector('.row .spark')")
    page.browser.picture(PICTURES / f"list-{name}")
    page.shard(width=width, dark=dark, still=True)
    wait_until(page.shown, "rows are shown")
    for panel in ("History", "Requests to this server"):
        page.browser.run("document.querySelector('.panel:last-child').scrollIntoView()")
        page.browser.size(width, 3_000)
        page.wait("document.querySelector(`[aria-label='${arguments[0]}']`)", panel)
    page.browser.picture(PICTURES / f"shard-{name}")
    assert all((PICTURES / f"{place}-{name}").stat().st_size > 10_000 for place in ("list", "shard"))
