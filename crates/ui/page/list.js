// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// The list of runs: sort, filter, choose runs for a comparison.

const list = { runs: [], rows: new Map(), sort: "started", down: true, words: "", chosen: new Set(), shown: [], limit: 0 };

/** Rows that are drawn at once; further ones follow when the end of the list comes into view. */
const ROWS = 100;

/** Seconds that a run has taken so far. */
function lasted(run) {
  const end = run.ended ?? (run.state === "running" ? Date.now() : run.updated);
  return run.started ? (end - run.started) / 1000 : NaN;
}

const COLUMNS = [
  { name: "state", title: "State", cell: (run) => badge(run.state), of: (run) => run.state },
  { name: "name", title: "Run", cell: (run) => make("a", { href: `#/run/${encodeURIComponent(run.run)}` }, run.name), of: (run) => run.name },
  { name: "what", title: "Estimator", cell: (run) => run.what, of: (run) => run.what },
  { name: "model", title: "Model", cell: (run) => run.model, of: (run) => run.model },
  { name: "data", title: "Data", cell: (run) => run.data, of: (run) => run.data },
  { name: "started", title: "Started", cell: (run) => moment(run.started), of: (run) => run.started ?? run.updated ?? 0, down: true },
  { name: "lasted", title: "Time", number: true, cell: (run) => duration(lasted(run)), of: (run) => lasted(run) || 0, down: true },
  { name: "user", title: "By", cell: (run) => run.user, of: (run) => run.user },
  { name: "done", title: "Epochs", number: true, cell: (run) => (run.epochs ? `${brief(run.done ?? 0)}/${brief(run.epochs)}` : brief(run.done)), of: (run) => run.done ?? 0, down: true },
  { name: "best", title: "Best", number: true, cell: (run) => (run.best ? `${run.best.name} ${brief(run.best.value)} @ ${run.best.epoch}` : ""), of: (run) => run.best?.value ?? Infinity },
  { name: "last", title: "Last", cell: (run) => Object.entries(run.last).slice(0, 4).map(([name, value]) => `${name} ${brief(value)}`).join("  "), of: (run) => run.last.val_loss ?? run.last.loss ?? Infinity },
];

/** Whether a run has all words of the filter; `state:failed` asks one column alone. */
function fits(run, filter) {
  const whole = [run.name, run.state, run.what, run.model, run.data, run.user, run.reason].join(" ").toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => {
    const [column, value] = word.split(/:(.*)/s);
    return value !== undefined && typeof run[column] === "string" ? run[column].toLowerCase().includes(value) : whole.includes(word);
  });
}

/** The row of a run: the one that is shown already, with what has changed. */
function rowOf(run) {
  const text = JSON.stringify(run);
  const known = list.rows.get(run.run);
  if (known && known.text === text && run.state !== "running") return known.row;
  const choice = make("input", { type: "checkbox", "aria-label": "compare this run", change: (event) => choose(run.run, event.target.checked) });
  choice.checked = list.chosen.has(run.run);
  const cells = COLUMNS.map((column) => {
    const shown = column.cell(run);
    // The whole text of a cell that is too narrow for it; with a reason, the row has a title.
    const title = run.reason ? null : typeof shown === "string" ? shown : shown?.textContent;
    return make("td", { class: column.number ? "number" : column.name, title }, shown);
  });
  const fresh = make("tr", { tabindex: "-1", "data-run": run.run, title: run.reason || null, dblclick: () => open(run.run) }, make("td", { class: "choice" }, choice), cells);
  const row = known ? known.row : fresh;
  become(row, fresh);
  list.rows.set(run.run, { text, row });
  return row;
}

/** Opens the page of a run. */
function open(run) {
  location.hash = `#/run/${encodeURIComponent(run)}`;
}

function choose(run, chosen) {
  if (chosen) list.chosen.add(run);
  else list.chosen.delete(run);
  told();
}

/** What the line above the list says. */
function told() {
  const count = list.chosen.size;
  const button = document.getElementById("compare");
  button.disabled = count < 2;
  button.textContent = count < 2 ? "Compare" : `Compare ${count}`;
  document.getElementById("count").textContent = list.shown.length === list.runs.length ? countedNoun(list.runs.length, "run") : `${list.shown.length} of ${countedNoun(list.runs.length, "run")}`;
}

function compare() {
  if (list.chosen.size > 1) location.hash = `#/compare/${[...list.chosen].map(encodeURIComponent).join(",")}`;
}

/** Draws the rows anew: those that did not change stay as they are. */
function drawRows() {
  const column = COLUMNS.find((one) => one.name === list.sort);
  const order = (a, b) => {
    const [x, y] = [column.of(a), column.of(b)];
    return typeof x === "string" ? x.localeCompare(y) : x - y;
  };
  list.shown = list.runs.filter((run) => fits(run, list.words)).sort((a, b) => (list.down ? order(b, a) : order(a, b)));
  const body = document.getElementById("rows");
  const rows = list.shown.slice(0, list.limit).map(rowOf);
  const same = rows.length === body.children.length && rows.every((row, index) => row === body.children[index]);
  if (!same) {
    const focus = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.run : null;
    body.replaceChildren(...rows);
    const row = focus === null ? null : rows.find((one) => one.dataset.run === focus);
    if (row) row.focus({ preventScroll: true });
  }
  for (const head of document.querySelectorAll("th[data-column]")) {
    const direction = list.down ? "descending" : "ascending";
    head.setAttribute("aria-sort", head.dataset.column === list.sort ? direction : "none");
  }
  document.getElementById("nothing").hidden = list.shown.length > 0;
  told();
}

/** Draws more rows, if there are more. */
function more() {
  if (list.limit >= list.shown.length) return;
  list.limit += ROWS;
  drawRows();
}

function sortBy(column) {
  list.limit = ROWS;
  list.down = list.sort === column.name ? !list.down : Boolean(column.down);
  list.sort = column.name;
  drawRows();
}

/** The page of the list. */
function drawList(main) {
  const filter = make("input", {
    id: "filter", type: "search", placeholder: "Filter: words, or state:failed   ( / )", "aria-label": "filter", value: list.words,
    input: (event) => { list.words = event.target.value.trim(); list.limit = ROWS; drawRows(); },
  });
  const heads = COLUMNS.map((column) =>
    make("th", { "data-column": column.name, scope: "col", class: column.number ? "number" : "" }, make("button", { click: () => sortBy(column) }, column.title)));
  main.replaceChildren(
    make("div", { class: "bar" }, filter, make("button", { id: "compare", click: compare }, "Compare"), make("span", { id: "count", role: "status" })),
    make("div", { class: "wide" }, make("table", { class: "runs" }, make("thead", {}, make("tr", {}, make("th", {}), heads)), make("tbody", { id: "rows" }))),
    make("div", { id: "end" }),
    make("p", { id: "nothing", hidden: true }, "No run. Runs appear here when an estimator has begun one in the store, and when the filter lets them through."),
  );
  list.rows.clear();
  list.limit = ROWS;
  list.observer?.disconnect();
  list.observer = new IntersectionObserver((seen) => { if (seen.some((one) => one.isIntersecting)) more(); }, { rootMargin: "600px" });
  list.observer.observe(document.getElementById("end"));
  drawRows();
}

/** Asks for the list. */
async function refreshList() {
  const told = await ask("runs", "api/runs");
  if (told) {
    list.runs = told.runs;
    const there = new Set(told.runs.map((run) => run.run));
    for (const run of list.rows.keys()) if (!there.has(run)) list.rows.delete(run);
    problem(told.problems.join("; "));
    document.getElementById("stores").textContent = told.stores.join("  ");
  }
  if (document.getElementById("rows")) drawRows();
}

/** Moves the focus among the rows. */
function moveFocus(step) {
  const now = [...document.querySelectorAll("#rows tr")].indexOf(document.activeElement.closest?.("tr"));
  if (now + step >= list.limit - 1) more();
  const rows = [...document.querySelectorAll("#rows tr")];
  const next = rows[now < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, now + step))];
  if (next) next.focus();
}

/** The keys of the list; whether the key was one. */
function listKey(event) {
  const row = document.activeElement.closest?.("#rows tr");
  if (event.key === "j" || event.key === "ArrowDown") moveFocus(1);
  else if (event.key === "k" || event.key === "ArrowUp") moveFocus(-1);
  else if (event.key === "Enter" && row && document.activeElement === row) open(row.dataset.run);
  else if (event.key === "x" && row) row.querySelector("input").click();
  else if (event.key === "c") compare();
  else return false;
  return true;
}
