"""Draws one step, measured above simulated, on one scale: SVG, PNG or HTML for people, Chrome trace for tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.step_report import StepReport
from d9d_lightning.schedule import ActionKind, parse_action
from d9d_lightning.schedule.raster import draw_png

__all__ = ["PICTURES", "chrome_trace", "draw_html", "draw_svg", "write_step"]

PICTURES = (".svg", ".png", ".html")

_COLORS = {
    ActionKind.F: "#7aa6da",
    ActionKind.B: "#7fbf7b",
    ActionKind.I: "#a6d96a",
    ActionKind.W: "#fdae61",
    ActionKind.OVERLAP: "#b39ddb",
}
_WAIT_COLOR = "#e8e8e8"
_WIDTH, _ROW, _LEFT, _GAP = 1200, 22, 90, 34

Bar = tuple[int, str, float, float, float]
"""Rank, action, start, end, wait at its beginning; seconds since the start of the step."""


def draw_svg(report: StepReport) -> str:
    """The measured and the simulated timeline of every rank, one under the other."""
    num_ranks = len(report.ranks)
    whole = max(report.span, report.simulation.span, 1e-12)
    scale = (_WIDTH - _LEFT - 10) / whole
    height = 2 * (num_ranks * _ROW + _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    halves = (
        (f"measured: {report.span * 1e3:.2f} ms, bubble {report.bubble:.1%}", _measured(report)),
        (
            f"simulated: {report.simulation.span * 1e3:.2f} ms, bubble {report.simulation.bubble_rate:.1%}",
            _simulated(report),
        ),
    )
    for number, (title, bars) in enumerate(halves):
        top = number * (num_ranks * _ROW + _GAP) + 24
        parts.append(f'<text x="{_LEFT}" y="{top - 8}" font-size="13">{escape(title)}</text>')
        parts += [f'<text x="8" y="{top + rank * _ROW + 14}">rank {rank}</text>' for rank in range(num_ranks)]
        for bar in bars:
            parts += _draw_bar(bar, top, scale)
    return "\n".join([*parts, "</svg>", ""])


def chrome_trace(report: StepReport) -> dict[str, Any]:
    """The same as a Chrome trace: one process each for measured and simulated, one thread for each rank."""
    events: list[dict[str, Any]] = []
    for process, (name, bars) in enumerate((("measured", _measured(report)), ("simulated", _simulated(report)))):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        events += [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": process,
                "tid": figures.rank,
                "args": {"name": f"rank {figures.rank}"},
            }
            for figures in report.ranks
        ]
        for rank, action, start, end, wait in bars:
            place = {"ph": "X", "pid": process, "tid": rank}
            if wait > 0:
                events.append({**place, "name": "wait", "cat": "wait", "ts": start * 1e6, "dur": wait * 1e6})
            work = {"ts": (start + wait) * 1e6, "dur": (end - start - wait) * 1e6}
            events.append({**place, "name": action, "cat": parse_action(action).kind.name, **work})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw_html(report: StepReport) -> str:
    """A page with the picture of :func:`draw_svg` and the table of the report."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>one step</title></head>\n<body>\n'
        f"{draw_svg(report)}<pre>{escape(report.text())}</pre>\n</body></html>\n"
    )


def write_step(report: StepReport, path: str | Path) -> None:
    """Write the picture, and the Chrome trace beside it with ``.json``.

    Args:
        report: The step.
        path: Ends with ``.svg``, ``.png`` or ``.html``.

    Raises:
        PipelineConfigurationError: Another ending.
    """
    path = Path(path)
    if path.suffix not in PICTURES:
        raise PipelineConfigurationError(
            f"a step cannot be drawn as {path.name!r}; expected a name that ends with {', '.join(PICTURES)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        path.write_bytes(draw_png(draw_svg(report)))
    else:
        path.write_text(draw_svg(report) if path.suffix == ".svg" else draw_html(report), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(chrome_trace(report)), encoding="utf-8")


def _measured(report: StepReport) -> Iterator[Bar]:
    begin = min(record.spans[0].start for record in report.records if record.spans)
    for record in report.records:
        for span in record.spans:
            if parse_action(span.action).kind.is_compute:
                yield record.rank, span.action, span.start - begin, span.end - begin, span.wait


def _simulated(report: StepReport) -> Iterator[Bar]:
    for rank, action, start, end in report.simulation.timeline:
        yield rank, str(action), start - report.simulation.begin, end - report.simulation.begin, 0.0


def _draw_bar(bar: Bar, top: float, scale: float) -> Iterator[str]:
    rank, action, start, end, wait = bar
    y = top + rank * _ROW
    x, begin, stop = (_LEFT + at * scale for at in (start, start + wait, end))
    if wait > 0:
        yield f'<rect x="{x:.1f}" y="{y}" width="{begin - x:.1f}" height="{_ROW - 4}" fill="{_WAIT_COLOR}"/>'
    color = _COLORS[parse_action(action).kind]
    label = f"{action}: {(end - start - wait) * 1e3:.3f} ms"
    yield (
        f'<rect x="{begin:.1f}" y="{y}" width="{max(stop - begin, 0.5):.1f}" height="{_ROW - 4}" fill="{color}" '
        f'stroke="#555" stroke-width="0.4"><title>{escape(label)}</title></rect>'
    )
    if stop - begin > 7 * len(action):
        yield f'<text x="{begin + 2:.1f}" y="{y + 12}">{escape(action)}</text>'
