"""What `gpssm.data` promises: files and arrays in, checked sequences out, and errors that a person can act on."""

import contextlib
import dataclasses
import decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import scipy.io
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpssm.data import Dataset, Scaling, Window, read_csv, read_mat, read_parquet, read_table

NAN = float("nan")


@pytest.fixture
def write(tmp_path: Path):
    def write_text(text: str | bytes, name: str = "plant.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write_text


@pytest.fixture
def plant() -> Dataset:
    time = np.arange(12.0)
    outputs = [np.stack([time, -(time**2)], axis=1), np.stack([time[:5], np.cos(time[:5])], axis=1)]
    outputs[0][3, 1] = NAN
    controls = [np.sin(time), np.cos(time[:5])]
    names = {"output_names": ["level", "heat"], "control_names": ["valve"], "sequence_names": ["day", "night"]}
    units = {"output_units": ["m", "J"], "control_units": ["%"], "sampling_time": 0.5, "time_unit": "min"}
    return Dataset.from_arrays(outputs, controls, **names, **units)


class TestFromArrays:
    @pytest.mark.parametrize(
        ("outputs", "shapes"),
        [
            (np.arange(5), [(5, 1)]),
            ([1.0, 2.0, 3.0], [(3, 1)]),
            ([[1, 2], [3, 4], [5, 6]], [(3, 2)]),
            (np.arange(24.0).reshape(2, 4, 3), [(4, 3), (4, 3)]),
            ([np.arange(3.0), np.arange(4.0)], [(3, 1), (4, 1)]),
            ((np.eye(3), np.ones((2, 3))), [(3, 3), (2, 3)]),
            (jnp.arange(4.0), [(4, 1)]),
            (np.array([True, False, True]), [(3, 1)]),
        ],
    )
    def test_every_documented_shape_is_understood(self, outputs, shapes):
        data = Dataset.from_arrays(outputs)
        assert [values.shape for values in data.outputs] == shapes
        assert [values.dtype for values in data.outputs] == [np.float64] * len(shapes)
        assert [values.shape[1] for values in data.controls] == [0] * len(shapes)

    def test_arrays_are_read_only_copies(self):
        mine = np.arange(4.0)
        data = Dataset.from_arrays(mine)
        mine[0] = 99.0
        assert data.outputs[0][0, 0] == 0.0
        with pytest.raises(ValueError, match="read-only"):
            data.outputs[0][0, 0] = 1.0

    def test_masked_entries_are_missing(self):
        data = Dataset.from_arrays(np.ma.masked_equal([1.0, -999.0, 3.0], -999.0))
        np.testing.assert_array_equal(data.outputs[0][:, 0], [1.0, NAN, 3.0])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((np.zeros((2, 3, 4, 5)),), r"outputs: expected \[time\].* came the shape \(2, 3, 4, 5\)"),
            ((np.float64(3.0),), r"came the shape \(\)"),
            (([],), "has 0 rows; expected at least 2"),
            ((np.zeros((0, 3, 1)),), "outputs holds no sequence"),
            (([[1.0, 2.0], [3.0]],), "ragged. Give a list of NumPy arrays"),
            ((np.array(["1", "2"]),), "must hold real numbers, came an array of <U1"),
            ((np.array([1.0, None]),), "must hold real numbers, came an array of object"),
            ((np.array([1j, 2.0]),), "must hold real numbers, came an array of complex128"),
            (([np.zeros(3), np.array(["a", "b"])],), r"outputs\[1\] must hold real numbers"),
            ((np.arange(1.0),), "sequence '0' has 1 row; expected at least 2"),
            (([np.arange(3.0), np.arange(1.0)],), "sequence '1' has 1 row;"),
            ((np.array([1.0, np.inf]),), r"sequence '0', row 1 \(the first is 0\), column 'y1' is infinite"),
            ((np.array([NAN, NAN]),), "output 'y1' is missing in all 2 rows"),
            (([np.eye(2), np.ones((3, 3))],), r"sequence '1': expected outputs of shape \[time, 2\]"),
            ((np.zeros((3, 0)),), "there are no outputs"),
            ((np.arange(4.0), np.arange(3.0)), "4 rows of outputs and 3 of controls.*repeat the last"),
            ((np.arange(4.0), [np.arange(4.0)] * 2), "came 1, 2 and 1"),
            (
                (np.arange(4.0), np.array([1.0, 2.0, NAN, NAN])),
                r"sequence '0', row 2 .*, column 'u1' is missing, but controls must be known.*\(and 1 more\)",
            ),
            ((np.arange(2.0), np.array([1.0, -np.inf])), "column 'u1' is infinite"),
        ],
    )
    def test_bad_arrays_are_refused_by_name(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            Dataset.from_arrays(*arguments)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"output_names": ["a", "a"]}, r"names of outputs and controls must differ, but \['a'\]"),
            ({"output_names": ["a", "u1"]}, r"must differ, but \['u1'\]"),
            ({"output_names": ["a", ""]}, "texts that are not empty"),
            ({"output_names": ["a"], "output_units": [""]}, "output_names must name 2 outputs"),
            ({"output_names": ["a"]}, r"output_names must name 2 outputs, one a column of the array, came \['a'\]"),
            ({"output_units": ["m"]}, "output_units must be one text for each"),
            ({"control_units": ["m", "m"]}, "control_units must be one text for each"),
            ({"sequence_names": ["a", "b"]}, "came 1, 1 and 2"),
            ({"sampling_time": 0.0}, "sampling_time must be positive"),
            ({"sampling_time": NAN}, "sampling_time must be positive"),
        ],
    )
    def test_bad_descriptions_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            Dataset.from_arrays(np.eye(3)[:, :2], np.arange(3.0), **options)


class TestParts:
    def test_counts_describe_the_data(self, plant):
        assert (len(plant), plant.num_sequences, plant.num_outputs, plant.num_controls) == (2, 2, 2, 1)
        assert (plant.lengths, plant.max_length, plant.num_rows) == ((12, 5), 12, 17)

    def test_indexing_picks_sequences(self, plant):
        assert plant[1].sequence_names == ("night",)
        assert plant[-1] == plant[1] == plant[1:]
        assert [part.sequence_names[0] for part in plant] == ["day", "night"]
        with pytest.raises(IndexError):
            plant[2]

    def test_split_is_by_time_within_each_sequence(self, plant):
        train, test = plant.split(0.5)
        assert (train.lengths, test.lengths) == ((6, 2), (6, 3))
        assert train.control_units == test.control_units == ("%",)

    def test_a_part_may_miss_a_channel_but_cannot_give_the_scaling(self):
        data = Dataset.from_arrays(np.array([[1.0, NAN], [2.0, NAN], [3.0, 1.0], [5.0, 2.0]]))
        train, _ = data.split(0.5)
        with pytest.raises(ValueError, match="output 'y2' is missing in all 2 rows"):
            Scaling.of(train)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5, NAN])
    def test_fractions_outside_zero_and_one_are_refused(self, plant, fraction):
        with pytest.raises(ValueError, match="between 0 and 1"):
            plant.split(fraction)

    def test_split_leaves_two_rows_on_each_side(self, plant):
        with pytest.raises(ValueError, match="cuts sequence 'night' into 4 and 1 rows"):
            plant.split(0.8)

    @pytest.mark.parametrize("which", [0.5, [0], ["day"], [-2]])
    def test_split_sequences_takes_fractions_indices_and_names(self, plant, which):
        train, test = plant.split_sequences(which)
        assert (train, test) == (plant[0], plant[1])

    @pytest.mark.parametrize(
        ("which", "message"),
        [
            (0.1, "at least one on each side"),
            ([0, 1], "at least one on each side"),
            ([], "at least one on each side"),
            ([0, 0], "expected each once"),
            ([5], "no sequence 5 among the 2, called day, night"),
            (["dya"], "no sequence 'dya' among the 2"),
        ],
    )
    def test_impossible_splits_of_sequences_are_refused(self, plant, which, message):
        with pytest.raises(ValueError, match=message):
            plant.split_sequences(which)

    def test_rows_counts_as_python_does(self, plant):
        assert plant.rows(1, 4).lengths == (3, 3)
        np.testing.assert_array_equal(plant.rows(-3).outputs[1], plant.outputs[1][2:])
        with pytest.raises(ValueError, match="sequence 'night' has 1 row"):
            plant.rows(4)

    def test_equality_is_by_content(self, plant):
        assert plant == Dataset(**{f.name: getattr(plant, f.name) for f in dataclasses.fields(plant)})
        assert plant != dataclasses.replace(plant, time_unit="h")
        assert plant != plant[:1]
        assert plant.rows(0, 4) != plant.rows(1, 5)
        assert plant != 3

    def test_repr_and_describe_say_what_there_is(self, plant):
        assert repr(plant) == (
            "Dataset(2 sequences, 17 rows every 0.5 min, outputs=['level', 'heat'], controls=['valve'], 2.9% of outputs missing)"
        )
        assert "output  heat   -121 to 1 J, 5.9% missing" in plant.describe()
        assert "control valve  -0.99999 to 1 %" in plant.describe()
        assert "5 to 12" in plant.describe()

    def test_a_channel_named_like_the_time_column_is_not_overwritten(self):
        data = Dataset.from_arrays(np.arange(4.0), output_names=["time"], sampling_time=1.0)
        with pytest.raises(ValueError, match="a channel is called 'time' too"):
            data.to_dataframe()
        assert list(data.to_dataframe(time="clock")) == ["sequence", "clock", "time"]


class TestScaling:
    def test_training_data_become_standard(self, plant):
        scaled = np.concatenate([Scaling.of(plant).outputs(values) for values in plant.outputs])
        np.testing.assert_allclose(np.nanmean(scaled, axis=0), 0.0, atol=1e-12)
        np.testing.assert_allclose(np.nanstd(scaled, axis=0), 1.0)

    def test_densities_change_units_by_the_jacobian(self, plant):
        scaling = Scaling.of(plant)
        y = plant.outputs[0][0]
        standard = -0.5 * scaling.outputs(y) ** 2
        raw = -0.5 * ((y - scaling.output_offset) / scaling.output_scale) ** 2 - np.log(scaling.output_scale)
        np.testing.assert_allclose(standard + scaling.log_jacobian, raw)

    def test_jax_arrays_of_any_rank_are_scaled(self, plant):
        scaling = Scaling.of(plant)
        samples = jnp.ones((3, 4, 2))
        back = scaling.outputs_back(scaling.outputs(samples))
        np.testing.assert_allclose(back, samples)
        assert isinstance(back, jnp.ndarray)
        np.testing.assert_allclose(scaling.scale_back(samples)[0, 0], scaling.output_scale)
        assert scaling.controls(jnp.ones((3, 4, 1))).shape == (3, 4, 1)

    def test_constant_columns_are_refused_unless_left_as_they_are(self):
        data = Dataset.from_arrays(np.full(4, 0.1), np.arange(4.0))
        with pytest.raises(ValueError, match=r"output 'y1' is always 0.1.* nothing to model.* Leave it out"):
            Scaling.of(data)
        assert data.windows(Scaling.identity(1, 1)).outputs[0, 0, 0] == 0.1
        with pytest.raises(ValueError, match=r"control 'u1' is always 2, .*explain nothing. Leave it out"):
            Scaling.of(Dataset.from_arrays(np.arange(4.0), np.full(4, 2.0)))

    def test_values_too_large_to_square_are_refused(self):
        with pytest.raises(ValueError, match="output 'y1' reaches 1e\\+300, too large"):
            Scaling.of(Dataset.from_arrays(np.array([1e300, -1e300])))

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ([[0.0], [0.0], [], []], "output_scale must be positive"),
            ([[NAN], [1.0], [], []], "output_offset must be a vector of finite numbers"),
        ],
    )
    def test_bad_scalings_are_refused(self, arrays, message):
        with pytest.raises(ValueError, match=message):
            Scaling(*[np.array(array) for array in arrays])


class TestWindows:
    def test_padding_is_neither_real_nor_observed(self, plant):
        window = plant.windows(Scaling.of(plant))
        assert isinstance(window, Window)
        assert (window.outputs.shape, window.controls.shape) == ((2, 12, 2), (2, 12, 1))
        np.testing.assert_array_equal(window.is_real.sum(axis=1), [12, 5])
        assert not window.is_observed[1, 5:].any()
        assert not window.outputs[1, 5:].any()
        assert not window.controls[1, 5:].any()
        np.testing.assert_array_equal(window.sequence, [0, 1])
        np.testing.assert_array_equal(window.start, [0, 0])

    def test_missing_outputs_hold_zero(self, plant):
        window = plant.windows(Scaling.identity(2, 1))
        assert (bool(window.is_observed[0, 3, 1]), float(window.outputs[0, 3, 1])) == (False, 0.0)
        assert bool(window.is_observed[0, 3, 0])

    @pytest.mark.parametrize("dtype", [None, "float32", np.float64, jnp.float32])
    def test_dtype_is_the_one_asked_for(self, plant, dtype):
        window = plant.windows(Scaling.of(plant), dtype)
        assert window.outputs.dtype == window.controls.dtype == jnp.dtype(dtype or float)

    def test_without_double_precision_the_default_is_single(self, plant):
        with jax.enable_x64(False):
            assert plant.windows(Scaling.of(plant)).outputs.dtype == np.float32
            with pytest.raises(ValueError, match=r"JAX computes without float64\. Call jax.config.update"):
                plant.windows(Scaling.of(plant), np.float64)

    def test_contradictory_requests_are_refused(self, plant):
        with pytest.raises(ValueError, match="the scaling has 1 outputs and 0"):
            plant.windows(Scaling.identity(1, 0))
        with pytest.raises(ValueError, match="dtype must be a floating-point type, came int32"):
            plant.windows(Scaling.of(plant), np.int32)
        with pytest.raises(ValueError, match="too large for float32"):
            Dataset.from_arrays(np.array([1e39, 0.0])).windows(Scaling.identity(1, 0), np.float32)


class TestText:
    def test_missing_cells_become_missing_outputs(self, write):
        data = read_csv(write("y,u\n1,0\n,1\n NaN ,2\nNA,3\n5.5,4\n"), outputs=["y"], controls=["u"])
        np.testing.assert_array_equal(data.outputs[0][:, 0], [1.0, NAN, NAN, NAN, 5.5])
        np.testing.assert_array_equal(data.controls[0][:, 0], np.arange(5.0))

    @pytest.mark.parametrize(
        ("text", "options"),
        [
            (b"\xef\xbb\xbfy,u\r\n1,2\r\n3,4\r\n", {}),
            ('"y" , "u"\n1, 2\n"3" ,4\n\n\n', {}),
            ("\n\ny,u,\n1,2,\n\n3,4,\n", {}),
            ("y;u\n1,0;2,0\n3;4\n", {"separator": ";", "decimal": ","}),
            ("y|u\n1|2\n3|4", {"separator": "|"}),
            ("y,u\n1.0,2\n3,4\n".encode("utf-16"), {"encoding": "utf-16"}),
            ("u,note,y\n2,a b,1\n4,,3\n", {}),
            ("y,y,z,u\n1,1,0,2\n3,3,0,4\n".replace("y,y", "x,y"), {}),
        ],
    )
    def test_the_dialects_people_export_are_read_alike(self, write, text, options):
        data = read_csv(write(text), outputs=["y"], controls="u", **options)
        assert data == Dataset.from_arrays(np.array([1.0, 3.0]), np.array([2.0, 4.0]), output_names=["y"], control_names=["u"])

    def test_a_blank_line_in_a_lone_column_is_missing(self, write):
        data = read_csv(write("y\n1\n\n3\n\n\n"), outputs=["y"])
        np.testing.assert_array_equal(data.outputs[0][:, 0], [1.0, NAN, 3.0])

    def test_truth_values_become_numbers(self, write):
        data = read_csv(write("y,u\n1,True\n2,false\n"), outputs=["y"], controls=["u"])
        np.testing.assert_array_equal(data.controls[0][:, 0], [1.0, 0.0])

    def test_rows_of_a_sequence_need_not_lie_together(self, write):
        data = read_csv(write("run,y\nb,1\na,10\nb,2\na,20\nb,3\n"), outputs=["y"], sequence="run")
        assert data.sequence_names == ("b", "a")
        np.testing.assert_array_equal(data.outputs[0][:, 0], [1.0, 2.0, 3.0])
        np.testing.assert_array_equal(data.outputs[1][:, 0], [10.0, 20.0])

    def test_details_are_passed_on(self, write):
        data = read_csv(write("y\n1\n2\n"), "y", output_units=["bar"], sampling_time=2, time_unit="s")
        assert (data.output_units, data.sampling_time, data.time_unit) == (("bar",), 2.0, "s")

    @pytest.mark.parametrize(
        ("text", "options", "message"),
        [
            ("", {}, "the file is empty"),
            ("\n\n\n", {}, "the file is empty"),
            ("y,u\n", {}, "no rows below"),
            ("Y1,valve\n1,2\n", {"outputs": ["y1"]}, "no column 'y1'; the nearest name is 'Y1'"),
            ("temp,valve\n1,2\n", {"outputs": ["tmep"]}, "the nearest name is 'temp'. There are: 'temp', 'valve'"),
            ("y,u\n1,2\n", {"outputs": ["pressure"]}, r"no column 'pressure'\. There are"),
            ("y,u\n1,2\n", {"outputs": []}, "there are no outputs"),
            ("y,u\n1,2\n3,4\n", {"controls": ["y"]}, "'y' is named twice: as output and as control"),
            ("y,u\n1,2\n3,4\n", {"time": "y"}, "'y' is named twice: as output and as time"),
            ("y,y\n1,2\n3,4\n", {}, "2 columns are called 'y'"),
            ("y,u\n1,2\nabc,4\n", {}, "column 'y', line 3: expected a number, came 'abc'.*leave it empty"),
            ("y,u\n1,2\n\n1_0,4\n", {}, "line 4: expected a number, came '1_0'"),
            ('y,u\n1,2\n"1,5",4\n', {}, "came '1,5'.*pass decimal=','"),
            ("y,u\n1,2\n1,5,4\n", {}, "line 3 has 3 cells, but the header names 2.*decimal commas"),
            ("y,u\n1,2\n3\n", {"outputs": ["u"]}, "line 3 has 1 cells, but the header names 2"),
            ("t;y\n0,0;1,5\n", {}, "separator ',' the first line is one column, 't;y'. Pass separator=';', and decimal"),
            ("t\ty\n0\t1\n", {}, r"Pass separator='\\t'"),
            ("t,y\n0,1\n", {"separator": ";"}, "Pass separator=',' "),
            ("y;u\n1.5;2\n", {"separator": ";", "decimal": ","}, "'1.5'.*decimal mark is '.', but decimal=','"),
            ("1,2\n3,4\n", {}, "first line must name the columns, but it holds numbers: 1, 2"),
            ("y\n1\n2\n", {"separator": ", "}, "separator must be a single character"),
            ("y\n1\n2\n", {"decimal": ";"}, "decimal must be '.' or ','"),
            ("y\n1\n2\n", {"encoding": "utf-9"}, "no encoding 'utf-9'"),
            (b"temp \xb0C,y\n1,2\n2,3\n", {}, "not utf-8. Save it as UTF-8, or pass encoding"),
            ("y\n1\n\n", {}, "sequence '0' has 1 row"),
            ("y\n1\ninf\n", {}, "row 1 .*column 'y' is infinite"),
            ("y,z\n,1\n,2\n", {}, "output 'y' is missing in all 2 rows"),
            ("y,u\n1,2\n3,\n", {"controls": ["u"]}, "sequence '0', row 1 .*column 'u' is missing"),
            ("y,s\n1,a\n2,\n3,a\n", {"sequence": "s"}, "sequence column 's', line 3: the cell is empty"),
            ("y,s\n1,a\n2,a\n3,b\n", {"sequence": "s"}, "sequence 'b' has 1 row"),
        ],
    )
    def test_malformed_files_are_refused_with_the_place(self, write, text, options, message):
        path = write(text)
        with pytest.raises(ValueError, match=message) as caught:
            read_csv(path, **{"outputs": ["y"], **options})
        assert str(path) in str(caught.value)

    def test_a_missing_file_is_named_with_its_nearest(self, write):
        path = write("y\n1\n2\n")
        with pytest.raises(FileNotFoundError, match="the nearest name is 'plant\\.csv'"):
            read_csv(path.with_name("palnt.csv"), outputs=["y"])
        with pytest.raises(ValueError, match="expected a file, came a folder"):
            read_csv(path.parent, outputs=["y"])

    @settings(max_examples=200, deadline=None)
    @given(content=st.one_of(st.binary(max_size=60), st.text('y,;\n\r"1. -\t', max_size=60).map(str.encode)))
    def test_any_bytes_give_data_or_a_value_error(self, tmp_path_factory, content):
        path = tmp_path_factory.mktemp("any") / "plant.csv"
        path.write_bytes(b"y,u\n1,2\n" + content)
        with contextlib.suppress(ValueError):
            assert read_csv(path, outputs=["y"], controls=["u"]).num_rows >= 2


class TestTime:
    @pytest.mark.parametrize(
        ("times", "step", "unit"),
        [
            (["0", "0.1", "0.2", "0.3"], 0.1, ""),
            (["0", "0.033", "0.067", "0.1"], 0.1 / 3, ""),
            (["1e9", "1000000001", "1000000002", "1000000003"], 1.0, ""),
            (["2024-01-31 23:58:00", "2024-01-31 23:59:00", "2024-02-01", "2024-02-01T00:01:00Z"], 60.0, "s"),
            (["2024-03-31T01:00+01:00", "2024-03-31T03:00+02:00", "2024-03-31T02:00Z", "2024-03-31T03:00Z"], 3600, "s"),
        ],
    )
    def test_the_time_column_gives_the_sampling_time(self, write, times, step, unit):
        rows = "".join(f"{time},{i}\n" for i, time in enumerate(times))
        data = read_csv(write(f"t,y\n{rows}"), outputs=["y"], time="t")
        assert data.sampling_time == pytest.approx(step, rel=1e-9)
        assert (data.time_unit, data.lengths) == (unit, (4,))

    def test_rows_left_out_become_missing_outputs(self, write):
        data = read_csv(write("t,y,z\n0,1,1\n1,2,2\n4,3,3\n5,4,4\n"), outputs=["y", "z"], time="t")
        np.testing.assert_array_equal(data.outputs[0][:, 0], [1.0, 2.0, NAN, NAN, 3.0, 4.0])
        assert data.sampling_time == 1.0

    def test_clocks_of_sequences_run_apart(self, write):
        text = "t,y,s\n0,1,a\n7,5,b\n0.5,2,a\n7.5,6,b\n1,3,a\n"
        data = read_csv(write(text), outputs=["y"], time="t", sequence="s")
        assert (data.lengths, data.sampling_time) == ((3, 2), 0.5)

    @pytest.mark.parametrize("kind", ["datetime64[ns]", "datetime64[us]", "timedelta64[ns]", "with zone"])
    def test_pandas_times_are_seconds(self, kind):
        times = pd.Series(np.arange(4) * 250).astype("timedelta64[ms]")
        if kind == "with zone":
            times = pd.Timestamp("2024-01-01", tz="Europe/Berlin") + times
        elif kind.startswith("datetime"):
            times = (pd.Timestamp("2024-01-01") + times).astype(kind)
        frame = pd.DataFrame({"t": times, "y": np.arange(4.0)})
        data = Dataset.from_dataframe(frame, ["y"], time="t")
        assert (data.sampling_time, data.time_unit) == (0.25, "s")
        assert Dataset.from_dataframe(frame.set_index("t"), ["y"], time="t") == data

    @pytest.mark.parametrize(
        ("rows", "options", "message"),
        [
            ("0,1,0\n1,2,0\n1,3,0\n", {}, "times must increase, but 1 in line 4 comes twice"),
            ("0,1,0\n1,2,0\n0.5,3,0\n", {}, "times must increase, but 0.5 in line 4 comes after 1"),
            ("0,1,0\n1,2,0\n2.4,3,0\n", {}, "evenly spaced, but 1.4 passes after line 3, elsewhere 1"),
            ("0,1,0\n,2,0\n2,3,0\n", {}, "time column 't', line 3: expected a time, came ''"),
            ("0,1,0\nnoon,2,0\n", {}, "line 2: expected a number or an ISO 8601 timestamp"),
            ("01/02/2024,1,0\n02/02/2024,2,0\n", {}, "ISO 8601 timestamp .* came '01/02/2024'"),
            ("0,1,0\n1,2,0\n3,3,0\n", {"controls": ["u"]}, r"1 rows are left out after line 3 \(time 1\), and the controls"),
            ("0,1,0\n1,2,0\n900,3,0\n", {}, "after line 3 there is a gap of 898 steps, too long"),
            ("0,1,0\n1,2,0\n0,3,1\n2,4,1\n", {"sequence": "u"}, "'0' has a row every 1, sequence '1' every 2"),
            ("0,1,0\n1,2,0\n0,3,1\n", {"sequence": "u"}, "sequence '1' has 1 row"),
            ("0,1,0\n", {}, "sequence '0' has 1 row"),
            ("0,1,0\n1,2,0\n", {"sampling_time": 2.0}, "time and sampling_time both say"),
            ("2024-01-01,1,0\n2024-01-02,2,0\n", {"time_unit": "h"}, "holds timestamps, in s, but time_unit is 'h'"),
        ],
    )
    def test_bad_times_are_refused_with_the_place(self, write, rows, options, message):
        with pytest.raises(ValueError, match=message):
            read_csv(write("t,y,u\n" + rows), outputs=["y"], time="t", **options)


class TestDataFrames:
    def test_every_real_type_of_column_is_understood(self):
        numbers = [1, 2, 3]
        frame = pd.DataFrame(
            {
                "int": numbers,
                "nullable": pd.array([1, None, 3], dtype="Int64"),
                "arrow": pd.array([1.0, None, 3.0], dtype="double[pyarrow]"),
                "bool": [True, False, True],
                "decimal": [decimal.Decimal(1), None, decimal.Decimal(3)],
                "text": ["1", None, " 3 "],
                "category": pd.Categorical([1, 2, 3]),
            }
        )
        data = Dataset.from_dataframe(frame, list(frame))
        for name, values in zip(data.output_names, data.outputs[0].T, strict=True):
            middle = {"int": 2.0, "category": 2.0, "bool": 0.0}.get(name, NAN)
            last = 1.0 if name == "bool" else 3.0
            np.testing.assert_array_equal(values, [1.0, middle, last])

    @pytest.mark.parametrize(
        ("column", "message"),
        [
            (np.array([1j, 2j]), "column 'y' must hold real numbers, came complex128"),
            (pd.date_range("2024-01-01", periods=2), "must hold real numbers, came datetime64"),
            ([object(), 1], r"column 'y', row 0 \(the first is 0\): expected a number, came <object"),
            ([1, 10**400], "row 1 .*expected a number"),
        ],
    )
    def test_columns_that_hold_no_real_numbers_are_refused(self, column, message):
        with pytest.raises(ValueError, match=message):
            Dataset.from_dataframe(pd.DataFrame({"y": column}), ["y"])

    def test_rows_are_named_by_a_named_index(self):
        frame = pd.DataFrame({"y": [1, "x"]}, index=pd.Index([10, 20], name="batch"))
        with pytest.raises(ValueError, match="batch 20: expected a number, came 'x'"):
            Dataset.from_dataframe(frame, ["y"])

    def test_labels_need_not_be_text(self):
        data = Dataset.from_dataframe(pd.DataFrame(np.eye(3)), outputs=[0, 2], controls=1)
        assert (data.output_names, data.control_names) == (("0", "2"), ("1",))


class TestBinaryFiles:
    def test_parquet_round_trips(self, plant, tmp_path):
        path = tmp_path / "plant.parquet"
        plant.to_dataframe().to_parquet(path)
        units = {"output_units": ["m", "J"], "control_units": ["%"], "time_unit": "min"}
        again = read_parquet(path, ["level", "heat"], ["valve"], sequence="sequence", time="time", **units)
        assert again == plant

    def test_matlab_vectors_and_matrices_are_columns(self, tmp_path):
        path = tmp_path / "plant.mat"
        y = np.arange(8.0).reshape(4, 2)
        scipy.io.savemat(path, {"y": y, "u": np.arange(4), "Ts": 0.5, "name": "tank", "s": {"y": 1}, "long": np.eye(9)})
        data = read_mat(path, outputs=["y"], controls=["u"], sampling_time=0.5)
        assert (data.output_names, data.control_names) == (("y1", "y2"), ("u",))
        np.testing.assert_array_equal(data.outputs[0], y)
        np.testing.assert_array_equal(data.controls[0][:, 0], np.arange(4.0))
        for outputs, message in [
            (["Y"], "no variable 'Y'; the nearest name is 'y'"),
            (["name"], "the variable 'name' must be a real vector"),
            (["s"], "the variable 's' must be a real vector"),
            (["u", "long"], "equally many rows, came u: 4, long1: 9"),
        ]:
            with pytest.raises(ValueError, match=message):
                read_mat(path, outputs=outputs)

    def test_matlab_seven_three_is_explained(self, write):
        header = b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\x00\x02IM" + bytes(64)
        with pytest.raises(ValueError, match=r"v7\.3 files cannot be read\. Save it as v7"):
            read_mat(write(header, "plant.mat"), outputs=["y"])

    @pytest.mark.parametrize("content", [b"", b"y,u\n1,2\n", b"PAR1" + bytes(20)])
    def test_damaged_files_are_refused(self, write, content):
        with pytest.raises(ValueError, match="cannot be read as a MATLAB file"):
            read_mat(write(content, "plant.mat"), outputs=["y"])
        with pytest.raises(ValueError, match="cannot be read as Parquet"):
            read_parquet(write(content, "plant.parquet"), outputs=["y"])

    def test_read_table_goes_by_the_suffix(self, plant, tmp_path):
        frame = plant.to_dataframe()
        frame.to_csv(tmp_path / "plant.csv", index=False)
        frame.to_csv(tmp_path / "plant.TSV", index=False, sep="\t")
        frame.to_parquet(tmp_path / "plant.parquet")
        scipy.io.savemat(tmp_path / "plant.mat", {n: frame[n][:12].to_numpy(float) for n in ("level", "heat", "valve")})
        columns = {"outputs": ["level", "heat"], "controls": ["valve"]}
        read = [
            read_table(tmp_path / name, **columns, sequence="sequence", time="time")
            for name in ("plant.csv", "plant.TSV", "plant.parquet")
        ]
        assert read[0] == read[1] == read[2]
        day = read_table(tmp_path / "plant.mat", **columns)
        np.testing.assert_array_equal(day.outputs[0], plant.outputs[0])
        with pytest.raises(ValueError, match=r"expected the ending \.csv, .* came '\.xlsx'\. Rename it, or save"):
            read_table(tmp_path / "plant.xlsx", **columns)


numbers = st.floats(-1e6, 1e6, width=32)


@st.composite
def dataset_arguments(draw) -> dict:
    """What `Dataset.from_arrays` takes, for one to three sequences of up to eight rows with missing outputs.

    The dataset itself is made in the test, because beartype draws random numbers, which a strategy may not.
    """
    num_outputs, num_controls = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    lengths = draw(st.lists(st.integers(5, 8), min_size=1, max_size=3))
    outputs = [draw(hnp.arrays(float, (n, num_outputs), elements=numbers | st.just(NAN))) for n in lengths]
    outputs[0][0], outputs[0][1] = 1.0, 2.0
    controls = [draw(hnp.arrays(float, (n, num_controls), elements=numbers)) for n in lengths]
    sampling_time = draw(st.none() | st.floats(1e-3, 1e3))
    return {"outputs": outputs, "controls": controls if num_controls else None, "sampling_time": sampling_time}


class TestProperties:
    @settings(deadline=None)
    @given(arguments=dataset_arguments())
    def test_a_dataframe_gives_the_dataset_back(self, arguments):
        data = Dataset.from_arrays(**arguments)
        time = None if data.sampling_time is None else "time"
        again = Dataset.from_dataframe(data.to_dataframe(), data.output_names, data.control_names, "sequence", time)
        assert again == data

    @settings(deadline=None)
    @given(arguments=dataset_arguments(), fraction=st.floats(0.4, 0.6))
    def test_the_parts_of_a_split_join_to_the_whole(self, arguments, fraction):
        data = Dataset.from_arrays(**arguments)
        train, test = data.split(fraction)
        for kind in ("outputs", "controls"):
            for before, after, whole in zip(*(getattr(d, kind) for d in (train, test, data)), strict=True):
                np.testing.assert_array_equal(np.concatenate([before, after]), whole)

    @settings(deadline=None)
    @given(arguments=dataset_arguments())
    def test_scaling_goes_there_and_back(self, arguments):
        data = Dataset.from_arrays(arguments["outputs"])
        scaling = Scaling.of(data)
        for values in data.outputs:
            np.testing.assert_allclose(scaling.outputs_back(scaling.outputs(values)), values, rtol=1e-9, atol=1e-6)

    @settings(deadline=None, max_examples=30)
    @given(arguments=dataset_arguments())
    def test_masks_agree_with_missing_values(self, arguments):
        data = Dataset.from_arrays(**arguments)
        window = data.windows(Scaling.identity(data.num_outputs, data.num_controls))
        for i, values in enumerate(data.outputs):
            np.testing.assert_array_equal(window.is_observed[i, : len(values)], ~np.isnan(values))
            np.testing.assert_array_equal(window.outputs[i, : len(values)], np.nan_to_num(values))
            np.testing.assert_array_equal(window.is_real[i], np.arange(data.max_length) < len(values))
            assert not window.is_observed[i, len(values) :].any()
