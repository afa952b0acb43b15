import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_debug.recording.regions import box_of, coverage, show_box, whole

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return tuple(box)


def cut(tensor, box):
    return tensor[tuple(slice(*one) for one in box)]


@settings(max_examples=300)
@given(st.data(), shapes)
def test_a_slice_is_its_box(data, shape):
    base = torch.zeros(shape)
    box = data.draw(boxes_in(shape))
    assert box_of(cut(base, box), base) == box


@settings(max_examples=200)
@given(st.data(), shapes.filter(lambda s: len(s) > 1))
def test_a_slice_of_a_reshape_is_the_box_it_writes_or_none(data, shape):
    base = torch.zeros(shape)
    split = data.draw(st.integers(1, len(shape)))
    flat = base.view(*shape[: split - 1], -1) if split < len(shape) else base.view(shape)
    box = data.draw(boxes_in(tuple(flat.shape)))
    view = cut(flat, box)
    view.fill_(1)
    found = box_of(view, base)
    if found is not None:
        written = torch.zeros(shape)
        cut(written, found).fill_(1)
        assert torch.equal(written, base)


def test_views_that_are_no_box():
    base = torch.zeros(4, 6, 5)
    assert box_of(base[:, ::2], base) is None
    assert box_of(base.view(24, 5)[6:13], base) is None
    assert box_of(torch.zeros(4, 6, 5).transpose(0, 1), torch.zeros(6, 4, 5).transpose(0, 1)) is None
    assert box_of(base.transpose(0, 2), base) == whole(base.shape)
    assert box_of(base[2, 3, 1:2], base) == ((2, 3), (3, 4), (1, 2))


@settings(max_examples=200)
@given(st.data(), shapes)
def test_coverage_counts_every_element(data, shape):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    limit = data.draw(boxes_in(shape))
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        cut(counts, box).add_(1)
    inside = cut(counts, limit)
    found = coverage(shape, boxes, limit)
    assert (found.never, found.once, found.more) == tuple(
        int(mask.sum()) for mask in (inside == 0, inside == 1, inside > 1)
    )
    for mask, regions in ((counts == 0, found.missing), (counts > 1, found.repeated)):
        drawn = torch.zeros(shape, dtype=torch.int64)
        for box in regions:
            cut(drawn, box).add_(1)
        wanted = torch.zeros(shape, dtype=torch.bool)
        cut(wanted, limit).fill_(True)
        assert torch.equal(drawn, (mask & wanted).long())


def test_two_writes_of_one_half_are_not_a_whole():
    found = coverage((4, 2), [((0, 2), (0, 2)), ((0, 2), (0, 2))])
    assert (found.never, found.once, found.more) == (4, 0, 4)
    assert found.missing == (((2, 4), (0, 2)),)


def test_boxes_are_shown_as_an_index():
    assert show_box(((0, 8), (384, 512), (3, 4)), (8, 512, 128)) == "[:, 384:512, 3]"
