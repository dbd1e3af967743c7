"""Named benchmark data: where each file comes from, what its columns are, and that its bytes are the right ones.

Real data are looked for in the folder named by GPSSM_DATA, then in the cache (GPSSM_CACHE, or gpssm in XDG_CACHE_HOME or
~/.cache), and are downloaded into the cache at last; every time the SHA-256 is checked. The simulators of
`gpssm.simulators` can be had from here too.
"""

import hashlib
import os
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.io
from jaxtyping import Float

from gpssm.data import Dataset
from gpssm.simulators import Simulation, cart_pole, coupled_tanks, kink, pendulum, van_der_pol

__all__ = [
    "BENCHMARKS",
    "Benchmark",
    "Simulation",
    "benchmark",
    "cart_pole",
    "coupled_tanks",
    "kink",
    "load",
    "names",
    "pendulum",
    "van_der_pol",
]

SOURCE = (
    "https://raw.githubusercontent.com/zhenwendai/RGP/be679607d3457a1038a2fe39b36b816ea380ea39/datasets/system_identification/"
)
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Benchmark:
    """One input-output recording: its origin, its columns, and the split that the literature uses.

    `output` and `control` are a variable of a .mat file or a column of a table. An empty unit is one that the source does
    not tell; `sampling_time` None likewise.
    """

    name: str
    title: str
    description: str
    source: str
    file: str
    sha256: str
    output: str | int
    control: str | int
    output_name: str
    control_name: str
    output_unit: str = ""
    control_unit: str = ""
    sampling_time: float | None = None
    time_unit: str = ""
    train_fraction: float = 0.5  # the paper's split: the first half trains

    @property
    def url(self) -> str:
        return SOURCE + self.file

    def load(self) -> Dataset:
        """The whole recording, one sequence, in the units of the file."""
        path = _find(self)
        return Dataset.from_arrays(
            [_column(path, self.output)],
            [_column(path, self.control)],
            output_names=(self.output_name,),
            control_names=(self.control_name,),
            output_units=(self.output_unit,),
            control_units=(self.control_unit,),
            sequence_names=(self.name,),
            sampling_time=self.sampling_time,
            time_unit=self.time_unit,
        )

    def split(self) -> tuple[Dataset, Dataset]:
        """(train, test) as in the literature: the first half trains."""
        return self.load().split(self.train_fraction)


_DAISY = "DaISy, the identification database of KU Leuven (De Moor et al. 1997)"
BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="actuator",
            title="Hydraulic actuator",
            description=(
                "Oil pressure in the actuator of a crane's robot arm against the opening of its valve; 1024 rows. The "
                "pressure oscillates because of the arm."
            ),
            source="Sjoberg et al., Nonlinear black-box modeling in system identification: a unified overview, 1995",
            file="actuator.mat",
            sha256="35d1f95176afd856eb4fe0e2f87e3dff39657db8e6fcf7c531078c8f4eb571e4",
            output="p",
            control="u",
            output_name="oil_pressure",
            control_name="valve_position",
        ),
        Benchmark(
            name="ballbeam",
            title="Ball and beam",
            description=(
                "Position of a ball that rolls on a beam against the beam's angle; 1000 rows. Close to a double "
                "integrator, with dry friction and a coarse sensor."
            ),
            source=f"{_DAISY}, 96-004",
            file="ballbeam.dat",
            sha256="e9c48a4f7474953969d4950b4ef72558084b1995f776792ac0cbc80550e6ff42",
            output=1,
            control=0,
            output_name="ball_position",
            control_name="beam_angle",
            sampling_time=0.1,
            time_unit="s",
        ),
        Benchmark(
            name="drive",
            title="Coupled electric drives",
            description=(
                "Speed of the pulley of a belt between two motors against their common voltage, a random binary signal; "
                "first of three recordings (u1, z1), 500 rows. The sensor does not see the sign of the speed."
            ),
            source="Wigren and Schoukens, Coupled electric drives data set and reference models, Uppsala 2017",
            file="drive.mat",
            sha256="47d0825678d854d8a1bbcfb0ad1188026b853f69beb2067ea00cfd88d13dc4ca",
            output="z1",
            control="u1",
            output_name="pulley_speed",
            control_name="motor_voltage",
            control_unit="V",
            sampling_time=0.02,
            time_unit="s",
        ),
        Benchmark(
            name="dryer",
            title="Hair dryer",
            description=(
                "Temperature of the air that leaves a heated tube against the voltage over the heater; 1000 rows. Close "
                "to linear, with a dead time of a few rows."
            ),
            source=f"{_DAISY}, 96-006; Ljung, System Identification, 1987",
            file="dryer.dat",
            sha256="adcb2f5a1d9e174d08dd49f7f037626745b5e69cbda0bc1e8dca2a7c687d4538",
            output=1,
            control=0,
            output_name="air_temperature",
            control_name="heater_voltage",
            control_unit="V",
            sampling_time=0.08,
            time_unit="s",
        ),
        Benchmark(
            name="gas_furnace",
            title="Gas furnace",
            description=(
                "CO2 in the gas that leaves a furnace against the (coded) rate of methane fed to it; 296 rows. The second "
                "half is livelier than the first."
            ),
            source="Box and Jenkins, Time Series Analysis: Forecasting and Control, 1970, series J",
            file="gas_furnace.csv",
            sha256="ce46e11490a11ac254a959d42d5858f66b3c8013a1b667e553b3d890c67e4d43",
            output=1,
            control=0,
            output_name="co2",
            control_name="gas_rate",
            output_unit="%",
            sampling_time=9.0,
            time_unit="s",
        ),
    )
}


def names() -> tuple[str, ...]:
    """What `load` and `benchmark` know."""
    return tuple(BENCHMARKS)


def benchmark(name: str) -> Benchmark:
    """The record of a benchmark: title, source, columns, units, checksum, split."""
    if name not in BENCHMARKS:
        raise ValueError(f"there is no dataset {name!r}; choose one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def load(name: str) -> Dataset:
    """A benchmark by name, downloaded on first use; `train, test = load("dryer").split(0.5)` is the paper's split."""
    return benchmark(name).load()


def cache_folder() -> Path:
    """Where downloads are kept."""
    if os.environ.get("GPSSM_CACHE"):
        return Path(os.environ["GPSSM_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "gpssm"


def _find(wanted: Benchmark) -> Path:
    folders = [Path(os.environ["GPSSM_DATA"]).expanduser()] if os.environ.get("GPSSM_DATA") else []
    for folder in (*folders, cache_folder()):
        path = folder / wanted.file
        if path.is_file():
            _check(path.read_bytes(), wanted, str(path), "remove or replace that file")
            return path
    return _download(wanted, cache_folder() / wanted.file)


def _check(content: bytes, wanted: Benchmark, place: str, remedy: str) -> None:
    came = hashlib.sha256(content).hexdigest()
    if came != wanted.sha256:
        raise ValueError(f"{place} has SHA-256 {came}, expected {wanted.sha256} for {wanted.name!r}: {remedy}")


def _download(wanted: Benchmark, path: Path) -> Path:
    try:
        with urllib.request.urlopen(wanted.url, timeout=_TIMEOUT_SECONDS) as response:
            content = response.read()
    except OSError as error:  # URLError, HTTPError, time-outs and refused connections are all OSErrors
        folder = os.environ.get("GPSSM_DATA")
        looked = f"in {folder} (GPSSM_DATA)" if folder else "in a folder of yours, as GPSSM_DATA is not set,"
        raise FileNotFoundError(
            f"{wanted.file} is neither {looked} nor in the cache {path.parent}, and its download failed ({error}). "
            f"Either put it into a folder and set GPSSM_DATA to that folder, or connect to the network so that it can "
            f"be fetched from {wanted.url}"
        ) from error
    _check(content, wanted, wanted.url, "nothing was stored; the download was cut or the source has changed")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)  # whole or not at all, whoever else is downloading
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path


def _column(path: Path, which: str | int) -> Float[np.ndarray, "time 1"]:
    if path.suffix == ".mat":
        return scipy.io.loadmat(path, variable_names=[which])[which].astype(float).reshape(-1, 1)
    is_csv = path.suffix == ".csv"
    return np.loadtxt(path, delimiter="," if is_csv else None, skiprows=int(is_csv), usecols=int(which), ndmin=2)
