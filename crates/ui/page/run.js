// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// The page of one run, and the comparison of several.

/** How much longer than the median a rank's own work takes before it is marked. */
const SLOW = 1.3;

/** A table of names and values; nothing where there are none. */
function table(title, pairs) {
  const rows = pairs.filter(([, value]) => words(value) !== "");
  if (!rows.length) return null;
  return section(title, make("table", { class: "pairs" }, make("tbody", {}, rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, words(value)))))));
}

function section(title, ...content) {
  return make("section", { "data-section": title }, make("h2", {}, title), content);
}

/** What a run is doing, in one line. */
function headline(told) {
  const { summary, record } = told;
  const now = record.now;
  const parts = [
    summary.what, summary.started ? `started ${moment(summary.started)}` : "", duration(lasted(summary)),
    summary.user ? `by ${summary.user}` : "", summary.size ? countedNoun(summary.size, "rank") : "",
    summary.epochs ? `epoch ${brief(summary.done ?? 0)} of ${brief(summary.epochs)}` : summary.done ? countedNoun(summary.done, "epoch") : "",
    summary.restarts ? countedNoun(summary.restarts, "restart") : "",
    summary.state === "running" && now ? `batch ${words(now.step)} of ${words(now.steps)}, ${brief(now.rows_per_second)} rows/s` : "",
  ];
  return make("p", { id: "headline" }, badge(summary.state), "  ", parts.filter(Boolean).join("  ·  "));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/**
 * Seconds that a rank computes in a step: what it does not wait. NaN if it does not measure what it
 * waits.
 */
function ownWork(rank) {
  const times = [rank.step_seconds, rank.data_seconds, rank.reduce_seconds];
  return times.every((time) => typeof time === "number") ? times[0] - times[1] - times[2] : NaN;
}

/** Used and all of something in bytes, such as `3.1 of 16.0 GiB`. */
function used(part, whole) {
  return typeof part === "number" && whole > 0 ? `${(part / 2 ** 30).toFixed(1)} of ${(whole / 2 ** 30).toFixed(1)} GiB` : "";
}

function percent(share) {
  return typeof share === "number" ? `${Math.round(share * 100)} %` : "";
}

/** Heads of the columns about a rank's host and GPU, and what they show. */
const LOADS = [
  ["Host CPU", (load) => percent(load.cpu)],
  ["Process memory", (load) => (typeof load.process_memory === "number" ? bytes(load.process_memory) : "")],
  ["Host memory", (load) => used(load.memory, load.memory_total)],
  ["GPU load", (load) => percent(load.gpu)],
  ["GPU memory", (load) => used(load.gpu_memory, load.gpu_memory_total)],
];

/** Where each rank is and where its time goes. */
function ranks(record) {
  const all = Array.isArray(record.ranks) ? record.ranks.filter((one) => one && typeof one === "object") : [];
  if (!all.length) return null;
  const works = all.map(ownWork).filter(Number.isFinite);
  const usual = works.length > 1 ? median(works) : NaN;
  const time = (seconds) => (Number.isFinite(seconds) ? `${(seconds * 1000).toFixed(1)} ms` : "");
  const share = (part, whole) => (typeof part === "number" && whole > 0 ? `${Math.round((part / whole) * 100)} %` : "");
  const computes = (rank) => (Number.isFinite(ownWork(rank)) ? `${time(ownWork(rank))} (${share(ownWork(rank), rank.step_seconds)})` : "");
  // Columns that no rank has are left out.
  const hasStates = all.some((rank) => rank.state);
  const loads = LOADS.filter(([, shown]) => all.some((rank) => shown(rank.load || {})));
  const isText = (column) => column === 1 || (hasStates && column === 2);
  const rows = all.map((rank) => {
    const slow = ownWork(rank) > SLOW * usual;
    const cells = [rank.rank, rank.host, ...(hasStates ? [rank.state] : []), rank.pid, rank.executor, rank.gpu, time(rank.step_seconds), computes(rank),
      share(rank.data_seconds, rank.step_seconds), share(rank.reduce_seconds, rank.step_seconds), ...loads.map(([, shown]) => shown(rank.load || {}))];
    const mark = slow ? `computes ${(ownWork(rank) / usual).toFixed(1)} times as long as the median` : "";
    return make("tr", { class: slow ? "slow" : null }, cells.map((cell, index) => make("td", { class: isText(index) ? "" : "number" }, cell ?? "")), make("td", {}, mark));
  });
  const heads = ["Rank", "Host", ...(hasStates ? ["State"] : []), "Process", "Executor", "GPU", "Step", "Computes", "Waits for data", "Reduces", ...loads.map(([head]) => head), ""];
  return section("Ranks", make("div", { class: "wide" }, make("table", { class: "list" }, make("thead", {}, make("tr", {}, heads.map((head, index) => make("th", { scope: "col", class: isText(index) || index === heads.length - 1 ? "" : "number" }, head)))), make("tbody", {}, rows))));
}

/** What limits the speed of the run, where its ranks have measured it. */
function limits(told) {
  const { verdict, why, next } = told.explanation || {};
  if (!verdict || /^(unknown|failed)/.test(verdict)) return null;
  return section("What limits it", make("p", {}, make("strong", {}, verdict)), make("p", {}, why), make("p", {}, next));
}

function events(record) {
  const all = Array.isArray(record.events) ? record.events.filter((one) => one && typeof one === "object") : [];
  if (!all.length) return null;
  const rows = all.map((event) => make("tr", {}, make("td", {}, moment(event.time)), make("td", {}, words(event.what)), make("td", { class: "reason" }, words(event.reason))));
  return section("Events", make("table", { class: "list" }, make("tbody", {}, rows)));
}

const PERFETTO = "https://ui.perfetto.dev";

/** Milliseconds after which the page says that Perfetto does not answer. */
const PERFETTO_LATE = 10000;
const NO_PERFETTO = "Perfetto does not answer. Without a network, download the timeline and open it in chrome://tracing.";

async function traceAt(address) {
  const response = await fetch(address, { cache: "no-store" });
  if (!response.ok) throw new Error(await response.text());
  return response.arrayBuffer();
}

/**
 * Sends a trace to a page of Perfetto by its protocol: the page answers PING when it can take a
 * trace. `late` is called if it does not answer in time, and `taken` when it has the trace.
 */
function sendToPerfetto(other, address, title, { isGone, isLoaded, late, taken, failed }) {
  const trace = traceAt(address);
  const ask = () => {
    if (isGone()) end();
    else if (isLoaded()) other.postMessage("PING", PERFETTO);
  };
  const asking = setInterval(ask, 100);
  const waiting = setTimeout(() => late(end), PERFETTO_LATE);
  const end = () => { clearInterval(asking); clearTimeout(waiting); window.removeEventListener("message", heard); };
  const heard = async (event) => {
    if (event.origin !== PERFETTO || event.source !== other || event.data !== "PONG") return;
    end();
    try {
      const buffer = await trace;
      other.postMessage({ perfetto: { buffer, title, fileName: "timeline.json" } }, PERFETTO, [buffer]);
      taken();
    } catch (error) {
      failed(error.message);
    }
  };
  window.addEventListener("message", heard);
  trace.catch((error) => { end(); failed(error.message); });
}

/**
 * Opens a trace in a window of Perfetto. After the deadline the page continues to ask: the network
 * may be slow.
 */
function openPerfetto(address, title) {
  const other = window.open(PERFETTO);
  if (!other) { problem("the browser has blocked the window of Perfetto; download the timeline and open it there"); return; }
  sendToPerfetto(other, address, title, {
    isGone: () => other.closed, isLoaded: () => true, late: () => problem(NO_PERFETTO), taken: () => problem(""), failed: problem,
  });
}

/**
 * Shows a trace in a frame of Perfetto. If Perfetto does not answer, a sentence and a link replace
 * the frame.
 */
function embedPerfetto(place, address, title) {
  // The frame may not navigate this page.
  const rights = "allow-scripts allow-same-origin allow-downloads allow-forms allow-modals allow-popups allow-popups-to-escape-sandbox";
  let loaded = false;
  const load = () => { loaded = true; };
  const frame = make("iframe", { class: "perfetto", src: `${PERFETTO}/#!/?mode=embedded`, title: "Timeline in Perfetto", sandbox: rights, load });
  place.replaceChildren(frame);
  const instead = (text) => frame.replaceWith(make("p", { role: "alert" }, text, " ", make("a", { href: address, download: "timeline.json" }, "Download the timeline")));
  sendToPerfetto(frame.contentWindow, address, title, {
    isGone: () => !frame.isConnected, isLoaded: () => loaded, late: (end) => { end(); instead(NO_PERFETTO); }, taken: () => {}, failed: instead,
  });
}

/** The timeline of all ranks, if the run has one. */
function timeline(run, told) {
  const file = told.files.find((one) => one.path === "timeline.json");
  if (!file) return null;
  const address = `api/timeline?run=${encodeURIComponent(run)}`;
  const title = told.summary.name;
  // A refresh keeps the frame, also where it puts fresh buttons next to it.
  const embed = () => embedPerfetto(document.querySelector("[data-section=Timeline] [data-kept]"), address, title);
  return section("Timeline", make("div", { class: "bar" },
    make("button", { click: embed }, "Open in Perfetto"),
    make("button", { click: () => openPerfetto(address, title) }, "Open in a window"),
    make("a", { class: "button", href: address, download: "timeline.json" }, `Download (${bytes(file.bytes)})`)),
  make("p", {}, "Perfetto is a page of ui.perfetto.dev. It shows the trace in the browser and sends it nowhere. Without a network, download the trace and open it in chrome://tracing."),
  make("div", { "data-kept": "" }));
}

/** The files of a run; texts can be read here. */
function files(run, told) {
  if (!told.files.length) return null;
  const output = make("pre", { hidden: true, tabindex: "0", "data-kept": "" });
  const read = async (file) => {
    const place = location.hash;
    try {
      const response = await fetch(`api/output?run=${encodeURIComponent(run)}&file=${encodeURIComponent(file)}`, { cache: "no-store" });
      const text = await response.text();
      if (location.hash !== place) return;
      // A refresh keeps the element of the first answer.
      const shown = document.querySelector("pre[data-kept]") || output;
      shown.textContent = text;
      shown.hidden = false;
      shown.scrollTop = 0;
    } catch (error) {
      problem(error.message);
    }
  };
  const name = (file) => (file.text ? make("button", { class: "link", click: () => read(file.path) }, file.path) : file.path);
  const rows = told.files.map((file) => make("tr", {}, make("td", {}, name(file)), make("td", { class: "number" }, bytes(file.bytes))));
  return section("Files", make("p", {}, told.url), make("table", { class: "list" }, make("tbody", {}, rows)), output);
}

/** Everything about a run but its curves. */
function facts(run, told) {
  const { summary, record } = told;
  const object = (value) => (value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : []);
  const told_data = object(record.data).filter(([name]) => name !== "told");
  return [
    summary.reason ? section(summary.state === "failed" ? "Why it failed" : "Why it ended", make("pre", {}, record.reason || summary.reason)) : null,
    limits(told), ranks(record), timeline(run, told), events(record),
    make("div", { class: "columns" },
      table("Parameters", object(record.parameters)),
      make("div", {}, table("Data", told_data), table("Environment", object(record.environment)), table("Code", object(record.code)), table("Begun with", object(told.fingerprint)))),
    files(run, told),
  ].filter(Boolean);
}

/** The page of one run. */
function drawRun(main, run) {
  const title = make("h1", {}, run.replace(/^\d+\//, ""));
  const head = make("div", {});
  const charts = make("div", {});
  const rest = make("div", { class: "facts" });
  main.replaceChildren(make("p", {}, make("a", { href: "#/" }, "All runs")), title, head, charts, rest);
  const panel = new Panel([run], charts);
  const refresh = async () => {
    const told = await ask("run", `api/run?run=${encodeURIComponent(run)}`);
    if (told) {
      title.textContent = told.summary.name;
      document.title = told.summary.name;
      settle(head, headline(told));
      settle(rest, facts(run, told));
    }
    await panel.refresh();
  };
  return { refresh, close: () => { panel.close(); forget("run"); } };
}

/** What differs between the parts of several runs: a row for each name. */
function differences(title, names, parts) {
  const keys = [...new Set(parts.flatMap((part) => Object.keys(part)))].sort();
  const rows = keys.map((key) => [key, parts.map((part) => words(part[key]))]).filter(([, values]) => new Set(values).size > 1);
  if (!rows.length) return null;
  const head = make("tr", {}, make("th", {}), names.map((name) => make("th", { scope: "col" }, name)));
  return section(title, make("div", { class: "wide" }, make("table", { class: "list" }, make("thead", {}, head), make("tbody", {}, rows.map(([key, values]) => make("tr", {}, make("th", { scope: "row" }, key), values.map((value) => make("td", {}, value))))))));
}

/** The comparison of several runs. */
function drawComparison(main, runs) {
  const charts = make("div", {});
  const rest = make("div", { class: "facts" });
  main.replaceChildren(make("p", {}, make("a", { href: "#/" }, "All runs")), make("h1", {}, countedNoun(runs.length, "run")), charts, rest);
  document.title = countedNoun(runs.length, "run");
  const panel = new Panel(runs, charts);
  const known = new Map();
  const refresh = async () => {
    for (const run of runs) {
      const told = await ask(`compared ${run}`, `api/run?run=${encodeURIComponent(run)}`);
      if (told) known.set(run, told);
    }
    const all = runs.map((run) => known.get(run)).filter(Boolean);
    const names = all.map((told) => told.summary.name);
    const result = (told) => ({ state: told.summary.state, epochs: told.summary.done, time: duration(lasted(told.summary)), best: told.summary.best ? `${told.summary.best.name} ${brief(told.summary.best.value)} @ ${told.summary.best.epoch}` : "", ...told.summary.last });
    settle(rest, [
      differences("Results", names, all.map(result)),
      differences("Parameters that differ", names, all.map((told) => told.record.parameters || {})),
      differences("Begun with", names, all.map((told) => told.fingerprint)),
      differences("Environment that differs", names, all.map((told) => ({ ...told.record.environment, ...told.record.code }))),
    ]);
    await panel.refresh();
  };
  return { refresh, close: () => { panel.close(); for (const run of runs) forget(`compared ${run}`); } };
}
