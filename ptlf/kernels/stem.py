"""The CIFAR stem's 3 x 3 convolution of three channels as a matrix product over the pixels' neighbourhoods.

cuDNN needs more than twice the time. The kernel reads images of any layout and type, and writes the step's type.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ptlf.kernels.norm import ceil_div


@triton.jit
def _patches(x, out, size, height, width, by_image, by_channel, by_row, by_column, BLOCK: tl.constexpr):
    """32 values per pixel: the 27 of its 3 x 3 neighbourhood, in the order of a conv weight, and five zeros."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 32)
    channel, dy, dx = place // 9, place % 9 // 3 - 1, place % 3 - 1
    image, row, column = pixel // (height * width), pixel // width % height, pixel % width
    y, z = row[:, None] + dy[None, :], column[:, None] + dx[None, :]
    inside = (y >= 0) & (y < height) & (z >= 0) & (z < width) & (place < 27)[None, :] & (pixel < size)[:, None]
    at = (image * by_image)[:, None] + (channel * by_channel)[None, :] + y * by_row + z * by_column
    value = tl.load(x + at, mask=inside, other=0.0)
    to = pixel.to(tl.int64)[:, None] * 32 + place[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=(pixel < size)[:, None])


def patches(images: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 3, H, W) of any layout -> (N * H * W, 32): im2col for a 3 x 3 convolution as a matrix product."""
    n, channels, height, width = images.shape
    assert channels == 3
    size = n * height * width
    out = torch.empty(size, 32, dtype=dtype, device=images.device)
    _patches[(ceil_div(size, 128),)](images, out, size, height, width, *images.stride(), BLOCK=128)
    return out
