"""The benchmarks count what they say, and run."""

import json

import jax
import pytest
from benchmarks import parallel_in_time
from benchmarks.datasets import FAMILIES, Case
from benchmarks.floors import Arithmetic
from benchmarks.run import main
from benchmarks.table import table

from gpssm.params import unwrap


def test_arithmetic_of_a_step_is_three_products_a_state_and_an_exponential_an_inducing_input():
    arithmetic = Arithmetic.of(Case())
    assert arithmetic.operations(Case()) == 3 * 2 * 500 * 100 * 100 * 100 * 4
    assert (arithmetic.exponentials, arithmetic.waves) == (400, 0)
    assert Arithmetic.of(Case("factorised-nonlinear")).operations(Case()) == 2 * arithmetic.operations(Case())
    assert Arithmetic.of(Case("f-dependent-pathwise")).waves == 4 * Case("f-dependent-pathwise").num_features > 0
    assert Arithmetic.of(Case(is_shared=True)).operations(Case()) == arithmetic.operations(Case()) / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_case_has_the_sizes_that_it_says(family):
    case = Case(family, steps=7, states=3, controls=2, outputs=2, inducing=5, sequences=2)
    data, model, posterior = unwrap(case.build(seed=1))
    assert (data.num_sequences, data.max_length, data.num_outputs, data.num_controls) == (2, 7, 2, 2)
    assert model.transition.inducing_inputs.shape == (3, 5, 5)
    assert posterior.inducing.mean.shape == (3, 5)


def test_table_has_a_line_a_row_and_marks_what_is_missing():
    rows = [{"variable": "steps", "steps": 125, "family": "vcdt", "chain": "plain", "seconds": 0.5, "ratio": 2.0}]
    last = table("growth", [*rows, {"variable": "samples", "samples": 4, "family": "vcdt"}]).splitlines()[-2:]
    assert last == ["| steps | 125 | vcdt | plain | 0.5000 | 2.00 |", "| samples | 4 | vcdt | - | - | - |"]


@pytest.mark.slow
def test_step_writes_a_row_a_chain_with_times_floor_and_ratio(tmp_path, capsys):
    size = ["--steps", "4", "--states", "1", "--inducing", "3", "--samples", "2", "--repeats", "2", "--block", "1"]
    main(["step", "--chains", "plain,fused", "--families", "vcdt", *size, "--out", str(tmp_path)])
    rows = [json.loads(line) for line in (tmp_path / "step.jsonl").read_text().splitlines()]
    assert [row["chain"] for row in rows] == ["plain", "fused"]
    for row in rows:
        assert row["ratio"] == row["seconds"] / row["floor_seconds"] > 0
        assert len(row["all_seconds"]) == len(row["all_floor_seconds"]) == 2
        assert row["device"] == jax.devices()[0].device_kind
    assert capsys.readouterr().out.count("\n") == 2


def test_newtons_method_over_all_steps_ends_in_the_states_of_the_chain(capsys):
    parallel_in_time.main(["--steps", "12", "--samples", "2", "--inducing", "6"])
    blind, warm = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    for row in (blind, warm):
        assert row["errors"][-1] < parallel_in_time.TOLERANCE
    assert warm["iterations"] <= blind["iterations"] <= 12
