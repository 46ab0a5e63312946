"""Certificates of a cluster: its own authority signs the key of each process, and TLS accepts no others.

Connections are TLS 1.3 with certificates on both sides. A certificate has one name, `head`, `server-2`, `rank-0` or a
process's mark; the part before the first `-` is its role. Keys and certificates are made by `openssl`.
"""

import contextlib
import os
import secrets
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from moetool.base.errors import MoetoolError, UsageError, first_line

_YEARS = 10
_SKEW = timedelta(days=2)  # clocks of hosts may differ
_OPENSSL_S = 30.0

_CONFIG = """[req]
distinguished_name=subject
[subject]
[ca]
default_ca=files
[files]
database=issued
serial=serial
new_certs_dir=.
default_md=sha256
policy=names
unique_subject=no
[names]
commonName=supplied
[authority]
basicConstraints=critical,CA:TRUE
keyUsage=critical,keyCertSign
subjectKeyIdentifier=hash
[process]
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth,clientAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
subjectAltName=DNS:{name}
[alone]
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
subjectAltName=DNS:{name}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process's key and certificate.

    Attributes:
        name: name in the certificate, e.g. `server-2`.
        certificate, key: PEM.
        authority: certificate that signs those of accepted peers, PEM.
    """

    name: str
    certificate: str
    key: str = field(repr=False)
    authority: str

    def calling(self, certificate: str = "") -> ssl.SSLContext:
        """Return TLS settings for connections that this process opens.

        Args:
            certificate: the only accepted one (default: any signed by the authority).

        Raises:
            MoetoolError: a certificate or the key is damaged.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT, certificate or self.authority)

    def answering(self) -> ssl.SSLContext:
        """Return TLS settings for connections that this process accepts. Raises: as `calling`."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER, self.authority)
        context.num_tickets = 0  # no session is resumed
        return context

    def _context(self, protocol: int, accepted: str) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=accepted)
            with _as_file(self.certificate) as certificate, _as_file(self.key) as key:
                context.load_cert_chain(certificate, key)
        except (OSError, ValueError) as error:
            raise MoetoolError(f"cannot use the certificate or key of {self.name} ({first_line(error)})") from None
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Certificate authority of one cluster.

    Attributes:
        certificate, key: PEM.
    """

    certificate: str
    key: str = field(repr=False)

    @classmethod
    def new(cls) -> "Authority":
        """Create an authority. Raises: UsageError: openssl is not installed; MoetoolError: openssl fails."""
        with _Openssl("cluster") as made:
            made.request()
            return cls(certificate=made.sign("authority", "-selfsign", "-keyfile", "key"), key=made.read("key"))

    def issue(self, name: str, *, starts: datetime | None = None, ends: datetime | None = None) -> Identity:
        """Make a key and its certificate.

        Args:
            starts, ends: validity (default: two days ago, for ten years).

        Raises:
            UsageError, MoetoolError: see `new`.
        """
        with _Openssl(name, starts, ends) as made:
            made.request()
            made.write("authority.pem", self.certificate)
            made.write("authority.key", self.key)
            certificate = made.sign("process", "-cert", "authority.pem", "-keyfile", "authority.key")
            return Identity(name=name, certificate=certificate, key=made.read("key"), authority=self.certificate)


def self_signed(name: str, authority: str) -> Identity:
    """Make a process's own key and certificate; the key never leaves the process.

    Callers accept exactly this certificate (`Identity.calling`).

    Args:
        authority: certificate that signs those of its callers, PEM.

    Raises:
        UsageError, MoetoolError: see `Authority.new`.
    """
    with _Openssl(name) as made:
        made.request()
        certificate = made.sign("alone", "-selfsign", "-keyfile", "key")
        return Identity(name=name, certificate=certificate, key=made.read("key"), authority=authority)


def role_of(name: str) -> str:
    return name.partition("-")[0]


def number_of(name: str) -> int:
    """Return the number in a certificate name; -1 if there is none."""
    number = name.partition("-")[2]
    return int(number) if number.isdecimal() and number.isascii() else -1


class _Openssl:
    """Calls `openssl` in a temporary folder, removed at the end."""

    def __init__(self, name: str, starts: datetime | None = None, ends: datetime | None = None) -> None:
        now = datetime.now(UTC)
        self._name = name
        self._dates = (starts or now - _SKEW, ends or now + timedelta(days=365 * _YEARS))
        self._folder = Path()

    def __enter__(self) -> "_Openssl":
        self._folder = Path(tempfile.mkdtemp(prefix="moetool-certificate-"))  # mode 700
        for file, text in (
            ("config", _CONFIG.format(name=self._name)),
            ("issued", ""),
            ("serial", secrets.token_hex(8)),
        ):
            self.write(file, text)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, file: str, text: str) -> None:
        (self._folder / file).write_text(text, encoding="ascii")

    def read(self, file: str) -> str:
        return (self._folder / file).read_text(encoding="ascii")

    def request(self) -> None:
        """Create a key and a certificate request."""
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        subject = ("-subj", f"/CN={self._name}", "-config", "config")
        self._call("req", "-new", *curve, *subject, "-keyout", "key", "-out", "request")

    def sign(self, kind: str, *signer: str) -> str:
        starts, ends = (date.strftime("%Y%m%d%H%M%SZ") for date in self._dates)
        dates = ("-startdate", starts, "-enddate", ends)
        files = ("-in", "request", "-out", "certificate", "-config", "config", "-extensions", kind)
        self._call("ca", "-batch", "-notext", *dates, *files, *signer)
        return self.read("certificate")

    def _call(self, *arguments: str) -> None:
        try:
            done = subprocess.run(
                ["openssl", *arguments],
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_OPENSSL_S,
                check=False,
            )
        except FileNotFoundError:
            raise UsageError(
                "openssl is not installed, but a cluster's certificates need it; install it, e.g. with: "
                "apt install openssl"
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MoetoolError(f"cannot run openssl {arguments[0]} ({error})") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise MoetoolError(f"openssl {arguments[0]} failed: {lines[-1]}")


@contextlib.contextmanager
def _as_file(text: str) -> Iterator[str]:
    """Yield a path from which `text` can be read once, without storing it on disk."""
    out, into = os.pipe()
    try:
        os.write(into, text.encode())  # a pipe takes 64 KiB at once
        os.close(into)
        yield f"/dev/fd/{out}"
    finally:
        os.close(out)
