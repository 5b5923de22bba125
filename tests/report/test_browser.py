"""The page in a real browser, where one is installed: nothing clipped or overlapping, nothing to scroll sideways."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import made_up
import pytest
from test_page import GALLERY

from ptlf.report.page import page
from ptlf.report.runs import read_comparison

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
]
WIDTHS = (1280, 375)
# A window is never narrower than 500 pixels; a frame in it is.
FRAMES = """<script>onmessage = message => {
const pre = document.createElement('pre');
pre.textContent = message.data;
document.body.append(pre);
};</script>"""
MEASURE = """<script>window.onload = () => {
const seen = s => s.getClientRects().length > 0, box = e => e.getBoundingClientRect();
const svgs = [...document.querySelectorAll('svg[role=img]')].filter(seen);
const texts = s => [...s.querySelectorAll('text')].map(t => [box(t), t.firstChild.data]);
const clash = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 &&
  Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
const drawn = figure => [...figure.querySelectorAll('svg[role=img]')].some(seen);
const figures = [...document.querySelectorAll('figure')];
const found = {width: innerWidth, page: document.documentElement.scrollWidth, empty: [], out: [], overlap: [], low: [],
  wide: [...document.querySelectorAll('.scroll')].filter(b => b.scrollWidth > b.clientWidth).length,
  close: [...document.querySelectorAll('.note + h3')]
    .filter(h => box(h).top - box(h.previousElementSibling).bottom < 24).length,
  figures: figures.length, full: figures.filter(drawn).length};
for (const s of svgs) {
  const name = s.closest('.picture').id, words = texts(s), frame = box(s);
  if (frame.width < 50 || frame.height < 20 || s.querySelectorAll('rect,polyline,circle,path,svg').length < 3)
    found.empty.push(name);
  for (const [t, word] of words) {
    if (t.left < frame.left - 2 || t.right > frame.right + 2 || t.bottom > frame.bottom + 3)
      found.out.push(name + ': ' + word);
    if (t.height < 7) found.low.push(name + ': ' + word);
  }
  for (let i = 0; i < words.length; i++) for (let j = 0; j < i; j++)
    if (clash(words[i][0], words[j][0])) found.overlap.push(name + ': ' + words[i][1] + ' / ' + words[j][1]);
}
parent.postMessage(JSON.stringify(found), '*');
};</script>"""


def open_page(text: str, folder: Path) -> tuple[list[dict], str]:
    """What the page measures of itself at each width, and what the browser wrote on its console."""
    (folder / "page.html").write_text(text.replace("</body>", MEASURE + "</body>"))
    frames = "".join(
        f'<iframe src="page.html" width="{width}" height="900" frameborder="0"></iframe>' for width in WIDTHS
    )
    (folder / "frames.html").write_text(f"<!doctype html><body>{FRAMES}{frames}</body>")
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1400,2000", "--dump-dom"]
    done = subprocess.run(
        [*command, (folder / "frames.html").as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    found = [json.loads(unescape(words)) for words in re.findall(r"<pre>(.*?)</pre>", done.stdout, re.S)]
    assert len(found) == len(WIDTHS), done.stderr[-2000:]
    return found, done.stderr


def seeds(root: Path) -> str:
    """Two seeds each, with every column of the main table at its widest."""
    for method in ("lump", "ptlf-deep"):
        for seed in (0, 1):
            made = made_up.results(f"digits/simsiam/{method}", seed=seed) | {"test_images": [500, 500, 500]}
            made["cost"] |= {"learning_seconds": 245.8 + 9 * seed, "backward_flops": (44963 + 300 * seed) * 10**12}
            run = made_up.write(root / f"{method}-{seed}", made, GALLERY)
            probes = {name: values | {"test_images": [100]} for name, values in made["probes"].items()}
            test = {"date": "2026-01-01", "tasks": 3, "images": "labelled", "sha256": "", "probes": probes}
            (run / "evaluations.json").write_text(json.dumps([test]))
    return page(read_comparison([root]))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["many", "seeds"])
def test_in_a_browser(tmp_path: Path, which: str) -> None:
    made = made_up.page_of_eight() if which == "many" else seeds(tmp_path / "runs")
    assert ('class="paired"' in made) == ('class="later"' in made) == (which == "seeds")
    views, console = open_page(made, tmp_path)
    assert {found["width"] for found in views} == set(WIDTHS)
    for found in views:
        assert found["page"] <= found["width"], "there is something to scroll sideways"
        assert found["wide"] == found["close"] == 0
        assert found["full"] == found["figures"] >= 10
        assert found["empty"] == found["out"] == found["overlap"] == found["low"] == []
    assert "CONSOLE" not in console
