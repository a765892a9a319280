"""The drawing of `--plot FILE.png`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from mpi_tp.bench.report import Row
from mpi_tp.errors import ConfigurationError


@dataclass(frozen=True)
class Chart:
    """Which columns are drawn: a line for each of `y`, and for each value of the column `series`, over `x`."""

    x: str
    y: tuple[str, ...]
    series: str | None = None
    logarithmic: bool = False


def load_pyplot() -> Any:
    """Return matplotlib's pyplot, which needs no screen here. Raises ConfigurationError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigurationError(f'--plot needs matplotlib ({error}): pip install "mpi-tp[plot]"') from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw(pyplot: Any, chart: Chart, title: str, rows: Sequence[Row], stream: BinaryIO) -> None:
    """Write the drawing as PNG; columns in which nothing was measured are left out."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for label, x, y in lines(chart, rows):
        axes.plot(x, y, marker="o", label=label)
    if chart.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set(title=title, xlabel=chart.x, ylabel=", ".join(chart.y))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(stream, format="png", dpi=150)
    pyplot.close(figure)


def lines(chart: Chart, rows: Sequence[Row]) -> list[tuple[str, list[Any], list[Any]]]:
    """Return label, x and y of every line."""
    names = dict.fromkeys(row[chart.series] if chart.series else None for row in rows)
    found = []
    for name in names:
        of_name = [row for row in rows if chart.series is None or row[chart.series] == name]
        for column in chart.y:
            points = [row for row in of_name if row[column] is not None]
            if chart.logarithmic:  # a model's own sizes come after the round ones
                points.sort(key=lambda row: row[chart.x])
            if points:
                label = column if name is None else f"{name}, {column}"
                found.append((label, [row[chart.x] for row in points], [row[column] for row in points]))
    return found
