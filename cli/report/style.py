"""How the report looks. Colours are Okabe and Ito's, which people tell apart whatever they see of red and green."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b1f24; --dim: #5b6470; --line: #dfe3e8;
  --rail: #eceff3; --queue: #8a929c; --draft: #d98e00; --head: #0072b2; --link: #c2639a; --tail: #009e73;
  --error: #d55e00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171b; --card: #1d2126; --ink: #e8eaed; --dim: #a2abb6; --line: #343a42; --rail: #2a3037;
    --queue: #9aa3ad; --draft: #e69f00; --head: #56b4e9; --link: #dd8fbd; --tail: #2fc79b; --error: #f0803c; }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 24px 16px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 8px; }
p { margin: 4px 0; }
.dim { color: var(--dim); font-size: 13px; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 20px 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.figures dt { color: var(--dim); font-size: 13px; }
.figures dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 16px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  min-width: 0; }
@media (min-width: 1100px) { .cards { grid-template-columns: repeat(6, 1fr); }
  .card { grid-column: span 2; } .card:nth-of-type(n + 7) { grid-column: span 3; } }
.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; margin: 8px 0; }
svg text { font-size: 13px; fill: var(--dim); }
@media (max-width: 480px) { svg text { font-size: 14px; } }
@media (min-width: 1100px) { .card:nth-of-type(n + 7) text { font-size: 9px; } }
svg .value { fill: var(--ink); }
.grid { stroke: var(--line); stroke-width: 1; }
.area { fill: var(--color); fill-opacity: .35; stroke: var(--color); stroke-width: 1.5; }
.bar { fill: var(--color); }
.rail { fill: var(--rail); }
.mark { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 4 3; }
.target { fill: var(--ink); fill-opacity: 0; }
.target:hover { fill-opacity: .12; }
table { border-collapse: collapse; width: 100%; min-width: 560px; font-size: 13px; font-variant-numeric: tabular-nums; }
th { color: var(--dim); font-weight: 500; text-align: left; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; min-width: 64px; }
td.number, th.number { text-align: right; white-space: nowrap; }
"""
