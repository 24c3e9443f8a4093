// The dashboard. One stream of snapshots in, pictures out; all state is in `view`.

const CLASSES = ["adapters", "running_kv", "history_kv", "free"];
const RETRY_MS = 1000, QUIET_MS = 10000, ROWS = 24, BARS = 20, PASSED = 2000;
const KEPT_S = 1800; // of history: the longest window
const LEAST_S = 10; // of a picture: a young one stretches
const view = { snapshots: [], bars: new Map(), paused: false, held: null };
const $ = (id) => document.getElementById(id);

// -- the stream ---------------------------------------------------------------------------------

async function follow() {
  for (;;) {
    try {
      await read();
      say("lost", "disconnected");
    } catch (error) {
      say("lost", error.message === "Failed to fetch" ? "disconnected" : error.message);
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

async function read() {
  const key = sessionStorage.getItem("key");
  const gone = new AbortController();
  let alarm = setTimeout(() => gone.abort(), QUIET_MS);
  const answer = await fetch("/dashboard/events", {
    headers: key ? { authorization: `Bearer ${key}` } : {}, signal: gone.signal, cache: "no-store",
  });
  $("login").hidden = ![401, 403].includes(answer.status);
  if (!answer.ok) {
    clearTimeout(alarm);
    throw new Error(answer.status === 503 ? "the server loads its model" : `the server answers ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(alarm);
      alarm = setTimeout(() => gone.abort(), QUIET_MS);
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: {")) take(JSON.parse(part.slice(6)));
      }
    }
  } finally {
    clearTimeout(alarm);
  }
}

function take(now) {
  if (now.error) throw new Error(now.error.message);
  const last = view.snapshots.at(-1);
  if (last && now.uptime_s < last.uptime_s) view.bars.clear(); // another process: its requests are numbered anew
  view.snapshots.push({ at: now.at, hbm: now.cache.hbm, uptime_s: now.uptime_s, came: now.cache.bytes_swapped_in,
    went: now.cache.bytes_swapped_out, tokens: now.stats.generated_tokens });
  while (view.snapshots[0].at < now.at - KEPT_S) view.snapshots.shift();
  const live = new Set(now.requests.filter((bar) => !bar.whole).map((bar) => bar.number));
  for (const bar of now.requests) view.bars.set(bar.number, bar);
  for (const [number, bar] of view.bars) {
    const old = bar.began + bar.whole < now.at - KEPT_S;
    if ((bar.whole && (old || view.bars.size > PASSED)) || (!bar.whole && !live.has(number))) view.bars.delete(number);
  }
  say("live", now.draining ? "drains" : "live");
  view.held = now;
  if (!view.paused) draw(now);
}

function say(kind, text) {
  $("state").className = kind;
  $("state").textContent = text;
}

// -- the pictures -------------------------------------------------------------------------------

function draw(now) {
  for (const place of document.querySelectorAll("[data-field]")) {
    place.textContent = place.dataset.field.split(".").reduce((at, name) => at[name], now);
  }
  const most = Number($("window").value), seen = view.snapshots.filter((s) => s.at >= now.at - most);
  const span = Math.min(most, Math.max(LEAST_S, now.at - seen[0].at));
  const cache = now.cache, stats = now.stats;
  $("model").textContent = `${now.model} on ${now.device}`;
  for (const [name, spread] of Object.entries(now.recent)) { // of the last minute, as `jlora top` shows them
    $(name).textContent = spread.count ? seconds(spread.p50_s) : "–";
    $(`${name}-tail`).textContent = spread.count ? `p90 ${seconds(spread.p90_s)}, p99 ${seconds(spread.p99_s)}` : "";
  }
  $("adapter-hits").textContent = share(cache.adapter_hits, cache.adapter_lookups);
  $("kv-hits").textContent = share(cache.kv_hit_tokens, cache.kv_lookup_tokens);
  $("rate").textContent = Math.round(rate(seen.slice(-6), "tokens"));
  $("came").textContent = bytes(rate(seen.slice(-6), "came"));
  $("went").textContent = bytes(rate(seen.slice(-6), "went"));
  $("up").textContent = `jlora ${now.version}, up ${age(now.uptime_s)}, ${stats.steps} steps`;
  $("gaps").textContent = `longest gaps in a minute: event loop ${seconds(now.loop_gap_s)}, engine ${seconds(now.engine_gap_s)}`;
  area(seen, now.at, span);
  link(seen, now.at, span);
  map(now);
  tree(now);
  gantt(now, most);
  const ended = [...view.bars.values()].filter((bar) => bar.whole && bar.began + bar.whole >= now.at - most);
  distribution("ttft", ended.filter((bar) => bar.tokens).map((bar) => bar.ttft));
  distribution("tpot", ended.filter((bar) => bar.tpot).map((bar) => bar.tpot));
}

function area(seen, at, span) {
  const [width, height] = [600, 180], x = (s) => width * (1 - (at - s.at) / span);
  const shapes = [];
  const below = seen.map(() => 0);
  for (const name of CLASSES) {
    const top = seen.map((s, i) => below[i] + s.hbm[name] / Math.max(1, s.hbm.total));
    const line = (levels) => seen.map((s, i) => `${x(s).toFixed(1)},${(height * (1 - levels[i])).toFixed(1)}`);
    shapes.push(shape("polygon", { class: name, points: [...line(top), ...line(below).reverse()].join(" ") }));
    top.forEach((level, i) => { below[i] = level; });
  }
  $("area").replaceChildren(...shapes);
}

function link(seen, at, span) {
  const [width, height] = [300, 120], lines = [];
  const rates = seen.slice(1).map((s, i) => ({ at: s.at, in: rate([seen[i], s], "came"), out: rate([seen[i], s], "went") }));
  const most = Math.max(1, ...rates.map((r) => Math.max(r.in, r.out)));
  lines.push(shape("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  for (const way of ["in", "out"]) {
    const points = rates.map((r) => `${(width * (1 - (at - r.at) / span)).toFixed(1)},${(height * (1 - 0.95 * r[way] / most)).toFixed(1)}`);
    lines.push(shape("polyline", { class: way, points: points.join(" ") }));
  }
  $("link").replaceChildren(...lines);
}

function map(now) {
  const canvas = $("map"), columns = 32, rows = Math.ceil(now.cells.length / columns), size = 8;
  if (canvas.width !== columns * size || canvas.height !== rows * size) {
    canvas.width = columns * size;
    canvas.height = rows * size;
  }
  const pen = canvas.getContext("2d"), free = getComputedStyle(document.documentElement).getPropertyValue("--free");
  pen.clearRect(0, 0, canvas.width, canvas.height);
  now.cells.forEach((code, i) => {
    pen.fillStyle = code ? colour((code - 1) >> 1, code % 2 === 0) : free;
    pen.fillRect((i % columns) * size, Math.floor(i / columns) * size, size - 1, size - 1);
  });
  $("per-cell").textContent = now.per_cell > 1 ? `${now.per_cell} to a cell` : "";
}

function colour(uid, pale) {
  const dark = document.documentElement.dataset.theme === "dark";
  if (uid === 0) return dark ? "#75808c" : "#a9b2ba";
  const hue = (uid * 137.508 + 160) % 360;
  return `hsl(${hue} ${pale ? 45 : 60}% ${(dark ? 58 : 44) + (pale ? (dark ? -16 : 26) : 0)}%)`;
}

function tree(now) {
  $("adapters").textContent = `${now.adapters} adapters` + (now.whole ? "" : "; a part of the KV is counted");
  $("tree").replaceChildren(...now.tree.map((entry) => {
    const row = document.createElement("tr");
    row.className = entry.uid ? "child" : "";
    row.dataset.name = entry.name;
    const cells = [entry.name, entry.uid ? entry.tier + (entry.pinned ? " pinned" : "") : "base", entry.rank || "",
      entry.blocks, entry.kv, entry.uid ? entry.hits : "", entry.uid ? entry.running : "", entry.uid ? entry.waiting : ""];
    row.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
    const mark = document.createElement("i");
    mark.style.background = colour(entry.uid, false);
    row.firstChild.prepend(mark);
    return row;
  }));
}

function gantt(now, most) {
  const width = $("gantt").clientWidth || 600, tall = 13, label = width < 600 ? 60 : 120, room = width - label - 4;
  const all = [...view.bars.values()].filter((bar) => !bar.whole || bar.began + bar.whole >= now.at - most);
  const shown = all.sort((a, b) => a.number - b.number).slice(-ROWS);
  const from = Math.max(now.at - most, Math.min(now.at - 1, ...shown.map((bar) => bar.began)));
  const to = shown.some((bar) => !bar.whole) ? now.at : Math.max(from + 0.1, ...shown.map((bar) => bar.began + bar.whole));
  const x = (t) => label + room * Math.max(0, Math.min(1, (t - from) / (to - from)));
  const parts = [];
  shown.forEach((bar, i) => {
    const cold = Math.max(bar.adapter_cold_start, bar.kv_cold_start), end = bar.whole ? bar.began + bar.whole : now.at;
    const phases = bar.whole
      ? [["queue", bar.queue], ["cold", cold], ["prefill", bar.prefill], ["decode", bar.ttft ? Math.max(0, bar.whole - bar.ttft) : 0]]
      : bar.first ? [["prefill", bar.first - bar.began], ["decode", end - bar.first]] : [["queue", end - bar.began]];
    const text = shape("text", { x: label - 6, y: i * tall + 10, "text-anchor": "end" });
    text.textContent = bar.model.length > label / 7 ? bar.model.slice(0, label / 7 - 1) + "…" : bar.model;
    parts.push(text);
    const broken = bar.failed ? ", failed" : bar.aborted ? ", aborted" : "";
    let at = bar.began;
    for (const [name, lasts] of phases) {
      const [left, right] = [x(at), x(at + lasts)];
      if (lasts > 0) {
        const box = shape("rect", { class: broken ? `${name} aborted` : name, x: left, y: i * tall + 2, width: Math.max(1, right - left), height: tall - 4, rx: 2 });
        const title = shape("title", {});
        title.textContent = `${bar.model}: ${name} ${seconds(lasts)}${broken}`;
        box.append(title);
        parts.push(box);
      }
      at += lasts;
    }
  });
  const height = Math.max(60, shown.length * tall + 4);
  $("gantt").setAttribute("viewBox", `0 0 ${width} ${height}`);
  $("gantt").style.height = `${height}px`;
  $("gantt").replaceChildren(...parts);
  const wide = seconds(to - from);
  $("counted").textContent = all.length > shown.length ? `the latest ${shown.length} of ${all.length}, ${wide}` : `${all.length} in the window, ${wide}`;
}

function distribution(name, values) {
  const svg = $(`${name}-bars`), [width, height] = [300, 100];
  $(`${name}-count`).textContent = values.length ? `median ${seconds(quantile(values, 0.5))}, p99 ${seconds(quantile(values, 0.99))}, of ${values.length}` : "";
  if (!values.length) return svg.replaceChildren();
  const [low, high] = [Math.log(Math.min(...values) / 1.1), Math.log(Math.max(...values) * 1.1)]; // seconds, by powers
  const counts = new Array(BARS).fill(0);
  for (const value of values) counts[Math.min(BARS - 1, Math.floor(BARS * (Math.log(value) - low) / (high - low)))] += 1;
  const most = Math.max(...counts), parts = [];
  counts.forEach((count, i) => {
    const tall = (height - 4) * count / most;
    parts.push(shape("rect", { class: "bar", x: i * width / BARS + 1, y: height - tall, width: width / BARS - 2, height: tall, rx: 1.5 }));
  });
  parts.push(shape("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  [[0, "start"], [0.5, "middle"], [1, "end"]].forEach(([part, anchor]) => {
    const text = shape("text", { x: part * width, y: height + 14, "text-anchor": anchor });
    text.textContent = seconds(Math.exp(low + part * (high - low)));
    parts.push(text);
  });
  svg.replaceChildren(...parts);
}

// -- small things -------------------------------------------------------------------------------

function shape(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function rate(seen, name) {
  const [first, last] = [seen[0], seen.at(-1)];
  if (!first || last.at <= first.at || last.uptime_s < first.uptime_s) return 0; // the server has been restarted
  return Math.max(0, last[name] - first[name]) / (last.at - first.at);
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.ceil(share * sorted.length) - 1];
}

const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(1)} %` : "–");
const seconds = (s) => (s < 1 ? `${(s * 1e3).toFixed(s < 0.01 ? 2 : 0)} ms` : `${s.toFixed(2)} s`);
const age = (s) => (s < 3600 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`);

function bytes(count) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log10(count || 1) / 3)));
  return `${(count / 1000 ** power).toFixed(power ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}/s`;
}

// -- controls -----------------------------------------------------------------------------------

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("theme", name);
  if (view.held) draw(view.held);
}

$("pause").addEventListener("click", () => {
  view.paused = !view.paused;
  $("pause").setAttribute("aria-pressed", view.paused);
  $("pause").textContent = view.paused ? "Go on" : "Pause";
  if (!view.paused && view.held) draw(view.held);
});
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("window").addEventListener("change", () => view.held && draw(view.held));
$("login").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  sessionStorage.setItem("key", $("key").value);
});
theme(localStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
follow();
