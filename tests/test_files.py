import pytest

from gptoss_debug.errors import GptOssDebugError
from gptoss_debug.files import new_directory, write_text


def test_a_directory_appears_only_when_done(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_directory(target) as partial:
        (partial / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error), new_directory(tmp_path / "out") as partial:
        (partial / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_on_request(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("x")
    with pytest.raises(GptOssDebugError, match="holds files already"), new_directory(tmp_path / "out"):
        pass
    with pytest.raises(ValueError, match="stop"), new_directory(tmp_path / "out", replace=True):
        raise ValueError("stop")
    assert (tmp_path / "out" / "old").exists()
    with new_directory(tmp_path / "out", replace=True) as partial:
        (partial / "new").write_text("x")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_links_and_places_that_cannot_be_written(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with new_directory(tmp_path / "link") as partial:
        (partial / "file").write_text("x")
    assert (tmp_path / "real" / "file").exists()
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "plain").write_text("x")
    with pytest.raises(GptOssDebugError, match="cannot be written"), new_directory(tmp_path / "plain" / "out"):
        pass


def test_a_text_is_replaced_whole(tmp_path):
    write_text(tmp_path / "a" / "text", "one")
    write_text(tmp_path / "a" / "text", "two")
    assert (tmp_path / "a" / "text").read_text() == "two"
    assert len(list((tmp_path / "a").iterdir())) == 1
