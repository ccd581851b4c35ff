"""Every file and symbol of the tree that a page names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("rl_train", "sa2va_hf", "tools", "tests", "docs/examples")
CODE = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
# Pages tell of files of other projects and of the reader's own.
ELSEWHERE = {"colors.py", "get_model_outputs.py", "eval_model_outputs.py", "dataset/RES.py"}
ELSEWHERE |= {"region_cap_refcocog_eval.py", "metrics_region_cap.py", "my_rewards.py"}
ELSEWHERE |= {"projects/sa2va/evaluation/sa2va_eval_refcoco.py"}


def quoted(page: Path) -> list[str]:
    """Return the texts of a page in backticks, without its blocks of code."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_symbols_are_there(page):
    missing = []
    for words in quoted(page):
        match = re.fullmatch(r"([\w./]+\.py)(?:: ([\w, ]+))?", words)
        if not match or match[1] in ELSEWHERE:
            continue
        files = [path for path in CODE if f"/{path.relative_to(ROOT)}".endswith(f"/{match[1]}")]
        code = "\n".join(path.read_text() for path in files)
        symbols = re.findall(r"\w+", match[2] or "")
        if not files or not all(
            re.search(rf"^\s*(def |class |){s}\b", code, re.M) for s in symbols
        ):
            missing.append(words)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_are_there(page):
    modules = re.findall(
        r"(?<![.\w])((?:rl_train|tools|sa2va_hf|tests)(?:\.\w+)+)", page.read_text()
    )
    folders = [(ROOT / module.replace(".", "/")) for module in modules]
    # The last word may be a class or function of the module.
    missing = [
        folder
        for folder in folders
        if not any(
            path.exists()
            for path in (folder, folder.with_suffix(".py"), folder.parent.with_suffix(".py"))
        )
    ]
    assert not missing
