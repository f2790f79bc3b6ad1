// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: the Farandole authors

// Curves by uPlot: a chart for each number, training and validation and several runs on one.

const COLOURS = ["#3987e5", "#e0632b", "#2aa876", "#b0549f", "#c9a227", "#5f6caf", "#d9485f", "#3aa6b9"];
const RATES = ["rows_per_second", "seconds"];
const TITLES = { rows_per_second: "rows per second", seconds: "seconds of an epoch" };

/** Numbers of epochs that hardly ever change; the CSV has them. */
const HIDDEN = ["rows"];
const HEIGHT = 240;

/** The chart that a curve belongs to, and its place in the page. */
function chartOf(curve) {
  if (curve.of === "step") return { key: `step ${curve.name}`, title: `${TITLES[curve.name] || curve.name} within epochs`, place: 2 };
  const name = curve.name.replace(/^val_/, "");
  return { key: name, title: TITLES[name] || name, place: RATES.includes(name) ? 1 : 0 };
}

/** The curves of an answer by chart: its title and its lines. */
function charted(answer) {
  const charts = new Map();
  answer.runs.forEach((run, number) => {
    for (const curve of run.curves) {
      if (curve.of === "epoch" && HIDDEN.includes(curve.name)) continue;
      const { key, title, place } = chartOf(curve);
      if (!charts.has(key)) charts.set(key, { key, title, place, lines: [] });
      const isVal = curve.of === "epoch" && curve.name.startsWith("val_");
      const single = answer.runs.length === 1;
      const what = isVal ? "validation" : "training";
      charts.get(key).lines.push({
        label: single ? (RATES.includes(curve.name) || curve.of === "step" ? curve.name : what) : `${run.name}${isVal ? " (val)" : ""}`,
        colour: COLOURS[(single ? Number(isVal) : number) % COLOURS.length],
        dash: isVal && !single ? [6, 4] : undefined,
        points: curve.points, x: curve.x, y: curve.y,
      });
    }
  });
  const first = (chart) => (chart.key === "loss" ? 0 : 1);
  return [...charts.values()].sort((a, b) => a.place - b.place || first(a) - first(b) || a.key.localeCompare(b.key));
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** All charts of some runs: what they show, and how they are asked for. */
class Panel {
  constructor(runs, element) {
    this.runs = runs;
    this.element = element;
    this.axis = "epoch";
    this.smooth = 0;
    this.logarithmic = false;
    this.window = null;
    this.charts = new Map();
    this.grid = make("div", { class: "charts" });
    this.empty = make("p", { hidden: true }, "No numbers yet: they come with the first epoch.");
    const axis = make("select", { "aria-label": "axis", change: () => { this.axis = axis.value; this.zoom(null); } },
      make("option", { value: "epoch" }, "by epoch"), make("option", { value: "seconds" }, "by time"));
    const weight = make("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "smoothing", input: () => this.smoothed(Number(weight.value)) });
    const scale = make("input", { type: "checkbox", change: () => { this.logarithmic = scale.checked; this.rebuild(); } });
    const names = runs.map((run) => `run=${encodeURIComponent(run)}`).join("&");
    this.reset = make("button", { disabled: true, click: () => this.zoom(null) }, "Reset zoom");
    element.replaceChildren(
      make("div", { class: "bar" }, axis, make("label", {}, "smoothing ", weight), make("label", {}, scale, " log scale"), this.reset,
        make("a", { class: "button", href: `api/history.csv?${names}`, download: "history.csv" }, "CSV")),
      this.empty, this.grid);
    this.observer = new ResizeObserver(() => this.resized());
    this.observer.observe(this.grid);
  }

  /** Pixels of the device across one chart. */
  get pixels() {
    return Math.max(100, Math.round(this.width() * (window.devicePixelRatio || 1)));
  }

  width() {
    const room = this.grid.clientWidth || 800;
    return room < 820 ? room : Math.floor((room - 16) / 2);
  }

  smoothed(weight) {
    this.smooth = weight;
    clearTimeout(this.later);
    this.later = setTimeout(() => this.refresh(), 60);
  }

  resized() {
    for (const chart of this.charts.values()) chart.plot.setSize({ width: this.width(), height: HEIGHT });
    clearTimeout(this.later);
    this.later = setTimeout(() => this.refresh(), 200);
  }

  /** Shows a part, with as many points as it has room for; `null` is all. */
  zoom(range) {
    this.window = range;
    this.reset.disabled = range === null;
    this.refresh();
  }

  /** Asks for the curves. */
  async refresh() {
    const asked = new URLSearchParams({ x: this.axis, pixels: this.pixels, smooth: this.smooth });
    for (const run of this.runs) asked.append("run", run);
    if (this.window) { asked.set("from", this.window[0]); asked.set("to", this.window[1]); }
    try {
      const answer = await ask("curves", `api/curves?${asked}`);
      if (answer && this.element.isConnected) this.draw(answer);
    } catch (error) {
      problem(error.message);
    }
  }

  draw(answer) {
    this.answer = answer;
    const wanted = charted(answer);
    this.empty.hidden = wanted.length > 0;
    for (const [key, chart] of this.charts) if (!wanted.some((one) => one.key === key)) this.drop(key, chart);
    for (const one of wanted) {
      const shape = JSON.stringify(one.lines.map((line) => [line.label, line.colour]));
      const known = this.charts.get(one.key);
      const data = uPlot.join(one.lines.map((line) => [line.x, line.y]));
      if (known && known.shape === shape) {
        known.lines = one.lines;
        known.plot.setData(data, false);
        known.plot.setScale("x", this.range(data[0]));
      } else {
        if (known) this.drop(one.key, known);
        this.charts.set(one.key, this.build(one, data, shape));
      }
    }
    const figures = wanted.map((one) => {
      const { figure } = this.charts.get(one.key);
      figure.dataset.points = Math.max(...one.lines.map((line) => line.points));
      return figure;
    });
    if (figures.length !== this.grid.children.length || figures.some((figure, index) => figure !== this.grid.children[index])) this.grid.replaceChildren(...figures);
  }

  range(x) {
    if (this.window) return { min: this.window[0], max: this.window[1] };
    const [first, last] = x.length ? [x[0], x[x.length - 1]] : [0, 1];
    return first === last ? { min: first - 0.5, max: last + 0.5 } : { min: first, max: last };
  }

  drop(key, chart) {
    chart.plot.destroy();
    chart.figure.remove();
    this.charts.delete(key);
  }

  rebuild() {
    for (const [key, chart] of [...this.charts]) this.drop(key, chart);
    if (this.answer) this.draw(this.answer);
  }

  build(one, data, shape) {
    const ink = colour("--ink");
    const axis = { stroke: ink, grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
    const series = one.lines.map((line) => ({ label: line.label, stroke: line.colour, dash: line.dash, width: 1.5, value: (_, value) => brief(value) }));
    const name = this.axis === "epoch" ? "epoch" : "s";
    const holder = make("div", {});
    const options = {
      width: this.width(), height: HEIGHT,
      cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: "runs" } },
      scales: { x: { time: false }, y: { distr: this.logarithmic ? 3 : 1 } },
      axes: [axis, { ...axis, size: 64, values: (_, values) => values.map((value) => (value === null ? "" : brief(value))) }],
      series: [{ label: name, value: (_, value) => brief(value) }, ...series],
      hooks: {
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const [from, to] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.zoom([from, to]);
        }],
      },
    };
    const plot = new uPlot(options, data, holder);
    plot.setScale("x", this.range(data[0]));
    plot.over.addEventListener("dblclick", () => this.zoom(null));
    const chart = { shape, plot, lines: one.lines };
    const picture = make("button", { title: "save as PNG", click: () => this.picture(one, chart) }, "PNG");
    chart.figure = make("figure", { "data-chart": one.key }, make("figcaption", {}, one.title, picture), holder);
    return chart;
  }

  /** Saves a chart with its title and what its lines are. */
  picture(one, chart) {
    const plot = chart.plot.ctx.canvas;
    const scale = window.devicePixelRatio || 1;
    const row = 18 * scale;
    const canvas = make("canvas", { width: plot.width, height: plot.height + row * (chart.lines.length + 2) });
    const pen = canvas.getContext("2d");
    pen.fillStyle = colour("--paper");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.font = `${13 * scale}px sans-serif`;
    pen.fillStyle = colour("--ink");
    pen.fillText(one.title, 8 * scale, row);
    pen.drawImage(plot, 0, row * 1.5);
    chart.lines.forEach((line, index) => {
      const y = row * 1.5 + plot.height + row * (index + 0.8);
      pen.fillStyle = line.colour;
      pen.fillRect(8 * scale, y - 5 * scale, 16 * scale, 3 * scale);
      pen.fillStyle = colour("--ink");
      pen.fillText(line.label, 32 * scale, y);
    });
    canvas.toBlob((blob) => save(blob, `${one.key.replace(/[^A-Za-z0-9_-]+/g, "_")}.png`));
  }

  close() {
    clearTimeout(this.later);
    this.observer.disconnect();
    for (const [key, chart] of [...this.charts]) this.drop(key, chart);
    forget("curves");
  }
}
