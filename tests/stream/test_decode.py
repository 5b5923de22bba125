import warnings

import numpy as np
import pytest
from pictures import encoded, picture
from PIL import Image

from ptlf.stream.decode import BadImage, to_square
from ptlf.stream.packing import decode_squares
from ptlf.stream.rows import Row, list_split


def test_sizes_orientation_and_sixteen_bits() -> None:
    image = picture(60, 40)
    reference = np.asarray(image.resize((30, 20), Image.Resampling.BICUBIC).crop((5, 0, 25, 20)), int)
    assert np.abs(to_square(encoded(image, "PNG"), 20) - reference).max() <= 1
    image = picture(16, 16)
    assert np.array_equal(to_square(encoded(image, "PNG"), 16), np.asarray(image))
    for width, height in ((2, 3), (1, 20000)):
        assert to_square(encoded(picture(width, height), "PNG"), 8).shape == (8, 8, 3)
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 20:] = 255  # left black, right white; turned clockwise: top black, bottom white
    exif = Image.Exif()
    exif[0x0112] = 6
    result = to_square(encoded(Image.fromarray(pixels), "JPEG", exif=exif), 20)
    assert result[:8].max() < 30 and result[12:].min() > 225
    values = np.array([[0, 128, 129], [257, 32768, 65534], [65535, 400, 1000]], np.uint16)
    expected = (values.astype(int) * 2 + 257) // 514  # values / 257, rounded
    for deep, form in ((values, "PNG"), (values.astype(np.int32), "TIFF")):
        result = to_square(encoded(Image.fromarray(deep), form), 3)
        assert np.array_equal(result, np.repeat(expected[..., None], 3, axis=2))


def test_modes_of_colour() -> None:
    for image in (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), Image.new("LA", (8, 8), (0, 0))):
        assert to_square(encoded(image, "PNG"), 8).min() == 255
    half = to_square(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "PNG"), 8)
    assert np.all(half == 127)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 200, 10, 20])
    assert np.all(to_square(encoded(palette, "PNG"), 8)[0, 0] == [200, 10, 20])
    assert to_square(encoded(palette, "PNG", transparency=1), 8).min() == 255
    cmyk = to_square(encoded(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG"), 16)
    assert np.abs(cmyk[8, 8].astype(int) - [0, 255, 255]).max() < 10
    assert np.all(to_square(encoded(Image.new("L", (8, 8), 77), "PNG"), 8) == 77)
    assert np.all(to_square(encoded(Image.new("1", (8, 8), 1), "PNG"), 8) == 255)


def test_decompression_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(picture(30, 30), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (batch,) = decode_squares(list_split([Row("a", content)] * 9), 8)  # above the limit: Pillow only warns
        assert len(batch.images) == 9 and warnings.filters[0][0] == "error"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(BadImage, match="DecompressionBomb"):
        to_square(content, 8)
