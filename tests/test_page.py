"""The page at /ui in a browser, against a server of its own."""

from __future__ import annotations

import http.client
import json
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="the page is tested with selenium, which is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and CHROMEDRIVER), reason="the page is tested in Chromium: install chromium and chromedriver"
    ),
    pytest.mark.timeout(300),
]

SERVE = """
import json, sys
from mistral_paged import Runner, Which, _core
options, config = map(json.loads, sys.argv[2:])
runner = Runner(which=Which.GGUF(sys.argv[1]), **options)
_core.serve([runner], json.dumps(config), lambda address: print(address, flush=True))
"""
LONG = "The quick brown fox jumps over the lazy dog. " * 20
# What the map shows by the colours of its cells, read from the canvas, and what its table says; all of one moment.
READ_MAP = """
const map = document.getElementById("map");
const uses = document.getElementById("uses");
const { columns, pitch, cells, time } = map.dataset;
if (!time) return { time: 0 };
const image = map.getContext("2d").getImageData(0, 0, map.width, map.height);
const style = getComputedStyle(document.documentElement);
const names = {};
for (const name of ["cached", "shared"]) names[style.getPropertyValue(`--${name}`).trim()] = name;
const seen = { held: 0, cached: 0, shared: 0, free: 0 };
for (let cell = 0; cell < cells; cell += 1) {
  const x = (cell % columns) * pitch + 1;
  const y = Math.floor(cell / columns) * pitch + 1;
  const [red, green, blue, alpha] = image.data.subarray(4 * (y * map.width + x));
  const colour = "#" + [red, green, blue].map((part) => part.toString(16).padStart(2, "0")).join("");
  seen[alpha === 0 ? "free" : names[colour] ?? "held"] += 1;
}
const table = {};
for (const row of uses.rows) if (row.dataset.use) table[row.dataset.use] = Number(row.dataset.blocks);
return { time: Number(time), tableTime: Number(uses.dataset.time), seen, table };
"""


class Server:
    """A server in a process of its own, and its page in the browser."""

    def __init__(self, process: subprocess.Popen[str], address: str, browser: Any) -> None:
        self.process = process
        self.address = re.sub(r"^https?://", "", address)
        self.browser = browser

    def open(self, view: str = "pool") -> Server:
        self.browser.get("about:blank")
        self.browser.get(f"http://{self.address}/ui#view={view}")
        return self

    def get(self, path: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=30)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response, body

    @contextmanager
    def asked(self, text: str, **options: Any) -> Iterator[http.client.HTTPConnection]:
        """A request that was sent; without anyone who reads its answer it is canceled."""
        connection = http.client.HTTPConnection(self.address, timeout=120)
        body = {"model": "default", "messages": [{"role": "user", "content": text}], **options}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        yield connection
        connection.close()

    def chat(self, text: str, **options: Any) -> dict[str, Any]:
        with self.asked(text, **options) as connection:
            answer = json.loads(connection.getresponse().read())
        assert "choices" in answer, answer
        return answer

    def element(self, name: str) -> Any:
        return self.browser.find_element("id", name)

    def text(self, name: str) -> str:
        return self.browser.execute_script("return document.getElementById(arguments[0]).textContent", name)

    def press(self, name: str) -> None:
        self.element(name).click()

    def fill(self, **fields: Any) -> None:
        """Types values into fields; `max_tokens` is the field with the id `max-tokens`."""
        for name, value in fields.items():
            field = self.element(name.replace("_", "-"))
            field.clear()
            field.send_keys(str(value))

    def until(self, what: Callable[[], Any], seconds: float = 60) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := what()):
            assert time.monotonic() < deadline, f"the page does not come to it; its status: {self.text('status')}"
            time.sleep(0.05)
        return value

    def metric(self, name: str) -> float:
        """A gauge of /metrics."""
        return float(re.search(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics")[1].decode(), re.MULTILINE)[1])

    def console(self) -> list[dict[str, Any]]:
        """Errors and warnings; that a canvas is read back so often is the tests' own doing."""
        entries = [entry for entry in self.browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        return [entry for entry in entries if "getImageData" not in entry["message"]]


@contextmanager
def serving(path: Path, browser: Any, config: dict[str, Any] | None = None, **options: Any) -> Iterator[Server]:
    settings = {"port": 0, "models": [{"model_id": "smollm2"}], "access_log": "off", **(config or {})}
    command = [sys.executable, "-c", SERVE, str(path), json.dumps({"pa_gpu_mem": 64, **options}), json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert select.select([process.stdout], [], [], 120)[0], "the server does not come up"
            yield Server(process, process.stdout.readline().strip(), browser)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def smollm2_server(smollm2_path: Path, browser: Any) -> Iterator[Server]:
    with serving(smollm2_path, browser, pa_blk_size=16) as server:
        yield server


@pytest.fixture
def server(smollm2_server: Server) -> Iterator[Server]:
    """The server shared by all tests; none leaves an error in the browser's console."""
    smollm2_server.console()
    yield smollm2_server
    assert smollm2_server.console() == []


@contextmanager
def recorded(server: Server) -> Iterator[dict[float, dict[str, Any]]]:
    """Every event of the feed by its time: all watchers get the same ones."""
    events: dict[float, dict[str, Any]] = {}
    connection = http.client.HTTPConnection(server.address, timeout=30)
    connection.request("GET", "/ui/events")
    response = connection.getresponse()
    done = threading.Event()

    def record() -> None:
        while not done.is_set():
            line = response.readline()
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                events[event["time"]] = event

    thread = threading.Thread(target=record)
    thread.start()
    try:
        yield events
    finally:
        done.set()
        thread.join()
        connection.close()


def axe_violations(browser: Any) -> list[str]:
    axe_selenium = pytest.importorskip("axe_selenium_python", reason="accessibility is tested with axe-selenium-python")
    axe = axe_selenium.Axe(browser)
    axe.inject()
    found = axe.run()["violations"]
    return [f"{violation['id']}: {[node['html'] for node in violation['nodes']]}" for violation in found]


def test_the_page_is_small_and_may_load_nothing_from_elsewhere(server: Server) -> None:
    response, page = server.get("/ui")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assets = re.findall(rb'(?:src|href)="(/[^"]*)"', page)
    assert sorted(assets) == [b"/ui/assets/page.css", b"/ui/assets/page.js"]
    bodies = [page, *(server.get(asset.decode())[1] for asset in assets)]
    assert all(bodies)
    assert sum(map(len, bodies)) < 100_000
    for body in bodies:
        assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://(?!www\.w3\.org/)", body)


def test_the_page_comes_alive_without_errors_in_the_console(server: Server) -> None:
    server.open()
    server.until(lambda: server.text("status") == "live")
    server.until(lambda: server.text("running").startswith("0 of "))
    assert server.text("model") == "smollm2"
    assert server.text("fragmented") == "Fragmented memory: 0\u00a0B (0.0\u00a0%)"


def test_the_cells_of_the_map_are_the_blocks_of_the_pool(server: Server) -> None:
    server.open()
    server.until(lambda: server.text("status") == "live")
    # Leaves cached blocks behind.
    server.chat(LONG, max_tokens=2)
    threads = [
        threading.Thread(target=server.chat, args=(text,), kwargs={"max_tokens": 300, "ignore_eos": True, "n": n})
        for text, n in [(LONG, 3), ("Tell me of the sea.", 1)]
    ]
    moments = []
    with recorded(server) as events:
        for thread in threads:
            thread.start()
        server.until(lambda: server.text("running").startswith("4 of "))
        while any(thread.is_alive() for thread in threads):
            moments.append(server.browser.execute_script(READ_MAP))
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        last = moments[-1]["time"]
        server.until(lambda: max(events, default=0) > last)
    compared = 0
    most = dict.fromkeys(["held", "shared", "cached", "free"], 0)
    for moment in moments:
        assert moment["tableTime"] == moment["time"]
        if moment["time"] not in events:  # it was before the recording began
            continue
        stats = events[moment["time"]]["stats"]
        expected = {
            "held": stats["blocks_used"] - stats["blocks_shared"],
            "shared": stats["blocks_shared"],
            "cached": stats["blocks_cached"],
            "free": stats["blocks_free"] - stats["blocks_cached"],
        }
        assert moment["seen"] == expected
        assert {use: moment["table"][use] for use in expected} == expected
        assert moment["table"]["total"] == stats["blocks_total"]
        most = {use: max(most[use], number) for use, number in expected.items()}
        compared += 1
    assert compared >= 3
    assert all(most.values()), f"some use was never seen: {most}"


def test_an_idle_pool_is_the_one_of_the_metrics(server: Server) -> None:
    server.open()
    server.chat("Say hello.", max_tokens=8)
    server.until(lambda: server.metric("mistralrs_kv_cache_blocks_used") == 0)
    idle = time.time()
    server.until(lambda: server.browser.execute_script(READ_MAP)["time"] > idle)
    shown = server.browser.execute_script(READ_MAP)
    assert shown["table"]["held"] + shown["table"]["shared"] == shown["seen"]["held"] + shown["seen"]["shared"] == 0
    assert shown["table"]["cached"] == server.metric("mistralrs_kv_cache_blocks_prefix_cached") > 0
    assert shown["table"]["total"] == server.metric("mistralrs_kv_cache_blocks_total")


def test_a_running_request_is_in_the_table_and_its_blocks_stand_out(server: Server) -> None:
    server.open()
    server.until(lambda: server.text("status") == "live")
    thread = threading.Thread(target=server.chat, args=("Count to a hundred.",), kwargs={"max_tokens": 600, "ignore_eos": True})
    thread.start()
    rows = """
        const { rows } = document.getElementById("requests").tBodies[0];
        return [...rows].map((row) => [...row.cells].map((cell) => cell.textContent));
    """

    def speaking() -> list[str] | None:
        found = server.browser.execute_script(rows)
        return found[0] if found and float(found[0][7].replace("–", "0")) > 0 else None

    number, state, prompt, _, output, _, blocks, _ = server.until(speaking)
    assert state == "running"
    assert int(prompt) > 0
    assert int(output) > 0
    assert int(blocks) > 0
    server.browser.find_element("css selector", "#requests tbody button").click()
    assert f"those that request {number} alone holds stand out" in server.text("map-note")
    server.browser.find_element("css selector", "#runs summary").click()
    server.until(lambda: f"held by request {number}" in server.text("runs"))
    assert float(re.search(r"Naive allocation would need: ([\d.]+)", server.text("naive"))[1]) > 0
    thread.join()
    server.until(lambda: server.text("requests-note") == "No requests.")
    assert "measured" in server.browser.find_element("id", "charts").text


def test_tokens_a_second_are_those_of_successive_events(server: Server) -> None:
    server.open()
    server.until(lambda: server.text("status") == "live")
    read = """
        const [row] = document.getElementById("requests").tBodies[0].rows;
        const text = document.getElementById("rate").textContent;
        const { time } = document.getElementById("map").dataset;
        return row ? { time: Number(time), rate: Number(text), row: Number(row.cells[7].textContent) } : null;
    """
    shown = []
    with recorded(server) as events, server.asked("Count.", max_tokens=1500, ignore_eos=True):
        end = time.monotonic() + 8
        while time.monotonic() < end:
            shown.append(server.browser.execute_script(read))
            time.sleep(0.1)
        recording = dict(events)
    compared = 0
    for moment in filter(None, shown):
        # The page's window is of 1.5 s, and events are 0.25 s apart unless a step takes longer.
        window = [event for time, event in sorted(recording.items()) if moment["time"] - 3 <= time <= moment["time"]]
        if not window or window[-1]["time"] != moment["time"] or window[-1]["time"] - window[0]["time"] < 2:
            continue
        if not all(event["requests"] for event in window):
            continue
        counts = [(event["time"], event["requests"][0]["tokens"]) for event in window]
        slopes = [(counts[-1][1] - tokens) / (counts[-1][0] - time) for time, tokens in counts[:-1] if counts[-1][0] - time > 0.9]
        # The page shows a decimal below 100 and none from there on.
        rounding = 0.1 if moment["rate"] < 100 else 0.6
        assert min(slopes) - rounding <= moment["rate"] <= max(slopes) + rounding
        assert moment["row"] == pytest.approx(moment["rate"], abs=2 * rounding)
        compared += 1
    assert compared >= 3


def test_quantiles_are_those_of_the_buckets(server: Server) -> None:
    server.chat("Say hello.", max_tokens=8)
    server.open()
    server.until(lambda: server.text("status") == "live")
    titles = {"Time to first token": "first_token", "Between tokens": "between_tokens"}
    server.chat("Say hello.", max_tokens=8)
    time.sleep(1)
    with recorded(server) as events:
        server.until(lambda: events)
    event = max(events.items())[1]
    for panel in server.browser.find_elements("css selector", "#charts section"):
        name = titles.get(panel.find_element("tag name", "h2").text)
        if name is None:
            continue
        buckets = event[name]
        assert panel.find_element("css selector", ".chart-head b").text == f"{buckets['count']:,} measured"
        for share, item in zip((0.5, 0.95, 0.99), panel.find_elements("tag name", "li"), strict=True):
            assert item.text.split(maxsplit=1)[1].replace("\u00a0", " ") == quantile(buckets, share)
        titles.pop(panel.find_element("tag name", "h2").text)
    assert not titles


def quantile(buckets: dict[str, Any], share: float) -> str:
    """As Prometheus' histogram_quantile interpolates, with words for the first bucket and beyond the last."""

    def written(seconds: float) -> str:
        value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
        return f"{float(f'{value:.3g}'):g} {unit}"

    rank = share * buckets["count"]
    ends = [0, *buckets["le"]]
    below = [0, *buckets["cumulative"]]
    if not rank:
        return "–"
    index = next((index for index in range(1, len(ends)) if below[index] >= rank), None)
    if index is None:
        return f"> {written(ends[-1])}"
    if index == 1:
        return f"≤ {written(ends[1])}"
    return written(
        ends[index - 1] + (ends[index] - ends[index - 1]) * (rank - below[index - 1]) / (below[index] - below[index - 1])
    )


def test_a_chat_streams_and_stop_ends_it(server: Server) -> None:
    server.open("chat")
    server.fill(temperature=0, max_tokens=400)
    server.element("prompt").send_keys("Write a long story about a lighthouse.\n")
    said = "return document.querySelector('#log article.assistant .said')?.textContent ?? ''"
    first = server.until(lambda: server.browser.execute_script(said))
    longer = server.until(lambda: len(text := server.browser.execute_script(said)) > len(first) + 10 and text)
    assert longer.startswith(first)
    assert server.metric("vllm:num_requests_running") == 1
    server.press("stop")
    server.until(lambda: server.text("log").endswith("stopped"))
    server.until(lambda: server.metric("vllm:num_requests_running") == 0, seconds=10)
    assert server.metric("mistralrs_kv_cache_blocks_used") == 0
    stopped = server.browser.execute_script(said)
    assert stopped.startswith(longer)
    time.sleep(0.5)
    assert server.browser.execute_script(said) == stopped

    server.press("clear")
    assert "lighthouse" not in server.text("log")
    server.fill(max_tokens=5)
    server.element("prompt").send_keys("Say hello.")
    server.press("send")
    server.until(lambda: "5 tokens" in server.text("log"))
    assert server.element("send").is_enabled()
    assert not server.element("stop").is_enabled()


def test_what_the_server_refuses_is_told_in_the_chat(server: Server) -> None:
    server.open("chat")
    server.element("prompt").send_keys("long ")
    server.browser.execute_script("document.getElementById('prompt').value = 'word '.repeat(20000)")
    server.press("send")
    server.until(lambda: "maximum context length" in server.text("log"))
    assert server.element("send").is_enabled()
    # Chromium logs every response of 400.
    assert all("400" in entry["message"] for entry in server.console())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["pool", "chat"])
def test_axe_finds_no_violations(server: Server, view: str, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    server.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    server.open(view)
    server.until(lambda: server.text("status") == "live")
    if view == "chat":
        server.fill(temperature=0, max_tokens=5)
        server.element("prompt").send_keys("Say hello.\n")
        server.until(lambda: "5 tokens" in server.text("log"))
        assert axe_violations(server.browser) == []
    else:
        server.press("key-open")
        server.browser.find_element("css selector", "#runs summary").click()
        thread = threading.Thread(target=server.chat, args=("Count.",), kwargs={"max_tokens": 400, "ignore_eos": True})
        thread.start()
        server.until(lambda: server.browser.find_elements("css selector", "#requests tbody tr"))
        violations = axe_violations(server.browser)
        thread.join()
        assert violations == []


def test_the_tabs_work_by_keyboard(server: Server) -> None:
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    server.open()
    server.element("tab-pool").send_keys(keys.ARROW_RIGHT)
    assert server.element("chat").is_displayed()
    assert not server.element("pool").is_displayed()
    server.browser.switch_to.active_element.send_keys(keys.ARROW_RIGHT)
    assert server.element("pool").is_displayed()


def test_it_fits_a_narrow_screen(server: Server) -> None:
    metrics = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": False}
    server.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        for view in ("pool", "chat"):
            server.open(view)
            server.until(lambda: server.text("status") == "live")
            assert server.browser.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        server.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_silence_is_told_and_ends(server: Server) -> None:
    server.open()
    server.until(lambda: server.text("status") == "live")
    server.process.send_signal(signal.SIGSTOP)
    try:
        server.until(lambda: server.text("status") == "stale", seconds=8)
    finally:
        server.process.send_signal(signal.SIGCONT)
    server.until(lambda: server.text("status") == "live", seconds=20)


def test_a_server_with_keys_is_watched_with_one(smollm2_path: Path, browser: Any) -> None:
    keys = {"keys": [{"key": "sesame", "tenant": "someone"}]}
    with serving(smollm2_path, browser, keys) as server:
        server.open()
        server.until(lambda: server.text("status") == "an API key is needed")
        assert server.element("key").is_displayed()
        server.element("key").send_keys("sesame\n")
        server.until(lambda: server.text("status") == "live")
        assert not server.element("key").is_displayed()
        assert browser.execute_script("return Object.values({...localStorage}).length + document.cookie.length") == 0
        server.process.kill()
        server.until(lambda: server.text("status") == "stale, reconnecting", seconds=10)


def test_a_large_pool_is_shown_in_bins(smollm2_path: Path, browser: Any) -> None:
    with serving(smollm2_path, browser, pa_gpu_mem=2048, pa_blk_size=8) as server:
        server.open()
        server.until(lambda: server.text("status") == "live")
        total = server.metric("mistralrs_kv_cache_blocks_total")
        assert total > 4000
        cells, per_cell = browser.execute_script(
            "const { cells, perCell } = document.getElementById('map').dataset; return [Number(cells), Number(perCell)]"
        )
        assert 2000 < cells <= 4000
        assert (cells - 1) * per_cell < total <= cells * per_cell
        assert browser.execute_script(READ_MAP)["table"]["total"] == total
        assert f"One cell is {per_cell} blocks" in server.text("map-note")
