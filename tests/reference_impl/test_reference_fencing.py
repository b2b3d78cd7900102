"""Two live writers of one run, a requeued job and its zombie: only the newest commits."""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import s3_stores
import torch
from s3_stores import BUCKET
from test_reference_job import listing, same
from test_reference_retention import manager, small
from test_reference_url_mirror import QUICKLY, brought_back

from ckpt_conformance.reference_impl import (
    CheckpointManager,
    UrlMirror,
    WriterFenced,
    mirror_at,
)
from ckpt_conformance.reference_impl.fencing import AtUrl, Claim, InDirectory, newest_claim
from ckpt_conformance.trace.requests import Action

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_conformance.trace.requests import StoreRequest

pytestmark = [s3_stores.quiet, pytest.mark.xdist_group("mirror-s3")]
RUN = "0" * 32


def bucket_at(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give a place in an empty bucket of a server."""
    s3_stores.lead_to(store, monkeypatch)
    s3_stores.emptied()
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=s3_stores.BOTH)
def store(request: pytest.FixtureRequest) -> str:
    return s3_stores.endpoint(request.param)


@pytest.fixture(params=["directory", "memory", *s3_stores.BOTH])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place of each kind that nobody has used."""
    if request.param == "directory":
        return str(tmp_path / "mirror")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if s3_stores.MISSING:
        pytest.skip(s3_stores.NEEDS)
    return bucket_at(s3_stores.endpoint(request.param), monkeypatch)


def writer(root: Path, place: str, **given: Any) -> CheckpointManager:  # noqa: ANN401
    """A process of the run that saves to a node's own disk, and mirrors to a shared place."""
    return manager(root, mirror=mirror_at(place), run_id=RUN, **given)


def there(place: str, folder: Path) -> Path:
    return brought_back(place if "://" in place else f"file://{place}", folder)


def test_who_was_replaced_uploads_nothing_more(tmp_path: Path, place: str) -> None:
    """Its step stays on its own disk; its next save tells it, in type."""
    zombie = writer(tmp_path / "node1", place, keep_last=1)
    zombie.save(1, **small())
    zombie.close()
    new = writer(tmp_path / "node2", place)
    new.save(2, **small())
    new.close()
    zombie.save(3, **small())
    zombie.close()
    with pytest.raises(WriterFenced, match="writer_000002 is there, and this process had claimed"):
        zombie.save(4, **small())
    assert zombie.steps() == [3]
    assert not [name for name in listing(tmp_path / "node1") if name.startswith("receipt_000003")]
    found = there(place, tmp_path / "there")
    assert manager(found).steps() == [1, 2]
    assert (found / "latest").read_text() == "meta_000002.json\n"


def test_a_process_after_another_one_goes_on(tmp_path: Path, place: str) -> None:
    """A restart is no zombie: each process claims the next number, and saves the step anew."""
    root = tmp_path / "root"
    for _ in range(3):
        one = writer(root, place, keep_last=0)
        one.save(1, **small())
        one.close()
    found = there(place, tmp_path / "there")
    assert (found / "meta_000001.json").read_bytes() == (root / "meta_000001.json").read_bytes()
    assert [name for name in listing(found) if name.startswith("writer")] == [
        *("writer_000001", "writer_000002", "writer_000003")
    ]


def test_a_mirror_that_is_not_required_stops_no_save(tmp_path: Path) -> None:
    place = str(tmp_path / "mirror")
    zombie = manager(tmp_path / "node1", mirror=mirror_at(place, required=False), run_id=RUN)
    zombie.save(1, **small())
    zombie.close()
    new = writer(tmp_path / "node2", place)
    new.save(2, **small())
    new.close()
    zombie.save(3, **small())
    zombie.close()
    zombie.save(4, **small())
    assert zombie.steps() == [3, 4]


@s3_stores.needed
@pytest.mark.parametrize("held", ["model_000001.pt", "meta_000001.json", "latest"])
def test_a_request_that_was_under_way_is_refused(
    tmp_path: Path, store: str, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zombie had asked, and was the writer then; its request comes to the store too late."""
    s3 = bucket_at(store, monkeypatch)
    came, go = threading.Event(), threading.Event()

    def before(request: StoreRequest) -> None:
        if request.action is Action.PUT and request.key.endswith(f"/{held}"):
            came.set()
            assert go.wait(60)

    def job(seed: int) -> dict[str, torch.nn.Module]:
        torch.manual_seed(seed)
        return {"model": torch.nn.Linear(4, 4)}

    with s3_stores.proxied(store, tmp_path / "recorded", before=before) as proxy:
        options = {"endpoint_url": proxy.endpoint}
        late = UrlMirror(s3, retries=QUICKLY, storage_options=options)
        zombie = manager(tmp_path / "node1", mirror=late, run_id=RUN)
        zombie.save(1, **job(1))
        assert came.wait(60)
        new = writer(tmp_path / "node2", s3)
        new.save(1, **job(2))
        new.close()
        before_it = there(s3, tmp_path / "before")
        go.set()
        zombie.close()
        refused = [one.status for one in proxy.requests if one.key.endswith(f"/{held}")]
        assert 412 in refused
    assert isinstance(late.fenced, WriterFenced)
    found = there(s3, tmp_path / "there")
    assert {name: (found / name).read_bytes() for name in listing(found)} == {
        name: (before_it / name).read_bytes() for name in listing(before_it)
    }
    module = torch.nn.Linear(4, 4)
    assert CheckpointManager(found).load(model=module).step == 1
    assert same(module.state_dict(), job(2)["model"].state_dict())


# ---- a root of one's own -----------------------------------------------------------------------


def test_an_exclusive_root_has_one_writer(tmp_path: Path) -> None:
    """A zombie's next save raises; what its successor has saved is untouched."""
    root = tmp_path / "root"
    zombie = manager(root, exclusive=True)
    zombie.save(1, **small())
    new = manager(root, exclusive=True)
    new.save(2, **small())
    before = {name: (root / name).read_bytes() for name in listing(root)}
    with pytest.raises(WriterFenced):
        zombie.save(3, **small())
    assert {name: (root / name).read_bytes() for name in listing(root)} == before
    new.save(3, **small())
    assert new.steps() == [2, 3]


@pytest.mark.parametrize("kind", ["model", "dcp"])
def test_a_save_that_was_under_way_is_not_committed(tmp_path: Path, kind: str) -> None:
    """The successor comes while the zombie writes its files."""
    root = tmp_path / "root"

    class Slow(type(manager(root))):  # type: ignore[misc]
        def write(self, *given: Any) -> Path:  # noqa: ANN401
            staged: Path = super().write(*given)
            if self.steps() == [1]:
                manager(root, kind, exclusive=True).save(2, **small())
            return staged

    zombie = Slow(root, use_dcp=kind == "dcp", exclusive=True)
    zombie.save(1, **small())
    latest = ""
    with pytest.raises(WriterFenced):
        zombie.save(2, **small())
    latest = (root / "latest").read_text()
    assert "000002" in latest
    assert CheckpointManager(root).load(**small()).step == 2
    assert zombie.steps() == [1, 2]
    assert not [name for name in listing(root) if name.endswith(".tmp")]


def test_without_it_two_processes_save_by_turns(tmp_path: Path) -> None:
    one, other = manager(tmp_path), manager(tmp_path)
    for step, by in enumerate((one, other, one, other), 1):
        by.save(step, **small())
    assert one.steps() == [3, 4]


# ---- claims ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 9, 100])
def test_the_newest_claim_is_found_by_few_questions(count: int) -> None:
    asked: list[int] = []

    def is_there(number: int) -> bool:
        asked.append(number)
        return number <= count

    assert newest_claim(is_there) == count
    assert len(asked) <= 16


def test_many_who_claim_at_once_get_numbers_of_their_own(tmp_path: Path, place: str) -> None:
    if "://" in place:
        where: Any = AtUrl(fsspec.core.url_to_fs(place)[0], place)
    else:
        where = InDirectory(tmp_path)
    claims = [Claim(where, place) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda one: one.take(RUN), claims))
    assert sorted(one.epoch for one in claims) == [1, 2, 3, 4, 5, 6]
    newest = next(one for one in claims if one.epoch == 6)
    newest.require()
    for one in claims:
        if one is not newest:
            with pytest.raises(WriterFenced):
                one.require()


def test_an_answer_to_a_claim_that_was_lost_is_known_by_what_it_says() -> None:
    """The client asks again, and meets its own claim."""

    class Lossy:
        def __init__(self) -> None:
            self.held: dict[str, bytes] = {}

        def create(self, name: str, data: bytes) -> None:
            if name in self.held:
                raise FileExistsError(name)
            self.held[name] = data
            raise FileExistsError("one's own, as the client's next try sees it")

        def has(self, name: str) -> bool:
            return name in self.held

        def read(self, name: str) -> bytes | None:
            return self.held.get(name)

    place = Lossy()
    first, second = Claim(place, "x"), Claim(place, "x")
    first.take(RUN)
    second.take(RUN)
    assert (first.epoch, second.epoch) == (1, 2)
