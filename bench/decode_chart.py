"""Draws what bench/decode.py measured: seconds above the floor, one group of bars a workload. No library needed.

    python3 bench/decode_chart.py bench/results/decode-....json >chart.svg
"""

import json
import sys

WIDTH, LABEL, BAR, GAP, HEAD = 760, 170, 16, 4, 34
COLOURS = {"braid": "#1f6f8b", "wal2json": "#c97b2a"}
OTHER = "#8a8f98"


def escape(text):
    return text.replace("&", "&amp;").replace("<", "&lt;")


def draw(result):
    out, y = [], 46
    for case, medians in result["medians"].items():
        floor = medians["floor"]["seconds"]
        bars = [(name, m["seconds"] - floor) for name, m in medians.items() if name != "floor"]
        longest = max([seconds for _, seconds in bars] + [0.001])
        out.append(f'<text x="12" y="{y + 14}" class="title">{escape(result["titles"][case])} (floor {floor:.2f} s)</text>')
        y += HEAD - 10
        for name, seconds in bars:
            width = max(seconds, 0) / longest * (WIDTH - LABEL - 90)
            colour = next((c for start, c in COLOURS.items() if name.startswith(start)), OTHER)
            out.append(f'<text x="{LABEL - 8}" y="{y + BAR - 4}" text-anchor="end">{escape(name)}</text>')
            out.append(f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
            out.append(f'<text x="{LABEL + width + 6:.1f}" y="{y + BAR - 4}">{seconds:.3f} s</text>')
            y += BAR + GAP
        y += 18
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">'
            '<style>.title { font-weight: bold }</style>'
            f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
            f'<text x="12" y="24" font-size="15" class="title">Seconds of an output plugin\'s own, PostgreSQL {escape(result["server_version"])}, '
            f'median of {result["runs"]}</text>')
    return "\n".join([head, *out, "</svg>", ""])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as source:
        sys.stdout.write(draw(json.load(source)))
