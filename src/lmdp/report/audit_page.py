"""An audit as one self-contained page: the verdict, the layers with their intervals, the table."""

from __future__ import annotations

from html import escape

from lmdp.audit.results import AuditReport, Leak

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --leak: #b3261e; --calm: #1f6feb;
        --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --leak: #ff7b72;
        --calm: #79c0ff; --paper: #0d1117; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 56rem;
       margin: 2rem auto; padding: 0 1rem; }
svg { width: 100%; height: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
.wide { overflow-x: auto; } .note { color: var(--soft); }
"""


def render(report: AuditReport) -> str:
    """HTML that opens offline. Names are escaped: a layer may be called anything."""
    rows = [*report.layers, *report.controls, *([report.reference] if report.reference else [])]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><title>Membership audit</title>"
        f"<style>{STYLE}</style></head><body><h1>Membership audit</h1><p><strong>{escape(report.verdict)}</strong></p>"
        f"{_chart(rows)}<div class='wide'><table><thead><tr><th>evidence</th><th>AUC (95 % interval)</th>"
        "<th>error rate (95 % interval)</th><th>TPR at 1 % FPR</th><th>best attack</th></tr></thead>"
        f"<tbody>{''.join(map(_row, rows))}</tbody></table></div>"
        f"<p class='note'>{report.members} members, {report.nonmembers} non-members, {report.left_out} left out to "
        f"balance them. (input) and (untrained) are controls: what they find is a difference between the groups, not "
        f"a leak. (output) is the model's own output, for comparison.</p><p class='note'>{escape(report.warning)}</p>"
        "</body></html>\n"
    )


def _row(leak: Leak) -> str:
    (a, b), (c, d) = leak.interval, leak.error_rate_interval
    return (
        f"<tr><td>{escape(leak.name)}</td><td>{leak.auc:.3f} ({a:.3f} – {b:.3f})</td>"
        f"<td>{leak.error_rate:.3f} ({c:.3f} – {d:.3f})</td><td>{leak.tpr_at_1pct:.3f}</td>"
        f"<td>{escape(leak.attack)}</td></tr>"
    )


def _chart(rows: list[Leak]) -> str:
    """AUC with intervals, one line per row, beside the line of chance."""
    low = min(0.45, *(row.interval[0] for row in rows))
    high = max(0.6, *(row.interval[1] for row in rows))

    def x(value: float) -> float:
        return 170 + 440 * (value - low) / (high - low)

    height = 30 + 24 * len(rows)
    half = f"{x(0.5):.1f}"
    marks = [
        f"<line x1='{half}' x2='{half}' y1='8' y2='{height - 22}' stroke='var(--soft)' stroke-dasharray='4'/>"
        f"<text x='{half}' y='{height - 6}' text-anchor='middle' fill='var(--soft)' font-size='12'>0.5, chance</text>"
    ]
    for i, row in enumerate(rows):
        y = 20 + 24 * i
        colour = "var(--leak)" if row.found else "var(--calm)"
        text = f"{row.name}: AUC {row.auc:.3f}, 95 % interval {row.interval[0]:.3f} to {row.interval[1]:.3f}"
        marks.append(
            f"<g><title>{escape(text)}</title><text x='160' y='{y + 4}' text-anchor='end' fill='var(--ink)' "
            f"font-size='13'>{escape(row.name[:24])}</text><line x1='{x(row.interval[0]):.1f}' "
            f"x2='{x(row.interval[1]):.1f}' y1='{y}' y2='{y}' stroke='{colour}' stroke-width='3'/>"
            f"<circle cx='{x(row.auc):.1f}' cy='{y}' r='5' fill='{colour}'/></g>"
        )
    return f"<svg viewBox='0 0 640 {height}' role='img' aria-label='AUC by layer'>{''.join(marks)}</svg>"
