"""The TLS files of a job: checked if the user gives them, else made.

A job sends its token with every call, and anyone who can read the network could read it. So a job on several hosts has
a directory ``tls`` in its run directory, made by its first process: a certificate authority, whose key is deleted at
once, and one certificate for all processes. The directory is as secret as the token: a process that may read the run
directory's secrets counts as one of the job's.
"""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import ssl
import tempfile
from pathlib import Path

from spare_megatron.config.errors import ConfigError
from spare_megatron.config.host_port import split_address
from spare_megatron.runtime.disk import with_retries, words

TLS_NAME = "spare-megatron"
"""The name in the certificate, which is that of every process on every host."""
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
NO_TLS = "none"
"""In place of a directory: no TLS, whatever the run directory has."""
_VALID = datetime.timedelta(days=3 * 365)
_EARLIER = datetime.timedelta(days=1)
"""Clocks of hosts differ."""


def tls_of(run_dir: Path, given: str) -> str:
    """The TLS directory of a job's processes: the one that is ``given``, else that of the run directory; empty where
    there is none, or NO_TLS is given."""
    if given == NO_TLS:
        return ""
    own = run_dir / "tls"
    return given or (str(own) if own.is_dir() else "")


def is_loopback(listen: str) -> bool:
    """Whether only processes of this host reach a server that listens on host:port ``listen``."""
    host = listen.rpartition(":")[0].strip("[]")
    return host in ("localhost", "::1") or host.startswith("127.")


def make_tls(run_dir: Path) -> None:
    """Make the directory ``tls`` of a run directory, unless it is there. Waits for a disk that fails for a while;
    raises ConfigError where it cannot be written."""
    try:
        with_retries(lambda: _make(run_dir))
    except OSError as error:
        raise ConfigError(f"the files for TLS cannot be made in {run_dir}: {words(error)}") from None


def _make(run_dir: Path) -> None:
    own = run_dir / "tls"
    if own.is_dir():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tls-", dir=run_dir))  # mode 0700
    try:
        for name, text in zip(TLS_FILES, _certificates(), strict=True):
            handle = os.open(scratch / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        try:
            scratch.rename(own)
        except OSError:
            if not own.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_tls(directory: str) -> None:
    """Raises ConfigError where processes with these files cannot speak with each other: one is missing or no PEM file,
    the certificate has expired, is not signed by the authority or has another name."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    texts = {}
    for name in TLS_FILES:
        try:
            texts[name] = (Path(directory) / name).read_bytes()
        except OSError as error:
            why = f"{name} is not in" if isinstance(error, FileNotFoundError) else f"{name} cannot be read in"
            raise ConfigError(f"{why} the TLS directory {directory}; it needs {', '.join(TLS_FILES)}") from None
    make = f"give another --tls-dir, or remove {directory} where it is that of a run directory: the next start makes it"
    name = ""
    try:
        name = "ca.pem"
        authority = x509.load_pem_x509_certificate(texts[name])
        name = "cert.pem"
        own = x509.load_pem_x509_certificate(texts[name])
        name = "key.pem"
        key = load_pem_private_key(texts[name], None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{Path(directory) / name} cannot be used: {str(error).splitlines()[0]}; {make}") from None
    now = _now()
    for name, one in (("ca.pem", authority), ("cert.pem", own)):
        if not one.not_valid_before_utc <= now <= one.not_valid_after_utc:
            raise ConfigError(
                f"{Path(directory) / name} is valid from {one.not_valid_before_utc:%Y-%m-%d} to "
                f"{one.not_valid_after_utc:%Y-%m-%d}, and this host's date is {now:%Y-%m-%d}; {make}"
            )
    if own.public_key() != key.public_key():
        raise ConfigError(f"key.pem in {directory} is not the key of cert.pem; {make}")
    try:
        own.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(f"cert.pem in {directory} is not signed by its ca.pem; {make}") from None
    try:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        known = []
    if TLS_NAME not in known:
        raise ConfigError(f"cert.pem in {directory} is for {known or 'no name'}, and must be for {TLS_NAME}; {make}")


def tls_fault(address: str, directory: str, timeout_s: float) -> str:
    """Why a process with the files of ``directory`` (empty: without TLS) can never speak with the server at host:port
    ``address``, with the fix: gRPC itself only finds no answer. Empty where nothing certain is found within
    ``timeout_s`` for each of two waits."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if directory:
        ca, cert, key = (str(Path(directory) / name) for name in TLS_FILES)
        context.load_verify_locations(ca)
        context.load_cert_chain(cert, key)
    else:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    give = "give the --tls-dir of the coordinator"
    try:
        with socket.create_connection(split_address(address), timeout_s) as plain:
            context.wrap_socket(plain, server_hostname=TLS_NAME).close()
    except ssl.SSLCertVerificationError as error:
        return f"{address} has a certificate that does not fit ca.pem in {directory} ({error.verify_message}); {give}"
    except ssl.SSLError as error:
        if directory and error.reason == "WRONG_VERSION_NUMBER":
            return f"{address} speaks no TLS, and this process does, with {directory}; {give}, or none"
        return ""
    except OSError:
        return ""
    return "" if directory else f"{address} speaks TLS, and this process has no files for it; {give}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _certificates() -> tuple[bytes, bytes, bytes]:
    """(ca.pem, cert.pem, key.pem)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    now = _now()

    def begun(subject: str, issuer: str) -> x509.CertificateBuilder:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, issuer)]
        made = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1])
        made = made.serial_number(x509.random_serial_number())
        return made.not_valid_before(now - _EARLIER).not_valid_after(now + _VALID)

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = f"{TLS_NAME} job"
    authority = begun(issuer, issuer).public_key(authority_key.public_key())
    authority = authority.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    own = begun(TLS_NAME, issuer).public_key(key.public_key())
    own = own.add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    signed = [one.sign(authority_key, hashes.SHA256()).public_bytes(Encoding.PEM) for one in (authority, own)]
    return *signed, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[return-value]
