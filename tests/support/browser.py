"""Lays pages out in headless Chromium, without a network, and says what overlaps and what is wider than the window."""

import html
import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

# Something inside a box that scrolls may be wider than the window; what is cut off there can be reached.
MEASURE = """<script>
addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const seen = [...document.querySelectorAll(PARTS)].map(e => [e, e.getBoundingClientRect()])
    .filter(([e, r]) => r.width && r.height);
  const named = e => e.outerHTML.slice(0, 80);
  const scrolls = e => e && (["auto", "scroll"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const wide = seen.filter(([e, r]) => (r.right > innerWidth + 0.5 || r.left < -0.5) && !scrolls(e.parentElement))
    .map(([e]) => named(e));
  const overlaps = [];
  seen.forEach(([a, r], i) => seen.slice(i + 1).forEach(([b, s]) => {
    if (a.contains(b) || b.contains(a)) return;
    const across = Math.min(r.right, s.right) - Math.max(r.left, s.left);
    const down = Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top);
    if (across > 1 && down > 1) overlaps.push(named(a) + " / " + named(b));
  }));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const facts = {
    width: innerWidth, page: document.documentElement.scrollWidth, wide, overlaps, dark, seen: seen.length,
    table: Math.max(0, ...[...document.querySelectorAll("table")].map(t => t.scrollWidth - t.parentElement.clientWidth)),
    ground: getComputedStyle(document.body).backgroundColor,
  };
  parent.postMessage([window.name, facts], "*");
}, 50));
</script></body>"""

# A window is at least 500 pixels wide; a frame is not, and media queries ask the frame.
FRAMES = """<!doctype html><meta name="color-scheme" content="light dark"><body><script>
const found = {};
addEventListener("message", m => {
  found[m.data[0]] = m.data[1];
  if (Object.keys(found).length == COUNT) document.body.textContent = "FACTS" + JSON.stringify(found) + "END";
});
</script>PAGES</body>"""
FRAME = '<iframe name="{name}" width="{width}" height="900" style="border: 0" src="{source}"></iframe>'


def lay_out(pages, folder, *, parts, width, dark):
    """Each page (a path) in a frame of this width: its facts by the page's path."""
    frames = []
    for page in pages:
        copy = page.with_name(f"_measured_{width}_{page.name}")  # beside the page, for the files that it names
        copy.write_text(page.read_text().replace("</body>", MEASURE.replace("PARTS", json.dumps(parts))))
        frames.append(FRAME.format(name=html.escape(str(page)), width=width, source=html.escape(copy.as_uri())))
    start = folder / "frames.html"
    start.write_text(FRAMES.replace("COUNT", str(len(frames))).replace("PAGES", "\n".join(frames)))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", start.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    facts = re.search("FACTS(.*)END", dom)
    assert facts, f"the browser did not lay out {len(pages)} pages: {dom[-2000:]}"
    return json.loads(html.unescape(facts[1]))


def check_laid_out(facts, *, width, dark, least):
    """No overlap, nothing wider than the window, the colours that the reader asked for, and something to see."""
    assert facts["width"] == width
    assert facts["dark"] is dark
    assert facts["seen"] >= least
    assert facts["page"] <= width
    assert facts["wide"] == []
    assert facts["overlaps"] == []
    assert facts["table"] <= 0
    brightness = sum(map(int, re.findall(r"\d+", facts["ground"])[:3])) / 3
    assert brightness < 60 if dark else brightness > 200
