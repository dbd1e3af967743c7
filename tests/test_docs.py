"""The README and the documentation say what is so: their code runs, their links lead somewhere, and nothing is left out.

Pages run in a folder of their own that holds `plant.csv`. Blocks of a page share their names, a block with a title is written to
the file of that name, and settings in TOML are parsed. In the quick suite a fit is where it starts, no steps are taken, and
forecasts have few samples; commands are parsed only. The slow suite runs every page as it stands, its commands included, but for
the paper's experiments, downloads and what takes many minutes. A block under a comment `<!-- not run: why -->` is not run.
"""

import ast
import dataclasses
import importlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from typer.main import get_command

import gpssm
from gpssm import cli, config
from gpssm.agreement import check_fits_together

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
LANGUAGES = {"python", "bash", "text", "toml", "csv", "json"}
NETWORK_OR_HOURS = {"demo", "compare", "select", "reproduce", "datasets"}  # parsed, and tested elsewhere
LONG = {"from-linear-models.md", "own-physics.md", "interoperability.md"}  # even without the steps of their fits
STARTS: dict[tuple, Any] = {}  # pages begin alike
BLOCK = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.S | re.M)


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    code: str
    line: int
    why_not: str | None


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(language, title and title[1], match["code"], line, match["why"]))
    return found


def commands_of(block: Block) -> Iterator[list[str]]:
    """The `gpssm ...` lines of a block of shell."""
    for line in block.code.splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["gpssm"]:
            yield words[1:]


def is_runnable(page: Path) -> bool:
    return any(block.language == "python" and not block.title for block in blocks_of(page))


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
RUNNABLE = [page for page in PAGES if is_runnable(page)]


@each_page
def test_every_block_has_a_language_and_what_is_not_run_says_why(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(blocks_of(page)), "a block is not closed, or not at the beginning of a line"
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{page.name}, line {block.line}: say what this is, as in ```python"
        assert block.why_not is None or len(block.why_not.split()) > 2


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the data of the documentation, in which modules of a page are found and forgotten again."""
    shutil.copy(ROOT / "examples" / "plant.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GPSSM_JAX_CACHE", "off")
    monkeypatch.setattr("warnings.showwarning", None)
    before = set(sys.modules)
    yield tmp_path
    plt.close("all")
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def run_page(page: Path, folder: Path, *, with_commands: bool) -> None:
    namespace = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.why_not is not None:
            continue
        if block.title is not None:
            (folder / block.title).write_text(block.code, encoding="utf-8")
            importlib.invalidate_caches()
        elif block.language == "python":
            exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)
        elif block.language == "bash" and with_commands:
            for words in commands_of(block):
                if words[0] not in NETWORK_OR_HOURS and "--help" not in words:
                    assert cli.run(words) == cli.DONE, f"{page.name}: gpssm {' '.join(words)}"


def without_steps(data, model=None, posterior=None, *, key, scaling=None, settings=None, start=None):
    """The result of a fit that has not taken a step."""
    if model is None or posterior is None:
        asked = (*map(np.ndarray.tobytes, data.outputs), start or gpssm.StartSettings(), scaling is None)
        if asked not in STARTS:
            STARTS[asked] = gpssm.initialise(data, key=key, scaling=scaling, settings=start)
        model, posterior = STARTS[asked].model, STARTS[asked].posterior
    scaling = scaling or gpssm.Scaling.of(data)
    check_fits_together(data, scaling, model, posterior)
    history, taken = gpssm.History.empty(model.num_states), dataclasses.asdict(settings or gpssm.FitSettings())
    return gpssm.FitResult(model, posterior, scaling, data, history, gpssm.Status.MAX_STEPS, taken, 0)


@pytest.fixture
def quick(monkeypatch):
    """Nothing is compiled or computed that only says how good a model is: the code of a page is to run, whatever comes of it."""
    monkeypatch.setattr(gpssm, "fit", without_steps)
    for name in ("forecast", "posterior_states"):
        function = getattr(gpssm, name)
        monkeypatch.setattr(gpssm, name, lambda *a, function=function, **more: function(*a, **{**more, "num_samples": 20}))


@pytest.mark.parametrize("page", [page for page in RUNNABLE if page.name not in LONG], ids=lambda page: page.name)
def test_the_code_of_every_page_runs(page, folder, quick):
    run_page(page, folder, with_commands=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_every_page_runs_as_it_stands(page, folder):
    run_page(page, folder, with_commands=True)


@each_page
def test_every_command_parses(page):
    for block in blocks_of(page):
        for words in commands_of(block) if block.language == "bash" else ():
            command, names = get_command(cli.app), []
            while hasattr(command, "commands") and words and words[0] in command.commands:
                command, words = command.commands[words[0]], words[1:]
                names.append(command.name)
            assert names or words == ["--help"], f"{page.name}: gpssm {' '.join(words)}: there is no such verb"
            if "--help" not in words:
                command.make_context(" ".join(names), list(words))  # raises where an option is not known or is missing


@each_page
def test_settings_are_ones_that_there_are(page):
    for block in blocks_of(page):
        if block.language == "toml":
            config.parse(block.code)


def headings(page: Path) -> set[str]:
    """The anchors of a page, as MkDocs makes them of its headings."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ +(.+)$", text, re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", h)).strip().lower()) for h in found}


@each_page
def test_links_and_images_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{page.name}: there is no {target}"
        if page.parent == DOCS:
            assert DOCS in file.parents, f"{page.name}: {target} is not part of the site"
        if anchor:
            assert anchor in headings(file), f"{page.name}: {target} has no such heading"
        if file.suffix == ".png":
            assert file.read_bytes()[:4] == b"\x89PNG"
            assert file.stat().st_size < 300_000, f"{file.name} is large for a repository"


def test_every_page_and_image_is_used():
    listed = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]))
    assert listed == {page.name for page in DOCS.glob("*.md")}
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for image in DOCS.glob("images/*"):
        assert f"images/{image.name}" in text, f"{image.name} is shown nowhere"


def test_every_public_name_is_in_the_reference():
    listed = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    assert len(set(listed)) == len(listed)
    exported = ast.parse((ROOT / "src" / "gpssm" / "__init__.py").read_text(encoding="utf-8"))
    names = {f"{node.module}.{alias.name}" for node in exported.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(listed) == names
    for name in vars(gpssm):
        is_module = isinstance(getattr(gpssm, name), ModuleType)
        assert name.startswith("_") or is_module or any(entry.endswith(f".{name}") for entry in listed), (
            f"{name} is not in api.md"
        )


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    assert found, f"{page} has no section '{heading}'"
    return found[1]


@pytest.mark.parametrize("verb", list(cli.EXAMPLES))
def test_every_verb_and_option_is_documented(verb):
    text, command = section("command-line.md", f"gpssm {verb}"), get_command(cli.app)
    for name in verb.split():
        command = command.commands[name]
    options = {
        name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")
    } - {"--help"}
    table = set(re.findall(r"`(--[\w-]+)", "\n".join(re.findall(r"^\| `--.*?\|", text, re.M))))
    assert table == options
    assert f"gpssm {verb}" in text


@pytest.mark.parametrize("table", [field.name for field in dataclasses.fields(config.Config)][1:-1])
def test_every_setting_is_documented_with_its_default(table):
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", section("settings.md", f"[{table}]"), re.M)
    documented = {name: default for names, default in rows for name in re.findall(r"\w+", names)}
    settings = getattr(config.Config(), table)
    own = {"emission", "builder"} if table == "start" else set()
    assert set(documented) == {field.name for field in dataclasses.fields(settings)} | own
    for name in set(documented) - own:
        value, told = getattr(settings, name), documented[name].strip("`")
        if value in (None, "", ()):
            assert told in ("none", "–"), name
        else:
            assert ast.literal_eval({"true": "True", "false": "False"}.get(told, told)) in (
                value,
                list(value) if isinstance(value, tuple) else value,
            )


def test_the_readme_s_commands_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"\bmake ([a-z-]+)", "".join(b.code for b in blocks_of(page) if b.language == "bash")):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


def test_the_site_builds_strictly(tmp_path, monkeypatch):
    """Where MkDocs is installed, as it is by `make docs`; the links and the contents are held without it above."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: make docs")
    pytest.importorskip("mkdocstrings")
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    for page, kind in itertools.product(pages, ("src", "href")):
        fetched = re.findall(rf'<(?:script|link|img|iframe)[^>]*{kind}="(https?:)?//', page.read_text(encoding="utf-8"))
        assert not fetched, f"{page.name} asks the network"
