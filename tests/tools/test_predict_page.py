"""tools/predict_page.py: the page's events, and the page in a real browser.

Skipped without gradio (extra `app`), the second test also without selenium and ChromeDriver.
"""

import json
import shutil
import time
from types import SimpleNamespace

import pytest

from rl_train.export.load_policy import open_policy
from tests.runs import CHECKPOINT, unmeasured
from tests.tools.test_predict_cards import pictures
from tools.picture_model import PictureModel

gradio = pytest.importorskip("gradio", reason="gradio is not installed (extra: app)")
from tools.predict_page import BOX, CLICK, Page  # noqa: E402

one_core = pytest.fixture(autouse=True)(unmeasured)
SECONDS = 120  # until an answer is there


@pytest.fixture(scope="module")
def page():
    policy = open_policy(CHECKPOINT, None, "policy", "cpu", 24, dtype="float32")
    return Page([PictureModel("base", policy, 24), PictureModel("policy", policy, 24)])


def click(x: int, y: int) -> SimpleNamespace:
    return SimpleNamespace(index=(x, y))


def test_the_events(page, scenes):
    image, mask = scenes[0]["image"], scenes[0]["mask"]
    rows, columns = mask.nonzero()
    left, top, right, bottom = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    corner, note, region, *answers = page.click(image, BOX, None, click(right, bottom))
    assert corner == (right, bottom) and "opposite" in note and "<img" not in region
    corner, note, region, *answers = page.click(image, BOX, corner, click(left, top))
    assert corner is None and note.startswith("Answered in") and len(pictures(region)) == 1
    assert [len(pictures(answer)) for answer in answers] == [5, 5]  # greedy, and four samples
    assert answers[0].count("IoU 0.") + answers[0].count("IoU 1.") == 5
    assert answers[0].split("</h3>")[1] == answers[1].split("</h3>")[1]
    corner, note, region, *_ = page.click(image, BOX, (left, top), click(left, bottom))
    assert corner is None and "no region" in note and not region
    x, y = int(columns.mean()), int(rows.mean())
    assert len(pictures(page.click(image, CLICK, None, click(x, y))[2])) == 1
    _, note, region, *answers = page.segment(image, scenes[0]["caption"])
    assert not region and [len(pictures(answer)) for answer in answers] == [1, 1]
    assert "confidence 0." in answers[0] and "% of the picture" in answers[0]
    assert "write a phrase" in page.segment(image, " ")[1]
    assert "Choose a picture" in page.segment(None, "a dog")[1]


@pytest.fixture
def browser(tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    driver = shutil.which("chromedriver")
    if not driver:
        pytest.skip("no chromedriver")
    options = webdriver.ChromeOptions()
    flags = ("headless", "no-sandbox", "disable-gpu", "disable-background-networking")
    for flag in (*flags, "window-size=1280,1000", f"user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    window = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield window
    window.quit()


def asked_addresses(browser) -> list[str]:
    """Return the addresses that the browser asked for, by its log."""
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["params"]["request"]["url"] for event in sent]


def test_in_a_browser(page, browser, scenes, tmp_path):
    """A picture, two clicks, a phrase; nothing is fetched from elsewhere."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    def find(selector: str) -> list:
        return browser.find_elements(By.CSS_SELECTOR, selector)

    def wait_for(selector: str, count: int = 1):
        WebDriverWait(browser, SECONDS).until(lambda _: len(find(selector)) == count, selector)

    scenes[0]["image"].save(tmp_path / "scene.png")
    app = page.build()
    app.launch(prevent_thread_lock=True, quiet=True)
    try:
        browser.get(app.local_url)
        wait_for("input[type=file]")
        find("input[type=file]")[0].send_keys(str(tmp_path / "scene.png"))
        wait_for("img[src*='scene.png']")
        time.sleep(1)  # the picture gets its size
        picture = find("img[src*='scene.png']")[0]
        for offset in (-30, 30):
            ActionChains(browser).move_to_element_with_offset(
                picture, offset, offset
            ).click().perform()
            time.sleep(1)
        wait_for("figure img", 11)  # the region, and of each model greedy and four samples
        phrase = find("textarea[placeholder='the red circle']")[0]
        phrase.send_keys("the red circle", Keys.ENTER)
        wait_for("figure img", 2)
        assert all("confidence 0." in caption.text for caption in find("figcaption"))
        urls = asked_addresses(browser)
        elsewhere = [url for url in urls if url.startswith("http") and app.local_url not in url]
        assert urls and not elsewhere
    finally:
        browser.get("about:blank")  # gradio may not close while a page still listens
        time.sleep(1)
        app.close()
