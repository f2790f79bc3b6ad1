// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// The frame of the page: which view is shown, what it is refreshed by, keys, light and dark.

const EVERY = 2000;
const KEYS = [
  ["/", "filter the list"], ["j k or arrows", "move in the list"], ["Enter", "open the run"], ["x", "choose the run for a comparison"],
  ["c", "compare the chosen runs"], ["u or Escape", "back to the list"], ["t", "light, dark, as the system"], ["?", "these keys"],
];
let view = null;

/** Says what went wrong; an empty text says that nothing does. */
function problem(text) {
  const line = document.getElementById("problem");
  line.textContent = text;
  line.hidden = !text;
}

/** Draws the view that the address names. */
async function route() {
  if (view) view.close();
  const main = document.querySelector("main");
  const [, kind, rest] = location.hash.match(/^#\/(run|compare)\/(.*)$/) || [];
  let names = [];
  try {
    names = (rest || "").split(",").filter(Boolean).map(decodeURIComponent);
  } catch {
    names = [];
  }
  if (kind === "run" && names.length) view = drawRun(main, names[0]);
  else if (kind === "compare" && names.length) view = drawComparison(main, names);
  else {
    document.title = "Runs";
    drawList(main);
    view = { refresh: refreshList, close: () => {} };
  }
  window.scrollTo(0, 0);
  await refresh();
}

/** Asks for what is new. */
async function refresh() {
  const now = view;
  try {
    await now.refresh();
    if (now === view && lost) problem("");
    lost = false;
  } catch (error) {
    if (now === view) problem(error instanceof TypeError ? "The viewer does not answer: it has been closed, or the connection is gone." : error.message);
    lost = true;
  }
  document.body.dataset.ready = "yes";
}
let lost = false;

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, EVERY);
}

/** Light, dark, or as the system has it. */
function theme(next) {
  const known = ["", "light", "dark"];
  let chosen = "";
  try {
    chosen = localStorage.getItem("farandole-theme") || "";
    if (next) localStorage.setItem("farandole-theme", (chosen = known[(known.indexOf(chosen) + 1) % known.length]));
  } catch {
    // A browser that keeps nothing: as the system has it.
  }
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  if (next) route();
}

function help() {
  const box = document.getElementById("keys");
  if (box.open) box.close();
  else box.showModal();
}

function key(event) {
  const typing = event.target.matches?.("input[type=search], select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || document.getElementById("keys").open) return;
  const inList = Boolean(document.getElementById("rows"));
  if (event.key === "/" && inList) document.getElementById("filter").focus();
  else if (event.key === "?") help();
  else if (event.key === "t") theme(true);
  else if ((event.key === "u" || event.key === "Escape") && !inList) location.hash = "#/";
  else if (!(inList && listKey(event))) return;
  event.preventDefault();
}

document.body.prepend(
  make("header", {}, make("a", { href: "#/", class: "home" }, "Runs"), make("span", { id: "stores" }), make("button", { click: () => theme(true), title: "light, dark, as the system (t)" }, "Theme"), make("button", { click: help, title: "keys (?)" }, "?")),
  make("p", { id: "problem", role: "alert", hidden: true }),
  make("main", {}),
  make("dialog", { id: "keys" }, make("h2", {}, "Keys"), make("table", { class: "pairs" }, make("tbody", {}, KEYS.map(([name, what]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, what))))), make("button", { click: help }, "Close")),
);
theme(false);
addEventListener("hashchange", route);
addEventListener("keydown", key);
route().then(() => setTimeout(follow, EVERY));
