"""What is held out, what is left to fit, and what a factor of the process noise settles at."""

import types

import numpy as np
import pytest

import gpssm
from gpssm.evaluate import LEVELS, Errors, Evaluation
from gpssm.validation import TYPICAL_FACTOR, _settled, blocks, joined


def dataset(*lengths: int) -> gpssm.Dataset:
    """Row t of sequence s holds 100 s + t, so that rows can be told."""
    outputs = [100.0 * s + np.arange(length) for s, length in enumerate(lengths)]
    return gpssm.Dataset.from_arrays(outputs, [-values for values in outputs], sequence_names=["a", "b"][: len(lengths)])


def test_blocks_go_backwards_from_the_end_and_every_row_is_either_held_out_or_left():
    data = dataset(40, 12)
    last, before = blocks(data, 0.25, 2)
    assert (last.starts, last.until.lengths, last.rest) == ((30, 9), (40, 12), data.split(0.75)[0])
    assert (before.starts, before.until.lengths) == ((20, 6), (30, 9))
    assert before.rest.sequence_names == ("a", "b", "a, from row 30", "b, from row 9")
    assert [values[0, 0] for values in before.rest.outputs] == [0, 100, 30, 109]
    for block in (last, before):
        left = np.concatenate([values[:, 0] for values in block.rest.outputs])
        held = np.concatenate([values[start:, 0] for values, start in zip(block.until.outputs, block.starts, strict=True)])
        assert not set(left) & set(held)
        for outputs, controls in zip(block.rest.outputs, block.rest.controls, strict=True):
            assert (controls == -outputs).all()
    everything = {*np.concatenate([values[:, 0] for values in data.outputs])}
    assert {*np.concatenate([values[:, 0] for values in before.rest.outputs]), *range(20, 30), 106, 107, 108} == everything


def test_there_are_no_more_blocks_than_leave_as_much_before_them():
    assert len(blocks(dataset(40), 0.25, 9)) == 3
    assert len(blocks(dataset(40), 0.5, 2)) == 1
    assert len(blocks(dataset(40), 0.8, 2)) == 1


@pytest.mark.parametrize(("scores", "best"), [([2, 1, 3], 1.5), ([1, 2, 0], 1.0), ([3, 2, 1], 2.5), ([np.nan, 1, 2], 1.0)])
def test_the_factor_settles_half_way_between_the_best_and_the_typical_one(scores, best):
    factors = (1.0, 1.5, 2.5)
    given = dict(zip(factors, scores, strict=True))
    kept, settled = _settled(lambda factor: types.SimpleNamespace(at=factor), lambda it: given[it.at], factors)
    assert settled == pytest.approx(np.sqrt(best * TYPICAL_FACTOR))
    assert kept.at == settled
    assert _settled(lambda factor: factor, lambda it: 0.0, (2.0,)) == (2.0, 2.0)


def test_joined_evaluations_score_all_of_their_windows():
    def evaluation(windows: int, value: float) -> Evaluation:
        table = np.full((windows, 3, 1), value)
        errors = Errors(table, table, table, table, np.zeros((windows, 3, 1, len(LEVELS))), table[..., 0], table[..., 0])
        scaling = gpssm.Scaling.identity(1, 0)
        return Evaluation({"it": errors}, np.zeros(windows, int), np.arange(windows), 3, 1, scaling, ("y",), ("a",), {"it": 1.0})

    both = joined([evaluation(4, 1.0), evaluation(12, 2.0)])
    assert both.num_windows == 16
    assert both.score("it").rmse == pytest.approx(np.sqrt((4 * 1 + 12 * 4) / 16))
    assert both.seconds == {"it": 2.0}
