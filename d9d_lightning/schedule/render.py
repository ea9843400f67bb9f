"""Timelines to look at: text for a terminal, SVG and HTML in colour."""

from __future__ import annotations

import html

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase, ActionKind
from d9d_lightning.schedule.simulate import Simulation

__all__ = ["draw_compact", "draw_html", "draw_svg", "draw_text", "summarize"]

_MOST_COLUMNS = 1000
_LETTERS = {ActionKind.F: "F", ActionKind.B: "B", ActionKind.I: "I", ActionKind.W: "W"}


def draw_text(simulation: Simulation, width: int | None = None) -> str:
    """One row per rank, one column per tick.

    Letters are forward (F), full backward (B), input gradient (I), weight gradient (W) and overlapped pair (&), each
    with its microbatch; lower case letters belong to the upper stage of a rank with several.

    Args:
        simulation: What to draw.
        width: Columns to use at most; by default a column for each whole unit of time where that is exact.
    """
    unit = _tick(simulation, width)
    columns = round(simulation.span / unit)
    cell = max(len(_label(simulation, rank, action)) for rank, action, _, _ in simulation.timeline) + 1
    lines = []
    for rank in range(simulation.program.pp_size):
        row = ["." + " " * (cell - 1)] * columns
        for owner, action, start, end in simulation.timeline:
            if owner == rank:
                first, last = (round((time - simulation.begin) / unit) for time in (start, end))
                label = _label(simulation, rank, action)
                for column in range(first, min(last, columns)):
                    row[column] = (label if column == first else "-" * len(label)).ljust(cell)
        lines.append(f"{rank}| " + "".join(row).rstrip())
    return "\n".join(lines) + "\n"


def draw_compact(simulation: Simulation) -> str:
    """Two short rows per rank, one character per tick: letters as in :func:`draw_text`, below them last digits of
    microbatches."""
    unit = _tick(simulation, None)
    columns = round(simulation.span / unit)
    lines = []
    for rank in range(simulation.program.pp_size):
        letters, digits = ["."] * columns, [" "] * columns
        for owner, action, start, end in simulation.timeline:
            if owner == rank:
                first, last = (round((time - simulation.begin) / unit) for time in (start, end))
                letters[first:last] = ["-"] * (last - first)
                for column, part in zip(range(first, last), action.parts, strict=False):
                    label = _label(simulation, rank, part)
                    letters[column], digits[column] = label[0], label[-1]
        lines += [f"{rank} {''.join(letters)}", f"  {''.join(digits)}".rstrip()]
    return "\n".join(lines) + "\n"


def summarize(simulation: Simulation) -> str:
    """Bubble of the whole, and work, idle time and memory of each rank."""
    lines = [
        f"span {simulation.span:g} (bubble {simulation.bubble_rate:.1%}), without a barrier "
        f"{simulation.cost:g} (bubble {simulation.bubble_rate_without_barrier:.1%})",
        "rank  work      idle: head   inner    tail    peak (stage activations)",
    ]
    for rank, (work, idle, peak) in enumerate(
        zip(simulation.work, simulation.idle, simulation.peak_activations, strict=True)
    ):
        lines.append(f"{rank:4d}  {work:<9.4g} {idle.head:10.4g} {idle.inner:7.4g} {idle.tail:7.4g}    {peak:.4g}")
    return "\n".join(lines) + "\n"


def _tick(simulation: Simulation, width: int | None) -> float:
    """Time of one column."""
    durations = {round(end - start, 9) for _, _, start, end in simulation.timeline if end > start}
    if not durations:
        raise ScheduleError("there is nothing to draw: every action takes no time; give costs above 0")
    shortest = min(durations)
    exact = all(abs(d / shortest - round(d / shortest)) < 1e-6 for d in durations)
    return max(shortest if exact else shortest / 2, simulation.span / (width or _MOST_COLUMNS))


def _label(simulation: Simulation, rank: int, action: ActionBase) -> str:
    if action.kind is ActionKind.OVERLAP:
        return "&".join(_label(simulation, rank, part) for part in action.parts)
    letter = _LETTERS[action.kind]
    upper = action.stage != simulation.program.stages_of_rank[rank][0]
    return f"{letter.lower() if upper else letter}{action.microbatch}"


# Blue for forwards, orange for backwards, green for weight gradients; the upper stage of a rank is paler. The hues stay
# apart for colour-blind readers, and every box carries its letter.
_COLOURS = {
    ActionKind.F: ("#4c8bc9", "#a9cbe8"),
    ActionKind.B: ("#d9822b", "#f2bf8b"),
    ActionKind.I: ("#e39a3b", "#f6d09b"),
    ActionKind.W: ("#4a9d6a", "#a8d5b8"),
    ActionKind.OVERLAP: ("#8a6bbe", "#c6b5e3"),
}
_MEANINGS = {
    ActionKind.F: "F forward",
    ActionKind.B: "B full backward",
    ActionKind.I: "I input gradient",
    ActionKind.W: "W weight gradient",
    ActionKind.OVERLAP: "F&B overlapped",
}
_ROW, _LEFT, _TOP, _WIDTH, _RIGHT = 26, 64, 48, 1100, 110


def draw_svg(simulation: Simulation, title: str = "") -> str:
    """The timeline as a picture with a legend, bubble and peak memory of each rank.

    Args:
        simulation: What to draw.
        title: Heading; the name of the schedule by default.
    """
    program = simulation.program
    scale = _WIDTH / simulation.span
    height = _TOP + _ROW * program.pp_size + 34
    heading = title or f"{program.name}: {program.pp_size} ranks, {program.num_microbatches} microbatches"
    rates = f"bubble {simulation.bubble_rate:.1%}, without a barrier {simulation.bubble_rate_without_barrier:.1%}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_LEFT + _WIDTH + _RIGHT}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14" font-weight="bold">{html.escape(heading)}</text>',
        f'<text x="{_LEFT}" y="36">{rates}</text>',
        f'<text x="{_LEFT + _WIDTH + 8}" y="36">peak activations</text>',
    ]
    for rank in range(program.pp_size):
        y = _TOP + _ROW * rank
        parts.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW - 3}" fill="#eeeeee"/>')
        parts.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{y + 16}">{simulation.peak_activations[rank]:.4g}</text>')
    for rank, action, start, end in simulation.timeline:
        parts.append(_box(simulation, rank, action, (start - simulation.begin) * scale, (end - start) * scale))
    parts += _legend(simulation, height)
    return "\n".join([*parts, "</svg>", ""])


def _box(simulation: Simulation, rank: int, action: ActionBase, x: float, width: float) -> str:
    y = _TOP + _ROW * rank
    upper = action.stage != simulation.program.stages_of_rank[rank][0]
    label = _label(simulation, rank, action)
    text = ""
    if width >= 6.2 * len(label):
        middle = _LEFT + x + width / 2
        text = f'<text x="{middle:.1f}" y="{y + 16}" text-anchor="middle" font-size="10">{html.escape(label)}</text>'
    return (
        f'<rect x="{_LEFT + x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 3}" stroke="white" '
        f'fill="{_COLOURS[action.kind][upper]}"><title>{html.escape(str(action))}</title></rect>{text}'
    )


def _legend(simulation: Simulation, height: int) -> list[str]:
    kinds = {action.kind for order in simulation.program.compute_actions for action in order}
    entries = [(_COLOURS[kind][0], _MEANINGS[kind]) for kind in _MEANINGS if kind in kinds]
    entries.append(("#eeeeee", "idle"))
    if simulation.program.num_stages > simulation.program.pp_size:
        first = next(kind for kind in _MEANINGS if kind in kinds)
        entries.append((_COLOURS[first][1], "paler: a further stage of the rank"))
    parts = []
    for position, (colour, meaning) in enumerate(entries):
        x, y = _LEFT + 170 * position, height - 22
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{y + 10}">{html.escape(meaning)}</text>')
    return parts


def draw_html(simulation: Simulation, title: str = "") -> str:
    """A page with the picture of :func:`draw_svg` and the table of :func:`summarize`."""
    heading = html.escape(title or simulation.program.name or "schedule")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{heading}</title></head>\n<body>\n'
        f"{draw_svg(simulation, title)}<pre>{html.escape(summarize(simulation))}</pre>\n</body></html>\n"
    )
