"""The rules that a machine can hold: which way imports flow, what a class is, the length and names of things."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gpssm"
FLOW = [  # a module imports only what stands before it
    *("_types", "_precision", "atomic", "params", "save", "linalg", "noise", "kernels", "means", "gp", "emissions", "unrolled"),
    *("tables", "readers", "sequences", "data", "simulators", "datasets"),
    *("draws", "model", "native", "posteriors", "devices", "elbo", "agreement", "linear", "subspace"),
    *("initialise", "free_run", "result", "progress", "fit", "starts", "forecasts", "predict", "particles", "filter"),
    *("inference_data", "estimator"),
    *("baselines", "evaluate", "ensemble", "validation", "select"),
    *("config", "findings", "plots", "run", "selection", "report", "reproduce", "commands", "cli"),
]
SHARED_BY_FAMILIES = {"__init__", "adjoint", "base", "chain", "chains", "compiled", "fused", "fused_walk", "local"}
ENTRANCES = {"__init__", "__main__"}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 500, 80

FILES = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
each_file = pytest.mark.parametrize("file", FILES, ids=str)


def imported(tree: ast.AST) -> set[tuple[str, ...]]:
    """What of gpssm a file imports, anywhere in it: {("posteriors", "base"), ("kernels",), ...}."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the full name, gpssm.{node.module}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "gpssm"}


@each_file
def test_every_module_has_its_place_in_the_flow_and_imports_only_from_before_it(file):
    place = file.with_suffix("").parts[0]
    if place in ENTRANCES:
        return
    assert place in FLOW, f"{file}: give it a place in FLOW"
    allowed = {*FLOW[: FLOW.index(place)], *([place] if len(file.parts) > 1 else [])}
    against = {name for name in imported(FILES[file]) if not name or name[0] not in allowed}
    assert not against, f"{file} imports against the flow: {against}"


def test_posterior_families_never_import_each_other():
    families = {file.stem for file in FILES if file.parts[0] == "posteriors"} - SHARED_BY_FAMILIES
    for file, tree in FILES.items():
        if file.parts[0] == "posteriors" and file.stem != "__init__":
            others = {name[1] for name in imported(tree) if name[0] == "posteriors" and len(name) > 1} & families
            assert not others, f"{file} imports the families {others}"


def test_a_class_is_abstract_or_final():
    classes = [node for tree in FILES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    ours = {node.name for node in classes}
    for node in classes:
        bases = {part.id for base in node.bases for part in ast.walk(base) if isinstance(part, ast.Name)}
        final = {name for name in bases & ours if not name.startswith("Abstract")}
        assert not final, f"{node.name} subclasses {final}: only Abstract... classes are subclassed"


@each_file
def test_files_and_functions_are_short(file):
    num_lines = (SOURCE / file).read_text().count("\n")
    assert num_lines <= MOST_LINES_OF_A_FILE, f"{file} decides too much: split it"
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MOST_LINES_OF_A_FUNCTION, f"{file}: {node.name}"


@each_file
def test_a_file_is_named_after_what_it_decides_and_keeps_its_annotations(file):
    assert not re.search(r"utils?\b|helpers?\b|common|misc", file.as_posix())
    for node in ast.walk(FILES[file]):
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        assert not is_future, f"{file}: shapes are checked at run time, so annotations must not be text"
