"""Makes the library: fetches the packages, renders SVG, keeps what shows an object.

Everything of it is the artists' work under their licences (LICENCES.txt in the library) and is not
to be committed.
"""

import importlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from tools.experiments.pictures import packages
from tools.experiments.pictures.concepts import (
    CONCEPTS_FILE,
    PHOTOGRAPH,
    Concept,
    alike,
    fault_of_pictures,
    fault_of_words,
    is_photograph,
    look,
    name_in,
    plain,
    with_hypernyms,
    write_library,
)
from tools.experiments.pictures.packages import PACKAGES, Package, unpacked

SIDE = 256  # pixels of a rendered picture
BACKGROUND_SIDE = 1400  # longest side of a wallpaper that is kept
ENDINGS = (".jpg", ".png", ".webp", ".svg")
# Wallpapers that show what a caption may name, or a logo: a scene's words would not be true of one
# object alone. Those with transparent parts are left out too.
SHOW_OBJECTS = (
    "pixels-d pixels-l Float-into-MATE FreshFlower Garden GreenTraditional LadyBird TwoWings "
    "YellowFlower"
).split()
VARIATION = "fe0f"  # a code point that asks for colour and names no picture of its own


def fetch(output_dir: Path, package_dirs: dict[str, Path]):
    """Make the library in `output_dir`, going on where an interrupted call stopped.

    Args:
        package_dirs: {name of a package: folder that holds it unpacked}.

    Raises:
        ValueError: an unknown package, a client fails, or a package lacks what it should hold.
    """
    known = {package.name for package in PACKAGES}
    if unknown := sorted(package_dirs.keys() - known):
        raise ValueError(f"--package_dirs {unknown[0]}: must be one of {', '.join(sorted(known))}")
    output_dir.mkdir(parents=True, exist_ok=True)
    folders = {}
    for package in tqdm(PACKAGES, desc="packages", unit="package"):
        named = package_dirs.get(package.name)
        folders[package] = named or unpacked(package, output_dir / "packages")
        if not folders[package].is_dir():
            raise ValueError(f"--package_dirs {package.name}: there is no folder {named}")
    if (output_dir / CONCEPTS_FILE).is_file():
        tqdm.write(f"{output_dir}: the library is complete")
        return
    sys.path.insert(0, str(folders[packages.RENDERER]))
    render_svg = importlib.import_module("resvg_py").svg_to_bytes
    write_backgrounds(output_dir / "backgrounds", folders, render_svg)
    concepts, dropped = read_emoji(output_dir, folders, render_svg)
    concepts = with_hypernyms(concepts)
    concepts += with_hypernyms(read_photographs(output_dir, folders[packages.STAMPS]))
    write_licences(output_dir / "LICENCES.txt")
    (output_dir / "dropped.json").write_text(json.dumps(dropped, indent=1))
    write_library(output_dir, concepts)
    reasons = Counter(re.sub(r"alike .*", "alike", reason) for reason in dropped.values())
    tqdm.write(f"{output_dir}: {len(concepts)} concepts; left out: " + ", ".join(
        f"{reason}: {count}" for reason, count in reasons.most_common()
    ))  # fmt: skip


def code_of(name: str) -> str:
    """Return the code points of an emoji, as "1f981", from a file name or a hex code."""
    points = name.lower().split(".")[0].split("-")
    return "-".join(point for point in points if point != VARIATION)


def only(folder: Path, pattern: str) -> Path:
    """Return the one path below `folder` that fits `pattern`. Raises ValueError."""
    paths = sorted(folder.glob(f"**/{pattern}"))
    if not paths:
        raise ValueError(f"{folder} holds no {pattern}: is it the unpacked package?")
    return paths[0]


def keep_picture(path: Path, make: Callable[[], Image.Image]) -> Image.Image:
    """Return the picture in the file `path`; if it is not there, make and write it."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        make().save(unfinished, format="PNG" if path.suffix == ".png" else "JPEG", quality=92)
        unfinished.replace(path)  # whole, or not there
    return Image.open(path)


def read_emoji(
    output_dir: Path, folders: dict[Package, Path], render_svg: Callable[..., bytes]
) -> tuple[list[Concept], dict[str, str]]:
    """Return the object-like concepts of all three artists and {label left out: reason}."""
    english = only(folders[packages.WORDS], "en/data.json").parents[1]
    groups = json.loads((english / "meta" / "groups.json").read_text())
    fluent = {code_of(p.name): p for p in folders[packages.FLUENT].glob("**/assets/*.webp")}
    noto_file = only(folders[packages.NOTO], "icons.json")
    noto, codes = (
        json.loads(noto_file.with_name(n).read_text()) for n in (noto_file.name, "chars.json")
    )
    noto_names = {code_of(code): name for code, name in codes.items()}
    openmoji = {code_of(p.name): p for p in folders[packages.OPENMOJI].glob("**/color/svg/*.svg")}

    def noto_svg(name: str) -> str:
        icon = noto["icons"].get(name) or noto["icons"][noto["aliases"][name]["parent"]]
        width, height = icon.get("width", noto["width"]), icon.get("height", noto["height"])
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
        return f"{head}{icon['body']}</svg>"

    concepts, looks, dropped = [], [], {}
    entries = json.loads((english / "en" / "data.json").read_text(encoding="utf-8"))
    for entry in tqdm(entries, desc="cut-outs", unit="concept"):
        code, label = code_of(entry["hexcode"]), plain(entry["label"])
        group = groups["groups"].get(str(entry.get("group")), "")
        fault = fault_of_words(group, label)
        if not fault and not (code in fluent and code in noto_names and code in openmoji):
            fault = "not of all three artists"
        if fault:
            dropped[label] = fault
            continue
        sources = dict(
            fluent=lambda: Image.open(fluent[code]).convert("RGBA"),
            noto=lambda: rendered(render_svg, svg_string=noto_svg(noto_names[code])),
            openmoji=lambda: rendered(render_svg, svg_path=str(openmoji[code])),
        )
        paths = {artist: f"cutouts/{artist}/{code}.png" for artist in sources}
        pictures = {
            artist: keep_picture(output_dir / paths[artist], make).convert("RGBA")
            for artist, make in sources.items()
        }
        if fault := fault_of_pictures(group, pictures):
            dropped[label] = fault
            continue
        theme = groups["subgroups"][str(entry["subgroup"])]
        tags = tuple(dict.fromkeys(plain(tag) for tag in entry.get("tags", ()) if plain(tag)))
        concepts.append(Concept(label, tags, theme, {a: [path] for a, path in paths.items()}))
        looks.append({artist: look(picture) for artist, picture in pictures.items()})
    twins = alike(looks)
    dropped |= {concepts[i].label: f"alike {concepts[j].label}" for i, j in twins.items()}
    return [concept for i, concept in enumerate(concepts) if i not in twins], dropped


def rendered(render_svg: Callable[..., bytes], **source: str) -> Image.Image:
    """Render an SVG at SIDE x SIDE, RGBA."""
    return Image.open(io.BytesIO(render_svg(width=SIDE, height=SIDE, **source))).convert("RGBA")


def read_photographs(output_dir: Path, folder: Path) -> list[Concept]:
    """Return the photographs among Tux Paint's stamps whose sentence names one thing."""
    concepts: dict[str, Concept] = {}
    stamps = only(folder, "stamps")
    for path in tqdm(sorted(stamps.glob("**/*.png")), desc="photographs", unit="stamp"):
        text, place = path.with_suffix(".txt"), path.parent.relative_to(stamps).as_posix()
        sentence = text.read_text(encoding="utf-8").splitlines()[0] if text.is_file() else ""
        name = name_in(sentence)
        if not name or re.search(r"_(mirror|flip)", path.stem):
            continue
        image = Image.open(path).convert("RGBA")
        if not is_photograph(place, image):
            continue
        file = f"cutouts/{PHOTOGRAPH}/{place.replace('/', '-')}-{path.stem}.png"
        keep_picture(output_dir / file, lambda: image)
        concept = concepts.setdefault(
            name, Concept(name, tuple(place.split("/")), place, {PHOTOGRAPH: []}, sentence.strip())
        )
        concept.pictures[PHOTOGRAPH].append(file)
    return list(concepts.values())


def write_backgrounds(
    output_dir: Path, folders: dict[Package, Path], render_svg: Callable[..., bytes]
):
    """Write the wallpapers that show no object, at most BACKGROUND_SIDE pixels on a side."""
    for package in (packages.GNOME, packages.MATE):
        files = [p for p in only(folders[package], "backgrounds").rglob("*") if p.suffix in ENDINGS]
        for path in tqdm(sorted(files), desc=package.name, unit="wallpaper"):
            target = output_dir / f"{package.name.split('-')[0]}-{path.stem}.jpg"
            if path.stem in SHOW_OBJECTS or target.is_file():
                continue
            image = Image.open(path) if path.suffix != ".svg" else wide(render_svg, path)
            image.thumbnail((BACKGROUND_SIDE, BACKGROUND_SIDE))
            if image.convert("RGBA").getextrema()[3][0] == 255:
                keep_picture(target, lambda: image.convert("RGB"))


def wide(render_svg: Callable[..., bytes], path: Path) -> Image.Image:
    """Render an SVG file BACKGROUND_SIDE pixels wide."""
    return Image.open(io.BytesIO(render_svg(svg_path=str(path), width=BACKGROUND_SIDE)))


def write_licences(file: Path):
    """Write whose pictures the library holds and under which licences."""
    lines = ["The pictures and words of this library are not ours. They come from:", ""]
    for package in PACKAGES:
        lines += [f"{package.name} {package.version} ({package.client})"]
        lines += [f"    {package.contents}; licence: {package.licence}"]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
