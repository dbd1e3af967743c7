"""Rivals in time to accuracy: a GRU in PyTorch that forecasts a horizon, as one would write it, beside the linear baselines."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpssm.baselines.base import AbstractBaseline, gaussian, standard_controls, standard_outputs, standardised
from gpssm.data import Dataset, Scaling
from gpssm.forecasts import Forecast

CONTEXT, HORIZON, BATCH, HIDDEN = 30, 30, 32, 32


class GRU(AbstractBaseline):
    """Reads the past, then goes on from its own means; trained on the log density of whole horizons."""

    def __init__(self, scaling: Scaling, network: "Network"):
        self.scaling, self.network = scaling, network

    @classmethod
    def fit(cls, train: Dataset, *, seed: int, seconds: float) -> "GRU":
        """As many Adam steps as there is time for, on random windows of one sequence."""
        torch.manual_seed(seed)
        rng, scaling = np.random.default_rng(seed), Scaling.of(train)
        outputs, controls = standard_outputs(scaling, train)[0], standard_controls(scaling, train)[0]
        network = Network(outputs.shape[1], controls.shape[1])
        optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            first = rng.integers(0, len(outputs) - CONTEXT - HORIZON + 1, BATCH)
            rows = first[:, None] + np.arange(CONTEXT + HORIZON)
            past, plan, later = outputs[rows[:, :CONTEXT]], controls[rows[:, :-1]], outputs[rows[:, CONTEXT:]]
            mean, scale = network(_tensor(past), _tensor(plan), HORIZON)
            loss = -torch.distributions.Normal(mean, scale).log_prob(_tensor(later)).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
        return cls(scaling, network)

    def forecasts(self, data: Dataset, origins: Sequence[int], steps: int, *, key: Any) -> list[Forecast]:
        outputs, controls = standardised(self.scaling, data, origins, steps)
        rows = np.asarray(origins)[:, None] + np.arange(-CONTEXT, steps)
        with torch.no_grad():
            mean, scale = self.network(_tensor(outputs[rows[:, :CONTEXT]]), _tensor(controls[rows[:, :-1]]), steps)
        moments = zip(origins, mean.numpy().astype(float), scale.numpy().astype(float), strict=True)
        return [gaussian(self.scaling, data, o, m, s[:, :, None] ** 2 * np.eye(s.shape[1])) for o, m, s in moments]


class Network(torch.nn.Module):
    """One recurrent cell and a head for mean and scale."""

    def __init__(self, num_outputs: int, num_controls: int):
        super().__init__()
        self.cell = torch.nn.GRUCell(num_outputs + num_controls, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, 2 * num_outputs)

    def forward(self, past: torch.Tensor, plan: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Means and scales [window, step, output] after `past`, under the controls of all rows but the last."""
        hidden, last, means, scales = torch.zeros(len(past), HIDDEN), past[:, 0], [], []
        for row in range(past.shape[1] + steps - 1):
            last = past[:, row] if row < past.shape[1] else last
            hidden = self.cell(torch.cat([last, plan[:, row]], dim=1), hidden)
            change, raw = self.head(hidden).chunk(2, dim=1)
            last = last + change
            if row >= past.shape[1] - 1:
                means.append(last)
                scales.append(torch.nn.functional.softplus(raw) + 1e-3)
        return torch.stack(means, dim=1), torch.stack(scales, dim=1)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float32)
