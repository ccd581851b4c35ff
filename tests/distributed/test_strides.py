"""Two ranks average gradients of a 1x1 convolution over channels-last images without a warning."""

import warnings

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rl_train.distributed import process_group
from rl_train.policies.lora import freeze_all_but
from tests.ranks import forked

CHANNELS_LAST = (256, 1, 256, 256)


def backward():
    process_group.init()
    torch.manual_seed(0)
    model, reference = (nn.Conv2d(256, 64, 1) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    # The strides that cuDNN gives, and some kernels of the CPU.
    model.weight.register_hook(lambda gradient: gradient.as_strided((64, 256, 1, 1), CHANNELS_LAST))
    freeze_all_but(model, {"all": ""})
    images = torch.randn(2, 256, 8, 8).to(memory_format=torch.channels_last)
    warnings.simplefilter("always")
    DistributedDataParallel(model)(images).square().sum().backward()
    reference(images).square().sum().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert parameter.grad.stride() == parameter.stride()
        assert torch.equal(parameter.grad, expected.grad)  # both ranks have the same images
    process_group.close()


def test_no_warning_of_strides(tmp_path):
    for status, output in forked(tmp_path, backward, backward):
        assert status == 0, output
        assert "strides" not in output
