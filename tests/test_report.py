import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from gpssm import config, report
from gpssm.config import Config
from gpssm.data import Dataset
from gpssm.run import carry_out


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
        "start": {"num_inducing": 5, "state_dim": 2},
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
    assert re.findall(r"(?:src|href|url)[=(][^ >]*", page) == ['href="data:,"', "url(#${id})`"]
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


def test_every_section_of_the_issue_is_there(page):
    sections = {section["id"]: section for section in content(page)["sections"]}
    assert list(sections) == ["data", "forecasts", "scores", "calibration", "function", "states", "bound"]
    assert "1 of 40 values are missing" in sections["data"]["charts"][0]["note"]
    assert sections["data"]["charts"][0]["series"][0]["y"][10] is None
    titles = [chart["title"] for chart in sections["function"]["charts"]]
    assert titles[:3] == ["Next state against state 1", "Next state against state 2", "Next state against u1"]
    assert "Inducing points" in titles[3]
    assert len(sections["bound"]["charts"][1]["series"]) == 4
    for words in ("sensor adds noise", "straight line", "Settings and versions", "m/s"):
        assert words in page


def test_series_have_as_many_values_on_both_axes(page):
    for section in content(page)["sections"]:
        for chart in section["charts"]:
            for series in chart["series"]:
                lengths = {len(series[name]) for name in ("x", "y", "low", "high") if name in series}
                assert len(lengths) == 1, (chart["title"], series["name"])


def test_long_lines_are_thinned():
    line = report._line("long", np.arange(10_001), np.arange(10_001))
    assert len(line["x"]) <= report.MOST_POINTS


def test_a_run_without_held_out_data_has_a_report_too(run):
    text = report.render(replace(run, evaluation=None, metrics={}))
    assert [s["id"] for s in content(text)["sections"]] == ["data", "forecasts", "function", "states", "bound"]
    assert "Nothing was held out" in text


def test_the_report_is_written_whole(run, tmp_path):
    path = report.write_report(run, tmp_path / "deep" / "report.html")
    assert path.read_text().rstrip().endswith("</html>")
