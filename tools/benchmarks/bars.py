"""The picture of `tools.benchmark profile`: a bar for each phase of a step."""

from PIL import Image, ImageDraw, ImageFont

# Of the classes, in the order of table and bars.
COLOURS = {
    "matrix products": "#4c78a8",
    "attention": "#f2a541",
    "our kernels": "#5fa55a",
    "other kernels": "#c8553d",
    "copies": "#8e6bad",
    "idle": "#e3e3e3",
}
LEFT, RIGHT, TOP, WIDTH, HEIGHT, PITCH = 190, 1290, 130, 1400, 38, 54  # of the bars, pixels


def totals(measured) -> dict[str, float]:
    """{class: seconds} of all phases together."""
    phases = measured["phases"].values()
    return {name: sum(p["classes"][name] for p in phases) for name in COLOURS}


def draw(measured) -> Image.Image:
    """A bar for each phase, as long as its wall time, of the classes' times; in milliseconds."""
    phases = measured["phases"]
    longest = max(max(p["seconds"], sum(p["classes"].values())) for p in phases.values())
    image = Image.new("RGB", (WIDTH, TOP + PITCH * len(phases)), "white")
    pen, text, title = ImageDraw.Draw(image), ImageFont.load_default(19), ImageFont.load_default(25)
    words = f"a step of {measured['total'] * 1e3:,.0f} ms, and what the GPU does in it"
    pen.text((24, 36), f"{measured['device']}: {words}", "black", title, "lm")
    x = 24
    for name, seconds in totals(measured).items():
        label = f"{name} {seconds * 1e3:,.0f} ms"
        pen.rectangle((x, 76, x + 20, 96), COLOURS[name])
        pen.text((x + 28, 86), label, "black", text, "lm")
        x += 58 + pen.textlength(label, text)
    for row, (phase, p) in enumerate(phases.items()):
        x, y = LEFT, TOP + PITCH * row
        middle = y + HEIGHT / 2
        pen.text((LEFT - 14, middle), phase, "black", text, "rm")
        for name, seconds in p["classes"].items():
            end, label = x + seconds * (RIGHT - LEFT) / longest, f"{seconds * 1e3:,.0f}"
            if round(end) > round(x):
                pen.rectangle((round(x), y, round(end) - 1, y + HEIGHT), COLOURS[name])
            if end - x > pen.textlength(label, text) + 8:
                colour = "black" if name in ("idle", "attention") else "white"
                pen.text(((x + end) / 2, middle), label, colour, text, "mm")
            x = end
        pen.text((x + 10, middle), f"{p['seconds'] * 1e3:,.0f} ms", "black", text, "lm")
    return image
