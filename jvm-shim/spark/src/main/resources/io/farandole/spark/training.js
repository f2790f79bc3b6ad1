// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors
"use strict";
// Asks for the rows that are new, and shows them. Every value is written as text, never as HTML.

const EVERY = 1000;
const MOST_POINTS = 600;
const runs = new Map();
const application = new Map();
let seq = 0;
let chosen = decodeURIComponent(location.hash.slice(1)) || null;
let tabs = [];
let live = true;

const get = (id) => document.getElementById(id);

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (kind) made.className = kind;
  return made;
}

function drawing(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

// Gives an element new children. Those that say the same stay, so that a click, the focus, a
// selection and the place to which a table is scrolled outlive an update.
function settle(place, ...fresh) {
  fresh.forEach((node, at) => {
    const old = place.childNodes[at];
    if (old === undefined) place.append(node);
    else become(old, node);
  });
  while (place.childNodes.length > fresh.length) place.lastChild.remove();
}

function become(old, node) {
  if (old.isEqualNode(node)) return;
  // a click must not open another page
  const isElsewhere = old.getAttribute?.("href") !== node.getAttribute?.("href");
  if (old.nodeName !== node.nodeName || isElsewhere) { old.replaceWith(node); return; }
  if (old.nodeType === Node.TEXT_NODE) { old.data = node.data; return; }
  for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  settle(old, ...node.childNodes);
}

function link(path, text) {
  const made = element("a", text);
  made.href = "../" + path;
  return made;
}

function seconds(value) {
  if (!Number.isFinite(value)) return "";
  // The bounds are where the digits that are shown would round up to 1000.
  if (value < 0.0009995) return (value * 1e6).toFixed(0) + " µs";
  if (value < 0.99995) return (value * 1e3).toFixed(1) + " ms";
  if (value < 90) return value.toFixed(1) + " s";
  const minutes = Math.floor(value / 60);
  return minutes < 90 ? `${minutes} min ${Math.floor(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function short(value) {
  if (typeof value !== "number") return value === undefined || value === null ? "" : String(value);
  if (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)) return String(Number(value.toPrecision(5)));
  return value.toExponential(3);
}

function memory(told) {
  const kilobytes = Number.parseInt(told, 10);
  return Number.isFinite(kilobytes) ? (kilobytes / 2 ** 20).toFixed(1) + " GiB" : "";
}

const time = (millis) => (Number.isFinite(Number(millis)) && millis ? new Date(Number(millis)).toLocaleString() : "");
const share = (part, all) => (all > 0 && Number.isFinite(part) ? ((100 * part) / all).toFixed(0) + " %" : "");
const named = (rows, prefix) => [...rows].filter(([key]) => key.startsWith(prefix)).sort().map(([, body]) => body);

function table(id, heads, rows) {
  const head = element("tr");
  for (const [name, kind] of heads) head.append(element("th", name, kind));
  const lines = rows.map(({ cells, kind }) => {
    const line = element("tr", null, kind);
    cells.forEach((cell, at) => {
      const place = element("td", null, heads[at][1]);
      place.append(cell instanceof Node ? cell : document.createTextNode(cell === undefined || cell === null ? "" : String(cell)));
      line.append(place);
    });
    return line;
  });
  settle(get(id), head, ...lines);
}

function take(answer) {
  if (answer.tabs.length) tabs = answer.tabs;
  for (const [run, key, text] of answer.rows) {
    let body;
    try { body = JSON.parse(text); } catch { continue; }
    if (run === "") { application.set(key, body); continue; }
    if (!runs.has(run)) runs.set(run, new Map());
    runs.get(run).set(key, body);
  }
  seq = answer.seq;
}

function header(answer) {
  get("application").textContent = answer.application;
  get("state").textContent = answer.live ? "live" : "from the event log";
  if (get("tabs").childElementCount || !tabs.length) return;
  get("tabs").append(...tabs.map(([name, prefix]) => {
    const item = element("li");
    const to = link(encodeURIComponent(prefix) + "/", name);
    if (prefix === "training") to.setAttribute("aria-current", "page");
    item.append(to);
    return item;
  }));
}

function stageLinks(run) {
  const found = element("span");
  for (const stage of named(application, "stage/")) {
    if (!(run.tags || []).includes(stage.tag)) continue;
    const to = link(`stages/stage/?id=${encodeURIComponent(stage.stage)}&attempt=${encodeURIComponent(stage.attempt)}`,
      `${stage.stage}${stage.attempt === "0" ? "" : "." + stage.attempt}`);
    if (found.childElementCount) found.append(", ");
    found.append(to);
  }
  return found;
}

// Links to the logs of an executor. Only addresses of the web become links.
function logs(executor) {
  const found = element("span");
  for (const [name, address] of Object.entries(application.get(`logs/${executor}`) || {}).sort()) {
    let to;
    try { to = new URL(address, location.href); } catch { continue; }
    if (to.protocol !== "http:" && to.protocol !== "https:") continue;
    const shown = element("a", name);
    shown.href = to.href;
    shown.rel = "noopener noreferrer";
    if (found.childElementCount) found.append(" ");
    found.append(shown);
  }
  return found;
}

// The driver offers the file while it lives. Afterwards only its place is known.
function timeline(run, id) {
  if (!run.timeline) return "";
  if (!live || !run.timeline_is_here) return run.timeline;
  const to = element("a", "download");
  to.href = "timeline?run=" + encodeURIComponent(id);
  to.title = `${run.timeline}; opens in ui.perfetto.dev`;
  return to;
}

// A count and its noun: `1 epoch`, `2 epochs`.
function countedNoun(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

function place(rows) {
  const step = rows.get("step");
  const epochs = named(rows, "epoch/");
  const run = rows.get("run") || {};
  if (step && run.state === "running") return `epoch ${step.epoch + 1} of ${step.epochs}, step ${step.step} of ${step.steps}`;
  return epochs.length ? countedNoun(epochs.length, "epoch") : "";
}

// The run that the address names, else the latest.
function current() {
  if (runs.has(chosen) && runs.get(chosen).has("run")) return chosen;
  return [...runs.keys()].filter((id) => runs.get(id).has("run")).pop();
}

function showRuns() {
  const heads = [["Run"], ["State"], ["What"], ["Ranks", "number"], ["Progress"], ["Started"], ["Duration", "number"],
    ["Restarts", "number"]];
  const all = [...runs].filter(([, rows]) => rows.has("run")).reverse();
  const shown = current();
  const lines = all.map(([id, rows]) => {
    const run = rows.get("run");
    const choose = element("a", run.name || id);
    choose.href = "#" + encodeURIComponent(id);
    const took = ((run.ended || Date.now()) - run.started) / 1000;
    return {
      kind: id === shown ? "chosen" : "",
      cells: [choose, element("span", run.state, run.state), run.what, run.size, place(rows), time(run.started), seconds(took),
        run.restarts || 0],
    };
  });
  table("runs", heads, lines);
  get("list").hidden = !all.length;
  get("empty").hidden = all.length > 0;
}

function thinned(points) {
  if (points.length <= MOST_POINTS) return points;
  // Of each part the least and the most stay: no peak is lost.
  const kept = [];
  const size = Math.ceil(points.length / (MOST_POINTS / 2));
  for (let at = 0; at < points.length; at += size) {
    const part = points.slice(at, at + size);
    const least = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const most = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(least[0] <= most[0] ? [least, most] : [most, least]));
  }
  return kept;
}

function chart(title, lines) {
  const figure = element("figure");
  const caption = element("figcaption");
  caption.append(element("strong", title));
  lines.forEach(([name, points], at) => {
    const last = points[points.length - 1];
    caption.append(element("span", `${name} ${short(last[1])}`, "c" + (at % 6)));
  });
  const all = lines.flatMap(([, points]) => points);
  const [width, height, left, top, right, bottom] = [400, 190, 50, 10, 12, 24];
  let [least, most] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  if (least === most) { least -= Math.abs(least) * 0.1 || 0.5; most += Math.abs(most) * 0.1 || 0.5; }
  const first = Math.min(...all.map((p) => p[0]));
  const end = Math.max(first + 1, ...all.map((p) => p[0]));
  const x = (value) => left + ((value - first) / (end - first)) * (width - left - right);
  const y = (value) => top + (1 - (value - least) / (most - least)) * (height - top - bottom);
  const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(drawing("title", {}, `${title} by epoch`));
  for (const part of [0, 0.5, 1]) {
    const value = least + part * (most - least);
    svg.append(drawing("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    svg.append(drawing("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, short(Number(value.toPrecision(3)))));
  }
  for (const value of new Set([first, Math.round((first + end) / 2), end])) {
    svg.append(drawing("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, short(value)));
  }
  lines.forEach(([, points], at) => {
    const shown = thinned(points);
    svg.append(drawing("polyline", { class: "line c" + (at % 6), points: shown.map((p) => `${x(p[0])},${y(p[1])}`).join(" ") }));
    if (shown.length < 40) {
      for (const p of shown) svg.append(drawing("circle", { class: "dot c" + (at % 6), cx: x(p[0]), cy: y(p[1]), r: 2.5 }));
    }
  });
  figure.append(caption, svg);
  return figure;
}

function curves(rows) {
  const lines = new Map();
  for (const entry of named(rows, "epoch/")) {
    for (const [name, value] of [...Object.entries(entry.values || {}), ["rows/s", entry.rows_per_second]]) {
      if (!Number.isFinite(value)) continue;
      if (!lines.has(name)) lines.set(name, []);
      lines.get(name).push([entry.epoch + 1, value]);
    }
  }
  const of = (filter) => [...lines].filter(([name]) => filter(name));
  const isLoss = (name) => name === "loss" || name === "val_loss";
  return [["Loss", of(isLoss)], ["Metrics", of((name) => !isLoss(name) && name !== "rows/s")],
    ["Throughput", of((name) => name === "rows/s")]].filter(([, some]) => some.length);
}

function showRun() {
  const id = current();
  const rows = runs.get(id);
  get("run").hidden = !rows;
  if (!rows) return;
  const run = rows.get("run");
  get("name").textContent = run.name || id;
  get("reason").textContent = run.reason || "";
  const last = (run.state === "running" && rows.get("step")) || named(rows, "epoch/").pop() || {};
  const facts = [["State", element("b", run.state, run.state)], ["Progress", place(rows)], ["Loss", short(last.loss)],
    ["Throughput", Number.isFinite(last.rows_per_second) ? Math.round(last.rows_per_second).toLocaleString() + " rows/s" : ""],
    ["Stages", stageLinks(run)], ["Timeline", timeline(run, id)], ["Started", time(run.started)], ["Ended", time(run.ended)], ["By", run.user]];
  settle(get("facts"), ...facts.filter(([, value]) => value instanceof Node ? value.textContent : value)
    .map(([name, value]) => {
      const made = element("div");
      made.append(element("span", name), value instanceof Node ? value : document.createTextNode(value));
      return made;
    }));
  settle(get("charts"), ...curves(rows).map(([title, lines]) => chart(title, lines)));
  showRanks((rows.get("ranks") || {}).ranks || []);
  const events = named(rows, "event/");
  table("events", [["When"], ["What"], ["Why"]], events.map((one) => ({ cells: [time(one.time), one.what, one.reason] })));
  get("happened").hidden = !events.length;
  const parameters = Object.entries(run.parameters || {});
  table("parameters", [["Parameter"], ["Value"]], parameters.map(([name, value]) => ({ cells: [name, short(value)] })));
  get("set").hidden = !parameters.length;
}

function showRanks(ranks) {
  const heads = [["Rank", "number"], ["State"], ["Host"], ["Process", "number"], ["Executor"], ["Logs"], ["GPU"],
    ["Step", "number"], ["Waits for data", "number"], ["Reduces", "number"], ["Rows", "number"]];
  // Ranks wait for each other in the reduction: who is slow shows in what is left of a step without
  // it. If a rank does not measure the reduction, `own` is NaN, and no rank is marked.
  const own = (one) => (typeof one.reduce_seconds === "number" ? one.step_seconds - one.reduce_seconds : NaN);
  const known = ranks.map(own).filter(Number.isFinite).sort((a, b) => a - b);
  const middle = known.length ? known[Math.floor((known.length - 1) / 2)] : NaN;
  table("ranks", heads, ranks.map((one) => ({
    kind: known.length > 1 && own(one) > 1.3 * middle ? "slow" : "",
    cells: [one.rank, element("span", one.state, one.state === "lost" ? "failed" : one.state), one.host, one.pid, one.executor,
      logs(one.executor), one.gpu, seconds(one.step_seconds), share(one.data_seconds, one.step_seconds),
      share(one.reduce_seconds, one.step_seconds), one.rows],
  })));
}

function showExecutors() {
  const heads = [["Executor"], ["State"], ["Host"], ["Memory"], ["Processors", "number"], ["GPUs"], ["Logs"], ["Since"],
    ["Why"]];
  const numbers = [...application.keys()].filter((key) => key.startsWith("executor/")).map((key) => key.slice(9));
  table("executors", heads, numbers.map((number) => {
    const of = (kind) => application.get(`${kind}/${number}`) || {};
    const [added, removed, host] = [of("executor"), of("removed"), of("host")];
    const leaving = application.has(`decommissioning/${number}`);
    const state = removed.state ? "removed" : leaving ? "decommissioning" : "here";
    return {
      cells: [number, element("span", state, state === "here" ? "ended" : "failed"), added.host, memory(host.memory), host.processors,
        host.gpus, logs(number), time((removed.state ? removed : added).time), removed.reason],
    };
  }));
  get("cluster").hidden = !numbers.length;
}

function show() {
  showRuns();
  showRun();
  showExecutors();
}

async function look() {
  live = true;
  try {
    let more = true;
    while (more) {
      const answer = await (await fetch(`rows?since=${seq}`, { credentials: "same-origin" })).json();
      const isNew = answer.rows.length > 0 || seq === 0;
      take(answer);
      header(answer);
      [more, live] = [answer.more, answer.live];
      if (!more && (isNew || [...runs.values()].some((rows) => (rows.get("run") || {}).state === "running"))) show();
    }
  } catch {
    get("state").textContent = "the application does not answer; it may have ended";
  }
  if (live) setTimeout(look, EVERY);
}

addEventListener("hashchange", () => { chosen = decodeURIComponent(location.hash.slice(1)); show(); });
look();
