// The page's only script: asks /ui/state every two seconds and draws what it says. Texts go in as
// text nodes only, so a name of an engine can be nothing but a name.

const EVERY_MS = 2000, SLOWEST_MS = 30000, TOKEN = "emberkv-operator-token";
const SOURCES = ["hbm", "dram", "ssd", "peer"];
const $ = (id) => document.getElementById(id);
let last = null, lastAt = 0, failures = 0, timer = 0, isPaused = false;
const sorting = { nodes: { by: 0, up: true }, engines: { by: 0, up: true } };

// ---- numbers with units ----

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (n) => (Math.abs(n) < 100000 ? grouped.format(n) : short.format(n));
const plural = (n, one, more = one + "s") => `${count(n)} ${n === 1 ? one : more}`;
const percent = (part, whole) => {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return `${share > 0 && share < 10 ? share.toFixed(1) : share.toFixed(0)}\u00a0%`;
};
export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at += 1) n /= 1024;
  return `${at && n < 100 ? n.toFixed(1) : n.toFixed(0)}\u00a0${units[at]}`;
}
export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.0005) return "0\u00a0ms";
  if (s < 1) return `${s < 0.01 ? (s * 1000).toFixed(1) : (s * 1000).toFixed(0)}\u00a0ms`;
  if (s < 60) return `${s < 10 ? s.toFixed(1) : s.toFixed(0)}\u00a0s`;
  const minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (hours < 1) return `${minutes}\u00a0min\u00a0${Math.floor(s % 60)}\u00a0s`;
  if (days < 1) return `${hours}\u00a0h\u00a0${minutes % 60}\u00a0min`;
  return `${days}\u00a0d\u00a0${hours % 24}\u00a0h`;
}
const total = (hits) => SOURCES.reduce((sum, source) => sum + hits[source], 0);

// ---- elements ----

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {}))
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const sub = (text) => make("span", { class: "sub" }, text);

function bar(parts, whole, label) {
  const element = make("div", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const [kind, value] of parts) {
    if (!(value > 0) || !(whole > 0)) continue;
    const piece = make("i", { class: kind });
    piece.style.width = `${Math.min(100, (100 * value) / whole)}%`;
    element.append(piece);
  }
  return element;
}

function hitBar(row) {
  const prompt = row.prompt_tokens, hits = row.hit_tokens;
  if (!prompt) return make("span", { class: "quiet" }, "no tokens yet");
  const parts = SOURCES.map((source) => [source, hits[source]]);
  const rest = Math.max(0, prompt - total(hits));
  const told = SOURCES.filter((source) => hits[source]).map(
    (source) => `${source === "peer" ? "peers" : source.toUpperCase()} ${percent(hits[source], prompt)}`);
  const text = told.length ? told.join(", ") : "nothing cached";
  const whole = Math.max(prompt, total(hits));
  return make("div", null,
    bar([...parts, ["computed", rest]], whole, `${text}; computed ${percent(rest, whole)}`),
    sub(`${percent(total(hits), prompt)} of ${count(prompt)} tokens${told.length ? `: ${text}` : ""}`));
}

const sum = (terms) => (terms ? terms.queue_seconds + terms.fetch_seconds + terms.prefill_seconds : -1);

// `longest`: the sum that fills the bar, so that rows can be compared.
function termBar(terms, longest) {
  if (!terms) return make("span", { class: "quiet" }, "not chosen lately");
  const text = `queue ${seconds(terms.queue_seconds)}, fetch ${seconds(terms.fetch_seconds)}, prefill ${seconds(terms.prefill_seconds)}`;
  return make("div", null,
    bar([["queue", terms.queue_seconds], ["fetch", terms.fetch_seconds], ["prefill", terms.prefill_seconds]], longest, text),
    sub(`${seconds(sum(terms))}: ${text}`));
}

function mark(kind, text, more) {
  const shape = { good: "●", warn: "▲", bad: "✕", idle: "○" }[kind];
  return make("span", null,
    make("span", { class: `mark ${kind}`, "aria-hidden": "true" }, shape), ` ${text}`, more ? sub(more) : null);
}

// columns: [title, className, cell(row), key(row)?]
function table(id, columns, rows, emptyText) {
  const element = $(id), order = sorting[id];
  if (order) {
    const key = columns[order.by][3];
    rows = [...rows].sort((a, b) => {
      const x = key(a), y = key(b);
      const way = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return order.up ? way : -way;
    });
  }
  const heads = columns.map(([title, className, , key], at) => {
    if (!order || !key) return make("th", { scope: "col", class: className }, title);
    const isThis = order.by === at;
    const button = make("button", { type: "button", "data-table": id, "data-column": at }, title,
      make("span", { "aria-hidden": "true" }, isThis ? (order.up ? " ↑" : " ↓") : ""));
    const sort = isThis ? (order.up ? "ascending" : "descending") : "none";
    return make("th", { scope: "col", class: className, "aria-sort": sort }, button);
  });
  const focused = document.activeElement && document.activeElement.dataset;
  const body = rows.map((row) => make("tr", null, ...columns.map(([, className, cell], at) => {
    const content = cell(row);
    return make(at ? "td" : "th", { class: className, scope: at ? null : "row" }, content);
  })));
  if (!rows.length) body.push(make("tr", null, make("td", { class: "empty", colspan: columns.length }, emptyText)));
  const again = focused && focused.table === id ? focused.column : null;
  element.replaceChildren(make("thead", null, make("tr", null, ...heads)), make("tbody", null, ...body));
  if (again !== null) element.querySelector(`button[data-column="${again}"]`).focus();
}

// ---- sections ----

function figures(state) {
  const { window: recent, totals, waiting_requests: waiting } = state;
  const hits = total(recent.hit_tokens), wait = waiting.high + waiting.normal + waiting.low;
  const span = seconds(recent.seconds);
  const kept = totals.compared_hit_tokens
    ? `engines confirmed ${percent(totals.delivered_hit_tokens, totals.compared_hit_tokens)} of what was predicted`
    : "no engine has told its hits yet";
  const items = [
    ["Requests", recent.requests ? recent.requests_per_second.toFixed(recent.requests_per_second < 10 ? 1 : 0) : "0", "/s",
      recent.requests ? `${count(recent.requests)} in the last ${span}` : "none in the last 5 min"],
    ["Tokens found in cache", percent(hits, recent.prompt_tokens), "",
      recent.prompt_tokens ? `${count(hits)} of ${count(recent.prompt_tokens)} in the last ${span}` : "no tokens known yet"],
    ["Tokens saved", count(totals.compared_hit_tokens ? totals.delivered_hit_tokens : totals.predicted_hit_tokens), "", kept],
    ["Prefill saved", seconds(totals.saved_prefill_seconds), "", "engine time since the start, estimated"],
    ["In flight", count(state.inflight_requests), "",
      wait ? `${count(wait)} wait: high ${waiting.high}, normal ${waiting.normal}, low ${waiting.low}` : "nobody waits"],
    ["Refused", count(totals.refused), "", `${plural(totals.retries, "retry", "retries")}, ${plural(totals.aborts, "client")} gone`],
  ];
  $("figures").replaceChildren(...items.map(([title, value, unit, note]) => make("div", null,
    make("dt", null, title), make("dd", { class: "value" }, value, unit ? make("small", null, ` ${unit}`) : null),
    make("dd", { class: "note" }, note))));
}

function nodeState(node) {
  if (node.liveness !== "ok") return mark(node.liveness === "suspect" ? "warn" : "bad", node.liveness, "left out of choices by hit");
  if (node.exactness !== "exact") return mark("warn", node.exactness, `daemon ${node.state || "silent"}`);
  return mark("good", "exact", node.state && node.state !== "serving" ? `daemon ${node.state}` : null);
}

function tierCell(node, name) {
  const tier = node.tiers.find((item) => item.tier === name);
  if (!tier || !tier.capacity_bytes) return make("span", { class: "quiet" }, tier && tier.blocks ? plural(tier.blocks, "block") : "none");
  const label = `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)} used, ${percent(tier.used_bytes, tier.capacity_bytes)}`;
  return make("div", null, bar([["fill", tier.used_bytes]], tier.capacity_bytes, label),
    sub(`${percent(tier.used_bytes, tier.capacity_bytes)} of ${bytes(tier.capacity_bytes)} · ${plural(tier.blocks, "block")}`));
}
const used = (node, name) => (node.tiers.find((tier) => tier.tier === name) || { used_bytes: 0 }).used_bytes;
const share = (row) => (row.prompt_tokens ? total(row.hit_tokens) / row.prompt_tokens : -1);

function nodes(state, wanted) {
  const rows = state.nodes.filter((node) => wanted(node.node_id));
  table("nodes", [
    ["Node", "", (n) => make("span", null, n.node_id, sub(plural(n.engines, "engine"))), (n) => n.node_id],
    ["Index", "state", nodeState, (n) => `${n.liveness} ${n.exactness}`],
    ["Lag", "num", (n) => seconds(n.lag_seconds), (n) => n.lag_seconds],
    ["DRAM", "wide", (n) => tierCell(n, "DRAM"), (n) => used(n, "DRAM")],
    ["SSD", "wide", (n) => tierCell(n, "SSD"), (n) => used(n, "SSD")],
    ["Requests", "num", (n) => count(n.requests), (n) => n.requests],
    ["Found for its requests", "wide", hitBar, share],
  ], rows, state.nodes.length ? "No node matches the filter." :
    "No daemon is followed: name daemons in index.nodes of the router's configuration, or start some with `emberkv up`. Requests go by load alone until then.");
  const index = state.index;
  $("index").textContent = state.node_count
    ? `${index.nodes_exact} of ${plural(state.node_count, "node")} exact · ${plural(index.blocks, "block")} in the index · newest event or report at most ${seconds(index.worst_lag_seconds)} old`
      + (index.dropped_rows ? ` · ${count(index.dropped_rows)} rows refused: raise index.capacity_blocks` : "")
      + (state.node_count > state.nodes.length ? ` · first ${state.nodes.length} shown` : "")
    : "";
}

function engineState(engine) {
  const since = `for ${seconds(engine.state_seconds)}`;
  if (engine.state === "healthy") return mark("good", "healthy", engine.is_announced || engine.is_static ? since : `${since}, daemon away`);
  if (engine.state === "open") return mark("bad", "failing", `${since}; gets no requests`);
  return mark("idle", "not seen well yet", since);
}

function engines(state, wanted) {
  const rows = state.engines.filter((e) => wanted(`${e.engine} ${e.node_id} ${e.models.join(" ")}`));
  const longest = Math.max(0, ...rows.map((row) => sum(row.mean)));
  table("engines", [
    ["Engine", "", (e) => make("span", null, e.engine, sub([e.node_id && `on ${e.node_id}`, e.models.join(", ") || "any model", e.role !== "both" && e.role].filter(Boolean).join(" · "))), (e) => e.engine],
    ["State", "state", engineState, (e) => e.state],
    ["In flight", "num", (e) => count(e.inflight_requests), (e) => e.inflight_requests],
    ["Queue", "num", (e) => make("span", null, seconds(e.queue_seconds), sub(e.queued_prefill_tokens ? `${count(e.queued_prefill_tokens)} tok` : "no prefill")), (e) => e.queue_seconds],
    ["Estimated time to first token, mean", "wide", (e) => termBar(e.mean, longest), (e) => sum(e.mean)],
    ["Prefill speed", "num", (e) => make("span", null, `${count(e.prefill_tokens_per_second)} tok/s`, sub(e.samples.prefill ? plural(e.samples.prefill, "sample") : "first guess")), (e) => e.prefill_tokens_per_second],
    ["Requests", "num", (e) => count(e.requests), (e) => e.requests],
    ["Found in cache", "wide", hitBar, share],
  ], rows, state.engines.length ? "No engine matches the filter." :
    "No engine has announced itself: start one that shares a followed daemon, or name it in router.engines. Until then every request gets 503.");
}

function decisions(state, wanted) {
  const rows = state.decisions.filter((d) => wanted(`${d.engine} ${d.node_id} ${d.model}`));
  const longest = Math.max(0, ...rows.map(sum));
  table("decisions", [
    ["When", "num", (d) => `${seconds(d.seconds_ago)} ago`],
    ["Sent to", "state", (d) => make("span", null, d.engine, d.node_id ? sub(`on ${d.node_id}`) : null)],
    ["Prompt", "wide", (d) => d.tokens_known ? hitBar(d) : make("span", { class: "quiet" }, `about ${count(d.prompt_tokens)} tokens`)],
    ["Estimated time to first token", "wide", (d) => termBar(d, longest)],
    ["Why", "", (d) => make("span", null, d.reason,
      d.rival ? sub(`next best of ${d.candidates}: ${d.rival.engine}, ${seconds(d.rival.total_seconds)}, hit ${count(d.rival.hit_tokens)}`) : null)],
  ], rows, state.decisions.length ? "No decision matches the filter." : "No request has been routed yet.");
}

function prefixes(state) {
  table("prefixes", [
    ["Beginning", "", (p) => make("span", null, make("code", null, p.prefix), p.model ? sub(p.model) : null)],
    ["Requests", "num", (p) => make("span", null, count(p.requests), sub(percent(p.requests, state.window.requests)))],
    ["Found in cache", "wide", hitBar],
    ["Sent to", "", (p) => make("span", null, p.engines.join(", "), p.engine_count > p.engines.length ? sub(`and ${p.engine_count - p.engines.length} more`) : null)],
  ], state.prefixes, "No two prompts of the last 5 min began alike. A beginning is a hash of the first 1,024 tokens; no text is kept.");
}

function draw() {
  if (!last) return;
  const text = $("filter").value.trim().toLowerCase();
  const wanted = (name) => name.toLowerCase().includes(text);
  figures(last); nodes(last, wanted); engines(last, wanted); decisions(last, wanted); prefixes(last);
  $("facts").textContent = `policy ${last.policy} · up ${seconds(last.uptime_seconds)} · ${last.version}`;
}

function status() {
  const age = lastAt ? (performance.now() - lastAt) / 1000 : null;
  let now;
  if (failures) now = ["bad", age === null ? "no answer yet" : `no answer; figures are ${seconds(age)} old`];
  else if (isPaused) now = ["warn", `paused; figures are ${seconds(age)} old`];
  else if (!last) now = ["idle", "connecting"];
  else if (!last.is_ready) now = ["bad", "no healthy engine"];
  else now = ["good", "serving"];
  const shape = { good: "●", warn: "▲", bad: "✕", idle: "○" }[now[0]];
  const [shown, words] = $("state").children;
  if (words.textContent !== now[1]) {
    shown.textContent = shape; shown.className = `mark ${now[0]}`; words.textContent = now[1];
  }
  document.body.classList.toggle("stale", failures > 0);
}

// ---- asking ----

function tell(text) { $("notice").hidden = !text; $("notice").textContent = text; }

async function ask() {
  clearTimeout(timer);
  const token = sessionStorage.getItem(TOKEN);
  try {
    const answer = await fetch("/ui/state", {
      headers: token ? { authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: AbortSignal.timeout(10000),
    });
    if (answer.status === 401 || answer.status === 403) return locked(answer.status, await answer.json());
    if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
    last = await answer.json();
    lastAt = performance.now(); failures = 0;
    $("key").hidden = true; tell("");
    draw();
  } catch (error) {
    failures += 1;
    tell(`The router does not answer (${error.message}). Next try in ${seconds(pause() / 1000)}.`);
  }
  status();
  if (!isPaused && !document.hidden) timer = setTimeout(ask, pause());
}
const pause = () => Math.min(SLOWEST_MS, EVERY_MS * 2 ** Math.min(failures, 5));

function locked(code, body) {
  last = null;
  for (const id of ["figures", "nodes", "engines", "decisions", "prefixes"]) $(id).replaceChildren();
  $("index").textContent = $("facts").textContent = "";
  const why = (body.error && body.error.message) || "not allowed";
  const hadToken = sessionStorage.getItem(TOKEN) !== null;
  sessionStorage.removeItem(TOKEN);
  $("key").hidden = code !== 401;
  if (code === 401) {
    tell("");
    $("key-why").textContent = hadToken ? "That is not this router's operator token." : "This router shows its state to operators only.";
    $("token").focus();
  } else tell(`Not shown here: ${why}`);
  const [shown, words] = $("state").children;
  shown.textContent = "■"; shown.className = "mark warn"; words.textContent = "locked";
}

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN, $("token").value.trim());
  $("token").value = "";
  ask();
});
$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", String(isPaused));
  $("pause").textContent = isPaused ? "Go on" : "Pause";
  if (isPaused) { clearTimeout(timer); status(); } else ask();
});
$("filter").addEventListener("input", draw);
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-table]");
  if (!button) return;
  const order = sorting[button.dataset.table], at = Number(button.dataset.column);
  sorting[button.dataset.table] = { by: at, up: order.by === at ? !order.up : at === 0 };
  draw();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const section = { 1: "nodes", 2: "engines", 3: "decisions", 4: "prefixes" }[event.key];
  if (event.key === "/") { event.preventDefault(); $("filter").focus(); }
  else if (event.key === "p") $("pause").click();
  else if (section) { $(section).parentElement.focus(); $(section).closest("section").scrollIntoView(); }
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && !isPaused) ask(); });
setInterval(status, 1000);
ask();
