"""Whatever bytes a file holds, `gpssm fit` either goes on to fit or says in a line or two what is wrong with them."""

import contextlib
import io
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, given, settings

from gpssm import cli

GOOD = "t,y,u,batch\n" + "".join(f"{0.5 * i},{i * i % 7}.{i},{i * 5 % 3},{'ab'[i // 30]}\n" for i in range(60))
CELLS = st.one_of(
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(
        ["", " ", "nan", "NA", "inf", "-inf", "1e999", "1,5", '"', '"1"', "'", "x", "1_0", "0x1f", "١", "\x00", "true"]
    ),
    st.text(max_size=4),
)
NAMES = st.one_of(st.sampled_from(["y", "u", "t", "batch", "Y", ""]), st.text(max_size=5))
ENDINGS = st.sampled_from([".csv", ".csv", ".csv", ".tsv", ".tab", ".mat", ".parquet", ".CSV", ".txt", ""])
ENCODINGS = st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1", "utf-32"])


class Reached(BaseException):
    """The data are well: the fit would begin now."""


@st.composite
def tables(draw) -> bytes:
    """Text in lines of cells, of which any may be broken."""
    separator, newline = draw(st.sampled_from([",", ",", "\t", ";", "|"])), draw(st.sampled_from(["\n", "\r\n", "\r"]))
    width, height = draw(st.integers(1, 4)), draw(st.integers(0, 30))
    header = draw(st.one_of(st.just(["y", "u", "t", "batch"][:width]), st.lists(NAMES, min_size=width, max_size=width)))
    usual = st.floats(-1e6, 1e6).map(str)
    cells = draw(st.sampled_from([usual, usual, CELLS, st.one_of(usual, CELLS)]))
    lines = [separator.join(header)]
    for _ in range(height):
        lines.append(separator.join(draw(st.lists(cells, min_size=width, max_size=width))))
    if draw(st.booleans()) and len(lines) > 1:
        broken = draw(st.integers(0, len(lines) - 1))
        lines[broken] = draw(st.one_of(st.text(max_size=8), st.just(lines[broken] + separator + "1")))
    return newline.join(lines).encode(draw(ENCODINGS), "replace")


@st.composite
def damaged(draw) -> bytes:
    """A good table that something happened to."""
    content = GOOD.encode()
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.integers(0, 20)))
        content = (
            content[:start]
            + draw(st.one_of(st.binary(max_size=6), CELLS.map(lambda c: c.encode("utf-8", "replace"))))
            + content[stop:]
        )
    return content[: draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]


@st.composite
def options(draw) -> list[str]:
    """Columns that may be there."""
    names = st.one_of(st.just("y"), NAMES.filter(lambda name: not name.startswith("-")))
    said = ["--outputs", draw(st.one_of(st.just("y"), st.lists(names, min_size=1, max_size=3).map(",".join)))]
    for option, usual in (("--controls", "u"), ("--time", "t"), ("--sequence", "batch")):
        if draw(st.integers(0, 2)) == 0:
            said += [option, draw(st.one_of(st.just(usual), st.just(usual), names))]
    return said


def outcome(content: bytes, ending: str, said: list[str]) -> tuple[int | None, str]:
    """The exit code (None: on to the fit) of `gpssm fit` on a file with this content, and what went to standard error."""
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"file{ending}"
        file.write_bytes(content)
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = cli.run(["fit", str(file), *said, "--out", str(Path(folder) / "run")])
            except Reached:
                code = None
        assert sorted(path.name for path in Path(folder).iterdir()) == [file.name]
        assert file.read_bytes() == content
    return code, errors.getvalue()


def check(content: bytes, ending: str, said: list[str]) -> None:
    code, errors = outcome(content, ending, said)
    event("goes on to the fit" if code is None else "is refused")
    if code is None:
        return
    lines = errors.splitlines()
    assert code == 2, errors
    assert len(lines) <= 2, errors
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in errors
    assert len(lines[-1]) < 1200


@pytest.fixture(scope="module", autouse=True)
def _no_fit():
    def reach(*_, **__):
        raise Reached

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpssm.run.carry_out", reach)
        patch.setattr("warnings.showwarning", None)
        patch.setenv("GPSSM_JAX_CACHE", "off")
        yield


INPUTS = (st.one_of(damaged(), tables(), tables(), st.binary(max_size=300)), ENDINGS, options())
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=300, **QUIET)
@given(*INPUTS)
def test_a_malformed_file_is_refused_in_a_line(content, ending, said):
    check(content, ending, said)


@pytest.mark.slow
@settings(max_examples=5_000, **QUIET)
@given(*INPUTS)
def test_many_malformed_files_are_refused_in_a_line(content, ending, said):
    check(content, ending, said)


def test_a_good_file_goes_on_to_the_fit():
    said = ["--outputs", "y", "--controls", "u", "--sequence", "batch", "--time", "t"]
    assert outcome(GOOD.encode(), ".csv", said) == (None, "")
    assert outcome(GOOD.replace(",", "\t").encode(), ".tsv", said)[0] is None
