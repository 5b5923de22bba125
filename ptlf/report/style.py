"""The page's style sheet: two themes as variables, a wide and a narrow layout, and paper."""

from __future__ import annotations

from ptlf.report.drawing import FONT
from ptlf.report.theme import colours


def style(tasks: int) -> str:
    light, dark = colours(False, tasks), colours(True, tasks)
    fills = "".join(f".f-{role}{{fill:var(--{role});color:var(--{role})}}" for role in light)
    strokes = "".join(f".s-{role}{{stroke:var(--{role})}}" for role in light)
    scheme = f":root{{{variables(light)}}}@media screen and (prefers-color-scheme:dark){{:root{{{variables(dark)}}}}}"
    return scheme + fills + strokes + LAYOUT.replace("FONT", FONT).replace("\n", "")


def variables(theme: dict[str, str]) -> str:
    return "".join(f"--{role}:{colour};" for role, colour in theme.items())


LAYOUT = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 FONT;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:40px 40px 64px}
header{margin-bottom:40px}
h1{font-size:34px;line-height:1.15;letter-spacing:-.02em;margin:4px 0 18px;text-wrap:balance;overflow-wrap:anywhere}
h2{font-size:23px;line-height:1.25;letter-spacing:-.01em;margin:0 0 20px}
h3{font-size:16px;margin:0}
h4{font-size:13px;margin:16px 0 4px}
.kicker{color:var(--soft);margin:0;font-size:14px}
.headline{font-size:18px;list-style:none;margin:0;padding:0;max-width:52em}
.headline li{margin:0 0 8px}
.problem{border-left:3px solid var(--bad);padding:2px 0 2px 12px;margin:12px 0;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);padding:32px 0 16px;margin-top:24px}
.figures{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:36px 40px}
figure{margin:0;min-width:0;break-inside:avoid}
.full{grid-column:1/-1}
figcaption{margin-bottom:12px}
figcaption p{color:var(--soft);font-size:14px;margin:2px 0 0;max-width:48em}
.halves{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:28px 40px}
.thirds{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:28px 40px}
.whole{display:grid;gap:28px;grid-template-columns:minmax(0,1fr)}
.picture{min-width:0;break-inside:avoid}
.run{font-weight:600;font-size:14px;margin:0 0 6px;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;overflow:visible;font-family:inherit}
svg svg{display:inline;overflow:hidden}
.phone{display:none}
.note{color:var(--soft);font-size:14px;margin:14px 0 0;max-width:56em}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
code{background:var(--empty);padding:1px 5px;border-radius:4px;overflow-wrap:anywhere}
pre{background:var(--card);padding:14px;border-radius:8px;overflow-wrap:anywhere;white-space:pre-wrap;margin:0}
table{border-collapse:collapse;width:100%;font-size:14px;margin-top:28px}
th,td{text-align:right;padding:8px 0 8px 14px;border-bottom:1px solid var(--line);vertical-align:bottom}
thead th{font-weight:400;color:var(--soft);font-size:12.5px;line-height:1.3}
th:first-child{text-align:left;padding-left:0}
tbody th{font-weight:600;min-width:9em}
td{white-space:nowrap}
td b{display:block;font-size:12.5px;font-weight:600;color:var(--soft)}
small{font-size:12px;font-weight:400;color:var(--soft)}
.settings{margin:10px 0 24px}
.settings th,.settings td{overflow-wrap:anywhere;white-space:normal}
.settings tbody th{font-weight:400;color:var(--soft)}
details{border-top:1px solid var(--line);padding:10px 0}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:8em minmax(0,1fr);gap:4px 16px;font-size:14px;margin:12px 0}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13px;margin-top:32px}
@media screen and (max-width:760px){
main{padding:24px 16px 48px}
h1{font-size:26px}
.headline{font-size:16px}
.figures,.halves,.thirds{grid-template-columns:minmax(0,1fr)}
.desk{display:none}
.phone{display:block}
table,tbody,tr,td,tbody th{display:block;text-align:left;padding:0}
thead{display:none}
tr{border-bottom:1px solid var(--line);padding:12px 0}
tbody th,td{border:0}
td{display:flex;white-space:normal;justify-content:space-between;gap:12px;padding:3px 0;text-align:right}
td b{display:inline}
td span{white-space:nowrap}
td::before{content:attr(data-label);color:var(--soft);text-align:left;min-width:0}
dl{grid-template-columns:minmax(0,1fr);gap:0}
dd{margin-bottom:8px}
}
@media print{
body{font-size:11pt}
main{max-width:none;padding:0}
h2,h3,figcaption{break-after:avoid}
tr{break-inside:avoid}
@page{size:landscape;margin:12mm}
}
"""
