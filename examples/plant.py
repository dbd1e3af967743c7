"""Make `plant.csv`: a simulated water tank, the data of the README and of the documentation.

Hot water flows in through a valve, and a sensor that lags sees the temperature, with noise and gaps. Two things about it are
not linear: the valve opens slowly and then fast, and hot water heats a warm tank less than a cold one.
Run `python examples/plant.py`.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

AMBIENT, HOT = 15.0, 80.0  # degrees Celsius
SENSOR_NOISE = 0.3


def simulate(num_rows: int, seed: int) -> pd.DataFrame:
    """One row every ten seconds: the opening of the valve in percent, and the temperature that the sensor shows."""
    rng = np.random.default_rng(seed)
    valve = np.empty(num_rows)
    row = 0
    while row < num_rows:  # an operator who moves the valve now and then
        stay = int(rng.integers(6, 18))
        valve[row : row + stay] = rng.uniform(0, 100)
        row += stay
    inflow = 0.4 * (np.exp(4 * valve / 100) - 1) / (np.exp(4) - 1)
    water = sensor = 40.0
    shown = np.empty(num_rows)
    for t in range(num_rows):
        shown[t] = sensor + SENSOR_NOISE * rng.normal()
        water, sensor = (
            water + inflow[t] * (HOT - water) - 0.06 * (water - AMBIENT) + 0.2 * rng.normal(),
            sensor + 0.5 * (water - sensor),
        )
    shown[rng.random(num_rows) < 0.04] = np.nan
    lost = num_rows // 3
    shown[lost : lost + 8] = np.nan  # the sensor is cleaned
    seconds = 10 * np.arange(num_rows)
    return pd.DataFrame({"time": seconds, "valve": valve.round(1), "temperature": shown.round(2)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("plant.csv"))
    options = parser.parse_args()
    simulate(options.rows, options.seed).to_csv(options.out, index=False)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
