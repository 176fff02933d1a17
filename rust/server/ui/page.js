// The page at /ui: the pool as /ui/events tells it four times a second, and a chat. Nothing is kept beyond the page but the
// API key, which sessionStorage has until the tab is closed. All text goes through textContent.

const STALE_MS = 2000;
const HUNG_MS = 10_000;
const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 15_000;
const SPAN_S = 60;
// Tokens a second are over this long: a batch's tokens come in bursts.
const RATE_WINDOW_S = 1.5;
const MAX_CELLS = 4000;
const MAX_ROWS = 100;
const MAX_RUNS = 1000;
const KEY = "mistral_paged.key";

const $ = (id) => document.getElementById(id);

// ---- Text ------------------------------------------------------------------------------------------------------------------

/** Writes only what has changed, so that assistive technology is not told of what stays. */
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function element(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

function drawn(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

const count = (value) => Math.round(value).toLocaleString("en");
// No line ends between a number and its unit.
const united = (value, unit) => `${value}\u00a0${unit}`;
const percent = (share) => united((100 * share).toFixed(1), "%");
const decimal = (value) => (value < 100 ? value.toFixed(1) : count(value));

function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["KB", 1e3]]) {
    if (value >= size) return united((value / size).toFixed(value < 100 * size ? 2 : 0), unit);
  }
  return united(Math.round(value), "B");
}

function duration(seconds) {
  return seconds < 1 ? united(+(1000 * seconds).toPrecision(3), "ms") : united(+seconds.toPrecision(3), "s");
}

// ---- Streams ---------------------------------------------------------------------------------------------------------------

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The data of each server-sent event of a response. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const lines = frame.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length > 0) yield lines.map((line) => line.slice(5).trim()).join("\n");
    }
  }
}

/** What a response that is no success says. */
async function complaint(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

// ---- The feed --------------------------------------------------------------------------------------------------------------

const feed = {
  heard: null,
  since: 0,
  connected: false,
  refusal: null,
  frozen: false,
  abort: null,
  wake: null,
  /** The last figures, which a model has while it is loaded. */
  last: null,
  /** Whether it is. */
  model: "loaded",
};

const sleep = (ms) => new Promise((resolve) => {
  feed.wake = resolve;
  setTimeout(resolve, ms);
});

function status() {
  const silence = performance.now() - (feed.heard ?? feed.since);
  if (feed.refusal !== null) return ["refused", feed.refusal];
  if (feed.frozen) return ["frozen", "frozen"];
  if (document.hidden) return ["connecting", "not watched"];
  if (feed.heard !== null && silence > STALE_MS) return ["stale", feed.connected ? "stale" : "stale, reconnecting"];
  if (!feed.connected) return ["connecting", feed.heard === null ? "connecting" : "reconnecting"];
  if (feed.heard === null) return ["connecting", "waiting for figures"];
  if (feed.model !== "loaded") return ["connecting", `the model is ${feed.model}`];
  return ["live", feed.last?.stats.paused ? "live; the scheduler is paused" : "live"];
}

function tellStatus() {
  const [state, text] = status();
  $("status").dataset.state = state;
  put($("status"), text);
}

/** Watches for as long as the page is there; while it is hidden the server is not asked to build anything. */
async function watch() {
  let retry = FIRST_RETRY_MS;
  for (;;) {
    if (document.hidden) {
      await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
      continue;
    }
    feed.abort = new AbortController();
    try {
      const response = await fetch(`/ui/events?model=${encodeURIComponent(chosen.model)}`, { headers: headers(), signal: feed.abort.signal, cache: "no-store" });
      feed.refusal = response.ok ? null : response.status === 401 ? "an API key is needed" : await complaint(response);
      if (response.status === 401) {
        openKeyForm(true);
      } else if (response.ok) {
        feed.connected = true;
        feed.since = performance.now();
        listModels().catch(() => {});
        for await (const data of eventsOf(response)) {
          feed.heard = performance.now();
          retry = FIRST_RETRY_MS;
          take(JSON.parse(data));
          tellStatus();
        }
      }
    } catch (error) {
      if (error.name !== "AbortError" && !(error instanceof TypeError)) console.error(error);
    }
    feed.connected = false;
    tellStatus();
    if (document.hidden) continue;
    await sleep(retry * (0.75 + Math.random() / 2));
    retry = Math.min(2 * retry, LAST_RETRY_MS);
  }
}

function reconnect() {
  feed.abort?.abort();
  feed.wake?.();
}

setInterval(() => {
  if (feed.connected && performance.now() - Math.max(feed.heard ?? 0, feed.since) > HUNG_MS) feed.abort.abort();
  tellStatus();
}, 500);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) feed.abort?.abort();
  tellStatus();
});

$("freeze").addEventListener("click", () => {
  feed.frozen = !feed.frozen;
  $("freeze").setAttribute("aria-pressed", feed.frozen);
  tellStatus();
});

function openKeyForm(open) {
  $("key-form").hidden = !open;
  $("key-open").setAttribute("aria-expanded", open);
}

$("key-open").addEventListener("click", () => {
  openKeyForm($("key-form").hidden);
  if (!$("key-form").hidden) $("key").focus();
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = $("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  $("key").value = "";
  openKeyForm(false);
  $("key-open").focus();
  feed.refusal = null;
  reconnect();
});

// ---- Models ----------------------------------------------------------------------------------------------------------------

/** What is watched and talked to; one model alone needs no choice. */
const chosen = { model: "default", several: false };

/** Offers the models, where there is more than one. */
async function listModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) return;
  const { data } = await response.json();
  const models = data.filter((card) => card.id === card.root && card.parent === null);
  chosen.several = models.length > 1;
  $("models").hidden = !chosen.several;
  $("model").hidden = chosen.several;
  if (!chosen.several) return;
  if (chosen.model === "default") chosen.model = data.find((card) => card.id === "default")?.root ?? models[0].id;
  const title = ({ id, kind }) => (!kind || kind === "chat" ? id : `${id} (${kind})`);
  $("model-choice").replaceChildren(...models.map((card) => element("option", { value: card.id }, title(card))));
  $("model-choice").value = chosen.model;
}

$("model-choice").addEventListener("change", () => {
  chosen.model = $("model-choice").value;
  // The figures of another model are not this one's.
  Object.assign(feed, { heard: null, last: null, model: "loaded" });
  Object.assign(produced, { outputs: null, recent: [], unsettled: [], total: 0 });
  for (const chart of Object.values(charts)) if (chart instanceof Series) chart.points = [];
  reconnect();
});

const quiet = matchMedia("(prefers-reduced-motion: reduce)");
let shownAt = -Infinity;

function take(snapshot) {
  feed.model = snapshot.status;
  if (!snapshot.stats) return;
  feed.last = snapshot;
  remember(snapshot);
  if (feed.frozen || (quiet.matches && performance.now() - shownAt < 1000)) return;
  shownAt = performance.now();
  show(snapshot);
}

// ---- Rates -----------------------------------------------------------------------------------------------------------------

/** Tokens generated since the page was opened, from successive snapshots. */
const produced = {
  total: 0,
  /** Output tokens of the requests of the last snapshot. */
  outputs: null,
  /** Of requests that are gone, output tokens that `generated_tokens` may count yet. */
  unsettled: [],
  generated: 0,
  recent: [],
};

const outputTokens = (request) => request.tokens - request.prompt_tokens;
const isAlive = (request) => request.status !== "kept";

function remember(snapshot) {
  const outputs = new Map(snapshot.requests.filter(isAlive).map((request) => [request.id, outputTokens(request)]));
  const last = produced.recent.at(-1);
  if (!last || snapshot.time <= last.time || snapshot.time - last.time > 5 || snapshot.generated_tokens < produced.generated) {
    Object.assign(produced, { outputs: null, recent: [], unsettled: [] });
  }
  if (produced.outputs) {
    for (const [id, tokens] of outputs) produced.total += Math.max(0, tokens - (produced.outputs.get(id) ?? 0));
    const { time, generated_tokens: generated } = snapshot;
    for (const [id, tokens] of produced.outputs) if (!outputs.has(id)) produced.unsettled.push({ time, tokens });
    // An answer is counted when it has ended, its tokens as they came: what is counted now and came unseen is new.
    let ended = generated - produced.generated;
    for (const gone of produced.unsettled) {
      const settled = Math.min(ended, gone.tokens);
      gone.tokens -= settled;
      ended -= settled;
    }
    produced.total += ended;
    // Those of a cancelled request are never counted.
    produced.unsettled = produced.unsettled.filter((gone) => gone.tokens > 0 && time - gone.time < 2);
  }
  produced.outputs = outputs;
  produced.generated = snapshot.generated_tokens;
  produced.recent.push({ time: snapshot.time, total: produced.total, outputs });
  while (produced.recent.length > 2 && snapshot.time - produced.recent[1].time >= RATE_WINDOW_S) produced.recent.shift();

  const { stats } = snapshot;
  if (produced.recent.length > 1) charts.rate.push(snapshot.time, rate());
  charts.running.push(snapshot.time, stats.requests_running);
  charts.waiting.push(snapshot.time, stats.requests_waiting);
  charts.usage.push(snapshot.time, stats.blocks_used / Math.max(1, stats.blocks_total));
  charts.hits.push(snapshot.time, hitRate(stats) ?? 0);
}

/** Tokens a second of all requests, or of one; 0 as long as there is nothing to compare with. */
function rate(id) {
  const newest = produced.recent.at(-1);
  const oldest = produced.recent.find((moment) => id === undefined || moment.outputs.has(id));
  if (!oldest || oldest === newest) return 0;
  const tokens = id === undefined ? newest.total - oldest.total : newest.outputs.get(id) - oldest.outputs.get(id);
  return Math.max(0, tokens) / (newest.time - oldest.time);
}

/** Of the tokens that were looked up since the server's start, the share found; `null` before the first. */
function hitRate(stats) {
  return stats.prefix_queried_tokens > 0 ? stats.prefix_hit_tokens / stats.prefix_queried_tokens : null;
}

// ---- Charts ----------------------------------------------------------------------------------------------------------------

const WIDTH = 240;
const HEIGHT = 60;

function chartPanel(place, title, ...parts) {
  const value = element("b", {}, "–");
  const head = element("div", { className: "chart-head" }, element("h2", {}, title), value);
  const svg = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  $(place).append(element("section", { className: "panel" }, head, svg, ...parts));
  return { value, svg };
}

/** The last minute of one figure. */
class Series {
  constructor(place, title, write, top) {
    this.title = title;
    this.write = write;
    this.top = top;
    this.points = [];
    this.foot = element("p", { className: "note" });
    Object.assign(this, chartPanel(place, title, this.foot));
    this.area = drawn("path", { class: "area" });
    this.line = drawn("path", { class: "line" });
    this.svg.append(drawn("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }), this.area, this.line);
  }

  push(time, value) {
    this.points.push([time, value]);
    while (this.points[0][0] < time - SPAN_S) this.points.shift();
  }

  draw(suffix = "") {
    const { points, write } = this;
    if (points.length === 0) return;
    const [now, current] = points.at(-1);
    const peak = Math.max(...points.map(([, value]) => value));
    const top = this.top ?? Math.max(peak, 1);
    const place = ([time, value]) =>
      `${(WIDTH * (1 - (now - time) / SPAN_S)).toFixed(1)},${(HEIGHT * (1 - Math.min(1, value / top))).toFixed(1)}`;
    // Where nothing was heard, the line has a gap.
    const stretches = [];
    points.forEach((point, index) => {
      if (index === 0 || point[0] - points[index - 1][0] > STALE_MS / 1000) stretches.push([]);
      stretches.at(-1).push(point);
    });
    const path = (ends) => stretches.map((part) => ends(part.map(place), part)).join("");
    this.line.setAttribute("d", path((places) => `M${places.join("L")}`));
    const foot = ([time]) => place([time, 0]);
    this.area.setAttribute("d", path((places, part) => `M${foot(part[0])}L${places.join("L")}L${foot(part.at(-1))}Z`));
    put(this.value, write(current) + suffix);
    put(this.foot, `last ${SPAN_S} s, peak ${write(peak)}`);
    this.svg.setAttribute("aria-label", `${this.title} in the last ${SPAN_S} s: now ${write(current)}, peak ${write(peak)}`);
  }
}

/** A quantile as Prometheus' histogram_quantile interpolates it, within its bucket; of the first and the last only a bound. */
function quantile({ le, cumulative, count: total }, share) {
  const rank = share * total;
  const index = cumulative.findIndex((below) => below >= rank);
  if (index < 0) return `> ${duration(le.at(-1))}`;
  if (index === 0) return `≤ ${duration(le[0])}`;
  const [low, before] = [le[index - 1], cumulative[index - 1]];
  return duration(low + ((le[index] - low) * (rank - before)) / (cumulative[index] - before));
}

/** Latencies since the server's start, a bar for each bucket between the first and the last that has any. */
class Histogram {
  constructor(title) {
    this.title = title;
    this.ends = element("p", { className: "note ends" }, element("span"), element("span"));
    this.quantiles = Object.fromEntries(["p50", "p95", "p99"].map((name) => [name, element("b", {}, "–")]));
    const items = Object.entries(this.quantiles).map(([name, value]) => element("li", {}, `${name} `, value));
    Object.assign(this, chartPanel("charts", title, this.ends, element("ul", { className: "quantiles" }, ...items)));
    this.drawnCount = null;
  }

  draw(buckets) {
    const { le, cumulative, count: total } = buckets;
    if (total === this.drawnCount) return;
    this.drawnCount = total;
    put(this.value, `${count(total)} measured`);
    const shares = [["p50", 0.5], ["p95", 0.95], ["p99", 0.99]];
    for (const [name, share] of shares) put(this.quantiles[name], total > 0 ? quantile(buckets, share) : "–");
    const counts = [...cumulative, total].map((below, index, all) => below - (index > 0 ? all[index - 1] : 0));
    const first = counts.findIndex((number) => number > 0);
    const last = counts.findLastIndex((number) => number > 0);
    const bars = first < 0 ? [] : counts.slice(first, last + 1);
    const most = Math.max(1, ...bars);
    const width = WIDTH / Math.max(bars.length, 6);
    const rects = bars.map((number, index) => {
      const height = (HEIGHT * number) / most;
      return drawn("rect", { x: index * width, y: HEIGHT - height, width: 0.9 * width, height });
    });
    this.svg.replaceChildren(drawn("line", { class: "base", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }), ...rects);
    const upTo = (index) => (index < le.length ? `up to ${duration(le[index])}` : `over ${duration(le.at(-1))}`);
    const [from, to] = this.ends.children;
    put(from, bars.length > 0 ? upTo(first) : "nothing yet");
    put(to, bars.length > 1 ? upTo(last) : "");
    const spoken = bars.map((number, index) => `${upTo(first + index)}: ${count(number)}`);
    this.svg.setAttribute("aria-label", `${this.title}, histogram. ${spoken.join("; ") || "Nothing yet"}`);
  }
}

const charts = {
  rate: new Series("rate-chart", "Tokens a second", decimal),
  running: new Series("charts", "Batch size", count),
  waiting: new Series("charts", "Waiting", count),
  usage: new Series("charts", "KV in use", percent, 1),
  hits: new Series("charts", "Prefix hit rate, since the start", percent, 1),
  firstToken: new Histogram("Time to first token"),
  betweenTokens: new Histogram("Between tokens"),
};

const REASONS = {
  hit: "Found in the cache",
  cold: "Never seen before",
  evicted: "Had been there, evicted",
  salt: "Another tenant's",
  identity: "Of another identity",
  partial_tail: "Ends within a block",
  window_evicted: "Its window is gone",
  no_snapshot: "No snapshot of its states",
  disabled: "The cache is off",
  skipped: "Not looked up",
};

function showMisses({ stats, misses }) {
  const rows = [["hit", stats.prefix_hit_tokens], ...Object.entries(misses)];
  const shown = rows.filter(([reason, tokens]) => reason === "hit" || tokens > 0);
  const most = Math.max(1, ...shown.map(([, tokens]) => tokens));
  sync($("misses").tBodies[0], shown, ([reason]) => reason, ([reason]) => {
    const row = element("tr", {}, element("th", { scope: "row" }, REASONS[reason] ?? reason), element("td"), element("td"));
    row.dataset.reason = reason;
    row.lastChild.append(element("div", { className: "bar" }, element("i")));
    row.lastChild.ariaHidden = "true";
    return row;
  }, (row, [, tokens]) => {
    put(row.cells[1], count(tokens));
    row.querySelector("i").style.width = `${(100 * tokens) / most}%`;
  });
}

/** Makes the rows of a table body those of `items`, and keeps those there, for the sake of focus. */
function sync(body, items, keyOf, make, update) {
  const there = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    const row = there.get(key) ?? make(item);
    there.delete(key);
    row.dataset.key = key;
    if (body.rows[index] !== row) body.insertBefore(row, body.rows[index] ?? null);
    update(row, item);
  });
  for (const row of there.values()) row.remove();
}

// ---- The block map ---------------------------------------------------------------------------------------------------------

const FREE = 0;
const CACHED = 1;
const SHARED = 2;
const FIRST_REQUEST = 3;
/** The request whose blocks stand out, by id. */
let picked = null;

// Neighbouring ids get hues far apart: the golden angle.
const hueOf = (id) => (id * 137.508) % 360;
const useOf = (code) => ["free", "cached", "shared"][code] ?? "held";

function requestOf(snapshot, code) {
  return code >= FIRST_REQUEST ? snapshot.requests[code - FIRST_REQUEST] : undefined;
}

/** One cell a block, or a bin of so many blocks that there are at most `MAX_CELLS`: the use that most of it has, and how much. */
function cellsOf(runs, total) {
  const perCell = Math.max(1, Math.ceil(total / MAX_CELLS));
  const cells = Array.from({ length: Math.ceil(total / perCell) }, () => ({ code: FREE, most: 0, used: 0 }));
  let block = 0;
  for (const [code, length] of runs) {
    const end = block + length;
    while (block < end) {
      const cell = cells[Math.floor(block / perCell)];
      const here = Math.min(end, (Math.floor(block / perCell) + 1) * perCell) - block;
      if (code !== FREE) {
        if (code !== CACHED) cell.used += here;
        // What is held goes before what is cached.
        const weight = code === CACHED ? here : here + perCell;
        if (weight > cell.most) Object.assign(cell, { code, most: weight });
      }
      block += here;
    }
  }
  for (const cell of cells) cell.share = cell.code === CACHED ? cell.most / perCell : cell.used / perCell;
  return { cells, perCell };
}

/** The largest cells with which the map is no taller than `height`; all in device pixels. */
function layout(number, width, height, smallest, largest) {
  for (let pitch = largest; ; pitch -= 1) {
    const columns = Math.max(1, Math.floor(width / pitch));
    const rows = Math.ceil(number / columns);
    if (rows * pitch <= height || pitch <= smallest) return { pitch, columns, rows };
  }
}

function drawMap(snapshot) {
  const canvas = $("map");
  if (canvas.clientWidth === 0) return;
  const scale = window.devicePixelRatio || 1;
  const { cells, perCell } = cellsOf(snapshot.runs, snapshot.stats.blocks_total);
  const width = Math.floor(canvas.clientWidth * scale);
  const px = (size) => Math.round(size * scale);
  const { pitch, columns, rows } = layout(cells.length, width, px(240), px(5), px(26));
  if (canvas.width !== width || canvas.height !== rows * pitch) {
    canvas.width = width;
    canvas.height = rows * pitch;
    canvas.style.height = `${(rows * pitch) / scale}px`;
  }
  Object.assign(canvas.dataset, { time: snapshot.time, columns, pitch, cells: cells.length, perCell });

  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const paint = {
    context: canvas.getContext("2d"),
    size: pitch - Math.max(1, px(1)),
    edge: Math.max(1, px(1)),
    marked: pitch >= px(8),
    numbered: perCell === 1 && pitch >= px(22),
    free: colour("free"),
    cached: colour("cached"),
    ink: colour("ink"),
    shared: colour("shared"),
    onShared: colour("on-shared"),
    onRequest: colour("on-request"),
    requestLight: colour("request-light"),
  };
  const { context } = paint;
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.font = `${px(10)}px ui-monospace, monospace`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  cells.forEach((cell, index) => {
    const request = requestOf(snapshot, cell.code);
    const isDim = picked !== null && cell.code !== FREE && request?.id !== picked;
    drawCell(paint, (index % columns) * pitch, Math.floor(index / columns) * pitch, cell, request, isDim);
  });
  context.globalAlpha = 1;
}

function drawCell(paint, x, y, { code, share }, request, isDim) {
  const { context, size, edge } = paint;
  context.globalAlpha = 1;
  if (code === FREE || share < 1) {
    context.strokeStyle = paint.free;
    context.lineWidth = edge;
    context.strokeRect(x + edge / 2, y + edge / 2, size - edge, size - edge);
    if (code === FREE) return;
  }
  context.globalAlpha = (isDim ? 0.2 : 1) * (0.25 + 0.75 * share);
  if (code === CACHED) {
    context.fillStyle = paint.cached;
    context.fillRect(x, y, size, size);
    if (!paint.marked) return;
    context.strokeStyle = paint.ink;
    context.lineWidth = edge;
    context.beginPath();
    context.moveTo(x + edge, y + size - edge);
    context.lineTo(x + size - edge, y + edge);
    context.stroke();
  } else if (code === SHARED) {
    context.fillStyle = paint.shared;
    context.fillRect(x, y, size, size);
    const dot = Math.max(edge, Math.round(size / 4));
    context.fillStyle = paint.onShared;
    context.fillRect(x + Math.floor((size - dot) / 2), y + Math.floor((size - dot) / 2), dot, dot);
  } else {
    context.fillStyle = `oklch(${paint.requestLight} 0.13 ${hueOf(request?.id ?? 0).toFixed(1)})`;
    context.fillRect(x, y, size, size);
    if (!paint.numbered || !request) return;
    context.fillStyle = paint.onRequest;
    context.fillText(String(request.id % 1000), x + size / 2, y + size / 2 + edge / 2);
  }
}

function showUses(snapshot) {
  const blocks = { held: 0, shared: 0, cached: 0, free: 0 };
  for (const [code, length] of snapshot.runs) blocks[useOf(code)] += length;
  blocks.total = blocks.held + blocks.shared + blocks.cached + blocks.free;
  const table = $("uses");
  for (const [use, number] of Object.entries(blocks)) {
    const row = table.querySelector(`[data-use=${use}]`);
    row.dataset.blocks = number;
    put(row.cells[1], count(number));
    put(row.cells[2], bytes(number * snapshot.block_bytes));
  }
  const tier = table.querySelector("[data-use=tier]");
  tier.hidden = snapshot.tier.blocks === 0;
  put(tier.cells[1], count(snapshot.tier.blocks));
  put(tier.cells[2], bytes(snapshot.tier.bytes));
  table.dataset.time = snapshot.time;

  const perCell = Number($("map").dataset.perCell ?? 1);
  const what = perCell === 1 ? "One cell is a block" : `One cell is ${perCell} blocks, the stronger the more of them are used`;
  const whose = picked === null ? "" : `; those that request ${picked} alone holds stand out`;
  put($("map-note"), `${what}; a block has ${snapshot.stats.block_size} tokens, ${bytes(snapshot.block_bytes)}${whose}.`);
  if ($("runs").open) showRuns(snapshot);
}

function showRuns(snapshot) {
  let block = 0;
  const lines = snapshot.runs.slice(0, MAX_RUNS).map(([code, length]) => {
    const where = length === 1 ? count(block) : `${count(block)} to ${count(block + length - 1)}`;
    block += length;
    const request = requestOf(snapshot, code);
    return [where, request ? `held by request ${request.id}` : useOf(code)];
  });
  const more = snapshot.runs.length - lines.length;
  if (more > 0) lines.push([`from ${count(block)} on`, `${count(more)} more runs`]);
  const body = $("runs").querySelector("tbody");
  while (body.rows.length > lines.length) body.lastChild.remove();
  lines.forEach(([where, use], index) => {
    const row = body.rows[index] ?? body.appendChild(element("tr", {}, element("td"), element("td")));
    put(row.cells[0], where);
    put(row.cells[1], use);
  });
}

$("runs").addEventListener("toggle", () => feed.last && showUses(feed.last));
new ResizeObserver(() => feed.last && drawMap(feed.last)).observe($("map"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => feed.last && drawMap(feed.last));

// ---- Figures and requests --------------------------------------------------------------------------------------------------

function showMemory(snapshot) {
  const { stats, held_bytes: held, fragmented_bytes: fragmented, naive_bytes: naive, naive_request_bytes: each } = snapshot;
  put($("fragmented"), `Fragmented memory: ${bytes(fragmented)} (${percent(held > 0 ? fragmented / held : 0)})`);
  put($("naive"), `Naive allocation would need: ${bytes(naive)}`);
  const fit = Math.max(1, Math.floor(snapshot.pool_bytes / each));
  put($("naive-note"),
    `Running requests hold ${bytes(held)} of a pool of ${bytes(snapshot.pool_bytes)}. Naive allocation reserves the longest ` +
    `request for each, ${bytes(each)}: ${count(fit)} would fit, and ${count(stats.requests_running)} run.`);
  const widest = Math.max(held, naive, 1);
  $("bar-live").style.width = `${(100 * (held - fragmented)) / widest}%`;
  $("bar-fragmented").style.width = `${(100 * fragmented) / widest}%`;
  $("bar-naive").style.width = `${(100 * naive) / widest}%`;
}

function showRequests(snapshot) {
  const { requests } = snapshot;
  if (picked !== null && !requests.some((request) => request.id === picked)) picked = null;
  sync($("requests").tBodies[0], requests.slice(0, MAX_ROWS), (request) => request.id, ({ id }) => {
    const swatch = element("i", { className: "swatch" });
    swatch.style.background = `oklch(var(--request-light) 0.13 ${hueOf(id).toFixed(1)})`;
    const button = element("button", { type: "button", title: "Let its blocks stand out" }, swatch, String(id));
    button.addEventListener("click", () => {
      picked = picked === id ? null : id;
      show(feed.last);
    });
    return element("tr", {}, element("td", {}, button), ...Array.from({ length: 7 }, () => element("td")));
  }, (row, request) => {
    row.querySelector("button").setAttribute("aria-pressed", picked === request.id);
    const times = request.preemptions > 0 ? `, preempted ${request.preemptions} ×` : "";
    const texts = [
      (request.status === "preempted" ? "waiting" : request.status) + times,
      count(request.prompt_tokens),
      count(request.cached_tokens),
      count(outputTokens(request)),
      percent(request.computed_tokens / Math.max(1, request.tokens)),
      count(request.blocks),
      request.status === "running" ? decimal(rate(request.id)) : "–",
    ];
    texts.forEach((text, index) => put(row.cells[index + 1], text));
  });
  const more = requests.length - MAX_ROWS;
  $("requests-note").hidden = requests.length > 0 && more <= 0;
  put($("requests-note"), requests.length === 0 ? "No requests." : `And ${count(more)} more.`);
}

function show(snapshot) {
  const { stats } = snapshot;
  put($("model"), snapshot.model);
  put($("running"), `${count(stats.requests_running)} of ${count(snapshot.max_seqs)}`);
  put($("waiting"), count(stats.requests_waiting));
  put($("rate"), decimal(rate()));
  put($("usage"), percent(stats.blocks_used / Math.max(1, stats.blocks_total)));
  const hits = hitRate(stats);
  put($("hits"), hits === null ? "–" : percent(hits));
  put($("preemptions"), count(stats.preemptions));
  if ($("pool").hidden) return;
  showMemory(snapshot);
  showRequests(snapshot);
  drawMap(snapshot);
  showUses(snapshot);
  charts.rate.draw();
  charts.running.draw(` of ${count(snapshot.max_seqs)}`);
  charts.waiting.draw();
  charts.usage.draw();
  charts.hits.draw();
  charts.firstToken.draw(snapshot.first_token);
  charts.betweenTokens.draw(snapshot.between_tokens);
  showMisses(snapshot);
}

// ---- Tabs ------------------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];

// Not the view's id: the browser would scroll to it.
const hashOf = (tab) => `#view=${tab.getAttribute("aria-controls")}`;

function choose(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  }
  history.replaceState(null, "", hashOf(tab));
  if (feed.last) show(feed.last);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const last = tabs.length - 1;
    const index = tabs.indexOf(tab);
    const next = { ArrowRight: index === last ? 0 : index + 1, ArrowLeft: index === 0 ? last : index - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(tabs[next]);
    tabs[next].focus();
  });
}
choose(tabs.find((tab) => location.hash === hashOf(tab)) ?? tabs[0]);

// ---- Chat ------------------------------------------------------------------------------------------------------------------

/** What was said, as the server gets it. */
let conversation = [];
/** Of the answer that is being made. */
let answering = null;
const nothingSaid = $("log-empty");

function article(role, title) {
  nothingSaid.remove();
  const said = element("div", { className: "said" });
  const note = element("p", { className: "note" });
  $("log").append(element("article", { className: role }, element("h2", {}, title), said, note));
  $("log").scrollTop = $("log").scrollHeight;
  return { said, note };
}

/** Appends to an answer, and follows it unless the reader has scrolled up. */
function append(said, text) {
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  said.append(text);
  said.normalize();
  if (follows) log.scrollTop = log.scrollHeight;
}

function setAnswering(abort) {
  answering = abort;
  $("log").setAttribute("aria-busy", abort !== null);
  $("send").disabled = abort !== null;
  $("stop").disabled = abort === null;
}

const ENDINGS = { length: "cut at the most tokens", timeout: "cut at its deadline" };

function measures(begun, firstToken, usage, ending) {
  const parts = [];
  if (usage) parts.push(`${count(usage.completion_tokens)} tokens`);
  if (firstToken !== null) parts.push(`first after ${duration((firstToken - begun) / 1000)}`);
  const seconds = (performance.now() - firstToken) / 1000;
  if (usage?.completion_tokens > 1 && firstToken !== null) {
    parts.push(`${decimal((usage.completion_tokens - 1) / seconds)} tokens/s`);
  }
  if (ending) parts.push(ending);
  return parts.join(", ");
}

async function ask(text) {
  const abort = new AbortController();
  setAnswering(abort);
  const messages = [...conversation, { role: "user", content: text }];
  put(article("user", "You").said, text);
  const { said, note } = article("assistant", chosen.several ? chosen.model : "Model");
  put(note, "…");
  const begun = performance.now();
  let [firstToken, usage, ending] = [null, null, null];
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json" },
      signal: abort.signal,
      body: JSON.stringify({
        model: chosen.model,
        messages,
        temperature: $("temperature").valueAsNumber,
        max_tokens: $("max-tokens").valueAsNumber,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (response.status === 401) openKeyForm(true);
    if (!response.ok) throw new Error(await complaint(response));
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      ending = ENDINGS[choice?.finish_reason] ?? ending;
      if (!choice?.delta.content) continue;
      firstToken ??= performance.now();
      append(said, choice.delta.content);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      note.className = "failed";
      ending = `failed: ${error.message}`;
    } else {
      ending = "stopped";
    }
  }
  put(note, measures(begun, firstToken, usage, ending));
  // The conversation was cleared meanwhile, and this answer with it.
  if (answering !== abort) return;
  // What nothing came of is not said again with the next message.
  if (said.textContent) conversation = [...messages, { role: "assistant", content: said.textContent }];
  setAnswering(null);
}

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("prompt").value.trim();
  if (!text || answering) return;
  $("prompt").value = "";
  ask(text);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat-form").requestSubmit();
});

const stop = () => answering?.abort();
$("stop").addEventListener("click", stop);
$("chat").addEventListener("keydown", (event) => event.key === "Escape" && stop());

$("clear").addEventListener("click", () => {
  stop();
  setAnswering(null);
  conversation = [];
  $("log").replaceChildren(nothingSaid);
  $("prompt").focus();
});

watch();
