"""How images enter keys (kvpool_vllm.keys), without vLLM: by what is in them, not by what their sender calls them."""

import types
from collections import UserDict

import pytest
import torch

from kvpool_vllm import keys


class MultiModalFieldElem:
    """As vLLM has it: a tensor, or tensors, under a name."""

    def __init__(self, data):
        self.data = data


def image(seed, name, mm_hash=None, **more):
    pixels = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    item = UserDict(pixel_values=MultiModalFieldElem(pixels), grid=MultiModalFieldElem(torch.tensor([2, 2])), **more)
    return types.SimpleNamespace(data=item, identifier=name, mm_hash=mm_hash)


def names(*features):
    """What vLLM's own code would put into keys."""
    keys.name_images(types.SimpleNamespace(mm_features=list(features)))
    return [feature.identifier for feature in features]


@pytest.fixture(autouse=True)
def space():
    before = keys._seed
    keys.set_root(b"seed")
    yield
    keys._seed = before


def test_by_content():
    (one,), (same,), (other,) = names(image(1, "cat")), names(image(1, "dog")), names(image(2, "cat"))
    assert one == same != other
    # Also when it is asked twice, and when requests share the object.
    feature = image(1, "cat")
    assert names(feature) == names(feature) == [one] and feature.mm_hash == "cat"
    larger = image(1, "cat")
    larger.data["grid"].data = torch.tensor([4, 1])
    assert names(larger) != [one]
    assert names(image(1, one)) == [one] and names(image(2, one)) == [other]  # A name that looks like ours.


@pytest.mark.parametrize("data", [
    None,
    UserDict(address=MultiModalFieldElem(4096), monotonic_id=MultiModalFieldElem(1), signature=MultiModalFieldElem([1, 2])),
    UserDict(pixel_values=MultiModalFieldElem(torch.zeros(0)), grid=MultiModalFieldElem(torch.tensor([2, 2]))),
    UserDict(pixel_values=MultiModalFieldElem(torch.zeros(4)), handle=MultiModalFieldElem(object()))],
    ids=["elsewhere", "shared memory", "no pixels", "unknown"])
def test_what_has_no_content_here_is_this_engines_alone(data):
    first, second = (types.SimpleNamespace(data=data, identifier=name, mm_hash=None) for name in ("cat", "dog"))
    named = names(first, second)
    assert named[0] != named[1] and all(keys._OWN in name for name in named)


def test_an_adapter_of_the_encoder():
    """vLLM puts its name in front of the image's: what the encoder makes of it is another's."""
    plain, adapted = names(image(1, "cat", "cat"), image(1, "tuned:cat", "cat"))
    assert plain != adapted and keys._OWN in adapted
