"""Draw the ring of processes over two partitions of a cluster, as docs/pictures/ring.svg.

`python docs/pictures/ring.py` writes the file anew beside this program; the same program gives the same bytes.
Only the standard library is used.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("ring.svg")
WIDTH, HEIGHT = 860, 470
INK, FAINT, PAPER = "#1f2933", "#52606d", "#ffffff"
TRAINING, GENERATION = "#1f4e79", "#2f6b3a"

Point = tuple[float, float]


def draw() -> str:
    """Return the picture as SVG text."""
    parts = [
        *_partition(20, 330, "partition gpu", TRAINING),
        *_partition(510, 330, "partition scavenge", GENERATION),
        *_box(50, 64, 270, 84, "reward service", ("your function, in processes", "that may be killed"), TRAINING),
        *_box(
            50, 184, 270, 92, "controller", ("prompts, leases, staleness bound,", "batches, rollouts on disk"), TRAINING
        ),
        *_box(50, 350, 270, 84, "trainer", ("Megatron-Core or DeepSpeed,", "a process for each GPU"), TRAINING),
        *_stack(
            540,
            64,
            262,
            362,
            "generators",
            ("vLLM, continuous batching;", "take new weights while they", "sample, may come and go"),
            GENERATION,
        ),
        *_arrow((536, 90), (324, 90), "completions", (429, 82)),
        *_arrow((324, 130), (536, 130), "verdicts", (429, 122)),
        *_arrow((324, 210), (536, 210), "prompts on lease", (429, 202)),
        *_arrow((536, 254), (324, 254), "scored rollouts", (429, 246)),
        *_arrow((324, 392), (536, 392), "new weights", (429, 384)),
        *_arrow((110, 280), (110, 346), "batches", (118, 317), anchor="start"),
        *_arrow((240, 346), (240, 280), "reports", (248, 317), anchor="start"),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    title = "<title>Controller, trainer and reward service in one partition, generators in another</title>"
    marker = (
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{INK}"/></marker></defs>'
    )
    ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>'
    return "\n".join([head, title, marker, ground, *parts, "</svg>", ""])


def _partition(x: float, width: float, name: str, colour: str) -> list[str]:
    frame = (
        f'<rect x="{x}" y="20" width="{width}" height="430" rx="10" fill="{colour}" fill-opacity="0.06" '
        f'stroke="{colour}" stroke-dasharray="6 4"/>'
    )
    return [frame, _text((x + 16, 48), name, size=15, colour=colour, anchor="start", weight="bold")]


def _box(x: float, y: float, width: float, height: float, name: str, lines: tuple[str, ...], colour: str) -> list[str]:
    middle = x + width / 2
    top = y + (height - 84) / 2
    return [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{PAPER}" stroke="{colour}" '
        'stroke-width="1.5"/>',
        _text((middle, top + 28), name, size=17, colour=INK, weight="bold"),
        *(_text((middle, top + 50 + 18 * i), line, size=13, colour=FAINT) for i, line in enumerate(lines)),
    ]


def _stack(
    x: float, y: float, width: float, height: float, name: str, lines: tuple[str, ...], colour: str
) -> list[str]:
    """A box with others behind it: several of a kind."""
    behind = [
        f'<rect x="{x + shift}" y="{y + shift}" width="{width}" height="{height}" rx="6" fill="{PAPER}" '
        f'stroke="{colour}" stroke-width="1"/>'
        for shift in (8, 4)
    ]
    return [*behind, *_box(x, y, width, height, name, lines, colour)]


def _arrow(start: Point, end: Point, label: str, at: Point, *, anchor: str = "middle") -> list[str]:
    line = (
        f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="{INK}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )
    return [line, _text(at, label, size=13, colour=INK, anchor=anchor)]


def _text(at: Point, text: str, *, size: int, colour: str, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{at[0]}" y="{at[1]}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
