"""The kept part of a large tensor shows an error anywhere in it."""

import torch

from tests.reference.subsample import LARGE, checksum, pack, thin, unpack


def test_small_tensors_are_whole():
    tensor = torch.arange(LARGE).view(2, -1)
    assert thin(tensor) is tensor


def test_every_seventh_and_the_means_of_blocks():
    tensor = torch.zeros(LARGE + 2)
    tensor[[7, 8, LARGE + 1]] = torch.tensor([3.0, 64.0, 640.0])
    kept = thin(tensor)
    samples, means = kept.split([4682, 513])  # 32,770 / 7 and / 64, rounded up
    assert samples.nonzero()[:, 0].tolist() == [1] and samples[1] == 3  # 8 and the last are between
    assert means.nonzero()[:, 0].tolist() == [0, 512]
    assert means[[0, 512]].tolist() == [67 / 64, 10]


def test_integers_have_a_checksum_of_all_elements():
    tensor = torch.zeros(LARGE + 1, dtype=torch.uint8)
    other = tensor.clone()
    other[1] = 1
    assert torch.equal(thin(tensor), thin(other)) and checksum(tensor) != checksum(other)


def test_masks_come_back_from_bits():
    masks = torch.rand(2, 5, 13, generator=torch.Generator().manual_seed(0)) > 0.5
    assert torch.equal(unpack(pack(masks), 13), masks.to(torch.uint8))
