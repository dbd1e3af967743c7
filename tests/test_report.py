import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from gpssm import config, report
from gpssm.config import Config
from gpssm.data import Dataset
from gpssm.report import charts
from gpssm.run import carry_out

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two states and a control, with a gap, and a name that must be escaped."""
    rng = np.random.default_rng(0)
    u, y = rng.normal(size=(40, 1)), np.zeros((40, 1))
    for t in range(39):
        y[t + 1] = 0.7 * y[t] + np.tanh(u[t])
    y += 0.1 * rng.normal(size=y.shape)
    y[10] = np.nan
    data = Dataset.from_arrays(y, u, output_names=["<b>speed</b>"], output_units=["m/s"], sampling_time=0.5, time_unit="s")
    settings = {
        "start": {"num_inducing": 5, "free_run": 0, "state_dim": 2},
        "fit": {"num_steps": 4, "num_samples": 2, "block_steps": 2},
        "forecast": {"horizon": 3, "num_samples": 20, "stride": 4},
        "data": {"source": "</script><b>.csv"},
    }
    return carry_out(tmp_path_factory.mktemp("report") / "run", config.override(Config(), settings), data, rivals={})


@pytest.fixture(scope="module")
def page(run):
    return report.render(run)


def content(page):
    return json.loads(re.search(r'id="content">(.*?)</script>', page, re.S).group(1))


def test_the_report_asks_the_network_for_nothing(page):
    assert set(re.findall(r"(?:src|href|url)[=(][^ >]*", page)) == {'href="data:,"', "url(#${id})`"}
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "@import" not in page
    assert "fetch(" not in page


def test_names_from_the_data_cannot_break_out_of_the_page(page):
    assert page.count("</script>") == 2
    assert "<b>speed" not in page.split('id="content"')[0]


def test_tags_are_balanced(page):
    open_tags = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "link", "br"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            assert open_tags.pop() == tag

    Parser().feed(page)
    assert not open_tags


def sections_of(page):
    return {section["id"]: section for section in content(page)["sections"]}


def titles(section):
    return [chart["title"] for chart in section["charts"]]


def test_every_section_that_was_promised_is_there(page):
    names = ["data", "forecasts", "scores", "calibration", "function", "inducing", "states", "bound"]
    assert list(sections_of(page)) == names
    for words in (
        "sensor adds noise",
        "straight line",
        "What was fitted to what",
        "Settings, seconds, versions",
        "m/s",
        "process noise",
    ):
        assert words in page
    assert "1 of 40 (2.5%)" in page


def test_the_data_show_their_gaps_and_what_was_held_out(page):
    outputs, controls = sections_of(page)["data"]["charts"]
    assert outputs["note"] == "1 of 40 values are missing."
    assert outputs["series"][0]["y"][10] is None
    assert outputs["series"][1] == {"kind": "ticks", "name": "missing", "colour": 1, "x": [5.0]}
    assert outputs["marks"][0]["x"] == controls["marks"][0]["x"] == 15.0
    assert outputs["link"] == controls["link"]


def test_forecasts_show_a_long_horizon_and_one_row_ahead_beside_what_happened(page):
    fan, one_step = sections_of(page)["forecasts"]["charts"]
    assert [series["kind"] for series in fan["series"]] == ["band", "band", "line", "points"]
    assert fan["series"][0]["x"] == [15.0 + 0.5 * i for i in range(10)]
    assert len(one_step["series"][1]["x"]) == 40


def test_the_function_is_shown_against_every_state_and_control_with_slices_and_bands(page):
    section = sections_of(page)["function"]
    assert titles(section) == ["Next state against state 1", "Next state against state 2", "Next state against u1"]
    for chart in section["charts"]:
        assert [(one["kind"], one.get("group")) for one in chart["series"]] == [
            *[("band", "state 1"), ("line", "state 1"), ("band", "state 2"), ("line", "state 2")],
            *[("line", "slices"), ("line", "slices")],
        ]
    assert titles(sections_of(page)["inducing"]) == ["state 2 against state 1", "u1 against state 2"]


def test_the_bound_has_four_terms_that_add_up_to_it(page):
    bound, terms, *_ = sections_of(page)["bound"]["charts"]
    sums = np.sum([one["y"] for one in terms["series"]], axis=0)
    assert len(terms["series"]) == 4
    np.testing.assert_allclose(sums, bound["series"][0]["y"], rtol=1e-3)


def test_the_pit_histogram_is_a_density(page):
    _, pit = sections_of(page)["calibration"]["charts"]
    assert np.isclose(np.mean(pit["series"][0]["y"]), 1)


def test_series_have_as_many_values_on_both_axes(page):
    for section in content(page)["sections"]:
        for chart in section["charts"]:
            for series in chart["series"]:
                lengths = {len(series[name]) for name in ("x", "y", "low", "high") if name in series}
                assert len(lengths) == 1, (chart["title"], series["name"])


def test_long_lines_are_thinned():
    line = charts.line("long", np.arange(10_001), np.arange(10_001))
    assert len(line["x"]) <= charts.MOST_POINTS


def test_a_run_without_held_out_data_has_a_report_too(run):
    text = report.render(replace(run, evaluation=None, metrics={}))
    assert [s["id"] for s in content(text)["sections"]] == ["data", "forecasts", "function", "inducing", "states", "bound"]
    assert "Nothing was held out" in text


def test_the_report_is_written_whole(run, tmp_path):
    path = report.write_report(run, tmp_path / "deep" / "report.html")
    assert path.read_text().rstrip().endswith("</html>")


PROBE = """
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
addEventListener("load", () => setTimeout(() => {
  const all = (query, within = document) => [...within.querySelectorAll(query)];
  const point = (type, svg, share) => {
    const box = svg.getBoundingClientRect();
    const at = { clientX: box.left + share * box.width, clientY: box.top + box.height / 2, button: 0, bubbles: true };
    svg.dispatchEvent(new PointerEvent(type, { ...at, pointerType: "mouse" }));
  };
  const root = document.documentElement;
  const found = { errors, width: innerWidth, overflow: root.scrollWidth - root.clientWidth };
  found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  found.charts = all("figure > svg").length;
  found.notNumbers = all("figure > svg").filter((svg) => /NaN|undefined|Infinity/.test(svg.outerHTML)).length;
  found.clipped = all("figure > svg").flatMap((svg) => {
    const { width, height } = svg.viewBox.baseVal;
    const isOut = (box) => box.x < -1 || box.y < -1 || box.x + box.width > width + 1 || box.y + box.height > height + 1;
    return all("text", svg).filter((text) => isOut(text.getBBox())).map((text) => text.textContent);
  });
  const isOver = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y + 2 < b.y + b.height && b.y + 2 < a.y + a.height;
  found.overlapping = all("figure > svg").flatMap((svg) => {
    const texts = all("text:not(.halo)", svg), boxes = texts.map((text) => text.getBBox());
    return texts.filter((_, i) => boxes.some((box, j) => i !== j && isOver(boxes[i], box))).map((text) => text.textContent);
  });

  const figure = document.querySelector("#forecasts figure"), svg = figure.querySelector("svg[role=img]");
  const button = figure.querySelector(".legend button"), bands = () => all("path[opacity]", svg).length;
  found.bandsBefore = bands();
  button.click();
  found.bandsHidden = bands();
  button.click();
  found.bandsAgain = bands();

  point("pointermove", svg, 0.9);
  found.tip = figure.querySelector(".tip").hidden ? "" : figure.querySelector(".tip").textContent;
  const [first, second] = all("#data figure");
  const ticks = (one) => all("text", one.querySelector("svg[role=img]")).map((text) => text.textContent).join();
  const whole = [ticks(first), ticks(second)];
  const inFirst = first.querySelector("svg[role=img]");
  point("pointerdown", inFirst, 0.3); point("pointermove", inFirst, 0.5); point("pointerup", inFirst, 0.5);
  found.isZoomed = [ticks(first) !== whole[0], ticks(second) !== whole[1], !first.querySelector(".back").hidden];
  inFirst.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
  found.isWhole = [ticks(first) === whole[0], ticks(second) === whole[1], first.querySelector(".back").hidden];

  const paper = () => getComputedStyle(document.body).backgroundColor;
  found.papers = [paper()];
  document.querySelector(".theme").click();
  found.papers.push(paper());
  document.body.setAttribute("data-found", JSON.stringify(found));
}, 0));
"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (on Debian: apt-get install chromium)")
@pytest.mark.parametrize(("width", "is_dark"), [(1100, False), (390, True)])
def test_the_report_works_in_a_browser_at_a_desk_and_on_a_phone(page, tmp_path, width, is_dark):
    path = tmp_path / "report.html"
    path.write_text(page.replace("<style>", f"<script>{PROBE}</script>\n<style>", 1), encoding="utf-8")
    frame = tmp_path / "frame.html"  # a browser's window has a least width, a frame has none
    frame.write_text(
        f'<body><iframe src="report.html" style="border:0;width:{width}px;height:900px"></iframe><script>'
        'const frame = document.querySelector("iframe"), wait = () => { const found = frame.contentDocument?.body?.dataset.found;'
        "if (found) document.body.dataset.found = found; else setTimeout(wait, 20); }; wait();</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files"),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--virtual-time-budget=5000"),
            *(["--blink-settings=preferredColorScheme=0"] if is_dark else []),
            *("--dump-dom", frame.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = re.search(r'data-found="([^"]*)"', done.stdout)
    assert told, "the page never came to its end"
    found = json.loads(html.unescape(told.group(1)))
    assert found["errors"] == found["requests"] == found["clipped"] == found["overlapping"] == []
    assert (found["width"], found["overflow"], found["notNumbers"]) == (width, 0, 0)
    assert found["charts"] == sum(len(section["charts"]) for section in content(page)["sections"])
    assert (found["bandsBefore"], found["bandsHidden"], found["bandsAgain"]) == (2, 1, 2)
    assert re.match(r"time \(s\): .*mean", found["tip"])
    assert found["isZoomed"] == found["isWhole"] == [True, True, True]
    light, dark = "rgb(248, 248, 246)", "rgb(17, 20, 26)"
    assert found["papers"] == ([dark, light] if is_dark else [light, dark])
