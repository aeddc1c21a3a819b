"""The reading site: its links, equations, new lines and the atlas."""
import json
import re
from collections import Counter
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from benchmarks import table
from benchmarks.suite import read_suite
from docs import __main__ as command, atlas
from docs.algorithm import ROOT, algorithms
from docs.build import build, index
from docs.results import short
from utils.errors import UsageError


class Page(HTMLParser):
    """The ids of a page, its links, and what a browser loads for it."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded, self.new = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") != "canonical" and given.get("href"):
            self.loaded.append(given["href"])
        if tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.loaded.append(given["src"])
        if given.get("class") == "line new":
            self.new.append(int(given["id"][1:]))


def read(site):
    return {path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
            for path in site.rglob("*.html")}


def broken(site, pages):
    """Yield every link to a page, file or place that is not there."""
    for name, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            path = ((site / name).parent / unquote(parts.path)).resolve() if parts.path \
                else site / name
            if path.is_dir():
                path /= "index.html"
            there = path.exists() and path.is_relative_to(site)
            other = pages.get(path.relative_to(site).as_posix()) if there else None
            if not there or (parts.fragment and other
                             and unquote(parts.fragment) not in {*other.ids, ""}):
                yield f"{name}: {link}"


def atlas_row(bug, lost=(0.5, 0.4, 0.6), **given):
    curves = [[None, *range(19)], [None, *range(0, 38, 2)]]
    return {"bug": bug, "env": "Acrobot-v1", "settings": "", "steps": 2000, "commit": "abc",
            "clean": [200.0, 220.0], "planted": [100.0, 110.0], "difference": [-105.0, -126.0, -84],
            "lost": lost, "steps_to": [1600, None], "metric": "kl", "step": 700, "curves": curves
            } | given


ROWS = [
    atlas_row("ppo-lam-decay-crosses-episodes", (0.05, -0.1, 0.2), metric="val_mean"),
    atlas_row("ppo-time-limit-is-an-end@a2c", caught="tests/algos/test_a2c.py::test_gae[1 < 2]"),
    atlas_row("ppo-time-limit-is-an-end@a2c", (0.7, 0.6, 0.8), env="Ant-v4", metric=None,
              step=None),
    atlas_row("dqn-target-is-the-critic", [None] * 3, planted=[None, None], difference=[None] * 3,
              curves=[[1.0] * 20, [None] * 20]),
    atlas_row("ddpg-no-such-bug", (0.3, None, None), metric="actor_grad_norm")]


@pytest.fixture
def atlas_file(tmp_path, monkeypatch):
    monkeypatch.setattr(atlas, "PATH", tmp_path / "atlas.jsonl")
    return tmp_path / "atlas.jsonl"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    site = tmp_path_factory.mktemp("site") / "whole"
    stored = atlas.PATH.read_text("utf-8") if atlas.PATH.exists() else ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atlas, "PATH", site.with_name("atlas.jsonl"))
        atlas.PATH.write_text(stored + "".join(json.dumps(row) + "\n" for row in ROWS))
        assert build(site) == ""
    return site, read(site)


def test_every_link_resolves(whole):
    site, pages = whole
    assert {"index.html", "explorer.html", "atlas.html", "atlas/dqn-target-is-the-critic.html",
            "atlas/ppo-time-limit-is-an-end-in-a2c.html",
            *(f"algos/{name}.html" for name in algorithms())} <= pages.keys()
    assert sum(name[:10] == "notebooks/" for name in pages) == 8
    assert sum(len(page.links) for page in pages.values()) > 500
    assert list(broken(site, pages)) == []


def test_nothing_is_loaded_from_elsewhere(whole):
    site, pages = whole
    away = [link for page in pages.values() for link in page.loaded
            if urlsplit(link).scheme not in ("", "data") or link.startswith("//")]
    assert away == []
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import", path.read_text("utf-8")), path
    own = "".join(path.read_text("utf-8") for path in (ROOT / "docs/assets").iterdir())
    assert set(re.findall(r"https?://[\w./]+", own)) == {"http://www.w3.org/2000/svg"}


def test_equations_stand_above_their_functions(whole):
    site, pages = whole
    for name in ("a2c", "ppo"):
        page, algo = pages[f"algos/{name}.html"], algorithms()[name]
        assert {"gae", "Agent.policy", "Agent.update_stats"} <= algo.equations.keys()
        order = [i for i in page.ids if re.fullmatch(r"eq-.+|L\d+", i)]
        assert [i for i in order if i[0] == "L"] == [f"L{k + 1}" for k in range(len(algo.lines))]
        for function in algo.equations:
            line = order[order.index(f"eq-{function}") + 1]
            assert line == f"L{algo.functions[function].start}"
        assert "#eq-gae" in page.links                          # where it is called
        text = (site / f"algos/{name}.html").read_text(encoding="utf-8")
        assert text.count("<math") >= len(algo.equations)
        assert not re.search(r"\\(frac|mathrm|operatorname|pi\b)", text)


def test_a_diff_turns_the_parent_into_the_file(whole):
    parents = {name: algo.parent for name, algo in algorithms().items() if algo.parent}
    assert parents["ppo"] == "a2c" and parents["td3"] == "ddpg" and "vpg" not in parents
    for name, parent in parents.items():
        algo, old = algorithms()[name], algorithms()[parent].lines
        kept = [line for k, line in enumerate(algo.lines, 1) if k not in algo.new]
        gone = [text for sign, _, text in algo.diff if sign == "-"]
        assert Counter(kept + gone) == Counter(old) and len(kept) > len(old) / 4, name
        for (sign, number, text), (_, following, _) in zip(algo.diff, algo.diff[1:]):
            if sign == "@":
                assert text == f"line {number}" and number == following
            assert sign in "@-" or text == algo.lines[number - 1]
    site, pages = whole
    assert pages["algos/ppo.html"].new == algorithms()["ppo"].new
    start = (site / "index.html").read_text(encoding="utf-8")
    assert f">+{len(algorithms()['ppo'].new)}</a>" in start


def test_curves_are_the_stored_ones(whole):
    site, _ = whole
    text = (site / "_static/curves/ppo.js").read_text(encoding="utf-8")
    lines = json.loads(text.split(" = ", 1)[1].rstrip(";\n"))
    line = next(line for line in lines if (line["env"], line["settings"], line["library"])
                == ("HalfCheetah-v4", "default", "plainrl"))
    stored = read_suite(ROOT / "benchmarks/results.jsonl")
    stored = next(run for run in stored if (run["env"], run["algo"], run["seed"], run["changed"])
                  == ("HalfCheetah-v4", "ppo", 1, {}) and "library" not in run)
    assert line["seeds"][0]["ends"] == short(table.returns([stored], "ends at")[0])
    assert line["seeds"][0]["x"] == [x for x, _ in stored["curve"]]
    assert line["seeds"][0]["y"] == pytest.approx([y for _, y in stored["curve"]], rel=1e-3)
    assert len(line["anchors"]) > 5
    sticky = next(line for line in lines if (line["env"], line["settings"]) == (
        "ALE/Breakout-v5", "default"))
    assert not sticky["anchors"]                                # others had no sticky actions


def test_without_rows_there_is_no_atlas(atlas_file):
    assert atlas.pages() == {} and atlas.links("ppo") == "" and "atlas" not in index()
    atlas_file.write_text(json.dumps(ROWS[0]) + "\n")
    assert list(atlas.pages()) == ["atlas.md", "atlas/ppo-lam-decay-crosses-episodes.md"]
    assert atlas.links("ppo") == ('<p>Silent bugs of this file, measured: <a href="../atlas/ppo-lam'
                                  '-decay-crosses-episodes.html">ppo-lam-decay-crosses-episodes</a>'
                                  ".</p>") and "atlas.html" in index()


def test_the_atlas_is_sorted_by_what_is_lost(atlas_file):
    atlas_file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pages = atlas.pages()
    assert len(pages) == 5                                      # two rows are of one bug
    rows = re.findall(r'<tr data-algorithm="(\w+)" data-symptom="(.+?)">.*?</td><td>.*?</td><td>'
                      r"(.+?)</td><td>(.+?)</td><td>(.+?)</td></tr>", pages["atlas.md"])
    kl = "<code>kl</code>, step 700"
    assert rows == [
        ("dqn", "the run ends", "Acrobot-v1", "ends 2 of 2 runs", kl),
        ("a2c", "no metric", "Ant-v4", "70% [60%, 80%]", "none"),
        ("a2c", "the policy", "Acrobot-v1", "50% [40%, 60%]", kl),
        ("ddpg", "a gradient norm", "Acrobot-v1", "30%", "<code>actor_grad_norm</code>, step 700"),
        ("ppo", "costs nothing here", "Acrobot-v1", "5% [-10%, 20%]",
         "<code>val_mean</code>, step 700")]


def test_the_page_of_a_bug(atlas_file):
    atlas_file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pages = atlas.pages()
    page = pages["atlas/ppo-time-limit-is-an-end-in-a2c.md"]
    for part in ("A time limit is stored as a termination", "Where it was found: cleanrl#198",
                 '<span class="del">-', "## On Ant-v4", "## On Acrobot-v1",
                 "<th>clean</th><td>210</td><td>2: 200; 220</td><td>1,600</td>",
                 "<th>planted</th><td>105</td><td>2: 100; 110</td><td>never</td>",
                 "Planted minus clean: -105 [-126, -84]. The bug loses 50% [40%, 60%]",
                 "separates them is <code>kl</code>, by step 700",
                 "No metric of progress.csv separates them before the end.",
                 "<code>tests/algos/test_a2c.py::test_gae[1 &lt; 2]</code>",
                 "benchmarks.atlas train --out DIR --bugs ppo-time-limit-is-an-end@a2c<"):
        assert part in page, part
    assert page.count("The test that catches it") == 1
    ended = pages["atlas/dqn-target-is-the-critic.md"]
    assert "The bug ends 2 of 2 runs." in ended and "<td>-</td><td>2: -; -</td>" in ended
    gone = pages["atlas/ddpg-no-such-bug.md"]
    assert "have changed since" in gone and "diff" not in gone and "found:" not in gone


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(command, "NEEDED", ("sphinx", "no_such_package"))
    with pytest.raises(UsageError, match=r"^no_such_package missing: pip install -e '\.\[docs\]'$"):
        command.main(command.Site())


def test_a_folder_with_other_files_is_not_emptied(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        build(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
