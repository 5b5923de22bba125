"""Images laid out so that a stem's convolution, with three input channels, becomes one that a GPU computes fast.

The CIFAR stem, 3 x 3, becomes a matrix product over the pixels' neighbourhoods (`patches`). The ImageNet stem, 7 x 7
with stride 2, becomes a 4 x 4 convolution with stride 1 over squares of 2 x 2 pixels with 16 channels (`squares`): for
512 images of 224 px in bfloat16 cuDNN then takes 1.3 ms on an H200, not 3.5. Either kernel reads images of any layout
and type, and writes them in the step's type.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from ptlf.training.triton_bn import blocks_of

ON_SQUARES = ((1, 1), (0, 0))  # stride and padding of the convolution over squares


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


@triton.jit
def _squares(x, out, size, height, width, down, across, by_image, by_channel, by_row, by_column, BLOCK: tl.constexpr):
    """16 values per square of 2 x 2 pixels: 12 in the order row, column, channel, and four zeros.

    down, across: squares of an image with its border, which is two squares wide before it and one behind.
    """
    square = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 16)
    image, row, column = square // (down * across), square // across % down, square % across
    y = ((row - 2) * 2)[:, None] + (place // 6)[None, :]
    z = ((column - 2) * 2)[:, None] + (place % 6 // 3)[None, :]
    inside = (y >= 0) & (y < height) & (z >= 0) & (z < width) & (place < 12)[None, :] & (square < size)[:, None]
    at = (image.to(tl.int64) * by_image)[:, None] + (place % 3 * by_channel)[None, :] + y * by_row + z * by_column
    value = tl.load(x + at, mask=inside, other=0.0)
    to = square.to(tl.int64)[:, None] * 16 + place[None, :]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=(square < size)[:, None])


def patches(images: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 3, H, W) of any layout -> (N * H * W, 32): im2col for a 3 x 3 convolution as a matrix product."""
    n, channels, height, width = images.shape
    assert channels == 3
    size = n * height * width
    out = torch.empty(size, 32, dtype=dtype, device=images.device)
    _patches[(blocks_of(size, 128),)](images, out, size, height, width, *images.stride(), BLOCK=128)
    return out


def takes_squares(layer: nn.Conv2d) -> bool:
    """Whether it is the ImageNet stem's."""
    settings = (layer.in_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode)
    return settings == (3, (7, 7), (2, 2), (3, 3), (1, 1), "zeros") and layer.groups == 1


def squares(images: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, 3, H, W) of any layout -> (N, 16, ceil(H / 2) + 3, ceil(W / 2) + 3), channels-last: squares of 2 x 2 pixels.

    A border of zeros stands for the padding: output i of the 7 x 7 convolution reads pixels 2i - 3 to 2i + 3, which lie
    in squares i - 2 to i + 1.
    """
    n, channels, height, width = images.shape
    assert channels == 3
    down, across = blocks_of(height, 2) + 3, blocks_of(width, 2) + 3
    size = n * down * across
    out = torch.empty(n, 16, down, across, dtype=dtype, device=images.device, memory_format=torch.channels_last)
    sizes = (size, height, width, down, across)
    _squares[(blocks_of(size, 128),)](images, out, *sizes, *images.stride(), BLOCK=128)
    return out


def weight_on_squares(weight: Tensor) -> Tensor:
    """(C, 3, 7, 7) -> (C, 16, 4, 4), channels-last, for `squares` with the settings `ON_SQUARES`. Differentiable."""
    pixels = F.pad(weight, (1, 0, 1, 0)).view(-1, 3, 4, 2, 4, 2)  # 8 x 8, with a row and a column of zeros before
    by_square = pixels.permute(0, 2, 4, 3, 5, 1).flatten(3)  # (C, 4, 4, 12)
    return F.pad(by_square, (0, 4)).permute(0, 3, 1, 2)
