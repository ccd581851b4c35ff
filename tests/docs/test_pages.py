"""The README and the pages under docs: their number, length and links; their mentions in code."""

import re
import subprocess

import pytest

from tests.runs import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [README, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *PAGES]
GENERATED = "flags.md"  # by tools, so that its words do not count
COMMIT = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def words(page) -> int:
    return len(page.read_text().split())


def test_the_readme_is_short():
    assert words(README) <= 1000


def test_the_pages_are_few_and_short():
    assert len(PAGES) <= 10
    assert sum(words(page) for page in PAGES if page.name != GENERATED) <= 12_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_line_says_what_the_page_is_for(page):
    title, blank, first = page.read_text().splitlines()[:3]
    assert title.startswith("# ") and not blank and first.startswith("What this page is for: ")


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_no_commit_is_named(page):
    assert not COMMIT.findall(page.read_text())


def anchors(page) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-").strip() for heading in headings
    }


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert not broken


def test_every_page_that_the_code_names_is_there():
    files = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.py", "*.sh", "*.html", "*.yml", "*.toml"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    named = {
        (file, page)
        for file in files
        if (ROOT / file).exists()
        for page in re.findall(r"docs/\w+\.md", (ROOT / file).read_text())
    }
    assert len(named) > 10
    assert not [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()]


def test_the_workflow_runs_what_the_checks_run():
    """Both begin from the README's installation; neither has a list of tests of its own."""
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "pull_request" in workflow and "run: bash .ci/run\n" in workflow
    checks = (ROOT / ".ci" / "run").read_text()
    assert "source tools/environment.sh\n" in checks
    assert checks.endswith("exec bash tools/run_tests.sh\n")


def test_reasonseg_is_measured_as_it_was_published():
    """No command or table row of a page measures ReasonSeg without the published protocol."""
    commands = [
        command
        for page in (README, *PAGES)
        for command in page.read_text().replace("\\\n", " ").splitlines()
        if "tools.evaluate" in command and "--dataset reasonseg" in command
    ]
    assert len(commands) >= 2
    assert all("--protocol visionreasoner" in command for command in commands)
