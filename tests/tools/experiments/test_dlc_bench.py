"""DLC-Bench's protocol on a benchmark of three regions in its layout, with a judge of rules."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo
from rl_train.rewards import LLMJudge
from tests.judge_server import MODEL, JudgeServer
from tests.runs import CHECKPOINT, on_one_core
from tools.experiments import dlc_bench
from tools.experiments.dlc_questions import Question, chosen, prompt, recognition, score
from tools.gar_writer import encode_mask

one_core = pytest.fixture(autouse=True)(on_one_core)
COLOUR = [
    ["The cup is not mentioned.", 0],
    ["The colour of the cup is not mentioned, but the cup is.", 0.5],
    ["The colour of the cup is mentioned and is not red.", -1],
    ["The colour of the cup is mentioned and is red.", 1],
]
SPOON = [["The spoon is not mentioned.", 1], ["The spoon is mentioned.", -1]]


def question(choices, kind="positive"):
    return dict(question="Which of these is right?", choices=choices, type=kind)


QUESTIONS = {
    "11": [question(COLOUR), question(COLOUR), question(SPOON, "negative")],
    "12": [question(COLOUR), question(SPOON, "negative"), question(SPOON, "negative")],
    "21": [question(COLOUR)],  # none that is negative
}
NAMES = {"11": "cup", "12": "orange", "21": "chopsticks"}
CAPTIONS = {"11": "A red cup.", "12": "A spoon {of} wood", "21": "A stick.", "query": "Describe"}


@pytest.fixture
def folder(tmp_path, scenes):
    """The benchmark: annotations 11 and 12 of one image, 21 of another."""
    root = tmp_path / "DLC-bench"
    (root / "images").mkdir(parents=True)
    images, annotations = [], []
    for image, (scene, keys) in enumerate(zip(scenes, ([11, 12], [21])), 1):
        scene["image"].save(root / "images" / f"{image}.png")
        width, height = scene["image"].size
        images.append(dict(id=image, file_name=f"{image}.png", width=width, height=height))
        mask = encode_mask(scene["mask"])
        corner = [0, 0, width / 2, 0, width / 2, height / 2, 0, height / 2]
        for key, segmentation in zip(keys, (mask, [corner])):
            annotations.append(dict(id=key, image_id=image, segmentation=segmentation))
    files = dict(annotations=dict(images=images, annotations=annotations, categories=[]))
    for name, content in dict(files, qa=QUESTIONS, class_names=NAMES).items():
        (root / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "captions.json").write_text(json.dumps(CAPTIONS))
    return root


@pytest.fixture
def words(monkeypatch):
    """A library of English in place of inflect, which is an extra and takes seconds to import."""
    engine = SimpleNamespace(
        a=lambda word: f"a {word}", singular_noun=lambda word: word.endswith("s") and word[:-1]
    )
    monkeypatch.setitem(sys.modules, "inflect", SimpleNamespace(engine=lambda: engine))


def by_rules(chat, n):
    """A judge that finds no chopsticks in "stick", red in "red", and a spoon where one is named."""
    asked = chat[-1]["content"]
    if "The description is:" not in asked:  # is it there?
        return "1"
    caption = asked.split("The description is:\n")[1].split("\n\nFrom the")[0]
    if "Is it likely" in asked:
        return "B. No" if "chopsticks" in asked else "A. Yes"
    if "spoon is" in asked:
        return "B" if "spoon" in caption else "A. The spoon is not mentioned."
    return COLOUR[3][0] if "red" in caption else "the colour of the cup is mentioned and is not"


def judged(folder, server, **changes):
    """--output of the verb judge."""
    values = dict(
        data_dir=folder,
        captions=folder.parent / "captions.json",
        output=folder.parent / "out.json",
        llm_judge_base_url=server.url,
        llm_judge_model=MODEL,
    )
    flags = [word for item in (values | changes).items() for word in (f"--{item[0]}", str(item[1]))]
    dlc_bench.main(["judge", *flags])
    return json.loads((folder.parent / "out.json").read_text(), parse_constant=no_json)


def no_json(constant):
    raise AssertionError(f"{constant} is no JSON")


def complaint(*args, **changes):
    with pytest.raises(SystemExit) as stopped:
        judged(*args, **changes)
    assert stopped.value.code.startswith("dlc_bench: ") and "\n" not in stopped.value.code
    return stopped.value.code


# The questions


def test_the_judge_is_asked_in_the_words_of_the_original():
    asked = prompt(Question("Which?", ["One.", "Two."], [0, 1], "positive"), "A {red} cup.")
    lines = asked.split("\n")
    assert lines[0].startswith("Answer the multiple-choice question based on the text description")
    assert lines[1].startswith("1. Do not output any reasoning. ") and lines[2].startswith("2. ")
    assert lines[3:] == [
        "",
        "The description is:",
        "A {red} cup.",
        "",
        "From the description above, please answer the following question with one of the choices:",
        "Which?",
        "A. One.",
        "B. Two.",
        "",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wild bird", "object in the description is a wild bird or an object"),
        ("orange", "object in the description is an orange or an object"),
        ("unicycle", "object in the description is a unicycle or an object"),
        ("chopsticks", "objects in the description are chopsticks or objects"),
        ("bus", "object in the description is a bus or an object"),
    ],
)
def test_first_whether_it_is_of_the_class(name, words):
    pytest.importorskip("inflect")  # of the extra `eval`
    asked = recognition(name)
    assert asked.choices == ["Yes", "No"] and asked.text == (
        f"Is it likely that the {words} of a similar type? Again, It does not have to be an exact "
        "match."
    )


@pytest.mark.parametrize(
    ("reply", "place"),
    [
        (" the spoon IS mentioned. ", 1),  # a choice
        ("B. The spoon is mentioned.", 1),
        ("a", 0),
        ("It is A. The spoon is not mentioned.", 0),  # holds one
        ("B. the cup is there", 1),  # begins with its letter
        ("The spoon is mentioned. No: the spoon is not mentioned.", 0),  # the last that begins
        ("spoon is not", 0),  # a part of one
        ("the spoon is", 0),  # of two: the longer
        ("b\nfor it says so", 1),
        ("C. neither", None),  # there is no such choice
        ("c", None),
        ("e", None),
        ("I cannot say", None),
        ("  ", None),
    ],
)
def test_what_a_reply_means(reply, place):
    assert chosen(reply, [text for text, _ in SPOON]) == place


def test_of_choices_inside_each_other_the_longest():
    choices = ["red", "red and blue", "blue"]
    assert chosen("it is red and blue", choices) == 2  # "blue" begins last
    assert chosen("it says red", ["red", "red."]) == 0 and chosen("so red. it is", ["red", "red."])


def test_scores_by_hand():
    questions = [
        Question("q", [text for text, _ in choices], [points for _, points in choices], kind)
        for choices, kind in (
            (COLOUR, "positive"),
            (COLOUR, "positive"),
            (SPOON, "negative"),
            (SPOON, "negative"),
        )
    ]
    of = score(questions, ["Yes", "d", "b", "a", "b"])
    assert (of.positive, of.negative, of.recognised) == (0.75, 0, True)
    assert of.points == [1, 0.5, 1, -1] and of.num_unreadable == 0
    of = score(questions, ["No", "d", "c", "a", "b"])  # at most 0 each
    assert (of.positive, of.negative, of.points) == (-0.5, -0.5, [0, -1, 0, -1])
    of = score(questions[:1], ["Yes", "d"])
    assert (of.positive, of.negative) == (1, None)
    for replies in (["Yes", "d", "??", "a", "b"], ["No", "d", "??", "a", "b"]):
        of = score(questions, replies)
        assert math.isnan(of.positive) and of.num_unreadable == 1
    of = score(questions, ["??", "d", "c", "a", "b"])
    assert all(map(math.isnan, (*of.points, of.positive, of.negative))) and of.recognised is None


# The program


def test_means_over_regions_by_hand(folder, words, capsys):
    with JudgeServer(by_rules) as server:
        found = judged(folder, server)
        # whether it is there; 3 questions with one more each, and 4, of which two come twice
        assert len(server.chats) == 8
        assert judged(folder, server) == found
    scores = {key: (of["positive"], of["negative"]) for key, of in found["regions"].items()}
    # 11: red twice, no spoon. 12: no choice, but a part of the third. 21: not of the class.
    assert scores == {"11": (1, 1), "12": (-1, -1), "21": (-1, None)}
    means = dict(positive=-1 / 3, negative=0, average=-1 / 6)
    assert found["means"] == pytest.approx(means) and found["num_unscored"] == 0
    assert found["num_regions"] == dict(positive=3, negative=2)
    assert found["num_not_recognised"] == 1 and found["regions"]["21"]["recognised"] is False
    assert server.last["temperature"] == 0 and server.last["max_tokens"] in (1, 300)
    assert "average       -0.1667" in capsys.readouterr().out


def test_what_cannot_be_read_is_no_number(folder, words, capsys):
    def behaviour(chat, n):
        rubbish = "A red cup" in chat[-1]["content"] and "spoon is" in chat[-1]["content"]
        return "I would rather not" if rubbish else by_rules(chat, n)

    with JudgeServer(behaviour) as server:
        found = judged(folder, server)
    assert found["num_unscored"] == found["num_unreadable"] == 1
    assert found["means"] == pytest.approx(dict(positive=-1, negative=-1, average=-1))
    of = found["regions"]["11"]
    assert of["negative"] is None and of["points"] == [1, 1, None]
    assert "1 regions have no score and count in no mean: 1 replies" in capsys.readouterr().out
    with JudgeServer(lambda chat, n: "I would rather not") as server:
        assert set(judged(folder, server)["means"].values()) == {None}


def test_a_judge_that_stops_answering_ends_it(folder, words, monkeypatch):
    monkeypatch.setattr(dlc_bench, "LLMJudge", lambda *args: LLMJudge(*args, max_retries=0))

    def failing(chat, n):
        return by_rules(chat, n) if "stick" not in chat[-1]["content"] else (500, "{}")

    with JudgeServer(failing) as server:
        said = complaint(folder, server)
        assert f"--llm_judge_base_url {server.url}: " in said and "Error code: 500" in said
    assert not (folder.parent / "out.json").exists()
    server.url = "http://127.0.0.1:9/v1"
    assert "Connection error" in complaint(folder, server)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("captions", {"11": None}, "has no caption of 11, which qa.json asks about"),
        ("captions", {"12": "Error: out of memory"}, "has no caption of 12"),
        ("DLC-bench/class_names", {"21": ""}, "class_names.json has no name of 21"),
        ("DLC-bench/qa", {"11": [question(SPOON, "negative")]}, "11 has no positive question"),
        ("DLC-bench/qa", {"12": [question(SPOON, "odd")]}, "question 0 of 12 is of type 'odd'"),
        ("DLC-bench/qa", {"12": [question([["One.", 1]])]}, "question 0 of 12 has no 2 to 5"),
        ("DLC-bench/qa", {"12": [question([["a", 1], ["b", "1"]])]}, "has no 2 to 5 choices"),
        ("DLC-bench/qa", {"12": "What?"}, "12 holds no list of questions"),
        ("DLC-bench/qa", {"12": [dict(type="positive")]}, "question 0 of 12 has no text"),
    ],
)
def test_odd_files_are_refused(folder, file, change, words):
    path = folder.parent / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    server = JudgeServer(by_rules)  # which nobody asks
    server.http.server_close()
    assert words in complaint(folder, server)


def test_missing_files_are_refused(folder, monkeypatch):
    server = JudgeServer(by_rules)
    server.http.server_close()
    monkeypatch.setitem(sys.modules, "inflect", None)
    assert "DLC-Bench needs inflect: pip install" in complaint(folder, server)
    (folder / "qa.json").write_text("[]")
    assert "qa.json holds no JSON object" in complaint(folder, server)
    (folder / "qa.json").unlink()
    assert "qa.json is not a readable JSON file" in complaint(folder, server)


def test_captions_are_those_of_the_model(folder):
    """They stand by annotation id in the file that the verb judge reads."""
    out = folder.parent / "said.json"
    flags = f"--model_path {CHECKPOINT} --max_completion_length 8 --num_workers 0 --dtype float32"
    argv = ["caption", "--data_dir", str(folder), "--captions", str(out), *flags.split()]
    dlc_bench.main(argv)
    said = json.loads(out.read_text())
    assert said.pop("query") == "Please generate a detailed description for the given image region."
    assert list(said) == ["11", "12", "21"] and all(said.values()) and said["11"] != said["12"]
    (folder / "images" / "2.png").write_bytes(b"no image")
    with pytest.raises(SystemExit, match="annotation 21 of .*2.png: unreadable image header"):
        dlc_bench.main(argv)
    Image.new("RGB", (8, 8)).save(folder / "images" / "2.png")  # of another size: masks are resized
    assert dlc_bench.BenchRegions(folder)[2]["mask"].shape == (8, 8)
    for flag, value in (("batch_size", 0), ("best_of", -1), ("temperature", 0)):
        with pytest.raises(SystemExit):  # argparse's own
            dlc_bench.main([*argv, f"--{flag}", str(value)])


def test_a_model_of_points_describes_nothing(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    argv = ["caption", "--data_dir", str(folder), "--captions", str(tmp_path / "said.json")]
    sentence = f"--model_path {tmp_path}: its family is qwen_vl, not sa2va$"
    with pytest.raises(SystemExit, match=sentence):
        dlc_bench.main([*argv, "--model_path", str(tmp_path)])


def test_of_sampled_captions_that_by_which_the_region_is_found(folder, monkeypatch):
    def sampled(policy, batch, features, num_tokens, N):
        assert (num_tokens, N, policy.engine.temperature) == (8, 2, 0.7)
        captions = [f"{key} {word}" for key in batch.image_ids for word in ("one", "two")]
        return captions, torch.tensor([[0.5, 0.1], [0.2, 0.3], [0.4, 0.4]]), None

    monkeypatch.setattr(dlc_bench, "sample_captions", sampled)
    out = folder.parent / "said.json"
    flags = f"--model_path {CHECKPOINT} --max_completion_length 8 --num_workers 0 --dtype float32"
    argv = ["caption", "--data_dir", str(folder), "--captions", str(out), *flags.split()]
    dlc_bench.main([*argv, "--best_of", "2", "--temperature", "0.7"])
    said = json.loads(out.read_text())
    assert [said[key] for key in ("11", "12", "21")] == ["11 one", "12 two", "21 one"]


def test_several_ranks_share_the_captions_and_one_writes_them(folder, monkeypatch):
    asked, of_rank_1 = [], {}

    def gathered(mine):
        if isinstance(mine, tuple):  # of `all_sum`: sums and faults
            return [mine, ({}, [])]
        return [mine, of_rank_1 if isinstance(mine, dict) else []]

    def sampled(policy, batch, features, num_tokens, N):
        asked.append(batch.image_ids)
        return [f"of {key}" for key in batch.image_ids for _ in range(N)], torch.zeros(1, N), None

    monkeypatch.setattr(dlc_bench, "sample_captions", sampled)
    monkeypatch.setattr(process_group, "gather_objects", gathered)
    out = folder.parent / "said.json"
    flags = f"--model_path {CHECKPOINT} --num_workers 0 --dtype float32 --best_of 2 --batch_size 1"
    argv = ["caption", "--data_dir", str(folder), "--captions", str(out), *flags.split()]
    for rank, own in ((1, [["12"]]), (0, [["11"], ["21"]])):
        ranks = RankInfo(rank, 2, torch.device("cpu"))
        monkeypatch.setattr(process_group, "init", lambda ranks=ranks: ranks)
        asked.clear()
        dlc_bench.main(argv)
        assert asked == own and out.exists() == (rank == 0)
        of_rank_1 = {"12": "of 12"}
    said = json.loads(out.read_text())
    assert list(said.items())[:3] == [(key, f"of {key}") for key in ("11", "12", "21")]
