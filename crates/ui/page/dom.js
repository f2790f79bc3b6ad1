// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// Elements and text. Values come from stores that other people may write to, so they become text
// nodes, never HTML.

/** Makes an element: attributes, functions for events, and children, which are elements or text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Elements with functions for events of their own: a changed one is replaced as a whole. */
const ACTIVE = "button, input, select, textarea";

/**
 * Gives an element new children. Those that say the same stay, so a click, the focus, a selection
 * and the place to which a table is scrolled outlive a refresh. Sections are found by their names.
 * An element with `data-kept` stays as it is.
 */
function settle(element, ...fresh) {
  const nodes = fresh.flat().filter((node) => node !== null && node !== undefined);
  const key = (node) => node.dataset?.section;
  const keys = new Set(nodes.map(key));
  for (const child of [...element.childNodes]) if (key(child) && !keys.has(key(child))) child.remove();
  let at = element.firstChild;
  for (const node of nodes) {
    if (!at || key(at) !== key(node)) {
      element.insertBefore(node, at);
      continue;
    }
    const next = at.nextSibling;
    become(at, node);
    at = next;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** Makes a node say what a fresh one says, or puts the fresh one in its place. */
function become(old, node) {
  if (old.dataset?.kept !== undefined || old.isEqualNode(node)) return;
  // a click must not open another page
  const isElsewhere = old.getAttribute?.("href") !== node.getAttribute?.("href");
  if (old.nodeName !== node.nodeName || isElsewhere || old.matches?.(ACTIVE)) {
    old.replaceWith(node);
  } else if (old.nodeType === Node.TEXT_NODE) {
    old.data = node.data;
  } else {
    for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    settle(old, [...node.childNodes]);
  }
}

const WHOLE = new Intl.NumberFormat("en");

/** A number with about four digits. */
function brief(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "";
  if (Number.isInteger(value)) return WHOLE.format(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/** A count and its noun: `1 run`, `2 runs`. */
function countedNoun(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** Seconds, as `1 h 02 min`. */
function duration(seconds) {
  if (!Number.isFinite(seconds) || seconds < 0) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** Local date and time of milliseconds since 1970. */
function moment(milliseconds) {
  if (!Number.isFinite(milliseconds)) return "";
  const date = new Date(milliseconds);
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Bytes, as `1.5 MiB`. */
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit += 1) count /= 1024;
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}

/** Any value of JSON in one line. */
function words(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return brief(value);
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return value.join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Saves a blob as a file. */
function save(blob, name) {
  const address = URL.createObjectURL(blob);
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** A state with its colour. */
function badge(state) {
  const known = ["running", "silent", "ended", "failed", "interrupted"];
  const told = { silent: "No word from the driver for a while: it may have been killed." };
  const shown = state || "unknown";
  return make("span", { class: `badge ${known.includes(state) ? state : "unknown"}`, title: told[state] }, shown);
}

/** The tag of the last answer by key: an answer that did not change is not sent again. */
const answers = new Map();

/**
 * Asks the server for JSON. Returns `null` if the answer is the same as the last one for this key.
 */
async function ask(key, address) {
  const known = answers.get(key);
  const headers = known && known.address === address ? { "If-None-Match": known.tag } : {};
  const response = await fetch(address, { headers, cache: "no-store" });
  if (response.status === 304) return null;
  if (!response.ok) throw new Error(await response.text());
  const value = await response.json();
  answers.set(key, { address, tag: response.headers.get("ETag") || "" });
  return value;
}

/** Forgets the last answer for a key, so that the next one is returned in any case. */
function forget(key) {
  answers.delete(key);
}
