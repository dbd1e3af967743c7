// Lays out the sections and their charts, the contents, and the switch between light and dark.
(() => {
  "use strict";
  const { Plot, element } = window.gpssmCharts;
  const content = JSON.parse(document.getElementById("content").textContent);

  const plots = [];
  for (const part of content.sections) {
    const section = element("section", { id: part.id });
    section.append(element("h2", {}, part.title), element("p", {}, part.text));
    const grid = element("div", { class: part.columns > 1 ? "grid two" : "grid" });
    section.append(grid);
    document.getElementById("charts").append(section);
    for (const spec of part.charts) plots.push(new Plot(spec, grid, plots));
  }

  const contents = document.getElementById("contents");
  for (const { id } of document.querySelectorAll("main section")) {
    contents.append(element("a", { href: `#${id}` }, id[0].toUpperCase() + id.slice(1)));
  }

  const root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const theme = element("button", { type: "button", class: "theme" });
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.title = `Show this page ${isDark() ? "light" : "dark"}`; };
  theme.onclick = () => { root.dataset.theme = isDark() ? "light" : "dark"; nameTheme(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", nameTheme);
  nameTheme();
  contents.append(theme);

  const renderAll = () => plots.forEach((plot) => plot.render());
  renderAll();
  let waiting = 0, width = document.body.clientWidth;
  addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(renderAll, 80);
  });
})();
