"""Fsck on a real S3 endpoint: moto serves the protocol on loopback, s3fs speaks it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import fsck_corpus
import megatron_layouts
import pytest
import s3_stores
from s3_stores import BUCKET, client
from test_cli_fsck import cli
from typer.testing import CliRunner

from ckpt_conformance.cli.disk import app
from ckpt_conformance.contract import trees
from ckpt_conformance.contract.requests import RequestError
from ckpt_conformance.fsck.diff.diff import diff
from ckpt_conformance.fsck.judge.judge import Options, judge
from ckpt_conformance.fsck.source.findings import State
from ckpt_conformance.fsck.source.places import place

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.xdist_group("fsck-s3"), s3_stores.needed, s3_stores.quiet]


@pytest.fixture(scope="module", params=s3_stores.BOTH)
def endpoint(request: pytest.FixtureRequest) -> str:
    return s3_stores.endpoint(request.param)


@pytest.fixture(autouse=True)
def account(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_stores.lead_to(endpoint, monkeypatch)


def upload(root: Path, prefix: str) -> str:
    s3 = s3_stores.with_bucket()
    for path in trees.files(root):
        name = f"{prefix}/{path.relative_to(root).as_posix()}"
        s3.put_object(Bucket=BUCKET, Key=name, Body=path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the reference manager."""
    return fsck_corpus.write("reference-dcp", tmp_path_factory.mktemp("s3") / "run")


@pytest.mark.parametrize("layout", ["dcp", "hf-index", "reference"])
def test_each_format_is_judged_as_on_a_path(layout: str, tmp_path: Path) -> None:
    root = fsck_corpus.write(layout, tmp_path / "run")
    url = upload(root, layout)
    far, near = judge(place(url), Options(jobs=4)), judge(root)
    assert far.state is State.WHOLE
    for report in (*far.reports, *near.reports):
        assert report.changed
        report.changed = None  # what was uploaded is younger
    said, expected = json.dumps(far.to_json()), json.dumps(near.to_json())
    assert said.replace(url, ".") == expected.replace(str(root), ".")


@pytest.mark.slow
def test_verls_manifest_is_followed(tmp_path: Path) -> None:
    url = upload(megatron_layouts.v2_sharded(tmp_path / "run"), "verl")
    assert judge(place(url)).state is State.WHOLE
    step = f"verl/global_step_{megatron_layouts.STEP}/actor"
    client().delete_object(Bucket=BUCKET, Key=f"{step}/extra/dist_ckpt/common.pt")
    (report,) = judge(place(url)).reports
    assert [one.file for one in report.findings] == ["actor/extra/dist_ckpt/common.pt"]


def test_a_gate_prints_the_url_of_the_newest_whole_one(run: Path) -> None:
    url = upload(run, "gate")
    done = cli("fsck", url, "--newest-whole")
    assert (done.stdout, done.returncode) == (f"{url}/dcp_000005\n", 0), done.stderr
    key = "gate/dcp_000005/__0_0.distcp"
    data = bytearray(client().get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 1
    client().put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    command = ["fsck", url, "--newest-whole"]
    assert CliRunner().invoke(app, command).stdout == f"{url}/dcp_000002\n"
    assert CliRunner().invoke(app, ["fsck", url]).exit_code == 1
    assert CliRunner().invoke(app, ["fsck", f"{url}/dcp_000002"]).exit_code == 0


def test_a_mark_of_a_folder_is_no_file(run: Path) -> None:
    """Consoles put an empty object under the name of a folder."""
    url = upload(run, "marked")
    for key in ("marked/", "marked/dcp_000005/"):
        client().put_object(Bucket=BUCKET, Key=key, Body=b"")
    assert [one.findings for one in judge(place(url)).reports] == [[], []]


@pytest.mark.slow
def test_a_run_on_s3_is_compared_with_one_on_disk(run: Path) -> None:
    compared = diff(place(upload(run, "diff") + "/dcp_000005"), run / "dcp_000005")
    assert compared.is_judged
    assert not compared.differences


def test_no_bucket_and_no_server_are_usage_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="s3://no-such-bucket/run does not exist"):
        CliRunner().invoke(app, ["fsck", "s3://no-such-bucket/run"], catch_exceptions=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("FSSPEC_S3", '{"config_kwargs": {"connect_timeout": 1}}')
    with pytest.raises(RequestError, match="try again"):
        judge(place(f"s3://{BUCKET}/run"))
