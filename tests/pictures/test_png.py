"""Maps as PNG, read back by another reader."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from headwise.pictures.png import DARK, LIGHT, address


def pixels(values: np.ndarray) -> np.ndarray:
    kind, _, body = address(values).partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(body))))


def test_no_weight_is_light_and_the_largest_is_dark() -> None:
    found = pixels(np.array([[0, 0.25, 0.5], [0.5, 0, 0]]))
    assert found.shape == (2, 3, 3)
    assert np.array_equal(found[0, 0], LIGHT) and np.array_equal(found[0, 2], DARK)
    assert np.abs(found[0, 1] - (LIGHT + DARK) / 2).max() <= 1
    assert np.array_equal(found[1, 0], DARK)


def test_what_is_no_number_is_grey() -> None:
    found = pixels(np.array([[np.nan, 0.3]]))
    assert found[0, 0].tolist() == [128] * 3
    assert np.array_equal(found[0, 1], DARK)
