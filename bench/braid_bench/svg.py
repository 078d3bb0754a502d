"""Bars in SVG, readable on light and on dark, without any library. Every length is in pixels; text is measured roughly."""

from dataclasses import dataclass
from html import escape

# Series keep their colour from chart to chart; the second of each pair is for dark surroundings.
COLOURS = (
    ("#898781", "#898781"), ("#2a78d6", "#3987e5"), ("#eb6834", "#d95926"), ("#1baf7a", "#199e70"), ("#4a3aa7", "#9085e9"),
    ("#eda100", "#c98500"), ("#e87ba4", "#d55181"), ("#008300", "#008300"),
)
INK = {"paper": ("#fcfcfb", "#1a1a19"), "ink": ("#0b0b0b", "#ffffff"), "soft": ("#52514e", "#c3c2b7"), "grid": ("#e1e0d9", "#2c2c2a"),
       "axis": ("#c3c2b7", "#383835")}
BAR, GAP, GROUP_GAP, WIDTH, RIGHT = 14, 2, 16, 860, 96
LETTER = 6.6


def style():
    def rules(which):
        lines = [f".{name}{{{'fill' if name in ('paper', 'ink', 'soft') else 'stroke'}:{pair[which]}}}" for name, pair in INK.items()]
        lines += [f".c{n}{{fill:{pair[which]}}}" for n, pair in enumerate(COLOURS)]
        return "".join(lines)

    font = "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}.title{font-size:15px;font-weight:600}.end{text-anchor:end}" \
           ".mid{text-anchor:middle}.grid,.axis{stroke-width:1}.whisker{stroke:#52514e;stroke-width:1}"
    dark = rules(1) + ".whisker{stroke:#c3c2b7}"
    return f"<style>{font}{rules(0)}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def text(x, y, words, kind="soft"):
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(str(words))}</text>'


@dataclass(frozen=True)
class Bar:
    """One value with its range; None where there is none, and why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    why: str = ""


def nice(top):
    """A step for about five lines up to `top`."""
    step = 10 ** len(str(int(top))) / 100 if top >= 1 else 0.01
    while top / step > 6:
        for factor in (2, 2.5, 2):
            step *= factor
            if top / step <= 6:
                break
    return step


def number(value):
    if value >= 10_000:
        return f"{value / 1000:,.0f}k"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bars(title, note, groups, series, reference=None):
    """Horizontal bars. `groups`: (name, {series name: Bar}); `series`: (name, colour index); `reference`: (value, name) of a line."""
    left = 24 + LETTER * max(len(name) for name, _ in groups)
    shown = [[(s, colour, values[s]) for s, colour in series if s in values] for _, values in groups]
    top = max([b.high or b.value for group in shown for _, _, b in group if b.value is not None] + [reference[0] if reference else 0])
    top = (top or 1) * 1.02
    scale = (WIDTH - left - RIGHT) / top
    out, y = [text(16, 26, title, "ink title"), text(16, 44, note)], 66
    x = 16.0
    used = {s for group in shown for s, _, _ in group}
    for name, colour in series:
        if name not in used:
            continue
        length = 22 + LETTER * len(name)
        if x + length > WIDTH - 16:
            x, y = 16.0, y + 18
        out += [f'<rect class="c{colour}" x="{x:.1f}" y="{y - 9}" width="10" height="10" rx="2"/>', text(x + 15, y, name)]
        x += length + 12
    y += 22
    start, body = y, []
    for (name, _), group in zip(groups, shown):
        height = len(group) * (BAR + GAP) - GAP
        body.append(text(left - 10, y + height / 2 + 4, name, "ink end"))
        for label, colour, bar in group:
            if bar.value is None:
                body.append(text(left + 4, y + BAR - 3, bar.why))
            else:
                wide = max(bar.value * scale, 1)
                body.append(f'<rect class="c{colour}" x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" rx="2"><title>'
                            f'{escape(name)}, {escape(label)}: {number(bar.value)}</title></rect>')
                end = left + wide
                if bar.low is not None and bar.high is not None and bar.high > bar.low:
                    a, b, middle = left + bar.low * scale, left + bar.high * scale, y + BAR / 2
                    body.append(f'<path class="whisker" d="M{a:.1f} {middle}H{b:.1f}M{a:.1f} {middle - 3}v6M{b:.1f} {middle - 3}v6"/>')
                    end = max(end, b)
                body.append(text(end + 6, y + BAR - 3, number(bar.value)))
            y += BAR + GAP
        y += GROUP_GAP - GAP
    bottom = y - GROUP_GAP + 8
    step, value = nice(top), 0.0
    while value <= top:
        at = left + value * scale
        out += [f'<path class="{"axis" if value == 0 else "grid"}" d="M{at:.1f} {start - 6}V{bottom}"/>',
                text(at, bottom + 16, f"{value:g}" if value < 10_000 else number(value), "soft mid")]
        value += step
    if reference:
        at = left + reference[0] * scale
        body += [f'<path class="whisker" stroke-dasharray="4 3" d="M{at:.1f} {start - 6}V{bottom}"/>',
                 text(at + 4, bottom + 30, reference[1])]
    height = bottom + (38 if reference else 26)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
            f"<title>{escape(title)}</title>{style()}"
            f'<rect class="paper" width="{WIDTH}" height="{height:.0f}" rx="6"/>' + "".join(out + body) + "</svg>\n")


def flames(title, root, width=1400, row=17):
    """Stacks as an icicle: `root` is (name, count, {name: node}); what is under a thousandth of the whole is left out."""
    total = root[1] or 1
    pieces, deepest = [], 0

    def draw(node, x, depth):
        nonlocal deepest
        name, count, below = node
        wide = width * count / total
        if wide < width / 1000:
            return
        deepest = max(deepest, depth)
        y = 40 + depth * row
        share = 100 * count / total
        letters = int((wide - 6) / LETTER)
        shown = escape(name[:letters]) if letters > 2 else ""
        pieces.append(f'<g><title>{escape(name)}: {share:.1f} %</title><rect class="f{sum(name.encode()) % 6}" x="{x:.1f}" y="{y}" '
                      f'width="{max(wide - 0.5, 0.3):.1f}" height="{row - 1}"/><text x="{x + 3:.1f}" y="{y + 12}">{shown}</text></g>')
        for child in sorted(below.values(), key=lambda c: c[0]):
            draw(child, x, depth + 1)
            x += width * child[1] / total

    draw(root, 0.0, 0)
    height = 50 + (deepest + 1) * row
    fills = "".join(f".f{n}{{fill:hsl({hue},70%,68%)}}" for n, hue in enumerate((8, 20, 32, 42, 50, 26)))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
            f"<style>text{{font:11px monospace;fill:#111}}{fills}</style><rect width='{width}' height='{height}' fill='#fcfcfb'/>"
            f'<text x="8" y="24">{escape(title)}</text>' + "".join(pieces) + "</svg>\n")
