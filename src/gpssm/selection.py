"""A selection that ends in a run: candidates ranked on the training part, the winner fitted and scored in the same folder.

    RUN/selection/config.toml   what was asked            RUN/selection/ranking/          every fit and score, to go on from
    RUN/data/                   the whole data            RUN/selection/candidates.csv    the table

Until the ranking is done there is no status.json, so the folder is no run yet. The held-out part is seen by the winner alone.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.random as jr

from gpssm import config as configuration
from gpssm.atomic import present_folder, write_atomically
from gpssm.config import Config
from gpssm.data import Dataset
from gpssm.initialise import StartSettings
from gpssm.progress import Report
from gpssm.run import KEY_FIT, SELECTION, Run, Say, candidate_builder, carry_out, check_agrees, claimed, training_part, withdraw
from gpssm.save import load, save
from gpssm.select import Ranking, SelectSettings, default_candidates, rank, start_grid


def is_begun(folder: Path) -> bool:
    """Whether a selection was begun in the folder, finished or not."""
    return (folder / SELECTION / "config.toml").is_file()


def asked(folder: Path) -> tuple[Config, Dataset]:
    """What a selection in the folder was asked to choose for."""
    return configuration.read(folder / SELECTION / "config.toml"), load(folder / "data")


def carry_out_selection(
    folder: Path, config: Config, data: Dataset, *, progress: bool | Report = False, say: Say = lambda line: None
) -> tuple[Run, Ranking]:
    """Rank the candidates of `config` on the training part of `data`, and carry out the run of the best; goes on if begun."""
    with claimed(folder) as path:
        _begin(path, config, data)
        train, _ = training_part(config, data)
        try:
            ranking = rank(
                train,
                candidates(config, train),
                key=jr.fold_in(jr.key(config.seed), KEY_FIT),
                settings=select_settings(config),
                fit_settings=config.fit,
                checkpoint=path / SELECTION / "ranking",
                say=say,
                build=candidate_builder(config),
            )
        except ValueError:  # candidates that do not suit the data, as it turns out
            if not (path / SELECTION / "ranking" / "fits").is_dir():
                shutil.rmtree(path / SELECTION)
                withdraw(path)
            raise
        write_atomically(path / SELECTION / "candidates.csv", ranking.table.to_csv(index=False).encode())
    say(f"chosen: {ranking.best}; fitting it to all {train.num_rows} rows of the training part")
    chosen = replace(config.fit, process_factor=ranking.process_factor * config.fit.process_factor)
    winner = replace(config, start=ranking.candidates[ranking.best], fit=chosen)
    return carry_out(folder, winner, data, resume=True, progress=progress, say=say), ranking


def candidates(config: Config, train: Dataset) -> dict[str, StartSettings]:
    """Every combination of the lists in [select]; where there are none, the default ones around [start]."""
    choices = config.select.choices()
    return start_grid(config.start, **choices) if choices else default_candidates(train, config.start)


def select_settings(config: Config) -> SelectSettings:
    """The settings of a selection for the forecasts that [forecast] tells of."""
    asked, forecast = config.select, config.forecast
    return SelectSettings(
        asked.by,
        asked.validation_fraction,
        asked.num_blocks,
        horizon=forecast.horizon,
        stride=forecast.stride,
        num_samples=forecast.num_samples,
    )


def to_dict(ranking: Ranking) -> dict[str, Any]:
    """The ranking for JSON: every candidate's scores on the validation rows, in standardised units and raw, and the table."""
    scores = ranking.evaluation.to_dict() if ranking.evaluation is not None else {}
    rows = ranking.table.drop(columns="weight")
    return scores | {"best": ranking.best, "table": rows.astype(object).where(rows.notna(), None).to_dict(orient="records")}


def _begin(path: Path, config: Config, data: Dataset) -> None:
    kept = path / SELECTION / "config.toml"
    if not kept.is_file():
        save(path / "data", data)
        write_atomically(kept, configuration.to_toml(config).encode())
        return
    check_agrees(path, configuration.read(kept), config, verb="select")
    if present_folder(path / "data").is_dir() and load(path / "data") != data:
        raise ValueError(f"{path} holds a selection for other data. Go on with its own, or choose another --out.")
