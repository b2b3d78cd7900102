"""Where a cluster is: what `--on` and the options for TLS name, checked before anything runs."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from ckpt_conformance.contract.requests import RequestError

if TYPE_CHECKING:
    from pathlib import Path

MOST_WORKERS = 1024  # of one machine
MOST_PORTS = 65535
FORMS = "dask://HOST:PORT, tls://HOST:PORT, or local:N"


@dataclass(frozen=True)
class Tls:
    """Files in PEM: who is trusted, and what this client shows of itself."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Raise RequestError for a file that cannot be read."""
        named = {"--tls-ca": self.ca, "--tls-cert": self.certificate, "--tls-key": self.key}
        for option, path in named.items():
            try:
                if path is not None:
                    path.read_bytes()
            except OSError as error:
                reason = f"{option} {path} cannot be read: {error.strerror}"
                raise RequestError(f"{reason}; name a file in PEM") from error

    def __bool__(self) -> bool:
        """Return whether anything is named."""
        return any((self.ca, self.certificate, self.key))


@dataclass(frozen=True)
class Place:
    """A scheduler's address, or a number of workers to start on this machine."""

    name: str  # as the user wrote it
    address: str = ""  # as dask writes it
    local: int = 0
    tls: Tls = field(default_factory=Tls)

    @classmethod
    def parse(cls, text: str, tls: Tls) -> Self:
        """Read what `--on` names; raises RequestError for what is no place, and without dask."""
        place = cls._of(text, tls)
        tls.check()
        for package in ("distributed", *(["cryptography"] if place.local else [])):
            if importlib.util.find_spec(package) is None:
                raise RequestError(
                    f"--on {text} needs {package}, which is not installed; install it with: "
                    "pip install 'ckpt-conformance[cluster]'"
                )
        return place

    @classmethod
    def _of(cls, text: str, tls: Tls) -> Self:
        local = re.fullmatch(r"local:(\d{1,4})", text)
        remote = re.fullmatch(r"(dask|tcp|tls)://(\[[0-9A-Fa-f:.]+\]|[\w.-]+):(\d{1,5})", text)
        if local and 1 <= int(local[1]) <= MOST_WORKERS:
            if tls:
                raise RequestError(
                    f"--on {text} makes certificates of its own; leave out --tls-ca, --tls-cert "
                    "and --tls-key"
                )
            return cls(text, local=int(local[1]))
        if remote and 1 <= int(remote[3]) <= MOST_PORTS:
            if tls and remote[1] != "tls":
                raise RequestError(
                    f"--on {text} is not encrypted, and a file for TLS is named; write "
                    f"tls://{remote[2]}:{remote[3]}, or leave the file out"
                )
            scheme = "tls" if remote[1] == "tls" else "tcp"
            return cls(text, f"{scheme}://{remote[2]}:{remote[3]}", tls=tls)
        raise RequestError(f"--on {text!r} is no cluster; it may be {FORMS}")
