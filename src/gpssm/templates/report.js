"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const content = JSON.parse(document.getElementById("content").textContent);
  const colour = (c) => (c === "ink" ? "var(--ink)" : c === "muted" ? "var(--soft)" : `var(--c${c % 10})`);

  function element(name, attributes = {}, text) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function draw(name, attributes, parent, text) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return [found, Math.max(0, -Math.floor(Math.log10(step) + 1e-9) + (Math.abs(step / power - 2.5) < 1e-6 ? 1 : 0))];
  }

  function say(value) {
    if (value === null || value === undefined) return "–";
    return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
  }

  function label(value, digits) {
    if (Math.abs(value) >= 1e6) return value.toExponential(1);
    return value.toFixed(Math.min(digits, 8)).replace(/^-(0(\.0*)?)$/, "$1").replace("-", "−");
  }

  const lastBelow = (xs, value) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  };

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
    return [low, high];
  }

  class Plot {
    constructor(spec, parent) {
      this.spec = spec;
      this.hidden = new Set();
      this.zoom = null;
      this.figure = element("figure");
      if (spec.title) this.figure.append(element("h3", {}, spec.title));
      this.back = element("button", { class: "back", type: "button" }, "whole range");
      this.back.hidden = true;
      this.back.onclick = () => { this.zoom = null; this.render(); };
      this.tip = element("div", { class: "tip" });
      this.tip.hidden = true;
      this.legend = element("div", { class: "legend" });
      if (spec.series.length > 1) this.figure.append(this.legend);
      this.svg = draw("svg", { role: "img", "aria-label": `${spec.title || spec.y}: ${spec.series.map((s) => s.name).join(", ")}` }, this.figure);
      if (spec.note) this.figure.append(element("p", { class: "note" }, spec.note));
      this.figure.append(this.back, this.tip);
      parent.append(this.figure);
      spec.series.forEach((series, i) => this.addLegend(series, i));
      this.listen();
    }

    addLegend(series, i) {
      const button = element("button", { type: "button", "aria-pressed": "true" });
      const swatch = element("i", { class: series.kind });
      swatch.style.background = colour(series.colour);
      button.append(swatch, series.name);
      button.onclick = () => {
        if (this.hidden.has(i)) this.hidden.delete(i); else this.hidden.add(i);
        button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
        this.render();
      };
      this.legend.append(button);
    }

    shown() { return this.spec.series.filter((_, i) => !this.hidden.has(i)); }

    ranges() {
      const shown = this.shown().length ? this.shown() : this.spec.series;
      let [x0, x1] = [Infinity, -Infinity];
      for (const s of shown) {
        const [a, b] = extent(s.x);
        x0 = Math.min(x0, a);
        x1 = Math.max(x1, b + (s.kind === "bars" ? s.width : 0));
      }
      const pad = shown.some((s) => s.kind === "points") && !this.zoom ? 0.02 * (x1 - x0) : 0;
      const x = this.zoom || [x0 - pad, x1 + pad];
      const values = [];
      for (const s of shown) {
        const ys = s.kind === "band" ? [s.low, s.high] : [s.y];
        s.x.forEach((v, i) => { if (v !== null && v >= x[0] && v <= x[1]) for (const y of ys) if (y[i] !== null) values.push(y[i]); });
      }
      if (!values.length) values.push(0, 1);
      values.sort((a, b) => a - b);
      let low = values[0], high = values[values.length - 1];
      if (this.spec.robust && values.length > 20) { // one wild rival must not flatten the rest
        const q = (p) => values[Math.round(p * (values.length - 1))];
        high = Math.min(high, q(0.75) + 4 * (q(0.75) - q(0.25)) + 1e-9);
      }
      if (this.spec.zero || shown.some((s) => s.kind === "bars")) low = Math.min(0, low);
      if (high - low < 1e-12) { low -= 0.5 * (Math.abs(low) || 1); high += 0.5 * (Math.abs(high) || 1); }
      const room = 0.06 * (high - low);
      return [x[0] === x[1] ? [x[0] - 1, x[1] + 1] : x, [low === 0 ? 0 : low - room, high + room]];
    }

    render() {
      const width = Math.max(240, this.svg.clientWidth || this.figure.clientWidth - 30), height = this.spec.height || 260;
      const [[x0, x1], [y0, y1]] = this.ranges();
      const [yTicks, yDigits] = ticks(y0, y1, Math.max(3, height / 55));
      const longest = Math.max(...yTicks.map((v) => label(v, yDigits).length), 1);
      const box = { left: 28 + 6.8 * longest, right: 16, top: 8, bottom: 38 };
      const inner = { width: width - box.left - box.right, height: height - box.top - box.bottom };
      const px = (v) => box.left + ((v - x0) / (x1 - x0)) * inner.width;
      const py = (v) => box.top + (1 - (v - y0) / (y1 - y0)) * inner.height;
      this.geometry = { box, inner, x0, x1, px, py, width, height };
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.style.height = `${height}px`;
      this.svg.replaceChildren();
      for (const v of yTicks) {
        draw("line", { class: "axis", x1: box.left, x2: width - box.right, y1: py(v), y2: py(v) }, this.svg);
        draw("text", { x: box.left - 6, y: py(v) + 4, "text-anchor": "end" }, this.svg, label(v, yDigits));
      }
      const [xTicks, xDigits] = ticks(x0, x1, Math.max(2, inner.width / 90));
      for (const v of xTicks) draw("text", { x: px(v), y: height - box.bottom + 16, "text-anchor": "middle" }, this.svg, label(v, xDigits));
      draw("text", { x: box.left + inner.width / 2, y: height - 4, "text-anchor": "middle" }, this.svg, this.spec.x);
      draw("text", { x: 0, y: 0, transform: `translate(10 ${box.top + inner.height / 2}) rotate(-90)`, "text-anchor": "middle" }, this.svg, this.spec.y);
      this.drawSeries();
      this.cross = draw("line", { class: "cross", y1: box.top, y2: box.top + inner.height, visibility: "hidden" }, this.svg);
      this.brush = draw("rect", { class: "brush", y: box.top, height: inner.height, width: 0 }, this.svg);
      this.back.hidden = !this.zoom;
    }

    drawSeries() {
      const { box, inner, px, py, x0, x1 } = this.geometry;
      const id = `clip${Plot.count = (Plot.count || 0) + 1}`;
      draw("rect", { x: box.left, y: box.top, width: inner.width, height: inner.height }, draw("clipPath", { id }, this.svg));
      const group = draw("g", { "clip-path": `url(#${id})` }, this.svg);
      for (const mark of this.spec.marks || []) {
        draw("line", { class: "mark", x1: px(mark.x), x2: px(mark.x), y1: box.top, y2: box.top + inner.height }, group);
        const isRight = px(mark.x) + 6.4 * mark.label.length < box.left + inner.width;
        draw("text", { x: px(mark.x) + (isRight ? 5 : -5), y: box.top + 11, "text-anchor": isRight ? "start" : "end" }, group, mark.label);
      }
      for (const s of this.shown()) {
        const paint = colour(s.colour);
        const near = (i) => s.x[i] !== null && s.x[i] >= x0 - (x1 - x0) && s.x[i] <= x1 + (x1 - x0);
        if (s.kind === "band") {
          let top = "", bottom = "";
          s.x.forEach((x, i) => {
            if (!near(i) || s.low[i] === null || s.high[i] === null) return;
            top += `${top ? "L" : "M"}${px(x).toFixed(1)} ${py(s.high[i]).toFixed(1)}`;
            bottom = `L${px(x).toFixed(1)} ${py(s.low[i]).toFixed(1)}${bottom}`;
          });
          draw("path", { d: `${top}${bottom}Z`, fill: paint, opacity: 0.17 }, group);
        } else if (s.kind === "bars") {
          s.x.forEach((x, i) => draw("rect", {
            x: px(x) + 1, width: Math.max(1, px(x + s.width) - px(x) - 2), y: py(s.y[i]), height: Math.max(0, py(0) - py(s.y[i])), fill: paint, opacity: 0.55, rx: 2,
          }, group));
        } else if (s.kind === "points") {
          s.x.forEach((x, i) => {
            if (!near(i) || s.y[i] === null) return;
            draw("circle", { cx: px(x).toFixed(1), cy: py(s.y[i]).toFixed(1), r: s.size || 3, ...(s.hollow ? { fill: "none", stroke: paint, "stroke-width": 1.6 } : { fill: paint, opacity: 0.75 }) }, group);
          });
        } else {
          let path = "", isOn = false, last = 0;
          s.x.forEach((x, i) => {
            if (s.y[i] === null || !near(i)) { isOn = false; return; }
            if (isOn && s.step) path += `L${px(x).toFixed(1)} ${last}`;
            last = py(s.y[i]).toFixed(1);
            path += `${isOn ? "L" : "M"}${px(x).toFixed(1)} ${last}`;
            isOn = true;
          });
          draw("path", { d: path || "M0 0", fill: "none", stroke: paint, "stroke-width": s.width || 1.8, "stroke-linejoin": "round", "stroke-linecap": "round", ...(s.dash ? { "stroke-dasharray": s.dash } : {}) }, group);
          const inside = s.x.filter((x) => x >= x0 && x <= x1).length;
          if (s.markers && inside < 40) s.x.forEach((x, i) => { if (s.y[i] !== null) draw("circle", { cx: px(x), cy: py(s.y[i]), r: 2.4, fill: paint }, group); });
        }
      }
    }

    listen() {
      const where = (event) => {
        const rect = this.svg.getBoundingClientRect();
        return ((event.clientX - rect.left) / rect.width) * this.geometry.width;
      };
      const value = (x) => {
        const { box, inner, x0, x1 } = this.geometry;
        return x0 + ((Math.min(Math.max(x, box.left), box.left + inner.width) - box.left) / inner.width) * (x1 - x0);
      };
      let from = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) { from = where(event); this.svg.setPointerCapture(event.pointerId); }
      });
      this.svg.addEventListener("pointermove", (event) => {
        const x = where(event);
        if (from !== null) {
          this.brush.setAttribute("x", Math.min(from, x));
          this.brush.setAttribute("width", Math.abs(x - from));
        }
        this.hover(x, value(x), event);
      });
      this.svg.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const ends = [value(from), value(where(event))].sort((a, b) => a - b);
        const isDrag = Math.abs(where(event) - from) > 8;
        from = null;
        if (isDrag) { this.zoom = ends; this.tip.hidden = true; }
        if (isDrag) this.render(); else this.brush.setAttribute("width", 0);
      });
      this.svg.addEventListener("dblclick", () => { this.zoom = null; this.render(); });
      this.svg.addEventListener("pointerleave", () => {
        this.tip.hidden = true;
        if (this.cross) this.cross.setAttribute("visibility", "hidden");
      });
    }

    hover(x, value, event) {
      const { box, inner, x0, x1 } = this.geometry;
      if (x < box.left || x > box.left + inner.width) { this.tip.hidden = true; return; }
      this.cross.setAttribute("x1", x);
      this.cross.setAttribute("x2", x);
      this.cross.setAttribute("visibility", "visible");
      const rows = [element("b", {}, `${this.spec.x}: ${say(value)}`)];
      for (const s of this.shown()) {
        let i = 0, gap = Infinity;
        const isSorted = s.kind !== "points";
        if (isSorted) {
          i = lastBelow(s.x, value);
          if (s.kind !== "bars" && i + 1 < s.x.length && Math.abs(s.x[i + 1] - value) < Math.abs(s.x[i] - value)) i += 1;
          gap = Math.abs(s.x[i] - value);
        } else s.x.forEach((v, k) => { if (v !== null && Math.abs(v - value) < gap) { gap = Math.abs(v - value); i = k; } });
        if (s.kind !== "bars" && gap > 0.04 * (x1 - x0) && s.x.length > 2) continue;
        const row = element("div"), dot = element("i");
        dot.style.background = colour(s.colour);
        row.append(dot, s.name, element("span", {}, s.kind === "band" ? `${say(s.low[i])} … ${say(s.high[i])}` : say(s.y[i])));
        rows.push(row);
      }
      this.tip.replaceChildren(...rows.slice(0, 14));
      this.tip.hidden = false;
      const frame = this.figure.getBoundingClientRect();
      const left = event.clientX - frame.left + 14;
      const isLeft = left + this.tip.offsetWidth > frame.width - 6;
      this.tip.style.left = `${Math.max(4, isLeft ? left - this.tip.offsetWidth - 28 : left)}px`;
      this.tip.style.top = `${Math.max(4, event.clientY - frame.top - this.tip.offsetHeight - 8)}px`;
    }
  }

  const plots = [];
  for (const part of content.sections) {
    const section = element("section", { id: part.id });
    section.append(element("h2", {}, part.title), element("p", {}, part.text));
    const grid = element("div", { class: part.columns > 1 ? "grid two" : "grid" });
    section.append(grid);
    document.getElementById("charts").append(section);
    for (const spec of part.charts) plots.push(new Plot(spec, grid));
  }
  const renderAll = () => plots.forEach((plot) => plot.render());
  renderAll();
  let waiting = 0, width = document.body.clientWidth;
  addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(renderAll, 80);
  });
  addEventListener("beforeprint", renderAll);
})();
