"""The packages that the pictures come from, fetched by the ordinary clients of their registries."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHUNK = 2**20  # bytes hashed at once
NO_PACKAGE = "name a folder that holds it unpacked: --package_dirs"


@dataclass(frozen=True)
class Package:
    """A package at the version this tool reads.

    Attributes:
        size: bytes of its archive.
        sha256: of its archive; "" for a wheel, whose file depends on the machine and which pip
            checks itself.
    """

    name: str
    version: str
    client: str  # npm, apt or pip
    licence: str
    contents: str
    size: int = 0
    sha256: str = ""


FLUENT = Package(
    name="@lobehub/fluent-emoji-3d",
    version="1.1.0",
    client="npm",
    licence="MIT (Microsoft Corporation)",
    contents="Fluent emoji in 3D, webp 256 x 256",
    size=15792027,
    sha256="c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
)
NOTO = Package(
    name="@iconify-json/noto",
    version="1.2.9",
    client="npm",
    licence="Apache-2.0 (Google Inc)",
    contents="Noto emoji, SVG",
    size=3102958,
    sha256="3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad",
)
OPENMOJI = Package(
    name="openmoji",
    version="17.0.0",
    client="npm",
    licence="CC-BY-SA-4.0 (OpenMoji)",
    contents="OpenMoji, SVG in colour",
    size=4339458,
    sha256="55ee7d13485dec86e9f38c1f3a645a13382d33ff97c0cd845ee824b0aef45e68",
)
WORDS = Package(
    name="emojibase-data",
    version="17.0.0",
    client="npm",
    licence="MIT (Miles Johnson); labels and tags: Unicode CLDR, Unicode License",
    contents="labels and tags",
    size=6711091,
    sha256="d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
)
STAMPS = Package(
    name="tuxpaint-stamps-default",
    version="2022.06.04-1",
    client="apt",
    licence="GPL-2 (Bill Kendrick and others)",
    contents="Tux Paint's stamps, of which the photographs are used, with sentences",
    size=160880444,
    sha256="6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
)
GNOME = Package(
    name="gnome-backgrounds",
    version="43.1-1",
    client="apt",
    licence="CC-BY-SA-2.0, CC-BY-SA-3.0, CC-BY-2.0 and GPL-2+ by file (GNOME's artists)",
    contents="wallpapers",
    size=32546832,
    sha256="a670dea21572652127d6e55f9cdb3a226d0037854fdbfd037003c7d00ee0dc4e",
)
MATE = Package(
    name="mate-backgrounds",
    version="1.26.0-1",
    client="apt",
    licence="GPL-2+ and CC-BY-SA by file (MATE's artists)",
    contents="wallpapers",
    size=46638500,
    sha256="7bf4c2209f34b4f61ba6d24c8b58c28b361e82e4b943aae6d42c030169af9e04",
)
RENDERER = Package(
    name="resvg-py",
    version="0.5.0",
    client="pip",
    licence="MPL-2.0",
    contents="renders SVG",
)
PACKAGES = (FLUENT, NOTO, OPENMOJI, WORDS, STAMPS, GNOME, MATE, RENDERER)


def folder_name(package: Package) -> str:
    """Return the name of the package's folder and of its archive without ending."""
    return f"{package.name.replace('@', '').replace('/', '-')}-{package.version}"


def unpacked(package: Package, folder: Path) -> Path:
    """Return the package's unpacked folder below `folder`, fetched if it is not there.

    Raises:
        ValueError: its client is missing or fails, or the archive is another one than expected.
    """
    target = folder / folder_name(package)
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{target.name}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    if package.client == "pip":
        requirement = f"{package.name}=={package.version}"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        run_client(package, [*pip, "--target", str(unfinished), requirement], folder)
    else:
        unpack(package, checked_archive(package, folder), unfinished)
    unfinished.rename(target)
    return target


def checked_archive(package: Package, folder: Path) -> Path:
    """Return the package's archive in `folder`, fetched if it is not there. Raises ValueError."""
    ending = ".tgz" if package.client == "npm" else ".deb"
    archive = folder / f"{folder_name(package)}{ending}"
    if not archive.is_file():
        download = folder / ".download"  # a client that is interrupted leaves no half archive
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir()
        requirement = f"{package.name}{'@' if package.client == 'npm' else '='}{package.version}"
        clients = {"npm": ["npm", "pack", "--silent"], "apt": ["apt-get", "download", "--quiet"]}
        run_client(package, [*clients[package.client], requirement], download)
        (file,) = download.iterdir()
        file.rename(archive)
        download.rmdir()
    size, sha256 = archive.stat().st_size, hashlib.sha256()
    with archive.open("rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
    if size != package.size or sha256.hexdigest() != package.sha256:
        raise ValueError(
            f"{archive} ({size} bytes) is not {package.name} {package.version} ({package.size} "
            "bytes) by its SHA-256: remove it, so that it is fetched again"
        )
    return archive


def unpack(package: Package, archive: Path, folder: Path):
    """Unpack an archive of npm or Debian into `folder`."""
    if package.client == "npm":
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
    else:
        run_client(package, ["dpkg-deb", "-x", str(archive), str(folder)], folder.parent)


def run_client(package: Package, command: Sequence[str], folder: Path):
    """Run a registry's client in `folder`. Raises ValueError with its last words if it fails."""
    if not shutil.which(command[0]):
        raise ValueError(f"{package.name}: there is no {command[0]} here; {NO_PACKAGE}")
    result = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        last_words = " ".join((result.stderr or result.stdout).split())[-300:]
        raise ValueError(
            f"{package.name} {package.version}: {command[0]} ends with status "
            f"{result.returncode} ({last_words}); {NO_PACKAGE} {package.name}=FOLDER"
        )
