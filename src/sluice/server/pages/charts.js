// Small charts over time as SVG: lines with targets, and stacked areas. Nothing is fetched here.

const NS = "http://www.w3.org/2000/svg";
const LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 18;
// Points further apart than this are not joined: nothing was measured between them.
const JOINED_S = 15;

export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "swatch") made.style.setProperty("--swatch", value);
    else if (key === "width") made.style.width = value;
    else if (value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

function svg(name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The smallest round number that is not below; its half is whole too where counts are drawn.
export function niceTop(most, whole = false) {
  if (!(most > 0)) return whole ? 2 : 1;
  const power = 10 ** Math.max(Math.floor(Math.log10(most)), whole ? 0 : -Infinity);
  return (whole ? [2, 4, 6, 8, 10, 20] : [1, 1.5, 2, 3, 4, 5, 6, 8, 10]).map((one) => one * power).find((one) => one >= most * 0.999);
}

export class Chart {
  // `series` are {name, color, of: sample => number or null}; `stacked` lays them on one another, but
  // for those with `line`, which come last and are drawn over them. The axis reaches `top`, or a round
  // number above all that is shown and above `least`; `whole` says that counts are drawn.
  constructor(root, { title, note, series, format, stacked = false, whole = false, targets = () => [], least = 0, top = null }) {
    Object.assign(this, { series, format, stacked, whole, targets, least, fixed: top });
    this.legend = el("div", { class: "legend" });
    this.plot = el("div", { class: "plot" });
    this.root = root;
    root.append(el("h2", {}, title, el("small", {}, note)), this.legend, this.plot);
    this.chips = series.map((one) => el("span", { swatch: one.color }, one.name));
    this.legend.append(...this.chips);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.unpoint());
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.samples = [];
    this.events = [];
  }

  show(samples, range, events) {
    Object.assign(this, { samples, range, events });
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !this.range) return;
    const rows = this.series.map((one) => this.samples.map(one.of));
    const areas = this.stacked ? this.series.filter((one) => !one.line).length : 0;
    const tops = [...stack(rows.slice(0, areas)), ...rows.slice(areas)];
    const targets = this.targets();
    const seen = tops.flat().filter((one) => one !== null);
    const most = Math.max(0, ...seen);
    // A target far above all that was measured would flatten the lines.
    const shown = targets.filter((one) => one.value <= most * 3 || !most);
    const room = this.whole ? 1 : 1.04;
    const top = this.fixed ?? niceTop(Math.max(this.least, most * room, ...shown.map((one) => one.value * room)) || 1, this.whole);
    const [from, to] = this.range;
    const x = (t) => LEFT + ((t - from) / (to - from)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - Math.min(value, top) / top) * (height - TOP - BOTTOM);
    Object.assign(this, { x, rows });
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
    this.axes(root, { x, y, top, width, height });
    const times = this.samples.map((one) => one.t_s);
    for (let n = areas - 1; n >= 0; n -= 1) {
      const under = n ? tops[n - 1] : times.map(() => 0);
      root.append(svg("path", { d: area(times, tops[n], under, x, y), fill: this.series[n].color, opacity: 0.85 }));
    }
    for (let n = this.series.length - 1; n >= areas; n -= 1) {
      if (!areas || rows[n].some((one) => one > 0)) this.line(root, times, tops[n], this.series[n].color, x, y);
    }
    for (const one of shown) {
      root.append(svg("line", { class: "target", x1: LEFT, x2: width - RIGHT, y1: y(one.value), y2: y(one.value) }));
      root.append(svg("text", { class: "target-name", x: width - RIGHT, y: y(one.value) - 3, "text-anchor": "end" }, one.name));
    }
    for (const at of this.events) {
      if (at > from && at < to) root.append(svg("line", { class: "event", x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }));
    }
    if (!seen.length || (this.stacked && !most)) {
      root.append(svg("text", { class: "none", x: LEFT + (width - LEFT) / 2, y: height / 2 - 4 }, "nothing in this window"));
    }
    this.cross = svg("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    root.append(this.cross);
    const old = this.plot.querySelector("svg");
    if (old) old.replaceWith(root); else this.plot.append(root);
    this.chips.forEach((chip, n) => {
      const known = rows[n].filter((one) => one !== null);
      const last = known.length ? `${this.series[n].name} ${this.format(known[known.length - 1])}` : this.series[n].name;
      chip.textContent = last;
      // A part that is nothing all the time says nothing.
      chip.hidden = this.stacked && most > 0 && !known.some((one) => one > 0);
    });
  }

  axes(root, { x, y, top, width, height }) {
    for (const part of [0, 0.5, 1]) {
      const at = y(top * part);
      root.append(svg("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      root.append(svg("text", { class: "tick", x: LEFT - 6, y: at + 3.5, "text-anchor": "end" }, this.format(top * part)));
    }
    const [from, to] = this.range, seconds = to - from;
    const step = seconds <= 150 ? 30 : seconds <= 400 ? 60 : 300;
    for (let back = 0; back <= seconds - step / 2; back += step) {
      const name = back ? `−${back >= 60 ? `${back / 60} min` : `${back} s`}` : "now";
      const anchor = back ? "middle" : "end";
      root.append(svg("text", { class: "tick", x: x(to - back), y: height - 4, "text-anchor": anchor }, name));
    }
  }

  line(root, times, values, color, x, y) {
    let path = "", lastTime = null, lone = null;
    const dots = [];
    values.forEach((value, n) => {
      if (value === null) return;
      const joined = lastTime !== null && times[n] - lastTime <= JOINED_S;
      if (!joined && lone) dots.push(lone);
      lone = joined ? null : [x(times[n]), y(value)];
      path += `${joined ? "L" : "M"}${x(times[n]).toFixed(1)} ${y(value).toFixed(1)}`;
      lastTime = times[n];
    });
    if (lone) dots.push(lone);
    root.append(svg("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.7, "stroke-linejoin": "round" }));
    for (const [cx, cy] of dots) root.append(svg("circle", { cx, cy, r: 2.4, fill: color }));
  }

  point(event) {
    if (!this.samples.length || !this.x) return;
    const at = event.clientX - this.plot.getBoundingClientRect().left;
    let best = 0;
    this.samples.forEach((one, n) => {
      if (Math.abs(this.x(one.t_s) - at) < Math.abs(this.x(this.samples[best].t_s) - at)) best = n;
    });
    const sample = this.samples[best], place = this.x(sample.t_s);
    this.cross.setAttribute("x1", place);
    this.cross.setAttribute("x2", place);
    this.cross.setAttribute("visibility", "visible");
    const when = new Date(sample.t_s * 1000).toLocaleTimeString();
    const lines = this.series.map((one, n) => {
      const value = this.rows[n][best];
      return el("div", { swatch: one.color }, `${one.name} ${value === null ? "–" : this.format(value)}`);
    });
    const tip = el("div", { class: "tip" }, el("small", {}, when), ...lines);
    this.plot.querySelector(".tip")?.remove();
    this.plot.append(tip);
    const side = place > this.plot.clientWidth / 2 ? place - tip.offsetWidth - 10 : place + 10;
    tip.style.left = `${Math.max(0, side)}px`;
    tip.style.top = "6px";
  }

  unpoint() {
    this.plot.querySelector(".tip")?.remove();
    this.cross?.setAttribute("visibility", "hidden");
  }
}

function stack(rows) {
  const tops = [];
  rows.forEach((row, n) => tops.push(row.map((value, i) => (n ? tops[n - 1][i] : 0) + (value ?? 0))));
  return tops;
}

function area(times, top, under, x, y) {
  if (!times.length) return "";
  const points = (values) => times.map((t, n) => `${x(t).toFixed(1)} ${y(values[n]).toFixed(1)}`);
  return `M${points(top).join("L")}L${points(under).reverse().join("L")}Z`;
}
