"""Where a cluster is: what `--on` and the options for TLS name, checked before anything runs."""

from __future__ import annotations

import importlib.util
import re
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

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
        """Read what `--on` names; raises RequestError for what is no place, and without dask.

        So it does, too, where it is to be reached by TLS and no certificates are there to do so.
        """
        place = cls._of(text, tls)
        tls.check()
        for package in ("distributed", *(["cryptography"] if place.local else [])):
            if importlib.util.find_spec(package) is None:
                raise RequestError(
                    f"--on {text} needs {package}, which is not installed; install it with: "
                    "pip install 'ckpt-conformance[cluster]'"
                )
        if place.is_encrypted:
            place.security()
        return place

    @property
    def is_encrypted(self) -> bool:
        """Whether the scheduler at the address speaks TLS."""
        return self.address.startswith("tls:")

    def security(self) -> Any:  # noqa: ANN401  a distributed.Security
        """Return how the client is let in: by the files named, or those of dask's configuration.

        Raises RequestError where that takes certificates and they are missing, or do not read.
        dask itself would find out in a thread that it then waits for.
        """
        import distributed

        files = {
            "tls_ca_file": self.tls.ca,
            "tls_client_cert": self.tls.certificate,
            "tls_client_key": self.tls.key,
        }
        named = {name: str(path) for name, path in files.items() if path is not None}
        untyped: Any = distributed  # it annotates only a part of itself
        security = untyped.Security(require_encryption=self.is_encrypted, **named)
        if self.is_encrypted:
            self._check(security)
        return security

    def _check(self, security: Any) -> None:  # noqa: ANN401  a distributed.Security
        """Raise RequestError if the certificates are not all there, or cannot be used."""
        used = {
            "--tls-ca": security.tls_ca_file,
            "--tls-cert": security.tls_client_cert,
            "--tls-key": security.tls_client_key,
        }
        missing = [name for name in ("--tls-ca", "--tls-cert") if not used[name]]
        if missing:
            raise RequestError(
                f"--on {self.name} is reached by TLS, and there is no {' and no '.join(missing)}; "
                f"{_CERTIFICATES}"
            )
        try:
            security.get_connection_args("client")
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            files = ", ".join(f"{name} {path}" for name, path in used.items() if path)
            raise RequestError(
                f"--on {self.name}: the certificates cannot be used: {_reason(error)} ({files}); "
                f"{_CERTIFICATES}"
            ) from error

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


_CERTIFICATES = (
    "name files in PEM: whom to trust by --tls-ca, this client's certificate by --tls-cert, its "
    "key by --tls-key; or set ca-file, client.cert and client.key of distributed.comm.tls in "
    "dask's configuration"
)


def _reason(error: OSError | ValueError) -> str:
    """Say why, without the place in the source of Python that OpenSSL's errors name."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return (isinstance(error, OSError) and error.strerror) or str(error)
