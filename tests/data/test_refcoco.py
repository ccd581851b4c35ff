"""The RefCOCO reader on files written here: splits, both pickles, every form of mask, and a pickle
that would run a program."""

import json
import os
import pickle

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco
from torch.utils.data import DataLoader

from rl_train.data.errors import DamagedSample
from rl_train.data.images import image_key
from rl_train.data.loader import Batches
from rl_train.data.mixture import MixtureDataset
from rl_train.data.polygons import encode_segmentation
from rl_train.data.refcoco import RefCOCODataset
from rl_train.data.rle import decode_mask, rle_runs
from tests.campaigns.messy_cases import bad_huffman
from tools.gar_writer import encode_image, encode_mask

W, H = 40, 30
BOX, OVERLAP = (
    [5, 5, 25, 5, 25, 20, 5, 20],
    [15, 10, 35, 10, 35, 25, 15, 25],
)  # x, y of four corners each
MASK = np.zeros((H, W), dtype=bool)
MASK[5:20, 5:25] = True
BOTH = MASK.copy()
BOTH[10:25, 15:35] = True
PHRASES = ["red cup", "the cup on the left"]
SEGMENTATIONS = dict(
    polygon=[BOX],
    polygons=[BOX, OVERLAP],
    compressed=encode_mask(MASK),
    runs={"counts": rle_runs(encode_mask(MASK))[0].tolist(), "size": [H, W]},
    several=[encode_mask(MASK), encode_mask(BOTH & ~MASK)],
)


def ref(ref_id, split="val", ann_id=None, sentences=PHRASES):
    return {
        "ref_id": ref_id,
        "ann_id": ref_id if ann_id is None else ann_id,
        "image_id": 1,
        "category_id": 3,
        "split": split,
        "file_name": f"COCO_train2014_{1:012d}_{ref_id}.jpg",
        "sentences": [
            {"sent_id": 10 * ref_id + k, "sent": text, "raw": text.upper(), "tokens": text.split()}
            for k, text in enumerate(sentences)
        ],
    }


def image_name(image_id):
    return f"COCO_train2014_{image_id:012d}.jpg"


def write_image(path, size=(W, H), data=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path.write_bytes(data or encode_image(Image.fromarray(pixels), "JPEG"))


def write(
    root, segmentations, refs, name="refcoco", images=(1,), of_image=None, protocol=2, by="unc"
):
    """instances.json and refs; annotation k + 1 has segmentations[k].

    It lies in image 1, or in of_image[k + 1].
    """
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    annotations = [
        {
            "id": k,
            "image_id": (of_image or {}).get(k, 1),
            "category_id": 3,
            "segmentation": s,
            "bbox": [0, 0, 1, 1],
        }
        for k, s in enumerate(segmentations, 1)
    ]
    (folder / "instances.json").write_text(
        json.dumps(
            dict(
                images=[
                    {"id": i, "file_name": image_name(i), "height": H, "width": W} for i in images
                ],
                annotations=annotations,
                categories=[{"id": 3, "name": "cup"}],
            )
        )
    )
    (folder / f"refs({by}).p").write_bytes(
        refs if isinstance(refs, bytes) else pickle.dumps(refs, protocol)
    )
    return root


def read(root, segmentation, **changes):
    write(root, [segmentation], [ref(1, **changes)])
    write_image(root / "train2014" / image_name(1))
    return RefCOCODataset(root)


@pytest.mark.parametrize(
    "place", ["", "train2014", "refcoco/coco2014/train2014", "images/mscoco/images/train2014"]
)
def test_a_row_for_each_sentence_whatever_the_layout(tmp_path, place):
    write(tmp_path, [[BOX]] * 3, [ref(1), ref(2, "testA"), ref(3, sentences=["cup"])])
    write_image(tmp_path / place / image_name(1))
    dataset = RefCOCODataset(tmp_path)
    assert dataset.report() == {"rows": 3, "kept": 3, "skipped": {}, "resized_masks": 0}
    assert [dataset[i]["image_id"] for i in range(3)] == [
        "refcoco/val/1/10",
        "refcoco/val/1/11",
        "refcoco/val/3/30",
    ]
    assert [dataset[i]["caption"] for i in range(3)] == [*PHRASES, "cup"]
    key = image_key((tmp_path / place / image_name(1)).read_bytes())
    assert dataset.image_keys.tolist() == [key] * 3
    sample = dataset[0]
    assert (
        sample["category"] == "cup"
        and sample["image"].mode == "RGB"
        and sample["image"].size == (W, H)
    )
    assert sample["mask"].dtype == bool and np.array_equal(sample["mask"], MASK)
    assert len(RefCOCODataset(tmp_path, split="testA")) == 2
    assert [
        s["image_id"]
        for batch in DataLoader(dataset, 2, num_workers=1, collate_fn=list)
        for s in batch
    ][2] == "refcoco/val/3/30"


def test_images_elsewhere_and_refcocog(tmp_path):
    write(tmp_path / "data", [[BOX]], [ref(1, "test")], name="refcocog", by="umd")
    with pytest.raises(ValueError, match="no usable region: no image: 2"):
        RefCOCODataset(tmp_path / "data", "refcocog", "test")
    write_image(tmp_path / "coco" / "train2014" / image_name(1))
    for image_root in ("coco", "coco/train2014"):
        dataset = RefCOCODataset(tmp_path / "data", "refcocog", "test", tmp_path / image_root)
        assert dataset[1]["image_id"] == "refcocog/test/1/11"


@pytest.mark.parametrize(
    "form, expected",
    [
        ("polygon", MASK),
        ("polygons", BOTH),
        ("compressed", MASK),
        ("runs", MASK),
        ("several", BOTH),
    ],
)
def test_every_form_of_mask(tmp_path, form, expected):
    mask = read(tmp_path, SEGMENTATIONS[form])[0]["mask"]
    assert (
        np.array_equal(mask, expected) and mask.max() == 1
    )  # the union: where two overlap it is not 2


def test_polygons_are_pycocotools():
    polygon = [3.2, 4.7, 31.9, 2.1, 22.4, 27.8, -2.0, 18.5]
    expected = coco.decode(coco.merge(coco.frPyObjects([polygon], H, W)))
    assert (
        np.array_equal(decode_mask(encode_segmentation([polygon], H, W)), expected.astype(bool))
        and 0 < expected.sum() < H * W
    )


def test_a_mask_of_another_size_is_resized(tmp_path):
    write(tmp_path, [[BOX], encode_mask(np.kron(MASK, np.ones((2, 2), bool)))], [ref(1), ref(2)])
    write_image(tmp_path / image_name(1), (2 * W, 2 * H))
    dataset = RefCOCODataset(tmp_path)
    assert (
        dataset.report()["resized_masks"] == 2
    )  # the polygons; the run-length mask has the image's size
    assert all(
        np.array_equal(dataset[i]["mask"], np.kron(MASK, np.ones((2, 2), bool))) for i in range(4)
    )


@pytest.mark.parametrize(
    "segmentation, reason",
    [
        ([BOX[:4]], "bad mask RLE"),
        ([BOX[:-1]], "bad mask RLE"),
        ([BOX[:-1] + ["20"]], "bad mask RLE"),
        ([BOX[:-1] + [1e9]], "bad mask RLE"),
        ([BOX, "5 5 9 9"], "bad mask RLE"),
        ([BOX, encode_mask(MASK)], "bad mask RLE"),
        (7, "bad mask RLE"),
        ([[3, 3, 3, 3, 3, 3]], "empty mask"),
        ([], "no mask"),
        (None, "no mask"),
        ({"counts": "0" * 9, "size": [H, W]}, "bad mask RLE"),
        ({"counts": [1, 2], "size": [H, W]}, "bad mask RLE"),
        ({"counts": [H * W], "size": [H, W]}, "empty mask"),
        ({"size": [H, W]}, "bad mask RLE"),
        ([encode_mask(MASK), encode_mask(MASK.T)], "bad mask RLE"),
    ],
)
def test_unusable_masks_are_counted(tmp_path, segmentation, reason):
    write(tmp_path, [segmentation, [BOX]], [ref(1), ref(2)])
    write_image(tmp_path / image_name(1))
    report = RefCOCODataset(tmp_path).report()
    assert report == {
        "rows": 4,
        "kept": 2,
        "skipped": {reason: 2},
        "resized_masks": 0,
        "first_skipped": {reason: ["refcoco/val/1/10", "refcoco/val/1/11"]},
    }


def test_other_unusable_rows_are_counted(tmp_path):
    refs = [
        ref(1),
        ref(2, ann_id=99),
        ref(3, sentences=["  ", "[SEG]", "cup [SEG]"]),
        ref(4),
        ref(5),
        ref(6),
    ]
    write(tmp_path, [[BOX]] * 6, refs, images=(1, 4, 5), of_image={4: 4, 5: 5, 6: 6})
    write_image(tmp_path / image_name(1))
    write_image(tmp_path / image_name(4), data=b"no image")
    dataset = RefCOCODataset(tmp_path)
    assert dataset.report()["skipped"] == {
        "blank caption": 2,
        "unreadable image header": 2,
        "no image": 6,
    }
    assert [dataset[i]["caption"] for i in range(3)] == [*PHRASES, "cup"]


def test_an_image_that_does_not_decode(tmp_path):
    read(tmp_path, [BOX])
    good = (tmp_path / "train2014" / image_name(1)).read_bytes()
    (tmp_path / "train2014" / image_name(1)).write_bytes(bad_huffman(good))
    with pytest.raises(DamagedSample, match="refcoco/val/1/10: damaged image"):
        RefCOCODataset(tmp_path)[0]


# The pickle


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    write(tmp_path, [[BOX]], [ref(1) | {"file_name": Bomb(tmp_path / "pwned")}], protocol=protocol)
    with pytest.raises(
        ValueError, match=r"refs\(unc\)\.p is not a readable pickle of refs: .*mkdir"
    ):
        RefCOCODataset(tmp_path)
    assert not (tmp_path / "pwned").exists()
    pickle.loads(
        (tmp_path / "refcoco" / "refs(unc).p").read_bytes()
    )  # what an ordinary unpickler does
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(np.float64(1)),
        pickle.dumps(len),
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02\x82\x01.",
        b"",
        b"I1",
        b"no pickle",
        pickle.dumps([ref(1)])[:-9],
        pickle.dumps(5),
        pickle.dumps({"ref": 1}),
        pickle.dumps([{"ref_id": 1}]),
        pickle.dumps([ref(1) | {"sentences": [{"sent_id": 1, "sent": 7}]}]),
    ],
)
def test_a_pickle_of_other_things_is_refused_by_name(tmp_path, data):
    write(tmp_path, [[BOX]], data)
    with pytest.raises(ValueError, match=r"refs\(unc\)\.p is not a readable pickle"):
        RefCOCODataset(tmp_path)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_and_python_2(tmp_path, protocol):
    write(tmp_path, [[BOX]], [ref(1)], protocol=protocol)
    write_image(tmp_path / image_name(1))
    assert RefCOCODataset(tmp_path)[0]["caption"] == "red cup"
    python2 = pickle.dumps([ref(1, sentences=["SENT"])], 2)
    python2 = python2.replace(
        b"X\x04\x00\x00\x00SENT", b"U\x06caf\xc3\xa9s"
    )  # a byte string of UTF-8
    write(tmp_path, [[BOX]], python2)
    assert RefCOCODataset(tmp_path)[0]["caption"] == "cafés"


# The files


def test_unknown_names_and_damaged_files_are_named(tmp_path):
    read(tmp_path, [BOX])
    with pytest.raises(ValueError, match="no split 'testC'; it has val"):
        RefCOCODataset(tmp_path, split="testC")
    with pytest.raises(ValueError, match=r"refcoco\+.instances.json is not a readable"):
        RefCOCODataset(tmp_path, "refcoco+")
    for content in ("{", "[]", '{"images": [], "annotations": [{}]}'):
        (tmp_path / "refcoco" / "instances.json").write_text(content)
        with pytest.raises(ValueError, match="instances.json is not a readable"):
            RefCOCODataset(tmp_path)


# gRefCOCO


def general(root, ann_ids, segmentations=([BOX], [OVERLAP], [BOX]), crowd=None, **of_ref):
    """A gRefCOCO of one phrase for each entry of ann_ids, all about image 1."""
    write(root, segmentations, [], name="grefcoco", images=(1, 2), of_image={3: 2})
    file = root / "grefcoco" / "instances.json"
    content = json.loads(file.read_text())
    for annotation in content["annotations"]:
        annotation["iscrowd"] = int(annotation["id"] == crowd)
    file.write_text(json.dumps(content))
    refs = [
        ref(k, sentences=[f"phrase {k}"]) | dict(ann_id=named) | of_ref
        for k, named in enumerate(ann_ids, 1)
    ]
    (root / "grefcoco" / "grefs(unc).json").write_text(json.dumps(refs))
    write_image(root / "train2014" / image_name(1))
    return RefCOCODataset(root, "grefcoco")


def test_phrases_of_several_regions_and_of_none(tmp_path):
    dataset = general(tmp_path, [[1, 2], [-1], [1], 2, -1])
    assert dataset.report() == {"rows": 5, "kept": 5, "skipped": {}, "resized_masks": 0}
    assert dataset.has_objects and dataset.names_nothing
    samples = [dataset[i] for i in range(5)]
    assert [len(sample["objects"]) for sample in samples] == [2, 0, 1, 1, 0]
    other = BOTH & ~MASK
    other[10:20, 15:25] = True
    assert np.array_equal(samples[0]["mask"], BOTH)
    assert np.array_equal(samples[0]["objects"], [MASK, other])
    assert samples[1]["mask"].shape == samples[1]["objects"].shape[1:] == (H, W)
    assert not samples[1]["mask"].any() and not dataset.mask(1, (H, W)).any()
    assert all(np.array_equal(s["mask"], s["objects"].any(0)) for s in samples)
    named = general(tmp_path / "other", [[1], [1, 2]])
    assert named.has_objects and not named.names_nothing


def test_how_regions_are_split_counts_in_the_digest(tmp_path):
    """A union alone would not tell two regions from one of the same pixels."""
    whole = encode_mask(BOTH)
    halves = [encode_mask(MASK), encode_mask(BOTH & ~MASK), whole]
    apart = general(tmp_path / "a", [[1, 2]], halves).content_keys[0]
    assert general(tmp_path / "b", [[1, 2]], halves).content_keys[0].tolist() == apart.tolist()
    joined = general(tmp_path / "c", [[1]], [whole] * 3).content_keys[0]
    assert apart[0] == joined[0] and apart[1] != joined[1]


@pytest.mark.parametrize(
    "ann_ids, crowd, reason",
    [
        ([[1, 99]], None, "no mask"),
        ([[1, 3]], None, "no mask"),  # of another image
        ([[2]], 2, "no mask"),  # a crowd alone
    ],
)
def test_regions_that_are_not_there_are_counted(tmp_path, ann_ids, crowd, reason):
    dataset = general(tmp_path, [[1], *ann_ids], crowd=crowd)
    assert dataset.report()["skipped"] == {reason: 1} and len(dataset) == 1


def test_a_crowd_among_regions_is_left_out(tmp_path):
    sample = general(tmp_path, [[1, 2]], crowd=2)[0]
    assert np.array_equal(sample["mask"], MASK) and len(sample["objects"]) == 1


def test_an_empty_region_among_others_is_damaged(tmp_path):
    dataset = general(tmp_path, [[1], [1, 2]], [[BOX], [[3, 3, 3, 3, 3, 3]], [BOX]])
    assert dataset.report()["skipped"] == {"empty mask": 1}


@pytest.mark.parametrize("content", ["{", "[{}]", '[{"ref_id": 1}]', "7"])
def test_other_json_is_refused_by_name(tmp_path, content):
    general(tmp_path, [[1]])
    (tmp_path / "grefcoco" / "grefs(unc).json").write_text(content)
    with pytest.raises(ValueError, match=r"grefs\(unc\)\.json is not a readable list of refs"):
        RefCOCODataset(tmp_path, "grefcoco")
    refs = [ref(1) | dict(ann_id=[{}])]
    (tmp_path / "grefcoco" / "grefs(unc).json").write_text(json.dumps(refs))
    with pytest.raises(ValueError, match="is not a readable list of refs"):
        RefCOCODataset(tmp_path, "grefcoco")


def test_in_a_mixture_each_sample_has_its_regions(tmp_path):
    several = general(tmp_path, [[1, 2], [-1]])
    single = read(tmp_path / "single", [BOX])
    mixed = MixtureDataset(dict(several=several, single=single), [1, 1])
    assert mixed.has_objects and mixed.names_nothing
    assert [mixed[i]["objects"].shape for i in range(4)] == [
        (count, H, W) for count in (2, 0, 1, 1)
    ]
    batch = Batches(mixed, Nothing())[[0, 1, 2]]
    assert batch.no_target == [False, True, False] and batch.has_masks
    assert Batches(mixed, Nothing())[[1]].has_masks  # which are empty, as they should be
    assert Batches(single, Nothing())[[0]].objects is None


class Nothing:
    """A preprocessor of no inputs."""

    def check(self, sample):
        pass

    def prepare(self, sample):
        pass

    def collate(self, prepared):
        pass
