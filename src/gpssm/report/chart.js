// Draws one chart described by charts.py: lines, bands, points, bars and marks on the axis, to zoom into, to ask and to hide.
window.gpssmCharts = (() => {
  "use strict";
  const NS = "http://www.w3.org/2000/svg";
  const NUM_COLOURS = 7;
  const colour = (c) => (c === "ink" ? "var(--ink)" : c === "muted" ? "var(--soft)" : `var(--c${c % NUM_COLOURS})`);
  let numClips = 0;

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
    const text = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(+value.toPrecision(4));
    return text.replace("-", "−");
  }

  function label(value, digits) {
    if (Math.abs(value) >= 1e6) return value.toExponential(1);
    return value.toFixed(Math.min(digits, 8)).replace(/^-(0(\.0*)?)$/, "$1").replace("-", "−");
  }

  function lastBelow(xs, value) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= value) low = middle; else high = middle - 1;
    }
    return low;
  }

  const heights = (series) => (series.kind === "band" ? [series.low, series.high] : series.kind === "ticks" ? [] : [series.y]);

  class Plot {
    constructor(spec, parent, others) {
      this.spec = spec;
      this.others = others;
      this.hidden = new Set();
      this.zoom = spec.view || null;
      this.figure = element("figure");
      if (spec.title) this.figure.append(element("h3", {}, spec.title));
      this.back = element("button", { class: "back", type: "button" }, "show all");
      this.back.hidden = true;
      this.back.onclick = () => this.zoomTo(null);
      this.tip = element("div", { class: "tip", role: "status" });
      this.tip.hidden = true;
      this.addLegend();
      const names = [...new Set(spec.series.map((s) => s.group || s.name))].join(", ");
      const about = `${spec.title || spec.y}, against ${spec.x}: ${names}`;
      this.svg = draw("svg", { role: "img", tabindex: "0", "aria-label": about }, this.figure);
      if (spec.note) this.figure.append(element("p", { class: "note" }, spec.note));
      this.figure.append(this.back, this.tip);
      parent.append(this.figure);
      this.listen();
    }

    addLegend() {
      const legend = element("div", { class: "legend" }), made = new Set();
      for (const series of this.spec.series) {
        const name = series.group || series.name;
        if (made.has(name)) continue;
        made.add(name);
        const members = this.spec.series.filter((s) => (s.group || s.name) === name);
        const shown = members.find((s) => s.kind === "line") || series;
        const button = element("button", { type: "button", "aria-pressed": "true" });
        this.drawSwatch(shown, members, draw("svg", { viewBox: "0 0 18 10", class: "swatch", "aria-hidden": "true" }, button));
        button.append(name);
        button.onclick = () => {
          if (this.hidden.has(name)) this.hidden.delete(name); else this.hidden.add(name);
          button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
          this.render();
        };
        legend.append(button);
      }
      if (made.size > 1) this.figure.append(legend);
    }

    drawSwatch(series, members, svg) {
      const paint = members.length > 1 && members.every((s) => s.dash) ? "var(--soft)" : colour(series.colour);
      const band = members.find((s) => s.kind === "band");
      const over = this.spec.series.filter((s) => band && s.kind === "band" && s.colour === band.colour).indexOf(band); // bands below it
      const opacity = series.kind === "bars" ? 0.6 : 0.22 + 0.2 * over;
      if (band || series.kind === "bars") draw("rect", { x: 0, y: 1, width: 18, height: 8, rx: 2, fill: paint, opacity }, svg);
      if (series.kind === "line") draw("line", { x1: 1, x2: 17, y1: 5, y2: 5, stroke: paint, "stroke-width": Math.min(series.width || 1.8, 2.4), "stroke-dasharray": series.dash || "" }, svg);
      if (series.kind === "points") draw("circle", { cx: 9, cy: 5, r: 3, ...(series.hollow ? { fill: "none", stroke: paint, "stroke-width": 1.5 } : { fill: paint }) }, svg);
      if (series.kind === "ticks") for (const x of [5, 9, 13]) draw("line", { x1: x, x2: x, y1: 2, y2: 9, stroke: paint, "stroke-width": 1.5 }, svg);
    }

    shown() { return this.spec.series.filter((s) => !this.hidden.has(s.group || s.name)); }

    zoomTo(range) {
      const linked = this.spec.link ? this.others.filter((plot) => plot.spec.link === this.spec.link) : [this];
      for (const plot of linked) {
        plot.zoom = range;
        plot.tip.hidden = true;
        plot.render();
      }
    }

    fullRange() {
      let low = Infinity, high = -Infinity;
      for (const s of this.spec.series) {
        const end = s.kind === "bars" ? s.width : 0;
        for (const x of s.x) if (x !== null) { low = Math.min(low, x); high = Math.max(high, x + end); }
      }
      if (low > high) return [0, 1];
      const pad = this.spec.series.some((s) => s.kind === "points" || s.markers) ? 0.02 * (high - low) : 0;
      return low === high ? [low - 1, high + 1] : [low - pad, high + pad];
    }

    ranges() {
      const x = this.zoom || this.fullRange();
      if (this.spec.viewHeight && this.zoom === this.spec.view) return [x, this.spec.viewHeight];
      const values = [];
      for (const s of this.shown().length ? this.shown() : this.spec.series) {
        for (const ys of heights(s)) s.x.forEach((v, i) => { if (v !== null && v >= x[0] && v <= x[1] && ys[i] !== null) values.push(ys[i]); });
      }
      if (!values.length) values.push(0, 1);
      values.sort((a, b) => a - b);
      let low = values[0], high = values[values.length - 1];
      const q = (p) => values[Math.round(p * (values.length - 1))], far = 4 * (q(0.75) - q(0.25)) + 1e-9;
      if (values.length > 20 && !this.zoom) { // one wild value must not flatten the rest
        if (this.spec.robust === "high") high = Math.min(high, q(0.75) + far);
        if (this.spec.robust === "low") low = Math.max(low, q(0.25) - far);
      }
      if (this.spec.zero || this.spec.series.some((s) => s.kind === "bars")) low = Math.min(0, low);
      if (high - low < 1e-12) { low -= 0.5 * (Math.abs(low) || 1); high += 0.5 * (Math.abs(high) || 1); }
      const room = 0.06 * (high - low);
      return [x, [low === 0 ? 0 : low - room, high + room]];
    }

    render() {
      const width = Math.max(220, this.svg.clientWidth || this.figure.clientWidth - 30);
      const height = Math.round((this.spec.height || 260) * (width < 420 ? 0.88 : 1));
      const [[x0, x1], [y0, y1]] = this.ranges();
      const hasLabel = Boolean(this.spec.y);
      const box = { right: 14, top: hasLabel ? 22 : 8, bottom: 38 };
      const [yTicks, yDigits] = ticks(y0, y1, Math.max(3, (height - 60) / 44));
      box.left = 12 + 6.6 * Math.max(...yTicks.map((v) => label(v, yDigits).length), 1);
      const inner = { width: width - box.left - box.right, height: height - box.top - box.bottom };
      const px = (v) => box.left + ((v - x0) / (x1 - x0)) * inner.width;
      const py = (v) => box.top + (1 - (v - y0) / (y1 - y0)) * inner.height;
      this.geometry = { box, inner, x0, x1, px, py, width, height };
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren();
      for (const v of yTicks) {
        draw("line", { class: "axis", x1: box.left, x2: width - box.right, y1: py(v), y2: py(v) }, this.svg);
        draw("text", { x: box.left - 6, y: py(v) + 4, "text-anchor": "end" }, this.svg, label(v, yDigits));
      }
      const bottom = height - box.bottom;
      const [xTicks, xDigits] = ticks(x0, x1, Math.max(2, inner.width / 85));
      for (const v of xTicks) {
        draw("line", { class: "axis", x1: px(v), x2: px(v), y1: bottom, y2: bottom + 4 }, this.svg);
        const half = 3.2 * label(v, xDigits).length;
        const x = Math.min(Math.max(px(v), half), width - half - 1);
        draw("text", { x, y: bottom + 17, "text-anchor": "middle" }, this.svg, label(v, xDigits));
      }
      draw("text", { x: box.left + inner.width / 2, y: height - 4, "text-anchor": "middle" }, this.svg, this.spec.x);
      if (hasLabel) draw("text", { x: 0, y: 11 }, this.svg, this.spec.y);
      this.drawSeries();
      this.cross = draw("line", { class: "cross", y1: box.top, y2: bottom, visibility: "hidden" }, this.svg);
      this.brush = draw("rect", { class: "brush", y: box.top, height: inner.height, width: 0 }, this.svg);
      this.back.hidden = !this.zoom;
    }

    drawSeries() {
      const { box, inner, px } = this.geometry;
      const id = `clip${numClips++}`;
      draw("rect", { x: box.left, y: box.top - 2, width: inner.width, height: inner.height + 4 }, draw("clipPath", { id }, this.svg));
      const group = draw("g", { "clip-path": `url(#${id})` }, this.svg);
      for (const mark of this.spec.marks || []) {
        draw("line", { class: "mark", x1: px(mark.x), x2: px(mark.x), y1: box.top, y2: box.top + inner.height }, group);
        const isRight = px(mark.x) + 6.4 * mark.label.length < box.left + inner.width;
        const at = { x: px(mark.x) + (isRight ? 5 : -5), y: box.top + 11, "text-anchor": isRight ? "start" : "end", class: "halo" };
        this.markTexts = [...(this.markTexts || []), [at, mark.label]];
      }
      for (const s of this.shown()) this[s.kind](s, colour(s.colour), group);
      for (const [at, text] of this.markTexts || []) draw("text", at, group, text); // above all else
      this.markTexts = [];
    }

    near(x) {
      const { x0, x1 } = this.geometry;
      return x !== null && x >= x0 - (x1 - x0) && x <= x1 + (x1 - x0);
    }

    band(s, paint, group) {
      const { px, py } = this.geometry;
      let top = "", bottom = "";
      s.x.forEach((x, i) => {
        if (!this.near(x) || s.low[i] === null || s.high[i] === null) return;
        top += `${top ? "L" : "M"}${px(x).toFixed(1)} ${py(s.high[i]).toFixed(1)}`;
        bottom = `L${px(x).toFixed(1)} ${py(s.low[i]).toFixed(1)}${bottom}`;
      });
      if (top) draw("path", { d: `${top}${bottom}Z`, fill: paint, opacity: 0.18 }, group);
    }

    bars(s, paint, group) {
      const { px, py } = this.geometry;
      s.x.forEach((x, i) => {
        const size = { width: Math.max(1, px(x + s.width) - px(x) - 2), height: Math.max(0, py(0) - py(s.y[i])) };
        draw("rect", { x: px(x) + 1, y: py(s.y[i]), ...size, fill: paint, opacity: 0.6, rx: 2 }, group);
      });
    }

    ticks(s, paint, group) {
      const { px, box, inner } = this.geometry, bottom = box.top + inner.height;
      for (const x of s.x) if (this.near(x)) draw("line", { x1: px(x), x2: px(x), y1: bottom - 8, y2: bottom, stroke: paint, "stroke-width": 1.4 }, group);
    }

    points(s, paint, group) {
      const { px, py } = this.geometry;
      const look = s.hollow ? { fill: "none", stroke: paint, "stroke-width": 1.7 } : { fill: paint, opacity: 0.72 };
      s.x.forEach((x, i) => {
        if (this.near(x) && s.y[i] !== null) draw("circle", { cx: px(x).toFixed(1), cy: py(s.y[i]).toFixed(1), r: s.size || 3, ...look }, group);
      });
    }

    line(s, paint, group) {
      const { px, py, x0, x1 } = this.geometry;
      let path = "", isOn = false, last = 0;
      s.x.forEach((x, i) => {
        if (s.y[i] === null || !this.near(x)) { isOn = false; return; }
        const at = px(x).toFixed(1);
        if (isOn && s.step) path += `L${at} ${last}`;
        last = py(s.y[i]).toFixed(1);
        path += isOn ? `L${at} ${last}` : `M${at} ${last}h.01`; // a value between two gaps is a dot
        isOn = true;
      });
      const stroke = { stroke: paint, "stroke-width": s.width || 1.8, "stroke-dasharray": s.dash || "" };
      if (path) draw("path", { d: path, fill: "none", "stroke-linejoin": "round", "stroke-linecap": s.dash ? "butt" : "round", ...stroke }, group);
      if (s.markers && s.x.filter((x) => x >= x0 && x <= x1).length < 40) {
        s.x.forEach((x, i) => { if (s.y[i] !== null) draw("circle", { cx: px(x), cy: py(s.y[i]), r: (s.width || 1.8) > 2 ? 3 : 2, fill: paint }, group); });
      }
    }

    listen() {
      const where = (event) => {
        const rect = this.svg.getBoundingClientRect();
        return ((event.clientX - rect.left) / rect.width) * this.geometry.width;
      };
      let from = null;
      const stop = () => { from = null; this.brush.setAttribute("width", 0); };
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        from = where(event);
        if (event.pointerType === "mouse" && event.isTrusted) this.svg.setPointerCapture(event.pointerId);
        this.hover(from, event.clientX, event.clientY);
      });
      this.svg.addEventListener("pointermove", (event) => {
        const x = where(event);
        if (from !== null) {
          this.brush.setAttribute("x", Math.min(from, x));
          this.brush.setAttribute("width", Math.abs(x - from));
        }
        this.hover(x, event.clientX, event.clientY);
      });
      this.svg.addEventListener("pointerup", (event) => {
        if (from === null) return;
        const ends = [this.valueAt(from), this.valueAt(where(event))].sort((a, b) => a - b);
        const isDrag = Math.abs(where(event) - from) > 10;
        stop();
        if (isDrag) this.zoomTo(ends);
      });
      this.svg.addEventListener("pointercancel", stop); // the finger scrolls the page instead
      this.svg.addEventListener("dblclick", () => this.zoomTo(null));
      this.svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.leave(); });
      this.svg.addEventListener("blur", () => this.leave());
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    key(event) {
      const { box, inner, x0, x1 } = this.geometry, rect = this.svg.getBoundingClientRect();
      const at = Number(this.cross.getAttribute("x1")) || box.left + inner.width / 2;
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) {
        const x = Math.min(Math.max(at + step * Math.max(2, inner.width / 100), box.left), box.left + inner.width);
        this.hover(x, rect.left + x, rect.top + rect.height / 2);
      } else if (event.key === "+") {
        const middle = this.valueAt(at);
        this.zoomTo([middle - (middle - x0) / 2, middle + (x1 - middle) / 2]);
      } else if (event.key === "Escape" || event.key === "-") this.zoomTo(null);
      else return;
      event.preventDefault();
    }

    valueAt(x) {
      const { box, inner, x0, x1 } = this.geometry;
      return x0 + ((Math.min(Math.max(x, box.left), box.left + inner.width) - box.left) / inner.width) * (x1 - x0);
    }

    leave() {
      this.tip.hidden = true;
      if (this.cross) this.cross.setAttribute("visibility", "hidden");
    }

    nearest(s, value) {
      let i = 0, gap = Infinity;
      if (s.kind === "bars") return [lastBelow(s.x, value), 0];
      if (s.kind === "points") s.x.forEach((v, k) => { if (v !== null && Math.abs(v - value) < gap) { gap = Math.abs(v - value); i = k; } });
      else {
        i = lastBelow(s.x, value);
        if (i + 1 < s.x.length && Math.abs(s.x[i + 1] - value) < Math.abs(s.x[i] - value)) i += 1;
        gap = Math.abs(s.x[i] - value);
      }
      return [i, gap];
    }

    hover(x, clientX, clientY) {
      const { box, inner, x0, x1 } = this.geometry;
      if (x < box.left || x > box.left + inner.width) { this.leave(); return; }
      this.cross.setAttribute("x1", x);
      this.cross.setAttribute("x2", x);
      this.cross.setAttribute("visibility", "visible");
      const value = this.valueAt(x), rows = [element("b", {}, `${this.spec.x}: ${say(value)}`)];
      for (const s of this.shown().filter((one) => one.kind !== "ticks" && one.x.length)) {
        const [i, gap] = this.nearest(s, value);
        if (gap > 0.04 * (x1 - x0) && s.x.length > 2) continue;
        const row = element("div"), dot = element("i");
        dot.style.background = colour(s.colour);
        row.append(dot, s.name, element("span", {}, s.kind === "band" ? `${say(s.low[i])} … ${say(s.high[i])}` : say(s.y[i])));
        rows.push(row);
      }
      this.tip.replaceChildren(...rows.slice(0, 14));
      this.tip.hidden = false;
      const frame = this.figure.getBoundingClientRect();
      const left = clientX - frame.left + 14;
      const isLeft = left + this.tip.offsetWidth > frame.width - 6;
      this.tip.style.left = `${Math.max(4, isLeft ? left - this.tip.offsetWidth - 28 : left)}px`;
      this.tip.style.top = `${Math.max(4, clientY - frame.top - this.tip.offsetHeight - 8)}px`;
    }
  }

  return { Plot, element };
})();
