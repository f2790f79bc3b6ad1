# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Readers find every page of the documentation from the front page, and messages of the pages
exist.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FRONT = DOCS / "index.md"


def links(page: Path) -> set[Path]:
    """The pages that a page links to in its text, which is what a reader can click."""
    targets = re.findall(r"\]\(([^)#\s:]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets}


def clicks() -> dict[Path, int]:
    """Returns the number of clicks from the front page to each page."""
    away = {FRONT: 0}
    queue = [FRONT]
    for page in queue:
        for target in sorted(links(page) - away.keys()):
            assert target.is_file(), (
                f"{page.relative_to(ROOT)} links to {target}, which does not exist"
            )
            away[target] = away[page] + 1
            queue.append(target)
    return away


def test_every_page_is_reachable_from_the_front_page():
    missing = set(DOCS.rglob("*.md")) - clicks().keys()
    assert not missing, sorted(str(page.relative_to(ROOT)) for page in missing)


def test_at_least_twenty_everyday_questions_are_answered_within_two_clicks():
    page = DOCS / "developer-guide" / "questions.md"
    rows = re.findall(
        r"^\| (.+\?) \| (.+?) \| \[.+?\]\((.+?)#(.+?)\) \| (.+) \|$", page.read_text(), re.MULTILINE
    )
    unanswered = {question: why for question, *row in rows if (why := unanswered_by(page, *row))}
    assert len(rows) >= 20
    assert len(rows) == page.read_text().count("? |")
    assert unanswered == {}


def unanswered_by(questions: Path, route: str, target: str, anchor: str, words: str) -> str:
    """Describes why the links of a route do not lead to the answer; empty if they do."""
    here, names = FRONT, route.split(", ")
    for name in names:
        link = re.search(rf"\[{re.escape(name)}\]\(([^)#\s:]+\.md)(?:#[^)]*)?\)", here.read_text())
        if link is None:
            return f"{here.relative_to(DOCS)} has no link named {name}"
        here = (here.parent / link[1]).resolve()
    if len(names) > 2 or here != (questions.parent / target).resolve():
        return f"{len(names)} clicks lead to {here.relative_to(DOCS)}"
    section = sections(here.read_text()).get(anchor)
    if section is None:
        return f"{here.relative_to(DOCS)} has no section {anchor}"
    return "" if words.strip("`") in section else f"section {anchor} does not contain {words}"


def sections(page: str) -> dict[str, str]:
    """The text below each heading of a page up to the next heading, by the anchor that MyST
    makes of the heading.
    """
    found, anchor, fenced = {}, "", False
    for line in page.splitlines():
        fenced ^= line.lstrip().startswith("```")
        heading = None if fenced else re.match(r"#{1,4} (.+)", line)
        if heading:
            anchor = re.sub(r"[^\w\- ]", "", heading[1]).strip().lower().replace(" ", "-")
        else:
            found[anchor] = found.get(anchor, "") + line + "\n"
    return found


def test_messages_of_the_troubleshooting_page_stand_in_the_sources():
    section = (DOCS / "troubleshooting.md").read_text().split("## By symptom")[0]
    messages = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    files = [*ROOT.glob("crates/*/src/**/*.rs"), *ROOT.glob("python/farandole/**/*.py")]
    # A literal may continue in the next line: after a backslash in Rust, as another literal in
    # Python.
    sources = "\n".join(re.sub(r"\\\n\s*|\"\n\s*f?\"", "", file.read_text()) for file in files)
    sources = re.sub(r"\{[^{}\n]*\}", "...", sources)
    missing = [message for message in messages if message not in sources]
    assert messages
    assert not missing


def test_the_table_of_versions_has_the_bounds_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: dict[str, str] = {}
    for extra in project["optional-dependencies"].values():
        for one in extra:
            # The extra of a package comes first. Others may need a newer version of it.
            wanted.setdefault(re.split(r"[\[>]", one)[0], one)
    names = {"PyTorch": "torch", "Python": None, "Linux, x86-64": None, "Linux, aarch64": None}
    page = (DOCS / "versions.md").read_text().split("### Calendar")[0]
    rows = dict(re.findall(r"^\| ([A-Z][\w ,-]+?) \| ([\w. ]+?) \|", page, re.MULTILINE))
    assert project["requires-python"] == f">={rows['Python']}"
    bounds = {name: f">={rows[name]}" for name in rows if names.get(name, name) is not None}
    told = {name: wanted[names.get(name) or name.lower()] for name in bounds}
    assert len(bounds) == 9
    assert {
        name: requirement for name, requirement in told.items() if bounds[name] not in requirement
    } == {}


def load_version_calendar():
    """The module docs/version_calendar.py, whose directory is no package."""
    spec = importlib.util.spec_from_file_location("calendar", DOCS / "version_calendar.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_versions_has_the_tables_that_the_tests_make():
    calendar = load_version_calendar()
    page = calendar.PAGE.read_text()
    written = page.split(f"{calendar.BEGIN}\n\n")[1].split(f"\n{calendar.END}")[0]
    assert written == calendar.version_tables()
    assert "| PySpark | 3.5 | newest: `test` | 3.5, 4.0, newest: `test-spark`; " in written


def test_the_nightly_run_tries_each_package_of_the_page_on_its_newest_version():
    calendar = load_version_calendar()
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    tried = nightly["jobs"]["newest"]["strategy"]["matrix"]["package"]
    assert sorted(tried) == sorted(calendar.PACKAGES.values())


def test_the_specifications_state_the_versions_of_the_sources():
    rows = re.findall(
        r"^\| .+ \| (?:format )?(\d+) \| `(\w+)` in `(\S+)` \|$",
        (DOCS / "specs/index.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == 7
    for version, constant, place in rows:
        path = ROOT / place
        texts = [
            file.read_text() for file in (sorted(path.rglob("*.rs")) if path.is_dir() else [path])
        ]
        assert any(
            re.search(
                rf"(?:const {constant}: u\d+|^{constant}(?:: Final)?) = {version};?$",
                text,
                re.MULTILINE,
            )
            for text in texts
        ), (constant, version)


def test_files_that_the_pages_for_contributors_and_the_specifications_name_exist():
    pages = [*(DOCS / "developer-guide").glob("*.md"), *(DOCS / "specs").glob("*.md")]
    named = {
        (page.name, name)
        for page in pages
        for name in re.findall(
            r"`((?:crates|python|tests|docs|fuzz|bench)/[\w/.{},*-]+)`", page.read_text()
        )
    }
    missing = sorted(one for one in named if not list(ROOT.glob(re.sub(r"\{[^}]*\}", "*", one[1]))))
    assert named
    assert not missing


def test_prose_has_at_most_a_hundred_columns():
    generated = {"configuration.md", "command-line.md"}
    pages = [
        *ROOT.glob("*.md"),
        *(page for page in DOCS.rglob("*.md") if page.name not in generated),
    ]
    wide = [f"{page.relative_to(ROOT)}:{number}" for page in pages for number in wide_lines(page)]
    assert not wide


def wide_lines(page: Path) -> list[int]:
    """Numbers of lines beyond 100 columns, except tables, code, images, headings and single
    words.
    """
    found, fence = [], ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        marker = re.match(r"\s*(`{3,})", line)
        if marker and not fence:
            fence = marker[1]
        elif fence:
            fence = "" if line.strip() == fence else fence
        elif (
            len(line) > 100
            and not line.startswith(("|", "![", "#"))
            and " " in line.strip().removeprefix("- ")
        ):
            found.append(number)
    return found


def test_the_reference_names_every_module_that_states_public_names():
    sources = ROOT / "python"
    modules = {
        ".".join(file.relative_to(sources).with_suffix("").parts).removesuffix(".__init__")
        for file in (sources / "farandole").rglob("*.py")
        if re.search("^__all__ = ", file.read_text(), re.MULTILINE)
        and "/_" not in f"{file}".removesuffix("__init__.py")
    }
    shown = {
        name
        for page in DOCS.rglob("*.md")
        for name in re.findall(r"^```\{api\} (\S+)$", page.read_text(), re.MULTILINE)
    }
    of_horovod = set(
        re.findall(r"^\| `(\S+)` \|", (DOCS / "reference/api/index.md").read_text(), re.MULTILINE)
    )
    assert modules == shown | of_horovod
    assert not shown & of_horovod


def test_no_page_installs_farandole_from_an_index_which_has_no_release():
    # A reader of the messages on the troubleshooting page has installed the wheel: pip keeps it.
    installed = {("docs/start/index.md", "pip install 'farandole[jax]'")}
    lines = {
        (str(page.relative_to(ROOT)), line)
        for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
        for line in re.findall(r"pip install [^`#\n]*", page.read_text())
        if page.name != "troubleshooting.md"
    }
    named = {(page, line) for page, line in lines if re.search(r"(?<![\w/])farandole", line)}
    assert lines
    assert named - installed == set()


def test_the_map_has_a_drawing_of_every_crate_and_package_and_its_modules_exist():
    page = (DOCS / "developer-guide/map.md").read_text()
    crates, packages = page.split("## Python packages")
    drawn = re.findall(r"^```\{crate\} (\S+)$", crates, re.MULTILINE)
    wanted = {str(file.parent.relative_to(ROOT)) for file in ROOT.glob("crates/*/Cargo.toml")} | {
        "python"
    }
    assert sorted(drawn) == sorted(wanted)
    for crate in drawn:
        source = next(
            file for name in ("lib", "main") if (file := ROOT / crate / f"src/{name}.rs").is_file()
        )
        assert re.search(r"^//! ```text$", source.read_text(), re.MULTILINE), crate
    package = ROOT / "python/farandole"
    titles = re.findall(
        r"^### farandole\.(\S+)\n\n[^`#\n].*?\n\n```text\n", packages, re.MULTILINE | re.DOTALL
    )
    assert {title for title in titles if "." not in title} == {
        folder.parent.name for folder in package.glob("[!_]*/__init__.py")
    }
    names = re.findall(
        r"(?<![\w.])_?[a-z]+(?:\._?[a-z]\w*)+",
        " ".join(re.findall(r"```text\n.*?```", packages, re.DOTALL)),
    )
    modules = [
        name for name in names if (package / name.split(".")[0]).is_dir() and name not in CALLS
    ]
    missing = [
        name
        for name in modules
        if not any(
            (package / name.replace(".", "/")).with_suffix(end).exists()
            for end in ("", ".py", ".pyi")
        )
    ]
    assert len(modules) > 80
    assert missing == []


CALLS = {"spark.run"}
"""Names in the drawings that are functions."""


def test_external_links_are_https_and_have_a_host():
    # `make links` opens them, where there is a network.
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    found = {
        (page.name, link)
        for page in pages
        for match in re.finditer(r"\]\((\w+:[^)]*)\)|<(https?:[^>]*)>", page.read_text())
        if (link := match[1] or match[2])
    }
    wrong = {
        (page, link)
        for page, link in found
        if urlsplit(link).scheme != "https"
        or "." not in (urlsplit(link).hostname or "")
        or re.search(r"[\s.,;]$", link)
    }
    assert found
    assert wrong == set()


def test_the_menu_of_versions_has_this_version():
    versions = json.loads((DOCS / "switcher.json").read_text())
    (release,) = re.findall(
        '^__version__ = "(.+)"', (ROOT / "python/farandole/__init__.py").read_text(), re.MULTILINE
    )
    assert release in {one["version"] for one in versions}
    assert [one["url"] for one in versions if one.get("preferred")] == ["/"]
